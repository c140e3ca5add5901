// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Schedules: hold points of the kernel's modules, and threads that may never come back.

use std::path::PathBuf;
use std::sync::mpsc;
use std::time::Duration;
use std::{fs, thread};

use anyhow::{ensure, Context, Result};

use crate::sys;

/// How long a thread may take to get where it must get.
const PATIENCE: Duration = Duration::from_secs(25);

/// A place where the kernel stops threads while this exists, for as long as it takes. See `linux/test_hold.h`.
#[derive(Debug)]
pub(crate) struct Hold {
    path: PathBuf,
}

impl Hold {
    /// `place` is `<module's directory>/<name>`: `ib_peer_mem/before_release`.
    pub(crate) fn arm(place: &str) -> Result<Self> {
        let (module, name) = place.split_once('/').context("no module in a hold point")?;
        let path = PathBuf::from(format!("/sys/kernel/debug/{module}/hold/{name}"));
        fs::write(&path, "1").with_context(|| path.display().to_string())?;
        Ok(Self { path })
    }

    /// How many threads stand there.
    pub(crate) fn waiting(&self) -> Result<u64> {
        let text = fs::read_to_string(&self.path)?;
        let field = text
            .split_whitespace()
            .find_map(|field| field.strip_prefix("waiting="))
            .with_context(|| format!("{}: {text:?}", self.path.display()))?;
        Ok(field.parse()?)
    }

    /// Waits until `worker` stands there, or has ended without coming by.
    pub(crate) fn caught<T>(&self, worker: &mut Worker<T>) -> Result<bool> {
        let mut caught = false;
        let settled = sys::wait_until(PATIENCE, || {
            caught = self.waiting()? > 0;
            Ok(caught || worker.has_ended()?)
        })?;
        ensure!(
            settled,
            "{} neither ended nor came to {}: {}",
            worker.name,
            self.path.display(),
            worker.place()
        );
        Ok(caught)
    }

    /// Arms `place`, and catches there the worker that `start` starts.
    pub(crate) fn catch<T>(
        place: &str,
        start: impl FnOnce() -> Result<Worker<T>>,
    ) -> Result<(Self, Worker<T>)> {
        let hold = Self::arm(place)?;
        let mut worker = start()?;
        ensure!(hold.caught(&mut worker)?, "{place} was not reached");
        Ok((hold, worker))
    }

    /// Lets all go.
    pub(crate) fn release(self) {
        drop(self);
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        if let Err(error) = fs::write(&self.path, "0") {
            eprintln!("{}: {error}", self.path.display());
        }
    }
}

/// What became of a thread.
#[derive(Debug)]
pub(crate) enum Fate<T> {
    Done(T),
    /// The kernel killed it: an oops.
    Killed,
    /// It sleeps in the kernel and will not wake, with the functions it sleeps in.
    Stuck(String),
}

impl<T> Fate<T> {
    /// The result, where there must be one.
    pub(crate) fn done(self, what: &str) -> Result<T> {
        match self {
            Fate::Done(value) => Ok(value),
            Fate::Killed => anyhow::bail!("{what} was killed by the kernel"),
            Fate::Stuck(place) => anyhow::bail!("{what} does not return: {place}"),
        }
    }
}

/// A thread that makes calls which may not return. Never joined: what it left behind goes with the machine.
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
                // A parent that has gone needs neither.
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
    /// R, S, D, I, …; None once it is gone.
    fn state(&self) -> Option<char> {
        sys::state(&format!("/proc/self/task/{}", self.tid))
    }

    fn is_alive(&self) -> bool {
        self.state()
            .is_some_and(|state| !matches!(state, 'Z' | 'X'))
    }

    /// Whether it has a result, or was killed.
    pub(crate) fn has_ended(&mut self) -> Result<bool> {
        // In this order: a thread sends its result before it goes.
        let alive = self.is_alive();
        if self.result.is_none() {
            self.result = self.results.try_recv().ok();
        }
        Ok(self.result.is_some() || !alive)
    }

    /// The functions that it sleeps in, innermost first, without offsets; empty while it runs.
    pub(crate) fn place(&self) -> String {
        // Idle: at a hold point.
        let sleeps = || matches!(self.state(), Some('D' | 'I'));
        let before = sleeps();
        let path = format!("/proc/self/task/{}/stack", self.tid);
        let text = fs::read_to_string(path).unwrap_or_default();
        // A thread that was preempted has a stack to show as well, and one that was woken.
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

    /// Waits until it has ended, or sleeps in a function whose name (with its module: `f[m]`) contains one of
    /// `functions`. True if it has ended.
    pub(crate) fn ended_or_in(&mut self, functions: &[&str]) -> Result<bool> {
        self.ended_or_at(&format!("{functions:?}"), |place| {
            functions.iter().any(|function| place.contains(function))
        })
    }

    /// Waits until it has ended, or sleeps at a place that is `what`: `is_there` knows. True if it has ended.
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
            "{} neither ended nor came to {what}: {}",
            self.name,
            self.place()
        );
        Ok(ended)
    }

    /// Waits for the end as long as there is hope.
    pub(crate) fn finish(mut self) -> Result<Fate<T>> {
        sys::wait_until(PATIENCE, || self.has_ended())?;
        Ok(match self.result.take() {
            Some(value) => Fate::Done(value),
            None if self.is_alive() => Fate::Stuck(self.place()),
            None => Fate::Killed,
        })
    }
}
