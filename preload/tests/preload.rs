// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Tests of the library under `LD_PRELOAD`. The real libibverbs and librxe run on a stand-in kernel
//! and a stand-in libcuda (tests/c). Versions of libibverbs that are not installed are stand-ins,
//! too.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

use tempfile::TempDir;

/// Compiled libraries and programs, and a sysfs with one device.
struct Built {
    folder: TempDir,
    /// Path of the real libibverbs, if it is installed.
    libibverbs: Option<PathBuf>,
}

fn built() -> &'static Built {
    static BUILT: OnceLock<Built> = OnceLock::new();
    BUILT.get_or_init(|| {
        let built = Built {
            folder: tempfile::tempdir().unwrap(),
            libibverbs: installed("libibverbs.so.1"),
        };
        built.all();
        built
    })
}

/// Returns the path of a library that the compiler finds.
fn installed(name: &str) -> Option<PathBuf> {
    let found = Command::new("cc")
        .arg(format!("-print-file-name={name}"))
        .output()
        .unwrap();
    let path = PathBuf::from(String::from_utf8(found.stdout).unwrap().trim());
    path.is_absolute().then_some(path)
}

/// Returns the path of the library that cargo has built for this test.
fn library() -> PathBuf {
    let tests = std::env::current_exe().unwrap();
    let mut folders = tests.ancestors().skip(1);
    folders
        .find_map(|folder| Some(folder.join("libpeermem_preload.so")).filter(|it| it.exists()))
        .unwrap()
}

impl Built {
    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn cc(&self, output: &str, source: &str, arguments: &[&str]) {
        let source = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("tests/c")
            .join(source);
        let status = Command::new("cc")
            .args(["-O1", "-Wall", "-Werror", "-fPIC", "-o"])
            .arg(self.path(output))
            .arg(source)
            .args(arguments)
            .args(["-ldl", "-lpthread"])
            .status()
            .unwrap();
        assert!(status.success(), "{output}");
    }

    fn all(&self) {
        self.cc("libfake_kernel.so", "fake_kernel.c", &["-shared"]);
        let kept = ["-shared", "-DKEEP_MALLOC"];
        self.cc("libkernel_for_valgrind.so", "fake_kernel.c", &kept);
        let soname = "-Wl,-soname,libcuda.so.1";
        for (folder, old) in [("new", "-UOLD"), ("old", "-DOLD")] {
            fs::create_dir(self.path(folder)).unwrap();
            let output = format!("{folder}/libcuda.so.1");
            self.cc(&output, "fake_cuda.c", &["-shared", soname, old]);
        }
        self.cc("copies", "copies.c", &[]);
        for (name, abi, option) in [
            ("v34", "IBVERBS_PRIVATE_34", "-UX"),
            ("v65", "IBVERBS_PRIVATE_65", "-UX"),
            ("v99", "IBVERBS_PRIVATE_99", "-UX"),
            ("v25", "IBVERBS_PRIVATE_25", "-DNO_DMABUF"),
            ("shifted", "IBVERBS_PRIVATE_34", "-DSHIFTED"),
        ] {
            let (map, soname) = (self.path(name), format!("-Wl,-soname,libibverbs-{name}.so"));
            fs::write(&map, format!("{abi} {{ global: *; }};\n")).unwrap();
            let script = format!("-Wl,--version-script={}", map.display());
            let output = format!("libibverbs-{name}.so");
            let arguments = ["-shared", option, &script, &soname];
            self.cc(&output, "fake_ibverbs.c", &arguments);
            let real = self.path(&output);
            let provider = format!("libprovider-{name}.so");
            self.cc(
                &provider,
                "fake_provider.c",
                &["-shared", real.to_str().unwrap()],
            );
        }
        if let Some(libibverbs) = &self.libibverbs {
            let libibverbs = libibverbs.to_str().unwrap();
            self.cc("cases", "cases.c", &[libibverbs]);
            self.cc("cases-oldest", "cases.c", &["-DOLDEST", libibverbs]);
            self.cc("cases-dlopen", "cases.c", &["-DNOT_LINKED"]);
        }
        for (file, text) in [
            ("class/infiniband_verbs/abi_version", "6"),
            ("class/infiniband_verbs/uverbs0/ibdev", "rxe0"),
            // The stand-in kernel opens /dev/null in place of the device.
            ("class/infiniband_verbs/uverbs0/dev", "1:3"),
            ("class/infiniband_verbs/uverbs0/abi_version", "2"),
            ("class/infiniband/rxe0/node_type", "1: CA"),
        ] {
            let path = self.path("sys").join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, format!("{text}\n")).unwrap();
        }
    }
}

