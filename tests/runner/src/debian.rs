// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Synthetic Debian hosts, as close to a user's host as possible. Each host has a Debian release
//! with its stock kernel, and ib_core's modules in `updates` as with OFED. DKMS has installed the
//! stand-in's driver and NVIDIA's own nvidia-peermem.
//!
//! Users get our module as source, as an archive or as a Debian package. A host with Rust gets the
//! source. The other hosts get the archive, then the package. DKMS installs the module from each of
//! these. A VM boots the host's root and loads the modules that `modprobe` finds. DKMS runs in a
//! chroot, because its build would take an hour in the VM.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{bail, Context as _, Result};

use crate::arch::Arch;
use crate::command::{as_root, tool};
use crate::index::Index;
use crate::kernel::{stock, Extent};
use crate::lock::Lock;
use crate::paths::Paths;
use crate::progress::{output, Stage};
use crate::results::{pattern, Format, Test};
use crate::stamp::Key;
use crate::vm::{Named as _, Options, Peermem, Provider};
use crate::{apt, cases, guest, index, modules, programs, setup, stamp, vm};

/// A Debian release with one of its kernels, and how our module is installed on it.
pub(crate) struct Release {
    name: &'static str,
    /// The release's suite, then the suite with its newer kernels, if needed.
    suites: &'static [&'static str],
    /// The kernel's series. The RDMA modules are compiled from the source of the test VM's kernel
    /// of the same name.
    pub(crate) kernel: &'static str,
    packages: &'static str,
    /// Form of our module with which the host boots. A host for the package first installs and
    /// removes the archive.
    way: Way,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    /// The source, unpacked for DKMS. The build makes the Rust metadata from the kernel's source.
    Source,
    /// The archive made by `make dist`, unpacked for DKMS.
    Archive,
    /// The Debian package made by `make dist`.
    Package,
}

const RELEASES: [Release; 3] = [
    // The host with the in-tree build.
    Release {
        name: "13-backports",
        suites: &["trixie", "trixie-backports"],
        kernel: "7.3",
        packages: "linux-base/trixie-backports linux-source-7.3 rustc rust-src bindgen flex bison bc libelf-dev libssl-dev \
                   openssl pahole python3-minimal",
        way: Way::Source,
    },
    // Hosts with the portable build, and without Rust.
    Release { name: "13", suites: &["trixie"], kernel: "6.12", packages: "", way: Way::Package },
    Release { name: "12", suites: &["bookworm"], kernel: "6.1", packages: "", way: Way::Package },
];

pub(crate) fn release(name: &str) -> Option<&'static Release> {
    RELEASES.iter().find(|release| release.name == name)
}

/// Packages of every host, in addition to its kernel and the kernel's headers: DKMS, and the
/// libraries of the verbs program.
const PACKAGES: &str = "dkms make xz-utils iproute2 libibverbs1 ibverbs-providers librdmacm1";

/// Files of the repository that the host's DKMS package contains.
const PACKAGE: [&str; 8] = [
    "Kbuild",
    "Makefile",
    "dkms.conf",
    "packaging",
    "portable",
    "rust-bindings",
    "scripts",
    "src",
];

/// Folders that must be unchanged after the module is removed. Some releases lack some of these
/// folders.
const WATCHED: &str =
    "etc usr/lib/depmod.d usr/lib/modprobe.d usr/lib/modules usr/lib/systemd var/lib";
/// Parts of [`WATCHED`] that DKMS, depmod, dpkg and deb-systemd-helper manage themselves.
const UNWATCHED: &str =
    "-not -path 'var/lib/dkms/*' -not -name 'modules.*' -not -path 'var/lib/dpkg/*' \
                         -not -path 'var/lib/systemd/deb-systemd-helper-*'";

/// Mount options of the layer over the root, relative to the host's folder.
const OVERLAY: &str =
    "lowerdir=base,upperdir=layer/upper,workdir=layer/work,redirect_dir=off,metacopy=off,index=off";

