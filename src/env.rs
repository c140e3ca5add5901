// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! The kernel services that the logic uses, under one set of names: the prelude of the logic.
//!
//! [`quota`](super::quota), [`mr`](super::mr), [`chunks`](super::chunks),
//! [`callback_pin`](super::callback_pin), [`persistent`](super::persistent),
//! [`persistent_mapping`](super::persistent_mapping) and [`revocable`](super::revocable) use only
//! `core`, one another, files that use only `core` (such as `ranges`), and the kernel's types and
//! functions named here. `revocable` also uses `revocable_pin`, which `tests/fakes` replaces. On
//! the host (`tests/host`) and under loom (`tests/loom`), another `env.rs` with the same names
//! replaces this file. cargo thus compiles the same code that runs in the kernel.
//!
//! The comments state the facts that the logic relies on in every implementation.

use super::history::Task;

/// A counted reference.
pub(crate) use kernel::sync::Arc as Shared;

/// A value that is set once.
pub(crate) use kernel::sync::SetOnce;

/// A growable list whose functions return an error when an allocation fails.
pub(crate) use super::collections::SmallVec;

/// A map from numbers to values. A new value is stored in an [`IdSlot`], so adding a value
/// allocates nothing.
pub(crate) use super::collections::IdMap;

/// Memory for one value of an [`IdMap`]. Allocate it while no lock is held that a callback of
/// nvidia.ko takes.
pub(crate) use super::collections::IdSlot;
pub(crate) use kernel::prelude::GFP_KERNEL;

/// A static value protected by a sleeping lock.
pub(crate) use super::sync::StaticMutex;
pub(crate) use super::sync::CALLBACKS_LOCK;
pub(crate) use super::sync::QUOTA_LOCK;

/// A sleeping lock around a value. For process context only.
pub(crate) use super::sync::Lock;

/// A [`Lock`] that threads can also wait on. A callback of nvidia.ko takes this lock, so do not
/// allocate while holding it.
pub(crate) use super::sync::Monitor;

/// A sleeping lock around a `bool`, and a value (`of`) without a lock, in one allocation. A
/// callback of nvidia.ko takes this lock, so do not allocate while holding it.
pub(crate) use super::sync::EntryLock;

/// Runs a function concurrently with other [`put_rwsem_read`]s, but not with a [`put_rwsem_write`].
pub(crate) use super::sync::put_rwsem_read;

/// Runs a function, but not concurrently with another [`put_rwsem_read`] or [`put_rwsem_write`].
pub(crate) use super::sync::put_rwsem_write;

/// A registration in its own allocation: its constant part (`of`), the state under its lock
/// (`state`), and its entry in the registry (`entry`). The drop of the entry calls
/// [`Registry::remove`](super::registry::Registry::remove).
pub(crate) use super::entries::Registered;

/// Identifies a thread.
pub(crate) use super::task::Thread;

/// Identifies a process.
pub(crate) use super::task::Process;

/// Identifies a user.
pub(crate) type User = usize;

/// Returns the calling process.
pub(crate) use super::task::process;

/// Returns the user of the calling process.
pub(crate) use super::task::user;

/// Returns `true` if the calling thread is exiting. Its process may have begun to close its
/// descriptors.
pub(crate) use super::task::is_exiting;

/// Returns `true` if a fatal signal is pending for the calling thread.
pub(crate) use super::task::is_killed;

/// Returns the maximum number of pins in a registration.
pub(crate) use super::params::max_chunks;

/// Returns the number of bytes that one user may have pinned, or `None` if there is no limit. The
/// limit never changes.
pub(crate) use super::params::user_limit;

/// Returns `true` if nvidia.ko maps all persistent pins.
pub(crate) use super::params::provider_maps;

/// Keeps the module loaded until dropped.
pub(crate) use super::module::ModuleRef;

/// The device that does the HCA's DMA.
pub(crate) use super::pci::PciDevice;

/// Returns nvidia.ko's last answer to the question whether a device reaches a GPU, if both are
/// still in the machine. Takes no lock of nvidia.ko.
pub(crate) use super::pci::recall;

/// Remembers nvidia.ko's answer to the question whether a device reaches a GPU.
pub(crate) use super::pci::remember;

/// Returns `true` if a page is the last one of its BAR.
pub(crate) use super::pci::ends_bar;

/// A DMA mapping of [`PhysRanges`] for a device, until dropped. Takes no lock of nvidia.ko.
pub(crate) use super::dma::BarMapping;

/// The physical addresses of pinned memory.
pub(crate) use super::phys::PhysRanges;

/// A scatter list for ib_core, which may write to its first and last entry until `release`.
pub(crate) use super::sg::SgTable;

/// The head of an [`SgTable`], which ib_core gets.
pub(crate) use super::sg::SgTableHead;

/// ib_core's handle for a registration, valid from `get_pages` until `release`.
pub(crate) use super::ib::Ticket;

/// A registration's share of its client's statistics.
pub(crate) use super::peer_stats::MrStats;

/// Memory that nvidia.ko has pinned until this value is dropped, and may have mapped for a device.
pub(crate) use super::nv::PersistentPin;

/// nvidia.ko's handle for the page table of a pin. Handles are reused.
pub(crate) use super::nv::TablePtr as PageTable;

/// Pins a span in the calling process. Takes the API lock. nvidia.ko may then call the callback
/// with the pin's number, at most once, even before this function returns. nvidia.ko frees the
/// table when the callback returns. `None` means that the memory is pinned, but there is no table
/// to put.
pub(crate) use super::nv::get_pages;

/// Unpins, if the table belongs to a pin of the calling process. Does not read the table. Takes the
/// API lock. Returns 0 if no callback will come, or if the pin was not found.
pub(crate) use super::nv::put_pages;

/// Repeats a put that returns -ENOMEM, for up to a second.
pub(crate) use super::nv::retry;

/// Logs that memory stays pinned until it is freed.
pub(crate) use super::log::orphaned;

/// Counts an event, and logs it with the memory and nvidia.ko's code if they are known.
pub(crate) use super::log::report;

/// Returns the calling thread, and the time in microseconds.
pub(crate) fn caller() -> (Task, u64) {
    (super::task::task(), super::task::microseconds())
}
