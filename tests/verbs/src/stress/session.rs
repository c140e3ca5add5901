// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! One process of a stress run. The process allocates, registers, transfers, frees, forks, passes
//! descriptors, and ends in one of several ways. The seed determines the actions of the process.
//! The results depend on all processes.
//!
//! Each piece of memory has a copy of its expected content. Every byte of an allocation is compared
//! before the allocation is freed. A late write therefore shows in the memory of the next owner.
//! After a failed transfer, each byte must be the old or the new byte.

macro_rules! wrong {
    ($($arguments:tt)*) => {
        return Err(Wrong(format!($($arguments)*)).into())
    };
}

pub(super) use wrong;

mod traffic;

use std::collections::BTreeSet;
use std::mem;
use std::os::fd::AsFd;
use std::os::unix::net::UnixDatagram;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{anyhow, ensure, Context as _, Result};

use super::board::{Board, Figure, Glance, Operation};
use super::plan::Plan;
use crate::gpu::{Allocation, Gpu, GRANULE};
use crate::lab::M2;
use crate::pattern::{difference, Choice, Pattern};
use crate::rdma::{Connection, Hca, Region};
use crate::sys;
use crate::sys::{Mapping, Placement, Span};
use traffic::Location;

/// Bytes of host memory at each end.
const HOST: usize = 512 << 10;
/// Maximum number of allocations.
const BLOCKS: usize = 3;
/// Maximum number of regions on one allocation.
const REGIONS: usize = 5;
/// Maximum number of regions that a session keeps after their memory was freed.
const RELICS: usize = 3;
/// Time limit of a request.
pub(super) const COMPLETION: Duration = Duration::from_secs(120);

/// Common data of all processes of a run.
#[derive(Debug)]
pub(super) struct World {
    pub(super) board: Board,
    pub(super) devices: [String; 2],
    /// PCI addresses of the GPUs. The index is the index of the character device.
    pub(super) gpus: Vec<String>,
    /// Socket to the keeper: the process that receives the sessions' descriptors and closes them
    /// later (`bystanders::keep`).
    pub(super) keeper: UnixDatagram,
}

/// A failure that no disturbance excuses.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct Wrong(pub(super) String);

/// A change of the devices after which the session cannot continue. Such a change is not a failure.
#[derive(Debug, thiserror::Error)]
#[error("the devices have changed")]
struct Uprooted;

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

/// Way in which a session ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ending {
    /// Everything is compared and released.
    Clean,
    /// Exits with requests in flight.
    Live,
    /// Exits like [`Ending::Live`], while a child has copies of all descriptors and closes them
    /// later.
    Held,
    /// Killed by SIGKILL, with requests in flight and threads that register.
    Kill,
}

/// A region over a part of an allocation.
#[derive(Debug)]
struct Held {
    region: Region,
    side: Side,
    offset: usize,
    len: usize,
}

/// GPU memory with its expected content.
#[derive(Debug)]
struct Block {
    // The regions are dropped before the memory.
    regions: Vec<Held>,
    memory: Allocation,
    expected: Vec<u8>,
    gpu: usize,
    /// `true` if a region over the memory lives on in another process.
    passed: bool,
}

