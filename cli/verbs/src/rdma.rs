// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Verbs: devices, memory regions, reliable-connected queue pairs and their completions, on the sideway crate. The one
//! file with `unsafe` for it.
//!
//! Why posting is safe here: a device reaches memory through a region's key alone, regions are made over a [`Span`],
//! and no Rust object lies in one.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::net::Ipv4Addr;
use std::net::Ipv6Addr;
use std::os::fd::AsRawFd;
use std::os::fd::BorrowedFd;
use std::os::fd::RawFd;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::AtomicU8;
use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::Duration;

use anyhow::anyhow;
use anyhow::bail;
use anyhow::ensure;
use anyhow::Context;
use anyhow::Result;
use rdma_mummy_sys::ibv_mr;
use sideway::ibverbs::address::AddressHandleAttribute;
use sideway::ibverbs::address::Gid;
use sideway::ibverbs::address::GidType;
use sideway::ibverbs::completion::BasicCompletionQueue;
use sideway::ibverbs::completion::PollCompletionQueueError;
use sideway::ibverbs::completion::WorkCompletionStatus;
use sideway::ibverbs::device::DeviceInfo;
use sideway::ibverbs::device::DeviceList;
use sideway::ibverbs::device_context::DeviceContext;
use sideway::ibverbs::device_context::LinkLayer;
use sideway::ibverbs::device_context::Mtu;
use sideway::ibverbs::device_context::PortState;
use sideway::ibverbs::memory_region::MemoryRegion;
use sideway::ibverbs::memory_region::RegisterMemoryRegionError;
use sideway::ibverbs::memory_region::RegisterMemoryRegionErrorKind;
use sideway::ibverbs::protection_domain::ProtectionDomain;
use sideway::ibverbs::queue_pair::BasicQueuePair;
use sideway::ibverbs::queue_pair::PostSendGuard;
use sideway::ibverbs::queue_pair::QueuePair;
use sideway::ibverbs::queue_pair::QueuePairAttribute;
use sideway::ibverbs::queue_pair::QueuePairState;
use sideway::ibverbs::queue_pair::SetScatterGatherEntry;
use sideway::ibverbs::queue_pair::WorkRequestFlags;
pub use sideway::ibverbs::AccessFlags;

use crate::memory::Span;
use crate::patience::Patience;

/// The port that is used where nobody names one.
const PORT: u8 = 1;

/// For how long a completion is waited for, in ms.
static COMPLETION_TIMEOUT: AtomicU64 = AtomicU64::new(60_000);

/// Says for how long this process waits for a completion before that is an error; a minute if it is not called.
pub fn wait_for_completions(timeout: Duration) {
    let milliseconds = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
    COMPLETION_TIMEOUT.store(milliseconds, Ordering::Relaxed);
}

/// How long a queue pair waits for an answer before it asks again, as the exponent of `timeout`, and how often it asks.
static ACK_TIMEOUT: AtomicU8 = AtomicU8::new(17);
static RETRIES: AtomicU8 = AtomicU8::new(7);

/// Says how long the queue pairs of this process wait for an answer before they ask again, 4.096 µs times two to the power
/// of `exponent`, and how often they do: 0.5 s and seven times if it is not called. To rxe, seven is for ever.
pub fn wait_for_answers(exponent: u8, retries: u8) {
    ACK_TIMEOUT.store(exponent, Ordering::Relaxed);
    RETRIES.store(retries, Ordering::Relaxed);
}

/// As [`wait_for_answers`], on an emulated machine: one part of it may stand still for long while another goes on. What has
/// arrived late and is asked for again is work at best, and rxe takes some READs that were sent again for done that are
/// not. Its wire loses nothing; that a completion never comes is seen by who waits for it.
pub fn wait_for_emulated_answers() {
    wait_for_answers(21, 7);
}

/// The library that all of this calls. It is looked up by the binding when the program starts; where it is missing each
/// call fails with `EOPNOTSUPP`, which says nothing of the cause.
pub const LIBRARY: &str = "libibverbs.so.1";

