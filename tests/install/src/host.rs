// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! A synthetic host: a folder as its root, and kmod's answers about it.

use std::collections::BTreeMap;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::{fmt, fs};

use anyhow::{bail, Context as _, Result};

use crate::forge::Module;
use crate::{repository, Log, Skip};

/// Kernel release of every synthetic host.
pub(crate) const RELEASE: &str = "7.9.0-1-synthetic";

pub(crate) const NOTHING: &str = "nothing";

/// Search path with the programs of a system administrator.
const PATH: &str = "/usr/sbin:/usr/bin:/sbin:/bin";

/// Makefile of a stand-in for the build folder of a kernel that puts products beside their source.
/// The makefile copies a prebuilt module instead of compiling one, and installs it like
/// `scripts/Makefile.modinst`. The file `builds` gets a line for each build.
const KBUILD: &str = "\
PREBUILT := $(M)/../../prebuilt/nvidia-peermem.ko
modules:
\ttest -f $(M)/Kbuild
\techo \"NV_SYMVERS=$(NV_SYMVERS) $(KCFLAGS)\" >>$(M)/builds
\tmkdir $(M)/busy && sleep 0.1 && rmdir $(M)/busy
\ttest '$(NV_SYMVERS)' != bad
\tcp $(PREBUILT) $(M)/
modules_install:
\tmkdir -p $(INSTALL_MOD_PATH)/lib/modules/$(RELEASE)/$(INSTALL_MOD_DIR)
\tcp $(PREBUILT)$(SUFFIX) $(INSTALL_MOD_PATH)/lib/modules/$(RELEASE)/$(INSTALL_MOD_DIR)/
clean:
";

/// The module that `modprobe` would load.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Load {
    /// File, relative to the kernel's folder of modules.
    pub(crate) file: String,
    pub(crate) version: String,
    pub(crate) arguments: String,
}

impl fmt::Display for Load {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (version {})", self.file, self.version)?;
        if !self.arguments.is_empty() {
            write!(f, " with {}", self.arguments)?;
        }
        Ok(())
    }
}

/// All files and folders below a root: the type and contents of each, by path.
pub(crate) type Listing = BTreeMap<String, String>;

/// Returns the differences of two listings as text, or "nothing".
pub(crate) fn differences(before: &Listing, after: &Listing) -> String {
    let mut lines = Vec::new();
    for (path, what) in before {
        match after.get(path) {
            None => lines.push(format!("gone: {path}")),
            Some(other) if other != what => lines.push(format!("changed: {path}")),
            Some(_) => {}
        }
    }
    for path in after.keys() {
        if !before.contains_key(path) {
            lines.push(format!("left over: {path}"));
        }
    }
    if lines.is_empty() {
        return NOTHING.to_owned();
    }
    lines.join("\n")
}

pub(crate) struct Host {
    root: PathBuf,
}

