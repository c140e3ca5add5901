// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! PFC and DSCP of network interfaces, from the kernel's dcbnl: the fact
//! [`Dcb`](crate::host::Fact::Dcb), as JSON.
//!
//! The request is that of `mlnx_qos` and of iproute2's `dcb pfc show` and `dcb app show`:
//! `RTM_GETDCB` with `DCB_CMD_IEEE_GET` (Linux's `include/uapi/linux/dcbnl.h` and
//! `net/dcb/dcbnl.c`). The request needs no privileges and changes nothing.

use std::collections::BTreeMap;

use netlink_packet_core::DefaultNla;
use serde::{Deserialize, Serialize};

use super::recording::Recorded;
use super::{Fact, Host, Seen, Unseen};
use crate::netlink::{attributes, Refused, Socket};

/// Network interfaces in sysfs.
pub(crate) const NET: &str = "/sys/class/net";

const RTM_GETDCB: u16 = 78;
const DCB_CMD_IEEE_GET: u8 = 21;
const DCB_ATTR_IFNAME: u16 = 1;
const DCB_ATTR_IEEE: u16 = 13;
const DCB_ATTR_IEEE_PFC: u16 = 2;
const DCB_ATTR_IEEE_APP_TABLE: u16 = 3;
const DCB_ATTR_IEEE_APP: u16 = 1;
const IEEE_8021QAZ_APP_SEL_DSCP: u8 = 5;

/// `struct dcbmsg`: family, command, padding.
const MESSAGE: [u8; 4] = [0, DCB_CMD_IEEE_GET, 0, 0];

/// Settings that the driver of an interface reports.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Dcb {
    /// Priorities with PFC, one bit each. `None`: the driver does not report PFC.
    pub(crate) pfc: Option<u8>,
    /// Priority of each DSCP that the interface maps.
    pub(crate) dscp: BTreeMap<u8, u8>,
}

/// Settings by interface name. Interfaces whose driver does not support DCB are missing.
pub(crate) type Interfaces = BTreeMap<String, Dcb>;

/// Returns the settings that the host's kernel reports.
pub(crate) fn scan(host: &dyn Host) -> Seen<Interfaces> {
    let mut interfaces = Interfaces::of(host)?;
    // A recording may contain any numbers.
    for dcb in interfaces.values_mut() {
        dcb.dscp.retain(|dscp, priority| exists(*dscp, *priority));
    }
    Ok(interfaces)
}

fn exists(dscp: u8, priority: u8) -> bool {
    dscp < 64 && priority < 8
}

impl Recorded for Interfaces {
    const FACT: Fact = Fact::Dcb;
    const MISREAD: &'static str = "dcbnl's answer is not understood";

    fn ask(host: &dyn Host) -> Seen<Self> {
        let failed = |why: Refused| Unseen::Failed(why.to_string());
        let mut socket = Socket::open(None).map_err(failed)?;
        let mut interfaces = Self::new();
        for name in host.names(NET)? {
            let attribute = DefaultNla::new(DCB_ATTR_IFNAME, [name.as_bytes(), b"\0"].concat());
            match socket.ask((RTM_GETDCB, 0), &MESSAGE, &[attribute]) {
                Ok(answer) => {
                    let of_it = answer.first().map(Vec::as_slice).unwrap_or_default();
                    interfaces.insert(name, parse(of_it).map_err(failed)?);
                }
                // Virtual functions have no DCB, and an interface may disappear at any time.
                Err(Refused::Kernel(_)) => {}
                Err(why) => return Err(failed(why)),
            }
        }
        Ok(interfaces)
    }
}

/// Parses an answer without its netlink header.
fn parse(answer: &[u8]) -> Result<Dcb, Refused> {
    let cut = || Refused::Answer("it has no dcbmsg".to_owned());
    let mut dcb = Dcb::default();
    for outer in attributes(answer.get(MESSAGE.len()..).ok_or_else(cut)?) {
        let (DCB_ATTR_IEEE, ieee) = outer? else {
            continue;
        };
        for inner in attributes(ieee) {
            match inner? {
                // `struct ieee_pfc`: number of priorities that support PFC, mask of the priorities
                // that use PFC, and fields that are not read here.
                (DCB_ATTR_IEEE_PFC, pfc) => dcb.pfc = pfc.get(1).copied(),
                (DCB_ATTR_IEEE_APP_TABLE, table) => {
                    for entry in attributes(table) {
                        let (kind, app) = entry?;
                        if let Some((dscp, priority)) =
                            dscp(app).filter(|_| kind == DCB_ATTR_IEEE_APP)
                        {
                            // If a DSCP has several entries, the highest priority is used, as in
                            // mlxsw. mlx5 has one entry for each DSCP.
                            let most = dcb.dscp.entry(dscp).or_default();
                            *most = priority.max(*most);
                        }
                    }
                }
                _ => {}
            }
        }
    }
    Ok(dcb)
}

