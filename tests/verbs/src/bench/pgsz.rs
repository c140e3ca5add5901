// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! The HCA's page size for a scatter list: `ib_umem_find_best_pgsz` of ib_core, in its two forms.
//!
//! Until Linux 6.15 (and OFED 25.04) each border of two entries was one of pages of the HCA's. Since then only those are at
//! which DMA addresses jump.

/// What mlx5 offers by default: 4 KiB to 2 GiB.
pub(super) const OFFERED: u64 = (1 << 32) - (1 << 12);

/// Which form of the function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    Old,
    New,
}

/// A mask of the bits from `low` on.
fn bits_from(low: u32) -> u64 {
    u64::MAX.checked_shl(low).unwrap_or(0)
}

/// Returns the largest page size of `offered` for `entries`, which are DMA addresses and lengths. They are registered as
/// `[address, address + len)`, and the HCA knows the first byte as `iova`. None if no size will do.
pub(super) fn best(
    form: Form,
    entries: &[(u64, u64)],
    address: u64,
    iova: u64,
    len: u64,
    offered: u64,
) -> Option<u64> {
    let last = iova.checked_add(len.checked_sub(1)?)?;
    // Larger than what lies between the first and the last byte is never better.
    let bits = u64::BITS - (iova ^ last).leading_zeros();
    let mut mask = offered & bits_from(bits);
    let mut va = iova;
    let mut behind = None;
    // The first entry begins with its page, the registration may begin later.
    let mut skipped = address % 4096;
    for (index, &(dma, length)) in entries.iter().enumerate() {
        match form {
            Form::Old => {
                mask |= dma.wrapping_add(skipped) ^ va;
                va = va.wrapping_add(length.wrapping_sub(skipped));
                if index + 1 < entries.len() {
                    mask |= va;
                }
            }
            Form::New => {
                if behind != Some(dma) {
                    mask |= dma.wrapping_add(skipped) ^ va;
                    if index > 0 {
                        mask |= va;
                    }
                }
                behind = dma.checked_add(length);
                va = va.wrapping_add(length.wrapping_sub(skipped));
            }
        }
        skipped = 0;
    }
    let usable = match mask {
        0 => offered,
        _ => offered & !(bits_from(mask.trailing_zeros()) << 1),
    };
    usable.checked_ilog2().map(|shift| 1 << shift)
}

