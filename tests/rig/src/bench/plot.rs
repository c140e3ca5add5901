// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Plots of a bench, in SVG: a figure over the length of the registration, both on logarithmic scales.

use std::path::Path;

use anyhow::anyhow;
use anyhow::Result;
use plotters::prelude::*;

use super::goals::Pairs;
use super::record::Row;
use super::record::What;
use super::table;

/// One line of a plot.
struct Line {
    name: String,
    points: Vec<(f64, f64)>,
    colour: RGBColor,
}

const COLOURS: [RGBColor; 3] = [
    RGBColor(31, 119, 180),
    RGBColor(44, 160, 44),
    RGBColor(214, 39, 40),
];

/// A line for each layout and module; NVIDIA's are paler.
fn lines(pairs: &Pairs<'_>, take: impl Fn(&What, &Row) -> f64) -> Vec<Line> {
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

/// Draws one figure of both modules.
pub(super) fn draw(
    file: &Path,
    title: &str,
    unit: &str,
    pairs: &Pairs<'_>,
    take: impl Fn(&What, &Row) -> f64,
) -> Result<()> {
    let lines = lines(pairs, take);
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
        .x_desc("length")
        .y_desc(unit)
        .x_label_formatter(&|x| format!("{:.3} MiB", x / 1_048_576.0))
        .y_label_formatter(&|y| table::grouped(*y))
        .draw()
        .map_err(|error| failed(&error))?;
    for line in &lines {
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
    use super::super::goals;
    use super::super::record;
    use super::*;

    #[test]
    fn a_plot_has_its_lines() {
        let ours = record::rows(&record::tests::lines(1, 100)).expect("rows");
        let theirs = record::rows(&record::tests::lines(2, 200)).expect("rows");
        let pairs = goals::pairs(&ours, &theirs);
        let file = std::env::temp_dir().join(format!("rig-plot-{}.svg", std::process::id()));
        let drawn = draw(&file, "own cost", "instructions", &pairs, |_, row| {
            row.own.median
        });
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
        assert!(draw(&file, "", "", &Vec::new(), |_, _| 0.0).is_err());
    }
}
