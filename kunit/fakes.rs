// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Fakes of nvidia.ko ([`nvidia`]), of the kernel's DMA interface ([`dma`]), and of the few other
//! kernel functions that a test observes. A test can see the calls and their order, make a call
//! fail, and run code in the middle of a call. The module `ib_core` contains the fake of ib_core.
//!
//! Only one [`World`] exists at a time, because the C functions have no argument that could
//! identify a world. KUnit runs its tests one after another, each inside [`test`].

use core::{
    iter,
    mem,
    panic::Location,
    ptr, //
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
            Atomic,
            Relaxed, //
        },
        global_lock, //
    }, //
};

use crate::{
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

mod dma;
mod nvidia;
mod thread;

pub(crate) use self::{
    dma::*,
    nvidia::*,
    thread::Thread, //
};

/// First address of the fake GPU's BAR: `FAKE_BAR_START` in `fakes.h`.
pub(crate) const BAR: u64 = 1 << 44;
/// Length of the fake GPU's first BAR, in bytes.
pub(crate) const BAR_LEN: u64 = 1 << 36;
/// First address of an I/O port range: `FAKE_IO_START`.
pub(crate) const IO: u64 = BAR + (1 << 40);
/// First address of an unassigned BAR: `FAKE_UNASSIGNED_START`.
pub(crate) const UNASSIGNED: u64 = BAR + (2 << 40);
/// First address of RAM that the fake GPU presents as a BAR, with struct pages: `FAKE_RAM_START`.
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
/// Size of a GPU page in nvidia.ko's usual page tables, in bytes.
pub(crate) const KIB_64: u64 = 64 << 10;

// The declarations match `fakes.h`. A `safe` function takes numbers, or references for its results,
// and accesses only devices and objects that exist while a test runs.
unsafe extern "C" {
    safe fn fake_machine_new() -> c_int;
    safe fn fake_machine_free();
    pub(crate) safe fn fake_nic() -> *mut c_void;
    /// Sets the NIC's maximum segment size.
    pub(crate) safe fn fake_nic_max_segment(bytes: c_uint);
    safe fn fake_nic_guard(guard: c_int);
    /// Returns the number of references to the fake devices. Does not count expected references,
    /// which `fakes.h` lists.
    pub(crate) safe fn fake_device_refs() -> c_uint;
    fn fake_pci_get(vendor: c_uint, device: c_uint, from: *mut c_void) -> *mut c_void;
    /// Returns the number of calls of [`pci_get_device`] so far.
    pub(crate) safe fn fake_pci_steps() -> c_uint;
    /// Removes the first GPU from the machine.
    pub(crate) safe fn fake_gpu_leaves();
    /// Sets the range that has struct pages. See `fakes.h`.
    pub(crate) safe fn fake_pages(start: u64, len: u64, kind: c_int);
    pub(crate) safe fn fake_pagemap_refs() -> c_int;
    /// Removes the first GPU, and adds a new GPU with the same PCI address.
    pub(crate) safe fn fake_gpu_is_replaced() -> c_int;
    /// Adds `count` GPUs to the machine, each with a BAR of [`SMALL_LEN`].
    pub(crate) safe fn fake_more_gpus(count: c_uint) -> c_int;
    /// Replaces the NIC by a new NIC with the same PCI address.
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

/// An entry of the log: a call, or a mark that the test makes.
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
    /// A call of `nvidia_p2p_put_pages()` with a table that belongs to no pin.
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
    /// The module has removed `memory_peers`, and no reader uses the directory any more.
    Hides,
    /// A mark that the test itself adds to the log.
    Mark(&'static str),
}

/// A client's name.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Name {
    NvMem,
    NvMemNc,
    Other,
}

/// A function that a test can make fail.
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

/// A place in the fakes where a test can run code. The code runs on the thread that reaches the
/// place.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Point {
    /// Just before `ib_register_peer_memory_client()` returns. ib_core already knows the client.
    Registering,
    /// The start of `sg_alloc_table()`, which allocates one chunk of a scatter list or the whole
    /// list.
    Allocating,
}

