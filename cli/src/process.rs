// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Lookup of a process by the process ID that the module recorded.
//!
//! The module records process IDs of the first PID namespace. Another process may have the recorded
//! ID by now. Data from `/proc` is used only if the process that has the ID now started before the
//! registration.

use std::cell::OnceCell;
use std::collections::BTreeMap;

use serde::Serialize;

use crate::debugfs::Time;
use crate::host::{field, Host, Unseen};

/// Inode of the first PID namespace, the kernel's `PROC_PID_INIT_INO`.
pub(crate) const FIRST_NAMESPACE: &str = "pid:[4026531836]";
/// Maximum length of a command line, in bytes.
const LONGEST: usize = 4096;
/// Time unit of `/proc/PID/stat`, in microseconds. `USER_HZ` is 100 on each architecture with
/// NVIDIA's driver.
const TICK: u64 = 10_000;
/// Page size of the GPU, which is the unit in which nvidia.ko pins memory. A registration covers
/// whole pages, even if only a part of the last page belongs to the process.
pub(crate) const GPU_PAGE: u64 = 64 << 10;

/// Present state of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum State {
    Alive,
    /// No process has this ID now.
    Gone,
    /// Another process has this ID now.
    Reused,
    /// This program does not run in the first PID namespace, and sees other process IDs than the
    /// module.
    Elsewhere,
    NotVisible,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Process {
    #[serde(rename = "process")]
    pub(crate) state: State,
    /// Command line, in one line.
    pub(crate) command: Option<String>,
    pub(crate) uid: Option<u32>,
    /// User name from `/etc/passwd`.
    pub(crate) user: Option<String>,
}

impl Process {
    pub(crate) fn unknown(state: State) -> Self {
        Self {
            state,
            command: None,
            uid: None,
            user: None,
        }
    }
}

/// Entry of `/proc`.
struct Entry {
    process: Process,
    /// Start time by the monotonic clock.
    start: Option<Time>,
    /// Mapped ranges, read on first use. `None`: not readable.
    mapped: OnceCell<Option<Mapped>>,
}

/// Address ranges of a process, in ascending order. The ranges are extended to whole pages of the
/// GPU, and may overlap.
struct Mapped(Vec<(u64, u64)>);

impl Mapped {
    /// Parses `/proc/PID/maps`.
    fn parse(maps: &str) -> Self {
        let ranges = maps.lines().filter_map(|line| {
            let (start, end) = line.split(' ').next()?.split_once('-')?;
            let number = |text| u64::from_str_radix(text, 16).ok();
            let (start, end) = (number(start)?, number(end)?);
            let last = end.checked_next_multiple_of(GPU_PAGE).unwrap_or(end);
            Some((start - start % GPU_PAGE, last))
        });
        Self(ranges.collect())
    }

    /// Returns the number of bytes between `start` and `end` that are in no range.
    fn lacks(&self, start: u64, end: u64) -> u64 {
        let mut bytes = 0_u64;
        let mut at = start;
        // Ranges that end at or before `start` come first.
        let first = self.0.partition_point(|range| range.1 <= start);
        for &(from, to) in self.0.get(first..).unwrap_or_default() {
            if from >= end {
                break;
            }
            bytes = bytes.saturating_add(from.saturating_sub(at));
            at = at.max(to);
        }
        bytes.saturating_add(end.saturating_sub(at))
    }
}

/// Processes of a host, each of which is read once.
pub(crate) struct Processes<'a> {
    host: &'a dyn Host,
    is_elsewhere: bool,
    /// Time that the machine has spent in suspend, in microseconds. The clock of `/proc/PID/stat`
    /// counts this time, and the monotonic clock does not.
    suspended: u64,
    users: BTreeMap<u32, String>,
    known: BTreeMap<u32, Entry>,
}

impl<'a> Processes<'a> {
    pub(crate) fn new(host: &'a dyn Host, now: Option<Time>) -> Self {
        let namespace = host.link("/proc/self/ns/pid");
        let uptime = host
            .text("/proc/uptime")
            .ok()
            .and_then(|text| Time::parse(text.split_whitespace().next()?));
        let suspended = match (now, uptime) {
            (Some(now), Some(uptime)) => now.until(uptime),
            _ => 0,
        };
        Self {
            host,
            is_elsewhere: namespace.is_ok_and(|namespace| namespace != FIRST_NAMESPACE),
            suspended,
            users: users(&host.text("/etc/passwd").unwrap_or_default()),
            known: BTreeMap::new(),
        }
    }

