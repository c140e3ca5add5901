// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! libc: address space, processes, files. All `unsafe` around libc is here, but for what `peermem-verbs` wraps: mappings
//! that hardware writes to, and the stand-in GPU's ioctls.

use std::cell::Cell;
use std::fs::File;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;
use std::time::Duration;
use std::{fs, io, ptr};

use anyhow::{bail, ensure, Context, Result};
pub(crate) use peermem_verbs::memory::{map_file, open_rw, Mapping, Placement, Span};
pub(crate) use peermem_verbs::patience::Patience;

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

/// A process.
pub(crate) type Pid = libc::pid_t;

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ended {
    Exited(i32),
    Killed(i32),
}

/// How many threads this process has.
pub(crate) fn threads() -> Result<usize> {
    Ok(fs::read_dir("/proc/self/task")?.count())
}

/// Forks: the child runs `body` and ends with the status that it returns. Only for a process of one thread.
pub(crate) fn fork(body: impl FnOnce() -> i32) -> Result<Pid> {
    let threads = threads()?;
    ensure!(threads == 1, "fork with {threads} threads");
    // SAFETY: The process has one thread, so the child is a full copy and may run any code.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        leave(body());
    }
    ensure!(pid > 0, "fork: {}", io::Error::last_os_error());
    Ok(pid)
}

/// Ends this process at once, without the destructors of anything: what it holds is the kernel's to take back.
pub(crate) fn leave(status: i32) -> ! {
    // SAFETY: Does not return, so nothing is seen half done.
    unsafe { libc::_exit(status) }
}

/// SIGKILL. An error means that it is gone.
pub(crate) fn kill(pid: Pid) {
    // SAFETY: A number and a number.
    unsafe { libc::kill(pid, libc::SIGKILL) };
}

/// A process that does nothing until this is dropped.
#[derive(Debug)]
pub(crate) struct Stopped(Pid);

impl Stopped {
    /// Stops a child that has not been waited for.
    pub(crate) fn stop(pid: u32) -> Result<Self> {
        let pid = Pid::try_from(pid)?;
        // SAFETY: A number and a number.
        let ret = unsafe { libc::kill(pid, libc::SIGSTOP) };
        ensure!(ret == 0, "SIGSTOP: {}", io::Error::last_os_error());
        Ok(Self(pid))
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        // SAFETY: A number and a number.
        unsafe { libc::kill(self.0, libc::SIGCONT) };
    }
}

/// SIGKILL to this process.
pub(crate) fn die() -> ! {
    kill(Pid::try_from(std::process::id()).unwrap_or(0));
    leave(1)
}

/// The parent, which is another one when that has ended.
pub(crate) fn parent() -> Pid {
    // SAFETY: Takes and touches nothing.
    unsafe { libc::getppid() }
}

/// Time that has passed in jiffies, in which the kernel measures its own intervals.
pub(crate) fn jiffies() -> Result<Duration> {
    // SAFETY: Takes no pointer that it would use, and says what the kernel's count is, in units that do not change.
    let (now, hz) = unsafe {
        (
            libc::times(ptr::null_mut()),
            libc::sysconf(libc::_SC_CLK_TCK),
        )
    };
    ensure!(now >= 0 && hz > 0, "times: {}", io::Error::last_os_error());
    // CAST: Neither is negative.
    Ok(Duration::from_secs(now as u64) / hz as u32)
}

/// The kernel's page.
pub(crate) fn page_size() -> Result<u64> {
    // SAFETY: Takes a number and gives one.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    u64::try_from(size)
        .ok()
        .filter(|size| size.is_power_of_two())
        .with_context(|| format!("a page of {size} bytes"))
}

/// Makes processes whose parents end children of this one.
pub(crate) fn adopt_orphans() -> Result<()> {
    // SAFETY: An option with a number.
    let ret = unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) };
    ensure!(
        ret == 0,
        "PR_SET_CHILD_SUBREAPER: {}",
        io::Error::last_os_error()
    );
    Ok(())
}

