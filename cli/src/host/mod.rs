// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Access to a machine, either this one ([`live::Live`]) or a recorded one
//! ([`recording::Recording`]). An answer that a recording lacks is [`Unseen::NotRecorded`], never
//! [`Unseen::Absent`].

pub(crate) mod address;
pub(crate) mod dcb;
pub(crate) mod facts;
pub(crate) mod live;
pub(crate) mod module_files;
pub(crate) mod nldev;
pub(crate) mod nvml;
pub(crate) mod recording;

use serde::{Deserialize, Serialize};

/// Reason why something could not be read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Unseen {
    /// The path or value does not exist, which is a valid answer.
    #[error("not there")]
    Absent,
    /// This process lacks the privileges.
    #[error("not visible without root")]
    Denied,
    /// The recording has no answer.
    #[error("not in the recording")]
    NotRecorded,
    /// The value exists, but could not be read or parsed.
    #[error("{0}")]
    Failed(String),
}

pub(crate) type Seen<T> = Result<T, Unseen>;

/// A fact that is not the contents of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Fact {
    /// Effective user ID.
    User,
    /// Seconds since boot on the monotonic clock, with a fraction.
    Monotonic,
    /// Kernel log since boot in the format of `/dev/kmsg`, with one record on each line:
    /// `priority,sequence,microseconds,…;text`.
    KernelLog,
    /// NVML's answers, as the JSON of [`nvml`].
    Nvml,
    /// Symbols of `/proc/kallsyms` that show which modules support peer memory and dma-buf. Each
    /// line is a symbol without its address: `T ib_register_peer_memory_client [ib_uverbs]`.
    KernelSymbols,
    /// Contents of the files of the peer-memory module and of the modules that it calls, as the
    /// JSON of [`module_files`].
    ModuleFiles,
    /// Running services whose limits RDMA processes inherit. Each line has name, process ID, and
    /// the soft and hard limit on locked memory. A limit is a number of bytes, `unlimited`, or `?`.
    Services,
    /// PFC and DSCP of the network interfaces, as the JSON of [`dcb`].
    Dcb,
    /// Memory regions that the kernel tracks for each RDMA device, as the JSON of [`nldev`].
    MemoryRegions,
    /// Device files of RDMA devices. Each line has the RDMA device, the file, and `ok`, `absent`,
    /// `denied` or `failed WHY`.
    Verbs,
    /// State of NVIDIA's fabric manager: `running` or `not running`.
    FabricManager,
}

/// A machine that the program reads.
///
/// Paths are absolute. Files are returned as bytes, so no contents cause a panic.
pub(crate) trait Host {
    /// Returns the contents of a file, 64 MiB at most.
    fn bytes(&self, path: &str) -> Seen<Vec<u8>>;

    /// Returns the names in a directory, sorted.
    fn names(&self, path: &str) -> Seen<Vec<String>>;

    /// Returns the target of a symbolic link, unchanged.
    fn link(&self, path: &str) -> Seen<String>;

    /// Returns a path with all symbolic links followed.
    fn resolved(&self, path: &str) -> Seen<String>;

    fn fact(&self, fact: Fact) -> Seen<String>;

    /// Returns `true` if this is the machine that the program runs on and its answers are not being
    /// recorded.
    fn is_live(&self) -> bool {
        false
    }

    /// Returns the lines of a file that contain `word`. The file may be long, like
    /// `/proc/kallsyms`.
    fn matching(&self, path: &str, word: &str) -> Seen<String>;

    /// Returns the contents of a file as text without surrounding blanks. Invalid UTF-8 is
    /// replaced.
    fn text(&self, path: &str) -> Seen<String> {
        Ok(String::from_utf8_lossy(&self.bytes(path)?)
            .trim()
            .to_owned())
    }

    /// Returns `true` if the path exists, or an error if the answer is unknown.
    fn has(&self, path: &str) -> Seen<bool> {
        match self.resolved(path) {
            Ok(_) => Ok(true),
            Err(Unseen::Absent) => Ok(false),
            Err(why) => Err(why),
        }
    }

    /// Returns the process IDs, sorted as text.
    fn processes(&self) -> Seen<Vec<u32>> {
        let names = self.names("/proc")?;
        Ok(names.iter().filter_map(|name| name.parse().ok()).collect())
    }

    /// Returns the number in a file: decimal, or hexadecimal with `0x`.
    fn number(&self, path: &str) -> Seen<u64> {
        let text = self.text(path)?;
        number(&text).ok_or_else(|| Unseen::Failed(format!("{path} has no number: {text:?}")))
    }
}

/// Returns the byte that ends each line of a file: zero in the environment of a process, a line
/// feed in all other files.
pub(crate) fn line_end(path: &str) -> u8 {
    match path.ends_with("/environ") {
        true => b'\0',
        false => b'\n',
    }
}

/// Returns the value of a line that begins with `key`, without surrounding blanks.
pub(crate) fn field<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    text.lines()
        .find_map(|line| line.strip_prefix(key))
        .map(str::trim)
}

/// Parses a number: decimal, or hexadecimal with `0x`.
pub(crate) fn number(text: &str) -> Option<u64> {
    match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    }
}
