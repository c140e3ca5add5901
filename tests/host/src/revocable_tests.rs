// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Tests of a revocable registration from start to end, with the callback at every place. Hooks and
//! channels determine the schedules.

use std::sync::{mpsc, Arc};
use std::thread;
use std::time::Duration;

use crate::device::{Gpus, Reach};
use crate::fakes::env::{Held, PciDevice, Ticket, IOMMU_OFFSET};
use crate::fakes::provider::DMA_BASE;
use crate::fakes::world::World;
use crate::mr::Mr;
use crate::persistent_mapping::DENIED;
use crate::ranges::PageSize;
use crate::reason::{Reason, EOPNOTSUPP};
use crate::revocable::RevocableMr;

const MIB: u64 = 1 << 20;

struct Registration {
    world: Arc<World>,
    mr: Held<RevocableMr>,
}

impl Registration {
    fn at(start: u64) -> Registration {
        let world = World::at(start);
        let mr = Held::<RevocableMr>::pin(start, MIB).expect("pinned");
        Registration { world, mr }
    }

    fn set_ticket(&self) -> Result<(), Reason> {
        self.mr.set_ticket(Ticket::default())
    }

    fn map(&self) -> Result<usize, Reason> {
        self.mr.map(&PciDevice::default()).map(|table| table.len())
    }

    fn up(start: u64) -> Registration {
        let this = Registration::at(start);
        this.set_ticket().expect("admitted");
        this.map().expect("mapped");
        assert_eq!(this.world.take_log(), ["pin", "map"]);
        this
    }
}

#[test]
fn without_a_callback() {
    let r = Registration::at(0x11_0000_0000);
    r.set_ticket().expect("admitted");
    assert_eq!(r.mr.fixed().page_size(), PageSize::KIB_64);
    assert_eq!(
        (r.mr.fixed().span.start(), r.mr.fixed().span.len()),
        (0x11_0000_0000, MIB)
    );
    let table = r.mr.map(&PciDevice::default()).expect("mapped");
    assert_eq!(table[0].addr, DMA_BASE + IOMMU_OFFSET);
    assert_eq!(r.map().err(), Some(Reason::MappedTwice));
    r.mr.unmap();
    let world = r.world.clone();
    drop(r);
    world.took("pin, map, unmap, unpin, table freed");
}

#[test]
fn a_device_that_was_denied_a_gpu_is_refused() {
    let start = 0x1c_0000_0000;
    let (first, second) = (Gpus::one(0), Gpus::one(1));
    // The columns are: the remembered answers, the number of the region's allocations (two on each
    // GPU), and `true` if the mapping is denied.
    for (answers, count, denied) in [
        (&[][..], 3, false),
        (
            &[(first, Reach::AsOurs), (second, Reach::Otherwise)],
            3,
            false,
        ),
        (&[(first, Reach::Denied)], 1, true),
        (&[(second, Reach::Denied)], 2, false),
        (&[(first, Reach::AsOurs), (second, Reach::Denied)], 3, true),
    ] {
        let world = World::of_parts(start, 3, 2 * MIB);
        world.answers.replace(Some(answers.to_vec()));
        let mr = Held::<RevocableMr>::pin(start, count * 2 * MIB).expect("pinned");
        mr.set_ticket(Ticket::default()).expect("admitted");
        world.take_log();
        let result = mr.map(&PciDevice::default());
        assert_eq!(result.map(drop).err(), denied.then_some(DENIED));
        // The module does not ask nvidia.ko.
        let mapped: &[_] = if denied { &[] } else { &["map"] };
        assert_eq!(world.take_log(), mapped);
        assert_eq!(world.answers.borrow().as_deref(), Some(answers));
        drop(mr);
        let log = world.take_log();
        assert_eq!(log.contains(&"unmap"), !denied);
        assert!(log.contains(&"unpin"));
    }
    // The application gets the code and the reason of nvidia.ko's own refusal.
    assert_eq!(DENIED.errno(), EOPNOTSUPP);
    assert_eq!(DENIED.name(), c"unreachable");
}

#[test]
fn callback_before_the_pin_returns() {
    let world = World::at(0x12_0000_0000);
    world.provider.on_pin.set(Some(Box::new(World::free)));
    let reason = Held::<RevocableMr>::pin(0x12_0000_0000, MIB).err();
    assert_eq!(reason, Some(Reason::Revoked));
    world.took("pin, callback, callback returns, no unpin");
}

#[test]
fn callback_before_the_ticket() {
    let r = Registration::at(0x13_0000_0000);
    r.world.free();
    assert_eq!(r.set_ticket().err(), Some(Reason::Revoked));
    assert_eq!(r.map().err(), Some(Reason::Revoked));
    let world = r.world.clone();
    drop(r);
    world.took("pin, callback, callback returns, no unpin");
}

#[test]
fn callback_between_ticket_and_map() {
    let r = Registration::at(0x14_0000_0000);
    r.set_ticket().expect("admitted");
    r.world.free();
    assert_eq!(r.map().err(), Some(Reason::Revoked));
    let world = r.world.clone();
    drop(r);
    world.took("pin, callback, ib_core revokes, ib_core revoked, callback returns, no unpin");
}

