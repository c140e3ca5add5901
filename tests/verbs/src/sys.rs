// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Functions for address space, processes and files, including `unsafe` libc calls for which rustix
//! has no safe function. `peermem-verbs` wraps the other calls: mappings that hardware writes to,
//! and the stand-in GPU's ioctls.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::ffi::{CString, OsStr};
use std::fs::File;
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;
use std::time::Duration;
use std::{fs, io, ptr};

use anyhow::{bail, ensure, Context, Result};
pub(crate) use peermem_verbs::memory::{map_file, open_rw, Mapping, Placement, Span};
pub(crate) use peermem_verbs::patience::Patience;
use rustix::io::Errno;
pub(crate) use rustix::process::{getpid, Pid};
use rustix::process::{Resource, Rlimit, Signal, WaitOptions};
use rustix::{net, process, system};

use crate::module;

/// Returns a free address with room for `len` bytes. The address is aligned to `align`, a power of
/// two of at least the page size.
pub(crate) fn free_address(len: u64, align: u64) -> Result<u64> {
    let room = len.checked_add(align).context("length overflow")?;
    let reserved = Mapping::reserve(usize::try_from(room)?)?;
    // The range is free again once `reserved` is dropped. This program maps nothing in between.
    reserved
        .addr()
        .checked_next_multiple_of(align)
        .context("address overflow")
}

/// End of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ended {
    Exited(i32),
    Killed(i32),
}

/// Returns the number of threads in this process.
pub(crate) fn threads() -> Result<usize> {
    Ok(fs::read_dir("/proc/self/task")?.count())
}

/// Forks a child that runs `body` and exits with its result. The calling process must have only one
/// thread.
pub(crate) fn fork(body: impl FnOnce() -> i32) -> Result<Pid> {
    let threads = threads()?;
    ensure!(threads == 1, "fork with {threads} threads");
    // SAFETY: The process has one thread, so the child is a full copy and may run any code.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        leave(body());
    }
    ensure!(pid > 0, "fork: {}", io::Error::last_os_error());
    Pid::from_raw(pid).context("fork")
}

/// Exits at once, without destructors. The kernel cleans up.
pub(crate) fn leave(status: i32) -> ! {
    // SAFETY: The call takes no pointer and does not return.
    unsafe { libc::_exit(status) }
}

/// Sends SIGKILL. An error means that the process is gone.
pub(crate) fn kill(pid: Pid) {
    let _ = process::kill_process(pid, Signal::KILL);
}

/// A process that is stopped until this value is dropped.
#[derive(Debug)]
pub(crate) struct Stopped(Pid);

impl Stopped {
    /// Stops a child that has not been waited for.
    pub(crate) fn stop(pid: u32) -> Result<Self> {
        let pid = Pid::from_raw(i32::try_from(pid)?).context("process 0")?;
        process::kill_process(pid, Signal::STOP).context("SIGSTOP")?;
        Ok(Self(pid))
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        let _ = process::kill_process(self.0, Signal::CONT);
    }
}

/// Kills this process with SIGKILL.
pub(crate) fn die() -> ! {
    kill(getpid());
    leave(1)
}

/// Returns the parent process. If the original parent has ended, returns the process that has
/// adopted the calling process.
pub(crate) fn parent() -> Option<Pid> {
    process::getppid()
}

/// Returns the current time by the kernel's count of jiffies. The kernel measures its own time
/// limits in jiffies.
pub(crate) fn jiffies() -> Result<Duration> {
    // SAFETY: `times()` accepts a null pointer, and then only returns the kernel's count.
    let now = unsafe { libc::times(ptr::null_mut()) };
    let hz = u32::try_from(rustix::param::clock_ticks_per_second())?;
    ensure!(now >= 0 && hz > 0, "times: {}", io::Error::last_os_error());
    Ok(Duration::from_secs(u64::try_from(now)?) / hz)
}