/// The host's root, and the files made for it.
struct Host<'a> {
    paths: &'a Paths,
    what: &'static Release,
    home: PathBuf,
    root: PathBuf,
    /// The overlay's upper layer, which has all changes. `None` if the root itself was changed.
    layer: Option<PathBuf>,
    release: String,
}

/// Returns the root without our module. This root is made once.
fn base<'a>(paths: &'a Paths, what: &'static Release, rdma_source: &Path) -> Result<Host<'a>> {
    let home = paths.cache.join("debian").join(what.name);
    fs::create_dir_all(&home)?;
    let root = home.join("base");
    let stamp = home.join("base.stamp");
    let mut key = Key::default();
    key.text("suites", &what.suites.join(" "));
    key.text("kernel", what.kernel);
    let packages = [PACKAGES, what.packages].join(" ");
    let mut packages: Vec<String> = packages.split_whitespace().map(str::to_owned).collect();
    key.text("packages", &packages.join(" "));
    let key = key.finish();
    if !stamp::is_fresh(&stamp, &key) {
        apt::install(paths, apt::ROOT)?;
        let mut stage = Stage::begin(title(what, "installing its packages"));
        remove(&root)?;
        let (release, newer) = (what.suites[0], what.suites[what.suites.len() - 1]);
        let prefix = format!("linux-image-{}", what.kernel);
        let candidates = apt::search(paths, &mut stage, &[newer], &prefix)?;
        let kernel = candidates
            .iter()
            .find_map(|candidate| stock::release_in(&candidate.package, what.kernel, "amd64"))
            .with_context(|| format!("{newer} has no stock kernel {}", what.kernel))?;
        packages.extend(["image", "headers"].map(|part| format!("linux-{part}-{kernel}")));
        let sources = apt::sources_of(what.suites)?;
        let from = (release, sources.as_str());
        apt::make_root(paths, &mut stage, from, &packages, &root, None)?;
        stamp::set(&stamp, &key)?;
        stage.done(kernel);
    }
    let release = fs::read_dir(root.join("usr/lib/modules"))?
        .filter_map(|entry| Some(entry.ok()?.file_name().to_string_lossy().into_owned()))
        .next()
        .context("the host has no kernel")?;
    let host = Host {
        paths,
        what,
        home,
        root,
        layer: None,
        release,
    };
    host.ofed(rdma_source)?;
    Ok(host)
}

fn title(what: &Release, step: &str) -> String {
    format!("Debian {}: {step}", what.name)
}

fn remove(path: &Path) -> Result<()> {
    if path.exists() {
        // An interrupted run may have left mounts in this folder.
        output(as_root("rm").args(["-rf", "--one-file-system"]).arg(path))?;
    }
    Ok(())
}

