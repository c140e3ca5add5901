// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Cases between two hosts, each with its own GPU, device and module. This program runs on both
//! hosts, with the same cases in the same order. In each case, host 1 begins. A [`Peer`] exchanges
//! data between the hosts, and makes a case fail on both hosts if the case fails on one host.

mod consumers;

use std::net::IpAddr;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{anyhow, ensure, Context, Result};
use serde_json::Value;

use super::cuda::Places;
use super::input::errno_of;
use super::register::peer_region;
use super::verify::Answer;
use super::{ctl, verify};
use crate::arena::Arena;
use crate::bench::datapath;
use crate::counters::{peer_regions, Counters};
use crate::knobs::Parameter;
use crate::ktap::{cases, note};
use crate::lab::{Lab, Memory, Peermem, PinMode, Setup, Where, M2};
use crate::module::Replaced;
use crate::pattern::Pattern;
use crate::peer::Peer;
use crate::rdma::{Endpoint, Op, Part, Status};
use crate::{counters, ktap, module, rdma, sys};

#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Options {
    /// Number of this host, 1 or 2
    #[arg(long, env = "TESTVM_HOST", value_parser = clap::value_parser!(u8).range(1..=2))]
    host: u8,
    /// Address of the other host
    #[arg(long, env = "TESTVM_PEER")]
    peer: IpAddr,
    #[command(flatten)]
    places: Option<Places>,
    filter: Vec<String>,
}

impl Options {
    fn has(&self, what: fn(&Places) -> &Option<PathBuf>) -> bool {
        self.places
            .as_ref()
            .is_some_and(|places| what(places).is_some())
    }
}

struct Case {
    name: &'static str,
    /// Returns `true` if the case can run.
    on: fn(&Options) -> bool,
    run: fn(&mut Host) -> Result<()>,
}

const ALWAYS: fn(&Options) -> bool = |_| true;
const WITH_PERFTEST: fn(&Options) -> bool = |options| options.has(|places| &places.perftest);

/// Number of messages of each perftest program.
const MESSAGES: u64 = 500;

const CASES: &[Case] = cases![
    "pair.write_bw" if WITH_PERFTEST => |host| host.perftest("ib_write_bw -s 65536 -n 500", [MESSAGES << 16, 0]),
    "pair.read_bw" if WITH_PERFTEST => |host| host.perftest("ib_read_bw -s 65536 -n 500", [0, MESSAGES << 16]),
    "pair.send_bw" if WITH_PERFTEST => |host| host.perftest("ib_send_bw -s 65536 -n 500", [MESSAGES << 16, 0]),
    "pair.nixl" if |options| options.has(|places| &places.nixl) => Host::nixl,
    "pair.mpi" if |options| options.has(|places| &places.mpi) => Host::mpi,
    "pair.verify" if ALWAYS => Host::verify,
    "pair.verify_without_module" if ALWAYS => Host::verify_without_module,
    "pair.verify_wrong_bytes" if ALWAYS => Host::verify_wrong_bytes,
    "pair.unload_on_one" if ALWAYS => Host::unload_on_one,
    "pair.freed_under_traffic" if ALWAYS => Host::freed_under_traffic,
    // This case switches host 2 off for good, so it runs only if the filter names it.
    LOST if |options| options.filter.iter().any(|word| word == LOST) => Host::lost_in_traffic,
];

const LOST: &str = "pair.lost_in_traffic";

/// Time limit of a program.
const PATIENCE: Duration = Duration::from_secs(600);

/// Number of requests in flight. [`BEFORE`] is the number of requests that succeed before the event
/// of a case.
const UNDER_WAY: usize = 8;
const BEFORE: usize = 16;

/// Acknowledgement timeout of a queue pair: 4.096 µs times two to the power of this value (2.1 s).
/// [`RETRIES`] is the number of retries.
const ACK_TIMEOUT: u8 = 19;
const RETRIES: u8 = 3;

