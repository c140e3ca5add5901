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
use sideway::ibverbs::protection_domain::ProtectionDomain;
pub use sideway::ibverbs::AccessFlags;

use crate::memory::Span;

/// Default port.
const PORT: u8 = 1;

/// Library that this module calls. The binding looks up the library at program start. If the
/// library is missing, each call fails with `EOPNOTSUPP`, which hides the cause.
pub const LIBRARY: &str = "libibverbs.so.1";

/// Returns an error with the reason if libibverbs cannot be loaded.
pub fn library() -> Result<()> {
    // SAFETY: The binding has already loaded the same library if possible. The constructors of
    // libibverbs and its dependencies have no preconditions.
    match unsafe { libloading::Library::new(LIBRARY) } {
        Ok(library) => {
            // The library stays loaded, because the binding has pointers into it.
            std::mem::forget(library);
            Ok(())
        }
        Err(error) => Err(anyhow!(
            "{LIBRARY} cannot be loaded: {}",
            crate::cause(&error)
        )),
    }
}

/// Returns the names of the RDMA devices, in libibverbs' order.
///
/// # Errors
/// The library is missing, or cannot list the devices.
pub fn devices() -> Result<Vec<String>> {
    library()?;
    let list = DeviceList::new().map_err(|error| anyhow!("ibv_get_device_list: {}", error.0))?;
    Ok(list.iter().map(|device| device.name()).collect())
}

/// Returns all access rights of a region.
pub fn full_access() -> AccessFlags {
    AccessFlags::LocalWrite
        | AccessFlags::RemoteWrite
        | AccessFlags::RemoteRead
        | AccessFlags::RemoteAtomic
}

/// A refused registration, with the errno that the application sees.
#[derive(Debug, thiserror::Error)]
#[error("{call}: {error}")]
pub struct Refused {
    call: &'static str,
    error: io::Error,
}

/// Calls that register a region.
const REG_MR: &str = "ibv_reg_mr";
const REG_DMABUF_MR: &str = "ibv_reg_dmabuf_mr";

impl Refused {
    fn invalid(call: &'static str) -> Self {
        let error = io::Error::from_raw_os_error(libc::EINVAL);
        Self { call, error }
    }

    /// Returns the errno, or 0 if the library gave none.
    pub fn errno(&self) -> i32 {
        self.error.raw_os_error().unwrap_or(0)
    }
}

/// Returns the name of an errno of a registration, such as EFAULT.
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

/// Address of a port.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(super) enum Address {
    /// An entry of the GID table.
    Roce { gid: Ipv6Addr, index: u8 },
    /// A number that the subnet manager assigned.
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

/// An open device with a protection domain, and the source address of its packets.
#[derive(Debug)]
pub struct Hca {
    pub(super) name: String,
    pub(super) port: u8,
    pub(super) context: Arc<DeviceContext>,
    pub(super) domain: Arc<ProtectionDomain>,
    pub(super) address: Address,
}

/// Devices of the machine, enumerated once. Forked processes can open these devices without
/// enumerating again.
pub struct Devices(DeviceList);

impl Devices {
    /// Enumerates the devices.
    ///
    /// # Errors
    /// `ibv_get_device_list` failed.
    pub fn find() -> Result<Self> {
        Ok(Self(DeviceList::new().context("ibv_get_device_list")?))
    }

    /// Opens the device `name`, for use of port `port`. Ports are numbered from 1.
    ///
    /// # Errors
    /// There is no such device or port, the device cannot be opened, or the port has no address.
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
    /// Opens a device, for use of its first port.
    pub fn open(name: &str) -> Result<Self> {
        Self::open_port(name, PORT)
    }

    /// Opens the device `name`, for use of port `port`. Ports are numbered from 1.
    ///
    /// # Errors
    /// The errors are those of [`Devices::open`].
    pub fn open_port(name: &str, port: u8) -> Result<Self> {
        Devices::find()?.open(name, port)
    }

    /// Returns the device's name, as in /sys/class/infiniband.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the number of the port in use.
    pub fn port(&self) -> u8 {
        self.port
    }

    /// Returns `true` if the port is active.
    pub fn is_active(&self) -> Result<bool> {
        let port = self.context.query_port(self.port)?;
        Ok(port.port_state() == PortState::Active)
    }

    /// Returns the address in use, as text for people.
    pub fn address(&self) -> String {
        self.address.to_string()
    }

    /// Registers a range with all access rights.
    pub fn reg_mr(&self, span: Span) -> std::result::Result<Region, Refused> {
        self.register(span, full_access())
    }

