// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Names inside the VM: paths of this machine's files, the search path for programs, and the
//! modules that are loaded first.

use std::path::Path;

/// Environment of a test's command. PATH has only the system's directories, and none of the
/// caller's.
pub(crate) const SYSTEM_PROGRAMS: &str = "PATH=/usr/sbin:/usr/bin:/sbin:/bin";

/// Modules that are loaded before the root is mounted: the modules for the root file system and for
/// the console.
pub(crate) const EARLY: &[&str] = &[
    "virtio_pci",
    "9pnet_virtio",
    "9p",
    "overlay",
    "virtio_console",
];

pub(crate) const DEVICES: &[&str] = &["virtio_net", "udp_tunnel", "ip6_udp_tunnel", "nvme"];

/// Additional early modules of a Debian host.
pub(crate) const EARLY_ON_HOST: &[&str] = &["virtio_net"];

/// Folder in the VM with this machine's files, which `tests/vm/init` mounts. The folder does not
/// depend on the VM's root.
pub(crate) const HOST: &str = "/host";

/// Returns the path in the VM of one of this machine's files. The file's own path may be hidden in
/// the VM, for example below /tmp.
pub(crate) fn in_machine(path: &Path) -> String {
    format!("{HOST}{}", path.display())
}
