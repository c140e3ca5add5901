// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Cost of one registration with the loaded module.

use std::time::Instant;

use anyhow::{ensure, Result};
use serde::{Deserialize, Serialize};

use crate::cases::register::{allocate_aligned, peer_region};
use crate::counters::Counters;
use crate::gpu::GRANULE;
use crate::lab::Lab;
use crate::module;

const GIB: u64 = 1 << 30;

/// A measurement, printed as JSON by `gdr measure`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Measurement {
    pub(crate) peermem: String,
    pub(crate) version: String,
    pub(crate) mode: String,
    pub(crate) bytes: u64,
    pub(crate) address: u64,
    /// nvidia.ko's pins, unpins and mappings from before the registration to after the
    /// deregistration.
    pub(crate) pins: u64,
    pub(crate) unpins: u64,
    pub(crate) maps: u64,
    /// Scatter-list entries that rxe received.
    pub(crate) entries: u64,
    pub(crate) register_microseconds: u64,
}

/// Returns the largest power of two, up to 1 GiB, for which the first GPU's BAR has room besides
/// other memory.
pub(crate) fn usual_length(lab: &Lab) -> Result<u64> {
    let room = lab.gpu(0)?.bar_len() / 2;
    ensure!(room > 0, "the BAR is empty");
    Ok((1 << room.ilog2()).min(GIB))
}

/// Registers `bytes` of contiguous GPU memory at an address that is aligned to its size, and
/// deregisters it.
pub(crate) fn measure(lab: &Lab, bytes: u64) -> Result<Measurement> {
    let memory = allocate_aligned(lab, bytes, bytes.next_power_of_two().max(GRANULE))?;
    ensure!(memory.is_contiguous()?, "the memory is not contiguous");
    let before = Counters::read()?;
    let start = Instant::now();
    let region = lab.near.reg_mr(memory.span(0, usize::try_from(bytes)?)?)?;
    let elapsed = start.elapsed();
    let entries = peer_region(&lab.near, &region)?.entries;
    drop(region);
    let activity = Counters::read()?.activity(&before)?;
    Ok(Measurement {
        peermem: lab.setup.peermem.to_string(),
        version: module::version()?,
        mode: lab.setup.mode().to_string(),
        bytes,
        address: memory.mapping().addr(),
        pins: activity.pins,
        unpins: activity.unpins,
        maps: activity.maps,
        entries,
        register_microseconds: u64::try_from(elapsed.as_micros())?,
    })
}

/// Parses a length: `1073741824`, `64K`, `512M`, `1GiB`.
pub(crate) fn parse_length(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
    let unit = text[digits.len()..]
        .trim_end_matches("iB")
        .trim_end_matches('B');
    let shift = match unit.to_ascii_uppercase().as_str() {
        "" => 0,
        "K" => 10,
        "M" => 20,
        "G" => 30,
        "T" => 40,
        _ => return Err(format!("unknown unit in {text:?}")),
    };
    let number: u64 = digits
        .parse()
        .map_err(|_| format!("not a length: {text:?}"))?;
    number
        .checked_mul(1 << shift)
        .filter(|&length| length > 0)
        .ok_or_else(|| format!("out of range: {text:?}"))
}

#[cfg(test)]
mod tests {
    use super::parse_length;

    #[test]
    fn lengths() {
        assert_eq!(parse_length("4096"), Ok(4096));
        assert_eq!(parse_length("64K"), Ok(65536));
        assert_eq!(parse_length("1GiB"), Ok(1 << 30));
        assert_eq!(
            parse_length("2mib"),
            Err("unknown unit in \"2mib\"".to_owned())
        );
        for wrong in ["", "GiB", "0", "16777216T", "1X", "-1"] {
            assert!(parse_length(wrong).is_err(), "{wrong:?}");
        }
    }
}
