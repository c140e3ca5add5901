// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! What `gdr bench` can measure, and the lines of JSON that it says: the test runner asks for the one, and reads the other.
//!
//! Cycles and nanoseconds are instructions in a machine that counts those (`-icount shift=0`).

use std::collections::BTreeMap;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// What can be measured by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum Part {
    /// What a registration costs, by length and layout
    Registrations,
    /// From a free to the last of many regions dead
    Revocation,
    /// What a registration costs beside many that are alive
    Alive,
    /// Threads and processes that register at once
    Threads,
    /// Small buffers, each registered for one transfer
    Small,
    /// Thousands of registrations of eight processes
    Startup,
    /// perftest over GPU and host memory
    Datapath,
}

/// A line of the output.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Line {
    Calibration(Calibration),
    Registration(Registration),
    Memory(Memory),
    Table(Table),
    Revocation(Revocation),
    Alive(Alive),
    Prices(Prices),
    Crowd(Crowd),
    Small(Small),
    Startup(Startup),
    Datapath(Datapath),
}

/// What measuring itself adds, in cycles, which is taken off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Calibration {
    /// To a function of the module's.
    pub function: i64,
    /// To the module's part, by a call of the provider's.
    pub provider_call: i64,
}

/// What calls of one of the module's functions cost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cost {
    pub calls: u64,
    /// The module's part in cycles, and what it calls of the kernel, without the provider and without what measuring adds.
    pub own: i64,
    /// The stand-in's part, in cycles.
    pub provider: u64,
    /// Calls of the provider's.
    pub pins: u64,
    pub unpins: u64,
    pub maps: u64,
    pub unmaps: u64,
}

/// By function.
pub type Costs = BTreeMap<String, Cost>;

/// Which registrations: by what order of memory, and how long.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct What {
    pub layout: String,
    pub bytes: u64,
}

/// One registration's life.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Registration {
    #[serde(flatten)]
    pub what: What,
    pub register: Costs,
    pub deregister: Costs,
    /// Provider calls that succeeded.
    pub pins: u64,
    pub unpins: u64,
    pub maps: u64,
    pub unmaps: u64,
    /// Scatter-list entries that the RDMA device was given.
    pub entries: u64,
    /// As the application sees it.
    pub reg_mr_ns: u64,
    pub dereg_mr_ns: u64,
}

/// Kernel memory of the module's own, in bytes.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Memory {
    #[serde(flatten)]
    pub what: What,
    /// While it is registered.
    pub held: u64,
    /// The most that there was at once.
    pub peak: u64,
}

/// What the HCA gets of a registration's scatter list.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Table {
    #[serde(flatten)]
    pub what: What,
    #[serde(flatten)]
    pub hca: Hca,
}

/// Entries of a scatter list, and the HCA's pages for it, by both forms of `ib_umem_find_best_pgsz`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hca {
    pub entries: u64,
    /// Bytes of each, and how many.
    pub old_page: u64,
    pub old_pages: u64,
    pub new_page: u64,
    pub new_pages: u64,
}

/// Regions on one allocation that is freed.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Revocation {
    pub regions: u64,
    /// From the call that frees to its return, by when the last region is dead, on the machine's clock.
    pub free_ns: u64,
}

/// A registration of one page beside others that are alive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Alive {
    pub regions: u64,
    /// The module's part of the registration and of the deregistration, in cycles: the least of several.
    pub register: i64,
    pub deregister: i64,
    /// As the application sees them, the provider and the RDMA device included: the least of several.
    pub reg_mr_ns: u64,
    pub dereg_mr_ns: u64,
    /// Kernel memory of the module's own for all regions together: bytes, and allocations.
    pub held: u64,
    pub objects: u64,
}

/// What the stand-in takes for pins and unpins where wall time is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Prices {
    pub pin_us: u64,
    pub unpin_us: u64,
}

/// What works at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Workers {
    /// Each with a device that it has opened.
    Processes,
    /// All with one device.
    Threads,
}

impl Workers {
    pub const ALL: [Self; 2] = [Self::Processes, Self::Threads];

    pub fn name(self) -> &'static str {
        match self {
            Self::Processes => "processes",
            Self::Threads => "threads",
        }
    }
}

/// What all of them got done.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Rate {
    pub lives: u64,
    pub elapsed_ns: u64,
}

impl Rate {
    pub fn a_second(&self) -> f64 {
        self.lives as f64 * 1e9 / self.elapsed_ns as f64
    }
}

/// Many that register at once.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Crowd {
    pub workers: Workers,
    pub number: u64,
    /// Registrations that began and ended.
    pub reached: Rate,
    /// As many workers that call the provider and nothing else.
    pub allowed: Rate,
}

/// Small buffers, one after the other.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Small {
    pub bytes: u64,
    pub loops: u64,
    /// Register, WRITE, deregister.
    pub elapsed_ns: u64,
    /// As many WRITEs of memory that stays registered.
    pub transfers_ns: u64,
}

/// One start of a job, and its end.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Startup {
    pub processes: u64,
    /// Of all processes together, all of them alive at once.
    pub regions: u64,
    pub register_ns: u64,
    pub deregister_ns: u64,
}

/// One run of one of perftest's programs.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Datapath {
    pub program: String,
    /// Of both ends: `gpu` or `host`.
    pub memory: String,
    /// Bandwidth in MB/s, or a latency in µs, by what the program measures.
    pub figure: f64,
}
