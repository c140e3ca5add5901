// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! A fake of nvidia.ko, and of the few kernel functions that a test observes. A test can see the
//! calls and their order, make a call fail, and run code in the middle of a call. The module
//! `ib_core` contains the fake of ib_core.
//!
//! Only one [`World`] exists at a time, because the C functions have no argument that could
//! identify a world. KUnit runs its tests one after another, each inside [`test`].

use core::{
    iter,
    mem,
    panic::Location,
    ptr::{
        self,
        NonNull, //
    }, //
};

use kernel::{
    bindings,
    error::to_result,
    fmt,
    prelude::*,
    str::{
        CStr,
        CString, //
    },
    sync::{
        atomic::{
            Acquire,
            Atomic,
            Relaxed,
            Release, //
        },
        global_lock,
        Arc,
        Completion, //
    },
    time::{
        delay::fsleep,
        Delta, //
    }, //
};

use crate::{
    c,
    entries::{
        self,
        Cursor, //
    },
    ib_core,
    life::Life,
    pci::{
        Bars,
        PciDevice, //
    },
    registry::Registry, //
};

/// First address of the fake GPU's BAR: `FAKE_BAR_START` in `fakes.h`.
pub(crate) const BAR: u64 = 1 << 44;
/// Length of the fake GPU's first BAR, in bytes.
pub(crate) const BAR_LEN: u64 = 1 << 36;
/// First number of a range of I/O ports.
pub(crate) const IO: u64 = BAR + (1 << 40);
/// First address of an unassigned BAR.
pub(crate) const UNASSIGNED: u64 = BAR + (2 << 40);
/// First address of memory with a `struct page` that claims to be a BAR.
pub(crate) const RAM: u64 = 1 << 30;
/// First address of a second BAR: `FAKE_SECOND_START` in `fakes.h`.
pub(crate) const SECOND: u64 = BAR + (4 << 40);
/// First address of a third BAR, directly behind the second: `FAKE_THIRD_START`.
pub(crate) const THIRD: u64 = SECOND + SMALL_LEN;
/// First address of the first BAR that [`fake_more_gpus`] adds: `FAKE_MORE_START`.
pub(crate) const MORE: u64 = BAR + (8 << 40);
/// Length of every BAR except the first, in bytes: `FAKE_SMALL_LEN`.
pub(crate) const SMALL_LEN: u64 = 16 << 20;
/// Difference between DMA addresses and physical addresses, on a path that translates addresses.
pub(crate) const DMA_OFFSET: u64 = 1 << 50;
/// Size of one of nvidia.ko's pages.
pub(crate) const KIB_64: u64 = 64 << 10;
/// `NVIDIA_P2P_PAGE_SIZE_64KB`.
const SIZE_64: u32 = 1;
/// Value of the pointer to a page table after nvidia.ko has failed.
const GARBAGE: usize = 0xdead_4000;

// The declarations match `fakes.h`. A `safe` function takes numbers, or references for its results,
// and accesses only devices and objects that exist while a test runs.
unsafe extern "C" {
    safe fn fake_machine_new() -> c_int;
    safe fn fake_machine_free();
    pub(crate) safe fn fake_nic() -> *mut c_void;
    /// Sets the longest segment that the NIC takes.
    pub(crate) safe fn fake_nic_max_segment(bytes: c_uint);
    safe fn fake_nic_guard(guard: c_int);
    /// Returns the number of references to the fake devices, without the fake machine's own
    /// references.
    pub(crate) safe fn fake_device_refs() -> c_uint;
    fn fake_pci_get(vendor: c_uint, device: c_uint, from: *mut c_void) -> *mut c_void;
    /// Returns the number of times that the module asked for the machine's next device.
    pub(crate) safe fn fake_pci_steps() -> c_uint;
    /// Removes the GPU.
    pub(crate) safe fn fake_gpu_leaves();
    /// Adds struct pages to a range. See `fakes.h`.
    pub(crate) safe fn fake_pages(start: u64, len: u64, kind: c_int);
    pub(crate) safe fn fake_pagemap_refs() -> c_int;
    /// Puts another GPU in the place of the first GPU.
    pub(crate) safe fn fake_gpu_is_replaced() -> c_int;
    /// Adds `count` GPUs to the machine, each with a BAR of [`SMALL_LEN`].
    pub(crate) safe fn fake_more_gpus(count: c_uint) -> c_int;
    /// Puts another NIC in the place of the first NIC.
    pub(crate) safe fn fake_nic_is_replaced() -> c_int;
    pub(crate) safe fn fake_parameters(peerdirect_support: c_int, persistent_api_support: c_int);
    pub(crate) safe fn fake_user_limit(mib: c_uint);
    safe fn fake_reserves() -> c_uint;
    safe fn fake_no_reserves(flags: c_uint);
    fn fake_in_reclaim(callback: FreeCallback, data: *mut c_void);
    pub(crate) safe fn fake_loaded_with(
        peerdirect_support: &mut c_int,
        persistent_api_support: &mut c_int,
        fail_registration: &mut c_uint,
    );
    safe fn fake_sysfs_new() -> c_int;
    safe fn fake_sysfs_free();
    pub(crate) safe fn fake_sysfs_without_mm();
    fn fake_sysfs_occupy(client: *const c_char);
    safe fn fake_sysfs_refs() -> c_int;
    fn fake_sysfs_has(client: *const c_char, file: *const c_char) -> bool;
    safe fn fake_test_begins();
    fn fake_test_fails(file: *const c_char, line: c_int, text: *const c_char);
    fn fake_thread_start(
        run: unsafe extern "C" fn(*mut c_void) -> c_int,
        data: *mut c_void,
    ) -> *mut c_void;
    fn fake_thread_join(task: *mut c_void);
    /// Returns the number of entries of a scatter list, up to its end mark.
    pub(crate) fn sg_nents(sg: *mut bindings::scatterlist) -> c_int;
}

