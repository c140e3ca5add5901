// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! The reasons of `refusal`.

use std::collections::HashMap;

use crate::extents::SpanError;
use crate::refusal::Refusal;
use crate::refusal::EBUSY;
use crate::refusal::EINVAL;
use crate::refusal::ENODEV;
use crate::refusal::ENOMEM;
use crate::refusal::ENOTSUPP;

fn all() -> Vec<Refusal> {
    let mut all = vec![
        Refusal::Range(SpanError::Empty),
        Refusal::Range(SpanError::Wraps),
        Refusal::Range(SpanError::TooLong),
        Refusal::TableVersion(0x0003_0000),
        Refusal::TablePageSize(0),
        Refusal::Entries { have: 1, want: 2 },
        Refusal::NotPci,
        Refusal::MappingVersion(0x0001_0000),
        Refusal::MappingPageSize(2),
        Refusal::NotInBar,
        Refusal::CpuCacheable,
        Refusal::MapResource,
        Refusal::Revoked,
        Refusal::MappedTwice,
        Refusal::NoMemory,
        Refusal::Unloading,
    ];
    for code in [
        EINVAL,
        ENOMEM,
        ENOTSUPP,
        EBUSY,
        ENODEV,
        -5,
        0,
        1,
        i32::MIN,
        i32::MAX,
    ] {
        all.push(Refusal::Pin(code));
        all.push(Refusal::Map(code));
    }
    all
}

/// ib_core takes 0 for success and a positive number for a pointer.
#[test]
fn every_errno_is_one() {
    for refusal in all() {
        assert!(
            (-4095..0).contains(&refusal.errno()) && refusal.errno() != ENOTSUPP,
            "{refusal:?}: {}",
            refusal.errno()
        );
    }
}

#[test]
fn every_kind_has_its_place_and_its_words() {
    let mut words = HashMap::new();
    for refusal in all() {
        assert!(refusal.kind() < Refusal::KINDS, "{refusal:?}");
        let text = refusal.to_string();
        assert!(text.len() > 10, "{refusal:?}");
        words.entry(text).or_insert(refusal.kind());
    }
    let kinds: std::collections::HashSet<_> = words.values().collect();
    assert_eq!(kinds.len(), Refusal::KINDS);
}
