#!/bin/sh
# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
# HealthCheckProgram= in slurm.conf: drains a node where GPUDirect RDMA does not work.
#
# slurmd runs the script as root and kills it after 60 s. slurmd ignores the status, but some
# versions repeat the script at start until the status is 0. The status is therefore always 0, and
# the script drains the node itself. A node that is already drained keeps its reason. Nothing here
# resumes a node. After a repair, run scontrol update NodeName=NODE State=RESUME.
#
# FAIL_ON=warning also drains nodes that are slower than possible.
PATH=${PATH:-/usr/sbin:/usr/bin:/sbin:/bin}
FAIL_ON=${FAIL_ON:-fault}
EXPECT=${EXPECT:-/etc/peermemctl/expect.json}
PEERMEMCTL=${PEERMEMCTL:-/usr/bin/peermemctl}
node=${SLURMD_NODENAME:-$(hostname -s)}

set -- doctor --nagios
if [ -e "$EXPECT" ]; then
	set -- "$@" --expect "$EXPECT"
fi
line=$(timeout 45 "$PEERMEMCTL" "$@")
status=$?
# A program that is too old for these options returns the same numbers, without such a line.
case $FAIL_ON:$status:$line in
*:2:"GPUDIRECT "* | warning:1:"GPUDIRECT "*) ;;
*) exit 0 ;;
esac
if scontrol --oneliner show node "$node" | grep -q 'State=[^ ]*DRAIN'; then
	exit 0
fi
# Omits the numbers for monitoring.
scontrol update "NodeName=$node" State=DRAIN "Reason=${line%% |*}; see peermemctl doctor"
exit 0
