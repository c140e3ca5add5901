// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Tests of the check `roce-qos`. The healthy machine has eight RoCE ports (rails), and each test
//! injects one fault.

use super::super::tests::each_is_told;
use super::*;
use crate::fixture;
use crate::fixture::{Fixture, ADDRESS, LINK_LOCAL};
use crate::host::Fact;
use crate::testing::faults_of;

/// Eight RoCE rails, two of them near each GPU.
fn rails() -> Fixture {
    let mut fixture = fixture::hgx();
    for (index, bus) in RAILS.into_iter().enumerate() {
        let (hca, netdev) = (format!("mlx5_{index}"), format!("ibp{bus}s0"));
        fixture.roce(&hca, &netdev, 9000, &[LINK_LOCAL, ADDRESS]);
    }
    fixture
}

const RAILS: [u8; 8] = [24, 26, 58, 60, 154, 156, 194, 196];
const FIFTH: &str = "ibp154s0";
const TOS: &str = "/sys/kernel/config/rdma_cm/mlx5_4/ports/1/default_roce_tos";

/// Returns findings worse than ok.
fn bad(change: fn(&mut Fixture)) -> Vec<Finding> {
    let mut fixture = rails();
    change(&mut fixture);
    let findings = fixture.findings(&CHECK).into_iter();
    findings.filter(|one| one.level != Level::Ok).collect()
}

fn by_rule(dscp: u8) -> Option<u8> {
    Some(dscp / 8)
}

#[test]
fn the_settings_of_a_port_are_reported() {
    let well = rails().findings(&CHECK);
    assert_eq!(well.len(), 8);
    assert_eq!(well[4].level, Level::Ok);
    assert_eq!(
        well[4].found,
        "port 1 (ibp154s0): PFC on priority 3 (DSCP 24-31), ECN on priorities 0-7, traffic class 106"
    );
}

faults_of! {
    Fixture;
    "a rail without PFC",
        "warning roce-qos: PFC is not the same on ports of one kind: no priority on mlx5_4 port 1 (ibp154s0); priority 3 \
         on the 7 others fix …`sudo dcb pfc set dev ibp154s0 prio-pfc all:off 3:on`" =>
        |fixture| fixture.dcb(FIFTH, Some(0), by_rule);
    "a rail with PFC on more priorities",
        "warning roce-qos: PFC is not the same on ports of one kind: priorities 3-4, 7 on mlx5_4 port 1 (ibp154s0); \
         priority 3 on the 7 others fix …`sudo dcb pfc set dev ibp154s0 prio-pfc all:off 3:on`" =>
        |fixture| fixture.dcb(FIFTH, Some(0b1001_1000), by_rule);
    "a rail with another priority of a DSCP",
        "warning roce-qos: the priority by DSCP is not the same on ports of one kind: 3 for DSCP 24-29, 31 on mlx5_4 \
         port 1 (ibp154s0); 3 for DSCP 24-31 on the 7 others fix …`sudo dcb app replace dev ibp154s0 dscp-prio 30:3`" =>
        |fixture| fixture.dcb(FIFTH, Some(8), |dscp| Some(if dscp == 30 { 0 } else { dscp / 8 }));
    "a rail with another ECN",
        "warning roce-qos: ECN is not the same on ports of one kind: priorities 0-2, 4-7 (roce_np), priorities 0-7 \
         (roce_rp) on mlx5_4 port 1 (ibp154s0); priorities 0-7 on the 7 others fix …`echo 1 | sudo tee \
         /sys/class/net/ibp154s0/ecn/roce_np/enable/3`",
        "note roce-qos: port 1 (ibp154s0): …(roce_np)" => |fixture| fixture.ecn(FIFTH, 0b1111_0111, 0xff);
    "a rail without a traffic class",
        "warning roce-qos: the traffic class of all queue pairs is not the same on ports of one kind: not set on mlx5_4 \
         port 1 (ibp154s0); 106 on the 7 others fix …`echo 106 | sudo tee \
         /sys/class/infiniband/mlx5_4/tc/1/traffic_class`" =>
        |fixture| fixture.hca_file("mlx5_4", "tc/1/traffic_class", "\n");
    // If no setting has a majority, the finding names no port as wrong.
    "halves that differ",
        "warning roce-qos: PFC …priority 3 on mlx5_0 port 1 (ibp24s0), mlx5_1…priority 4 on mlx5_4 port 1 (ibp154s0), \
         mlx5_5… fix Set all ports as their switches are set",
        "warning roce-qos: the priority by DSCP … fix Set all ports as their switches are set" => |fixture| {
        for bus in RAILS.into_iter().skip(4) {
            let netdev = format!("ibp{bus}s0");
            fixture.dcb(&netdev, Some(16), |dscp| Some(if dscp == 26 { 4 } else { 0 }));
        }
    };
    // A NIC of another model, farther away, may belong to another network.
    "a port of another kind" => |fixture| {
        fixture.dcb("ens1f0np0", Some(0), |_| None);
        fixture.ecn("ens1f0np0", 0, 0);
    };
    "a traffic class without PFC",
        "warning roce-qos: the traffic class of all queue pairs is not the same",
        "warning roce-qos: port 1: the traffic class of all queue pairs is 162 (DSCP 40), and ibp154s0 gives that \
         priority 5; PFC is on priority 3" =>
        |fixture| fixture.hca_file("mlx5_4", "tc/1/traffic_class", "Global tclass=162\n");
    "a traffic class that the interface ignores",
        "warning roce-qos: the priority by DSCP is not the same",
        "warning roce-qos: port 1: the traffic class of all queue pairs is 106 (DSCP 26), and ibp154s0 does not use \
         DSCP (trust state pcp: the tag of a VLAN decides); PFC is on priority 3" =>
        |fixture| fixture.dcb(FIFTH, Some(8), |_| None);
    "RDMA CM's TOS without PFC",
        "warning roce-qos: port 1: RDMA CM's default TOS is 2 (DSCP 0), and ibp154s0 gives that priority 0; PFC is on \
         priority 3" => |fixture| fixture.file(TOS, "2\n");
    "the tag of a VLAN, which may carry the priority",
        "warning roce-qos: the priority by DSCP is not the same",
        "note roce-qos: port 1: the traffic class of all queue pairs" => |fixture| {
        fixture.dcb(FIFTH, Some(8), |_| None);
        let upper = fixture.behind(&format!("net/{FIFTH}")) + "/upper_ibp154s0.100";
        fixture.link(&upper, "../../../../virtual/net/vlan");
    };
    "an unset TOS" => |fixture| fixture.file(TOS, "0\n");
    "a fabric without PFC" => |fixture| {
        for bus in RAILS {
            fixture.dcb(&format!("ibp{bus}s0"), Some(0), |_| None);
        }
    };
    "rules for single destinations" => |fixture| {
        for index in 0..8 {
            let rules = "src_ip=192.0.2.1,tclass=12\n";
            fixture.hca_file(&format!("mlx5_{index}"), "tc/1/traffic_class", rules);
        }
    };
}

