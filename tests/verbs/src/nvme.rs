// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! A driver for an NVMe controller that uses only GPU memory. The controller's queues, address
//! lists and data are at the DMA addresses of a registration. The controller never gets an address
//! of host memory.
//!
//! The driver runs one command at a time and polls for its completion. The driver follows the NVMe
//! specification 1.4, as far as QEMU's controller needs.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use anyhow::{ensure, Context, Result};

use crate::dma::{Mapped, Segment, Trace};
use crate::gpu::Allocation;
use crate::rdma::Hca;
use crate::sys;
use crate::sys::Mapping;

/// Block size of the disk, in bytes.
pub(crate) const BLOCK: u64 = 512;
/// Page size of the controller, in bytes.
const PAGE: u64 = 4096;

/// Offsets of the controller's registers.
const INTMS: usize = 0x0c;
const CC: usize = 0x14;
const CSTS: usize = 0x1c;
const AQA: usize = 0x24;
const ASQ: usize = 0x28;
const ACQ: usize = 0x30;
const DOORBELLS: usize = 0x1000;
const CSTS_READY: u32 = 1;
const CSTS_FATAL: u32 = 2;

/// Number of entries in each queue.
const DEPTH: u16 = 16;
const SQE: usize = 64;
const CQE: usize = 16;

/// Page numbers of the queues, lists and data in the controller's memory.
const ADMIN: usize = 0;
const IO: usize = 2;
const IDENTITY: usize = 4;
const LIST: usize = 5;
/// Size of the controller's memory, in bytes: one page of the GPU.
pub(crate) const MEMORY: usize = 64 << 10;

/// Time limit for the controller to start, to stop, or to complete a command.
const TIMEOUT: Duration = Duration::from_secs(120);

/// Status of a completion. 0 is success.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Status(pub(crate) u16);

