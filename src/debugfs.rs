// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Files of debugfs that hold the module.
//!
//! C headers: [`include/linux/debugfs.h`](srctree/include/linux/debugfs.h),
//! [`include/linux/seq_file.h`](srctree/include/linux/seq_file.h).
//!
//! The kernel crate's files have no owner: closing one that was open while its module went calls what is there no
//! more. These keep the module.

use core::{
    marker::PhantomData,
    ptr, //
};

use kernel::{
    bindings,
    error::{
        from_result,
        to_result, //
    },
    fmt,
    prelude::*,
    seq_file::SeqFile,
    seq_print,
    str::CStr,
    types::ForeignOwnable, //
};

use crate::c;

/// What a file has to say.
pub(crate) trait Contents: 'static {
    /// Writes it; anew when it did not fit. May sleep.
    fn write(f: &mut fmt::Formatter<'_>) -> fmt::Result;
}

/// Who reads a file line by line: holds nothing between two of them, and no buffer has to have room for all.
///
/// One thread may open the file, and another read or close it: hence `Send`. The file's lock is held in each call.
pub(crate) trait Lines: Sized + Send + 'static {
    /// Somebody opens the file.
    fn open() -> Result<Pin<KBox<Self>>>;

    /// Goes to the first line with this number or a higher one, and says which it has. Numbers begin with 1, and 0 is
    /// the beginning of the file: what goes or comes in between moves nothing.
    fn find(&self, number: u64) -> Option<u64>;

    /// Writes that line.
    fn write(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result;
}

/// For the kernel's formatting.
struct Written<F>(F);

impl<F: Fn(&mut fmt::Formatter<'_>) -> fmt::Result> fmt::Display for Written<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (self.0)(f)
    }
}

/// What all files have in common.
const FILE: bindings::file_operations = bindings::file_operations {
    owner: &raw mut c::__this_module,
    read: Some(bindings::seq_read),
    llseek: Some(bindings::seq_lseek),
    ..pin_init::zeroed()
};

/// The functions of a file of [`Contents`].
struct ContentsOps<T>(PhantomData<T>);

impl<T: Contents> ContentsOps<T> {
    const FILE: bindings::file_operations = bindings::file_operations {
        open: Some(Self::open_callback),
        release: Some(bindings::single_release),
        ..FILE
    };

    /// # Safety
    ///
    /// As `open` of `struct file_operations`.
    unsafe extern "C" fn open_callback(
        _inode: *mut bindings::inode,
        file: *mut bindings::file,
    ) -> c_int {
        // SAFETY: As promised by the caller.
        unsafe { bindings::single_open(file, Some(Self::show_callback), ptr::null_mut()) }
    }

    /// # Safety
    ///
    /// `seq` points to a `seq_file` that nobody else uses during the call.
    unsafe extern "C" fn show_callback(seq: *mut bindings::seq_file, _: *mut c_void) -> c_int {
        // SAFETY: As promised by the caller.
        let seq = unsafe { SeqFile::from_raw(seq) };
        seq_print!(seq, "{}", Written(T::write));
        0
    }
}

/// The functions of a file of [`Lines`].
struct LinesOps<T>(PhantomData<T>);

impl<T: Lines> LinesOps<T> {
    const FILE: bindings::file_operations = bindings::file_operations {
        open: Some(Self::open_callback),
        release: Some(Self::release_callback),
        ..FILE
    };

    const SEQ: bindings::seq_operations = bindings::seq_operations {
        start: Some(Self::start_callback),
        next: Some(Self::next_callback),
        stop: Some(Self::stop_callback),
        show: Some(Self::show_callback),
    };

    /// # Safety
    ///
    /// As `open` of `struct file_operations`.
    unsafe extern "C" fn open_callback(
        _inode: *mut bindings::inode,
        file: *mut bindings::file,
    ) -> c_int {
        from_result(|| {
            let reader = T::open()?;
            // SAFETY: As promised by the caller.
            to_result(unsafe { bindings::seq_open(file, &Self::SEQ) })?;
            // SAFETY: `seq_open()` has made it, and nobody else uses it yet.
            unsafe {
                let seq = (*file).private_data.cast::<bindings::seq_file>();
                (*seq).private = reader.into_foreign();
            }
            Ok(0)
        })
    }

