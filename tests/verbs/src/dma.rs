// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! DMA as the kernel reports it: the IOMMU between a device and memory, the DMA addresses of a
//! registration, and the accesses that the IOMMU refused.
//!
//! The peermem module passes a region's DMA addresses to ib_core. No interface shows these
//! addresses, but the kernel's tracepoints show the DMA address of each physical address. If an
//! IOMMU translates, this program uses the tracepoints of the IOMMU's tables, which report every
//! mapping by any function of the DMA API. Otherwise, this program uses the tracepoint of
//! `dma_map_phys()`. The stand-in GPU reports the physical address of each page of an allocation.
//!
//! Transfers through rxe prove that the region's scatter list has exactly these addresses. rxe
//! looks up each DMA address in the IOMMU's tables, and copies bytes at the resulting physical
//! address.

use std::collections::VecDeque;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{bail, ensure, Context, Result};

use crate::gpu::{Allocation, Place, PAGE};
use crate::rdma::{Hca, Region};
use crate::sys;
use crate::sys::KernelLog;

/// Translation between a device and memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Guard {
    /// No IOMMU: DMA addresses are physical.
    None,
    /// An IOMMU that passes all addresses through unchanged.
    Passthrough,
    /// An IOMMU that translates, and invalidates unmapped addresses some time later.
    Lazy,
    /// An IOMMU that translates, and invalidates the addresses before the unmapping returns.
    Strict,
}

impl Guard {
    /// Returns the kind of IOMMU in front of the device at `bdf`. Fails if the device shares its
    /// IOMMU group, or if the test VM was started with another kind of IOMMU.
    pub(crate) fn of(bdf: &str) -> Result<Self> {
        let group = format!("/sys/bus/pci/devices/{bdf}/iommu_group");
        let found = if Path::new(&group).exists() {
            let members = fs::read_dir(format!("{group}/devices"))?.count();
            ensure!(members == 1, "{members} devices in the group of {bdf}");
            match sys::read_line(&format!("{group}/type"))?.as_str() {
                "identity" => Self::Passthrough,
                "DMA-FQ" => Self::Lazy,
                "DMA" => Self::Strict,
                other => bail!("{bdf} has a domain of type {other:?}"),
            }
        } else {
            Self::None
        };
        if let Ok(asked) = std::env::var("TESTVM_IOMMU") {
            ensure!(asked == found.option());
        }
        Ok(found)
    }

    /// Returns the value of the test VM's option `--iommu` for this kind of IOMMU.
    pub(crate) fn option(self) -> &'static str {
        match self {
            Self::None => "off",
            Self::Passthrough => "pt",
            Self::Lazy => "on",
            Self::Strict => "strict",
        }
    }

    pub(crate) fn translates(self) -> bool {
        matches!(self, Self::Lazy | Self::Strict)
    }
}

/// A mapping, or an unmapping. An unmapping has no physical address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Event {
    phys: Option<u64>,
    dma: u64,
    len: u64,
}

/// A trace of mappings and unmappings for one device.
#[derive(Debug)]
pub(crate) struct Trace {
    directory: PathBuf,
    device: String,
    translates: bool,
}

impl Trace {
    /// Starts a trace. Events of the IOMMU's tables do not name the device, so nothing may be
    /// mapped for another device meanwhile.
    pub(crate) fn of(device: &str, guard: Guard) -> Result<Self> {
        let directory = PathBuf::from(format!(
            "/sys/kernel/tracing/instances/gdr-{}",
            std::process::id()
        ));
        fs::create_dir(&directory).with_context(|| directory.display().to_string())?;
        // Once `trace` exists, an early return removes the directory.
        let trace = Self {
            directory,
            device: device.to_owned(),
            translates: guard.translates(),
        };
        // The global clock gives one order of events on all processors.
        trace.set("trace_clock", "global")?;
        for event in ["dma_map_phys", "dma_unmap_phys"] {
            let filter = format!("device == \"{device}\"");
            trace.set(&format!("events/dma/{event}/filter"), &filter)?;
            trace.set(&format!("events/dma/{event}/enable"), "1")?;
        }
        for event in ["map", "unmap"].into_iter().filter(|_| trace.translates) {
            trace.set(&format!("events/iommu/{event}/enable"), "1")?;
        }
        Ok(trace)
    }

    fn set(&self, file: &str, value: &str) -> Result<()> {
        let path = self.directory.join(file);
        fs::write(&path, value).with_context(|| format!("{}: {value}", path.display()))
    }

