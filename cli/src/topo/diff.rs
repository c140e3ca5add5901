// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! `topo --diff`: differences between a machine and a recording of the same machine or of a similar
//! machine. Unlike `doctor --baseline`, this command does not say which differences are faults.

use serde::Serialize;

use crate::finding::Status;
use crate::host::nvml::Nvml;
use crate::machine::pci::{Address, Link};
use crate::machine::{Class, Gpu, Hca, Machine, Segment};
use crate::render;
use crate::render::{counted, known, Table};
use crate::report::{object, Out};

/// Version of the JSON keys, incremented when a key is removed or changes its meaning.
const VERSION: u32 = 1;

/// A difference.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct Change {
    device: String,
    what: String,
    /// `None`: absent or unknown.
    then: Option<String>,
    /// `None`: gone or unknown.
    now: Option<String>,
}

/// Facts about a device, by name.
type Facts = Vec<(String, Option<String>)>;

fn fact(name: &str, value: Option<impl ToString>) -> (String, Option<String>) {
    (name.to_owned(), value.map(|value| value.to_string()))
}

/// NVML's answers then and now, if NVML listed GPUs both times.
pub(super) type Listings<'a> = Option<(&'a Nvml, &'a Nvml)>;

/// Prints the differences. Returns status 1 if there are any, like `diff`.
pub(super) fn run(
    then: &Machine,
    now: &Machine,
    nvml: Listings<'_>,
    out: &mut Out,
) -> anyhow::Result<Status> {
    let changes = changes(then, now, nvml);
    if out.is_json() {
        out.json(
            "peermemctl.topo-diff",
            VERSION,
            &object! { changes: &changes },
        )?;
    } else {
        let mut table = Table::of("DEVICE|WHAT|THEN|NOW");
        for change in &changes {
            table.row([
                change.device.clone(),
                change.what.clone(),
                known(change.then.as_ref()),
                known(change.now.as_ref()),
            ]);
        }
        if !changes.is_empty() {
            out.table(&table);
            out.gap();
        }
        let last = match changes.len() {
            0 => format!(
                "No difference: {}, {}.",
                counted(now.gpus.len(), "GPU"),
                counted(now.hcas.len(), "RDMA device")
            ),
            some => format!("{}.", counted(some, "difference")),
        };
        out.paragraph("", &last);
    }
    Ok(match changes.is_empty() {
        true => Status::Ok,
        false => Status::Findings,
    })
}

fn changes(then: &Machine, now: &Machine, nvml: Listings<'_>) -> Vec<Change> {
    let mut changes = Vec::new();
    let nodes = |machine: &Machine| vec![fact("NUMA nodes", machine.nodes)];
    compare("machine", nodes(then), nodes(now), &mut changes);

    let named = |gpu: &Gpu| format!("GPU {}", gpu.at);
    let of_gpu = |machine: &Machine, gpu: &Gpu, nvml: Option<&Nvml>| {
        let mut facts = of_gpu(machine, gpu);
        // A GPU that nvidia.ko could not start is listed by PCI, but not by NVML.
        let listed = nvml.map(|nvml| if nvml.lacks(gpu.at) { "no" } else { "yes" });
        facts.push(fact("listed by NVML", listed));
        facts
    };
    let (nvml_then, nvml_now) = nvml.unzip();
    for was in &then.gpus {
        match now.gpu(was.at) {
            Some(is) => compare(
                &named(is),
                of_gpu(then, was, nvml_then),
                of_gpu(now, is, nvml_now),
                &mut changes,
            ),
            None => changes.push(one_side(named(was), "GPU", Some(&was.name), None)),
        }
    }
    let new = now.gpus.iter().filter(|gpu| then.gpu(gpu.at).is_none());
    changes.extend(new.map(|gpu| one_side(named(gpu), "GPU", None, Some(&gpu.name))));

    let at = |hca: &Hca| known(hca.at);
    let hca = |hca: &Hca, then: Option<&str>, now: Option<&str>| {
        one_side(hca.name.clone(), "RDMA device", then, now)
    };
    for was in &then.hcas {
        match now.same_hca(was) {
            Some(is) => compare(&is.name, of_hca(then, was), of_hca(now, is), &mut changes),
            None => changes.push(hca(was, Some(&at(was)), None)),
        }
    }
    let new = now.hcas.iter().filter(|hca| then.same_hca(hca).is_none());
    changes.extend(new.map(|it| hca(it, None, Some(&at(it)))));

    // Compares links between switches and root ports. The links of GPUs and NICs are compared
    // above, as facts of the devices.
    let ends = |at: Address| now.gpu(at).is_some() || now.hcas.iter().any(|hca| hca.at == Some(at));
    for link in inner(now).into_iter().filter(|link| !ends(link.lower)) {
        if let Some(was) = inner(then).into_iter().find(|was| was.lower == link.lower) {
            let device = link.lower.to_string();
            compare(&device, of_link(was.link), of_link(link.link), &mut changes);
        }
    }
    for pair in &now.pairs {
        let was = now.hca(&pair.hca).and_then(|hca| then.same_hca(hca));
        if let Some(was) = was.and_then(|was| then.pair_of(pair.gpu, &was.name)) {
            let facts = |class: Option<Class>, is_best: bool| {
                let best = if is_best { "yes" } else { "no" };
                let class = fact("path", class.map(Class::name));
                vec![class, fact("best of the GPU", Some(best))]
            };
            compare(
                &format!("GPU {} \u{2013} {}", pair.gpu, pair.hca),
                facts(was.class, was.is_best),
                facts(pair.class, pair.is_best),
                &mut changes,
            );
        }
    }
    changes
}

