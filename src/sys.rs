// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! The few kernel services that the `kernel` crate has no abstraction for.
//!
//! C headers: [`include/linux/scatterlist.h`](srctree/include/linux/scatterlist.h),
//! [`include/linux/dma-mapping.h`](srctree/include/linux/dma-mapping.h),
//! [`include/linux/pci.h`](srctree/include/linux/pci.h),
//! [`include/linux/module.h`](srctree/include/linux/module.h),
//! [`include/linux/debugfs.h`](srctree/include/linux/debugfs.h),
//! [`include/linux/tracepoint.h`](srctree/include/linux/tracepoint.h); C side: [`sys_c.c`](sys_c.c),
//! [`memory_peers.c`](memory_peers.c).
//!
//! Knows neither NVIDIA's interface nor ib_core's.

use core::cell::UnsafeCell;
use core::marker::PhantomData;
use core::marker::PhantomPinned;
use core::mem::offset_of;
use core::mem::MaybeUninit;
use core::ops::Deref;
use core::ops::DerefMut;
use core::ptr;
use core::ptr::NonNull;

use kernel::bindings;
use kernel::fmt;
use kernel::mm::virt::flags;
use kernel::prelude::*;
use kernel::seq_file::SeqFile;
use kernel::seq_print;
use kernel::str::CStr;
use kernel::sync::atomic::Atomic;
use kernel::sync::atomic::Full;
use kernel::sync::atomic::Release;
use kernel::sync::global_lock;
use kernel::sync::new_condvar;
use kernel::sync::new_mutex;
use kernel::sync::CondVar;
use kernel::sync::Mutex;
use kernel::sync::SetOnce;
use kernel::task::Task;
use kernel::types::Opaque;

use crate::account::Account;
use crate::c;
use crate::compat;
use crate::extents::Cut;
use crate::extents::Entry;
use crate::extents::Run;
use crate::extents::MAX_STEP;
use crate::record;
use crate::record::Journal;
use crate::record::Refused;
use crate::refusal::Place;
use crate::refusal::Refusal;
use crate::roll;
use crate::roll::Book;
use crate::roll::Event;
use crate::roll::Gpus;
use crate::roll::Living;
use crate::roll::PciAddress;
use crate::tally::Statistics;

/// The parameter `peerdirect_support`.
pub(crate) fn peerdirect_support() -> c_int {
    // SAFETY: Has no preconditions.
    unsafe { c::peermem_peerdirect_support() }
}

/// The parameter `persistent_api_support`.
pub(crate) fn persistent_api_support() -> c_int {
    // SAFETY: Has no preconditions.
    unsafe { c::peermem_persistent_api_support() }
}

/// The parameter `user_limit_mib`.
fn user_limit_mib() -> u32 {
    // SAFETY: Has no preconditions.
    unsafe { c::peermem_user_limit_mib() }
}

/// The parameter `max_pieces`.
pub(crate) fn max_pieces() -> u32 {
    // SAFETY: Has no preconditions.
    unsafe { c::peermem_max_pieces() }
}

/// The module's version, as in `/sys/module`.
pub(crate) fn version() -> &'static CStr {
    // SAFETY: Returns a string literal of the module.
    unsafe { CStr::from_char_ptr(c::peermem_version()) }
}

/// A module that is loaded.
pub(crate) struct Neighbour {
    version: [u8; 32],
    /// Its licence is none that Linux takes for a free one.
    pub(crate) is_proprietary: bool,
}

impl Neighbour {
    /// `None` if no module of that name is loaded, or it is on its way out.
    pub(crate) fn look(name: &CStr) -> Option<Self> {
        let mut version = [0; 32];
        // SAFETY: Both are strings, or room for one, during the call.
        let found = unsafe {
            c::peermem_look_at_module(
                name.as_char_ptr(),
                version.as_mut_ptr().cast(),
                version.len(),
            )
        };
        // CAST: Two small numbers.
        let has = |flag: u32| found as u32 & flag != 0;
        has(c::PEERMEM_LOADED).then(|| Neighbour {
            version,
            is_proprietary: has(c::PEERMEM_PROPRIETARY),
        })
    }

    /// Its version; empty where it does not say.
    pub(crate) fn version(&self) -> &CStr {
        CStr::from_bytes_until_nul(&self.version).unwrap_or_default()
    }
}

/// Whether a fatal signal waits for the calling thread.
pub(crate) fn is_killed() -> bool {
    // SAFETY: Has no preconditions.
    unsafe { c::peermem_is_killed() }
}

/// Whether the calling thread is in `do_exit()`.
pub(crate) fn is_exiting() -> bool {
    // SAFETY: Has no preconditions.
    unsafe { c::peermem_is_exiting() }
}

/// Monotonic time in microseconds.
pub(crate) fn microseconds() -> i64 {
    // SAFETY: Has no preconditions.
    unsafe { c::peermem_microseconds() }
}

/// Keeps the module loaded until dropped.
pub(crate) struct ModuleHold(());

