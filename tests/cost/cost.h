/* SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause */
/*
 * Between the two sides of the program that counts instructions: services.c is
 * compiled with the kernel's headers, main.c with the C library's.
 */
#ifndef PEERMEM_COST_H
#define PEERMEM_COST_H

/* How often a service of the kernel's or a provider's function was called. */
struct cost_call {
	const char *name;
	unsigned long count;
};

/* What is registered. */
struct cost_shape {
	const char *name;
	unsigned long len;
	/* From one page of 64 KiB to the next. */
	unsigned long stride;
	/* Entries of the scatter list that our module makes of it. */
	int entries;
	/* The memory is freed while it is registered. */
	int is_revoked;
};

/* One of the client's callbacks, or the end of the memory. */
struct cost_callback {
	const char *name;
	void (*call)(void);
};

/* services.c. Each ends the process with a message where something is wrong. */
void cost_load(int is_ours, int persistent);
void cost_begin(const struct cost_shape *shape);
void cost_end(void);
/* Entries of the scatter list, and allocations that a registration keeps. */
long cost_entries(void);
long cost_allocations(void);
/* In order; the last has no name. */
extern const struct cost_callback cost_deregistered[], cost_revoked[];

/*
 * Sections of the program, bounded by the linker: instructions of the module and of the
 * kernel's objects, all counters.
 */
extern const char __start_cost_module[], __stop_cost_module[];
extern const char __start_cost_kernel[], __stop_cost_kernel[];
extern struct cost_call __start_cost_calls[], __stop_cost_calls[];

/*
 * Made by the test runner: for each symbol that nobody defines a page that nobody may
 * touch, and in the same order its name.
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
