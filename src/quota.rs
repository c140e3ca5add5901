// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! How much GPU memory each user has pinned through the module, and a limit on it.
//!
//! A [`Charge`] is taken before the pin, in the context of the process that registers, and lives
//! for as long as the memory may be pinned: with a revocable region that another process released,
//! until its callback. It goes back to the user that it was taken from. Both clients share one limit.
//!
//! A range that is registered twice is charged twice, as `RLIMIT_MEMLOCK` does it, though its pages
//! occupy BAR1 once.
//!
//! Uses `core` and [`env`](super::env) alone.

use super::{
    env::{
        self,
        SmallVec,
        StaticMutex,
        User,
        QUOTA_LOCK, //
    },
    reason::Reason, //
};

/// What one user has pinned.
pub(crate) struct Usage {
    user: User,
    /// One without bytes serves the next user that needs one.
    bytes: u64,
}

impl Usage {
    fn is_of(&self, user: User) -> bool {
        self.bytes > 0 && self.user == user
    }
}

/// All users', where there is a limit. A callback of the provider's waits for this lock: nothing is called with it
/// held that waits for a callback.
static USAGES: StaticMutex<SmallVec<Usage>> = StaticMutex::new(QUOTA_LOCK, SmallVec::new());

/// Bytes that are charged to a user, until dropped.
pub(crate) struct Charge {
    user: User,
    bytes: u64,
}

impl Charge {
    /// Charges `bytes` to the user of the calling process.
    pub(crate) fn new(bytes: u64) -> Result<Self, Reason> {
        let user = env::user();
        let Some(limit) = env::user_limit() else {
            return Ok(Charge { user, bytes: 0 });
        };
        USAGES.with(|usages| {
            let own = usages.iter().position(|usage| usage.is_of(user));
            let free = || usages.iter().position(|usage| usage.bytes == 0);
            let found = own.or_else(free);
            let pinned = found
                .and_then(|index| usages.get(index))
                .map_or(0, |usage| usage.bytes);
            let total = pinned
                .checked_add(bytes)
                .filter(|total| *total <= limit)
                .ok_or(Reason::UserLimit { pinned, limit })?;
            match found.and_then(|index| usages.get_mut(index)) {
                Some(usage) => *usage = Usage { user, bytes: total },
                None => usages.push(Usage { user, bytes: total })?,
            }
            Ok(Charge { user, bytes })
        })
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        if env::user_limit().is_none() {
            return;
        }
        let user = self.user;
        USAGES.with(|usages| {
            if let Some(usage) = usages.iter_mut().find(|usage| usage.is_of(user)) {
                usage.bytes = usage.bytes.saturating_sub(self.bytes);
            }
            if usages.iter().all(|usage| usage.bytes == 0) {
                // A static is not dropped with its module.
                *usages = SmallVec::new();
            }
        });
    }
}

#[cfg(all(test, feature = "unit"))]
#[path = "quota/tests.rs"]
mod tests;