    /// Interprets all process IDs as those of this program's PID namespace.
    pub(crate) fn by_own_numbers(mut self) -> Self {
        self.is_elsewhere = false;
        self
    }

    /// Returns `true` if this program does not run in the first PID namespace.
    pub(crate) fn is_elsewhere(&self) -> bool {
        self.is_elsewhere
    }

    /// Returns the process of a thread, or the thread's ID if the process is not visible.
    pub(crate) fn of_thread(&self, thread: u32) -> u32 {
        let status = self.host.text(&format!("/proc/{thread}/status"));
        of_status(&status.unwrap_or_default(), thread)
    }

    /// Returns the process that had the ID `number` at the time `then`. `number` is `None` if the
    /// ID is unknown.
    pub(crate) fn of(&mut self, number: Option<u32>, then: Option<Time>) -> Process {
        let Some(number) = number else {
            return Process::unknown(State::NotVisible);
        };
        match self.entry(number, then) {
            Ok(entry) => entry.process.clone(),
            Err(state) => Process::unknown(state),
        }
    }

    /// Returns the number of bytes of an address range that the process does not map, or `None` if
    /// unknown.
    pub(crate) fn lacks(
        &mut self,
        number: u32,
        then: Option<Time>,
        start: u64,
        len: u64,
    ) -> Option<u64> {
        let host = self.host;
        let read = || {
            let maps = host.text(&format!("/proc/{number}/maps")).ok();
            // The file is empty for a process that is exiting.
            maps.filter(|maps| !maps.is_empty())
                .map(|maps| Mapped::parse(&maps))
        };
        let mapped = &self.entry(number, then).ok()?.mapped;
        let mapped = mapped.get_or_init(read).as_ref()?;
        Some(mapped.lacks(start, start.saturating_add(len)))
    }

    fn entry(&mut self, number: u32, then: Option<Time>) -> Result<&Entry, State> {
        if self.is_elsewhere {
            return Err(State::Elsewhere);
        }
        if !self.known.contains_key(&number) {
            let entry = self.scan(number);
            self.known.insert(number, entry);
        }
        let entry = self.known.get(&number).ok_or(State::NotVisible)?;
        match (entry.start, then) {
            // The comparison tolerates one second, because both times are rounded, and the clocks
            // were read at different moments.
            (Some(start), Some(then)) if then.until(start) > 1_000_000 => Err(State::Reused),
            _ => Ok(entry),
        }
    }

    fn scan(&self, number: u32) -> Entry {
        let host = self.host;
        let mut process = Process::unknown(State::Alive);
        let mut started = None;
        match host.text(&format!("/proc/{number}/status")) {
            Ok(status) => {
                let ids = field(&status, "Uid:").unwrap_or_default();
                let uid = ids.split_whitespace().next();
                process.uid = uid.and_then(|uid| uid.parse().ok());
                process.user = process.uid.and_then(|uid| self.users.get(&uid).cloned());
                let line = host.bytes(&format!("/proc/{number}/cmdline"));
                process.command = line.ok().and_then(|line| command(&line));
                let stat = host.text(&format!("/proc/{number}/stat"));
                started = stat.ok().and_then(|stat| start(&stat, self.suspended));
            }
            Err(Unseen::Absent) => process.state = State::Gone,
            Err(_) => process.state = State::NotVisible,
        }
        Entry {
            process,
            start: started,
            mapped: OnceCell::new(),
        }
    }
}

/// Returns the ID of a thread's process, from the thread's `/proc/PID/status`. Returns the thread's
/// ID if the text has no process ID.
pub(crate) fn of_status(status: &str, thread: u32) -> u32 {
    let process = field(status, "Tgid:").and_then(|process| process.parse().ok());
    process.unwrap_or(thread)
}

/// Returns the users of `/etc/passwd` by user ID. If a user ID has several names, the first name is
/// used.
fn users(passwd: &str) -> BTreeMap<u32, String> {
    let mut users = BTreeMap::new();
    for line in passwd.lines() {
        let mut fields = line.split(':');
        if let (Some(name), Some(_), Some(uid)) = (fields.next(), fields.next(), fields.next()) {
            if let Ok(uid) = uid.parse() {
                users.entry(uid).or_insert_with(|| name.to_owned());
            }
        }
    }
    users
}

/// Returns the command line, or `None` for a kernel thread or a process that is exiting.
fn command(bytes: &[u8]) -> Option<String> {
    let bytes = bytes.get(..LONGEST).unwrap_or(bytes);
    let text = String::from_utf8_lossy(bytes).replace('\0', " ");
    let text = text.trim_end();
    (!text.is_empty()).then(|| text.to_owned())
}

