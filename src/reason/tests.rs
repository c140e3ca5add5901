// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Tests of the tables of reasons and events.

use std::collections::{
    HashMap,
    HashSet, //
};

use super::*;

fn all() -> Vec<Reason> {
    let mut all = vec![
        Reason::Empty,
        Reason::Wraps,
        Reason::TooLong,
        Reason::TableVersion(0x0003_0000),
        Reason::TablePageSize(0),
        Reason::Entries { have: 1, want: 2 },
        Reason::NotPci,
        Reason::MappingVersion(0x0001_0000),
        Reason::MappingPageSize(2),
        Reason::NotInBar,
        Reason::HasStructPages,
        Reason::CpuCacheable,
        Reason::MapResource { mapped: 1 << 30 },
        Reason::Revoked,
        Reason::MappedTwice,
        Reason::NoMemory,
        Reason::Unloading,
        Reason::NonGpu(VmaKind::Invalid),
        Reason::NonGpu(VmaKind::Unmapped),
        Reason::NonGpu(VmaKind::Host),
        Reason::Hole { offset: 1 << 21 },
        Reason::TooManyChunks { limit: 1024 },
        Reason::Killed,
        Reason::UserLimit {
            pinned: 1 << 20,
            limit: 1 << 20,
        },
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
        all.push(Reason::Pin(code));
        all.push(Reason::Map(code));
    }
    all
}

/// ib_core takes 0 for success and a positive number for a pointer.
#[test]
fn every_errno_is_negative_and_known() {
    for reason in all() {
        assert!(
            (-4095..0).contains(&reason.errno()) && reason.errno() != ENOTSUPP,
            "{reason:?}: {}",
            reason.errno()
        );
    }
}

#[test]
fn every_kind_has_an_index_and_a_text() {
    let mut words = HashMap::new();
    for reason in all() {
        assert!(reason.index() < Reason::ALL.len(), "{reason:?}");
        let text = reason.to_string();
        assert!(text.len() > 10, "{reason:?}");
        words.entry(text).or_insert(reason.index());
    }
    let kinds: HashSet<_> = words.values().collect();
    assert_eq!(kinds.len(), Reason::ALL.len());
}

/// Programs look for these names. docs/observe.md is made from the output of this test.
#[test]
fn each_row_has_a_name_of_its_own() {
    let mut names = HashSet::new();
    let cell = |text: &str| text.replace('|', "\\|");
    for reason in Reason::ALL {
        let name = reason.name.to_str().expect("ASCII");
        assert!(name.bytes().all(|byte| matches!(byte, b'a'..=b'z' | b'_')));
        assert!(names.insert(name), "{name} occurs twice");
        let [what, advice] = [reason.message, reason.advice].map(cell);
        println!("figure: reason | `{name}` | {what} | {advice} |");
    }
    for info in Event::ALL {
        assert!(names.insert(info.name), "{} occurs twice", info.name);
        let [what, advice] = [info.message, info.advice].map(cell);
        println!("figure: event | `{}` | {what} | {advice} |", info.name);
    }
}

/// The number of an event is the number of its row.
#[test]
fn events_have_their_rows() {
    for (event, name) in [
        (Event::Leaked, "leaked"),
        (Event::OrphanedOtherProcess, "orphaned_other_process"),
        (Event::OrphanedUnlisted, "orphaned_unlisted"),
        (Event::OrphanedInCallback, "orphaned_in_callback"),
        (Event::OrphanedFailed, "orphaned_failed"),
        (Event::NotUnmapped, "not_unmapped"),
        (Event::LateCallback, "late_callback"),
        (Event::SpuriousCallback, "spurious_callback"),
        (Event::LargeHcaPage, "large_hca_page"),
        (Event::OtherClient, "other_client"),
    ] {
        assert_eq!(Event::ALL[event as usize].name, name);
    }
}

/// Messages are printed between quotes, in one line.
#[test]
fn words_need_no_quoting() {
    for reason in all() {
        let text = reason.to_string();
        assert!(
            text.is_ascii() && !text.contains(['"', '\\', '\n']),
            "{text}"
        );
        assert!(!text.contains("  "), "{text}");
    }
}

/// nvidia.ko has one code for several causes. The mappings of the process can refine that code into
/// several reasons. No other code is refined.
#[test]
fn only_pin_with_einval_is_refined() {
    let place = Reason::Pin(EINVAL).refine(|| Some(VmaKind::Host));
    assert_eq!(place, Reason::NonGpu(VmaKind::Host));
    assert!(place.is_non_gpu() && place.code() == EINVAL);
    assert_eq!(Reason::Pin(EINVAL).refine(|| None), Reason::Pin(EINVAL));
    for reason in all() {
        if reason != Reason::Pin(EINVAL) {
            assert_eq!(reason.refine(|| unreachable!()), reason);
        }
    }
}

/// A reason that is not in `expected` is logged again later, for the administrator.
#[test]
fn handed_on_and_non_gpu_reasons_are_logged_once() {
    let once: HashSet<_> = all()
        .iter()
        .filter(|reason| reason.is_logged_once())
        .map(|reason| reason.name().to_str().expect("ASCII"))
        .collect();
    let expected = [
        "cpu_cacheable",
        "has_struct_pages",
        "non_gpu_host",
        "non_gpu_invalid",
        "non_gpu_unmapped",
        "not_in_bar",
    ];
    assert_eq!(once, HashSet::from(expected));
}
