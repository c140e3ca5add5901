// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Scatter lists of DMA addresses.
//!
//! C header: [`include/linux/scatterlist.h`](srctree/include/linux/scatterlist.h); C side: [`sg.c`](sg.c).

use core::{
    marker::PhantomData,
    mem::MaybeUninit, //
};

use kernel::{
    bindings,
    prelude::*, //
};

use crate::{
    c,
    ranges::AddrRange,
    reason::Reason, //
};

/// A scatter list of DMA addresses without pages.
///
/// # Invariants
///
/// The entries are allocated, and only the drop frees them. The holder of an [`SgTableHead`] may
/// write to the entries until the drop.
pub(crate) struct SgTable(bindings::sg_table);

// SAFETY: The table only owns memory.
unsafe impl Send for SgTable {}

/// The head of an [`SgTable`], for C code that reads or writes its entries.
pub(crate) struct SgTableHead(pub(crate) bindings::sg_table);

/// Number of entries that Rust code fills between two calls of `peermem_sg_grow()`.
pub(crate) const CHUNK: usize = c::PEERMEM_SG_CHUNK as usize;

/// Number of entries that are first collected on the stack. A short list then allocates only the
/// entries that it needs.
const FEW: usize = 8;

/// Builder of an [`SgTable`] that grows with each added entry. The entries need not be counted
/// before they are added.
///
/// # Invariants
///
/// The entries from `first` to `end` belong to this builder alone: they are on the stack, or are
/// the last chunk of `list`. `at` points to one of them, or is `end`. The entries before `at` are
/// filled.
pub(crate) struct SgBuilder<'a> {
    at: *mut bindings::scatterlist,
    end: *mut bindings::scatterlist,
    first: *mut bindings::scatterlist,
    _few: PhantomData<&'a mut [MaybeUninit<bindings::scatterlist>; FEW]>,
    /// `list.table` is always a valid table.
    list: c::peermem_sg,
    /// `true` once the allocation of a chunk has failed.
    failed: bool,
}

impl<'a> SgBuilder<'a> {
    fn new(few: &'a mut [MaybeUninit<bindings::scatterlist>; FEW]) -> Self {
        let all = few.as_mut_ptr_range();
        SgBuilder {
            at: all.start.cast(),
            end: all.end.cast(),
            first: all.start.cast(),
            _few: PhantomData,
            list: c::peermem_sg::default(),
            failed: false,
        }
    }

    /// Adds an entry, unless there is no memory for it. May sleep.
    #[inline(always)]
    pub(crate) fn push(&mut self, entry: AddrRange) {
        if self.at == self.end {
            self.grow();
        }
        self.push_within(entry);
    }

    /// Adds an entry and returns `true`, if there is room without an allocation.
    #[inline(always)]
    pub(crate) fn push_within(&mut self, entry: AddrRange) -> bool {
        let at = self.at;
        if at == self.end {
            return false;
        }
        // CAST: `SgLayout` makes no entry that is longer than `MAX_ENTRY`.
        let len = entry.len as c_uint;
        // SAFETY: The entry is before `end`, and belongs to this builder alone. Its chain bits stay
        // unchanged.
        unsafe {
            (*at).length = len;
            (*at).dma_address = entry.addr;
            // x86-64 and arm64 kernels always have this field.
            (*at).dma_length = len;
        }
        // INVARIANT: `at` was before `end`, and its entry is filled now.
        self.at = at.wrapping_add(1);
        true
    }

    /// Returns the number of filled entries from `first` on.
    fn filled(&self) -> c_uint {
        // CAST: There are at most `CHUNK` entries.
        ((self.at.addr() - self.first.addr()) / size_of::<bindings::scatterlist>()) as c_uint
    }

    /// Makes room for more entries. If there is no memory, the next entries overwrite the old
    /// entries.
    #[cold]
    #[inline(never)]
    fn grow(&mut self) {
        let mut used = 0;
        if !self.failed {
            let filled = self.filled();
            // SAFETY: No earlier call for the list has failed. `filled` entries from `first` on are
            // filled.
            used = unsafe { c::peermem_sg_grow(&mut self.list, self.first, filled) };
        }
        if used == 0 {
            self.failed = true;
        } else {
            // INVARIANT: The chunk has `CHUNK` entries. The first `used` of them are filled, and at
            // least one is free.
            self.first = self.list.chunk;
            self.end = self.first.wrapping_add(CHUNK);
        }
        self.at = self.first.wrapping_add(used as usize);
    }

    /// Returns the list of the added entries, and the value in `filled`. Must be called once. Takes
    /// `self` by reference, because a move would copy all of it.
    fn finish<R>(&mut self, filled: Result<R, Reason>) -> Result<(SgTable, R), Reason> {
        let count = self.filled();
        let ended = !self.failed && filled.is_ok() && {
            // SAFETY: No earlier call for the list has failed, and this is the last call. `count`
            // entries from `first` on are filled.
            unsafe { c::peermem_sg_finish(&mut self.list, self.first, count) == 0 }
        };
        // INVARIANT: The C functions allocated the entries. `sg_free_table()` accepts the table
        // after any result of these functions.
        let table = SgTable(self.list.table);
        match filled {
            Ok(filled) if ended => Ok((table, filled)),
            Ok(_) => Err(Reason::NoMemory),
            Err(reason) => Err(reason),
        }
    }
}

impl SgTable {
    /// Allocates exactly as many entries as `fill` adds, but at least one, and fills them. Also
    /// returns the result of `fill`.
    #[inline(always)]
    pub(crate) fn build<R>(
        fill: impl FnOnce(&mut SgBuilder<'_>) -> Result<R, Reason>,
    ) -> Result<(Self, R), Reason> {
        let mut few = [const { MaybeUninit::uninit() }; FEW];
        let mut builder = SgBuilder::new(&mut few);
        let filled = fill(&mut builder);
        builder.finish(filled)
    }

    /// Returns the address ranges of the entries. Must not be called once C code has the table's
    /// head.
    pub(crate) fn ranges(&self) -> impl Iterator<Item = AddrRange> + '_ {
        let mut next = self.0.sgl;
        (0..self.0.nents).map(move |_| {
            let at = next;
            // SAFETY: The table has `nents` entries, and none of them changes.
            unsafe {
                next = bindings::sg_next(at);
                AddrRange {
                    addr: (*at).dma_address,
                    // `dma_length` has the same value.
                    len: u64::from((*at).length),
                }
            }
        })
    }

    /// Returns the number of entries.
    pub(crate) fn entries(&self) -> u32 {
        self.0.nents
    }

    /// Returns a copy of the head for ib_core. This table keeps the entries.
    pub(crate) fn head(&self) -> SgTableHead {
        SgTableHead(self.0)
    }
}

impl Drop for SgTable {
    fn drop(&mut self) {
        // SAFETY: The entries are allocated by the type invariant, and nothing else frees them.
        unsafe { bindings::sg_free_table(&mut self.0) };
    }
}
