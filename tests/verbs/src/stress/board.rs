// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! State that all processes of a stress run share: counts of operations, and the current
//! disturbances.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;

use anyhow::Result;

use crate::sys::SharedWords;

/// Number of concurrent sessions.
pub(super) const SLOTS: usize = 6;
/// Maximum number of GPUs.
pub(super) const GPUS: usize = 8;

macro_rules! named {
    ($(#[$doc:meta])* $kind:ident { $($name:ident = $text:literal,)* }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(super) enum $kind {
            $($name,)*
        }

        impl $kind {
            pub(super) const NAMES: &'static [&'static str] = &[$($text,)*];
        }
    };
}

named! {
    /// Operations, which are counted when they are done. An operation that a kill interrupts is not
    /// counted.
    Operation {
        Open = "open",
        Connect = "connect",
        Allocate = "allocate",
        Register = "register",
        Refuse = "refuse",
        Write = "write",
        Read = "read",
        Send = "send",
        Atomic = "atomic",
        Deregister = "deregister",
        FreeQuiet = "free",
        FreeIoctl = "free_under_region",
        FreeThread = "free_under_region_by_kernel_thread",
        FreeUnmap = "unmap_under_region",
        UseRevoked = "use_revoked",
        UseOrphaned = "use_orphaned",
        Verify = "verify",
        Fork = "fork",
        PassDescriptor = "pass_descriptor",
        LastClose = "last_close_elsewhere",
        Exit = "exit",
        ExitLive = "exit_with_live_regions",
        ExitHeld = "exit_while_child_holds",
        KillSelf = "killed_in_traffic",
        Killed = "killed_anywhere",
        ModuleBusy = "module_busy",
        ModuleCycle = "module_reloaded",
        Unbind = "gpu_rebound",
        NetDown = "net_down_up",
        NetLoad = "net_load",
        LinkCycle = "rdma_link_cycled",
    }
}

named! {
    /// Numbers that a run reports in addition to its operations.
    Figure {
        Bytes = "bytes_verified",
        Sessions = "sessions",
        MetRevocation = "requests_that_met_a_free",
        BeforeFree = "requests_done_before_a_free",
        LostRequests = "requests_lost_by_the_wire",
        FailedByRepeat = "requests_lost_to_a_repeated_read",
        RefusedThen = "refused_while_disturbed",
        Bus = "sessions_lost_to_unbind",
        Abandoned = "sessions_that_let_go",
        ProbeRefusals = "pins_refused_while_unbinding",
    }
}

/// Indices of the resources that a run disturbs: the network, the RDMA devices, the module and the
/// GPUs.
const NET: usize = 0;
const LINK: usize = 1;
const MODULE: usize = 2;
const GPU: usize = 3;
const DISTURBANCES: usize = GPU + GPUS;

// Offsets of the board's parts in the shared memory, in words.
const OPERATIONS: usize = 0;
const FIGURES: usize = OPERATIONS + Operation::NAMES.len();
const PROGRESS: usize = FIGURES + Figure::NAMES.len();
const DISTURBED: usize = PROGRESS + SLOTS;
const FLAGS: usize = DISTURBED + DISTURBANCES;
const READS: usize = FLAGS + 3;
const WORDS: usize = READS + SLOTS;

/// A resource that a run disturbs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    Net,
    Link,
    Module,
    Gpu(usize),
}

impl Place {
    fn word(self) -> usize {
        match self {
            Self::Net => NET,
            Self::Link => LINK,
            Self::Module => MODULE,
            Self::Gpu(index) => GPU + index % GPUS,
        }
    }
}

/// A snapshot of the disturbance counters. Each resource has one counter, which is incremented when
/// a disturbance starts and when it ends. An odd counter means that the resource is being
/// disturbed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Glance([u64; DISTURBANCES]);

/// The board, shared by all processes of a run.
#[derive(Debug)]
pub(super) struct Board(SharedWords);

impl Board {
    pub(super) fn new() -> Result<Self> {
        Ok(Self(SharedWords::new(WORDS)?))
    }

    fn word(&self, at: usize) -> &AtomicU64 {
        &self.0.all()[at]
    }

    pub(super) fn done(&self, operation: Operation) {
        self.word(OPERATIONS + operation as usize)
            .fetch_add(1, SeqCst);
    }

    /// Counts an operation like [`Board::done`], and also as progress of the session in `slot`.
    pub(super) fn done_by(&self, slot: usize, operation: Operation) {
        self.done(operation);
        self.word(PROGRESS + slot).fetch_add(1, SeqCst);
    }

    pub(super) fn note(&self, figure: Figure, count: u64) {
        self.word(FIGURES + figure as usize)
            .fetch_add(count, SeqCst);
    }

