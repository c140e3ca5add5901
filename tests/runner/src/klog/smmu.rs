// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Messages of the SMMUv3 driver about a refused access. QEMU's SMMU gives several events for one
//! access: one for each word that the device reads or writes. The driver prints the first ten
//! events in five seconds.

use super::lines::message;

/// Prefix of all messages of the driver.
pub(super) const DRIVER: &str = "arm-smmu-v3 ";

const BEGINS: &str = "event 0x";

#[derive(Debug, PartialEq, Eq)]
struct Event<'a> {
    client: &'a str,
    /// Read or write, privileged or not.
    access: &'a str,
    addr: u64,
}

impl Event<'_> {
    /// Returns `true` if `next` is a later word of the same access.
    fn goes_on(&self, next: &Self) -> bool {
        const PAGE: u64 = 4096;
        self.client == next.client
            && self.access == next.access
            && self.addr / PAGE == next.addr / PAGE
            && self.addr <= next.addr
    }
}

/// Returns the text of a line of the driver, or `None` for other lines.
fn text(line: &str) -> Option<&str> {
    let (_, text) = message(line).strip_prefix(DRIVER)?.split_once(": ")?;
    Some(text)
}

/// Parses the event that begins with the first of these lines. Returns its number of lines, and its
/// contents if it is an access to an address.
fn event<'a>(lines: &[&'a str]) -> Option<(usize, Option<Event<'a>>)> {
    if !text(lines.first()?)?.starts_with(BEGINS) {
        return None;
    }
    let (mut client, mut addr, mut access) = (None, None, None);
    let mut count = 1;
    while let Some(text) = lines.get(count).and_then(|line| text(line)) {
        if let Some(rest) = text.strip_prefix("event: ") {
            let after = |key| {
                let (_, rest) = rest.split_once(key)?;
                rest.split(' ').next()
            };
            client = after(" client: ");
            addr = after(" iova: 0x").and_then(|digits| u64::from_str_radix(digits, 16).ok());
        } else if text.starts_with("priv ") || text.starts_with("unpriv ") {
            access = Some(text);
        } else if !text.starts_with("\t0x") {
            break;
        }
        count += 1;
    }
    let said = match (client, access, addr) {
        (Some(client), Some(access), Some(addr)) => Some(Event {
            client,
            access,
            addr,
        }),
        _ => None,
    };
    Some((count, said))
}

