// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Makes everything that a run needs and that is missing. If nothing is missing, nothing is changed
//! and the network is not used.

use std::path::PathBuf;
use std::thread;

use anyhow::{anyhow, bail, Context as _, Result};

use crate::arch::Arch;
use crate::index::{self, Index};
use crate::kernel::{Extent, Kernel};
use crate::lock::Lock;
use crate::modules::Builder;
use crate::paths::Paths;
use crate::toolchain::Toolchain;
use crate::topology::Topology;
use crate::vm::{Named as _, Peermem, Provider};
use crate::{apt, consumers, foreign, kernel, modules, programs, vm};

/// Installs the packages of the compilers, and returns the compilers.
pub(crate) fn tools(paths: &Paths) -> Result<Toolchain> {
    let _lock = Lock::take(paths, "tools")?;
    apt::install_all(paths)?;
    Toolchain::find(paths)
}

pub(crate) fn find_kernel(
    paths: &Paths,
    toolchain: &Toolchain,
    name: &str,
    extent: Extent,
) -> Result<Kernel> {
    let flavour = kernel::flavour(name).with_context(|| format!("there is no kernel {name}"))?;
    let _lock = Lock::take(paths, &format!("kernel-{}", flavour.source()))?;
    kernel::ensure(paths, toolchain, flavour, extent)
}

/// Makes everything that the tests need on these kernels.
pub(crate) fn all<'a>(paths: &Paths, kernels: impl IntoIterator<Item = &'a str>) -> Result<i32> {
    let kernels: Vec<&str> = kernels.into_iter().collect();
    beside_programs(
        paths,
        &kernel::archs(&kernels),
        programs::COMPILED,
        |toolchain| {
            for name in kernels {
                let kernel = find_kernel(paths, toolchain, name, Extent::Whole)?;
                let _lock = Lock::take(paths, "modules")?;
                Builder::new(paths, toolchain, &kernel, false).all()?;
            }
            Ok(())
        },
    )?;
    Ok(0)
}

pub(crate) fn demo(paths: &Paths, options: &vm::Options) -> Result<()> {
    beside_programs(paths, &[options.arch()], &[programs::GDR], |toolchain| {
        let kernel = find_kernel(paths, toolchain, &options.kernel, Extent::Patched)?;
        if !options.peermem.is_module() {
            return Ok(());
        }
        let _lock = Lock::take(paths, "modules")?;
        let builder = Builder::new(paths, toolchain, &kernel, false);
        builder.ours()?;
        builder.control()?;
        Ok(())
    })
}

/// Runs `work` while the programs are compiled and NVIDIA's nvidia-peermem is fetched. Much of a
/// kernel's build, above all of its Rust code, keeps only one processor busy.
fn beside_programs(
    paths: &Paths,
    archs: &[Arch],
    wanted: &[&str],
    work: impl FnOnce(&Toolchain) -> Result<()>,
) -> Result<()> {
    let toolchain = tools(paths)?;
    thread::scope(|scope| {
        let programs = scope.spawn(|| {
            for arch in archs {
                build_programs(paths, &toolchain, *arch, wanted)?;
            }
            modules::control_source(paths).map(drop)
        });
        let worked = work(&toolchain);
        let compiled = programs
            .join()
            .map_err(|_| anyhow!("compiling the programs failed"))?;
        worked.and(compiled)
    })
}

fn build_programs(paths: &Paths, toolchain: &Toolchain, arch: Arch, wanted: &[&str]) -> Result<()> {
    let _lock = Lock::take(paths, "programs")?;
    programs::build(paths, toolchain, arch, wanted)
}

/// Compiles the programs for commands in the VM.
pub(crate) fn programs(paths: &Paths, arch: Arch) -> Result<()> {
    build_programs(paths, &tools(paths)?, arch, programs::COMPILED)
}

/// Builds our module alone, for the default kernel.
pub(crate) fn module(paths: &Paths) -> Result<()> {
    let toolchain = tools(paths)?;
    let kernel = find_kernel(paths, &toolchain, kernel::DEFAULT, Extent::Patched)?;
    let _lock = Lock::take(paths, "modules")?;
    Builder::new(paths, &toolchain, &kernel, false).ours()?;
    Ok(())
}

/// Makes the Debian package of the module's source, with the object of the portable build.
pub(crate) fn deb(paths: &Paths) -> Result<i32> {
    tools(paths)?;
    let status = std::process::Command::new("sh")
        .args([
            "-ec",
            "make --no-print-directory object; exec packaging/deb",
        ])
        .current_dir(&paths.repo)
        .env("RUSTC", "/usr/bin/rustc")
        .status()
        .context("cannot start sh")?;
    Ok(i32::from(!status.success()))
}

pub(crate) fn kernel(paths: &Paths, flavour: &str) -> Result<i32> {
    let toolchain = tools(paths)?;
    let kernel = find_kernel(paths, &toolchain, flavour, Extent::Whole)?;
    println!("{}", kernel.build.display());
    Ok(0)
}

