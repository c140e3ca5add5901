// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Output of the results of `verify`, for people and programs.

use std::fmt::Write as _;

use serde::Serialize;

use super::event::{Figures, Name, Outcome, Step};
use super::supervisor::Followed;
use super::task::{Found, Source};
use crate::finding::Status;
use crate::render::{bytes, Paint, Table};
use crate::report::{object, Out};

const SCHEMA: &str = "peermemctl.verify";
const VERSION: u32 = 1;

/// Results for one GPU and one RDMA device.
#[derive(Debug, Serialize)]
pub(crate) struct Pair {
    /// PCI address.
    pub(crate) gpu: String,
    pub(crate) gpu_index: usize,
    pub(crate) gpu_name: String,
    /// `true` for the stand-in GPU of the project's test VM.
    pub(crate) stand_in: bool,
    /// RDMA device, or `None` if the host has no RDMA device or `--gpu-only` is set.
    pub(crate) hca: Option<String>,
    /// Description of the GPU and the RDMA device.
    pub(crate) about: Option<String>,
    /// The other host, in a run between two hosts.
    #[serde(flatten)]
    pub(crate) peer: Option<Peer>,
    pub(crate) steps: Vec<Step>,
}

/// Role of this host in a run between two hosts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Role {
    Client,
    Server,
}

/// The other host of a run between two hosts.
#[derive(Debug, Serialize)]
pub(crate) struct Peer {
    /// Role of this host.
    pub(crate) role: Role,
    /// Address of the other host.
    pub(crate) peer: String,
    /// Description of the other host's GPU and RDMA device.
    pub(crate) peer_about: Option<String>,
}

impl Pair {
    /// Creates the results for one GPU and one RDMA device. In a run between two hosts, `peer` is
    /// the role of this host and the address of the other host.
    pub(crate) fn of(
        (gpu_index, gpu): (usize, &Found),
        hca: Option<&str>,
        peer: Option<(Role, String)>,
        followed: Followed,
    ) -> Self {
        Self {
            gpu: gpu.pci.clone(),
            gpu_index,
            gpu_name: gpu.name.clone(),
            stand_in: gpu.source == Source::StandIn,
            hca: hca.map(str::to_owned),
            about: followed.about,
            peer: peer.map(|(role, peer)| Peer {
                role,
                peer,
                peer_about: followed.peer,
            }),
            steps: followed.steps,
        }
    }
}

/// All results.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    /// Size of each buffer, in bytes.
    pub(crate) size: u64,
    pub(crate) gpu_only: bool,
    pub(crate) pairs: Vec<Pair>,
}

impl Report {
    fn count(&self, outcome: Outcome) -> usize {
        let steps = self.pairs.iter().flat_map(|pair| &pair.steps);
        steps.filter(|step| step.outcome == outcome).count()
    }

    /// Returns the exit status. A failed step is a finding. The command itself fails if no step
    /// passed, if there was no RDMA device, or if no connection to a server succeeded.
    pub(crate) fn status(&self) -> Status {
        let is_reached =
            |step: &Step| step.step != Name::Connect || step.outcome == Outcome::Passed;
        let mut steps = self.pairs.iter().flat_map(|pair| &pair.steps);
        if !steps.any(is_reached) {
            return Status::Failed;
        }
        if self.count(Outcome::Failed) > 0 {
            return Status::Findings;
        }
        let tried = self.gpu_only || self.pairs.iter().any(|pair| pair.hca.is_some());
        if !tried || self.count(Outcome::Passed) == 0 {
            return Status::Failed;
        }
        Status::Ok
    }
}

fn outcome(outcome: Outcome) -> String {
    match outcome {
        Outcome::Passed => Paint::Good.on("passed"),
        Outcome::Failed => Paint::Fault.on("FAILED"),
        Outcome::NotPossibleHere => Paint::Dim.on("not possible here"),
    }
}

fn speed(bytes_per_second: u64) -> String {
    // Speeds use decimal units, as networks and datasheets do.
    let speed = bytes_per_second as f64;
    match bytes_per_second {
        0..1_000_000 => format!("{:.1} kB/s", speed / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} MB/s", speed / 1e6),
        _ => format!("{:.2} GB/s", speed / 1e9),
    }
}

