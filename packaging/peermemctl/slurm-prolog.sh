#!/bin/sh
# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
# Prolog= in slurm.conf: no job starts on a node where GPUDirect RDMA does not work.
#
# slurmd runs a prolog as root, without a search path, and expects it to finish within MessageTimeout (10 s unless
# set). Any status but 0 drains the node and requeues the job, held unless SchedulerParameters has
# nohold_on_prolog_fail. So only what was found counts: a node that could not be examined in time stays in service.
# The checks named here need no NVML, whose start takes seconds where persistence mode is off. Slurm's reason is no
# more than "Prolog error"; the system log has what was found.
#
# FAIL_ON=warning also keeps jobs from nodes with a port down, a slow port or a narrow link.
PATH=/usr/sbin:/usr/bin:/sbin:/bin
FAIL_ON=${FAIL_ON:-fault}
EXPECT=${EXPECT:-/etc/peermemctl/expect.json}
PEERMEMCTL=${PEERMEMCTL:-/usr/bin/peermemctl}

set -- --fail-on "$FAIL_ON" --only expect,gpu-driver,nic-driver,port
if [ -e "$EXPECT" ]; then
	set -- "$@" --expect "$EXPECT"
fi
found=$(timeout 8 "$PEERMEMCTL" doctor "$@" 2>&1)
status=$?
if [ "$status" -eq 0 ]; then
	exit 0
fi
logger -t slurm-prolog -p daemon.err "peermemctl doctor, status $status: $found" || true
[ "$status" -ne 1 ]
