// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! The module's files that use `core` and `env` alone: what is `unsafe` in the module stands elsewhere.

#[path = "../../src/account.rs"]
pub(crate) mod account;
#[path = "../../src/device.rs"]
pub(crate) mod device;
#[path = "../../src/extents.rs"]
pub(crate) mod extents;
#[path = "../../src/mode.rs"]
pub(crate) mod mode;
#[path = "../../src/pieces.rs"]
pub(crate) mod pieces;
#[path = "../../src/pin.rs"]
pub(crate) mod pin;
#[path = "../../src/record.rs"]
pub(crate) mod record;
#[path = "../../src/refusal.rs"]
#[allow(dead_code, reason = "nothing is logged here")]
pub(crate) mod refusal;
#[path = "../../src/region.rs"]
pub(crate) mod region;
#[path = "../../src/registry.rs"]
pub(crate) mod registry;
#[path = "../../src/revocable.rs"]
pub(crate) mod revocable;

use crate::fakes::env;

mod revocable_pin {
    pub(crate) use crate::fakes::env::RevocablePin;
}