fn figures(figures: &Figures) -> Option<String> {
    let mut parts = Vec::new();
    if let (Some(per_second), Some(over)) = (figures.bytes_per_second, figures.timed_bytes) {
        let mut part = format!("{} over {}", speed(per_second), bytes(over));
        if let Some(link) = figures.link_bytes_per_second.filter(|link| *link > 0) {
            let percent = per_second as f64 * 100.0 / link as f64;
            let _ = write!(part, ", {percent:.0} % of the links' {}", speed(link));
        }
        parts.push(part);
    }
    if let (Some(one), Some(count)) = (figures.registration_us, figures.registrations) {
        parts.push(format!("{one:.1} µs, median of {count}"));
    }
    if let Some(one) = figures.deregistration_us {
        parts.push(format!("deregistered in {one:.1} µs"));
    }
    if parts.is_empty() {
        parts.push(bytes(figures.bytes?));
    }
    Some(parts.join("; "))
}

fn step_name(step: &Step) -> String {
    match step.way {
        Some(way) => format!("{way}: {}", step.step.text()),
        None => step.step.text(),
    }
}

/// Returns `true` if a step was skipped because GPU memory could not be registered by the step's
/// method ([`super::event::Way`]). The step `register` of this method already reports the failure.
fn follows_only(step: &Step, all: &[Step]) -> bool {
    let registered = all
        .iter()
        .find(|other| other.way == step.way && other.step == Name::Register);
    step.way.is_some()
        && !matches!(step.step, Name::Register | Name::RegisterOnServer)
        && step.outcome == Outcome::NotPossibleHere
        && registered.is_some_and(|register| register.outcome != Outcome::Passed)
}

