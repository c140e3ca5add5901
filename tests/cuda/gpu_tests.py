#!/usr/bin/python3
# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
"""rdma-core's Python tests on GPU memory: `gpu_tests.py OPTIONS`, in the folder of the tests.

If a test passes no memory for a region, the region gets GPU memory, which ibv_reg_mr registers. A region stays
unchanged if the test passes memory, or access flags that dma-buf regions do not support.
"""
import os
import runpy
import sys

import pyverbs.mr

import gpu

# LOCAL_WRITE, REMOTE_WRITE, REMOTE_READ, REMOTE_ATOMIC and RELAXED_ORDERING
ACCEPTED = 0xF | 1 << 20
# All allocated GPU memory, by address.
allocated = {}


class MR(pyverbs.mr.MR):
    def __init__(self, creator, length=0, access=0, *rest, **options):
        # A region that is imported has the address of the original region, and shares its memory.
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
    # If no region is in GPU memory, the tests pass but prove nothing.
    if not allocated:
        sys.exit("no region had GPU memory")
