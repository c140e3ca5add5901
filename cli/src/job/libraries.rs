// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Libraries that a process has mapped, and their versions.

use std::cell::RefCell;
use std::collections::BTreeMap;

use regex::Regex;
use serde::Serialize;

use crate::host::{Host, Seen, Unseen};
use crate::process::seen_by;

/// Name of the preload library that registers by dma-buf.
pub(super) const PRELOAD: &str = "libpeermem_preload";

/// A library that `job` reports.
struct Known {
    name: &'static str,
    /// Beginning of the file's name, before `.so`.
    stem: &'static str,
    /// Text that precedes the version in the contents of the library.
    text: Option<&'static str>,
    /// Beginning of the name of the Python package that has the library, and the beginning of the
    /// library's path in `site-packages`.
    package: Option<(&'static str, &'static str)>,
}

const fn known(name: &'static str, stem: &'static str) -> Known {
    Known {
        name,
        stem,
        text: None,
        package: None,
    }
}

const KNOWN: &[Known] = &[
    Known {
        text: Some("NCCL version "),
        package: Some(("nvidia_nccl_cu", "nvidia/nccl/")),
        ..known("NCCL", "libnccl")
    },
    Known {
        package: Some(("libucx_cu", "libucx/")),
        ..known("UCX", "libucp")
    },
    known("UCX (InfiniBand)", "libuct_ib"),
    known("UCX (CUDA)", "libuct_cuda"),
    Known {
        package: Some(("nixl_cu", ".nixl_cu")),
        ..known("NIXL", "libnixl")
    },
    Known {
        text: Some("NVSHMEM v"),
        package: Some(("nvidia_nvshmem_cu", "nvidia/nvshmem/")),
        ..known("NVSHMEM", "libnvshmem_host")
    },
    known("libfabric", "libfabric"),
    known("libibverbs", "libibverbs"),
    known("libmlx5", "libmlx5"),
    known("libcuda", "libcuda"),
    known("peermem preload", PRELOAD),
];

/// Origin of a version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Origin {
    FileName,
    /// The `dist-info` directory of the Python package.
    Package,
    /// Text in the library.
    Text,
}

/// A mapped library.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Library {
    pub(super) name: &'static str,
    /// Path as the process sees it.
    pub(super) path: String,
    pub(super) version: Option<String>,
    pub(super) version_from: Option<Origin>,
    /// `true` if the file was removed or replaced after the process mapped it.
    pub(super) is_deleted: bool,
}

impl Library {
    /// Returns the numbers at the beginning of the version: `[2, 28]` for `2.28.3+cuda12`.
    pub(super) fn numbers(&self) -> Option<Vec<u32>> {
        let version = self.version.as_deref()?;
        let numbers: Vec<u32> = version.split('.').map_while(|it| it.parse().ok()).collect();
        (!numbers.is_empty()).then_some(numbers)
    }
}

/// A mapped file: a line of `/proc/PID/maps`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Mapping<'a> {
    path: &'a str,
    is_deleted: bool,
    range: &'a str,
    /// Device and inode.
    file: (&'a str, &'a str),
}

/// Parses a line of `/proc/PID/maps`: range, permissions, offset, device, inode, path.
fn mapping(line: &str) -> Option<Mapping<'_>> {
    let mut rest = line;
    let mut word = || {
        let (word, behind) = rest.split_once(' ')?;
        rest = behind.trim_start_matches(' ');
        Some(word)
    };
    let (range, _, _, device, inode) = (word()?, word()?, word()?, word()?, word()?);
    let path = rest.strip_suffix(" (deleted)");
    let is_deleted = path.is_some();
    let path = path.unwrap_or(rest);
    path.starts_with('/').then_some(Mapping {
        path,
        is_deleted,
        range,
        file: (device, inode),
    })
}

