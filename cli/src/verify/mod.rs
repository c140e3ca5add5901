// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! The command `verify`.
//!
//! The command registers GPU memory by each method ([`event::Way`]), and moves and compares bytes.
//! Then the command frees GPU memory that is still registered, and kills a process that has a
//! registration. The page docs/verify.md says what each step proves, and names the limits.
//!
//! [`steps`] contains the steps, which run on the devices of [`mod@bench`]. [`worker`] is the
//! process that runs the steps, and [`supervisor`] watches the worker. [`mod@print`] prints the
//! results.
//!
//! Between two hosts, the steps run on the client. [`server`] waits for clients, and its workers
//! carry out the client's requests ([`peer`]).

mod bench;
mod event;
mod module;
mod peer;
mod print;
mod server;
mod steps;
mod supervisor;
mod task;
mod worker;

use std::net::{IpAddr, SocketAddr, ToSocketAddrs as _};
use std::time::Duration;

use anyhow::{bail, ensure, Context as _, Result};
use peermem_verbs::rdma;

use crate::args;
use crate::finding::Status;
use crate::host::Host;
use crate::machine::pci::Address;
use crate::machine::{Machine, Port};
use crate::report::Out;
use event::{Name, Outcome, Step};
use peer::Hello;
use print::{Pair, Report};
use steps::Links;
use task::{Found, Role, Server, Source, Task};

pub(crate) use worker::run as run_part;

/// Maximum size of a buffer. The message of a work request is limited to 2 GiB.
const LONGEST: u64 = 1 << 30;

/// This host: its devices, and the GPUs that can allocate memory.
struct Here<'a> {
    args: &'a args::Verify,
    machine: Machine,
    gpus: Vec<Found>,
}

impl Here<'_> {
    fn limit(&self) -> Duration {
        Duration::from_secs(self.args.timeout)
    }

    /// Returns the task of one pair.
    fn task(&self, gpu: &Found, hca: Option<&str>, size: usize) -> Task {
        Task {
            gpu: gpu.pci.clone(),
            source: gpu.source,
            hca: hca.map(str::to_owned),
            port: hca.map_or(1, |hca| active_port(&self.machine, hca)),
            size,
            limit: self.args.timeout,
            server: None,
            links: hca.map_or_else(Links::default, |hca| links(&self.machine, gpu, hca)),
        }
    }
}

/// Runs the command on this machine, even if `host` is a recording.
///
/// # Errors
/// The arguments name no existing device, or no step can be tried on this machine.
pub(crate) fn run(host: &dyn Host, args: &args::Verify, out: &mut Out) -> Result<Status> {
    let size = size(args.size)?;
    ensure!(args.timeout > 0, "--timeout: must be at least 1 s");
    let server = match args.host.as_deref() {
        None => None,
        Some(name) => Some((name, addresses(name)?)),
    };
    let two_hosts = args.server.is_some() || server.is_some();
    let is_none = args.gpu.as_deref() == Some(NO_GPU);
    ensure!(
        !is_none || two_hosts,
        "--gpu {NO_GPU} is for a run between two hosts"
    );
    let here = Here {
        args,
        // Names of devices work even if PCI is not visible.
        machine: Machine::scan(host).unwrap_or_default(),
        gpus: match is_none {
            true => vec![Found::none()],
            false => supervisor::gpus(args.stand_in, Duration::from_secs(args.timeout))?,
        },
    };
    ensure!(!here.gpus.is_empty(), "CUDA shows no GPU to this process");
    let gpus = chosen_gpus(&here.gpus, args.gpu.as_deref())?;
    let hcas = match args.gpu_only {
        true => Ok(Vec::new()),
        false => rdma::devices().and_then(|names| {
            ensure!(!names.is_empty(), "there is no RDMA device");
            Ok(names)
        }),
    };
    let hcas = match hcas {
        Err(why) if two_hosts => return Err(why),
        hcas => hcas,
    };
    let mut pairs = Vec::new();
    for (index, gpu) in gpus {
        let ends = match &hcas {
            Ok(names) => chosen_hcas(&here.machine, names, gpu, args)?,
            Err(_) => Vec::new(),
        };
        match ends.is_empty() {
            true => pairs.push((index, gpu, None)),
            false => pairs.extend(ends.into_iter().map(|hca| (index, gpu, Some(hca)))),
        }
    }
    if let Some(listen) = &args.server {
        return server::run(&here, &pairs, listen, out);
    }
    let mut report = Report {
        size: size as u64,
        gpu_only: args.gpu_only,
        pairs: Vec::new(),
    };
    let mut rest = pairs.len();
    for (index, gpu, hca) in pairs {
        rest = rest.saturating_sub(1);
        let mut task = here.task(gpu, hca, size);
        task.server = server.as_ref().map(|(name, addresses)| Server {
            name: (*name).to_owned(),
            addresses: addresses.clone(),
            hello: Hello {
                size: size as u64,
                gpu_index: index,
                more: rest > 0,
            },
        });
        let followed = supervisor::oversee(&Role::Worker(task), here.limit(), None)?;
        let peer = server
            .as_ref()
            .map(|(name, _)| (print::Role::Client, (*name).to_owned()));
        let mut pair = Pair::of((index, gpu), hca, peer, followed);
        if let (None, Err(why)) = (hca, &hcas) {
            let (outcome, why) = (Outcome::NotPossibleHere, format!("{why:#}"));
            pair.steps
                .push(Step::new(None, Name::RdmaDevice, outcome, Some(why)));
        }
        report.pairs.push(pair);
    }
    print::tell(&report, out)?;
    match report.status() {
        Status::Failed => match hcas {
            Err(why) => Err(why.context("no pair could be tried")),
            Ok(_) => bail!("nothing could be tried"),
        },
        status => Ok(status),
    }
}

