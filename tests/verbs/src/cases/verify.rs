// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! `peermemctl verify` on this machine. `verify` must pass on a machine without faults. `verify`
//! must report each injected fault at the right step, and no other fault. The check after each case
//! shows that nothing is left behind.

use std::process::Command;

use anyhow::{ensure, Context, Result};
use serde_json::Value;

use crate::knobs::Parameter;
use crate::ktap::{cases, note, Case};
use crate::lab::{Lab, Peermem, PinMode};
use crate::module;
use crate::module::Replaced;

pub(super) const CASES: &[Case] = cases![
    "verify.all_is_well" => all_is_well,
    "verify.every_pair" => every_pair,
    "verify.the_gpu_alone" => the_gpu_alone,
    "verify.no_peer_memory_module" => no_peer_memory_module,
    "verify.a_refusal_has_its_reason" => a_refusal_has_its_reason,
    "verify.wrong_bytes" => wrong_bytes,
    "verify.no_libibverbs" => no_libibverbs,
    "verify.invalid_arguments" => invalid_arguments,
];

/// Port of `peermemctl verify --server`.
pub(super) const PORT: u16 = 18516;

/// The steps that move bytes, in order.
const MOVES: &str = "write_from_gpu write_to_gpu gpu_to_gpu read_from_gpu send_to_gpu";

fn moves() -> impl Iterator<Item = &'static str> {
    MOVES.split(' ')
}

pub(super) struct Answer {
    status: Option<i32>,
    pub(super) json: Value,
    errors: String,
}

/// Arguments for one pair of GPU and NIC, and for buffers that an emulated processor can compare
/// quickly.
pub(super) const ONE_PAIR: &[&str] = &["--gpu", "0", "--size", "1048576"];

impl Answer {
    pub(super) fn of(arguments: &[&str]) -> Result<Self> {
        Self::by(Command::new("peermemctl"), arguments)
    }

    /// Runs `command`, which must run `peermemctl` with the arguments that are appended here.
    pub(super) fn by(mut command: Command, arguments: &[&str]) -> Result<Self> {
        // The time limit is long, because the test VM can be very slow.
        command.args(["verify", "--json", "--timeout", "600"]);
        let output = command
            .args(arguments)
            .output()
            .context("start peermemctl")?;
        let text = String::from_utf8_lossy(&output.stdout);
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        let json = match text.is_empty() {
            true => Value::Null,
            false => serde_json::from_str(&text).with_context(|| text.clone().into_owned())?,
        };
        Ok(Self {
            status: output.status.code(),
            json,
            errors,
        })
    }

    fn pairs(&self) -> &[Value] {
        self.json["pairs"].as_array().map_or(&[], Vec::as_slice)
    }

    /// Returns the steps of the first pair.
    fn steps(&self) -> &[Value] {
        let steps = self
            .pairs()
            .first()
            .and_then(|pair| pair["steps"].as_array());
        steps.map_or(&[], Vec::as_slice)
    }

    /// Returns the step of this name that is not for dma-buf.
    fn step(&self, name: &str) -> Result<&Value> {
        self.steps()
            .iter()
            .find(|step| step["step"] == name && step["way"] != "dma_buf")
            .with_context(|| format!("no step {name}: {}", self.json))
    }

    pub(super) fn found(&self, name: &str) -> Result<&str> {
        Ok(self.step(name)?["found"].as_str().unwrap_or_default())
    }

    /// Returns the names of the failed steps of all pairs.
    fn failed(&self) -> Vec<&str> {
        let pairs = self.pairs().iter();
        let steps = pairs.flat_map(|pair| pair["steps"].as_array().into_iter().flatten());
        steps
            .filter(|step| step["outcome"] == "failed")
            .filter_map(|step| step["step"].as_str())
            .collect()
    }

    /// Checks that exactly these steps failed.
    pub(super) fn expect(&self, failed: &[&str]) -> Result<()> {
        for step in self.failed() {
            note("failed", format_args!("{step}: {}", self.found(step)?));
        }
        let found = self.failed();
        ensure!(found == failed, "{} {}", self.json, self.errors);
        let status = i32::from(!failed.is_empty());
        ensure!(self.status == Some(status), "{}", self.errors);
        ensure!(self.json["schema"] == "peermemctl.verify", "{}", self.json);
        ensure!(self.json["version"] == 1, "{}", self.json);
        Ok(())
    }

