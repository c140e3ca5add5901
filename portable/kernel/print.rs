// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! The kernel's log. `%pA` is there only with Rust-for-Linux, so a line is formatted here, and cut off where it is longer
//! than the log would take.

use core::{
    ffi::CStr,
    fmt::{self, Write as _},
};

use crate::{bindings, ffi::c_int};

/// One line. On the stack, which has 16 KiB.
struct Line {
    text: [u8; Line::LEN],
    used: usize,
}

impl Line {
    const LEN: usize = 960;
}

impl fmt::Write for Line {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let Some(rest) = self.text.get_mut(self.used..) else {
            return Err(fmt::Error);
        };
        for (to, from) in rest.iter_mut().zip(text.bytes()) {
            *to = from;
        }
        let room = rest.len();
        self.used += text.len().min(room);
        if text.len() > room {
            return Err(fmt::Error);
        }
        Ok(())
    }
}

/// For the macros below.
#[doc(hidden)]
#[cold]
#[inline(never)]
pub fn print(level: c_int, arguments: fmt::Arguments<'_>) {
    let mut line = Line {
        text: [0; Line::LEN],
        used: 0,
    };
    // What does not fit is left out.
    let _ = line.write_fmt(arguments);
    // CAST: Less than a page.
    // SAFETY: So many bytes, which are read during the call.
    unsafe { bindings::shim_print(level, line.text.as_ptr().cast(), line.used as c_int) };
}

/// An argument: strings of C's have no `Display` of `core`'s.
#[doc(hidden)]
pub struct Argument<'a, T: ?Sized>(pub &'a T);

#[doc(hidden)]
pub struct Text<'a>(&'a CStr);

impl fmt::Display for Text<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for chunk in self.0.to_bytes().utf8_chunks() {
            f.write_str(chunk.valid())?;
            for byte in chunk.invalid() {
                write!(f, "\\x{byte:02x}")?;
            }
        }
        Ok(())
    }
}

impl<'a> Argument<'a, &'a CStr> {
    pub fn shown(&self) -> Text<'a> {
        Text(self.0)
    }
}

#[doc(hidden)]
pub trait AnyArgument<'a> {
    type Shown;
    fn shown(&self) -> Self::Shown;
}

impl<'a, T> AnyArgument<'a> for Argument<'a, T> {
    type Shown = &'a T;
    fn shown(&self) -> &'a T {
        self.0
    }
}

#[doc(hidden)]
#[macro_export]
macro_rules! pr_any {
    ($level:literal, $format:literal $(, $argument:expr)* $(,)?) => {{
        #[allow(unused_imports)]
        use $crate::print::AnyArgument as _;
        $crate::print::print(
            $level,
            ::core::format_args!($format $(, $crate::print::Argument(&$argument).shown())*),
        )
    }};
}

#[macro_export]
macro_rules! pr_err {
    ($($all:tt)*) => { $crate::pr_any!(3, $($all)*) };
}

#[macro_export]
macro_rules! pr_warn {
    ($($all:tt)*) => { $crate::pr_any!(4, $($all)*) };
}

#[macro_export]
macro_rules! pr_notice {
    ($($all:tt)*) => { $crate::pr_any!(5, $($all)*) };
}

#[macro_export]
macro_rules! pr_info {
    ($($all:tt)*) => { $crate::pr_any!(6, $($all)*) };
}
