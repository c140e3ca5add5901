// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Helpers for the tests of commands, and tests of all commands.

use std::fs;
use std::path::{Path, PathBuf};

use clap::Parser as _;

use proptest::prelude::ProptestConfig;
use serde_json::Value;

use crate::args::Cli;
use crate::finding::{Finding, Status};
use crate::fixture;
use crate::fixture::Fixture;
use crate::host::recording::{encode, Recording};
use crate::host::{Fact, Host, Seen, Unseen};
use crate::report::Out;

/// Returns the configuration of a property test with this number of cases.
pub(crate) fn cases(cases: u32) -> ProptestConfig {
    ProptestConfig {
        cases,
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

/// Compares output with a file of `cli/tests`, in which JSON is [`folded`].
pub(crate) fn golden(name: &str, text: &str) {
    same_as_file(name, &folded(text));
}

/// Compares with a file below `cli/tests`. `UPDATE_GOLDEN=1` rewrites the file.
pub(crate) fn same_as_file(name: &str, text: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests")
        .join(name);
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, text).unwrap();
        return;
    }
    let kept = fs::read_to_string(&path).unwrap_or_default();
    assert!(
        kept == text,
        "{} differs from this; UPDATE_GOLDEN=1 rewrites it:\n{text}",
        path.display()
    );
}

/// Puts each short or flat list or object of pretty-printed JSON on one line. Each element of a
/// list is then one line. A long object that is not an element of a list keeps one line for each
/// value.
///
/// Other text is unchanged.
fn folded(text: &str) -> String {
    const SHORT: usize = 160;
    const SHORT_ELEMENT: usize = 700;
    let mut lines: Vec<String> = Vec::new();
    // Indices of lines that open a list or an object whose end was not found yet.
    let mut open: Vec<usize> = Vec::new();
    for line in text.lines() {
        let word = line.trim_start();
        lines.push(line.to_owned());
        if line == "{" || (!open.is_empty() && word.ends_with(['{', '['])) {
            open.push(lines.len() - 1);
        } else if word.starts_with(['}', ']']) {
            let Some(first) = open.pop() else { continue };
            let inside = &lines[first + 1..];
            let joined: Vec<&str> = inside.iter().map(|line| line.trim_start()).collect();
            let joined = format!("{} {}", lines[first], joined.join(" "));
            let (is_value, most) = match lines[first].trim_start() {
                "{" | "[" => (false, SHORT_ELEMENT),
                opening => (opening.ends_with('{'), SHORT),
            };
            let holds_none = inside[..inside.len() - 1].iter().all(|line| {
                let value = line.trim_end_matches(',');
                !value.ends_with(['}', ']']) || value.ends_with("{}") || value.ends_with("[]")
            });
            if (holds_none && !is_value) || joined.len() <= most {
                lines.truncate(first);
                lines.push(joined);
            }
        }
    }
    lines.iter().map(|line| format!("{line}\n")).collect()
}

/// Returns the output of a command line for a machine, and its exit status.
pub(crate) fn says(host: &dyn Host, line: &str) -> (String, Status) {
    let words = std::iter::once("peermemctl").chain(line.split(' '));
    let cli = Cli::try_parse_from(words).unwrap();
    let mut out = Out::gather(cli.common.json);
    let status = crate::command(host, &cli.command, &mut out);
    let status = status.unwrap_or_else(|error| {
        out.line(format!("peermemctl: {error:#}"));
        Status::Failed
    });
    (out.into_text(), status)
}

impl Fixture {
    /// Returns the output of a command line for this machine, and its exit status.
    pub(crate) fn says(&self, line: &str) -> (String, Status) {
        says(&self.recording, line)
    }

    /// Returns the JSON that a command line prints for this machine.
    pub(crate) fn json(&self, line: &str) -> Value {
        let (text, _) = self.says(line);
        serde_json::from_str(&text).unwrap_or_else(|why| panic!("{line}: {why}: {text}"))
    }

