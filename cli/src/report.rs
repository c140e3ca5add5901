// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Output of a command: text for people, or JSON.
//!
//! Output is gathered first and written at once. A reader that exits early (`| head`) therefore
//! does not change the exit status. Control characters appear as `\xNN`, so that no data can
//! control the terminal.

use std::fmt::Write as _;
use std::io;
use std::io::{IsTerminal as _, Write};
use std::sync::atomic::{AtomicBool, Ordering};

use serde::Serialize;

use crate::args::{Color, Common};
use crate::render::{clean, Paint, Table};

/// Makes a JSON object with the keys in the order of the arguments.
macro_rules! object {
    ($($(#[$attribute:meta])* $key:ident: $value:expr),* $(,)?) => {{
        #[allow(non_camel_case_types, clippy::too_many_arguments)]
        fn object<$($key: serde::Serialize),*>($($key: $key),*) -> impl serde::Serialize {
            #[derive(serde::Serialize)]
            struct Object<$($key),*> {
                $($(#[$attribute])* $key: $key,)*
            }
            Object { $($key,)* }
        }
        object($($value),*)
    }};
}
pub(crate) use object;

/// Default width if standard output is not a terminal and `COLUMNS` is unset.
const COLUMNS: usize = 100;

/// `true` if standard output was closed at program start.
static CLOSED: AtomicBool = AtomicBool::new(false);

/// Records whether standard output is open. This function must run before Rust's runtime, which
/// opens /dev/null in place of a closed standard output. Later writes to /dev/null would be lost
/// without an error.
extern "C" fn look_at_standard_output() {
    let is_open = rustix::io::fcntl_getfd(io::stdout()).is_ok();
    CLOSED.store(!is_open, Ordering::Relaxed);
}

#[used]
#[link_section = ".init_array"]
static BEFORE_MAIN: extern "C" fn() = look_at_standard_output;

/// Writer for a closed standard output.
struct Closed;

impl Write for Closed {
    fn write(&mut self, _: &[u8]) -> io::Result<usize> {
        Err(rustix::io::Errno::BADF.into())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Returns the value of the environment variable `COLUMNS`, which a shell may export.
fn columns_asked() -> Option<usize> {
    let columns = std::env::var("COLUMNS").ok()?.parse().ok()?;
    Some(columns).filter(|columns| *columns > 0)
}

/// Output of a command.
pub(crate) struct Out {
    json: bool,
    colors: bool,
    terminal: bool,
    repeated: bool,
    columns: usize,
    gathered: String,
    sink: Box<dyn Write>,
}

impl Out {
    /// Creates an output to standard output, with the options of the command line.
    pub(crate) fn standard(common: &Common) -> Self {
        let terminal = io::stdout().is_terminal();
        // <https://no-color.org>: set and not empty.
        let plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        let of_terminal = || {
            let size = terminal_size::terminal_size().filter(|_| terminal);
            size.map(|(columns, _)| usize::from(columns.0))
        };
        Self {
            json: common.json,
            colors: match common.color {
                Color::Auto => terminal && !plain,
                Color::Always => true,
                Color::Never => false,
            },
            terminal,
            repeated: false,
            columns: columns_asked()
                .or_else(of_terminal)
                .unwrap_or(COLUMNS)
                .max(40),
            gathered: String::new(),
            sink: match CLOSED.load(Ordering::Relaxed) {
                true => Box::new(Closed),
                false => Box::new(io::stdout()),
            },
        }
    }

    /// Creates an output that keeps its text in memory, for a test or for a command that runs
    /// another command. `Out::into_text` returns the text.
    pub(crate) fn gather(json: bool) -> Self {
        Self {
            json,
            colors: false,
            terminal: false,
            repeated: false,
            columns: COLUMNS,
            gathered: String::new(),
            sink: Box::new(io::sink()),
        }
    }

    /// Returns the text that was gathered but not yet written.
    #[cfg(test)]
    pub(crate) fn into_text(self) -> String {
        self.gathered
    }

    /// Switches to repeated output, where each JSON object is one line.
    pub(crate) fn repeat(&mut self) {
        self.repeated = true;
    }

    /// Returns `true` if the user wants JSON. In that case, the command calls [`Out::json`] once
    /// (with `--watch`, once per round) and prints no text.
    pub(crate) fn is_json(&self) -> bool {
        self.json
    }

    /// Returns `true` if each round needs a heading. A terminal needs no headings, because each
    /// round clears the terminal.
    pub(crate) fn wants_heading(&self) -> bool {
        self.repeated && !self.terminal
    }

    /// Returns the column at which text wraps.
    pub(crate) fn columns(&self) -> usize {
        self.columns
    }

    /// Prints a line without wrapping it.
    pub(crate) fn line(&mut self, text: impl AsRef<str>) {
        let text = self.painted(&clean(text.as_ref()));
        self.gathered.push_str(text.trim_end());
        self.gathered.push('\n');
    }

    /// Prints an empty line, unless the output is empty or ends with an empty line.
    pub(crate) fn gap(&mut self) {
        if !self.gathered.is_empty() && !self.gathered.ends_with("\n\n") {
            self.gathered.push('\n');
        }
    }

    /// Prints a wrapped paragraph. The first line begins with `first`. All other lines begin with
    /// spaces of the same width.
    pub(crate) fn paragraph(&mut self, first: &str, text: &str) {
        let blanks = " ".repeat(textwrap::core::display_width(first));
        let options = textwrap::Options::new(self.columns)
            .initial_indent(first)
            .subsequent_indent(&blanks)
            // Addresses and commands stay in one piece, so that they can be copied.
            .break_words(false)
            .word_splitter(textwrap::WordSplitter::NoHyphenation);
        for line in textwrap::wrap(&clean(text), options) {
            self.line(line);
        }
    }

    /// Prints a table, wrapped at the width of a line.
    pub(crate) fn table(&mut self, table: &Table) {
        for line in table.lines(self.columns) {
            self.line(line);
        }
    }

    /// Prints text for a program, unchanged.
    pub(crate) fn raw(&mut self, text: &str) {
        self.gathered.push_str(text);
    }

    /// Prints the JSON object: `schema` and `version`, then the fields of `body`, which is a struct
    /// or a map.
    pub(crate) fn json(
        &mut self,
        schema: &str,
        version: u32,
        body: &impl Serialize,
    ) -> anyhow::Result<()> {
        let envelope = object! {
            schema: schema,
            version: version,
            #[serde(flatten)]
            body: body,
        };
        let text = match self.repeated {
            true => serde_json::to_string(&envelope)?,
            false => serde_json::to_string_pretty(&envelope)?,
        };
        for character in text.chars() {
            match character {
                // JSON allows these characters, but terminals act on them. JSON has these
                // characters only inside strings.
                '\x7f'..='\u{9f}' => {
                    let _ = write!(self.gathered, "\\u{:04x}", u32::from(character));
                }
                _ => self.gathered.push(character),
            }
        }
        self.gathered.push('\n');
        Ok(())
    }

    /// Clears the terminal before the next round. Does nothing if the output is not a terminal.
    pub(crate) fn clear(&mut self) {
        if self.repeated && self.terminal {
            self.gathered.push_str("\x1b[H\x1b[2J");
        }
    }

    /// Writes the gathered text.
    pub(crate) fn flush(&mut self) -> io::Result<()> {
        let text = std::mem::take(&mut self.gathered);
        self.sink.write_all(text.as_bytes())?;
        self.sink.flush()
    }

    /// Replaces the marks by colours, or removes them.
    fn painted(&self, text: &str) -> String {
        let mut painted = String::with_capacity(text.len());
        let mut open: Option<Paint> = None;
        for character in text.chars() {
            match Paint::of_mark(character) {
                None => painted.push(character),
                Some(mark) if self.colors => {
                    if let Some(before) = open.take() {
                        let _ = write!(painted, "{}", before.style().suffix_formatter());
                    }
                    if let Some(paint) = mark {
                        let _ = write!(painted, "{}", paint.style().prefix_formatter());
                        open = Some(paint);
                    }
                }
                Some(_) => {}
            }
        }
        if let Some(before) = open {
            let _ = write!(painted, "{}", before.style().suffix_formatter());
        }
        painted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_data_controls_a_terminal() {
        let mut out = Out::gather(false);
        out.line("a\x1b[2Jb\nc\u{202e}d");
        out.paragraph("- ", "x\x07y");
        let mut table = Table::of("NAME");
        table.row([Paint::Fault.on("q\x1b]0;t\x07")]);
        out.table(&table);
        assert_eq!(
            out.into_text(),
            "a\\x1b[2Jb\\x0ac\\u{202e}d\n- x\\x07y\nNAME\nq\\x1b]0;t\\x07\n"
        );
    }

    #[test]
    fn json_has_its_envelope_first() {
        let mut out = Out::gather(true);
        out.repeat();
        let body = std::collections::BTreeMap::from([("a", "\u{9b}x\n")]);
        assert!(out.json("peermemctl.test", 3, &body).is_ok());
        assert_eq!(
            out.into_text(),
            "{\"schema\":\"peermemctl.test\",\"version\":3,\"a\":\"\\u009bx\\n\"}\n"
        );
    }

    #[test]
    fn colours_appear_where_they_are_wanted() {
        let mut out = Out::gather(false);
        out.line(Paint::Fault.on("bad"));
        assert_eq!(out.gathered, "bad\n");
        out.colors = true;
        out.gathered.clear();
        out.line(format!("{} and on", Paint::Fault.on("bad")));
        assert!(out.gathered.starts_with("\x1b["), "{:?}", out.gathered);
        assert!(out.gathered.ends_with(" and on\n"), "{:?}", out.gathered);
    }

    #[test]
    fn a_paragraph_is_wrapped_under_its_first_word() {
        let mut out = Out::gather(false);
        out.columns = 20;
        out.paragraph("why: ", "one two three four five");
        assert_eq!(out.into_text(), "why: one two three\n     four five\n");
    }
}
