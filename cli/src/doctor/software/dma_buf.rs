// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Registration of GPU memory by dma-buf, without a peer-memory module. The requirements of dma-buf
//! are listed in docs/dma-buf.md.

use crate::doctor::scan::{check, Scan};
use crate::finding::{Finding, Level, Subject};
use crate::machine::Hca;

check! {
    "dma-buf": "whether GPU memory can be registered by dma-buf, without the module",
    |scan| scan.has_both(), check, OfSoftware(tests::FAULTS)
}

/// First kernel with dma-buf in RDMA (perftest's README).
const OLDEST_KERNEL: (u32, u32) = (5, 12);
/// First release of the open kernel modules with dma-buf (perftest's README).
const OLDEST_DRIVER: u32 = 515;

/// PCI driver and RDMA driver of NICs that register dma-buf. These RDMA drivers implement
/// `reg_user_mr_dmabuf` in Linux 7.3.
const DRIVERS: [(&str, &str); 10] = [
    ("bnxt_en", "bnxt_re"),
    ("bnxt_re", "bnxt_re"),
    ("efa", "efa"),
    ("gdma", "mana_ib"),
    ("i40e", "irdma"),
    ("ice", "irdma"),
    ("idpf", "irdma"),
    ("ionic", "ionic"),
    ("mana", "mana_ib"),
    ("mlx5_core", "mlx5_ib"),
];

/// Evidence for and against registering GPU memory by dma-buf.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct DmaBuf {
    /// Evidence for dma-buf: `kernel 6.8`.
    has: Vec<String>,
    /// Evidence against dma-buf.
    lacks: Vec<String>,
    /// Requirements that could not be checked.
    unknown: Vec<String>,
}

impl DmaBuf {
    /// Collects the evidence on this machine.
    pub(super) fn judge(scan: &Scan<'_>) -> Self {
        let mut it = Self::default();
        it.kernel(scan);
        it.driver(scan);
        it.nics(scan);
        it
    }

    fn kernel(&mut self, scan: &Scan<'_>) {
        let software = scan.software();
        let symbols = software.symbols.as_deref().unwrap_or_default();
        // Distributions have backported dma-buf to older kernels.
        if symbols.iter().any(|it| it.name == "ib_umem_dmabuf_get") {
            self.has.push("an ib_core with dma-buf".to_owned());
            return;
        }
        match software.kernel.as_deref().map(release) {
            Ok(Some(version)) if version >= OLDEST_KERNEL => {
                self.has.push(format!("kernel {}.{}", version.0, version.1));
            }
            Ok(Some(version)) => self.lacks.push(format!(
                "kernel {}.{} is older than 5.12",
                version.0, version.1
            )),
            Ok(None) | Err(_) => self.unknown.push("the kernel's version".to_owned()),
        }
    }

    fn driver(&mut self, scan: &Scan<'_>) {
        // The stand-in GPU of the test VM exports no dma-buf.
        if scan.gpus().all(|gpu| gpu.is_stand_in) {
            self.lacks
                .push("the stand-in GPU has no dma-buf".to_owned());
            return;
        }
        match &scan.software().driver {
            Ok(Some(driver)) => match (driver.is_open, driver.major()) {
                (Some(true), Some(major)) if major >= OLDEST_DRIVER => {
                    self.has.push(driver.named());
                }
                (Some(true), Some(_)) => self
                    .lacks
                    .push(format!("{} is older than 515", driver.named())),
                (Some(false), _) => self.lacks.push(format!(
                    "{}: dma-buf needs the open nvidia.ko",
                    driver.named()
                )),
                _ => self.unknown.push("nvidia.ko's flavour".to_owned()),
            },
            Ok(None) => self.lacks.push("nvidia.ko is not loaded".to_owned()),
            Err(_) => self.unknown.push("nvidia.ko's flavour".to_owned()),
        }
    }

    fn nics(&mut self, scan: &Scan<'_>) {
        let mut can: Vec<&str> = scan
            .hcas()
            .filter_map(|hca| rdma_driver(scan, hca))
            .collect();
        can.sort_unstable();
        can.dedup();
        let drivers: Vec<&str> = scan
            .hcas()
            .map(|hca| hca.driver.as_deref().unwrap_or("software"))
            .collect();
        if !can.is_empty() {
            self.has.push(can.join(", "));
        } else if drivers.is_empty() {
            self.unknown.push("the NIC's driver".to_owned());
        } else {
            self.lacks.push(format!(
                "no RDMA driver here registers dma-buf ({})",
                drivers.join(", ")
            ));
        }
    }

