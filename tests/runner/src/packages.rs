// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Tests of peermemctl's packages (`make dist-tools`). `tests/debian/packages` tests the packages and
//! the library for `LD_PRELOAD` in them. `tests/debian/prometheus` tests peermemctl's metrics, alerts
//! and dashboard.

use std::fs;
use std::path::Path;

use anyhow::Result;

use crate::command::{as_root, tool};
use crate::lock::Lock;
use crate::paths::Paths;
use crate::progress::{output, Stage};
use crate::results::{Format, Test};
use crate::stamp::{self, Key};
use crate::{apt, cases, guest, programs, setup};

/// Names of the roots, the Debian suite of each, and the suites whose rdma-core is tested with the
/// library for `LD_PRELOAD`. The first suite has the oldest glibc that Debian offers.
const ROOTS: &[(&str, &str, &[&str])] = &[
    ("11", "bullseye", &["bullseye"]),
    ("12", "bookworm", &["bookworm"]),
    ("13", "trixie", &["trixie", NEWEST]),
];

/// The suite whose packages change over time.
const NEWEST: &str = "sid";

/// Packages of rdma-core, and the libraries that they are linked to.
const RDMA_CORE: [&str; 5] = [
    "libibverbs1",
    "ibverbs-providers",
    "libnl-3-200",
    "libnl-route-3-200",
    "libc6",
];

/// Compiles peermemctl for old hosts, and packs it as two versions below `$1`. Also compiles the
/// programs that test the library.
const PACK: &str = "\
    make --no-print-directory dist-tools TOOLS=\"$1/target\" ZIG=\"$1/zig\" DIST=\"$1/new\"\n\
    \"$1/zig/bin/pip\" install --quiet kubernetes-validate==1.37.0\n\
    packaging/tools pack \"$1/target/x86_64-unknown-linux-gnu/release/peermemctl\" \"$1/old\" 0\n\
    mkdir -p \"$1/programs\"\n\
    home=$1\n\
    cc() { \"$home/zig/bin/python3\" -m ziglang cc -target x86_64-linux-gnu.2.31 -O1 -fPIC -o \"$@\"; }\n\
    c=preload/tests/c\n\
    cc \"$1/programs/libfake_kernel.so\" -shared $c/fake_kernel.c -ldl\n\
    cc \"$1/programs/libcuda.so.1\" -shared -Wl,-soname,libcuda.so.1 $c/fake_cuda.c\n\
    cc \"$1/programs/cases\" -DNOT_LINKED $c/cases.c -ldl -lpthread";

fn rdma_core(paths: &Paths, suite: &str, directory: &Path) -> Result<()> {
    let stamp = directory.with_extension("stamp");
    let mut key = Key::default();
    key.text("packages", &RDMA_CORE.join(" "));
    let key = key.finish();
    if suite != NEWEST && stamp::is_fresh(&stamp, &key) {
        return Ok(());
    }
    let mut stage = Stage::begin(format!("packages: rdma-core of {suite}"));
    let _ = fs::remove_dir_all(directory);
    apt::download_all(paths, &mut stage, &[suite], &RDMA_CORE, directory)?;
    stamp::set(&stamp, &key)?;
    stage.done("");
    Ok(())
}

pub(crate) fn tests(paths: &Paths) -> Result<(Vec<Test>, Vec<String>)> {
    let toolchain = setup::tools(paths)?;
    let _lock = Lock::take(paths, "packages")?;
    apt::install(paths, apt::PACKAGES)?;
    let home = paths.cache.join("packages");
    let mut script = as_root("env");
    script
        .arg(guest::SYSTEM_PROGRAMS)
        .arg(paths.repo.join("tests/debian/packages"))
        .args([home.join("old"), home.join("new")])
        .arg(home.join("zig/bin/kubernetes-validate"))
        .args([home.join("programs"), home.join("rdma-core")]);
    for (name, suite, of_rdma_core) in ROOTS {
        for suite in *of_rdma_core {
            rdma_core(paths, suite, &home.join("rdma-core").join(name).join(suite))?;
        }
        let root = home.join(name);
        let stamp = home.join(format!("{name}.stamp"));
        let mut key = Key::default();
        key.text("suite", suite);
        let key = key.finish();
        if !stamp::is_fresh(&stamp, &key) {
            let mut stage = Stage::begin(format!("packages: a root of Debian {name}"));
            output(as_root("rm").args(["-rf", "--one-file-system"]).arg(&root))?;
            fs::create_dir_all(&home)?;
            let sources = apt::sources_of(&[*suite])?;
            apt::make_root(paths, &mut stage, (*suite, &sources), &[], &root, None)?;
            stamp::set(&stamp, &key)?;
            stage.done("");
        }
        script.arg(root);
    }
    let mut stage = Stage::begin("packages: make dist-tools");
    for folder in ["old", "new"] {
        let _ = fs::remove_dir_all(home.join(folder));
    }
    let mut pack = tool("sh");
    pack.args(["-euc", PACK, "sh"])
        .arg(&home)
        .env("CARGO", toolchain.cargo(paths).get_program())
        .current_dir(&paths.repo);
    stage.lines(&mut pack, &paths.cache.join("logs/packages.txt"))?;
    stage.done("");
    let mut prometheus = tool("python3");
    prometheus
        .arg(paths.repo.join("tests/debian/prometheus"))
        .arg(home.join("target/x86_64-unknown-linux-gnu/release/peermemctl"))
        .arg(programs::of_prometheus(paths, "prometheus")?);
    let (mut tests, mut problems) = (Vec::new(), Vec::new());
    for (mut script, name) in [(script, "packages"), (prometheus, "prometheus")] {
        let name = format!("tests/debian/{name}");
        let (found, wrong) = cases::read(&script.output()?, Format::Ktap, &name)?;
        tests.extend(found);
        problems.extend(wrong);
    }
    Ok((tests, problems))
}
