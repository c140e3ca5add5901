// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! The kernels that the test runner boots: which there are, and how one is made from Debian's source.
//!
//! A kernel's source tree is unpacked once and kept. What we change in it (patches, and whole files of the overlay) is laid
//! over it by contents, so that a changed patch touches only the files that it changes and make compiles only those.
//! Flavours that differ in configuration and compiler alone share one tree; each has an output directory of its own.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{anyhow, bail, Context as _, Result};

use crate::arch::Arch;
use crate::modules::Index;
use crate::paths::Paths;
use crate::progress::Stage;
use crate::stamp::Key;
use crate::suite::{Again, Smoke, ON_ARM64, ON_OLDEST, ON_STOCK};
use crate::toolchain::Toolchain;
use crate::{apt, patch, stamp};

pub(crate) mod stock;

/// One kernel of the test VM.
pub(crate) struct Flavour {
    /// Name for `--kernel`, and of the kernel's directory in the cache.
    pub(crate) name: &'static str,
    pub(crate) arch: Arch,
    /// Debian's package of the source.
    package: &'static str,
    /// Suites of Debian's archive that carry the package. The machine's own need not be among them.
    suites: &'static [&'static str],
    /// Directories in `tests/kernel/patches`, applied one after the other.
    patches: &'static [&'static str],
    /// Variables for make, for the kernel and for modules.
    make: &'static [&'static str],
    origin: Origin,
    /// Smoke runs of the suite on this kernel.
    pub(crate) smoke: &'static [Smoke],
    /// Runs of the suite that `make test-all` repeats on this kernel.
    pub(crate) again: Again,
    /// `make test` leaves the kernel out: `make test-all` has it.
    pub(crate) only_in_full: bool,
    /// Time that the kernel takes from nothing on two processors, in seconds.
    pub(crate) seconds: f64,
    /// Space that the kernel takes in the cache, in MiB.
    pub(crate) mib: u64,
}

/// Where a kernel's image comes from.
enum Origin {
    /// Compiled from the source, with the RDMA modules.
    Built(Built),
    /// Debian's own image and headers of the source's version. Only the RDMA modules are compiled.
    Stock,
}

/// Properties of a kernel that is compiled here.
struct Built {
    /// Prefix of packages to try, newest first, when the usual one has vanished from the archive.
    instead: Option<&'static str>,
    /// The flavour whose directory holds the source: itself, or another of the same package and patches.
    source: &'static str,
    /// Configuration fragments in `tests/kernel/config`.
    config: &'static [&'static str],
    /// The compiler that the variables for make choose.
    compiler: &'static str,
    /// The RDMA modules are also built as the pristine source has them.
    stock: bool,
    /// The configuration has the detectors of `debug.config`, and every machine must show that they work.
    detectors: bool,
}

pub(crate) const DEFAULT: &str = "7.3";
/// The series before the default, for what differs in the `kernel` crate.
pub(crate) const EARLIER: &str = "7.2";
/// The fragment of a kernel that looks at signatures: it trusts a key of the test VM's.
const SIGNED: &str = "signed.config";
/// The same source with what finds faults that no result shows.
pub(crate) const DEBUG: &str = "debug";
/// The detectors on a kernel without Rust, where the portable build runs.
pub(crate) const DEBUG_PORTABLE: &str = "6.12-debug";
/// The usual one for arm64, with pages of 4 KiB, and the same with pages of 64 KiB.
pub(crate) const ARM64: &str = "7.3-arm64";
pub(crate) const ARM64_64K: &str = "7.3-arm64-64k";
/// Debian 13's own for arm64, with pages of 4 KiB.
const STOCK_ARM64: &str = "6.12-arm64";

/// The variables for make by which clang 19 and its tools compile for this machine's processors.
const CLANG: &[&str] = &["LLVM=-19"];

/// The variables for make by which this machine's gcc compiles modules for a stock kernel, whatever gcc built that kernel.
/// Type information would need the kernel's own version of pahole.
const STOCK_MAKE: &[&str] = &[
    "CC=gcc",
    "CONFIG_DEBUG_INFO=",
    "CONFIG_DEBUG_INFO_BTF_MODULES=",
    // A flag of gcc 14.
    "CONFIG_CC_HAS_MIN_FUNCTION_ALIGNMENT=",
];

/// The same where the modules are cross-compiled.
const STOCK_MAKE_ARM64: &[&str] = &[
    "ARCH=arm64",
    "CROSS_COMPILE=aarch64-linux-gnu-",
    "CC=aarch64-linux-gnu-gcc",
    "CONFIG_DEBUG_INFO=",
    "CONFIG_DEBUG_INFO_BTF_MODULES=",
    // A flag of gcc 14, without which the functions are not aligned as arm64's tracer of functions wants them.
    "CONFIG_CC_HAS_MIN_FUNCTION_ALIGNMENT=",
    "CONFIG_FUNCTION_TRACER=",
    // The same setting as in `Arch::make`.
    "CFLAGS_peer_mem.o=-mcmodel=large",
];