#[test]
fn each_fault_is_told_and_nothing_else() {
    each_is_told(FAULTS, rails, |fixture| fixture.findings(&CHECK));
}

#[test]
fn neither_pfc_nor_ecn_is_a_note() {
    let all = |fixture: &mut Fixture, pfc, np, rp| {
        for bus in RAILS {
            fixture.dcb(&format!("ibp{bus}s0"), Some(pfc), by_rule);
            fixture.ecn(&format!("ibp{bus}s0"), np, rp);
        }
    };
    let mut neither = rails();
    all(&mut neither, 0, 0, 0);
    let found = neither.findings(&CHECK);
    assert_eq!(found.len(), 8);
    assert!(found.iter().all(|one| one.level == Level::Note));
    let says = "PFC on no priority, ECN on no priority";
    assert!(found[0].found.contains(says), "{found:#?}");
    // PFC without ECN, or ECN without PFC, may be intended, and is reported as ok.
    for (pfc, ecn) in [(0, 8), (8, 0)] {
        let mut fixture = rails();
        all(&mut fixture, pfc, ecn, ecn);
        let found = fixture.findings(&CHECK);
        assert!(found.iter().all(|one| one.level == Level::Ok), "{found:#?}");
    }
    // Only one half of ECN is configured: the NICs send CNPs, but do not slow down on received
    // CNPs.
    let mut half = rails();
    all(&mut half, 8, 8, 0);
    let found = half.findings(&CHECK);
    assert!(
        found.iter().all(|one| one.level == Level::Note),
        "{found:#?}"
    );
    let says = "ECN: sends CNPs on priority 3 (roce_np), and slows down on received CNPs on no priority (roce_rp)";
    assert!(found[0].found.contains(says), "{found:#?}");
}

/// Unreadable settings are neither good nor bad, and are not compared.
#[test]
fn what_cannot_be_read_is_not_visible() {
    for (change, says) in [
        (
            (|fixture| {
                fixture.fact(Fact::Dcb, "{}");
            }) as fn(&mut Fixture),
            "PFC not visible (the driver does not show it; the driver of a virtual function never does), ECN on \
             priorities 0-7",
        ),
        (
            |fixture| drop(fixture.recording.facts.remove(&Fact::Dcb)),
            "PFC not visible (not in the recording)",
        ),
        (
            |fixture| fixture.fact(Fact::Dcb, "["),
            "PFC not visible (dcbnl's answer is not understood",
        ),
        (
            |fixture| {
                for (bus, hca) in RAILS.into_iter().zip(0..) {
                    let netdev = format!("ibp{bus}s0");
                    let ecn = fixture.behind(&format!("net/{netdev}")) + "/ecn";
                    fixture.remove(&ecn);
                    fixture.dcb(&netdev, Some(0), by_rule);
                    fixture.hca_file(&format!("mlx5_{hca}"), "tc/1/traffic_class", "");
                }
            },
            "PFC on no priority, ECN not visible (OFED's mlx5 driver shows it)",
        ),
    ] {
        let bad = bad(change);
        assert_eq!(bad.len(), 8, "{bad:#?}");
        for finding in bad {
            assert_eq!(finding.level, Level::NotVisible, "{finding:#?}");
            assert!(finding.found.contains(says), "{finding:#?}");
        }
    }
    let one = bad(|fixture| fixture.dcb(FIFTH, None, by_rule));
    assert_eq!(one.len(), 1, "{one:#?}");
    assert_eq!(one[0].level, Level::NotVisible);
}

/// A recording that was edited by hand may have invalid numbers.
#[test]
fn invalid_numbers_cause_no_panic() {
    let mut fixture = rails();
    let said = r#"{"ibp154s0":{"pfc":8,"dscp":{"24":3,"26":8,"40":255,"255":3}}}"#;
    fixture.fact(Fact::Dcb, said);
    let found = fixture.findings(&CHECK);
    let says = "PFC on priority 3 (DSCP 24), ECN";
    assert!(
        found.iter().any(|one| one.found.contains(says)),
        "{found:#?}"
    );
}
