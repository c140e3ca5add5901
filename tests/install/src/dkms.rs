// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Tests of the real dkms, with its default folders, on synthetic hosts that have NVIDIA's package
//! and ours.
//!
//! The behaviour of dkms depends on the host's os-release. The tests use the shipped `dkms.conf`.
//! Nothing is compiled, because the products of the make commands in `dkms.conf` already exist. The
//! results hold for the installed version of dkms, and a note in the output names this version.

use std::fs;

use anyhow::{bail, Result};

use crate::forge::Module;
use crate::host::{differences, succeeded, Host, Listing, NOTHING, RELEASE};
use crate::layouts::DEBIAN_MODPROBE;
use crate::{Case, Log};

/// A distribution: its `ID` in os-release, and the compression of its modules. Debian's hosts have
/// the driver of Debian's own packages.
struct Distribution {
    name: &'static str,
    id: &'static str,
    suffix: &'static str,
}

const fn distribution(name: &'static str, id: &'static str, suffix: &'static str) -> Distribution {
    Distribution { name, id, suffix }
}

const DISTRIBUTIONS: &[Distribution] = &[
    distribution("Debian's driver", "debian", ""),
    distribution("Ubuntu", "ubuntu", ".zst"),
    distribution("RHEL", "rhel", ".xz"),
    distribution("Arch", "arch", ".zst"),
    distribution("SUSE", "opensuse-leap", ""),
];

impl Distribution {
    /// Returns the name of the driver's package and the prefix of its files.
    fn driver(&self) -> &'static str {
        match self.id {
            "debian" => "nvidia-current-open",
            _ => "nvidia",
        }
    }
}