#[test]
fn callback_stops_the_hca_before_it_unmaps_and_leaves_the_table() {
    let r = Registration::up(0x15_0000_0000);
    r.world.free();
    r.world
        .took("callback, ib_core revokes, ib_core revoked, unmap, callback returns");
    // ib_core calls `unmap` after an invalidation too.
    r.mr.unmap();
    assert!(r.world.take_log().is_empty());
    let world = r.world.clone();
    drop(r);
    assert_eq!(world.take_log(), ["no unpin", "table freed"]);
}

#[test]
fn ib_core_may_unmap_inside_its_revocation() {
    let r = Registration::up(0x16_0000_0000);
    let world = r.world.clone();
    let mr = Arc::new(r.mr);
    let inner = mr.clone();
    world.on_revoke.set(Some(Box::new(move |_| inner.unmap())));
    world.free();
    world.took("callback, ib_core revokes, unmap, ib_core revoked, callback returns");
    drop(mr);
    assert_eq!(world.take_log(), ["no unpin", "table freed"]);
}

#[test]
fn release_on_the_callbacks_own_thread() {
    let r = Registration::up(0x17_0000_0000);
    let world = r.world.clone();
    let mut mr = Some(r.mr);
    world
        .on_revoke
        .set(Some(Box::new(move |_| drop(mr.take()))));
    world.free();
    world.took("callback, ib_core revokes, no unpin, unmap, table freed, ib_core revoked, callback returns");
}

#[test]
fn callback_beside_the_mapping() {
    let r = Registration::at(0x1d_0000_0000);
    r.set_ticket().expect("admitted");
    r.world.on_map.set(Some(Box::new(World::free)));
    assert_eq!(r.map().err(), Some(Reason::Revoked));
    let want = [
        "pin",
        "map",
        "callback",
        "ib_core revokes",
        "ib_core revoked",
        "callback returns",
        "unmap",
    ];
    assert_eq!(r.world.take_log()[..want.len()], want);
}

/// `CallbackPin::read` refuses once the memory is gone.
#[test]
fn callback_between_two_batches_of_a_page_table() {
    let world = World::at(0x1e_0000_0000);
    world.on_batch.set(Some(Box::new(World::free)));
    let reason = Held::<RevocableMr>::pin(0x1e_0000_0000, MIB).err();
    assert_eq!(reason, Some(Reason::Revoked));
    world.took("pin, callback, callback returns, no unpin");
}

#[test]
fn release_waits_for_a_callback_in_ib_core() {
    let r = Registration::up(0x18_0000_0000);
    let world = r.world.clone();
    let (in_core, is_in_core) = mpsc::channel();
    let (let_go, may_go) = mpsc::channel::<()>();
    world.on_revoke.set(Some(Box::new(move |_| {
        in_core.send(()).expect("the test waits");
        may_go.recv().expect("the test lets go");
    })));
    thread::scope(|s| {
        let callback = s.spawn(|| {
            world.add();
            world.free();
        });
        is_in_core.recv().expect("the callback comes to ib_core");
        let (released, is_released) = mpsc::channel();
        let record = world.clone();
        s.spawn(move || {
            record.add();
            drop(r.mr);
            record.record("released");
            released.send(()).expect("the test waits");
        });
        let early = is_released.recv_timeout(Duration::from_millis(200));
        let_go.send(()).expect("the callback waits");
        callback.join().expect("the callback returns");
        // All threads have been released by now, so that none hangs if this assertion fails.
        assert!(
            early.is_err(),
            "release returned with its callback in ib_core"
        );
        is_released.recv().expect("release returns");
    });
    let log = world.take_log();
    let place = |what| log.iter().position(|&w| w == what).expect(what);
    assert!(place("ib_core revoked") < place("released"), "{log:?}");
    assert!(place("unmap") < place("table freed"), "{log:?}");
    assert_eq!(log.iter().filter(|&&w| w == "unmap").count(), 1, "{log:?}");
}

#[test]
fn a_callback_after_release_calls_nobody() {
    let r = Registration::up(0x19_0000_0000);
    r.mr.unmap();
    // Another process releases, so nvidia.ko keeps the pin.
    r.world.become_process(2);
    let world = r.world.clone();
    drop(r);
    assert_eq!(world.take_log(), ["unmap", "orphaned", "table freed"]);
    world.free();
    assert_eq!(world.take_log(), ["callback", "callback returns"]);
}

/// `release` frees the list of addresses of a region that was never mapped. The region itself stays
/// until the callback.
#[test]
fn release_frees_the_addresses_of_a_region_that_was_not_mapped() {
    let r = Registration::at(0x1b_0000_0000);
    assert_eq!(r.world.alive("the list of addresses"), 1);
    r.world.become_process(2);
    let world = r.world.clone();
    drop(r);
    assert_eq!(world.take_log(), ["pin", "orphaned"]);
    assert_eq!(world.alive("the list of addresses"), 0);
    world.free();
}

#[test]
fn what_cannot_be_built_is_undone() {
    for (start, fails, reason, done) in [
        (
            0x1a_0000_0000,
            "table",
            Reason::NoMemory,
            &["pin", "map", "unmap", "unpin"][..],
        ),
        (
            0x1b_0000_0000,
            "map",
            Reason::MapResource { mapped: 0 },
            &["pin", "map", "unpin"],
        ),
    ] {
        let r = Registration::at(start);
        r.set_ticket().expect("admitted");
        r.world.fail(fails);
        assert_eq!(r.map().err(), Some(reason));
        let world = r.world.clone();
        drop(r);
        assert_eq!(world.take_log(), done);
    }
}
