// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Variables of a process: the environment that the process started with (the first environment),
//! and the files from which NCCL reads more variables.
//!
//! `/proc/PID/environ` is the memory in which the kernel put the environment at `execve`. Later
//! changes (`setenv`, `os.environ`) do not appear in this file. A program that sets its title may
//! have overwritten the memory.

use serde::Serialize;

use crate::host::{Host, Seen, Unseen};
use crate::process::seen_by;
use crate::software::nccl::{Setting, Variables, FILE};

/// Prefixes of the variables that are kept. All other variables may be secrets.
const PREFIXES: [&str; 10] = [
    "CUDA_VISIBLE_DEVICES",
    "FI_",
    "HOME",
    "LD_PRELOAD",
    "NCCL_",
    "NIXL_",
    "NVIDIA_VISIBLE_DEVICES",
    "NVSHMEM_",
    "PEERMEM_SHIM",
    "UCX_",
];

/// A file of variables, or the first environment, which the process started with.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Source {
    /// `the first environment`, or a path as the process sees it.
    pub(super) place: String,
    /// Reason why the source could not be read. `None` for a file that does not exist.
    #[serde(serialize_with = "in_words")]
    pub(super) unseen: Option<Unseen>,
    /// `true` if the source exists.
    pub(super) exists: bool,
    #[serde(skip)]
    variables: Vec<(String, String)>,
}

fn in_words<S: serde::Serializer>(why: &Option<Unseen>, serializer: S) -> Result<S::Ok, S::Error> {
    let why = why.as_ref().map(ToString::to_string);
    why.serialize(serializer)
}

/// A variable with its value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Variable {
    pub(super) name: String,
    pub(super) setting: Setting,
}

/// Variables of a process.
pub(super) struct Environment<'a> {
    host: &'a dyn Host,
    pid: u32,
    /// Sources in NCCL's order of precedence.
    pub(super) sources: Vec<Source>,
}

const FIRST: &str = "the first environment";

impl Source {
    fn of(place: &str, text: Seen<Vec<u8>>, end: u8) -> Self {
        let (unseen, exists) = match &text {
            Ok(_) => (None, true),
            Err(Unseen::Absent) => (None, false),
            Err(why) => (Some(why.clone()), true),
        };
        Self {
            place: place.to_owned(),
            unseen,
            exists,
            variables: variables(&text.unwrap_or_default(), end),
        }
    }

    fn get(&self, name: &str) -> Option<&str> {
        let mut variables = self.variables.iter();
        let found = variables.find(|(own, _)| own == name)?;
        Some(&found.1)
    }
}

/// Returns the variables whose names start with one of [`PREFIXES`]. Bytes that are not UTF-8 are
/// replaced.
fn variables(bytes: &[u8], end: u8) -> Vec<(String, String)> {
    let kept = |line: &[u8]| {
        let mut prefixes = PREFIXES.iter();
        let is_ours = prefixes.any(|prefix| line.starts_with(prefix.as_bytes()));
        let line = String::from_utf8_lossy(is_ours.then_some(line)?);
        let (name, value) = line.split_once('=')?;
        Some((name.to_owned(), value.trim().to_owned()))
    };
    bytes.split(|byte| *byte == end).filter_map(kept).collect()
}

impl<'a> Environment<'a> {
    /// Reads the variables of a process whose real user ID is `uid`.
    pub(super) fn scan(host: &'a dyn Host, pid: u32, uid: Option<u32>) -> Self {
        let bytes = host.bytes(&format!("/proc/{pid}/environ"));
        let first = Source::of(FIRST, bytes, b'\0');
        let file = |path: &str| Source::of(path, host.bytes(&seen_by(pid, path)), b'\n');
        // NCCL reads `NCCL_CONF_FILE`, or else the file in the home directory of the user.
        let named = first.get("NCCL_CONF_FILE").filter(|path| !path.is_empty());
        let home = || {
            let of_user = uid.and_then(|uid| home_of(host, pid, uid));
            let home = of_user.or_else(|| first.get("HOME").map(str::to_owned))?;
            Some(format!("{home}/.nccl.conf"))
        };
        let of_user = named.map(str::to_owned).or_else(home);
        let of_user = of_user.filter(|path| path.starts_with('/'));
        let of_user = match (of_user, &first.unseen) {
            (Some(path), _) => Some(file(&path)),
            (None, Some(why)) => Some(Source {
                place: "~/.nccl.conf".to_owned(),
                unseen: Some(why.clone()),
                variables: Vec::new(),
                ..first.clone()
            }),
            (None, None) => None,
        };
        let mut sources = vec![first];
        sources.extend(of_user);
        sources.push(file(FILE));
        Self { host, pid, sources }
    }

