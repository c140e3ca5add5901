// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Facts extracted from files that are too large, or too personal, to be recorded in full.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::OpenOptionsExt as _;

use super::{Host, Seen, Unseen};

/// Function that registers a peer-memory module with ib_core.
pub(crate) const REGISTER: &str = "ib_register_peer_memory_client";

/// Functions whose presence shows that a module supports peer memory or dma-buf.
const SYMBOLS: [&str; 6] = [
    REGISTER,
    "ib_umem_dmabuf_get",
    "nvidia_p2p_dma_map_pages",
    "nvidia_p2p_get_pages",
    "nvidia_p2p_get_pages_persistent",
    "nvidia_p2p_put_pages",
];
/// Suffix of the function that registers a dma-buf. Each RDMA driver puts its own name before the
/// suffix.
const DMA_BUF: &str = "_reg_user_mr_dmabuf";

/// Services that start RDMA processes. The processes inherit the service's limits. sshd is not in
/// the list, because PAM sets the limits of a login.
const SERVICES: [&str; 9] = [
    "containerd",
    "crio",
    "dockerd",
    "k3s-server",
    "kubelet",
    "pbs_mom",
    "sge_execd",
    "slurmd",
    "slurmstepd",
];

/// Directory of the device files of RDMA devices.
pub(crate) const DEVICE_FILES: &str = "/dev/infiniband";

/// Name of the fabric manager's process, `nv-fabricmanager`, truncated to 15 bytes by the kernel.
const FABRIC_MANAGER: &str = "nv-fabricmanage";

/// Returns the type, name and module in a line of `/proc/kallsyms`. Returns `None` for a symbol
/// that is not in [`SYMBOLS`] and does not end in [`DMA_BUF`].
fn symbol(line: &str) -> Option<String> {
    let mut words = line.split_whitespace();
    let _address = words.next()?;
    let kind = words.next()?;
    let name = words.next()?;
    let module = words.next().unwrap_or("");
    (SYMBOLS.contains(&name) || name.ends_with(DMA_BUF))
        .then(|| format!("{kind} {name} {module}").trim_end().to_owned())
}

/// Returns [`Fact::KernelSymbols`](super::Fact::KernelSymbols). Reads the whole file, about 10 MB,
/// because the symbols of modules come last.
pub(super) fn symbols() -> Seen<String> {
    let mut lines = Vec::new();
    for line in BufReader::new(fs::File::open("/proc/kallsyms")?).lines() {
        lines.extend(symbol(&line?));
    }
    Ok(lines.join("\n"))
}

/// Returns [`Fact::Services`](super::Fact::Services), from the files of `/proc`.
pub(super) fn services(host: &dyn Host) -> Seen<String> {
    let mut lines = Vec::new();
    for pid in host.processes()? {
        // The process may have ended.
        let Ok(comm) = host.text(&format!("/proc/{pid}/comm")) else {
            continue;
        };
        if !SERVICES.contains(&comm.as_str()) {
            continue;
        }
        let limit = match host.text(&format!("/proc/{pid}/limits")) {
            Ok(limits) => limits.lines().find_map(memory_lock).map(str::to_owned),
            Err(Unseen::Denied) => None,
            Err(_) => continue,
        };
        let limit = limit.as_deref().unwrap_or("? ?");
        lines.push(format!("{comm} {pid} {limit}"));
    }
    Ok(lines.join("\n"))
}

/// Returns `true` if this process sees all processes of the machine. A process in a container with
/// its own PID namespace does not see them.
fn sees_machine(host: &dyn Host) -> bool {
    host.text("/proc/2/comm").as_deref() == Ok("kthreadd")
}

