// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! State of the module: loaded or not, and this project's or NVIDIA's.

use super::dma_buf::DmaBuf;
use super::module_file;
use super::module_file::Cause;
use crate::doctor::scan::{check, Scan};
use crate::finding::{Finding, Level, Subject};
use crate::software::{is_ours, log, Module, MODULE};

check! {
    "module": "whether nvidia_peermem is loaded, or why not; whether it is NVIDIA's or peermem-rs; whether it fits the \
        driver; whether its file would load",
    |scan| scan.has_both(), check, OfSoftware(tests::FAULTS)
}

fn check(scan: &Scan<'_>) -> Vec<Finding> {
    let software = scan.software();
    match &software.module {
        Err(why) => vec![Scan::unseen(Subject::Machine, MODULE, why)],
        Ok(Some(module)) => {
            let mut findings = loaded(scan, module);
            findings.extend(module_file::cause(scan).map(next_time));
            findings.extend(replaced(scan));
            findings
        }
        // Other checks report the cause: no peer memory in ib_core, an nvidia.ko that does not fit
        // peermem-rs, or no nvidia.ko.
        Ok(None) if software.lacks_peer_memory() || scan.is_closed_to_ours() => Vec::new(),
        Ok(None) if software.nvidia().is_none() => Vec::new(),
        Ok(None) => std::iter::once(missing(scan))
            .chain(replaced(scan))
            .collect(),
    }
}

/// Reports a fault of the module's file, which takes effect at the next load.
fn next_time(mut cause: Cause) -> Finding {
    cause.found = format!("nvidia_peermem would not load again: {}", cause.found);
    cause.at(Level::Warning)
}

fn replaced(scan: &Scan<'_>) -> Option<Finding> {
    Some(module_file::replaced(scan)?.at(Level::Warning))
}

fn loaded(scan: &Scan<'_>, module: &Module) -> Vec<Finding> {
    let software = scan.software();
    if software.has_forerunner {
        return vec![Subject::Machine.warning(format!(
            "nv_peer_mem is loaded beside {}", module.named()
        ))
        .why("both are clients of ib_core for the same memory, and ib_core first asks the client that registered first")
        .fix("`rmmod nv_peer_mem`, and remove its package (nvidia-peer-memory, nvidia-peer-memory-dkms)")];
    }
    let driver = software.nvidia().and_then(|it| it.version.as_ref());
    match (&module.version, driver) {
        // The version of NVIDIA's nvidia_peermem equals the driver's version. The version of
        // peermem-rs contains the version of the NVIDIA driver whose module it replaces
        // (`595.45.04-rs1`). This driver need not be the loaded one.
        (Some(version), Some(driver)) if !module.is_ours && version != driver => {
            vec![Subject::Machine.warning(format!(
                "{} does not belong to the loaded driver, {driver}", module.named()
            ))
            .why("it was built for another nvidia.ko, whose page tables may differ: registrations then fail")
            .fix("install the driver again, `rmmod nvidia_peermem`, `modprobe nvidia-peermem`")]
        }
        _ => vec![Subject::Machine.ok(format!("{} is loaded", module.named()))],
    }
}

