// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! ELF files of the peer-memory module and of the modules that it calls. The files are readable
//! even if no module is loaded. They are the fact [`ModuleFiles`](Fact::ModuleFiles), as JSON.
//!
//! Sections and symbols are those of kbuild's `modpost` and the kernel's `kernel/module/version.c`.
//! libkmod reads the same sections and symbols.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Cursor, Read};
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::SystemTime;

use flate2::read::GzDecoder;
use object::read::elf::ElfFile64;
use object::{Endianness, Object as _, ObjectSection as _, ObjectSymbol as _, SymbolSection};
use serde::{Deserialize, Serialize};
use xz4rust::{XzDecoder, XzReader};

use super::facts::REGISTER;
use super::recording::Recorded;
use super::{Fact, Host, Seen, Unseen};

/// Upper bound on the decompressed size of a file, in bytes. The proprietary nvidia.ko has about
/// 100 MB.
const LONGEST: u64 = 256 << 20;
/// Number of bytes to decompress at a time.
const PIECE: usize = 1 << 16;
/// Dictionary size of `xz` in the kernel's build, and dictionary size of `xz -9`, in bytes.
const DICTIONARY: usize = 1 << 20;
const LARGEST_DICTIONARY: usize = 64 << 20;

/// End of a signed module (`scripts/sign-file.c`).
const SIGNATURE: &[u8] = b"~Module signature appended~\n";

/// Size of an entry of `__versions`, in bytes: a CRC as `unsigned long`, then the name.
const VERSION: usize = 64;

/// The file that modprobe would load, and the files of ib_core, ib_uverbs and nvidia.ko.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Files {
    pub(crate) module: File,
    pub(crate) others: Vec<File>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct File {
    /// Path below the modules' directory.
    pub(crate) path: String,
    /// Reason why the other fields are unknown.
    pub(crate) unread: Option<String>,
    /// Name in the kernel: `nvidia` for Debian's `nvidia-current-open.ko`.
    pub(crate) name: Option<String>,
    pub(crate) vermagic: Option<String>,
    /// Checksum of the sources, which sysfs also shows for a loaded module.
    pub(crate) srcversion: Option<String>,
    pub(crate) is_signed: bool,
    /// Flavour of nvidia.ko that peermem-rs was built for. `None`: the open flavour.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) driver_flavour: Option<String>,
    /// Undefined symbols, each with its CRC at build time if the kernel compares CRCs.
    pub(crate) needs: BTreeMap<String, Option<u32>>,
    /// Exported symbols that the module needs, each with its CRC.
    pub(crate) exports: BTreeMap<String, Option<u32>>,
}

impl Files {
    /// Returns the files, or `None` if modprobe knows no peer-memory module.
    pub(crate) fn scan(host: &dyn Host) -> Seen<Option<Self>> {
        match Self::of(host) {
            Ok(files) => Ok(Some(files)),
            Err(Unseen::Absent) => Ok(None),
            Err(why) => Err(why),
        }
    }
}

impl Recorded for Files {
    const FACT: Fact = Fact::ModuleFiles;
    const MISREAD: &'static str = "the recorded module files are not understood";

    /// Caches the last result, because the files seldom change and the exporter calls this function
    /// at each scrape.
    fn ask(host: &dyn Host) -> Seen<Self> {
        static LAST: Mutex<Option<(Vec<Stamp>, Files)>> = Mutex::new(None);
        let kernel = host.text("/proc/sys/kernel/osrelease")?;
        let directory = format!("/lib/modules/{kernel}");
        let paths = paths(&host.text(&format!("{directory}/modules.dep"))?);
        let stamps = paths.iter().map(|path| stamp(&directory, path));
        let stamps: Vec<Stamp> = stamps.flatten().collect();
        let mut last = LAST.lock().unwrap_or_else(|error| error.into_inner());
        if let Some((_, files)) = last.as_ref().filter(|(of, _)| *of == stamps) {
            return Ok(files.clone());
        }
        let Some((module, others)) = paths.split_first() else {
            return Err(Unseen::Absent);
        };
        let file = |path: &String, wanted: Option<&File>| match contents(&directory, path) {
            Ok(bytes) => File::parse(path, &bytes, wanted),
            Err(why) => File::unread(path, why),
        };
        let module = file(module, None);
        let others = others.iter().map(|path| file(path, Some(&module)));
        let files = Self {
            others: others.collect(),
            module,
        };
        *last = Some((stamps, files.clone()));
        Ok(files)
    }
}

