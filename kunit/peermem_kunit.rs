// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! KUnit tests of `nvidia-peermem`: the module's own sources, in the kernel, on fakes of ib_core and of
//! nvidia.ko. Needs neither of the two, and no hardware.
//!
//! `root` is the module as it is shipped, down to the order in which it starts and stops; the one
//! thing that it is not here is a module, and what its abstractions find as [`c`] has fakes in it.
//!
//! A module of its own: nothing of it is in the shipped one. Results:
//! `/sys/kernel/debug/kunit/peermem*/results`.

use kernel::prelude::*;

#[path = "../src/nvidia_peermem.rs"]
mod root;
use root::*;

/// What the abstractions find: the bindings, and fakes for what the two neighbours have, and for some of the kernel's.
mod c {
    pub(crate) use crate::fakes::fake_module_get as try_module_get;
    pub(crate) use crate::fakes::fake_module_put as module_put;
    pub(crate) use crate::fakes::nvidia_p2p_dma_map_pages;
    pub(crate) use crate::fakes::nvidia_p2p_dma_unmap_pages;
    pub(crate) use crate::fakes::nvidia_p2p_get_pages;
    pub(crate) use crate::fakes::nvidia_p2p_get_pages_persistent;
    pub(crate) use crate::fakes::nvidia_p2p_put_pages;
    pub(crate) use crate::fakes::nvidia_p2p_put_pages_persistent;
    pub(crate) use crate::fakes::pci_get_device;
    pub(crate) use crate::ib_core::ib_register_peer_memory_client;
    pub(crate) use crate::ib_core::ib_unregister_peer_memory_client;
    pub(crate) use crate::root::c::*;
}

mod contract;
mod fakes;
#[path = "core.rs"]
mod ib_core;
mod life;
mod mapping;
mod parts;
mod provider;
mod revocation;
mod setup;
mod showing;

module! {
    type: PeerMemKunit,
    name: "nvidia-peermem-kunit",
    authors: ["peermem-rs contributors"],
    description: "KUnit tests of nvidia-peermem",
    license: "Dual BSD/GPL",
}

/// The order of the fields is the order in which they are dropped.
struct PeerMemKunit {
    /// The tests' own.
    _callbacks: nv::Callbacks,
    _fakes: fakes::Fakes,
}

impl kernel::Module for PeerMemKunit {
    fn init(module: &'static ThisModule) -> Result<Self> {
        let fakes = fakes::Fakes::new();
        life::live(module)?;
        Ok(PeerMemKunit {
            _callbacks: nv::Callbacks::new(),
            _fakes: fakes,
        })
    }
}
