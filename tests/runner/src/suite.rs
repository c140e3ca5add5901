// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! The suite: every run of `make test`, in order.

use std::sync::LazyLock;

use crate::arch::Arch;
use crate::debian::Release;
use crate::modules::Build;
use crate::results::Format;
use crate::topology::Topology;
use crate::vm::{Iommu, Options, Peermem, Provider, Rdma};
use crate::{debian, kernel};

/// One run: a virtual machine or a program of the host, and the tests that it prints.
#[derive(Clone, Copy)]
pub(crate) struct Run {
    pub(crate) name: &'static str,
    pub(crate) place: Place,
    pub(crate) format: Format,
    /// Column of the table in which this run's results stand beside the others'.
    pub(crate) column: Option<&'static str>,
    /// Tests that are to fail here, each with the reason. One that passes all the same is a failure.
    pub(crate) known: &'static [(&'static str, &'static str)],
    /// Another run whose results must be the same, test for test.
    pub(crate) same_as: Option<Same>,
    /// Figures whose names begin so are shown with the run; for one that stands beside no other.
    pub(crate) shown: Option<&'static str>,
    /// Left out of `make test`: `make test-all` has it.
    pub(crate) only_in_full: bool,
    /// Its machine's kernel, where it is not the caller's.
    pub(crate) kernel: Option<&'static str>,
    /// How many tests there are of each group, which is what stands before the dot of their names; where all are told here.
    pub(crate) groups: &'static [(&'static str, usize)],
    /// Of a program of the host: it depends on these files of `src/` and on no others, so that its results are kept.
    pub(crate) src: Option<&'static [&'static str]>,
}

/// A run to be compared with.
#[derive(Clone, Copy)]
pub(crate) struct Same {
    pub(crate) run: &'static str,
    /// A test that one of the two skips for one of these reasons may have any result in the other; it is listed.
    pub(crate) but_for: &'static [&'static str],
    /// Each may have groups of tests that the other lacks: what stands before the dot of their names.
    pub(crate) in_part: bool,
}

#[derive(Clone, Copy)]
pub(crate) enum Place {
    /// In a virtual machine. `{gdr}` stands for the verbs program, `{peermemctl}` for what operators run, `{repo}` for the
    /// repository, `{filter}` for what the caller chose; for what else stands in braces see `programs::ON_DEMAND`.
    Vm {
        options: fn(&mut Options),
        command: &'static [&'static str],
    },
    /// `cargo` on the host, with these arguments.
    Cargo(&'static [&'static str]),
    /// The schedules of the known hazards: ours must hold, and `docs/hazards.md` be what they make. With a build, ours alone.
    Hazards(Option<Build>),
    /// The tests of our module with one rule after the other taken out.
    Mutants,
    /// What a registration costs in instructions of our module's.
    Cost,
    /// Installed on a Debian host, which boots its own kernel.
    Debian(&'static Release),
    /// From a clone and a cache below /tmp.
    Contact,
    /// The checks of the code's form, where they are asked for.
    Lint,
}

pub(crate) const BASE: Run = Run {
    name: "",
    place: Place::Cargo(&[]),
    format: Format::Ktap,
    column: None,
    known: &[],
    same_as: None,
    shown: None,
    only_in_full: false,
    kernel: None,
    groups: &[],
    src: None,
};

/// Enough for the largest regions that the cases register.
const LARGE_BAR: u64 = 128 * 1024;

/// Enough for regions that cross entries of 2 GiB. KASAN wants an eighth of what rxe maps: 64 GiB are too much for it.
const SMOKE_BAR: u64 = 8 * 1024;

/// As GPUs have it whose BAR1 is not made for RDMA, and twice that: the smallest with which nothing is wrong.
const SMALL_BAR: u64 = 256;
const LEAST_BAR: u64 = 512;

