// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Debian's own kernels: image, headers and source of one version, and the RDMA modules compiled
//! outside the source tree.
//!
//! Nothing is installed. The packages are unpacked in the cache, and the only absolute path in the
//! headers is changed to their new place.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{symlink, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{anyhow, bail, Context as _, Result};

use super::tree::{collect_modules, Tree, STOCK_KBUILD};
use crate::index::{self, Index};
use crate::progress::{output, Stage};
use crate::stamp::Key;
use crate::{apt, guest, stamp, toolchain};

/// Folders of the source that the RDMA modules are compiled from.
const SOURCE: &[&str] = &[
    "drivers/infiniband/core",
    "drivers/infiniband/sw/rxe",
    "include/rdma",
    "include/uapi/rdma",
];

/// Modules of the image that the VM's RDMA devices need, and the checksum modules that rxe needs.
const RDMA: &[&str] = &[
    "ib_umad",
    "ib_uverbs",
    "rdma_ucm",
    "rdma_rxe",
    "crc32_generic",
    "crc32_pclmul",
];

/// Returns the modules of the image that the VM may load.
fn wanted() -> Vec<&'static str> {
    let mut names = [guest::EARLY, guest::DEVICES, RDMA].concat();
    names.sort_unstable();
    names
}

/// Returns the kernel release in the name of an image package. `variant` is the last part of the
/// release, such as `amd64` or `rt-amd64`. Returns `None` for images of other variants.
pub(crate) fn release_in<'a>(package: &'a str, series: &str, variant: &str) -> Option<&'a str> {
    let release = package.strip_prefix("linux-image-")?;
    let number = release.strip_suffix(variant)?.strip_suffix('-')?;
    let rest = number.strip_prefix(series)?;
    let plain = rest.starts_with('.') && !["-cloud", "-rt"].iter().any(|kind| rest.ends_with(kind));
    plain.then_some(release)
}

