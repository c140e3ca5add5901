// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! A [`Bench`] with an RDMA device, and with a GPU through CUDA or the test VM's stand-in GPU.

use std::fs::File;
use std::io::{Seek as _, SeekFrom};
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{anyhow, bail, Context as _, Result};
use peermem_verbs::memory::{Mapping, Placement, Span};
use peermem_verbs::pattern::{difference, Difference, Pattern};
use peermem_verbs::rdma::{Contact, Endpoint, Op, Part, Status};
use peermem_verbs::{cuda, rdma, standin};

use super::event::Way;
use super::module;
use super::peer::{unexpected, Answer, Peer, Request};
use super::steps::{Bench, Contents, End, Kind, Moved, Unable, Verb, Window};
use super::task::{Found, Holder, Source, Task};
use crate::host::live::Live;
use crate::host::{Host as _, Seen, Unseen};

/// Directory of the driver `nvidia`. The stand-in's driver has the same name.
const DRIVER: &str = "/sys/bus/pci/drivers/nvidia";
/// PCI vendor ID of QEMU's shared-memory device, which provides the stand-in's BAR.
const STAND_IN_VENDOR: &str = "0x1af4";

/// Returns the PCI addresses of the test VM's stand-in GPUs.
fn stand_ins() -> Vec<String> {
    let host = Live;
    let names = host.names(DRIVER).unwrap_or_default();
    let is_one = |name: &String| {
        host.text(&format!("{DRIVER}/{name}/vendor"))
            .is_ok_and(|vendor| vendor == STAND_IN_VENDOR)
    };
    names.into_iter().filter(is_one).collect()
}

/// Returns the GPUs that can allocate memory, sorted by PCI address as in nvidia-smi.
///
/// # Errors
/// CUDA is not available, and there is no stand-in.
pub(crate) fn gpus(stand_in: bool) -> Result<Vec<Found>> {
    let stand_ins = stand_ins();
    let of_stand_ins = || {
        let found = stand_ins.iter().map(|pci| Found {
            pci: pci.clone(),
            name: "stand-in GPU".to_owned(),
            source: Source::StandIn,
        });
        found.collect()
    };
    if stand_in {
        if stand_ins.is_empty() {
            bail!("there is no stand-in GPU");
        }
        return Ok(of_stand_ins());
    }
    let found = cuda::Cuda::load().and_then(|cuda| cuda.gpus());
    match found {
        Ok(gpus) => {
            let mut all: Vec<_> = gpus
                .iter()
                .map(|gpu| Found {
                    pci: gpu.pci().to_owned(),
                    name: gpu.name().to_owned(),
                    source: Source::Cuda,
                })
                .collect();
            all.sort_by(|a, b| a.pci.cmp(&b.pci));
            Ok(all)
        }
        Err(_) if !stand_ins.is_empty() => Ok(of_stand_ins()),
        Err(error) => Err(error.context("no GPU memory can be allocated")),
    }
}

#[derive(Debug)]
enum Gpu {
    Cuda(Arc<cuda::Context>),
    StandIn(Arc<standin::Gpu>),
    None,
}

impl Gpu {
    fn open(task: &Task) -> Result<Self> {
        if task.source == Source::None {
            return Ok(Self::None);
        }
        if task.source == Source::StandIn {
            rdma::wait_for_emulated_answers();
            let index = stand_ins()
                .iter()
                .position(|pci| *pci == task.gpu)
                .with_context(|| format!("no stand-in GPU at {}", task.gpu))?;
            let gpu = standin::Gpu::open(index, task.gpu.clone())?;
            return Ok(Self::StandIn(Arc::new(gpu)));
        }
        let gpu = cuda::Cuda::load()?
            .gpus()?
            .into_iter()
            .find(|gpu| gpu.pci() == task.gpu)
            .with_context(|| format!("CUDA has no GPU at {}", task.gpu))?;
        Ok(Self::Cuda(Arc::new(gpu.enter()?)))
    }
}

/// Host or GPU memory.
#[derive(Debug)]
pub(crate) enum Memory {
    Host(Mapping),
    Cuda(cuda::Allocation),
    StandIn(standin::Allocation),
    /// Memory of the server.
    OnServer(Kind),
}