/// Sees that libibverbs is there; an error says why it cannot be loaded.
pub fn library() -> Result<()> {
    // SAFETY: The binding has loaded the same library already if it can be loaded; the constructors of libibverbs and
    // of what it needs have no conditions.
    match unsafe { libloading::Library::new(LIBRARY) } {
        Ok(library) => {
            // It stays: the binding has pointers into it.
            std::mem::forget(library);
            Ok(())
        }
        Err(error) => Err(anyhow!(
            "{LIBRARY} cannot be loaded: {}",
            crate::cause(&error)
        )),
    }
}

/// The names of the RDMA devices that libibverbs knows, in its order.
///
/// # Errors
/// Without the library, or where it cannot list them.
pub fn devices() -> Result<Vec<String>> {
    library()?;
    let list = DeviceList::new().map_err(|error| anyhow!("ibv_get_device_list: {}", error.0))?;
    Ok(list.iter().map(|device| device.name()).collect())
}

/// Everything that a region can be allowed.
pub fn full_access() -> AccessFlags {
    AccessFlags::LocalWrite
        | AccessFlags::RemoteWrite
        | AccessFlags::RemoteRead
        | AccessFlags::RemoteAtomic
}

/// A registration that was refused, with the errno that the application sees.
#[derive(Debug, thiserror::Error)]
#[error("{call}: {error}")]
pub struct Refused {
    call: &'static str,
    error: io::Error,
}

/// Where a registration is asked for.
const REG_MR: &str = "ibv_reg_mr";
const REG_DMABUF_MR: &str = "ibv_reg_dmabuf_mr";

impl Refused {
    fn of(error: RegisterMemoryRegionError) -> Self {
        let error = match error.0 {
            RegisterMemoryRegionErrorKind::Ibverbs(error) => error,
            other => io::Error::other(other.to_string()),
        };
        Self {
            call: REG_MR,
            error,
        }
    }

    fn invalid(call: &'static str) -> Self {
        let error = io::Error::from_raw_os_error(libc::EINVAL);
        Self { call, error }
    }

    /// The errno; 0 where the library gave none.
    pub fn errno(&self) -> i32 {
        self.error.raw_os_error().unwrap_or(0)
    }
}

/// An errno of a registration's as the documents have it.
pub fn errno_name(errno: i32) -> String {
    let name = match errno {
        libc::EPERM => "EPERM",
        libc::EIO => "EIO",
        libc::ENOMEM => "ENOMEM",
        libc::EFAULT => "EFAULT",
        libc::ENODEV => "ENODEV",
        libc::EINVAL => "EINVAL",
        libc::EOPNOTSUPP => "EOPNOTSUPP",
        other => return format!("errno {other}"),
    };
    name.to_owned()
}

/// How a port is reached.
#[derive(Debug, Clone, Copy)]
enum Address {
    /// By an entry of the GID table.
    Roce { gid: Gid, index: u8 },
    /// By a number that the subnet manager gave.
    InfiniBand { lid: u16 },
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Roce { gid, index } => write!(f, "GID {index} ({gid})"),
            Self::InfiniBand { lid } => write!(f, "LID {lid}"),
        }
    }
}

/// An opened device with a protection domain, and the address that packets leave from.
#[derive(Debug)]
pub struct Hca {
    name: String,
    port: u8,
    context: Arc<DeviceContext>,
    domain: Arc<ProtectionDomain>,
    address: Address,
}

/// The machine's devices, looked for once: processes that are forked then open them without another look.
pub struct Devices(DeviceList);

impl Devices {
    /// Looks for them.
    ///
    /// # Errors
    /// What `ibv_get_device_list` says.
    pub fn find() -> Result<Self> {
        Ok(Self(DeviceList::new().context("ibv_get_device_list")?))
    }

    /// Opens the device of that name, whose port with this number, from 1 on, is used.
    ///
    /// # Errors
    /// Where there is no such device or port, where it cannot be opened, and where the port has no address.
    pub fn open(&self, name: &str, port: u8) -> Result<Hca> {
        let device = self
            .0
            .iter()
            .find(|device| device.name() == name)
            .with_context(|| format!("no RDMA device {name}"))?;
        let context = device.open().with_context(|| format!("open {name}"))?;
        let domain = context
            .alloc_pd()
            .with_context(|| format!("{name}: protection domain"))?;
        let address = address(&context, port).with_context(|| format!("{name} port {port}"))?;
        Ok(Hca {
            name: name.to_owned(),
            port,
            context,
            domain,
            address,
        })
    }
}

