// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Consumers of CUDA as their authors gave them out, over a stand-in for CUDA's library (`tests/cuda`): perftest with
//! `--use_cuda`, and `peermemctl verify`.
//!
//! That bytes arrive proves nothing, since a consumer may stage them through the host. So what is pinned, mapped and listed is
//! looked at while both ends have registered, and what went over the wire at the end. Without a module nothing of it may be.
//!
//! Without a [`Lab`](crate::lab::Lab), whose own devices and GPUs no consumer needs.

use std::collections::BTreeSet;
use std::path::Path;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::bail;
use anyhow::ensure;
use anyhow::Context;
use anyhow::Result;

use super::ctl;
use super::verify;
use crate::bench::datapath;
use crate::counters::peer_regions;
use crate::counters::Activity;
use crate::counters::Counters;
use crate::gpu::PAGE;
use crate::ktap;
use crate::ktap::note;
use crate::lab::Peermem;
use crate::lab::PinMode;
use crate::lab::Setup;
use crate::sys;
use crate::sys::Running;

/// Where the consumers lie, and what they are run on.
#[derive(Debug)]
pub(crate) struct Consumers {
    setup: Setup,
    /// The directory of the stand-in for CUDA's library.
    library: PathBuf,
    perftest: PathBuf,
}

/// One of perftest's programs at both ends, and how many bytes at least go out of the client's device and of the server's.
struct Pair {
    name: &'static str,
    program: &'static str,
    sent: [u64; 2],
}

/// All sizes from 2 bytes to 8 MiB, five times each.
const ALL_SIZES: u64 = 5 * ((16 << 20) - 2);

const PAIRS: &[Pair] = &[
    Pair {
        name: "cuda.write_bw",
        program: "ib_write_bw -s 65536 -n 1000",
        sent: [1000 << 16, 0],
    },
    Pair {
        name: "cuda.read_bw",
        program: "ib_read_bw -s 65536 -n 1000",
        sent: [0, 1000 << 16],
    },
    Pair {
        name: "cuda.send_bw",
        program: "ib_send_bw -s 65536 -n 1000",
        sent: [1000 << 16, 0],
    },
    Pair {
        name: "cuda.read_lat",
        program: "ib_read_lat -s 64 -n 1000",
        sent: [0, 1000 << 6],
    },
    Pair {
        name: "cuda.send_lat",
        program: "ib_send_lat -s 64 -n 1000",
        sent: [1000 << 6, 1000 << 6],
    },
    Pair {
        name: "cuda.sizes_write_bw",
        program: "ib_write_bw -a -n 5",
        sent: [ALL_SIZES, 0],
    },
    Pair {
        name: "cuda.sizes_read_bw",
        program: "ib_read_bw -a -n 5",
        sent: [0, ALL_SIZES],
    },
    Pair {
        name: "cuda.sizes_send_bw",
        program: "ib_send_bw -a -n 5",
        sent: [ALL_SIZES, 0],
    },
    Pair {
        name: "cuda.sizes_read_lat",
        program: "ib_read_lat -a -n 5",
        sent: [0, ALL_SIZES],
    },
    Pair {
        name: "cuda.sizes_send_lat",
        program: "ib_send_lat -a -n 5",
        sent: [ALL_SIZES, ALL_SIZES],
    },
];

const VERIFY: &str = "cuda.verify";

/// How long one may take.
const PATIENCE: Duration = Duration::from_secs(600);

/// What may go out beside the data: no byte of it goes through these NICs.
const SILENCE: u64 = 4096;

/// Runs the cases whose name begins with a word of `filter`; true when none failed.
pub(crate) fn run(
    setup: &Setup,
    library: &Path,
    perftest: &Path,
    filter: &[String],
) -> Result<bool> {
    let consumers = Consumers {
        setup: setup.clone(),
        library: library.to_owned(),
        perftest: perftest.to_owned(),
    };
    let names: Vec<&str> = PAIRS
        .iter()
        .map(|pair| pair.name)
        // It tells by itself whether there is a module, and has a case without one.
        .chain((setup.peermem == Peermem::Ours).then_some(VERIFY))
        .filter(|name| filter.is_empty() || filter.iter().any(|word| name.starts_with(word)))
        .collect();
    ensure!(!names.is_empty(), "no case has such a name");
    println!("KTAP version 1");
    Ok(ktap::tell(names.clone(), |index| {
        let before = Counters::read()?;
        let name = names.get(index).copied().unwrap_or_default();
        match PAIRS.iter().find(|pair| pair.name == name) {
            Some(pair) => consumers.perftest(pair),
            None => consumers.verify(),
        }?;
        ktap::check_rest(&before)
    }))
}

impl Consumers {
    fn command(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        command.env("LD_LIBRARY_PATH", &self.library);
        command
    }

