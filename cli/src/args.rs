// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Definition of the command line. Completions and man pages are generated from this definition.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs as _};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use clap::{Args, Parser, Subcommand, ValueEnum};

const EXAMPLES: &str = "\
Examples:
  peermemctl topo                             shows which RDMA device is nearest to each GPU
  sudo peermemctl doctor                      says what is wrong, and how to fix it
  sudo peermemctl doctor --pair 0,mlx5_0      shows all details of one path
  sudo peermemctl record -o host.json         records the state of this machine in a file
  peermemctl doctor --machine host.json       examines the recorded machine, on any machine";

/// Text below the options of `verify`.
const TWO_ALLOCATIONS: &str =
    "Two steps use memory that spans two allocations, as in PyTorch's expandable segments.";

/// Name of the hidden command that `verify` runs in its child processes.
pub(crate) const VERIFY_PART: &str = "verify-part";

/// Shows, checks and proves the path between NVIDIA GPUs and RDMA devices.
///
/// Exit status: 0 all is well, 1 something is wrong, 2 the command failed.
#[derive(Debug, Parser)]
#[command(name = "peermemctl", version, max_term_width = 100, after_help = EXAMPLES)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) common: Common,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// Options of every command.
#[derive(Debug, Clone, Args)]
pub(crate) struct Common {
    /// Prints one JSON object; docs/peermemctl.md lists its keys
    #[arg(long, global = true)]
    pub(crate) json: bool,
    /// When to print colours; `auto` means on a terminal, unless NO_COLOR is set
    #[arg(
        long,
        global = true,
        value_enum,
        default_value = "auto",
        value_name = "WHEN"
    )]
    pub(crate) color: Color,
}

/// Option of each command that only reads a machine.
#[derive(Debug, Clone, Args)]
pub(crate) struct Source {
    /// Reads a recording of `peermemctl record` instead of this machine
    #[arg(long, value_name = "FILE")]
    pub(crate) machine: Option<PathBuf>,
}

/// When to print colours.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Color {
    Auto,
    Always,
    Never,
}

/// A command and its options.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Shows the path between each GPU and each RDMA device, and the best pairs
    Topo(Topo),
    /// Finds causes of slow or failing GPUDirect RDMA, and says how to fix them
    Doctor(Doctor),
    /// Lists registrations of GPU memory, and the processes that use GPUDirect RDMA (root)
    List(List),
    /// Shows the settings, libraries and NICs that decide about GPUDirect RDMA in one job
    Job(Job),
    /// Shows the module's counters: registrations, refusals by reason, BAR1 by GPU (root)
    Stats(Stats),
    /// Registers GPU memory in each possible way, moves bytes, and says what works
    #[command(after_help = TWO_ALLOCATIONS)]
    Verify(Verify),
    /// Writes or serves metrics for Prometheus
    Export(Export),
    /// Records the state of this machine, for --machine
    Record(Record),
    /// Prints completions for a shell
    Completions(Completions),
    /// Writes the man pages to a directory
    Man(Man),
    /// Runs in a child process of `verify`
    #[command(hide = true, name = VERIFY_PART)]
    VerifyPart(VerifyPart),
}

impl Command {
    /// Returns `true` if the command acts as a monitoring plugin. The exit statuses of a plugin
    /// have other meanings.
    pub(crate) fn is_plugin(&self) -> bool {
        matches!(self, Self::Doctor(args) if args.nagios)
    }

    /// Returns the recording to read in place of this machine.
    pub(crate) fn recording(&self) -> Option<&Path> {
        let source = match self {
            Self::Topo(args) => &args.source,
            Self::Doctor(args) => &args.source,
            Self::List(args) => &args.source,
            Self::Job(args) => &args.source,
            Self::Stats(args) => &args.source,
            Self::Export(args) => &args.source,
            Self::Record(args) => &args.source,
            Self::Verify(_) | Self::Completions(_) | Self::Man(_) | Self::VerifyPart(_) => {
                return None
            }
        };
        source.machine.as_deref()
    }
}

/// Parses a number of bytes, with an optional unit of a power of 1024: K, M, G, T, KiB, MiB, ….
fn size(text: &str) -> Result<u64, String> {
    let end = text
        .find(|character: char| !character.is_ascii_digit())
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let unit = unit.strip_suffix("iB").unwrap_or(unit);
    let shift = match unit {
        "" => 0,
        "k" | "K" => 10,
        "M" => 20,
        "G" => 30,
        "T" => 40,
        _ => {
            return Err("not a size: bytes, or K, M, G, T for powers of 1024, as in 4M".to_owned())
        }
    };
    let number: u64 = number.parse().map_err(|why| format!("not a size: {why}"))?;
    number
        .checked_mul(1 << shift)
        .ok_or_else(|| "too large".to_owned())
}

/// Address to listen on.
#[derive(Debug, Clone)]
pub(crate) struct Listen {
    /// The argument as given.
    pub(crate) text: String,
    /// All addresses that the argument resolves to. The server uses the first address that it can
    /// bind.
    pub(crate) addresses: Vec<SocketAddr>,
}

