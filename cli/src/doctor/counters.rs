// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Error counters of ports and PCI functions: growth with `--interval`, totals without
//! `--interval`.
//!
//! A total does not say when errors happened: the errors of a replaced cable remain in the total.
//! Only growth is therefore a warning.

use super::port;
use super::scan::{check, Scan};
use crate::finding::{argument, Finding, Level, Subject};
use crate::machine::counters::{Counters, Kind, COUNTERS};
use crate::machine::pci::Address;
use crate::machine::Hca;

check! {
    "counters": "errors that ports, GPUs and NICs have counted; with --interval, whether the counts grow",
    |scan| scan.has_hca() || scan.has_gpu(), errors, OwnTest
}

/// Number of errors per second that a healthy fabric may show.
const FEW: f64 = 1.0;
/// Number of symbol errors or corrected PCI errors per minute that a healthy link may show. FEC and
/// replays correct such errors.
const CORRECTED: f64 = 2.0;

fn errors(scan: &Scan<'_>) -> Vec<Finding> {
    let now = Counters::scan(scan.host, scan.machine);
    let mut findings = Vec::new();
    let since = |earlier: &Counters| match (earlier.when, now.when) {
        (Some(then), Some(now)) if now > then => Some(now - then),
        _ => None,
    };
    let seconds = scan.earlier.as_ref().and_then(since);
    for hca in scan.hcas() {
        for port in &hca.ports {
            let key = (hca.name.clone(), port.number);
            let Some(values) = now.ports.get(&key) else {
                continue;
            };
            let before = scan
                .earlier
                .as_ref()
                .and_then(|earlier| earlier.ports.get(&key));
            match (seconds, before) {
                (Some(seconds), Some(before)) => {
                    findings.extend(growth(hca, port.number, before, values, seconds));
                }
                _ => findings.push(totals(hca, port.number, values)),
            }
        }
    }
    for (at, errors) in &now.errors {
        let before = scan.earlier.as_ref().and_then(|it| it.errors.get(at));
        let subject = match (scan.gpu(*at), scan.hcas().find(|hca| hca.at == Some(*at))) {
            (Some(gpu), _) if scan.gpus().any(|one| one.at == gpu.at) => Subject::gpu(gpu),
            (_, Some(hca)) => Subject::hca(hca),
            _ => continue,
        };
        findings.push(of_pci(*at, before, errors, seconds, subject));
    }
    findings
}

/// Returns the names and values of the nonzero counters of one kind.
fn listed(values: &[Option<u64>], kind: Kind) -> Vec<(&'static str, u64)> {
    let counters = COUNTERS.iter().zip(values);
    counters
        .filter(|(counter, _)| counter.kind == kind)
        .filter_map(|(counter, value)| Some((counter.name, (*value)?)))
        .filter(|(_, value)| *value > 0)
        .collect()
}

fn named(counters: &[(&str, u64)], sign: &str) -> String {
    let each: Vec<String> = counters
        .iter()
        .map(|(name, value)| format!("{name} {sign}{value}"))
        .collect();
    each.join(", ")
}

/// Kinds of counters that count errors. All other kinds measure traffic or waiting time.
const OF_ERRORS: [Kind; 5] = [
    Kind::Link,
    Kind::Discard,
    Kind::Loss,
    Kind::Congestion,
    Kind::Receiver,
];

fn totals(hca: &Hca, port: u32, values: &[Option<u64>]) -> Finding {
    let all: Vec<(&str, u64)> = OF_ERRORS
        .iter()
        .flat_map(|kind| listed(values, *kind))
        .collect();
    match all.is_empty() {
        true => Subject::hca(hca).ok(format!("port {port} has counted no errors")),
        false => Subject::hca(hca).note(format!("port {port} has counted {}", named(&all, "")))
        .why("The totals date from the loading of the driver or the last reset; some counters stop at their highest \
             value. A total does not say when the errors occurred.")
        .fix("`peermemctl doctor --interval 10` says whether the counters grow"),
    }
}

