// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Stand-ins for the functions of `portable/shim.c`. The stand-ins check the arguments that the
//! crate passes.

use std::alloc::{alloc, dealloc, Layout};
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::ffi::CStr;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::thread::ThreadId;

use crate::bindings;
use crate::ffi::{c_char, c_int, c_void};

// --- memory -----------------------------------------------------------------

/// One allocation.
struct Allocation {
    size: usize,
    /// `true` if `kvmalloc()` made the allocation.
    is_virtual: bool,
    /// The thread that made the allocation.
    owner: ThreadId,
}

static MEMORY: Mutex<Option<HashMap<usize, Allocation>>> = Mutex::new(None);

thread_local! {
    /// Number of allocations of this thread that still succeed. All later allocations fail.
    static SUCCEED: Cell<usize> = const { Cell::new(usize::MAX) };
    /// Sizes of this thread's allocations. The flag is `true` if the kernel logs a failure.
    static REQUESTS: RefCell<Vec<(usize, bool)>> = const { RefCell::new(Vec::new()) };
}

fn memory<R>(f: impl FnOnce(&mut HashMap<usize, Allocation>) -> R) -> R {
    let mut memory = MEMORY.lock().unwrap_or_else(PoisonError::into_inner);
    f(memory.get_or_insert_default())
}

/// Number of bytes before an allocation. These bytes keep every address from being aligned to more
/// than 8 bytes.
const LEAD: usize = 8;
/// Contents of memory before the crate writes to it, and after the crate has freed it.
const NEW: u8 = 0xa5;
const FREED: u8 = 0x6b;

/// Result of `kmalloc(0)`.
const ZERO_SIZE_PTR: *mut c_void = std::ptr::without_provenance_mut(16);

fn layout(size: usize) -> Layout {
    Layout::from_size_align(size + LEAD, 16).expect("a size that fits")
}

fn allocate(size: usize, warn: bool, is_virtual: bool) -> *mut c_void {
    REQUESTS.with_borrow_mut(|all| all.push((size, warn)));
    let succeed = SUCCEED.get();
    if succeed == 0 || size > 1 << 30 {
        return std::ptr::null_mut();
    }
    SUCCEED.set(succeed - 1);
    if size == 0 {
        assert!(!is_virtual, "a vector of nothing");
        return ZERO_SIZE_PTR;
    }
    // SAFETY: The layout has a nonzero size.
    let start = unsafe { alloc(layout(size)) };
    assert!(!start.is_null());
    // SAFETY: The allocation has `size + LEAD` bytes.
    let start = unsafe {
        start.write_bytes(NEW, size + LEAD);
        start.add(LEAD)
    };
    let owner = thread::current().id();
    let allocation = Allocation {
        size,
        is_virtual,
        owner,
    };
    memory(|all| all.insert(start.addr(), allocation));
    start.cast()
}

fn release(start: *mut c_void, is_virtual: bool) {
    if start == ZERO_SIZE_PTR {
        return;
    }
    let found = memory(|all| all.remove(&start.addr()));
    let found = found.expect("memory that is freed was allocated, and is freed once");
    assert_eq!(found.is_virtual, is_virtual, "freed by the wrong function");
    // SAFETY: `start - LEAD` and the layout are those of the allocation.
    unsafe {
        let start = start.cast::<u8>().sub(LEAD);
        start.write_bytes(FREED, found.size + LEAD);
        dealloc(start, layout(found.size));
    }
}

/// Runs `f`, and checks that this thread's allocations are freed afterwards.
pub(super) fn without_leaks<R>(f: impl FnOnce() -> R) -> R {
    let count = || {
        let this = thread::current().id();
        memory(|all| all.values().filter(|one| one.owner == this).count())
    };
    assert_eq!(count(), 0);
    let result = f();
    assert_eq!(count(), 0, "memory that is not freed");
    result
}

/// Runs `f`. The first `succeed` allocations of `f` succeed, and all later ones fail.
pub(super) fn failing_after<R>(succeed: usize, f: impl FnOnce() -> R) -> R {
    SUCCEED.set(succeed);
    let result = f();
    SUCCEED.set(usize::MAX);
    result
}

/// Returns the sizes of this thread's allocations since the last call. The flag is `true` if the
/// kernel logs a failure.
pub(super) fn requests() -> Vec<(usize, bool)> {
    REQUESTS.take()
}

#[no_mangle]
extern "C-unwind" fn shim_alloc(size: usize, warn: bool) -> *mut c_void {
    allocate(size, warn, false)
}

