// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! A kernel's source tree and build tree in the cache.
//!
//! The source is unpacked once and kept. Our changes (patches, and files of the overlay) are
//! written only to files whose contents differ. If a patch changes, make therefore recompiles only
//! the files that the patch affects. Flavours that differ only in configuration and compiler share
//! a source tree. Each flavour has its own output directory.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{anyhow, bail, Context as _, Result};

use super::finished::Signing;
use super::table::{all, Flavour, SIGNED};
use crate::index::Index;
use crate::paths::Paths;
use crate::progress::{output, Stage};
use crate::stamp::Key;
use crate::toolchain::Toolchain;
use crate::{apt, patch, stamp};

/// The makefile that compiles the RDMA modules outside the kernel's tree.
pub(super) const STOCK_KBUILD: &str = "tests/debian/ofed/Kbuild";

/// Parts of the source that no kernel of the test VM compiles. These parts are two thirds of the
/// source. Files for Kconfig and make stay.
const NOT_UNPACKED: &str = "Documentation/*.rst Documentation/devicetree/*.yaml drivers/gpu/drm/*/*.[ch] drivers/media/*.[ch] \
    drivers/net/ethernet/*.[ch] drivers/net/wireless/*.[ch] drivers/scsi/*/*.[ch] drivers/staging/*.[ch] sound/*.[ch] \
    tools/perf/* tools/testing/selftests/*";

/// Paths of the RDMA files, which stay pristine while the stock modules are built.
const RDMA: &[&str] = &["drivers/infiniband/", "include/rdma/", "include/uapi/rdma/"];

/// A flavour's directory in the cache, and the directory of its source.
pub(super) struct Tree<'a> {
    pub(super) paths: &'a Paths,
    pub(super) flavour: &'static Flavour,
    pub(super) directory: PathBuf,
    pub(super) home: PathBuf,
    pub(super) toolchain: &'a Toolchain,
}

/// Contents of the files that we change, by path. `None` stands for a file that must not exist.
type Files = BTreeMap<String, Option<Vec<u8>>>;

