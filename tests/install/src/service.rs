// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! The real systemd, as one user's manager in namespaces of its own: `packaging/peermem-rs.service` beside an openibd.
//!
//! openibd's unit has the settings of OFED's and notes what it is asked for; so do the commands of ours, in the place of
//! modprobe and rmmod. What is tested is when they are run.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use anyhow::anyhow;
use anyhow::bail;
use anyhow::Context as _;
use anyhow::Result;

use crate::host::tool;
use crate::host::Host;
use crate::Case;
use crate::Log;
use crate::Skip;

const OPENIBD: &str = "\
[Unit]
DefaultDependencies=false
[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=NOTE openibd-start
ExecStop=NOTE openibd-stop
ExecReload=NOTE openibd-reload
";

/// Targets that units refer to without being asked.
const TARGET: &str = "[Unit]\nDefaultDependencies=no\n";

/// Below the host.
const FAILS: &str = "fails";

/// Boots, and then does what stands in each line of `$2`, writing a line of its own before.
const SCRIPT: &str = r#"
    set -u
    cd "$1"
    mount -t tmpfs none /run || exit 77
    umount -l /sys/fs/cgroup
    mount -t cgroup2 none /sys/fs/cgroup || exit 77
    mkdir -p "/sys/fs/cgroup/peermem-install-$3" /run/user /run/systemd/system || exit 77
    chmod 700 /run/user
    echo 0 >"/sys/fs/cgroup/peermem-install-$3/cgroup.procs" || exit 77
    export XDG_RUNTIME_DIR=/run/user XDG_CONFIG_HOME="$1/none" SYSTEMD_UNIT_PATH="$1/etc/systemd/system"
    export SYSTEMD_GENERATOR_PATH="$1/none" SYSTEMD_ENVIRONMENT_GENERATOR_PATH="$1/none"
    unset DBUS_SESSION_BUS_ADDRESS
    /lib/systemd/systemd --user --unit=multi-user.target >log 2>&1 </dev/null &
    manager=$!
    # systemctl does not wait for what a unit wants; and until the manager listens, this fails.
    settle() {
        count=0
        until systemctl --user list-jobs 2>/dev/null | grep -q '^No jobs'; do
            sleep 0.1
            count=$((count + 1))
            [ $count -lt 1800 ] && kill -0 $manager 2>/dev/null || exit 77
        done
    }
    settle
    printf '%s\n' "$2" | while read -r command; do
        echo "> $command" >>events
        systemctl --user $command >>log 2>&1 </dev/null
        settle
    done
    kill -KILL $manager
"#;

/// A manager's life: the units there, the commands given, and what was run, by their names.
fn events(host: &Host, commands: &[&str]) -> Result<Vec<String>> {
    let packaging = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging");
    let note = host.path("note");
    let events = host.path("events");
    // What is to load fails where a file says so.
    let fails = host.path(FAILS);
    fs::write(
        &note,
        format!(
            "#!/bin/sh\necho \"$1\" >>{}\n[ \"$1\" != loaded ] || ! [ -e {} ]\n",
            events.display(),
            fails.display()
        ),
    )?;
    host.put(
        "bin/peermemctl",
        &format!("#!/bin/sh\nsh {} \"$*\"\n", note.display()),
    )?;
    let program = host.path("bin/peermemctl");
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755))?;
    let mut units = vec![
        ("basic.target".to_owned(), TARGET.to_owned()),
        ("multi-user.target".to_owned(), TARGET.to_owned()),
        ("shutdown.target".to_owned(), TARGET.to_owned()),
    ];
    let note = format!("/bin/sh {}", note.display());
    let ours = host.path("etc/systemd/system/peermem-rs.service");
    let mut text = fs::read_to_string(&ours).context("the unit was not installed")?;
    if text != fs::read_to_string(packaging.join("peermem-rs.service"))? {
        bail!("the unit that was installed is not the one in packaging");
    }
    for (from, to) in [
        ("/sbin/modprobe nvidia-peermem", "loaded"),
        ("/sbin/rmmod nvidia_peermem", "removed"),
    ] {
        if text.matches(from).count() != 1 {
            bail!("the unit does not run {from}");
        }
        text = text.replace(from, &format!("{note} {to}"));
    }
    // The manager looks for programs where it likes.
    text = text.replace("peermemctl", &program.display().to_string());
    units.push(("peermem-rs.service".to_owned(), text));
    if commands.iter().any(|command| command.contains("openibd")) {
        units.push(("openibd.service".to_owned(), OPENIBD.replace("NOTE", &note)));
        host.link(
            "etc/systemd/system/multi-user.target.wants/openibd.service",
            "../openibd.service",
        )?;
    }
    for (name, text) in &units {
        host.put(&format!("etc/systemd/system/{name}"), text)?;
    }
    fs::write(&events, "> boot\n")?;

    let id = std::process::id().to_string();
    let output = tool("unshare")
        .args(["--mount", "--propagation", "private", "--cgroup"])
        .args(["--pid", "--fork", "--kill-child", "--mount-proc"])
        .args(["sh", "-c", SCRIPT, "sh"])
        .arg(host.path(""))
        .arg(commands.join("\n"))
        .arg(&id)
        .output()
        .context("cannot start unshare")?;
    remove_group(&id);
    if output.status.code() == Some(77) || output.status.code() == Some(1) {
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let log = fs::read_to_string(host.path("log")).unwrap_or_default();
        let why = said
            .lines()
            .chain(log.lines())
            .last()
            .unwrap_or("no reason given");
        return Err(Skip(format!("no systemd of our own here: {why}")).into());
    }
    if !output.status.success() {
        bail!(
            "{}: {}",
            output.status,
            String::from_utf8_lossy(&output.stderr)
        );
    }
    Ok(fs::read_to_string(&events)?
        .lines()
        .map(str::to_owned)
        .collect())
}