/// Returns the number of lines at the beginning that belong to one refused access.
pub(super) fn access(lines: &[&str]) -> usize {
    let Some((mut count, first)) = event(lines) else {
        return 0;
    };
    let Some(mut latest) = first else {
        return count;
    };
    loop {
        let rest = lines.get(count..).unwrap_or_default();
        // The driver's rate limit may have suppressed events in the middle of the access.
        let suppressed = rest
            .first()
            .is_some_and(|line| message(line).ends_with(" callbacks suppressed"));
        let skipped = usize::from(suppressed);
        match event(rest.get(skipped..).unwrap_or_default()) {
            Some((more, Some(next))) if latest.goes_on(&next) => {
                count += skipped + more;
                latest = next;
            }
            _ => return count,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{judge, reports, Expectation};

    const BOOT: &str = "\
[    0.270000] arm-smmu-v3 9050000.smmuv3: ias 44-bit, oas 44-bit (features 0x00008325)
[    0.270000] arm-smmu-v3 9050000.smmuv3: allocated 65536 entries for cmdq
[    0.270000] arm-smmu-v3 9050000.smmuv3: allocated 32768 entries for evtq
[    0.270000] arm-smmu-v3 9050000.smmuv3: msi_domain absent - falling back to wired irqs
";

    fn event(read: bool, addr: u64) -> String {
        let smmu = "[   21.500000] arm-smmu-v3 9050000.smmuv3: ";
        let second: u64 = if read { 0x208 << 32 } else { 0x200 << 32 };
        let mut text = format!("{smmu}event 0x10 received:\n");
        for word in [0x28_0000_0010, second, addr, addr & !0xfff] {
            text.push_str(&format!("{smmu}\t0x{word:016x}\n"));
        }
        let access = if read { "read" } else { "write" };
        text + &format!(
            "{smmu}event: F_TRANSLATION client: 0000:00:05.0 sid: 0x28 ssid: 0x0 iova: {addr:#x} ipa: 0x0\n\
             {smmu}unpriv data {access} s1 \"Input address caused fault\" stag: 0x0\n"
        )
    }

    const SUPPRESSED: &str = "[   27.000000] arm_smmu_dump_event: 1014 callbacks suppressed\n";

    #[test]
    fn an_access_is_one_report() {
        let written = [event(false, 0xfff2_2000), event(false, 0xfff2_2004)].concat();
        let read = event(true, 0xfff2_2000);
        let other = event(false, 0xfff3_2000);
        assert!(reports(BOOT).is_empty());
        let lengths = |log: &[&str]| -> Vec<usize> {
            reports(&log.concat())
                .iter()
                .map(|report| report.lines.len())
                .collect()
        };
        assert_eq!(lengths(&[BOOT, &written]), [14]);
        assert_eq!(lengths(&[&written, &read, &other, BOOT]), [14, 7, 7]);
        // Tests the same access again, and an access that continues after the rate limit.
        assert_eq!(lengths(&[&written, SUPPRESSED, &written]), [14, 14]);
        assert_eq!(
            lengths(&[&written, SUPPRESSED, &event(false, 0xfff2_2008)]),
            [22]
        );
        assert!(lengths(&[SUPPRESSED]).is_empty());
    }

    #[test]
    fn accesses_are_declared_by_kind() {
        let log = [
            BOOT,
            &event(false, 0xfff2_2000),
            &event(true, 0xfff2_2000),
            &event(true, 0xfff2_2000),
            &event(true, 0xfff2_2004),
        ]
        .concat();
        let kind = |access: &str, count: usize| -> Expectation {
            let text = format!(r"arm-smmu-v3 \S+: (un)?priv data {access} s1={count}");
            text.parse().unwrap()
        };
        // The three read events belong to one access, because QEMU checks the address once before
        // the access begins.
        assert!(judge(&log, &[kind("write", 1), kind("read", 1)]).is_clean());
        assert!(!judge(&log, &[kind("write", 1), kind("read", 0)]).is_clean());
        assert_eq!(judge(&log, &[kind("read", 1)]).undeclared.len(), 1);
        assert_eq!(judge(&log, &[]).undeclared.len(), 2);
    }

    #[test]
    fn other_problems_are_reports() {
        for text in [
            "event 0x04 received:",
            "unexpected global error reported (0x00000001), this could be serious",
            "CMDQ error (cons 0x01000003): Illegal command",
            "CMD_SYNC timeout at 0x00000003 [hwprod 0x00000004, hwcons 0x00000003]",
            "EVTQ overflow detected -- events lost",
            "EVTQ write aborted -- events may have been lost",
            "device has entered Service Failure Mode!",
            "unexpected PRI request received:",
            "no evtq irq - events will not be reported!",
        ] {
            let line = format!("[    9.0] arm-smmu-v3 9050000.smmuv3: {text}\n");
            assert_eq!(reports(&line).len(), 1, "{text}");
        }
        // Tests an event without an address.
        let smmu = "[    9.0] arm-smmu-v3 9050000.smmuv3: ";
        let log = format!(
            "{smmu}event 0x04 received:\n{smmu}\t0x0000002800000004\n\
             {smmu}event: C_BAD_STE client: 0000:00:05.0 sid: 0x28 ssid: 0x0\n{BOOT}"
        );
        let found = reports(&log);
        assert_eq!((found.len(), found[0].lines.len()), (1, 3));
    }
}