/// A call, as the log records it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Event {
    // The module calls ib_core:
    Register(Name),
    Unregister(Name),
    Invalidate,
    // ib_core calls the module:
    Release,
    // The module calls nvidia.ko:
    Pin,
    Put,
    /// A put that finds no pin with this table.
    PutNothing,
    PinPersistent,
    PutPersistent,
    Map,
    Unmap,
    // nvidia.ko calls the module:
    Callback,
    CallbackReturns,
    // The module calls the kernel:
    BarMap,
    BarUnmap,
    IovaAlloc,
    IovaLink,
    IovaSync,
    IovaUnlink,
    IovaFree,
    /// The module creates `memory_peers`.
    Shows,
    /// `memory_peers` is removed, and no reader uses it.
    Hides,
    /// A mark of the test itself.
    Mark(&'static str),
}

/// A client's name.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Name {
    NvMem,
    NvMemNc,
    Other,
}

/// A function that can be made to fail.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Call {
    Register,
    Pin,
    PinPersistent,
    Map,
    BarMap,
    IovaAlloc,
    IovaLink,
    IovaSync,
    SgAlloc,
    /// `kobject_create_and_add()`.
    Kobject,
    /// `sysfs_create_group()`.
    Group,
}

/// A place where a test can run code, on the thread that reaches the place.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Point {
    /// ib_core knows the client, and the registration has not returned.
    Registering,
    /// In `sg_alloc_table()`, for one chunk of a scatter list or for all of it.
    Allocating,
}

struct Failure {
    call: Call,
    /// Number of calls that succeed before the first failure.
    skip: u32,
    times: u32,
    code: c_int,
}

/// Maps the number of a pinned page to its physical address.
pub(crate) type Layout = fn(u64) -> u64;

pub(crate) const CONTIGUOUS: Layout = |page| BAR + page * KIB_64;
pub(crate) const EVERY_OTHER: Layout = |page| BAR + 2 * page * KIB_64;

/// The form of the page tables that nvidia.ko returns.
#[derive(Clone, Copy)]
pub(crate) struct TableForm {
    pub(crate) version: u32,
    pub(crate) page_size: u32,
    /// Number of surplus entries. A negative number stands for missing entries.
    pub(crate) surplus: i32,
    pub(crate) flags: u32,
    /// `true` if the page table has no list of pages.
    pub(crate) no_pages: bool,
    /// `true` if a pin succeeds without returning a table.
    pub(crate) no_table: bool,
    pub(crate) address: Layout,
}

impl TableForm {
    pub(crate) const GOOD: TableForm = TableForm {
        version: 0x0002_0000,
        page_size: SIZE_64,
        surplus: 0,
        flags: 0,
        no_pages: false,
        no_table: false,
        address: CONTIGUOUS,
    };
}

/// The form of the DMA mappings that nvidia.ko returns.
#[derive(Clone, Copy)]
pub(crate) struct MappingForm {
    pub(crate) version: u32,
    pub(crate) page_size: u32,
    pub(crate) surplus: i32,
    pub(crate) no_addresses: bool,
    /// `true` if nvidia.ko's `dma_map_pages()` succeeds without returning a mapping.
    pub(crate) no_mapping: bool,
}

impl MappingForm {
    pub(crate) const GOOD: MappingForm = MappingForm {
        version: 0x0002_0003,
        page_size: SIZE_64,
        surplus: 0,
        no_addresses: false,
        no_mapping: false,
    };
}

type FreeCallback = unsafe extern "C" fn(*mut c_void);

/// A page table's memory. `list` points into `pages`, and `table` to `list`.
struct TableMemory {
    table: c::peermem_page_table,
    pages: KVVec<c::nvidia_p2p_page>,
    list: KVVec<*mut c::nvidia_p2p_page>,
}

// SAFETY: The pointers point into memory that the structure owns.
unsafe impl Send for TableMemory {}

struct Pinned {
    memory: KBox<TableMemory>,
    callback: Option<FreeCallback>,
    /// The callback's opaque argument, as a number.
    data: usize,
}

impl Pinned {
    fn table(&self) -> usize {
        ptr::from_ref(&self.memory.table).addr()
    }
}

/// A mapping's memory.
struct MappingMemory {
    raw: c::nvidia_p2p_dma_mapping,
    addresses: KVVec<u64>,
}

// SAFETY: The pointers point into memory that the structure owns, or to a device that no code
// accesses through them.
unsafe impl Send for MappingMemory {}

struct Mapped {
    memory: KBox<MappingMemory>,
    table: usize,
}

/// A range of the BAR mapped by `dma_map_phys()`.
#[derive(Clone, Copy, PartialEq)]
pub(crate) struct BarRange {
    device: usize,
    pub(crate) dma: u64,
    pub(crate) len: usize,
}

/// The path between the NIC and memory. The numbers match `fakes.h`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Guard {
    Ops,
    Nothing,
    Identity,
    Translates,
    Blocks,
    RangeMap,
}

/// A range of the IOMMU's addresses. The test VM's IOMMU checks where memory is linked in it.
pub(crate) struct Iova {
    base: u64,
    len: u64,
    /// Number of linked bytes.
    linked: u64,
}

type Hook = KBox<dyn FnMut() + Send>;

