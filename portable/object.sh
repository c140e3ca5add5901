#!/bin/sh
# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
# Compiles src/ into the object that hosts link into the module: `object.sh ARCH OUTPUT`. Needs rustc and its source
# (rust-src), and no kernel. generated.rs is bindgen's output, which is the same for every kernel.
# ROOT=kunit/peermem_kunit.rs compiles the KUnit tests in place of src/nvidia_peermem.rs.
set -eu
out=$(realpath -m "$2")
here=$(cd "$(dirname "$0")" && pwd)
rustc=${RUSTC:-rustc}
root=${ROOT:-src/nvidia_peermem.rs}
name=$(basename "$root" .rs)
work=${WORK:-$(mktemp -d)}
mkdir -p "$work"
library=$($rustc --print sysroot)/lib/rustlib/src/rust/library
export RUSTC_BOOTSTRAP=1
has() { $rustc "$1" help | grep -qw -e "$2"; }
edition=$(sed -n 's/^edition *= *"\([0-9]*\)".*/\1/p' "$library/core/Cargo.toml")

# What any kernel may ask for: retpolines, return thunks, IBT's landing pads, room before each function. Where a kernel has
# none of these, thunks.S has what is called, and the rest does nothing.
set -- --target=x86_64-unknown-none --sysroot=/nonexistent -L "$work" -Cpanic=abort -Copt-level=2 -Ccodegen-units=1 \
	-Cembed-bitcode=y -Cdebug-assertions=n -Coverflow-checks=n -Crelocation-model=static -Cforce-unwind-tables=n \
	-Csymbol-mangling-version=v0 -Zfunction-sections=n -Zplt=yes -Zdirect-access-external-data=yes \
	-Ccode-model=kernel -Cno-redzone=y -Zfunction-return=thunk-extern -Zcf-protection=branch \
	-Zpatchable-function-entry=16,16 --remap-path-prefix="$library"=core --remap-path-prefix="$here/.."=peermem-rs
if has -Z retpoline-external-thunk=val; then
	set -- "$@" -Zretpoline-external-thunk=yes
else
	set -- "$@" -Ctarget-feature=+retpoline-external-thunk,+retpoline-indirect-branches,+retpoline-indirect-calls
fi
if has -Z indirect-branch-cs-prefix=val; then set -- "$@" -Zindirect-branch-cs-prefix=yes; fi
if has -C jump-tables=val; then set -- "$@" -Cjump-tables=n; else set -- "$@" -Zno-jump-tables; fi

[ -e "$work/libcore.rlib" ] || $rustc "$@" --edition="${edition:-2021}" --crate-name core --crate-type rlib --cfg no_fp_fmt_parse \
	--cap-lints allow --emit=link="$work/libcore.rlib" "$library/core/src/lib.rs"
$rustc "$@" --edition=2021 --crate-name compiler_builtins --crate-type rlib \
	--emit=link="$work/libcompiler_builtins.rlib" "$here/compiler_builtins.rs"
case $name in
*_kunit) set -- "$@" --cfg=peermem_kunit '-Zcrate-attr=feature(arbitrary_self_types)' ;;
esac
$rustc --edition=2021 --crate-name kernel_macros --crate-type proc-macro \
	--emit=link="$work/libkernel_macros.so" "$here/macros.rs"
$rustc "$@" --edition=2021 --crate-name kernel --crate-type rlib \
	--extern kernel_macros="$work/libkernel_macros.so" --emit=link="$work/libkernel.rlib" "$here/kernel/lib.rs"
PEERMEM_GENERATED=$here $rustc "$@" --edition=2021 --crate-name "$name" --crate-type staticlib \
	-Clto=fat -Zcrate-attr=no_std '-Zcrate-attr=feature(used_with_arg)' \
	--cfg=CONFIG_NEED_SG_DMA_LENGTH --extern kernel="$work/libkernel.rlib" --emit=link="$work/object.a" \
	"$here/../$root"
ar p "$work/object.a" "$(ar t "$work/object.a" | grep -v ^compiler_builtins)" >"$out"
objcopy -R .llvmbc -R .llvmcmd -R .comment "$out"
