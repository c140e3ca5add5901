// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! `docs/performance.md`: what a bench measured, and how it is to be read.

use std::sync::LazyLock;

use anyhow::{bail, ensure, Context as _, Result};
use peermem_figures::What;
use regex::Regex;

use super::{goals, table, timed, Environment, Measured};
use crate::documents::wrapped;
use crate::results::pattern;

/// Where the page lies in the repository.
pub(super) const PAGE: &str = "docs/performance.md";

const HEAD: &str = "<!-- SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause -->\n\
<!-- Made by `make bench` from what it measured. -->\n\
# What a registration costs\n\n";

/// Where the part of it lies that stands in the README, and the name of that part.
pub(super) const README: &str = "README.md";
pub(super) const README_PART: &str = "what was measured";

/// What stands before the tables, a paragraph each. `{…}` is put in.
const INTRODUCTION: &[&str] = &[
    "This module beside NVIDIA's {theirs}, mode by mode, on the same kernel and the same test VM, in {rounds} rounds that \
     alternate. Nothing here was measured on a GPU or an RDMA NIC.",
    "- **Instructions** in the first half of the page: the machine is QEMU with one processor and `-icount shift=0`, and its \
     clock, the cycle counter included, counts instructions, one a nanosecond. The host's speed does not bear on them.",
    "- **Wall time** in the second half, and there alone: many at once, small buffers, start-ups. The machine is \
     QEMU with four processors, which the host's own emulate as they have time.",
    "- **Own** is what the module's functions take (acquire, get_pages, dma_map, dma_unmap, put_pages, release, and \
     get_page_size) with all that they call of the kernel, the provider's calls taken off. `tests/bench` hands ib_core a copy \
     of whichever client registers, whose functions read the clock around the client's own; `tests/gpu` reads it where its \
     calls come in and return. A function that does nothing took {function} instructions that way, a call of the provider's \
     added {provider_call} to its caller's part; both are taken off. Interrupts are not: they are the spread.",
    "- **Whole** is own, an instruction as a nanosecond, and the provider at the published prices of a V100 (gdrcopy): 70 µs a \
     pin, 38 µs an unpin, and 3 ms a GiB pinned, which is extrapolated from 16 MiB. They are multiplied with the calls that \
     were counted. For `dma_map_pages` nothing is published: its price here is 0. Where both modules call it as often (the \
     tables of calls say so), any other price moves the ratio towards 1: the column _with mapping_ has what the stand-in's own \
     mapping and unmapping take (an instruction as a nanosecond), as an example. Where this module does not call it, it maps \
     by itself, and that is in its own cost. The column _and free pins_ has pins and unpins at a price of 0, too. With static \
     BAR1 nvidia.ko need not make room in BAR1, and no prices are published for that. Whatever they are, the ratio lies between \
     that column and 0.5, since this module pins half as often.",
    "- **Memory**: contiguous in one run, in chunks of 2 MiB, or fragmented: no two pages of 64 KiB side by side. Kernel \
     memory is what the allocators gave in those functions, the provider's calls left out.",
    "- **Spread** is that of the middle half of all samples, in parts of their median. What is registered is registered once \
     before it is measured, up to 1 GiB.",
    "- NVIDIA's module makes two clients; the one without the callback is compared with our persistent mode, the one with it \
     with our revocable one.",
];

const ENVIRONMENT: &str = "Measured on {date} at commit {commit}, on {processor}; {qemu}; Linux {kernel}; this module's version is {ours}. Wall time is that host's, \
with whatever else it did.";

const GOALS: &str = "Ours in parts of NVIDIA's, but for the last two: the worst, and where it was. A goal that is **missed** \
says so. Of two limits the second is the revocable mode's.";

