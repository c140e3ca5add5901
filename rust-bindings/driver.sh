#!/bin/sh
# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
# Prints the folder under /usr/src with the nv-p2p.h of NVIDIA's driver: of version $2, by default the one that is installed
# for kernel $1, or else of the newest. Prints nothing where there is none. PROBE_ROOT is a root other than the host's.
# `driver.sh -f KERNEL` prints the file of the nvidia.ko that is installed for the kernel, `driver.sh -l KERNEL` its licence.
set -eu

root=${PROBE_ROOT:-}
# Where modinfo is, which not every user's PATH has.
PATH=$PATH:$root/usr/sbin:$root/sbin
# The names but the first are those of Debian's packages.
file() { "$(dirname "$0")/installed.sh" "$1" nvidia nvidia-current-open nvidia-open nvidia-current; }
# Prints the field $2 of that file, or nothing.
field() {
	driver=$(file "$1")
	[ -z "$driver" ] || modinfo -F "$2" "$driver" 2>/dev/null || true
}
case $1 in
-f)
	file "$2"
	exit
	;;
-l)
	field "$2" license
	exit
	;;
esac
installed=${2-$(field "$1" version)}
newest=
for header in "$root"/usr/src/nvidia-*/nvidia/nv-p2p.h; do
	[ -e "$header" ] || continue
	folder=${header%/nv-p2p.h}
	version=${folder#"$root"/usr/src/nvidia-}
	version=$(printf %s "${version%/nvidia}" | sed 's/^[^0-9]*//')
	if [ -n "$installed" ] && [ "$version" = "$installed" ]; then
		echo "$folder"
		exit
	fi
	newest=$(printf '%s\n' "$newest" "$version $folder" | sort -V | tail -n 1)
done
echo "${newest#* }"
