// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Kernel threads. The module treats each one as a separate process.

use core::ptr::NonNull;

use kernel::{
    prelude::*,
    sync::{
        atomic::{
            Acquire,
            Atomic,
            Release, //
        },
        Arc,
        Completion, //
    },
    time::{
        delay::fsleep,
        Delta, //
    }, //
};

use super::{
    fake_thread_join,
    fake_thread_start,
    Hook, //
};

#[pin_data]
struct ThreadState {
    #[pin]
    done: Completion,
    finished: Atomic<bool>,
}

struct Start {
    body: Hook,
    state: Arc<ThreadState>,
}

/// A kernel thread, which the module treats as a separate process. The drop waits until the thread
/// has ended.
pub(crate) struct Thread {
    task: NonNull<c_void>,
    state: Arc<ThreadState>,
}

impl Thread {
    /// Runs `body` once on a new thread.
    pub(crate) fn start(body: impl FnMut() + Send + 'static) -> Result<Self> {
        let state = Arc::pin_init(
            pin_init!(ThreadState {
                done <- Completion::new(),
                finished: Atomic::new(false),
            }),
            GFP_KERNEL,
        )?;
        let start = KBox::new(
            Start {
                body: KBox::new(body, GFP_KERNEL)?,
                state: state.clone(),
            },
            GFP_KERNEL,
        )?;
        let data = KBox::into_raw(start);
        // SAFETY: If the thread is started, `thread_main` takes ownership of `data`, once.
        let task = unsafe { fake_thread_start(thread_main, data.cast()) };
        let Some(task) = NonNull::new(task) else {
            // SAFETY: No thread was started, and `into_raw` returned the pointer above.
            drop(unsafe { KBox::from_raw(data) });
            return Err(ENOMEM);
        };
        Ok(Thread { task, state })
    }

    /// Returns `true` if the thread ends within ten seconds.
    pub(crate) fn ends(&self) -> bool {
        (0..10_000).any(|_| {
            fsleep(Delta::from_millis(1));
            self.state.finished.load(Acquire)
        })
    }

    /// Waits for the thread's end.
    pub(crate) fn join(self) {}
}

// SAFETY: Any thread may wait for a task.
unsafe impl Send for Thread {}

impl Drop for Thread {
    fn drop(&mut self) {
        self.state.done.wait_for_completion();
        // SAFETY: This value holds a reference to the task, and the task's function has signalled
        // its end.
        unsafe { fake_thread_join(self.task.as_ptr()) };
    }
}

/// # Safety
///
/// `data` must point to a [`Start`] that [`Thread::start`] made. This function takes ownership of
/// `data`.
unsafe extern "C" fn thread_main(data: *mut c_void) -> c_int {
    // SAFETY: The caller passes ownership of a `Start`.
    let start = unsafe { <KBox<Start>>::from_raw(data.cast()) };
    let Start { mut body, state } = KBox::into_inner(start);
    body();
    drop(body);
    state.finished.store(true, Release);
    state.done.complete_all();
    0
}