/// What [`reap`] found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reaped {
    /// There is no such child.
    Nobody,
    /// None has ended yet.
    NotYet,
    Child(Pid, Ended),
}

/// Takes note of the end of a child: of this one, or of any.
pub(crate) fn reap(child: Option<Pid>, wait: bool) -> Result<Reaped> {
    let flags = if wait { 0 } else { libc::WNOHANG };
    let mut status = 0;
    loop {
        // SAFETY: `status` is ours to write.
        let pid = unsafe { libc::waitpid(child.unwrap_or(-1), &mut status, flags) };
        if pid == 0 {
            return Ok(Reaped::NotYet);
        }
        if pid > 0 {
            let ended = if libc::WIFEXITED(status) {
                Ended::Exited(libc::WEXITSTATUS(status))
            } else {
                Ended::Killed(libc::WTERMSIG(status))
            };
            return Ok(Reaped::Child(pid, ended));
        }
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::EINTR) => {}
            Some(libc::ECHILD) => return Ok(Reaped::Nobody),
            _ => bail!("waitpid: {error}"),
        }
    }
}

/// A forked child that waits for a word before it does its part.
#[derive(Debug)]
pub(crate) struct Forked {
    pid: Option<Pid>,
    word: Option<UnixStream>,
}

impl Forked {
    /// Forks. The child runs `body` after [`Forked::go`], and exits with what it returns. Only for a process of one thread.
    pub(crate) fn start(body: impl FnOnce() -> i32) -> Result<Self> {
        let (mut reader, writer) = UnixStream::pair()?;
        let writer = Cell::new(Some(writer));
        let pid = fork(|| {
            drop(writer.take());
            // The end of the stream is the word.
            match io::Read::read_to_end(&mut reader, &mut Vec::new()) {
                Ok(_) => body(),
                Err(_) => 255,
            }
        })?;
        Ok(Self {
            pid: Some(pid),
            word: writer.take(),
        })
    }

    /// Gives the word.
    pub(crate) fn go(&mut self) {
        self.word = None;
    }

    /// Its process number, until it was waited for.
    pub(crate) fn id(&self) -> Option<u32> {
        self.pid.and_then(|pid| u32::try_from(pid).ok())
    }

    /// Gives the word if need be, and returns the status that the child exits with.
    pub(crate) fn wait(mut self) -> Result<i32> {
        self.reap()
    }

    fn reap(&mut self) -> Result<i32> {
        self.go();
        let pid = self.pid.take();
        match reap(pid, true)? {
            Reaped::Child(_, Ended::Exited(status)) => Ok(status),
            other => bail!("the forked child: {other:?}"),
        }
    }
}

impl Drop for Forked {
    fn drop(&mut self) {
        if self.pid.is_some() {
            // Its case has failed already.
            let _ = self.reap();
        }
    }
}

/// Runs `body` in a forked child and returns the status that it exits with. Only for a process of one thread.
pub(crate) fn in_forked_child(body: impl FnOnce() -> i32) -> Result<i32> {
    Forked::start(body)?.wait()
}

/// Numbers that a process shares with those that it forks, zero at first.
#[derive(Debug)]
pub(crate) struct SharedWords {
    base: NonNull<AtomicU64>,
    len: usize,
}

// SAFETY: Nothing but atomics is in it.
unsafe impl Send for SharedWords {}
// SAFETY: As above.
unsafe impl Sync for SharedWords {}

