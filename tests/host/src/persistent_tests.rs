// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! The life of a persistent registration.

use crate::fakes::env::PciDevice;
use crate::fakes::provider::DMA_BASE;
use crate::fakes::world::World;
use crate::mr::Mr;
use crate::persistent::PersistentMr;
use crate::ranges::PageSize;
use crate::reason::Reason;

const MIB: u64 = 1 << 20;

#[test]
fn one_pin_one_map_one_unmap_one_unpin() {
    let world = World::at(0x1_0000_0000);
    let region = PersistentMr::pin(0x1_0000_1234, 2 * MIB).expect("pinned");
    assert_eq!(region.page_size(), PageSize::KIB_64);
    assert_eq!(
        (region.span().start(), region.span().len()),
        (0x1_0000_0000, 2 * MIB + 0x10000)
    );
    let table = region.map(&PciDevice::default()).expect("mapped");
    assert_eq!(table.len(), 1);
    assert_eq!(
        (table[0].addr, table[0].len),
        (DMA_BASE, (2 * MIB + 0x10000) as u32)
    );
    assert_eq!(world.take_log(), ["pin", "map"]);
    region.unmap();
    assert_eq!(world.take_log(), ["unmap"]);
    drop(region);
    assert_eq!(world.take_log(), ["unpin", "table freed"]);
}

#[test]
fn release_without_unmap_unmaps_first() {
    let world = World::at(0x2_0000_0000);
    let region = PersistentMr::pin(0x2_0000_0000, MIB).expect("pinned");
    region.map(&PciDevice::default()).expect("mapped");
    drop(region);
    assert_eq!(
        world.take_log(),
        ["pin", "map", "unmap", "unpin", "table freed"]
    );
}

#[test]
fn the_table_outlives_unmap() {
    let world = World::at(0x3_0000_0000);
    let region = PersistentMr::pin(0x3_0000_0000, MIB).expect("pinned");
    region.map(&PciDevice::default()).expect("mapped");
    region.unmap();
    region.unmap();
    assert_eq!(world.take_log(), ["pin", "map", "unmap"]);
    assert_eq!(
        region.map(&PciDevice::default()).err(),
        Some(Reason::MappedTwice)
    );
    drop(region);
    assert_eq!(world.take_log(), ["unpin", "table freed"]);
}

#[test]
fn a_refused_pin_leaves_nothing() {
    let world = World::at(0x4_0000_0000);
    world.provider.refuses.set(Some(crate::reason::ENOMEM));
    let reason = PersistentMr::pin(0x4_0000_0000, MIB).err();
    assert_eq!(reason, Some(Reason::Pin(crate::reason::ENOMEM)));
    assert_eq!(world.take_log(), ["pin"]);
}

#[test]
fn a_failed_map_leaves_the_pin_alone() {
    let world = World::at(0x5_0000_0000);
    let region = PersistentMr::pin(0x5_0000_0000, MIB).expect("pinned");
    world.fail("map");
    assert_eq!(
        region.map(&PciDevice::default()).err(),
        Some(Reason::Map(-5))
    );
    region.unmap();
    drop(region);
    assert_eq!(world.take_log(), ["pin", "map", "unpin"]);
}

#[test]
fn a_table_that_cannot_be_built_undoes_the_mapping() {
    let world = World::at(0x6_0000_0000);
    let region = PersistentMr::pin(0x6_0000_0000, MIB).expect("pinned");
    world.fail("table");
    assert_eq!(
        region.map(&PciDevice::default()).err(),
        Some(Reason::NoMemory)
    );
    assert_eq!(world.take_log(), ["pin", "map", "unmap"]);
    drop(region);
    assert_eq!(world.take_log(), ["unpin"]);
}

#[test]
fn absurd_ranges_never_reach_the_provider() {
    let world = World::at(0x7_0000_0000);
    for (addr, len) in [
        (0x7_0000_0000, 0),
        (0x7_0000_0000, (1 << 40) + 1),
        (0x7_0000_0000, 16 << 40),
        (0x7_0000_0000, u64::MAX),
        (u64::MAX, 1),
    ] {
        let reason = PersistentMr::pin(addr, len).err();
        assert!(
            matches!(
                reason,
                Some(Reason::Empty | Reason::Wraps | Reason::TooLong)
            ),
            "{addr:#x}+{len:#x}: {reason:?}"
        );
    }
    assert!(world.take_log().is_empty());
}
