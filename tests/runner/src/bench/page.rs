// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! The generated parts of `docs/performance.md` and of the README, made from the figures of
//! `cost.rs` and of the VM.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::Result;
use clap::ValueEnum as _;
use comfy_table::presets::ASCII_MARKDOWN;
use comfy_table::{CellAlignment, Table};

use super::{Measured, NVIDIAS, OURS};
use crate::cost::{self, Counted, Kind, Subject, CALLBACKS, MODES, NVIDIA};
use crate::documents::{self, wrapped};

const PAGE: &str = "docs/performance.md";
const README: &str = "README.md";

const GIB: f64 = (1_u64 << 30) as f64;
/// Number of 64 KiB pages by which a registration of 1 GiB exceeds a registration of one page.
const MORE_PAGES: f64 = 16_383.0;

/// Published costs of nvidia.ko on a V100, in nanoseconds (gdrcopy: 69.6 and 37.8 µs for 64 KiB;
/// the cost of a longer pin is extrapolated). No cost is published for `dma_map_pages`.
const PIN: f64 = 70_000.0;
const PIN_OF_A_GIB: f64 = 3_000_000.0;
const UNPIN: f64 = 38_000.0;

const PERSISTENT: &str = MODES[0];
const REVOCABLE: &str = MODES[1];

/// Registrations whose instructions the page shows by callback.
const SHAPES: [&str; 3] = ["64KiB", "64KiB-revoked", "1GiB-fragmented"];

/// Numbers of regions, and numbers of threads, for which `gdr bench` measures costs.
const REGIONS: [u32; 4] = [1, 100, 1_000, 10_000];
const THREADS: [usize; 2] = [4, 16];

struct Figures {
    counted: Counted,
    measured: Measured,
}

/// Writes the generated parts of both pages. Returns the number of missed goals and the number of
/// unmeasured goals.
pub(super) fn write(repo: &Path) -> Result<(usize, usize)> {
    let figures = Figures::read(repo)?;
    for (page, name, text) in figures.parts() {
        documents::check(&repo.join(page), name, &text, true)?;
    }
    Ok((missed(&figures), unmeasured(&figures)))
}

/// Returns a table. The first `words` columns are text, and the others are numbers.
fn table(head: &[&str], words: usize, rows: Vec<Vec<String>>) -> String {
    let mut table = Table::new();
    table.load_preset(ASCII_MARKDOWN).set_header(head);
    table.add_rows(rows);
    for column in table.column_iter_mut().skip(words) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    let lines = table.to_string();
    lines
        .lines()
        .map(|line| format!("{}\n", line.trim_end()))
        .collect()
}

/// Placeholder for a figure that was not measured.
const NONE: &str = "–";

fn cell(value: Option<f64>) -> String {
    value.map_or(NONE.to_owned(), number)
}

fn number(value: f64) -> String {
    documents::grouped(&format!("{value:.0}"))
}

