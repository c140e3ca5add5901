// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! What surrounds the logic, by the names that it uses.
//!
//! [`quota`](super::quota), [`mr`](super::mr), [`chunks`](super::chunks), [`callback_pin`](super::callback_pin),
//! [`persistent`](super::persistent), [`persistent_mapping`](super::persistent_mapping) and
//! [`revocable`](super::revocable) use `core`, one another, and what is named here: the kernel's types and functions.
//! On the host (`tests/host`) and under loom (`tests/loom`) another `env.rs` with the same names stands in the place of
//! this one, so that cargo compiles the very lines that run in the kernel.
//!
//! What is said of a name here is what the logic relies on, whatever stands behind it.

use super::history::Task;

/// A counted reference.
pub(crate) use kernel::sync::Arc as Shared;

/// A value that is set once.
pub(crate) use kernel::sync::SetOnce;

/// A list that grows, and says so when memory is short.
pub(crate) use super::collections::SmallVec;

/// Values by their numbers. Adding one allocates nothing.
pub(crate) use super::collections::IdMap;

/// Memory for one value of an [`IdMap`]. Allocated while no lock is held that a callback of nvidia.ko takes.
pub(crate) use super::collections::IdSlot;

/// A value behind a sleeping lock, for a static.
pub(crate) use super::sync::StaticMutex;
pub(crate) use super::sync::CALLBACKS_LOCK;
pub(crate) use super::sync::QUOTA_LOCK;

/// A sleeping lock around a value. Process context only.
pub(crate) use super::sync::Lock;

/// A [`Lock`] that threads can also wait on. A callback of nvidia.ko takes it: nothing is allocated while it is held.
pub(crate) use super::sync::Monitor;

/// A sleeping lock around a `bool`, with a value beside it (`of`), in memory of its own. A callback of nvidia.ko takes it:
/// nothing is allocated while it is held.
pub(crate) use super::sync::EntryLock;

/// Runs a function beside other [`put_rwsem_read`]s, and beside no [`put_rwsem_write`].
pub(crate) use super::sync::put_rwsem_read;

/// Runs a function beside no other [`put_rwsem_read`] or [`put_rwsem_write`].
pub(crate) use super::sync::put_rwsem_write;

/// A registration, in memory of its own: what is fixed of it (`of`), what its lock guards (`state`), and its entry
/// in the registry (`entry`). The drop of the entry calls
/// [`Registry::remove`](super::registry::Registry::remove).
pub(crate) use super::entries::Registered;

/// What tells one thread from another.
pub(crate) use super::task::Thread;

/// What tells one process from another.
pub(crate) use super::task::Process;

/// What tells one user from another.
pub(crate) type User = usize;

/// The calling process.
pub(crate) use super::task::process;

/// The user of the calling process.
pub(crate) use super::task::user;

/// Whether the calling thread is on its way out, and its process has begun to close its descriptors.
pub(crate) use super::task::is_exiting;

/// Whether a fatal signal waits for the calling thread.
pub(crate) use super::task::is_killed;

/// Of how many pins a registration may consist.
pub(crate) use super::params::max_chunks;

/// How many bytes one user may have pinned. Where there is no limit, there never was one.
pub(crate) use super::params::user_limit;

/// Whether the provider maps all that has a persistent pin.
pub(crate) use super::params::provider_maps;

/// Keeps the module loaded until dropped.
pub(crate) use super::module::ModuleRef;

/// The device that does the HCA's DMA.
pub(crate) use super::pci::PciDevice;

/// Returns nvidia.ko's last answer for a GPU and a device, if both are still in the machine. Takes no lock of nvidia.ko's.
pub(crate) use super::pci::recall;

/// Remembers nvidia.ko's answer for a GPU and a device.
pub(crate) use super::pci::remember;

/// Whether a page is the last of its BAR.
pub(crate) use super::pci::ends_bar;

/// [`PhysRanges`] mapped for a device, until dropped. Takes no lock of the provider's.
pub(crate) use super::dma::BarMapping;

/// Where pinned memory is.
pub(crate) use super::phys::PhysRanges;

/// A scatter list for ib_core, which may write to its first and last entry until `release`.
pub(crate) use super::sg::SgTable;

/// What ib_core gets to see of an [`SgTable`].
pub(crate) use super::sg::SgTableHead;

/// ib_core's name for a registration, from `get_pages` until `release`.
pub(crate) use super::ib::Ticket;

/// A registration's part in what ib_core counts.
pub(crate) use super::peer_stats::MrStats;

/// Memory that the provider has pinned, and may have mapped for a device, until dropped.
pub(crate) use super::nv::PersistentPin;

/// The provider's name for the page table of a pin. It comes round again.
pub(crate) use super::nv::TablePtr as PageTable;

/// What the provider's callback calls.
pub(crate) use super::nv::Callback;

/// Pins a span in the calling process. Takes the API lock. From then on, and even before the return,
/// [`Callback::free_callback`] may be called with the number, at most once, and the table dies with the return of
/// that call. `None`: pinned, but there is nothing to put it by.
pub(crate) use super::nv::get_pages;

/// Unpins, if the table is that of a pin of the calling process. Does not look into the table. Takes the API
/// lock. 0 if there will be no callback, or the pin was not found.
pub(crate) use super::nv::put_pages;

/// Calls a put until it returns anything but -ENOMEM, or for long enough.
pub(crate) use super::nv::retry;

/// Logs that memory stays pinned until it is freed.
pub(crate) use super::log::orphaned;

/// Logs a callback for a pin that was put: the provider had said so, and had not done it.
pub(crate) use super::log::late_callback;

/// Logs a callback for a pin that does not exist.
pub(crate) use super::log::spurious_callback;

/// Logs a scatter list for which ib_core may use an HCA page that is larger than 2 GiB.
pub(crate) use super::log::large_hca_page;

/// The calling thread, and the time in microseconds.
pub(crate) fn caller() -> (Task, u64) {
    (super::task::task(), super::task::microseconds())
}