/// Returns the change of a device that exists on one side only.
fn one_side(device: String, what: &str, then: Option<&str>, now: Option<&str>) -> Change {
    Change {
        device,
        what: what.to_owned(),
        then: then.map(str::to_owned),
        now: now.map(str::to_owned),
    }
}

/// Compares facts of the same name, then reports the facts that exist on one side only.
fn compare(device: &str, then: Facts, now: Facts, changes: &mut Vec<Change>) {
    let mut then: std::collections::BTreeMap<String, Option<String>> = then.into_iter().collect();
    let mut add = |what: String, then: Option<String>, now: Option<String>| {
        if then != now {
            changes.push(Change {
                device: device.to_owned(),
                what,
                then,
                now,
            });
        }
    };
    for (what, value) in now {
        let was = then.remove(&what).flatten();
        add(what, was, value);
    }
    for (what, was) in then {
        add(what, was, None);
    }
}

/// Returns the links above a machine's devices. Each link appears once.
fn inner(machine: &Machine) -> Vec<Segment> {
    let gpus = machine.gpus.iter().map(|gpu| gpu.at);
    let ends = gpus.chain(machine.hcas.iter().filter_map(|hca| hca.at));
    let mut links: Vec<Segment> = Vec::new();
    for link in ends.flat_map(|at| machine.links(at)) {
        if !links.iter().any(|known| known.lower == link.lower) {
            links.push(link);
        }
    }
    links
}

fn of_link(link: Link) -> Facts {
    vec![
        fact("link", Some(link.now)),
        fact("link at most", Some(link.most)),
    ]
}

fn of_function(machine: &Machine, at: Option<Address>) -> Facts {
    let function = at.and_then(|at| machine.functions.get(&at));
    let driver = function.and_then(|function| function.driver.as_deref());
    vec![
        fact("NUMA node", function.and_then(|function| function.numa)),
        fact("driver", driver),
    ]
}

fn of_gpu(machine: &Machine, gpu: &Gpu) -> Facts {
    let mut facts = vec![
        fact("name", Some(&gpu.name)),
        fact("BAR1", gpu.bar1.map(|bar| render::bytes(bar.size))),
    ];
    facts.extend(of_function(machine, Some(gpu.at)));
    if let Some(link) = machine.link(gpu.at) {
        // The speed varies with the GPU's load.
        facts.extend([
            fact("lanes", Some(format!("x{}", link.now.width))),
            fact("link at most", Some(link.most)),
        ]);
    }
    facts
}