fn growth(
    hca: &Hca,
    port: u32,
    before: &[Option<u64>],
    now: &[Option<u64>],
    seconds: f64,
) -> Vec<Finding> {
    // A smaller value means that the counter was reset.
    let more: Vec<Option<u64>> = before
        .iter()
        .zip(now)
        .map(|(before, now)| (*now)?.checked_sub((*before)?))
        .collect();
    let mut findings = Vec::new();
    for kind in OF_ERRORS {
        let grown = listed(&more, kind);
        if grown.is_empty() {
            continue;
        }
        let sum = grown
            .iter()
            .fold(0_u64, |sum, (_, more)| sum.saturating_add(*more));
        let has = |name: &str| grown.iter().any(|(grown, _)| *grown == name);
        let level = match kind {
            Kind::Link if grown.iter().all(|(name, _)| *name == "symbol_error") => {
                above(sum, seconds, CORRECTED / 60.0)
            }
            Kind::Link | Kind::Discard => Level::Warning,
            Kind::Loss if has("req_transport_retries_exceeded") => Level::Warning,
            Kind::Loss => above(sum, seconds, FEW),
            // The fabric works as intended, but is slower.
            _ => Level::Note,
        };
        let found = format!("port {port} in {seconds:.0} s: {}", named(&grown, "+"));
        let finding = Finding::new(level, Subject::hca(hca), found);
        findings.push(match kind {
            Kind::Link => finding
                .why(
                    "The link loses bits: a cable or transceiver is bad, or not plugged in well. Each time the link \
                     goes down or recovers, all transfers over the link wait.",
                )
                .fix(port::cable(hca)),
            Kind::Discard => finding
                .why(
                    "The port discarded packets: its peer accepted none for too long, or is down. On InfiniBand, the \
                     cause is congestion farther on in the fabric.",
                )
                .fix(port::cable(hca)),
            Kind::Loss => finding
                .why(
                    "Packets are lost or arrive late, and are sent again; a collective waits for each of them. On \
                     Ethernet, look for drops at the switch: PFC and ECN must be set for the same priority on every \
                     hop. out_of_sequence alone also grows with adaptive routing.",
                )
                .fix(match hca.ports.iter().flat_map(|port| &port.netdevs).next() {
                    Some(netdev) => format!(
                        "`ethtool -S {} | grep -e discard -e pause -e out_of_buffer`, and the same counters of the \
                         switch's port",
                        argument(netdev)
                    ),
                    None => port::cable(hca),
                }),
            Kind::Congestion => finding.why(
                "Congestion control is active: a receiver or link of the fabric gets more packets than it can take.",
            ),
            _ => finding.why(
                "The receiving program did not post a buffer in time: the program or its processor is slow.",
            ),
        });
    }
    if findings.is_empty() {
        findings
            .push(Subject::hca(hca).ok(format!("port {port} counted no errors in {seconds:.0} s")));
    }
    findings
}

fn above(count: u64, seconds: f64, per_second: f64) -> Level {
    // CAST: The conversion is exact up to 2^53.
    match count as f64 / seconds > per_second {
        true => Level::Warning,
        false => Level::Note,
    }
}

