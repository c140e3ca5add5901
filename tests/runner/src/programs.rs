// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Programs that run in the VM: our verbs program, `peermemctl`, and rdma-core's Python tests.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{bail, ensure, Result};

use crate::arch::Arch;
use crate::guest::in_machine;
use crate::lock::Lock;
use crate::paths::Paths;
use crate::progress::{output, Stage};
use crate::stamp::Key;
use crate::toolchain::Toolchain;
use crate::{apt, consumers, foreign, stamp};

/// Directory in which Debian's rdma-core package installs its Python tests.
const PYVERBS: &str = "/usr/share/doc/rdma-core/tests";

/// rdma-core's test modules that the suite runs. In the VM, loading the other test modules would
/// take longer than running these.
const PYVERBS_TESTS: [&str; 9] = [
    "test_addr",
    "test_atomic",
    "test_fork",
    "test_mr",
    "test_odp",
    "test_pd",
    "test_qp",
    "test_qpex",
    "test_shared_pd",
];

pub(crate) const GDR: &str = "gdr";

/// The library that registers GPU memory by dma-buf.
const PRELOAD: &str = "peermem-preload";

/// Packages of the workspace whose programs the VM needs.
pub(crate) const COMPILED: &[&str] = &[GDR, "peermemctl"];

/// Returns the directory of all compiled programs. The directory is in PATH in the VM.
pub(crate) fn directory(paths: &Paths, arch: Arch) -> PathBuf {
    paths
        .cache
        .join("programs")
        .join(arch.foreign().unwrap_or_default())
}

pub(crate) fn gdr(paths: &Paths, arch: Arch) -> PathBuf {
    directory(paths, arch).join(GDR)
}

pub(crate) fn peermemctl(paths: &Paths, arch: Arch) -> PathBuf {
    directory(paths, arch).join("peermemctl")
}

/// Returns the beginning of the verbs program's command line in the VM.
pub(crate) fn gdr_command(paths: &Paths, arch: Arch, action: &str) -> Vec<String> {
    vec![in_machine(&gdr(paths, arch)), action.to_owned()]
}

/// Returns the name of the file that a package makes.
fn product(package: &str) -> &str {
    match package {
        PRELOAD => "libpeermem_preload.so",
        program => program,
    }
}

/// Compiles the products of packages unless they were compiled from this source. The packages share
/// most of their crates.
pub(crate) fn build(
    paths: &Paths,
    toolchain: &Toolchain,
    arch: Arch,
    wanted: &[&str],
) -> Result<()> {
    let directory = directory(paths, arch);
    let mut cargo = toolchain.cargo(paths);
    let mut key = Key::default();
    let mut built = paths.cache.join("target");
    let mut target = Vec::new();
    if arch.foreign().is_none() {
        key.text("tools", &toolchain.versions("gcc")?);
    } else {
        let root = foreign::root(paths, arch)?;
        key.text("tools", &toolchain.versions(foreign::COMPILER)?);
        key.text("root", &foreign::key(arch)?);
        foreign::cross(&mut cargo, &root);
        built.push(foreign::TARGET);
        target = vec!["--target", foreign::TARGET];
    }
    let inputs = "Cargo.toml Cargo.lock cli tests/verbs tests/gpu/standin.h preload";
    key.inputs(&paths.repo, &inputs.split(' ').collect::<Vec<_>>())?;
    let key = key.finish();
    let stamp = |name: &str| directory.join(format!("{name}.stamp"));
    let is_missing = |name: &&str| {
        !directory.join(product(name)).exists() || !stamp::is_fresh(&stamp(name), &key)
    };
    let missing: Vec<&str> = wanted.iter().copied().filter(is_missing).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let mut stage = Stage::begin(format!("programs: compiling {}", missing.join(" and ")));
    let crates = stage.run(
        cargo
            .args(["build", "--release", "--locked"])
            .args(target)
            .args(missing.iter().flat_map(|name| ["-p", name]))
            .current_dir(&paths.repo),
        &paths.cache.join("logs/programs.txt"),
        "crates",
        |line| line.trim_start().starts_with("Compiling"),
    )?;
    // Copies the programs, because a VM may have the old programs open, and cargo overwrites its
    // files in place.
    for name in missing {
        let product = product(name);
        stamp::put(
            &built.join("release").join(product),
            &directory.join(product),
        )?;
        stamp::set(&stamp(name), &key)?;
    }
    stage.done(&format!("{crates} crates"));
    Ok(())
}

/// A word in a run's command, and the function that makes the file or directory that replaces it.
type OnDemand = (&'static str, fn(&Paths) -> Result<PathBuf>);

/// Files and directories that are made only when a run needs them.
pub(crate) const ON_DEMAND: &[OnDemand] = &[
    ("{cuda}", consumers::cuda),
    ("{mpi}", consumers::mpi),
    ("{nixl}", consumers::nixl),
    ("{perftest}", consumers::perftest),
    ("{preload}", preload),
    ("{promtool}", |paths| of_prometheus(paths, "promtool")),
    ("{pyverbs}", pyverbs),
    ("{ucx}", consumers::ucx),
];

/// Returns the library that registers GPU memory by dma-buf.
pub(crate) fn preload(paths: &Paths) -> Result<PathBuf> {
    let toolchain = Toolchain::find(paths)?;
    let _lock = Lock::take(paths, "programs")?;
    build(paths, &toolchain, Arch::X86_64, &[PRELOAD])?;
    Ok(directory(paths, Arch::X86_64).join(product(PRELOAD)))
}

/// Unpacks a program of Prometheus's package. The package is not installed, because an installation
/// would start a server.
pub(crate) fn of_prometheus(paths: &Paths, name: &str) -> Result<PathBuf> {
    let _lock = Lock::take(paths, "prometheus")?;
    let product = directory(paths, Arch::X86_64).join(name);
    if !product.exists() {
        let contents = apt::file_of(paths, "prometheus", &format!("usr/bin/{name}"))?;
        stamp::replace(&product, &contents)?;
        fs::set_permissions(&product, fs::Permissions::from_mode(0o755))?;
    }
    Ok(product)
}

fn pyverbs(paths: &Paths) -> Result<PathBuf> {
    let _lock = Lock::take(paths, "pyverbs")?;
    let target = paths.cache.join("pyverbs");
    let is_other = |stem: &str| stem.starts_with("test_") && !PYVERBS_TESTS.contains(&stem);
    for file in stamp::files(&target)? {
        if is_other(&file.file_stem().unwrap_or_default().to_string_lossy()) {
            fs::remove_file(&file)?;
        }
    }
    let sources = stamp::files(Path::new(PYVERBS))?;
    ensure!(!sources.is_empty(), "no {PYVERBS} (package rdma-core)");
    let mut found = 0;
    for source in sources {
        let name = source.file_name().unwrap_or_default().to_string_lossy();
        let plain = name.trim_end_matches(".gz");
        let Some(stem) = plain.strip_suffix(".py").filter(|stem| !is_other(stem)) else {
            continue;
        };
        found += usize::from(stem.starts_with("test_"));
        let contents = match name.ends_with(".gz") {
            true => (output(Command::new("gzip").arg("-dc").arg(&source))? + "\n").into_bytes(),
            false => fs::read(&source)?,
        };
        stamp::update(&target.join(plain), &contents)?;
    }
    if found != PYVERBS_TESTS.len() {
        bail!("{PYVERBS} lacks some of: {}", PYVERBS_TESTS.join(", "));
    }
    Ok(target)
}