impl Block {
    fn check(&self, from: usize, to: usize) -> Result<()> {
        let to = to.min(self.expected.len());
        let found = self.memory.bytes(from, to - from)?;
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

struct Session<'a> {
    world: &'a World,
    plan: &'a Plan,
    slot: usize,
    choice: Choice,
    /// Seed of the patterns. No two allocations share a pattern.
    seed: u64,
    patterns: u64,
    opened: Glance,
    // The fields are dropped in this order.
    connection: Option<Connection>,
    /// Duplicate requests of each side's device at the time of the connection.
    duplicates: [Option<u64>; 2],
    /// `true` for a side that has posted a READ since the connection.
    reads: [bool; 2],
    relics: Vec<Region>,
    blocks: Vec<Block>,
    hosts: [Host; 2],
    hcas: [Hca; 2],
    gpus: Vec<Arc<Gpu>>,
}

/// Registers a range. Returns `None` if the range is refused and the refusal is excused.
fn try_register(
    (world, plan, slot): (&World, &Plan, usize),
    opened: &Glance,
    hca: &Hca,
    span: Span,
) -> Result<Option<Region>> {
    let before = world.board.glance();
    let refused = match hca.reg_mr(span) {
        Ok(region) => {
            world.board.done_by(slot, Operation::Register);
            return Ok(Some(region));
        }
        Err(refused) => refused,
    };
    let disturbed = world.board.excuses(&before, opened);
    if disturbed {
        world.board.note(Figure::RefusedThen, 1);
    } else if !plan.tight || refused.errno() != libc::EFAULT {
        wrong!("a registration was refused for no reason: {refused}")
    }
    world.board.done_by(slot, Operation::Refuse);
    Ok(None)
}

/// Runs a session in its process.
pub(super) fn run(world: &World, plan: &Plan, slot: usize, number: u64) -> Result<()> {
    let board = &world.board;
    board.note(Figure::Sessions, 1);
    // A device that a disturbance has removed comes back soon, so this loop tries again.
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
                region: hca.reg_mr(memory.span(0, HOST)?)?,
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

    /// Returns `true` once in `times` on average.
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
                // The sleep makes some sessions slower than the keeper. Descriptors that these
                // sessions pass reach no keeper.
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

    /// Ends the session after the devices have gone. Some sessions clean up first, and others exit
    /// at once.
    fn let_go(mut self) -> Result<()> {
        self.note(Figure::Abandoned, 1);
        if self.once_in(2) {
            sys::leave(0);
        }
        // A read of the GPU's memory would cause a bus error.
        self.connection = None;
        while !self.blocks.is_empty() {
            let at = self.below(self.blocks.len());
            self.blocks.remove(at);
        }
        self.relics.clear();
        Ok(())
    }

    /// Makes one step that leaves no region behind, so that the module can be unloaded.
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
                let found = host.memory.bytes(0, HOST)?;
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
                                drop(hca.reg_mr(span));
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

    /// Returns the span of each allocation.
    fn spans(&self) -> Result<Vec<Span>> {
        let whole = |block: &Block| block.memory.span(0, block.expected.len());
        self.blocks.iter().map(whole).collect()
    }

    /// Waits until this thread is the only one. A thread that has ended stays visible for a short
    /// time.
    fn single(&self) -> Result<()> {
        let alone = sys::wait_until(Duration::from_secs(60), || Ok(sys::threads()? == 1))?;
        ensure!(alone, "threads that have ended are still there");
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
        self.done(Operation::Allocate);
        Ok(Block {
            regions: Vec::new(),
            memory,
            expected,
            gpu,
            passed: false,
        })
    }

    /// Returns the BAR granules that a block occupies now. A pin may have moved the block.
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

    /// Compares the memory, deregisters it and frees it.
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

    /// Registers a range. Returns `None` if the range is refused and the refusal is excused.
    fn try_register(&self, hca: &Hca, span: Span) -> Result<Option<Region>> {
        try_register((self.world, self.plan, self.slot), &self.opened, hca, span)
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
        let span = self.blocks[at].memory.span(offset, len)?;
        let Some(region) = self.try_register(self.hca(side), span)? else {
            return Ok(false);
        };
        self.blocks[at].regions.push(Held {
            region,
            side,
            offset,
            len,
        });
        Ok(true)
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

    /// Registers ranges that are not GPU memory, and expects refusals.
    fn be_refused(&mut self) -> Result<()> {
        let at = self.below(self.blocks.len());
        let block = &self.blocks[at];
        let end = block.memory.mapping().addr() + block.expected.len() as u64;
        let (addr, len) = match self.choice.below(3) {
            0 => (sys::free_address(GRANULE, GRANULE)?, GRANULE),
            1 => (sys::free_address(GRANULE, GRANULE)? + 4096, 8192),
            _ => (end - 4096, GRANULE),
        };
        // The range after an allocation may be the program's own memory.
        let Ok(span) = Span::anywhere(addr, len) else {
            return Ok(());
        };
        let side = self.side();
        match self.hca(side).reg_mr(span) {
            Err(refused) if refused.errno() == libc::EFAULT => {}
            Err(refused) => wrong!("a range that is not GPU memory: {refused}, not EFAULT"),
            // Another allocation follows directly, so both allocations are registered as one
            // region.
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
                let span = spans[(index + round as usize) % spans.len()];
                let own = (world, plan, slot);
                if let Some(region) = try_register(own, opened, &hcas[index % 2], span)? {
                    drop(region);
                    world.board.done_by(slot, Operation::Deregister);
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

    // Other processes

    /// Forks a child that inherits all descriptors and ends some time later.
    fn fork(&mut self) -> Result<()> {
        let pause = Duration::from_micros(self.choice.below(5000));
        self.single()?;
        sys::fork(|| {
            std::thread::sleep(pause);
            0
        })?;
        self.done(Operation::Fork);
        // Reaps children that have ended.
        while let sys::Reaped::Child(_, ended) = sys::reap(None, false)? {
            ensure!(ended == sys::Ended::Exited(0), "a child: {ended:?}");
        }
        Ok(())
    }

    /// Registers through a separate context, whose last descriptor another process will close.
    fn pass_descriptor(&mut self) -> Result<()> {
        let at = self.below(self.blocks.len());
        let span = self.blocks[at]
            .memory
            .span(0, self.blocks[at].expected.len())?;
        let side = self.side();
        let hca = Hca::open(&self.world.devices[side as usize])?;
        let Some(region) = self.try_register(&hca, span)? else {
            return Ok(());
        };
        let descriptor = region.command_descriptor();
        let sent = sys::send_descriptor(self.world.keeper.as_fd(), descriptor)?;
        self.blocks[at].passed = true;
        // The library must not drop these objects, because the last close of the descriptor ends
        // them.
        mem::forget(region);
        mem::forget(hca);
        sys::close_behind(descriptor);
        if sent {
            self.done(Operation::PassDescriptor);
        }
        Ok(())
    }
}