    /// Runs commands on this machine, in the format of [`session`].
    #[track_caller]
    pub(crate) fn session(&self, lines: &str) -> String {
        session(&self.recording, lines)
    }
}

/// A machine that reports each request for a fact to a function, and answers with other contents
/// for some files.
pub(crate) struct Watched<'a> {
    pub(crate) machine: &'a Recording,
    pub(crate) fact: &'a dyn Fn(Fact),
    /// Returns the other contents of a file, or `None` for the machine's own answer.
    pub(crate) file: &'a dyn Fn(&str) -> Option<Seen<Vec<u8>>>,
}

impl Host for Watched<'_> {
    fn bytes(&self, path: &str) -> Seen<Vec<u8>> {
        (self.file)(path).unwrap_or_else(|| self.machine.bytes(path))
    }
    fn names(&self, path: &str) -> Seen<Vec<String>> {
        self.machine.names(path)
    }
    fn link(&self, path: &str) -> Seen<String> {
        self.machine.link(path)
    }
    fn resolved(&self, path: &str) -> Seen<String> {
        self.machine.resolved(path)
    }
    fn matching(&self, path: &str, word: &str) -> Seen<String> {
        self.machine.matching(path, word)
    }
    fn fact(&self, fact: Fact) -> Seen<String> {
        (self.fact)(fact);
        self.machine.fact(fact)
    }
}

/// Returns the rows of a text table in which ` | ` separates the cells.
pub(crate) fn table<const N: usize>(text: &str) -> Vec<[&str; N]> {
    let rows = text
        .lines()
        .map(|row| row.split(" | ").map(str::trim).collect::<Vec<_>>());
    rows.map(|row| row.try_into().unwrap()).collect()
}

/// Runs commands on a machine. A line such as `1$ doctor --all` is a command with its exit status,
/// which may be left out. Any other line is text that the output of the command must contain. The
/// output is joined to one line before the comparison. A prefix of the text restricts the match: `^
/// ` at the beginning, `~ ` at the end, `= ` exactly once, `! ` nowhere. Returns the output of the
/// last command.
#[track_caller]
pub(crate) fn session(host: &dyn Host, lines: &str) -> String {
    let mut said = String::new();
    for line in lines.lines().map(str::trim).filter(|line| !line.is_empty()) {
        if let Some((expected @ ("" | "0" | "1" | "2" | "3"), command)) = line.split_once("$ ") {
            let (text, status) = says(host, command);
            let status = status.code().to_string();
            assert!(
                expected.is_empty() || expected == status,
                "{line}: {status}: {text}"
            );
            said = text.split_whitespace().collect::<Vec<_>>().join(" ");
        } else if let Some(words) = line.strip_prefix("! ") {
            assert!(!said.contains(words), "{words}: {said}");
        } else if let Some(words) = line.strip_prefix("^ ") {
            assert!(said.starts_with(words), "{words}: {said}");
        } else if let Some(words) = line.strip_prefix("~ ") {
            assert!(said.ends_with(words), "{words}: {said}");
        } else if let Some(words) = line.strip_prefix("= ") {
            assert_eq!(said.matches(words).count(), 1, "{words}: {said}");
        } else {
            assert!(said.contains(line), "{line}: {said}");
        }
    }
    said
}

/// A fault that a test injects into a machine, and the findings that the fault must cause.
pub(crate) struct Fault<T: 'static> {
    pub(crate) name: &'static str,
    pub(crate) inject: fn(&mut T),
    /// Expected findings, as forms for [`is_like`].
    pub(crate) says: &'static [&'static str],
}

