// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! The places in which NVIDIA's installer and the distributions put NVIDIA's module. The tests
//! install our module too, and check which of the two modprobe loads.

use std::fs;
use std::sync::LazyLock;

use anyhow::{bail, Result};

use crate::forge::Module;
use crate::host::{differences, run, succeeded, tool, Host, NOTHING, RELEASE};
use crate::{repository, Case, Log};

/// File layout of a driver package.
pub(crate) struct Layout {
    pub(crate) name: &'static str,
    /// `ID` in os-release.
    pub(crate) id: &'static str,
    /// Path of NVIDIA's nvidia-peermem, relative to the kernel's folder of modules.
    theirs: &'static str,
}

/// Table of the layouts, with the columns name, `ID` and path of NVIDIA's nvidia-peermem.
const TABLE: &str = "\
.run installer | gentoo | kernel/drivers/video/nvidia-peermem.ko
.run installer with DKMS | debian | updates/dkms/nvidia-peermem.ko
Ubuntu, prebuilt | ubuntu | kernel/nvidia-580-open/nvidia-peermem.ko
Ubuntu, DKMS | ubuntu | updates/dkms/nvidia-peermem.ko.zst
Debian | debian | updates/dkms/nvidia-current-open-peermem.ko
Debian, compressed | debian | updates/dkms/nvidia-current-open-peermem.ko.xz
RHEL, kmod package with an override | rhel | extra/nvidia/nvidia-peermem.ko.xz
RHEL, weak-updates | rhel | weak-updates/nvidia/nvidia-peermem.ko.xz
RHEL, DKMS | rhel | extra/nvidia-peermem.ko.xz
Arch, prebuilt | arch | extramodules/nvidia-peermem.ko.zst
Arch, DKMS | arch | updates/dkms/nvidia-peermem.ko.zst
SUSE, kernel module package | opensuse-leap | updates/nvidia-peermem.ko.zst
";

static LAYOUTS: LazyLock<Vec<Layout>> = LazyLock::new(|| {
    let layout = |line: &'static str| {
        let mut columns = line.split(" | ");
        Some(Layout {
            name: columns.next()?,
            id: columns.next()?,
            theirs: columns.next()?,
        })
    };
    TABLE.lines().filter_map(layout).collect()
});

/// `/etc/modprobe.d/nvidia.conf` of Debian's driver packages, without the lines for other modules.
pub(crate) const DEBIAN_MODPROBE: &str = "\
install nvidia modprobe -i nvidia-current-open $CMDLINE_OPTS
install nvidia-peermem modprobe nvidia ; modprobe -i nvidia-current-open-peermem $CMDLINE_OPTS
remove nvidia modprobe -r -i nvidia-drm nvidia-modeset nvidia-peermem nvidia-uvm nvidia
alias pci:v000010DEd*sv*sd*bc03sc02i00* nvidia
";

impl Layout {
    /// Returns the compression suffix of modules.
    fn suffix(&self) -> &'static str {
        self.theirs
            .split_once(".ko")
            .map_or("", |(_, suffix)| suffix)
    }

    /// Returns the path of nvidia.ko, which is beside nvidia-peermem.
    fn core(&self) -> String {
        self.theirs.replace("-peermem", "")
    }

    /// Returns the folder in which dkms puts our module on this distribution.
    fn dkms(&self) -> &'static str {
        match self.id {
            "rhel" => "extra",
            "opensuse-leap" => "updates",
            _ => "updates/dkms",
        }
    }

    /// Writes all files of the driver's packages except the modules. If the layout has
    /// `weak-updates`, creates links there to the folder of the kernel that the package was built
    /// for. The modules are later written through these links.
    fn put_files(&self, host: &Host) -> Result<()> {
        if self.name.starts_with("Debian") {
            host.put("etc/modprobe.d/nvidia.conf", DEBIAN_MODPROBE)?;
        }
        if self.id == "ubuntu" {
            host.put(
                "etc/depmod.d/ubuntu.conf",
                "search updates ubuntu built-in\n",
            )?;
        }
        if self.id == "rhel" {
            let search = "search updates extra built-in weak-updates\n";
            host.put("usr/lib/depmod.d/dist.conf", search)?;
        }
        let overrides = match self.name {
            "RHEL, kmod package with an override" => {
                "override nvidia 7.9.0-* extra/nvidia\noverride nvidia-peermem 7.9.0-* extra/nvidia\n"
            }
            "RHEL, weak-updates" => "override nvidia-peermem * weak-updates/nvidia\n",
            _ => return Ok(()),
        };
        host.put("etc/depmod.d/kmod-nvidia.conf", overrides)?;
        for file in [self.core(), self.theirs.to_owned()] {
            if let Some(name) = file.strip_prefix("weak-updates/") {
                let target = format!("../../../7.9.0-0-older/extra/{name}");
                host.link(&format!("lib/modules/{RELEASE}/{file}"), &target)?;
            }
        }
        Ok(())
    }
}