impl Host {
    /// Creates a host with this `ID` in os-release, with `ib_core` and without NVIDIA's driver.
    pub(crate) fn new(id: &str) -> Result<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let root = std::env::temp_dir().join(format!(
            "peermem-install-{}-{}",
            std::process::id(),
            COUNT.fetch_add(1, Ordering::Relaxed)
        ));
        fs::create_dir(&root).with_context(|| root.display().to_string())?;
        let host = Self { root };
        // kmod's package contains these empty folders.
        for folder in ["etc/depmod.d", "etc/modprobe.d"] {
            fs::create_dir_all(host.path(folder))?;
        }
        host.put("etc/os-release", &format!("ID={id}\nVERSION_ID=1\n"))?;
        if ["debian", "ubuntu"].contains(&id) {
            host.put("etc/debian_version", "13.0\n")?;
        }
        host.put(
            "etc/systemd/system/multi-user.target.wants/site.service",
            "",
        )?;
        // systemd's package contains this unit.
        host.put("usr/lib/systemd/system/halt.target", "")?;
        for name in [
            "modules.order",
            "modules.builtin",
            "modules.builtin.modinfo",
        ] {
            host.put(&format!("lib/modules/{RELEASE}/{name}"), "")?;
        }
        host.module("kernel/drivers/infiniband/core/ib_core.ko", Module::IbCore)?;
        Ok(host)
    }

    pub(crate) fn path(&self, below: &str) -> PathBuf {
        self.root.join(below)
    }

    pub(crate) fn put(&self, file: &str, text: &str) -> Result<()> {
        let file = self.path(file);
        make_folder_of(&file)?;
        fs::write(&file, text).with_context(|| file.display().to_string())
    }

    pub(crate) fn link(&self, link: &str, target: &str) -> Result<()> {
        let link = self.path(link);
        make_folder_of(&link)?;
        symlink(target, &link).with_context(|| link.display().to_string())
    }

    fn modules(&self) -> PathBuf {
        self.path("lib/modules").join(RELEASE)
    }

    /// Writes a module below the kernel's folder.
    pub(crate) fn module(&self, file: &str, module: Module) -> Result<()> {
        module.write(&self.modules().join(file))
    }

    /// Returns kmod's options `-C FOLDER` for the host's existing configuration folders.
    fn configuration(&self, kind: &str) -> Vec<String> {
        let folders = ["etc", "usr/lib"].map(|folder| self.path(folder).join(kind));
        let existing = folders.into_iter().filter(|folder| folder.is_dir());
        // Also names a folder that does not exist, so that there is always an option. Without any
        // option, kmod would read the configuration of the test machine.
        existing
            .chain([self.path("no-such-folder")])
            .flat_map(|folder| ["-C".to_owned(), folder.display().to_string()])
            .collect()
    }

    /// Runs depmod, like the maintainer scripts of every package.
    pub(crate) fn depmod(&self) -> Result<()> {
        let mut depmod = tool("depmod");
        depmod.args(self.configuration("depmod.d"));
        run(depmod.arg("-b").arg(&self.root).arg(RELEASE)).map(drop)
    }

    fn modprobe_options(&self) -> Vec<String> {
        let mut options = vec![
            "-d".to_owned(),
            self.root.display().to_string(),
            "-S".to_owned(),
            RELEASE.to_owned(),
        ];
        options.extend(self.configuration("modprobe.d"));
        options
    }

    /// Returns the steps that modprobe would take, one per line, or its error.
    fn show(&self, arguments: &[&str]) -> Result<String> {
        run(tool("modprobe")
            .args(self.modprobe_options())
            .arg("--show-depends")
            .args(arguments))
    }

    /// Appends the steps that modprobe has `shown` to `steps`, in order. The step of an `install`
    /// line is a command, which runs here with a modprobe that only shows its own steps.
    fn follow(&self, shown: &str, steps: &mut Vec<String>, depth: u32) -> Result<()> {
        if depth > 4 {
            bail!("`install` lines call each other:\n{}", steps.join("\n"));
        }
        for line in shown.lines() {
            if let Some(command) = line.strip_prefix("install ") {
                steps.push(format!("install: {}", command.trim()));
                let mut options = self.modprobe_options();
                options.push("--show-depends".to_owned());
                let output = tool("sh")
                    .args(["-c", command])
                    .env("MODPROBE_OPTIONS", options.join(" "))
                    .output()?;
                self.follow(&String::from_utf8(output.stdout)?, steps, depth + 1)?;
            } else if let Some(file) = line.strip_prefix("insmod ") {
                steps.push(file.trim().to_owned());
            } else {
                bail!("modprobe said: {line}");
            }
        }
        Ok(())
    }

    /// Returns the file that `modprobe ARGUMENTS` would load as `nvidia_peermem`. modprobe may name
    /// several such files, and the kernel loads only the first.
    ///
    /// Returns `None` if no file would be loaded, and an error if modprobe does not know the
    /// module.
    fn would_load(&self, arguments: &[&str]) -> Result<Option<Load>> {
        let mut steps = Vec::new();
        self.follow(&self.show(arguments)?, &mut steps, 0)?;
        for step in steps {
            let (file, rest) = step.split_once(' ').unwrap_or((&step, ""));
            if file == "install:" || field(file, "name")? != "nvidia_peermem" {
                continue;
            }
            let below = Path::new(file)
                .strip_prefix(self.modules())
                .with_context(|| format!("{file} is not a module of the host"))?;
            // An argument can occur twice: an `install` line passes the arguments to another
            // modprobe, which also reads them from the configuration. Duplicates have no effect,
            // because the kernel uses the last value.
            let mut arguments: Vec<&str> = Vec::new();
            for argument in rest.split_whitespace() {
                if !arguments.contains(&argument) {
                    arguments.push(argument);
                }
            }
            return Ok(Some(Load {
                file: below.display().to_string(),
                version: field(file, "version")?,
                arguments: arguments.join(" "),
            }));
        }
        Ok(None)
    }

    /// Returns the result of `would_load` as text.
    pub(crate) fn loads_for(&self, arguments: &[&str]) -> Result<String> {
        Ok(match self.would_load(arguments)? {
            Some(load) => load.to_string(),
            None => NOTHING.to_owned(),
        })
    }

    pub(crate) fn loads(&self) -> Result<String> {
        self.loads_for(&["nvidia-peermem"])
    }

    /// Returns the module's name in modprobe, lsmod and rmmod.
    pub(crate) fn resolves(&self) -> Result<String> {
        let output = tool("modprobe")
            .args(self.modprobe_options())
            .args(["--resolve-alias", "nvidia-peermem"])
            .output()?;
        Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    }

    /// Returns a field of the module that modinfo finds by name.
    pub(crate) fn modinfo(&self, field: &str) -> Result<String> {
        let mut modinfo = tool("modinfo");
        modinfo.arg("-b").arg(&self.root);
        run(modinfo.args(["-k", RELEASE, "-F", field, "nvidia-peermem"]))
    }

    /// Runs `packaging/host`.
    pub(crate) fn packaging(&self, action: &str) -> Result<()> {
        let mut script = tool("sh");
        script.arg(repository("packaging/host")).arg(action);
        run(script.arg(self.path("lib/modules"))).map(drop)
    }

    /// Copies the parts of the repository that `make` and `dkms` need. Creates a kernel build
    /// folder that provides a prebuilt module instead of compiling one.
    ///
    /// `suffix` is the compression suffix of that kernel's modules.
    pub(crate) fn sources(
        &self,
        folder: &str,
        build: &str,
        module: Module,
        suffix: &str,
    ) -> Result<()> {
        let folder = self.path(folder);
        for name in ["packaging", "rust-bindings", "scripts"] {
            fs::create_dir_all(folder.join(name))?;
        }
        for name in [
            "Makefile",
            "Kbuild",
            "dkms.conf",
            "rust-bindings/release.sh",
            "scripts/check",
            "scripts/headers",
            "scripts/host.sh",
        ] {
            fs::copy(repository(name), folder.join(name)).context(name)?;
        }
        for entry in fs::read_dir(repository("packaging"))? {
            let entry = entry?;
            // The folders contain sources of packages, which are not copied.
            if entry.file_type()?.is_dir() {
                continue;
            }
            fs::copy(
                entry.path(),
                folder.join("packaging").join(entry.file_name()),
            )?;
        }
        let prebuilt = folder.join("prebuilt");
        if prebuilt.exists() {
            fs::remove_dir_all(&prebuilt)?;
        }
        for suffix in ["", suffix] {
            module.write(&prebuilt.join(format!("nvidia-peermem.ko{suffix}")))?;
        }
        self.put(
            &format!("{build}/Makefile"),
            &format!("RELEASE := {RELEASE}\nSUFFIX := {suffix}\n{KBUILD}"),
        )?;
        self.put(&format!("{build}/include/config/kernel.release"), RELEASE)?;
        self.put(
            &format!("{build}/.config"),
            "CONFIG_RUST=y\nCONFIG_INFINIBAND_USER_MEM=y\n",
        )
    }

    /// Lists all files and folders on the host. Leaves out those that belong to the test machine or
    /// to the test itself. Output of depmod is compared as sets of lines, because its order depends
    /// on the file system.
    pub(crate) fn listing(&self) -> Result<Listing> {
        let mut listing = Listing::new();
        let mut folders = vec![self.root.clone()];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(&folder)? {
                let path = entry?.path();
                let name = path.strip_prefix(&self.root)?.display().to_string();
                if ["dev", "proc", "tmp", "synthetic"].contains(&name.as_str())
                    || name.ends_with(".bin")
                {
                    continue;
                }
                let metadata = fs::symlink_metadata(&path)?;
                let what = if metadata.is_dir() {
                    folders.push(path);
                    "folder".to_owned()
                } else if metadata.is_symlink() {
                    format!("-> {}", fs::read_link(&path)?.display())
                } else {
                    let contents = fs::read(&path)?;
                    match String::from_utf8(contents) {
                        Ok(text) if name.contains("/modules.") => {
                            let mut lines: Vec<&str> = text.lines().collect();
                            lines.sort_unstable();
                            lines.join("\n")
                        }
                        Ok(text) => text,
                        Err(error) => format!("{:?}", error.as_bytes()),
                    }
                };
                listing.insert(name, what);
            }
        }
        Ok(listing)
    }

    /// Checks that the host has the same files as in the listing `before`.
    pub(crate) fn is_as(&self, log: Log, what: &str, before: &Listing) -> Result<()> {
        log.equal(what, differences(before, &self.listing()?), NOTHING)
    }

    /// Runs a command in a mount namespace that has the host's root and this machine's programs.
    pub(crate) fn inside(&self, command: &str) -> Result<Output> {
        // /usr is this machine's, except /usr/src, where dkms finds sources, and the units of
        // systemd. /lib, with the kernel modules, belongs to the host.
        const ENTER: &str = r#"
            set -e
            cd "$1"
            mkdir -p usr/lib/systemd/system dev proc tmp synthetic/src synthetic/units etc/alternatives lib var/lib
            for link in bin sbin lib64 lib/x86_64-linux-gnu; do ln -sfn "/usr/$link" "$link"; done
            mount --bind usr/lib/systemd/system synthetic/units
            mount --rbind /usr usr
            mount --bind synthetic/units usr/lib/systemd/system
            mount --bind synthetic/src usr/src
            mount --bind /etc/alternatives etc/alternatives
            mount --rbind /dev dev
            mount --rbind /proc proc
            set +e
            chroot . /bin/sh -c "$2"
        "#;
        let mut unshare = tool("unshare");
        unshare.args(["--mount", "--propagation", "private"]);
        if !is_root() {
            unshare.args(["--user", "--map-root-user"]);
        }
        unshare
            .args(["sh", "-c", ENTER, "sh"])
            .arg(&self.root)
            .arg(command)
            .output()
            .context("cannot start unshare")
    }

    /// Returns an error if [`Self::inside`] does not work on this machine.
    pub(crate) fn can_be_entered(&self) -> Result<()> {
        let output = self.inside("test -e /etc/os-release && command -v dkms depmod")?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr);
            let why = said.lines().next().unwrap_or("dkms is not installed");
            return Err(Skip(format!(
                "this machine allows no namespace with a separate root: {why}"
            ))
            .into());
        }
        Ok(())
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        // No mount is left below the root, because all mounts were in namespaces that have ended.
        if std::env::var_os("KEEP").is_none() {
            let _ = fs::remove_dir_all(&self.root);
        }
    }
}

