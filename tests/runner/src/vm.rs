// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Boots a virtual machine, runs one command in it, and tells how both fared.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{mpsc, Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use std::{fs, thread};

use anyhow::{anyhow, bail, Context as _, Result};
use clap::builder::ArgPredicate;
use clap::{Args, Parser as _, ValueEnum};

use crate::arch::Arch;
use crate::cpio::Archive;
use crate::kernel::Signing;
use crate::modules::{Build, Index};
use crate::paths::Paths;
use crate::topology::Topology;
use crate::{detectors, klog, modules, pair, programs, terminal};

/// Exit statuses of the runner's own, as `timeout(1)` and `xargs(1)` have them.
pub(crate) const TIMED_OUT: i32 = 124;
pub(crate) const RUN_FAILED: i32 = 125;

/// How long a command may take that no time-out was given for: many times what any needs, for slow machines.
const LONGEST_RUN: Duration = Duration::from_secs(7200);

/// In bytes. Of all that run to their end none has a log of 200 KiB; a kernel that reports for ever fills this in a minute.
const LONGEST_LOG: u64 = 16 << 20;

/// How many of a kernel's reports are shown.
const SHOWN_REPORTS: usize = 10;

/// For the environment of a test's command: what the caller has put before the system's programs is not to be tested.
pub(crate) const SYSTEM_PROGRAMS: &str = "PATH=/usr/sbin:/usr/bin:/sbin:/bin";

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Peermem {
    /// The module of this repository
    Ours,
    /// NVIDIA's own C module, the control
    Nvidia,
    /// No peer-memory client at all
    None,
}

impl Peermem {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Ours => "ours",
            Self::Nvidia => "nvidia",
            Self::None => "none",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Provider {
    /// All of it the stand-in's, which follows 595
    Ours,
    /// NVIDIA's own nv-p2p.c, of the control's version, over a lower half of the stand-in's
    Nvidia,
    /// The same of 555
    Nvidia555,
}

impl Provider {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Ours => "ours",
            Self::Nvidia => "nvidia",
            Self::Nvidia555 => "nvidia555",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Rdma {
    /// ib_core and rxe with peer memory
    Patched,
    /// As the kernel's source has them
    Stock,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Iommu {
    /// No IOMMU in the machine
    Off,
    /// In the machine, passing addresses through
    Pt,
    /// Translating, unmapped lazily
    On,
    /// Translating, unmapped at once
    Strict,
}

impl Iommu {
    fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Pt => "pt",
            Self::On => "on",
            Self::Strict => "strict",
        }
    }
}

/// How the machine is to be.
#[derive(Debug, Clone, Args)]
pub(crate) struct Options {
    /// Which peer-memory client answers for GPU memory
    #[arg(long, value_enum, default_value = "ours")]
    pub(crate) peermem: Peermem,
    /// Whose code pins GPU memory in nvidia.ko
    #[arg(long, value_enum, default_value = "nvidia")]
    pub(crate) provider: Provider,
    /// Which RDMA modules are loaded
    #[arg(long, value_enum, default_value = "patched")]
    pub(crate) rdma: Rdma,
    /// Parameter of the peer-memory module
    #[arg(long, value_name = "NAME=VALUE")]
    pub(crate) param: Vec<String>,
    /// Parameter of rdma_rxe
    #[arg(long, value_name = "NAME=VALUE")]
    pub(crate) rxe_param: Vec<String>,
    /// Parameter of the stand-in GPU's driver
    #[arg(long, value_name = "NAME=VALUE")]
    pub(crate) gpu_param: Vec<String>,
    /// Parameter of ib_core's peer memory
    #[arg(long, value_name = "NAME=VALUE")]
    pub(crate) ib_param: Vec<String>,
    /// ib_core shows its clients in memory_peers, as OFED's does on kernels before 6.4
    #[arg(long)]
    pub(crate) memory_peers: bool,
    /// Memory of the machine
    #[arg(long, value_name = "MIB", default_value_t = 2048)]
    pub(crate) mem: u32,
    /// Boots two such machines, hosts 1 and 2, each with one NIC on the wire between them and, unless --smp says otherwise, one
    /// processor. Once both are up, both run the command, without input. In its environment TESTVM_HOST is 1 or 2, and
    /// TESTVM_PEER the address of the other host. Each line of output begins with "host1: " or "host2: ". A host whose command
    /// has ended is switched off. The exit status is 0 if both commands end with 0
    #[arg(long)]
    pub(crate) pair: bool,
    /// With --pair: host 2's command switches its machine off, and host 1 goes on
    #[arg(skip)]
    pub(crate) host_2_is_lost: bool,
    /// Which of a pair this machine is
    #[arg(skip)]
    pub(crate) host_number: Option<u32>,
    /// Processors of the machine; with one of Debian's stock kernels one at most
    #[arg(
        long,
        value_name = "N",
        default_value_t = 2,
        default_value_if("pair", ArgPredicate::Equals("true".into()), "1")
    )]
    pub(crate) smp: u32,
    /// Model of the processors
    #[arg(long, value_name = "MODEL", default_value = "max")]
    pub(crate) cpu: String,
    /// How many GPUs, 0 to 8
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(0..=8))]
    pub(crate) gpus: u32,
    /// Size of each GPU's BAR, a power of two
    #[arg(long, value_name = "MIB", default_value_t = 256)]
    pub(crate) bar: u64,
    #[arg(long, value_enum, default_value = "off")]
    pub(crate) iommu: Iommu,
    /// Which bridges lie between the GPUs and the NICs; all but flat want --kernel 7.2, which has NUMA and extended config
    /// space
    #[arg(long, value_enum, default_value = "flat")]
    pub(crate) topology: Topology,
    /// Adds an NVMe controller with a disk of this size
    #[arg(long, value_name = "MIB")]
    pub(crate) nvme: Option<u64>,
    /// The machine's processors: chooses the kernel where --kernel does not
    #[arg(long, value_enum, default_value = "x86-64")]
    pub(crate) arch: Arch,
    /// A kernel of the test VM by name, or a kernel image or build tree by path; the machine has the processors that it is for
    #[arg(
        long,
        value_name = "FLAVOUR|PATH",
        default_value = crate::kernel::DEFAULT,
        default_value_if("arch", "arm64", crate::kernel::ARM64)
    )]
    pub(crate) kernel: String,
    /// How our module is built [default: in-tree, where the kernel has what Rust needs]
    #[arg(long, value_enum)]
    pub(crate) build: Option<Build>,
    /// Builds our module, in the portable way, without symbols that are exported to GPL modules only; with --gpu-param
    /// proprietary=1 nothing else is loaded
    #[arg(long)]
    pub(crate) no_gpl_only: bool,
    /// Directory that becomes the machine's root, read-only; the host's files lie under /host, as always. What a machine of
    /// other processors finds there by default is Debian's
    #[arg(long, value_name = "DIR", default_value = "/")]
    pub(crate) root: PathBuf,
    /// More arguments for the kernel
    #[arg(long, value_name = "STR", allow_hyphen_values = true)]
    pub(crate) append: Vec<String>,
    /// One more argument for QEMU
    #[arg(long, value_name = "STR", allow_hyphen_values = true)]
    pub(crate) qemu_arg: Vec<String>,
    /// Ends the run as failed; 0 waits for ever [default: 7200 with a command, 0 without]
    #[arg(long, value_name = "SECONDS")]
    pub(crate) timeout: Option<u64>,
    /// A report in the kernel log that must come so often and does not fail the run then
    #[arg(long, value_name = "REGEX=COUNT")]
    pub(crate) expect: Vec<klog::Expectation>,
    /// Where the kernel log goes [default: in the cache]
    #[arg(long, value_name = "FILE")]
    pub(crate) log: Option<PathBuf>,
    /// Variable in the command's environment
    #[arg(long, value_name = "NAME=VALUE")]
    pub(crate) env: Vec<String>,
    /// This file in place of the peer-memory module
    #[arg(long, value_name = "FILE")]
    pub(crate) peermem_ko: Option<PathBuf>,
    /// This file in place of the stand-in GPU's driver
    #[arg(long, value_name = "FILE")]
    pub(crate) gpu_ko: Option<PathBuf>,
    /// One more module, loaded last, with its parameters
    #[arg(long, value_name = "FILE[ PARAMETERS]")]
    pub(crate) load: Vec<String>,
    /// Loads what breaks calls of the kernel on request (tests/interpose)
    #[arg(long)]
    pub(crate) interpose: bool,
    /// Has the KUnit tests too, a module to be loaded (tests/vm/kunit)
    #[arg(long)]
    pub(crate) kunit: bool,
    /// Loads what measures the peer-memory module (tests/bench)
    #[arg(long)]
    pub(crate) bench: bool,
    /// The machine's clock counts instructions, one a nanosecond; for one processor
    #[arg(long)]
    pub(crate) icount: bool,
    /// Our module with a rule taken out: a patch of tests/mutants by its name
    #[arg(long, value_name = "NAME", conflicts_with = "peermem_ko")]
    pub(crate) mutant: Option<String>,
    /// A layer over the root, of an overlay file system
    #[arg(skip)]
    pub(crate) layer: Option<PathBuf>,
    /// Patches to our module
    #[arg(skip)]
    pub(crate) patches: Vec<PathBuf>,
    /// Gives the command a terminal
    #[arg(long, short = 't')]
    pub(crate) tty: bool,
    /// Lays NVIDIA's module beside ours and names it in TESTVM_CONTROL_KO
    #[arg(long)]
    pub(crate) with_control: bool,
    /// With --peermem none: lays our module where modprobe finds it, and neighbours that it cannot work with (tests/drivers)
    /// where TESTVM_DRIVERS says
    #[arg(long)]
    pub(crate) beside: bool,
    /// The kernel takes signed modules alone (module.sig_enforce=1); those of the run are signed with the test VM's key
    #[arg(long)]
    pub(crate) signed: bool,
    /// On the debug kernel: allocations are made to fail, so that what is left of them is no leak and nobody looks for any
    #[arg(long)]
    pub(crate) faults: bool,
    /// Takes what was built before, whatever has changed since: all runs of a suite test the same
    #[arg(skip)]
    pub(crate) frozen: bool,
    /// Prints QEMU's command line
    #[arg(long)]
    pub(crate) verbose: bool,
}

