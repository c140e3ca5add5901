// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Checks before anything is made: lists the necessary steps with their size and their reason, and
//! checks that this machine can do these steps.
//!
//! Each missing requirement is reported in one sentence with advice, and nothing is started. If no
//! step is necessary, nothing is checked or printed.

mod facts;
mod plan;

use std::path::Path;

use anyhow::{bail, Result};

use self::facts::{look, Facts, Rights, Room};
pub(crate) use self::plan::Wanted;
use self::plan::{plan, Plan};
use crate::documents::grouped;
use crate::paths::Paths;

/// Memory that a default VM needs, in MiB: the VM's own memory, and QEMU's tables and translated
/// code.
const MACHINE_MIB: u64 = 2048 + 512;

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
    eprint!("{}", announcement(&plan, &facts.rooms));
    Ok(())
}

/// Returns one sentence, with advice, for each requirement of the plan that this machine does not
/// meet.
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

fn announcement(plan: &Plan, rooms: &[Room]) -> String {
    let names = plan.steps.iter().map(|step| step.name.len());
    let width = names.max().unwrap_or_default();
    let mut text = "  to be made first:\n".to_owned();
    for step in &plan.steps {
        let mib = match step.name.as_str() {
            "packages" => plan.packages.installed_mib + plan.packages.download_mib,
            _ => step.mib,
        };
        let (name, mib) = (&step.name, grouped(&mib));
        text.push_str(&format!("    {name:width$}  {mib:>5} MiB  {}\n", step.why));
    }
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

    use super::facts::{available, complaint, first_address, PATIENCE};
    use super::plan::{sum, Packages};
    use super::*;

    fn plan_with(names: &[&str]) -> Plan {
        let names = names.iter().map(|name| (*name).to_owned()).collect();
        let mut plan = Plan {
            steps: Vec::new(),
            packages: Packages {
                names,
                ..Packages::default()
            },
            machines: 1,
        };
        plan.add("kernel 7.x", "not built yet", 1000, false);
        plan
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
            interrupted: false,
            unreachable: None,
        }
    }

    /// Changes one fact about a machine that meets all requirements. Checks that exactly one
    /// problem is reported, in one line with these words.
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
    fn each_missing_requirement_is_one_sentence_with_advice() {
        lacks! {
            |facts| facts.architecture = "aarch64".to_owned() => "is aarch64", "use an x86-64 machine";
            |facts| facts.debian = false => "not Debian", "use Debian 12";
            |facts| facts.rooms[0].free_mib = 1000 => "no room: 1,000 MiB are free", "XDG_CACHE_HOME";
            |facts| (facts.rooms[0].free_mib, facts.rooms[0].place) = (0, "/usr".into()) => "no room: 0 MiB", "apt-get clean";
            |facts| facts.available_mib = Some(2559) => "2,559 MiB are available", "add swap";
            |facts| facts.rights = Rights::None => "not root", "'apt-get install gcc make'";
            |facts| facts.rights = Rights::Mute => "password", "'sudo apt-get install gcc make'";
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
    fn facts_of_the_machine_are_parsed() {
        let text =
            "MemTotal: 9 kB\nMemFree: 9 kB\nMemAvailable:  3145728 kB\nSwapFree: 1048576 kB\n";
        assert_eq!(available(text), Some(4096));
        assert_eq!(available("MemAvailable: 2048 kB\n"), Some(2));
        assert_eq!(available("MemFree: 2048 kB\n"), None);

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
    fn the_plan_is_printed_with_reasons() {
        let text = announcement(&plan_with(&[]), &good().rooms);
        let head = "  to be made first:\n    kernel 7.x  1,000 MiB  not built yet\n    \
                    1,064 MiB in the file system of /home/u/.cache";
        assert!(text.starts_with(head), "{text}");
    }
}