/// A goal: a limit for each mode, and a function that returns the value in a mode, if there is one.
struct Goal {
    name: &'static str,
    limits: [f64; 2],
    value: fn(&Figures, &'static str) -> Option<f64>,
    /// Returns a sentence that explains a missed goal by other figures.
    reason: fn(&Figures) -> Option<String>,
}

macro_rules! goals {
    ($($name:literal, at most $limits:expr, $value:expr, $reason:expr;)*) => {
        &[$(Goal { name: $name, limits: $limits, value: $value, reason: $reason }),*]
    };
}

const GOALS: &[Goal] = goals! {
    "pins, relative to NVIDIA's", at most [0.5; 2], |it, mode| it.ratio(mode, "64KiB.pins"), unknown;
    "unpins, relative to NVIDIA's", at most [0.5; 2], |it, mode| it.ratio(mode, "64KiB.unpins"), unknown;
    "instructions with services, 64 KiB", at most [2_700.0, 3_500.0],
        |it, mode| it.vm(OURS, mode, "64KiB.instructions"), Figures::why_small;
    "instructions with services, 1 GiB contiguous, relative to NVIDIA's", at most [0.3; 2],
        |it, mode| it.ratio(mode, "1GiB-contiguous.instructions"), unknown;
    "instructions with services for a fragmented page, relative to NVIDIA's", at most [1.3; 2],
        |it, mode| Some(it.a_page(OURS, mode)? / it.a_page(NVIDIAS, mode)?), Figures::why_a_page;
    "total cost, 64 KiB, relative to NVIDIA's", at most [0.55; 2],
        |it, mode| it.total_ratio(mode, "64KiB", 65_536.0), unknown;
    "total cost, 64 GiB contiguous, relative to NVIDIA's", at most [0.35, 0.33],
        |it, mode| it.total_ratio(mode, "64GiB-contiguous", 64.0 * GIB), unknown;
    "total cost, 1 GiB fragmented, relative to NVIDIA's", at most [0.35, 0.45],
        |it, mode| it.total_ratio(mode, "1GiB-fragmented", GIB), Figures::why_total;
    "kernel memory, 1 GiB contiguous, relative to NVIDIA's", at most [0.01; 2],
        |it, mode| it.ratio(mode, "1GiB-contiguous.bytes"), unknown;
    "revocation, the worst of 1 to 10,000 regions, relative to NVIDIA's", at most [1.0; 2],
        |it, mode| worst(REGIONS.map(|regions| it.ratio(mode, &format!("free.{regions}")))), Figures::why_free;
    "cost of revoking one region, with 10,000 regions relative to 100", at most [1.1; 2],
        |it, mode| it.growth(OURS, mode), Figures::why_linear;
    "lost share of the rate that nvidia.ko's lock allows, 4 and 16 threads", at most [0.05; 2],
        |it, mode| worst(THREADS.map(|threads| it.lost(OURS, mode, threads))), unknown;
};

/// Rows of the first table: a title and a figure. A figure with a dot, such as `64KiB.pins`, is
/// measured in the VM. A figure of several words, such as `64KiB calls`, is a sum of counts for
/// this shape, kind and name. Counts of our module are those of the in-tree build.
const SUMMARY: &str = "\
pins by nvidia.ko | 64KiB.pins
unpins by nvidia.ko | 64KiB.unpins
scatter-list entries, 1 GiB contiguous | 1GiB-contiguous.entries
scatter-list entries, 64 GiB contiguous | 64GiB-contiguous.entries
module instructions, 64 KiB | 64KiB instructions
module instructions, 1 GiB contiguous | 1GiB-contiguous instructions
module instructions, 1 GiB fragmented | 1GiB-fragmented instructions
instructions with services, 64 KiB | 64KiB.instructions
instructions with services, 1 GiB contiguous | 1GiB-contiguous.instructions
instructions with services, 1 GiB fragmented | 1GiB-fragmented.instructions
calls of services and of nvidia.ko, 64 KiB | 64KiB calls
allocations kept, 64 KiB | 64KiB holds allocations
bytes of kernel memory, 64 KiB | 64KiB.bytes
bytes of kernel memory, 1 GiB contiguous | 1GiB-contiguous.bytes";

/// Rows of the README's table, in persistent mode.
const README_ROWS: &str = "\
scatter-list entries for 1 GiB of contiguous memory | 1GiB-contiguous.entries
scatter-list entries for 64 GiB of contiguous memory | 64GiB-contiguous.entries
instructions to register and deregister 1 GiB, kernel functions included | 1GiB-contiguous.instructions
instructions to register and deregister 64 KiB, kernel functions included | 64KiB.instructions";

/// Returns the rows of a text: two columns each.
fn rows(text: &str) -> impl Iterator<Item = (&str, &str)> {
    text.lines().filter_map(|line| line.split_once(" | "))
}

fn unknown(_: &Figures) -> Option<String> {
    Some("The figures do not say why.".to_owned())
}

fn worst<const N: usize>(values: [Option<f64>; N]) -> Option<f64> {
    let mut values = values.into_iter();
    values.try_fold(f64::MIN, |worst, value| Some(worst.max(value?)))
}

impl Goal {
    fn values(&self, figures: &Figures) -> [Option<f64>; 2] {
        MODES.map(|mode| (self.value)(figures, mode))
    }

