// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Builds the kernel modules of this repository, and other modules that the tests need.

mod driver;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{bail, Context as _, Result};

pub(crate) use self::driver::control_source;
use self::driver::{upper_source, Driver, DRIVER, DRIVER_555};
use crate::arch::Arch;
use crate::command::tool;
use crate::index::undefined;
use crate::kernel::Kernel;
use crate::paths::Paths;
use crate::progress::{output, Stage};
use crate::stamp::Key;
use crate::toolchain::Toolchain;
use crate::vm::{Build, Named as _, Provider};
use crate::{patch, stamp};

/// A module that the test runner builds: its inputs, and the variables of make.
struct Recipe<'a> {
    /// Name of the directory of the products, also used in messages.
    name: &'a str,
    product: &'a str,
    /// Directory of the Kbuild file.
    source: PathBuf,
    /// All files and directories that the product depends on.
    inputs: Vec<PathBuf>,
    variables: Vec<String>,
    /// Patches. If there are any, a copy of the sources is patched and built.
    patches: &'a [PathBuf],
}

/// Headers that the overlay adds to all kernels of the test VM.
const OVERLAY: &str = "tests/kernel/overlay/include";

/// Root file of the module's Rust code.
const ROOT: &str = "src/nvidia_peermem.rs";

/// Returns the command that compiles the object of the Rust code below `root`, from the source in
/// `repo`.
fn script(repo: &Path, arch: &str, root: &str, object: &Path) -> std::process::Command {
    let mut command = tool(&repo.join("portable/object.sh").to_string_lossy());
    command
        .args([arch.as_ref(), object.as_os_str(), root.as_ref()])
        .env("RUSTC", "/usr/bin/rustc");
    command
}

const KUNIT: &str = "nvidia-peermem-kunit.ko";

/// Returns `true` if a line of make's output is a warning of objtool, modpost or a compiler.
/// Warnings of make itself are not counted. Neither is kbuild's warning that the compiler or
/// pahole differs from the kernel's, because stock kernels are built with other versions.
fn is_warning(line: &str) -> bool {
    let is_harmless = line.starts_with("make: ")
        || line.starts_with("make[")
        || line.ends_with(" differs from the one used to build the kernel");
    let signs = ["warning: ", "WARNING: ", "objtool: ", "objtool ["];
    !is_harmless && signs.iter().any(|sign| line.contains(sign))
}

pub(crate) struct Builder<'a> {
    paths: &'a Paths,
    toolchain: &'a Toolchain,
    kernel: &'a Kernel,
    /// Uses existing products without checking whether they are up to date.
    frozen: bool,
    build: Build,
    /// Builds our module for use beside a proprietary nvidia.ko.
    no_gpl_only: bool,
    provider: Provider,
}

impl<'a> Builder<'a> {
    pub(crate) fn new(
        paths: &'a Paths,
        toolchain: &'a Toolchain,
        kernel: &'a Kernel,
        frozen: bool,
    ) -> Self {
        Self {
            paths,
            toolchain,
            kernel,
            frozen,
            build: match kernel.has_rust {
                true => Build::InTree,
                false => Build::Portable,
            },
            no_gpl_only: false,
            provider: Provider::Nvidia,
        }
    }

    /// Selects the portable build of our module for use beside a proprietary nvidia.ko.
    pub(crate) fn without_gpl_only(self) -> Self {
        Self {
            build: Build::Portable,
            no_gpl_only: true,
            ..self
        }
    }

    /// Selects the nvidia.ko beside which the modules are loaded.
    pub(crate) fn beside(self, provider: Provider) -> Self {
        Self { provider, ..self }
    }

    /// Selects `build` for our module. `None` keeps the usual build of the kernel.
    pub(crate) fn with(self, build: Option<Build>) -> Result<Self> {
        let build = build.unwrap_or(self.build);
        if build == Build::InTree && !self.kernel.has_rust {
            bail!(
                "Linux {} was built without Rust, so only --build portable is possible",
                self.kernel.release
            );
        }
        // Before its first run, `runner test` builds our module for each kernel only in the
        // kernel's usual build. Any other build is made when a run needs it.
        let frozen = self.frozen && build == self.build;
        Ok(Self {
            build,
            frozen,
            ..self
        })
    }

