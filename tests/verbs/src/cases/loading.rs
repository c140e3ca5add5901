// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Tests of loading: the module's messages on machines where the module cannot work, and module
//! signatures on a kernel that checks them.
//!
//! These cases do not use a [`Lab`], because they unload modules that the module needs, in one case
//! all RDMA modules. A `Lab` would keep these modules loaded. Each case runs on only one machine of
//! the runner (`beside` or `signed`), and is skipped on all others.

use std::path::{Path, PathBuf};
use std::{env, fs};

use anyhow::{ensure, Context as _, Result};

use crate::cases::consumers;
use crate::gpu::GRANULE;
use crate::ktap::{cases, note, Case};
use crate::lab::{Lab, Setup};
use crate::sys::{succeed, Finished, KernelLog};
use crate::{ktap, module, sys};

const CASES: &[Case<Setup>] = cases![
    "loading.ib_core_has_no_peer_memory" => |_| no_peer_memory(),
    "loading.no_ib_uverbs" => |_| no_ib_uverbs(),
    "loading.all_is_there" => |_| all_is_there(),
    "loading.no_driver" => |_| no_driver(),
    "loading.older_driver" => |_| beside_driver("older", beside_older),
    "loading.proprietary_driver" => |_| beside_driver("proprietary", beside_proprietary),
    "loading.nv_peer_mem_is_there" => |_| nv_peer_mem(),
    "loading.revocable_mode_needs_ofed_25_04" => |_| revocable_mode(),
    "loading.nvidias_is_there" => |_| nvidias(),
    "loading.unsigned" => |_| unsigned(),
    "loading.signed_by_a_stranger" => |_| signed_by_a_stranger(),
    "loading.signed" => signed,
    // Unloads all RDMA modules, so this case is the last.
    "loading.no_ib_core" => |_| no_ib_core(),
];

/// Runs all cases. Returns `true` if no case failed.
pub(crate) fn run(setup: &Setup) -> Result<bool> {
    let named = CASES.iter().map(|case| (case.name, case));
    ktap::run_named(named, &[], |case| (case.run)(setup))
}

/// Runs a program that should load the module. Also returns the module's own log lines, and all log
/// lines.
fn attempt(program: &str, arguments: &[&str]) -> Result<(Finished, Vec<String>, Vec<String>)> {
    let log = KernelLog::from_now()?;
    let finished = sys::run(program, arguments)?;
    let lines = log.lines()?;
    for line in &lines {
        println!("# kernel: {line}");
    }
    let own = |line: &String| Some(line.strip_prefix("nvidia-peermem: ")?.to_owned());
    let said = lines.iter().filter_map(own).collect();
    Ok((finished, said, lines))
}

/// Loads the module with `parameters`. Returns its log lines.
fn loaded(parameters: &[&str]) -> Result<Vec<String>> {
    let (finished, said, _) = attempt("modprobe", &[&["nvidia-peermem"], parameters].concat())?;
    ensure!(finished.success(), "modprobe: {}", finished.tail(3));
    Ok(said)
}

/// Checks that `program` fails to load the module with `words`, and that the module logs exactly
/// `line`.
fn refused(program: &str, file: &str, words: &str, line: &str) -> Result<()> {
    let (finished, said, _) = attempt(program, &[file])?;
    note(program, finished.output.trim());
    finished.failed_with(words)?;
    ensure!(said == [line], "the module logged {said:#?}");
    ensure!(!module::is_loaded(), "the module is loaded");
    Ok(())
}

/// Checks an attempt that the kernel itself refuses. The program must fail with `words`, the kernel
/// must log `reason`, and the module must log nothing.
fn refused_by_kernel(
    (finished, said, lines): (Finished, Vec<String>, Vec<String>),
    words: &str,
    reason: &str,
) -> Result<()> {
    note("output", finished.output.trim());
    finished.failed_with(words)?;
    ensure!(said.is_empty(), "the module logged {said:#?}");
    ensure!(lines.iter().any(|line| line.contains(reason)), "{lines:#?}");
    Ok(())
}

/// kmod's message for ENOENT. The message refers the user to the kernel log.
const SEE_DMESG: &str = "Unknown symbol in module";

/// Skips the case unless this test machine has other versions of nvidia.ko. On such a machine, no
/// peermem module is loaded, but our module can be loaded.
fn needs_drivers() -> Result<PathBuf> {
    match env::var_os("TESTVM_DRIVERS") {
        Some(drivers) => Ok(drivers.into()),
        None => ktap::skip("a machine without other drivers"),
    }
}