impl Host<'_> {
    fn log(&self) -> PathBuf {
        self.paths.cache.join("logs/debian.txt")
    }

    fn title(&self, step: &str) -> String {
        title(self.what, step)
    }

    fn tests(&self, file: &str) -> PathBuf {
        self.paths.repo.join("tests/debian").join(file)
    }

    /// Returns a command in the root, with /proc and /dev. All mounts made for the command are gone
    /// when the command ends.
    fn command(&self, command: &str) -> Command {
        let mut mounts = String::new();
        let mut root = self.root.clone();
        if self.layer.is_some() {
            mounts = format!(
                "cd '{}'; mount -t overlay -o {OVERLAY} overlay root; ",
                self.home.display()
            );
            root = self.home.join("root");
        }
        mounts.push_str("mount -t proc proc \"$0/proc\"; mount --rbind /dev \"$0/dev\"; cd /; ");
        mounts.push_str("exec chroot \"$0\" sh -ec \"$1\"");
        let words = "--mount --fork env -i HOME=/root LC_ALL=C.UTF-8".split(' ');
        let mut result = as_root("unshare");
        result.args(words).arg(guest::SYSTEM_PROGRAMS);
        result.args(["sh", "-ec", &mounts]).arg(&root).arg(command);
        result
    }

    fn output(&self, command: &str) -> Result<String> {
        output(&mut self.command(command))
    }

    fn put(&self, sources: &[PathBuf], folder: &str) -> Result<()> {
        let target = self.layer.as_ref().unwrap_or(&self.root).join(folder);
        output(as_root("mkdir").arg("-p").arg(&target))?;
        output(as_root("cp").arg("-rL").args(sources).arg(&target))?;
        Ok(())
    }

    /// Compiles ib_core and rxe with peer memory outside the kernel's tree, and installs them where
    /// OFED installs its modules.
    fn ofed(&self, source: &Path) -> Result<()> {
        let stamp = self.home.join("ofed.stamp");
        let mut key = Key::default();
        let kernel = self.paths.repo.join("tests/kernel");
        let inputs = ["overlay", "patches"].map(|name| kernel.join(name));
        for input in inputs.iter().chain([&self.tests("ofed")]) {
            key.path(&self.paths.repo, input)?;
        }
        key.text("release", &self.release);
        let version = fs::read_to_string(source.with_file_name("source.name"));
        key.text("source", &version.unwrap_or_default());
        let key = key.finish();
        if stamp::is_fresh(&stamp, &key) && self.root.join("usr/src/ofa_kernel").exists() {
            return Ok(());
        }
        let mut stage = Stage::begin(self.title("compiling ib_core with peer memory"));
        let home = "usr/src/ofa_kernel/default";
        remove(&self.root.join("usr/src/ofa_kernel"))?;
        self.put(&[self.tests("ofed/Kbuild")], home)?;
        for (folder, target) in [
            ("drivers/infiniband/core", "drivers/infiniband"),
            ("drivers/infiniband/sw/rxe", "drivers/infiniband/sw"),
            ("include/rdma", "include"),
            ("include/uapi/rdma", "include/uapi"),
        ] {
            self.put(&[source.join(folder)], &format!("{home}/{target}"))?;
        }
        let headers = kernel.join("overlay/include/linux");
        self.put(&[headers], &format!("{home}/include"))?;
        // The kernel includes cm_trace.h by a path that begins in include/trace, so this folder
        // must exist.
        let trace = self.root.join(home).join("include/trace");
        output(as_root("mkdir").arg("-p").arg(trace))?;
        let release = &self.release;
        stage.steps(
            &mut self.command(&format!(
                "cd /{home}\n\
                 make -C /lib/modules/{release}/build M=$PWD -j $(nproc) modules\n\
                 rm -rf /lib/modules/{release}/updates/ofa\n\
                 mkdir -p /lib/modules/{release}/updates/ofa\n\
                 find . -name '*.ko' -exec cp {{}} /lib/modules/{release}/updates/ofa ';'\n\
                 find . '(' -name '*.o' -o -name '.*.cmd' ')' -delete\n\
                 depmod {release}"
            )),
            &self.log(),
        )?;
        stamp::set(&stamp, &key)?;
        stage.done("");
        Ok(())
    }

    /// Copies the driver's source to the folder in which the driver's installer leaves it for DKMS.
    fn put_driver(&self, control: &[PathBuf], version: &str) -> Result<()> {
        let home = format!("usr/src/nvidia-{version}");
        for (path, folder) in [
            ("tests/gpu", "/tests"),
            ("tests/control", "/tests"),
            ("tests/kernel/overlay/include", "/tests/kernel/overlay"),
            ("rust-bindings/include", "/rust-bindings"),
            ("tests/debian/driver/Kbuild", ""),
            ("tests/debian/driver/dkms.conf", ""),
        ] {
            self.put(&[self.paths.repo.join(path)], &format!("{home}{folder}"))?;
        }
        self.put(control, &format!("{home}/tests/control"))?;
        self.put(control, &format!("{home}/nvidia"))?;
        self.output(&format!("sed -i s/@VERSION@/{version}/ /{home}/dkms.conf"))?;
        Ok(())
    }

    /// Lists the files in [`WATCHED`], except those in [`UNWATCHED`].
    fn files(&self) -> Result<BTreeSet<String>> {
        let find = format!("cd / && find $(ls -d {WATCHED} 2>/dev/null) {UNWATCHED}");
        let list = self.output(&find)?;
        Ok(list.lines().map(str::to_owned).collect())
    }

    /// Boots the host, loads the modules that its modprobe finds, and runs cases of the verbs
    /// program.
    fn boot(
        &self,
        peermem: Peermem,
        param: &[&str],
        version: &str,
        words: &[&str],
    ) -> Result<(Vec<Test>, Vec<String>)> {
        let options = Options {
            peermem,
            param: param.iter().map(|value| (*value).to_owned()).collect(),
            // DKMS compiled nvidia.ko with the stand-in's own p2p.c.
            provider: Provider::Ours,
            root: self.root.clone(),
            layer: self.layer.clone(),
            env: vec![guest::SYSTEM_PROGRAMS.to_owned()],
            ..Options::default()
        };
        let boot = vm::Boot {
            arch: Arch::X86_64,
            root: PathBuf::from("/"),
            image: self.root.join(format!("boot/vmlinuz-{}", self.release)),
            release: self.release.clone(),
            modules: self.early()?,
            peermem_version: version.to_owned(),
            is_stock: true,
            host: true,
            ..vm::Boot::default()
        };
        // The VM's root is the host's root. This machine's files are below /host.
        let program = guest::in_machine(&programs::gdr(self.paths, Arch::X86_64));
        let mut command = vec![program, "test".to_owned()];
        command.extend(words.iter().map(|word| (*word).to_owned()));
        let (outcome, tests) = cases::machine(self.paths, &options, &boot, &command, Format::Ktap)?;
        Ok((tests, outcome.failures))
    }

    /// Unpacks the modules for the VM's file systems. busybox loads these modules, and it loads
    /// only uncompressed files.
    fn early(&self) -> Result<Index> {
        let tree = self.root.join("usr/lib/modules").join(&self.release);
        let folder = self.home.join("early").join(&self.release);
        fs::create_dir_all(&folder)?;
        let table = fs::read_to_string(tree.join("modules.dep"))?;
        let wanted = [guest::EARLY, guest::EARLY_ON_HOST].concat();
        let mut index = Index::default();
        for line in table.lines() {
            let files = line.split([':', ' ']).filter(|word| !word.is_empty());
            let files: Vec<&str> = files.collect();
            let name = |file: &str| index::name_of(Path::new(file.trim_end_matches(".xz")));
            let first = files.first().map(|file| name(file)).unwrap_or_default();
            if !wanted.contains(&first.as_str()) {
                continue;
            }
            for file in files {
                let plain = folder.join(format!("{}.ko", name(file)));
                if !plain.exists() {
                    stamp::replace(&plain, &stock::uncompressed(&tree.join(file))?)?;
                }
                index.add(plain);
            }
        }
        Ok(index)
    }
}

