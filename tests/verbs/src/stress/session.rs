// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! One process of a stress run: it allocates, registers, transfers, frees, forks, hands descriptors on, and ends in one of
//! several ways. What it does is drawn from the seed; what comes of it depends on everybody else.
//!
//! Beside each piece of memory stands a copy of what it must hold. Every byte of every allocation is compared before it is
//! given back, so that a write which arrives late is found by whoever has the memory by then. A transfer that fails may have
//! brought any of its bytes: each must be the old or the new one.

use std::collections::BTreeSet;
use std::mem;
use std::os::fd::AsFd;
use std::os::unix::net::UnixDatagram;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{anyhow, bail, ensure, Context as _, Result};

use super::board::{Board, Figure, Glance, Operation};
use super::plan::Plan;
use crate::gpu::{Allocation, Freer, Gpu, GRANULE};
use crate::lab::PinMode;
use crate::pattern::{difference, Choice, Pattern};
use crate::rdma::{full_access, Completion, Connection, Endpoint, Hca, Op, Part, Region, Status};
use crate::sys::{Mapping, Placement, Span};
use crate::{counters, rdma, sys};

const M2: usize = GRANULE as usize;
/// Host memory at each end.
const HOST: usize = 512 << 10;
/// Allocations at a time.
const BLOCKS: usize = 3;
/// Regions of one allocation at a time.
const REGIONS: usize = 5;
/// Revoked and orphaned regions that are kept.
const RELICS: usize = 3;
/// Requests under way at a free.
const IN_FLIGHT: u64 = 6;
/// How far around a transfer the bytes are compared at once.
const AROUND: usize = 64;
/// A request that has not ended by then never will.
const COMPLETION: Duration = Duration::from_secs(120);

/// What every process of a run is given.
#[derive(Debug)]
pub(super) struct World {
    pub(super) board: Board,
    pub(super) devices: [String; 2],
    /// PCI addresses of the GPUs; the index is that of the character device.
    pub(super) gpus: Vec<String>,
    /// Who receives from it keeps descriptors.
    pub(super) keeper: UnixDatagram,
}

/// What must not be. Nothing excuses it.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct Wrong(pub(super) String);

/// The devices are not what they were: the session cannot go on, and nobody is to blame.
#[derive(Debug, thiserror::Error)]
#[error("the devices have changed")]
struct Uprooted;

macro_rules! wrong {
    ($($arguments:tt)*) => {
        return Err(Wrong(format!($($arguments)*)).into())
    };
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    Near,
    Far,
}

impl Side {
    fn other(self) -> Self {
        match self {
            Self::Near => Self::Far,
            Self::Far => Self::Near,
        }
    }
}

/// How a session ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ending {
    /// Everything compared and given back.
    Clean,
    /// Without a word, with requests under way.
    Live,
    /// As live, while a child has copies of all descriptors, and closes them later.
    Held,
    /// By SIGKILL, with requests under way and threads that register.
    Kill,
}

/// A region over a piece of an allocation.
#[derive(Debug)]
struct Held {
    region: Region,
    side: Side,
    offset: usize,
    len: usize,
}

/// GPU memory with what it must hold.
#[derive(Debug)]
struct Block {
    // The regions go first.
    regions: Vec<Held>,
    memory: Allocation,
    expected: Vec<u8>,
    gpu: usize,
    /// A region over it lives on in another process.
    passed: bool,
}

impl Block {
    fn check(&self, from: usize, to: usize) -> Result<()> {
        let to = to.min(self.expected.len());
        let mut found = vec![0; to - from];
        self.memory.read(from, &mut found)?;
        if let Some(place) = difference(&self.expected[from..to], &found) {
            let at = from + place.first;
            wrong!(
                "GPU memory differs in {} bytes of {}, the first at {at:#x}: {:02x?} instead of {:02x?}",
                place.count,
                to - from,
                &found[place.first..found.len().min(place.first + 8)],
                &self.expected[at..self.expected.len().min(at + 8)]
            );
        }
        Ok(())
    }
}

/// Host memory with a region over all of it.
#[derive(Debug)]
struct Host {
    region: Region,
    memory: Mapping,
    expected: Vec<u8>,
}

/// Where a transfer begins or ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Spot {
    at: Location,
    /// In the memory, not in the region.
    from: usize,
    len: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Location {
    Host(Side),
    /// Number of the block, number of its region.
    Gpu(usize, usize),
}

/// A request that is under way at a free.
struct Doomed {
    initiator: Side,
    /// What changes, and what it is to become; None for memory that nobody looks at any more.
    target: Option<(Spot, Vec<u8>)>,
    /// What of the dying memory becomes what.
    written: Option<(usize, Vec<u8>)>,
}

