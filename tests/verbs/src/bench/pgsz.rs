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

/// The largest page size of `offered` for `entries`, which are DMA addresses and lengths, registered as
/// `[address, address + len)` under that same address. None if none will do.
pub(super) fn best(
    form: Form,
    entries: &[(u64, u64)],
    address: u64,
    len: u64,
    offered: u64,
) -> Option<u64> {
    let last = address.checked_add(len.checked_sub(1)?)?;
    // Larger than what lies between the first and the last byte is never better.
    let bits = u64::BITS - (address ^ last).leading_zeros();
    let mut mask = offered & bits_from(bits);
    let mut va = address;
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
        [Form::Old, Form::New].map(|form| best(form, entries, VA, len, OFFERED))
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
            best(Form::New, &[(DMA + 4096, 4096)], VA, 4096, 1 << 30),
            None
        );
        assert_eq!(best(Form::New, &[], VA, 0, OFFERED), None);
        assert_eq!(best(Form::New, &[(DMA, 4096)], u64::MAX, 2, OFFERED), None);
    }

    #[test]
    fn the_hcas_pages() {
        assert_eq!(pages(VA, G1, G1), Some(1));
        assert_eq!(pages(VA + 4096, G1, G1), Some(2));
        assert_eq!(pages(VA, 1, 4096), Some(1));
    }
}
