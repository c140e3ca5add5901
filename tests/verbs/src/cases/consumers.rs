// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Detection of a peermem module by other software: how each consumer looks for a module, and what
//! it finds.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::{env, fs};

use anyhow::{ensure, Result};

use crate::ktap::{cases, note, Case};
use crate::lab::{Lab, Peermem};
use crate::module::Replaced;
use crate::{counters, ktap, module, sys};

pub(super) const CASES: &[Case] = cases![
    "consumers.find_the_module" => find,
    "consumers.find_ours_where_they_find_nvidias" => find_as_nvidias,
];

/// Returns the path of NVIDIA's nvidia-peermem, if the runner has copied it into the machine.
pub(crate) fn control() -> Option<PathBuf> {
    env::var_os("TESTVM_CONTROL_KO").map(PathBuf::from)
}

/// Returns `true` if ib_core itself shows its clients in `memory_peers`. Since Linux 6.4, no
/// ib_core can show its clients.
pub(super) fn core_shows() -> bool {
    counters::module_parameter("ib_core", "peer_mem_sysfs").as_deref() == Some("Y")
}

/// Returns the line of `/proc/kallsyms` about the function that registers clients, or `None` if no
/// loaded module has this function.
pub(super) fn peer_memory() -> Result<Option<String>> {
    let symbols = fs::read_to_string("/proc/kallsyms")?;
    let name = format!(" {SYMBOL}");
    let line = symbols.lines().find(|line| line.contains(&name));
    Ok(line.map(str::to_owned))
}

/// Returns `true` if the loaded module shows its clients in `memory_peers`, because ib_core does
/// not.
fn module_shows() -> bool {
    counters::module_parameter(module::NAME, "memory_peers").as_deref() == Some("Y")
}

pub(super) const NV_MEM: &str = "/sys/kernel/mm/memory_peers/nv_mem/version";
const NV_MEM_NC: &str = "/sys/kernel/mm/memory_peers/nv_mem_nc/version";
/// Path that some consumers look for. The path contains the module's name, but no client ever had
/// this name.
const BY_MODULE_NAME: &str = "/sys/kernel/mm/memory_peers/nvidia-peermem/version";
pub(super) const MODULE: &str = "/sys/module/nvidia_peermem/version";
const FORERUNNER: &str = "/sys/module/nv_peer_mem/version";
const EFA: &str = "/sys/module/efa_nv_peermem/version";
const REFERENCES: &str = "/sys/module/nvidia_peermem/refcnt";
const SYMBOL: &str = "ib_register_peer_memory_client";

/// Method by which a consumer looks for a module.
enum Probe {
    /// One of these paths exists, as `access(…, F_OK)` reports.
    AnyOf(&'static [&'static str]),
    /// The path exists and its owner may read it.
    Readable(&'static str),
    /// The file has a line that contains these words.
    Line(&'static str, &'static str),
    /// The shell command succeeds.
    Shell(&'static str),
    /// The file holds this value.
    Holds(&'static str, &'static str),
}

impl Probe {
    /// Returns the evidence that the consumer finds, or `None`.
    fn ask(&self) -> Result<Option<String>> {
        Ok(match self {
            Self::AnyOf(paths) => paths
                .iter()
                .find(|path| Path::new(path).exists())
                .map(|path| (*path).to_owned()),
            Self::Readable(path) => fs::metadata(path)
                .ok()
                .filter(|file| file.mode() & libc::S_IRUSR != 0)
                .map(|_| (*path).to_owned()),
            Self::Line(file, words) => fs::read_to_string(file)?
                .lines()
                .any(|line| line.contains(words))
                .then(|| format!("{words} in {file}")),
            Self::Shell(line) => sys::run("sh", ["-c", line])?
                .success()
                .then(|| (*line).to_owned()),
            Self::Holds(file, value) => fs::read_to_string(file)
                .ok()
                .filter(|text| text.trim() == *value)
                .map(|_| format!("{file} is {value}")),
        })
    }
}

/// Origin of the evidence that the consumer finds. The origin determines in which setups the
/// consumer must find evidence.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Finds {
    /// The module itself, whenever it is loaded.
    Module,
    /// `memory_peers`, if ib_core or the module shows its clients in this directory.
    MemoryPeers,
    /// ib_core, with or without a module.
    Core,
    /// The module as a user of ib_core's functions, where the peer-memory interface is not in
    /// ib_uverbs.
    UserOfCore,
    /// A module other than the module under test.
    Never,
}

