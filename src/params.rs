// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! The module's parameters, and its version.
//!
//! C side: [`params.c`](params.c).

use kernel::{
    prelude::*,
    str::CStr, //
};

use crate::c;

/// How revocations reach ib_core.
pub(crate) fn peerdirect_support() -> c_int {
    // SAFETY: Set before the module's init, and read-only from then on, as all of them.
    unsafe { c::peermem_params.peerdirect_support }
}

/// Which clients there are.
pub(crate) fn persistent_api_support() -> c_int {
    // SAFETY: As above.
    unsafe { c::peermem_params.persistent_api_support }
}

/// How many bytes of GPU memory one user may have pinned, if that is limited.
pub(crate) fn user_limit() -> Option<u64> {
    // SAFETY: As above.
    let mib = u64::from(unsafe { c::peermem_params.user_limit_mib });
    (mib > 0).then_some(mib << 20)
}

/// Of how many pins a registration may consist.
pub(crate) fn max_chunks() -> u32 {
    // SAFETY: As above.
    unsafe { c::peermem_params.max_chunks }
}

/// Whether the provider maps all that has a persistent pin.
pub(crate) fn provider_maps() -> bool {
    // SAFETY: As above.
    unsafe { c::peermem_params.provider_maps }
}

/// The module's version, as in `/sys/module`.
pub(crate) fn version() -> &'static CStr {
    // SAFETY: A string of the module's, which nobody writes to.
    unsafe { CStr::from_char_ptr((&raw const c::peermem_version).cast()) }
}
