// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Findings of `doctor`, and exit statuses of all commands.

use serde::Serialize;

/// Severity of a finding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Level {
    /// All is well.
    Ok,
    /// Useful information; nothing is wrong.
    Note,
    /// The subject could not be examined. The field `found` of the finding contains the reason.
    NotVisible,
    /// The problem reduces performance, or may reduce performance.
    Warning,
    /// The subject does not work.
    Fault,
}

impl Level {
    /// Returns the name in the JSON output.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Note => "note",
            Self::NotVisible => "not_visible",
            Self::Warning => "warning",
            Self::Fault => "fault",
        }
    }

    /// Returns `true` if this level makes the program exit with [`Status::Findings`].
    pub(crate) fn is_finding(self) -> bool {
        matches!(self, Self::Warning | Self::Fault)
    }
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub(crate) enum Subject {
    /// The whole machine.
    Machine,
    /// The processes of `peermemctl job`.
    Job,
    /// A GPU, by PCI address.
    Gpu { gpu: String },
    /// An RDMA device, by name.
    Hca { hca: String },
    /// The path between a GPU and an RDMA device.
    Pair { gpu: String, hca: String },
}

impl Subject {
    /// Creates a finding that says that all is well.
    pub(crate) fn ok(self, found: impl Into<String>) -> Finding {
        Finding::new(Level::Ok, self, found)
    }

    pub(crate) fn note(self, found: impl Into<String>) -> Finding {
        Finding::new(Level::Note, self, found)
    }

    pub(crate) fn not_visible(self, found: impl Into<String>) -> Finding {
        Finding::new(Level::NotVisible, self, found)
    }

    pub(crate) fn warning(self, found: impl Into<String>) -> Finding {
        Finding::new(Level::Warning, self, found)
    }

    pub(crate) fn fault(self, found: impl Into<String>) -> Finding {
        Finding::new(Level::Fault, self, found)
    }
}

/// Result of one check for one subject.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize)]
pub(crate) struct Finding {
    /// Stable name of the check, which scripts rely on. `Check::findings` sets the name.
    pub(crate) check: &'static str,
    pub(crate) level: Level,
    pub(crate) subject: Subject,
    /// Observation in one sentence, with numbers.
    pub(crate) found: String,
    /// Reason why the finding matters.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) why: Option<String>,
    /// Cost of the problem, with the source of the number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) costs: Option<String>,
    /// Command or setting that fixes the problem. Backticks enclose commands only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) fix: Option<String>,
    /// `true` with [`Level::NotVisible`] if root could see the data.
    #[serde(skip_serializing_if = "is_false")]
    pub(crate) needs_root: bool,
}

#[expect(
    clippy::trivially_copy_pass_by_ref,
    reason = "serde requires this signature"
)]
fn is_false(it: &bool) -> bool {
    !*it
}

impl Finding {
    /// Creates a finding without the optional fields.
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

    /// Sets the reason why the finding matters.
    pub(crate) fn why(mut self, why: impl Into<String>) -> Self {
        self.why = Some(why.into());
        self
    }

    /// Sets the cost of the problem.
    pub(crate) fn costs(mut self, costs: impl Into<String>) -> Self {
        self.costs = Some(costs.into());
        self
    }

    /// Returns the commands in the fix, ready to run.
    pub(crate) fn commands(&self) -> Vec<&str> {
        let parts = self.fix.as_deref().unwrap_or_default().split('`');
        parts.skip(1).step_by(2).collect()
    }

    /// Sets the fix. Removes commands that contain a name that needs quotes in a shell.
    pub(crate) fn fix(mut self, fix: impl Into<String>) -> Self {
        self.fix = Some(without_unfit(fix.into()));
        self
    }
}

/// Exit status of the program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Status {
    /// 0: the command succeeded, and all is well.
    Ok,
    /// 1: the command succeeded, and something is wrong.
    Findings,
    /// 2: the command failed. Standard error contains the reason.
    Failed,
    /// Exit status of a monitoring plugin, whose numbers 0, 1, 2 and 3 have other meanings.
    Plugin(Plugin),
}

/// States of a monitoring plugin.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Plugin {
    Ok,
    Warning,
    Critical,
    Unknown,
}

impl Status {
    /// Returns the number for the shell.
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

/// Placeholder in a command for a word that a shell would not interpret literally.
const UNFIT: char = '\0';

/// Returns a device's name as a word of a command, or a placeholder that [`without_unfit`]
/// recognises. A recording, or `rdma dev set`, may give a device any name.
pub(crate) fn argument(name: &str) -> &str {
    word(name, "_.:-")
}

/// Returns a file's path as a word of a command, or the placeholder of [`argument`].
pub(crate) fn path_argument(path: &str) -> &str {
    word(path, "_.:-/@")
}

fn word<'a>(text: &'a str, marks: &str) -> &'a str {
    let is_plain = |letter: char| letter.is_ascii_alphanumeric() || marks.contains(letter);
    // A word that begins with a dash would be an option.
    match !text.is_empty() && !text.starts_with('-') && text.chars().all(is_plain) {
        true => text,
        false => "\0",
    }
}

/// Removes each command, between backticks, in which [`argument`] found an unsafe word.
pub(crate) fn without_unfit(fix: String) -> String {
    if !fix.contains(UNFIT) {
        return fix;
    }
    let parts = fix.split('`').enumerate();
    let parts = parts.map(
        |(index, part)| match (index % 2 == 1, part.contains(UNFIT)) {
            (true, true) => {
                "(a command is left out: the device's name is not a plain word)".to_owned()
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
    fn a_command_with_an_unsafe_name_is_left_out() {
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
            "`a`, (a command is left out: the device's name is not a plain word) or `c`"
        );
        assert_eq!(without_unfit("`a` b".to_owned()), "`a` b");
    }
}
