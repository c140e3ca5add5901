// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! `topo`: the paths between each GPU and each RDMA device.

mod diff;
mod gpus;
mod json;

use std::collections::BTreeMap;

use anyhow::Context as _;

use crate::finding::Status;
use crate::host::nvml::Nvml;
use crate::host::recording::Recording;
use crate::host::{Host, Unseen};
use crate::machine::pci::{Address, Function, Link};
use crate::machine::{Class, Hca, Listed, Machine, Pair, Port, Segment, Unread};
use crate::render::{known, Paint, Table};
use crate::report::Out;
use crate::{args, render};

/// Version of the JSON keys, incremented when a key is removed or changes its meaning.
const VERSION: u32 = 1;

/// Shows the paths of a machine without findings. Succeeds if PCI can be read.
pub(crate) fn run(host: &dyn Host, args: &args::Topo, out: &mut Out) -> anyhow::Result<Status> {
    let machine = Machine::scan(host).context("the machine's PCI devices")?;
    if let Some(file) = &args.diff {
        let recording = Recording::load(file)?;
        let then = Machine::scan(&recording).with_context(|| format!("{}: PCI", file.display()))?;
        let nvml = [&recording as &dyn Host, host].map(Nvml::scan);
        let [Ok(nvml_then), Ok(nvml_now)] = &nvml else {
            return diff::run(&then, &machine, None, out);
        };
        let both_tell = nvml_then.error.is_none() && nvml_now.error.is_none();
        let nvml = both_tell.then_some((nvml_then, nvml_now));
        return diff::run(&then, &machine, nvml, out);
    }
    // Starting NVML may take seconds and wakes idle GPUs.
    let nvml = (args.verbose || out.is_json()).then(|| Nvml::scan(host));
    if out.is_json() {
        let nvml = nvml.as_ref().and_then(|nvml| nvml.as_ref().ok());
        out.json("peermemctl.topo", VERSION, &json::topology(&machine, nvml))?;
        return Ok(Status::Ok);
    }
    matrix(&machine, out);
    devices(&machine, out);
    processors(&machine, out);
    if let Some(nvml) = nvml {
        between_hcas(&machine, out);
        gpus::matrix(&machine, &nvml, out);
        for pair in &machine.pairs {
            path(&machine, pair, out);
            if let Some(own) = &pair.own {
                path(&machine, own, out);
            }
        }
    }
    notes(&machine, out);
    Ok(Status::Ok)
}

/// Prints GPUs as rows and RDMA devices as columns, in parts if the screen is too narrow.
fn matrix(machine: &Machine, out: &mut Out) {
    if machine.gpus.is_empty() || machine.hcas.is_empty() {
        return;
    }
    classes(machine, out, cell);
    let mut legend = Table::of("");
    legend.row([
        "*",
        "best for this GPU: nearest first, then highest link bandwidth; ties are all marked",
    ]);
    let is_direct = machine.pairs.iter().any(Pair::is_data_direct);
    if is_direct {
        legend.row(["+", "by the NIC's Data Direct function"]);
    }
    let all = || {
        machine
            .pairs
            .iter()
            .chain(machine.pairs.iter().map(Pair::by_own_function))
    };
    for class in Class::ALL {
        if all().any(|pair| pair.class == Some(class)) {
            legend.row([class.name(), class.meaning()]);
        }
    }
    if machine.pairs.iter().any(|pair| pair.class.is_none()) {
        legend.row(["-", "the RDMA device is not on PCI"]);
    }
    out.table(&legend);
    if is_direct {
        out.gap();
        out.paragraph(
            "",
            "By the RDMA devices' own functions, which nvidia_peermem uses. A dma-buf that is registered without Data \
             Direct also uses them:",
        );
        out.gap();
        classes(machine, out, |pair| class_of(pair.by_own_function()));
    }
}

/// Prints the matrix and a blank line.
fn classes(machine: &Machine, out: &mut Out, cell: fn(&Pair) -> String) {
    for hcas in machine.hcas.chunks(fitting(out, 3, widest(machine))) {
        let mut headings = vec!["GPU"];
        headings.extend(hcas.iter().map(|hca| hca.name.as_str()));
        let mut table = Table::new(&headings);
        for gpu in &machine.gpus {
            let mut row = vec![format!("{}", gpu.index)];
            row.extend(hcas.iter().map(|hca| {
                let pair = machine.pair_of(gpu.at, &hca.name);
                pair.map_or_else(String::new, cell)
            }));
            table.row(row);
        }
        out.table(&table);
        out.gap();
    }
}