    fn during<T>(&self, body: impl FnOnce() -> Result<T>) -> Result<(T, Vec<Event>)> {
        self.set("trace", "")?;
        let value = body()?;
        let text = fs::read_to_string(self.directory.join("trace"))?;
        Ok((value, parse_trace(&text, &self.device, self.translates)?))
    }

    /// Registers a part of `memory` for the traced device, and returns the addresses of its pages.
    pub(crate) fn register(
        &self,
        hca: &Hca,
        memory: &Allocation,
        offset: usize,
        len: usize,
    ) -> Result<Mapped> {
        let span = memory.span(offset, len)?;
        let (region, events) = self.during(|| Ok(hca.reg_mr(span)?))?;
        let mut maps: Vec<(u64, Event)> = Vec::new();
        for event in events {
            if let Some(phys) = event.phys {
                maps.push((phys, event));
                continue;
            }
            // The first registration for a GPU and an HCA makes nvidia.ko map one page, to check
            // that the HCA reaches the GPU.
            let page = maps.pop().filter(|_| maps.is_empty());
            let page = page.map(|(_, page)| (page.dma, page.len));
            let unmapped = Some((event.dma, event.len));
            let is_one = page == unmapped && event.len == PAGE;
            ensure!(is_one, "a registration unmapped {event:x?}");
        }
        let base = memory.mapping().addr();
        let first = span.addr() / PAGE * PAGE;
        let end = (span.addr() + span.len()).next_multiple_of(PAGE);
        let mut pages = Vec::new();
        // The stand-in reports a page's place together with the length of the contiguous run behind
        // it. Finding the length takes a walk over the run, so this loop asks only once for each
        // run.
        let mut known: Option<(u64, Place)> = None;
        for page in (first..end).step_by(usize::try_from(PAGE)?) {
            let (from, place) = match known {
                Some((from, place)) if page - from < place.run => (from, place),
                _ => (page, memory.place(usize::try_from(page - base)?)?),
            };
            known = Some((from, place));
            let phys = place.bar_address + (page - from);
            let has = |(at, map): &&(u64, Event)| *at <= phys && phys + PAGE <= at + map.len;
            let (at, map) = maps.iter().find(has).with_context(|| {
                format!("nothing was mapped for the page at {phys:#x}: {maps:x?}")
            })?;
            let dma = map.dma + (phys - at);
            pages.push(Page {
                va: page,
                phys,
                dma,
            });
        }
        let mapped: u64 = maps.iter().map(|(_, map)| map.len).sum();
        // Without translation, a larger mapping gives the device no additional access.
        ensure!(
            mapped == end - first || !self.translates,
            "{mapped:#x} mapped"
        );
        Ok(Mapped {
            region,
            pages,
            maps: maps.len(),
        })
    }

    /// Runs `body`, which must unmap each page of a region once. If an IOMMU translates, `body`
    /// must unmap nothing else.
    pub(crate) fn unmapping<T>(
        &self,
        pages: &[Page],
        body: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let (value, events) = self.during(body)?;
        let mut left: Vec<u64> = pages.iter().map(|page| page.dma).collect();
        for unmap in events {
            ensure!(unmap.phys.is_none(), "something was mapped: {unmap:x?}");
            let before = left.len();
            left.retain(|dma| *dma < unmap.dma || *dma >= unmap.dma + unmap.len);
            let gone = (before - left.len()) as u64;
            ensure!(
                gone * PAGE == unmap.len || (!self.translates && gone > 0),
                "{unmap:x?} does not belong to this region, or came twice"
            );
        }
        ensure!(left.is_empty(), "not unmapped: {left:x?}");
        Ok(value)
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir(&self.directory) {
            eprintln!("{}: {error}", self.directory.display());
        }
    }
}