/// One request of a package manager to dkms.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Add(Package),
    Remove(Package),
    Rebuild(Package),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Package {
    Theirs(&'static str),
    Ours(&'static str),
}

use Package::{Ours, Theirs};
use Step::{Add, Rebuild, Remove};

impl Package {
    fn dkms_name(self, distribution: &Distribution) -> String {
        match self {
            Theirs(version) => format!("{}/{version}", distribution.driver()),
            Ours(version) => format!("peermem-rs/{version}"),
        }
    }
}

/// Sequences of installations and removals, in every relevant order. The driver's version is lower
/// than ours at first, and higher after the driver's upgrade.
///
/// dpkg upgrades a package by removing the old version and then adding the new one. rpm adds the
/// new version first.
const STORIES: &[(&str, &[Step])] = &[
    (
        "theirs first, upgraded as by dpkg",
        &[
            Add(Theirs("580.1")),
            Add(Ours("600.1")),
            Remove(Theirs("580.1")),
            Add(Theirs("610.2")),
            Rebuild(Ours("600.1")),
            Remove(Ours("600.1")),
            Add(Ours("600.2")),
            Remove(Ours("600.2")),
        ],
    ),
    (
        "ours first, upgraded as by rpm",
        &[
            Add(Ours("600.1")),
            Add(Theirs("580.1")),
            Add(Theirs("610.2")),
            Remove(Theirs("580.1")),
            Add(Ours("600.2")),
            Remove(Ours("600.1")),
            Remove(Theirs("610.2")),
            Remove(Ours("600.2")),
        ],
    ),
];

struct Tree<'a> {
    host: Host,
    distribution: &'a Distribution,
}

impl<'a> Tree<'a> {
    fn new(distribution: &'a Distribution) -> Result<Self> {
        let host = Host::new(distribution.id)?;
        // dkms uses the compression of the modules that the kernel already has.
        let file = format!("kernel/drivers/net/other.ko{}", distribution.suffix);
        host.module(&file, Module::IbCore)?;
        if distribution.id == "debian" {
            host.put("etc/modprobe.d/nvidia.conf", DEBIAN_MODPROBE)?;
        }
        fs::create_dir_all(host.path("var/lib/dkms"))?;
        host.depmod()?;
        Ok(Self { host, distribution })
    }

    /// Unpacks a package's sources into the folder that becomes the host's /usr/src.
    fn unpack(&self, package: Package) -> Result<()> {
        let name = package.dkms_name(self.distribution).replace('/', "-");
        let folder = format!("synthetic/src/{name}");
        // NVIDIA's package or ours may be unpacked first, so each adds its files to the kernel's
        // build folder.
        let build = format!("lib/modules/{RELEASE}/build");
        match package {
            Theirs(version) => {
                self.host.put(&format!("{build}/include/here"), "")?;
                self.host.put(
                    &format!("{build}/.config"),
                    "CONFIG_RUST=y\nCONFIG_INFINIBAND_USER_MEM=y\n",
                )?;
                Module::Core(version).write(&self.host.path(&format!("{folder}/nvidia.ko")))?;
                Module::Theirs(version)
                    .write(&self.host.path(&format!("{folder}/nvidia-peermem.ko")))?;
                let package = self.distribution.driver();
                self.host.put(
                    &format!("{folder}/dkms.conf"),
                    &format!(
                        "PACKAGE_NAME=\"{package}\"\nPACKAGE_VERSION=\"{version}\"\nAUTOINSTALL=\"yes\"\n\
                         MAKE[0]=\"true\"\nCLEAN=\"true\"\n\
                         BUILT_MODULE_NAME[0]=\"nvidia\"\nDEST_MODULE_NAME[0]=\"{package}\"\n\
                         DEST_MODULE_LOCATION[0]=\"/kernel/drivers/video\"\n\
                         BUILT_MODULE_NAME[1]=\"nvidia-peermem\"\nDEST_MODULE_NAME[1]=\"{package}-peermem\"\n\
                         DEST_MODULE_LOCATION[1]=\"/kernel/drivers/video\"\n"
                    ),
                )
            }
            Ours(version) => {
                self.host
                    .sources(&folder, &build, Module::Ours(version), "")?;
                let file = self.host.path(&format!("{folder}/dkms.conf"));
                let mut conf = String::new();
                for line in fs::read_to_string(&file)?.lines() {
                    if line.starts_with("PACKAGE_VERSION=") {
                        conf.push_str(&format!("PACKAGE_VERSION=\"{version}\""));
                    } else if !line.starts_with("PRE_BUILD=") {
                        // The check of the kernel before a build is left out, because this is no
                        // real kernel.
                        conf.push_str(line);
                    }
                    conf.push('\n');
                }
                fs::write(file, conf)?;
                Ok(())
            }
        }
    }

    fn dkms(&self, command: &str) -> Result<String> {
        succeeded(command, &self.host.inside(command)?)
    }

    fn step(&self, step: Step) -> Result<String> {
        match step {
            Add(package) => {
                self.unpack(package)?;
                let name = package.dkms_name(self.distribution);
                self.dkms(&format!(
                    "dkms add {name} && dkms install {name} -k {RELEASE}"
                ))
            }
            Rebuild(package) => {
                let name = package.dkms_name(self.distribution);
                self.dkms(&format!(
                    "dkms unbuild {name} -k {RELEASE} && dkms install {name} -k {RELEASE}"
                ))
            }
            Remove(package) => {
                let name = package.dkms_name(self.distribution);
                let said = self.dkms(&format!("dkms remove {name} --all"))?;
                let folder = format!("synthetic/src/{}", name.replace('/', "-"));
                fs::remove_dir_all(self.host.path(&folder))?;
                Ok(said)
            }
        }
    }

    /// Lists the host's files, except logs and the stand-in for the kernel's build folder, which
    /// dkms did not create.
    fn listing(&self) -> Result<Listing> {
        let mut listing = self.host.listing()?;
        listing.retain(|name, _| {
            !name.starts_with(&format!("lib/modules/{RELEASE}/build")) && !name.ends_with(".log")
        });
        Ok(listing)
    }
}

/// Returns the version of the module that must load if these packages are installed, or `None` if
/// no module may load.
fn wanted(installed: &[Package]) -> Option<String> {
    let newest = |ours: bool| {
        installed
            .iter()
            .rev()
            .find(|package| matches!(package, Ours(_)) == ours)
    };
    match newest(true).or_else(|| newest(false)) {
        Some(Ours(version)) => Some(Module::Ours(version).version()),
        Some(Theirs(version)) => Some(Module::Theirs(version).version()),
        None => None,
    }
}

fn story(log: Log, distribution: &Distribution, steps: &[Step]) -> Result<()> {
    let tree = Tree::new(distribution)?;
    tree.host.can_be_entered()?;
    let version = tree.dkms("dkms --version")?;
    log.note(version);
    // A host that never had our package, for comparison.
    let reference = Tree::new(distribution)?;
    reference.dkms("true")?;

    let mut installed: Vec<Package> = Vec::new();
    for step in steps {
        tree.step(*step)?;
        match step {
            Add(package) => installed.push(*package),
            Remove(package) => installed.retain(|other| other != package),
            Rebuild(_) => {}
        }
        if let Add(Theirs(_)) | Remove(Theirs(_)) = step {
            reference.step(*step)?;
        }
        // If no module loads, modprobe normally fails. Only a leftover `install` line of Debian's
        // driver package lets modprobe succeed without effect.
        let loads = tree.host.loads().unwrap_or_else(|error| error.to_string());
        log.note(format!("{step:?}: {loads}"));
        let right = match wanted(&installed) {
            Some(version) => loads.contains(&format!("(version {version})")),
            None => loads == NOTHING || loads.contains("not found"),
        };
        if !right {
            bail!("{step:?}: wanted {:?}", wanted(&installed));
        }
        if !installed.iter().any(|package| matches!(package, Ours(_))) {
            log.equal(
                &format!("{step:?}: differs from a host that never had ours"),
                differences(&reference.listing()?, &tree.listing()?),
                NOTHING,
            )?;
        }
    }
    if installed.is_empty() {
        log.equal(
            "in the end differs from a host that never had ours",
            differences(&reference.listing()?, &tree.listing()?),
            NOTHING,
        )?;
    }
    Ok(())
}

/// Shows why our file must not have the name of NVIDIA's file. If both packages install files of
/// one name, removing one package removes the module of the other.
fn one_name(log: Log) -> Result<()> {
    let mut harmed = 0;
    for distribution in DISTRIBUTIONS.iter().filter(|one| one.id != "debian") {
        let tree = Tree::new(distribution)?;
        tree.host.can_be_entered()?;
        tree.step(Add(Theirs("580.1")))?;
        tree.unpack(Ours("600.1"))?;
        let file = tree.host.path("synthetic/src/peermem-rs-600.1/dkms.conf");
        let conf = fs::read_to_string(&file)?;
        fs::write(
            &file,
            conf.replace("=\"nvidia_peermem\"", "=\"nvidia-peermem\""),
        )?;
        let installed = tree.dkms(&format!(
            "dkms add peermem-rs/600.1 && dkms install peermem-rs/600.1 -k {RELEASE}"
        ));
        let with_ours = tree.host.loads();
        // Upgrades NVIDIA's package, and then removes ours.
        let upgraded = tree
            .step(Remove(Theirs("580.1")))
            .and_then(|_| tree.step(Add(Theirs("610.2"))));
        let after_theirs = tree.host.loads();
        let removed = tree.dkms("dkms remove peermem-rs/600.1 --all");
        let after_ours = tree.host.loads();
        let tell = |load: Result<String>| load.unwrap_or_else(|error| error.to_string());
        let well = installed.is_ok() && upgraded.is_ok() && removed.is_ok();
        let [with_ours, after_theirs, after_ours] = [with_ours, after_theirs, after_ours].map(tell);
        log.note(format!(
            "{}: installed: {with_ours}; NVIDIA's upgraded: {after_theirs}; ours removed: {after_ours}",
            distribution.name
        ));
        let right = with_ours.contains("600.1-rs")
            && after_theirs.contains("600.1-rs")
            && after_ours.contains("version 610.2");
        if !well || !right {
            harmed += 1;
        }
    }
    log.note(format!(
        "distributions where something went wrong: {harmed}"
    ));
    if harmed == 0 {
        bail!(
            "two module files of one name did no harm, but packaging/depmod.conf says that they do"
        );
    }
    Ok(())
}

/// Runs `make install` inside a host, with the default folders and the real depmod. KVER names the
/// kernel.
fn make_install(log: Log) -> Result<()> {
    let distribution = &DISTRIBUTIONS[0];
    let tree = Tree::new(distribution)?;
    tree.host.can_be_entered()?;
    tree.step(Add(Theirs("580.1")))?;
    let before = tree.listing()?;
    log.note(format!("before: {}", tree.host.loads()?));
    let build = format!("lib/modules/{RELEASE}/build");
    tree.host
        .sources("synthetic/src/checkout", &build, Module::Ours("1"), "")?;
    // `su` without a dash keeps a user's PATH.
    let run = |target: &str| {
        tree.dkms(&format!(
            "PATH=/usr/bin:/bin make -C /usr/src/checkout KVER={RELEASE} CHECK=no {target}"
        ))
    };
    run("install")?;
    log.equal(
        "installed",
        &tree.host.loads()?,
        "updates/peermem-rs/nvidia_peermem.ko (version 1-rs)",
    )?;
    // Asks modinfo as a user of the host would, with the host's own configuration.
    let asked = tree.dkms(&format!("modinfo -k {RELEASE} -F filename nvidia-peermem"))?;
    log.equal(
        "modinfo on the host",
        asked,
        format!("/lib/modules/{RELEASE}/updates/peermem-rs/nvidia_peermem.ko"),
    )?;
    run("uninstall")?;
    log.equal(
        "removed",
        &tree.host.loads()?,
        "updates/dkms/nvidia-current-open-peermem.ko (version 580.1)",
    )?;
    log.equal("differs", differences(&before, &tree.listing()?), NOTHING)
}

/// Installs all modules for a new kernel, as the hook of a kernel's package does. Checks that dkms
/// builds the driver before our module, although our package was added first: the build of our
/// module may need nvidia.ko.
fn new_kernel(log: Log) -> Result<()> {
    for distribution in DISTRIBUTIONS {
        let tree = Tree::new(distribution)?;
        tree.host.can_be_entered()?;
        for package in [Ours("600.1"), Theirs("580.1")] {
            tree.unpack(package)?;
            tree.dkms(&format!("dkms add {}", package.dkms_name(distribution)))?;
        }
        // The build of our module lists the modules that are installed.
        let modules = format!("/lib/modules/{RELEASE}");
        let list = format!("find {modules} -name 'nvidia*.ko*'");
        let kbuild = format!("lib/modules/{RELEASE}/build/Makefile");
        let makefile = fs::read_to_string(tree.host.path(&kbuild))?;
        let makefile = makefile.replace("modules:\n", &format!("modules:\n\t{list} >/tmp/seen\n"));
        tree.host.put(&kbuild, &makefile)?;
        tree.dkms(&format!("dkms autoinstall -k {RELEASE}"))?;
        let seen = fs::read_to_string(tree.host.path("tmp/seen"))?;
        let driver = format!("/{}.ko", distribution.driver());
        log.that(
            &format!("{}: nvidia.ko is installed first", distribution.name),
            seen.contains(&driver),
        )?;
    }
    Ok(())
}

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for distribution in DISTRIBUTIONS {
        for (name, steps) in STORIES {
            let name = format!("dkms: {}: {name}", distribution.name);
            cases.push(Case::new(name, move |log| story(log, distribution, steps)));
        }
    }
    cases.push(Case::new(
        "dkms: one file name for both does harm",
        one_name,
    ));
    cases.push(Case::new("dkms: a new kernel", new_kernel));
    cases.push(Case::new(
        "make install, with the default folders",
        make_install,
    ));
    cases
}
