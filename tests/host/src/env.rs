// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! What surrounds the logic in these tests. `src/env.rs` has the kernel's, and says what each name stands for.

use std::sync::Mutex;
use std::thread::ThreadId;

use crate::account::Account;
use crate::fakes;
use crate::fakes::lock;
use crate::pin::Directory;
use crate::provider::world;
use crate::record::Task;
use crate::refusal::Refusal;

pub(crate) use std::sync::Arc as Shared;

pub(crate) use crate::fakes::FakeBarMapping as BarMapping;
pub(crate) use crate::fakes::FakeDevice as PciDevice;
pub(crate) use crate::fakes::FakeList as List;
pub(crate) use crate::fakes::FakeLock as Lock;
pub(crate) use crate::fakes::FakeLock as Monitor;
pub(crate) use crate::fakes::FakeMapping as DmaMapping;
pub(crate) use crate::fakes::FakePin as PersistentPin;
pub(crate) use crate::fakes::FakeTable as Table;
pub(crate) use crate::fakes::FakeTicket as Ticket;
pub(crate) use crate::fakes::Registered;
pub(crate) use crate::provider::gate_read;
pub(crate) use crate::provider::gate_write;
pub(crate) use crate::provider::get_pages;
pub(crate) use crate::provider::is_exiting;
pub(crate) use crate::provider::kept;
pub(crate) use crate::provider::late_callback;
pub(crate) use crate::provider::process;
pub(crate) use crate::provider::put_pages;
pub(crate) use crate::provider::retry;
pub(crate) use crate::provider::stray_callback;
pub(crate) use crate::provider::ModuleHold;
pub(crate) use crate::provider::Slots;

pub(crate) type LentTable = Vec<crate::extents::Entry>;
pub(crate) type PageTable = u64;
pub(crate) type Process = u32;
pub(crate) type User = u32;

pub(crate) struct SlotLock(Lock<bool>);

impl SlotLock {
    pub(crate) fn new(value: bool) -> Result<Self, Refusal> {
        Ok(SlotLock(Lock::new(value)))
    }

    pub(crate) fn with<R>(&self, f: impl FnOnce(&mut bool) -> R) -> R {
        self.0.with(f)
    }
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Thread(ThreadId);

impl Thread {
    pub(crate) fn current() -> Self {
        Thread(std::thread::current().id())
    }
}

pub(crate) fn share<T>(value: T) -> Result<Shared<T>, Refusal> {
    Ok(Shared::new(value))
}

pub(crate) fn user() -> User {
    fakes::USER.get()
}

pub(crate) fn user_limit() -> Option<u64> {
    fakes::LEDGER.get().and_then(|(limit, _)| limit)
}

pub(crate) const ACCOUNTS_LOCK: () = ();
pub(crate) const DIRECTORY_LOCK: () = ();

/// A static of the module's. Each test has what stands in it for itself.
pub(crate) struct StaticMutex<T>(Mutex<T>);

impl<T> StaticMutex<T> {
    pub(crate) const fn new(_lock: (), value: T) -> Self {
        StaticMutex(Mutex::new(value))
    }
}

impl StaticMutex<List<Account>> {
    pub(crate) fn with<R>(&self, f: impl FnOnce(&mut List<Account>) -> R) -> R {
        let ledger = fakes::LEDGER.get();
        f(&mut lock(ledger.map_or(&self.0, |(_, accounts)| accounts)))
    }
}

impl StaticMutex<Option<Directory>> {
    pub(crate) fn with<R>(&self, f: impl FnOnce(&mut Option<Directory>) -> R) -> R {
        f(&mut lock(&world().directory))
    }
}

/// The provider calls the module by this.
pub(crate) trait Callback {
    fn freed(number: usize);
}

pub(crate) fn caller() -> (Task, u64) {
    let task = Task {
        tgid: 154,
        pid: 155,
        comm: *b"a test=\0\0\0\0\0\0\0\0\0",
    };
    (task, 6_119_592)
}

pub(crate) fn is_killed() -> bool {
    let left = fakes::KILLED_AFTER.get();
    fakes::KILLED_AFTER.set(left.saturating_sub(1));
    left == 0
}

pub(crate) fn max_pieces() -> u32 {
    fakes::MAX_PIECES.get()
}
