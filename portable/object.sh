#!/bin/sh
# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
# Compiles core, portable/kernel and src/ into the object that kbuild links for
# any kernel: `object.sh ARCHITECTURE OUTPUT [ROOT]`.
#
# Needs rustc with its source (rust-src), and GNU's objdump, objcopy and nm, but
# no kernel. RUSTC names another rustc. The architecture is x86_64 or aarch64,
# as `uname -m` prints it. For an architecture other than this machine's, the
# script needs objdump, objcopy and nm of binutils-x86-64-linux-gnu or
# binutils-aarch64-linux-gnu. The same sources and the same rustc give the same
# bytes in any folder.
#
# ROOT is the root file, by default src/nvidia_peermem.rs. With
# kunit/peermem_kunit.rs, the script compiles the KUnit tests instead.
set -eu
export LC_ALL=C

# The rustc that builds releases. The published hash of the object holds only
# for this version.
pinned=1.96.0
oldest=1.85

fail() {
	echo "$0: $*" >&2
	exit 1
}

[ $# = 2 ] || [ $# = 3 ] || fail "usage: $0 ARCHITECTURE OUTPUT [ROOT]"
case $1 in
x86_64 | aarch64) arch=$1 ;;
*) fail "there is no object for $1: the architecture is x86_64 or aarch64" ;;
esac
tools=
if [ "$(uname -m)" != "$arch" ]; then
	tools=$arch-linux-gnu-
	for program in objdump objcopy nm; do
		command -v "$tools$program" >/dev/null || fail "no $tools$program: install the package binutils-$(echo "$arch" | tr _ -)-linux-gnu"
	done
fi
here=$(cd "$(dirname "$0")" && pwd)
root=${3-src/nvidia_peermem.rs}
rustc=${RUSTC:-rustc}
version=$("$rustc" --version 2>/dev/null | cut -d ' ' -f 2) || version=
[ -n "$version" ] || fail "no rustc: install rustc $oldest or newer with rust-src, or set RUSTC to the path of one"
[ "$(printf '%s\n' "$oldest" "$version" | sort -V | head -n 1)" = "$oldest" ] ||
	fail "rustc $version is too old: $oldest or newer is needed"
[ "$version" = "$pinned" ] || echo "  rustc $version: releases are built with $pinned, so the hash of this object differs from the published one" >&2
library=$("$rustc" --print sysroot)/lib/rustlib/src/rust/library
[ -e "$library/core/src/lib.rs" ] || fail "no source of rustc's library in $library: install rust-src"

mkdir -p "$(dirname "$2")"
out=$(cd "$(dirname "$2")" && pwd)/$(basename "$2")
work=$(mktemp -d "$out.XXXXXX")
trap 'rm -rf "$work"' EXIT
# The compiled core library stays beside the object, so that later runs need not
# compile it again.
core=$out.core/$({ "$rustc" -vV && cat "$0"; } | cksum | cut -d ' ' -f 1)

# The compiler is stable, but the kernel needs unstable options. The kernel's
# own build sets this variable too.
export RUSTC_BOOTSTRAP=1
has() { "$rustc" "$1" help | grep -qw -e "$2"; }
edition=$(sed -n 's/^edition *= *"\([0-9]*\)".*/\1/p' "$library/core/Cargo.toml")

set -- --sysroot=/nonexistent -L "$work" -Cpanic=abort -Copt-level=2 -Ccodegen-units=1 \
	-Cembed-bitcode=y -Cdebug-assertions=n -Coverflow-checks=n -Crelocation-model=static -Cforce-unwind-tables=n \
	-Csymbol-mangling-version=v0 -Zfunction-sections=n -Zdirect-access-external-data=yes \
	--remap-path-prefix="$library"=core --remap-path-prefix="$here/.."=peermem-rs --remap-path-prefix="$work"=.
