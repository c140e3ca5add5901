// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Tests of a persistent registration, from start to end.

use std::sync::Arc;

use crate::device::{Gpus, Reach};
use crate::fakes::env::{Held, PciDevice, IOMMU_OFFSET};
use crate::fakes::provider::{Allocation, DMA_BASE};
use crate::fakes::world::World;
use crate::mr::Mr;
use crate::persistent::PersistentMr;
use crate::persistent_mapping::DENIED;
use crate::ranges::{PageSize, Span};
use crate::reason::{Reason, EINVAL, ENOMEM, ENOTSUPP};

const MIB: u64 = 1 << 20;

#[test]
fn one_pin_one_map_one_unmap_one_unpin() {
    let world = World::at(0x1_0000_0000);
    let region = Held::<PersistentMr>::pin(0x1_0000_1234, 2 * MIB).expect("pinned");
    assert_eq!(region.fixed().page_size(), PageSize::KIB_64);
    assert_eq!(
        (region.fixed().span.start(), region.fixed().span.len()),
        (0x1_0000_0000, 2 * MIB + 0x10000)
    );
    let table = region.map(&PciDevice::default()).expect("mapped");
    assert_eq!(table.len(), 1);
    assert_eq!(
        (table[0].addr, table[0].len),
        (DMA_BASE + IOMMU_OFFSET, 2 * MIB + 0x10000)
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
    let region = Held::<PersistentMr>::pin(0x2_0000_0000, MIB).expect("pinned");
    region.map(&PciDevice::default()).expect("mapped");
    drop(region);
    world.took("pin, map, unmap, unpin, table freed");
}

#[test]
fn the_table_outlives_unmap() {
    let world = World::at(0x3_0000_0000);
    let region = Held::<PersistentMr>::pin(0x3_0000_0000, MIB).expect("pinned");
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
    world.provider.refuses.set(Some(ENOMEM));
    let reason = Held::<PersistentMr>::pin(0x4_0000_0000, MIB).err();
    assert_eq!(reason, Some(Reason::Pin(ENOMEM)));
    assert_eq!(world.take_log(), ["pin"]);
}

#[test]
fn a_failed_map_leaves_the_pin_alone() {
    let world = World::at(0x5_0000_0000);
    let region = Held::<PersistentMr>::pin(0x5_0000_0000, MIB).expect("pinned");
    world.fail("map");
    world.fail("provider maps");
    assert_eq!(
        region.map(&PciDevice::default()).err(),
        Some(Reason::Map(-5))
    );
    region.unmap();
    drop(region);
    assert_eq!(world.take_log(), ["pin", "map", "provider maps", "unpin"]);
}

#[test]
fn what_this_module_cannot_map_nvidia_ko_maps() {
    let world = World::at(0x5_0000_0000);
    let region = Held::<PersistentMr>::pin(0x5_0000_0000, MIB).expect("pinned");
    world.fail("map");
    region.map(&PciDevice::default()).expect("mapped");
    assert_eq!(world.take_log(), ["pin", "map", "provider maps"]);
    drop(region);
    world.took("provider unmaps, unpin, table freed");
}

#[test]
fn for_a_killed_process_the_provider_does_not_map_instead() {
    let world = World::at(0x5_0000_0000);
    let region = Held::<PersistentMr>::pin(0x5_0000_0000, MIB).expect("pinned");
    world.fail("map");
    world.killed_after.set(Some(0));
    assert_eq!(
        region.map(&PciDevice::default()).err(),
        Some(Reason::Killed)
    );
    assert_eq!(world.take_log(), ["pin", "map"]);
}

/// Here, a region of more than 4 GiB has more than 4 GiB of contiguous DMA addresses. The module
/// logs this case if the distance between DMA addresses and virtual addresses is a multiple of 4
/// GiB.
#[test]
fn a_list_that_may_get_an_hca_page_above_two_gib_is_logged() {
    const GIB: u64 = 1 << 30;
    let start = 0x10_0000_0000;
    for (from, len, is_logged) in [
        (0, 4 * GIB, false),
        (0, 4 * GIB + PAGE, true),
        (0, 6 * GIB, true),
        (3 * GIB, 5 * GIB, true),
    ] {
        for offset in [0, 4 * GIB, GIB, PAGE] {
            // The DMA addresses start at `DMA_BASE + IOMMU_OFFSET`, a multiple of 4 GiB.
            let world = World::at(start - offset);
            let region = Held::<PersistentMr>::pin(start + from, len).expect("pinned");
            region.map(&PciDevice::default()).expect("mapped");
            let log = world.take_log();
            let logged = log.iter().filter(|line| **line == "large HCA page").count();
            let want = is_logged && offset % (4 * GIB) == 0;
            assert_eq!(
                logged,
                usize::from(want),
                "{len:#x} bytes, {offset:#x} apart"
            );
            drop(region);
        }
    }
}

#[test]
fn a_table_that_cannot_be_built_undoes_the_mapping() {
    let world = World::at(0x6_0000_0000);
    let region = Held::<PersistentMr>::pin(0x6_0000_0000, MIB).expect("pinned");
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
        let reason = Held::<PersistentMr>::pin(addr, len).err();
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

const PAGE: u64 = 1 << 16;

/// Steps in which the module asks nvidia.ko if a device reaches a GPU.
const ASKED: [&str; 4] = ["pin", "provider maps", "provider unmaps", "unpin"];
/// The same steps if nvidia.ko's DMA address is not the page's physical address, and the module
/// does not know if DMA addresses are translated. The module then maps the page itself to find out.
const ASKED_OF_BOTH: [&str; 6] = [
    "pin",
    "provider maps",
    "map",
    "unmap",
    "provider unmaps",
    "unpin",
];
const MAPS_ITSELF: [&str; 3] = ["map", "unmap", "unpin"];
const BY_PROVIDER: [&str; 3] = ["provider maps", "provider unmaps", "unpin"];

/// Creates a world in which the module has not yet asked nvidia.ko about any device.
fn world_of_strangers(start: u64) -> Arc<World> {
    let world = World::at(start);
    world.answers.replace(Some(Vec::new()));
    world.is_direct.set(true);
    world
}

/// Returns the steps of a registration from its mapping on. Checks that the scatter list is freed
/// last.
fn life(world: &World, start: u64, len: u64) -> Vec<&'static str> {
    let region = Held::<PersistentMr>::pin(start, len).expect("pinned");
    world.take_log();
    region.map(&PciDevice::default()).expect("mapped");
    drop(region);
    let mut log = world.take_log();
    assert_eq!(log.pop(), Some("table freed"));
    log
}

#[test]
fn the_provider_is_asked_once_whether_a_device_reaches_a_gpu() {
    let start = 0x8_0000_0000;
    let world = world_of_strangers(start);
    let (asked, itself) = (ASKED.as_slice(), MAPS_ITSELF.as_slice());
    assert_eq!(life(&world, start, 4 * MIB), [asked, itself].concat());
    assert_eq!(life(&world, start, 4 * MIB), itself);
    // The remembered answer is about another GPU.
    world
        .answers
        .replace(Some(vec![(Gpus::one(1), Reach::AsOurs)]));
    assert_eq!(life(&world, start, 4 * MIB), [asked, itself].concat());
}

#[test]
fn the_provider_s_address_decides_which_module_maps() {
    let start = 0x8_1000_0000;
    // The columns are: `true` if the module knows that nothing translates addresses; `true` if the
    // DMA addresses of this module's mappings are physical addresses; the offset of nvidia.ko's
    // addresses from physical addresses; the expected steps of the question; `true` if this module
    // maps the memory.
    for (is_direct, is_identity, offset, asked, own) in [
        (true, true, 0, ASKED.as_slice(), true),
        (true, true, IOMMU_OFFSET, &ASKED, false),
        (false, false, 0, &ASKED, false),
        (false, true, 0, &ASKED, false),
        (false, false, IOMMU_OFFSET, &ASKED_OF_BOTH, true),
        (false, true, IOMMU_OFFSET, &ASKED_OF_BOTH, false),
    ] {
        let world = world_of_strangers(start);
        world.is_direct.set(is_direct);
        world.is_identity.set(is_identity);
        world.provider_offset.set(offset);
        let maps = if own { MAPS_ITSELF } else { BY_PROVIDER };
        let case = format!("direct {is_direct}, identity {is_identity}, offset {offset:#x}");
        assert_eq!(life(&world, start, MIB), [asked, &maps].concat(), "{case}");
        assert_eq!(life(&world, start, MIB), maps, "{case}");
    }
    // Behind an IOMMU, the module does not make its own mapping of the page to compare it with
    // nvidia.ko's.
    let world = world_of_strangers(start);
    world.is_direct.set(false);
    world.is_translated.set(true);
    world.provider_offset.set(IOMMU_OFFSET);
    assert_eq!(
        life(&world, start, MIB),
        [ASKED.as_slice(), &MAPS_ITSELF].concat()
    );
}

/// nvidia.ko returns DMA addresses that differ from the physical addresses. The module does not
/// know if DMA addresses are translated, and cannot map the page to find out.
#[test]
fn without_an_address_of_this_module_there_is_no_answer() {
    let start = 0x8_a000_0000;
    let world = world_of_strangers(start);
    world.is_direct.set(false);
    world.provider_offset.set(IOMMU_OFFSET);
    world.fail("map");
    for _ in 0..2 {
        let want = [
            &["pin", "provider maps", "map", "provider unmaps", "unpin"],
            BY_PROVIDER.as_slice(),
        ]
        .concat();
        assert_eq!(life(&world, start, MIB), want);
    }
}

#[test]
fn without_an_answer_the_provider_maps_and_is_asked_again() {
    let start = 0x8_2000_0000;
    let world = world_of_strangers(start);
    let no_answer = ["pin", "provider maps", "unpin"];
    for _ in 0..2 {
        world.fail_map.set(Some(1));
        let want = [no_answer.as_slice(), &BY_PROVIDER].concat();
        assert_eq!(life(&world, start, MIB), want);
    }
    // If nvidia.ko refuses to map the registration, the mapping fails.
    let other = Held::<PersistentMr>::pin(start, MIB).expect("pinned");
    world.fail("provider maps");
    let reason = other.map(&PciDevice::default()).err();
    assert_eq!(reason, Some(Reason::Map(-5)));
}

/// Maps a registration while nvidia.ko refuses every mapping with `code`. Returns the steps.
fn refused_life(world: &World, start: u64, code: i32) -> Vec<&'static str> {
    let region = Held::<PersistentMr>::pin(start, MIB).expect("pinned");
    world.take_log();
    world.map_code.set(Some(code));
    world.fail_map.set(None);
    world.fail("provider maps");
    let reason = region.map(&PciDevice::default()).err();
    assert_eq!(reason, Some(Reason::Map(code)));
    world.take_log()
}

