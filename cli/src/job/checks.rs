// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Findings about one process of a job. Each check has a name, a function, and injected faults in
//! `tests.rs`.

use super::libraries::{Library, PRELOAD};
use super::nics::{Choice, Near};
use super::settings::{Effect, Judged};
use super::{Member, Shared};
use crate::doctor::Scan;
use crate::finding::{Finding, Level, Subject};
use crate::host::Unseen;
use crate::machine::Class;
use crate::regions::Verdict;
use crate::software::nccl;
use crate::software::nccl::Topology;

/// A process of the job, and the facts that its checks need.
struct At<'a> {
    shared: &'a Shared<'a>,
    member: &'a Member,
    suggested: Option<&'a str>,
}

/// A check: its name, and its function.
type Check = (&'static str, fn(&At<'_>) -> Vec<Finding>);

const CHECKS: &[Check] = &[
    ("access", visible),
    ("gpudirect", gpudirect),
    ("registration", registration),
    ("settings", settings),
    ("nics", nics),
    ("path", path),
    ("ibgda", ibgda),
    ("libraries", libraries),
    ("preload", preload),
];

/// Returns the findings about a process.
pub(super) fn findings(
    shared: &Shared<'_>,
    member: &Member,
    suggested: Option<&str>,
) -> Vec<Finding> {
    let at = At {
        shared,
        member,
        suggested,
    };
    let of = |(check, run): &Check| {
        let check = *check;
        let findings = run(&at).into_iter();
        findings
            .map(move |finding| Finding { check, ..finding })
            .collect::<Vec<_>>()
    };
    // `doctor` has already put the check's name into its findings about the limit on locked memory.
    let lock = member.lock.iter().cloned();
    CHECKS.iter().flat_map(of).chain(lock).collect()
}

fn at(level: Level, found: impl Into<String>) -> Finding {
    Finding::new(level, Subject::Job, found)
}

/// Returns the finding about data that could not be read.
fn unseen(what: impl AsRef<str>, why: &Unseen) -> Finding {
    Scan::unseen(Subject::Job, what, why)
}

/// Reports the sources that could not be read.
fn visible(it: &At<'_>) -> Vec<Finding> {
    let member = it.member;
    let libraries = member.libraries.as_ref().err();
    let files = member.gpus.as_ref().err();
    let sources = member.environment.iter();
    let sources = sources.map(|source| (source.place.as_str(), source.unseen.as_ref()));
    [
        ("the mapped libraries (maps)", libraries),
        ("the open GPUs and RDMA devices (fd)", files),
    ]
    .into_iter()
    .chain(sources)
    .filter_map(|(what, why)| Some(unseen(what, why?)))
    .collect()
}

/// Reports whether the process uses GPUDirect RDMA now.
fn gpudirect(it: &At<'_>) -> Vec<Finding> {
    let registered = &it.member.registered;
    let has_both = it.member.gpus.as_ref().is_ok_and(|gpus| !gpus.is_empty())
        && it.member.hcas.as_ref().is_ok_and(|hcas| !hcas.is_empty());
    match registered.gpudirect {
        Some(Verdict::Yes) => vec![at(Level::Ok, "GPU memory is registered with an RDMA device now")],
        Some(Verdict::No) if has_both => vec![at(
            Level::Note,
            "a GPU and an RDMA device are open, and no GPU memory is registered now",
        )
        .why(
            "NCCL and UCX register when they connect or at the first transfer. After that, a job without registered GPU \
             memory copies through the host.",
        )],
        Some(Verdict::No) => Vec::new(),
        _ => {
            let why = Unseen::Failed(registered.not_told.join("; "));
            vec![Finding {
                needs_root: registered.not_told.iter().any(|why| why.contains("root")),
                ..unseen("whether GPU memory is registered now", &why)
            }]
        }
    }
}

