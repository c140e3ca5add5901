// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! `peermemctl` shows, checks and proves the path between GPUs and RDMA devices.
//!
//! [`host`] reads a machine. [`machine`] and [`software`] model the parts that affect GPUDirect
//! RDMA. Each command is a module that uses these models, and returns text or JSON and a
//! [`finding::Status`].

mod args;
mod debugfs;
mod dma_buf;
mod doctor;
mod export;
mod finding;
#[cfg(test)]
mod fixture;
mod host;
mod job;
mod list;
mod machine;
mod netlink;
mod process;
mod record;
mod regions;
mod registrations;
mod render;
mod report;
mod shell;
mod shipped;
mod software;
mod stats;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
mod topo;
mod verify;
mod watch;

use std::io;
use std::io::Write as _;
use std::process::ExitCode;

use anyhow::Context as _;
use clap::Parser as _;

use args::Command;
use finding::Status;
use host::live::Live;
use host::recording::Recording;
use host::Host;
use report::Out;

fn main() -> ExitCode {
    let cli = match args::Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return misused(&error),
    };
    let mut out = Out::standard(&cli.common);
    let is_plugin = cli.command.is_plugin();
    let status = match run(&cli, &mut out) {
        Err(error) if is_plugin && !is_closed_pipe(&error) => Ok(doctor::unknown(&error, &mut out)),
        other => other,
    };
    // Writes the gathered output, even if the command failed.
    let written = out.flush();
    let status = match (status, written) {
        (Err(error), _) if is_closed_pipe(&error) => Status::Ok,
        (Err(error), _) => {
            eprintln!("peermemctl: {}", render::clean(&format!("{error:#}")));
            Status::Failed
        }
        (Ok(status), Err(error)) if error.kind() == io::ErrorKind::BrokenPipe => status,
        (Ok(_), Err(error)) => {
            eprintln!("peermemctl: standard output: {error}");
            Status::Failed
        }
        (Ok(status), Ok(())) => status,
    };
    // A monitoring system interprets exit status 2 as CRITICAL.
    let status = match status {
        Status::Failed if is_plugin => Status::Plugin(finding::Plugin::Unknown),
        other => other,
    };
    ExitCode::from(status.code())
}

/// Prints a usage error, or the help text. A usage error has exit status 2, which a monitoring
/// system interprets as CRITICAL. `doctor --nagios` therefore reports UNKNOWN.
fn misused(error: &clap::Error) -> ExitCode {
    let words: Vec<_> = std::env::args_os().skip(1).collect();
    let has = |word: &str| words.iter().any(|one| one == word);
    if error.use_stderr() && has("doctor") && has("--nagios") {
        let text = error.to_string();
        let first = text.lines().next().unwrap_or_default();
        let first = render::clean(first.trim_start_matches("error: "));
        // If standard output is not writable, only the exit status reports the error.
        let _ = writeln!(io::stdout(), "GPUDIRECT UNKNOWN - {first}");
        return ExitCode::from(Status::Plugin(finding::Plugin::Unknown).code());
    }
    error.exit()
}

fn run(cli: &args::Cli, out: &mut Out) -> anyhow::Result<Status> {
    let Some(file) = cli.command.recording() else {
        return command(&Live, &cli.command, out);
    };
    let recording = Recording::load(file)?;
    // Names the recording in the error, because the failure concerns the recorded machine and not
    // this machine.
    command(&recording, &cli.command, out).with_context(|| format!("{}", file.display()))
}

/// Runs one command on one host, for `main` and for the tests of all commands.
pub(crate) fn command(host: &dyn Host, command: &Command, out: &mut Out) -> anyhow::Result<Status> {
    match command {
        Command::Topo(args) => topo::run(host, args, out),
        Command::Record(args) => record::run(host, args, self::command, out),
        Command::Completions(args) => shell::completions(args, out),
        Command::Man(args) => shell::man(args),
        Command::Doctor(args) => doctor::run(host, args, out),
        Command::Verify(args) => verify::run(host, args, out),
        Command::VerifyPart(args) => verify::run_part(&args.role).map(|()| Status::Ok),
        Command::List(args) => list::run(host, args, out),
        Command::Job(args) => job::run(host, args, out),
        Command::Stats(args) => stats::run(host, args, out),
        Command::Export(args) => export::run(host, args, out),
    }
}

/// Returns `true` if the reader of standard output has exited. In that case, a command that repeats
/// its output ends.
fn is_closed_pipe(error: &anyhow::Error) -> bool {
    error
        .downcast_ref::<io::Error>()
        .is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
}