struct Consumer {
    /// Name with version, without spaces. The name is a key in the results.
    name: &'static str,
    source: &'static str,
    probe: Probe,
    finds: Finds,
}

/// Makes the table of consumers. A row has the consumer's name, the place in its source code, its
/// [`Probe`], and the origin of the evidence ([`Finds`]).
macro_rules! consumers {
    ($($name:literal: $source:literal, $probe:ident($($of:expr),+) => $finds:ident;)+) => {
        &[$(Consumer {
            name: $name,
            source: $source,
            probe: Probe::$probe($($of),+),
            finds: Finds::$finds,
        }),+]
    };
}

const CONSUMERS: &[Consumer] = consumers![
    "nccl-from-2.23": "NCCL src/transport/net_ib/gdr.cc:18",
        AnyOf(&[NV_MEM, NV_MEM_NC, MODULE]) => Module;
    "nccl-to-2.22": "NCCL up to 2.22.3, NVIDIA/nccl#1676",
        AnyOf(&[NV_MEM, NV_MEM_NC]) => MemoryPeers;
    "nccl-of-the-first-dmabuf": "NCCL src/transport/net_ib.cc with DMA-BUF and without nv_mem_nc; also in FlagCX and TensorPipe",
        AnyOf(&[NV_MEM, BY_MODULE_NAME]) => MemoryPeers;
    "nccl-gin-gdaki": "NCCL src/transport/net_ib/gdr.cc:33",
        AnyOf(&[MODULE]) => Module;
    "ucx-from-1.18": "UCX src/uct/ib/base/ib_md.c:1420",
        AnyOf(&[NV_MEM, MODULE, FORERUNNER]) => Module;
    "ucx-to-1.17": "UCX src/uct/ib/base/ib_md.c",
        AnyOf(&[NV_MEM]) => MemoryPeers;
    "ucx-on-efa": "UCX src/uct/ib/base/ib_md.c, only on Amazon's NICs",
        AnyOf(&[EFA]) => Never;
    "nvshmem-from-3.4.5": "NVSHMEM transport_ib_common.cpp:25",
        AnyOf(&[NV_MEM, BY_MODULE_NAME, MODULE]) => Module;
    "nvshmem-before-3.4.5": "NVSHMEM transport_ib_common.cpp",
        AnyOf(&[NV_MEM, BY_MODULE_NAME]) => MemoryPeers;
    "ucc-mlx5": "UCC tl/mlx5, which now also looks for these three",
        AnyOf(&[NV_MEM, MODULE, FORERUNNER]) => Module;
    "ucc-mcast": "UCC multicast",
        AnyOf(&[NV_MEM]) => MemoryPeers;
    "gasnet": "GASNet-EX ibv-conduit",
        AnyOf(&[NV_MEM]) => MemoryPeers;
    "nvidia-fs": "nvidia-fs",
        AnyOf(&[NV_MEM]) => MemoryPeers;
    "open-mpi-openib": "Open MPI, btl/openib of 4.x",
        Readable(NV_MEM) => MemoryPeers;
    "libfabric-verbs": "libfabric prov/verbs/src/verbs_osd.h:59; it also wants a NIC named mlx*, bnxt_re* or roce*, and this machine has none",
        Line("/proc/kallsyms", SYMBOL) => Core;
    "rccl": "RCCL since ROCm/rccl#1328",
        Line("/proc/kallsyms", SYMBOL) => Core;
    "mscclpp": "mscclpp src/ib.cc:33",
        Line("/proc/modules", "nvidia_peermem") => Module;
    "mooncake-tent": "Mooncake, tent's rdma_transport",
        Line("/proc/modules", "nvidia_peermem") => Module;
    "fabtests": "fabtests, ofiwg/libfabric#12409",
        Line("/proc/modules", "nvidia_peermem") => Module;
    "gpu-operator-validator": "gpu-operator validator/main.go:1136",
        Shell(r"lsmod | grep -E '^nvidia_peermem\s'") => Module;
    "gpu-operator-sidecar": "gpu-driver-container ubuntu24.04/nvidia-driver:796, after its modprobe",
        AnyOf(&[REFERENCES]) => Module;
    "node-feature-discovery": "gpu-operator, label nvidia.com/peermem.capable",
        Shell("cut -d ' ' -f 1 /proc/modules | grep -qx nvidia_peermem") => Module;
    "doca-driver-build": "doca-driver-build entrypoint.sh:1592: unloads the module if it has no users",
        Holds(REFERENCES, "0") => Module;
    "gpud": "gpud, the line of ib_core in lsmod",
        Shell(r"lsmod | grep -E '^ib_core\s.*\bnvidia_peermem\b'") => UserOfCore;
    "health-checks": "Oracle's, Imbue's and Azure's",
        Shell("lsmod | grep nvidia_peermem") => Module;
    "initstate": "scripts that wait for the module to be up",
        Holds("/sys/module/nvidia_peermem/initstate", "live") => Module;
];

