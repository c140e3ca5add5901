// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! The suite: every run of `make test`, in order. The runs are rows of `tests/runner/suite`.

mod run;
mod setting;
mod table;

use std::sync::LazyLock;

#[cfg(test)]
pub(crate) use self::run::BASE;
pub(crate) use self::run::{Place, Run, Same};
use self::table::Table;
use crate::kernel::{self, Again};

#[expect(
    clippy::expect_used,
    reason = "the table is a constant of this program"
)]
static TABLE: LazyLock<Table> =
    LazyLock::new(|| Table::parse(include_str!("../suite")).expect("tests/runner/suite"));

fn smoke(flavour: &'static kernel::Flavour) -> impl Iterator<Item = Run> {
    let named = |name: &&str| {
        let name = format!("smoke: {name}");
        TABLE.smoke.iter().find(move |run| run.name == name)
    };
    flavour.smoke.iter().filter_map(named).map(|run| Run {
        // Names of runs live as long as the program.
        name: format!("{}: {}", flavour.name, run.name).leak(),
        only_in_full: flavour.only_in_full,
        kernel: Some(flavour.name),
        ..*run
    })
}

/// Returns every run of `tests/runner/suite`, on the kernel that it names or on the default kernel.
/// Also returns the smoke runs of each kernel in the table of kernels.
pub(crate) fn every_run() -> &'static [Run] {
    static ALL: LazyLock<Vec<Run>> = LazyLock::new(|| {
        TABLE
            .runs
            .iter()
            .copied()
            .chain(kernel::all().flat_map(smoke))
            .collect()
    });
    &ALL
}

/// Returns the suite's runs that `make test-all` repeats on a kernel, according to the kernel's
/// entry in the table.
pub(crate) fn again(kernel: &'static str) -> Vec<Run> {
    // The name lives as long as the program, like all names of runs.
    let named = |name: &str| -> &'static str { format!("{kernel}: {name}").leak() };
    let again = kernel::flavour(kernel).map_or(Again::All, |flavour| flavour.again);
    let is_meant = |run: &Run| match again {
        Again::Nothing => false,
        Again::All => true,
        Again::Kind(kind) => run.also.contains(&kind),
    };
    let is_repeated = |name| {
        TABLE
            .runs
            .iter()
            .any(|run| run.name == name && is_meant(run))
    };
    TABLE
        .runs
        .iter()
        .filter(|run| is_meant(run))
        .filter(|run| match run.place {
            Place::Vm { .. } => {
                let machine = run.machine();
                run.kernel.is_none() && machine.is_some_and(|vm| vm.kernel == kernel::DEFAULT)
            }
            Place::Hazards(_) => again != Again::All,
            _ => false,
        })
        .map(|run| Run {
            name: named(run.name),
            same_as: run
                .same_as
                .filter(|same| is_repeated(same.run))
                .map(|same| Same {
                    run: named(same.run),
                    ..same
                }),
            only_in_full: true,
            kernel: Some(kernel),
            ..*run
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::Arch;
    use crate::vm::Rdma;

    #[test]
    fn each_other_kernel_of_make_test_has_a_smoke_run() {
        for flavour in kernel::others().filter_map(kernel::flavour) {
            let of_kernel = |run: &&Run| run.kernel == Some(flavour.name) && !run.only_in_full;
            let found: Vec<&str> = every_run()
                .iter()
                .filter(of_kernel)
                .map(|run| run.name)
                .filter(|name| name.starts_with(&format!("{}: smoke: ", flavour.name)))
                .collect();
            assert_eq!(
                found.is_empty(),
                flavour.only_in_full,
                "{}: `make test` must have a smoke run unless only_in_full is set",
                flavour.name
            );
        }
        for flavour in kernel::all() {
            assert_eq!(
                smoke(flavour).count(),
                flavour.smoke.len(),
                "{}: names a smoke run that tests/runner/suite lacks",
                flavour.name
            );
        }
    }

    /// Checks that each kernel repeats all runs of its kind, and that each kind has runs.
    #[test]
    fn runs_that_a_kernel_repeats_exist() {
        for name in kernel::others() {
            if let Some(Again::Kind(kind)) = kernel::flavour(name).map(|flavour| flavour.again) {
                let count = TABLE
                    .runs
                    .iter()
                    .filter(|run| run.also.contains(&kind))
                    .count();
                assert!(count > 0 && again(name).len() == count, "{name}");
            }
        }
    }

    #[test]
    fn names_of_runs_are_unique() {
        let others = kernel::others().flat_map(again);
        let mut names: Vec<&str> = every_run()
            .iter()
            .copied()
            .chain(others)
            .map(|run| run.name)
            .collect();
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
    }

    #[test]
    fn the_suite_runs_again_on_another_kernel() {
        let again = again("7.x");
        let names: Vec<&str> = again.iter().map(|run| run.name).collect();
        assert!(names.contains(&"7.x: KUnit"));
        assert!(names.contains(&"7.x: verbs: ours"));
        assert!(!names.iter().any(|name| name.contains("debug kernel")));
        assert!(!names.iter().any(|name| name.contains("smoke")));
        for run in &again {
            assert_eq!(run.kernel, Some("7.x"));
            assert!(run.only_in_full);
            assert!(run.same_as.is_none_or(|same| names.contains(&same.run)));
        }
    }

    #[test]
    fn arm64_repeats_the_listed_runs() {
        for kernel in [kernel::ARM64, kernel::ARM64_64K] {
            let again = again(kernel);
            let names: Vec<&str> = again.iter().map(|run| run.name).collect();
            for run in &again {
                assert!(run.same_as.is_none_or(|same| names.contains(&same.run)));
                let Some(vm) = run.machine() else {
                    continue;
                };
                // On arm64, only the patched RDMA modules exist. An SMMU prints other messages than
                // Intel's IOMMU.
                assert!(vm.rdma == Rdma::Patched && vm.arch() == Arch::Arm64);
                assert!(!format!("{:?}", vm.expect).contains("DMAR"));
            }
        }
    }
}
