// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! The form of a suite ([`suite!`]), the setup of its cases ([`SetUp`]), and their common helpers.

use kernel::{
    bindings::scatterlist,
    page::PAGE_SIZE,
    str::CStr,
    sync::{
        atomic::{
            Atomic,
            Relaxed, //
        },
        Arc, //
    }, //
};

use crate::{
    clients,
    ib::{
        Client,
        ClientRegistration,
        RevokerCell,
        Ticket, //
    },
    params,
    pci::PciDevice,
    peer_stats::{
        MrStats,
        PeerStats, //
    }, //
    ranges::PageSize,
    reason::Reason,
    sg::SgTableHead, //
};

pub(crate) use kernel::prelude::*;

pub(crate) use crate::{
    clients::Ready,
    fakes::{
        Event::*,
        Name::*, //
        *,
    },
    ib::Invalidation::{
        self,
        ClientUnmaps,
        CoreUnmaps, //
    },
    ib_core::*, //
};

/// Declares a KUnit suite. Each function is a case, and takes its setup, a [`SetUp`].
///
/// The macro is called with parentheses and contains only items, because rustfmt formats only such
/// macro calls.
macro_rules! suite {
    (
        mod $suite:ident;
        $(
            $(#[$($attribute:tt)*])*
            fn $case:ident($up:tt: $setup:ident $(,)?) { $($body:tt)* }
        )*
    ) => {
        #[kernel::prelude::kunit_tests($suite)]
        mod tests {
            use super::*;

            $(
                $(#[$($attribute)*])*
                #[test]
                fn $case() -> Result {
                    <$setup as $crate::setup::SetUp>::case(|$up: &$setup| -> Result {
                        $($body)*
                        Ok(())
                    })
                }
            )*
        }
    };
}

pub(crate) use suite;

/// The setup of a case.
pub(crate) trait SetUp: Sized {
    fn case(body: impl FnMut(&Self) -> Result) -> Result;
}

/// Runs a case in a new world, with these clients and an empty log.
fn run<U>(clients: impl FnOnce() -> Result<U>, mut body: impl FnMut(&U) -> Result) -> Result {
    test(|| {
        let up = clients()?;
        log();
        body(&up)?;
        same!(holds(), 0);
        drop(up);
        Ok(())
    })
}

/// Start of the tests' GPU memory.
pub(crate) const VA: u64 = 0x7f00_0000_0000;
/// Number of pages of most ranges.
pub(crate) const PAGES: u64 = 4;
/// Number of entries that make a scatter list of three chunks.
// CAST: Both types have 64 bits.
pub(crate) const THREE_CHUNKS: u64 = (PAGE_SIZE / size_of::<scatterlist>()) as u64 * 5 / 2;

/// Returns a range of `count` whole pages.
pub(crate) fn pages(count: u64) -> Request {
    // CAST: Both types have 64 bits.
    Request::new(VA, (count * KIB_64) as usize)
}

/// Returns the range that most cases register.
pub(crate) fn range() -> Request {
    pages(PAGES)
}

/// Sets the layout of the memory that is pinned from now on.
pub(crate) fn lies(layout: Layout) {
    with(|world| world.table.address = layout);
}

/// Registers a range, and drops the log of its calls.
pub(crate) fn mapped(request: Request) -> Result<Umem> {
    let umem = get(request)?;
    log();
    Ok(umem)
}

/// A client that ib_core knows, in a module that is up.
///
/// The fields are dropped in their order.
pub(crate) struct Up<C: Client> {
    _ready: Ready,
    _registration: ClientRegistration<C>,
}

pub(crate) fn persistent(name: &CStr) -> Result<Up<clients::Persistent>> {
    Ok(Up {
        _registration: ClientRegistration::new(name, params::version(), ClientUnmaps)?,
        _ready: Ready::new(),
    })
}

pub(crate) fn revocable(invalidation: Invalidation) -> Result<Up<OfTest>> {
    OfTest::next();
    Ok(Up {
        _registration: ClientRegistration::new(c"nv_mem", params::version(), invalidation)?,
        _ready: Ready::new(),
    })
}

/// A setup without a registered client.
pub(crate) struct NoClient;
/// The persistent client alone, whose pins are never revoked. The client knows that the NIC reaches
/// the GPU.
pub(crate) type PersistentClient = Up<clients::Persistent>;
/// The persistent client with `provider_maps=1`.
pub(crate) struct ProviderMaps {
    _up: PersistentClient,
}
/// The revocable client alone, whose pins are revoked when the memory is freed. The client unmaps
/// by itself.
pub(crate) type RevocableClient = Up<OfTest>;
/// Both clients, in the order in which the module registers them. The second client knows that the
/// NIC reaches the GPU.
pub(crate) type BothClients = (RevocableClient, PersistentClient);
/// The revocable client alone, with an ib_core that unmaps: `peerdirect_support=1`.
pub(crate) struct CoreUnmapsClient {
    _up: Up<OfTest>,
}

impl SetUp for NoClient {
    fn case(body: impl FnMut(&Self) -> Result) -> Result {
        run(|| Ok(NoClient), body)
    }
}

impl SetUp for PersistentClient {
    fn case(body: impl FnMut(&Self) -> Result) -> Result {
        let client = || {
            let up = persistent(c"nv_mem")?;
            get(EachNic::CANNOT_LOSE.range())?.release();
            Ok(up)
        };
        run(client, body)
    }
}

impl SetUp for ProviderMaps {
    fn case(body: impl FnMut(&Self) -> Result) -> Result {
        let client = || {
            fake_provider_maps(true);
            persistent(c"nv_mem").map(|_up| ProviderMaps { _up })
        };
        run(client, body)
    }
}

impl SetUp for RevocableClient {
    fn case(body: impl FnMut(&Self) -> Result) -> Result {
        run(|| revocable(ClientUnmaps), body)
    }
}

impl SetUp for BothClients {
    fn case(body: impl FnMut(&Self) -> Result) -> Result {
        let clients = || {
            let up = (revocable(ClientUnmaps)?, persistent(c"nv_mem_nc")?);
            get(EachNic::CANNOT_LOSE.range())?.release();
            Ok(up)
        };
        run(clients, body)
    }
}

impl SetUp for CoreUnmapsClient {
    fn case(body: impl FnMut(&Self) -> Result) -> Result {
        let client = || revocable(CoreUnmaps).map(|_up| CoreUnmapsClient { _up });
        run(client, body)
    }
}

/// Both clients, and a NIC for which ib_core asks one of them. The case runs for each NIC, and once
/// more with `provider_maps=1`.
pub(crate) struct EachNic {
    /// `true` if the revocable client is asked.
    pub(crate) can_lose: bool,
    provider_maps: bool,
    // The calls that the client makes:
    pub(crate) pin: Event,
    pub(crate) map: Event,
    pub(crate) unmap: Event,
    pub(crate) put: Event,
}

impl EachNic {
    pub(crate) const CAN_LOSE: EachNic = EachNic {
        can_lose: true,
        provider_maps: false,
        pin: Pin,
        map: BarMap,
        unmap: BarUnmap,
        put: Put,
    };
    pub(crate) const CANNOT_LOSE: EachNic = EachNic {
        can_lose: false,
        provider_maps: false,
        pin: PinPersistent,
        map: BarMap,
        unmap: BarUnmap,
        put: PutPersistent,
    };
    const PROVIDER_MAPS: EachNic = EachNic {
        provider_maps: true,
        map: Map,
        unmap: Unmap,
        ..EachNic::CANNOT_LOSE
    };

    pub(crate) fn pages(&self, count: u64) -> Request {
        self.asks(pages(count))
    }

    pub(crate) fn range(&self) -> Request {
        self.asks(range())
    }

    /// Returns the request for this NIC.
    pub(crate) fn asks(&self, request: Request) -> Request {
        Request {
            can_lose: self.can_lose,
            ..request
        }
    }
}

impl SetUp for EachNic {
    fn case(mut body: impl FnMut(&Self) -> Result) -> Result {
        BothClients::case(|_| {
            for nic in rows([
                EachNic::CAN_LOSE,
                EachNic::CANNOT_LOSE,
                EachNic::PROVIDER_MAPS,
            ]) {
                fake_provider_maps(nic.provider_maps);
                log();
                body(&nic)?;
            }
            Ok(())
        })
    }
}

/// [`clients::Revocable`] with a new cell for each test, because a client that revokes can be
/// registered only once.
pub(crate) struct OfTest;

static CELLS: [RevokerCell; 256] = [const { RevokerCell::new() }; 256];
static CELL: Atomic<usize> = Atomic::new(0);

impl OfTest {
    /// Selects the next cell, so that this type registers as a new client.
    pub(crate) fn next() {
        CELL.fetch_add(1, Relaxed);
    }
}

impl Client for OfTest {
    type Mr = <clients::Revocable as Client>::Mr;

    fn acquire(stats: MrStats, addr: u64, size: u64) -> Result<Arc<Self::Mr>, Reason> {
        clients::Revocable::acquire(stats, addr, size)
    }

    fn is_refused(addr: u64, size: u64) -> bool {
        clients::Revocable::is_refused(addr, size)
    }

    fn refused(addr: u64, size: u64, reason: Reason) {
        clients::Revocable::refused(addr, size, reason);
    }

    fn get_pages(mr: &Self::Mr, ticket: Ticket) -> Result {
        clients::Revocable::get_pages(mr, ticket)
    }

    fn dma_map(mr: &Self::Mr, device: Option<&PciDevice>) -> Result<SgTableHead> {
        clients::Revocable::dma_map(mr, device)
    }

    fn dma_unmap(mr: &Self::Mr) {
        clients::Revocable::dma_unmap(mr);
    }

    fn release(mr: Arc<Self::Mr>) {
        clients::Revocable::release(mr);
    }

    fn stats(mr: &Self::Mr) -> &MrStats {
        <clients::Revocable as Client>::stats(mr)
    }

    fn page_size(mr: &Self::Mr) -> PageSize {
        <clients::Revocable as Client>::page_size(mr)
    }

    fn peer_stats() -> &'static PeerStats {
        clients::Revocable::peer_stats()
    }

    fn revoker() -> Option<&'static RevokerCell> {
        CELLS.get(CELL.load(Relaxed) % CELLS.len())
    }
}
