// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Devices and memory regions.

use std::net::{Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::{fmt, io};

use anyhow::{anyhow, ensure, Context, Result};
use rdma_mummy_sys::ibv_mr;
use serde::{Deserialize, Serialize};
use sideway::ibverbs::address::{Gid, GidType};
use sideway::ibverbs::device::{DeviceInfo, DeviceList};
use sideway::ibverbs::device_context::{DeviceContext, LinkLayer, PortState};
use sideway::ibverbs::memory_region::{
    MemoryRegion, RegisterMemoryRegionError, RegisterMemoryRegionErrorKind,
};
use sideway::ibverbs::protection_domain::ProtectionDomain;
pub use sideway::ibverbs::AccessFlags;

use crate::memory::Span;

/// The port that is used where nobody names one.
const PORT: u8 = 1;

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
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(super) enum Address {
    /// By an entry of the GID table.
    Roce { gid: Ipv6Addr, index: u8 },
    /// By a number that the subnet manager gave.
    InfiniBand { lid: u16 },
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Roce { gid, index } => write!(f, "GID {index} ({})", Gid::from(*gid)),
            Self::InfiniBand { lid } => write!(f, "LID {lid}"),
        }
    }
}

/// An opened device with a protection domain, and the address that packets leave from.
#[derive(Debug)]
pub struct Hca {
    pub(super) name: String,
    pub(super) port: u8,
    pub(super) context: Arc<DeviceContext>,
    pub(super) domain: Arc<ProtectionDomain>,
    pub(super) address: Address,
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
fn preference(kind: GidType, gid: Ipv6Addr) -> Option<u8> {
    let has_ip = gid
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
        let gid = Ipv6Addr::from(entry.gid());
        let Some(rank) = preference(entry.gid_type(), gid) else {
            continue;
        };
        if best.is_none_or(|(found, _)| rank < found) {
            let index = u8::try_from(entry.gid_index())?;
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
        if usize::try_from(written) != Ok(size) {
            return Err(io::Error::last_os_error()).context("REREG_MR");
        }
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

/// A piece of a region, as work requests name it; those of the other end may be on another host.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Part {
    pub(super) addr: u64,
    pub(super) len: u32,
    pub(super) lkey: u32,
    pub(super) rkey: u32,
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