impl Hca {
    /// Opens a device; its first port is used.
    pub fn open(name: &str) -> Result<Self> {
        Self::open_port(name, PORT)
    }

    /// Opens a device, whose port with this number, from 1 on, is used.
    ///
    /// # Errors
    /// As [`Devices::open`].
    pub fn open_port(name: &str, port: u8) -> Result<Self> {
        Devices::find()?.open(name, port)
    }

    /// The device's name, as in /sys/class/infiniband.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The number of the port in use.
    pub fn port(&self) -> u8 {
        self.port
    }

    /// Whether the port passes packets.
    pub fn is_active(&self) -> Result<bool> {
        let port = self.context.query_port(self.port)?;
        Ok(port.port_state() == PortState::Active)
    }

    /// The address in use, for people.
    pub fn address(&self) -> String {
        self.address.to_string()
    }

    /// `ibv_reg_mr` of a range.
    pub fn register(
        &self,
        span: Span,
        access: AccessFlags,
    ) -> std::result::Result<Region, Refused> {
        let len = usize::try_from(span.len()).map_err(|_| Refused::invalid(REG_MR))?;
        // A 64-bit program: every address is a usize.
        let addr = span.addr() as usize;
        // SAFETY: No Rust object lies in a span, whatever of it is mapped.
        match unsafe { self.domain.reg_mr(addr, len, access) } {
            Ok(mr) => Ok(Region { mr, span }),
            Err(error) => Err(Refused::of(error)),
        }
    }
}

/// A region whose end can fail, and be tried again: what `ibv_dereg_mr` says is lost in a [`Region`]'s drop.
#[derive(Debug)]
pub struct FragileRegion {
    mr: NonNull<ibv_mr>,
    span: Span,
    /// Keeps the domain that the region is of.
    _domain: Arc<ProtectionDomain>,
}

impl FragileRegion {
    /// Deregisters; gives the region back where that failed.
    pub fn deregister(self) -> std::result::Result<(), (Self, io::Error)> {
        // SAFETY: The region was made by `register_fragile`, and is gone after a success alone, which takes `self`.
        match unsafe { rdma_mummy_sys::ibv_dereg_mr(self.mr.as_ptr()) } {
            0 => Ok(()),
            code => Err((self, io::Error::from_raw_os_error(code))),
        }
    }

    /// A piece of it for a work request; it may lie outside, so that the device's refusal can be seen.
    pub fn part(&self, offset: u64, len: u64) -> Result<Part> {
        // SAFETY: The region is there as long as `self`; two plain fields are read.
        let (lkey, rkey) = unsafe { (self.mr.as_ref().lkey, self.mr.as_ref().rkey) };
        Part::of(self.span, offset, len, lkey, rkey)
    }
}

impl Hca {
    /// As `register`, for a region that is deregistered by hand.
    pub fn register_fragile(
        &self,
        span: Span,
        access: AccessFlags,
    ) -> std::result::Result<FragileRegion, Refused> {
        let len = usize::try_from(span.len()).map_err(|_| Refused::invalid(REG_MR))?;
        // SAFETY: The domain lives as long as the region, and no Rust object lies in a span.
        let mr = unsafe {
            rdma_mummy_sys::ibv_reg_mr(
                self.domain.pd().as_ptr(),
                std::ptr::without_provenance_mut(span.addr() as usize),
                len,
                access.into(),
            )
        };
        let mr = NonNull::new(mr).ok_or_else(|| Refused {
            call: REG_MR,
            error: io::Error::last_os_error(),
        })?;
        Ok(self.fragile(mr, span))
    }

    /// `ibv_reg_dmabuf_mr` of the part of a dma-buf from `offset` on that is as long as `span`; work requests name its
    /// bytes by the addresses of `span`.
    pub fn register_dmabuf(
        &self,
        buffer: BorrowedFd<'_>,
        offset: u64,
        span: Span,
        access: AccessFlags,
    ) -> std::result::Result<FragileRegion, Refused> {
        let len = usize::try_from(span.len()).map_err(|_| Refused::invalid(REG_DMABUF_MR))?;
        // SAFETY: The domain lives as long as the region, the descriptor is open for as long as the call takes, and the
        // kernel keeps the buffer by itself; no Rust object lies in it.
        let mr = unsafe {
            rdma_mummy_sys::ibv_reg_dmabuf_mr(
                self.domain.pd().as_ptr(),
                offset,
                len,
                span.addr(),
                buffer.as_raw_fd(),
                access.into(),
            )
        };
        let mr = NonNull::new(mr).ok_or_else(|| Refused {
            call: REG_DMABUF_MR,
            error: io::Error::last_os_error(),
        })?;
        Ok(self.fragile(mr, span))
    }

