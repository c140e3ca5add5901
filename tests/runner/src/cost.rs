// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Cost of a registration, for our module and NVIDIA's nvidia-peermem: instructions by callback,
//! counted without a VM and compared with `tests/cost/figures`.
//!
//! The module's object file is linked with the services of `tests/cost` into a user program, which
//! uses the module to make registrations. Callgrind counts each instruction. The section that
//! contains an instruction's address shows whether the instruction belongs to the module or to an
//! object of the kernel's build. Calls of all other services are counted.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{fmt, fs};

use anyhow::{bail, Context as _, Error, Result};
use clap::{Args, ValueEnum};

use crate::kernel::{Extent, Kernel};
use crate::lock::Lock;
use crate::modules::Builder;
use crate::paths::Paths;
use crate::progress::output;
use crate::results::{Test, Verdict};
use crate::vm::{Build, Named as _};
use crate::{apt, kernel, results, setup, stamp};

#[derive(Debug, Args)]
pub(crate) struct Selection {
    /// Writes the counts to tests/cost/figures and docs/performance.md
    #[arg(long)]
    pub(crate) update: bool,
}

pub(crate) const MODES: [&str; 2] = ["persistent", "revocable"];

/// The callbacks of a peer-memory client, in call order. The last one is the revocation.
pub(crate) const CALLBACKS: &[&str] = &[
    "acquire",
    "get_pages",
    "dma_map",
    "get_page_size",
    "revoke",
    "dma_unmap",
    "put_pages",
    "release",
];

/// A module whose registrations are measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Subject {
    Ours(Build),
    Nvidia,
}

impl Subject {
    pub(crate) const ALL: [Self; 3] = [
        Self::Ours(Build::InTree),
        Self::Ours(Build::Portable),
        Self::Nvidia,
    ];

    /// Returns the prefix of the names of the module's registrations.
    pub(crate) fn prefix(self) -> &'static str {
        match self {
            Self::Ours(Build::InTree) => "",
            Self::Ours(Build::Portable) => PORTABLE,
            Self::Nvidia => NVIDIA,
        }
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Ours(Build::InTree) => "ours, in-tree",
            Self::Ours(Build::Portable) => "ours, portable",
            Self::Nvidia => "NVIDIA's",
        }
    }
}

const PORTABLE: &str = "portable-";
pub(crate) const NVIDIA: &str = "nvidia-";

/// Object files of the kernel's build that are linked with the module. `tests/cost/services.c`
/// implements all other services.
const KERNEL_OBJECTS: &[&str] = &[
    "arch/x86/lib/memcpy_64.o",
    "arch/x86/lib/memset_64.o",
    "lib/rbtree.o",
    "lib/scatterlist.o",
    "lib/string.o",
];
/// Additional objects for the in-tree build.
const RUST_OBJECTS: &[&str] = &["rust/core.o", "rust/helpers/helpers.o", "rust/kernel.o"];

/// Sections of the linked program. One has all instructions of the module, the other all
/// instructions of the kernel's objects.
const MODULE_SECTION: &str = "cost_module";
const KERNEL_SECTION: &str = "cost_kernel";

/// Tolerance for instruction counts, in percent. Other counts must match exactly.
const TOLERANCE: u64 = 2;

/// Prefix of the line in the figures' file that names the compilers of the module.
const COMPILED: &str = "# Compiled with ";

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(crate) enum Kind {
    /// Instructions of the module in one callback.
    Instructions,
    /// Instructions of the kernel's objects in one callback.
    Kernel,
    /// Calls of one service, in all callbacks.
    Calls,
    /// Objects that exist while the memory is registered.
    Holds,
}

/// Identifies one count.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Figure {
    /// Mode and shape: "persistent 64KiB".
    pub(crate) registration: String,
    pub(crate) kind: Kind,
    /// The callback, the service or the kind of object.
    pub(crate) name: String,
}

impl fmt::Display for Figure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.kind.name(), self.name)
    }
}

pub(crate) type Figures = BTreeMap<Figure, u64>;

#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Counted {
    pub(crate) compilers: String,
    pub(crate) figures: Figures,
}

