// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! `--watch`: repeats a command. An interrupt ends the program as usual, since there is nothing to
//! undo.

use std::time::Duration;

use anyhow::{bail, Context as _};

use crate::debugfs::Time;
use crate::finding::Status;
use crate::report::Out;

/// Minimum interval, in seconds. Each round reads all of the module's files.
const SHORTEST: f64 = 0.1;

/// Returns the interval between two rounds, or `None` for a single round.
pub(crate) fn interval(watch: Option<f64>) -> anyhow::Result<Option<Duration>> {
    let Some(seconds) = watch else {
        return Ok(None);
    };
    if !(SHORTEST..).contains(&seconds) {
        bail!("--watch takes {SHORTEST} seconds or more, not {seconds}");
    }
    Duration::try_from_secs_f64(seconds)
        .map(Some)
        .with_context(|| format!("--watch {seconds}"))
}

/// Runs one round, or repeats until a round fails or the reader is gone. Clears a terminal before
/// each round.
pub(crate) fn repeat(
    interval: Option<Duration>,
    out: &mut Out,
    mut scan: impl FnMut(&mut Out) -> anyhow::Result<Status>,
) -> anyhow::Result<Status> {
    if interval.is_some() {
        out.repeat();
    }
    loop {
        out.clear();
        let status = scan(out)?;
        let Some(interval) = interval else {
            return Ok(status);
        };
        out.flush()?;
        std::thread::sleep(interval);
    }
}

/// Prints the time of a repeated round, unless a terminal shows only this round.
pub(crate) fn heading(now: Option<Time>, out: &mut Out) {
    if let (true, Some(now)) = (out.wants_heading(), now) {
        out.line(format!("--- {:.6} s", now.seconds()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interval_is_a_time_to_wait() {
        assert!(interval(None).unwrap().is_none());
        assert_eq!(
            interval(Some(0.5)).unwrap(),
            Some(Duration::from_millis(500))
        );
        for wrong in [0.0, -1.0, 0.01, f64::NAN, f64::INFINITY, 1e300] {
            assert!(interval(Some(wrong)).is_err(), "{wrong}");
        }
    }

    #[test]
    fn repetition_ends_with_the_first_failed_round() {
        let mut out = Out::gather(false);
        let mut left = 3_u32;
        let ended = repeat(Some(Duration::from_millis(1)), &mut out, |_| {
            left = left.checked_sub(1).context("gone")?;
            Ok(Status::Ok)
        });
        assert!(ended.is_err());
        assert_eq!(left, 0);
    }
}