impl Tree<'_> {
    fn series(&self) -> &'static str {
        let package = self.flavour.package;
        package.strip_prefix("linux-source-").unwrap_or(package)
    }

    /// Returns a hash of the list of the image's modules.
    fn image_key(&self) -> String {
        let mut key = Key::default();
        key.text("modules", &wanted().join(" "));
        key.finish()
    }

    /// Returns `true` if the image and the headers that match the unpacked source are there.
    pub(super) fn has_stock_image(&self) -> bool {
        stamp::is_fresh(&self.at("image.stamp"), &self.image_key())
    }

    /// Downloads and unpacks the newest version for which the archive has all packages.
    pub(super) fn fetch_stock(&self) -> Result<()> {
        let mut stage = Stage::begin(self.title("looking for its packages in Debian's archive"));
        let (series, suites) = (self.series(), self.flavour.suites);
        let arch = self.flavour.arch;
        let (realtime, variant) = if self.flavour.realtime {
            ("-rt", format!("rt-{}", arch.debian()))
        } else {
            ("", arch.debian().to_owned())
        };
        if arch.foreign().is_some() {
            apt::install(self.paths, apt::FOREIGN)?;
        }
        let of_arch = apt::suites_for(suites, arch.foreign());
        let of_arch: Vec<&str> = of_arch.iter().map(String::as_str).collect();
        let mut find =
            |suites: &[&str], prefix: &str| apt::search(self.paths, &mut stage, suites, prefix);
        let mut sources = find(suites, self.flavour.package)?;
        sources.retain(|source| source.package == self.flavour.package);
        let images = find(&of_arch, &format!("linux-image-{series}"))?;
        // The programs of linux-kbuild run on this machine, whatever the kernel's architecture is.
        let programs = find(suites, &format!("linux-kbuild-{series}"))?;
        let found = sources.iter().find_map(|source| {
            let of_source = |package: &&apt::Candidate| package.version == source.version;
            let release = images
                .iter()
                .filter(of_source)
                .find_map(|image| release_in(&image.package, series, &variant))?;
            let kbuild = programs.iter().find(of_source)?;
            Some((&source.version, release, &kbuild.package))
        });
        let (version, release, kbuild) = found.ok_or_else(|| {
            anyhow!(
                "Debian's {} has no version of Linux {series} with image, headers and source",
                suites.join(" and ")
            )
        })?;
        stage.done(&format!("{release}, {version}"));

        let number = release.strip_suffix(&variant).unwrap_or(release);
        let of_version = |package: String| format!("{package}={version}");
        let packages = [
            self.flavour.package.to_owned(),
            format!("linux-headers-{number}common{realtime}"),
            kbuild.clone(),
        ]
        .map(of_version);
        let packages_of_arch = [
            format!("linux-image-{release}"),
            format!("linux-headers-{release}"),
        ]
        .map(of_version);
        let packages = packages.each_ref().map(String::as_str);
        let packages_of_arch = packages_of_arch.each_ref().map(String::as_str);
        for stale in "root libraries source pristine stock modules build".split(' ') {
            let _ = fs::remove_dir_all(self.at(stale));
        }
        let _ = fs::remove_file(self.at("build"));
        let _ = fs::remove_file(self.at("source.name"));
        let mut stage = Stage::begin(self.title("downloading its packages"));
        let root = self.at("root");
        apt::unpack(self.paths, &mut stage, suites, &packages, &root)?;
        apt::unpack(self.paths, &mut stage, &of_arch, &packages_of_arch, &root)?;
        // The headers' programs may need a newer C library than this machine has.
        apt::unpack(
            self.paths,
            &mut stage,
            suites,
            &["libc6"],
            &self.at("libraries"),
        )?;
        stage.done("");

        let mut stage = Stage::begin(self.title("unpacking"));
        self.unpack_source(&mut stage)?;
        self.unpack_image(release)?;
        self.place_headers(release)?;
        stage.done(release);
        self.changed()?;
        stamp::set(&self.at("image.stamp"), &self.image_key())?;
        stamp::set(
            &self.at("source.name"),
            &format!("{} {version}", self.flavour.package),
        )
    }

    fn unpack_source(&self, stage: &mut Stage) -> Result<()> {
        let source = self.at("source");
        fs::create_dir_all(&source)?;
        let package = self.flavour.package;
        let archive = self.at("root/usr/src").join(format!("{package}.tar.xz"));
        stage.quietly(
            Command::new("tar")
                .arg("-xf")
                .arg(&archive)
                .arg("-C")
                .arg(&source)
                .args(["--strip-components=1", "--no-same-owner"])
                .args(SOURCE.iter().map(|folder| format!("{package}/{folder}")))
                .env("XZ_OPT", "-T0"),
            &self.log(),
        )?;
        // The kernel includes cm_trace.h by a path that begins in include/trace, so this folder
        // must exist.
        fs::create_dir_all(source.join("include/trace"))?;
        fs::remove_file(&archive)?;
        Ok(())
    }

    /// Copies the image and the needed modules. The modules are uncompressed, because busybox loads
    /// no compressed ones.
    fn unpack_image(&self, release: &str) -> Result<()> {
        let root = self.at("root");
        let image = root.join("boot").join(format!("vmlinuz-{release}"));
        stamp::put(&image, &self.image())?;
        let tree = ["usr/lib/modules", "lib/modules"]
            .map(|folder| root.join(folder))
            .into_iter()
            .find(|folder| folder.is_dir())
            .context("the kernel's package has no modules")?;
        let files = stamp::files(&tree.join(release).join("kernel"))?;
        let stock = self.at("stock");
        let mut wanted: Vec<String> = wanted().iter().map(|name| (*name).to_owned()).collect();
        let mut seen = BTreeSet::new();
        while let Some(name) = wanted.pop() {
            if !seen.insert(name.clone()) {
                continue;
            }
            let is_it = |file: &&PathBuf| index::name_of(&without_compression(file)) == name;
            // A module without a file is built into the image, or is missing. The VM reports a
            // missing module.
            let Some(file) = files.iter().find(is_it) else {
                continue;
            };
            let plain = stock.join(format!("{name}.ko"));
            stamp::replace(&plain, &uncompressed(file)?)?;
            let depends = index::info(&plain, "depends")?;
            wanted.extend(
                depends
                    .split(',')
                    .filter(|name| !name.is_empty())
                    .map(|name| name.replace('-', "_")),
            );
        }
        fs::remove_dir_all(&tree)?;
        fs::remove_dir_all(root.join("boot"))?;
        Ok(())
    }

    /// Makes the headers usable in the cache, with programs that run on this machine.
    fn place_headers(&self, release: &str) -> Result<()> {
        let root = self.at("root");
        let sources = root.join("usr/src");
        let headers = sources.join(format!("linux-headers-{release}"));
        let makefile = headers.join("Makefile");
        let text = fs::read_to_string(&makefile)
            .with_context(|| format!("cannot read {}", makefile.display()))?;
        let placed = text.replace(" /usr/src/", &format!(" {}/", sources.display()));
        if placed == text {
            bail!(
                "{} includes no file of /usr/src: {text}",
                makefile.display()
            );
        }
        stamp::replace(&makefile, placed.as_bytes())?;
        fs::copy(headers.join("Module.symvers"), self.at("symbols"))?;
        let libraries = self.at("libraries/lib/x86_64-linux-gnu");
        let libraries = if libraries.is_dir() {
            libraries
        } else {
            self.at("libraries/usr/lib/x86_64-linux-gnu")
        };
        for file in stamp::files(&root.join("usr/lib"))? {
            let bytes = fs::read(&file)?;
            if bytes.starts_with(b"\x7fELF") && is_too_new(&file)? {
                let program = file.with_extension("own");
                stamp::replace(&program, &bytes)?;
                fs::set_permissions(&program, fs::Permissions::from_mode(0o755))?;
                stamp::replace(&file, toolchain::loaded_by(&libraries, &program).as_bytes())?;
                fs::set_permissions(&file, fs::Permissions::from_mode(0o755))?;
            }
        }
        symlink(&headers, self.at("build"))?;
        Ok(())
    }

    /// Compiles the RDMA modules with our changes, and adds their exports to the headers.
    pub(super) fn build_on_stock(&self, key: &str) -> Result<()> {
        let source = self.at("source");
        let count = self.lay(&self.changed()?)?;
        let kbuild = fs::read(self.paths.repo.join(STOCK_KBUILD))?;
        stamp::update(&source.join("Kbuild"), &kbuild)?;
        let symbols = self.at("build/Module.symvers");
        let of_image = fs::read_to_string(self.at("symbols"))?;
        // Resets the exports to those of the image. kbuild would otherwise take earlier exports of
        // our RDMA modules for exports of the image.
        stamp::update(&symbols, of_image.as_bytes())?;
        let title = format!("compiling its RDMA modules ({count} files changed)");
        let mut stage = Stage::begin(self.title(&title));
        let at = source.display();
        let jobs = std::thread::available_parallelism().map_or(2, usize::from) + 1;
        let mut make = self.toolchain.make();
        make.arg("-C")
            .arg(self.at("build"))
            .args(self.flavour.make)
            .arg(format!("M={at}"))
            .arg(format!("-j{jobs}"))
            .arg("modules");
        let steps = stage.steps(&mut make, &self.log())?;
        collect_modules(&source, &self.at("modules"))?;
        let mut rest = Index::default();
        rest.add_tree(&self.at("modules"))?;
        let mut of_image_files = Index::default();
        of_image_files.add_tree(&self.at("stock"))?;
        for file in of_image_files.files() {
            if !rest.contains(&index::name_of(file)) {
                let name = file.file_name().context("a module without a name")?;
                stamp::put(file, &self.at("modules").join(name))?;
            }
        }
        let ours = fs::read_to_string(source.join("Module.symvers"))?;
        stamp::update(&symbols, merged(&of_image, &ours).as_bytes())?;
        stamp::set(&self.at("stamp"), key)?;
        stage.done(&format!("{steps} steps"));
        Ok(())
    }
}

