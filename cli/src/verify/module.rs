// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! The module's records about a process: the number of registrations, and the reason why the module
//! last refused a registration. See docs/observe.md.

use crate::debugfs::{path, Line};
use crate::host::{Host, Seen, Unseen};
use crate::software::Module;

const REFUSALS: [&str; 2] = ["refusals", "non_gpu"];
/// Peer-memory modules for NVIDIA's GPUs: this project's and NVIDIA's, and their predecessor.
const MODULES: [&str; 2] = ["/sys/module/nvidia_peermem", "/sys/module/nv_peer_mem"];
/// The first PID namespace. The module records process IDs of this namespace.
const FIRST_NAMESPACE: &str = "pid:[4026531836]";

/// Returns `true` if a peer-memory module for NVIDIA's GPUs is loaded, or if loaded modules are not
/// visible.
pub(crate) fn is_loaded(host: &dyn Host) -> bool {
    MODULES.iter().any(|path| host.has(path).unwrap_or(true))
}

/// Returns `true` if the module may register a range over several allocations. NVIDIA's module
/// registers no such range, and has no parameter `max_chunks`.
pub(crate) fn joins_allocations(host: &dyn Host) -> bool {
    match Module::parameter(host, "max_chunks") {
        Ok(most) => most != "1",
        Err(why) => why != Unseen::Absent,
    }
}

/// Returns the lines of a module's file that belong to a process.
fn of(text: &str, process: u32) -> impl Iterator<Item = Line<'_>> {
    text.lines()
        .filter_map(Line::parse)
        .filter(move |line| line.get("tgid").and_then(|tgid| tgid.parse().ok()) == Some(process))
}

/// Checks that this process and the module use the same PID namespace.
fn same_numbers(host: &dyn Host) -> Seen<()> {
    match host.link("/proc/self/ns/pid") {
        Ok(namespace) if namespace != FIRST_NAMESPACE => Err(Unseen::Failed(
            "not usable in another PID namespace".to_owned(),
        )),
        _ => Ok(()),
    }
}

/// Returns the number of listed registrations of a process.
pub(crate) fn registrations_of(host: &dyn Host, process: u32) -> Seen<usize> {
    let text = host.text(&path(host, "registrations"))?;
    same_numbers(host)?;
    Ok(of(&text, process).count())
}

/// Returns the reason, as name and text, why the module last refused a registration of a process.
pub(crate) fn last_refusal(host: &dyn Host, process: u32) -> Seen<Option<String>> {
    let mut last: Option<(f64, String)> = None;
    for file in REFUSALS {
        let text = host.text(&path(host, file))?;
        same_numbers(host)?;
        for line in of(&text, process) {
            let when = line
                .get("last")
                .and_then(|when| when.parse::<f64>().ok())
                .unwrap_or(0.0);
            if last.as_ref().is_none_or(|(newest, _)| *newest <= when) {
                last = Some((when, words(&line)));
            }
        }
    }
    Ok(last.map(|(_, words)| words))
}

fn words(line: &Line<'_>) -> String {
    let reason = line.get("reason").unwrap_or("no reason");
    match line.get("text") {
        Some(text) if !text.is_empty() => format!("{reason}: {text}"),
        _ => reason.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::debugfs::{DIRECTORY, PROC};
    use crate::host::recording::Recording;

    /// Returns a host with only these files. Paths without a leading slash are below `folder`.
    fn host_with(folder: &str, files: &[(&str, &str)], namespace: &str) -> Recording {
        let mut host = Recording::new("a test");
        host.directories.insert("/".to_owned(), Vec::new());
        for (path, text) in files {
            let path = match path.starts_with('/') {
                true => (*path).to_owned(),
                false => format!("{folder}/{path}"),
            };
            host.files.insert(path, (*text).to_owned());
        }
        let link = "/proc/self/ns/pid".to_owned();
        host.links.insert(link, namespace.to_owned());
        host
    }

    fn host(files: &[(&str, &str)], namespace: &str) -> Recording {
        host_with(DIRECTORY, files, namespace)
    }

    const REFUSED: &str = concat!(
        "seq=0 first=1.0 last=62.5 times=2 step=acquire reason=no_room code=-12 tgid=47 pid=48 comm=a \
         text=\"no room in BAR1; tgid=9 less\"\n",
        "seq=1 first=2.0 last=61.5 times=1 step=acquire reason=hole code=-22 tgid=47 pid=48 comm=a text=\"\"\n",
        "seq=2 first=2.0 last=70.5 times=1 step=acquire reason=hole code=-22 tgid=470 pid=48 comm=a text=\"x\"\n",
    );

    #[test]
    fn the_last_reason_of_a_process_is_found() {
        let files = [(REFUSALS[0], REFUSED), (REFUSALS[1], "")];
        for folder in [DIRECTORY, PROC] {
            let host = host_with(folder, &files, FIRST_NAMESPACE);
            let last = last_refusal(&host, 47);
            assert_eq!(
                last,
                Ok(Some("no_room: no room in BAR1; tgid=9 less".to_owned()))
            );
            assert_eq!(last_refusal(&host, 470), Ok(Some("hole: x".to_owned())));
            assert_eq!(last_refusal(&host, 9), Ok(None));
        }
    }

    #[test]
    fn registrations_are_counted_by_process() {
        let text = "id=1 state=mapped tgid=154 pid=154 comm=gdr\nid=2 state=mapped tgid=15 pid=154 comm=gdr\n\
                    id=3 tgid=154 comm=x\n";
        let host = host(&[("registrations", text)], FIRST_NAMESPACE);
        assert_eq!(registrations_of(&host, 154), Ok(2));
        assert_eq!(registrations_of(&host, 15), Ok(1));
        assert_eq!(registrations_of(&host, 1), Ok(0));
    }

    #[test]
    fn unusable_records_are_errors() {
        let elsewhere = host(&[("registrations", "")], "pid:[4026532000]");
        assert!(matches!(
            registrations_of(&elsewhere, 1),
            Err(Unseen::Failed(_))
        ));
        let empty = host(&[], FIRST_NAMESPACE);
        assert_eq!(registrations_of(&empty, 1), Err(Unseen::Absent));
        assert_eq!(last_refusal(&empty, 1), Err(Unseen::Absent));
    }

    #[test]
    fn a_module_joins_allocations_or_not() {
        let path = format!("{}/parameters/max_chunks", MODULES[0]);
        let joins = |files: &[(&str, &str)]| joins_allocations(&host(files, FIRST_NAMESPACE));
        assert!(joins(&[(&path, "1024\n")]));
        assert!(!joins(&[(&path, "1\n")]));
        assert!(!joins(&[(MODULES[0], "")]));
    }

    #[test]
    fn a_loaded_module_is_found() {
        let path = MODULES[0];
        assert!(is_loaded(&host(&[(path, "")], FIRST_NAMESPACE)));
        assert!(!is_loaded(&host(&[], FIRST_NAMESPACE)));
    }
}