const GDR: &[&str] = &["{gdr}", "test", "{filter}"];
const KUNIT: &[&str] = &["{repo}/tests/vm/kunit"];
/// Its suites, and how many tests each has. That of the module's life is run with eight sets of parameters.
const KUNIT_SUITES: &[(&str, usize)] = &[
    ("client", 18),
    ("life", 8 * 9),
    ("mapping", 35),
    ("parts", 21),
    ("provider", 19),
    ("revocation", 30),
    ("showing", 21),
];
/// What others see of the module.
const IDENTITY: &[&str] = &["{gdr}", "test", "identity.", "consumers."];
/// What of it the mode has a part in.
const IDENTITY_MODE: &[&str] = &["{gdr}", "test", "identity."];
/// Something of each kind: what a kernel can get wrong that the module was not made on.
const SMOKE: &[&str] = &[
    "{gdr}",
    "test",
    "input.user_namespace",
    "machine.suspended_in_traffic",
    "move.read_gpu_to_host",
    "move.send_gpu_to_gpu",
    "move.write_gpu_to_gpu",
    "register.entry_boundary",
    "register.one_pin_one_unpin",
    "register.rereg",
    "reasons.no_room",
    "reasons.unload",
    "reasons.tracepoint",
    "registrations.",
    "limit.each_user",
    "persist.",
    "process.exit",
    "process.killed_in_traffic",
    "revoke.",
    "identity.",
];
/// The same for the debug kernel, on which everything takes ten times as long: without sends, traffic under revocations, and
/// readers beside unloads. The full run on that kernel has these.
const DEBUG_SMOKE: &[&str] = &[
    "{gdr}",
    "test",
    "move.write_gpu_to_gpu",
    "register.entry_boundary",
    "register.one_pin_one_unpin",
    "register.rereg",
    "reasons.no_room",
    "reasons.tracepoint",
    "registrations.",
    "limit.each_user",
    "persist.",
    "process.exit",
    "process.killed_in_traffic",
    "revoke.free_by_",
    "revoke.local_use_refused",
    "revoke.receive_refused",
    "revoke.all_regions_of_the_allocation",
    "revoke.others_go_on",
    "revoke.new_owner_keeps_his_bytes",
    "revoke.registers_again",
    "hca.",
    "identity.version",
    "identity.parameters",
    "identity.unload_",
    "identity.memory_peers",
    "identity.statistics",
    "identity.reader_across_unload",
    "identity.modprobe",
];
/// What depends on how long an entry of the scatter list may be, or on what the provider's table looks like. Bytes are moved
/// each way, far enough for several entries; all the ways to move them are in other runs.
const ENTRIES: &[&str] = &[
    "{gdr}",
    "test",
    "move.write_long_host_to_gpu",
    "move.read_long_gpu_to_host",
    "move.send_long_gpu_to_gpu",
    "register.",
    "provider.",
    "persist.",
    "reasons.other_page_sizes",
    "reasons.page_count",
    "reasons.table_version",
];
/// All that a mapping has a part in.
const MAPPING: &[&str] = &[
    "{gdr}",
    "test",
    "move.",
    "register.",
    "provider.",
    "persist.",
    "process.",
    "revoke.",
    "reasons.",
    "registrations.",
];
/// Where a provider's answers are looked at, those that NVIDIA's code gives on no request among them.
const ANSWERS: &[&str] = &[
    "{gdr}",
    "test",
    "bar1.",
    "coherent.",
    "input.",
    "provider.",
    "reasons.",
    "rules.",
];
/// What the memory of coherent GPUs is.
const COHERENT: &[&str] = &["{gdr}", "test", "coherent."];
/// Bytes moved, entries, both modes' ends of a registration, and what is about BARs with struct pages.
const P2PDMA_SMOKE: &[&str] = &[
    "{gdr}",
    "test",
    "move.read_gpu_to_host",
    "move.send_gpu_to_gpu",
    "move.write_gpu_to_gpu",
    "register.entry_boundary",
    "register.one_pin_one_unpin",
    "registrations.",
    "persist.",
    "revoke.",
    "p2pdma.",
];
/// The groups of [`MAPPING`], and the cases about BARs with struct pages.
const P2PDMA: &[&str] = &[
    "{gdr}",
    "test",
    "move.",
    "register.",
    "provider.",
    "persist.",
    "process.",
    "revoke.",
    "reasons.",
    "registrations.",
    "p2pdma.",
];
const BOUNCED: &[&str] = &["{gdr}", "test", "machine.bounce_buffers_forced"];
/// What the module says where it cannot be loaded.
const LOADING: &[&str] = &["{gdr}", "loading"];
const DMA: &[&str] = &["{gdr}", "test", "dma."];
/// Some thousands of registrations, and the numbers that users ask for.
const SCALE: &[&str] = &["{gdr}", "test", "scale.few"];
const SCALE_MANY: &[&str] = &["{gdr}", "test", "scale.many"];
/// What `peermemctl` says of a machine.
const CTL: &[&str] = &["{gdr}", "ctl"];
/// `peermemctl verify`, where all is well and where it is not; and what of it the mode has a part in.
const VERIFY: &[&str] = &["{gdr}", "test", "verify."];
const VERIFY_MODE: &[&str] = &["{gdr}", "test", "verify.all_is_well", "verify.every_pair"];
/// An epoch of two thousand operations in each mode.
const STRESS: &[&str] = &["{gdr}", "stress", "--epochs", "2"];
const PERFTEST: &[&str] = &["{repo}/tests/vm/perftest"];
/// perftest's `--use_cuda`, and `peermemctl verify` by CUDA.
const CUDA: &[&str] = &[
    "{gdr}",
    "cuda",
    "--library",
    "{cuda}",
    "--perftest",
    "{perftest}",
];
/// A part of it that does not take long.
const CUDA_PART: &[&str] = &[
    "{gdr}",
    "cuda",
    "--library",
    "{cuda}",
    "--perftest",
    "{perftest}",
    "cuda.write_bw",
    "cuda.verify",
];
/// NIXL, between two agents.
const NIXL: &[&str] = &[
    "{gdr}",
    "cuda",
    "--library",
    "{cuda}",
    "--nixl",
    "{nixl}",
    "cuda.nixl",
];
/// UCX by itself.
const UCX: &[&str] = &[
    "{gdr}",
    "cuda",
    "--library",
    "{cuda}",
    "--ucx",
    "{ucx}",
    "ucx.",
];
/// perftest, NIXL, Open MPI and our own cases between two hosts.
const PAIR: &[&str] = &[
    "{gdr}",
    "pair",
    "--library",
    "{cuda}",
    "--perftest",
    "{perftest}",
    "--nixl",
    "{nixl}",
    "--ucx",
    "{ucx}",
    "--mpi",
    "{mpi}",
];
const PAIR_LOST: &[&str] = &["{gdr}", "pair", "pair.lost_in_traffic"];
const PYVERBS: &[&str] = &["{repo}/tests/vm/pyverbs", "{pyverbs}"];

/// Our module, with NVIDIA's to be held beside it.
fn ours(vm: &mut Options) {
    vm.bar = LARGE_BAR;
    vm.with_control = true;
}

/// RAM that is the memory of coherent GPUs: reserved for a driver that keeps it to itself, and for pages that the kernel can
/// move, as it does where the driver gives the memory to it.
fn coherent(vm: &mut Options) {
    const MIB: u32 = 128;
    vm.mem += MIB + 512;
    let (reserved, start) = match vm.arch() {
        Arch::X86_64 => (format!("memmap={MIB}M$0x60000000"), 0x6000_0000),
        // Its kernel leaves out nothing but the end, and its memory begins at 1 GiB.
        Arch::Arm64 => {
            let kept = vm.mem - MIB;
            (format!("mem={kept}M"), u64::from(1024 + kept) << 20)
        }
    };
    vm.append.push(format!("{reserved} movablecore=512M"));
    vm.gpu_param
        .push(format!("coherent_start={start:#x} coherent_mib={MIB}"));
}

/// GPUs whose BAR has struct pages, for which RAM is added: 1/64 of the BAR's length.
fn p2pdma(vm: &mut Options) {
    vm.bar = SMOKE_BAR;
    vm.mem += 512;
    vm.gpu_param.push("p2pdma=1".to_owned());
}

/// The same behind an IOMMU that translates.
fn p2pdma_translated(vm: &mut Options) {
    p2pdma(vm);
    vm.iommu = Iommu::Strict;
}

/// The same in revocable mode.
fn p2pdma_revocable(vm: &mut Options) {
    p2pdma(vm);
    vm.param.push("persistent_api_support=0".to_owned());
}

/// A kernel that has every device's DMA go through bounce buffers.
fn bounced(vm: &mut Options) {
    vm.append.push("swiotlb=force".to_owned());
}

/// Our module, without persistent pins.
fn revocable(vm: &mut Options) {
    vm.bar = LARGE_BAR;
    vm.param.push("persistent_api_support=0".to_owned());
}

/// NVIDIA's module, whose client with callbacks serves where the HCA can be told of them.
fn callback(vm: &mut Options) {
    vm.bar = LARGE_BAR;
    vm.peermem = Peermem::Nvidia;
}

/// NVIDIA's module and its other client.
fn persistent(vm: &mut Options) {
    callback(vm);
    vm.rxe_param.push("peer_inval=0".to_owned());
}

/// The same tests with the same results.
const fn same(run: &'static str) -> Same {
    Same {
        run,
        but_for: &[],
        in_part: false,
    }
}

/// The same cases on the other provider. Where it cannot be asked, they are skipped.
const fn other_provider(run: &'static str) -> Same {
    Same {
        but_for: &[
            "what NVIDIA's own nv-p2p.c says no parameter changes",
            "memory has its place in the BAR for life here",
        ],
        ..same(run)
    }
}

/// The same for a run that shares only some groups of tests with it.
const fn in_part(same: Same) -> Same {
    Same {
        in_part: true,
        ..same
    }
}

