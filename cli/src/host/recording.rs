// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Recorded answers of a machine, for tests and for analysis on another machine.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs::File;
use std::io::Read as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use anyhow::{bail, Context as _};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::{Fact, Host, Seen, Unseen};

const SCHEMA: &str = "peermemctl.recording";
const VERSION: u32 = 1;

/// Upper bound on the size of a file that a recording holds as `hex:…`, in bytes.
const LONGEST: usize = 8 << 20;

/// Upper bound on the size of a recording, in bytes. The recording of a large machine needs less
/// than a hundredth of this size.
const LARGEST: u64 = 256 << 20;

/// Upper bound on the symbolic links in one path, as in the kernel.
const MOST_LINKS: usize = 40;

/// A machine's answers.
///
/// A path is first looked up as given, then with its links followed. A path without an answer is
/// [`Unseen::Absent`] if a directory above the path was recorded and does not list the path.
/// Otherwise, the path is [`Unseen::NotRecorded`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Recording {
    /// Name of the format: `peermemctl.recording`.
    pub(crate) schema: String,
    /// Version of the format: 1.
    pub(crate) version: u32,
    /// Description of the recording's origin.
    pub(crate) about: String,
    /// Contents of files. Text is unchanged. Other bytes, and text that begins with `hex:`, are
    /// written as `hex:…`, with `+N` for N zeroes at the end. The key `PATH?WORD` holds the lines
    /// of PATH that contain WORD.
    pub(crate) files: BTreeMap<String, String>,
    /// Names in each directory.
    pub(crate) directories: BTreeMap<String, Vec<String>>,
    /// Targets of symbolic links.
    pub(crate) links: BTreeMap<String, String>,
    /// Paths that exist, but whose contents are unknown.
    pub(crate) there: BTreeSet<String>,
    /// Answers that are not the contents of a file.
    pub(crate) facts: BTreeMap<Fact, String>,
    /// Reasons for missing answers. The key is a path, `link PATH` for the target of a link, or
    /// `fact NAME`.
    pub(crate) unseen: BTreeMap<String, Unseen>,
}

impl Recording {
    /// Creates an empty recording with a description of its origin.
    pub(crate) fn new(about: impl Into<String>) -> Self {
        Self {
            schema: SCHEMA.to_owned(),
            version: VERSION,
            about: about.into(),
            ..Self::default()
        }
    }

    /// Parses JSON. Returns an error if `text` is not JSON, or not a recording of this version.
    pub(crate) fn parse(text: &str) -> anyhow::Result<Self> {
        let recording: Self = match serde_json::from_str(text) {
            Ok(recording) => recording,
            Err(_) if is_rdma_topo_dump(text) => bail!(
                "a dump of rdma_topo, not a recording: it has no drivers, ports, BARs or software. `rdma_topo check -F` \
                 reads it; `peermemctl record` on that machine makes a recording"
            ),
            Err(error) => return Err(error.into()),
        };
        if recording.schema != SCHEMA {
            bail!(
                "not a recording of peermemctl: schema is {:?}",
                recording.schema
            );
        }
        if recording.version != VERSION {
            bail!(
                "a recording of version {}; this program reads version {VERSION}",
                recording.version
            );
        }
        Ok(recording)
    }

    /// Reads a recording from a file.
    pub(crate) fn load(path: &Path) -> anyhow::Result<Self> {
        let name = path.display();
        let text = read(path).with_context(|| format!("{name}"))?;
        Self::parse(&text).with_context(|| format!("{name}"))
    }

    /// Formats the recording as JSON, sorted by path.
    pub(crate) fn to_json(&self) -> anyhow::Result<String> {
        let mut text = serde_json::to_string_pretty(self)?;
        text.push('\n');
        Ok(text)
    }

    /// Returns the path with all recorded links followed, or `None` if the links are circular.
    fn follow(&self, path: &str) -> Option<String> {
        follow(path, |at| self.links.get(at).cloned())
    }

    /// Returns the reason why a path has no answer.
    fn missing(&self, path: &str) -> Unseen {
        let mut below = path;
        if let Some(why) = self.unseen.get(path) {
            return why.clone();
        }
        while let Some((above, name)) = below.rsplit_once('/') {
            let above = if above.is_empty() { "/" } else { above };
            if self.files.contains_key(above) {
                return Unseen::Absent;
            }
            if let Some(names) = self.directories.get(above) {
                return match names.iter().any(|one| one == name) {
                    true => Unseen::NotRecorded,
                    false => Unseen::Absent,
                };
            }
            if let Some(why @ (Unseen::Absent | Unseen::Denied)) = self.unseen.get(above) {
                return why.clone();
            }
            if above == "/" {
                break;
            }
            below = above;
        }
        Unseen::NotRecorded
    }

