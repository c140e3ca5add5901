// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Tests of the checks of software, on a healthy machine and with one fault at a time.

mod causes;

use super::*;
use crate::doctor::scan::Scan;
use crate::doctor::tests::{each_is_told, Faults};
use crate::finding::Level::Note;
use crate::finding::{Finding, Level};
use crate::fixture::software::{driver, limits, module_files};
use crate::fixture::Fixture;
use crate::host::module_files::Files;
use crate::host::Fact;
use crate::software::{MODULE, REGISTER};
use crate::{fixture, testing};

pub(in crate::doctor) const DEBUG: &str = "/sys/kernel/debug/nvidia_peermem";
pub(in crate::doctor) const PEERS: &str = "/sys/kernel/mm/memory_peers";

pub(in crate::doctor) fn healthy() -> Fixture {
    fixture::small().with_software()
}

/// Returns the findings of software checks that are worse than ok.
fn findings(fixture: &Fixture) -> Vec<Finding> {
    let of_all = |scan: &Scan<'_>| -> Vec<Finding> {
        let applying = OF_SOFTWARE.iter().filter(|check| (check.applies)(scan));
        applying.flat_map(|check| check.findings(scan)).collect()
    };
    let all = fixture.scanned(of_all).into_iter();
    all.filter(|finding| finding.level != Level::Ok).collect()
}

/// Changes the machine as if the module had never been loaded.
pub(in crate::doctor) fn unload(fixture: &mut Fixture) {
    fixture.remove(MODULE);
    fixture.remove(PEERS);
    fixture.remove(DEBUG);
    let text = "ib_core 475136 0 - Live 0x0000000000000000 (OE)\n";
    fixture.file("/proc/modules", text);
}

/// Replaces peermem-rs with NVIDIA's nvidia_peermem, on a kernel where ib_core has no
/// `memory_peers`.
pub(in crate::doctor) fn nvidias(fixture: &mut Fixture, version: &str) {
    unload(fixture);
    fixture.file(&format!("{MODULE}/version"), &format!("{version}\n"));
    fixture.file(&format!("{MODULE}/refcnt"), "0\n");
    let parameter = format!("{MODULE}/parameters/persistent_api_support");
    fixture.file(&parameter, "1\n");
    fixture.file(
        "/proc/modules",
        "nvidia_peermem 16384 0 - Live 0x0000000000000000 (OE)\n",
    );
    fixture.file(
        "/lib/modules/6.8.0-45-generic/modules.dep",
        "updates/dkms/nvidia-peermem.ko: updates/dkms/nvidia.ko\n",
    );
}

/// Unloads the module, and changes the contents of the file that modprobe would load.
pub(in crate::doctor) fn with_files(fixture: &mut Fixture, module: &str, change: fn(&mut Files)) {
    unload(fixture);
    let text = format!("{module}: updates/dkms/nvidia.ko\n");
    fixture.file("/lib/modules/6.8.0-45-generic/modules.dep", &text);
    let mut files = module_files(module);
    change(&mut files);
    fixture.module_files(&files);
}

/// Adds an NVSwitch on PCI.
pub(in crate::doctor) fn nvswitch(fixture: &mut Fixture) {
    let place = "/sys/devices/pci0000:00/0000:07:00.0";
    fixture.sysfs_link("/sys/bus/pci/devices/0000:07:00.0", place);
    fixture.file(&format!("{place}/class"), "0x068000\n");
    fixture.file(&format!("{place}/vendor"), "0x10de\n");
    fixture.file(&format!("{place}/device"), "0x22a3\n");
}

pub(in crate::doctor) const NVIDIAS: &str = "updates/dkms/nvidia-peermem.ko";
pub(in crate::doctor) const OUR_FILE: &str = "updates/peermem-rs/nvidia_peermem.ko";

pub(in crate::doctor) fn proprietary(fixture: &mut Fixture) {
    let text = driver("x86_64 Kernel Module");
    fixture.file("/proc/driver/nvidia/version", &text);
}

pub(in crate::doctor) fn without_function(fixture: &mut Fixture, name: &str) {
    let symbols = fixture.recording.facts[&Fact::KernelSymbols].clone();
    let kept: Vec<&str> = symbols
        .lines()
        .filter(|line| !line.contains(name))
        .collect();
    fixture.fact(Fact::KernelSymbols, &kept.join("\n"));
}

/// Changes NVML's report about the first GPU.
pub(in crate::doctor) fn gpu(
    fixture: &mut Fixture,
    change: impl Fn(&mut crate::host::nvml::GpuReport),
) {
    fixture.change_nvml(|nvml| change(&mut nvml.gpus[0]));
}

pub(in crate::doctor) fn log(fixture: &mut Fixture, lines: &[&str]) {
    let lines: Vec<String> = lines
        .iter()
        .enumerate()
        .map(|(index, line)| format!("3,{index},1000000{index},-;{line}"))
        .collect();
    fixture.fact(Fact::KernelLog, &lines.join("\n"));
}

