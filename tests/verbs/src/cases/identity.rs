// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! What other programs and administrators see of the module: the names, files and refusals that they rely on.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::ensure;
use anyhow::Context;
use anyhow::Result;

use crate::counters;
use crate::gpu::GRANULE;
use crate::ktap;
use crate::ktap::note;
use crate::ktap::Case;
use crate::lab::Flavour;
use crate::lab::Lab;
use crate::lab::Peermem;
use crate::module;
use crate::module::Replaced;
use crate::rdma::full_access;
use crate::sys;
use crate::sys::Running;

const M2: usize = GRANULE as usize;
const MEMORY_PEERS: &str = "/sys/kernel/mm/memory_peers";

pub(super) const CASES: &[Case] = &[
    Case {
        name: "identity.version",
        run: version,
    },
    Case {
        name: "identity.parameters",
        run: parameters,
    },
    Case {
        name: "identity.unload_refused_while_registered",
        run: unload_refused,
    },
    Case {
        name: "identity.unload_and_load_again",
        run: load_again,
    },
    Case {
        name: "identity.memory_peers",
        run: memory_peers,
    },
];

/// NCCL and UCX look for this file.
fn version(lab: &Lab) -> Result<()> {
    lab.needs_module()?;
    let version = module::version()?;
    note("version", &version);
    let first = version.split('.').next().context("empty")?;
    ensure!(
        first.parse::<u32>().is_ok(),
        "a version that does not begin with a number: {version}"
    );
    // The runner knows it from the file that it loaded.
    if let Ok(expected) = std::env::var("PEERMEM_VERSION") {
        ensure!(
            version == expected,
            "{version} is loaded, the file says {expected}"
        );
    }
    Ok(())
}

fn parameters(lab: &Lab) -> Result<()> {
    lab.needs_module()?;
    let expected = match lab.setup.peermem {
        // 550 came before the second.
        Peermem::Nvidia => &module::PARAMETERS[..1],
        _ => &module::PARAMETERS[..],
    };
    for name in expected {
        let path = format!("/sys/module/{}/parameters/{name}", module::NAME);
        let value = sys::read_line(&path)?;
        note(name, &value);
        ensure!(
            value.parse::<i32>().is_ok(),
            "{name} is not an integer: {value:?}"
        );
        let mode = fs::metadata(&path)?.permissions().mode() & 0o777;
        ensure!(mode == 0o444, "{name} has mode {mode:o}");
    }
    let found = fs::read_dir(format!("/sys/module/{}/parameters", module::NAME))?.count();
    ensure!(found >= expected.len(), "{found} parameters");
    Ok(())
}

fn unload_refused(lab: &Lab) -> Result<()> {
    lab.needs_module()?;
    let idle = counters::module_references(module::NAME)?;
    ensure!(idle == 0, "{idle} references without a registration");
    let memory = lab.allocate_gpu(M2)?;
    let regions = (0..3)
        .map(|_| Ok(lab.near.register(memory.span(0, M2)?, full_access())?))
        .collect::<Result<Vec<_>>>()?;
    let held = counters::module_references(module::NAME)?;
    note("references_of_3_regions", held);
    // A region that can be revoked may hold another one for the callback that is to come.
    ensure!(held >= 3, "{held} references under 3 regions");
    for name in [module::NAME, "nvidia"] {
        match sys::unload_module(name) {
            Err(error) if error.raw_os_error() == Some(libc::EWOULDBLOCK) => {}
            other => anyhow::bail!("unloading {name} under a live region: {other:?}"),
        }
    }
    let rmmod =
        Running::start(Command::new("rmmod").arg(module::NAME))?.finish(Duration::from_secs(10))?;
    ensure!(
        !rmmod.success() && rmmod.output.contains("in use"),
        "rmmod said {:?}",
        rmmod.output
    );
    drop(regions);
    let idle = counters::module_references(module::NAME)?;
    ensure!(idle == 0, "{idle} references after the last region");
    Ok(())
}

fn load_again(lab: &Lab) -> Result<()> {
    lab.needs_module()?;
    let memory = lab.allocate_gpu(M2)?;
    let before = module::parameters();
    let replaced = Replaced::begin()?;
    ensure!(!module::is_loaded(), "it is still there");
    match lab.near.register(memory.span(0, M2)?, full_access()) {
        Err(refused) if refused.errno() == libc::EFAULT => {}
        other => anyhow::bail!("registration without a module: {other:?}"),
    }
    replaced.end()?;
    ensure!(
        module::parameters() == before,
        "other parameters than before: {:?}",
        module::parameters()
    );
    lab.near.register(memory.span(0, M2)?, full_access())?;
    Ok(())
}

fn statistic(client: &str, name: &str) -> Result<u64> {
    Ok(sys::read_line(&format!("{MEMORY_PEERS}/{client}/{name}"))?.parse()?)
}

/// The statistics that some kernels have; on others the whole directory is missing.
fn memory_peers(lab: &Lab) -> Result<()> {
    lab.needs_module()?;
    if !Path::new(MEMORY_PEERS).exists() {
        return ktap::skip(format_args!("this kernel has no {MEMORY_PEERS}"));
    }
    let mut clients = fs::read_dir(MEMORY_PEERS)?
        .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
        .collect::<Result<Vec<_>>>()?;
    clients.sort();
    note("clients", clients.join(" "));
    let both = lab.setup.peermem == Peermem::Nvidia
        || counters::module_parameter(module::NAME, "persistent_api_support").as_deref()
            == Some("0");
    let expected: &[&str] = if both {
        &["nv_mem", "nv_mem_nc"]
    } else {
        &["nv_mem"]
    };
    ensure!(
        clients == expected,
        "clients {clients:?} where {expected:?} were expected"
    );

    // The first client takes what it can revoke, and the other what it cannot.
    let serving = if both && lab.setup.flavour() == Flavour::Persistent {
        "nv_mem_nc"
    } else {
        "nv_mem"
    };
    let memory = lab.allocate_gpu(M2)?;
    let names = [
        "num_alloc_mrs",
        "num_dealloc_mrs",
        "num_reg_bytes",
        "num_dereg_bytes",
    ];
    let read = || {
        names
            .map(|name| statistic(serving, name))
            .into_iter()
            .collect::<Result<Vec<_>>>()
    };
    let before = read()?;
    let region = lab.near.register(memory.span(0, M2)?, full_access())?;
    let registered = read()?;
    drop(region);
    let after = read()?;
    let gain = |from: &[u64], to: &[u64]| {
        to.iter()
            .zip(from)
            .map(|(to, from)| to.wrapping_sub(*from))
            .collect::<Vec<_>>()
    };
    ensure!(
        gain(&before, &registered) == [1, 0, M2 as u64, 0],
        "registration counted {:?}",
        gain(&before, &registered)
    );
    ensure!(
        gain(&registered, &after) == [0, 1, 0, M2 as u64],
        "its end counted {:?}",
        gain(&registered, &after)
    );
    Ok(())
}
