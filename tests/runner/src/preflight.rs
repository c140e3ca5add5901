// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Before anything is made: what there is to make, what that takes here and why, and whether this machine has it.
//!
//! What is missing is told in one sentence each, with what to do about it, and then nothing is begun. Where all is made
//! already, nothing is looked at and nothing is said.

use std::collections::BTreeMap;
use std::fs;
use std::io::{stdin, IsTerminal as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::{bail, Result};

use crate::arch::Arch;
use crate::documents::grouped;
use crate::paths::Paths;
use crate::progress::output;
use crate::{apt, foreign, kernel, programs, progress, stamp, toolchain};

/// What a machine of the default size takes: its own memory, and what QEMU keeps of it in tables and translated code.
const MACHINE_MIB: u64 = 2048 + 512;

/// How long the package sources may take to answer, in seconds.
const PATIENCE: u32 = 6;

/// Files that apt and dpkg lock while they work.
const LOCKS: [&str; 4] = [
    "/var/lib/dpkg/lock-frontend",
    "/var/lib/dpkg/lock",
    "/var/lib/apt/lists/lock",
    "/var/cache/apt/archives/lock",
];

/// Something that is to be made.
#[derive(Debug, Clone, PartialEq)]
struct Step {
    name: String,
    why: String,
    /// Beginnings of the titles of its stages.
    stages: Vec<String>,
    /// From nothing, on two processors.
    seconds: f64,
    /// Of it, what more processors share.
    shared: f64,
    /// In the cache, while it is made.
    mib: u64,
    /// Nothing of it is there: its duration is worth keeping.
    whole: bool,
    /// Needs the package sources.
    fetches: bool,
}

impl Step {
    /// How long its stages took, of those that are done.
    fn taken(&self, stages: &[(String, Duration)]) -> Duration {
        stages
            .iter()
            .filter(|(title, _)| self.stages.iter().any(|stage| title.starts_with(stage)))
            .map(|(_, duration)| *duration)
            .sum()
    }
}

/// What packages will take outside of the cache.
#[derive(Debug, Clone, Default, PartialEq)]
struct Packages {
    names: Vec<String>,
    installed_mib: u64,
    download_mib: u64,
}

/// What is to be made, in order.
#[derive(Debug, Clone, Default)]
struct Plan {
    steps: Vec<Step>,
    packages: Packages,
    machines: u64,
}

/// Who may install packages here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rights {
    Root,
    /// Without a password, or with somebody to type it.
    Sudo,
    /// With a password, and nobody to type it.
    Mute,
    None,
}

/// A file system that something is to be written to.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Room {
    device: u64,
    place: PathBuf,
    free_mib: u64,
    wanted_mib: u64,
}

/// What was seen of this machine.
#[derive(Debug, Clone)]
struct Facts {
    architecture: String,
    debian: bool,
    rooms: Vec<Room>,
    cache: PathBuf,
    available_mib: Option<u64>,
    rights: Rights,
    /// Who has apt's or dpkg's lock.
    busy: Option<String>,
    /// dpkg stopped in the middle of something, and it was not this program that had it work.
    interrupted: bool,
    /// Why the package sources cannot be reached.
    unreachable: Option<String>,
}

/// What an action of the test VM's will want.
pub(crate) struct Wanted<'a> {
    pub(crate) kernels: &'a [&'a str],
    pub(crate) modules: bool,
    /// Those for the kernels' processors, and a root where programs of this machine do not run on them.
    pub(crate) programs: bool,
    /// So many machines at once.
    pub(crate) machines: usize,
}

/// The steps that were announced, for [`record`].
static ANNOUNCED: Mutex<Vec<Step>> = Mutex::new(Vec::new());

