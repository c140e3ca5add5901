// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Transfers between host and GPU memory, which must change no other bytes.

use anyhow::{ensure, Context, Result};

use crate::arena::Arena;
use crate::ktap::{cases, note, Case};
use crate::lab::{Lab, Where, M2};
use crate::pattern::{Choice, Pattern};
use crate::rdma;
use crate::rdma::{Op, Status};
use crate::sys::{kernel_version, slower};

const K4: usize = 4 << 10;
const K64: usize = 64 << 10;
const M4: usize = 4 << 20;
const M64: usize = 64 << 20;

const LENGTHS: [usize; 9] = [1, 7, 8, K4 - 1, K4, K4 + 1, K64 - 1, K64, K64 + 1];
const LONG_LENGTHS: [usize; 3] = [M2 - 1, M2, M2 + 1];
/// Offsets around the page sizes of the kernel and the GPU.
const OFFSETS: [usize; 11] = [
    0,
    1,
    K4 - 1,
    K4,
    K4 + 1,
    K64 - 1,
    K64,
    K64 + 1,
    M2 - 1,
    M2,
    M2 + 1,
];
/// Size of an arena, with room for the largest offset, the largest length, and a guard after them.
const ROOM: usize = 3 * M2;

pub(super) const CASES: &[Case] = cases![
    "move.write_host_to_gpu" => |lab| sweep(lab, Op::Write, Where::Host, Where::Gpu(0)),
    "move.write_gpu_to_host" => |lab| sweep(lab, Op::Write, Where::Gpu(0), Where::Host),
    "move.write_gpu_to_gpu" => |lab| sweep(lab, Op::Write, Where::Gpu(0), Where::Gpu(1)),
    "move.read_host_to_gpu" => |lab| sweep(lab, Op::Read, Where::Host, Where::Gpu(0)),
    "move.read_gpu_to_host" => |lab| sweep(lab, Op::Read, Where::Gpu(0), Where::Host),
    "move.read_gpu_to_gpu" => |lab| sweep(lab, Op::Read, Where::Gpu(0), Where::Gpu(1)),
    "move.send_host_to_gpu" => |lab| sweep(lab, Op::Send, Where::Host, Where::Gpu(0)),
    "move.send_gpu_to_host" => |lab| sweep(lab, Op::Send, Where::Gpu(0), Where::Host),
    "move.send_gpu_to_gpu" => |lab| sweep(lab, Op::Send, Where::Gpu(0), Where::Gpu(1)),
    "move.write_long_host_to_gpu" => |lab| large(lab, Op::Write, Where::Host, Where::Gpu(0)),
    "move.read_long_gpu_to_host" => |lab| large(lab, Op::Read, Where::Gpu(0), Where::Host),
    "move.send_long_gpu_to_gpu" => |lab| large(lab, Op::Send, Where::Gpu(0), Where::Gpu(1)),
    "move.atomics_on_gpu_result_in_host" => |lab| atomics(lab, Where::Gpu(0), Where::Host),
    "move.atomics_on_host_result_in_gpu" => |lab| atomics(lab, Where::Host, Where::Gpu(0)),
    "move.atomics_on_gpu_result_in_gpu" => |lab| atomics(lab, Where::Gpu(0), Where::Gpu(1)),
    "move.unaligned_regions" => unaligned_regions,
    "move.outside_the_region_is_refused" => outside,
    "move.neighbours_stay" => neighbours,
];

/// A connection that transfers fresh bytes from a source to a target, with a check that nothing
/// else changes.
struct Mover<'lab> {
    lab: &'lab Lab,
    connection: rdma::Connection,
    op: Op,
    transfers: u64,
    bytes: u64,
}

impl<'lab> Mover<'lab> {
    fn new(lab: &'lab Lab, op: Op) -> Result<Self> {
        Ok(Self {
            lab,
            connection: rdma::connect(&lab.near, &lab.far)?,
            op,
            transfers: 0,
            bytes: 0,
        })
    }

    /// Makes the source or the target arena. The near device makes the requests. For a READ, the
    /// target is therefore on the near device. For all other operations, the source is on the near
    /// device.
    fn arena(
        &self,
        is_source: bool,
        place: Where,
        room: usize,
        offset: usize,
        len: usize,
    ) -> Result<Arena> {
        let near = is_source != (self.op == Op::Read);
        let hca = if near { &self.lab.near } else { &self.lab.far };
        let key = 1_000_000 + u64::from(is_source);
        let pattern = Pattern::new(self.lab.setup.seed, key);
        let memory = self.lab.allocate(place, room)?;
        Arena::new(hca, memory, offset, len, pattern)
            .with_context(|| format!("register {place:?} memory on {}", hca.name()))
    }