fn needs_peer_memory() -> Result<PathBuf> {
    let drivers = needs_drivers()?;
    if consumers::peer_memory()?.is_none() {
        return ktap::skip("this ib_core has no peer memory");
    }
    Ok(drivers)
}

/// Tests mainline's ib_core, which has no peer memory.
fn no_peer_memory() -> Result<()> {
    needs_drivers()?;
    if consumers::peer_memory()?.is_some() {
        return ktap::skip("this ib_core has peer memory");
    }
    let line = "not loaded: the ib_core that is loaded has no peer memory (no ib_register_peer_memory_client): load the \
                ib_core of MLNX_OFED or DOCA-OFED, or use software that registers GPU memory by dma-buf, without this module";
    refused("modprobe", "nvidia-peermem", SEE_DMESG, line)?;
    refused("insmod", &module::file()?, SEE_DMESG, line)?;
    // Checks that the failed load does not keep nvidia.ko loaded.
    succeed("rmmod", ["nvidia"])?;
    succeed("modprobe", ["nvidia"])?;
    Ok(())
}

/// Tests a machine without ib_uverbs, the module that contains peer memory in OFED since 5.5. The
/// module cannot know whether the missing ib_uverbs would contain peer memory.
fn no_ib_uverbs() -> Result<()> {
    needs_drivers()?;
    if consumers::peer_memory()?.is_some() {
        return ktap::skip("this ib_core has peer memory");
    }
    delete_links()?;
    unload_with_users("ib_uverbs")?;
    let line = "not loaded: ib_uverbs is not loaded, and OFED since 5.5 has peer memory there (no \
                ib_register_peer_memory_client): modprobe ib_uverbs, then this module again";
    refused("modprobe", "nvidia-peermem", SEE_DMESG, line)?;
    succeed("modprobe", ["ib_uverbs"]).map(|_| ())
}

/// Checks that our module holds nvidia.ko and the kernel's module with peer memory (ib_core, or
/// ib_uverbs on older kernels), and logs nothing. Our module may have weak symbols.
fn all_is_there() -> Result<()> {
    needs_peer_memory()?;
    let line = consumers::peer_memory()?.unwrap_or_default();
    let (_, core) = line.rsplit_once('[').context(line.clone())?;
    let neighbours = [core.trim_end_matches(']'), "nvidia"];
    let said = loaded(&[])?;
    ensure!(said.is_empty(), "the module logged {said:#?}");
    for neighbour in neighbours {
        let holder = format!("/sys/module/{neighbour}/holders/{}", module::NAME);
        ensure!(Path::new(&holder).exists(), "{neighbour} is not held");
        ensure!(sys::unload_module(neighbour).is_err(), "{neighbour}");
    }
    let depends = succeed("modinfo", ["-F", "depends", "nvidia-peermem"])?;
    let mut depends: Vec<&str> = depends.trim().split(',').collect();
    depends.sort_unstable();
    ensure!(depends == neighbours, "the module depends on {depends:?}");
    module::unload()
}

fn no_driver() -> Result<()> {
    needs_peer_memory()?;
    succeed("rmmod", ["nvidia"])?;
    let result = refused(
        "insmod",
        &module::file()?,
        SEE_DMESG,
        "not loaded: nvidia.ko is not loaded, and so there is no nvidia_p2p_get_pages: modprobe loads it first, insmod does not",
    );
    succeed("modprobe", ["nvidia"])?;
    result
}

/// Loads another nvidia.ko instead of the stand-in, and calls `check`.
fn beside_driver(kind: &str, check: fn() -> Result<()>) -> Result<()> {
    let driver = needs_peer_memory()?.join(kind).join("nvidia.ko");
    succeed("rmmod", ["nvidia"])?;
    module::load_file(&driver)?;
    let result = check();
    succeed("rmmod", ["nvidia"])?;
    succeed("modprobe", ["nvidia"])?;
    result
}

/// Checks the message about an older nvidia.ko. A kernel with symbol versions (MODVERSIONS) refuses
/// the module first, because the module was built for another nvidia.ko.
fn beside_older() -> Result<()> {
    let built = succeed("modinfo", ["-F", "vermagic", "nvidia-peermem"])?;
    if built.contains("modversions") {
        return refused_by_kernel(
            attempt("modprobe", &["nvidia-peermem"])?,
            "Invalid argument",
            "nvidia_peermem: disagrees about version of symbol nvidia_p2p_",
        );
    }
    refused(
        "modprobe",
        "nvidia-peermem",
        SEE_DMESG,
        "not loaded: nvidia.ko 530.30.02 has no nvidia_p2p_get_pages_persistent: install driver 535 or newer",
    )
}

