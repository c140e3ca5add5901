// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Variables that force, forbid or limit GPUDirect RDMA, and what each value means. One entry of
//! [`RULES`] has everything about a variable.
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
    /// The software may not use a part of GPUDirect RDMA.
    Limits,
    /// The software uses GPUDirect RDMA or fails.
    Forces,
    /// GPUDirect RDMA is possible, as by default.
    Allows,
    /// Selects devices.
    Selects,
    /// The value is invalid, or the variable is not judged here.
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
    /// `null`: not judged.
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

const fn rule(library: &'static str, name: &'static str, judge: fn(&str) -> Meaning) -> Rule {
    Rule {
        name,
        library,
        judge,
    }
}

use Effect::{Allows, Forbids, Forces, Limits, Selects};

/// Parses a number as NCCL does, by `strtoll`.
fn number(value: &str) -> Option<i64> {
    match value.strip_prefix("0x") {
        Some(digits) => i64::from_str_radix(digits, 16).ok(),
        None => value.parse().ok(),
    }
}

/// Returns the meaning of NCCL's number: 0, or another number.
fn switch(value: &str, off: (Effect, &'static str), on: (Effect, &'static str)) -> Meaning {
    number(value).map(|number| if number == 0 { off } else { on })
}

/// Parses a truth value of NVSHMEM, which decides by the first letter.
fn truth(value: &str) -> Option<bool> {
    match value.chars().next()?.to_ascii_lowercase() {
        '0' | 'n' | 'f' => Some(false),
        '1'..='9' | 'y' | 't' => Some(true),
        _ => None,
    }
}

const RULES: &[Rule] = &[
    rule("NCCL", "NCCL_NET_GDR_LEVEL", |value| {
        Some(match nccl::level_of(value)? {
            "LOC" => (
                Forbids,
                "no path is near enough: NCCL copies through the host",
            ),
            "SYS" => (
                Allows,
                "NCCL uses GPUDirect RDMA on each path, also between NUMA nodes",
            ),
            _ => (
                Limits,
                "NCCL uses GPUDirect RDMA up to this class of path; the default is PXB",
            ),
        })
    }),
    rule("NCCL", "NCCL_NET_GDR_READ", |value| {
        let off = (
            Limits,
            "the NIC does not read GPU memory: NCCL copies what it sends through the host; what it receives goes \
             directly",
        );
        switch(
            value,
            off,
            (
                Allows,
                "the NIC also reads GPU memory, on machines without NVLink, too",
            ),
        )
    }),
    rule("NCCL", "NCCL_DMABUF_ENABLE", |value| {
        let off = (Limits, "NCCL registers GPU memory by nvidia_peermem alone");
        switch(
            value,
            off,
            (
                Allows,
                "NCCL tries dma-buf before nvidia_peermem, as by default",
            ),
        )
    }),
    rule("NCCL", "NCCL_IB_DISABLE", |value| {
        let on = (
            Forbids,
            "NCCL uses neither InfiniBand nor RoCE, but sockets",
        );
        switch(
            value,
            (Allows, "NCCL uses InfiniBand and RoCE, as by default"),
            on,
        )
    }),
    rule("NCCL", "NCCL_NET", |value| match value {
        "" => None,
        _ if value.eq_ignore_ascii_case("socket") => Some((Forbids, "NCCL uses sockets")),
        _ if value.eq_ignore_ascii_case("ib") => {
            Some((Forces, "NCCL uses InfiniBand or RoCE, or fails"))
        }
        _ => Some((Selects, "NCCL uses this network plugin, or fails")),
    }),
    rule("NCCL", "NCCL_NET_PLUGIN", |value| match value {
        "" => None,
        "none" => Some((
            Allows,
            "NCCL uses its own InfiniBand transport, and no plugin",
        )),
        _ => Some((
            Selects,
            "this network plugin decides; it may ignore NCCL_IB_ variables",
        )),
    }),
    rule("NCCL", "NCCL_IB_HCA", |_| {
        Some((Selects, "the RDMA devices that NCCL may use: see NICS"))
    }),
    rule("NCCL", "NCCL_P2P_LEVEL", |value| {
        nccl::level_of(value)?;
        Some((
            Selects,
            "copies between GPUs of this host; GPUDirect RDMA is not concerned",
        ))
    }),
    rule("NCCL", "NCCL_P2P_DISABLE", |value| {
        let on = (
            Limits,
            "no copies between GPUs of this host: NCCL does not reach a NIC through another GPU (PXN)",
        );
        switch(
            value,
            (Allows, "copies between GPUs of this host, as by default"),
            on,
        )
    }),
    rule("NCCL", "NCCL_PXN_DISABLE", |value| {
        let on = (
            Limits,
            "NCCL does not reach a NIC through another GPU (PXN)",
        );
        switch(
            value,
            (
                Allows,
                "NCCL may reach a NIC through another GPU, as by default",
            ),
            on,
        )
    }),
    rule("NCCL", "NCCL_TOPO_FILE", |_| {
        Some((
            Selects,
            "NCCL goes by the paths in this file, not by those of sysfs",
        ))
    }),
    rule("NCCL", "NCCL_IB_DATA_DIRECT", |value| {
        let off = (Limits, "NCCL does not use the NIC's Data Direct function");
        switch(
            value,
            off,
            (
                Allows,
                "NCCL uses the NIC's Data Direct function, where it has one",
            ),
        )
    }),
    rule("NCCL", "NCCL_GIN_TYPE", |value| match value {
        "2" => Some((Allows, "a thread of the processor drives the NIC (GIN)")),
        "3" => Some((
            Forces,
            "kernels on the GPU drive the NIC (GDAKI), for which nvidia.ko needs a setting",
        )),
        _ => None,
    }),
    rule("UCX", "UCX_TLS", transports),
    rule("UCX", "UCX_IB_GPU_DIRECT_RDMA", |value| {
        match value.to_ascii_lowercase().as_str() {
            "n" | "no" | "0" | "off" | "false" => {
                Some((Forbids, "UCX does not register GPU memory with the NIC"))
            }
            "y" | "yes" | "1" | "on" | "true" => Some((
                Forces,
                "UCX registers GPU memory with the NIC, or does not use the NIC",
            )),
            "try" | "auto" => Some((
                Allows,
                "UCX registers GPU memory where it can, as by default",
            )),
            _ => None,
        }
    }),
    rule("UCX", "UCX_NET_DEVICES", |value| match value {
        "all" => Some((Allows, "UCX may use all devices, as by default")),
        _ => Some((Selects, "the devices that UCX may use: see NICS")),
    }),
    rule("NVSHMEM", "NVSHMEM_REMOTE_TRANSPORT", |value| {
        match value.to_ascii_lowercase().as_str() {
            "none" => Some((Forbids, "NVSHMEM uses no network")),
            "ibrc" | "ucx" | "ibdevx" | "libfabric" | "ibgda" => {
                Some((Selects, "the transport that NVSHMEM uses"))
            }
            _ => None,
        }
    }),
    rule("NVSHMEM", "NVSHMEM_IB_DISABLE_DMABUF", |value| {
        Some(match truth(value)? {
            true => (
                Limits,
                "NVSHMEM registers GPU memory by nvidia_peermem alone",
            ),
            false => (
                Allows,
                "NVSHMEM tries dma-buf before nvidia_peermem, as by default",
            ),
        })
    }),
    rule("NVSHMEM", "NVSHMEM_IB_ENABLE_IBGDA", |value| {
        Some(match truth(value)? {
            true => (
                Forces,
                "kernels on the GPU drive the NIC (IBGDA), for which nvidia.ko needs a setting",
            ),
            false => (Allows, "the processor drives the NIC, as by default"),
        })
    }),
    rule(
        "NVSHMEM",
        "NVSHMEM_IBGDA_NIC_HANDLER",
        |value| match value {
            "cpu" => Some((
                Allows,
                "a thread of the processor rings the NIC's doorbells",
            )),
            "gpu" | "auto" => Some((Forces, "the GPU rings the NIC's doorbells")),
            _ => None,
        },
    ),
    rule("NVSHMEM", "NVSHMEM_HCA_LIST", |_| {
        Some((Selects, "the RDMA devices that NVSHMEM may use: see NICS"))
    }),
    rule("NVSHMEM", "NVSHMEM_HCA_PE_MAPPING", |_| {
        Some((
            Selects,
            "the RDMA devices that NVSHMEM may use, by process: see NICS",
        ))
    }),
];

