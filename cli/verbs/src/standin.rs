// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! The stand-in GPU: allocations through its character devices, their place in the BAR, and access
//! to the BAR that bypasses the stand-in's driver.
//!
//! The ioctls are those of `tests/gpu/standin.h`.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
use std::{fs, io};

use anyhow::{ensure, Context, Result};

use crate::memory;
use crate::memory::{Mapping, Placement, Span};

/// Granularity of an allocation's address and length.
pub const GRANULE: u64 = 2 << 20;
/// Page size of nvidia.ko.
pub const PAGE: u64 = 64 << 10;

/// `struct standin_info`.
#[repr(C)]
#[derive(Debug, Default, Clone, Copy)]
struct RawInfo {
    va: u64,
    start: u64,
    length: u64,
    phys: u64,
    run: u64,
    bar_start: u64,
    bar_length: u64,
    bar_pinned: u64,
    gpu: u32,
    reserved: u32,
    uuid: [u8; 16],
    pci: [u8; 16],
}

/// `struct standin_free`.
#[repr(C)]
#[derive(Debug, Default, Clone, Copy)]
struct RawFree {
    va: u64,
    flags: u32,
    reserved: u32,
}

/// `struct standin_admit`.
#[repr(C)]
#[derive(Debug, Default, Clone, Copy)]
struct RawAdmit {
    pid: u32,
    reserved: u32,
}

/// `struct standin_export`.
#[repr(C)]
#[derive(Debug, Default, Clone, Copy)]
struct RawExport {
    va: u64,
    length: u64,
    flags: u32,
    fd: i32,
}

const FREE_KTHREAD: u32 = 1;

/// Thread that frees memory. nvidia.ko's free callbacks run in this thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Freer {
    Caller,
    KernelThread,
}

const IOC_FREE: libc::c_ulong = write_ioctl::<RawFree>(1);
const IOC_INFO: libc::c_ulong = read_write_ioctl::<RawInfo>(2);
const IOC_ADMIT: libc::c_ulong = write_ioctl::<RawAdmit>(3);
const IOC_EXPORT: libc::c_ulong = read_write_ioctl::<RawExport>(4);

const fn ioctl_number<T>(direction: u64, number: u64) -> libc::c_ulong {
    const TYPE: u64 = b'G' as u64;
    (direction << 30) | ((size_of::<T>() as u64) << 16) | (TYPE << 8) | number
}

const fn write_ioctl<T>(number: u64) -> libc::c_ulong {
    ioctl_number::<T>(1, number)
}

const fn read_write_ioctl<T>(number: u64) -> libc::c_ulong {
    ioctl_number::<T>(3, number)
}

/// One stand-in GPU.
#[derive(Debug)]
pub struct Gpu {
    index: usize,
    bdf: String,
    bar_start: u64,
    bar_len: u64,
    device: File,
}

impl Gpu {
    /// Returns all stand-in GPUs, in the order of their character devices.
    pub fn all() -> Result<Vec<Arc<Self>>> {
        const DRIVER: &str = "/sys/bus/pci/drivers/nvidia";
        let mut bdfs = Vec::new();
        for entry in fs::read_dir(DRIVER).context("the stand-in GPU's driver is not loaded")? {
            let name = entry?.file_name().to_string_lossy().into_owned();
            // The directory lists PCI addresses such as 0000:00:04.0 among bind, module, new_id, ….
            if name.len() == 12 && name.bytes().filter(|&byte| byte == b':').count() == 2 {
                bdfs.push(name);
            }
        }
        bdfs.sort();
        bdfs.into_iter()
            .enumerate()
            .map(|(index, bdf)| Self::open(index, bdf).map(Arc::new))
            .collect()
    }

    /// Opens the GPU at a PCI address. `index` is the number of the GPU's character device.
    pub fn open(index: usize, bdf: String) -> Result<Self> {
        let (bar_start, bar_len) = bar(&bdf)?;
        let device = memory::open_rw(&format!("/dev/nvidia{index}"))?;
        Ok(Self {
            index,
            bdf,
            bar_start,
            bar_len,
            device,
        })
    }

    /// Returns the PCI address.
    pub fn bdf(&self) -> &str {
        &self.bdf
    }

    /// Returns the bus address of the BAR.
    pub fn bar_start(&self) -> u64 {
        self.bar_start
    }

    /// Returns the size of the BAR, in bytes.
    pub fn bar_len(&self) -> u64 {
        self.bar_len
    }

    /// Returns the path of the character device.
    pub fn device_path(&self) -> String {
        format!("/dev/nvidia{}", self.index)
    }

