// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Plans the steps that a command needs and that are not done yet.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::Result;

use crate::arch::Arch;
use crate::paths::Paths;
use crate::progress::output;
use crate::{apt, foreign, kernel, programs, stamp, toolchain};

/// A step of the setup, with its duration and its space in the cache.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Step {
    pub(super) name: String,
    pub(super) why: String,
    /// Prefixes of the titles of the step's stages.
    pub(super) stages: Vec<String>,
    /// Duration from scratch on two processors.
    pub(super) seconds: f64,
    /// Fraction of the duration that scales with the number of processors.
    pub(super) shared: f64,
    /// Space that the step needs in the cache.
    pub(super) mib: u64,
    /// `true` if the step starts from scratch, so its duration is worth saving.
    pub(super) whole: bool,
    /// `true` if the step needs the package sources.
    pub(super) fetches: bool,
}

impl Step {
    /// Returns the duration of the step's stages that are done.
    pub(super) fn taken(&self, stages: &[(String, Duration)]) -> Duration {
        stages
            .iter()
            .filter(|(title, _)| self.stages.iter().any(|stage| title.starts_with(stage)))
            .map(|(_, duration)| *duration)
            .sum()
    }
}

/// Packages to install, and the space that they need outside the cache.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Packages {
    pub(super) names: Vec<String>,
    pub(super) installed_mib: u64,
    pub(super) download_mib: u64,
}

/// The steps in order, and the packages to install.
#[derive(Debug, Clone, Default)]
pub(super) struct Plan {
    pub(super) steps: Vec<Step>,
    pub(super) packages: Packages,
    pub(super) machines: u64,
}

/// Requirements of a command of the test VM.
pub(crate) struct Wanted<'a> {
    pub(crate) kernels: &'a [&'a str],
    pub(crate) modules: bool,
    /// `true` if the command needs programs for the kernels' architectures. An architecture whose
    /// programs this machine cannot run also needs a root.
    pub(crate) programs: bool,
    /// Number of VMs that run at once.
    pub(crate) machines: usize,
}

/// Returns a sentence like "src/persistent.rs has changed" if files of a stamp have changed.
fn change(stamp: &Path, repo: &Path) -> Option<String> {
    let changed = stamp::changed(stamp, repo);
    let first = changed.first()?;
    Some(match changed.len() {
        1 => format!("{first} has changed"),
        more => format!("{first} and {} more have changed", more - 1),
    })
}

/// Returns a step with default values.
pub(super) fn step(name: &str, why: &str, stages: &[&str]) -> Step {
    Step {
        name: name.to_owned(),
        why: why.to_owned(),
        stages: stages.iter().map(|stage| (*stage).to_owned()).collect(),
        seconds: 0.0,
        shared: 0.0,
        mib: 0,
        whole: true,
        fetches: false,
    }
}

pub(super) fn plan(paths: &Paths, wanted: &Wanted<'_>) -> Result<Plan> {
    let mut plan = Plan {
        machines: wanted.machines as u64,
        ..Plan::default()
    };

    let archs = kernel::archs(wanted.kernels);
    let is_foreign = wanted.programs && archs.iter().any(|arch| arch.foreign().is_some());
    let names = apt::missing_all(if is_foreign { apt::FOREIGN } else { "" })?;
    if !names.is_empty() {
        plan.packages = measure(names);
        let names = &plan.packages.names;
        let mut why = format!("{} missing", names[..names.len().min(3)].join(", "));
        if let Some(more @ 1..) = names.len().checked_sub(3) {
            why = why.replace(" missing", &format!(" and {more} more missing"));
        }
        plan.steps.push(Step {
            seconds: 28.0 * names.len() as f64 / 25.0,
            fetches: true,
            ..step("packages", &why, &["packages:"])
        });
    }

    let mut sources = Vec::new();
    for name in wanted.kernels {
        if let Some(flavour) = kernel::flavour(name) {
            let is_compiled = plan_kernel(paths, flavour, &mut sources, &mut plan);
            if wanted.modules {
                plan_modules(paths, flavour, is_compiled, &mut plan);
            }
        }
    }
    if toolchain::find_bindgen(paths).is_none() {
        plan.steps.push(Step {
            seconds: 5.0,
            mib: 12,
            fetches: true,
            ..step(
                "bindgen",
                "no installed bindgen is new enough for the kernel",
                &["bindgen"],
            )
        });
    }
    if !sources.is_empty() && !paths.cache.join("suites").exists() {
        // Adds space for package lists of suites that this machine's apt does not use.
        if let Some(first) = plan.steps.iter_mut().find(|step| step.fetches) {
            first.mib += 65;
        }
    }
    for arch in archs {
        if wanted.programs {
            plan_programs(paths, arch, &mut plan);
        }
    }
    Ok(plan)
}