impl Tree<'_> {
    pub(super) fn at(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    /// Returns the image that QEMU boots. The image is a copy, because another program may have the
    /// build tree's image open.
    pub(super) fn image(&self) -> PathBuf {
        if self.flavour.is_stock() {
            return self.at("vmlinuz");
        }
        let (image, _) = self.flavour.arch.image();
        self.at(image.rsplit('/').next().unwrap_or(image))
    }

    /// Returns a path in the directory of the source, which several flavours may share.
    fn shared(&self, name: &str) -> PathBuf {
        self.home.join(name)
    }

    pub(super) fn signing(&self) -> Option<Signing> {
        self.flavour.config.contains(&SIGNED).then(|| Signing {
            key: self.at("signing/rig.key"),
            certificate: self.at("signing/rig.der"),
            sign_file: self.at("build/scripts/sign-file"),
        })
    }

    /// Makes the signing key if it is missing. Puts the key's certificate where the configuration
    /// expects it.
    fn lay_certificate(&self) -> Result<()> {
        let Some(signing) = self.signing() else {
            return Ok(());
        };
        if !signing.key.exists() {
            let _ = fs::remove_file(&signing.certificate);
            fs::create_dir_all(self.at("signing"))?;
            // Makes the key like `dkms generate_mok`. The name is temporary until both files exist.
            let half = self.at("signing/new.key");
            output(
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
        let pem = output(
            Command::new("openssl")
                .args(["x509", "-inform", "DER", "-in"])
                .arg(&signing.certificate),
        )?;
        let file = self.at("build/certs/rig.pem");
        stamp::update(&file, format!("{pem}\n").as_bytes()).map(drop)
    }

    pub(super) fn log(&self) -> PathBuf {
        self.paths
            .cache
            .join("logs")
            .join(format!("kernel-{}.txt", self.flavour.name))
    }

    pub(super) fn title(&self, what: &str) -> String {
        format!("kernel {}: {what}", self.flavour.name)
    }

    fn ours(&self, name: &str) -> PathBuf {
        self.paths.repo.join("tests/kernel").join(name)
    }

    /// Returns the package and version of the unpacked source.
    pub(super) fn source_name(&self) -> Option<String> {
        let text = fs::read_to_string(self.shared("source.name")).ok()?;
        Some(text.trim().to_owned()).filter(|name| !name.is_empty())
    }

    /// Returns a hash of everything that the kernel is made from, except our changes to the source.
    fn base_key(&self, source: &str) -> Result<Key> {
        let mut key = Key::default();
        key.text("source", source);
        key.text("tools", &self.toolchain.versions(self.flavour.compiler)?);
        key.text("make", &self.flavour.make.join(" "));
        for fragment in self.flavour.config {
            key.path(&self.paths.repo, &self.ours("config").join(fragment))?;
        }
        Ok(key)
    }

    pub(super) fn key(&self, source: &str) -> Result<String> {
        let mut key = self.base_key(source)?;
        for patch in self.patches()? {
            key.path(&self.paths.repo, &patch)?;
        }
        key.path(&self.paths.repo, &self.ours("overlay"))?;
        if self.flavour.is_stock() {
            key.path(&self.paths.repo, &self.paths.repo.join(STOCK_KBUILD))?;
        }
        Ok(key.finish())
    }

    /// Downloads and unpacks the source: the wanted series, or else the newest other series that
    /// the patches fit.
    pub(super) fn fetch(&self) -> Result<()> {
        let mut stage = Stage::begin(self.title("looking for its source in Debian's archive"));
        let suites = self.flavour.suites;
        let mut candidates = apt::search(self.paths, &mut stage, suites, self.flavour.package)?;
        candidates.retain(|candidate| candidate.package == self.flavour.package);
        let found = !candidates.is_empty();
        let instead = self.flavour.instead;
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
                // If the wanted series was found, its patches must fit. If they do not, the patches
                // must be updated.
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
        // Removes the build trees. make compares times, and old object files may be newer than the
        // files of the new source.
        let kernels = self.paths.cache.join("kernel");
        for flavour in all().filter(|other| other.source() == self.flavour.source()) {
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
        let files = stage.lines(
            Command::new("tar")
                .arg("-xvf")
                .arg(&archive)
                .arg("-C")
                .arg(&source)
                .args(["--strip-components=1", "--no-same-owner"])
                .arg("--anchored")
                .args(
                    NOT_UNPACKED
                        .split(' ')
                        .chain(self.flavour.arch.others())
                        .map(|pattern| format!("--exclude={}/{pattern}", candidate.package)),
                )
                .env("XZ_OPT", "-T0"),
            &self.log(),
        )?;
        stage.done(&format!("{files} files"));
        self.changed()?;
        let _ = fs::remove_dir_all(&download);
        stamp::set(
            &self.shared("source.name"),
            &format!("{} {}", candidate.package, candidate.version),
        )
    }

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

    /// Saves the pristine contents of a file before its first change.
    fn keep_pristine(&self, path: &str) -> Result<()> {
        let kept = self.shared("pristine").join(path);
        let absent = self.shared("pristine").join(format!("{path}.absent"));
        if kept.exists() || absent.exists() {
            return Ok(());
        }
        match fs::read(self.shared("source").join(path)) {
            Ok(contents) => stamp::replace(&kept, &contents),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                stamp::replace(&absent, b"")
            }
            Err(error) => Err(error).with_context(|| path.to_owned()),
        }
    }

    /// Returns the pristine contents of every file that this call or an earlier one has saved.
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

    /// Returns the wanted contents of every file that our patches or overlay change, or changed in
    /// an earlier call.
    pub(super) fn changed(&self) -> Result<Files> {
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
            fs::create_dir_all(target.parent().unwrap_or(&work))?;
            if let Some(contents) = contents {
                fs::write(&target, contents)?;
            }
        }
        // A kernel's patches may change files of the overlay.
        for file in &overlaid {
            let target = work.join(file.strip_prefix(&overlay)?);
            fs::write(&target, fs::read(file)?)?;
        }
        for patch in &patches {
            // Uses the default fuzz of patch(1), because a point release may change lines around a
            // patch.
            patch::apply(&work, patch, 2)?;
        }
        let mut files = Files::new();
        for path in pristine.into_keys() {
            let contents = fs::read(work.join(&path)).ok();
            files.insert(path, contents);
        }
        let _ = fs::remove_dir_all(&work);
        Ok(files)
    }

    /// Writes files into the source tree if their contents differ. Returns the number of files that
    /// differed.
    pub(super) fn lay(&self, files: &Files) -> Result<usize> {
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

    pub(super) fn build(&self, source: &str, key: &str, stock: bool) -> Result<()> {
        let changed = self.changed()?;
        if stock {
            self.build_stock(source, &changed)?;
        }
        let count = self.lay(&changed)?;
        self.configure()?;
        self.compile(&format!("compiling ({count} files changed)"))?;
        collect_modules(&self.at("build"), &self.at("modules"))?;
        let (image, _) = self.flavour.arch.image();
        stamp::put(&self.at("build").join(image), &self.image())?;
        stamp::set(&self.at("stamp"), key)
    }

    /// Returns our changes except those to RDMA files, and a hash for the stock modules. The stock
    /// modules are built with the returned changes.
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

    pub(super) fn stock_is_stale(&self, source: &str) -> Result<bool> {
        let (_, key) = self.without_rdma(source, &self.changed()?)?;
        Ok(!stamp::is_fresh(&self.at("stamp.stock"), &key))
    }

    /// Builds the stock RDMA modules for the same kernel, before our RDMA changes are applied to
    /// the tree.
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
        for fragment in self.flavour.config {
            let path = self.ours("config").join(fragment);
            wanted
                .push_str(&fs::read_to_string(&path).with_context(|| path.display().to_string())?);
        }
        let fragment = self.at("config");
        fs::write(&fragment, &wanted)?;
        let mut stage = Stage::begin(self.title("configuring"));
        let mut make = self.make(&["allnoconfig"]);
        stage.quietly(make.env("KCONFIG_ALLCONFIG", &fragment), &self.log())?;
        let result = fs::read_to_string(build.join(".config"))?;
        let lost = lost_options(&wanted, &result);
        if !lost.is_empty() {
            bail!(
                "kconfig dropped these options of the kernel's configuration: {}",
                lost.join(", ")
            );
        }
        stage.done("");
        Ok(())
    }

    fn compile(&self, what: &str) -> Result<()> {
        self.lay_certificate()?;
        let mut stage = Stage::begin(self.title(what));
        // Runs one job more than there are processors, because jobs also wait for files.
        let (_, target) = self.flavour.arch.image();
        let jobs = std::thread::available_parallelism().map_or(2, usize::from) + 1;
        let mut make = self.make(&[&format!("-j{jobs}"), target, "modules"]);
        let count = stage.steps(&mut make, &self.log())?;
        stage.done(&format!("{count} steps"));
        Ok(())
    }
}

/// Returns the files that a patch changes, creates or removes, relative to the source tree.
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

/// Returns the options of fragments that a configuration lacks. If an option is set more than once,
/// the last value counts.
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

/// Copies all modules below one directory into another without subdirectories. Another program may
/// have the old copies open.
pub(super) fn collect_modules(from: &Path, to: &Path) -> Result<()> {
    let mut index = Index::default();
    index.add_tree(from)?;
    fs::create_dir_all(to)?;
    let mut names = BTreeSet::new();
    for file in index.files() {
        let name = file.file_name().context("a module without a name")?;
        stamp::put(file, &to.join(name))?;
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
    fn options_that_kconfig_dropped_are_named() {
        let wanted = "# comment\nCONFIG_A=y\nCONFIG_B=m\nCONFIG_C=n\nCONFIG_D=n\nCONFIG_E=16000\n";
        let result = "CONFIG_A=y\n# CONFIG_B is not set\n# CONFIG_C is not set\nCONFIG_D=y\nCONFIG_E=16000\n";
        assert_eq!(lost_options(wanted, result), ["CONFIG_B=m", "CONFIG_D=n"]);
        let wanted = "CONFIG_B=m\nCONFIG_C=y\nCONFIG_B=n\nCONFIG_C=m\n";
        assert_eq!(lost_options(wanted, result), ["CONFIG_C=m"]);
    }

    #[test]
    fn files_of_a_patch() {
        let patch = "text\n--- a/mm/x.c\t2026\n+++ b/mm/x.c\n@@ -1 +1 @@\n-a\n+b\n--- /dev/null\n+++ b/new.h\n\
            --- a/old.h\n+++ /dev/null\n";
        let files: Vec<String> = patched_files(patch).into_iter().collect();
        assert_eq!(files, ["mm/x.c", "new.h", "old.h"]);
    }
}