impl ModuleHold {
    /// `None` once the module is on its way out.
    pub(crate) fn try_new() -> Option<Self> {
        // SAFETY: Has no preconditions.
        unsafe { c::peermem_module_hold() }.then(|| ModuleHold(()))
    }
}

impl Drop for ModuleHold {
    fn drop(&mut self) {
        // SAFETY: `self` is a hold that `peermem_module_hold` gave, and is given back once.
        unsafe { c::peermem_module_release() };
    }
}

/// The address of a task, to compare with that of another that is alive.
#[derive(Clone, Copy, Eq, PartialEq)]
pub(crate) struct Thread(usize);

impl Thread {
    /// The calling thread.
    pub(crate) fn current() -> Self {
        Thread(Task::current_raw().addr())
    }
}

/// Runs `f` beside other [`gate_read`]s, and beside no [`gate_write`]. Process context; not
/// re-entrant.
pub(crate) fn gate_read<R>(f: impl FnOnce() -> R) -> R {
    // SAFETY: `down_read()` wants a context that may sleep, which every caller of this module is in:
    // ib_core and nvidia.ko call it in process context alone, and no spinlock of ours is ever held.
    unsafe { c::peermem_gate_read() };
    let result = f();
    // SAFETY: Taken above, by this thread.
    unsafe { c::peermem_gate_read_end() };
    result
}

/// Runs `f` beside no other [`gate_read`] or [`gate_write`]. Process context; not re-entrant.
pub(crate) fn gate_write<R>(f: impl FnOnce() -> R) -> R {
    // SAFETY: As in `gate_read`.
    unsafe { c::peermem_gate_write() };
    let result = f();
    // SAFETY: Taken above, by this thread.
    unsafe { c::peermem_gate_write_end() };
    result
}

/// A [`Mutex`] in memory of its own, for what the persistent flavour guards, and a place on the roll.
pub(crate) struct Lock<T>(Pin<KBox<Locked<T>>>);

/// The order of the fields is the order in which they are dropped.
#[pin_data]
struct Locked<T> {
    #[pin]
    value: Mutex<T>,
    #[pin]
    place: Standing,
}

impl<T: Unpin> Lock<T> {
    /// A lock around `value`.
    pub(crate) fn new(value: T) -> Result<Self, Refusal> {
        // A lock class of its own: it is held across calls to nvidia.ko, a `Monitor` never is.
        let init = pin_init!(Locked {
            value <- new_mutex!(value, "peermem_persistent"),
            place <- Standing::new(),
        });
        let lock = KBox::pin_init(init, GFP_KERNEL).map_err(|_| Refusal::NoMemory)?;
        Ok(Lock(lock))
    }

    /// Runs `f` with the lock held.
    pub(crate) fn with<R>(&self, f: impl FnOnce(&mut T) -> R) -> R {
        f(&mut *self.0.value.lock())
    }

    /// Its place on the roll.
    pub(crate) fn place(&self) -> &Standing {
        &self.0.place
    }
}

/// A [`Mutex`] with a place to wait, in memory of its own, for what the revocable flavour guards, and a
/// place on the roll.
pub(crate) struct Monitor<T>(Pin<KBox<Guarded<T>>>);

#[pin_data]
struct Guarded<T> {
    #[pin]
    value: Mutex<T>,
    #[pin]
    changed: CondVar,
    #[pin]
    place: Standing,
}

impl<T: Unpin> Monitor<T> {
    /// A lock around `value`.
    pub(crate) fn new(value: T) -> Result<Self, Refusal> {
        let init = pin_init!(Guarded {
            value <- new_mutex!(value, "peermem_revocable"),
            changed <- new_condvar!("peermem_revocable"),
            place <- Standing::new(),
        });
        let guarded = KBox::pin_init(init, GFP_KERNEL).map_err(|_| Refusal::NoMemory)?;
        Ok(Monitor(guarded))
    }

    /// Runs `f` with the lock held.
    pub(crate) fn with<R>(&self, f: impl FnOnce(&mut T) -> R) -> R {
        f(&mut *self.0.value.lock())
    }

    /// Sleeps, with the lock released, for as long as `condition` holds.
    pub(crate) fn wait_while(&self, mut condition: impl FnMut(&mut T) -> bool) {
        let mut guard = self.0.value.lock();
        while condition(&mut *guard) {
            self.0.changed.wait(&mut guard);
        }
    }

    /// Makes every thread in [`Monitor::wait_while`] look again.
    pub(crate) fn notify_all(&self) {
        self.0.changed.notify_all();
    }

    /// Its place on the roll.
    pub(crate) fn place(&self) -> &Standing {
        &self.0.place
    }
}

/// The roll's lock, held until dropped: a spinlock. Whoever has it neither sleeps nor calls anybody.
struct RollLock(PhantomData<*mut ()>);

impl RollLock {
    fn new() -> Self {
        // SAFETY: Not held by this thread: see above. Process context.
        unsafe { c::peermem_roll_lock() };
        RollLock(PhantomData)
    }
}

impl Drop for RollLock {
    fn drop(&mut self) {
        // SAFETY: Taken by this thread when this was made.
        unsafe { c::peermem_roll_unlock() };
    }
}

