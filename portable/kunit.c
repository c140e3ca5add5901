// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/*
 * The C side of portable/kernel/kunit.rs. This file includes shim.c, because
 * the tests are a separate module.
 */

/* shim.c must come first, because it defines pr_fmt(). */
#include "shim.c"

#include <kunit/test.h>
#include <linux/build_bug.h>
#include <linux/completion.h>
#include <linux/mm.h>
#include <linux/stddef.h>

/* kunit.rs assumes the layout of Linux 7.3. */
static_assert(sizeof(struct completion) <= 128);
static_assert(__alignof__(struct completion) <= 8);
static_assert(PAGE_SIZE == 4096);
static_assert(offsetof(struct kunit_case, run_case) == 0);
static_assert(offsetof(struct kunit_case, name) == 8);
static_assert(sizeof(struct kunit_case) == 72);
static_assert(KUNIT_SPEED_UNSET == 0);
static_assert(offsetof(struct kunit_suite, name) == 0);
static_assert(offsetof(struct kunit_suite, suite_init) == 256);
static_assert(offsetof(struct kunit_suite, test_cases) == 288);
/*
 * The kernel gets an array of pointers to suites, so its struct kunit_suite may
 * be shorter than that of kunit.rs.
 */
static_assert(sizeof(struct kunit_suite) <= 592);

void shim_completion_init(struct completion *completion)
{
	init_completion(completion);
}

void shim_completion_wait(struct completion *completion)
{
	wait_for_completion(completion);
}

void shim_complete_all(struct completion *completion)
{
	complete_all(completion);
}

void shim_kunit_fail(struct kunit *test)
{
	KUNIT_FAIL(test, "the case returned an error");
}
