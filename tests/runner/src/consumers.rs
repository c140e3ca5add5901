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
use crate::vm::system_path;

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

/// A program that is ended with this one, and sees nothing of a make that called this one.
fn tool(program: &str, directory: &Path) -> Command {
    let mut command = Command::new("setpriv");
    command
        .args(["--pdeathsig", "TERM", program])
        .current_dir(directory)
        .env("PATH", system_path())
        .env("LC_ALL", "C");
    for name in ["MAKEFLAGS", "MFLAGS", "MAKELEVEL"] {
        command.env_remove(name);
    }
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

/// The directory of the stand-in for CUDA's library. The declarations lie in `include` beside it: whatever the repository's
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
    let mut stage = Stage::begin("CUDA: compiling the stand-in for its library");
    put(
        &source.join("include/cuda.h"),
        &home.join("include"),
        "cuda.h",
    )?;
    let built = home.join("built.so");
    stage.run(
        tool("gcc", &home)
            .args(["-Wall", "-Wextra", "-Wmissing-prototypes", "-Werror"])
            .args(["-O2", "-fPIC", "-shared", "-pthread"])
            .args(["-Wl,-soname,libcuda.so.1", "-Iinclude", "-I"])
            .arg(paths.repo.join("tests/gpu"))
            .arg(source.join("cuda.c"))
            .arg("-o")
            .arg(&built),
        &paths.cache.join("logs/consumers.txt"),
        "",
        |_| false,
    )?;
    put(&built, &libraries, "libcuda.so.1")?;
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
