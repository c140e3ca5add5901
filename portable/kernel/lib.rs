// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! A substitute for the `kernel` crate of Rust-for-Linux, for kernels that lack the crate or have
//! an older one.
//!
//! The crate defines the names that `src/` uses. Each item follows those parts of the kernel's
//! contract on which `src/` relies. `bindings` declares the C functions behind the items. `shim.c`
//! wraps the functions that are inline functions or macros in C. Callers are in process context.
//! The comment of a function that may sleep says "May sleep".
//!
//! `tests/host` compiles the crate as a test, with Rust functions in place of the C functions.

#![cfg_attr(not(test), no_std)]
#![cfg_attr(not(test), feature(coerce_unsized, unsize))]
#![cfg_attr(test, allow(dead_code, reason = "the tests use a part of each file"))]
#![allow(clippy::new_without_default, reason = "the module uses none")]
#![warn(missing_docs)]

pub mod alloc;
pub mod bindings;
pub mod error;
pub mod ffi;
#[cfg(peermem_kunit)]
pub mod kunit;
pub mod pin_init;
pub mod prelude;
pub mod print;
pub mod rbtree;
pub mod seq_file;
pub mod str;
pub mod sync;
pub mod time;
pub mod types;

#[cfg(test)]
#[path = "../../tests/host/kernel/mod.rs"]
mod tests;

/// Formatting. `print` and `seq_file` accept the arguments of `core::fmt`.
pub use core::fmt;

#[cfg(peermem_kunit)]
pub use kunit::page;

/// This module, as the argument of [`Module::init`].
pub struct ThisModule(());

impl ThisModule {
    /// Only `module!` uses this function.
    #[doc(hidden)]
    pub const fn new() -> Self {
        ThisModule(())
    }
}

/// A kernel module. The value exists while the module is loaded.
pub trait Module: Sized + Sync + Send {
    /// Initializes the module when it is loaded. If this function fails, the kernel does not load
    /// the module. Runs in process context. May sleep.
    fn init(module: &'static ThisModule) -> error::Result<Self>;
}

/// Makes a kernel module from a type: the `.modinfo` entries, the init function, and the exit
/// function, which drops the value.
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

            // On arm64 the function stays in `.text`. The kernel may insert a veneer for calls
            // between two sections. A veneer branches through a register, so its target needs a
            // landing pad.
            #[no_mangle]
            #[cfg_attr(target_arch = "x86_64", link_section = ".init.text")]
            pub extern "C" fn init_module() -> $crate::ffi::c_int {
                match <$type as $crate::Module>::init(&THIS) {
                    Ok(module) => {
                        // SAFETY: The kernel calls this function once, and `cleanup_module()` only
                        // after its return.
                        unsafe { MODULE = Some(module) };
                        0
                    }
                    Err(error) => error.to_errno(),
                }
            }

            #[no_mangle]
            pub extern "C" fn cleanup_module() {
                // SAFETY: The kernel calls this function once, after `init_module()` has returned
                // 0.
                unsafe { MODULE = None };
            }

            // The pointers tell objtool that both functions are called indirectly.
            #[used(compiler)]
            #[link_section = ".init.data"]
            static INIT: extern "C" fn() -> $crate::ffi::c_int = init_module;
            #[used(compiler)]
            #[link_section = ".init.data"]
            static EXIT: extern "C" fn() = cleanup_module;
        };
    };
}

/// Makes an entry of `.modinfo`.
#[doc(hidden)]
#[macro_export]
macro_rules! modinfo {
    ($key:literal, $value:literal) => {
        const _: () = {
            const TEXT: &str = concat!($key, $value, "\0");
            #[used(compiler)]
            #[link_section = ".modinfo"]
            // SAFETY: The array has the length of the text.
            static ENTRY: [u8; TEXT.len()] = unsafe { *TEXT.as_ptr().cast::<[u8; TEXT.len()]>() };
        };
    };
}

/// Logs the panic and stops the thread as `BUG()` does. The build of the shipped module fails if
/// the optimized object still contains this function.
#[cfg(not(test))]
#[panic_handler]
fn panic(info: &core::panic::PanicInfo<'_>) -> ! {
    print::call_printk(print::EMERG, format_args!("{info}\n"));
    // SAFETY: The kernel's handler of the invalid instruction does not return here.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        core::arch::asm!("ud2", options(noreturn, nomem, nostack))
    }
    // SAFETY: The kernel's handler of this breakpoint does not return here. 0x800 is `BUG_BRK_IMM`.
    #[cfg(target_arch = "aarch64")]
    unsafe {
        core::arch::asm!("brk #0x800", options(noreturn, nomem, nostack))
    }
}
