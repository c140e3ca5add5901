// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! What surrounds the logic, by the names that it uses.
//!
//! [`account`](super::account), [`pieces`](super::pieces), [`pin`](super::pin), [`region`](super::region),
//! [`revocable`](super::revocable) and [`roll`](super::roll) use `core`, one another, and what is named
//! here: the kernel's types and functions. On the host (`tests/host`) and under loom (`tests/loom`) another
//! `env.rs` with the same names stands in the place of this one, so that cargo compiles the very lines that
//! run in the kernel.
//!
//! What is said of a name here is what the logic relies on, whatever stands behind it.

use core::ops::DerefMut;

use kernel::prelude::*;

use super::account::Account;
use super::record::Task;
use super::refusal::Refusal;

/// A counted reference.
pub(crate) use kernel::sync::Arc as Shared;

/// A list that grows, and says so when memory is short.
pub(crate) use super::sys::List;

/// A sleeping lock around a value, with a place on the roll beside it. Process context only.
pub(crate) use super::sys::Lock;

/// A [`Lock`] that threads can also wait on.
pub(crate) use super::sys::Monitor;

/// A sleeping lock around a `bool`. A callback of the provider's takes it.
pub(crate) use super::nv::SlotLock;

/// Where a registration stands on the roll.
///
/// It does if and only if there is a [`Living`](super::roll::Living); then it is found by its number. Its drop
/// calls [`roll::gone`](super::roll::gone).
pub(crate) use super::sys::Standing as Place;

/// What tells one thread from another.
pub(crate) use super::sys::Thread;

/// What tells one process from another.
pub(crate) use kernel::task::Pid as Process;

/// What tells one user from another.
pub(crate) use kernel::task::Kuid as User;

/// Keeps the module loaded until dropped.
pub(crate) use super::sys::ModuleHold;

/// The device that does the HCA's DMA.
pub(crate) use super::sys::PciDevice;

/// A scatter list for ib_core, which may write to its first and last entry until `release`.
pub(crate) use super::sys::Table;

/// What ib_core gets to see of a [`Table`].
pub(crate) use super::sys::LentTable;

/// ib_core's name for a registration, from `get_pages` until `release`.
pub(crate) use super::ib::Ticket;

/// Memory that the provider has pinned, until dropped.
pub(crate) use super::nv::PersistentPin;

/// A [`PersistentPin`] mapped for a device, until dropped.
pub(crate) use super::nv::DmaMapping;

/// Memory that the provider has pinned, until dropped, and may take away before.
///
/// The drop unpins, unless the callback has run. After it no callback starts, except where the
/// provider would not unpin: then one comes some time, and finds nothing to do. It is neither made nor
/// dropped with the region's lock held: both take the provider's API lock.
pub(crate) use super::nv::RevocablePin;

/// Ranges of a BAR mapped for a device, until dropped. Takes no lock of the provider's.
pub(crate) use super::sys::BarMapping;

/// The provider's name for the page table of a pin. It comes round again.
pub(crate) use super::nv::TablePtr as PageTable;

/// References to slots, by their numbers.
pub(crate) use super::nv::Slots;

/// Runs a function with the directory locked.
pub(crate) use super::nv::directory;

/// Pins a span in the calling process. Takes the API lock. From then on, and even before the return,
/// [`freed`](super::pin::freed) may be called with the number, at most once, and the table dies with the
/// return of that call. `None`: pinned, but there is nothing to put it by.
pub(crate) use super::nv::get_pages;

/// Unpins, if the table is that of a pin of the calling process. Does not look into the table. Takes the API
/// lock. 0 if there will be no callback, or the pin was not found.
pub(crate) use super::nv::put_pages;

/// Calls a put until it returns anything but -ENOMEM, or for long enough.
pub(crate) use super::nv::retry;

/// Runs a function beside other [`gate_read`]s, and beside no [`gate_write`].
pub(crate) use super::sys::gate_read;

/// Runs a function beside no other [`gate_read`] or [`gate_write`].
pub(crate) use super::sys::gate_write;

/// The calling process.
pub(crate) use super::compat::process;

/// Whether the calling thread is on its way out, and its process has begun to close its descriptors.
pub(crate) use super::sys::is_exiting;

/// Whether a fatal signal waits for the calling thread.
pub(crate) use super::sys::is_killed;

/// Of how many pins a registration may consist.
pub(crate) use super::sys::max_pieces;

/// Tells that memory stays pinned until it is freed.
pub(crate) use super::observe::kept;

/// Tells of a callback for a pin that was put: the provider had said so, and had not done it.
pub(crate) use super::observe::late_callback;

/// Tells of a callback for nothing.
pub(crate) use super::observe::stray_callback;

/// Moves `value` behind a counted reference.
pub(crate) fn share<T>(value: T) -> Result<Shared<T>, Refusal> {
    Shared::new(value, GFP_KERNEL).map_err(|_| Refusal::NoMemory)
}

/// The user of the calling process.
pub(crate) fn user() -> User {
    current!().uid()
}

/// The limit for each user, in bytes, and the accounts, locked. `None`: there is no limit, and never was. A
/// callback of the provider's waits for this lock: nothing is called with it held that waits for a callback.
pub(crate) fn accounts() -> Option<(u64, impl DerefMut<Target = List<Account>>)> {
    super::sys::Accounts::open()
}

/// The calling thread, and the time in microseconds.
pub(crate) fn caller() -> (Task, u64) {
    // CAST: Not negative.
    (super::sys::task(), super::sys::microseconds() as u64)
}