/// Makes the folder that contains a file.
pub(crate) fn make_folder_of(file: &Path) -> Result<()> {
    Ok(file.parent().map_or(Ok(()), fs::create_dir_all)?)
}

pub(crate) fn is_root() -> bool {
    use std::os::unix::fs::MetadataExt as _;
    fs::metadata("/proc/self").is_ok_and(|process| process.uid() == 0)
}

/// Returns a command for a system program, free of the user's settings.
pub(crate) fn tool(program: &str) -> Command {
    let mut command = Command::new(program);
    for name in "MODPROBE_OPTIONS MAKEFLAGS MAKELEVEL KDIR KVER DESTDIR".split(' ') {
        command.env_remove(name);
    }
    command
        .env("PATH", PATH)
        .env("LC_ALL", "C")
        .stdin(Stdio::null());
    command
}

/// Runs a command, which must succeed. Returns its standard output without blanks at both ends.
pub(crate) fn run(command: &mut Command) -> Result<String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command.output();
    let output = output.with_context(|| format!("cannot start {program}"))?;
    succeeded(&program, &output)
}

/// Returns the standard output of a command that succeeded, without blanks at both ends.
pub(crate) fn succeeded(what: &str, output: &Output) -> Result<String> {
    let said = String::from_utf8_lossy(&output.stdout);
    if !output.status.success() {
        let errors = String::from_utf8_lossy(&output.stderr);
        bail!("{what}: {}\n{said}{errors}", output.status);
    }
    Ok(said.trim().to_owned())
}

/// Returns a field of a module's file.
fn field(file: &str, field: &str) -> Result<String> {
    run(tool("modinfo").args(["-F", field, file]))
}
