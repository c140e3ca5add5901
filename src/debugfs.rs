// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Files for administrators: in debugfs or, beside the proprietary nvidia.ko, in `/proc`.
//!
//! C headers: [`include/linux/debugfs.h`](srctree/include/linux/debugfs.h),
//! [`include/linux/proc_fs.h`](srctree/include/linux/proc_fs.h),
//! [`include/linux/seq_file.h`](srctree/include/linux/seq_file.h); C side:
//! [`helpers.c`](helpers.c), which selects the file system.
//!
//! The kernel crate's debugfs files have no owner. Closing such a file after the module was
//! unloaded would call code that is gone. This module's debugfs files have an owner, so an open
//! file keeps the module loaded. An open file in `/proc` is released when the module removes the
//! folder.

use core::marker::PhantomData;

use kernel::{
    bindings,
    error::from_result,
    fmt,
    prelude::*,
    seq_file::SeqFile,
    seq_print,
    str::CStr,
    types::ForeignOwnable, //
};

use crate::{
    c,
    log::Written, //
};

/// The reader of an open file, which produces the contents record by record. The reader holds no
/// lock between two records, and no buffer needs room for the whole file.
///
/// `Send` is required because one thread may open the file, and another may read or close it. The
/// file's lock is held in each call.
pub(crate) trait Contents: Sized + Send + 'static {
    /// Makes a reader when the file is opened.
    fn new() -> impl PinInit<Self>;

    /// Moves to the first record whose number is at least `number`, and returns its number. 0
    /// stands for the beginning of the file. Records that come or go between two calls do not shift
    /// the other records. By default, the whole file is one record.
    fn find(&self, number: u64) -> Option<u64> {
        (number == 0).then_some(0)
    }

    /// Writes the record that `find` found. Called again if the record did not fit. May sleep.
    fn write(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result;
}

/// The callbacks of a file.
struct FileOps<T>(PhantomData<T>);

impl<T: Contents> FileOps<T> {
    const OPS: c::peermem_file_ops = c::peermem_file_ops {
        open: Some(Self::open_callback),
        release: Some(Self::release_callback),
        find: Some(Self::find_callback),
        show: Some(Self::show_callback),
    };

    /// # Safety
    ///
    /// `reader` must be valid for writes.
    unsafe extern "C" fn open_callback(reader: *mut *mut c_void) -> c_int {
        from_result(|| {
            let new = KBox::pin_init(T::new(), GFP_KERNEL)?.into_foreign();
            // SAFETY: The caller promises that `reader` is valid for writes.
            unsafe { *reader = new };
            Ok(0)
        })
    }

    /// # Safety
    ///
    /// `reader` must come from [`Self::open_callback`], and must not be used afterwards.
    unsafe extern "C" fn release_callback(reader: *mut c_void) {
        // SAFETY: The caller promises that `reader` comes from `into_foreign`, and is not used
        // afterwards.
        drop(unsafe { <Pin<KBox<T>>>::from_foreign(reader) });
    }

    /// # Safety
    ///
    /// `reader` must come from [`Self::open_callback`], and the file's lock must be held. `number`
    /// must be valid for reads and writes.
    unsafe extern "C" fn find_callback(reader: *mut c_void, number: *mut u64) -> bool {
        // SAFETY: The caller promises that `reader` comes from `into_foreign`, and that `number` is
        // valid. The file's lock keeps other calls out.
        let (reader, number) = unsafe { (<Pin<KBox<T>>>::borrow(reader), &mut *number) };
        let found = reader.find(*number);
        *number = found.unwrap_or(*number);
        found.is_some()
    }

    /// # Safety
    ///
    /// The contract of [`Self::find_callback`] applies, and that function must have found a record.
    /// Nobody else may use `seq` during the call.
    unsafe extern "C" fn show_callback(seq: *mut bindings::seq_file, reader: *mut c_void) {
        // SAFETY: The caller promises that both pointers are valid, and that nobody else uses them
        // during the call.
        let (seq, reader) = unsafe { (SeqFile::from_raw(seq), <Pin<KBox<T>>>::borrow(reader)) };
        let record = Written(|f: &mut fmt::Formatter<'_>| reader.write(f));
        seq_print!(seq, "{}", record);
    }
}

/// The module's folder and its files, until dropped. If the kernel has neither debugfs nor procfs,
/// or cannot make the folder, the module works without files.
///
/// # Invariants
///
/// The pointer is this module's own folder, or the file system's value for no folder.
pub(crate) struct Folder(*mut c::peermem_folder);

// SAFETY: Both file systems lock their folders themselves.
unsafe impl Send for Folder {}
// SAFETY: See above.
unsafe impl Sync for Folder {}

impl Folder {
    /// Makes the folder without files. Only one folder may exist at a time.
    pub(crate) fn new() -> Self {
        // SAFETY: This runs in process context, where sleeping is allowed.
        // INVARIANT: The result is a new folder, or an error.
        Folder(unsafe { c::peermem_folder_add() })
    }

    /// Adds a file.
    pub(crate) fn add<T: Contents>(&self, name: &CStr, mode: u16) {
        let ops = &FileOps::<T>::OPS;
        // SAFETY: The file system accepts the folder by the type invariant, and copies the name.
        // The callbacks exist as long as the module, and are not called after the removal of the
        // folder.
        unsafe { c::peermem_folder_add_file(self.0, name.as_char_ptr(), mode, ops) };
    }
}

impl Drop for Folder {
    /// Waits for reads in progress. In `/proc`, also releases open files.
    fn drop(&mut self) {
        // SAFETY: The file system accepts the folder by the type invariant, and nothing uses the
        // folder afterwards.
        unsafe { c::peermem_folder_remove(self.0) };
    }
}
