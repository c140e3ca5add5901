// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Which registrations are shown as alive, from which moment to which, and what is counted of them.

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::thread;

use crate::device::Gpus;
use crate::device::PciAddress;
use crate::extents::PageSize;
use crate::extents::Span;
use crate::fakes::env::max_pieces;
use crate::fakes::env::PciDevice;
use crate::fakes::env::Stand;
use crate::fakes::env::Ticket;
use crate::fakes::env::HCA;
use crate::fakes::provider::Allocation;
use crate::fakes::world::in_roll;
use crate::fakes::world::world;
use crate::fakes::world::Roll;
use crate::fakes::world::World;
use crate::mode::Mode;
use crate::record::Flavour;
use crate::record::Task;
use crate::refusal::Refusal;
use crate::refusal::ENOMEM;
use crate::region::Region;
use crate::registry::Book;
use crate::registry::Counts;
use crate::registry::Event;
use crate::registry::Line;
use crate::registry::Living;
use crate::registry::Newcomer;
use crate::registry::State;
use crate::revocable::Lease;

const MIB: u64 = 1 << 20;

fn at(number: u32) -> Option<PciAddress> {
    // Numbers as the module gives them, in another order than the addresses.
    [0x1_4100, 0x0_8110, 0x0_8108]
        .get(number as usize)
        .map(|at| PciAddress(*at))
}

fn line(living: &Living) -> String {
    Line { living, gpu: at }.to_string()
}

fn roll() -> Arc<Roll> {
    world().roll.clone()
}

/// Of all that stand on this test's roll: number and state.
fn standing() -> Vec<(u64, State)> {
    let all = roll().all();
    all.iter().map(|l| (l.number, l.state)).collect()
}

fn counts(flavour: Flavour) -> Counts {
    roll().book(|book| book.counts())[flavour as usize]
}

