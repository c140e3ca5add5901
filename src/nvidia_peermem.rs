// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! `nvidia-peermem`: lends GPU memory to RDMA devices.
//!
//! ib_core asks its peer-memory clients about each address that `get_user_pages()` refuses. This
//! module has nvidia.ko pin the GPU memory there behind the GPU's BAR1, maps it for the HCA, and
//! answers with a scatter list of DMA addresses.
//!
//! Where to find what:
//! - [`region`] and [`revocable`]: the life of one registration, in its two flavours.
//! - [`extents`]: from pages to scatter-list entries.
//! - [`clients`]: joins a flavour to the kernel, as a client of ib_core's.
//! - [`ib`], [`nv`], [`sys`]: abstractions over ib_core, nvidia.ko, and the rest of the kernel. All
//!   `unsafe` code is there.
//! - [`refusal`], [`observe`]: why something was refused, and how that is told.

use kernel::prelude::*;

mod clients;
mod extents;
mod ib;
mod nv;
mod observe;
mod refusal;
mod region;
mod revocable;
mod sys;

#[path = "../rust-bindings/bindings.rs"]
mod c;

use clients::Ready;
use ib::Invalidation;
use ib::Registration;

module! {
    type: PeerMem,
    name: "nvidia-peermem",
    authors: ["peermem-rs contributors"],
    description: "NVIDIA GPU memory for RDMA devices",
    license: "Dual BSD/GPL",
}

/// The loaded module.
///
/// The order of the fields is the order in which they are dropped: first no new range is taken, then
/// the clients go, each of which waits for its last region, then the last callback is waited for.
struct PeerMem {
    _ready: Ready,
    _persistent: Registration<clients::Persistent>,
    _revocable: Option<Registration<clients::Revocable>>,
    _callbacks: Option<nv::Callbacks>,
}

impl kernel::Module for PeerMem {
    fn init(_module: &'static ThisModule) -> Result<Self> {
        let invalidation = match sys::peerdirect_support() {
            0 => Invalidation::ClientUnmaps,
            1 => Invalidation::CoreUnmaps,
            other => return invalid("peerdirect_support", other),
        };
        // With both flavours the revocable client goes first: ib_core asks in this order, and skips
        // it for HCAs that cannot lose a registration. Consumers look for the name `nv_mem`.
        let (callbacks, revocable, name) = match sys::persistent_api_support() {
            1 => (None, None, c"nv_mem"),
            0 => {
                let callbacks = nv::Callbacks::new()?;
                let client = register(c"nv_mem", invalidation)?;
                (Some(callbacks), Some(client), c"nv_mem_nc")
            }
            other => return invalid("persistent_api_support", other),
        };
        Ok(PeerMem {
            _callbacks: callbacks,
            _revocable: revocable,
            _persistent: register(name, invalidation)?,
            // Last: from here on ranges are taken.
            _ready: Ready::new(),
        })
    }
}

fn register<C: ib::Client>(name: &CStr, invalidation: Invalidation) -> Result<Registration<C>> {
    Registration::new(name, sys::version(), invalidation).inspect_err(|_| {
        pr_err!("ib_core does not accept the peer-memory client {}\n", name);
    })
}

fn invalid(parameter: &str, value: c_int) -> Result<PeerMem> {
    pr_err!("parameter {} cannot be {}: 0 or 1\n", parameter, value);
    Err(EINVAL)
}
