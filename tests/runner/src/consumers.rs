// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Software of others that registers GPU memory, as its authors gave it out: fetched and compiled when a run wants it, with
//! the declarations of CUDA's driver API in `tests/cuda`, and linked to the stand-in for CUDA's library that is there.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::path::PathBuf;
use std::process::Command;

use anyhow::Context as _;
use anyhow::Result;

use crate::apt;
use crate::paths::Paths;
use crate::progress::output;
use crate::progress::Stage;
use crate::setup::Lock;
use crate::stamp;
use crate::stamp::Key;
use crate::toolchain;

/// Where the newest source is looked for.
const SUITES: &[&str] = &["sid", "forky", "trixie"];

/// What perftest is compiled with: of the machine's own release, whose libraries it then runs with.
const LIBRARIES: &[&str] = &[
    "ibverbs-providers",
    "libibumad-dev",
    "libibumad3",
    "libibverbs-dev",
    "libibverbs1",
    "libpci-dev",
    "libpci3",
    "librdmacm-dev",
    "librdmacm1",
];

/// The programs of perftest that are run.
const PERFTEST: &[&str] = &[
    "ib_read_bw",
    "ib_read_lat",
    "ib_send_bw",
    "ib_send_lat",
    "ib_write_bw",
];

/// NIXL, with the UCX in it: a wheel by its hash. Its C library, which alone is used, is the same for each Python.
const NIXL: &str = "nixl-cu12==1.5.1 \
     --hash=sha256:341d0dfa499f941c054614252f1d8047d1380e33f29c87707372ff5ec7d3779a";
const NIXL_PYTHON: &str = "3.11";
const NIXL_LIBRARIES: [&str; 2] = [".nixl_cu12.mesonpy.libs", "nixl_cu12.libs"];

/// The machine's, which a virtual machine has at the same place.
const LIBIBVERBS: &str = "/usr/lib/x86_64-linux-gnu/libibverbs.so.1";

/// The stand-ins for the driver's libraries: a source each.
const DRIVER: &[(&str, &str)] = &[("cuda.c", "libcuda.so.1"), ("nvml.c", "libnvidia-ml.so.1")];

/// A program that is run there.
fn tool(program: &str, directory: &Path) -> Command {
    let mut command = toolchain::tool(program);
    command.current_dir(directory);
    command
}

/// Copies a file to where a machine may have an older one open.
fn put(from: &Path, directory: &Path, name: &str) -> Result<()> {
    fs::create_dir_all(directory)?;
    let contents = fs::read(from).with_context(|| from.display().to_string())?;
    let target = directory.join(name);
    stamp::replace(&target, &contents)?;
    fs::set_permissions(&target, fs::metadata(from)?.permissions())?;
    Ok(())
}

fn compiler() -> Result<String> {
    output(Command::new("gcc").arg("--version"))
}

/// The directory of the stand-ins for the driver's libraries. The declarations lie in `include` beside it: whatever the repository's
/// path is, this one has no blanks.
pub(crate) fn cuda(paths: &Paths) -> Result<PathBuf> {
    let _lock = Lock::take(paths, "cuda")?;
    let home = paths.cache.join("cuda");
    let libraries = home.join("lib");
    let source = paths.repo.join("tests/cuda");
    let mut key = Key::default();
    key.text("compiler", &compiler()?);
    for input in ["tests/cuda", "tests/gpu/standin.h"] {
        key.path(&paths.repo, &paths.repo.join(input))?;
    }
    let key = key.finish();
    let stamp = home.join("stamp");
    if stamp::is_fresh(&stamp, &key) {
        return Ok(libraries);
    }
    let mut stage = Stage::begin("CUDA: compiling the stand-in for the driver's libraries");
    put(
        &source.join("include/cuda.h"),
        &home.join("include"),
        "cuda.h",
    )?;
    let built = home.join("built.so");
    for (file, library) in DRIVER {
        stage.run(
            tool("gcc", &home)
                .args(["-Wall", "-Wextra", "-Werror"])
                .args(["-O2", "-fPIC", "-shared", "-pthread"])
                .arg(format!("-Wl,-soname,{library}"))
                .args(["-Iinclude", "-I"])
                .arg(paths.repo.join("tests/gpu"))
                .arg(source.join(file))
                .arg("-o")
                .arg(&built),
            &paths.cache.join("logs/consumers.txt"),
            "",
            |_| false,
        )?;
        put(&built, &libraries, library)?;
    }
    // For the linker, and for who looks it up by this name.
    let short = libraries.join("libcuda.so");
    if fs::symlink_metadata(&short).is_err() {
        symlink("libcuda.so.1", &short)?;
    }
    stamp::set(&stamp, &key)?;
    stage.done("");
    Ok(libraries)
}

