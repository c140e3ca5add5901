// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Transfers of a session, checks of the resulting bytes, and transfers that are in flight when
//! their memory is freed.

use std::time::Duration;

use anyhow::{Context as _, Result};

use super::{Block, Held, Session, Side, Uprooted, Wrong, COMPLETION, HOST, RELICS};
use crate::gpu::Freer;
use crate::lab::PinMode;
use crate::pattern::difference;
use crate::rdma::{Completion, Endpoint, Op, Part, Status};
use crate::stress::board::{Figure, Glance, Operation};
use crate::{counters, rdma, sys};

/// Maximum number of requests in flight during a free.
const IN_FLIGHT: u64 = 6;
/// Number of bytes on each side of a transfer's target that are compared after the transfer.
const AROUND: usize = 64;

/// Source or target of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Spot {
    at: Location,
    /// Offset in the memory, not in the region.
    from: usize,
    len: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Location {
    Host(Side),
    /// Number of the block, and number of its region.
    Gpu(usize, usize),
}

/// A request that is in flight during a free.
struct Doomed {
    initiator: Side,
    /// The target and its new bytes. `None` if the target is the freed memory, which nobody reads
    /// any more.
    target: Option<(Spot, Vec<u8>)>,
    /// Offset and new bytes in the freed memory, if the freed memory is the target.
    written: Option<(usize, Vec<u8>)>,
}

/// Returns `true` if a request by `initiator` may end with `status` because its memory was revoked.
/// `ended` has the initiators and statuses of all requests on the same pair of queue pairs.
fn ends_revoked(initiator: Side, status: Status, ended: &[(Side, Status)]) -> bool {
    match status {
        Status::RemoteAccessError
        | Status::LocalProtectionError
        | Status::LocalAccessError
        | Status::LocalQueuePairOperationError
        | Status::RemoteOperationError
        | Status::WorkRequestFlushedError => true,
        // After one of its own requests has failed, a queue pair answers no requests of the other
        // side.
        Status::RetryCounterExceededError => ended
            .iter()
            .any(|&(side, status)| side != initiator && status != Status::Success),
        _ => false,
    }
}

/// Returns the side whose queue pair may be in the error state because of a repeated READ, after a
/// request by `initiator` ended with `status`. If a peer resends an answered READ after the region
/// is gone, rxe moves the receiving queue pair to the error state.
fn failed_by_repeat(initiator: Side, status: Status) -> Option<Side> {
    match status {
        Status::WorkRequestFlushedError => Some(initiator),
        Status::RetryCounterExceededError => Some(initiator.other()),
        _ => None,
    }
}