/// Says what is to be made. An error where this machine lacks something that it takes.
pub(crate) fn check(paths: &Paths, wanted: &Wanted<'_>) -> Result<()> {
    let plan = plan(paths, wanted)?;
    if plan.steps.is_empty() {
        return Ok(());
    }
    let facts = look(paths, &plan);
    let lacks = lacks(&facts, &plan);
    if !lacks.is_empty() {
        bail!("{}", lacks.join("\nrunner: "));
    }
    let history = read_history(&history_file(paths));
    let processors = std::thread::available_parallelism().map_or(2, usize::from);
    eprint!(
        "{}",
        announcement(&plan, &facts.rooms, processors, &history)
    );
    *ANNOUNCED.lock().unwrap_or_else(PoisonError::into_inner) = plan.steps;
    Ok(())
}

/// Keeps how long the announced steps took, for the next time that they are announced.
pub(crate) fn record(paths: &Paths) {
    let steps = ANNOUNCED.lock().unwrap_or_else(PoisonError::into_inner);
    let file = history_file(paths);
    let mut history = read_history(&file);
    let before = history.clone();
    add_to_history(&mut history, &steps, &progress::taken());
    if history != before {
        let text: String = history
            .iter()
            .map(|(name, seconds)| format!("{seconds:.0} {name}\n"))
            .collect();
        // It is for an estimate alone.
        let _ = stamp::replace(&file, text.as_bytes());
    }
}

fn history_file(paths: &Paths) -> PathBuf {
    paths.cache.join("durations")
}

/// Seconds by step.
type History = BTreeMap<String, f64>;

fn read_history(file: &Path) -> History {
    let text = fs::read_to_string(file).unwrap_or_default();
    text.lines()
        .filter_map(|line| {
            let (seconds, name) = line.split_once(' ')?;
            Some((name.to_owned(), seconds.parse().ok()?))
        })
        .collect()
}

fn add_to_history(history: &mut History, steps: &[Step], taken: &[(String, Duration)]) {
    for step in steps.iter().filter(|step| step.whole) {
        let seconds = step.taken(taken).as_secs_f64();
        if seconds >= 1.0 {
            history.insert(step.name.clone(), seconds);
        }
    }
}

/// Says what the announced steps took. Some were done side by side.
pub(crate) fn tell() {
    let announced = ANNOUNCED.lock().unwrap_or_else(PoisonError::into_inner);
    let taken = progress::taken();
    let times: Vec<(&str, Duration)> = announced
        .iter()
        .map(|step| (step.name.as_str(), step.taken(&taken)))
        .filter(|(_, time)| !time.is_zero())
        .collect();
    if times.is_empty() {
        return;
    }
    let width = times.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    eprintln!("runner: made, each in");
    for (name, time) in times {
        eprintln!("  {name:width$}  {}", progress::duration(time));
    }
}

/// "src/persistent.rs has changed", where a stamp's files have.
fn change(stamp: &Path, repo: &Path) -> Option<String> {
    let changed = stamp::changed(stamp, repo);
    let first = changed.first()?;
    Some(match changed.len() {
        1 => format!("{first} has changed"),
        more => format!("{first} and {} more have changed", more - 1),
    })
}

/// A step with all that most have alike.
fn step(name: &str, why: &str, stages: &[&str]) -> Step {
    Step {
        name: name.to_owned(),
        why: why.to_owned(),
        stages: stages.iter().map(|stage| (*stage).to_owned()).collect(),
        seconds: 0.0,
        shared: 0.0,
        mib: 0,
        whole: true,
        fetches: false,
    }
}