    fn run(
        &mut self,
        source: &mut Arena,
        from: usize,
        target: &mut Arena,
        to: usize,
        len: usize,
    ) -> Result<()> {
        self.transfers += 1;
        self.bytes += len as u64;
        let data = Pattern::new(self.lab.setup.seed, self.transfers).bytes(0, len);
        source.put(from, &data)?;
        let (source_part, target_part) = (source.part(from, len)?, target.part(to, len)?);
        let connection = &mut self.connection;
        match self.op {
            Op::Read => connection.transfer(self.op, target_part, source_part)?,
            Op::Send => {
                let (sent, received) = connection.send(source_part, target_part)?;
                sent.expect(Status::Success).context("SEND")?;
                received.expect(Status::Success).context("RECEIVE")?;
                ensure!(received.byte_len as usize == len);
            }
            _ => connection.transfer(self.op, source_part, target_part)?,
        }
        target.expect(to, &data)?;
        let op = self.op;
        let what = || format!("{op} of {len} bytes from offset {from:#x} to {to:#x}");
        target.check_around(to, len).with_context(what)?;
        source.check_around(from, len).with_context(what)
    }

    fn finish(&self, source: &Arena, target: &Arena) -> Result<()> {
        target.check().context("target at the end")?;
        source.check().context("source at the end")?;
        note("transfers", self.transfers);
        note("bytes", self.bytes);
        note("differing_bytes", 0);
        Ok(())
    }
}

/// Transfers each length from and to each offset.
pub(super) fn sweep(lab: &Lab, op: Op, from: Where, to: Where) -> Result<()> {
    let mut mover = Mover::new(lab, op)?;
    let mut source = mover.arena(true, from, ROOM, 0, ROOM)?;
    let mut target = mover.arena(false, to, ROOM, 0, ROOM)?;
    for (row, len) in LENGTHS.into_iter().enumerate() {
        for (column, source_offset) in OFFSETS.into_iter().enumerate() {
            // Each length is tested with every offset on both sides, and no pair of offsets occurs
            // twice.
            let target_offset = OFFSETS[(column + row) % OFFSETS.len()];
            mover.run(&mut source, source_offset, &mut target, target_offset, len)?;
        }
    }
    for (len, (source_offset, target_offset)) in
        LONG_LENGTHS
            .into_iter()
            .zip([(0, K4 + 1), (K64 - 1, M2), (M2 + 1, 0)])
    {
        mover.run(&mut source, source_offset, &mut target, target_offset, len)?;
    }
    mover.finish(&source, &target)
}

/// Transfers one message of 64 MiB between odd offsets. On a slower kernel, the message is shorter
/// by the same factor.
///
/// Before Linux 6.2, a READ has only 4 MiB, because rxe loses replies to a longer READ and waits
/// before it asks again. On Linux 6.1, a READ between host buffers took 0.7 s for 4 MiB, 21 s for
/// 8 MiB, 67 s for 16 MiB, and more than 120 s for 32 MiB.
fn large(lab: &Lab, op: Op, from: Where, to: Where) -> Result<()> {
    let mut mover = Mover::new(lab, op)?;
    let longest = match op {
        Op::Read if kernel_version()? < (6, 2) => M4,
        _ => M64,
    };
    let len = longest / slower().max(1) as usize;
    let mut source = mover.arena(true, from, len + M2, 0, len + M2)?;
    let mut target = mover.arena(false, to, len + M2, 0, len + M2)?;
    mover.run(&mut source, K4 + 1, &mut target, K64 - 1, len)?;
    mover.finish(&source, &target)
}

