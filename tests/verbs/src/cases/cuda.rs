// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Unmodified CUDA consumers over a stand-in for CUDA's library (`tests/cuda`): perftest with
//! `--use_cuda`, NIXL between two agents, UCX alone ([`ucx`](super::ucx)), and `peermemctl verify`.
//!
//! The arrival of bytes does not prove GPUDirect RDMA, because a consumer may stage them through
//! the host. The cases therefore check pins, mappings and the list while both ends have registered,
//! and the bytes on the wire at the end. Without a module, there must be no pins, mappings or
//! listed registrations.
//!
//! These cases do not use a [`Lab`](crate::lab::Lab), because no consumer needs the devices and
//! GPUs of a `Lab`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{ensure, Context, Result};

use super::buffers::{Buffers, Parts, ONE};
use super::{ctl, ucx, verify};
use crate::bench::datapath;
use crate::counters::Counters;
use crate::ktap::note;
use crate::lab::{Lab, Peermem, PinMode, Setup};
use crate::sys::{Finished, Running};
use crate::{ktap, sys};

#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Places {
    /// The directory of the stand-in for CUDA's library
    // clap needs `required = false`, because these options are optional as a group. A missing
    // option of the group is still reported.
    #[arg(long, required = false)]
    pub(super) library: PathBuf,
    /// The directory of perftest's programs
    #[arg(long)]
    pub(super) perftest: Option<PathBuf>,
    /// The directory of NIXL's libraries and of the agent that calls them
    #[arg(long)]
    pub(super) nixl: Option<PathBuf>,
    /// The directory of UCX's programs and libraries
    #[arg(long)]
    pub(super) ucx: Option<PathBuf>,
    /// The directory of Open MPI, which uses the same UCX, and of the ranks' program
    #[arg(long)]
    pub(super) mpi: Option<PathBuf>,
}

impl Places {
    pub(super) fn command(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        command.env("LD_LIBRARY_PATH", &self.library);
        command
    }

    /// Returns the command for a program that uses `device`. The program searches for libraries in
    /// UCX's directory, then beside the stand-in for CUDA's library, and then in `more`.
    pub(super) fn over_ucx(
        &self,
        program: &Path,
        device: &str,
        more: Option<PathBuf>,
    ) -> Result<Command> {
        let ucx = self.ucx.as_deref().context("no UCX")?;
        let libraries = [ucx.join("lib"), self.library.clone()];
        let libraries = std::env::join_paths(libraries.into_iter().chain(more))?;
        let mut command = Command::new(program);
        command
            .env("LD_LIBRARY_PATH", libraries)
            .env("UCX_NET_DEVICES", format!("{device}:1"))
            // UCX uses UD only to connect.
            .env("UCX_TLS", "rc_verbs,ud_verbs,cuda_copy")
            // Retransmit timeout of a queue pair. A busy machine can pause for more than a second.
            .env("UCX_RC_VERBS_TIMEOUT", "4s")
            // By default, UCX 1.22 fences with a read whose key exists only for NVIDIA's NICs.
            // Other NICs refuse this read, even for host memory.
            .env("UCX_FENCE_MODE", "weak");
        Ok(command)
    }

    /// Returns the command for a program or launcher of Open MPI that uses `device`.
    pub(super) fn over_mpi(&self, program: &Path, device: &str) -> Result<Command> {
        let mpi = self.mpi.as_deref().context("no Open MPI")?;
        let mut command = self.over_ucx(program, device, Some(mpi.join("lib")))?;
        command
            // This value makes UCX ask CUDA about each address. UCX's memory hooks missed some
            // addresses in Open MPI programs.
            .env("UCX_MEMTYPE_CACHE", "n")
            // Without this variable, UCX on rxe copies the data instead of registering the memory.
            .env("UCX_RNDV_THRESH", "8192");
        // Open MPI was built for another directory, so these variables must name its directory.
        for prefix in ["OPAL_PREFIX", "PMIX_PREFIX", "PRTE_PREFIX"] {
            command.env(prefix, mpi);
        }
        Ok(command)
    }

