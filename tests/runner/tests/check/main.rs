// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! `scripts/check` on trees of hosts.
//!
//! The trees are made here, small and by hand, after the layouts that the distributions' packages are known to have; none
//! was recorded from a machine. The tools in them are scripts that say what the real ones would.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    reason = "what fails here fails a test"
)]

mod cases;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::{symlink, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};

use cases::{
    all_at_once, complete, debian, debian_on_arm64, drivers, folders, grace, hosts, hwe,
    installing, kernels, peer_memory, revocation, tools, UBUNTU,
};

#[derive(Clone)]
enum Entry {
    Text(String),
    /// Its target.
    Link(String),
    /// A kernel module: its licence and version.
    Module(&'static str, &'static str),
}

/// A host: files by path below its root, and the tools of its PATH.
#[derive(Clone, Default)]
struct Host {
    files: BTreeMap<String, Entry>,
    tools: BTreeMap<String, String>,
    /// The kernel's configuration, without `CONFIG_`.
    config: BTreeMap<String, String>,
    /// The kernel that is built for.
    release: &'static str,
    /// The folder of its headers.
    headers: String,
    arguments: Vec<String>,
    environment: Vec<(&'static str, &'static str)>,
}

impl Host {
    fn file(&mut self, path: &str, text: &str) -> &mut Self {
        let path = self.place(path);
        self.files.insert(path, Entry::Text(text.to_owned()));
        self
    }

    fn link(&mut self, path: &str, target: &str) -> &mut Self {
        let (path, target) = (self.place(path), self.place(target));
        self.files.insert(path, Entry::Link(target));
        self
    }

    fn module(&mut self, path: &str, licence: &'static str, version: &'static str) -> &mut Self {
        let path = self.place(path);
        self.files.insert(path, Entry::Module(licence, version));
        self
    }

    /// Takes a file or a folder away, which must be there.
    fn without(&mut self, path: &str) -> &mut Self {
        let path = self.place(path);
        let inside = format!("{path}/");
        let before = self.files.len();
        self.files
            .retain(|name, _| *name != path && !name.starts_with(&inside));
        assert!(self.files.len() < before, "there is no {path}");
        self
    }

    /// `{K}` stands for the folder of the headers, `{R}` for the release.
    fn place(&self, text: &str) -> String {
        text.replace("{K}", &self.headers)
            .replace("{R}", self.release)
    }

    /// A tool that prints this, whatever it is asked.
    fn tool(&mut self, name: &str, says: &str) -> &mut Self {
        let script = format!("#!/bin/sh\ncat <<'END'\n{says}\nEND\n");
        self.tools.insert(name.to_owned(), script);
        self
    }

    /// A tool that is this shell script.
    fn script(&mut self, name: &str, script: &str) -> &mut Self {
        self.tools.insert(name.to_owned(), script.to_owned());
        self
    }

    /// A tool that ends in an error and says nothing.
    fn fails(&mut self, name: &str) -> &mut Self {
        let script = "#!/bin/sh\nexit 1\n".to_owned();
        self.tools.insert(name.to_owned(), script);
        self
    }

    /// It does not know what gcc 14 does.
    fn gcc_12(&mut self) -> &mut Self {
        let script = "#!/bin/sh\ncase $1 in\n-fmin-function-alignment=*) exit 1 ;;\n\
                      --version) echo 'gcc (Ubuntu 12.3.0-1ubuntu1) 12.3.0' ;;\nesac\n";
        self.tools.insert("gcc".to_owned(), script.to_owned());
        self
    }

    /// A kernel that LLVM's tools built, and these tools by such names.
    fn by_clang(&mut self, suffix: &str) -> &mut Self {
        self.unset("CC_IS_GCC")
            .set("CC_IS_CLANG", "y")
            .set("CC_VERSION_TEXT", "\"Ubuntu clang version 21.1.8\"")
            .tool(&format!("clang{suffix}"), "Ubuntu clang version 21.1.8")
            .tool(&format!("ld.lld{suffix}"), "")
    }

    /// With what scripts/headers takes to write, where root's does.
    fn as_root(&mut self, utilities: &[&str]) -> &mut Self {
        for name in utilities {
            let script = format!("#!/bin/sh\nexec {} \"$@\"\n", system(name).display());
            self.tools.insert((*name).to_owned(), script);
        }
        self.tool("id", "0")
    }

    fn without_tool(&mut self, name: &str) -> &mut Self {
        assert!(self.tools.remove(name).is_some(), "there is no {name}");
        self
    }

    fn set(&mut self, option: &str, value: &str) -> &mut Self {
        self.config.insert(option.to_owned(), value.to_owned());
        self
    }

    fn unset(&mut self, option: &str) -> &mut Self {
        assert!(self.config.remove(option).is_some(), "{option} is not set");
        self
    }

    fn argument(&mut self, argument: &str) -> &mut Self {
        self.arguments.push(self.place(argument));
        self
    }

    /// The kernel's configuration as a file of its own, for a host without its headers.
    fn configuration(&mut self, path: &str) -> &mut Self {
        let text = self.options();
        self.file(path, &text)
    }