/// The state of the fakes in one test.
pub(crate) struct World {
    log: KVec<Event>,
    failures: KVec<Failure>,
    hooks: KVec<(Point, Hook)>,
    pub(crate) table: TableForm,
    pub(crate) mapping: MappingForm,
    /// `true` if `try_module_get()` fails.
    pub(crate) going: bool,
    /// Number of references that the module has from `try_module_get()` and has not dropped.
    pub(crate) holds: i64,
    /// Number of calls of `cond_resched()`.
    pub(crate) rests: u32,
    pins: KVec<Pinned>,
    mappings: KVec<Mapped>,
    pub(crate) bar: KVec<BarRange>,
    guard: Guard,
    /// Start of the next range of the IOMMU's addresses, at any page of the IOMMU.
    iova_base: u64,
    pub(crate) iovas: KVec<Iova>,
    pub(crate) core: ib_core::Core,
}

impl World {
    const fn new() -> Self {
        World {
            log: KVec::new(),
            failures: KVec::new(),
            hooks: KVec::new(),
            table: TableForm::GOOD,
            mapping: MappingForm::GOOD,
            going: false,
            holds: 0,
            rests: 0,
            pins: KVec::new(),
            mappings: KVec::new(),
            bar: KVec::new(),
            guard: Guard::Ops,
            iova_base: 0x1_2345_6000,
            iovas: KVec::new(),
            core: ib_core::Core::new(),
        }
    }

    fn pin_of(&self, table: usize) -> Option<usize> {
        self.pins.iter().position(|pin| pin.table() == table)
    }
}

global_lock! {
    // SAFETY: `init` comes before every use.
    unsafe(uninit) static WORLD: Mutex<World> = World::new();
}

global_lock! {
    // SAFETY: `init` comes before every use.
    unsafe(uninit) static LIFE: Mutex<Option<Life>> = None;
}

/// Number of failed checks.
static FAILED: Atomic<u32> = Atomic::new(0);

/// Proof that the fakes can be used.
pub(crate) struct Fakes(());

impl Fakes {
    /// Initializes the fakes. The caller must call this function once.
    pub(crate) fn new() -> Self {
        // SAFETY: Called once, before every use.
        unsafe {
            WORLD.init();
            LIFE.init();
        }
        Fakes(())
    }
}

impl Drop for Fakes {
    fn drop(&mut self) {
        // Statics are not dropped with their module.
        let world = with(|world| mem::replace(world, World::new()));
        let life = LIFE.lock().take();
        drop((world, life));
    }
}

/// Stores the record of the module's run.
pub(crate) fn remember(life: Life) {
    *LIFE.lock() = Some(life);
}

/// Calls `look` with the record of the module's run.
pub(crate) fn remembered(look: impl FnOnce(&Life) -> Result) -> Result {
    look(LIFE.lock().as_ref().ok_or(ENOENT)?)
}

/// Calls `f` with the world of the fakes. Allocations in `f` do not wait for reclaim. Callbacks
/// also call this function, and lockdep would otherwise report the fake's allocation instead of the
/// module's.
pub(crate) fn with<R>(f: impl FnOnce(&mut World) -> R) -> R {
    let mut world = WORLD.lock();
    let flags = fake_reserves();
    let result = f(&mut world);
    fake_no_reserves(flags);
    result
}

/// Removes and returns the first element for which `is` holds.
pub(crate) fn take_first<T>(list: &mut KVec<T>, is: impl FnMut(&T) -> bool) -> Option<T> {
    let index = list.iter().position(is)?;
    list.remove(index).ok()
}

/// Appends an event to the log.
pub(crate) fn record(event: Event) {
    if with(|world| world.log.push(event, GFP_KERNEL)).is_err() {
        fails(c"log", 0, fmt!("no memory for {:?}", event));
    }
}

/// Empties the log and returns it.
pub(crate) fn log() -> KVec<Event> {
    with(|world| mem::take(&mut world.log))
}

/// Makes `times` consecutive calls of `call` return `code`, beginning with the `nth` call from now.
pub(crate) fn fail(call: Call, nth: u32, times: u32, code: c_int) -> Result {
    let failure = Failure {
        call,
        skip: nth.saturating_sub(1),
        times,
        code,
    };
    with(|world| world.failures.push(failure, GFP_KERNEL)).map_err(Into::into)
}

/// Makes the next call of `call` return `code`.
pub(crate) fn fail_once(call: Call, code: c_int) -> Result {
    fail(call, 1, 1, code)
}

/// Returns the code that this call of `call` must return, if any.
pub(crate) fn failing(call: Call) -> Option<c_int> {
    with(|world| {
        for failure in world.failures.iter_mut() {
            if failure.call != call || failure.times == 0 {
                continue;
            }
            if failure.skip > 0 {
                failure.skip -= 1;
                return None;
            }
            failure.times -= 1;
            return Some(failure.code);
        }
        None
    })
}

/// Runs `hook` once, when a thread next reaches `point`.
pub(crate) fn at(point: Point, hook: impl FnMut() + Send + 'static) -> Result {
    let hook: Hook = KBox::new(hook, GFP_KERNEL)?;
    with(|world| world.hooks.push((point, hook), GFP_KERNEL)).map_err(Into::into)
}

/// Runs the code that the test has prepared for `point`.
pub(crate) fn reach(point: Point) {
    let hook = with(|world| take_first(&mut world.hooks, |(at, _)| *at == point));
    if let Some((_, mut hook)) = hook {
        hook();
    }
}