/// Returns the number of columns that fit after a first column of width `first`. A column is as
/// wide as `widest` or a class name, whichever is wider, plus two blanks.
fn fitting(out: &Out, first: usize, widest: usize) -> usize {
    let column = widest.max(4).saturating_add(2);
    let left = out.columns().saturating_sub(first.saturating_add(3));
    (left / column).max(1)
}

fn widest(machine: &Machine) -> usize {
    let names = machine.hcas.iter().map(|hca| hca.name.chars().count());
    names.max().unwrap_or(0)
}

/// Prints the class of the path between any two RDMA devices. RDMA devices below one switch share
/// the switch's uplink.
fn between_hcas(machine: &Machine, out: &mut Out) {
    if machine.hcas.len() < 2 {
        return;
    }
    let widest = widest(machine);
    for columns in machine.hcas.chunks(fitting(out, widest, widest)) {
        out.gap();
        let mut headings = vec!["HCA"];
        headings.extend(columns.iter().map(|hca| hca.name.as_str()));
        let mut table = Table::new(&headings);
        for hca in &machine.hcas {
            let class = |other: &Hca| match other.name == hca.name {
                true => "X",
                false => machine.class_of_hcas(hca, other).map_or("-", Class::name),
            };
            table.row(std::iter::once(hca.name.as_str()).chain(columns.iter().map(class)));
        }
        out.table(&table);
    }
}

/// Prints the near processors of each device, for binding processes.
fn processors(machine: &Machine, out: &mut Out) {
    let gpus = machine.gpus.iter();
    let gpus = gpus.map(|gpu| (Some(gpu.at), format!("GPU {}", gpu.index)));
    let hcas = machine.hcas.iter().map(|hca| (hca.at, hca.name.clone()));
    let mut near: BTreeMap<(Option<u32>, &str), Vec<String>> = BTreeMap::new();
    for (at, name) in gpus.chain(hcas) {
        let function = at.and_then(|at| machine.functions.get(&at));
        if let Some(cpus) = function.and_then(|function| function.cpus.as_deref()) {
            let first = cpus.split([',', '-']).next();
            let first = first.and_then(|number| number.parse().ok());
            near.entry((first, cpus)).or_default().push(name);
        }
    }
    if near.is_empty() {
        return;
    }
    out.gap();
    let mut table = Table::of("CPUS|NEAR TO");
    for ((_, cpus), names) in near {
        table.row([cpus, &names.join(", ")]);
    }
    out.table(&table);
}

fn cell(pair: &Pair) -> String {
    let direct = if pair.is_data_direct() { "+" } else { "" };
    format!("{}{direct}{}", class_of(pair), star(pair))
}

fn class_of(pair: &Pair) -> String {
    let name = pair.class.map_or("-", Class::name);
    match pair.class {
        Some(Class::Pix | Class::Pxb) => Paint::Good.on(name),
        Some(Class::Sys) => Paint::Dim.on(name),
        _ => name.to_owned(),
    }
}

fn star(pair: &Pair) -> &'static str {
    match pair.is_best {
        true => "*",
        false => "",
    }
}

/// Prints one line for each device.
fn devices(machine: &Machine, out: &mut Out) {
    if !machine.gpus.is_empty() {
        out.gap();
        let mut table = Table::of("GPU|ADDRESS|NODE|LINK|BAR1|NAME");
        for gpu in &machine.gpus {
            let bar = gpu.bar1.map(|bar| render::bytes(bar.size));
            table.row([
                format!("{}", gpu.index),
                gpu.at.to_string(),
                node(machine, Some(gpu.at)),
                link(machine, Some(gpu.at)),
                known(bar),
                gpu.name.clone(),
            ]);
        }
        out.table(&table);
    }
    if !machine.hcas.is_empty() {
        out.gap();
        let mut table = Table::of("HCA|ADDRESS|NODE|LINK|PORTS|NETDEV");
        for hca in &machine.hcas {
            // Each port has a row.
            let mut first = [
                hca.name.clone(),
                known(hca.at),
                node(machine, hca.at),
                link(machine, hca.at),
            ];
            if hca.ports.is_empty() {
                table.row(&first);
            }
            for one in &hca.ports {
                table.row(
                    first
                        .iter()
                        .cloned()
                        .chain([port(one), one.netdevs.join(" ")]),
                );
                first = Default::default();
            }
            if let Some(at) = hca.data_direct {
                // The Data Direct function is on the same chip as the switch above it, so there is
                // no link.
                let direct = "  Data Direct".to_owned();
                table.row([
                    direct,
                    at.to_string(),
                    node(machine, Some(at)),
                    "-".to_owned(),
                ]);
            }
        }
        out.table(&table);
    }
}

