// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Registered memory beside a copy of what it must contain, so that every byte that a transfer should not have touched is
//! known too.

use anyhow::{bail, Context, Result};

use crate::lab::{Lab, Memory, Where};
use crate::pattern::{difference, Pattern};
use crate::rdma::{full_access, Hca, Part, Region};

/// How far around a transfer the bytes are compared at once; the rest is compared at the end.
const WINDOW: usize = 64 << 10;

/// Memory, the region over a part of it, and the bytes that it must hold.
#[derive(Debug)]
pub(crate) struct Arena {
    // The region goes before the memory under it.
    region: Region,
    memory: Memory,
    expected: Vec<u8>,
    /// Where the region starts in the memory.
    offset: usize,
}

impl Arena {
    /// Registers `[offset, offset + len)` of `memory`, all of which is filled with `pattern`.
    pub(crate) fn new(
        hca: &Hca,
        memory: Memory,
        offset: usize,
        len: usize,
        pattern: Pattern,
    ) -> Result<Self> {
        let expected = pattern.bytes(0, memory.len());
        memory.write(0, &expected)?;
        let region = hca.register(memory.span(offset, len)?, full_access())?;
        Ok(Self {
            region,
            memory,
            expected,
            offset,
        })
    }

    /// With a region over all of the memory.
    pub(crate) fn whole(hca: &Hca, memory: Memory, pattern: Pattern) -> Result<Self> {
        let len = memory.len();
        Self::new(hca, memory, 0, len, pattern)
    }

    /// Host memory on the near device, filled with the pattern `id` of the run's seed.
    pub(crate) fn on_host(lab: &Lab, len: usize, id: u64) -> Result<Self> {
        Self::near(lab, Where::Host, len, id)
    }

    /// Memory at `place` on the near device, filled with the pattern `id` of the run's seed.
    pub(crate) fn near(lab: &Lab, place: Where, len: usize, id: u64) -> Result<Self> {
        let memory = lab.allocate(place, len)?;
        Self::whole(&lab.near, memory, Pattern::new(lab.setup.seed, id))
    }

    /// As [`Arena::near`], on the far device.
    pub(crate) fn far(lab: &Lab, place: Where, len: usize, id: u64) -> Result<Self> {
        let memory = lab.allocate(place, len)?;
        Self::whole(&lab.far, memory, Pattern::new(lab.setup.seed, id))
    }

    pub(crate) fn region(&self) -> &Region {
        &self.region
    }

    /// A piece of the region.
    pub(crate) fn part(&self, at: usize, len: usize) -> Result<Part> {
        self.region.part(at as u64, len as u64)
    }

    /// Writes bytes at a place of the region by the CPU.
    pub(crate) fn put(&mut self, at: usize, data: &[u8]) -> Result<()> {
        self.memory.write(self.offset + at, data)?;
        self.expect(at, data)
    }

    /// Says which bytes a transfer has brought.
    pub(crate) fn expect(&mut self, at: usize, data: &[u8]) -> Result<()> {
        let from = self.offset + at;
        let to = from.checked_add(data.len()).context("overflow")?;
        self.expected
            .get_mut(from..to)
            .context("outside the memory")?
            .copy_from_slice(data);
        Ok(())
    }

    /// What must be at a place of the region.
    pub(crate) fn expected(&self, at: usize, len: usize) -> Result<&[u8]> {
        self.expected
            .get(self.offset + at..self.offset + at + len)
            .context("outside the memory")
    }

    /// What is at a place of the region.
    pub(crate) fn bytes(&self, at: usize, len: usize) -> Result<Vec<u8>> {
        let mut found = vec![0; len];
        self.memory.read(self.offset + at, &mut found)?;
        Ok(found)
    }

    /// Compares a piece of the region and what lies around it.
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
