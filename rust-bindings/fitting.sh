#!/bin/sh
# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
# Prints the FOLDERs of OFED that fit a kernel: `fitting.sh RELEASE FOLDER…`.
# OFED names a folder after the kernel that the folder is for. The folder of
# another kernel fits only if the ib_core of RELEASE is a link to the module of
# that kernel, as in RHEL's weak-updates. A folder of any other name fits.
# PROBE_ROOT replaces the host's root folder.
set -eu

release=$1
shift
for folder; do
	to=$(readlink -f "$folder") || continue
	case $to in
	*/ofa_kernel*/"$release") ;;
	*/ofa_kernel*/[0-9]*.[0-9]*.[0-9]*)
		case $(readlink "$("$(dirname "$0")/installed.sh" "$release" ib_core)") in
		*/"${to##*/}"/*) ;;
		*) continue ;;
		esac
		;;
	esac
	printf '%s\n' "$folder"
done
