// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! The module's parameters, and its version.
//!
//! C side: [`params.c`](params.c).

use kernel::{
    prelude::*,
    str::CStr, //
};

use crate::c;

/// Returns the parameter `peerdirect_support`: how revocations reach ib_core.
pub(crate) fn peerdirect_support() -> c_int {
    // SAFETY: All parameters are set before the module's init function runs, and are read-only
    // afterwards.
    unsafe { c::peermem_params.peerdirect_support }
}

/// Returns the parameter `persistent_api_support`: which clients the module registers.
pub(crate) fn persistent_api_support() -> c_int {
    // SAFETY: See above.
    unsafe { c::peermem_params.persistent_api_support }
}

/// Returns the number of bytes of GPU memory that one user may have pinned, or `None` if there is
/// no limit.
pub(crate) fn user_limit() -> Option<u64> {
    // SAFETY: See above.
    let mib = u64::from(unsafe { c::peermem_params.user_limit_mib });
    (mib > 0).then_some(mib << 20)
}

/// Returns the maximum number of pins in a registration.
pub(crate) fn max_chunks() -> u32 {
    // SAFETY: See above.
    unsafe { c::peermem_params.max_chunks }
}

/// Returns `true` if nvidia.ko maps all persistent pins.
pub(crate) fn provider_maps() -> bool {
    // SAFETY: See above.
    unsafe { c::peermem_params.provider_maps }
}

/// Returns the module's version, as in `/sys/module`.
pub(crate) fn version() -> &'static CStr {
    // SAFETY: The symbol is a NUL-terminated string of this module, and nobody writes to it.
    unsafe { CStr::from_char_ptr((&raw const c::peermem_version).cast()) }
}
