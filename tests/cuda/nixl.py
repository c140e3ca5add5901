#!/usr/bin/python3
# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
"""One of two NIXL agents that use GPU memory: `nixl.py LIBRARIES FOLDER initiator|target`.

The initiator writes into the target's memory and notifies the target. The target compares the bytes, and
fills its memory with new bytes. The initiator reads the new bytes, notifies the target and compares.
The agents find each other through FOLDER. The program calls NIXL by its C API.
"""
import ctypes
import sys
from ctypes import byref, c_char_p, c_size_t, c_uint64, c_void_p

import gpu
from gpu import LENGTH, Memory, pattern, wait_for

VRAM = 1
READ, WRITE = 0, 1
IN_PROGRESS = 1

libraries, folder, role = sys.argv[1:]
nixl = ctypes.CDLL(f"{libraries}/libnixl_capi.so")


def call(name, *arguments):
    """Calls a function of NIXL, which returns 0 or `IN_PROGRESS`."""
    return gpu.call(nixl, name, *arguments, fine=(0, IN_PROGRESS))


class Agent:
    def __init__(self, name):
        self.agent, backend, memories, parameters = (c_void_p() for _ in range(4))
        call("nixl_capi_create_agent", name, byref(self.agent))
        call("nixl_capi_get_plugin_params", self.agent, b"UCX", byref(memories), byref(parameters))
        call("nixl_capi_create_backend", self.agent, b"UCX", parameters, byref(backend))
        self.options = self.arguments()

    def arguments(self):
        arguments = c_void_p()
        call("nixl_capi_create_opt_args", byref(arguments))
        return arguments

    def register(self, *memories):
        self.registered = c_void_p()
        call("nixl_capi_create_reg_dlist", VRAM, byref(self.registered), False)
        for memory in memories:
            call("nixl_capi_reg_dlist_add_desc", self.registered, memory.address, c_size_t(LENGTH), c_uint64(0), None, c_size_t(0))
        call("nixl_capi_register_mem", self.agent, self.registered, self.options)

    def deregister(self):
        call("nixl_capi_deregister_mem", self.agent, self.registered, self.options)
        call("nixl_capi_destroy_agent", self.agent)

    def metadata(self):
        data, length = c_void_p(), c_size_t()
        call("nixl_capi_get_local_md", self.agent, byref(data), byref(length))
        return ctypes.string_at(data, length.value)

    def meet(self, metadata):
        name = c_char_p()
        call("nixl_capi_load_remote_md", self.agent, metadata, c_size_t(len(metadata)), byref(name))

    def transfer(self, operation, memory, remote, message):
        lists = []
        for address in (memory.address, remote):
            entries = c_void_p()
            call("nixl_capi_create_xfer_dlist", VRAM, byref(entries), False)
            call("nixl_capi_xfer_dlist_add_desc", entries, address, c_size_t(LENGTH), c_uint64(0))
            lists.append(entries)
        options, request = self.arguments(), c_void_p()
        call("nixl_capi_opt_args_set_notif_msg", options, message, c_size_t(len(message)))
        call("nixl_capi_opt_args_set_has_notif", options, True)
        call("nixl_capi_create_xfer_req", self.agent, operation, lists[0], lists[1], b"target", byref(request), options)
        call("nixl_capi_post_xfer_req", self.agent, request, options)
        wait_for(message, lambda: call("nixl_capi_get_xfer_status", self.agent, request) == 0)
        call("nixl_capi_release_xfer_req", self.agent, request)

    def hear(self, message):
        heard = c_void_p()
        call("nixl_capi_create_notif_map", byref(heard))

        def has_come():
            call("nixl_capi_get_notifs", self.agent, heard, self.options)
            count = c_size_t()
            call("nixl_capi_notif_map_size", heard, byref(count))
            if not count.value:
                return False
            data, length = c_void_p(), c_size_t()
            call("nixl_capi_notif_map_get_notif", heard, b"initiator", c_size_t(0), byref(data), byref(length))
            return ctypes.string_at(data, length.value) == message

        wait_for(message, has_come)


gpu.take_a_gpu()
agent = Agent(role.encode())
WRITTEN, ANSWER = pattern(1), pattern(2)
if role == "target":
    memory = Memory()
    agent.register(memory)
    gpu.publish(folder, "target", memory.address.value.to_bytes(8, "little") + agent.metadata())
    agent.meet(gpu.take(folder, "initiator"))
    agent.hear(b"written")
    memory.expect(WRITTEN)
    memory.write(ANSWER)
    gpu.publish(folder, "filled", b"")
    agent.hear(b"read")
else:
    source, sink = Memory(), Memory()
    source.write(WRITTEN)
    agent.register(source, sink)
    gpu.publish(folder, "initiator", agent.metadata())
    found = gpu.take(folder, "target")
    agent.meet(found[8:])
    remote = c_uint64(int.from_bytes(found[:8], "little"))
    agent.transfer(WRITE, source, remote, b"written")
    gpu.take(folder, "filled")
    agent.transfer(READ, sink, remote, b"read")
    sink.expect(ANSWER)
agent.deregister()
print(f"{role}: done")
