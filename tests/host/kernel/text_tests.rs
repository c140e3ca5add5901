// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Tests of log lines, files, strings, errors and delays.

use std::fmt;
use std::ptr::from_mut;

use super::fakes::{logged, slept};
use crate::error::code::{EBUSY, EINVAL, ENOENT, ENOMEM};
use crate::error::from_result;
use crate::prelude::*;
use crate::seq_file::SeqFile;
use crate::time::delay::fsleep;
use crate::time::Delta;
use crate::{print, seq_print};

/// Length of the longest line, in bytes.
const LEN: usize = 928;

/// Returns the only line that was logged.
fn line() -> (c_int, String) {
    let mut all = logged();
    assert_eq!(all.len(), 1);
    let (level, bytes) = all.remove(0);
    (level, String::from_utf8(bytes).expect("a line is UTF-8"))
}

#[test]
fn each_macro_has_its_level() {
    pr_err!("a\n");
    pr_warn!("b\n");
    pr_notice!("c\n");
    pr_info!("d\n");
    print::call_printk(print::EMERG, format_args!("e\n"));
    let all = logged();
    let levels: Vec<_> = all
        .iter()
        .map(|(level, text)| (*level, &text[..]))
        .collect();
    let want: [(c_int, &[u8]); 5] = [
        (3, b"a\n"),
        (4, b"b\n"),
        (5, b"c\n"),
        (6, b"d\n"),
        (0, b"e\n"),
    ];
    assert_eq!(levels, want);
}

#[test]
fn arguments_are_formatted_as_their_types_say() {
    let (number, inline) = (255_u64, "inline");
    pr_info!("{:#x} {} {inline} {}\n", number, "text", c"of C");
    assert_eq!(line().1, "0xff text inline of C\n");
    let borrowed: &CStr = c"~caf\xc3\xa9 \x7f\x1b\n";
    pr_info!("<{}>\n", borrowed);
    assert_eq!(line().1, "<~caf\\xc3\\xa9 \\x7f\\x1b\\x0a>\n");
}

#[test]
fn a_line_that_fits_is_whole() {
    for length in [0, 1, LEN - 1, LEN] {
        let text = "x".repeat(length);
        pr_info!("{text}");
        assert_eq!(line().1, text);
    }
}

#[test]
fn a_long_line_is_cut_and_ends() {
    for length in [LEN + 1, LEN + 2, 4 * LEN] {
        pr_info!("{}\n", "x".repeat(length));
        assert_eq!(line().1, "x".repeat(LEN - 1) + "\n", "{length}");
    }
    // Only the newline does not fit.
    pr_info!("{}\n", "x".repeat(LEN));
    assert_eq!(line().1, "x".repeat(LEN - 1) + "\n");
    pr_info!("{}\n", "x".repeat(LEN - 1));
    assert_eq!(line().1, "x".repeat(LEN - 1) + "\n");
}

#[test]
fn a_long_line_is_cut_between_characters() {
    for (character, size) in [("é", 2), ("€", 3), ("😀", 4)] {
        for before in 0..size {
            let text = "x".repeat(before) + &character.repeat(LEN);
            pr_info!("{text}\n");
            let (_, line) = line();
            let body = line.strip_suffix('\n').expect("a newline");
            assert!(text.starts_with(body));
            assert!(
                line.len() <= LEN && line.len() > LEN - 2 * size,
                "{}",
                line.len()
            );
        }
    }
}

#[test]
fn nothing_follows_a_line_that_was_cut() {
    struct Stubborn;
    impl fmt::Display for Stubborn {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            let _ = f.write_str(&"x".repeat(LEN - 3));
            // Four bytes do not fit, but one byte would.
            let _ = f.write_str("😀");
            let _ = f.write_str("y");
            Ok(())
        }
    }
    pr_info!("{}\n", Stubborn);
    assert_eq!(line().1, "x".repeat(LEN - 3) + "\n");
}

#[test]
fn a_nul_does_not_end_a_line() {
    pr_info!("a{}b\n", "\0");
    assert_eq!(line().1, "a\\x00b\n");
}

#[test]
fn a_file_gets_all_of_the_text() {
    let mut file: Vec<u8> = Vec::new();
    // SAFETY: The fake of `seq_write()` expects a pointer to a `Vec<u8>`. No other code uses `file`
    // while `seq` exists.
    let seq = unsafe { SeqFile::from_raw(from_mut(&mut file).cast()) };
    let long = "€".repeat(LEN);
    seq_print!(seq, "{}={:#x}\n", "key", 16);
    seq_print!(seq, "{long}");
    assert_eq!(file, format!("key=0x10\n{long}").into_bytes());
}

#[test]
fn strings_of_c_are_borrowed() {
    // SAFETY: The literal is a C string.
    let text = unsafe { <CStr as CStrExt>::from_char_ptr(c"abc".as_char_ptr()) };
    assert_eq!(text, c"abc");
    assert_eq!(text.as_char_ptr(), text.as_ptr().cast());
}

#[test]
fn errors_have_the_kernel_s_numbers() {
    for (error, errno) in [(ENOENT, -2), (ENOMEM, -12), (EBUSY, -16), (EINVAL, -22)] {
        assert_eq!(error.to_errno(), errno);
        assert_eq!(Error::from_errno(errno), error);
    }
    assert_eq!(Error::from_errno(-1).to_errno(), -1);
    assert_eq!(Error::from_errno(-4095).to_errno(), -4095);
    assert_eq!(logged(), []);
    for no_errno in [0, 1, -4096, c_int::MIN, c_int::MAX] {
        assert_eq!(Error::from_errno(no_errno), EINVAL);
        assert_eq!(line(), (4, format!("{no_errno} is not an error number\n")));
    }
    let too_large: Result<u8> = (|| Ok(u8::try_from(256)?))();
    assert_eq!(too_large, Err(EINVAL));
}

#[test]
fn results_become_what_c_returns() {
    assert_eq!(from_result(|| Ok(5)), 5);
    assert_eq!(from_result::<c_int>(|| Err(EBUSY)), -16);
    assert_eq!(
        from_result::<c_int>(|| Err(Error::from_errno(-4095))),
        -4095
    );
    assert_eq!(from_result::<i64>(|| Err(Error::from_errno(-4095))), -4095);
}

#[test]
fn a_delay_is_never_too_short() {
    const LONGEST: u64 = i32::MAX as u64;
    for (millis, micros) in [
        (0, 0),
        (1, 1_000),
        (1 << 9, 512_000),
        (2_147_483, 2_147_483_000),
        (2_147_484, LONGEST),
        (i64::MAX, LONGEST),
        // A negative delay is a bug in the caller.
        (-1, LONGEST),
        (i64::MIN, LONGEST),
    ] {
        fsleep(Delta::from_millis(millis));
        assert_eq!(slept(), [micros], "{millis}");
    }
}