/// Returns one test for each registration. The test compares the registration's cost with
/// `tests/cost/figures`. Measures the modules that are already built.
pub(crate) fn tests(paths: &Paths) -> Result<Vec<Test>> {
    let counted = count(paths, true, &Subject::ALL)?;
    let mut tests = compared(&kept(&paths.repo)?, &counted);
    tests.push(nowhere_dearer(&counted.figures));
    Ok(tests)
}

/// Returns the tests of the in-tree build alone, and compiles this build first.
pub(crate) fn in_tree_tests(paths: &Paths) -> Result<Vec<Test>> {
    let counted = count(paths, false, &[Subject::Ours(Build::InTree)])?;
    let mut kept = kept(&paths.repo)?;
    let is_other = |name: &str| name.starts_with(PORTABLE) || name.starts_with(NVIDIA);
    kept.figures
        .retain(|figure, _| !is_other(&figure.registration));
    Ok(compared(&kept, &counted))
}

/// Returns one test for each registration. The notes of a failed test have advice.
fn compared(kept: &Counted, counted: &Counted) -> Vec<Test> {
    let mut tests = compare(&kept.figures, &counted.figures);
    for test in tests
        .iter_mut()
        .filter(|test| test.verdict != Verdict::Passed)
    {
        test.notes.push(format!(
            "if the change is intended (instructions changed by more than {TOLERANCE} %, or the number of calls changed): run 'make cost UPDATE=1', and commit tests/cost/figures"
        ));
        if kept.compilers != counted.compilers {
            test.notes.push(format!(
                "or the compiler caused the change: the file's figures are from {}; these are from {}",
                kept.compilers, counted.compilers
            ));
        }
    }
    tests
}

/// Runs `runner cost`: counts the cost of registrations, and compares the counts with the committed
/// file or updates this file.
pub(crate) fn run(paths: &Paths, selection: &Selection) -> Result<i32> {
    let counted = count(paths, false, &Subject::ALL)?;
    let mut tests = vec![nowhere_dearer(&counted.figures)];
    if selection.update {
        let file = file(&paths.repo);
        if stamp::update(&file, write(&counted).as_bytes())? {
            println!("{} is written", file.display());
        }
    } else {
        tests.extend(compared(&kept(&paths.repo)?, &counted));
    }
    Ok(i32::from(results::tell(&tests) > 0))
}

fn file(repo: &Path) -> PathBuf {
    repo.join("tests/cost/figures")
}

/// Returns the figures of `tests/cost/figures`. Returns no figures if there is no such file.
pub(crate) fn kept(repo: &Path) -> Result<Counted> {
    read(&fs::read_to_string(file(repo)).unwrap_or_default())
}

fn count(paths: &Paths, frozen: bool, subjects: &[Subject]) -> Result<Counted> {
    apt::install(paths, apt::COST)?;
    let toolchain = setup::tools(paths)?;
    let extent = if frozen {
        Extent::Frozen
    } else {
        Extent::Patched
    };
    let kernel = setup::find_kernel(paths, &toolchain, kernel::DEFAULT, extent)?;
    let _lock = Lock::take(paths, "modules")?;
    let directory = kernel.products.join("cost.linked");
    fs::create_dir_all(&directory)?;
    let mut figures = Figures::new();
    for subject in subjects {
        let mut builder = Builder::new(paths, &toolchain, &kernel, frozen);
        if let Subject::Ours(build) = subject {
            builder = builder.with(Some(*build))?;
        }
        let module = match subject {
            Subject::Ours(_) => builder.ours()?,
            Subject::Nvidia => builder.control()?,
        };
        let services = builder.services()?;
        let mut objects = KERNEL_OBJECTS.to_vec();
        if *subject == Subject::Ours(Build::InTree) {
            objects.extend(RUST_OBJECTS);
        }
        let objects: Vec<PathBuf> = objects
            .into_iter()
            .map(|object| kernel.build.join(object))
            .collect();
        let program = link(paths, &objects, &directory, &services, &module)?;
        run_modes(&program, &directory, *subject, &mut figures)?;
    }
    Ok(Counted {
        compilers: compilers(&kernel)?,
        figures,
    })
}

