// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Settings of the kernel's modules at run time: their parameters, and calls to the stand-in GPU
//! that fail on request (see `tests/gpu`).

use std::path::PathBuf;
use std::{env, fs};

use anyhow::{Context, Result};

use crate::{ktap, sys};

/// A changed module parameter or a similar file in debugfs, restored when dropped.
#[derive(Debug)]
pub(crate) struct Parameter {
    path: PathBuf,
    before: String,
}

impl Parameter {
    pub(crate) fn set(module: &str, name: &str, value: &str) -> Result<Self> {
        let path = format!("/sys/module/{module}/parameters/{name}");
        if module == "nvidia" && has_nvidias_upper_half() && !is_settable(&path) {
            return ktap::skip("with NVIDIA's own nv-p2p.c, no parameter changes this");
        }
        Self::set_file(&path, value)
    }

    pub(crate) fn set_file(path: &str, value: &str) -> Result<Self> {
        let before = sys::read_line(path)?;
        fs::write(path, value).with_context(|| format!("{value:?} to {path}"))?;
        Ok(Self {
            path: path.into(),
            before,
        })
    }
}

impl Drop for Parameter {
    fn drop(&mut self) {
        // The earlier value may be empty. The newline keeps the write from being empty, because an
        // empty write sets nothing.
        if let Err(error) = fs::write(&self.path, format!("{}\n", self.before)) {
            ktap::note("not_restored", error);
        }
    }
}

/// Returns `true` if NVIDIA's own code pins GPU memory here: the code of driver 550
/// (`--provider nvidia`) or of driver 555 (`nvidia555`).
pub(crate) fn has_nvidias_upper_half() -> bool {
    env::var("TESTVM_PROVIDER").is_ok_and(|provider| provider.starts_with("nvidia"))
}

fn is_settable(path: &str) -> bool {
    fs::metadata(path).is_ok_and(|metadata| !metadata.permissions().readonly())
}

/// Returns the version of nvidia.ko's page tables, as the loaded stand-in reports it.
pub(crate) fn table_version() -> Result<u32> {
    let path = "/sys/module/nvidia/parameters/table_version";
    sys::read_line(path)?.parse().context(path)
}

pub(crate) fn table_version_is_settable() -> bool {
    is_settable("/sys/module/nvidia/parameters/table_version")
}

fn failure(place: &str) -> String {
    format!("/sys/kernel/debug/nvidia/fail/{place}")
}

/// Makes the next call to the stand-in fail with `errno` at failure point `place`. For example, the
/// call returns `-EIO` if `errno` is `libc::EIO`.
pub(crate) fn fail_next(place: &str, errno: i32) -> Result<()> {
    fail_nth(place, 1, errno)
}

/// Makes only one call fail at failure point `place`: the `nth` from now on.
pub(crate) fn fail_nth(place: &str, nth: u32, errno: i32) -> Result<()> {
    let path = failure(place);
    fs::write(&path, format!("{nth} {errno}")).with_context(|| path)
}

/// Disarms failure point `place`. Returns `true` if a call has failed there.
pub(crate) fn fail_none(place: &str) -> Result<bool> {
    let path = failure(place);
    let failed = sys::read_line(&path)?.contains("hits=1");
    fs::write(&path, "0").with_context(|| path)?;
    Ok(failed)
}

/// Announces an expected report to the program that checks the kernel log. The report comes shortly
/// before or after this call, and one of its lines matches `pattern`.
pub(crate) fn provoke(pattern: &str) -> Result<()> {
    fs::write("/dev/kmsg", format!("gdr: provokes {pattern}=1\n")).context("/dev/kmsg")
}

/// Announces nvidia.ko's warning about a failed put, in either mode, to the program that checks the
/// kernel log.
pub(crate) fn provoke_failing_put() -> Result<()> {
    provoke(if has_nvidias_upper_half() {
        r"WARNING: .*nv-p2p\.c"
    } else {
        "nvidia: put_pages(_persistent)? failed"
    })
}

/// Makes the next persistent put fail with `errno`. nvidia.ko warns, and the pin is lost until its
/// GPU is unbound.
pub(crate) fn lose_next_put(errno: i32) -> Result<()> {
    provoke_failing_put()?;
    fail_next("put_pages_persistent", errno)
}

pub(crate) fn rebind(bdf: &str) -> Result<()> {
    write_driver("unbind", bdf)?;
    write_driver("bind", bdf)
}

/// Writes the address of a GPU to a file of its PCI driver, such as `unbind`.
pub(crate) fn write_driver(file: &str, bdf: &str) -> Result<()> {
    let path = format!("/sys/bus/pci/drivers/nvidia/{file}");
    fs::write(&path, bdf).with_context(|| format!("{bdf} to {path}"))
}
