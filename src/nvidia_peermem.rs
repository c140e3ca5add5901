// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! `nvidia-peermem`: GPU memory for RDMA devices.
//!
//! ib_core asks its peer-memory clients about each address that `get_user_pages()` refuses. This
//! module makes nvidia.ko pin the GPU memory behind the GPU's BAR1, maps it for the HCA, and
//! returns a scatter list of DMA addresses.
//!
//! The files, from the top layer down. No file uses a file above it:
//! - [`clients`]: the two peer-memory clients of ib_core, one for each pin mode.
//! - [`persistent`] and [`revocable`]: the life of one registration, in its two modes. [`mr`]: the
//!   part that both modes share.
//! - [`chunks`]: the pins of a range that spans several allocations. [`quota`]: the memory that
//!   each user has pinned, and its limit. [`callback_pin`], [`revocable_pin`]: the pins of the
//!   revocable mode, which may outlive their registration until nvidia.ko's callback.
//!   [`persistent_mapping`]: the DMA mappings of the persistent mode.
//! - [`env`](mod@env): the kernel services that these files use. Tests replace this file.
//! - [`files`], [`debugfs`]: the files that users can read.
//! - [`ib`], [`nv`]: abstractions over ib_core and nvidia.ko.
//! - [`log`], [`entries`], [`node_list`], [`trace`]: log messages, the list of live registrations,
//!   tracepoints.
//! - [`dma`], [`phys`]: the DMA mappings of GPU memory, and its physical addresses.
//! - [`pci`], [`sg`], [`module`], [`params`], [`task`], [`memory_peers`], [`sync`],
//!   [`collections`]: abstractions over the rest of the kernel.
//! - [`registry`], [`history`], [`reason`], [`peer_stats`], [`device`], [`ranges`], [`ofed`]: the
//!   displayed data of a registration, the reasons for refusals, the statistics of each client,
//!   addresses, versions. These files use `core` and little else.

use kernel::prelude::*;

pub(crate) mod callback_pin;
pub(crate) mod chunks;
pub(crate) mod clients;
pub(crate) mod collections;
pub(crate) mod debugfs;
pub(crate) mod device;
pub(crate) mod dma;
pub(crate) mod entries;
pub(crate) mod env;
pub(crate) mod files;
pub(crate) mod history;
pub(crate) mod ib;
pub(crate) mod log;
pub(crate) mod memory_peers;
pub(crate) mod module;
pub(crate) mod mr;
pub(crate) mod node_list;
pub(crate) mod nv;
pub(crate) mod ofed;
pub(crate) mod params;
pub(crate) mod pci;
pub(crate) mod peer_stats;
pub(crate) mod persistent;
pub(crate) mod persistent_mapping;
pub(crate) mod phys;
pub(crate) mod quota;
pub(crate) mod ranges;
pub(crate) mod reason;
pub(crate) mod registry;
pub(crate) mod revocable;
pub(crate) mod revocable_pin;
pub(crate) mod sg;
pub(crate) mod sync;
pub(crate) mod task;
pub(crate) mod trace;

#[path = "../rust-bindings/bindings.rs"]
pub(crate) mod c;

use clients::Ready;
use debugfs::Folder;
use ib::{
    Client,
    ClientRegistration,
    Invalidation, //
};
use memory_peers::MemoryPeers;
use module::LoadedModule;
use pci::Bars;

#[cfg(not(peermem_kunit))]
module! {
    type: PeerMem,
    name: "nvidia-peermem",
    authors: ["peermem-rs contributors"],
    description: "NVIDIA GPU memory for RDMA devices",
    license: "Dual BSD/GPL",
}

/// The loaded module.
///
/// The fields are dropped in the order of their declaration. First, the module refuses new ranges.
/// Second, it removes the clients from sysfs. Third, it unregisters the clients, and each client
/// waits for its last region. Fourth, it waits for the last callback. The files stay readable until
/// the end.
pub(crate) struct PeerMem {
    _ready: Ready,
    _memory_peers: MemoryPeers,
    _persistent: ClientRegistration<clients::Persistent>,
    _revocable: Option<ClientRegistration<clients::Revocable>>,
    _callbacks: Option<nv::Callbacks>,
    _bars: Bars,
    _files: Folder,
}

impl kernel::Module for PeerMem {
    fn init(_module: &'static ThisModule) -> Result<Self> {
        // No function of ib_core or nvidia.ko may be called before these checks.
        ib::check()?;
        nv::check()?;
        let invalidation = match params::peerdirect_support() {
            0 => Invalidation::ClientUnmaps,
            1 => Invalidation::CoreUnmaps,
            other => return invalid("peerdirect_support", other),
        };
        if params::max_chunks() == 0 {
            pr_err!("parameter max_chunks is 0, but must be at least 1\n");
            return Err(EINVAL);
        }
        // nv_peer_mem is the predecessor of NVIDIA's nvidia-peermem. If nv_peer_mem is loaded, two
        // clients may have the same name.
        let has_nv_peer_mem = LoadedModule::find(c"nv_peer_mem").is_some();
        // Applications look for this name.
        let first = c"nv_mem";
        let memory_peers = MemoryPeers::probe(first)?;
        // If both modes are on, the revocable client registers first. ib_core asks clients in the
        // order of registration, and skips a revocable client for HCAs that do not support
        // revocation.
        let (callbacks, revocable, name) = match params::persistent_api_support() {
            1 => (None, None, first),
            0 => {
                ib::check_revocation();
                let callbacks = nv::Callbacks::new();
                let client = register(first, invalidation, has_nv_peer_mem)?;
                (Some(callbacks), Some(client), c"nv_mem_nc")
            }
            other => return invalid("persistent_api_support", other),
        };
        let persistent = register(name, invalidation, has_nv_peer_mem)?;
        if has_nv_peer_mem {
            pr_warn!("nv_peer_mem is loaded, too, and its client nv_mem is asked before this module's: rmmod nv_peer_mem, and remove its package (nvidia-peer-memory)\n");
        }
        let last = (name, clients::Persistent::peer_stats());
        let memory_peers = match &revocable {
            Some(_) => memory_peers.show(&[(first, clients::Revocable::peer_stats()), last]),
            None => memory_peers.show(&[last]),
        };
        Ok(PeerMem {
            // The files are made last, because nothing below can fail. Otherwise a user could keep
            // a file open while the module fails to load.
            _files: files::folder(),
            _bars: Bars,
            _callbacks: callbacks,
            _revocable: revocable,
            _persistent: persistent,
            _memory_peers: memory_peers,
            // This comes last: from here on, the clients accept ranges.
            _ready: Ready::new(),
        })
    }
}

fn register<C: ib::Client>(
    name: &CStr,
    invalidation: Invalidation,
    has_nv_peer_mem: bool,
) -> Result<ClientRegistration<C>> {
    ClientRegistration::new(name, params::version(), invalidation).inspect_err(|_| {
        if has_nv_peer_mem {
            pr_err!("not loaded: nv_peer_mem is loaded, and ib_core takes no second client {}: rmmod nv_peer_mem, and remove its package (nvidia-peer-memory)\n", name);
        } else {
            pr_err!("not loaded: ib_core does not accept the peer-memory client {}: look in /sys/kernel/mm/memory_peers for another module's client of that name\n", name);
        }
    })
}

fn invalid(parameter: &str, value: c_int) -> Result<PeerMem> {
    pr_err!("parameter {} is {}, but must be 0 or 1\n", parameter, value);
    Err(EINVAL)
}
