// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Bytes that identify their position.
//!
//! Each byte depends on a key and on its position. Data at the wrong place, or from an earlier
//! transfer, therefore differs from the expected bytes. Each transfer has its own key, derived from
//! the seed of the run.

use serde::{Deserialize, Serialize};

/// A stream of bytes. Equal keys give equal streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pattern(u64);

/// Applies the finaliser of `SplitMix64`, a bijection on 64 bits. Each output bit depends on all
/// input bits.
fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

impl Pattern {
    /// Returns stream number `id` of a run with `seed`.
    pub fn new(seed: u64, id: u64) -> Self {
        Self(mix(seed ^ mix(id.wrapping_add(0x9e37_79b9_7f4a_7c15))))
    }

    fn word(self, index: u64) -> [u8; 8] {
        mix(self.0 ^ index.wrapping_mul(0x9e37_79b9_7f4a_7c15)).to_le_bytes()
    }

    /// Fills `out` with the stream's bytes, starting at `position`.
    pub fn fill(self, position: u64, out: &mut [u8]) {
        let mut at = position;
        let mut rest = out;
        while !rest.is_empty() {
            let word = self.word(at / 8);
            let skip = (at % 8) as usize;
            let take = (8 - skip).min(rest.len());
            let (head, tail) = rest.split_at_mut(take);
            head.copy_from_slice(&word[skip..skip + take]);
            rest = tail;
            at += take as u64;
        }
    }

    /// Returns `len` bytes of the stream, starting at `position`.
    pub fn bytes(self, position: u64, len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        self.fill(position, &mut out);
        out
    }
}

/// A small random number generator, reproducible by its seed.
#[derive(Debug, Clone)]
pub struct Choice(u64);

impl Choice {
    /// Creates a generator whose numbers depend only on `seed`.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    #[expect(clippy::should_implement_trait, reason = "it has no end")]
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// Returns the next number below `bound`, which must not be zero.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound.max(1)
    }
}

/// Difference of two byte strings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Difference {
    /// Position of the first byte that differs.
    pub first: usize,
    /// Number of bytes that differ.
    pub count: usize,
}

/// Compares byte strings of equal length.
pub fn difference(expected: &[u8], found: &[u8]) -> Option<Difference> {
    if expected == found {
        return None;
    }
    let mut differing = expected
        .iter()
        .zip(found)
        .enumerate()
        .filter(|(_, (a, b))| a != b)
        .map(|(at, _)| at);
    let first = differing.next().unwrap_or(expected.len().min(found.len()));
    Some(Difference {
        first,
        count: 1 + differing.count(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn position_decides_and_pieces_join() {
        let pattern = Pattern::new(7, 1);
        let whole = pattern.bytes(0, 100);
        for cut in 0..100 {
            assert_eq!(pattern.bytes(cut as u64, 100 - cut), whole[cut..]);
        }
        assert_ne!(Pattern::new(7, 2).bytes(0, 100), whole);
        assert_ne!(Pattern::new(8, 1).bytes(0, 100), whole);
    }

    #[test]
    fn shifted_data_differs() {
        let whole = Pattern::new(1, 1).bytes(0, 4096);
        for shift in [1, 8, 64, 1024] {
            let found = difference(&whole[shift..], &whole[..4096 - shift]).map_or(0, |d| d.count);
            assert!(
                found > (4096 - shift) * 9 / 10,
                "{found} bytes differ at shift {shift}"
            );
        }
    }

    #[test]
    fn difference_counts() {
        assert_eq!(difference(b"abc", b"abc"), None);
        assert_eq!(
            difference(b"abcd", b"aXcX"),
            Some(Difference { first: 1, count: 2 })
        );
    }
}