    fn fragile(&self, mr: NonNull<ibv_mr>, span: Span) -> FragileRegion {
        FragileRegion {
            mr,
            span,
            _domain: Arc::clone(&self.domain),
        }
    }

    /// Leaves everything that was made of this device to whoever else has its file open, a forked child above all, and
    /// returns the descriptor under which that child has it. Without one it all ends here.
    pub fn abandon(self) -> HcaFile {
        // SAFETY: The context lives as long as `self`, which nothing drops any more; two plain fields are read.
        let (file, events) = unsafe {
            let context = self.context.context();
            (context.as_ref().cmd_fd, context.as_ref().async_fd)
        };
        std::mem::forget(self);
        HcaFile { file, events }
    }
}

/// Gives up a device with its region as a process does that closes its descriptors and leaves: nothing is deregistered
/// by it, and the kernel takes back what there is when the last process closes.
pub fn abandon(hca: Hca, region: Region) {
    std::mem::forget(region);
    hca.abandon().close();
}

/// The descriptors of an opened device that no object of this process looks after.
#[derive(Debug, Clone, Copy)]
pub struct HcaFile {
    file: RawFd,
    events: RawFd,
}

impl HcaFile {
    /// Closes this process's.
    pub fn close(self) {
        for descriptor in [self.file, self.events] {
            // SAFETY: `abandon` has forgotten all that has the descriptor, so nobody closes or uses its number again.
            unsafe { libc::close(descriptor) };
        }
    }
}

/// How good a GID is to send from; None for one that is not of RoCE. Version 2 on an IPv4 address is what both ends of
/// a fabric agree on most often.
fn preference(kind: GidType, gid: Gid) -> Option<u8> {
    let address = Ipv6Addr::from(gid);
    let has_ip = address
        .to_ipv4_mapped()
        .is_some_and(|ip| ip != Ipv4Addr::UNSPECIFIED);
    match kind {
        GidType::RoceV2 if has_ip => Some(0),
        GidType::RoceV2 => Some(1),
        GidType::RoceV1 => Some(2),
        _ => None,
    }
}

fn address(context: &Arc<DeviceContext>, port: u8) -> Result<Address> {
    let attributes = context.query_port(port).context("ibv_query_port")?;
    if attributes.link_layer() == LinkLayer::InfiniBand {
        let lid = attributes.lid();
        ensure!(lid != 0, "no LID: does a subnet manager run?");
        return Ok(Address::InfiniBand { lid });
    }
    let mut best: Option<(u8, Address)> = None;
    for entry in context.query_gid_table().context("GIDs")? {
        if entry.port_num() != u32::from(port) {
            continue;
        }
        let Some(rank) = preference(entry.gid_type(), entry.gid()) else {
            continue;
        };
        if best.is_none_or(|(found, _)| rank < found) {
            let (gid, index) = (entry.gid(), u8::try_from(entry.gid_index())?);
            best = Some((rank, Address::Roce { gid, index }));
        }
    }
    best.map(|(_, address)| address)
        .context("no RoCE GID: has the network device an address?")
}

/// A registered memory region. Deregistered when dropped.
#[derive(Debug)]
pub struct Region {
    mr: Arc<MemoryRegion>,
    span: Span,
}

impl Region {
    /// The key for work requests of the own end.
    pub fn lkey(&self) -> u32 {
        self.mr.lkey()
    }

    /// The key for those of the other end.
    pub fn rkey(&self) -> u32 {
        self.mr.rkey()
    }

    /// Its first address.
    pub fn addr(&self) -> u64 {
        self.span.addr()
    }

    /// Its length in bytes.
    pub fn len(&self) -> u64 {
        self.span.len()
    }

    /// A piece of it for a work request; it may lie outside, so that the device's refusal can be seen.
    pub fn part(&self, offset: u64, len: u64) -> Result<Part> {
        Part::of(self.span, offset, len, self.lkey(), self.rkey())
    }

