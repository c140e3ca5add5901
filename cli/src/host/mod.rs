// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! The one way in which anything is read from a machine: this one ([`live::Live`]), or one whose answers were written
//! down ([`recording::Recording`]). What no answer was written down for is [`Unseen::NotRecorded`], never "not
//! there".

pub(crate) mod dcb;
pub(crate) mod facts;
pub(crate) mod live;
pub(crate) mod nldev;
pub(crate) mod recording;

use std::fmt;

use serde::{Deserialize, Serialize};

/// Why something could not be seen.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Unseen {
    /// It is not there, which is an answer.
    Absent,
    /// It takes rights that this process has not.
    Denied,
    /// The recording has no answer.
    NotRecorded,
    /// It is there and could not be read, or not be understood.
    Failed(String),
}

impl fmt::Display for Unseen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Absent => f.write_str("not there"),
            Self::Denied => f.write_str("not visible without root"),
            Self::NotRecorded => f.write_str("not in the recording"),
            Self::Failed(why) => f.write_str(why),
        }
    }
}

impl std::error::Error for Unseen {}

pub(crate) type Seen<T> = Result<T, Unseen>;

/// What no file tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Fact {
    /// The effective user, a number.
    User,
    /// Seconds since boot by the monotonic clock, with a fraction.
    Monotonic,
    /// The kernel's log since boot as `/dev/kmsg` has it: a record a line, `priority,sequence,microseconds,…;text`.
    KernelLog,
    /// What NVML says, as the JSON of [`crate::nvml`].
    Nvml,
    /// Those of `/proc/kallsyms` that tell who has peer memory and dma-buf, a line each without the address:
    /// `T ib_register_peer_memory_client [ib_uverbs]`.
    KernelSymbols,
    /// What the files of the peer-memory module and of those that it calls say, as the JSON of
    /// [`crate::software::files`].
    ModuleFiles,
    /// The running services that hand their limits to users of RDMA, a line each: name, process, and how much memory
    /// it may lock, soft and hard, in bytes, `unlimited`, or `?`.
    Services,
    /// PFC and DSCP of the network interfaces, as the JSON of [`crate::host::dcb`].
    Dcb,
    /// The memory regions that the kernel tracks of each RDMA device, as the JSON of [`crate::host::nldev`].
    MemoryRegions,
    /// The device files of RDMA devices, a line each: RDMA device, file, and `ok`, `absent`, `denied` or `failed WHY`.
    Verbs,
    /// State of NVIDIA's fabric manager: `running` or `not running`.
    FabricManager,
}

/// A machine to ask.
///
/// Paths are absolute. No answer is ever a panic: whatever stands in a file comes back as bytes.
pub(crate) trait Host {
    /// A file's contents, 64 MiB of them at most.
    fn bytes(&self, path: &str) -> Seen<Vec<u8>>;

    /// The names in a directory, sorted.
    fn names(&self, path: &str) -> Seen<Vec<String>>;

    /// What a symbolic link says, as it stands there.
    fn link(&self, path: &str) -> Seen<String>;

    /// Where a path leads when all links are followed.
    fn resolved(&self, path: &str) -> Seen<String>;

    /// What no file tells.
    fn fact(&self, fact: Fact) -> Seen<String>;

    /// Returns `true` for the machine that this program runs on, if nobody records the answers.
    fn is_live(&self) -> bool {
        false
    }

    /// The lines of a file that contain `word`, however long the file is: for `/proc/kallsyms` and its like.
    fn matching(&self, path: &str, word: &str) -> Seen<String>;

    /// A file's contents as text without the blanks around it; what is no UTF-8 is replaced.
    fn text(&self, path: &str) -> Seen<String> {
        Ok(String::from_utf8_lossy(&self.bytes(path)?)
            .trim()
            .to_owned())
    }

    /// Whether something is there. An error: it cannot be told.
    fn has(&self, path: &str) -> Seen<bool> {
        match self.resolved(path) {
            Ok(_) => Ok(true),
            Err(Unseen::Absent) => Ok(false),
            Err(why) => Err(why),
        }
    }

    /// A number in a file: decimal, or with `0x`.
    fn number(&self, path: &str) -> Seen<u64> {
        let text = self.text(path)?;
        number(&text).ok_or_else(|| Unseen::Failed(format!("{path} has no number: {text:?}")))
    }
}

/// Returns the byte behind each line of a file. Variables of a process have a zero behind each.
pub(crate) fn line_end(path: &str) -> u8 {
    match path.ends_with("/environ") {
        true => b'\0',
        false => b'\n',
    }
}

/// A number: decimal, or hexadecimal with `0x`.
pub(crate) fn number(text: &str) -> Option<u64> {
    match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    }
}