/// How many pages of that size a registration touches: entries of the HCA's table.
pub(super) fn pages(address: u64, len: u64, page: u64) -> Option<u64> {
    let end = address.checked_add(len)?;
    Some(end.div_ceil(page) - address / page)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All sizes from 4 KiB on, as an HCA offers them whose `max_mkey_log_entity_size_mtt` has no limit.
    const ALL: u64 = !(4096 - 1);

    /// Returns the address of each block of `page` bytes that `__rdma_block_iter_next` finds, when it computes the way to the
    /// next block with `bits` bits: 32 in OFED 25.07 and 25.10, 64 since Linux's 15fe76e23615.
    fn blocks(entries: &[(u64, u64)], iova: u64, len: u64, page: u64, bits: u32) -> Vec<u64> {
        let narrow = u64::MAX >> (64 - bits);
        let count = pages(iova, len, page).expect("no wrap");
        let mut found = Vec::new();
        let (mut at, mut advance) = (0, 0_u64);
        while at < entries.len() && (found.len() as u64) < count {
            let address = entries[at].0 + advance;
            let offset = address & (page - 1) & narrow;
            let mut delta = page.wrapping_sub(offset) & narrow;
            // Lengths of entries have 32 bits in all versions.
            while at < entries.len() && entries[at].1 - advance <= delta {
                delta -= entries[at].1 - advance;
                advance = 0;
                at += 1;
            }
            advance += delta;
            found.push(address & !(page - 1));
        }
        found
    }

    /// The module's entries behind an IOMMU whose range begins at a multiple of 2^37. DMA addresses are congruent to `va` modulo
    /// 2 GiB. Entries end at multiples of 2 GiB of virtual addresses, and `hole` bytes follow the first.
    fn windows(dma: u64, va: u64, len: u64, hole: u64) -> Vec<(u64, u64)> {
        let mut at = dma + va % (2 * G1);
        let mut entries = Vec::new();
        let (mut from, end) = (va, va + len);
        while from < end {
            let length = (2 * G1 - from % (2 * G1)).min(end - from);
            entries.push((at, length));
            at += length + if entries.len() == 1 { hole } else { 0 };
            from += length;
        }
        entries
    }

    /// Without the hole the first form of the iterator repeats addresses; with it, it does for no `iova`.
    #[test]
    fn bit_31_of_the_distance_keeps_pages_at_two_gib() {
        let mut wrong_without = 0;
        for len in [5, 6, 8, 12, 16, 40, 64].map(|gib| gib * G1) {
            for va in [VA, VA + 2 * G1, VA + G1 + M2, VA + 4 * G1 - K64, VA + K64] {
                for iova in [va, 0, 2 * G1, 4 * G1, va % (2 * G1), va + 6 * G1, va + M2] {
                    for cap in [63, 35, 32, 31] {
                        let offered = ALL & (u64::MAX >> (63 - cap));
                        let check = |hole| {
                            let entries = windows(DMA, va, len, hole);
                            let page = best(Form::New, &entries, va, iova, len, offered);
                            let page = page.expect("a page");
                            let of = |bits| blocks(&entries, iova, len, page, bits);
                            (page, of(32) == of(64))
                        };
                        let (page, is_right) = check(2 * G1);
                        assert!(
                            is_right && page <= 2 * G1,
                            "{len:#x} bytes at {va:#x}, iova {iova:#x}, 2^{cap}: page {page:#x}"
                        );
                        if iova % (2 * G1) == va % (2 * G1) {
                            assert_eq!(page, 2 * G1, "{len:#x} bytes at {va:#x}, iova {iova:#x}");
                        }
                        wrong_without += usize::from(!check(0).1);
                    }
                }
            }
        }
        assert!(wrong_without > 0, "the iterator of 32 bits is right");
    }

    /// Regions of up to 4 GiB need no hole.
    #[test]
    fn up_to_four_gib_no_page_is_too_large_for_32_bits() {
        for len in [2 * G1 + K64, 3 * G1, 4 * G1 - K64, 4 * G1] {
            for va in [VA, VA + 2 * G1, VA + G1 + M2, VA + 4 * G1 - K64, VA + K64] {
                for iova in [va, 0, 2 * G1, 4 * G1 - K64, va + 4 * G1, va + 6 * G1] {
                    for far in 0..4 {
                        let entries = windows(DMA + far * 2 * G1, va, len, 0);
                        let page = best(Form::New, &entries, va, iova, len, ALL).expect("a page");
                        let of = |bits| blocks(&entries, iova, len, page, bits);
                        assert_eq!(
                            of(32),
                            of(64),
                            "{len:#x} at {va:#x}, iova {iova:#x}, {page:#x}"
                        );
                    }
                }
            }
        }
    }

    const K64: u64 = 64 << 10;
    const M2: u64 = 2 << 20;
    const G1: u64 = 1 << 30;
    const VA: u64 = 0x7f00_0000_0000;
    const DMA: u64 = 0x80_0000_0000;

    /// Entries of at most `most` bytes, as long as addresses follow each other.
    fn cut(runs: &[(u64, u64)], most: u64) -> Vec<(u64, u64)> {
        let mut entries = Vec::new();
        for &(dma, len) in runs {
            let mut at = 0;
            while at < len {
                let length = most.min(len - at);
                entries.push((dma + at, length));
                at += length;
            }
        }
        entries
    }

    fn both(entries: &[(u64, u64)], len: u64) -> [Option<u64>; 2] {
        [Form::Old, Form::New].map(|form| best(form, entries, VA, VA, len, OFFERED))
    }

    #[test]
    fn contiguous_memory() {
        let run = [(DMA, G1)];
        assert_eq!(both(&cut(&run, K64), G1), [Some(K64), Some(G1)]);
        assert_eq!(both(&cut(&run, G1), G1), [Some(G1), Some(G1)]);
    }

    #[test]
    fn addresses_that_agree_in_few_bits() {
        let run = [(DMA + M2, G1)];
        assert_eq!(both(&cut(&run, K64), G1), [Some(K64), Some(M2)]);
        assert_eq!(both(&cut(&run, G1), G1), [Some(M2), Some(M2)]);
        let run = [(DMA + K64, G1)];
        assert_eq!(both(&cut(&run, G1), G1), [Some(K64), Some(K64)]);
    }

    #[test]
    fn scattered_chunks() {
        let runs: Vec<(u64, u64)> = (0..512).map(|i| (DMA + i * 2 * M2, M2)).collect();
        assert_eq!(both(&cut(&runs, K64), G1), [Some(K64), Some(M2)]);
        assert_eq!(both(&cut(&runs, M2), G1), [Some(M2), Some(M2)]);
    }

    #[test]
    fn entries_of_the_longest_kinds() {
        let run = [(DMA, 8 * G1)];
        for (most, old) in [(2 * G1, 2 * G1), (4 * G1 - K64, K64), (4 * G1 - 4096, 4096)] {
            assert_eq!(
                both(&cut(&run, most), 8 * G1),
                [Some(old), Some(2 * G1)],
                "{most:#x}"
            );
        }
    }

    #[test]
    fn what_cannot_be() {
        assert_eq!(
            best(Form::New, &[(DMA + 4096, 4096)], VA, VA, 4096, 1 << 30),
            None
        );
        assert_eq!(best(Form::New, &[], VA, VA, 0, OFFERED), None);
        assert_eq!(
            best(Form::New, &[(DMA, 4096)], u64::MAX, u64::MAX, 2, OFFERED),
            None
        );
    }

    #[test]
    fn the_hcas_pages() {
        assert_eq!(pages(VA, G1, G1), Some(1));
        assert_eq!(pages(VA + 4096, G1, G1), Some(2));
        assert_eq!(pages(VA, 1, 4096), Some(1));
    }
}