/// What each goal is measured by.
const GOALS_EXPLAINED: &[&str] = &[
    "- Pins and unpins: counted by the stand-in, from before `ibv_reg_mr` to after `ibv_dereg_mr`, in all rows below.",
    "- Whole cost with mapping: instructions and prices, in all rows below; for the provider's mapping, the stand-in's \
     instructions.",
    "- Own cost: instructions. A page: what each page of 64 KiB more takes, of memory of which no two adjoin.",
    "- Own kernel memory: bytes held while it is registered, in the contiguous rows of 1 GiB and more.",
    "- Revocation: instructions from the call that frees to its return. Of one region, of many: what a region's share is with \
     1,000 and more, in parts of what it is with 100. 1 is linear.",
    "- Lost of what the provider's lock allows: wall time; what of the provider's own rate is not reached with 4, 16 and 64 \
     threads or processes.",
];

/// What stands before a table.
const MUTEX: &str = "The mutex is ib_core's `peer_memory_mutex`, for the whole machine: acquire's own cost and the provider's \
calls in it, at the prices above.";

const HCA: &str = "`HCA` is what `ib_umem_find_best_pgsz` makes of the table: entries of the HCA's own, and their size, with \
what mlx5 offers (4 KiB to 2 GiB). _Old_ is its form until Linux 6.15 and OFED 25.04, _new_ that since. Both are re-expressed \
in `tests/verbs/src/bench/pgsz.rs`; for the new form, each figure is checked against the kernel's own function. Bytes are \
bytes.";

const FUNCTIONS: &str = "Instructions of each of a module's functions, in register and deregister together, of a registration's \
life.";

const APPLICATIONS: &str = "What `ibv_reg_mr` and `ibv_dereg_mr` take, in instructions: libibverbs, ib_core, rxe, the stand-in \
and the module. The stand-in's prices are its own, and no GPU's; there is no goal.";

const REVOCATION: &str = "From the call that frees an allocation to its return, by when the last of the regions on it is dead: \
instructions, the stand-in's and rxe's included, which are the same for both modules. Each region is a page of 64 KiB \
of its own.";

const ALIVE: &str = "A registration of 64 KiB, and its end, beside so many others of 64 KiB that are alive, each with a page of \
its own: the least of 16, in instructions. Own is the module's part, the bytes are kernel memory of its own for each of those \
that are alive. What an application sees has rxe and the stand-in in it, which finds a pin to put in a list of all: what an unpin \
of the newest takes grows with that.";

const WALL: &str = "Wall time, with four emulated processors on {processor}. It varies with what else the host does: the \
ratios count, not the figures. The stand-in is told to take {pin_us} µs a pin and {unpin_us} µs an unpin, \
asleep, with its lock held (`pin_us`, `unpin_us`): {times} times a V100's pin, since all else is emulated, and slower as well. \
Its own mapping it does as ever.";

const CROWDS: &str = "Threads of one process with one device, and processes with a device each, register 64 KiB of memory of \
their own and deregister it, again and again, for 0.4 s at a time. _Allowed_ is what as many get done that have the provider \
pin, map (in the persistent mode), unmap and unpin the same memory once, without ib_core, RDMA device or module \
(`tests/bench/provider.c`), measured next to the other: what would be reached if nothing but the provider's lock stood in the \
way. _Lost_ is what is missing from that. One alone waits for nobody's lock, and has rxe's work to do between the provider's \
calls: no goal is set for it.";

const SMALL: &str = "One thread registers a buffer of GPU memory, writes it to the other device by RDMA, waits, and deregisters \
it: a loop, of 100. Beside it the same WRITE of memory that stays registered.";

const STARTUP: &str = "Eight processes register at once, each for its connections a buffer of 4 MiB and one of 64 KiB, until \
the last region of the last process is there; then all deregister. The stand-in looks a pin up in a list of all, under its \
lock.";

const DATAPATH: &str = "perftest, unmodified, with the buffers of both ends in GPU memory, and in the host's, in turn, on the \
same devices: bandwidth (more is better), or typical latency (less is better), with an instruction as a nanosecond. Both ends, \
rxe and the NICs' drivers share the one processor; one end polls while QEMU carries the packets, and that varies. \
Neither module is called meanwhile. Measured in the first round, with the persistent modes.";