fn parse_trace(text: &str, device: &str, translates: bool) -> Result<Vec<Event>> {
    let mut events = Vec::new();
    for line in text.lines() {
        if let Some(counts) = line.strip_prefix("# entries-in-buffer/entries-written: ") {
            let (kept, written) = counts
                .split_whitespace()
                .next()
                .and_then(|counts| counts.split_once('/'))
                .context("no counts")?;
            ensure!(kept == written, "the trace lost events: {counts}");
        }
        let Some((kind, rest)) = ["dma_map_phys", "dma_unmap_phys", "map", "unmap"]
            .into_iter()
            .find_map(|kind| Some((kind, line.split_once(&format!(": {kind}: "))?.1)))
        else {
            continue;
        };
        let field = |name: &str| {
            rest.split_whitespace()
                .filter_map(|word| word.split_once('='))
                .find(|(key, _)| *key == name)
                .map(|(_, value)| value)
                .with_context(|| format!("no {name} in {line:?}"))
        };
        let hex = |name| {
            let value: &str = field(name)?;
            let digits = value.strip_prefix("0x").unwrap_or(value);
            Ok::<_, anyhow::Error>(u64::from_str_radix(digits, 16)?)
        };
        let of_tables = matches!(kind, "map" | "unmap");
        if !of_tables {
            ensure!(rest.starts_with(device), "event of another device: {line}");
            // A mapping without this flag is host memory, which only a driver of the device would
            // map. This program expects no such driver.
            if !field("attrs")?.split('|').any(|flag| flag == "MMIO") {
                bail!("host memory was mapped for the device: {line}");
            }
        }
        if of_tables != translates {
            continue;
        }
        let len = field("size")?.parse()?;
        let (phys, dma) = match kind {
            "dma_map_phys" => (Some(hex("phys_addr")?), hex("dma_addr")?),
            "map" => (Some(hex("paddr")?), hex("iova")?),
            "dma_unmap_phys" => (None, hex("dma_addr")?),
            _ => {
                let unmapped: u64 = field("unmapped_size")?.parse()?;
                ensure!(unmapped == len, "not all was unmapped: {line}");
                (None, hex("iova")?)
            }
        };
        events.push(Event { phys, dma, len });
    }
    Ok(events)
}

/// The virtual, physical and DMA address of a page of a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Page {
    pub(crate) va: u64,
    pub(crate) phys: u64,
    pub(crate) dma: u64,
}

/// A range of consecutive DMA addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Segment {
    pub(crate) dma: u64,
    pub(crate) len: u64,
}

/// A registered region, and the addresses of its pages.
#[derive(Debug)]
pub(crate) struct Mapped {
    pub(crate) region: Region,
    pub(crate) pages: Vec<Page>,
    /// Number of mappings for the region.
    pub(crate) maps: usize,
}

impl Mapped {
    /// Returns the DMA addresses of `[offset, offset + len)` of the region. Consecutive addresses
    /// are joined into one segment.
    pub(crate) fn segments(&self, offset: u64, len: u64) -> Result<Vec<Segment>> {
        segments(&self.pages, self.region.addr() + offset, len)
    }

    /// Returns the number of runs of consecutive DMA addresses in the region. A run also ends where
    /// a virtual address is a multiple of `boundary`.
    pub(crate) fn stretches(&self, boundary: u64) -> usize {
        let joins =
            |pair: &&[Page]| pair[0].dma + PAGE == pair[1].dma && pair[1].va % boundary != 0;
        self.pages.len() - self.pages.windows(2).filter(joins).count()
    }
}

fn segments(pages: &[Page], start: u64, len: u64) -> Result<Vec<Segment>> {
    let mut found: Vec<Segment> = Vec::new();
    let (mut at, end) = (start, start + len);
    while at < end {
        let page = pages
            .iter()
            .find(|page| (page.va..page.va + PAGE).contains(&at))
            .with_context(|| format!("{at:#x} is not in the region"))?;
        let skip = at - page.va;
        let (dma, len) = (page.dma + skip, (PAGE - skip).min(end - at));
        match found.last_mut() {
            Some(last) if last.dma + last.len == dma => last.len += len,
            _ => found.push(Segment { dma, len }),
        }
        at += len;
    }
    Ok(found)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    Read,
    Write,
}

/// An access that the IOMMU refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Fault {
    pub(crate) access: Access,
    pub(crate) device: String,
    /// DMA address of the 4 KiB page.
    pub(crate) addr: u64,
}

/// Number of refused accesses that the kernel's rate limit lets the kernel report in a period of
/// five seconds. A wait of [`INTERVAL`] always outlasts the period. The kernel measures the period
/// in [`sys::jiffies`].
///
/// For Intel's IOMMU, the limit is ten messages. A fault uses up three messages, because the
/// kernel's check for a further fault also counts as a message. For an SMMU, the limit is ten
/// events. QEMU's SMMU has one event for each word that the device reads or writes.
const BURST: usize = if cfg!(target_arch = "aarch64") { 1 } else { 3 };
const INTERVAL: Duration = Duration::from_millis(5500);

