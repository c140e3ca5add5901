// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! The tables of a bench: the same for a terminal and for the page.

use std::collections::BTreeMap;

use comfy_table::presets::ASCII_MARKDOWN;
use comfy_table::{CellAlignment, Table};
use peermem_figures::What;

use super::goals;
use super::goals::{Goal, Pairs};
use super::record::{Beside, Figure};
use crate::documents;

/// A table whose first `words` columns are words, and the others numbers.
fn table(head: &[&str], words: usize, rows: impl IntoIterator<Item = Vec<String>>) -> String {
    let mut table = Table::new();
    table.load_preset(ASCII_MARKDOWN).set_header(head);
    for row in rows {
        table.add_row(row);
    }
    for column in table.column_iter_mut().skip(words) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    let lines: Vec<String> = table
        .to_string()
        .lines()
        .map(|line| format!("{}\n", line.trim_end()))
        .collect();
    lines.concat()
}

/// The same, where there are rows.
pub(super) fn filled(
    head: &[&str],
    words: usize,
    rows: impl IntoIterator<Item = Vec<String>>,
) -> Option<String> {
    let rows: Vec<_> = rows.into_iter().collect();
    (!rows.is_empty()).then(|| table(head, words, rows))
}

/// `64 KiB`, `2 GiB`.
pub(super) fn size(bytes: u64) -> String {
    for (shift, unit) in [(30, "GiB"), (20, "MiB"), (10, "KiB")] {
        if bytes >= 1 << shift && bytes % (1 << shift) == 0 {
            return format!("{} {unit}", bytes >> shift);
        }
    }
    format!("{bytes} B")
}

/// As a whole number, its digits in groups of three.
pub(super) fn grouped(number: f64) -> String {
    let sign = if number < 0.0 { "-" } else { "" };
    let digits = documents::grouped(&format!("{:.0}", number.abs()));
    format!("{sign}{digits}")
}

pub(super) fn ratio(ours: f64, theirs: f64) -> String {
    if theirs == 0.0 {
        return "–".to_owned();
    }
    format!("{:.4}", ours / theirs)
}

/// Nanoseconds in a unit that fits.
pub(super) fn time(nanoseconds: f64) -> String {
    match nanoseconds {
        ns if ns >= 1e9 => format!("{:.2} s", ns / 1e9),
        ns if ns >= 1e6 => format!("{:.2} ms", ns / 1e6),
        ns => format!("{:.1} µs", ns / 1e3),
    }
}

pub(super) fn percent(part: f64) -> String {
    format!("{:.2} %", 100.0 * part)
}

/// How memory lies, in words.
pub(super) fn layout(what: &What) -> &str {
    match what.layout.as_str() {
        "2m" => "2 MiB chunks",
        "64k" => "fragmented",
        other => other,
    }
}

fn head(what: &What) -> Vec<String> {
    vec![layout(what).to_owned(), size(what.bytes)]
}

fn with(what: &What, cells: impl IntoIterator<Item = String>) -> Vec<String> {
    let mut row = head(what);
    row.extend(cells);
    row
}

/// A goal in a cell: what was reached, and where.
fn reached(goal: &Goal) -> String {
    let (Some(worst), Some(at), Some(met)) = (goal.worst, &goal.at, goal.is_met()) else {
        return "–".to_owned();
    };
    let text = format!("{worst:.4} ({at})");
    if met {
        text
    } else {
        format!("**missed:** {text}")
    }
}

/// The goals, and what each mode reached. Where the modes have limits of their own, these stand in the modes' order.
pub(super) fn goals(of: &[(&str, &[Goal])]) -> String {
    let mut head = vec!["goal", "at most"];
    head.extend(of.iter().map(|(mode, _)| *mode));
    let first = of.first().map_or(&[][..], |(_, goals)| goals);
    let rows = first.iter().enumerate().map(|(index, goal)| {
        let limits = of.iter().filter_map(|(_, goals)| goals.get(index));
        let mut limits: Vec<String> = limits.map(|goal| goal.limit.to_string()).collect();
        limits.dedup();
        let mut row = vec![goal.name.to_owned(), limits.join("; ")];
        row.extend(
            of.iter()
                .map(|(_, goals)| goals.get(index).map_or(String::new(), reached)),
        );
        row
    });
    table(&head, 1, rows)
}

