// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Timeouts for machines that may be stopped for a while, such as virtual machines.

use std::time::{Duration, Instant};

/// Maximum time between two checks that counts towards the timeout. If more time has passed, the
/// caller did not run in between. The work that the caller waits for may not have run either.
const LONGEST: Duration = Duration::from_millis(50);

/// A timeout that counts only the time in which the caller kept checking. The caller must be a loop
/// that sleeps only briefly between two checks.
#[derive(Debug)]
pub struct Patience {
    left: Duration,
    last: Option<Instant>,
}

impl Patience {
    /// Creates a timeout that starts at the first check.
    pub fn new(time: Duration) -> Self {
        Self {
            left: time,
            last: None,
        }
    }

    /// Reads the clock. Returns `true` if the time is up.
    pub fn is_over(&mut self) -> bool {
        let now = Instant::now();
        self.advance(now)
    }

    fn advance(&mut self, now: Instant) -> bool {
        let since = self
            .last
            .map_or(Duration::ZERO, |last| now.saturating_duration_since(last));
        self.last = Some(now);
        self.left = self.left.saturating_sub(since.min(LONGEST));
        self.left.is_zero()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stopped_machine_uses_no_time_of_the_timeout() {
        let begin = Instant::now();
        let mut patience = Patience::new(Duration::from_secs(1));
        assert!(!patience.advance(begin));
        assert!(!patience.advance(begin + Duration::from_secs(3600)));
        assert!(!patience.advance(begin + Duration::from_secs(7200)));
    }

    #[test]
    fn frequent_checks_use_the_timeout() {
        let begin = Instant::now();
        let mut patience = Patience::new(Duration::from_secs(1));
        let looks = (0..)
            .take_while(|scan| !patience.advance(begin + Duration::from_millis(10) * *scan))
            .count();
        assert_eq!(looks, 100);
    }
}