struct Session<'a> {
    world: &'a World,
    plan: &'a Plan,
    slot: usize,
    choice: Choice,
    /// Of the patterns, which no two allocations share.
    seed: u64,
    patterns: u64,
    opened: Glance,
    // In this order they go.
    connection: Option<Connection>,
    /// Of each side's device, when they were connected.
    duplicates: [Option<u64>; 2],
    /// Who has posted a READ since.
    reads: [bool; 2],
    relics: Vec<Region>,
    blocks: Vec<Block>,
    hosts: [Host; 2],
    hcas: [Hca; 2],
    gpus: Vec<Arc<Gpu>>,
}

fn excuse(
    world: &World,
    plan: &Plan,
    refused: &rdma::Refused,
    before: &Glance,
    opened: &Glance,
) -> Result<()> {
    let disturbed = world.board.excuses(before, opened);
    if disturbed {
        world.board.note(Figure::RefusedThen, 1);
    }
    if disturbed || plan.tight && refused.errno() == libc::EFAULT {
        return Ok(());
    }
    wrong!("a registration was refused for no reason: {refused}")
}

/// Whether a request of `initiator`'s may end with `status` because its memory was revoked. `ended` is how all requests on its
/// pair of queue pairs ended, by who posted them.
fn ends_revoked(initiator: Side, status: Status, ended: &[(Side, Status)]) -> bool {
    match status {
        Status::RemoteAccessError
        | Status::LocalProtectionError
        | Status::LocalAccessError
        | Status::LocalQueuePairOperationError
        | Status::RemoteOperationError
        | Status::WorkRequestFlushedError => true,
        // A queue pair that has failed a request of its own answers none of the other's.
        Status::RetryCounterExceededError => ended
            .iter()
            .any(|&(side, status)| side != initiator && status != Status::Success),
        _ => false,
    }
}

/// Whose queue pair has failed where a request of `initiator`'s ended with `status` because of a READ that was sent again: it
/// had been answered, and its region was gone when it came once more. rxe fails the queue pair that it comes to.
fn failed_by_repeat(initiator: Side, status: Status) -> Option<Side> {
    match status {
        Status::WorkRequestFlushedError => Some(initiator),
        Status::RetryCounterExceededError => Some(initiator.other()),
        _ => None,
    }
}

/// The body of a session's process; the status that it exits with.
pub(super) fn run(world: &World, plan: &Plan, slot: usize, number: u64) -> Result<()> {
    let board = &world.board;
    board.note(Figure::Sessions, 1);
    // What is taken away is put back soon.
    let opened = loop {
        if board.is_stopped() {
            return Ok(());
        }
        let now = board.glance();
        if !board.disturbed_since(&now) {
            break now;
        }
        std::thread::sleep(Duration::from_millis(2));
    };
    let result = Session::begin(world, plan, slot, number, opened).and_then(Session::live);
    match result {
        Err(error) if error.downcast_ref::<Wrong>().is_some() => Err(error),
        Err(_) if board.uprooted_since(&opened) => {
            board.note(Figure::Abandoned, 1);
            Ok(())
        }
        other => other,
    }
}

impl<'a> Session<'a> {
    fn begin(
        world: &'a World,
        plan: &'a Plan,
        slot: usize,
        number: u64,
        opened: Glance,
    ) -> Result<Self> {
        let seed = plan.stream(slot as u64, number);
        let [near, far] = &world.devices;
        let hcas = [Hca::open(near)?, Hca::open(far)?];
        let host = |hca: &Hca, id| -> Result<Host> {
            let memory = Mapping::anonymous(HOST)?;
            let expected = Pattern::new(seed, id).bytes(0, HOST);
            memory.write(0, &expected)?;
            Ok(Host {
                region: hca.register(memory.span(0, HOST)?, full_access())?,
                memory,
                expected,
            })
        };
        let hosts = [host(&hcas[0], 0)?, host(&hcas[1], 1)?];
        let gpus = world
            .gpus
            .iter()
            .enumerate()
            .map(|(index, bdf)| Ok(Arc::new(Gpu::open(index, bdf.clone())?)))
            .collect::<Result<_>>()?;
        world.board.done_by(slot, Operation::Open);
        Ok(Self {
            world,
            plan,
            slot,
            choice: Choice::new(seed),
            seed,
            patterns: 2,
            opened,
            connection: None,
            duplicates: [None; 2],
            reads: [false; 2],
            relics: Vec::new(),
            blocks: Vec::new(),
            hosts,
            hcas,
            gpus,
        })
    }

    fn done(&self, operation: Operation) {
        self.world.board.done_by(self.slot, operation);
    }

    fn note(&self, figure: Figure, count: u64) {
        self.world.board.note(figure, count);
    }

    fn glance(&self) -> Glance {
        self.world.board.glance()
    }