impl FromStr for Listen {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let addresses = match text.strip_prefix(':').map(str::parse::<u16>) {
            // The IPv6 socket also accepts IPv4 connections.
            Some(Ok(port)) => vec![
                (Ipv6Addr::UNSPECIFIED, port).into(),
                (Ipv4Addr::UNSPECIFIED, port).into(),
            ],
            Some(Err(why)) => return Err(why.to_string()),
            None => text
                .to_socket_addrs()
                .map_err(|why| why.to_string())?
                .collect(),
        };
        Ok(Self {
            text: text.to_owned(),
            addresses,
        })
    }
}

#[derive(Debug, Args)]
pub(crate) struct Topo {
    #[command(flatten)]
    pub(crate) source: Source,
    /// Also shows the bridges of each path, and all details of each device
    #[arg(long, short)]
    pub(crate) verbose: bool,
    /// Shows differences from this recording of `peermemctl record`; exits with 1 if there are any
    #[arg(long, value_name = "RECORDING", conflicts_with = "verbose")]
    pub(crate) diff: Option<PathBuf>,
}

/// Files that `doctor` compares a machine with.
#[derive(Debug, Clone, Args)]
pub(crate) struct Expectation {
    /// Compares devices, ports, links and versions with this recording of the healthy machine
    #[arg(long, value_name = "FILE")]
    pub(crate) baseline: Option<PathBuf>,
    /// Compares links, rates, versions and numbers of devices with this file; --write-expect prints
    /// such a file
    #[arg(long, value_name = "FILE")]
    pub(crate) expect: Option<PathBuf>,
}

/// Lowest level of a finding that makes the exit status 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum FailOn {
    Fault,
    Warning,
}

#[derive(Debug, Args)]
pub(crate) struct Doctor {
    #[command(flatten)]
    pub(crate) source: Source,
    /// Shows all details of one pair: a GPU by index or PCI address, an RDMA device by name
    #[arg(long, value_name = "GPU,HCA", conflicts_with_all = ["baseline", "expect"])]
    pub(crate) pair: Option<String>,
    #[command(flatten)]
    pub(crate) expectation: Expectation,
    /// Prints a file for --expect that describes this machine
    #[arg(long, conflicts_with_all = ["json", "nagios", "pair"])]
    pub(crate) write_expect: bool,
    /// Waits this many seconds, and reports error counters of ports, GPUs and NICs that grew meanwhile
    #[arg(
        long,
        value_name = "SECONDS",
        conflicts_with = "machine",
        value_parser = clap::value_parser!(u64).range(1..=86_400)
    )]
    pub(crate) interval: Option<u64>,
    /// Also shows notes, what is not visible, and what is ok
    #[arg(long, short)]
    pub(crate) all: bool,
    /// Acts as a monitoring plugin: one line, and status 0 OK, 1 WARNING, 2 CRITICAL or 3 UNKNOWN
    #[arg(long, conflicts_with = "json")]
    pub(crate) nagios: bool,
    /// Lowest level of a finding that makes the exit status 1
    #[arg(
        long,
        value_enum,
        default_value = "warning",
        value_name = "LEVEL",
        conflicts_with = "nagios"
    )]
    pub(crate) fail_on: FailOn,
    /// Skips these checks
    #[arg(long, value_name = "CHECK", value_delimiter = ',')]
    pub(crate) skip: Vec<String>,
    /// Runs only these checks
    #[arg(
        long,
        value_name = "CHECK",
        value_delimiter = ',',
        conflicts_with = "skip"
    )]
    pub(crate) only: Vec<String>,
    /// Lists the checks and runs none
    #[arg(long)]
    pub(crate) list_checks: bool,
}

#[derive(Debug, Args)]
pub(crate) struct List {
    #[command(flatten)]
    pub(crate) source: Source,
    /// Repeats the list at this interval, until interrupted
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "2")]
    pub(crate) watch: Option<f64>,
    /// Shows only this process
    #[arg(long, value_name = "PID")]
    pub(crate) pid: Option<u32>,
    /// Shows only registrations of this GPU, given by index or PCI address
    #[arg(long, value_name = "GPU")]
    pub(crate) gpu: Option<String>,
    /// Shows the totals of each process instead of each registration
    #[arg(long)]
    pub(crate) by_process: bool,
    /// Shows all memory regions by process, and the processes that use GPUDirect RDMA; needs no module
    #[arg(long, conflicts_with_all = ["gpu", "by_process"])]
    pub(crate) all: bool,
}