/// A command line of options alone, after the program's name.
#[derive(clap::Parser)]
struct Bare {
    #[command(flatten)]
    options: Options,
}

impl Options {
    /// The machine's processors: those that its kernel is for.
    pub(crate) fn arch(&self) -> Arch {
        crate::kernel::arch_of(&self.kernel)
    }

    pub(crate) fn parse<'a>(words: impl IntoIterator<Item = &'a str>) -> Result<Self, clap::Error> {
        Ok(Bare::try_parse_from(words)?.options)
    }
}

impl Default for Options {
    fn default() -> Self {
        Bare::parse_from(["runner"]).options
    }
}

/// Takes a line of output and whether it is one of standard error.
pub(crate) type LineSink = Box<dyn FnMut(&str, bool) + Send>;

/// Where a command's input comes from and its output goes to.
pub(crate) enum Channels {
    /// To the caller's own.
    Caller,
    /// No input; each line of output to this.
    Lines(LineSink),
}

/// How a run ended.
pub(crate) struct Outcome {
    /// The command's own status, if it came to have one.
    pub(crate) status: Option<i32>,
    /// Why the run failed whatever the command says: time-out, a dead machine, a report in the log.
    pub(crate) failures: Vec<String>,
    pub(crate) timed_out: bool,
    pub(crate) log: PathBuf,
    pub(crate) elapsed: Duration,
}

impl Outcome {
    /// The status that a program which ran this machine exits with.
    pub(crate) fn exit_code(&self) -> i32 {
        match self.status {
            _ if self.timed_out => TIMED_OUT,
            Some(status) if self.failures.is_empty() => status,
            _ => RUN_FAILED,
        }
    }
}

/// What a machine boots and what it finds its modules in.
pub(crate) struct Boot {
    pub(crate) arch: Arch,
    /// Its root, where its options name none: the host's own, if the host's programs run on it.
    pub(crate) root: PathBuf,
    pub(crate) image: PathBuf,
    pub(crate) release: String,
    /// Modules by name; what was put in first wins.
    pub(crate) modules: Index,
    /// Version of the peer-memory module, for the command's environment.
    pub(crate) peermem_version: String,
    /// NVIDIA's module, to be had in the machine though not loaded.
    pub(crate) control: Option<PathBuf>,
    /// Neighbours of other kinds, each in a folder of the name that it has here.
    pub(crate) drivers: Vec<(&'static str, PathBuf)>,
    /// All modules are to be signed with this; and our module as it is without.
    pub(crate) signing: Option<(Signing, PathBuf)>,
    /// The kernel's detectors, each of which must show that it lives.
    pub(crate) detectors: bool,
    /// One of Debian's own images.
    pub(crate) is_stock: bool,
    /// The root is a whole host, which loads its modules itself; here are only those that its file systems need.
    pub(crate) host: bool,
}

/// A file of parameters for one module: `name` to `a=1 b=2`.
type Parameters = BTreeMap<String, String>;

/// Which modules are loaded, in which order, and which parameters each gets.
struct Plan {
    arch: Arch,
    early: Vec<PathBuf>,
    /// Files; on a host names for modprobe.
    modules: Vec<(PathBuf, String)>,
    rdma: bool,
    host: bool,
}

/// Modules that are loaded before the root is mounted: those of the root, and those of the console.
pub(crate) const EARLY: &[&str] = &[
    "virtio_pci",
    "9pnet_virtio",
    "9p",
    "overlay",
    "virtio_console",
];

/// Drivers of the machine's devices.
pub(crate) const DEVICES: &[&str] = &["virtio_net", "udp_tunnel", "ip6_udp_tunnel", "nvme"];

/// Further early modules of a host.
pub(crate) const EARLY_ON_HOST: &[&str] = &["virtio_net"];

/// The plan of a host.
fn plan_host(options: &Options, boot: &Boot) -> Result<Plan> {
    let wanted = [EARLY, EARLY_ON_HOST].concat();
    let mut modules = vec!["ib_uverbs", "rdma_ucm", "rdma_rxe", "nvidia"];
    if options.peermem != Peermem::None {
        modules.push("nvidia-peermem");
    }
    Ok(Plan {
        early: boot.modules.closure_of_present(&wanted)?,
        modules: modules
            .into_iter()
            .map(|name| {
                let values = match name {
                    "nvidia-peermem" => options.param.join(" "),
                    _ => String::new(),
                };
                (PathBuf::from(name), values)
            })
            .collect(),
        arch: boot.arch,
        rdma: true,
        host: true,
    })
}

/// The module that has ib_core's peer memory and its parameters: older kernels have umem.c in ib_uverbs.
fn peer_memory(boot: &Boot) -> Result<&'static str> {
    let file = boot.modules.get("ib_uverbs");
    let has = file.map(|file| modules::has_parameter(file, "peer_mem_sysfs"));
    Ok(match has.transpose()? {
        Some(true) => "ib_uverbs",
        _ => "ib_core",
    })
}