/// Returns the size of the kernel's pages, in bytes.
pub(crate) fn page_size() -> u64 {
    rustix::param::page_size() as u64
}

/// Makes this process the parent of descendants whose parents end.
pub(crate) fn adopt_orphans() -> Result<()> {
    process::set_child_subreaper(Some(getpid())).context("PR_SET_CHILD_SUBREAPER")
}

/// Result of [`reap`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reaped {
    /// There is no such child.
    Nobody,
    /// No child has ended yet.
    NotYet,
    Child(Pid, Ended),
}

/// Reaps `child`, or any child if `child` is `None`. If `wait` is set, waits until a child ends.
pub(crate) fn reap(child: Option<Pid>, wait: bool) -> Result<Reaped> {
    let flags = if wait {
        WaitOptions::empty()
    } else {
        WaitOptions::NOHANG
    };
    let wait = || match child {
        Some(_) => process::waitpid(child, flags),
        None => process::wait(flags),
    };
    match rustix::io::retry_on_intr(wait) {
        Ok(None) => Ok(Reaped::NotYet),
        Ok(Some((pid, status))) => {
            let ended = match (status.exit_status(), status.terminating_signal()) {
                (Some(status), _) => Ended::Exited(status),
                (None, Some(signal)) => Ended::Killed(signal),
                (None, None) => bail!("waitpid: {status:?}"),
            };
            Ok(Reaped::Child(pid, ended))
        }
        Err(Errno::CHILD) => Ok(Reaped::Nobody),
        Err(error) => bail!("waitpid: {error}"),
    }
}

/// A forked child that starts its work when its parent calls [`Forked::go`].
#[derive(Debug)]
pub(crate) struct Forked {
    pid: Option<Pid>,
    word: Option<UnixStream>,
}