/// A machine for KUnit: on fakes of all that is left out here.
fn kunit(vm: &mut Options) {
    vm.peermem = Peermem::None;
    // Kernels for other processors have no stock modules.
    vm.rdma = match vm.arch() {
        Arch::X86_64 => Rdma::Stock,
        Arch::Arm64 => Rdma::Patched,
    };
    vm.gpus = 0;
    vm.kunit = true;
    vm.append.push("kunit.enable=1 kunit.autorun=1".to_owned());
    // Freed memory is seen to be freed.
    vm.append.push("slab_debug=FZP".to_owned());
}

/// As kernels before 6.4, which let ib_core have its `memory_peers`.
fn shown(vm: &mut Options) {
    vm.memory_peers = true;
    vm.with_control = vm.peermem == Peermem::Ours;
}

/// The debug kernel where regions of both clients are in use: lockdep has a class of ib_core's locks for each.
fn debug(vm: &mut Options) {
    vm.kernel = kernel::DEBUG.to_owned();
    vm.ib_param.push("peer_lock_classes=2".to_owned());
}

/// The debug kernel without Rust, for the portable build. Nothing tells it that one region may be mapped more than eight times:
/// DMA_API_DEBUG reports the first such mapping, and no further one.
fn debug_portable(vm: &mut Options) {
    vm.kernel = kernel::DEBUG_PORTABLE.to_owned();
    let report = "DMA-API: exceeded 7 overlapping mappings of cacheline=1";
    vm.expect.extend(report.parse());
}

/// A machine without a peer-memory module, and with what it takes to try ours.
fn beside(vm: &mut Options, rdma: Rdma) {
    vm.peermem = Peermem::None;
    vm.rdma = rdma;
    vm.gpus = 1;
    vm.beside = true;
    vm.with_control = rdma == Rdma::Patched;
}

/// A machine for true DMA, with both modes to choose from, and how many accesses of each kind its IOMMU is to refuse.
fn dma(vm: &mut Options, iommu: Iommu, refused: [usize; 2]) {
    vm.iommu = iommu;
    vm.nvme = Some(64);
    // Registrations of more than 4 GiB.
    vm.bar = SMOKE_BAR;
    // 4 MiB by one command: lists of addresses that go on in a second page.
    vm.qemu_arg
        .extend(["-global", "nvme.mdts=10"].map(str::to_owned));
    if vm.peermem == Peermem::Ours {
        vm.param.push("persistent_api_support=0".to_owned());
    }
    let [reads, writes] = refused;
    let reports: &[(&str, usize)] = match vm.arch() {
        Arch::X86_64 => &[
            (r"DMAR: DRHD: handling fault", reads + writes),
            (r"DMAR: \[DMA Read NO_PASID\]", reads),
            (r"DMAR: \[DMA Write NO_PASID\]", writes),
        ],
        Arch::Arm64 => &[
            (r"arm-smmu-v3 \S+: (un)?priv data read s1", reads),
            (r"arm-smmu-v3 \S+: (un)?priv data write s1", writes),
        ],
    };
    for (pattern, count) in reports {
        // One that could not be read is not there, and what it should declare fails the run.
        vm.expect.extend(format!("{pattern}={count}").parse());
    }
}

/// A machine that counts the module's instructions and its memory.
fn measured(vm: &mut Options) {
    vm.bench = true;
    vm.icount = true;
    vm.smp = 1;
    vm.gpus = 1;
    vm.bar = LARGE_BAR;
}

/// The same, with room for 10,000 processes, and time.
fn measured_at_large(vm: &mut Options) {
    measured(vm);
    vm.mem = 6 * 1024;
    vm.timeout = Some(7200);
}

/// Two hosts on one wire.
fn pair(vm: &mut Options) {
    vm.pair = true;
    vm.smp = 1;
    vm.gpus = 1;
}

/// A machine with which, of itself, nothing is wrong but what its topology brings.
fn ctl(vm: &mut Options, topology: Topology) {
    vm.topology = topology;
    vm.bar = LEAST_BAR;
}

