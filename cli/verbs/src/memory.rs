// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Mappings that hardware writes to. All `unsafe` code for mmap is in this file.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::atomic::{fence, Ordering};
use std::{fs, io, ptr};

use anyhow::{ensure, Context, Result};

/// A range of this process's addresses that can be registered. By construction, no Rust object lies
/// in the range. A device that writes into the range therefore cannot corrupt the program's own
/// memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    addr: u64,
    len: u64,
}

impl Span {
    /// Returns a range that may be invalid: unmapped, freed, across mappings, or wrapping. All
    /// mapped parts of the range must be device memory of the stand-in GPU.
    pub fn anywhere(addr: u64, len: u64) -> Result<Self> {
        let end = addr.saturating_add(len);
        for line in fs::read_to_string("/proc/self/maps")?.lines() {
            let (range, rest) = line.split_once(' ').context("/proc/self/maps: no range")?;
            let (first, last) = range.split_once('-').context("/proc/self/maps: no dash")?;
            let first = u64::from_str_radix(first, 16)?;
            let last = u64::from_str_radix(last, 16)?;
            let ours = first < end && addr < last;
            ensure!(
                !ours || rest.contains("/dev/nvidia"),
                "{addr:#x}+{len:#x} covers memory of this program: {line}"
            );
        }
        Ok(Self { addr, len })
    }

    /// Returns a range of device memory that is not mapped into this process.
    pub(crate) fn of_device(addr: u64, len: u64) -> Self {
        Self { addr, len }
    }

    /// Returns the first address.
    pub fn addr(self) -> u64 {
        self.addr
    }

    /// Returns the length in bytes.
    pub fn len(self) -> u64 {
        self.len
    }
}

/// Placement of a mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Placement {
    /// An address that the kernel chooses.
    Any,
    /// This address, which must be free.
    At(u64),
}

/// Memory that hardware or other processes may write, unmapped on drop. The mapping is never
/// borrowed as a slice, but accessed by volatile loads and stores.
#[derive(Debug)]
pub struct Mapping {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: A mapping belongs to the process, not to a thread, and is only accessed through the
// volatile copies below.
unsafe impl Send for Mapping {}

impl Mapping {
    /// Maps anonymous, zeroed memory.
    pub fn anonymous(len: usize) -> io::Result<Self> {
        Self::map(
            len,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            None,
            0,
            Placement::Any,
        )
    }

    /// Reserves address space without memory.
    pub fn reserve(len: usize) -> io::Result<Self> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        Self::map(len, libc::PROT_NONE, flags, None, 0, Placement::Any)
    }