    /// The descriptor that this region hangs on: it goes with the last copy of it, wherever that is.
    pub fn command_descriptor(&self) -> RawFd {
        // SAFETY: The region and with it its context live as long as `self`; a plain field is read.
        unsafe { (*self.mr.mr().as_ref().context).cmd_fd }
    }

    /// Changes the access rights of the live region. By the kernel's own interface: Debian's rxe provider has no
    /// `ibv_rereg_mr`.
    pub fn change_access(&self, access: AccessFlags) -> Result<()> {
        let mut answer = ReregAnswer::default();
        // SAFETY: The region and with it its context live as long as `self`; two plain fields are read.
        let (file, handle) = unsafe {
            let mr = self.mr.mr();
            ((*mr.as_ref().context).cmd_fd, mr.as_ref().handle)
        };
        let request = ReregRequest {
            command: REREG_MR,
            in_words: words::<ReregRequest>(),
            out_words: words::<ReregAnswer>(),
            response: std::ptr::from_mut(&mut answer) as u64,
            mr_handle: handle,
            flags: rdma_mummy_sys::ibv_rereg_mr_flags::IBV_REREG_MR_CHANGE_ACCESS.0,
            access_flags: u32::try_from(access.bits())?,
            ..ReregRequest::default()
        };
        let size = size_of::<ReregRequest>();
        // SAFETY: The kernel reads the request and writes the answer, both of which live here and have the sizes given.
        let written = unsafe { libc::write(file, std::ptr::from_ref(&request).cast(), size) };
        ensure!(
            usize::try_from(written) == Ok(size),
            "REREG_MR: {}",
            io::Error::last_os_error()
        );
        Ok(())
    }
}

/// `IB_USER_VERBS_CMD_REREG_MR`.
const REREG_MR: u32 = 11;

const fn words<T>() -> u16 {
    (size_of::<T>() / 4) as u16
}

/// `struct ib_uverbs_cmd_hdr` and `struct ib_uverbs_rereg_mr`.
#[repr(C)]
#[derive(Debug, Default)]
struct ReregRequest {
    command: u32,
    in_words: u16,
    out_words: u16,
    response: u64,
    mr_handle: u32,
    flags: u32,
    start: u64,
    length: u64,
    hca_va: u64,
    pd_handle: u32,
    access_flags: u32,
}

/// `struct ib_uverbs_rereg_mr_resp`.
#[repr(C)]
#[derive(Debug, Default)]
struct ReregAnswer {
    lkey: u32,
    rkey: u32,
}

/// A piece of a region, as work requests name it.
#[derive(Debug, Clone, Copy)]
pub struct Part {
    addr: u64,
    len: u32,
    lkey: u32,
    rkey: u32,
}

impl Part {
    fn of(span: Span, offset: u64, len: u64, lkey: u32, rkey: u32) -> Result<Self> {
        Ok(Self {
            addr: span.addr().wrapping_add(offset),
            len: u32::try_from(len)?,
            lkey,
            rkey,
        })
    }
}

/// What a send queue is asked to do.
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

/// How a work request ended.
pub type Status = WorkCompletionStatus;

/// A completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Completion {
    /// The number of the request.
    pub id: u64,
    /// How it ended.
    pub status: Status,
    /// How many bytes were received.
    pub byte_len: u32,
}

impl Completion {
    /// An error where it ended otherwise than with `status`.
    pub fn expect(self, status: Status) -> Result<()> {
        ensure!(
            self.status == status,
            "completion status {:?} where {status:?} was expected",
            self.status
        );
        Ok(())
    }
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
    fn new(hca: &Hca) -> Result<Self> {
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

    fn bring_up(&mut self, hca: &Hca, peer: &Hca, peer_number: u32) -> Result<()> {
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
                    .setup_grh_dest_gid(&gid)
                    .setup_grh_hop_limit(64);
            }
            (Address::InfiniBand { .. }, Address::InfiniBand { lid }) => {
                address.setup_dest_lid(lid);
            }
            (near, far) => bail!("{near} and {far} are not of one network"),
        }
        let mut receive = QueuePairAttribute::new();
        receive
            .setup_state(QueuePairState::ReadyToReceive)
            .setup_path_mtu(
                hca.context
                    .query_port(hca.port)?
                    .active_mtu()
                    .min_of(peer.context.query_port(peer.port)?.active_mtu()),
            )
            .setup_dest_qp_num(peer_number)
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

