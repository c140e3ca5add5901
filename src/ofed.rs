// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Versions of MLNX_OFED and DOCA-OFED.
//!
//! Uses only `core`, so cargo also compiles this file on the host.

/// Major and minor number, such as 24 and 10 of "24.10-3.2.5".
type Version = (u32, u32);

/// First OFED in which `ib_umem_stop_invalidation_notifier()` may be called before the notifier is
/// activated. Older versions deadlock.
const STOPS_EARLY: Version = (25, 4);

/// First DOCA version that contains OFED [`STOPS_EARLY`]. DOCA has its own version numbers.
const STOPS_EARLY_IN_DOCA: Version = (3, 0);

/// Returns the first number in `text`, and the text after it. Returns `None` if there is no number,
/// or if it exceeds 32 bits.
fn number(text: &[u8]) -> Option<(u32, &[u8])> {
    let start = text.iter().position(u8::is_ascii_digit)?;
    let text = text.get(start..)?;
    let end = text.iter().position(|byte| !byte.is_ascii_digit());
    let (digits, rest) = text.split_at_checked(end.unwrap_or(text.len()))?;
    let value = digits.iter().try_fold(0_u32, |value, digit| {
        value
            .checked_mul(10)?
            .checked_add(u32::from(digit.checked_sub(b'0')?))
    })?;
    Some((value, rest))
}

/// Returns the first version in `text`. The minor number is 0 if `text` has none.
fn version(text: &[u8]) -> Option<Version> {
    let (major, rest) = number(text)?;
    let minor = match rest {
        [b'.', rest @ ..] if rest.first().is_some_and(u8::is_ascii_digit) => number(rest)?.0,
        _ => 0,
    };
    Some((major, minor))
}

/// Returns `true` if a revocable registration can fail at any step without a deadlock in ib_core.
/// `text` names the OFED version. Returns `None` if `text` has no version.
///
/// `text` is the version of one of OFED's modules. If `text` names DOCA, the number can be DOCA's
/// own version. A version 3.x is always treated as a DOCA version: OFED's own 3.x ended in 2016,
/// and this module cannot be built with it.
pub(crate) fn stops_early(text: &[u8]) -> Option<bool> {
    let version = version(text)?;
    let names_doca = text
        .windows(4)
        .any(|word| word.eq_ignore_ascii_case(b"doca"));
    let oldest = match version.0 {
        3 => STOPS_EARLY_IN_DOCA,
        ..20 if names_doca => STOPS_EARLY_IN_DOCA,
        _ => STOPS_EARLY,
    };
    Some(version >= oldest)
}

#[cfg(all(test, feature = "unit"))]
#[path = "ofed/tests.rs"]
mod tests;