impl Session<'_> {
    /// Returns a random region of `side`, or of both sides if `side` is `None`. If there is no
    /// region, returns the host memory of `side`.
    pub(super) fn some_region(&mut self, side: Option<Side>) -> Option<Location> {
        let all: Vec<Location> = self
            .blocks
            .iter()
            .enumerate()
            .flat_map(|(block, held)| {
                held.regions
                    .iter()
                    .enumerate()
                    .filter(move |(_, held)| side.is_none_or(|side| held.side == side))
                    .map(move |(region, _)| Location::Gpu(block, region))
            })
            .collect();
        if all.is_empty() {
            return side.map(Location::Host);
        }
        Some(all[self.below(all.len())])
    }

    /// Returns the offset and length of the registered memory at `location`.
    fn reach(&self, location: Location) -> (usize, usize) {
        match location {
            Location::Host(_) => (0, HOST),
            Location::Gpu(block, region) => {
                let held = &self.blocks[block].regions[region];
                (held.offset, held.len)
            }
        }
    }

    fn spot(&mut self, at: Location, len: usize) -> Spot {
        let (offset, whole) = self.reach(at);
        Spot {
            at,
            from: offset + self.below(whole - len + 1),
            len,
        }
    }

    fn part(&self, spot: Spot) -> Result<Part> {
        match spot.at {
            Location::Host(side) => self.hosts[side as usize]
                .region
                .part(spot.from as u64, spot.len as u64),
            Location::Gpu(block, region) => {
                let held = &self.blocks[block].regions[region];
                held.region
                    .part((spot.from - held.offset) as u64, spot.len as u64)
            }
        }
    }

    fn expected(&self, spot: Spot) -> &[u8] {
        let all = match spot.at {
            Location::Host(side) => &self.hosts[side as usize].expected,
            Location::Gpu(block, _) => &self.blocks[block].expected,
        };
        &all[spot.from..spot.from + spot.len]
    }

    fn expect(&mut self, spot: Spot, data: &[u8]) {
        let all = match spot.at {
            Location::Host(side) => &mut self.hosts[side as usize].expected,
            Location::Gpu(block, _) => &mut self.blocks[block].expected,
        };
        all[spot.from..spot.from + spot.len].copy_from_slice(data);
    }

    fn found(&self, spot: Spot) -> Result<Vec<u8>> {
        let Spot { from, len, .. } = spot;
        match spot.at {
            Location::Host(side) => self.hosts[side as usize].memory.bytes(from, len),
            Location::Gpu(block, _) => self.blocks[block].memory.bytes(from, len),
        }
    }

    /// Compares a spot and [`AROUND`] bytes on each side.
    fn check(&self, spot: Spot) -> Result<()> {
        let all = match spot.at {
            Location::Host(_) => HOST,
            Location::Gpu(block, _) => self.blocks[block].expected.len(),
        };
        let from = spot.from.saturating_sub(AROUND);
        let len = (spot.from + spot.len + AROUND).min(all) - from;
        let wide = Spot { from, len, ..spot };
        let found = self.found(wide)?;
        if let Some(place) = difference(self.expected(wide), &found) {
            wrong!(
                "after a transfer of {} bytes to {:?}+{:#x}: {} of {len} bytes differ, the first at {:#x}",
                spot.len,
                spot.at,
                spot.from,
                place.count,
                from + place.first
            );
        }
        self.note(Figure::Bytes, len as u64);
        Ok(())
    }

    /// Checks that each byte after a failed transfer is the old or the new byte.
    fn settle(&mut self, spot: Spot, new: &[u8]) -> Result<()> {
        let found = self.found(spot)?;
        let old = self.expected(spot);
        for (at, byte) in found.iter().enumerate() {
            if *byte != old[at] && *byte != new[at] {
                wrong!(
                    "a failed transfer has left {byte:02x} at {:?}+{:#x}, which is neither the old byte {:02x} nor the new byte {:02x}",
                    spot.at,
                    spot.from + at,
                    old[at],
                    new[at]
                );
            }
        }
        self.expect(spot, &found);
        Ok(())
    }

    fn begin_read(&self) -> bool {
        self.world.board.begin_read(self.slot)
    }

    fn end_read(&self) {
        self.world.board.end_read(self.slot);
    }

    /// Returns `false` if the devices are disturbed and the session cannot connect now.
    fn connect(&mut self) -> Result<bool> {
        if self.connection.is_some() {
            return Ok(true);
        }
        let before = self.glance();
        match rdma::connect(&self.hcas[0], &self.hcas[1]) {
            Ok(connection) => {
                self.connection = Some(connection);
                self.duplicates = [Side::Near, Side::Far].map(|side| self.duplicates(side));
                self.reads = [false; 2];
                self.done(Operation::Connect);
                Ok(true)
            }
            Err(_) if self.world.board.disturbed_since(&before) => {
                std::thread::sleep(Duration::from_millis(5));
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }

    fn endpoint(&mut self, side: Side) -> Result<&mut Endpoint> {
        let connection = self.connection.as_mut().context("not connected")?;
        Ok(match side {
            Side::Near => &mut connection.near,
            Side::Far => &mut connection.far,
        })
    }

    fn post(&mut self, initiator: Side, op: Op, local: Part, remote: Part) -> Result<()> {
        self.endpoint(initiator)?.post(op, local, remote)?;
        self.reads[initiator as usize] |= op == Op::Read;
        Ok(())
    }

    /// Posts a request, and returns the status of its completion.
    fn run(&mut self, initiator: Side, op: Op, local: Part, remote: Part) -> Result<Status> {
        self.post(initiator, op, local, remote)?;
        let status = self.wait(initiator, Endpoint::poll_sent)?.status;
        self.end_read();
        Ok(status)
    }

    /// Checks the bytes of a transfer by `initiator` that ended with `status` and was to write
    /// `written`.
    fn conclude(
        &mut self,
        operation: Operation,
        (initiator, status): (Side, Status),
        before: &Glance,
        written: &[(Spot, &[u8])],
    ) -> Result<()> {
        if status == Status::Success {
            for (spot, data) in written {
                self.expect(*spot, data);
                self.check(*spot)?;
            }
            self.done(operation);
            return Ok(());
        }
        self.excuse_failure(initiator, status, before)?;
        let mut written = written.iter();
        written.try_for_each(|(spot, data)| self.settle(*spot, data))
    }

    fn wait(
        &mut self,
        side: Side,
        poll: fn(&mut Endpoint) -> Result<Option<Completion>>,
    ) -> Result<Completion> {
        let mut patience = sys::patience(COMPLETION);
        let mut idle = 0u32;
        loop {
            if let Some(completion) = poll(self.endpoint(side)?)? {
                return Ok(completion);
            }
            if self.world.board.link_gone_since(&self.opened) {
                return Err(Uprooted.into());
            }
            if patience.is_over() {
                wrong!("a request has not ended within {} s", COMPLETION.as_secs());
            }
            idle += 1;
            if idle < 50 {
                std::thread::yield_now();
            } else {
                std::thread::sleep(Duration::from_micros(100));
            }
        }
    }

    /// Counts a request that got no response to any of its retries.
    fn note_lost(&self, status: Status) {
        if status == Status::RetryCounterExceededError {
            self.note(Figure::LostRequests, 1);
        }
    }

    fn duplicates(&self, side: Side) -> Option<u64> {
        counters::duplicate_requests(self.hca(side).name())
    }

    /// Returns `true` if a disturbance of the run or a repeated READ ([`failed_by_repeat`]) may
    /// have caused `status`, the failure of a request by `initiator`.
    fn is_excused(&self, initiator: Side, status: Status, before: &Glance) -> bool {
        if self.world.board.excuses(before, &self.opened) {
            self.note_lost(status);
            return true;
        }
        let repeated = failed_by_repeat(initiator, status).is_some_and(|side| {
            let counts = (self.duplicates[side as usize], self.duplicates(side));
            self.reads[side.other() as usize]
                && matches!(counts, (Some(then), Some(now)) if now > then)
        });
        if repeated {
            self.note(Figure::FailedByRepeat, 1);
        }
        repeated
    }

    /// Fails unless a disturbance of the run or a repeated READ explains why a transfer by
    /// `initiator` to live memory ended with `status` ([`Self::is_excused`]). Also ends the
    /// connection.
    fn excuse_failure(&mut self, initiator: Side, status: Status, before: &Glance) -> Result<()> {
        self.connection = None;
        if self.is_excused(initiator, status, before) {
            return Ok(());
        }
        wrong!("a transfer to living memory ended with {status:?}")
    }

    pub(super) fn transfer(&mut self) -> Result<()> {
        let initiator = self.side();
        let Some(remote) = self.some_region(Some(initiator.other())) else {
            return Ok(());
        };
        self.write_or_read(remote, initiator)
    }

    pub(super) fn write_or_read(&mut self, remote: Location, initiator: Side) -> Result<()> {
        let mut local = Location::Host(initiator);
        if self.once_in(3) {
            local = self.some_region(Some(initiator)).unwrap_or(local);
        }
        // Two regions of the same memory may overlap. The result of a transfer between them is
        // undefined.
        if let (Location::Gpu(one, _), Location::Gpu(other, _)) = (local, remote) {
            if one == other {
                local = Location::Host(initiator);
            }
        }
        let most = if self.once_in(8) { 128 << 10 } else { 12 << 10 };
        let room = self.reach(local).1.min(self.reach(remote).1).min(most);
        if !self.connect()? {
            return Ok(());
        }
        let write = self.once_in(2) || !self.begin_read();
        let len = 1 + self.below(room);
        let (local, remote) = (self.spot(local, len), self.spot(remote, len));
        let (op, operation, source, target) = match write {
            true => (Op::Write, Operation::Write, local, remote),
            false => (Op::Read, Operation::Read, remote, local),
        };
        if let Location::Host(side) = source.at {
            // No two transfers have the same bytes.
            let data = self.pattern().bytes(0, len);
            self.hosts[side as usize].memory.write(source.from, &data)?;
            self.expect(source, &data);
        }
        let data = self.expected(source).to_vec();
        let before = self.glance();
        let (local, remote) = (self.part(local)?, self.part(remote)?);
        let status = self.run(initiator, op, local, remote)?;
        self.conclude(operation, (initiator, status), &before, &[(target, &data)])
    }

    pub(super) fn atomic(&mut self) -> Result<()> {
        let initiator = self.side();
        let Some(remote) = self.some_region(Some(initiator.other())) else {
            return Ok(());
        };
        let (offset, len) = self.reach(remote);
        // An aligned offset is also an aligned address, because all memory starts at a page
        // boundary.
        let first = offset.next_multiple_of(8);
        if first + 8 > offset + len {
            return Ok(());
        }
        let words = (offset + len - first) / 8;
        let target = Spot {
            at: remote,
            from: first + 8 * self.below(words),
            len: 8,
        };
        let local = self.spot(Location::Host(initiator), 8);
        if !self.connect()? {
            return Ok(());
        }
        let old: [u8; 8] = self.expected(target).try_into()?;
        let (value, other) = (u64::from_le_bytes(old), self.choice.next());
        let swap = |compare| Op::CompareSwap {
            compare,
            swap: other,
        };
        let (op, new) = match self.choice.below(3) {
            0 => (Op::FetchAdd { add: other }, value.wrapping_add(other)),
            1 => (swap(value), other),
            _ => (swap(!value), value),
        };
        let before = self.glance();
        let parts = (self.part(local)?, self.part(target)?);
        let status = self.run(initiator, op, parts.0, parts.1)?;
        let written: [(Spot, &[u8]); 2] = [(target, &new.to_le_bytes()), (local, &old)];
        self.conclude(Operation::Atomic, (initiator, status), &before, &written)
    }

    pub(super) fn send(&mut self) -> Result<()> {
        let sender = self.side();
        let Some(target) = self.some_region(Some(sender.other())) else {
            return Ok(());
        };
        let most = self.reach(target).1.min(8 << 10);
        let len = 1 + self.below(most);
        let source = self.spot(Location::Host(sender), len);
        let target = self.spot(target, len);
        if !self.connect()? {
            return Ok(());
        }
        let data = self.expected(source).to_vec();
        let before = self.glance();
        let (from, into) = (self.part(source)?, self.part(target)?);
        self.endpoint(sender.other())?.post_receive(into)?;
        self.post(sender, Op::Send, from, into)?;
        let mut side = sender;
        let mut status = self.wait(side, Endpoint::poll_sent)?.status;
        if status == Status::Success {
            side = sender.other();
            status = self.wait(side, Endpoint::poll_received)?.status;
        }
        self.conclude(Operation::Send, (side, status), &before, &[(target, &data)])
    }

    // Memory that is freed during a transfer

    /// Posts requests between a region and host memory, each with its own bytes.
    fn post_doomed(&mut self, at: usize, region: usize, reads: bool) -> Result<Vec<Doomed>> {
        let (side, offset, whole) = {
            let held = &self.blocks[at].regions[region];
            (held.side, held.offset, held.len)
        };
        let count = 1 + self.below((IN_FLIGHT as usize).min(whole));
        let most = (whole / count).min(HOST / IN_FLIGHT as usize);
        let mut doomed = Vec::new();
        for index in 0..count {
            // The ranges of some requests are adjacent.
            let whole_part = self.once_in(4);
            let len = if whole_part {
                most
            } else {
                1 + self.below(most)
            };
            // The memory that will be freed is the local or the remote side of the request, and is
            // written or read.
            let (initiator, writes) = (self.side(), self.once_in(2) || !reads);
            let dying = Spot {
                at: Location::Gpu(at, region),
                from: offset + index * (whole / count),
                len,
            };
            let host = Spot {
                at: Location::Host(side.other()),
                from: index * (HOST / IN_FLIGHT as usize),
                len,
            };
            let is_local = initiator == side;
            let order = |dying_first| match dying_first {
                true => (dying, host),
                false => (host, dying),
            };
            let (local, remote) = order(is_local);
            let op = if writes { Op::Write } else { Op::Read };
            let into_dying = writes != is_local;
            let (source, target) = order(!into_dying);
            let data = self.expected(source).to_vec();
            let (local, remote) = (self.part(local)?, self.part(remote)?);
            self.post(initiator, op, local, remote)?;
            doomed.push(Doomed {
                initiator,
                target: (!into_dying).then(|| (target, data.clone())),
                written: into_dying.then_some((dying.from, data)),
            });
        }
        Ok(doomed)
    }

    /// Frees the memory of a live region while requests to it are in flight, and gives the memory
    /// to another owner at once.
    pub(super) fn free_under_region(&mut self) -> Result<()> {
        let at = self.below(self.blocks.len());
        if self.blocks[at].regions.is_empty() && !self.register(at)? {
            return Ok(());
        }
        if !self.connect()? {
            return Ok(());
        }
        let before = self.glance();
        let region = self.below(self.blocks[at].regions.len());
        let reads = self.begin_read();
        let doomed = self.post_doomed(at, region, reads)?;
        let pause = self.choice.below(8);
        let way = self.choice.below(3);

        // From here on, nothing reads the memory.
        let mut block = self.blocks.remove(at);
        let granules = self.granules(&block)?;
        if pause > 2 {
            std::thread::sleep(Duration::from_micros(200 << (pause - 2)));
        }
        let held = block.regions.swap_remove(region);
        self.relics
            .extend(block.regions.drain(..).map(|held| held.region));
        let (operation, keeps_address) = match way {
            0 => {
                block.memory.free_by(Freer::Caller)?;
                (Operation::FreeIoctl, true)
            }
            1 => {
                block.memory.free_by(Freer::KernelThread)?;
                (Operation::FreeThread, true)
            }
            _ => (Operation::FreeUnmap, false),
        };
        let Block {
            memory,
            mut expected,
            gpu,
            ..
        } = block;
        let len = expected.len();
        // If the mapping stays, its addresses are occupied until the end of this function.
        let mapping = keeps_address.then_some(memory);
        self.done(operation);

        let new = self.allocate_block(gpu, len)?;
        if self.plan.mode == PinMode::Persistent && !self.granules(&new)?.is_disjoint(&granules) {
            wrong!("memory that a region of the persistent mode has pinned was given away");
        }
        self.blocks.push(new);
        let new = self.blocks.len() - 1;

        let met = self.end_doomed(&doomed, &mut expected, &before)?;
        // All requests have ended, and no request may have reached the new owner.
        self.check_block(new)?;
        match self.plan.mode {
            PinMode::Revocable => self.use_revoked(&held)?,
            PinMode::Persistent if met == 0 => self.use_orphaned(&held, &expected)?,
            PinMode::Persistent => {}
        }
        self.check_block(new)?;
        drop(mapping);
        self.relics.push(held.region);
        while self.relics.len() > RELICS {
            self.relics.remove(0);
            self.done(Operation::Deregister);
        }
        Ok(())
    }

    /// Waits for requests to freed memory, and compares their results. `expected` becomes the last
    /// content of the freed memory. Returns the number of requests that failed because of the free.
    fn end_doomed(
        &mut self,
        doomed: &[Doomed],
        expected: &mut [u8],
        before: &Glance,
    ) -> Result<u64> {
        let mut met = 0;
        let (mut arrived, mut failed) = (Vec::new(), Vec::new());
        let mut ended = Vec::new();
        for request in doomed {
            let status = self.wait(request.initiator, Endpoint::poll_sent)?.status;
            ended.push((request.initiator, status));
        }
        for (request, &(_, status)) in doomed.iter().zip(&ended) {
            let success = status == Status::Success;
            met += u64::from(!success);
            if !success {
                self.judge_doomed(request.initiator, status, &ended, before)?;
            }
            match (&request.target, &request.written) {
                (Some((target, data)), _) if success => {
                    self.expect(*target, data);
                    arrived.push(*target);
                }
                (Some(failure), _) => failed.push(failure),
                (None, Some((from, data))) if success => {
                    expected[*from..from + data.len()].copy_from_slice(data);
                }
                _ => {}
            }
        }
        self.end_read();
        self.note(Figure::MetRevocation, met);
        self.note(Figure::BeforeFree, doomed.len() as u64 - met);
        if met > 0 {
            self.connection = None;
        }
        // This check must follow the end of the queue pairs. The first packets of a WRITE may still
        // arrive after the WRITE has failed at its source.
        for (target, data) in failed {
            self.settle(*target, data)?;
        }
        // This check must follow the end of all requests, because the surroundings of one target
        // may be the target of the next request.
        for target in arrived {
            self.check(target)?;
        }
        Ok(met)
    }

    /// Checks a failed request by `initiator`, which is one of the requests in `ended`.
    fn judge_doomed(
        &mut self,
        initiator: Side,
        status: Status,
        ended: &[(Side, Status)],
        before: &Glance,
    ) -> Result<()> {
        if self.plan.mode == PinMode::Revocable && ends_revoked(initiator, status, ended) {
            return Ok(());
        }
        if status == Status::WorkRequestFlushedError || self.is_excused(initiator, status, before) {
            return Ok(());
        }
        wrong!("a request to freed memory ended with {status:?}; all requests: {ended:?}")
    }

    /// Checks that a revoked region refuses an access.
    fn use_revoked(&mut self, held: &Held) -> Result<()> {
        if !self.connect()? {
            return Ok(());
        }
        let initiator = held.side.other();
        let len = 1 + self.below(held.len.min(4096));
        let host = self.spot(Location::Host(initiator), len);
        let local = self.part(host)?;
        let remote = held.region.part(0, len as u64)?;
        let write = self.once_in(2) || !self.begin_read();
        let op = if write { Op::Write } else { Op::Read };
        let before = self.glance();
        let status = self.run(initiator, op, local, remote)?;
        self.connection = None;
        match status {
            Status::Success => wrong!("{op} to a revoked region went through"),
            Status::RemoteAccessError => {}
            _ if self.is_excused(initiator, status, &before) => {}
            _ => wrong!("{op} to a revoked region ended with {status:?}"),
        }
        self.check(host)?;
        self.done(Operation::UseRevoked);
        Ok(())
    }

    /// Checks that a persistent region keeps its pages and their content after the process has
    /// freed its memory.
    fn use_orphaned(&mut self, held: &Held, expected: &[u8]) -> Result<()> {
        if !self.connect()? {
            return Ok(());
        }
        let initiator = held.side.other();
        if !self.begin_read() {
            return Ok(());
        }
        let len = held.len.min(128 << 10);
        let from = self.below(held.len - len + 1);
        let host = Spot {
            at: Location::Host(initiator),
            from: 0,
            len,
        };
        let before = self.glance();
        let (local, remote) = (self.part(host)?, held.region.part(from as u64, len as u64)?);
        let status = self.run(initiator, Op::Read, local, remote)?;
        let data = &expected[held.offset + from..held.offset + from + len];
        let ended = (initiator, status);
        self.conclude(Operation::UseOrphaned, ended, &before, &[(host, data)])
            .context("the bytes of a region whose memory was freed")
    }

    /// Posts requests that are still in flight when the session ends.
    pub(super) fn leave_requests_under_way(&mut self, held: bool) -> Result<()> {
        if self.blocks.is_empty() || !self.connect()? {
            return Ok(());
        }
        let at = self.below(self.blocks.len());
        if self.blocks[at].regions.is_empty() && !self.register(at)? {
            return Ok(());
        }
        let region = self.below(self.blocks[at].regions.len());
        // Posts READs only if no child holds the descriptors. If a child held the descriptors, the
        // READs would continue after this process ends.
        let reads = !held && self.begin_read();
        self.post_doomed(at, region, reads)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_to_a_failed_queue_pair_ends_as_revoked() {
        let unanswered = (Side::Far, Status::RetryCounterExceededError);
        let all = [
            (Side::Near, Status::Success),
            (Side::Near, Status::LocalProtectionError),
            unanswered,
        ];
        assert!(ends_revoked(unanswered.0, unanswered.1, &all));
        assert!(!ends_revoked(
            unanswered.0,
            unanswered.1,
            &[all[0], unanswered]
        ));
    }

    #[test]
    fn the_status_shows_the_side_that_a_repeated_read_failed() {
        let near = Side::Near;
        let of = |status| failed_by_repeat(near, status);
        assert_eq!(of(Status::WorkRequestFlushedError), Some(near));
        assert_eq!(of(Status::RetryCounterExceededError), Some(Side::Far));
        assert_eq!(of(Status::RemoteAccessError), None);
        assert_eq!(of(Status::Success), None);
    }
}
