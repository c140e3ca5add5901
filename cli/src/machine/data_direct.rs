// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Data Direct function of ConnectX-8: a second PCI function through which the NIC accesses memory
//! that is registered for Data Direct. The function may be below a GPU's switch while the NIC's own
//! function is in another PCI domain.
//!
//! mlx5_ib matches the two functions by VUID: one VUID comes from the NIC's firmware, and the other
//! VUID from the function's VPD (Linux's `drivers/infiniband/hw/mlx5/data_direct.c`). No file
//! contains the VUID that the firmware reports. This module therefore compares field V3 of both
//! VPDs, which is the same for all functions of a chip. rdma-core's `rdma_topo` and mstflint do the
//! same.

use std::collections::BTreeMap;

use super::pci::{Address, Function, DEVICES, MELLANOX};
use super::{Hca, Machine, Pair};
use crate::host::{Host, Unseen};

/// Tags of the items in VPD (PCI Local Bus 3.0, appendix I). A large item has bit 7 set, and two
/// bytes of length after the tag.
const LARGE: u8 = 0x80;
const READ_ONLY: u8 = 0x90;
const END: u8 = 0x78;
/// Name of the field that is the same for all functions of a chip.
const V3: &[u8] = b"V3";

/// Returns field V3 of `vpd`, or `None` if the field is missing or `vpd` is not valid VPD.
pub(crate) fn v3(vpd: &[u8]) -> Option<String> {
    let mut rest = vpd;
    loop {
        let (&tag, after) = rest.split_first()?;
        let (length, after) = match tag & LARGE {
            0 if tag & END == END => return None,
            0 => (usize::from(tag & 7), after),
            _ => {
                let (length, after) = after.split_first_chunk::<2>()?;
                (usize::from(u16::from_le_bytes(*length)), after)
            }
        };
        let (item, after) = after.split_at_checked(length)?;
        if tag == READ_ONLY {
            return field(item, V3);
        }
        rest = after;
    }
}

/// Returns the value of field `wanted` in a list of fields. Each field starts with a name of two
/// bytes and a length of one byte.
fn field(mut item: &[u8], wanted: &[u8]) -> Option<String> {
    loop {
        let (name, after) = item.split_at_checked(2)?;
        let (&length, after) = after.split_first()?;
        let (value, after) = after.split_at_checked(usize::from(length))?;
        if name == wanted {
            let text = std::str::from_utf8(value)
                .ok()?
                .trim_end_matches('\0')
                .trim();
            return (!text.is_empty()).then(|| text.to_owned());
        }
        item = after;
    }
}

/// Returns VPD that contains only field V3, or `None` if the value is too long.
pub(crate) fn vpd_of(v3: &str) -> Option<Vec<u8>> {
    let length = u8::try_from(v3.len()).ok()?;
    let [low, high] = u16::from(length).checked_add(3)?.to_le_bytes();
    let mut vpd = vec![READ_ONLY, low, high];
    vpd.extend_from_slice(V3);
    vpd.push(length);
    vpd.extend_from_slice(v3.as_bytes());
    vpd.push(END);
    Some(vpd)
}

/// Gives each RDMA device its Data Direct function, if the machine has one. Returns an error if the
/// VPD of a function cannot be read.
pub(super) fn assign(
    host: &dyn Host,
    functions: &BTreeMap<Address, Function>,
    hcas: &mut [Hca],
) -> Result<(), Unseen> {
    let mut unseen = None;
    // Reading VPD is slow. The VPD of RDMA devices is therefore read only if the machine has a Data
    // Direct function.
    let mut chip = |at: Address| match host.bytes(&format!("{DEVICES}/{at}/vpd")) {
        Ok(vpd) => v3(&vpd),
        Err(why) => {
            unseen = Some(why);
            None
        }
    };
    let direct: Vec<(Address, String)> = functions
        .values()
        .filter(|function| function.is_data_direct())
        .filter_map(|function| Some((function.at, chip(function.at)?)))
        .collect();
    for hca in hcas {
        // A virtual function has no VPD.
        let own = hca.at.and_then(|at| functions.get(&at));
        let own =
            own.filter(|own| own.vendor == MELLANOX && own.physical.is_none() && !hca.is_software);
        let Some(own) = own.filter(|_| !direct.is_empty()) else {
            continue;
        };
        let Some(v3) = chip(own.at) else { continue };
        let its = direct.iter().filter(|(_, chip)| *chip == v3);
        // If several functions match, the one with the same function number is used, because VUIDs
        // end in the function number.
        hca.data_direct = its
            .map(|(at, _)| *at)
            .min_by_key(|at| (at.function != own.at.function, *at));
    }
    unseen.map_or(Ok(()), Err)
}

