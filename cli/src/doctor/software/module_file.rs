// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Reasons why the module would not load, or would not work. The reasons come from the module's
//! file, and modprobe is not run.
//!
//! The kernel checks the signature, the version magic, and then each symbol
//! (`kernel/module/main.c`, `version.c`). The first mismatch is the reason.

use crate::doctor::scan::Scan;
use crate::finding::{Finding, Level, Subject};
use crate::host::module_files::{stem, File, Files};
use crate::software::{is_ours, REGISTER};

/// Reason why a module would not load, or would not work.
pub(super) struct Cause {
    pub(super) found: String,
    pub(super) why: &'static str,
    pub(super) fix: String,
}

impl Cause {
    pub(super) fn at(self, level: Level) -> Finding {
        Finding::new(level, Subject::Machine, self.found)
            .why(self.why)
            .fix(self.fix)
    }
}

/// Returns the contents of the file that modprobe would load, if known.
fn files<'a>(scan: &'a Scan<'_>) -> Option<&'a Files> {
    let files = scan.module_files().as_ref().ok()?.as_ref()?;
    let installed = scan.software().installed.as_ref().ok()?.as_ref()?;
    (*installed == files.module.path).then_some(files)
}

/// Returns the reason why modprobe would fail, if the file shows a reason.
pub(super) fn cause(scan: &Scan<'_>) -> Option<Cause> {
    let files = files(scan)?;
    if files.module.unread.is_some() {
        return None;
    }
    // The kernel checks in this order.
    unsigned(scan, &files.module)
        .or_else(|| other_kernel(scan, &files.module))
        .or_else(|| other_versions(files))
        .or_else(|| unknown_symbol(files))
        .or_else(|| before_ofed(scan, files))
}

/// Returns `true` if the file and its dependencies were read, and nothing prevents loading.
pub(super) fn would_load(scan: &Scan<'_>) -> bool {
    let is_read = |files: &Files| {
        let mut all = files.others.iter().chain([&files.module]);
        !files.others.is_empty() && all.all(|file| file.unread.is_none())
    };
    files(scan).is_some_and(is_read) && cause(scan).is_none()
}

/// Returns the reason why the file's contents are unknown.
pub(super) fn unread<'a>(scan: &'a Scan<'_>) -> Option<&'a str> {
    files(scan)?.module.unread.as_deref()
}

/// Reports one of ib_core, ib_uverbs and nvidia.ko whose loaded version differs from its file. The
/// other functions of this file compare nvidia_peermem with the files of these modules, not with
/// the loaded modules.
pub(super) fn replaced(scan: &Scan<'_>) -> Option<Cause> {
    let mut others = files(scan)?.others.iter();
    let (name, path) = others.find_map(|file| {
        let (name, known) = (file.name.as_ref()?, file.srcversion.as_ref()?);
        let loaded = scan
            .host
            .text(&format!("/sys/module/{name}/srcversion"))
            .ok()?;
        (loaded != *known).then_some((name, &file.path))
    })?;
    Some(Cause {
        found: format!("the loaded {name} is not the one in {path}"),
        why: "the file was upgraded after the module was loaded, or the initramfs contains an older module; modules \
            for the new version may not load beside the old version",
        fix: "rebuild the initramfs if it contains the module, and reboot; or `sudo systemctl restart openibd` for \
            OFED's modules"
            .to_owned(),
    })
}

/// Returns how to rebuild the module.
fn rebuild(module: &File) -> String {
    match is_ours(&module.path) {
        true => "build it again: `sudo dkms unbuild peermem-rs/VERSION`, `sudo dkms install peermem-rs/VERSION` (`sudo \
            dkms status` has the version); without dkms `sudo make install`"
            .to_owned(),
        false => "build the driver's modules again beside the installed OFED: `sudo dkms unbuild` and `sudo dkms \
            install` for the driver (`sudo dkms status` names it), or run the driver's installer again; modules that \
            a distribution has built do not support OFED, so use its dkms package instead"
            .to_owned(),
    }
}

/// Returns `true` if the kernel accepts only signed modules.
pub(super) fn is_enforced(scan: &Scan<'_>) -> bool {
    let said = |path: &str, words: &[&str]| {
        let text = scan.host.text(path);
        text.is_ok_and(|text| words.iter().any(|word| text.contains(word)))
    };
    said("/sys/module/module/parameters/sig_enforce", &["Y"])
        || said(
            "/sys/kernel/security/lockdown",
            &["[integrity]", "[confidentiality]"],
        )
}

