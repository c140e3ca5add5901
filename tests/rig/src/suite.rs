// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! The suite: every run of `make test`, in order.

use crate::results::Format;
use crate::vm::Iommu;
use crate::vm::Options;
use crate::vm::Peermem;
use crate::vm::Rdma;

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
    pub(crate) same_as: Option<&'static str>,
    /// Left out of `make test`: `make test-all` has it.
    pub(crate) only_in_full: bool,
}

#[derive(Clone, Copy)]
pub(crate) enum Place {
    /// In a virtual machine. `{gdr}` stands for the verbs program, `{repo}` for the repository, `{pyverbs}` for the
    /// Python tests of rdma-core, `{filter}` for what the caller chose.
    Vm {
        options: fn(&mut Options),
        command: &'static [&'static str],
    },
    /// `cargo` on the host, with these arguments.
    Cargo(&'static [&'static str]),
    /// The checks of the code's form, where they are asked for.
    Lint,
}

const BASE: Run = Run {
    name: "",
    place: Place::Cargo(&[]),
    format: Format::Ktap,
    column: None,
    known: &[],
    same_as: None,
    only_in_full: false,
};

/// Enough for the largest regions that the cases register.
const LARGE_BAR: u64 = 128 * 1024;

const GDR: &[&str] = &["{gdr}", "test", "{filter}"];
/// KUnit indents the tests of a suite.
const KUNIT: &[&str] = &[
    "sh",
    "-c",
    "modprobe nvidia-peermem-kunit && \
     sed -n 's/^    //p' /sys/kernel/debug/kunit/peermem/results && \
     modprobe -r nvidia-peermem-kunit",
];
const PERFTEST: &[&str] = &["{repo}/tests/vm/perftest"];
const PYVERBS: &[&str] = &["{repo}/tests/vm/pyverbs", "{pyverbs}"];

pub(crate) const SUITE: &[Run] = &[
    Run {
        name: "lint",
        place: Place::Lint,
        ..BASE
    },
    Run {
        name: "the module's logic, on the host",
        place: Place::Cargo(&["test", "-p", "peermem-host"]),
        format: Format::Cargo,
        ..BASE
    },
    Run {
        name: "the rig's own tests",
        place: Place::Cargo(&["test", "--release", "-p", "rig", "-p", "gdr"]),
        format: Format::Cargo,
        ..BASE
    },
    Run {
        name: "KUnit",
        place: Place::Vm {
            options: |vm| {
                vm.gpus = 1;
                vm.append.push("kunit.enable=1 kunit.autorun=1".to_owned());
            },
            command: KUNIT,
        },
        ..BASE
    },
    Run {
        name: "verbs: ours",
        place: Place::Vm {
            options: |vm| vm.bar = LARGE_BAR,
            command: GDR,
        },
        column: Some("ours"),
        ..BASE
    },
    Run {
        name: "verbs: ours, revocable",
        place: Place::Vm {
            options: |vm| {
                vm.bar = LARGE_BAR;
                vm.param.push("persistent_api_support=0".to_owned());
            },
            command: GDR,
        },
        column: Some("ours, revocable"),
        ..BASE
    },
    Run {
        name: "verbs: NVIDIA's, persistent client",
        place: Place::Vm {
            options: |vm| {
                vm.bar = LARGE_BAR;
                vm.peermem = Peermem::Nvidia;
                vm.rxe_param.push("peer_inval=0".to_owned());
            },
            command: GDR,
        },
        column: Some("NVIDIA {version}"),
        ..BASE
    },
    Run {
        name: "verbs: NVIDIA's, callback client",
        place: Place::Vm {
            options: |vm| {
                vm.bar = LARGE_BAR;
                vm.peermem = Peermem::Nvidia;
            },
            command: GDR,
        },
        column: Some("NVIDIA {version}, revocable"),
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
        name: "verbs: ours, behind a translating IOMMU",
        place: Place::Vm {
            options: |vm| {
                vm.bar = LARGE_BAR;
                vm.iommu = Iommu::Strict;
            },
            command: GDR,
        },
        ..BASE
    },
    Run {
        name: "verbs: ours, IOMMU passing through",
        place: Place::Vm {
            options: |vm| {
                vm.bar = LARGE_BAR;
                vm.iommu = Iommu::Pt;
            },
            command: GDR,
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
            command: GDR,
        },
        ..BASE
    },
    Run {
        name: "verbs: ours, page tables of the older layout",
        place: Place::Vm {
            options: |vm| {
                vm.bar = LARGE_BAR;
                vm.gpu_param.push("table_version=0x00010002".to_owned());
            },
            command: GDR,
        },
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
            options: |vm| vm.gpus = 1,
            command: PYVERBS,
        },
        format: Format::Unittest,
        same_as: Some("pyverbs: stock rxe"),
        ..BASE
    },
];
