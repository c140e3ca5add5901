// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! The VMs that run the schedules of the hazards.

use crate::vm::{Options, Peermem, Provider};

/// Kernel parameter that fills freed memory with a pattern and checks the pattern. Kernels from 6.9
/// on also take it as slab_debug.
pub(super) const POISON: &str = "slub_debug=FP,kmalloc-*";

/// A VM and the schedules that run in it, in order. A schedule that kills the VM comes last.
pub(super) struct Machine {
    /// The mode, or another difference from the other VMs of the same module.
    pub(super) name: &'static str,
    pub(super) module: Peermem,
    pub(super) options: fn(&mut Options),
    pub(super) schedules: &'static [&'static str],
    /// The last schedule takes a lock in freed memory. The contents of that memory decide if the
    /// access faults or the wait never ends. An oops therefore stops the VM, a silence of [`HANGS`]
    /// does not fail the run, and the page only reports the VM's death.
    pub(super) fatal: bool,
}

pub(super) const PERSISTENT: &str = "persistent";

pub(super) const REVOCABLE: &str = "revocable";

pub(super) const PERSISTENT_P2P: &str = "persistent, on the stand-in's p2p.c";

pub(super) const REVOCABLE_P2P: &str = "revocable, on the stand-in's p2p.c";

pub(super) const LEGACY: &str = "revocable, peerdirect_support=1";

/// All schedules that do not need a VM of their own.
pub(super) const MOST: &[&str] = &[
    "B.",
    "C.",
    "D.freed_before",
    "E.",
    "J.",
    "K.",
    "L.",
    "M.",
    "N.",
    "P.put",
    "two",
    "G.",
    "H.",
];

pub(super) const ALL: &[&str] = &[
    "A.", "B.", "C.", "D.", "E.", "G.", "H.", "I.", "J.", "K.", "L.", "M.", "N.", "O.", "P.put",
    "two",
];

/// Schedules with answers that NVIDIA's `nv-p2p.c` never gives.
pub(super) const STRANGE: &[&str] = &["P.strange"];

pub(super) const DRIVER_HOLDS_LOCK: &[&str] = &["driver_holds_lock"];

pub(super) const CORE_LOCKS_TWICE: &[&str] = &["core_locks_twice"];

pub(super) fn no_callbacks(options: &mut Options) {
    options.rxe_param.push("peer_inval=0".to_owned());
}

pub(super) fn callbacks(options: &mut Options) {
    options.param.push("persistent_api_support=0".to_owned());
}

pub(super) fn on_a_stand_in(options: &mut Options) {
    options.provider = Provider::Ours;
}

pub(super) fn core_unmaps(options: &mut Options) {
    options.param.push("peerdirect_support=1".to_owned());
}

pub(super) const MACHINES: &[Machine] = &[
    Machine {
        name: REVOCABLE,
        module: Peermem::Nvidia,
        options: |_| {},
        schedules: MOST,
        fatal: false,
    },
    Machine {
        name: REVOCABLE,
        module: Peermem::Nvidia,
        options: |_| {},
        schedules: &["D.freed_during"],
        fatal: true,
    },
    Machine {
        name: REVOCABLE_P2P,
        module: Peermem::Nvidia,
        options: on_a_stand_in,
        schedules: STRANGE,
        fatal: false,
    },
    Machine {
        name: REVOCABLE,
        module: Peermem::Nvidia,
        options: |_| {},
        schedules: &["A."],
        fatal: false,
    },
    Machine {
        name: REVOCABLE,
        module: Peermem::Nvidia,
        options: |_| {},
        schedules: &["O.", "I."],
        fatal: false,
    },
    Machine {
        name: REVOCABLE,
        module: Peermem::Nvidia,
        options: |_| {},
        schedules: DRIVER_HOLDS_LOCK,
        fatal: false,
    },
    Machine {
        name: REVOCABLE,
        module: Peermem::Nvidia,
        options: |_| {},
        schedules: CORE_LOCKS_TWICE,
        fatal: false,
    },
    Machine {
        name: LEGACY,
        module: Peermem::Nvidia,
        options: core_unmaps,
        schedules: &["F."],
        fatal: false,
    },
    Machine {
        name: PERSISTENT,
        module: Peermem::Nvidia,
        options: no_callbacks,
        schedules: &[
            "A.", "J.", "K.", "L.", "M.", "N.", "P.put", "two", "G.", "H.",
        ],
        fatal: false,
    },
    Machine {
        name: PERSISTENT_P2P,
        module: Peermem::Nvidia,
        options: |options| {
            no_callbacks(options);
            on_a_stand_in(options);
        },
        schedules: STRANGE,
        fatal: false,
    },
    Machine {
        name: PERSISTENT,
        module: Peermem::Ours,
        options: |_| {},
        schedules: ALL,
        fatal: false,
    },
    Machine {
        name: PERSISTENT_P2P,
        module: Peermem::Ours,
        options: on_a_stand_in,
        schedules: STRANGE,
        fatal: false,
    },
    Machine {
        name: REVOCABLE,
        module: Peermem::Ours,
        options: callbacks,
        schedules: ALL,
        fatal: false,
    },
    Machine {
        name: REVOCABLE,
        module: Peermem::Ours,
        options: callbacks,
        schedules: DRIVER_HOLDS_LOCK,
        fatal: false,
    },
    Machine {
        name: REVOCABLE,
        module: Peermem::Ours,
        options: callbacks,
        schedules: CORE_LOCKS_TWICE,
        fatal: false,
    },
    Machine {
        name: REVOCABLE_P2P,
        module: Peermem::Ours,
        options: |options| {
            callbacks(options);
            on_a_stand_in(options);
        },
        schedules: STRANGE,
        fatal: false,
    },
    Machine {
        name: LEGACY,
        module: Peermem::Ours,
        options: |options| {
            callbacks(options);
            core_unmaps(options);
        },
        schedules: &["F."],
        fatal: false,
    },
];
