// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Items that the KUnit tests (`kunit/`) use and `src/` does not. The module's object contains no
//! such item.
//!
//! C headers: `include/kunit/test.h`, `include/linux/completion.h`. The C side is
//! `portable/kunit.c`.

use core::{
    cell::UnsafeCell,
    ffi::CStr,
    fmt::{
        self,
        Write, //
    },
    marker::PhantomPinned,
    mem::MaybeUninit,
    ops::{
        CoerceUnsized,
        Deref, //
    },
    ptr,
};

use crate::{
    alloc::{
        AllocError,
        Flags,
        KBox,
        KVVec,
        GFP_KERNEL, //
    },
    bindings,
    error::{
        Error,
        Result, //
    },
    ffi::{
        c_char,
        c_int, //
    },
    pin_init::{
        self,
        Initialized,
        PinInit, //
    },
    sync::{
        lock::{
            mutex::MutexBackend,
            Guard, //
        },
        LockClassKey,
        Mutex,
        Room, //
    },
};

/// C types and functions of the tests.
pub mod c {
    #![allow(missing_docs, non_camel_case_types, reason = "names of C")]

    use crate::{
        bindings::sg_table,
        ffi::{
            c_char,
            c_int,
            c_uint, //
        },
    };

    pub type gfp_t = c_uint;

    #[repr(C)]
    pub struct completion {
        _opaque: [u8; 0],
    }

    #[repr(C)]
    pub struct kunit {
        _opaque: [u8; 0],
    }

    /// `kunit.c` asserts the layout, which is that of Linux 7.3.
    #[repr(C)]
    pub struct kunit_case {
        pub run_case: Option<unsafe extern "C" fn(test: *mut kunit)>,
        pub name: *const c_char,
        pub rest: [u64; 7],
    }

    /// `kunit.c` asserts the layout, which is that of Linux 7.3.
    #[repr(C)]
    pub struct kunit_suite {
        pub name: [u8; 256],
        pub calls: [usize; 4],
        pub test_cases: *mut kunit_case,
        pub rest: [u64; 37],
    }

    extern "C" {
        pub fn sg_alloc_table(table: *mut sg_table, nents: c_uint, gfp: gfp_t) -> c_int;
        pub fn shim_complete_all(completion: *mut completion);
        pub fn shim_completion_init(completion: *mut completion);
        pub fn shim_completion_wait(completion: *mut completion);
        pub fn shim_kunit_fail(test: *mut kunit);
    }
}

/// Items about the kernel's pages.
pub mod page {
    /// Size of a page, in bytes. `kunit.c` asserts the number.
    pub const PAGE_SIZE: usize = 4096;
}

impl<T: ?Sized + core::marker::Unsize<U>, U: ?Sized> CoerceUnsized<KBox<U>> for KBox<T> {}

/// Converts the return value of a C function. A negative error number becomes an error, and any
/// other number becomes `Ok`.
pub fn to_result(returned: c_int) -> Result {
    match returned {
        0.. => Ok(()),
        errno => Err(Error::from_errno(errno)),
    }
}

/// A vector. The tests do not depend on the way in which the vector's memory is allocated.
pub type KVec<T> = KVVec<T>;

impl<T> Default for KVVec<T> {
    fn default() -> Self {
        KVVec::new()
    }
}

/// The error of [`KVVec::remove`] for a missing element.
#[derive(Debug)]
pub struct RemoveError;

impl<T> KVVec<T> {
    /// Appends `value`. May sleep.
    pub fn push(&mut self, value: T, flags: Flags) -> Result<(), AllocError> {
        self.reserve(1, flags)?;
        self.push_within_capacity(value).map_err(|_| AllocError)
    }

    /// Removes the value at `index`, and moves each later value to the place before it.
    pub fn remove(&mut self, index: usize) -> Result<T, RemoveError> {
        let rest = self.get_mut(index..).ok_or(RemoveError)?;
        let (first, after) = rest.split_first_mut().ok_or(RemoveError)?;
        let count = after.len();
        let first = ptr::from_mut(first);
        // SAFETY: `first` is a value, followed by `count` other values. The length shrinks before
        // any code reads the vector again.
        let value = unsafe {
            let value = first.read();
            ptr::copy(first.add(1), first, count);
            value
        };
        // INVARIANT: The first `len` elements are values. The vector had at least one element, and
        // `first` was moved out.
        self.len -= 1;
        Ok(value)
    }
}

/// A string for C that owns its memory.
pub struct CString(KVec<u8>);

impl CString {
    /// Formats a string. May sleep.
    pub fn try_from_fmt(text: fmt::Arguments<'_>) -> Result<Self> {
        struct Writer(KVec<u8>);

        impl Write for Writer {
            fn write_str(&mut self, text: &str) -> fmt::Result {
                text.bytes()
                    .try_for_each(|byte| self.0.push(byte, GFP_KERNEL))
                    .map_err(|_| fmt::Error)
            }
        }

        let mut writer = Writer(KVec::new());
        writer.write_fmt(text).map_err(|_| AllocError)?;
        writer.0.push(0, GFP_KERNEL)?;
        Ok(CString(writer.0))
    }
}

impl Deref for CString {
    type Target = CStr;

    fn deref(&self) -> &CStr {
        CStr::from_bytes_until_nul(&self.0).unwrap_or_default()
    }
}

/// An event that happens once: `struct completion`.
///
/// # Invariants
///
/// The memory holds an initialized completion.
pub struct Completion(Room<16>, PhantomPinned);

// SAFETY: A completion is not tied to a thread.
unsafe impl Send for Completion {}
// SAFETY: A completion has its own lock.
unsafe impl Sync for Completion {}

