// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! The calling thread and its process, and the time.
//!
//! C headers: [`include/linux/sched.h`](srctree/include/linux/sched.h),
//! [`include/linux/timekeeping.h`](srctree/include/linux/timekeeping.h).

use kernel::{
    bindings,
    mm::virt::flags,
    prelude::*,
    task::Task,
    types::ForeignOwnable, //
};

use crate::{
    c,
    compat,
    history::{
        self,
        Refusal, //
    },
    reason::VmaKind, //
};

/// The address of a task, to compare with that of another. Once a task has ended, it may be a new one's.
#[derive(Clone, Copy, Eq, PartialEq)]
pub(crate) struct Thread(usize);

impl Thread {
    /// The calling thread.
    pub(crate) fn current() -> Self {
        Thread(Task::current_raw().addr())
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

/// Whether the calling thread is in `do_exit()`: so far that it may have closed some of its descriptors.
pub(crate) fn is_exiting() -> bool {
    // SAFETY: A thread's flags are its own.
    let flags = unsafe { (*Task::current_raw()).flags };
    flags & bindings::PF_EXITING != 0
}

/// The user of the calling process.
pub(crate) fn user() -> usize {
    // CAST: It has 32 bits.
    // SAFETY: Has no preconditions.
    unsafe { c::peermem_user() as usize }
}

/// Monotonic time in microseconds.
pub(crate) fn microseconds() -> i64 {
    // SAFETY: Both have no preconditions.
    unsafe { bindings::ktime_to_us(bindings::ktime_get()) }
}

/// The calling thread, as a record has it.
pub(crate) fn task() -> history::Task {
    const _: () = assert!(history::COMM_LEN == bindings::TASK_COMM_LEN as usize);

    let mut comm = [0; history::COMM_LEN];
    // SAFETY: Writes so many bytes.
    unsafe { c::peermem_comm(comm.as_mut_ptr().cast()) };
    history::Task {
        tgid: compat::process(),
        pid: current!().pid(),
        comm,
    }
}

/// Functions of a file whose release is the end of a system call.
const AT_RETURN: bindings::file_operations = bindings::file_operations {
    owner: &raw mut c::__this_module,
    release: Some(settle_callback),
    ..pin_init::zeroed()
};

/// A refusal, and the function to call with it at the end of the system call. The `bool` is `true` if the call succeeds.
type Settlement = (Refusal, fn(&Refusal, bool));

/// Has `settle` called with `refusal` when the calling thread returns from its system call. Returns `false` if the thread is
/// in no system call, or there is no memory. May sleep.
pub(crate) fn settle_at_return(refusal: &Refusal, settle: fn(&Refusal, bool)) -> bool {
    // SAFETY: Has no preconditions.
    if !unsafe { c::peermem_returns_to_user() } {
        return false;
    }
    let settlement: Settlement = (*refusal, settle);
    let Ok(settlement) = KBox::new(settlement, GFP_KERNEL | __GFP_NOWARN) else {
        return false;
    };
    let data = settlement.into_foreign();
    // SAFETY: The functions are a static's, and their release takes `data`, once.
    let is_deferred = unsafe { c::peermem_at_return(&AT_RETURN, data) };
    if !is_deferred {
        // SAFETY: No file was made, so nobody else has the pointer.
        drop(unsafe { <KBox<Settlement>>::from_foreign(data) });
    }
    is_deferred
}

/// # Safety
///
/// For the kernel alone, which calls `release` of `struct file_operations` once, for a file of [`settle_at_return`].
unsafe extern "C" fn settle_callback(
    _inode: *mut bindings::inode,
    file: *mut bindings::file,
) -> c_int {
    // SAFETY: `settle_at_return` has put it there, and nobody uses it any more.
    let settlement = unsafe { <KBox<Settlement>>::from_foreign((*file).private_data) };
    let (refusal, settle) = &*settlement;
    // SAFETY: Has no preconditions.
    settle(refusal, unsafe { c::peermem_syscall_succeeded() });
    0
}

/// What the calling process has at `addr`, if that shows that no GPU's driver put it there. `None`:
/// memory of a device, addresses that are only reserved, or another thread is changing them.
pub(crate) fn vma_kind(addr: u64) -> Option<VmaKind> {
    let addr = usize::try_from(addr).ok()?;
    // SAFETY: Has no preconditions.
    if !unsafe { c::peermem_is_user_address(addr) } {
        return Some(VmaKind::Invalid);
    }
    let current = current!();
    // Not waited for: ib_core's mutex for the whole machine is held, and who has this lock may have
    // arranged to keep it.
    let mappings = current.mm()?.mmap_read_trylock()?;
    let Some(mapping) = mappings.vma_lookup(addr) else {
        return Some(VmaKind::Unmapped);
    };
    let of_cpu = mapping.flags() & (flags::READ | flags::WRITE | flags::EXEC) != 0;
    let of_device = mapping.flags() & (flags::IO | flags::PFNMAP | flags::MIXEDMAP) != 0;
    (of_cpu && !of_device).then_some(VmaKind::Host)
}
