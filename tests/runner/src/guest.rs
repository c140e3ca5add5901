// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! The machine as seen from inside: names of the host's files, programs, and the modules that are loaded first.

use std::path::Path;

/// For the environment of a test's command: what the caller has put before the system's programs is not to be tested.
pub(crate) const SYSTEM_PROGRAMS: &str = "PATH=/usr/sbin:/usr/bin:/sbin:/bin";

/// Modules that are loaded before the root is mounted: those of the root, and those of the console.
pub(crate) const EARLY: &[&str] = &[
    "virtio_pci",
    "9pnet_virtio",
    "9p",
    "overlay",
    "virtio_console",
];

/// Drivers of the machine's devices.
pub(crate) const DEVICES: &[&str] = &["virtio_net", "udp_tunnel", "ip6_udp_tunnel", "nvme"];

/// Further early modules of a host.
pub(crate) const EARLY_ON_HOST: &[&str] = &["virtio_net"];

/// Where the machine sees the host's files, whatever its root is and whatever it mounts: `tests/vm/init` lays them there.
pub(crate) const HOST: &str = "/host";

/// The machine's name of one of the host's files. The host's own name may be hidden there, below /tmp, say.
pub(crate) fn in_machine(path: &Path) -> String {
    format!("{HOST}{}", path.display())
}