fn ask_all() -> Result<Vec<Option<String>>> {
    CONSUMERS
        .iter()
        .map(|consumer| consumer.probe.ask())
        .collect()
}

fn told(answer: &Option<String>) -> &str {
    answer.as_deref().unwrap_or("nothing")
}

/// Checks that each consumer finds evidence exactly where its [`Finds`] says so, with or without a
/// loaded module.
fn find(lab: &Lab) -> Result<()> {
    let loaded = lab.setup.peermem != Peermem::None;
    let shown = loaded && (core_shows() || module_shows());
    note("ib_core_shows", core_shows());
    let in_core = peer_memory()?.is_some_and(|line| line.ends_with("[ib_core]"));
    let mut wrong = Vec::new();
    for (consumer, answer) in CONSUMERS.iter().zip(ask_all()?) {
        println!("# {}: {}", consumer.name, consumer.source);
        note(consumer.name, told(&answer));
        let expected = match consumer.finds {
            Finds::Module => loaded,
            Finds::MemoryPeers => shown,
            Finds::Core => true,
            Finds::UserOfCore => loaded && in_core,
            Finds::Never => false,
        };
        if answer.is_some() != expected {
            wrong.push(format!("{} finds {}", consumer.name, told(&answer)));
        }
    }
    ensure!(wrong.is_empty(), "{}", wrong.join("; "));
    Ok(())
}

/// Loads our module and NVIDIA's nvidia-peermem in turn. A consumer that finds nvidia-peermem must
/// find our module in the same place.
fn find_as_nvidias(lab: &Lab) -> Result<()> {
    if lab.setup.peermem != Peermem::Ours {
        return ktap::skip("ours is not loaded");
    }
    let Some(control) = control() else {
        return ktap::skip("NVIDIA's module is not at hand");
    };
    let ours = ask_all()?;
    // This is the only accepted reason for a difference between the two modules.
    let only_ours_shows = !core_shows() && module_shows();
    let replaced = Replaced::begin()?;
    module::load_file(&control)?;
    note("control", module::version()?);
    let nvidias = ask_all();
    replaced.end()?;

    note("ib_core_shows", core_shows());
    let mut wrong = Vec::new();
    for ((consumer, ours), nvidias) in CONSUMERS.iter().zip(ours).zip(nvidias?) {
        let name = consumer.name;
        let (ours, theirs) = (told(&ours), told(&nvidias));
        if ours == theirs {
            note(name, format_args!("both: {ours}"));
            continue;
        }
        note(name, format_args!("ours: {ours}; NVIDIA's: {theirs}"));
        if only_ours_shows && ours.starts_with("/sys/kernel/mm/memory_peers/") {
            println!(
                "# {name}: differs, because ib_core has no memory_peers on this kernel, and our module makes its own"
            );
        } else {
            wrong.push(format!(
                "{name} finds {ours}, but {theirs} with NVIDIA's module"
            ));
        }
    }
    ensure!(wrong.is_empty(), "{}", wrong.join("; "));
    ensure!(
        sys::read_line(MODULE)?.contains("-rs"),
        "ours is not loaded"
    );
    Ok(())
}
