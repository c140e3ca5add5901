// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Writes an initramfs in the kernel's format: uncompressed cpio in "newc" form.

use std::path::Path;

use anyhow::{Context as _, Result};

const DIRECTORY: u32 = 0o040_755;
const REGULAR: u32 = 0o100_000;
const SYMLINK: u32 = 0o120_777;

/// An archive under construction. A directory must be added before its contents.
#[derive(Default)]
pub(crate) struct Archive {
    bytes: Vec<u8>,
    inode: u32,
}

impl Archive {
    pub(crate) fn directory(&mut self, name: &str) {
        self.entry(name, DIRECTORY, &[]);
    }

    pub(crate) fn symlink(&mut self, name: &str, target: &str) {
        self.entry(name, SYMLINK, target.as_bytes());
    }

    pub(crate) fn file(&mut self, name: &str, mode: u32, contents: &[u8]) {
        self.entry(name, REGULAR | mode, contents);
    }

    /// Adds a copy of one of this machine's files.
    pub(crate) fn copy(&mut self, name: &str, mode: u32, source: &Path) -> Result<()> {
        let contents =
            std::fs::read(source).with_context(|| format!("cannot read {}", source.display()))?;
        self.file(name, mode, &contents);
        Ok(())
    }

    pub(crate) fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, &[]);
        self.bytes
    }

    fn entry(&mut self, name: &str, mode: u32, contents: &[u8]) {
        self.inode += 1;
        let links = 1;
        // Fields in order: inode, mode, uid, gid, links, mtime, size, four device numbers, name
        // size, checksum.
        let fields = [
            self.inode as usize,
            mode as usize,
            0,
            0,
            links,
            0,
            contents.len(),
            0,
            0,
            0,
            0,
            name.len() + 1,
            0,
        ];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes
                .extend_from_slice(format!("{field:08x}").as_bytes());
        }
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(contents);
        self.pad();
    }

    fn pad(&mut self) {
        while self.bytes.len() % 4 != 0 {
            self.bytes.push(0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_and_contents_are_aligned() {
        let mut archive = Archive::default();
        archive.directory("bin");
        archive.file("bin/a", 0o755, b"12345");
        archive.symlink("b", "bin/a");
        let bytes = archive.finish();
        assert_eq!(bytes.len() % 4, 0);
        let mut at = 0;
        let mut names = Vec::new();
        loop {
            assert_eq!(&bytes[at..at + 6], b"070701");
            let field = |n: usize| {
                let text = std::str::from_utf8(&bytes[at + 6 + 8 * n..at + 14 + 8 * n]).unwrap();
                usize::from_str_radix(text, 16).unwrap()
            };
            let (size, name_size) = (field(6), field(11));
            let name = &bytes[at + 110..at + 110 + name_size - 1];
            names.push(String::from_utf8(name.to_vec()).unwrap());
            at = (at + 110 + name_size).next_multiple_of(4);
            if names.last().unwrap() == "bin/a" {
                assert_eq!(&bytes[at..at + size], b"12345");
            }
            at = (at + size).next_multiple_of(4);
            if names.last().unwrap() == "TRAILER!!!" {
                break;
            }
        }
        assert_eq!(names, ["bin", "bin/a", "b", "TRAILER!!!"]);
        assert_eq!(at, bytes.len());
    }
}