/// Returns the full path of a file in `modules.dep`. The paths in `modules.dep` are absolute or
/// below the modules' directory.
fn place(directory: &str, path: &str) -> PathBuf {
    Path::new(directory).join(path)
}

/// Path, length and modification time of a file.
type Stamp = (String, u64, Option<SystemTime>);

fn stamp(directory: &str, path: &str) -> Option<Stamp> {
    let about = fs::metadata(place(directory, path)).ok()?;
    Some((path.to_owned(), about.len(), about.modified().ok()))
}

/// Returns paths from `modules.dep`: the peer-memory module first, then the modules that it calls.
/// Returns an empty list if there is no peer-memory module.
fn paths(dependencies: &str) -> Vec<String> {
    let all = || dependencies.lines().filter_map(|line| line.split_once(':'));
    let Some((module, needs)) = all().find(|(path, _)| is_peermem(path)) else {
        return Vec::new();
    };
    // Some NIC vendors ship peer memory as a module beside the kernel's ib_core: ib_peer_mem.
    let is_core = |path: &&str| {
        matches!(
            stem(path),
            Some("ib_core" | "ib_peer_mem" | "ib_uverbs" | "nvidia")
        )
    };
    let is_driver = |path: &&str| stem(path).is_some_and(|stem| stem.starts_with("nvidia"));
    let mut others: Vec<&str> = needs.split_whitespace().filter(is_driver).collect();
    others.extend(all().map(|(path, _)| path).filter(is_core));
    others.sort_unstable();
    others.dedup();
    let paths = std::iter::once(module).chain(others);
    paths.map(str::to_owned).collect()
}

/// Returns the name of a module's file without `.ko` and later suffixes.
pub(crate) fn stem(path: &str) -> Option<&str> {
    let (stem, _) = path.rsplit('/').next()?.split_once(".ko")?;
    Some(stem)
}

/// Returns `true` if a file is a peer-memory module, NVIDIA's or ours.
pub(crate) fn is_peermem(path: &str) -> bool {
    stem(path).is_some_and(|stem| stem.starts_with("nvidia") && stem.ends_with("peermem"))
}

/// Returns the decompressed contents of a module's file.
fn contents(directory: &str, path: &str) -> Result<Vec<u8>, String> {
    let file = fs::File::open(place(directory, path)).map_err(|error| error.to_string())?;
    decompressed(plain(file, LONGEST)?, LONGEST)
}

/// Decompresses `bytes`. The first bytes decide the format, as in the kernel
/// (`kernel/module/decompress.c`). Fails if the result has more than `most` bytes.
fn decompressed(bytes: Vec<u8>, most: u64) -> Result<Vec<u8>, String> {
    if bytes.starts_with(b"\x28\xb5\x2f\xfd") {
        let decoder = ruzstd::decoding::StreamingDecoder::new(bytes.as_slice());
        return decoder
            .map_err(|error| error.to_string())
            .and_then(|decoder| plain(decoder, most))
            .map_err(|why| format!("it is compressed (zstd): {why}"));
    }
    if bytes.starts_with(b"\xfd7zXZ") {
        let decoder = XzDecoder::in_heap_with_alloc_dict_size(DICTIONARY, LARGEST_DICTIONARY);
        let piece = NonZeroUsize::new(PIECE).unwrap_or(NonZeroUsize::MIN);
        let reader = XzReader::new_with_buffer_size_and_decoder(Cursor::new(bytes), piece, decoder);
        return plain(reader, most).map_err(|why| format!("it is compressed (xz): {why}"));
    }
    if bytes.starts_with(b"\x1f\x8b") {
        return plain(GzDecoder::new(bytes.as_slice()), most)
            .map_err(|why| format!("it is compressed (gzip): {why}"));
    }
    Ok(bytes)
}