    /// Returns the command for one of perftest's programs: the server's end, or the client's end if
    /// `server` has an address.
    pub(super) fn perftest(
        &self,
        program: &str,
        device: &str,
        server: Option<&str>,
    ) -> Result<Command> {
        let mut words = program.split(' ');
        let path = self.perftest.as_deref().context("no perftest")?;
        let mut command = self.command(&path.join(words.next().unwrap_or_default()));
        // Retransmit timeout of about four seconds. A busy machine can pause for longer than
        // perftest's default timeout.
        command.args(["-d", device, "-x", "1", "-u", "20", "--use_cuda=0"]);
        // This flag makes perftest continue and print figures even if the clock of an emulated
        // processor is uneven.
        command.arg("-F");
        command.args(words).args(server);
        Ok(command)
    }

    /// Returns the command for one of NIXL's two agents, which exchange files in `folder`.
    pub(super) fn nixl(&self, device: &str, folder: &Path, role: &str) -> Result<Command> {
        let path = self.nixl.as_deref().context("no NIXL")?;
        let mut command = self.command(Path::new("/usr/bin/python3"));
        command
            .env("NIXL_PLUGIN_DIR", path.join("nixl_cu12.libs/nixl"))
            .env("UCX_MODULE_DIR", path.join("nixl_cu12.libs/ucx"))
            .env("UCX_NET_DEVICES", format!("{device}:1"))
            .env("UCX_TLS", "rc_verbs,ud_verbs,cuda_copy")
            .arg(path.join("nixl.py"))
            .arg(path.join(".nixl_cu12.mesonpy.libs"))
            .arg(folder)
            .arg(role);
        Ok(command)
    }
}

pub(super) struct Consumers {
    pub(super) setup: Setup,
    pub(super) places: Places,
}

/// A program of perftest or UCX that runs at both ends, and the minimum numbers of bytes that the
/// client's and the server's device send.
pub(super) struct Pair {
    pub(super) name: &'static str,
    pub(super) program: &'static str,
    pub(super) sent: [u64; 2],
}

/// Makes a table of pairs, each with a name, a program and the bytes sent.
macro_rules! pairs {
    ($($name:literal: $program:literal => $sent:expr),+ $(,)?) => {
        &[$(Pair { name: $name, program: $program, sent: $sent }),+]
    };
}
pub(super) use pairs;

/// Total bytes of five messages of each power-of-two size from 2 bytes to 8 MiB.
const ALL_SIZES: u64 = 5 * ((16 << 20) - 2);

const PAIRS: &[Pair] = pairs![
    "cuda.write_bw": "ib_write_bw -s 65536 -n 1000" => [1000 << 16, 0],
    "cuda.read_bw": "ib_read_bw -s 65536 -n 1000" => [0, 1000 << 16],
    "cuda.send_bw": "ib_send_bw -s 65536 -n 1000" => [1000 << 16, 0],
    "cuda.read_lat": "ib_read_lat -s 64 -n 1000" => [0, 1000 << 6],
    "cuda.send_lat": "ib_send_lat -s 64 -n 1000" => [1000 << 6, 1000 << 6],
    "cuda.sizes_write_bw": "ib_write_bw -a -n 5" => [ALL_SIZES, 0],
    "cuda.sizes_read_bw": "ib_read_bw -a -n 5" => [0, ALL_SIZES],
    "cuda.sizes_send_bw": "ib_send_bw -a -n 5" => [ALL_SIZES, 0],
    "cuda.sizes_read_lat": "ib_read_lat -a -n 5" => [0, ALL_SIZES],
    "cuda.sizes_send_lat": "ib_send_lat -a -n 5" => [ALL_SIZES, ALL_SIZES],
];

const VERIFY: &str = "cuda.verify";
const NIXL: &str = "cuda.nixl";

/// Number of buffers that NIXL's agents register. Each buffer has [`NIXL_LEN`] bytes.
const NIXL_BUFFERS: usize = 3;
pub(super) const NIXL_LEN: u64 = 8 << 20;

/// Time limit of one consumer.
pub(super) const PATIENCE: Duration = Duration::from_secs(600);

/// Upper bound on the bytes that a NIC sends if it carries no data.
const SILENCE: u64 = 4096;