    /// Checks that all steps of one pair passed, on memory from CUDA's library.
    pub(super) fn is_by_cuda(&self) -> Result<()> {
        let others = ["two_allocations", "free_while_registered", "killed_holder"];
        for step in moves().chain(others) {
            self.passed(step)?;
        }
        let pair = self.pairs().first().context("no pair")?;
        ensure!(pair["stand_in"] == false, "{pair}");
        Ok(())
    }

    pub(super) fn passed(&self, name: &str) -> Result<&Value> {
        let step = self.step(name)?;
        ensure!(step["outcome"] == "passed", "{name}: {step}");
        Ok(step)
    }
}

fn all_is_well(lab: &Lab) -> Result<()> {
    lab.needs_module()?;
    let answer = Answer::of(ONE_PAIR)?;
    answer.expect(&[])?;
    for step in ["open", "allocate", "copies", "host_memory", "deregister"] {
        answer.passed(step)?;
    }
    let register = answer.passed("register")?;
    ensure!(register["registrations"] == 11, "{register}");
    note("registration_us", &register["registration_us"]);
    note("deregistration_us", &register["deregistration_us"]);
    for step in moves() {
        let moved = answer.passed(step)?;
        let bytes = |name: &str| moved[name].as_u64().unwrap_or(0);
        ensure!(bytes("bytes") == (1 << 20) - 8192, "{moved}");
        ensure!(bytes("timed_bytes") >= bytes("bytes"), "{moved}");
        ensure!(bytes("bytes_per_second") > 0, "{moved}");
        let rate = bytes("bytes_per_second");
        note(&format!("{step}_bytes_per_second"), rate);
    }
    answer.passed("free_while_registered")?;
    let freed = answer.found("free_while_registered")?;
    note("freed", freed);
    let word = match lab.setup.mode() {
        PinMode::Persistent => "held: ",
        PinMode::Revocable => "revoked: ",
    };
    ensure!(freed.starts_with(word), "{freed}");
    answer.passed("killed_holder")?;
    let killed = answer.found("killed_holder")?;
    note("killed", killed);
    ensure!(killed.contains("bytes pinned in BAR1: 0, "), "{killed}");
    if lab.setup.peermem == Peermem::Ours {
        // The list shows the registration of GPU memory. The registration of host memory does not
        // involve the module.
        ensure!(
            killed.contains("registrations listed: 1, then 0"),
            "{killed}"
        );
    }
    // These steps need memory of two allocations, which only the case `cuda.verify` has.
    for step in ["export_two_allocations", "two_allocations"] {
        let step = answer.step(step)?;
        ensure!(step["outcome"] == "not_possible_here", "{step}");
    }
    ensure!(answer.found("any_way")? == "ibv_reg_mr", "{}", answer.json);
    // `verify` does not export the stand-in's memory as a dma-buf, and must report this without a
    // failure.
    let steps = answer.steps().iter();
    let mut of_dma_buf = steps.filter(|step| step["way"] == "dma_buf");
    ensure!(
        of_dma_buf.all(|step| step["outcome"] == "not_possible_here"),
        "{}",
        answer.json
    );
    Ok(())
}

fn every_pair(lab: &Lab) -> Result<()> {
    lab.needs_module()?;
    let answer = Answer::of(&["--all-pairs", "--size", "65536"])?;
    answer.expect(&[])?;
    let pairs = answer.pairs().len();
    note("pairs", pairs);
    ensure!(pairs == 2 * lab.gpus().len(), "{}", answer.json);
    Ok(())
}

fn the_gpu_alone(_: &Lab) -> Result<()> {
    let answer = Answer::of(&["--gpu-only", "--size", "1048576"])?;
    answer.expect(&[])?;
    let names: Vec<_> = answer
        .steps()
        .iter()
        .filter_map(|step| step["step"].as_str())
        .collect();
    let expected = "open allocate copies export export_two_allocations";
    ensure!(names.join(" ") == expected, "{names:?}");
    Ok(())
}