    /// Returns the answer for the path as given, or else for the path with its links followed.
    fn answer<T>(&self, path: &str, get: impl Fn(&str) -> Option<T>) -> Seen<T> {
        let plain = joined(&components(path).map(str::to_owned).collect::<Vec<_>>());
        if let Some(answer) = get(&plain) {
            return Ok(answer);
        }
        if let Some(why) = self.unseen.get(&plain) {
            return Err(why.clone());
        }
        let Some(real) = self.follow(path) else {
            return Err(Unseen::Failed(
                "too many levels of symbolic links".to_owned(),
            ));
        };
        get(&real).ok_or_else(|| self.missing(&real))
    }

    fn is_there(&self, path: &str) -> bool {
        self.files.contains_key(path)
            || self.directories.contains_key(path)
            || self.there.contains(path)
    }
}

/// Returns `true` for the output of rdma-core's `rdma_topo dump`: a list of PCI functions with at
/// least these keys.
fn is_rdma_topo_dump(text: &str) -> bool {
    #[derive(Deserialize)]
    #[expect(dead_code, reason = "the presence of the keys is enough")]
    struct Function {
        realpath: String,
        config: String,
        modalias: String,
    }
    serde_json::from_str::<Vec<Function>>(text).is_ok_and(|functions| !functions.is_empty())
}

/// Returns the names in a path, without `.` and empty names.
fn components(path: &str) -> impl DoubleEndedIterator<Item = &str> {
    path.split('/')
        .filter(|name| !name.is_empty() && *name != ".")
}

fn joined(components: &[String]) -> String {
    format!("/{}", components.join("/"))
}

/// Reads a file, or a pipe with a writer.
pub(crate) fn read(path: &Path) -> anyhow::Result<String> {
    // Opening a FIFO in blocking mode would wait for a writer, and there may never be one. A
    // blocking read waits only if the FIFO has a writer.
    let file = File::options()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(path)?;
    rustix::io::ioctl_fionbio(&file, false)?;
    let mut text = String::new();
    file.take(LARGEST).read_to_string(&mut text)?;
    if text.is_empty() {
        bail!("it is empty, or a pipe that nobody writes to");
    }
    Ok(text)
}

/// Returns the path with all links followed, or `None` if the links are circular. `link` returns
/// the target of a link.
fn follow(path: &str, mut link: impl FnMut(&str) -> Option<String>) -> Option<String> {
    let mut followed = 0_usize;
    // Components that are still to be followed, in reverse order.
    let mut todo: Vec<String> = components(path).rev().map(str::to_owned).collect();
    let mut walked: Vec<String> = Vec::new();
    while let Some(next) = todo.pop() {
        if next == ".." {
            walked.pop();
            continue;
        }
        walked.push(next);
        let Some(says) = link(&joined(&walked)) else {
            continue;
        };
        followed += 1;
        if followed > MOST_LINKS {
            return None;
        }
        walked.pop();
        if says.starts_with('/') {
            walked.clear();
        }
        todo.extend(components(&says).rev().map(str::to_owned));
    }
    Some(joined(&walked))
}

/// Encodes the contents of a file for the recording.
pub(crate) fn encode(bytes: &[u8]) -> String {
    match std::str::from_utf8(bytes) {
        Ok(text) if !text.starts_with("hex:") && !text.contains('\0') => text.to_owned(),
        _ => {
            let end = bytes
                .iter()
                .rposition(|byte| *byte != 0)
                .map_or(0, |last| last + 1);
            let (digits, zeroes) = bytes.split_at(end);
            let mut hex = String::from("hex:");
            for byte in digits {
                let _ = write!(hex, "{byte:02x}");
            }
            if !zeroes.is_empty() {
                let _ = write!(hex, "+{}", zeroes.len());
            }
            hex
        }
    }
}

/// Decodes the result of [`encode`].
pub(crate) fn decode(text: &str) -> Seen<Vec<u8>> {
    let Some(hex) = text.strip_prefix("hex:") else {
        return Ok(text.as_bytes().to_vec());
    };
    let wrong = || Unseen::Failed("the recorded contents are not hexadecimal".to_owned());
    let (digits, zeroes) = hex.split_once('+').unwrap_or((hex, "0"));
    let zeroes: usize = zeroes.parse().map_err(|_| wrong())?;
    let pairs = digits.as_bytes().chunks(2).map(|pair| {
        let digit = |at: usize| char::from(pair.get(at).copied()?).to_digit(16);
        u8::try_from(digit(0)? * 16 + digit(1)?).ok()
    });
    let mut bytes = pairs.collect::<Option<Vec<u8>>>().ok_or_else(wrong)?;
    if bytes.len().saturating_add(zeroes) > LONGEST {
        return Err(wrong());
    }
    bytes.resize(bytes.len() + zeroes, 0);
    Ok(bytes)
}