/// The [`Book`] of the roll.
///
/// # Invariants
///
/// Accessed with the roll's lock held alone.
struct BookCell(UnsafeCell<Book>);

// SAFETY: Guarded by the roll's lock by the type invariant.
unsafe impl Sync for BookCell {}

static BOOK: BookCell = BookCell(UnsafeCell::new(Book::new()));

/// A place on the roll.
///
/// # Invariants
///
/// Lies where it does until it is dropped. With the roll's lock not held, `node` is in the tree if and only
/// if `living` is not `None`. `living` is written with the lock held alone.
#[repr(C)]
pub(crate) struct Standing {
    /// First: the tree has its address, which is that of the whole.
    node: Opaque<c::peermem_place>,
    living: UnsafeCell<Option<Living>>,
    _pin: PhantomPinned,
}

// SAFETY: What is in it is plain, and is accessed with the roll's lock held.
unsafe impl Send for Standing {}
// SAFETY: As above.
unsafe impl Sync for Standing {}

impl Standing {
    /// Nobody stands there.
    fn new() -> Self {
        // INVARIANT: Not in the tree. Its users pin it before they lend it to anybody.
        Standing {
            node: Opaque::uninit(),
            living: UnsafeCell::new(None),
            _pin: PhantomPinned,
        }
    }

    /// Runs `f` with the roll locked. `f` calls nobody.
    pub(crate) fn with<R>(&self, f: impl FnOnce(&mut Book, &mut Option<Living>) -> R) -> R {
        let locked = RollLock::new();
        // SAFETY: The lock is held, and `f` does not come here again: these are the only references.
        let (book, living) = unsafe { (&mut *BOOK.0.get(), &mut *self.living.get()) };
        let was = living.is_some();
        let result = f(book, living);
        match (was, &*living) {
            // INVARIANT: Into the tree with the first of the two, out of it with the second.
            // SAFETY: The lock is held, and numbers grow. The node stays where it is until the drop, which
            // takes it out.
            (false, Some(living)) => unsafe {
                c::peermem_roll_add(self.node.get(), living.number);
            },
            // SAFETY: The lock is held, and the node is in the tree by the type invariant.
            (true, None) => unsafe { c::peermem_roll_remove(self.node.get()) },
            _ => {}
        }
        drop(locked);
        result
    }

    /// Hears what happened. Nothing of the roll is locked; what the caller has locked, is.
    pub(crate) fn tell(&self, event: Event) {
        trace_life(event);
    }
}

impl Drop for Standing {
    fn drop(&mut self) {
        // SAFETY: Nobody else has a reference that could write; who reads does not change it.
        if unsafe { &*self.living.get() }.is_some() {
            roll::gone(self);
        }
    }
}

/// A copy of the first on the roll with this number or a higher one.
pub(crate) fn roll_from(number: u64) -> Option<Living> {
    let _locked = RollLock::new();
    // SAFETY: The lock is held.
    let place = NonNull::new(unsafe { c::peermem_roll_from(number) })?;
    // CAST: The first field of a `repr(C)`.
    let standing = place.cast::<Standing>().as_ptr();
    // SAFETY: What is in the tree is the node of a `Standing` that lives, for its drop waits for the lock. With
    // the lock held nobody writes.
    unsafe { *(*standing).living.get() }
}

/// Runs `f` on the book of the roll, locked. `f` does not sleep and calls nobody.
pub(crate) fn roll_book<R>(f: impl FnOnce(&Book) -> R) -> R {
    let _locked = RollLock::new();
    // SAFETY: The lock is held, and with it the only reference.
    f(unsafe { &*BOOK.0.get() })
}

/// Where the GPU with that number is.
pub(crate) fn gpu_address(number: u32) -> Option<PciAddress> {
    let mut address = 0;
    // SAFETY: `address` is valid for writes.
    unsafe { c::peermem_gpu_address(number, &mut address) }.then_some(PciAddress(address))
}

/// The tracepoints of a registration's life.
fn trace_life(event: Event) {
    // SAFETY: The strings are NUL-terminated, and read during the call alone.
    unsafe {
        match event {
            Event::Registered(Living { number, new, .. }) => c::peermem_trace_registered(
                number,
                new.flavour.name().as_char_ptr(),
                new.span.start(),
                new.span.len(),
                new.page.bytes(),
                // CAST: No narrower.
                new.pieces as u64,
                new.task.tgid,
            ),
            Event::Mapped(living) => {
                let hca = living.hca.map_or(0, |hca| hca.0);
                c::peermem_trace_mapped(living.number, living.entries, hca);
            }
            Event::Revoked(number) => c::peermem_trace_revoked(number),
            Event::Released(number, state) => {
                c::peermem_trace_released(number, state.name().as_char_ptr());
            }
        }
    }
}

/// A list that may become long, and mostly has one element, which then needs no memory of its own.
pub(crate) enum List<T> {
    Short(Option<T>),
    Long(KVVec<T>),
}

