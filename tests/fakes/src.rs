// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! The files of the module that use only `core`, one another, and two modules that `tests/fakes`
//! replaces: `env` and `revocable_pin`. The module keeps its `unsafe` code in other files.

#![allow(
    unused_qualifications,
    reason = "the logic imports env as its prelude, and still marks the kernel's functions by the qualifier `env`"
)]

#[path = "../../src/callback_pin.rs"]
pub(crate) mod callback_pin;
#[path = "../../src/chunks.rs"]
pub(crate) mod chunks;
#[path = "../../src/device.rs"]
pub(crate) mod device;
#[path = "../../src/history.rs"]
pub(crate) mod history;
#[path = "../../src/mr.rs"]
pub(crate) mod mr;
#[path = "../../src/ofed.rs"]
#[allow(dead_code, reason = "no module is loaded here")]
pub(crate) mod ofed;
#[path = "../../src/persistent.rs"]
pub(crate) mod persistent;
#[path = "../../src/persistent_mapping.rs"]
pub(crate) mod persistent_mapping;
#[path = "../../src/quota.rs"]
pub(crate) mod quota;
#[path = "../../src/ranges.rs"]
pub(crate) mod ranges;
#[path = "../../src/reason.rs"]
#[allow(dead_code, reason = "nothing is logged here")]
pub(crate) mod reason;
#[path = "../../src/registry.rs"]
pub(crate) mod registry;
#[path = "../../src/revocable.rs"]
pub(crate) mod revocable;

use crate::fakes::env;

mod revocable_pin {
    pub(crate) use crate::fakes::env::RevocablePin;
}