pub(crate) fn tell(report: &Report, out: &mut Out) -> anyhow::Result<()> {
    let (passed, failed, not_possible_here) = (
        report.count(Outcome::Passed),
        report.count(Outcome::Failed),
        report.count(Outcome::NotPossibleHere),
    );
    if out.is_json() {
        let body = object! {
            passed: passed,
            failed: failed,
            not_possible_here: not_possible_here,
            #[serde(flatten)]
            report: report,
        };
        return out.json(SCHEMA, VERSION, &body);
    }
    for pair in &report.pairs {
        out.gap();
        let name = pair.about.clone().unwrap_or_else(|| {
            let hca = pair.hca.as_deref().map(|hca| format!(", {hca}"));
            format!("{} {}{}", pair.gpu_name, pair.gpu, hca.unwrap_or_default())
        });
        out.line(Paint::Strong.on(format!("GPU {}: {name}", pair.gpu_index)));
        if let Some(Peer {
            role,
            peer,
            peer_about,
        }) = &pair.peer
        {
            let other = match role {
                Role::Client => "server",
                Role::Server => "client",
            };
            let about = peer_about.as_deref().unwrap_or("unknown devices");
            out.line(Paint::Strong.on(format!("{other} {peer}: {about}")));
        }
        let mut table = Table::of("STEP|OUTCOME|SEEN");
        for step in &pair.steps {
            if follows_only(step, &pair.steps) {
                continue;
            }
            let seen = match step.outcome {
                Outcome::Passed => {
                    let parts = [figures(&step.figures), step.found.clone()];
                    parts.into_iter().flatten().collect::<Vec<_>>().join("; ")
                }
                _ => step.found.clone().unwrap_or_default(),
            };
            table.row([step_name(step), outcome(step.outcome), seen]);
        }
        out.table(&table);
    }
    out.gap();
    out.line(format!(
        "{passed} passed, {failed} failed, {not_possible_here} not possible here"
    ));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::event::Way;
    use super::*;

    fn step(outcome: Outcome) -> Step {
        Step {
            way: Some(Way::PeerMemory),
            step: Name::WriteToGpu,
            outcome,
            found: (outcome != Outcome::Passed).then(|| "no\x1broom".to_owned()),
            errno: (outcome == Outcome::Failed).then_some(14),
            figures: Figures {
                bytes: Some(4 << 20),
                timed_bytes: Some(64 << 20),
                bytes_per_second: Some(1_234_567_890),
                link_bytes_per_second: Some(50_000_000_000),
                ..Figures::default()
            },
        }
    }

    fn report(outcomes: &[Outcome], hca: Option<&str>, gpu_only: bool) -> Report {
        Report {
            size: 4 << 20,
            gpu_only,
            pairs: vec![Pair {
                gpu: "0000:3b:00.0".to_owned(),
                gpu_index: 0,
                gpu_name: "a GPU".to_owned(),
                stand_in: false,
                hca: hca.map(str::to_owned),
                about: None,
                peer: None,
                steps: outcomes.iter().map(|outcome| step(*outcome)).collect(),
            }],
        }
    }

    #[test]
    fn a_failed_step_is_a_finding_and_a_skipped_step_is_not() {
        use Outcome::{Failed, NotPossibleHere, Passed};
        let status = |outcomes: &[Outcome], hca, gpu_only| report(outcomes, hca, gpu_only).status();
        let hca = Some("mlx5_0");
        assert_eq!(status(&[Passed], hca, false), Status::Ok);
        assert_eq!(status(&[Passed, NotPossibleHere], hca, false), Status::Ok);
        assert_eq!(status(&[Passed, Failed], hca, false), Status::Findings);
        assert_eq!(status(&[NotPossibleHere], hca, false), Status::Failed);
        assert_eq!(status(&[Passed], None, false), Status::Failed);
        assert_eq!(status(&[Passed], None, true), Status::Ok);
        assert_eq!(status(&[Failed], None, false), Status::Findings);
        assert_eq!(status(&[], None, true), Status::Failed);
        // First, the connection to the server fails, but another step passes. Then, the failed
        // connection is the only step.
        let mut report = report(&[Failed, Passed], hca, false);
        report.pairs[0].steps[0].step = Name::Connect;
        assert_eq!(report.status(), Status::Findings);
        report.pairs[0].steps.truncate(1);
        assert_eq!(report.status(), Status::Failed);
    }

    #[test]
    fn the_other_host_is_named() {
        let mut report = report(&[Outcome::Passed], Some("mlx5_0"), false);
        report.pairs[0].peer = Some(Peer {
            role: Role::Client,
            peer: "there:7".to_owned(),
            peer_about: Some("a GPU\x1b".to_owned()),
        });
        let text = |json| {
            let mut out = Out::gather(json);
            assert!(tell(&report, &mut out).is_ok());
            out.into_text()
        };
        let words = "\nserver there:7: a GPU\\x1b\nSTEP";
        assert!(text(false).contains(words), "{}", text(false));
        let json: serde_json::Value = serde_json::from_str(&text(true)).unwrap_or_default();
        let pair = &json["pairs"][0];
        assert_eq!(pair["role"], "client");
        assert_eq!(
            (&pair["peer"], &pair["peer_about"]),
            (&"there:7".into(), &"a GPU\x1b".into())
        );
    }

    #[test]
    fn the_text_shows_the_results() {
        let mut out = Out::gather(false);
        let report = report(&[Outcome::Passed, Outcome::Failed], Some("mlx5_0"), false);
        assert!(tell(&report, &mut out).is_ok());
        let text = out.into_text();
        for words in [
            "GPU 0: a GPU 0000:3b:00.0, mlx5_0\n",
            "ibv_reg_mr: write_to_gpu",
            "1.23 GB/s over 64 MiB, 2 % of the links' 50.00 GB/s",
            "no\\x1broom",
        ] {
            assert!(text.contains(words), "{words}: {text}");
        }
        let last = "1 passed, 1 failed, 0 not possible here\n";
        assert!(text.ends_with(last), "{text}");
    }

    #[test]
    fn a_method_that_does_not_work_has_one_line() {
        let mut out = Out::gather(false);
        let mut report = report(&[Outcome::NotPossibleHere; 3], Some("mlx5_0"), false);
        for (step, name) in report.pairs[0].steps.iter_mut().zip([
            Name::Register,
            Name::WriteToGpu,
            Name::KilledHolder,
        ]) {
            step.step = name;
        }
        assert!(tell(&report, &mut out).is_ok());
        let text = out.into_text();
        assert_eq!(text.matches("ibv_reg_mr: ").count(), 1, "{text}");
        assert!(text.contains("ibv_reg_mr: register"), "{text}");
        assert!(text.ends_with("3 not possible here\n"), "{text}");
    }

    #[test]
    fn the_json_has_stable_names() {
        let mut out = Out::gather(true);
        let report = report(&[Outcome::Failed], Some("mlx5_0"), false);
        assert!(tell(&report, &mut out).is_ok());
        let json: serde_json::Value = serde_json::from_str(&out.into_text()).unwrap_or_default();
        assert_eq!(json["schema"], "peermemctl.verify");
        assert_eq!(json["version"], 1);
        assert_eq!(json["failed"], 1);
        let step = &json["pairs"][0]["steps"][0];
        assert_eq!(step["step"], "write_to_gpu");
        assert_eq!(step["way"], "peer_memory");
        assert_eq!(step["outcome"], "failed");
        assert_eq!(step["errno"], 14);
        assert_eq!(step["bytes_per_second"], 1_234_567_890_u64);
    }
}
