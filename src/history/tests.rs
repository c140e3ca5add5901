// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Tests of the records of `history`: their lines, which programs read, and the number of records
//! that are kept.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::reason::{
    VmaKind,
    EINVAL,
    ENOMEM, //
};

fn task(tgid: i32, name: &[u8]) -> Task {
    let mut comm = [0; COMM_LEN];
    comm[..name.len()].copy_from_slice(name);
    Task {
        tgid,
        pid: tgid + 1,
        comm,
    }
}

fn refused(addr: u64) -> Refusal {
    Refusal {
        mode: PinMode::Persistent,
        step: Step::Acquire,
        reason: Reason::Pin(ENOMEM),
        addr,
        len: 0x10_0000,
        task: task(4711, b"python3"),
    }
}

/// Returns all records that a reader gets.
fn read<const N: usize>(ring: &Ring<N>) -> Vec<Record> {
    let mut all = Vec::new();
    let mut next = 0;
    while let Some((record, number)) = ring.from(next) {
        assert!(number > next || (number, next) == (1, 0));
        all.push(record);
        next = number;
    }
    all
}

/// Returns the keys and values of a line. `text` is the last key, and the only one whose value
/// contains blanks.
fn keys(line: &str) -> Vec<(String, String)> {
    let (words, text) = line.split_once(" text=\"").expect("a text");
    let text = text.strip_suffix('"').expect("quoted to the end");
    assert!(!text.contains(['"', '\n', '\\']), "{text}");
    words
        .split(' ')
        .map(|word| word.split_once('=').expect("key=value"))
        .chain([("text", text)])
        .map(|(key, value)| (key.to_owned(), value.to_owned()))
        .collect()
}

/// The line of this test is the line in docs/observe.md. A change here changes the format that
/// programs read.
#[test]
fn the_line_is_as_documented() {
    let mut ring = Ring::<4>::new();
    ring.add(1_000_001, refused(0x7f00_0000_0000));
    ring.add(62_500_000, refused(0x7f00_0000_0000));
    let line = read(&ring)[0].to_string();
    let words =
        "seq=0 first=1.000001 last=62.500000 times=2 mode=persistent step=acquire reason=no_room \
         code=-12 addr=0x7f0000000000 len=1048576 tgid=4711 pid=4712 comm=python3 text=";
    assert_eq!(line, format!("{words}\"{}\"", Reason::Pin(ENOMEM)));
    let document = include_str!("../../docs/observe.md");
    assert!(document.contains(words), "docs/observe.md has another line");
}

/// docs/observe.md contains the version of the format, and the names of all modes and steps.
#[test]
fn the_words_are_as_documented() {
    let document = include_str!("../../docs/observe.md");
    assert!(document.contains(&format!("now {FORMAT};")));
    let modes = PinMode::ALL.map(PinMode::name);
    let steps = [Step::Acquire, Step::GetPages, Step::DmaMap].map(Step::name);
    for name in modes.iter().chain(&steps) {
        let name = name.to_str().expect("ASCII");
        assert!(document.contains(&format!("`{name}`")), "{name}");
    }
    // Counters are indexed by the number of a mode.
    for (number, mode) in PinMode::ALL.into_iter().enumerate() {
        assert_eq!(mode as usize, number);
    }
}

/// A thread chooses its name. No name can split a word or end a line.
#[test]
fn a_threads_name_is_one_word() {
    for (name, seen) in [
        (&b"a b=c"[..], r"a\x20b\x3dc"),
        (b"x\ny\"z\\", r"x\x0ay\x22z\x5c"),
        (b"\xff\x1b[31m", r"\xff\x1b[31m"),
        (b"", ""),
        (b"0123456789abcdef", "0123456789abcdef"),
        (b"seen\0unseen", "seen"),
    ] {
        let mut ring = Ring::<1>::new();
        ring.add(
            0,
            Refusal {
                task: task(1, name),
                ..refused(0)
            },
        );
        let line = read(&ring)[0].to_string();
        let keys: BTreeMap<_, _> = keys(&line).into_iter().collect();
        assert_eq!(keys["comm"], seen);
        assert!(line.is_ascii() && !line.contains('\n'));
    }
}