/// Runs the cases whose name begins with a word of `filter`. Returns `true` if no case failed.
pub(crate) fn run(setup: &Setup, places: &Places, filter: &[String]) -> Result<bool> {
    let consumers = Consumers {
        setup: setup.clone(),
        places: places.clone(),
    };
    let pairs = places.perftest.is_some().then_some(PAIRS);
    let names = pairs
        .into_iter()
        .flatten()
        .map(|pair| pair.name)
        .chain(places.nixl.is_some().then_some(NIXL))
        .chain(places.ucx.iter().flat_map(|_| ucx::names()))
        // `verify` detects the module by itself, and has a separate case without a module.
        .chain(matches!(setup.peermem, Peermem::Ours | Peermem::Preload).then_some(VERIFY));
    Lab::open(setup)?.first_registrations()?;
    ktap::run_named(names.map(|name| (name, name)), filter, |name| {
        let before = Counters::read()?;
        match name {
            VERIFY => consumers.verify(),
            NIXL => consumers.nixl(),
            name if name.starts_with("ucx.") => consumers.ucx(name),
            name => PAIRS
                .iter()
                .filter(|pair| pair.name == name)
                .try_for_each(|pair| consumers.perftest(pair)),
        }?;
        ktap::check_rest(&before)
    })
}

impl Consumers {
    fn perftest(&self, pair: &Pair) -> Result<()> {
        let [near, far] = &self.setup.devices;
        let end = |device, server| {
            Running::start(&mut self.places.perftest(pair.program, device, server)?)
        };
        let start = Start::now()?;
        let mut server = end(far, None)?;
        sys::wait_until(PATIENCE, || {
            Ok(datapath::listens(datapath::PORT)? || !server.is_running()?)
        })?;
        let ends = Ends {
            program: pair.program.split(' ').next().unwrap_or_default(),
            client: end(near, Some("127.0.0.1"))?,
            server,
            frees_first: false,
            parts: ONE,
        };
        let seen = self.see(ends, &start, 2)?;
        if self.setup.peermem == Peermem::None {
            return seen.refused(REFUSED);
        }
        seen.moved(&pair.sent)?;
        note("figure", datapath::result(&seen.client.output)?);
        Ok(())
    }

    /// Runs two NIXL agents. One agent writes to and reads from the other agent's memory, and both
    /// agents compare the bytes.
    fn nixl(&self) -> Result<()> {
        let [near, far] = &self.setup.devices;
        let folder = PathBuf::from(format!("/tmp/nixl-{}", std::process::id()));
        fs::create_dir(&folder)?;
        let end = |device, role| Running::start(&mut self.places.nixl(device, &folder, role)?);
        let start = Start::now()?;
        let ends = Ends {
            program: "python3",
            server: end(far, "target")?,
            client: end(near, "initiator")?,
            frees_first: false,
            parts: ONE,
        };
        let seen = self.see(ends, &start, NIXL_BUFFERS);
        fs::remove_dir_all(&folder)?;
        let seen = seen?;
        // This check also passes without a module, because the bytes then go through the host.
        seen.moved(&[NIXL_LEN, NIXL_LEN])
    }

    /// Checks the state once both ends have registered `buffers` buffers, and again after both have
    /// ended.
    pub(super) fn see(&self, mut ends: Ends<'_>, start: &Start, buffers: usize) -> Result<Seen> {
        let buffers = Buffers {
            number: buffers,
            parts: ends.parts,
        };
        let peermem = self.setup.peermem;
        // UCX, which NIXL contains, registers GPU memory only if it finds a module.
        let registers = match ends.program {
            "ucx_perftest" | "python3" => peermem.is_module(),
            _ => true,
        } && buffers.parts.are_registered(peermem);
        let registered = if registers {
            self.registered(&mut ends, start, buffers)
        } else {
            not_listed()
        };
        let frees_first = ends.frees_first;
        let mut seen = Seen {
            client: ends.client.finish(PATIENCE)?,
            server: ends.server.finish(PATIENCE)?,
            wire: [0; 2],
        };
        registered.with_context(|| seen.said())?;
        let is_revoked = frees_first && self.setup.mode() == PinMode::Revocable;
        let ended = buffers.have_ended(&self.setup, &start.counters, is_revoked);
        let now = sent()?;
        seen.wire = [0, 1].map(|end: usize| now[end].saturating_sub(start.sent[end]));
        note("wire", format_args!("{} {}", seen.wire[0], seen.wire[1]));
        ended.with_context(|| seen.said())?;
        Ok(seen)
    }