fn node(machine: &Machine, at: Option<Address>) -> String {
    let function = at.and_then(|at| machine.functions.get(&at));
    let numa = function.and_then(|function| function.numa);
    known(numa)
}

/// Formats the link between a device and the port above it, with the best rate of both ends if the
/// current rate differs.
fn link(machine: &Machine, at: Option<Address>) -> String {
    let text = at.and_then(|at| machine.link(at)).map(rates);
    known(text)
}

fn rates(link: Link) -> String {
    let Link { now, most } = link;
    // A virtual function reports no link.
    if now.speed == 0 && now.width == 0 {
        return "-".to_owned();
    }
    if now == most {
        return now.to_string();
    }
    let text = format!("{now} of {most}");
    match now.width < most.width {
        true => Paint::Warning.on(text),
        // An idle GPU lowers its speed to save power.
        false => text,
    }
}

fn port(port: &Port) -> String {
    let unknown = || "?".to_owned();
    format!(
        "{}: {} {} {}",
        port.number,
        port.layer.clone().unwrap_or_else(unknown),
        port.state.clone().unwrap_or_else(unknown),
        port.rate.clone().unwrap_or_else(unknown)
    )
}

/// Prints a path hop by hop.
fn path(machine: &Machine, pair: &Pair, out: &mut Out) {
    let Some(hca) = machine.hca(&pair.hca) else {
        return;
    };
    out.gap();
    let index = machine.gpu(pair.gpu).map_or(0, |gpu| gpu.index);
    let mut which = String::new();
    if pair.nic != hca.at {
        which.push_str(", by Data Direct");
    } else if hca.data_direct.is_some() {
        which.push_str(", by its own function");
    }
    which.push_str(if pair.is_best { ", best" } else { "" });
    let Some(class) = pair.class else {
        out.paragraph("", &format!("GPU {index} – {}: not on PCI", hca.name));
        return;
    };
    out.paragraph(
        "",
        &format!(
            "{}: {}{which}: {}",
            Paint::Strong.on(format!("GPU {index} – {}", hca.name)),
            class.name(),
            meeting(machine, pair)
        ),
    );
    let mut table = Table::of("  ADDRESS|WHAT|LINK UP|PAYLOAD|NODE");
    let links: Vec<Segment> = [Some(pair.gpu), hca.at.filter(|at| pair.nic == Some(*at))]
        .into_iter()
        .flatten()
        .flat_map(|at| machine.links(at))
        .collect();
    let ends = std::iter::once(pair.gpu)
        .chain(pair.bridges.iter().copied())
        .chain(pair.nic);
    for at in ends {
        // A virtual function has the link of its physical function.
        let own = machine.physical(at).map(|function| function.at);
        let up = links.iter().find(|link| Some(link.lower) == own);
        table.row([
            format!("  {at}"),
            match at {
                at if at == pair.gpu => format!("GPU {index}"),
                at if Some(at) == pair.nic => hca.name.clone(),
                at => kind(machine, at).to_owned(),
            },
            up.map_or_else(String::new, |segment| rates(segment.link)),
            payload(machine, at),
            node(machine, Some(at)),
        ]);
    }
    out.table(&table);
}

/// Returns text about the place where the two ends of a path meet.
fn meeting(machine: &Machine, pair: &Pair) -> String {
    match pair.meet {
        Some(at) => format!("meet below {at}, {}", kind(machine, at)),
        None => {
            let root = |at: Option<Address>| {
                let function = at.and_then(|at| machine.functions.get(&at));
                function.map_or_else(|| "?".to_owned(), |function| function.root.clone())
            };
            let (one, other) = (root(Some(pair.gpu)), root(pair.nic));
            match one == other {
                true => format!("meet in host bridge {one}"),
                false => format!("from host bridge {one} to {other}"),
            }
        }
    }
}