    /// # Safety
    ///
    /// As `release` of `struct file_operations`, after [`Self::open_callback`].
    unsafe extern "C" fn release_callback(
        inode: *mut bindings::inode,
        file: *mut bindings::file,
    ) -> c_int {
        // SAFETY: What `open_callback` has put there, which nobody uses any more.
        unsafe {
            let seq = (*file).private_data.cast::<bindings::seq_file>();
            drop(<Pin<KBox<T>>>::from_foreign((*seq).private));
            bindings::seq_release(inode, file)
        }
    }

    /// # Safety
    ///
    /// `seq` points to that of an open file, and `pos` to where in it; nobody else uses them during the call.
    unsafe extern "C" fn start_callback(
        seq: *mut bindings::seq_file,
        pos: *mut bindings::loff_t,
    ) -> *mut c_void {
        // SAFETY: As promised by the caller.
        let (private, pos) = unsafe { ((*seq).private, &mut *pos) };
        // SAFETY: `open_callback` has put the reader there, and `seq`'s lock is held.
        let reader = unsafe { <Pin<KBox<T>>>::borrow(private) };
        // CAST: A place in a file is not negative.
        let Some(number) = reader.find(*pos as u64) else {
            return ptr::null_mut();
        };
        // CAST: Numbers do not come that far.
        *pos = number as bindings::loff_t;
        private
    }

    /// # Safety
    ///
    /// As [`Self::start_callback`].
    unsafe extern "C" fn next_callback(
        seq: *mut bindings::seq_file,
        _: *mut c_void,
        pos: *mut bindings::loff_t,
    ) -> *mut c_void {
        // SAFETY: As promised by the caller.
        unsafe { *pos = (*pos).wrapping_add(1) };
        // SAFETY: As promised by the caller.
        unsafe { Self::start_callback(seq, pos) }
    }

    /// # Safety
    ///
    /// Has no requirements; the type is the C interface's.
    unsafe extern "C" fn stop_callback(_: *mut bindings::seq_file, _: *mut c_void) {}

    /// # Safety
    ///
    /// `seq` points to that of an open file that nobody else uses during the call, and `private` is what
    /// [`Self::start_callback`] gave.
    unsafe extern "C" fn show_callback(
        seq: *mut bindings::seq_file,
        private: *mut c_void,
    ) -> c_int {
        // SAFETY: As promised by the caller.
        let seq = unsafe { SeqFile::from_raw(seq) };
        // SAFETY: As promised by the caller.
        let reader = unsafe { <Pin<KBox<T>>>::borrow(private) };
        seq_print!(
            seq,
            "{}\n",
            Written(|f: &mut fmt::Formatter<'_>| reader.write(f))
        );
        0
    }
}

/// The module's directory, with its files, until dropped. Where the kernel has no debugfs, or does not make
/// one, nothing is there, and nothing is missed.
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
    pub(crate) fn new(name: &CStr) -> Self {
        // SAFETY: The name is copied.
        // INVARIANT: A new directory, or an error.
        Debugfs(unsafe { c::peermem_debugfs_dir(name.as_char_ptr()) })
    }

    /// Adds a file. The module stays loaded as long as anybody has it open.
    pub(crate) fn contents<T: Contents>(&self, name: &CStr, mode: u16) {
        self.file(name, mode, &ContentsOps::<T>::FILE);
    }

    /// Adds a file of lines. The module stays loaded as long as anybody has it open.
    pub(crate) fn lines<T: Lines>(&self, name: &CStr, mode: u16) {
        self.file(name, mode, &LinesOps::<T>::FILE);
    }

    fn file(&self, name: &CStr, mode: u16, ops: &'static bindings::file_operations) {
        // SAFETY: The directory is as debugfs wants it by the type invariant. The name is copied, and the functions
        // are there for as long as the module.
        unsafe { c::peermem_debugfs_file(name.as_char_ptr(), mode, self.0, ops) };
    }
}

impl Drop for Debugfs {
    /// Waits for who reads at the moment.
    fn drop(&mut self) {
        // SAFETY: The directory is as debugfs wants it by the type invariant, and used no more.
        unsafe { c::peermem_debugfs_remove(self.0) };
    }
}
