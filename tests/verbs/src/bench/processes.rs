// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Processes that measure together.

use std::time::Duration;

use anyhow::{ensure, Result};

use crate::sys;
use crate::sys::{Ended, Pid, Reaped};

const PATIENCE: Duration = Duration::from_secs(5);

/// Killed when dropped.
pub(super) struct Processes(Vec<Pid>);

impl Processes {
    /// Forks so many, each of which does `body` with its number.
    pub(super) fn start(number: usize, body: impl Fn(usize) -> Result<()>) -> Result<Self> {
        // Threads that have been joined are still there for a moment.
        sys::wait_until(PATIENCE, || Ok(sys::threads()? == 1))?;
        let mut processes = Self(Vec::with_capacity(number));
        for index in 0..number {
            processes.0.push(sys::fork(|| match body(index) {
                Ok(()) => 0,
                Err(error) => {
                    eprintln!("gdr: process {index} of {number}: {error:#}");
                    1
                }
            })?);
        }
        Ok(processes)
    }

    /// Waits for the end of all, which must be a good one.
    pub(super) fn join(mut self) -> Result<()> {
        while let Some(pid) = self.0.pop() {
            let reaped = sys::reap(Some(pid), true)?;
            ensure!(
                reaped == Reaped::Child(pid, Ended::Exited(0)),
                "a process failed: {reaped:?}"
            );
        }
        Ok(())
    }
}

impl Drop for Processes {
    fn drop(&mut self) {
        for &pid in &self.0 {
            sys::kill(pid);
            // An error means that there is none.
            let _ = sys::reap(Some(pid), true);
        }
    }
}
