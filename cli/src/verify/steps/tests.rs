// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Tests of the steps on a fake [`Bench`], which keeps all memory in vectors and injects faults.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use peermem_verbs::pattern::difference;

use super::*;
use crate::host::Unseen;

/// An injected fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    NoGpuMemory,
    /// The server uses no GPU.
    NoServerGpu,
    /// No method registers GPU memory of the server.
    NoServerModule,
    /// The GPU's driver loses a byte.
    CopiesLie,
    NoDmaBuf,
    ShortDmaBuf,
    /// The GPU's driver cannot map two adjacent allocations.
    NoMapping,
    /// `ibv_reg_mr` of a range over two allocations fails.
    TwoRefused,
    /// The module registers no range over two allocations.
    OneAtMost,
    /// The device reads zeros from the second of two allocations.
    HalfRead,
    /// The device writes no bytes to the second of two allocations.
    HalfWritten,
    NoModule,
    /// `ibv_reg_mr` of GPU memory fails.
    Refused,
    /// Registration of host memory fails.
    HostRefused,
    /// The transfer with this number changes a byte that it moves.
    Corrupts(usize),
    /// The transfer with this number changes the byte before the window.
    Spills(usize),
    /// The transfer with this number ends with an error.
    Status(usize),
    /// The transfer with this number gets no connection.
    NoConnection(usize),
    /// The deregistration with this number fails.
    Sticks(usize),
    /// Freed memory goes to another owner at once.
    NotHeld,
    /// Freed memory is cleared and unused.
    Cleared,
    /// Freed memory is out of the device's reach.
    Revokes,
    /// The holder never moves a byte.
    NoHolder,
    /// The module still lists a killed process's registration.
    StaysListed,
    /// The module never lists a registration.
    NeverListed,
    /// Memory that a killed process pinned stays pinned.
    StaysPinned,
}

type Bytes = Rc<RefCell<Vec<u8>>>;

#[derive(Debug, Clone)]
pub(crate) struct Memory {
    bytes: Bytes,
    is_gpu: bool,
    /// Offset of the second allocation, if the memory has two.
    border: Option<usize>,
    end: End,
    freed: Rc<Cell<bool>>,
}

#[derive(Debug)]
pub(crate) struct Region {
    memory: Memory,
    live: Rc<Cell<usize>>,
}

impl Drop for Region {
    fn drop(&mut self) {
        self.live.set(self.live.get() - 1);
    }
}

#[derive(Default)]
pub(crate) struct Fake {
    faults: Vec<Fault>,
    clock: Cell<u64>,
    transfers: usize,
    deregistrations: usize,
    /// Number of live regions.
    live: Rc<Cell<usize>>,
    /// Freed memory that the next allocation gets.
    given_back: Option<Bytes>,
    listed: Cell<usize>,
    pinned: Cell<u64>,
    /// `true` if the module's files are readable.
    visible: bool,
    /// Number of calls of `pause` until the resources of the killed holder are released.
    lingers: usize,
}

pub(crate) const SIZE: usize = 128 << 10;

impl Fake {
    pub(crate) fn with(faults: &[Fault]) -> Self {
        Self {
            faults: faults.to_vec(),
            pinned: Cell::new(1000),
            visible: true,
            lingers: 3,
            ..Self::default()
        }
    }

    fn has(&self, fault: Fault) -> bool {
        self.faults.contains(&fault)
    }
}

impl Bench for Fake {
    type Memory = Memory;
    type Region = Region;
    type Holder = u32;

    fn about(&self) -> String {
        "a fake".to_owned()
    }

    fn memory(&mut self, end: End, kind: Kind, len: usize) -> Result<Memory, Unable> {
        match (end, kind) {
            (End::Here, Kind::Gpu) if self.has(Fault::NoGpuMemory) => {
                return Err(anyhow::anyhow!("no memory").into());
            }
            (End::Server, Kind::Gpu) if self.has(Fault::NoServerGpu) => {
                return Err(Unable::Impossible("--gpu none".to_owned()));
            }
            _ => {}
        }
        let bytes = self.given_back.take();
        Ok(Memory {
            bytes: bytes.unwrap_or_else(|| Rc::new(RefCell::new(vec![0; len]))),
            is_gpu: kind == Kind::Gpu,
            border: None,
            end,
            freed: Rc::default(),
        })
    }

