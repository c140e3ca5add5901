// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Tests of the registry: the time during which it shows a registration, and the counters.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;

use crate::device::{Gpus, PciAddress};
use crate::fakes::env::{max_chunks, Entry, Held, PciDevice, Ticket, HCA};
use crate::fakes::world::{in_registry, world, Registry, World};
use crate::history::{PinMode, Task};
use crate::mr::Mr;
use crate::persistent::PersistentMr;
use crate::ranges::{PageSize, Span};
use crate::reason::{Reason, ENOMEM};
use crate::registry::{Counts, Line, Registration, RegistrationInfo, State, Transition};
use crate::revocable::RevocableMr;

const MIB: u64 = 1 << 20;

fn at(number: u32) -> Option<PciAddress> {
    // The index is the number that the module assigns to a GPU. The numbers are not in the order of
    // the addresses.
    [0x1_4100, 0x0_8110, 0x0_8108]
        .get(number as usize)
        .map(|at| PciAddress(*at))
}

fn line(registration: &Registration) -> String {
    Line {
        registration,
        gpu: at,
    }
    .to_string()
}

fn registry() -> Arc<Registry> {
    world().registry.clone()
}

/// Returns number and state of all registrations in this test's registry.
fn standing() -> Vec<(u64, State)> {
    let all = registry().all();
    all.iter().map(|l| (l.number, l.state)).collect()
}

/// Returns the transitions traced since the last call.
fn transitions() -> Vec<Transition> {
    let events = registry().take_events();
    events.iter().map(|(transition, _)| *transition).collect()
}

fn counts(mode: PinMode) -> Counts {
    registry().with(|locked| locked.stats.counts())[mode as usize]
}

/// Returns counters with these values.
fn lives([registered, mapped, revoked, released, active, active_bytes]: [u64; 6]) -> Counts {
    Counts {
        registered,
        mapped,
        revoked,
        released,
        active,
        active_bytes,
    }
}

fn registration_info(start: u64, len: u64) -> RegistrationInfo {
    RegistrationInfo {
        mode: PinMode::Persistent,
        span: Span::covering(start, len, PageSize::KIB_64, 1 << 40).expect("a span"),
        page: PageSize::KIB_64,
        chunks: 1,
        gpus: Gpus::one(0),
        task: Task {
            tgid: 1,
            pid: 1,
            comm: [0; 16],
        },
        since: 0,
    }
}

#[test]
fn a_line_has_the_documented_fields() {
    let mut registration = Registration {
        number: 7,
        state: State::Mapped,
        info: registration_info(0x7f00_0000_0000, 2 * MIB),
        entries: 3,
        hca: Some(HCA),
    };
    registration.info.mode = PinMode::Revocable;
    registration.info.page = PageSize::KIB_128;
    registration.info.chunks = 2;
    registration.info.gpus = Gpus::all((0..3).map(Gpus::one));
    registration.info.task = Task {
        tgid: 154,
        pid: 155,
        comm: *b"a b=\"c\\\0\0\0\0\0\0\0\0\0",
    };
    registration.info.since = 6_119_592;
    assert_eq!(
        line(&registration),
        "id=7 state=mapped mode=revocable addr=0x7f0000000000 len=2097152 page=131072 chunks=2 \
         entries=3 gpus=0000:81:01.0,0000:81:02.0,0001:41:00.0 hca=0000:03:05.1 tgid=154 pid=155 \
         since=6.119592 comm=a\\x20b\\x3d\\x22c\\x5c"
    );
    // The first two sets are empty. In the third set, no device has the GPU's number.
    for gpus in [Gpus::default(), Gpus::one(Gpus::MOST), Gpus::one(63)] {
        registration.info.gpus = gpus;
        registration.hca = None;
        let text = line(&registration);
        assert!(text.contains(" gpus=- hca=- "), "{text}");
    }
}

#[test]
fn domains_have_as_many_digits_as_they_need() {
    for (at, want) in [
        (0, "0000:00:00.0"),
        (0xffff << 16 | 0xffff, "ffff:ff:1f.7"),
        (0x1_0000 << 16 | 0xe100, "10000:e1:00.0"),
    ] {
        assert_eq!(PciAddress(at).to_string(), want);
    }
}