/// Returns the rest of the line after `name` and `=`, without quotes.
fn value<'a>(text: &'a str, name: &str) -> Result<&'a str> {
    text.lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix('='))
        .map(|value| value.trim_matches('"'))
        .with_context(|| format!("no {name}"))
}

/// Tests our module on a Debian host with its stock kernel.
pub(crate) fn tests(paths: &Paths, what: &'static Release) -> Result<(Vec<Test>, Vec<String>)> {
    let toolchain = setup::tools(paths)?;
    let kernel = setup::find_kernel(paths, &toolchain, what.kernel, Extent::Frozen)?;
    let (control, driver) = modules::control_source(paths)?;
    let _lock = Lock::take(paths, "debian")?;
    life(paths, what, &kernel.source(), (&control, &driver))
}

/// Installs our module on a host, boots the host, removes the module, and boots again.
fn life(
    paths: &Paths,
    what: &'static Release,
    rdma_source: &Path,
    control: (&[PathBuf], &str),
) -> Result<(Vec<Test>, Vec<String>)> {
    // Some machines forbid mounts, for example in a container.
    if output(as_root("unshare").args(["--mount", "true"])).is_err() {
        let reason = "this machine forbids mounts".to_owned();
        return Ok((vec![Test::skipped("installed", reason)], Vec::new()));
    }
    let mut host = base(paths, what, rdma_source)?;
    let layer = host.home.join("layer");
    remove(&layer)?;
    for folder in ["layer/upper", "layer/work", "root"] {
        fs::create_dir_all(host.home.join(folder))?;
    }
    host.layer = Some(layer.join("upper"));
    let (control, driver) = control;
    let mut stage = Stage::begin(host.title("DKMS makes the driver"));
    host.put_driver(control, driver)?;
    let release = &host.release;
    let mut dkms = host.command(&format!("dkms install nvidia/{driver} -k {release}"));
    stage.lines(&mut dkms, &host.log())?;
    stage.done("");
    let before = host.files()?;
    let of_driver = host.output(&format!("modinfo -k {release} -n nvidia-peermem"))?;
    let sum = host.output(&format!("sha256sum {of_driver}"))?;

    let conf = fs::read_to_string(paths.repo.join("dkms.conf"))?;
    let version = value(&conf, "PACKAGE_VERSION")?;
    let package = format!("{}/{version}", value(&conf, "PACKAGE_NAME")?);
    let source = format!("usr/src/{}", package.replace('/', "-"));
    host.put_package(&source)?;

    let mut tests = Vec::new();
    let mut problems = Vec::new();
    if what.way == Way::Source {
        tests.push(Test::of("check".to_owned(), host.check(&source)));
        let refused = host.refusals(&source);
        tests.push(Test::of(
            "metadata from no other source or compiler".to_owned(),
            refused,
        ));
        let object = host.object(&source);
        tests.push(Test::of("object by Debian's rustc 1.85".to_owned(), object));
    }
    if what.way == Way::Package {
        let installed = host.install(Way::Archive, &package);
        tests.push(Test::of("archive: installed".to_owned(), installed));
        let found = host.found_by_modprobe("archive: modprobe finds ours", "nvidia_peermem.ko");
        tests.push(found.0);
        let removed = host.remove(Way::Archive, &package, &before, (&of_driver, &sum));
        tests.push(Test::of("archive: removed".to_owned(), removed));
    }
    let installed = host.install(what.way, &package);
    tests.push(Test::of("installed".to_owned(), installed));
    let (test, version) = host.found_by_modprobe("modprobe finds ours", "nvidia_peermem.ko");
    tests.push(test);
    // Runs each boot, whatever the result of the previous boot.
    let mut boot = |peermem: Peermem, mode: &str, param: &[&str], version: &str, words: &[&str]| {
        let stage = Stage::begin(host.title(&format!("booted with {}", peermem.name())));
        match host.boot(peermem, param, version, words) {
            Ok((found, wrong)) => {
                stage.done(&format!("{} tests", found.len()));
                problems.extend(wrong);
                found
                    .into_iter()
                    .map(|test| Test {
                        name: format!("{}{mode}: {}", peermem.name(), test.name),
                        ..test
                    })
                    .collect()
            }
            Err(error) => {
                stage.done("failed");
                problems.push(format!("{error:#}"));
                Vec::new()
            }
        }
    };
    tests.extend(boot(Peermem::Ours, "", &[], &version, OURS));
    if what.way != Way::Source {
        let revocable = ["persistent_api_support=0"];
        let found = boot(Peermem::Ours, ", revocable", &revocable, &version, OURS);
        tests.extend(found);
    }
    let removed = host.remove(what.way, &package, &before, (&of_driver, &sum));
    tests.push(Test::of("removed".to_owned(), removed));
    let (test, version) = host.found_by_modprobe("modprobe finds NVIDIA's", "nvidia-peermem.ko");
    tests.push(test);
    tests.extend(boot(Peermem::Nvidia, "", &[], &version, NVIDIA));
    remove(&layer)?;
    Ok((tests, problems))
}