const MISSED: &str = "What the figures of this run say of each goal that it missed.";

const UNKNOWN: &str = "The figures do not say why.";

const NOT_MEASURED: &[&str] = &[
    "- Anything on a GPU, an RDMA NIC, or a machine that is not emulated. `ibv_reg_mr` on an HCA has the HCA's own work where \
     rxe's is here.",
    "- Wall time of the provider beyond its price for a pin and an unpin: by length it is in the whole cost alone.",
    "- Caches and memory: an instruction counts as one, whatever it waits for.",
    "- Fragmented memory of more than 1 GiB, unless `BENCH=--long` is given: rxe takes too long for it.",
    "- How much locks of several processors cost beside the waiting: with more processors than the host has, that is not to \
     be seen.",
];

fn is_told(what: &What) -> bool {
    what.bytes == 64 << 10 || what.bytes == 1 << 30
}

/// A part of the page: its heading, what stands before its table, and the table if anything of it was measured.
type Section = (&'static str, &'static str, Option<String>);

/// What is instructions.
fn of_instructions(measured: &Measured) -> Vec<Section> {
    let pairs = goals::pairs(&measured.ours, &measured.theirs);
    let if_any = |table: String| (!pairs.is_empty()).then_some(table);
    let [ours, theirs] = &measured.freed;
    vec![
        ("Cost", "", if_any(table::costs(&pairs))),
        (
            "Provider calls and the mutex",
            MUTEX,
            if_any(table::calls(&pairs)),
        ),
        (
            "Scatter lists, kernel memory, HCA pages",
            HCA,
            if_any(table::memory(&pairs)),
        ),
        (
            "Where the instructions are",
            FUNCTIONS,
            if_any(table::functions(&pairs, is_told)),
        ),
        (
            "As an application sees it",
            APPLICATIONS,
            if_any(table::applications(&pairs)),
        ),
        (
            "Revocation",
            REVOCATION,
            (!ours.is_empty()).then(|| table::revocations(ours, theirs)),
        ),
        (
            "Beside others that are alive",
            ALIVE,
            (!measured.alive[0].is_empty())
                .then(|| table::alive(&measured.alive[0], &measured.alive[1])),
        ),
        ("The data path", DATAPATH, timed::datapaths(&measured.timed)),
    ]
}

/// What is wall time.
fn of_wall_time(measured: &Measured) -> Vec<Section> {
    vec![
        (
            "Threads and processes at once",
            CROWDS,
            timed::crowds(&measured.timed),
        ),
        ("Small buffers", SMALL, timed::small(&measured.timed)),
        ("Start-up", STARTUP, timed::startups(&measured.timed)),
    ]
}

fn goals_table(measured: &[Measured]) -> String {
    let goals: Vec<_> = measured
        .iter()
        .map(|mode| (mode.name, mode.goals.as_slice()))
        .collect();
    table::goals(&goals)
}

/// A paragraph for each goal that is missed, with its own reasons; None where none is.
fn missed(measured: &[Measured]) -> Option<String> {
    let mut text = String::new();
    for mode in measured {
        for goal in &mode.goals {
            if goal.is_met() != Some(false) {
                continue;
            }
            let mut found = format!("- **{}**, {}", goal.name, mode.name);
            if let Some(at) = &goal.at {
                found.push_str(&format!(" ({at})"));
            }
            let reasons = match goal.reasons.as_slice() {
                [] => UNKNOWN.to_owned(),
                reasons => reasons.join(" "),
            };
            wrapped(&mut text, &format!("{found}: {reasons}"), "  ");
        }
    }
    (!text.is_empty()).then_some(text)
}

/// The tables of all modes, for a terminal.
pub(super) fn tables(measured: &[Measured]) -> String {
    let mut text = goals_table(measured);
    for mode in measured {
        for (name, _, table) in of_instructions(mode).into_iter().chain(of_wall_time(mode)) {
            if let Some(table) = table {
                text.push_str(&format!("\n{name}, {}\n\n{table}", mode.name));
            }
        }
    }
    text
}

