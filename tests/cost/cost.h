/* SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause */
/*
 * Interface between the two parts of the program that counts instructions.
 * services.c is compiled with the kernel's headers, main.c with those of the C
 * library.
 */
#ifndef PEERMEM_COST_H
#define PEERMEM_COST_H

/* Number of calls of a function of the kernel or of nvidia.ko. */
struct cost_call {
	const char *name;
	unsigned long count;
};

/* The memory of a registration. */
struct cost_shape {
	const char *name;
	unsigned long len;
	/* Distance between the starts of two 64 KiB pages. */
	unsigned long stride;
	/* Number of entries in our module's scatter list. */
	int entries;
	/* True if the memory is freed while it is registered. */
	int is_revoked;
};

/* A callback of the client, or the freeing of the memory. */
struct cost_callback {
	const char *name;
	void (*call)(void);
};

/* services.c. Each function ends the process with a message on an error. */
void cost_load(int is_ours, int persistent);
void cost_begin(const struct cost_shape *shape);
void cost_end(void);
/* Return a registration's numbers of scatter-list entries and allocations. */
long cost_entries(void);
long cost_allocations(void);
/* Callbacks in the order of their calls. The last entry has no name. */
extern const struct cost_callback cost_deregistered[], cost_revoked[];

/*
 * Sections of the program, bounded by the linker: instructions of the module
 * and of the kernel's objects, and all counters.
 */
extern const char __start_cost_module[], __stop_cost_module[];
extern const char __start_cost_kernel[], __stop_cost_kernel[];
extern struct cost_call __start_cost_calls[], __stop_cost_calls[];

/*
 * An inaccessible page for each undefined symbol, and the symbols' names in the
 * same order. The test runner generates the pages and the names.
 */
#define COST_MISSING_SIZE	4096
extern char __start_cost_missing[], __stop_cost_missing[];
extern const char *const cost_missing_names[];

/* main.c */
void *host_alloc(unsigned long size, unsigned long align);
void *host_realloc(void *old, unsigned long size);
void host_free(void *memory);
_Noreturn void host_fail(const char *what, long value);

#endif /* PEERMEM_COST_H */
