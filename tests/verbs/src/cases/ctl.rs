// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! `peermemctl` on machines of known topology: the JSON that it prints, and its complaints. An
//! injected fault must cause its own complaint and no other.
//!
//! These cases do not use a [`Lab`](crate::lab::Lab), because they unload the module, which a `Lab`
//! would keep loaded. The runner's variables describe the machine. The cases read the path between
//! two devices from sysfs with their own code.

use std::collections::BTreeSet;
use std::env;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{ensure, Context, Result};
use serde_json::{json, Value};

use crate::child::Process;
use crate::gpu::Gpu;
use crate::ktap::{cases, note};
use crate::lab::{Lab, Peermem, PinMode, Setup};
use crate::pci::{Acs, Place};
use crate::rdma::Hca;
use crate::sys::Mapping;
use crate::{ktap, module};

/// The test machine, as the runner's variables describe it.
struct Machine {
    setup: Setup,
    topology: String,
    promtool: Option<PathBuf>,
}

struct Case {
    name: &'static str,
    /// Returns `true` if the case is for this machine.
    on: fn(&Machine) -> bool,
    run: fn(&Machine) -> Result<()>,
}

const CASES: &[Case] = cases![
    "ctl.topo" if |_| true => topo,
    "ctl.doctor" if |_| true => doctor,
    "ctl.doctor_names_one_pair" if |machine| machine.topology == "sockets" => one_pair,
    "ctl.doctor_redirection_at_root_ports" if is_plain => redirection_at_root_ports,
    "ctl.doctor_module_taken_out" if is_plain => module_taken_out,
    "ctl.doctor_locked_memory" if is_plain => locked_memory,
    "ctl.list" if is_plain => listed,
    "ctl.list_freed" if is_plain => freed,
    "ctl.list_all" if |_| true => listed_all,
    "ctl.stats" if is_plain => stats,
    "ctl.export" if |machine| machine.promtool.is_some() => export,
    "ctl.no_module" if |machine| machine.setup.peermem == Peermem::None => no_module,
];

/// Returns `true` for the topology without faults. An injected fault is the only fault there.
fn is_plain(machine: &Machine) -> bool {
    machine.topology == "root-ports"
}

/// Runs the cases for this machine. Returns `true` if no case failed.
pub(crate) fn run(setup: &Setup, promtool: Option<PathBuf>) -> Result<bool> {
    let machine = Machine {
        setup: setup.clone(),
        topology: env::var("TESTVM_TOPOLOGY").context("TESTVM_TOPOLOGY")?,
        promtool,
    };
    let cases = CASES.iter().filter(|case| (case.on)(&machine));
    let named = cases.map(|case| (case.name, case));
    ktap::run_named(named, &[], |case| (case.run)(&machine))
}

pub(super) struct Answer {
    pub(super) status: i32,
    out: String,
    error: String,
}

impl Answer {
    fn of(command: &mut Command) -> Result<Self> {
        let output = command
            .output()
            .with_context(|| format!("start {command:?}"))?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let error = text(&output.stderr);
        for line in error.lines() {
            note("said", line);
        }
        Ok(Self {
            status: output
                .status
                .code()
                .with_context(|| format!("{command:?} ended with {}", output.status))?,
            out: text(&output.stdout),
            error,
        })
    }

    /// Returns the printed object of a command that succeeded.
    fn success(&self, schema: &str) -> Result<Value> {
        ensure!(
            self.status == 0,
            "peermemctl ended with status {}",
            self.status
        );
        self.json(schema)
    }

    /// Returns the printed object, which must have the current version of this schema.
    fn json(&self, schema: &str) -> Result<Value> {
        let value: Value =
            serde_json::from_str(&self.out).with_context(|| format!("no JSON: {:?}", self.out))?;
        let found = (text(&value, "schema")?, value["version"].as_u64());
        // The words of each other schema were changed once, so its version is 2.
        let version = match schema {
            "peermemctl.topo" | "peermemctl.list-all" => 1,
            // One reason of `peermemctl.stats` was split into two.
            "peermemctl.stats" => 3,
            _ => 2,
        };
        ensure!(found == (schema, Some(version)));
        Ok(value)
    }
}

/// Runs `peermemctl`, which the runner has put into the search path.
pub(super) fn peermemctl(words: &[&str]) -> Result<Answer> {
    Answer::of(Command::new("peermemctl").arg("--json").args(words))
}