/// Options that select the processes of a job. Exactly one option must be given.
#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
pub(crate) struct Processes {
    /// A process
    #[arg(value_name = "PID")]
    pub(crate) pid: Option<u32>,
    /// All processes of a Slurm job on this host, by the job's number
    #[arg(long, value_name = "JOB")]
    pub(crate) slurm: Option<String>,
    /// All processes of a Kubernetes pod, by the pod's UID
    #[arg(long, value_name = "UID")]
    pub(crate) pod: Option<String>,
    /// All processes of a control group and of the groups below it, as in /proc/PID/cgroup
    #[arg(long, value_name = "PATH")]
    pub(crate) cgroup: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct Job {
    #[command(flatten)]
    pub(crate) source: Source,
    #[command(flatten)]
    pub(crate) processes: Processes,
    /// Also shows notes, what is not visible, all settings, and processes without these libraries
    #[arg(long, short)]
    pub(crate) all: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Stats {
    #[command(flatten)]
    pub(crate) source: Source,
    /// Repeats the counters and their growth at this interval, until interrupted
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "2")]
    pub(crate) watch: Option<f64>,
}

#[derive(Debug, Args)]
pub(crate) struct Verify {
    /// Tests the path to this host, on which `peermemctl verify --server` runs
    #[arg(value_name = "HOST[:PORT]", conflicts_with = "gpu_only")]
    pub(crate) host: Option<String>,
    /// Serves one run of `peermemctl verify HOST`, without authentication [default: :18516]
    #[arg(
        long,
        value_name = "[ADDRESS]:PORT",
        num_args = 0..=1,
        default_missing_value = ":18516",
        conflicts_with_all = ["host", "gpu_only", "all_pairs", "size"]
    )]
    pub(crate) server: Option<Listen>,
    /// Serves one run after another, until interrupted
    #[arg(long, requires = "server")]
    pub(crate) keep: bool,
    /// GPU by index or PCI address, or `none` on one of two hosts [default: all]
    #[arg(long, value_name = "GPU")]
    pub(crate) gpu: Option<String>,
    /// RDMA device by name [default: the nearest to each GPU]
    #[arg(long, value_name = "HCA")]
    pub(crate) hca: Option<String>,
    /// Tests each GPU with each RDMA device
    #[arg(long, conflicts_with = "hca")]
    pub(crate) all_pairs: bool,
    /// Size of each buffer: bytes, or K, M, G for powers of 1024
    #[arg(long, value_name = "SIZE", default_value = "4M", value_parser = size)]
    pub(crate) size: u64,
    /// Runs only the steps that need no RDMA device
    #[arg(long)]
    pub(crate) gpu_only: bool,
    /// Time limit of a step, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 120)]
    pub(crate) timeout: u64,
    /// Uses the stand-in GPU of the project's test VM even if CUDA is installed
    #[arg(long, hide = true)]
    pub(crate) stand_in: bool,
}

#[derive(Debug, Args)]
pub(crate) struct VerifyPart {
    /// Role of the child process, as JSON
    pub(crate) role: String,
}

#[derive(Debug, Args)]
pub(crate) struct Export {
    #[command(flatten)]
    pub(crate) source: Source,
    /// Replaces this file atomically, for node_exporter's textfile collector [default: standard output]
    #[arg(long, value_name = "FILE", conflicts_with = "listen")]
    pub(crate) output: Option<PathBuf>,
    /// Serves /metrics on this address, such as 127.0.0.1:9837; `:9837` means all addresses
    #[arg(long, value_name = "[ADDRESS]:PORT")]
    pub(crate) listen: Option<Listen>,
    #[command(flatten)]
    pub(crate) expectation: Expectation,
    /// Leaves out the findings of doctor, which take most of the time of a scrape
    #[arg(long, conflicts_with_all = ["baseline", "expect"])]
    pub(crate) no_doctor: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Record {
    #[command(flatten)]
    pub(crate) source: Source,
    /// Output file [default: standard output]
    #[arg(long, short, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
    /// Keeps serial numbers, UUIDs, host names, addresses and command lines, which identify the machine
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
    /// An existing directory
    pub(crate) directory: PathBuf,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units() {
        for (text, bytes) in [
            ("0", 0),
            ("65536", 65_536),
            ("64K", 65_536),
            ("64k", 65_536),
            ("4M", 4 << 20),
            ("4MiB", 4 << 20),
            ("80G", 80 << 30),
        ] {
            assert_eq!(size(text), Ok(bytes), "{text}");
        }
        for wrong in [
            "",
            "M",
            "4MB",
            "4 M",
            "-1",
            "1.5G",
            "4Mi",
            "99999999999T",
            "iB",
        ] {
            assert!(size(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_port_without_address_means_all_addresses() {
        let listen = |text: &str| Listen::from_str(text).map(|listen| listen.addresses);
        let all = listen(":9837").unwrap();
        assert!(all
            .iter()
            .all(|at| at.ip().is_unspecified() && at.port() == 9837));
        assert_eq!(all.len(), 2);
        assert_eq!(
            listen("127.0.0.1:9837").unwrap(),
            [(Ipv4Addr::LOCALHOST, 9837).into()]
        );
        for wrong in ["", ":", ":65536", ":-1", "9837", "127.0.0.1"] {
            assert!(listen(wrong).is_err(), "{wrong}");
        }
    }
}
