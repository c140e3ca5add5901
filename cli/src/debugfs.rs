// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Reader of the module's files in debugfs, or in `/proc` if the module was built for the
//! proprietary nvidia.ko.
//!
//! `docs/observe.md` specifies the format: lines of `key=value`, read by key. Unknown keys are
//! kept, and missing keys read as `None`.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use serde::Serialize;

use crate::host::{number, Host, Unseen};

/// The module's directory in debugfs.
pub(crate) const DIRECTORY: &str = "/sys/kernel/debug/nvidia_peermem";
/// The module's directory if the module was built for the proprietary nvidia.ko. Such a module has
/// no files in debugfs.
pub(crate) const PROC: &str = "/proc/driver/nvidia-peermem";
/// Supported versions of the line format. Version 2 reports refusals of memory with struct pages
/// under the reason `not_in_bar`. Version 3 uses the reason `has_struct_pages`.
const FORMATS: RangeInclusive<u64> = 2..=3;

/// Reason why the module's files cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Missing {
    #[error(
        "the module nvidia_peermem is not loaded: modprobe nvidia-peermem (peermemctl doctor says what prevents it)"
    )]
    NotLoaded,
    /// /sys cannot be read, so it is unknown whether the module is loaded.
    #[error(
        "/sys cannot be read here (/sys/module: {0}), so this program cannot tell whether nvidia_peermem is loaded: \
         mount -t sysfs sysfs /sys, or give the container the host's /sys"
    )]
    NoSysfs(Unseen),
    /// A module of the same name is loaded that is not peermem-rs. The field is its version.
    #[error(
        "the loaded nvidia_peermem (version {0}) is not peermem-rs: NVIDIA's own module reports nothing about its \
         registrations"
    )]
    Other(String),
    /// Access to the files in debugfs is denied.
    #[error("{DIRECTORY} is not visible without root")]
    Denied,
    /// Access to the files in `/proc` is denied.
    #[error("only root can read {PROC}; in a container, root also needs the host's CAP_SYS_ADMIN")]
    DeniedInProc,
    #[error("this kernel has no debugfs (no CONFIG_DEBUG_FS, or booted with debugfs=off)")]
    NoDebugfs,
    #[error("debugfs is not mounted: mount -t debugfs debugfs /sys/kernel/debug")]
    NotMounted,
    /// debugfs is mounted, but neither debugfs nor `/proc` contains the module's directory.
    #[error(
        "nvidia_peermem is loaded, but neither {DIRECTORY} nor {PROC} exists: the kernel refused to create the \
         module's files (debugfs=no-mount, lockdown), or this is a container without the host's debugfs"
    )]
    NoFiles,
    /// The version of the format is unknown, or the version line is invalid. `format` is the
    /// version or the invalid line.
    #[error(
        "the module's files have the format {format}, but this program knows only {first} to {last}: use the \
         peermemctl that came with the module",
        format = .0,
        first = FORMATS.start(),
        last = FORMATS.end()
    )]
    Format(String),
    /// The module is too old to have this file.
    #[error("the loaded module (version {module}) has no file {file}: the module is older than this program")]
    Older { module: String, file: &'static str },
    #[error("the recording does not contain {DIRECTORY}: was it made without root?")]
    NotRecorded,
    #[error("{path}: {why}")]
    Failed { path: String, why: String },
}

/// The loaded module, which is peermem-rs and whose files are readable.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Module {
    /// Version from `/sys/module/nvidia_peermem/version`.
    pub(crate) version: String,
    /// Version of the line format.
    pub(crate) format: u64,
}

/// The records of one file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Records<T> {
    pub(crate) records: Vec<T>,
    /// Number of lines that could not be parsed.
    pub(crate) unreadable: u64,
}

