// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! The module as other programs and administrators see it: names, files and refusals that they rely
//! on.

use std::collections::BTreeSet;
use std::fs;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use anyhow::{bail, ensure, Context, Result};

use crate::cases::consumers;
use crate::cases::input::errno_of;
use crate::cases::register::peer_region;
use crate::gpu::GRANULE;
use crate::ktap::{cases, expect, note, Case};
use crate::lab::{Lab, Peermem, PinMode, M2};
use crate::module::Replaced;
use crate::sys::Span;
use crate::{counters, ktap, module, sys};

const MEMORY_PEERS: &str = "/sys/kernel/mm/memory_peers";

pub(super) const CASES: &[Case] = cases![
    "identity.version" => version,
    "identity.parameters" => parameters,
    "identity.unload_refused_while_registered" => unload_refused,
    "identity.unload_and_load_again" => load_again,
    "identity.memory_peers" => memory_peers,
    "identity.statistics" => statistics,
    "identity.statistics_of_a_revocation" => statistics_of_a_revocation,
    "identity.memory_peers_turned_off" => turned_off,
    "identity.reader_across_unload" => reader_across_unload,
    "identity.readers_beside_unloads" => readers_beside_unloads,
    "identity.modprobe" => modprobe,
    "identity.as_nvidias" => as_nvidias,
];

/// Checks the version file, for which NCCL and UCX look.
fn version(lab: &Lab) -> Result<()> {
    lab.needs_module()?;
    let version = module::version()?;
    note("version", &version);
    let first = version.split('.').next().context("empty")?;
    ensure!(first.parse::<u32>().is_ok(), "{version}");
    // The runner reads the expected version from the module's file.
    if let Ok(expected) = std::env::var("PEERMEM_VERSION") {
        ensure!(version == expected);
    }
    Ok(())
}

fn parameters(lab: &Lab) -> Result<()> {
    lab.needs_module()?;
    let expected = match lab.setup.peermem {
        // nvidia-peermem of driver 550 has only the first parameter.
        Peermem::Nvidia => &module::PARAMETERS[..1],
        _ => &module::PARAMETERS[..],
    };
    for name in expected {
        let path = format!("/sys/module/{}/parameters/{name}", module::NAME);
        let value = sys::read_line(&path)?;
        note(name, &value);
        ensure!(value.parse::<i32>().is_ok(), "{name}: {value:?}");
        let mode = fs::metadata(&path)?.permissions().mode() & 0o777;
        ensure!(mode == 0o444, "{name} has mode {mode:o}");
    }
    let found = fs::read_dir(format!("/sys/module/{}/parameters", module::NAME))?.count();
    ensure!(found >= expected.len(), "{found} parameters");
    Ok(())
}

fn unload_refused(lab: &Lab) -> Result<()> {
    lab.needs_module()?;
    module::references_are(0).context("without a registration")?;
    let memory = lab.allocate_gpu(M2)?;
    let span = memory.span(0, M2)?;
    let regions = [(); 3].map(|()| lab.near.reg_mr(span));
    ensure!(regions.iter().all(Result::is_ok), "{regions:?}");
    let held = counters::module_references(module::NAME)?;
    expect("references_of_3_regions", held, 3)?;
    for name in [module::NAME, "nvidia"] {
        ensure!(
            !module::unloaded(name)?,
            "{name} was unloaded under a live region"
        );
    }
    sys::run("rmmod", [module::NAME])?.failed_with("in use")?;
    drop(regions);
    module::references_are(0).context("after the last region")?;
    Ok(())
}

fn load_again(lab: &Lab) -> Result<()> {
    lab.needs_module()?;
    let memory = lab.allocate_gpu(M2)?;
    let before = module::parameters();
    let replaced = Replaced::begin()?;
    ensure!(!module::is_loaded(), "the module is still loaded");
    let errno = errno_of(lab.near.reg_mr(memory.span(0, M2)?));
    ensure!(errno == libc::EFAULT, "errno {errno} without a module");
    replaced.end()?;
    ensure!(module::parameters() == before, "{before:?}");
    lab.near.reg_mr(memory.span(0, M2)?)?;
    Ok(())
}

/// Returns the clients that `memory_peers` must show, in alphabetical order. ib_core asks the first
/// client first.
fn expected_clients(lab: &Lab) -> &'static [&'static str] {
    let both = lab.setup.peermem == Peermem::Nvidia
        || counters::module_parameter(module::NAME, "persistent_api_support").as_deref()
            == Some("0");
    if both {
        &["nv_mem", "nv_mem_nc"]
    } else {
        &["nv_mem"]
    }
}

/// Returns the client that serves rxe. The first client serves rxe if rxe can revoke its regions.
/// Otherwise, the second client serves rxe.
fn serving(lab: &Lab) -> &'static str {
    let clients = expected_clients(lab);
    match (clients, lab.setup.mode()) {
        ([_, second], PinMode::Persistent) => second,
        _ => "nv_mem",
    }
}

