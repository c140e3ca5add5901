// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! The steps that a command needs and that are not done yet.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::Result;

use crate::arch::Arch;
use crate::paths::Paths;
use crate::progress::output;
use crate::{apt, foreign, kernel, programs, stamp, toolchain};

/// Something that is to be made.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Step {
    pub(super) name: String,
    pub(super) why: String,
    /// Beginnings of the titles of its stages.
    pub(super) stages: Vec<String>,
    /// From nothing, on two processors.
    pub(super) seconds: f64,
    /// Of it, what more processors share.
    pub(super) shared: f64,
    /// In the cache, while it is made.
    pub(super) mib: u64,
    /// Nothing of it is there: its duration is worth keeping.
    pub(super) whole: bool,
    /// Needs the package sources.
    pub(super) fetches: bool,
}

impl Step {
    /// How long its stages took, of those that are done.
    pub(super) fn taken(&self, stages: &[(String, Duration)]) -> Duration {
        stages
            .iter()
            .filter(|(title, _)| self.stages.iter().any(|stage| title.starts_with(stage)))
            .map(|(_, duration)| *duration)
            .sum()
    }
}

/// What packages will take outside of the cache.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Packages {
    pub(super) names: Vec<String>,
    pub(super) installed_mib: u64,
    pub(super) download_mib: u64,
}

/// What is to be made, in order.
#[derive(Debug, Clone, Default)]
pub(super) struct Plan {
    pub(super) steps: Vec<Step>,
    pub(super) packages: Packages,
    pub(super) machines: u64,
}

/// What an action of the test VM's will want.
pub(crate) struct Wanted<'a> {
    pub(crate) kernels: &'a [&'a str],
    pub(crate) modules: bool,
    /// Those for the kernels' processors, and a root where programs of this machine do not run on them.
    pub(crate) programs: bool,
    /// So many machines at once.
    pub(crate) machines: usize,
}

/// "src/persistent.rs has changed", where a stamp's files have.
fn change(stamp: &Path, repo: &Path) -> Option<String> {
    let changed = stamp::changed(stamp, repo);
    let first = changed.first()?;
    Some(match changed.len() {
        1 => format!("{first} has changed"),
        more => format!("{first} and {} more have changed", more - 1),
    })
}

/// A step with all that most have alike.
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
    let names = apt::missing_all(if is_foreign { apt::FOREIGN } else { &[] })?;
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
    if !toolchain::has_bindgen(paths) {
        plan.steps.push(Step {
            seconds: 5.0,
            mib: 12,
            fetches: true,
            ..step(
                "bindgen",
                "no bindgen here that the kernel takes",
                &["bindgen"],
            )
        });
    }
    if !sources.is_empty() && !paths.cache.join("suites").exists() {
        // Lists of suites that this machine's apt does not have.
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

/// Plans a kernel and its source, unless `sources` has that already. Returns `true` if the kernel is to be compiled.
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
    // A build that was interrupted goes on where it was.
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
        Some("the kernel is made anew".to_owned())
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

/// What apt says of these packages and all that they need. Where it knows some of them only after it has read the lists,
/// what it said of all that the test runner installs, on a Debian 12 that had none of them.
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

/// The sum of a field's numbers.
pub(super) fn sum(text: &str, field: &str) -> u64 {
    text.lines()
        .filter_map(|line| line.strip_prefix(field)?.trim().parse::<u64>().ok())
        .sum()
}
