// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Debian packages: those to be installed, and those that are only read, from suites that the machine does not have.
//!
//! The latter come through a private apt state in the cache. Its mirror and its keys are the machine's own, so apt checks
//! every signature as it does for the machine, and the machine's sources stay as they are.

mod archive;
mod install;
mod sources;

pub(crate) use self::archive::{
    download, extract, make_root, original, own_sources, search, sources_of, suites_for, unpack,
    Candidate,
};
pub(crate) use self::install::{
    file_of, install, install_all, is_interrupted, missing_all, unpack_own, was_begun,
    ARM64_OBJECT, COST, FOREIGN, LINT, ROOT, WHEELS,
};
pub(crate) use crate::command::as_root;
