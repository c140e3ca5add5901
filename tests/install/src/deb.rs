// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Tests of the Debian package with the real dpkg, dkms and systemctl. The tests run on this
//! machine's own Debian root, under an overlay in memory that takes all changes.
//!
//! There is no kernel to build for, so dkms registers the source and builds nothing. The tests in
//! `dkms.rs` cover builds.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;

use anyhow::{Context as _, Result};

use crate::host::{is_root, run, succeeded, tool};
use crate::{repository, Case, Log, Skip};

const PACKAGE: &str = "nvidia-peermem-rs-dkms";

pub(crate) fn cases() -> Vec<Case> {
    let case = |name, run: fn(Log) -> Result<()>| Case::new(format!("Debian package: {name}"), run);
    vec![
        case("the contents", contents),
        case("lintian reports nothing", lintian),
        case("installed, upgraded, removed, purged", life),
        case("a module that no longer fits is compiled anew", load),
        case(
            "openibd's hooks: hooks of other packages stay",
            strangers_hooks,
        ),
        case("openibd's hooks: openibd is installed later", later_hooks),
    ]
}

/// Debian packages of two versions of our module, removed on drop.
struct Packages(PathBuf);

impl Packages {
    fn build() -> Result<Self> {
        let missing = tool("dpkg-query")
            .args(["-W", "debhelper", "dh-dkms", "lintian"])
            .output()
            .context("cannot start dpkg-query")?;
        if !missing.status.success() {
            return Err(Skip("debhelper is not installed".to_owned()).into());
        }
        let this = Self(std::env::temp_dir().join(format!("peermem-deb-{}", std::process::id())));
        fs::create_dir_all(&this.0)?;
        let script = repository("packaging/deb");
        for version in ["0.1.0", "0.2.0"] {
            let mut pack = tool("sh");
            pack.arg(&script).arg(&this.0).arg(version);
            // The user's environment may have a VERSION for another purpose, which must change
            // nothing.
            run(pack.env("VERSION", "9"))?;
        }
        Ok(this)
    }

    fn file(&self, version: &str) -> PathBuf {
        self.0.join(format!("{PACKAGE}_{version}_all.deb"))
    }