    fn two_allocations(&mut self, head: usize, len: usize) -> Result<Memory, Unable> {
        if self.has(Fault::NoMapping) {
            return Err(Unable::Impossible("no cuMemMap".to_owned()));
        }
        let memory = self.memory(End::Here, Kind::Gpu, len)?;
        Ok(Memory {
            border: Some(head),
            ..memory
        })
    }

    fn fill(&mut self, memory: &Memory, pattern: Pattern) -> anyhow::Result<()> {
        let mut bytes = memory.bytes.borrow_mut();
        pattern.fill(0, &mut bytes);
        if memory.is_gpu && self.has(Fault::CopiesLie) {
            bytes[0] ^= 1;
        }
        Ok(())
    }

    fn compare(
        &mut self,
        memory: &Memory,
        expected: &Contents,
    ) -> anyhow::Result<Option<Difference>> {
        let found = memory.bytes.borrow();
        Ok(difference(&expected.bytes(found.len())?, &found))
    }

    fn free(&mut self, memory: &mut Memory) -> anyhow::Result<()> {
        memory.freed.set(true);
        if self.has(Fault::NotHeld) {
            self.given_back = Some(Rc::clone(&memory.bytes));
        }
        if self.has(Fault::Cleared) {
            memory.bytes.borrow_mut().fill(0);
        }
        Ok(())
    }

    fn export(&mut self, memory: &Memory) -> Result<u64, Unable> {
        if self.has(Fault::NoDmaBuf) {
            return Err(Unable::Impossible("exports none".to_owned()));
        }
        let len = memory.bytes.borrow().len() as u64;
        Ok(len - u64::from(self.has(Fault::ShortDmaBuf)))
    }

    fn register(&mut self, way: Way, memory: &Memory) -> Result<Region, Unable> {
        let refused = |errno, why: &str| Unable::Failed {
            errno: Some(errno),
            why: why.to_owned(),
        };
        let (is_gpu, is_two) = (memory.is_gpu, memory.border.is_some());
        if is_gpu && memory.end == End::Server && self.has(Fault::NoServerModule) {
            return Err(Unable::Impossible("the server: no module".to_owned()));
        }
        match (is_gpu, way) {
            (false, _) if self.has(Fault::HostRefused) => return Err(refused(12, "ENOMEM")),
            (true, Way::DmaBuf) if self.has(Fault::NoDmaBuf) => {
                return Err(Unable::Impossible("exports none".to_owned()))
            }
            (true, Way::PeerMemory) if self.has(Fault::NoModule) => {
                return Err(Unable::Impossible("no module".to_owned()))
            }
            (true, Way::PeerMemory) if self.has(Fault::Refused) => {
                return Err(refused(14, "EFAULT; the module: no_room"))
            }
            (true, Way::PeerMemory) if is_two && self.has(Fault::TwoRefused) => {
                return Err(refused(14, "EFAULT; the module: too_many_chunks"))
            }
            (true, Way::PeerMemory) if is_two && self.has(Fault::OneAtMost) => {
                return Err(Unable::Impossible("one allocation at most".to_owned()))
            }
            _ => {}
        }
        self.clock.set(self.clock.get() + 120);
        self.live.set(self.live.get() + 1);
        Ok(Region {
            memory: memory.clone(),
            live: Rc::clone(&self.live),
        })
    }

    fn deregister(&mut self, region: Region) -> anyhow::Result<()> {
        drop(region);
        self.clock.set(self.clock.get() + 30);
        self.deregistrations += 1;
        anyhow::ensure!(
            !self.has(Fault::Sticks(self.deregistrations)),
            "ibv_dereg_mr: EBUSY"
        );
        Ok(())
    }