impl<T> List<T> {
    const fn new() -> Self {
        List::Short(None)
    }
}

impl<T> Default for List<T> {
    fn default() -> Self {
        List::new()
    }
}

impl<T> Deref for List<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match self {
            List::Short(one) => one.as_slice(),
            List::Long(all) => all,
        }
    }
}

impl<T> DerefMut for List<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        match self {
            List::Short(one) => one.as_mut_slice(),
            List::Long(all) => all,
        }
    }
}

impl<T> List<T> {
    /// Appends `value`.
    pub(crate) fn push(&mut self, value: T) -> Result<(), Refusal> {
        match self {
            List::Short(None) => *self = List::Short(Some(value)),
            List::Short(one) => {
                let mut all = KVVec::with_capacity(2, GFP_KERNEL).map_err(|_| Refusal::NoMemory)?;
                // Room was made for both.
                if let Some(first) = one.take() {
                    let _ = all.push_within_capacity(first);
                }
                let _ = all.push_within_capacity(value);
                *self = List::Long(all);
            }
            List::Long(all) => all.push(value, GFP_KERNEL).map_err(|_| Refusal::NoMemory)?,
        }
        Ok(())
    }
}

global_lock! {
    // SAFETY: Used only behind `USER_LIMIT`, which is set after its initialization.
    unsafe(uninit) static ACCOUNTS: Mutex<List<Account>> = List::new();
}

/// The limit in bytes, if there is one.
static USER_LIMIT: SetOnce<u64> = SetOnce::new();

/// The accounts of [`account`](crate::account) can be used for as long as this exists, if the
/// parameter `user_limit_mib` asks for them.
pub(crate) struct Accounts(());

impl Accounts {
    /// To be called once, before the first charge.
    pub(crate) fn new() -> Result<Self> {
        static CALLED: Atomic<bool> = Atomic::new(false);

        if CALLED.xchg(true, Full) {
            return Err(EBUSY);
        }
        let limit = u64::from(user_limit_mib()) << 20;
        if limit > 0 {
            // SAFETY: The exchange lets one caller by.
            unsafe { ACCOUNTS.init() };
            USER_LIMIT.populate(limit);
        }
        Ok(Accounts(()))
    }

    /// The limit in bytes, and the accounts, locked; `None` if there is no limit. Sleeps.
    pub(crate) fn open() -> Option<(u64, impl DerefMut<Target = List<Account>>)> {
        Some((USER_LIMIT.copy()?, ACCOUNTS.lock()))
    }
}

impl Drop for Accounts {
    fn drop(&mut self) {
        if let Some((_, mut accounts)) = Accounts::open() {
            // A static is not dropped with its module.
            *accounts = List::default();
        }
    }
}

/// The calling thread, as a record has it.
pub(crate) fn task() -> record::Task {
    const _: () = assert!(record::COMM_LEN == bindings::TASK_COMM_LEN as usize);

    let mut comm = [0; record::COMM_LEN];
    // SAFETY: `comm` has as many bytes as the function writes.
    unsafe { c::peermem_comm(comm.as_mut_ptr().cast()) };
    record::Task {
        tgid: compat::process(),
        pid: current!().pid(),
        comm,
    }
}

/// What the calling process has at `addr`, if that shows that no GPU's driver put it there. `None`:
/// memory of a device, addresses that are only reserved, or another thread is changing them.
pub(crate) fn place(addr: u64) -> Option<Place> {
    let addr = usize::try_from(addr).ok()?;
    // SAFETY: Has no preconditions.
    if !unsafe { c::peermem_is_user_address(addr) } {
        return Some(Place::Beyond);
    }
    let current = current!();
    // Not waited for: ib_core's mutex for the whole machine is held, and who has this lock may have
    // arranged to keep it.
    let mappings = current.mm()?.mmap_read_trylock()?;
    let Some(mapping) = mappings.vma_lookup(addr) else {
        return Some(Place::Nothing);
    };
    let of_cpu = mapping.flags() & (flags::READ | flags::WRITE | flags::EXEC) != 0;
    let of_device = mapping.flags() & (flags::IO | flags::PFNMAP | flags::MIXEDMAP) != 0;
    (of_cpu && !of_device).then_some(Place::Cpu)
}

/// The tracepoint `nvidia_peermem:refused`.
pub(crate) fn trace_refused(refused: &Refused) {
    // SAFETY: The strings are NUL-terminated, and read during the call alone.
    unsafe {
        c::peermem_trace_refused(
            refused.flavour.name().as_char_ptr(),
            refused.step.name().as_char_ptr(),
            refused.refusal.name().as_char_ptr(),
            refused.refusal.code(),
            refused.addr,
            refused.len,
            refused.task.tgid,
        );
    }
}

global_lock! {
    // SAFETY: Used only behind `JOURNAL_READY`, which is set after its initialization.
    unsafe(uninit) static JOURNAL: SpinLock<Journal> = Journal::new();
}

static JOURNAL_READY: SetOnce<()> = SetOnce::new();

