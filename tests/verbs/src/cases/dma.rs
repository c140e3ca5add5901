// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Real DMA: an NVMe controller moves bytes from GPU memory to its disk and back to other GPU
//! memory. The controller uses the DMA addresses of a registration. If the IOMMU translates, the
//! accesses must fail after the deregistration.
//!
//! No IOMMU checks rxe's transfers, because rxe copies bytes with the CPU. Only these cases test
//! the mappings with a device.
//!
//! QEMU's controller reports success even if the IOMMU refuses an access. The cases therefore check
//! the bytes through the BAR, and the kernel log.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use anyhow::{ensure, Context, Result};

use super::register::{peer_region, ENTRY_BOUNDARY};
use crate::counters::{Activity, Counters};
use crate::dma::{Access, Faults, Guard, Mapped, Page, Segment, Trace};
use crate::gpu::{Allocation, BarView, GRANULE, PAGE};
use crate::knobs::Parameter;
use crate::ktap::{cases, note, Case};
use crate::lab::{Lab, Peermem, PinMode, M2};
use crate::nvme::{Nvme, Op, BLOCK};
use crate::pattern::{difference, Choice, Pattern};
use crate::rdma::{Hca, Region};
use crate::sys::{Mapping, Placement};
use crate::{ktap, module, nvme, rdma};

/// Number of bytes that the controller reads or writes in the cases about faults: one page of the
/// IOMMU.
const SMALL: usize = 4096;

pub(super) const CASES: &[Case] = cases![
    "dma.gpu_to_disk_to_gpu" => |lab| each_mode(lab, gpu_to_gpu),
    "dma.unaligned" => |lab| each_mode(lab, unaligned),
    "dma.layouts" => |lab| each_mode(lab, layouts),
    "dma.many_regions" => |lab| each_mode(lab, many),
    "dma.faults_after_deregistration" => |lab| each_mode(lab, after_deregistration),
    "dma.other_region_stays" => |lab| each_mode(lab, other_stays),
    "dma.faults_after_free" => |lab| one_mode(lab, PinMode::Revocable, after_free),
    "dma.goes_on_after_free" => |lab| one_mode(lab, PinMode::Persistent, goes_on),
    "dma.fragmented" => |lab| each_mode(lab, |bench| in_one_range(bench, |_, _, _| Ok(()))),
    "dma.nothing_beside" => |lab| each_mode(lab, |bench| in_one_range(bench, nothing_beside)),
    "dma.bit_31" => |lab| each_mode(lab, bit_31),
    "dma.lazy_window" => |lab| each_mode(lab, window),
    "dma.provider_maps" => provider_maps,
];

/// A controller whose memory is registered in one mode, and readers of the IOMMU's mappings and
/// faults.
struct Bench<'a> {
    lab: &'a Lab,
    mode: PinMode,
    // This field is dropped first, because the controller must stop before its memory is freed.
    controller: Nvme,
    faults: Faults,
    trace: Trace,
    guard: Guard,
    next_block: u64,
    _device: Parameter,
    _mode: Parameter,
}

/// Selects `mode` in the loaded module. Returns `None` if the module does not support `mode`.
fn choose(lab: &Lab, mode: PinMode) -> Result<Option<Parameter>> {
    let revocable = if mode == PinMode::Revocable { "Y" } else { "N" };
    let parameter = Parameter::set("rdma_rxe", "peer_inval", revocable)?;
    Ok((lab.setup.mode() == mode).then_some(parameter))
}