    /// Posts a signalled request; `remote` is not used by SEND.
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
        // SAFETY: The key decides what the device reaches (see the head of this file).
        unsafe { buffer.setup_sge(local.lkey, local.addr, local.len) };
        guard.post().with_context(|| format!("post {op}"))?;
        Ok(id)
    }

    /// Posts a place for a SEND of the other end.
    pub fn post_receive(&mut self, local: Part) -> Result<u64> {
        let id = self.next_id;
        self.next_id += 1;
        let mut guard = self.qp.start_post_recv();
        // SAFETY: The key decides what the device reaches (see the head of this file).
        unsafe {
            guard
                .construct_wr(id)
                .setup_sge(local.lkey, local.addr, local.len);
        }
        guard.post().context("post receive")?;
        Ok(id)
    }

    /// The next completion of the send queue.
    pub fn sent(&mut self) -> Result<Completion> {
        self.send_queue.next().context("send completion")
    }

    /// The next completion of the receive queue.
    pub fn received(&mut self) -> Result<Completion> {
        self.receive_queue.next().context("receive completion")
    }

    /// A completion of the send queue, if there is one.
    pub fn poll_sent(&mut self) -> Result<Option<Completion>> {
        self.send_queue.poll().context("send completion")
    }

    /// A completion of the receive queue, if there is one.
    pub fn poll_received(&mut self) -> Result<Option<Completion>> {
        self.receive_queue.poll().context("receive completion")
    }

    /// Posts a request and waits for its completion, whatever its status.
    pub fn run(&mut self, op: Op, local: Part, remote: Part) -> Result<Completion> {
        let id = self.post(op, local, remote)?;
        let completion = self.sent()?;
        ensure!(
            completion.id == id,
            "completion of request {} where {id} was posted",
            completion.id
        );
        Ok(completion)
    }

    /// As `run`, and it must succeed.
    pub fn transfer(&mut self, op: Op, local: Part, remote: Part) -> Result<()> {
        self.run(op, local, remote)?
            .expect(Status::Success)
            .with_context(|| {
                format!(
                    "{op} of {} bytes, {:#x} and {:#x}",
                    local.len, local.addr, remote.addr
                )
            })
    }
}

/// A completion queue, and what was taken from it before anybody asked.
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
            ensure!(!patience.is_over(), "none within {} s", timeout.as_secs());
            idle += 1;
            if idle < 50 {
                std::thread::yield_now();
            } else {
                // The device's work runs on the same few processors.
                std::thread::sleep(Duration::from_micros(50));
            }
        }
    }
}

/// sideway's conversion panics on a number that it does not know.
fn status(raw: u32) -> Result<Status> {
    ensure!(
        raw <= Status::TagMatchingRendezvousIncomplete as u32,
        "unknown completion status {raw}"
    );
    Ok(Status::from(raw))
}

trait MinMtu {
    fn min_of(self, other: Self) -> Self;
}

impl MinMtu for Mtu {
    fn min_of(self, other: Self) -> Self {
        if (self as u32) < (other as u32) {
            self
        } else {
            other
        }
    }
}

/// A reliable connection between two devices.
#[derive(Debug)]
pub struct Connection {
    /// The end on the first device.
    pub near: Endpoint,
    /// The end on the second.
    pub far: Endpoint,
}

/// Connects `near` with `far`, which may be one device.
pub fn connect(near: &Hca, far: &Hca) -> Result<Connection> {
    let mut connection = Connection {
        near: Endpoint::new(near)?,
        far: Endpoint::new(far)?,
    };
    let (near_number, far_number) = (
        connection.near.qp.qp_number(),
        connection.far.qp.qp_number(),
    );
    connection
        .near
        .bring_up(near, far, far_number)
        .with_context(|| near.name.clone())?;
    connection
        .far
        .bring_up(far, near, near_number)
        .with_context(|| far.name.clone())?;
    Ok(connection)
}

impl Connection {
    /// SENDs from near's part into far's; both completions are returned, whatever they say.
    pub fn send(&mut self, from: Part, into: Part) -> Result<(Completion, Completion)> {
        self.far.post_receive(into)?;
        self.near.post(Op::Send, from, into)?;
        Ok((self.near.sent()?, self.far.received()?))
    }
}
