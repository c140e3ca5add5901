// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! The macro [`suite!`], which declares a KUnit suite, and helpers that all test cases share.

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
    },
    phys::{
        PhysRanges,
        Reader, //
    },
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

/// Declares a KUnit suite. Each function is a case, and runs with a new state of the fakes.
///
/// The macro is called with parentheses and contains only items, because rustfmt formats only such
/// macro calls.
macro_rules! suite {
    (
        mod $suite:ident;
        $($(#[$($attribute:tt)*])* fn $case:ident() { $($body:tt)* })*
    ) => {
        #[kernel::prelude::kunit_tests($suite)]
        mod tests {
            use super::*;

            $(
                $(#[$($attribute)*])*
                #[test]
                fn $case() -> Result {
                    test(|| {
                        $($body)*
                        Ok(())
                    })
                }
            )*
        }
    };
}

pub(crate) use suite;

/// Virtual address of the tests' GPU memory.
pub(crate) const VA: u64 = 0x7f00_0000_0000;
/// Number of entries that make a scatter list of three chunks.
// CAST: Both types have 64 bits.
pub(crate) const THREE_CHUNKS: u64 = (PAGE_SIZE / size_of::<scatterlist>()) as u64 * 5 / 2;

/// Returns a request to register `count` whole pages, as a driver that supports revocation makes
/// it.
pub(crate) fn pages(count: u64) -> Request {
    Request {
        addr: VA,
        // CAST: Both types have 64 bits.
        len: (count * KIB_64) as usize,
        can_lose: true,
        form: Form::Modern,
    }
}

/// Returns `request` as a driver without support for revocation would make it.
pub(crate) fn cannot_lose(request: Request) -> Request {
    Request {
        can_lose: false,
        ..request
    }
}

/// Reads the pages at these addresses.
pub(crate) fn read(reader: &mut Reader<'_, '_>, addrs: &[u64]) -> Result<(), Reason> {
    reader.batches(|reader, from| Ok(reader.pages(addrs, from, |addr| *addr, PageSize::KIB_64)))
}

/// Returns the ranges of `count` pages in this layout.
pub(crate) fn memory(count: u64, layout: Layout) -> Result<PhysRanges, Reason> {
    let mut addrs = KVVec::new();
    for addr in (0..count).map(layout) {
        let pushed = addrs.push(addr, GFP_KERNEL);
        pushed.map_err(|_| Reason::NoMemory)?;
    }
    PhysRanges::read(VA, |reader| read(reader, &addrs)).map(|(memory, _)| memory)
}

/// A registered client, in a module that is ready for registrations of memory.
///
/// The fields are dropped in the order of their declaration.
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

/// [`clients::Revocable`] with a new cell for each test, because a client that revokes can be
/// registered only once.
pub(crate) struct OfTest;

static CELLS: [RevokerCell; 32] = [const { RevokerCell::new() }; 32];
static CELL: Atomic<usize> = Atomic::new(0);

impl OfTest {
    /// Selects the next cell, so that this type registers as a new client.
    pub(crate) fn next() {
        CELL.fetch_add(1, Relaxed);
    }
}

/// Defines functions that call those of [`clients::Revocable`].
macro_rules! as_revocable {
    ($(fn $name:ident($($argument:ident: $type:ty),*) $(-> $result:ty)?;)*) => {
        $(fn $name($($argument: $type),*) $(-> $result)? {
            <clients::Revocable as Client>::$name($($argument),*)
        })*
    };
}

impl Client for OfTest {
    type Mr = <clients::Revocable as Client>::Mr;

    as_revocable!(
        fn acquire(stats: MrStats, addr: u64, size: u64) -> Result<Arc<Self::Mr>, Reason>;
        fn is_refused(addr: u64, size: u64) -> bool;
        fn refused(addr: u64, size: u64, reason: Reason);
        fn get_pages(mr: &Self::Mr, ticket: Ticket) -> Result;
        fn dma_map(mr: &Self::Mr, device: Option<&PciDevice>) -> Result<SgTableHead>;
        fn dma_unmap(mr: &Self::Mr);
        fn release(mr: Arc<Self::Mr>);
        fn stats(mr: &Self::Mr) -> &MrStats;
        fn page_size(mr: &Self::Mr) -> PageSize;
        fn peer_stats() -> &'static PeerStats;
    );

    fn revoker() -> Option<&'static RevokerCell> {
        CELLS.get(CELL.load(Relaxed) % CELLS.len())
    }
}