fn newcomer(start: u64, len: u64) -> Newcomer {
    Newcomer {
        flavour: Flavour::Persistent,
        span: Span::covering(start, len, PageSize::KIB_64, 1 << 40).expect("a span"),
        page: PageSize::KIB_64,
        pieces: 1,
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
fn a_line_has_what_is_promised() {
    let mut living = Living {
        number: 7,
        state: State::Mapped,
        new: newcomer(0x7f00_0000_0000, 2 * MIB),
        entries: 3,
        hca: Some(HCA),
    };
    living.new.flavour = Flavour::Revocable;
    living.new.page = PageSize::KIB_128;
    living.new.pieces = 2;
    living.new.gpus = Gpus::all((0..3).map(Gpus::one));
    living.new.task = Task {
        tgid: 154,
        pid: 155,
        comm: *b"a b=\"c\\\0\0\0\0\0\0\0\0\0",
    };
    living.new.since = 6_119_592;
    assert_eq!(
        line(&living),
        "id=7 state=mapped flavour=revocable addr=0x7f0000000000 len=2097152 page=131072 pieces=2 \
         entries=3 gpus=0000:81:01.0,0000:81:02.0,0001:41:00.0 hca=0000:03:05.1 tgid=154 pid=155 \
         since=6.119592 comm=a\\x20b\\x3d\\x22c\\x5c"
    );
    // A GPU that has no number, and one that nobody knows.
    for gpus in [Gpus::default(), Gpus::one(Gpus::MOST), Gpus::one(63)] {
        living.new.gpus = gpus;
        living.hca = None;
        let text = line(&living);
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
    let region = Region::pin(start, 2 * MIB).expect("pinned");
    let len = 2 * MIB + 0x1_0000;
    assert_eq!(standing(), [(1, State::Pinned)]);
    assert_eq!(
        line(&roll().all()[0]),
        format!(
            "id=1 state=pinned flavour=persistent addr=0x4000000000 len={len} page=65536 pieces=1 \
             entries=0 gpus=0001:41:00.0 hca=- tgid=154 pid=155 since=6.119592 comm=a\\x20test\\x3d"
        )
    );
    region.map(&PciDevice::default()).expect("mapped");
    let mapped = roll().all()[0];
    assert_eq!(
        (mapped.state, mapped.entries, mapped.hca),
        (State::Mapped, 1, Some(HCA))
    );
    region.unmap();
    let unmapped = roll().all()[0];
    assert_eq!(
        (unmapped.state, unmapped.entries, unmapped.hca),
        (State::Pinned, 0, None)
    );
    let alive = Counts {
        registered: 1,
        mapped: 1,
        alive: 1,
        alive_bytes: len,
        ..Counts::default()
    };
    assert_eq!(counts(Flavour::Persistent), alive);
    drop(region);
    assert_eq!(standing(), []);
    let over = Counts {
        registered: 1,
        mapped: 1,
        released: 1,
        ..Counts::default()
    };
    assert_eq!(counts(Flavour::Persistent), over);
    assert_eq!(counts(Flavour::Revocable), Counts::default());
    let events = roll().take_events();
    assert!(
        matches!(
            events[..],
            [
                Event::Registered(Living { number: 1, .. }),
                Event::Mapped(Living {
                    number: 1,
                    entries: 1,
                    ..
                }),
                Event::Released(1, State::Pinned),
            ]
        ),
        "{events:?}"
    );
}

#[test]
fn a_persistent_one_is_shown_until_it_is_unpinned() {
    let world = World::at(0x41_0000_0000);
    let region = Region::pin(0x41_0000_0000, MIB).expect("pinned");
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
fn a_refused_one_never_stands_there() {
    let world = World::at(0x42_0000_0000);
    world.provider.refuses.set(Some(ENOMEM));
    assert!(Region::pin(0x42_0000_0000, MIB).is_err());
    assert!(Lease::pin(0x42_0000_0000, MIB).is_err());
    assert_eq!(standing(), []);
    assert_eq!(counts(Flavour::Persistent), Counts::default());
    assert_eq!(counts(Flavour::Revocable), Counts::default());
    assert_eq!(roll().take_events(), []);
}

#[test]
fn a_map_that_fails_leaves_it_pinned() {
    let world = World::at(0x43_0000_0000);
    let region = Region::pin(0x43_0000_0000, MIB).expect("pinned");
    let lease = Lease::pin(0x43_0000_0000, MIB).expect("pinned");
    for step in ["table", "map"] {
        world.fail(step);
        assert!(region.map(&PciDevice::default()).is_err());
        assert!(lease.map(&PciDevice::default()).is_err());
        assert_eq!(standing(), [(1, State::Pinned), (2, State::Pinned)]);
    }
    assert_eq!(counts(Flavour::Persistent).mapped, 0);
    assert_eq!(counts(Flavour::Revocable).mapped, 0);
}

#[test]
fn over_several_allocations_on_two_gpus() {
    let world = World::at(0x44_0000_0000);
    world.provider.layout.replace(
        (0..4)
            .map(|i| Allocation::new(0x44_0000_0000 + i * 2 * MIB, 2 * MIB))
            .collect(),
    );
    let region = Region::pin(0x44_0000_0000, 8 * MIB).expect("pinned");
    let lease = Lease::pin(0x44_0000_0000, 8 * MIB).expect("pinned");
    assert_eq!(max_pieces(), 1024);
    for living in roll().all() {
        let text = line(&living);
        assert_eq!(living.new.pieces, 4, "{text}");
        // Two allocations share a GPU here.
        assert!(text.contains(" gpus=0000:81:02.0,0001:41:00.0 "), "{text}");
    }
    drop((region, lease));
    assert_eq!(standing(), []);
}

fn up(start: u64) -> (Arc<World>, Lease) {
    let world = World::at(start);
    let lease = Lease::pin(start, MIB).expect("pinned");
    lease.admit(Ticket::default()).expect("admitted");
    lease.map(&PciDevice::default()).expect("mapped");
    (world, lease)
}

#[test]
fn revoked_until_it_is_released() {
    let (world, lease) = up(0x45_0000_0000);
    assert_eq!(standing(), [(1, State::Mapped)]);
    world.free();
    let all = roll().all();
    assert_eq!(standing(), [(1, State::Revoked)]);
    // As it was when it was lost.
    assert_eq!((all[0].entries, all[0].hca), (1, Some(HCA)));
    // ib_core calls this after an invalidation too.
    lease.unmap();
    assert_eq!(standing(), [(1, State::Revoked)]);
    drop(lease);
    assert_eq!(standing(), []);
    let over = Counts {
        registered: 1,
        mapped: 1,
        revoked: 1,
        released: 1,
        ..Counts::default()
    };
    assert_eq!(counts(Flavour::Revocable), over);
    let events = roll().take_events();
    assert_eq!(
        events[2..],
        [Event::Revoked(1), Event::Released(1, State::Revoked)]
    );
}

#[test]
fn the_loss_of_a_second_part_is_none() {
    let world = World::at(0x46_0000_0000);
    world.provider.layout.replace(
        (0..2)
            .map(|i| Allocation::new(0x46_0000_0000 + i * 2 * MIB, 2 * MIB))
            .collect(),
    );
    let lease = Lease::pin(0x46_0000_0000, 4 * MIB).expect("pinned");
    world
        .provider
        .free_part(0x46_0000_0000, 0x46_0000_0000 + 2 * MIB);
    world.free();
    assert_eq!(standing(), [(1, State::Revoked)]);
    assert_eq!(counts(Flavour::Revocable).revoked, 1);
    drop(lease);
    assert_eq!(standing(), []);
}

#[test]
fn what_is_lost_before_it_is_there_never_stands_there() {
    let world = World::at(0x47_0000_0000);
    world.provider.on_pin.set(Some(Box::new(World::free)));
    let refusal = Lease::pin(0x47_0000_0000, MIB).err();
    assert_eq!(refusal, Some(Refusal::Revoked));
    assert_eq!(standing(), []);
    assert_eq!(counts(Flavour::Revocable), Counts::default());
}

/// The provider takes a pin from its owner alone.
#[test]
fn kept_until_it_is_freed_where_a_stranger_releases() {
    let (world, lease) = up(0x48_0000_0000);
    lease.unmap();
    world.become_process(2);
    drop(lease);
    let all = roll().all();
    assert_eq!(standing(), [(1, State::Kept)]);
    assert_eq!((all[0].entries, all[0].hca), (0, None));
    let kept = Counts {
        registered: 1,
        mapped: 1,
        released: 1,
        alive: 1,
        alive_bytes: MIB,
        ..Counts::default()
    };
    assert_eq!(counts(Flavour::Revocable), kept);
    world.free();
    assert_eq!(standing(), []);
    // Nothing was lost: it had been released.
    let over = Counts {
        alive: 0,
        alive_bytes: 0,
        ..kept
    };
    assert_eq!(counts(Flavour::Revocable), over);
    assert_eq!(roll().take_events()[2..], [Event::Released(1, State::Kept)]);
}

/// OFED 4.9: the parts that live are left to their own callbacks.
#[test]
fn kept_until_the_last_part_is_freed_where_the_first_ones_callback_releases() {
    let start = 0x49_0000_0000;
    let world = World::at(start);
    world.provider.layout.replace(
        (0..3)
            .map(|i| Allocation::new(start + i * 2 * MIB, 2 * MIB))
            .collect(),
    );
    let lease = Lease::pin(start, 6 * MIB).expect("pinned");
    lease.admit(Ticket::default()).expect("admitted");
    let mut lease = Some(lease);
    world
        .on_revoke
        .set(Some(Box::new(move |_| drop(lease.take()))));
    for part in 0..2 {
        world
            .provider
            .free_part(start, start + (part + 1) * 2 * MIB);
        assert_eq!(standing(), [(1, State::Kept)], "after part {part}");
        assert_eq!(counts(Flavour::Revocable).alive_bytes, 6 * MIB);
    }
    world.free();
    assert_eq!(standing(), []);
    let counts = counts(Flavour::Revocable);
    assert_eq!((counts.revoked, counts.released, counts.alive), (1, 1, 0));
}

#[test]
fn no_number_comes_twice() {
    let world = World::at(0x4a_0000_0000);
    let mut seen = Vec::new();
    for round in 0..50_u64 {
        let region = Region::pin(0x4a_0000_0000, MIB).expect("pinned");
        let lease = Lease::pin(0x4a_0000_0000, MIB).expect("pinned");
        seen.extend(standing().iter().map(|(number, _)| *number));
        if round % 3 == 0 {
            world.free();
        }
        drop((lease, region));
        assert_eq!(standing(), []);
    }
    assert!(seen.is_sorted_by(|a, b| a < b), "{seen:?}");
    assert_eq!((seen.first(), seen.last()), (Some(&1), Some(&100)));
    assert_eq!(roll().book(|book| book.last()), 100);
}

/// Some go and come between two looks of a reader, who meets every one that stays.
#[test]
fn a_reader_goes_on_behind_what_it_has_seen() {
    let stay = |i: u64| i % 3 == 0;
    let mut stands: Vec<Option<Stand>> = (0..99).map(|_| Some(Stand::default())).collect();
    for (i, stand) in stands.iter().flatten().enumerate() {
        stand.enter(newcomer(i as u64 * MIB, MIB));
    }
    let mut next = 0;
    let mut met = Vec::new();
    while let Some(living) = roll().from(next) {
        assert!(living.number >= next);
        next = living.number + 1;
        met.push(living.number);
        // The one behind it goes, and another comes at the end.
        let behind = living.number as usize;
        if let Some(stand) = stands.get_mut(behind).filter(|_| !stay(behind as u64)) {
            if let Some(stand) = stand.take() {
                stand.released(false);
                let new = Stand::default();
                new.enter(newcomer(0, MIB));
                new.released(false);
            }
        }
    }
    assert!(met.is_sorted_by(|a, b| a < b), "{met:?}");
    for number in (0..99).filter(|i| stay(*i)).map(|i| i + 1) {
        assert!(met.contains(&number), "{number} was not met: {met:?}");
    }
}

#[test]
fn a_reader_beside_adds_and_removes() {
    const ROUNDS: u64 = 500;
    let roll = roll();
    let stays: Vec<Stand> = (0..5).map(|_| Stand::default()).collect();
    for stand in &stays {
        stand.enter(newcomer(0, MIB));
    }
    let done = AtomicBool::new(false);
    let looks = thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut looks = 0;
            // Once at least after the end.
            loop {
                let last = done.load(Ordering::SeqCst);
                let all = roll.all();
                assert!(all.is_sorted_by(|a, b| a.number < b.number));
                let stayed = all.iter().filter(|l| l.number <= 5).count();
                assert_eq!(stayed, 5, "one that stays was not met");
                for living in &all {
                    assert!(line(living).starts_with(&format!("id={} ", living.number)));
                }
                looks += 1;
                if last {
                    return looks;
                }
            }
        });
        for _ in 0..ROUNDS {
            let stand = Stand::default();
            stand.enter(newcomer(MIB, MIB));
            stand.released(false);
        }
        done.store(true, Ordering::SeqCst);
        reader.join().expect("the reader agrees")
    });
    println!("{looks} looks beside {ROUNDS} lives");
    assert_eq!(roll.book(|book| book.last()), 5 + ROUNDS);
    assert_eq!(counts(Flavour::Persistent).alive, 5);
    drop(stays);
    assert_eq!(counts(Flavour::Persistent).alive, 0);
}