fn no_peer_memory_module(lab: &Lab) -> Result<()> {
    let replaced = match lab.setup.peermem {
        Peermem::None => None,
        _ => Some(Replaced::begin()?),
    };
    let answer = Answer::of(ONE_PAIR);
    replaced.map_or(Ok(()), Replaced::end)?;
    let answer = answer?;
    answer.expect(&["any_way"])?;
    let register = answer.step("register")?;
    ensure!(register["outcome"] == "not_possible_here", "{register}");
    let why = answer.found("register")?;
    note("why", why);
    ensure!(why.starts_with("no peer-memory module is loaded"), "{why}");
    Ok(())
}

fn a_refusal_has_its_reason(lab: &Lab) -> Result<()> {
    lab.needs_ours()?;
    // The reserve is larger than the BAR.
    let _reserve = Parameter::set("nvidia", "bar1_reserve_mib", "65536")?;
    let answer = Answer::of(ONE_PAIR)?;
    answer.expect(&["register", "any_way"])?;
    let register = answer.step("register")?;
    ensure!(register["errno"] == libc::EFAULT, "{register}");
    let why = answer.found("register")?;
    ensure!(why.contains("(EFAULT)"), "{why}");
    ensure!(why.contains("the module: no_room: "), "{why}");
    Ok(())
}

fn wrong_bytes(lab: &Lab) -> Result<()> {
    // In revocable mode, nvidia.ko does not map.
    lab.needs_mode(PinMode::Persistent)?;
    let _permute = Parameter::set("nvidia", "dma_permute", "1")?;
    let mut answer = None;
    module::loaded_with_also(module::PROVIDER_MAPS, || {
        answer = Some(Answer::of(ONE_PAIR)?);
        Ok(())
    })?;
    let answer = answer.context("no answer")?;
    let mut expected = moves().collect::<Vec<_>>();
    expected.extend(["free_while_registered", "any_way"]);
    answer.expect(&expected)?;
    for step in moves() {
        let why = answer.found(step)?;
        ensure!(
            why.contains(" bytes differ, the first at 0x"),
            "{step}: {why}"
        );
    }
    Ok(())
}

fn no_libibverbs(_: &Lab) -> Result<()> {
    // Finds the library's path, which is hidden below. This program has loaded the library from the
    // same path.
    let maps = std::fs::read_to_string("/proc/self/maps")?;
    let library = maps
        .lines()
        .filter_map(|line| line.split_whitespace().last())
        .find(|path| path.contains("/libibverbs.so."))
        .context("libibverbs is not loaded here")?;
    note("library", library);
    let mut command = Command::new("unshare");
    command.args([
        "-m",
        "--propagation",
        "unchanged",
        "sh",
        "-c",
        "mount -o bind /dev/null \"$0\" && exec peermemctl \"$@\"",
        library,
    ]);
    let answer = Answer::by(command, ONE_PAIR)?;
    note("said", answer.errors.trim_end());
    ensure!(answer.status == Some(2), "{:?}", answer.status);
    let words = "libibverbs.so.1 cannot be loaded: ";
    ensure!(answer.errors.contains(words), "{}", answer.errors);
    ensure!(answer.failed().is_empty(), "{}", answer.json);
    answer.passed("copies")?;
    let step = answer.step("rdma_device")?;
    ensure!(step["outcome"] == "not_possible_here", "{step}");
    Ok(())
}

fn invalid_arguments(_: &Lab) -> Result<()> {
    for (arguments, words) in [
        (["--gpu", "77"], "no GPU \"77\""),
        (["--hca", "mlx5_77"], "no RDMA device \"mlx5_77\""),
        (["--size", "65537"], "a multiple of 65536"),
    ] {
        let answer = Answer::of(&arguments)?;
        note("said", answer.errors.trim_end());
        ensure!(answer.status == Some(2));
        ensure!(answer.errors.contains(words), "{}", answer.errors);
        ensure!(answer.json == Value::Null, "{}", answer.json);
    }
    Ok(())
}
