// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Writes an initramfs in the kernel's format: uncompressed cpio in "newc" form.

use std::io::Write as _;
use std::path::Path;

use anyhow::{Context as _, Result};
use cpio::newc::{trailer, Builder, ModeFileType};

/// An archive under construction. A directory must be added before its contents.
#[derive(Default)]
pub(crate) struct Archive(Vec<u8>);

impl Archive {
    pub(crate) fn directory(&mut self, name: &str) -> Result<()> {
        self.entry(name, ModeFileType::Directory, 0o755, &[])
    }

    pub(crate) fn symlink(&mut self, name: &str, target: &str) -> Result<()> {
        self.entry(name, ModeFileType::Symlink, 0o777, target.as_bytes())
    }

    pub(crate) fn file(&mut self, name: &str, mode: u32, contents: &[u8]) -> Result<()> {
        self.entry(name, ModeFileType::Regular, mode, contents)
    }

    /// Adds a copy of one of this machine's files.
    pub(crate) fn copy(&mut self, name: &str, mode: u32, source: &Path) -> Result<()> {
        let contents =
            std::fs::read(source).with_context(|| format!("cannot read {}", source.display()))?;
        self.file(name, mode, &contents)
    }

    pub(crate) fn finish(self) -> Result<Vec<u8>> {
        Ok(trailer(self.0)?)
    }

    fn entry(&mut self, name: &str, kind: ModeFileType, mode: u32, contents: &[u8]) -> Result<()> {
        let builder = Builder::new(name)
            .nlink(1)
            .mode(mode)
            .set_mode_file_type(kind);
        let mut writer = builder.write(&mut self.0, u32::try_from(contents.len())?);
        writer.write_all(contents)?;
        writer.finish()?;
        Ok(())
    }
}
