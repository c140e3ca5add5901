// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * The API lock. A thread that has it and comes back is refused, not
 * deadlocked: that is what a client gets that calls in from its callback.
 */
#include <linux/sched.h>

#include "nvidia.h"

static DECLARE_RWSEM(api_sem);
static struct task_struct *api_owner;

int api_lock(void)
{
	/* Nobody but current can make this equal to current. */
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
