// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Variables that force, forbid or limit GPUDirect RDMA, and what each value means. Each entry of
//! [`RULES`] describes one variable.
//!
//! Sources: NCCL's page "Environment Variables" and the names in libnccl 2.32.3; UCX's `ib_md.c`
//! and its page on transports; NVSHMEM's page "Environment Variables" and its release notes. None
//! of these settings was tried with a GPU and a NIC.

use serde::Serialize;

use super::environment::Variable;
use crate::software::nccl;

/// Effect of a variable on GPUDirect RDMA.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Effect {
    /// The software does not use GPUDirect RDMA.
    Forbids,
    /// The software does not use a part of GPUDirect RDMA.
    Limits,
    /// The software uses GPUDirect RDMA or fails.
    Forces,
    /// GPUDirect RDMA is possible, which is the default.
    Allows,
    /// Selects devices.
    Selects,
    /// The value is invalid, or there is no rule for the variable.
    NotJudged,
}

/// A variable with the meaning of its value.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Judged {
    pub(super) name: String,
    pub(super) value: String,
    /// Origin of the value: `in the first environment`.
    pub(super) place: String,
    pub(super) effect: Effect,
    /// Meaning of the value. In JSON, `null` stands for a variable that is not judged.
    pub(super) meaning: Option<&'static str>,
    /// Library that reads the variable.
    pub(super) library: Option<&'static str>,
}

