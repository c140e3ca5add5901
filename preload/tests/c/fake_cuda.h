/* SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause */
/* Knobs and counters of fake_cuda.c. */
struct fake_cuda {
	/* Result of an export, and of an export that is not mapped over PCIe. */
	int export_code, default_code;
	/* Questions about addresses need a current context. */
	int needs_context;
	/* Allocations have no context, like those of cuMemCreate. */
	int is_virtual;
	long exports, questions, retained, depth;
	/* Exports without the context of the memory. */
	long strangers;
};
