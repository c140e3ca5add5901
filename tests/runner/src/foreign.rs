// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Support for VMs of a foreign architecture: a root of Debian's packages for that architecture,
//! and programs cross-compiled against that root.
//!
//! Packages are unpacked and not configured, because no program of the root runs on this machine.
//! The packages come from this machine's mirror.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};

use crate::arch::Arch;
use crate::command::as_root;
use crate::lock::Lock;
use crate::paths::Paths;
use crate::progress::{output, Stage};
use crate::stamp::Key;
use crate::{apt, stamp};

/// Compiler of kernels and programs for the foreign architecture. clang supports all architectures.
pub(crate) const COMPILER: &str = "clang-19";

/// rustc's name of Debian's arm64.
pub(crate) const TARGET: &str = "aarch64-unknown-linux-gnu";

/// Packages that the VM has, and that programs are linked with.
const PACKAGES: &str = "base-files bash busybox-static coreutils dash findutils gawk grep ibverbs-providers \
    ibverbs-utils iproute2 kmod libc6-dev libibverbs1 librdmacm1 mount perftest procps python3-pyverbs rdma-core \
    rdmacm-utils sed util-linux";

/// Links that the configuration of a package would make, and their targets.
const LINKS: &[(&str, &str)] = &[("usr/bin/awk", "gawk")];

/// Returns the package of Rust's standard library for the foreign architecture, in the exact
/// version of this machine's rustc.
fn library() -> Result<String> {
    let owner = output(Command::new("dpkg-query").args(["-S", "/usr/bin/rustc"]))?;
    let package = owner.split(':').next().unwrap_or_default();
    let version = output(Command::new("dpkg-query").args(["-W", "-f", "${Version}", package]))?;
    let flavour = package.strip_prefix("rustc").with_context(|| {
        format!("/usr/bin/rustc belongs to {package}, which is no package of rustc")
    })?;
    Ok(format!("libstd-rust{flavour}-dev={version}"))
}

fn packages() -> Result<Vec<String>> {
    let mut packages: Vec<String> = PACKAGES.split(' ').map(str::to_owned).collect();
    // gcc's runtime library has gcc's major version in its name.
    let gcc = output(Command::new("gcc").arg("-dumpversion"))?;
    let major = gcc.split('.').next().unwrap_or_default();
    packages.push(format!("libgcc-{major}-dev"));
    packages.push(library()?);
    Ok(packages)
}

pub(crate) fn key(arch: Arch) -> Result<String> {
    let (_, sources) = apt::own_sources()?;
    let mut key = Key::default();
    key.text("architecture", arch.foreign().unwrap_or_default());
    key.text("sources", &sources);
    key.text("packages", &packages()?.join(" "));
    key.text("links", &format!("{LINKS:?}"));
    Ok(key.finish())
}

/// Returns `true` if a root for `arch` was made, even from an earlier list of packages.
pub(crate) fn is_there(paths: &Paths, arch: Arch) -> bool {
    let stamp = format!("foreign/{}.stamp", arch.foreign().unwrap_or_default());
    paths.cache.join(stamp).exists()
}

/// Returns the root of a VM of this architecture: this machine's own root, or a root that is made
/// once.
pub(crate) fn root(paths: &Paths, arch: Arch) -> Result<PathBuf> {
    let Some(name) = arch.foreign() else {
        return Ok(PathBuf::from("/"));
    };
    let _lock = Lock::take(paths, "foreign")?;
    // Installs QEMU too, because the cache may be older than the installed packages.
    apt::install(paths, apt::FOREIGN)?;
    let home = paths.cache.join("foreign");
    let root = home.join(name);
    let stamp = home.join(format!("{name}.stamp"));
    let key = key(arch)?;
    if stamp::is_fresh(&stamp, &key) {
        return Ok(root);
    }
    let mut stage = Stage::begin(format!("{name}: unpacking Debian's packages"));
    fs::create_dir_all(&home)?;
    if root.exists() {
        output(as_root("rm").arg("-rf").arg(&root))?;
    }
    let (release, sources) = apt::own_sources()?;
    apt::make_root(
        paths,
        &mut stage,
        (&release, &sources),
        &packages()?,
        &root,
        Some(name),
    )?;
    for (link, target) in LINKS {
        output(as_root("ln").args(["-s", target]).arg(root.join(link)))?;
    }
    stamp::set(&stamp, &key)?;
    stage.done("");
    Ok(root)
}

/// Makes cargo compile for [`TARGET`], against the root and with the root's library.
pub(crate) fn cross(cargo: &mut Command, root: &Path) {
    let root = root.display();
    let upper = TARGET.replace('-', "_").to_uppercase();
    let lower = TARGET.replace('-', "_");
    // clang would use gcc's linker, which supports only this machine's architecture.
    let linked = format!("--sysroot={root} -fuse-ld=lld");
    let mut flags = format!("--sysroot={root}/usr -Clink-arg=--target={TARGET}");
    for word in linked.split(' ') {
        flags.push_str(&format!(" -Clink-arg={word}"));
    }
    cargo
        .env(format!("CARGO_TARGET_{upper}_LINKER"), COMPILER)
        .env(format!("CARGO_TARGET_{upper}_RUSTFLAGS"), flags)
        .env(format!("CC_{lower}"), COMPILER)
        // Build scripts look for a C++ compiler but do not run the compiler: only C is compiled.
        .env(format!("CXX_{lower}"), COMPILER)
        .env(format!("CFLAGS_{lower}"), &linked)
        .env(
            format!("BINDGEN_EXTRA_CLANG_ARGS_{lower}"),
            format!("--sysroot={root}"),
        );
}
