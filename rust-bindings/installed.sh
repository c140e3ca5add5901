#!/bin/sh
# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
# Prints the path of a module that is installed for a kernel: `installed.sh
# RELEASE NAME…`. The first NAME that is installed counts. The path is that of
# the file that modprobe would load. If depmod has not run yet, the path is that
# of any installed file of this name. PROBE_ROOT replaces the host's root
# folder.
set -eu

root=${PROBE_ROOT:-}
release=$1
shift
for name; do
	for folder in "$root/lib/modules/$release" "$root/usr/lib/modules/$release"; do
		[ -d "$folder" ] || continue
		path=$(sed -n "s,^\(\([^:]*/\)*$name\.ko[.a-z0-9]*\):.*,\1,p" "$folder/modules.dep" 2>/dev/null | head -n 1)
		case $path in
		/*) file=$root$path ;;
		*) file=$folder/$path ;;
		esac
		[ -f "$file" ] || file=$(find "$folder" -name "$name.ko*" | head -n 1)
		[ -z "$file" ] || {
			printf '%s\n' "$file"
			exit
		}
	done
done
