// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! A run of the suite, and functions to build a run for a row of the table.

use super::setting::Setting;
use crate::debian::Release;
use crate::results::Format;
use crate::vm::{Build, Options};

/// A run: a VM or a program on this machine, and the tests that it prints.
#[derive(Clone, Copy)]
pub(crate) struct Run {
    pub(crate) name: &'static str,
    pub(crate) place: Place,
    pub(crate) format: Format,
    /// Column of the table that compares this run's results with those of other runs.
    pub(crate) column: Option<&'static str>,
    /// Tests that must fail here, each with the reason. If such a test passes, the run fails.
    pub(crate) known: &'static [(&'static str, &'static str)],
    /// Another run that must have the same result for each test.
    pub(crate) same_as: Option<Same>,
    /// Prefix of the figures that are shown with the run. Used for a run that is not compared with
    /// another run.
    pub(crate) shown: Option<&'static str>,
    /// `true` if only `make test-all` includes the run, and `make test` does not.
    pub(crate) only_in_full: bool,
    /// Kernel of the run's VM, if it is not the caller's.
    pub(crate) kernel: Option<&'static str>,
    /// Number of tests in each group, if the list is complete. A group is the part of a test's name
    /// before the dot.
    pub(crate) groups: &'static [(&'static str, usize)],
    /// The only files of `src/` that a program on this machine depends on. Results of such a
    /// program are kept.
    pub(crate) src: Option<&'static [&'static str]>,
}

/// Another run to compare with.
#[derive(Clone, Copy)]
pub(crate) struct Same {
    pub(crate) run: &'static str,
    /// Reasons for skipping. If one run skips a test for such a reason, the other run may have any
    /// result. Such a test is listed.
    pub(crate) but_for: &'static [&'static str],
    /// `true` if either run may have groups of tests that the other lacks. A group is the part of a
    /// test's name before the dot.
    pub(crate) in_part: bool,
}

#[derive(Clone, Copy)]
pub(crate) enum Place {
    /// A command in a VM. `{gdr}` stands for the verbs program, `{peermemctl}` for the operators'
    /// tool, `{repo}` for the repository, and `{filter}` for the caller's selection. For other
    /// words in braces, see `programs::ON_DEMAND`.
    Vm {
        settings: &'static [Setting],
        command: &'static str,
    },
    /// `cargo` on this machine, with these arguments.
    Cargo(&'static str),
    /// The schedules of the known hazards. Our module must pass, and `docs/hazards.md` must match
    /// the results. If a build is given, only our module is tested.
    Hazards(Option<Build>),
    /// The tests of mutants, which are our module with one rule removed, built this way.
    Mutants(Build),
    /// The cost of a registration, in instructions of our module.
    Cost,
    /// An installation on a Debian host, which boots its own kernel.
    Debian(&'static Release),
    /// The packages of peermemctl on Debian's releases.
    Packages,
    /// First use from a clone and a cache below /tmp.
    Contact,
    /// The checks of the code's form, if requested.
    Lint,
}

pub(crate) const BASE: Run = Run {
    name: "",
    place: Place::Cargo(""),
    format: Format::Ktap,
    column: None,
    known: &[],
    same_as: None,
    shown: None,
    only_in_full: false,
    kernel: None,
    groups: &[],
    src: None,
};

/// Returns a comparison that requires the same tests with the same results.
pub(super) const fn same(run: &'static str) -> Same {
    Same {
        run,
        but_for: &[],
        in_part: false,
    }
}

/// Returns a comparison with the same cases on the other nvidia.ko. Cases that the other nvidia.ko
/// cannot be made to run are skipped.
pub(super) const fn other_provider(run: &'static str) -> Same {
    Same {
        but_for: &[
            "what NVIDIA's own nv-p2p.c says no parameter changes",
            "memory has its place in the BAR for life here",
        ],
        ..same(run)
    }
}

/// Returns `same` for a run that shares only some groups of tests.
pub(super) const fn in_part(same: Same) -> Same {
    Same {
        in_part: true,
        ..same
    }
}

/// Returns a run with default values.
pub(super) const fn run(name: &'static str, place: Place) -> Run {
    Run {
        name,
        place,
        ..BASE
    }
}

/// Returns a run of cargo on this machine.
pub(super) const fn cargo(name: &'static str, arguments: &'static str) -> Run {
    run(name, Place::Cargo(arguments)).format(Format::Cargo)
}

/// Returns a run of a command in a VM with the default settings.
pub(super) const fn vm(name: &'static str, command: &'static str) -> Run {
    let settings = &[];
    run(name, Place::Vm { settings, command })
}

/// Columns of a row.
impl Run {
    /// Replaces the VM's default settings.
    pub(super) const fn with(mut self, wanted: &'static [Setting]) -> Self {
        if let Place::Vm { settings, .. } = &mut self.place {
            *settings = wanted;
        }
        self
    }

    pub(super) const fn format(mut self, format: Format) -> Self {
        self.format = format;
        self
    }

    pub(super) const fn column(mut self, column: &'static str) -> Self {
        self.column = Some(column);
        self
    }

    pub(super) const fn same_as(mut self, same: Same) -> Self {
        self.same_as = Some(same);
        self
    }

    pub(super) const fn shown(mut self, prefix: &'static str) -> Self {
        self.shown = Some(prefix);
        self
    }

    pub(super) const fn only_in_full(mut self) -> Self {
        self.only_in_full = true;
        self
    }

    pub(super) const fn on(mut self, kernel: &'static str) -> Self {
        self.kernel = Some(kernel);
        self
    }

    pub(super) const fn groups(mut self, groups: &'static [(&'static str, usize)]) -> Self {
        self.groups = groups;
        self
    }

    pub(super) const fn src(mut self, files: &'static [&'static str]) -> Self {
        self.src = Some(files);
        self
    }
}

impl Run {
    /// Returns the options of the run's VM, if it has one. The VM boots the run's own kernel, or
    /// else `kernel`.
    pub(crate) fn machine(&self, kernel: &str) -> Option<Options> {
        let Place::Vm { settings, .. } = self.place else {
            return None;
        };
        let mut machine = Options {
            kernel: self.kernel.unwrap_or(kernel).to_owned(),
            ..Options::default()
        };
        settings
            .iter()
            .for_each(|setting| setting.apply(&mut machine));
        Some(machine)
    }

    /// Returns the number of VMs that the run boots at once.
    pub(crate) fn machines(&self) -> usize {
        let is_pair = self
            .machine(crate::kernel::DEFAULT)
            .is_some_and(|machine| machine.pair);
        1 + usize::from(is_pair)
    }
}
