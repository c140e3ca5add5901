#!/bin/sh
# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
# Prints the release of the kernel whose build folder is $1, or nothing. In
# Debian's 6.1, kernel.release has the version of the source, so utsrelease.h is
# read first.
set -eu

sed -n 's/^#define UTS_RELEASE "\(.*\)"/\1/p' "$1/include/generated/utsrelease.h" 2>/dev/null ||
	cat "$1/include/config/kernel.release" 2>/dev/null || true