const SUITE: &[Run] = &[
    Run {
        name: "lint",
        place: Place::Lint,
        ..BASE
    },
    Run {
        name: "the module's logic, in every order of events",
        place: Place::Cargo(&[
            "test",
            "--release",
            "-p",
            "peermem-loom",
            "--",
            "--show-output",
        ]),
        format: Format::Cargo,
        ..BASE
    },
    Run {
        name: "the runner's own tests",
        place: Place::Cargo(&["test", "-p", "runner"]),
        format: Format::Cargo,
        src: Some(&["src/compat.h"]),
        ..BASE
    },
    Run {
        name: "the tools' own tests",
        place: Place::Cargo(&[
            "test",
            "--release",
            "-p",
            "gdr",
            "-p",
            "peermemctl",
            "-p",
            "peermem-verbs",
        ]),
        format: Format::Cargo,
        // What the module writes is read here.
        src: Some(&[
            "src/device.rs",
            "src/ranges.rs",
            "src/history.rs",
            "src/reason.rs",
            "src/registry.rs",
        ]),
        ..BASE
    },
    Run {
        name: "what a registration costs",
        place: Place::Cost,
        ..BASE
    },
    Run {
        name: "installing, on synthetic hosts",
        place: Place::Cargo(&["run", "--release", "--quiet", "-p", "peermem-install"]),
        // Packed, and not looked into.
        src: Some(&[]),
        ..BASE
    },
    Run {
        name: "installed on Debian 13, on the kernel of its backports",
        place: Place::Debian(&debian::BACKPORTS),
        // A quarter of an hour the first time, on what an archive gives out.
        only_in_full: true,
        ..BASE
    },
    Run {
        name: "installed on Debian 13, without Rust",
        place: Place::Debian(&debian::TRIXIE),
        only_in_full: true,
        ..BASE
    },
    Run {
        name: "installed on Debian 12, without Rust",
        place: Place::Debian(&debian::BOOKWORM),
        only_in_full: true,
        ..BASE
    },
    Run {
        name: "from a clone below /tmp",
        place: Place::Contact,
        ..BASE
    },
    Run {
        name: "KUnit",
        place: Place::Vm {
            options: kunit,
            command: KUNIT,
        },
        groups: KUNIT_SUITES,
        ..BASE
    },
    Run {
        name: "KUnit: the portable build",
        place: Place::Vm {
            options: |vm| {
                kunit(vm);
                vm.build = Some(Build::Portable);
            },
            command: KUNIT,
        },
        groups: KUNIT_SUITES,
        ..BASE
    },
    Run {
        name: "mutants: each rule taken out",
        place: Place::Mutants,
        ..BASE
    },
    Run {
        name: "the module's logic, on the host",
        place: Place::Cargo(&["test", "-p", "peermem-host", "--", "--show-output"]),
        format: Format::Cargo,
        ..BASE
    },
    Run {
        name: "verbs: ours",
        place: Place::Vm {
            options: ours,
            command: GDR,
        },
        shown: Some("nccl"),
        column: Some("ours"),
        ..BASE
    },
    Run {
        name: "verbs: ours, revocable",
        place: Place::Vm {
            options: revocable,
            command: GDR,
        },
        column: Some("ours, revocable"),
        ..BASE
    },
    Run {
        name: "verbs: ours, the portable build",
        place: Place::Vm {
            options: |vm| {
                ours(vm);
                vm.build = Some(Build::Portable);
            },
            command: GDR,
        },
        same_as: Some(same("verbs: ours")),
        // The smoke runs on older kernels have this build, too.
        only_in_full: true,
        ..BASE
    },
    Run {
        name: "verbs: ours, the portable build, revocable",
        place: Place::Vm {
            options: |vm| {
                revocable(vm);
                vm.build = Some(Build::Portable);
            },
            command: GDR,
        },
        same_as: Some(same("verbs: ours, revocable")),
        only_in_full: true,
        ..BASE
    },
    Run {
        name: "verbs: ours, on the stand-in's p2p.c",
        place: Place::Vm {
            options: |vm| {
                ours(vm);
                vm.provider = Provider::Ours;
            },
            command: GDR,
        },
        same_as: Some(other_provider("verbs: ours")),
        // Whether the two providers agree is also asked by way of NVIDIA's module, whose results are kept while only ours
        // changes, and in the runs of a provider's answers.
        only_in_full: true,
        ..BASE
    },
    Run {
        name: "verbs: ours, revocable, on the stand-in's p2p.c",
        place: Place::Vm {
            options: |vm| {
                revocable(vm);
                vm.provider = Provider::Ours;
            },
            command: GDR,
        },
        same_as: Some(other_provider("verbs: ours, revocable")),
        only_in_full: true,
        ..BASE
    },
    Run {
        name: "verbs: ours, on 555's nv-p2p.c",
        place: Place::Vm {
            options: |vm| {
                ours(vm);
                vm.provider = Provider::Nvidia555;
            },
            command: GDR,
        },
        same_as: Some(same("verbs: ours")),
        only_in_full: true,
        ..BASE
    },
    Run {
        name: "verbs: ours, revocable, on 555's nv-p2p.c",
        place: Place::Vm {
            options: |vm| {
                revocable(vm);
                vm.provider = Provider::Nvidia555;
            },
            command: GDR,
        },
        same_as: Some(same("verbs: ours, revocable")),
        only_in_full: true,
        ..BASE
    },
    Run {
        name: "a provider's answers: ours, on the stand-in's p2p.c",
        place: Place::Vm {
            options: |vm| {
                ours(vm);
                coherent(vm);
                vm.provider = Provider::Ours;
            },
            command: ANSWERS,
        },
        same_as: Some(in_part(other_provider("verbs: ours"))),
        ..BASE
    },
    Run {
        name: "a provider's answers: ours, revocable, on the stand-in's p2p.c",
        place: Place::Vm {
            options: |vm| {
                revocable(vm);
                coherent(vm);
                vm.provider = Provider::Ours;
            },
            command: ANSWERS,
        },
        same_as: Some(in_part(other_provider("verbs: ours, revocable"))),
        ..BASE
    },
    Run {
        name: "memory of coherent GPUs: ours",
        place: Place::Vm {
            options: coherent,
            command: COHERENT,
        },
        only_in_full: true,
        ..BASE
    },
    Run {
        name: "memory of coherent GPUs: ours, revocable, behind a translating IOMMU",
        place: Place::Vm {
            options: |vm| {
                coherent(vm);
                vm.iommu = Iommu::Strict;
                vm.param.push("persistent_api_support=0".to_owned());
            },
            command: COHERENT,
        },
        only_in_full: true,
        ..BASE
    },
    Run {
        name: "BARs with struct pages: ours, behind a translating IOMMU",
        place: Place::Vm {
            options: p2pdma_translated,
            command: P2PDMA_SMOKE,
        },
        ..BASE
    },
    Run {
        name: "BARs with struct pages: ours, revocable",
        place: Place::Vm {
            options: p2pdma_revocable,
            command: P2PDMA_SMOKE,
        },
        ..BASE
    },
    Run {
        name: "BARs with struct pages: verbs: ours",
        place: Place::Vm {
            options: p2pdma,
            command: P2PDMA,
        },
        only_in_full: true,
        ..BASE
    },
    Run {
        name: "BARs with struct pages: verbs: ours, behind a translating IOMMU",
        place: Place::Vm {
            options: p2pdma_translated,
            command: P2PDMA,
        },
        only_in_full: true,
        ..BASE
    },
    Run {
        name: "BARs with struct pages: verbs: ours, revocable",
        place: Place::Vm {
            options: p2pdma_revocable,
            command: P2PDMA,
        },
        only_in_full: true,
        ..BASE
    },
    Run {
        name: "BARs with struct pages: verbs: ours, revocable, behind a translating IOMMU",
        place: Place::Vm {
            options: |vm| {
                p2pdma_revocable(vm);
                vm.iommu = Iommu::Strict;
            },
            command: P2PDMA,
        },
        only_in_full: true,
        ..BASE
    },
    Run {
        name: "forced bounce buffers: ours",
        place: Place::Vm {
            options: bounced,
            command: BOUNCED,
        },
        ..BASE
    },
    Run {
        name: "forced bounce buffers: ours, revocable",
        place: Place::Vm {
            options: |vm| {
                bounced(vm);
                vm.param.push("persistent_api_support=0".to_owned());
            },
            command: BOUNCED,
        },
        ..BASE
    },
    Run {
        name: "a GPU that is taken from its driver: ours",
        place: Place::Vm {
            options: |_| {},
            command: &["{gdr}", "test", "machine.gpu_taken_while_registered"],
        },
        ..BASE
    },
    Run {
        name: "verbs: NVIDIA's, persistent client",
        place: Place::Vm {
            options: persistent,
            command: GDR,
        },
        column: Some("NVIDIA {version}"),
        ..BASE
    },
    Run {
        name: "verbs: NVIDIA's, callback client",
        place: Place::Vm {
            options: callback,
            command: GDR,
        },
        column: Some("NVIDIA {version}, revocable"),
        ..BASE
    },
    Run {
        name: "verbs: NVIDIA's, persistent client, on the stand-in's p2p.c",
        place: Place::Vm {
            options: |vm| {
                persistent(vm);
                vm.provider = Provider::Ours;
            },
            command: GDR,
        },
        same_as: Some(other_provider("verbs: NVIDIA's, persistent client")),
        ..BASE
    },
    Run {
        name: "verbs: NVIDIA's, callback client, on the stand-in's p2p.c",
        place: Place::Vm {
            options: |vm| {
                callback(vm);
                vm.provider = Provider::Ours;
            },
            command: GDR,
        },
        same_as: Some(other_provider("verbs: NVIDIA's, callback client")),
        ..BASE
    },
    Run {
        name: "verbs: no peer-memory module",
        place: Place::Vm {
            options: |vm| {
                vm.bar = LARGE_BAR;
                vm.peermem = Peermem::None;
            },
            command: GDR,
        },
        column: Some("none"),
        ..BASE
    },
    Run {
        name: "verify: ours",
        place: Place::Vm {
            options: |_| {},
            command: VERIFY,
        },
        shown: Some("registration_us"),
        ..BASE
    },
    Run {
        name: "verify: ours, revocable",
        place: Place::Vm {
            options: |vm| vm.param.push("persistent_api_support=0".to_owned()),
            command: VERIFY_MODE,
        },
        ..BASE
    },
    Run {
        name: "verbs: ours, behind a translating IOMMU",
        place: Place::Vm {
            options: |vm| {
                vm.bar = LARGE_BAR;
                vm.iommu = Iommu::Strict;
            },
            command: MAPPING,
        },
        ..BASE
    },
    Run {
        name: "verbs: ours, mapped by nvidia.ko, behind a translating IOMMU",
        place: Place::Vm {
            options: |vm| {
                vm.bar = LARGE_BAR;
                vm.iommu = Iommu::Strict;
                vm.param.push("provider_maps=1".to_owned());
            },
            command: MAPPING,
        },
        // `dma.provider_maps`, the hazards and the sweep of calls have this mapping, too.
        only_in_full: true,
        ..BASE
    },
    Run {
        name: "verbs: ours, IOMMU passing through",
        place: Place::Vm {
            options: |vm| {
                vm.bar = LARGE_BAR;
                vm.iommu = Iommu::Pt;
            },
            command: MAPPING,
        },
        only_in_full: true,
        ..BASE
    },
    Run {
        name: "verbs: ours, a DMA device that takes 64 KiB an entry",
        place: Place::Vm {
            options: |vm| {
                vm.bar = LARGE_BAR;
                vm.rxe_param.push("peer_max_seg=0".to_owned());
            },
            command: ENTRIES,
        },
        ..BASE
    },
    Run {
        name: "verbs: ours, page tables of the older layout",
        place: Place::Vm {
            options: |vm| {
                vm.bar = LARGE_BAR;
                // NVIDIA's own code has one layout.
                vm.provider = Provider::Ours;
                vm.gpu_param.push("table_version=0x00010002".to_owned());
            },
            command: ENTRIES,
        },
        ..BASE
    },
    Run {
        name: "identity: ours beside NVIDIA's, memory_peers of ib_core's",
        place: Place::Vm {
            options: shown,
            command: IDENTITY,
        },
        shown: Some("nccl"),
        ..BASE
    },
    Run {
        name: "identity: ours, revocable, memory_peers of ib_core's",
        place: Place::Vm {
            options: |vm| {
                shown(vm);
                vm.param.push("persistent_api_support=0".to_owned());
            },
            command: IDENTITY_MODE,
        },
        ..BASE
    },
    Run {
        name: "identity: NVIDIA's, memory_peers of ib_core's",
        place: Place::Vm {
            options: |vm| {
                vm.peermem = Peermem::Nvidia;
                shown(vm);
            },
            command: IDENTITY,
        },
        ..BASE
    },
    Run {
        name: "loading: beside neighbours of all kinds",
        place: Place::Vm {
            options: |vm| beside(vm, Rdma::Patched),
            command: LOADING,
        },
        ..BASE
    },
    Run {
        name: "loading: beside neighbours of all kinds, memory_peers of ib_core's",
        place: Place::Vm {
            options: |vm| {
                beside(vm, Rdma::Patched);
                vm.memory_peers = true;
                // What refuses a name that is taken says so, before ib_core does.
                vm.expect
                    .extend("sysfs: cannot create duplicate filename=1".parse());
            },
            command: LOADING,
        },
        // Who has memory_peers the identity runs see; the neighbours are those of the run before.
        only_in_full: true,
        ..BASE
    },
    Run {
        name: "loading: beside an ib_core without peer memory",
        place: Place::Vm {
            options: |vm| beside(vm, Rdma::Stock),
            command: LOADING,
        },
        ..BASE
    },
    Run {
        name: "loading: a kernel that takes signed modules alone",
        place: Place::Vm {
            options: |vm| vm.signed = true,
            command: LOADING,
        },
        kernel: Some(kernel::EARLIER),
        ..BASE
    },
    Run {
        name: "peermemctl: root ports",
        place: Place::Vm {
            options: |vm| ctl(vm, Topology::RootPorts),
            command: &["{gdr}", "ctl", "--promtool", "{promtool}"],
        },
        kernel: Some(kernel::EARLIER),
        ..BASE
    },
    Run {
        name: "peermemctl: a switch, IOMMU translating",
        place: Place::Vm {
            options: |vm| {
                ctl(vm, Topology::Switch);
                vm.iommu = Iommu::Strict;
            },
            command: CTL,
        },
        kernel: Some(kernel::EARLIER),
        ..BASE
    },
    Run {
        name: "peermemctl: two switches",
        place: Place::Vm {
            options: |vm| {
                ctl(vm, Topology::Switches);
                vm.param.push("persistent_api_support=0".to_owned());
            },
            command: CTL,
        },
        kernel: Some(kernel::EARLIER),
        ..BASE
    },
    Run {
        name: "peermemctl: two sockets, small BARs",
        place: Place::Vm {
            options: |vm| {
                ctl(vm, Topology::Sockets);
                vm.bar = SMALL_BAR;
            },
            command: CTL,
        },
        kernel: Some(kernel::EARLIER),
        ..BASE
    },
    Run {
        name: "peermemctl: NVIDIA's module",
        place: Place::Vm {
            options: |vm| {
                ctl(vm, Topology::Flat);
                vm.peermem = Peermem::Nvidia;
            },
            command: CTL,
        },
        ..BASE
    },
    Run {
        name: "peermemctl: no module, and no extended config space",
        place: Place::Vm {
            options: |vm| {
                ctl(vm, Topology::Flat);
                vm.peermem = Peermem::None;
            },
            command: CTL,
        },
        ..BASE
    },
    Run {
        name: "debug kernel: identity: ours, revocable, memory_peers of ib_core's",
        place: Place::Vm {
            options: |vm| {
                vm.kernel = kernel::DEBUG.to_owned();
                shown(vm);
                vm.with_control = false;
                vm.param.push("persistent_api_support=0".to_owned());
            },
            command: IDENTITY,
        },
        // The debug kernel's smoke runs have these cases, with the module's own memory_peers; the usual kernel has both.
        only_in_full: true,
        ..BASE
    },
    Run {
        name: "debug kernel: KUnit",
        place: Place::Vm {
            options: |vm| {
                kunit(vm);
                vm.kernel = kernel::DEBUG.to_owned();
                // It has no others.
                vm.rdma = Rdma::Patched;
            },
            command: KUNIT,
        },
        groups: KUNIT_SUITES,
        ..BASE
    },
    Run {
        name: "debug kernel: smoke: ours",
        place: Place::Vm {
            options: |vm| {
                vm.kernel = kernel::DEBUG.to_owned();
                vm.bar = SMOKE_BAR;
            },
            command: DEBUG_SMOKE,
        },
        ..BASE
    },
    Run {
        name: "debug kernel: smoke: ours, revocable",
        place: Place::Vm {
            options: |vm| {
                vm.kernel = kernel::DEBUG.to_owned();
                vm.bar = SMOKE_BAR;
                vm.param.push("persistent_api_support=0".to_owned());
            },
            command: DEBUG_SMOKE,
        },
        ..BASE
    },
    Run {
        name: "debug kernel: smoke: ours, mapped by nvidia.ko",
        place: Place::Vm {
            options: |vm| {
                vm.kernel = kernel::DEBUG.to_owned();
                vm.bar = SMOKE_BAR;
                vm.param.push("provider_maps=1".to_owned());
            },
            command: DEBUG_SMOKE,
        },
        only_in_full: true,
        ..BASE
    },
    Run {
        name: "debug kernel: ours",
        place: Place::Vm {
            options: |vm| {
                debug(vm);
                vm.bar = SMOKE_BAR;
            },
            command: GDR,
        },
        only_in_full: true,
        ..BASE
    },
    Run {
        name: "debug kernel: ours, revocable",
        place: Place::Vm {
            options: |vm| {
                debug(vm);
                vm.bar = SMOKE_BAR;
                vm.param.push("persistent_api_support=0".to_owned());
            },
            command: GDR,
        },
        only_in_full: true,
        ..BASE
    },
    Run {
        name: "6.12-debug: smoke: ours",
        place: Place::Vm {
            options: |vm| {
                debug_portable(vm);
                vm.bar = SMOKE_BAR;
            },
            command: DEBUG_SMOKE,
        },
        only_in_full: true,
        ..BASE
    },
    Run {
        name: "6.12-debug: smoke: ours, revocable",
        place: Place::Vm {
            options: |vm| {
                debug_portable(vm);
                vm.bar = SMOKE_BAR;
                vm.param.push("persistent_api_support=0".to_owned());
            },
            command: DEBUG_SMOKE,
        },
        only_in_full: true,
        ..BASE
    },
    Run {
        name: "scale: ours",
        place: Place::Vm {
            options: measured,
            command: SCALE,
        },
        shown: Some("own_beside"),
        ..BASE
    },
    Run {
        name: "scale: ours, revocable",
        place: Place::Vm {
            options: |vm| {
                measured(vm);
                vm.param.push("persistent_api_support=0".to_owned());
            },
            command: SCALE,
        },
        shown: Some("own_beside"),
        ..BASE
    },
    Run {
        name: "scale, many: ours",
        place: Place::Vm {
            options: measured_at_large,
            command: SCALE_MANY,
        },
        shown: Some("own_"),
        only_in_full: true,
        ..BASE
    },
    Run {
        name: "scale, many: ours, revocable",
        place: Place::Vm {
            options: |vm| {
                measured_at_large(vm);
                vm.param.push("persistent_api_support=0".to_owned());
            },
            command: SCALE_MANY,
        },
        shown: Some("own_"),
        only_in_full: true,
        ..BASE
    },
    Run {
        name: "DMA: ours, behind a translating IOMMU",
        place: Place::Vm {
            options: |vm| dma(vm, Iommu::Strict, [4, 9]),
            command: DMA,
        },
        column: Some("ours"),
        ..BASE
    },
    Run {
        name: "DMA: NVIDIA's, behind a translating IOMMU",
        place: Place::Vm {
            options: |vm| {
                vm.peermem = Peermem::Nvidia;
                dma(vm, Iommu::Strict, [3, 6]);
            },
            command: DMA,
        },
        column: Some("NVIDIA {version}"),
        ..BASE
    },
    Run {
        name: "DMA: ours, behind an IOMMU that forgets lazily",
        place: Place::Vm {
            options: |vm| dma(vm, Iommu::On, [0, 10]),
            command: DMA,
        },
        shown: Some("window"),
        ..BASE
    },
    Run {
        name: "DMA: ours, IOMMU passing through",
        place: Place::Vm {
            options: |vm| dma(vm, Iommu::Pt, [0, 0]),
            command: DMA,
        },
        // Addresses are the bus's own, as in the run without an IOMMU.
        only_in_full: true,
        ..BASE
    },
    Run {
        name: "DMA: ours, no IOMMU",
        place: Place::Vm {
            options: |vm| dma(vm, Iommu::Off, [0, 0]),
            command: DMA,
        },
        ..BASE
    },
    Run {
        name: "DMA: NVIDIA's, no IOMMU",
        place: Place::Vm {
            options: |vm| {
                vm.peermem = Peermem::Nvidia;
                dma(vm, Iommu::Off, [0, 0]);
            },
            command: DMA,
        },
        only_in_full: true,
        ..BASE
    },
    Run {
        name: "stress: two thousand operations in each mode",
        place: Place::Vm {
            options: |_| {},
            command: STRESS,
        },
        ..BASE
    },
    Run {
        name: "debug kernel: stress: two thousand operations in each mode",
        place: Place::Vm {
            options: debug,
            command: STRESS,
        },
        only_in_full: true,
        ..BASE
    },
    Run {
        name: "6.12-debug: stress: two thousand operations in each mode",
        place: Place::Vm {
            options: |vm| {
                debug_portable(vm);
                vm.ib_param.push("peer_lock_classes=2".to_owned());
            },
            command: STRESS,
        },
        only_in_full: true,
        ..BASE
    },
    Run {
        name: "stress: the portable build",
        place: Place::Vm {
            options: |vm| vm.build = Some(Build::Portable),
            command: STRESS,
        },
        only_in_full: true,
        ..BASE
    },
    Run {
        name: "sweep: calls of the provider's, the portable build",
        place: Place::Vm {
            options: |vm| vm.build = Some(Build::Portable),
            command: &["{gdr}", "test", "sweep.calls"],
        },
        only_in_full: true,
        ..BASE
    },
    Run {
        name: "sweep: calls of the provider's",
        place: Place::Vm {
            options: |_| {},
            command: &["{gdr}", "test", "sweep.calls"],
        },
        ..BASE
    },
    Run {
        name: "hazards",
        place: Place::Hazards(None),
        ..BASE
    },
    Run {
        name: "hazards: ours, the portable build",
        place: Place::Hazards(Some(Build::Portable)),
        only_in_full: true,
        ..BASE
    },
    Run {
        name: "sweep: allocations of the kernel's",
        place: Place::Vm {
            options: |vm| {
                debug(vm);
                vm.faults = true;
            },
            command: &["{gdr}", "test", "sweep.allocations"],
        },
        only_in_full: true,
        ..BASE
    },
    Run {
        name: "perftest: ours",
        place: Place::Vm {
            options: |_| {},
            command: PERFTEST,
        },
        column: Some("ours"),
        ..BASE
    },
    Run {
        name: "perftest: NVIDIA's",
        place: Place::Vm {
            options: |vm| vm.peermem = Peermem::Nvidia,
            command: PERFTEST,
        },
        column: Some("NVIDIA {version}"),
        ..BASE
    },
    Run {
        name: "perftest: no peer-memory module",
        place: Place::Vm {
            options: |vm| vm.peermem = Peermem::None,
            command: PERFTEST,
        },
        column: Some("none"),
        ..BASE
    },
    Run {
        name: "CUDA: ours, one pair and verify",
        place: Place::Vm {
            options: |_| {},
            command: CUDA_PART,
        },
        ..BASE
    },
    Run {
        name: "CUDA: ours",
        place: Place::Vm {
            options: |_| {},
            command: CUDA,
        },
        column: Some("ours"),
        only_in_full: true,
        ..BASE
    },
    Run {
        name: "CUDA: ours, revocable",
        place: Place::Vm {
            options: |vm| vm.param.push("persistent_api_support=0".to_owned()),
            command: CUDA,
        },
        column: Some("ours, revocable"),
        only_in_full: true,
        ..BASE
    },
    Run {
        name: "CUDA: NVIDIA's",
        place: Place::Vm {
            options: |vm| vm.peermem = Peermem::Nvidia,
            command: CUDA,
        },
        column: Some("NVIDIA {version}"),
        only_in_full: true,
        ..BASE
    },
    Run {
        name: "CUDA: no peer-memory module",
        place: Place::Vm {
            options: |vm| vm.peermem = Peermem::None,
            command: CUDA,
        },
        column: Some("none"),
        ..BASE
    },
    Run {
        name: "NIXL: ours",
        place: Place::Vm {
            options: |_| {},
            command: NIXL,
        },
        column: Some("ours"),
        // 69 MB to fetch.
        only_in_full: true,
        ..BASE
    },
    Run {
        name: "NIXL: ours, revocable",
        place: Place::Vm {
            options: |vm| vm.param.push("persistent_api_support=0".to_owned()),
            command: NIXL,
        },
        column: Some("ours, revocable"),
        // 69 MB to fetch.
        only_in_full: true,
        ..BASE
    },
    Run {
        name: "NIXL: NVIDIA's",
        place: Place::Vm {
            options: |vm| vm.peermem = Peermem::Nvidia,
            command: NIXL,
        },
        column: Some("NVIDIA {version}"),
        // 69 MB to fetch.
        only_in_full: true,
        ..BASE
    },
    Run {
        name: "NIXL: no peer-memory module",
        place: Place::Vm {
            options: |vm| vm.peermem = Peermem::None,
            command: NIXL,
        },
        column: Some("none"),
        // 69 MB to fetch.
        only_in_full: true,
        ..BASE
    },
    Run {
        name: "UCX: ours",
        place: Place::Vm {
            options: |_| {},
            command: UCX,
        },
        column: Some("ours"),
        // 122 MB to fetch.
        only_in_full: true,
        ..BASE
    },
    Run {
        name: "UCX: ours, revocable",
        place: Place::Vm {
            options: |vm| vm.param.push("persistent_api_support=0".to_owned()),
            command: UCX,
        },
        column: Some("ours, revocable"),
        only_in_full: true,
        ..BASE
    },
    Run {
        name: "UCX: NVIDIA's",
        place: Place::Vm {
            options: |vm| vm.peermem = Peermem::Nvidia,
            command: UCX,
        },
        column: Some("NVIDIA {version}"),
        only_in_full: true,
        ..BASE
    },
    Run {
        name: "UCX: no peer-memory module",
        place: Place::Vm {
            options: |vm| vm.peermem = Peermem::None,
            command: UCX,
        },
        column: Some("none"),
        only_in_full: true,
        ..BASE
    },
    Run {
        name: "two hosts: ours",
        place: Place::Vm {
            options: pair,
            command: PAIR,
        },
        column: Some("ours"),
        // NIXL, UCX and Open MPI are 198 MB to fetch.
        only_in_full: true,
        ..BASE
    },
    Run {
        name: "two hosts: ours, revocable",
        place: Place::Vm {
            options: |vm| {
                pair(vm);
                vm.param.push("persistent_api_support=0".to_owned());
            },
            command: PAIR,
        },
        column: Some("ours, revocable"),
        only_in_full: true,
        ..BASE
    },
    Run {
        name: "two hosts: NVIDIA's",
        place: Place::Vm {
            options: |vm| {
                pair(vm);
                vm.peermem = Peermem::Nvidia;
            },
            command: PAIR,
        },
        column: Some("NVIDIA {version}"),
        only_in_full: true,
        ..BASE
    },
    Run {
        name: "two hosts: no peer-memory module",
        place: Place::Vm {
            options: |vm| {
                pair(vm);
                vm.peermem = Peermem::None;
            },
            command: PAIR,
        },
        column: Some("none"),
        only_in_full: true,
        ..BASE
    },
    Run {
        name: "two hosts: ours, one switched off in traffic",
        place: Place::Vm {
            options: |vm| {
                pair(vm);
                vm.host_2_is_lost = true;
            },
            command: PAIR_LOST,
        },
        ..BASE
    },
    Run {
        name: "pyverbs: stock rxe",
        place: Place::Vm {
            options: |vm| {
                vm.peermem = Peermem::None;
                vm.rdma = Rdma::Stock;
                vm.gpus = 0;
            },
            command: PYVERBS,
        },
        format: Format::Unittest,
        ..BASE
    },
    Run {
        name: "pyverbs: patched rxe",
        place: Place::Vm {
            // On memory of the CPU: no peer-memory module is asked.
            options: |vm| {
                vm.peermem = Peermem::None;
                vm.gpus = 1;
            },
            command: PYVERBS,
        },
        format: Format::Unittest,
        same_as: Some(same("pyverbs: stock rxe")),
        ..BASE
    },
];