fn unsigned(scan: &Scan<'_>, module: &File) -> Option<Cause> {
    (!module.is_signed && is_enforced(scan)).then(|| Cause {
        found: format!("{} is not signed, and this kernel only accepts signed modules", module.path),
        why: "Secure Boot, lockdown or module.sig_enforce requires a signature: modprobe says \"Key was rejected by \
            service\" or \"Operation not permitted\"",
        fix: "sign the module with a key that the machine knows (docs/install.md, Secure Boot)".to_owned(),
    })
}

/// Reports a file for another kernel. If the file has CRCs, the kernel does not compare the
/// release.
fn other_kernel(scan: &Scan<'_>, module: &File) -> Option<Cause> {
    let running = scan.software().kernel.as_ref().ok()?;
    let built = module.vermagic.as_ref()?.split_whitespace().next()?;
    (built != running && !module.has_crcs()).then(|| Cause {
        found: format!("{} was built for Linux {built}, but {running} is running", module.path),
        why: "the kernel compares the release: its log has \"version magic … should be …\", and modprobe says \"Exec \
            format error\"",
        fix: rebuild(module),
    })
}

fn other_versions(files: &Files) -> Option<Cause> {
    let module = &files.module;
    let differ = |file: &File| -> Vec<(String, u32, u32)> {
        let needs = module.needs.iter();
        let both =
            needs.filter_map(|(name, crc)| Some((name, (*crc)?, (*file.exports.get(name)?)?)));
        both.filter(|(_, built, now)| built != now)
            .map(|(name, built, now)| (name.clone(), built, now))
            .collect()
    };
    let mut others = files.others.iter().map(|file| (file, differ(file)));
    let (other, symbols) = others.find(|(_, symbols)| !symbols.is_empty())?;
    let (name, built, now) = symbols.first()?;
    let more = match symbols.len().saturating_sub(1) {
        0 => String::new(),
        more => format!("; {more} more differ"),
    };
    let whose = match stem(&other.path).is_some_and(|stem| stem.starts_with("nvidia")) {
        true => "driver",
        false => "OFED",
    };
    Some(Cause {
        found: format!(
            "{} was built against another {whose}: {name} has the CRC {built:#010x} in it, and {now:#010x} in {}{more}",
            module.path, other.path
        ),
        why: "the kernel compares the CRC of each symbol: its log has \"disagrees about version of symbol\", and \
            modprobe says \"Invalid argument\"",
        fix: rebuild(module),
    })
}

/// Reports a symbol that no module exports.
fn unknown_symbol(files: &Files) -> Option<Cause> {
    let (module, others) = (&files.module, &files.others);
    if others.iter().any(|file| file.unread.is_some()) {
        return None;
    }
    let is_known = |name: &str| others.iter().any(|file| file.exports.contains_key(name));
    let has = |word: &str| {
        let mut names = others.iter().filter_map(|file| file.name.as_ref());
        names.any(|name| name.starts_with(word))
    };
    let name = module.needs.keys().find(|name| {
        let is_of_driver = name.starts_with("nvidia_p2p_") && has("nvidia");
        let is_of_ofed = name.ends_with("register_peer_memory_client") && has("ib_");
        (is_of_driver || is_of_ofed) && !is_known(name)
    })?;
    Some(Cause {
        found: format!("{} calls {name}, but no installed module has it", module.path),
        why: "OFED was removed, or the driver is older than the driver that the module was built with: the kernel's \
            log has \"Unknown symbol\"",
        fix: rebuild(module),
    })
}

fn before_ofed(scan: &Scan<'_>, files: &Files) -> Option<Cause> {
    let module = &files.module;
    let is_exported = matches!(scan.software().register(), Ok(Some(_)))
        || files
            .others
            .iter()
            .any(|file| file.exports.contains_key(REGISTER));
    (is_exported && !module.needs.contains_key(REGISTER)).then(|| Cause {
        found: format!("{} was built without OFED: it never calls {REGISTER}", module.path),
        why: "it was built on a system without peer memory, so its init always fails: modprobe says \"Invalid \
            argument\", and the kernel's log says nothing",
        fix: rebuild(module),
    })
}