    /// Returns `true` if dma-buf works, or `None` if unknown.
    pub(super) fn works(&self) -> Option<bool> {
        if !self.lacks.is_empty() {
            Some(false)
        } else if self.unknown.is_empty() {
            Some(true)
        } else {
            None
        }
    }

    /// Returns the level of a missing peer-memory module. `is_wanted` is `true` if the machine
    /// shows that a user wants the module ([`crate::software::Software::is_wanted`]).
    pub(super) fn level_without_module(&self, is_wanted: bool) -> Level {
        match self.works() {
            Some(true) if !is_wanted => Level::Note,
            Some(false) => Level::Fault,
            _ => Level::Warning,
        }
    }

    /// Returns the cost of a missing peer-memory module.
    pub(super) fn costs_without_module(&self) -> &'static str {
        match self.works() {
            Some(true) => {
                "software that registers by dma-buf (NCCL, UCX and NVSHMEM try it first) loses nothing; software \
                that only calls ibv_reg_mr on GPU memory gets EFAULT, unless it runs with \
                LD_PRELOAD=libpeermem_preload.so (docs/dma-buf.md)"
            }
            Some(false) => {
                "there is no GPUDirect RDMA at all: NCCL, UCX and others copy through the host, mostly without \
                 saying so"
            }
            None => "software that does not register by dma-buf copies through the host, or gets EFAULT",
        }
    }

    /// Formats the result as a clause.
    pub(super) fn said(&self) -> String {
        match self.works() {
            Some(true) => format!("dma-buf should work here ({})", self.has.join("; ")),
            Some(false) => format!("dma-buf does not work here ({})", self.lacks.join("; ")),
            None => format!(
                "it is not visible whether dma-buf works here ({})",
                self.unknown.join("; ")
            ),
        }
    }
}

/// Returns the first two numbers of a kernel's release.
fn release(text: &str) -> Option<(u32, u32)> {
    let mut numbers = text.split(|character: char| !character.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

/// Returns the RDMA driver of a NIC, if the driver registers dma-buf.
fn rdma_driver<'a>(scan: &Scan<'_>, hca: &'a Hca) -> Option<&'a str> {
    if hca.is_software {
        return None;
    }
    let driver = hca.driver.as_deref()?;
    let known = DRIVERS.iter().find(|(pci, _)| *pci == driver);
    let rdma = known.map_or(driver, |(_, rdma)| rdma);
    match &scan.software().symbols {
        // The loaded symbols decide, because OFED's drivers can be newer or older than the kernel.
        Ok(symbols) => {
            let function = format!("{rdma}_reg_user_mr_dmabuf");
            symbols
                .iter()
                .any(|symbol| symbol.name == function)
                .then_some(rdma)
        }
        Err(_) => known.map(|_| rdma),
    }
}

fn check(scan: &Scan<'_>) -> Vec<Finding> {
    let dma_buf = DmaBuf::judge(scan);
    let at = |level| Finding::new(level, Subject::Machine, dma_buf.said());
    let finding = match dma_buf.works() {
        Some(true) => at(Level::Ok).why("dma-buf needs no nvidia_peermem (docs/dma-buf.md)"),
        // If no peer-memory module is loaded, the finding about the missing module already says
        // that dma-buf does not work. That finding is a fault, and this one would be a note.
        Some(false) if scan.software().loaded().is_none() => return Vec::new(),
        Some(false) => at(Level::Note).why(
            "all registrations of GPU memory go through nvidia_peermem; NCCL, UCX and NVSHMEM would use dma-buf if \
            it worked",
        ),
        None => at(Level::NotVisible),
    };
    vec![finding]
}

#[cfg(test)]
mod tests {
    use super::super::tests::{faults, nvidias, proprietary, PEERS};
    use super::*;
    use crate::testing::no_panic;

    faults! {
        "ours loaded beside the proprietary driver, and the file that is installed is another build",
            "note dma-buf: …proprietary" => proprietary;
        // The module works, but dma-buf does not.
        "NVIDIA's beside the proprietary driver", "note dma-buf: …dma-buf needs the open nvidia.ko" => |fixture| {
            nvidias(fixture, "570.86.15");
            fixture.file(&format!("{PEERS}/nv_mem/version"), "570.86.15\n");
            proprietary(fixture);
        };
    }

    #[test]
    fn releases() {
        assert_eq!(release("6.8.0-45-generic"), Some((6, 8)));
        assert_eq!(release("7.3.4+deb13-amd64"), Some((7, 3)));
        assert_eq!(release("7.3-rc1"), Some((7, 3)));
        assert_eq!(release("7"), None);
        assert_eq!(release(""), None);
    }

    no_panic!(no_release_is_a_panic: release);
}
