// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Tests of the pages and errors of a registration.

use super::*;

fn request(address: u64, length: usize, iova: u64) -> Request {
    Request {
        address,
        length,
        iova,
        access: 1,
        has_dma_handle: false,
    }
}

#[test]
fn pages_contain_the_range() {
    let around = |address, length| {
        let pages = Pages::around(&request(address, length, address), 4096).unwrap();
        (pages.start, pages.length, pages.offset)
    };
    assert_eq!(around(0x10_0000, 4096), (0x10_0000, 4096, 0));
    assert_eq!(around(0x10_0001, 4095), (0x10_0000, 4096, 1));
    assert_eq!(around(0x10_0001, 4096), (0x10_0000, 8192, 1));
    assert_eq!(around(0x10_0fff, 1), (0x10_0000, 4096, 0xfff));
    assert_eq!(around(0x10_0fff, 2), (0x10_0000, 8192, 0xfff));
    assert_eq!(
        around(0x10_0200, 1 << 30),
        (0x10_0000, (1 << 30) + 4096, 0x200)
    );
}

#[test]
fn no_arithmetic_wraps() {
    for (address, length) in [
        (0x1000, 0),
        (0x1000, usize::MAX),
        (u64::MAX, 1),
        (u64::MAX - 4095, 4096),
        (u64::MAX - 4096, 4096),
    ] {
        assert_eq!(
            Pages::around(&request(address, length, address), 4096),
            None
        );
    }
}

#[test]
fn the_offset_equals_that_of_the_io_address() {
    let offset = |address, iova| {
        Pages::around(&request(address, 100, iova), 65536).map(|pages| pages.offset)
    };
    assert_eq!(offset(0x12345, 0x2345), Some(0x2345));
    assert_eq!(offset(0x12345, 0x12346), None);
    assert_eq!(offset(0x12345, 0x3345), None);
}