fn of_pci(
    at: Address,
    before: Option<&Vec<(&'static str, String, u64)>>,
    now: &[(&'static str, String, u64)],
    seconds: Option<f64>,
    subject: Subject,
) -> Finding {
    let compared = before.zip(seconds);
    let count = |(severity, name, count): &(&'static str, String, u64)| match compared {
        Some((before, _)) => {
            let mut same = before.iter();
            let was = same.find(|(its, named, _)| (its, named) == (severity, name));
            count.saturating_sub(was.map_or(0, |(_, _, was)| *was))
        }
        None => *count,
    };
    let errors: Vec<(&'static str, &str, u64)> = now
        .iter()
        .map(|error| (error.0, error.1.as_str(), count(error)))
        .filter(|(_, _, count)| *count > 0)
        .collect();
    let period = match compared {
        Some((_, seconds)) => format!("in {seconds:.0} s"),
        None => "since boot".to_owned(),
    };
    if errors.is_empty() {
        return subject.ok(format!("{at} had no PCI errors {period}"));
    }
    let corrected = errors
        .iter()
        .filter(|(severity, ..)| *severity == "correctable");
    let corrected = corrected.fold(0_u64, |sum, (.., count)| sum.saturating_add(*count));
    let is_worse = errors
        .iter()
        .any(|(severity, ..)| *severity != "correctable");
    let level = match compared {
        Some(_) if is_worse => Level::Warning,
        Some((_, seconds)) => above(corrected, seconds, CORRECTED / 60.0),
        None => Level::Note,
    };
    let each: Vec<String> = errors
        .iter()
        .map(|(severity, name, count)| format!("{name} {count} ({severity})"))
        .collect();
    let found = format!("{at} had PCI errors {period}: {}", each.join(", "));
    Finding::new(level, subject, found)
        .why(
            "Each corrected error is a packet that was sent again. Many corrected errors, or any uncorrected error, \
             mean a bad contact, riser or cable.",
        )
        .fix(format!(
            "Reseat the device, check riser and cable; `dmesg | grep -i -e aer -e {at}` shows when"
        ))
}

#[cfg(test)]
mod tests {
    use super::super::run_all;
    use super::super::tests::printed;
    use super::*;
    use crate::finding::Level;
    use crate::machine::Machine;
    use crate::{fixture, testing};

    /// Reads the small machine's counters, applies a change, and reads the counters again ten
    /// seconds later. Returns the text and the findings.
    fn counted(change: impl Fn(&mut fixture::Fixture)) -> (String, Vec<(Level, String)>) {
        let mut fixture = fixture::small();
        fixture.counters("mlx5_0", &[("symbol_error", 7), ("port_rcv_data", 1000)]);
        fixture.errors(
            "0000:18:00.0",
            "correctable",
            "RxErr 3\nBadTLP 0\nTOTAL_ERR_COR 3\n",
        );
        let machine = Machine::scan(&fixture.recording).unwrap();
        let earlier = Counters::scan(&fixture.recording, &machine);
        fixture.fact(crate::host::Fact::Monotonic, "3610.000000000");
        change(&mut fixture);
        let mut scan = Scan::new(&fixture.recording, &machine);
        scan.earlier = Some(earlier);
        let findings = run_all(&scan, [&CHECK].into_iter());
        findings.iter().for_each(testing::commands_are_marked);
        let text = printed(&scan, &findings, false);
        let told = findings.into_iter();
        let told = told.map(|finding| (finding.level, finding.found));
        (text, told.collect())
    }

    #[test]
    fn the_output_for_growing_counters_is_as_before() {
        let (text, _) = counted(|fixture| {
            let values = [
                ("symbol_error", 96),
                ("link_downed", 1),
                ("out_of_sequence", 812),
                ("local_ack_timeout_err", 31),
                ("np_cnp_sent", 4000),
            ];
            fixture.counters("mlx5_0", &values);
            fixture.errors("0000:19:00.0", "correctable", "RxErr 0\nBadTLP 41\n");
        });
        testing::golden(
            "golden/counters.txt",
            &format!("$ peermemctl doctor --interval 10 --only counters\n{text}"),
        );
    }

    /// The level of a finding depends on the kind of the growing counter and on the rate of growth.
    #[test]
    fn counters_are_judged_by_their_growth() {
        // In the row with `symbol_error=0`, the counter was reset between the two readings.
        for [values, level, says] in testing::table(
            "symbol_error=7 | ok | port 1 counted no errors in 10 s
             symbol_error=7 port_xmit_data=99 | ok | port 1 counted no errors in 10 s
             symbol_error=0 | ok | port 1 counted no errors in 10 s
             symbol_error=8 | warning | port 1 in 10 s: symbol_error +1
             symbol_error=7 link_downed=1 link_error_recovery=2 | warning | port 1 in 10 s: link_downed +1, link_error_recovery +2
             symbol_error=7 port_xmit_discards=4 | warning | port_xmit_discards +4
             symbol_error=7 out_of_sequence=5 | note | out_of_sequence +5
             symbol_error=7 packet_seq_err=6 local_ack_timeout_err=6 | warning | packet_seq_err +6, local_ack_timeout_err +6
             symbol_error=7 req_transport_retries_exceeded=1 | warning | req_transport_retries_exceeded +1
             symbol_error=7 np_cnp_sent=4000 rp_cnp_handled=10 | note | np_cnp_sent +4000, rp_cnp_handled +10
             symbol_error=7 rnr_nak_retry_err=30 | note | rnr_nak_retry_err +30",
        ) {
            let values = values.split(' ').map(|one| one.split_once('=').unwrap());
            let values: Vec<(&str, u64)> =
                values.map(|(name, value)| (name, value.parse().unwrap())).collect();
            let (_, told) = counted(|fixture| fixture.counters("mlx5_0", &values));
            let [port, pci] = &told[..] else { panic!("{values:?}: {told:?}") };
            assert_eq!(port.0.name(), level, "{values:?}: {told:?}");
            assert!(port.1.ends_with(says), "{values:?}: {told:?}");
            assert_eq!(pci.0, Level::Ok, "{told:?}");
            assert_eq!(pci.1, "0000:18:00.0 had no PCI errors in 10 s");
        }
        for (severity, text, says) in [
            (
                "correctable",
                "RxErr 3\nBadTLP 2\n",
                "BadTLP 2 (correctable)",
            ),
            (
                "nonfatal",
                "CmpltTO 1\nTOTAL_ERR_NONFATAL 1\n",
                "CmpltTO 1 (nonfatal)",
            ),
        ] {
            let (_, told) = counted(|fixture| fixture.errors("0000:18:00.0", severity, text));
            let found = format!("0000:18:00.0 had PCI errors in 10 s: {says}");
            assert_eq!(told.first(), Some(&(Level::Warning, found)), "{told:?}");
        }
        // A device whose counters have disappeared causes no finding.
        let (_, told) = counted(|fixture| fixture.remove("/sys/class/infiniband/mlx5_0"));
        assert_eq!(told.len(), 1, "{told:?}");
    }

    /// Without a second reading, totals are only a note.
    #[test]
    fn totals_of_counters_cause_no_warning() {
        let mut fixture = fixture::small().with_software();
        fixture.counters("mlx5_0", &[("link_downed", 3), ("symbol_error", 65_535)]);
        fixture.errors("0000:19:00.0", "fatal", "DLP 1\nTOTAL_ERR_FATAL 1\n");
        fixture.session(
            "0$ doctor --all --only counters
             mlx5_0: port 1 has counted link_downed 3, symbol_error 65535
             peermemctl doctor --interval 10
             GPU 0: 0000:19:00.0 had PCI errors since boot: DLP 1 (fatal)
             0$ doctor --interval 1",
        );
        // A recording does not change during the interval.
        let line = "peermemctl doctor --interval 1 --machine x.json".split(' ');
        assert!(<crate::args::Cli as clap::Parser>::try_parse_from(line).is_err());
    }
}
