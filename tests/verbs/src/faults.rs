// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! The kernel's fault injection, which makes the n-th allocation of this thread fail. The count
//! includes all allocations, or only allocations by certain functions and their callees. Only debug
//! kernels have fault injection.

use std::fs;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

use anyhow::{bail, ensure, Context, Result};

use crate::knobs::Parameter;
use crate::{ktap, sys};

const DEBUGFS: &str = "/sys/kernel/debug";
const NTH: &str = "/proc/thread-self/fail-nth";
const THREAD: &str = "/proc/thread-self/make-it-fail";
const KINDS: [&str; 2] = ["failslab", "fail_page_alloc"];
const EVERYWHERE: Range<u64> = 0..u64::MAX;
/// Address range without code, so that no return address lies in the range.
const NOWHERE: Range<u64> = 1..2;

/// Environment variable that makes the kernel log the stack of each failure.
const STACKS: &str = "GDR_FAULT_STACKS";

/// Kinds of injected faults other than failed allocations. The count of the n-th fault excludes
/// these kinds.
const OTHERS: [&str; 2] = ["fail_usercopy", "fail_futex"];

/// Selection of the allocations that are counted, and that can fail.
#[derive(Debug, Clone)]
pub(crate) enum Counted {
    /// All allocations of the thread.
    All,
    /// Slab objects that are allocated while a function in `below` runs and no function in `except`
    /// runs. Pages are not counted, because their number depends on the state of the slab
    /// allocator.
    Objects {
        below: Range<u64>,
        except: Option<Range<u64>>,
    },
    /// Slab objects and pages that are allocated while a function in `below` runs.
    Every { below: Range<u64> },
}

/// Settings of the kernel's fault injection, which are restored when dropped.
#[derive(Debug)]
pub(crate) struct Faults {
    changed: Vec<Parameter>,
}

impl Faults {
    /// Sets up fault injection. Skips the case if the kernel has none.
    pub(crate) fn new(counted: &Counted) -> Result<Self> {
        if !Path::new(NTH).exists() || !Path::new(DEBUGFS).join("failslab").exists() {
            return ktap::skip("this kernel has no fault injection");
        }
        let mut faults = Self {
            changed: Vec::new(),
        };
        let (objects, pages, except) = match counted {
            Counted::All => (EVERYWHERE, EVERYWHERE, None),
            Counted::Objects { below, except } => (below.clone(), NOWHERE, except.clone()),
            Counted::Every { below } => (below.clone(), below.clone(), None),
        };
        let verbose = if std::env::var_os(STACKS).is_some() {
            "2"
        } else {
            "0"
        };
        for kind in KINDS {
            // By default, an allocation that may sleep never fails. Most allocations may sleep.
            faults.set(kind, "ignore-gfp-wait", "N")?;
            faults.set(kind, "verbose", verbose)?;
            faults.set(kind, "verbose_ratelimit_interval_ms", "0")?;
        }
        faults.set("fail_page_alloc", "min-order", "0")?;
        faults.set("fail_page_alloc", "ignore-gfp-highmem", "N")?;
        faults.limit("failslab", &objects, except)?;
        faults.limit("fail_page_alloc", &pages, None)?;
        for kind in OTHERS {
            if Path::new(DEBUGFS).join(kind).exists() {
                faults.limit(kind, &NOWHERE, None)?;
            }
        }
        Ok(faults)
    }

    /// Makes every counted allocation of this thread fail, not only the n-th, until the returned
    /// value is dropped.
    pub(crate) fn all(&self) -> Result<All<'_>> {
        let all = All(self);
        for kind in KINDS {
            write(kind, "task-filter", "Y")?;
            write(kind, "times", &MOST.to_string())?;
            write(kind, "probability", "100")?;
        }
        fs::write(THREAD, "1").context(THREAD)?;
        Ok(all)
    }

    fn limit(&mut self, kind: &str, below: &Range<u64>, except: Option<Range<u64>>) -> Result<()> {
        let except = except.unwrap_or(0..0);
        for (name, value) in [
            ("require-start", below.start),
            ("require-end", below.end),
            ("reject-start", except.start),
            ("reject-end", except.end),
        ] {
            self.set(kind, name, &format!("{value:#x}"))?;
        }
        Ok(())
    }

    fn set(&mut self, kind: &str, name: &str, value: &str) -> Result<()> {
        let path = format!("{DEBUGFS}/{kind}/{name}");
        self.changed.push(Parameter::set_file(&path, value)?);
        Ok(())
    }
}

fn write(kind: &str, name: &str, value: &str) -> Result<()> {
    let path = format!("{DEBUGFS}/{kind}/{name}");
    fs::write(&path, value).with_context(|| format!("{path}: {value}"))
}

/// Upper bound on the number of failures.
const MOST: u32 = 1_000_000;

/// A guard that makes every counted allocation of this thread fail until dropped.
#[derive(Debug)]
pub(crate) struct All<'a>(&'a Faults);

impl All<'_> {
    /// Stops the injected failures, and returns the number of allocations that failed.
    pub(crate) fn end(self) -> Result<u32> {
        fs::write(THREAD, "0").context(THREAD)?;
        let mut failures = 0;
        for kind in KINDS {
            let left: u32 = sys::read_line(&format!("{DEBUGFS}/{kind}/times"))?.parse()?;
            failures += MOST - left;
        }
        Ok(failures)
    }
}

impl Drop for All<'_> {
    fn drop(&mut self) {
        let restored = fs::write(THREAD, "0").is_ok()
            && KINDS.iter().all(|kind| {
                write(kind, "probability", "0").is_ok()
                    && write(kind, "times", "1").is_ok()
                    && write(kind, "task-filter", "N").is_ok()
            });
        if !restored {
            ktap::note("not_restored", format_args!("{:?}", self.0));
        }
    }
}

