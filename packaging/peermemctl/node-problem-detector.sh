#!/bin/sh
# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
# Custom plugin for Kubernetes' node-problem-detector, used by node-problem-detector.json. The
# plugin's exit statuses differ from those of Nagios: 0 no problem, 1 a problem, anything else
# unknown. The start of standard output becomes the condition's message. A warning of doctor (the
# node is slower than possible) is not a problem, unless FAIL_ON=warning.
FAIL_ON=${FAIL_ON:-fault}
EXPECT=${EXPECT:-/etc/peermemctl/expect.json}

set -- doctor --nagios
if [ -e "$EXPECT" ]; then
	set -- "$@" --expect "$EXPECT"
fi
line=$(peermemctl "$@")
status=$?
echo "$line"
# A peermemctl that is too old for these options exits with the same numbers, but prints no line
# that begins with GPUDIRECT.
case $FAIL_ON:$status:$line in
*:2:"GPUDIRECT "* | warning:1:"GPUDIRECT "*) exit 1 ;;
*:[01]:"GPUDIRECT "*) exit 0 ;;
*) exit 2 ;;
esac