    /// Returns a recipe. `inputs` are paths in the repository, and the first path is the source.
    fn recipe<'r>(&self, name: &'r str, product: &'r str, inputs: &[&str]) -> Recipe<'r> {
        let inputs: Vec<PathBuf> = inputs.iter().map(|path| self.repo(path)).collect();
        Recipe {
            name,
            product,
            source: inputs.first().cloned().unwrap_or_default(),
            inputs,
            variables: Vec::new(),
            patches: &[],
        }
    }

    /// Returns a builder for products that are built when a run needs them, and not at the start of
    /// a suite.
    fn late(&self) -> Self {
        Self {
            frozen: false,
            ..*self
        }
    }

    pub(crate) fn gpu(&self) -> Result<PathBuf> {
        let inputs = ["tests/gpu", "rust-bindings/include", OVERLAY];
        self.make(&self.recipe("gpu", "nvidia.ko", &inputs))
    }

    /// Builds the stand-in GPU's driver with NVIDIA's own nv-p2p.c as its upper half.
    pub(crate) fn gpu_with_upper(&self) -> Result<PathBuf> {
        self.gpu_with_upper_of("gpu-nvidia", &DRIVER)
    }

    /// Builds the stand-in GPU's driver with the nv-p2p.c of NVIDIA's driver 555 as its upper half.
    pub(crate) fn gpu_with_upper_555(&self) -> Result<PathBuf> {
        self.late().gpu_with_upper_of("gpu-nvidia-555", &DRIVER_555)
    }

    fn gpu_with_upper_of(&self, name: &str, driver: &Driver) -> Result<PathBuf> {
        let (upper, files, version) = upper_source(self.paths, driver)?;
        let mut recipe = self.recipe(name, "nvidia.ko", &["tests/gpu", OVERLAY]);
        recipe.inputs.extend(files);
        recipe.variables = vec![
            format!("NVIDIA_SOURCE={}", upper.display()),
            format!("NVIDIA_VERSION={version}"),
        ];
        self.make(&recipe)
    }

    /// Builds the module that makes calls of the kernel fail on request.
    pub(crate) fn interpose(&self) -> Result<PathBuf> {
        let mut recipe = self.recipe(
            "interpose",
            "test_interpose.ko",
            &["tests/interpose", OVERLAY],
        );
        if self.kernel.is_stock {
            let headers = self.kernel.source().join("include");
            recipe
                .variables
                .push(format!("RDMA_INCLUDE={}", headers.display()));
        }
        self.make(&recipe)
    }

    /// Builds the module that measures a peer-memory module.
    pub(crate) fn bench(&self) -> Result<PathBuf> {
        let symbols = self.gpu_symbols()?;
        let name = self.beside_neighbour("bench");
        let inputs = ["tests/bench", "tests/gpu/spent.h", "rust-bindings/include"];
        let mut recipe = self.recipe(&name, "test_bench.ko", &inputs);
        recipe
            .variables
            .push(format!("KBUILD_EXTRA_SYMBOLS={}", symbols.display()));
        recipe.inputs.push(symbols);
        self.make(&recipe)
    }

    /// Builds drivers that our module cannot work with, named by their defect, and modules of OFED,
    /// named by their version. On stock kernels, only a run of `make test-all` needs these modules.
    pub(crate) fn drivers(&self) -> Result<Vec<(&'static str, PathBuf)>> {
        [
            ("older", "nvidia.ko"),
            ("proprietary", "nvidia.ko"),
            ("nv_peer_mem", "nv_peer_mem.ko"),
            ("mlx_compat", "mlx_compat.ko"),
            ("ofed_24_10", "mlx5_core.ko"),
            ("ofed_25_04", "mlx5_core.ko"),
        ]
        .into_iter()
        .map(|(kind, product)| Ok((kind, self.late().driver(kind, product)?)))
        .collect()
    }

    pub(crate) fn other_client(&self) -> Result<PathBuf> {
        self.driver("other_client", "other_client.ko")
    }

    fn driver(&self, kind: &str, product: &str) -> Result<PathBuf> {
        let name = format!("driver-{kind}");
        let mut recipe = self.recipe(&name, product, &["tests/drivers", OVERLAY]);
        recipe.variables.push(format!("DRIVER={kind}"));
        self.make(&recipe)
    }

    pub(crate) fn ours(&self) -> Result<PathBuf> {
        let mut recipe = self.our_recipe();
        let name = self.beside_neighbour(match self.no_gpl_only {
            true => "ours-no-gpl-only",
            false => "ours-portable",
        });
        if self.build == Build::Portable {
            recipe.name = &name;
            self.link(&mut recipe)?;
        }
        self.make(&recipe)
    }