/// Fields that most built kernels have alike.
const BUILT: Flavour = Flavour {
    name: "",
    arch: Arch::X86_64,
    package: "linux-source-7.3",
    suites: &["trixie-backports", "forky", "sid"],
    patches: &["7.3"],
    make: &[],
    origin: Origin::Stock,
    smoke: &[],
    again: Again::All,
    only_in_full: false,
    seconds: 404.0,
    mib: 650,
};

/// Fields that all stock kernels have alike.
const STOCK: Flavour = Flavour {
    make: STOCK_MAKE,
    origin: Origin::Stock,
    smoke: &[Smoke::Nvidia, Smoke::Revocable],
    again: Again::Listed(ON_STOCK),
    seconds: 180.0,
    mib: 80,
    ..BUILT
};

const FLAVOURS: &[Flavour] = &[
    Flavour {
        name: DEFAULT,
        origin: Origin::Built(Built {
            instead: Some("linux-source-7."),
            source: DEFAULT,
            config: &["rig.config"],
            compiler: "gcc",
            stock: true,
            detectors: false,
        }),
        again: Again::Nothing,
        ..BUILT
    },
    Flavour {
        name: EARLIER,
        package: "linux-source-7.2",
        patches: &["7.2", "7.3"],
        origin: Origin::Built(Built {
            instead: None,
            source: EARLIER,
            config: &["rig.config", "7.2.config", HOST, SIGNED],
            compiler: "gcc",
            stock: true,
            detectors: false,
        }),
        smoke: &[Smoke::Revocable],
        seconds: 600.0,
        ..BUILT
    },
    Flavour {
        name: DEBUG,
        make: CLANG,
        origin: Origin::Built(Built {
            instead: Some("linux-source-7."),
            source: DEFAULT,
            config: &["rig.config", "debug.config"],
            compiler: "clang-19",
            stock: false,
            detectors: true,
        }),
        again: Again::Nothing,
        seconds: 720.0,
        mib: 3600,
        ..BUILT
    },
    Flavour {
        name: ARM64,
        arch: Arch::Arm64,
        make: Arch::Arm64.make(),
        origin: Origin::Built(Built {
            instead: Some("linux-source-7."),
            source: ARM64,
            config: &["rig.config", "arm64.config"],
            compiler: "clang-19",
            stock: false,
            detectors: false,
        }),
        again: Again::Listed(ON_ARM64),
        // A root, programs and a kernel are too much for the first `make test` on a machine.
        only_in_full: true,
        ..BUILT
    },
    Flavour {
        name: ARM64_64K,
        arch: Arch::Arm64,
        make: Arch::Arm64.make(),
        origin: Origin::Built(Built {
            instead: Some("linux-source-7."),
            source: ARM64,
            config: &["rig.config", "arm64.config", "arm64-64k.config"],
            compiler: "clang-19",
            stock: false,
            detectors: false,
        }),
        again: Again::Listed(ON_ARM64),
        // A root, programs and a kernel are too much for the first `make test` on a machine.
        only_in_full: true,
        ..BUILT
    },
    // Debian 13's, 12's and 11's own kernels.
    Flavour {
        name: "6.12",
        package: "linux-source-6.12",
        suites: &["trixie"],
        patches: &["6.12"],
        smoke: &[
            Smoke::Nvidia,
            Smoke::Revocable,
            Smoke::Proprietary,
            Smoke::ProprietaryRevocable,
        ],
        ..STOCK
    },
    Flavour {
        name: STOCK_ARM64,
        arch: Arch::Arm64,
        package: "linux-source-6.12",
        suites: &["trixie"],
        patches: &["6.12"],
        make: STOCK_MAKE_ARM64,
        smoke: &[Smoke::Nvidia, Smoke::Ours, Smoke::Revocable],
        again: Again::Nothing,
        only_in_full: true,
        ..STOCK
    },
    Flavour {
        name: DEBUG_PORTABLE,
        package: "linux-source-6.12",
        suites: &["trixie"],
        patches: &["6.12"],
        make: &["CC=gcc"],
        origin: Origin::Built(Built {
            instead: None,
            source: DEBUG_PORTABLE,
            config: &["rig.config", "debug.config", "6.12-debug.config"],
            compiler: "gcc",
            stock: false,
            detectors: true,
        }),
        again: Again::Nothing,
        only_in_full: true,
        seconds: 720.0,
        mib: 3600,
        ..BUILT
    },
    Flavour {
        name: "6.1",
        package: "linux-source-6.1",
        suites: &["bookworm"],
        patches: &["6.1"],
        ..STOCK
    },
    Flavour {
        name: "5.10",
        package: "linux-source-5.10",
        // The last kernels of Debian 11 are updates: its release has none with what the stand-in is compiled with.
        suites: &["bullseye-security", "bullseye"],
        patches: &["5.10"],
        // The verbs cases have those of the smoke runs.
        smoke: &[],
        again: Again::Listed(ON_OLDEST),
        only_in_full: true,
        ..STOCK
    },
];