    fn below(&mut self, bound: usize) -> usize {
        self.choice.below(bound as u64) as usize
    }

    /// True once in `times`.
    fn once_in(&mut self, times: u64) -> bool {
        self.choice.below(times) == 0
    }

    fn side(&mut self) -> Side {
        if self.once_in(2) {
            Side::Near
        } else {
            Side::Far
        }
    }

    fn hca(&self, side: Side) -> &Hca {
        &self.hcas[side as usize]
    }

    fn pattern(&mut self) -> Pattern {
        self.patterns += 1;
        Pattern::new(self.seed, self.patterns)
    }

    fn live(mut self) -> Result<()> {
        let length = 25 + self.choice.below(80);
        let ending = match self.choice.below(20) {
            0..10 => Ending::Clean,
            10..13 => Ending::Live,
            13..16 => Ending::Held,
            _ => Ending::Kill,
        };
        for _ in 0..length {
            if self.world.board.is_stopped() {
                // Some are slower than the keeper, and hand on what it will not see.
                if !self.blocks.is_empty() && self.once_in(4) {
                    std::thread::sleep(Duration::from_millis(50));
                    self.pass_descriptor()?;
                }
                break;
            }
            if self.world.board.uprooted_since(&self.opened) {
                return self.let_go();
            }
            if self.world.board.is_thin() {
                self.thin_step()?;
            } else {
                self.step()?;
            }
        }
        self.end(ending)
    }

    fn step(&mut self) -> Result<()> {
        match self.choice.below(100) {
            _ if self.blocks.is_empty() => self.allocate(),
            0..36 => self.transfer(),
            36..39 => self.atomic(),
            39..43 => self.send(),
            43..60 => self.register_somewhere(),
            60..74 => self.deregister(),
            74..77 => self.be_refused(),
            77..82 => self.allocate(),
            82..84 => self.free_quietly(),
            84..90 => self.free_under_region(),
            90..92 => self.verify(),
            92..95 => self.register_in_threads(),
            95..98 => self.fork(),
            _ => self.pass_descriptor(),
        }
    }

    /// The devices have gone. Some processes clean up, the others are ended by it.
    fn let_go(mut self) -> Result<()> {
        self.note(Figure::Abandoned, 1);
        if self.once_in(2) {
            sys::leave(0);
        }
        // No byte of the GPU's is looked at: that would be a bus error.
        self.connection = None;
        while !self.blocks.is_empty() {
            let at = self.below(self.blocks.len());
            self.blocks.remove(at);
        }
        self.relics.clear();
        Ok(())
    }

    /// While the module is to go: no region stays.
    fn thin_step(&mut self) -> Result<()> {
        self.relics.clear();
        while let Some(at) = self.blocks.iter().position(|block| block.passed) {
            self.free_block(at)?;
        }
        for at in 0..self.blocks.len() {
            while let Some(held) = self.blocks[at].regions.pop() {
                drop(held);
                self.done(Operation::Deregister);
            }
        }
        if self.blocks.is_empty() {
            return self.allocate();
        }
        let at = self.below(self.blocks.len());
        if self.register(at)? {
            let number = self.blocks[at].regions.len() - 1;
            let side = self.blocks[at].regions[number].side;
            self.write_or_read(Location::Gpu(at, number), side.other())?;
            self.blocks[at].regions.pop();
            self.done(Operation::Deregister);
        }
        std::thread::sleep(Duration::from_millis(1 + self.choice.below(4)));
        Ok(())
    }

