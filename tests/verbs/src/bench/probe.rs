// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Measurements by the kernel module of `tests/bench`, which measures the functions of the module
//! under test.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{ensure, Context, Result};

use crate::module_files;

const CALLS: &str = "/sys/kernel/debug/bench/calls";
const MEMORY: &str = "/sys/kernel/debug/bench/memory";
const TABLE: &str = "/sys/kernel/debug/bench/table";
const PAGE_ORDER: &str = "/sys/kernel/debug/bench/page_order";

/// Number of nvidia.ko's functions that are counted separately. [`MAP`] and [`UNMAP`] are the
/// indices of two of these functions in a line.
const KINDS: usize = 5;
const MAP: usize = 2;
const UNMAP: usize = 3;

/// Number of calls, and their total cycles.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Calls {
    calls: u64,
    cycles: u64,
}

/// Cycles that the measurement itself adds, and that the results exclude.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Calibration {
    /// Cycles that are added to each call of a module function.
    function: i64,
    /// Cycles that each call to nvidia.ko adds to the cycles of the calling module function.
    provider_call: i64,
}

/// Calls of one module function, and the calls to nvidia.ko that it made.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
struct Function {
    all: Calls,
    provider: [Calls; KINDS],
}

impl Function {
    fn provider_cycles(&self) -> u64 {
        self.provider.iter().map(|kind| kind.cycles).sum()
    }

    fn provider_calls(&self) -> u64 {
        self.provider.iter().map(|kind| kind.calls).sum()
    }
}

/// Totals of each measured function since the last [`reset`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Reading(BTreeMap<String, Function>);

/// Names of calibration functions, which do not belong to the module.
const FIXED: [&str; 2] = ["empty", "provider"];

/// Returns `true` if the kernel module of `tests/bench` is loaded.
pub(crate) fn is_there() -> bool {
    Path::new(CALLS).exists()
}

pub(crate) fn reset() -> Result<()> {
    fs::write(CALLS, "0").context(CALLS)
}

impl Reading {
    pub(crate) fn take() -> Result<Self> {
        Self::parse(&fs::read_to_string(CALLS).context(CALLS)?)
    }

    fn parse(text: &str) -> Result<Self> {
        let mut lines = text.lines();
        let clients = lines
            .next()
            .and_then(|line| line.strip_prefix("clients "))
            .context("no number of clients")?;
        ensure!(clients != "0", "no client is measured");
        let mut functions = BTreeMap::new();
        for line in lines {
            let (name, numbers) = line.split_once(' ').context("a line without numbers")?;
            let numbers = numbers
                .split(' ')
                .map(str::parse)
                .collect::<Result<Vec<u64>, _>>()
                .with_context(|| format!("{line:?}"))?;
            let mut pairs = numbers.chunks_exact(2).map(|pair| Calls {
                calls: pair[0],
                cycles: pair[1],
            });
            let mut function = Function {
                all: pairs.next().with_context(|| format!("{line:?}"))?,
                ..Function::default()
            };
            for kind in &mut function.provider {
                *kind = pairs.next().with_context(|| format!("{line:?}"))?;
            }
            functions.insert(name.to_owned(), function);
        }
        Ok(Self(functions))
    }

    fn get(&self, name: &str) -> Result<&Function> {
        self.0.get(name).with_context(|| format!("no {name}"))
    }

    fn calibration(&self) -> Result<Calibration> {
        let each = |function: &Function| -> Result<i64> {
            let own = function.all.cycles.checked_sub(function.provider_cycles());
            let own = own.context("nvidia.ko's functions took longer than their caller")?;
            let mean = own.checked_div(function.all.calls).context("no calls")?;
            Ok(i64::try_from(mean)?)
        };
        let function = each(self.get("empty")?)?;
        Ok(Calibration {
            function,
            provider_call: each(self.get("provider")?)? - function,
        })
    }

    /// Returns the cycles of the module's functions and of the kernel functions that they call.
    /// Excludes the cycles of nvidia.ko and of the measurement.
    pub(crate) fn own(&self) -> Result<i64> {
        let calibration = self.calibration()?;
        let mut own = 0;
        for (name, function) in &self.0 {
            if FIXED.contains(&name.as_str()) {
                continue;
            }
            let signed = |value: u64| i64::try_from(value);
            own += signed(function.all.cycles)?
                - signed(function.provider_cycles())?
                - signed(function.all.calls)? * calibration.function
                - signed(function.provider_calls())? * calibration.provider_call;
        }
        Ok(own)
    }

    /// Returns the cycles of nvidia.ko's mapping and unmapping.
    pub(crate) fn mapping(&self) -> u64 {
        let of =
            |function: &Function| function.provider[MAP].cycles + function.provider[UNMAP].cycles;
        self.0.values().map(of).sum()
    }
}

/// A watch of the kernel memory that the module's functions allocate. The watch ends when dropped.
pub(crate) struct Watch(());

/// One reading of a [`Watch`], in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Held {
    pub(crate) held: u64,
    pub(crate) peak: u64,
    /// Number of live allocations.
    pub(crate) objects: u64,
}

/// Returns the value of field `name` in a line of `name=value` fields.
fn field(text: &str, name: &str) -> Result<u64> {
    module_files::number(&module_files::parse(text.trim_end())?, name)
}

impl Watch {
    pub(crate) fn begin() -> Result<Self> {
        fs::write(MEMORY, "1").context(MEMORY)?;
        Ok(Self(()))
    }