    fn transfer(
        &mut self,
        _: Verb,
        from: &Region,
        to: &Region,
        window: Window,
        at_least: Option<Duration>,
    ) -> anyhow::Result<Moved> {
        self.transfers += 1;
        let number = self.transfers;
        anyhow::ensure!(!self.has(Fault::NoConnection(number)), "queue pair to RTR");
        let revoked = from.memory.freed.get() && self.has(Fault::Revokes);
        if revoked || self.has(Fault::Status(number)) {
            return Ok(Moved::Refused("RemoteAccessError".to_owned()));
        }
        let (at, len) = (window.at as usize, window.len as usize);
        let reached = |region: &Region, fault| match region.memory.border {
            Some(border) if self.has(fault) => border - at,
            _ => len,
        };
        let mut moved = from.memory.bytes.borrow()[at..at + len].to_vec();
        moved[reached(from, Fault::HalfRead)..].fill(0);
        moved.truncate(reached(to, Fault::HalfWritten));
        let mut target = to.memory.bytes.borrow_mut();
        target[at..at + moved.len()].copy_from_slice(&moved);
        if self.has(Fault::Corrupts(number)) {
            target[at + 17] ^= 0x80;
        }
        if self.has(Fault::Spills(number)) {
            target[at - 1] ^= 0x80;
        }
        let times = if at_least.is_some() { 10 } else { 1 };
        Ok(Moved::Done {
            bytes: window.len * times,
            took: Duration::from_micros(window.len * times / 1000),
        })
    }

    fn accept(&mut self, _: &Contact, _: &Region, _: Window) -> anyhow::Result<(Contact, Part)> {
        anyhow::bail!("a fake has no queue pairs")
    }

    fn now(&self) -> Duration {
        Duration::from_micros(self.clock.get())
    }

    fn pause(&mut self) {
        self.clock.set(self.clock.get() + 1_000_000);
        self.lingers = self.lingers.saturating_sub(1);
        if self.lingers == 0 {
            if !self.has(Fault::StaysListed) {
                self.listed.set(0);
            }
            if !self.has(Fault::StaysPinned) {
                self.pinned.set(1000);
            }
        }
    }

    fn hold(&mut self, _: Way) -> anyhow::Result<u32> {
        anyhow::ensure!(!self.has(Fault::NoHolder), "moved no bytes");
        if !self.has(Fault::NeverListed) {
            self.listed.set(2);
        }
        self.pinned.set(self.pinned.get() + SIZE as u64);
        Ok(4711)
    }

    fn holder(&self, holder: &u32) -> u32 {
        *holder
    }

    fn kill(&mut self, _: u32) -> anyhow::Result<()> {
        Ok(())
    }

    fn registrations(&self, process: u32) -> Seen<usize> {
        assert_eq!(process, 4711);
        match self.visible {
            true => Ok(self.listed.get()),
            false => Err(Unseen::Denied),
        }
    }

    fn pinned(&self) -> Seen<u64> {
        match self.visible {
            true => Ok(self.pinned.get()),
            false => Err(Unseen::Absent),
        }
    }
}

fn plan() -> Plan {
    Plan {
        size: SIZE,
        scope: Scope::OneHost,
        links: [Links::default(); 2],
        registrations: 3,
        measure: Duration::from_millis(1),
        patience: Duration::from_secs(60),
        seed: 9,
    }
}

/// Runs all steps on the fake, and checks that each step that began has ended.
fn steps_on(fake: &mut Fake, plan: &Plan) -> Vec<Step> {
    let (mut steps, mut open) = (Vec::new(), None);
    run(fake, plan, &mut |event| match event {
        Event::Begins { way, step } => {
            assert_eq!(open.replace((way, step)), None, "one at a time");
        }
        Event::Ended(step) => {
            assert_eq!(open.take(), Some((step.way, step.step)));
            steps.push(step);
        }
        Event::About(about) => assert_eq!(about, "a fake"),
        Event::Peer(_) | Event::Done => panic!("an event of the worker"),
    });
    assert!(open.is_none());
    // Nothing stays registered after any failure.
    assert_eq!(fake.live.get(), 0, "regions alive");
    steps
}