/// Makes the test fail and continue. Callable from any thread.
pub(crate) fn fails(file: &CStr, line: u32, text: fmt::Arguments<'_>) {
    FAILED.fetch_add(1, Relaxed);
    let text = CString::try_from_fmt(text);
    let text = text.as_deref().unwrap_or(c"(no memory for the text)");
    // SAFETY: Both pointers are to C strings that outlive the call.
    // CAST: Line numbers are small.
    unsafe { fake_test_fails(file.as_char_ptr(), line as c_int, text.as_char_ptr()) };
}

/// Iterates over the rows of a table. If a check fails, the test reports the row.
#[track_caller]
pub(crate) fn rows<T>(table: impl IntoIterator<Item = T>) -> impl Iterator<Item = T> {
    let at = Location::caller();
    let mut failed = FAILED.load(Relaxed);
    let mut rows = table.into_iter();
    let mut number = 0;
    iter::from_fn(move || {
        if FAILED.load(Relaxed) != failed {
            let (file, line) = (at.file(), at.line());
            fails(
                c"table",
                line,
                fmt!("that was row {} of {}:{}", number, file, line),
            );
            failed = FAILED.load(Relaxed);
        }
        number += 1;
        rows.next()
    })
}

/// Makes the test fail if `condition` does not hold.
macro_rules! check {
    ($condition:expr) => {
        if !$condition {
            $crate::fakes::fails(
                ::kernel::c_str!(::core::file!()),
                ::core::line!(),
                ::kernel::prelude::fmt!("not so: {}", ::core::stringify!($condition)),
            );
        }
    };
}

/// Makes the test fail if `$have` is not `$want`.
macro_rules! same {
    ($have:expr, $want:expr) => {
        match (&$have, &$want) {
            (have, want) => {
                if *have != *want {
                    $crate::fakes::fails(
                        ::kernel::c_str!(::core::file!()),
                        ::core::line!(),
                        ::kernel::prelude::fmt!(
                            "{} is {:?}, not {:?}",
                            ::core::stringify!($have),
                            have,
                            want
                        ),
                    );
                }
            }
        }
    };
}

/// Empties the log. Makes the test fail if the log was not `$want`.
macro_rules! logged {
    ($($want:expr),* $(,)?) => {{
        let want: &[$crate::fakes::Event] = &[$($want),*];
        let have = $crate::fakes::log();
        if &have[..] != want {
            $crate::fakes::fails(
                ::kernel::c_str!(::core::file!()),
                ::core::line!(),
                ::kernel::prelude::fmt!("the calls were {:?}, not {:?}", &have[..], want),
            );
        }
    }};
}

pub(crate) use check;
pub(crate) use logged;
pub(crate) use same;

/// Runs `body` in a new world. Makes the test fail if the module still holds anything, or if a
/// prepared failure or hook is unused.
pub(crate) fn test(body: impl FnOnce() -> Result) -> Result {
    fake_test_begins();
    alone(|| body().inspect(|()| nothing_left()))
}

/// Runs `body` like [`test`] but without the final checks, for code that is not a KUnit test.
pub(crate) fn alone<R>(body: impl FnOnce() -> Result<R>) -> Result<R> {
    with(|world| mem::replace(world, World::new()));
    to_result(fake_machine_new())?;
    fake_parameters(0, 1);
    let result = to_result(fake_sysfs_new()).and_then(|()| body());
    // The BARs are forgotten, because the next test has another machine.
    drop(Bars);
    // Code that still uses an object or a device holds a reference to it.
    fake_sysfs_free();
    fake_machine_free();
    result
}

/// Makes the test fail if the module still holds a reference, a pin, a mapping, or a registration.
pub(crate) fn nothing_left() {
    same!(fake_device_refs(), 0);
    for counts in entries::registry(Registry::counts) {
        same!((counts.active, counts.active_bytes), (0, 0));
    }
    let cursor = KBox::pin_init(Cursor::new(), GFP_KERNEL);
    check!(cursor.is_ok_and(|cursor| cursor.find(0).is_none()));
    same!(fake_sysfs_refs(), 0);
    with(|world| {
        let unreached = world.hooks.first().map(|(point, _)| *point);
        let unfailed = world.failures.iter().find(|failure| failure.times > 0);
        let unfailed = unfailed.map(|failure| failure.call);
        // The checks below must not lock the world again. The macros lock no world.
        same!(world.pins.len(), 0);
        same!(world.mappings.len(), 0);
        same!(world.bar.len(), 0);
        same!(world.iovas.len(), 0);
        same!(world.holds, 0);
        same!(world.core.left(), (0, 0));
        same!(unreached, None);
        same!(unfailed, None);
    });
}

fn or_null(text: Option<&CStr>) -> *const c_char {
    text.map_or(ptr::null(), CStr::as_char_ptr)
}

/// Creates a `memory_peers` that another module owns, and a client in it.
pub(crate) fn occupy(client: Option<&CStr>) {
    // SAFETY: The pointer is NULL or a C string, and is only used during the call.
    unsafe { fake_sysfs_occupy(or_null(client)) };
}

/// Returns `true` if `memory_peers` exists, with the client and with the file.
pub(crate) fn shows(client: Option<&CStr>, file: Option<&CStr>) -> bool {
    // SAFETY: The pointers are NULL or C strings, and are only used during the call.
    unsafe { fake_sysfs_has(or_null(client), or_null(file)) }
}

/// Returns the NIC.
pub(crate) fn nic() -> Result<PciDevice> {
    // SAFETY: The device exists as long as the test.
    unsafe { PciDevice::with_device(fake_nic().cast(), |device| device.cloned()) }.ok_or(ENODEV)
}

