// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! perftest, NIXL and Open MPI between the GPU memory of two hosts.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{ensure, Context, Result};

use super::{Host, PATIENCE};
use crate::bench::datapath;
use crate::cases::buffers::whole;
use crate::cases::cuda;
use crate::counters::Counters;
use crate::ktap::note;
use crate::lab::Peermem;
use crate::sys;
use crate::sys::Running;

/// Upper bound on the bytes on the wire besides the data: the messages of the programs and of this
/// test.
const SILENCE: u64 = 64 << 10;

/// Number of buffers that each rank registers. The ranks send at least [`MPI_SENT`] bytes each way
/// (`mpi.py`).
const MPI_BUFFERS: usize = 2;
const MPI_SENT: u64 = 4 * cuda::NIXL_LEN;

impl Host {
    pub(super) fn perftest(&mut self, program: &str, sent: [u64; 2]) -> Result<()> {
        let start = Start::now(self.device())?;
        let server = self.peer.address().to_string();
        let to = self.is_first().then_some(server.as_str());
        let mut command = self.places()?.perftest(program, self.device(), to)?;
        let mut consumer = if self.is_first() {
            self.peer.wait()?;
            Running::start(&mut command)?
        } else {
            let mut server = Running::start(&mut command)?;
            sys::wait_until(PATIENCE, || {
                Ok(datapath::listens(datapath::PORT)? || !server.is_running()?)
            })?;
            self.peer.wait()?;
            server
        };
        if self.setup.peermem == Peermem::None {
            cuda::not_listed()?;
        } else {
            let name = program.split(' ').next().unwrap_or_default();
            self.look(&mut consumer, &start, name, 1)
                .map_err(|error| match consumer.so_far() {
                    Ok(said) => error.context(said),
                    Err(_) => error,
                })?;
        }
        let finished = consumer.finish(PATIENCE)?;
        let wire = start.wire(self.device())?;
        if self.setup.peermem == Peermem::None {
            cuda::refused(&finished, cuda::REFUSED)?;
            ensure!(wire.iter().all(|bytes| *bytes < SILENCE), "{wire:?}");
            note("outcome", "refused");
            return whole(1).have_ended(&self.setup, &start.counters, false);
        }
        ensure!(finished.success(), "{}", finished.tail(10));
        whole(1).have_ended(&self.setup, &start.counters, false)?;
        self.moved(wire, sent)?;
        if self.is_first() {
            note("figure", datapath::result(&finished.output)?);
        }
        Ok(())
    }

    /// Checks the state once both hosts have registered. The first host's program is stopped
    /// meanwhile.
    fn look(
        &mut self,
        consumer: &mut Running,
        start: &Start,
        name: &str,
        buffers: usize,
    ) -> Result<()> {
        let buffers = whole(buffers);
        buffers.wait_for(&self.setup, consumer)?;
        let stopped = self
            .is_first()
            .then(|| sys::Stopped::stop(consumer.id()))
            .transpose()?;
        self.peer.wait()?;
        buffers.are_held(&self.setup, &start.counters, name, &[consumer.id()])?;
        self.peer.wait()?;
        drop(stopped);
        Ok(())
    }

    /// Checks that this host has sent and received at least the expected bytes. `least` has the
    /// bytes that the first host sends, and then the bytes that the second host sends.
    fn moved(&self, wire: [u64; 2], mut least: [u64; 2]) -> Result<()> {
        if !self.is_first() {
            least.reverse();
        }
        let arrived = wire.iter().zip(least).all(|(bytes, least)| *bytes >= least);
        ensure!(arrived, "sent, received: {wire:?}, at least {least:?}");
        note("outcome", "moved");
        Ok(())
    }

    /// Runs two NIXL agents. One agent writes to and reads from the other agent's memory, and both
    /// agents compare the bytes. This program copies the files that the agents leave for each other
    /// to the other host.
    pub(super) fn nixl(&mut self) -> Result<()> {
        self.in_folder("nixl", Self::nixl_in)
    }

    /// Runs `f` with a new folder, and removes the folder afterwards.
    fn in_folder(&mut self, name: &str, f: fn(&mut Self, &Path) -> Result<()>) -> Result<()> {
        let folder = PathBuf::from(format!("/tmp/{name}"));
        fs::create_dir(&folder)?;
        let result = f(self, &folder);
        fs::remove_dir_all(&folder)?;
        result
    }

    fn nixl_in(&mut self, folder: &Path) -> Result<()> {
        let (role, other, buffers) = match self.is_first() {
            true => ("initiator", "target", 2),
            false => ("target", "initiator", 1),
        };
        let start = Start::now(self.device())?;
        let mut command = self.places()?.nixl(self.device(), folder, role)?;
        let mut agent = Running::start(&mut command)?;
        let result = (|| {
            // The agent has registered when the file exists.
            let own = left(&mut agent, folder, role)?;
            match self.setup.peermem {
                Peermem::None => cuda::not_listed()?,
                _ => self.look(&mut agent, &start, "python3", buffers)?,
            }
            let theirs = self.peer.swap(&own)?;
            leave(folder, other, &theirs)?;
            if self.is_first() {
                let filled: Vec<u8> = self.peer.hear()?;
                leave(folder, "filled", &filled)
            } else {
                let filled = left(&mut agent, folder, "filled")?;
                self.peer.tell(&filled)
            }
        })();
        if let Err(error) = result {
            return Err(error.context(agent.so_far()?));
        }
        // This check also passes without a module, because the bytes then go through the host.
        self.ends(agent, &start, buffers, cuda::NIXL_LEN)
    }

