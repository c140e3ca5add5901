// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Plans the steps that a command needs and that are not done yet.

use std::path::Path;
use std::process::Command;

use anyhow::Result;

use crate::arch::Arch;
use crate::paths::Paths;
use crate::progress::output;
use crate::{apt, foreign, kernel, programs, stamp, toolchain};

#[derive(Debug, Clone, PartialEq)]
pub(super) struct Step {
    pub(super) name: String,
    pub(super) why: String,
    /// Space that the step needs in the cache.
    pub(super) mib: u64,
    /// `true` if the step needs the package sources.
    pub(super) fetches: bool,
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

impl Plan {
    /// Adds a step. `fetches` is `true` if the step needs the package sources.
    pub(super) fn add(&mut self, name: &str, why: &str, mib: u64, fetches: bool) {
        self.steps.push(Step {
            name: name.to_owned(),
            why: why.to_owned(),
            mib,
            fetches,
        });
    }
}

/// The kernels, programs and VMs that a command needs.
pub(crate) struct Wanted<'a> {
    pub(crate) kernels: &'a [&'a str],
    pub(crate) modules: bool,
    /// `true` if the command needs programs for the kernels' architectures. An architecture whose
    /// programs this machine cannot run also needs a root.
    pub(crate) programs: bool,
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
        plan.add("packages", &why, 0, true);
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
        let why = "no installed bindgen is new enough for the kernel";
        plan.add("bindgen", why, 12, true);
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

/// Plans a kernel. Also plans its source, unless `sources` already contains this source. Returns
/// `true` if the kernel must be compiled.
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
        let title = format!("source of kernel {}", flavour.source());
        plan.add(&title, "not fetched yet", 850, true);
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
        let mib = if begun { 0 } else { flavour.mib };
        plan.add(&format!("kernel {name}"), &why, mib, false);
    }
    is_compiled
}

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
        let fetches = !paths.cache.join("control/version").exists();
        plan.add(&format!("modules for {name}"), &why, 20, fetches);
    }
}

fn plan_programs(paths: &Paths, arch: Arch, plan: &mut Plan) {
    if let (Some(name), false) = (arch.foreign(), foreign::is_there(paths, arch)) {
        let why = "not made of Debian's packages yet";
        plan.add(&format!("root for {name}"), why, 700, true);
    }
    let gdr = programs::gdr(paths, arch);
    if !gdr.exists() {
        plan.add("programs", "not compiled yet", 400, false);
    } else if let Some(why) = change(&gdr.with_extension("stamp"), &paths.repo) {
        plan.add("programs", &why, 20, false);
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