fn of_hca(machine: &Machine, hca: &Hca) -> Facts {
    let mut facts = vec![
        fact("name", Some(&hca.name)),
        fact("address", hca.at),
        fact("Data Direct", hca.data_direct),
        fact("firmware", hca.firmware.as_deref()),
    ];
    facts.extend(of_function(machine, hca.at));
    if let Some(link) = hca.at.and_then(|at| machine.link(at)) {
        facts.extend(of_link(link));
    }
    for port in &hca.ports {
        let number = port.number;
        let netdevs = Some(port.netdevs.join(" ")).filter(|names| !names.is_empty());
        for (what, value) in [
            ("link layer", port.layer.clone()),
            ("state", port.state.clone()),
            ("rate", port.rate.clone()),
            ("netdev", netdevs),
        ] {
            facts.push((format!("port {number} {what}"), value));
        }
    }
    facts
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{fixture, testing};

    /// Compares two machines. `then` is the recorded machine.
    fn diff(then: &fixture::Fixture, now: &fixture::Fixture, more: &str) -> (String, Status) {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("then.json");
        std::fs::write(&file, then.recording.to_json().unwrap()).unwrap();
        now.says(&format!("topo --diff {}{more}", file.display()))
    }

    #[test]
    fn a_machine_has_no_difference_from_itself() {
        for (name, machine) in fixture::all() {
            let (text, status) = diff(&machine, &machine, "");
            assert_eq!(status, Status::Ok, "{name}: {text}");
            assert!(text.starts_with("No difference: "), "{name}: {text}");
            let (json, status) = diff(&machine, &machine, " --json");
            assert_eq!(status, Status::Ok, "{name}: {json}");
            assert!(json.contains("\"changes\": []"), "{name}: {json}");
        }
    }

    #[test]
    fn each_change_is_a_line() {
        let then = fixture::hgx();
        let mut now = fixture::hgx();
        now.unplug("0000:3b:00.0");
        now.remove("/sys/class/infiniband/mlx5_4");
        now.hca_file("mlx5_1", "ports/1/state", "1: DOWN\n");
        now.hca_file("mlx5_1", "ports/1/rate", "10 Gb/sec (4X SDR)\n");
        now.hca_file("mlx5_2", "fw_ver", "28.43.2026\n");
        for at in ["0000:15:01.0", "0000:16:00.0"] {
            now.set_link(at, ("32.0 GT/s PCIe", 4), ("32.0 GT/s PCIe", 16));
        }
        // The lower speed of an idle GPU is no difference. The loss of half of the lanes is a
        // difference.
        now.set_link("0000:19:00.0", ("2.5 GT/s PCIe", 8), ("32.0 GT/s PCIe", 16));
        let place = now.place("0000:c4:00.0");
        now.file(&format!("{place}/numa_node"), "0\n");
        now.pci("pci0000:00", "0000:00:1d.0", &fixture::Pci::root_port(0));
        now.pci("0000:00:1d.0", "0000:02:00.0", &fixture::Pci::connectx7(0));
        now.hca(
            "mlx5_9",
            "0000:02:00.0",
            "ib9",
            "InfiniBand",
            "400 Gb/sec (4X NDR)",
        );
        let (text, status) = diff(&then, &now, "");
        assert_eq!(status, Status::Findings, "{text}");
        let (json, _) = diff(&then, &now, " --json");
        testing::golden(
            "golden/topo-diff.txt",
            &format!("$ peermemctl topo --diff then.json\n{text}\n$ peermemctl topo --diff then.json --json\n{json}"),
        );
    }

    /// Names of RDMA devices may be in another order after a boot.
    #[test]
    fn a_device_of_another_name_is_the_same() {
        let then = fixture::two_sockets();
        let mut now = fixture::two_sockets();
        for (name, at, netdev) in [
            ("mlx5_1", "0000:18:00.0", "ibp24s0"),
            ("mlx5_0", "0000:c8:00.0", "ibp200s0"),
        ] {
            let own = now.place(at);
            now.remove(&format!("{own}/infiniband"));
            now.remove(&format!("/sys/class/infiniband/{name}"));
            now.hca(name, at, netdev, "InfiniBand", "400 Gb/sec (4X NDR)");
        }
        let (text, _) = diff(&then, &now, "");
        assert!(text.ends_with("\n2 differences.\n"), "{text}");
        for line in [
            "mlx5_1  name  mlx5_0  mlx5_1",
            "mlx5_0  name  mlx5_1  mlx5_0",
        ] {
            assert!(text.contains(line), "{text}");
        }
    }

    #[test]
    fn a_file_that_is_no_recording_is_an_error() {
        let machine = fixture::small();
        machine.session("2$ topo --diff /none.json\n/none.json");
    }
}
