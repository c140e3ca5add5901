// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Facts extracted from files that are too large, or too personal, to be recorded in full.

use std::fs;
use std::io::{BufRead as _, BufReader};

use super::{Host, Seen, Unseen};

/// Functions that show where peer memory and dma-buf come from.
const SYMBOLS: [&str; 6] = [
    "ib_register_peer_memory_client",
    "ib_umem_dmabuf_get",
    "nvidia_p2p_dma_map_pages",
    "nvidia_p2p_get_pages",
    "nvidia_p2p_get_pages_persistent",
    "nvidia_p2p_put_pages",
];
/// Suffix of the function that registers a dma-buf. Each RDMA driver puts its own name before the
/// suffix.
const DMA_BUF: &str = "_reg_user_mr_dmabuf";

/// Services that start RDMA processes and pass on their limits. sshd is not in the list, because
/// PAM sets the limits of a login.
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

/// Returns type, name and module of a line of `/proc/kallsyms`, without the address, if the symbol
/// matters.
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
/// because modules come last.
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
    for name in host.names("/proc")? {
        let Ok(pid) = name.parse::<u32>() else {
            continue;
        };
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

/// Returns the soft and hard limit of the line `Max locked memory` in `/proc/PID/limits`,
/// unchanged.
pub(crate) fn memory_lock(line: &str) -> Option<&str> {
    let rest = line.strip_prefix("Max locked memory")?.trim();
    Some(rest.strip_suffix("bytes").unwrap_or(rest).trim_end())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn symbols_lose_their_address() {
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
}
