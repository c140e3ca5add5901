// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! How much GPU memory each user has pinned through the module, and a limit on it.
//!
//! A [`Charge`] is taken before the pin, in the context of the process that registers, and lives
//! for as long as the memory may be pinned: with a revocable region that another process released,
//! until its callback. It goes back to the user that it was taken from. Both clients draw on one
//! account.
//!
//! A range that is registered twice is charged twice, as `RLIMIT_MEMLOCK` does it, though its pages
//! occupy BAR1 once.
//!
//! Uses `core` alone: see [`region`](super::region).

use core::ops::DerefMut;

use super::refusal::Refusal;
use super::region::List;

/// What one user has pinned.
pub(crate) struct Account<U> {
    user: U,
    /// An account without bytes serves the next user that needs one.
    bytes: u64,
}

impl<U: Copy + Eq> Account<U> {
    fn is_of(&self, user: U) -> bool {
        self.bytes > 0 && self.user == user
    }
}

/// Where the accounts are kept.
pub(crate) trait Ledger: 'static {
    /// What tells one user from another.
    type User: Copy + Eq + Send + Sync;
    /// The accounts: not more than there were ever users at once.
    type Accounts: List<Account<Self::User>>;

    /// The user of the calling process.
    fn user() -> Self::User;

    /// The limit for each user, in bytes, and the accounts, locked. `None`: there is no limit, and
    /// never was. A callback of the provider's waits for this lock: nothing is called with it held
    /// that waits for a callback.
    fn open() -> Option<(u64, impl DerefMut<Target = Self::Accounts>)>;
}

/// Bytes on a user's account, until dropped.
pub(crate) struct Charge<L: Ledger> {
    user: L::User,
    bytes: u64,
}

impl<L: Ledger> Charge<L> {
    /// Charges `bytes` to the user of the calling process.
    pub(crate) fn new(bytes: u64) -> Result<Self, Refusal> {
        let user = L::user();
        let Some((limit, mut accounts)) = L::open() else {
            return Ok(Charge { user, bytes: 0 });
        };
        let own = accounts.iter().position(|account| account.is_of(user));
        let free = || accounts.iter().position(|account| account.bytes == 0);
        let found = own.or_else(free);
        let pinned = found
            .and_then(|index| accounts.get(index))
            .map_or(0, |account| account.bytes);
        let total = pinned
            .checked_add(bytes)
            .filter(|total| *total <= limit)
            .ok_or(Refusal::UserLimit { pinned, limit })?;
        match found.and_then(|index| accounts.get_mut(index)) {
            Some(account) => *account = Account { user, bytes: total },
            None => accounts.push(Account { user, bytes: total })?,
        }
        Ok(Charge { user, bytes })
    }
}

impl<L: Ledger> Drop for Charge<L> {
    fn drop(&mut self) {
        let Some((_, mut accounts)) = L::open() else {
            return;
        };
        let user = self.user;
        if let Some(account) = accounts.iter_mut().find(|account| account.is_of(user)) {
            account.bytes = account.bytes.saturating_sub(self.bytes);
        }
    }
}
