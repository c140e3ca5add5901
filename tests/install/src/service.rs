// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Tests of `packaging/peermem-rs.service`, with and without openibd's service. The real systemd
//! runs as a user manager in separate namespaces.
//!
//! openibd's unit has OFED's settings and records its calls. Recording commands replace modprobe
//! and rmmod in our unit. The tests check when these commands run.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use anyhow::{anyhow, bail, Context as _, Result};

use crate::host::{run, tool, Host};
use crate::{repository, Case, Log, Skip};

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

/// Contents of the targets that units refer to by default.
const TARGET: &str = "[Unit]\nDefaultDependencies=no\n";

/// Paths on the host: our unit, and the link that `systemctl mask` makes. Earlier versions
/// installed the unit at the path of this link.
const UNIT: &str = "usr/lib/systemd/system/peermem-rs.service";
const DECIDED: &str = "etc/systemd/system/peermem-rs.service";

/// File on the host that makes loading fail.
const FAILS: &str = "fails";

/// Script that starts systemd, then records and runs each line of `$2` as a systemctl command.
const SCRIPT: &str = r#"
    set -u
    cd "$1"
    mount -t tmpfs none /run || exit 77
    umount -l /sys/fs/cgroup
    mount -t cgroup2 none /sys/fs/cgroup || exit 77
    mkdir -p "/sys/fs/cgroup/peermem-install-$3" /run/user /run/systemd/system || exit 77
    chmod 700 /run/user
    echo 0 >"/sys/fs/cgroup/peermem-install-$3/cgroup.procs" || exit 77
    export XDG_RUNTIME_DIR=/run/user XDG_CONFIG_HOME="$1/none" SYSTEMD_UNIT_PATH="$1/etc/systemd/system:$1/usr/lib/systemd/system"
    export SYSTEMD_GENERATOR_PATH="$1/none" SYSTEMD_ENVIRONMENT_GENERATOR_PATH="$1/none"
    unset DBUS_SESSION_BUS_ADDRESS
    /lib/systemd/systemd --user --unit=multi-user.target >log 2>&1 </dev/null &
    manager=$!
    # systemctl does not wait for the units that a unit wants. Until the manager listens, systemctl
    # fails.
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

/// Starts systemd with the host's units, and runs these systemctl commands. Returns the recorded
/// events, in order.
fn events(host: &Host, commands: &[&str]) -> Result<Vec<String>> {
    let packaging = repository("packaging");
    let note = host.path("note");
    let events = host.path("events");
    // Loading fails if this file exists.
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
    let mut text = fs::read_to_string(host.path(UNIT)).context("the unit was not installed")?;
    if text != fs::read_to_string(packaging.join("peermem-rs.service"))? {
        bail!("the installed unit differs from the unit in packaging");
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
    // The manager uses its own search path for programs.
    text = text.replace("peermemctl", &program.display().to_string());
    host.put(UNIT, &text)?;
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
        return Err(Skip(format!("this machine allows no separate systemd: {why}")).into());
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

/// Removes the control group of the manager, in any place where this machine mounts control groups.
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
    host.packaging("install")?;
    fs::remove_file(host.path("etc/systemd/system/multi-user.target.wants/site.service"))?;
    Ok(host)
}

/// Checks the recorded events of each command, in order.
fn told(log: Log, events: &[String], wanted: &[(&str, &str)]) -> Result<()> {
    let mut seen: Vec<(String, Vec<&str>)> = Vec::new();
    for event in events {
        match event.strip_prefix("> ") {
            Some(command) => seen.push((command.to_owned(), Vec::new())),
            None => seen
                .last_mut()
                .ok_or_else(|| anyhow!("an event before the first command: {event}"))?
                .1
                .push(event),
        }
    }
    if seen.len() != wanted.len() {
        bail!("saw {seen:?}");
    }
    for ((command, events), (_, wanted)) in seen.iter().zip(wanted) {
        log.equal(command, events.join(" "), wanted)?;
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
        // Dependencies between units have no effect on a reload. Our hooks for openibd cover this
        // case.
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

/// Tests a module that does not load, as after an upgrade of OFED or the driver.
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

/// Installs the module again, as for another kernel or another version. Checks that a service that
/// the operator has disabled or masked stays disabled or masked.
fn disabled(log: Log) -> Result<()> {
    let host = installed()?;
    let wants = host.path("etc/systemd/system/multi-user.target.wants/peermem-rs.service");
    let masked = host.path(DECIDED);
    log.that("enabled", wants.is_symlink())?;
    fs::remove_file(&wants)?;
    host.packaging("install")?;
    log.that("a disabled service stays disabled", !wants.is_symlink())?;
    let mut mask = tool("systemctl");
    mask.arg("--root").arg(host.path(""));
    run(mask.args(["mask", "peermem-rs.service"]))?;
    log.that("masked", masked.is_symlink())?;
    host.packaging("install")?;
    log.that("a masked service stays masked", masked.is_symlink())?;
    host.packaging("remove")?;
    log.that("removed", !masked.is_symlink() && !host.path(UNIT).exists())
}

/// Tests an upgrade from a version whose unit was at the path where `systemctl mask` puts its link.
fn moved(log: Log) -> Result<()> {
    let host = installed()?;
    let old = host.path(DECIDED);
    let wants = |target: &str| {
        host.path(&format!(
            "etc/systemd/system/{target}.wants/peermem-rs.service"
        ))
    };
    fs::rename(host.path(UNIT), &old)?;
    fs::remove_file(wants("multi-user.target"))?;
    host.link(
        "etc/systemd/system/multi-user.target.wants/peermem-rs.service",
        "../peermem-rs.service",
    )?;
    fs::remove_file(wants("openibd.service"))?;
    host.packaging("install")?;
    log.that("moved", !old.exists() && host.path(UNIT).exists())?;
    let link = fs::read_link(wants("multi-user.target"))?;
    log.that("still enabled", link == Path::new("/").join(UNIT))?;
    log.that(
        "not enabled for openibd again",
        !wants("openibd.service").is_symlink(),
    )?;
    host.put(DECIDED, "[Service]\n")?;
    host.packaging("install")?;
    log.that("an administrator's own unit stays", old.exists())?;
    host.packaging("remove")?;
    log.that("removed", !old.exists() && !host.path(UNIT).exists())
}

/// Checks that the units are in `/lib` if `/lib` is not a link to `/usr/lib`.
fn unmerged(log: Log) -> Result<()> {
    let host = Host::new("debian")?;
    fs::rename(host.path("usr/lib/systemd"), host.path("lib/systemd"))?;
    host.packaging("install")?;
    let unit = host.path("lib/systemd/system/peermem-rs.service");
    log.that("in /lib", unit.exists() && !host.path(UNIT).exists())?;
    host.packaging("remove")?;
    log.that("removed", !unit.exists())
}

pub(crate) fn cases() -> Vec<Case> {
    vec![
        Case::new("systemd: with openibd", with_openibd),
        Case::new("systemd: without openibd", without_openibd),
        Case::new("systemd: a module that does not load", that_does_not_load),
        Case::new("systemd: the operator's settings stay", disabled),
        Case::new("systemd: a unit at the path of earlier versions", moved),
        Case::new("systemd: units in /lib", unmerged),
    ]
}
