// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Tests of the limit on the memory that one user may have pinned.

use std::collections::HashMap;

use proptest::prelude::*;

use super::*;
use crate::fakes::world::world;

const LIMIT: u64 = 100;

fn charge(user: usize, bytes: u64) -> Result<Charge, Reason> {
    world().user.set(user);
    Charge::new(bytes)
}

/// Returns the number of users that have an account.
fn accounts() -> usize {
    let world = world();
    let usages = world.usages.borrow();
    usages.as_ref().map_or(0, |usages| usages.len())
}

#[test]
fn without_a_limit_nothing_is_counted() {
    let _most = charge(1, u64::MAX).expect("no limit");
    let _more = charge(1, u64::MAX).expect("no limit");
    assert_eq!(accounts(), 0);
}

#[test]
fn charges_reach_but_do_not_exceed_the_limit() {
    world().user_limit.set(Some(LIMIT));
    let first = charge(1, 60).expect("within the limit");
    let full = Reason::UserLimit {
        pinned: 60,
        limit: LIMIT,
    };
    assert_eq!(charge(1, 41).err(), Some(full));
    assert_eq!(charge(1, u64::MAX).err(), Some(full));
    let _second = charge(1, 40).expect("exactly the limit");
    // Another user has another account.
    let _other = charge(2, LIMIT).expect("within the limit");
    drop(first);
    let _third = charge(1, 60).expect("given back");
}

#[test]
fn a_charge_returns_to_the_user_that_paid() {
    world().user_limit.set(Some(LIMIT));
    let held = charge(1, LIMIT).expect("within the limit");
    // The charge is released by a process of another user, on another thread.
    let world = world();
    std::thread::spawn(move || {
        world.add();
        world.user.set(2);
        drop(held);
    })
    .join()
    .expect("does not panic");
    let _again = charge(1, LIMIT).expect("given back");
    let _other = charge(2, LIMIT).expect("never charged");
}

proptest! {
    /// Compares the quota with a map from users to bytes.
    #[test]
    fn usages_match_a_plain_map(steps in prop::collection::vec((0..5usize, 1..60u64, any::<prop::sample::Index>()), 1..200)) {
        world().user_limit.set(Some(LIMIT));
        let mut model = HashMap::<usize, u64>::new();
        let mut held = Vec::new();
        for (user, bytes, which) in steps {
            let pinned = model.entry(user).or_default();
            match charge(user, bytes) {
                Ok(charge) => {
                    *pinned += bytes;
                    prop_assert!(*pinned <= LIMIT);
                    held.push((user, bytes, charge));
                }
                Err(reason) => {
                    prop_assert_eq!(reason, Reason::UserLimit { pinned: *pinned, limit: LIMIT });
                    prop_assert!(*pinned + bytes > LIMIT);
                }
            }
            if !held.is_empty() && bytes % 2 == 0 {
                let (user, bytes, _) = held.swap_remove(which.index(held.len()));
                *model.entry(user).or_default() -= bytes;
            }
            let owing = model.values().filter(|pinned| **pinned > 0).count();
            prop_assert_eq!(accounts(), owing);
        }
    }
}