/// Runs the cases whose name begins with a word of the filter. Returns `true` if no case failed on
/// either host.
pub(crate) fn run(setup: &Setup, options: &Options) -> Result<bool> {
    let [near, _] = &setup.devices;
    let mut host = Host {
        setup: Setup {
            // The second device is on the other host.
            devices: [near.clone(), near.clone()],
            ..setup.clone()
        },
        options: options.clone(),
        peer: Peer::meet(options.host, options.peer)?,
    };
    let cases = CASES.iter().filter(|case| (case.on)(options));
    let named = cases.map(|case| (case.name, case));
    Lab::open(&host.setup)?.first_registrations()?;
    ktap::run_named(named, &options.filter, |case| {
        let before = Counters::read()?;
        let result = (case.run)(&mut host).and_then(|()| ktap::check_rest(&before));
        host.peer.end(result)
    })
}

struct Host {
    setup: Setup,
    options: Options,
    peer: Peer,
}

/// A queue pair that is connected to a queue pair of the other host, and the data that the other
/// host has sent.
struct Connected<T> {
    end: Endpoint,
    theirs: T,
}

impl Host {
    fn is_first(&self) -> bool {
        self.options.host == 1
    }

    fn device(&self) -> &str {
        &self.setup.devices[0]
    }

    fn places(&self) -> Result<Places> {
        self.options.places.clone().context("no consumers")
    }

    /// Connects to a queue pair of the other host, which does the same. Exchanges `own` for the
    /// other host's data.
    fn connect<T: serde::Serialize + serde::de::DeserializeOwned>(
        &mut self,
        lab: &Lab,
        own: &T,
    ) -> Result<Connected<T>> {
        let mut end = Endpoint::new(&lab.near)?;
        let contact = self.peer.swap(&end.contact(&lab.near)?)?;
        end.connect(&lab.near, &contact)?;
        // After this exchange, both queue pairs are connected, so neither queue pair receives
        // anything too early.
        let theirs = self.peer.swap(own)?;
        Ok(Connected { end, theirs })
    }

    /// Registers GPU memory with the pattern of `host`.
    fn arena(&self, lab: &Lab, host: u8) -> Result<Arena> {
        Arena::whole(
            &lab.near,
            lab.allocate(Where::Gpu(0), M2)?,
            self.pattern(host),
        )
    }

    fn pattern(&self, host: u8) -> Pattern {
        Pattern::new(self.setup.seed, u64::from(host))
    }

    /// Checks that `peermemctl list` shows registrations in these states, and that `pins` pins are
    /// live.
    fn holds(&self, states: &[&str], pins: u64) -> Result<()> {
        counters::pins_are(pins)?;
        if self.setup.peermem != Peermem::Ours {
            return Ok(());
        }
        let listed = ctl::registrations(&[])?;
        let mut found: Vec<_> = listed
            .iter()
            .map(|one| one["state"].as_str().unwrap_or_default())
            .collect();
        found.sort_unstable();
        ensure!(found == states, "{found:?}, not {states:?}");
        Ok(())
    }

    /// Runs `peermemctl verify` on host 1, with host 2 as the server. Both hosts must report the
    /// same steps, and exactly the steps in `failed` must fail.
    fn verified(&mut self, failed: &[&str]) -> Result<Answer> {
        let address = self.peer.address().to_string();
        let answer = if self.is_first() {
            self.peer.wait()?;
            Answer::of(&[&address, "--size", "1048576"])?
        } else {
            let server = thread::spawn(|| Answer::of(&["--server"]));
            sys::wait_until(PATIENCE, || {
                Ok(datapath::listens(verify::PORT)? || server.is_finished())
            })?;
            self.peer.wait()?;
            server
                .join()
                .map_err(|_| anyhow!("the server's thread panicked"))??
        };
        answer.expect(failed)?;
        let pair = &answer.json["pairs"][0];
        let role = if self.is_first() { "client" } else { "server" };
        ensure!(pair["role"] == role, "{pair}");
        let theirs: Value = self.peer.swap(&pair["steps"])?;
        ensure!(pair["steps"] == theirs, "{pair}, not {theirs}");
        Ok(answer)
    }

