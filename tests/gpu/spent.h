/* SPDX-License-Identifier: GPL-2.0 OR MIT */
/*
 * Number of calls that clients make to the stand-in, and the time spent in
 * these calls.
 *
 * The clock is the processor's cycle counter, read at the beginning and at the
 * end of a call. tests/bench subtracts this time from the time of a client's
 * functions. The real driver has no such interface.
 */
#ifndef _STANDIN_SPENT_H_
#define _STANDIN_SPENT_H_

#include <linux/atomic.h>

enum spent_on {
	SPENT_PIN,
	SPENT_UNPIN,
	SPENT_MAP,
	SPENT_UNMAP,
	SPENT_NOTHING,		/* calls that do nothing */
	NR_SPENT,
};

/**
 * struct standin_spent - counts since the module was loaded
 * @calls: calls that have returned, by kind
 * @cycles: cycles of these calls, summed over all threads
 * @inside: threads that are in such a call now
 */
struct standin_spent {
	atomic64_t calls[NR_SPENT];
	atomic64_t cycles[NR_SPENT];
	atomic_t inside;
};

extern struct standin_spent standin_spent;

#endif /* _STANDIN_SPENT_H_ */