    /// Returns all variables, sorted by name.
    pub(super) fn all(&self) -> Vec<Variable> {
        let names = self.sources.iter().flat_map(|it| &it.variables);
        let mut names: Vec<&String> = names.map(|(name, _)| name).collect();
        names.sort();
        names.dedup();
        let of = |name: &String| {
            let setting = self.setting(name).filter(|_| name != "HOME")?;
            let name = name.clone();
            Some(Variable { name, setting })
        };
        names.into_iter().filter_map(of).collect()
    }
}

impl Variables for Environment<'_> {
    fn setting(&self, name: &str) -> Option<Setting> {
        let mut sources = self.sources.iter();
        // NCCL reads only its own variables from its files.
        sources.find_map(|source| {
            let is_read = source.place == FIRST || name.starts_with("NCCL_");
            let value = source.get(name).filter(|_| is_read)?.to_owned();
            let place = format!("in {}", source.place);
            Some(Setting { value, place })
        })
    }

    fn sees(&self, path: &str) -> Seen<bool> {
        match self.host.bytes(&seen_by(self.pid, path)) {
            Ok(_) => Ok(true),
            Err(Unseen::Absent) => Ok(false),
            Err(why) => Err(why),
        }
    }
}

/// Returns the home directory in the `/etc/passwd` that the process sees. If the process runs in
/// its own user namespace, its user ID there can differ from `uid`. This function therefore
/// translates `uid` into that namespace before it searches the file.
fn home_of(host: &dyn Host, pid: u32, uid: u32) -> Option<String> {
    let map = host
        .text(&format!("/proc/{pid}/uid_map"))
        .unwrap_or_default();
    let uid = inside(&map, uid);
    let passwd = host.text(&seen_by(pid, "/etc/passwd")).ok()?;
    passwd.lines().find_map(|line| {
        let fields: Vec<&str> = line.split(':').collect();
        let is_it = fields.get(2)?.parse() == Ok(uid);
        let home = fields.get(5).filter(|_| is_it)?;
        Some(home.trim_end_matches('/').to_owned())
    })
}

/// Translates a user ID into the user namespace of the process, by its `/proc/PID/uid_map`.
fn inside(map: &str, uid: u32) -> u32 {
    let mapped = map.lines().find_map(|line| {
        let numbers: Vec<u32> = line
            .split_whitespace()
            .map_while(|it| it.parse().ok())
            .collect();
        let [first, outside, count] = numbers[..] else {
            return None;
        };
        let offset = uid.checked_sub(outside).filter(|offset| *offset < count)?;
        first.checked_add(offset)
    });
    mapped.unwrap_or(uid)
}

#[cfg(test)]
mod tests {
    use super::*;

    use proptest::prelude::*;

    #[test]
    fn a_user_has_another_number_in_a_namespace() {
        assert_eq!(inside("0 0 4294967295", 1000), 1000);
        assert_eq!(inside("0 1000 1\n1 100000 65536", 1000), 0);
        assert_eq!(inside("0 1000 1\n1 100000 65536", 100_004), 5);
        assert_eq!(inside("", 7), 7);
        assert_eq!(inside("4294967295 0 9", 7), 7);
    }

    #[test]
    fn only_known_variables_are_kept() {
        let kept = variables(
            b"SECRET=NCCL_A=1\0NCCL_B=2\0UCX_TLS=\xff,rc\0NCCL_C\0NCCL_B=3",
            0,
        );
        let kept: Vec<(&str, &str)> = kept.iter().map(|it| (&*it.0, &*it.1)).collect();
        assert_eq!(
            kept,
            [("NCCL_B", "2"), ("UCX_TLS", "\u{fffd},rc"), ("NCCL_B", "3")]
        );
    }

    proptest! {
        #[test]
        fn nothing_read_is_a_panic(bytes in any::<Vec<u8>>(), text in "[0-9 \n]{0,60}") {
            variables(&bytes, 0);
            inside(&text, 1000);
        }
    }
}