/// Makes the test fail if anything is mapped.
pub(crate) fn nothing_mapped() {
    let mapped = with(|world| world.bar.len() + world.iovas.len());
    same!(mapped, 0);
}

/// Sets the path between the NIC and memory.
pub(crate) fn guard(guard: Guard) {
    with(|world| world.guard = guard);
    // CAST: The numbers match `fakes.h`.
    fake_nic_guard(guard as c_int);
}

/// Returns the number of references to the module.
pub(crate) fn holds() -> i64 {
    with(|world| world.holds)
}

/// Returns the number of nvidia.ko's pins.
pub(crate) fn pins() -> usize {
    with(|world| world.pins.len())
}

// --- threads ------------------------------------------------------------------------------------

#[pin_data]
struct ThreadState {
    #[pin]
    done: Completion,
    finished: Atomic<bool>,
}

struct Start {
    body: Hook,
    state: Arc<ThreadState>,
}

/// A kernel thread, which the module takes for a process of its own. The drop waits until the
/// thread has ended.
pub(crate) struct Thread {
    task: NonNull<c_void>,
    state: Arc<ThreadState>,
}

impl Thread {
    /// Runs `body` once on a new thread.
    pub(crate) fn start(body: impl FnMut() + Send + 'static) -> Result<Self> {
        let state = Arc::pin_init(
            pin_init!(ThreadState {
                done <- Completion::new(),
                finished: Atomic::new(false),
            }),
            GFP_KERNEL,
        )?;
        let start = KBox::new(
            Start {
                body: KBox::new(body, GFP_KERNEL)?,
                state: state.clone(),
            },
            GFP_KERNEL,
        )?;
        let data = KBox::into_raw(start);
        // SAFETY: If the thread is started, `thread_main` takes ownership of `data`, once.
        let task = unsafe { fake_thread_start(thread_main, data.cast()) };
        let Some(task) = NonNull::new(task) else {
            // SAFETY: No thread was started, and `into_raw` returned the pointer above.
            drop(unsafe { KBox::from_raw(data) });
            return Err(ENOMEM);
        };
        Ok(Thread { task, state })
    }

    /// Returns `true` if the thread ends within ten seconds.
    pub(crate) fn ends(&self) -> bool {
        (0..10_000).any(|_| {
            fsleep(Delta::from_millis(1));
            self.state.finished.load(Acquire)
        })
    }

    /// Waits for the thread's end.
    pub(crate) fn join(self) {}
}

// SAFETY: A task may be waited for on any thread.
unsafe impl Send for Thread {}

impl Drop for Thread {
    fn drop(&mut self) {
        self.state.done.wait_for_completion();
        // SAFETY: This thread has a reference to the task, whose function has ended.
        unsafe { fake_thread_join(self.task.as_ptr()) };
    }
}

/// # Safety
///
/// `data` must be a [`Start`] of [`Thread::start`]. This function takes ownership of `data`.
unsafe extern "C" fn thread_main(data: *mut c_void) -> c_int {
    // SAFETY: The caller passes ownership of a `Start`.
    let start = unsafe { <KBox<Start>>::from_raw(data.cast()) };
    let Start { mut body, state } = KBox::into_inner(start);
    body();
    drop(body);
    state.finished.store(true, Release);
    state.done.complete_all();
    0
}

// --- nvidia.ko ----------------------------------------------------------------------------------

/// Returns a page table in the form that the test requires.
fn new_table(form: &TableForm, len: u64) -> Result<KBox<TableMemory>> {
    let bytes = KIB_64 << u32::from(form.page_size == 2);
    let entries = (len / bytes).saturating_add_signed(i64::from(form.surplus));
    let count = usize::try_from(entries)?;
    let mut memory = KBox::new(
        TableMemory {
            table: c::peermem_page_table::default(),
            pages: KVVec::with_capacity(count, GFP_KERNEL)?,
            list: KVVec::with_capacity(count, GFP_KERNEL)?,
        },
        GFP_KERNEL,
    )?;
    for number in 0..entries {
        let page = c::nvidia_p2p_page {
            physical_address: (form.address)(number),
            ..Default::default()
        };
        memory.pages.push(page, GFP_KERNEL)?;
    }
    let memory_of = &mut *memory;
    for page in memory_of.pages.iter_mut() {
        memory_of.list.push(page, GFP_KERNEL)?;
    }
    memory_of.table = c::peermem_page_table {
        version: form.version,
        page_size: form.page_size,
        pages: if form.no_pages {
            ptr::null_mut()
        } else {
            memory_of.list.as_mut_ptr()
        },
        entries: u32::try_from(entries)?,
        gpu_uuid: ptr::null_mut(),
        flags: form.flags,
    };
    Ok(memory)
}

/// The common part of both functions that pin. Returns the code and the table.
fn pin(
    len: u64,
    failure: Option<c_int>,
    callback: Option<FreeCallback>,
    data: usize,
) -> (c_int, usize) {
    if let Some(code) = failure {
        return (code, GARBAGE);
    }
    let form = with(|world| world.table);
    let pinned = new_table(&form, len).and_then(|memory| {
        let pin = Pinned {
            memory,
            callback,
            data,
        };
        let table = if form.no_table { 0 } else { pin.table() };
        with(|world| world.pins.push(pin, GFP_KERNEL))?;
        Ok(table)
    });
    match pinned {
        Ok(table) => (0, table),
        Err(error) => (error.to_errno(), GARBAGE),
    }
}

