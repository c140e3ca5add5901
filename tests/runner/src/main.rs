// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! `runner`: the test runner. The runner makes everything that the tests need, boots VMs, and runs
//! the tests in them.

mod apt;
mod arch;
mod bench;
mod cases;
mod command;
mod consumers;
mod contact;
mod cost;
mod debian;
mod detectors;
mod documents;
mod foreign;
mod git;
mod guest;
mod hazards;
mod history;
mod index;
mod kept;
mod kernel;
mod klog;
mod lint;
mod lock;
mod modules;
mod mutants;
mod packages;
mod patch;
mod paths;
mod preflight;
mod programs;
mod progress;
mod quick;
mod results;
mod setup;
mod stamp;
mod stress;
mod suite;
mod terminal;
mod test;
mod toolchain;
mod topology;
mod vm;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

use crate::arch::Arch;
use crate::paths::Paths;
use crate::vm::Channels;

#[derive(Parser)]
#[command(about, version)]
struct Arguments {
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand)]
enum Action {
    /// Builds everything that the tests need: packages, kernel, modules, programs
    Setup {
        /// Architecture of the VMs
        #[arg(long, value_enum, default_value = "x86-64")]
        arch: Arch,
    },
    /// Builds a kernel and prints the path of its build tree
    Kernel {
        #[arg(default_value = kernel::DEFAULT)]
        flavour: String,
    },
    /// Builds the modules and prints their paths
    Modules {
        #[arg(long, default_value = kernel::DEFAULT)]
        kernel: String,
    },
    /// Boots a virtual machine and runs a command in it, or a shell
    Vm {
        #[command(flatten)]
        options: Box<vm::Options>,
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        command: Vec<String>,
    },
    /// Runs the tests; the last line is "N passed, M failed"
    Test(test::Selection),
    /// Runs the fast checks for editing: host tests, a build of the module, lint of changed files
    Quick,
    /// Runs random operations in many processes; the last line is "stress: N operations, all well"
    Stress(stress::Selection),
    /// Removes each rule of the module in turn, and checks that a test notices
    Mutants(mutants::Selection),
    /// Shows what the module does; the last line is "demo: ok"
    Demo {
        /// Architecture of the VM; it chooses the kernel if --kernel is not given
        #[arg(long, value_enum, default_value = "x86-64")]
        arch: Arch,
        /// A kernel of the test VM by name
        #[arg(
            long,
            value_name = "FLAVOUR",
            default_value = kernel::DEFAULT,
            default_value_if("arch", "arm64", kernel::ARM64),
            default_value_if("peermem", "preload", kernel::DMABUF)
        )]
        kernel: String,
        /// Peer-memory module to load, or preload for the library of preload/
        #[arg(long, value_enum, default_value = "ours")]
        peermem: vm::Peermem,
    },
    /// Runs the schedules of all known hazards and writes docs/hazards.md
    Hazards,
    /// Measures this module and NVIDIA's, and writes docs/performance.md; exits with 1 if a goal is missed or a check
    /// of the counts fails
    Bench(bench::Selection),
    /// Counts a registration's instructions; exits with 1 if tests/cost/figures differs
    Cost(cost::Selection),
    /// Builds the Debian package of the module's source in build/deb
    Deb,
    /// Runs the linters
    Lint,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match act(arguments.action) {
        Ok(code) => ExitCode::from(u8::try_from(code).unwrap_or(1)),
        Err(error) => {
            eprintln!("runner: {error:#}");
            ExitCode::from(125)
        }
    }
}

fn act(action: Action) -> Result<i32> {
    let paths = Paths::find()?;
    let (kernels, modules, programs) = match &action {
        Action::Setup { arch } => (kernel::of(*arch).collect(), true, true),
        Action::Kernel { flavour: name } => (vec![name.as_str()], false, false),
        Action::Modules { kernel: name } => (vec![name.as_str()], true, false),
        Action::Vm { options, .. } => (vec![options.kernel.as_str()], true, true),
        Action::Demo { kernel, .. } => (vec![kernel.as_str()], true, true),
        Action::Deb => (Vec::new(), false, false),
        _ => (vec![kernel::DEFAULT], true, true),
    };
    let machines = match &action {
        Action::Vm { options, .. } => 1 + usize::from(options.pair),
        _ => 1,
    };
    // The suite checks its needs itself, once it knows its runs.
    if !matches!(action, Action::Test(_)) {
        let wanted = preflight::Wanted {
            kernels: &kernels,
            modules,
            programs,
            machines,
        };
        preflight::check(&paths, &wanted)?;
    }
    let paths = &paths;
    match action {
        Action::Setup { arch } => setup::all(paths, kernel::of(arch)),
        Action::Kernel { flavour } => setup::kernel(paths, &flavour),
        Action::Modules { kernel } => setup::modules(paths, &kernel),
        Action::Vm { options, command } => run_vm(paths, &options, &command),
        Action::Test(selection) => test::suite(paths, &selection),
        Action::Quick => quick::run(paths),
        Action::Stress(selection) => stress::run(paths, &selection),
        Action::Mutants(selection) => mutants::run(paths, &selection),
        Action::Demo {
            kernel, peermem, ..
        } => test::demo(paths, kernel, peermem),
        Action::Hazards => hazards::write(paths),
        Action::Bench(selection) => bench::run(paths, &selection),
        Action::Cost(selection) => bench::count(paths, &selection),
        Action::Deb => setup::deb(paths),
        Action::Lint => test::lint(paths),
    }
}

fn run_vm(paths: &Paths, options: &vm::Options, command: &[String]) -> Result<i32> {
    let mut options = options.clone();
    if let Some(name) = &options.mutant {
        options.patches = mutants::find(paths, name)?.patches;
    }
    let options = &options;
    let boot = setup::boot(paths, options)?;
    setup::programs(paths, boot.arch)?;
    let outcome = vm::run(paths, options, &boot, command, Channels::Caller)?;
    for failure in &outcome.failures {
        eprintln!("runner: {}", failure.trim_end());
    }
    let code = outcome.exit_code();
    if code != 0 || !outcome.failures.is_empty() {
        eprintln!("runner: kernel log: {}", outcome.log.display());
    }
    Ok(code)
}
