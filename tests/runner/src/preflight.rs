// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Checks before anything is made: lists the necessary steps with their cost and their reason, and
//! checks that this machine can do these steps.
//!
//! Each missing requirement is reported in one sentence with advice, and nothing is started. If no
//! step is necessary, nothing is checked or printed.

mod facts;
mod plan;

use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::{bail, Result};

use self::facts::{look, Facts, Rights, Room};
pub(crate) use self::plan::Wanted;
use self::plan::{plan, Plan, Step};

use crate::documents::grouped;
use crate::history::{History, When};
use crate::paths::Paths;
use crate::progress;

/// Memory that a default VM needs, in MiB: the VM's own memory, and QEMU's tables and translated
/// code.
const MACHINE_MIB: u64 = 2048 + 512;

/// The announced steps, for [`record`].
static ANNOUNCED: Mutex<Vec<Step>> = Mutex::new(Vec::new());

/// Prints the steps that are necessary. Fails if this machine lacks something that they need.
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
    let history = History::load(paths);
    let known = |name: &str| history.time(name);
    let processors = std::thread::available_parallelism().map_or(2, usize::from);
    eprint!("{}", announcement(&plan, &facts.rooms, processors, known));
    *ANNOUNCED.lock().unwrap_or_else(PoisonError::into_inner) = plan.steps;
    Ok(())
}

/// Saves the durations of the announced steps for the next announcement.
pub(crate) fn record(paths: &Paths) {
    let steps = ANNOUNCED.lock().unwrap_or_else(PoisonError::into_inner);
    let mut history = History::load(paths);
    for (name, time) in measured(&steps, &progress::taken()) {
        // The time is only used for an estimate.
        let _ = history.add(paths, name, time, false, &When::default());
    }
}

/// Returns the durations of steps that did all of their work.
fn measured<'a>(steps: &'a [Step], taken: &[(String, Duration)]) -> Vec<(&'a str, Duration)> {
    let whole = steps.iter().filter(|step| step.whole);
    whole
        .map(|step| (step.name.as_str(), step.taken(taken)))
        .filter(|(_, time)| time.as_secs() > 0)
        .collect()
}

/// Prints the durations of the announced steps. Some steps ran in parallel.
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
    eprintln!("runner: time of each step");
    for (name, time) in times {
        eprintln!("  {name:width$}  {}", progress::duration(time));
    }
}

/// Returns what this machine lacks for the plan, one sentence each with advice.
fn lacks(facts: &Facts, plan: &Plan) -> Vec<String> {
    let mut said = Vec::new();
    let mut say = |sentence: String| said.push(sentence);
    if facts.architecture != "x86_64" {
        say(format!(
            "this machine is {}, and the test VM and its kernels are x86-64: use an x86-64 machine",
            facts.architecture
        ));
    }
    if !facts.debian {
        let way_out = "use Debian 12 or newer, or a container of it";
        say(format!(
            "this is not Debian, and the test runner installs Debian's packages: {way_out}"
        ));
    }
    for room in facts
        .rooms
        .iter()
        .filter(|room| room.wanted_mib > room.free_mib)
    {
        let way_out = if facts.cache.starts_with(&room.place) && room.place != Path::new("/") {
            "delete something there, or set XDG_CACHE_HOME to a folder elsewhere"
        } else {
            "delete something there ('sudo apt-get clean', for a start)"
        };
        say(format!(
            "no room: {} MiB are free in the file system of {}, and {} MiB are needed: {way_out}",
            grouped(&room.free_mib),
            room.place.display(),
            grouped(&room.wanted_mib)
        ));
    }
    let wanted = plan.machines * MACHINE_MIB;
    if let Some(available) = facts.available_mib.filter(|available| *available < wanted) {
        say(format!(
            "too little memory: {} MiB are available, and {} MiB are needed: end other programs, or add swap",
            grouped(&available),
            grouped(&wanted)
        ));
    }
    let names = plan.packages.names.join(" ");
    if !names.is_empty() {
        match facts.rights {
            Rights::Root | Rights::Sudo => {}
            Rights::Mute => say(format!(
                "packages are missing, and sudo asks for a password where nobody can type one: run 'sudo apt-get install {names}' first"
            )),
            Rights::None => say(format!(
                "packages are missing, and this user is not root and has no sudo: as root, run 'apt-get install {names}' first"
            )),
        }
    }
    if let Some(who) = &facts.busy {
        say(format!(
            "apt is in use by {who}: wait until that process has ended, then run the same command again"
        ));
    }
    if facts.interrupted {
        let way_out = "run 'sudo dpkg --configure -a' first";
        say(format!(
            "dpkg was interrupted earlier, and installs nothing until that is repaired: {way_out}"
        ));
    }
    if let Some(why) = &facts.unreachable {
        say(format!(
            "apt's package sources cannot be reached ({why}): see what 'sudo apt-get update' says"
        ));
    }
    said
}

