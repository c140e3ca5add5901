// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! A built kernel: its files, and the properties of its build tree.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{bail, Context as _, Result};

use super::table::flavour;
use crate::arch::Arch;
use crate::index::Index;
use crate::paths::Paths;
use crate::progress::output;

pub(crate) struct Kernel {
    pub(crate) arch: Arch,
    pub(crate) image: PathBuf,
    pub(crate) release: String,
    /// make's output directory, for building modules.
    pub(crate) build: PathBuf,
    /// Directory of the modules from the kernel's source or image.
    pub(crate) modules: PathBuf,
    /// RDMA modules built from the pristine source.
    pub(crate) stock: Option<PathBuf>,
    /// Hash of everything that the kernel was made from.
    pub(crate) key: String,
    /// Directory for the products of modules built for this kernel.
    pub(crate) products: PathBuf,
    pub(crate) make: &'static [&'static str],
    /// `true` if the kernel has the detectors of `debug.config`.
    pub(crate) detectors: bool,
    pub(crate) has_peer_memory: bool,
    /// `true` if the kernel is Debian's own image.
    pub(crate) is_stock: bool,
    /// `true` if Rust modules can be compiled against the build tree.
    pub(crate) has_rust: bool,
    /// `true` if the kernel compares versions of the symbols that modules use
    /// (`CONFIG_MODVERSIONS`).
    pub(crate) has_symbol_versions: bool,
    /// `true` if the makefiles can put a module's products outside the source directory (Linux
    /// 6.13).
    pub(crate) separates_output: bool,
    /// The key whose signatures the kernel accepts.
    pub(crate) signing: Option<Signing>,
}

/// A key that a kernel trusts, like the key that DKMS makes.
#[derive(Debug, Clone)]
pub(crate) struct Signing {
    pub(crate) key: PathBuf,
    pub(crate) certificate: PathBuf,
    pub(crate) sign_file: PathBuf,
}

impl Signing {
    pub(crate) fn sign(&self, module: &Path) -> Result<()> {
        output(
            Command::new(&self.sign_file)
                .arg("sha512")
                .args([&self.key, &self.certificate])
                .arg(module),
        )?;
        Ok(())
    }
}

impl Kernel {
    /// Returns the directory of the kernel's source, from the build tree. For a stock kernel,
    /// returns the source of the RDMA modules.
    pub(crate) fn source(&self) -> PathBuf {
        if self.is_stock {
            return self.modules.with_file_name("source");
        }
        self.build.join("source")
    }

    /// Returns the kernel's modules. If `stock` is set, the stock RDMA modules replace the patched ones.
    pub(crate) fn index(&self, stock: bool) -> Result<Index> {
        let mut index = Index::default();
        if stock {
            let stock = self.stock.as_ref();
            index.add_tree(stock.context("this kernel has no stock RDMA modules")?)?;
        }
        // A module that was added before stays, so the stock RDMA modules replace the patched ones.
        index.add_tree(&self.modules)?;
        Ok(index)
    }
}

/// Returns the release of the kernel of a build tree, as `uname -r` prints it.
pub(super) fn release_of(paths: &Paths, build: &Path) -> Result<String> {
    let script = paths.repo.join("rust-bindings/release.sh");
    let text = output(Command::new(script).arg(build))?;
    let release = text.trim();
    if release.is_empty() {
        bail!("{} has no kernel release", build.display());
    }
    Ok(release.to_owned())
}

/// Returns `true` if an option of a build tree's configuration is y.
pub(super) fn is_set(build: &Path, option: &str) -> bool {
    let options = build.join("include/config/auto.conf");
    let options = fs::read_to_string(options).unwrap_or_default();
    let wanted = format!("CONFIG_{option}=y");
    options.lines().any(|line| line == wanted)
}

/// Returns `true` if a build tree has the metadata of the `kernel` crate.
pub(super) fn has_rust(build: &Path) -> bool {
    let file = build.join("rust/libkernel.rmeta");
    file.is_file()
}

/// Returns `true` if the makefiles of a build tree know the variable `MO`.
pub(super) fn separates_output(build: &Path) -> bool {
    let makefiles = [build.join("source/Makefile"), build.join("Makefile")];
    makefiles.iter().any(|file| {
        fs::read_to_string(file).is_ok_and(|text| text.contains("KBUILD_EXTMOD_OUTPUT"))
    })
}

pub(crate) fn arch_of(name: &str) -> Arch {
    flavour(name).map_or(Arch::X86_64, |flavour| flavour.arch)
}

pub(crate) fn archs(kernels: &[&str]) -> Vec<Arch> {
    let mut archs: Vec<Arch> = kernels.iter().map(|name| arch_of(name)).collect();
    archs.sort();
    archs.dedup();
    archs
}