fn plan(options: &Options, boot: &Boot) -> Result<Plan> {
    let mut parameters = Parameters::new();
    let mut add = |module: &str, values: &[String]| {
        if !values.is_empty() {
            parameters.insert(module.to_owned(), values.join(" "));
        }
    };
    add("rdma_rxe", &options.rxe_param);
    add("nvidia", &options.gpu_param);
    let mut ib_param = options.ib_param.clone();
    if options.rdma == Rdma::Patched {
        let shows = if options.memory_peers { "Y" } else { "N" };
        ib_param.push(format!("peer_mem_sysfs={shows}"));
    }
    add(peer_memory(boot)?, &ib_param);
    add("nvidia_peermem", &options.param);

    let early = boot.modules.closure_of_present(EARLY)?;
    let rest = boot.modules.closure_of_present(DEVICES)?;
    let rdma = boot.modules.contains("rdma_rxe");
    let mut wanted = Vec::new();
    if rdma {
        wanted.extend(["ib_uverbs", "rdma_ucm", "rdma_rxe"]);
    }
    if options.gpus > 0 {
        if boot.modules.contains("nvidia") {
            wanted.push("nvidia");
        } else if options.peermem != Peermem::None {
            bail!("the stand-in GPU's driver (nvidia.ko) is not built");
        }
    }
    if options.bench {
        // Sees the clients that register after it.
        wanted.push("test_bench");
    }
    if options.peermem != Peermem::None {
        wanted.push("nvidia_peermem");
    }
    if options.interpose {
        wanted.push("test_interpose");
    }
    let mut order = rest;
    for path in boot.modules.closure(&wanted)? {
        if !order.contains(&path) {
            order.push(path);
        }
    }
    order.retain(|path| !early.contains(path));
    let mut modules: Vec<(PathBuf, String)> = order
        .into_iter()
        .map(|path| {
            let values = parameters.remove(&modules::name_of(&path));
            (path, values.unwrap_or_default())
        })
        .collect();
    if let Some((module, values)) = parameters.into_iter().next() {
        bail!("{module} gets the parameters '{values}' and is not loaded");
    }
    for extra in &options.load {
        let (file, values) = extra.split_once(' ').unwrap_or((extra, ""));
        modules.push((fs::canonicalize(file)?, values.to_owned()));
    }
    Ok(Plan {
        early,
        modules,
        arch: boot.arch,
        rdma,
        host: false,
    })
}

/// Where the machine sees the host's files, whatever its root is and whatever it mounts: `tests/vm/init` lays them there.
const HOST: &str = "/host";

/// The machine's name of one of the host's files. The host's own name may be hidden there, below /tmp, say.
pub(crate) fn in_machine(path: &Path) -> String {
    format!("{HOST}{}", path.display())
}

/// Quotes for the shell.
pub(crate) fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

fn command_script(
    paths: &Paths,
    options: &Options,
    boot: &Boot,
    command: &[String],
    tty: bool,
) -> Result<String> {
    let mut script = String::new();
    let mut export = |name: &str, value: &str| {
        script.push_str(&format!("export {name}={}\n", quoted(value)));
    };
    for name in [
        "PATH",
        "HOME",
        "LANG",
        "LC_ALL",
        "RUST_BACKTRACE",
        "PYTHONPATH",
    ] {
        if let Ok(value) = std::env::var(name) {
            export(name, &value);
        }
    }
    if tty {
        export("TERM", &std::env::var("TERM").unwrap_or("linux".into()));
    }
    export("PEERMEM", options.peermem.name());
    export("PEERMEM_VERSION", &boot.peermem_version);
    export("TESTVM_PROVIDER", options.provider.name());
    export("TESTVM_KERNEL", &boot.release);
    if boot.detectors {
        export("TESTVM_SLOWER", &detectors::SLOWER.to_string());
    }
    if boot.control.is_some() {
        let directory = format!("/lib/modules/{}/control", boot.release);
        export(
            "TESTVM_CONTROL_KO",
            &format!("{directory}/nvidia-peermem.ko"),
        );
    }
    if !boot.drivers.is_empty() {
        export(
            "TESTVM_DRIVERS",
            &format!("/lib/modules/{}/drivers", boot.release),
        );
    }
    if let Some((signing, unsigned)) = &boot.signing {
        for (name, path) in [
            ("TESTVM_SIGN_FILE", &signing.sign_file),
            ("TESTVM_SIGN_KEY", &signing.key),
            ("TESTVM_SIGN_CERTIFICATE", &signing.certificate),
            ("TESTVM_UNSIGNED_KO", unsigned),
        ] {
            export(name, &in_machine(path));
        }
    }
    export("TESTVM_GPUS", &options.gpus.to_string());
    export("TESTVM_BAR_MIB", &options.bar.to_string());
    export("TESTVM_IOMMU", options.iommu.name());
    export("TESTVM_TOPOLOGY", options.topology.name());
    if options.icount {
        export("TESTVM_ICOUNT", "1");
    }
    if let Some(number) = options.host_number {
        export("TESTVM_HOST", &number.to_string());
        export("TESTVM_PEER", &format!("10.77.0.{}", 3 - number));
    }
    for variable in &options.env {
        let (name, value) = variable
            .split_once('=')
            .ok_or_else(|| anyhow!("'{variable}' is not NAME=VALUE"))?;
        export(name, value);
    }
    // Found by name, and after all else.
    let programs = in_machine(&programs::directory(paths, boot.arch));
    script.push_str(&format!("PATH=$PATH:{}\n", quoted(&programs)));
    if tty {
        if let Some((rows, columns)) = terminal::size() {
            script.push_str(&format!(
                "/run/runner/bin/busybox stty rows {rows} cols {columns}\n"
            ));
        }
    }
    let here = std::env::current_dir().context("the working directory")?;
    let here = here
        .to_str()
        .context("the working directory's name is not UTF-8")?;
    script.push_str(&if options.root == boot.root {
        format!("cd {} || exit 126\n", quoted(&format!("{HOST}{here}")))
    } else {
        format!("cd {} 2>/dev/null || cd /\n", quoted(here))
    });
    let words: Vec<String> = if command.is_empty() && tty {
        script.push_str("PS1='vm:\\w# '; export PS1\n");
        vec!["command -v bash >/dev/null && exec bash --norc; exec sh".into()]
    } else if command.is_empty() {
        vec!["exec sh -s".into()]
    } else {
        let mut words = vec!["exec".to_owned()];
        words.extend(command.iter().map(|word| quoted(word)));
        words
    };
    script.push_str(&words.join(" "));
    script.push('\n');
    Ok(script)
}

