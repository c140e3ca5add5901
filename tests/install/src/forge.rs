// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Synthetic modules. They cannot be loaded, but contain everything that kmod reads: `.modinfo`,
//! and the names of exported and required symbols.

use std::collections::HashMap;
use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{LazyLock, Mutex};

use anyhow::{bail, Context as _, Result};

use crate::host::make_folder_of;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Module {
    IbCore,
    /// nvidia.ko of this version.
    Core(&'static str),
    /// NVIDIA's nvidia-peermem of this version.
    Theirs(&'static str),
    /// Our module of this version.
    Ours(&'static str),
}

impl Module {
    /// Returns the module's name in the kernel.
    fn name(self) -> &'static str {
        match self {
            Self::IbCore => "ib_core",
            Self::Core(_) => "nvidia",
            Self::Theirs(_) | Self::Ours(_) => "nvidia_peermem",
        }
    }

    pub(crate) fn version(self) -> String {
        match self {
            Self::IbCore => String::new(),
            Self::Core(version) | Self::Theirs(version) => version.to_owned(),
            Self::Ours(version) => format!("{version}-rs"),
        }
    }

    fn source(self) -> String {
        let mut source = String::new();
        let info = [
            ("name", self.name().to_owned()),
            ("version", self.version()),
            ("license", "Dual BSD/GPL".to_owned()),
        ];
        for (number, (key, value)) in info.iter().enumerate() {
            source.push_str(&format!(
                "static const char info{number}[] __attribute__((section(\".modinfo\"), used, aligned(1))) = \"{key}={value}\";\n"
            ));
        }
        let (exports, needs): (&[&str], &[&str]) = match self {
            Self::IbCore => (&["ib_register_peer_memory_client"], &[]),
            Self::Core(_) => (&["nvidia_p2p_get_pages"], &[]),
            Self::Theirs(_) | Self::Ours(_) => (
                &[],
                &["ib_register_peer_memory_client", "nvidia_p2p_get_pages"],
            ),
        };
        for symbol in exports {
            source.push_str(&format!(
                "__asm__(\".section __ksymtab_strings,\\\"aMS\\\",@progbits,1\\n.asciz \\\"{symbol}\\\"\\n.text\");\n"
            ));
        }
        for symbol in needs {
            source.push_str(&format!(
                "extern void {symbol}(void); void *need_{symbol} = {symbol};\n"
            ));
        }
        source
    }

    /// Returns the uncompressed contents of the module's file.
    fn object(self) -> Result<Vec<u8>> {
        static MADE: LazyLock<Mutex<HashMap<Module, Vec<u8>>>> = LazyLock::new(Mutex::default);
        let mut made = match MADE.lock() {
            Ok(made) => made,
            Err(poisoned) => poisoned.into_inner(),
        };
        if let Some(object) = made.get(&self) {
            return Ok(object.clone());
        }
        let mut file = std::env::temp_dir();
        file.push(format!("peermem-install-{}.o", std::process::id()));
        let mut compiler = Command::new("gcc")
            .args(["-c", "-x", "c", "-", "-o"])
            .arg(&file)
            .stdin(Stdio::piped())
            .spawn()
            .context("cannot start gcc")?;
        if let Some(stdin) = &mut compiler.stdin {
            stdin.write_all(self.source().as_bytes())?;
        }
        if !compiler.wait()?.success() {
            bail!("gcc did not compile:\n{}", self.source());
        }
        let object = fs::read(&file)?;
        fs::remove_file(&file)?;
        made.insert(self, object.clone());
        Ok(object)
    }

    /// Writes the module, with the compression of the file's suffix.
    pub(crate) fn write(self, file: &Path) -> Result<()> {
        make_folder_of(file)?;
        let object = self.object()?;
        let program = match file.extension().and_then(|suffix| suffix.to_str()) {
            Some("zst") => "zstd",
            Some("xz") => "xz",
            _ => {
                fs::write(file, object)?;
                return Ok(());
            }
        };
        let out = fs::File::create(file)?;
        let mut arguments = vec!["-q", "-c"];
        if program == "xz" {
            // The kernel's decompressor supports no other integrity check.
            arguments.push("--check=crc32");
        }
        let mut child = Command::new(program)
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(out)
            .spawn()
            .with_context(|| format!("cannot start {program}"))?;
        if let Some(mut stdin) = child.stdin.take() {
            stdin.write_all(&object)?;
        }
        if !child.wait()?.success() {
            bail!("{program} failed");
        }
        Ok(())
    }
}