    /// Allocates GPU memory.
    pub fn allocate(self: &Arc<Self>, len: usize, placement: Placement) -> Result<Allocation> {
        let mapping =
            Mapping::shared(self.device.as_fd(), 0, len, placement).with_context(|| {
                format!(
                    "allocate {len} bytes of {} at {placement:x?}",
                    self.device_path()
                )
            })?;
        let place = self.place_of(mapping.addr())?;
        let allocation = Allocation {
            gpu: Arc::clone(self),
            mapping,
            rounded_len: place.len,
            bar_address: AtomicU64::new(place.bar_address),
            freed: false,
        };
        ensure!(
            place.start == allocation.mapping.addr(),
            "the allocation does not start at its mapping: {allocation:x?}"
        );
        Ok(allocation)
    }

    /// Allocates memory and calls `pin`, up to 64 times, until the memory has the bus address
    /// `place`. Returns the allocation and the result of `pin`, or `None` if no attempt gets this
    /// address. Frees the memory of all other attempts.
    pub fn allocate_there<T>(
        self: &Arc<Self>,
        len: usize,
        place: u64,
        pin: impl Fn(&Allocation) -> Result<T>,
    ) -> Result<Option<(Allocation, T)>> {
        let mut others = Vec::new();
        for _ in 0..64 {
            let next = self.allocate(len, Placement::Any)?;
            let pinned = pin(&next)?;
            if next.bar_address() == place {
                return Ok(Some((next, pinned)));
            }
            others.push((next, pinned));
        }
        Ok(None)
    }

    /// Returns the place of this process's address `va` in the BAR, or an error such as ENOENT.
    pub fn place_of(&self, va: u64) -> Result<Place> {
        let info = self.info(va)?;
        Ok(Place {
            start: info.start,
            len: info.length,
            bar_address: info.phys,
            run: info.run,
        })
    }

    /// Returns the number of bytes of the BAR that any user has pinned.
    pub fn bar_pinned(&self) -> Result<u64> {
        Ok(self.info(0)?.bar_pinned)
    }

    fn info(&self, va: u64) -> Result<RawInfo> {
        let mut info = RawInfo {
            va,
            ..RawInfo::default()
        };
        // SAFETY: The ioctl reads and writes exactly this structure.
        let ret = unsafe { libc::ioctl(self.device.as_raw_fd(), IOC_INFO, &mut info) };
        ensure!(
            ret == 0,
            "STANDIN_IOC_INFO {va:#x}: {}",
            io::Error::last_os_error()
        );
        Ok(info)
    }