impl Module {
    /// Finds the loaded module and checks that its files can be read.
    pub(crate) fn scan(host: &dyn Host) -> Result<Self, Missing> {
        const FILE: &str = "version";
        match host.has("/sys/module/nvidia_peermem") {
            Ok(true) | Err(Unseen::NotRecorded) => {}
            Ok(false) => {
                return Err(match host.has("/sys/module") {
                    Ok(true) | Err(Unseen::NotRecorded) => Missing::NotLoaded,
                    Ok(false) => Missing::NoSysfs(Unseen::Absent),
                    Err(why) => Missing::NoSysfs(why),
                });
            }
            Err(why) => return Err(Missing::NoSysfs(why)),
        }
        let text = match host.text(&path(host, FILE)) {
            Ok(text) => text,
            Err(Unseen::Absent) => return Err(Self::why_absent(host)),
            Err(why) => return Err(missing(host, FILE, why)),
        };
        let line = Line::parse(&text).ok_or_else(|| Missing::Format(text.clone()))?;
        let format = line.get("format").unwrap_or("");
        match number(format) {
            Some(format) if FORMATS.contains(&format) => Ok(Self {
                version: line.get("module").unwrap_or("unknown").to_owned(),
                format,
            }),
            _ => Err(Missing::Format(format.to_owned())),
        }
    }

    fn why_absent(host: &dyn Host) -> Missing {
        // The version of NVIDIA's nvidia_peermem is the driver's version. The version of peermem-rs
        // contains "-rs", unless the builder changed it.
        if let Ok(version) = host.text("/sys/module/nvidia_peermem/version") {
            if !version.contains("-rs") {
                return Missing::Other(version);
            }
        }
        is_mounted(host).err().unwrap_or(Missing::NoFiles)
    }

    /// Reads the live registrations, in order of their numbers.
    pub(crate) fn registrations(&self, host: &dyn Host) -> Result<Records<Registration>, Missing> {
        self.records(host, "registrations", Registration::of)
    }

    pub(crate) fn counters(&self, host: &dyn Host) -> Result<Records<Counter>, Missing> {
        self.records(host, "counters", Counter::of)
    }

    /// Reads the last refusals of memory that may have been GPU memory, oldest first.
    pub(crate) fn refusals(&self, host: &dyn Host) -> Result<Records<Refusal>, Missing> {
        self.records(host, "refusals", Refusal::of)
    }

    /// Reads the last refusals of memory that was not GPU memory.
    pub(crate) fn non_gpu(&self, host: &dyn Host) -> Result<Records<Refusal>, Missing> {
        self.records(host, "non_gpu", Refusal::of)
    }

    fn records<T>(
        &self,
        host: &dyn Host,
        file: &'static str,
        of: fn(Line<'_>) -> Option<T>,
    ) -> Result<Records<T>, Missing> {
        let bytes = host.bytes(&path(host, file)).map_err(|why| match why {
            Unseen::Absent => Missing::Older {
                module: self.version.clone(),
                file,
            },
            why => missing(host, file, why),
        })?;
        let text = String::from_utf8_lossy(&bytes);
        // A line without a line break may be truncated, and a truncated number is a wrong number.
        let (whole, cut) = text.rsplit_once('\n').unwrap_or(("", &text));
        let mut read = records(whole, of);
        if !cut.is_empty() {
            read.unreadable = read.unreadable.saturating_add(1);
        }
        Ok(read)
    }
}

/// Returns an error unless debugfs is mounted and readable.
pub(crate) fn is_mounted(host: &dyn Host) -> Result<(), Missing> {
    match host.names("/sys/kernel/debug") {
        // A mounted debugfs is never empty.
        Ok(names) if names.is_empty() => Err(Missing::NotMounted),
        Ok(_) => Ok(()),
        Err(Unseen::Absent) => Err(Missing::NoDebugfs),
        Err(why) => Err(missing_in(DIRECTORY, "version", why)),
    }
}

/// Returns the directory of the module's files: the directory in `/proc` if it exists, or else the
/// directory in debugfs. Every user can see whether the directory in `/proc` exists.
pub(crate) fn directory(host: &dyn Host) -> &'static str {
    match host.has(PROC) {
        Ok(true) => PROC,
        _ => DIRECTORY,
    }
}

