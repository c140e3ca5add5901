// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! libc: mappings that hardware writes to, address space, processes. All `unsafe` around libc is here, the stand-in GPU's
//! ioctls (gpu.rs) excepted.

use std::fs;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::fd::AsRawFd;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::process::Child;
use std::process::Command;
use std::process::ExitStatus;
use std::process::Stdio;
use std::ptr;
use std::ptr::NonNull;
use std::time::Duration;
use std::time::Instant;

use anyhow::bail;
use anyhow::ensure;
use anyhow::Context;
use anyhow::Result;

/// A range of this process's addresses, for registration. No Rust object lies in it: the constructors see to that, so a
/// device that writes there cannot break the program's own memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Span {
    addr: u64,
    len: u64,
}

impl Span {
    /// A range that is allowed to be wrong (unmapped, freed, across mappings, wrapping). What of it is mapped must be device
    /// memory of the stand-in GPU.
    pub(crate) fn anywhere(addr: u64, len: u64) -> Result<Self> {
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

    pub(crate) fn addr(self) -> u64 {
        self.addr
    }

    pub(crate) fn len(self) -> u64 {
        self.len
    }
}

/// How a mapping is placed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Placement {
    /// Where the kernel likes.
    Any,
    /// At this address, which must be free.
    At(u64),
}

/// Memory that something else than this program may write: mapped, never borrowed as a slice, accessed by volatile loads
/// and stores. Unmapped when dropped.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: A mapping belongs to the process, not to a thread, and is only accessed through the volatile copies below.
unsafe impl Send for Mapping {}

impl Mapping {
    /// Anonymous memory, zeroed.
    pub(crate) fn anonymous(len: usize) -> io::Result<Self> {
        Self::map(
            len,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            None,
            0,
            Placement::Any,
        )
    }

