// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Visibility of the module to NCCL, UCX and other consumers. Each consumer tests for the module
//! differently, and the check repeats these tests. docs/identity.md has the table of consumers.
//! tests/verbs/src/cases/consumers.rs names the source of each test.

use super::clients::MEMORY_PEERS;
use super::dma_buf::DmaBuf;
use crate::doctor::scan::{check, Scan};
use crate::finding::{Finding, Level, Subject};
use crate::host::{Host, Seen, Unseen};
use crate::software::{Module, REGISTER};

check! {
    "consumers": "whether NCCL, UCX, NVSHMEM and others find the module where each of them looks",
    super::has_module, check, OfSoftware(tests::FAULTS)
}

const NV_MEM: &str = "/sys/kernel/mm/memory_peers/nv_mem/version";
const NV_MEM_NC: &str = "/sys/kernel/mm/memory_peers/nv_mem_nc/version";
/// Path with a name that no client ever had.
const BY_MODULE_NAME: &str = "/sys/kernel/mm/memory_peers/nvidia-peermem/version";
const VERSION: &str = "/sys/module/nvidia_peermem/version";
const FORERUNNER: &str = "/sys/module/nv_peer_mem/version";
const REFERENCES: &str = "/sys/module/nvidia_peermem/refcnt";

/// Test by which a consumer looks for the module.
enum Probe {
    /// Any of these paths exists.
    AnyOf(&'static [&'static str]),
    /// ib_core exports `ib_register_peer_memory_client`, and the name of an RDMA device has one of
    /// these prefixes.
    SymbolAndNic(&'static [&'static str]),
    /// lsmod lists the module.
    Lsmod,
    /// lsmod lists the module among the users of ib_core.
    UserOfIbCore,
    /// The consumer does not look for the module. It registers GPU memory and handles a failure.
    Registers,
}

struct Consumer {
    name: &'static str,
    probe: Probe,
    /// Version of the consumer that also looks outside `memory_peers`, if any.
    fix: Option<&'static str>,
}

const fn consumer(name: &'static str, probe: Probe) -> Consumer {
    Consumer {
        name,
        probe,
        fix: None,
    }
}

const fn older(name: &'static str, probe: Probe, fix: &'static str) -> Consumer {
    Consumer {
        name,
        probe,
        fix: Some(fix),
    }
}

use Probe::{AnyOf, Lsmod, Registers, SymbolAndNic, UserOfIbCore};

const CONSUMERS: &[Consumer] = &[
    consumer("NCCL from 2.23", AnyOf(&[NV_MEM, NV_MEM_NC, VERSION])),
    older("NCCL to 2.22", AnyOf(&[NV_MEM, NV_MEM_NC]), "NCCL 2.23"),
    consumer("NCCL GIN-GDAKI", AnyOf(&[VERSION])),
    older(
        "older FlagCX and TensorPipe",
        AnyOf(&[NV_MEM, BY_MODULE_NAME]),
        "newer FlagCX and TensorPipe",
    ),
    consumer("UCX from 1.18", AnyOf(&[NV_MEM, VERSION, FORERUNNER])),
    older("UCX to 1.17", AnyOf(&[NV_MEM]), "UCX 1.18"),
    consumer(
        "NVSHMEM from 3.4.5",
        AnyOf(&[NV_MEM, BY_MODULE_NAME, VERSION]),
    ),
    older(
        "NVSHMEM before 3.4.5",
        AnyOf(&[NV_MEM, BY_MODULE_NAME]),
        "NVSHMEM 3.4.5",
    ),
    consumer("UCC tl/mlx5", AnyOf(&[NV_MEM, VERSION, FORERUNNER])),
    consumer("UCC multicast", AnyOf(&[NV_MEM])),
    consumer("GASNet-EX", AnyOf(&[NV_MEM])),
    consumer("nvidia-fs", AnyOf(&[NV_MEM])),
    older(
        "Open MPI 4 (openib)",
        AnyOf(&[NV_MEM]),
        "Open MPI 5, which has UCX",
    ),
    consumer("libfabric verbs", SymbolAndNic(&["mlx", "bnxt_re", "roce"])),
    consumer("mscclpp", Lsmod),
    consumer("Mooncake (tent)", Lsmod),
    consumer("fabtests", Lsmod),
    consumer("gpu-operator's validator", Lsmod),
    consumer("node feature discovery", Lsmod),
    consumer("gpu-operator's sidecar", AnyOf(&[REFERENCES])),
    consumer("gpud", UserOfIbCore),
    consumer("perftest, gdrcopy, NIXL", Registers),
];

impl Probe {
    /// Returns the evidence from which the consumer concludes that the module is loaded, if any.
    fn ask(&self, scan: &Scan<'_>) -> Seen<Option<String>> {
        let host = scan.host;
        Ok(match self {
            Self::AnyOf(paths) => {
                for path in *paths {
                    if host.has(path)? {
                        return Ok(Some((*path).to_owned()));
                    }
                }
                None
            }
            Self::SymbolAndNic(prefixes) => {
                let nic = scan
                    .machine
                    .hcas
                    .iter()
                    .find(|hca| prefixes.iter().any(|prefix| hca.name.starts_with(prefix)));
                match (scan.software().register()?, nic) {
                    (Some(_), Some(nic)) => Some(format!(
                        "{REGISTER}, with or without a module, and {}",
                        nic.name
                    )),
                    _ => None,
                }
            }
            Self::Lsmod => line_of(host, "nvidia_peermem")?.map(|_| "lsmod".to_owned()),
            Self::UserOfIbCore => line_of(host, "ib_core")?
                .filter(|line| line.contains("nvidia_peermem"))
                .map(|_| "ib_core's line of lsmod".to_owned()),
            Self::Registers => Some("registers without a test, and handles the error".to_owned()),
        })
    }