fn needs_memory_peers(lab: &Lab) -> Result<()> {
    lab.needs_module()?;
    if lab.setup.peermem == Peermem::Nvidia && !consumers::core_shows() {
        ensure!(
            !Path::new(MEMORY_PEERS).exists(),
            "there is a memory_peers that ib_core did not make"
        );
        return ktap::skip(
            "NVIDIA's module leaves memory_peers to ib_core, and this kernel's ib_core has none",
        );
    }
    let has_parameter = counters::module_parameter(module::NAME, "memory_peers").is_some();
    if lab.setup.peermem == Peermem::Ours && !has_parameter {
        return ktap::skip("built for a proprietary nvidia.ko, the module has no memory_peers");
    }
    Ok(())
}

/// Checks the content of `memory_peers`, which must be the same whether ib_core or the module makes
/// the directory.
fn memory_peers(lab: &Lab) -> Result<()> {
    needs_memory_peers(lab)?;
    let clients: Vec<_> = sys::names(MEMORY_PEERS)?.into_iter().collect();
    note("clients", clients.join(" "));
    ensure!(clients == expected_clients(lab));
    for client in clients {
        let directory = Path::new(MEMORY_PEERS).join(client);
        let files = sys::names(&directory)?;
        for name in &files {
            let mode = fs::metadata(directory.join(name))?.permissions().mode() & 0o777;
            ensure!(mode == 0o444, "{name} has mode {mode:o}");
        }
        let expected = ["version"].into_iter().chain(STATISTICS);
        let expected: BTreeSet<_> = expected.map(str::to_owned).collect();
        ensure!(files == expected, "files {files:?}");
        let version = fs::read_to_string(directory.join("version"))?;
        // ib_core keeps 15 characters of the version.
        let own: String = module::version()?.chars().take(15).collect();
        ensure!(version == format!("{own}\n"), "version {version:?}");
    }
    Ok(())
}

const STATISTICS: [&str; 7] = [
    "num_alloc_mrs",
    "num_dealloc_mrs",
    "num_reg_pages",
    "num_dereg_pages",
    "num_reg_bytes",
    "num_dereg_bytes",
    "num_free_callbacks",
];

type Statistics = [u64; STATISTICS.len()];

/// Returns the amounts that `body` adds to the statistics of the client that serves rxe.
fn counted<T>(lab: &Lab, body: impl FnOnce() -> Result<T>) -> Result<(Statistics, T)> {
    let directory = format!("{MEMORY_PEERS}/{}", serving(lab));
    let read = || -> Result<Statistics> {
        let mut numbers = [0; STATISTICS.len()];
        for (number, name) in numbers.iter_mut().zip(STATISTICS) {
            *number = sys::read_line(&format!("{directory}/{name}"))?.parse()?;
        }
        Ok(numbers)
    };
    let before = read()?;
    let value = body()?;
    let mut gain = read()?;
    for (gain, before) in gain.iter_mut().zip(before) {
        *gain = gain.wrapping_sub(before);
    }
    Ok((gain, value))
}

/// Checks the statistics of one registration. ib_core and the module count the same values, except
/// for `num_dereg_pages`. ib_core always counts 0 there, because it clears the scatter list before
/// it counts the pages.
fn statistics(lab: &Lab) -> Result<()> {
    needs_memory_peers(lab)?;
    let ours = !consumers::core_shows();
    let len = 2 * M2 - 100;
    let memory = lab.allocate_gpu(2 * M2)?;
    let (gain, region) = counted(lab, || Ok(lab.near.reg_mr(memory.span(50, len)?)?))?;
    let entries = peer_region(&lab.near, &region)?.entries;
    note("entries", entries);
    let bytes = len as u64;
    ensure!(gain == [1, 0, entries, 0, bytes, 0, 0], "{gain:?}");
    let (gain, ()) = counted(lab, || {
        drop(region);
        Ok(())
    })?;
    let left = if ours { entries } else { 0 };
    ensure!(gain == [0, 1, 0, left, 0, bytes, 0], "{gain:?}");

    let outside = Span::anywhere(sys::free_address(GRANULE, GRANULE)?, GRANULE)?;
    let (gain, refused) = counted(lab, || Ok(lab.near.reg_mr(outside).is_err()))?;
    ensure!(refused && gain == [0; 7], "a refusal counted {gain:?}");
    Ok(())
}

