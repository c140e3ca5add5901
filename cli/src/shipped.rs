// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! The module's own lines of code that write what this program reads, for its tests.

#![allow(dead_code, reason = "as much of them as the tests need")]

#[path = "../../src/extents.rs"]
pub(crate) mod extents;
#[path = "../../src/record.rs"]
pub(crate) mod record;
#[path = "../../src/refusal.rs"]
pub(crate) mod refusal;
#[path = "../../src/roll.rs"]
pub(crate) mod roll;

/// What surrounds them: nobody enters the roll here.
pub(crate) mod env {
    use super::roll::Book;
    use super::roll::Event;
    use super::roll::Living;

    pub(crate) enum Place {}

    impl Place {
        pub(crate) fn with<R>(&self, _f: impl FnOnce(&mut Book, &mut Option<Living>) -> R) -> R {
            match *self {}
        }

        pub(crate) fn tell(&self, _event: Event) {
            match *self {}
        }
    }
}