/// # Safety
///
/// The requirements are those of `nvidia_p2p_get_pages()`.
pub(crate) unsafe extern "C" fn nvidia_p2p_get_pages(
    _p2p_token: u64,
    _va_space: u32,
    _va: u64,
    len: u64,
    page_table: *mut *mut c::nvidia_p2p_page_table,
    free_callback: Option<FreeCallback>,
    data: *mut c_void,
) -> c_int {
    record(Event::Pin);
    check!(free_callback.is_some());
    let (ret, table) = pin(len, failing(Call::Pin), free_callback, data.addr());
    // SAFETY: The caller promises that the pointer is valid for writes.
    unsafe { *page_table = ptr::with_exposed_provenance_mut(table) };
    ret
}

/// # Safety
///
/// The requirements are those of `nvidia_p2p_get_pages_persistent()`.
pub(crate) unsafe extern "C" fn nvidia_p2p_get_pages_persistent(
    _va: u64,
    len: u64,
    page_table: *mut *mut c::nvidia_p2p_page_table,
    flags: u32,
) -> c_int {
    record(Event::PinPersistent);
    check!(flags == 0);
    let (ret, table) = pin(len, failing(Call::PinPersistent), None, 0);
    // SAFETY: The caller promises that the pointer is valid for writes.
    unsafe { *page_table = ptr::with_exposed_provenance_mut(table) };
    ret
}

/// Removes a pin and the mappings of its table from the world.
fn remove_pin(table: usize) -> Option<Pinned> {
    with(|world| {
        let index = world.pin_of(table)?;
        // nvidia.ko's put unmaps the remaining mappings, but the module must unmap them itself.
        while take_first(&mut world.mappings, |mapping| mapping.table == table).is_some() {
            fails(c"nvidia.ko", 0, fmt!("unpinned while mapped"));
        }
        world.pins.remove(index).ok()
    })
}

/// Poisons and frees the memory of a pin. Code that reads the memory later sees no table.
fn free_pin(mut pin: Pinned) {
    pin.memory.table.version = 0x6b6b_6b6b;
    pin.memory.table.entries = 0;
    pin.memory.table.pages = ptr::null_mut();
    for page in pin.memory.pages.iter_mut() {
        page.physical_address = 0x6b6b_6b6b_6b6b_6b6b;
    }
}

/// # Safety
///
/// The requirements are those of `nvidia_p2p_put_pages()`. `page_table` is only compared, never
/// dereferenced.
pub(crate) unsafe extern "C" fn nvidia_p2p_put_pages(
    _p2p_token: u64,
    _va_space: u32,
    _va: u64,
    page_table: *mut c::nvidia_p2p_page_table,
) -> c_int {
    match remove_pin(page_table.addr()) {
        Some(pin) => {
            record(Event::Put);
            check!(pin.callback.is_some());
            free_pin(pin);
        }
        None => record(Event::PutNothing),
    }
    0
}

/// # Safety
///
/// The requirements are those of `nvidia_p2p_put_pages_persistent()`.
pub(crate) unsafe extern "C" fn nvidia_p2p_put_pages_persistent(
    _va: u64,
    page_table: *mut c::nvidia_p2p_page_table,
    flags: u32,
) -> c_int {
    record(Event::PutPersistent);
    check!(flags == 0);
    match remove_pin(page_table.addr()) {
        Some(pin) if pin.callback.is_none() => free_pin(pin),
        _ => fails(c"nvidia.ko", 0, fmt!("no table to put_pages_persistent()")),
    }
    0
}

/// # Safety
///
/// The requirements are those of `nvidia_p2p_dma_map_pages()`.
pub(crate) unsafe extern "C" fn nvidia_p2p_dma_map_pages(
    peer: *mut bindings::pci_dev,
    page_table: *mut c::nvidia_p2p_page_table,
    dma_mapping: *mut *mut c::nvidia_p2p_dma_mapping,
) -> c_int {
    record(Event::Map);
    let made = match failing(Call::Map) {
        Some(code) => Err(code),
        None => new_mapping(page_table.addr(), peer).map_err(Error::to_errno),
    };
    let (ret, mapping) = match made {
        Ok(mapping) => (0, mapping),
        Err(code) => (code, GARBAGE),
    };
    // SAFETY: The caller promises that the pointer is valid for writes.
    unsafe { *dma_mapping = ptr::with_exposed_provenance_mut(mapping) };
    ret
}

/// Creates a mapping. Returns its address, or 0 if the test requires success without a mapping.
fn new_mapping(table: usize, peer: *mut bindings::pci_dev) -> Result<usize> {
    with(|world| {
        let form = world.mapping;
        if form.no_mapping {
            return Ok(0);
        }
        let pin = world.pin_of(table).and_then(|index| world.pins.get(index));
        let pages = &pin.ok_or(EINVAL)?.memory.pages;
        let mut memory = KBox::new(
            MappingMemory {
                raw: c::nvidia_p2p_dma_mapping::default(),
                addresses: KVVec::new(),
            },
            GFP_KERNEL,
        )?;
        for page in pages.iter() {
            let address = page.physical_address + DMA_OFFSET;
            memory.addresses.push(address, GFP_KERNEL)?;
        }
        memory.raw.version = form.version;
        memory.raw.page_size_type = form.page_size;
        // CAST: The number of pages is small.
        memory.raw.entries = (pages.len() as u32).wrapping_add_signed(form.surplus);
        memory.raw.dma_addresses = if form.no_addresses {
            ptr::null_mut()
        } else {
            memory.addresses.as_mut_ptr()
        };
        memory.raw.pci_dev = peer;
        let address = ptr::from_mut(&mut memory.raw).expose_provenance();
        let mapping = Mapped { memory, table };
        world.mappings.push(mapping, GFP_KERNEL)?;
        Ok(address)
    })
}

