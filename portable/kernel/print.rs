// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! The kernel log.
//!
//! C header: `include/linux/printk.h`. Only kernels with Rust-for-Linux format Rust text (`%pA`),
//! so this file formats each line on the stack.

use core::{
    ffi::CStr,
    fmt::{
        self,
        Write, //
    },
};

use crate::{
    bindings,
    ffi::c_int, //
};

/// Log level of a panic message: the digit of `KERN_EMERG`.
pub(crate) const EMERG: c_int = 0;

/// A buffer for one line. `printk()` of Linux 5.10 keeps 976 bytes of a log record, including the
/// module's prefix.
struct Line {
    text: [u8; Line::LEN],
    /// Number of bytes of `text` that are written. The bytes form whole characters. `used` is at
    /// most `Line::LEN`.
    used: usize,
    /// `true` if a part of the line did not fit.
    is_cut: bool,
}

impl Line {
    const LEN: usize = 928;
}

impl Line {
    /// Ends a line that is too long. Without a newline, the next message could continue the cut
    /// line.
    fn cut(&mut self) {
        self.is_cut = true;
        // A full line loses its last character. Bytes of the form 10xxxxxx continue a character.
        if self.used == Line::LEN {
            let is_start = |byte: &u8| byte & 0xc0 != 0x80;
            self.used = self.text.iter().rposition(is_start).unwrap_or(0);
        }
        if let Some(end) = self.text.get_mut(self.used) {
            *end = b'\n';
            self.used += 1;
        }
    }
}

impl Write for Line {
    /// Appends `text`. If `text` does not fit, appends the characters that fit, ends the line, and
    /// returns an error.
    fn write_str(&mut self, text: &str) -> fmt::Result {
        if self.is_cut {
            return Err(fmt::Error);
        }
        for character in text.chars() {
            let mut bytes = [0; 4];
            let bytes = match character {
                // `%.*s` ends at a NUL.
                '\0' => "\\x00",
                other => other.encode_utf8(&mut bytes),
            };
            let end = self.used.saturating_add(bytes.len());
            match self.text.get_mut(self.used..end) {
                // `copy_from_slice()` is avoided, because it can panic.
                Some(room) => {
                    for (to, from) in room.iter_mut().zip(bytes.bytes()) {
                        *to = from;
                    }
                }
                None => {
                    self.cut();
                    return Err(fmt::Error);
                }
            }
            self.used = end;
        }
        Ok(())
    }
}

/// Logs a line at a level, for the macros below. May be called in any context.
///
/// A line longer than 928 bytes is cut.
#[doc(hidden)]
#[cold]
#[inline(never)]
pub fn call_printk(level: c_int, arguments: fmt::Arguments<'_>) {
    let mut line = Line {
        text: [0; Line::LEN],
        used: 0,
        is_cut: false,
    };
    // An error means that the line was cut.
    let _ = line.write_fmt(arguments);
    // CAST: The length is at most `Line::LEN`.
    let length = line.used as c_int;
    // SAFETY: `text` has at least `length` bytes, which `printk()` copies before it returns.
    unsafe { bindings::shim_print(level, line.text.as_ptr().cast(), length) };
}

/// An argument of a log line. [`CStr`] itself has no `Display`.
#[doc(hidden)]
pub struct Argument<'a, T: ?Sized>(pub &'a T);

/// A C string that implements `Display` as in the kernel's crate: bytes other than printable ASCII
/// characters become `\x..`.
#[doc(hidden)]
pub struct Text<'a>(&'a CStr);

impl fmt::Display for Text<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for &byte in self.0.to_bytes() {
            if (b' '..=b'~').contains(&byte) {
                f.write_char(char::from(byte))?;
            } else {
                write!(f, "\\x{byte:02x}")?;
            }
        }
        Ok(())
    }
}

impl<'a> Argument<'a, &'a CStr> {
    /// Returns the string as a type that implements `Display`. The compiler prefers this method to
    /// the trait's method.
    pub fn shown(&self) -> Text<'a> {
        Text(self.0)
    }
}

/// Arguments that are formatted unchanged.
#[doc(hidden)]
pub trait AnyArgument<'a> {
    /// The type of the formatted argument.
    type Shown;

    /// Returns the argument.
    fn shown(&self) -> Self::Shown;
}

impl<'a, T> AnyArgument<'a> for Argument<'a, T> {
    type Shown = &'a T;

    fn shown(&self) -> &'a T {
        self.0
    }
}

/// Logs a formatted line at a level.
#[doc(hidden)]
#[macro_export]
macro_rules! pr_any {
    ($level:literal, $format:literal $(, $argument:expr)* $(,)?) => {{
        #[allow(unused_imports)]
        use $crate::print::AnyArgument as _;
        $crate::print::call_printk(
            $level,
            ::core::format_args!($format $(, $crate::print::Argument(&$argument).shown())*),
        )
    }};
}

/// Logs an error (`KERN_ERR`). The text ends with `\n`.
#[macro_export]
macro_rules! pr_err {
    ($($all:tt)*) => { $crate::pr_any!(3, $($all)*) };
}

/// Logs a warning (`KERN_WARNING`). The text ends with `\n`.
#[macro_export]
macro_rules! pr_warn {
    ($($all:tt)*) => { $crate::pr_any!(4, $($all)*) };
}

/// Logs a normal but significant condition (`KERN_NOTICE`). The text ends with `\n`.
#[macro_export]
macro_rules! pr_notice {
    ($($all:tt)*) => { $crate::pr_any!(5, $($all)*) };
}

/// Logs information (`KERN_INFO`). The text ends with `\n`.
#[macro_export]
macro_rules! pr_info {
    ($($all:tt)*) => { $crate::pr_any!(6, $($all)*) };
}
