// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Tests of the protocol between a revocable pin and nvidia.ko. The callback comes at every place
//! where a single thread can cause it. `tests/loom` covers two threads.

use std::sync::{mpsc, Arc, Mutex, MutexGuard};
use std::thread;
use std::time::Duration;

use crate::callback_pin::{free_callback, CallbackPin, Revoke};
use crate::fakes::provider::DMA_BASE;
use crate::fakes::world::{world, World};
use crate::ranges::{PageSize, Span};
use crate::reason::{Reason, ENOMEM};

const EIO: i32 = -5;

/// One address in each of two allocations.
const ONE: u64 = 0x10_0000;
const OTHER: u64 = 0x20_0000;

fn record(what: &str) {
    world().provider.record(what);
}

fn on_get(hook: fn(&World)) {
    world().provider.on_get.set(Some(Box::new(hook)));
}

fn take_log() -> Vec<String> {
    world().provider.take_log()
}

#[track_caller]
fn took(want: &str) {
    world().provider.took(want);
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no test panics with a lock held")
}

/// A holder of pins, like a region. If `release` is set, a revocation releases the pins.
#[derive(Default)]
struct Region {
    pins: Mutex<Vec<CallbackPin>>,
    release: Mutex<bool>,
}

impl Region {
    fn new(starts: &[u64]) -> Result<Arc<Region>, Reason> {
        let region = Arc::new(Region::default());
        for &start in starts {
            let span = Span::covering(start, 1, PageSize::KIB_64, 1 << 40)?;
            let held = CallbackPin::new(span, region.clone())?;
            lock(&region.pins).push(held);
        }
        Ok(region)
    }

    fn release(&self) {
        let pins = std::mem::take(&mut *lock(&self.pins));
        drop(pins);
        record("released");
    }

    fn read(&self) -> Result<u64, Reason> {
        lock(&self.pins)[0].read(|table| Ok(table.table().read().addresses[0] - DMA_BASE))
    }
}

impl Revoke for Region {
    fn revoke(&self) {
        record("revoke");
        if *lock(&self.release) {
            self.release();
        }
    }

    fn orphaned(&self) {
        record("orphaned");
    }
}

#[test]
fn a_pin_is_read_and_put() {
    let region = Region::new(&[ONE]).expect("pinned");
    assert_eq!(region.read(), Ok(ONE));
    region.release();
    let want = ["get 1", "alone", "put 1", "let go", "released"];
    assert_eq!(take_log(), want);
    for never in [0, 2, usize::MAX] {
        free_callback(never);
        assert_eq!(take_log(), ["spurious"]);
    }
}

/// nvidia.ko has returned 0 from the put without unpinning. From now on the module checks before
/// each put whether nvidia.ko still knows the process.
#[test]
fn a_callback_after_the_put() {
    let region = Region::new(&[ONE]).expect("pinned");
    region.release();
    take_log();
    free_callback(1);
    assert_eq!(take_log(), ["late"]);
    let region = Region::new(&[ONE]).expect("pinned");
    region.release();
    took("get 2, get 3, alone, put 3, let go, alone, put 2, let go, released");
    let region = Region::new(&[ONE]).expect("pinned");
    world().provider.unlisted.set(true);
    region.release();
    drop(region);
    took("get 4, get 5, let go, orphaned, Unlisted, released");
    free_callback(4);
    assert_eq!(take_log(), ["revoke", "let go"]);
}

#[test]
fn the_provider_is_asked_about_a_process_that_exits() {
    world().exits.set(true);
    let region = Region::new(&[ONE]).expect("pinned");
    region.release();
    took("get 1, get 2, alone, put 2, let go, alone, put 1, let go, released");
}

/// If nvidia.ko no longer lists the process, the module makes no put. nvidia.ko would return 0 from
/// the put, and still call back later.
#[test]
fn a_process_that_exits_unlisted_keeps_the_entry_until_the_callback() {
    world().exits.set(true);
    let region = Region::new(&[ONE]).expect("pinned");
    world().provider.unlisted.set(true);
    region.release();
    drop(region);
    took("get 1, get 2, let go, orphaned, Unlisted, released");
    free_callback(1);
    assert_eq!(take_log(), ["revoke", "let go"]);
}

/// The pin with which the module asks nvidia.ko fails. By then, the memory has been freed and the
/// callback has run, so the module need not keep the entry.
#[test]
fn a_callback_while_the_provider_is_asked() {
    world().exits.set(true);
    let region = Region::new(&[ONE]).expect("pinned");
    on_get(|world| {
        world.free();
        world.provider.unlisted.set(true);
    });
    region.release();
    took("get 1, get 2, revoke, let go, alone, let go, released");
}

/// When the module asks nvidia.ko, the page already belongs to other memory. The module pins that
/// memory and puts the new pin at once.
#[test]
fn memory_is_freed_and_allocated_again_while_the_provider_is_asked() {
    world().exits.set(true);
    let region = Region::new(&[ONE]).expect("pinned");
    on_get(World::free);
    region.release();
    drop(region);
    took("get 1, get 2, revoke, alone, put 2, let go, alone, let go, released");
}