/// The page.
pub(super) fn page(environment: &Environment, measured: &[Measured]) -> String {
    let mut values = vec![
        ("{date}", environment.date.clone()),
        ("{commit}", environment.commit.clone()),
        ("{theirs}", environment.theirs.clone()),
        ("{ours}", environment.ours.clone()),
        ("{rounds}", environment.rounds.to_string()),
        ("{processor}", environment.processor.clone()),
        ("{qemu}", environment.qemu.clone()),
        ("{kernel}", environment.kernel.clone()),
    ];
    if let Some(found) = environment.calibration {
        values.push(("{function}", found.function.to_string()));
        values.push(("{provider_call}", found.provider_call.to_string()));
    }
    if let Some(found) = environment.prices {
        let times = found.pin_us as f64 * 1000.0 / goals::PIN;
        values.push(("{times}", format!("{times:.0}")));
        values.push(("{pin_us}", found.pin_us.to_string()));
        values.push(("{unpin_us}", found.unpin_us.to_string()));
    }
    let mut text = HEAD.to_owned();
    let say = |text: &mut String, paragraphs: &[&str]| {
        for paragraph in paragraphs {
            let full = values
                .iter()
                .fold((*paragraph).to_owned(), |text, (name, value)| {
                    text.replace(name, value)
                });
            let is_item = paragraph.starts_with("- ");
            wrapped(text, &full, if is_item { "  " } else { "" });
            if !is_item {
                text.push('\n');
            }
        }
    };
    let sections = |text: &mut String, of: fn(&Measured) -> Vec<Section>| {
        for mode in measured {
            for (name, before, table) in of(mode) {
                let Some(table) = table else { continue };
                text.push_str(&format!("\n### {name}, {}\n\n", mode.name));
                if !before.is_empty() {
                    say(text, &[before]);
                }
                text.push_str(&table);
            }
        }
    };
    say(&mut text, INTRODUCTION);
    text.push('\n');
    say(&mut text, &[ENVIRONMENT]);
    text.push_str("## Goals\n\n");
    say(&mut text, &[GOALS]);
    text.push_str(&goals_table(measured));
    text.push('\n');
    say(&mut text, GOALS_EXPLAINED);
    text.push_str("\n## Instructions\n");
    sections(&mut text, of_instructions);
    text.push_str("\n## Wall time\n\n");
    say(&mut text, &[WALL]);
    let length = text.trim_end().len();
    text.truncate(length + 1);
    sections(&mut text, of_wall_time);
    if let Some(missed) = missed(measured) {
        text.push_str("\n## Why goals are missed\n\n");
        say(&mut text, &[MISSED]);
        text.push_str(&missed);
    }
    text.push_str("\n## What is not measured\n\n");
    say(&mut text, NOT_MEASURED);
    text
}

/// The cells of a row of the page: of the section that begins so, and of this memory and length.
fn row<'a>(page: &'a str, section: &str, [memory, length]: [&str; 2]) -> Result<Vec<&'a str>> {
    let (_, after) = page
        .split_once(&format!("\n### {section}\n"))
        .with_context(|| format!("no section {section}"))?;
    after
        .lines()
        .take_while(|line| !line.starts_with('#'))
        .map(|line| line.trim_matches('|').split('|').map(str::trim).collect())
        .find(|cells: &Vec<&str>| cells.starts_with(&[memory, length]))
        .with_context(|| format!("{section}: no row of {memory}, {length}"))
}