    /// Waits for the end of a program, which must succeed. Checks its pins, and that both hosts
    /// have sent at least `sent` bytes.
    fn ends(&self, program: Running, start: &Start, buffers: usize, sent: u64) -> Result<()> {
        let finished = program.finish(PATIENCE)?;
        let wire = start.wire(self.device())?;
        ensure!(finished.success(), "{}", finished.tail(10));
        whole(buffers).have_ended(&self.setup, &start.counters, false)?;
        self.moved(wire, [sent, sent])
    }

    /// Runs two ranks of Open MPI, one on each host, which send their GPU memory to each other and
    /// compare the bytes.
    pub(super) fn mpi(&mut self) -> Result<()> {
        self.in_folder("mpi", Self::mpi_in)
    }

    fn mpi_in(&mut self, folder: &Path) -> Result<()> {
        let buffers = whole(MPI_BUFFERS);
        let start = Start::now(self.device())?;
        let (mut program, rank) = match self.is_first() {
            true => (self.mpirun(folder)?, "rank0"),
            false => (self.daemon()?, "rank1"),
        };
        let result = (|| {
            // The rank has sent all of its memory when the file exists.
            let rank = String::from_utf8(left(&mut program, folder, rank)?)?.parse()?;
            if self.setup.peermem == Peermem::None {
                cuda::not_listed()?;
            } else {
                buffers.wait_for(&self.setup, &mut program)?;
                buffers.are_held(&self.setup, &start.counters, "python3", &[rank])?;
            }
            self.peer.wait()?;
            leave(folder, "go", b"")
        })();
        if let Err(error) = result {
            return Err(error.context(program.so_far()?));
        }
        self.ends(program, &start, MPI_BUFFERS, MPI_SENT)
    }

    /// Starts `mpirun`. Instead of a remote shell, `mpirun` runs a script. The script saves the
    /// command for the other host in a file, and runs until the file is removed at the end of the
    /// case.
    fn mpirun(&mut self, folder: &Path) -> Result<Running> {
        let places = self.places()?;
        let mpi = places.mpi.as_deref().context("no Open MPI")?;
        let (shell, daemon) = (folder.join("shell"), folder.join("daemon"));
        let script = format!(
            "shift\necho \"$*\" >{0}.new\nmv {0}.new {0}\nwhile [ -e {0} ]; do sleep 1; done\n",
            daemon.display()
        );
        fs::write(&shell, script)?;
        let hosts = format!("{}:1,{}:1", self.peer.own_address()?, self.peer.address());
        let mut command = places.over_mpi(&mpi.join("bin/mpirun"), self.device())?;
        let variables: Vec<_> = command
            .get_envs()
            .map(|(name, _)| name.to_owned())
            .collect();
        command
            .args(["--allow-run-as-root", "--leave-session-attached", "-n", "2"])
            .args(["--host", &hosts, "--prtemca", "plm_ssh_agent"])
            // The daemon also searches for the first word of this command as a program.
            .arg(format!("/bin/sh {}", shell.display()))
            // By default, Open MPI's layer over UCX supports NVIDIA's devices only.
            .args(["--mca", "pml", "ucx", "--mca", "opal_common_ucx_tls", "any"])
            .args(["--mca", "opal_common_ucx_devices", "any"])
            .args(
                variables
                    .into_iter()
                    .flat_map(|name| [OsString::from("-x"), name]),
            )
            .arg("/usr/bin/python3")
            .args([&mpi.join("mpi.py"), folder]);
        let mut program = Running::start(&mut command)?;
        match left(&mut program, folder, "daemon") {
            Ok(daemon) => self.peer.tell(&daemon)?,
            Err(error) => return Err(error.context(program.so_far()?)),
        }
        Ok(program)
    }

    /// Starts the command that `mpirun` needs on this host.
    fn daemon(&mut self) -> Result<Running> {
        let daemon = String::from_utf8(self.peer.hear()?)?;
        let mut command = self
            .places()?
            .over_mpi(Path::new("/bin/sh"), self.device())?;
        Running::start(command.args(["-c", &daemon]))
    }
}

/// Counters before a consumer starts.
struct Start {
    counters: Counters,
    wire: [u64; 2],
}

impl Start {
    fn now(device: &str) -> Result<Self> {
        Ok(Self {
            counters: Counters::read()?,
            wire: counted(device)?,
        })
    }

    /// Returns the bytes that were sent and received since this start.
    fn wire(&self, device: &str) -> Result<[u64; 2]> {
        let now = counted(device)?;
        let wire = [0, 1].map(|way: usize| now[way].saturating_sub(self.wire[way]));
        note("wire", format_args!("{} {}", wire[0], wire[1]));
        Ok(wire)
    }
}

/// Returns the bytes that the network device of an RDMA device has sent and received.
fn counted(device: &str) -> Result<[u64; 2]> {
    let net = sys::read_line(&format!("/sys/class/infiniband/{device}/parent"))?;
    let of = |name: &str| -> Result<u64> {
        let path = format!("/sys/class/net/{net}/statistics/{name}");
        sys::read_line(&path)?.parse().context(path)
    };
    Ok([of("tx_bytes")?, of("rx_bytes")?])
}

/// Waits until a program has left file `name` in a folder, and returns its content.
fn left(program: &mut Running, folder: &Path, name: &str) -> Result<Vec<u8>> {
    let file = folder.join(name);
    sys::wait_until(PATIENCE, || Ok(file.exists() || !program.is_running()?))?;
    fs::read(&file).with_context(|| file.display().to_string())
}

/// Leaves a file for a program that waits for it.
fn leave(folder: &Path, name: &str, bytes: &[u8]) -> Result<()> {
    let new = folder.join(format!("{name}.new"));
    fs::write(&new, bytes)?;
    Ok(fs::rename(new, folder.join(name))?)
}
