// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! The substitute `kernel` crate under loom, which runs a model once for every order in which its
//! threads can take locks and access atomics. The models cover counted references, cells that are
//! filled once, mutexes and condition variables.
//!
//! Most files are those of `portable/kernel`. The files in this folder replace the others:
//! `sync/atomic.rs` uses loom's atomics, and `bindings` uses loom's locks and wait queues. `error`
//! and `sync/mod.rs` define only the names that the models need.

#![cfg(test)]
#![allow(dead_code, reason = "the models use a part of each file")]
#![allow(clippy::missing_safety_doc, reason = "C has the contracts")]
#![allow(clippy::new_without_default, reason = "the module uses none")]
#![allow(unreachable_pub, reason = "the files are those of a library")]

#[path = "../../../portable/kernel/alloc.rs"]
pub mod alloc;
pub mod bindings;
pub mod error;
#[path = "../../../portable/kernel/ffi.rs"]
#[allow(unused_imports, reason = "the models use a part")]
mod ffi;
mod models;
#[path = "../../../portable/kernel/pin_init.rs"]
pub mod pin_init;
pub mod sync;
#[path = "../../../portable/kernel/types.rs"]
pub mod types;