fn plain(decoder: impl Read, most: u64) -> Result<Vec<u8>, String> {
    let mut decoder = decoder.take(most.saturating_add(1));
    let mut plain = Vec::new();
    // The piece is small, because a decoder's own buffer grows to the size of the target buffer.
    let mut piece = [0; PIECE];
    loop {
        match decoder
            .read(&mut piece)
            .map_err(|error| error.to_string())?
        {
            // An error is returned, because a truncated file would seem to have fewer symbols.
            0 if decoder.limit() == 0 => return Err(format!("it has more than {most} bytes")),
            0 => return Ok(plain),
            count => plain.extend(piece.iter().take(count)),
        }
    }
}

impl File {
    fn unread(path: &str, why: impl Into<String>) -> Self {
        Self {
            path: path.to_owned(),
            unread: Some(why.into()),
            ..Self::default()
        }
    }

    /// Parses a file. If there is a `caller`, keeps only the exports that `caller` needs.
    fn parse(path: &str, bytes: &[u8], caller: Option<&Self>) -> Self {
        let Ok(elf) = ElfFile64::<Endianness>::parse(bytes) else {
            return Self::unread(path, "it is not an ELF file");
        };
        let section = |name: &str| -> &[u8] {
            let section = elf.section_by_name(name);
            section.and_then(|it| it.data().ok()).unwrap_or_default()
        };
        let info = strings(section(".modinfo"));
        let info = |key: &str| {
            let mut values = info.iter().filter_map(|line| line.split_once('='));
            let value = values
                .find(|(name, _)| *name == key)
                .map(|(_, value)| value);
            value.map(str::to_owned)
        };
        let mut file = Self {
            path: path.to_owned(),
            name: info("name"),
            vermagic: info("vermagic").map(|text| text.trim_end().to_owned()),
            srcversion: info("srcversion"),
            is_signed: bytes.ends_with(SIGNATURE),
            driver_flavour: info("driver_flavour"),
            ..Self::default()
        };
        let endian = elf.endian();
        let symbols = elf
            .symbols()
            .filter_map(|symbol| Some((symbol.name().ok()?, symbol)));
        let Some(caller) = caller else {
            let versions = match section("__version_ext_names") {
                [] => versions(section("__versions"), endian),
                // If a file has `__version_ext_names`, the kernel ignores `__versions`.
                names => {
                    let crcs = section("__version_ext_crcs").chunks_exact(4);
                    let crcs = crcs.filter_map(|bytes| word(bytes, endian));
                    strings(names).into_iter().zip(crcs).collect()
                }
            };
            let needs = symbols.filter(|(name, symbol)| symbol.is_undefined() && !name.is_empty());
            file.needs = needs
                .map(|(name, _)| (name.to_owned(), versions.get(name).copied()))
                .collect();
            return file;
        };
        let is_wanted = |name: &str| name == REGISTER || caller.needs.contains_key(name);
        for (name, symbol) in symbols {
            if let Some(name) = name
                .strip_prefix("__ksymtab_")
                .filter(|name| is_wanted(name))
            {
                file.exports.entry(name.to_owned()).or_default();
            } else if let Some(name) = name.strip_prefix("__crc_").filter(|name| is_wanted(name)) {
                // Up to Linux 5.18, the symbol's value is the CRC. In later kernels, the value is
                // the offset of the CRC.
                let crc = match symbol.section() {
                    SymbolSection::Absolute => u32::try_from(symbol.address()).ok(),
                    SymbolSection::Section(index) => elf
                        .section_by_index(index)
                        .ok()
                        .and_then(|section| section.data().ok())
                        .and_then(|data| data.get(usize::try_from(symbol.address()).ok()?..))
                        .and_then(|bytes| word(bytes, endian)),
                    _ => None,
                };
                file.exports.insert(name.to_owned(), crc);
            }
        }
        file
    }