/// Makes [`journal`] work.
pub(crate) fn begin_journal() {
    static CALLED: Atomic<bool> = Atomic::new(false);

    if !CALLED.xchg(true, Full) {
        // SAFETY: The exchange lets one caller by.
        unsafe { JOURNAL.init() };
        JOURNAL_READY.populate(());
    }
}

/// Runs `f` on the journal, locked by a spinlock; not before [`begin_journal`]. `f` does not sleep and
/// calls nobody.
pub(crate) fn journal<R>(f: impl FnOnce(&mut Journal) -> R) -> Option<R> {
    JOURNAL_READY.copy()?;
    Some(f(&mut JOURNAL.lock()))
}

/// What a file of debugfs has to say.
pub(crate) trait Contents {
    /// Writes it; anew when it did not fit. May sleep.
    fn write(f: &mut fmt::Formatter<'_>) -> fmt::Result;
}

/// [`Contents`] for the kernel's formatting.
struct Written<T>(PhantomData<T>);

impl<T: Contents> fmt::Display for Written<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        T::write(f)
    }
}

/// # Safety
///
/// `seq` points to a `seq_file` that nobody else uses during the call.
unsafe extern "C" fn show_callback<T: Contents>(
    seq: *mut bindings::seq_file,
    _unused: *mut c_void,
) -> c_int {
    // SAFETY: As promised by the caller.
    let seq = unsafe { SeqFile::from_raw(seq) };
    seq_print!(seq, "{}", Written::<T>(PhantomData));
    0
}

/// What a file of debugfs has to say, line by line.
pub(crate) trait Lines {
    /// What a line is made of.
    type Record: Copy + fmt::Display;

    /// The highest number that there is.
    fn last() -> u64;

    /// The first record with this number or a higher one, and its number, which is not 0.
    fn from(number: u64) -> Option<(u64, Self::Record)>;
}

/// Who reads a file of [`Lines`]. All zero is one that has not begun.
#[repr(C)]
struct Reader<R> {
    /// Where to stop: not for ever, however fast they come.
    last: u64,
    /// The record to write next, once there was one.
    record: MaybeUninit<R>,
}

/// The functions of a file of [`Lines`].
struct LinesOps<T>(PhantomData<T>);

impl<T: Lines> LinesOps<T> {
    const OPS: c::peermem_lines = c::peermem_lines {
        size: size_of::<Reader<T::Record>>(),
        from: Some(Self::from_callback),
        show: Some(Self::show_callback),
    };

    /// # Safety
    ///
    /// `reader` points to a `Reader<T::Record>` that nobody else uses during the call.
    unsafe extern "C" fn from_callback(reader: *mut c_void, number: u64) -> u64 {
        const { assert!(align_of::<Reader<T::Record>>() <= align_of::<u64>()) };

        // SAFETY: As promised by the caller.
        let reader = unsafe { &mut *reader.cast::<Reader<T::Record>>() };
        // Numbers begin with 1: from the beginning of the file.
        if number == 0 {
            reader.last = T::last();
        }
        match T::from(number).filter(|(number, _)| *number <= reader.last) {
            Some((number, record)) => {
                reader.record.write(record);
                number
            }
            None => 0,
        }
    }

    /// # Safety
    ///
    /// `seq` points to a `seq_file`, and `reader` to what `from_callback` has written a record to; nobody
    /// else uses them during the call.
    unsafe extern "C" fn show_callback(seq: *mut bindings::seq_file, reader: *mut c_void) -> c_int {
        // SAFETY: As promised by the caller.
        let seq = unsafe { SeqFile::from_raw(seq) };
        // SAFETY: As promised by the caller.
        let record = unsafe {
            (*reader.cast::<Reader<T::Record>>())
                .record
                .assume_init_ref()
        };
        seq_print!(seq, "{}\n", record);
        0
    }
}

/// The module's directory of debugfs, with its files, until dropped. Where the kernel has no debugfs, or
/// does not make one, nothing is there, and nothing is missed.
///
/// # Invariants
///
/// The directory is this module's own, or what debugfs takes for none.
pub(crate) struct Debugfs(*mut bindings::dentry);

// SAFETY: debugfs locks its directories itself.
unsafe impl Send for Debugfs {}
// SAFETY: As above.
unsafe impl Sync for Debugfs {}

impl Debugfs {
    /// An empty directory.
    pub(crate) fn new() -> Self {
        // SAFETY: Has no preconditions.
        // INVARIANT: A new directory, or an error.
        Debugfs(unsafe { c::peermem_debugfs_dir() })
    }

    /// Adds a file. The module stays loaded as long as anybody has it open.
    pub(crate) fn file<T: Contents>(&self, name: &'static CStr, mode: u16) {
        // SAFETY: The directory is as debugfs wants it by the type invariant. The name is copied, and the
        // function is there for as long as the module.
        unsafe {
            c::peermem_debugfs_file(self.0, name.as_char_ptr(), mode, Some(show_callback::<T>));
        }
    }