/// Runs the program in each mode, and adds the counts to the figures.
fn run_modes(
    program: &Path,
    directory: &Path,
    subject: Subject,
    figures: &mut Figures,
) -> Result<()> {
    let whose = match subject {
        Subject::Ours(_) => "ours",
        Subject::Nvidia => "nvidia",
    };
    for mode in MODES {
        let dumps = directory.join(format!("{mode}.callgrind"));
        let said = output(
            Command::new("valgrind")
                .args(["--command-line-only=yes", "--quiet", "--vgdb=no"])
                .args(["--tool=callgrind", "--dump-instr=yes", "--dump-line=no"])
                .args(["--compress-strings=no", "--compress-pos=no"])
                .arg("--combine-dumps=yes")
                .arg(format!("--callgrind-out-file={}", dumps.display()))
                .arg(program)
                .args([whose, mode]),
        )?;
        let dumps = fs::read_to_string(&dumps)
            .with_context(|| format!("callgrind wrote no {}", dumps.display()))?;
        add(
            figures,
            &format!("{}{mode}", subject.prefix()),
            &said,
            &dumps,
        )?;
    }
    Ok(())
}

/// Returns the versions of the kernel and of its compilers, from the kernel's configuration. The
/// same compilers compile the module.
fn compilers(kernel: &Kernel) -> Result<String> {
    let file = kernel.build.join("include/config/auto.conf");
    let text = fs::read_to_string(&file).with_context(|| file.display().to_string())?;
    let value = |key: &str| {
        text.lines()
            .filter_map(|line| line.split_once('='))
            .find(|(name, _)| *name == key)
            .map(|(_, value)| value.trim_matches('"').to_owned())
            .with_context(|| format!("{} has no {key}", file.display()))
    };
    Ok(format!(
        "{}, {}, for Linux {}",
        value("CONFIG_CC_VERSION_TEXT")?,
        value("CONFIG_RUSTC_VERSION_TEXT")?,
        kernel.release
    ))
}

fn link(
    paths: &Paths,
    kernel_objects: &[PathBuf],
    directory: &Path,
    services: &Path,
    module: &Path,
) -> Result<PathBuf> {
    let at = |name: &str| directory.join(name);
    let joined = |name: &str, objects: &[PathBuf]| {
        output(
            Command::new("ld")
                .args(["-r", "--no-warn-execstack", "-o"])
                .arg(at(name))
                .args(objects),
        )
    };
    joined("objects.o", kernel_objects)?;
    in_one_section(module, MODULE_SECTION, &at("module.o"))?;
    in_one_section(&at("objects.o"), KERNEL_SECTION, &at("sections.o"))?;
    joined(
        "joined.o",
        &[services.to_owned(), at("module.o"), at("sections.o")],
    )?;
    let undefined = output(
        Command::new("nm")
            .args(["--undefined-only", "--just-symbols"])
            .arg(at("joined.o")),
    )?;
    fs::write(at("missing.s"), missing(undefined.lines()))?;
    let gcc = || {
        let mut command = Command::new("gcc");
        command.args(["-O2", "-Wall", "-no-pie"]);
        command
    };
    output(
        gcc()
            .arg("-c")
            .arg(at("missing.s"))
            .arg("-o")
            .arg(at("missing.o")),
    )?;
    joined("kernel.o", &["joined.o", "missing.o"].map(at))?;
    // Makes all symbols local except those named `cost_*`, because the C library has functions with
    // the kernel's names.
    output(
        Command::new("objcopy")
            .args(["--wildcard", "--keep-global-symbol=cost_*"])
            .arg(at("kernel.o")),
    )?;
    output(
        gcc()
            .args([
                "-static",
                "-Wl,-z,noexecstack",
                "-Wl,--no-warn-execstack",
                "-o",
            ])
            .arg(at("cost"))
            .arg(paths.repo.join("tests/cost/main.c"))
            .arg(at("kernel.o")),
    )?;
    Ok(at("cost"))
}

/// Copies an object, with all its instructions in one section. The linker provides the section's
/// bounds.
fn in_one_section(object: &Path, name: &str, copy: &Path) -> Result<()> {
    let headers = output(Command::new("objdump").arg("-hw").arg(object))?;
    let sections: BTreeSet<&str> = code_sections(&headers).into_iter().collect();
    let mut objcopy = Command::new("objcopy");
    objcopy.arg("--strip-debug");
    for section in sections {
        objcopy.arg(format!("--rename-section={section}={name}"));
    }
    output(objcopy.arg(object).arg(copy)).map(drop)
}

