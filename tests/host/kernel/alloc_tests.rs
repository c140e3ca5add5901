// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Tests of boxes and vectors.

use std::mem::MaybeUninit;
use std::pin::Pin;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::SeqCst;

use super::fakes::{failing_after, requests, without_leaks};
use super::Counted;
use crate::error::code::ENOMEM;
use crate::error::Error;
use crate::prelude::*;
use crate::types::ForeignOwnable;

#[test]
fn a_box_drops_its_value_and_frees_its_memory_once() {
    without_leaks(|| {
        let (drops, value) = Counted::new();
        let one = KBox::new((7_u64, value), GFP_KERNEL).unwrap();
        assert_eq!(one.0, 7);
        drop(one);
        assert_eq!(drops.get(), 1);
    });
}

#[test]
fn a_value_without_a_size_is_dropped_once() {
    static DROPS: AtomicUsize = AtomicUsize::new(0);
    struct Nothing;
    impl Drop for Nothing {
        fn drop(&mut self) {
            DROPS.fetch_add(1, SeqCst);
        }
    }
    without_leaks(|| {
        let nothing = KBox::new(Nothing, GFP_KERNEL).unwrap();
        assert_eq!(DROPS.load(SeqCst), 0);
        drop(nothing);
        assert_eq!(DROPS.load(SeqCst), 1);
    });
}

#[test]
fn a_box_can_be_changed() {
    without_leaks(|| {
        let mut one = KBox::new(7_u64, GFP_KERNEL).unwrap();
        *one += 1;
        assert_eq!(*one, 8);
    });
}

#[test]
fn the_value_of_a_box_is_moved_out_and_not_dropped() {
    without_leaks(|| {
        let (drops, value) = Counted::new();
        let one = KBox::new(value, GFP_KERNEL).unwrap();
        let value = KBox::into_inner(one);
        assert_eq!(drops.get(), 0);
        drop(value);
        assert_eq!(drops.get(), 1);
    });
}

#[test]
fn memory_without_a_value_is_freed_and_nothing_dropped() {
    without_leaks(|| {
        let (drops, value) = Counted::new();
        let place: KBox<MaybeUninit<Counted>> = KBox::new_uninit(GFP_KERNEL).unwrap();
        drop(place);
        let place = KBox::new_uninit(GFP_KERNEL).unwrap();
        let one = KBox::write(place, value);
        assert_eq!(drops.get(), 0);
        drop(one);
        assert_eq!(drops.get(), 1);
    });
}

#[test]
fn a_value_without_memory_is_dropped() {
    let (drops, value) = Counted::new();
    assert!(failing_after(0, || KBox::new(value, GFP_KERNEL)).is_err());
    assert_eq!(drops.get(), 1);
    let error = failing_after(0, || KBox::pin_init(1_u64, GFP_KERNEL).map(drop));
    assert_eq!(error, Err(ENOMEM));
    assert_eq!(Error::from(crate::alloc::AllocError), ENOMEM);
}

#[test]
fn a_raw_pointer_becomes_a_box_again() {
    without_leaks(|| {
        let (drops, value) = Counted::new();
        let raw = KBox::into_raw(KBox::new(value, GFP_KERNEL).unwrap());
        assert_eq!(drops.get(), 0);
        // SAFETY: The pointer came from a box.
        drop(unsafe { KBox::from_raw(raw) });
        assert_eq!(drops.get(), 1);
    });
}

#[test]
fn c_keeps_a_pinned_box_where_it_is() {
    without_leaks(|| {
        let (drops, value) = Counted::new();
        let pinned = KBox::pin_init((5_u32, value), GFP_KERNEL).unwrap();
        let at: *const (u32, Counted) = &*pinned;
        let pointer = pinned.into_foreign();
        // SAFETY: The pointer came from a pinned box, which is taken back after the borrow.
        unsafe {
            let borrow: Pin<&(u32, Counted)> = <Pin<KBox<(u32, Counted)>>>::borrow(pointer);
            assert!(std::ptr::eq(at, &*borrow));
            drop(<Pin<KBox<(u32, Counted)>>>::from_foreign(pointer));
        }
        assert_eq!(drops.get(), 1);
    });
}

