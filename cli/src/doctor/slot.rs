// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Bandwidth of the NIC's PCIe slot, compared with the rates of the NIC's ports.

use super::route::Joined;
use super::scan::{check, Scan};
use crate::finding::{Finding, Level, Subject};
use crate::machine::hca::{gigabits, Port};
use crate::machine::Hca;

check! {
    "slot": "whether the NIC's slot is as fast as its port",
    |scan| scan.has_hardware_hca(), slot, OnPaths(tests::FAULTS)
}

fn slot(scan: &Scan<'_>) -> Vec<Finding> {
    let hcas = scan.hcas().filter(|hca| !hca.is_software);
    hcas.filter_map(|hca| of_slot(scan, hca)).collect()
}

fn of_slot(scan: &Scan<'_>, hca: &Hca) -> Option<Finding> {
    let functions = &scan.machine.functions;
    let function = functions.get(&hca.at?)?;
    // Data Direct transfers GPU memory through another PCI function, not through the NIC's slot.
    if scan.is_by_data_direct(hca) {
        return None;
    }
    // A virtual function has no link of its own.
    if function.physical.is_some() {
        return None;
    }
    let upper = functions.get(function.above.last()?)?;
    let joined = Joined::of(upper, function)?;
    let link = joined.most.megabits();
    let active = hca.ports.iter().filter(|port| port.is_active());
    let port = active.filter_map(Port::megabits).max()?;
    // The rate of a PCIe link includes packet headers, and the rate of a port does not. The
    // comparison ignores the headers, because every slot has them.
    if link == 0 || port <= link {
        return Some(Subject::hca(hca).ok(format!(
            "slot and NIC support {}, for a port of {} Gb/s",
            joined.most,
            gigabits(port)
        )));
    }
    let (link, port, most) = (gigabits(link), gigabits(port), joined.most);
    let found = format!("slot and NIC support {most} ({link} Gb/s), but a port is {port} Gb/s");
    let level = scan.level_of(hca, Level::Warning);
    Some(
        Finding::new(level, Subject::hca(hca), found)
            .why("Bytes reach the GPU no faster than the slot allows.")
            .costs(format!("{link} of {port} Gb/s at most."))
            .fix(format!(
                "Put the NIC into a slot that is as fast as the NIC: the port above ({}) supports {}, and the NIC \
                 supports {}.",
                upper.at,
                upper.link.as_ref().map_or(joined.most, |link| link.most),
                function.link.as_ref().map_or(joined.most, |link| link.most),
            )),
    )
}

#[cfg(test)]
mod tests {
    use super::super::tests::paths::{faults, socket, FIRST};

    faults! {
        "a slot that is too slow for the port",
            "warning slot: …slot and NIC support 16.0 GT/s x16 (252 Gb/s), but a port is 400 Gb/s… fix …as fast as \
             the NIC" => |fixture| {
            let it = socket(FIRST);
            let port = fixture.function(it.nic_port).link.as_mut().unwrap();
            port.now.speed = 160;
            port.most.speed = 160;
            fixture.function(it.nic).link.as_mut().unwrap().now.speed = 160;
        };
    }
}