/// Returns the names of the sections with instructions, from the output of `objdump -hw`.
fn code_sections(headers: &str) -> Vec<&str> {
    headers
        .lines()
        .filter(|line| line.contains("CODE"))
        .filter_map(|line| line.split_whitespace().nth(1))
        .collect()
}

/// Returns assembler source that defines each undefined symbol as a page, and a list of the
/// symbols' names in the same order.
fn missing<'a>(undefined: impl Iterator<Item = &'a str>) -> String {
    // Skips the symbols that main.c or the linker defines.
    let others = ["host_", "__start_", "__stop_"];
    let mut pages = ".section cost_missing, \"aw\", @nobits\n".to_owned();
    let mut names = ".section .rodata\n.globl cost_missing_names\ncost_missing_names:\n".to_owned();
    let mut strings = String::new();
    for (at, symbol) in undefined
        .filter(|symbol| !others.iter().any(|other| symbol.starts_with(other)))
        .enumerate()
    {
        let _ = writeln!(pages, ".balign 4096\n.globl {symbol}\n{symbol}: .skip 4096");
        let _ = writeln!(names, ".quad .Lname{at}");
        let _ = writeln!(strings, ".Lname{at}: .asciz \"{symbol}\"");
    }
    format!("{pages}{names}{strings}.section .note.GNU-stack, \"\", @progbits\n")
}

/// Adds the figures from the program's output in one mode and from callgrind's counts.
fn add(figures: &mut Figures, mode: &str, said: &str, dumps: &str) -> Result<()> {
    let mut texts = BTreeMap::new();
    let mut set = |shape: &str, kind, name: &str, value: u64| {
        let figure = Figure {
            registration: format!("{mode} {shape}"),
            kind,
            name: name.to_owned(),
        };
        *figures.entry(figure).or_default() += value;
    };
    for line in said.lines() {
        match line.split_whitespace().collect::<Vec<_>>()[..] {
            [name @ ("module" | "kernel"), start, end] => {
                texts.insert(name, hex(start)?..hex(end)?);
            }
            // Counts of the same name are added. A service that consists of several functions is
            // one figure.
            ["calls", shape, service, times] => {
                set(shape, Kind::Calls, service, times.parse()?);
            }
            ["holds", shape, what, number] => {
                set(shape, Kind::Holds, what, number.parse()?);
            }
            _ => bail!("the program said: {line}"),
        }
    }
    for (name, kind) in [("module", Kind::Instructions), ("kernel", Kind::Kernel)] {
        let text = texts
            .get(name)
            .with_context(|| format!("the program printed no address range for the {name}"))?;
        let counts = instructions(dumps, text)?;
        if counts.is_empty() {
            bail!("callgrind dumped nothing");
        }
        for (title, count) in counts {
            let (shape, callback) = title.split_once(' ').context("a dump without a title")?;
            match (kind, count) {
                (Kind::Instructions, 0) => bail!("no instruction of the module in {title}"),
                (_, 0) => {}
                _ => set(shape, kind, callback, count),
            }
        }
    }
    Ok(())
}

fn hex(text: &str) -> Result<u64> {
    let digits = text.strip_prefix("0x").with_context(|| text.to_owned())?;
    u64::from_str_radix(digits, 16).with_context(|| text.to_owned())
}

/// Returns the number of executed instructions at addresses within `text`, by the title of
/// callgrind's dump.
fn instructions(dumps: &str, text: &Range<u64>) -> Result<BTreeMap<String, u64>> {
    let mut counts = BTreeMap::new();
    let mut title = None;
    let mut is_call = false;
    for line in dumps.lines() {
        if line.starts_with("part: ") {
            title = None;
        } else if let Some(found) = line.strip_prefix("desc: Trigger: Client Request: ") {
            title = Some(found);
            counts.entry(found.to_owned()).or_default();
        } else if let Some(positions) = line.strip_prefix("positions: ") {
            if positions != "instr" {
                bail!("callgrind's positions are {positions}");
            }
        } else if line.starts_with("calls=") {
            is_call = true;
        } else if line.starts_with("0x") {
            // The line after a call has the cost of the callee. This cost is skipped, because the
            // callee's own lines are counted too.
            if std::mem::take(&mut is_call) {
                continue;
            }
            let (address, count) = line.split_once(' ').with_context(|| line.to_owned())?;
            if let Some(title) = title.filter(|_| text.contains(&hex(address).unwrap_or(0))) {
                *counts.entry(title.to_owned()).or_default() += count.parse::<u64>()?;
            }
        }
    }
    Ok(counts)
}

