#!/bin/sh
# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
# Finds the forms of a kernel's C interfaces: `probe.sh COMPAT OUTPUT SYMVERS COMPILER ARGUMENT…`. COMPILER and its arguments
# are kbuild's for a C file of the module. SYMVERS is the kernel's Module.symvers; an empty or missing one allows every symbol.
#
# Each line `/* PROBE name: statements */` of COMPAT is compiled as the body of a function. Its answer is yes if it compiles and
# SYMVERS exports the functions that it calls. For a yes, OUTPUT has a line `#define PEERMEM_HAS_NAME`. With PEERMEM_NO_GPL_ONLY
# set, functions that are exported to GPL modules only count as missing.
#
# A probe cannot say no for another reason: a body without statements must compile first, and COMPAT must compile with OUTPUT in
# the end. Otherwise a sentence says so, and the status is 1.
set -u

compat=$1 output=$2 symvers=$3
shift 3

work=$output.probe
trap 'rm -rf "$work" "$output.new"' EXIT
mkdir -p "$work" || exit

fail() {
	{
		cat "$work/said"
		echo "$0: $*"
	} >&2
	exit 1
}

# Compiles the statements $1 with the command that follows. Wrong arguments are errors whatever the kernel's flags say.
compiles() {
	printf 'void peermem_probe(void *p, unsigned long n);\nvoid peermem_probe(void *p, unsigned long n)\n{\n%s\n}\n' "$1" \
		>"$work/probe.c"
	shift
	"$@" -Werror=implicit-function-declaration -Werror=incompatible-pointer-types -Werror=int-conversion \
		-DPEERMEM_PROBE -include "$compat" -c -o "$work/probe.o" "$work/probe.c" >"$work/said" 2>&1
}

# Succeeds if the module may use every symbol that the probe's object lacks.
exported() {
	[ -s "$symvers" ] || return 0
	"${NM:-nm}" -u "$work/probe.o" >"$work/undefined" || return
	awk -v open="${PEERMEM_NO_GPL_ONLY:+no}" '
		NR == FNR { if (!open || !/EXPORT_[A-Z_]*GPL/) known[$2]; next }
		$1 == "U" && !($2 in known) { exit 1 }' "$symvers" "$work/undefined"
}

compiles '' "$@" || fail "this kernel's headers do not compile, see above; scripts/check may say what is missing."
exported || fail "$symvers does not have what every module needs: it is not this kernel's."

found=-DPEERMEM_FOUND absent=
while read -r slash word name statements; do
	[ "$slash $word" = '/* PROBE' ] || continue
	name=${name%:}
	if compiles "${statements%\*/}" "$@" && exported; then
		found="$found -DPEERMEM_HAS_$(echo "$name" | tr '[:lower:]' '[:upper:]')"
	else
		absent="$absent $name"
	fi
done <"$compat"

# shellcheck disable=SC2086 # Names have no blanks.
"$@" $found -fsyntax-only -x c "$compat" >"$work/said" 2>&1 ||
	fail "this kernel's C interfaces are none that $compat knows, see above (not found:${absent:- none});" \
		"docs/kernels.md has the kernels that it was made for."
[ -z "$absent" ] || echo "  older forms in use:$absent"
# shellcheck disable=SC2086
printf '#define %s\n' $found | sed 's/ -D/ /' >"$output.new" && mv "$output.new" "$output"