/// Times of the latest reports of refused accesses.
static REPORTED: Mutex<VecDeque<Duration>> = Mutex::new(VecDeque::new());

/// A reader of the refused accesses that the kernel logs after [`Faults::of`].
#[derive(Debug)]
pub(crate) struct Faults {
    log: KernelLog,
    device: String,
    reader: Reader,
    seen: usize,
    /// Number of further reports of the same accesses.
    rest: usize,
}

impl Faults {
    pub(crate) fn of(device: &str) -> Result<Self> {
        Ok(Self {
            log: KernelLog::from_now()?,
            device: device.to_owned(),
            reader: Reader::default(),
            seen: 0,
            rest: 0,
        })
    }

    /// Returns the refused accesses that the kernel has logged since the last call of this
    /// function.
    fn new_ones(&mut self) -> Result<Vec<Fault>> {
        let mut found = Vec::new();
        for message in self.log.lines()? {
            match self.reader.next(&message)? {
                None => {}
                Some(Found::Access(fault)) => found.push(fault),
                Some(Found::Rest) => {
                    self.rest += 1;
                    if let Some(latest) = reported().back_mut() {
                        *latest = sys::jiffies()?;
                    }
                }
            }
        }
        self.seen += found.len();
        Ok(found)
    }

    /// Fails if there is a fault that [`Self::take`] has not taken.
    pub(crate) fn none(&mut self) -> Result<()> {
        let found = self.new_ones()?;
        ensure!(found.is_empty(), "refused by the IOMMU: {found:x?}");
        Ok(())
    }

    /// Waits until the kernel's rate limit permits the report of another fault.
    pub(crate) fn pace(&mut self) -> Result<()> {
        loop {
            self.none()?;
            let reported = reported();
            let oldest = reported.front().filter(|_| reported.len() == BURST);
            let due = oldest.map_or(Duration::ZERO, |oldest| *oldest + INTERVAL);
            drop(reported);
            let Some(left) = due.checked_sub(sys::jiffies()?) else {
                break;
            };
            std::thread::sleep(left.clamp(Duration::from_millis(10), Duration::from_millis(500)));
        }
        self.reader.last = None;
        Ok(())
    }

    /// Waits for the fault of an access to the page at `addr`, which must be the only new fault.
    /// Call [`Self::pace`] before the access.
    pub(crate) fn take(&mut self, access: Access, addr: u64) -> Result<()> {
        let mut found = Vec::new();
        let came = sys::wait_until(Duration::from_secs(60), || {
            found.extend(self.new_ones()?);
            Ok(!found.is_empty())
        })?;
        // A later reader of the log must not begin in the middle of an SMMU's report.
        let mut before = None;
        while self.reader.last.is_some() && before != Some(self.rest) {
            before = Some(self.rest);
            std::thread::sleep(Duration::from_millis(500));
            found.extend(self.new_ones()?);
        }
        let mut reported = reported();
        reported.push_back(sys::jiffies()?);
        ensure!(
            came,
            "the kernel reported no fault for a {access:?} of {addr:#x} by {}; times of the last reports and now, in jiffies: {reported:.3?}",
            self.device
        );
        while reported.len() > BURST {
            reported.pop_front();
        }
        drop(reported);
        let device = self.device.clone();
        let expected = Fault {
            access,
            device,
            addr,
        };
        ensure!(found == [expected.clone()], "{found:x?}, not {expected:x?}");
        Ok(())
    }

    pub(crate) fn seen(&self) -> usize {
        self.seen
    }
}

/// Meaning of a message about refused accesses.
#[derive(Debug, PartialEq, Eq)]
enum Found {
    /// The first report of an access.
    Access(Fault),
    /// A further report of the previous access.
    Rest,
}

/// A parser of consecutive messages, because an SMMU's report has several messages.
#[derive(Debug, Default)]
struct Reader {
    /// Words of the event in an SMMU's report that is not complete yet.
    words: Vec<u64>,
    /// The latest fault that an SMMU reported, and its exact address.
    last: Option<(Fault, u64)>,
}