/// Creates a host with the layout's driver.
fn host(layout: &Layout, version: &'static str) -> Result<Host> {
    let host = Host::new(layout.id)?;
    host.put("lib/modules/7.9.0-0-older/extra/nvidia/here", "")?;
    layout.put_files(&host)?;
    host.put(
        "etc/modprobe.d/site.conf",
        "options nvidia-peermem persistent_api_support=0\n",
    )?;
    driver(&host, layout, version)?;
    Ok(host)
}

/// Upgrades the driver: rewrites its files, and runs depmod.
fn driver(host: &Host, layout: &Layout, version: &'static str) -> Result<()> {
    host.module(&layout.core(), Module::Core(version))?;
    host.module(layout.theirs, Module::Theirs(version))?;
    host.depmod()
}

/// Ways to install our module.
#[derive(Clone, Copy)]
enum Way {
    Make,
    /// Writes the module's file and runs `packaging/host`, as dkms does with `dkms.conf`.
    LikeDkms,
}

impl Way {
    fn file(self, layout: &Layout) -> String {
        match self {
            Self::Make => format!("updates/peermem-rs/nvidia_peermem.ko{}", layout.suffix()),
            Self::LikeDkms => format!("{}/nvidia_peermem.ko{}", layout.dkms(), layout.suffix()),
        }
    }

    /// Runs make, which must succeed, and returns its standard error.
    fn make(host: &Host, arguments: &str) -> Result<String> {
        let output = tool("make")
            .arg("-C")
            .arg(host.path("synthetic/sources"))
            .args(arguments.split(' ').map(|word| word.replace('~', " ")))
            // Skips scripts/check, because nothing is compiled.
            .arg("CHECK=no")
            .arg(format!("KDIR={}", host.path("synthetic/build").display()))
            .arg(format!("DESTDIR={}", host.path("").display()))
            .output()?;
        succeeded("make", &output)?;
        Ok(String::from_utf8_lossy(&output.stderr).into_owned())
    }

    fn install(self, host: &Host, layout: &Layout, version: &'static str) -> Result<()> {
        let module = Module::Ours(version);
        host.sources(
            "synthetic/sources",
            "synthetic/build",
            module,
            layout.suffix(),
        )?;
        match self {
            Self::Make => drop(Self::make(host, "install")?),
            Self::LikeDkms => {
                host.module(&self.file(layout), module)?;
                host.packaging("install")?;
            }
        }
        host.depmod()
    }

    fn remove(self, host: &Host, layout: &Layout) -> Result<()> {
        match self {
            Self::Make => drop(Self::make(host, "uninstall")?),
            Self::LikeDkms => {
                let modules = host.path("lib/modules").join(RELEASE);
                fs::remove_file(modules.join(self.file(layout)))?;
                // Removes empty folders as well, like dkms.
                let mut folder = modules.join(layout.dkms());
                while folder != modules && fs::remove_dir(&folder).is_ok() {
                    folder.pop();
                }
                host.packaging("remove")?;
            }
        }
        host.depmod()
    }
}

const OPTION: &str = "persistent_api_support=0";

fn theirs(layout: &Layout, version: &'static str) -> String {
    format!(
        "{} (version {}) with {OPTION}",
        layout.theirs,
        Module::Theirs(version).version()
    )
}

fn ours(layout: &Layout, way: Way, version: &'static str) -> String {
    format!(
        "{} (version {}) with {OPTION}",
        way.file(layout),
        Module::Ours(version).version()
    )
}

