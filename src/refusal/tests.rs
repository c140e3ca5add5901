// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! The reasons of `refusal`.

use std::collections::{
    HashMap,
    HashSet, //
};

use super::*;

fn all() -> Vec<Refusal> {
    let mut all = vec![
        Refusal::Empty,
        Refusal::Wraps,
        Refusal::TooLong,
        Refusal::TableVersion(0x0003_0000),
        Refusal::TablePageSize(0),
        Refusal::Entries { have: 1, want: 2 },
        Refusal::NotPci,
        Refusal::MappingVersion(0x0001_0000),
        Refusal::MappingPageSize(2),
        Refusal::NotInBar,
        Refusal::CpuCacheable,
        Refusal::MapResource { mapped: 1 << 30 },
        Refusal::Revoked,
        Refusal::MappedTwice,
        Refusal::NoMemory,
        Refusal::Unloading,
        Refusal::Foreign(Place::Beyond),
        Refusal::Foreign(Place::Nothing),
        Refusal::Foreign(Place::Cpu),
        Refusal::Hole { offset: 1 << 21 },
        Refusal::TooManyPieces { limit: 1024 },
        Refusal::Killed,
        Refusal::UserLimit {
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
        assert!(refusal.kind() < Refusal::REASONS.len(), "{refusal:?}");
        let text = refusal.to_string();
        assert!(text.len() > 10, "{refusal:?}");
        words.entry(text).or_insert(refusal.kind());
    }
    let kinds: HashSet<_> = words.values().collect();
    assert_eq!(kinds.len(), Refusal::REASONS.len());
}

/// Programs look for the names. docs/observe.md is made from what this prints.
#[test]
fn each_row_has_a_name_of_its_own() {
    let mut names = HashSet::new();
    let cell = |text: &str| text.replace('|', "\\|");
    for reason in Refusal::REASONS {
        let name = reason.name.to_str().expect("ASCII");
        assert!(name.bytes().all(|byte| matches!(byte, b'a'..=b'z' | b'_')));
        assert!(names.insert(name), "{name} is there twice");
        let [what, advice] = [reason.message, reason.advice].map(cell);
        println!("figure: reason | `{name}` | {what} | {advice} |");
    }
    for incident in Event::ALL {
        assert!(
            names.insert(incident.name),
            "{} is there twice",
            incident.name
        );
        let [what, advice] = [incident.message, incident.advice].map(cell);
        println!("figure: event | `{}` | {what} | {advice} |", incident.name);
    }
}

/// An event's number is its row's.
#[test]
fn events_have_their_rows() {
    for (event, name) in [
        (Event::Lost, "lost"),
        (Event::KeptOtherProcess, "kept_other_process"),
        (Event::KeptUnlisted, "kept_unlisted"),
        (Event::KeptInCallback, "kept_in_callback"),
        (Event::KeptFailed, "kept_failed"),
        (Event::NotUnmapped, "not_unmapped"),
        (Event::LateCallback, "late_callback"),
        (Event::StrayCallback, "stray_callback"),
    ] {
        assert_eq!(Event::ALL[event as usize].name, name);
    }
}

/// They stand between quotes, in one line.
#[test]
fn words_need_no_quoting() {
    for refusal in all() {
        let text = refusal.to_string();
        assert!(
            text.is_ascii() && !text.contains(['"', '\\', '\n']),
            "{text}"
        );
        assert!(!text.contains("  "), "{text}");
    }
}

/// nvidia.ko has one code for many causes: what the process's mappings show makes several of it, where
/// they show anything, and of no other.
#[test]
fn only_what_nvidia_ko_does_not_know_is_looked_up() {
    let place = Refusal::Pin(EINVAL).seen(|| Some(Place::Cpu));
    assert_eq!(place, Refusal::Foreign(Place::Cpu));
    assert!(place.is_foreign() && place.code() == EINVAL);
    assert_eq!(Refusal::Pin(EINVAL).seen(|| None), Refusal::Pin(EINVAL));
    for refusal in all() {
        if refusal != Refusal::Pin(EINVAL) {
            assert_eq!(refusal.seen(|| unreachable!()), refusal);
        }
    }
}