impl Run {
    /// How many machines it has at once.
    pub(crate) fn machines(&self) -> usize {
        match self.place {
            Place::Vm { options, .. } => {
                let mut wanted = Options::default();
                options(&mut wanted);
                1 + usize::from(wanted.pair)
            }
            _ => 1,
        }
    }
}

/// What is run on arm64, where each machine is emulated more slowly: what pages, processors and their IOMMU have a part in.
pub(crate) const ON_ARM64: &[&str] = &[
    "KUnit",
    "verbs: ours",
    "verbs: ours, revocable",
    "verbs: ours, the portable build",
    "verbs: ours, the portable build, revocable",
    "verbs: ours, behind a translating IOMMU",
    "verbs: ours, mapped by nvidia.ko, behind a translating IOMMU",
    "verbs: NVIDIA's, persistent client",
    "verbs: NVIDIA's, callback client",
    "a provider's answers: ours, on the stand-in's p2p.c",
    "a provider's answers: ours, revocable, on the stand-in's p2p.c",
    "memory of coherent GPUs: ours",
    "DMA: ours, behind a translating IOMMU",
    "DMA: ours, behind an IOMMU that forgets lazily",
    "hazards",
    "sweep: calls of the provider's",
    "perftest: ours",
    "pyverbs: patched rxe",
    "stress: two thousand operations in each mode",
];