#[test]
fn a_persistent_life() {
    World::at(0x40_0000_0000);
    let start = 0x40_0000_1000;
    let region = Held::<PersistentMr>::pin(start, 2 * MIB).expect("pinned");
    let len = 2 * MIB + 0x1_0000;
    assert_eq!(standing(), [(1, State::Pinned)]);
    assert_eq!(
        line(&registry().all()[0]),
        format!(
            "id=1 state=pinned mode=persistent addr=0x4000000000 len={len} page=65536 chunks=1 \
             entries=0 gpus=0001:41:00.0 hca=- tgid=154 pid=155 since=6.119592 comm=a\\x20test\\x3d"
        )
    );
    region.map(&PciDevice::default()).expect("mapped");
    let mapped = registry().all()[0];
    assert_eq!(
        (mapped.state, mapped.entries, mapped.hca),
        (State::Mapped, 1, Some(HCA))
    );
    region.unmap();
    let unmapped = registry().all()[0];
    assert_eq!(
        (unmapped.state, unmapped.entries, unmapped.hca),
        (State::Pinned, 0, None)
    );
    let active = lives([1, 1, 0, 0, 1, len]);
    assert_eq!(counts(PinMode::Persistent), active);
    drop(region);
    assert_eq!(standing(), []);
    let over = lives([1, 1, 0, 1, 0, 0]);
    assert_eq!(counts(PinMode::Persistent), over);
    assert_eq!(counts(PinMode::Revocable), Counts::default());
    let events = registry().take_events();
    assert!(
        matches!(
            events[..],
            [
                (Transition::Registered, Some(Registration { number: 1, .. })),
                (
                    Transition::Mapped,
                    Some(Registration {
                        number: 1,
                        entries: 1,
                        ..
                    })
                ),
                (Transition::Released(1, State::Pinned), None),
            ]
        ),
        "{events:?}"
    );
}

#[test]
fn a_persistent_registration_is_shown_until_it_is_unpinned() {
    let world = World::at(0x41_0000_0000);
    let region = Held::<PersistentMr>::pin(0x41_0000_0000, MIB).expect("pinned");
    let shown = Arc::new(AtomicBool::new(false));
    let seen = shown.clone();
    world.on_unpin.set(Some(Box::new(move |_| {
        seen.store(standing() == [(1, State::Pinned)], Ordering::SeqCst);
    })));
    drop(region);
    assert!(shown.load(Ordering::SeqCst), "gone before it was unpinned");
    assert_eq!(standing(), []);
}

#[test]
fn a_refused_registration_is_never_shown() {
    let world = World::at(0x42_0000_0000);
    world.provider.refuses.set(Some(ENOMEM));
    assert!(Held::<PersistentMr>::pin(0x42_0000_0000, MIB).is_err());
    assert!(Held::<RevocableMr>::pin(0x42_0000_0000, MIB).is_err());
    assert_eq!(standing(), []);
    assert_eq!(counts(PinMode::Persistent), Counts::default());
    assert_eq!(counts(PinMode::Revocable), Counts::default());
    assert_eq!(registry().take_events(), []);
}

#[test]
fn a_map_that_fails_leaves_it_pinned() {
    let world = World::at(0x43_0000_0000);
    let region = Held::<PersistentMr>::pin(0x43_0000_0000, MIB).expect("pinned");
    let mr = Held::<RevocableMr>::pin(0x43_0000_0000, MIB).expect("pinned");
    for step in ["table", "map"] {
        world.fail(step);
        assert!(region.map(&PciDevice::default()).is_err());
        assert!(mr.map(&PciDevice::default()).is_err());
        assert_eq!(standing(), [(1, State::Pinned), (2, State::Pinned)]);
    }
    assert_eq!(counts(PinMode::Persistent).mapped, 0);
    assert_eq!(counts(PinMode::Revocable).mapped, 0);
}

#[test]
fn over_several_allocations_on_two_gpus() {
    World::of_parts(0x44_0000_0000, 4, 2 * MIB);
    let region = Held::<PersistentMr>::pin(0x44_0000_0000, 8 * MIB).expect("pinned");
    let mr = Held::<RevocableMr>::pin(0x44_0000_0000, 8 * MIB).expect("pinned");
    assert_eq!(max_chunks(), 1024);
    for registration in registry().all() {
        let text = line(&registration);
        assert_eq!(registration.info.chunks, 4, "{text}");
        // Two allocations share a GPU in this world.
        assert!(text.contains(" gpus=0000:81:02.0,0001:41:00.0 "), "{text}");
    }
    drop((region, mr));
    assert_eq!(standing(), []);
}

fn up(start: u64) -> (Arc<World>, Held<RevocableMr>) {
    let world = World::at(start);
    let mr = Held::<RevocableMr>::pin(start, MIB).expect("pinned");
    mr.set_ticket(Ticket::default()).expect("admitted");
    mr.map(&PciDevice::default()).expect("mapped");
    (world, mr)
}

#[test]
fn revoked_until_it_is_released() {
    let (world, mr) = up(0x45_0000_0000);
    assert_eq!(standing(), [(1, State::Mapped)]);
    world.free();
    let all = registry().all();
    assert_eq!(standing(), [(1, State::Revoked)]);
    // A revoked registration keeps the fields that it had at the revocation.
    assert_eq!((all[0].entries, all[0].hca), (1, Some(HCA)));
    // ib_core calls `unmap` after an invalidation too.
    mr.unmap();
    assert_eq!(standing(), [(1, State::Revoked)]);
    drop(mr);
    assert_eq!(standing(), []);
    let over = lives([1, 1, 1, 1, 0, 0]);
    assert_eq!(counts(PinMode::Revocable), over);
    assert_eq!(
        transitions()[2..],
        [Transition::Revoked, Transition::Released(1, State::Revoked)]
    );
}

