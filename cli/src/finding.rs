// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! What `doctor` says of one thing, and what commands exit with.

use serde::Serialize;

/// How bad it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Level {
    /// As it should be.
    Ok,
    /// Worth knowing; nothing is wrong.
    Note,
    /// Could not be looked at; `found` says why.
    NotVisible,
    /// Costs speed, or may.
    Warning,
    /// Does not work.
    Fault,
}

impl Level {
    /// As in the JSON.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Note => "note",
            Self::NotVisible => "not_visible",
            Self::Warning => "warning",
            Self::Fault => "fault",
        }
    }

    /// Whether it makes the program exit with [`Status::Findings`].
    pub(crate) fn is_finding(self) -> bool {
        matches!(self, Self::Warning | Self::Fault)
    }
}

/// What a check looked at.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub(crate) enum Subject {
    /// The machine as a whole.
    Machine,
    /// A GPU, by its PCI address.
    Gpu { gpu: String },
    /// An RDMA device, by its name.
    Hca { hca: String },
    /// The path between two.
    Pair { gpu: String, hca: String },
}

/// What one check says of one subject.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize)]
pub(crate) struct Finding {
    /// The name of the check, which stays the same: scripts go by it. `Check::findings` sets it.
    pub(crate) check: &'static str,
    pub(crate) level: Level,
    pub(crate) subject: Subject,
    /// What was seen, in one sentence, with figures.
    pub(crate) found: String,
    /// Why it matters.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) why: Option<String>,
    /// What it costs, with whose figure that is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) costs: Option<String>,
    /// The command or setting that fixes it. Commands, and nothing else, stand between backticks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) fix: Option<String>,
    /// Of [`Level::NotVisible`]: root would see it.
    #[serde(skip_serializing_if = "is_false")]
    pub(crate) needs_root: bool,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde wants it so")]
fn is_false(it: &bool) -> bool {
    !*it
}

impl Finding {
    /// What was found, and nothing beside it.
    pub(crate) fn new(level: Level, subject: Subject, found: impl Into<String>) -> Self {
        Self {
            check: "",
            level,
            subject,
            found: found.into(),
            why: None,
            costs: None,
            fix: None,
            needs_root: false,
        }
    }

    /// With why it matters.
    pub(crate) fn why(mut self, why: impl Into<String>) -> Self {
        self.why = Some(why.into());
        self
    }

    /// With what it costs.
    pub(crate) fn costs(mut self, costs: impl Into<String>) -> Self {
        self.costs = Some(costs.into());
        self
    }

    /// The commands of how to fix it, to be run as they are.
    pub(crate) fn commands(&self) -> Vec<&str> {
        let parts = self.fix.as_deref().unwrap_or_default().split('`');
        parts.skip(1).step_by(2).collect()
    }

    /// Adds the fix. Commands with a name that a shell would not take unquoted are left out.
    pub(crate) fn fix(mut self, fix: impl Into<String>) -> Self {
        self.fix = Some(without_unfit(fix.into()));
        self
    }
}

/// How the program exits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Status {
    /// 0: it looked, and all is well.
    Ok,
    /// 1: it looked, and something is wrong.
    Findings,
    /// 2: it could not look; a message on standard error says why.
    Failed,
    /// What a monitoring plugin exits with, which counts otherwise: 0, 1, 2, 3.
    Plugin(Plugin),
}

/// The states of a monitoring plugin.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Plugin {
    Ok,
    Warning,
    Critical,
    Unknown,
}

impl Status {
    /// The number for the shell.
    pub(crate) fn code(self) -> u8 {
        match self {
            Self::Ok => 0,
            Self::Findings => 1,
            Self::Failed => 2,
            Self::Plugin(Plugin::Ok) => 0,
            Self::Plugin(Plugin::Warning) => 1,
            Self::Plugin(Plugin::Critical) => 2,
            Self::Plugin(Plugin::Unknown) => 3,
        }
    }
}

/// Mark in a command, in place of a word that the shell would not take as it is.
const UNFIT: char = '\0';

/// Returns a device's name as a word of a command, or a mark by which [`without_unfit`] knows the command. A recording, or
/// `rdma dev set`, may give a device any name.
pub(crate) fn argument(name: &str) -> &str {
    word(name, "_.:-")
}

/// Returns a file's path as a word of a command, or the same mark.
pub(crate) fn path_argument(path: &str) -> &str {
    word(path, "_.:-/@")
}

fn word<'a>(text: &'a str, marks: &str) -> &'a str {
    let is_plain = |letter: char| letter.is_ascii_alphanumeric() || marks.contains(letter);
    // A word that begins with a dash is an option.
    match !text.is_empty() && !text.starts_with('-') && text.chars().all(is_plain) {
        true => text,
        false => "\0",
    }
}

/// Leaves out each command, between backticks, in which [`argument`] found an unfit word.
pub(crate) fn without_unfit(fix: String) -> String {
    if !fix.contains(UNFIT) {
        return fix;
    }
    let parts = fix.split('`').enumerate();
    let parts = parts.map(
        |(index, part)| match (index % 2 == 1, part.contains(UNFIT)) {
            (true, true) => {
                "(a command is left out: the device's name is no plain word)".to_owned()
            }
            (true, false) => format!("`{part}`"),
            (false, _) => part.replace(UNFIT, "?"),
        },
    );
    parts.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_with_an_odd_name_is_left_out() {
        for plain in ["mlx5_0", "ens1f0np0", "bond0.100", "a-b", "0000:3b:00.0"] {
            assert_eq!(argument(plain), plain);
        }
        for odd in [
            "", " ", "-d", "a b", "a`b", "a;b", "a'b", "$(x)", "a\nb", "ü", "a/b",
        ] {
            assert_eq!(argument(odd), "\0", "{odd:?}");
        }
        assert_eq!(path_argument("/sys/fs/cgroup/a-1"), "/sys/fs/cgroup/a-1");
        assert_eq!(path_argument("/sys/fs/cgroup/$x"), "\0");
        let left = without_unfit(format!("`a`, `b {}` or `c`", argument("x y")));
        assert_eq!(
            left,
            "`a`, (a command is left out: the device's name is no plain word) or `c`"
        );
        assert_eq!(without_unfit("`a` b".to_owned()), "`a` b");
    }
}