/// Runs on Debian's stock kernels: what the kernel's own ib_core, rxe, locks and mapping of DMA have a part in.
pub(crate) const ON_STOCK: &[&str] = &[
    "verbs: ours",
    "verbs: ours, revocable",
    "verbs: ours, on 555's nv-p2p.c",
    "verbs: ours, behind a translating IOMMU",
    "verbs: ours, IOMMU passing through",
    "verbs: NVIDIA's, persistent client",
    "verbs: NVIDIA's, callback client",
    "stress: two thousand operations in each mode",
    "sweep: calls of the provider's",
    "hazards",
    "perftest: ours",
];

/// Runs on the oldest kernel: every callback of ib_core's in both modes, and all that the verbs cases see of the kernel's own rxe.
pub(crate) const ON_OLDEST: &[&str] = &["verbs: ours", "verbs: ours, revocable"];

/// Machines of the suite that `make test-all` repeats on a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Again {
    Nothing,
    /// All that have no kernel of their own.
    All,
    /// Those with these names, and the hazards if they are among them.
    Listed(&'static [&'static str]),
}

/// A smoke run on a kernel: something of each kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Smoke {
    /// This module.
    Ours,
    /// This module without persistent pins.
    Revocable,
    /// NVIDIA's module, whose client with callbacks serves.
    Nvidia,
    /// This module beside an nvidia.ko that the loader takes for proprietary.
    Proprietary,
    /// The same without persistent pins.
    ProprietaryRevocable,
}