    /// Changes a recipe for our module so that the module links the object that serves all kernels.
    fn link(&self, recipe: &mut Recipe<'_>) -> Result<()> {
        let object = self.object(ROOT, self.kernel.arch)?;
        self.link_object(recipe, &object)
    }

    fn link_object(&self, recipe: &mut Recipe<'_>, object: &Path) -> Result<()> {
        recipe.inputs.push(object.to_owned());
        if self.kernel.has_symbol_versions {
            let symbols = self.gpu_symbols()?;
            recipe
                .variables
                .push(format!("NV_SYMVERS={}", symbols.display()));
            recipe.inputs.push(symbols);
        }
        // If a variable of make is set twice, the last value counts.
        recipe.variables.extend([
            "PEERMEM_BUILD=portable".to_owned(),
            format!("PEERMEM_OBJECT={}", object.display()),
            // Set explicitly, because the default depends on this machine's own driver.
            format!(
                "PEERMEM_NO_GPL_ONLY={}",
                if self.no_gpl_only { "1" } else { "" }
            ),
        ]);
        Ok(())
    }

    /// Builds the object of the Rust code whose root file is `root`. The object serves all kernels
    /// of `arch`.
    fn object(&self, root: &str, arch: Arch) -> Result<PathBuf> {
        let machine = arch.machine();
        let products = self.paths.cache.join("modules/object").join(machine);
        let name = Path::new(root).file_stem().unwrap_or_default();
        let object = products.join(name).with_extension("o");
        let stamp = object.with_extension("stamp");
        if self.frozen && object.exists() {
            return Ok(object);
        }
        let mut key = Key::default();
        key.text("tools", &self.toolchain.versions("gcc")?);
        let folder = root.split('/').next().unwrap_or(root);
        let inputs = ["portable", "src", "rust-bindings", folder];
        key.inputs(&self.paths.repo, &inputs)?;
        let key = key.finish();
        if object.exists() && stamp::is_fresh(&stamp, &key) {
            return Ok(object);
        }
        fs::create_dir_all(&products)?;
        let new = products.join("new.o");
        let title = name.to_string_lossy();
        let mut stage = Stage::begin(format!("module {title}.o ({machine}): compiling"));
        let mut script = script(&self.paths.repo, machine, root, &new);
        stage.lines(&mut script, &self.paths.cache.join("logs/modules.txt"))?;
        stamp::put(&new, &object)?;
        stamp::set(&stamp, &key)?;
        stage.done("");
        Ok(object)
    }

    /// Builds each object again from a copy of the source in another directory, with another
    /// locale, time zone and home. Fails unless both objects have the same bytes.
    pub(crate) fn object_is_reproducible(&self) -> Result<()> {
        let elsewhere = self.paths.cache.join("modules/object/elsewhere");
        let copy = elsewhere.join("a copy");
        let _ = fs::remove_dir_all(&copy);
        fs::create_dir_all(&copy)?;
        let folders = ["portable", "src", "rust-bindings"].map(|name| self.repo(name));
        let mut copying = std::process::Command::new("cp");
        output(copying.arg("-r").args(folders).arg(&copy))?;
        for arch in [Arch::X86_64, Arch::Arm64] {
            let object = self.object(ROOT, arch)?;
            let other = elsewhere.join(arch.machine()).join("object.o");
            let mut script = script(&copy, arch.machine(), ROOT, &other);
            script.env("LC_ALL", "C.UTF-8").env("TZ", "Asia/Kathmandu");
            output(script.env("HOME", "/nonexistent").env("TMPDIR", &copy))?;
            if fs::read(&object)? != fs::read(&other)? {
                bail!("{} and {} differ", object.display(), other.display());
            }
        }
        Ok(())
    }