/// A pin that fails for lack of memory says nothing about nvidia.ko's list of processes.
#[test]
fn if_the_provider_cannot_be_asked_the_entry_stays() {
    world().exits.set(true);
    let region = Region::new(&[ONE]).expect("pinned");
    world().provider.refuses.set(Some(ENOMEM));
    region.release();
    drop(region);
    took("get 1, get 2, let go, orphaned, Failed(-12), released");
    world().provider.refuses.set(None);
    free_callback(1);
    assert_eq!(take_log(), ["revoke", "let go"]);
}

/// The pin with which the module asks nvidia.ko has its own entry. If this pin cannot be put, its
/// entry stays.
#[test]
fn a_pin_made_to_ask_that_cannot_be_put_keeps_its_entry() {
    world().exits.set(true);
    let region = Region::new(&[ONE]).expect("pinned");
    world().provider.failing.replace(vec![EIO]);
    region.release();
    drop(region);
    took("get 1, get 2, alone, put 2, orphaned, Failed(-5), alone, put 1, let go, released");
    free_callback(2);
    assert_eq!(take_log(), ["revoke", "let go"]);
}

#[test]
fn a_revoked_pin_is_neither_read_nor_put() {
    let region = Region::new(&[ONE]).expect("pinned");
    free_callback(1);
    assert_eq!(region.read(), Err(Reason::Revoked));
    region.release();
    assert_eq!(take_log(), ["get 1", "revoke", "let go", "released"]);
}

#[test]
fn a_callback_before_get_returns() {
    world().provider.on_pin.set(Some(Box::new(World::free)));
    let region = Region::new(&[ONE]).expect("pinned");
    assert_eq!(region.read(), Err(Reason::Revoked));
    region.release();
    assert_eq!(take_log(), ["get 1", "revoke", "let go", "released"]);
}

#[test]
fn a_failed_get_leaves_nothing() {
    world().provider.refuses.set(Some(ENOMEM));
    assert_eq!(Region::new(&[ONE]).err(), Some(Reason::Pin(ENOMEM)));
    assert_eq!(take_log(), ["get 1", "let go"]);
}

#[test]
fn a_get_without_a_table_leaves_what_its_callback_needs() {
    world().provider.no_table.set(true);
    assert_eq!(Region::new(&[ONE]).err(), Some(Reason::Pin(0)));
    assert_eq!(take_log(), ["get 1"]);
    free_callback(1);
    assert_eq!(take_log(), ["revoke", "let go"]);
}

#[test]
fn another_process_keeps_the_entry_until_the_callback() {
    let region = Region::new(&[ONE]).expect("pinned");
    world().become_process(2);
    region.release();
    drop(region);
    took("get 1, orphaned, OtherProcess, released");
    free_callback(1);
    assert_eq!(take_log(), ["revoke", "let go"]);
}

/// OFED 4.9 releases the region inside the callback, where nvidia.ko would refuse a put. The
/// callback must not wait for `put_rwsem` either. Another thread may hold `put_rwsem` and wait for
/// the API lock, which nvidia.ko holds during the callback.
#[test]
fn release_in_a_callback_keeps_the_other_pins_of_the_region() {
    let region = Region::new(&[ONE, OTHER]).expect("pinned");
    *lock(&region.release) = true;
    free_callback(1);
    took("get 1, get 2, revoke, orphaned, InCallback, released, let go");
    *lock(&region.release) = false;
    free_callback(2);
    assert_eq!(take_log(), ["revoke", "let go"]);
    // Once the callback is over, this thread can put again.
    Region::new(&[ONE]).expect("pinned").release();
    let want = ["get 3", "alone", "put 3", "let go", "released"];
    assert_eq!(take_log(), want);
}

#[test]
fn release_after_one_callback_puts_the_other_pins() {
    let region = Region::new(&[ONE, OTHER]).expect("pinned");
    free_callback(1);
    region.release();
    took("get 1, get 2, revoke, let go, alone, put 2, let go, released");
}

#[test]
fn a_put_without_memory_is_tried_again_with_put_rwsem_free_between() {
    let region = Region::new(&[ONE]).expect("pinned");
    world().provider.failing.replace(vec![ENOMEM, ENOMEM]);
    region.release();
    took("get 1, alone, put 1, again, alone, put 1, again, alone, put 1, let go, released");
}

#[test]
fn a_put_that_failed_keeps_the_entry_until_the_callback() {
    let region = Region::new(&[ONE]).expect("pinned");
    world().provider.failing.replace(vec![EIO]);
    region.release();
    drop(region);
    took("get 1, alone, put 1, orphaned, Failed(-5), released");
    free_callback(1);
    assert_eq!(take_log(), ["revoke", "let go"]);
}

#[test]
fn a_callback_waits_for_a_reader_of_the_table() {
    let region = Region::new(&[ONE]).expect("pinned");
    let (done, is_done) = mpsc::channel();
    let shared = world();
    thread::scope(|s| {
        let read = lock(&region.pins)[0].read(|_| {
            s.spawn(move || {
                shared.add();
                free_callback(1);
                done.send(()).expect("the test waits");
            });
            let early = is_done.recv_timeout(Duration::from_millis(200));
            assert!(early.is_err(), "the table is gone while it is read");
            Ok(())
        });
        assert_eq!(read, Ok(()));
        is_done.recv().expect("the callback returns");
    });
}