    /// Address space without memory.
    pub(crate) fn reserve(len: usize) -> io::Result<Self> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        Self::map(len, libc::PROT_NONE, flags, None, 0, Placement::Any)
    }

    /// Shared memory of a device or a file.
    pub(crate) fn shared(
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
        // SAFETY: A new mapping; MAP_FIXED_NOREPLACE replaces none that exists.
        let base = unsafe { libc::mmap(hint, len, protection, flags | fixed, fd, offset) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base =
            NonNull::new(base.cast()).ok_or_else(|| io::Error::from_raw_os_error(libc::EFAULT))?;
        Ok(Self { base, len })
    }

    pub(crate) fn addr(&self) -> u64 {
        self.base.as_ptr() as u64
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The range `[offset, offset + len)` of the mapping.
    pub(crate) fn span(&self, offset: usize, len: usize) -> Result<Span> {
        self.check(offset, len)?;
        Ok(Span {
            addr: self.addr() + offset as u64,
            len: len as u64,
        })
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

    /// Copies from the mapping. Aligned words where that is possible, since device memory may be slow.
    pub(crate) fn read(&self, offset: usize, out: &mut [u8]) -> Result<()> {
        self.check(offset, out.len())?;
        let mut at = offset;
        let mut rest = out;
        while !rest.is_empty() {
            let word = at % 8 == 0 && rest.len() >= 8;
            let (head, tail) = rest.split_at_mut(if word { 8 } else { 1 });
            // SAFETY: `check` showed that the bytes lie in the mapping, which lives as long as `self`.
            let from = unsafe { self.base.as_ptr().add(at) };
            if word {
                // SAFETY: As above; `base` is page-aligned and `at` a multiple of 8.
                head.copy_from_slice(&unsafe { from.cast::<u64>().read_volatile() }.to_ne_bytes());
            } else {
                // SAFETY: As above.
                head[0] = unsafe { from.read_volatile() };
            }
            at += head.len();
            rest = tail;
        }
        Ok(())
    }

    /// Copies into the mapping.
    pub(crate) fn write(&self, offset: usize, data: &[u8]) -> Result<()> {
        self.check(offset, data.len())?;
        let mut at = offset;
        let mut rest = data;
        while let Some(&byte) = rest.first() {
            // SAFETY: `check` showed that the bytes lie in the mapping, which lives as long as `self`.
            let to = unsafe { self.base.as_ptr().add(at) };
            let taken = match rest.first_chunk::<8>() {
                Some(word) if at % 8 == 0 => {
                    // SAFETY: As above; `base` is page-aligned and `at` a multiple of 8.
                    unsafe { to.cast::<u64>().write_volatile(u64::from_ne_bytes(*word)) };
                    8
                }
                _ => {
                    // SAFETY: As above.
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
        // SAFETY: The mapping was made by `map` with this length, and no reference into it exists.
        if unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) } != 0 {
            eprintln!("munmap: {}", io::Error::last_os_error());
        }
    }
}

/// A free address, aligned to `align` (a power of two, at least the page size), with room for `len` bytes.
pub(crate) fn free_address(len: u64, align: u64) -> Result<u64> {
    let room = len.checked_add(align).context("length overflow")?;
    let reserved = Mapping::reserve(usize::try_from(room)?)?;
    // What was reserved here is free again once `reserved` is dropped, and this program maps nothing in between.
    reserved
        .addr()
        .checked_next_multiple_of(align)
        .context("address overflow")
}

/// Runs `body` in a forked child and returns the status that it exits with. Only for a process of one thread.
pub(crate) fn in_forked_child(body: impl FnOnce() -> i32) -> Result<i32> {
    let threads = fs::read_dir("/proc/self/task")?.count();
    ensure!(threads == 1, "fork with {threads} threads");
    // SAFETY: The process has one thread, so the child is a full copy and may run any code.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let status = body();
        // SAFETY: Ends the child without running the destructors that belong to the parent.
        unsafe { libc::_exit(status) };
    }
    if pid < 0 {
        bail!("fork: {}", io::Error::last_os_error());
    }
    let mut status = 0;
    loop {
        // SAFETY: `pid` is our child, and `status` is ours to write.
        let waited = unsafe { libc::waitpid(pid, &mut status, 0) };
        if waited == pid {
            break;
        }
        let error = io::Error::last_os_error();
        ensure!(
            error.kind() == io::ErrorKind::Interrupted,
            "waitpid: {error}"
        );
    }
    ensure!(
        libc::WIFEXITED(status),
        "the forked child died by signal {}",
        libc::WTERMSIG(status)
    );
    Ok(libc::WEXITSTATUS(status))
}

/// Tries to unload a module (delete_module with O_NONBLOCK, which never waits for users).
pub(crate) fn unload_module(name: &str) -> io::Result<()> {
    let name = std::ffi::CString::new(name)?;
    // SAFETY: A NUL-terminated name and flags.
    match unsafe { libc::syscall(libc::SYS_delete_module, name.as_ptr(), libc::O_NONBLOCK) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// What a program left behind.
#[derive(Debug)]
pub(crate) struct Finished {
    pub(crate) status: Option<ExitStatus>,
    pub(crate) output: String,
}

impl Finished {
    pub(crate) fn success(&self) -> bool {
        self.status.is_some_and(|status| status.success())
    }

    /// The last lines, for a failure's message.
    pub(crate) fn tail(&self, lines: usize) -> String {
        let all: Vec<_> = self.output.lines().collect();
        all[all.len().saturating_sub(lines)..].join("\n")
    }
}

/// A program running with its output going to a file, so that it never waits for a reader.
#[derive(Debug)]
pub(crate) struct Running {
    child: Child,
    output: File,
    name: String,
}

impl Running {
    pub(crate) fn start(command: &mut Command) -> Result<Self> {
        let name = command.get_program().to_string_lossy().into_owned();
        let output = unnamed_file()?;
        let child = command
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output.try_clone()?)
            .spawn()
            .with_context(|| format!("start {name}"))?;
        Ok(Self {
            child,
            output,
            name,
        })
    }

    /// What it has printed so far.
    pub(crate) fn so_far(&self) -> Result<String> {
        let len = usize::try_from(self.output.metadata()?.len())?;
        let mut bytes = vec![0; len];
        std::os::unix::fs::FileExt::read_exact_at(&self.output, &mut bytes, 0)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    pub(crate) fn is_running(&mut self) -> Result<bool> {
        Ok(self.child.try_wait()?.is_none())
    }

    /// Waits for the end, kills at the deadline; `status` is None then.
    pub(crate) fn finish(mut self, timeout: Duration) -> Result<Finished> {
        let deadline = Instant::now() + timeout;
        while self.is_running()? {
            if Instant::now() > deadline {
                self.child.kill()?;
                self.child.wait()?;
                return Ok(Finished {
                    status: None,
                    output: self.so_far()?,
                });
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let status = self
            .child
            .wait()
            .with_context(|| format!("wait for {}", self.name))?;
        Ok(Finished {
            status: Some(status),
            output: self.so_far()?,
        })
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Errors mean that it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A file in memory that vanishes with its last descriptor.
fn unnamed_file() -> Result<File> {
    // SAFETY: A NUL-terminated name and flags.
    let fd = unsafe { libc::memfd_create(c"output".as_ptr(), libc::MFD_CLOEXEC) };
    ensure!(fd >= 0, "memfd_create: {}", io::Error::last_os_error());
    // SAFETY: The descriptor was just made and has no other owner.
    Ok(File::from(unsafe {
        <std::os::fd::OwnedFd as std::os::fd::FromRawFd>::from_raw_fd(fd)
    }))
}

/// Waits until `done` says so; false when the time is up.
pub(crate) fn wait_until(
    timeout: Duration,
    mut done: impl FnMut() -> Result<bool>,
) -> Result<bool> {
    let deadline = Instant::now() + timeout;
    loop {
        if done()? {
            return Ok(true);
        }
        if Instant::now() > deadline {
            return Ok(false);
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Reads a file of /sys or /proc without the newline at its end.
pub(crate) fn read_line(path: &str) -> Result<String> {
    Ok(fs::read_to_string(path)
        .with_context(|| path.to_owned())?
        .trim_end()
        .to_owned())
}

/// The kernel log's last `lines` lines, for a failure's message. Empty where it cannot be read.
pub(crate) fn kernel_log_tail(lines: usize) -> Vec<String> {
    let Ok(file) = fs::OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open("/dev/kmsg")
    else {
        return Vec::new();
    };
    let mut all = Vec::new();
    let mut record = [0u8; 8192];
    loop {
        match io::Read::read(&mut &file, &mut record) {
            Ok(0) => break,
            Ok(got) => {
                let text = String::from_utf8_lossy(&record[..got]);
                let line = text
                    .lines()
                    .next()
                    .and_then(|line| line.split_once(';'))
                    .map_or("", |(_, message)| message);
                all.push(line.to_owned());
            }
            // The record was overwritten while it was read: the next read goes on behind it.
            Err(error) if error.raw_os_error() == Some(libc::EPIPE) => {}
            Err(_) => break,
        }
    }
    all.split_off(all.len().saturating_sub(lines))
}

/// The file's contents as a mapping's source.
pub(crate) fn open_rw(path: &str) -> Result<File> {
    fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open(path)
        .with_context(|| path.to_owned())
}

/// Maps `len` bytes of `path` from `offset` on.
pub(crate) fn map_file(path: &str, offset: u64, len: usize) -> Result<Mapping> {
    let file = open_rw(path)?;
    Mapping::shared(file.as_fd(), offset, len, Placement::Any)
        .with_context(|| format!("map {path} at {offset:#x}"))
}
