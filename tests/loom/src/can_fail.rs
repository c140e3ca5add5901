// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Checks that the models can fail. Each row disables a lock or a rule in the fakes around the
//! module, and a model must report the expected failure.
//!
//! A rule inside the module itself cannot be disabled here. `tests/mutants` changes such lines and
//! runs these models on the changed module.
//!
//! Each model runs in its own process, because a broken model does not always end with an orderly
//! panic.

use std::env;
use std::process::Command;

use crate::fakes::world::Break;

/// Environment variable that names the fault for this process.
const VARIABLE: &str = "PEERMEM_LOOM_BREAK";

/// Makes the table of faults. A row has the fault, the model that must fail, and its message.
macro_rules! table {
    ($($how:ident in $model:ident: $says:literal;)+) => {
        &[$((Break::$how, stringify!($model), $says)),+]
    };
}

/// The fault, the model that must fail, and the message that it must print.
const BROKEN: &[(Break, &str, &str)] = table![
    NoWait in free_beside_the_end_and_a_second_life_unmaps: "a registration is used during";
    NoWait in free_beside_the_end_and_a_second_life_legacy: "a registration is used during";
    NoPutRwsem in free_beside_two_lives_unmaps: "another owner's pin is put";
    LateRead in free_beside_a_life_unmaps: "a page table is used during";
    UnlockedEntry in free_beside_a_life_unmaps: "a page table is used during";
    Undead in free_beside_a_life_unmaps: "a pin is put after its callback has returned";
    OneProcess in free_beside_a_life_that_ends_in_another_process: "a callback finds no entry";
    Strangers in free_beside_a_life_ofed49: "deadlock";
    Strangers in release_of_two_pins_inside_a_callback_beside_a_get: "a put inside a callback";
    StaleTicket in free_beside_a_life_that_ends_in_another_process: "a registration is read after it was freed";
    EarlyTable in free_beside_a_life_unmaps: "the scatter list is used during";
    NoPut in free_beside_a_life_unmaps: "a callback finds no entry";
    Silent in free_beside_a_life_unmaps: "a DMA mapping is used during";
    NoHold in free_beside_an_end_in_another_process_and_the_unloading: "a callback into an unloaded module";
    NoFence in free_beside_an_end_in_another_process_and_the_unloading: "the module is unloaded during a callback";
    NoExit in free_beside_an_exit_that_the_provider_does_not_find_and_the_unloading: "a callback";
];

/// Returns the fault of this process.
pub(crate) fn broken() -> Option<Break> {
    let name = env::var(VARIABLE).ok()?;
    let found = BROKEN.iter().find(|(how, ..)| format!("{how:?}") == name);
    Some(found.expect("the name of a Break").0)
}

#[test]
fn each_property_can_fail() {
    let this = env::current_exe().expect("the test's own program");
    for (how, model, says) in BROKEN {
        let output = Command::new(&this)
            .args(["--exact", "--nocapture"])
            .arg(format!("models::{model}"))
            .env(VARIABLE, format!("{how:?}"))
            .output()
            .expect("runs");
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{model} passes despite {how:?}");
        assert!(text.contains(says), "{how:?}, {model}:\n{text}");
        println!("figure: noticed {how:?}: {model} fails: {says}");
    }
}