    /// Builds our module with patches applied. The module's directory is named after the last
    /// patch.
    pub(crate) fn patched(&self, patches: &[PathBuf]) -> Result<PathBuf> {
        let name = patches.last().and_then(|patch| patch.file_stem());
        let name = name.context("no patch")?.to_string_lossy();
        let name = match self.build {
            Build::InTree => format!("mutant-{name}"),
            Build::Portable => format!("mutant-{name}-portable"),
        };
        let mut recipe = self.our_recipe();
        recipe.name = &name;
        recipe.inputs.extend_from_slice(patches);
        recipe.patches = patches;
        if self.build == Build::Portable {
            let copy = patch::patched(self.paths, patches)?;
            let object = self.paths.cache.join("mutants/object.o");
            output(&mut script(
                &copy,
                self.kernel.arch.machine(),
                ROOT,
                &object,
            ))?;
            self.link_object(&mut recipe, &object)?;
        }
        self.late().make(&recipe)
    }

    /// Builds our module's KUnit tests, with patches applied to the module.
    pub(crate) fn kunit(&self, patches: &[PathBuf]) -> Result<PathBuf> {
        let mut recipe = self.our_recipe();
        let name = patches.last().and_then(|patch| patch.file_stem());
        let name = name.map_or("kunit".to_owned(), |name| {
            format!("kunit-mutant-{}", name.to_string_lossy())
        });
        recipe.name = &name;
        recipe.patches = patches;
        recipe.product = KUNIT;
        recipe.inputs.push(self.repo("kunit"));
        recipe.inputs.extend_from_slice(patches);
        recipe.variables.push("PEERMEM_KUNIT=1".to_owned());
        if self.build == Build::Portable {
            recipe.name = "kunit-portable";
            self.link(&mut recipe)?;
            let object = self.object("kunit/peermem_kunit.rs", self.kernel.arch)?;
            let variable = format!("PEERMEM_KUNIT_OBJECT={}", object.display());
            recipe.inputs.push(object);
            recipe.variables.push(variable);
        }
        match patches {
            [] => self.make(&recipe),
            _ => self.late().make(&recipe),
        }
    }

    /// Builds the object that implements the kernel's services in a user process, for `cost.rs`.
    pub(crate) fn services(&self) -> Result<PathBuf> {
        let inputs = [
            "tests/cost/Kbuild",
            "tests/cost/cost.h",
            "tests/cost/services.c",
            "rust-bindings/include",
        ];
        self.late().make(&Recipe {
            source: self.repo("tests/cost"),
            ..self.recipe("cost", "services.o", &inputs)
        })
    }

    pub(crate) fn injected(&self) -> Result<PathBuf> {
        self.make(&self.recipe("injected", "injected.ko", &["tests/injected"]))
    }

    /// Builds all modules for this kernel. Builds the modules of `bench` and `drivers` only if the
    /// kernel has Rust.
    pub(crate) fn all(&self) -> Result<Vec<PathBuf>> {
        if !self.kernel.has_peer_memory {
            return Ok(vec![self.gpu()?, self.gpu_with_upper()?]);
        }
        let mut files = vec![
            self.gpu()?,
            self.gpu_with_upper()?,
            self.control()?,
            self.other_client()?,
            self.ours()?,
            self.interpose()?,
        ];
        if self.kernel.has_rust {
            files.push(self.bench()?);
            files.extend(self.drivers()?.into_iter().map(|(_, file)| file));
        }
        if self.kernel.is_stock {
            let builder = Builder { ..*self };
            files.push(builder.without_gpl_only().ours()?);
        }
        if self.build == Build::InTree {
            files.push(self.kunit(&[])?);
        }
        if self.kernel.detectors {
            files.push(self.injected()?);
            self.is_watched()?;
        }
        Ok(files)
    }

    /// Checks that the compiler added KASAN's checks to our module. A module without these checks
    /// loads too, but is not checked. In the portable build, only the C files have the checks.
    fn is_watched(&self) -> Result<()> {
        let object = match self.build {
            Build::InTree => "ours.build/src/nvidia_peermem.o".to_owned(),
            Build::Portable => {
                let name = self.beside_neighbour("ours-portable");
                format!("{name}.build/src/helpers.o")
            }
        };
        let object = self.kernel.products.join(object);
        let calls = undefined(&object)?;
        if !calls.iter().any(|name| name.starts_with("__asan_report_")) {
            bail!("{} has none of KASAN's checks", object.display());
        }
        Ok(())
    }

    /// Returns the functions of the kernel and of other modules that our module calls.
    pub(crate) fn calls(&self) -> Result<Vec<String>> {
        undefined(&self.ours()?)
    }

