// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Matrix of the GPUs: the NVLinks between two GPUs, or the class of the PCI path, as in
//! `nvidia-smi topo -m`. The matrix also shows the numbers that NVML and the device files give the
//! GPUs.

use std::collections::BTreeSet;

use super::fitting;
use crate::host::nvml::Nvml;
use crate::host::Seen;
use crate::machine::{Class, Machine};
use crate::render::{known, Table};
use crate::report::Out;

pub(super) fn matrix(machine: &Machine, nvml: &Seen<Nvml>, out: &mut Out) {
    if machine.gpus.len() < 2 {
        return;
    }
    let said = nvml.as_ref().ok();
    let (mut classes, mut is_any, mut is_all) = (BTreeSet::new(), false, true);
    // Width of the first three columns.
    let front = "GPU  NVML  /dev/nvidia00".len();
    for columns in machine.gpus.chunks(fitting(out, front, 0)) {
        out.gap();
        let indices: Vec<String> = columns.iter().map(|gpu| gpu.index.to_string()).collect();
        let mut headings = vec!["GPU", "NVML", "DEVICE"];
        headings.extend(indices.iter().map(String::as_str));
        let mut table = Table::new(&headings);
        for gpu in &machine.gpus {
            let index = said.and_then(|nvml| nvml.gpu(gpu.at)?.index);
            let device = gpu.minor.map(|minor| format!("/dev/nvidia{minor}"));
            let mut row = vec![gpu.index.to_string(), known(index), known(device)];
            for other in columns {
                if other.at == gpu.at {
                    row.push("X".to_owned());
                    continue;
                }
                let links = said.and_then(|nvml| nvml.nvlinks(gpu.at, other.at));
                is_all &= links.is_some();
                row.push(match links.filter(|links| links.count > 0) {
                    Some(links) => {
                        is_any = true;
                        format!("NV{}", links.count)
                    }
                    None => {
                        let class = machine.class_of(gpu.at, other.at);
                        classes.extend(class);
                        class.map_or("-", Class::name).to_owned()
                    }
                });
            }
            table.row(row);
        }
        out.table(&table);
    }
    let mut legend = Table::of("");
    if is_any {
        legend.row([
            "NV#",
            "number of NVLinks to the other GPU, or from both GPUs to NVSwitches",
        ]);
    }
    for class in classes {
        legend.row([class.name(), class.meaning()]);
    }
    out.gap();
    out.table(&legend);
    if !is_all {
        let why = match nvml {
            Err(why) => why.to_string(),
            Ok(Nvml {
                error: Some(why), ..
            }) => why.text.clone(),
            Ok(_) => "it does not report all GPUs".to_owned(),
        };
        out.gap();
        out.paragraph(
            "",
            &format!("Some NVLinks are not visible, and are not counted here. NVML: {why}."),
        );
    }
}

#[cfg(test)]
mod tests {
    use crate::fixture::Fixture;
    use crate::host::nvml::Nvml;
    use crate::host::recording::Recorder;
    use crate::host::Fact;
    use crate::{fixture, testing};

    fn said(change: fn(&mut Nvml)) -> Fixture {
        let mut fixture = fixture::all().remove("hgx").unwrap();
        fixture.change_nvml(change);
        fixture
    }

    /// Returns the output from the matrix up to the first path.
    fn matrix(fixture: &Fixture) -> String {
        let (text, _) = fixture.says("topo --verbose");
        let (_, behind) = text.split_once("\nGPU  NVML").unwrap();
        let (matrix, _) = behind.split_once("\nGPU 0 ").unwrap();
        matrix.to_owned()
    }

    #[test]
    fn switches_join_all() {
        let text = matrix(&said(|_| {}));
        assert_eq!(text.matches("NV18").count(), 8 * 7, "{text}");
        assert!(
            text.contains("7    7     /dev/nvidia7  NV18  NV18  NV18  NV18  NV18  NV18  NV18  X\n"),
            "{text}"
        );
        assert!(text.contains("NV#  number of NVLinks"), "{text}");
        assert!(!text.contains("NVML:"), "{text}");
    }

    /// Four NVLinks join GPUs 0 and 1, and NVML numbers these two GPUs in reverse order.
    #[test]
    fn bridges_join_two() {
        let fixture = said(|nvml| {
            let at: Vec<String> = nvml.gpus.iter().map(|gpu| gpu.at.clone()).collect();
            for (index, gpu) in nvml.gpus.iter_mut().enumerate() {
                gpu.nvlinks = Some(match index {
                    0 | 1 => [(at[1 - index].clone(), 4)].into(),
                    _ => [].into(),
                });
                gpu.index = Some([1, 0, 2, 3, 4, 5, 6, 7][index]);
            }
        });
        let text = matrix(&fixture);
        let row = "0    1     /dev/nvidia0  X     NV4   NODE  NODE  SYS   SYS   SYS   SYS\n";
        assert!(text.contains(row), "{text}");
        let json = fixture.json("topo --json");
        let pair = |index: usize| json["gpu_pairs"][index].to_string();
        assert_eq!(json["gpu_pairs"].as_array().map(Vec::len), Some(8 * 7 / 2));
        assert_eq!(
            pair(0),
            r#"{"class":"PIX","gpus":[0,1],"nvlinks":4,"nvswitch":false}"#
        );
        assert_eq!(
            pair(1),
            r#"{"class":"NODE","gpus":[0,2],"nvlinks":0,"nvswitch":false}"#
        );
        assert_eq!(json["gpus"][0]["nvml_index"], 1);
        assert_eq!(json["gpus"][0]["minor"], 0);
    }

    #[test]
    fn values_that_nvml_does_not_report_are_not_visible() {
        let text = matrix(&said(|nvml| nvml.gpus[3].nvlinks = None));
        assert_eq!(text.matches("NV18").count(), 7 * 6, "{text}");
        assert!(
            text.contains("NVML: it does not report all GPUs."),
            "{text}"
        );
        let without = fixture::hgx();
        let text = matrix(&without);
        assert!(
            text.contains("0    -     /dev/nvidia0  X     PIX"),
            "{text}"
        );
        assert!(text.contains("NVML: not there."), "{text}");
        let json = without.json("topo --json");
        assert!(json["gpu_pairs"][0]["nvlinks"].is_null(), "{json}");
    }

    #[test]
    fn the_short_form_does_not_ask_nvml() {
        let fixture = said(|_| {});
        for (line, asked) in [("topo", false), ("topo -v", true), ("topo --json", true)] {
            let recorder = Recorder::new(&fixture.recording, "a test");
            testing::says(&recorder, line);
            let facts = recorder.into_recording().facts;
            assert_eq!(facts.contains_key(&Fact::Nvml), asked, "{line:?}");
        }
    }
}