fn without_compression(file: &Path) -> PathBuf {
    match file.extension().and_then(|suffix| suffix.to_str()) {
        Some("xz" | "zst" | "gz") => file.with_extension(""),
        _ => file.to_path_buf(),
    }
}

pub(crate) fn uncompressed(file: &Path) -> Result<Vec<u8>> {
    let program = match file.extension().and_then(|suffix| suffix.to_str()) {
        Some("xz") => "xz",
        Some("ko") => return fs::read(file).with_context(|| file.display().to_string()),
        _ => bail!("{} has an unknown compression format", file.display()),
    };
    let unpacked = Command::new(program).arg("-dc").arg(file).output()?;
    if !unpacked.status.success() {
        bail!("cannot unpack {}", file.display());
    }
    Ok(unpacked.stdout)
}

/// Returns `true` if a program needs a newer C library than this machine's.
fn is_too_new(program: &Path) -> Result<bool> {
    let needs = output(Command::new("objdump").arg("-T").arg(program))?;
    let library = output(Command::new("ldd").arg("--version"))?;
    let own = library
        .lines()
        .next()
        .and_then(|line| line.split(' ').next_back());
    let own = own
        .and_then(version)
        .context("ldd prints no version of this machine's C library")?;
    let newest = needs
        .lines()
        .filter_map(|line| version(line.split("GLIBC_").nth(1)?.split(')').next()?))
        .max();
    Ok(newest.is_some_and(|newest| newest > own))
}