#[test]
fn equal_refusals_share_one_record() {
    let first = refused(0x1000);
    let differences = [
        Refusal {
            mode: PinMode::Revocable,
            ..first
        },
        Refusal {
            step: Step::DmaMap,
            ..first
        },
        Refusal {
            reason: Reason::Pin(EINVAL),
            ..first
        },
        Refusal {
            addr: 0x2000,
            ..first
        },
        Refusal { len: 1, ..first },
        Refusal {
            task: task(4712, b"python3"),
            ..first
        },
    ];
    let mut ring = Ring::<8>::new();
    ring.add(1, first);
    for refusal in differences {
        ring.add(2, refusal);
    }
    assert_eq!(read(&ring).len(), 7);
    // A refusal to another thread of the same process is a repetition, even if that thread has
    // another name. The record shows the latest thread.
    let again = Refusal {
        task: Task {
            pid: 5000,
            ..task(4711, b"other")
        },
        ..first
    };
    ring.add(3, again);
    let all = read(&ring);
    assert_eq!(all.len(), 7);
    let line = all[0].to_string();
    assert!(line.contains("seq=0 first=0.000001 last=0.000003 times=2"));
    assert!(line.contains("pid=5000 comm=other"));
}

#[test]
fn non_gpu_refusals_displace_no_others() {
    let mut history = History::new();
    history.add(0, refused(0));
    for addr in 0..1000 {
        history.add(
            1,
            Refusal {
                reason: Reason::NonGpu(VmaKind::Host),
                ..refused(addr)
            },
        );
    }
    let count = |non_gpu| {
        let mut next = 0;
        let mut count = 0;
        while let Some((_, number)) = history.from(non_gpu, next) {
            (next, count) = (number, count + 1);
        }
        (count, next)
    };
    assert_eq!(count(false), (1, 1));
    assert_eq!(count(true), (History::NON_GPU, 1000));
}

#[test]
fn a_ring_without_places_holds_nothing() {
    let mut ring = Ring::<0>::new();
    ring.add(0, refused(0));
    assert_eq!(read(&ring), []);
}

proptest! {
    /// A reader gets each record at most once and in order, even if other records come between two
    /// calls. A reader that starts after the last addition gets exactly the last N records.
    #[test]
    fn readers_see_each_record_once(steps in prop::collection::vec(any::<(bool, u8)>(), 0..200)) {
        const N: usize = 5;
        let mut ring = Ring::<N>::new();
        // The addresses of the expected records, in order.
        let mut added: Vec<u64> = Vec::new();
        let mut next = 0;
        let mut seen = Vec::new();
        for (look, addr) in steps {
            if look {
                if let Some((record, number)) = ring.from(next) {
                    seen.push(record);
                    next = number;
                }
            } else {
                let orphaned = &added[added.len().saturating_sub(N)..];
                let addr = u64::from(addr % 8);
                if !orphaned.contains(&addr) {
                    added.push(addr);
                }
                ring.add(0, refused(addr));
            }
        }
        let numbers: Vec<_> = seen
            .iter()
            .map(|record| keys(&record.to_string())[0].1.parse::<u64>().expect("a number"))
            .collect();
        prop_assert!(numbers.windows(2).all(|pair| pair[0] < pair[1]));
        let all: Vec<_> = read(&ring)
            .iter()
            .map(|record| {
                let line = record.to_string();
                let addr = line.split(" addr=0x").nth(1).expect("an address");
                u64::from_str_radix(addr.split(' ').next().expect("a word"), 16).expect("hex")
            })
            .collect();
        prop_assert_eq!(&all[..], &added[added.len().saturating_sub(N)..]);
    }
}