impl Machine {
    /// Returns the Data Direct functions whose RDMA device is unknown.
    pub(crate) fn unassigned_data_direct(&self) -> impl Iterator<Item = &Function> {
        let all = self.functions.values();
        let is_assigned = |at: Address| self.hcas.iter().any(|hca| hca.data_direct == Some(at));
        all.filter(move |function| function.is_data_direct() && !is_assigned(function.at))
    }
}

impl Pair {
    /// Returns `true` if this path uses the NIC's Data Direct function.
    pub(crate) fn is_data_direct(&self) -> bool {
        self.own.is_some()
    }

    /// Returns the path through the RDMA device's own function.
    pub(crate) fn by_own_function(&self) -> &Self {
        self.own.as_deref().unwrap_or(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture;
    use crate::fixture::{Fixture, Pci};
    use crate::machine::Class;

    /// Returns the VPD of a ConnectX-7 as lspci shows it, with a changed serial number.
    fn real() -> Vec<u8> {
        let fields: &[(&str, &str)] = &[
            ("PN", "MCX713106AEHEA_QP1"),
            ("EC", "A5"),
            ("V2", "MCX713106AEHEA_QP1"),
            ("SN", "MT0000X00000"),
            ("V3", "0a5efb8958deed118000946dae000000"),
            ("VA", "MLX:MN=MLNX:CSKU=V2:UUID=V3:PCI=V0:MODL=CX713106A"),
            ("V0", "PCIeGen5 x16"),
            ("VU", "MT0000X00000MLNXS0D0F0"),
            ("RV", "\u{7}\0"),
        ];
        let mut item = Vec::new();
        for (name, value) in fields {
            item.extend_from_slice(name.as_bytes());
            item.push(u8::try_from(value.len()).unwrap());
            item.extend_from_slice(value.as_bytes());
        }
        let name = b"ConnectX-7";
        let mut vpd = vec![0x82, u8::try_from(name.len()).unwrap(), 0];
        vpd.extend_from_slice(name);
        vpd.push(READ_ONLY);
        vpd.extend_from_slice(&u16::try_from(item.len()).unwrap().to_le_bytes());
        vpd.extend_from_slice(&item);
        vpd.push(END);
        vpd
    }

    #[test]
    fn the_chip_is_read() {
        let vpd = real();
        let chip = "0a5efb8958deed118000946dae000000";
        assert_eq!(v3(&vpd).as_deref(), Some(chip));
        // Anything may follow the end tag.
        let longer = [&vpd[..], &[0xff; 100]].concat();
        assert_eq!(v3(&longer).as_deref(), Some(chip));
        // Truncated VPD is rejected. Only the end tag may be missing.
        assert_eq!(v3(&vpd[..vpd.len() - 1]).as_deref(), Some(chip));
        for length in 0..vpd.len() - 1 {
            let cut = v3(&vpd[..length]);
            assert!(cut.is_none(), "{length}: {cut:?}");
        }
        assert_eq!(v3(&[END]), None);
        assert_eq!(v3(&[0xff; 300]), None);
    }

    #[test]
    fn what_is_written_is_read_again() {
        for chip in ["", "a", &"x".repeat(255)] {
            let vpd = vpd_of(chip).unwrap();
            assert_eq!(v3(&vpd).as_deref(), (!chip.is_empty()).then_some(chip));
        }
        assert_eq!(vpd_of(&"x".repeat(256)), None);
    }

    /// Returns the Data Direct function of each RDMA device, the unassigned functions, and `true`
    /// if all VPD could be read.
    fn assigned(fixture: &Fixture) -> (Vec<Option<String>>, Vec<String>, bool) {
        let machine = Machine::scan(&fixture.recording).unwrap();
        let name = |at: Address| at.to_string();
        let own = machine.hcas.iter().map(|hca| hca.data_direct.map(name));
        let none = machine.unassigned_data_direct();
        let none = none.map(|function| name(function.at));
        let is_whole = machine.data_direct_unseen.is_none();
        (own.collect(), none.collect(), is_whole)
    }

    #[test]
    fn a_data_direct_function_belongs_to_the_rdma_device_of_its_chip() {
        let some = |at: &str| Some(at.to_owned());
        let (first, second) = ("0009:03:00.0", "0008:03:00.0");
        let well = fixture::data_direct();
        assert_eq!(
            assigned(&well),
            (vec![some(first), some(second)], vec![], true)
        );
        // A function with any PCI class is recognised.
        let mut odd = well.clone();
        let own = odd.place(first);
        odd.file(&format!("{own}/class"), "0x020700\n");
        assert_eq!(assigned(&odd), assigned(&well));
        // The function belongs to another chip, so no RDMA device gets the function.
        let mut other = well.clone();
        other.vpd(first, "another");
        assert_eq!(
            assigned(&other),
            (vec![None, some(second)], vec![first.to_owned()], true)
        );
        // Two ports of a chip share a Data Direct function. If there are two functions, each device
        // gets the function with the device's function number.
        let mut ports = well.clone();
        let chip = "0a5efb8958deed118000946dae000000";
        ports.pci("0000:02:00.0", "0000:03:00.1", &Pci::connectx8(0));
        ports.hca("mlx5_2", "0000:03:00.1", "ibp3s1", "InfiniBand", "?");
        ports.vpd("0000:03:00.1", chip);
        let (own, none, _) = assigned(&ports);
        assert_eq!((&own[2], none), (&some(first), vec![]));
        ports.pci("0009:02:00.0", "0009:03:00.1", &Pci::data_direct(0));
        ports.vpd("0009:03:00.1", chip);
        let (own, none, _) = assigned(&ports);
        assert_eq!(own, [some(first), some(second), some("0009:03:00.1")]);
        assert!(none.is_empty(), "{none:?}");
        // Without root, VPD is not readable, so no RDMA device gets a Data Direct function.
        let mut unprivileged = well;
        unprivileged.unprivileged();
        let all = vec![second.to_owned(), first.to_owned()];
        assert_eq!(assigned(&unprivileged), (vec![None, None], all, false));
        // VPD is not read on machines without a Data Direct function.
        assert!(assigned(&fixture::hgx()).2);
    }

    #[test]
    fn a_pair_uses_data_direct_only_below_a_common_switch() {
        let mut fixture = fixture::data_direct();
        let classes = |fixture: &Fixture, gpu: usize, hca: &str| {
            let machine = Machine::scan(&fixture.recording).unwrap();
            let pair = machine.pair_of(machine.gpus[gpu].at, hca).unwrap();
            let own = pair.by_own_function();
            (
                pair.class,
                pair.is_data_direct(),
                own.class,
                own.nic,
                pair.is_best,
            )
        };
        let nic = "0000:03:00.0".parse().ok();
        let by_own = (Some(Class::Node), false, Some(Class::Node), nic, false);
        assert_eq!(
            classes(&fixture, 1, "mlx5_0"),
            (Some(Class::Pxb), true, Some(Class::Node), nic, true)
        );
        assert_eq!(classes(&fixture, 0, "mlx5_0"), by_own);
        // If field V3 of the two VPDs differs, the RDMA device does not use the Data Direct
        // function.
        fixture.vpd("0000:03:00.0", "another");
        assert_eq!(
            classes(&fixture, 1, "mlx5_0"),
            (by_own.0, false, by_own.2, nic, true)
        );
    }

    proptest::proptest! {
        #[test]
        fn no_vpd_is_a_panic(bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..300)) {
            v3(&bytes);
        }
    }
}
