// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Sources of NVIDIA's driver from Debian's packages: nvidia-peermem, and nv-p2p.c with all its
//! includes.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{anyhow, Result};

use crate::lock::Lock;
use crate::paths::Paths;
use crate::progress::Stage;
use crate::{apt, stamp};

pub(super) struct Driver {
    /// Prefix of the version numbers of this driver.
    series: &'static str,
    suites: &'static [&'static str],
    /// Directory in the cache.
    directory: &'static str,
}

const DRIVER_PACKAGE: &str = "nvidia-open-kernel-source";

/// The driver whose nvidia-peermem is compared with ours.
pub(super) const DRIVER: Driver = Driver {
    series: "550.",
    suites: &["trixie", "forky"],
    directory: "control",
};

/// The newest other driver that Debian has.
pub(super) const DRIVER_555: Driver = Driver {
    series: "555.",
    suites: &["experimental"],
    directory: "control-555",
};

const CONTROL_FILES: [&str; 3] = ["nvidia-peermem.c", "nv-p2p.h", "peer_mem.h"];

const UPPER_FILES: &str = "nvidia/nv-p2p.c nvidia/nv-p2p.h nvidia/nv-ibmnpu.h nvidia/nv-rsync.h nvidia/rmp2pdefines.h \
    common/inc/cpuopsys.h common/inc/nv-caps.h common/inc/nv-firmware-registry.h common/inc/nv-firmware.h \
    common/inc/nv-ioctl-numa.h common/inc/nv-ioctl-numbers.h common/inc/nv-ioctl.h common/inc/nv-kernel-interface-api.h \
    common/inc/nv.h common/inc/nv_stdarg.h common/inc/nvlimits.h common/inc/nvmisc.h common/inc/nvstatus.h \
    common/inc/nvstatuscodes.h common/inc/nvtypes.h common/inc/os-interface.h common/inc/os/nv_memory_type.h";

/// Returns the files of NVIDIA's nvidia-peermem in the cache, and the driver's version. Downloads
/// missing files.
pub(crate) fn control_source(paths: &Paths) -> Result<(Vec<PathBuf>, String)> {
    let (mut files, version) = driver_source(paths, &DRIVER)?;
    files.truncate(CONTROL_FILES.len());
    Ok((files, version))
}

/// Returns the include directory, nv-p2p.c and its includes in the cache, and the driver's version.
/// Downloads missing files.
pub(super) fn upper_source(
    paths: &Paths,
    driver: &Driver,
) -> Result<(PathBuf, Vec<PathBuf>, String)> {
    let (mut files, version) = driver_source(paths, driver)?;
    let files = files.split_off(CONTROL_FILES.len());
    let upper = paths.cache.join(driver.directory).join("upper");
    Ok((upper, files, version))
}

/// Returns the path of each of the driver's files in the cache, and the end of its path in the
/// package.
fn driver_files(directory: &Path) -> Vec<(PathBuf, PathBuf)> {
    let control = CONTROL_FILES
        .iter()
        .map(|name| (directory.join(name), Path::new("nvidia-peermem").join(name)));
    let upper = UPPER_FILES.split(' ').map(|name| {
        let below = ["nvidia/", "common/inc/"]
            .iter()
            .find_map(|folder| name.strip_prefix(folder));
        let target = directory.join("upper").join(below.unwrap_or(name));
        (target, PathBuf::from(name))
    });
    control.chain(upper).collect()
}

/// Returns all files taken from the driver's package, and the driver's version.
fn driver_source(paths: &Paths, driver: &Driver) -> Result<(Vec<PathBuf>, String)> {
    let directory = paths.cache.join(driver.directory);
    let version = directory.join("version");
    let files = driver_files(&directory);
    let _lock = Lock::take(paths, "control")?;
    if !version.exists() || files.iter().any(|(file, _)| !file.exists()) {
        fetch_driver(paths, driver, &directory, &files)?;
    }
    let files = files.into_iter().map(|(file, _)| file).collect();
    Ok((files, fs::read_to_string(version)?.trim().to_owned()))
}

fn fetch_driver(
    paths: &Paths,
    driver: &Driver,
    directory: &Path,
    files: &[(PathBuf, PathBuf)],
) -> Result<()> {
    let mut stage = Stage::begin(format!(
        "{}: fetching NVIDIA's sources from Debian's archive",
        driver.directory
    ));
    let mut found = apt::search(paths, &mut stage, driver.suites, DRIVER_PACKAGE)?;
    found.retain(|candidate| candidate.package == DRIVER_PACKAGE);
    let candidate = found
        .iter()
        .find(|candidate| candidate.version.starts_with(driver.series))
        .ok_or_else(|| {
            let suites = driver.suites.join(" and ");
            anyhow!(
                "Debian's {suites} have no {DRIVER_PACKAGE} {}*",
                driver.series
            )
        })?;
    let download = directory.join("download");
    let _ = fs::remove_dir_all(&download);
    let package = apt::download(paths, &mut stage, candidate, &download)?;
    let log = paths.cache.join("logs/control.txt");
    apt::extract(&mut stage, &package, &download, &log)?;
    for archive in stamp::files(&download)? {
        if archive.to_string_lossy().contains(".tar.") {
            let mut tar = std::process::Command::new("tar");
            stage.quietly(tar.arg("-C").arg(&download).arg("-xf").arg(&archive), &log)?;
        }
    }
    let unpacked = stamp::files(&download)?;
    for (file, tail) in files {
        let source = unpacked
            .iter()
            .find(|path| path.ends_with(tail))
            .ok_or_else(|| anyhow!("{} has no {}", package.display(), tail.display()))?;
        stamp::put(source, file)?;
    }
    let _ = fs::remove_dir_all(&download);
    let upstream = candidate.version.split('-').next().unwrap_or_default();
    stamp::set(&directory.join("version"), upstream)?;
    stage.done(upstream);
    Ok(())
}