/// Returns the path of one of the module's files.
pub(crate) fn path(host: &dyn Host, file: &str) -> String {
    format!("{}/{file}", directory(host))
}

fn missing(host: &dyn Host, file: &str, why: Unseen) -> Missing {
    missing_in(directory(host), file, why)
}

fn missing_in(directory: &'static str, file: &str, why: Unseen) -> Missing {
    match why {
        Unseen::Absent => Missing::NoFiles,
        Unseen::Denied if directory == PROC => Missing::DeniedInProc,
        Unseen::Denied => Missing::Denied,
        Unseen::NotRecorded => Missing::NotRecorded,
        Unseen::Failed(why) => Missing::Failed {
            path: format!("{directory}/{file}"),
            why,
        },
    }
}

/// Parses each line with `of`, and counts the lines that cannot be parsed. The last line must be
/// complete.
pub(crate) fn records<T>(text: &str, of: fn(Line<'_>) -> Option<T>) -> Records<T> {
    let mut all = Records {
        records: Vec::new(),
        unreadable: 0,
    };
    for line in text.lines().filter(|line| !line.is_empty()) {
        match Line::parse(line).and_then(of) {
            Some(record) => all.records.push(record),
            None => all.unreadable = all.unreadable.saturating_add(1),
        }
    }
    all
}

/// A line of one of the module's files: keys and values in the order of the line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Line<'a>(Vec<(&'a str, &'a str)>);

impl<'a> Line<'a> {
    /// Parses a line. Returns `None` for a word without `=` or an unterminated quote.
    pub(crate) fn parse(line: &'a str) -> Option<Self> {
        let mut pairs = Vec::with_capacity(16);
        let mut rest = line;
        while !rest.is_empty() {
            let (key, behind) = rest.split_once('=')?;
            if key.is_empty() || key.contains([' ', '"']) {
                return None;
            }
            let value;
            (value, rest) = match behind.strip_prefix('"') {
                Some(quoted) => {
                    let (value, rest) = quoted.split_once('"')?;
                    (value, rest.strip_prefix(' ').unwrap_or(rest))
                }
                None => behind.split_once(' ').unwrap_or((behind, "")),
            };
            pairs.push((key, value));
        }
        Some(Self(pairs))
    }

    /// Returns the value of a key as in the file, but without quotes.
    pub(crate) fn get(&self, key: &str) -> Option<&'a str> {
        self.0
            .iter()
            .find(|(known, _)| *known == key)
            .map(|(_, value)| *value)
    }

    fn any(&mut self, key: &str) -> Option<&'a str> {
        let place = self.0.iter().position(|(known, _)| *known == key)?;
        Some(self.0.remove(place).1)
    }

    /// Removes a key and returns its value. A `-` reads as `None`.
    fn take(&mut self, key: &str) -> Option<&'a str> {
        self.any(key).filter(|value| *value != "-")
    }

    fn word(&mut self, key: &str) -> Option<String> {
        self.take(key).map(str::to_owned)
    }

    fn number(&mut self, key: &str) -> Option<u64> {
        self.take(key).and_then(number)
    }

    fn process(&mut self, key: &str) -> Option<u32> {
        self.number(key)
            .and_then(|number| u32::try_from(number).ok())
    }

    fn time(&mut self, key: &str) -> Option<Time> {
        self.take(key).and_then(Time::parse)
    }

    /// Removes a key and returns its value, which is the name of a thread.
    fn name(&mut self, key: &str) -> Option<String> {
        // `-` is a valid thread name.
        self.any(key).map(unescaped)
    }

    /// Returns the remaining keys and values.
    fn rest(self) -> BTreeMap<String, String> {
        self.0
            .into_iter()
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
            .collect()
    }
}

