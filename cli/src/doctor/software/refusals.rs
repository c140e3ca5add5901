// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Registrations that the module refused recently, the module's error counters, and registrations
//! whose memory was freed or whose GPU is gone. docs/observe.md defines the format of the module's
//! files.

use std::collections::BTreeMap;

use crate::debugfs::{directory, path, records, Counter, Module, Refusal, Time};
use crate::doctor::scan::{check, Scan};
use crate::finding::{Finding, Level, Subject};
use crate::host::Unseen;
use crate::process::Processes;
use crate::registrations::{Freed, Stranded};
use crate::shipped::reason::{Cause, Event, Severity};
use crate::{registrations, shipped};

check! {
    "refusals": "registrations that the module refused recently, its error counters, and registrations of freed memory or \
        of a lost GPU (peermem-rs)",
    applies, check, OfSoftware(tests::FAULTS)
}

/// File with the module's counters.
pub(super) const COUNTERS: &str = "counters";
const REFUSALS: &str = "refusals";

/// Age limit of a "recent" refusal, in seconds.
const LATE: u64 = 3600;

fn seconds(time: Time) -> u64 {
    time.0 / 1_000_000
}

/// Returns the last refusal for each reason, with the number of refusals for that reason.
fn by_reason(text: &str) -> BTreeMap<String, Refusal> {
    let mut all: BTreeMap<String, Refusal> = BTreeMap::new();
    for mut one in records(text, Refusal::of).records {
        let Some(reason) = one.reason.clone() else {
            continue;
        };
        let mut times = one.times.unwrap_or(1);
        if let Some(before) = all.remove(&reason) {
            times = times.saturating_add(before.times.unwrap_or(1));
            if before.last > one.last {
                one = before;
            }
        }
        one.times = Some(times);
        all.insert(reason, one);
    }
    all
}

/// Formats a time span: `5 min`.
fn span(seconds: u64) -> String {
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7200 => format!("{} min", seconds / 60),
        7200..172_800 => format!("{} h", seconds / 3600),
        _ => format!("{} days", seconds / 86_400),
    }
}

/// Returns `true` if peermem-rs is loaded. NVIDIA's nvidia_peermem has neither counters nor a list
/// of refusals.
fn applies(scan: &Scan<'_>) -> bool {
    scan.has_both() && scan.software().loaded().is_some_and(|it| it.is_ours)
}

fn check(scan: &Scan<'_>) -> Vec<Finding> {
    let mut findings = Vec::new();
    match scan.host.text(&path(scan.host, COUNTERS)) {
        Ok(text) => findings.extend(counted(&text)),
        Err(why) => {
            return vec![Scan::unseen(
                Subject::Machine,
                format!("what the module refused ({})", directory(scan.host)),
                &why,
            )]
        }
    }
    let module = Module::scan(scan.host);
    let read = module
        .as_ref()
        .map(|module| module.registrations(scan.host));
    if let (Ok(module), Ok(Ok(read))) = (&module, read) {
        let mut processes = Processes::new(scan.host, registrations::now(scan.host));
        let freed = Freed::among(scan.host, module, &read.records, &mut processes);
        if let Some(found) = Freed::found(freed.bytes()) {
            let found = Subject::Machine.note(found);
            findings.push(found.why(Freed::WHY).fix(Freed::FIX));
        }
        for stranded in Stranded::among(scan.host, &read.records) {
            let found = Subject::Machine.warning(stranded.found());
            findings.push(found.why(Stranded::WHY).fix("restart the machine"));
        }
    }
    match scan.host.text(&path(scan.host, REFUSALS)) {
        Ok(text) => {
            let now = registrations::now(scan.host).map(seconds);
            for (reason, refused) in by_reason(&text) {
                findings.extend(reported(&reason, &refused, now));
            }
        }
        Err(Unseen::Absent) => {}
        Err(why) => findings.push(Scan::unseen(Subject::Machine, REFUSALS, &why)),
    }
    findings
}

fn reported(reason: &str, refused: &Refusal, now: Option<u64>) -> Option<Finding> {
    let row = shipped::row(reason);
    let cause = row.map(|row| row.cause);
    if cause == Some(Cause::NextClient) {
        return None;
    }
    let last = refused.last.map_or(0, seconds);
    let age = now.map(|now| now.saturating_sub(last));
    let is_late = age.is_none_or(|age| age < LATE);
    let level = match cause {
        Some(Cause::Machine) if is_late => Level::Warning,
        _ => Level::Note,
    };
    let times = match refused.times {
        None | Some(1) => "once".to_owned(),
        Some(times) => format!("{times} times"),
    };
    let age = match age {
        Some(age) => format!(", last {} ago", span(age)),
        None => String::new(),
    };
    let comm = refused.comm.as_deref().unwrap_or("?");
    let found = format!("refused {times}{age}, for {comm}: {reason}");
    let mut finding = Finding::new(level, Subject::Machine, found);
    if let Some(text) = refused.text.as_deref().filter(|text| !text.is_empty()) {
        finding = finding.why(text);
    }
    Some(match row.map_or("", |row| row.advice) {
        "" => finding,
        advice => finding.fix(advice),
    })
}

