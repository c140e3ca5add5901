#!/bin/sh
# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
# Compiles gpu.c with gcc, and runs it on this machine's GPU.
#
#   gpu.sh path/to/libpeermem_preload.so
set -eu

library=$(realpath "$1")
here=$(dirname "$(realpath "$0")")
there=$(mktemp -d)
trap 'rm -r "$there"' EXIT

echo 'IBVERBS_PRIVATE_34 { global: *; };' >"$there/map"
gcc -O1 -shared -fPIC -Wl,--version-script="$there/map" -o "$there/libreal.so" "$here/fake_ibverbs.c"
gcc -O1 -shared -fPIC -o "$there/libprovider.so" "$here/fake_provider.c" "$there/libreal.so"
gcc -O1 -o "$there/gpu" "$here/gpu.c" -ldl -lpthread
LD_PRELOAD=$library "$there/gpu" "$there/libprovider.so"