    /// Adds a file of lines. The module stays loaded as long as anybody has it open.
    pub(crate) fn lines<T: Lines + 'static>(&self, name: &'static CStr, mode: u16) {
        // SAFETY: As in `file`.
        unsafe {
            c::peermem_debugfs_lines(self.0, name.as_char_ptr(), mode, &LinesOps::<T>::OPS);
        }
    }
}

impl Drop for Debugfs {
    /// Waits for who reads at the moment.
    fn drop(&mut self) {
        // SAFETY: The directory is as debugfs wants it by the type invariant, and used no more.
        unsafe { c::peermem_debugfs_remove(self.0) };
    }
}

// `peermem_memory_peers_show()` reads one as the other.
const _: () = {
    assert!(size_of::<Statistics>() == size_of::<c::peermem_stats>());
    assert!(offset_of!(Statistics, alloc_mrs) == offset_of!(c::peermem_stats, alloc_mrs));
    assert!(offset_of!(Statistics, dealloc_mrs) == offset_of!(c::peermem_stats, dealloc_mrs));
    assert!(offset_of!(Statistics, reg_pages) == offset_of!(c::peermem_stats, reg_pages));
    assert!(offset_of!(Statistics, dereg_pages) == offset_of!(c::peermem_stats, dereg_pages));
    assert!(offset_of!(Statistics, reg_bytes) == offset_of!(c::peermem_stats, reg_bytes));
    assert!(offset_of!(Statistics, dereg_bytes) == offset_of!(c::peermem_stats, dereg_bytes));
    assert!(offset_of!(Statistics, free_callbacks) == offset_of!(c::peermem_stats, free_callbacks));
};

/// The directory `/sys/kernel/mm/memory_peers`, from the look whether ib_core has it. Nobody sees it
/// any more, and nobody is in it, after the drop.
///
/// # Invariants
///
/// There is one at a time.
pub(crate) struct MemoryPeers(());

impl MemoryPeers {
    /// To be called before ib_core knows the first client, whose name is `name`. `EBUSY` if there is
    /// one already.
    pub(crate) fn look(name: &CStr) -> Result<Self> {
        if MEMORY_PEERS.xchg(true, Full) {
            return Err(EBUSY);
        }
        // INVARIANT: The exchange lets nobody by until the drop.
        let this = MemoryPeers(());
        // SAFETY: A string with its NUL, which is used during the call alone. No other of the functions
        // runs: they are called by the one value of this type.
        unsafe { c::peermem_memory_peers_look(name.as_char_ptr()) };
        Ok(this)
    }