fn write(counted: &Counted) -> String {
    let mut text = format!(
        "# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause\n\
         #\n\
         # Cost of a registration with our module and with NVIDIA's: instructions of the module and of the kernel's\n\
         # objects, by callback; calls of the kernel's services and of nvidia.ko; objects that a registration holds.\n\
         # Written by `make cost UPDATE=1`; tests/runner/README.md says how they are counted.\n\
         #\n\
         {COMPILED}{}\n\n",
        counted.compilers
    );
    let mut line = None;
    for (figure, value) in &counted.figures {
        let this = (&figure.registration, figure.kind);
        if line != Some(this) {
            let end = if line.is_some() { "\n" } else { "" };
            let _ = write!(text, "{end}{} {}", figure.registration, figure.kind.name());
            line = Some(this);
        }
        let _ = write!(text, " {}={value}", figure.name);
    }
    text.push('\n');
    text
}

fn read(text: &str) -> Result<Counted> {
    let mut counted = Counted {
        compilers: String::new(),
        figures: Figures::new(),
    };
    for line in text.lines() {
        if let Some(compilers) = line.strip_prefix(COMPILED) {
            counted.compilers = compilers.to_owned();
        }
        if line.starts_with('#') || line.is_empty() {
            continue;
        }
        let wrong = || format!("tests/cost/figures: {line}");
        let words: Vec<&str> = line.split(' ').collect();
        let [mode, shape, kind, counts @ ..] = &words[..] else {
            bail!("{}", wrong());
        };
        let kind = Kind::from_str(kind, false)
            .map_err(Error::msg)
            .with_context(wrong)?;
        for count in counts {
            let (name, value) = count.split_once('=').with_context(wrong)?;
            let figure = Figure {
                registration: format!("{mode} {shape}"),
                kind,
                name: name.to_owned(),
            };
            let value = value.parse().with_context(wrong)?;
            if counted.figures.insert(figure, value).is_some() {
                bail!("{}: {name} has two values", wrong());
            }
        }
    }
    Ok(counted)
}

/// Returns `true` if a figure may change this much without an update of the file.
fn is_near(kind: Kind, old: u64, new: u64) -> bool {
    match kind {
        Kind::Instructions | Kind::Kernel => old.abs_diff(new) * 100 <= old * TOLERANCE,
        Kind::Calls | Kind::Holds => old == new,
    }
}

fn registrations<'a>(figures: impl IntoIterator<Item = &'a Figure>) -> BTreeSet<&'a str> {
    let figures = figures.into_iter();
    figures.map(|figure| &*figure.registration).collect()
}

/// Returns one test for each registration. The test's notes list the figures that changed.
fn compare(kept: &Figures, counted: &Figures) -> Vec<Test> {
    let all: BTreeSet<&Figure> = kept.keys().chain(counted.keys()).collect();
    let test = |registration: &str| {
        let mut test = Test::new(registration, Verdict::Passed);
        let of_this = |figure: &&Figure| figure.registration == registration;
        for (figures, problem) in [
            (kept, "tests/cost/figures lacks this registration"),
            (counted, "this registration was not counted"),
        ] {
            if !figures.keys().any(|figure| of_this(&figure)) {
                test.verdict = Verdict::Failed;
                test.notes.push(problem.to_owned());
                return test;
            }
        }
        for figure in all.iter().copied().filter(of_this) {
            let (old, new) = (kept.get(figure), counted.get(figure));
            if old == new {
                continue;
            }
            let word = |value: Option<&u64>| value.map_or("none".to_owned(), u64::to_string);
            let mut note = format!("{figure}: {} -> {}", word(old), word(new));
            let near = old.zip(new).is_some_and(|(&old, &new)| {
                // CAST: The values are far below 2⁵².
                let percent = 100.0 * (new as f64 / old as f64 - 1.0);
                let _ = write!(note, " ({percent:+.1} %)");
                is_near(figure.kind, old, new)
            });
            if !near {
                test.verdict = Verdict::Failed;
            }
            test.notes.push(note);
        }
        test
    };
    let registrations = registrations(all.iter().copied());
    registrations.into_iter().map(test).collect()
}