fn plan(paths: &Paths, wanted: &Wanted<'_>) -> Result<Plan> {
    let mut plan = Plan {
        machines: wanted.machines as u64,
        ..Plan::default()
    };

    let archs = kernel::archs(wanted.kernels);
    let is_foreign = wanted.programs && archs.iter().any(|arch| arch.foreign().is_some());
    let names = apt::missing_all(if is_foreign { apt::FOREIGN } else { &[] })?;
    if !names.is_empty() {
        plan.packages = measure(names);
        let names = &plan.packages.names;
        let mut why = format!("{} missing", names[..names.len().min(3)].join(", "));
        if let Some(more @ 1..) = names.len().checked_sub(3) {
            why = why.replace(" missing", &format!(" and {more} more missing"));
        }
        plan.steps.push(Step {
            seconds: 28.0 * names.len() as f64 / 25.0,
            fetches: true,
            ..step("packages", &why, &["packages:"])
        });
    }

    let mut sources: Vec<&str> = Vec::new();
    let mut any_source = false;
    for name in wanted.kernels {
        let Some(flavour) = kernel::flavour(name) else {
            continue;
        };
        let home = paths.cache.join("kernel");
        let source = home.join(flavour.source());
        if !source.join("source.name").exists() && !sources.contains(&flavour.source()) {
            sources.push(flavour.source());
            any_source = true;
            let begins = ["looking", "downloading", "unpacking"]
                .map(|what| format!("kernel {}: {what}", flavour.name));
            plan.steps.push(Step {
                seconds: 20.0,
                mib: 850,
                fetches: true,
                stages: begins.to_vec(),
                ..step(
                    &format!("source of kernel {}", flavour.source()),
                    "not fetched yet",
                    &[],
                )
            });
        }
        let stamp = home.join(name).join("stamp");
        // A build that was interrupted goes on where it was.
        let begun = home.join(name).join("build/.config").exists();
        let why = match (stamp.exists(), begun) {
            (false, false) => Some("not built yet".to_owned()),
            (false, true) => Some("not complete yet".to_owned()),
            (true, _) => change(&stamp, &paths.repo),
        };
        let compiled = why.is_some();
        if let Some(why) = why {
            let begins = ["configuring", "compiling"].map(|what| format!("kernel {name}: {what}"));
            plan.steps.push(Step {
                seconds: flavour.seconds,
                shared: 0.8,
                mib: if begun { 0 } else { flavour.mib },
                whole: !begun && !stamp.exists(),
                stages: begins.to_vec(),
                ..step(&format!("kernel {name}"), &why, &[])
            });
        }
        let products = paths.cache.join("modules").join(name);
        let names = match flavour.is_stock() {
            true => ["gpu-nvidia", "ours-portable-on-nvidia"],
            false => ["gpu", "ours"],
        };
        let modules = names.map(|name| products.join(format!("{name}.stamp")));
        let why = if modules.iter().any(|stamp| !stamp.exists()) {
            Some("not built yet".to_owned())
        } else if compiled {
            Some("the kernel is made anew".to_owned())
        } else {
            modules.iter().find_map(|stamp| change(stamp, &paths.repo))
        };
        if let (true, Some(why)) = (wanted.modules, why) {
            plan.steps.push(Step {
                seconds: 12.0,
                shared: 0.5,
                mib: 20,
                whole: !products.exists(),
                fetches: !paths.cache.join("control/version").exists(),
                ..step(
                    &format!("modules for {name}"),
                    &why,
                    &["module ", "control:"],
                )
            });
        }
    }
    if !toolchain::has_bindgen(paths) {
        plan.steps.push(Step {
            seconds: 5.0,
            mib: 12,
            fetches: true,
            ..step(
                "bindgen",
                "no bindgen here that the kernel takes",
                &["bindgen"],
            )
        });
    }
    if any_source && !paths.cache.join("suites").exists() {
        // Lists of suites that this machine's apt does not have.
        if let Some(first) = plan.steps.iter_mut().find(|step| step.fetches) {
            first.mib += 65;
        }
    }
    for arch in archs {
        if wanted.programs {
            plan_programs(paths, arch, &mut plan);
        }
    }
    Ok(plan)
}

fn plan_programs(paths: &Paths, arch: Arch, plan: &mut Plan) {
    if let (Some(name), false) = (arch.foreign(), foreign::is_there(paths, arch)) {
        plan.steps.push(Step {
            seconds: 30.0,
            mib: 700,
            fetches: true,
            ..step(
                &format!("root for {name}"),
                "not made of Debian's packages yet",
                &[&format!("{name}:")],
            )
        });
    }
    let gdr = programs::gdr(paths, arch);
    let whole = !gdr.exists();
    let why = if whole {
        Some("not compiled yet".to_owned())
    } else {
        change(&gdr.with_extension("stamp"), &paths.repo)
    };
    if let Some(why) = why {
        plan.steps.push(Step {
            seconds: 111.0,
            shared: 0.7,
            mib: if whole { 400 } else { 20 },
            whole,
            ..step("programs", &why, &["programs:"])
        });
    }
}

