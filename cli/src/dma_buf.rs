// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! The kernel's list of dma-bufs, `/sys/kernel/debug/dma_buf/bufinfo`: their exporters and attached
//! devices.
//!
//! The format is that of `dma_buf_debug_show` in `drivers/dma-buf/dma-buf.c` of Linux 7.3.

use crate::debugfs;
use crate::debugfs::Missing;
use crate::host::{Host, Seen, Unseen};

pub(crate) const FILE: &str = "/sys/kernel/debug/dma_buf/bufinfo";

/// A dma-buf.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Buffer {
    pub(crate) bytes: u64,
    /// Name of the exporter, usually a driver.
    pub(crate) exporter: String,
    /// Attached devices, once per attachment. A PCI device appears as its address, any other device
    /// as its name.
    pub(crate) attached: Vec<String>,
}

impl Buffer {
    /// Returns `true` if the dma-buf is memory of an NVIDIA GPU. nvidia.ko's `nv-dmabuf.c` sets the
    /// exporter's name.
    ///
    /// Older drivers (570.124.04) keep the default of `DEFINE_DMA_BUF_EXPORT_INFO`, which is the
    /// module's name.
    pub(crate) fn is_gpu(&self) -> bool {
        matches!(self.exporter.as_str(), "nv_dmabuf" | "nvidia")
    }
}

/// Reads all dma-bufs.
pub(crate) fn scan(host: &dyn Host) -> Seen<Vec<Buffer>> {
    match host.bytes(FILE) {
        Ok(bytes) => parse(&String::from_utf8_lossy(&bytes)).map_err(Unseen::Failed),
        Err(Unseen::Absent) => match debugfs::is_mounted(host) {
            // The kernel was built without dma-buf.
            Ok(()) => Ok(Vec::new()),
            Err(Missing::Denied) => Err(Unseen::Denied),
            Err(why) => Err(Unseen::Failed(why.to_string())),
        },
        Err(why) => Err(why),
    }
}

/// A parsed line of the file. The file contains the names that users give to dma-bufs, and such a
/// name may contain line breaks. The parser therefore accepts a line only where the format allows
/// the line.
///
/// No name can imitate a record, because the digits of a valid record do not fit into a name.
enum Line<'a> {
    Record {
        bytes: u64,
        exporter: &'a str,
    },
    /// Header of the list of devices.
    Attached,
    Device(&'a str),
    /// Number of attached devices.
    Devices(u64),
    /// Number of dma-bufs, and their total size in bytes.
    All(u64, u64),
    Other,
}

impl<'a> Line<'a> {
    fn parse(line: &'a str) -> Self {
        if let Some(indented) = line.strip_prefix('\t') {
            return match indented {
                "Attached Devices:" => Self::Attached,
                device => Self::Device(device),
            };
        }
        if let Some(total) = line.strip_prefix("Total ") {
            let words: Vec<&str> = total.split(' ').collect();
            let number = |word: &str| word.parse().ok();
            let total = match words.as_slice() {
                [count, "devices", "attached"] => number(count).map(Self::Devices),
                [count, "objects,", bytes, "bytes"] => number(count)
                    .zip(number(bytes))
                    .map(|(count, bytes)| Self::All(count, bytes)),
                _ => None,
            };
            return total.unwrap_or(Self::Other);
        }
        Self::record(line).unwrap_or(Self::Other)
    }

    /// Parses size, flags, mode, references and exporter. The inode and the name follow.
    fn record(line: &'a str) -> Option<Self> {
        let mut fields = line.split('\t');
        let mut number = |radix| {
            let field = fields.next().filter(|field| field.len() >= 8)?;
            u64::from_str_radix(field, radix).ok()
        };
        let (bytes, _flags, _mode, _references) =
            (number(10)?, number(16)?, number(16)?, number(10)?);
        Some(Self::Record {
            bytes,
            exporter: fields.next()?,
        })
    }
}

