// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! The names that every file of the module imports.

pub use core::pin::Pin;

pub use crate::{
    alloc::{
        KBox,
        KVVec,
        __GFP_NOWARN, //
        GFP_KERNEL,
    },
    error::{
        code::*,
        Error,
        Result, //
    },
    ffi::{
        c_char,
        c_int,
        c_uint,
        c_ulong,
        c_void, //
    },
    module, pin_init,
    pin_init::PinInit,
    pr_err, pr_info, pr_notice, pr_warn,
    str::{
        CStr,
        CStrExt, //
    },
    ThisModule,
};
#[cfg(peermem_kunit)]
pub use crate::{
    fmt,
    kunit::KVec, //
};
#[cfg(peermem_kunit)]
pub use kernel_macros::kunit_tests;
#[cfg(not(test))]
pub use kernel_macros::pin_data;