/// What apt says of these packages and all that they need. Where it knows some of them only after it has read the lists,
/// what it said of all that the test runner installs, on a Debian 12 that had none of them.
fn measure(names: Vec<String>) -> Packages {
    let sizes = || -> Option<(u64, u64)> {
        let simulated = output(
            Command::new("apt-get")
                .args(["-s", "-q", "install", "--no-install-recommends"])
                .args(&names)
                .env("LC_ALL", "C"),
        )
        .ok()?;
        let new: Vec<&str> = simulated
            .lines()
            .filter_map(|line| line.strip_prefix("Inst ")?.split(' ').next())
            .collect();
        let shown = output(
            Command::new("apt-cache")
                .args(["show", "--no-all-versions"])
                .args(&new)
                .env("LC_ALL", "C"),
        )
        .ok()?;
        Some((
            sum(&shown, "Installed-Size: ") >> 10,
            sum(&shown, "Size: ") >> 20,
        ))
    };
    let (installed_mib, download_mib) = sizes().unwrap_or((2100, 430));
    Packages {
        names,
        installed_mib,
        download_mib,
    }
}

/// The sum of a field's numbers.
fn sum(text: &str, field: &str) -> u64 {
    text.lines()
        .filter_map(|line| line.strip_prefix(field)?.trim().parse::<u64>().ok())
        .sum()
}

/// The folder itself, or the nearest above it that exists.
fn existing(path: &Path) -> &Path {
    path.ancestors()
        .find(|path| path.exists())
        .unwrap_or(Path::new("/"))
}

fn look(paths: &Paths, plan: &Plan) -> Facts {
    let mut rooms: Vec<Room> = Vec::new();
    let packages = &plan.packages;
    for (place, wanted_mib) in [
        // Room for logs, and for what a machine is given.
        (
            paths.cache.as_path(),
            64 + plan.steps.iter().map(|step| step.mib).sum::<u64>(),
        ),
        (Path::new("/usr"), packages.installed_mib),
        (Path::new("/var/cache/apt/archives"), packages.download_mib),
        // Compilers put what they pass on to each other there.
        (&std::env::temp_dir(), 64),
    ] {
        let place = existing(place);
        let (Ok(metadata), Ok(space)) = (fs::metadata(place), rustix::fs::statvfs(place)) else {
            continue;
        };
        match rooms.iter_mut().find(|room| room.device == metadata.dev()) {
            Some(room) => room.wanted_mib += wanted_mib,
            None => rooms.push(Room {
                device: metadata.dev(),
                place: place.to_path_buf(),
                free_mib: space.f_bavail.saturating_mul(space.f_frsize) >> 20,
                wanted_mib,
            }),
        }
    }
    let installs = !packages.names.is_empty();
    let fetches = plan.steps.iter().any(|step| step.fetches);
    let locks = fs::read_to_string("/proc/locks").unwrap_or_default();
    let files: Vec<(u64, u64)> = LOCKS
        .iter()
        .filter_map(|file| fs::metadata(file).ok())
        .map(|metadata| (metadata.dev(), metadata.ino()))
        .collect();
    Facts {
        architecture: std::env::consts::ARCH.to_owned(),
        debian: Path::new("/etc/debian_version").exists(),
        rooms,
        cache: paths.cache.clone(),
        available_mib: available(&fs::read_to_string("/proc/meminfo").unwrap_or_default()),
        rights: rights(),
        busy: installs
            .then(|| holder(&locks, &files))
            .flatten()
            .map(named),
        interrupted: installs && !apt::was_begun(paths) && apt::is_interrupted(),
        unreachable: fetches.then(|| probe(paths)).flatten(),
    }
}

