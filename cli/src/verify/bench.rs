// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! A [`Bench`] with a real GPU through CUDA, or the test VM's stand-in, and a real RDMA device.

use std::fs::File;
use std::io::{Seek as _, SeekFrom};
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{anyhow, bail, Context as _, Result};
use peermem_verbs::memory::{Mapping, Placement, Span};
use peermem_verbs::rdma::{Endpoint, FragileRegion, Op, Part, Status};
use peermem_verbs::{cuda, rdma, standin};

use super::event::Way;
use super::module;
use super::steps::{Bench, Moved, Refusal, Unable, Verb, Window};
use super::task::{Found, Holder, Source, Task};
use crate::host::live::Live;
use crate::host::{Host as _, Seen, Unseen};

/// Directory of the driver `nvidia`. The stand-in's driver has the same name.
const DRIVER: &str = "/sys/bus/pci/drivers/nvidia";
/// Vendor of QEMU's shared memory, which is the stand-in's BAR.
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

/// Returns the GPUs that can allocate memory, by PCI address, in nvidia-smi's order.
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
        Err(error) => Err(error.context("no GPU memory can be had")),
    }
}

#[derive(Debug)]
enum Gpu {
    Cuda(Arc<cuda::Context>),
    StandIn(Arc<standin::Gpu>),
}

impl Gpu {
    fn open(task: &Task) -> Result<Self> {
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
}

impl Memory {
    fn span(&self) -> Result<Span> {
        match self {
            Self::Host(memory) => memory.span(0, memory.len()),
            Self::Cuda(memory) => memory.span(0, memory.len()),
            Self::StandIn(memory) => memory.span(0, memory.mapping().len()),
        }
    }
}

/// A region that is deregistered on drop at the latest.
#[derive(Debug)]
pub(crate) struct Region(Option<FragileRegion>);

impl Region {
    fn part(&self, window: Window) -> Result<Part> {
        self.0
            .as_ref()
            .context("no region")?
            .part(window.at, window.len)
    }

