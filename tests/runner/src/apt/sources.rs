// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! apt's sources on this machine, in both formats.

use std::fs;
use std::path::PathBuf;

use anyhow::{anyhow, Context as _, Result};

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Source {
    pub(super) uris: Vec<String>,
    pub(super) suites: Vec<String>,
    pub(super) signed_by: Option<String>,
}

/// Returns the deb822 entries that provide binary packages.
pub(super) fn deb822(text: &str) -> Vec<Source> {
    let mut sources = Vec::new();
    for stanza in text.split("\n\n") {
        let mut fields: Vec<(String, String)> = Vec::new();
        for line in stanza.lines() {
            if line.starts_with('#') {
                continue;
            }
            if line.starts_with([' ', '\t']) {
                if let Some((_, value)) = fields.last_mut() {
                    value.push('\n');
                    value.push_str(line);
                }
            } else if let Some((name, value)) = line.split_once(':') {
                fields.push((name.trim().to_lowercase(), value.trim().to_owned()));
            }
        }
        let field = |name: &str| {
            fields
                .iter()
                .find(|(field, _)| field == name)
                .map(|(_, value)| value.as_str())
        };
        let words = |name: &str| -> Vec<String> {
            field(name)
                .unwrap_or_default()
                .split_whitespace()
                .map(str::to_owned)
                .collect()
        };
        let enabled = field("enabled").is_none_or(|value| !value.eq_ignore_ascii_case("no"));
        if enabled && words("types").iter().any(|kind| kind == "deb") {
            sources.push(Source {
                uris: words("uris"),
                suites: words("suites"),
                signed_by: field("signed-by").map(str::to_owned),
            });
        }
    }
    sources
}

/// Returns the one-line entries that provide binary packages.
pub(super) fn one_line(text: &str) -> Vec<Source> {
    let mut sources = Vec::new();
    for line in text.lines() {
        let line = line.split('#').next().unwrap_or_default().trim();
        let Some(mut rest) = line
            .strip_prefix("deb")
            .filter(|rest| rest.starts_with([' ', '\t', '[']))
        else {
            continue;
        };
        rest = rest.trim_start();
        let mut signed_by = None;
        if let Some(inner) = rest.strip_prefix('[') {
            let Some((options, after)) = inner.split_once(']') else {
                continue;
            };
            signed_by = options
                .split_whitespace()
                .find_map(|option| option.strip_prefix("signed-by="))
                .map(|value| value.replace(',', " "));
            rest = after;
        }
        let mut words = rest.split_whitespace();
        if let (Some(uri), Some(suite)) = (words.next(), words.next()) {
            sources.push(Source {
                uris: vec![uri.to_owned()],
                suites: vec![suite.to_owned()],
                signed_by,
            });
        }
    }
    sources
}

/// Returns the first entry that is Debian's main archive. This archive has the release itself, and
/// not only security updates or a third party's suite.
pub(super) fn archive(sources: &[Source], codename: &str) -> Option<Source> {
    sources
        .iter()
        .find(|source| {
            !source.uris.is_empty()
                && source.suites.iter().any(|suite| {
                    [codename, "stable", "testing", "unstable", "sid"].contains(&suite.as_str())
                })
        })
        .cloned()
}

pub(super) fn codename() -> Result<String> {
    let text = fs::read_to_string("/etc/os-release").context("/etc/os-release")?;
    text.lines()
        .find_map(|line| line.strip_prefix("VERSION_CODENAME="))
        .map(|name| name.trim_matches('"').to_owned())
        .ok_or_else(|| anyhow!("/etc/os-release names no release; the test runner needs Debian"))
}

pub(super) fn machine_sources() -> Vec<Source> {
    let mut sources = Vec::new();
    let mut files = vec![PathBuf::from("/etc/apt/sources.list")];
    if let Ok(entries) = fs::read_dir("/etc/apt/sources.list.d") {
        let mut more: Vec<PathBuf> = entries
            .filter_map(|entry| Some(entry.ok()?.path()))
            .collect();
        more.sort();
        files.extend(more);
    }
    for file in files {
        let Ok(text) = fs::read_to_string(&file) else {
            continue;
        };
        match file.extension().and_then(|suffix| suffix.to_str()) {
            Some("sources") => sources.extend(deb822(&text)),
            Some("list") => sources.extend(one_line(&text)),
            _ => {}
        }
    }
    sources
}

pub(super) const NO_ARCHIVE: &str = "apt's sources on this machine name no Debian archive";