impl Memory {
    fn span(&self) -> Result<Span> {
        match self {
            Self::Host(memory) => memory.span(0, memory.len()),
            Self::Cuda(memory) => memory.span(0, memory.len()),
            Self::StandIn(memory) => memory.span(0, memory.mapping().len()),
            Self::OnServer(_) => bail!(NOT_HERE),
        }
    }

    /// Returns `true` if the memory lies in two allocations.
    fn is_two(&self) -> bool {
        matches!(self, Self::Cuda(memory) if memory.is_two())
    }

    /// Returns a buffer as long as the memory.
    fn buffer(&self) -> Result<Vec<u8>> {
        Ok(vec![0; usize::try_from(self.span()?.len())?])
    }

    fn write(&self, data: &[u8]) -> Result<()> {
        match self {
            Self::Host(memory) => memory.write(0, data),
            Self::Cuda(memory) => memory.write(0, data),
            Self::StandIn(memory) => memory.write(0, data),
            Self::OnServer(_) => bail!(NOT_HERE),
        }
    }

    fn read(&self, out: &mut [u8]) -> Result<()> {
        match self {
            Self::Host(memory) => memory.read(0, out),
            Self::Cuda(memory) => memory.read(0, out),
            Self::StandIn(memory) => memory.read(0, out),
            Self::OnServer(_) => bail!(NOT_HERE),
        }
    }
}

const NOT_HERE: &str = "memory of the server";

/// A region, which is deregistered on drop at the latest. The server deregisters its regions when
/// the connection ends.
#[derive(Debug)]
pub(crate) enum Region {
    Here(rdma::Region),
    OnServer(Kind),
}

impl Region {
    fn part(&self, window: Window) -> Result<Part> {
        match self {
            Self::Here(region) => region.part(window.at, window.len),
            Self::OnServer(_) => bail!("no region of this host"),
        }
    }
}

/// Connected queue pairs of a transfer, with the source and the target.
struct Path {
    near: Endpoint,
    /// The other queue pair, if it is on this host.
    far: Option<Endpoint>,
    from: Part,
    to: Part,
}

/// A GPU, and optionally an RDMA device.
#[derive(Debug)]
pub(crate) struct Real {
    task: Task,
    gpu: Gpu,
    hca: Option<rdma::Hca>,
    server: Option<Peer>,
    /// Queue pair of the server that is connected to the client.
    accepted: Option<Endpoint>,
    begun: Instant,
}

impl Real {
    /// Opens the devices. A run between two hosts has a `server`.
    pub(crate) fn open(task: Task, server: Option<Peer>) -> Result<Self> {
        let gpu = Gpu::open(&task).with_context(|| format!("GPU {}", task.gpu))?;
        let hca = match &task.hca {
            None => None,
            Some(name) => {
                rdma::library()?;
                let hca = rdma::Hca::open_port(name, task.port)?;
                if !hca.is_active()? {
                    bail!("port {} of {name} is not active", task.port);
                }
                Some(hca)
            }
        };
        Ok(Self {
            task,
            gpu,
            hca,
            server,
            accepted: None,
            begun: Instant::now(),
        })
    }

    /// Sends a request to the server, and returns the answer.
    fn call(&mut self, kind: Kind, request: Request) -> Result<Answer, Unable> {
        let server = self.server.as_mut().context("no server")?;
        server.call(kind, request)
    }

    /// Sends a request that has no result.
    fn order(&mut self, kind: Kind, request: Request) -> Result<(), Unable> {
        match self.call(kind, request)? {
            Answer::Done => Ok(()),
            answer => Err(unexpected(&answer).into()),
        }
    }

    fn hca(&self) -> Result<&rdma::Hca> {
        self.hca.as_ref().context("no RDMA device was requested")
    }

