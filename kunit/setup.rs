// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! How a suite is written down ([`suite!`]), what its cases begin with ([`SetUp`]), and all that they use.

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

/// A suite of KUnit's: one case a function, which takes what the case begins with, a [`SetUp`].
///
/// In parentheses, and with nothing but items in them, for rustfmt looks into such macros alone.
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

/// What a case begins with.
pub(crate) trait SetUp: Sized {
    fn case(body: impl FnMut(&Self) -> Result) -> Result;
}

/// Runs a case in a world of its own, with these clients and an empty log.
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

/// Where the tests' GPU memory begins.
pub(crate) const VA: u64 = 0x7f00_0000_0000;
/// Pages of most ranges.
pub(crate) const PAGES: u64 = 4;
/// So many entries that a scatter list has three chunks of them.
// CAST: As wide.
pub(crate) const THREE_CHUNKS: u64 = (PAGE_SIZE / size_of::<scatterlist>()) as u64 * 5 / 2;

/// A range of whole pages.
pub(crate) fn pages(count: u64) -> Request {
    // CAST: Small.
    Request::new(VA, (count * KIB_64) as usize)
}

/// The range that most cases register.
pub(crate) fn range() -> Request {
    pages(PAGES)
}

/// Memory that is pinned from now on lies like that.
pub(crate) fn lies(layout: Layout) {
    with(|world| world.table.address = layout);
}

/// Registers a range, whose calls are not looked at.
pub(crate) fn mapped(request: Request) -> Result<Umem> {
    let umem = get(request)?;
    log();
    Ok(umem)
}

/// A client that ib_core knows, in a module that is up.
///
/// The order of the fields is the order in which they are dropped.
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

/// No client is registered.
pub(crate) struct NoClient;
/// The client whose pins nobody takes away, alone, which knows that the NIC reaches the GPU.
pub(crate) type PersistentClient = Up<clients::Persistent>;
/// The same with `provider_maps=1`.
pub(crate) struct ProviderMaps {
    _up: PersistentClient,
}
/// The client whose pins go when the memory is freed, alone. It unmaps by itself.
pub(crate) type RevocableClient = Up<OfTest>;
/// Both, in the order in which the module registers them. The second knows that the NIC reaches the GPU.
pub(crate) type BothClients = (RevocableClient, PersistentClient);
/// The revocable client alone, where ib_core unmaps: `peerdirect_support=1`.
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

/// Both clients, and a NIC for which one of them is asked. The case is run for each NIC, and once more with
/// `provider_maps=1`.
pub(crate) struct EachNic {
    /// The revocable client is asked.
    pub(crate) can_lose: bool,
    provider_maps: bool,
    // What the client calls.
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

    /// The request, of this NIC.
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

/// [`clients::Revocable`], but for the cell: a client that revokes can be registered once, and each
/// test registers one.
pub(crate) struct OfTest;

static CELLS: [RevokerCell; 256] = [const { RevokerCell::new() }; 256];
static CELL: Atomic<usize> = Atomic::new(0);

impl OfTest {
    /// From now on this is another client.
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