pub(super) fn has(value: &Value, expected: &Value) -> Result<()> {
    for (name, expected) in expected.as_object().into_iter().flatten() {
        ensure!(
            value[name] == *expected,
            "{name}, not {expected}: {value:#?}"
        );
    }
    Ok(())
}

fn text<'a>(value: &'a Value, name: &str) -> Result<&'a str> {
    value[name]
        .as_str()
        .with_context(|| format!("no text {name} in {value}"))
}

fn list<'a>(value: &'a Value, name: &str) -> Result<&'a Vec<Value>> {
    value[name]
        .as_array()
        .with_context(|| format!("no list {name} in {value}"))
}

/// Returns a complaint of `doctor`: the check and its subject.
fn complaint(check: &str, subject: &str) -> String {
    format!("{check} of {subject}")
}

fn gpus() -> Result<Vec<Place>> {
    Gpu::all()?
        .iter()
        .map(|gpu| Place::of_function(gpu.bdf()))
        .collect()
}

/// Prints all findings of `doctor`, and returns its complaints. The exit status of `doctor` must
/// match its findings.
fn complaints(answer: &Answer) -> Result<BTreeSet<String>> {
    let mut found = BTreeSet::new();
    for finding in list(&answer.json("peermemctl.doctor")?, "findings")? {
        let (check, level) = (text(finding, "check")?, text(finding, "level")?);
        let subject = &finding["subject"];
        let names: Vec<&str> = ["gpu", "hca"]
            .into_iter()
            .filter_map(|name| subject[name].as_str())
            .collect();
        let subject = match names.as_slice() {
            [] => text(subject, "kind")?.to_owned(),
            names => names.join(" "),
        };
        note(
            level,
            format!("{check} of {subject}: {}", text(finding, "found")?),
        );
        if matches!(level, "fault" | "warning") {
            found.insert(complaint(check, &subject));
        }
    }
    let expected = i32::from(!found.is_empty());
    ensure!(answer.status == expected);
    Ok(found)
}

/// Checks that `doctor` has exactly these complaints.
fn complains_of(answer: &Answer, expected: &[String]) -> Result<()> {
    let found = complaints(answer)?;
    let expected: BTreeSet<String> = expected.iter().cloned().collect();
    ensure!(found == expected, "{found:?}, not {expected:?}");
    Ok(())
}