/// Argument of `--gpu` for a host that uses only host memory.
const NO_GPU: &str = "none";

/// Default port of `verify --server`.
const PORT: u16 = 18516;

/// Resolves `HOST`, `HOST:PORT`, `[IPV6]:PORT` or an IP address.
fn addresses(host: &str) -> Result<Vec<SocketAddr>> {
    let found = match host.parse::<IpAddr>() {
        Ok(address) => Ok(vec![(address, PORT).into()]),
        Err(_) if host.contains(':') => host.to_socket_addrs().map(Iterator::collect),
        Err(_) => (host, PORT).to_socket_addrs().map(Iterator::collect),
    };
    let found: Vec<_> = found.with_context(|| format!("no address for {host:?}"))?;
    ensure!(!found.is_empty(), "no address for {host:?}");
    Ok(found)
}

/// Checks the size of a buffer.
fn size(size: u64) -> Result<usize> {
    ensure!(
        (steps::GRANULE..=LONGEST).contains(&size) && size % steps::GRANULE == 0,
        "--size: a multiple of {} up to {LONGEST}, not {size}",
        steps::GRANULE
    );
    Ok(usize::try_from(size)?)
}

/// Returns all GPUs, or only the GPU with this index or PCI address. Each GPU comes with its index.
fn chosen_gpus<'a>(all: &'a [Found], name: Option<&str>) -> Result<Vec<(usize, &'a Found)>> {
    let mut gpus = all.iter().enumerate();
    let Some(name) = name.filter(|name| *name != NO_GPU) else {
        return Ok(gpus.collect());
    };
    let index: Option<usize> = name.parse().ok();
    let at: Option<Address> = name.parse().ok();
    let is_it = |gpu: &Found| at.is_some() && gpu.pci.parse().ok() == at;
    gpus.find(|(number, gpu)| Some(*number) == index || is_it(gpu))
        .map(|found| vec![found])
        .with_context(|| {
            let all: Vec<_> = all.iter().map(|gpu| gpu.pci.as_str()).collect();
            format!("--gpu: no GPU {name:?} among {}", all.join(", "))
        })
}

/// Returns the RDMA devices to try with a GPU: the named device, all devices, or the nearest
/// device. If the distances are unknown, returns the first device.
fn chosen_hcas<'a>(
    machine: &Machine,
    names: &'a [String],
    gpu: &Found,
    args: &args::Verify,
) -> Result<Vec<&'a str>> {
    if args.gpu_only {
        return Ok(Vec::new());
    }
    if let Some(name) = &args.hca {
        let found = names.iter().find(|hca| *hca == name);
        let found = found.with_context(|| {
            format!("--hca: no RDMA device {name:?} among {}", names.join(", "))
        })?;
        return Ok(vec![found]);
    }
    if args.all_pairs {
        return Ok(names.iter().map(String::as_str).collect());
    }
    let at: Option<Address> = gpu.pci.parse().ok();
    let is_best = |name: &&String| {
        let mut pairs = machine.pairs.iter();
        pairs.any(|pair| pair.is_best && Some(pair.gpu) == at && pair.hca == **name)
    };
    let best = names.iter().find(is_best).or(names.first());
    Ok(best.map(String::as_str).into_iter().collect())
}