/// Checks which module modprobe would load before our module is installed, after each step, and
/// after the removal.
fn life(log: Log, layout: &Layout, way: Way) -> Result<()> {
    let host = host(layout, "580.1")?;
    let before = host.listing()?;
    log.equal("before", host.loads()?, theirs(layout, "580.1"))?;

    way.install(&host, layout, "1")?;
    log.equal("installed", host.loads()?, ours(layout, way, "1"))?;
    log.equal("modinfo", host.modinfo("version")?, "1-rs")?;
    log.equal(
        "name for modprobe -r, rmmod, lsmod",
        host.resolves()?,
        "nvidia_peermem",
    )?;
    // initramfs-tools uses these options for a module named in /etc/initramfs-tools/modules.
    log.equal(
        "for an initramfs",
        host.loads_for(&["--all", "--ignore-install", "--quiet", "nvidia-peermem"])?,
        ours(layout, way, "1"),
    )?;
    let after = host.listing()?;
    let key = format!("lib/modules/{RELEASE}/{}", layout.theirs);
    log.that(
        "NVIDIA's file is unchanged",
        after.get(&key) == before.get(&key),
    )?;

    driver(&host, layout, "610.2")?;
    log.equal("NVIDIA's upgraded", host.loads()?, ours(layout, way, "1"))?;
    way.install(&host, layout, "2")?;
    log.equal("ours upgraded", host.loads()?, ours(layout, way, "2"))?;
    let once = host.listing()?;
    way.install(&host, layout, "2")?;
    host.is_as(log, "installed twice, differs", &once)?;

    way.remove(&host, layout)?;
    log.equal("removed", host.loads()?, theirs(layout, "610.2"))?;
    driver(&host, layout, "580.1")?;
    log.equal("NVIDIA's put back", host.loads()?, theirs(layout, "580.1"))?;
    let difference = differences(&before, &host.listing()?);
    log.equal(
        &format!("of {} files and folders differ", before.len()),
        &difference,
        NOTHING,
    )
}

/// Installs our module in both ways on one host, and checks that the module of `make install` takes
/// precedence. Then removes both installations in this order, and checks that the last removal
/// leaves nothing.
fn both_ways(log: Log, layout: &Layout, order: [Way; 2]) -> Result<()> {
    let host = host(layout, "580.1")?;
    let before = host.listing()?;
    Way::Make.install(&host, layout, "1")?;
    Way::LikeDkms.install(&host, layout, "2")?;
    log.equal("both", host.loads()?, ours(layout, Way::Make, "1"))?;
    let [first, second] = order;
    first.remove(&host, layout)?;
    let left = match second {
        Way::Make => "1",
        Way::LikeDkms => "2",
    };
    log.equal("one left", host.loads()?, ours(layout, second, left))?;
    second.remove(&host, layout)?;
    log.equal("none left", host.loads()?, theirs(layout, "580.1"))?;
    host.is_as(log, "differs", &before)
}

/// Checks that `make install` runs kbuild with the variables of `make module`, and that its own
/// variables take precedence. If kbuild fails, nothing is installed.
fn variables(log: Log) -> Result<()> {
    let layout = &LAYOUTS[0];
    let host = host(layout, "580.1")?;
    let sources = "synthetic/sources";
    host.sources(sources, "synthetic/build", Module::Ours("1"), "")?;
    // Columns: the arguments of make, and the variables of each build that follows. `~` stands for
    // a blank in a value. kbuild fails with NV_SYMVERS=bad.
    let table = "\
-j4 module install | NV_SYMVERS=, NV_SYMVERS=
module NV_SYMVERS=a KCFLAGS=-x~'y' | NV_SYMVERS=a -x 'y'
install | NV_SYMVERS=a -x 'y'
install PREFIX=/usr V=1 | NV_SYMVERS=a -x 'y'
install NV_SYMVERS=b | NV_SYMVERS=b -x 'y'
install | NV_SYMVERS=b -x 'y'
module PREFIX=/usr | NV_SYMVERS=
install | NV_SYMVERS=
module NV_SYMVERS=bad | NV_SYMVERS=bad
install | NV_SYMVERS=bad
install NV_SYMVERS= PREFIX=/usr V=1 | NV_SYMVERS=";
    let builds = host.path(&format!("{sources}/build/{RELEASE}/builds"));
    for line in table.lines() {
        let (arguments, wanted) = line.split_once(" | ").unwrap_or((line, ""));
        let _ = fs::remove_file(&builds);
        let made = Way::make(&host, arguments);
        log.equal(line, made.is_err(), wanted.ends_with("=bad"))?;
        let said = fs::read_to_string(&builds)?;
        let said: Vec<&str> = said.lines().map(str::trim).collect();
        log.equal(line, said.join(", "), wanted)?;
    }
    // Variables that do not concern kbuild are not saved.
    let saved = fs::read_to_string(builds.with_file_name("variables"))?;
    log.equal("saved", saved.trim(), "NV_SYMVERS=''")
}