/// An armed failure of the n-th counted allocation of this thread.
#[derive(Debug)]
pub(crate) struct Nth(File);

impl Nth {
    pub(crate) fn arm(nth: u32) -> Result<Self> {
        ensure!(nth > 0, "allocations are counted from 1");
        let nth_file = Self(sys::open_rw(NTH)?);
        nth_file.0.write_all_at(nth.to_string().as_bytes(), 0)?;
        Ok(nth_file)
    }

    /// Disarms the failure. Returns `true` if the failure occurred.
    pub(crate) fn disarm(self) -> Result<bool> {
        let mut text = [0; 16];
        let len = self.0.read_at(&mut text, 0).context(NTH)?;
        self.0.write_all_at(b"0", 0)?;
        let left: u32 = std::str::from_utf8(&text[..len])?.trim().parse()?;
        Ok(left == 0)
    }
}

/// Addresses of the kernel's functions.
#[derive(Debug)]
pub(crate) struct Symbols(Vec<(u64, String, Option<String>)>);

impl Symbols {
    pub(crate) fn read() -> Result<Self> {
        let text = fs::read_to_string("/proc/kallsyms").context("/proc/kallsyms")?;
        Self::parse(&text)
    }

    /// Parses lines of `address type name [module]`. Functions have type T, t, W or w.
    fn parse(text: &str) -> Result<Self> {
        let mut all = Vec::new();
        for line in text.lines() {
            let mut fields = line.split_whitespace();
            let (Some(address), Some(kind), Some(name)) =
                (fields.next(), fields.next(), fields.next())
            else {
                continue;
            };
            if !matches!(kind, "t" | "T" | "w" | "W") {
                continue;
            }
            let address = u64::from_str_radix(address, 16)?;
            let module = fields
                .next()
                .map(|word| word.trim_matches(['[', ']']).to_owned());
            all.push((address, name.to_owned(), module));
        }
        ensure!(
            all.iter().any(|(address, ..)| *address != 0),
            "/proc/kallsyms hides the addresses"
        );
        all.sort();
        Ok(Self(all))
    }

    /// Returns the start of the next function after `address`.
    fn next(&self, address: u64) -> Option<u64> {
        let at = self.0.partition_point(|(found, ..)| *found <= address);
        self.0.get(at).map(|(found, ..)| *found)
    }

    /// Returns the address range of one function of the kernel or a module.
    pub(crate) fn function(&self, wanted: &str) -> Result<Range<u64>> {
        let mut found = self.0.iter().filter(|(_, name, _)| name == wanted);
        let start = found
            .next()
            .map(|(address, ..)| *address)
            .with_context(|| format!("the kernel has no function {wanted}"))?;
        let end = self.next(start).context("no function follows")?;
        Ok(start..end)
    }

    /// Returns the address range of a function of `module`: the only function whose mangled name
    /// contains the type `with` and the method `method`. Rust's mangled names have a length before
    /// each part.
    pub(crate) fn method(&self, module: &str, with: &str, method: &str) -> Result<Range<u64>> {
        let part = |name: &str| format!("{}{name}", name.len());
        let mut found = self.0.iter().filter(|(_, name, of)| {
            of.as_deref() == Some(module)
                && name.contains(&part(with))
                && name.contains(&part(method))
                && !name.starts_with("__")
        });
        let start = match (found.next(), found.next()) {
            (Some((start, ..)), None) => *start,
            (one, other) => bail!("{method} of {with} in {module}: {one:?}, {other:?}"),
        };
        let end = self.next(start).context("no function follows")?;
        Ok(start..end)
    }

    /// Returns the address range of all functions of a loaded module.
    pub(crate) fn module(&self, wanted: &str) -> Result<Range<u64>> {
        const PAGE: u64 = 4096;
        let mut of_it = self
            .0
            .iter()
            .filter(|(.., module)| module.as_deref() == Some(wanted))
            .map(|(address, ..)| *address);
        let start = of_it
            .next()
            .with_context(|| format!("no functions of {wanted} are known"))?;
        let last = of_it.next_back().unwrap_or(start);
        // The length of the last function is unknown. Only this module's code lies in its last
        // page, so the range extends to the end of the page.
        let end = (last / PAGE + 1) * PAGE;
        let foreign = self.0.iter().any(|(address, _, module)| {
            (start..end).contains(address) && module.as_deref() != Some(wanted)
        });
        ensure!(
            !foreign,
            "functions of other modules lie between functions of {wanted}"
        );
        Ok(start..end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn symbols_have_ranges() {
        let text = "ffffffff81000000 T do_one_initcall\nffffffff81000100 t next\n\
                    ffffffff81000200 D data\nffffffffc0001010 t b\t[nvidia_peermem]\n\
                    ffffffffc0000000 t a\t[nvidia_peermem]\nffffffffc0002000 t x\t[nvidia]\n";
        let symbols = Symbols::parse(text).expect("parses");
        assert_eq!(
            symbols.function("do_one_initcall").expect("there"),
            0xffff_ffff_8100_0000..0xffff_ffff_8100_0100
        );
        assert_eq!(
            symbols.module("nvidia_peermem").expect("there"),
            0xffff_ffff_c000_0000..0xffff_ffff_c000_2000
        );
        assert!(symbols.function("data").is_err());
        assert!(symbols.module("ib_core").is_err());
        assert!(Symbols::parse("0000000000000000 T a\n").is_err());
    }
}
