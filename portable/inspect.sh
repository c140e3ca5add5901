#!/bin/sh
# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
# Checks the output of object.sh for faults that no kernel tolerates:
# `inspect.sh OBJECT [PREFIX]`. Prints a sentence for each fault. The exit status
# is 1 if the object has a fault. PREFIX is the prefix of the names of objdump
# and nm.
set -eu
export LC_ALL=C

here=$(cd "$(dirname "$0")" && pwd)
object=$1
tools=${2-}
faults=0
fault() {
	echo "$object: $*" >&2
	faults=1
}

code=$("${tools}objdump" -d --no-show-raw-insn "$object")
relocations=$("${tools}objdump" -r "$object")
case $code in
*elf64-x86-64*) arch=x86_64 stop=ud2 ;;
*elf64-littleaarch64*) arch=aarch64 stop='brk|udf' ;;
*)
	fault "objdump does not know the architecture"
	exit 1
	;;
esac

# A Rust panic would stop the thread that registers memory.
! printf '%s\n' "$code" | grep -qwE "$stop" || fault "a panic is left: $stop is in the code"
panics=$("${tools}nm" "$object" | grep -o '[^ ]*panicking[^ ]*$') || :
[ -z "$panics" ] || fault "a panic is left:" "$panics"

# An awk function that returns the value of hexadecimal digits.
number='
	function number(hex, value, at) {
		value = 0
		for (at = 1; at <= length(hex); at++) value = value * 16 + index("123456789abcdef", substr(hex, at, 1))
		return value
	}'

# A stack frame must not exceed 1 KiB, apart from the registers that a function
# saves, which need up to 96 bytes on arm64. The kernel's stack has 16 KiB, and
# ib_core and nvidia.ko use it too. The size of a frame is unknown if an
# instruction that the script does not know changes the stack pointer.
frames=$(printf '%s\n' "$code" | awk "$number"'
	function ends() { if (unknown) print name, "(of unknown size)"; else if (size > 1024) print name, size }
	/^[0-9a-f]+ <.*>:$/ { ends(); name = $2; size = unknown = 0 }
	/\tsub +\$0x[0-9a-f]+,%rsp$/ { sub(/.*\$0x/, ""); sub(/,.*/, ""); size += number($0); next }
	/\tadd +\$0x[0-9a-f]+,%rsp$/ && !/\$0xffffffff[0-9a-f]/ || /\tlea +0x[0-9a-f]+\(%rsp\),%rsp$/ { next }
	/\tsub\tsp, sp, #0x[0-9a-f]+/ { large = /lsl #12/; sub(/.*sp, #0x/, ""); sub(/,.*/, ""); size += number($0) * (large ? 4096 : 1); next }
	/\tadd\tsp, sp, #0x[0-9a-f]+/ { next }
	/\[sp, #-[0-9]+\]!/ { sub(/.*\[sp, #-/, ""); if ($0 + 0 > 96) size += $0 }
	/,%[er]sp$/ || /\tenter/ || /\tpop +%rsp$/ || /\t[a-z]+\tsp, / { unknown = 1 }
	END { ends() }')
[ -z "$frames" ] || fault "frames of more than 1 KiB:" "$frames"

# The relocation types that every supported kernel applies to a module.
case $arch in
x86_64) kinds='R_X86_64_(64|32|32S|PC32|PLT32|PC64)' ;;
aarch64) kinds='R_AARCH64_(ABS64|PREL32|ADR_PREL_PG_HI21|ADD_ABS_LO12_NC|LDST(8|16|32|64|128)_ABS_LO12_NC|JUMP26|CALL26)' ;;
esac
others=$(printf '%s\n' "$relocations" | awk -v kinds="^$kinds\$" '$2 ~ /^R_/ && $2 !~ kinds { print $2 }' | sort -u)
[ -z "$others" ] || fault "relocations that kernels do not know:" "$others"

# FP and SIMD registers belong to the process. On arm64, x18 holds the shadow
# call stack.
case $arch in
x86_64) registers='%([xyz]?mm[0-9]+|st|k[0-7])' ;;
aarch64) registers='[xw]18|[vqdshb]([0-9]|[12][0-9]|3[01])(\.[0-9]*[bhsd])?' ;;
esac
registers=$(printf '%s\n' "$code" | sed 's/^ *[0-9a-f]*:/ /; s/[0-9a-f]* <.*>//' | grep -owE -e "$registers" | sort -u) || :
[ -z "$registers" ] || fault "registers that are not the module's:" "$registers"

if [ "$arch" = aarch64 ]; then
	# A kernel that enforces BTI needs landing pads. A function needs a
	# landing pad in three cases: another object may call the function,
	# something other than a direct call refers to it, or a call to it
	# crosses the boundary of .init.*. The memory of .init.* may be so far
	# away that the kernel adds code that branches through a register.
	pads=$({
		"${tools}nm" "$object" | sed 's/^/nm /'
		printf '%s\n' "$code" | sed 's/^/code /'
		printf '%s\n' "$relocations" | sed 's/^/reloc /'
	} | awk "$number"'
		$1 == "nm" && $3 ~ /^[TtW]$/ { at[$4] = number($2); global[$4] = $3 == "T" }
		$1 == "code" && /Disassembly of section/ { section = $5; sub(/:$/, "", section); code[section] = 1 }
		$1 == "code" && $3 ~ /^<.*>:$/ { name = substr($3, 2, length($3) - 3); home[name] = section; if (global[name]) wanted[section, at[name]] = name }
		$1 == "code" && $3 == "bti" { hex = $2; sub(/:$/, "", hex); pad[section, number(hex)] = 1; found++ }
		$1 == "reloc" && /RELOCATION RECORDS FOR/ { from = $5; gsub(/\[|\]|:/, "", from) }
		$1 == "reloc" && $3 ~ /^R_/ {
			name = $4; offset = 0
			if (match(name, /\+0x[0-9a-f]+$/)) { offset = number(substr(name, RSTART + 3)); name = substr(name, 1, RSTART - 1) }
			if (name in home) { to = home[name]; offset += at[name] } else if (name in code) to = name
			else next
			if ($3 !~ /(CALL|JUMP)26$/ || (from ~ /^\.init/) != (to ~ /^\.init/)) wanted[to, offset] = $4
		}
		END {
			if (!found) print "none at all"
			for (place in wanted) if (!(place in pad)) print wanted[place]
		}')
	[ -z "$pads" ] || fault "functions without a landing pad:" "$pads"
fi

# Each undefined symbol of the object must be in our C files, ib_core or
# nvidia.ko, or in every kernel under the same name. The headers declare each
# function and each variable at the beginning of a line.
known='__this_module __x86_indirect_thunk_r11 __x86_return_thunk memcmp memcpy memmove memset strlen pci_dev_get pci_dev_put
	pci_get_device rb_erase rb_insert_color sg_free_table'
known="$known $(sed -nE '/^(static|typedef) /d
	s/^[a-z][^(]*[ *]([a-z0-9_]+)\(.*/\1/p
	s/^extern [^(]*[ *]([a-z0-9_]+)(\[\])?;$/\1/p' \
	"$here/../src/helpers.h" "$here/../src/memory_peers.h" "$here/shim.h" \
	"$here/../rust-bindings/include/nv-p2p.h" "$here/../rust-bindings/include/rdma/peer_mem.h")"
for symbol in $("${tools}nm" -u "$object" | awk '{ print $2 }'); do
	# shellcheck disable=SC2086 # words
	printf '%s\n' $known | grep -qx -- "$symbol" || fault "$symbol is not a symbol that every kernel has"
done
exit $faults
