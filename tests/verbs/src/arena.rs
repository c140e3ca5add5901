// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Registered memory with a copy of its expected content. The copy shows bytes that a transfer
//! changed by mistake.

use anyhow::{bail, Context, Result};

use crate::lab::{Lab, Memory, Where};
use crate::pattern::{difference, Pattern};
use crate::rdma::{Hca, Part, Region};

/// Number of bytes on each side of a transfer that [`Arena::check_around`] compares.
/// [`Arena::check`] compares all other bytes.
const WINDOW: usize = 64 << 10;

/// Memory, a region over a part of the memory, and the expected bytes.
#[derive(Debug)]
pub(crate) struct Arena {
    // Rust drops the fields in this order. The region must end before its memory is freed.
    region: Region,
    memory: Memory,
    expected: Vec<u8>,
    /// Offset of the region in the memory, in bytes.
    offset: usize,
}

impl Arena {
    /// Registers `[offset, offset + len)` of `memory`, and fills all of `memory` with `pattern`.
    pub(crate) fn new(
        hca: &Hca,
        memory: Memory,
        offset: usize,
        len: usize,
        pattern: Pattern,
    ) -> Result<Self> {
        let expected = pattern.bytes(0, memory.len());
        memory.write(0, &expected)?;
        let region = hca.reg_mr(memory.span(offset, len)?)?;
        Ok(Self {
            region,
            memory,
            expected,
            offset,
        })
    }

    pub(crate) fn whole(hca: &Hca, memory: Memory, pattern: Pattern) -> Result<Self> {
        let len = memory.len();
        Self::new(hca, memory, 0, len, pattern)
    }

    /// Registers host memory on the near device, filled with pattern `id` of the run's seed.
    pub(crate) fn on_host(lab: &Lab, len: usize, id: u64) -> Result<Self> {
        Self::near(lab, Where::Host, len, id)
    }

    /// Registers memory at `place` on the near device, filled with pattern `id` of the run's seed.
    pub(crate) fn near(lab: &Lab, place: Where, len: usize, id: u64) -> Result<Self> {
        let memory = lab.allocate(place, len)?;
        Self::whole(&lab.near, memory, Pattern::new(lab.setup.seed, id))
    }

    /// Registers memory at `place` on the far device, as [`Arena::near`] does on the near device.
    pub(crate) fn far(lab: &Lab, place: Where, len: usize, id: u64) -> Result<Self> {
        let memory = lab.allocate(place, len)?;
        Self::whole(&lab.far, memory, Pattern::new(lab.setup.seed, id))
    }

    pub(crate) fn region(&self) -> &Region {
        &self.region
    }

    pub(crate) fn part(&self, at: usize, len: usize) -> Result<Part> {
        self.region.part(at as u64, len as u64)
    }

    /// Writes `data` at offset `at` of the region with the CPU.
    pub(crate) fn put(&mut self, at: usize, data: &[u8]) -> Result<()> {
        self.memory.write(self.offset + at, data)?;
        self.expect(at, data)
    }

    /// Records the bytes that a transfer has written.
    pub(crate) fn expect(&mut self, at: usize, data: &[u8]) -> Result<()> {
        let from = self.offset + at;
        let to = from.checked_add(data.len()).context("overflow")?;
        self.expected
            .get_mut(from..to)
            .context("outside the memory")?
            .copy_from_slice(data);
        Ok(())
    }

    /// Returns the expected bytes of a part of the region.
    pub(crate) fn expected(&self, at: usize, len: usize) -> Result<&[u8]> {
        self.expected
            .get(self.offset + at..self.offset + at + len)
            .context("outside the memory")
    }

    pub(crate) fn bytes(&self, at: usize, len: usize) -> Result<Vec<u8>> {
        let found = self.memory.bytes(self.offset + at, len)?;
        Ok(found)
    }

    /// Compares a part of the region and [`WINDOW`] bytes on each side.
    pub(crate) fn check_around(&self, at: usize, len: usize) -> Result<()> {
        let from = (self.offset + at).saturating_sub(WINDOW);
        let to = (self.offset + at + len + WINDOW).min(self.expected.len());
        self.compare(from, to)
    }

    /// Compares all of the memory, inside and outside the region.
    pub(crate) fn check(&self) -> Result<()> {
        self.compare(0, self.expected.len())
    }

    fn compare(&self, from: usize, to: usize) -> Result<()> {
        const STEP: usize = 1 << 20;
        let mut found = vec![0; STEP.min(to - from)];
        let mut at = from;
        while at < to {
            let len = STEP.min(to - at);
            self.memory.read(at, &mut found[..len])?;
            if let Some(wrong) = difference(&self.expected[at..at + len], &found[..len]) {
                let place = at + wrong.first;
                bail!(
                    "{} bytes of {len} differ, the first at {place:#x} (region from {:#x} on, {} bytes): {:02x} instead of {:02x}",
                    wrong.count,
                    self.offset,
                    self.region.len(),
                    found[wrong.first],
                    self.expected[place]
                );
            }
            at += len;
        }
        Ok(())
    }
}