/// Checks the message about a proprietary nvidia.ko. The kernel hides the symbols of a proprietary
/// module from a module with GPL-only symbols, and does not compare their versions.
fn beside_proprietary() -> Result<()> {
    refused(
        "modprobe",
        "nvidia-peermem",
        SEE_DMESG,
        "not loaded: nvidia.ko 550.54.14 is the proprietary flavour, and this module was not built for it: build it \
         again beside that driver (x86-64), or install NVIDIA's open kernel modules \
         (nvidia-open), or use NVIDIA's own nvidia-peermem",
    )
}

/// Loads the module beside nv_peer_mem. An ib_core that shows its clients refuses a second client
/// of the same name. Other versions accept the second client, and ask the first client first.
fn nv_peer_mem() -> Result<()> {
    let rival = needs_peer_memory()?.join("nv_peer_mem/nv_peer_mem.ko");
    module::load_file(&rival)?;
    let result = if consumers::core_shows() {
        refused(
            "modprobe",
            "nvidia-peermem",
            "Invalid argument",
            "not loaded: nv_peer_mem is loaded, and ib_core takes no second client nv_mem: rmmod nv_peer_mem, and remove its \
             package (nvidia-peer-memory)",
        )
    } else {
        beside_nv_peer_mem()
    };
    succeed("rmmod", ["nv_peer_mem"])?;
    result
}

fn beside_nv_peer_mem() -> Result<()> {
    let said = loaded(&[])?;
    let expected = "nv_peer_mem is loaded, too, and its client nv_mem is asked before this module's: rmmod nv_peer_mem, \
                    and remove its package (nvidia-peer-memory)";
    module::unload()?;
    ensure!(said == [expected], "the module logged {said:#?}");
    Ok(())
}

/// Checks the warning in revocable mode, which depends on OFED's other modules. Persistent mode
/// never warns.
fn revocable_mode() -> Result<()> {
    let drivers = needs_peer_memory()?;
    warned(Some("the ib_core that is loaded is not OFED's"))?;
    let insert = |kind: &str, file: &str| module::load_file(&drivers.join(kind).join(file));
    insert("mlx_compat", "mlx_compat.ko")?;
    let result = warned(Some(
        "no module shows the OFED version of the ib_core that is loaded",
    ))
    .and_then(|()| {
        let older = "the ib_core that is loaded has version 24.10-3.2.5";
        for (kind, words) in [("ofed_24_10", Some(older)), ("ofed_25_04", None)] {
            insert(kind, "mlx5_core.ko")?;
            let result = warned(words);
            succeed("rmmod", ["mlx5_core"])?;
            result?;
        }
        Ok(())
    });
    succeed("rmmod", ["mlx_compat"])?;
    result
}

/// Loads the module in both modes. In revocable mode, the module must warn with `words`. In
/// persistent mode, or without `words`, the module must log nothing.
fn warned(words: Option<&str>) -> Result<()> {
    let line = words.map(|words| {
        format!(
            "revocable mode needs OFED 25.04 or newer, and {words}: a registration that fails can hang in ib_core for ever: \
             install OFED 25.04 or newer, or load this module with persistent_api_support=1"
        )
    });
    for (mode, expected) in [(0, line), (1, None)] {
        let mode = format!("persistent_api_support={mode}");
        let said = loaded(&[&mode])?;
        module::unload()?;
        let expected: Vec<String> = expected.into_iter().collect();
        ensure!(said == expected, "{mode}: the module logged {said:#?}");
    }
    Ok(())
}

/// Loads two modules of the same name. The kernel must keep the first module and report an error to
/// the loader of the second module.
fn nvidias() -> Result<()> {
    needs_peer_memory()?;
    let Some(control) = consumers::control() else {
        return ktap::skip("NVIDIA's module is not at hand");
    };
    module::load_file(&control)?;
    let theirs = module::version()?;
    let (finished, said, _) = attempt("insmod", &[&module::file()?])?;
    let still = module::version()?;
    module::unload()?;
    finished.failed_with("File exists")?;
    ensure!(said.is_empty(), "the module logged {said:#?}");
    ensure!(theirs == still && !theirs.contains("-rs"), "{still}");
    Ok(())
}