/// Returns the known library to which a file belongs by its name, and the library's index. Python
/// packages add a checksum: `libucp-0f3a1b2c.so.0.0.0`.
fn library_of(path: &str) -> Option<(usize, &'static Known)> {
    let file = path.rsplit('/').next()?;
    KNOWN.iter().enumerate().find(|(_, known)| {
        let rest = file.strip_prefix(known.stem);
        let is_sum = |text: &str| text.bytes().all(|byte| byte.is_ascii_hexdigit());
        rest.is_some_and(|rest| match rest.strip_prefix('-') {
            Some(rest) => rest.split_once(".so").is_some_and(|(sum, _)| is_sum(sum)),
            None => rest == ".so" || rest.starts_with(".so."),
        })
    })
}

/// Returns the version in a file's name. Returns `None` for a name such as `libnccl.so.2`, which
/// contains only the number of the binary interface.
fn version_in_name(path: &str) -> Option<String> {
    let (_, version) = path.rsplit('/').next()?.split_once(".so.")?;
    let parts: Vec<&str> = version.split('.').collect();
    let is_number = |part: &&str| part.bytes().all(|byte| byte.is_ascii_digit());
    // The names of UCX's files always have the version 0.0.0.
    let is_none = parts.iter().all(|part| *part == "0");
    (parts.len() > 1 && parts.iter().all(is_number) && !is_none).then(|| version.to_owned())
}

/// Returns the version of a Python package from the names in `site-packages`.
fn version_of_package(names: &[String], package: &str) -> Option<String> {
    names.iter().find_map(|name| {
        let (own, version) = name.strip_suffix(".dist-info")?.rsplit_once('-')?;
        own.starts_with(package).then(|| version.to_owned())
    })
}

/// Reader of mapped libraries, which reads the text of each file once.
pub(super) struct Reader<'a> {
    host: &'a dyn Host,
    texts: RefCell<BTreeMap<(String, String), Option<String>>>,
}

impl<'a> Reader<'a> {
    pub(super) fn new(host: &'a dyn Host) -> Self {
        Self {
            host,
            texts: RefCell::default(),
        }
    }

    /// Returns the libraries of a process.
    pub(super) fn scan(&self, pid: u32) -> Seen<Vec<Library>> {
        let maps = self.host.text(&format!("/proc/{pid}/maps"))?;
        if maps.is_empty() {
            let why = "the process is exiting, or is a thread of the kernel";
            return Err(Unseen::Failed(why.to_owned()));
        }
        // A library has several mappings. Only the first mapping is used.
        let mut found = BTreeMap::new();
        for mapping in maps.lines().filter_map(mapping) {
            if let Some((place, known)) = library_of(mapping.path) {
                let key = (place, mapping.path, mapping.is_deleted);
                found.entry(key).or_insert((known, mapping));
            }
        }
        let found = found.values();
        Ok(found
            .map(|(known, mapping)| self.library(pid, known, mapping))
            .collect())
    }

    fn library(&self, pid: u32, known: &Known, mapping: &Mapping<'_>) -> Library {
        let version = version_in_name(mapping.path).map(|it| (it, Origin::FileName));
        let version = version
            .or_else(|| Some((self.of_package(pid, known, mapping)?, Origin::Package)))
            .or_else(|| Some((self.of_text(pid, known, mapping)?, Origin::Text)));
        Library {
            name: known.name,
            path: mapping.path.to_owned(),
            version_from: version.as_ref().map(|(_, origin)| *origin),
            version: version.map(|(version, _)| version),
            is_deleted: mapping.is_deleted,
        }
    }

    fn of_package(&self, pid: u32, known: &Known, mapping: &Mapping<'_>) -> Option<String> {
        let (package, inside) = known.package.filter(|_| !mapping.is_deleted)?;
        let folder = ["site-packages", "dist-packages"].iter().find_map(|name| {
            let (above, below) = mapping.path.split_once(&format!("/{name}/"))?;
            let is_its = below.starts_with(inside);
            is_its.then(|| seen_by(pid, &format!("{above}/{name}")))
        })?;
        let names = self.host.names(&folder).ok()?;
        version_of_package(&names, package)
    }