    /// Connects two queue pairs for a transfer.
    fn path(&mut self, verb: Verb, from: &Region, to: &Region, window: Window) -> Result<Path> {
        let kind = match (verb, from, to) {
            (_, Region::Here(_), Region::Here(_)) => {
                let (hca, from, to) = (self.hca()?, from.part(window)?, to.part(window)?);
                let ends = rdma::connect(hca, hca).context("a connection with itself")?;
                return Ok(Path {
                    near: ends.near,
                    far: Some(ends.far),
                    from,
                    to,
                });
            }
            (Verb::Write, _, Region::OnServer(kind)) | (Verb::Read, Region::OnServer(kind), _) => {
                *kind
            }
            _ => bail!("not a transfer that the client's device issues"),
        };
        let mut near = Endpoint::new(self.hca()?)?;
        let own = near.contact(self.hca()?)?;
        let (theirs, part) = match self.call(kind, Request::Connect(window, own))? {
            Answer::Connected(theirs, part) => (theirs, part),
            answer => return Err(unexpected(&answer)),
        };
        near.connect(self.hca()?, &theirs)
            .context("a connection with the server")?;
        let (from, to) = match verb {
            Verb::Read => (part, to.part(window)?),
            Verb::Write | Verb::Send => (from.part(window)?, part),
        };
        Ok(Path {
            near,
            far: None,
            from,
            to,
        })
    }

    /// Exports the memory as a dma-buf. If the driver exports no dma-buf, the error names the
    /// reason, if known.
    fn dma_buf(&self, memory: &Memory) -> Result<std::os::fd::OwnedFd, Unable> {
        let (Gpu::Cuda(context), Memory::Cuda(memory)) = (&self.gpu, memory) else {
            return Err(Unable::Impossible(
                "the stand-in GPU exports no dma-buf".to_owned(),
            ));
        };
        let has = context.gpu().has_dma_buf();
        let exported = memory.dma_buf(memory.len());
        let is_refused = |error: &anyhow::Error| {
            memory.is_two() && error.downcast_ref().is_some_and(cuda::Failed::is_refusal)
        };
        match (exported, has) {
            (Ok(buffer), _) => Ok(buffer),
            (Err(error), Ok(true)) if is_refused(&error) => Err(Unable::Impossible(format!(
                "the GPU's driver exports no range over two allocations: {error:#}"
            ))),
            (Err(error), Ok(true)) => Err(error.into()),
            // An old driver supports neither the export nor the query.
            (Err(error), Ok(false) | Err(_)) => Err(Unable::Impossible(format!(
                "the GPU's driver exports no dma-buf: {error:#}"
            ))),
        }
    }

    /// Formats a refused registration: the errno, and for GPU memory the module's reason for the
    /// last refusal.
    fn refusal(&self, refused: &rdma::Refused, is_gpu: bool) -> Unable {
        let mut why = format!("{refused} ({})", rdma::errno_name(refused.errno()));
        if is_gpu {
            match module::last_refusal(&Live, std::process::id()) {
                Ok(Some(reason)) => why = format!("{why}; the module: {reason}"),
                Ok(None) => why.push_str("; the module recorded no reason"),
                Err(Unseen::Absent) => {}
                Err(unseen) => why = format!("{why}; the module's list of refusals is {unseen}"),
            }
        }
        Unable::Failed {
            why,
            errno: Some(refused.errno()),
        }
    }

    fn by_dma_buf(&mut self, memory: &Memory) -> Result<Region, Unable> {
        let buffer = self.dma_buf(memory)?;
        let span = memory.span()?;
        let hca = self.hca()?;
        let access = rdma::full_access();
        match hca.register_dmabuf(buffer.as_fd(), 0, span, access) {
            Ok(region) => Ok(Region::Here(region)),
            Err(refused) if NO_DMA_BUF.contains(&refused.errno()) => {
                Err(Unable::Impossible(format!(
                    "the kernel, or the driver of {}, cannot register a dma-buf: {refused}",
                    hca.name()
                )))
            }
            Err(refused) => Err(self.refusal(&refused, false)),
        }
    }
}

/// Errors of a kernel or driver without dma-buf registration.
const NO_DMA_BUF: [i32; 4] = [
    libc::EOPNOTSUPP,
    libc::ENOSYS,
    libc::EPROTONOSUPPORT,
    libc::ENOTTY,
];

/// Number of simultaneous transfers in speed measurements.
const UNDER_WAY: usize = 4;

impl Path {
    /// Posts one transfer. Before a SEND, posts a receive on the receiving queue pair.
    fn post(&mut self, verb: Verb) -> Result<()> {
        match verb {
            Verb::Write => self.near.post(Op::Write, self.from, self.to)?,
            // For a READ, `post` takes the local memory first, although this memory receives the
            // bytes.
            Verb::Read => self.near.post(Op::Read, self.to, self.from)?,
            Verb::Send => {
                let far = self.far.as_mut().context("a SEND to the server")?;
                far.post_receive(self.to)?;
                self.near.post(Op::Send, self.from, self.from)?
            }
        };
        Ok(())
    }

