// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! The two clients that ib_core sees, one for each pin mode.

use core::marker::PhantomData;

use kernel::{
    prelude::*,
    sync::{
        atomic::{
            Acquire,
            Atomic,
            Relaxed,
            Release, //
        },
        Arc, //
    }, //
};

use crate::{
    history::{
        PinMode,
        Step, //
    },
    ib::{
        self,
        RevokerCell,
        Ticket, //
    },
    log,
    mr::Mr,
    pci::PciDevice,
    peer_stats::{
        MrStats,
        PeerStats, //
    },
    persistent::PersistentMr,
    ranges::PageSize,
    reason::Reason,
    revocable::RevocableMr,
    sg::SgTableHead,
    task::Thread, //
};

/// Permission to accept ranges. `acquire` answers "not mine" while no `Ready` exists.
///
/// ib_core may call `acquire` as soon as the first client is registered, before the module is
/// completely set up.
pub(crate) struct Ready(());

static READY: Atomic<bool> = Atomic::new(false);

impl Ready {
    pub(crate) fn new() -> Self {
        READY.store(true, Release);
        Ready(())
    }
}

impl Drop for Ready {
    fn drop(&mut self) {
        READY.store(false, Release);
    }
}

/// The last range that the revocable client refused, until the persistent client is asked about it.
///
/// ib_core asks the two clients in turn, on one thread and with its mutex held. A pin that fails
/// now may succeed a moment later. If the persistent client then made that pin, the memory would
/// stay pinned after it was freed, even though the HCA supports revocation.
///
/// The words are the address of the task to which the range was refused (0 for none), the first
/// address of the range, and its length.
struct LastRefused([Atomic<u64>; 3]);

static LAST_REFUSED: LastRefused = LastRefused([const { Atomic::new(0) }; 3]);

impl LastRefused {
    fn forget(&self) {
        let [thread, ..] = &self.0;
        thread.store(0, Relaxed);
    }

    fn set(&self, addr: u64, size: u64) {
        for (word, value) in self.0.iter().zip([Thread::current().addr(), addr, size]) {
            word.store(value, Relaxed);
        }
    }

    /// Returns `true` if the revocable client refused this range to this thread, and forgets the
    /// refusal. The refusal must be forgotten, since the next registration may be for an HCA for
    /// which ib_core skips the revocable client.
    ///
    /// If another module's client accepts the range before the persistent client is asked, the
    /// refusal stays until the revocable client is asked again. Until then, the persistent client
    /// may wrongly refuse the range once, for an HCA that cannot revoke. Only this thread, or a new
    /// thread whose task has the same address, can get that refusal.
    fn take(&self, addr: u64, size: u64) -> bool {
        let mut words = self.0.iter().zip([Thread::current().addr(), addr, size]);
        let found = words.all(|(word, value)| word.load(Relaxed) == value);
        if found {
            self.forget();
        }
        found
    }
}

/// Logs the refusal of a step after `acquire`, and converts the reason to the error that ib_core
/// returns to the application.
fn step<M: Mr, R>(mr: &M, step: Step, result: Result<R, Reason>) -> Result<R> {
    result.map_err(|reason| {
        let span = &mr.fixed().span;
        log::refused(M::MODE, step, span.start(), span.len(), reason);
        Error::from_errno(reason.errno())
    })
}

/// The peer-memory client of one pin mode.
pub(crate) struct PeerClient<M>(PhantomData<M>);

/// The client whose pins stay until `release`.
pub(crate) type Persistent = PeerClient<PersistentMr>;

/// The client whose pins end when the memory is freed.
pub(crate) type Revocable = PeerClient<RevocableMr>;

impl<M: Mr> ib::Client for PeerClient<M> {
    type Mr = M;

    fn acquire(stats: MrStats, addr: u64, size: u64) -> Result<Arc<M>, Reason> {
        match READY.load(Acquire) {
            true => M::pin(stats, addr, size),
            false => Err(Reason::Unloading),
        }
    }

    fn is_refused(addr: u64, size: u64) -> bool {
        match M::MODE {
            PinMode::Persistent => LAST_REFUSED.take(addr, size),
            // The revocable client is asked first, so a new registration begins here.
            PinMode::Revocable => {
                LAST_REFUSED.forget();
                false
            }
        }
    }

    fn refused(addr: u64, size: u64, reason: Reason) {
        if M::MODE == PinMode::Revocable && !reason.is_handed_on() {
            LAST_REFUSED.set(addr, size);
        }
        log::refused(M::MODE, Step::Acquire, addr, size, reason);
    }

    fn get_pages(mr: &M, ticket: Ticket) -> Result {
        step(mr, Step::GetPages, mr.set_ticket(ticket))
    }

    fn dma_map(mr: &M, device: Option<&PciDevice>) -> Result<SgTableHead> {
        let result = device.ok_or(Reason::NotPci);
        let result = result.and_then(|device| mr.map(device));
        step(mr, Step::DmaMap, result)
    }

    fn dma_unmap(mr: &M) {
        mr.unmap();
    }

    fn release(mr: Arc<M>) {
        M::release(mr);
    }

    fn page_size(mr: &M) -> PageSize {
        mr.fixed().page_size()
    }

    fn stats(mr: &M) -> &MrStats {
        &mr.fixed().stats
    }

    fn peer_stats() -> &'static PeerStats {
        static PERSISTENT: PeerStats = PeerStats::new();
        static REVOCABLE: PeerStats = PeerStats::new();
        match M::MODE {
            PinMode::Persistent => &PERSISTENT,
            PinMode::Revocable => &REVOCABLE,
        }
    }

    fn revoker() -> Option<&'static RevokerCell> {
        static REVOKER: RevokerCell = RevokerCell::new();
        (M::MODE == PinMode::Revocable).then_some(&REVOKER)
    }
}
