// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! The part of a registration that both modes share.
//!
//! Uses only `core` and [`env`].

use super::{
    device::Gpus,
    env::{self, *},
    history::PinMode,
    quota::Charge,
    ranges::{
        self,
        PageSize,
        Span,
        LONG_RUN, //
    },
    reason::{
        Event,
        Reason, //
    },
    registry::RegistrationInfo, //
};

/// Longest range that is passed to nvidia.ko, in bytes.
///
/// nvidia.ko allocates a structure for each page *before* it looks at the address. A range of 16
/// TiB costs 4 GiB of kernel memory just to be refused. No GPU has 1 TiB of memory.
pub(crate) const MAX_LEN: u64 = 1 << 40;

/// The life of one registration, in the order of ib_core's calls.
pub(crate) trait Mr: Sized + Send + Sync + 'static {
    /// The pin mode.
    const MODE: PinMode;

    /// `acquire`: pins all pages of `[addr, addr + len)`, or none. May sleep.
    fn pin(stats: MrStats, addr: u64, len: u64) -> Result<Shared<Self>, Reason>;

    /// `get_pages`: stores ib_core's ticket for the registration. Does not call nvidia.ko.
    fn set_ticket(&self, ticket: Ticket) -> Result<(), Reason>;

    /// `dma_map`: maps the whole region for `device`, or nothing. May sleep.
    fn map(&self, device: &PciDevice) -> Result<SgTableHead, Reason>;

    /// `dma_unmap`: undoes [`Mr::map`] if the region is mapped, and keeps the scatter list. May
    /// sleep.
    fn unmap(&self);

    /// `release`: unpins, and frees the scatter list. May sleep.
    fn release(this: Shared<Self>);

    /// Returns the constant part of the registration.
    fn fixed(&self) -> &Fixed;
}

/// The constant part of a registration.
pub(crate) struct Fixed {
    /// The pinned range of virtual addresses.
    pub(crate) span: Span,
    /// Smallest page size of all pins. Set once the whole range is pinned.
    page: SetOnce<PageSize>,
    /// The charge to the user's quota. Kept while a callback may come, because the memory may be
    /// pinned until that callback.
    _charge: Charge,
    /// The registration's share of its client's statistics.
    pub(crate) stats: MrStats,
    /// Keeps the module loaded while a callback may come.
    _module: ModuleRef,
}

impl Fixed {
    /// Makes the constant part for `[addr, addr + len)`, and charges the range to the user of the
    /// calling process.
    pub(crate) fn new(stats: MrStats, addr: u64, len: u64) -> Result<Self, Reason> {
        let module = ModuleRef::try_new().ok_or(Reason::Unloading)?;
        let span = Span::covering(addr, len, PageSize::KIB_64, MAX_LEN)?;
        Ok(Fixed {
            span,
            page: SetOnce::new(),
            _charge: Charge::new(span.len())?,
            stats,
            _module: module,
        })
    }

    /// `get_page_size`: returns the smallest page size of all pins.
    #[inline]
    pub(crate) fn page_size(&self) -> PageSize {
        self.page.copy().unwrap_or(PageSize::KIB_64)
    }

    /// Sets the page size, and returns the data of the registration that the registry shows.
    /// `chunks` is the number of pins. Called by the thread that registers the region.
    pub(crate) fn pinned(
        &self,
        mode: PinMode,
        page: PageSize,
        chunks: usize,
        gpus: Gpus,
    ) -> RegistrationInfo {
        self.page.populate(page);
        let (task, since) = env::caller();
        RegistrationInfo {
            mode,
            span: self.span,
            page,
            chunks,
            gpus,
            task,
            since,
        }
    }
}

/// Returns an error if the process was killed. The search over several allocations can need
/// thousands of calls, so a fatal signal ends the search. `get_user_pages()` does the same.
pub(crate) fn check_killed() -> Result<(), Reason> {
    (!env::is_killed()).then_some(()).ok_or(Reason::Killed)
}

/// Logs a warning for a scatter list in which an HCA page can be larger than 2 GiB, if the
/// application uses virtual addresses as `iova`.
///
/// Behind a translating IOMMU, this module makes no such list: see [`ranges::IovaLayout`].
pub(crate) fn note_large_hca_page(span: &Span, table: &SgTable) {
    if span.len() > LONG_RUN && ranges::common_distance(span.start(), table.ranges()) == Some(0) {
        env::report(Event::LargeHcaPage, Some(span), None);
    }
}
