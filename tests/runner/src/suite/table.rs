// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! The runs of the suite, in order. A run is one row.

use super::run::{cargo, in_part, other_provider, run, same, vm, Place, Run};
use super::setting::Setting::{
    self, All, Append, Bar, Bench, Beside, Build, Coherent, Dma, Expect, Faults, Gpu, Gpus,
    Host2IsLost, Ib, Icount, Iommu, Kernel, Kunit, Memory, MemoryPeers, Pair, Param, Peermem,
    Provider, Rdma, Rxe, Signed, Smp, Timeout, Topology, WithControl,
};
use crate::kernel::{DEBUG, DEBUG_PORTABLE, DMABUF, EARLIER};
use crate::results::Format;
use crate::{debian, topology, vm as machine};

const GDR: &str = "{gdr} test {filter}";
const KUNIT: &str = "{repo}/tests/vm/kunit";

/// Cases about the module's identity as other software sees it.
const IDENTITY: &str = "{gdr} test identity. consumers.";
/// The part of [`IDENTITY`] that depends on the pin mode.
const IDENTITY_MODE: &str = "{gdr} test identity.";
/// A few cases of each kind, for kernels that the module was not developed on.
pub(super) const SMOKE: &str = "{gdr} test input.user_namespace machine.suspended_in_traffic move.read_gpu_to_host \
    move.send_gpu_to_gpu move.write_gpu_to_gpu register.entry_boundary register.one_pin_one_unpin \
    register.rereg reasons.no_room reasons.unload reasons.tracepoint registrations. limit.each_user \
    persist. process.exit process.killed_in_traffic revoke. identity.";
/// Smoke cases for the debug kernel, on which everything takes ten times as long. Sends, traffic
/// during revocations, and readers during unloads are left out. The full run on that kernel
/// includes these cases.
const DEBUG_SMOKE: &str = "{gdr} test move.write_gpu_to_gpu register.entry_boundary register.one_pin_one_unpin register.rereg \
    reasons.no_room reasons.tracepoint registrations. limit.each_user persist. process.exit \
    process.killed_in_traffic revoke.free_by_ revoke.local_use_refused revoke.receive_refused \
    revoke.all_regions_of_the_allocation revoke.others_go_on revoke.new_owner_keeps_his_bytes \
    revoke.registers_again hca. identity.version identity.parameters identity.unload_ \
    identity.memory_peers identity.statistics identity.reader_across_unload identity.modprobe";
/// Cases that depend on the longest entry of the scatter list, or on the layout of nvidia.ko's page
/// table. Bytes are moved in each direction, over several entries. Other runs cover all ways to
/// move bytes.
const ENTRIES: &str =
    "{gdr} test move.write_long_host_to_gpu move.read_long_gpu_to_host move.send_long_gpu_to_gpu \
    register. provider. persist. reasons.other_page_sizes reasons.page_count reasons.table_version";
/// All cases that use a mapping.
const MAPPING: &str =
    "{gdr} test move. register. provider. persist. process. revoke. reasons. registrations.";
/// Cases about the answers of nvidia.ko, including answers that NVIDIA's code never gives.
const ANSWERS: &str = "{gdr} test bar1. coherent. input. provider. reasons. rules.";
/// Cases about the memory of coherent GPUs.
const COHERENT: &str = "{gdr} test coherent.";
/// Cases that move bytes, cross entries, end registrations in both modes, and use BARs with struct
/// pages.
const P2PDMA_SMOKE: &str = "{gdr} test move.read_gpu_to_host move.send_gpu_to_gpu move.write_gpu_to_gpu register.entry_boundary \
    register.one_pin_one_unpin registrations. persist. revoke. p2pdma.";