/// # Safety
///
/// The requirements are those of `nvidia_p2p_dma_unmap_pages()`.
pub(crate) unsafe extern "C" fn nvidia_p2p_dma_unmap_pages(
    peer: *mut bindings::pci_dev,
    page_table: *mut c::nvidia_p2p_page_table,
    dma_mapping: *mut c::nvidia_p2p_dma_mapping,
) -> c_int {
    record(Event::Unmap);
    with(|world| {
        let found = take_first(&mut world.mappings, |mapping| {
            ptr::from_ref(&mapping.memory.raw).addr() == dma_mapping.addr()
        });
        let Some(mapping) = found else {
            return fails(c"nvidia.ko", 0, fmt!("no such mapping"));
        };
        check!(mapping.table == page_table.addr());
        check!(mapping.memory.raw.pci_dev == peer);
    });
    0
}

/// Frees the GPU memory: makes one callback for each pin that can be revoked, one after another.
pub(crate) fn free_memory() {
    // SAFETY: This is process context, in which a callback may run.
    free(|callback, data| unsafe { callback(data) });
}

/// Frees the memory like [`free_memory`], and makes each callback as if reclaim waited for it.
/// lockdep then reports a lock that the callback takes, if an earlier allocation was made with that
/// lock held.
pub(crate) fn free_memory_in_reclaim() {
    // SAFETY: This is process context, in which a callback may run.
    free(|callback, data| unsafe { fake_in_reclaim(callback, data) });
}

fn free(call: impl Fn(FreeCallback, *mut c_void)) {
    loop {
        let next = with(|world| {
            let mut pins = world.pins.iter_mut();
            pins.find_map(|pin| Some((pin.callback.take()?, pin.table(), pin.data)))
        });
        let Some((callback, table, data)) = next else {
            return;
        };
        record(Event::Callback);
        call(callback, ptr::without_provenance_mut(data));
        record(Event::CallbackReturns);
        remove_pin(table).into_iter().for_each(free_pin);
    }
}

/// Removes the pins that the module could not put, and for which no callback comes.
pub(crate) fn forget_pins() {
    let pins = with(|world| mem::take(&mut world.pins));
    pins.into_iter().for_each(free_pin);
}

/// Checks that each fake has the type of the function that it replaces.
macro_rules! typed_as_real {
    ($($fake:ident),* $(,)?) => {
        const _: () = {
            $(let _ = [$crate::root::c::$fake, $fake];)*
        };
    };
}

pub(crate) use typed_as_real;

typed_as_real!(
    nvidia_p2p_get_pages,
    nvidia_p2p_get_pages_persistent,
    nvidia_p2p_put_pages,
    nvidia_p2p_put_pages_persistent,
    nvidia_p2p_dma_map_pages,
    nvidia_p2p_dma_unmap_pages,
);

// --- the kernel: what kernel.c, memory_peers.c and the abstractions call ------------------------

#[no_mangle]
extern "C" fn fake_kobject_fails() -> bool {
    failing(Call::Kobject).is_some()
}

#[no_mangle]
extern "C" fn fake_group_fails() -> bool {
    failing(Call::Group).is_some()
}

#[no_mangle]
extern "C" fn fake_directory(made: bool) {
    record(if made { Event::Shows } else { Event::Hides });
}

#[no_mangle]
pub(crate) extern "C" fn fake_remembered() -> c_uint {
    // CAST: The module remembers few devices.
    Bars::remembered() as c_uint
}

/// # Safety
///
/// The requirements are those of `pci_get_device()`.
pub(crate) unsafe extern "C" fn pci_get_device(
    vendor: c_uint,
    device: c_uint,
    from: *mut bindings::pci_dev,
) -> *mut bindings::pci_dev {
    // SAFETY: The caller meets the requirements of `pci_get_device()`.
    unsafe { fake_pci_get(vendor, device, from.cast()) }.cast()
}

/// # Safety
///
/// The requirements are those of `try_module_get()`.
#[no_mangle]
pub(crate) unsafe extern "C" fn fake_module_get(_module: *mut bindings::module) -> bool {
    with(|world| {
        if !world.going {
            world.holds += 1;
        }
        !world.going
    })
}

/// # Safety
///
/// The requirements are those of `module_put()`.
#[no_mangle]
pub(crate) unsafe extern "C" fn fake_module_put(_module: *mut bindings::module) {
    with(|world| world.holds -= 1);
}

/// # Safety
///
/// The requirements are those of `sg_alloc_table()`.
#[no_mangle]
unsafe extern "C" fn fake_sg_alloc(
    table: *mut bindings::sg_table,
    entries: c_uint,
    gfp: bindings::gfp_t,
) -> c_int {
    reach(Point::Allocating);
    if let Some(code) = failing(Call::SgAlloc) {
        // `sg_alloc_table()` leaves counts in the table if it fails half way.
        // SAFETY: The caller promises that the table is valid for writes.
        unsafe { (*table).nents = 127 };
        // SAFETY: The caller promises that the table is valid for writes.
        unsafe { (*table).orig_nents = 127 };
        return code;
    }
    // SAFETY: The caller meets the requirements of `sg_alloc_table()`.
    unsafe { bindings::sg_alloc_table(table, entries, gfp) }
}

#[no_mangle]
extern "C" fn fake_resched() {
    with(|world| world.rests += 1);
}