impl Forked {
    /// Forks a child that runs `body` after [`Forked::go`], and exits with its result. The calling
    /// process must have only one thread.
    pub(crate) fn start(body: impl FnOnce() -> i32) -> Result<Self> {
        let (mut reader, writer) = UnixStream::pair()?;
        let writer = Cell::new(Some(writer));
        let pid = fork(|| {
            drop(writer.take());
            // The stream ends when the parent calls [`Forked::go`].
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

    /// Tells the child to start.
    pub(crate) fn go(&mut self) {
        self.word = None;
    }

    /// Returns the child's process number, or `None` after it was waited for.
    pub(crate) fn id(&self) -> Option<u32> {
        self.pid
            .and_then(|pid| u32::try_from(pid.as_raw_nonzero().get()).ok())
    }

    /// Starts the child if necessary, and returns its exit status.
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
            // A child that is still unreaped here belongs to a failed case, so its status does not
            // matter.
            let _ = self.reap();
        }
    }
}

/// Runs `body` in a forked child and returns its exit status. The calling process must have only
/// one thread.
pub(crate) fn in_forked_child(body: impl FnOnce() -> i32) -> Result<i32> {
    Forked::start(body)?.wait()
}

/// Numbers that a process shares with its forked children, initially zero.
#[derive(Debug)]
pub(crate) struct SharedWords {
    base: NonNull<AtomicU64>,
    len: usize,
}

// SAFETY: The value owns its mapping, which has only atomics and belongs to no thread.
unsafe impl Send for SharedWords {}
// SAFETY: The mapping has only atomics, which several threads may access.
unsafe impl Sync for SharedWords {}

impl SharedWords {
    pub(crate) fn new(len: usize) -> Result<Self> {
        let bytes = len.checked_mul(size_of::<AtomicU64>()).context("length")?;
        // SAFETY: The kernel chooses the address, so no other mapping changes.
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
        // SAFETY: The mapping has `len` words and starts at a page. Any bytes are a valid atomic.
        // The mapping lives as long as `self`.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.len) }
    }
}

impl Drop for SharedWords {
    fn drop(&mut self) {
        // SAFETY: `new` made the mapping with this length, and no borrow of it is left.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len * size_of::<AtomicU64>()) };
    }
}

/// Sends a descriptor to the receiver at the other end. Returns `true` if the descriptor was sent.
/// Does not wait.
pub(crate) fn send_descriptor(to: BorrowedFd<'_>, descriptor: RawFd) -> Result<bool> {
    // SAFETY: The caller keeps the descriptor open until this returns.
    let descriptors = [unsafe { BorrowedFd::borrow_raw(descriptor) }];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = net::SendAncillaryBuffer::new(&mut space);
    ensure!(
        control.push(net::SendAncillaryMessage::ScmRights(&descriptors)),
        "SCM_RIGHTS: no room"
    );
    let byte = [io::IoSlice::new(&[1])];
    match net::sendmsg(to, &byte, &mut control, net::SendFlags::DONTWAIT) {
        Ok(_) => Ok(true),
        Err(Errno::AGAIN | Errno::NOBUFS | Errno::TOOMANYREFS) => Ok(false),
        Err(error) => bail!("SCM_RIGHTS: {error}"),
    }
}

/// Receives a descriptor, if there is one. Does not wait.
pub(crate) fn receive_descriptor(from: BorrowedFd<'_>) -> Result<Option<OwnedFd>> {
    let mut byte = [0];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = net::RecvAncillaryBuffer::new(&mut space);
    let flags = net::RecvFlags::DONTWAIT | net::RecvFlags::CMSG_CLOEXEC;
    let mut vector = [io::IoSliceMut::new(&mut byte)];
    match net::recvmsg(from, &mut vector, &mut control, flags) {
        Ok(_) => {}
        Err(Errno::AGAIN | Errno::INTR) => return Ok(None),
        Err(error) => bail!("SCM_RIGHTS: {error}"),
    }
    let descriptor = control.drain().find_map(|message| match message {
        net::RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    });
    Ok(descriptor)
}

/// Closes a descriptor that a library owns. The library must never use the descriptor again.
pub(crate) fn close_behind(descriptor: RawFd) {
    // SAFETY: The caller forgets the owner of the descriptor, so nobody closes or uses its number
    // again.
    unsafe { libc::close(descriptor) };
}

/// Sets the real, effective and saved user of this process, which is a forked child.
pub(crate) fn become_user(uid: u32) -> io::Result<()> {
    // SAFETY: The call takes no pointer and only changes credentials.
    match unsafe { libc::setuid(uid) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Sets RLIMIT_MEMLOCK. The limit does not bind root, and the process may raise the limit again.
/// `None` means no limit.
pub(crate) fn limit_locked_memory(bytes: Option<u64>) -> io::Result<()> {
    let limit = Rlimit {
        current: bytes,
        maximum: None,
    };
    Ok(process::setrlimit(Resource::Memlock, limit)?)
}

/// Runs `body` in the parent while a forked child has all the parent's open files. Then lets the
/// child close these files and waits for the child. If `body` closes a file, the child is the last
/// process to close the file. The child closes its files before it exits, because for an exiting
/// process the module first asks nvidia.ko whether a put is possible. The calling process must have
/// only one thread.
pub(crate) fn beside_forked_child<T>(body: impl FnOnce() -> Result<T>) -> Result<T> {
    // A thread that has sent its result may not be gone yet.
    let alone = wait_until(Duration::from_secs(60), || Ok(threads()? == 1))?;
    ensure!(alone, "fork with several threads");
    let child = Forked::start(|| {
        // SAFETY: No object of this process uses a descriptor any more. The child only exits.
        unsafe { libc::close_range(3, u32::MAX, 0) }
    })?;
    let result = body();
    let status = child.wait()?;
    ensure!(status == 0, "the forked child ended with {status}");
    result
}

/// Returns the calling thread's ID, which is the name of its folder in /proc/self/task.
pub(crate) fn thread_id() -> i32 {
    rustix::thread::gettid().as_raw_nonzero().get()
}

/// Switches the machine off, even if processes run or hang.
pub(crate) fn power_off() -> io::Error {
    match system::reboot(system::RebootCommand::PowerOff) {
        Ok(()) => io::Error::other("still on"),
        Err(error) => error.into(),
    }
}

/// Loads a module in the calling thread.
pub(crate) fn load_module(file: &File, parameters: &str) -> io::Result<()> {
    Ok(system::finit_module(file, &CString::new(parameters)?, 0)?)
}

/// Lifts RLIMIT_MEMLOCK.
pub(crate) fn lock_any_memory() -> io::Result<()> {
    limit_locked_memory(None)
}

/// Tries to unload a module (delete_module with O_NONBLOCK, which never waits for users).
pub(crate) fn unload_module(name: &str) -> io::Result<()> {
    Ok(system::delete_module(
        &CString::new(name)?,
        libc::O_NONBLOCK,
    )?)
}

/// Result of a program.
#[derive(Debug)]
pub(crate) struct Finished {
    pub(crate) status: Option<ExitStatus>,
    pub(crate) output: String,
}

impl Finished {
    pub(crate) fn success(&self) -> bool {
        self.status.is_some_and(|status| status.success())
    }

    /// Checks that the program failed and that its output contains `words`.
    pub(crate) fn failed_with(&self, words: &str) -> Result<()> {
        let failed = !self.success() && self.output.contains(words);
        ensure!(failed, "{:?}: {}", self.status, self.tail(10));
        Ok(())
    }

    /// Returns the last lines of the output, for an error message.
    pub(crate) fn tail(&self, lines: usize) -> String {
        let all: Vec<_> = self.output.lines().collect();
        all[all.len().saturating_sub(lines)..].join("\n")
    }
}

/// A running program. The program's output goes to a file, so the program never waits for a reader.
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

    /// Returns the output so far.
    pub(crate) fn so_far(&self) -> Result<String> {
        whole(&self.output)
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn is_running(&mut self) -> Result<bool> {
        Ok(self.child.try_wait()?.is_none())
    }

    /// Waits for the end of the program. Kills the program when the time is up, and returns `None`
    /// as its status.
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
        // An error means that the program has already ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Time limit of [`run`].
const PROGRAM: Duration = Duration::from_secs(120);

/// Runs a program to its end.
pub(crate) fn run(
    program: &str,
    arguments: impl IntoIterator<Item = impl AsRef<OsStr>>,
) -> Result<Finished> {
    Running::start(Command::new(program).args(arguments))?.finish(PROGRAM)
}

/// Runs a program that must succeed. Returns its output.
pub(crate) fn succeed(
    program: &str,
    arguments: impl IntoIterator<Item = impl AsRef<OsStr>>,
) -> Result<String> {
    let finished = run(program, arguments)?;
    let said = finished.tail(5);
    ensure!(
        finished.success(),
        "{program}: {:?}: {said}",
        finished.status
    );
    Ok(finished.output)
}

/// Makes a file in memory that vanishes with its last descriptor.
pub(crate) fn unnamed_file() -> Result<File> {
    let file = rustix::fs::memfd_create("output", rustix::fs::MemfdFlags::CLOEXEC)?;
    Ok(File::from(file))
}

/// Returns the content of a file from its start, whatever the current file position.
pub(crate) fn whole(file: &File) -> Result<String> {
    let mut bytes = vec![0; usize::try_from(file.metadata()?.len())?];
    std::os::unix::fs::FileExt::read_exact_at(file, &mut bytes, 0)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Makes a pipe. Returns the end to read from, and the end to write to.
pub(crate) fn pipe() -> Result<(File, File)> {
    let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    Ok((File::from(reader), File::from(writer)))
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

/// Returns the factor by which the kernel is slower than the default kernel: `TESTVM_SLOWER`.
pub(crate) fn slower() -> u32 {
    let slower = std::env::var("TESTVM_SLOWER").ok();
    slower.and_then(|text| text.parse().ok()).unwrap_or(1)
}

/// Returns a time limit that is longer on a slower kernel.
pub(crate) fn patience(timeout: Duration) -> Patience {
    Patience::new(timeout * slower())
}

/// Waits until `done` returns `true`. Returns `false` when the time is up.
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

/// Returns the names in a folder.
pub(crate) fn names(folder: impl AsRef<Path>) -> Result<BTreeSet<String>> {
    let folder = folder.as_ref();
    fs::read_dir(folder)
        .with_context(|| folder.display().to_string())?
        .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
        .collect()
}

/// Reads a file of /sys or /proc without the newline at its end.
pub(crate) fn read_line(path: &str) -> Result<String> {
    Ok(fs::read_to_string(path)
        .with_context(|| path.to_owned())?
        .trim_end()
        .to_owned())
}

/// Returns a thread's state (R, S, D, T, …) from its folder in /proc, or `None` once the thread is
/// gone.
pub(crate) fn state(folder: &str) -> Option<char> {
    let stat = fs::read_to_string(format!("{folder}/stat")).ok()?;
    // Skips the thread's name, which may contain spaces and parentheses.
    stat.rsplit_once(") ")?.1.chars().next()
}

/// A reader of the kernel's log that starts at a given position.
#[derive(Debug)]
pub(crate) struct KernelLog {
    file: File,
    /// Number of the next record. `None` before the first record is read.
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

    /// Opens the log for lines from now on.
    pub(crate) fn from_now() -> Result<Self> {
        Self::open(io::SeekFrom::End(0))
    }

    /// Returns the lines of [`Self::lines`] that the module wrote.
    pub(crate) fn of_module(&self) -> Result<Vec<String>> {
        let mut lines = self.lines()?;
        lines.retain(|line| module::wrote(line));
        Ok(lines)
    }

    /// Returns the lines since the last call. Fails if some are lost.
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

/// Returns the number and text of a record of /dev/kmsg.
fn log_record(record: &str) -> Option<(u64, &str)> {
    let (head, text) = record.split_once(';')?;
    let number = head.split(',').nth(1)?.parse().ok()?;
    Some((number, text.lines().next().unwrap_or_default()))
}

/// Returns the last `lines` lines of the kernel log for an error message, or nothing if the log
/// cannot be read.
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

    #[test]
    fn a_descriptor_goes_over_a_socket() {
        use std::os::fd::{AsFd as _, AsRawFd as _};
        let (near, far) = std::os::unix::net::UnixDatagram::pair().expect("a pair");
        assert!(receive_descriptor(far.as_fd()).expect("nothing").is_none());
        let (reader, mut writer) = pipe().expect("a pipe");
        assert!(send_descriptor(near.as_fd(), reader.as_raw_fd()).expect("sent"));
        drop(reader);
        let taken = receive_descriptor(far.as_fd()).expect("received");
        let mut taken = File::from(taken.expect("a descriptor"));
        io::Write::write_all(&mut writer, b"word").expect("written");
        drop(writer);
        let text = io::read_to_string(&mut taken).expect("read");
        assert_eq!(text, "word");
    }

    #[test]
    fn children_end_in_two_ways() {
        let child = |script: &str| {
            let child = Command::new("sh").args(["-c", script]).spawn();
            Pid::from_raw(child.expect("a child").id() as i32).expect("a number")
        };
        let ended = child("exit 3");
        let reaped = reap(Some(ended), true).expect("reaped");
        assert_eq!(reaped, Reaped::Child(ended, Ended::Exited(3)));
        assert_eq!(reap(Some(ended), false).expect("none"), Reaped::Nobody);
        let killed = child("sleep 60");
        assert_eq!(reap(Some(killed), false).expect("alive"), Reaped::NotYet);
        kill(killed);
        let reaped = reap(Some(killed), true).expect("reaped");
        assert_eq!(reaped, Reaped::Child(killed, Ended::Killed(libc::SIGKILL)));
    }
}
