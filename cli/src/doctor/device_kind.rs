// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Unusual devices: GPUs without GPUDirect RDMA, virtual functions, coherent memory.

use super::scan::{check, Scan};
use crate::finding::{Finding, Level, Subject};

check! {
    "device-kind": "GPUs that have no GPUDirect RDMA, virtual functions, and GPUs whose memory is coherent (Grace)",
    |scan| scan.has_gpu() || scan.has_hca(), device_kind, OnPaths(tests::FAULTS)
}

fn device_kind(scan: &Scan<'_>) -> Vec<Finding> {
    let mut findings = Vec::new();
    // A display GPU beside GPUs with GPUDirect RDMA is not a fault.
    let of_none = match scan.gpus().all(|gpu| gpu.why_no_gpudirect().is_some()) {
        true => Level::Fault,
        false => Level::Note,
    };
    for gpu in scan.gpus() {
        let function = scan.machine.functions.get(&gpu.at);
        let new = |found: String| Subject::gpu(gpu).note(found);
        if let Some(why) = gpu.why_no_gpudirect() {
            let found = format!("{} has no GPUDirect RDMA: {}", gpu.at, gpu.name);
            findings.push(
                Finding::new(of_none, Subject::gpu(gpu), found)
                    .why(why)
                    .fix("Copy through host memory, as NCCL does by itself (NCCL_NET_GDR_LEVEL=LOC forces this)"),
            );
        }
        if gpu.is_coherent {
            // If Data Direct reaches the memory, the checks of paths examine the path through Data
            // Direct.
            let judged = match scan.pci_gpus().any(|it| it.at == gpu.at) {
                true => "The path to it is not a BAR behind bridges, except through Data Direct, whose path is \
                    judged.",
                false => "The path to it is not a BAR behind bridges, so the checks of paths say nothing.",
            };
            findings.push(
                new(format!("the memory of {} is coherent with the processor's (Grace)", gpu.at))
                    .why(format!(
                        "{judged} The persistent client accepts such memory; a revocable client refuses memory that \
                         processors cache. NVIDIA recommends dma-buf (docs/dma-buf.md).",
                    )),
            );
        }
        if let Some(physical) = function.and_then(|function| function.physical) {
            findings.push(
                new(format!("{} is a virtual function of {physical}", gpu.at)).why(
                    "nv-p2p.h says that vGPUs have no persistent pins: if registrations are refused, load the module \
                     with persistent_api_support=0.",
                ),
            );
        }
    }
    for hca in scan.hcas().filter(|hca| !hca.is_software) {
        let function = hca.at.and_then(|at| scan.machine.functions.get(&at));
        if let Some(function) = function {
            if let Some(physical) = function.physical {
                findings.push(
                    Subject::hca(hca).note(format!(
                        "{} is a virtual function of {physical}", function.at
                    ))
                    .why("Its link, packet sizes and ordering are those of the physical function, and its bandwidth \
                        is shared."),
                );
            }
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::super::tests::paths::faults;

    faults! {
        "a GPU for games",
            "fault device-kind: …0000:13:00.0 has no GPUDirect RDMA: NVIDIA GeForce RTX 4090… fix …Copy through host \
             memory" => |fixture| fixture.only_gpu_is("NVIDIA GeForce RTX 4090");
        "a GPU of a DGX Spark",
            "fault device-kind: …0000:13:00.0 has no GPUDirect RDMA: NVIDIA GB10… fix …Copy through host memory" => |fixture| fixture.only_gpu_is("NVIDIA GB10");
    }
}
