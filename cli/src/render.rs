// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Tables, colours, numbers with units, and removal of terminal control sequences.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::fmt::{Display, Write as _};
use std::hash::Hash;

use comfy_table::presets::NOTHING;
use comfy_table::{CellAlignment, ColumnConstraint, ContentArrangement, Width};
use owo_colors::Style;
use textwrap::core::display_width;

use crate::finding::Level;

/// Meaning of a colour.
///
/// In text, a colour is a mark of zero width, so that tables and wrapping count columns correctly.
/// [`crate::report::Out`] turns the marks into colours, or removes them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Paint {
    Good,
    Warning,
    Fault,
    Strong,
    Dim,
}

/// End mark of every paint.
const PLAIN: char = '\u{2060}';

impl Paint {
    const ALL: [(Self, char); 5] = [
        (Self::Good, '\u{2061}'),
        (Self::Warning, '\u{2062}'),
        (Self::Fault, '\u{2063}'),
        (Self::Strong, '\u{2064}'),
        (Self::Dim, '\u{feff}'),
    ];

    pub(crate) fn on(self, text: impl AsRef<str>) -> String {
        let text = text.as_ref();
        let mark = Self::ALL.iter().find(|(paint, _)| *paint == self);
        match mark {
            Some((_, mark)) => format!("{mark}{text}{PLAIN}"),
            None => text.to_owned(),
        }
    }

    /// Returns the colour that begins at this mark, `Some(None)` for the end mark, or `None` for
    /// any other character.
    pub(crate) fn of_mark(mark: char) -> Option<Option<Self>> {
        if mark == PLAIN {
            return Some(None);
        }
        let found = Self::ALL.iter().find(|(_, one)| *one == mark);
        found.map(|(paint, _)| Some(*paint))
    }

    pub(crate) fn style(self) -> Style {
        match self {
            Self::Good => Style::new().green(),
            Self::Warning => Style::new().yellow(),
            Self::Fault => Style::new().red().bold(),
            Self::Strong => Style::new().bold(),
            Self::Dim => Style::new().dimmed(),
        }
    }

    pub(crate) fn of_level(level: Level) -> Self {
        match level {
            Level::Ok => Self::Good,
            Level::Note => Self::Strong,
            Level::NotVisible => Self::Dim,
            Level::Warning => Self::Warning,
            Level::Fault => Self::Fault,
        }
    }
}

/// Number of spaces between columns.
const GAP: u16 = 2;

/// A table with headings and without borders.
pub(crate) struct Table {
    table: comfy_table::Table,
}

impl Table {
    /// Creates a table with these headings, which are separated by `|`.
    pub(crate) fn of(headings: &'static str) -> Self {
        Self::new(&headings.split('|').collect::<Vec<_>>())
    }

    /// Creates a table with these headings, which may be empty.
    pub(crate) fn new(headings: &[&str]) -> Self {
        let mut table = comfy_table::Table::new();
        table
            .load_preset(NOTHING)
            .set_content_arrangement(ContentArrangement::Dynamic);
        if headings.iter().any(|heading| !heading.is_empty()) {
            table.set_header(headings.iter().map(|heading| Paint::Strong.on(heading)));
        }
        Self { table }
    }

    /// Adds a row. Missing cells at its end stay empty.
    pub(crate) fn row<T: AsRef<str>>(&mut self, cells: impl IntoIterator<Item = T>) {
        self.table.add_row(
            cells
                .into_iter()
                .map(|cell| clean(cell.as_ref()).into_owned()),
        );
    }

    /// Aligns columns of numbers to the right.
    pub(crate) fn right(&mut self, columns: &[usize]) {
        for &column in columns {
            if let Some(column) = self.table.column_mut(column) {
                column.set_cell_alignment(CellAlignment::Right);
            }
        }
    }

    /// Returns `true` if the table has no rows.
    pub(crate) fn is_empty(&self) -> bool {
        self.table.is_empty()
    }

    /// Returns the width of the longest word in a column.
    fn longest(&self, column: usize) -> usize {
        let header = self
            .table
            .header()
            .and_then(|row| row.cell_iter().nth(column));
        let cells = self
            .table
            .row_iter()
            .filter_map(|row| row.cell_iter().nth(column));
        cells
            .chain(header)
            .flat_map(|cell| cell.content().split(' ').map(display_width).max())
            .max()
            .unwrap_or(0)
    }

    /// Returns the lines, wrapped between words at `columns`. Long words make a line wider.
    pub(crate) fn lines(&self, columns: usize) -> Vec<String> {
        let mut table = self.table.clone();
        // Two spaces separate columns, and no space precedes the first column. No word is broken,
        // since it may be an address.
        let longest: Vec<usize> = (0..table.column_count())
            .map(|column| self.longest(column))
            .collect();
        for (column, longest) in table.column_iter_mut().zip(longest) {
            column.set_padding((0, GAP));
            if longest > 0 {
                let least = u16::try_from(longest)
                    .unwrap_or(u16::MAX)
                    .saturating_add(GAP);
                column.set_constraint(ColumnConstraint::LowerBoundary(Width::Fixed(least)));
            }
        }
        table.set_width(u16::try_from(columns).unwrap_or(u16::MAX));
        table
            .lines()
            .map(|line| line.trim_end().to_owned())
            .collect()
    }
}

/// Formats bytes with a binary unit, with one decimal place unless the number is whole.
pub(crate) fn bytes(bytes: u64) -> String {
    const UNITS: [&str; 7] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let mut unit = 0_usize;
    let mut size = 1_u64;
    while unit + 1 < UNITS.len() && bytes / size >= 1024 {
        size <<= 10;
        unit += 1;
    }
    let name = UNITS.get(unit).copied().unwrap_or("B");
    if bytes % size == 0 {
        return format!("{} {name}", bytes / size);
    }
    // The number is rounded down, so that the text never exceeds the real amount.
    let tenths = (u128::from(bytes) * 10 / u128::from(size)) % 10;
    format!("{}.{tenths} {name}", bytes / size)
}

