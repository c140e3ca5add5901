// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Progress output of long work: lines for each stage, with a running count.

use std::io::{BufRead as _, BufReader, Read, Write as _};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};
use std::{fs, thread};

use anyhow::{bail, Context as _, Result};

/// Number of lines to show from the end of a failed command's output.
const TAIL: usize = 40;

/// Formats a duration: "1 min 05 s", "3.2 s".
pub(crate) fn duration(elapsed: Duration) -> String {
    let seconds = elapsed.as_secs();
    if seconds >= 60 {
        format!("{} min {:02} s", seconds / 60, seconds % 60)
    } else if seconds >= 10 {
        format!("{seconds} s")
    } else {
        format!("{:.1} s", elapsed.as_secs_f64())
    }
}

/// A stage of the work: its title and its start.
pub(crate) struct Stage {
    title: String,
    started: Instant,
    shown: Instant,
}

impl Stage {
    pub(crate) fn begin(title: impl Into<String>) -> Self {
        let stage = Self {
            title: title.into(),
            started: Instant::now(),
            shown: Instant::now(),
        };
        eprintln!("  {} …", stage.title);
        stage
    }

    /// Shows the progress of the stage every 30 seconds.
    fn show(&mut self, state: &str) {
        if self.shown.elapsed() >= Duration::from_secs(30) {
            self.shown = Instant::now();
            let elapsed = duration(self.started.elapsed());
            eprintln!("  {} … {state}, {elapsed}", self.title);
        }
    }

    pub(crate) fn done(self, result: &str) {
        let separator = if result.is_empty() { "" } else { ": " };
        let elapsed = duration(self.started.elapsed());
        eprintln!("  {}{separator}{result} ({elapsed})", self.title);
    }

    /// Runs a command with its output in a log, and shows no count.
    pub(crate) fn quietly(&mut self, command: &mut Command, log: &Path) -> Result<()> {
        self.run(command, log, "", |_| false).map(drop)
    }

    /// Runs a command with its output in a log, and counts all lines.
    pub(crate) fn lines(&mut self, command: &mut Command, log: &Path) -> Result<usize> {
        self.run(command, log, "lines", |_| true)
    }

    /// Runs `make` with its output in a log, and counts its steps.
    pub(crate) fn steps(&mut self, command: &mut Command, log: &Path) -> Result<usize> {
        self.run(command, log, "steps", |line| line.starts_with("  "))
    }

    /// Runs apt with its output in a log, and counts the files that it fetches.
    pub(crate) fn files(&mut self, command: &mut Command, log: &Path) -> Result<()> {
        self.run(command, log, "files", |line| line.starts_with("Get:"))
            .map(drop)
    }

    /// Runs a command with its output in a log, and counts the lines that `counts` accepts. `unit`
    /// is the name of the counted items.
    pub(crate) fn run(
        &mut self,
        command: &mut Command,
        log: &Path,
        unit: &str,
        mut counts: impl FnMut(&str) -> bool,
    ) -> Result<usize> {
        if let Some(parent) = log.parent() {
            fs::create_dir_all(parent)?;
        }
        let mut file = fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(log)
            .with_context(|| format!("cannot write {}", log.display()))?;
        writeln!(file, "$ {command:?}")?;
        let program = name(command);
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start {program}"))?;
        let (sender, lines) = mpsc::channel::<String>();
        fn boxed(pipe: impl Read + Send + 'static) -> Box<dyn Read + Send> {
            Box::new(pipe)
        }
        let outputs = [
            child.stdout.take().map(boxed),
            child.stderr.take().map(boxed),
        ];
        for output in outputs.into_iter().flatten() {
            let sender = sender.clone();
            thread::spawn(move || {
                let lines = BufReader::new(output).split(b'\n').map_while(Result::ok);
                let mut texts =
                    lines.map(|line| String::from_utf8_lossy(&line).trim_end().to_owned());
                texts.try_for_each(|text| sender.send(text))
            });
        }
        drop(sender);
        let mut count = 0;
        let mut tail: Vec<String> = Vec::new();
        loop {
            match lines.recv_timeout(Duration::from_millis(250)) {
                Ok(line) => {
                    writeln!(file, "{line}")?;
                    if counts(&line) {
                        count += 1;
                    }
                    if tail.len() == TAIL {
                        tail.remove(0);
                    }
                    tail.push(line);
                }
                Err(mpsc::RecvTimeoutError::Timeout) => {}
                Err(mpsc::RecvTimeoutError::Disconnected) => break,
            }
            self.show(&if count > 0 {
                format!("{count} {unit}")
            } else {
                "running".to_owned()
            });
        }
        let status = child.wait()?;
        if !status.success() {
            for line in &tail {
                eprintln!("    {line}");
            }
            bail!(
                "{}: {program} failed ({status}); all output: {}",
                self.title,
                log.display()
            );
        }
        Ok(count)
    }
}

/// Returns the program of a command, or the program that `setpriv` starts.
fn name(command: &Command) -> String {
    let program = command.get_program().to_string_lossy().into_owned();
    match (program.as_str(), command.get_args().nth(2)) {
        ("setpriv", Some(started)) => started.to_string_lossy().into_owned(),
        _ => program,
    }
}

/// Returns the standard output of a command, trimmed.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command
        .stdin(Stdio::null())
        .stderr(Stdio::piped())
        .output()
        .with_context(|| format!("cannot start {program}"))?;
    if !output.status.success() {
        bail!(
            "{program} failed ({}): {}",
            output.status,
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}