    /// Registers a range with `ibv_reg_mr`.
    pub fn register(
        &self,
        span: Span,
        access: AccessFlags,
    ) -> std::result::Result<Region, Refused> {
        let len = usize::try_from(span.len()).map_err(|_| Refused::invalid(REG_MR))?;
        // SAFETY: The domain lives as long as the region. No Rust object lies in a span, no matter
        // which parts of it are mapped.
        let mr = unsafe {
            rdma_mummy_sys::ibv_reg_mr(
                self.domain.pd().as_ptr(),
                std::ptr::without_provenance_mut(span.addr() as usize),
                len,
                access.into(),
            )
        };
        self.region(REG_MR, mr, span)
    }

    /// Registers a part of a dma-buf with `ibv_reg_dmabuf_mr`. The part starts at `offset` and is
    /// as long as `span`. Work requests address the part's bytes by the addresses of `span`.
    pub fn register_dmabuf(
        &self,
        buffer: BorrowedFd<'_>,
        offset: u64,
        span: Span,
        access: AccessFlags,
    ) -> std::result::Result<Region, Refused> {
        let len = usize::try_from(span.len()).map_err(|_| Refused::invalid(REG_DMABUF_MR))?;
        // SAFETY: The domain lives as long as the region, and the descriptor is open during the
        // call. The kernel keeps the buffer alive, and no Rust object lies in the buffer.
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
        self.region(REG_DMABUF_MR, mr, span)
    }

    /// Does the same as [`Self::register_dmabuf`], but calls the function that libibverbs exports
    /// for its providers, because Debian 12's provider for rxe has no `ibv_reg_dmabuf_mr`.
    pub fn register_dmabuf_by_command(
        &self,
        buffer: BorrowedFd<'_>,
        offset: u64,
        span: Span,
        access: AccessFlags,
    ) -> Result<std::result::Result<Region, Refused>> {
        /// `ibv_cmd_reg_dmabuf_mr`
        type Register = unsafe extern "C" fn(
            *mut rdma_mummy_sys::ibv_pd,
            u64,
            usize,
            u64,
            libc::c_int,
            libc::c_int,
            *mut ibv_mr,
        ) -> libc::c_int;
        /// Size, in bytes, that suffices for `struct verbs_mr` of any version. rxe's provider frees
        /// the structure.
        const ROOM: usize = 256;

        let len = usize::try_from(span.len())?;
        // SAFETY: The binding has already loaded the same library.
        let library = unsafe { libloading::Library::new(LIBRARY) }?;
        // SAFETY: The function has this type in all versions.
        let register = unsafe { library.get::<Register>(b"ibv_cmd_reg_dmabuf_mr") }?;
        // SAFETY: The size is not 0.
        let mr = NonNull::new(unsafe { libc::calloc(1, ROOM) }.cast::<ibv_mr>());
        let mr = mr.context("no memory")?;
        // SAFETY: The domain lives as long as the region, the descriptor is open during the call,
        // and `struct verbs_mr` begins with a `struct ibv_mr`.
        let code = unsafe {
            register(
                self.domain.pd().as_ptr(),
                offset,
                len,
                span.addr(),
                buffer.as_raw_fd(),
                access.into(),
                mr.as_ptr(),
            )
        };
        if code != 0 {
            // SAFETY: `calloc` allocated this memory, and nothing else refers to it.
            unsafe { libc::free(mr.as_ptr().cast()) };
            return Ok(Err(Refused {
                call: "ibv_cmd_reg_dmabuf_mr",
                error: io::Error::from_raw_os_error(code),
            }));
        }
        Ok(self.region(REG_DMABUF_MR, mr.as_ptr(), span))
    }

    /// Returns the region that `call` has made, or the error of `call` if `mr` is null.
    fn region(
        &self,
        call: &'static str,
        mr: *mut ibv_mr,
        span: Span,
    ) -> std::result::Result<Region, Refused> {
        let mr = NonNull::new(mr).ok_or_else(|| Refused {
            call,
            error: io::Error::last_os_error(),
        })?;
        Ok(Region {
            mr,
            span,
            is_live: true,
            _domain: Arc::clone(&self.domain),
        })
    }

    /// Forgets all objects of this device without destroying them, and returns the device's
    /// descriptors. The objects live on while a process, such as a forked child, has the
    /// descriptors open.
    pub fn abandon(self) -> HcaFile {
        // SAFETY: The context lives as long as `self`, which this function never drops. Only two
        // plain fields are read.
        let (file, events) = unsafe {
            let context = self.context.context();
            (context.as_ref().cmd_fd, context.as_ref().async_fd)
        };
        std::mem::forget(self);
        HcaFile { file, events }
    }
}