/// "apt-get (process 17)".
fn named(process: u32) -> String {
    let name = fs::read_to_string(format!("/proc/{process}/comm")).unwrap_or_default();
    match name.trim() {
        "" => format!("process {process}"),
        name => format!("{name} (process {process})"),
    }
}

/// In MiB: memory and swap that are to be had, of /proc/meminfo.
fn available(meminfo: &str) -> Option<u64> {
    let field = |name: &str| -> Option<u64> {
        meminfo
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?
            .split_whitespace()
            .next()?
            .parse()
            .ok()
    };
    Some((field("MemAvailable")? + field("SwapFree").unwrap_or(0)) >> 10)
}

/// The process that holds a lock on one of the files, of /proc/locks.
fn holder(locks: &str, files: &[(u64, u64)]) -> Option<u32> {
    locks.lines().find_map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        // One that waits has an arrow before its kind.
        let &[_, _, _, _, process, place, ..] = words.as_slice() else {
            return None;
        };
        let mut parts = place.split(':');
        let (major, minor) = (parts.next()?, parts.next()?);
        let (major, minor) = (
            u32::from_str_radix(major, 16).ok()?,
            u32::from_str_radix(minor, 16).ok()?,
        );
        let inode: u64 = parts.next()?.parse().ok()?;
        let is_one = files.iter().any(|(device, file)| {
            // An overlay's files have another device here than stat says.
            let same = rustix::fs::major(*device) == major && rustix::fs::minor(*device) == minor;
            *file == inode && (same || rustix::fs::major(*device) == 0)
        });
        is_one.then(|| process.parse().ok())?
    })
}