impl Completion {
    /// Returns an initializer of an event that has not happened.
    pub fn new() -> impl PinInit<Self> {
        let closure = pin_init::closure(move |place: *mut Self| {
            // SAFETY: `place` is valid for writes by the contract of `PinInit`, is large enough
            // (`kunit.c`), and does not move.
            // INVARIANT: `init_completion()` initializes the completion.
            unsafe {
                (&raw mut (*place).0).write(Room::new());
                bindings::shim_completion_init((*place).0.get().cast());
                Initialized::new()
            }
        });
        // SAFETY: The closure writes all fields that have a size.
        unsafe { pin_init::from_closure(closure) }
    }

    /// Records the event and wakes all waiting threads.
    pub fn complete_all(&self) {
        // SAFETY: The completion is initialized by the type invariant.
        unsafe { bindings::shim_complete_all(self.0.get().cast()) };
    }

    /// Waits for the event, uninterruptibly.
    pub fn wait_for_completion(&self) {
        // SAFETY: The completion is initialized by the type invariant.
        unsafe { bindings::shim_completion_wait(self.0.get().cast()) };
    }
}

/// A mutex for a static variable. [`init`](Self::init) initializes the mutex.
pub struct GlobalLock<T> {
    first: UnsafeCell<Option<T>>,
    lock: UnsafeCell<MaybeUninit<Mutex<T>>>,
    class: LockClassKey,
}

// SAFETY: `init` is called before every use, and a mutex may be shared.
unsafe impl<T: Send> Sync for GlobalLock<T> {}

impl<T> GlobalLock<T> {
    /// Returns a mutex that is not initialized.
    #[doc(hidden)]
    pub const fn new(first: T) -> Self {
        GlobalLock {
            first: UnsafeCell::new(Some(first)),
            lock: UnsafeCell::new(MaybeUninit::uninit()),
            class: LockClassKey::new(),
        }
    }

    /// Initializes the mutex.
    ///
    /// # Safety
    ///
    /// The caller must call this function once, before every use.
    pub unsafe fn init(&'static self) {
        // SAFETY: By the safety requirements, no other code uses the static yet. A static does not
        // move.
        unsafe {
            if let Some(first) = (*self.first.get()).take() {
                Mutex::new(first, c"peermem_kunit", &self.class)
                    .__pinned_init(self.lock.get().cast::<Mutex<T>>());
            }
        }
    }

    /// Takes the mutex.
    pub fn lock(&'static self) -> Guard<'static, T, MutexBackend> {
        // SAFETY: The mutex is initialized: `global_lock!` is `unsafe(uninit)`, so its user has called
        // `init` before.
        unsafe { (*self.lock.get()).assume_init_ref() }.lock()
    }
}

/// Declares a static mutex around a value.
#[macro_export]
macro_rules! global_lock {
    (unsafe(uninit) static $name:ident: Mutex<$type:ty> = $value:expr;) => {
        static $name: $crate::kunit::GlobalLock<$type> = $crate::kunit::GlobalLock::new($value);
    };
}

/// Makes arguments for a formatting function.
#[macro_export]
macro_rules! fmt {
    ($($all:tt)*) => { ::core::format_args!($($all)*) };
}

/// Makes a C string from a literal.
#[macro_export]
macro_rules! c_str {
    ($text:expr) => {
        const {
            match ::core::ffi::CStr::from_bytes_with_nul(concat!($text, "\0").as_bytes()) {
                Ok(text) => text,
                Err(_) => panic!("a NUL in a string for C"),
            }
        }
    };
}

/// Makes an entry of a table of test cases.
#[doc(hidden)]
pub const fn case(
    name: &'static CStr,
    run: unsafe extern "C" fn(*mut bindings::kunit),
) -> bindings::kunit_case {
    bindings::kunit_case {
        run_case: Some(run),
        name: name.as_ptr().cast::<c_char>(),
        rest: [0; 7],
    }
}

/// The last entry of a table of test cases.
#[doc(hidden)]
pub const END: bindings::kunit_case = bindings::kunit_case {
    run_case: None,
    name: ptr::null(),
    rest: [0; 7],
};

/// Makes a suite from a table of test cases.
#[doc(hidden)]
pub const fn suite(name: &str, test_cases: *mut bindings::kunit_case) -> bindings::kunit_suite {
    let mut text = [0; 256];
    let mut at = 0;
    while at < name.len() {
        text[at] = name.as_bytes()[at];
        at += 1;
    }
    bindings::kunit_suite {
        name: text,
        calls: [0; 4],
        test_cases,
        rest: [0; 37],
    }
}

/// Runs a case. An error fails the test.
#[doc(hidden)]
pub fn run(test: *mut bindings::kunit, case: fn() -> Result) {
    if case().is_err() {
        // SAFETY: KUnit passes the running test.
        unsafe { bindings::shim_kunit_fail(test) };
    }
}

/// Makes a suite. The macro implements `#[kunit_tests]`.
#[doc(hidden)]
#[macro_export]
macro_rules! kunit_suite {
    ($suite:ident, $($case:ident),* $(,)?) => {
        const _: () = {
            const COUNT: usize = [$(stringify!($case)),*].len() + 1;
            static mut CASES: [$crate::bindings::kunit_case; COUNT] = [
                $({
                    unsafe extern "C" fn run(test: *mut $crate::bindings::kunit) {
                        $crate::kunit::run(test, $case);
                    }
                    $crate::kunit::case($crate::c_str!(stringify!($case)), run)
                },)*
                $crate::kunit::END,
            ];
            static mut SUITE: $crate::bindings::kunit_suite =
                $crate::kunit::suite(stringify!($suite), (&raw mut CASES).cast());
            #[used(compiler)]
            #[link_section = ".kunit_test_suites"]
            static mut ENTRY: *mut $crate::bindings::kunit_suite = &raw mut SUITE;
        };
    };
}