/// What of the source no kernel of the test VM compiles: two thirds of it. Descriptions for Kconfig and make stay.
const NOT_UNPACKED: &[&str] = &[
    "Documentation/*.rst",
    "Documentation/devicetree/*.yaml",
    "drivers/gpu/drm/*/*.[ch]",
    "drivers/media/*.[ch]",
    "drivers/net/ethernet/*.[ch]",
    "drivers/net/wireless/*.[ch]",
    "drivers/scsi/*/*.[ch]",
    "drivers/staging/*.[ch]",
    "sound/*.[ch]",
    "tools/perf/*",
    "tools/testing/selftests/*",
];

/// Files that stay as in the pristine source while the stock modules are built.
const RDMA: &[&str] = &["drivers/infiniband/", "include/rdma/", "include/uapi/rdma/"];

/// What shows a machine's topology: NUMA, and config space past 256 bytes.
const HOST: &str = "host.config";

impl Flavour {
    fn built(&self) -> Option<&Built> {
        match &self.origin {
            Origin::Built(built) => Some(built),
            Origin::Stock => None,
        }
    }

    /// The flavour whose directory holds the source.
    pub(crate) fn source(&self) -> &'static str {
        self.built().map_or(self.name, |built| built.source)
    }

    fn config(&self) -> &'static [&'static str] {
        self.built().map_or(&[], |built| built.config)
    }

    fn compiler(&self) -> &'static str {
        self.built().map_or("gcc", |built| built.compiler)
    }

    /// Returns `true` if the kernel is Debian's own image.
    pub(crate) fn is_stock(&self) -> bool {
        self.built().is_none()
    }

    /// Whether it sees sockets, and ACS and ATS of a bridge.
    pub(crate) fn shows_topology(&self) -> bool {
        self.is_stock() || self.config().contains(&HOST)
    }
}

pub(crate) fn flavour(name: &str) -> Option<&'static Flavour> {
    FLAVOURS.iter().find(|flavour| flavour.name == name)
}

/// All kernels of the test VM.
pub(crate) fn all() -> impl Iterator<Item = &'static Flavour> {
    FLAVOURS.iter()
}

/// All for these processors.
pub(crate) fn of(arch: Arch) -> impl Iterator<Item = &'static str> {
    FLAVOURS
        .iter()
        .filter(move |flavour| flavour.arch == arch)
        .map(|flavour| flavour.name)
}

/// The kernels on which `make test-all` repeats machines of the suite.
pub(crate) fn others() -> impl Iterator<Item = &'static str> {
    all()
        .filter(|flavour| flavour.again != Again::Nothing)
        .map(|flavour| flavour.name)
}

/// A kernel that is there.
pub(crate) struct Kernel {
    pub(crate) arch: Arch,
    pub(crate) image: PathBuf,
    pub(crate) release: String,
    /// For building modules: make's output directory.
    pub(crate) build: PathBuf,
    /// Its own modules.
    pub(crate) modules: PathBuf,
    /// Its RDMA modules as the pristine source has them.
    pub(crate) stock: Option<PathBuf>,
    /// Changes with anything that it was made from.
    pub(crate) key: String,
    /// Where the products of modules built for it go.
    pub(crate) products: PathBuf,
    pub(crate) make: &'static [&'static str],
    /// It has the detectors of `debug.config`.
    pub(crate) detectors: bool,
    /// Debian's own image.
    pub(crate) is_stock: bool,
    /// The build tree has what Rust modules are compiled against.
    pub(crate) has_rust: bool,
    /// The kernel compares versions of the symbols that modules use (`CONFIG_MODVERSIONS`).
    pub(crate) has_symbol_versions: bool,
    /// Its makefiles can put a module's products elsewhere than beside the source (Linux 6.13).
    pub(crate) separates_output: bool,
    /// Where the key lies whose signatures it takes.
    pub(crate) signing: Option<Signing>,
}

/// A key that a kernel trusts, as DKMS makes its own.
#[derive(Debug, Clone)]
pub(crate) struct Signing {
    /// The private key, in PEM.
    pub(crate) key: PathBuf,
    /// The certificate, in DER.
    pub(crate) certificate: PathBuf,
    /// The kernel's program.
    pub(crate) sign_file: PathBuf,
}

impl Signing {
    /// Signs a module's file in its place.
    pub(crate) fn sign(&self, module: &Path) -> Result<()> {
        crate::progress::output(
            Command::new(&self.sign_file)
                .arg("sha512")
                .args([&self.key, &self.certificate])
                .arg(module),
        )?;
        Ok(())
    }
}

impl Kernel {
    /// Its source, which the build tree names; of a stock kernel that of the RDMA modules.
    pub(crate) fn source(&self) -> PathBuf {
        if self.is_stock {
            return self.modules.with_file_name("source");
        }
        let link = self.build.join("source");
        if link.exists() {
            link
        } else {
            self.build.clone()
        }
    }

    /// Its modules, the stock RDMA ones first if so wanted.
    pub(crate) fn index(&self, stock: bool) -> Result<Index> {
        let mut index = Index::default();
        if stock {
            let stock = self
                .stock
                .as_ref()
                .ok_or_else(|| anyhow!("this kernel has no stock RDMA modules"))?;
            index.add_tree(stock)?;
            // Names that only the patched ones have must not be found by accident.
            let known: BTreeSet<String> = index.names().map(str::to_owned).collect();
            let mut rest = Index::default();
            rest.add_tree(&self.modules)?;
            for file in rest.files() {
                let name = crate::modules::name_of(file);
                if !known.contains(&name) {
                    index.add(file.clone());
                }
            }
        } else {
            index.add_tree(&self.modules)?;
        }
        Ok(index)
    }
}