struct Failure {
    call: Call,
    /// Number of calls that still succeed before the first failure.
    skip: u32,
    times: u32,
    code: c_int,
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
    /// Number of references from `try_module_get()` that the module has not dropped.
    pub(crate) holds: i64,
    /// Number of calls of `cond_resched()`.
    pub(crate) rests: u32,
    pins: KVec<Pinned>,
    mappings: KVec<Mapped>,
    pub(crate) bar: KVec<BarRange>,
    guard: Guard,
    /// Start of the next range of IOMMU addresses. The alignment is only that of an IOMMU page.
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
        // Rust does not drop statics when their module is unloaded.
        let world = with(|world| mem::replace(world, World::new()));
        let life = LIFE.lock().take();
        drop((world, life));
    }
}

/// Stores the [`Life`], the record of one run of the module.
pub(crate) fn remember(life: Life) {
    *LIFE.lock() = Some(life);
}

/// Calls `look` with the stored [`Life`].
pub(crate) fn remembered(look: impl FnOnce(&Life) -> Result) -> Result {
    look(LIFE.lock().as_ref().ok_or(ENOENT)?)
}

/// Calls `f` with the world of the fakes. Allocations in `f` do not wait for reclaim. Otherwise,
/// during a callback, lockdep would report an allocation of the fakes instead of one of the module.
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

/// Returns the error code with which this call of `call` must fail, or `None` if it must succeed.
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

/// Makes the test fail, but lets it continue. Any thread may call this function.
pub(crate) fn fails(file: &CStr, line: u32, text: fmt::Arguments<'_>) {
    FAILED.fetch_add(1, Relaxed);
    let text = CString::try_from_fmt(text);
    let text = text.as_deref().unwrap_or(c"(no memory for the text)");
    // SAFETY: Both pointers are to C strings that outlive the call.
    // CAST: Line numbers are small.
    unsafe { fake_test_fails(file.as_char_ptr(), line as c_int, text.as_char_ptr()) };
}

/// Iterates over the rows of a table. If a check fails during a row, the test also reports the
/// number of that row.
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
                fmt!("the failed check is in row {} of {}:{}", number, file, line),
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

/// Checks that each fake has the type of the function that it replaces.
macro_rules! typed_as_real {
    ($($fake:ident),* $(,)?) => {
        const _: () = {
            $(let _ = [$crate::root::c::$fake, $fake];)*
        };
    };
}

pub(crate) use check;
pub(crate) use logged;
pub(crate) use same;
pub(crate) use typed_as_real;

/// Runs `body` in a new world. Afterwards, makes the test fail if the module still holds anything,
/// or if a prepared failure or hook was not used.
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
    // The module forgets the BARs, because the next test has other fake devices.
    drop(Bars);
    // If the module still uses an object or device, its reference keeps the object or device alive.
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
        // The world is locked here. The macros below do not lock it again.
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

/// Creates `memory_peers` as another module would. Also creates the directory of `client` in it,
/// unless `client` is `None`.
pub(crate) fn occupy(client: Option<&CStr>) {
    // SAFETY: The pointer is NULL or a C string, and is only used during the call.
    unsafe { fake_sysfs_occupy(or_null(client)) };
}

/// Returns `true` if `memory_peers` exists and contains the directory `client` with the file
/// `file`. `None` skips the check of the directory or of the file.
pub(crate) fn shows(client: Option<&CStr>, file: Option<&CStr>) -> bool {
    // SAFETY: The pointers are NULL or C strings, and are only used during the call.
    unsafe { fake_sysfs_has(or_null(client), or_null(file)) }
}

/// Returns the NIC.
pub(crate) fn nic() -> Result<PciDevice> {
    // SAFETY: The device exists until the test ends.
    unsafe { PciDevice::with_device(fake_nic().cast(), |device| device.cloned()) }.ok_or(ENODEV)
}

/// Returns the number of references to the module.
pub(crate) fn holds() -> i64 {
    with(|world| world.holds)
}

// --- kernel functions that kernel.c, memory_peers.c and the abstractions call ---------------

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
    // CAST: The module keeps few references to devices.
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
        // If `sg_alloc_table()` fails half way, it leaves entry counts in the table.
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