/// Returns each line in raw and in parsed form. A line is parsed as a device only inside a list of
/// devices.
fn lines(text: &str) -> impl Iterator<Item = (&str, Line<'_>)> {
    let mut is_attached = false;
    text.lines().map(move |line| {
        let was_attached = is_attached;
        let meaning = Line::parse(line);
        match meaning {
            Line::Attached => is_attached = true,
            Line::Record { .. } | Line::Devices(_) => is_attached = false,
            _ => {}
        }
        match meaning {
            Line::Device(_) | Line::Devices(_) if !was_attached => (line, Line::Other),
            meaning => (line, meaning),
        }
    })
}

fn parse(text: &str) -> Result<Vec<Buffer>, String> {
    let mut buffers: Vec<Buffer> = Vec::new();
    let mut total = None;
    for (_, line) in lines(text) {
        match (line, buffers.last_mut()) {
            (Line::Record { bytes, exporter }, _) => buffers.push(Buffer {
                bytes,
                exporter: exporter.to_owned(),
                attached: Vec::new(),
            }),
            (Line::Attached, Some(buffer)) => buffer.attached.clear(),
            (Line::Device(device), Some(buffer)) => buffer.attached.push(device.to_owned()),
            (Line::Devices(count), Some(buffer))
                if u64::try_from(buffer.attached.len()) != Ok(count) =>
            {
                return Err(format!(
                    "the number of devices listed in {FILE} differs from the file's own count"
                ));
            }
            (Line::All(count, bytes), _) => total = Some((count, bytes)),
            _ => {}
        }
    }
    let bytes = buffers
        .iter()
        .fold(0, |sum: u64, one| sum.saturating_add(one.bytes));
    let count = u64::try_from(buffers.len()).unwrap_or(u64::MAX);
    match total {
        Some(total) if total == (count, bytes) => Ok(buffers),
        Some(_) => Err(format!(
            "the dma-bufs listed in {FILE} differ from the file's own totals"
        )),
        None => Err(format!("{FILE} is incomplete")),
    }
}

/// Removes the names that users gave to dma-bufs, and all lines that `parse` ignores.
pub(crate) fn without_names(text: &str) -> String {
    let mut kept = String::new();
    for (line, meaning) in lines(text) {
        match meaning {
            Line::Other => continue,
            Line::Record { .. } => {
                let fields: Vec<&str> = line.split('\t').take(6).collect();
                kept.push_str(&fields.join("\t"));
            }
            _ => kept.push_str(line),
        }
        kept.push('\n');
    }
    kept
}

#[cfg(test)]
pub(crate) mod tests {
    use std::fmt::Write as _;

    use super::*;

    use proptest::prelude::*;

    /// Formats the file as the kernel does. Each dma-buf has an exporter, a name, a size in bytes,
    /// and attached devices.
    pub(crate) fn bufinfo(buffers: &[(&str, &str, u64, &[&str])]) -> String {
        let mut text = "\nDma-buf Objects:\nsize    \tflags   \tmode    \tcount   \texp_name\tino     \tname\n".to_owned();
        for (inode, (exporter, name, bytes, attached)) in buffers.iter().enumerate() {
            let _ = write!(
                text,
                "{bytes:08}\t00000002\t00080007\t{:08}\t{exporter}\t{inode:08}\t{name}\n\
                 \twrite fence:nvidia fence seq 7 signalled\n\tAttached Devices:\n",
                attached.len() + 1
            );
            for device in *attached {
                let _ = writeln!(text, "\t{device}");
            }
            let _ = write!(text, "Total {} devices attached\n\n", attached.len());
        }
        let bytes: u64 = buffers.iter().map(|(_, _, bytes, _)| bytes).sum();
        let _ = write!(text, "\nTotal {} objects, {bytes} bytes\n", buffers.len());
        text
    }