/// Reports if GPU memory cannot be registered by peer memory or by dma-buf.
fn registration(it: &At<'_>) -> Vec<Finding> {
    let has_gpu = it.member.gpus.as_ref().is_ok_and(|gpus| !gpus.is_empty());
    match (&it.shared.has_module, it.shared.has_dma_buf) {
        (Ok(false), Some(false)) if has_gpu => vec![at(
            Level::Fault,
            "there is no way to register GPU memory: nvidia_peermem is not loaded, and dma-buf does not work here",
        )
        .fix("`sudo peermemctl doctor` says what is missing")],
        (Ok(false), Some(true)) if it.member.mapped("peermem preload").next().is_none() => vec![at(
            Level::Note,
            "GPU memory can only be registered by dma-buf, because nvidia_peermem is not loaded",
        )
        .why("Software that calls ibv_reg_mr on GPU memory (DeepEP, perftest and others) gets EFAULT.")],
        _ => Vec::new(),
    }
}

/// Returns the level of a finding about a library: a warning if the process may use the library.
fn level_of(it: &At<'_>, library: Option<&str>) -> Level {
    match library.is_none_or(|library| it.member.may_use(library)) {
        true => Level::Warning,
        false => Level::Note,
    }
}

/// Turns a warning into a fault.
fn worse(level: Level) -> Level {
    match level {
        Level::Warning => Level::Fault,
        level => level,
    }
}

/// Reports variables that forbid GPUDirect RDMA, wholly or in part.
fn settings(it: &At<'_>) -> Vec<Finding> {
    let judge = |setting: &Judged| {
        let Judged {
            name, value, place, ..
        } = setting;
        let meaning = setting.meaning?;
        let found = format!("{name}={value} ({place}): {meaning}");
        let again = format!("unset {name} ({place}), and start the job again");
        let level = level_of(it, setting.library);
        let is_by_module = matches!(
            name.as_str(),
            "NCCL_DMABUF_ENABLE" | "NVSHMEM_IB_DISABLE_DMABUF"
        );
        match setting.effect {
            Effect::Forbids => Some(
                at(level, found)
                    .why("With this setting, the library does not use GPUDirect RDMA, whatever the machine supports.")
                    .fix(again),
            ),
            Effect::Limits if is_by_module => Some(by_module_alone(it, level, found, &again)),
            Effect::Limits if name == "NCCL_NET_GDR_READ" => Some(at(level, found).fix(again)),
            Effect::Limits | Effect::Forces => Some(at(Level::Note, found)),
            Effect::NotJudged => Some(at(Level::Note, found)),
            Effect::Allows | Effect::Selects => None,
        }
    };
    it.member.settings.iter().filter_map(judge).collect()
}

/// Returns the finding about a variable that turns dma-buf off, so that only nvidia_peermem can
/// register GPU memory.
fn by_module_alone(it: &At<'_>, level: Level, found: String, again: &str) -> Finding {
    match &it.shared.has_module {
        Ok(true) => at(Level::Note, found),
        Ok(false) => at(worse(level), found)
            .why("nvidia_peermem is not loaded, so there is no way to register GPU memory.")
            .fix(format!("`sudo modprobe nvidia-peermem`, or {again}")),
        Err(why) => Finding {
            needs_root: false,
            ..unseen(
                "whether nvidia_peermem is loaded, which this setting requires",
                why,
            )
        },
    }
}

fn class(class: Option<Class>) -> &'static str {
    class.map_or("not on PCI", Class::name)
}