/// A run of a program.
struct Run {
    is_preloaded: bool,
    mode: &'static str,
    cuda: &'static str,
    before: &'static [&'static str],
    kernel: &'static str,
}

const RUN: Run = Run {
    is_preloaded: true,
    mode: "",
    cuda: "new",
    before: &[],
    kernel: "libfake_kernel.so",
};

impl Run {
    fn output(&self, program: &str, arguments: &[&str]) -> Option<Output> {
        let built = built();
        if built.libibverbs.is_none() && program != "copies" {
            eprintln!("skipped: there is no libibverbs.so.1 here");
            return None;
        }
        let mut preload = vec![built.path(self.kernel)];
        if self.is_preloaded {
            preload.insert(0, library());
        }
        let preload: Vec<_> = preload.iter().map(|it| it.to_str().unwrap()).collect();
        let program = built.path(program).into_os_string();
        let mut words = self.before.iter().map(OsString::from).chain([program]);
        let folder = built.folder.path().display();
        let output = Command::new(words.next().unwrap())
            .args(words)
            .args(arguments)
            .env("LD_PRELOAD", preload.join(" "))
            .env(
                "LD_LIBRARY_PATH",
                format!("{folder}/{}:{folder}", self.cuda),
            )
            .env("SYSFS_PATH", built.path("sys"))
            .env("PEERMEM_SHIM", self.mode)
            .output()
            .unwrap();
        Some(output)
    }