    /// Runs a script on this machine's root, under an overlay that is discarded afterwards. The
    /// packages are in /tmp. There are no kernel modules and no openibd.
    fn inside(&self, script: &str) -> Result<Output> {
        const ENTER: &str = r#"
            set -e
            layer=$(mktemp -d)
            trap 'rmdir "$layer"' EXIT
            mount -t tmpfs layer "$layer"
            cd "$layer"
            mkdir upper work root
            mount -t overlay -o lowerdir=/,upperdir=upper,workdir=work overlay root
            rm -rf root/etc/infiniband
            mkdir -p root/usr/lib/modules
            mount -t tmpfs modules root/usr/lib/modules
            mount -t tmpfs tmp root/tmp
            mount -t tmpfs run root/run
            mount --rbind /dev root/dev
            mount --rbind /proc root/proc
            cp "$1"/*.deb root/tmp
            cd root
            status=0
            chroot . /bin/sh -euc "$2" || status=$?
            cd /
            umount -l "$layer"
            exit $status
        "#;
        if !is_root() {
            return Err(Skip("only root can mount an overlay on this system".to_owned()).into());
        }
        tool("unshare")
            .args([
                "--mount",
                "--propagation",
                "private",
                "sh",
                "-c",
                ENTER,
                "sh",
            ])
            .arg(&self.0)
            .arg(script)
            .env("DEBIAN_FRONTEND", "noninteractive")
            .output()
            .context("cannot start unshare")
    }
}

impl Drop for Packages {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn names_below(folder: &Path, prefix: &str, names: &mut BTreeSet<String>) -> Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let name = format!("{prefix}/{}", entry.file_name().to_string_lossy());
        if entry.file_type()?.is_dir() {
            names_below(&entry.path(), &name, names)?;
        } else if !name.ends_with(".o") && !name.ends_with("rust-bindings/generated.rs") {
            names.insert(name);
        }
    }
    Ok(())
}

/// Checks the contents: the host's files, and the source files that a build by dkms needs.
fn contents(log: Log) -> Result<()> {
    let packages = Packages::build()?;
    let package = packages.file("0.1.0");
    let text = run(tool("dpkg-deb").arg("--contents").arg(&package))?;
    let found: BTreeSet<String> = text
        .lines()
        .filter(|line| !line.starts_with('d'))
        .filter_map(|line| line.split_whitespace().nth(5))
        .map(|name| name.trim_start_matches("./").to_owned())
        .map(|name| {
            name.strip_prefix("usr/lib/systemd")
                .map_or(name.clone(), |rest| format!("lib/systemd{rest}"))
        })
        .filter(|name| !name.starts_with("usr/share/doc/"))
        .collect();
    let mut wanted = BTreeSet::new();
    let source = "usr/src/peermem-rs-0.1.0";
    for folder in ["src", "portable", "rust-bindings", "scripts"] {
        names_below(
            &repository(folder),
            &format!("{source}/{folder}"),
            &mut wanted,
        )?;
    }
    for name in [
        "Kbuild",
        "Makefile",
        "dkms.conf",
        "packaging/host",
        "packaging/openibd-hook",
    ] {
        wanted.insert(format!("{source}/{name}"));
    }
    for name in [
        "lib/systemd/system/peermem-rs.service",
        "usr/lib/depmod.d/zz-peermem-rs.conf",
        "usr/lib/modprobe.d/00-peermem-rs.conf",
        "usr/share/lintian/overrides/nvidia-peermem-rs-dkms",
    ] {
        wanted.insert(name.to_owned());
    }
    let difference: Vec<&String> = found.symmetric_difference(&wanted).collect();
    log.equal("surplus or missing files", format!("{difference:?}"), "[]")?;

    let script = "dpkg-deb --fsys-tarfile \"$1\" | tar -xO ./usr/src/peermem-rs-0.1.0/dkms.conf";
    let configuration = run(tool("sh").args(["-c", script, "sh"]).arg(&package))?;
    log.that(
        "the package's dkms.conf has no POST_ hooks",
        !configuration.contains("\nPOST_"),
    )?;
    log.that(
        "dkms runs scripts/check before a build",
        configuration.contains("\nPRE_BUILD=\"scripts/check"),
    )
}

fn lintian(log: Log) -> Result<()> {
    let packages = Packages::build()?;
    let output = tool("lintian")
        .args(["--allow-root", "--fail-on", "error,warning"])
        .arg(packages.file("0.1.0"))
        .output()
        .context("cannot start lintian")?;
    let said = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    log.equal("lintian", &said, String::new())?;
    log.that("the exit status of lintian is 0", output.status.success())
}

/// Script that lists all files that a package could leave behind. dpkg's database of packages is
/// left out.
const LIST: &str = r#"
    list() {
        find /etc /usr/src /usr/lib/depmod.d /usr/lib/modprobe.d /usr/lib/systemd /var/lib/dkms /var/lib/systemd \
            /usr/lib/modules /usr/share/doc/nvidia* -xdev 2>/dev/null | sort
    }
    links() { find /etc/systemd/system -name peermem-rs.service | sort; }
    state() { dkms status peermem-rs; }
    new() { comm -13 /tmp/before /tmp/after | grep -v -e /usr/share/doc -e '^/usr/src/peermem-rs-'; }
"#;

fn tell(log: Log, packages: &Packages, script: &str) -> Result<()> {
    let output = packages.inside(&format!("{LIST}{script}"))?;
    for line in String::from_utf8_lossy(&output.stdout).lines() {
        log.note(line);
    }
    succeeded("the script", &output).map(drop)
}

fn life(log: Log) -> Result<()> {
    let packages = Packages::build()?;
    tell(
        log,
        &packages,
        r#"
        mkdir /etc/infiniband
        list >/tmp/before
        dpkg -i /tmp/*_0.1.0_all.deb

        test "$(links)" = "/etc/systemd/system/multi-user.target.wants/peermem-rs.service
/etc/systemd/system/openibd.service.wants/peermem-rs.service"
        test "$(state)" = "peermem-rs/0.1.0: added"
        grep -q 'Hook of peermem-rs' /etc/infiniband/pre-stop-hook.sh
        test -x /etc/infiniband/post-start-hook.sh
        test -e /usr/lib/depmod.d/zz-peermem-rs.conf
        test -e /usr/lib/modprobe.d/00-peermem-rs.conf
        systemctl is-enabled peermem-rs

        echo 'disabled, then upgraded: the service stays disabled'
        systemctl disable peermem-rs
        dpkg -i /tmp/*_0.2.0_all.deb
        test -z "$(links)"
        test "$(state)" = "peermem-rs/0.2.0: added"
        test ! -e /usr/src/peermem-rs-0.1.0
        test -x /etc/infiniband/post-start-hook.sh

        echo 'removed: only the state that systemd keeps is left'
        dpkg -r nvidia-peermem-rs-dkms
        list >/tmp/after
        test -z "$(new | grep -v '^/var/lib/systemd/deb-systemd-helper')"
        test -z "$(state)"

        echo 'installed again, then purged: nothing is left'
        dpkg -i /tmp/*_0.2.0_all.deb
        dpkg -P nvidia-peermem-rs-dkms
        list >/tmp/after
        diff /tmp/before /tmp/after
        "#,
    )
}

/// Tests the start of the service. Stand-ins for modprobe, dmesg and dkms record their calls. The
/// stand-in for modprobe fails until dkms has compiled the version in the file `/tmp/wanted`.
fn load(log: Log) -> Result<()> {
    let packages = Packages::build()?;
    tell(
        log,
        &packages,
        r#"
        dpkg -i /tmp/*_0.1.0_all.deb
        stub() { printf '#!/bin/sh\necho "%s $*" >>/tmp/calls\n%s\n' "$1" "$2" >"/usr/local/sbin/$1"; chmod +x "/usr/local/sbin/$1"; }
        stub modprobe 'test "$(cat /tmp/built)" = "$(cat /tmp/wanted)" || { echo "Invalid argument" >&2; exit 1; }'
        stub dmesg 'cat /tmp/log'
        stub dkms 'case $1 in
            status) cat /tmp/status ;;
            build) test ! -e /tmp/broken || { echo "no header"; exit 1; }; cat /tmp/wanted >/tmp/built ;;
            install) test ! -e /tmp/broken || { echo "no headers"; exit 1; }
                echo ": installed" >/tmp/status; case $* in *--force*) ;; *) cat /tmp/wanted >/tmp/built ;; esac ;; esac'
        # The command of the unit, as systemd passes it to the shell.
        start() {
            : >/tmp/calls
            sed -n '/^ExecStart=/,/[^\\]$/p' /usr/lib/systemd/system/peermem-rs.service |
                sed 's/^ExecStart=//; s/[$][$]/$/g; s,/sbin/modprobe,modprobe,' >/tmp/command
            PATH=/usr/local/sbin:$PATH sh /tmp/command >/tmp/said 2>&1
        }
        # sh -e ignores the status of `! start`.
        fails() { if "$@"; then return 1; fi; }
        calls() { sed "s/ -m .*//" /tmp/calls | tr '\n' ','; }

        echo 'the module fits: it is loaded'
        echo ': installed' >/tmp/status; : >/tmp/log; echo 1 >/tmp/built; echo 1 >/tmp/wanted
        start
        test "$(calls)" = 'dkms status,modprobe nvidia-peermem,'

        echo 'another ib_core: the module is compiled anew, and the journal says why'
        echo 2 >/tmp/wanted; echo 'nvidia_peermem: disagrees about version of symbol ib_register_peer_memory_client' >/tmp/log
        start
        test "$(calls)" = 'dkms status,modprobe nvidia-peermem,dmesg ,dkms build --force,dkms install --force,modprobe nvidia-peermem,'
        grep 'has changed (nvidia_peermem: disagrees about version of symbol ib_register' /tmp/said

        echo 'the module cannot be compiled: the journal has the output of the compiler'
        echo 3 >/tmp/wanted; touch /tmp/broken
        fails start
        grep 'no header' /tmp/said
        test "$(calls)" = 'dkms status,modprobe nvidia-peermem,dmesg ,dkms build --force,'
        rm /tmp/broken

        echo 'the module does not load for another reason: nothing is compiled'
        echo 'nvidia_peermem: persistent_api_support=7 is not allowed' >/tmp/log
        fails start
        test "$(calls)" = 'dkms status,modprobe nvidia-peermem,dmesg ,'

        echo 'a kernel without our module: our module is compiled before modprobe finds the module of NVIDIA'
        : >/tmp/status
        start
        test "$(calls)" = 'dkms status,dkms install,modprobe nvidia-peermem,'

        echo 'our missing module cannot be compiled: the module of NVIDIA is loaded, and the journal warns'
        : >/tmp/status; touch /tmp/broken
        start
        test "$(calls)" = 'dkms status,dkms install,modprobe nvidia-peermem,'
        grep '^no headers' /tmp/said
        grep '^<4>peermem-rs: .*could not compile .* /var/lib/dkms/peermem-rs/0.1.0/build/make.log' /tmp/said

        echo 'the module of NVIDIA does not load either: the service fails'
        echo 4 >/tmp/wanted
        fails start
        test "$(calls)" = 'dkms status,dkms install,modprobe nvidia-peermem,'
        grep '^<4>peermem-rs: .*does not load either' /tmp/said
        cat /tmp/built >/tmp/wanted; rm /tmp/broken

        echo 'a module of make install: dkms is not asked, whether the module loads or not'
        : >/tmp/status
        own=/lib/modules/$(uname -r)/updates/peermem-rs
        mkdir -p $own; touch $own/nvidia_peermem.ko.xz
        start
        test "$(calls)" = 'modprobe nvidia-peermem,'
        echo 5 >/tmp/wanted
        fails start
        test "$(calls)" = 'modprobe nvidia-peermem,'
        grep "^<4>peermem-rs: $own/nvidia_peermem.ko.xz does not load" /tmp/said
        cat /tmp/built >/tmp/wanted

        echo 'a module of make install beside the module of DKMS: the journal and the package name both'
        dkms=/lib/modules/$(uname -r)/updates/dkms/nvidia_peermem.ko
        fails grep 'has our module as' /tmp/said
        mkdir -p "${dkms%/*}"; touch "$dkms"
        start
        both="has our module as $dkms $own/nvidia_peermem.ko.xz now. modprobe prefers the one in updates/peermem-rs"
        grep "$both" /tmp/said
        dpkg-reconfigure nvidia-peermem-rs-dkms 2>&1 | grep "$both"

        echo 'a link to a module of make install that is gone: DKMS has the module'
        rm $own/*; ln -s gone $own/nvidia_peermem.ko; echo ': installed' >/tmp/status
        start
        test "$(calls)" = 'dkms status,modprobe nvidia-peermem,'
        rm -r "/lib/modules/$(uname -r)"; : >/tmp/status

        echo 'several versions of the source: the newest is compiled'
        for version in 0.9.0 0.10.0; do
            cp -r /usr/src/peermem-rs-0.1.0 /usr/src/peermem-rs-$version
            sed -i "s/^PACKAGE_VERSION=.*/PACKAGE_VERSION=\"$version\"/" /usr/src/peermem-rs-$version/dkms.conf
        done
        start
        grep -- '^dkms install .*-v 0.10.0 ' /tmp/calls
        rm -r /usr/src/peermem-rs-0.9.0 /usr/src/peermem-rs-0.10.0

        echo 'without a source for DKMS: modprobe runs alone'
        mv /usr/src/peermem-rs-0.1.0 /usr/src/away
        start
        test "$(calls)" = 'modprobe nvidia-peermem,'
        mv /usr/src/away /usr/src/peermem-rs-0.1.0
        "#,
    )
}

