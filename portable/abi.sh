#!/bin/sh
# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
# Prints a symbol with a sum over all that the object and the C files of a module must have alike. The object has it, and Kbuild
# links the object with C files of the same symbol alone.
set -eu

cd "$(dirname "$0")/.."
sum=$(cat src/helpers.h src/memory_peers.h portable/shim.h portable/generated.rs | cksum)
echo "peermem_abi_${sum%% *}"
