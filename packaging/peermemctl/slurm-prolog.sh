#!/bin/sh
# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
# Prolog= in slurm.conf: no job starts on a node where GPUDirect RDMA does not work.
#
# slurmd runs a prolog as root, without a search path, and expects it to finish within
# MessageTimeout (10 s by default). Any status except 0 drains the node and requeues the job. The
# job is held unless SchedulerParameters has nohold_on_prolog_fail. The script therefore fails only
# for findings: a node that could not be examined in time stays in service. The checks below do not
# use NVML, because NVML takes seconds to start if persistence mode is off. The reason that Slurm
# shows is only "Prolog error". The system log has the findings.
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
