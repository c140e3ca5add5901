#!/usr/bin/python3
# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
"""One of two ranks of Open MPI that use GPU memory: `mpi.py FOLDER`.

Rank 0 sends, and rank 1 sends other bytes back. Each rank compares the bytes that it receives. After
the first round, each rank writes its process ID into FOLDER, and waits for the file "go" there. The
program calls Open MPI by its C interface.
"""
import ctypes
import os
import sys
from ctypes import byref, c_char, c_int, c_void_p

import gpu
from gpu import LENGTH, Memory, pattern

TIMES = 4

(folder,) = sys.argv[1:]
mpi = ctypes.CDLL("libmpi.so.40", mode=ctypes.RTLD_GLOBAL)


def call(name, *arguments):
    gpu.call(mpi, name, *arguments)


def handle(name):
    """Returns a constant of MPI, which is the address of a variable."""
    return c_void_p(ctypes.addressof(c_char.in_dll(mpi, name)))


gpu.take_a_gpu()
call("MPI_Init", None, None)
rank, world, byte = c_int(), handle("ompi_mpi_comm_world"), handle("ompi_mpi_byte")
call("MPI_Comm_rank", world, byref(rank))
rank, other = rank.value, 1 - rank.value
# Use two buffers. UCX would register a buffer twice if it were used both to send and to receive.
source, sink = Memory(), Memory()


def send(data):
    source.write(data)
    call("MPI_Send", c_void_p(source.address.value), LENGTH, byte, other, 0, world)


def receive(data):
    call("MPI_Recv", c_void_p(sink.address.value), LENGTH, byte, other, 0, world, None)
    sink.expect(data)


for time in range(TIMES):
    there, back = pattern(2 * time), pattern(2 * time + 1)
    if rank == 0:
        send(there)
        receive(back)
    else:
        receive(there)
        send(back)
    if time == 0:
        gpu.publish(folder, f"rank{rank}", str(os.getpid()).encode())
        gpu.take(folder, "go")
call("MPI_Finalize")
print(f"rank {rank}: done")
