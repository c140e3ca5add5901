// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! The medians of what `gdr bench` prints, over repeats and rounds.

use std::collections::btree_map::Entry;
use std::collections::BTreeMap;

use anyhow::{ensure, Context as _, Result};
use peermem_figures::{Alive, Cost, Costs, Hca, Line, Memory, Registration, What};
use serde::Serialize;

/// The middle of some samples, and how far they lie apart.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(super) struct Figure {
    pub(super) median: f64,
    pub(super) least: f64,
    pub(super) most: f64,
    /// Between these lies the middle half of the samples.
    pub(super) lower: f64,
    pub(super) upper: f64,
    pub(super) samples: usize,
}

impl Figure {
    pub(super) fn of(mut samples: Vec<f64>) -> Result<Self> {
        samples.sort_by(f64::total_cmp);
        let (Some(&least), Some(&most)) = (samples.first(), samples.last()) else {
            anyhow::bail!("no samples");
        };
        let middle = samples.len() / 2;
        let median = if samples.len() % 2 == 1 {
            samples[middle]
        } else {
            (samples[middle - 1] + samples[middle]) / 2.0
        };
        let at = |index: usize| samples.get(index).copied().unwrap_or(median);
        Ok(Self {
            median,
            least,
            most,
            lower: at((samples.len() - 1) / 4),
            upper: at((samples.len() - 1) * 3 / 4),
            samples: samples.len(),
        })
    }

    /// How wide the middle half of the samples is, in parts of the median.
    pub(super) fn spread(&self) -> f64 {
        if self.upper == self.lower {
            0.0
        } else {
            (self.upper - self.lower) / self.median.abs()
        }
    }
}

/// All of one module about one kind of registration. Instructions, unless another unit stands there.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Row {
    pub(super) pins: u64,
    pub(super) unpins: u64,
    pub(super) maps: u64,
    pub(super) unmaps: u64,
    /// Register and deregister: the module's functions without the provider's calls.
    pub(super) own: Figure,
    pub(super) own_register: Figure,
    pub(super) own_deregister: Figure,
    /// By function.
    pub(super) functions: BTreeMap<String, Figure>,
    /// What of `own` is `acquire`, under ib_core's mutex for the whole machine; and the pins and unpins in it.
    pub(super) mutex: Figure,
    pub(super) mutex_pins: u64,
    pub(super) mutex_unpins: u64,
    /// The stand-in's part: all, and what its map and unmap took.
    pub(super) standin: Figure,
    pub(super) standin_mapping: Figure,
    /// As the application sees it, in nanoseconds of the machine's clock.
    pub(super) reg_mr: Figure,
    pub(super) dereg_mr: Figure,
    pub(super) entries: u64,
    /// Kernel memory of the module's own, in bytes.
    pub(super) held: u64,
    pub(super) peak: u64,
    pub(super) hca: Hca,
}

/// Counts do not vary; where they do, what is measured is not what was meant.
fn same<T: PartialEq + Copy + std::fmt::Debug>(
    name: &str,
    values: impl IntoIterator<Item = T>,
) -> Result<T> {
    let mut values = values.into_iter();
    let first = values.next().with_context(|| format!("no {name}"))?;
    for value in values {
        ensure!(value == first, "{name}: {first:?} and {value:?}");
    }
    Ok(first)
}

fn sum(costs: &Costs) -> i64 {
    costs.values().map(|cost| cost.own).sum()
}

fn functions(sample: &Registration) -> BTreeMap<&str, f64> {
    let mut sums = BTreeMap::new();
    for (name, cost) in sample.register.iter().chain(&sample.deregister) {
        *sums.entry(name.as_str()).or_default() += cost.own as f64;
    }
    sums
}