/// Tests a removal while another kernel still has our module. Files that all kernels share stay
/// until the last removal.
fn two_kernels(log: Log) -> Result<()> {
    let layout = &LAYOUTS[1];
    let host = host(layout, "580.1")?;
    let other = "lib/modules/7.9.0-2-other/updates/dkms/nvidia_peermem.ko";
    Way::Make.install(&host, layout, "1")?;
    Module::Ours("1").write(&host.path(other))?;
    let files = || -> Result<bool> {
        let listing = host.listing()?;
        Ok(listing.contains_key("etc/depmod.d/zz-peermem-rs.conf")
            && listing.contains_key("usr/lib/systemd/system/peermem-rs.service"))
    };
    // `make install` and `make uninstall` name a second module of this kernel.
    let second = "updates/dkms/nvidia_peermem.ko";
    let named = |target: &str, wanted: &str| {
        let said = Way::make(&host, target)?;
        let line = said.lines().find(|line| line.contains(second));
        let root = host.path("").display().to_string();
        let line = line.unwrap_or_default().replace(&root, "/");
        log.equal(target, line, wanted)
    };
    let modules = format!("/lib/modules/{RELEASE}");
    named("install", "")?;
    host.module(second, Module::Ours("2"))?;
    named(
        "install",
        &format!(
            "peermem-rs: kernel {RELEASE} has our module as {modules}/{second} {modules}/{} now. modprobe prefers \
             the one in updates/peermem-rs: 'make uninstall' removes it, and 'dkms remove' the other.",
            Way::Make.file(layout)
        ),
    )?;
    let left = "'dkms remove' removes it.";
    named(
        "uninstall",
        &format!("peermem-rs: kernel {RELEASE} still has our module as {modules}/{second}: {left}"),
    )?;
    fs::remove_file(host.path(&format!("lib/modules/{RELEASE}/{second}")))?;
    named("uninstall", "")?;
    // A link to a module that is gone does not count. weak-modules can leave such a link.
    host.link(
        &format!("lib/modules/{RELEASE}/weak-updates/nvidia_peermem.ko"),
        "../../7.9.0-0-gone/extra/nvidia_peermem.ko",
    )?;
    Way::Make.remove(&host, layout)?;
    log.equal(
        "this kernel's removed",
        host.loads()?,
        theirs(layout, "580.1"),
    )?;
    log.that("the shared files stay", files()?)?;
    fs::remove_dir_all(host.path("lib/modules/7.9.0-2-other"))?;
    // A `find` that fails has perhaps not seen all modules.
    let mut unreadable = tool("sh");
    unreadable.args(["-c", "find() { return 1; }; . \"$0\""]);
    unreadable.arg(repository("packaging/host")).arg("remove");
    run(unreadable.arg(host.path("lib/modules")))?;
    log.that("the shared files stay if find fails", files()?)?;
    Way::Make.remove(&host, layout)?;
    log.that("the last removal removes the shared files", !files()?)
}

/// Checks that a blacklist for NVIDIA's module also applies to ours.
fn blacklisted(log: Log) -> Result<()> {
    for layout in LAYOUTS.iter() {
        let host = host(layout, "580.1")?;
        host.put(
            "etc/modprobe.d/zz-site.conf",
            "blacklist nvidia-peermem\nblacklist nvidia_current_open_peermem\n",
        )?;
        Way::LikeDkms.install(&host, layout, "1")?;
        log.equal(
            layout.name,
            host.loads_for(&["--use-blacklist", "nvidia-peermem"])?,
            NOTHING,
        )?;
    }
    Ok(())
}

/// Checks an `install` line that blocks both modules. As docs/install.md explains, the line takes
/// effect if its file is read first.
fn kept_out(log: Log) -> Result<()> {
    for layout in LAYOUTS.iter() {
        // On Debian and Ubuntu, our module comes with its own `install` line, which hides a line in
        // a later file.
        let debians = ["debian", "ubuntu"].contains(&layout.id);
        for (name, holds) in [("00-local.conf", true), ("zz-local.conf", !debians)] {
            let host = host(layout, "580.1")?;
            Way::Make.install(&host, layout, "1")?;
            let line = "install nvidia-peermem /bin/false\n";
            host.put(&format!("etc/modprobe.d/{name}"), line)?;
            log.equal(
                &format!("{}: the line in {name} takes effect", layout.name),
                host.loads()? == NOTHING,
                holds,
            )?;
        }
    }
    Ok(())
}

