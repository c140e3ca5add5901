// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Recordings of real machines by `peermemctl record`, and the expected output for the recordings.

use std::path::Path;

use crate::finding::Status;
use crate::host::recording::Recording;
use crate::testing;

/// Compares the output for a recording with the output on the machine itself, without its colours.
#[test]
fn four_h200s_in_a_virtual_machine() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/recordings/four-h200s.json");
    let recording = Recording::load(&file).unwrap();
    let mut golden = String::new();
    for (line, expected) in [
        ("topo --verbose", Status::Ok),
        // This machine has no RDMA device.
        ("doctor --all", Status::Findings),
        ("list", Status::Failed),
        ("doctor --json", Status::Findings),
    ] {
        let (text, status) = testing::says(&recording, line);
        assert_eq!(status, expected, "{text}");
        golden.push_str(&format!("$ peermemctl {line}\n{text}\n"));
    }
    testing::golden("golden/recorded-four-h200s.txt", &golden);
}

/// In a virtual machine, no port is above a GPU, but the GPU still reports its link.
#[test]
fn links_of_a_virtual_machine_are_exported() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/recordings/four-h200s.json");
    let recording = Recording::load(&file).unwrap();
    let (text, _) = testing::says(&recording, "export");
    for name in ["lanes", "max_lanes"] {
        let link = format!("peermem_pci_link_{name}{{");
        let lines = text.lines().filter(|line| line.starts_with(&link));
        let wide = lines.filter(|line| line.ends_with(" 16")).count();
        assert_eq!(wide, 4, "{text}");
    }
}

/// Texts that identify a machine must not be in a recording of the repository.
#[test]
fn nothing_names_the_machine() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/recordings");
    let mut seen = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let text = std::fs::read_to_string(entry.unwrap().path()).unwrap();
        for (at, _) in text.match_indices("GPU-") {
            let uuid = text.get(at..at + 40).unwrap_or_default();
            assert!(uuid.starts_with("GPU-00000000-0000"), "{uuid}");
        }
        for word in ["Serial", "hostname", "Kernel command line"] {
            assert!(!text.contains(word), "{word}");
        }
        seen += 1;
    }
    assert!(seen > 0);
}