fn row(lines: &[Line], what: &What) -> Result<Row> {
    let samples: Vec<&Registration> = lines
        .iter()
        .filter_map(|line| match line {
            Line::Registration(found) if found.what == *what => Some(found),
            _ => None,
        })
        .collect();
    let figure = |take: &dyn Fn(&Registration) -> f64| {
        Figure::of(samples.iter().map(|sample| take(sample)).collect())
    };
    let both = |sample: &Registration, take: &dyn Fn(&Cost) -> u64| -> f64 {
        sample
            .register
            .values()
            .chain(sample.deregister.values())
            .map(take)
            .sum::<u64>() as f64
    };
    let count = |name: &str, take: &dyn Fn(&Registration) -> u64| {
        same(name, samples.iter().map(|sample| take(sample)))
    };
    let acquire = |sample: &Registration, take: &dyn Fn(&Cost) -> u64| {
        sample.register.get("acquire").map_or(0, take)
    };
    let mut by_function = BTreeMap::new();
    let names = samples
        .first()
        .map(|sample| functions(sample))
        .unwrap_or_default();
    for name in names.keys() {
        let found = figure(&|sample| functions(sample).get(name).copied().unwrap_or(0.0))?;
        by_function.insert((*name).to_owned(), found);
    }
    let memory = |take: &dyn Fn(&Memory) -> u64| -> Result<u64> {
        // Hardly ever more than one object apart: what the kernel allocates for itself in a callback.
        let found = lines.iter().filter_map(|line| match line {
            Line::Memory(found) if found.what == *what => Some(take(found) as f64),
            _ => None,
        });
        Ok(Figure::of(found.collect())?.median as u64)
    };
    let tables = lines.iter().filter_map(|line| match line {
        Line::Table(found) if found.what == *what => Some(found.hca),
        _ => None,
    });
    Ok(Row {
        pins: count("pins", &|sample| sample.pins)?,
        unpins: count("unpins", &|sample| sample.unpins)?,
        maps: count("maps", &|sample| sample.maps)?,
        unmaps: count("unmaps", &|sample| sample.unmaps)?,
        own: figure(&|sample| (sum(&sample.register) + sum(&sample.deregister)) as f64)?,
        own_register: figure(&|sample| sum(&sample.register) as f64)?,
        own_deregister: figure(&|sample| sum(&sample.deregister) as f64)?,
        functions: by_function,
        mutex: figure(&|sample| sample.register.get("acquire").map_or(0, |cost| cost.own) as f64)?,
        mutex_pins: count("pins in acquire", &|sample| {
            acquire(sample, &|cost| cost.pins)
        })?,
        mutex_unpins: count("unpins in acquire", &|sample| {
            acquire(sample, &|cost| cost.unpins)
        })?,
        standin: figure(&|sample| both(sample, &|cost| cost.provider))?,
        standin_mapping: figure(&|sample| {
            let of =
                |costs: &Costs, name: &str| costs.get(name).map_or(0, |cost| cost.provider) as f64;
            of(&sample.register, "dma_map") + of(&sample.deregister, "dma_unmap")
        })?,
        reg_mr: figure(&|sample| sample.reg_mr_ns as f64)?,
        dereg_mr: figure(&|sample| sample.dereg_mr_ns as f64)?,
        entries: count("entries", &|sample| sample.entries)?,
        held: memory(&|found| found.held)?,
        peak: memory(&|found| found.peak)?,
        hca: same("HCA pages", tables)?,
    })
}

/// The rows of one module's lines, of all rounds.
pub(super) fn rows(lines: &[Line]) -> Result<BTreeMap<What, Row>> {
    let mut rows = BTreeMap::new();
    for line in lines {
        let Line::Registration(found) = line else {
            continue;
        };
        if let Entry::Vacant(place) = rows.entry(found.what.clone()) {
            let what = place.key();
            let row = row(lines, what)
                .with_context(|| format!("{} bytes, {}", what.bytes, what.layout))?;
            place.insert(row);
        }
    }
    Ok(rows)
}

/// From a free to the last region dead, by the number of regions.
pub(super) fn revocations(lines: &[Line]) -> Result<BTreeMap<u64, Figure>> {
    let mut samples: BTreeMap<u64, Vec<f64>> = BTreeMap::new();
    for line in lines {
        if let Line::Revocation(found) = line {
            let of = samples.entry(found.regions).or_default();
            of.push(found.free_ns as f64);
        }
    }
    samples
        .into_iter()
        .map(|(regions, samples)| Ok((regions, Figure::of(samples)?)))
        .collect()
}

/// A registration beside others that are alive. Instructions, unless another unit stands there.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Beside {
    pub(super) own: Figure,
    pub(super) reg_mr: Figure,
    pub(super) dereg_mr: Figure,
    /// Kernel memory of the module's own, in bytes, for each of them; None where there are none.
    pub(super) held: Option<f64>,
    /// The allocations in which that is.
    pub(super) objects: Option<f64>,
}