/// Returns the sum of a registration's figures of one kind. If `name` is given, counts only the
/// figures with that name.
pub(crate) fn sum(figures: &Figures, registration: &str, kind: Kind, name: Option<&str>) -> u64 {
    figures
        .iter()
        .filter(|(figure, _)| figure.registration == registration && figure.kind == kind)
        .filter(|(figure, _)| name.is_none_or(|name| figure.name == name))
        .map(|(_, value)| value)
        .sum()
}

/// Checks that no registration costs more instructions with the portable build than with the
/// in-tree build.
fn nowhere_dearer(figures: &Figures) -> Test {
    let mut registrations = registrations(figures.keys());
    registrations.retain(|name| name.starts_with(PORTABLE));
    let mut test = Test::new(
        "the portable build never takes more instructions",
        Verdict::Passed,
    );
    if registrations.is_empty() {
        test.verdict = Verdict::Failed;
    }
    for name in registrations {
        let registration = name.trim_start_matches(PORTABLE);
        let of = |name: &str| sum(figures, name, Kind::Instructions, None);
        let in_tree = of(registration);
        let portable = of(name);
        if portable > in_tree {
            test.verdict = Verdict::Failed;
        }
        test.notes.push(format!(
            "{registration}: {in_tree} in-tree, {portable} portable"
        ));
    }
    test
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figures(text: &str) -> Counted {
        read(text).unwrap()
    }

    #[test]
    fn the_file_is_read_as_it_is_written() {
        let text = "# Compiled with gcc 1, rustc 2\n\
                    persistent 64KiB instructions acquire=761\npersistent 64KiB calls kmalloc=5\n";
        let counted = figures(text);
        assert_eq!(counted.compilers, "gcc 1, rustc 2");
        assert_eq!(counted.figures.len(), 2);
        assert_eq!(figures(&write(&counted)), counted);
        for wrong in [
            "persistent 64KiB instructions acquire",
            "persistent 64KiB instructions acquire=many",
            "persistent 64KiB cycles acquire 1",
            "persistent 64KiB calls a=1\npersistent 64KiB calls a=2",
        ] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn figures_may_change_a_little_and_calls_may_not() {
        let kept = "# Compiled with a\n\
                    m s instructions acquire=1000\nm s instructions gone=1\nm s calls kfree=100\n\
                    m t instructions acquire=1000\nm u instructions acquire=1000\nm v calls kfree=100\n";
        let counted = "# Compiled with b\n\
                       m s instructions acquire=1021\nm s instructions new=1\nm s calls kfree=101\n\
                       m t instructions acquire=1020\nm u instructions acquire=979\nm v calls kfree=100\n";
        let (kept, counted) = (figures(kept), figures(counted));
        let tests = compared(&kept, &counted);
        let is_well = |test: &Test| (test.name.clone(), test.verdict == Verdict::Passed);
        let verdicts: Vec<(String, bool)> = tests.iter().map(is_well).collect();
        let expected = [("m s", false), ("m t", true), ("m u", false), ("m v", true)];
        assert_eq!(
            verdicts,
            expected.map(|(name, well)| (name.to_owned(), well))
        );
        assert_eq!(
            tests[0].notes[..4],
            [
                "instructions acquire: 1000 -> 1021 (+2.1 %)",
                "instructions gone: 1 -> none",
                "instructions new: none -> 1",
                "calls kfree: 100 -> 101 (+1.0 %)",
            ]
        );
        assert!(tests[0].notes[5].contains("figures are from a; these are from b"));
        assert_eq!(
            tests[1].notes,
            ["instructions acquire: 1000 -> 1020 (+2.0 %)"]
        );
        // All figures are new if there is no file. A figure that is no longer counted must be
        // removed from the file.
        for (kept, counted) in [(&figures(""), &counted), (&counted, &figures(""))] {
            let tests = compare(&kept.figures, &counted.figures);
            assert_eq!(tests.len(), 4);
            assert!(tests.iter().all(|test| test.verdict == Verdict::Failed));
        }
    }

    #[test]
    fn the_portable_build_is_compared_with_the_in_tree_build() {
        let verdict = |portable: u64| {
            let text = format!(
                "m s instructions acquire=7\nm s instructions release=3\nm s calls kfree=1\n\
                 portable-m s instructions acquire={portable}\nportable-m s calls kfree=9\n"
            );
            nowhere_dearer(&figures(&text).figures).verdict
        };
        assert_eq!(verdict(10), Verdict::Passed);
        assert_eq!(verdict(11), Verdict::Failed);
        let without = figures("m s instructions acquire=7\n");
        assert_eq!(nowhere_dearer(&without.figures).verdict, Verdict::Failed);
    }

    #[test]
    fn dumps_are_counted_by_address() {
        let dumps = "part: 1\ndesc: Trigger: Client Request: 64KiB acquire\npositions: instr\nevents: Ir\n\
                     fn=a\n0xfff 7\n0x1000 1\n0x1004 2\ncfn=b\ncalls=3 0x1010\n0x1004 900\n0x2000 5\n\
                     part: 2\ndesc: Trigger: Program termination\npositions: instr\n0x1000 50\n\
                     part: 3\ndesc: Trigger: Client Request: 64KiB release\npositions: instr\n0x1fff 4\n";
        let counts = instructions(dumps, &(0x1000..0x2000)).unwrap();
        let expected = [("64KiB acquire", 3), ("64KiB release", 4)];
        assert_eq!(
            counts,
            expected
                .map(|(title, count)| (title.to_owned(), count))
                .into()
        );
        assert!(instructions("positions: instr line\n", &(0..1)).is_err());
        let mut none = Figures::new();
        let said = "module 0x10 0x20\nkernel 0x20 0x30\n";
        assert!(add(&mut none, "m", said, "").is_err());
        let silent = "part: 1\ndesc: Trigger: Client Request: s c\n";
        assert!(add(&mut none, "m", said, silent).is_err());
        assert!(add(&mut none, "m", "", dumps).is_err());
        assert!(add(&mut none, "m", "module 0x1000 0x2000\n", dumps).is_err());
        // In the dump of `release`, no instruction has an address within these bounds.
        let said = "module 0x1000 0x1fff\nkernel 0x2000 0x3000\n";
        assert!(add(&mut none, "m", said, dumps).is_err());
        let said = "module 0x1000 0x2000\nkernel 0x2000 0x3000\nholds 64KiB entries 1\n";
        let mut both = Figures::new();
        add(&mut both, "m", said, dumps).unwrap();
        let of = |kind| sum(&both, "m 64KiB", kind, None);
        assert_eq!(of(Kind::Instructions), 7);
        assert_eq!(of(Kind::Kernel), 5);
        assert_eq!(of(Kind::Holds), 1);
    }

    #[test]
    fn calls_of_one_service_by_several_functions_are_one_figure() {
        let mut all = Figures::new();
        let said = "module 0x1 0x2\nkernel 0x2 0x3\ncalls s kfree 1\ncalls s kfree 4\n";
        let dumps = "desc: Trigger: Client Request: s c\npositions: instr\n0x1 6\n";
        add(&mut all, "m", said, dumps).unwrap();
        let text = write(&Counted {
            compilers: String::new(),
            figures: all,
        });
        assert!(
            text.ends_with("\nm s instructions c=6\nm s calls kfree=5\n"),
            "{text}"
        );
    }

    #[test]
    fn missing_symbols_have_a_page_and_a_name() {
        let source =
            missing(["host_alloc", "vfree", "__start_cost_calls", "kthread_stop"].into_iter());
        assert_eq!(source.matches(".skip 4096").count(), 2);
        assert!(source.contains(".asciz \"kthread_stop\""));
        assert!(!source.contains("host_alloc"));
    }

    #[test]
    fn sections_with_code() {
        let headers = "Idx Name  Size\n  3 .text  0e943  CONTENTS, ALLOC, LOAD, READONLY, CODE\n  \
                       4 .rodata  00f1  CONTENTS, ALLOC, LOAD, READONLY, DATA\n";
        assert_eq!(code_sections(headers), [".text"]);
    }
}