/// The groups of [`MAPPING`], and the cases about BARs with struct pages.
const P2PDMA: &str = "{gdr} test move. register. provider. persist. process. revoke. reasons. registrations. p2pdma.";
const BOUNCED: &str = "{gdr} test machine.bounce_buffers_forced";
/// Cases about the messages of a module that cannot be loaded.
const LOADING: &str = "{gdr} loading";
const DMA: &str = "{gdr} test dma.";
/// Cases with enough registrations to show a walk over all of them. [`SCALE_MANY`] has as many
/// registrations as users ask for.
const SCALE: &str = "{gdr} test scale.few";
const SCALE_MANY: &str = "{gdr} test scale.many";
/// Findings of `peermemctl` on a VM.
const CTL: &str = "{gdr} ctl";
/// `peermemctl verify` with and without problems, and the cases that depend on the pin mode.
const VERIFY: &str = "{gdr} test verify.";
const VERIFY_MODE: &str = "{gdr} test verify.all_is_well verify.every_pair";
/// One epoch of two thousand operations in each mode.
const STRESS: &str = "{gdr} stress --epochs 2";
const PERFTEST: &str = "{repo}/tests/vm/perftest";
/// perftest's `--use_cuda`, and `peermemctl verify` through CUDA.
const CUDA: &str = "{gdr} cuda --library {cuda} --perftest {perftest}";
/// The cases of [`CUDA`] that are quick.
const CUDA_PART: &str =
    "{gdr} cuda --library {cuda} --perftest {perftest} cuda.write_bw cuda.verify";
/// NIXL between two agents.
const NIXL: &str = "{gdr} cuda --library {cuda} --nixl {nixl} cuda.nixl";
/// UCX alone.
const UCX: &str = "{gdr} cuda --library {cuda} --ucx {ucx} ucx.";
/// perftest, NIXL, Open MPI and our own cases between two hosts.
const PAIR: &str =
    "{gdr} pair --library {cuda} --perftest {perftest} --nixl {nixl} --ucx {ucx} --mpi {mpi}";
const PAIR_LOST: &str = "{gdr} pair pair.lost_in_traffic";
const PYVERBS: &str = "{repo}/tests/vm/pyverbs {pyverbs}";
/// Export and registration by dma-buf, and each answer of the library that programs preload.
const DMA_BUF: &str = "{gdr} dmabuf --preload {preload} --library {cuda}";
/// Cases that need no module, by the preloaded library.
const PRELOADED: &str = "{gdr} test move. register. process. persist.";

/// KUnit's suites and their numbers of tests. The suite `life` runs with eight sets of parameters.
const KUNIT_SUITES: &[(&str, usize)] = &[
    ("client", 18),
    ("life", 8 * 9),
    ("mapping", 35),
    ("parts", 21),
    ("provider", 19),
    ("revocation", 30),
    ("showing", 21),
];

/// BAR sizes in MiB. The large BAR has room for the largest regions that the cases register.
const LARGE_BAR: Setting = Bar(128 * 1024);
/// Size of a BAR with regions that cross entries of 2 GiB. KASAN needs an eighth of the memory that
/// rxe maps, which is too much for 64 GiB.
pub(super) const SMOKE_BAR: Setting = Bar(8 * 1024);
/// Size of a BAR1 that is too small for RDMA, and twice this size, which is the smallest size
/// without a finding.
const SMALL_BAR: Setting = Bar(256);
const LEAST_BAR: Setting = Bar(512);

/// Our module without persistent pins.
pub(super) const REVOCABLE: Setting = Param("persistent_api_support=0");
const PORTABLE: Setting = Build(machine::Build::Portable);
/// NVIDIA's nvidia-peermem. The client with callbacks serves if the HCA supports callbacks.
pub(super) const NVIDIA: Setting = Peermem(machine::Peermem::Nvidia);
/// An HCA without support for callbacks, so NVIDIA's client without callbacks serves.
const NO_INVALIDATION: Setting = Rxe("peer_inval=0");
const NO_MODULE: Setting = Peermem(machine::Peermem::None);
/// No module but the preloaded library, on [`DMABUF`].
const PRELOAD: Setting = Peermem(machine::Peermem::Preload);
const STOCK_RDMA: Setting = Rdma(machine::Rdma::Stock);
/// The upper half of nvidia.ko: the stand-in's own p2p.c, or the nv-p2p.c of 555.
const STAND_IN: Setting = Provider(machine::Provider::Ours);
const DRIVER_555: Setting = Provider(machine::Provider::Nvidia555);
/// An IOMMU that translates, and unmaps immediately.
const STRICT: Setting = Iommu(machine::Iommu::Strict);
/// Gives lockdep a separate class of ib_core's locks for the regions of each client.
const LOCK_CLASSES: Setting = Ib("peer_lock_classes=2");
/// The debug kernel without Rust, for the portable build. This kernel does not know that a region
/// may be mapped more than eight times. `DMA_API_DEBUG` reports the first such mapping, and no
/// further mapping.
const DEBUG_6_12: Setting = All(&[
    Kernel(DEBUG_PORTABLE),
    Expect("DMA-API: exceeded 7 overlapping mappings of cacheline=1"),
]);
/// GPUs whose BAR has struct pages. These GPUs need additional RAM: 1/64 of the BAR's size.
const STRUCT_PAGES: Setting = All(&[SMOKE_BAR, Memory(2048 + 512), Gpu("p2pdma=1")]);
const BOUNCE_BUFFERS: Setting = Append("swiotlb=force");
/// A VM without a peer-memory module, in which ours can be loaded beside other drivers.
const NEIGHBOURS: Setting = All(&[NO_MODULE, Gpus(1), Beside]);
/// A VM that counts the module's instructions and its memory.
const MEASURED: Setting = All(&[Bench, Icount, Smp(1), Gpus(1), LARGE_BAR]);
/// A VM like [`MEASURED`], with room and time for 10,000 processes.
const MEASURED_AT_LARGE: Setting = All(&[MEASURED, Memory(6 * 1024), Timeout(7200)]);
/// Two hosts connected by a wire.
const TWO_HOSTS: Setting = All(&[Pair, Smp(1), Gpus(1)]);