/// Runs `body` in both modes. If the module supports only one mode, the case runs in this mode and
/// then counts as skipped.
fn each_mode(lab: &Lab, body: fn(&mut Bench<'_>) -> Result<()>) -> Result<()> {
    let bdf = needs_controller(lab)?;
    let mut missing = None;
    for mode in [PinMode::Persistent, PinMode::Revocable] {
        match choose(lab, mode)? {
            Some(chosen) => run(lab, &bdf, mode, chosen, body)?,
            None => missing = Some(mode),
        }
    }
    missing.map_or(Ok(()), no_registrations)
}

fn no_registrations(mode: PinMode) -> Result<()> {
    ktap::skip(format_args!("the module gives no {mode} registrations"))
}

fn one_mode(lab: &Lab, mode: PinMode, body: fn(&mut Bench<'_>) -> Result<()>) -> Result<()> {
    let bdf = needs_controller(lab)?;
    match choose(lab, mode)? {
        Some(chosen) => run(lab, &bdf, mode, chosen, body),
        None => no_registrations(mode),
    }
}

/// Tests persistent mode with `provider_maps=1`. nvidia.ko then maps page by page, and the module
/// uses nvidia.ko's DMA addresses.
fn provider_maps(lab: &Lab) -> Result<()> {
    needs_controller(lab)?;
    lab.needs_ours()?;
    module::loaded_with_also(module::PROVIDER_MAPS, || {
        one_mode(lab, PinMode::Persistent, |bench| {
            let before = Counters::read()?;
            for body in [gpu_to_gpu, unaligned, layouts] {
                body(bench)?;
            }
            if bench.guard != Guard::Lazy {
                after_deregistration(bench)?;
            }
            let Activity { pins, maps, .. } = Counters::read()?.activity(&before)?;
            note("mapped_by_nvidia_ko", maps);
            ensure!(maps == pins && maps > 0, "{pins} pins, {maps} mapped");
            Ok(())
        })
    })
}

fn needs_controller(lab: &Lab) -> Result<String> {
    lab.needs_module()?;
    match nvme::find()? {
        Some(bdf) => Ok(bdf),
        None => ktap::skip("needs an NVMe controller"),
    }
}

fn run(
    lab: &Lab,
    bdf: &str,
    mode: PinMode,
    chosen: Parameter,
    body: fn(&mut Bench<'_>) -> Result<()>,
) -> Result<()> {
    let mut bench = Bench::open(lab, bdf, mode, chosen)?;
    body(&mut bench).with_context(|| mode.to_string())?;
    bench.faults.none().with_context(|| mode.to_string())
}

impl<'a> Bench<'a> {
    fn open(lab: &'a Lab, bdf: &str, mode: PinMode, chosen: Parameter) -> Result<Self> {
        nvme::take_from_kernel(bdf)?;
        let guard = Guard::of(bdf)?;
        let device = Parameter::set("rdma_rxe", "peer_dma_dev", bdf)?;
        let faults = Faults::of(bdf)?;
        let trace = Trace::of(bdf, guard)?;
        // The controller's memory is on the last GPU, and no case frees this memory.
        let gpu = lab.gpu(lab.gpus().len().saturating_sub(1))?;
        let memory = gpu.allocate(nvme::MEMORY, Placement::Any)?;
        let controller = Nvme::start(bdf, &trace, &lab.near, memory)?;
        Ok(Self {
            lab,
            mode,
            controller,
            faults,
            trace,
            guard,
            next_block: 0,
            _device: device,
            _mode: chosen,
        })
    }

    fn note(&self, name: &str, value: impl std::fmt::Display) {
        note(&format!("{name}_{}", self.mode), value);
    }

    fn pattern(&self, id: u64) -> Pattern {
        let mode = u64::from(self.mode == PinMode::Revocable);
        Pattern::new(self.lab.setup.seed, 2 * id + mode)
    }

    fn allocate(&self, gpu: usize, len: usize) -> Result<Allocation> {
        self.lab.gpu(gpu)?.allocate(len, Placement::Any)
    }

    /// Makes two allocations, and writes `bytes[i]` into allocation `i`. The allocations are on two
    /// GPUs if there are two.
    fn allocate_pair(&self, bytes: [&[u8]; 2]) -> Result<[Allocation; 2]> {
        let memories = [
            self.allocate(0, bytes[0].len())?,
            self.allocate(1, bytes[1].len())?,
        ];
        for (memory, bytes) in memories.iter().zip(bytes) {
            memory.write(0, bytes)?;
        }
        Ok(memories)
    }

    /// Registers the first 2 MiB of `memory`, and makes the controller write a page of the region.
    /// Returns the region, a view of the memory through the BAR, and the page's DMA address and
    /// offset in the view.
    fn reached(&mut self, memory: &Allocation) -> Result<(Mapped, BarView, u64, usize)> {
        let region = self.register(memory, 0, M2)?;
        let view = memory.bar_view()?;
        let (dma, at) = probe(&region)?;
        self.writes(dma, &view, at)?;
        self.faults.none()?;
        Ok((region, view, dma, at))
    }

    fn register(&self, memory: &Allocation, offset: usize, len: usize) -> Result<Mapped> {
        let mapped = self.trace.register(&self.lab.near, memory, offset, len)?;
        for page in &mapped.pages {
            // A DMA address that equals the physical address would reach the memory without a
            // mapping.
            ensure!(
                (page.dma == page.phys) != self.guard.translates(),
                "{page:x?} does not fit the kind of IOMMU, {:?}",
                self.guard
            );
        }
        Ok(mapped)
    }

    /// Deregisters the region and checks that all of it is unmapped.
    fn deregister(&self, mapped: Mapped) -> Result<()> {
        let Mapped { region, pages, .. } = mapped;
        self.trace.unmapping(&pages, || {
            drop(region);
            Ok(())
        })
    }

    /// Skips the case if the IOMMU unmaps lazily. The case needs an IOMMU that refuses an address
    /// as soon as the address is unmapped.
    fn needs_strictness(&self) -> Result<()> {
        if self.guard == Guard::Lazy {
            return ktap::skip("unmapped lazily: see dma.lazy_window");
        }
        Ok(())
    }

    /// Returns the number of entries in ib_core's scatter list. Our module makes one entry for each
    /// run of DMA addresses. NVIDIA's nvidia-peermem makes one entry for each page.
    fn entries(&self, region: &Mapped) -> Result<u64> {
        let entries = peer_region(&self.lab.near, &region.region)?.entries;
        let expected = match self.lab.setup.peermem {
            Peermem::Nvidia => region.pages.len(),
            _ => region.stretches(ENTRY_BOUNDARY),
        };
        ensure!(entries == expected as u64);
        Ok(entries)
    }

    /// Returns the first block of a range on the disk that has room for `len` bytes and that no
    /// transfer has used yet. When the disk is full, starts over at block 0.
    fn blocks(&mut self, len: u64) -> u64 {
        const DISK: u64 = 64 << 20;
        let blocks = len.div_ceil(BLOCK);
        if (self.next_block + blocks) * BLOCK > DISK {
            self.next_block = 0;
        }
        let first = self.next_block;
        self.next_block += blocks;
        first
    }

    /// Moves bytes of a region to the disk or back, with as many commands as needed.
    fn transfer(
        &mut self,
        op: Op,
        block: u64,
        region: &Mapped,
        offset: u64,
        len: u64,
    ) -> Result<()> {
        let mut done = 0;
        while done < len {
            let now = (len - done).min(self.controller.longest());
            let segments = region.segments(offset + done, now)?;
            self.controller
                .transfer(op, block + done / BLOCK, &segments)?
                .success()
                .with_context(|| format!("{op:?} of {now:#x} bytes at {segments:x?}"))?;
            done += now;
        }
        Ok(())
    }

    /// Copies from one region to another through the disk.
    fn copy(&mut self, from: (&Mapped, u64), to: (&Mapped, u64), len: u64) -> Result<()> {
        let block = self.blocks(len);
        self.transfer(Op::Write, block, from.0, from.1, len)?;
        self.transfer(Op::Read, block, to.0, to.1, len)
    }

    /// Makes the controller write a page of a region, and checks the page through the BAR.
    fn writes(&mut self, dma: u64, view: &BarView, at: usize) -> Result<()> {
        let canary = vec![0xa5; SMALL];
        view.write(at, &canary)?;
        self.controller.identify(dma)?.success()?;
        nvme::check_description(&view.bytes(at, SMALL)?)
    }

    /// Checks that a write to this page by the controller causes one fault, and that the bytes
    /// behind the BAR do not change.
    ///
    /// Without a translating IOMMU, only notes that no fault is expected.
    fn cannot_write(&mut self, dma: u64, view: &BarView, at: usize) -> Result<()> {
        if !self.guard.translates() {
            self.note("no_fault_to_be_expected_iommu", self.guard.option());
            return Ok(());
        }
        let canary = self.pattern(90).bytes(dma, SMALL);
        view.write(at, &canary)?;
        self.faults.pace()?;
        let status = self.controller.identify(dma)?;
        self.faults.take(Access::Write, dma)?;
        let found = view.bytes(at, SMALL)?;
        self.note("status_of_refused_write", format_args!("{:#x}", status.0));
        ensure!(
            found == canary,
            "the write was refused, but the bytes changed"
        );
        Ok(())
    }

    /// Checks that a read of this page by the controller causes one fault, and that the bytes do
    /// not reach the disk.
    fn cannot_read(
        &mut self,
        dma: u64,
        view: &BarView,
        at: usize,
        elsewhere: (&Mapped, &Allocation),
    ) -> Result<()> {
        let secret = self.pattern(91).bytes(dma, SMALL);
        view.write(at, &secret)?;
        let segment = Segment {
            dma,
            len: SMALL as u64,
        };
        let block = self.blocks(segment.len);
        self.faults.pace()?;
        let status = self.controller.transfer(Op::Write, block, &[segment])?;
        self.faults.take(Access::Read, dma)?;
        self.transfer(Op::Read, block, elsewhere.0, 0, segment.len)?;
        let found = elsewhere.1.bytes(0, SMALL)?;
        let same = found.iter().zip(&secret).filter(|(a, b)| a == b).count();
        self.note("status_of_refused_read", format_args!("{:#x}", status.0));
        // By chance, one byte in 256 is equal.
        ensure!(
            same < SMALL / 16,
            "the read was refused, but {same} bytes reached the disk"
        );
        Ok(())
    }
}

/// Compares `expected.len()` bytes from the start of `memory`.
pub(super) fn same(memory: &Mapping, expected: &[u8]) -> Result<()> {
    let found = memory.bytes(0, expected.len())?;
    match difference(expected, &found) {
        None => Ok(()),
        Some(wrong) => anyhow::bail!(
            "{} bytes of {} differ, the first at {:#x}",
            wrong.count,
            expected.len(),
            wrong.first
        ),
    }
}

/// Checks that `bytes` arrive in host memory of another HCA, by a WRITE from the start of `region`.
pub(super) fn arrives(from: &Hca, region: &Region, to: &Hca, bytes: &[u8]) -> Result<()> {
    let len = bytes.len() as u64;
    let host = Mapping::anonymous(bytes.len())?;
    let target = to.reg_mr(host.span(0, bytes.len())?)?;
    rdma::connect(from, to)?.transfer(
        rdma::Op::Write,
        region.part(0, len)?,
        target.part(0, len)?,
    )?;
    same(&host, bytes)
}

/// Checks that the HCA reads the same bytes from the region through the DMA addresses in the
/// scatter list. The controller uses the same addresses.
fn same_by_rdma(bench: &Bench<'_>, mapped: &Mapped, expected: &[u8]) -> Result<()> {
    arrives(&bench.lab.near, &mapped.region, &bench.lab.far, expected)
}

/// Copies from one GPU through the disk to another GPU, in lengths from one block to 4 MiB.
fn gpu_to_gpu(bench: &mut Bench<'_>) -> Result<()> {
    const LEN: usize = 3 * M2;
    let bytes = bench.pattern(1).bytes(0, LEN);
    let mut expected = bench.pattern(2).bytes(0, LEN);
    let [source, target] = bench.allocate_pair([&bytes, &expected])?;
    let from = bench.register(&source, 0, LEN)?;
    let to = bench.register(&target, 0, LEN)?;
    let mut at = 0;
    for (start, len) in [
        (0, 512),
        (65536 - 512, 1024),
        (4096, 4096),
        (12288, 8192),
        (65536, 65536),
        (3 * 65536 - 4, 2 * 65536),
        (1024 * 1024 - 1024, 1024 * 1024),
        (0, 2 * M2),
    ] {
        bench.copy((&from, start as u64), (&to, at as u64), len as u64)?;
        expected[at..at + len].copy_from_slice(&bytes[start..start + len]);
        at += len;
    }
    ensure!(at <= LEN, "the target is too small");
    same(source.mapping(), &bytes)?;
    same(target.mapping(), &expected)?;
    same_by_rdma(bench, &to, &expected)?;
    bench.note("pages", from.pages.len());
    bench.note("mappings", from.maps);
    bench.note("entries", bench.entries(&from)?);
    Ok(())
}

/// Tests regions and transfers with arbitrary bounds.
fn unaligned(bench: &mut Bench<'_>) -> Result<()> {
    let bytes = bench.pattern(3).bytes(0, M2);
    let mut expected = bench.pattern(4).bytes(0, M2);
    let [source, target] = bench.allocate_pair([&bytes, &expected])?;
    let (from_start, to_start) = (4097, 65533);
    let from = bench.register(&source, from_start, 1_000_003)?;
    let to = bench.register(&target, to_start, 1_500_001)?;
    let mut at = 1;
    let mut moved = 0;
    for (start, blocks) in [
        (0, 1),
        (1, 3),
        (61_439 - 511, 2),
        (61_439 - 256, 1),
        (65_535, 129),
        (123_457, 1000),
    ] {
        let len = blocks * 512;
        bench.copy((&from, start), (&to, at), len)?;
        let (a, b) = (from_start + start as usize, to_start + at as usize);
        let len = len as usize;
        expected[b..b + len].copy_from_slice(&bytes[a..a + len]);
        at += len as u64 + 7;
        moved += len;
    }
    same(source.mapping(), &bytes)?;
    same(target.mapping(), &expected)?;
    bench.note("bytes", moved);
    Ok(())
}

/// Tests fragmented memory: single pages, granules, descending order, random order, and one long
/// run between two short runs.
fn layouts(bench: &mut Bench<'_>) -> Result<()> {
    const LEN: usize = 3 * M2;
    let background = bench.pattern(20).bytes(0, LEN);
    for (id, layout) in ["64k", "2m", "descending", "random", "run"]
        .into_iter()
        .enumerate()
    {
        // This seed of the random layout makes every piece shorter than the allocation.
        let seed = Parameter::set("nvidia", "layout_seed", "3")?;
        let chosen = Parameter::set("nvidia", "layout", layout)?;
        let bytes = bench.pattern(10 + id as u64).bytes(0, LEN);
        let [source, target] = bench.allocate_pair([&bytes, &background])?;
        drop((chosen, seed));
        ensure!(
            !source.is_contiguous()?,
            "the memory is contiguous in layout {layout}"
        );
        let from = bench.register(&source, 0, LEN)?;
        let to = bench.register(&target, 0, LEN)?;
        bench
            .copy((&from, 0), (&to, 0), LEN as u64)
            .context(layout)?;
        same(source.mapping(), &bytes).context(layout)?;
        same(target.mapping(), &bytes).context(layout)?;
        same_by_rdma(bench, &to, &bytes).context(layout)?;
        bench.note(&format!("entries_{layout}"), bench.entries(&from)?);
    }
    Ok(())
}

/// Tests many live regions on both GPUs. The controller reads or writes each region.
fn many(bench: &mut Bench<'_>) -> Result<()> {
    const PAIRS: usize = 32;
    const SLOT: usize = 256 << 10;
    const LEN: usize = PAIRS * SLOT;
    let mut expected = [30, 31].map(|id| bench.pattern(id).bytes(0, LEN));
    let memories = bench.allocate_pair([&expected[0], &expected[1]])?;
    let mut choice = Choice::new(bench.lab.setup.seed);
    let mut pairs = Vec::new();
    for slot in 0..PAIRS {
        // The direction of the transfer between the GPUs alternates.
        let from = slot % 2;
        let len = 512 * (1 + choice.below(200) as usize);
        let mut place = || slot * SLOT + choice.below((SLOT - len) as u64) as usize;
        let (a, b) = (place(), place());
        // A slot that is a source on one GPU is a target on the other GPU.
        let source = bench.register(&memories[from], a, len)?;
        let target = bench.register(&memories[1 - from], b, len)?;
        pairs.push((from, a, b, len, source, target));
    }
    for (from, a, b, len, source, target) in &pairs {
        bench.copy((source, 0), (target, 0), *len as u64)?;
        let bytes = expected[*from][*a..a + len].to_vec();
        expected[1 - from][*b..b + len].copy_from_slice(&bytes);
    }
    for (memory, bytes) in memories.iter().zip(&expected) {
        same(memory.mapping(), bytes)?;
    }
    bench.note("regions", 2 * pairs.len());
    Ok(())
}

/// Number of the page that the controller accesses, in the middle of a region.
const PROBED: usize = 5;
/// Offset of the access in the probed page of 64 KiB.
const WITHIN: usize = 2 * SMALL;

fn probe(region: &Mapped) -> Result<(u64, usize)> {
    let page: &Page = region.pages.get(PROBED).context("a short region")?;
    Ok((page.dma + WITHIN as u64, PROBED * PAGE as usize + WITHIN))
}

fn after_deregistration(bench: &mut Bench<'_>) -> Result<()> {
    bench.needs_strictness()?;
    let (memory, other) = (bench.allocate(0, M2)?, bench.allocate(1, M2)?);
    let elsewhere = bench.register(&other, 0, M2)?;
    let (region, view, dma, at) = bench.reached(&memory)?;
    bench.deregister(region)?;
    bench.cannot_write(dma, &view, at)?;
    if !bench.guard.translates() {
        bench.writes(dma, &view, at)?;
        bench.note("bytes_moved_all_the_same", SMALL);
        return Ok(());
    }
    bench.cannot_read(dma, &view, at, (&elsewhere, &other))?;
    bench.note("faults", bench.faults.seen());
    Ok(())
}

/// Checks that two regions over the same memory have separate mappings. After one region ends, the
/// other region must continue to work.
fn other_stays(bench: &mut Bench<'_>) -> Result<()> {
    bench.needs_strictness()?;
    let memory = bench.allocate(0, M2)?;
    let gone = bench.register(&memory, 0, M2)?;
    let view = memory.bar_view()?;
    let stays = bench.register(&memory, 0, M2)?;
    let (old, at) = probe(&gone)?;
    let (new, _) = probe(&stays)?;
    ensure!((old == new) != bench.guard.translates(), "{old:x} {new:x}");
    for dma in [old, new] {
        bench.writes(dma, &view, at)?;
    }
    bench.deregister(gone)?;
    bench.cannot_write(old, &view, at)?;
    bench.writes(new, &view, at)
}

/// Frees memory under a live region. After the free, the controller cannot reach the memory of the
/// next owner.
fn after_free(bench: &mut Bench<'_>) -> Result<()> {
    bench.needs_strictness()?;
    let (mut memory, other) = (bench.allocate(0, M2)?, bench.allocate(1, M2)?);
    let elsewhere = bench.register(&other, 0, M2)?;
    let (probed, view, dma, at) = bench.reached(&memory)?;
    let place = memory.bar_address();
    bench.trace.unmapping(&probed.pages, || memory.free())?;

    // The kernel caches the addresses of the old mapping for the next mapping of the same length,
    // so the new mapping has another length.
    let pin = |next: &Allocation| bench.register(next, 0, M2 / 2);
    let next = bench.lab.gpu(0)?.allocate_there(M2, place, pin)?;
    let (next, own) = next.context("no other allocation got the freed place")?;
    ensure!(
        own.pages
            .iter()
            .all(|page| page.dma != probed.pages[PROBED].dma)
            || !bench.guard.translates(),
        "the new owner's mapping has the old one's address"
    );
    let mut expected = bench.pattern(40).bytes(0, M2);
    next.write(0, &expected)?;
    bench.cannot_write(dma, &view, at)?;
    if bench.guard.translates() {
        bench.cannot_read(dma, &view, at, (&elsewhere, &other))?;
        // `cannot_write` and `cannot_read` have written these bytes through the BAR.
        let secret = bench.pattern(91).bytes(dma, SMALL);
        expected[at..at + SMALL].copy_from_slice(&secret);
        bench.note("faults", bench.faults.seen());
    }
    drop((probed, own));
    same(next.mapping(), &expected).context("the new owner's bytes")
}

/// Frees memory under a live region that is not revoked. The controller continues to use the pages
/// until the deregistration.
fn goes_on(bench: &mut Bench<'_>) -> Result<()> {
    let other = bench.allocate(1, M2)?;
    let elsewhere = bench.register(&other, 0, M2)?;
    let memory = bench.allocate(0, M2)?;
    let bytes = bench.pattern(50).bytes(0, M2);
    memory.write(0, &bytes)?;
    let probed = bench.register(&memory, 0, M2)?;
    let view = memory.bar_view()?;
    let (dma, at) = probe(&probed)?;
    drop(memory);

    bench.copy((&probed, 0), (&elsewhere, 0), M2 as u64)?;
    same(other.mapping(), &bytes)?;
    bench.writes(dma, &view, at)?;
    bench.faults.none()?;
    bench.deregister(probed)?;
    match bench.guard {
        Guard::Lazy => Ok(()),
        _ => bench.cannot_write(dma, &view, at),
    }
}

/// Tests fragmented memory that begins between two multiples of 2 MiB. Behind an IOMMU, our module
/// maps this memory to one range of DMA addresses. For each region, the IOMMU's tables must map
/// nothing else. The controller moves bytes up to the last address of the range.
fn in_one_range(
    bench: &mut Bench<'_>,
    then: fn(&mut Bench<'_>, &Allocation, &Mapped) -> Result<()>,
) -> Result<()> {
    const WHOLE: usize = 2 * M2;
    if bench.lab.setup.peermem == Peermem::Nvidia {
        return ktap::skip("NVIDIA's module does not map a region to one range");
    }
    let skip = PAGE as usize;
    let len = WHOLE - skip;
    let chosen = Parameter::set("nvidia", "layout", "64k")?;
    let bytes = bench.pattern(60).bytes(0, WHOLE);
    let background = [&bytes[..skip], &bench.pattern(61).bytes(0, len)].concat();
    let [source, target] = bench.allocate_pair([&bytes, &background])?;
    drop(chosen);
    let from = bench.register(&source, skip, len)?;
    let to = bench.register(&target, skip, len)?;
    let stretches = from.stretches(ENTRY_BOUNDARY);
    let first = from.pages.first().context("no pages")?;
    let want = match bench.guard.translates() {
        true => 1,
        false => from.pages.len(),
    };
    ensure!(
        stretches == want,
        "{stretches} runs of DMA addresses, not {want}"
    );
    ensure!(
        first.dma % GRANULE == first.va % GRANULE || !bench.guard.translates(),
        "{first:x?}: the HCA cannot use large pages"
    );
    bench.note("runs", stretches);
    bench.copy((&from, 0), (&to, 0), len as u64)?;
    same(source.mapping(), &bytes)?;
    same(target.mapping(), &bytes)?;
    bench.faults.none()?;
    then(bench, &source, &from)?;
    bench.deregister(from)?;
    bench.deregister(to)
}

/// Checks that the controller cannot reach the address after the last one of a region.
fn nothing_beside(bench: &mut Bench<'_>, memory: &Allocation, region: &Mapped) -> Result<()> {
    let last = region.pages.last().context("no pages")?;
    bench.cannot_write(last.dma + PAGE, &memory.bar_view()?, 0)
}

/// Tests a region of more than 4 GiB. Behind an IOMMU, our module leaves a hole of 2 GiB between
/// the region's DMA addresses. Bytes on both sides of the hole must be correct. On the two sides,
/// the distances between DMA addresses and virtual addresses differ in bit 31.
fn bit_31(bench: &mut Bench<'_>) -> Result<()> {
    const GIB: u64 = 1 << 30;
    const LEN: usize = (4 << 30) + M2;
    if bench.lab.setup.peermem == Peermem::Nvidia {
        return ktap::skip("NVIDIA's module does not map a region to one range");
    }
    let (memory, target) = (bench.allocate(0, LEN)?, bench.allocate(1, 2 * M2)?);
    let from = bench.register(&memory, 0, LEN)?;
    let to = bench.register(&target, 0, 2 * M2)?;
    let distances: BTreeSet<u64> = from
        .pages
        .iter()
        .map(|page| page.dma.wrapping_sub(page.va) % (4 * GIB))
        .collect();
    if bench.guard.translates() {
        let found: Vec<u64> = distances.into_iter().collect();
        ensure!(
            matches!(found[..], [low, high] if high - low == 2 * GIB),
            "distances of {found:#x?} modulo 4 GiB: an HCA page may be larger than 2 GiB"
        );
    }
    let first = from.pages.first().context("no pages")?.va;
    let border = (2 * GIB - first % (2 * GIB)) as usize;
    for (id, at) in [(70, border - M2), (72, LEN - 2 * M2)] {
        let bytes = bench.pattern(id).bytes(0, 2 * M2);
        memory.write(at, &bytes)?;
        bench.copy((&from, at as u64), (&to, 0), 2 * M2 as u64)?;
        same(target.mapping(), &bytes)?;
    }
    bench.faults.none()?;
    bench.deregister(from)?;
    bench.deregister(to)
}

/// Measures how long an address stays usable behind a lazy IOMMU. The kernel removes the entry from
/// the IOMMU's tables at once. A recently used translation stays in the IOMMU's cache, which is
/// flushed after 10 ms or when 256 ranges wait. Our module links the memory into one range of DMA
/// addresses. When the unmapping of such a range returns, both the tables and the cache have lost
/// the range.
fn window(bench: &mut Bench<'_>) -> Result<()> {
    const ROUNDS: usize = 2;
    if bench.guard != Guard::Lazy {
        return ktap::skip(format_args!(
            "no lazy IOMMU: --iommu {}",
            bench.guard.option()
        ));
    }
    let mut ends = vec!["deregistration"];
    if bench.mode == PinMode::Revocable {
        ends.push("free");
    }
    for end in ends {
        for _ in 0..ROUNDS {
            let mut memory = bench.allocate(0, M2)?;
            let (region, view, dma, at) = bench.reached(&memory)?;
            bench.faults.pace()?;
            let mut probed = Some(region);
            if end == "free" {
                memory.free()?;
            } else {
                probed = None;
            }
            let begin = Instant::now();
            let (open, uses) = until_refused(bench, begin, dma, &view, at)?;
            bench.faults.take(Access::Write, dma)?;
            drop(probed);
            let by_nvidia = bench.lab.setup.peermem == Peermem::Nvidia;
            ensure!(uses == 0 || by_nvidia, "usable {uses} times after {end}");
            bench.note(
                &format!("window_after_{end}_ms"),
                format_args!("{:.1}", open.as_secs_f64() * 1e3),
            );
            bench.note(&format!("uses_after_{end}"), uses);
        }
    }
    // The IOMMU caches an address only when the device uses it. This address is unused, so the
    // IOMMU must refuse it at once.
    let memory = bench.allocate(0, M2)?;
    let probed = bench.register(&memory, 0, M2)?;
    let view = memory.bar_view()?;
    let (dma, at) = probe(&probed)?;
    drop(probed);
    bench.cannot_write(dma, &view, at)
}

/// Makes the controller write the page until a write is refused. Returns the time from `begin` to
/// the last successful write, and the number of writes.
fn until_refused(
    bench: &mut Bench<'_>,
    begin: Instant,
    dma: u64,
    view: &BarView,
    at: usize,
) -> Result<(Duration, u32)> {
    let canary = [0xa5; 64];
    let mut found = [0; 64];
    let (mut last, mut uses) = (Duration::ZERO, 0);
    loop {
        view.write(at, &canary)?;
        bench.controller.identify(dma)?;
        view.read(at, &mut found)?;
        if found == canary {
            return Ok((last, uses));
        }
        last = begin.elapsed();
        uses += 1;
        ensure!(last < Duration::from_secs(60), "usable {uses} times");
    }
}
