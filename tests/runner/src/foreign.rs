// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! What a machine needs whose processors are not this machine's: a root of Debian's packages for it, in place of this
//! machine's own, and programs that are compiled for it against that root.
//!
//! Nothing of it is run here, so the packages are unpacked and not configured. They come from where this machine's own do.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};

use crate::arch::Arch;
use crate::lock::Lock;
use crate::paths::Paths;
use crate::progress::{output, Stage};
use crate::stamp::Key;
use crate::{apt, stamp};

/// The compiler of the kernel for it, which knows all processors.
pub(crate) const COMPILER: &str = "clang-19";

/// rustc's name of the arm64 that Debian's programs run on.
pub(crate) const TARGET: &str = "aarch64-unknown-linux-gnu";

/// What the machine has, and what programs are linked with.
const PACKAGES: &[&str] = &[
    "base-files",
    "bash",
    "busybox-static",
    "coreutils",
    "dash",
    "findutils",
    "gawk",
    "grep",
    "ibverbs-providers",
    "ibverbs-utils",
    "iproute2",
    "kmod",
    "libc6-dev",
    "libibverbs1",
    "librdmacm1",
    "mount",
    "perftest",
    "procps",
    "python3-pyverbs",
    "rdma-core",
    "rdmacm-utils",
    "sed",
    "util-linux",
];

/// Links that configuring a package would make, and where they lead.
const LINKS: &[(&str, &str)] = &[("usr/bin/awk", "gawk")];

/// rustc's package of the library for these processors, of the very version that this machine's has.
fn library() -> Result<String> {
    let owner = output(Command::new("dpkg-query").args(["-S", "/usr/bin/rustc"]))?;
    let package = owner.split(':').next().unwrap_or_default();
    let version = output(Command::new("dpkg-query").args(["-W", "-f", "${Version}", package]))?;
    let flavour = package
        .strip_prefix("rustc")
        .with_context(|| format!("/usr/bin/rustc is of {package}, which is no package of rustc"))?;
    Ok(format!("libstd-rust{flavour}-dev={version}"))
}

fn packages() -> Result<Vec<String>> {
    let mut packages: Vec<String> = PACKAGES.iter().map(|name| (*name).to_owned()).collect();
    packages.push(format!("libgcc-{}-dev", gcc()?));
    packages.push(library()?);
    Ok(packages)
}

/// The release's own gcc: its runtime library comes with it.
fn gcc() -> Result<String> {
    let version = output(Command::new("gcc").arg("-dumpversion"))?;
    Ok(version.split('.').next().unwrap_or_default().to_owned())
}

/// What the root is made of.
pub(crate) fn key(arch: Arch) -> Result<String> {
    let (_, sources) = apt::own_sources()?;
    let mut key = Key::default();
    key.text("architecture", arch.foreign().unwrap_or_default());
    key.text("sources", &sources);
    key.text("packages", &packages()?.join(" "));
    key.text("links", &format!("{LINKS:?}"));
    Ok(key.finish())
}

/// Whether a machine's root was made, of whatever.
pub(crate) fn is_there(paths: &Paths, arch: Arch) -> bool {
    let stamp = format!("foreign/{}.stamp", arch.foreign().unwrap_or_default());
    paths.cache.join(stamp).exists()
}

/// The root of a machine with these processors: this machine's own, or one that is made for it, once.
pub(crate) fn root(paths: &Paths, arch: Arch) -> Result<PathBuf> {
    let Some(name) = arch.foreign() else {
        return Ok(PathBuf::from("/"));
    };
    let _lock = Lock::take(paths, "foreign")?;
    // QEMU as well: the cache may be older than what is installed.
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
        output(apt::as_root("rm").arg("-rf").arg(&root))?;
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
        output(apt::as_root("ln").args(["-s", target]).arg(root.join(link)))?;
    }
    stamp::set(&stamp, &key)?;
    stage.done("");
    Ok(root)
}

/// Has cargo compile for [`TARGET`], against the root and with the library in it.
pub(crate) fn cross(cargo: &mut Command, root: &Path) {
    let root = root.display();
    let upper = TARGET.replace('-', "_").to_uppercase();
    let lower = TARGET.replace('-', "_");
    // gcc's linker, which clang would take, knows this machine's processors alone.
    let linked = format!("--sysroot={root} -fuse-ld=lld");
    let mut flags = format!("--sysroot={root}/usr -Clink-arg=--target={TARGET}");
    for word in linked.split(' ') {
        flags.push_str(&format!(" -Clink-arg={word}"));
    }
    cargo
        .env(format!("CARGO_TARGET_{upper}_LINKER"), COMPILER)
        .env(format!("CARGO_TARGET_{upper}_RUSTFLAGS"), flags)
        .env(format!("CC_{lower}"), COMPILER)
        // Asked for, and not run: all that is compiled is C.
        .env(format!("CXX_{lower}"), COMPILER)
        .env(format!("CFLAGS_{lower}"), &linked)
        .env(
            format!("BINDGEN_EXTRA_CLANG_ARGS_{lower}"),
            format!("--sysroot={root}"),
        );
}