/// Returns [`Fact::Verbs`](super::Fact::Verbs).
pub(super) fn verbs(host: &dyn Host) -> Seen<String> {
    const CLASS: &str = "/sys/class/infiniband_verbs";
    let names = host.names(CLASS)?;
    // A container that sees the host's processes most likely monitors the host, and need not have
    // device files. The host may have device files nevertheless.
    if host.has(DEVICE_FILES) == Ok(false) && sees_machine(host) {
        return Err(Unseen::Failed(
            "not in this container, but the host may have it".to_owned(),
        ));
    }
    let mut lines = Vec::new();
    for name in names.iter().filter(|name| name.starts_with("uverbs")) {
        let Ok(hca) = host.text(&format!("{CLASS}/{name}/ibdev")) else {
            continue;
        };
        let state = match open(name) {
            Ok(()) => "ok".to_owned(),
            Err(Unseen::Absent) => "absent".to_owned(),
            Err(Unseen::Denied) => "denied".to_owned(),
            Err(why) => format!("failed {why}"),
        };
        lines.push(format!("{hca} {name} {state}"));
    }
    Ok(lines.join("\n"))
}

/// Opens a device file as libibverbs does. Opening the file creates no objects on the device.
fn open(name: &str) -> Seen<()> {
    let mut options = fs::OpenOptions::new();
    options.read(true).write(true);
    options.custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC);
    options.open(format!("{DEVICE_FILES}/{name}"))?;
    Ok(())
}

/// Returns [`Fact::FabricManager`](super::Fact::FabricManager).
pub(super) fn fabric_manager(host: &dyn Host) -> Seen<String> {
    if !sees_machine(host) {
        return Err(Unseen::Failed(
            "the machine's processes are not visible from this PID namespace".to_owned(),
        ));
    }
    let is_it = |pid: u32| {
        let comm = host.text(&format!("/proc/{pid}/comm"));
        comm.as_deref() == Ok(FABRIC_MANAGER)
    };
    let word = match host.processes()?.into_iter().any(is_it) {
        true => "running",
        false => "not running",
    };
    Ok(word.to_owned())
}

/// Returns the soft and hard limit of the line `Max locked memory` in `/proc/PID/limits`,
/// unchanged.
pub(crate) fn memory_lock(line: &str) -> Option<&str> {
    let rest = line.strip_prefix("Max locked memory")?.trim();
    Some(rest.strip_suffix("bytes").unwrap_or(rest).trim_end())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::Fixture;

    #[test]
    fn symbols_have_no_address() {
        assert_eq!(
            symbol("ffffffffc0a1b2c0 T ib_register_peer_memory_client\t[ib_uverbs]").as_deref(),
            Some("T ib_register_peer_memory_client [ib_uverbs]")
        );
        assert_eq!(
            symbol("0000000000000000 T mlx5_ib_reg_user_mr_dmabuf\t[mlx5_ib]").as_deref(),
            Some("T mlx5_ib_reg_user_mr_dmabuf [mlx5_ib]")
        );
        assert_eq!(symbol("0000000000000000 T _text"), None);
        assert_eq!(
            symbol("0000000000000000 T ib_register_peer_memory_client_x\t[x]"),
            None
        );
        assert_eq!(symbol("0000000000000000"), None);
        assert_eq!(symbol(""), None);
    }

    #[test]
    fn the_limit_of_a_process() {
        let line = "Max locked memory         8388608              8388608              bytes     ";
        assert_eq!(memory_lock(line), Some("8388608              8388608"));
        assert_eq!(
            memory_lock(
                "Max locked memory         unlimited            unlimited            bytes"
            ),
            Some("unlimited            unlimited")
        );
        assert_eq!(memory_lock("Max file locks  1 1 locks"), None);
    }

    #[test]
    fn a_missing_file_is_absent() {
        assert_eq!(open("none/of/this"), Err(Unseen::Absent));
    }

    #[test]
    fn the_fabric_manager_is_found_where_processes_are_visible() {
        let mut fixture = Fixture::new("processes");
        let state = |fixture: &Fixture| fabric_manager(&fixture.recording);
        assert!(matches!(state(&fixture), Err(Unseen::Failed(_))));
        fixture.file("/proc/2/comm", "kthreadd\n");
        fixture.file("/proc/900/comm", "slurmd\n");
        assert_eq!(state(&fixture).as_deref(), Ok("not running"));
        fixture.file("/proc/901/comm", "nv-fabricmanage\n");
        assert_eq!(state(&fixture).as_deref(), Ok("running"));
    }
}
