# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
"""Common parts of the NIXL agents and the ranks of Open MPI: GPU memory from CUDA's driver API, and
files in a folder through which the agents or ranks exchange data.
"""
import ctypes
import os
import sys
import time
from ctypes import byref, c_size_t, c_uint64, c_void_p

LENGTH = 8 << 20

cuda = ctypes.CDLL("libcuda.so.1")


def call(library, name, *arguments, fine=(0,)):
    """Calls a function, whose result must be in `fine`."""
    status = getattr(library, name)(*arguments)
    if status not in fine:
        sys.exit(f"{name} returned {status}")
    return status


def pattern(seed):
    return bytes((seed + 7 * at) % 251 for at in range(1 << 16)) * (LENGTH >> 16)


def publish(folder, name, data):
    with open(f"{folder}/{name}.new", "wb") as file:
        file.write(data)
    os.rename(f"{folder}/{name}.new", f"{folder}/{name}")


def wait_for(what, done):
    end = time.monotonic() + 600
    while not done():
        if time.monotonic() > end:
            sys.exit(f"waited too long for {what}")
        time.sleep(0.001)


def take(folder, name):
    path = f"{folder}/{name}"
    wait_for(name, lambda: os.path.exists(path))
    with open(path, "rb") as file:
        return file.read()


def take_a_gpu():
    context = c_void_p()
    call(cuda, "cuInit", 0)
    call(cuda, "cuDevicePrimaryCtxRetain", byref(context), 0)
    call(cuda, "cuCtxSetCurrent", context)


class Memory:
    def __init__(self, length=LENGTH):
        self.address = c_uint64()
        call(cuda, "cuMemAlloc_v2", byref(self.address), c_size_t(length))

    def write(self, data, offset=0):
        call(cuda, "cuMemcpyHtoD_v2", c_uint64(self.address.value + offset), data, c_size_t(len(data)))

    def read(self, length, offset=0):
        found = ctypes.create_string_buffer(length)
        call(cuda, "cuMemcpyDtoH_v2", found, c_uint64(self.address.value + offset), c_size_t(length))
        return found.raw

    def expect(self, data):
        if self.read(LENGTH) != data:
            sys.exit("wrong bytes")