    /// Shows the clients, if ib_core does not. To be called when it knows all of them.
    pub(crate) fn show(self, clients: &[(&CStr, &'static Statistics)]) -> Self {
        let mut peers = [c::peermem_peer::default(); c::PEERMEM_PEERS as usize];
        let mut count = 0;
        for (peer, (name, statistics)) in peers.iter_mut().zip(clients) {
            peer.name = name.as_char_ptr();
            peer.stats = ptr::from_ref(*statistics).cast();
            count += 1;
        }
        // SAFETY: The first `count` are filled in. The names are used during the call alone. The
        // statistics live as long as the module does, have the layout that C takes them for, and are
        // atomic. No other of the functions runs, as in `look`.
        unsafe { c::peermem_memory_peers_show(peers.as_ptr(), count) };
        self
    }
}

impl Drop for MemoryPeers {
    fn drop(&mut self) {
        // SAFETY: No other of the functions runs, as in `look`.
        unsafe { c::peermem_memory_peers_hide() };
        MEMORY_PEERS.store(false, Release);
    }
}

static MEMORY_PEERS: Atomic<bool> = Atomic::new(false);

/// A counted reference to a PCI device.
///
/// # Invariants
///
/// Owns one reference to the device.
pub(crate) struct PciDevice(NonNull<bindings::pci_dev>);

// SAFETY: The count of a device is atomic, and may be given back on any thread.
unsafe impl Send for PciDevice {}
// SAFETY: A shared `PciDevice` gives its pointer and constant properties of the device.
unsafe impl Sync for PciDevice {}

impl PciDevice {
    /// The PCI device that `dev` is; `None` if it is NULL or on another bus.
    ///
    /// # Safety
    ///
    /// `dev` is NULL, or points to a device that is alive during the call.
    pub(crate) unsafe fn from_device(dev: *mut bindings::device) -> Option<Self> {
        // SAFETY: As promised by the caller.
        let pdev = unsafe { c::peermem_pci_dev_get(dev) };
        // INVARIANT: The reference that the function took.
        NonNull::new(pdev).map(PciDevice)
    }

    /// For C functions that want one; valid for as long as `self` is.
    pub(crate) fn as_raw(&self) -> *mut bindings::pci_dev {
        self.0.as_ptr()
    }

    /// The longest segment that it takes, in bytes.
    pub(crate) fn max_segment(&self) -> u32 {
        // SAFETY: The device is alive by the type invariant.
        unsafe { c::peermem_max_segment(self.as_raw()) }
    }

    /// Where it is.
    pub(crate) fn address(&self) -> PciAddress {
        // SAFETY: The device is alive by the type invariant.
        PciAddress(unsafe { c::peermem_pci_address(self.as_raw()) })
    }
}

impl Clone for PciDevice {
    fn clone(&self) -> Self {
        // SAFETY: The device is alive by the type invariant.
        // INVARIANT: The reference taken here.
        unsafe { bindings::pci_dev_get(self.as_raw()) };
        PciDevice(self.0)
    }
}

impl Drop for PciDevice {
    fn drop(&mut self) {
        // SAFETY: Gives back the reference of the type invariant.
        unsafe { bindings::pci_dev_put(self.as_raw()) };
    }
}

/// A scatter list of DMA addresses without pages.
///
/// # Invariants
///
/// The entries are allocated, and freed by the drop alone. Whoever has a [`LentTable`] may write to
/// them until then.
pub(crate) struct Table(bindings::sg_table);

// SAFETY: A plain owner of memory.
unsafe impl Send for Table {}

/// The head of a [`Table`], for C code that reads its entries, or writes to them.
pub(crate) struct LentTable(pub(crate) bindings::sg_table);

/// How many entries are handed to C at once.
const BATCH: usize = 32;

// `peermem_sg_append()` reads one as the other.
const _: () = {
    assert!(size_of::<Entry>() == size_of::<c::peermem_entry>());
    assert!(offset_of!(Entry, addr) == offset_of!(c::peermem_entry, addr));
    assert!(offset_of!(Entry, len) == offset_of!(c::peermem_entry, len));
};

/// A [`Table`] that grows: nobody walks twice over the memory to count its entries first.
struct Growing {
    /// Its table is always one.
    list: c::peermem_sg,
    result: Result<(), Refusal>,
    /// Of these the first `waiting` are entries that are not in the list yet.
    batch: [MaybeUninit<Entry>; BATCH],
    waiting: usize,
}

impl Growing {
    fn new() -> Self {
        Growing {
            list: c::peermem_sg::default(),
            result: Ok(()),
            batch: [const { MaybeUninit::uninit() }; BATCH],
            waiting: 0,
        }
    }

    /// Adds an entry, or remembers why it could not. May sleep.
    fn push(&mut self, entry: Entry) {
        if let Some(place) = self.batch.get_mut(self.waiting) {
            place.write(entry);
            self.waiting += 1;
        }
        if self.waiting == BATCH {
            self.flush(c::peermem_sg_append);
        }
    }

    /// Not inlined, so that `push` is.
    #[inline(never)]
    fn flush(
        &mut self,
        add: unsafe extern "C" fn(*mut c::peermem_sg, *const c::peermem_entry, c_uint) -> c_int,
    ) {
        if self.result.is_ok() {
            // CAST: At most `BATCH`.
            let count = self.waiting as c_uint;
            // SAFETY: `add` is one of the two functions for the list, of whose calls none has failed. So many
            // entries are written, and read during the call alone.
            if unsafe { add(&mut self.list, self.batch.as_ptr().cast(), count) } != 0 {
                self.result = Err(Refusal::NoMemory);
            }
        }
        self.waiting = 0;
    }

    fn finish(mut self) -> Result<Table, Refusal> {
        self.flush(c::peermem_sg_finish);
        // INVARIANT: Allocated by the C functions; whatever they did, `sg_free_table()` takes it.
        let table = Table(self.list.table);
        self.result.map(|()| table)
    }
}

impl Table {
    /// Allocates exactly as many entries as `cut` makes of `runs`, and fills them. There is at least one run.
    pub(crate) fn build(runs: impl Iterator<Item = Run>, cut: Cut) -> Result<Self, Refusal> {
        let mut list = Growing::new();
        cut.entries(runs, |entry| list.push(entry));
        list.finish()
    }

    /// How many entries it has.
    pub(crate) fn entries(&self) -> u32 {
        self.0.nents
    }

    /// A copy of the head for ib_core; the entries stay ours.
    pub(crate) fn lend(&self) -> LentTable {
        LentTable(self.0)
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        // SAFETY: The entries are allocated by the type invariant, and freed here alone.
        unsafe { bindings::sg_free_table(&mut self.0) };
    }
}

/// A range of physical addresses in one PCI BAR, with no `struct page` for any part of it.
#[derive(Clone, Copy)]
pub(crate) struct BarRun(Run);

/// The devices in whose BARs addresses were found are remembered, and kept by references, until this is dropped.
/// To be dropped when no pin is left.
pub(crate) struct Bars(());

impl Bars {
    pub(crate) fn new() -> Self {
        Bars(())
    }
}

impl Drop for Bars {
    fn drop(&mut self) {
        // SAFETY: Has no preconditions.
        unsafe { c::peermem_bars_forget() };
    }
}

/// The memory BAR that has `addr` in it, and its device. May sleep.
fn bar_of(addr: u64) -> Option<(Run, Gpus)> {
    const _: () = assert!(Gpus::MOST == c::PEERMEM_GPUS);

    let mut bar = c::peermem_bar::default();
    // SAFETY: The pointer is valid for writes.
    let found = unsafe { c::peermem_bar_of(addr, &mut bar) };
    let range = Run {
        addr: bar.start,
        len: bar.len,
    };
    found.then(|| (range, Gpus::one(bar.gpu)))
}

/// The GPU in whose BAR that page lies, for who only wants to tell. May sleep.
pub(crate) fn gpu_of(page: &Run) -> Gpus {
    // SAFETY: Has no preconditions.
    if unsafe { c::peermem_has_struct_page(page.addr, page.len) } {
        // Memory, which is in no BAR: not looked for at each registration.
        return Gpus::default();
    }
    bar_of(page.addr).map_or(Gpus::default(), |(_, gpu)| gpu)
}

/// Turns runs of physical addresses into [`BarRun`]s; remembers the BAR, for the next run tends to lie
/// in the same one.
#[derive(Default)]
pub(crate) struct BarFinder {
    bar: Option<Run>,
    gpus: Gpus,
}

impl BarFinder {
    /// `run`, if it lies in a BAR. May sleep.
    pub(crate) fn find(&mut self, run: Run) -> Result<BarRun, Refusal> {
        if !self.bar.is_some_and(|bar| contains(&bar, &run)) {
            let found = bar_of(run.addr).filter(|(bar, _)| contains(bar, &run));
            self.bar = found.map(|(bar, _)| bar);
            self.gpus = found.map_or(self.gpus, |(_, gpu)| self.gpus.or(gpu));
        }
        // SAFETY: Has no preconditions.
        if self.bar.is_none() || unsafe { c::peermem_has_struct_page(run.addr, run.len) } {
            return Err(Refusal::NotInBar);
        }
        Ok(BarRun(run))
    }

    /// The GPUs in whose BARs something was found.
    pub(crate) fn gpus(&self) -> Gpus {
        self.gpus
    }
}

/// Does all of `run` lie in `bar`?
fn contains(bar: &Run, run: &Run) -> bool {
    run.addr
        .checked_sub(bar.addr)
        .and_then(|offset| offset.checked_add(run.len))
        .is_some_and(|end| end <= bar.len)
}

/// Lets others run whenever so much as [`MAX_STEP`] has been mapped or unmapped.
#[derive(Default)]
struct Rests {
    since: u64,
}

impl Rests {
    /// So many more bytes are done. May sleep.
    fn after(&mut self, bytes: u64) {
        self.since = self.since.wrapping_add(bytes);
        if self.since >= MAX_STEP {
            self.since = 0;
            // SAFETY: Process context without a spinlock, as in all that may sleep.
            unsafe { c::peermem_rest() };
        }
    }
}

/// Bytes of all `runs`.
fn total(runs: &[Run]) -> u64 {
    runs.iter().fold(0, |sum, run| sum.saturating_add(run.len))
}

/// Ranges of a BAR mapped for a device, until dropped.
///
/// Calls `dma_map_resource()`, which takes no lock of another driver's, once for each run. What is
/// adjacent all the same becomes one entry of a scatter list.
///
/// # Invariants
///
/// Each of `runs` is mapped for `device`.
pub(crate) struct BarMapping {
    device: PciDevice,
    runs: KVVec<Run>,
}

impl BarMapping {
    /// Maps each of `runs` for `device`.
    pub(crate) fn map<'a>(
        device: &PciDevice,
        runs: impl Iterator<Item = &'a BarRun>,
    ) -> Result<Self, Refusal> {
        let mut mapping = BarMapping {
            device: device.clone(),
            runs: KVVec::new(),
        };
        let mut rests = Rests::default();
        for BarRun(run) in runs {
            // First the place, then the mapping: nothing can fail between it and its record.
            if mapping.runs.reserve(1, GFP_KERNEL).is_err() {
                return Err(Refusal::NoMemory);
            }
            // CAST: Addresses have 64 bits.
            let len = run.len as usize;
            let mut addr = 0;
            // SAFETY: `dma_map_resource()` wants a device that is alive, and memory of an I/O device
            // that has no `struct page`, which a `BarRun` is. `addr` is valid for writes.
            let ret = unsafe { c::peermem_bar_map(device.as_raw(), run.addr, len, &mut addr) };
            if ret != 0 {
                // What was mapped before goes with `mapping`.
                let mapped = total(&mapping.runs);
                return Err(Refusal::MapResource { mapped });
            }
            // INVARIANT: Mapped above. The place was reserved.
            let _ = mapping
                .runs
                .push_within_capacity(Run { addr, len: run.len });
            rests.after(run.len);
        }
        Ok(mapping)
    }

    /// The DMA addresses, in the order of the runs that were mapped.
    pub(crate) fn runs(&self) -> &[Run] {
        &self.runs
    }
}

impl Drop for BarMapping {
    fn drop(&mut self) {
        let mut rests = Rests::default();
        for run in self.runs.iter() {
            // CAST: Was a `usize` when it was mapped.
            let len = run.len as usize;
            // SAFETY: Mapped for this device by the type invariant, and unmapped once.
            unsafe { c::peermem_bar_unmap(self.device.as_raw(), run.addr, len) };
            rests.after(run.len);
        }
    }
}
