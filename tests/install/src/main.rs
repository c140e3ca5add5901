// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Installs the module on synthetic hosts, and checks the results with kmod, dkms and systemd.
//!
//! The hosts are folders with the layouts of NVIDIA's installer and of the distributions. Their
//! modules are small ELF files that cannot be loaded. The tools that read these files are real. The
//! program prints KTAP, with a note for each value that it checks. Arguments select the cases whose
//! names contain them.

mod deb;
mod dkms;
mod forge;
mod host;
mod layouts;
mod service;
mod tools;

use std::fmt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{bail, Result};

/// Reason why a case cannot run on this machine.
#[derive(Debug)]
struct Skip(String);

impl fmt::Display for Skip {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Skip {}

/// Prints the checked values as notes.
#[derive(Clone, Copy)]
struct Log;

impl Log {
    fn note(self, text: impl fmt::Display) {
        for line in text.to_string().lines() {
            println!("# {line}");
        }
    }

    fn equal(self, what: &str, saw: impl fmt::Display, wanted: impl fmt::Display) -> Result<()> {
        let (saw, wanted) = (saw.to_string(), wanted.to_string());
        self.note(format!("{what}: {saw}"));
        if saw != wanted {
            bail!("{what}: saw {saw}, wanted {wanted}");
        }
        Ok(())
    }

    fn that(self, what: &str, holds: bool) -> Result<()> {
        self.note(format!("{what}: {}", if holds { "yes" } else { "no" }));
        if !holds {
            bail!("not true: {what}");
        }
        Ok(())
    }
}

/// A case: its name and its function.
struct Case {
    name: String,
    run: Box<dyn Fn(Log) -> Result<()>>,
}

impl Case {
    fn new(name: impl Into<String>, run: impl Fn(Log) -> Result<()> + 'static) -> Self {
        Self {
            name: name.into(),
            run: Box::new(run),
        }
    }
}

/// Returns the path of a file of the repository.
fn repository(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .join(name)
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let mut cases = layouts::cases();
    cases.extend(dkms::cases());
    cases.extend(service::cases());
    cases.extend(deb::cases());
    cases.extend(tools::cases());
    cases.retain(|case| words.is_empty() || words.iter().any(|word| case.name.contains(word)));

    println!("KTAP version 1\n1..{}", cases.len());
    let mut all_well = true;
    for (number, case) in cases.iter().enumerate() {
        let (number, name) = (number + 1, &case.name);
        match (case.run)(Log) {
            Ok(()) => println!("ok {number} {name}"),
            Err(error) => match error.downcast_ref::<Skip>() {
                Some(Skip(reason)) => println!("ok {number} {name} # SKIP {reason}"),
                None => {
                    Log.note(format!("failure: {error:#}"));
                    println!("not ok {number} {name}");
                    all_well = false;
                }
            },
        }
    }
    if all_well {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}
