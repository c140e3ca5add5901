// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Runs one VM from start to end.

use std::fs;
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{bail, Context as _, Result};

use super::boot::{Boot, Channels, Outcome};
use super::options::Options;
use super::qemu::{self, Words};
use super::wait::{self, Machine, Ports};
use super::{initramfs, judge, plan};
use crate::command::system_path;
use crate::detectors::Detector;
use crate::paths::Paths;
use crate::{detectors, klog, terminal};

/// Default time limit of a command. The limit is many times longer than any command needs, for slow
/// machines.
const LONGEST_RUN: Duration = Duration::from_secs(7200);

/// Lock that is held while QEMU starts. Two QEMUs that start at once must not inherit each other's
/// descriptors. An inherited socket would stay open after its own VM has ended.
static STARTING: Mutex<()> = Mutex::new(());

fn timeout(options: &Options, boot: &Boot, command: &[String]) -> Option<Duration> {
    match options.timeout {
        Some(0) => None,
        Some(seconds) => Some(Duration::from_secs(seconds)),
        None if command.is_empty() => None,
        None if boot.detectors => Some(LONGEST_RUN * detectors::SLOWER),
        None => Some(LONGEST_RUN),
    }
}

/// Returns the options with all changes that the kernel requires.
fn adjusted(options: &Options, boot: &Boot) -> Result<Options> {
    if !options.bar.is_power_of_two() {
        bail!(
            "a BAR of {} MiB: its size must be a power of two",
            options.bar
        );
    }
    if options.icount && options.smp != 1 {
        bail!("instructions are counted on one processor: give --smp 1");
    }
    let mut options = options.clone();
    options.root = if options.root == Path::new("/") {
        boot.root.clone()
    } else {
        fs::canonicalize(&options.root)
            .with_context(|| format!("no root directory {}", options.root.display()))?
    };
    if boot.is_stock {
        // The kernel patches its code at run time (jump labels, which kernels built here do not
        // have). With several processors, QEMU has executed an int3 that the kernel had already
        // replaced.
        options.smp = 1;
        // By default, a stock kernel lets no process map memory that a driver owns, but the cases
        // map the BAR.
        options.append.push("iomem=relaxed".to_owned());
    }
    if boot.detectors {
        options.mem += detectors::MEMORY_MIB;
        if options.faults {
            options.expect.extend(detectors::switched_off()?);
        }
    }
    Ok(options)
}

/// Writes the initramfs and the modules into the scratch folder.
fn lay_initramfs(
    paths: &Paths,
    options: &Options,
    boot: &Boot,
    command: &[String],
    scratch: &Path,
    tty: bool,
) -> Result<PathBuf> {
    let (plan, module_root) = if boot.host {
        (plan::plan_host(options, boot)?, PathBuf::new())
    } else {
        let plan = plan::plan(options, boot)?;
        let module_root = plan::lay_modules(scratch, &plan, boot)?;
        (plan, module_root)
    };
    if boot.signing.is_some() && !plan.early.is_empty() {
        bail!("this kernel needs modules to reach its files, and these modules are not signed");
    }
    let names: Vec<&str> = wanted(options, boot)
        .unwrap_or_default()
        .iter()
        .map(|detector| detector.name())
        .collect();
    let script = initramfs::command_script(paths, options, boot, command, tty)?;
    let file = scratch.join("initramfs");
    let names = names.join(" ");
    let archive = initramfs::initramfs(paths, options, &names, &plan, &module_root, &script, tty)?;
    fs::write(&file, archive)?;
    Ok(file)
}

/// Returns the detectors that must show that they work in this VM, if its kernel has any.
fn wanted(options: &Options, boot: &Boot) -> Option<&'static [Detector]> {
    boot.detectors.then(|| detectors::wanted(options.faults))
}

fn add_files(
    words: &mut Words,
    options: &Options,
    boot: &Boot,
    ramfs: &Path,
    scratch: &Path,
) -> Result<()> {
    words.add(&["-kernel", &boot.image.display().to_string()]);
    words.add(&["-initrd", &ramfs.display().to_string()]);
    if let Some(size) = options.nvme {
        let disk = scratch.join("nvme");
        fs::File::create(&disk)?.set_len(size << 20)?;
        words.add(&[
            "-drive",
            &format!("file={},if=none,id=nvme,format=raw", qemu::value(&disk)),
            "-device",
            "nvme,drive=nvme,serial=runner,bus=pcie.0",
        ]);
    }
    words.add(&["-device", "virtio-serial-pci,max_ports=8,bus=pcie.0"]);
    Ok(())
}

/// Starts QEMU. QEMU's messages go to `errors`.
fn start(
    mut words: Words,
    options: &Options,
    boot: &Boot,
    wire: Option<UnixDatagram>,
    errors: &Path,
    tty: bool,
) -> Result<(Machine, Ports)> {
    let _starting = STARTING.lock().unwrap_or_else(PoisonError::into_inner);
    let mut ports = wait::open_ports(&mut words, tty)?;
    if let Some(wire) = &wire {
        rustix::io::fcntl_setfd(wire.as_fd(), rustix::io::FdFlags::empty())?;
    }
    words.0.extend(options.qemu_arg.iter().cloned());
    let (program, package) = boot.arch.qemu();
    let qemu = Command::new("setpriv")
        .args(["--pdeathsig", "KILL", program])
        .args(&words.0)
        .env("PATH", system_path())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(fs::File::create(errors)?)
        .spawn()
        .with_context(|| format!("cannot start {program} (package {package})"))?;
    ports.remote.clear();
    drop(wire);
    Ok((Machine(qemu), ports))
}

/// Boots one VM, runs the command, and waits. A VM of a pair gets its end of the wire in `wire`.
pub(super) fn run(
    paths: &Paths,
    options: &Options,
    boot: &Boot,
    command: &[String],
    channels: Channels,
    wire: Option<UnixDatagram>,
) -> Result<Outcome> {
    let started = Instant::now();
    let interactive = matches!(channels, Channels::Caller) && terminal::is_terminal();
    let tty = command.is_empty() && interactive;
    let timeout = timeout(options, boot, command);
    let options = adjusted(options, boot)?;
    let scratch = paths.run_directory()?;
    let log = match &options.log {
        Some(file) => std::path::absolute(file)?,
        None => paths.new_log()?,
    };
    fs::write(&log, "")?;

    let ramfs = lay_initramfs(paths, &options, boot, command, &scratch, tty)?;
    let kernel_arguments = qemu::kernel_arguments(&options, boot);
    let mut words = qemu::arguments(
        &options,
        boot,
        &kernel_arguments,
        &log,
        &scratch,
        wire.as_ref(),
    );
    add_files(&mut words, &options, boot, &ramfs, &scratch)?;
    let errors = scratch.join("qemu.err");
    let (mut qemu, ports) = start(words, &options, boot, wire, &errors, tty)?;

    let raw = if tty { terminal::Raw::enter()? } else { None };
    let mut attended = wait::attend(&mut qemu, ports, channels, &log, timeout, started)?;
    drop(raw);

    let qemu_says = fs::read_to_string(&errors).unwrap_or_default();
    let text = klog::read(&log)?;
    let wanted = wanted(&options, boot);
    judge::judge(&mut attended, &options, &text, &qemu_says, wanted);
    Ok(Outcome {
        status: attended.status,
        failures: attended.failures,
        timed_out: attended.timed_out,
        log,
        elapsed: started.elapsed(),
    })
}