/// Returns the release of the kernel of a build tree, as `uname -r` prints it.
fn release_of(paths: &Paths, build: &Path) -> Result<String> {
    let script = paths.repo.join("rust-bindings/release.sh");
    let text = crate::progress::output(Command::new(script).arg(build))?;
    let release = text.trim();
    if release.is_empty() {
        bail!("{} has no kernel's release", build.display());
    }
    Ok(release.to_owned())
}

/// The build tree that a path names: itself, or the one that an image lies in.
fn tree_of(path: &Path) -> &Path {
    if path.is_dir() {
        path
    } else {
        path.ancestors().nth(4).unwrap_or(path)
    }
}

/// Whether an option of a build tree's configuration is y.
fn is_set(build: &Path, option: &str) -> bool {
    let options = build.join("include/config/auto.conf");
    let options = fs::read_to_string(options).unwrap_or_default();
    let wanted = format!("CONFIG_{option}=y");
    options.lines().any(|line| line == wanted)
}

/// Returns `true` if a build tree has the metadata of the `kernel` crate.
fn has_rust(build: &Path) -> bool {
    let file = build.join("rust/libkernel.rmeta");
    file.is_file()
}

/// Returns `true` if the makefiles of a build tree know the variable `MO`.
fn separates_output(build: &Path) -> bool {
    let makefiles = [build.join("source/Makefile"), build.join("Makefile")];
    makefiles.iter().any(|file| {
        fs::read_to_string(file).is_ok_and(|text| text.contains("KBUILD_EXTMOD_OUTPUT"))
    })
}

/// The processors that a kernel is for, by its name, or a path to a build tree or the image in one.
pub(crate) fn arch_of(name: &str) -> Arch {
    if let Some(flavour) = flavour(name) {
        return flavour.arch;
    }
    if is_set(tree_of(Path::new(name)), "ARM64") {
        Arch::Arm64
    } else {
        Arch::X86_64
    }
}

/// Those of several kernels, each once.
pub(crate) fn archs(kernels: &[&str]) -> Vec<Arch> {
    let mut archs: Vec<Arch> = kernels.iter().map(|name| arch_of(name)).collect();
    archs.sort();
    archs.dedup();
    archs
}

/// A kernel that somebody else built: its build tree, or the image in one.
pub(crate) fn by_path(paths: &Paths, path: &Path) -> Result<Kernel> {
    let path =
        fs::canonicalize(path).with_context(|| format!("there is no kernel {}", path.display()))?;
    let arch = arch_of(&path.to_string_lossy());
    let build = tree_of(&path).to_path_buf();
    let image = if path.is_dir() {
        // The test VM's own trees have no bzImage: QEMU enters their vmlinux. All trees have that.
        let images = ["arch/x86/boot/bzImage", Arch::Arm64.image().0, "vmlinux"];
        let images = images.map(|name| path.join(name));
        let image = images.into_iter().find(|image| image.is_file());
        image.ok_or_else(|| anyhow!("{} has no kernel that QEMU boots", path.display()))?
    } else {
        path
    };
    let release = release_of(paths, &build)
        .with_context(|| format!("{} does not lie in a build tree", image.display()))?;
    let mut key = Key::default();
    key.bytes("image", &fs::read(&image)?);
    key.bytes(
        "symbols",
        &fs::read(build.join("Module.symvers")).unwrap_or_default(),
    );
    let mut name = Key::default();
    name.text("tree", &build.to_string_lossy());
    Ok(Kernel {
        arch,
        image,
        release,
        modules: build.clone(),
        stock: None,
        key: key.finish(),
        products: paths.cache.join("modules").join(name.finish()),
        // Its modules want the compiler that it was built by.
        make: match is_set(&build, "CC_IS_CLANG") {
            true if arch == Arch::X86_64 => CLANG,
            _ => arch.make(),
        },
        detectors: false,
        is_stock: false,
        has_rust: has_rust(&build),
        has_symbol_versions: is_set(&build, "MODVERSIONS"),
        separates_output: separates_output(&build),
        build,
        signing: None,
    })
}

/// One flavour's directory in the cache, and the one that has its source.
struct Tree<'a> {
    paths: &'a Paths,
    flavour: &'static Flavour,
    directory: PathBuf,
    home: PathBuf,
    toolchain: &'a Toolchain,
}

/// Contents of the files that we change, by path: none for a file that is not to be there.
type Files = BTreeMap<String, Option<Vec<u8>>>;

/// How much of a kernel is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Extent {
    /// Without the stock RDMA modules, which only tests load.
    Patched,
    /// With them.
    Whole,
    /// What is there is taken for what it is.
    Frozen,
}