/// Returns a path to the file that a process sees as the absolute path `path`.
pub(crate) fn seen_by(pid: u32, path: &str) -> String {
    format!("/proc/{pid}/root{path}")
}

/// Returns field 22 of `/proc/PID/stat`, the start time. The process name, field 2, may contain
/// anything, including brackets.
pub(crate) fn start_ticks(stat: &str) -> Option<&str> {
    let (_, fields) = stat.rsplit_once(')')?;
    fields.split_whitespace().nth(19)
}

fn start(stat: &str, suspended: u64) -> Option<Time> {
    let ticks: u64 = start_ticks(stat)?.parse().ok()?;
    let since_boot = ticks.checked_mul(TICK)?;
    Some(Time(since_boot.saturating_sub(suspended)))
}

#[cfg(test)]
mod tests {
    use super::*;

    use proptest::prelude::*;

    const STAT: &str = "154 (a) b) (c) S 1 154 154 0 -1 4194304 0 0 0 0 0 0 0 0 20 0 1 0 6000 0 0";

    #[test]
    fn the_start_time_follows_the_name_of_a_process() {
        assert_eq!(start(STAT, 0), Some(Time(60_000_000)));
        assert_eq!(start(STAT, 50_000_000), Some(Time(10_000_000)));
        assert_eq!(start("154 (a", 0), None);
    }

    #[test]
    fn the_first_of_two_users_with_one_id_is_used() {
        let users = users("root:x:0:0::/root:/bin/sh\ntoor:x:0:0::\nbroken\nalice:x:1000:1000::\n");
        assert_eq!(users.get(&0).map(String::as_str), Some("root"));
        assert_eq!(users.get(&1000).map(String::as_str), Some("alice"));
        assert_eq!(users.len(), 2);
    }

    #[test]
    fn a_command_is_one_line() {
        assert_eq!(
            command(b"python3\0train.py\0\0").as_deref(),
            Some("python3 train.py")
        );
        assert_eq!(command(b""), None);
    }

    #[test]
    fn ranges_come_from_proc() {
        let mapped = Mapped::parse(
            "10000-30000 r-xp 00000000 fe:00 12 /usr/bin/x y\n302000000-306000000 ---p 00000000 00:00 0 \nwhat\n",
        );
        assert_eq!(
            mapped.0,
            [(0x10000, 0x30000), (0x3_0200_0000, 0x3_0600_0000)]
        );
    }

    #[test]
    fn a_page_of_the_gpu_counts_as_mapped_where_a_part_of_it_is() {
        // UCX's perftest allocates 8 MiB and 8 bytes. The registration extends to the end of the
        // GPU's last page.
        let mapped =
            Mapped::parse("7f0000000000-7f0000801000 rw-s 00000000 00:06 9 /dev/nvidia0\n");
        assert_eq!(mapped.lacks(0x7f00_0000_0000, 0x7f00_0081_0000), 0);
        assert_eq!(mapped.lacks(0x7f00_0000_0000, 0x7f00_0082_0000), 0x1_0000);
        let mapped =
            Mapped::parse("7f000001f000-7f0000020000 rw-s 00000000 00:06 9 /dev/nvidia0\n");
        assert_eq!(mapped.lacks(0x7f00_0000_0000, 0x7f00_0002_0000), 0x1_0000);
    }

    proptest! {
        /// Compares the result with that of a check of each single byte.
        #[test]
        fn unmapped_bytes_are_counted(
            lengths in prop::collection::vec((0..4_u64, 1..5_u64), 0..8), start in 0..64_u64, len in 0..64_u64
        ) {
            let mut at = 0;
            let mut ranges = Vec::new();
            for (gap, length) in lengths {
                ranges.push((at + gap, at + gap + length));
                at += gap + length;
            }
            let is_mapped = |byte: &u64| ranges.iter().any(|(from, to)| (from..to).contains(&byte));
            let expected = (start..start + len).filter(|byte| !is_mapped(byte)).count();
            prop_assert_eq!(Mapped(ranges).lacks(start, start + len), expected as u64);
        }

        #[test]
        fn nothing_of_a_process_is_a_panic(text in any::<String>(), number in any::<u64>()) {
            Mapped::parse(&text).lacks(number, number.saturating_add(1));
            start(&text, number);
            users(&text);
            command(text.as_bytes());
        }
    }
}