    /// Waits for the oldest transfer to end.
    fn ended(&mut self, verb: Verb) -> Result<Status> {
        let sent = self.near.sent()?.status;
        match (verb, &mut self.far) {
            // If the sender fails, the receiver may never complete.
            (Verb::Send, Some(far)) if sent == Status::Success => Ok(far.received()?.status),
            _ => Ok(sent),
        }
    }

    /// Waits until the bytes of a WRITE are in the server's memory. The completion of a WRITE does
    /// not prove that its bytes have arrived. A READ of the last byte on the same queue pair
    /// completes only after the earlier WRITEs have reached the memory. The READ stores the byte in
    /// separate host memory, because the source buffer of the WRITE must not change.
    fn placed(&mut self, hca: &rdma::Hca) -> Result<Status> {
        let memory = Mapping::anonymous(1)?;
        let region = hca.reg_mr(memory.span(0, 1)?)?;
        let byte = region.part(0, 1)?;
        Ok(self.near.run(Op::Read, byte, self.to.last_byte())?.status)
    }
}

impl Bench for Real {
    type Memory = Memory;
    type Region = Region;
    type Holder = Holder;

    fn about(&self) -> String {
        let gpu = match &self.gpu {
            Gpu::Cuda(context) => format!("{} {}", context.gpu().name(), self.task.gpu),
            Gpu::StandIn(_) => format!("stand-in GPU {}", self.task.gpu),
            Gpu::None => "no GPU".to_owned(),
        };
        match &self.hca {
            None => gpu,
            Some(hca) => format!(
                "{gpu}, {} port {}, {}",
                hca.name(),
                hca.port(),
                hca.address()
            ),
        }
    }

    fn memory(&mut self, end: End, kind: Kind, len: usize) -> Result<Memory, Unable> {
        if end == End::Server {
            self.order(kind, Request::Allocate)?;
            return Ok(Memory::OnServer(kind));
        }
        Ok(match (kind, &self.gpu) {
            (Kind::Host, _) => Memory::Host(Mapping::anonymous(len).context("host memory")?),
            (Kind::Gpu, Gpu::Cuda(context)) => Memory::Cuda(context.allocate(len)?),
            (Kind::Gpu, Gpu::StandIn(gpu)) => Memory::StandIn(gpu.allocate(len, Placement::Any)?),
            (Kind::Gpu, Gpu::None) => return Err(Unable::Impossible("--gpu none".to_owned())),
        })
    }

    fn two_allocations(&mut self, head: usize, len: usize) -> Result<Memory, Unable> {
        let Gpu::Cuda(context) = &self.gpu else {
            return Err(Unable::Impossible(
                "only CUDA can map two allocations side by side".to_owned(),
            ));
        };
        match context.allocate_two(head, len) {
            Ok(memory) => Ok(Memory::Cuda(memory)),
            Err(error) if error.is::<cuda::Unsupported>() => {
                Err(Unable::Impossible(error.to_string()))
            }
            Err(error) => Err(error.into()),
        }
    }

    fn fill(&mut self, memory: &Memory, pattern: Pattern) -> Result<()> {
        if let Memory::OnServer(kind) = memory {
            return Ok(self.order(*kind, Request::Fill(pattern))?);
        }
        let mut bytes = memory.buffer()?;
        pattern.fill(0, &mut bytes);
        memory.write(&bytes)
    }

    fn compare(&mut self, memory: &Memory, expected: &Contents) -> Result<Option<Difference>> {
        if let Memory::OnServer(kind) = memory {
            return match self.call(*kind, Request::Compare(*expected))? {
                Answer::Compared(difference) => Ok(difference),
                answer => Err(unexpected(&answer)),
            };
        }
        let mut found = memory.buffer()?;
        memory.read(&mut found)?;
        Ok(difference(&expected.bytes(found.len())?, &found))
    }

    fn free(&mut self, memory: &mut Memory) -> Result<()> {
        match memory {
            Memory::Host(_) => bail!("host memory is not freed"),
            Memory::OnServer(_) => bail!(NOT_HERE),
            Memory::Cuda(memory) => memory.free(),
            Memory::StandIn(memory) => memory.free(),
        }
    }

