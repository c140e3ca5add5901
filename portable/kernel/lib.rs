// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Stands in for the `kernel` crate of Rust-for-Linux where a kernel has none, or an older one.
//!
//! It has the names that `src/` uses, and no others, each with the meaning that it has there as far as `src/` relies
//! on it. Process context alone.

#![no_std]
#![feature(arbitrary_self_types, coerce_unsized, dispatch_from_dyn, unsize)]
#![allow(internal_features)]

extern crate self as kernel;

pub mod alloc;
pub mod error;
pub mod ffi;
pub mod pin_init;
pub mod prelude;
pub mod print;
pub mod rbtree;
pub mod seq_file;
pub mod str;
pub mod sync;
pub mod time;
pub mod types;

/// `core`'s own: `print` and `seq_file` take what formats with it.
pub use core::fmt;

pub mod bindings;

/// This module, for `Module::init`.
pub struct ThisModule(());

impl ThisModule {
    /// For `module!` alone.
    #[doc(hidden)]
    pub const fn new() -> Self {
        ThisModule(())
    }
}

/// A module: it lives from its init until it is unloaded.
pub trait Module: Sized + Sync + Send {
    /// Called when it is loaded.
    fn init(module: &'static ThisModule) -> error::Result<Self>;
}

/// What contains the field that a pointer points to.
#[macro_export]
macro_rules! container_of {
    ($field_ptr:expr, $container:ty, $($field:tt)+) => {
        $field_ptr
            .cast::<u8>()
            .wrapping_sub(::core::mem::offset_of!($container, $($field)+))
            .cast::<$container>()
    };
}

/// Makes a module of a type: its entry in `.modinfo`, its init and its exit.
#[macro_export]
macro_rules! module {
    (
        type: $type:ty,
        name: $name:literal,
        authors: [$($author:literal),* $(,)?],
        description: $description:literal,
        license: $license:literal $(,)?
    ) => {
        $crate::modinfo!("license=", $license);
        $crate::modinfo!("description=", $description);
        $($crate::modinfo!("author=", $author);)*

        const _: () = {
            static THIS: $crate::ThisModule = $crate::ThisModule::new();
            static mut MODULE: ::core::option::Option<$type> = ::core::option::Option::None;

            #[no_mangle]
            #[link_section = ".init.text"]
            pub extern "C" fn init_module() -> $crate::ffi::c_int {
                match <$type as $crate::Module>::init(&THIS) {
                    Ok(module) => {
                        // SAFETY: Called once, before anything else.
                        unsafe { MODULE = Some(module) };
                        0
                    }
                    Err(error) => error.to_errno(),
                }
            }

            #[no_mangle]
            pub extern "C" fn cleanup_module() {
                // SAFETY: Called once, after everything else.
                unsafe { MODULE = None };
            }

            // Both are called through pointers, as objtool sees by these alone.
            #[used(compiler)]
            #[link_section = ".init.data"]
            static INIT: extern "C" fn() -> $crate::ffi::c_int = init_module;
            #[used(compiler)]
            #[link_section = ".init.data"]
            static EXIT: extern "C" fn() = cleanup_module;
        };
    };
}

/// An entry of `.modinfo`.
#[doc(hidden)]
#[macro_export]
macro_rules! modinfo {
    ($key:literal, $value:literal) => {
        const _: () = {
            const TEXT: &str = concat!($key, $value, "\0");
            #[used(compiler)]
            #[link_section = ".modinfo"]
            // SAFETY: As many bytes as there are.
            static ENTRY: [u8; TEXT.len()] = unsafe { *TEXT.as_ptr().cast::<[u8; TEXT.len()]>() };
        };
    };
}

/// Says where, and stops the thread as BUG() does: a panic in here is a bug of the module's.
#[panic_handler]
fn panic(info: &core::panic::PanicInfo<'_>) -> ! {
    print::print(0, format_args!("{info}\n"));
    // SAFETY: Goes nowhere from there.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        core::arch::asm!("ud2", options(noreturn, nomem, nostack))
    }
    // SAFETY: As above; 0x800 is BUG_BRK_IMM.
    #[cfg(target_arch = "aarch64")]
    unsafe {
        core::arch::asm!("brk #0x800", options(noreturn, nomem, nostack))
    }
}
