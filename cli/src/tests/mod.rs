// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Tests of whole commands.

mod output;
mod recordings;

use clap::CommandFactory as _;

#[test]
fn the_command_line_is_sound() {
    crate::args::Cli::command().debug_assert();
}
