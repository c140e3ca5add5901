// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! The peermem module: loading, unloading and its state.

use std::path::Path;

use anyhow::{ensure, Result};

use crate::{counters, ktap, sys};

pub(crate) const NAME: &str = "nvidia_peermem";
/// The parameters of NVIDIA's nvidia-peermem. The second parameter exists since driver 560.
pub(crate) const PARAMETERS: [&str; 2] = ["peerdirect_support", "persistent_api_support"];

/// Parameter that makes nvidia.ko map all persistent pins of this module.
pub(crate) const PROVIDER_MAPS: &str = "provider_maps=1";

pub(crate) fn is_loaded() -> bool {
    Path::new("/sys/module").join(NAME).exists()
}

pub(crate) fn version() -> Result<String> {
    sys::read_line(&format!("/sys/module/{NAME}/version"))
}

/// Returns the current parameters as arguments for loading the module.
pub(crate) fn parameters() -> Vec<String> {
    PARAMETERS
        .into_iter()
        // Only our module has this parameter.
        .chain(["provider_maps"])
        .filter_map(|name| {
            counters::module_parameter(NAME, name).map(|value| format!("{name}={value}"))
        })
        .collect()
}

pub(crate) fn unload() -> Result<()> {
    sys::succeed("rmmod", [NAME]).map(drop)
}

pub(crate) fn references_are(expected: u64) -> Result<()> {
    let held = counters::module_references(NAME)?;
    ktap::same("references to the module", held, expected)
}

/// Tries to unload a module. Returns `false` if the module is in use.
pub(crate) fn unloaded(name: &str) -> Result<bool> {
    match sys::unload_module(name) {
        Ok(()) => Ok(true),
        Err(error) if error.raw_os_error() == Some(libc::EWOULDBLOCK) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Checks that the module cannot be unloaded while a callback is outstanding.
pub(crate) fn must_stay() -> Result<()> {
    let goes = unloaded(NAME)?;
    ensure!(!goes, "the module was unloaded before its callback came");
    Ok(())
}

pub(crate) fn load(parameters: &[String]) -> Result<()> {
    let parameters = parameters.iter().map(String::as_str);
    sys::succeed("modprobe", [NAME].into_iter().chain(parameters)).map(drop)
}

/// Returns the path of the module's file that modprobe would load.
pub(crate) fn file() -> Result<String> {
    let output = sys::succeed("modinfo", ["-n", NAME])?;
    Ok(output.trim().to_owned())
}

pub(crate) fn load_file(file: &Path) -> Result<()> {
    sys::succeed("insmod", [file]).map(drop)
}

/// Returns `true` if the module wrote this line of the kernel's log.
pub(crate) fn wrote(line: &str) -> bool {
    line.starts_with("nvidia-peermem:") || line.starts_with("nvidia_peermem:")
}

/// Replacement of the loaded module by another module, or by none. The original module is loaded
/// again when this value is dropped.
#[derive(Debug)]
pub(crate) struct Replaced {
    parameters: Vec<String>,
    is_back: bool,
}

impl Replaced {
    /// Unloads the module. The caller loads the replacement.
    pub(crate) fn begin() -> Result<Self> {
        let parameters = parameters();
        unload()?;
        Ok(Self {
            parameters,
            is_back: false,
        })
    }

    /// Remembers the parameters of the loaded module, which the caller unloads.
    pub(crate) fn remember() -> Self {
        Self {
            parameters: parameters(),
            is_back: false,
        }
    }

    /// Loads the module again and returns any error.
    pub(crate) fn end(mut self) -> Result<()> {
        self.restore()
    }

    fn restore(&mut self) -> Result<()> {
        self.is_back = true;
        if is_loaded() {
            unload()?;
        }
        load(&self.parameters)
    }
}

impl Drop for Replaced {
    fn drop(&mut self) {
        if self.is_back {
            return;
        }
        if let Err(error) = self.restore() {
            eprintln!("the module under test could not be loaded again: {error:#}");
        }
    }
}

/// Runs `body` with the module reloaded with one more parameter.
pub(crate) fn loaded_with_also(parameter: &str, body: impl FnOnce() -> Result<()>) -> Result<()> {
    let mut all = parameters();
    all.push(parameter.to_owned());
    loaded_with(&all, body)
}

/// Runs `body` with the module reloaded with these parameters. Then loads the module with its
/// earlier parameters.
pub(crate) fn loaded_with(parameters: &[String], body: impl FnOnce() -> Result<()>) -> Result<()> {
    let replaced = Replaced::begin()?;
    load(parameters)?;
    body()?;
    replaced.end()
}
