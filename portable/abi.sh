#!/bin/sh
# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
# Prints a symbol name that contains a checksum of the sources that the object
# and the module's C files must share. The object defines the symbol. Kbuild
# links the object only if the source tree of the C files gives the same symbol.
set -eu

cd "$(dirname "$0")/.."
set -- src/helpers.h src/memory_peers.h portable/shim.h portable/layout.c portable/generated.rs \
	portable/kernel/bindings.rs
# A pipeline hides a failure of cat, so this line checks the files first.
cat "$@" >/dev/null
sum=$(cat "$@" | cksum)
echo "peermem_abi_${sum%% *}"
