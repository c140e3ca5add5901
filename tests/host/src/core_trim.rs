// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! What ib_core does to a peer's scatter list before an HCA sees it: the first and the last entry are
//! trimmed from the peer's pages to the kernel's.

use crate::extents::Entry;

/// Trims `entries`, which cover whole peer pages of `peer` bytes around `[addr, addr + len)`, to the
/// kernel's pages of `kernel` bytes. Fails where an entry is too short to be trimmed, as ib_core's
/// unsigned arithmetic would wrap there.
pub(crate) fn trim(
    entries: &mut [Entry],
    addr: u64,
    len: u64,
    peer: u64,
    kernel: u64,
) -> Result<(), &'static str> {
    if peer <= kernel {
        return Ok(());
    }
    let head = down(addr, kernel) - down(addr, peer);
    let tail = up(addr + len, peer) - up(addr + len, kernel);
    let first = entries.first_mut().ok_or("no first entry")?;
    first.addr += head;
    first.len = u64::from(first.len)
        .checked_sub(head)
        .and_then(|len| u32::try_from(len).ok())
        .ok_or("the first entry is too short")?;
    let last = entries.last_mut().ok_or("no last entry")?;
    last.len = u64::from(last.len)
        .checked_sub(tail)
        .and_then(|len| u32::try_from(len).ok())
        .filter(|&len| len > 0)
        .ok_or("the last entry is too short")?;
    Ok(())
}

fn down(value: u64, to: u64) -> u64 {
    value & !(to - 1)
}

fn up(value: u64, to: u64) -> u64 {
    down(value + to - 1, to)
}
