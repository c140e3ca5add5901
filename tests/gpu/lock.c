// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * The API lock. A thread that takes the lock twice gets an error, not a
 * deadlock. A client that calls nvidia.ko from its callback gets this error.
 */
#include <linux/delay.h>
#include <linux/moduleparam.h>
#include <linux/sched.h>

#include "nvidia.h"

/*
 * Imitated cost of a pin and of an unpin. The thread sleeps for this time with
 * the API lock held.
 */
static uint pin_us;
module_param(pin_us, uint, 0644);
MODULE_PARM_DESC(pin_us, "extra time for which a pin holds the API lock, in microseconds");

static uint unpin_us;
module_param(unpin_us, uint, 0644);
MODULE_PARM_DESC(unpin_us, "extra time for which an unpin holds the API lock, in microseconds");

static DECLARE_RWSEM(api_sem);
static struct task_struct *api_owner;

int api_lock(void)
{
	/* Only the current thread can set api_owner to current. */
	if (READ_ONCE(api_owner) == current)
		return -EIO;
	down_write(&api_sem);
	WRITE_ONCE(api_owner, current);
	return 0;
}

void api_unlock(void)
{
	WRITE_ONCE(api_owner, NULL);
	up_write(&api_sem);
}

static void pay(uint us)
{
	if (us)
		usleep_range(us, us + 1);
}

void api_pay_pin(void)
{
	pay(READ_ONCE(pin_us));
}

void api_pay_unpin(void)
{
	pay(READ_ONCE(unpin_us));
}