/// Closes the descriptors of a device without deregistering `region`, like a process that exits.
/// The kernel cleans up when the last process closes the device.
pub fn abandon(hca: Hca, region: Region) {
    std::mem::forget(region);
    hca.abandon().close();
}

/// File descriptors of an open device, which no object in this process owns.
#[derive(Debug, Clone, Copy)]
pub struct HcaFile {
    file: RawFd,
    events: RawFd,
}

impl HcaFile {
    /// Closes the descriptors in this process.
    pub fn close(self) {
        for descriptor in [self.file, self.events] {
            // SAFETY: `abandon` has forgotten every owner of the descriptor, so nothing else closes
            // or uses its number.
            unsafe { libc::close(descriptor) };
        }
    }
}

/// Returns the rank of a GID as a source address. The GID with the best rank is used. Returns
/// `None` if the GID is not a RoCE GID. RoCE version 2 with an IPv4 address ranks best, because
/// both hosts most likely have such a GID.
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
        .context("no RoCE GID: does the network device have an address?")
}

/// A registered memory region, deregistered on drop at the latest. The drop ignores errors.
#[derive(Debug)]
pub struct Region {
    mr: NonNull<ibv_mr>,
    span: Span,
    is_live: bool,
    /// Keeps the protection domain of the region alive.
    _domain: Arc<ProtectionDomain>,
}

// SAFETY: A region belongs to its process, not to a thread. Its structure does not change before
// the region ends.
unsafe impl Send for Region {}

impl Drop for Region {
    fn drop(&mut self) {
        if self.is_live {
            // SAFETY: libibverbs made the region, and nothing uses the region any more.
            unsafe { rdma_mummy_sys::ibv_dereg_mr(self.mr.as_ptr()) };
        }
    }
}

impl Region {
    /// Deregisters the region. If this fails, returns the region with the error, so that the caller
    /// can try again.
    pub fn deregister(mut self) -> std::result::Result<(), (Self, io::Error)> {
        // SAFETY: libibverbs made the region. Only a successful call ends the region, and a success
        // consumes `self`.
        match unsafe { rdma_mummy_sys::ibv_dereg_mr(self.mr.as_ptr()) } {
            0 => {
                self.is_live = false;
                Ok(())
            }
            code => Err((self, io::Error::from_raw_os_error(code))),
        }
    }

    fn mr(&self) -> &ibv_mr {
        // SAFETY: The region lives as long as `self`, and its plain fields do not change.
        unsafe { self.mr.as_ref() }
    }

    /// Returns the key for local work requests.
    pub fn lkey(&self) -> u32 {
        self.mr().lkey
    }

    /// Returns the key for work requests of the other end.
    pub fn rkey(&self) -> u32 {
        self.mr().rkey
    }

    /// Returns the first address.
    pub fn addr(&self) -> u64 {
        self.span.addr()
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> u64 {
        self.span.len()
    }

    /// Returns a part of the region for a work request. The part may lie outside the region, to
    /// test the device's refusal.
    pub fn part(&self, offset: u64, len: u64) -> Result<Part> {
        Part::of(self.span, offset, len, self.lkey(), self.rkey())
    }

    /// Returns the descriptor that keeps this region alive. The kernel destroys the region when the
    /// last copy of the descriptor, in any process, is closed.
    pub fn command_descriptor(&self) -> RawFd {
        // SAFETY: The context lives as long as the region. Only a plain field is read.
        unsafe { (*self.mr().context).cmd_fd }
    }

    /// Changes the access rights of the live region. Uses the kernel's interface directly, because
    /// Debian's rxe provider has no `ibv_rereg_mr`.
    pub fn change_access(&self, access: AccessFlags) -> Result<()> {
        let mut answer = ReregAnswer::default();
        let request = ReregRequest {
            command: REREG_MR,
            in_words: words::<ReregRequest>(),
            out_words: words::<ReregAnswer>(),
            response: std::ptr::from_mut(&mut answer) as u64,
            mr_handle: self.mr().handle,
            flags: rdma_mummy_sys::ibv_rereg_mr_flags::IBV_REREG_MR_CHANGE_ACCESS.0,
            access_flags: u32::try_from(access.bits())?,
            ..ReregRequest::default()
        };
        let (file, size) = (self.command_descriptor(), size_of::<ReregRequest>());
        // SAFETY: The kernel reads the request and writes the answer. The request and the answer
        // live in this function and have the given sizes.
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

/// A part of a region, in the form that work requests use. The other end's parts may be on another
/// host.
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

    /// Returns the last byte of this part.
    pub fn last_byte(self) -> Self {
        Self {
            addr: self
                .addr
                .wrapping_add(u64::from(self.len.saturating_sub(1))),
            len: 1,
            ..self
        }
    }
}
