// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Checks of the consumers' buffers: in the stand-in's counters, at the devices and in
//! `peermemctl list`.

use std::collections::BTreeSet;

use anyhow::{ensure, Result};
use serde_json::json;

use super::ctl;
use super::cuda::{not_listed, PATIENCE};
use crate::counters::{peer_regions, Activity, Counters, PeerRegion};
use crate::gpu::PAGE;
use crate::ktap::note;
use crate::lab::{Peermem, Setup};
use crate::sys;
use crate::sys::Running;

/// The number of allocations in a buffer. Our module pins each allocation once.
#[derive(Debug, Clone, Copy)]
pub(super) struct Parts {
    pub(super) count: u64,
    /// Number of refused pins while our module searches for the borders of the allocations: see
    /// `src/chunks.rs`.
    pub(super) refused: u64,
}

impl Parts {
    /// Returns `true` if `module` registers buffers with this number of allocations. NVIDIA's
    /// nvidia-peermem refuses memory of several allocations.
    pub(super) fn are_registered(self, module: Peermem) -> bool {
        match module {
            Peermem::None => false,
            Peermem::Nvidia => self.count == 1,
            Peermem::Ours | Peermem::Preload => true,
        }
    }

    /// Returns the expected numbers of pins and of calls to pin for `number` buffers. `activity`
    /// has the counted calls, for the case in which their number is not fixed.
    pub(super) fn calls(self, module: Peermem, number: u64, activity: &Activity) -> [u64; 2] {
        match module {
            Peermem::None | Peermem::Preload => [0, 0],
            // The number of UCX's attempts is not fixed.
            Peermem::Nvidia if !self.are_registered(module) => [0, activity.attempts.max(1)],
            // nvidia-peermem pins each buffer twice.
            Peermem::Nvidia => [2 * number; 2],
            Peermem::Ours => [self.count, self.count + self.refused].map(|calls| calls * number),
        }
    }
}

pub(super) const ONE: Parts = Parts {
    count: 1,
    refused: 0,
};

#[derive(Debug, Clone, Copy)]
pub(super) struct Buffers {
    pub(super) number: usize,
    pub(super) parts: Parts,
}

/// Returns `number` buffers of one allocation each.
pub(super) fn whole(number: usize) -> Buffers {
    Buffers { number, parts: ONE }
}

/// Returns all peer-memory regions of the machine's devices.
fn regions(setup: &Setup) -> Result<Vec<PeerRegion>> {
    let devices: BTreeSet<_> = setup.devices.iter().collect();
    let mut all = Vec::new();
    for device in devices {
        all.extend(peer_regions(device)?);
    }
    Ok(all)
}

impl Buffers {
    /// Waits until all buffers are registered. `consumer` must be the process that registers last.
    pub(super) fn wait_for(self, setup: &Setup, consumer: &mut Running) -> Result<()> {
        let all = sys::wait_until(PATIENCE, || {
            Ok(regions(setup)?.len() == self.number || !consumer.is_running()?)
        })?;
        ensure!(
            all && consumer.is_running()?,
            "not all buffers were registered"
        );
        Ok(())
    }

    /// Checks that `processes` have registered the buffers. Each buffer has one region, and one pin
    /// for each of its allocations. Our module also lists one registration for each buffer.
    pub(super) fn are_held(
        self,
        setup: &Setup,
        before: &Counters,
        program: &str,
        processes: &[u32],
    ) -> Result<()> {
        let number = self.number as u64;
        let found = regions(setup)?;
        let len = found.first().map_or(0, |region| region.len);
        let alike = found
            .iter()
            .all(|region| region.len == len && region.entries > 0 && region.state == "valid");
        ensure!(found.len() == self.number && alike, "{found:?}");
        note("bytes", len);
        note("entries", found[0].entries);
        let counters = Counters::read()?;
        let live = counters.live_pins()?;
        let expected = match setup.peermem {
            // A dma-buf may contain several allocations.
            Peermem::Preload => number,
            _ => number * self.parts.count,
        };
        ensure!(live == expected);
        let pinned = counters.since(before, "bar_bytes_pinned")?;
        ensure!(pinned >= number * len);
        if setup.peermem == Peermem::Ours {
            self.are_listed(setup, program, processes, len)
        } else {
            not_listed()
        }
    }

    /// Checks that `peermemctl list` shows each buffer as mapped, with its process and with its
    /// length in whole GPU pages.
    fn are_listed(self, setup: &Setup, program: &str, processes: &[u32], len: u64) -> Result<()> {
        let listed = ctl::registrations(&[])?;
        let mode = setup.mode().to_string();
        let len = len.next_multiple_of(PAGE);
        let (state, chunks) = ("mapped", self.parts.count);
        let expected =
            json!({ "state": state, "mode": mode, "comm": program, "len": len, "chunks": chunks });
        listed.iter().try_for_each(|one| ctl::has(one, &expected))?;
        let found: BTreeSet<_> = listed.iter().map(|one| one["pid"].as_u64()).collect();
        let expected: BTreeSet<_> = processes.iter().map(|id| Some(u64::from(*id))).collect();
        ensure!(
            listed.len() == self.number && found == expected,
            "{listed:#?}, where {} of {expected:?} were expected",
            self.number
        );
        Ok(())
    }

    /// Waits until no pin made since `before` is left, and compares all calls to nvidia.ko with the
    /// expected calls. If `is_revoked`, each buffer lost its memory while the buffer was
    /// registered.
    pub(super) fn have_ended(
        self,
        setup: &Setup,
        before: &Counters,
        is_revoked: bool,
    ) -> Result<()> {
        let mut activity = Activity::default();
        sys::wait_until(PATIENCE, || {
            activity = Counters::read()?.activity(before)?;
            let dma_bufs = Counters::read()?.get("dmabufs_live")?;
            Ok(activity.unpins + activity.callbacks == activity.pins && dma_bufs == 0)
        })?;
        note("pins", activity.pins);
        let number = self.number as u64;
        let registers = self.parts.are_registered(setup.peermem);
        let [pins, attempts] = self.parts.calls(setup.peermem, number, &activity);
        let maps = match setup.peermem {
            Peermem::Nvidia if registers => number,
            // Our module maps the memory itself.
            _ => 0,
        };
        let callbacks = u64::from(registers && is_revoked) * number * self.parts.count;
        let expected = Activity {
            pins,
            unpins: pins - callbacks,
            attempts,
            maps,
            unmaps: maps.saturating_sub(callbacks),
            callbacks,
        };
        ensure!(activity == expected, "{activity:?}, not {expected:?}");
        Ok(())
    }
}
