#!/bin/sh
# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
# Finds out which forms of what is in src/compat.rs a kernel wants: `probe.sh COMPAT OUTPUT RUSTC ARGUMENT…`, where RUSTC and
# its arguments are kbuild's for a module's source. Each line `// PROBE NAME: STATEMENTS` of COMPAT is compiled by itself; for
# each that compiles, OUTPUT has a line `--cfg=peermem_NAME`, as rustc reads them with `@OUTPUT`.
#
# No other error passes for a form that is missing: rustc must be able to use this kernel's Rust at all, and COMPAT must
# compile with what was chosen. Otherwise a sentence says so, and the status is 1.
set -u

compat=$1 output=$2
shift 2

work=$output.probe
trap 'rm -rf "$work" "$output.new"' EXIT
mkdir -p "$work" || exit
: >"$output.new" || exit

# Compiles $1 with the command that follows. Warnings are no reason: another form is none either.
compiles() {
	source=$1
	shift
	"$@" --cap-lints=allow "@$output.new" --emit=metadata="$work/probe.rmeta" "$source" >"$work/said" 2>&1
}

fail() {
	{
		cat "$work/said"
		echo "$0: $*"
	} >&2
	exit 1
}

echo 'use kernel::prelude::*; pub fn probe() -> Result { Ok(()) }' >"$work/probe.rs"
compiles "$work/probe.rs" "$@" ||
	fail "rustc cannot use this kernel's Rust at all, see above; scripts/check may say what is missing."

absent=
while read -r slashes word name statements; do
	[ "$slashes $word" = '// PROBE' ] || continue
	name=${name%:}
	echo "pub fn probe() { $statements }" >"$work/probe.rs"
	if compiles "$work/probe.rs" "$@"; then
		echo "--cfg=peermem_$name" >>"$work/found"
	else
		absent="$absent $name"
	fi
done <"$compat"
[ ! -e "$work/found" ] || mv "$work/found" "$output.new"

compiles "$compat" "$@" ||
	fail "this kernel's Rust interfaces are none that src/compat.rs knows, see above (not found:${absent:- none});" \
		"docs/kernels.md has the kernels that it was made for."
[ -z "$absent" ] || echo "  older forms in use:$absent"
mv "$output.new" "$output"