    /// Maps anonymous, read-only memory.
    pub fn read_only(len: usize) -> io::Result<Self> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        Self::map(len, libc::PROT_READ, flags, None, 0, Placement::Any)
    }

    /// Maps shared memory of a device or a file.
    pub fn shared(
        fd: BorrowedFd<'_>,
        offset: u64,
        len: usize,
        placement: Placement,
    ) -> io::Result<Self> {
        Self::map(
            len,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED,
            Some(fd),
            offset,
            placement,
        )
    }

    fn map(
        len: usize,
        protection: i32,
        flags: i32,
        fd: Option<BorrowedFd<'_>>,
        offset: u64,
        placement: Placement,
    ) -> io::Result<Self> {
        let (hint, fixed) = match placement {
            Placement::Any => (ptr::null_mut(), 0),
            Placement::At(addr) => (addr as *mut libc::c_void, libc::MAP_FIXED_NOREPLACE),
        };
        let fd = fd.map_or(-1, |fd| fd.as_raw_fd());
        let offset = libc::off_t::try_from(offset)
            .map_err(|_| io::Error::from_raw_os_error(libc::EOVERFLOW))?;
        // SAFETY: The mapping is new. `MAP_FIXED_NOREPLACE` replaces no existing mapping.
        let base = unsafe { libc::mmap(hint, len, protection, flags | fixed, fd, offset) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base =
            NonNull::new(base.cast()).ok_or_else(|| io::Error::from_raw_os_error(libc::EFAULT))?;
        Ok(Self { base, len })
    }

    /// Returns the first address.
    pub fn addr(&self) -> u64 {
        self.base.as_ptr() as u64
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns the range `[offset, offset + len)` of the mapping.
    pub fn span(&self, offset: usize, len: usize) -> Result<Span> {
        self.check(offset, len)?;
        Ok(Span {
            addr: self.addr() + offset as u64,
            len: len as u64,
        })
    }

    /// Unmaps the first `len` bytes, which are whole pages.
    pub fn unmap_head(&mut self, len: usize) -> Result<()> {
        ensure!(
            len < self.len,
            "unmapping {len:#x} bytes leaves no part of the mapping"
        );
        // SAFETY: No reference into this part of the mapping exists. The code below removes the
        // part from `self`.
        let ret = unsafe { libc::munmap(self.base.as_ptr().cast(), len) };
        ensure!(ret == 0, "munmap: {}", io::Error::last_os_error());
        // SAFETY: The address lies inside the mapping.
        self.base = unsafe { self.base.add(len) };
        self.len -= len;
        Ok(())
    }

    fn check(&self, offset: usize, len: usize) -> Result<()> {
        let end = offset.checked_add(len).context("offset overflow")?;
        ensure!(
            end <= self.len,
            "{offset:#x}+{len:#x} is outside a mapping of {:#x} bytes",
            self.len
        );
        Ok(())
    }

    /// Returns `len` bytes from `offset` on.
    pub fn bytes(&self, offset: usize, len: usize) -> Result<Vec<u8>> {
        let mut bytes = vec![0; len];
        self.read(offset, &mut bytes)?;
        Ok(bytes)
    }

    /// Copies from the mapping. Uses aligned words if possible, since device memory may be slow.
    pub fn read(&self, offset: usize, out: &mut [u8]) -> Result<()> {
        self.check(offset, out.len())?;
        let mut at = offset;
        let mut rest = out;
        while !rest.is_empty() {
            let word = at % 8 == 0 && rest.len() >= 8;
            let (head, tail) = rest.split_at_mut(if word { 8 } else { 1 });
            // SAFETY: `check` showed that the bytes lie in the mapping, which lives as long as
            // `self`.
            let from = unsafe { self.base.as_ptr().add(at) };
            if word {
                // SAFETY: Same as above; `base` is page-aligned and `at` a multiple of 8.
                head.copy_from_slice(&unsafe { from.cast::<u64>().read_volatile() }.to_ne_bytes());
            } else {
                // SAFETY: Same as above.
                head[0] = unsafe { from.read_volatile() };
            }
            at += head.len();
            rest = tail;
        }
        Ok(())
    }

    /// Reads the 32-bit word at `offset` in one access, before all later accesses.
    pub fn load32(&self, offset: usize) -> Result<u32> {
        let from = self.word(offset)?;
        // SAFETY: `word` showed that the four bytes lie in the mapping, aligned.
        let value = unsafe { from.read_volatile() };
        fence(Ordering::SeqCst);
        Ok(u32::from_le(value))
    }

    /// Writes the 32-bit word at `offset` in one access, after all earlier accesses.
    pub fn store32(&self, offset: usize, value: u32) -> Result<()> {
        let to = self.word(offset)?;
        fence(Ordering::SeqCst);
        // SAFETY: `word` showed that the four bytes lie in the mapping, aligned.
        unsafe { to.write_volatile(value.to_le()) };
        Ok(())
    }

    fn word(&self, offset: usize) -> Result<*mut u32> {
        self.check(offset, 4)?;
        ensure!(offset % 4 == 0, "the word at {offset:#x} is not aligned");
        // SAFETY: `check` showed that the bytes lie in the mapping, which lives as long as `self`.
        Ok(unsafe { self.base.as_ptr().add(offset) }.cast())
    }

    /// Copies into the mapping.
    pub fn write(&self, offset: usize, data: &[u8]) -> Result<()> {
        self.check(offset, data.len())?;
        let mut at = offset;
        let mut rest = data;
        while let Some(&byte) = rest.first() {
            // SAFETY: `check` showed that the bytes lie in the mapping, which lives as long as
            // `self`.
            let to = unsafe { self.base.as_ptr().add(at) };
            let taken = match rest.first_chunk::<8>() {
                Some(word) if at % 8 == 0 => {
                    // SAFETY: Same as above; `base` is page-aligned and `at` a multiple of 8.
                    unsafe { to.cast::<u64>().write_volatile(u64::from_ne_bytes(*word)) };
                    8
                }
                _ => {
                    // SAFETY: Same as above.
                    unsafe { to.write_volatile(byte) };
                    1
                }
            };
            at += taken;
            rest = &rest[taken..];
        }
        Ok(())
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `map` made the mapping with this length, and no reference into it exists.
        if unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) } != 0 {
            eprintln!("munmap: {}", io::Error::last_os_error());
        }
    }
}

/// Opens a file for reading and writing, for a mapping.
pub fn open_rw(path: &str) -> Result<File> {
    fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open(path)
        .with_context(|| path.to_owned())
}

/// Maps `len` bytes of `path`, starting at `offset`.
pub fn map_file(path: &str, offset: u64, len: usize) -> Result<Mapping> {
    let file = open_rw(path)?;
    Mapping::shared(file.as_fd(), offset, len, Placement::Any)
        .with_context(|| format!("map {path} at {offset:#x}"))
}