pub(in crate::doctor) fn refuse(fixture: &mut Fixture, last: u32, reason: &str) {
    fixture.file(
        &format!("{DEBUG}/refusals"),
        &format!(
            "seq=0 first=1.000001 last={last}.500000 times=2 mode=persistent step=acquire reason={reason} code=-12 \
             addr=0x7f0000000000 len=1048576 tgid=4711 pid=4712 comm=python3 text=\"as it is\"\n"
        ),
    );
}

/// Defines a check's faults, which are injected into [`healthy`].
macro_rules! faults {
    ($($faults:tt)*) => {
        $crate::testing::faults_of! { $crate::fixture::Fixture; $($faults)* }
    };
}
pub(in crate::doctor) use faults;

#[test]
fn healthy_machines_have_no_findings() {
    assert_eq!(findings(&healthy()), []);
    let hgx = fixture::hgx().with_software();
    assert_eq!(findings(&hgx), []);
}

/// Each fault causes its findings and no others.
#[test]
fn each_fault_is_told_and_nothing_else() {
    let of_check = |check: &'static Check| match check.faults {
        Faults::OfSoftware(faults) => faults,
        _ => &[],
    };
    each_is_told(OF_SOFTWARE.iter().flat_map(of_check), healthy, |fixture| {
        let found = findings(fixture);
        // The check `refusals` takes its fixes from the module's table of reasons. In this table,
        // commands have no backquotes.
        let own = found.iter().filter(|it| it.check != refusals::CHECK.name);
        own.for_each(testing::commands_are_marked);
        found
    });
}

/// A missing GPU or NIC is reported once, without its consequences.
#[test]
fn only_the_missing_device_is_reported() {
    for (mut fixture, words) in [
        (fixture::no_gpu(), "no NVIDIA GPU"),
        (fixture::no_hca(), "no RDMA device"),
    ] {
        fixture.software();
        unload(&mut fixture);
        without_function(&mut fixture, REGISTER);
        fixture.file("/proc/self/limits", &limits("65536"));
        let found = findings(&fixture);
        assert_eq!(found.len(), 1, "{found:#?}");
        let finding = found.first().unwrap();
        assert_eq!((finding.check, finding.level), ("presence", Level::Fault));
        assert!(finding.found.contains(words), "{finding:#?}");
    }
}

/// OFED, the module and dma-buf do not help a GPU without GPUDirect RDMA.
#[test]
fn gpus_without_gpudirect_rdma_lack_no_software() {
    for name in ["NVIDIA GB10", "NVIDIA GeForce RTX 5090"] {
        let mut fixture = healthy();
        fixture.gpu("0000:19:00.0", name);
        unload(&mut fixture);
        assert_eq!(findings(&fixture), [], "{name}");
        without_function(&mut fixture, REGISTER);
        assert_eq!(findings(&fixture), [], "{name}");
    }
}

/// The state after `rmmod ib_uverbs`, which removes the drivers of RDMA devices, too.
#[test]
fn without_ib_uverbs_the_fix_is_modprobe() {
    let mut fixture = fixture::no_hca().with_software();
    fixture.remove("/sys/module/ib_uverbs");
    let found = findings(&fixture);
    let fix = found.first().and_then(|finding| finding.fix.as_deref());
    assert_eq!(found.len(), 1, "{found:#?}");
    assert!(
        fix.is_some_and(|fix| fix.starts_with("`sudo modprobe ib_uverbs`")),
        "{found:#?}"
    );
}

#[test]
fn all_consumers_find_the_loaded_module() {
    let reported = healthy().findings(&consumers::CHECK);
    let not: Vec<&str> = reported
        .iter()
        .filter(|finding| finding.found.contains("does not find it"))
        .map(|finding| finding.found.as_str())
        .collect();
    // Where OFED has peer memory in ib_uverbs, gpud never finds the module.
    assert!(
        matches!(not[..], [gpud] if gpud.starts_with("gpud:")),
        "{not:#?}"
    );
    assert_eq!(reported.len(), 22);
}

/// Soft RoCE does not transfer memory of a real GPU.
#[test]
fn soft_roce_alone_is_a_fault() {
    let fixture = fixture::soft_roce().with_software();
    let faults: Vec<Finding> = findings(&fixture)
        .into_iter()
        .filter(|finding| finding.level > Note)
        .collect();
    assert_eq!(faults.len(), 1, "{faults:#?}");
    let fault = faults.first().unwrap();
    assert_eq!((fault.check, fault.level), ("presence", Level::Fault));
    assert!(fault.found.contains("software (rxe, siw)"), "{fault:#?}");
}

#[test]
fn the_test_vm_has_only_notes() {
    // The test VM lacks NVML, a NIC and dma-buf.
    let mut fixture = fixture::soft_roce();
    let gpu = fixture.place("0000:01:00.0");
    for (file, text) in [
        ("vendor", "0x1af4"),
        ("device", "0x1110"),
        ("class", "0x050000"),
    ] {
        fixture.file(&format!("{gpu}/{file}"), &format!("{text}\n"));
    }
    fixture.software();
    fixture.no_nvml();
    let found = findings(&fixture);
    assert!(
        found.iter().all(|finding| finding.level <= Note),
        "{found:#?}"
    );
}