/// Tests regions with arbitrary bounds. The trimming of the first and the last scatter-list entry
/// decides which bytes a region reaches.
fn unaligned_regions(lab: &Lab) -> Result<()> {
    let mut choice = Choice::new(lab.setup.seed);
    let edges = [1, K4 - 1, K4 + 1, K64 - 1, K64, K64 + 1, M2 - 1, M2 + 1];
    for op in [Op::Write, Op::Read, Op::Send] {
        for start in edges {
            let len = edges[choice.below(edges.len() as u64) as usize] + 7;
            let other = edges[choice.below(edges.len() as u64) as usize];
            let mut mover = Mover::new(lab, op)?;
            let mut source = mover.arena(true, Where::Gpu(0), ROOM, other, len)?;
            let mut target = mover.arena(false, Where::Gpu(1), ROOM, start, len)?;
            mover
                .run(&mut source, 0, &mut target, 0, len)
                .with_context(|| format!("region {start:#x}+{len:#x}"))?;
            mover.run(&mut source, len - 1, &mut target, len - 1, 1)?;
            target.check()?;
            source.check()?;
        }
    }
    note("regions", 2 * 3 * edges.len());
    Ok(())
}

/// Accesses one byte before and one byte after a region. The device must refuse, and no byte may
/// change.
fn outside(lab: &Lab) -> Result<()> {
    let (start, len) = (K64 + 5, M2 + K4 + 3);
    let mut refused = 0;
    for place in [Where::Gpu(0), Where::Host] {
        for (at, size) in [
            (-1i64, 1usize),
            (-1, 2),
            (len as i64, 1),
            (len as i64 - 1, 2),
        ] {
            for op in [Op::Write, Op::Read] {
                let mover = Mover::new(lab, Op::Write)?;
                let source = mover.arena(true, Where::Host, ROOM, 0, ROOM)?;
                let target = mover.arena(false, place, ROOM, start, len)?;
                let beyond = target.region().part(at as u64, size as u64)?;
                let status = lab.status(op, source.part(0, size)?, beyond)?;
                ensure!(
                    status == Status::RemoteAccessError,
                    "{op} of {size} bytes at {at} of a region of {len} in {place:?}: {status:?}"
                );
                target.check()?;
                source.check()?;
                refused += 1;
            }
        }
    }
    note("refused", refused);
    Ok(())
}

/// Checks that allocations before and after the target keep their bytes.
fn neighbours(lab: &Lab) -> Result<()> {
    let mut mover = Mover::new(lab, Op::Write)?;
    let guard = |key| -> Result<Arena> { Arena::far(lab, Where::Gpu(1), M2, key) };
    let before = guard(2_000_000)?;
    let mut target = mover.arena(false, Where::Gpu(1), M2, 0, M2)?;
    let behind = guard(2_000_001)?;
    let mut source = mover.arena(true, Where::Host, M2, 0, M2)?;
    mover.run(&mut source, 0, &mut target, 0, M2)?;
    for at in [0, 1, M2 - 1] {
        mover.run(&mut source, 0, &mut target, at, 1)?;
    }
    before.check().context("allocation before the target")?;
    behind.check().context("allocation after the target")?;
    mover.finish(&source, &target)
}

fn atomics(lab: &Lab, target_place: Where, result_place: Where) -> Result<()> {
    let seed = lab.setup.seed;
    let mut choice = Choice::new(seed);
    let mut target = Arena::far(lab, target_place, ROOM, 1)?;
    let mut result = Arena::near(lab, result_place, ROOM, 2)?;
    let mut connection = rdma::connect(&lab.near, &lab.far)?;
    let mut done = 0;
    for at in [0, 8, K4 - 8, K4, K64 - 8, K64, M2 - 8, M2, M2 + 8] {
        for kind in 0..3 {
            let old_bytes: [u8; 8] = target.expected(at, 8)?.try_into()?;
            let old = u64::from_le_bytes(old_bytes);
            let operand = choice.next();
            let swap = |compare| Op::CompareSwap {
                compare,
                swap: operand,
            };
            let (op, new) = match kind {
                0 => (Op::FetchAdd { add: operand }, old.wrapping_add(operand)),
                1 => (swap(old), operand),
                // A compare-and-swap whose comparison fails changes nothing.
                _ => (swap(!old), old),
            };
            connection.transfer(op, result.part(at, 8)?, target.part(at, 8)?)?;
            target.expect(at, &new.to_le_bytes())?;
            result.expect(at, &old_bytes)?;
            for (arena, name) in [(&target, "target"), (&result, "result")] {
                let what = || format!("{op} at {at:#x}: {name}");
                arena.check_around(at, 8).with_context(what)?;
            }
            done += 1;
        }
    }
    target.check()?;
    result.check()?;
    note("atomics", done);
    Ok(())
}