fn steps_with(faults: &[Fault]) -> Vec<Step> {
    steps_on(&mut Fake::with(faults), &plan())
}

fn outcomes(steps: &[Step], outcome: Outcome) -> Vec<(Option<Way>, Name)> {
    let with = steps.iter().filter(|step| step.outcome == outcome);
    with.map(|step| (step.way, step.step)).collect()
}

fn said(steps: &[Step], which: (Option<Way>, Name)) -> String {
    let mut steps = steps.iter();
    let step = steps.find(|step| (step.way, step.step) == which);
    step.and_then(|step| step.found.clone()).unwrap_or_default()
}

const PEER: Option<Way> = Some(Way::PeerMemory);
const DMA: Option<Way> = Some(Way::DmaBuf);
const REGISTER: (Option<Way>, Name) = (PEER, Name::Register);
const DEREGISTER: (Option<Way>, Name) = (PEER, Name::Deregister);
const TWO: (Option<Way>, Name) = (PEER, Name::TwoAllocations);
const FREE: (Option<Way>, Name) = (PEER, Name::FreeWhileRegistered);
const KILLED: (Option<Way>, Name) = (PEER, Name::KilledHolder);
const EXPORTS: [(Option<Way>, Name); 2] =
    [(None, Name::Export), (None, Name::ExportTwoAllocations)];
const ANY_WAY: (Option<Way>, Name) = (None, Name::AnyWay);

/// Steps that need no RDMA device.
const AT_FIRST: [Name; 4] = [
    Name::Allocate,
    Name::Copies,
    Name::Export,
    Name::ExportTwoAllocations,
];

/// Steps for each method of registration that works.
const OF_A_WAY: [Name; 10] = [
    Name::Register,
    Name::WriteFromGpu,
    Name::WriteToGpu,
    Name::GpuToGpu,
    Name::ReadFromGpu,
    Name::SendToGpu,
    Name::Deregister,
    Name::TwoAllocations,
    Name::FreeWhileRegistered,
    Name::KilledHolder,
];

#[test]
fn all_steps_run_in_order() {
    let steps = steps_with(&[]);
    let first = AT_FIRST.into_iter().chain([Name::HostMemory]);
    let mut expected: Vec<(Option<Way>, Name)> = first.map(|name| (None, name)).collect();
    for way in [PEER, DMA] {
        expected.extend(OF_A_WAY.map(|name| (way, name)));
    }
    expected.push(ANY_WAY);
    assert_eq!(outcomes(&steps, Outcome::Passed), expected);
    assert_eq!(steps.len(), expected.len());
    assert_eq!(said(&steps, ANY_WAY), "ibv_reg_mr, ibv_reg_dmabuf_mr");
    assert!(said(&steps, FREE).starts_with("held"));
    assert_eq!(
        said(&steps, KILLED),
        "killed while bytes moved; registrations listed: 2, then 0; bytes pinned in BAR1: 1000, 132072, 1000"
    );
}

#[test]
fn figures_match_the_measurements() {
    let steps = steps_with(&[]);
    let of = |name| {
        steps
            .iter()
            .find(|step| (step.way, step.step) == (PEER, name))
    };
    let register = of(Name::Register).map(|step| step.figures);
    assert_eq!(
        register,
        Some(Figures {
            bytes: Some(SIZE as u64),
            registrations: Some(3),
            registration_us: Some(120.0),
            deregistration_us: Some(30.0),
            ..Figures::default()
        })
    );
    let window = SIZE as u64 - 2 * EDGE;
    let moved = of(Name::WriteToGpu).map(|step| step.figures);
    assert_eq!(
        moved,
        Some(Figures {
            bytes: Some(window),
            timed_bytes: Some(10 * window),
            bytes_per_second: Some(10 * window * 1_000_000 / (10 * window / 1000)),
            ..Figures::default()
        })
    );
}

