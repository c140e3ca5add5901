// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! What `rust-bindings/probe.sh` chooses, and what it says where nothing fits: with the real rustc, on `kernel` crates made up
//! here.

#![expect(clippy::unwrap_used, reason = "what fails here fails a test")]

use std::collections::BTreeSet;
use std::env;
use std::fs;
use std::path::Path;
use std::path::PathBuf;
use std::process::Command;
use std::process::Output;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering;

/// A kernel's crate: with what every probe begins with, and what the test adds.
fn crate_with(rest: &str) -> String {
    format!("#![no_std]\npub mod prelude {{ pub type Result = core::result::Result<(), ()>; }}\n{rest}\n")
}

/// Two differences, of which the second has no older form.
const COMPAT: &str = "\
use kernel::prelude::*;
// PROBE first: kernel::first_new();
#[cfg(peermem_first)]
pub fn first() -> Result { kernel::first_new(); Ok(()) }
#[cfg(not(peermem_first))]
pub fn first() -> Result { kernel::first_old(); Ok(()) }
// PROBE second: let _: u32 = kernel::second(1);
#[cfg(peermem_second)]
pub fn second() -> u32 { kernel::second(1) }
pub fn both() -> u32 { second() }
";

struct Place(PathBuf);

impl Place {
    fn new() -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);

        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("runner-probe-{}-{number}", std::process::id());
        let place = Self(env::temp_dir().join(name));
        fs::create_dir_all(&place.0).unwrap();
        place
    }

    fn at(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn rustc() -> Command {
    let mut command = Command::new(env::var("RUSTC").unwrap_or_else(|_| "rustc".to_owned()));
    command.args(["--edition=2021", "--crate-type=rlib"]);
    command
}

/// Runs the probe for a `kernel` crate, or for none.
fn probe(place: &Place, kernel: Option<&str>) -> Output {
    if let Some(source) = kernel {
        fs::write(place.at("kernel.rs"), source).unwrap();
        let made = rustc()
            .args(["--crate-name=kernel", "--emit=metadata", "--out-dir"])
            .args([&place.0, &place.at("kernel.rs")])
            .status()
            .unwrap();
        assert!(made.success());
    }
    fs::write(place.at("compat.rs"), COMPAT).unwrap();
    let rustc = rustc();
    Command::new(repository().join("rust-bindings/probe.sh"))
        .args([place.at("compat.rs"), place.at("out.cfg")])
        .arg(rustc.get_program())
        .args(rustc.get_args())
        // As the kernel's own where warnings are errors.
        .args(["-Dwarnings", "-Wmissing_docs", "--crate-name=probe"])
        .arg("--extern=kernel")
        .arg("-L")
        .arg(&place.0)
        .output()
        .unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Nothing is left but what was asked for.
fn left(place: &Place) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(&place.0)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .filter(|name| name.starts_with("out"))
        .collect();
    names.sort();
    names
}

#[test]
fn the_newest_forms() {
    let place = Place::new();
    let kernel = crate_with("pub fn first_new() {} pub fn second(_: u32) -> u32 { 2 }");
    let output = probe(&place, Some(&kernel));
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(text(&output.stdout), "");
    assert_eq!(
        fs::read_to_string(place.at("out.cfg")).unwrap(),
        "--cfg=peermem_first\n--cfg=peermem_second\n"
    );
    assert_eq!(left(&place), ["out.cfg"]);
}

#[test]
fn older_forms_are_named() {
    let place = Place::new();
    let kernel = crate_with("pub fn first_old() {} pub fn second(_: u32) -> u32 { 2 }");
    let output = probe(&place, Some(&kernel));
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(text(&output.stdout), "  older forms in use: first\n");
    assert_eq!(
        fs::read_to_string(place.at("out.cfg")).unwrap(),
        "--cfg=peermem_second\n"
    );
}

/// A form that is there and has changed is no older form: nothing fits, and that is said.
#[test]
fn no_form_fits() {
    for second in ["", "pub fn second(_: u32) -> u64 { 2 }"] {
        let place = Place::new();
        let kernel = crate_with(&format!("pub fn first_new() {{}} {second}"));
        let output = probe(&place, Some(&kernel));
        assert_eq!(output.status.code(), Some(1));
        let said = text(&output.stderr);
        assert!(said.contains("cannot find function `second`"), "{said}");
        assert!(
            said.contains(
                "this kernel's Rust interfaces are none that src/compat.rs knows, see above (not found: second); \
                 docs/kernels.md has the kernels that it was made for."
            ),
            "{said}"
        );
        assert!(left(&place).is_empty());
    }
}

#[test]
fn a_kernel_that_rustc_cannot_use() {
    let place = Place::new();
    let output = probe(&place, None);
    assert_eq!(output.status.code(), Some(1));
    let said = text(&output.stderr);
    assert!(said.contains("can't find crate for `kernel`"), "{said}");
    assert!(
        said.contains("rustc cannot use this kernel's Rust at all, see above; scripts/check may say what is missing."),
        "{said}"
    );
    assert!(left(&place).is_empty());
}

/// Each `cfg` of the module's file has its probe, and both its forms.
#[test]
fn every_difference_has_both_forms() {
    let source = fs::read_to_string(repository().join("src/compat.rs")).unwrap();
    let between = |before: &str, after: &str| -> BTreeSet<String> {
        source
            .lines()
            .filter_map(|line| Some(line.strip_prefix(before)?.split_once(after)?.0.to_owned()))
            .collect()
    };
    let probes = between("// PROBE ", ":");
    assert!(!probes.is_empty());
    assert_eq!(between("#[cfg(peermem_", ")]"), probes);
    assert_eq!(between("#[cfg(not(peermem_", "))]"), probes);
}
