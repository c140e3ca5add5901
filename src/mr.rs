// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! What both modes of a registration have in common.
//!
//! Uses `core` and [`env`] alone.

use super::{
    device::Gpus,
    env::{
        self,
        ModuleRef,
        MrStats,
        PciDevice,
        SetOnce,
        SgTable,
        SgTableHead,
        Shared,
        Ticket, //
    },
    history::PinMode,
    quota::Charge,
    ranges::{
        self,
        PageSize,
        Span,
        LONG_RUN, //
    },
    reason::Reason,
    registry::RegistrationInfo, //
};

/// The longest range that is handed to the provider, in bytes.
///
/// nvidia.ko allocates a record for each page *before* it looks at the address: a range of 16 TiB
/// costs it 4 GiB of kernel memory only to be refused. No GPU has 1 TiB of memory.
pub(crate) const MAX_LEN: u64 = 1 << 40;

/// The life of one registration, as ib_core has it.
pub(crate) trait Mr: Sized + Send + Sync + 'static {
    /// Which of the two it is.
    const MODE: PinMode;

    /// `acquire`: pins the pages of `[addr, addr + len)`, once: all of them, or none. May sleep.
    fn pin(stats: MrStats, addr: u64, len: u64) -> Result<Shared<Self>, Reason>;

    /// `get_pages`: ib_core's name for it. Calls no provider.
    fn set_ticket(&self, ticket: Ticket) -> Result<(), Reason>;

    /// `dma_map`: maps the whole for `device`, or nothing. May sleep.
    fn map(&self, device: &PciDevice) -> Result<SgTableHead, Reason>;

    /// `dma_unmap`: undoes [`Mr::map`], if that is still to do; the scatter list stays. May sleep.
    fn unmap(&self);

    /// `release`: unpins, and frees the scatter list. May sleep.
    fn release(this: Shared<Self>);

    /// Its constant part.
    fn fixed(&self) -> &Fixed;
}

/// The constant part of a registration.
pub(crate) struct Fixed {
    span: Span,
    /// Size of the smallest pages. Set when the whole range is pinned.
    page: SetOnce<PageSize>,
    /// For as long as a callback may come, for so long the memory may be pinned.
    _charge: Charge,
    stats: MrStats,
    /// Keeps the module loaded while a callback may come.
    _module: ModuleRef,
}

impl Fixed {
    /// Makes that of `[addr, addr + len)`, which is charged to the user of the calling process.
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

    /// The pinned range of virtual addresses.
    #[inline]
    pub(crate) fn span(&self) -> &Span {
        &self.span
    }

    /// `get_page_size`: the size of the smallest pages.
    #[inline]
    pub(crate) fn page_size(&self) -> PageSize {
        self.page.copy().unwrap_or(PageSize::KIB_64)
    }

    /// Its part in what ib_core counts.
    #[inline]
    pub(crate) fn stats(&self) -> &MrStats {
        &self.stats
    }

    /// Sets the page size. Returns the registration's data for the registry; `chunks` is the number of its pins. Called by the
    /// thread that registers.
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

/// Refuses to go on with a search over several allocations for a process that was killed, as
/// `get_user_pages()` does. The search can have thousands of calls ahead of it.
pub(crate) fn check_killed() -> Result<(), Reason> {
    if env::is_killed() {
        return Err(Reason::Killed);
    }
    Ok(())
}

/// Logs a scatter list for which an HCA page can be larger than 2 GiB, if the application uses virtual addresses as `iova`.
///
/// Behind an IOMMU that translates this module makes none: see [`ranges::IovaLayout`].
pub(crate) fn note_large_hca_page(span: &Span, table: &SgTable) {
    if span.len() > LONG_RUN && ranges::common_distance(span.start(), table.ranges()) == Some(0) {
        env::large_hca_page(span);
    }
}