    /// Runs clippy on the Rust code of our module and of its KUnit tests.
    pub(crate) fn clippy(&self) -> Result<()> {
        let mut recipe = self.our_recipe();
        recipe.variables.push("PEERMEM_KUNIT=1".to_owned());
        // The directory is new, because kbuild prints warnings only when it compiles.
        let output = self.kernel.products.join("clippy.build");
        let _ = fs::remove_dir_all(&output);
        fs::create_dir_all(&output)?;
        recipe.inputs.push(self.repo("kunit"));
        let source = self.paths.for_kbuild(&recipe.source, &recipe.inputs)?;
        let result = self
            .kbuild(&recipe, &source, &output)
            .arg("CLIPPY=1")
            .stdin(std::process::Stdio::null())
            .output()
            .context("cannot start make")?;
        let said = String::from_utf8_lossy(&result.stderr).into_owned();
        if !result.status.success() || said.contains("warning: ") {
            bail!("{}", said.trim());
        }
        // The portable build has its own bindings, because it has no kernel to generate them from.
        let made = output.join("rust-bindings/generated.rs");
        let kept = self.repo("portable/generated.rs");
        if !fs::read_to_string(&kept)?.ends_with(&fs::read_to_string(&made)?) {
            bail!(
                "{} does not end with bindgen's output for rust-bindings/peermem.h: {}",
                kept.display(),
                made.display()
            );
        }
        Ok(())
    }