/// The table of the README, from the page alone: it says of which run its figures are.
pub(super) fn readme(page: &str) -> Result<String> {
    let words = page.split_whitespace().collect::<Vec<_>>().join(" ");
    let between = |begin: &str, end: &str| -> Result<&str> {
        let (_, after) = words
            .split_once(begin)
            .with_context(|| format!("no {begin:?}"))?;
        let (found, _) = after.split_once(end).with_context(|| begin.to_owned())?;
        Ok(found)
    };
    let date = between("Measured on ", " at commit ")?;
    let commit = between(" at commit ", ", on ")?;
    ensure!(
        DATE.is_match(date) && COMMIT.is_match(commit),
        "measured on {date:?} at commit {commit:?}"
    );
    let theirs = between("This module beside NVIDIA's ", ",")?;
    const CONTIGUOUS: &str = "contiguous";
    let (large, larger, small) = ("1 GiB", "64 GiB", "64 KiB");
    let calls = row(
        page,
        "Provider calls and the mutex, persistent",
        [CONTIGUOUS, large],
    )?;
    let [pins, unpins] = [2, 3].map(|at| calls.get(at).and_then(|cell| cell.split_once(", ")));
    let ((pins, their_pins), (unpins, their_unpins)) = pins.zip(unpins).context("no calls")?;
    let mut rows = vec![(
        "pins and unpins by nvidia.ko for one registration".to_owned(),
        format!("{pins} and {unpins}"),
        format!("{their_pins} and {their_unpins}"),
    )];
    for (what, section, length) in [
        (
            "scatter-list entries for",
            "Scatter lists, kernel memory, HCA pages, persistent",
            large,
        ),
        (
            "scatter-list entries for",
            "Scatter lists, kernel memory, HCA pages, persistent",
            larger,
        ),
        (
            "the module's own instructions to register and deregister",
            "Cost, persistent",
            large,
        ),
        (
            "the module's own instructions to register and deregister",
            "Cost, persistent",
            small,
        ),
    ] {
        let cells = row(page, section, [CONTIGUOUS, length])?;
        let [_, _, ours, theirs, ..] = cells[..] else {
            bail!("{section}: {cells:?}");
        };
        rows.push((
            format!("{what} {length} of contiguous memory"),
            ours.to_owned(),
            theirs.to_owned(),
        ));
    }
    let mut text = format!("| | this module | NVIDIA's {theirs} |\n|---|---|---|\n");
    for (what, ours, theirs) in rows {
        text.push_str(&format!("| {what} | {ours} | {theirs} |\n"));
    }
    text.push('\n');
    wrapped(
        &mut text,
        &format!(
            "In the default mode (`persistent_api_support=1`), measured in the test VM on {date} at commit {commit}. \
             [docs/performance.md]({PAGE}) has all costs, and says which goals they miss."
        ),
        "",
    );
    Ok(text)
}

static DATE: LazyLock<Regex> = LazyLock::new(|| pattern(r"^\d{4}-\d\d-\d\d$"));
static COMMIT: LazyLock<Regex> =
    LazyLock::new(|| pattern(r"^[0-9a-f]{12}( with changes to `src` that are not committed)?$"));

#[cfg(test)]
mod tests {
    use super::super::record::tests::lines;
    use super::super::MODES;
    use super::*;
    use crate::documents;
    use peermem_figures::{Calibration, Prices};

    fn environment() -> Environment {
        Environment {
            processor: "2 × a processor".to_owned(),
            date: "2026-01-02".to_owned(),
            commit: "0123456789ab".to_owned(),
            qemu: "QEMU".to_owned(),
            kernel: "7.x".to_owned(),
            ours: "1".to_owned(),
            theirs: "550".to_owned(),
            rounds: 3,
            calibration: Some(Calibration {
                function: 8,
                provider_call: 28,
            }),
            prices: Some(Prices {
                pin_us: 700,
                unpin_us: 380,
            }),
        }
    }

    fn measured(pins: [u64; 2], own: [i64; 2]) -> [Measured; 1] {
        let of = |at: usize| {
            let slower = pins[at];
            [lines(pins[at], own[at]), timed::tests::lines(slower)].concat()
        };
        [Measured::of(&MODES[0], &[of(0), of(1)]).expect("figures")]
    }

    /// The names of the goals that the page explains.
    fn explained(text: &str) -> Vec<&str> {
        let Some((_, part)) = text.split_once("\n## Why goals are missed\n") else {
            return Vec::new();
        };
        let part = part.split("\n## ").next().unwrap_or_default();
        part.lines()
            .filter_map(|line| Some(line.strip_prefix("- **")?.split_once("**")?.0))
            .collect()
    }

