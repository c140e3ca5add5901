// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! RDMA devices in another network namespace, and loaded RDMA drivers without a device.
//!
//! In RDMA's exclusive mode (`rdma system`), sysfs shows a device only in its own network
//! namespace. In other namespaces, the NIC of the device has an empty directory `infiniband`.

use crate::doctor::scan::Scan;
use crate::machine::pci::{Address, DEVICES};

/// Drivers of NICs that create RDMA devices.
pub(crate) const DRIVERS: [&str; 8] = [
    "mlx5_ib",
    "mlx4_ib",
    "bnxt_re",
    "irdma",
    "efa",
    "ionic_rdma",
    "mana_ib",
    "hns_roce_hw_v2",
];

/// Advice on access to RDMA devices of another network namespace. The advice sets ib_core's
/// `netns_mode` at boot, because the mode can change only while there is a single network
/// namespace.
pub(crate) const FIX: &str = "use the network namespace of the host (docker run --network host, hostNetwork: true in \
Kubernetes), or move the devices from there into this namespace: `sudo rdma dev set mlx5_0 netns NAME`; 'options ib_core \
netns_mode=1' in /etc/modprobe.d and a reboot share the devices between all namespaces (`rdma system show`)";

/// Returns `true` if a NIC has an RDMA device that this network namespace does not show.
pub(crate) fn is_elsewhere(scan: &Scan<'_>, at: Address) -> bool {
    let names = scan.host.names(&format!("{DEVICES}/{at}/infiniband"));
    names.is_ok_and(|names| names.is_empty())
}

/// Returns the NICs whose RDMA devices this network namespace does not show.
pub(crate) fn elsewhere(scan: &Scan<'_>) -> Vec<Address> {
    let nics = scan.machine.functions.keys().copied();
    nics.filter(|at| is_elsewhere(scan, *at)).collect()
}

/// Returns the loaded RDMA drivers.
pub(crate) fn loaded<'s>(scan: &'s Scan<'_>) -> impl Iterator<Item = &'static str> + 's {
    let is_loaded = |driver: &&str| scan.host.has(&format!("/sys/module/{driver}")) == Ok(true);
    DRIVERS.into_iter().filter(is_loaded)
}