impl Smoke {
    fn on(self, flavour: &kernel::Flavour) -> Run {
        let (name, options): (_, fn(&mut Options)) = match self {
            Self::Ours => ("ours", |vm| vm.bar = SMOKE_BAR),
            Self::Revocable => ("ours, revocable", |vm| {
                vm.bar = SMOKE_BAR;
                vm.param.push("persistent_api_support=0".to_owned());
            }),
            Self::Proprietary => ("ours, beside a proprietary nvidia.ko", beside_proprietary),
            Self::ProprietaryRevocable => {
                ("ours, beside a proprietary nvidia.ko, revocable", |vm| {
                    beside_proprietary(vm);
                    vm.param.push("persistent_api_support=0".to_owned());
                })
            }
            Self::Nvidia => ("NVIDIA's", |vm| {
                vm.bar = SMOKE_BAR;
                vm.peermem = Peermem::Nvidia;
            }),
        };
        Run {
            // For as long as the program runs, as all names of runs are.
            name: format!("{}: smoke: {name}", flavour.name).leak(),
            place: Place::Vm {
                options,
                command: SMOKE,
            },
            only_in_full: flavour.only_in_full,
            kernel: Some(flavour.name),
            ..BASE
        }
    }
}

fn beside_proprietary(vm: &mut Options) {
    vm.bar = SMOKE_BAR;
    vm.no_gpl_only = true;
    vm.gpu_param.push("proprietary=1".to_owned());
}

