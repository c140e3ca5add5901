// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! The program itself: how it exits, and what it says where.

use std::path::Path;
use std::process::Command;
use std::process::Output;
use std::process::Stdio;

const MACHINE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/machines/hgx.json");

fn peermemctl() -> Command {
    Command::new(env!("CARGO_BIN_EXE_peermemctl"))
}

fn said(output: &Output) -> (Option<i32>, String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (
        output.status.code(),
        text(&output.stdout),
        text(&output.stderr),
    )
}

#[test]
fn topo_of_a_recording_exits_with_0() {
    let output = peermemctl().args(["topo", "--machine", MACHINE]).output();
    let (status, out, errors) = said(&output.unwrap());
    assert_eq!((status, errors.as_str()), (Some(0), ""), "{out}");
    assert!(out.contains("PIX*"), "{out}");
    assert!(
        !out.contains('\x1b'),
        "colours where nobody sees them: {out}"
    );
}

#[test]
fn what_cannot_be_looked_at_is_2_and_says_so() {
    let missing = peermemctl()
        .args(["topo", "--machine", "/none.json"])
        .output();
    let (status, out, errors) = said(&missing.unwrap());
    assert_eq!(status, Some(2), "{errors}");
    assert_eq!(out, "");
    assert!(errors.starts_with("peermemctl: /none.json: "), "{errors}");
    assert_eq!(errors.lines().count(), 1, "{errors}");

    let own = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/program.rs");
    let other = peermemctl().args(["topo", "--machine", own]).output();
    let (status, _, errors) = said(&other.unwrap());
    assert_eq!(status, Some(2), "{errors}");
    let wanted = format!("peermemctl: {own}: expected value");
    assert!(errors.starts_with(&wanted), "{errors}");

    let wrong = peermemctl().arg("none").output();
    assert_eq!(said(&wrong.unwrap()).0, Some(2));
}

/// `peermemctl … | head -0`: the reader is gone before anything is written.
#[test]
fn a_reader_that_has_gone_changes_no_status() {
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    drop(reader);
    let child = peermemctl()
        .args(["topo", "-v", "--machine", MACHINE])
        .stdout(writer)
        .stderr(Stdio::piped())
        .spawn();
    let output = child.unwrap().wait_with_output();
    let (status, _, errors) = said(&output.unwrap());
    assert_eq!((status, errors.as_str()), (Some(0), ""));
}

#[test]
fn colours_are_there_where_they_are_asked_for() {
    let topo = |words: &[&str]| {
        let output = peermemctl()
            .args(words)
            .args(["--machine", MACHINE])
            .env("NO_COLOR", "1")
            .output();
        said(&output.unwrap()).1
    };
    assert!(topo(&["topo", "--color", "always"]).contains("\x1b["));
    assert!(!topo(&["topo"]).contains('\x1b'));
    assert!(!topo(&["topo", "--json", "--color", "always"]).contains('\x1b'));
}

#[test]
fn every_command_has_a_man_page() {
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("man");
    std::fs::create_dir_all(&directory).unwrap();
    let output = peermemctl().arg("man").arg(&directory).output();
    assert_eq!(said(&output.unwrap()).0, Some(0));
    for page in [
        "peermemctl.1",
        "peermemctl-topo.1",
        "peermemctl-doctor.1",
        "peermemctl-record.1",
    ] {
        let text = std::fs::read_to_string(directory.join(page)).unwrap();
        assert!(text.contains(".TH peermemctl"), "{page}: {text}");
    }
    let nowhere = peermemctl().args(["man", "/none/of/this"]).output();
    let (status, _, errors) = said(&nowhere.unwrap());
    assert_eq!(status, Some(2));
    assert!(
        errors.starts_with("peermemctl: /none/of/this: "),
        "{errors}"
    );
}

#[test]
fn a_recording_of_this_machine_is_one() {
    let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join("here.json");
    let output = peermemctl().arg("record").arg("-o").arg(&file).output();
    assert_eq!(said(&output.unwrap()).0, Some(0));
    let topo =
        |words: &[&std::ffi::OsStr]| said(&peermemctl().arg("topo").args(words).output().unwrap());
    let here = topo(&[]);
    let there = topo(&["--machine".as_ref(), file.as_os_str()]);
    assert_eq!(here, there);
}
