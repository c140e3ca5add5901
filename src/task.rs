// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! The calling thread and its process, and the time.
//!
//! C headers: [`include/linux/sched.h`](srctree/include/linux/sched.h),
//! [`include/linux/timekeeping.h`](srctree/include/linux/timekeeping.h); C side: [`helpers.c`](helpers.c).

use kernel::prelude::*;

use crate::{
    c,
    history::{
        self,
        Refusal, //
    },
    reason::VmaKind, //
};

/// The number of a process, outside all PID namespaces.
pub(crate) type Process = i32;

/// The address of a task, to compare with that of another. Once a task has ended, it may be a new one's.
#[derive(Clone, Copy, Eq, PartialEq)]
pub(crate) struct Thread(usize);

impl Thread {
    /// The calling thread.
    pub(crate) fn current() -> Self {
        // SAFETY: Has no preconditions.
        Thread(unsafe { c::peermem_current() }.addr())
    }

    /// As a number, which is not 0.
    pub(crate) fn addr(self) -> usize {
        self.0
    }
}

/// Whether a fatal signal waits for the calling thread.
pub(crate) fn is_killed() -> bool {
    // SAFETY: Has no preconditions.
    unsafe { c::peermem_is_killed() }
}

/// Returns `true` once the calling thread is in `do_exit()`: it may have closed some of its descriptors.
pub(crate) fn is_exiting() -> bool {
    // SAFETY: Has no preconditions.
    unsafe { c::peermem_is_exiting() }
}

/// The user of the calling process.
pub(crate) fn user() -> usize {
    // CAST: It has 32 bits.
    // SAFETY: Has no preconditions.
    unsafe { c::peermem_user() as usize }
}

/// The calling process.
pub(crate) fn process() -> Process {
    // SAFETY: Has no preconditions.
    unsafe { c::peermem_process() }
}

/// Monotonic time in microseconds.
pub(crate) fn microseconds() -> u64 {
    // SAFETY: Has no preconditions.
    unsafe { c::peermem_microseconds() }
}

/// The calling thread, as a record has it.
pub(crate) fn task() -> history::Task {
    let mut task = history::Task {
        tgid: 0,
        pid: 0,
        comm: [0; history::COMM_LEN],
    };
    // SAFETY: All three are valid for writes, and `layout.c` asserts the length of the name.
    unsafe { c::peermem_thread(&mut task.tgid, &mut task.pid, task.comm.as_mut_ptr().cast()) };
    task
}

/// A refusal, and the function to call with it at the end of the system call. The `bool` is `true` if the call succeeds.
#[repr(C)]
struct Settlement {
    /// First: C has a pointer to this field, and hands it back.
    head: c::peermem_settlement,
    refusal: Refusal,
    settle: fn(&Refusal, bool),
}

/// Has `settle` called with `refusal` when the calling thread returns from its system call. Returns `false` if the thread is
/// in no system call, or there is no memory. May sleep.
pub(crate) fn settle_at_return(refusal: &Refusal, settle: fn(&Refusal, bool)) -> bool {
    // SAFETY: Has no preconditions.
    if !unsafe { c::peermem_returns_to_user() } {
        return false;
    }
    let settlement = Settlement {
        head: c::peermem_settlement {
            settle: Some(settle_callback),
        },
        refusal: *refusal,
        settle,
    };
    let Ok(settlement) = KBox::new(settlement, GFP_KERNEL | __GFP_NOWARN) else {
        return false;
    };
    let settlement = KBox::into_raw(settlement);
    // SAFETY: The callback takes the settlement, once.
    let is_deferred = unsafe { c::peermem_at_return(settlement.cast()) };
    if !is_deferred {
        // SAFETY: The callback is not called, so nobody else has the pointer.
        drop(unsafe { KBox::from_raw(settlement) });
    }
    is_deferred
}

/// # Safety
///
/// Called once with the `head` that [`settle_at_return`] gave to C.
unsafe extern "C" fn settle_callback(head: *mut c::peermem_settlement, succeeded: bool) {
    // SAFETY: `head` is the first field of a `Settlement` that nobody else has any more.
    let settlement = unsafe { KBox::from_raw(head.cast::<Settlement>()) };
    (settlement.settle)(&settlement.refusal, succeeded);
}

/// What the calling process has at `addr`, if that shows that no GPU's driver put it there. `None`:
/// memory of a device, addresses that are only reserved, or another thread is changing them.
pub(crate) fn vma_kind(addr: u64) -> Option<VmaKind> {
    // SAFETY: Has no preconditions.
    match unsafe { c::peermem_vma(addr) } {
        c::peermem_vma_PEERMEM_VMA_INVALID => Some(VmaKind::Invalid),
        c::peermem_vma_PEERMEM_VMA_NONE => Some(VmaKind::Unmapped),
        c::peermem_vma_PEERMEM_VMA_HOST => Some(VmaKind::Host),
        _ => None,
    }
}