fn missing(scan: &Scan<'_>) -> Finding {
    let software = scan.software();
    if software.has_forerunner {
        return Subject::Machine.warning(
            "nv_peer_mem is loaded instead of nvidia_peermem".to_owned()
        )
        .why(
            "NVIDIA's nvidia-peermem replaced this module in 2021: nothing has been fixed in it since, it has no \
            persistent pins, and software that looks for nvidia_peermem does not find it",
        )
        .fix(
            "`rmmod nv_peer_mem`, remove its package (nvidia-peer-memory, nvidia-peer-memory-dkms), `modprobe \
            nvidia-peermem`",
        );
    }
    let alternative = DmaBuf::judge(scan);
    let level = alternative.level_without_module(software.is_wanted());
    let records = software.log.as_deref().unwrap_or_default();
    let refused = log::not_loaded(records);
    let cause = module_file::cause(scan);
    let because = cause
        .as_ref()
        .map_or(String::new(), |cause| format!("{}; ", cause.why));
    let (found, fix) = match (cause, &software.installed, &refused) {
        // The log shows an earlier attempt, but the file shows the present state.
        (Some(cause), ..) => (
            format!("nvidia_peermem is not loaded, and modprobe would fail: {}", cause.found),
            format!("{}; then `sudo modprobe nvidia-peermem`", cause.fix),
        ),
        (None, _, Some(refused)) if refused.is_of_file && module_file::would_load(scan) => (
            format!("nvidia_peermem is not loaded; at the last attempt, the kernel's log said: {}", refused.line),
            format!(
                "`sudo modprobe nvidia-peermem`: according to its file, the module would load now; otherwise {}",
                refused.advice
            ),
        ),
        (None, _, Some(refused)) => (
            format!("nvidia_peermem is not loaded; the kernel's log says: {}", refused.line),
            refused.advice.to_owned(),
        ),
        (None, Ok(Some(file)), None) => {
            let whose = if is_ours(file) {
                "peermem-rs"
            } else {
                "NVIDIA's"
            };
            let unread = module_file::unread(scan);
            let unread = unread.map_or(String::new(), |why| format!(", which cannot be read: {why}"));
            (
                format!("nvidia_peermem is not loaded; modprobe would load {file} ({whose}){unread}"),
                format!("`sudo modprobe nvidia-peermem`{}", signature(scan)),
            )
        }
        (None, Ok(None), None) => (
            "nvidia_peermem is not loaded, and modprobe has no such module for this kernel".to_owned(),
            "build and install peermem-rs for this kernel (docs/install.md), or install the driver again, with its \
            kernel modules"
                .to_owned(),
        ),
        (None, Err(_), None) => (
            "nvidia_peermem is not loaded".to_owned(),
            "`sudo modprobe nvidia-peermem`; modprobe's message says more".to_owned(),
        ),
    };
    Finding::new(level, Subject::Machine, found)
        .why(format!(
            "{because}ib_core asks nvidia_peermem about each address that is not host memory; libfabric's verbs \
            provider and RCCL assume that nvidia_peermem is loaded if ib_core has the function to register; {}",
            alternative.said()
        ))
        .costs(alternative.costs_without_module())
        .fix(fix)
}