const DMA_BIDIRECTIONAL: c_int = 0;
/// Distance between two IOMMU addresses of the same memory.
const ELSEWHERE: u64 = 1 << 42;

#[no_mangle]
extern "C" fn fake_dma_map(
    device: *mut bindings::device,
    addr: u64,
    len: usize,
    dir: c_int,
    _attrs: c_ulong,
) -> u64 {
    record(Event::BarMap);
    check!(dir == DMA_BIDIRECTIONAL);
    if failing(Call::BarMap).is_some() {
        // `DMA_MAPPING_ERROR`.
        return u64::MAX;
    }
    let dma = with(|world| {
        // Linux adds the offset of a range map to addresses of memory, but not to those of a BAR.
        let direct = matches!(
            world.guard,
            Guard::Nothing | Guard::Identity | Guard::RangeMap
        );
        let mut dma = addr + if direct { 0 } else { DMA_OFFSET };
        // An IOMMU does not allocate an address twice.
        while world.guard == Guard::Translates && world.bar.iter().any(|have| have.dma == dma) {
            dma += ELSEWHERE;
        }
        dma
    });
    let range = BarRange {
        device: device.addr(),
        dma,
        len,
    };
    match with(|world| world.bar.push(range, GFP_KERNEL)) {
        Ok(()) => dma,
        Err(_) => u64::MAX,
    }
}

#[no_mangle]
extern "C" fn fake_dma_unmap(
    device: *mut bindings::device,
    dma: u64,
    len: usize,
    dir: c_int,
    _attrs: c_ulong,
) {
    record(Event::BarUnmap);
    check!(dir == DMA_BIDIRECTIONAL);
    let range = BarRange {
        device: device.addr(),
        dma,
        len,
    };
    if with(|world| take_first(&mut world.bar, |have| *have == range)).is_none() {
        fails(c"DMA", 0, fmt!("{:#x}+{:#x} is not mapped", dma, len));
    }
}

/// `DMA_ATTR_MMIO`.
const MMIO: c_ulong = 1 << 10;

/// Stand-in for `dma_iova_try_alloc()`.
#[no_mangle]
extern "C" fn fake_iova_alloc(
    _device: *mut bindings::device,
    state: &mut bindings::dma_iova_state,
    _phys: u64,
    size: usize,
) -> bool {
    *state = bindings::dma_iova_state::default();
    if with(|world| world.guard) != Guard::Translates {
        return false;
    }
    record(Event::IovaAlloc);
    if failing(Call::IovaAlloc).is_some() {
        return false;
    }
    // CAST: Both types have 64 bits.
    let len = size as u64;
    with(|world| {
        let base = world.iova_base;
        // The next range starts directly behind this one.
        world.iova_base += len;
        (state.addr, state.__size) = (base, len);
        let linked = 0;
        let iova = Iova { base, len, linked };
        world.iovas.push(iova, GFP_KERNEL).is_ok()
    })
}

/// Changes the number of linked bytes. `change` returns the new number, or an error.
fn relink(state: &bindings::dma_iova_state, change: impl FnOnce(u64) -> Result<u64, &'static str>) {
    let result = with(|world| {
        let mut iovas = world.iovas.iter_mut();
        let iova = iovas.find(|iova| iova.base == state.addr);
        let iova = iova.ok_or("there is no such range")?;
        iova.linked = change(iova.linked)?;
        match iova.linked > iova.len {
            true => Err("more is linked than the range has"),
            false => Ok(()),
        }
    });
    if let Err(wrong) = result {
        fails(c"IOVA", 0, fmt!("{:#x}: {}", state.addr, wrong));
    }
}

/// Stand-in for `dma_iova_link()`.
#[no_mangle]
extern "C" fn fake_iova_link(
    _device: *mut bindings::device,
    state: &mut bindings::dma_iova_state,
    _phys: u64,
    _offset: usize,
    len: usize,
    dir: c_int,
    attrs: c_ulong,
) -> c_int {
    record(Event::IovaLink);
    check!(dir == DMA_BIDIRECTIONAL && attrs == MMIO);
    if let Some(code) = failing(Call::IovaLink) {
        return code;
    }
    // CAST: Both types have 64 bits.
    relink(state, |linked| Ok(linked + len as u64));
    0
}

/// Stand-in for `dma_iova_sync()`.
#[no_mangle]
extern "C" fn fake_iova_sync(
    _device: *mut bindings::device,
    _state: &mut bindings::dma_iova_state,
    _offset: usize,
    _len: usize,
) -> c_int {
    record(Event::IovaSync);
    failing(Call::IovaSync).unwrap_or(0)
}

/// Stand-in for `dma_iova_unlink()`.
#[no_mangle]
extern "C" fn fake_iova_unlink(
    _device: *mut bindings::device,
    state: &mut bindings::dma_iova_state,
    _offset: usize,
    len: usize,
    dir: c_int,
    attrs: c_ulong,
) {
    record(Event::IovaUnlink);
    check!(dir == DMA_BIDIRECTIONAL && attrs == MMIO);
    relink(state, |linked| {
        // CAST: Both types have 64 bits.
        let left = linked.checked_sub(len as u64);
        left.ok_or("more is unlinked than was linked")
    });
}

/// Stand-in for `dma_iova_free()`.
#[no_mangle]
extern "C" fn fake_iova_free(_device: *mut bindings::device, state: &mut bindings::dma_iova_state) {
    record(Event::IovaFree);
    relink(state, |linked| match linked {
        0 => Ok(0),
        _ => Err("freed with memory linked"),
    });
    with(|world| take_first(&mut world.iovas, |iova| iova.base == state.addr));
}