/// Defines the constant `FAULTS` for machines of a type. Each fault is
/// `"name", "finding", … => |machine| change;`.
macro_rules! faults_of {
    ($machine:ty; $($name:literal $(, $says:literal)* => $inject:expr;)*) => {
        pub(crate) const FAULTS: &[$crate::testing::Fault<$machine>] =
            &[$($crate::testing::Fault { name: $name, inject: $inject, says: &[$($says),*] }),*];
    };
}
pub(crate) use faults_of;

/// Returns a finding in one line: `level check: found fix how to fix it`.
pub(crate) fn told(finding: &Finding) -> String {
    let fix = finding.fix.as_deref().unwrap_or_default();
    let (level, check) = (finding.level.name(), finding.check);
    format!("{level} {check}: {} fix {fix}", finding.found)
}

/// Returns `true` if `text` starts with text that matches `form`. In `form`, `…` stands for any
/// text.
pub(crate) fn is_like(text: &str, form: &str) -> bool {
    let mut parts = form.split('…');
    let mut rest = text.strip_prefix(parts.next().unwrap_or_default());
    parts.all(|part| {
        rest = rest.and_then(|rest| Some(rest.split_once(part)?.1));
        rest.is_some()
    })
}

/// Defines a test that calls functions with random text. The functions must not panic.
macro_rules! no_panic {
    ($name:ident: $($function:expr),+) => {
        proptest::proptest! {
            #[test]
            fn $name(text in proptest::prelude::any::<String>()) {
                $(let _ = $function(&text);)+
            }
        }
    };
}
pub(crate) use no_panic;

/// Checks that backticks in the fix of a finding enclose commands only.
pub(crate) fn commands_are_marked(finding: &Finding) {
    const PROGRAMS: &str = "displaymodeselector devlink dmesg echo ethtool ip lsmod lspci mlxconfig mlxfwmanager mlxlink \
        modprobe nvidia-smi peermemctl rdma rdma_topo rmmod setpci sudo ulimit";
    const MARKS: &str = "setpci -,modprobe ,dmesg |,mlxlink -,mlxconfig -,rmmod ,ethtool ";
    let fix = finding.fix.as_deref().unwrap_or_default();
    for (index, part) in fix.split('`').enumerate() {
        let first = part.split_whitespace().next().unwrap_or_default();
        let is_command = index % 2 == 1;
        assert!(
            !is_command || PROGRAMS.split(' ').any(|program| program == first),
            "{part:?} in {finding:#?}"
        );
        for program in MARKS.split(',') {
            assert!(
                is_command || !part.contains(program),
                "{program:?} in {finding:#?}"
            );
        }
    }
}

/// Every machine survives a round trip through its file. `MACHINES=DIR` keeps the files in DIR, for
/// `--machine`.
#[test]
fn a_machine_survives_a_round_trip_through_a_file() {
    let own = tempfile::tempdir().unwrap();
    let folder = std::env::var_os("MACHINES").map_or(own.path().to_owned(), PathBuf::from);
    for (name, fixture) in fixture::all().into_iter().chain(fixture::degraded()) {
        let file = folder.join(format!("{name}.json"));
        fs::write(&file, fixture.recording.to_json().unwrap()).unwrap();
        assert_eq!(Recording::load(&file).unwrap(), fixture.recording, "{name}");
    }
}

/// The recording that the README uses is up to date.
#[test]
fn the_recording_for_the_readme_is_current() {
    let json = fixture::all()["hgx"].recording.to_json().unwrap();
    // Files of one PCI device share a line, and links of one PCI device share a line.
    let group = |line: &str| -> Option<Vec<String>> {
        let path = line.trim_start().strip_prefix("\"/")?.split('"').next()?;
        let parts: Vec<&str> = path.split('/').collect();
        let device = parts.iter().rposition(|part| part.ends_with(".0"));
        let depth = match path.starts_with("sys/devices/pci") {
            true => device.map_or(3, |device| device + 1),
            false => 2,
        };
        Some(
            parts
                .iter()
                .take(depth)
                .map(|&part| part.to_owned())
                .collect(),
        )
    };
    let (mut text, mut before) = (String::new(), None);
    for line in folded(&json).lines() {
        let group = group(line);
        match group.is_some() && group == before {
            true => text = format!("{} {}\n", text.trim_end(), line.trim_start()),
            false => text = format!("{text}{line}\n"),
        }
        before = group;
    }
    same_as_file("machines/hgx.json", &text);
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/machines/hgx.json");
    assert_eq!(
        Recording::load(&file).unwrap(),
        fixture::all()["hgx"].recording
    );
}

