// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Is the module loaded, and whose is it?

use super::dma_buf::DmaBuf;
use super::module_file;
use super::module_file::Cause;
use crate::doctor::scan::Scan;
use crate::finding::{Finding, Level, Subject};
use crate::software::{is_ours, log, Module, MODULE};

/// The check's name.
pub(super) const NAME: &str = "module";

pub(super) fn check(scan: &Scan<'_>) -> Vec<Finding> {
    let software = scan.software();
    match &software.module {
        Err(why) => vec![Scan::unseen(NAME, Subject::Machine, MODULE, why)],
        Ok(Some(module)) => {
            let mut findings = loaded(scan, module);
            findings.extend(module_file::cause(scan).map(next_time));
            findings.extend(replaced(scan));
            findings
        }
        // Each of these has a finding of its own, from which this follows.
        Ok(None) if software.lacks_peer_memory() || scan.is_closed_to_ours() => Vec::new(),
        Ok(None) if software.nvidia().is_none() => Vec::new(),
        Ok(None) => std::iter::once(missing(scan))
            .chain(replaced(scan))
            .collect(),
    }
}

/// What is loaded is not its file's concern; a reboot makes it so.
fn next_time(mut cause: Cause) -> Finding {
    cause.found = format!("nvidia_peermem would not load again: {}", cause.found);
    cause.at(NAME, Level::Warning)
}

fn replaced(scan: &Scan<'_>) -> Option<Finding> {
    Some(module_file::replaced(scan)?.at(NAME, Level::Warning))
}

fn loaded(scan: &Scan<'_>, module: &Module) -> Vec<Finding> {
    let at = |level, text: String| Finding::new(NAME, level, Subject::Machine, text);
    let software = scan.software();
    if software.has_forerunner {
        return vec![at(
            Level::Warning,
            format!("nv_peer_mem is loaded beside {}", module.named()),
        )
        .why("both are clients of ib_core's for the same memory, and the one that came first is asked first")
        .fix("`rmmod nv_peer_mem`, and remove its package (nvidia-peer-memory, nvidia-peer-memory-dkms)")];
    }
    let driver = software.nvidia().and_then(|it| it.version.as_ref());
    match (&module.version, driver) {
        // NVIDIA's is built with the driver and has its version; ours names the driver that it follows.
        (Some(version), Some(driver)) if !module.is_ours && version != driver => {
            vec![at(
                Level::Warning,
                format!("{} is not of the driver that is loaded, {driver}", module.named()),
            )
            .why("it was built for another nvidia.ko, whose page tables may look otherwise: registrations then fail")
            .fix("install the driver again, `rmmod nvidia_peermem`, `modprobe nvidia-peermem`")]
        }
        _ => vec![at(Level::Ok, format!("{} is loaded", module.named()))],
    }
}

fn missing(scan: &Scan<'_>) -> Finding {
    let at = |level, text: String| Finding::new(NAME, level, Subject::Machine, text);
    let software = scan.software();
    if software.has_forerunner {
        return at(
            Level::Warning,
            "nv_peer_mem is loaded in the place of nvidia_peermem".to_owned(),
        )
        .why(
            "it is the module that NVIDIA's replaced in 2021: nothing was fixed in it since, it has no persistent \
            pins, and software that looks for nvidia_peermem does not find it",
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
        // The log tells of the past, the file of now.
        (Some(cause), ..) => (
            format!("nvidia_peermem is not loaded, and modprobe would fail: {}", cause.found),
            format!("{}; then `sudo modprobe nvidia-peermem`", cause.fix),
        ),
        (None, _, Some(refused)) if refused.is_of_file && module_file::would_load(scan) => (
            format!("nvidia_peermem is not loaded; when it was tried last, the kernel's log said: {}", refused.line),
            format!(
                "`sudo modprobe nvidia-peermem`: by what its file says now, it would load; otherwise {}",
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
            "`sudo modprobe nvidia-peermem`; what it answers says more".to_owned(),
        ),
    };
    at(level, found)
        .why(format!(
            "{because}ib_core asks it about each address that is no memory of the processor; libfabric's verbs provider and \
            RCCL believe in it without looking, since ib_core has the function; {}",
            alternative.said()
        ))
        .costs(alternative.costs_without_module())
        .fix(fix)
}

/// What modprobe may stumble over.
fn signature(scan: &Scan<'_>) -> &'static str {
    match module_file::is_enforced(scan) {
        true => {
            "; this kernel takes signed modules alone: sign it with a key that the machine knows (docs/install.md, \
            Secure Boot)"
        }
        false => "",
    }
}