/// Checks that a revocation counts as a deallocation at once. The bytes must count when the
/// application deregisters, unless ib_core already unmaps at the revocation.
fn statistics_of_a_revocation(lab: &Lab) -> Result<()> {
    needs_memory_peers(lab)?;
    lab.needs_mode(PinMode::Revocable)?;
    let ours = !consumers::core_shows();
    let mut memory = lab.allocate_gpu(M2)?;
    let region = lab.near.reg_mr(memory.span(0, M2)?)?;
    let entries = peer_region(&lab.near, &region)?.entries;
    let (revoked, ()) = counted(lab, || memory.free())?;
    let (released, ()) = counted(lab, || {
        drop(region);
        Ok(())
    })?;
    note("revoked", format_args!("{revoked:?}"));
    note("released", format_args!("{released:?}"));
    let left = if ours { entries } else { 0 };
    let core_unmaps =
        counters::module_parameter(module::NAME, "peerdirect_support").as_deref() == Some("1");
    let (first, then) = if core_unmaps {
        ([0, 1, 0, left, 0, M2 as u64, 1], [0; 7])
    } else {
        ([0, 1, 0, 0, 0, 0, 1], [0, 0, 0, left, 0, M2 as u64, 0])
    };
    ensure!(revoked == first, "the revocation counted {revoked:?}");
    ensure!(released == then, "the release counted {released:?}");
    Ok(())
}

/// Checks that with `memory_peers=0`, the module does not make the directory `memory_peers`. Only
/// ib_core may make the directory.
fn turned_off(lab: &Lab) -> Result<()> {
    if lab.setup.peermem != Peermem::Ours {
        return ktap::skip("this module has no such parameter");
    }
    needs_memory_peers(lab)?;
    let mut parameters = module::parameters();
    parameters.push("memory_peers=0".to_owned());
    let replaced = Replaced::begin()?;
    gone(MEMORY_PEERS)?;
    module::load(&parameters)?;
    ensure!(Path::new(MEMORY_PEERS).exists() == consumers::core_shows());
    let memory = lab.allocate_gpu(M2)?;
    lab.near.reg_mr(memory.span(0, M2)?)?;
    replaced.end()?;
    ensure!(Path::new(MEMORY_PEERS).exists(), "no memory_peers");
    Ok(())
}

/// Checks that the unloaded module's directory does not exist.
pub(super) fn gone(directory: &str) -> Result<()> {
    let exists = Path::new(directory).exists();
    ensure!(!exists, "the directory outlives the module");
    Ok(())
}

/// Checks that reads of the unloaded module's files fail with `errno`.
pub(super) fn unreadable(files: &[File], errno: i32) -> Result<()> {
    for file in files {
        match file.read_at(&mut [0; 64], 0) {
            Err(error) if error.raw_os_error() == Some(errno) => {}
            other => bail!("read of the unloaded module's file: {other:?}"),
        }
    }
    Ok(())
}

/// Checks that a reader with an open file or directory does not prevent the unload, and that the
/// reader's later reads fail.
fn reader_across_unload(lab: &Lab) -> Result<()> {
    needs_memory_peers(lab)?;
    let version = format!("{MEMORY_PEERS}/nv_mem/version");
    let open = [File::open(&version)?];
    let mut half_read = File::open(&version)?;
    half_read.read_exact(&mut [0])?;
    let directory = File::open(MEMORY_PEERS)?;
    let replaced = Replaced::begin()?;
    gone(MEMORY_PEERS)?;
    unreadable(&open, libc::ENODEV).context("after the unload")?;
    // The reader's buffer still has the text from before the unload.
    let rest = half_read.read(&mut [0; 64])?;
    ensure!(rest > 0, "the rest of the text in the buffer is lost");
    replaced.end()?;
    unreadable(&open, libc::ENODEV).context("after the reload")?;
    ensure!(sys::read_line(&version)? == module::version()?);
    drop(directory);
    Ok(())
}

/// Loads and unloads the module while readers read without a pause.
fn readers_beside_unloads(lab: &Lab) -> Result<()> {
    needs_memory_peers(lab)?;
    let mut all = Vec::new();
    for client in ["nv_mem", "nv_mem_nc"] {
        for file in STATISTICS.into_iter().chain(["version"]) {
            all.push(format!("{MEMORY_PEERS}/{client}/{file}"));
        }
    }
    lives_beside_readers(|| {
        // Lists a directory that may vanish meanwhile.
        let _ = fs::read_dir(MEMORY_PEERS).map(Iterator::count);
        let whole = |path: &&String| fs::read(path).is_ok_and(|text| text.ends_with(b"\n"));
        all.iter().filter(whole).count()
    })
}

/// Reloads the module several times while two threads run `read`, which returns the number of files
/// that it has read.
pub(super) fn lives_beside_readers(read: impl Fn() -> usize + Sync) -> Result<()> {
    const LIVES: usize = 4;
    let stop = AtomicBool::new(false);
    let reads = AtomicUsize::new(0);
    let end = std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    reads.fetch_add(read(), Ordering::Relaxed);
                }
            });
        }
        let end = (0..LIVES).try_for_each(|_| Replaced::begin()?.end());
        stop.store(true, Ordering::Relaxed);
        end
    });
    note("lives", LIVES);
    end?;
    ensure!(reads.into_inner() > 0, "nothing was read");
    Ok(())
}