/// Parses two numbers separated by a dot, and ignores the rest.
fn version(text: &str) -> Option<(u32, u32)> {
    let mut numbers = text.split(|letter: char| !letter.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

/// Returns one table of exported symbols. Symbols of modules built here replace the image's symbols
/// of the same names.
fn merged(of_image: &str, ours: &str) -> String {
    let symbol = |line: &'_ str| line.split('\t').nth(1).map(str::to_owned);
    let replaced: BTreeSet<String> = ours.lines().filter_map(symbol).collect();
    let kept = of_image
        .lines()
        .filter(|line| symbol(line).is_none_or(|name| !replaced.contains(&name)));
    kept.chain(ours.lines())
        .map(|line| format!("{line}\n"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_image_of_a_series_and_variant() {
        for (release, series, variant, is_it) in [
            ("6.1.0-50-amd64", "6.1", "amd64", true),
            ("6.1.0-50-cloud-amd64", "6.1", "amd64", false),
            ("6.1.0-50-rt-amd64", "6.1", "amd64", false),
            ("6.1.0-50-amd64-unsigned", "6.1", "amd64", false),
            ("6.1.0-50-amd64-dbg", "6.1", "amd64", false),
            ("6.12.9-amd64", "6.1", "amd64", false),
            ("6.1-amd64", "6.1", "amd64", false),
            ("6.12.9+deb13-arm64", "6.12", "arm64", true),
            ("6.12.9+deb13-arm64-16k", "6.12", "arm64", false),
            ("6.12.9+deb13-rt-amd64", "6.12", "rt-amd64", true),
            ("6.12.9+deb13-amd64", "6.12", "rt-amd64", false),
        ] {
            let package = format!("linux-image-{release}");
            let found = release_in(&package, series, variant);
            assert_eq!(found, is_it.then_some(release), "{package}, {variant}");
        }
    }

    #[test]
    fn exported_symbols_of_rebuilt_modules_replace_the_images() {
        let of_image =
            "0x1\tprintk\tvmlinux\tEXPORT_SYMBOL\t\n0x2\tib_x\tdrivers/ib_core\tEXPORT_SYMBOL\t\n";
        let ours =
            "0x3\tib_x\t/c/ib_core\tEXPORT_SYMBOL\t\n0x4\tib_y\t/c/ib_core\tEXPORT_SYMBOL\t\n";
        let first = of_image.lines().next().unwrap();
        assert_eq!(merged(of_image, ours), format!("{first}\n{ours}"));
    }

    #[test]
    fn versions_of_the_c_library() {
        assert_eq!(version("2.36"), Some((2, 36)));
        assert_eq!(version("2.2.5"), Some((2, 2)));
        assert!(version("2.38") > version("2.4"));
        assert_eq!(version("PRIVATE"), None);
    }
}
