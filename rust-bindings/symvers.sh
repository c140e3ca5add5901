#!/bin/sh
# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
# Prints Module.symvers lines for functions of nvidia.ko: `symvers.sh RELEASE
# EXPORT NAME…`. RELEASE is the kernel's release. EXPORT is EXPORT_SYMBOL or
# EXPORT_SYMBOL_GPL. The symbols' versions (CONFIG_MODVERSIONS) come from the
# nvidia.ko that is installed for that kernel. Without that nvidia.ko, the
# script prints nothing. For a kernel without CONFIG_MODVERSIONS, RELEASE is
# empty, and the script prints versions of 0. PROBE_ROOT replaces the host's
# root folder.
set -eu
export LC_ALL=C

release=$1 export=$2
shift 2

line() { printf '%s\t%s\tnvidia\t%s\t\n' "$1" "$2" "$export"; }

if [ -z "$release" ]; then
	for symbol; do line 0x00000000 "$symbol"; done
	exit
fi

driver=$("$(dirname "$0")/driver.sh" -f "$release")
[ -n "$driver" ] || exit 0

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
case $driver in
*.xz) xz -dc "$driver" >"$work/nvidia.ko" ;;
*.zst) zstd -dcq "$driver" >"$work/nvidia.ko" ;;
*.gz) gzip -dc "$driver" >"$work/nvidia.ko" ;;
*) cp "$driver" "$work/nvidia.ko" ;;
esac

# The version is the value of the symbol __crc_NAME, or (since 5.19) the four
# bytes in a section at the symbol's address.
objdump=${OBJDUMP:-${CROSS_COMPILE:-}objdump}
$objdump -t "$work/nvidia.ko" >"$work/symbols"
awk 'sub(/^__crc_/, "", $NF) { print $NF, $(NF - 2), $1 }' "$work/symbols" >"$work/versions"
for symbol; do
	at=$(sed -n "s/^$symbol //p" "$work/versions")
	case $at in
	'') ;;
	'*ABS* '*) line "0x$(printf '%s' "${at##* }" | tail -c 8)" "$symbol" ;;
	*)
		start=$((0x${at##* }))
		# Each line of the output has an address and 16 bytes. awk selects the line and the word,
		# because llvm-objdump always prints the whole section.
		bytes=$($objdump -s -j "${at% *}" "$work/nvidia.ko" |
			awk -v line="^0*$(printf %x $((start / 16 * 16)))\$" -v word=$((start % 16 / 4 + 2)) '$1 ~ line { print $word; exit }')
		# The bytes are little-endian.
		line "0x$(printf '%s' "$bytes" | sed 's/\(..\)\(..\)\(..\)\(..\)/\4\3\2\1/')" "$symbol"
		;;
	esac
done