    fn missed(&self, figures: &Figures) -> [bool; 2] {
        let [one, other] = self.values(figures);
        let [limit, other_limit] = self.limits;
        let over = |value: Option<f64>, limit| value.is_some_and(|value| value > limit);
        [over(one, limit), over(other, other_limit)]
    }
}

/// Returns the number of missed goals, counting each mode separately.
fn missed(figures: &Figures) -> usize {
    let missed = GOALS.iter().flat_map(|goal| goal.missed(figures));
    missed.filter(|missed| *missed).count()
}

/// Returns the number of goals that have no value in any mode.
fn unmeasured(figures: &Figures) -> usize {
    let values = GOALS.iter().map(|goal| goal.values(figures));
    values.filter(|values| values == &[None, None]).count()
}

fn value(value: f64) -> String {
    match value {
        10.0.. => number(value),
        _ => format!("{value:.3}"),
    }
}

impl Figures {
    fn read(repo: &Path) -> Result<Self> {
        Ok(Self {
            counted: cost::kept(repo)?,
            measured: Measured::read(repo)?,
        })
    }

    fn environment(&self, name: &str) -> &str {
        let found = self.measured.environment.get(name);
        found.map_or(NONE, String::as_str)
    }

    /// Returns the sum of a registration's counts of one kind. `registration` is a mode and a
    /// shape, such as "persistent 64KiB". The prefix "nvidia-" stands for NVIDIA's module.
    fn count(&self, registration: &str, kind: Kind, name: Option<&str>) -> f64 {
        // CAST: The value is far below 2⁵².
        cost::sum(&self.counted.figures, registration, kind, name) as f64
    }

    /// Returns a figure measured in the VM, if there is one.
    fn vm(&self, module: &str, mode: &str, name: &str) -> Option<f64> {
        // CAST: The value is far below 2⁵².
        Some(self.measured.get(module, mode, name)? as f64)
    }

    fn ratio(&self, mode: &str, name: &str) -> Option<f64> {
        Some(self.vm(OURS, mode, name)? / self.vm(NVIDIAS, mode, name)?)
    }

    /// Returns the instructions that each page of fragmented memory adds, including the kernel's
    /// functions.
    fn a_page(&self, module: &str, mode: &str) -> Option<f64> {
        let of = |shape: &str| self.vm(module, mode, &format!("{shape}.instructions"));
        Some((of("1GiB-fragmented")? - of("64KiB")?) / MORE_PAGES)
    }

    /// Returns the total cost of a registration and its deregistration, in nanoseconds. An
    /// instruction counts as one nanosecond. Pins and unpins have their published costs.
    /// nvidia.ko's mapping has the cost of the stand-in's mapping.
    fn total(&self, module: &str, mode: &str, shape: &str, bytes: f64) -> Option<f64> {
        let of = |name: &str| self.vm(module, mode, &format!("{shape}.{name}"));
        let pin = PIN + PIN_OF_A_GIB * bytes / GIB;
        Some(of("instructions")? + of("mapping")? + of("pins")? * pin + of("unpins")? * UNPIN)
    }

    /// Returns the fraction by which `threads` threads fall short of the number of registrations
    /// that nvidia.ko's lock allows.
    fn lost(&self, module: &str, mode: &str, threads: usize) -> Option<f64> {
        let of = |name: &str| self.vm(module, mode, &format!("threads.{threads}.{name}"));
        Some(1.0 - of("registered")? / of("allowed")?)
    }

    fn total_ratio(&self, mode: &str, shape: &str, bytes: f64) -> Option<f64> {
        let of = |module| self.total(module, mode, shape, bytes);
        Some(of(OURS)? / of(NVIDIAS)?)
    }

    fn why_small(&self) -> Option<String> {
        let of = |name| number(self.count("persistent 64KiB", Kind::Instructions, name));
        let revocable = self.count("revocable 64KiB", Kind::Instructions, None);
        Some(format!(
            "The module itself executes {} instructions in persistent mode ({} in `acquire`, {} in `dma_map`) and {} in \
             revocable mode. The kernel's allocators, locks and red-black tree execute the rest.",
            of(None),
            of(Some("acquire")),
            of(Some("dma_map")),
            number(revocable),
        ))
    }

