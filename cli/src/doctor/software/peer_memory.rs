// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Support for peer memory in the loaded ib_core, and the RDMA stack (kernel, MLNX_OFED, DOCA-OFED)
//! that provides it.

use super::dma_buf::DmaBuf;
use super::presence;
use crate::doctor::scan::{check, Scan};
use crate::finding::{Finding, Subject};
use crate::software::REGISTER;

check! {
    "peer-memory": "whether the loaded ib_core has peer memory, and which stack it belongs to",
    |scan| scan.has_both(), check, OfSoftware(tests::FAULTS)
}

fn check(scan: &Scan<'_>) -> Vec<Finding> {
    let software = scan.software();
    let finding = match software.register() {
        // A loaded module proves that peer memory exists.
        Err(_) if software.loaded().is_some() => return Vec::new(),
        Err(why) => Scan::unseen(Subject::Machine, "/proc/kallsyms", &why),
        Ok(Some(symbol)) => {
            let module = symbol.module.as_deref().unwrap_or("the kernel itself");
            let found = format!("{REGISTER} is in {module}{}", version(scan, module));
            Subject::Machine.ok(found)
        }
        // In OFED since 5.5, ib_uverbs provides peer memory, but ib_uverbs is not loaded.
        Ok(None) if presence::lacks_uverbs(scan) => return Vec::new(),
        Ok(None) => lacking(scan),
    };
    vec![finding]
}

/// Formats the version of OFED's modules: `, version 24.10-0.7.0`. The kernel's modules have no
/// version.
fn version(scan: &Scan<'_>, module: &str) -> String {
    [module, "ib_core", "mlx_compat"]
        .iter()
        .find_map(|name| scan.host.text(&format!("/sys/module/{name}/version")).ok())
        .map(|version| format!(", version {version}"))
        .unwrap_or_default()
}

fn lacking(scan: &Scan<'_>) -> Finding {
    let alternative = DmaBuf::judge(scan);
    let kernel = match &scan.software().kernel {
        Ok(kernel) => format!(" of kernel {kernel}"),
        Err(_) => String::new(),
    };
    Finding::new(alternative.level_without_module(scan.software().is_wanted()),
        Subject::Machine,
        format!("the loaded ib_core{kernel} has no peer memory: no {REGISTER}"),
    )
    .why(
        "nvidia_peermem registers with ib_core's peer memory. Mainline's ib_core never had peer memory; the ib_core of \
        MLNX_OFED, of DOCA-OFED and of some distributions' kernels has it",
    )
    .costs(alternative.costs_without_module())
    .fix(format!(
        "install MLNX_OFED or DOCA-OFED for this kernel, and load its modules (`sudo /etc/init.d/openibd restart`); \
        or do without nvidia_peermem: {}",
        alternative.said()
    ))
}

#[cfg(test)]
mod tests {
    use super::super::tests::{faults, unload, without_function};
    use crate::software::REGISTER;

    faults! {
        "an ib_core without peer memory", "warning peer-memory: …DOCA-OFED" => |fixture| {
            unload(fixture);
            without_function(fixture, REGISTER);
        };
        "an ib_core without peer memory, and no other way", "fault peer-memory: …no ib_register_peer_memory_client" =>
            |fixture| {
                unload(fixture);
                without_function(fixture, REGISTER);
                without_function(fixture, "mlx5_ib_reg_user_mr_dmabuf");
            };
    }
}