    fn our_recipe(&self) -> Recipe<'_> {
        Recipe {
            source: self.paths.repo.clone(),
            // Ignores headers that are installed on this machine, because they do not fit the VM's
            // kernel. The build gets no symbols of the driver, as beside a driver that DKMS built.
            variables: [
                "NV_P2P_INCLUDE=",
                "PEER_MEM_INCLUDE=",
                "PEERMEM_BUILD=in-tree",
            ]
            .map(str::to_owned)
            .to_vec(),
            ..self.recipe(
                "ours",
                "nvidia-peermem.ko",
                &["Kbuild", "portable", "src", "rust-bindings"],
            )
        }
    }

    fn kbuild(&self, recipe: &Recipe<'_>, source: &Path, output: &Path) -> std::process::Command {
        let mut command = self.toolchain.make();
        command
            .arg("-C")
            .arg(&self.kernel.build)
            .arg(format!("M={}", source.display()));
        if source != output {
            command.arg(format!("MO={}", output.display()));
        }
        command.args(self.kernel.make).args(&recipe.variables).arg(
            if recipe.product.ends_with(".o") {
                recipe.product
            } else {
                "modules"
            },
        );
        command
    }

    /// Builds NVIDIA's own nvidia-peermem, unchanged, with our Kbuild.
    pub(crate) fn control(&self) -> Result<PathBuf> {
        let (files, version) = control_source(self.paths)?;
        let symbols = self.gpu_symbols()?;
        let name = self.beside_neighbour("nvidia");
        let source = self.kernel.products.join(format!("{name}.source"));
        let mut inputs = vec![symbols.clone()];
        let own = stamp::files(&self.repo("tests/control"))?;
        for file in own.iter().chain(&files) {
            let target = source.join(file.file_name().context("a file without a name")?);
            stamp::put(file, &target)?;
            inputs.push(target);
        }
        self.make(&Recipe {
            name: &name,
            product: "nvidia-peermem.ko",
            inputs,
            source,
            variables: vec![
                format!("CONTROL_VERSION={version}"),
                format!("KBUILD_EXTRA_SYMBOLS={}", symbols.display()),
            ],
            patches: &[],
        })
    }

    fn repo(&self, path: &str) -> PathBuf {
        self.paths.repo.join(path)
    }

    /// Returns the nvidia.ko whose symbols modules are linked with. Only a kernel with symbol
    /// versions needs separate modules for each nvidia.ko.
    fn neighbour(&self) -> Provider {
        match self.kernel.has_symbol_versions {
            true => self.provider,
            false => Provider::Ours,
        }
    }

    /// Returns the name for a module's products. The name contains the nvidia.ko if the module
    /// depends on it.
    fn beside_neighbour(&self, name: &str) -> String {
        match self.neighbour() {
            Provider::Ours => name.to_owned(),
            other => format!("{name}-on-{}", other.name()),
        }
    }

    fn gpu_symbols(&self) -> Result<PathBuf> {
        let name = match self.neighbour() {
            Provider::Ours => self.gpu().map(|_| "gpu.build"),
            Provider::Nvidia => self.gpu_with_upper().map(|_| "gpu-nvidia.build"),
            Provider::Nvidia555 => self.gpu_with_upper_555().map(|_| "gpu-nvidia-555.build"),
        };
        let output = self.kernel.products.join(name?);
        Ok(match self.kernel.separates_output {
            true => output.join("Module.symvers"),
            false => output.join("tests/gpu/Module.symvers"),
        })
    }

    fn make(&self, recipe: &Recipe<'_>) -> Result<PathBuf> {
        let product = self.kernel.products.join(recipe.name).join(recipe.product);
        if self.frozen && product.exists() {
            return Ok(product);
        }
        let stamp = self.kernel.products.join(format!("{}.stamp", recipe.name));
        let mut key = Key::default();
        key.text("kernel", &self.kernel.key);
        key.text("variables", &recipe.variables.join(" "));
        for input in &recipe.inputs {
            key.path(&self.paths.repo, input)?;
        }
        let key = key.finish();
        if product.exists() && stamp::is_fresh(&stamp, &key) {
            return Ok(product);
        }
        // All mutants are built in one directory, because most compiled files are the same for all
        // mutants.
        let (mut source, output) = if recipe.patches.is_empty() {
            let source = self.paths.for_kbuild(&recipe.source, &recipe.inputs)?;
            (source, format!("{}.build", recipe.name))
        } else {
            let copy = patch::patched(self.paths, recipe.patches)?;
            let output = match self.build {
                Build::InTree if recipe.product == KUNIT => "mutants-kunit.build",
                Build::InTree => "mutants.build",
                Build::Portable => "mutants-portable.build",
            };
            (copy, output.to_owned())
        };
        let mut output = self.kernel.products.join(output);
        if !self.kernel.separates_output {
            source = self.paths.copy(&recipe.source, &recipe.inputs, &output)?;
            output = source.clone();
        }
        fs::create_dir_all(&output)?;
        let mut stage = Stage::begin(format!(
            "module {} ({}): compiling",
            recipe.product, recipe.name
        ));
        let log = self.paths.cache.join("logs/modules.txt");
        let mut warnings = Vec::new();
        // A module with patches may warn, because removed code leaves unused names. Modules that
        // only the tests load may warn, too.
        let is_ours = recipe.source == self.paths.repo && recipe.patches.is_empty();
        let built = stage.run(
            &mut self.kbuild(recipe, &source, &output),
            &log,
            "steps",
            |line| {
                warnings.extend((is_ours && is_warning(line)).then(|| line.to_owned()));
                line.starts_with("  ")
            },
        );
        if !warnings.is_empty() {
            // kbuild prints a warning only when it compiles, so the next build starts afresh.
            fs::remove_dir_all(&output)?;
        }
        built?;
        if !warnings.is_empty() {
            bail!(
                "{} ({}) for {}: the build must not warn; all output: {}\n{}",
                recipe.product,
                recipe.name,
                self.kernel.release,
                log.display(),
                warnings.join("\n")
            );
        }
        stamp::put(&output.join(recipe.product), &product)?;
        stamp::set(&stamp, &key)?;
        stage.done("");
        Ok(product)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warnings_of_a_build() {
        for line in [
            // objtool up to 6.14, and later.
            "src/x.o: warning: objtool: f()+0x1c: unreachable instruction",
            "vmlinux.o: warning: objtool: .text+0x3f: missing __fentry__",
            "warning: objtool [elf.c:91]: elf_open_read: fopen failed: No such file",
            "objtool: Can't open 'src/x.o': No such file or directory",
            "src/x.c:4:5: warning: no previous prototype for ‘f’ [-Wmissing-prototypes]",
            "warning: unused import: `sync`",
            "WARNING: modpost: x: section mismatch in reference: f+0x4 (section: .text) -> g",
            "WARNING: Module.symvers is missing.",
            "ld: warning: src/x.o: missing .note.GNU-stack section implies executable stack",
        ] {
            assert!(is_warning(line), "{line}");
        }
        for line in [
            "  CC [M]  src/warning.o",
            "  DESCEND objtool",
            "warning: the compiler differs from the one used to build the kernel",
            "warning: pahole version differs from the one used to build the kernel",
            "Skipping BTF generation for x.ko due to unavailability of vmlinux",
            "make[3]: warning:  Clock skew detected.  Your build may be incomplete.",
        ] {
            assert!(!is_warning(line), "{line}");
        }
    }
}