/// Makes a kernel, or as much of it as is wanted and not made yet.
pub(crate) fn ensure(
    paths: &Paths,
    toolchain: &Toolchain,
    flavour: &'static Flavour,
    extent: Extent,
) -> Result<Kernel> {
    let tree = Tree {
        paths,
        flavour,
        directory: paths.cache.join("kernel").join(flavour.name),
        home: paths.cache.join("kernel").join(flavour.source()),
        toolchain,
    };
    fs::create_dir_all(&tree.directory)?;
    fs::create_dir_all(&tree.home)?;
    let is_stock = flavour.is_stock();
    if tree.source_name().is_none() || (is_stock && !tree.has_stock_image()) {
        if is_stock {
            tree.fetch_stock()?;
        } else {
            tree.fetch()?;
        }
    }
    let source = tree
        .source_name()
        .context("the kernel's source was fetched and is not there")?;
    let key = tree.key(&source)?;
    // A key that is lost is made anew, and the kernel has to learn it.
    let keyed = tree.signing().is_none_or(|signing| signing.key.exists());
    let stamp = tree.at("stamp");
    let has_stock = flavour.built().is_some_and(|built| built.stock);
    let stock = has_stock && extent == Extent::Whole;
    let is_there = match extent {
        Extent::Frozen => stamp.exists(),
        _ => stamp::is_fresh(&stamp, &key) && !(stock && tree.stock_is_stale(&source)?),
    };
    if !keyed || !is_there {
        // Until it is whole again it is not there, whoever interrupts this.
        let _ = fs::remove_file(&stamp);
        if is_stock {
            tree.build_on_stock(&key)?;
        } else {
            tree.build(&source, &key, stock)?;
        }
    }
    let build = tree.at("build");
    Ok(Kernel {
        arch: flavour.arch,
        image: tree.image(),
        release: release_of(paths, &build)?,
        has_rust: has_rust(&build),
        has_symbol_versions: is_set(&build, "MODVERSIONS"),
        separates_output: separates_output(&build),
        build,
        modules: tree.at("modules"),
        stock: (has_stock || is_stock).then(|| tree.at("stock")),
        key,
        products: paths.cache.join("modules").join(flavour.name),
        make: flavour.make,
        detectors: flavour.built().is_some_and(|built| built.detectors),
        is_stock,
        signing: tree.signing(),
    })
}