/// Returns the bandwidths of the links of a GPU and an RDMA device. The bandwidths of emulated
/// devices are unknown.
fn links(machine: &Machine, gpu: &Found, hca: &str) -> Links {
    /// Bytes per second of one Mb/s.
    const MEGABIT: u64 = 125_000;
    let port = u32::from(active_port(machine, hca));
    let Some(hca) = machine.hca(hca).filter(|hca| !hca.is_software) else {
        return Links::default();
    };
    let pcie = |at: Address| Some(machine.link(at)?.most.megabits());
    let known = |megabits: &u64| *megabits > 0;
    let bytes = |megabits: u64| megabits.saturating_mul(MEGABIT);
    let port = hca.ports.iter().find(|one| one.number == port);
    let nic = hca.at.and_then(pcie).into_iter();
    let nic = nic.chain(port.and_then(Port::megabits)).filter(known).min();
    let gpu = match gpu.source {
        Source::StandIn => return Links::default(),
        Source::Cuda | Source::None => gpu.pci.parse().ok().and_then(pcie).filter(known),
    };
    Links {
        gpu: gpu.map(bytes),
        nic: nic.map(bytes),
    }
}

/// Returns the first active port, or port 1 if no port is active.
fn active_port(machine: &Machine, hca: &str) -> u8 {
    let mut ports = machine.hca(hca).into_iter().flat_map(|hca| &hca.ports);
    let is_active = |port: &&Port| {
        let state = port.state.as_deref();
        state.is_some_and(|state| state.contains("ACTIVE"))
    };
    ports
        .find(is_active)
        .and_then(|port| u8::try_from(port.number).ok())
        .unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture;

    fn found(pci: &str) -> Found {
        Found {
            pci: pci.to_owned(),
            name: "a GPU".to_owned(),
            source: Source::Cuda,
        }
    }

    #[test]
    fn sizes_are_whole_pages_of_the_gpu() {
        assert_eq!(size(65_536).ok(), Some(65_536));
        assert_eq!(size(LONGEST).ok(), Some(1 << 30));
        for wrong in [0, 1, 4096, 65_537, LONGEST + 65_536, u64::MAX] {
            assert!(size(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn links_bound_a_rate() {
        let links = |fixture: &fixture::Fixture, gpu: &Found, hca| {
            let machine = Machine::scan(&fixture.recording).unwrap_or_default();
            links(&machine, gpu, hca)
        };
        let (hgx, gpu) = (fixture::hgx(), found("0000:19:00.0"));
        let known = |gpu, nic| Links { gpu, nic };
        // PCIe 5.0 x16, and 400 Gb/s; PCIe 4.0 x8 is faster than 25 Gb/s.
        let x16 = Some(63_014_000_000);
        assert_eq!(
            links(&hgx, &gpu, "mlx5_0"),
            known(x16, Some(50_000_000_000))
        );
        assert_eq!(links(&hgx, &gpu, "mlx5_8"), known(x16, Some(3_125_000_000)));
        assert_eq!(links(&hgx, &Found::none(), "mlx5_0").gpu, None);
        let stand_in = Found {
            source: Source::StandIn,
            ..gpu
        };
        assert_eq!(links(&hgx, &stand_in, "mlx5_0"), Links::default());
        let rxe = links(&fixture::soft_roce(), &found("0000:01:00.0"), "rxe0");
        assert_eq!(rxe, Links::default());
    }

    #[test]
    fn a_server_is_a_host_and_a_port() {
        let first = |host| addresses(host).ok()?.first().map(ToString::to_string);
        for (host, address) in [
            ("10.77.0.2", "10.77.0.2:18516"),
            ("10.77.0.2:7", "10.77.0.2:7"),
            ("fe80::1", "[fe80::1]:18516"),
            ("[fe80::1]:7", "[fe80::1]:7"),
        ] {
            assert_eq!(first(host).as_deref(), Some(address));
        }
        for wrong in ["", ":", "10.77.0.2:", "10.77.0.2:65536", "[fe80::1]"] {
            assert!(addresses(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_gpu_is_named_by_index_or_address() {
        let all = [found("0000:3b:00.0"), found("0001:86:00.0")];
        let index = |name| {
            let chosen = chosen_gpus(&all, name).ok()?;
            Some(
                chosen
                    .into_iter()
                    .map(|(index, _)| index)
                    .collect::<Vec<_>>(),
            )
        };
        assert_eq!(index(None), Some(vec![0, 1]));
        assert_eq!(index(Some("1")), Some(vec![1]));
        assert_eq!(index(Some("3B:00.0")), Some(vec![0]));
        assert_eq!(index(Some("0001:86:00.0")), Some(vec![1]));
        assert_eq!(index(Some("2")), None);
        assert_eq!(index(Some("0000:86:00.0")), None);
    }
}