/// Command lines that read a machine and terminate.
const LINES: &str = "topo; topo --verbose; topo --json; doctor; doctor --all; doctor --json; \
    doctor --nagios; doctor --pair 0,mlx5_0; list; list --json; list --by-process; list --gpu 0; \
    list --all; list --all --json; list --all --pid 4711; stats; stats --json; export; record";

/// Returns random text that a test puts in place of the contents of a file.
fn odd_text() -> impl proptest::strategy::Strategy<Value = String> {
    use proptest::prelude::*;
    prop_oneof![
        Just(String::new()),
        Just("\n".to_owned()),
        Just("-1".to_owned()),
        Just("18446744073709551615".to_owned()),
        Just("0xffffffffffffffffffffffff".to_owned()),
        Just("0x0 0xffffffffffffffff 0xffffffffffffffff\n".repeat(9)),
        Just("..".to_owned()),
        Just("../../..".to_owned()),
        Just("hex:".to_owned()),
        Just("hex:ffffffff+4092".to_owned()),
        Just("hex:+64".to_owned()),
        Just("=".to_owned()),
        Just("a=b=c \"".to_owned()),
        Just("99999999999999999999.9 GT/s".to_owned()),
        "\\PC{0,40}",
        proptest::collection::vec(any::<u8>(), 0..600).prop_map(|bytes| encode(&bytes)),
    ]
}

proptest::proptest! {
    #![proptest_config(cases(64))]

    /// No answer of a machine causes a panic. For all answers, each command prints output or an
    /// error.
    #[test]
    fn no_answer_of_a_machine_is_a_panic(
        machine in proptest::sample::select(fixture::all().into_values().collect::<Vec<_>>()),
        changes in proptest::collection::vec(
            (0_u8..9, proptest::prelude::any::<proptest::sample::Index>(), odd_text()),
            1..12,
        ),
    ) {
        let mut recording = machine.recording;
        for (kind, index, text) in changes {
            let key_of = |keys: Vec<&String>| match keys.is_empty() {
                true => None,
                false => Some((*index.get(&keys)).clone()),
            };
            let file = key_of(recording.files.keys().collect());
            let directory = key_of(recording.directories.keys().collect());
            let link = key_of(recording.links.keys().collect());
            match (kind, file, directory, link) {
                (0, Some(file), ..) => drop(recording.files.remove(&file)),
                (1 | 2, Some(file), ..) => drop(recording.files.insert(file, text)),
                (3, Some(file), ..) => {
                    let kept = recording.files.get(&file).cloned().unwrap_or_default();
                    let half = kept.chars().take(kept.chars().count() / 2).collect();
                    recording.files.insert(file, half);
                }
                (4, Some(file), ..) => {
                    recording.files.remove(&file);
                    recording.unseen.insert(file, Unseen::Denied);
                }
                (5, _, Some(directory), _) => drop(recording.directories.remove(&directory)),
                (6, _, Some(directory), _) => recording.directories.entry(directory).or_default().push(text),
                (7, _, _, Some(link)) => drop(recording.links.remove(&link)),
                (8, _, _, Some(link)) => drop(recording.links.insert(link, text)),
                _ => {}
            }
        }
        for line in LINES.split("; ") {
            let (text, _) = says(&recording, line);
            assert!(!text.is_empty() || line.contains("doctor"), "{line:?} says nothing");
        }
    }
}
