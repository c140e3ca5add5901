// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Files for administrators: in debugfs or, beside the proprietary nvidia.ko, in `/proc`.
//!
//! C headers: [`include/linux/debugfs.h`](srctree/include/linux/debugfs.h),
//! [`include/linux/proc_fs.h`](srctree/include/linux/proc_fs.h),
//! [`include/linux/seq_file.h`](srctree/include/linux/seq_file.h); C side: [`helpers.c`](helpers.c), which chooses.
//!
//! The kernel crate's files have no owner: closing one that was open while its module went calls what is there no
//! more. An open file of debugfs keeps the module. One in `/proc` is released when the module removes the folder.

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

/// The functions of a file of [`Contents`].
struct ContentsOps<T>(PhantomData<T>);

impl<T: Contents> ContentsOps<T> {
    const FILE: c::peermem_file_ops = c::peermem_file_ops {
        open: None,
        release: None,
        find: None,
        show: Some(Self::show_callback),
    };

    /// # Safety
    ///
    /// `seq` points to a `seq_file` that nobody else uses during the call.
    unsafe extern "C" fn show_callback(seq: *mut bindings::seq_file, _: *mut c_void) {
        // SAFETY: As promised by the caller.
        let seq = unsafe { SeqFile::from_raw(seq) };
        seq_print!(seq, "{}", Written(T::write));
    }
}

/// The functions of a file of [`Lines`].
struct LinesOps<T>(PhantomData<T>);

impl<T: Lines> LinesOps<T> {
    const FILE: c::peermem_file_ops = c::peermem_file_ops {
        open: Some(Self::open_callback),
        release: Some(Self::release_callback),
        find: Some(Self::find_callback),
        show: Some(Self::show_callback),
    };

    /// # Safety
    ///
    /// `reader` is valid for writes.
    unsafe extern "C" fn open_callback(reader: *mut *mut c_void) -> c_int {
        from_result(|| {
            let new = T::open()?.into_foreign();
            // SAFETY: As promised by the caller.
            unsafe { *reader = new };
            Ok(0)
        })
    }

    /// # Safety
    ///
    /// `reader` is what [`Self::open_callback`] gave, and used no more.
    unsafe extern "C" fn release_callback(reader: *mut c_void) {
        // SAFETY: As promised by the caller.
        drop(unsafe { <Pin<KBox<T>>>::from_foreign(reader) });
    }

    /// # Safety
    ///
    /// `reader` is what [`Self::open_callback`] gave, and the file's lock is held. `number` is valid for reads and writes.
    unsafe extern "C" fn find_callback(reader: *mut c_void, number: *mut u64) -> bool {
        // SAFETY: As promised by the caller.
        let (reader, number) = unsafe { (<Pin<KBox<T>>>::borrow(reader), &mut *number) };
        let found = reader.find(*number);
        *number = found.unwrap_or(*number);
        found.is_some()
    }

    /// # Safety
    ///
    /// The contract of [`Self::find_callback`], which has found a line. Nobody else uses `seq` during the call.
    unsafe extern "C" fn show_callback(seq: *mut bindings::seq_file, reader: *mut c_void) {
        // SAFETY: As promised by the caller.
        let (seq, reader) = unsafe { (SeqFile::from_raw(seq), <Pin<KBox<T>>>::borrow(reader)) };
        seq_print!(
            seq,
            "{}\n",
            Written(|f: &mut fmt::Formatter<'_>| reader.write(f))
        );
    }
}

/// The module's folder, with its files, until dropped. Where the kernel has neither debugfs nor procfs, or makes no folder,
/// there are no files, and the module works without.
///
/// # Invariants
///
/// The folder is this module's own, or what the file system takes for none.
pub(crate) struct Folder(*mut c::peermem_folder);

// SAFETY: Both file systems lock their folders themselves.
unsafe impl Send for Folder {}
// SAFETY: As above.
unsafe impl Sync for Folder {}

impl Folder {
    /// Makes the folder, without files. One at a time.
    pub(crate) fn new() -> Self {
        // SAFETY: Process context, as in all that may sleep.
        // INVARIANT: A new folder, or an error.
        Folder(unsafe { c::peermem_folder_add() })
    }

    /// Adds a file that is one record.
    pub(crate) fn contents<T: Contents>(&self, name: &CStr, mode: u16) {
        self.file(name, mode, &ContentsOps::<T>::FILE);
    }

    /// Adds a file of lines.
    pub(crate) fn lines<T: Lines>(&self, name: &CStr, mode: u16) {
        self.file(name, mode, &LinesOps::<T>::FILE);
    }

    fn file(&self, name: &CStr, mode: u16, ops: &'static c::peermem_file_ops) {
        // SAFETY: The folder is as its file system wants it by the type invariant. The name is copied. The functions are
        // there for as long as the module, and none is called after the folder's removal.
        unsafe { c::peermem_folder_add_file(self.0, name.as_char_ptr(), mode, ops) };
    }
}

impl Drop for Folder {
    /// Waits for reads under way. In `/proc` also releases the files that are open.
    fn drop(&mut self) {
        // SAFETY: The folder is as its file system wants it by the type invariant, and used no more.
        unsafe { c::peermem_folder_remove(self.0) };
    }
}