pub(super) fn machine_archive() -> Result<Source> {
    archive(&machine_sources(), &codename()?).context(NO_ARCHIVE)
}

/// Returns the machine's archive of a suite. Security updates may have a separate archive.
pub(super) fn archive_of(sources: &[Source], codename: &str, suite: &str) -> Option<Source> {
    let own = format!("{codename}-security");
    let security = sources
        .iter()
        .find(|source| !source.uris.is_empty() && source.suites.contains(&own))
        .filter(|_| suite.ends_with("-security"));
    security.cloned().or_else(|| archive(sources, codename))
}

/// Returns `true` if all suites of `source` are Debian's suites for the release `codename`.
pub(super) fn is_of(source: &Source, codename: &str) -> bool {
    let of = |suite: &String| {
        suite
            .strip_prefix(codename)
            .is_some_and(|rest| ["", "-updates", "-security", "-backports"].contains(&rest))
    };
    !source.uris.is_empty() && !source.suites.is_empty() && source.suites.iter().all(of)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCES: &str = "Types: deb\n# a comment\nURIs: http://mirror.example/debian\nSuites: bookworm bookworm-updates\n\
        Components: main\nSigned-By: /usr/share/keyrings/a.gpg\n\n\
        Types: deb deb-src\nURIs: http://mirror.example/security\nSuites: bookworm-security\nComponents: main\n\n\
        Enabled: no\nTypes: deb\nURIs: http://off.example\nSuites: bookworm\nComponents: main\n";

    #[test]
    fn deb822_sources() {
        let sources = deb822(SOURCES);
        assert_eq!(sources.len(), 2);
        assert_eq!(sources[0].uris, ["http://mirror.example/debian"]);
        assert_eq!(sources[0].suites, ["bookworm", "bookworm-updates"]);
        assert_eq!(
            sources[0].signed_by.as_deref(),
            Some("/usr/share/keyrings/a.gpg")
        );
        assert_eq!(sources[1].signed_by, None);
    }

    #[test]
    fn deb822_takes_keys_over_several_lines() {
        let text = "Types: deb\nURIs: http://a\nSuites: sid\nSigned-By:\n -----BEGIN-----\n .\n abc\n -----END-----\n";
        let sources = deb822(text);
        assert_eq!(
            sources[0].signed_by.as_deref(),
            Some("\n -----BEGIN-----\n .\n abc\n -----END-----")
        );
    }

    #[test]
    fn one_line_sources() {
        let text = "# deb http://no.example sid main\n\
            deb [arch=amd64 signed-by=/k/a.gpg,/k/b.gpg] http://third.example/x nodistro main\n\
            deb http://mirror.example/debian trixie main contrib # why\n\
            deb-src http://mirror.example/debian trixie main\n";
        let sources = one_line(text);
        assert_eq!(sources.len(), 2);
        assert_eq!(sources[0].signed_by.as_deref(), Some("/k/a.gpg /k/b.gpg"));
        assert_eq!(sources[1].uris, ["http://mirror.example/debian"]);
    }

    #[test]
    fn the_archive_is_the_one_with_the_release() {
        let mut sources = one_line("deb http://third.example/x nodistro main\n");
        assert_eq!(archive(&sources, "bookworm"), None);
        sources.extend(deb822(SOURCES));
        let found = archive(&sources, "bookworm").unwrap();
        assert_eq!(found.uris, ["http://mirror.example/debian"]);
        assert_eq!(archive(&sources, "trixie"), None);
        let of = |suite| archive_of(&sources, "bookworm", suite).unwrap();
        assert_eq!(of("bullseye").uris, ["http://mirror.example/debian"]);
        assert_eq!(of("bullseye-security").suites, ["bookworm-security"]);
        let one = [archive(&sources, "bookworm").unwrap()];
        let found = archive_of(&one, "bookworm", "bullseye-security");
        assert_eq!(found.as_ref(), one.first());
    }

    #[test]
    fn updates_belong_to_the_release_but_third_parties_do_not() {
        let of = |codename: &str| -> Vec<String> {
            let mut sources = one_line("deb http://third.example/x bookworm-pgdg main\n");
            sources.extend(one_line("deb http://third.example/x cloud-bookworm main\n"));
            sources.extend(deb822(SOURCES));
            let found = sources.iter().filter(|source| is_of(source, codename));
            found.map(|source| source.suites.join(" ")).collect()
        };
        assert_eq!(
            of("bookworm"),
            ["bookworm bookworm-updates", "bookworm-security"]
        );
        assert!(of("book").is_empty());
    }
}
