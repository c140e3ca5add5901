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
    ranges::{
        AddrRange,
        SgEntry, //
    },
    reason::Reason, //
};

/// A scatter list of DMA addresses without pages.
///
/// # Invariants
///
/// The entries are allocated, and freed by the drop alone. Whoever has an [`SgTableHead`] may write to
/// them until then.
pub(crate) struct SgTable(bindings::sg_table);

// SAFETY: A plain owner of memory.
unsafe impl Send for SgTable {}

/// The head of an [`SgTable`], for C code that reads its entries, or writes to them.
pub(crate) struct SgTableHead(pub(crate) bindings::sg_table);

/// Number of entries that Rust code fills between two calls of `peermem_sg_grow()`.
pub(crate) const CHUNK: usize = c::PEERMEM_SG_CHUNK as usize;

/// So many entries are gathered on the stack first: a list of few takes memory for just these.
const FEW: usize = 8;

/// The end of a [`SgTable`] that grows: nobody walks twice over the memory to count its entries first.
///
/// # Invariants
///
/// From `first` to `end` are entries that nobody else has: those on the stack, or the last chunk of `list`. `at` is one of
/// them, or `end`; those before it are filled.
pub(crate) struct SgBuilder<'a> {
    at: *mut bindings::scatterlist,
    end: *mut bindings::scatterlist,
    first: *mut bindings::scatterlist,
    _few: PhantomData<&'a mut [MaybeUninit<bindings::scatterlist>; FEW]>,
    /// Its table is always one.
    list: c::peermem_sg,
    /// There was no memory for a chunk.
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
    pub(crate) fn push(&mut self, entry: SgEntry) {
        if self.at == self.end {
            self.grow();
        }
        self.push_within(entry);
    }

    /// Adds an entry, and returns `true`, if there is room without an allocation.
    #[inline(always)]
    pub(crate) fn push_within(&mut self, entry: SgEntry) -> bool {
        let at = self.at;
        if at == self.end {
            return false;
        }
        // SAFETY: Before `end`, and nobody else's. What links it to others stays as it is.
        unsafe {
            (*at).length = entry.len;
            (*at).dma_address = entry.addr;
            #[cfg(CONFIG_NEED_SG_DMA_LENGTH)]
            {
                (*at).dma_length = entry.len;
            }
        }
        // INVARIANT: It was before `end`, and is filled.
        self.at = at.wrapping_add(1);
        true
    }

    /// How many entries are filled, of those from `first` on.
    fn filled(&self) -> c_uint {
        // CAST: Few.
        ((self.at.addr() - self.first.addr()) / size_of::<bindings::scatterlist>()) as c_uint
    }

    /// Makes room, in a new chunk; where there is no memory for one, over what is there.
    #[cold]
    #[inline(never)]
    fn grow(&mut self) {
        let mut used = 0;
        if !self.failed {
            let filled = self.filled();
            // SAFETY: None of the calls for the list has failed. So many entries are filled.
            used = unsafe { c::peermem_sg_grow(&mut self.list, self.first, filled) };
        }
        if used == 0 {
            self.failed = true;
        } else {
            // INVARIANT: A chunk with so many entries, of which the first `used` are filled, and this is not all.
            self.first = self.list.chunk;
            self.end = self.first.wrapping_add(CHUNK);
        }
        self.at = self.first.wrapping_add(used as usize);
    }

    /// The list of the entries that were added, and what adding them returned. To be called once; not by value, which would
    /// copy all of it.
    fn finish<R>(&mut self, filled: Result<R, Reason>) -> Result<(SgTable, R), Reason> {
        let count = self.filled();
        let ended = !self.failed && filled.is_ok() && {
            // SAFETY: None of the calls for the list has failed, and this is the last. So many entries are filled.
            unsafe { c::peermem_sg_finish(&mut self.list, self.first, count) == 0 }
        };
        // INVARIANT: Allocated by the C functions; whatever they did, `sg_free_table()` takes it.
        let table = SgTable(self.list.table);
        match filled {
            Ok(filled) if ended => Ok((table, filled)),
            Ok(_) => Err(Reason::NoMemory),
            Err(reason) => Err(reason),
        }
    }
}

impl SgTable {
    /// Allocates exactly as many entries as `fill` adds, at least one, and fills them. Also returns what `fill` does.
    #[inline(always)]
    pub(crate) fn build<R>(
        fill: impl FnOnce(&mut SgBuilder<'_>) -> Result<R, Reason>,
    ) -> Result<(Self, R), Reason> {
        let mut few = [const { MaybeUninit::uninit() }; FEW];
        let mut builder = SgBuilder::new(&mut few);
        let filled = fill(&mut builder);
        builder.finish(filled)
    }

    /// Its entries, while nobody else has them.
    pub(crate) fn ranges(&self) -> impl Iterator<Item = AddrRange> + '_ {
        let mut next = self.0.sgl;
        (0..self.0.nents).map(move |_| {
            let at = next;
            // SAFETY: The table has so many entries, and none of them changes.
            unsafe {
                next = bindings::sg_next(at);
                AddrRange {
                    addr: (*at).dma_address,
                    // What it is of DMA is the same.
                    len: u64::from((*at).length),
                }
            }
        })
    }

    /// How many entries it has.
    pub(crate) fn entries(&self) -> u32 {
        self.0.nents
    }

    /// A copy of the head for ib_core; the entries stay ours.
    pub(crate) fn head(&self) -> SgTableHead {
        SgTableHead(self.0)
    }
}

impl Drop for SgTable {
    fn drop(&mut self) {
        // SAFETY: The entries are allocated by the type invariant, and freed here alone.
        unsafe { bindings::sg_free_table(&mut self.0) };
    }
}