#[test]
fn a_denial_is_remembered_and_no_other_refusal() {
    let start = 0x8_7000_0000;
    let asked = ["pin", "provider maps", "unpin", "provider maps"];
    // `nvidia_p2p_map_status()` returns this code for NV_ERR_NOT_SUPPORTED, the result of the
    // topology check. The other codes below are the function's other results.
    assert_eq!(DENIED, Reason::Map(-524));
    for code in [ENOTSUPP, EINVAL, ENOMEM, -5, -16, -19, -95, 0] {
        let world = world_of_strangers(start);
        assert_eq!(refused_life(&world, start, code), asked, "{code}");
        let is_denial = code == ENOTSUPP;
        let want = Vec::from_iter(is_denial.then_some((Gpus::one(0), Reach::Denied)));
        assert_eq!(world.answers.borrow().as_deref(), Some(&want[..]), "{code}");
        // Once a device is denied, the module does not ask again, and nvidia.ko refuses each
        // registration itself.
        let again = if is_denial { &asked[3..] } else { &asked };
        assert_eq!(refused_life(&world, start, code), again, "{code}");
    }
}

#[test]
fn a_pin_that_fails_is_no_denial() {
    let start = 0x8_8000_0000;
    let world = world_of_strangers(start);
    for code in [ENOTSUPP, ENOMEM, EINVAL] {
        let region = Held::<PersistentMr>::pin(start, MIB).expect("pinned");
        world.take_log();
        world.provider.refuses.set(Some(code));
        region.map(&PciDevice::default()).expect("mapped");
        world.provider.refuses.set(None);
        assert_eq!(world.take_log(), ["pin", "provider maps"], "{code}");
        assert_eq!(world.answers.borrow().as_deref(), Some(&[][..]), "{code}");
    }
}