/// Formats a duration: "40 s", "12 min".
fn roughly(seconds: f64) -> String {
    if seconds < 90.0 {
        format!("{:.0} s", (seconds / 10.0).ceil() * 10.0)
    } else {
        format!("{:.0} min", (seconds / 60.0).ceil())
    }
}

/// Returns the estimated seconds of a step on this machine: its last duration, or else its duration
/// on two processors, scaled.
fn estimate(step: &Step, processors: usize, known: Option<Duration>) -> f64 {
    let scaled = || {
        let factor = 2.0 / processors as f64;
        step.seconds * (step.shared * factor + 1.0 - step.shared)
    };
    known.map_or_else(scaled, |known| known.as_secs_f64())
}

fn announcement(
    plan: &Plan,
    rooms: &[Room],
    processors: usize,
    known: impl Fn(&str) -> Option<Duration>,
) -> String {
    let mut total = 0.0;
    let width = plan
        .steps
        .iter()
        .map(|step| step.name.len())
        .max()
        .unwrap_or_default();
    let mut lines = String::new();
    // The programs are compiled in parallel with a kernel, and the kernel's time was measured that
    // way.
    let beside = plan
        .steps
        .iter()
        .any(|step| step.name.starts_with("kernel "));
    for step in &plan.steps {
        let seconds = estimate(step, processors, known(&step.name));
        if !(beside && step.name == "programs") {
            total += seconds;
        }
        let mib = match step.name.as_str() {
            "packages" => plan.packages.installed_mib + plan.packages.download_mib,
            _ => step.mib,
        };
        // An unfinished step takes less time than from scratch, but how much less is not known.
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
    let total = roughly(total);
    let mut text =
        format!("  to be made first, in about {total} on {processors} processor{plural}:\n{lines}");
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
    use std::path::PathBuf;

    use super::facts::{available, complaint, first_address, holder, PATIENCE};
    use super::plan::{step, sum, Packages};
    use super::*;

    fn plan_with(names: &[&str]) -> Plan {
        let step = Step {
            stages: vec!["kernel 7.x: ".to_owned()],
            seconds: 400.0,
            shared: 0.5,
            mib: 1000,
            ..step("kernel 7.x", "not built yet", &[])
        };
        let names = names.iter().map(|name| (*name).to_owned()).collect();
        Plan {
            steps: vec![step],
            packages: Packages {
                names,
                ..Packages::default()
            },
            machines: 1,
        }
    }

    fn good() -> Facts {
        let place = PathBuf::from("/home/u/.cache");
        Facts {
            architecture: "x86_64".to_owned(),
            debian: true,
            rooms: vec![Room {
                device: 1,
                place,
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

    /// Changes one fact about a good machine. Checks that the change makes one sentence, with these
    /// words.
    macro_rules! lacks {
        ($(|$facts:ident| $change:expr => $what:literal, $way_out:literal;)*) => {$(
            let mut $facts = good();
            $change;
            let said = lacks(&$facts, &plan_with(&["gcc", "make"]));
            let has = |words| said[0].contains(words) && said[0].lines().count() == 1;
            assert!(said.len() == 1 && has($what) && has($way_out), "{said:?}");
        )*};
    }

    #[test]
    fn each_lack_is_one_sentence_with_a_way_out() {
        lacks! {
            |facts| facts.architecture = "aarch64".to_owned() => "is aarch64", "use an x86-64 machine";
            |facts| facts.debian = false => "not Debian", "use Debian 12";
            |facts| facts.rooms[0].free_mib = 1000 => "no room: 1,000 MiB are free", "XDG_CACHE_HOME";
            |facts| (facts.rooms[0].free_mib, facts.rooms[0].place) = (0, "/usr".into()) => "no room: 0 MiB", "apt-get clean";
            |facts| facts.available_mib = Some(2559) => "2,559 MiB are available", "add swap";
            |facts| facts.rights = Rights::None => "not root", "'apt-get install gcc make'";
            |facts| facts.rights = Rights::Mute => "password", "'sudo apt-get install gcc make'";
            |facts| facts.busy = Some("apt (process 7)".to_owned()) => "in use by apt (process 7)", "wait";
            |facts| facts.interrupted = true => "interrupted", "'sudo dpkg --configure -a'";
            |facts| facts.unreachable = Some("no route".to_owned()) => "(no route)", "apt-get update";
        }
        let mut facts = good();
        assert!(lacks(&facts, &plan_with(&["gcc"])).is_empty());
        (facts.rights, facts.available_mib) = (Rights::Sudo, None);
        assert!(lacks(&facts, &plan_with(&["gcc"])).is_empty());
        facts.rights = Rights::None;
        assert!(
            lacks(&facts, &plan_with(&[])).is_empty(),
            "nothing to install"
        );
    }

    #[test]
    fn what_the_machine_says_is_read() {
        let text =
            "MemTotal: 9 kB\nMemFree: 9 kB\nMemAvailable:  3145728 kB\nSwapFree: 1048576 kB\n";
        assert_eq!(available(text), Some(4096));
        assert_eq!(available("MemAvailable: 2048 kB\n"), Some(2));
        assert_eq!(available("MemFree: 2048 kB\n"), None);

        let locks = "1: POSIX  ADVISORY  WRITE 4711 fe:01:1234 0 EOF\n\
            1: -> POSIX  ADVISORY  WRITE 4712 fe:01:1234 0 EOF\n\
            2: FLOCK  ADVISORY  WRITE 815 00:2a:77 0 EOF\n";
        let device = rustix::fs::makedev(0xfe, 1);
        assert_eq!(holder(locks, &[(device, 1234)]), Some(4711));
        assert_eq!(holder(locks, &[(device, 77)]), None);
        assert_eq!(holder(locks, &[(rustix::fs::makedev(0, 9), 77)]), Some(815));
        assert_eq!(holder("", &[(device, 1234)]), None);

        let address = "http://m.example/dists/a/InRelease";
        let listed = format!("'file:/x/dists/a/InRelease' x 0 \n'{address}' y 0 \n");
        assert_eq!(first_address(&listed), Some(address));
        assert_eq!(first_address("'file:/x' y 0 "), Some("file:/x"));
        assert_eq!(first_address("\n"), None);
        assert_eq!(
            complaint("W: a\nE: Could not resolve 'm'.\nx"),
            "Could not resolve 'm'"
        );
        assert_eq!(complaint(""), format!("no answer in {PATIENCE} s"));

        let shown = "Package: a\nInstalled-Size: 1024\nSize: 10\n\nPackage: b\nInstalled-Size: 2048\nSize: 5\n";
        assert_eq!(sum(shown, "Installed-Size: "), 3072);
        assert_eq!(sum(shown, "Size: "), 15);
    }

    #[test]
    fn estimates_scale_until_they_are_known() {
        let step = plan_with(&[]).steps.remove(0);
        assert_eq!(estimate(&step, 2, None), 400.0);
        assert_eq!(estimate(&step, 4, None), 300.0);
        let taken = [
            ("7.x: configuring", 10),
            ("7.x: compiling", 240),
            ("7.y: compiling", 999),
        ]
        .map(|(stage, seconds)| (format!("kernel {stage}"), Duration::from_secs(seconds)));
        let part = Step {
            whole: false,
            ..step.clone()
        };
        let steps = [part, step];
        let found = measured(&steps, &taken);
        let [(_, known)] = found[..] else {
            panic!("{found:?}");
        };
        assert_eq!(estimate(&steps[1], 2, Some(known)), 250.0);
    }

    #[test]
    fn the_plan_is_told_with_reasons() {
        let text = announcement(&plan_with(&[]), &good().rooms, 2, |_| None);
        let head = "  to be made first, in about 7 min on 2 processors:\n    \
                    kernel 7.x         7 min  1,000 MiB  not built yet\n    \
                    1,064 MiB in the file system of /home/u/.cache";
        assert!(text.starts_with(head), "{text}");
        assert_eq!([5.0, 41.0, 100.0].map(roughly), ["10 s", "50 s", "2 min"]);
    }
}