#[test]
fn the_kernel_logs_a_failed_allocation_unless_told_otherwise() {
    requests();
    drop(KBox::new(1_u32, GFP_KERNEL));
    drop(KBox::new(1_u64, GFP_KERNEL | __GFP_NOWARN));
    drop(KVVec::<u64>::with_capacity(3, GFP_KERNEL));
    drop(KVVec::<u64>::with_capacity(4, __GFP_NOWARN | GFP_KERNEL));
    assert_eq!(requests(), [(4, true), (8, false), (24, true), (32, false)]);
}

#[test]
fn an_empty_vector_has_no_memory() {
    without_leaks(|| {
        requests();
        let mut empty = KVVec::<u64>::new();
        assert_eq!((empty.len(), empty.capacity()), (0, 0));
        assert_eq!(empty.push_within_capacity(1), Err(1));
        empty.reserve(0, GFP_KERNEL).unwrap();
        assert_eq!(
            KVVec::<u64>::with_capacity(0, GFP_KERNEL)
                .unwrap()
                .capacity(),
            0
        );
        assert_eq!(empty.into_iter().next(), None);
        assert_eq!(requests(), []);
    });
}

#[test]
fn a_vector_grows_and_keeps_its_values() {
    without_leaks(|| {
        let mut all = KVVec::new();
        let mut moves = 0;
        for value in 0..1000_u64 {
            let before = all.capacity();
            all.reserve(1, GFP_KERNEL).unwrap();
            moves += usize::from(all.capacity() != before);
            assert!(all.capacity() > all.len());
            all.push_within_capacity(value).unwrap();
            assert_eq!(all.len(), usize::try_from(value).unwrap() + 1);
        }
        assert!(all.iter().copied().eq(0..1000));
        assert!(moves <= 11, "{moves} times");
        all[7] = 0;
        assert_eq!((all[6], all[7], all[8]), (6, 0, 8));
    });
}

#[test]
fn a_full_vector_gives_the_value_back() {
    let mut two = KVVec::with_capacity(2, GFP_KERNEL).unwrap();
    let room = two.capacity();
    for value in 0..room {
        assert_eq!(two.push_within_capacity(value), Ok(()));
    }
    assert_eq!(two.push_within_capacity(9), Err(9));
    assert_eq!(two.len(), room);
}

#[test]
fn a_vector_is_as_before_if_there_is_no_memory() {
    without_leaks(|| {
        let mut all = KVVec::with_capacity(2, GFP_KERNEL).unwrap();
        all.push_within_capacity(1_u64).unwrap();
        assert!(failing_after(0, || all.reserve(100, GFP_KERNEL)).is_err());
        // The size in bytes must not wrap around to a small number.
        requests();
        for more in [
            usize::MAX,
            usize::MAX / 8,
            usize::MAX / 8 + 1,
            isize::MAX as usize,
        ] {
            assert!(all.reserve(more, GFP_KERNEL).is_err(), "{more:#x}");
            assert!(
                KVVec::<u64>::with_capacity(more, GFP_KERNEL).is_err(),
                "{more:#x}"
            );
        }
        assert_eq!(requests(), []);
        assert_eq!(*all, [1]);
        assert_eq!(all.capacity(), 2);
    });
}

#[test]
fn the_values_of_a_vector_are_dropped_once() {
    without_leaks(|| {
        let (drops, value) = Counted::new();
        let mut all = KVVec::with_capacity(3, GFP_KERNEL).unwrap();
        for _ in 0..3 {
            assert!(all.push_within_capacity(value.clone()).is_ok());
        }
        all.reserve(10, GFP_KERNEL).unwrap();
        assert_eq!(drops.get(), 0);
        drop(all);
        assert_eq!(drops.get(), 3);
    });
}

#[test]
fn an_iterator_drops_the_values_that_it_did_not_give_out() {
    for taken in 0..=3 {
        without_leaks(|| {
            let (drops, value) = Counted::new();
            let mut all = KVVec::with_capacity(3, GFP_KERNEL).unwrap();
            for number in 0..3 {
                assert!(all.push_within_capacity((number, value.clone())).is_ok());
            }
            let mut values = all.into_iter();
            for number in 0..taken {
                assert_eq!(values.next().unwrap().0, number);
                assert_eq!(drops.get(), number + 1);
            }
            drop(values);
            assert_eq!(drops.get(), 3);
        });
    }
}
