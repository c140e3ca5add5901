// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! The known hazards of a peer-memory module for NVIDIA's GPUs, A to P. Each hazard has
//! deterministic schedules of hold points, failures and forks.
//!
//! A schedule is the same for every module. A schedule prints the module's behaviour in lines
//! `# saw …`, and each defect in a line `# wrong …`. If a thread never returns from the kernel or
//! is killed there, later results would be unreliable. The schedule then switches the machine off
//! after its result.

mod costs;
mod release;
mod revocation;

use std::io::Write as _;
use std::ops::Deref;
use std::panic::AssertUnwindSafe;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::{fs, panic};

use anyhow::{anyhow, ensure, Context, Result};

use crate::cases::stage::Stage;
use crate::counters::Counters;
use crate::hold::Fate;
use crate::ktap::Skip;
use crate::lab::{Lab, Peermem, PinMode, Setup, M2};
use crate::{counters, ktap, module, sys};

/// One schedule, whose name is the hazard's letter, a dot, and the event.
type Case = ktap::Case<Bench>;

/// State of a schedule, and its verdict.
struct Bench {
    lab: Lab,
    stage: Stage,
    failed: AtomicBool,
    /// `true` if the machine cannot be used any more.
    lost: AtomicBool,
}

impl Deref for Bench {
    type Target = Stage;

    fn deref(&self) -> &Stage {
        &self.stage
    }
}

impl Bench {
    fn open(setup: &Setup) -> Result<Self> {
        let lab = Lab::open(setup)?;
        lab.needs_module()?;
        Ok(Self {
            stage: Stage::open(&lab)?,
            lab,
            failed: AtomicBool::new(false),
            lost: AtomicBool::new(false),
        })
    }

    fn is_ours(&self) -> bool {
        self.lab.setup.peermem == Peermem::Ours
    }

    fn is_revocable(&self) -> bool {
        self.lab.setup.mode() == PinMode::Revocable
    }

    /// Reports correct behaviour.
    fn saw(&self, what: &str) {
        say(&format!("# saw {what}"));
    }

    fn wrong(&self, what: &str) {
        self.failed.store(true, Ordering::Relaxed);
        say(&format!("# wrong {what}"));
    }

    /// Reports `good` if `in_order`, otherwise `bad`.
    fn check(&self, in_order: bool, good: &str, bad: &str) {
        if in_order {
            self.saw(good);
        } else {
            self.wrong(bad);
        }
    }

    /// Returns a thread's result. If the thread does not return, reports this as a defect and marks
    /// the machine as lost.
    fn fate<T>(&self, what: &str, fate: Fate<T>) -> Option<T> {
        match fate {
            Fate::Done(value) => Some(value),
            Fate::Killed => {
                self.lose();
                self.wrong(&format!("the kernel killed the thread in {what}"));
                None
            }
            Fate::Stuck(place) => {
                self.lose();
                self.wrong(&format!("{what} never returns"));
                say(&format!("# place {place}"));
                None
            }
        }
    }

    /// Records that threads of this schedule never return.
    fn lose(&self) {
        self.lost.store(true, Ordering::Relaxed);
    }

    /// Returns the number of pins that were added since the beginning of the schedule.
    fn pins(&self) -> Result<u64> {
        Counters::read()?
            .live_pins()?
            .checked_sub(self.before.live_pins()?)
            .context("fewer pins than at the beginning")
    }

    /// Checks that the module has used no freed page table and has left nothing behind.
    fn check_end(&self) -> Result<()> {
        self.check_misuse()?;
        self.check_nothing_left()
    }

    /// Checks that nvidia.ko no longer holds any object of this schedule.
    fn check_nothing_left(&self) -> Result<()> {
        let after = Counters::read()?;
        let mut left = Vec::new();
        for (name, one) in [
            ("pins_live", "revocable pin"),
            ("pins_persistent_live", "persistent pin"),
            ("mappings_live", "DMA mapping"),
            ("device_refs", "hold on the GPU"),
        ] {
            let (now, then) = (after.get(name)?, self.before.get(name)?);
            if now > then {
                left.push(times(now - then, one));
            }
        }
        let bytes = after
            .get("bar_bytes_pinned")?
            .saturating_sub(self.before.get("bar_bytes_pinned")?);
        if bytes > 0 {
            left.push(format!("{} KiB of BAR", bytes >> 10));
        }
        self.check(
            left.is_empty(),
            "nothing left",
            &format!("leaked: {}", left.join(", ")),
        );
        Ok(())
    }

    fn check_misuse(&self) -> Result<()> {
        let misuse = self.counted("misuse")?;
        if misuse > 0 {
            let uses = times(misuse, "use");
            self.wrong(&format!("{uses} of a page table that is gone"));
        }
        Ok(())
    }

