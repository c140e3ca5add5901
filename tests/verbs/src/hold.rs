// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Tools that force an order of events: hold points in the kernel's modules, and threads that may
//! never return from the kernel.

use std::path::PathBuf;
use std::sync::mpsc;
use std::time::Duration;
use std::{fs, thread};

use anyhow::{bail, ensure, Context, Result};

use crate::{module_files, sys};

/// Time limit for a thread to end, or to reach a hold point or a function.
const PATIENCE: Duration = Duration::from_secs(25);

/// A hold point that stops threads until this value is dropped. See `linux/test_hold.h`.
#[derive(Debug)]
pub(crate) struct Hold {
    path: PathBuf,
}

impl Hold {
    /// Arms a hold point, named `<module's directory>/<name>`, such as
    /// `ib_peer_mem/before_release`.
    pub(crate) fn arm(place: &str) -> Result<Self> {
        let (module, name) = place.split_once('/').context("no module in a hold point")?;
        let path = PathBuf::from(format!("/sys/kernel/debug/{module}/hold/{name}"));
        fs::write(&path, "1").with_context(|| path.display().to_string())?;
        Ok(Self { path })
    }

    /// Returns the number of threads that wait at the hold point.
    pub(crate) fn waiting(&self) -> Result<u64> {
        let text = fs::read_to_string(&self.path)?;
        module_files::number(&module_files::parse(text.trim_end())?, "waiting")
    }

    /// Waits until `worker` stops at the hold point, or ends. Returns `true` if `worker` stopped.
    pub(crate) fn caught<T>(&self, worker: &mut Worker<T>) -> Result<bool> {
        let mut caught = false;
        let settled = sys::wait_until(PATIENCE, || {
            caught = self.waiting()? > 0;
            Ok(caught || worker.has_ended()?)
        })?;
        ensure!(
            settled,
            "{} neither ended nor reached {}: {}",
            worker.name,
            self.path.display(),
            worker.place()
        );
        Ok(caught)
    }

    /// Arms hold point `place`, and calls `start`, which starts a worker. Waits until this worker
    /// stops at the hold point.
    pub(crate) fn catch<T>(
        place: &str,
        start: impl FnOnce() -> Result<Worker<T>>,
    ) -> Result<(Self, Worker<T>)> {
        let hold = Self::arm(place)?;
        let mut worker = start()?;
        ensure!(hold.caught(&mut worker)?, "{place} was not reached");
        Ok((hold, worker))
    }

    /// Releases all threads that wait at the hold point.
    pub(crate) fn release(self) {
        drop(self);
    }

    /// Releases all threads that wait at the hold point, and returns the result of `worker`.
    pub(crate) fn finish<T>(self, worker: Worker<T>) -> Result<T> {
        self.release();
        worker.done()
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        if let Err(error) = fs::write(&self.path, "0") {
            eprintln!("{}: {error}", self.path.display());
        }
    }
}

/// Outcome of a thread.
#[derive(Debug)]
pub(crate) enum Fate<T> {
    Done(T),
    /// The kernel killed the thread, because of an oops.
    Killed,
    /// The thread sleeps in the kernel, in these functions, and will not wake.
    Stuck(String),
}

/// A thread that makes calls which may not return. The thread is never joined, so a stuck thread
/// stays until the machine ends.
#[derive(Debug)]
pub(crate) struct Worker<T> {
    name: &'static str,
    tid: i32,
    results: mpsc::Receiver<T>,
    result: Option<T>,
}

impl<T: Send + 'static> Worker<T> {
    pub(crate) fn start(
        name: &'static str,
        body: impl FnOnce() -> T + Send + 'static,
    ) -> Result<Self> {
        let (say_tid, hear_tid) = mpsc::channel();
        let (send, results) = mpsc::channel();
        thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || {
                // An error means that the thread that started this one has dropped the [`Worker`].
                let _ = say_tid.send(sys::thread_id());
                let _ = send.send(body());
            })
            .with_context(|| format!("thread {name}"))?;
        Ok(Self {
            name,
            tid: hear_tid.recv()?,
            results,
            result: None,
        })
    }
}

impl<T> Worker<T> {
    /// Returns the state (R, S, D, I, …), or `None` once the thread is gone.
    fn state(&self) -> Option<char> {
        sys::state(&format!("/proc/self/task/{}", self.tid))
    }

    fn is_alive(&self) -> bool {
        self.state()
            .is_some_and(|state| !matches!(state, 'Z' | 'X'))
    }

    /// Returns `true` if the thread has a result or was killed.
    pub(crate) fn has_ended(&mut self) -> Result<bool> {
        // The state must be read before the result, because a thread sends its result before it
        // ends.
        let alive = self.is_alive();
        if self.result.is_none() {
            self.result = self.results.try_recv().ok();
        }
        Ok(self.result.is_some() || !alive)
    }

    /// Returns the functions in which the thread sleeps, innermost first, without offsets. Returns
    /// an empty string while the thread runs.
    pub(crate) fn place(&self) -> String {
        // A thread that waits at a hold point has state I (idle).
        let sleeps = || matches!(self.state(), Some('D' | 'I'));
        let before = sleeps();
        let path = format!("/proc/self/task/{}/stack", self.tid);
        let text = fs::read_to_string(path).unwrap_or_default();
        // A preempted or woken thread also has a stack, so the state is checked before and after
        // the stack is read.
        if !before || !sleeps() {
            return String::new();
        }
        let names = text.lines().filter_map(|line| {
            let frame = line.split_once("] ").map_or(line, |(_, frame)| frame);
            let (name, rest) = frame.split_once('+')?;
            let module = rest.split_once(' ').map_or("", |(_, module)| module);
            Some(format!("{name}{module}"))
        });
        names.collect::<Vec<_>>().join(" ")
    }

    /// Waits until the thread ends, or sleeps in a function whose name, in the form
    /// `function[module]`, contains one of `functions`. Returns `true` if the thread has ended.
    pub(crate) fn ended_or_in(&mut self, functions: &[&str]) -> Result<bool> {
        self.ended_or_at(&format!("{functions:?}"), |place| {
            functions.iter().any(|function| place.contains(function))
        })
    }

    /// Waits until the thread ends, or sleeps at a place for which `is_there` returns `true`.
    /// `what` names the place. Returns `true` if the thread has ended.
    pub(crate) fn ended_or_at(
        &mut self,
        what: &str,
        is_there: impl Fn(&str) -> bool,
    ) -> Result<bool> {
        let mut ended = false;
        let settled = sys::wait_until(PATIENCE, || {
            ended = self.has_ended()?;
            Ok(ended || is_there(&self.place()))
        })?;
        ensure!(
            settled,
            "{} neither ended nor reached {what}: {}",
            self.name,
            self.place()
        );
        Ok(ended)
    }

    /// Waits for the end of the thread, up to a time limit.
    pub(crate) fn finish(mut self) -> Result<Fate<T>> {
        sys::wait_until(PATIENCE, || self.has_ended())?;
        Ok(match self.result.take() {
            Some(value) => Fate::Done(value),
            None if self.is_alive() => Fate::Stuck(self.place()),
            None => Fate::Killed,
        })
    }

    /// Returns the result of the thread. Fails if there is no result at the end of the time limit.
    pub(crate) fn done(self) -> Result<T> {
        let name = self.name;
        match self.finish()? {
            Fate::Done(value) => Ok(value),
            Fate::Killed => bail!("the {name} was killed by the kernel"),
            Fate::Stuck(place) => bail!("the {name} does not return: {place}"),
        }
    }
}
