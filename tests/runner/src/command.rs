// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Commands on this machine: the search path for their programs, and the quoting of their
//! arguments.

use std::path::PathBuf;
use std::process::Command;

pub(crate) fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// Returns the caller's PATH plus the directories of system programs, which an ordinary user's PATH
/// lacks.
pub(crate) fn system_path() -> String {
    let path = std::env::var("PATH").unwrap_or_default();
    format!("{path}:/usr/local/sbin:/usr/sbin:/sbin:/usr/bin:/bin")
}

pub(crate) fn find_program(name: &str) -> Option<PathBuf> {
    std::env::split_paths(&system_path())
        .map(|directory| directory.join(name))
        .find(|path| path.is_file())
}

/// Returns a command for a program on this machine that builds something.
pub(crate) fn tool(program: &str) -> Command {
    let mut command = Command::new("setpriv");
    command
        // The kernel ends the command together with this program, even after SIGKILL. make then
        // removes half-written files.
        .args(["--pdeathsig", "TERM", program])
        .env("PATH", system_path())
        .env("LC_ALL", "C")
        // If make called this program, make's flags must not be passed on.
        .env_remove("MAKEFLAGS")
        .env_remove("MFLAGS")
        .env_remove("MAKELEVEL");
    command
}

pub(crate) fn as_root(program: &str) -> Command {
    if rustix::process::geteuid().is_root() {
        Command::new(program)
    } else {
        let mut command = Command::new("sudo");
        command.arg(program);
        command
    }
}