#[test]
fn the_loss_of_a_second_allocation_is_not_counted() {
    let world = World::of_parts(0x46_0000_0000, 2, 2 * MIB);
    let mr = Held::<RevocableMr>::pin(0x46_0000_0000, 4 * MIB).expect("pinned");
    world
        .provider
        .free_part(0x46_0000_0000, 0x46_0000_0000 + 2 * MIB);
    world.free();
    assert_eq!(standing(), [(1, State::Revoked)]);
    assert_eq!(counts(PinMode::Revocable).revoked, 1);
    drop(mr);
    assert_eq!(standing(), []);
}

#[test]
fn memory_that_is_lost_during_its_pin_is_never_shown() {
    let world = World::at(0x47_0000_0000);
    world.provider.on_pin.set(Some(Box::new(World::free)));
    let reason = Held::<RevocableMr>::pin(0x47_0000_0000, MIB).err();
    assert_eq!(reason, Some(Reason::Revoked));
    assert_eq!(standing(), []);
    assert_eq!(counts(PinMode::Revocable), Counts::default());
}

/// nvidia.ko puts a pin only for the process that made the pin.
#[test]
fn orphaned_until_the_free_if_another_process_releases() {
    let (world, mr) = up(0x48_0000_0000);
    mr.unmap();
    world.become_process(2);
    drop(mr);
    let all = registry().all();
    assert_eq!(standing(), [(1, State::Orphaned)]);
    assert_eq!((all[0].entries, all[0].hca), (0, None));
    let orphaned = lives([1, 1, 0, 1, 1, MIB]);
    assert_eq!(counts(PinMode::Revocable), orphaned);
    world.free();
    assert_eq!(standing(), []);
    // The free of a released registration's memory does not count as a revocation.
    let over = lives([1, 1, 0, 1, 0, 0]);
    assert_eq!(counts(PinMode::Revocable), over);
    assert_eq!(
        transitions()[2..],
        [Transition::Released(1, State::Orphaned)]
    );
}

/// In OFED 4.9, the first callback releases the registration. The other allocations stay pinned
/// until their own callbacks.
#[test]
fn orphaned_until_the_last_free_if_the_first_callback_releases() {
    let start = 0x49_0000_0000;
    let world = World::of_parts(start, 3, 2 * MIB);
    let mr = Held::<RevocableMr>::pin(start, 6 * MIB).expect("pinned");
    mr.set_ticket(Ticket::default()).expect("admitted");
    let mut mr = Some(mr);
    world
        .on_revoke
        .set(Some(Box::new(move |_| drop(mr.take()))));
    for part in 0..2 {
        world
            .provider
            .free_part(start, start + (part + 1) * 2 * MIB);
        assert_eq!(standing(), [(1, State::Orphaned)], "after part {part}");
        assert_eq!(counts(PinMode::Revocable).active_bytes, 6 * MIB);
    }
    world.free();
    assert_eq!(standing(), []);
    let counts = counts(PinMode::Revocable);
    assert_eq!((counts.revoked, counts.released, counts.active), (1, 1, 0));
}

#[test]
fn no_number_comes_twice() {
    let world = World::at(0x4a_0000_0000);
    let mut seen = Vec::new();
    for round in 0..50_u64 {
        let region = Held::<PersistentMr>::pin(0x4a_0000_0000, MIB).expect("pinned");
        let mr = Held::<RevocableMr>::pin(0x4a_0000_0000, MIB).expect("pinned");
        seen.extend(standing().iter().map(|(number, _)| *number));
        if round % 3 == 0 {
            world.free();
        }
        drop((mr, region));
        assert_eq!(standing(), []);
    }
    assert!(seen.is_sorted_by(|a, b| a < b), "{seen:?}");
    assert_eq!((seen.first(), seen.last()), (Some(&1), Some(&100)));
    assert_eq!(registry().with(|locked| locked.stats.last()), 100);
}

#[test]
fn a_registration_that_ends_twice_is_counted_once() {
    let entry = Entry::default();
    entry.add(registration_info(0, MIB));
    entry.released(true);
    entry.update(crate::registry::Registry::remove);
    entry.update(crate::registry::Registry::remove);
    entry.released(false);
    drop(entry);
    let counts = counts(PinMode::Persistent);
    assert_eq!(
        (counts.released, counts.active, counts.active_bytes),
        (1, 0, 0)
    );
    assert!(!in_registry());
}
