// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Configuration of the NVLink fabric. CUDA does not start on machines with NVSwitches until the
//! fabric is configured.

use crate::doctor::scan::{check, Scan};
use crate::finding::{Finding, Level, Subject};
use crate::host::nvml::{Fabric, FabricState};
use crate::host::{Fact, Host, Unseen};
use crate::machine::{pci, NVIDIA};
use crate::render::counted;

check! {
    "fabric": "whether the NVLink fabric of machines with NVSwitches is set up (fabric manager)",
    applies, check, OfSoftware(tests::FAULTS)
}

const WHY: &str = "with NVSwitches CUDA starts on a GPU only after NVIDIA's fabric manager has set up the NVLinks: \
until then CUDA fails with error 802, \"system not yet initialized\", and so does everything that uses the GPU";

/// PCI class of an NVSwitch: "other bridge".
const BRIDGE: u64 = 0x0680;

/// Returns the number of NVSwitches on PCI.
fn switches(host: &dyn Host) -> usize {
    let names = host.names(pci::DEVICES).unwrap_or_default();
    let is_switch = |name: &&String| {
        let number = |file: &str| host.number(&format!("{}/{name}/{file}", pci::DEVICES)).ok();
        number("class").is_some_and(|class| class >> 8 == BRIDGE)
            && number("vendor") == Some(u64::from(NVIDIA))
    };
    names.iter().filter(is_switch).count()
}

/// Returns each GPU with a fabric, and NVML's report about the fabric.
fn known(scan: &Scan<'_>) -> Vec<(Subject, Fabric)> {
    let nvml = scan.software().nvml.as_ref().ok();
    let of = |gpu: &crate::machine::Gpu| Some((Subject::gpu(gpu), nvml?.gpu(gpu.at)?.fabric?));
    scan.gpus().filter_map(of).collect()
}

/// Returns `true` if NVML knows the fabric, or if the state of the fabric manager is known.
fn applies(scan: &Scan<'_>) -> bool {
    scan.has_gpu() && (!known(scan).is_empty() || scan.host.fact(Fact::FabricManager).is_ok())
}

fn fix(scan: &Scan<'_>) -> String {
    let version = scan
        .software()
        .nvidia()
        .and_then(|driver| driver.version.as_ref());
    let version = version.map_or(String::new(), |version| format!(" ({version})"));
    format!(
        "`sudo systemctl enable --now nvidia-fabricmanager`, in exactly the driver's version{version}; `sudo \
         systemctl status nvidia-fabricmanager` says why it does not start; in a virtual machine the host's fabric \
         manager has to activate the machine's partition; on GB200 and GB300 the fabric manager runs on the \
         switch trays"
    )
}

fn check(scan: &Scan<'_>) -> Vec<Finding> {
    let known = known(scan);
    let runs = scan.host.fact(Fact::FabricManager);
    let runs = runs.map(|state| state.trim() == "running");
    let process = match runs {
        Ok(false) => "; nv-fabricmanager does not run",
        _ => "",
    };
    let mut findings = Vec::new();
    for (subject, fabric) in &known {
        let at = |level, found: &str| {
            Finding::new(level, subject.clone(), format!("the NVLink fabric {found}"))
        };
        findings.push(match (fabric.state, fabric.status) {
            (FabricState::Completed, 0) => at(Level::Ok, "is set up"),
            (FabricState::Completed, status) => at(
                Level::Fault,
                &format!("could not be set up (NVML: error {status}){process}"),
            )
            .why(WHY)
            .fix(fix(scan)),
            (FabricState::NotStarted, _) => at(Level::Fault, &format!("is not set up{process}"))
                .why(WHY)
                .fix(fix(scan)),
            (FabricState::InProgress, _) => at(Level::Fault, &format!("is being set up{process}"))
                .why(WHY)
                .fix(format!(
                    "wait some minutes after a boot; then {}",
                    fix(scan)
                )),
        });
    }
    // GPUs before Hopper do not report the fabric.
    let switches = || switches(scan.host);
    if known.is_empty() {
        match runs {
            Ok(false) => {
                let switches = switches();
                if switches > 0 {
                    let found = format!(
                        "{}, and nv-fabricmanager does not run",
                        counted(switches, "NVSwitch")
                    );
                    findings.push(Subject::Machine.fault(found).why(WHY).fix(fix(scan)));
                }
            }
            Err(why @ (Unseen::Denied | Unseen::Failed(_))) if switches() > 0 => {
                findings.push(Scan::unseen(Subject::Machine, "nv-fabricmanager", &why));
            }
            _ => {}
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::super::tests::{faults, gpu, nvswitch};
    use crate::fixture::Fixture;
    use crate::host::nvml::{Fabric, FabricState};
    use crate::host::Fact;

    /// Sets the state of the GPU's fabric.
    fn fabric(fixture: &mut Fixture, state: FabricState, status: i32) {
        gpu(fixture, |gpu| {
            gpu.fabric = Some(Fabric { state, status });
        });
    }

    faults! {
        "a fabric that nobody has set up",
            "fault fabric: …the NVLink fabric is not set up; nv-fabricmanager does not run" => |fixture| {
            fabric(fixture, FabricState::NotStarted, 0);
            fixture.fact(Fact::FabricManager, "not running");
        };
        "a fabric that could not be set up", "fault fabric: …could not be set up (NVML: error 999)" =>
            |fixture| fabric(fixture, FabricState::Completed, 999);
        "a fabric that is set up" => |fixture| {
            fabric(fixture, FabricState::Completed, 0);
            // The switches belong to another machine.
            fixture.fact(Fact::FabricManager, "not running");
        };
        "NVSwitches without a fabric manager, before Hopper",
            "fault fabric: …1 NVSwitch, and nv-fabricmanager does not run" => |fixture| {
            nvswitch(fixture);
            fixture.fact(Fact::FabricManager, "not running");
        };
        "NVSwitches with a fabric manager" => |fixture| {
            nvswitch(fixture);
            fixture.fact(Fact::FabricManager, "running");
        };
        "no NVSwitches and no fabric manager" => |fixture| fixture.fact(Fact::FabricManager, "not running");
    }
}
