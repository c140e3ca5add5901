// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Parses `cases.txt`: the hosts, and the expected output for each. The expected exit status
//! follows from the output.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use crate::host::{exported, system, Entry, Host, Said, CRATES};

pub(crate) struct Case {
    pub(crate) name: String,
    pub(crate) group: String,
    pub(crate) host: Host,
    /// Items that are not ok: `item|verdict|found`, and the sentence about each.
    pub(crate) not_ok: Vec<(String, String)>,
}

#[derive(Default)]
struct Table {
    /// Texts by name. Each name is stored with its braces, as in `{TRIXIE}`.
    texts: Vec<(String, String)>,
    /// Default of `{1}`, and the operations, by name of the host.
    hosts: BTreeMap<String, (String, String)>,
    cases: Vec<Case>,
}

fn table() -> &'static Table {
    static TABLE: OnceLock<Table> = OnceLock::new();
    TABLE.get_or_init(|| Table::parse(include_str!("cases.txt")))
}

/// Returns all cases, or those of one group.
pub(crate) fn cases(group: Option<&str>) -> Vec<&'static Case> {
    let cases = table().cases.iter();
    let cases: Vec<_> = cases
        .filter(|case| group.is_none_or(|group| case.group == group))
        .collect();
    assert!(!cases.is_empty(), "there is no group {group:?}");
    cases
}

/// Returns the host that these operations describe.
pub(crate) fn host(operations: &str) -> Host {
    let mut host = Host::default();
    host.change(operations);
    host
}

impl Host {
    /// Changes the host by operations of `cases.txt`.
    pub(crate) fn change(&mut self, operations: &str) -> &mut Self {
        table().change(self, operations);
        self
    }
}

impl Table {
    fn parse(text: &str) -> Self {
        let mut table = Self::default();
        let mut group = String::new();
        for paragraph in text.replace("\n= ", "\n\n= ").split("\n\n") {
            let mut lines = paragraph.lines().filter(|line| !line.starts_with('#'));
            let Some(first) = lines.next() else { continue };
            let (kind, name) = first.split_once(' ').unwrap_or((first, ""));
            match kind {
                "text" => {
                    for line in std::iter::once(first).chain(lines) {
                        let (name, words) = line[5..].split_once(' ').unwrap();
                        let words = table.with_texts(words);
                        table.texts.push((format!("{{{name}}}"), words));
                    }
                }
                "host" => {
                    let (name, default) = name.split_once(' ').unwrap_or((name, ""));
                    let operations = lines.collect::<Vec<_>>().join("; ");
                    let host = (default.to_owned(), operations);
                    assert!(
                        table.hosts.insert(name.to_owned(), host).is_none(),
                        "{name}"
                    );
                }
                "=" => table.case(&group, name, &lines.collect::<Vec<_>>()),
                _ => {
                    let name = first
                        .strip_prefix('[')
                        .and_then(|name| name.strip_suffix(']'));
                    group = name.unwrap_or_else(|| panic!("{first:?}")).to_owned();
                }
            }
        }
        table
    }

    fn case(&mut self, group: &str, name: &str, lines: &[&str]) {
        let (values, lines) = match lines[0].strip_prefix("for ") {
            Some(values) => (values.split(", ").collect(), &lines[1..]),
            None => (vec![""], lines),
        };
        for value in values {
            let mut host = Host::default();
            self.change(&mut host, &lines[0].replace("{V}", value));
            let not_ok = lines[1..].iter().map(|line| {
                let line = host.place(&self.with_texts(&line.replace("{V}", value)));
                let row = line.strip_prefix("! ").unwrap_or_else(|| panic!("{line}"));
                assert_eq!(row.matches('|').count(), 3, "{row}");
                let (row, sentence) = row.rsplit_once('|').unwrap();
                (row.to_owned(), sentence.to_owned())
            });
            let not_ok = not_ok.collect();
            let name = name.replace("{V}", value);
            let group = group.to_owned();
            self.cases.push(Case {
                name,
                group,
                host,
                not_ok,
            });
        }
    }

    fn with_texts(&self, words: &str) -> String {
        let texts = self.texts.iter();
        texts.fold(words.to_owned(), |words, (name, text)| {
            words.replace(name, text)
        })
    }

    fn change(&self, host: &mut Host, operations: &str) {
        for operation in operations.split("; ") {
            let (name, rest) = operation.split_once(' ').unwrap_or((operation, ""));
            if let Some((default, inside)) = self.hosts.get(name) {
                let argument = if rest.is_empty() { default } else { rest };
                self.change(host, &inside.replace("{1}", argument));
                continue;
            }
            let rest = self
                .with_texts(rest)
                .replace("\\n", "\n")
                .replace("\\t", "\t");
            self.one(host, name, &rest);
        }
    }