/// Reports variables whose selection of RDMA devices leaves out needed devices, or names devices
/// that do not exist or have no active port.
fn nics(it: &At<'_>) -> Vec<Finding> {
    let mut findings = Vec::new();
    let suggestion = it.suggested.map(|value| format!("NCCL_IB_HCA={value}"));
    for choice in &it.member.nics {
        let level = level_of(it, Some(choice.library));
        let Some(setting) = &choice.setting else {
            continue;
        };
        let named = format!("{}={} ({})", choice.variable, setting.value, setting.place);
        let fix = |finding: Finding| match (&suggestion, choice.library) {
            (Some(fix), "NCCL") => finding.fix(fix.clone()),
            _ => finding,
        };
        if choice.devices.is_empty() {
            let found = format!(
                "{named} leaves {} no RDMA device with an active port",
                choice.library
            );
            findings.push(fix(at(worse(level), found)));
        } else if !choice.unmatched.is_empty() {
            let found = format!(
                "{named}: there is no RDMA device {} here",
                choice.unmatched.join(", ")
            );
            findings.push(fix(at(level, found)));
        }
        if !choice.inactive.is_empty()
            && !choice.devices.is_empty()
            && !setting.value.starts_with('^')
        {
            let names = choice.inactive.join(", ");
            let found = format!("{named}: no port of {names} is active");
            findings.push(at(level, found).fix("`peermemctl doctor --only port` says more"));
        }
    }
    if let Some(choice) = it.member.nics.first() {
        findings.extend(farther(it, choice));
    }
    findings
}

/// Reports the GPUs whose nearest RDMA devices NCCL may not use.
fn farther(it: &At<'_>, choice: &Choice) -> Option<Finding> {
    let far: Vec<&Near> = it
        .member
        .near
        .iter()
        .filter(|near| near.is_farther())
        .collect();
    if far.is_empty() || choice.devices.is_empty() {
        return None;
    }
    let of = |near: &&Near| {
        let (gpu, nearest, chosen) = (near.gpu, near.nearest.join(", "), near.chosen.join(", "));
        let (best, own) = (class(near.nearest_class), class(near.chosen_class));
        format!("GPU {gpu} has {nearest} ({best}), and NCCL may use {chosen} ({own}) instead")
    };
    let each: Vec<String> = far.iter().map(of).collect();
    let why = match &choice.setting {
        Some(setting) => format!(
            "NCCL_IB_HCA={} ({}) leaves out the nearest RDMA device",
            setting.value, setting.place
        ),
        None => "no port of the nearest RDMA device is active".to_owned(),
    };
    let finding = at(
        level_of(it, Some("NCCL")),
        format!("{why}: {}", each.join("; ")),
    );
    let finding = finding.why(match it.member.nccl.has_pxn {
        true => {
            "NCCL uses the farther device, or reaches another GPU's device by NVLink (PXN) and shares that device."
        }
        false => "NCCL uses the farther device.",
    });
    Some(match (it.suggested, &choice.setting) {
        (Some(value), Some(_)) => finding.fix(format!("NCCL_IB_HCA={value}")),
        _ => finding.fix("`peermemctl doctor --only port` says more"),
    })
}

/// Reports the GPUs whose paths to RDMA devices exceed NCCL's limit on the distance.
fn path(it: &At<'_>) -> Vec<Finding> {
    let nccl = &it.member.nccl;
    // `LOC` excludes all paths. The check `settings` reports this limit.
    if !it.member.may_use("NCCL") || nccl.limit() == "LOC" {
        return Vec::new();
    }
    match &nccl.topology {
        Topology::File(file) => {
            let found = format!("NCCL uses the paths in {file}, which are not judged here");
            return vec![at(Level::Note, found)];
        }
        Topology::Missing(setting) => {
            let found = format!(
                "NCCL_TOPO_FILE={} ({}): there is no such file, so NCCL uses the paths in sysfs",
                setting.value, setting.place
            );
            return vec![at(Level::Warning, found).fix("correct or unset NCCL_TOPO_FILE")];
        }
        Topology::None => {}
    }
    let machine = it.shared.scan.machine;
    let is_for_nccl = |near: &&Near| {
        let hcas = near.chosen.iter().filter_map(|name| machine.hca(name));
        let mut gpus = machine.gpus.iter().filter(|gpu| gpu.index == near.gpu);
        let is_gpu = gpus
            .any(|gpu| !gpu.is_stand_in && !gpu.is_coherent && gpu.why_no_gpudirect().is_none());
        is_gpu
            && hcas
                .filter(|hca| !hca.is_software && hca.driver.as_deref() != Some("efa"))
                .count()
                > 0
    };
    let is_refused = |near: &&Near| {
        let is_near_enough = |class: Option<Class>| class.is_some_and(|class| nccl.takes(class));
        // If the path is too long because the selection leaves out a near device, `nics` reports
        // the selection.
        let is_chosen_so = near.is_farther() && is_near_enough(near.nearest_class);
        near.chosen_class.is_some() && !is_near_enough(near.chosen_class) && !is_chosen_so
    };
    let near = it.member.near.iter().filter(is_for_nccl).filter(is_refused);
    near.filter_map(|near| Some(too_far(it, near, near.chosen_class?)))
        .collect()
}