#[test]
fn the_gpu_alone_needs_no_rdma_device() {
    let plan = Plan {
        scope: Scope::GpuOnly,
        ..plan()
    };
    let mut fake = Fake::with(&[]);
    let steps = steps_on(&mut fake, &plan);
    let expected = AT_FIRST.map(|name| (None, name));
    assert_eq!(outcomes(&steps, Outcome::Passed), expected);
    assert_eq!(steps.len(), 4);
    assert_eq!(fake.transfers, 0);
}

/// Checks that exactly these steps fail with this fault. The text of the first failed step must
/// contain `words`.
fn only_fails(fault: Fault, expected: &[(Option<Way>, Name)], words: &str) -> Vec<Step> {
    let steps = steps_with(&[fault]);
    assert_eq!(outcomes(&steps, Outcome::Failed), expected, "{fault:?}");
    if let Some(first) = expected.first() {
        let said = said(&steps, *first);
        assert!(said.contains(words), "{fault:?}: {said:?}");
    }
    steps
}

#[test]
fn without_gpu_memory_the_run_ends() {
    let steps = only_fails(Fault::NoGpuMemory, &[(None, Name::Allocate)], "no memory");
    assert!(outcomes(&steps, Outcome::Passed).is_empty());
}

#[test]
fn memory_that_loses_bytes_is_not_used_further() {
    let words = "1 of 131072 bytes differ, the first at 0x0";
    let both = [Name::Copies, Name::ExportTwoAllocations].map(|name| (None, name));
    let steps = only_fails(Fault::CopiesLie, &both, words);
    assert_eq!(
        outcomes(&steps, Outcome::NotPossibleHere),
        [(None, Name::HostMemory)]
    );
}

#[test]
fn refused_host_memory_ends_the_run() {
    let steps = only_fails(Fault::HostRefused, &[(None, Name::HostMemory)], "ENOMEM");
    assert_eq!(steps.last().and_then(|step| step.errno), Some(12));
}

#[test]
fn one_way_is_enough() {
    let steps = only_fails(Fault::NoDmaBuf, &[], "");
    let left_out = outcomes(&steps, Outcome::NotPossibleHere);
    let mut expected = EXPORTS.to_vec();
    expected.extend(OF_A_WAY.map(|name| (DMA, name)));
    assert_eq!(left_out, expected);
    assert_eq!(said(&steps, ANY_WAY), "ibv_reg_mr");

    let steps = only_fails(Fault::NoModule, &[], "");
    assert_eq!(said(&steps, ANY_WAY), "ibv_reg_dmabuf_mr");
    assert_eq!(said(&steps, REGISTER), "no module");
}

#[test]
fn no_way_is_a_failure() {
    let steps = steps_with(&[Fault::NoDmaBuf, Fault::NoModule]);
    assert_eq!(outcomes(&steps, Outcome::Failed), [ANY_WAY]);
}

/// A failure before the call to the kernel has no errno, instead of the errno 0.
#[test]
fn a_failure_without_an_errno_has_none() {
    let failed = Unable::from(anyhow::anyhow!("no such range"));
    assert!(
        matches!(failed, Unable::Failed { errno: None, .. }),
        "{failed:?}"
    );
}

#[test]
fn a_refusal_has_its_errno_and_its_reason() {
    let steps = only_fails(Fault::Refused, &[REGISTER], "the module: no_room");
    let step = steps.iter().find(|step| step.outcome == Outcome::Failed);
    assert_eq!(step.and_then(|step| step.errno), Some(14));
    assert_eq!(
        outcomes(&steps, Outcome::NotPossibleHere),
        OF_A_WAY[1..]
            .iter()
            .map(|name| (PEER, *name))
            .collect::<Vec<_>>()
    );
}

#[test]
fn a_short_dma_buf_is_noticed() {
    only_fails(Fault::ShortDmaBuf, &EXPORTS, "131071 bytes for 131072");
}