/// The process unmaps the memory and maps memory of another GPU at the same address. The module
/// discards nvidia.ko's answer about the other GPU, and remembers no answer for either GPU.
#[test]
fn an_answer_about_another_gpu_is_none() {
    let start = 0x8_9000_0000;
    // The cases are the two answers after which this module maps the memory, one answer after which
    // it does not, and a denial.
    for (offset, is_direct, denied) in [
        (0, true, false),
        (IOMMU_OFFSET, false, false),
        (IOMMU_OFFSET, true, false),
        (0, true, true),
    ] {
        let world = world_of_strangers(start);
        world.provider_offset.set(offset);
        world.is_direct.set(is_direct);
        let region = Held::<PersistentMr>::pin(start, MIB).expect("pinned");
        world.take_log();
        // Each GPU has two allocations, so the third allocation is on the other GPU.
        let mut others: Vec<_> = (1..=2)
            .map(|n| Allocation::new(start - n * MIB, MIB))
            .collect();
        others.push(Allocation::new(start, MIB));
        world.provider.layout.replace(others);
        if denied {
            world.map_code.set(Some(ENOTSUPP));
            world.fail_map.set(Some(1));
        }
        let mapped = region.map(&PciDevice::default());
        // The result of the mapping is nvidia.ko's result for the registration, not an answer about
        // one page.
        assert_eq!(mapped.err(), denied.then_some(DENIED));
        assert_eq!(world.take_log()[..3], ["pin", "unpin", "provider maps"]);
        assert_eq!(world.answers.borrow().as_deref(), Some(&[][..]));
    }
}