impl SharedWords {
    pub(crate) fn new(len: usize) -> Result<Self> {
        let bytes = len.checked_mul(size_of::<AtomicU64>()).context("length")?;
        // SAFETY: A new mapping.
        let base = unsafe {
            libc::mmap(
                ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        ensure!(
            base != libc::MAP_FAILED,
            "shared memory: {}",
            io::Error::last_os_error()
        );
        let base = NonNull::new(base.cast()).context("mapped at 0")?;
        Ok(Self { base, len })
    }

    pub(crate) fn all(&self) -> &[AtomicU64] {
        // SAFETY: The mapping holds so many words, any bytes are an atomic, and it is unmapped with `self`.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.len) }
    }
}

impl Drop for SharedWords {
    fn drop(&mut self) {
        // SAFETY: Made by `new` with this length; borrows of it have ended.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len * size_of::<AtomicU64>()) };
    }
}

/// Room for one descriptor's control message, aligned as it has to be.
#[repr(C, align(8))]
struct Control([u8; 24]);

/// Hands a descriptor to whoever receives from the other end; whether it was taken. Does not wait.
pub(crate) fn send_descriptor(to: BorrowedFd<'_>, descriptor: RawFd) -> Result<bool> {
    let mut byte = [1u8];
    let mut vector = libc::iovec {
        iov_base: byte.as_mut_ptr().cast(),
        iov_len: byte.len(),
    };
    let mut control = Control([0; 24]);
    // SAFETY: All zeros is a message without anything.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &mut vector;
    message.msg_iovlen = 1;
    message.msg_control = control.0.as_mut_ptr().cast();
    message.msg_controllen = control.0.len();
    // SAFETY: The control buffer has room for a header and one descriptor, and is aligned for the header.
    unsafe {
        let header = libc::CMSG_FIRSTHDR(&message);
        (*header).cmsg_level = libc::SOL_SOCKET;
        (*header).cmsg_type = libc::SCM_RIGHTS;
        (*header).cmsg_len = libc::CMSG_LEN(size_of::<RawFd>() as u32) as usize;
        libc::CMSG_DATA(header)
            .cast::<RawFd>()
            .write_unaligned(descriptor);
    }
    // SAFETY: The message and all that it points to live here.
    let sent = unsafe { libc::sendmsg(to.as_raw_fd(), &message, libc::MSG_DONTWAIT) };
    if sent >= 0 {
        return Ok(true);
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::EAGAIN | libc::ENOBUFS | libc::ETOOMANYREFS) => Ok(false),
        _ => bail!("SCM_RIGHTS: {error}"),
    }
}

/// Takes a descriptor that was handed over, if one was. Does not wait.
pub(crate) fn receive_descriptor(from: BorrowedFd<'_>) -> Result<Option<OwnedFd>> {
    let mut byte = [0u8];
    let mut vector = libc::iovec {
        iov_base: byte.as_mut_ptr().cast(),
        iov_len: byte.len(),
    };
    let mut control = Control([0; 24]);
    // SAFETY: All zeros is a message without anything.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &mut vector;
    message.msg_iovlen = 1;
    message.msg_control = control.0.as_mut_ptr().cast();
    message.msg_controllen = control.0.len();
    let flags = libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC;
    // SAFETY: The message and all that it points to live here, with their lengths.
    if unsafe { libc::recvmsg(from.as_raw_fd(), &mut message, flags) } < 0 {
        let error = io::Error::last_os_error();
        return match error.raw_os_error() {
            Some(libc::EAGAIN | libc::EINTR) => Ok(None),
            _ => bail!("SCM_RIGHTS: {error}"),
        };
    }
    // SAFETY: The kernel has filled in the control buffer as `message` says; a header of this type has a descriptor, which
    // is new and ours.
    unsafe {
        let header = libc::CMSG_FIRSTHDR(&message);
        if header.is_null()
            || (*header).cmsg_level != libc::SOL_SOCKET
            || (*header).cmsg_type != libc::SCM_RIGHTS
        {
            return Ok(None);
        }
        let descriptor = libc::CMSG_DATA(header).cast::<RawFd>().read_unaligned();
        Ok(Some(OwnedFd::from_raw_fd(descriptor)))
    }
}

/// Closes a descriptor behind the back of the library that it belongs to, which must never use it again.
pub(crate) fn close_behind(descriptor: RawFd) {
    // SAFETY: The caller forgets whatever has the descriptor, so nobody closes or uses its number again.
    unsafe { libc::close(descriptor) };
}

/// Makes this process, a forked child, another user's: real, effective and saved.
pub(crate) fn become_user(uid: u32) -> io::Result<()> {
    // SAFETY: Changes credentials alone.
    match unsafe { libc::setuid(uid) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Sets RLIMIT_MEMLOCK, which binds whoever is not root, and which a process may raise again.
pub(crate) fn limit_locked_memory(bytes: u64) -> io::Result<()> {
    let limit = libc::rlimit {
        rlim_cur: bytes,
        rlim_max: libc::RLIM_INFINITY,
    };
    // SAFETY: The limit is read alone.
    match unsafe { libc::setrlimit(libc::RLIMIT_MEMLOCK, &limit) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Forks a child that keeps what the parent had open, runs `body` in the parent, then lets the child end and waits for it:
/// whatever `body` closes, the child closes last. It does so while it runs: of a process that exits the module asks for the
/// pins before it puts them. Only for a process of one thread.
pub(crate) fn beside_forked_child<T>(body: impl FnOnce() -> Result<T>) -> Result<T> {
    // A thread that has given its result may still be on its way out.
    let alone = wait_until(Duration::from_secs(60), || Ok(threads()? == 1))?;
    ensure!(alone, "fork with several threads");
    let child = Forked::start(|| {
        // SAFETY: No object of this process uses a descriptor any more; the child only exits.
        unsafe { libc::close_range(3, u32::MAX, 0) }
    })?;
    let result = body();
    let status = child.wait()?;
    ensure!(status == 0, "the forked child ended with {status}");
    result
}

/// The calling thread, as /proc/self/task names it.
pub(crate) fn thread_id() -> i32 {
    // SAFETY: Has no arguments and cannot fail.
    unsafe { libc::gettid() }
}

/// Switches the machine off, whatever still runs or hangs in it.
pub(crate) fn power_off() -> io::Error {
    // SAFETY: The machine is the test's own; nothing in it is to be kept.
    unsafe { libc::reboot(libc::LINUX_REBOOT_CMD_POWER_OFF) };
    io::Error::last_os_error()
}

/// Loads a module, as a call of this very thread.
pub(crate) fn load_module(file: &File, parameters: &str) -> io::Result<()> {
    let parameters = std::ffi::CString::new(parameters)?;
    // SAFETY: An open file, a NUL-terminated string, and no flags.
    match unsafe {
        libc::syscall(
            libc::SYS_finit_module,
            file.as_raw_fd(),
            parameters.as_ptr(),
            0,
        )
    } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Lifts RLIMIT_MEMLOCK.
pub(crate) fn lock_any_memory() -> io::Result<()> {
    limit_locked_memory(libc::RLIM_INFINITY)
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

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn is_running(&mut self) -> Result<bool> {
        Ok(self.child.try_wait()?.is_none())
    }

    /// Waits for the end, kills when the time is up; `status` is None then.
    pub(crate) fn finish(mut self, timeout: Duration) -> Result<Finished> {
        let mut patience = patience(timeout);
        while self.is_running()? {
            if patience.is_over() {
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
pub(crate) fn unnamed_file() -> Result<File> {
    // SAFETY: A NUL-terminated name and flags.
    let fd = unsafe { libc::memfd_create(c"output".as_ptr(), libc::MFD_CLOEXEC) };
    ensure!(fd >= 0, "memfd_create: {}", io::Error::last_os_error());
    // SAFETY: The descriptor was just made and has no other owner.
    Ok(File::from(unsafe { OwnedFd::from_raw_fd(fd) }))
}

/// A pipe: the end to read from, and the one to write to.
pub(crate) fn pipe() -> Result<(File, File)> {
    let mut ends = [-1; 2];
    // SAFETY: Room for two descriptors.
    let ret = unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) };
    ensure!(ret == 0, "pipe2: {}", io::Error::last_os_error());
    // SAFETY: Both descriptors were just made and have no other owner.
    let [reader, writer] = ends.map(|end| File::from(unsafe { OwnedFd::from_raw_fd(end) }));
    Ok((reader, writer))
}

/// Returns the kernel's major and minor version: (6, 1) for "6.1.0-50-amd64".
pub(crate) fn kernel_version() -> Result<(u32, u32)> {
    let release = read_line("/proc/sys/kernel/osrelease")?;
    let mut numbers = release
        .split(|character: char| !character.is_ascii_digit())
        .map(str::parse);
    match (numbers.next(), numbers.next()) {
        (Some(Ok(major)), Some(Ok(minor))) => Ok((major, minor)),
        _ => bail!("no version: {release}"),
    }
}

/// The factor by which the kernel is slower than the usual one: `TESTVM_SLOWER`.
pub(crate) fn slower() -> u32 {
    let slower = std::env::var("TESTVM_SLOWER").ok();
    slower.and_then(|text| text.parse().ok()).unwrap_or(1)
}

/// Patience with something that takes this long at most: more on a slower kernel.
pub(crate) fn patience(timeout: Duration) -> Patience {
    Patience::new(timeout * slower())
}

/// Waits until `done` says so; false when the time is up.
pub(crate) fn wait_until(
    timeout: Duration,
    mut done: impl FnMut() -> Result<bool>,
) -> Result<bool> {
    let mut patience = patience(timeout);
    loop {
        if done()? {
            return Ok(true);
        }
        if patience.is_over() {
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

/// What a thread does, by its folder in /proc: R, S, D, T, …; None once it is gone.
pub(crate) fn state(folder: &str) -> Option<char> {
    let stat = fs::read_to_string(format!("{folder}/stat")).ok()?;
    // After the name, which may contain anything.
    stat.rsplit_once(") ")?.1.chars().next()
}

/// The kernel's log from a moment on.
#[derive(Debug)]
pub(crate) struct KernelLog {
    file: File,
    /// The number of the next record, once one was seen.
    next: Cell<Option<u64>>,
}

impl KernelLog {
    fn open(from: io::SeekFrom) -> Result<Self> {
        let mut file = fs::OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NONBLOCK)
            .open("/dev/kmsg")
            .context("/dev/kmsg")?;
        io::Seek::seek(&mut file, from).context("/dev/kmsg")?;
        Ok(Self {
            file,
            next: Cell::new(None),
        })
    }

    /// What is logged from now on.
    pub(crate) fn from_now() -> Result<Self> {
        Self::open(io::SeekFrom::End(0))
    }

    /// The lines that have come since the last look. An error where some of them are lost.
    pub(crate) fn lines(&self) -> Result<Vec<String>> {
        let mut all = Vec::new();
        let mut record = [0u8; 8192];
        loop {
            match io::Read::read(&mut &self.file, &mut record) {
                Ok(0) => return Ok(all),
                Ok(got) => {
                    let text = String::from_utf8_lossy(&record[..got]);
                    let (number, line) = log_record(&text).with_context(|| text.to_string())?;
                    let lost = self.next.get().is_some_and(|next| next != number);
                    ensure!(!lost, "the kernel's log has lost lines before {number}");
                    self.next.set(Some(number + 1));
                    all.push(line.to_owned());
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(all),
                // EPIPE: the record was overwritten before it was read.
                Err(error) => return Err(error).context("/dev/kmsg"),
            }
        }
    }
}

/// Number and text of a record of /dev/kmsg.
fn log_record(record: &str) -> Option<(u64, &str)> {
    let (head, text) = record.split_once(';')?;
    let number = head.split(',').nth(1)?.parse().ok()?;
    Some((number, text.lines().next().unwrap_or_default()))
}

/// The kernel log's last `lines` lines, for a failure's message. Empty where it cannot be read.
pub(crate) fn kernel_log_tail(lines: usize) -> Vec<String> {
    let all = KernelLog::open(io::SeekFrom::Start(0)).and_then(|log| log.lines());
    let mut all = all.unwrap_or_default();
    all.split_off(all.len().saturating_sub(lines))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_has_a_number_and_a_line() {
        assert_eq!(
            log_record("6,339,5140900,-;NET: a; b\n SUBSYSTEM=net\n"),
            Some((339, "NET: a; b"))
        );
        assert_eq!(log_record("6,339,5140900,-"), None);
        assert_eq!(log_record("6;text"), None);
    }
}
