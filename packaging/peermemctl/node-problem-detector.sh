#!/bin/sh
# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
# A custom plugin for Kubernetes' node-problem-detector, used by node-problem-detector.json. Its exit statuses differ
# from those of Nagios: 0 no problem, 1 a problem, 2 unknown. A node that is only slower than it could be stays in
# service: a warning is not a problem.
line=$(peermemctl doctor --nagios)
status=$?
echo "$line"
case $status in
0 | 1) exit 0 ;;
2) exit 1 ;;
*) exit 2 ;;
esac
