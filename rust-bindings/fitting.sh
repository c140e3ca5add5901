#!/bin/sh
# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
# Prints the FOLDERs of OFED that fit a kernel: `fitting.sh RELEASE FOLDER…`.
# OFED names a folder after the kernel that the folder is for. The folder of
# another kernel fits only if the ib_core of RELEASE is a link to the module of
# that kernel, as in RHEL's weak-updates, or if RELEASE has no ib_core, as in a
# container that only compiles. A folder of any other name fits. PROBE_ROOT
# replaces the host's root folder.
set -eu

root=${PROBE_ROOT:-}
release=$1
shift
# Finds the files of ib_core. depmod's index is not used, because depmod may not
# have run yet.
ib_core() {
	find "$root/lib/modules/$release" "$root/usr/lib/modules/$release" -name 'ib_core.ko*' "$@" 2>/dev/null || true
}
for folder; do
	to=$(readlink -f "$folder") || continue
	case $to in
	*/ofa_kernel*/"$release") ;;
	*/ofa_kernel*/[0-9]*.[0-9]*.[0-9]*)
		[ -z "$(ib_core)" ] || [ -n "$(ib_core -lname "*/${to##*/}/*")" ] || continue
		;;
	esac
	printf '%s\n' "$folder"
done
