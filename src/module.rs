// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! A reference to this module, and facts about the modules whose functions this module calls.
//!
//! C header: [`include/linux/module.h`](srctree/include/linux/module.h)

use kernel::{
    prelude::*,
    str::CStr, //
};

use crate::c;

/// Keeps this module loaded until dropped, on any thread.
///
/// # Invariants
///
/// Owns one reference to this module.
pub(crate) struct ModuleRef(());

impl ModuleRef {
    /// Takes a reference to this module. Returns `None` once the module is being unloaded.
    pub(crate) fn try_new() -> Option<Self> {
        // SAFETY: This code is part of the module, so the module's memory exists.
        // INVARIANT: The value owns the reference that is taken here, if there is one.
        unsafe { c::try_module_get(&raw mut c::__this_module) }.then(|| ModuleRef(()))
    }
}

impl Drop for ModuleRef {
    fn drop(&mut self) {
        // SAFETY: This drops the reference of the type invariant.
        unsafe { c::module_put(&raw mut c::__this_module) };
    }
}

/// A module that is loaded.
pub(crate) struct LoadedModule {
    version: [u8; 32],
    /// `true` if Linux considers the module's licence proprietary.
    pub(crate) is_proprietary: bool,
}

impl LoadedModule {
    /// Returns `false` if [`find`](Self::find) cannot find any module. The kernel exports the
    /// search function only to GPL modules, so a build for the proprietary nvidia.ko lacks it.
    pub(crate) fn can_be_found() -> bool {
        // SAFETY: The function has no preconditions.
        unsafe { c::peermem_finds_modules() }
    }

    /// Finds a loaded module. Returns `None` if no module of that name is loaded, or if it is being
    /// unloaded.
    ///
    /// The version is empty unless the module is live. A module in its init function is not live
    /// yet.
    pub(crate) fn find(name: &CStr) -> Option<Self> {
        let mut found = LoadedModule {
            version: [0; 32],
            is_proprietary: false,
        };
        // SAFETY: `name` is NUL-terminated. `found.version` has room for the version, and its last
        // byte stays NUL.
        unsafe {
            c::peermem_module_find(
                name.as_char_ptr(),
                found.version.as_mut_ptr().cast(),
                found.version.len(),
                &mut found.is_proprietary,
            )
        }
        .then_some(found)
    }

    /// Returns the version, or an empty string if it is not known.
    pub(crate) fn version(&self) -> &CStr {
        CStr::from_bytes_until_nul(&self.version).unwrap_or_default()
    }
}

/// A function that another module exports: its address and its name.
pub(crate) struct WeakSymbol(pub(crate) *const c_void, pub(crate) &'static str);

// SAFETY: Nothing reads through the address.
unsafe impl Sync for WeakSymbol {}

impl WeakSymbol {
    /// Returns the name of the first symbol of `all` that is missing.
    pub(crate) fn first_missing(all: &'static [WeakSymbol]) -> Option<&'static str> {
        let missing = all.iter().find(|symbol| {
            // SAFETY: The symbol is part of a static. The read is volatile, because rustc assumes
            // that the address of a function is never 0.
            unsafe { (&raw const symbol.0).read_volatile() }.is_null()
        });
        missing.map(|symbol| symbol.1)
    }
}

/// Defines a static `WEAK_SYMBOLS` with the functions of another module that this module calls.
///
/// If a symbol is missing, the kernel normally does not load the module, and the user only reads
/// "Unknown symbol". These symbols are therefore weak: the kernel loads the module, and its init
/// function reports the missing symbol. Init must check the symbols before anything else, since the
/// address of a missing weak symbol is 0. Rust has no stable attribute for weak symbols.
///
/// In other respects, the kernel treats an existing weak symbol like an ordinary one. It takes a
/// reference to the module that exports the symbol, and refuses a symbol of a wrong version. depmod
/// and modpost compute the same dependencies. There is one exception: modpost ignores a weak symbol
/// that it does not know. The Kbuild file checks for such symbols.
macro_rules! weak_symbols {
    ($($function:ident,)*) => {
        #[cfg(not(peermem_kunit))]
        core::arch::global_asm!($(concat!(".weak ", stringify!($function)),)*);

        static WEAK_SYMBOLS: &[crate::module::WeakSymbol] = &[$(crate::module::WeakSymbol(
            crate::c::$function as *const kernel::ffi::c_void,
            stringify!($function),
        ),)*];
    };
}
pub(crate) use weak_symbols;