/// Provider calls, and the time under ib_core's mutex.
pub(super) fn calls(pairs: &Pairs<'_>) -> String {
    let rows = pairs.iter().map(|&(what, ours, theirs)| {
        let (held, other) = (goals::mutex(what, ours), goals::mutex(what, theirs));
        with(
            what,
            [
                format!("{}, {}", ours.pins, theirs.pins),
                format!("{}, {}", ours.unpins, theirs.unpins),
                format!("{}, {}", ours.maps, theirs.maps),
                format!("{}, {}", ours.unmaps, theirs.unmaps),
                time(held),
                time(other),
                ratio(held, other),
            ],
        )
    });
    table(
        &[
            "memory",
            "length",
            "pins",
            "unpins",
            "maps",
            "unmaps",
            "mutex, ours",
            "NVIDIA's",
            "ratio",
        ],
        1,
        rows,
    )
}

/// Own and whole cost.
pub(super) fn costs(pairs: &Pairs<'_>) -> String {
    let rows = pairs.iter().map(|&(what, ours, theirs)| {
        let whole = [ours, theirs].map(|row| goals::whole(what, row));
        let mapping = [ours, theirs].map(|row| goals::whole_with_mapping(what, row));
        with(
            what,
            [
                grouped(ours.own.median),
                grouped(theirs.own.median),
                ratio(ours.own.median, theirs.own.median),
                percent(ours.own.spread()),
                percent(theirs.own.spread()),
                time(whole[0]),
                time(whole[1]),
                ratio(whole[0], whole[1]),
                ratio(mapping[0], mapping[1]),
                ratio(goals::without_pins(ours), goals::without_pins(theirs)),
            ],
        )
    });
    table(
        &[
            "memory",
            "length",
            "own, ours",
            "NVIDIA's",
            "ratio",
            "spread, ours",
            "NVIDIA's",
            "whole, ours",
            "NVIDIA's",
            "ratio",
            "with mapping",
            "and free pins",
        ],
        1,
        rows,
    )
}

/// Scatter lists, kernel memory, and the HCA's pages.
pub(super) fn memory(pairs: &Pairs<'_>) -> String {
    let hca = |page: u64, pages: u64| format!("{} × {}", grouped(pages as f64), size(page));
    let rows = pairs.iter().map(|&(what, ours, theirs)| {
        with(
            what,
            [
                grouped(ours.entries as f64),
                grouped(theirs.entries as f64),
                grouped(ours.held as f64),
                grouped(theirs.held as f64),
                ratio(ours.held as f64, theirs.held as f64),
                grouped(ours.peak as f64),
                grouped(theirs.peak as f64),
                hca(ours.hca.old_page, ours.hca.old_pages),
                hca(theirs.hca.old_page, theirs.hca.old_pages),
                hca(ours.hca.new_page, ours.hca.new_pages),
                hca(theirs.hca.new_page, theirs.hca.new_pages),
            ],
        )
    });
    table(
        &[
            "memory",
            "length",
            "entries, ours",
            "NVIDIA's",
            "held, ours",
            "NVIDIA's",
            "ratio",
            "peak, ours",
            "NVIDIA's",
            "HCA old, ours",
            "NVIDIA's",
            "HCA new, ours",
            "NVIDIA's",
        ],
        1,
        rows,
    )
}

/// Where the instructions are: each function of both modules.
pub(super) fn functions(pairs: &Pairs<'_>, of: impl Fn(&What) -> bool) -> String {
    let rows = pairs
        .iter()
        .filter(|(what, _, _)| of(what))
        .flat_map(|&(what, ours, theirs)| {
            ours.functions.iter().map(move |(name, cost)| {
                let other = theirs.functions.get(name).map_or(0.0, |cost| cost.median);
                let mut row = head(what);
                row.extend([name.clone(), grouped(cost.median), grouped(other)]);
                row
            })
        });
    table(
        &["memory", "length", "function", "ours", "NVIDIA's"],
        3,
        rows,
    )
}

/// From a free to the last region dead.
pub(super) fn revocations(ours: &BTreeMap<u64, Figure>, theirs: &BTreeMap<u64, Figure>) -> String {
    let rows = ours.iter().filter_map(|(&regions, figure)| {
        let other = theirs.get(&regions)?;
        Some(vec![
            grouped(regions as f64),
            grouped(figure.median),
            grouped(other.median),
            ratio(figure.median, other.median),
            grouped(figure.median / regions as f64),
            grouped(other.median / regions as f64),
            percent(figure.spread()),
            percent(other.spread()),
        ])
    });
    table(
        &[
            "regions",
            "free, ours",
            "NVIDIA's",
            "ratio",
            "a region, ours",
            "NVIDIA's",
            "spread, ours",
            "NVIDIA's",
        ],
        0,
        rows,
    )
}