/// Returns the meaning of `UCX_TLS`: a list of transports, or with `^` of those that UCX does not
/// use. `ib` and `cuda` stand for several transports.
fn transports(value: &str) -> Meaning {
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
    let (has_rdma, has_cuda) = match is_excluding {
        true => (
            !(has("ib") || has("rc") && has("dc") && has("ud")),
            !(has("cuda") || has("cuda_copy")),
        ),
        false => (
            has("all") || begins(&["ib", "rc", "dc", "ud", "gga", "srd"]),
            has("all") || begins(&["cuda", "gdr_copy"]),
        ),
    };
    Some(match (has_rdma, has_cuda) {
        (false, _) => (
            Forbids,
            "UCX uses none of the transports of InfiniBand and RoCE (ib, rc, dc, ud)",
        ),
        (_, false) => (
            Forbids,
            "UCX does not know GPU memory, for there is no transport cuda among them",
        ),
        _ => (Allows, "UCX may use RDMA, and knows GPU memory"),
    })
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
    // NVSHMEM loads IBGDA beside the remote transport.
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

    fn effect(name: &str, value: &str) -> Effect {
        let setting = Setting {
            value: value.to_owned(),
            place: String::new(),
        };
        let name = name.to_owned();
        judged(&[Variable { name, setting }])
            .first()
            .unwrap()
            .effect
    }

    #[test]
    fn ibgda_needs_no_other_transport() {
        let variable = |name: &str, value: &str| {
            let place = String::new();
            let value = value.to_owned();
            let setting = Setting { value, place };
            let name = name.to_owned();
            Variable { name, setting }
        };
        let both = judged(&[
            variable("NVSHMEM_IB_ENABLE_IBGDA", "1"),
            variable("NVSHMEM_REMOTE_TRANSPORT", "none"),
        ]);
        assert_eq!(both.get(1).unwrap().effect, Limits);
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
            assert_eq!(effect(name, value), expected, "{name}={value}");
        }
    }
}