    fn end(mut self, ending: Ending) -> Result<()> {
        if ending == Ending::Clean || self.world.board.is_thin() {
            for block in &self.blocks {
                block.check(0, block.expected.len())?;
                self.note(Figure::Bytes, block.expected.len() as u64);
            }
            for host in &self.hosts {
                let mut found = vec![0; HOST];
                host.memory.read(0, &mut found)?;
                if difference(&host.expected, &found).is_some() {
                    wrong!("host memory differs at the end");
                }
            }
            let regions: usize = self.blocks.iter().map(|block| block.regions.len()).sum();
            let board = &self.world.board;
            let (slot, relics) = (self.slot, self.relics.len());
            let gone = self.blocks.len();
            drop(self);
            for _ in 0..regions + relics {
                board.done_by(slot, Operation::Deregister);
            }
            for _ in 0..gone {
                board.done_by(slot, Operation::FreeQuiet);
            }
            board.done_by(slot, Operation::Exit);
            return Ok(());
        }
        self.leave_requests_under_way(ending == Ending::Held)?;
        match ending {
            Ending::Held => {
                let pause = Duration::from_millis(self.choice.below(30));
                self.single()?;
                let parent = sys::getpid();
                sys::fork(|| {
                    let mut patience = sys::patience(COMPLETION);
                    while sys::parent() == Some(parent) && !patience.is_over() {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    std::thread::sleep(pause);
                    0
                })?;
                self.done(Operation::ExitHeld);
            }
            Ending::Kill => {
                let pause = Duration::from_micros(self.choice.below(4000));
                self.done(Operation::KillSelf);
                std::thread::scope(|scope| -> Result<()> {
                    for span in self.spans()? {
                        for hca in &self.hcas {
                            scope.spawn(move || loop {
                                drop(hca.register(span, full_access()));
                            });
                        }
                    }
                    std::thread::sleep(pause);
                    sys::die()
                })?;
            }
            _ => self.done(Operation::ExitLive),
        }
        sys::leave(0)
    }

    /// The whole of each allocation.
    fn spans(&self) -> Result<Vec<Span>> {
        let whole = |block: &Block| block.memory.span(0, block.expected.len());
        self.blocks.iter().map(whole).collect()
    }

    /// Waits for threads that have ended to be gone.
    fn single(&self) -> Result<()> {
        let alone = sys::wait_until(Duration::from_secs(60), || Ok(sys::threads()? == 1))?;
        ensure!(alone, "threads do not go");
        Ok(())
    }

    // Memory

    fn allocate(&mut self) -> Result<()> {
        if self.blocks.len() >= BLOCKS {
            return self.free_quietly();
        }
        let gpu = self.below(self.gpus.len());
        let granules = if self.once_in(4) { 2 } else { 1 };
        let block = self.allocate_block(gpu, granules * M2)?;
        self.blocks.push(block);
        Ok(())
    }

    fn allocate_block(&mut self, gpu: usize, len: usize) -> Result<Block> {
        let memory = self.gpus[gpu].allocate(len, Placement::Any)?;
        let expected = self.pattern().bytes(0, len);
        memory.write(0, &expected)?;
        let block = Block {
            regions: Vec::new(),
            memory,
            expected,
            gpu,
            passed: false,
        };
        self.given(&block)?;
        self.done(Operation::Allocate);
        Ok(block)
    }

    /// The granules of the BAR in which a block lies now: a pin may have moved it.
    fn granules(&self, block: &Block) -> Result<BTreeSet<u64>> {
        let gpu = &self.gpus[block.gpu];
        let len = block.expected.len() as u64;
        let mut granules = BTreeSet::new();
        let mut at = 0;
        while at < len {
            let place = gpu.place_of(block.memory.mapping().addr() + at)?;
            let run = place.run.min(len - at);
            let first = (place.bar_address - gpu.bar_start()) / GRANULE;
            let last = (place.bar_address - gpu.bar_start() + run - 1) / GRANULE;
            granules.extend(first..=last);
            at += run;
        }
        Ok(granules)
    }

    /// A block lies where it did not before.
    fn given(&self, block: &Block) -> Result<()> {
        for granule in self.granules(block)? {
            self.world.board.given(block.gpu, granule, self.slot);
        }
        Ok(())
    }

    /// A block is about to be freed with requests to it under way.
    fn freed_under_traffic(&self, block: &Block) -> Result<BTreeSet<u64>> {
        let granules = self.granules(block)?;
        for &granule in &granules {
            let board = &self.world.board;
            board.freed_under_traffic(block.gpu, granule, self.slot);
        }
        Ok(granules)
    }

    fn verify(&mut self) -> Result<()> {
        let at = self.below(self.blocks.len());
        self.check_block(at)
    }

    fn check_block(&self, at: usize) -> Result<()> {
        let block = &self.blocks[at];
        block
            .check(0, block.expected.len())
            .with_context(|| format!("block {at}"))?;
        self.note(Figure::Bytes, block.expected.len() as u64);
        self.done(Operation::Verify);
        Ok(())
    }

    /// Deregisters, compares, frees.
    fn free_block(&mut self, at: usize) -> Result<()> {
        self.check_block(at)?;
        while let Some(held) = self.blocks[at].regions.pop() {
            drop(held);
            self.done(Operation::Deregister);
        }
        drop(self.blocks.remove(at));
        self.done(Operation::FreeQuiet);
        Ok(())
    }

    fn free_quietly(&mut self) -> Result<()> {
        let at = self.below(self.blocks.len());
        self.free_block(at)
    }

    // Regions

    /// Whether a refusal is nobody's fault.
    fn excuse(&self, refused: &rdma::Refused, before: &Glance) -> Result<()> {
        excuse(self.world, self.plan, refused, before, &self.opened)
    }

    fn register(&mut self, at: usize) -> Result<bool> {
        let len = self.blocks[at].expected.len();
        let (offset, part) = match self.choice.below(4) {
            0 => (0, len),
            1 => {
                let offset = self.below(len / 65536) * 65536;
                (offset, 65536)
            }
            _ => {
                let offset = self.below(len - 8);
                (offset, 8 + self.below(len - offset - 7))
            }
        };
        self.register_part(at, offset, part)
    }

    fn register_part(&mut self, at: usize, offset: usize, len: usize) -> Result<bool> {
        let side = self.side();
        let before = self.glance();
        let span = self.blocks[at].memory.span(offset, len)?;
        match self.hca(side).register(span, full_access()) {
            Ok(region) => {
                self.blocks[at].regions.push(Held {
                    region,
                    side,
                    offset,
                    len,
                });
                self.given(&self.blocks[at])?;
                self.done(Operation::Register);
                Ok(true)
            }
            Err(refused) => {
                self.excuse(&refused, &before)?;
                self.done(Operation::Refuse);
                Ok(false)
            }
        }
    }

    fn register_somewhere(&mut self) -> Result<()> {
        let at = self.below(self.blocks.len());
        if self.blocks[at].regions.len() >= REGIONS {
            return self.deregister();
        }
        self.register(at)?;
        Ok(())
    }

    fn deregister(&mut self) -> Result<()> {
        if !self.relics.is_empty() && self.once_in(3) {
            let at = self.below(self.relics.len());
            self.relics.remove(at);
            self.done(Operation::Deregister);
            return Ok(());
        }
        let Some(Location::Gpu(block, region)) = self.some_region(None) else {
            return Ok(());
        };
        self.blocks[block].regions.remove(region);
        self.done(Operation::Deregister);
        Ok(())
    }

    /// Ranges that are nobody's.
    fn be_refused(&mut self) -> Result<()> {
        let at = self.below(self.blocks.len());
        let block = &self.blocks[at];
        let end = block.memory.mapping().addr() + block.expected.len() as u64;
        let (addr, len) = match self.choice.below(3) {
            0 => (sys::free_address(GRANULE, GRANULE)?, GRANULE),
            1 => (sys::free_address(GRANULE, GRANULE)? + 4096, 8192),
            _ => (end - 4096, GRANULE),
        };
        // What comes after an allocation may be memory of the program's own.
        let Ok(span) = Span::anywhere(addr, len) else {
            return Ok(());
        };
        let side = self.side();
        match self.hca(side).register(span, full_access()) {
            Err(refused) if refused.errno() == libc::EFAULT => {}
            Err(refused) => wrong!("a range that is nobody's: {refused}, not EFAULT"),
            // An allocation lies right behind: the two are registered as one region.
            Ok(_) if self.gpus.iter().any(|gpu| gpu.place_of(end).is_ok()) => {}
            Ok(_) => wrong!("{addr:#x}+{len:#x} was registered and is not GPU memory"),
        }
        self.done(Operation::Refuse);
        Ok(())
    }

    fn register_in_threads(&mut self) -> Result<()> {
        let spans = self.spans()?;
        let rounds = 1 + self.choice.below(3);
        let count = 2 + self.below(3);
        let (world, plan, slot) = (self.world, self.plan, self.slot);
        let (hcas, opened) = (&self.hcas, &self.opened);
        let work = |index: usize| -> Result<()> {
            for round in 0..rounds {
                let before = world.board.glance();
                let span = spans[(index + round as usize) % spans.len()];
                match hcas[index % 2].register(span, full_access()) {
                    Ok(region) => {
                        world.board.done_by(slot, Operation::Register);
                        drop(region);
                        world.board.done_by(slot, Operation::Deregister);
                    }
                    Err(refused) => {
                        excuse(world, plan, &refused, &before, opened)?;
                        world.board.done_by(slot, Operation::Refuse);
                    }
                }
            }
            Ok(())
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..count)
                .map(|index| {
                    let work = &work;
                    scope.spawn(move || work(index))
                })
                .collect();
            threads.into_iter().try_for_each(|thread| {
                thread
                    .join()
                    .unwrap_or_else(|_| Err(anyhow!("a thread that registers has panicked")))
            })
        })
    }

    // Transfers

    /// A region of this side's, or of either; host memory if there is none and a side was named.
    fn some_region(&mut self, side: Option<Side>) -> Option<Location> {
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

    /// The part of the memory that can be reached at a place.
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
        let mut found = vec![0; spot.len];
        match spot.at {
            Location::Host(side) => self.hosts[side as usize]
                .memory
                .read(spot.from, &mut found)?,
            Location::Gpu(block, _) => self.blocks[block].memory.read(spot.from, &mut found)?,
        }
        Ok(found)
    }

    /// Compares a place and a little around it.
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

    /// After a transfer that failed: each byte is as it was or as it was to become.
    fn settle(&mut self, spot: Spot, new: &[u8]) -> Result<()> {
        let found = self.found(spot)?;
        let old = self.expected(spot);
        for (at, byte) in found.iter().enumerate() {
            if *byte != old[at] && *byte != new[at] {
                wrong!(
                    "a transfer that failed has left {byte:02x} at {:?}+{:#x}, where {:02x} was and {:02x} was to come",
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

    /// False: the session's devices do not let it connect now.
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

    /// Counts a request that nobody answered, as often as it was sent.
    fn note_lost(&self, status: Status) {
        if status == Status::RetryCounterExceededError {
            self.note(Figure::LostRequests, 1);
        }
    }

    fn duplicates(&self, side: Side) -> Option<u64> {
        counters::duplicate_requests(self.hca(side).name())
    }

    /// Whether a request of `initiator`'s that ended with `status` is no fault of the memory's.
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

    /// Whether a transfer of `initiator`'s to living memory may end so. It ends the connection, too.
    fn excuse_failure(&mut self, initiator: Side, status: Status, before: &Glance) -> Result<()> {
        self.connection = None;
        if self.is_excused(initiator, status, before) {
            return Ok(());
        }
        wrong!("a transfer to living memory ended with {status:?}")
    }

    fn transfer(&mut self) -> Result<()> {
        let initiator = self.side();
        let Some(remote) = self.some_region(Some(initiator.other())) else {
            return Ok(());
        };
        self.write_or_read(remote, initiator)
    }

    fn write_or_read(&mut self, remote: Location, initiator: Side) -> Result<()> {
        let mut local = Location::Host(initiator);
        if self.once_in(3) {
            local = self.some_region(Some(initiator)).unwrap_or(local);
        }
        // Two regions of one memory may overlap: what a transfer between them does is nobody's promise.
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
        let (op, source, target) = if write {
            (Op::Write, local, remote)
        } else {
            (Op::Read, remote, local)
        };
        if let Location::Host(side) = source.at {
            // Never the same bytes twice.
            let data = self.pattern().bytes(0, len);
            self.hosts[side as usize].memory.write(source.from, &data)?;
            self.expect(source, &data);
        }
        let data = self.expected(source).to_vec();
        let before = self.glance();
        let (local, remote) = (self.part(local)?, self.part(remote)?);
        self.post(initiator, op, local, remote)?;
        let completion = self.wait(initiator, Endpoint::poll_sent)?;
        self.end_read();
        if completion.status == Status::Success {
            self.expect(target, &data);
            self.check(target)?;
            self.done(if write {
                Operation::Write
            } else {
                Operation::Read
            });
            return Ok(());
        }
        self.excuse_failure(initiator, completion.status, &before)?;
        self.settle(target, &data)
    }

    fn atomic(&mut self) -> Result<()> {
        let initiator = self.side();
        let Some(remote) = self.some_region(Some(initiator.other())) else {
            return Ok(());
        };
        let (offset, len) = self.reach(remote);
        // Aligned as the application sees it; all memory starts at a page.
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
        let (op, new) = match self.choice.below(3) {
            0 => (Op::FetchAdd { add: other }, value.wrapping_add(other)),
            1 => (
                Op::CompareSwap {
                    compare: value,
                    swap: other,
                },
                other,
            ),
            _ => (
                Op::CompareSwap {
                    compare: !value,
                    swap: other,
                },
                value,
            ),
        };
        let before = self.glance();
        let parts = (self.part(local)?, self.part(target)?);
        self.post(initiator, op, parts.0, parts.1)?;
        let completion = self.wait(initiator, Endpoint::poll_sent)?;
        if completion.status == Status::Success {
            self.expect(target, &new.to_le_bytes());
            self.check(target)?;
            self.expect(local, &old);
            self.check(local)?;
            self.done(Operation::Atomic);
            return Ok(());
        }
        self.excuse_failure(initiator, completion.status, &before)?;
        self.settle(target, &new.to_le_bytes())?;
        self.settle(local, &old)
    }

    fn send(&mut self) -> Result<()> {
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
        if status == Status::Success {
            self.expect(target, &data);
            self.check(target)?;
            self.done(Operation::Send);
            return Ok(());
        }
        self.excuse_failure(side, status, &before)?;
        self.settle(target, &data)
    }

    // Memory that goes first

    /// Posts requests to a region, between it and host memory, each with bytes of its own.
    fn post_doomed(&mut self, at: usize, region: usize, reads: bool) -> Result<Vec<Doomed>> {
        let (side, offset, whole) = {
            let held = &self.blocks[at].regions[region];
            (held.side, held.offset, held.len)
        };
        let count = 1 + self.below((IN_FLIGHT as usize).min(whole));
        let most = (whole / count).min(HOST / IN_FLIGHT as usize);
        let mut doomed = Vec::new();
        for index in 0..count {
            // Some touch each other.
            let len = if self.once_in(4) {
                most
            } else {
                1 + self.below(most)
            };
            // The dying memory is at one end or at the other, is written or read.
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
            let (local, remote) = if is_local {
                (dying, host)
            } else {
                (host, dying)
            };
            let (op, into_dying) = if writes {
                (Op::Write, !is_local)
            } else {
                (Op::Read, is_local)
            };
            let (source, target) = if into_dying {
                (host, dying)
            } else {
                (dying, host)
            };
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

    /// The memory of a live region goes while requests to it are under way, and is somebody else's at once.
    fn free_under_region(&mut self) -> Result<()> {
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

        // From here on nothing of it is looked at.
        let mut block = self.blocks.remove(at);
        let granules = self.freed_under_traffic(&block)?;
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
        // Where the mapping stays, its addresses are taken until the end of this.
        let mapping = if keeps_address {
            Some(memory)
        } else {
            drop(memory);
            None
        };
        self.done(operation);

        let new = self.allocate_block(gpu, len)?;
        if self.plan.mode == PinMode::Persistent && !self.granules(&new)?.is_disjoint(&granules) {
            wrong!("memory that a region of the persistent mode has pinned was given away");
        }
        self.blocks.push(new);
        let new = self.blocks.len() - 1;

        let mut met = 0;
        let (mut arrived, mut failed) = (Vec::new(), Vec::new());
        let mut ended = Vec::new();
        for request in &doomed {
            let status = self.wait(request.initiator, Endpoint::poll_sent)?.status;
            ended.push((request.initiator, status));
        }
        for (request, &(_, status)) in doomed.iter().zip(&ended) {
            let success = status == Status::Success;
            met += u64::from(!success);
            if !success {
                self.judge_doomed(request.initiator, status, &ended, &before)?;
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
        // Only without the queue pairs: the first packets of a WRITE may arrive after its source has failed the rest.
        for (target, data) in failed {
            self.settle(*target, data)?;
        }
        // Now that all have ended: what lies around the target of one may be the target of the next.
        for target in arrived {
            self.check(target)?;
        }
        // Whatever was under way has ended: nothing of it may have reached the new owner.
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

    /// A request of `initiator`'s that failed, one of those that `ended` together.
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
        wrong!("a request to memory that was freed meanwhile ended with {status:?}, of {ended:?}")
    }

    /// A revoked region refuses.
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
        self.post(initiator, op, local, remote)?;
        let status = self.wait(initiator, Endpoint::poll_sent)?.status;
        self.end_read();
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

    /// A region of the persistent mode keeps its pages, and what is in them, without any memory of the process's.
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
        self.post(initiator, Op::Read, local, remote)?;
        let status = self.wait(initiator, Endpoint::poll_sent)?.status;
        self.end_read();
        let data = expected[held.offset + from..held.offset + from + len].to_vec();
        if status != Status::Success {
            self.excuse_failure(initiator, status, &before)?;
            return self.settle(host, &data);
        }
        self.expect(host, &data);
        self.check(host)
            .context("what a region keeps after its memory was freed")?;
        self.done(Operation::UseOrphaned);
        Ok(())
    }

    /// Requests to everything, for an end that does not wait for them.
    fn leave_requests_under_way(&mut self, held: bool) -> Result<()> {
        if self.blocks.is_empty() || !self.connect()? {
            return Ok(());
        }
        let at = self.below(self.blocks.len());
        if self.blocks[at].regions.is_empty() && !self.register(at)? {
            return Ok(());
        }
        self.freed_under_traffic(&self.blocks[at])?;
        let region = self.below(self.blocks[at].regions.len());
        // Over with this process, unless a child holds on to it.
        let reads = !held && self.begin_read();
        self.post_doomed(at, region, reads)?;
        Ok(())
    }

    // Other processes

    /// A child that inherits all descriptors and ends some time.
    fn fork(&mut self) -> Result<()> {
        let pause = Duration::from_micros(self.choice.below(5000));
        self.single()?;
        sys::fork(|| {
            std::thread::sleep(pause);
            0
        })?;
        self.done(Operation::Fork);
        // Those that have ended.
        while let sys::Reaped::Child(_, ended) = sys::reap(None, false)? {
            ensure!(ended == sys::Ended::Exited(0), "a child: {ended:?}");
        }
        Ok(())
    }

    /// Registers through a context of its own, whose last descriptor another process will close.
    fn pass_descriptor(&mut self) -> Result<()> {
        let at = self.below(self.blocks.len());
        let span = self.blocks[at]
            .memory
            .span(0, self.blocks[at].expected.len())?;
        let side = self.side();
        let before = self.glance();
        let hca = Hca::open(&self.world.devices[side as usize])?;
        let region = match hca.register(span, full_access()) {
            Ok(region) => region,
            Err(refused) => {
                self.excuse(&refused, &before)?;
                self.done(Operation::Refuse);
                return Ok(());
            }
        };
        self.done(Operation::Register);
        let descriptor = region.command_descriptor();
        let sent = sys::send_descriptor(self.world.keeper.as_fd(), descriptor)?;
        self.blocks[at].passed = true;
        // The library must not know: nothing here ends these.
        mem::forget(region);
        mem::forget(hca);
        sys::close_behind(descriptor);
        if sent {
            self.done(Operation::PassDescriptor);
        }
        Ok(())
    }
}

/// Takes descriptors, keeps some for a while, and closes them: for each that is the last close, all that hangs on it goes
/// from here.
pub(super) fn keep(world: &World, plan: &Plan, from: &UnixDatagram) -> Result<()> {
    const KEPT: usize = 6;
    let mut choice = Choice::new(plan.stream(1000, 0));
    let mut kept = Vec::new();
    loop {
        let ends = world.board.is_stopped();
        let taken = sys::receive_descriptor(from.as_fd())?;
        let idle = taken.is_none();
        kept.extend(taken);
        let uprooted = |now: Glance| world.board.disturbed_since(&now);
        let all = world.board.is_thin() || ends && idle || uprooted(world.board.glance());
        while !kept.is_empty() && (all || kept.len() > KEPT) {
            drop(kept.swap_remove(choice.below(kept.len() as u64) as usize));
            world.board.done(Operation::LastClose);
        }
        if ends && idle && kept.is_empty() {
            return Ok(());
        }
        if idle {
            std::thread::sleep(Duration::from_millis(3));
        }
    }
}

/// Whether this is how memory of a GPU that is being unbound is refused, after so many refusals: it is gone; or it went in the
/// middle of the registration, which happens to one at most, and only where the memory of a region is taken away.
fn refuses_unbound(mode: PinMode, errno: i32, refusals: u64) -> bool {
    match errno {
        libc::EFAULT => true,
        libc::EINVAL => mode == PinMode::Revocable && refusals == 0,
        _ => false,
    }
}

/// Registers and deregisters memory of a GPU until that is refused, because the GPU is being unbound; from then on it must
/// be refused always.
pub(super) fn probe(
    world: &World,
    plan: &Plan,
    gpu: usize,
    ready: impl FnOnce(),
    over: impl Fn() -> bool,
) -> Result<()> {
    let hca = Hca::open(&world.devices[0])?;
    let opened = Arc::new(Gpu::open(gpu, world.gpus[gpu].clone())?);
    let memory = opened.allocate(M2, Placement::Any)?;
    let span = memory.span(0, M2)?;
    drop(hca.register(span, full_access())?);
    world.board.done(Operation::Register);
    world.board.done(Operation::Deregister);
    ready();
    let mut patience = sys::patience(COMPLETION);
    let mut refusals = 0;
    // One more after it is over: the memory is gone for good.
    let mut last = false;
    while !last {
        last = over();
        match hca.register(span, full_access()) {
            Ok(_) if refusals > 0 => {
                wrong!("memory of a GPU that is being unbound was pinned after {refusals} refusals")
            }
            Ok(_) => {}
            Err(refused) if refuses_unbound(plan.mode, refused.errno(), refusals) => refusals += 1,
            Err(refused) => bail!("while a GPU was being unbound: {refused}"),
        }
        ensure!(!patience.is_over(), "the unbinding does not end");
    }
    if refusals == 0 {
        wrong!("memory of a GPU that was unbound can still be pinned");
    }
    world.board.note(Figure::ProbeRefusals, refusals);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_nobody_answers_ends_revoked_where_the_other_side_has_failed() {
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
    fn a_repeated_read_fails_who_posts_there_and_who_waits_for_an_answer() {
        let near = Side::Near;
        let of = |status| failed_by_repeat(near, status);
        assert_eq!(of(Status::WorkRequestFlushedError), Some(near));
        assert_eq!(of(Status::RetryCounterExceededError), Some(Side::Far));
        assert_eq!(of(Status::RemoteAccessError), None);
        assert_eq!(of(Status::Success), None);
    }

    #[test]
    fn memory_of_an_unbound_gpu_goes_during_one_registration_at_most() {
        assert!(refuses_unbound(PinMode::Revocable, libc::EINVAL, 0));
        assert!(!refuses_unbound(PinMode::Revocable, libc::EINVAL, 1));
        assert!(!refuses_unbound(PinMode::Persistent, libc::EINVAL, 0));
        assert!(refuses_unbound(PinMode::Persistent, libc::EFAULT, 1));
        assert!(!refuses_unbound(PinMode::Revocable, libc::ENOMEM, 0));
    }
}
