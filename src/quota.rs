// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! GPU memory that each user has pinned through this module, and its limit.
//!
//! A [`Charge`] is taken before the pin, in the context of the process that registers. The charge
//! lives as long as the memory may be pinned. If another process released a revocable region, the
//! charge lives until the region's callback. The charge is returned to the user that paid it. Both
//! clients share one limit.
//!
//! Two registrations of one range are charged twice, as with `RLIMIT_MEMLOCK`, although the pages
//! occupy BAR1 once.
//!
//! Uses only `core` and [`env`](super::env).

use super::{
    env::{self, *},
    reason::Reason, //
};

/// Pinned bytes of each user that has pinned memory, by user.
pub(crate) type Usages = Option<IdMap<u64>>;

/// Usage of all users, if there is a limit. A callback of nvidia.ko takes this lock. While this
/// lock is held, do not allocate, and do not call anything that waits for a callback.
static USAGES: StaticMutex<Usages> = StaticMutex::new(QUOTA_LOCK, None);

/// Bytes that are charged to a user until this value is dropped. `None` if there is no limit.
pub(crate) struct Charge(Option<(User, u64)>);

impl Charge {
    /// Charges `bytes` to the user of the calling process.
    pub(crate) fn new(bytes: u64) -> Result<Self, Reason> {
        let Some(limit) = env::user_limit() else {
            return Ok(Charge(None));
        };
        let user = env::user();
        let slot = IdSlot::new(GFP_KERNEL).map_err(|_| Reason::NoMemory)?;
        USAGES.with(|usages| {
            let usages = usages.get_or_insert_with(IdMap::default);
            let pinned = usages.get(&user).copied().unwrap_or(0);
            let total = pinned
                .checked_add(bytes)
                .filter(|total| *total <= limit)
                .ok_or(Reason::UserLimit { pinned, limit })?;
            match usages.get_mut(&user) {
                Some(pinned) => *pinned = total,
                None => drop(usages.insert(slot.into_node(user, total))),
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
            if let Some(pinned) = usages.get_mut(&user) {
                *pinned = pinned.saturating_sub(bytes);
                if *pinned == 0 {
                    // The user's entry must be removed here, because a static is not dropped when
                    // the module is unloaded.
                    usages.remove(&user);
                }
            }
        });
    }
}

#[cfg(all(test, feature = "unit"))]
#[path = "quota/tests.rs"]
mod tests;