    fn perftest(&self, pair: &Pair) -> Result<()> {
        let [near, far] = &self.setup.devices;
        let mut words = pair.program.split(' ');
        let program = words.next().unwrap_or_default();
        let words: Vec<&str> = words.collect();
        let end = |device: &str, server: &[&str]| {
            let mut command = self.command(&self.perftest.join(program));
            // A queue pair asks again after four seconds: a busy machine stands still for longer than perftest's own time.
            command.args(["-d", device, "-x", "1", "-u", "20", "--use_cuda=0"]);
            Running::start(command.args(&words).args(server))
        };
        let before = Counters::read()?;
        let wire = sent()?;
        let mut server = end(far, &[])?;
        sys::wait_until(PATIENCE, || {
            Ok(datapath::listens()? || !server.is_running()?)
        })?;
        let mut client = end(near, &["127.0.0.1"])?;
        let ends = [&mut client, &mut server];
        let seen = match self.setup.peermem {
            Peermem::None => not_listed(),
            _ => self.registered(program, ends, &before),
        };
        let (client, server) = (client.finish(PATIENCE)?, server.finish(PATIENCE)?);
        let said = || format!("{}\n{}", server.tail(10), client.tail(10));
        seen.with_context(said)?;

        let mut activity = Counters::read()?.activity(&before)?;
        sys::wait_until(PATIENCE, || {
            activity = Counters::read()?.activity(&before)?;
            Ok(activity.unpins == activity.pins)
        })?;
        let now = sent()?;
        let wire = [0, 1].map(|end: usize| now[end].saturating_sub(wire[end]));
        note("pins", activity.pins);
        note("wire", format_args!("{} {}", wire[0], wire[1]));
        if self.setup.peermem == Peermem::None {
            let refused = |output: &str| output.contains("Couldn't allocate MR");
            ensure!(
                !client.success() && !server.success(),
                "it ended well: {}",
                said()
            );
            ensure!(
                refused(&client.output) && refused(&server.output),
                "it was not the registration that failed: {}",
                said()
            );
            ensure!(activity == Activity::default(), "{activity:?}");
            ensure!(wire.iter().all(|sent| *sent < SILENCE), "sent: {wire:?}");
            note("outcome", "refused");
            return Ok(());
        }
        ensure!(client.success() && server.success(), "{}", said());
        // The buffer of each end, which NVIDIA's module pins twice.
        let pins = match self.setup.peermem {
            Peermem::Nvidia => 4,
            _ => 2,
        };
        ensure!(
            activity.pins == pins && activity.unpins == pins && activity.callbacks == 0,
            "{activity:?}, where {pins} pins were expected"
        );
        // In the other mode ours maps without the provider.
        let maps = match (self.setup.peermem, self.setup.mode()) {
            (Peermem::Ours, PinMode::Revocable) => 0,
            _ => 2,
        };
        ensure!(
            activity.maps == maps && activity.unmaps == maps,
            "{activity:?}, where {maps} mappings were expected"
        );
        let arrived = wire
            .iter()
            .zip(&pair.sent)
            .all(|(sent, least)| sent >= least);
        ensure!(arrived, "sent: {wire:?}, at least {:?} expected", pair.sent);
        note("outcome", "moved");
        note("figure", datapath::result(&client.output)?);
        Ok(())
    }

    /// Stops the client once both ends have registered, looks at what there is, and lets it go on.
    fn registered(
        &self,
        program: &str,
        [client, server]: [&mut Running; 2],
        before: &Counters,
    ) -> Result<()> {
        let regions = || -> Result<Vec<_>> {
            let mut all = Vec::new();
            for device in &self.setup.devices {
                all.extend(peer_regions(device)?);
            }
            Ok(all)
        };
        let both = sys::wait_until(PATIENCE, || {
            Ok(regions()?.len() == 2 || !client.is_running()?)
        })?;
        ensure!(
            both && client.is_running()?,
            "it ended, or never registered"
        );
        let pids = [client.id(), server.id()];
        let stopped = sys::Stopped::stop(client.id())?;

        let found = regions()?;
        let [near, far] = &found[..] else {
            bail!("peer regions of both devices: {found:?}");
        };
        ensure!(near.len == far.len, "{found:?}");
        ensure!(
            found
                .iter()
                .all(|region| region.entries > 0 && region.state == "valid"),
            "{found:?}"
        );
        note("bytes", near.len);
        note("entries", near.entries);
        let counters = Counters::read()?;
        let live = counters.live_pins()?;
        ensure!(live == 2, "{live} pins are live under two regions");
        let pinned = counters.since(before, "bar_bytes_pinned")?;
        ensure!(
            pinned >= 2 * near.len,
            "{pinned} bytes are pinned under two regions of {}",
            near.len
        );
        if self.setup.peermem == Peermem::Ours {
            self.listed(program, pids, near.len)?;
        } else {
            not_listed()?;
        }
        drop(stopped);
        Ok(())
    }

    /// `peermemctl list` has both, mapped, each with its process, and in whole pages of the GPU.
    fn listed(&self, program: &str, pids: [u32; 2], len: u64) -> Result<()> {
        let listed = ctl::registrations(&[])?;
        let mode = self.setup.mode().to_string();
        let len = len.next_multiple_of(PAGE);
        for one in &listed {
            ensure!(
                one["state"] == "mapped"
                    && one["mode"] == mode.as_str()
                    && one["comm"] == program
                    && one["len"] == len,
                "{one:#?}"
            );
        }
        let found: BTreeSet<_> = listed.iter().map(|one| one["pid"].as_u64()).collect();
        let expected = pids.map(|pid| Some(u64::from(pid)));
        ensure!(
            listed.len() == 2 && found == expected.into(),
            "{listed:#?}, where one of each of {pids:?} was expected"
        );
        Ok(())
    }

    /// What it finds through CUDA it finds without, too: see `verify`'s own cases.
    fn verify(&self) -> Result<()> {
        let command = self.command(Path::new("peermemctl"));
        let answer = verify::Answer::by(command, verify::ONE_PAIR)?;
        answer.expect(&[])?;
        answer.is_by_cuda()
    }
}

/// Of no module but ours is there a list.
fn not_listed() -> Result<()> {
    let status = ctl::peermemctl(&["list"])?.status;
    ensure!(status == 2, "peermemctl list ends with {status}");
    Ok(())
}

/// How many bytes have gone out of the two NICs.
fn sent() -> Result<[u64; 2]> {
    let of = |device: &str| -> Result<u64> {
        let path = format!("/sys/class/net/{device}/statistics/tx_bytes");
        sys::read_line(&path)?.parse().context(path)
    };
    Ok([of("eth0")?, of("eth1")?])
}
