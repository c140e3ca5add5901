#!/bin/sh
# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
# HealthCheckProgram= in slurm.conf: drains a node where GPUDirect RDMA does not work.
#
# slurmd runs the script as root and kills it after 60 s. slurmd ignores the exit status, but some
# versions of slurmd repeat the script at start until the status is 0. The status is therefore
# always 0, and the script drains the node itself. A node that is already drained keeps its reason.
# The script never resumes a node. After a repair, run scontrol update NodeName=NODE State=RESUME.
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
# A peermemctl that is too old for these options exits with the same numbers, but prints no line
# that begins with GPUDIRECT.
case $FAIL_ON:$status:$line in
*:2:"GPUDIRECT "* | warning:1:"GPUDIRECT "*) ;;
*) exit 0 ;;
esac
if scontrol --oneliner show node "$node" | grep -q 'State=[^ ]*DRAIN'; then
	exit 0
fi
# The reason omits the performance data, which follow " |".
scontrol update "NodeName=$node" State=DRAIN "Reason=${line%% |*}; see peermemctl doctor"
exit 0