/// Checks that modprobe loads NVIDIA's module on a kernel without ours. On Debian's layouts,
/// modprobe loads nothing there, because NVIDIA's file has another name.
fn kernel_without(log: Log) -> Result<()> {
    for layout in LAYOUTS.iter() {
        let host = host(layout, "580.1")?;
        Way::Make.install(&host, layout, "1")?;
        let modules = host.path("lib/modules").join(RELEASE);
        fs::remove_file(modules.join(Way::Make.file(layout)))?;
        host.depmod()?;
        let wanted = if layout.name.starts_with("Debian") {
            NOTHING.to_owned()
        } else {
            theirs(layout, "580.1")
        };
        log.equal(layout.name, host.loads()?, &wanted)?;
    }
    Ok(())
}

/// Shows why our configuration has an `override` line for depmod and an `install` line for
/// modprobe. Without these lines, modprobe loads NVIDIA's module on some layouts.
fn without_configuration(log: Log) -> Result<()> {
    let mut lost = Vec::new();
    for layout in LAYOUTS.iter() {
        for way in [Way::Make, Way::LikeDkms] {
            let host = host(layout, "580.1")?;
            way.install(&host, layout, "1")?;
            fs::remove_file(host.path("etc/depmod.d/zz-peermem-rs.conf"))?;
            host.depmod()?;
            let loads = host.loads()?;
            log.note(format!("{}, no override: {loads}", layout.name));
            if loads == theirs(layout, "580.1") {
                lost.push(layout.name);
            }
        }
        if layout.name.starts_with("Debian") {
            let host = host(layout, "580.1")?;
            Way::Make.install(&host, layout, "1")?;
            fs::remove_file(host.path("etc/modprobe.d/00-peermem-rs.conf"))?;
            log.equal(
                &format!("{}, no install line", layout.name),
                &host.loads()?,
                theirs(layout, "580.1"),
            )?;
        }
    }
    if !lost.contains(&"RHEL, kmod package with an override") {
        bail!("no layout needs the override");
    }
    Ok(())
}

/// Tests our hooks for openibd. An installation adds our hooks if there are none, and replaces
/// hooks of an earlier version. The operator's hooks stay, even a hook that starts our service.
fn hooks(log: Log) -> Result<()> {
    let layout = &LAYOUTS[1];
    let host = host(layout, "580.1")?;
    let pre = "etc/infiniband/pre-stop-hook.sh";
    let post = "etc/infiniband/post-start-hook.sh";
    host.put("etc/infiniband/openib.conf", "ONBOOT=yes\n")?;
    host.put(
        post,
        "#!/bin/sh\n# The unit is that of peermem-rs.\nsystemctl --no-block start peermem-rs.service\n",
    )?;
    let before = host.listing()?;
    host.put(
        pre,
        "#!/bin/sh\n# Of peermem-rs. The script /etc/init.d/openibd\n",
    )?;
    Way::Make.install(&host, layout, "1")?;
    let after = host.listing()?;
    log.that(
        "the pre-stop hook is that of this version",
        after.get(pre).is_some_and(|text| {
            text.contains("pre-stop-hook.sh) systemctl stop peermem-rs.service")
        }),
    )?;
    log.that(
        "the operator's post-start hook is unchanged",
        after.get(post) == before.get(post),
    )?;
    Way::Make.remove(&host, layout)?;
    host.is_as(log, "removed, differs", &before)
}

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for layout in LAYOUTS.iter() {
        for (way, how) in [(Way::Make, "make install"), (Way::LikeDkms, "file of dkms")] {
            let name = format!("kmod: {}: {how}", layout.name);
            cases.push(Case::new(name, move |log| life(log, layout, way)));
        }
    }
    let mut add = |name: &str, run: fn(Log) -> Result<()>| {
        cases.push(Case::new(format!("kmod: {name}"), run));
    };
    add("both ways at once", |log| {
        for layout in LAYOUTS.iter() {
            log.note(layout.name);
            both_ways(log, layout, [Way::Make, Way::LikeDkms])?;
            both_ways(log, layout, [Way::LikeDkms, Way::Make])?;
        }
        Ok(())
    });
    add("variables of make module", variables);
    add("two kernels", two_kernels);
    add("a blacklist also applies to our module", blacklisted);
    add("an install line that blocks the module", kept_out);
    add("a kernel without our module", kernel_without);
    add(
        "without the configuration NVIDIA's is loaded",
        without_configuration,
    );
    add("hooks of openibd", hooks);
    cases
}
