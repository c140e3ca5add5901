#!/bin/sh
# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
# Looks for what no kernel would bear in the object that object.sh has made: `inspect.sh OBJECT`. Prints a sentence for each
# fault; the status is 1 if there is any.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
object=$1
faults=0
fault() {
	echo "$object: $*" >&2
	faults=1
}

# A panic of Rust's would stop the thread that registers memory.
code=$(objdump -d --no-show-raw-insn "$object")
! printf '%s\n' "$code" | grep -qw ud2 || fault "a panic is left: ud2 is in the code"
panics=$(nm "$object" | grep -o '[^ ]*panicking[^ ]*$') || :
[ -z "$panics" ] || fault "a panic is left:" "$panics"

# A frame of more than 1 KiB. The kernel's stack has 16 KiB, and ib_core and nvidia.ko use it, too.
frames=$(printf '%s\n' "$code" | awk '
	/^[0-9a-f]+ <.*>:$/ { name = $2 }
	/sub +\$0x[0-9a-f]+,%rsp/ {
		size = $0
		sub(/.*\$0x/, "", size)
		sub(/,.*/, "", size)
		if (length(size) > 3 || (length(size) == 3 && size > "400")) print name, "0x" size
	}')
[ -z "$frames" ] || fault "frames of more than 1 KiB:" "$frames"

# The kinds of relocation that a kernel of any age applies to a module.
others=$(objdump -r "$object" | awk '$2 ~ /^R_/ && $2 !~ /^R_X86_64_(64|32|32S|PC32|PLT32|PC64)$/ { print $2 }' | sort -u)
[ -z "$others" ] || fault "relocations that kernels do not know:" "$others"

# Undefined symbols are in our C files, in ib_core, in nvidia.ko, or in every kernel under the same name.
known='__this_module __x86_indirect_thunk_r11 __x86_return_thunk memcmp memcpy memmove memset strlen pci_dev_get pci_dev_put
	pci_get_device rb_erase rb_insert_color sg_free_table'
for symbol in $(nm -u "$object" | awk '{ print $2 }'); do
	# shellcheck disable=SC2086 # words
	! printf '%s\n' $known | grep -qx -- "$symbol" || continue
	grep -qsw -- "$symbol" "$here/../src/helpers.h" "$here/../src/memory_peers.h" "$here/shim.h" \
		"$here/../rust-bindings/include/nv-p2p.h" "$here/../rust-bindings/include/rdma/peer_mem.h" ||
		fault "$symbol is none of the symbols that every kernel has"
done
exit $faults