if has -C jump-tables=val; then set -- "$@" -Cjump-tables=n; else set -- "$@" -Zno-jump-tables; fi
# The options below cover everything that a kernel may require of its code.
# arm64 kernels unwind by frame pointers, and so do x86-64 kernels with
# CONFIG_UNWINDER_FRAME_POINTER.
set -- "$@" -Cforce-frame-pointers=y
case $arch in
x86_64)
	# Enables retpolines, return thunks, landing pads of IBT, and 16 NOPs
	# before each function. thunks.S provides the thunks for kernels that
	# have none. A kernel that does not use a feature is not affected by it.
	set -- "$@" --target=x86_64-unknown-none -Zplt=yes -Ccode-model=kernel -Cno-redzone=y -Zfunction-return=thunk-extern \
		-Zcf-protection=branch -Zpatchable-function-entry=16,16
	if has -Z retpoline-external-thunk=val; then
		set -- "$@" -Zretpoline-external-thunk=yes
	else
		set -- "$@" -Ctarget-feature=+retpoline-external-thunk,+retpoline-indirect-branches,+retpoline-indirect-calls
	fi
	if has -Z indirect-branch-cs-prefix=val; then set -- "$@" -Zindirect-branch-cs-prefix=yes; fi
	;;
aarch64)
	# Landing pads of BTI are no-ops on kernels without BTI. The kernel
	# unwinds by frame records. x18 holds the shadow call stack and is not
	# used. The target excludes FP and SIMD. Return addresses are not
	# signed. Without CONFIG_ARM64_PTR_AUTH_KERNEL, the kernel leaves the
	# keys of processes in the processors. A thread that sleeps in a
	# function could then sign with one key and check with another.
	set -- "$@" --target=aarch64-unknown-none-softfloat -Zbranch-protection=bti -Zfixed-x18
	;;
esac

if [ ! -e "$core/libcore.rlib" ]; then
	rm -rf "$out.core"
	mkdir -p "$core"
	"$rustc" "$@" --edition="${edition:-2021}" --crate-name core --crate-type rlib --cfg no_fp_fmt_parse \
		--cap-lints allow --emit=link="$work/libcore.rlib" "$library/core/src/lib.rs"
	cp "$work/libcore.rlib" "$core/new"
	mv "$core/new" "$core/libcore.rlib"
fi
cp "$core/libcore.rlib" "$work"
"$rustc" "$@" --edition=2021 --crate-name compiler_builtins --crate-type rlib \
	--emit=link="$work/libcompiler_builtins.rlib" "$here/compiler_builtins.rs"
case $root in
kunit/*) set -- "$@" --cfg=peermem_kunit -Coverflow-checks=y '-Zcrate-attr=feature(arbitrary_self_types)' ;;
esac
"$rustc" --edition=2021 --crate-name kernel_macros --crate-type proc-macro \
	--emit=link="$work/libkernel_macros.so" "$here/macros.rs"
"$rustc" "$@" --edition=2021 --crate-name kernel --crate-type rlib \
	--extern kernel_macros="$work/libkernel_macros.so" --emit=link="$work/libkernel.rlib" "$here/kernel/lib.rs"
PEERMEM_GENERATED=$here "$rustc" "$@" --edition=2021 --crate-name "$(basename "$root" .rs)" --crate-type staticlib -Clto=fat \
	-Zcrate-attr=no_std '-Zcrate-attr=feature(used_with_arg)' \
	--extern kernel="$work/libkernel.rlib" --emit=link="$work/object.a" "$here/../$root"
# The archive contains the module's object and the empty object of
# compiler_builtins.rs.
ar p "$work/object.a" "$(ar t "$work/object.a" | grep -v ^compiler_builtins)" >"$work/object.o"
# The NOPs before each function stay. objcopy removes the list of these NOPs,
# the section __patchable_function_entries, because older linkers do not merge
# that section with gcc's. Older linkers do not know .ARM.attributes either.
"${tools}objcopy" -R .llvmbc -R .llvmcmd -R .comment -R .ARM.attributes -R __patchable_function_entries -R .rela__patchable_function_entries "$work/object.o"
"${tools}objcopy" --add-symbol "$(sh "$here/abi.sh")=0,local" "$work/object.o"
# KUnit tests may panic, so only the module's object is checked.
[ "$root" != src/nvidia_peermem.rs ] || "$here/inspect.sh" "$work/object.o" "$tools"
mv "$work/object.o" "$out"
echo "  $(sha256sum "$out" | cut -d ' ' -f 1)  $out"