    fn verify(&mut self) -> Result<()> {
        Lab::open(&self.setup)?.needs_module()?;
        let answer = self.verified(&[])?;
        for verb in [
            "write_client_{}_to_server_{}",
            "read_server_{}_to_client_{}",
        ] {
            for (from, to) in [
                ("host", "host"),
                ("host", "gpu"),
                ("gpu", "host"),
                ("gpu", "gpu"),
            ] {
                let step = verb.replacen("{}", from, 1).replacen("{}", to, 1);
                let moved = answer.passed(&step)?;
                let rate = &moved["bytes_per_second"];
                ensure!(rate.as_u64() > Some(0), "{moved}");
                note(&format!("{step}_bytes_per_second"), rate);
            }
        }
        let found = answer.found("any_way")?;
        ensure!(found == "client: ibv_reg_mr; server: ibv_reg_mr", "{found}");
        Ok(())
    }

    /// Runs `verify` while host 2 has no module. The steps with the GPU of host 1 must still pass.
    fn verify_without_module(&mut self) -> Result<()> {
        Lab::open(&self.setup)?.needs_module()?;
        let replaced = (!self.is_first()).then(Replaced::begin).transpose()?;
        let answer = self.verified(&["any_way"]);
        replaced.map_or(Ok(()), Replaced::end)?;
        let answer = answer?;
        answer.passed("write_client_gpu_to_server_host")?;
        let why = answer.found("register_on_server")?;
        note("why", why);
        ensure!(
            why.starts_with("the server: no peer-memory module is loaded"),
            "{why}"
        );
        Ok(())
    }

    /// Checks that with wrong mappings on host 2, exactly the steps with the GPU of host 2 and the
    /// summary `any_way` fail.
    fn verify_wrong_bytes(&mut self) -> Result<()> {
        Lab::open(&self.setup)?.needs_mode(PinMode::Persistent)?;
        let failed = [
            "write_client_host_to_server_gpu",
            "read_server_gpu_to_client_host",
            "write_client_gpu_to_server_gpu",
            "read_server_gpu_to_client_gpu",
            "any_way",
        ];
        if self.is_first() {
            return self.verified(&failed).map(drop);
        }
        let _permute = Parameter::set("nvidia", "dma_permute", "1")?;
        module::loaded_with_also(module::PROVIDER_MAPS, || self.verified(&failed).map(drop))
    }

    /// Checks that host 2 cannot unload its module while it has a registration. Host 2 then
    /// deregisters and unloads the module. Without the module, host 2 cannot register GPU memory,
    /// but can still use host 1's memory.
    fn unload_on_one(&mut self) -> Result<()> {
        let lab = Lab::open(&self.setup)?;
        lab.needs_module()?;
        let own = self.arena(&lab, self.options.host)?;
        let Connected { end, theirs } = self.connect(&lab, &own.part(0, M2)?)?;
        if self.is_first() {
            self.beside_unloading(&lab, own, end, theirs)
        } else {
            self.unloading(&lab, own, end, theirs)
        }
    }

