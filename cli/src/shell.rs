// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! `completions` and `man`, made from the command line that [`crate::args`] describes, and words of the commands that
//! findings advise.

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

/// Mark in a command, in place of a word that the shell would not take as it is.
const UNFIT: char = '\0';

/// Returns a device's name as a word of a command, or a mark by which [`without_unfit`] knows the command. A recording, or
/// `rdma dev set`, may give a device any name.
pub(crate) fn argument(name: &str) -> &str {
    word(name, "_.:-")
}

/// Returns a file's path as a word of a command, or the same mark.
pub(crate) fn path_argument(path: &str) -> &str {
    word(path, "_.:-/@")
}

fn word<'a>(text: &'a str, marks: &str) -> &'a str {
    let is_plain = |letter: char| letter.is_ascii_alphanumeric() || marks.contains(letter);
    // A word that begins with a dash is an option.
    match !text.is_empty() && !text.starts_with('-') && text.chars().all(is_plain) {
        true => text,
        false => "\0",
    }
}

/// Leaves out each command, between backticks, in which [`argument`] found an unfit word.
pub(crate) fn without_unfit(fix: String) -> String {
    if !fix.contains(UNFIT) {
        return fix;
    }
    let parts = fix.split('`').enumerate();
    let parts = parts.map(
        |(index, part)| match (index % 2 == 1, part.contains(UNFIT)) {
            (true, true) => {
                "(a command is left out: the device's name is no plain word)".to_owned()
            }
            (true, false) => format!("`{part}`"),
            (false, _) => part.replace(UNFIT, "?"),
        },
    );
    parts.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_with_an_odd_name_is_left_out() {
        for plain in ["mlx5_0", "ens1f0np0", "bond0.100", "a-b", "0000:3b:00.0"] {
            assert_eq!(argument(plain), plain);
        }
        for odd in [
            "", " ", "-d", "a b", "a`b", "a;b", "a'b", "$(x)", "a\nb", "ü", "a/b",
        ] {
            assert_eq!(argument(odd), "\0", "{odd:?}");
        }
        assert_eq!(path_argument("/sys/fs/cgroup/a-1"), "/sys/fs/cgroup/a-1");
        assert_eq!(path_argument("/sys/fs/cgroup/$x"), "\0");
        let left = without_unfit(format!("`a`, `b {}` or `c`", argument("x y")));
        assert_eq!(
            left,
            "`a`, (a command is left out: the device's name is no plain word) or `c`"
        );
        assert_eq!(without_unfit("`a` b".to_owned()), "`a` b");
    }

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