/// One directory for a run's own files, gone when the run is.
struct Scratch(PathBuf);

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Puts the modules where the machine will find them, with the tables that modprobe reads.
fn lay_modules(root: &Path, plan: &Plan, boot: &Boot) -> Result<PathBuf> {
    let (release, index) = (&boot.release, &boot.modules);
    let tree = root.join("lib/modules").join(release);
    let files = tree.join("runner");
    fs::create_dir_all(&files)?;
    for path in index
        .files()
        .chain(plan.modules.iter().map(|(path, _)| path))
    {
        let target = files.join(path.file_name().context("module without a name")?);
        if target.exists() {
            continue;
        }
        if boot.signing.is_some() || fs::hard_link(path, &target).is_err() {
            fs::copy(path, &target).with_context(|| format!("cannot copy {}", path.display()))?;
        }
        if let Some((signing, _)) = &boot.signing {
            signing.sign(&target)?;
        }
    }
    for empty in ["modules.order", "modules.builtin"] {
        fs::write(tree.join(empty), "")?;
    }
    let status = Command::new("depmod")
        .env("PATH", system_path())
        .arg("-b")
        .arg(root)
        .arg(release)
        .stderr(Stdio::null())
        .status()
        .context("depmod (package kmod)")?;
    if !status.success() {
        bail!("depmod failed");
    }
    if let Some(control) = &boot.control {
        // After depmod, since modprobe must not find it: it has the name of ours.
        fs::create_dir_all(tree.join("control"))?;
        fs::copy(control, tree.join("control/nvidia-peermem.ko"))?;
    }
    for (name, file) in &boot.drivers {
        let folder = tree.join("drivers").join(name);
        fs::create_dir_all(&folder)?;
        fs::copy(
            file,
            folder.join(file.file_name().context("module without a name")?),
        )?;
    }
    Ok(tree)
}

/// The caller's PATH with the places of system programs, which an ordinary user's lacks.
pub(crate) fn system_path() -> String {
    let path = std::env::var("PATH").unwrap_or_default();
    format!("{path}:/usr/local/sbin:/usr/sbin:/sbin:/usr/bin:/bin")
}

fn initramfs(
    paths: &Paths,
    options: &Options,
    detectors: &str,
    plan: &Plan,
    module_root: &Path,
    script: &str,
    tty: bool,
) -> Result<Vec<u8>> {
    let mut archive = Archive::default();
    for directory in [
        "bin",
        "dev",
        "proc",
        "sys",
        "job",
        "job/early.d",
        "host",
        "lower",
        "above",
        "layer",
        "new",
    ] {
        archive.directory(directory);
    }
    let is_foreign = plan.arch.foreign().is_some();
    let busybox = if is_foreign {
        options.root.join("bin/busybox")
    } else {
        find_program("busybox").context("busybox (package busybox-static)")?
    };
    archive.copy("bin/busybox", 0o755, &busybox)?;
    archive.symlink("bin/sh", "busybox");
    archive.copy("init", 0o755, &paths.repo.join("tests/vm/init"))?;
    for part in ["guest", "detectors"] {
        let file = paths.repo.join("tests/vm").join(part);
        archive.copy(&format!("job/{part}"), 0o644, &file)?;
    }

    let mut early = String::new();
    for path in &plan.early {
        let name = format!("early.d/{}.ko", modules::name_of(path));
        archive.copy(&format!("job/{name}"), 0o644, path)?;
        early.push_str(&name);
        early.push('\n');
    }
    archive.file("job/early", 0o644, early.as_bytes());

    let mut load = String::new();
    let mut unload: Vec<String> = Vec::new();
    for (path, values) in &plan.modules {
        let file = path.file_name().context("module without a name")?;
        load.push_str(&format!("{} {values}\n", file.to_string_lossy()));
        unload.insert(0, modules::name_of(path));
    }
    archive.file("job/modules", 0o644, load.as_bytes());
    // The NICs' driver stays, with what it needs.
    unload.retain(|name| !name.contains("virtio") && !name.ends_with("failover"));

    let vars = [
        (
            "ROOT_SHARE",
            if options.root == Path::new("/") {
                "host"
            } else {
                "root"
            },
        ),
        // busybox's ip and a strange root's lack what the host's has, where the host's runs.
        ("TOOLS", if is_foreign { "/" } else { HOST }),
        ("MODULE_ROOT", &in_machine(module_root)),
        ("RXE", if plan.rdma { "1" } else { "" }),
        ("CONSOLE", if tty { "1" } else { "" }),
        ("LAYER", if options.layer.is_some() { "1" } else { "" }),
        ("HOST", if plan.host { "1" } else { "" }),
        (
            "PAIR",
            &options
                .host_number
                .map_or(String::new(), |number| number.to_string()),
        ),
        ("UNLOAD", &unload.join(" ")),
        ("DETECTORS", detectors),
    ];
    let mut text = String::new();
    for (name, value) in vars {
        text.push_str(&format!("{name}={}\n", quoted(value)));
    }
    archive.file("job/vars", 0o644, text.as_bytes());
    archive.file("job/run", 0o644, script.as_bytes());
    Ok(archive.finish())
}

fn find_program(name: &str) -> Option<PathBuf> {
    std::env::split_paths(&system_path())
        .map(|directory| directory.join(name))
        .find(|path| path.is_file())
}

