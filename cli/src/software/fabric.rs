// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! NVIDIA's fabric manager, which configures NVSwitches: the fact
//! [`FabricManager`](crate::host::Fact::FabricManager).

use crate::host::{Fact, Host, Seen, Unseen};
use crate::machine::pci;

/// Name of the fabric manager's process, `nv-fabricmanager`, truncated to 15 bytes by the kernel.
const PROCESS: &str = "nv-fabricmanage";

/// PCI class of an NVSwitch: "other bridge".
const BRIDGE: u64 = 0x0680;
const NVIDIA: u64 = 0x10de;

/// Returns `true` if the fabric manager runs.
pub(crate) fn is_running(host: &dyn Host) -> Seen<bool> {
    Ok(host.fact(Fact::FabricManager)?.trim() == "running")
}

/// Returns the number of NVSwitches on PCI.
pub(crate) fn switches(host: &dyn Host) -> usize {
    let names = host.names(pci::DEVICES).unwrap_or_default();
    let is_switch = |name: &&String| {
        let number = |file: &str| host.number(&format!("{}/{name}/{file}", pci::DEVICES)).ok();
        number("class").is_some_and(|class| class >> 8 == BRIDGE)
            && number("vendor") == Some(NVIDIA)
    };
    names.iter().filter(is_switch).count()
}

/// Returns the fact for this machine: `running` or `not running`.
pub(crate) fn ask(host: &dyn Host) -> Seen<String> {
    // A container with its own PID namespace does not see the host's services.
    if host.text("/proc/2/comm").as_deref() != Ok("kthreadd") {
        return Err(Unseen::Failed(
            "the machine's processes are not visible from this PID namespace".to_owned(),
        ));
    }
    let names = host.names("/proc")?;
    let mut processes = names.iter().filter(|name| name.parse::<u32>().is_ok());
    let runs = processes
        .any(|process| host.text(&format!("/proc/{process}/comm")).as_deref() == Ok(PROCESS));
    Ok(match runs {
        true => "running",
        false => "not running",
    }
    .to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::Fixture;

    #[test]
    fn the_process_is_found_where_processes_are_visible() {
        let mut fixture = Fixture::new("processes");
        assert!(matches!(ask(&fixture.recording), Err(Unseen::Failed(_))));
        fixture.file("/proc/2/comm", "kthreadd\n");
        fixture.file("/proc/900/comm", "slurmd\n");
        assert_eq!(ask(&fixture.recording).as_deref(), Ok("not running"));
        fixture.file("/proc/901/comm", "nv-fabricmanage\n");
        assert_eq!(ask(&fixture.recording).as_deref(), Ok("running"));
    }
}