fn too_far(it: &At<'_>, near: &Near, class: Class) -> Finding {
    let nccl = &it.member.nccl;
    let (limit, from) = match &nccl.level {
        Some(setting) => (
            setting.value.as_str(),
            format!("NCCL_NET_GDR_LEVEL, {}", setting.place),
        ),
        None => (nccl.limit(), "the default".to_owned()),
    };
    at(
        Level::Warning,
        format!(
            "GPU {}: the nearest RDMA device ({}) is {}, and NCCL uses GPUDirect RDMA up to {limit} ({from})",
            near.gpu,
            near.chosen.join(", "),
            class.name(),
        ),
    )
    .why("NCCL copies through the host, or goes by NVLink through a GPU with a nearer device (PXN).")
    .fix(format!(
        "NCCL_NET_GDR_LEVEL={} in the job's environment makes NCCL use this path; measure both. `peermemctl doctor \
         --only path` says more",
        nccl::name_of(class)
    ))
}

/// Checks the requirements of GPU-initiated communication, if the process enables it.
fn ibgda(it: &At<'_>) -> Vec<Finding> {
    let value = |name: &str| it.member.setting(name);
    let forces = |name: &str| value(name).filter(|it| it.effect == Effect::Forces);
    let is_transport = |setting: &&Judged| setting.value.eq_ignore_ascii_case("ibgda");
    let is_gdaki = |setting: &&Judged| setting.value == "3";
    let wanted = forces("NVSHMEM_IB_ENABLE_IBGDA")
        .or_else(|| value("NVSHMEM_REMOTE_TRANSPORT").filter(is_transport))
        .or_else(|| value("NCCL_GIN_TYPE").filter(is_gdaki));
    let Some(wanted) = wanted else {
        return Vec::new();
    };
    let named = format!("{}={} ({})", wanted.name, wanted.value, wanted.place);
    if value("NVSHMEM_IBGDA_NIC_HANDLER").is_some_and(|it| it.value == "cpu") {
        return vec![at(
            Level::Ok,
            format!("{named}: the processor rings the doorbells"),
        )];
    }
    let found = it
        .shared
        .of_doctor
        .iter()
        .find(|finding| finding.check == "ibgda");
    match found {
        None => {
            let why = "it is not visible whether nvidia.ko allows that".to_owned();
            vec![unseen(named, &Unseen::Failed(why))]
        }
        Some(finding) if finding.level == Level::Ok => {
            vec![at(Level::Ok, format!("{named}: {}", finding.found))]
        }
        Some(finding) => {
            let (level, more) = match falls_back(it) {
                true => (
                    Level::Note,
                    "; this NVSHMEM falls back to a thread of the processor",
                ),
                false => (Level::Warning, ""),
            };
            vec![Finding {
                why: finding.why.clone(),
                fix: finding.fix.clone(),
                ..at(level, format!("{named}: {}{more}", finding.found))
            }]
        }
    }
}

/// Returns `true` if NVSHMEM can use IBGDA without the driver's setting. According to its release
/// notes, NVSHMEM 3.4.5 and newer can, unless the GPU must ring the doorbells.
fn falls_back(it: &At<'_>) -> bool {
    let handler = it.member.setting("NVSHMEM_IBGDA_NIC_HANDLER");
    let is_for_gpu =
        handler.is_some_and(|it| it.value == "gpu") || it.member.setting("NCCL_GIN_TYPE").is_some();
    let is_new = |library: &Library| {
        library
            .numbers()
            .is_some_and(|it| it.as_slice() >= [3, 4, 5].as_slice())
    };
    let mut libraries = it.member.mapped("NVSHMEM").peekable();
    !is_for_gpu && libraries.peek().is_some() && libraries.all(is_new)
}