/// The host's ends of the machine's ports.
struct Ports {
    control: UnixStream,
    streams: Vec<(&'static str, UnixStream)>,
    console: Option<UnixStream>,
    /// QEMU's ends, closed here once it runs.
    remote: Vec<UnixStream>,
}

/// A path in one of QEMU's options, which commas end.
fn value(path: &Path) -> String {
    path.display().to_string().replace(',', ",,")
}

fn qemu_arguments(
    options: &Options,
    boot: &Boot,
    kernel_args: &str,
    log: &Path,
    scratch: &Path,
    wire: Option<&UnixDatagram>,
) -> Vec<String> {
    let mut arguments: Vec<String> = Vec::new();
    let mut add = |words: &[&str]| arguments.extend(words.iter().map(|word| (*word).to_owned()));
    let gpu_bytes = u64::from(options.gpus) * options.bar;
    let accel = if options.icount {
        add(&["-icount", "shift=0"]);
        "tcg,thread=single"
    } else {
        "tcg,thread=multi"
    };
    // Room for the BARs above memory, and addresses for that room. A bridge's window is aligned as the largest BAR in it.
    let room = match options.topology {
        Topology::Flat => 2 * gpu_bytes,
        _ => 4 * gpu_bytes,
    };
    let hole = room.next_power_of_two().max(32 * 1024);
    let machine = match (boot.arch, options.iommu) {
        (Arch::X86_64, Iommu::Off) => "q35",
        (Arch::X86_64, _) => "q35,kernel-irqchip=split",
        (Arch::Arm64, Iommu::Off) => "virt,gic-version=3",
        (Arch::Arm64, _) => "virt,gic-version=3,iommu=smmuv3",
    };
    let mut cpu = options.cpu.clone();
    if boot.arch == Arch::X86_64 && hole > 256 * 1024 {
        cpu.push_str(",phys-bits=46");
    }
    if boot.detectors {
        cpu.push_str(detectors::PROCESSOR);
    }
    add(&[
        "-nodefaults",
        "-no-user-config",
        "-no-reboot",
        "-display",
        "none",
    ]);
    add(&["-machine", machine, "-accel", accel, "-cpu", &cpu]);
    // virt has 512 GiB, always.
    if boot.arch == Arch::X86_64 {
        add(&["-global", &format!("q35-pcihost.pci-hole64-size={hole}M")]);
    }
    let mut processors = options.topology.processors(options.smp);
    // Where no second processor can be added, QEMU's translation makes locked instructions ordinary ones, although its devices
    // have threads of their own. The kernel's barriers are such: a NIC misses a notification then, and stands still for good.
    if options.smp == 1 && !options.icount {
        processors.push_str(",maxcpus=2");
    }
    add(&["-smp", &processors, "-m", &options.mem.to_string()]);
    add(&["-chardev", &format!("file,id=log,path={}", value(log))]);
    add(&["-serial", "chardev:log", "-monitor", "none"]);
    match options.iommu {
        _ if boot.arch != Arch::X86_64 => {}
        Iommu::Off => {}
        // In caching mode the kernel unmaps at once, whatever it is told.
        Iommu::On => add(&["-device", "intel-iommu,aw-bits=48"]),
        Iommu::Pt | Iommu::Strict => {
            add(&["-device", "intel-iommu,aw-bits=48,caching-mode=on"]);
        }
    }
    add(&["-append", kernel_args]);
    // QEMU's own choice of a bus may be one that takes bridges alone.
    let share = |id: &str, path: &Path| {
        format!(
            "local,id={id},path={},security_model=none,readonly=on,multidevs=remap",
            value(path)
        )
    };
    add(&["-fsdev", &share("host", Path::new("/"))]);
    add(&[
        "-device",
        "virtio-9p-pci,fsdev=host,mount_tag=host,bus=pcie.0",
    ]);
    if options.root != Path::new("/") {
        add(&["-fsdev", &share("root", &options.root)]);
        add(&[
            "-device",
            "virtio-9p-pci,fsdev=root,mount_tag=root,bus=pcie.0",
        ]);
    }
    if let Some(layer) = &options.layer {
        add(&["-fsdev", &share("layer", layer)]);
        add(&[
            "-device",
            "virtio-9p-pci,fsdev=layer,mount_tag=layer,bus=pcie.0",
        ]);
    }
    let layout = options
        .topology
        .layout(options.gpus, options.smp, options.mem);
    for argument in &layout.arguments {
        add(&[argument]);
    }
    // A wire between the two NICs. UNIX datagrams stay in order and push back when the receiver is full; QEMU's hub
    // lets later packets overtake those it holds, and RDMA READ does not get over that.
    let end = |nic: u32| value(&scratch.join(format!("wire{nic}")));
    let inside = |nic, peer| {
        format!(
            "local.type=unix,local.path={},remote.type=unix,remote.path={}",
            end(nic),
            end(peer)
        )
    };
    let nics = match (options.host_number, wire) {
        (Some(number), Some(wire)) => {
            vec![(
                number,
                format!("local.type=fd,local.str={}", wire.as_raw_fd()),
            )]
        }
        _ => vec![(1, inside(1, 2)), (2, inside(2, 1))],
    };
    for (bus, (nic, ends)) in layout.nics.iter().zip(nics) {
        add(&["-netdev", &format!("dgram,id=net{nic},{ends}")]);
        // With mergeable buffers, and an IOMMU that translates, the NICs were seen to write to address 0.
        add(&[
            "-device",
            &format!(
                "virtio-net-pci,netdev=net{nic},mac=52:54:00:77:00:0{nic},host_mtu=4500,\
                 mrg_rxbuf=off,romfile=,bus={bus}"
            ),
        ]);
    }
    for (gpu, bus) in layout.gpus.iter().enumerate() {
        // Sparse and never reserved: a BAR may be larger than the host's memory.
        add(&[
            "-object",
            &format!(
                "memory-backend-memfd,id=bar{gpu},size={}M,share=on,reserve=off",
                options.bar
            ),
        ]);
        add(&[
            "-device",
            &format!("ivshmem-plain,memdev=bar{gpu},bus={bus}"),
        ]);
    }
    arguments
}

/// Boots, runs, waits: one machine, or a pair. An error is one of the host's; whatever the machine does is an outcome.
pub(crate) fn run(
    paths: &Paths,
    options: &Options,
    boot: &Boot,
    command: &[String],
    channels: Channels,
) -> Result<Outcome> {
    if options.pair {
        pair::run(paths, options, boot, command, channels)
    } else {
        run_one(paths, options, boot, command, channels, None)
    }
}

/// Two machines that are started at once must not inherit each other's descriptors: the other end of each would stay open
/// after the machine that it belongs to.
static STARTING: Mutex<()> = Mutex::new(());

/// The same of one machine. One of a pair has this end of the wire.
pub(crate) fn run_one(
    paths: &Paths,
    options: &Options,
    boot: &Boot,
    command: &[String],
    channels: Channels,
    wire: Option<UnixDatagram>,
) -> Result<Outcome> {
    let started = Instant::now();
    let interactive = matches!(channels, Channels::Caller) && terminal::is_terminal();
    let tty = options.tty || (command.is_empty() && interactive);
    let timeout = match options.timeout {
        Some(0) => None,
        Some(seconds) => Some(Duration::from_secs(seconds)),
        None if command.is_empty() => None,
        None if boot.detectors => Some(LONGEST_RUN * detectors::SLOWER),
        None => Some(LONGEST_RUN),
    };

    if !options.bar.is_power_of_two() {
        bail!(
            "a BAR of {} MiB: its size must be a power of two",
            options.bar
        );
    }
    if options.icount && options.smp != 1 {
        bail!("instructions are counted on one processor: give --smp 1");
    }
    let scratch = Scratch(paths.run_directory()?);
    let log = match &options.log {
        Some(file) => std::path::absolute(file)?,
        None => paths.new_log()?,
    };
    fs::write(&log, "")?;

    let mut options = options.clone();
    options.root = if options.root == Path::new("/") {
        boot.root.clone()
    } else {
        fs::canonicalize(&options.root)
            .with_context(|| format!("no root directory {}", options.root.display()))?
    };
    if boot.is_stock {
        // The kernel patches its code while it runs (jump labels; those that are compiled here have none). With several
        // processors the emulator was seen to run an int3 that was no longer there.
        options.smp = 1;
        // Such a kernel lets nobody map what a driver holds, and the cases look into the BAR.
        options.append.push("iomem=relaxed".to_owned());
    }
    let (plan, module_root) = if boot.host {
        (plan_host(&options, boot)?, PathBuf::new())
    } else {
        let plan = plan(&options, boot)?;
        let module_root = lay_modules(&scratch.0, &plan, boot)?;
        (plan, module_root)
    };
    let wanted = if boot.detectors {
        detectors::wanted(options.faults)
    } else {
        &[]
    };
    let names: Vec<&str> = wanted.iter().map(|detector| detector.name()).collect();
    let script = command_script(paths, &options, boot, command, tty)?;
    let ramfs = scratch.0.join("initramfs");
    fs::write(
        &ramfs,
        initramfs(
            paths,
            &options,
            &names.join(" "),
            &plan,
            &module_root,
            &script,
            tty,
        )?,
    )?;

    let mut kernel_args = vec![
        format!(
            "console={} loglevel=7 panic=-1 printk.devkmsg=on",
            boot.arch.console()
        ),
        boot.arch.kernel_arguments(options.icount),
        // So much of the log can wait for the serial line; and a machine that stood still has no stall.
        "log_buf_len=1M rcupdate.rcu_cpu_stall_timeout=120".to_owned(),
    ];
    if options.iommu != Iommu::Off && boot.arch == Arch::X86_64 {
        kernel_args.push("intel_iommu=on".to_owned());
    }
    kernel_args.push(
        match options.iommu {
            Iommu::Off => "",
            Iommu::Pt if boot.arch == Arch::X86_64 => "iommu=pt",
            Iommu::Pt => "iommu.passthrough=1",
            Iommu::On => "iommu.passthrough=0 iommu.strict=0",
            Iommu::Strict => "iommu.passthrough=0 iommu.strict=1",
        }
        .to_owned(),
    );
    if boot.signing.is_some() {
        if !plan.early.is_empty() {
            bail!("this kernel needs modules to reach its files, and they are not signed");
        }
        kernel_args.push("module.sig_enforce=1".to_owned());
    }
    if boot.detectors {
        kernel_args.push(detectors::kernel_arguments(options.faults));
        options.mem += detectors::MEMORY_MIB;
        if options.faults {
            options.expect.extend(detectors::switched_off()?);
        }
    }
    kernel_args.extend(options.append.iter().cloned());
    let mut arguments = qemu_arguments(
        &options,
        boot,
        &kernel_args.join(" "),
        &log,
        &scratch.0,
        wire.as_ref(),
    );
    let mut add = |words: &[&str]| arguments.extend(words.iter().map(|word| (*word).to_owned()));
    add(&["-kernel", &boot.image.display().to_string()]);
    add(&["-initrd", &ramfs.display().to_string()]);
    if let Some(size) = options.nvme {
        let disk = scratch.0.join("nvme");
        fs::File::create(&disk)?.set_len(size << 20)?;
        add(&[
            "-drive",
            &format!("file={},if=none,id=nvme,format=raw", value(&disk)),
            "-device",
            "nvme,drive=nvme,serial=runner,bus=pcie.0",
        ]);
    }
    add(&["-device", "virtio-serial-pci,max_ports=8,bus=pcie.0"]);
    let starting = STARTING.lock().unwrap_or_else(PoisonError::into_inner);
    let mut ports = open_ports(&mut arguments, tty)?;
    if let Some(wire) = &wire {
        rustix::io::fcntl_setfd(wire.as_fd(), rustix::io::FdFlags::empty())?;
    }
    arguments.extend(options.qemu_arg.iter().cloned());

    let (program, package) = boot.arch.qemu();
    if options.verbose {
        eprintln!("runner: {program} {}", arguments.join(" "));
    }
    let errors = scratch.0.join("qemu.err");
    let qemu = Command::new("setpriv")
        .args(["--pdeathsig", "KILL", program])
        .args(&arguments)
        .env("PATH", system_path())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(fs::File::create(&errors)?)
        .spawn()
        .with_context(|| format!("cannot start {program} (package {package})"))?;
    let mut qemu = Machine(qemu);
    ports.remote.clear();
    drop(wire);
    drop(starting);

    let raw = if tty { terminal::Raw::enter()? } else { None };
    let (status, timed_out, mut failures) =
        attend(&mut qemu, ports, channels, &log, timeout, started)?;
    drop(raw);

    let qemu_says = fs::read_to_string(&errors).unwrap_or_default();
    let text = klog::read(&log)?;
    let is_lost = options.host_2_is_lost && options.host_number == Some(2);
    if is_lost && status.is_some() {
        failures.push("the command ended, where it was to switch its machine off".to_owned());
    } else if status.is_none() && failures.is_empty() && !is_lost {
        let tail: Vec<&str> = text.lines().rev().take(15).collect();
        let tail: String = tail
            .iter()
            .rev()
            .map(|line| format!("\n    {line}"))
            .collect();
        failures.push(format!(
            "the machine ended without a word from the command{}{tail}",
            indented(&qemu_says)
        ));
    }
    // What is injected for the detectors is not held against anybody.
    let (text, injected) = detectors::split(&text);
    if boot.detectors && status.is_some() {
        failures.extend(detectors::judge(text, injected, wanted));
    }
    let verdict = klog::judge(text, &options.expect);
    if !verdict.is_clean() {
        for report in verdict.undeclared.iter().take(SHOWN_REPORTS) {
            failures.push(format!(
                "the kernel reports (line {} of the log):\n{report}",
                report.line
            ));
        }
        if let Some(more) = verdict.undeclared.len().checked_sub(SHOWN_REPORTS + 1) {
            failures.push(format!("the kernel reports {} more times", more + 1));
        }
        failures.extend(verdict.miscounted);
    }
    Ok(Outcome {
        status,
        failures,
        timed_out,
        log,
        elapsed: started.elapsed(),
    })
}

/// As [`run`], with no input. `take` is given each line of output, and whether it is one of standard error; what it makes
/// of them in `state` is returned.
pub(crate) fn run_with<T: Send + 'static>(
    paths: &Paths,
    options: &Options,
    boot: &Boot,
    command: &[String],
    state: T,
    mut take: impl FnMut(&mut T, &str, bool) + Send + 'static,
) -> Result<(Outcome, T)> {
    let state = Arc::new(Mutex::new(state));
    let sink = state.clone();
    let lines = Channels::Lines(Box::new(move |line, is_error| {
        if let Ok(mut state) = sink.lock() {
            take(&mut state, line, is_error);
        }
    }));
    let outcome = run(paths, options, boot, command, lines)?;
    let state = Arc::into_inner(state)
        .context("the machine's output is still being read")?
        .into_inner()
        .map_err(|_| anyhow!("reading the machine's output failed"))?;
    Ok((outcome, state))
}

