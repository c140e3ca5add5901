#!/usr/bin/python3
# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
"""rdma-core's Python tests on GPU memory: `gpu_tests.py OPTIONS`, in the folder of the tests.

A region for which the test passes no memory gets GPU memory, which ibv_reg_mr registers. Other regions stay
unchanged: those with memory from the test, and those with access flags that dma-buf regions do not support.
"""
import os
import runpy
import sys

import pyverbs.mr

import gpu

# LOCAL_WRITE, REMOTE_WRITE, REMOTE_READ, REMOTE_ATOMIC and RELAXED_ORDERING
ACCEPTED = 0xF | 1 << 20
# All GPU memory, by its address.
allocated = {}


class MR(pyverbs.mr.MR):
    def __init__(self, creator, length=0, access=0, *rest, **options):
        # An imported region has the address of the original.
        self.memory = allocated.get(options.get("address"))
        if length and not rest and not options and not access & ~ACCEPTED:
            self.memory = gpu.Memory(length)
            options["address"] = self.memory.address.value
            allocated[self.memory.address.value] = self.memory
        super().__init__(creator, length, access, *rest, **options)

    def write(self, data, length, offset=0):
        if not self.memory:
            return super().write(data, length, offset)
        data = data.encode() if isinstance(data, str) else data
        return self.memory.write(data[:length], offset)

    def read(self, length, offset):
        if not self.memory:
            return super().read(length, offset)
        return self.memory.read(length, offset)


gpu.take_a_gpu()
pyverbs.mr.MR = MR
folder = os.getcwd()
sys.path.insert(0, folder)
try:
    runpy.run_path(f"{folder}/run_tests.py", run_name="__main__")
finally:
    # Without a region in GPU memory, the tests pass and prove nothing.
    if not allocated:
        sys.exit("no region had GPU memory")