    /// Runs a program whose checks must not fail, and returns the lines of the library.
    fn lines(&self, program: &str, arguments: &[&str]) -> Option<Vec<String>> {
        let output = self.output(program, arguments)?;
        let (out, err) = (text(&output.stdout), text(&output.stderr));
        assert!(
            output.status.success(),
            "{program} {arguments:?}: {}\n{out}{err}",
            output.status
        );
        let ours = err
            .lines()
            .filter(|line| line.starts_with("libpeermem_preload: "));
        Some(ours.map(str::to_owned).collect())
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Asserts that there is one line for each text, in this order, and that each line contains its
/// text.
fn assert_says(lines: Option<Vec<String>>, expected: &[&str]) {
    let Some(lines) = lines else { return };
    assert_eq!(lines.len(), expected.len(), "{lines:#?}");
    for (line, expected) in lines.iter().zip(expected) {
        assert!(line.contains(expected), "{line}\n{expected}");
    }
}

#[test]
fn gpu_memory_is_registered() {
    for group in [
        "basic", "parts", "errors", "contexts", "pcie", "forks", "pipes",
    ] {
        assert_says(RUN.lines("cases", &[group]), &[]);
    }
}

#[test]
fn many_registrations_and_threads() {
    for group in ["many", "threads", "cancels"] {
        assert_says(RUN.lines("cases", &[group]), &[]);
    }
}

#[test]
fn every_symbol_version_and_dlopen() {
    assert_says(RUN.lines("cases-oldest", &["basic"]), &[]);
    for version in ["IBVERBS_1.0", "IBVERBS_1.1"] {
        assert_says(RUN.lines("cases-dlopen", &["basic", version]), &[]);
    }
}

#[test]
fn a_failure_keeps_the_error_and_is_printed_once() {
    let says = [
        "CONFIG_INFINIBAND_ON_DEMAND_PAGING",
        "older than 5.12",
        "BAR1",
        "topo -m (121)",
        "open kernel modules",
        "refuses this memory (managed memory, for example) (1)",
        "past the end",
    ];
    assert_says(RUN.lines("cases", &["failing"]), &says);
    let says = ["MW_BIND 16"];
    assert_says(RUN.lines("cases", &["flags"]), &says);
    // Some versions of librxe have no rereg_mr. libibverbs then refuses the call.
    RUN.lines("cases", &["rereg"]);
    let old = Run { cuda: "old", ..RUN };
    assert_says(old.lines("cases", &["failure", "-"]), &["CUDA 11.7"]);
}

#[test]
fn modes() {
    let mode = |mode| Run { mode, ..RUN };
    assert_says(mode("off").lines("cases", &["off"]), &[]);
    let says = ["CONFIG_INFINIBAND_ON_DEMAND_PAGING); libibverbs is called next"];
    assert_says(mode("force").lines("cases", &["force"]), &says);
    let says = ["8192 bytes: registered by dma-buf"];
    assert_says(mode("log").lines("cases", &["basic"]), &says);
    let failure = ["failure", "-", "12"];
    assert_says(RUN.lines("cases", &failure), &["BAR1"]);
    assert_says(mode("log").lines("cases", &failure), &["BAR1", "BAR1"]);
    let says = ["must be off, log or force"];
    assert_says(mode("yes").lines("cases", &["basic"]), &says);
}

/// Checks that registering host memory makes the same number of allocations and of registration
/// calls to the kernel with the library as without it.
#[test]
fn host_memory_costs_nothing() {
    let cost = |is_preloaded| {
        let run = Run {
            is_preloaded,
            ..RUN
        };
        run.output("cases", &["cost"]).map(|it| text(&it.stdout))
    };
    let with = cost(true);
    assert!(with.is_none() || with == Some("allocations 1000 calls 1000\n".to_owned()));
    assert_eq!(with, cost(false));
}

/// If a program has no CUDA, a registration that fails does not search the file system for libcuda.
#[test]
fn without_cuda_no_directory_is_searched() {
    let run = Run {
        before: &["env", "LD_DEBUG=libs"],
        ..RUN
    };
    let Some(output) = run.output("cases", &["no_cuda"]) else {
        return;
    };
    let searches = text(&output.stderr);
    assert!(output.status.success(), "{}", text(&output.stdout));
    assert!(searches.contains("find library=libibverbs"), "{searches}");
    assert!(!searches.contains("find library=libcuda"), "{searches}");
}

#[test]
fn versions_of_libibverbs() {
    let provider = |name: &str| {
        let path = built().path(&format!("libprovider-{name}.so"));
        path.to_str().unwrap().to_owned()
    };
    let (v34, v65) = (provider("v34"), provider("v65"));
    let rereg = "8192 bytes: this library cannot change a region";
    let usual = ["DMA handle", rereg, "6.1 for DEVX"];
    // Each copy of libibverbs gets the calls of the provider that is linked to it.
    assert_says(RUN.lines("copies", &["served", &v34, &v65]), &usual);
    for (name, says) in [
        ("v99", &["IBVERBS_PRIVATE_34 nor", rereg][..]),
        ("v25", &["older than rdma-core 34", rereg]),
        ("shifted", &["layout", "DMA handle", rereg, "6.1 for DEVX"]),
    ] {
        assert_says(RUN.lines("copies", &["refused", &provider(name)]), says);
    }
}

#[test]
fn valgrind_finds_no_error() {
    if Command::new("valgrind").arg("--version").output().is_err() {
        eprintln!("skipped: there is no valgrind here");
        return;
    }
    let run = Run {
        before: &["valgrind", "-q", "--error-exitcode=99", "--leak-check=no"],
        kernel: "libkernel_for_valgrind.so",
        ..RUN
    };
    for group in ["basic", "parts", "failing", "pcie", "contexts", "rereg"] {
        run.lines("cases", &[group]);
    }
    let v34 = built().path("libprovider-v34.so");
    run.lines("copies", &["served", v34.to_str().unwrap()]);
}