    /// Performs the operation `name`. `rest` has the words after the name.
    fn one(&self, host: &mut Host, name: &str, rest: &str) {
        let (first, more) = rest.split_once(' ').unwrap_or((rest, ""));
        match name {
            // The release, and the folder of the headers if it changes too.
            "release" => {
                host.release = first.to_owned();
                if !more.is_empty() {
                    host.headers = more.to_owned();
                }
            }
            "file" => host.add(first, Entry::Text(more.to_owned())),
            // A link and its target.
            "link" => host.add(first, Entry::Link(host.place(more))),
            // A kernel module with its version and licence.
            "module" => {
                let (version, licence) = more.split_once('|').unwrap();
                host.add(first, Entry::Module(licence.to_owned(), version.to_owned()));
            }
            // NVIDIA's driver with this version and licence, as DKMS installs it, and its header.
            "nvidia" => {
                let (version, _) = rest.split_once('|').unwrap();
                let header =
                    format!("file usr/src/nvidia-{version}/nvidia/nv-p2p.h {{P2P_HEADER}}");
                self.change(host, &header);
                self.one(
                    host,
                    "module",
                    &format!("lib/modules/{{R}}/updates/dkms/nvidia.ko {rest}"),
                );
            }
            // A Module.symvers with one symbol and its module.
            "symvers" => {
                let (symbol, module) = more.split_once(' ').unwrap();
                host.add(first, Entry::Text(exported(symbol, module)));
            }
            // A folder with the files that the kernel's build leaves for Rust modules, made by this
            // compiler.
            "crates" => {
                for name in CRATES {
                    // rustc writes the length of its version before the version.
                    let text = format!("rust\0\0\0\nA{more}\u{1}abort_unwind");
                    host.add(&format!("{first}/{name}"), Entry::Text(text));
                }
            }
            // The kernel's configuration as a separate file, for a host without headers.
            "configuration" => host.add(first, Entry::Text(host.options())),
            // Removes a file or a folder, which must exist.
            "without" => {
                let path = host.place(rest);
                let inside = format!("{path}/");
                let before = host.files.len();
                host.files
                    .retain(|name, _| *name != path && !name.starts_with(&inside));
                assert!(host.files.len() < before, "there is no {path}");
            }
            // A tool that always prints this text.
            "tool" => host.script(first, format!("#!/bin/sh\ncat <<'END'\n{more}\nEND\n")),
            // A tool that is this shell script.
            "script" => host.script(first, more.to_owned()),
            // A tool that fails without output.
            "fails" => host.script(rest, "#!/bin/sh\nexit 1\n".to_owned()),
            // The tool of this machine.
            "system" => {
                let script = format!("#!/bin/sh\nexec {} \"$@\"\n", system(rest).display());
                host.script(rest, script);
            }
            "without-tool" => assert!(host.tools.remove(rest).is_some(), "there is no {rest}"),
            // Removes the tools that a fresh machine lacks.
            "bare" => {
                self.change(
                    host,
                    "without-tool rustc; without-tool bindgen; without-tool make",
                );
                host.tools
                    .retain(|name, _| !name.contains("gcc") && !name.ends_with("ld"));
            }
            "set" => drop(host.config.insert(first.to_owned(), more.to_owned())),
            "unset" => assert!(host.config.remove(rest).is_some(), "{rest} is not set"),
            "argument" => host.arguments.push(host.place(rest)),
            "variable" => host.environment.push((first.to_owned(), more.to_owned())),
            _ => panic!("{name}: no operation, and no host"),
        }
    }
}

impl Said {
    /// Fails unless the output has exactly the expected items besides those that are ok.
    pub(crate) fn is(&self, expected: &[(String, String)]) -> Result<(), String> {
        let mut table = String::new();
        let mut sentences = String::new();
        for (row, sentence) in expected {
            let item = row.split('|').next().unwrap_or_default();
            table.push_str(&row.replace("|useless|", "|remark|"));
            table.push('\n');
            sentences.push_str(&format!("{item}: {sentence}\n"));
        }
        let count = |wanted| expected.iter().filter(|row| row.0.contains(wanted)).count();
        let (status, last) = match (count("|missing|"), count("|useless|")) {
            (0, 0) => (0, "It can be built.".to_owned()),
            (0, _) => (
                0,
                "It can be built, but will not load on this host yet.".to_owned(),
            ),
            (missing, _) => (1, format!("It cannot be built: {missing} missing.")),
        };
        let expected = format!("{table}\n{sentences}{status}: {last}");

        let mut parts: Vec<&str> = self.text.trim_end().split("\n\n").collect();
        let last = parts.pop().unwrap_or_default();
        let rows = parts.get(1).copied().unwrap_or_default();
        let head = rows.lines().next().unwrap_or_default();
        let (Some(verdict), Some(found)) = (head.find("verdict"), head.find("found")) else {
            return Err(format!("no table:\n{}{}", self.text, self.errors));
        };
        let mut said = String::new();
        for line in rows.lines().skip(1) {
            let cells = [&line[..verdict], &line[verdict..found], &line[found..]];
            let cells = cells.map(str::trim_end);
            if cells[1] != "ok" {
                said.push_str(&cells.join("|"));
                said.push('\n');
            }
        }
        said.push('\n');
        for line in parts.iter().skip(2).flat_map(|part| part.lines()) {
            said.push_str(line);
            said.push('\n');
        }
        let status = self.status.unwrap_or(-1);
        said.push_str(&format!("{status}: {last}"));
        if said != expected || !self.errors.is_empty() {
            return Err(format!(
                "it said\n{said}\n{}instead of\n{expected}",
                self.errors
            ));
        }
        Ok(())
    }
}