    fn why_a_page(&self) -> Option<String> {
        let ours = self.a_page(OURS, PERSISTENT)?;
        let revocable = self.a_page(OURS, REVOCABLE)?;
        let theirs = self.a_page(NVIDIAS, PERSISTENT)?;
        let mapping = self.vm(NVIDIAS, PERSISTENT, "1GiB-fragmented.mapping")? / MORE_PAGES;
        Some(format!(
            "Our module takes {ours:.1} (persistent) and {revocable:.1} (revocable) instructions a page, and maps the page. \
             NVIDIA's takes {theirs:.1}, and nvidia.ko maps the page (the stand-in with {mapping:.1} instructions).",
        ))
    }

    fn why_total(&self) -> Option<String> {
        let name = "1GiB-fragmented.instructions";
        Some(format!(
            "Pins and unpins cost half as much as NVIDIA's. Our module takes {} instructions, {:.2} times as many as NVIDIA's.",
            number(self.vm(OURS, PERSISTENT, name)?),
            self.ratio(PERSISTENT, name)?
        ))
    }

    fn why_free(&self) -> Option<String> {
        let revoke = |shape| number(self.count(shape, Kind::Instructions, Some("revoke")));
        let of_region = |module| Some(number(self.vm(module, REVOCABLE, "free.1000")? / 1_000.0));
        Some(format!(
            "The callback executes {} instructions of our module, or {} of NVIDIA's. Each of 1,000 regions costs {} \
             instructions with our module, and {} with NVIDIA's.",
            revoke("revocable 64KiB-revoked"),
            revoke("nvidia-revocable 64KiB-revoked"),
            of_region(OURS)?,
            of_region(NVIDIAS)?,
        ))
    }

    fn why_linear(&self) -> Option<String> {
        let theirs = self.growth(NVIDIAS, REVOCABLE)?;
        Some(format!("With NVIDIA's module this ratio is {theirs:.3}."))
    }

    /// Returns the cost of revoking one of 10,000 regions, relative to the cost of revoking one of
    /// 100.
    fn growth(&self, module: &str, mode: &str) -> Option<f64> {
        let of = |regions: u32| self.vm(module, mode, &format!("free.{regions}"));
        Some(of(10_000)? / of(100)? / 100.0)
    }

    fn goals_part(&self) -> String {
        let mut rows = Vec::new();
        let mut reasons = String::new();
        for goal in GOALS {
            let limit = match goal.limits {
                [one, other] if one != other => format!("{}; {}", value(one), value(other)),
                [one, _] => value(one),
            };
            let mut row = vec![goal.name.to_owned(), limit];
            let missed = goal.missed(self);
            for (found, missed) in goal.values(self).into_iter().zip(missed) {
                row.push(match found {
                    None => NONE.to_owned(),
                    Some(found) if missed => format!("**missed:** {}", value(found)),
                    Some(found) => value(found),
                });
            }
            rows.push(row);
            if missed.contains(&true) {
                let reason = (goal.reason)(self).unwrap_or_default();
                wrapped(
                    &mut reasons,
                    &format!("- **{}**: {reason}", goal.name),
                    "  ",
                );
            }
        }
        let head = ["goal", "at most", "persistent", "revocable"];
        let table = table(&head, 1, rows);
        match reasons.as_str() {
            "" => table,
            reasons => format!("{table}\n{reasons}"),
        }
    }

    /// Returns a figure of [`SUMMARY`].
    fn of(&self, figure: &str, module: &str, mode: &str) -> Option<f64> {
        let prefix = if module == NVIDIAS { NVIDIA } else { "" };
        let mut words = figure.split(' ');
        let (shape, kind, name) = (words.next()?, words.next(), words.next());
        let Some(kind) = kind else {
            return self.vm(module, mode, shape);
        };
        let kind = Kind::from_str(kind, false).ok()?;
        Some(self.count(&format!("{prefix}{mode} {shape}"), kind, name))
    }

    /// Returns the first table of the page: both modules in both modes.
    fn summary_part(&self) -> String {
        let row = |(name, figure): (&str, &str)| {
            let mut row = vec![name.to_owned()];
            for mode in MODES {
                row.extend([NVIDIAS, OURS].map(|module| cell(self.of(figure, module, mode))));
            }
            row
        };
        let rows = rows(SUMMARY).map(row).collect();
        let head = [
            "registration and deregistration",
            "NVIDIA's, persistent",
            "ours",
            "NVIDIA's, revocable",
            "ours",
        ];
        table(&head, 1, rows)
    }

