// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! The modules that a VM loads: order, parameters, and paths in the VM.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{bail, Context as _, Result};

use super::boot::Boot;
use super::options::{Options, Rdma};
use crate::arch::Arch;
use crate::command::system_path;
use crate::guest::{DEVICES, EARLY, EARLY_ON_HOST};
use crate::index;

/// Parameters of modules: `name` to `a=1 b=2`.
type Parameters = BTreeMap<String, String>;

pub(super) struct Plan {
    pub(super) arch: Arch,
    pub(super) early: Vec<PathBuf>,
    /// Modules to load, each with its parameters. On a Debian host, these are names for modprobe.
    /// Otherwise they are files.
    pub(super) modules: Vec<(PathBuf, String)>,
    pub(super) rdma: bool,
    pub(super) host: bool,
}

pub(super) fn plan_host(options: &Options, boot: &Boot) -> Result<Plan> {
    let wanted = [EARLY, EARLY_ON_HOST].concat();
    let mut modules = vec!["ib_uverbs", "rdma_ucm", "rdma_rxe", "nvidia"];
    if options.peermem.is_module() {
        modules.push("nvidia-peermem");
    }
    Ok(Plan {
        early: boot.modules.closure_of_present(&wanted)?,
        modules: modules
            .into_iter()
            .map(|name| {
                let values = match name {
                    "nvidia-peermem" => options.param.join(" "),
                    _ => String::new(),
                };
                (PathBuf::from(name), values)
            })
            .collect(),
        arch: boot.arch,
        rdma: true,
        host: true,
    })
}

/// Returns the module that contains the peer-memory code and its parameter `peer_mem_sysfs`:
/// ib_core, or ib_uverbs on older kernels. Returns `None` if neither module has the parameter.
fn peer_memory(boot: &Boot) -> Result<Option<&'static str>> {
    for name in ["ib_uverbs", "ib_core"] {
        let file = boot.modules.get(name);
        let has = file.map(|file| index::has_parameter(file, "peer_mem_sysfs"));
        if has.transpose()? == Some(true) {
            return Ok(Some(name));
        }
    }
    Ok(None)
}

pub(super) fn plan(options: &Options, boot: &Boot) -> Result<Plan> {
    let mut parameters = Parameters::new();
    let mut add = |module: &str, values: &[String]| {
        if !values.is_empty() {
            parameters.insert(module.to_owned(), values.join(" "));
        }
    };
    add("rdma_rxe", &options.rxe_param);
    add("nvidia", &options.gpu_param);
    let mut ib_param = options.ib_param.clone();
    let peer_memory = peer_memory(boot)?;
    if options.rdma == Rdma::Patched && peer_memory.is_some() {
        let shows = if options.memory_peers { "Y" } else { "N" };
        ib_param.push(format!("peer_mem_sysfs={shows}"));
    }
    add(peer_memory.unwrap_or("ib_core"), &ib_param);
    add("nvidia_peermem", &options.param);

    let early = boot.modules.closure_of_present(EARLY)?;
    let rest = boot.modules.closure_of_present(DEVICES)?;
    let rdma = boot.modules.contains("rdma_rxe");
    let mut wanted = Vec::new();
    if rdma {
        wanted.extend(["ib_uverbs", "rdma_ucm", "rdma_rxe"]);
    }
    if options.gpus > 0 {
        if boot.modules.contains("nvidia") {
            wanted.push("nvidia");
        } else if options.peermem.is_module() {
            bail!("the stand-in GPU's driver (nvidia.ko) is not built");
        }
    }
    if options.bench {
        // The bench sees only clients that register after it is loaded.
        wanted.push("test_bench");
    }
    if options.peermem.is_module() {
        wanted.push("nvidia_peermem");
    }
    if options.interpose {
        wanted.push("test_interpose");
    }
    let mut order = rest;
    for path in boot.modules.closure(&wanted)? {
        if !order.contains(&path) {
            order.push(path);
        }
    }
    order.retain(|path| !early.contains(path));
    let modules: Vec<(PathBuf, String)> = order
        .into_iter()
        .map(|path| {
            let values = parameters.remove(&index::name_of(&path));
            (path, values.unwrap_or_default())
        })
        .collect();
    if let Some((module, values)) = parameters.into_iter().next() {
        bail!("{module} has the parameters '{values}', but is not loaded");
    }
    Ok(Plan {
        early,
        modules,
        arch: boot.arch,
        rdma,
        host: false,
    })
}

/// Copies the modules to their paths in the VM, and makes modprobe's tables.
pub(super) fn lay_modules(root: &Path, plan: &Plan, boot: &Boot) -> Result<PathBuf> {
    let (release, index) = (&boot.release, &boot.modules);
    let tree = root.join("lib/modules").join(release);
    let files = tree.join("runner");
    fs::create_dir_all(&files)?;
    for path in index
        .files()
        .chain(plan.modules.iter().map(|(path, _)| path))
    {
        let target = files.join(path.file_name().context("module without a name")?);
        if target.exists() {
            continue;
        }
        if boot.signing.is_some() || fs::hard_link(path, &target).is_err() {
            fs::copy(path, &target).with_context(|| format!("cannot copy {}", path.display()))?;
        }
        if let Some((signing, _)) = &boot.signing {
            signing.sign(&target)?;
        }
    }
    for empty in ["modules.order", "modules.builtin"] {
        fs::write(tree.join(empty), "")?;
    }
    let status = Command::new("depmod")
        .env("PATH", system_path())
        .arg("-b")
        .arg(root)
        .arg(release)
        .stderr(Stdio::null())
        .status()
        .context("depmod (package kmod)")?;
    if !status.success() {
        bail!("depmod failed");
    }
    if let Some(control) = &boot.control {
        // Copies NVIDIA's module after depmod has run, because modprobe must not find this module,
        // which has the same name as ours.
        fs::create_dir_all(tree.join("control"))?;
        fs::copy(control, tree.join("control/nvidia-peermem.ko"))?;
    }
    for (name, file) in &boot.drivers {
        let folder = tree.join("drivers").join(name);
        fs::create_dir_all(&folder)?;
        fs::copy(
            file,
            folder.join(file.file_name().context("module without a name")?),
        )?;
    }
    Ok(tree)
}