    fn export(&mut self, memory: &Memory) -> Result<u64, Unable> {
        let buffer = self.dma_buf(memory)?;
        let mut file = File::from(buffer);
        let len = file
            .seek(SeekFrom::End(0))
            .context("the length of the dma-buf")?;
        Ok(len)
    }

    fn register(&mut self, way: Way, memory: &Memory) -> Result<Region, Unable> {
        if let Memory::OnServer(kind) = memory {
            self.order(*kind, Request::Register(way))?;
            return Ok(Region::OnServer(*kind));
        }
        if way == Way::DmaBuf {
            return self.by_dma_buf(memory);
        }
        let is_gpu = !matches!(memory, Memory::Host(_));
        let span = memory.span()?;
        let hca = self.hca()?;
        match hca.register(span, rdma::full_access()) {
            Ok(region) => Ok(Region::Here(region)),
            Err(refused) if is_gpu && !module::is_loaded(&Live) => Err(Unable::Impossible(
                format!("no peer-memory module is loaded (nvidia-peermem): {refused}"),
            )),
            Err(refused)
                if memory.is_two()
                    && refused.errno() == libc::EFAULT
                    && !module::joins_allocations(&Live) =>
            {
                Err(Unable::Impossible(format!(
                    "the module registers no range over two allocations: {refused}"
                )))
            }
            Err(refused) => Err(self.refusal(&refused, is_gpu)),
        }
    }

    fn deregister(&mut self, region: Region) -> Result<()> {
        match region {
            Region::OnServer(kind) => Ok(self.order(kind, Request::Deregister)?),
            Region::Here(region) => region
                .deregister()
                .map_err(|(_, error)| anyhow!("ibv_dereg_mr: {error}")),
        }
    }

    fn transfer(
        &mut self,
        verb: Verb,
        from: &Region,
        to: &Region,
        window: Window,
        at_least: Option<Duration>,
    ) -> Result<Moved> {
        let mut path = self.path(verb, from, to, window)?;
        let begun = Instant::now();
        let (mut posted, mut done) = (0u64, 0u64);
        loop {
            let go_on = match at_least {
                None => posted == 0,
                Some(time) => posted == 0 || begun.elapsed() < time,
            };
            if go_on && posted - done < UNDER_WAY as u64 {
                path.post(verb)?;
                posted += 1;
            } else if done < posted {
                let status = path.ended(verb)?;
                if status != Status::Success {
                    return Ok(Moved::Refused(format!("{status:?}")));
                }
                done += 1;
            } else {
                break;
            }
        }
        let took = begun.elapsed();
        if verb == Verb::Write && path.far.is_none() {
            let status = path.placed(self.hca()?)?;
            if status != Status::Success {
                return Ok(Moved::Refused(format!("{status:?}")));
            }
        }
        Ok(Moved::Done {
            bytes: done.saturating_mul(window.len),
            took,
        })
    }

    fn accept(
        &mut self,
        theirs: &Contact,
        region: &Region,
        window: Window,
    ) -> Result<(Contact, Part)> {
        let part = region.part(window)?;
        // A client runs one transfer at a time.
        self.accepted = None;
        let hca = self.hca()?;
        let mut end = Endpoint::new(hca)?;
        let own = end.contact(hca)?;
        end.connect(hca, theirs)?;
        self.accepted = Some(end);
        Ok((own, part))
    }

    fn now(&self) -> Duration {
        self.begun.elapsed()
    }

    fn pause(&mut self) {
        std::thread::sleep(Duration::from_millis(5));
    }

    fn hold(&mut self, way: Way) -> Result<Holder> {
        Holder::start(&self.task, way)
    }

    fn holder(&self, holder: &Holder) -> u32 {
        holder.id()
    }

    fn kill(&mut self, holder: Holder) -> Result<()> {
        holder.kill()
    }

    fn registrations(&self, process: u32) -> Seen<usize> {
        module::registrations_of(&Live, process)
    }

    fn pinned(&self) -> Seen<u64> {
        match &self.gpu {
            Gpu::StandIn(gpu) => gpu
                .bar_pinned()
                .map_err(|error| Unseen::Failed(format!("{error:#}"))),
            Gpu::Cuda(_) | Gpu::None => Err(Unseen::Absent),
        }
    }
}