impl Tree<'_> {
    fn at(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    /// What QEMU boots. Others may have the build tree's open.
    fn image(&self) -> PathBuf {
        if self.flavour.is_stock() {
            return self.at("vmlinuz");
        }
        let (image, _) = self.flavour.arch.image();
        self.at(image.rsplit('/').next().unwrap_or(image))
    }

    /// Something of the source, which several flavours may share.
    fn shared(&self, name: &str) -> PathBuf {
        self.home.join(name)
    }

    fn signing(&self) -> Option<Signing> {
        self.flavour.config().contains(&SIGNED).then(|| Signing {
            key: self.at("signing/rig.key"),
            certificate: self.at("signing/rig.der"),
            sign_file: self.at("build/scripts/sign-file"),
        })
    }

    /// Makes the key, if there is none, and puts its certificate where the configuration names it.
    fn lay_certificate(&self) -> Result<()> {
        let Some(signing) = self.signing() else {
            return Ok(());
        };
        if !signing.key.exists() {
            let _ = fs::remove_file(&signing.certificate);
            fs::create_dir_all(self.at("signing"))?;
            // As `dkms generate_mok` does, under a name that is moved when both are there.
            let half = self.at("signing/new.key");
            crate::progress::output(
                Command::new("openssl")
                    .args(
                        "req -new -x509 -nodes -days 36500 -newkey rsa:2048 -outform DER"
                            .split(' '),
                    )
                    .args(["-subj", "/CN=the test VM's own key for modules/"])
                    .arg("-keyout")
                    .arg(&half)
                    .arg("-out")
                    .arg(&signing.certificate),
            )?;
            fs::rename(&half, &signing.key)?;
        }
        let pem = crate::progress::output(
            Command::new("openssl")
                .args(["x509", "-inform", "DER", "-in"])
                .arg(&signing.certificate),
        )?;
        let certs = self.at("build/certs");
        fs::create_dir_all(&certs)?;
        stamp::update(&certs.join("rig.pem"), format!("{pem}\n").as_bytes())?;
        Ok(())
    }

    fn log(&self) -> PathBuf {
        self.paths
            .cache
            .join("logs")
            .join(format!("kernel-{}.txt", self.flavour.name))
    }

    fn title(&self, what: &str) -> String {
        format!("kernel {}: {what}", self.flavour.name)
    }

    fn ours(&self, name: &str) -> PathBuf {
        self.paths.repo.join("tests/kernel").join(name)
    }

    /// Package and version of the unpacked source.
    fn source_name(&self) -> Option<String> {
        let text = fs::read_to_string(self.shared("source.name")).ok()?;
        Some(text.trim().to_owned()).filter(|name| !name.is_empty())
    }

    /// What it is made from but for our changes to the source.
    fn base_key(&self, source: &str) -> Result<Key> {
        let mut key = Key::default();
        key.text("source", source);
        key.text("tools", &self.toolchain.versions(self.flavour.compiler())?);
        key.text("make", &self.flavour.make.join(" "));
        for fragment in self.flavour.config() {
            key.path(&self.paths.repo, &self.ours("config").join(fragment))?;
        }
        Ok(key)
    }

    fn key(&self, source: &str) -> Result<String> {
        let mut key = self.base_key(source)?;
        for patch in self.patches()? {
            key.path(&self.paths.repo, &patch)?;
        }
        key.path(&self.paths.repo, &self.ours("overlay"))?;
        if self.flavour.is_stock() {
            key.path(&self.paths.repo, &self.paths.repo.join(stock::KBUILD))?;
        }
        Ok(key.finish())
    }

    /// Downloads and unpacks the source: the wanted series, or the newest other one that the patches fit.
    fn fetch(&self) -> Result<()> {
        let mut stage = Stage::begin(self.title("looking for its source in Debian's archive"));
        let suites = self.flavour.suites;
        let mut candidates = apt::search(self.paths, &mut stage, suites, self.flavour.package)?;
        candidates.retain(|candidate| candidate.package == self.flavour.package);
        let found = !candidates.is_empty();
        let instead = self.flavour.built().and_then(|built| built.instead);
        if let (false, Some(prefix)) = (found, instead) {
            candidates = apt::search(self.paths, &mut stage, suites, prefix)?;
        }
        let first = candidates.first().ok_or_else(|| {
            anyhow!(
                "{} is in no suite of Debian's archive",
                self.flavour.package
            )
        })?;
        stage.done(&format!("{} {}", first.package, first.version));
        if !found {
            eprintln!(
                "  {} has vanished from the archive; trying others",
                self.flavour.package
            );
        }
        let mut misfits = Vec::new();
        for candidate in &candidates {
            match self.try_source(candidate) {
                Ok(()) => return Ok(()),
                // The wanted series must fit: a change in it is ours to follow.
                Err(error) if found => return Err(error),
                Err(error) => misfits.push(format!(
                    "{} {}: {error:#}",
                    candidate.package, candidate.version
                )),
            }
        }
        bail!(
            "no kernel source in the archive fits:\n{}",
            misfits.join("\n")
        );
    }

    fn try_source(&self, candidate: &apt::Candidate) -> Result<()> {
        let download = self.shared("download");
        let _ = fs::remove_dir_all(&download);
        let mut stage = Stage::begin(self.title(&format!("downloading {}", candidate.package)));
        let package = apt::download(self.paths, &mut stage, candidate, &download)?;
        let size = fs::metadata(&package)?.len() >> 20;
        stage.done(&format!("{size} MiB"));

        let mut stage = Stage::begin(self.title("unpacking"));
        for stale in ["source", "pristine"] {
            let _ = fs::remove_dir_all(self.shared(stale));
        }
        // What was compiled may be younger than a source that is new here, and make goes by age.
        let kernels = self.paths.cache.join("kernel");
        for flavour in FLAVOURS
            .iter()
            .filter(|other| other.source() == self.flavour.source())
        {
            let _ = fs::remove_dir_all(kernels.join(flavour.name).join("build"));
            let _ = fs::remove_file(kernels.join(flavour.name).join("stamp.stock"));
        }
        apt::extract(&mut stage, &package, &download, &self.log())?;
        let archive = stamp::files(&download.join("usr/src"))?
            .into_iter()
            .find(|file| file.to_string_lossy().contains(".tar."))
            .ok_or_else(|| anyhow!("{} has no source archive", package.display()))?;
        let source = self.shared("source");
        fs::create_dir_all(&source)?;
        let files = stage.run(
            Command::new("tar")
                .arg("-xvf")
                .arg(&archive)
                .arg("-C")
                .arg(&source)
                .args(["--strip-components=1", "--no-same-owner"])
                .arg("--anchored")
                .args(
                    NOT_UNPACKED
                        .iter()
                        .chain(&self.flavour.arch.others())
                        .map(|pattern| format!("--exclude={}/{pattern}", candidate.package)),
                )
                .env("XZ_OPT", "-T0"),
            &self.log(),
            "files",
            |_| true,
        )?;
        stage.done(&format!("{files} files"));
        self.changed()?;
        let _ = fs::remove_dir_all(&download);
        stamp::set(
            &self.shared("source.name"),
            &format!("{} {}", candidate.package, candidate.version),
        )
    }

    /// Patches in the order of their series files.
    fn patches(&self) -> Result<Vec<PathBuf>> {
        let mut patches = Vec::new();
        for directory in self.flavour.patches {
            let directory = self.ours("patches").join(directory);
            let series = fs::read_to_string(directory.join("series"))
                .with_context(|| format!("{}/series", directory.display()))?;
            patches.extend(
                series
                    .lines()
                    .map(|line| line.split('#').next().unwrap_or_default().trim())
                    .filter(|line| !line.is_empty())
                    .map(|name| directory.join(name)),
            );
        }
        Ok(patches)
    }

    /// Keeps the pristine contents of a file before we change it for the first time.
    fn keep_pristine(&self, path: &str) -> Result<()> {
        let kept = self.shared("pristine").join(path);
        let absent = self.shared("pristine").join(format!("{path}.absent"));
        if kept.exists() || absent.exists() {
            return Ok(());
        }
        if let Some(parent) = kept.parent() {
            fs::create_dir_all(parent)?;
        }
        match fs::read(self.shared("source").join(path)) {
            Ok(contents) => stamp::replace(&kept, &contents),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                stamp::replace(&absent, b"")
            }
            Err(error) => Err(error).with_context(|| path.to_owned()),
        }
    }

    /// All files that we ever changed, pristine.
    fn pristine(&self) -> Result<Files> {
        let base = self.shared("pristine");
        let mut files = Files::new();
        for file in stamp::files(&base)? {
            let path = file.strip_prefix(&base)?.to_string_lossy().into_owned();
            match path.strip_suffix(".absent") {
                Some(path) => files.insert(path.to_owned(), None),
                None => files.insert(path, Some(fs::read(&file)?)),
            };
        }
        Ok(files)
    }

    /// All files that we change or ever changed, as they are to be.
    fn changed(&self) -> Result<Files> {
        let patches = self.patches()?;
        for patch in &patches {
            let text = fs::read(patch).with_context(|| patch.display().to_string())?;
            for path in patched_files(&String::from_utf8_lossy(&text)) {
                self.keep_pristine(&path)?;
            }
        }
        let overlay = self.ours("overlay");
        let overlaid = stamp::files(&overlay)?;
        for file in &overlaid {
            self.keep_pristine(&file.strip_prefix(&overlay)?.to_string_lossy())?;
        }

        let work = self.shared("patching");
        let _ = fs::remove_dir_all(&work);
        let pristine = self.pristine()?;
        for (path, contents) in &pristine {
            let target = work.join(path);
            if let Some(parent) = target.parent() {
                fs::create_dir_all(parent)?;
            }
            if let Some(contents) = contents {
                fs::write(&target, contents)?;
            }
        }
        for patch in &patches {
            // What patch allows by itself: a point release changes what stands around.
            patch::apply(&work, patch, 2)?;
        }
        for file in &overlaid {
            let target = work.join(file.strip_prefix(&overlay)?);
            fs::write(&target, fs::read(file)?)?;
        }
        let mut files = Files::new();
        for path in pristine.into_keys() {
            let contents = fs::read(work.join(&path)).ok();
            files.insert(path, contents);
        }
        let _ = fs::remove_dir_all(&work);
        Ok(files)
    }

    /// Writes files into the source tree, those alone that differ. Returns how many did.
    fn lay(&self, files: &Files) -> Result<usize> {
        let source = self.shared("source");
        let mut count = 0;
        for (path, contents) in files {
            let target = source.join(path);
            let differed = match contents {
                Some(contents) => stamp::update(&target, contents)?,
                None if target.exists() => {
                    fs::remove_file(&target)?;
                    true
                }
                None => false,
            };
            count += usize::from(differed);
        }
        Ok(count)
    }

    fn make(&self, arguments: &[&str]) -> Command {
        let mut command = self.toolchain.make();
        command
            .arg("-C")
            .arg(self.shared("source"))
            .arg(format!("O={}", self.at("build").display()))
            .args(self.flavour.make)
            .args(arguments);
        command
    }

    fn build(&self, source: &str, key: &str, stock: bool) -> Result<()> {
        let changed = self.changed()?;
        if stock {
            self.build_stock(source, &changed)?;
        }
        let count = self.lay(&changed)?;
        self.configure()?;
        self.compile(&format!("compiling ({count} files changed)"))?;
        collect_modules(&self.at("build"), &self.at("modules"))?;
        let (image, _) = self.flavour.arch.image();
        stamp::replace(&self.image(), &fs::read(self.at("build").join(image))?)?;
        stamp::set(&self.at("stamp"), key)
    }

    /// What we change but for RDMA, and the key of the stock modules, which depend on that.
    fn without_rdma(&self, source: &str, changed: &Files) -> Result<(Files, String)> {
        let pristine = self.pristine()?;
        let is_rdma = |path: &str| RDMA.iter().any(|prefix| path.starts_with(prefix));
        let mut without: Files = changed.clone();
        for (path, contents) in &mut without {
            if is_rdma(path) {
                *contents = pristine.get(path).cloned().flatten();
            }
        }
        let mut key = self.base_key(source)?;
        for (path, contents) in &without {
            if !is_rdma(path) {
                key.text("path", path);
                key.bytes("contents", contents.as_deref().unwrap_or_default());
            }
        }
        Ok((without, key.finish()))
    }

    fn stock_is_stale(&self, source: &str) -> Result<bool> {
        let (_, key) = self.without_rdma(source, &self.changed()?)?;
        Ok(!stamp::is_fresh(&self.at("stamp.stock"), &key))
    }

    /// The stock RDMA modules, from the same kernel, before the tree gets ours.
    fn build_stock(&self, source: &str, changed: &Files) -> Result<()> {
        let (without, key) = self.without_rdma(source, changed)?;
        if stamp::is_fresh(&self.at("stamp.stock"), &key) {
            return Ok(());
        }
        self.lay(&without)?;
        self.configure()?;
        self.compile("compiling with stock RDMA modules")?;
        collect_modules(&self.at("build/drivers/infiniband"), &self.at("stock"))?;
        stamp::set(&self.at("stamp.stock"), &key)
    }

    fn configure(&self) -> Result<()> {
        let build = self.at("build");
        fs::create_dir_all(&build)?;
        let mut wanted = String::new();
        for fragment in self.flavour.config() {
            let path = self.ours("config").join(fragment);
            wanted
                .push_str(&fs::read_to_string(&path).with_context(|| path.display().to_string())?);
        }
        let fragment = self.at("config");
        fs::write(&fragment, &wanted)?;
        let mut stage = Stage::begin(self.title("configuring"));
        stage.run(
            self.make(&["allnoconfig"])
                .env("KCONFIG_ALLCONFIG", &fragment),
            &self.log(),
            "",
            |_| false,
        )?;
        let result = fs::read_to_string(build.join(".config"))?;
        let lost = lost_options(&wanted, &result);
        if !lost.is_empty() {
            bail!(
                "the kernel's configuration did not take: {}",
                lost.join(", ")
            );
        }
        stage.done("");
        Ok(())
    }

    fn compile(&self, what: &str) -> Result<()> {
        self.lay_certificate()?;
        let mut stage = Stage::begin(self.title(what));
        // One more than there are processors: steps wait for files, too.
        let (_, target) = self.flavour.arch.image();
        let jobs = std::thread::available_parallelism().map_or(2, usize::from) + 1;
        let count = stage.run(
            &mut self.make(&[&format!("-j{jobs}"), target, "modules"]),
            &self.log(),
            "steps",
            |line| line.starts_with("  "),
        )?;
        stage.done(&format!("{count} steps"));
        Ok(())
    }
}