impl Reader {
    fn next(&mut self, message: &str) -> Result<Option<Found>> {
        let unknown = || format!("a fault of unknown form: {message}");
        if let Some(rest) = message.strip_prefix("DMAR: [DMA ") {
            let fault = parse_dmar(rest).with_context(unknown)?;
            return Ok(Some(Found::Access(fault)));
        }
        let smmu = message.strip_prefix("arm-smmu-v3 ");
        let Some((_, text)) = smmu.and_then(|rest| rest.split_once(": ")) else {
            return Ok(None);
        };
        if text.starts_with("event 0x") {
            self.words.clear();
        } else if let Some(word) = text.strip_prefix("\\x090x") {
            self.words
                .push(u64::from_str_radix(word, 16).with_context(unknown)?);
        } else if let Some(event) = text.strip_prefix("event: ") {
            let (fault, addr) = parse_event(event, &self.words).with_context(unknown)?;
            let goes_on = |(last, end): &(Fault, u64)| *last == fault && *end <= addr;
            let is_rest = self.last.as_ref().is_some_and(goes_on);
            self.last = Some((fault.clone(), addr));
            let found = Found::Access(fault);
            return Ok(Some(if is_rest { Found::Rest } else { found }));
        }
        Ok(None)
    }
}

/// Parses `Write NO_PASID] Request device [0000:00:06.0] fault addr 0xfffff000 …`.
fn parse_dmar(rest: &str) -> Option<Fault> {
    let access = match rest.split_whitespace().next()? {
        "Read" => Access::Read,
        "Write" => Access::Write,
        _ => return None,
    };
    let (_, rest) = rest.split_once("Request device [")?;
    let (device, rest) = rest.split_once(']')?;
    let rest = rest.trim_start().strip_prefix("fault addr 0x")?;
    let addr = u64::from_str_radix(rest.split_whitespace().next()?, 16).ok()?;
    let device = device.to_owned();
    Some(Fault {
        access,
        device,
        addr,
    })
}

/// Parses `F_TRANSLATION client: 0000:00:06.0 sid: 0x30 ssid: 0x0 iova: 0xfffff010 ipa: 0x0`.
/// `words` come from the messages before this message, and contain the direction of the access. The
/// direction is also in the message after this one. The kernel writes that message without a
/// newline, so readers get the message only together with a later one.
fn parse_event(event: &str, words: &[u64]) -> Option<(Fault, u64)> {
    const READ: u64 = 1 << 35;
    let (_, rest) = event.split_once(" client: ")?;
    let (device, rest) = rest.split_once(" sid: ")?;
    let (_, rest) = rest.split_once(" iova: 0x")?;
    let addr = u64::from_str_radix(rest.split_whitespace().next()?, 16).ok()?;
    let is_read = words.get(1)? & READ != 0;
    let access = if is_read { Access::Read } else { Access::Write };
    let (device, page) = (device.to_owned(), addr / 4096 * 4096);
    Some((
        Fault {
            access,
            device,
            addr: page,
        },
        addr,
    ))
}

fn reported() -> MutexGuard<'static, VecDeque<Duration>> {
    REPORTED.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRACE: &str = "\
# tracer: nop
#
# entries-in-buffer/entries-written: 5/5   #P:2
#
             gdr-85      [001] .....     4.0: map: IOMMU: iova=0x00000000ffff0000 - 0x0000000100000000 paddr=0x0000000800000000 size=65536
             gdr-85      [001] .....     4.1: dma_map_phys: 0000:00:06.0 dir=BIDIRECTIONAL dma_addr=ffff0000 size=65536 phys_addr=800000000 attrs=MMIO
             gdr-85      [001] .....     4.2: dma_map_phys: 0000:00:06.0 dir=BIDIRECTIONAL dma_addr=fffe0000 size=65536 phys_addr=800010000 attrs=SKIP_CPU_SYNC|MMIO
             gdr-85      [000] .....     4.3: unmap: IOMMU: iova=0x00000000ffff0000 - 0x0000000100000000 size=65536 unmapped_size=65536
             gdr-85      [000] .....     4.3: dma_unmap_phys: 0000:00:06.0 dir=BIDIRECTIONAL dma_addr=ffff0000 size=65536 attrs=MMIO
