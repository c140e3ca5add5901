#!/bin/sh
# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
# Prints the folder under /usr/src with the nv-p2p.h of NVIDIA's driver, version
# $2. If $2 is missing, the version is that of the driver that is installed for
# kernel $1. If there is no folder of that version, prints the folder of the
# newest version, or nothing. Among several folders of one version, the script
# prefers a folder with a Module.symvers beside it. PROBE_ROOT replaces the
# host's root folder.
# `driver.sh -f KERNEL` prints the file of the nvidia.ko that is installed for
# the kernel. `driver.sh -l KERNEL` prints its licence.
set -eu

root=${PROBE_ROOT:-}
# The PATH of some users lacks the folder that contains modinfo.
PATH=$PATH:$root/usr/sbin:$root/sbin
# Debian's packages use all of these names except the first.
file() { "$(dirname "$0")/installed.sh" "$1" nvidia nvidia-current-open nvidia-open nvidia-current; }
# Prints the modinfo field $2 of kernel $1's nvidia.ko, or nothing.
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
best=
# NVIDIA's driver container has the sources of both flavours of the driver, each in its own folder.
for header in "$root"/usr/src/nvidia-*/nvidia/nv-p2p.h "$root"/usr/src/nvidia-*/kernel-open/nvidia/nv-p2p.h \
	"$root"/usr/src/nvidia-*/kernel/nvidia/nv-p2p.h; do
	[ -e "$header" ] || continue
	folder=${header%/nv-p2p.h}
	version=${folder#"$root"/usr/src/nvidia-}
	version=$(printf %s "${version%%/*}" | sed 's/^[^0-9]*//')
	fits=0 listed=0
	[ "$version" != "${installed:-none}" ] || fits=1
	[ ! -e "${folder%/*}/Module.symvers" ] || listed=1
	# Of two folders with equal keys, the first one stays.
	best=$(printf '%s\n' "$best" "$fits $version $listed $folder" | sort -s -r -V -k 1,3 | head -n 1)
done
echo "${best#* * * }"
