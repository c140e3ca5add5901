// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Processes that have preloaded `libpeermem_preload.so`, which registers GPU memory by dma-buf for
//! programs that only call `ibv_reg_mr`.
//!
//! The findings of a missing peer-memory module say when a job needs the library
//! ([`DmaBuf::costs_without_module`]).

use super::dma_buf::DmaBuf;
use crate::doctor::scan::{check, Scan};
use crate::finding::{Finding, Level, Subject};
use crate::host::Host;

check! {
    "preload": "which processes have preloaded libpeermem_preload.so, and whether it can help them",
    // The check runs only on the live host, because a recording must not contain the list of mapped
    // files of every process.
    |scan| scan.has_both() && scan.host.is_live(), check, OwnTest
}

const LIBRARY: &str = "libpeermem_preload.so";
/// Maximum number of processes that the finding names.
const MOST: usize = 4;

/// Returns name and ID of the processes that map the library: `python3 (4711)`.
fn processes(host: &dyn Host) -> Vec<String> {
    let numbers = host.processes().unwrap_or_default().into_iter();
    numbers
        .filter(|number| {
            let maps = host.matching(&format!("/proc/{number}/maps"), LIBRARY);
            maps.is_ok_and(|lines| lines.lines().any(is_library))
        })
        .map(|number| {
            let name = host.text(&format!("/proc/{number}/comm"));
            format!("{} ({number})", name.as_deref().unwrap_or("?"))
        })
        .collect()
}

/// Returns `true` if a line of `/proc/PID/maps` is a mapping of the library. If the library's file
/// was replaced or removed, the line ends with ` (deleted)`.
fn is_library(line: &str) -> bool {
    let path = line.trim_end().trim_end_matches(" (deleted)");
    path.ends_with(&format!("/{LIBRARY}"))
}

fn check(scan: &Scan<'_>) -> Vec<Finding> {
    let all = processes(scan.host);
    if all.is_empty() {
        return Vec::new();
    }
    let dma_buf = DmaBuf::judge(scan);
    let mut named = all
        .iter()
        .take(MOST)
        .cloned()
        .collect::<Vec<_>>()
        .join(", ");
    if let Some(others @ 1..) = all.len().checked_sub(MOST) {
        named.push_str(&format!(" and {others} more"));
    }
    let found = format!("{LIBRARY} is preloaded by {named}");
    let is_useless = dma_buf.works() == Some(false) && scan.software().loaded().is_none();
    let finding = match is_useless {
        false => Finding::new(Level::Note, Subject::Machine, found)
            .why("it registers GPU memory by dma-buf if ibv_reg_mr fails (docs/dma-buf.md)"),
        true => Finding::new(Level::Warning, Subject::Machine, found)
            .why(format!("it cannot help: {}", dma_buf.said()))
            .costs("these processes get EFAULT from ibv_reg_mr on GPU memory")
            .fix("make dma-buf work, or load nvidia_peermem (docs/dma-buf.md says when to use which)"),
    };
    vec![finding]
}

#[cfg(test)]
mod tests {
    use super::super::tests::{healthy, proprietary, unload};
    use super::*;
    use crate::fixture::Fixture;

    const MAPS: &str =
        "7f0000000000-7f0000001000 r-xp 00000000 08:01 77  /opt/my tools/lib/libpeermem_preload.so";

    fn preload(fixture: &mut Fixture, maps: &str) {
        fixture.file("/proc/4711/comm", "python3\n");
        let text = format!("00400000-00401000 r-xp 0 0 0\n{maps}\n");
        fixture.file("/proc/4711/maps", &text);
    }

    fn findings(fixture: &Fixture) -> Vec<Finding> {
        fixture.scanned(check)
    }

    #[test]
    fn processes_that_have_it_are_named() {
        let mut fixture = healthy();
        assert_eq!(findings(&fixture), []);
        for (maps, is_it) in [
            (MAPS.to_owned(), true),
            (format!("{MAPS} (deleted)"), true),
            (format!("{MAPS}.1"), false),
            (MAPS.replace("/libpeermem", "/notlibpeermem"), false),
        ] {
            preload(&mut fixture, &maps);
            let found = findings(&fixture);
            assert_eq!(found.len(), usize::from(is_it), "{maps}");
            let is_named = |it: &Finding| it.found.ends_with("by python3 (4711)");
            assert!(found
                .iter()
                .all(|it| it.level == Level::Note && is_named(it)));
        }
    }

    #[test]
    fn a_library_that_cannot_help_is_a_warning() {
        let mut fixture = healthy();
        preload(&mut fixture, MAPS);
        unload(&mut fixture);
        assert_eq!(findings(&fixture)[0].level, Level::Note);
        proprietary(&mut fixture);
        assert_eq!(findings(&fixture)[0].level, Level::Warning);
    }

    #[test]
    fn many_processes_are_counted() {
        let mut fixture = healthy();
        for number in 100..109 {
            fixture.file(&format!("/proc/{number}/comm"), "rank\n");
            fixture.file(&format!("/proc/{number}/maps"), &format!("{MAPS}\n"));
        }
        let found = &findings(&fixture)[0].found;
        assert!(found.ends_with("rank (103) and 5 more"), "{found}");
    }

    /// A recording has no mapped files of processes.
    #[test]
    fn the_check_does_not_apply_to_a_recording() {
        assert!(!healthy().scanned(CHECK.applies));
    }
}
