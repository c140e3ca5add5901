// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/*
 * A stand-in for libnvidia-ml.so.1, for consumers that are linked to it. The
 * stand-in reports that no driver is loaded, so these consumers use only CUDA.
 */

/* From NVML's public documentation. */
#define NVML_ERROR_DRIVER_NOT_LOADED	9

int nvmlInit_v2(void)
{
	return NVML_ERROR_DRIVER_NOT_LOADED;
}

const char *nvmlErrorString(int error)
{
	(void)error;
	return "the stand-in has no NVML";
}