    /// Frees the allocation that starts at `va`, and keeps its mapping.
    pub fn free(&self, va: u64, by: Freer) -> io::Result<()> {
        let flags = match by {
            Freer::Caller => 0,
            Freer::KernelThread => FREE_KTHREAD,
        };
        let request = RawFree {
            va,
            flags,
            reserved: 0,
        };
        // SAFETY: The ioctl reads exactly this structure.
        match unsafe { libc::ioctl(self.device.as_raw_fd(), IOC_FREE, &request) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Allows process `pid`, which has this GPU open, to pin the caller's memory on this GPU. The
    /// permission ends when the process closes its first descriptor of the GPU.
    pub fn admit(&self, pid: u32) -> io::Result<()> {
        let request = RawAdmit { pid, reserved: 0 };
        // SAFETY: The ioctl reads exactly this structure.
        match unsafe { libc::ioctl(self.device.as_raw_fd(), IOC_ADMIT, &request) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Exports a part of this process's GPU memory as a dma-buf. The part starts at address `va`
    /// and has `length` bytes. Both numbers are multiples of the kernel's page size.
    pub fn export(&self, va: u64, length: u64) -> io::Result<OwnedFd> {
        let mut request = RawExport {
            va,
            length,
            ..RawExport::default()
        };
        // SAFETY: The ioctl reads and writes exactly this structure.
        match unsafe { libc::ioctl(self.device.as_raw_fd(), IOC_EXPORT, &mut request) } {
            // SAFETY: The driver has made this descriptor for the caller.
            0 => Ok(unsafe { OwnedFd::from_raw_fd(request.fd) }),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Maps `len` bytes of the BAR, starting at bus address `from`. The mapping uses sysfs and
    /// bypasses the driver.
    pub fn bar_view(&self, from: u64, len: usize) -> Result<BarView> {
        let offset = from
            .checked_sub(self.bar_start)
            .context("address below the BAR")?;
        let inside = offset
            .checked_add(len as u64)
            .is_some_and(|end| end <= self.bar_len);
        ensure!(
            inside,
            "{from:#x}+{len:#x} is not in the BAR of {}",
            self.bdf
        );
        // mmap requires page alignment. Pages have at most 64 KiB.
        let skip = offset % (64 << 10);
        let mapping = memory::map_file(
            &format!("/sys/bus/pci/devices/{}/resource2", self.bdf),
            offset - skip,
            len + usize::try_from(skip)?,
        )?;
        Ok(BarView {
            mapping,
            skip: usize::try_from(skip)?,
        })
    }
}

/// Parses the third line of `resource`, which is BAR2: first address, last address, flags.
fn bar(bdf: &str) -> Result<(u64, u64)> {
    let text = fs::read_to_string(format!("/sys/bus/pci/devices/{bdf}/resource"))?;
    let line = text
        .lines()
        .nth(2)
        .with_context(|| format!("{bdf} has no BAR2"))?;
    let mut numbers = line
        .split_whitespace()
        .map(|field| u64::from_str_radix(field.trim_start_matches("0x"), 16));
    let (first, last) = (
        numbers.next().context("BAR start")??,
        numbers.next().context("BAR end")??,
    );
    ensure!(first < last, "{bdf}: BAR2 is empty");
    Ok((first, last - first + 1))
}

/// Place of an allocation in the BAR.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// Start address of the allocation.
    pub start: u64,
    /// Length of the allocation, in bytes.
    pub len: u64,
    /// Bus address of the requested byte.
    pub bar_address: u64,
    /// Number of contiguous bytes that start at `bar_address`.
    pub run: u64,
}

/// A part of the BAR.
#[derive(Debug)]
pub struct BarView {
    mapping: Mapping,
    skip: usize,
}

impl BarView {
    /// Returns `len` bytes from `offset` on.
    pub fn bytes(&self, offset: usize, len: usize) -> Result<Vec<u8>> {
        self.mapping.bytes(self.skip + offset, len)
    }

    /// Copies from the BAR.
    pub fn read(&self, offset: usize, out: &mut [u8]) -> Result<()> {
        self.mapping.read(self.skip + offset, out)
    }

    /// Copies into the BAR.
    pub fn write(&self, offset: usize, data: &[u8]) -> Result<()> {
        self.mapping.write(self.skip + offset, data)
    }
}

/// GPU memory of this process, freed on drop at the latest.
#[derive(Debug)]
pub struct Allocation {
    gpu: Arc<Gpu>,
    mapping: Mapping,
    rounded_len: u64,
    /// Last known bus address.
    bar_address: AtomicU64,
    freed: bool,
}

impl Allocation {
    /// Returns the mapping of the memory.
    pub fn mapping(&self) -> &Mapping {
        &self.mapping
    }

    /// Returns the bus address of the first byte. For freed memory, returns the last known bus
    /// address. If the stand-in's driver contains NVIDIA's `nv-p2p.c`, pinning changes the bus
    /// address, and unpinning may change it again.
    pub fn bar_address(&self) -> u64 {
        if let Ok(place) = self.place(0) {
            self.bar_address.store(place.bar_address, Ordering::Relaxed);
        }
        self.bar_address.load(Ordering::Relaxed)
    }

    /// Returns the place in the BAR of the byte at `offset`, and the length of the contiguous run
    /// that begins there.
    pub fn place(&self, offset: usize) -> Result<Place> {
        self.gpu.place_of(self.mapping.addr() + offset as u64)
    }

    /// Returns the length of the range after the GPU's rounding.
    pub fn rounded_len(&self) -> u64 {
        self.rounded_len
    }

    /// Returns the range `[offset, offset + len)` of the memory.
    pub fn span(&self, offset: usize, len: usize) -> Result<Span> {
        self.mapping.span(offset, len)
    }

    /// Returns `len` bytes from `offset` on.
    pub fn bytes(&self, offset: usize, len: usize) -> Result<Vec<u8>> {
        let mut bytes = vec![0; len];
        self.read(offset, &mut bytes)?;
        Ok(bytes)
    }

    /// Copies from the memory.
    pub fn read(&self, offset: usize, out: &mut [u8]) -> Result<()> {
        ensure!(!self.freed, "read of freed GPU memory");
        self.mapping.read(offset, out)
    }

    /// Copies into the memory.
    pub fn write(&self, offset: usize, data: &[u8]) -> Result<()> {
        ensure!(!self.freed, "write to freed GPU memory");
        self.mapping.write(offset, data)
    }

    /// Frees the memory, but keeps its virtual addresses mapped.
    pub fn free(&mut self) -> Result<()> {
        self.free_by(Freer::Caller)
    }

    /// Frees the memory like [`Self::free`], but in the given kind of thread.
    pub fn free_by(&mut self, by: Freer) -> Result<()> {
        self.bar_address();
        self.gpu
            .free(self.mapping.addr(), by)
            .context("STANDIN_IOC_FREE")?;
        self.freed = true;
        Ok(())
    }

    /// Unmaps the first `len` bytes. The rest of the mapping keeps all of the memory allocated.
    pub fn unmap_head(&mut self, len: usize) -> Result<()> {
        self.mapping.unmap_head(len)
    }

    /// Maps the part of the BAR in which the memory lies now.
    pub fn bar_view(&self) -> Result<BarView> {
        self.gpu.bar_view(self.bar_address(), self.mapping.len())
    }

    /// Returns `true` if the bus addresses of the memory are contiguous.
    pub fn is_contiguous(&self) -> Result<bool> {
        Ok(self.place(0)?.run >= self.mapping.len() as u64)
    }
}