    fn options(&self) -> String {
        self.config
            .iter()
            .map(|(option, value)| format!("CONFIG_{option}={value}\n"))
            .collect()
    }

    fn variable(&mut self, name: &'static str, value: &'static str) -> &mut Self {
        self.environment.push((name, value));
        self
    }

    /// What every prepared build folder has, and Rust's part of it.
    fn kernel(&mut self, rustc: &str) -> &mut Self {
        for (option, value) in [
            ("X86_64", "y"),
            ("MODULES", "y"),
            ("RUST", "y"),
            ("CC_IS_GCC", "y"),
            ("CC_HAS_MIN_FUNCTION_ALIGNMENT", "y"),
            ("INFINIBAND", "m"),
            ("INFINIBAND_USER_MEM", "y"),
            ("MODULE_SIG", "y"),
        ] {
            self.set(option, value);
        }
        self.set("RUSTC_VERSION_TEXT", &format!("\"{rustc}\""));
        self.file("proc/sys/kernel/osrelease", &format!("{}\n", self.release))
            .file("{K}/Makefile", "# Linux\n")
            .file("{K}/include/config/kernel.release", "{R}\n")
            .file(
                "{K}/include/generated/utsrelease.h",
                "#define UTS_RELEASE \"{R}\"\n",
            )
            .file("{K}/include/generated/rustc_cfg", "--cfg=CONFIG_RUST\n")
            .file("{K}/scripts/basic/fixdep", "")
            .file("{K}/scripts/mod/modpost", "")
            .file("{K}/scripts/Makefile.build", EXTERN_CRATES)
            .file("{K}/scripts/target.json", "{}\n")
            .file("{K}/Module.symvers", &exported("ib_umem_get_va", "ib_core"));
        self.with_rust(rustc).tool("rustc", rustc).tool("ld", "");
        // It reads what Debian's headers say of the compiler.
        let make = format!("#!/bin/sh\nexec {} \"$@\"\n", system("make").display());
        self.tools.insert("make".to_owned(), make);
        self
    }

    fn on_arm64(&mut self) -> &mut Self {
        self.unset("X86_64").set("ARM64", "y")
    }

    /// What the kernel's build leaves for modules in Rust, made by this compiler.
    fn with_rust(&mut self, rustc: &str) -> &mut Self {
        for name in CRATES {
            // rustc writes the length of its version before it.
            let text = format!("rust\0\0\0\nA{rustc}\u{1}abort_unwind");
            self.file(&format!("{{K}}/rust/{name}"), &text);
        }
        self
    }

    /// NVIDIA's driver, as DKMS installs it.
    fn nvidia(&mut self, licence: &'static str, version: &'static str) -> &mut Self {
        self.module("lib/modules/{R}/updates/dkms/nvidia.ko", licence, version)
            .file(
                &format!("usr/src/nvidia-{version}/nvidia/nv-p2p.h"),
                P2P_HEADER,
            )
    }

    /// OFED's headers in one of the places where they may be.
    fn ofed(&mut self, place: &str) -> &mut Self {
        self.ofed_in(&format!("usr/src/ofa_kernel/{place}"))
    }

    /// OFED's headers and list of symbols in this folder.
    fn ofed_in(&mut self, folder: &str) -> &mut Self {
        self.file(&format!("{folder}/include/rdma/peer_mem.h"), PEER_HEADER)
            .file(
                &format!("{folder}/Module.symvers"),
                &exported("ib_register_peer_memory_client", "ib_uverbs"),
            )
    }

    /// Writes it all down, and runs the script there, which must leave it as it is.
    fn check(&self, shell: &[&str]) -> Said {
        let place = self.write();
        let before = listing(&place.root());
        let said = self.run(&place, shell);
        assert_eq!(listing(&place.root()), before, "the host was written to");
        said
    }