";

    #[test]
    fn traces_are_read() {
        let read = |text: &str, translates| parse_trace(text, "0000:00:06.0", translates);
        let events = read(TRACE, false).expect("a trace");
        let event = |phys, dma| {
            let len = 65536;
            Event { phys, dma, len }
        };
        let first = event(Some(0x8_0000_0000), 0xffff_0000);
        let second = event(Some(0x8_0001_0000), 0xfffe_0000);
        let unmap = event(None, 0xffff_0000);
        assert_eq!(events, [first, second, unmap]);
        assert_eq!(read(TRACE, true).expect("a trace"), [first, unmap]);
        assert!(parse_trace(TRACE, "0000:00:07.0", false).is_err());
        for (good, bad) in [
            ("5/5", "5/6"),
            ("=MMIO", "="),
            ("unmapped_size=65536", "unmapped_size=0"),
        ] {
            assert!(read(&TRACE.replace(good, bad), true).is_err(), "{bad}");
        }
    }

    fn read(messages: &str) -> Result<Vec<Found>> {
        let mut reader = Reader::default();
        let mut found = Vec::new();
        for message in messages.lines() {
            found.extend(reader.next(message)?);
        }
        Ok(found)
    }

    fn fault(access: Access, device: &str, addr: u64) -> Found {
        let device = device.to_owned();
        Found::Access(Fault {
            access,
            device,
            addr,
        })
    }

    #[test]
    fn faults_are_read() {
        let line =
            "DMAR: [DMA Write NO_PASID] Request device [0000:00:06.0] fault addr 0xfffff000 \
                    [fault reason 0x05] PTE Write access is not set\n";
        let write = || fault(Access::Write, "0000:00:06.0", 0xffff_f000);
        assert_eq!(read(line).expect("a fault"), [write()]);
        // Each line about Intel's IOMMU reports one access.
        assert_eq!(
            read(&line.repeat(2)).expect("two faults"),
            [write(), write()]
        );
        assert!(read("DMAR: IOMMU enabled\n").expect("no fault").is_empty());
        assert!(read("DMAR: [DMA Burn] what\n").is_err());
    }

    /// Returns the messages of one event, as in /dev/kmsg.
    fn event(second: u64, addr: u64) -> String {
        let smmu = "arm-smmu-v3 9050000.smmuv3: ";
        let mut text = format!("{smmu}event 0x10 received:\n");
        for word in [0x28_0000_0010, second, addr, addr & !0xfff] {
            text.push_str(&format!("{smmu}\\x090x{word:016x}\n"));
        }
        text + &format!(
            "{smmu}event: F_TRANSLATION client: 0000:00:05.0 sid: 0x28 ssid: 0x0 iova: {addr:#x} ipa: 0x0\n"
        )
    }

    #[test]
    fn an_smmus_faults_are_read() {
        const WRITE: u64 = 0x200 << 32;
        const READ: u64 = 0x208 << 32;
        let of = |access, addr| fault(access, "0000:00:05.0", addr);
        // An SMMU reports one event for each word of an access. An event at a lower address, or of
        // another kind, belongs to another access.
        let messages = [
            event(WRITE, 0xfff2_2000),
            event(WRITE, 0xfff2_2000),
            event(WRITE, 0xfff2_2004),
            "arm_smmu_dump_event: 1014 callbacks suppressed\n".to_owned(),
            event(WRITE, 0xfff2_2ffc),
            event(READ, 0xfff2_2ffc),
            event(READ, 0xfff2_2000),
            event(READ, 0xfff2_3000),
        ];
        let expected = [
            of(Access::Write, 0xfff2_2000),
            Found::Rest,
            Found::Rest,
            Found::Rest,
            of(Access::Read, 0xfff2_2000),
            of(Access::Read, 0xfff2_2000),
            of(Access::Read, 0xfff2_3000),
        ];
        assert_eq!(read(&messages.concat()).expect("faults"), expected);
        let boot = "arm-smmu-v3 9050000.smmuv3: ias 44-bit, oas 44-bit (features 0x00008325)\n";
        assert!(read(boot).expect("no fault").is_empty());
        for bad in [
            "event: C_BAD_STE client: 0000:00:05.0 sid: 0x28 ssid: 0x0",
            "event: F_TRANSLATION client: 0000:00:05.0 sid: 0x28 ssid: 0x0 iova: 0x10 ipa: 0x0",
        ] {
            let line = format!("arm-smmu-v3 9050000.smmuv3: {bad}\n");
            assert!(read(&line).is_err(), "{bad}");
        }
    }

    #[test]
    fn neighbours_join() {
        let page = |va, dma| Page { va, phys: 0, dma };
        let pages = [
            page(0x10000, 0xa0000),
            page(0x20000, 0xb0000),
            page(0x30000, 0x50000),
        ];
        let found = segments(&pages, 0x18001, 0x20000).expect("inside");
        let expected = [(0xa8001, 0x17fff), (0x50000, 0x8001)];
        assert_eq!(
            found,
            expected.map(|(dma, len)| Segment { dma, len }).as_slice()
        );
        assert!(segments(&pages, 0x38000, 0x8001).is_err());
    }
}