#[no_mangle]
extern "C-unwind" fn shim_free(start: *mut c_void) {
    release(start, false);
}

#[no_mangle]
extern "C-unwind" fn shim_valloc(size: usize, warn: bool) -> *mut c_void {
    allocate(size, warn, true)
}

#[no_mangle]
extern "C-unwind" fn shim_vfree(start: *mut c_void) {
    release(start, true);
}

// --- locks and wait queues --------------------------------------------------

/// A lock: its holder, and the arguments of its initialization.
#[derive(Default)]
struct Lock {
    holder: Option<ThreadId>,
    name: String,
    class: usize,
}

/// A wait queue: the number of wake-ups, and the number of waiting threads.
#[derive(Default)]
struct Queue {
    wakeups: usize,
    waiting: usize,
}

#[derive(Default)]
struct Threads {
    locks: HashMap<usize, Lock>,
    queues: HashMap<usize, Queue>,
}

static THREADS: Mutex<Option<Threads>> = Mutex::new(None);
static CHANGED: Condvar = Condvar::new();

fn threads() -> MutexGuard<'static, Option<Threads>> {
    THREADS.lock().unwrap_or_else(PoisonError::into_inner)
}

fn wait(guard: MutexGuard<'static, Option<Threads>>) -> MutexGuard<'static, Option<Threads>> {
    CHANGED.wait(guard).unwrap_or_else(PoisonError::into_inner)
}

/// Waits until no thread holds the lock, and makes this thread its holder.
fn take(mut guard: MutexGuard<'static, Option<Threads>>, lock: usize) {
    let this = thread::current().id();
    loop {
        let all = &mut guard.get_or_insert_default().locks;
        let state = all.get_mut(&lock).expect("a lock that was initialized");
        assert_ne!(state.holder, Some(this), "a thread waits for itself");
        if state.holder.is_none() {
            state.holder = Some(this);
            return;
        }
        guard = wait(guard);
    }
}

fn give_back(guard: &mut Option<Threads>, lock: usize) {
    let this = thread::current().id();
    let all = &mut guard.get_or_insert_default().locks;
    let state = all.get_mut(&lock).expect("a lock that was initialized");
    assert_eq!(
        state.holder.take(),
        Some(this),
        "released by a thread that does not hold the lock"
    );
    CHANGED.notify_all();
}

/// Initializes a lock, as C code does.
pub(super) fn make_lock(lock: usize, name: &str, class: usize) {
    let name = name.to_owned();
    let lock = (
        lock,
        Lock {
            holder: None,
            name,
            class,
        },
    );
    threads().get_or_insert_default().locks.extend([lock]);
}

/// Returns `true` if a thread holds the lock.
pub(super) fn is_held(lock: usize) -> bool {
    threads().get_or_insert_default().locks[&lock]
        .holder
        .is_some()
}

/// Returns address, name and class of the only lock within an object.
pub(super) fn lock_within<T>(object: &T) -> (usize, String, usize) {
    let start = std::ptr::from_ref(object).addr();
    let range = start..start + size_of::<T>();
    let mut guard = threads();
    let locks = &guard.get_or_insert_default().locks;
    let mut found = locks.iter().filter(|(at, _)| range.contains(at));
    let (at, lock) = found.next().expect("a lock");
    assert!(found.next().is_none(), "one lock");
    (*at, lock.name.clone(), lock.class)
}

/// Waits until `count` threads wait in queues within an object.
pub(super) fn until_waiting<T>(object: &T, count: usize) {
    let start = std::ptr::from_ref(object).addr();
    let range = start..start + size_of::<T>();
    let mut guard = threads();
    loop {
        let queues = &guard.get_or_insert_default().queues;
        let within = queues.iter().filter(|(at, _)| range.contains(at));
        if within.map(|(_, queue)| queue.waiting).sum::<usize>() == count {
            return;
        }
        guard = wait(guard);
    }
}

/// Returns `true` if the memory of a C structure is aligned and zero.
fn is_room<T>(start: *mut T, bytes: usize) -> bool {
    // SAFETY: The caller passes the size of the memory.
    let bytes = unsafe { std::slice::from_raw_parts(start.cast::<u8>(), bytes) };
    start.addr() % 8 == 0 && bytes.iter().all(|byte| *byte == 0)
}

unsafe fn text(name: *const c_char) -> String {
    // SAFETY: The caller passes a C string.
    unsafe { CStr::from_ptr(name.cast()) }
        .to_str()
        .expect("UTF-8")
        .to_owned()
}

#[no_mangle]
unsafe extern "C-unwind" fn shim_mutex_init(
    lock: *mut bindings::mutex,
    name: *const c_char,
    class: *mut bindings::lock_class_key,
) {
    assert!(is_room(lock, 160) && is_room(class, 64));
    // SAFETY: The crate passes a C string.
    make_lock(lock.addr(), &unsafe { text(name) }, class.addr());
}

#[no_mangle]
extern "C-unwind" fn shim_mutex_lock(lock: *mut bindings::mutex) {
    take(threads(), lock.addr());
}

#[no_mangle]
extern "C-unwind" fn shim_mutex_unlock(lock: *mut bindings::mutex) {
    give_back(&mut threads(), lock.addr());
}

#[no_mangle]
extern "C-unwind" fn shim_spin_lock(lock: *mut bindings::spinlock_t) {
    take(threads(), lock.addr());
}

#[no_mangle]
extern "C-unwind" fn shim_spin_unlock(lock: *mut bindings::spinlock_t) {
    give_back(&mut threads(), lock.addr());
}

#[no_mangle]
unsafe extern "C-unwind" fn shim_wait_init(
    queue: *mut bindings::wait_queue_head,
    name: *const c_char,
    class: *mut bindings::lock_class_key,
) {
    assert!(is_room(queue, 96) && is_room(class, 64));
    // SAFETY: The crate passes a C string.
    assert_ne!(unsafe { text(name) }, "");
    let queue = (queue.addr(), Queue::default());
    threads().get_or_insert_default().queues.extend([queue]);
}

#[no_mangle]
extern "C-unwind" fn shim_wait(queue: *mut bindings::wait_queue_head, lock: *mut bindings::mutex) {
    let mut guard = threads();
    let queue = queue.addr();
    let state = |guard: &mut Option<Threads>, change: isize| {
        let queues = &mut guard.get_or_insert_default().queues;
        let state = queues
            .get_mut(&queue)
            .expect("a queue that was initialized");
        state.waiting = state.waiting.checked_add_signed(change).expect("a count");
        state.wakeups
    };
    let before = state(&mut guard, 1);
    give_back(&mut guard, lock.addr());
    while state(&mut guard, 0) == before {
        guard = wait(guard);
    }
    state(&mut guard, -1);
    take(guard, lock.addr());
}

#[no_mangle]
extern "C-unwind" fn shim_wake_all(queue: *mut bindings::wait_queue_head) {
    let mut guard = threads();
    let queues = &mut guard.get_or_insert_default().queues;
    let state = queues
        .get_mut(&queue.addr())
        .expect("a queue that was initialized");
    state.wakeups += 1;
    CHANGED.notify_all();
}

// --- text and time ----------------------------------------------------------

thread_local! {
    static LOG: RefCell<Vec<(c_int, Vec<u8>)>> = const { RefCell::new(Vec::new()) };
    static SLEPT: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
}

/// Returns the levels and bytes that this thread has logged since the last call.
pub(super) fn logged() -> Vec<(c_int, Vec<u8>)> {
    LOG.take()
}

/// Returns the delays of this thread since the last call, in microseconds.
pub(super) fn slept() -> Vec<u64> {
    SLEPT.take()
}

/// Logs text up to the first NUL, like `printk("%.*s")`.
#[no_mangle]
unsafe extern "C-unwind" fn shim_print(level: c_int, text: *const c_char, length: c_int) {
    let length = usize::try_from(length).expect("a length");
    // SAFETY: The crate passes the length.
    let bytes = unsafe { std::slice::from_raw_parts(text.cast::<u8>(), length) };
    let bytes = bytes.split(|byte| *byte == 0).next().unwrap_or_default();
    LOG.with_borrow_mut(|log| log.push((level, bytes.to_owned())));
}

#[no_mangle]
extern "C-unwind" fn shim_sleep(microseconds: u64) {
    SLEPT.with_borrow_mut(|slept| slept.push(microseconds));
}

/// Stand-in for `seq_write()`. `file` points to a `Vec<u8>`.
#[no_mangle]
unsafe extern "C-unwind" fn shim_seq_write(
    file: *mut bindings::seq_file,
    text: *const c_void,
    length: usize,
) {
    // SAFETY: The tests pass a `Vec<u8>`, and the crate passes the length.
    unsafe {
        let bytes = std::slice::from_raw_parts(text.cast::<u8>(), length);
        (*file.cast::<Vec<u8>>()).extend_from_slice(bytes);
    }
}
