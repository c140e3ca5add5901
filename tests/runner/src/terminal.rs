// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! The caller's terminal: its presence, its size, and its raw mode.

use std::io::{stdin, stdout, IsTerminal as _};

use anyhow::Result;
use rustix::termios;

pub(crate) fn is_terminal() -> bool {
    stdin().is_terminal() && stdout().is_terminal()
}

pub(crate) fn size() -> Option<(u16, u16)> {
    let size = termios::tcgetwinsize(stdout()).ok()?;
    (size.ws_row > 0 && size.ws_col > 0).then_some((size.ws_row, size.ws_col))
}

/// Keeps the terminal in raw mode until this value is dropped, so that every key goes to the VM.
pub(crate) struct Raw(termios::Termios);

impl Raw {
    /// Enters raw mode. Returns `None` if there is no terminal.
    pub(crate) fn enter() -> Result<Option<Self>> {
        if !stdin().is_terminal() {
            return Ok(None);
        }
        let before = termios::tcgetattr(stdin())?;
        let mut raw = before.clone();
        raw.make_raw();
        termios::tcsetattr(stdin(), termios::OptionalActions::Now, &raw)?;
        Ok(Some(Self(before)))
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        let _ = termios::tcsetattr(stdin(), termios::OptionalActions::Flush, &self.0);
    }
}
