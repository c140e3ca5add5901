#!/bin/sh
# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
# A custom plugin of Kubernetes' node-problem-detector, for node-problem-detector.json. That has other statuses than
# Nagios: 0 no problem, 1 a problem, 2 not known. A node that is merely slower than it can be stays in service: a
# warning is none.
line=$(peermemctl doctor --nagios)
status=$?
echo "$line"
case $status in
0 | 1) exit 0 ;;
2) exit 1 ;;
*) exit 2 ;;
esac