#[test]
fn every_byte_of_every_transfer_counts() {
    // Each step has two transfers: one that is compared, and one that is repeated and timed.
    for (index, (name, _)) in MOVES.into_iter().enumerate() {
        let first = 2 * index + 1;
        let fails = |fault, words| only_fails(fault, &[(PEER, name)], words);
        let changed = "1 of 131072 bytes differ, the first at 0x1011";
        fails(Fault::Corrupts(first), changed);
        let before = "1 of 131072 bytes differ, the first at 0xfff";
        fails(Fault::Spills(first), before);
        fails(Fault::Corrupts(first + 1), "after many transfers: 1 of");
        fails(Fault::Status(first), "ended with RemoteAccessError");
        let again = "the repeated transfer ended with RemoteAccessError";
        fails(Fault::Status(first + 1), again);
        fails(Fault::NoConnection(first), "queue pair to RTR");
    }
}

#[test]
fn a_way_that_loses_bytes_does_not_work() {
    let steps = steps_with(&[Fault::NoDmaBuf, Fault::Corrupts(3)]);
    assert_eq!(
        outcomes(&steps, Outcome::Failed),
        [(PEER, Name::WriteToGpu), ANY_WAY]
    );
}

#[test]
fn failed_deregistrations_fail_the_step() {
    // The order of deregistrations is: three for the median, the second region, the first region,
    // the two allocations, the freed memory, and the region after the kill.
    only_fails(Fault::Sticks(2), &[REGISTER], "EBUSY");
    only_fails(
        Fault::Sticks(4),
        &[DEREGISTER],
        "the second region: ibv_dereg_mr: EBUSY",
    );
    only_fails(Fault::Sticks(5), &[DEREGISTER], "EBUSY");
    only_fails(Fault::Sticks(6), &[TWO], "EBUSY");
    only_fails(
        Fault::Sticks(7),
        &[FREE],
        "after the free: ibv_dereg_mr: EBUSY",
    );
    only_fails(Fault::Sticks(8), &[KILLED], "EBUSY");
}

#[test]
fn every_byte_on_both_sides_of_a_border_counts() {
    // Transfers 1 to 10 belong to the steps of `MOVES`. Transfers 11 and 12 read the two
    // allocations, and transfers 13 and 14 write to them.
    let fails = |fault, words| only_fails(fault, &[TWO], words);
    let from = "from the GPU: in the destination memory: 1 of 131072 bytes differ";
    fails(Fault::Corrupts(11), from);
    fails(
        Fault::Status(12),
        "from the GPU: the repeated transfer ended with",
    );
    fails(
        Fault::Spills(13),
        "to the GPU: in the destination memory: 1 of",
    );
    fails(Fault::NoConnection(14), "to the GPU: queue pair to RTR");
    let both = [PEER, DMA].map(|way| (way, Name::TwoAllocations));
    for (fault, side) in [
        (Fault::HalfRead, "from the GPU"),
        (Fault::HalfWritten, "to the GPU"),
    ] {
        let steps = only_fails(fault, &both, side);
        assert!(said(&steps, TWO).ends_with("the first at 0x10000"));
    }
}

#[test]
fn a_refused_range_over_two_allocations_fails_the_step() {
    let steps = only_fails(Fault::TwoRefused, &[TWO], "the module: too_many_chunks");
    let step = steps.iter().find(|step| step.outcome == Outcome::Failed);
    assert_eq!(step.and_then(|step| step.errno), Some(14));
    let none = [EXPORTS[1], TWO, (DMA, Name::TwoAllocations)];
    for (fault, left_out) in [(Fault::OneAtMost, &none[1..2]), (Fault::NoMapping, &none)] {
        let steps = only_fails(fault, &[], "");
        assert_eq!(outcomes(&steps, Outcome::NotPossibleHere), left_out);
    }
    let plan = Plan {
        size: GRANULE as usize,
        ..plan()
    };
    let steps = steps_on(&mut Fake::with(&[]), &plan);
    assert_eq!(outcomes(&steps, Outcome::NotPossibleHere), none);
    assert!(said(&steps, TWO).contains("a larger --size"));
}

