// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Finds names of the substitute `kernel` crate that are not used.
//!
//! rustc reports unused items of one crate, but no unused public items. These tests therefore
//! combine copies of the substitute and of `src/` or `kunit/` into one crate, in which nothing is
//! public. Exported macros and the functions of `shim.h` are searched for by name.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

/// A folder with a copy of the sources, removed on drop.
struct Copy(PathBuf);

impl Drop for Copy {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Returns the text of a file of the repository.
fn text(name: &str) -> String {
    fs::read_to_string(repository().join(name)).expect(name)
}

/// Returns the Rust files below a folder of the repository.
fn rust_files(folder: &str) -> Vec<String> {
    let mut files = Vec::new();
    for entry in fs::read_dir(repository().join(folder)).expect(folder) {
        let entry = entry.expect(folder);
        let name = format!("{folder}/{}", entry.file_name().to_str().expect("UTF-8"));
        if entry.path().is_dir() {
            files.extend(rust_files(&name));
        } else if name.ends_with(".rs") {
            files.push(name);
        }
    }
    files.sort();
    files
}

/// Returns `text` without its line comments.
fn code(text: &str) -> String {
    text.lines()
        .map(|line| line.split("//").next().unwrap_or_default())
        .collect::<Vec<_>>()
        .join("\n")
}

fn is_word(character: char) -> bool {
    character.is_alphanumeric() || character == '_'
}

/// Replaces `from` by `to` at the beginning of each word.
fn replace_words(text: &str, from: &str, to: &str) -> String {
    let mut result = String::new();
    let mut rest = text;
    while let Some(at) = rest.find(from) {
        let (before, after) = rest.split_at(at);
        result.push_str(before);
        result.push_str(if before.ends_with(is_word) { from } else { to });
        rest = &after[from.len()..];
    }
    result + rest
}

/// The root files of the code that uses the substitute.
const MODULE: &str = "src/nvidia_peermem.rs";
const KUNIT: &str = "kunit/peermem_kunit.rs";

/// Compiles the substitute and its user as one crate. Returns rustc's warnings about unused names.
/// `planted` is code that is appended to a file of the substitute.
fn unused(root: &str, planted: &str) -> Vec<String> {
    let name = format!(
        "peermem-names-{}-{}-{}",
        std::process::id(),
        planted.len(),
        root.len()
    );
    let copy = Copy(env::temp_dir().join(name));
    let rustc = || {
        let mut command = Command::new(env::var("RUSTC").unwrap_or_else(|_| "rustc".to_owned()));
        command.env("RUSTC_BOOTSTRAP", "1").current_dir(&copy.0);
        command
    };
    for folder in ["portable/kernel", "src", "kunit", "rust-bindings"] {
        for file in rust_files(folder) {
            let mut text = text(&file);
            if folder == "portable/kernel" {
                if file.ends_with("/time.rs") {
                    text += planted;
                }
                text = replace_words(&text, "pub ", "pub(crate) ");
                if file.ends_with("/lib.rs") {
                    // The user's code comes before the macros. In code after a macro, the macro
                    // would be in scope without an import, unlike in the real build.
                    let place = text
                        .find("pub(crate) mod alloc;")
                        .expect("the first module");
                    let user = format!(
                        "extern crate self as kernel;\n#[path = \"../../{root}\"]\nmod user;\n"
                    );
                    text.insert_str(place, &user);
                }
            } else {
                // The root of the crate is the root of the substitute.
                text = replace_words(&text, "crate::", "crate::user::");
            }
            let target = copy.0.join(&file);
            fs::create_dir_all(target.parent().expect("a folder")).expect("a folder");
            fs::write(target, text).expect("a copy");
        }
    }
    let macros = rustc()
        .args([
            "--edition=2021",
            "--crate-type=proc-macro",
            "--crate-name=kernel_macros",
        ])
        .arg("--out-dir=.")
        .arg(repository().join("portable/macros.rs"))
        .output()
        .expect("rustc");
    assert!(
        macros.status.success(),
        "{}",
        String::from_utf8_lossy(&macros.stderr)
    );
    let mut rustc = rustc();
    if root == KUNIT {
        rustc.arg("--cfg=peermem_kunit");
    }
    let output = rustc
        .env("PEERMEM_GENERATED", repository().join("portable"))
        .args([
            "--edition=2021",
            "--crate-type=rlib",
            "--crate-name=names",
            "--emit=metadata",
        ])
        .args([
            "-Cpanic=abort",
            "-Zcrate-attr=feature(used_with_arg,arbitrary_self_types)",
        ])
        .args([
            "--extern=kernel_macros=libkernel_macros.so",
            "--error-format=short",
        ])
        .args(["-Amissing-docs", "--out-dir=.", "portable/kernel/lib.rs"])
        .output()
        .expect("rustc");
    let said = String::from_utf8(output.stderr).expect("UTF-8");
    assert!(output.status.success(), "{said}");
    said.lines()
        .filter(|line| line.contains("portable/kernel"))
        .map(str::to_owned)
        .collect()
}

#[test]
fn every_item_is_used() {
    let unused = unused(MODULE, "");
    assert!(unused.is_empty(), "\n{}", unused.join("\n"));
}

#[test]
fn every_item_for_kunit_is_used() {
    let mut unused = unused(KUNIT, "");
    // Only `kunit.rs` counts here, because the module uses the names in the other files.
    unused.retain(|line| line.contains("/kunit.rs"));
    assert!(unused.is_empty(), "\n{}", unused.join("\n"));
}

#[test]
fn an_unused_item_is_found() {
    const PLANTED: &str = "\
        pub fn planted_function() {}
        impl Delta { pub const fn planted_method(self) -> i64 { self.0 } }
        pub struct PlantedType(pub u8);
        pub const PLANTED_CONSTANT: u8 = 1;
        pub trait PlantedTrait { fn planted(); }
        extern \"C\" { pub fn planted_declaration(); }
        pub use core::num::NonZeroU8 as PlantedImport;
    ";
    let unused = unused(MODULE, PLANTED);
    let names = [
        "planted_function",
        "planted_method",
        "PlantedType",
        "PLANTED_CONSTANT",
        "PlantedTrait",
        "planted_declaration",
        "PlantedImport",
    ];
    for name in names {
        assert!(
            unused.iter().any(|line| line.contains(&format!("{name}`"))),
            "{name}: {unused:?}"
        );
    }
    assert_eq!(unused.len(), names.len(), "{unused:?}");
}

/// Returns the names that follow `before` in a text.
fn names_after(text: &str, before: &str) -> BTreeSet<String> {
    text.split(before)
        .skip(1)
        .map(|rest| {
            rest.chars()
                .take_while(|character| is_word(*character))
                .collect()
        })
        .collect()
}

#[test]
fn every_macro_is_used() {
    let crate_files = rust_files("portable/kernel");
    let all: String = crate_files
        .iter()
        .chain(&rust_files("src"))
        .chain(&rust_files("kunit"))
        .chain(&["portable/macros.rs".to_owned()])
        .map(|file| code(&text(file)))
        .collect();
    for file in &crate_files {
        for name in names_after(&code(&text(file)), "macro_rules! ") {
            let call = format!("{name}!");
            let is_used = all
                .match_indices(&call)
                .any(|(at, _)| !all[..at].ends_with(is_word));
            assert!(is_used, "{file}: nobody uses the macro {name}");
        }
    }
}

#[test]
fn the_functions_of_the_shim_are_those_that_the_crate_declares() {
    let of_both = |files: [&str; 2]| files.map(text).concat();
    let header = names_after(&text("portable/shim.h"), "shim_");
    let source = of_both(["portable/shim.c", "portable/kunit.c"]).replace(" *shim_", " shim_");
    let source = names_after(&source, " shim_");
    let crate_ = of_both(["portable/kernel/bindings.rs", "portable/kernel/kunit.rs"]);
    let crate_ = names_after(&code(&crate_), "shim_");
    assert_eq!(header, crate_, "shim.h, the crate");
    assert_eq!(source, crate_, "shim.c and kunit.c, the crate");
}

/// Checks that no kernel option selects code in `src`: both builds compile the same source for all
/// kernels.
#[test]
fn the_source_does_not_depend_on_the_kernels_options() {
    for file in rust_files("src") {
        assert!(!code(&text(&file)).contains("CONFIG_"), "{file}");
    }
}
