// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! What both modes of a registration have in common.
//!
//! Uses `core` and [`env`] alone.

use super::{
    device::Gpus,
    env::{
        self,
        PciDevice,
        SgTable,
        SgTableHead,
        Ticket, //
    },
    history::PinMode,
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

/// The life of one registration, as ib_core has it. The drop is `release`.
pub(crate) trait Mr: Sized + Send + Sync + 'static {
    /// Which of the two it is.
    const MODE: PinMode;

    /// `acquire`: pins the pages of `[addr, addr + len)`, once: all of them, or none. May sleep.
    fn pin(addr: u64, len: u64) -> Result<Self, Reason>;

    /// `get_pages`: ib_core's name for it. Calls no provider.
    fn set_ticket(&self, ticket: Ticket) -> Result<(), Reason>;

    /// `dma_map`: maps the whole for `device`, or nothing. May sleep.
    fn map(&self, device: &PciDevice) -> Result<SgTableHead, Reason>;

    /// `dma_unmap`: undoes [`Mr::map`], if that is still to do; the scatter list stays. May sleep.
    fn unmap(&self);

    /// The pinned range of virtual addresses.
    fn span(&self) -> &Span;

    /// `get_page_size`.
    fn page_size(&self) -> PageSize;
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

/// What a registration by the calling thread puts in the registry.
pub(crate) fn registration_info(
    mode: PinMode,
    span: Span,
    page: PageSize,
    chunks: usize,
    gpus: Gpus,
) -> RegistrationInfo {
    let (task, since) = env::caller();
    RegistrationInfo {
        mode,
        span,
        page,
        chunks,
        gpus,
        task,
        since,
    }
}
