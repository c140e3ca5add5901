// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! `completions` and `man`, generated from the command line in [`crate::args`].

use anyhow::Context as _;
use clap::CommandFactory as _;

use crate::args;
use crate::args::Cli;
use crate::finding::Status;
use crate::report::Out;

/// Prints completions for a shell.
pub(crate) fn completions(args: &args::Completions, out: &mut Out) -> anyhow::Result<Status> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "peermemctl", &mut script);
    out.raw(&String::from_utf8(script)?);
    Ok(Status::Ok)
}

/// Writes `peermemctl.1` and a page for each command.
pub(crate) fn man(args: &args::Man) -> anyhow::Result<Status> {
    clap_mangen::generate_to(Cli::command(), &args.directory)
        .with_context(|| format!("{}", args.directory.display()))?;
    Ok(Status::Ok)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_is_completed() {
        for shell in [clap_complete::Shell::Bash, clap_complete::Shell::Zsh] {
            let mut out = Out::gather(false);
            assert!(completions(&args::Completions { shell }, &mut out).is_ok());
            let script = out.into_text();
            for command in Cli::command().get_subcommands() {
                assert!(
                    script.contains(command.get_name()),
                    "{}",
                    command.get_name()
                );
            }
        }
    }
}