/// Placeholder for an unknown value.
pub(crate) const NONE: &str = "-";

/// Formats a value, or [`NONE`].
pub(crate) fn known(value: Option<impl ToString>) -> String {
    value.map_or_else(|| NONE.to_owned(), |value| value.to_string())
}

/// Formats the first elements of a list, and the number of all others: `1, 2, 3 more`.
pub(crate) fn first(all: impl ExactSizeIterator<Item = impl ToString>, most: usize) -> String {
    let more = all.len().saturating_sub(most);
    let mut names: Vec<String> = all.take(most).map(|one| one.to_string()).collect();
    names.extend((more > 0).then(|| format!("{more} more")));
    names.join(", ")
}

/// Returns each element once, in the order of first occurrence.
pub(crate) fn unique<T: Copy + Eq + Hash>(all: impl IntoIterator<Item = T>) -> Vec<T> {
    let mut seen = HashSet::new();
    let first = all.into_iter().filter(|one| seen.insert(*one));
    first.collect()
}

/// Groups elements by key, in the order of the keys' first occurrence.
pub(crate) fn by_key<K: Clone + Eq + Hash, T>(
    all: impl IntoIterator<Item = (K, T)>,
) -> Vec<(K, Vec<T>)> {
    let mut groups: Vec<(K, Vec<T>)> = Vec::new();
    let mut places = HashMap::new();
    for (key, one) in all {
        let place = *places.entry(key.clone()).or_insert(groups.len());
        match groups.get_mut(place) {
            Some((_, group)) => group.push(one),
            None => groups.push((key, vec![one])),
        }
    }
    groups
}

/// Formats a number and its noun.
pub(crate) fn counted<N: Copy + Display + PartialEq + From<u8>>(number: N, thing: &str) -> String {
    match thing {
        _ if number == N::from(1) => format!("1 {thing}"),
        _ if thing.ends_with("ss") || thing.ends_with("ch") => format!("{number} {thing}es"),
        _ => format!("{number} {thing}s"),
    }
}

/// Formats seconds as `5 s`, `3 min 20 s`, `2 h 5 min`, `4 d 3 h`.
pub(crate) fn seconds(seconds: f64) -> String {
    // CAST: The number is not negative, and only whole seconds are shown.
    let seconds = seconds as u64;
    let pair = |large: &str, size: u64, small: &str, part: u64| {
        let rest = seconds % size / part;
        match rest {
            0 => format!("{} {large}", seconds / size),
            _ => format!("{} {large} {rest} {small}", seconds / size),
        }
    };
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3_600 => pair("min", 60, "s", 1),
        3_600..86_400 => pair("h", 3_600, "min", 60),
        _ => pair("d", 86_400, "h", 3_600),
    }
}

/// Escapes characters that control a terminal or change the direction of text.
pub(crate) fn clean(text: &str) -> Cow<'_, str> {
    let steers = |character: char| {
        character.is_control()
            || matches!(character, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{200e}' | '\u{200f}')
    };
    if !text.contains(steers) {
        return Cow::Borrowed(text);
    }
    let mut clean = String::with_capacity(text.len());
    for character in text.chars() {
        if !steers(character) {
            clean.push(character);
        } else if u32::from(character) < 0x100 {
            let _ = write!(clean, "\\x{:02x}", u32::from(character));
        } else {
            let _ = write!(clean, "\\u{{{:x}}}", u32::from(character));
        }
    }
    Cow::Owned(clean)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_have_their_units() {
        assert_eq!(bytes(0), "0 B");
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(65_536), "64 KiB");
        assert_eq!(bytes((256 << 20) - 1), "255.9 MiB");
        assert_eq!(bytes(128 << 30), "128 GiB");
        assert_eq!(bytes(u64::MAX), "15.9 EiB");
        assert_eq!(seconds(59.9), "59 s");
        assert_eq!(seconds(200.0), "3 min 20 s");
        assert_eq!(seconds(7_500.0), "2 h 5 min");
        assert_eq!(seconds(86_400.0 * 4.0 + 3.0 * 3_600.0), "4 d 3 h");
    }

    #[test]
    fn a_painted_cell_is_as_wide_as_its_text() {
        let mut table = Table::of("A|B");
        table.row([Paint::Fault.on("xx"), "1".to_owned()]);
        table.row(["yyy", "22"]);
        table.right(&[1]);
        let lines: Vec<String> = table
            .lines(80)
            .iter()
            .map(|line| {
                line.chars()
                    .filter(|mark| Paint::of_mark(*mark).is_none())
                    .collect()
            })
            .collect();
        assert_eq!(lines, ["A     B", "xx    1", "yyy  22"]);
    }

    #[test]
    fn a_narrow_table_breaks_no_word() {
        let mut table = Table::of("HOP|WHAT|LINK");
        table.row(["0000:19:00.0", "switch, downstream", "32.0 GT/s x16"]);
        let lines = table.lines(30).join("\n");
        for word in ["0000:19:00.0", "switch,", "downstream", "32.0", "GT/s"] {
            assert!(lines.contains(word), "{word} in\n{lines}");
        }
        assert!(lines.lines().count() > 2, "{lines}");
    }

    #[test]
    fn a_table_keeps_to_its_width() {
        let mut table = Table::of("A|B");
        table.row(["word ".repeat(20), "other ".repeat(20)]);
        for line in table.lines(40) {
            assert!(display_width(&line) <= 40, "{line:?}");
        }
    }
}