fn strangers_hooks(log: Log) -> Result<()> {
    let packages = Packages::build()?;
    tell(
        log,
        &packages,
        r#"
        mkdir /etc/infiniband
        echo theirs >/etc/infiniband/pre-stop-hook.sh
        dpkg -i /tmp/*_0.1.0_all.deb 2>&1 | grep '/etc/infiniband/pre-stop-hook.sh exists and was not changed'
        test "$(cat /etc/infiniband/pre-stop-hook.sh)" = theirs
        test -x /etc/infiniband/post-start-hook.sh
        dpkg -P nvidia-peermem-rs-dkms
        test "$(ls /etc/infiniband)" = pre-stop-hook.sh
        "#,
    )
}

/// Tests an OFED package that adds files to /etc/infiniband after our package was installed.
fn later_hooks(log: Log) -> Result<()> {
    let packages = Packages::build()?;
    tell(
        log,
        &packages,
        r#"
        dpkg -i /tmp/*_0.1.0_all.deb
        test ! -e /etc/infiniband
        mkdir -p /tmp/ofed/DEBIAN /tmp/ofed/etc/infiniband
        echo >/tmp/ofed/etc/infiniband/openib.conf
        printf '%s\n' 'Package: synthetic-ofed' 'Version: 1' 'Architecture: all' 'Maintainer: nobody' \
            'Description: made up' >/tmp/ofed/DEBIAN/control
        dpkg-deb --build /tmp/ofed /tmp/ofed.deb
        dpkg -i /tmp/ofed.deb
        test -x /etc/infiniband/pre-stop-hook.sh
        dpkg -P nvidia-peermem-rs-dkms
        test "$(ls /etc/infiniband)" = openib.conf
        "#,
    )
}
