// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! A kernel that is there: its files, and the properties that its build tree shows.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{anyhow, bail, Context as _, Result};

use super::table::{flavour, CLANG};
use crate::arch::Arch;
use crate::index::{self, Index};
use crate::paths::Paths;
use crate::progress::output;
use crate::stamp::Key;

/// A kernel that is there.
pub(crate) struct Kernel {
    pub(crate) arch: Arch,
    pub(crate) image: PathBuf,
    pub(crate) release: String,
    /// For building modules: make's output directory.
    pub(crate) build: PathBuf,
    /// Its own modules.
    pub(crate) modules: PathBuf,
    /// Its RDMA modules as the pristine source has them.
    pub(crate) stock: Option<PathBuf>,
    /// Changes with anything that it was made from.
    pub(crate) key: String,
    /// Where the products of modules built for it go.
    pub(crate) products: PathBuf,
    pub(crate) make: &'static [&'static str],
    /// It has the detectors of `debug.config`.
    pub(crate) detectors: bool,
    /// Debian's own image.
    pub(crate) is_stock: bool,
    /// The build tree has what Rust modules are compiled against.
    pub(crate) has_rust: bool,
    /// The kernel compares versions of the symbols that modules use (`CONFIG_MODVERSIONS`).
    pub(crate) has_symbol_versions: bool,
    /// Its makefiles can put a module's products elsewhere than beside the source (Linux 6.13).
    pub(crate) separates_output: bool,
    /// Where the key lies whose signatures it takes.
    pub(crate) signing: Option<Signing>,
}

/// A key that a kernel trusts, as DKMS makes its own.
#[derive(Debug, Clone)]
pub(crate) struct Signing {
    /// The private key, in PEM.
    pub(crate) key: PathBuf,
    /// The certificate, in DER.
    pub(crate) certificate: PathBuf,
    /// The kernel's program.
    pub(crate) sign_file: PathBuf,
}

impl Signing {
    /// Signs a module's file in its place.
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
    /// Its source, which the build tree names; of a stock kernel that of the RDMA modules.
    pub(crate) fn source(&self) -> PathBuf {
        if self.is_stock {
            return self.modules.with_file_name("source");
        }
        let link = self.build.join("source");
        if link.exists() {
            link
        } else {
            self.build.clone()
        }
    }

    /// Its modules, the stock RDMA ones first if so wanted.
    pub(crate) fn index(&self, stock: bool) -> Result<Index> {
        let mut index = Index::default();
        if stock {
            let stock = self
                .stock
                .as_ref()
                .ok_or_else(|| anyhow!("this kernel has no stock RDMA modules"))?;
            index.add_tree(stock)?;
            // Names that only the patched ones have must not be found by accident.
            let known: BTreeSet<String> = index.names().map(str::to_owned).collect();
            let mut rest = Index::default();
            rest.add_tree(&self.modules)?;
            for file in rest.files() {
                let name = index::name_of(file);
                if !known.contains(&name) {
                    index.add(file.clone());
                }
            }
        } else {
            index.add_tree(&self.modules)?;
        }
        Ok(index)
    }
}

/// Returns the release of the kernel of a build tree, as `uname -r` prints it.
pub(super) fn release_of(paths: &Paths, build: &Path) -> Result<String> {
    let script = paths.repo.join("rust-bindings/release.sh");
    let text = output(Command::new(script).arg(build))?;
    let release = text.trim();
    if release.is_empty() {
        bail!("{} has no kernel's release", build.display());
    }
    Ok(release.to_owned())
}

/// The build tree that a path names: itself, or the one that an image lies in.
fn tree_of(path: &Path) -> &Path {
    if path.is_dir() {
        path
    } else {
        path.ancestors().nth(4).unwrap_or(path)
    }
}

/// Whether an option of a build tree's configuration is y.
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

/// The processors that a kernel is for, by its name, or a path to a build tree or the image in one.
pub(crate) fn arch_of(name: &str) -> Arch {
    if let Some(flavour) = flavour(name) {
        return flavour.arch;
    }
    if is_set(tree_of(Path::new(name)), "ARM64") {
        Arch::Arm64
    } else {
        Arch::X86_64
    }
}

/// Those of several kernels, each once.
pub(crate) fn archs(kernels: &[&str]) -> Vec<Arch> {
    let mut archs: Vec<Arch> = kernels.iter().map(|name| arch_of(name)).collect();
    archs.sort();
    archs.dedup();
    archs
}

/// A kernel that somebody else built: its build tree, or the image in one.
pub(crate) fn by_path(paths: &Paths, path: &Path) -> Result<Kernel> {
    let path =
        fs::canonicalize(path).with_context(|| format!("there is no kernel {}", path.display()))?;
    let arch = arch_of(&path.to_string_lossy());
    let build = tree_of(&path).to_path_buf();
    let image = if path.is_dir() {
        // The test VM's own trees have no bzImage: QEMU enters their vmlinux. All trees have that.
        let images = ["arch/x86/boot/bzImage", Arch::Arm64.image().0, "vmlinux"];
        let images = images.map(|name| path.join(name));
        let image = images.into_iter().find(|image| image.is_file());
        image.ok_or_else(|| anyhow!("{} has no kernel that QEMU boots", path.display()))?
    } else {
        path
    };
    let release = release_of(paths, &build)
        .with_context(|| format!("{} does not lie in a build tree", image.display()))?;
    let mut key = Key::default();
    key.bytes("image", &fs::read(&image)?);
    key.bytes(
        "symbols",
        &fs::read(build.join("Module.symvers")).unwrap_or_default(),
    );
    let mut name = Key::default();
    name.text("tree", &build.to_string_lossy());
    Ok(Kernel {
        arch,
        image,
        release,
        modules: build.clone(),
        stock: None,
        key: key.finish(),
        products: paths.cache.join("modules").join(name.finish()),
        // Its modules want the compiler that it was built by.
        make: match is_set(&build, "CC_IS_CLANG") {
            true if arch == Arch::X86_64 => CLANG,
            _ => arch.make(),
        },
        detectors: false,
        is_stock: false,
        has_rust: has_rust(&build),
        has_symbol_versions: is_set(&build, "MODVERSIONS"),
        separates_output: separates_output(&build),
        build,
        signing: None,
    })
}