    /// Returns `true` if peermem-rs was built for the proprietary nvidia.ko, or `None` if the file
    /// was not read.
    pub(crate) fn is_for_proprietary(&self) -> Option<bool> {
        let flavour = self.driver_flavour.as_deref();
        self.unread
            .is_none()
            .then(|| flavour == Some("proprietary"))
    }

    /// Returns `true` if the file has CRCs. For such a file, the kernel compares the CRCs instead
    /// of the kernel release.
    pub(crate) fn has_crcs(&self) -> bool {
        self.needs.values().any(Option::is_some)
    }
}

/// Splits bytes into strings that end with a NUL.
fn strings(bytes: &[u8]) -> Vec<&str> {
    let texts = bytes.split(|byte| *byte == 0);
    let texts = texts.filter_map(|text| std::str::from_utf8(text).ok());
    texts.filter(|text| !text.is_empty()).collect()
}

/// Returns the first four bytes as a number.
fn word(bytes: &[u8], endian: Endianness) -> Option<u32> {
    let bytes = *bytes.first_chunk()?;
    Some(match endian {
        Endianness::Little => u32::from_le_bytes(bytes),
        Endianness::Big => u32::from_be_bytes(bytes),
    })
}

/// Parses `__versions`.
fn versions(bytes: &[u8], endian: Endianness) -> BTreeMap<&str, u32> {
    let entry = |bytes: &[u8]| Some((word(bytes, endian)?, word(bytes.get(4..)?, endian)?));
    let mut found = BTreeMap::new();
    let mut rest = bytes;
    while let Some((first, second)) = entry(rest) {
        // An entry usually starts with the CRC as an `unsigned long` of 64 bits, of which the upper
        // 32 are zero. Some Ubuntu kernels write the length of the entry and a CRC of 32 bits
        // instead.
        let (length, crc) = match (endian, first, second) {
            (Endianness::Little, crc, 0) | (Endianness::Big, 0, crc) => (VERSION, crc),
            (_, length, crc) => (usize::try_from(length).unwrap_or(usize::MAX), crc),
        };
        let Some((name, next)) = rest
            .split_at_checked(length)
            .and_then(|(entry, next)| Some((strings(entry.get(8..)?), next)))
        else {
            break;
        };
        found.extend(name.first().map(|name| (*name, crc)));
        rest = next;
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    use proptest::prelude::*;

    /// Section of a symbol, or a substitute for a section.
    #[derive(Clone, Copy)]
    enum Place {
        Undefined,
        Absolute,
        /// Index of one of the given sections.
        In(u16),
    }

    /// Returns a relocatable 64-bit little-endian ELF file: header, contents of the sections,
    /// symbols and names, section table.
    fn elf(sections: &[(&str, &[u8])], symbols: &[(&str, Place, u64)]) -> Vec<u8> {
        let mut names = vec![0];
        let mut name = |text: &str| {
            let at = u32::try_from(names.len()).unwrap();
            names.extend(text.bytes().chain([0]));
            at
        };
        // `st_name`, `st_info`, `st_other`, `st_shndx`, `st_value`, `st_size`. The first symbol is
        // empty.
        let mut table = vec![0; 24];
        for (text, place, value) in symbols {
            let index = match place {
                Place::Undefined => 0,
                Place::Absolute => 0xfff1,
                Place::In(index) => index + 1,
            };
            table.extend(name(text).to_le_bytes());
            table.extend([0x10, 0]);
            table.extend(index.to_le_bytes());
            table.extend(value.to_le_bytes());
            table.extend([0; 8]);
        }
        let count = u16::try_from(sections.len()).unwrap();
        // Each section header has a name, a type, contents, a link and an entry size.
        let mut headers: Vec<(u32, u32, &[u8], u32, u64)> = vec![(0, 0, &[], 0, 0)];
        headers.extend(
            sections
                .iter()
                .map(|(text, bytes)| (name(text), 1, *bytes, 0, 0)),
        );
        headers.push((name(".symtab"), 2, &table, u32::from(count) + 2, 24));
        let names_at = name(".strtab");
        headers.push((names_at, 3, &names, 0, 0));
        let mut file = vec![0x7f, b'E', b'L', b'F', 2, 1, 1];
        file.resize(16, 0);
        // `ET_REL`, `EM_X86_64`, `EV_CURRENT`, no entry point, no program headers.
        file.extend([1, 0, 62, 0, 1, 0, 0, 0]);
        file.resize(64, 0);
        let mut section_headers = Vec::new();
        for (name, kind, bytes, link, entry) in headers {
            let info = u32::from(kind == 2);
            section_headers.extend(name.to_le_bytes());
            section_headers.extend(kind.to_le_bytes());
            section_headers.extend([0; 16]);
            section_headers.extend(u64::try_from(file.len()).unwrap().to_le_bytes());
            section_headers.extend(u64::try_from(bytes.len()).unwrap().to_le_bytes());
            section_headers.extend(link.to_le_bytes());
            section_headers.extend(info.to_le_bytes());
            section_headers.extend(1_u64.to_le_bytes());
            section_headers.extend(entry.to_le_bytes());
            file.extend(bytes);
        }
        let at = u64::try_from(file.len()).unwrap();
        file[40..48].copy_from_slice(&at.to_le_bytes());
        for (at, value) in [(52, 64), (58, 64), (60, count + 3), (62, count + 2)] {
            file[at..at + 2].copy_from_slice(&value.to_le_bytes());
        }
        file.extend(section_headers);
        file
    }

    fn version(crc: u64, name: &str) -> Vec<u8> {
        let mut entry = crc.to_le_bytes().to_vec();
        entry.extend(name.as_bytes());
        entry.resize(VERSION, 0);
        entry
    }

    const INFO: &[u8] = b"license=GPL\0vermagic=6.8.0-45-generic SMP mod_unload modversions \0name=nvidia_peermem\0\
        srcversion=6E26\0";
    const CALLS: [(&str, Place, u64); 3] = [
        (REGISTER, Place::Undefined, 0),
        ("nvidia_p2p_get_pages", Place::Undefined, 0),
        ("own", Place::In(0), 0),
    ];

    #[test]
    fn symbols_that_a_module_needs() {
        let versions = [version(0x3b6d_0a1c, REGISTER), version(7, "module_layout")].concat();
        let sections: [(&str, &[u8]); 2] = [(".modinfo", INFO), ("__versions", &versions)];
        let mut bytes = elf(&sections, &CALLS);
        let file = File::parse("a.ko", &bytes, None);
        assert_eq!(file.unread, None);
        assert_eq!(file.name.as_deref(), Some("nvidia_peermem"));
        assert_eq!(file.srcversion.as_deref(), Some("6E26"));
        assert_eq!(
            file.vermagic.as_deref(),
            Some("6.8.0-45-generic SMP mod_unload modversions")
        );
        let needs = [
            (REGISTER, Some(0x3b6d_0a1c)),
            ("nvidia_p2p_get_pages", None),
        ];
        let needs = needs.map(|(name, crc)| (name.to_owned(), crc));
        assert_eq!(file.needs, needs.into());
        assert!(file.has_crcs() && !file.is_signed);
        bytes.extend(SIGNATURE);
        assert!(File::parse("a.ko", &bytes, None).is_signed);
        // Names of Rust symbols are too long for `__versions`.
        let names = [REGISTER, "\0nvidia_p2p_get_pages\0"].concat();
        let extended: [(&str, &[u8]); 3] = [
            ("__versions", &versions),
            ("__version_ext_crcs", &[1, 0, 0, 0, 0, 2, 0, 0]),
            ("__version_ext_names", names.as_bytes()),
        ];
        let file = File::parse("a.ko", &elf(&extended, &CALLS), None);
        let crcs: Vec<_> = file.needs.into_values().collect();
        assert_eq!(crcs, [Some(1), Some(0x200)]);
    }

    /// In some Ubuntu kernels, each entry begins with its length.
    #[test]
    fn versions_of_any_length() {
        let entry = |crc: u32, name: &str| {
            let length = (8 + name.len() + 1).next_multiple_of(4);
            let mut entry = u32::try_from(length).unwrap().to_le_bytes().to_vec();
            entry.extend(crc.to_le_bytes());
            entry.extend(name.as_bytes());
            entry.resize(length, 0);
            entry
        };
        let long = "n".repeat(100);
        let table = [
            entry(7, "module_layout"),
            entry(8, &long),
            entry(0x00ab_cdef, REGISTER),
            vec![0; 8],
        ];
        let needs = |table: &[u8]| {
            let file = File::parse("a.ko", &elf(&[("__versions", table)], &CALLS), None);
            file.needs[REGISTER]
        };
        assert_eq!(needs(&table.concat()), Some(0x00ab_cdef));
        // Invalid entries are ignored: a truncated entry, then entries whose length is 0, too small
        // for a name, or larger than the table.
        let mut table = table.concat();
        assert_eq!(needs(&table[..table.len() - 40]), None);
        for length in [0, 7, 8, 1000, u32::MAX] {
            table[..4].copy_from_slice(&u32::to_le_bytes(length));
            assert_eq!(needs(&table), None, "{length}");
        }
    }

    #[test]
    fn a_file_that_has_changed() {
        let file = std::env::temp_dir().join(format!("peermemctl-files-{}", std::process::id()));
        fs::write(&file, "1").unwrap();
        let path = file.to_str().unwrap();
        let before = stamp("/lib/modules/6.8.0", path);
        fs::write(&file, "22").unwrap();
        let after = stamp("/lib/modules/6.8.0", path);
        fs::remove_file(&file).unwrap();
        assert!(before.is_some() && before != after, "{before:?}");
    }

    #[test]
    fn symbols_that_other_modules_export() {
        let caller = File::parse("a.ko", &elf(&[(".modinfo", INFO)], &CALLS), None);
        let table: [(&str, &[u8]); 1] = [("__kcrctab", &[9, 9, 9, 9, 0x1c, 0x0a, 0x6d, 0x3b])];
        let symbols = [
            ("__ksymtab_ib_register_peer_memory_client", Place::In(0), 0),
            ("__crc_ib_register_peer_memory_client", Place::In(0), 4),
            ("__crc_ib_dealloc_pd", Place::In(0), 0),
            ("__crc_nvidia_p2p_get_pages", Place::Absolute, 0x71fd_226a),
        ];
        let file = File::parse("b.ko", &elf(&table, &symbols), Some(&caller));
        let exports = [
            (REGISTER, Some(0x3b6d_0a1c)),
            ("nvidia_p2p_get_pages", Some(0x71fd_226a)),
        ];
        let exports = exports.map(|(name, crc)| (name.to_owned(), crc));
        assert_eq!(file.exports, exports.into());
        // The CRC is unknown if the kernel has no CRCs, or if the CRC extends beyond the end of its
        // section.
        for (symbols, crc) in [
            (&symbols[..1], None),
            (
                &[("__crc_ib_register_peer_memory_client", Place::In(0), 6)],
                None,
            ),
        ] {
            let file = File::parse("b.ko", &elf(&table, symbols), Some(&caller));
            assert_eq!(file.exports, [(REGISTER.to_owned(), crc)].into());
        }
    }

    #[test]
    fn which_files_are_read() {
        let dependencies = "updates/dkms/nvidia-peermem.ko.zst: updates/dkms/nvidia.ko.zst kernel/video.ko.zst\n\
            updates/dkms/nvidia.ko.zst: kernel/video.ko.zst\nupdates/dkms/ib_core.ko:\nupdates/dkms/ib_uverbs.ko:\n\
            updates/dkms/ib_ipoib.ko:\nupdates/dkms/ib_peer_mem.ko:\n";
        assert_eq!(
            paths(dependencies),
            [
                "updates/dkms/nvidia-peermem.ko.zst",
                "updates/dkms/ib_core.ko",
                "updates/dkms/ib_peer_mem.ko",
                "updates/dkms/ib_uverbs.ko",
                "updates/dkms/nvidia.ko.zst",
            ]
        );
        assert_eq!(paths("updates/dkms/nvidia.ko:\n"), [""; 0]);
    }

    /// Output of `printf peermem | zstd --no-check`, `xz --check=crc32 --lzma2=dict=1MiB` and `gzip
    /// -n`.
    const ZSTD: &[u8] = b"\x28\xb5\x2f\xfd\x00\x58\x39\x00\x00peermem";
    const XZ: &[u8] = b"\xfd7zXZ\0\x00\x01\x69\x22\xde\x36\x02\x00\x21\x01\x10\x00\x00\x00\xa8\x70\x8e\x86\x01\x00\x06\
        peermem\x00\x00\xe2\xdb\x5f\xd2\x00\x01\x1b\x07\x12\xeb\xd4\x17\x90\x42\x99\x0d\x01\x00\x00\x00\x00\x01YZ";
    const GZIP: &[u8] =
        b"\x1f\x8b\x08\0\0\0\0\0\0\x03\x2b\x48\x4d\x2d\xca\x4d\xcd\x05\0\xe2\xdb\x5f\xd2\x07\0\0\0";

    #[test]
    fn compressed_files() {
        for (format, bytes) in [("zstd", ZSTD), ("xz", XZ), ("gzip", GZIP)] {
            let (all, most) = (bytes.to_vec(), 7);
            assert_eq!(
                decompressed(all.clone(), most).unwrap(),
                b"peermem",
                "{format}"
            );
            let why = decompressed(all, most - 1).unwrap_err();
            assert_eq!(
                why,
                format!("it is compressed ({format}): it has more than 6 bytes")
            );
            // The data is truncated at each byte after the magic number.
            for end in 6..bytes.len() {
                let cut = decompressed(bytes[..end].to_vec(), LONGEST);
                assert!(cut.is_err(), "{format} of {end} bytes: {cut:?}");
            }
        }
        // A file with a wrong checksum is rejected.
        let mut wrong = GZIP.to_vec();
        wrong[20] ^= 1;
        assert!(decompressed(wrong, LONGEST).is_err());
        let plain = decompressed(b"peermem".to_vec(), LONGEST).unwrap();
        let file = File::parse("a.ko", &plain, None);
        assert_eq!(file.unread.as_deref(), Some("it is not an ELF file"));
    }

    proptest! {
        #[test]
        fn no_file_is_a_panic(at in 0_usize..2000, with in prop::collection::vec(any::<u8>(), 1..16)) {
            let versions = version(7, REGISTER);
            let sections: [(&str, &[u8]); 3] =
                [(".modinfo", INFO), ("__versions", &versions), ("__version_ext_crcs", &[0; 8])];
            let mut bytes = elf(&sections, &CALLS);
            let at = at % bytes.len();
            for (byte, with) in bytes[at..].iter_mut().zip(&with) {
                *byte = *with;
            }
            let caller = File::parse("a.ko", &bytes, None);
            File::parse("a.ko", &bytes, Some(&caller));
            File::parse("a.ko", &with, None);
            for (format, header) in [(ZSTD, 4), (XZ, 12), (GZIP, 10)] {
                let _ = decompressed([&format[..header], &with].concat(), LONGEST);
                let mut bytes = format.to_vec();
                let at = at % bytes.len();
                for (byte, with) in bytes[at..].iter_mut().zip(&with) {
                    *byte = *with;
                }
                let _ = decompressed(bytes, LONGEST);
            }
        }
    }
}