impl Host for Recording {
    fn bytes(&self, path: &str) -> Seen<Vec<u8>> {
        decode(&self.answer(path, |path| self.files.get(path).cloned())?)
    }

    fn names(&self, path: &str) -> Seen<Vec<String>> {
        let mut names = self.answer(path, |path| self.directories.get(path).cloned())?;
        // A recording may list arbitrary text. Only names that a directory can contain are kept.
        names.retain(|name| !name.is_empty() && name != "." && name != ".." && !name.contains('/'));
        names.sort();
        names.dedup();
        Ok(names)
    }

    fn link(&self, path: &str) -> Seen<String> {
        // Links are followed except in the last component.
        let own = |path: &str| self.links.get(path).cloned();
        if let Some(says) = own(path) {
            return Ok(says);
        }
        if let Some(why) = self.unseen.get(&format!("link {path}")) {
            return Err(why.clone());
        }
        let (above, name) = path.rsplit_once('/').unwrap_or(("", path));
        let above = self.follow(above).unwrap_or_default();
        let real = format!("{}/{name}", above.trim_end_matches('/'));
        match own(&real) {
            Some(says) => Ok(says),
            None if self.is_there(&real) => Err(Unseen::Absent),
            None => Err(self.missing(&real)),
        }
    }

    fn resolved(&self, path: &str) -> Seen<String> {
        let real = self
            .follow(path)
            .ok_or_else(|| Unseen::Failed("too many levels of symbolic links".to_owned()))?;
        if self.is_there(&real) {
            return Ok(real);
        }
        // A directory exists if any path below it exists.
        let inside = format!("{}/", real.trim_end_matches('/'));
        let first = |key: Option<&String>| key.is_some_and(|key| key.starts_with(&inside));
        let from = || inside.clone()..;
        if first(self.files.range(from()).next().map(|(key, _)| key))
            || first(self.directories.range(from()).next().map(|(key, _)| key))
            || first(self.links.range(from()).next().map(|(key, _)| key))
            || first(self.there.range(from()).next())
        {
            return Ok(real);
        }
        match self.unseen.get(path).or_else(|| self.unseen.get(&real)) {
            // The contents could not be read, but the path exists.
            Some(Unseen::Denied | Unseen::Failed(_)) => Ok(real),
            Some(why) => Err(why.clone()),
            None => Err(self.missing(&real)),
        }
    }

    fn fact(&self, fact: Fact) -> Seen<String> {
        if let Some(answer) = self.facts.get(&fact) {
            return Ok(answer.clone());
        }
        let why = self.unseen.get(&key_of(fact));
        Err(why.cloned().unwrap_or(Unseen::NotRecorded))
    }

    fn matching(&self, path: &str, word: &str) -> Seen<String> {
        let kept = format!("{path}?{word}");
        if let Some(lines) = self.files.get(&kept) {
            return Ok(String::from_utf8_lossy(&decode(lines)?).into_owned());
        }
        if let Some(why) = self.unseen.get(&kept) {
            return Err(why.clone());
        }
        let all = self.bytes(path)?;
        let text = String::from_utf8_lossy(&all);
        let lines = text.split([char::from(super::line_end(path)), '\n']);
        let lines = lines.map(|line| line.trim_end_matches('\r'));
        let lines = lines.filter(|line| !line.is_empty() && line.contains(word));
        Ok(lines.map(|line| format!("{line}\n")).collect())
    }
}

/// Returns the key of a fact in `unseen`: `fact` and its name in JSON.
pub(crate) fn key_of(fact: Fact) -> String {
    let name = serde_json::to_value(fact).unwrap_or_default();
    format!("fact {}", name.as_str().unwrap_or_default())
}

/// A fact with its own type, which recordings hold as JSON.
pub(crate) trait Recorded: Serialize + DeserializeOwned {
    const FACT: Fact;
    /// Start of the error message for a recording with an invalid value.
    const MISREAD: &'static str;

    /// Asks this machine.
    fn ask(host: &dyn Host) -> Seen<Self>;