/// Libraries whose older versions do not detect every module. An entry has the library's name and
/// the first version that detects the module in another way. The last field is the name of older
/// versions in `doctor`'s check of consumers.
const PROBES: [(&str, [u32; 3], &str); 3] = [
    ("NCCL", [2, 23, 0], "NCCL to 2.22"),
    ("UCX", [1, 18, 0], "UCX to 1.17"),
    ("NVSHMEM", [3, 4, 5], "NVSHMEM before 3.4.5"),
];

/// Reports mapped libraries whose file was replaced, libraries that are mapped from several files,
/// and libraries that do not find the loaded module.
fn libraries(it: &At<'_>) -> Vec<Finding> {
    let mut findings = Vec::new();
    let libraries = || it.member.libraries.iter().flatten();
    for library in libraries().filter(|library| library.is_deleted) {
        findings.push(
            at(
                Level::Note,
                format!(
                    "{} was replaced or removed after the process mapped it",
                    library.path
                ),
            )
            .why("The process runs the older version, which may differ from the installed one.")
            .fix("start the job again"),
        );
    }
    for name in ["NCCL", "UCX", "NVSHMEM", "libibverbs"] {
        let paths: Vec<&str> = it
            .member
            .mapped(name)
            .map(|library| library.path.as_str())
            .collect();
        if paths.len() > 1 {
            let found = format!(
                "{name} is mapped {} times: {}",
                paths.len(),
                paths.join(", ")
            );
            findings.push(at(Level::Note, found));
        }
    }
    findings.extend(libraries().filter_map(|library| blind(it, library)));
    findings
}

/// Reports a library that is too old to find the loaded module.
fn blind(it: &At<'_>, library: &Library) -> Option<Finding> {
    let (name, first, consumer) = PROBES.iter().find(|(name, ..)| *name == library.name)?;
    let numbers = library.numbers()?;
    if numbers.as_slice() >= first.as_slice() {
        return None;
    }
    let consumers = it
        .shared
        .of_doctor
        .iter()
        .filter(|finding| finding.check == "consumers");
    let mut bad = consumers.filter(|finding| finding.level != Level::Ok);
    let finding = bad.find(|finding| finding.found.contains(consumer))?;
    let version = library.version.as_deref().unwrap_or_default();
    let found = format!("{name} {version} does not find nvidia_peermem, which is loaded");
    Some(Finding {
        why: Some(finding.found.clone()),
        costs: finding.costs.clone(),
        fix: finding.fix.clone(),
        ..at(finding.level, found)
    })
}

/// Reports whether the preload library is mapped and turned on.
fn preload(it: &At<'_>) -> Vec<Finding> {
    let named = it
        .member
        .setting("LD_PRELOAD")
        .filter(|it| it.value.contains(PRELOAD));
    let is_off = it
        .member
        .setting("PEERMEM_SHIM")
        .is_some_and(|it| it.value == "off");
    let mapped = it.member.mapped("peermem preload").next();
    match (mapped, named) {
        (Some(library), _) if is_off => vec![at(
            Level::Note,
            format!(
                "{} is mapped, and PEERMEM_SHIM=off turns it off",
                library.path
            ),
        )],
        (Some(library), _) => vec![at(
            Level::Ok,
            format!(
                "{} is mapped: ibv_reg_mr falls back to dma-buf",
                library.path
            ),
        )],
        (None, Some(setting)) if it.member.libraries.is_ok() => {
            vec![at(
            Level::Warning,
            format!("LD_PRELOAD={} names the preload library, but it is not mapped", setting.value),
        )
        .why("The dynamic linker did not find the file, or the program is static or set-user-ID.")
        .fix("set LD_PRELOAD to the full path of the library as the job sees it, also in a container")]
        }
        _ => Vec::new(),
    }
}