#[test]
fn freed_memory_is_held_or_out_of_reach() {
    let free = [FREE, (DMA, Name::FreeWhileRegistered)];
    only_fails(
        Fault::NotHeld,
        &free,
        "which now belongs to another allocation",
    );
    only_fails(Fault::Cleared, &free, "which now has other bytes");
    let steps = only_fails(Fault::Revokes, &[], "");
    assert_eq!(
        said(&steps, FREE),
        "revoked: a READ ends with RemoteAccessError"
    );
}

#[test]
fn leftovers_of_a_killed_process_fail_the_step() {
    let both = [KILLED, (DMA, Name::KilledHolder)];
    only_fails(Fault::NoHolder, &both, "moved no bytes");
    let words = "after the kill: registrations of process 4711 in the module's list: 2";
    only_fails(Fault::StaysListed, &[KILLED], words);
    only_fails(
        Fault::NeverListed,
        &[KILLED],
        "listed no registration of process 4711",
    );
    let steps = steps_with(&[Fault::StaysPinned]);
    let failed = outcomes(&steps, Outcome::Failed);
    assert!(failed.contains(&KILLED), "{failed:?}");
    assert_eq!(
        said(&steps, KILLED),
        "after the kill: 132072 bytes of BAR1 are pinned, 1000 were before"
    );
}

#[test]
fn invisible_records_are_reported_and_fail_no_step() {
    let mut fake = Fake::with(&[]);
    fake.visible = false;
    let steps = steps_on(&mut fake, &plan());
    assert!(outcomes(&steps, Outcome::Failed).is_empty());
    assert_eq!(
        said(&steps, KILLED),
        "killed while bytes moved; the module's list is not visible without root"
    );
    assert_eq!(
        said(&steps, (DMA, Name::KilledHolder)),
        "killed while bytes moved"
    );
}

/// Runs the steps between two hosts.
fn steps_between(faults: &[Fault]) -> Vec<Step> {
    let plan = Plan {
        scope: Scope::TwoHosts,
        ..plan()
    };
    steps_on(&mut Fake::with(faults), &plan)
}

/// Returns the transfers between two hosts. If `with_host` is set, the result includes transfers
/// between host memory and host memory.
fn between(with_host: bool) -> impl Iterator<Item = Name> {
    let all = BETWEEN_HOSTS.into_iter();
    all.filter(move |(_, _, kinds)| with_host || *kinds != [Kind::Host; 2])
        .map(|(name, ..)| name)
}

#[test]
fn all_steps_between_two_hosts_run_in_order() {
    let steps = steps_between(&[]);
    let mut expected: Vec<(Option<Way>, Name)> = [
        Name::Allocate,
        Name::Copies,
        Name::AllocateOnServer,
        Name::CopiesOnServer,
        Name::HostMemory,
        Name::WriteClientHostToServerHost,
        Name::ReadServerHostToClientHost,
    ]
    .map(|name| (None, name))
    .into();
    for way in [PEER, DMA] {
        expected.extend([(way, Name::Register), (way, Name::RegisterOnServer)]);
        expected.extend(between(false).map(|name| (way, name)));
        expected.push((way, Name::Deregister));
    }
    expected.push(ANY_WAY);
    assert_eq!(outcomes(&steps, Outcome::Passed), expected);
    assert_eq!(steps.len(), expected.len());
    assert_eq!(
        said(&steps, ANY_WAY),
        "client: ibv_reg_mr, ibv_reg_dmabuf_mr; server: ibv_reg_mr, ibv_reg_dmabuf_mr"
    );
}

#[test]
fn every_byte_between_two_hosts_counts() {
    let ways = [None, PEER, DMA];
    let names = [vec![], between(false).collect(), between(false).collect()];
    let host = between(true).take(2).map(|name| (None, name));
    let others = ways.into_iter().zip(names);
    let others = others.flat_map(|(way, names)| names.into_iter().map(move |name| (way, name)));
    for (index, transfer) in host.chain(others).enumerate() {
        for number in [2 * index + 1, 2 * index + 2] {
            let steps = steps_between(&[Fault::Corrupts(number)]);
            assert_eq!(outcomes(&steps, Outcome::Failed), [transfer], "{number}");
        }
    }
}

