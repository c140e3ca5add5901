// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Scatter lists of DMA addresses.
//!
//! C header: [`include/linux/scatterlist.h`](srctree/include/linux/scatterlist.h); C side: [`sg.c`](sg.c).

use core::mem::{
    offset_of,
    MaybeUninit, //
};

use kernel::{
    bindings,
    prelude::*, //
};

use crate::{
    c,
    ranges::{
        AddrRange,
        SgEntry,
        SgLayout, //
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

/// How many entries are handed to C at once.
const BATCH: usize = 32;

// `peermem_sg_append()` reads one as the other.
const _: () = {
    assert!(size_of::<SgEntry>() == size_of::<c::peermem_entry>());
    assert!(offset_of!(SgEntry, addr) == offset_of!(c::peermem_entry, addr));
    assert!(offset_of!(SgEntry, len) == offset_of!(c::peermem_entry, len));
};

/// An [`SgTable`] that grows: nobody walks twice over the memory to count its entries first.
struct SgBuilder {
    /// Its table is always one.
    list: c::peermem_sg,
    result: Result<(), Reason>,
    /// Of these the first `waiting` are entries that are not in the list yet.
    batch: [MaybeUninit<SgEntry>; BATCH],
    waiting: usize,
}

impl SgBuilder {
    fn new() -> Self {
        SgBuilder {
            list: c::peermem_sg::default(),
            result: Ok(()),
            batch: [const { MaybeUninit::uninit() }; BATCH],
            waiting: 0,
        }
    }

    /// Adds an entry, or remembers why it could not. May sleep.
    fn push(&mut self, entry: SgEntry) {
        if let Some(place) = self.batch.get_mut(self.waiting) {
            place.write(entry);
            self.waiting += 1;
        }
        if self.waiting == BATCH {
            self.flush(c::peermem_sg_append);
        }
    }

    /// Not inlined, so that `push` is.
    #[inline(never)]
    fn flush(
        &mut self,
        add: unsafe extern "C" fn(*mut c::peermem_sg, *const c::peermem_entry, c_uint) -> c_int,
    ) {
        if self.result.is_ok() {
            // CAST: At most `BATCH`.
            let count = self.waiting as c_uint;
            // SAFETY: `add` is one of the two functions for the list, of whose calls none has failed. So many
            // entries are written, and read during the call alone.
            if unsafe { add(&mut self.list, self.batch.as_ptr().cast(), count) } != 0 {
                self.result = Err(Reason::NoMemory);
            }
        }
        self.waiting = 0;
    }

    fn finish(mut self) -> Result<SgTable, Reason> {
        self.flush(c::peermem_sg_finish);
        // INVARIANT: Allocated by the C functions; whatever they did, `sg_free_table()` takes it.
        let table = SgTable(self.list.table);
        self.result.map(|()| table)
    }
}

impl SgTable {
    /// Allocates exactly as many entries as `layout` makes of `ranges`, and fills them. There is at least one range.
    pub(crate) fn build(
        ranges: impl Iterator<Item = AddrRange>,
        layout: SgLayout,
    ) -> Result<Self, Reason> {
        let mut list = SgBuilder::new();
        layout.entries(ranges, |entry| list.push(entry));
        list.finish()
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