/// The control group that the manager was in, wherever this machine mounts them.
fn remove_group(id: &str) {
    for parent in ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"] {
        let group = Path::new(parent).join(format!("peermem-install-{id}"));
        for part in ["init.scope", "app.slice"] {
            let _ = fs::remove_dir(group.join(part));
        }
        let _ = fs::remove_dir(group);
    }
}

fn installed() -> Result<Host> {
    let host = Host::new("debian")?;
    let output = tool("sh")
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/host"))
        .arg("install")
        .arg(host.path("lib/modules"))
        .output()?;
    crate::host::succeeded("packaging/host", &output)?;
    fs::remove_file(host.path("etc/systemd/system/multi-user.target.wants/site.service"))?;
    Ok(host)
}

/// What followed each command, in order.
fn told(log: Log, events: &[String], wanted: &[(&str, &str)]) -> Result<()> {
    let mut seen: Vec<(String, Vec<&str>)> = Vec::new();
    for event in events {
        match event.strip_prefix("> ") {
            Some(command) => seen.push((command.to_owned(), Vec::new())),
            None => seen
                .last_mut()
                .ok_or_else(|| anyhow!("an event before all: {event}"))?
                .1
                .push(event),
        }
    }
    if seen.len() != wanted.len() {
        bail!("saw {seen:?}");
    }
    for ((command, events), (_, wanted)) in seen.iter().zip(wanted) {
        log.equal(command, &events.join(" "), &(*wanted).to_owned())?;
    }
    Ok(())
}

fn with_openibd(log: Log) -> Result<()> {
    let whole = "removed openibd-stop openibd-start loaded";
    let wanted = [
        ("boot", "openibd-start loaded"),
        ("restart openibd", whole),
        ("stop openibd", "removed openibd-stop"),
        ("start openibd", "openibd-start loaded"),
        ("try-restart openibd", whole),
        // Nothing that a unit can do: this is what the hooks are for.
        ("reload openibd", "openibd-reload"),
        ("stop peermem-rs", "removed"),
        ("start peermem-rs", "loaded"),
        ("restart openibd", whole),
    ];
    let commands: Vec<&str> = wanted.iter().skip(1).map(|(command, _)| *command).collect();
    let host = installed()?;
    told(log, &events(&host, &commands)?, &wanted)
}

fn without_openibd(log: Log) -> Result<()> {
    let wanted = [("boot", "loaded"), ("restart peermem-rs", "removed loaded")];
    let host = installed()?;
    told(log, &events(&host, &["restart peermem-rs"])?, &wanted)
}

/// As after an upgrade of OFED or the driver, to which the module no longer fits.
fn that_does_not_load(log: Log) -> Result<()> {
    let host = installed()?;
    host.put(FAILS, "")?;
    let whole = "loaded doctor --only nvidia-driver,peer-memory,module";
    told(
        log,
        &events(&host, &["start peermem-rs"])?,
        &[("boot", whole), ("start peermem-rs", whole)],
    )
}

/// An operator's decision outlasts the next installation, of another kernel or another version.
fn disabled(log: Log) -> Result<()> {
    let host = installed()?;
    let wants = "etc/systemd/system/multi-user.target.wants/peermem-rs.service";
    let unit = host.path("etc/systemd/system/peermem-rs.service");
    let again = || -> Result<()> {
        let output = tool("sh")
            .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/host"))
            .arg("install")
            .arg(host.path("lib/modules"))
            .output()?;
        crate::host::succeeded("packaging/host", &output)
    };
    log.that("enabled", host.path(wants).is_symlink())?;
    fs::remove_file(host.path(wants))?;
    again()?;
    log.that("disabled, stays so", !host.path(wants).is_symlink())?;
    fs::remove_file(&unit)?;
    host.link("etc/systemd/system/peermem-rs.service", "/dev/null")?;
    again()?;
    log.that("masked, stays so", unit.is_symlink())
}

type Run = fn(Log) -> Result<()>;

pub(crate) fn cases() -> Vec<Case> {
    let all: [(&str, Run); 4] = [
        ("systemd: with openibd", with_openibd),
        ("systemd: without openibd", without_openibd),
        ("systemd: a module that does not load", that_does_not_load),
        ("systemd: what an operator decided stays", disabled),
    ];
    all.into_iter()
        .map(|(name, run)| Case {
            name: name.to_owned(),
            run: Box::new(run),
        })
        .collect()
}
