#!/bin/sh
# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
# Finds the variants of C interfaces that a kernel has: `probe.sh COMPAT OUTPUT
# SYMVERS COMPILER ARGUMENT…`. COMPILER and its arguments are those that kbuild
# uses for a C file of the module. SYMVERS is the kernel's Module.symvers. If
# SYMVERS lacks the symbols of vmlinux, the script assumes that the kernel
# exports every symbol.
#
# Each line `/* PROBE name: statements */` of COMPAT is compiled as the body of
# a function. The probe succeeds if the body compiles and SYMVERS exports the
# functions that the body calls. For each probe that succeeds, OUTPUT gets a
# line `#define PEERMEM_HAS_NAME`. If PEERMEM_NO_GPL_ONLY is set, functions that
# only GPL modules may use count as missing.
#
# A probe must fail only because the kernel lacks an interface. The script
# therefore checks that a body without statements compiles, and that COMPAT
# compiles with the final OUTPUT. If one of these two checks fails, the script
# prints the reason and exits with status 1.
set -u

compat=$1 output=$2 symvers=$3
shift 3

work=$output.probe
trap 'rm -rf "$work" "$output.new"' EXIT
rm -rf "$work"
mkdir -p "$work" || exit

fail() {
	{
		cat "$work/said"
		echo "$0: $*"
	} >&2
	exit 1
}

# Writes the source of probe $1 with the statements $2.
source_of() {
	printf 'void probe_%s(void *p, unsigned long n);\nvoid probe_%s(void *p, unsigned long n)\n{\n%s\n}\n' "$1" "$1" "$2" \
		>"$work/$1.c"
}

# Compiles probe $1. The remaining arguments are the compiler's command line.
# Calls with wrong arguments are always errors. The kernel's flags make no other
# warning an error.
compiles() {
	name=$1
	shift
	"$@" -Wno-error -Werror=implicit-function-declaration -Werror=incompatible-pointer-types -Werror=int-conversion \
		-DPEERMEM_PROBE -include "$compat" -c -o "$work/$name.o" "$work/$name.c" >"$work/$name.said" 2>&1
}

# Succeeds if the module may use every undefined symbol of probe $1's object.
exported() {
	grep -sqw vmlinux "$symvers" || return 0
	"${NM:-nm}" -u "$work/$1.o" >"$work/$1.undefined" || return
	awk -v open="${PEERMEM_NO_GPL_ONLY:+no}" '
		NR == FNR { if (!open || !/EXPORT_[A-Z_]*GPL/) known[$2]; next }
		$1 == "U" && !($2 in known) { exit 1 }' "$symvers" "$work/$1.undefined"
}

answer() {
	compiles "$@" && exported "$1" && : >"$work/$1.yes"
}

names=
while read -r slash word name statements; do
	[ "$slash $word" = '/* PROBE' ] || continue
	names="$names ${name%:}"
	source_of "${name%:}" "${statements%\*/}"
done <"$compat"

# Compiles all probes at once first: on the newest kernels every probe succeeds.
cat "$work"/*.c >"$work/all" && mv "$work/all" "$work/all.c"
if ! answer all "$@"; then
	source_of control ''
	compiles control "$@" || {
		mv "$work/control.said" "$work/said"
		fail "this kernel's headers do not compile, see above; scripts/check may say what is missing."
	}
	for name in $names; do answer "$name" "$@" & done
	wait
fi

absent='' found=-DPEERMEM_FOUND
for name in $names; do
	if [ -e "$work/all.yes" ] || [ -e "$work/$name.yes" ]; then
		found="$found -DPEERMEM_HAS_$(echo "$name" | tr '[:lower:]' '[:upper:]')"
	else
		absent="$absent $name"
	fi
done

# shellcheck disable=SC2086 # Names have no blanks.
"$@" $found -fsyntax-only -x c "$compat" >"$work/said" 2>&1 ||
	fail "no form in $compat fits this kernel's C interfaces, see above (not found:${absent:- none});" \
		"docs/kernels.md lists the supported kernels."
said='older forms in use'
[ -z "${PEERMEM_NO_GPL_ONLY:-}" ] || said='left out or in older forms, beside the proprietary nvidia.ko'
[ -z "$absent" ] || echo "  $said:$absent"
# shellcheck disable=SC2086
printf '#define %s\n' $found | sed 's/ -D/ /' >"$output.new" && mv "$output.new" "$output"
