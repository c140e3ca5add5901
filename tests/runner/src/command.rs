// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Commands of the host: where their programs are, and how their words are quoted.

use std::path::PathBuf;
use std::process::Command;

/// Quotes for the shell.
pub(crate) fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// The caller's PATH with the places of system programs, which an ordinary user's lacks.
pub(crate) fn system_path() -> String {
    let path = std::env::var("PATH").unwrap_or_default();
    format!("{path}:/usr/local/sbin:/usr/sbin:/sbin:/usr/bin:/bin")
}

/// Finds a program of the host by its name.
pub(crate) fn find_program(name: &str) -> Option<PathBuf> {
    std::env::split_paths(&system_path())
        .map(|directory| directory.join(name))
        .find(|path| path.is_file())
}

/// Returns a command for a program of the host that builds something.
pub(crate) fn tool(program: &str) -> Command {
    let mut command = Command::new("setpriv");
    command
        // The kernel ends the command together with this program, even after SIGKILL, and make then removes half-written files.
        .args(["--pdeathsig", "TERM", program])
        .env("PATH", system_path())
        .env("LC_ALL", "C")
        // A make that called this program must not pass its own ways on.
        .env_remove("MAKEFLAGS")
        .env_remove("MFLAGS")
        .env_remove("MAKELEVEL");
    command
}

/// The program as root, by `sudo` where that is needed.
pub(crate) fn as_root(program: &str) -> Command {
    if rustix::process::geteuid().is_root() {
        Command::new(program)
    } else {
        let mut command = Command::new("sudo");
        command.arg(program);
        command
    }
}