fn rights() -> Rights {
    if rustix::process::geteuid().is_root() {
        return Rights::Root;
    }
    let asked = Command::new("sudo")
        .args(["-n", "true"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    match asked {
        Err(_) => Rights::None,
        Ok(status) if status.success() || stdin().is_terminal() => Rights::Sudo,
        Ok(_) => Rights::Mute,
    }
}

/// Fetches what apt would fetch first, as it would. What is in the way of that.
fn probe(paths: &Paths) -> Option<String> {
    let listed = output(
        Command::new("apt-get")
            .args(["--print-uris", "update"])
            .env("LC_ALL", "C"),
    );
    let listed = match listed {
        Ok(listed) => listed,
        Err(error) => return Some(format!("{error:#}")),
    };
    let Some(address) = first_address(&listed) else {
        return Some("apt has none".to_owned());
    };
    let folder = paths.run_directory().ok()?;
    let result = Command::new("timeout")
        .arg((PATIENCE + 2).to_string())
        .arg("/usr/lib/apt/apt-helper")
        .args(["-o", "Acquire::Retries=0", "-o", "APT::Sandbox::User="])
        .args(["-o", &format!("Acquire::http::Timeout={PATIENCE}")])
        .args(["-o", &format!("Acquire::https::Timeout={PATIENCE}")])
        .arg("download-file")
        .arg(address)
        .arg(folder.join("probe"))
        .env("LC_ALL", "C")
        .stdin(Stdio::null())
        .output();
    let _ = fs::remove_dir_all(&folder);
    match result {
        Ok(result) if result.status.success() => None,
        Ok(result) => Some(complaint(&String::from_utf8_lossy(&result.stderr))),
        Err(error) => Some(error.to_string()),
    }
}

/// Of what `apt-get --print-uris update` prints, the first that comes through a network; or else the first.
fn first_address(listed: &str) -> Option<&str> {
    let addresses = || listed.lines().filter_map(|line| line.split('\'').nth(1));
    addresses()
        .find(|address| address.starts_with("http"))
        .or_else(|| addresses().next())
}

/// apt's last word.
fn complaint(errors: &str) -> String {
    errors
        .lines()
        .rev()
        .find_map(|line| line.strip_prefix("E: ").or(line.strip_prefix("W: ")))
        .map_or_else(
            || format!("no answer in {PATIENCE} s"),
            |line| line.trim().trim_end_matches('.').to_owned(),
        )
}

/// What this machine lacks for the plan, each in one sentence with what to do about it.
fn lacks(facts: &Facts, plan: &Plan) -> Vec<String> {
    let mut said = Vec::new();
    if facts.architecture != "x86_64" {
        said.push(format!(
            "this machine is {}, and the test VM's kernels and its machine are x86-64: use a machine of that kind",
            facts.architecture
        ));
    }
    if !facts.debian {
        said.push(
            "this is no Debian, whose packages the test runner installs: use Debian 12 or newer, or a container of it"
                .to_owned(),
        );
    }
    for room in facts
        .rooms
        .iter()
        .filter(|room| room.wanted_mib > room.free_mib)
    {
        let way_out = if facts.cache.starts_with(&room.place) && room.place != Path::new("/") {
            "delete something there, or set XDG_CACHE_HOME to a folder elsewhere"
        } else {
            "delete something there ('sudo apt-get clean', for a beginning)"
        };
        said.push(format!(
            "no room: {} MiB are free in the file system of {}, and {} MiB are needed: {way_out}",
            grouped(&room.free_mib),
            room.place.display(),
            grouped(&room.wanted_mib)
        ));
    }
    let wanted = plan.machines * MACHINE_MIB;
    if let Some(available) = facts.available_mib.filter(|available| *available < wanted) {
        said.push(format!(
            "too little memory: {} MiB are available, and {} MiB are needed: end other programs, or add swap",
            grouped(&available),
            grouped(&wanted)
        ));
    }
    let names = plan.packages.names.join(" ");
    if !names.is_empty() {
        match facts.rights {
            Rights::Root | Rights::Sudo => {}
            Rights::Mute => said.push(format!(
                "packages are missing, and sudo asks for a password where nobody can type one: run 'sudo apt-get install {names}' first"
            )),
            Rights::None => said.push(format!(
                "packages are missing, and this user is not root and has no sudo: as root, run 'apt-get install {names}' first"
            )),
        }
    }
    if let Some(who) = &facts.busy {
        said.push(format!(
            "apt is in use by {who}: wait until that has ended, then run the same again"
        ));
    }
    if facts.interrupted {
        said.push(
            "dpkg was interrupted at some time and installs nothing: run 'sudo dpkg --configure -a' first".to_owned(),
        );
    }
    if let Some(why) = &facts.unreachable {
        said.push(format!(
            "apt's package sources cannot be reached ({why}): see what 'sudo apt-get update' says"
        ));
    }
    said
}

/// "40 s", "12 min".
fn roughly(seconds: f64) -> String {
    if seconds < 90.0 {
        format!("{:.0} s", (seconds / 10.0).ceil() * 10.0)
    } else {
        format!("{:.0} min", (seconds / 60.0).ceil())
    }
}

/// The seconds of a step here: as many as the last time, or those of two processors, scaled.
fn estimate(step: &Step, processors: usize, history: &History) -> f64 {
    let scaled = || {
        let factor = 2.0 / processors as f64;
        step.seconds * (step.shared * factor + 1.0 - step.shared)
    };
    history.get(&step.name).copied().unwrap_or_else(scaled)
}

fn announcement(plan: &Plan, rooms: &[Room], processors: usize, history: &History) -> String {
    let mut text = String::new();
    let mut total = 0.0;
    let width = plan.steps.iter().map(|step| step.name.len()).max();
    let width = width.unwrap_or_default();
    let mut lines = String::new();
    // The programs are compiled beside a kernel, whose time was measured so.
    let beside = plan
        .steps
        .iter()
        .any(|step| step.name.starts_with("kernel "));
    for step in &plan.steps {
        let seconds = estimate(step, processors, history);
        if !(beside && step.name == "programs") {
            total += seconds;
        }
        let mib = match step.name.as_str() {
            "packages" => plan.packages.installed_mib + plan.packages.download_mib,
            _ => step.mib,
        };
        // Less than from nothing, by nobody knows how much.
        let most = if step.whole { "     " } else { "up to" };
        lines.push_str(&format!(
            "    {:width$}  {most} {:>6}  {:>5} MiB  {}\n",
            step.name,
            roughly(seconds),
            grouped(&mib),
            step.why
        ));
    }
    let plural = if processors == 1 { "" } else { "s" };
    text.push_str(&format!(
        "  to be made first, in some {} on {processors} processor{plural}:\n{lines}",
        roughly(total)
    ));
    for room in rooms {
        text.push_str(&format!(
            "    {} MiB in the file system of {}, where {} MiB are free\n",
            grouped(&room.wanted_mib),
            room.place.display(),
            grouped(&room.free_mib)
        ));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(name: &str) -> Step {
        Step {
            name: name.to_owned(),
            why: "not built yet".to_owned(),
            stages: vec![format!("{name}: ")],
            seconds: 400.0,
            shared: 0.5,
            mib: 1000,
            whole: true,
            fetches: false,
        }
    }

    fn plan_with(names: &[&str]) -> Plan {
        Plan {
            steps: vec![step("kernel 7.x")],
            packages: Packages {
                names: names.iter().map(|name| (*name).to_owned()).collect(),
                ..Packages::default()
            },
            machines: 1,
        }
    }

    fn good() -> Facts {
        Facts {
            architecture: "x86_64".to_owned(),
            debian: true,
            rooms: vec![Room {
                device: 1,
                place: PathBuf::from("/home/u/.cache"),
                free_mib: 2000,
                wanted_mib: 1064,
            }],
            cache: PathBuf::from("/home/u/.cache/peermem-rs"),
            available_mib: Some(4000),
            rights: Rights::Root,
            busy: None,
            interrupted: false,
            unreachable: None,
        }
    }

    #[test]
    fn a_good_machine_lacks_nothing() {
        assert!(lacks(&good(), &plan_with(&["gcc"])).is_empty());
    }

    #[test]
    fn each_lack_is_one_sentence_with_a_way_out() {
        let with = |change: fn(&mut Facts)| {
            let mut facts = good();
            change(&mut facts);
            lacks(&facts, &plan_with(&["gcc", "make"]))
        };
        let cases: [(Vec<String>, &str, &str); 10] = [
            (
                with(|facts| facts.architecture = "aarch64".to_owned()),
                "is aarch64",
                "use a machine",
            ),
            (
                with(|facts| facts.debian = false),
                "no Debian",
                "use Debian 12",
            ),
            (
                with(|facts| facts.rooms[0].free_mib = 1000),
                "no room: 1,000 MiB are free",
                "XDG_CACHE_HOME",
            ),
            (
                with(|facts| {
                    facts.rooms[0].free_mib = 0;
                    facts.rooms[0].place = PathBuf::from("/usr");
                }),
                "no room: 0 MiB",
                "apt-get clean",
            ),
            (
                with(|facts| facts.available_mib = Some(2559)),
                "2,559 MiB are available",
                "add swap",
            ),
            (
                with(|facts| facts.rights = Rights::None),
                "not root",
                "'apt-get install gcc make'",
            ),
            (
                with(|facts| facts.rights = Rights::Mute),
                "password",
                "'sudo apt-get install gcc make'",
            ),
            (
                with(|facts| facts.busy = Some("apt (process 7)".to_owned())),
                "in use by apt (process 7)",
                "wait",
            ),
            (
                with(|facts| facts.interrupted = true),
                "interrupted",
                "'sudo dpkg --configure -a'",
            ),
            (
                with(|facts| facts.unreachable = Some("no route".to_owned())),
                "(no route)",
                "apt-get update",
            ),
        ];
        for (said, what, way_out) in cases {
            assert_eq!(said.len(), 1, "{said:?}");
            assert!(
                said[0].contains(what) && said[0].contains(way_out),
                "{said:?}"
            );
            assert_eq!(said[0].lines().count(), 1);
        }
        let mut facts = good();
        facts.rights = Rights::None;
        assert!(
            lacks(&facts, &plan_with(&[])).is_empty(),
            "nothing to install"
        );
        facts.rights = Rights::Sudo;
        facts.available_mib = None;
        assert!(lacks(&facts, &plan_with(&["gcc"])).is_empty());
    }

    #[test]
    fn memory_that_is_to_be_had() {
        let text =
            "MemTotal: 9 kB\nMemFree: 9 kB\nMemAvailable:  3145728 kB\nSwapFree: 1048576 kB\n";
        assert_eq!(available(text), Some(4096));
        assert_eq!(available("MemAvailable: 2048 kB\n"), Some(2));
        assert_eq!(available("MemFree: 2048 kB\n"), None);
    }

    #[test]
    fn who_has_a_lock() {
        let locks = "1: POSIX  ADVISORY  WRITE 4711 fe:01:1234 0 EOF\n\
            1: -> POSIX  ADVISORY  WRITE 4712 fe:01:1234 0 EOF\n\
            2: FLOCK  ADVISORY  WRITE 815 00:2a:77 0 EOF\n";
        let device = rustix::fs::makedev(0xfe, 1);
        assert_eq!(holder(locks, &[(device, 1234)]), Some(4711));
        assert_eq!(holder(locks, &[(device, 77)]), None);
        assert_eq!(holder(locks, &[(rustix::fs::makedev(0, 9), 77)]), Some(815));
        assert_eq!(holder("", &[(device, 1234)]), None);
    }

    #[test]
    fn what_apt_would_fetch_first() {
        let listed =
            "'file:/x/dists/a/InRelease' x 0 \n'http://m.example/dists/a/InRelease' y 0 \n";
        assert_eq!(
            first_address(listed),
            Some("http://m.example/dists/a/InRelease")
        );
        assert_eq!(first_address("'file:/x' y 0 "), Some("file:/x"));
        assert_eq!(first_address("\n"), None);
        assert_eq!(
            complaint("W: a\nE: Could not resolve 'm'.\nx"),
            "Could not resolve 'm'"
        );
        assert_eq!(complaint(""), format!("no answer in {PATIENCE} s"));
    }

    #[test]
    fn sizes_are_added() {
        let shown = "Package: a\nInstalled-Size: 1024\nSize: 10\n\nPackage: b\nInstalled-Size: 2048\nSize: 5\n";
        assert_eq!(sum(shown, "Installed-Size: "), 3072);
        assert_eq!(sum(shown, "Size: "), 15);
    }

    #[test]
    fn estimates_scale_until_they_are_known() {
        let mut history = History::new();
        let step = step("kernel 7.x");
        assert_eq!(estimate(&step, 2, &history), 400.0);
        assert_eq!(estimate(&step, 4, &history), 300.0);
        let taken = [
            (
                "kernel 7.x: configuring".to_owned(),
                Duration::from_secs(10),
            ),
            ("kernel 7.x: compiling".to_owned(), Duration::from_secs(240)),
            ("kernel 7.y: compiling".to_owned(), Duration::from_secs(999)),
        ];
        let part = Step {
            whole: false,
            ..step.clone()
        };
        add_to_history(&mut history, &[part], &taken);
        assert!(history.is_empty());
        add_to_history(&mut history, std::slice::from_ref(&step), &taken);
        assert_eq!(estimate(&step, 2, &history), 250.0);
    }

    #[test]
    fn the_plan_is_told_with_reasons() {
        let text = announcement(&plan_with(&[]), &good().rooms, 2, &History::new());
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            lines[0],
            "  to be made first, in some 7 min on 2 processors:"
        );
        assert_eq!(
            lines[1],
            "    kernel 7.x         7 min  1,000 MiB  not built yet"
        );
        assert!(lines[2].contains("1,064 MiB in the file system of /home/u/.cache"));
        assert_eq!([5.0, 41.0, 100.0].map(roughly), ["10 s", "50 s", "2 min"]);
    }
}