    /// Pauses the watch while `body` runs, because the watch would slow down code that `body`
    /// times. `body` must not free a watched allocation.
    pub(crate) fn looking_away<R>(&self, body: impl FnOnce() -> Result<R>) -> Result<R> {
        fs::write(MEMORY, "0").context(MEMORY)?;
        let result = body()?;
        fs::write(MEMORY, "2").context(MEMORY)?;
        Ok(result)
    }

    pub(crate) fn read(&self) -> Result<Held> {
        Held::parse(&fs::read_to_string(MEMORY).context(MEMORY)?)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        // Unloading the kernel module also ends the watch.
        let _ = fs::write(MEMORY, "0");
    }
}

impl Held {
    fn parse(text: &str) -> Result<Self> {
        let lost = field(text, "lost")?;
        ensure!(lost == 0, "{lost} allocations are not accounted for");
        Ok(Self {
            held: field(text, "held")?,
            peak: field(text, "peak")?,
            objects: field(text, "objects")?,
        })
    }
}

/// A guard that makes large allocations fail until dropped. The page allocator refuses each request
/// of the module's functions for more than one contiguous page.
pub(crate) struct PageOrder(());

/// Counts of allocations that are larger than a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Large {
    /// Number of allocations that the page allocator refused.
    pub(crate) refused: u64,
    /// Number of allocations that succeeded only because a slab had a free object. Otherwise, the
    /// page allocator would have refused them, and their callers have no fallback.
    pub(crate) given: u64,
}

impl PageOrder {
    /// Starts the refusals. Fails if the kernel module's own check shows that it does not refuse
    /// the right allocations.
    pub(crate) fn begin() -> Result<Self> {
        fs::write(PAGE_ORDER, "1").context(PAGE_ORDER)?;
        Ok(Self(()))
    }

    pub(crate) fn read(&self) -> Result<Large> {
        let text = fs::read_to_string(PAGE_ORDER).context(PAGE_ORDER)?;
        ensure!(field(&text, "on")? == 1, "{PAGE_ORDER}: {text:?}");
        Ok(Large {
            refused: field(&text, "refused")?,
            given: field(&text, "given")?,
        })
    }
}

impl Drop for PageOrder {
    fn drop(&mut self) {
        // Unloading the kernel module also ends the refusals.
        let _ = fs::write(PAGE_ORDER, "0");
    }
}

/// A scatter list that ib_core received.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Mapped {
    pub(crate) address: u64,
    pub(crate) len: u64,
    /// DMA address and length of each entry.
    pub(crate) entries: Vec<(u64, u64)>,
}

/// Switches the recording of the scatter lists of later registrations on or off.
pub(crate) fn take_tables(on: bool) -> Result<()> {
    fs::write(TABLE, if on { "1" } else { "0" }).context(TABLE)
}

impl Mapped {
    /// Returns the last recorded scatter list.
    pub(crate) fn take() -> Result<Self> {
        Self::parse(&fs::read(TABLE).context(TABLE)?)
    }

    fn parse(bytes: &[u8]) -> Result<Self> {
        let mut words = bytes
            .chunks_exact(8)
            .map(|word| word.iter().rev().fold(0, |sum, &b| sum << 8 | u64::from(b)));
        let mut next = || words.next().context("the table is cut short");
        let (address, len, count) = (next()?, next()?, next()?);
        let mut entries = Vec::new();
        for _ in 0..count {
            entries.push((next()?, next()?));
        }
        Ok(Self {
            address,
            len,
            entries,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "clients 1\n\
        acquire 1 1000 1 600 0 0 0 0 0 0 0 0\n\
        dma_map 2 500 0 0 0 0 2 100 0 0 0 0\n\
        empty 10 200 0 0 0 0 0 0 0 0 0 0\n\
        provider 10 700 0 0 0 0 0 0 0 0 10 100\n";

    #[test]
    fn cycles_exclude_nvidia_ko_and_the_measurement() {
        let reading = Reading::parse(TEXT).expect("a reading");
        assert_eq!(
            reading.calibration().expect("calls"),
            Calibration {
                function: 20,
                provider_call: 40
            }
        );
        assert_eq!(
            reading.own().expect("costs"),
            (1000 - 600 - 20 - 40) + (500 - 100 - 2 * 20 - 2 * 40)
        );
        assert_eq!(reading.mapping(), 100);
    }

    #[test]
    fn impossible_readings_are_refused() {
        assert!(Reading::parse("").is_err());
        assert!(Reading::parse(&TEXT.replace("clients 1", "clients 0")).is_err());
        assert!(Reading::parse(&TEXT.replace(" 1000 ", " x ")).is_err());
        assert!(Held::parse("held=1 peak=2 objects=1 lost=1").is_err());
        assert!(Held::parse("held=1 objects=1 lost=0").is_err());
        let held = Held::parse("held=1 peak=2 objects=1 lost=0\n").expect("bytes");
        assert_eq!((held.held, held.peak, held.objects), (1, 2, 1));
    }

    #[test]
    fn tables() {
        let mut bytes = Vec::new();
        for word in [0x1000_u64, 8192, 1, 0xfe_0000_0000, 8192] {
            bytes.extend(word.to_le_bytes());
        }
        let mapped = Mapped::parse(&bytes).expect("a table");
        assert_eq!(mapped.entries, [(0xfe_0000_0000, 8192)]);
        assert_eq!(mapped.len, 8192);
        assert!(Mapped::parse(&bytes[..32]).is_err());
        assert!(Mapped::parse(&[]).is_err());
    }
}
