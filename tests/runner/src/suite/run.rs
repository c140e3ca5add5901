// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! A run of the suite, and how a row of the table makes one.

use super::setting::Setting;
use crate::debian::Release;
use crate::results::Format;
use crate::vm::{Build, Options};

/// One run: a virtual machine or a program of the host, and the tests that it prints.
#[derive(Clone, Copy)]
pub(crate) struct Run {
    pub(crate) name: &'static str,
    pub(crate) place: Place,
    pub(crate) format: Format,
    /// Column of the table in which this run's results stand beside the others'.
    pub(crate) column: Option<&'static str>,
    /// Tests that are to fail here, each with the reason. One that passes all the same is a failure.
    pub(crate) known: &'static [(&'static str, &'static str)],
    /// Another run whose results must be the same, test for test.
    pub(crate) same_as: Option<Same>,
    /// Figures whose names begin so are shown with the run; for one that stands beside no other.
    pub(crate) shown: Option<&'static str>,
    /// Left out of `make test`: `make test-all` has it.
    pub(crate) only_in_full: bool,
    /// Its machine's kernel, where it is not the caller's.
    pub(crate) kernel: Option<&'static str>,
    /// How many tests there are of each group, which is what stands before the dot of their names; where all are told here.
    pub(crate) groups: &'static [(&'static str, usize)],
    /// The only files of `src/` that a program of the host depends on. Its results are kept.
    pub(crate) src: Option<&'static [&'static str]>,
}

/// A run to be compared with.
#[derive(Clone, Copy)]
pub(crate) struct Same {
    pub(crate) run: &'static str,
    /// A test that one of the two skips for one of these reasons may have any result in the other; it is listed.
    pub(crate) but_for: &'static [&'static str],
    /// Each may have groups of tests that the other lacks: what stands before the dot of their names.
    pub(crate) in_part: bool,
}

#[derive(Clone, Copy)]
pub(crate) enum Place {
    /// In a virtual machine. `{gdr}` stands for the verbs program, `{peermemctl}` for what operators run, `{repo}` for the
    /// repository, `{filter}` for what the caller chose; for what else stands in braces see `programs::ON_DEMAND`.
    Vm {
        settings: &'static [Setting],
        command: &'static str,
    },
    /// `cargo` on the host, with these arguments.
    Cargo(&'static str),
    /// The schedules of the known hazards: ours must hold, and `docs/hazards.md` be what they make. With a build, ours alone.
    Hazards(Option<Build>),
    /// The tests of our module, built this way, with one rule after the other taken out.
    Mutants(Build),
    /// The cost of a registration, in instructions of our module.
    Cost,
    /// Installed on a Debian host, which boots its own kernel.
    Debian(&'static Release),
    /// From a clone and a cache below /tmp.
    Contact,
    /// The checks of the code's form, where they are asked for.
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

/// The same tests with the same results.
pub(super) const fn same(run: &'static str) -> Same {
    Same {
        run,
        but_for: &[],
        in_part: false,
    }
}

/// The same cases on the other nvidia.ko. Cases that it cannot be asked for are skipped.
pub(super) const fn other_provider(run: &'static str) -> Same {
    Same {
        but_for: &[
            "what NVIDIA's own nv-p2p.c says no parameter changes",
            "memory has its place in the BAR for life here",
        ],
        ..same(run)
    }
}

/// The same for a run that shares only some groups of tests with it.
pub(super) const fn in_part(same: Same) -> Same {
    Same {
        in_part: true,
        ..same
    }
}

/// A run of its own kind.
pub(super) const fn run(name: &'static str, place: Place) -> Run {
    Run {
        name,
        place,
        ..BASE
    }
}

/// A run of cargo on the host.
pub(super) const fn cargo(name: &'static str, arguments: &'static str) -> Run {
    run(name, Place::Cargo(arguments)).format(Format::Cargo)
}

/// A run of a command in a machine with the usual settings.
pub(super) const fn vm(name: &'static str, command: &'static str) -> Run {
    let settings = &[];
    run(name, Place::Vm { settings, command })
}

/// Columns of a row.
impl Run {
    /// The machine's settings, where they are not the usual ones.
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
    /// The run's machine, if it has one: on its own kernel, or else on this one.
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

    /// Number of machines that the run has at once.
    pub(crate) fn machines(&self) -> usize {
        let is_pair = self
            .machine(crate::kernel::DEFAULT)
            .is_some_and(|machine| machine.pair);
        1 + usize::from(is_pair)
    }
}