#[test]
fn a_failing_network_is_not_a_failing_gpu() {
    let steps = steps_between(&[Fault::Status(1)]);
    let control = (None, Name::WriteClientHostToServerHost);
    assert_eq!(outcomes(&steps, Outcome::Failed), [control]);
    let left_out = outcomes(&steps, Outcome::NotPossibleHere);
    assert_eq!(left_out.len(), 2 * (between(false).count() + 3) + 1);
    for step in left_out {
        let why = said(&steps, step);
        let is_known = why.contains("the network fails") || why == NOT_REGISTERED;
        assert!(is_known, "{step:?}: {why}");
    }
}

#[test]
fn one_host_may_have_no_gpu() {
    let steps = steps_between(&[Fault::NoServerGpu]);
    assert!(outcomes(&steps, Outcome::Failed).is_empty());
    let allocate = (None, Name::AllocateOnServer);
    assert_eq!(said(&steps, allocate), "--gpu none");
    assert!(outcomes(&steps, Outcome::Passed).contains(&(PEER, Name::ReadServerHostToClientGpu)));
    assert_eq!(
        said(&steps, ANY_WAY),
        "client: ibv_reg_mr, ibv_reg_dmabuf_mr"
    );
}

#[test]
fn each_host_with_a_gpu_needs_a_way() {
    let steps = steps_between(&[Fault::NoServerModule]);
    assert_eq!(outcomes(&steps, Outcome::Failed), [ANY_WAY]);
    let why = said(&steps, ANY_WAY);
    assert!(why.starts_with("GPU memory of the server"), "{why}");
    assert!(outcomes(&steps, Outcome::Passed).contains(&(DMA, Name::WriteClientGpuToServerHost)));

    let steps = steps_between(&[Fault::NoServerGpu, Fault::NoDmaBuf, Fault::NoModule]);
    assert_eq!(outcomes(&steps, Outcome::Failed), [ANY_WAY]);
    let steps = steps_between(&[Fault::NoServerGpu, Fault::NoGpuMemory]);
    let allocate = (None, Name::Allocate);
    assert_eq!(outcomes(&steps, Outcome::Failed), [allocate, ANY_WAY]);
}

#[test]
fn a_rate_is_reported_with_that_of_the_slowest_link() {
    let links = |gpu, nic| Links { gpu, nic };
    let bound = |scope, way, name| {
        let links = [links(Some(5), Some(9)), links(Some(3), None)];
        let plan = Plan {
            scope,
            links,
            ..plan()
        };
        let steps = steps_on(&mut Fake::with(&[]), &plan);
        let mut steps = steps.iter();
        let step = steps.find(|step| (step.way, step.step) == (way, name))?;
        step.figures.link_bytes_per_second
    };
    for (way, name, most) in [
        (None, Name::WriteClientHostToServerHost, 9),
        (PEER, Name::WriteClientGpuToServerHost, 5),
        (PEER, Name::WriteClientHostToServerGpu, 3),
    ] {
        assert_eq!(bound(Scope::TwoHosts, way, name), Some(most));
    }
    assert_eq!(bound(Scope::OneHost, PEER, Name::SendToGpu), Some(5));
}

#[test]
fn medians_and_speeds() {
    let times = |values: &[u64]| values.iter().copied().map(Duration::from_micros).collect();
    assert_eq!(median(times(&[9, 1, 5])), Some(Duration::from_micros(5)));
    assert_eq!(median(times(&[4, 1, 2, 3])), Some(Duration::from_micros(2)));
    assert_eq!(median(Vec::new()), None);
    assert_eq!(speed(1 << 30, Duration::from_secs(2)), Some(1 << 29));
    assert_eq!(speed(1, Duration::ZERO), None);
}