    /// Reads the value from this machine, or from a recording.
    fn of(host: &dyn Host) -> Seen<Self> {
        if host.is_live() {
            return Self::ask(host);
        }
        serde_json::from_str(&host.fact(Self::FACT)?)
            .map_err(|error| Unseen::Failed(format!("{}: {error}", Self::MISREAD)))
    }

    /// Reads the value from this machine, and returns the value as JSON for a recording.
    fn json(host: &dyn Host) -> Seen<String> {
        serde_json::to_string(&Self::ask(host)?).map_err(|error| Unseen::Failed(error.to_string()))
    }
}

/// A host that asks another host and records each answer.
pub(crate) struct Recorder<'a> {
    host: &'a dyn Host,
    recording: RefCell<Recording>,
}

impl<'a> Recorder<'a> {
    pub(crate) fn new(host: &'a dyn Host, about: impl Into<String>) -> Self {
        Self {
            host,
            recording: RefCell::new(Recording::new(about)),
        }
    }

    pub(crate) fn into_recording(self) -> Recording {
        self.recording.into_inner()
    }

    /// Records an answer, and returns it.
    fn note<T>(
        &self,
        key: &str,
        answer: Seen<T>,
        keep: impl FnOnce(&mut Recording, &T),
    ) -> Seen<T> {
        // The cell is not already borrowed, because the methods of `Host` for `Recorder` do not
        // call each other.
        if let Ok(mut recording) = self.recording.try_borrow_mut() {
            match &answer {
                Ok(value) => keep(&mut recording, value),
                Err(why) => drop(recording.unseen.insert(key.to_owned(), why.clone())),
            }
        }
        answer
    }

    /// Records the links along a path.
    fn note_way(&self, path: &str) {
        follow(path, |at| {
            let says = self.host.link(at).ok()?;
            let links = &mut self.recording.borrow_mut().links;
            links.insert(at.to_owned(), says.clone());
            Some(says)
        });
    }
}

