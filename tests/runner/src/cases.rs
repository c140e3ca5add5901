// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Runs commands that print test results, in a VM or on this machine, and parses the results.

use std::process::{Output, Stdio};

use anyhow::{Context as _, Result};

use crate::paths::Paths;
use crate::results::{Format, Reader, Test, Verdict};
use crate::toolchain::Toolchain;
use crate::vm;
use crate::vm::Options;

/// Runs a command that prints test results in a VM. An exit status that contradicts the results is
/// reported as a failure.
pub(crate) fn machine(
    paths: &Paths,
    options: &Options,
    boot: &vm::Boot,
    command: &[String],
    format: Format,
) -> Result<(vm::Outcome, Vec<Test>)> {
    let (mut outcome, (reader, said)) = vm::run_with(
        paths,
        options,
        boot,
        command,
        (Reader::new(format), Vec::new()),
        |(reader, said), line, is_error| {
            said.push(line.to_owned());
            if !is_error {
                reader.line(line);
            }
        },
    )?;
    let (tests, mut problems) = reader.finish();
    problems.append(&mut outcome.failures);
    status_problem(outcome.status, &tests, &mut problems);
    add_last_words(&said, &mut problems);
    outcome.failures = problems;
    Ok((outcome, tests))
}

/// Adds a problem if a program's exit status contradicts its test results.
pub(crate) fn status_problem(status: Option<i32>, tests: &[Test], problems: &mut Vec<String>) {
    let Some(status) = status else {
        return;
    };
    let failed = tests.iter().any(|test| test.verdict == Verdict::Failed);
    if (status != 0) != failed {
        problems.push(format!(
            "the program's exit status is {status}, {} failed tests",
            if failed { "with" } else { "without" }
        ));
    }
}

/// Appends the last lines of the program's output to the last problem, if there is a problem.
pub(crate) fn add_last_words(said: &[String], problems: &mut [String]) {
    if let (Some(last), false) = (problems.last_mut(), said.is_empty()) {
        let tail = &said[said.len().saturating_sub(20)..];
        last.push_str(&format!(
            "\n    its last output:\n    {}",
            tail.join("\n    ")
        ));
    }
}

/// Runs cargo on this machine and parses test results from its output.
pub(crate) fn on_host(
    paths: &Paths,
    toolchain: &Toolchain,
    format: Format,
    arguments: &str,
) -> Result<(Vec<Test>, Vec<String>)> {
    let output = toolchain
        .cargo(paths)
        .arg("--locked")
        .args(arguments.split_whitespace())
        .current_dir(&paths.repo)
        .stdin(Stdio::null())
        .output()
        .context("cannot start cargo")?;
    read(&output, format, &format!("cargo {arguments}"))
}

/// Returns the tests in the output of a command named `name`.
pub(crate) fn read(
    output: &Output,
    format: Format,
    name: &str,
) -> Result<(Vec<Test>, Vec<String>)> {
    let text = String::from_utf8_lossy(&output.stdout);
    let (tests, mut problems) = Reader::of(format, &text).finish();
    status_problem(output.status.code(), &tests, &mut problems);
    if !output.status.success() {
        let errors = String::from_utf8_lossy(&output.stderr);
        let said: Vec<&str> = text.lines().chain(errors.lines()).collect();
        let tail = &said[said.len().saturating_sub(60)..];
        problems.push(format!("{name}:\n    {}", tail.join("\n    ")));
    }
    Ok((tests, problems))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_exit_status_must_agree_with_the_results() {
        let mut problems = Vec::new();
        status_problem(Some(0), &[Test::new("a", Verdict::Passed)], &mut problems);
        status_problem(Some(1), &[Test::new("a", Verdict::Failed)], &mut problems);
        assert!(problems.is_empty());
        status_problem(Some(1), &[Test::new("a", Verdict::Passed)], &mut problems);
        status_problem(Some(0), &[Test::new("a", Verdict::Failed)], &mut problems);
        assert_eq!(problems.len(), 2);
    }
}