    fn unloading(
        &mut self,
        lab: &Lab,
        mut own: Arena,
        mut end: Endpoint,
        theirs: Part,
    ) -> Result<()> {
        // Without a reference, the unload would begin, and then wait for the region.
        let references = counters::module_references(module::NAME)?;
        ensure!(references > 0, "no reference to the module under a region");
        module::must_stay().context("under a region")?;
        self.peer.wait()?;
        // Host 1 writes.
        self.peer.wait()?;
        own.expect(0, &self.pattern(1).bytes(0, M2))?;
        own.check().context("after the refusal to unload")?;
        drop(own);

        let replaced = Replaced::begin()?;
        let memory = lab.allocate_gpu(M2)?;
        let errno = errno_of(lab.near.reg_mr(memory.span(0, M2)?));
        note("errno", rdma::errno_name(errno));
        ensure!(errno == libc::EFAULT, "errno {errno} without a module");
        let mut local = Arena::on_host(lab, M2, 3)?;
        let (part, before) = (local.part(0, M2)?, local.expected(0, M2)?.to_vec());
        end.transfer(Op::Read, part, theirs)?;
        local.expect(0, &self.pattern(1).bytes(0, M2))?;
        local.check().context("read from the other host")?;
        local.put(0, &before)?;
        end.transfer(Op::Write, part, theirs)?;
        self.peer.wait()?;

        replaced.end()?;
        lab.first_registrations()?;
        let mut own = Arena::whole(&lab.near, Memory::Gpu(memory), self.pattern(2))?;
        self.peer.tell(&own.part(0, M2)?)?;
        // Host 1 writes.
        self.peer.wait()?;
        own.expect(0, &Pattern::new(self.setup.seed, 3).bytes(0, M2))?;
        own.check().context("with the module loaded again")
    }

    fn beside_unloading(
        &mut self,
        lab: &Lab,
        mut own: Arena,
        mut end: Endpoint,
        theirs: Part,
    ) -> Result<()> {
        self.peer.wait()?;
        end.transfer(Op::Write, own.part(0, M2)?, theirs)?;
        self.peer.wait()?;
        // Host 2 unloads, reads and writes.
        self.peer.wait()?;
        own.expect(0, &Pattern::new(self.setup.seed, 3).bytes(0, M2))?;
        own.check().context("written by the other host")?;
        let next = self.arena(lab, 1)?;
        self.holds(&["mapped"; 2], 2)?;
        drop(next);
        let theirs = self.peer.hear()?;
        end.transfer(Op::Write, own.part(0, M2)?, theirs)?;
        self.peer.wait()
    }

    /// Frees memory of host 2 while host 1 writes into the memory. Host 1's requests must be
    /// refused, and nothing else may fail.
    fn freed_under_traffic(&mut self) -> Result<()> {
        let lab = Lab::open(&self.setup)?;
        lab.needs_mode(PinMode::Revocable)?;
        if self.is_first() {
            self.writing(&lab)
        } else {
            self.freeing(&lab)
        }
    }

    fn freeing(&mut self, lab: &Lab) -> Result<()> {
        let mut memory = lab.allocate_gpu(M2)?;
        let region = lab.near.reg_mr(memory.span(0, M2)?)?;
        let mut stays = self.arena(lab, 2)?;
        let view = memory.bar_view()?;
        let parts = [region.part(0, M2 as u64)?, stays.part(0, M2)?];
        let connected = self.connect(lab, &parts)?;
        // Host 1 has begun to write, and continues.
        self.peer.wait()?;
        let before = Counters::read()?;
        memory.free()?;
        let next = self.pattern(4).bytes(0, M2);
        view.write(0, &next)?;
        counters::callbacks_are(&before, 1)?;
        let state = peer_region(&lab.near, &region)?.state;
        ensure!(state == "revoked", "rxe holds the region as {state}");
        self.holds(&["mapped", "revoked"], 1)?;
        // Host 1's requests are refused.
        self.peer.wait()?;
        let found = view.bytes(0, M2)?;
        ensure!(found == next, "bytes changed after the free had returned");
        drop((connected, region));
        let _connected = self.connect(lab, &parts)?;
        // Host 1 writes to memory that was not freed.
        self.peer.wait()?;
        stays.expect(0, &self.pattern(1).bytes(0, M2))?;
        stays.check()
    }

    fn writing(&mut self, lab: &Lab) -> Result<()> {
        let own = self.arena(lab, 1)?;
        let from = own.part(0, M2)?;
        let mut connected = self.connect(lab, &[from; 2])?;
        let [gone, stays] = connected.theirs;
        let end = &mut connected.end;
        begin(end, from, gone)?;
        self.peer.wait()?;
        let refused = until_refused(end, from, gone)?;
        ensure!(refused.status == Status::RemoteAccessError);
        note("requests_done", refused.done);
        self.holds(&["mapped"], 1)?;
        self.peer.wait()?;
        drop(connected);
        let mut connected = self.connect(lab, &[from; 2])?;
        connected.end.transfer(Op::Write, from, stays)?;
        self.peer.wait()?;
        own.check()
    }