fn indented(text: &str) -> String {
    text.lines().map(|line| format!("\n    {line}")).collect()
}

fn open_ports(arguments: &mut Vec<String>, tty: bool) -> Result<Ports> {
    let mut remote = Vec::new();
    let mut open = |name: &str, device: &str| -> Result<UnixStream> {
        let (ours, theirs) = UnixStream::pair()?;
        // The one descriptor that QEMU is to inherit.
        rustix::io::fcntl_setfd(theirs.as_fd(), rustix::io::FdFlags::empty())?;
        arguments.extend([
            "-chardev".to_owned(),
            format!("socket,id={name},fd={}", theirs.as_raw_fd()),
            "-device".to_owned(),
            format!("{device},chardev={name},name=runner.{name}"),
        ]);
        remote.push(theirs);
        Ok(ours)
    };
    let mut console = None;
    if tty {
        console = Some(open("console", "virtconsole")?);
    }
    let control = open("control", "virtserialport")?;
    let mut streams = Vec::new();
    if !tty {
        for name in ["in", "out", "err"] {
            streams.push((name, open(name, "virtserialport")?));
        }
    }
    Ok(Ports {
        control,
        streams,
        console,
        remote,
    })
}

/// Ends the machine with the run, whatever ends the run.
struct Machine(Child);

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Lets a reader take all that comes at once, so that the machine never waits for a slow consumer of its output.
fn pump(
    mut from: impl Read + Send + 'static,
    mut to: impl FnMut(&[u8]) + Send + 'static,
) -> thread::JoinHandle<()> {
    let (sender, receiver) = mpsc::channel::<Vec<u8>>();
    thread::spawn(move || {
        let mut buffer = vec![0; 64 * 1024];
        while let Ok(count) = from.read(&mut buffer) {
            if count == 0 || sender.send(buffer[..count].to_vec()).is_err() {
                break;
            }
        }
    });
    thread::spawn(move || {
        for chunk in receiver {
            to(&chunk);
        }
    })
}