fn kind(machine: &Machine, at: Address) -> &'static str {
    let function = machine.functions.get(&at);
    function.map_or("bridge", Function::kind_of_bridge)
}

/// Formats the configured maximum payload size in bytes, and the supported maximum if that is
/// larger.
fn payload(machine: &Machine, at: Address) -> String {
    let function = machine.functions.get(&at);
    match function.map(|function| function.express()) {
        Some(Ok(express)) if express.payload == express.payload_most => {
            format!("{} B", express.payload)
        }
        Some(Ok(express)) => format!("{} of {} B", express.payload, express.payload_most),
        Some(Err(Unseen::Denied)) => "root only".to_owned(),
        _ => "-".to_owned(),
    }
}

/// Prints notes that help to read the tables.
fn notes(machine: &Machine, out: &mut Out) {
    let mut notes = Vec::new();
    if machine.gpus.is_empty() {
        notes.push("No GPU of NVIDIA's is on PCI.".to_owned());
    }
    let is_hca = |unread: &Unread| matches!(unread.device, Listed::Hca(_));
    if machine.hcas.is_empty() && !machine.unread.iter().any(is_hca) {
        notes.push("No RDMA device: /sys/class/infiniband has none.".to_owned());
    }
    if machine.is_virtual == Some(true) {
        notes.push(
            "This is a virtual machine: its PCI tree comes from the hypervisor, and may differ from the hardware's."
                .to_owned(),
        );
    }
    for gpu in machine.gpus.iter().filter(|gpu| gpu.is_coherent) {
        notes.push(format!(
            "GPU {}: its memory is part of the processor's memory (Grace), reached by NVLink-C2C; BAR1 does \
             not reach all of it.",
            gpu.index
        ));
    }
    for (what, physical) in machine.virtual_functions() {
        notes.push(format!(
            "{what} is a virtual function of {physical}; the link is the physical function's."
        ));
    }
    for hca in &machine.hcas {
        if !hca.members.is_empty() {
            let members: Vec<String> = hca.members.iter().map(Address::to_string).collect();
            notes.push(format!(
                "{} is a bond over several functions: {}. Its column is that of {}.",
                hca.name,
                members.join(", "),
                hca.at
                    .map_or_else(|| "none".to_owned(), |at| at.to_string())
            ));
        }
        if hca.is_software {
            notes.push(format!(
                "{} does in software what a NIC does; in mainline Linux, it cannot register GPU memory.",
                hca.name
            ));
        }
    }
    let direct = machine.hcas.iter().filter(|hca| hca.data_direct.is_some());
    let direct: Vec<&str> = direct.map(|hca| hca.name.as_str()).collect();
    if !direct.is_empty() {
        notes.push(format!(
            "Data Direct ({}): NCCL and UCX register GPU memory with it, by dma-buf. nvidia_peermem cannot: nvidia.ko \
             refuses it.",
            direct.join(", ")
        ));
    }
    for function in machine.unassigned_data_direct() {
        let why = match &machine.data_direct_unseen {
            Some(why) => format!("its VPD, or an RDMA device's, is {why}"),
            None => "no RDMA device's VPD has the same V3 field".to_owned(),
        };
        notes.push(format!(
            "It is not known which RDMA device the Data Direct function {} belongs to: {why}.",
            function.at
        ));
    }
    let is_guessed = |pair: &&Pair| pair.class == Some(Class::Sys) && !machine.knows_nodes(pair);
    if machine.pairs.iter().any(|pair| is_guessed(&pair)) {
        notes.push(
            "Not all devices say which NUMA node they are near to: a path of such a device that is shown as SYS may \
             be NODE."
                .to_owned(),
        );
    }
    for Unread { device, why } in &machine.unread {
        notes.push(match device {
            Listed::Pci(at) => format!("{at} is on PCI and cannot be read: {why}."),
            Listed::Hca(name) => format!("The RDMA device {name} cannot be read: {why}."),
        });
    }
    for at in machine.nics_of_several() {
        notes.push(format!(
            "{at} has several RDMA devices or ports, which share its link."
        ));
    }
    if !notes.is_empty() {
        out.gap();
    }
    for note in notes {
        out.paragraph("- ", &note);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{fixture, testing};
    use serde_json::Value;

    #[test]
    fn every_machine_is_shown_as_before() {
        let machines = fixture::all();
        let says = |name: &str, line: &str| {
            let (text, status) = machines[name].says(line);
            assert_eq!(status, Status::Ok, "{name}: {text}");
            format!("$ peermemctl {line}\n{text}\n")
        };
        let verbose = |name| says(name, "topo --verbose");
        let json = |name| says(name, "topo --json");
        for name in machines.keys().copied() {
            let text = match name {
                // The output with the paths of eight GPUs would be too long for a golden file.
                "hgx" => says(name, "topo"),
                // The output of topo does not depend on the faults of these machines.
                "acs" | "iommu" | "data_direct_acs" => {
                    let is_direct = name == "data_direct_acs";
                    let well = if is_direct { "data_direct" } else { "small" };
                    assert_eq!(verbose(name), verbose(well), "{name}");
                    assert_eq!(json(name), json(well), "{name}");
                    continue;
                }
                "small_bar1" | "trained_down" | "unprivileged" => {
                    let mut text = verbose(name);
                    text.push_str("$ peermemctl topo --json, where it differs from small\n");
                    let value = |name| -> Value {
                        let text = json(name);
                        serde_json::from_str(text.split_once('\n').unwrap().1).unwrap()
                    };
                    changed(&value("small"), &value(name), "", &mut text);
                    text
                }
                _ => verbose(name) + &json(name),
            };
            testing::golden(&format!("golden/topo-{name}.txt"), &text);
        }
    }

    /// Adds a line to `text` for each value that differs between `from` and `to`.
    fn changed(from: &Value, to: &Value, at: &str, text: &mut String) {
        match (from, to) {
            (Value::Object(from), Value::Object(to)) if from.len() == to.len() => {
                for (key, value) in from {
                    changed(value, &to[key], &format!("{at}/{key}"), text);
                }
            }
            (Value::Array(from), Value::Array(to)) if from.len() == to.len() => {
                for (index, (from, to)) in from.iter().zip(to).enumerate() {
                    changed(from, to, &format!("{at}/{index}"), text);
                }
            }
            _ if from != to => text.push_str(&format!("{at}: {to}\n")),
            _ => {}
        }
    }

    #[test]
    fn json_is_the_same_with_and_without_verbose() {
        let fixture = fixture::hgx();
        let (brief, _) = fixture.says("topo --json");
        let (full, _) = fixture.says("topo --json -v");
        assert_eq!(brief, full);
        let json: Value = serde_json::from_str(&brief).unwrap();
        assert_eq!(json["schema"], "peermemctl.topo");
        assert_eq!(json["pairs"].as_array().map(Vec::len), Some(8 * 9));
    }

    fn keys_of(json: &Value, keys: &mut std::collections::BTreeSet<String>) {
        match json {
            Value::Object(object) => {
                for (key, value) in object {
                    keys.insert(key.clone());
                    keys_of(value, keys);
                }
            }
            Value::Array(all) => all.iter().for_each(|one| keys_of(one, keys)),
            _ => {}
        }
    }

    #[test]
    fn every_key_of_the_json_is_documented() {
        let page = include_str!("../../../docs/peermemctl.md");
        let mut keys = std::collections::BTreeSet::new();
        for fixture in fixture::all().values() {
            keys_of(&fixture.json("topo --json"), &mut keys);
        }
        assert!(keys.len() > 30, "{keys:?}");
        for key in keys {
            assert!(
                page.contains(&format!("`{key}")),
                "{key} is not in docs/peermemctl.md"
            );
        }
    }

    /// The class of the path between two RDMA devices is the same in both directions.
    #[test]
    fn rdma_devices_have_a_class_between_them() {
        let (hgx, two) = (fixture::hgx(), fixture::two_sockets());
        let hcas = |fixture: &fixture::Fixture, one: &str, other: &str| {
            let machine = Machine::scan(&fixture.recording).unwrap();
            let (one, other) = (machine.hca(one).unwrap(), machine.hca(other).unwrap());
            let class = machine.class_of_hcas(one, other);
            assert_eq!(class, machine.class_of_hcas(other, one));
            class
        };
        assert_eq!(hcas(&hgx, "mlx5_0", "mlx5_1"), Some(Class::Pix));
        assert_eq!(hcas(&hgx, "mlx5_0", "mlx5_2"), Some(Class::Node));
        assert_eq!(hcas(&hgx, "mlx5_0", "mlx5_4"), Some(Class::Sys));
        assert_eq!(hcas(&two, "mlx5_0", "mlx5_1"), Some(Class::Sys));
    }

    /// For a device on an unknown node, the kernel lists all processors as near.
    #[test]
    fn near_processors_need_a_known_node() {
        let mut fixture = fixture::two_sockets();
        let own = fixture.place("0000:98:00.0");
        fixture.file(&format!("{own}/numa_node"), "-1\n");
        fixture.file(&format!("{own}/local_cpulist"), "0-223\n");
        let machine = Machine::scan(&fixture.recording).unwrap();
        let cpus = |gpu: usize| machine.functions[&machine.gpus[gpu].at].cpus.as_deref();
        assert_eq!((cpus(0), cpus(1)), (Some("0-55,112-167"), None));
    }

    #[test]
    fn processors_are_in_their_order() {
        let mut fixture = fixture::two_sockets();
        for (at, cpus) in [("0000:17:00.0", "96-127"), ("0000:98:00.0", "128-159")] {
            let own = fixture.place(at);
            fixture.file(&format!("{own}/local_cpulist"), &format!("{cpus}\n"));
        }
        let (text, _) = fixture.says("topo");
        let at = |cpus: &str| text.find(cpus).unwrap();
        assert!(at("96-127") < at("128-159"), "{text}");
    }

    #[test]
    fn two_switches_between_are_pxb() {
        let mut fixture = fixture::small();
        let port = |port| fixture::Pci::switch_port(port, 0);
        // A second switch, which has a NIC, is below the second port of the first switch.
        fixture.pci("0000:17:00.0", "0000:30:00.0", &port(5));
        fixture.pci("0000:30:00.0", "0000:31:00.0", &port(6));
        fixture.pci("0000:31:00.0", "0000:32:00.0", &fixture::Pci::connectx7(0));
        fixture.hca("mlx5_9", "0000:32:00.0", "ibp50s0", "InfiniBand", "?");
        let machine = Machine::scan(&fixture.recording).unwrap();
        let pair = machine.pair_of(machine.gpus[0].at, "mlx5_9").unwrap();
        assert_eq!(pair.class, Some(Class::Pxb));
        let bridges: Vec<String> = pair.bridges.iter().map(Address::to_string).collect();
        let way = "0000:17:01.0 0000:17:00.0 0000:30:00.0 0000:31:00.0";
        assert_eq!(bridges.join(" "), way);
        assert_eq!(pair.meet, "0000:16:00.0".parse().ok());
        assert!(!pair.is_best);
    }

    #[test]
    fn a_wide_matrix_is_printed_in_parts() {
        let mut fixture = fixture::small();
        for number in 1..20 {
            let at = format!("0000:18:{number:02x}.0");
            fixture.pci("0000:17:00.0", &at, &fixture::Pci::connectx7(0));
            let (name, netdev) = (format!("mlx5_{number}"), format!("ib{number}"));
            fixture.hca(&name, &at, &netdev, "InfiniBand", "?");
        }
        let (text, _) = fixture.says("topo");
        let longest = text.lines().map(|line| line.chars().count()).max();
        assert!(longest <= Some(100), "{text}");
        let headings: Vec<&str> = text.lines().filter(|line| line.contains("mlx5_")).collect();
        assert!(
            headings[0].contains("mlx5_0") && !headings[0].contains("mlx5_19"),
            "{text}"
        );
        assert!(headings[1].contains("mlx5_19"), "{text}");
        assert_eq!(text.matches("PIX*").count(), 20, "{text}");
    }

    #[test]
    fn topo_fails_without_pci() {
        let mut fixture = fixture::small();
        fixture.remove("/sys/bus/pci");
        fixture.session("2$ topo");
    }
}
