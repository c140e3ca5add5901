#!/bin/sh
# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
# Checks that a linked module uses no symbols that are exported to GPL modules
# only: `exports.sh OBJECT SYMVERS…`. On failure, the script prints these
# symbols. The first SYMVERS is the kernel's Module.symvers. The other files are
# the Module.symvers of other modules.
set -eu

object=$1
shift
fail() {
	echo "$0: $*" >&2
	exit 1
}

grep -sqw vmlinux "$1" || fail "$1 does not say what the kernel exports: name another build folder with KDIR="
used=$("${NM:-nm}" -u "$object") || fail "the symbols of $object cannot be read"
found=$(printf '%s\n' "$used" | awk '
	NR == FNR { used[$NF]; next }
	/EXPORT_[A-Z_]*GPL/ && ($2 in used) { printf " %s", $2 }' - "$@")
[ -z "$found" ] ||
	fail "beside the proprietary nvidia.ko, the module must use no symbol for GPL modules only, but it uses:$found"
