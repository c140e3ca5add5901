// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! The command line. Completions and the man pages are made from it.

use std::path::PathBuf;

use clap::Args;
use clap::Parser;
use clap::Subcommand;
use clap::ValueEnum;

const EXAMPLES: &str = "\
Examples:
  peermemctl topo                             which RDMA device is nearest to each GPU
  sudo peermemctl doctor                      what is wrong, and what mends it
  sudo peermemctl doctor --pair 0,mlx5_0      one path in full
  sudo peermemctl record -o host.json         for somebody else to look at, with
  peermemctl doctor --machine host.json";

/// The command of the processes that `verify` starts.
pub(crate) const VERIFY_PART: &str = "verify-part";

/// Shows, checks and proves the path between NVIDIA GPUs and RDMA devices.
///
/// Exit status: 0 all is well, 1 something was found, 2 could not look.
#[derive(Debug, Parser)]
#[command(name = "peermemctl", version, max_term_width = 100, after_help = EXAMPLES)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) common: Common,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// What every command takes.
#[derive(Debug, Clone, Args)]
pub(crate) struct Common {
    /// Prints JSON: one object with `schema`, `version` and what docs/peermemctl.md says
    #[arg(long, global = true)]
    pub(crate) json: bool,
    /// Colours: where standard output is a terminal, always, or never; NO_COLOR is heeded
    #[arg(
        long,
        global = true,
        value_enum,
        default_value = "auto",
        value_name = "WHEN"
    )]
    pub(crate) color: Color,
    /// Answers from a recording of `peermemctl record` in place of this machine
    #[arg(long, global = true, value_name = "FILE")]
    pub(crate) machine: Option<PathBuf>,
}

/// When to colour.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Color {
    Auto,
    Always,
    Never,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Every GPU against every RDMA device: class of the path, bridges, links, the best pair
    Topo(Topo),
    /// Looks for what makes GPUDirect RDMA slow or impossible, and says what mends it
    Doctor(Doctor),
    /// The registrations of GPU memory that are alive (root)
    List(List),
    /// What the module counts: registrations, refusals by reason, BAR1 by GPU (root)
    Stats(Stats),
    /// Registers GPU memory in every way there is, moves bytes, and says what works
    Verify(Verify),
    /// Metrics for Prometheus
    Export(Export),
    /// Writes down what this machine answers, for --machine
    Record(Record),
    /// Prints completions for a shell
    Completions(Completions),
    /// Writes the man pages into a directory
    Man(Man),
    /// What `verify` starts as processes of their own
    #[command(hide = true, name = VERIFY_PART)]
    VerifyPart(VerifyPart),
}

#[derive(Debug, Args)]
pub(crate) struct Topo {
    /// The bridges of each path, and each device in full
    #[arg(long, short)]
    pub(crate) verbose: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Doctor {
    /// One pair in full: a GPU by index or PCI address, an RDMA device by name
    #[arg(long, value_name = "GPU,HCA")]
    pub(crate) pair: Option<String>,
    /// All that was looked at, what is well too
    #[arg(long, short)]
    pub(crate) all: bool,
    /// One line and an exit status as monitoring plugins have them: 0 OK, 1 WARNING, 2 CRITICAL, 3 UNKNOWN
    #[arg(long, conflicts_with = "json")]
    pub(crate) nagios: bool,
    /// Leaves these checks out
    #[arg(long, value_name = "CHECK", value_delimiter = ',')]
    pub(crate) skip: Vec<String>,
    /// Names the checks, and looks at nothing
    #[arg(long)]
    pub(crate) list_checks: bool,
}

#[derive(Debug, Args)]
pub(crate) struct List {
    /// Shows it again every so many seconds, until interrupted
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "2")]
    pub(crate) watch: Option<f64>,
    /// Of this process
    #[arg(long, value_name = "PID")]
    pub(crate) pid: Option<u32>,
    /// Of this GPU, by index or PCI address
    #[arg(long, value_name = "GPU")]
    pub(crate) gpu: Option<String>,
    /// Sums by process in place of each registration
    #[arg(long)]
    pub(crate) by_process: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Stats {
    /// Shows it again every so many seconds, with what came since, until interrupted
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "2")]
    pub(crate) watch: Option<f64>,
}

#[derive(Debug, Args)]
pub(crate) struct Verify {
    /// This GPU, by index or PCI address; all without
    #[arg(long, value_name = "GPU")]
    pub(crate) gpu: Option<String>,
    /// This RDMA device; the best of each GPU without
    #[arg(long, value_name = "HCA")]
    pub(crate) hca: Option<String>,
    /// Every GPU with every RDMA device
    #[arg(long, conflicts_with = "hca")]
    pub(crate) all_pairs: bool,
    /// Bytes of each buffer
    #[arg(long, value_name = "BYTES", default_value_t = 4 << 20)]
    pub(crate) size: u64,
    /// What needs no RDMA device
    #[arg(long)]
    pub(crate) gpu_only: bool,
    /// Seconds that a step may take before it counts as hanging
    #[arg(long, value_name = "SECONDS", default_value_t = 120)]
    pub(crate) timeout: u64,
    /// The stand-in GPU of the project's test rig, though CUDA be there
    #[arg(long, hide = true)]
    pub(crate) stand_in: bool,
}

#[derive(Debug, Args)]
pub(crate) struct VerifyPart {
    /// What it does, as JSON
    pub(crate) role: String,
}

#[derive(Debug, Args)]
pub(crate) struct Export {
    /// Writes this file, for node_exporter's textfile collector, in one piece; standard output without
    #[arg(long, value_name = "FILE", conflicts_with = "listen")]
    pub(crate) output: Option<PathBuf>,
    /// Serves /metrics there until interrupted, as in 127.0.0.1:9837
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub(crate) listen: Option<std::net::SocketAddr>,
    /// Leaves out what doctor finds, which is most of the work of a look
    #[arg(long)]
    pub(crate) no_doctor: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Record {
    /// Where to; standard output without
    #[arg(long, short, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
    /// Leaves in what tells one machine from another: serial numbers, UUIDs, host names, addresses, command lines
    #[arg(long)]
    pub(crate) keep_identity: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Completions {
    #[arg(value_enum)]
    pub(crate) shell: clap_complete::Shell,
}

#[derive(Debug, Args)]
pub(crate) struct Man {
    /// The directory, which must be there
    pub(crate) directory: PathBuf,
}
