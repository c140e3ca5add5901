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
        IdMap,
        IdSlot,
        StaticMutex,
        User,
        QUOTA_LOCK, //
    },
    reason::Reason, //
};

/// Bytes of each user that has pinned any, by user.
pub(crate) type Usages = Option<IdMap<u64>>;

/// All users', where there is a limit. A callback of nvidia.ko takes this lock: while it is held, nothing is
/// allocated, and nothing is called that waits for a callback.
static USAGES: StaticMutex<Usages> = StaticMutex::new(QUOTA_LOCK, None);

/// Bytes that are charged to a user, until dropped. `None` where there is no limit.
pub(crate) struct Charge(Option<(User, u64)>);

impl Charge {
    /// Charges `bytes` to the user of the calling process.
    pub(crate) fn new(bytes: u64) -> Result<Self, Reason> {
        let Some(limit) = env::user_limit() else {
            return Ok(Charge(None));
        };
        let user = env::user();
        let slot = IdSlot::new()?;
        USAGES.with(|usages| {
            let usages = usages.get_or_insert_with(IdMap::default);
            let pinned = usages.get(user).copied().unwrap_or(0);
            let total = pinned
                .checked_add(bytes)
                .filter(|total| *total <= limit)
                .ok_or(Reason::UserLimit { pinned, limit })?;
            match usages.get_mut(user) {
                Some(pinned) => *pinned = total,
                None => usages.insert(slot, user, total),
            }
            Ok(Charge(Some((user, bytes))))
        })
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        let Some((user, bytes)) = self.0 else {
            return;
        };
        USAGES.with(|usages| {
            let usages = usages.get_or_insert_with(IdMap::default);
            if let Some(pinned) = usages.get_mut(user) {
                *pinned = pinned.saturating_sub(bytes);
                if *pinned == 0 {
                    // A static is not dropped with its module.
                    usages.remove(user);
                }
            }
        });
    }
}

#[cfg(all(test, feature = "unit"))]
#[path = "quota/tests.rs"]
mod tests;