impl Status {
    pub(crate) fn success(self) -> Result<()> {
        ensure!(self.0 == 0, "status {:#x}", self.0);
        Ok(())
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Op {
    /// Memory to disk: the controller reads memory.
    Write,
    /// Disk to memory: the controller writes memory.
    Read,
}

#[derive(Debug)]
struct Queue {
    id: u16,
    /// Page of the submission queue. The completion queue has the next page.
    page: usize,
    tail: u16,
    head: u16,
    phase: u16,
}

impl Queue {
    fn new(id: u16, page: usize) -> Self {
        Self {
            id,
            page,
            tail: 0,
            head: 0,
            phase: 1,
        }
    }
}

#[derive(Debug)]
struct Registers {
    mapping: Mapping,
    /// Offset of the registers in the mapping, in bytes. A mapping has whole pages, and a large
    /// page may begin with the registers of another device.
    skip: usize,
}

impl Registers {
    fn map(bdf: &str) -> Result<Self> {
        let device = format!("/sys/bus/pci/devices/{bdf}");
        let line = sys::read_line(&format!("{device}/resource"))?;
        let start = line
            .split_whitespace()
            .next()
            .and_then(|word| u64::from_str_radix(word.trim_start_matches("0x"), 16).ok())
            .with_context(|| format!("{bdf} has no BAR0: {line:?}"))?;
        let skip = usize::try_from(start % sys::page_size())?;
        let mapping = sys::map_file(&format!("{device}/resource0"), 0, skip + 2 * DOORBELLS)?;
        Ok(Self { mapping, skip })
    }

    fn load32(&self, register: usize) -> Result<u32> {
        self.mapping.load32(self.skip + register)
    }

    fn store32(&self, register: usize, value: u32) -> Result<()> {
        self.mapping.store32(self.skip + register, value)
    }
}

/// A running controller with one pair of I/O queues, which is stopped when dropped.
#[derive(Debug)]
pub(crate) struct Nvme {
    bdf: String,
    registers: Registers,
    doorbell: usize,
    // Rust drops the fields in this order. The mapping must end before its memory is freed.
    mapped: Mapped,
    memory: Allocation,
    admin: Queue,
    io: Queue,
    next_id: u16,
    longest: u64,
}

/// Returns the PCI address of the controller, if there is one.
pub(crate) fn find() -> Result<Option<String>> {
    for bdf in sys::names("/sys/bus/pci/devices")? {
        if sys::read_line(&format!("/sys/bus/pci/devices/{bdf}/class"))? == "0x010802" {
            return Ok(Some(bdf));
        }
    }
    Ok(None)
}

/// Unbinds the kernel's driver. The DMA mask that the driver has set stays in force. Without this
/// mask, the device could only use 32-bit addresses, and could not reach a BAR above 4 GiB.
pub(crate) fn take_from_kernel(bdf: &str) -> Result<()> {
    let driver = format!("/sys/bus/pci/devices/{bdf}/driver");
    if Path::new(&driver).exists() {
        fs::write(format!("{driver}/unbind"), bdf).context("unbind the kernel's driver")?;
    }
    let bits = sys::read_line(&format!("/sys/bus/pci/devices/{bdf}/dma_mask_bits"))?;
    ensure!(bits == "64", "{bdf} takes addresses of {bits} bits");
    Ok(())
}

const COMMAND: u64 = 4;
const COMMAND_MEMORY: u16 = 1 << 1;
const COMMAND_MASTER: u16 = 1 << 2;
const COMMAND_NO_INTX: u16 = 1 << 10;

/// Enables the device as a bus master without interrupts, or disables bus mastering.
fn set_master(bdf: &str, master: bool) -> Result<()> {
    let config = sys::open_rw(&format!("/sys/bus/pci/devices/{bdf}/config"))?;
    let mut bytes = [0; 2];
    config.read_exact_at(&mut bytes, COMMAND)?;
    let mut command = u16::from_le_bytes(bytes) | COMMAND_MEMORY | COMMAND_NO_INTX;
    if master {
        command |= COMMAND_MASTER;
    } else {
        command &= !COMMAND_MASTER;
    }
    config.write_all_at(&command.to_le_bytes(), COMMAND)?;
    Ok(())
}

impl Nvme {
    /// Starts the controller with its queues and lists in `memory`, which `hca` registers for the
    /// controller.
    pub(crate) fn start(bdf: &str, trace: &Trace, hca: &Hca, memory: Allocation) -> Result<Self> {
        let mapped = trace.register(hca, &memory, 0, MEMORY)?;
        let registers = Registers::map(bdf)?;
        let stride = registers.load32(4)? & 0xf;
        let mut nvme = Self {
            bdf: bdf.to_owned(),
            registers,
            doorbell: 4 << stride,
            mapped,
            memory,
            admin: Queue::new(0, ADMIN),
            io: Queue::new(1, IO),
            next_id: 1,
            longest: 0,
        };
        nvme.stop()?;
        nvme.memory.write(0, &vec![0; MEMORY])?;
        set_master(bdf, true)?;

        nvme.registers.store32(INTMS, u32::MAX)?;
        let size = u32::from(DEPTH - 1);
        nvme.registers.store32(AQA, size << 16 | size)?;
        let (submission, completion) = (nvme.page(ADMIN)?, nvme.page(ADMIN + 1)?);
        for (register, address) in [(ASQ, submission), (ACQ, completion)] {
            nvme.registers.store32(register, low(address))?;
            nvme.registers.store32(register + 4, high(address))?;
        }
        // Sets submission entries of 64 bytes, completion entries of 16 bytes and pages of 4 KiB,
        // and enables the controller.
        nvme.registers.store32(CC, 4 << 20 | 6 << 16 | 1)?;
        nvme.wait_ready(true)?;

        nvme.identify_self()?;
        nvme.create_queues()?;
        Ok(nvme)
    }

    /// Returns the maximum number of bytes in one command.
    pub(crate) fn longest(&self) -> u64 {
        self.longest
    }

    fn stop(&mut self) -> Result<()> {
        self.registers.store32(CC, 0)?;
        self.wait_ready(false)
    }

    fn wait_ready(&self, ready: bool) -> Result<()> {
        let done = sys::wait_until(TIMEOUT, || {
            let status = self.registers.load32(CSTS)?;
            ensure!(!ready || status & CSTS_FATAL == 0, "failed: {status:#x}");
            Ok((status & CSTS_READY != 0) == ready)
        })?;
        ensure!(done, "the controller does not become ready={ready}");
        Ok(())
    }

    /// Returns the DMA address of a page of the controller's memory.
    fn page(&self, page: usize) -> Result<u64> {
        let segments = self.mapped.segments(page as u64 * PAGE, PAGE)?;
        Ok(segments.first().context("nothing")?.dma)
    }

    fn identify_self(&mut self) -> Result<()> {
        let at = IDENTITY * PAGE as usize;
        self.identify(self.page(IDENTITY)?)?.success()?;
        let identity = self.memory.bytes(at, PAGE as usize)?;
        check_description(&identity)?;
        // This byte holds the limit in pages, as a power of two. 0 means no limit. For 0 and for
        // large values, this program uses 1,024 pages.
        let shift = Some(identity[77]).filter(|shift| (1..10).contains(shift));
        self.longest = PAGE << shift.unwrap_or(10);
        let sgls = identity[536..540].iter().any(|byte| *byte != 0);
        ensure!(sgls, "the controller takes no scatter-gather lists");
        Ok(())
    }

    fn create_queues(&mut self) -> Result<()> {
        let (submission, completion) = (self.page(IO)?, self.page(IO + 1)?);
        let size = u32::from(DEPTH - 1) << 16 | u32::from(self.io.id);
        let mut command = Command::new(0x05).data(completion);
        // The queue is contiguous and causes no interrupts.
        (command.words[10], command.words[11]) = (size, 1);
        self.run(command, true)?
            .success()
            .context("create the completion queue")?;
        let mut command = Command::new(0x01).data(submission);
        (command.words[10], command.words[11]) = (size, u32::from(self.io.id) << 16 | 1);
        self.run(command, true)?
            .success()
            .context("create the submission queue")
    }

    /// Makes the controller write its description of 4 KiB to the page at `dma`. This command uses
    /// neither the disk nor a scatter-gather list.
    pub(crate) fn identify(&mut self, dma: u64) -> Result<Status> {
        ensure!(dma % PAGE == 0, "{dma:#x} is not the start of a page");
        let mut command = Command::new(0x06).data(dma);
        // CNS 1: the Identify Controller data.
        command.words[10] = 1;
        self.run(command, true)
    }

    /// Moves the bytes at `segments` to or from the disk with one command.
    pub(crate) fn transfer(&mut self, op: Op, block: u64, segments: &[Segment]) -> Result<Status> {
        let len: u64 = segments.iter().map(|segment| segment.len).sum();
        ensure!(
            len > 0 && len % BLOCK == 0 && len <= self.longest,
            "{len:#x} bytes in one command"
        );
        let mut command = Command::new(if op == Op::Write { 0x01 } else { 0x02 });
        command.words[1] = 1;
        (command.words[10], command.words[11]) = (low(block), high(block));
        command.words[12] = u32::try_from(len / BLOCK - 1)?;
        self.point_at(&mut command, segments)?;
        self.run(command, false)
    }

    /// Makes a command use these segments, by a scatter-gather list if there are several. The
    /// entries of a list may have any address and any length.
    fn point_at(&mut self, command: &mut Command, segments: &[Segment]) -> Result<()> {
        command.words[0] |= 1 << 14;
        if let [only] = segments {
            command.descriptor(&descriptor(only.dma, only.len, 0x00)?);
            return Ok(());
        }
        let entries = segments.iter();
        let entries = entries.map(|segment| descriptor(segment.dma, segment.len, 0x00));
        let list = entries.collect::<Result<Vec<_>>>()?.concat();
        self.memory.write(LIST * PAGE as usize, &list)?;
        // A Last Segment descriptor, because the list has only one segment.
        let whole = descriptor(self.page(LIST)?, list.len() as u64, 0x30)?;
        command.descriptor(&whole);
        Ok(())
    }

    /// Submits one command and waits for its completion.
    fn run(&mut self, mut command: Command, admin: bool) -> Result<Status> {
        let id = self.next_id;
        self.next_id = self.next_id.wrapping_add(1);
        command.words[0] |= u32::from(id) << 16;
        let queue = if admin { &mut self.admin } else { &mut self.io };
        let base = queue.page * PAGE as usize;
        self.memory
            .write(base + usize::from(queue.tail) * SQE, &command.bytes())?;
        queue.tail = (queue.tail + 1) % DEPTH;
        let bell = DOORBELLS + 2 * usize::from(queue.id) * self.doorbell;
        self.registers.store32(bell, u32::from(queue.tail))?;

        let at = base + PAGE as usize + usize::from(queue.head) * CQE;
        let mut patience = sys::patience(TIMEOUT);
        let mut tries = 0u32;
        let word = loop {
            // A single access suffices, because the phase bit arrives with the rest of the word.
            let word = self.memory.mapping().load32(at + 12)?;
            if (word >> 16) as u16 & 1 == queue.phase {
                break word;
            }
            ensure!(
                !patience.is_over(),
                "no completion of command {:#x}: status {:#x}",
                command.words[0],
                self.registers.load32(CSTS)?
            );
            tries += 1;
            if tries > 100 {
                // QEMU's controller needs processor time, and this loop must not take all of it.
                std::thread::sleep(Duration::from_micros(50));
            }
        };
        let found = word as u16;
        ensure!(
            found == id,
            "command {found} completed, but command {id} was submitted"
        );
        queue.head = (queue.head + 1) % DEPTH;
        if queue.head == 0 {
            queue.phase ^= 1;
        }
        self.registers
            .store32(bell + self.doorbell, u32::from(queue.head))?;
        Ok(Status((word >> 17) as u16))
    }
}

impl Drop for Nvme {
    fn drop(&mut self) {
        // The controller must stop before its memory is freed.
        let stopped = self.stop().and_then(|()| set_master(&self.bdf, false));
        if let Err(error) = stopped {
            eprintln!("the NVMe controller was not stopped: {error:#}");
        }
    }
}

/// Checks that these bytes are the controller's description: see [`Nvme::identify`].
pub(crate) fn check_description(bytes: &[u8]) -> Result<()> {
    let model = String::from_utf8_lossy(&bytes[24..64]);
    ensure!(model.trim() == "QEMU NVMe Ctrl", "the model is {model:?}");
    Ok(())
}

fn low(value: u64) -> u32 {
    value as u32
}

fn high(value: u64) -> u32 {
    (value >> 32) as u32
}

/// A submission queue entry.
#[derive(Debug, Clone, Copy)]
struct Command {
    words: [u32; 16],
}

impl Command {
    fn new(opcode: u32) -> Self {
        let mut words = [0; 16];
        words[0] = opcode;
        Self { words }
    }

    /// Sets the command's only data page, as a PRP entry.
    fn data(mut self, dma: u64) -> Self {
        (self.words[6], self.words[7]) = (low(dma), high(dma));
        self
    }

    fn descriptor(&mut self, bytes: &[u8; 16]) {
        for (word, chunk) in self.words[6..10].iter_mut().zip(bytes.chunks_exact(4)) {
            let bytes = chunk.iter().rev();
            *word = bytes.fold(0, |word, byte| word << 8 | u32::from(*byte));
        }
    }

    fn bytes(&self) -> Vec<u8> {
        let words = self.words.iter();
        words.flat_map(|word| word.to_le_bytes()).collect()
    }
}

fn descriptor(dma: u64, len: u64, kind: u8) -> Result<[u8; 16]> {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&dma.to_le_bytes());
    bytes[8..12].copy_from_slice(&u32::try_from(len)?.to_le_bytes());
    bytes[15] = kind;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_have_their_form() {
        let bytes = descriptor(0x1122_3344_5566_7788, 0x0a0b_0c0d, 0x30).expect("short enough");
        assert_eq!(bytes[..8], [0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11]);
        assert_eq!(bytes[8..12], [0x0d, 0x0c, 0x0b, 0x0a]);
        assert_eq!(bytes[12..], [0, 0, 0, 0x30]);
        let mut command = Command::new(1);
        command.descriptor(&bytes);
        assert_eq!(command.bytes()[24..40], bytes);
        assert!(descriptor(0, 1 << 32, 0).is_err());
    }
}