/// By the number of those that are alive.
pub(super) fn alive(lines: &[Line]) -> Result<BTreeMap<u64, Beside>> {
    let mut samples: BTreeMap<u64, Vec<&Alive>> = BTreeMap::new();
    for line in lines {
        if let Line::Alive(found) = line {
            samples.entry(found.regions).or_default().push(found);
        }
    }
    samples
        .into_iter()
        .map(|(regions, samples)| {
            let figure = |take: fn(&Alive) -> f64| {
                Figure::of(samples.iter().map(|sample| take(sample)).collect())
            };
            let held = figure(|sample| sample.held as f64)?.median;
            let objects = figure(|sample| sample.objects as f64)?.median;
            let each = |all: f64| (regions > 0).then_some(all / regions as f64);
            let beside = Beside {
                own: figure(|sample| (sample.register + sample.deregister) as f64)?,
                reg_mr: figure(|sample| sample.reg_mr_ns as f64)?,
                dereg_mr: figure(|sample| sample.dereg_mr_ns as f64)?,
                held: each(held),
                objects: each(objects),
            };
            Ok((regions, beside))
        })
        .collect()
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Lines of a module whose functions take `own` instructions each time.
    pub(in crate::bench) fn lines(pins: u64, own: i64) -> Vec<Line> {
        let cost = |own: i64, pins: u64, unpins: u64| {
            format!(
                r#"{{"calls":1,"own":{own},"provider":500,"pins":{pins},"unpins":{unpins},"maps":0,"unmaps":0}}"#
            )
        };
        let mut lines = Vec::new();
        for (layout, bytes) in [
            ("contiguous", 65536_u64),
            ("contiguous", 1 << 30),
            ("contiguous", 64 << 30),
            ("64k", 1 << 30),
        ] {
            let what = format!(r#""layout":"{layout}","bytes":{bytes}"#);
            for extra in 0..3 {
                lines.push(format!(
                    r#"{{"kind":"registration",{what},"register":{{"acquire":{},"dma_map":{}}},"deregister":{{"release":{}}},"pins":{pins},"unpins":{pins},"maps":1,"unmaps":1,"entries":1,"reg_mr_ns":9000,"dereg_mr_ns":8000}}"#,
                    cost(own + extra, pins, pins - 1), cost(own, 0, 0), cost(own, 0, 1)
                ));
            }
            lines.push(format!(
                r#"{{"kind":"memory",{what},"held":{},"peak":{}}}"#,
                own * 10,
                own * 11
            ));
            lines.push(format!(r#"{{"kind":"table",{what},"entries":1,"old_page":65536,"old_pages":16384,"new_page":1073741824,"new_pages":1}}"#));
        }
        for regions in [1, 1000] {
            lines.push(format!(
                r#"{{"kind":"revocation","regions":{regions},"free_ns":{}}}"#,
                own * regions
            ));
        }
        for regions in [0, 1000] {
            lines.push(format!(
                r#"{{"kind":"alive","regions":{regions},"register":{own},"deregister":10,"reg_mr_ns":9000,"dereg_mr_ns":8000,"held":{},"objects":{regions}}}"#,
                own * regions
            ));
        }
        lines.push(r#"{"kind":"calibration","function":20,"provider_call":40}"#.to_owned());
        lines
            .iter()
            .map(|line| serde_json::from_str(line).expect("a line"))
            .collect()
    }

    #[test]
    fn figures_are_medians() {
        let figure = Figure::of(vec![3.0, 1.0, 2.0]).expect("samples");
        assert_eq!((figure.median, figure.least, figure.most), (2.0, 1.0, 3.0));
        assert_eq!(figure.spread(), 0.5);
        let many = Figure::of((1..=9).map(f64::from).collect()).expect("samples");
        assert_eq!((many.lower, many.upper), (3.0, 7.0));
        assert_eq!(Figure::of(vec![1.0, 2.0]).expect("samples").median, 1.5);
        assert_eq!(Figure::of(vec![0.0, 0.0]).expect("samples").spread(), 0.0);
        assert!(Figure::of(Vec::new()).is_err());
    }

    #[test]
    fn rows_of_lines() {
        let rows = rows(&lines(2, 100)).expect("rows");
        assert_eq!(rows.len(), 4);
        let what = What {
            layout: "contiguous".to_owned(),
            bytes: 65536,
        };
        let row = &rows[&what];
        assert_eq!((row.own.median, row.own.samples), (301.0, 3));
        assert_eq!(
            (row.mutex.median, row.mutex_pins, row.mutex_unpins),
            (101.0, 2, 1)
        );
        assert_eq!((row.held, row.peak), (1000, 1100));
        assert_eq!(row.functions["dma_map"].median, 100.0);
        assert_eq!(row.hca.new_pages, 1);
    }

    #[test]
    fn revocations_by_number() {
        let found = revocations(&lines(1, 100)).expect("samples");
        assert_eq!(found.len(), 2);
        assert_eq!(found[&1000].median, 100_000.0);
    }

    #[test]
    fn alive_by_number() {
        let found = alive(&lines(1, 100)).expect("samples");
        assert_eq!((found[&0].own.median, found[&0].held), (110.0, None));
        assert_eq!(found[&1000].held, Some(100.0));
        assert_eq!((found[&0].objects, found[&1000].objects), (None, Some(1.0)));
    }

    #[test]
    fn counts_that_vary_are_an_error() {
        let mut all = lines(1, 100);
        all.extend(lines(2, 100));
        let error = format!("{:#}", rows(&all).expect_err("pins differ"));
        assert!(error.contains("pins: 1 and 2"), "{error}");
        assert!(rows(&[]).expect("rows").is_empty());
    }
}