    fn callbacks_part(&self) -> String {
        let mut rows = Vec::new();
        let shapes = SHAPES.into_iter();
        for (shape, mode) in shapes.flat_map(|shape| MODES.map(|mode| (shape, mode))) {
            for subject in Subject::ALL.into_iter().rev() {
                let registration = format!("{}{mode} {shape}", subject.prefix());
                let of = |kind, name| number(self.count(&registration, kind, name));
                let all = self.count(&registration, Kind::Instructions, None);
                // Skips registrations without instructions: in persistent mode, nothing is revoked.
                if all == 0.0 {
                    continue;
                }
                let shape = words(shape);
                let mut row = vec![format!("{shape}, {mode}"), subject.name().to_owned()];
                for name in CALLBACKS {
                    row.push(of(Kind::Instructions, Some(*name)));
                }
                row.extend([number(all), of(Kind::Kernel, None)]);
                rows.push(row);
            }
        }
        let head = [&["registration", "module"], CALLBACKS, &["sum", "kernel"]].concat();
        table(&head, 2, rows)
    }

    /// Returns the table of calls in one registration of 64 KiB. Called functions with equal counts
    /// share a row.
    fn calls_part(&self) -> String {
        let columns: Vec<String> = [NVIDIA, ""]
            .into_iter()
            .flat_map(|prefix| MODES.map(|mode| format!("{prefix}{mode} 64KiB")))
            .collect();
        let mut services = BTreeSet::new();
        for figure in self.counted.figures.keys() {
            if figure.kind == Kind::Calls && columns.contains(&figure.registration) {
                services.insert(figure.name.as_str());
            }
        }
        let mut rows: BTreeMap<Vec<String>, Vec<String>> = BTreeMap::new();
        for service in services {
            let of = |column: &String| number(self.count(column, Kind::Calls, Some(service)));
            let counts = columns.iter().map(of).collect();
            rows.entry(counts).or_default().push(format!("`{service}`"));
        }
        let rows = rows.into_iter().map(|(counts, services)| {
            let mut row = vec![services.join(", ")];
            row.extend(counts);
            row
        });
        let head = [
            "each of these",
            "NVIDIA's, persistent",
            "revocable",
            "ours, persistent",
            "revocable",
        ];
        table(&head, 1, rows.collect())
    }

    /// Returns the table with the costs of a revocation and the rates of concurrent threads.
    fn many_part(&self) -> String {
        let part =
            |value: Option<f64>| value.map_or(NONE.to_owned(), |value| format!("{value:.3}"));
        let mut rows = Vec::new();
        for regions in REGIONS {
            let name = format!("free.{regions}");
            let of = |module| cell(self.vm(module, REVOCABLE, &name));
            rows.push(vec![
                format!(
                    "instructions of a free, regions on it: {}",
                    number(f64::from(regions))
                ),
                of(NVIDIAS),
                of(OURS),
                part(self.ratio(REVOCABLE, &name)),
            ]);
        }
        for (mode, threads) in MODES
            .into_iter()
            .flat_map(|mode| THREADS.map(|n| (mode, n)))
        {
            let reached = |module| Some(1.0 - self.lost(module, mode, threads)?);
            let [theirs, ours] = [NVIDIAS, OURS].map(reached);
            rows.push(vec![
                format!(
                    "{threads} threads, {mode}, relative to the rate that nvidia.ko's lock allows"
                ),
                part(theirs),
                part(ours),
                part(ours.zip(theirs).map(|(ours, theirs)| ours / theirs)),
            ]);
        }
        table(&["", "NVIDIA's", "ours", "ratio"], 1, rows)
    }

    fn run_part(&self) -> String {
        let mut text = String::new();
        let of = |name| self.environment(name);
        let measured = format!(
            "VM figures: {}, commit {}, Linux {}, {}; NVIDIA's module is {}. Counts: {}.",
            of("date"),
            of("commit"),
            of("kernel"),
            of("qemu"),
            of(NVIDIAS),
            self.counted.compilers
        );
        wrapped(&mut text, &measured, "");
        text
    }

