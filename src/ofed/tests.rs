// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Tests of the version numbers in `ofed`.

use super::*;

/// Tests the cases of `scripts/check` (`revocation` in `tests/runner/tests/check/cases.txt`), and
/// version strings that no OFED has.
#[test]
fn revocable_mode_needs_25_04() {
    for (text, expected) in [
        ("4.9-7.1.0", Some(false)),
        ("5.8-6.0.4", Some(false)),
        ("23.10-1.1.9", Some(false)),
        ("24.10-3.2.5.0", Some(false)),
        ("25.01-0.6.0", Some(false)),
        ("25", Some(false)),
        ("25.4", Some(true)),
        ("25.04-0.6.1", Some(true)),
        ("25.10-1.7.1", Some(true)),
        ("26.01", Some(true)),
        ("100.01", Some(true)),
        ("MLNX_OFED_LINUX-24.10-3.2.5.0:", Some(false)),
        ("OFED-internal-25.01-0.6.0:", Some(false)),
        ("OFED-internal-25.10-1.7.1:", Some(true)),
        ("DOCA 2.9.3", Some(false)),
        ("DOCA_2.10.0", Some(false)),
        ("doca-ofed-3.0", Some(true)),
        ("doca-ofed-3.5", Some(true)),
        ("DOCA 10.0", Some(true)),
        ("doca-ofed-24.10", Some(false)),
        ("doca-ofed-26.01", Some(true)),
        ("3.4", Some(true)),
        ("30.4", Some(true)),
        ("25.-04", Some(false)),
        ("26.", Some(true)),
        ("26.x4", Some(true)),
        ("26.04.99999999999", Some(true)),
        ("", None),
        ("unknown", None),
        ("4294967296.1", None),
        ("25.4294967296", None),
    ] {
        assert_eq!(stops_early(text.as_bytes()), expected, "{text:?}");
    }
}