/// Returns the expected class of the path from each GPU to each NIC. The description of the
/// topology gives the classes.
fn classes(machine: &Machine) -> Result<[[&'static str; 2]; 2]> {
    Ok(match machine.topology.as_str() {
        "flat" | "root-ports" => [["PHB", "PHB"], ["PHB", "PHB"]],
        "switch" => [["PIX", "PXB"], ["PIX", "PXB"]],
        "switches" => [["PIX", "PHB"], ["PHB", "PIX"]],
        "sockets" => [["PHB", "NODE"], ["SYS", "SYS"]],
        other => anyhow::bail!("no topology {other}"),
    })
}

/// Returns the sockets of the GPUs and of the NICs. `None` means that there is one socket, which
/// the firmware does not report.
fn sockets(machine: &Machine) -> [[Option<u64>; 2]; 2] {
    match machine.topology.as_str() {
        "sockets" => [[Some(0), Some(1)], [Some(0), Some(0)]],
        _ => [[None; 2]; 2],
    }
}

fn topo(machine: &Machine) -> Result<()> {
    let answer = peermemctl(&["topo"])?.success("peermemctl.topo")?;
    let gpus = gpus()?;
    let devices = &machine.setup.devices;
    devices_of(machine, &answer, &gpus)?;
    let pairs = list(&answer, "pairs")?;
    ensure!(pairs.len() == gpus.len() * devices.len());
    for (gpu, classes) in gpus.iter().zip(classes(machine)?) {
        for (device, class) in devices.iter().zip(classes) {
            let nic = Place::of_rxe(device)?;
            let pair = pairs
                .iter()
                .find(|pair| {
                    pair["gpu_address"].as_str() == Some(gpu.address())
                        && pair["hca"].as_str() == Some(device)
                })
                .with_context(|| format!("no pair {} {device}", gpu.address()))?;
            let bridges: Vec<&str> = list(pair, "bridges")?
                .iter()
                .filter_map(Value::as_str)
                .collect();
            let found = text(pair, "class")?;
            note(
                "path",
                format!("{} {device} {found} {}", gpu.address(), bridges.join(" ")),
            );
            ensure!(found == class, "{device}: {found}, not {class}");
            ensure!(bridges == gpu.bridges_to(&nic), "{device}: {bridges:?}");
        }
    }
    Ok(())
}

fn devices_of(machine: &Machine, answer: &Value, gpus: &[Place]) -> Result<()> {
    let bar: u64 = env::var("TESTVM_BAR_MIB")
        .context("TESTVM_BAR_MIB")?
        .parse()?;
    let [sockets_of_gpus, sockets_of_nics] = sockets(machine);
    let told = list(answer, "gpus")?;
    ensure!(told.len() == gpus.len(), "{} GPUs: {told:#?}", told.len());
    for ((index, gpu), socket) in gpus.iter().enumerate().zip(sockets_of_gpus) {
        let one = told.get(index).context("too few GPUs")?;
        note(
            "gpu",
            format!("{index} {} {}", gpu.address(), one["numa_node"]),
        );
        let (address, bar) = (gpu.address(), bar << 20);
        has(
            one,
            &json!({ "index": index, "address": address, "stand_in": true, "bar1_bytes": bar, "numa_node": socket }),
        )?;
    }
    let told = list(answer, "hcas")?;
    for (device, socket) in machine.setup.devices.iter().zip(sockets_of_nics) {
        let nic = Place::of_rxe(device)?;
        let one = told
            .iter()
            .find(|one| one["name"].as_str() == Some(device))
            .with_context(|| format!("no {device}"))?;
        note(device, format!("{} {}", nic.address(), one["numa_node"]));
        ensure!(one["ports"][0]["state"] == "ACTIVE", "{one:#?}");
        has(
            one,
            &json!({ "address": nic.address(), "software": true, "numa_node": socket }),
        )?;
    }
    ensure!(told.len() == machine.setup.devices.len(), "{told:#?}");
    Ok(())
}

/// Checks the complaints about each machine without injected faults.
fn doctor(machine: &Machine) -> Result<()> {
    complains_of(&peermemctl(&["doctor"])?, &at_rest(machine)?)
}

fn at_rest(machine: &Machine) -> Result<Vec<String>> {
    let gpus = gpus()?;
    let mut expected = Vec::new();
    // A BAR1 below 512 MiB is typical of GPUs that are not made for RDMA.
    if env::var("TESTVM_BAR_MIB").is_ok_and(|text| text.parse().is_ok_and(|mib: u64| mib < 512)) {
        expected.extend(gpus.iter().map(|gpu| complaint("bar1", gpu.address())));
    }
    if machine.setup.translating_iommu {
        // rxe0 is the NIC of each GPU's best pair.
        expected.push(complaint("iommu", "rxe0"));
    }
    if machine.topology == "sockets" {
        let far = gpus.get(1).context("a second GPU")?;
        for device in &machine.setup.devices {
            expected.push(complaint("path", &format!("{} {device}", far.address())));
        }
    }
    match machine.setup.peermem {
        Peermem::Ours => {}
        // Consumers that look in `memory_peers` do not find the module, because this ib_core has no
        // `memory_peers`.
        Peermem::Nvidia => expected.push(complaint("consumers", "machine")),
        Peermem::Preload | Peermem::None => expected.push(complaint("module", "machine")),
    }
    Ok(expected)
}

/// Checks that `--pair` covers a pair other than the GPU's best pair, and no other GPU.
fn one_pair(_: &Machine) -> Result<()> {
    let gpus = gpus()?;
    let [near, far] = gpus.as_slice() else {
        anyhow::bail!("{} GPUs", gpus.len());
    };
    let bar1 = |gpu: &Place| complaint("bar1", gpu.address());
    complains_of(&peermemctl(&["doctor", "--pair", "0,rxe1"])?, &[bar1(near)])?;
    let pair = format!("{},rxe1", far.address());
    complains_of(
        &peermemctl(&["doctor", "--pair", &pair])?,
        &[
            bar1(far),
            complaint("path", &format!("{} rxe1", far.address())),
        ],
    )
}

/// Checks that redirection at root ports causes a note and no complaint, because packets between
/// root ports pass the root complex anyway.
fn redirection_at_root_ports(machine: &Machine) -> Result<()> {
    let notes = |answer: &Answer| -> Result<usize> {
        let answer = answer.json("peermemctl.doctor")?;
        let findings = list(&answer, "findings")?;
        Ok(findings
            .iter()
            .filter(|finding| finding["check"].as_str() == Some("acs"))
            .count())
    };
    let rest = at_rest(machine)?;
    let before = peermemctl(&["doctor", "--all"])?;
    complains_of(&before, &rest)?;
    let port = Place::of_rxe("rxe0")?;
    let port = port.above().first().context("a root port")?;
    let acs = Acs::of(port)?.with_context(|| format!("{port} has no ACS"))?;
    note("control_before", format!("{:#x}", acs.control()?));
    acs.redirect()?;
    note("control_redirecting", format!("{:#x}", acs.control()?));
    let during = peermemctl(&["doctor", "--all"])?;
    complains_of(&during, &rest)?;
    drop(acs);
    let (before, during) = (notes(&before)?, notes(&during)?);
    note("notes", format!("{before} {during}"));
    ensure!(before == 0 && during > 0, "{before} and {during} notes");
    Ok(())
}

fn module_taken_out(machine: &Machine) -> Result<()> {
    let parameters = module::parameters();
    module::unload()?;
    let answer = peermemctl(&["doctor"]);
    module::load(&parameters)?;
    let mut expected = at_rest(machine)?;
    expected.push(complaint("module", "machine"));
    complains_of(&answer?, &expected)
}

/// Checks the complaint about a memlock limit of 64 KiB, for root without CAP_IPC_LOCK. Many
/// distributions set this limit at login.
fn locked_memory(machine: &Machine) -> Result<()> {
    let limited = Answer::of(Command::new("setpriv").args([
        "--bounding-set=-ipc_lock",
        "sh",
        "-c",
        "ulimit -l 64 && exec peermemctl --json doctor",
    ]))?;
    let mut expected = at_rest(machine)?;
    expected.push(complaint("memlock", "machine"));
    complains_of(&limited, &expected)
}

/// Returns the registrations that `list` shows.
pub(super) fn registrations(words: &[&str]) -> Result<Vec<Value>> {
    let answer = peermemctl(&[&["list"], words].concat())?.success("peermemctl.list")?;
    ensure!(answer["unreadable"] == 0);
    Ok(list(&answer, "registrations")?.clone())
}

/// Number of regions that a child holds. Each region has [`EACH`] bytes.
const HELD: usize = 3;
const EACH: u64 = 2 << 20;

fn holder(machine: &Machine) -> Result<Process> {
    Process::start(
        &machine.setup,
        machine.setup.seed,
        &["hold", &HELD.to_string()],
    )
}

fn listed(machine: &Machine) -> Result<()> {
    let nothing = |when: &str| -> Result<()> {
        let found = registrations(&[])?;
        note(when, found.len());
        ensure!(found.is_empty(), "{when}: {found:#?}");
        Ok(())
    };
    nothing("before")?;
    let child = holder(machine)?;
    let gpu = gpus()?.first().context("a GPU")?.address().to_owned();
    let found = registrations(&[])?;
    note("held", found.len());
    ensure!(found.len() == HELD, "{found:#?}");
    let mut addresses = BTreeSet::new();
    let (pid, mode) = (child.id(), machine.setup.mode().to_string());
    let expected = json!({ "pid": pid, "comm": "gdr", "len": EACH, "state": "mapped", "mode": mode, "uid": 0 });
    for one in &found {
        has(one, &expected)?;
        ensure!(one["gpus"][0]["address"] == gpu, "{one:#?}");
        addresses.insert(text(one, "addr")?.to_owned());
    }
    ensure!(addresses.len() == HELD, "{addresses:?}");
    let pid = child.id().to_string();
    ensure!(registrations(&["--pid", &pid])?.len() == HELD);
    ensure!(registrations(&["--pid", "1"])?.is_empty(), "--pid 1");
    ensure!(registrations(&["--gpu", &gpu])?.len() == HELD);
    ensure!(registrations(&["--gpu", "1"])?.is_empty(), "--gpu 1");
    child.kill()?;
    nothing("after")
}

/// Returns the output of `list --all`, run under the command `prefix`.
fn all_regions(prefix: &[&str]) -> Result<Value> {
    let words = ["peermemctl", "--json", "list", "--all"];
    let line = [prefix, &words].concat();
    let (program, arguments) = line.split_first().context("a program")?;
    let answer =
        Answer::of(Command::new(program).args(arguments))?.success("peermemctl.list-all")?;
    for one in list(&answer, "processes")? {
        note("process", one);
    }
    note("reasons", &answer["reasons"]);
    Ok(answer)
}

/// Number of regions, and their total length in bytes if known.
type Regions = (u64, Option<u64>);

/// Returns the verdict on a process's use of GPUDirect RDMA. Also returns its peer-memory regions,
/// its other regions, and its regions of unknown kind.
fn usage(answer: &Value, pid: u32) -> Result<(String, [Regions; 3])> {
    let its = list(answer, "processes")?
        .iter()
        .find(|one| one["pid"].as_u64() == Some(u64::from(pid)))
        .with_context(|| format!("process {pid} is not in {answer}"))?;
    let part = |name: &str| {
        let part = &its[name];
        let regions = part["regions"].as_u64().unwrap_or_default();
        (regions, part["bytes"].as_u64())
    };
    Ok((
        text(its, "gpudirect")?.to_owned(),
        ["peer_memory", "other", "unknown"].map(part),
    ))
}

/// Returns the number of regions and their bytes, from iproute2's `rdma`.
fn regions_by_rdma() -> Result<(u64, u64)> {
    let output = Command::new("rdma")
        .args(["-j", "resource", "show", "mr"])
        .output()
        .context("start rdma")?;
    ensure!(output.status.success(), "rdma ends with {}", output.status);
    let all: Value = serde_json::from_slice(&output.stdout).context("rdma")?;
    let all = all.as_array().context("rdma lists nothing")?;
    let lengths = all.iter().filter_map(|one| one["mrlen"].as_u64());
    Ok((all.len() as u64, lengths.sum()))
}

/// Checks the output of `list --all` for regions of host memory in this process and regions of GPU
/// memory in another process.
fn listed_all(machine: &Machine) -> Result<()> {
    const LENGTHS: [usize; 2] = [64 << 10, 5 << 20];
    let peermem = machine.setup.peermem;
    let own = std::process::id();
    let hca = Hca::open(machine.setup.devices.first().context("a NIC")?)?;
    let memory = LENGTHS
        .iter()
        .map(|length| Mapping::anonymous(*length).context("host memory"))
        .collect::<Result<Vec<_>>>()?;
    let regions = memory
        .iter()
        .map(|memory| Ok(hca.reg_mr(memory.span(0, memory.len())?)?))
        .collect::<Result<Vec<_>>>()?;
    let child = match peermem {
        Peermem::None => None,
        _ => Some(holder(machine)?),
    };
    let answer = all_regions(&[])?;
    let total = |name: &str| -> Result<u64> {
        let all = list(&answer, "processes")?.iter();
        Ok(all.filter_map(|one| one[name].as_u64()).sum())
    };
    let all = (total("regions")?, total("bytes")?);
    let by_rdma = regions_by_rdma()?;
    ensure!(all == by_rdma);

    let none = (0, Some(0));
    let gpu = (HELD as u64, Some(HELD as u64 * EACH));
    let host = (2, Some(LENGTHS.iter().map(|length| *length as u64).sum()));
    let sure = |verdict: &str, gpu, host| (verdict.to_owned(), [gpu, host, none]);
    let open = |regions| ("unknown".to_owned(), [none, none, regions]);
    // NVIDIA's nvidia-peermem counts regions, but does not name their owners.
    let (expected, of_child) = match peermem {
        Peermem::Nvidia => (open(host), open(gpu)),
        _ => (sure("no", none, host), sure("yes", gpu, none)),
    };
    let found = usage(&answer, own)?;
    ensure!(found == expected, "regions of this process: {found:?}");
    if let Some(child) = &child {
        let found = usage(&answer, child.id())?;
        ensure!(
            found == of_child,
            "regions of process {}: {found:?}",
            child.id()
        );
        let pid = child.id().to_string();
        let answer = peermemctl(&["list", "--all", "--pid", &pid])?;
        let answer = answer.json("peermemctl.list-all")?;
        ensure!(answer["gpudirect"] == of_child.0.as_str());
    }
    // Only root can read the lists of registrations.
    let answer = all_regions(&["setpriv", "--reuid=65534", "--clear-groups"])?;
    let found = usage(&answer, own)?;
    ensure!(found == open(host), "regions of this process: {found:?}");
    let reasons = answer["reasons"].to_string();
    ensure!(reasons.contains("not visible without root"), "{reasons}");
    // nvidia-peermem reports only a total. If only the child has regions, the total must be
    // attributed to the child.
    drop((regions, hca));
    if let Some(child) = child {
        let found = usage(&all_regions(&[])?, child.id())?;
        ensure!(found == sure("yes", gpu, none), "{found:?}");
        child.kill()?;
    }
    Ok(())
}

/// Checks the reports about memory that this process has freed while the memory's registration
/// lives.
fn freed(machine: &Machine) -> Result<()> {
    let lab = Lab::open(&machine.setup)?;
    lab.needs_mode(PinMode::Persistent)?;
    let each = usize::try_from(EACH)?;
    let (kept, freed) = (lab.allocate_gpu(each)?, lab.allocate_gpu(each)?);
    let regions = [
        lab.near.reg_mr(kept.span(0, each)?)?,
        lab.near.reg_mr(freed.span(0, each)?)?,
    ];
    let told = || -> Result<Vec<Option<u64>>> {
        let found = registrations(&[])?;
        let bytes: Vec<_> = found
            .iter()
            .map(|one| one["freed_bytes"].as_u64())
            .collect();
        note("freed_bytes", format_args!("{bytes:?}"));
        Ok(bytes)
    };
    let findings = || -> Result<usize> {
        let answer = peermemctl(&["doctor", "--only", "refusals"])?.json("peermemctl.doctor")?;
        let findings = list(&answer, "findings")?.iter();
        let is_it = |found: &&Value| {
            found["found"]
                .as_str()
                .is_some_and(|it| it.contains("the process has freed"))
        };
        Ok(findings.filter(is_it).count())
    };
    let (before, found_before) = (told()?, findings()?);
    drop(freed);
    let (after, found_after) = (told()?, findings()?);
    drop(regions);
    ensure!((before, found_before) == (vec![Some(0); 2], 0));
    ensure!((after, found_after) == (vec![Some(0), Some(EACH)], 1));
    Ok(())
}

/// Returns the module's count of an event, summed over all modes.
fn counted(counters: &[Value], event: &str) -> u64 {
    counters
        .iter()
        .filter(|counter| counter["event"].as_str() == Some(event))
        .filter_map(|counter| counter["count"].as_u64())
        .sum()
}

fn stats(machine: &Machine) -> Result<()> {
    const EVENTS: [&str; 4] = ["registered", "released", "active", "active_bytes"];
    let look = || -> Result<[u64; 4]> {
        let answer = peermemctl(&["stats"])?.success("peermemctl.stats")?;
        let counters = list(&answer, "counters")?;
        Ok(EVENTS.map(|event| counted(counters, event)))
    };
    let before = look()?;
    let child = holder(machine)?;
    let during = look()?;
    child.kill()?;
    let after = look()?;
    for (at, event) in EVENTS.iter().enumerate() {
        let of = |counts: &[u64; 4]| counts.get(at).copied().unwrap_or_default();
        note(
            event,
            format!("{} {} {}", of(&before), of(&during), of(&after)),
        );
    }
    let held = HELD as u64;
    let [registered, released, ..] = before;
    ensure!(during == [registered + held, released, held, held * EACH]);
    ensure!(after == [registered + held, released + held, 0, 0]);
    Ok(())
}

/// Checks the exported metrics with Prometheus's `promtool`.
fn export(machine: &Machine) -> Result<()> {
    let promtool = machine.promtool.as_ref().context("no promtool")?;
    let child = holder(machine)?;
    let exported = Answer::of(Command::new("peermemctl").arg("export"))?;
    child.kill()?;
    ensure!(
        exported.status == 0,
        "peermemctl ended with status {}",
        exported.status
    );
    let samples = exported
        .out
        .lines()
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .count();
    note("samples", samples);
    ensure!(samples > 0, "nothing is exported");
    let mut checker = Command::new(promtool)
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| promtool.display().to_string())?;
    let mut input = checker.stdin.take().context("no pipe")?;
    let written = input.write_all(exported.out.as_bytes());
    drop(input);
    let checked = checker.wait_with_output()?;
    written?;
    let said = [checked.stdout, checked.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    for line in said.lines() {
        note("promtool", line);
    }
    ensure!(checked.status.success() && said.trim().is_empty());
    Ok(())
}

/// Checks that a command which cannot read its data ends with status 2 and a message.
fn no_module(_: &Machine) -> Result<()> {
    for command in ["list", "stats"] {
        let Answer { status, error, .. } = peermemctl(&[command])?;
        note(command, status);
        ensure!(status == 2 && error.starts_with("peermemctl: "), "{error}");
    }
    Ok(())
}