    /// Switches host 2 off while a process of host 1 writes into host 2's memory. The process must
    /// get an error in time. It then exits without deregistering, and must leave nothing behind.
    fn lost_in_traffic(&mut self) -> Result<()> {
        Lab::open(&self.setup)?.needs_module()?;
        if !self.is_first() {
            let lab = Lab::open(&self.setup)?;
            let own = self.arena(&lab, 2)?;
            let _connected = self.connect(&lab, &own.part(0, M2)?)?;
            self.peer.wait()?;
            return Err(sys::power_off()).context("the machine does not switch off");
        }
        let before = Counters::read()?;
        let status = sys::in_forked_child(|| match self.survivor() {
            Ok(()) => 0,
            Err(error) => {
                println!("# survivor: {error:#}");
                1
            }
        })?;
        self.peer.is_lost();
        ensure!(status == 0, "the survivor's process ended with {status}");
        ktap::check_rest(&before)?;
        self.holds(&[], 0)?;
        let left = peer_regions(self.device())?;
        ensure!(left.is_empty(), "{left:?}");
        Ok(())
    }

    fn survivor(&mut self) -> Result<()> {
        rdma::wait_for_answers(ACK_TIMEOUT, RETRIES);
        let lab = Lab::open(&self.setup)?;
        let own = self.arena(&lab, 1)?;
        let from = own.part(0, M2)?;
        let Connected { mut end, theirs } = self.connect(&lab, &from)?;
        begin(&mut end, from, theirs)?;
        self.peer.wait()?;
        let refused = until_refused(&mut end, from, theirs)?;
        ensure!(refused.status == Status::RetryCounterExceededError);
        let seconds = refused.after.as_secs_f64();
        note("requests_done", refused.done);
        note("seconds_to_the_error", format_args!("{seconds:.1}"));
        // On a busy machine, the first wait may end before the last completion is polled. Each wait
        // may take up to four times the configured time.
        let wait = 4.096e-6 * f64::from(1 << ACK_TIMEOUT);
        let least = wait * f64::from(RETRIES - 1);
        let most = 4.0 * wait * f64::from(RETRIES + 1) * f64::from(sys::slower());
        ensure!((least..=most).contains(&seconds), "after {seconds:.1} s");
        self.holds(&["mapped"], 1)?;
        // The kernel must clean up the objects that are not dropped.
        std::mem::forget((own, end, lab));
        Ok(())
    }
}

/// Posts WRITEs and waits until [`BEFORE`] requests have succeeded.
fn begin(end: &mut Endpoint, from: Part, to: Part) -> Result<()> {
    for _ in 0..UNDER_WAY {
        end.post(Op::Write, from, to)?;
    }
    for _ in 0..BEFORE {
        end.sent()?.expect(Status::Success)?;
        end.post(Op::Write, from, to)?;
    }
    Ok(())
}

/// The first failed request: its status, the number of successful requests before it, and the time
/// since the last of them.
struct Refused {
    status: Status,
    done: usize,
    after: Duration,
}

/// Posts WRITEs until one fails. The requests after the failed request are flushed.
fn until_refused(end: &mut Endpoint, from: Part, to: Part) -> Result<Refused> {
    let mut done = BEFORE;
    let mut last = Instant::now();
    let refused = loop {
        let completion = end.sent()?;
        if completion.status != Status::Success {
            break Refused {
                status: completion.status,
                done,
                after: last.elapsed(),
            };
        }
        (done, last) = (done + 1, Instant::now());
        end.post(Op::Write, from, to)?;
    };
    for _ in 1..UNDER_WAY {
        end.sent()?.expect(Status::WorkRequestFlushedError)?;
    }
    Ok(refused)
}