/// Files that a patch changes, makes or removes, by their names below the source tree.
fn patched_files(patch: &str) -> BTreeSet<String> {
    patch
        .lines()
        .filter_map(|line| {
            line.strip_prefix("+++ b/")
                .or_else(|| line.strip_prefix("--- a/"))
        })
        .filter_map(|name| name.split('\t').next())
        .map(|name| name.trim_end().to_owned())
        .collect()
}

/// Options of fragments that a configuration does not have as asked. Of several words on one option the last counts.
fn lost_options(wanted: &str, result: &str) -> Vec<String> {
    let set: BTreeSet<&str> = result
        .lines()
        .filter(|line| !line.starts_with('#'))
        .collect();
    let wanted: Vec<&str> = wanted
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .collect();
    let name = |line: &&str| line.split('=').next().map(str::to_owned);
    let mut lost = Vec::new();
    for (at, line) in wanted.iter().enumerate() {
        if wanted[at + 1..]
            .iter()
            .any(|later| name(later) == name(line))
        {
            continue;
        }
        let kept = match line.strip_suffix("=n") {
            Some(name) => {
                let prefix = format!("{name}=");
                !set.iter().any(|line| line.starts_with(&prefix))
            }
            None => set.contains(line),
        };
        if !kept {
            lost.push((*line).to_owned());
        }
    }
    lost
}

