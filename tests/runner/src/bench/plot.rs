// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Plots of a bench, in SVG: a figure over the length of a registration, or over how many register at once, both on logarithmic
//! scales.

use std::path::Path;

use anyhow::{anyhow, Result};
use peermem_figures::{What, Workers};
use plotters::prelude::*;

use super::goals::Pairs;
use super::record::Row;
use super::table;
use super::timed::Timed;

/// One line of a plot.
pub(super) struct Line {
    name: String,
    pub(super) points: Vec<(f64, f64)>,
    colour: RGBColor,
}

const COLOURS: [RGBColor; 3] = [
    RGBColor(31, 119, 180),
    RGBColor(44, 160, 44),
    RGBColor(214, 39, 40),
];

/// What the axes are.
pub(super) struct Axes {
    x: &'static str,
    x_label: fn(f64) -> String,
    y: &'static str,
}

/// A figure in `unit` over the length of a registration.
pub(super) fn over_length(unit: &'static str) -> Axes {
    Axes {
        x: "length",
        x_label: |x| format!("{:.3} MiB", x / 1_048_576.0),
        y: unit,
    }
}

/// Registrations a second over how many register at once.
pub(super) const OVER_NUMBER: Axes = Axes {
    x: "at once",
    x_label: table::grouped,
    y: "a second",
};

/// What threads or processes reach with each module, and what the provider's lock allows.
pub(super) fn crowds([ours, theirs]: &[Timed; 2], workers: Workers) -> Vec<Line> {
    let of = |name: &str, points, colour| Line {
        name: name.to_owned(),
        points,
        colour,
    };
    let [first, second, third] = COLOURS;
    vec![
        of("ours", ours.reached(workers), first),
        of("NVIDIA's", theirs.reached(workers), third),
        of("the provider's lock", ours.allowed(workers), second),
    ]
}

/// A line for each layout and module; NVIDIA's are paler.
pub(super) fn lines(pairs: &Pairs<'_>, take: impl Fn(&What, &Row) -> f64) -> Vec<Line> {
    let mut lines: Vec<Line> = Vec::new();
    let mut layouts: Vec<&str> = Vec::new();
    for (what, _, _) in pairs {
        if !layouts.contains(&what.layout.as_str()) {
            layouts.push(&what.layout);
        }
    }
    for (name, colour) in layouts.iter().zip(COLOURS.iter().cycle()) {
        let of = |row: &dyn Fn(&(&What, &Row, &Row)) -> f64| {
            pairs
                .iter()
                .filter(|(what, _, _)| what.layout == *name)
                // A logarithmic scale has no zero.
                .map(|pair| (pair.0.bytes as f64, row(pair).max(1.0)))
                .collect::<Vec<_>>()
        };
        let shown = pairs
            .iter()
            .find(|(what, _, _)| what.layout == *name)
            .map_or(*name, |(what, _, _)| table::layout(what));
        let RGBColor(red, green, blue) = *colour;
        let paler = |part: u8| part / 2 + 128;
        lines.push(Line {
            name: format!("ours, {shown}"),
            points: of(&|pair| take(pair.0, pair.1)),
            colour: *colour,
        });
        lines.push(Line {
            name: format!("NVIDIA's, {shown}"),
            points: of(&|pair| take(pair.0, pair.2)),
            colour: RGBColor(paler(red), paler(green), paler(blue)),
        });
    }
    lines
}

/// Draws them.
pub(super) fn draw(file: &Path, title: &str, axes: &Axes, lines: &[Line]) -> Result<()> {
    let all = || lines.iter().flat_map(|line| line.points.iter().copied());
    let range = |values: &dyn Fn() -> Vec<f64>| {
        let least = values().into_iter().fold(f64::INFINITY, f64::min);
        let most = values().into_iter().fold(0.0, f64::max);
        least..most.max(least * 2.0) * 1.5
    };
    if all().next().is_none() {
        return Err(anyhow!("nothing to draw"));
    }
    let wide = range(&|| all().map(|(x, _)| x).collect());
    let high = range(&|| all().map(|(_, y)| y).collect());
    let failed = |error: &dyn std::fmt::Display| anyhow!("{}: {error}", file.display());
    let root = SVGBackend::new(file, (900, 560)).into_drawing_area();
    root.fill(&WHITE).map_err(|error| failed(&error))?;
    let mut chart = ChartBuilder::on(&root)
        .caption(title, ("sans-serif", 20))
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(90)
        .build_cartesian_2d(wide.log_scale(), high.log_scale())
        .map_err(|error| failed(&error))?;
    chart
        .configure_mesh()
        .x_desc(axes.x)
        .y_desc(axes.y)
        .x_label_formatter(&|x| (axes.x_label)(*x))
        .y_label_formatter(&|y| table::grouped(*y))
        .draw()
        .map_err(|error| failed(&error))?;
    for line in lines {
        let colour = line.colour;
        chart
            .draw_series(LineSeries::new(
                line.points.iter().copied(),
                colour.stroke_width(2),
            ))
            .map_err(|error| failed(&error))?
            .label(line.name.clone())
            .legend(move |(x, y)| {
                PathElement::new(vec![(x, y), (x + 18, y)], colour.stroke_width(2))
            });
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE)
        .border_style(BLACK)
        .draw()
        .map_err(|error| failed(&error))?;
    root.present().map_err(|error| failed(&error))
}

#[cfg(test)]
mod tests {
    use super::super::{goals, record, timed};
    use super::*;

    #[test]
    fn a_plot_has_its_lines() {
        let ours = record::rows(&record::tests::lines(1, 100)).expect("rows");
        let theirs = record::rows(&record::tests::lines(2, 200)).expect("rows");
        let pairs = goals::pairs(&ours, &theirs);
        let file = std::env::temp_dir().join(format!("runner-plot-{}.svg", std::process::id()));
        let lines = lines(&pairs, |_, row| row.own.median);
        let drawn = draw(&file, "own cost", &over_length("instructions"), &lines);
        let text = std::fs::read_to_string(&file).unwrap_or_default();
        let _ = std::fs::remove_file(&file);
        drawn.expect("drawn");
        for word in [
            "<svg",
            "own cost",
            "ours, contiguous",
            "NVIDIA&apos;s, fragmented",
        ] {
            assert!(text.contains(word), "{word}");
        }
        assert!(draw(&file, "", &OVER_NUMBER, &[]).is_err());
    }

    #[test]
    fn the_lines_of_many_at_once() {
        let both = [1, 2].map(|slower| Timed::of(&timed::tests::lines(slower)).expect("figures"));
        let lines = crowds(&both, Workers::Threads);
        let found: Vec<_> = lines.iter().map(|line| line.points.clone()).collect();
        assert_eq!(found[0], [(1.0, 780.0), (4.0, 780.0)]);
        assert_eq!(found[1], [(1.0, 390.0), (4.0, 390.0)]);
        assert_eq!(found[2], [(1.0, 800.0), (4.0, 800.0)]);
        let alone = [1, 2].map(|slower| {
            let mut lines = timed::tests::lines(slower);
            lines.retain(
                |line| !matches!(line, peermem_figures::Line::Crowd(found) if found.workers == Workers::Processes),
            );
            Timed::of(&lines).expect("figures")
        });
        assert!(crowds(&alone, Workers::Processes)
            .iter()
            .all(|line| line.points.is_empty()));
    }
}
