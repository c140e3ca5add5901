// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Makes whatever a run needs and is not there yet. What is there is left alone, and nothing touches the network then.

use std::fs;
use std::path::Path;

use anyhow::bail;
use anyhow::Context as _;
use anyhow::Result;

use crate::apt;
use crate::kernel;
use crate::kernel::Kernel;
use crate::lint;
use crate::lint::Linter;
use crate::modules;
use crate::modules::Builder;
use crate::modules::Index;
use crate::paths::Paths;
use crate::programs;
use crate::progress::Stage;
use crate::results::Test;
use crate::results::Verdict;
use crate::toolchain::Toolchain;
use crate::vm;
use crate::vm::Peermem;

/// Keeps a second `rig` from making the same thing at the same time.
struct Lock(fs::File);

impl Lock {
    fn take(paths: &Paths, what: &str) -> Result<Self> {
        let directory = paths.cache.join("locks");
        fs::create_dir_all(&directory)?;
        let file = fs::File::create(directory.join(what))?;
        if rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive).is_err() {
            eprintln!("  waiting for another rig that makes the same ({what}) …");
            rustix::fs::flock(&file, rustix::fs::FlockOperation::LockExclusive)?;
        }
        Ok(Self(file))
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        let _ = rustix::fs::flock(&self.0, rustix::fs::FlockOperation::Unlock);
    }
}

/// The compilers, after the packages that they come in.
fn tools(paths: &Paths) -> Result<Toolchain> {
    let _lock = Lock::take(paths, "tools")?;
    apt::install_all(paths)?;
    Toolchain::find(paths)
}

/// A flavour by its name, or somebody's build tree by its path.
fn find_kernel(paths: &Paths, toolchain: &Toolchain, name: &str, frozen: bool) -> Result<Kernel> {
    match kernel::flavour(name) {
        Some(flavour) => {
            let _lock = Lock::take(paths, &format!("kernel-{name}"))?;
            kernel::ensure(paths, toolchain, flavour, frozen)
        }
        None if name.contains('/') => kernel::by_path(paths, Path::new(name)),
        None => bail!("there is no kernel {name}; a path has a slash in it"),
    }
}

/// Everything that demo and tests need.
pub(crate) fn all(paths: &Paths, kernel: &str) -> Result<i32> {
    let toolchain = tools(paths)?;
    let kernel = find_kernel(paths, &toolchain, kernel, false)?;
    let _lock = Lock::take(paths, "modules")?;
    let builder = Builder {
        paths,
        toolchain: &toolchain,
        kernel: &kernel,
        frozen: false,
    };
    builder.ours()?;
    builder.control()?;
    programs::build(paths, &toolchain)?;
    Ok(0)
}

/// Looks at the form of the code, one test for each check.
pub(crate) fn lint(paths: &Paths) -> Result<Vec<Test>> {
    apt::install(paths, apt::LINT)?;
    let toolchain = tools(paths)?;
    let kernel = find_kernel(paths, &toolchain, kernel::DEFAULT, false)?;
    let _lock = Lock::take(paths, "modules")?;
    let linter = Linter {
        paths,
        toolchain: &toolchain,
        builder: &Builder {
            paths,
            toolchain: &toolchain,
            kernel: &kernel,
            frozen: false,
        },
        kernel_source: kernel.source(),
    };
    let mut tests = Vec::new();
    for (name, check) in lint::CHECKS {
        let stage = Stage::begin(format!("lint: {name}"));
        let (verdict, notes) = match check(&linter) {
            Ok(()) => (Verdict::Passed, Vec::new()),
            Err(error) => (
                Verdict::Failed,
                format!("{error:#}").lines().map(str::to_owned).collect(),
            ),
        };
        stage.done(if verdict == Verdict::Passed {
            "ok"
        } else {
            "failed"
        });
        tests.push(Test {
            name: (*name).to_owned(),
            verdict,
            notes,
        });
    }
    Ok(tests)
}

pub(crate) fn kernel(paths: &Paths, flavour: &str) -> Result<i32> {
    let toolchain = tools(paths)?;
    let kernel = find_kernel(paths, &toolchain, flavour, false)?;
    println!("{}", kernel.build.display());
    Ok(0)
}

pub(crate) fn modules(paths: &Paths, name: &str) -> Result<i32> {
    let toolchain = tools(paths)?;
    let kernel = find_kernel(paths, &toolchain, name, false)?;
    let _lock = Lock::take(paths, "modules")?;
    let builder = Builder {
        paths,
        toolchain: &toolchain,
        kernel: &kernel,
        frozen: false,
    };
    println!("{}", builder.gpu()?.display());
    println!("{}", builder.ours()?.display());
    println!("{}", builder.control()?.display());
    Ok(0)
}

/// The kernel and the modules of one run.
pub(crate) fn boot(paths: &Paths, options: &vm::Options) -> Result<vm::Boot> {
    let toolchain = tools(paths)?;
    let kernel = find_kernel(paths, &toolchain, &options.kernel, options.frozen)?;
    let stock = options.rdma == vm::Rdma::Stock;
    if stock && options.peermem != Peermem::None {
        bail!("the stock RDMA modules have no peer memory: give --peermem none");
    }
    let _lock = Lock::take(paths, "modules")?;
    let builder = Builder {
        paths,
        toolchain: &toolchain,
        kernel: &kernel,
        frozen: options.frozen,
    };
    let mut index = Index::default();
    for file in options.peermem_ko.iter().chain(&options.gpu_ko) {
        let file = fs::canonicalize(file).with_context(|| file.display().to_string())?;
        index.add(file);
    }
    if options.peermem_ko.is_none() {
        match options.peermem {
            Peermem::Ours => {
                index.add(builder.ours()?);
                index.add(builder.kunit()?);
            }
            Peermem::Nvidia => index.add(builder.control()?),
            Peermem::None => {}
        }
    }
    if options.gpus > 0 && options.gpu_ko.is_none() {
        index.add(builder.gpu()?);
    }
    let control = if options.with_control {
        Some(builder.control()?)
    } else {
        None
    };
    let peermem_version = match index.get("nvidia_peermem") {
        Some(file) => modules::info(file, "version")?,
        None => String::new(),
    };
    for file in kernel.index(stock)?.files() {
        index.add(file.clone());
    }
    Ok(vm::Boot {
        image: kernel.image,
        release: kernel.release,
        modules: index,
        peermem_version,
        control,
    })
}
