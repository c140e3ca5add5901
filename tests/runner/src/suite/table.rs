// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Parses `tests/runner/suite`, the table of the runs.

use std::collections::BTreeMap;

use anyhow::{bail, Context as _, Result};
use clap::ValueEnum as _;

use super::run::{Place, Run, Same, BASE};
use crate::debian;
use crate::results::Format;
use crate::vm::Build;

#[derive(Default)]
pub(super) struct Table {
    pub(super) runs: Vec<Run>,
    pub(super) smoke: Vec<Run>,
    /// Words of capital letters, and their definitions.
    words: BTreeMap<&'static str, &'static str>,
}

impl Table {
    pub(super) fn parse(text: &str) -> Result<Self> {
        let mut table = Self::default();
        // A line that begins with blanks continues the previous line.
        let text: &'static str = text.replace("\n  ", " ").leak();
        for line in text
            .lines()
            .filter(|line| !line.is_empty() && !line.starts_with('#'))
        {
            table.add(line).with_context(|| line.to_owned())?;
        }
        Ok(table)
    }

    fn add(&mut self, line: &'static str) -> Result<()> {
        if let Some((name, words)) = line
            .split_once(" = ")
            .filter(|(name, _)| !name.contains(' '))
        {
            self.words.insert(name, self.expanded(words));
            return Ok(());
        }
        let mut columns = line.split('|').map(str::trim);
        let mut next = || columns.next().unwrap_or_default();
        let (name, what, options, properties) = (next(), next(), next(), next());
        let place = self.place(what, options)?;
        let format = match place {
            Place::Cargo(_) => Format::Cargo,
            _ => Format::Ktap,
        };
        let mut run = Run {
            name,
            place,
            format,
            ..BASE
        };
        for property in properties
            .split("; ")
            .filter(|property| !property.is_empty())
        {
            let property = self.words.get(property).copied().unwrap_or(property);
            change(&mut run, property).with_context(|| property.to_owned())?;
        }
        match name.starts_with("smoke: ") {
            true => self.smoke.push(run),
            false => self.runs.push(run),
        }
        Ok(())
    }

    fn expanded(&self, text: &'static str) -> &'static str {
        let words = text
            .split(' ')
            .map(|word| self.words.get(word).copied().unwrap_or(word));
        words.collect::<Vec<_>>().join(" ").leak()
    }

    fn place(&self, what: &'static str, options: &'static str) -> Result<Place> {
        let (kind, rest) = what.split_once(' ').unwrap_or((what, ""));
        let build = Build::from_str(rest, false).ok();
        Ok(match kind {
            "vm" => Place::Vm {
                options: self.expanded(options),
                command: self.expanded(rest),
            },
            "cargo" => Place::Cargo(rest),
            "hazards" => Place::Hazards(build),
            "mutants" => Place::Mutants(build.context("no build")?),
            "cost" => Place::Cost,
            "debian" => Place::Debian(debian::release(rest).context("no such host")?),
            "contact" => Place::Contact,
            "packages" => Place::Packages,
            "lint" => Place::Lint,
            _ => bail!("no such place"),
        })
    }
}

fn change(run: &mut Run, property: &'static str) -> Result<()> {
    let (key, value) = property.split_once(' ').unwrap_or((property, ""));
    let words = || value.split_whitespace();
    let same = run.same_as.as_mut().context("no run to compare with");
    match key {
        "full" => run.only_in_full = true,
        "on" => run.kernel = Some(value),
        "like" => {
            run.same_as = Some(Same {
                run: value,
                but_for: &[],
                in_part: false,
            });
        }
        "but" => {
            same?.but_for = value
                .trim_start_matches("for ")
                .split(" / ")
                .collect::<Vec<_>>()
                .leak();
        }
        "part" => same?.in_part = true,
        "also" => run.also = words().collect::<Vec<_>>().leak(),
        "groups" => {
            let group = |word: &'static str| {
                let (name, count) = word.split_once('=').context("no count")?;
                Ok((name, count.parse()?))
            };
            run.groups = words().map(group).collect::<Result<Vec<_>>>()?.leak();
        }
        "src" => run.src = Some(words().collect::<Vec<_>>().leak()),
        "format" if value == "ktap" => run.format = Format::Ktap,
        "format" if value == "unittest" => run.format = Format::Unittest,
        "format" if value == "demo" => run.format = Format::Demo,
        _ => bail!("no such property"),
    }
    Ok(())
}