/// Decodes `\xNN` escapes to bytes, and replaces invalid UTF-8.
fn unescaped(text: &str) -> String {
    if !text.contains('\\') {
        return text.to_owned();
    }
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, behind)) = rest.split_once('\\') {
        bytes.extend_from_slice(before.as_bytes());
        let byte = behind
            .strip_prefix('x')
            .and_then(|digits| digits.get(..2))
            .filter(|digits| digits.bytes().all(|digit| digit.is_ascii_hexdigit()))
            .and_then(|digits| u8::from_str_radix(digits, 16).ok());
        match byte {
            Some(byte) => {
                bytes.push(byte);
                rest = behind.get(3..).unwrap_or("");
            }
            None => {
                bytes.push(b'\\');
                rest = behind;
            }
        }
    }
    bytes.extend_from_slice(rest.as_bytes());
    String::from_utf8_lossy(&bytes).into_owned()
}

/// A point in time of the monotonic clock, in microseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Time(pub(crate) u64);

impl Time {
    /// Parses seconds, with an optional fraction.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let (seconds, fraction) = text.split_once('.').unwrap_or((text, "0"));
        let digits =
            |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        if !digits(seconds) || !digits(fraction) {
            return None;
        }
        let fraction = format!("{:0<6}", fraction.get(..6).unwrap_or(fraction));
        let whole = seconds.parse::<u64>().ok()?.checked_mul(1_000_000)?;
        whole.checked_add(fraction.parse().ok()?).map(Self)
    }

    /// Returns the time from `self` to `now`, in microseconds, or 0 if `now` is earlier.
    pub(crate) fn until(self, now: Self) -> u64 {
        now.0.saturating_sub(self.0)
    }

    pub(crate) fn seconds(self) -> f64 {
        seconds(self.0)
    }
}

/// Converts microseconds to seconds.
pub(crate) fn seconds(microseconds: u64) -> f64 {
    // CAST: The conversion is exact below 2^53 microseconds, which is 285 years.
    microseconds as f64 / 1e6
}