impl Host for Recorder<'_> {
    fn bytes(&self, path: &str) -> Seen<Vec<u8>> {
        self.note(path, self.host.bytes(path), |recording, bytes| {
            recording.files.insert(path.to_owned(), encode(bytes));
        })
    }

    fn names(&self, path: &str) -> Seen<Vec<String>> {
        self.note(path, self.host.names(path), |recording, names| {
            recording.directories.insert(path.to_owned(), names.clone());
        })
    }

    fn link(&self, path: &str) -> Seen<String> {
        self.note(
            &format!("link {path}"),
            self.host.link(path),
            |recording, says| {
                recording.links.insert(path.to_owned(), says.clone());
            },
        )
    }

    fn resolved(&self, path: &str) -> Seen<String> {
        self.note_way(path);
        self.note(path, self.host.resolved(path), |recording, real| {
            recording.there.insert(real.clone());
        })
    }

    fn fact(&self, fact: Fact) -> Seen<String> {
        self.note(&key_of(fact), self.host.fact(fact), |recording, text| {
            recording.facts.insert(fact, text.clone());
        })
    }

    fn matching(&self, path: &str, word: &str) -> Seen<String> {
        let key = format!("{path}?{word}");
        self.note(&key, self.host.matching(path, word), |recording, lines| {
            let lines = encode(lines.as_bytes());
            recording.files.insert(key.clone(), lines);
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine() -> Recording {
        let mut machine = Recording::new("made by hand");
        let file = |machine: &mut Recording, path: &str, text: &str| {
            machine.files.insert(path.to_owned(), text.to_owned());
        };
        file(&mut machine, "/sys/devices/a/b/vendor", "0x10de\n");
        file(&mut machine, "/sys/devices/a/b/config", "hex:de10ff");
        machine.directories.insert(
            "/sys/devices/a/b".to_owned(),
            ["vendor", "config", "secret", "odd"]
                .map(str::to_owned)
                .to_vec(),
        );
        let link = |machine: &mut Recording, path: &str, says: &str| {
            machine.links.insert(path.to_owned(), says.to_owned());
        };
        link(&mut machine, "/sys/bus/x", "../devices/a/b");
        link(&mut machine, "/sys/round", "round2");
        link(&mut machine, "/sys/round2", "/sys/round");
        machine
            .unseen
            .insert("/sys/devices/a/b/secret".to_owned(), Unseen::Denied);
        machine
    }

    fn all_alike(one: &dyn Host, other: &dyn Host) {
        let paths = "/sys/bus/x /sys/bus/x/vendor /sys/bus/x/../b/vendor /sys/bus/x/config /sys/bus/x/secret \
            /sys/bus/x/none /sys/bus/x/vendor/none /sys/devices/a/b/vendor /sys/round /sys/round/on";
        for path in paths.split(' ') {
            assert_eq!(one.bytes(path), other.bytes(path), "bytes of {path}");
            assert_eq!(one.names(path), other.names(path), "names of {path}");
            assert_eq!(one.link(path), other.link(path), "link of {path}");
            assert_eq!(one.resolved(path), other.resolved(path), "way of {path}");
            assert_eq!(
                one.matching(path, "10"),
                other.matching(path, "10"),
                "lines of {path}"
            );
        }
        assert_eq!(one.fact(Fact::User), other.fact(Fact::User));
    }

    #[test]
    fn a_recording_answers_like_a_machine() {
        let machine = machine();
        assert_eq!(machine.text("/sys/bus/x/vendor"), Ok("0x10de".to_owned()));
        assert_eq!(machine.number("/sys/bus/x/vendor"), Ok(0x10de));
        assert_eq!(
            machine.bytes("/sys/bus/x/config"),
            Ok(vec![0xde, 0x10, 0xff])
        );
        assert_eq!(machine.bytes("/sys/bus/x/secret"), Err(Unseen::Denied));
        assert_eq!(machine.has("/sys/bus/x/secret"), Ok(true));
        assert_eq!(machine.bytes("/sys/bus/x/none"), Err(Unseen::Absent));
        assert_eq!(machine.bytes("/sys/bus/x/vendor/on"), Err(Unseen::Absent));
        assert_eq!(machine.bytes("/sys/bus/x/odd"), Err(Unseen::NotRecorded));
        assert_eq!(machine.bytes("/proc/version"), Err(Unseen::NotRecorded));
        assert_eq!(
            machine.resolved("/sys/bus/x/vendor"),
            Ok("/sys/devices/a/b/vendor".to_owned())
        );
        assert_eq!(machine.link("/sys/bus/x"), Ok("../devices/a/b".to_owned()));
        assert_eq!(machine.link("/sys/bus/x/vendor"), Err(Unseen::Absent));
        assert!(matches!(
            machine.bytes("/sys/round/on"),
            Err(Unseen::Failed(_))
        ));
        assert_eq!(machine.fact(Fact::Nvml), Err(Unseen::NotRecorded));
    }

    #[test]
    fn a_recording_answers_like_the_recorded_host() {
        let machine = machine();
        let recorder = Recorder::new(&machine, "again");
        all_alike(&machine, &recorder);
        let again = recorder.into_recording();
        all_alike(&machine, &again);
        let json = again.to_json().unwrap();
        all_alike(&machine, &Recording::parse(&json).unwrap());
    }

    #[test]
    fn bytes_come_back_as_they_were() {
        for bytes in [
            &b"text\n"[..],
            b"hex:00",
            b"\0",
            b"\xff\xfe",
            b"",
            b"\x01\0\0",
        ] {
            assert_eq!(decode(&encode(bytes)), Ok(bytes.to_vec()));
        }
        assert!(decode("hex:0").is_err());
        assert!(decode("hex:zz").is_err());
        assert!(decode("hex:00+").is_err());
        assert!(decode("hex:+99999999999").is_err());
        assert_eq!(decode("hex:ff+2"), Ok(vec![0xff, 0, 0]));
    }

    /// Output of `rdma_topo dump` contains no drivers, ports, BARs or software. If it were read as
    /// a recording, all of these would seem to be missing from the machine.
    #[test]
    fn a_dump_of_rdma_topo_is_recognised() {
        let device = r#"{"realpath": "/sys/devices/pci0009:00/0009:00:00.0", "config": "eJw=", "modalias": "pci:v",
            "iommu_group": 1, "numa_node": 0, "vpd": null, "subsystems": {}}"#;
        for dump in [format!("[{device}]"), format!("[{device}, {device}]")] {
            let error = format!("{:#}", Recording::parse(&dump).unwrap_err());
            assert!(error.contains("a dump of rdma_topo"), "{error}");
            assert!(error.contains("`rdma_topo check -F`"), "{error}");
        }
        for other in ["[]", "[1]", "[{}]", r#"[{"realpath": "/sys"}]"#] {
            let error = format!("{:#}", Recording::parse(other).unwrap_err());
            assert!(!error.contains("rdma_topo"), "{other}: {error}");
        }
    }

    #[test]
    fn another_file_is_no_recording() {
        assert!(Recording::parse("{}").is_err());
        assert!(Recording::parse("{\"schema\":\"peermemctl.recording\",\"version\":2}").is_err());
        assert!(Recording::parse("[").is_err());
    }
}