#[test]
fn the_provider_is_not_asked_about_the_last_page_of_a_bar() {
    let start = 0x8_3000_0000;
    // The columns are: the end of the BAR, the length of the range, and the page that nvidia.ko is
    // asked about.
    for (end, len, page) in [
        (PAGE, 3 * PAGE, Some(1)),
        (PAGE, PAGE, None),
        (2 * PAGE, 3 * PAGE, Some(0)),
    ] {
        let world = world_of_strangers(start);
        world.bar_end.set(Some(DMA_BASE + end));
        let region = Held::<PersistentMr>::pin(start, len).expect("pinned");
        world.provider.spans.take();
        region.map(&PciDevice::default()).expect("mapped");
        let asked = world.provider.spans.take();
        let want = page.map(|page| Span::covering(start + page * PAGE, 1, PageSize::KIB_64, MIB));
        assert_eq!(
            asked,
            Vec::from_iter(want.map(|span| span.expect("a page")))
        );
        let own = world.take_log().contains(&"map");
        assert_eq!(own, page.is_some());
    }
}

#[test]
fn the_provider_is_asked_about_one_of_its_own_pages() {
    let start = 0x8_4000_0000;
    let world = world_of_strangers(start);
    world.provider.layout.borrow_mut().push(Allocation {
        start,
        len: MIB,
        page: PageSize::KIB_128,
    });
    let want = [ASKED.as_slice(), &MAPS_ITSELF].concat();
    assert_eq!(life(&world, start, MIB), want);
}

#[test]
fn what_this_module_cannot_map_the_provider_does() {
    let start = 0x8_5000_0000;
    for what in ["cacheable", "bars", "struct pages", "gpus"] {
        let world = World::at(start);
        world.fail(what);
        assert_eq!(life(&world, start, MIB), BY_PROVIDER, "{what}");
    }
    let world = World::at(start);
    world.provider_maps.set(true);
    assert_eq!(life(&world, start, MIB), BY_PROVIDER);
    world.provider_maps.set(false);
    assert_eq!(life(&world, start, MIB), MAPS_ITSELF);
    world.fail("list");
    let region = Held::<PersistentMr>::pin(start, MIB).expect("pinned");
    let reason = region.map(&PciDevice::default()).err();
    assert_eq!(reason, Some(Reason::NoMemory));
}

#[test]
fn the_provider_maps_a_pin_whose_second_gpu_it_was_not_asked_about() {
    let start = 0x40_0000_0000;
    let world = World::at(start);
    let border = start + (1 << 37);
    assert_eq!(life(&world, border - MIB, MIB), MAPS_ITSELF);
    assert_eq!(life(&world, border - MIB, 2 * MIB), BY_PROVIDER);
}

#[test]
fn each_gpu_of_a_range_is_asked_about() {
    let start = 0x8_6000_0000;
    let world = world_of_strangers(start);
    // Each GPU has two allocations.
    for number in 0..4 {
        let at = start + number * 2 * MIB;
        let mut layout = world.provider.layout.borrow_mut();
        layout.push(Allocation::new(at, 2 * MIB));
    }
    let asked = [ASKED.as_slice(), &ASKED].concat();
    let log = life(&world, start, 8 * MIB);
    assert_eq!(log[..asked.len()], asked);
    assert_eq!(log[asked.len()..][..2], ["map", "unmap"]);
    // The device reaches one of the GPUs through other DMA addresses than those of this module's
    // mapping.
    let of_each = world.answers.take().expect("two");
    assert_eq!(of_each.len(), 2);
    let answers = of_each.iter().enumerate();
    let reach = [Reach::AsOurs, Reach::Otherwise];
    let answers = answers.map(|(number, (gpu, _))| (*gpu, reach[number]));
    world.answers.replace(Some(answers.collect()));
    let log = life(&world, start, 8 * MIB);
    assert_eq!(log[..4], ["provider maps"; 4]);
}
