// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Settings of an epoch, which follow from the seed and the number of the epoch.

use crate::lab::PinMode;
use crate::pattern::Choice;

const LAYOUTS: [&str; 6] = ["contiguous", "64k", "2m", "descending", "random", "run"];
/// Amount of BAR1 that can be pinned in an epoch with a small BAR1, in MiB. See [`Plan::tight`].
const TIGHT_MIB: u64 = 12;
/// Amount of BAR1 that nvidia.ko reserves for itself in all other epochs, in MiB.
const RESERVE_MIB: u64 = 36;

/// Derives one number from several.
pub(super) fn derive(parts: &[u64]) -> u64 {
    parts
        .iter()
        .fold(0, |sum, part| Choice::new(sum ^ part).next())
}

/// Settings of one epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Plan {
    pub(super) seed: u64,
    pub(super) epoch: u64,
    pub(super) mode: PinMode,
    pub(super) peerdirect: bool,
    pub(super) layout: &'static str,
    pub(super) layout_seed: u32,
    /// `true` if a kernel thread frees memory after munmap and exit, `false` if the caller does.
    pub(super) kernel_thread_frees: bool,
    /// `true` if only [`TIGHT_MIB`] of BAR1 can be pinned, so that BAR1 may be full.
    pub(super) tight: bool,
}

impl Plan {
    pub(super) fn of(seed: u64, epoch: u64) -> Self {
        let mut choice = Choice::new(derive(&[seed, epoch]));
        Self {
            seed,
            epoch,
            mode: if epoch % 2 == 0 {
                PinMode::Persistent
            } else {
                PinMode::Revocable
            },
            peerdirect: epoch / 2 % 2 == 1,
            layout: LAYOUTS[choice.below(LAYOUTS.len() as u64) as usize],
            layout_seed: choice.next() as u32,
            kernel_thread_frees: choice.below(2) == 1,
            // A short run has only the first four epochs. BAR1 is never small in these epochs.
            tight: epoch >= 4 && choice.below(5) == 0,
        }
    }

    /// Returns the seed for the choices of one process. A repeated epoch gets the same seeds.
    pub(super) fn stream(&self, process: u64, number: u64) -> u64 {
        derive(&[self.seed, self.epoch, process, number])
    }

    pub(super) fn module_parameters(&self) -> Vec<String> {
        vec![
            format!(
                "persistent_api_support={}",
                u8::from(self.mode == PinMode::Persistent)
            ),
            format!("peerdirect_support={}", u8::from(self.peerdirect)),
        ]
    }

    /// Returns the parameters of the stand-in GPU, with a BAR of `bar_len` bytes.
    pub(super) fn gpu_parameters(&self, bar_len: u64) -> [(&'static str, String); 4] {
        let reserve = if self.tight {
            (bar_len >> 20).saturating_sub(TIGHT_MIB)
        } else {
            RESERVE_MIB
        };
        let context = if self.kernel_thread_frees {
            "kthread"
        } else {
            "caller"
        };
        [
            ("layout", self.layout.to_owned()),
            ("layout_seed", self.layout_seed.to_string()),
            ("free_context", context.to_owned()),
            ("bar1_reserve_mib", reserve.to_string()),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_epoch_repeats_and_differs_from_others() {
        assert_eq!(Plan::of(1, 7), Plan::of(1, 7));
        let plan = Plan::of(1, 7);
        assert_eq!(plan.stream(2, 3), Plan::of(1, 7).stream(2, 3));
        for other in [
            plan.stream(3, 2),
            plan.stream(2, 4),
            Plan::of(2, 7).stream(2, 3),
        ] {
            assert_ne!(plan.stream(2, 3), other);
        }
    }

    #[test]
    fn four_epochs_cover_all_module_parameters() {
        let mut seen: Vec<_> = (4..8).map(|n| Plan::of(9, n).module_parameters()).collect();
        seen.sort();
        seen.dedup();
        assert_eq!(seen.len(), 4);
        let of_all = |test: fn(&Plan) -> bool| (0..64).filter(|&n| test(&Plan::of(9, n))).count();
        assert!(of_all(|plan| plan.tight) > 0);
        for layout in LAYOUTS {
            assert!((0..64).any(|n| Plan::of(9, n).layout == layout), "{layout}");
        }
    }
}