/// Passes input on, and its end. The stream must not be dropped before the machine has gone: QEMU throws away what it has
/// not read yet once the other end is closed, but not when it is merely shut down for writing.
fn feed(mut from: impl Read + Send + 'static, to: &UnixStream) -> Result<()> {
    let mut to = to.try_clone()?;
    thread::spawn(move || {
        let mut buffer = vec![0; 64 * 1024];
        while let Ok(count) = from.read(&mut buffer) {
            if count == 0 || to.write_all(&buffer[..count]).is_err() {
                break;
            }
        }
        let _ = to.shutdown(std::net::Shutdown::Write);
    });
    Ok(())
}

type Attended = (Option<i32>, bool, Vec<String>);

fn attend(
    qemu: &mut Machine,
    ports: Ports,
    channels: Channels,
    log: &Path,
    timeout: Option<Duration>,
    started: Instant,
) -> Result<Attended> {
    let mut consumers = Vec::new();
    if let Some(console) = ports.console {
        feed(std::io::stdin(), &console)?;
        consumers.push(pump(console, |bytes| {
            let mut out = std::io::stdout().lock();
            let _ = out.write_all(bytes).and_then(|()| out.flush());
        }));
    }
    let mut input = None;
    let lines = match channels {
        Channels::Caller => None,
        Channels::Lines(function) => Some(Arc::new(Mutex::new(function))),
    };
    for (name, mut stream) in ports.streams {
        match (name, &lines) {
            ("in", lines) => {
                stream.write_all(b"go\n")?;
                match lines {
                    None => feed(std::io::stdin(), &stream)?,
                    Some(_) => feed(std::io::empty(), &stream)?,
                }
                input = Some(stream);
            }
            (name, None) => {
                let to_error = name == "err";
                consumers.push(pump(stream, move |bytes| {
                    let _ = if to_error {
                        std::io::stderr().write_all(bytes)
                    } else {
                        let mut out = std::io::stdout().lock();
                        out.write_all(bytes).and_then(|()| out.flush())
                    };
                }));
            }
            (name, Some(function)) => {
                let is_error = name == "err";
                let function = function.clone();
                let mut rest = Vec::new();
                let mut pass = move |bytes: &[u8], end: bool| {
                    rest.extend_from_slice(bytes);
                    while let Some(at) = rest.iter().position(|byte| *byte == b'\n') {
                        let line: Vec<u8> = rest.drain(..=at).collect();
                        let line = String::from_utf8_lossy(&line[..at]).into_owned();
                        if let Ok(mut function) = function.lock() {
                            function(&line, is_error);
                        }
                    }
                    if end && !rest.is_empty() {
                        let line = String::from_utf8_lossy(&rest).into_owned();
                        if let Ok(mut function) = function.lock() {
                            function(&line, is_error);
                        }
                    }
                };
                let (sender, receiver) = mpsc::channel::<Vec<u8>>();
                pump(stream, move |bytes| {
                    let _ = sender.send(bytes.to_vec());
                });
                consumers.push(thread::spawn(move || {
                    for chunk in receiver {
                        pass(&chunk, false);
                    }
                    pass(b"", true);
                }));
            }
        }
    }

    let (sender, control) = mpsc::channel::<String>();
    let reader = ports.control;
    thread::spawn(move || {
        use std::io::BufRead as _;
        for line in std::io::BufReader::new(reader)
            .lines()
            .map_while(Result::ok)
        {
            if sender.send(line).is_err() {
                break;
            }
        }
    });

    let mut status = None;
    let mut timed_out = false;
    let mut failures = Vec::new();
    let mut deadline = timeout.map(|timeout| started + timeout);
    loop {
        match control.recv_timeout(Duration::from_millis(50)) {
            Ok(line) => {
                if let Some(text) = line.strip_prefix("exit ") {
                    status = text.trim().parse().ok();
                    // The command is done; what is left is a second's work, where nobody else has the processors.
                    deadline = Some(Instant::now() + Duration::from_secs(1200));
                } else if let Some(text) = line.strip_prefix("setup ") {
                    failures.push(format!("the machine could not be set up: {text}"));
                }
                continue;
            }
            Err(mpsc::RecvTimeoutError::Timeout) => {}
            Err(mpsc::RecvTimeoutError::Disconnected) => thread::sleep(Duration::from_millis(10)),
        }
        if qemu.0.try_wait()?.is_some() {
            break;
        }
        if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            if status.is_some() {
                failures.push("the machine did not switch itself off".to_owned());
            } else {
                timed_out = true;
                let seconds = timeout.unwrap_or_default().as_secs();
                failures.push(format!("timed out after {seconds} s"));
            }
            break;
        }
        if fs::metadata(log)?.len() > LONGEST_LOG {
            failures.push(format!(
                "stopped: its log is longer than {} MiB",
                LONGEST_LOG >> 20
            ));
            break;
        }
    }
    if qemu.0.try_wait()?.is_none() {
        qemu.0.kill()?;
        qemu.0.wait()?;
    }
    // What the machine said in its last moment.
    for line in control.iter() {
        if let Some(text) = line.strip_prefix("exit ") {
            status = text.trim().parse().ok();
        }
    }
    for consumer in consumers {
        let _ = consumer.join();
    }
    drop(input);
    Ok((status, timed_out, failures))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn boot() -> Boot {
        Boot {
            arch: Arch::X86_64,
            root: PathBuf::from("/"),
            image: PathBuf::from("bzImage"),
            release: "7.x".to_owned(),
            modules: Index::default(),
            peermem_version: String::new(),
            control: None,
            drivers: Vec::new(),
            signing: None,
            detectors: false,
            is_stock: false,
            host: false,
        }
    }

    /// The devices of a machine: those of this kind, with the bus that each is on.
    fn buses(words: &str, kind: &str) -> Vec<String> {
        let options = Options::parse(format!("runner {words}").split_whitespace()).unwrap();
        qemu_arguments(
            &options,
            &boot(),
            "",
            Path::new("log"),
            Path::new("scratch"),
            None,
        )
        .iter()
        .filter(|argument| argument.split(',').next() == Some(kind))
        .map(|argument| {
            let bus = argument
                .split(',')
                .find_map(|word| word.strip_prefix("bus="));
            bus.unwrap_or_default().to_owned()
        })
        .collect()
    }

    #[test]
    fn the_kernel_says_which_processors() {
        let of = |words: &str| {
            let words = format!("runner {words}");
            let options = Options::parse(words.split_whitespace()).unwrap();
            let boot = Boot {
                arch: options.arch(),
                ..boot()
            };
            let (log, scratch) = (Path::new("log"), Path::new("scratch"));
            let arguments = qemu_arguments(&options, &boot, "", log, scratch, None).join(" ");
            let at = arguments.find("-machine ").unwrap();
            let machine = arguments[at..].split(' ').nth(1).unwrap().to_owned();
            (options.kernel, machine, arguments)
        };
        let (kernel, machine, arguments) = of("--iommu on");
        assert_eq!((&*kernel, &*machine), ("7.3", "q35,kernel-irqchip=split"));
        assert!(arguments.contains("intel-iommu") && arguments.contains("pci-hole64-size"));
        for (words, name, end) in [
            ("--arch arm64", "7.3-arm64", "gic-version=3"),
            ("--arch arm64 --iommu on", "7.3-arm64", "iommu=smmuv3"),
            (
                "--kernel 7.3-arm64-64k --iommu pt",
                "7.3-arm64-64k",
                "iommu=smmuv3",
            ),
        ] {
            let (kernel, machine, arguments) = of(words);
            assert_eq!(kernel, name);
            assert!(
                machine.starts_with("virt,") && machine.ends_with(end),
                "{machine}"
            );
            assert!(!arguments.contains("intel-iommu") && !arguments.contains("q35"));
        }
        // A kernel that was named stays.
        assert_eq!(of("--arch arm64 --kernel debug").0, "debug");
    }

    #[test]
    fn each_of_a_pair_has_one_nic() {
        let mut options = Options::parse(["runner", "--pair"]).unwrap();
        options.host_number = Some(2);
        let (wire, _other) = UnixDatagram::pair().unwrap();
        let (log, scratch) = (Path::new("log"), Path::new("scratch"));
        let arguments = qemu_arguments(&options, &boot(), "", log, scratch, Some(&wire));
        let of = |kind: &str| -> Vec<&str> {
            let all = arguments.iter().map(String::as_str);
            all.filter(|text| text.starts_with(kind)).collect()
        };
        let end = format!("dgram,id=net2,local.type=fd,local.str={}", wire.as_raw_fd());
        assert_eq!(of("dgram,"), [end]);
        assert_eq!(of("1,"), ["1,maxcpus=2"]);
        assert!(
            matches!(of("virtio-net-pci,")[..], [nic] if nic.contains("mac=52:54:00:77:00:02"))
        );
        let smp = |words: &[&str]| Options::parse(words.iter().copied()).unwrap().smp;
        assert_eq!(smp(&["runner", "--pair"]), 1);
        assert_eq!(smp(&["runner", "--pair", "--smp", "2"]), 2);
        assert_eq!(smp(&["runner"]), 2);
    }

    #[test]
    fn devices_go_where_the_topology_says() {
        let gpus = |words| buses(words, "ivshmem-plain");
        let nics = |words| buses(words, "virtio-net-pci");
        assert_eq!(gpus("--gpus 3"), ["pcie.0"; 3]);
        assert_eq!(nics(""), ["pcie.0"; 2]);
        assert_eq!(nics("--topology root-ports"), ["port0", "port1"]);
        assert_eq!(gpus("--topology root-ports"), ["port2", "port3"]);
        assert_eq!(nics("--topology switch --iommu on"), ["port1", "port3"]);
        assert_eq!(gpus("--topology switch --gpus 1"), ["port4"]);
        assert_eq!(nics("--topology switches"), ["port2", "port3"]);
        assert_eq!(gpus("--topology switches --bar 64"), ["port4", "port5"]);
        assert_eq!(nics("--topology sockets --smp 4"), ["port0", "port1"]);
        assert_eq!(gpus("--topology sockets"), ["port2", "port3"]);
        assert_eq!(buses("--topology sockets", "pxb-pcie"), ["pcie.0"; 3]);
        // A bus stands before what is on it.
        let options = Options::parse(["runner", "--topology", "switch"]).unwrap();
        let arguments = qemu_arguments(&options, &boot(), "", Path::new("l"), Path::new("s"), None);
        for (at, argument) in arguments.iter().enumerate() {
            let bus = argument
                .split(',')
                .find_map(|word| word.strip_prefix("bus="));
            if let Some(bus) = bus.filter(|bus| *bus != "pcie.0") {
                let id = format!("id={bus}");
                let is_there = arguments[..at]
                    .iter()
                    .any(|other| other.split(',').any(|word| word == id));
                assert!(is_there, "{argument}");
            }
        }
    }
}