fn unload_with_users(name: &str) -> Result<()> {
    for user in sys::names(format!("/sys/module/{name}/holders"))? {
        // This holder may already have been unloaded as a holder of another module.
        if Path::new("/sys/module").join(&user).exists() {
            unload_with_users(&user)?;
        }
    }
    succeed("rmmod", [name]).map(|_| ())
}

fn delete_links() -> Result<()> {
    for link in ["rxe0", "rxe1"] {
        succeed("rdma", ["link", "del", link])?;
    }
    Ok(())
}

/// Runs `insmod` without ib_core. Then modprobe must load the module and everything that it needs.
fn no_ib_core() -> Result<()> {
    needs_peer_memory()?;
    delete_links()?;
    unload_with_users("ib_core")?;
    refused(
        "insmod",
        &module::file()?,
        SEE_DMESG,
        "not loaded: ib_core is not loaded, and so there is no ib_register_peer_memory_client: modprobe loads it first, insmod \
         does not",
    )?;
    succeed("modprobe", ["nvidia-peermem"])?;
    module::unload()
}

// --- Signatures ---

/// The kernel's sign-file program, a key that the kernel trusts, and our module without a
/// signature.
struct Signing {
    sign_file: String,
    key: String,
    certificate: String,
    module: String,
}

impl Signing {
    fn needed() -> Result<Self> {
        let variable = |name| match env::var(name) {
            Ok(value) => Ok(value),
            Err(_) => ktap::skip("a kernel that takes modules without signatures"),
        };
        Ok(Self {
            sign_file: variable("TESTVM_SIGN_FILE")?,
            key: variable("TESTVM_SIGN_KEY")?,
            certificate: variable("TESTVM_SIGN_CERTIFICATE")?,
            module: variable("TESTVM_UNSIGNED_KO")?,
        })
    }

    /// Signs a copy of the module, as DKMS does.
    fn signed(&self, key: &str, certificate: &str) -> Result<String> {
        let copy = "/tmp/nvidia-peermem.ko";
        fs::copy(&self.module, copy)?;
        succeed(&self.sign_file, ["sha512", key, certificate, copy])?;
        Ok(copy.to_owned())
    }
}

/// Checks that the kernel refuses the file with `reason`. Then loads the installed module again.
fn rejected(file: &str, reason: &str) -> Result<()> {
    module::unload()?;
    let result = attempt("insmod", &[file]);
    module::load(&[])?;
    refused_by_kernel(result?, "Key was rejected by service", reason)
}

fn unsigned() -> Result<()> {
    let signing = Signing::needed()?;
    rejected(&signing.module, "Loading of unsigned module is rejected")
}

/// Signs with a new key that is not enrolled.
fn signed_by_a_stranger() -> Result<()> {
    let signing = Signing::needed()?;
    let (key, certificate) = ("/tmp/stranger.key", "/tmp/stranger.der");
    let arguments =
        "req -new -x509 -nodes -days 2 -newkey rsa:2048 -subj /CN=stranger/ -outform DER";
    let mut arguments: Vec<&str> = arguments.split(' ').collect();
    arguments.extend(["-keyout", key, "-out", certificate]);
    succeed("openssl", &arguments)?;
    rejected(
        &signing.signed(key, certificate)?,
        "Loading of module with unavailable key is rejected",
    )
}

/// Signs with a key that the kernel trusts. The module must load, must not taint the kernel as
/// unsigned, and must work.
fn signed(setup: &Setup) -> Result<()> {
    let signing = Signing::needed()?;
    let file = signing.signed(&signing.key, &signing.certificate)?;
    let signer = succeed("modinfo", ["-F", "signer", &file])?;
    note("signer", signer.trim());
    ensure!(!signer.trim().is_empty(), "no signer");
    module::unload()?;
    module::load_file(Path::new(&file))?;
    let taint = sys::read_line(&format!("/sys/module/{}/taint", module::NAME))?;
    ensure!(taint == "O", "taint {taint:?}");
    let tainted: u64 = sys::read_line("/proc/sys/kernel/tainted")?.parse()?;
    ensure!(tainted & (1 << 13) == 0, "unsigned modules: {tainted:#x}");
    let lab = Lab::open(setup)?;
    let memory = lab.allocate_gpu(usize::try_from(GRANULE)?)?;
    lab.near
        .reg_mr(memory.span(0, usize::try_from(GRANULE)?)?)?;
    Ok(())
}