/// Defines the struct for a line of one of the module's files, and the parser of the line. The
/// expression after a field reads the field's value from the line.
macro_rules! record {
    (
        $(#[$meta:meta])* $record:ident($line:ident);
        $($(#[$about:meta])* $field:ident: $type:ty = $value:expr;)*
    ) => {
        $(#[$meta])*
        pub(crate) struct $record {
            $($(#[$about])* pub(crate) $field: $type,)*
        }

        impl $record {
            pub(crate) fn of(mut $line: Line<'_>) -> Option<Self> {
                Some(Self { $($field: $value,)* })
            }
        }
    };
}

record! {
    /// A registration, active or orphaned: a line of `registrations`.
    #[derive(Debug, Clone, Default, PartialEq, Eq)]
    Registration(line);
    /// Number from 1, not reused while the module is loaded.
    id: u64 = line.number("id")?;
    /// One of `pinned`, `mapped`, `revoked`, `orphaned`.
    state: Option<String> = line.word("state");
    /// `persistent` or `revocable`.
    mode: Option<String> = line.word("mode");
    addr: Option<u64> = line.number("addr");
    /// Pinned length, in bytes.
    len: Option<u64> = line.number("len");
    /// Page size of nvidia.ko, in bytes.
    page: Option<u64> = line.number("page");
    /// Number of chunks. The module pins each chunk separately.
    chunks: Option<u64> = line.number("chunks");
    /// Number of scatter list entries; 0 until mapped.
    entries: Option<u64> = line.number("entries");
    /// PCI addresses of the GPUs whose memory is registered. Empty if the module does not know the
    /// GPUs.
    gpus: Vec<String> = {
        let all = line.take("gpus").into_iter();
        all.flat_map(|all| all.split(',')).map(str::to_owned).collect()
    };
    /// PCI address of the device that does the DMA.
    hca: Option<String> = line.word("hca");
    /// Process ID in the first PID namespace.
    tgid: Option<u32> = line.process("tgid");
    /// Thread that made the registration.
    pid: Option<u32> = line.process("pid");
    since: Option<Time> = line.time("since");
    /// Name of the thread when it made the registration.
    comm: Option<String> = line.name("comm");
    other: BTreeMap<String, String> = line.rest();
}

record! {
    #[derive(Debug, Clone, PartialEq, Eq, Serialize)]
    Counter(line);
    event: String = line.word("event")?;
    count: u64 = line.number("count")?;
    #[serde(skip_serializing_if = "Option::is_none")]
    mode: Option<String> = line.word("mode");
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String> = line.word("reason");
    #[serde(flatten)]
    other: BTreeMap<String, String> = line.rest();
}

record! {
    /// A line of `refusals` or `non_gpu`.
    #[derive(Debug, Clone, PartialEq, Eq)]
    Refusal(line);
    /// Number of the refusal, from 0. A gap between numbers means overwritten entries.
    seq: u64 = line.number("seq")?;
    first: Option<Time> = line.time("first");
    last: Option<Time> = line.time("last");
    times: Option<u64> = line.number("times");
    mode: Option<String> = line.word("mode");
    step: Option<String> = line.word("step");
    reason: Option<String> = line.word("reason");
    /// Negative errno from nvidia.ko, or 0 if the refusal did not come from nvidia.ko.
    code: Option<i64> = line.take("code").and_then(|code| code.parse().ok());
    addr: Option<u64> = line.number("addr");
    len: Option<u64> = line.number("len");
    tgid: Option<u32> = line.process("tgid");
    pid: Option<u32> = line.process("pid");
    comm: Option<String> = line.name("comm");
    /// Reason as text.
    text: Option<String> = line.word("text");
    other: BTreeMap<String, String> = line.rest();
}

#[cfg(test)]
mod tests {
    use super::*;

    use crate::shipped::history::{History, PinMode, Refusal as Given, Step, Task};
    use crate::shipped::ranges::{PageSize, Span};
    use crate::shipped::reason::{Reason, VmaKind};
    use crate::shipped::{device, registry};
    use proptest::prelude::*;

    fn reasons() -> impl Strategy<Value = Reason> {
        prop_oneof![
            any::<i32>().prop_map(Reason::Pin),
            any::<i32>().prop_map(Reason::Map),
            Just(Reason::NonGpu(VmaKind::Host)),
            any::<u32>().prop_map(Reason::TableVersion),
            Just(Reason::NotPci),
            (any::<u64>(), any::<u64>())
                .prop_map(|(pinned, limit)| Reason::UserLimit { pinned, limit }),
            any::<u64>().prop_map(|offset| Reason::Hole { offset }),
        ]
    }

    proptest! {
        /// Lines that the module's own code formats are parsed to the original values.
        #[test]
        fn refusals_that_the_module_writes_are_parsed(
            reason in reasons(),
            (addr, len) in (any::<u64>(), any::<u64>()),
            (tgid, pid) in (0..i32::MAX, 0..i32::MAX),
            comm in any::<[u8; 16]>(),
            (first, more) in (0..u64::MAX / 2, 0..u64::MAX / 2),
        ) {
            let mut history = History::new();
            let refused = Given {
                mode: PinMode::Revocable,
                step: Step::DmaMap,
                reason,
                addr,
                len,
                task: Task { tgid, pid, comm },
            };
            history.add(first, refused);
            history.add(first + more, refused);
            let (record, _) = history.from(reason.is_non_gpu(), 0).unwrap();
            let read = records(&format!("{record}\n"), Refusal::of);
            let name: Vec<u8> = comm.iter().copied().take_while(|byte| *byte != 0).collect();
            let name = String::from_utf8_lossy(&name).into_owned();
            prop_assert_eq!(read, Records {
                records: vec![Refusal {
                    seq: 0,
                    first: Some(Time(first)),
                    last: Some(Time(first + more)),
                    times: Some(2),
                    mode: Some("revocable".to_owned()),
                    step: Some("dma_map".to_owned()),
                    reason: Some(reason.name().to_str().unwrap().to_owned()),
                    code: Some(i64::from(reason.code())),
                    addr: Some(addr),
                    len: Some(len),
                    tgid: Some(u32::try_from(tgid).unwrap()),
                    pid: Some(u32::try_from(pid).unwrap()),
                    comm: Some(name),
                    text: Some(reason.to_string()),
                    other: BTreeMap::new(),
                }],
                unreadable: 0,
            });
        }

        #[test]
        fn registrations_that_the_module_writes_are_parsed(
            id in 1..u64::MAX,
            state in prop_oneof![
                Just(registry::State::Pinned),
                Just(registry::State::Mapped),
                Just(registry::State::Revoked),
                Just(registry::State::Orphaned),
            ],
            (page, pages, len) in (0_u64..1 << 40, 1_u64..1 << 20, any::<u32>()),
            gpu in prop::option::of(0..1_u64 << 32),
            hca in prop::option::of(0..1_u64 << 32),
            (tgid, pid) in (0..i32::MAX, 0..i32::MAX),
            comm in any::<[u8; 16]>(),
            since in any::<u64>(),
        ) {
            let unit = PageSize::KIB_64;
            let span = Span::covering(page << 16, pages << 16, unit, u64::MAX).unwrap();
            let registration = registry::Registration {
                number: id,
                state,
                info: registry::RegistrationInfo {
                    mode: PinMode::Persistent,
                    span,
                    page: unit,
                    chunks: 3,
                    gpus: gpu.map_or_else(Default::default, |_| device::Gpus::one(7)),
                    task: Task { tgid, pid, comm },
                    since,
                },
                entries: len,
                hca: hca.map(device::PciAddress),
            };
            let line = registry::Line {
                registration: &registration,
                gpu: |number| {
                    assert_eq!(number, 7);
                    gpu.map(device::PciAddress)
                },
            };
            let read = records(&line.to_string(), Registration::of);
            let name: Vec<u8> = comm.iter().copied().take_while(|byte| *byte != 0).collect();
            prop_assert_eq!(read, Records {
                records: vec![Registration {
                    id,
                    state: Some(state.name().to_str().unwrap().to_owned()),
                    mode: Some("persistent".to_owned()),
                    addr: Some(page << 16),
                    len: Some(pages << 16),
                    page: Some(1 << 16),
                    chunks: Some(3),
                    entries: Some(u64::from(len)),
                    gpus: gpu.map(|gpu| device::PciAddress(gpu).to_string()).into_iter().collect(),
                    hca: hca.map(|hca| device::PciAddress(hca).to_string()),
                    tgid: u32::try_from(tgid).ok(),
                    pid: u32::try_from(pid).ok(),
                    since: Some(Time(since)),
                    comm: Some(String::from_utf8_lossy(&name).into_owned()),
                    other: BTreeMap::new(),
                }],
                unreadable: 0,
            });
        }

        #[test]
        fn no_line_is_a_panic(text in any::<String>()) {
            records(&text, Registration::of);
            records(&text, Counter::of);
            records(&text, Refusal::of);
            Time::parse(&text);
            unescaped(&text);
        }

        #[test]
        fn no_line_like_the_modules_is_a_panic(
            text in "((id|len|gpus|since|comm|text)=[0-9a-fx.,\\\\\"= \n-]{0,9} ?){0,6}",
        ) {
            records(&text, Registration::of);
            records(&text, Refusal::of);
        }
    }

    #[test]
    fn invalid_lines_are_counted() {
        let read = records("nonsense\nid=x\nid=3\nid=4 text=\"open\n", Registration::of);
        assert_eq!((read.records.len(), read.unreadable), (1, 3));
    }

    #[test]
    fn a_time_has_six_decimals() {
        for (text, time) in [
            ("6.119592", Some(6_119_592)),
            ("6", Some(6_000_000)),
            ("6.5", Some(6_500_000)),
            ("6.1234567", Some(6_123_456)),
            ("6.", None),
            ("-1.0", None),
            ("18446744073709551615.0", None),
        ] {
            assert_eq!(Time::parse(text).map(|time| time.0), time, "{text}");
        }
    }
}
