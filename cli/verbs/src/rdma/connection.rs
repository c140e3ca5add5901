// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Reliable-connected queue pairs and their completions.

use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicU64, AtomicU8, Ordering};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{bail, ensure, Context, Result};
use serde::{Deserialize, Serialize};
use sideway::ibverbs::address::{AddressHandleAttribute, Gid};
use sideway::ibverbs::completion::{
    BasicCompletionQueue, PollCompletionQueueError, WorkCompletionStatus,
};
use sideway::ibverbs::device_context::Mtu;
use sideway::ibverbs::queue_pair::{
    BasicQueuePair, PostSendGuard, QueuePair, QueuePairAttribute, QueuePairState,
    SetScatterGatherEntry, WorkRequestFlags,
};

use super::device::{full_access, Address, Hca, Part};
use crate::patience::Patience;

/// Timeout for a completion, in ms.
static COMPLETION_TIMEOUT: AtomicU64 = AtomicU64::new(60_000);

/// Sets the maximum time for which this process waits for a completion. The default is one minute.
pub fn wait_for_completions(timeout: Duration) {
    let milliseconds = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
    COMPLETION_TIMEOUT.store(milliseconds, Ordering::Relaxed);
}

/// Timeout after which a queue pair retries, as the `exponent` of [`wait_for_answers`].
static ACK_TIMEOUT: AtomicU8 = AtomicU8::new(17);
/// Number of retries of a queue pair.
static RETRIES: AtomicU8 = AtomicU8::new(7);

/// Sets the timeout and the number of retries for the queue pairs of this process. The timeout is
/// 4.096 µs times two to the power of `exponent`.
///
/// The defaults are 0.5 s and seven retries. rxe takes seven retries as unlimited.
pub fn wait_for_answers(exponent: u8, retries: u8) {
    ACK_TIMEOUT.store(exponent, Ordering::Relaxed);
    RETRIES.store(retries, Ordering::Relaxed);
}

/// Calls [`wait_for_answers`] with a long timeout, for an emulated machine.
///
/// One part of an emulated machine, such as a virtual processor, may stand still while another part
/// runs. A retry of a late request is at best extra work. In addition, rxe reports some repeated
/// READs as complete although they are not. The emulated wire loses no packets, so retries are not
/// needed. If a completion never comes, the waiter's own timeout expires.
pub fn wait_for_emulated_answers() {
    wait_for_answers(21, 7);
}

/// Operation of a send queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    Write,
    Read,
    Send,
    CompareSwap { compare: u64, swap: u64 },
    FetchAdd { add: u64 },
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Op::Write => "WRITE",
            Op::Read => "READ",
            Op::Send => "SEND",
            Op::CompareSwap { .. } => "CMP_SWAP",
            Op::FetchAdd { .. } => "FETCH_ADD",
        })
    }
}

/// Completion status of a work request.
pub type Status = WorkCompletionStatus;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Completion {
    /// Number of the request.
    pub id: u64,
    /// Status of the request.
    pub status: Status,
    /// Number of received bytes.
    pub byte_len: u32,
}

impl Completion {
    /// Returns an error unless the status is `status`.
    pub fn expect(self, status: Status) -> Result<()> {
        ensure!(
            self.status == status,
            "completion status is {:?}, but {status:?} was expected",
            self.status
        );
        Ok(())
    }
}

/// Information about one end that the other end needs to connect. The caller transports this
/// information between two hosts.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Contact {
    queue_pair: u32,
    address: Address,
    /// MTU, as a value of `enum ibv_mtu`.
    mtu: u32,
}

/// One end of a connected pair.
#[derive(Debug)]
pub struct Endpoint {
    qp: BasicQueuePair,
    send_queue: Completions,
    receive_queue: Completions,
    next_id: u64,
}

impl Endpoint {
    /// Creates an unconnected end.
    pub fn new(hca: &Hca) -> Result<Self> {
        let queue = || hca.context.create_cq_builder().setup_cqe(256).build();
        let send_queue = Completions::of(queue().context("send completion queue")?);
        let receive_queue = Completions::of(queue().context("receive completion queue")?);
        let qp = hca
            .domain
            .create_qp_builder()
            .setup_max_send_wr(64)
            .setup_max_recv_wr(64)
            .setup_send_cq(Arc::clone(&send_queue.queue))
            .setup_recv_cq(Arc::clone(&receive_queue.queue))
            .build()
            .context("queue pair")?;
        Ok(Self {
            qp,
            send_queue,
            receive_queue,
            next_id: 1,
        })
    }

