/* SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause */
/* Knobs and counters of fake_cuda.c. */
struct fake_cuda {
	/* Errors of an export, or 0: for each kind of mapping, and for the default mapping only. */
	int export_code, default_code;
	/* Queries about addresses fail if the thread has no current context. */
	int needs_context;
	/* Allocations have no context, like those of cuMemCreate. */
	int is_virtual;
	long exports, questions, retained, depth;
	/* Number of exports made while the GPU's primary context was not current. */
	long strangers;
};
