// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! A synthetic host: its files and tools, written to a folder in which `scripts/check` runs.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{symlink, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};

#[derive(Clone)]
pub(crate) enum Entry {
    Text(String),
    /// A link and its target.
    Link(String),
    /// A kernel module with its licence and version.
    Module(String, String),
}

/// A host: files by path below its root, and the tools in its PATH.
#[derive(Clone, Default)]
pub(crate) struct Host {
    pub(crate) files: BTreeMap<String, Entry>,
    pub(crate) tools: BTreeMap<String, String>,
    /// The kernel's configuration, without the prefix `CONFIG_`.
    pub(crate) config: BTreeMap<String, String>,
    /// Release of the kernel that the module is built for.
    pub(crate) release: String,
    /// Folder of the kernel's headers.
    pub(crate) headers: String,
    pub(crate) arguments: Vec<String>,
    pub(crate) environment: Vec<(String, String)>,
}

impl Host {
    pub(crate) fn add(&mut self, path: &str, entry: Entry) {
        let path = self.place(path);
        self.files.insert(path, entry);
    }

    /// Replaces `{K}` by the folder of the headers, and `{R}` by the release.
    pub(crate) fn place(&self, text: &str) -> String {
        text.replace("{K}", &self.headers)
            .replace("{R}", &self.release)
    }

    pub(crate) fn script(&mut self, name: &str, script: String) {
        self.tools.insert(name.to_owned(), script);
    }

    pub(crate) fn options(&self) -> String {
        self.config
            .iter()
            .map(|(option, value)| format!("CONFIG_{option}={value}\n"))
            .collect()
    }

    /// Writes the host to a folder and runs the script there. The script must not change the host.
    pub(crate) fn check(&self, shell: &[&str]) -> Said {
        let place = self.write();
        let before = listing(&place.root());
        let said = self.run(&place, shell);
        assert_eq!(listing(&place.root()), before, "the host was written to");
        said
    }

    pub(crate) fn write(&self) -> Place {
        let place = Place::new();
        let root = place.root();
        for (path, entry) in &self.files {
            let path = root.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            match entry {
                Entry::Text(text) => fs::write(&path, self.place(text)).unwrap(),
                Entry::Link(target) => symlink(target, &path).unwrap(),
                Entry::Module(licence, version) => assemble(&path, licence, version),
            }
        }
        let config = root.join(&self.headers).join("include/config");
        if config.exists() {
            fs::write(config.join("auto.conf"), self.options()).unwrap();
        }
        let tools = place.0.join("tools");
        fs::create_dir_all(&tools).unwrap();
        for (name, script) in &self.tools {
            let path = tools.join(name);
            fs::write(&path, script).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        }
        for name in UTILITIES {
            symlink(system(name), tools.join(name)).unwrap();
        }
        place
    }

    pub(crate) fn run(&self, place: &Place, shell: &[&str]) -> Said {
        self.run_script(place, shell, &script())
    }

    pub(crate) fn run_script(&self, place: &Place, shell: &[&str], script: &Path) -> Said {
        let output = Command::new(system(shell[0]))
            .args(&shell[1..])
            .arg(script)
            .args(&self.arguments)
            .env_clear()
            .env("PATH", place.0.join("tools"))
            .env("PROBE_ROOT", place.root())
            .env("PEERMEM_OBJECT", OBJECT)
            .envs(self.environment.iter().cloned())
            .current_dir(&place.0)
            .stdin(Stdio::null())
            .output()
            .unwrap();
        Said {
            status: output.status.code(),
            text: String::from_utf8(output.stdout).unwrap(),
            errors: String::from_utf8(output.stderr).unwrap(),
        }
    }
}

/// Release of the host `complete`.
pub(crate) const UBUNTU: &str = "7.3.0-15-generic";

/// Path of the portable build's object on the hosts that have it.
const OBJECT: &str = "/object";

pub(crate) const CRATES: &[&str] = &[
    "libbindings.rmeta",
    "libbuild_error.rmeta",
    "libcompiler_builtins.rmeta",
    "libcore.rmeta",
    "libffi.rmeta",
    "libkernel.rmeta",
    "libmacros.so",
    "libpin_init.rmeta",
    "libpin_init_internal.so",
    "libuapi.rmeta",
    "libzerocopy.rmeta",
    "libzerocopy_derive.so",
];

/// Programs of this machine that the script uses.
const UTILITIES: &[&str] = &[
    "awk", "cat", "cp", "cut", "dirname", "find", "grep", "head", "mktemp", "modinfo", "readlink",
    "rm", "sed", "sh", "sort", "tail", "tr",
];

pub(crate) fn system(name: &str) -> PathBuf {
    ["/usr/bin", "/bin", "/usr/sbin", "/sbin"]
        .iter()
        .map(|folder| Path::new(folder).join(name))
        .find(|path| path.exists())
        .unwrap_or_else(|| panic!("this machine has no {name}"))
}

pub(crate) fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

pub(crate) fn script() -> PathBuf {
    repository().join("scripts/check")
}

/// Returns a line of a `Module.symvers`.
pub(crate) fn exported(symbol: &str, module: &str) -> String {
    format!("0x00000000\t{symbol}\tdrivers/infiniband/core/{module}\tEXPORT_SYMBOL\t\n")
}

/// Makes an object file with the information that modinfo reads.
pub(crate) fn assemble(path: &Path, licence: &str, version: &str) {
    assemble_with(
        path,
        &[&format!("version={version}"), &format!("license={licence}")],
    );
}

/// Makes an object file with these fields of the module information.
pub(crate) fn assemble_with(path: &Path, fields: &[&str]) {
    let text = fields
        .iter()
        .fold(".section .modinfo,\"a\"\n".to_owned(), |text, field| {
            format!("{text}.asciz \"{field}\"\n")
        });
    assemble_text(path, &text);
}

/// Makes an object file from assembler source.
pub(crate) fn assemble_text(path: &Path, text: &str) {
    let source = path.with_extension("s");
    fs::write(&source, text).unwrap();
    output(Command::new("as").arg("-o").args([path, &source]));
    fs::remove_file(source).unwrap();
}

/// Runs a command, which must succeed. Returns its standard output.
pub(crate) fn output(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {errors}");
    String::from_utf8(output.stdout).unwrap()
}

/// Returns every file with its contents.
fn listing(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut files = BTreeMap::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let entry = entry.unwrap();
            let kind = entry.file_type().unwrap();
            if kind.is_dir() {
                folders.push(entry.path());
            }
            let contents = if kind.is_file() {
                fs::read(entry.path()).unwrap()
            } else {
                Vec::new()
            };
            files.insert(entry.path(), contents);
        }
    }
    files
}

/// A folder for one run, which is removed on drop.
pub(crate) struct Place(pub(crate) PathBuf);

impl Place {
    pub(crate) fn new() -> Self {
        static NUMBER: AtomicUsize = AtomicUsize::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let folder = std::env::temp_dir().join(format!("check-{}-{number}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        Self(fs::canonicalize(folder).unwrap())
    }

    /// Returns the root of the host.
    pub(crate) fn root(&self) -> PathBuf {
        self.0.join("root")
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Output of the script.
pub(crate) struct Said {
    pub(crate) status: Option<i32>,
    pub(crate) text: String,
    pub(crate) errors: String,
}