    /// Returns the information that the other end needs about this end, which was made on `hca`.
    pub fn contact(&self, hca: &Hca) -> Result<Contact> {
        Ok(Contact {
            queue_pair: self.qp.qp_number(),
            address: hca.address,
            mtu: hca.context.query_port(hca.port)?.active_mtu() as u32,
        })
    }

    /// Connects this end, which was made on `hca`, to the other end. The other end must connect
    /// before this end sends anything.
    pub fn connect(&mut self, hca: &Hca, peer: &Contact) -> Result<()> {
        const PACKET_NUMBER: u32 = 0x1234;
        let mut init = QueuePairAttribute::new();
        init.setup_state(QueuePairState::Init)
            .setup_pkey_index(0)
            .setup_port(hca.port)
            .setup_access_flags(full_access());
        self.qp.modify(&init).context("queue pair to INIT")?;

        let mut address = AddressHandleAttribute::new();
        address.setup_port(hca.port).setup_service_level(0);
        match (hca.address, peer.address) {
            (Address::Roce { index, .. }, Address::Roce { gid, .. }) => {
                address
                    .setup_grh_src_gid_index(index)
                    .setup_grh_dest_gid(&Gid::from(gid))
                    .setup_grh_hop_limit(64);
            }
            (Address::InfiniBand { .. }, Address::InfiniBand { lid }) => {
                address.setup_dest_lid(lid);
            }
            (near, far) => bail!("{near} and {far} are not addresses of the same kind of network"),
        }
        let mtu = hca.context.query_port(hca.port)?.active_mtu() as u32;
        let mtu = mtu.min(peer.mtu);
        // sideway's conversion panics on an unknown number.
        ensure!(
            (Mtu::Mtu256 as u32..=Mtu::Mtu4096 as u32).contains(&mtu),
            "unknown MTU {mtu}"
        );
        let mut receive = QueuePairAttribute::new();
        receive
            .setup_state(QueuePairState::ReadyToReceive)
            .setup_path_mtu(Mtu::from(mtu))
            .setup_dest_qp_num(peer.queue_pair)
            .setup_rq_psn(PACKET_NUMBER)
            .setup_max_dest_read_atomic(16)
            .setup_min_rnr_timer(1)
            .setup_address_vector(&address);
        self.qp.modify(&receive).context("queue pair to RTR")?;

        let mut send = QueuePairAttribute::new();
        send.setup_state(QueuePairState::ReadyToSend)
            .setup_sq_psn(PACKET_NUMBER)
            .setup_timeout(ACK_TIMEOUT.load(Ordering::Relaxed))
            .setup_retry_cnt(RETRIES.load(Ordering::Relaxed))
            .setup_rnr_retry(7)
            .setup_max_read_atomic(16);
        self.qp.modify(&send).context("queue pair to RTS")
    }

    /// Posts a signalled request. SEND ignores `remote`.
    pub fn post(&mut self, op: Op, local: Part, remote: Part) -> Result<u64> {
        let id = self.next_id;
        self.next_id += 1;
        let mut guard = self.qp.start_post_send();
        let request = guard.construct_wr(id, WorkRequestFlags::Signaled);
        let buffer = match op {
            Op::Write => request.setup_write(remote.rkey, remote.addr),
            Op::Read => request.setup_read(remote.rkey, remote.addr),
            Op::Send => request.setup_send(),
            Op::CompareSwap { compare, swap } => {
                request.setup_atomic_compare_swap(remote.rkey, remote.addr, compare, swap)
            }
            Op::FetchAdd { add } => request.setup_atomic_fetch_add(remote.rkey, remote.addr, add),
        };
        // SAFETY: The key limits what the device can reach: see the documentation of `rdma`.
        unsafe { buffer.setup_sge(local.lkey, local.addr, local.len) };
        guard.post().with_context(|| format!("post {op}"))?;
        Ok(id)
    }

    /// Posts a receive buffer for a SEND of the other end.
    pub fn post_receive(&mut self, local: Part) -> Result<u64> {
        let id = self.next_id;
        self.next_id += 1;
        let mut guard = self.qp.start_post_recv();
        // SAFETY: The key limits what the device can reach: see the documentation of `rdma`.
        unsafe {
            guard
                .construct_wr(id)
                .setup_sge(local.lkey, local.addr, local.len);
        }
        guard.post().context("post receive")?;
        Ok(id)
    }

    /// Waits for the next completion of the send queue.
    pub fn sent(&mut self) -> Result<Completion> {
        self.send_queue.next().context("send completion")
    }

    /// Waits for the next completion of the receive queue.
    pub fn received(&mut self) -> Result<Completion> {
        self.receive_queue.next().context("receive completion")
    }