    /// Returns the counts from word `first` on, with their names.
    fn named(
        &self,
        first: usize,
        names: &'static [&'static str],
    ) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        let counts = (first..).map(|at| self.word(at).load(SeqCst));
        names.iter().copied().zip(counts)
    }

    pub(super) fn operations(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        self.named(OPERATIONS, Operation::NAMES)
    }

    pub(super) fn figures(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        self.named(FIGURES, Figure::NAMES)
    }

    pub(super) fn total(&self) -> u64 {
        self.operations().map(|(_, count)| count).sum()
    }

    /// Returns the number of operations of the session in `slot`.
    pub(super) fn progress(&self, slot: usize) -> u64 {
        self.word(PROGRESS + slot).load(SeqCst)
    }

    pub(super) fn begin_session(&self, slot: usize) {
        self.word(PROGRESS + slot).store(0, SeqCst);
    }

    /// Starts a disturbance of `place`, or ends the current one.
    pub(super) fn disturb(&self, place: Place) {
        self.word(DISTURBED + place.word()).fetch_add(1, SeqCst);
    }

    pub(super) fn glance(&self) -> Glance {
        Glance(std::array::from_fn(|at| {
            self.word(DISTURBED + at).load(SeqCst)
        }))
    }

    /// Returns `true` if a disturbance was in progress at snapshot `before`, or has begun since
    /// then.
    pub(super) fn disturbed_since(&self, before: &Glance) -> bool {
        before.0.iter().any(|count| count % 2 == 1) || *before != self.glance()
    }

    /// Returns `true` if a device that sessions need was missing at snapshot `before`, or has been
    /// removed since then.
    pub(super) fn uprooted_since(&self, before: &Glance) -> bool {
        self.link_gone_since(before) || self.gpu_gone_since(before)
    }

    /// Returns `true` if a session's failure is excused. A failure is excused if a disturbance was
    /// in progress at snapshot `before`, which precedes the request, or has begun since then. A
    /// failure is also excused if the session has lost a device since snapshot `opened`. A session
    /// checks its devices only between steps, and a step may be long.
    pub(super) fn excuses(&self, before: &Glance, opened: &Glance) -> bool {
        self.disturbed_since(before) || self.uprooted_since(opened)
    }

    /// Returns `true` if a GPU was unbound at snapshot `before`, or has been unbound since then.
    pub(super) fn gpu_gone_since(&self, before: &Glance) -> bool {
        (GPU..DISTURBANCES).any(|at| self.changed_since(before, at))
    }

    pub(super) fn link_gone_since(&self, before: &Glance) -> bool {
        self.changed_since(before, LINK)
    }

    fn changed_since(&self, before: &Glance, at: usize) -> bool {
        before.0[at] % 2 == 1 || before.0[at] != self.word(DISTURBED + at).load(SeqCst)
    }

    /// Returns `true` if the session in `slot` may READ. A READ is not allowed while the network is
    /// disturbed. After a lost response, rxe's requester takes the next response for an error. The
    /// requester then completes the failed READ as a success.
    pub(super) fn begin_read(&self, slot: usize) -> bool {
        let word = self.word(READS + slot);
        word.store(1, SeqCst);
        let allowed = self.glance().0[NET] % 2 == 0;
        if !allowed {
            word.store(0, SeqCst);
        }
        allowed
    }

    pub(super) fn end_read(&self, slot: usize) {
        self.word(READS + slot).store(0, SeqCst);
    }

    pub(super) fn has_reads(&self) -> bool {
        (0..SLOTS).any(|slot| self.word(READS + slot).load(SeqCst) != 0)
    }

    pub(super) fn stop(&self) {
        self.word(FLAGS).store(1, SeqCst);
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.word(FLAGS).load(SeqCst) != 0
    }

    /// Asks the sessions to keep no region between two steps, so that the module can be unloaded.
    /// `false` ends the request.
    pub(super) fn thin(&self, thin: bool) {
        self.word(FLAGS + 1).store(u64::from(thin), SeqCst);
    }

    pub(super) fn is_thin(&self) -> bool {
        self.word(FLAGS + 1).load(SeqCst) != 0
    }

    /// Records a failure and stops the run.
    pub(super) fn fail(&self) {
        self.word(FLAGS + 2).store(1, SeqCst);
        self.stop();
    }

    pub(super) fn has_failed(&self) -> bool {
        self.word(FLAGS + 2).load(SeqCst) != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disturbance_shows_during_and_after_it() {
        let board = Board::new().expect("memory");
        let before = board.glance();
        assert!(!board.disturbed_since(&before));
        board.disturb(Place::Gpu(1));
        assert!(board.disturbed_since(&before) && board.uprooted_since(&before));
        let during = board.glance();
        assert!(board.disturbed_since(&during));
        board.disturb(Place::Gpu(1));
        assert!(board.disturbed_since(&before) && board.disturbed_since(&during));
        let after = board.glance();
        assert!(!board.disturbed_since(&after));
        // The session's memory on the GPU stays lost after the GPU is bound again.
        assert!(board.excuses(&after, &before) && !board.excuses(&after, &after));
        board.disturb(Place::Net);
        assert!(board.disturbed_since(&after) && !board.uprooted_since(&after));
        board.disturb(Place::Net);
        assert!(!board.excuses(&board.glance(), &after));
    }

    #[test]
    fn no_read_begins_while_the_network_is_disturbed() {
        let board = Board::new().expect("memory");
        assert!(board.begin_read(1) && board.has_reads());
        board.end_read(1);
        board.disturb(Place::Net);
        assert!(!board.begin_read(1) && !board.has_reads());
        board.disturb(Place::Net);
        assert!(board.begin_read(1));
    }

    #[test]
    fn operations_add_up() {
        let board = Board::new().expect("memory");
        board.done(Operation::Register);
        board.done_by(2, Operation::Register);
        board.done_by(2, Operation::Write);
        assert_eq!((board.total(), board.progress(2)), (3, 2));
        board.begin_session(2);
        assert_eq!((board.total(), board.progress(2)), (3, 0));
    }
}