/// The directory of perftest's programs, which can be given `--use_cuda`: Debian's own have no CUDA.
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
        apt::unpack_own(paths, &mut stage, LIBRARIES, &root)?;
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
    run(tool("make", &build).arg("-j2").args(PERFTEST))?;
    for program in PERFTEST {
        put(&build.join(program), &programs, program)?;
    }
    stamp::set(&stamp, &key)?;
    stage.done("");
    Ok(programs)
}

/// The directory of NIXL's libraries, and of the agent that calls them.
pub(crate) fn nixl(paths: &Paths) -> Result<PathBuf> {
    let _lock = Lock::take(paths, "nixl")?;
    let home = paths.cache.join("nixl");
    let stamp = home.join("stamp");
    let mut key = Key::default();
    key.text("wheel", NIXL);
    let key = key.finish();
    if !stamp::is_fresh(&stamp, &key) {
        let _ = fs::remove_dir_all(&home);
        fetch_nixl(paths, &home)?;
        stamp::set(&stamp, &key)?;
    }
    put(&paths.repo.join("tests/cuda/nixl.py"), &home, "nixl.py")?;
    Ok(home)
}

fn fetch_nixl(paths: &Paths, home: &Path) -> Result<()> {
    if output(Command::new("pip").arg("--version")).is_err() {
        apt::install(paths, apt::WHEELS)?;
    }
    let mut stage = Stage::begin("NIXL: fetching its wheel, 69 MB");
    let log = paths.cache.join("logs/consumers.txt");
    let download = paths.run_directory()?;
    let result = (|| {
        let wanted = download.join("wanted");
        fs::write(&wanted, NIXL)?;
        let mut run = |command: &mut Command| stage.run(command, &log, "", |_| false);
        run(tool("pip", &download)
            .args(["download", "--no-deps", "--only-binary=:all:"])
            .args(["--require-hashes", "--python-version", NIXL_PYTHON])
            .args(["--platform", "manylinux_2_28_x86_64", "-r"])
            .arg(&wanted))?;
        let wheel = fs::read_dir(&download)?
            .filter_map(|entry| Some(entry.ok()?.path()))
            .find(|path| path.extension().is_some_and(|suffix| suffix == "whl"))
            .context("the wheel was downloaded and is not there")?;
        let unpacked = download.join("wheel");
        run(tool("/usr/bin/python3", &download)
            .args(["-m", "zipfile", "-e"])
            .arg(&wheel)
            .arg(&unpacked))?;
        fs::create_dir_all(home)?;
        for directory in NIXL_LIBRARIES {
            fs::rename(unpacked.join(directory), home.join(directory))?;
        }
        // The wheel's own finds no providers, and those of the machine want the machine's.
        let bundled = home.join(NIXL_LIBRARIES[1]);
        for entry in fs::read_dir(bundled)? {
            let path = entry?.path();
            if path.to_string_lossy().contains("/libibverbs-") {
                fs::remove_file(&path)?;
                symlink(LIBIBVERBS, &path)?;
            }
        }
        anyhow::Ok(())
    })();
    let _ = fs::remove_dir_all(&download);
    result?;
    stage.done("");
    Ok(())
}