    #[test]
    fn exporters_and_devices_are_read() {
        let text = bufinfo(&[
            (
                "nv_dmabuf",
                "<none>",
                2 << 30,
                &["0000:18:00.0", "0000:18:00.0"],
            ),
            ("udmabuf", "frames", 65_536, &[]),
            ("nvidia", "<none>", 4096, &["0000:1a:00.0"]),
        ]);
        let read = parse(&text).unwrap();
        let read: Vec<_> = read
            .iter()
            .map(|one| (one.is_gpu(), one.bytes, one.attached.join(" ")))
            .collect();
        assert_eq!(
            read,
            [
                (true, 2 << 30, "0000:18:00.0 0000:18:00.0".to_owned()),
                (false, 65_536, String::new()),
                (true, 4096, "0000:1a:00.0".to_owned()),
            ]
        );
        assert_eq!(parse(&bufinfo(&[])), Ok(Vec::new()));
        // Kernels before 4.19 print neither inode nor name.
        let older = "\nDma-buf Objects:\nsize    \tflags   \tmode    \tcount   \texp_name\n\
                     04194304\t00000002\t00000007\t00000002\tnvidia\n\tAttached Devices:\n\t0000:18:00.0\n\
                     Total 1 devices attached\n\n\nTotal 1 objects, 4194304 bytes\n";
        assert_eq!(parse(older).unwrap().len(), 1);
    }

    /// `DMA_BUF_SET_NAME` accepts 31 bytes, including line breaks.
    #[test]
    fn the_name_of_a_dma_buf_changes_nothing() {
        let plain = |name: &str| {
            bufinfo(&[
                ("udmabuf", name, 65_536, &["0000:18:00.0"]),
                ("nv_dmabuf", "<none>", 4096, &["0000:1a:00.0"]),
            ])
        };
        let expected = parse(&plain("x")).unwrap();
        for name in [
            "\n1\t0\t0\t1\tnvidia\t1\tx",
            "\n00000001\t0\t0\t1\tnv_dmabuf\t",
            "\n\tAttached Devices:",
            "\n\tAttached Devices:\n\t0000:19",
            "\n\t0000:19:00.0",
            "\nTotal 9 devices attached",
            "\nTotal 0 objects, 0 bytes",
            "\t\t\n\n\t",
        ] {
            assert!(name.len() < 32, "{name:?}");
            let text = plain(name);
            assert_eq!(parse(&text).as_ref(), Ok(&expected), "{name:?}");
            assert_eq!(
                parse(&without_names(&text)).as_ref(),
                Ok(&expected),
                "{name:?}"
            );
        }
        assert!(!without_names(&plain("project-x")).contains("project-x"));
    }

    #[test]
    fn a_list_with_wrong_totals_is_an_error() {
        let text = bufinfo(&[("nv_dmabuf", "<none>", 4096, &["0000:18:00.0"])]);
        for (from, to) in [
            ("Total 1 objects", "Total 2 objects"),
            ("4096 bytes", "8192 bytes"),
            ("Total 1 devices", "Total 0 devices"),
        ] {
            assert!(parse(&text.replace(from, to)).is_err(), "{to}");
        }
        for length in 0..text.len() - 1 {
            assert!(parse(&text[..length]).is_err(), "{length}");
        }
    }

    proptest! {
        #[test]
        fn no_text_is_a_panic(text in "(\\PC|[\t\n0-9a-f ]){0,200}") {
            let _ = parse(&text);
            without_names(&text);
        }

        #[test]
        fn no_name_changes_the_result(name in "(\\PC|[\t\n0-9:. ]|Total |objects|Attached Devices:){0,20}") {
            let name: String = name.chars().take(7).collect();
            let text = bufinfo(&[("udmabuf", &name, 65_536, &["0000:18:00.0"])]);
            let read = parse(&text).unwrap();
            prop_assert_eq!(read.len(), 1);
            prop_assert_eq!(&read[0].exporter, "udmabuf");
            prop_assert_eq!(read, parse(&without_names(&text)).unwrap());
        }
    }
}