    /// Searches the library for its version. Reads the mapped file itself if possible (root only),
    /// because the path may now name another file.
    fn of_text(&self, pid: u32, known: &Known, mapping: &Mapping<'_>) -> Option<String> {
        let before = known.text?;
        let key = (mapping.file.0.to_owned(), mapping.file.1.to_owned());
        if let Some(known) = self.texts.borrow().get(&key) {
            return known.clone();
        }
        let mapped = format!("/proc/{pid}/map_files/{}", mapping.range);
        let text = match self.host.matching(&mapped, before) {
            Err(Unseen::Denied | Unseen::Absent | Unseen::Failed(_)) if !mapping.is_deleted => {
                let path = seen_by(pid, mapping.path);
                self.host.matching(&path, before)
            }
            other => other,
        };
        let version = text.ok().and_then(|text| version_behind(&text, before));
        self.texts.borrow_mut().insert(key, version.clone());
        version
    }
}

/// Returns the first version after a text.
fn version_behind(text: &str, before: &str) -> Option<String> {
    let pattern = format!(r"{}(\d+\.\d+(?:\.\d+)?)", regex::escape(before));
    let found = Regex::new(&pattern).ok()?.captures(text)?;
    found.get(1).map(|version| version.as_str().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::no_panic;

    #[test]
    fn names_of_files() {
        let name = |path: &str| library_of(path).map(|(_, known)| known.name);
        assert_eq!(name("/usr/lib/libnccl.so.2.28.3"), Some("NCCL"));
        assert_eq!(name("/x/libnccl.so"), Some("NCCL"));
        assert_eq!(name("/x/libnccl-net.so"), None);
        assert_eq!(
            name("/x/nixl_cu12.libs/libucp-0f3a1b2c.so.0.0.0"),
            Some("UCX")
        );
        assert_eq!(name("/x/libucp-sm.so"), None);
        assert_eq!(name("/x/libcudart.so.12"), None);
        assert_eq!(name("/x/libpeermem_preload.so"), Some("peermem preload"));
        for (path, version) in [
            ("/x/libnccl.so.2.28.3", Some("2.28.3")),
            ("/x/libcuda.so.580.159.04", Some("580.159.04")),
            ("/x/libibverbs.so.1.14.50.0", Some("1.14.50.0")),
            ("/x/libnccl.so.2", None),
            ("/x/libucp.so.0.0.0", None),
            ("/x/libnccl.so.2.x", None),
            ("/x/libnccl.so", None),
        ] {
            assert_eq!(version_in_name(path).as_deref(), version, "{path}");
        }
    }

    #[test]
    fn lines_of_maps() {
        let line =
            "7f00-7f10 r-xp 00001000 fe:00 1234                       /a b/libnccl.so.2 (deleted)";
        let found = mapping(line).unwrap();
        assert_eq!((found.path, found.is_deleted), ("/a b/libnccl.so.2", true));
        assert_eq!((found.range, found.file), ("7f00-7f10", ("fe:00", "1234")));
        assert_eq!(mapping("7f00-7f10 rw-p 00000000 00:00 0 "), None);
        assert_eq!(mapping("7f00-7f10 rw-p 00000000 00:00 0   [heap]"), None);
        assert_eq!(mapping("x"), None);
    }

    #[test]
    fn versions_of_packages_and_texts() {
        let names = [
            "nvidia_nccl_cu12-2.27.5.dist-info",
            "nixl-0.6.0.dist-info",
            "x.dist-info",
        ];
        let names = names.map(str::to_owned);
        assert_eq!(
            version_of_package(&names, "nvidia_nccl_cu").as_deref(),
            Some("2.27.5")
        );
        assert_eq!(version_of_package(&names, "libucx_cu"), None);
        // NCCL 2.28.3 contains two texts that begin with the same words.
        let text = "NCCL version mismatch with remote peer\0NCCL version 2.28.3+cuda13.0\0";
        assert_eq!(
            version_behind(text, "NCCL version ").as_deref(),
            Some("2.28.3")
        );
        assert_eq!(
            version_behind("NVSHMEM v3.4.5", "NVSHMEM v").as_deref(),
            Some("3.4.5")
        );
        assert_eq!(version_behind("", "NVSHMEM v"), None);
    }

    no_panic!(nothing_read_is_a_panic: mapping, library_of, version_in_name, |it: &str| version_behind(it, "NCCL version "));
}