type Meaning = Option<(Effect, &'static str)>;

struct Rule {
    name: &'static str,
    library: &'static str,
    /// Returns the effect of a value, or `None` for a value that the software does not know.
    judge: fn(&str) -> Meaning,
}

use Effect::{Allows, Forbids, Forces, Limits, Selects};

/// Parses a number as NCCL does, by `strtoll`.
fn number(value: &str) -> Option<i64> {
    match value.strip_prefix("0x") {
        Some(digits) => i64::from_str_radix(digits, 16).ok(),
        None => value.parse().ok(),
    }
}

/// Parses a truth value of NVSHMEM, which decides by the first letter.
fn truth(value: &str) -> Option<bool> {
    match value.chars().next()?.to_ascii_lowercase() {
        '0' | 'n' | 'f' => Some(false),
        '1'..='9' | 'y' | 't' => Some(true),
        _ => None,
    }
}

/// Returns a word in lower case, or `None` for an empty word.
fn word(value: &str) -> Option<String> {
    Some(value.to_ascii_lowercase()).filter(|word| !word.is_empty())
}

/// Defines [`RULES`]. The expression of a rule parses the value. The cases of the rule give the
/// effect and the meaning of each result. A value without a case is unknown to the software.
macro_rules! rules {
    ($($library:literal $name:literal, |$value:ident| $by:expr => {
        $($case:pat => $effect:ident, $meaning:literal;)*
    })*) => {
        #[allow(unreachable_patterns, reason = "some rules have a case for each value")]
        const RULES: &[Rule] = &[$(Rule {
            name: $name,
            library: $library,
            judge: |$value| match $by {
                $($case => Some(($effect, $meaning)),)*
                _ => None,
            },
        }),*];
    };
}

rules! {
    "NCCL" "NCCL_NET_GDR_LEVEL", |value| nccl::level_of(value) => {
        Some("LOC") => Forbids, "no path is near enough: NCCL copies through the host";
        Some("SYS") => Allows, "NCCL uses GPUDirect RDMA on each path, also between NUMA nodes";
        Some(_) => Limits, "NCCL uses GPUDirect RDMA up to this class of path; the default is PXB";
    }
    "NCCL" "NCCL_NET_GDR_READ", |value| number(value) => {
        Some(0) => Limits, "the NIC does not read GPU memory: NCCL copies what it sends through the host; what it \
            receives goes directly";
        Some(_) => Allows, "the NIC also reads GPU memory, on machines without NVLink, too";
    }
    "NCCL" "NCCL_DMABUF_ENABLE", |value| number(value) => {
        Some(0) => Limits, "NCCL registers GPU memory only by nvidia_peermem";
        Some(_) => Allows, "NCCL tries dma-buf before nvidia_peermem (the default)";
    }
    "NCCL" "NCCL_IB_DISABLE", |value| number(value) => {
        Some(0) => Allows, "NCCL uses InfiniBand and RoCE (the default)";
        Some(_) => Forbids, "NCCL uses neither InfiniBand nor RoCE, but sockets";
    }
    "NCCL" "NCCL_NET", |value| word(value).as_deref() => {
        Some("socket") => Forbids, "NCCL uses sockets";
        Some("ib") => Forces, "NCCL uses InfiniBand or RoCE, or fails";
        Some(_) => Selects, "NCCL uses this network plugin, or fails";
    }
    "NCCL" "NCCL_NET_PLUGIN", |value| Some(value).filter(|it| !it.is_empty()) => {
        Some("none") => Allows, "NCCL uses its own InfiniBand transport, and no plugin";
        Some(_) => Selects, "this network plugin decides; it may ignore NCCL_IB_ variables";
    }
    "NCCL" "NCCL_IB_HCA", |_value| () => { () => Selects, "the RDMA devices that NCCL may use: see NICS"; }
    "NCCL" "NCCL_P2P_LEVEL", |value| nccl::level_of(value) => {
        Some(_) => Selects, "copies between GPUs of this host; GPUDirect RDMA is not affected";
    }
    "NCCL" "NCCL_P2P_DISABLE", |value| number(value) => {
        Some(0) => Allows, "copies between GPUs of this host (the default)";
        Some(_) => Limits, "no copies between GPUs of this host: NCCL does not reach a NIC through another GPU (PXN)";
    }
    "NCCL" "NCCL_PXN_DISABLE", |value| number(value) => {
        Some(0) => Allows, "NCCL may reach a NIC through another GPU (the default)";
        Some(_) => Limits, "NCCL does not reach a NIC through another GPU (PXN)";
    }
    "NCCL" "NCCL_TOPO_FILE", |_value| () => {
        () => Selects, "NCCL uses the paths in this file, not those of sysfs";
    }
    "NCCL" "NCCL_IB_DATA_DIRECT", |value| number(value) => {
        Some(0) => Limits, "NCCL does not use the NIC's Data Direct function";
        Some(_) => Allows, "NCCL uses the NIC's Data Direct function, if there is one";
    }
    "NCCL" "NCCL_GIN_TYPE", |value| value => {
        "2" => Allows, "a thread of the processor drives the NIC (GIN)";
        "3" => Forces, "kernels on the GPU drive the NIC (GDAKI), for which nvidia.ko needs a setting";
    }
    "UCX" "UCX_TLS", |value| transports(value) => {
        (false, _) => Forbids, "UCX uses none of the transports of InfiniBand and RoCE (ib, rc, dc, ud)";
        (_, false) => Forbids, "UCX does not know GPU memory, because there is no transport cuda among them";
        _ => Allows, "UCX may use RDMA, and knows GPU memory";
    }
    "UCX" "UCX_IB_GPU_DIRECT_RDMA", |value| word(value).as_deref() => {
        Some("n" | "no" | "0" | "off" | "false") => Forbids, "UCX does not register GPU memory with the NIC";
        Some("y" | "yes" | "1" | "on" | "true") => Forces, "UCX registers GPU memory with the NIC, or does not use \
            the NIC";
        Some("try" | "auto") => Allows, "UCX registers GPU memory where it can (the default)";
    }
    "UCX" "UCX_NET_DEVICES", |value| value => {
        "all" => Allows, "UCX may use all devices (the default)";
        _ => Selects, "the devices that UCX may use: see NICS";
    }
    "NVSHMEM" "NVSHMEM_REMOTE_TRANSPORT", |value| word(value).as_deref() => {
        Some("none") => Forbids, "NVSHMEM uses no network";
        Some("ibrc" | "ucx" | "ibdevx" | "libfabric" | "ibgda") => Selects, "the transport that NVSHMEM uses";
    }
    "NVSHMEM" "NVSHMEM_IB_DISABLE_DMABUF", |value| truth(value) => {
        Some(true) => Limits, "NVSHMEM registers GPU memory only by nvidia_peermem";
        Some(false) => Allows, "NVSHMEM tries dma-buf before nvidia_peermem (the default)";
    }
    "NVSHMEM" "NVSHMEM_IB_ENABLE_IBGDA", |value| truth(value) => {
        Some(true) => Forces, "kernels on the GPU drive the NIC (IBGDA), for which nvidia.ko needs a setting";
        Some(false) => Allows, "the processor drives the NIC (the default)";
    }
    "NVSHMEM" "NVSHMEM_IBGDA_NIC_HANDLER", |value| value => {
        "cpu" => Allows, "a CPU thread rings the NIC's doorbells";
        "gpu" | "auto" => Forces, "the GPU rings the NIC's doorbells";
    }
    "NVSHMEM" "NVSHMEM_HCA_LIST", |_value| () => { () => Selects, "the RDMA devices that NVSHMEM may use: see NICS"; }
    "NVSHMEM" "NVSHMEM_HCA_PE_MAPPING", |_value| () => {
        () => Selects, "the RDMA devices that NVSHMEM may use, by process: see NICS";
    }
}

/// Parses `UCX_TLS`. The first result is `true` if UCX may use a transport of RDMA, and the second
/// if UCX may use a transport of GPU memory. The value is a list of transports. After a `^`, the
/// list has the transports that UCX does not use. `ib` and `cuda` stand for several transports
/// each.
fn transports(value: &str) -> (bool, bool) {
    let (is_excluding, list) = match value.strip_prefix('^') {
        Some(list) => (true, list),
        None => (false, value),
    };
    let names: Vec<&str> = list.split(',').map(str::trim).collect();
    let has = |name: &str| names.contains(&name);
    let begins = |starts: &[&str]| {
        let mut names = names.iter();
        names.any(|name| starts.iter().any(|start| name.starts_with(start)))
    };
    match is_excluding {
        true => (
            !(has("ib") || has("rc") && has("dc") && has("ud")),
            !(has("cuda") || has("cuda_copy")),
        ),
        false => (
            has("all") || begins(&["ib", "rc", "dc", "ud", "gga", "srd"]),
            has("all") || begins(&["cuda", "gdr_copy"]),
        ),
    }
}

/// Returns the variables of a process with their meanings. Variables without a rule are kept if they
/// belong to NCCL, UCX, NVSHMEM or NIXL.
pub(super) fn judged(variables: &[Variable]) -> Vec<Judged> {
    let judge = |variable: &Variable| {
        let rule = RULES.iter().find(|rule| rule.name == variable.name);
        let meaning = rule.and_then(|rule| (rule.judge)(&variable.setting.value));
        let is_invalid = rule.is_some() && meaning.is_none();
        let invalid = "the software does not know this value, or it is empty";
        Judged {
            name: variable.name.clone(),
            value: variable.setting.value.clone(),
            place: variable.setting.place.clone(),
            effect: meaning.map_or(Effect::NotJudged, |(effect, _)| effect),
            meaning: meaning
                .map(|(_, text)| text)
                .or(is_invalid.then_some(invalid)),
            library: rule.map(|rule| rule.library),
        }
    };
    let mut all: Vec<Judged> = variables.iter().map(judge).collect();
    // NVSHMEM loads IBGDA in addition to the remote transport.
    let is_ibgda = |it: &Judged| it.name == "NVSHMEM_IB_ENABLE_IBGDA" && it.effect == Forces;
    if all.iter().any(is_ibgda) {
        let transport = all
            .iter_mut()
            .find(|it| it.name == "NVSHMEM_REMOTE_TRANSPORT");
        if let Some(none) = transport.filter(|it| it.effect == Forbids) {
            none.effect = Limits;
            none.meaning = Some("NVSHMEM uses no transport but IBGDA");
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    use crate::software::nccl::Setting;

    fn variable(name: &str, value: &str) -> Variable {
        let (value, place) = (value.to_owned(), String::new());
        let setting = Setting { value, place };
        let name = name.to_owned();
        Variable { name, setting }
    }

    #[test]
    fn ibgda_needs_no_other_transport() {
        let both = judged(&[
            variable("NVSHMEM_IB_ENABLE_IBGDA", "1"),
            variable("NVSHMEM_REMOTE_TRANSPORT", "none"),
        ]);
        assert_eq!(both[1].effect, Limits);
    }

    #[test]
    fn values_and_their_effects() {
        for (name, value, expected) in [
            ("NCCL_NET_GDR_LEVEL", "LOC", Forbids),
            ("NCCL_NET_GDR_LEVEL", "0", Forbids),
            ("NCCL_NET_GDR_LEVEL", "phb", Limits),
            ("NCCL_NET_GDR_LEVEL", "SYS", Allows),
            ("NCCL_NET_GDR_LEVEL", "NODE", Effect::NotJudged),
            ("NCCL_NET_GDR_READ", "0", Limits),
            ("NCCL_NET_GDR_READ", "1", Allows),
            ("NCCL_DMABUF_ENABLE", "0", Limits),
            ("NCCL_DMABUF_ENABLE", "0x1", Allows),
            ("NCCL_IB_DISABLE", "1", Forbids),
            ("NCCL_IB_DISABLE", "0", Allows),
            ("NCCL_IB_DISABLE", "yes", Effect::NotJudged),
            ("NCCL_NET", "Socket", Forbids),
            ("NCCL_NET", "IB", Forces),
            ("NCCL_NET", "AWS Libfabric", Selects),
            ("NCCL_NET_PLUGIN", "none", Allows),
            ("NCCL_P2P_LEVEL", "NVL", Selects),
            ("NCCL_P2P_DISABLE", "1", Limits),
            ("NCCL_DEBUG", "INFO", Effect::NotJudged),
            ("UCX_TLS", "rc,cuda", Allows),
            ("UCX_TLS", "all", Allows),
            ("UCX_TLS", "rc,sm,self", Forbids),
            ("UCX_TLS", "tcp,cuda_copy", Forbids),
            ("UCX_TLS", "^sm", Allows),
            ("UCX_TLS", "^ib", Forbids),
            ("UCX_TLS", "^cuda", Forbids),
            ("UCX_IB_GPU_DIRECT_RDMA", "n", Forbids),
            ("UCX_IB_GPU_DIRECT_RDMA", "yes", Forces),
            ("UCX_IB_GPU_DIRECT_RDMA", "try", Allows),
            ("NVSHMEM_REMOTE_TRANSPORT", "none", Forbids),
            ("NVSHMEM_IB_DISABLE_DMABUF", "true", Limits),
            ("NVSHMEM_IB_ENABLE_IBGDA", "1", Forces),
            ("NVSHMEM_IB_ENABLE_IBGDA", "", Effect::NotJudged),
            ("NVSHMEM_IBGDA_NIC_HANDLER", "cpu", Allows),
        ] {
            let effect = judged(&[variable(name, value)])[0].effect;
            assert_eq!(effect, expected, "{name}={value}");
        }
    }
}
