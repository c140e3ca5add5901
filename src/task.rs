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

/// Process ID in the initial PID namespace.
pub(crate) type Process = i32;

/// Address of a task, for comparison with the addresses of other tasks. After a task has ended, a
/// new task may have the same address.
#[derive(Clone, Copy, Eq, PartialEq)]
pub(crate) struct Thread(usize);

impl Thread {
    /// Returns the calling thread.
    pub(crate) fn current() -> Self {
        // SAFETY: The function has no preconditions.
        Thread(unsafe { c::peermem_current() }.addr())
    }

    /// Returns the address as a number, which is not 0.
    pub(crate) fn addr(self) -> u64 {
        // CAST: `u64` is not narrower than `usize`.
        self.0 as u64
    }
}

/// Returns `true` if a fatal signal is pending for the calling thread.
pub(crate) fn is_killed() -> bool {
    // SAFETY: The function has no preconditions.
    unsafe { c::peermem_is_killed() }
}

/// Returns `true` once the calling thread is in `do_exit()`. The thread may have closed some of its
/// descriptors.
pub(crate) fn is_exiting() -> bool {
    // SAFETY: The function has no preconditions.
    unsafe { c::peermem_is_exiting() }
}

/// Returns the user ID of the calling process.
pub(crate) fn user() -> usize {
    // CAST: User IDs have 32 bits.
    // SAFETY: The function has no preconditions.
    unsafe { c::peermem_user() as usize }
}

/// Returns the calling process.
pub(crate) fn process() -> Process {
    // SAFETY: The function has no preconditions.
    unsafe { c::peermem_process() }
}

/// Returns the monotonic time in microseconds.
pub(crate) fn microseconds() -> u64 {
    // SAFETY: The function has no preconditions.
    unsafe { c::peermem_microseconds() }
}

/// Returns the calling thread's IDs and name for a record.
pub(crate) fn task() -> history::Task {
    let mut task = history::Task {
        tgid: 0,
        pid: 0,
        comm: [0; history::COMM_LEN],
    };
    // SAFETY: All three pointers are valid for writes. `layout.c` asserts the length of the name.
    unsafe { c::peermem_thread(&mut task.tgid, &mut task.pid, task.comm.as_mut_ptr().cast()) };
    task
}

/// A refusal, and the function to call with the refusal at the end of the system call. The `bool`
/// is `true` if the system call succeeds.
#[repr(C)]
struct Settlement {
    /// Must be the first field: C code gets a pointer to it, and passes the pointer back.
    head: c::peermem_settlement,
    refusal: Refusal,
    settle: fn(&Refusal, bool),
}

/// Calls `settle` with `refusal` when the calling thread returns from its system call. Returns
/// `false`, and never calls `settle`, if the thread is in no system call or if there is no memory.
/// May sleep.
pub(crate) fn settle_at_return(refusal: &Refusal, settle: fn(&Refusal, bool)) -> bool {
    // SAFETY: The function has no preconditions.
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
    // SAFETY: The callback takes ownership of the settlement, and is called at most once.
    let is_deferred = unsafe { c::peermem_at_return(settlement.cast()) };
    if !is_deferred {
        // SAFETY: The callback is not called, so nobody else has the pointer.
        drop(unsafe { KBox::from_raw(settlement) });
    }
    is_deferred
}

/// # Safety
///
/// Called once, with the `head` that [`settle_at_return`] passed to C.
unsafe extern "C" fn settle_callback(head: *mut c::peermem_settlement, succeeded: bool) {
    // SAFETY: `head` is the first field of a `Settlement` to which nobody else has a pointer any
    // more.
    let settlement = unsafe { KBox::from_raw(head.cast::<Settlement>()) };
    (settlement.settle)(&settlement.refusal, succeeded);
}

/// Returns the kind of mapping at `addr` in the calling process, if that kind shows that no GPU
/// driver made the mapping. Returns `None` for device memory, for addresses that are only reserved,
/// and if another thread is changing the mappings.
pub(crate) fn vma_kind(addr: u64) -> Option<VmaKind> {
    // SAFETY: The function has no preconditions.
    match unsafe { c::peermem_vma(addr) } {
        c::peermem_vma_PEERMEM_VMA_INVALID => Some(VmaKind::Invalid),
        c::peermem_vma_PEERMEM_VMA_NONE => Some(VmaKind::Unmapped),
        c::peermem_vma_PEERMEM_VMA_HOST => Some(VmaKind::Host),
        _ => None,
    }
}
