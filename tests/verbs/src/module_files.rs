// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! The module's files in debugfs or `/proc` (`docs/observe.md`). Each line has fields `key=value`.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::fs;
use std::path::Path;

use anyhow::{ensure, Context as _, Result};

pub(crate) const DEBUGFS: &str = "/sys/kernel/debug/nvidia_peermem";
const PROC: &str = "/proc/driver/nvidia-peermem";

/// The fields of a line, by key.
pub(crate) type Line = BTreeMap<String, String>;

/// Parses fields `key=value` with one space between them, and an optional text in quotes at the
/// end.
pub(crate) fn parse(line: &str) -> Result<Line> {
    let (words, text) = match line.split_once(" text=\"") {
        Some((words, text)) => (
            words,
            Some(text.strip_suffix('"').context("an open quote")?),
        ),
        None => (line, None),
    };
    let mut keys = Line::new();
    for word in words.split(' ') {
        let (key, value) = word.split_once('=').with_context(|| format!("{line:?}"))?;
        ensure!(!value.contains('"'), "{line:?}");
        let before = keys.insert(key.to_owned(), value.to_owned());
        ensure!(before.is_none(), "{key} twice: {line:?}");
    }
    if let Some(text) = text {
        ensure!(!text.contains('"'), "{line:?}");
        keys.insert("text".to_owned(), text.to_owned());
    }
    Ok(keys)
}

/// Returns the folder in `/proc` if the module has its files there, because it was built for a
/// proprietary nvidia.ko.
pub(crate) fn in_proc() -> Option<&'static str> {
    Path::new(PROC).exists().then_some(PROC)
}

pub(crate) fn folder() -> &'static str {
    in_proc().unwrap_or(DEBUGFS)
}

pub(crate) fn lines(file: &str) -> Result<Vec<Line>> {
    let path = format!("{}/{file}", folder());
    let text = fs::read_to_string(&path).context(path)?;
    ensure!(text.is_empty() || text.ends_with('\n'), "{file}: {text:?}");
    text.lines().map(parse).collect()
}

pub(crate) fn get<'a>(line: &'a Line, key: &str) -> Result<&'a str> {
    line.get(key)
        .map(String::as_str)
        .with_context(|| format!("no {key} in {line:?}"))
}

pub(crate) fn only(file: &str) -> Result<Line> {
    let mut found = lines(file)?;
    ensure!(found.len() == 1, "{file}: {found:?}");
    found.pop().context("none")
}

pub(crate) fn number(line: &Line, key: &str) -> Result<u64> {
    let text = get(line, key)?;
    text.parse()
        .with_context(|| format!("{key}={text} is no number"))
}

/// Checks that a line has these fields.
pub(crate) fn has(line: &Line, fields: &str) -> Result<()> {
    for (key, value) in &parse(fields)? {
        let seen = get(line, key)?;
        ensure!(
            seen == value,
            "{key}={seen} where {value} was expected: {line:?}"
        );
    }
    Ok(())
}

pub(crate) fn no_refusals() -> Result<()> {
    for file in ["refusals", "non_gpu"] {
        let found = lines(file)?;
        ensure!(found.is_empty(), "{file}: {found:?}");
    }
    Ok(())
}

/// Returns all nonzero counts of refusals and of events that belong to no registration. The key is
/// `mode/reason` for a refusal, and the name for another event.
pub(crate) fn counts() -> Result<BTreeMap<String, u64>> {
    nonzero(false)
}

/// Returns the nonzero counts of registrations in each mode, such as registered or revoked ones.
/// The key is `event/mode`.
fn lives() -> Result<BTreeMap<String, u64>> {
    nonzero(true)
}

fn nonzero(lives: bool) -> Result<BTreeMap<String, u64>> {
    let mut counts = BTreeMap::new();
    for line in lines("counters")? {
        let event = get(&line, "event")?;
        let is_refusal = event == "refused";
        let is_life = !is_refusal && line.contains_key("mode");
        let count = number(&line, "count")?;
        if is_life != lives || count == 0 {
            continue;
        }
        let name = match (is_refusal, is_life) {
            (true, _) => format!("{}/{}", get(&line, "mode")?, get(&line, "reason")?),
            (_, true) => format!("{event}/{}", get(&line, "mode")?),
            _ => event.to_owned(),
        };
        ensure!(counts.insert(name, count).is_none(), "twice: {line:?}");
    }
    Ok(counts)
}

pub(crate) fn event(name: &str) -> Result<u64> {
    let all = lines("counters")?;
    let line = all
        .iter()
        .find(|line| line.get("event").is_some_and(|event| event == name));
    number(line.with_context(|| format!("no {name}"))?, "count")
}

fn equal<T: Debug + PartialEq>(found: &T, expected: &T) -> Result<()> {
    ensure!(
        found == expected,
        "counted {found:?} where {expected:?} was expected"
    );
    Ok(())
}

/// Checks that the module has counted exactly these refusals and events.
pub(crate) fn counted(expected: &BTreeMap<String, u64>) -> Result<()> {
    equal(&counts()?, expected)
}

/// Checks that the module's counts of registrations are exactly these.
pub(crate) fn lived(expected: &BTreeMap<String, u64>) -> Result<()> {
    equal(&lives()?, expected)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_has_keys_and_a_text() {
        let line = parse("seq=1 comm=a\\x20b text=\"no room (x=1), or so\"").expect("a line");
        assert_eq!(line["comm"], "a\\x20b");
        assert_eq!(line["text"], "no room (x=1), or so");
        assert_eq!(line.len(), 3);
        for bad in [
            "",
            "seq",
            "a=1 a=2",
            "a=1 text=\"x",
            "a=\"1\"",
            "a=1 text=\"x\"y\"",
        ] {
            assert!(parse(bad).is_err(), "{bad:?}");
        }
    }
}