    fn readme_part(&self) -> String {
        let of = |module, name| cell(self.vm(module, PERSISTENT, name));
        let calls = |module| {
            format!(
                "{} and {}",
                of(module, "64KiB.pins"),
                of(module, "64KiB.unpins")
            )
        };
        let mut text = format!(
            "| | this module | NVIDIA's {} |\n|---|---|---|\n\
             | pins and unpins by nvidia.ko for one registration | {} | {} |\n",
            self.environment(NVIDIAS),
            calls(OURS),
            calls(NVIDIAS)
        );
        for (what, name) in rows(README_ROWS) {
            let [ours, theirs] = [OURS, NVIDIAS].map(|module| of(module, name));
            text.push_str(&format!("| {what} | {ours} | {theirs} |\n"));
        }
        text.push('\n');
        let run = format!(
            "In the default mode (`persistent_api_support=1`), measured in the test VM on {} at commit {}. \
             [docs/performance.md]({PAGE}) has all costs, and says which goals they miss.",
            self.environment("date"),
            self.environment("commit")
        );
        wrapped(&mut text, &run, "");
        text
    }

    /// Returns all generated parts: file, name, text.
    fn parts(&self) -> [(&'static str, &'static str, String); 7] {
        [
            (PAGE, "summary", self.summary_part()),
            (PAGE, "goals", self.goals_part()),
            (PAGE, "callbacks", self.callbacks_part()),
            (PAGE, "calls", self.calls_part()),
            (PAGE, "many", self.many_part()),
            (PAGE, "run", self.run_part()),
            (README, "what was measured", self.readme_part()),
        ]
    }
}

fn words(shape: &str) -> String {
    shape
        .replace("KiB", " KiB")
        .replace("GiB", " GiB")
        .replace('-', " ")
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn repo() -> std::path::PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
    }

    /// Checks that both pages contain exactly the figures of the two files.
    #[test]
    fn the_pages_say_what_was_counted_and_measured() {
        let figures = Figures::read(&repo()).unwrap();
        for (page, name, text) in figures.parts() {
            let found = documents::check(&repo().join(page), name, &text, false);
            assert_eq!(found.expect("marks"), None);
        }
        let page = fs::read_to_string(repo().join(PAGE)).unwrap();
        assert!(page.lines().count() <= 150, "{}", page.lines().count());
    }

    #[test]
    fn missed_goals_are_explained() {
        let mut figures = Figures::read(&repo()).unwrap();
        let mut names = BTreeSet::new();
        for (mode, threads) in MODES
            .into_iter()
            .flat_map(|mode| THREADS.map(|n| (mode, n)))
        {
            for name in ["registered", "allowed"] {
                let name = format!("{OURS} {mode} threads.{threads}.{name}");
                figures.measured.figures.insert(name, 1_000);
            }
        }
        // Makes each of our figures so bad that no goal is met.
        for (name, value) in &mut figures.measured.figures {
            if name.starts_with(OURS) {
                *value = match name.contains("registered") {
                    true => 1,
                    false => *value * *value * 10,
                };
            }
        }
        let text = figures.goals_part();
        for goal in GOALS {
            assert!(goal.missed(&figures).contains(&true), "{}", goal.name);
            assert!(text.contains(&format!("- **{}**: ", goal.name)), "{text}");
            assert!(names.insert(goal.name), "{}", goal.name);
        }
        // No explanation is given if no goal is missed.
        for (name, value) in &mut figures.measured.figures {
            if name.starts_with(OURS) {
                *value = match name.contains("registered") {
                    true => u64::from(u32::MAX),
                    false => u64::from(name.contains("free.")),
                };
            }
        }
        let text = figures.goals_part();
        assert!(!text.contains("missed"), "{text}");
        assert!(!text.contains("- **"), "{text}");
    }

    #[test]
    fn a_figure_that_was_not_measured_is_none() {
        let mut figures = Figures::read(&repo()).unwrap();
        figures.measured.figures.clear();
        assert_eq!((missed(&figures), unmeasured(&figures)), (0, GOALS.len()));
        let goals = figures.goals_part();
        assert_eq!(goals.matches(NONE).count(), 2 * GOALS.len(), "{goals}");
        assert!(figures.summary_part().contains(NONE));
    }
}