/// Runs modprobe with both spellings of the module's name. Driver containers run each command
/// twice, so the second run must succeed too.
fn modprobe(lab: &Lab) -> Result<()> {
    lab.needs_module()?;
    let replaced = Replaced::begin()?;
    for spelling in ["nvidia-peermem", "nvidia_peermem"] {
        sys::succeed("modprobe", [spelling])?;
        sys::succeed("modprobe", [spelling])?;
        ensure!(module::is_loaded(), "modprobe {spelling} loads nothing");
        sys::succeed("rmmod", [spelling])?;
        ensure!(!module::is_loaded(), "rmmod {spelling} does not unload it");
    }
    replaced.end()
}

/// Returns the values of a field of the module's information, in order.
fn information(module: &Path, field: &str) -> Result<BTreeSet<String>> {
    let output = sys::succeed("modinfo", [Path::new("-F"), Path::new(field), module])?;
    Ok(output.lines().map(str::to_owned).collect())
}

/// Data about the loaded module from `/sys/module`.
struct Loaded {
    files: BTreeSet<String>,
    parameters: BTreeSet<String>,
    /// Modules that the loaded module keeps from being unloaded.
    holds: BTreeSet<String>,
}

impl Loaded {
    fn look() -> Result<Self> {
        let directory = format!("/sys/module/{}", module::NAME);
        let mut holds = BTreeSet::new();
        for name in sys::names("/sys/module")? {
            if Path::new(&format!("/sys/module/{name}/holders/{}", module::NAME)).exists() {
                holds.insert(name);
            }
        }
        Ok(Self {
            files: sys::names(&directory)?,
            parameters: sys::names(format!("{directory}/parameters"))?,
            holds,
        })
    }
}

/// Compares our module with NVIDIA's nvidia-peermem: the file's information, and the module in
/// `/sys`.
fn as_nvidias(lab: &Lab) -> Result<()> {
    if lab.setup.peermem != Peermem::Ours {
        return ktap::skip("ours is not loaded");
    }
    let Some(control) = consumers::control() else {
        return ktap::skip("NVIDIA's module is not at hand");
    };
    let file = Path::new("nvidia-peermem");
    for field in ["name", "license", "depends", "alias", "vermagic"] {
        // The linker determines the order of words in `depends`.
        let words = |of: &Path| -> Result<BTreeSet<String>> {
            let lines = information(of, field)?;
            let words = lines
                .iter()
                .flat_map(|line| line.split(',').map(str::to_owned));
            Ok(words.collect())
        };
        let (ours, theirs) = (words(file)?, words(&control)?);
        note(field, format_args!("{ours:?}"));
        ensure!(ours == theirs, "{field}: {ours:?}, NVIDIA's {theirs:?}");
    }
    for field in ["version", "author", "description", "srcversion"] {
        let (ours, theirs) = (information(file, field)?, information(&control, field)?);
        note(field, format_args!("{ours:?}; NVIDIA's: {theirs:?}"));
        ensure!(
            theirs.is_empty() || ours.iter().any(|text| !text.is_empty()),
            "no {field}"
        );
    }
    let typed = |of: &Path| -> Result<BTreeSet<(String, bool)>> {
        let lines = information(of, "parm")?;
        Ok(lines
            .iter()
            .filter_map(|line| line.split_once(':'))
            .map(|(name, text)| (name.to_owned(), text.ends_with("(int)")))
            .collect())
    };
    let (ours, theirs) = (typed(file)?, typed(&control)?);
    ensure!(ours.is_superset(&theirs), "parameters {ours:?}, {theirs:?}");

    let version = module::version()?;
    let (driver, ours_of_it) = version.split_once("-rs").context("no -rs in the version")?;
    let numbers = driver.split('.').all(|part| part.parse::<u32>().is_ok());
    ensure!(
        numbers && driver.contains('.') && ours_of_it.parse::<u32>().is_ok() && version.len() <= 14,
        "version {version}"
    );

    let ours = Loaded::look()?;
    let replaced = Replaced::begin()?;
    module::load_file(&control)?;
    let theirs = Loaded::look();
    replaced.end()?;
    let theirs = theirs?;
    note("held_modules", format_args!("{:?}", ours.holds));
    ensure!(ours.holds == theirs.holds, "{:?}", theirs.holds);
    let missing: Vec<_> = theirs.files.difference(&ours.files).collect();
    note("files_that_ours_lacks", format_args!("{missing:?}"));
    ensure!(missing.is_empty(), "not in /sys/module: {missing:?}");
    ensure!(ours.parameters.is_superset(&theirs.parameters));
    Ok(())
}
