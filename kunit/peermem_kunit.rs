// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! KUnit tests of `nvidia-peermem`. The tests run the module's own sources in the kernel, on fakes
//! of ib_core and nvidia.ko. The tests need no ib_core, no nvidia.ko, and no hardware.
//!
//! `root` is the code of the shipped module, including its init and exit. There are two
//! differences: `root` is not a kernel module here, and its abstractions call the fakes in [`c`].
//!
//! The tests are a separate module, and the shipped module contains no part of them. The results
//! are in `/sys/kernel/debug/kunit/peermem*/results`.

use kernel::prelude::*;

#[path = "../src/nvidia_peermem.rs"]
mod root;
use root::*;

/// The functions that the abstractions call: the bindings, and fakes for nvidia.ko, for ib_core and
/// for some kernel functions.
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
mod ib_core;
mod life;
mod mapping;
mod parts;
mod provider;
mod setup;
mod showing;

module! {
    type: PeerMemKunit,
    name: "nvidia-peermem-kunit",
    authors: ["peermem-rs contributors"],
    description: "KUnit tests of nvidia-peermem",
    license: "Dual BSD/GPL",
}

/// The fields are dropped in the order of their declaration.
struct PeerMemKunit {
    /// Allows callbacks during the tests.
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