/// Both flavours at random, freed, released, and released by strangers: what stands there is what lives.
#[test]
fn free_beside_release_at_random() {
    for round in 0..1000_u64 {
        let (world, lease) = up(0x80_0000_0000 + round * 0x100_0000);
        let stranger = round % 2 == 0;
        thread::scope(|s| {
            s.spawn(|| {
                world.enter();
                world.free();
            });
            let world = world.clone();
            s.spawn(move || {
                world.enter();
                world.become_process(if stranger { 2 } else { 1 });
                drop(lease);
            });
        });
        // Freed and released, in whichever order.
        assert_eq!(standing(), [], "round {round}");
    }
    let counts = counts(Flavour::Revocable);
    assert_eq!(
        (counts.registered, counts.released, counts.alive),
        (1000, 1000, 0)
    );
    assert_eq!(counts.alive_bytes, 0);
    assert!(counts.revoked <= 1000);
    println!("{} of 1000 were lost before their release", counts.revoked);
}

#[test]
fn who_leaves_twice_is_counted_once() {
    let stand = Stand::default();
    stand.enter(newcomer(0, MIB));
    stand.released(true);
    stand.update(Book::gone);
    stand.update(Book::gone);
    stand.released(false);
    drop(stand);
    let counts = counts(Flavour::Persistent);
    assert_eq!(
        (counts.released, counts.alive, counts.alive_bytes),
        (1, 0, 0)
    );
    assert!(!in_roll());
}
