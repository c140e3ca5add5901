// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! A run of the suite.

use anyhow::Result;

use super::setting;
use crate::debian::Release;
use crate::results::Format;
use crate::vm::{Build, Options};

/// A run: a VM or a program on this machine, and the tests that it prints.
#[derive(Clone, Copy)]
pub(crate) struct Run {
    pub(crate) name: &'static str,
    pub(crate) place: Place,
    pub(crate) format: Format,
    /// Another run that must have the same result for each test.
    pub(crate) same_as: Option<Same>,
    /// `true` if only `make test-all` includes the run, and `make test` does not.
    pub(crate) only_in_full: bool,
    /// Kernel of the run's VM, unless the VM's options name one. `None` stands for the default
    /// kernel.
    pub(crate) kernel: Option<&'static str>,
    /// Kinds of kernels on which `make test-all` repeats the run.
    pub(crate) also: &'static [&'static str],
    /// Number of tests in each group, if the list is complete. A group is the part of a test's name
    /// before the dot.
    pub(crate) groups: &'static [(&'static str, usize)],
    /// The only files of `src/` that a program on this machine depends on. Results of such a
    /// program are kept.
    pub(crate) src: Option<&'static [&'static str]>,
}

#[derive(Clone, Copy)]
pub(crate) struct Same {
    pub(crate) run: &'static str,
    /// Accepted reasons for skipping. If one run skips a test for such a reason, the other run may
    /// have any result, and the output lists the test.
    pub(crate) but_for: &'static [&'static str],
    /// `true` if each of the two runs may have groups of tests that the other run lacks. A group is
    /// the part of a test's name before the dot.
    pub(crate) in_part: bool,
}

#[derive(Clone, Copy)]
pub(crate) enum Place {
    /// A command in a VM with these options.
    Vm {
        options: &'static str,
        command: &'static str,
    },
    Cargo(&'static str),
    /// The schedules of the known hazards. Our module must pass, and `docs/hazards.md` must match
    /// the results. If a build is given, only our module is tested.
    Hazards(Option<Build>),
    /// The tests of mutants, with the given build. A mutant is our module with one rule removed.
    Mutants(Build),
    /// The cost of a registration, in instructions of our module.
    Cost,
    /// An installation on a Debian host, which boots its own kernel.
    Debian(&'static Release),
    Packages,
    /// First use from a clone and a cache below /tmp.
    Contact,
    /// The linters, if requested.
    Lint,
}

pub(crate) const BASE: Run = Run {
    name: "",
    place: Place::Cargo(""),
    format: Format::Ktap,
    same_as: None,
    only_in_full: false,
    kernel: None,
    also: &[],
    groups: &[],
    src: None,
};

impl Run {
    /// Returns the options of the run's VM, if it has one.
    #[expect(
        clippy::expect_used,
        reason = "the options are constants of the suite's table"
    )]
    pub(crate) fn machine(&self) -> Option<Options> {
        let Place::Vm { options, .. } = self.place else {
            return None;
        };
        Some(self.parse(options).expect("options of a VM"))
    }

    fn parse(&self, options: &str) -> Result<Options> {
        let (settings, words): (Vec<&str>, Vec<&str>) = options
            .split_whitespace()
            .partition(|word| word.starts_with('@'));
        let usual = ["--kernel", self.kernel.unwrap_or(crate::kernel::DEFAULT)];
        let usual = usual.into_iter().filter(|_| !words.contains(&"--kernel"));
        let mut machine = Options::parse(["runner"].into_iter().chain(usual).chain(words.clone()))?;
        for setting in settings {
            setting::apply(setting, &mut machine)?;
        }
        Ok(machine)
    }

    /// Returns the number of VMs that the run boots at once.
    pub(crate) fn machines(&self) -> usize {
        let is_pair = self.machine().is_some_and(|machine| machine.pair);
        1 + usize::from(is_pair)
    }
}
