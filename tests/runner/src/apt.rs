// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Debian packages. Some packages are installed on this machine, and others are only unpacked.
//!
//! Packages of suites that this machine does not use come through a private apt state in the cache.
//! This state uses this machine's mirror and keys, so apt checks every signature as usual. This
//! machine's sources stay unchanged.

mod archive;
mod install;
mod sources;

pub(crate) use self::archive::{
    download, download_all, extract, make_root, original, own_sources, search, sources_of,
    suites_for, unpack, Candidate,
};
pub(crate) use self::install::{
    file_of, install, install_all, is_interrupted, missing_all, unpack_own, was_begun,
    ARM64_OBJECT, COST, FOREIGN, INSTALL, LINT, PACKAGES, ROOT, WHEELS,
};