/// Copies all modules below one directory into another, flat. Others may have the old copies open.
fn collect_modules(from: &Path, to: &Path) -> Result<()> {
    let mut index = Index::default();
    index.add_tree(from)?;
    fs::create_dir_all(to)?;
    let mut names = BTreeSet::new();
    for file in index.files() {
        let name = file.file_name().context("a module without a name")?;
        stamp::replace(&to.join(name), &fs::read(file)?)?;
        names.insert(name.to_owned());
    }
    for entry in fs::read_dir(to)? {
        let entry = entry?;
        if !names.contains(&entry.file_name()) {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_that_were_not_kept_are_named() {
        let wanted = "# comment\nCONFIG_A=y\nCONFIG_B=m\nCONFIG_C=n\nCONFIG_D=n\nCONFIG_E=16000\n";
        let result = "CONFIG_A=y\n# CONFIG_B is not set\n# CONFIG_C is not set\nCONFIG_D=y\nCONFIG_E=16000\n";
        assert_eq!(lost_options(wanted, result), ["CONFIG_B=m", "CONFIG_D=n"]);
        let wanted = "CONFIG_B=m\nCONFIG_C=y\nCONFIG_B=n\nCONFIG_C=m\n";
        assert_eq!(lost_options(wanted, result), ["CONFIG_C=m"]);
    }

    #[test]
    fn what_flavours_are_made_of_is_there() {
        let ours = Path::new(env!("CARGO_MANIFEST_DIR")).join("../kernel");
        for flavour in FLAVOURS {
            for fragment in flavour.config() {
                assert!(ours.join("config").join(fragment).is_file());
            }
            for directory in flavour.patches {
                assert!(ours
                    .join("patches")
                    .join(directory)
                    .join("series")
                    .is_file());
            }
            assert!(FLAVOURS.iter().any(|other| other.name == flavour.source()));
        }
    }

    #[test]
    fn files_of_a_patch() {
        let patch = "text\n--- a/mm/x.c\t2026\n+++ b/mm/x.c\n@@ -1 +1 @@\n-a\n+b\n--- /dev/null\n+++ b/new.h\n\
            --- a/old.h\n+++ /dev/null\n";
        let files: Vec<String> = patched_files(patch).into_iter().collect();
        assert_eq!(files, ["mm/x.c", "new.h", "old.h"]);
    }
}