    /// Returns a completion of the send queue, if there is one.
    pub fn poll_sent(&mut self) -> Result<Option<Completion>> {
        self.send_queue.poll().context("send completion")
    }

    /// Returns a completion of the receive queue, if there is one.
    pub fn poll_received(&mut self) -> Result<Option<Completion>> {
        self.receive_queue.poll().context("receive completion")
    }

    /// Posts a request and waits for its completion with any status.
    pub fn run(&mut self, op: Op, local: Part, remote: Part) -> Result<Completion> {
        let id = self.post(op, local, remote)?;
        let completion = self.sent()?;
        ensure!(
            completion.id == id,
            "completion of request {}, but request {id} was posted",
            completion.id
        );
        Ok(completion)
    }

    /// Runs a request that must succeed.
    pub fn transfer(&mut self, op: Op, local: Part, remote: Part) -> Result<()> {
        self.run(op, local, remote)?
            .expect(Status::Success)
            .with_context(|| {
                format!(
                    "{op} of {} bytes, local address {:#x}, remote address {:#x}",
                    local.len, local.addr, remote.addr
                )
            })
    }
}

/// A completion queue, and the completions that were polled but not yet returned.
#[derive(Debug)]
struct Completions {
    queue: Arc<BasicCompletionQueue>,
    taken: VecDeque<Completion>,
}

impl Completions {
    fn of(queue: Arc<BasicCompletionQueue>) -> Self {
        Self {
            queue,
            taken: VecDeque::new(),
        }
    }

    fn poll(&mut self) -> Result<Option<Completion>> {
        if let Some(completion) = self.taken.pop_front() {
            return Ok(Some(completion));
        }
        match self.queue.start_poll() {
            Ok(batch) => {
                for found in batch {
                    let status = status(found.status())?;
                    let (id, byte_len) = (found.wr_id(), found.byte_len());
                    self.taken.push_back(Completion {
                        id,
                        status,
                        byte_len,
                    });
                }
                Ok(self.taken.pop_front())
            }
            Err(PollCompletionQueueError::CompletionQueueEmpty) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    fn next(&mut self) -> Result<Completion> {
        let timeout = Duration::from_millis(COMPLETION_TIMEOUT.load(Ordering::Relaxed));
        let mut patience = Patience::new(timeout);
        let mut idle = 0u32;
        loop {
            if let Some(completion) = self.poll()? {
                return Ok(completion);
            }
            ensure!(
                !patience.is_over(),
                "no completion within {} s",
                timeout.as_secs()
            );
            idle += 1;
            if idle < 50 {
                std::thread::yield_now();
            } else {
                // A software device such as rxe runs on the same few processors as this thread.
                std::thread::sleep(Duration::from_micros(50));
            }
        }
    }
}

/// Converts a status. sideway's conversion panics on an unknown number.
fn status(raw: u32) -> Result<Status> {
    ensure!(
        raw <= Status::TagMatchingRendezvousIncomplete as u32,
        "unknown completion status {raw}"
    );
    Ok(Status::from(raw))
}

/// A reliable connection between two devices.
#[derive(Debug)]
pub struct Connection {
    /// End on the first device.
    pub near: Endpoint,
    /// End on the second device.
    pub far: Endpoint,
}

/// Connects `near` with `far`, which may be the same device.
pub fn connect(near: &Hca, far: &Hca) -> Result<Connection> {
    let mut connection = Connection {
        near: Endpoint::new(near)?,
        far: Endpoint::new(far)?,
    };
    let contacts = (connection.near.contact(near)?, connection.far.contact(far)?);
    connection
        .near
        .connect(near, &contacts.1)
        .with_context(|| near.name.clone())?;
    connection
        .far
        .connect(far, &contacts.0)
        .with_context(|| far.name.clone())?;
    Ok(connection)
}

impl Connection {
    /// Runs a request of the near end that must succeed.
    pub fn transfer(&mut self, op: Op, local: Part, remote: Part) -> Result<()> {
        self.near.transfer(op, local, remote)
    }

    /// Runs a request of the near end, and returns its status.
    pub fn status(&mut self, op: Op, local: Part, remote: Part) -> Result<Status> {
        Ok(self.near.run(op, local, remote)?.status)
    }

    /// Sends `from` at the near end into `into` at the far end, by SEND. Returns both completions
    /// with any status.
    pub fn send(&mut self, from: Part, into: Part) -> Result<(Completion, Completion)> {
        self.far.post_receive(into)?;
        self.near.post(Op::Send, from, into)?;
        Ok((self.near.sent()?, self.far.received()?))
    }
}