    /// Prints the counters at the end of each schedule, in a form for programs.
    fn tell_counters(&self) -> Result<()> {
        let counters = Counters::read()?;
        let mut line = "# counters".to_owned();
        for name in [
            "pins_live",
            "pins_persistent_live",
            "mappings_live",
            "device_refs",
            "bar_bytes_pinned",
        ] {
            line += &format!(" {name}={}", counters.get(name)?);
        }
        for name in ["callbacks", "put_pages_foreign", "misuse"] {
            line += &format!(" {name}={}", counters.since(&self.before, name)?);
        }
        // The value is −1 while the module is unloaded.
        let references = self
            .module_references()
            .map_or(-1, |count| i64::try_from(count).unwrap_or(i64::MAX));
        say(&format!("{line} module_references={references}"));
        Ok(())
    }

    fn module_references(&self) -> Result<u64> {
        counters::module_references(module::NAME)
    }
}

fn say(line: &str) {
    println!("{line}");
    // Flushes the output now, because the next call may hang the machine.
    let _ = std::io::stdout().flush();
}

/// Arms the trap `name` of `tests/interpose`. The value `0` disarms the trap.
fn interpose(name: &str, value: &str) -> Result<()> {
    let path = format!("/sys/kernel/debug/interpose/{name}");
    fs::write(&path, value).with_context(|| path)
}

/// Returns `true` if the trap has caught a call since the last [`interpose`].
fn interposed(name: &str) -> Result<bool> {
    let path = format!("/sys/kernel/debug/interpose/{name}");
    Ok(sys::read_line(&path)?.contains("hits=1"))
}

/// Makes the allocator validate all freed memory. A late store shows in the kernel log.
fn look_at_freed_memory() -> Result<()> {
    let mut looked = 0;
    for entry in fs::read_dir("/sys/kernel/slab").context("no SLUB debugging")? {
        let path = entry?.path();
        let is_kmalloc = path
            .file_name()
            .is_some_and(|name| name.to_string_lossy().starts_with("kmalloc-"));
        // Only caches with debugging can be validated.
        if is_kmalloc && fs::write(path.join("validate"), "1").is_ok() {
            looked += 1;
        }
    }
    ensure!(looked > 0, "no cache with debugging: boot with slub_debug");
    Ok(())
}

/// Returns a number with its unit, such as `1 pin` or `2 pins`.
fn times(count: u64, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

/// Returns all schedules in the order of the letters.
fn all() -> impl Iterator<Item = &'static Case> {
    revocation::CASES
        .iter()
        .chain(release::CASES)
        .chain(costs::CASES)
}

/// Runs the cases whose name begins with one of `names`, in the order of `names`. Returns `true` if
/// no hazard occurred.
pub(crate) fn run(names: &[String], setup: &Setup) -> Result<bool> {
    let mut cases = Vec::new();
    for name in names {
        let found: Vec<&Case> = all().filter(|case| case.name.starts_with(name)).collect();
        ensure!(!found.is_empty(), "no hazard's name begins with {name:?}");
        cases.extend(found);
    }
    println!("KTAP version 1");
    println!("1..{}", cases.len());
    let mut good = true;
    for (index, case) in cases.iter().enumerate() {
        let number = index + 1;
        mark(case.name);
        let (result, lost) = run_one(case, setup);
        let mut skip = String::new();
        let passed = result.unwrap_or_else(|error| {
            let reason = error.downcast_ref::<Skip>();
            match reason {
                Some(reason) => skip = format!(" # SKIP {reason}"),
                None => ktap::fail(&error),
            }
            reason.is_some()
        });
        good &= passed;
        let word = if passed { "ok" } else { "not ok" };
        say(&format!("{word} {number} {}{skip}", case.name));
        if lost {
            return leave();
        }
    }
    // If references to a GPU are left, the removal of nvidia.ko would wait for ever.
    if Counters::read()?.get("device_refs")? > 0 {
        return leave();
    }
    mark("end");
    Ok(good)
}

/// Switches the machine off, because an orderly shutdown would hang.
fn leave() -> Result<bool> {
    say("# the machine is lost");
    mark("end");
    Err(sys::power_off()).context("the machine is lost and does not switch off")
}

/// Marks the start of a schedule in the kernel log.
fn mark(name: &str) {
    if Path::new("/dev/kmsg").exists() {
        let _ = fs::write("/dev/kmsg", format!("hazard: {name}\n"));
    }
}

fn run_one(case: &Case, setup: &Setup) -> (Result<bool>, bool) {
    let mut lost = false;
    let result = panic::catch_unwind(AssertUnwindSafe(|| {
        let bench = Bench::open(setup)?;
        let result = (case.run)(&bench).and_then(|()| bench.tell_counters());
        lost = bench.lost.load(Ordering::Relaxed);
        let good = !bench.failed.load(Ordering::Relaxed);
        if lost {
            // The drop of `bench` makes calls that do not return.
            std::mem::forget(bench);
        }
        result.map(|()| good)
    }))
    .unwrap_or_else(|_| Err(anyhow!("panicked")));
    (result, lost)
}