pub(crate) fn modules(paths: &Paths, name: &str) -> Result<i32> {
    let toolchain = tools(paths)?;
    let kernel = find_kernel(paths, &toolchain, name, Extent::Patched)?;
    let _lock = Lock::take(paths, "modules")?;
    for file in Builder::new(paths, &toolchain, &kernel, false).all()? {
        println!("{}", file.display());
    }
    Ok(0)
}

/// Applies these patches to our module, and builds the module for a VM with these options.
pub(crate) fn our_module(
    paths: &Paths,
    options: &vm::Options,
    patches: &[PathBuf],
) -> Result<PathBuf> {
    let toolchain = Toolchain::find(paths)?;
    let kernel = find_kernel(paths, &toolchain, &options.kernel, Extent::Frozen)?;
    let _lock = Lock::take(paths, "modules")?;
    let mut builder = Builder::new(paths, &toolchain, &kernel, true).with(options.build)?;
    if options.no_gpl_only {
        builder = builder.without_gpl_only();
    }
    match patches {
        [] => builder.ours(),
        patches => builder.patched(patches),
    }
}

pub(crate) fn kernel_key(paths: &Paths, kernel: &str) -> Result<String> {
    let toolchain = Toolchain::find(paths)?;
    Ok(find_kernel(paths, &toolchain, kernel, Extent::Frozen)?.key)
}

fn add_peermem(builder: &Builder<'_>, options: &vm::Options, index: &mut Index) -> Result<()> {
    match options.peermem {
        Peermem::Ours => {
            if !options.patches.is_empty() {
                index.add(builder.patched(&options.patches)?);
            }
            index.add(builder.ours()?);
            index.add(builder.other_client()?);
        }
        Peermem::Nvidia => index.add(builder.control()?),
        Peermem::Preload | Peermem::None => {}
    }
    if options.kunit {
        index.add(builder.kunit(&options.patches)?);
    }
    Ok(())
}

/// Returns the kernel and the modules of one run.
pub(crate) fn boot(paths: &Paths, options: &vm::Options) -> Result<vm::Boot> {
    let blind = kernel::flavour(&options.kernel).is_some_and(|flavour| !flavour.shows_topology());
    if blind && options.topology != Topology::Flat {
        bail!(
            "kernel {} shows no sockets and no extended config space: give --kernel {} with --topology {}",
            options.kernel,
            kernel::EARLIER,
            options.topology.name()
        );
    }
    let toolchain = tools(paths)?;
    let stock = options.rdma == vm::Rdma::Stock;
    let extent = match (options.frozen, stock) {
        (true, _) => Extent::Frozen,
        (false, true) => Extent::Whole,
        (false, false) => Extent::Patched,
    };
    let kernel = find_kernel(paths, &toolchain, &options.kernel, extent)?;
    if stock && options.peermem.is_module() {
        bail!("the stock RDMA modules have no peer memory: give --peermem none");
    }
    if !kernel.has_peer_memory && options.peermem.is_module() {
        bail!(
            "the ib_core of kernel {} has no peer memory: give --peermem preload or none",
            options.kernel
        );
    }
    let root = foreign::root(paths, kernel.arch)?;
    let preloaded = match options.peermem {
        Peermem::Preload => vec![
            programs::preload(paths)?,
            consumers::cuda(paths)?.join("libcuda.so.1"),
        ],
        _ => Vec::new(),
    };
    let _lock = Lock::take(paths, "modules")?;
    let mut builder = Builder::new(paths, &toolchain, &kernel, options.frozen)
        .with(options.build)?
        .beside(options.provider);
    if options.no_gpl_only {
        builder = builder.without_gpl_only();
    }
    let mut index = Index::default();
    add_peermem(&builder, options, &mut index)?;
    let mut drivers = Vec::new();
    if options.beside {
        index.add(builder.ours()?);
        drivers = builder.drivers()?;
    }
    if options.gpus > 0 {
        index.add(match options.provider {
            Provider::Ours => builder.gpu()?,
            Provider::Nvidia => builder.gpu_with_upper()?,
            Provider::Nvidia555 => builder.gpu_with_upper_555()?,
        });
    }
    if kernel.detectors {
        index.add(builder.injected()?);
    }
    let control = options
        .with_control
        .then(|| builder.control())
        .transpose()?;
    let peermem_version = match index.get("nvidia_peermem") {
        Some(file) => index::info(file, "version")?,
        None => String::new(),
    };
    if options.interpose {
        index.add(builder.interpose()?);
    }
    if options.bench {
        index.add(builder.bench()?);
    }
    for file in kernel.index(stock)?.files() {
        index.add(file.clone());
    }
    let signing = match (&kernel.signing, options.signed) {
        (Some(signing), true) => Some((signing.clone(), builder.ours()?)),
        (None, true) => bail!("this kernel checks no signatures"),
        (_, false) => None,
    };
    Ok(vm::Boot {
        arch: kernel.arch,
        root,
        image: kernel.image,
        release: kernel.release,
        modules: index,
        peermem_version,
        control,
        drivers,
        signing,
        detectors: kernel.detectors,
        is_stock: kernel.is_stock,
        host: false,
        preloaded,
    })
}
