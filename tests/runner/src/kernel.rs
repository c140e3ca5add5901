// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! The kernels that the test runner boots. A kernel is an entry of the table in `kernel/table.rs`.

mod finished;
pub(crate) mod stock;
mod table;
mod tree;

use std::fs;

use anyhow::{Context as _, Result};

pub(crate) use self::finished::{arch_of, archs, Kernel, Signing};
use self::finished::{has_rust, is_set, release_of, separates_output};
#[cfg(test)]
pub(crate) use self::table::ARM64_64K;
pub(crate) use self::table::{
    all, flavour, of, others, Again, Flavour, ARM64, DEFAULT, DMABUF, EARLIER,
};
use self::tree::Tree;
use crate::paths::Paths;
use crate::stamp;
use crate::toolchain::Toolchain;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Extent {
    /// The kernel and its modules, without the stock RDMA modules, which only some runs of the
    /// suite load.
    Patched,
    /// The kernel and all its modules, including the stock RDMA modules.
    Whole,
    /// Existing files. There is no check that these are up to date.
    Frozen,
}

/// Builds the parts of a kernel that the extent requires and that are not up to date.
pub(crate) fn ensure(
    paths: &Paths,
    toolchain: &Toolchain,
    flavour: &'static Flavour,
    extent: Extent,
) -> Result<Kernel> {
    let tree = Tree {
        paths,
        flavour,
        directory: paths.cache.join("kernel").join(flavour.name),
        home: paths.cache.join("kernel").join(flavour.source()),
        toolchain,
    };
    fs::create_dir_all(&tree.directory)?;
    fs::create_dir_all(&tree.home)?;
    let is_stock = flavour.is_stock();
    if tree.source_name().is_none() || (is_stock && !tree.has_stock_image()) {
        if is_stock {
            tree.fetch_stock()?;
        } else {
            tree.fetch()?;
        }
    }
    let source = tree
        .source_name()
        .context("the kernel's source was fetched but is missing")?;
    let key = tree.key(&source)?;
    // If the signing key is lost, a new key is made and compiled into the kernel.
    let keyed = tree.signing().is_none_or(|signing| signing.key.exists());
    let stamp = tree.at("stamp");
    let has_stock = flavour.pristine_rdma;
    let stock = has_stock && extent == Extent::Whole;
    let is_there = match extent {
        Extent::Frozen => stamp.exists(),
        _ => stamp::is_fresh(&stamp, &key) && !(stock && tree.stock_is_stale(&source)?),
    };
    if !keyed || !is_there {
        // The kernel counts as missing until it is complete, even if the build is interrupted.
        let _ = fs::remove_file(&stamp);
        if is_stock {
            tree.build_on_stock(&key)?;
        } else {
            tree.build(&source, &key, stock)?;
        }
    }
    let build = tree.at("build");
    Ok(Kernel {
        arch: flavour.arch,
        image: tree.image(),
        release: release_of(paths, &build)?,
        has_rust: has_rust(&build),
        has_symbol_versions: is_set(&build, "MODVERSIONS"),
        separates_output: separates_output(&build),
        build,
        modules: tree.at("modules"),
        stock: (has_stock || is_stock).then(|| tree.at("stock")),
        key,
        products: paths.cache.join("modules").join(flavour.name),
        make: flavour.make,
        detectors: flavour.detectors,
        has_peer_memory: flavour.peer_memory,
        is_stock,
        signing: tree.signing(),
    })
}