    fn deregister(mut self) -> Result<()> {
        match self.0.take().map(FragileRegion::deregister) {
            None | Some(Ok(())) => Ok(()),
            Some(Err((_, error))) => Err(anyhow!("ibv_dereg_mr: {error}")),
        }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if let Some(region) = self.0.take() {
            // A step has already failed with its own message.
            let _ = region.deregister();
        }
    }
}

/// A GPU, and optionally an RDMA device.
#[derive(Debug)]
pub(crate) struct Real {
    task: Task,
    gpu: Gpu,
    hca: Option<rdma::Hca>,
    begun: Instant,
}

impl Real {
    pub(crate) fn open(task: Task) -> Result<Self> {
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
            begun: Instant::now(),
        })
    }

    fn hca(&self) -> Result<&rdma::Hca> {
        self.hca.as_ref().context("no RDMA device is asked for")
    }

    /// Exports the memory as a dma-buf, or returns the reason why the driver exports none, if
    /// known.
    fn dma_buf(&self, memory: &Memory) -> Result<std::os::fd::OwnedFd, Unable> {
        let (Gpu::Cuda(context), Memory::Cuda(memory)) = (&self.gpu, memory) else {
            return Err(Unable::Impossible(
                "the stand-in GPU exports none".to_owned(),
            ));
        };
        let has = context.gpu().has_dma_buf();
        let exported = memory.dma_buf(memory.len());
        match (exported, has) {
            (Ok(buffer), _) => Ok(buffer),
            (Err(error), Ok(true)) => Err(error.into()),
            // An old driver supports neither the export nor the query.
            (Err(error), Ok(false) | Err(_)) => Err(Unable::Impossible(format!(
                "the GPU's driver exports none: {error:#}"
            ))),
        }
    }

    /// Formats a refusal: the errno, and the module's last record of a refusal.
    fn refusal(&self, refused: &rdma::Refused, is_gpu: bool) -> Refusal {
        let mut why = format!("{refused} ({})", rdma::errno_name(refused.errno()));
        if is_gpu {
            match module::last_refusal(&Live, std::process::id()) {
                Ok(Some(reason)) => why = format!("{why}; the module: {reason}"),
                Ok(None) => why.push_str("; the module wrote down no reason"),
                Err(Unseen::Absent) => {}
                Err(unseen) => why = format!("{why}; the module's reasons: {unseen}"),
            }
        }
        Refusal::Refused {
            errno: Some(refused.errno()),
            why,
        }
    }

    fn by_dma_buf(&mut self, memory: &Memory) -> Result<Region, Refusal> {
        let buffer = match self.dma_buf(memory) {
            Ok(buffer) => buffer,
            Err(Unable::Impossible(why)) => return Err(Refusal::NoSuchWay(why)),
            Err(Unable::Failed { why, errno }) => {
                return Err(Refusal::Refused { errno, why });
            }
        };
        let span = memory.span()?;
        let hca = self.hca()?;
        let access = rdma::full_access();
        match hca.register_dmabuf(buffer.as_fd(), 0, span, access) {
            Ok(region) => Ok(Region(Some(region))),
            Err(refused) if NO_DMA_BUF.contains(&refused.errno()) => {
                Err(Refusal::NoSuchWay(format!(
                    "the kernel, or the driver of {}, has none: {refused}",
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

/// Posts one transfer to the other end, `far`. Before a SEND, posts a receive at `far`.
fn post(near: &mut Endpoint, far: &mut Endpoint, verb: Verb, from: Part, to: Part) -> Result<()> {
    match verb {
        Verb::Write => near.post(Op::Write, from, to)?,
        // For a READ, the local memory comes first.
        Verb::Read => near.post(Op::Read, to, from)?,
        Verb::Send => {
            far.post_receive(to)?;
            near.post(Op::Send, from, from)?
        }
    };
    Ok(())
}

/// Waits for the oldest transfer to end.
fn ended(near: &mut Endpoint, far: &mut Endpoint, verb: Verb) -> Result<Status> {
    let sent = near.sent()?.status;
    if verb == Verb::Send {
        // If the sender fails, the receiver may never complete.
        if sent == Status::Success {
            return Ok(far.received()?.status);
        }
    }
    Ok(sent)
}

impl Bench for Real {
    type Memory = Memory;
    type Region = Region;
    type Holder = Holder;

    fn about(&self) -> String {
        let gpu = match &self.gpu {
            Gpu::Cuda(context) => format!("{} {}", context.gpu().name(), self.task.gpu),
            Gpu::StandIn(_) => format!("stand-in GPU {}", self.task.gpu),
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

    fn gpu_memory(&mut self, len: usize) -> Result<Memory> {
        match &self.gpu {
            Gpu::Cuda(context) => Ok(Memory::Cuda(context.allocate(len)?)),
            Gpu::StandIn(gpu) => Ok(Memory::StandIn(gpu.allocate(len, Placement::Any)?)),
        }
    }

    fn host_memory(&mut self, len: usize) -> Result<Memory> {
        Ok(Memory::Host(
            Mapping::anonymous(len).context("host memory")?,
        ))
    }

    fn put(&mut self, memory: &Memory, offset: usize, data: &[u8]) -> Result<()> {
        match memory {
            Memory::Host(memory) => memory.write(offset, data),
            Memory::Cuda(memory) => memory.write(offset, data),
            Memory::StandIn(memory) => memory.write(offset, data),
        }
    }

    fn get(&mut self, memory: &Memory, offset: usize, out: &mut [u8]) -> Result<()> {
        match memory {
            Memory::Host(memory) => memory.read(offset, out),
            Memory::Cuda(memory) => memory.read(offset, out),
            Memory::StandIn(memory) => memory.read(offset, out),
        }
    }

    fn free(&mut self, memory: &mut Memory) -> Result<()> {
        match memory {
            Memory::Host(_) => bail!("host memory is not freed"),
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

    fn register(&mut self, way: Way, memory: &Memory) -> Result<Region, Refusal> {
        if way == Way::DmaBuf {
            return self.by_dma_buf(memory);
        }
        let is_gpu = !matches!(memory, Memory::Host(_));
        let span = memory.span()?;
        let hca = self.hca()?;
        match hca.register_fragile(span, rdma::full_access()) {
            Ok(region) => Ok(Region(Some(region))),
            Err(refused) if is_gpu && !module::is_loaded(&Live) => Err(Refusal::NoSuchWay(
                format!("no peer-memory module is loaded (nvidia-peermem): {refused}"),
            )),
            Err(refused) => Err(self.refusal(&refused, is_gpu)),
        }
    }

    fn deregister(&mut self, region: Region) -> Result<()> {
        region.deregister()
    }

    fn transfer(
        &mut self,
        verb: Verb,
        from: &Region,
        to: &Region,
        window: Window,
        at_least: Option<Duration>,
    ) -> Result<Moved> {
        let (from, to) = (from.part(window)?, to.part(window)?);
        let hca = self.hca()?;
        let mut connection = rdma::connect(hca, hca).context("a connection with itself")?;
        let (near, far) = (&mut connection.near, &mut connection.far);
        let begun = Instant::now();
        let (mut posted, mut done) = (0u64, 0u64);
        loop {
            let go_on = match at_least {
                None => posted == 0,
                Some(time) => posted == 0 || begun.elapsed() < time,
            };
            if go_on && posted - done < UNDER_WAY as u64 {
                post(near, far, verb, from, to)?;
                posted += 1;
            } else if done < posted {
                let status = ended(near, far, verb)?;
                if status != Status::Success {
                    return Ok(Moved::Refused(format!("{status:?}")));
                }
                done += 1;
            } else {
                break;
            }
        }
        Ok(Moved::Done {
            bytes: done.saturating_mul(window.len),
            took: begun.elapsed(),
        })
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
            Gpu::Cuda(_) => Err(Unseen::Absent),
        }
    }
}
