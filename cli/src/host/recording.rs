// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! A machine's answers, written down: for tests, and for who looks at a machine that is not theirs.

use std::cell::RefCell;
use std::collections::BTreeMap;

use serde::Deserialize;
use serde::Serialize;

use super::Fact;
use super::Host;
use super::Seen;
use super::Unseen;

/// All that was asked of a machine, and what it answered.
///
/// The JSON of this is `peermemctl record`'s, version 1. A path that is a directory's child in `names` and has no entry of its own is
/// [`Unseen::NotRecorded`]; one whose directory is recorded without it is [`Unseen::Absent`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Recording {
    /// `peermemctl.recording`.
    pub(crate) schema: String,
    pub(crate) version: u32,
    /// Where this comes from, in words.
    pub(crate) about: String,
    /// Files: text as it is, other bytes as `hex:…`.
    pub(crate) files: BTreeMap<String, String>,
    /// Directories: the names in them.
    pub(crate) directories: BTreeMap<String, Vec<String>>,
    /// Symbolic links: what they say.
    pub(crate) links: BTreeMap<String, String>,
    /// What no file tells.
    pub(crate) facts: BTreeMap<Fact, String>,
    /// What could not be seen, and why.
    pub(crate) unseen: BTreeMap<String, Unseen>,
}

/// Asks another host and writes down each answer.
pub(crate) struct Recorder<'a> {
    host: &'a dyn Host,
    recording: RefCell<Recording>,
}