/// Plans a kernel and its source, unless `sources` already contains the source. Returns `true` if
/// the kernel must be compiled.
fn plan_kernel(
    paths: &Paths,
    flavour: &kernel::Flavour,
    sources: &mut Vec<&'static str>,
    plan: &mut Plan,
) -> bool {
    let name = flavour.name;
    let home = paths.cache.join("kernel");
    let source = home.join(flavour.source());
    if !source.join("source.name").exists() && !sources.contains(&flavour.source()) {
        sources.push(flavour.source());
        let begins = ["looking", "downloading", "unpacking"]
            .map(|what| format!("kernel {}: {what}", flavour.name));
        plan.steps.push(Step {
            seconds: 20.0,
            mib: 850,
            fetches: true,
            stages: begins.to_vec(),
            ..step(
                &format!("source of kernel {}", flavour.source()),
                "not fetched yet",
                &[],
            )
        });
    }
    let stamp = home.join(name).join("stamp");
    // An interrupted build continues where it stopped.
    let begun = home.join(name).join("build/.config").exists();
    let why = match (stamp.exists(), begun) {
        (false, false) => Some("not built yet".to_owned()),
        (false, true) => Some("not complete yet".to_owned()),
        (true, _) => change(&stamp, &paths.repo),
    };
    let is_compiled = why.is_some();
    if let Some(why) = why {
        let begins = ["configuring", "compiling"].map(|what| format!("kernel {name}: {what}"));
        plan.steps.push(Step {
            seconds: flavour.seconds,
            shared: 0.8,
            mib: if begun { 0 } else { flavour.mib },
            whole: !begun && !stamp.exists(),
            stages: begins.to_vec(),
            ..step(&format!("kernel {name}"), &why, &[])
        });
    }
    is_compiled
}

/// Plans the modules for a kernel.
fn plan_modules(paths: &Paths, flavour: &kernel::Flavour, is_compiled: bool, plan: &mut Plan) {
    let name = flavour.name;
    let products = paths.cache.join("modules").join(name);
    let names = match flavour.is_stock() {
        true => ["gpu-nvidia", "ours-portable-on-nvidia"],
        false => ["gpu", "ours"],
    };
    let modules = names.map(|name| products.join(format!("{name}.stamp")));
    let why = if modules.iter().any(|stamp| !stamp.exists()) {
        Some("not built yet".to_owned())
    } else if is_compiled {
        Some("the kernel is rebuilt".to_owned())
    } else {
        modules.iter().find_map(|stamp| change(stamp, &paths.repo))
    };
    if let Some(why) = why {
        plan.steps.push(Step {
            seconds: 12.0,
            shared: 0.5,
            mib: 20,
            whole: !products.exists(),
            fetches: !paths.cache.join("control/version").exists(),
            ..step(
                &format!("modules for {name}"),
                &why,
                &["module ", "control:"],
            )
        });
    }
}

fn plan_programs(paths: &Paths, arch: Arch, plan: &mut Plan) {
    if let (Some(name), false) = (arch.foreign(), foreign::is_there(paths, arch)) {
        plan.steps.push(Step {
            seconds: 30.0,
            mib: 700,
            fetches: true,
            ..step(
                &format!("root for {name}"),
                "not made of Debian's packages yet",
                &[&format!("{name}:")],
            )
        });
    }
    let gdr = programs::gdr(paths, arch);
    let whole = !gdr.exists();
    let why = if whole {
        Some("not compiled yet".to_owned())
    } else {
        change(&gdr.with_extension("stamp"), &paths.repo)
    };
    if let Some(why) = why {
        plan.steps.push(Step {
            seconds: 111.0,
            shared: 0.7,
            mib: if whole { 400 } else { 20 },
            whole,
            ..step("programs", &why, &["programs:"])
        });
    }
}

/// Returns apt's sizes of these packages and their dependencies. If apt must read its lists before
/// it knows some of the packages, returns fixed sizes. The fixed sizes are those of all packages of
/// the test runner, on a Debian 12 without any of these packages.
fn measure(names: Vec<String>) -> Packages {
    let sizes = || -> Option<(u64, u64)> {
        let simulated = output(
            Command::new("apt-get")
                .args(["-s", "-q", "install", "--no-install-recommends"])
                .args(&names)
                .env("LC_ALL", "C"),
        )
        .ok()?;
        let new: Vec<&str> = simulated
            .lines()
            .filter_map(|line| line.strip_prefix("Inst ")?.split(' ').next())
            .collect();
        let shown = output(
            Command::new("apt-cache")
                .args(["show", "--no-all-versions"])
                .args(&new)
                .env("LC_ALL", "C"),
        )
        .ok()?;
        Some((
            sum(&shown, "Installed-Size: ") >> 10,
            sum(&shown, "Size: ") >> 20,
        ))
    };
    let (installed_mib, download_mib) = sizes().unwrap_or((2100, 430));
    Packages {
        names,
        installed_mib,
        download_mib,
    }
}

/// Returns the sum of a field's numbers.
pub(super) fn sum(text: &str, field: &str) -> u64 {
    text.lines()
        .filter_map(|line| line.strip_prefix(field)?.trim().parse::<u64>().ok())
        .sum()
}
