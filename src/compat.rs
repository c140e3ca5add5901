// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! What the `kernel` crate has in different forms from kernel to kernel, and nothing else.
//!
//! Before the module is compiled, `rust-bindings/probe.sh` compiles each line here that begins with
//! `// PROBE`, in a function by itself, for the kernel at hand. Where that succeeds, `peermem_` and the
//! name in the line are a `cfg`. Then it compiles this file alone: a kernel for which no form fits ends
//! the build there, with a sentence. Hence this file uses `core` and the `kernel` crate alone.
//!
//! Another difference takes one such line, and its two forms below it; the older one goes when no kernel
//! is left that wants it. `docs/kernels.md` has which kernel wants which.

use kernel::{
    prelude::*,
    sync::atomic::{
        Atomic,
        Full, //
    },
    task::Pid, //
};

/// The calling process, by the number that it has outside all namespaces.
// PROBE task_tgid: let _: kernel::task::Pid = kernel::current!().tgid();
#[cfg(peermem_task_tgid)]
pub(crate) fn process() -> Pid {
    current!().tgid()
}

/// The calling process, by the number that it has outside all namespaces.
#[cfg(not(peermem_task_tgid))]
pub(crate) fn process() -> Pid {
    current!().group_leader().pid()
}

/// Takes one from `count`, fully ordered, and returns what it was.
// PROBE atomic_sub: let _ = kernel::sync::atomic::Atomic::<u64>::new(1).fetch_sub(1, kernel::sync::atomic::Full);
#[cfg(peermem_atomic_sub)]
pub(crate) fn count_down(count: &Atomic<u64>) -> u64 {
    count.fetch_sub(1, Full)
}

/// Takes one from `count`, fully ordered, and returns what it was.
#[cfg(not(peermem_atomic_sub))]
pub(crate) fn count_down(count: &Atomic<u64>) -> u64 {
    // Atomics wrap around: this adds minus one.
    count.fetch_add(u64::MAX, Full)
}