/// Every run of the suite on the kernels that the runs name, and the smoke runs of the kernels' table.
pub(crate) fn every_run() -> &'static [Run] {
    static ALL: LazyLock<Vec<Run>> = LazyLock::new(|| {
        let smoke =
            kernel::all().flat_map(|flavour| flavour.smoke.iter().map(|smoke| smoke.on(flavour)));
        SUITE.iter().copied().chain(smoke).collect()
    });
    &ALL
}

/// The machines of the suite once more, on another kernel: those that the kernel's entry in the table names.
pub(crate) fn again(kernel: &'static str) -> Vec<Run> {
    // For as long as the program runs, as all names of runs are.
    let named = |name: &str| -> &'static str { format!("{kernel}: {name}").leak() };
    let listed = match kernel::flavour(kernel).map(|flavour| flavour.again) {
        Some(Again::Nothing) => Some(&[][..]),
        Some(Again::Listed(names)) => Some(names),
        Some(Again::All) | None => None,
    };
    let is_listed = |name: &str| listed.is_none_or(|names| names.contains(&name));
    SUITE
        .iter()
        .filter(|run| is_listed(run.name))
        .filter(|run| match run.place {
            Place::Vm { options, .. } => {
                let mut wanted = Options::default();
                options(&mut wanted);
                run.kernel.is_none() && wanted.kernel == kernel::DEFAULT
            }
            Place::Hazards(_) => listed.is_some(),
            _ => false,
        })
        .map(|run| Run {
            name: named(run.name),
            same_as: run
                .same_as
                .filter(|same| is_listed(same.run))
                .map(|same| Same {
                    run: named(same.run),
                    ..same
                }),
            // The table is of modules, not of kernels.
            column: None,
            only_in_full: true,
            kernel: Some(kernel),
            ..*run
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_other_kernel_of_make_test_has_a_smoke_run() {
        for flavour in kernel::others().filter_map(kernel::flavour) {
            let of_kernel = |run: &&Run| run.kernel == Some(flavour.name) && !run.only_in_full;
            let smoke: Vec<&str> = every_run()
                .iter()
                .filter(of_kernel)
                .map(|run| run.name)
                .filter(|name| name.starts_with(&format!("{}: smoke: ", flavour.name)))
                .collect();
            assert_eq!(smoke.is_empty(), flavour.only_in_full, "{}", flavour.name);
        }
    }

    #[test]
    fn runs_that_a_kernel_repeats_exist() {
        for name in kernel::others() {
            let Some(Again::Listed(names)) = kernel::flavour(name).map(|flavour| flavour.again)
            else {
                continue;
            };
            assert_eq!(again(name).len(), names.len(), "{name}");
        }
    }

    #[test]
    fn names_of_runs_are_unique() {
        let others = kernel::others().flat_map(again);
        let mut names: Vec<&str> = every_run()
            .iter()
            .copied()
            .chain(others)
            .map(|run| run.name)
            .collect();
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
    }

    #[test]
    fn the_suite_runs_again_on_another_kernel() {
        let again = again("7.x");
        let names: Vec<&str> = again.iter().map(|run| run.name).collect();
        assert!(names.contains(&"7.x: KUnit"));
        assert!(names.contains(&"7.x: verbs: ours"));
        assert!(!names.iter().any(|name| name.contains("debug kernel")));
        assert!(!names.iter().any(|name| name.contains("smoke")));
        for run in &again {
            assert_eq!(run.kernel, Some("7.x"));
            assert!(run.only_in_full && run.column.is_none());
            assert!(run.same_as.is_none_or(|same| names.contains(&same.run)));
        }
    }

    #[test]
    fn on_arm64_what_is_listed_is_run() {
        for kernel in [kernel::ARM64, kernel::ARM64_64K] {
            let again = again(kernel);
            assert_eq!(again.len(), ON_ARM64.len());
            let names: Vec<&str> = again.iter().map(|run| run.name).collect();
            for run in &again {
                assert!(run.same_as.is_none_or(|same| names.contains(&same.run)));
                let Place::Vm { options, .. } = run.place else {
                    continue;
                };
                let mut vm = Options {
                    kernel: kernel.to_owned(),
                    ..Options::default()
                };
                options(&mut vm);
                // There are no other RDMA modules, and an SMMU does not speak as Intel's IOMMU does.
                assert!(vm.rdma == Rdma::Patched && vm.arch() == Arch::Arm64);
                assert!(!format!("{:?}", vm.expect).contains("DMAR"));
            }
        }
    }
}