/// Returns the DSCP and the priority of a `struct dcb_app`: selector, priority, protocol (here the
/// DSCP).
fn dscp(app: &[u8]) -> Option<(u8, u8)> {
    let [IEEE_8021QAZ_APP_SEL_DSCP, priority, dscp @ ..] = *app.first_chunk::<4>()? else {
        return None;
    };
    let dscp = u8::try_from(u16::from_ne_bytes(dscp)).ok()?;
    exists(dscp, priority).then_some((dscp, priority))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::live::Live;
    use crate::netlink::tests::attribute;

    use proptest::prelude::*;

    fn app(selector: u8, priority: u8, protocol: u16) -> Vec<u8> {
        let [low, high] = protocol.to_ne_bytes();
        attribute(DCB_ATTR_IEEE_APP, &[selector, priority, low, high])
    }

    /// Returns an answer as `dcbnl_ieee_fill()` writes it: name, ETS, PFC, table, DCBX.
    fn answer() -> Vec<u8> {
        let mut pfc = vec![8, 0b1000, 0, 0, 7, 0];
        pfc.resize(136, 0xff);
        let table = [
            app(IEEE_8021QAZ_APP_SEL_DSCP, 3, 26),
            app(IEEE_8021QAZ_APP_SEL_DSCP, 1, 26),
            app(IEEE_8021QAZ_APP_SEL_DSCP, 6, 48),
            // These entries are ignored: RoCE v2 by its UDP port, then two invalid DSCPs, then an
            // invalid priority.
            app(3, 5, 4791),
            app(IEEE_8021QAZ_APP_SEL_DSCP, 1, 64),
            app(IEEE_8021QAZ_APP_SEL_DSCP, 1, 256),
            app(IEEE_8021QAZ_APP_SEL_DSCP, 8, 1),
        ];
        let ieee = [
            attribute(1, &[0; 59]),
            attribute(DCB_ATTR_IEEE_PFC, &pfc),
            attribute(DCB_ATTR_IEEE_APP_TABLE, &table.concat()),
        ];
        [
            MESSAGE.to_vec(),
            attribute(DCB_ATTR_IFNAME, b"ens1f0np0\0"),
            attribute(DCB_ATTR_IEEE, &ieee.concat()),
            attribute(14, &[9]),
        ]
        .concat()
    }

    #[test]
    fn pfc_and_dscp_are_read() {
        let dcb = Dcb {
            pfc: Some(0b1000),
            dscp: [(26, 3), (48, 6)].into(),
        };
        assert_eq!(parse(&answer()), Ok(dcb.clone()));
        // The driver reports neither attribute. Newer kernels set the nested flag.
        let bare = |kind| [MESSAGE.to_vec(), attribute(kind, &[])].concat();
        assert_eq!(parse(&bare(DCB_ATTR_IEEE)), Ok(Dcb::default()));
        assert_eq!(parse(&bare(0x8000 | DCB_ATTR_IEEE)), Ok(Dcb::default()));
        let text = serde_json::to_string(&dcb).unwrap();
        assert_eq!(text, r#"{"pfc":8,"dscp":{"26":3,"48":6}}"#);
        assert_eq!(serde_json::from_str::<Dcb>(&text).unwrap(), dcb);
    }

    /// Asks this machine's kernel about every interface. The loopback interface has no DCB.
    #[test]
    fn this_kernel_is_asked() {
        let said = Interfaces::ask(&Live).unwrap();
        assert!(!said.contains_key("lo"), "{said:?}");
    }

    proptest! {
        #[test]
        fn no_answer_is_a_panic(
            at in any::<prop::sample::Index>(),
            with in prop::collection::vec(any::<u8>(), 0..40),
        ) {
            let mut bytes = answer();
            let at = at.index(bytes.len());
            let _ = parse(&bytes[..at]);
            for (byte, with) in bytes[at..].iter_mut().zip(&with) {
                *byte = *with;
            }
            let _ = parse(&bytes);
            let _ = parse(&with);
        }
    }
}
