// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Progress messages of a worker: the start and the result of each step.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Method of registering GPU memory, called a "way" in the code of `verify`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Way {
    /// `ibv_reg_mr` on the GPU's address, through a peer-memory module.
    PeerMemory,
    /// `ibv_reg_dmabuf_mr` on a descriptor that the GPU's driver exports.
    DmaBuf,
}

impl Way {
    pub(crate) const ALL: [Self; 2] = [Self::PeerMemory, Self::DmaBuf];

    /// Returns the call that an application makes.
    pub(crate) fn call(self) -> &'static str {
        match self {
            Self::PeerMemory => "ibv_reg_mr",
            Self::DmaBuf => "ibv_reg_dmabuf_mr",
        }
    }
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.call())
    }
}

/// A step, with a stable name that scripts rely on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Name {
    /// Opens the GPU and the RDMA device.
    Open,
    /// Allocates GPU memory.
    Allocate,
    /// Copies bytes to GPU memory and back with the GPU's own driver, and compares the bytes.
    Copies,
    /// Exports the memory as a dma-buf.
    Export,
    /// The same as [`Name::Copies`] and [`Name::Export`], for two adjacent allocations.
    ExportTwoAllocations,
    /// Registers host memory, the source or the target of transfers with GPU memory.
    HostMemory,
    /// Registers and deregisters GPU memory several times, then keeps the memory registered.
    Register,
    /// RDMA WRITE from GPU memory into host memory.
    WriteFromGpu,
    /// RDMA WRITE from host memory into GPU memory.
    WriteToGpu,
    /// RDMA WRITE from GPU memory into other memory of the same GPU.
    GpuToGpu,
    /// RDMA READ of GPU memory into host memory.
    ReadFromGpu,
    /// SEND from host memory, received in GPU memory.
    SendToGpu,
    /// Deregisters the region.
    Deregister,
    /// Registers one range over two adjacent allocations, and moves bytes across the border between
    /// them.
    TwoAllocations,
    /// Frees GPU memory that is still registered.
    FreeWhileRegistered,
    /// Kills a process with a registration in the middle of a transfer.
    KilledHolder,
    /// Checks that bytes moved after registration by at least one method ([`Way`]).
    AnyWay,
    /// Looks for an RDMA device. The step is reported only if there is no device.
    RdmaDevice,
    /// The client connects to the server over TCP, and learns the server's devices.
    Connect,
    /// The same as [`Name::Allocate`], on the server.
    AllocateOnServer,
    /// The same as [`Name::Copies`], on the server.
    CopiesOnServer,
    /// Registers GPU memory of the server.
    RegisterOnServer,
    /// This step and the next seven: RDMA WRITE or READ by the client, between host or GPU memory
    /// of the client and the server.
    WriteClientHostToServerHost,
    ReadServerHostToClientHost,
    WriteClientGpuToServerHost,
    ReadServerHostToClientGpu,
    WriteClientHostToServerGpu,
    ReadServerGpuToClientHost,
    WriteClientGpuToServerGpu,
    ReadServerGpuToClientGpu,
}

impl Name {
    /// Returns the name in the JSON output.
    pub(crate) fn text(self) -> String {
        serde_json::to_value(self)
            .ok()
            .and_then(|value| value.as_str().map(str::to_owned))
            .unwrap_or_default()
    }
}

/// Result of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Outcome {
    Passed,
    Failed,
    /// The machine lacks a requirement of the step, or an earlier step failed.
    NotPossibleHere,
}

/// Measurements of a step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Figures {
    /// Size of the registered or transferred buffer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) bytes: Option<u64>,
    /// Number of bytes in the timed transfer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) timed_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) bytes_per_second: Option<u64>,
    /// Bandwidth of the slowest link on the path, in bytes per second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) link_bytes_per_second: Option<u64>,
    /// Number of registrations from which the medians are computed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) registrations: Option<usize>,
    /// Median time, in microseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) registration_us: Option<f64>,
    /// Median time, in microseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) deregistration_us: Option<f64>,
}

/// Report of a step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Step {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) way: Option<Way>,
    pub(crate) step: Name,
    pub(crate) outcome: Outcome,
    /// Observation, or the reason why the step failed, as text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) found: Option<String>,
    /// Errno of a refused registration.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) errno: Option<i32>,
    #[serde(flatten)]
    pub(crate) figures: Figures,
}

impl Step {
    /// Creates a report without measurements and without an errno.
    pub(crate) fn new(
        way: Option<Way>,
        step: Name,
        outcome: Outcome,
        found: Option<String>,
    ) -> Self {
        Self {
            way,
            step,
            outcome,
            found,
            errno: None,
            figures: Figures::default(),
        }
    }
}

/// A progress message.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Event {
    Begins {
        way: Option<Way>,
        step: Name,
    },
    Ended(Step),
    /// Description of the GPU and the RDMA device.
    About(String),
    /// Description of the other host's GPU and RDMA device.
    Peer(String),
    /// End of all messages.
    Done,
}

/// Returns the lower median.
pub(super) fn median(mut values: Vec<Duration>) -> Option<Duration> {
    values.sort();
    values.get(values.len().checked_sub(1)? / 2).copied()
}

pub(super) fn microseconds(time: Duration) -> f64 {
    // The clock is accurate to tenths of a microsecond at best.
    (time.as_secs_f64() * 1e7).round() / 10.0
}

/// Returns bytes per second, or `None` if no time passed.
pub(super) fn speed(bytes: u64, took: Duration) -> Option<u64> {
    let nanoseconds = took.as_nanos();
    let speed = u128::from(bytes)
        .checked_mul(1_000_000_000)?
        .checked_div(nanoseconds)?;
    u64::try_from(speed).ok()
}
