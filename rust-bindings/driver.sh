#!/bin/sh
# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
# Prints the folder under /usr/src with the nv-p2p.h of NVIDIA's driver: of the version that is installed for kernel $1, or
# else of the newest. Prints nothing where there is none.
set -eu

installed=$(modinfo -k "$1" -F version nvidia 2>/dev/null || true)
newest=
for header in /usr/src/nvidia-*/nvidia/nv-p2p.h; do
	[ -e "$header" ] || continue
	folder=${header%/nv-p2p.h}
	version=${folder#/usr/src/nvidia-}
	version=$(printf %s "${version%/nvidia}" | sed 's/^[^0-9]*//')
	if [ -n "$installed" ] && [ "$version" = "$installed" ]; then
		echo "$folder"
		exit
	fi
	newest=$(printf '%s\n' "$newest" "$version $folder" | sort -V | tail -n 1)
done
echo "${newest#* }"