/// Beside others that are alive.
pub(super) fn alive(ours: &BTreeMap<u64, Beside>, theirs: &BTreeMap<u64, Beside>) -> String {
    let bytes = |beside: &Beside| beside.held.map_or("–".to_owned(), grouped);
    let rows = ours.iter().filter_map(|(&regions, beside)| {
        let other = theirs.get(&regions)?;
        Some(vec![
            grouped(regions as f64),
            grouped(beside.own.median),
            grouped(other.own.median),
            bytes(beside),
            bytes(other),
            grouped(beside.reg_mr.median),
            grouped(other.reg_mr.median),
            grouped(beside.dereg_mr.median),
            grouped(other.dereg_mr.median),
        ])
    });
    table(
        &[
            "alive",
            "own, ours",
            "NVIDIA's",
            "bytes each, ours",
            "NVIDIA's",
            "ibv_reg_mr, ours",
            "NVIDIA's",
            "ibv_dereg_mr, ours",
            "NVIDIA's",
        ],
        0,
        rows,
    )
}

/// As an application sees it.
pub(super) fn applications(pairs: &Pairs<'_>) -> String {
    let rows = pairs.iter().map(|&(what, ours, theirs)| {
        with(
            what,
            [
                grouped(ours.reg_mr.median),
                grouped(theirs.reg_mr.median),
                ratio(ours.reg_mr.median, theirs.reg_mr.median),
                grouped(ours.dereg_mr.median),
                grouped(theirs.dereg_mr.median),
                ratio(ours.dereg_mr.median, theirs.dereg_mr.median),
            ],
        )
    });
    table(
        &[
            "memory",
            "length",
            "ibv_reg_mr, ours",
            "NVIDIA's",
            "ratio",
            "ibv_dereg_mr, ours",
            "NVIDIA's",
            "ratio",
        ],
        1,
        rows,
    )
}

#[cfg(test)]
mod tests {
    use super::super::record;
    use super::*;

    #[test]
    fn numbers_are_readable() {
        assert_eq!(size(65536), "64 KiB");
        assert_eq!(size(64 << 30), "64 GiB");
        assert_eq!(size(4097), "4097 B");
        assert_eq!(grouped(1_234_567.4), "1,234,567");
        assert_eq!(grouped(-12.0), "-12");
        assert_eq!(time(108_000.0), "108.0 µs");
        assert_eq!(time(3_108_000.0), "3.11 ms");
        assert_eq!(time(3_108_000_000.0), "3.11 s");
        assert_eq!(ratio(1.0, 0.0), "–");
    }

    #[test]
    fn missed_goals_are_marked() {
        let ours = record::rows(&record::tests::lines(1, 100)).expect("rows");
        let theirs = record::rows(&record::tests::lines(2, 200)).expect("rows");
        let pairs = goals::pairs(&ours, &theirs);
        let of = goals::of_registrations(&goals::PERSISTENT, &pairs, &Default::default());
        let text = goals(&[("persistent", &of), ("revocable", &[])]);
        assert!(text.contains("| pins "), "{text}");
        let others = goals::of_registrations(&goals::REVOCABLE, &pairs, &Default::default());
        let both = goals(&[("persistent", &of), ("revocable", &others)]);
        let limits = |name: &str| {
            let line = both.lines().find(|line| line.contains(name));
            line.and_then(|line| Some(line.split('|').nth(2)?.trim().to_owned()))
        };
        assert_eq!(limits("pins").as_deref(), Some("0.5"));
        assert_eq!(limits("mapping, 64 GiB").as_deref(), Some("0.35; 0.33"));
        assert!(
            text.lines()
                .any(|line| line.contains("own cost, 1 GiB") && line.contains("**missed:** 0.5008")),
            "{text}"
        );
        assert!(!text
            .lines()
            .any(|line| line.contains("| pins ") && line.contains("missed")));
        for text in [
            calls(&pairs),
            costs(&pairs),
            memory(&pairs),
            applications(&pairs),
        ] {
            assert_eq!(text.lines().count(), 2 + 4);
            assert!(text
                .lines()
                .all(|line| line.starts_with('|') && line.ends_with('|')));
        }
    }
}