pub(super) const SUITE: &[Run] = &[
    run("lint", Place::Lint),
    cargo(
        "the module's logic, in every order of events",
        "test --release -p peermem-loom -- --show-output",
    ),
    cargo("the runner's own tests", "test -p runner").src(&["src/compat.h"]),
    cargo(
        "the tools' own tests",
        "test --release -p gdr -p peermemctl -p peermem-verbs",
    )
    // These tests read the module's output.
    .src(&[
        "src/device.rs",
        "src/ranges.rs",
        "src/history.rs",
        "src/reason.rs",
        "src/registry.rs",
    ]),
    run("what a registration costs", Place::Cost),
    cargo(
        "installing, on synthetic hosts",
        "run --release --quiet -p peermem-install",
    )
    .format(Format::Ktap)
    // The sources are packed, and their contents do not matter.
    .src(&[]),
    run(
        "installed on Debian 13, on the kernel of its backports",
        Place::Debian(&debian::BACKPORTS),
    )
    // This run takes a quarter of an hour the first time, and tests the archive of a release.
    .only_in_full(),
    run(
        "installed on Debian 13, without Rust",
        Place::Debian(&debian::TRIXIE),
    )
    .only_in_full(),
    run(
        "installed on Debian 12, without Rust",
        Place::Debian(&debian::BOOKWORM),
    )
    .only_in_full(),
    run("from a clone below /tmp", Place::Contact),
    vm("KUnit", KUNIT).with(&[Kunit]).groups(KUNIT_SUITES),
    vm("KUnit: the portable build", KUNIT)
        .with(&[Kunit, PORTABLE])
        .groups(KUNIT_SUITES),
    run(
        "mutants: each rule taken out",
        Place::Mutants(machine::Build::InTree),
    ),
    run(
        "mutants: rules at the border with C, the portable build",
        Place::Mutants(machine::Build::Portable),
    )
    .only_in_full(),
    cargo(
        "the module's logic, on the host",
        "test -p peermem-host -- --show-output",
    ),
    vm("verbs: ours", GDR)
        .with(&[LARGE_BAR, WithControl])
        .shown("nccl")
        .column("ours"),
    vm("verbs: ours, revocable", GDR)
        .with(&[LARGE_BAR, REVOCABLE])
        .column("ours, revocable"),
    vm("verbs: ours, the portable build", GDR)
        .with(&[LARGE_BAR, WithControl, PORTABLE])
        .same_as(same("verbs: ours"))
        // The smoke runs on older kernels have this build, too.
        .only_in_full(),
    vm("verbs: ours, the portable build, revocable", GDR)
        .with(&[LARGE_BAR, REVOCABLE, PORTABLE])
        .same_as(same("verbs: ours, revocable"))
        .only_in_full(),
    vm("verbs: ours, on the stand-in's p2p.c", GDR)
        .with(&[LARGE_BAR, WithControl, STAND_IN])
        .same_as(other_provider("verbs: ours"))
        // The runs of NVIDIA's module also compare both upper halves, and their results are kept
        // while only our module changes. The runs of a provider's answers compare the upper halves
        // too.
        .only_in_full(),
    vm("verbs: ours, revocable, on the stand-in's p2p.c", GDR)
        .with(&[LARGE_BAR, REVOCABLE, STAND_IN])
        .same_as(other_provider("verbs: ours, revocable"))
        .only_in_full(),
    vm("verbs: ours, on 555's nv-p2p.c", GDR)
        .with(&[LARGE_BAR, WithControl, DRIVER_555])
        .same_as(same("verbs: ours"))
        .only_in_full(),
    vm("verbs: ours, revocable, on 555's nv-p2p.c", GDR)
        .with(&[LARGE_BAR, REVOCABLE, DRIVER_555])
        .same_as(same("verbs: ours, revocable"))
        .only_in_full(),
    vm(
        "a provider's answers: ours, on the stand-in's p2p.c",
        ANSWERS,
    )
    .with(&[LARGE_BAR, WithControl, Coherent, STAND_IN])
    .same_as(in_part(other_provider("verbs: ours"))),
    vm(
        "a provider's answers: ours, revocable, on the stand-in's p2p.c",
        ANSWERS,
    )
    .with(&[LARGE_BAR, REVOCABLE, Coherent, STAND_IN])
    .same_as(in_part(other_provider("verbs: ours, revocable"))),
    vm("memory of coherent GPUs: ours", COHERENT)
        .with(&[Coherent])
        .only_in_full(),
    vm(
        "memory of coherent GPUs: ours, revocable, behind a translating IOMMU",
        COHERENT,
    )
    .with(&[Coherent, STRICT, REVOCABLE])
    .only_in_full(),
    vm(
        "BARs with struct pages: ours, behind a translating IOMMU",
        P2PDMA_SMOKE,
    )
    .with(&[STRUCT_PAGES, STRICT]),
    vm("BARs with struct pages: ours, revocable", P2PDMA_SMOKE).with(&[STRUCT_PAGES, REVOCABLE]),
    vm("BARs with struct pages: verbs: ours", P2PDMA)
        .with(&[STRUCT_PAGES])
        .only_in_full(),
    vm(
        "BARs with struct pages: verbs: ours, behind a translating IOMMU",
        P2PDMA,
    )
    .with(&[STRUCT_PAGES, STRICT])
    .only_in_full(),
    vm("BARs with struct pages: verbs: ours, revocable", P2PDMA)
        .with(&[STRUCT_PAGES, REVOCABLE])
        .only_in_full(),
    vm(
        "BARs with struct pages: verbs: ours, revocable, behind a translating IOMMU",
        P2PDMA,
    )
    .with(&[STRUCT_PAGES, REVOCABLE, STRICT])
    .only_in_full(),
    vm("forced bounce buffers: ours", BOUNCED).with(&[BOUNCE_BUFFERS]),
    vm("forced bounce buffers: ours, revocable", BOUNCED).with(&[BOUNCE_BUFFERS, REVOCABLE]),
    vm(
        "a GPU that is taken from its driver: ours",
        "{gdr} test machine.gpu_taken_while_registered",
    ),
    vm("verbs: NVIDIA's, persistent client", GDR)
        .with(&[LARGE_BAR, NVIDIA, NO_INVALIDATION])
        .column("NVIDIA {version}"),
    vm("verbs: NVIDIA's, callback client", GDR)
        .with(&[LARGE_BAR, NVIDIA])
        .column("NVIDIA {version}, revocable"),
    vm(
        "verbs: NVIDIA's, persistent client, on the stand-in's p2p.c",
        GDR,
    )
    .with(&[LARGE_BAR, NVIDIA, NO_INVALIDATION, STAND_IN])
    .same_as(other_provider("verbs: NVIDIA's, persistent client")),
    vm(
        "verbs: NVIDIA's, callback client, on the stand-in's p2p.c",
        GDR,
    )
    .with(&[LARGE_BAR, NVIDIA, STAND_IN])
    .same_as(other_provider("verbs: NVIDIA's, callback client")),
    vm("verbs: no peer-memory module", GDR)
        .with(&[LARGE_BAR, NO_MODULE])
        .column("none"),
    vm("verify: ours", VERIFY).shown("registration_us"),
    vm("verify: ours, revocable", VERIFY_MODE).with(&[REVOCABLE]),
    vm("verbs: ours, behind a translating IOMMU", MAPPING).with(&[LARGE_BAR, STRICT]),
    vm(
        "verbs: ours, mapped by nvidia.ko, behind a translating IOMMU",
        MAPPING,
    )
    .with(&[LARGE_BAR, STRICT, Param("provider_maps=1")])
    // `dma.provider_maps`, the hazards and the sweep of calls have this mapping, too.
    .only_in_full(),
    vm("verbs: ours, IOMMU passing through", MAPPING)
        .with(&[LARGE_BAR, Iommu(machine::Iommu::Pt)])
        .only_in_full(),
    vm(
        "verbs: ours, a DMA device that takes 64 KiB an entry",
        ENTRIES,
    )
    .with(&[LARGE_BAR, Rxe("peer_max_seg=0")]),
    vm("verbs: ours, page tables of the older layout", ENTRIES)
        // NVIDIA's own code has only one layout.
        .with(&[LARGE_BAR, STAND_IN, Gpu("table_version=0x00010002")]),
    vm(
        "identity: ours beside NVIDIA's, memory_peers of ib_core's",
        IDENTITY,
    )
    .with(&[MemoryPeers, WithControl])
    .shown("nccl"),
    vm(
        "identity: ours, revocable, memory_peers of ib_core's",
        IDENTITY_MODE,
    )
    .with(&[MemoryPeers, WithControl, REVOCABLE]),
    vm("identity: NVIDIA's, memory_peers of ib_core's", IDENTITY).with(&[NVIDIA, MemoryPeers]),
    vm("loading: beside neighbours of all kinds", LOADING).with(&[NEIGHBOURS, WithControl]),
    vm(
        "loading: beside neighbours of all kinds, memory_peers of ib_core's",
        LOADING,
    )
    // sysfs reports a duplicate name before ib_core does.
    .with(&[
        NEIGHBOURS,
        WithControl,
        MemoryPeers,
        Expect("sysfs: cannot create duplicate filename=1"),
    ])
    // The identity runs test the owner of memory_peers. The neighbours are those of the previous
    // run.
    .only_in_full(),
    vm("loading: beside an ib_core without peer memory", LOADING).with(&[NEIGHBOURS, STOCK_RDMA]),
    vm("loading: a kernel that takes signed modules alone", LOADING)
        .with(&[Signed])
        .on(EARLIER),
    vm("peermemctl: root ports", "{gdr} ctl --promtool {promtool}")
        .with(&[Topology(topology::Topology::RootPorts), LEAST_BAR])
        .on(EARLIER),
    vm("peermemctl: a switch, IOMMU translating", CTL)
        .with(&[Topology(topology::Topology::Switch), LEAST_BAR, STRICT])
        .on(EARLIER),
    vm("peermemctl: two switches", CTL)
        .with(&[Topology(topology::Topology::Switches), LEAST_BAR, REVOCABLE])
        .on(EARLIER),
    vm("peermemctl: two sockets, small BARs", CTL)
        .with(&[Topology(topology::Topology::Sockets), SMALL_BAR])
        .on(EARLIER),
    vm("peermemctl: NVIDIA's module", CTL).with(&[LEAST_BAR, NVIDIA]),
    vm("peermemctl: no module, and no extended config space", CTL).with(&[LEAST_BAR, NO_MODULE]),
    vm(
        "debug kernel: identity: ours, revocable, memory_peers of ib_core's",
        IDENTITY,
    )
    .with(&[Kernel(DEBUG), MemoryPeers, REVOCABLE])
    // The debug kernel's smoke runs have these cases with the module's own memory_peers. The
    // default kernel has runs with either memory_peers.
    .only_in_full(),
    vm("debug kernel: KUnit", KUNIT)
        // The debug kernel has no other RDMA modules.
        .with(&[Kunit, Kernel(DEBUG), Rdma(machine::Rdma::Patched)])
        .groups(KUNIT_SUITES),
    vm("debug kernel: smoke: ours", DEBUG_SMOKE).with(&[Kernel(DEBUG), SMOKE_BAR]),
    vm("debug kernel: smoke: ours, revocable", DEBUG_SMOKE).with(&[
        Kernel(DEBUG),
        SMOKE_BAR,
        REVOCABLE,
    ]),
    vm(
        "debug kernel: smoke: ours, mapped by nvidia.ko",
        DEBUG_SMOKE,
    )
    .with(&[Kernel(DEBUG), SMOKE_BAR, Param("provider_maps=1")])
    .only_in_full(),
    vm("debug kernel: ours", GDR)
        .with(&[Kernel(DEBUG), LOCK_CLASSES, SMOKE_BAR])
        .only_in_full(),
    vm("debug kernel: ours, revocable", GDR)
        .with(&[Kernel(DEBUG), LOCK_CLASSES, SMOKE_BAR, REVOCABLE])
        .only_in_full(),
    vm("6.12-debug: smoke: ours", DEBUG_SMOKE)
        .with(&[DEBUG_6_12, SMOKE_BAR])
        .only_in_full(),
    vm("6.12-debug: smoke: ours, revocable", DEBUG_SMOKE)
        .with(&[DEBUG_6_12, SMOKE_BAR, REVOCABLE])
        .only_in_full(),
    vm("scale: ours", SCALE)
        .with(&[MEASURED])
        .shown("own_beside"),
    vm("scale: ours, revocable", SCALE)
        .with(&[MEASURED, REVOCABLE])
        .shown("own_beside"),
    vm("scale, many: ours", SCALE_MANY)
        .with(&[MEASURED_AT_LARGE])
        .shown("own_")
        .only_in_full(),
    vm("scale, many: ours, revocable", SCALE_MANY)
        .with(&[MEASURED_AT_LARGE, REVOCABLE])
        .shown("own_")
        .only_in_full(),
    vm("DMA: ours, behind a translating IOMMU", DMA)
        .with(&[Dma(machine::Iommu::Strict, [4, 9])])
        .column("ours"),
    vm("DMA: NVIDIA's, behind a translating IOMMU", DMA)
        .with(&[NVIDIA, Dma(machine::Iommu::Strict, [3, 6])])
        .column("NVIDIA {version}"),
    vm("DMA: ours, behind an IOMMU that forgets lazily", DMA)
        .with(&[Dma(machine::Iommu::On, [0, 10])])
        .shown("window"),
    vm("DMA: ours, IOMMU passing through", DMA)
        .with(&[Dma(machine::Iommu::Pt, [0, 0])])
        // DMA addresses are physical addresses, as in the run without an IOMMU.
        .only_in_full(),
    vm("DMA: ours, no IOMMU", DMA).with(&[Dma(machine::Iommu::Off, [0, 0])]),
    vm("DMA: NVIDIA's, no IOMMU", DMA)
        .with(&[NVIDIA, Dma(machine::Iommu::Off, [0, 0])])
        .only_in_full(),
    vm("stress: two thousand operations in each mode", STRESS),
    vm(
        "debug kernel: stress: two thousand operations in each mode",
        STRESS,
    )
    .with(&[Kernel(DEBUG), LOCK_CLASSES])
    .only_in_full(),
    vm(
        "6.12-debug: stress: two thousand operations in each mode",
        STRESS,
    )
    .with(&[DEBUG_6_12, LOCK_CLASSES])
    .only_in_full(),
    vm("stress: the portable build", STRESS)
        .with(&[PORTABLE])
        .only_in_full(),
    vm(
        "sweep: calls of the provider's, the portable build",
        "{gdr} test sweep.calls",
    )
    .with(&[PORTABLE])
    .only_in_full(),
    vm("sweep: calls of the provider's", "{gdr} test sweep.calls"),
    run("hazards", Place::Hazards(None)),
    run(
        "hazards: ours, the portable build",
        Place::Hazards(Some(machine::Build::Portable)),
    )
    .only_in_full(),
    vm(
        "sweep: allocations of the kernel's",
        "{gdr} test sweep.allocations",
    )
    .with(&[Kernel(DEBUG), LOCK_CLASSES, Faults])
    .only_in_full(),
    vm("perftest: ours", PERFTEST).column("ours"),
    vm("perftest: NVIDIA's", PERFTEST)
        .with(&[NVIDIA])
        .column("NVIDIA {version}"),
    vm("perftest: no peer-memory module", PERFTEST)
        .with(&[NO_MODULE])
        .column("none"),
    vm("CUDA: ours, one pair and verify", CUDA_PART),
    vm("CUDA: ours", CUDA).column("ours").only_in_full(),
    vm("CUDA: ours, revocable", CUDA)
        .with(&[REVOCABLE])
        .column("ours, revocable")
        .only_in_full(),
    vm("CUDA: NVIDIA's", CUDA)
        .with(&[NVIDIA])
        .column("NVIDIA {version}")
        .only_in_full(),
    vm("CUDA: no peer-memory module", CUDA)
        .with(&[NO_MODULE])
        .column("none"),
    vm("NIXL: ours", NIXL)
        .column("ours")
        // This run downloads 69 MB.
        .only_in_full(),
    vm("NIXL: ours, revocable", NIXL)
        .with(&[REVOCABLE])
        .column("ours, revocable")
        // This run downloads 69 MB.
        .only_in_full(),
    vm("NIXL: NVIDIA's", NIXL)
        .with(&[NVIDIA])
        .column("NVIDIA {version}")
        // This run downloads 69 MB.
        .only_in_full(),
    vm("NIXL: no peer-memory module", NIXL)
        .with(&[NO_MODULE])
        .column("none")
        // This run downloads 69 MB.
        .only_in_full(),
    vm("UCX: ours", UCX)
        .column("ours")
        // This run downloads 122 MB.
        .only_in_full(),
    vm("UCX: ours, revocable", UCX)
        .with(&[REVOCABLE])
        .column("ours, revocable")
        .only_in_full(),
    vm("UCX: NVIDIA's", UCX)
        .with(&[NVIDIA])
        .column("NVIDIA {version}")
        .only_in_full(),
    vm("UCX: no peer-memory module", UCX)
        .with(&[NO_MODULE])
        .column("none")
        .only_in_full(),
    vm("two hosts: ours", PAIR)
        .with(&[TWO_HOSTS])
        .column("ours")
        // This run downloads 198 MB: NIXL, UCX and Open MPI.
        .only_in_full(),
    vm("two hosts: ours, revocable", PAIR)
        .with(&[TWO_HOSTS, REVOCABLE])
        .column("ours, revocable")
        .only_in_full(),
    vm("two hosts: NVIDIA's", PAIR)
        .with(&[TWO_HOSTS, NVIDIA])
        .column("NVIDIA {version}")
        .only_in_full(),
    vm("two hosts: no peer-memory module", PAIR)
        .with(&[TWO_HOSTS, NO_MODULE])
        .column("none")
        .only_in_full(),
    vm("two hosts: ours, one switched off in traffic", PAIR_LOST).with(&[TWO_HOSTS, Host2IsLost]),
    vm("pyverbs: stock rxe", PYVERBS)
        .with(&[NO_MODULE, STOCK_RDMA, Gpus(0)])
        .format(Format::Unittest),
    vm("pyverbs: patched rxe", PYVERBS)
        // These tests use CPU memory, so they call no peer-memory module.
        .with(&[NO_MODULE, Gpus(1)])
        .format(Format::Unittest)
        .same_as(same("pyverbs: stock rxe")),
    // The runs of the library that registers by dma-buf need one more kernel, so that they are not
    // in `make test`.
    vm(
        "dma-buf: the driver, rxe, and the library's answers",
        DMA_BUF,
    )
    .with(&[NO_MODULE])
    .on(DMABUF)
    .only_in_full(),
    vm("dma-buf: verbs by the library", PRELOADED)
        .with(&[PRELOAD, SMOKE_BAR])
        .on(DMABUF)
        .only_in_full(),
    vm("dma-buf: perftest by the library", PERFTEST)
        .with(&[PRELOAD])
        .on(DMABUF)
        .only_in_full(),
    vm("dma-buf: perftest without the library", PERFTEST)
        .with(&[NO_MODULE])
        .on(DMABUF)
        .only_in_full(),
    vm("dma-buf: CUDA by the library", CUDA)
        .with(&[PRELOAD])
        .on(DMABUF)
        .only_in_full(),
    vm("dma-buf: NIXL by the library", NIXL)
        .with(&[PRELOAD])
        .on(DMABUF)
        .only_in_full(),
    vm("dma-buf: UCX by the library", UCX)
        .with(&[PRELOAD])
        .on(DMABUF)
        .only_in_full(),
    vm("dma-buf: pyverbs beside the library", PYVERBS)
        .with(&[PRELOAD, Gpus(1)])
        .on(DMABUF)
        .format(Format::Unittest)
        .same_as(same("pyverbs: stock rxe"))
        .only_in_full(),
];