    /// Returns `true` if the consumer looks only in `memory_peers`.
    fn looks_there_alone(&self) -> bool {
        matches!(self, Self::AnyOf(paths) if paths.iter().all(|path| path.starts_with(MEMORY_PEERS)))
    }
}

/// Returns the line of a module in `/proc/modules`, like lsmod.
fn line_of(host: &dyn Host, module: &str) -> Seen<Option<String>> {
    let modules = host.matching("/proc/modules", "nvidia_peermem")?;
    let line = modules
        .lines()
        .find(|line| line.split_whitespace().next() == Some(module));
    Ok(line.map(str::to_owned))
}

fn check(scan: &Scan<'_>) -> Vec<Finding> {
    // Without a module, no consumer can find it.
    let Some(module) = scan.software().loaded() else {
        return Vec::new();
    };
    let mut findings = Vec::new();
    let mut blind: Vec<&Consumer> = Vec::new();
    for consumer in CONSUMERS {
        let ok = |text: String| Subject::Machine.ok(text);
        match consumer.probe.ask(scan) {
            Ok(Some(by)) => findings.push(ok(format!("{}: {by}", consumer.name))),
            Ok(None) if consumer.probe.looks_there_alone() => blind.push(consumer),
            Ok(None) => findings.push(ok(format!(
                "{}: does not find it{}",
                consumer.name,
                why_not(&consumer.probe)
            ))),
            Err(why) => findings.push(Scan::unseen(
                Subject::Machine,
                format!("where {} looks", consumer.name),
                &why,
            )),
        }
    }
    // If the directory exists without the module's clients, the check `clients` reports the fault.
    if !blind.is_empty() && scan.host.has(MEMORY_PEERS) == Ok(false) {
        findings.push(reported(scan, module, &blind));
    }
    findings
}

/// Returns the reason why a consumer's probe finds nothing, or an empty text if the probe needs no
/// explanation. Consumers that look only at `memory_peers` are reported by [`reported`].
fn why_not(probe: &Probe) -> &'static str {
    match probe {
        UserOfIbCore => {
            ": it looks for the module in ib_core's line of lsmod. OFED since 5.5 has peer memory in ib_uverbs, where \
             this test finds no module, not even NVIDIA's"
        }
        SymbolAndNic(_) => ": no RDMA device has a name that it looks for",
        _ => "",
    }
}

/// Reports consumers that do not find the module, because they look only at `memory_peers`.
fn reported(scan: &Scan<'_>, module: &Module, blind: &[&Consumer]) -> Finding {
    let names: Vec<&str> = blind.iter().map(|consumer| consumer.name).collect();
    let newer: Vec<&str> = blind.iter().filter_map(|consumer| consumer.fix).collect();
    let alternative = DmaBuf::judge(scan);
    let level = match alternative.works() {
        // NCCL and UCX, which matter most, try dma-buf before they look for a module.
        Some(true) => Level::Note,
        _ => Level::Warning,
    };
    let here = match (module.is_ours, Module::parameter(scan.host, "memory_peers")) {
        (true, Ok(value)) if value == "N" => {
            "load the module with memory_peers=1 (\"options nvidia-peermem memory_peers=1\" in modprobe.d)"
        }
        // The build for the proprietary nvidia.ko lacks the parameter.
        (true, Err(Unseen::Absent)) => "NVIDIA's open kernel modules (nvidia-open) and peermem-rs built beside them: \
            beside the proprietary driver, peermem-rs cannot make the directory",
        (true, _) => "see why the module could not make the directory: `dmesg | grep memory_peers`",
        (false, _) => "peermem-rs, which makes the directory if ib_core cannot",
    };
    Finding::new(level,
        Subject::Machine,
        format!(
            "nvidia_peermem is loaded, but these programs do not find it, because they only look in {MEMORY_PEERS}: \
             {}",
            names.join(", ")
        ),
    )
    .why("kernels since 6.4 do not let ib_core make that directory")
    .costs(format!(
        "they copy through the host without saying so (in NVIDIA/nccl#1676, AllReduce fell from 180 to about 10 \
        GB/s); {}",
        alternative.said()
    ))
    .fix(format!("{here}; or newer software: {}", newer.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::super::tests::{faults, nvidias, proprietary, PEERS};
    use crate::software::MODULE;

    faults! {
        "memory_peers turned off", "note consumers: …memory_peers=1" => |fixture| {
            fixture.remove(PEERS);
            fixture.file(&format!("{MODULE}/parameters/memory_peers"), "N\n");
        };
        "no memory_peers of the build for the proprietary driver", "note consumers: …nvidia-open" => |fixture| {
            fixture.remove(PEERS);
            fixture.remove(&format!("{MODULE}/parameters/memory_peers"));
        };
        "NVIDIA's module on a kernel without memory_peers, and no dma-buf",
            "warning consumers: …NCCL to 2.22", "note dma-buf: …does not work here" => |fixture| {
            nvidias(fixture, "570.86.15");
            proprietary(fixture);
        };
    }
}
