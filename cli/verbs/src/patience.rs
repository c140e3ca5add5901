// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! How long to wait for something, where a machine may stand still meanwhile.

use std::time::{Duration, Instant};

/// What lies between two looks counts for this much at most: in more the caller did not run, and what it waits for may not
/// have run either.
const LONGEST: Duration = Duration::from_millis(50);

/// Runs out after some time in which the caller looked again and again. For loops that sleep a little between two looks.
#[derive(Debug)]
pub struct Patience {
    left: Duration,
    last: Option<Instant>,
}

impl Patience {
    /// Patience for so long, from the first look on.
    pub fn new(time: Duration) -> Self {
        Self {
            left: time,
            last: None,
        }
    }

    /// Looks at the clock; whether the time is up.
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
    fn a_machine_that_stands_still_uses_up_no_patience() {
        let begin = Instant::now();
        let mut patience = Patience::new(Duration::from_secs(1));
        assert!(!patience.advance(begin));
        assert!(!patience.advance(begin + Duration::from_secs(3600)));
        assert!(!patience.advance(begin + Duration::from_secs(7200)));
    }

    #[test]
    fn looking_often_uses_it_up() {
        let begin = Instant::now();
        let mut patience = Patience::new(Duration::from_secs(1));
        let looks = (0..)
            .take_while(|scan| !patience.advance(begin + Duration::from_millis(10) * *scan))
            .count();
        assert_eq!(looks, 100);
    }
}