    #[test]
    fn goals_are_explained_where_they_are_missed() {
        // Half of NVIDIA's pins, and half of its instructions: as good as these lines can be.
        let good = measured([1, 2], [100, 200]);
        let text = page(&environment(), &good);
        assert_eq!(
            explained(&text),
            [
                "whole cost with mapping, 64 GiB contiguous",
                "whole cost with mapping, 1 GiB fragmented",
                "own cost, 1 GiB contiguous",
                "own kernel memory, contiguous, 1 GiB and more"
            ]
        );
        let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(
            words.contains("64 GiB, contiguous): The figures do not say why."),
            "{text}"
        );
        // As many pins, and ten times the instructions.
        let bad = measured([2, 2], [2000, 200]);
        let text = page(&environment(), &bad);
        let names: Vec<&str> = bad[0]
            .goals
            .iter()
            .filter(|goal| goal.is_met() == Some(false))
            .map(|goal| goal.name)
            .collect();
        assert!(names.len() > 5, "{names:?}");
        assert_eq!(explained(&text), names);
        assert!(text.contains("`acquire` 1,800"), "{text}");
        // Nothing is missed: nothing is to be explained.
        let [mut none] = measured([1, 2], [100, 200]);
        none.goals.retain(|goal| goal.is_met() != Some(false));
        let text = page(&environment(), &[none]);
        assert!(!text.contains("Why goals are missed"), "{text}");
        assert!(text.contains("\n## What is not measured"), "{text}");
    }

    #[test]
    fn the_page_has_everything() {
        let measured = measured([1, 2], [100, 200]);
        let text = page(&environment(), &measured);
        assert!(!text.contains('{'), "{text}");
        for word in [
            "Measured on 2026-01-02 at commit 0123456789ab, on 2 × a processor",
            "took 8 instructions",
            "10 times a V100's",
            "550",
            "## Goals",
            "**missed:**",
            "| acquire",
            "700 µs a pin",
            "## Small buffers, persistent",
            "## Start-up, persistent",
            "## The data path, persistent",
            "4 threads",
        ] {
            assert!(text.contains(word), "{word}");
        }
        assert!(text.starts_with("<!-- SPDX"));
        assert!(!text.contains("\n\n\n"), "{text}");
        let part = readme(&text).expect("all that it has");
        assert_eq!(
            part.lines().collect::<Vec<_>>(),
            [
                "| | this module | NVIDIA's 550 |",
                "|---|---|---|",
                "| pins and unpins by nvidia.ko for one registration | 1 and 1 | 2 and 2 |",
                "| scatter-list entries for 1 GiB of contiguous memory | 1 | 1 |",
                "| scatter-list entries for 64 GiB of contiguous memory | 1 | 1 |",
                "| the module's own instructions to register and deregister 1 GiB of contiguous memory | 301 | 601 |",
                "| the module's own instructions to register and deregister 64 KiB of contiguous memory | 301 | 601 |",
                "",
                "In the default mode (`persistent_api_support=1`), measured in the test VM on 2026-01-02 at commit 0123456789ab.",
                "[docs/performance.md](docs/performance.md) has all costs, and says which goals they miss.",
            ]
        );
        let without = text.replace(" at commit 0123456789ab", "");
        assert!(readme(&without).is_err());
        let found = tables(&measured);
        for word in ["own cost, 64 KiB", "ib_write_bw -s 1"] {
            assert!(found.contains(word), "{word}");
        }
    }

    /// The page says what was measured and when, and the README has its figures and no others.
    #[test]
    fn the_readme_says_what_the_page_says() {
        let repo = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let text = std::fs::read_to_string(repo.join(PAGE)).expect(PAGE);
        let part = readme(&text).expect("date, commit and figures");
        let found = documents::check(&repo.join(README), README_PART, &part, false);
        assert_eq!(found.expect("marks"), None);
    }
}