/// Returns advice about signing the module, if this kernel accepts only signed modules.
fn signature(scan: &Scan<'_>) -> &'static str {
    match module_file::is_enforced(scan) {
        true => {
            "; this kernel only accepts signed modules: sign the module with a key that the machine knows \
            (docs/install.md, Secure Boot)"
        }
        false => "",
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{
        faults, log, nvidias, proprietary, unload, with_files, without_function, NVIDIAS, OUR_FILE,
        PEERS,
    };
    use crate::fixture::software::module_files;
    use crate::host::module_files::File;
    use crate::software::{MODULE, REGISTER};

    faults! {
        "installed and not loaded, and dma-buf works", "warning module: …sudo modprobe nvidia-peermem" => unload;
        "not loaded, and only the driver's own module is installed",
            "note module: …updates/dkms/nvidia-peermem.ko (NVIDIA's)" => |fixture| {
            nvidias(fixture, "570.86.15");
            fixture.remove(MODULE);
        };
        "not loaded, and there is no other way", "fault module: …updates/peermem-rs/nvidia_peermem.ko (peermem-rs)" =>
            |fixture| {
                unload(fixture);
                without_function(fixture, "mlx5_ib_reg_user_mr_dmabuf");
            };
        "not loaded, and another way may not be visible",
            "warning module: …modprobe", "not_visible dma-buf: …nvidia.ko's flavour" => |fixture| {
            unload(fixture);
            fixture.deny("/proc/driver/nvidia/version");
            // Only the driver's presence is known.
            fixture.file("/proc/driver/nvidia/version", "NVRM version: x\n");
        };
        "not loaded and not installed", "note module: …modprobe has no such module" => |fixture| {
            unload(fixture);
            fixture.file("/lib/modules/6.8.0-45-generic/modules.dep", "updates/dkms/nvidia.ko:\n");
        };
        "not loaded, since symbols differ", "warning module: …disagrees about version" => |fixture| {
            unload(fixture);
            log(fixture, &[
                "nvidia_peermem: disagrees about version of symbol ib_register_peer_memory_client",
                "nvidia_peermem: Unknown symbol ib_register_peer_memory_client (err -22)",
            ]);
        };
        "not loaded, since symbols differed before it was built again",
            "warning module: …at the last attempt, the kernel's log said: nvidia_peermem: disagrees" => |fixture| {
            with_files(fixture, OUR_FILE, |_| ());
            log(fixture, &["nvidia_peermem: disagrees about version of symbol ib_register_peer_memory_client"]);
        };
        "not loaded, since it is not signed", "warning module: …Secure Boot" => |fixture| {
            unload(fixture);
            fixture.file("/sys/kernel/security/lockdown", "none [integrity] confidentiality\n");
        };
        "NVIDIA's, built before OFED was installed", "note module: …never calls ib_register_peer_memory_client" =>
            |fixture| {
                with_files(fixture, NVIDIAS, |files| {
                    files.module.needs.retain(|name, _| !name.contains("peer_memory"));
                });
            };
        "ours, built against another OFED",
            "warning module: …another OFED: ib_register_peer_memory_client has the CRC 0x3b6d0a1c in it, and \
             0x00001234 in updates/dkms/ib_uverbs.ko; 1 more differ" => |fixture| {
            with_files(fixture, OUR_FILE, |files| {
                for crc in files.others[0].exports.values_mut() {
                    *crc = Some(0x1234);
                }
            });
        };
        "ours, built against another OFED, whose path has the vendor's name in it",
            "warning module: …built against another OFED" => |fixture| {
            with_files(fixture, OUR_FILE, |files| {
                files.others[0].path = "/lib/modules/6.8.0-45-nvidia/updates/dkms/ib_uverbs.ko".to_owned();
                files.others[0].exports.insert(REGISTER.to_owned(), Some(1));
            });
        };
        "ours, built against another driver", "warning module: …another driver: nvidia_p2p_put_pages has the CRC" =>
            |fixture| {
                with_files(fixture, OUR_FILE, |files| {
                    files.others[1].exports.insert("nvidia_p2p_put_pages".to_owned(), Some(1));
                });
            };
        "ours is loaded, and OFED was upgraded after the build",
            "warning module: …would not load again: updates/peermem-rs/nvidia_peermem.ko was built against" =>
            |fixture| {
                let mut files = module_files(OUR_FILE);
                files.others[0].exports.insert(REGISTER.to_owned(), Some(1));
                fixture.module_files(&files);
            };
        "ours is loaded, and the driver was upgraded without a reboot",
            "warning module: …the loaded nvidia is not the one in updates/dkms/nvidia.ko" =>
            |fixture| fixture.file("/sys/module/nvidia/srcversion", "F00D\n");
        "of another kernel", "note module: …built for Linux 6.8.0-31-generic, but 6.8.0-45-generic is running" => |fixture| {
            with_files(fixture, NVIDIAS, |files| {
                files.module.vermagic = Some("6.8.0-31-generic SMP mod_unload".to_owned());
                files.module.needs.values_mut().for_each(|crc| *crc = None);
            });
        };
        "a symbol that the driver lacks",
            "warning module: …calls nvidia_p2p_get_pages, but no installed module has it" => |fixture| {
            with_files(fixture, OUR_FILE, |files| {
                files.others[1].exports.remove("nvidia_p2p_get_pages");
            });
        };
        "not signed, and the kernel asks for it",
            "warning module: …is not signed, and this kernel only accepts signed modules" => |fixture| {
            with_files(fixture, OUR_FILE, |files| files.module.is_signed = false);
            fixture.file("/sys/module/module/parameters/sig_enforce", "Y\n");
        };
        "a file that cannot be read",
            "warning module: …(peermem-rs), which cannot be read: it is compressed (gzip): " => |fixture| {
            with_files(fixture, OUR_FILE, |files| {
                files.module = File {
                    path: OUR_FILE.to_owned(),
                    unread: Some("it is compressed (gzip): corrupt deflate stream".to_owned()),
                    ..File::default()
                };
            });
        };
        "nv_peer_mem in its place", "warning module: …rmmod nv_peer_mem" => |fixture| {
            unload(fixture);
            fixture.file("/sys/module/nv_peer_mem/version", "1.3-0\n");
        };
        "nv_peer_mem beside it", "warning module: …beside nvidia_peermem 595.45.04-rs1" =>
            |fixture| fixture.file("/sys/module/nv_peer_mem/version", "1.3-0\n");
        "NVIDIA's of another driver", "warning module: …550.54.14 (NVIDIA's) does not belong to the loaded driver" =>
            |fixture| {
                nvidias(fixture, "550.54.14");
                fixture.file(&format!("{PEERS}/nv_mem/version"), "550.54.14\n");
            };
        // The file would load.
        "ours, built for the proprietary driver, beside it", "fault module: …sudo modprobe nvidia-peermem" =>
            |fixture| {
                unload(fixture);
                proprietary(fixture);
                let mut files = module_files(OUR_FILE);
                files.module.driver_flavour = Some("proprietary".to_owned());
                fixture.module_files(&files);
            };
        "ours in a file that cannot be read, beside the proprietary driver",
            "fault module: …sudo modprobe nvidia-peermem" => |fixture| {
            unload(fixture);
            proprietary(fixture);
            let mut files = module_files(OUR_FILE);
            files.module.unread = Some("it is not an ELF file".to_owned());
            fixture.module_files(&files);
        };
    }
}
