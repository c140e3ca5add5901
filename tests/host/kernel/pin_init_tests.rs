// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Tests of initialization in place.

use std::ptr::addr_of;

use super::fakes::without_leaks;
use super::Counted;
use crate::pin_init;
use crate::prelude::*;
use crate::sync::Arc;

struct Whole<T> {
    first: u8,
    second: T,
    third: Part,
}

struct Part {
    place: usize,
    short: u16,
}

impl Part {
    /// Returns an initializer of a `Part` that stores its own address.
    fn new(short: u16) -> impl PinInit<Self> {
        let closure = pin_init::closure(move |place: *mut Part| {
            // SAFETY: `place` is valid for writes, and both fields are written.
            unsafe {
                addr_of!((*place).short).cast_mut().write(short);
                (&raw mut (*place).place).write(place.addr());
                pin_init::Initialized::new()
            }
        });
        // SAFETY: The closure writes all fields.
        unsafe { pin_init::from_closure(closure) }
    }
}

fn whole<T>(second: T) -> impl PinInit<Whole<T>> {
    let first = 3;
    pin_init!(Whole {
        third <- Part::new(9),
        first,
        second: second,
    })
}

#[test]
fn fields_are_initialized_where_they_stay() {
    without_leaks(|| {
        let (drops, value) = Counted::new();
        let boxed = KBox::pin_init(whole(value), GFP_KERNEL).unwrap();
        assert_eq!((boxed.first, boxed.third.short), (3, 9));
        assert_eq!(boxed.third.place, addr_of!(boxed.third).addr());
        assert_eq!(drops.get(), 0);
        let moved = boxed;
        assert_eq!(moved.third.place, addr_of!(moved.third).addr());
        drop(moved);
        assert_eq!(drops.get(), 1);

        let shared = Arc::pin_init(whole(4_u64), GFP_KERNEL).unwrap();
        assert_eq!(shared.second, 4);
        assert_eq!(shared.third.place, addr_of!(shared.third).addr());
    });
}

#[test]
fn an_initializer_that_is_not_used_drops_what_it_owns() {
    let (drops, value) = Counted::new();
    drop(whole(value));
    assert_eq!(drops.get(), 1);
}

#[test]
fn fields_are_initialized_in_the_order_of_the_list() {
    struct Two {
        a: u32,
        b: u32,
    }
    let mut number = 0;
    let mut next = move || {
        number += 1;
        number
    };
    let init = pin_init!(Two {
        b: next(),
        a: next()
    });
    let two = KBox::<Two>::pin_init(init, GFP_KERNEL).unwrap();
    assert_eq!((two.a, two.b), (2, 1));
}