/// Reports counters that should be 0.
fn counted(text: &str) -> Vec<Finding> {
    let counters = records(text, Counter::of).records;
    let mut findings = Vec::new();
    for info in &Event::ALL {
        let its = counters.iter().filter(|one| one.event == info.name);
        let count = its.fold(0, |sum: u64, one| sum.saturating_add(one.count));
        if count == 0 || info.severity == Severity::Info {
            continue;
        }
        let found = format!("{}: {count}", info.name);
        let finding = Subject::Machine.warning(found).why(info.message);
        findings.push(match info.advice {
            "" => finding,
            advice => finding.fix(advice),
        });
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    use super::super::tests::{faults, log, refuse, DEBUG};
    use crate::host::Fact;
    use crate::shipped::reason::Event;
    use proptest::prelude::*;

    faults! {
        "a recent refusal whose cause is the machine",
            "warning refusals: …refused 2 times, last 10 s ago, for python3: no_room" =>
            |fixture| refuse(fixture, 3590, "no_room");
        "an old refusal whose cause is the machine", "note refusals: …last 24 h ago" => |fixture| {
            fixture.fact(Fact::Monotonic, "90000.0");
            refuse(fixture, 3590, "no_room");
        };
        "a refusal whose cause is the request", "note refusals: …not_gpu_memory" =>
            |fixture| refuse(fixture, 3590, "not_gpu_memory");
        "a refusal after which the other client is asked" => |fixture| refuse(fixture, 3590, "not_in_bar");
        "a refusal of memory with struct pages, after which the other client is asked" =>
            |fixture| refuse(fixture, 3590, "has_struct_pages");
        "memory that is lost", "warning refusals: …leaked: 3" =>
            |fixture| fixture.file(&format!("{DEBUG}/counters"), "event=leaked count=3\n");
        "memory that its process has freed, and a registration that holds it",
            "note refusals: …1 registration is of memory that the process has freed, 64 KiB in all" => |fixture| {
            fixture.file(&format!("{DEBUG}/version"), "format=3 module=1\n");
            fixture.file(
                &format!("{DEBUG}/registrations"),
                "id=1 state=mapped addr=0x10000 len=131072 tgid=77\nid=2 state=revoked addr=0x90000 len=65536 tgid=77\n\
                id=3 state=pinned addr=0x40000 len=65536 tgid=77\nid=4 state=mapped addr=0x40000 len=65536 tgid=78\n",
            );
            fixture.file("/proc/77/status", "Name:\tx\n");
            fixture.file("/proc/77/maps", "10000-20000 ---p 00000000 00:00 0 \n40000-50000 ---p 00000000 00:00 0 \n");
        };
        "a GPU that is gone, and its callbacks with it",
            "warning refusals: …2 registrations wait for their callbacks from GPU 0000:f9:00.0, which is gone from \
             PCI" => |fixture| {
            fixture.file(&format!("{DEBUG}/version"), "format=3 module=1\n");
            fixture.file(
                &format!("{DEBUG}/registrations"),
                "id=1 state=orphaned gpus=0000:f9:00.0\nid=2 state=orphaned gpus=0000:19:00.0,0000:f9:00.0\n\
                id=3 state=mapped gpus=0000:9a:00.0\nid=4 state=orphaned gpus=-\n",
            );
        };
        "a GPU that has fallen off the bus, with a registration that waits for it",
            "warning refusals: …1 registration waits for its callback from GPU 0000:19:00.0, which has fallen off \
             the bus" => |fixture| {
            let config = format!("{}/config", fixture.place("0000:19:00.0"));
            fixture.bytes(&config, &[0xff; 64]);
            fixture.file(&format!("{DEBUG}/version"), "format=3 module=1\n");
            fixture.file(
                &format!("{DEBUG}/registrations"),
                "id=1 state=orphaned gpus=0000:19:00.0\nid=2 state=mapped gpus=0000:19:00.0\n",
            );
        };
        "files that only root reads", "not_visible refusals: …not visible without root" => |fixture| {
            fixture.remove("/sys/kernel/debug");
            fixture.deny("/sys/kernel/debug");
        };
        "memory that is lost, by the log alone",
            "not_visible refusals: …nvidia_peermem", "warning kernel-log: …is lost until" => |fixture| {
            let message = Event::ALL[Event::Leaked as usize].message;
            let line = format!("nvidia-peermem: GPU memory 0x7f0000000000+0x10000: {message}");
            log(fixture, &[line.as_str()]);
            fixture.remove(DEBUG);
        };
    }

    const LINE: &str =
        "seq=0 first=1.000001 last=62.500000 times=2 mode=persistent step=acquire reason=no_room code=-12 \
         addr=0x7f0000000000 len=1048576 tgid=4711 pid=4712 comm=python3 text=\"no room, reason=x last=9\"";

    #[test]
    fn keys_within_quoted_text_are_ignored() {
        let all = by_reason(LINE);
        let refused = all.get("no_room").expect("it is there");
        assert_eq!(
            (refused.times, refused.last.map(seconds)),
            (Some(2), Some(62))
        );
        assert_eq!(refused.text.as_deref(), Some("no room, reason=x last=9"));
    }

    #[test]
    fn spans() {
        assert_eq!(span(119), "119 s");
        assert_eq!(span(120), "2 min");
        assert_eq!(span(7200), "2 h");
        assert_eq!(span(172_800), "2 days");
    }

    proptest! {
        #[test]
        fn no_line_is_a_panic(
            text in any::<String>(),
            line in "(seq|last|times|reason|count|event|text)=[^ ]{0,9}( [a-z]{0,6}=\"?[0-9.x]{0,25}\"?){0,5}",
        ) {
            for text in [&text, &line] {
                by_reason(text);
                counted(text);
            }
        }
    }
}