    /// Stops the client once both ends have registered, checks the state, and continues the client.
    fn registered(&self, ends: &mut Ends<'_>, start: &Start, buffers: Buffers) -> Result<()> {
        buffers.wait_for(&self.setup, &mut ends.client)?;
        let stopped = sys::Stopped::stop(ends.client.id())?;
        let processes = [ends.client.id(), ends.server.id()];
        buffers.are_held(&self.setup, &start.counters, ends.program, &processes)?;
        drop(stopped);
        Ok(())
    }

    /// Checks that `peermemctl verify` passes with memory from CUDA, by our module or the preload
    /// library. The group `verify` of cases tests `peermemctl verify` without CUDA.
    fn verify(&self) -> Result<()> {
        let command = self.places.command(Path::new("peermemctl"));
        let answer = verify::Answer::by(command, verify::ONE_PAIR)?;
        answer.expect(&[])?;
        answer.is_by_cuda()
    }
}

/// A consumer program that runs at both ends of a connection.
pub(super) struct Ends<'a> {
    pub(super) program: &'a str,
    pub(super) client: Running,
    pub(super) server: Running,
    /// `true` if the consumer frees its memory before it deregisters the memory.
    pub(super) frees_first: bool,
    pub(super) parts: Parts,
}

/// Counters before a consumer starts.
pub(super) struct Start {
    pub(super) counters: Counters,
    sent: [u64; 2],
}

impl Start {
    pub(super) fn now() -> Result<Self> {
        Ok(Self {
            counters: Counters::read()?,
            sent: sent()?,
        })
    }
}

/// Results of both ends, and the bytes that the client's and the server's device sent.
pub(super) struct Seen {
    pub(super) client: Finished,
    pub(super) server: Finished,
    wire: [u64; 2],
}

impl Seen {
    fn said(&self) -> String {
        format!("{}\n{}", self.server.tail(10), self.client.tail(10))
    }

    /// Checks that both ends failed with `words`, and nothing was sent.
    pub(super) fn refused(&self, words: &str) -> Result<()> {
        refused(&self.client, words)?;
        refused(&self.server, words)?;
        let silent = self.wire.iter().all(|sent| *sent < SILENCE);
        ensure!(silent, "sent: {:?}", self.wire);
        note("outcome", "refused");
        Ok(())
    }

    /// Checks that both ends succeeded, and at least `least` bytes were sent.
    pub(super) fn moved(&self, least: &[u64; 2]) -> Result<()> {
        ensure!(
            self.client.success() && self.server.success(),
            "{}",
            self.said()
        );
        let arrived = self
            .wire
            .iter()
            .zip(least)
            .all(|(sent, least)| sent >= least);
        ensure!(arrived, "sent {:?}, not {least:?}", self.wire);
        note("outcome", "moved");
        Ok(())
    }
}

/// perftest's message when it cannot register memory.
pub(super) const REFUSED: &str = "Couldn't allocate MR";

/// Checks that a consumer failed with `words` because it could not register.
pub(super) fn refused(end: &Finished, words: &str) -> Result<()> {
    end.failed_with(words)
        .context("the consumer did not fail because of its registration")
}

/// Checks that `peermemctl list` fails, because only our module has a list.
pub(super) fn not_listed() -> Result<()> {
    let status = ctl::peermemctl(&["list"])?.status;
    ensure!(status == 2, "peermemctl list ends with {status}");
    Ok(())
}

/// Returns the bytes that the two NICs have sent.
fn sent() -> Result<[u64; 2]> {
    let of = |device: &str| -> Result<u64> {
        let path = format!("/sys/class/net/{device}/statistics/tx_bytes");
        sys::read_line(&path)?.parse().context(path)
    };
    Ok([of("eth0")?, of("eth1")?])
}
