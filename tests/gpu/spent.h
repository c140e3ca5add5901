/* SPDX-License-Identifier: GPL-2.0 OR MIT */
/*
 * How often clients call the stand-in, and what its part of their time is.
 *
 * The clock is the processor's cycle counter, read where a call comes in and
 * where it returns. Read by tests/bench, which takes it off what a client's
 * functions take; nothing of the real driver corresponds to it.
 */
#ifndef _STANDIN_SPENT_H_
#define _STANDIN_SPENT_H_

#include <linux/atomic.h>

enum spent_on {
	SPENT_PIN,
	SPENT_UNPIN,
	SPENT_MAP,
	SPENT_UNMAP,
	SPENT_NOTHING,		/* the calls that do nothing */
	NR_SPENT,
};

/**
 * struct standin_spent - since the module was loaded
 * @calls: calls that have returned, by kind
 * @cycles: theirs, of all threads together
 * @inside: threads that are in such a call now
 */
struct standin_spent {
	atomic64_t calls[NR_SPENT];
	atomic64_t cycles[NR_SPENT];
	atomic_t inside;
};

extern struct standin_spent standin_spent;

#endif /* _STANDIN_SPENT_H_ */
