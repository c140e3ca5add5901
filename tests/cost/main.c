// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/*
 * Makes registrations with our module, or with NVIDIA's nvidia-peermem, in a
 * user process. callgrind counts the instructions. tests/runner/src/cost.rs
 * builds this program and reads its output.
 *
 * Before each counted registration, the program makes an uncounted registration
 * of the same kind. In the first registration, the module finds and remembers
 * the GPU.
 *
 * The arguments are the module, ours or nvidia, and the mode, persistent or
 * revocable. callgrind writes a dump for each callback of each registration,
 * named "<shape> <callback>". Standard output has these lines:
 *
 *	module <start> <end>		addresses of the module's instructions
 *	kernel <start> <end>		addresses of the kernel's objects
 *	calls <shape> <service> <times>	calls during a registration
 *	holds <shape> <what> <number>	objects that a registration holds
 */

#include <malloc.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include <valgrind/callgrind.h>

#include "cost.h"

/* The kernel's code does not align the stack as the C library requires. */
#define HOST __attribute__((force_align_arg_pointer))

#define KIB	(1UL << 10)
#define GIB	(1UL << 30)
#define PAGE	(64 * KIB)

static const struct cost_shape shapes[] = {
	{ "64KiB", PAGE, PAGE, 1 },
	{ "1GiB-contiguous", GIB, PAGE, 1 },
	{ "1GiB-fragmented", GIB, 2 * PAGE, GIB / PAGE },
	{ "64KiB-revoked", PAGE, PAGE, 1, .is_revoked = 1 },
};

/* The current mode, shape and callback. */
static const char *mode, *shape = "-", *callback = "-";

static _Noreturn void fail(void)
{
	fprintf(stderr, " (%s, %s, %s)\n", mode, shape, callback);
	_exit(1);
}

HOST void host_fail(const char *what, long value)
{
	fprintf(stderr, "%s: %ld", what, value);
	fail();
}

HOST void *host_alloc(unsigned long size, unsigned long align)
{
	void *memory = memalign(align < 16 ? 16 : align, size);

	if (!memory)
		host_fail("no memory", size);
	return memory;
}

HOST void *host_realloc(void *old, unsigned long size)
{
	void *memory = realloc(old, size);

	if (!memory)
		host_fail("no memory", size);
	return memory;
}

HOST void host_free(void *memory)
{
	free(memory);
}

/* Prints the undefined symbol that was used, or another error. */
HOST static void on_fault(int number, siginfo_t *info, void *ucontext)
{
	char *at = info->si_addr;

	if (at >= __start_cost_missing && at < __stop_cost_missing)
		fprintf(stderr, "tests/cost/services.c has no %s, which is used",
			cost_missing_names[(at - __start_cost_missing) / COST_MISSING_SIZE]);
	else
		fprintf(stderr, "%s at %p", strsignal(number), at);
	fail();
}

static void catch_faults(void)
{
	static const int numbers[] = { SIGSEGV, SIGBUS, SIGILL, SIGTRAP, SIGFPE };
	struct sigaction action = {
		.sa_sigaction = on_fault,
		.sa_flags = SA_SIGINFO,
	};

	for (size_t i = 0; i < sizeof(numbers) / sizeof(*numbers); i++)
		sigaction(numbers[i], &action, NULL);
	if (mprotect(__start_cost_missing, __stop_cost_missing - __start_cost_missing,
		     PROT_NONE))
		host_fail("mprotect", -1);
}

static void registration(const struct cost_shape *what, int counted)
{
	const struct cost_callback *next;

	cost_begin(what);
	next = what->is_revoked ? cost_revoked : cost_deregistered;
	for (; next->name; next++) {
		char title[64];

		callback = next->name;
		snprintf(title, sizeof(title), "%s %s", shape, callback);
		CALLGRIND_ZERO_STATS;
		next->call();
		if (counted)
			CALLGRIND_DUMP_STATS_AT(title);
		if (counted && !strcmp(callback, "get_page_size")) {
			printf("holds %s entries %ld\n", shape, cost_entries());
			printf("holds %s allocations %ld\n", shape, cost_allocations());
		}
	}
	callback = "-";
	/* The first registration keeps a reference to the GPU. */
	if (counted)
		cost_end();
}

static void registrations(int persistent)
{
	struct cost_call *call;

	for (size_t i = 0; i < sizeof(shapes) / sizeof(*shapes); i++) {
		if (shapes[i].is_revoked && persistent)
			continue;
		shape = shapes[i].name;
		registration(&shapes[i], 0);
		for (call = __start_cost_calls; call < __stop_cost_calls; call++)
			call->count = 0;
		registration(&shapes[i], 1);
		for (call = __start_cost_calls; call < __stop_cost_calls; call++)
			if (call->count)
				printf("calls %s %s %lu\n", shape, call->name, call->count);
	}
}

/*
 * memcpy() runs other code if the low bits of addresses differ, and the stack's
 * address depends on the environment. main() has a variable of this type, which
 * aligns its frame.
 */
struct aligned {
	_Alignas(4096) char first;
};

int main(int argc, char **argv)
{
	const char *whose = argc > 2 ? argv[1] : "";
	struct aligned aligned = { 0 };
	int is_ours, persistent;

	asm("" : : "r"(&aligned) : "memory");
	mode = argc > 2 ? argv[2] : "";
	is_ours = !strcmp(whose, "ours");
	persistent = !strcmp(mode, "persistent");
	if (!(is_ours || !strcmp(whose, "nvidia")) ||
	    !(persistent || !strcmp(mode, "revocable")))
		host_fail("usage: cost ours|nvidia persistent|revocable", argc);
	catch_faults();
	cost_load(is_ours, persistent);
	printf("module %p %p\n", __start_cost_module, __stop_cost_module);
	printf("kernel %p %p\n", __start_cost_kernel, __stop_cost_kernel);
	registrations(persistent);
	return 0;
}
