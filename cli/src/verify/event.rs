// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! What a worker says while it goes on: which step begins, and what became of it.

use std::fmt;

use serde::{Deserialize, Serialize};

/// How GPU memory is registered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Way {
    /// `ibv_reg_mr` on the GPU's address, by a peer-memory module.
    PeerMemory,
    /// `ibv_reg_dmabuf_mr` on a descriptor that the GPU's driver exports.
    DmaBuf,
}

impl Way {
    pub(crate) const ALL: [Self; 2] = [Self::PeerMemory, Self::DmaBuf];

    /// The call that an application makes.
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

/// A step. The names are stable: scripts go by them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Name {
    /// The GPU and the RDMA device are opened.
    Open,
    /// GPU memory is allocated.
    Allocate,
    /// Bytes go to GPU memory and come back by the GPU's own driver, each compared.
    Copies,
    /// The driver exports the memory as a dma-buf.
    Export,
    /// Host memory is registered, for the other end of the transfers.
    HostMemory,
    /// GPU memory is registered and deregistered several times, and then kept.
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
    /// The region is deregistered.
    Deregister,
    /// GPU memory is freed under a live registration.
    FreeWhileRegistered,
    /// A process that holds a registration is killed in the middle of a transfer.
    KilledHolder,
    /// At least one way moved bytes.
    AnyWay,
    /// There is an RDMA device; told only where there is none.
    RdmaDevice,
}

impl Name {
    /// As the JSON has it.
    pub(crate) fn text(self) -> String {
        serde_json::to_value(self)
            .ok()
            .and_then(|value| value.as_str().map(str::to_owned))
            .unwrap_or_default()
    }
}

/// How a step ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Outcome {
    Passed,
    Failed,
    /// This machine has not what the step takes; or a step before it failed.
    NotPossibleHere,
}

/// What a step measured.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Figures {
    /// Of the buffer that was registered or moved.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) bytes: Option<u64>,
    /// How many bytes the time was taken over.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) timed_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) bytes_per_second: Option<u64>,
    /// How many registrations the medians are of.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) registrations: Option<usize>,
    /// Median.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) registration_us: Option<f64>,
    /// Median.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) deregistration_us: Option<f64>,
}

/// What became of a step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Step {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) way: Option<Way>,
    pub(crate) step: Name,
    pub(crate) outcome: Outcome,
    /// What was seen, or why not, in words.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) found: Option<String>,
    /// Of a refused registration: the errno.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) errno: Option<i32>,
    #[serde(flatten)]
    pub(crate) figures: Figures,
}

impl Step {
    /// One that measured nothing, and had no errno.
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

/// What is told while it goes on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Event {
    Begins {
        way: Option<Way>,
        step: Name,
    },
    Ended(Step),
    /// What the GPU and the RDMA device are.
    About(String),
    /// The last one.
    Done,
}