    fn write(&self) -> Place {
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

    fn run(&self, place: &Place, shell: &[&str]) -> Said {
        self.run_script(place, shell, &script())
    }

    fn run_script(&self, place: &Place, shell: &[&str], script: &Path) -> Said {
        let output = Command::new(system(shell[0]))
            .args(&shell[1..])
            .arg(script)
            .args(&self.arguments)
            .env_clear()
            .env("PATH", place.0.join("tools"))
            .env("PROBE_ROOT", place.root())
            .env("PEERMEM_OBJECT", OBJECT)
            .envs(self.environment.iter().copied())
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

/// Where the object of the portable build is, on the hosts that have it.
const OBJECT: &str = "/object";

const CRATES: &[&str] = &[
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

/// What kbuild gives every module, as in the script of 7.2.
const EXTERN_CRATES: &str = "\t-Zunstable-options --extern pin_init --extern kernel \\\n\
                             \t--extern zerocopy --extern zerocopy_derive \\\n";

const P2P_HEADER: &str = "#define NVIDIA_P2P_CAP_GET_PAGES_PERSISTENT_API\n";
const PEER_HEADER: &str = "#define PEER_MEM_U64_CORE_CONTEXT\n";

/// Of the machine that runs the tests: what the script is written with.
const UTILITIES: &[&str] = &[
    "awk", "cat", "cp", "cut", "dirname", "find", "grep", "head", "mktemp", "modinfo", "objdump",
    "readlink", "rm", "sed", "sh", "sort", "tail", "tr",
];

fn system(name: &str) -> PathBuf {
    ["/usr/bin", "/bin", "/usr/sbin", "/sbin"]
        .iter()
        .map(|folder| Path::new(folder).join(name))
        .find(|path| path.exists())
        .unwrap_or_else(|| panic!("this machine has no {name}"))
}

fn script() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/check")
}

/// A line of a `Module.symvers`.
fn exported(symbol: &str, module: &str) -> String {
    format!("0x00000000\t{symbol}\tdrivers/infiniband/core/{module}\tEXPORT_SYMBOL\t\n")
}

/// An object file with what modinfo reads.
fn assemble(path: &Path, licence: &str, version: &str) {
    assemble_with(
        path,
        &[&format!("version={version}"), &format!("license={licence}")],
    );
}

fn assemble_with(path: &Path, fields: &[&str]) {
    let source = path.with_extension("s");
    let text = fields
        .iter()
        .fold(".section .modinfo,\"a\"\n".to_owned(), |text, field| {
            format!("{text}.asciz \"{field}\"\n")
        });
    fs::write(&source, text).unwrap();
    let status = Command::new("as")
        .arg("-o")
        .args([path, &source])
        .status()
        .unwrap();
    assert!(status.success(), "as failed");
    fs::remove_file(source).unwrap();
}

/// Every file with its contents.
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

/// A folder for one run, gone with it.
struct Place(PathBuf);

impl Place {
    fn new() -> Self {
        static NUMBER: AtomicUsize = AtomicUsize::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let folder = std::env::temp_dir().join(format!("check-{}-{number}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        Self(fs::canonicalize(folder).unwrap())
    }

    /// Of the host.
    fn root(&self) -> PathBuf {
        self.0.join("root")
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// What is said of an item that is not ok: `item|verdict|found`, and the sentence on it. The verdict `useless` is printed as a
/// remark, and the last line tells.
type Row<'a> = (&'a str, &'a str);

struct Said {
    status: Option<i32>,
    text: String,
    errors: String,
}

impl Said {
    /// Whether it said this and nothing else, but for what is ok.
    fn is(&self, expected: &[(String, String)]) -> Result<(), String> {
        let mut table = String::new();
        let mut sentences = String::new();
        for (row, sentence) in expected {
            let item = row.split('|').next().unwrap_or_default();
            table.push_str(&row.replace("|useless|", "|remark|"));
            table.push('\n');
            sentences.push_str(&format!("{item}: {sentence}\n"));
        }
        let count = |wanted| expected.iter().filter(|row| row.0.contains(wanted)).count();
        let (status, last) = match (count("|missing|"), count("|useless|")) {
            (0, 0) => (0, "It can be built.".to_owned()),
            (0, _) => (
                0,
                "It can be built, and will not load here as things are.".to_owned(),
            ),
            (missing, _) => (1, format!("It cannot be built: {missing} missing.")),
        };
        let expected = format!("{table}\n{sentences}{status}: {last}");

        let mut parts: Vec<&str> = self.text.trim_end().split("\n\n").collect();
        let last = parts.pop().unwrap_or_default();
        let rows = parts.get(1).copied().unwrap_or_default();
        let head = rows.lines().next().unwrap_or_default();
        let (Some(verdict), Some(found)) = (head.find("verdict"), head.find("found")) else {
            return Err(format!("no table:\n{}{}", self.text, self.errors));
        };
        let mut said = String::new();
        for line in rows.lines().skip(1) {
            let cells = [&line[..verdict], &line[verdict..found], &line[found..]];
            let cells = cells.map(str::trim_end);
            if cells[1] != "ok" {
                said.push_str(&cells.join("|"));
                said.push('\n');
            }
        }
        said.push('\n');
        for line in parts.iter().skip(2).flat_map(|part| part.lines()) {
            said.push_str(line);
            said.push('\n');
        }
        let status = self.status.unwrap_or(-1);
        said.push_str(&format!("{status}: {last}"));
        if said != expected || !self.errors.is_empty() {
            return Err(format!(
                "it said\n{said}\n{}instead of\n{expected}",
                self.errors
            ));
        }
        Ok(())
    }
}

struct Case {
    name: String,
    host: Host,
    not_ok: Vec<(String, String)>,
}

fn case(name: &str, host: &Host, not_ok: &[Row<'_>]) -> Case {
    Case {
        name: name.to_owned(),
        host: host.clone(),
        not_ok: not_ok
            .iter()
            .map(|(row, sentence)| (host.place(row), host.place(sentence)))
            .collect(),
    }
}

fn all() -> Vec<Case> {
    [
        all_at_once(),
        folders(),
        kernels(),
        tools(),
        drivers(),
        peer_memory(),
        revocation(),
        hosts(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// Every case must say what it should, and nothing else.
fn hold(cases: &[Case]) {
    let mut problems = Vec::new();
    for case in cases {
        if let Err(problem) = case.host.check(&["sh"]).is(&case.not_ok) {
            problems.push(format!("{}: {problem}", case.name));
        }
    }
    assert!(problems.is_empty(), "{}", problems.join("\n\n"));
}

#[test]
fn all_that_is_missing_at_once() {
    hold(&all_at_once());
}

#[test]
fn build_folders() {
    hold(&folders());
}

#[test]
fn what_a_kernel_must_have() {
    hold(&kernels());
}

#[test]
fn compilers_and_tools() {
    hold(&tools());
}

#[test]
fn nvidias_driver() {
    hold(&drivers());
}

#[test]
fn peer_memory_of_ib_core() {
    hold(&peer_memory());
}

#[test]
fn the_oldest_ofed_for_the_revocable_mode() {
    hold(&revocation());
}

#[test]
fn hosts_of_distributions() {
    hold(&hosts());
}

#[test]
fn what_installing_says() {
    for case in installing() {
        let said = case.host.check(&["sh"]);
        let lines: String = case
            .not_ok
            .iter()
            .map(|(row, sentence)| {
                let mut cells = row.split('|');
                let (item, found) = (cells.next().unwrap(), cells.nth(1).unwrap());
                format!("peermem-rs: {item}: {found}. {sentence}\n")
            })
            .collect();
        assert_eq!(
            (said.status, said.text, said.errors),
            (Some(0), lines, String::new()),
            "{}",
            case.name
        );
    }
}

/// The functions of both neighbours are weak in the module, and modpost lets pass what it does not know of these: here it
/// is the Kbuild itself that is asked, by a make that knows of kbuild what it takes.
#[test]
fn a_build_without_the_neighbours_symbols_ends() {
    let kbuild =
        "obj := .\nCONFIG_SHELL := sh\ncmd = @set -e; $(cmd_$(1))\nif_changed = $(cmd)\nif_changed_dep =\n\
                  filechk = @$(filechk_$(1)) >$@\nFORCE:\ninclude $(src)/Kbuild\n";
    let place = Place::new();
    let repository = script().parent().unwrap().join("..");
    fs::create_dir_all(place.0.join("src")).unwrap();
    fs::create_dir_all(place.0.join("rust-bindings")).unwrap();
    fs::write(place.0.join("Makefile"), kbuild).unwrap();
    let build = |symbols: &[&str], warn: &str| {
        let lines: String = symbols.iter().map(|name| exported(name, "m")).collect();
        fs::write(place.0.join("Module.symvers"), lines).unwrap();
        let output = Command::new(system("make"))
            .arg("src/symbols.known")
            .arg(format!("src={}", repository.display()))
            .arg("objtree=.")
            .arg(format!("KBUILD_MODPOST_WARN={warn}"))
            .args(["NV_P2P_INCLUDE=", "PEER_MEM_INCLUDE=", "KERNELRELEASE=7.9"])
            .env_remove("MAKEFLAGS")
            .current_dir(&place.0)
            .output()
            .unwrap();
        (
            output.status.success(),
            String::from_utf8(output.stderr).unwrap(),
        )
    };
    let both = [
        "ib_register_peer_memory_client",
        "ib_unregister_peer_memory_client",
    ];
    let told = "ERROR: ib_unregister_peer_memory_client is in no Module.symvers; scripts/check says what to do\n";
    // nvidia.ko's are in a list that the build makes for itself.
    assert_eq!(build(&both, ""), (true, String::new()));
    let (built, said) = build(&both[..1], "");
    assert!(!built && said.starts_with(told), "{said}");
    assert_eq!(build(&both[..1], "1"), (true, told.to_owned()));
    // Not a part of another name.
    let (built, _) = build(&[both[0], "fake_ib_unregister_peer_memory_client"], "");
    assert!(!built);
}

/// On a kernel with CONFIG_MODVERSIONS the versions are read from the driver that is installed: they are values of symbols, or
/// lie in a section where these stand.
#[test]
fn versions_of_an_installed_driver() {
    const VALUES: &str = ".globl __crc_nvidia_a\n__crc_nvidia_a = 0x9f12a0b4\n.text\nnop\n";
    const SECTION: &str =
        ".section __kcrctab_gpl, \"a\"\n.long 1\n__crc_nvidia_a: .long 0x9f12a0b4\n";
    let symbols = script()
        .parent()
        .unwrap()
        .join("../rust-bindings/symvers.sh");
    let lines = |root: &Path, release: &str, export: &str| {
        let output = Command::new(&symbols)
            .args([release, export, "nvidia_a", "nvidia_b"])
            .env("PROBE_ROOT", root)
            .output()
            .unwrap();
        assert!(output.status.success());
        String::from_utf8(output.stdout).unwrap()
    };
    for source in [VALUES, SECTION] {
        let place = Place::new();
        let modules = place.0.join("lib/modules/6.1.0");
        fs::create_dir_all(&modules).unwrap();
        fs::write(place.0.join("crc.s"), source).unwrap();
        let assembled = Command::new(system("as"))
            .arg("-o")
            .args([modules.join("nvidia.ko"), place.0.join("crc.s")])
            .status();
        assert!(assembled.unwrap().success());
        let indexed = Command::new(system("depmod"))
            .arg("-b")
            .arg(&place.0)
            .arg("6.1.0")
            .status();
        assert!(indexed.unwrap().success());
        for export in ["EXPORT_SYMBOL", "EXPORT_SYMBOL_GPL"] {
            assert_eq!(
                lines(&place.0, "6.1.0", export),
                format!("0x9f12a0b4\tnvidia_a\tnvidia\t{export}\t\n")
            );
            assert_eq!(lines(&place.0, "6.2.0", export), "");
            assert_eq!(lines(&place.0, "", export).lines().count(), 2);
        }
    }
}

/// A check that no case makes speak could be dead. bash tells the numbers of the lines that it runs.
#[test]
fn every_line_that_reports_is_reached() {
    let source = fs::read_to_string(script()).unwrap();
    let reports: BTreeSet<usize> = (1..)
        .zip(source.lines())
        .filter(|(_, line)| {
            let mut words = line
                .split_whitespace()
                .skip_while(|word| word.ends_with(')'));
            words
                .next()
                .is_some_and(|word| word == "row" || word.starts_with("advice="))
        })
        .map(|(number, _)| number)
        .collect();
    assert!(reports.len() > 50, "{reports:?}");
    let trace = [
        "bash",
        "-c",
        "PS4='@${BASH_SOURCE##*/}:$LINENO '; set -x; . \"$0\"",
    ];
    let mut reached = BTreeSet::new();
    for case in all().into_iter().chain(installing()) {
        let said = case.host.check(&trace);
        reached.extend(said.errors.lines().filter_map(|line| {
            let (number, _) = line
                .trim_start_matches('@')
                .strip_prefix("check:")?
                .split_once(' ')?;
            number.parse::<usize>().ok()
        }));
    }
    let dead: Vec<&str> = reports
        .difference(&reached)
        .filter_map(|number| source.lines().nth(number - 1))
        .collect();
    assert!(dead.is_empty(), "never reached: {dead:#?}");
}

#[test]
fn dkms_excludes_the_kernels_that_the_check_does() {
    let constant = |file: &str, name: &str| {
        let text = fs::read_to_string(script().parent().unwrap().join(file)).unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix(name));
        line.unwrap().trim_matches('"').to_owned()
    };
    assert_eq!(
        constant("../dkms.conf", "BUILD_EXCLUSIVE_KERNEL_MIN="),
        constant("check", "oldest_kernel=")
    );
}

/// Has a make that knows as much of kbuild as the Kbuild needs find OFED on this host.
fn found_by_the_kbuild(host: &Host, source: &str, machine: &str) -> String {
    let place = host.write();
    let root = place.root();
    let kbuild = fs::read_to_string(script().parent().unwrap().join("../Kbuild")).unwrap();
    let here = format!("{}/usr/src/ofa_kernel", root.display());
    fs::write(
        place.0.join("Kbuild"),
        kbuild.replace("/usr/src/ofa_kernel", &here),
    )
    .unwrap();
    let makefile = "include Kbuild\nFORCE:\nfound:\n\
                    \t@echo '$(PEER_MEM_INCLUDE) $(filter %/Module.symvers,$(KBUILD_EXTRA_SYMBOLS))'\n";
    fs::write(place.0.join("Makefile"), makefile).unwrap();
    let output = Command::new(system("make"))
        .args(["-s", "found", "src=.", "obj=.", "NV_P2P_INCLUDE="])
        .arg(format!("KERNELRELEASE={}", host.release))
        .arg(format!("SRCARCH={source}"))
        .arg(format!("UTS_MACHINE={machine}"))
        .env_remove("MAKEFLAGS")
        .current_dir(&place.0)
        .output()
        .unwrap();
    let errors = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{errors}");
    // Links of a host lead nowhere outside its root, so the names stay as the Kbuild has them.
    String::from_utf8(output.stdout)
        .unwrap()
        .trim()
        .replace(&root.display().to_string(), "")
}

/// The Kbuild and the check look for OFED each by itself, and must find the same.
#[test]
fn ofed_is_looked_for_where_the_kbuild_does() {
    for (mut host, source, machine) in [
        (complete(UBUNTU), "x86", "x86_64"),
        (grace(), "arm64", "aarch64"),
    ] {
        host.without("usr/src/ofa_kernel");
        let release = host.release;
        let folders = [
            format!("{source}/{release}"),
            format!("{machine}/{release}"),
            release.to_owned(),
            "default".to_owned(),
        ];
        let places = folders.iter().flat_map(|folder| {
            ["ofa_kernel-dkms", "ofa_kernel"].map(|home| format!("usr/src/{home}/{folder}"))
        });
        let places: Vec<String> = places.collect();
        // From the last to the first: each comes before those that are there already.
        for place in places.iter().rev() {
            let said = host.ofed_in(place).check(&["sh"]);
            let row = format!("in ib_uverbs, by /{place}/Module.symvers\n");
            assert!(said.text.contains(&row), "{place}:\n{}", said.text);
            assert_eq!(
                found_by_the_kbuild(&host, source, machine),
                format!("/{place}/include /{place}/include/../Module.symvers")
            );
        }
        // Where OFED's DKMS package left links that lead nowhere, the folder behind them counts all the same.
        for (index, place) in places.iter().enumerate() {
            let mut host = host.clone();
            for other in &places {
                host.without(other);
            }
            host.ofed_in(place);
            for before in &places[..index] {
                host.link(before, "/usr/src/removed");
            }
            let said = host.check(&["sh"]);
            let row = format!("in ib_uverbs, by /{place}/Module.symvers\n");
            assert!(said.text.contains(&row), "{place}:\n{}", said.text);
            assert_eq!(
                found_by_the_kbuild(&host, source, machine),
                format!("/{place}/include /{place}/include/../Module.symvers")
            );
        }
    }
}

#[test]
fn what_is_ok_goes_unsaid_on_request() {
    let said = complete(UBUNTU).argument("-q").check(&["sh"]);
    assert_eq!(
        said.text,
        format!("peermem-rs for Linux {UBUNTU}\nIt can be built.\n")
    );
    let said = complete(UBUNTU)
        .without_tool("ld")
        .argument("-q")
        .check(&["sh"]);
    assert_eq!(
        said.text,
        format!(
            "peermem-rs for Linux {UBUNTU}\n\n\
             item              verdict  found\n\
             linker            missing  no ld\n\n\
             linker: The linker is not here: run 'apt install binutils'.\n\n\
             It cannot be built: 1 missing.\n"
        )
    );
    assert_eq!(said.status, Some(1));
}

/// The Kbuild asks for the headers by the kernel alone. Debian's packages of the driver have modules of other names.
#[test]
fn the_installed_drivers_headers_are_found_by_all_its_names() {
    for name in [
        "nvidia",
        "nvidia-current-open",
        "nvidia-open",
        "nvidia-current",
    ] {
        let place = Place::new();
        let modules = place.0.join(format!("lib/modules/{UBUNTU}/updates"));
        fs::create_dir_all(&modules).unwrap();
        assemble(&modules.join(format!("{name}.ko")), "NVIDIA", "580.1");
        for version in ["580.1", "600.1"] {
            let folder = place.0.join(format!("usr/src/nvidia-{version}/nvidia"));
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join("nv-p2p.h"), "").unwrap();
        }
        let asked = |arguments: &[&str]| {
            let driver = script().with_file_name("../rust-bindings/driver.sh");
            let output = Command::new(driver)
                .args(arguments)
                .env("PROBE_ROOT", &place.0)
                .output()
                .unwrap();
            String::from_utf8(output.stdout).unwrap()
        };
        let wanted = format!("{}/usr/src/nvidia-580.1/nvidia\n", place.0.display());
        assert_eq!(asked(&[UBUNTU]), wanted, "{name}");
        assert_eq!(asked(&["-l", UBUNTU]), "NVIDIA\n", "{name}");
        // Of another kernel.
        assert_eq!(asked(&["-l", "6.2.0"]), "", "{name}");
    }
}

/// What `make` is told, and why.
#[test]
fn the_build_that_is_chosen() {
    let rust = || complete(UBUNTU).file("object", "x").clone();
    let stock = || complete("6.12.9-15-generic").file("object", "x").clone();
    let too_old = "Linux 6.12 has no Rust interfaces for the in-tree build";
    for (host, said) in [
        (rust(), "PEERMEM_BUILD=in-tree (this kernel has Rust)".to_owned()),
        (
            rust().without_tool("bindgen").clone(),
            "PEERMEM_BUILD=portable PEERMEM_NO_GPL_ONLY= (this kernel has Rust, and the in-tree build lacks bindgen)".to_owned(),
        ),
        (
            rust().nvidia("NVIDIA", "595.45.04").clone(),
            "PEERMEM_BUILD=portable PEERMEM_NO_GPL_ONLY=1 (nvidia.ko is the proprietary flavour)".to_owned(),
        ),
        (
            rust().argument("PEERMEM_NO_GPL_ONLY=1").clone(),
            "PEERMEM_BUILD=portable PEERMEM_NO_GPL_ONLY=1 (PEERMEM_NO_GPL_ONLY=1)".to_owned(),
        ),
        (
            rust().nvidia("NVIDIA", "595.45.04").set("CFI", "y").clone(),
            "PEERMEM_BUILD=in-tree (this kernel has Rust)".to_owned(),
        ),
        (stock(), format!("PEERMEM_BUILD=portable PEERMEM_NO_GPL_ONLY= ({too_old})")),
        (
            stock().nvidia("NVIDIA", "595.45.04").clone(),
            format!("PEERMEM_BUILD=portable PEERMEM_NO_GPL_ONLY=1 ({too_old})"),
        ),
        (
            stock().argument("PEERMEM_NO_GPL_ONLY=1").clone(),
            format!("PEERMEM_BUILD=portable PEERMEM_NO_GPL_ONLY=1 ({too_old})"),
        ),
        (
            stock()
                .nvidia("NVIDIA", "595.45.04")
                .argument("PEERMEM_NO_GPL_ONLY=")
                .clone(),
            format!("PEERMEM_BUILD=portable PEERMEM_NO_GPL_ONLY= ({too_old})"),
        ),
    ] {
        let mut host = host;
        let said_here = host.argument("-b").check(&["sh"]);
        assert_eq!((said_here.status, said_here.text), (Some(0), format!("{said}\n")));
    }
}

/// At installing it is the module that is installed that loads, or does not, wherever it was compiled.
#[test]
fn installing_judges_what_is_installed() {
    for (field, licence, loads) in [
        ("driver_flavour=proprietary", "NVIDIA", true),
        ("driver_flavour=proprietary", "Dual MIT/GPL", true),
        ("name=nvidia_peermem", "NVIDIA", false),
        ("name=nvidia_peermem", "Dual MIT/GPL", true),
    ] {
        let mut host = complete(UBUNTU);
        host.nvidia(licence, "595.45.04").argument("-l");
        let place = host.write();
        let modules = place
            .root()
            .join(format!("lib/modules/{UBUNTU}/updates/dkms"));
        assemble_with(&modules.join("nvidia_peermem.ko"), &[field]);
        let said = host.run(&place, &["sh"]);
        assert_eq!(
            said.text.is_empty(),
            loads,
            "{field} {licence}: {}",
            said.text
        );
    }
}

/// depmod runs after an installation, and what it has noted may be gone.
#[test]
fn a_module_is_found_by_the_index_or_without() {
    let place = Place::new();
    let folder = place.0.join("lib/modules/6.1.0");
    for path in ["updates/nvidia.ko.xz", "kernel/other/nvidia.ko"] {
        fs::create_dir_all(folder.join(path).parent().unwrap()).unwrap();
        fs::write(folder.join(path), "").unwrap();
    }
    let found = |index: &str| {
        fs::write(folder.join("modules.dep"), index).unwrap();
        let output = Command::new(script().with_file_name("../rust-bindings/installed.sh"))
            .args(["6.1.0", "none", "nvidia", "other"])
            .env("PROBE_ROOT", &place.0)
            .output()
            .unwrap();
        assert!(output.status.success());
        let path = String::from_utf8(output.stdout).unwrap();
        path.trim_start_matches(place.0.to_str().unwrap())
            .trim_start_matches("/lib/modules/6.1.0/")
            .to_owned()
    };
    assert_eq!(
        found("updates/nvidia.ko.xz: a.ko\n"),
        "updates/nvidia.ko.xz\n"
    );
    assert_eq!(
        found("kernel/other/nvidia.ko:\n"),
        "kernel/other/nvidia.ko\n"
    );
    assert_eq!(
        found("/lib/modules/6.1.0/kernel/other/nvidia.ko:\n"),
        "kernel/other/nvidia.ko\n"
    );
    // What it names was replaced; it names others, or is not there.
    for index in ["updates/nvidia.ko: a.ko\n", "kernel/nvidia-drm.ko:\n", ""] {
        assert!(found(index).contains("/nvidia.ko"), "{index}");
    }
}

/// Nothing is compiled for it: the headers, and the metadata where their package has them, by links.
#[test]
fn a_link_to_nothing_is_got_round() {
    let mut host = hwe();
    host.as_root(&["ln", "mkdir", "mv", "sha256sum"])
        .argument("-m");
    let place = host.write();
    let kept = "var/lib/peermem-rs/headers";
    let folder = format!("{kept}/{}", host.release);
    let create = |path: &str| fs::create_dir_all(place.root().join(path)).unwrap();
    // Of kernels that have gone, and of one that is there, for which somebody else makes it now.
    create(&format!("{kept}/6.1.0"));
    create(&format!("{kept}/6.2.0.new"));
    create(&format!("{kept}/7.3.0.new"));
    create("lib/modules/7.3.0");
    let said = host.run(&place, &["sh"]);
    let note = format!(
        "peermem-rs: the headers of {} have no metadata for Rust where they should: made /{folder}, with links to them and \
         to /usr/src/linux-lib-rust-{}\n",
        host.release, host.release
    );
    let row = format!("ok       rust/*.rmeta, rust/*.so in /{folder}\n");
    assert!(said.text.contains(&row), "{}{}", said.text, said.errors);
    assert_eq!((said.status, said.errors), (Some(0), note));
    let mut left: Vec<_> = fs::read_dir(place.root().join(kept))
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    left.sort();
    assert_eq!(left, [host.release, "7.3.0.new"]);
    // All that kbuild reads is found through it, and no other is made for what was there already.
    for path in [
        "include/config/auto.conf",
        "scripts/target.json",
        "rust/libkernel.rmeta",
    ] {
        assert!(place.root().join(&folder).join(path).is_file(), "{path}");
    }
    let again = host.run(&place, &["sh"]);
    assert_eq!((again.text, again.errors.as_str()), (said.text, ""));
    // And without -m, as the Makefile asks for the folder.
    host.arguments.clear();
    let again = host.run(&place, &["sh"]);
    assert!(again.text.contains(&row), "{}", again.text);

    // Where it cannot be written, there is nothing to build in.
    host.fails("mkdir").argument("-m");
    let advice = "and scripts/headers says above why it could not link to them.\n";
    let said = host.check(&["sh"]);
    assert!(said.text.contains(advice), "{}", said.text);
    assert_eq!(said.status, Some(1));
}

/// The source is there, and not that of the headers' package.
#[test]
fn metadata_that_cannot_be_made_is_missing() {
    let said = debian()
        .file("usr/src/linux-source-7.3.tar.xz", "x")
        .argument("-m")
        .check(&["sh"]);
    assert_eq!(
        said.errors,
        "peermem-rs: the headers of 7.3.4+deb13-amd64 have no metadata for Rust: name this kernel's own source with SOURCE=\n"
    );
    let advice = "Rust metadata: scripts/headers says above why it could not make them from \
                  /usr/src/linux-source-7.3.tar.xz.\n";
    assert!(said.text.contains(advice), "{}", said.text);
    assert!(
        said.text.contains("It cannot be built: 2 missing."),
        "{}",
        said.text
    );
}

/// The kernel's preparation makes a vDSO for 32-bit programs, too, which takes a compiler that nothing else needs.
#[test]
fn metadata_are_made_on_arm64_without_a_32_bit_compiler() {
    // Debian's package names that compiler, and overrides any other name.
    metadata_are_made_on_arm64(&mut debian_on_arm64());
    let mut host = debian_on_arm64();
    metadata_are_made_on_arm64(host.without("{K}/.kernelvariables"));
}

fn metadata_are_made_on_arm64(host: &mut Host) {
    let crates = CRATES.join(" ");
    // As arch/arm64/Makefile has it. The configuration's value is what auto.conf says. It is made by another make, which
    // does not read .kernelvariables, and made again for as long as that names the compiler otherwise.
    let makefile = format!(
        "-include $(O)/.kernelvariables\n\
         CONFIG_COMPAT_VDSO = y\nprepare: $(if $(CONFIG_COMPAT_VDSO),vdso32)\n\
         \tmkdir -p $(O)/include/config $(O)/rust\n\tcp $(O)/.config $(O)/include/config/auto.conf\n\
         \t$(MAKE) -f Kconfig NAME=$(CROSS_COMPILE_COMPAT)\n\
         \techo '#define RUST_SYMBOL _RNvX' >$(O)/rust/exports_core_generated.h\n\
         \tfor name in {crates}; do echo x >$(O)/rust/$$name; done\n\
         vdso32:\n\tarm-linux-gnueabihf-gcc --version\n"
    );
    let kconfig = "all:\n\ttest '$(CROSS_COMPILE_COMPAT)' = '$(NAME)'\n\
                   \t$(if $(CROSS_COMPILE_COMPAT),,sed -i /COMPAT_VDSO/d $(O)/include/config/auto.conf)\n";
    host.file("usr/src/linux-7.3/Makefile", &makefile)
        .file("usr/src/linux-7.3/Kconfig", kconfig)
        .file(
            "{K}/Module.symvers",
            "0x00000000\t_RNvX\tvmlinux\tEXPORT_SYMBOL_GPL\t\n",
        )
        .set("COMPAT_VDSO", "y")
        .configuration("{K}/.config")
        .as_root(&[
            "comm",
            "diff",
            "ln",
            "mkdir",
            "mv",
            "nproc",
            "sha256sum",
            "wc",
        ])
        .argument("-m");
    let place = host.write();
    let source = place.root().join("usr/src/linux-7.3");
    host.argument(&format!("SOURCE={}", source.display()));
    let said = host.run_script(&place, &["sh"], &script().with_file_name("headers"));
    let folder = format!(
        "{}/var/lib/peermem-rs/headers/{}",
        place.root().display(),
        host.release
    );
    assert_eq!(
        (said.status, said.text),
        (Some(0), format!("{folder}\n")),
        "{}",
        said.errors
    );
    for name in CRATES {
        assert!(
            Path::new(&folder).join("rust").join(name).is_file(),
            "{name}"
        );
    }
}

/// No source package of Ubuntu's has the name of its series, and linux-nvidia has none at all.
#[test]
fn ubuntus_source_must_be_named() {
    let mut host = grace();
    host.tool("dpkg-query", "linux-headers-7.3.0-1004-nvidia-64k: x")
        .argument("-m");
    let said = host.run_script(&host.write(), &["sh"], &script().with_file_name("headers"));
    assert_eq!(
        said.errors,
        "peermem-rs: the headers of 7.3.0-1004-nvidia-64k have no metadata for Rust: name this kernel's own source with \
         SOURCE=\n"
    );
    assert_eq!(said.status, Some(1));
}

#[test]
fn wrong_usage_has_a_status_of_its_own() {
    let said = complete(UBUNTU).argument("--help").check(&["sh"]);
    assert_eq!((said.status, said.text.as_str()), (Some(2), ""));
    assert!(said.errors.starts_with("usage: "), "{}", said.errors);
}