/// Cases of the verbs program with our module. An empty list selects all cases.
const OURS: &[&str] = &[];
/// Cases with NVIDIA's nvidia-peermem, which is used again after our module is removed.
const NVIDIA: &[&str] = &["register.", "move."];

/// Makes a release of the work tree, including uncommitted changes, from a temporary repository in
/// the folder `$1`.
const RELEASE: &str = "\
    export GIT_AUTHOR_NAME=test GIT_AUTHOR_EMAIL=test@localhost\n\
    export GIT_COMMITTER_NAME=test GIT_COMMITTER_EMAIL=test@localhost\n\
    tree=$(git stash create)\n\
    git archive \"${tree:-HEAD}\" | tar -x -C \"$1\"\n\
    cd \"$1\"\n\
    git init -q\n\
    git add -A\n\
    git commit -qm release\n\
    RUSTC=/usr/bin/rustc make --no-print-directory dist-module";

/// Steps of the installation, with checks of the output that the user must see.
impl Host<'_> {
    /// Checks that `scripts/check` reports that the headers lack metadata, and that the metadata
    /// can be made.
    fn check(&self, source: &str) -> Result<Vec<String>> {
        let row = pattern(r"(?m)^Rust metadata +remark +not made yet$");
        self.checked(source, |table| row.is_match(table))?;
        Ok(Vec::new())
    }

    /// Runs scripts/check of the source in `folder`. Fails with the script's table if the module
    /// cannot be built, or if `has_row` returns `false`.
    fn checked(&self, folder: &str, has_row: impl Fn(&str) -> bool) -> Result<()> {
        // The exit status is ignored, because the last line of the table says the same.
        let check = format!("/{folder}/scripts/check KVER={} || true", self.release);
        let table = self.output(&check)?;
        if !has_row(&table) || !table.ends_with("It can be built.") {
            bail!("scripts/check says:\n{table}");
        }
        Ok(())
    }

    /// Checks that `scripts/headers` refuses to make the metadata without the kernel's own source,
    /// or with another compiler.
    fn refusals(&self, source: &str) -> Result<Vec<String>> {
        let headers = format!("/{source}/scripts/headers -m KVER={}", self.release);
        let series = self.what.kernel;
        let hidden = format!("/usr/src/linux-source-{series}.tar.xz");
        let mut said = Vec::new();
        for (command, sentence) in [
            (
                format!(
                    "mv {hidden} /usr/src/away; {headers} 2>&1; echo $?; mv /usr/src/away {hidden}"
                ),
                format!("run 'apt install linux-source-{series}="),
            ),
            (
                format!("{headers} RUSTC=/bin/true 2>&1; echo $?"),
                "and no other compiler can make its metadata".to_owned(),
            ),
        ] {
            // The text ends with the exit status, which is checked here.
            let text = self.output(&format!("set +e; {command}; true"))?;
            let given = format!("/lib/modules/{}/build", self.release);
            if !text.contains(&sentence) || !text.ends_with(&format!("{given}\n1")) {
                bail!("{command} says:\n{text}");
            }
            said.extend(text.lines().take(1).map(str::to_owned));
        }
        Ok(said)
    }

    /// Copies the files that DKMS or dpkg installs to the places where DKMS or dpkg expects them.
    fn put_package(&self, source: &str) -> Result<()> {
        if self.what.way == Way::Source {
            let files = PACKAGE.map(|name| self.paths.repo.join(name));
            return self.put(&files, source);
        }
        apt::install(self.paths, &[apt::ARM64_OBJECT, apt::INSTALL].join(" "))?;
        let mut stage = Stage::begin(self.title("make dist-module"));
        let folder = self.home.join("release");
        remove(&folder)?;
        fs::create_dir_all(&folder)?;
        let mut make = tool("sh");
        make.args(["-euc", RELEASE, "sh"])
            .arg(&folder)
            .current_dir(&self.paths.repo);
        stage.lines(&mut make, &self.log())?;
        stage.done("");
        let made = stamp::files(&folder.join("build/dist"))?;
        self.put(&made, "tmp")
    }

    /// Compiles the object of the portable build with Debian's rustc 1.85. Releases are built with
    /// a newer rustc, so `object.sh` must warn that the object's hash differs from the published
    /// one.
    fn object(&self, source: &str) -> Result<Vec<String>> {
        let stage = Stage::begin(self.title("object.sh"));
        let command = format!("/{source}/portable/object.sh x86_64 /tmp/nvidia_peermem.o 2>&1");
        let lines = self.output(&command)?;
        stage.done("");
        let warned = pattern(r"(?m)^ *rustc 1\.85\.[0-9]+: releases are built with .*$");
        let line = warned.find(&lines).context("no warning about rustc 1.85")?;
        Ok(vec![line.as_str().trim().to_owned()])
    }

    fn install(&self, way: Way, package: &str) -> Result<Vec<String>> {
        let release = &self.release;
        let name = package.replace('/', "-");
        let command = match way {
            Way::Source => format!("dkms add {package} && dkms autoinstall -k {release}"),
            Way::Archive => {
                format!(
                    "tar -xf /tmp/{name}.tar.gz -C /usr/src && dkms install {package} -k {release}"
                )
            }
            Way::Package => "dpkg -i /tmp/*.deb".to_owned(),
        };
        let mut stage = Stage::begin(self.title("DKMS makes our module"));
        let command = format!(
            "{{ {command}; }} || {{ cat /var/lib/dkms/{package}/build/make.log >&2; exit 1; }}"
        );
        stage.lines(&mut self.command(&command), &self.log())?;
        stage.done("");
        let status = self.output(&format!("dkms status {package} -k {release}"))?;
        if !status.ends_with(": installed") {
            bail!("dkms status says: {status}");
        }
        let row = match way {
            Way::Source => {
                format!("rust/*.rmeta, rust/*.so in /var/lib/peermem-rs/headers/{release}")
            }
            _ => format!("/usr/src/{name}/portable/nvidia_peermem-x86_64.o_shipped"),
        };
        self.checked(&format!("usr/src/{name}"), |table| table.contains(&row))?;
        Ok(vec![row])
    }

    /// Checks that modprobe would load a file named `name`, compressed or not. Returns the result
    /// under the name `test`, and the version of the file.
    fn found_by_modprobe(&self, test: &str, name: &str) -> (Test, String) {
        let release = &self.release;
        let info =
            |field: &str| self.output(&format!("modinfo -k {release} {field} nvidia-peermem"));
        let find = || -> Result<(String, String)> {
            let file = info("-n")?;
            if !file.trim_end_matches(".xz").ends_with(&format!("/{name}")) {
                bail!("modprobe finds {file}");
            }
            Ok((file, info("-F version")?))
        };
        let (found, version) = match find() {
            Ok((file, version)) => (Ok(vec![file]), version),
            Err(error) => (Err(error), String::new()),
        };
        (Test::of(test.to_owned(), found), version)
    }

    fn remove(
        &self,
        way: Way,
        package: &str,
        before: &BTreeSet<String>,
        of_driver: (&str, &str),
    ) -> Result<Vec<String>> {
        let name = package.replace('/', "-");
        self.output(&match way {
            Way::Package => "dpkg --purge nvidia-peermem-rs-dkms".to_owned(),
            _ => format!("dkms remove {package} --all && rm -r /usr/src/{name}"),
        })?;
        let after = self.files()?;
        // Debian 12's kmod has no /etc/depmod.d, and `packaging/host` does not remove that folder.
        let may_stay = |file: &&String| *file == "etc/depmod.d";
        let left = after.difference(before).filter(|file| !may_stay(file));
        let left: Vec<&String> = left.collect();
        let gone: Vec<&String> = before.difference(&after).collect();
        if !left.is_empty() || !gone.is_empty() {
            bail!("left behind: {left:?}; taken away: {gone:?}");
        }
        let (file, sum) = of_driver;
        let now = self.output(&format!("sha256sum {file}"))?;
        if now != sum {
            bail!("NVIDIA's file was changed: now {now}, before {sum}");
        }
        Ok(vec![format!("files {}", after.len())])
    }
}
