#!/bin/sh
# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
# HealthCheckProgram= in slurm.conf: drains a node where GPUDirect RDMA does not work.
#
# slurmd runs it as root and kills it after 60 s. Its status means nothing, except that some versions of slurmd repeat
# it at their start until it is 0, so it always is; the program drains the node itself. A node that is drained already
# keeps its reason. Nothing here resumes a node: scontrol update NodeName=NODE State=RESUME does, once it is repaired.
#
# FAIL_ON=warning also drains nodes that are slower than they could be.
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
# The same numbers come from a program that is too old for these options, without such a line.
case $FAIL_ON:$status:$line in
*:2:"GPUDIRECT "* | warning:1:"GPUDIRECT "*) ;;
*) exit 0 ;;
esac
if scontrol --oneliner show node "$node" | grep -q 'State=[^ ]*DRAIN'; then
	exit 0
fi
# Without the figures for monitoring.
scontrol update "NodeName=$node" State=DRAIN "Reason=${line%% |*}; see peermemctl doctor"
exit 0
