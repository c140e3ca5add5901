// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! `gdr`: the test program in the guest, for two RDMA devices, the stand-in GPU and a peermem
//! module.

mod arena;
mod bench;
mod cases;
mod child;
mod counters;
mod demo;
mod dma;
mod faults;
mod hold;
mod knobs;
mod ktap;
mod lab;
mod module;
mod module_files;
mod nvme;
mod pci;
mod peer;
mod stress;
mod sys;

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{ensure, Result};
use clap::{Parser, Subcommand};
use peermem_verbs::{pattern, rdma, standin as gpu};

use lab::{Peermem, Setup};

#[derive(Debug, Parser)]
#[command(version, about)]
struct Arguments {
    /// The peermem module under test
    #[arg(
        long,
        env = "PEERMEM",
        value_enum,
        default_value = "ours",
        global = true
    )]
    peermem: Peermem,
    /// Seed of all random choices and bytes
    #[arg(
        long,
        env = "GDR_SEED",
        default_value_t = 0x7065_6572_6d65_6d00,
        global = true
    )]
    seed: u64,
    /// RDMA device of the near side
    #[arg(long, default_value = "rxe0", global = true)]
    near: String,
    /// RDMA device of the far side
    #[arg(long, default_value = "rxe1", global = true)]
    far: String,
    #[command(subcommand)]
    command: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Show a registration, a write, a read and a free, step by step
    Demo,
    /// Run the cases whose names contain a FILTER, and print the results in KTAP
    Test {
        filter: Vec<String>,
        /// Only print the names of the cases
        #[arg(long)]
        list: bool,
    },
    /// Measure the module's cost in the VM: instructions, kernel memory, and concurrent
    /// registrations
    Bench(bench::Options),
    /// Run epochs of a stress run, and print the results in KTAP
    Stress(stress::Options),
    /// Run the hazards whose names begin with one of NAMES, and print the results in KTAP; can
    /// crash the VM
    Hazards { names: Vec<String> },
    /// Test peermemctl on a machine of known topology, and print the results in KTAP
    Ctl {
        /// Path of Prometheus's checker
        #[arg(long)]
        promtool: Option<std::path::PathBuf>,
    },
    /// Run the CUDA consumers whose names begin with a FILTER, over a stand-in for CUDA's library,
    /// and print the results in KTAP
    Cuda {
        #[command(flatten)]
        places: cases::cuda::Places,
        filter: Vec<String>,
    },
    /// Run the dma-buf cases whose names begin with a FILTER, and print the results in KTAP
    Dmabuf {
        #[command(flatten)]
        places: cases::dmabuf::Places,
        filter: Vec<String>,
    },
    /// Register memory TIMES times, and print `ok` or the number of the first error
    #[command(hide = true)]
    Register {
        kind: cases::dmabuf::Kind,
        times: u32,
    },
    /// Run the two-host cases whose names begin with a FILTER, on both hosts at the same time, and
    /// print the results in KTAP
    Pair(cases::pair::Options),
    /// Test loading of the module where it cannot work, or where only signed modules load, and
    /// print the results in KTAP
    Loading,
    #[command(hide = true)]
    Child {
        #[command(subcommand)]
        role: child::Role,
    },
}

/// Time limit of a completion, long enough for 64 MiB on a shared, emulated processor.
const COMPLETION: Duration = Duration::from_secs(120);

fn main() -> ExitCode {
    rdma::wait_for_completions(COMPLETION * sys::slower());
    rdma::wait_for_emulated_answers();
    match run(&Arguments::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("gdr: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<bool> {
    let setup = Setup {
        peermem: arguments.peermem,
        seed: arguments.seed,
        translating_iommu: lab::translating_iommu(),
        devices: [arguments.near.clone(), arguments.far.clone()],
    };
    match &arguments.command {
        Verb::Demo => demo::run(&setup).map(|()| true),
        Verb::Test { filter, list } => {
            let chosen = |name: &str| filter.iter().any(|filter| name.contains(filter.as_str()));
            let cases: Vec<_> = cases::all(filter)
                .into_iter()
                .filter(|case| filter.is_empty() || chosen(case.name))
                .collect();
            // A filter that matches nothing would otherwise go unnoticed.
            for filter in filter {
                ensure!(
                    cases.iter().any(|case| case.name.contains(filter.as_str())),
                    "no case has {filter:?} in its name (see --list)"
                );
            }
            if *list {
                for case in cases {
                    println!("{}", case.name);
                }
                return Ok(true);
            }
            ktap::run(&cases, &setup)
        }
        Verb::Bench(options) => bench::run(options, &setup).map(|()| true),
        Verb::Stress(options) => stress::run(options, &setup),
        Verb::Hazards { names } => cases::hazards::run(names, &setup),
        Verb::Ctl { promtool } => cases::ctl::run(&setup, promtool.clone()),
        Verb::Cuda { places, filter } => cases::cuda::run(&setup, places, filter),
        Verb::Dmabuf { places, filter } => cases::dmabuf::run(&setup, places, filter),
        Verb::Register { kind, times } => {
            cases::dmabuf::register(&setup, *kind, *times).map(|()| true)
        }
        Verb::Pair(options) => cases::pair::run(&setup, options),
        Verb::Loading => cases::loading::run(&setup),
        Verb::Child { role } => child::run(role, &setup).map(|()| true),
    }
}
