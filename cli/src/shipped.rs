// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! The module's own lines of code: its tables of reasons and events, and for tests what writes the lines that this program
//! reads.

#![allow(dead_code, reason = "as much of them as this program needs")]

#[cfg(test)]
#[path = "../../src/extents.rs"]
pub(crate) mod extents;
#[cfg(test)]
#[path = "../../src/record.rs"]
pub(crate) mod record;
#[path = "../../src/refusal.rs"]
pub(crate) mod refusal;
#[cfg(test)]
#[path = "../../src/roll.rs"]
pub(crate) mod roll;

/// What surrounds them: nobody enters the roll here.
#[cfg(test)]
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
