// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Tests `scripts/check` on synthetic hosts, and the probe of the kernel's interfaces.
//!
//! The trees of the hosts are small and written by hand, after the known layouts of the
//! distributions' packages. None was copied from a real machine. The tools of the hosts are scripts
//! that print the output of the real tools.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    reason = "what fails here fails a test"
)]

mod cases;
mod host;
mod probe;

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{symlink, PermissionsExt as _};
use std::path::Path;
use std::process::Command;
use std::time::SystemTime;

use cases::{cases, host};
use host::{
    assemble, assemble_text, assemble_with, exported, output, repository, script, system, Entry,
    Host, Place, CRATES, UBUNTU,
};

/// Checks that every case of a group gives exactly the expected output.
fn hold(group: &str) {
    let mut problems = Vec::new();
    for case in cases(Some(group)) {
        if let Err(problem) = case.host.check(&["sh"]).is(&case.not_ok) {
            problems.push(format!("{}: {problem}", case.name));
        }
    }
    assert!(problems.is_empty(), "{}", problems.join("\n\n"));
}

macro_rules! hold {
    ($($test:ident: $group:literal;)*) => {$(
        #[test]
        fn $test() {
            hold($group);
        }
    )*};
}

hold! {
    all_that_is_missing_at_once: "all_at_once";
    build_folders: "folders";
    what_a_kernel_must_have: "kernels";
    compilers_and_tools: "tools";
    nvidias_driver: "drivers";
    peer_memory_of_ib_core: "peer_memory";
    the_oldest_ofed_for_the_revocable_mode: "revocation";
    hosts_of_distributions: "hosts";
}

#[test]
fn what_installing_says() {
    for case in cases(Some("installing")) {
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

/// Tests a build in which no Module.symvers has a symbol of ib_core. The module declares ib_core's
/// functions as weak, and modpost accepts unknown weak symbols. The Kbuild therefore looks for the
/// symbols itself. This test runs the Kbuild with a make that imitates the necessary parts of
/// kbuild.
#[test]
fn a_build_without_symbols_of_ib_core_fails() {
    let kbuild =
        "obj := .\nCONFIG_SHELL := sh\ncmd = @set -e; $(cmd_$(1))\nif_changed = $(cmd)\nif_changed_dep =\n\
                  filechk = @$(filechk_$(1)) >$@\nFORCE:\ninclude $(src)/Kbuild\n";
    let place = Place::new();
    let repository = repository();
    fs::create_dir_all(place.0.join("src")).unwrap();
    fs::create_dir_all(place.0.join("rust-bindings")).unwrap();
    fs::write(place.0.join("Makefile"), kbuild).unwrap();
    let make_with = |target: &str, symbols: &[&str], warn: &str, src: &str, object: &str| {
        let lines: String = symbols.iter().map(|name| exported(name, "m")).collect();
        fs::write(place.0.join("Module.symvers"), lines).unwrap();
        let output = Command::new(system("make"))
            .arg(target)
            .arg(format!("src={src}"))
            .arg(format!("PEERMEM_OBJECT={object}"))
            .args(["objtree=.", "NM=nm"])
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
    let make = |target: &str, symbols: &[&str], warn: &str| {
        make_with(
            target,
            symbols,
            warn,
            repository.to_str().unwrap(),
            "other.o",
        )
    };
    let build = |symbols: &[&str], warn: &str| make("src/symbols.known", symbols, warn);
    let both = [
        "ib_register_peer_memory_client",
        "ib_unregister_peer_memory_client",
    ];
    let told = "ERROR: ib_unregister_peer_memory_client is in no Module.symvers; scripts/check says what to do\n";
    // The build itself makes a list of nvidia.ko's functions, so the test gives only ib_core's.
    assert_eq!(build(&both, ""), (true, String::new()));
    let (built, said) = build(&both[..1], "");
    assert!(!built && said.starts_with(told), "{said}");
    assert_eq!(build(&both[..1], "1"), (true, told.to_owned()));
    // A longer symbol that contains the name of a missing symbol does not count.
    let (built, _) = build(&[both[0], "fake_ib_unregister_peer_memory_client"], "");
    assert!(!built);
    // An object without the symbol of portable/abi.sh is refused.
    assemble_text(&place.0.join("other.o"), "peermem_abi_0 = 0\n");
    let (built, said) = make("src/nvidia_peermem.o", &both, "");
    let told = "ERROR: other.o was made from another source than this: make this object again\n";
    assert!(!built && said.starts_with(told), "{said}");
    // The advice for an object in portable/ differs.
    fs::create_dir_all(place.0.join("tree/portable")).unwrap();
    for name in ["Kbuild", "rust-bindings", "src", "portable/abi.sh"] {
        symlink(repository.join(name), place.0.join("tree").join(name)).unwrap();
    }
    let object = "tree/portable/x.o_shipped";
    fs::copy(place.0.join("other.o"), place.0.join(object)).unwrap();
    let (built, said) = make_with("src/nvidia_peermem.o", &both, "", "tree", object);
    let told = "ERROR: tree/portable/x.o_shipped was made from another source than this: \
                unpack the release again or delete x.o_shipped in portable/ and run make object\n";
    assert!(!built && said.contains(told), "{said}");
}

/// Checks that the compiler's arguments change with the contents of the headers and lists of
/// symbols of other packages. kbuild then compiles the objects again and runs modpost, even if the
/// files have old times.
#[test]
fn files_of_other_packages_are_in_the_command_lines() {
    let place = Place::new();
    let makefile = "include $(src)/Kbuild\nFORCE:\nshow:\n\t@echo '$(filter -DPEERMEM_NEIGHBOURS=%,$(ccflags-y))'\n";
    fs::write(place.0.join("Makefile"), makefile).unwrap();
    let shown = |symbols: &str| {
        let mut make = Command::new(system("make"));
        make.args(["-s", "show", "objtree=.", "obj=.", "KERNELRELEASE=7.9"])
            .arg(format!("src={}", repository().display()))
            .args(["NV_P2P_INCLUDE=nvidia", "PEER_MEM_INCLUDE=ofed/include"])
            .arg(format!("NV_SYMVERS={symbols}"))
            .env_remove("MAKEFLAGS")
            .current_dir(&place.0);
        output(&mut make)
    };
    let write = |file: &str, text: &str| {
        let file = place.0.join(file);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, text).unwrap();
    };
    let files = [
        "Module.symvers",
        "nvidia/nv-p2p.h",
        "nvidia.symvers",
        "ofed/include/rdma/peer_mem.h",
        "ofed/Module.symvers",
    ];
    for file in files {
        write(file, "old");
    }
    let before = shown("nvidia.symvers");
    for file in files {
        write(file, "new");
        assert_ne!(shown("nvidia.symvers"), before, "{file}");
        write(file, "old");
        assert_eq!(shown("nvidia.symvers"), before, "{file}");
    }
    // The list that the build itself makes must not count: this list changes during a build.
    let before = shown("");
    write("rust-bindings/nvidia.symvers", "new");
    assert_eq!(shown(""), before);
}

/// Makes a clone with these files, and returns the files whose checksum the object contains.
fn clone_with(place: &Place, files: &[&str]) -> Vec<String> {
    let abi = fs::read_to_string(repository().join("portable/abi.sh")).unwrap();
    let words = abi.split_whitespace().map(str::to_owned);
    let sources: Vec<_> = words
        .filter(|word| word.contains('/') && repository().join(word).is_file())
        .collect();
    assert!(sources.len() > 3, "{sources:?}");
    let files = files.iter().copied().chain(["portable/abi.sh"]);
    for file in files.chain(sources.iter().map(String::as_str)) {
        let to = place.0.join(file);
        fs::create_dir_all(to.parent().unwrap()).unwrap();
        fs::copy(repository().join(file), to).unwrap();
    }
    sources
}

/// Checks that make and `scripts/check` notice a change of each file whose checksum the object
/// contains. Otherwise a clone would keep an object that the Kbuild refuses.
#[test]
fn a_changed_source_makes_the_object_old() {
    let clone = Place::new();
    let sources = clone_with(
        &clone,
        &[
            "Makefile",
            "portable/object.sh",
            "rust-bindings/bindings.rs",
            "rust-bindings/driver.sh",
            "rust-bindings/installed.sh",
            "rust-bindings/release.sh",
            "rust-bindings/symvers.sh",
            "scripts/check",
            "scripts/host.sh",
        ],
    );
    fs::create_dir(clone.0.join(".git")).unwrap();
    let object = "portable/nvidia_peermem-x86_64.o_shipped";
    fs::write(clone.0.join(object), "x").unwrap();
    let touch = |file: &str| {
        let file = fs::File::options().append(true).open(clone.0.join(file));
        file.unwrap().set_modified(SystemTime::now()).unwrap();
    };
    let host = host("portable; variable PEERMEM_OBJECT");
    let place = host.write();
    let is_old = |touched: &str| {
        touch(touched);
        let said = host.run_script(&place, &["sh"], &clone.0.join("scripts/check"));
        let mut make = Command::new(system("make"));
        make.args(["-q", object]).env_remove("MAKEFLAGS");
        let status = make.current_dir(&clone.0).status().unwrap();
        (said.text.contains("older than its source"), status.code())
    };
    // A new header or C file counts, too.
    let new = ["src/new.h", "portable/new.h", "portable/new.c"];
    for file in new {
        fs::write(clone.0.join(file), "").unwrap();
    }
    for source in sources.iter().map(String::as_str).chain(new) {
        assert_eq!(is_old(object), (false, Some(0)), "before {source}");
        assert_eq!(is_old(source), (true, Some(1)), "{source}");
    }
}

/// Checks that a release contains no object of another source.
#[test]
fn a_release_has_objects_of_its_source() {
    let clone = Place::new();
    let sources = clone_with(&clone, &["packaging/dist", "dkms.conf", ".gitignore"]);
    let symbol = output(&mut Command::new(clone.0.join("portable/abi.sh")));
    let git = |arguments: &[&str]| {
        let mut git = Command::new(system("git"));
        git.args(["-c", "user.name=x", "-c", "user.email=x"]);
        output(git.arg("-C").arg(&clone.0).args(arguments));
    };
    git(&["init", "-q"]);
    git(&["add", "."]);
    git(&["commit", "-q", "-m", "x"]);
    // Without the packaging tools of Debian, only the archive is made.
    let tools = clone.0.join("build/tools");
    fs::create_dir_all(&tools).unwrap();
    for name in "sh dirname sed mktemp rm git tar cp grep cat cksum mkdir gzip sha256sum".split(' ')
    {
        symlink(system(name), tools.join(name)).unwrap();
    }
    let dist = || {
        let mut dist = Command::new(clone.0.join("packaging/dist"));
        let output = dist.env("PATH", &tools).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        (output.status.success(), said)
    };
    for (symbol, packed) in [(symbol.trim(), true), ("peermem_abi_0", false)] {
        for arch in ["x86_64", "aarch64"] {
            let object = format!("portable/nvidia_peermem-{arch}.o_shipped");
            let source = format!("{symbol} = 0\n");
            assemble_text(&clone.0.join(&object), &source);
        }
        let (success, said) = dist();
        assert_eq!(success, packed, "{said}");
        assert_eq!(said.contains("another source"), !packed, "{said}");
    }
    // Without a symbol, no object is packed.
    fs::remove_file(tools.join("cksum")).unwrap();
    let (success, said) = dist();
    assert!(!success && said.contains("cksum"), "{said}");
    fs::remove_file(clone.0.join(&sources[0])).unwrap();
    let abi = Command::new(clone.0.join("portable/abi.sh")).output();
    assert!(!abi.unwrap().status.success());
}

/// Checks that variables of the environment, such as a language, do not change an object. The
/// language changes the output of binutils.
#[test]
fn the_environment_does_not_change_an_object() {
    let place = Place::new();
    let script = |name: &str, text: &str| {
        let path = place.0.join(name);
        fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path
    };
    let portable = repository().join("portable");
    for name in ["objdump", "nm"] {
        let real = system(name);
        script(
            &format!("x-{name}"),
            &format!("[ \"$LC_ALL\" != C ] || exec {} \"$@\"", real.display()),
        );
    }
    let object = place.0.join("object.o");
    assemble_text(&object, "nop\n");
    let mut inspect = Command::new(portable.join("inspect.sh"));
    inspect.arg(&object).arg(place.0.join("x-"));
    output(inspect.env("LC_ALL", "de_DE.UTF-8"));

    // A stand-in for rustc that makes empty files, and prints its arguments.
    let library = place.0.join("lib/rustlib/src/rust/library/core/src");
    fs::create_dir_all(&library).unwrap();
    fs::write(library.join("lib.rs"), "").unwrap();
    fs::write(library.join("../Cargo.toml"), "").unwrap();
    let rustc = format!(
        "case $* in --version) echo rustc 1.96.0; exit ;; *sysroot) echo {}; exit ;; esac\n\
         echo \"$@\"; for word; do case $word in --emit=link=*) : >\"${{word##*=}}\" ;; esac; done",
        place.0.display()
    );
    let object = Command::new(portable.join("object.sh"))
        .arg("x86_64")
        .arg(place.0.join("out.o"))
        .env("RUSTC", script("rustc", &rustc))
        .env("ROOT", "kunit/peermem_kunit.rs")
        .output()
        .unwrap();
    let said = String::from_utf8(object.stdout).unwrap();
    assert!(said.contains("/../src/nvidia_peermem.rs\n"), "{said}");
}

/// Checks that symbol versions are read from the installed driver on a kernel with
/// `CONFIG_MODVERSIONS`. The versions are values of symbols, or the contents of a section that
/// symbols point into.
#[test]
fn versions_of_an_installed_driver() {
    const VALUES: &str = ".globl __crc_nvidia_a\n__crc_nvidia_a = 0x9f12a0b4\n.text\nnop\n";
    const SECTION: &str =
        ".section __kcrctab_gpl, \"a\"\n.long 1, 2, 3, 4, 5\n__crc_nvidia_a: .long 0x9f12a0b4\n";
    let symbols = repository().join("rust-bindings/symvers.sh");
    let lines = |root: &Path, release: &str, export: &str| {
        let words = [release, export, "nvidia_a", "nvidia_b"];
        output(Command::new(&symbols).args(words).env("PROBE_ROOT", root))
    };
    for source in [VALUES, SECTION] {
        let place = Place::new();
        let modules = place.0.join("lib/modules/6.1.0");
        fs::create_dir_all(&modules).unwrap();
        assemble_text(&modules.join("nvidia.ko"), source);
        let mut depmod = Command::new(system("depmod"));
        output(depmod.arg("-b").arg(&place.0).arg("6.1.0"));
        for export in ["EXPORT_SYMBOL", "EXPORT_SYMBOL_GPL"] {
            assert_eq!(
                lines(&place.0, "6.1.0", export),
                format!("0x9f12a0b4\tnvidia_a\tnvidia\t{export}\t\n")
            );
            assert_eq!(lines(&place.0, "6.2.0", export), "");
            assert_eq!(lines(&place.0, "", export).lines().count(), 2);
        }
        // kbuild sets OBJDUMP. If this program is missing, the build must stop.
        let mut unreadable = Command::new(&symbols);
        unreadable.args(["6.1.0", "EXPORT_SYMBOL", "nvidia_a"]);
        unreadable
            .env("PROBE_ROOT", &place.0)
            .env("OBJDUMP", "no-such-objdump");
        assert!(!unreadable.output().unwrap().status.success());
    }
}

/// Checks that the cases trigger every check, because a check that no case triggers could be dead.
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
    for case in cases(None) {
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

/// Returns the place where the Kbuild finds OFED on this host, and the lists of symbols that the
/// Kbuild finds. Runs the Kbuild with a make that imitates the necessary parts of kbuild.
fn found_by_the_kbuild(host: &Host, source: &str, machine: &str, arguments: &[&str]) -> String {
    let place = host.write();
    let root = place.root();
    let kbuild = fs::read_to_string(repository().join("Kbuild")).unwrap();
    let here = format!("{}/usr/src/ofa_kernel", root.display());
    fs::write(
        place.0.join("Kbuild"),
        kbuild.replace("/usr/src/ofa_kernel", &here),
    )
    .unwrap();
    let makefile = "include Kbuild\nFORCE:\nfound:\n\
                    \t@echo '$(PEER_MEM_INCLUDE) $(filter %/Module.symvers,$(KBUILD_EXTRA_SYMBOLS))'\n";
    fs::write(place.0.join("Makefile"), makefile).unwrap();
    let mut make = Command::new(system("make"));
    make.args(["-s", "found", "obj=.", "CONFIG_SHELL=sh"])
        .args(arguments)
        .arg(format!("src={}", repository().display()))
        .env("PROBE_ROOT", &root)
        .arg(format!("KERNELRELEASE={}", host.release))
        .arg(format!("SRCARCH={source}"))
        .arg(format!("UTS_MACHINE={machine}"))
        .env_remove("MAKEFLAGS")
        .current_dir(&place.0);
    // No link of a host leads outside its root, so the output has the names that the Kbuild uses.
    output(&mut make)
        .trim()
        .replace(&root.display().to_string(), "")
}

/// Checks that the Kbuild and the script find the same OFED, because each of them looks for OFED
/// independently.
#[test]
fn the_script_and_the_kbuild_find_the_same_ofed() {
    for (mut host, source, machine) in [
        (host("complete"), "x86", "x86_64"),
        (host("grace"), "arm64", "aarch64"),
    ] {
        host.change("without usr/src/ofa_kernel");
        let release = host.release.clone();
        let folders = [
            format!("{source}/{release}"),
            format!("{machine}/{release}"),
            release,
            "default".to_owned(),
        ];
        let places = folders.iter().flat_map(|folder| {
            ["ofa_kernel-dkms", "ofa_kernel"].map(|home| format!("usr/src/{home}/{folder}"))
        });
        let places: Vec<String> = places.collect();
        let is_found = |host: &Host, place: &str| {
            let said = host.check(&["sh"]);
            let row = format!("in ib_uverbs, by /{place}/Module.symvers\n");
            assert!(said.text.contains(&row), "{place}:\n{}", said.text);
            assert_eq!(
                found_by_the_kbuild(host, source, machine, &["NV_P2P_INCLUDE="]),
                format!("/{place}/include /{place}/include/../Module.symvers")
            );
        };
        // Adds the places in order of increasing precedence, so that each new place hides the
        // earlier ones.
        for place in places.iter().rev() {
            is_found(host.change(&format!("ofed_in {place}")), place);
        }
        // Dangling links that OFED's DKMS package left must not hide a folder of lower precedence.
        for (index, place) in places.iter().enumerate() {
            let mut host = host.clone();
            for other in &places {
                host.change(&format!("without {other}"));
            }
            host.change(&format!("ofed_in {place}"));
            for before in &places[..index] {
                host.change(&format!("link {before} /usr/src/removed"));
            }
            is_found(&host, place);
        }
        // A link to the folder of another kernel counts if this kernel has no ib_core, or uses the
        // ib_core of the other kernel.
        let other = "7.1.0-1-other";
        let place = format!("usr/src/ofa_kernel/{machine}/{other}");
        for other in &places {
            host.change(&format!("without {other}"));
        }
        host.change(&format!("ofed_in {place}"));
        let arguments = ["NV_P2P_INCLUDE="];
        let by_default = "/usr/src/ofa_kernel/default/include /usr/src/ofa_kernel/default/include/../Module.symvers";
        for (link, target, found) in [
            (
                "usr/src/ofa_kernel/default",
                format!("/{place}"),
                by_default,
            ),
            (
                "lib/modules/{R}/kernel/ib_core.ko",
                "/lib/modules/here/ib_core.ko".to_owned(),
                "",
            ),
            (
                "lib/modules/{R}/weak-updates/ib_core.ko",
                format!("/lib/modules/{other}/extra/ib_core.ko"),
                by_default,
            ),
        ] {
            // Links are relative, because the root of the host is a folder.
            let up = "../".repeat(link.matches('/').count());
            host.change(&format!("link {link} {up}{}", &target[1..]));
            let said = found_by_the_kbuild(&host, source, machine, &arguments);
            assert_eq!(said, found, "{link}");
        }
    }
}

/// Checks that the symbols' versions come from the installed nvidia.ko. A list of symbols below
/// /usr/src may be that of another driver.
#[test]
fn the_kbuild_reads_versions_from_the_installed_driver() {
    let list = "file usr/src/nvidia-595.45.04/Module.symvers {NVIDIA_SYMBOLS}";
    let host = host(&format!("complete; {list}; without usr/src/ofa_kernel"));
    let mut without = host.clone();
    without.change("without lib/modules/{R}/updates; without lib/modules/{R}/modules.dep");
    let listed = "/usr/src/nvidia-595.45.04/nvidia/../Module.symvers";
    let mut open = without.clone();
    open.change("flavours kernel-open");
    let listed_by_open = "/usr/src/nvidia-595.45.04/kernel-open/nvidia/../Module.symvers";
    for (host, argument, found) in [
        (&host, "CONFIG_MODVERSIONS=y", ""),
        (&host, "CONFIG_MODVERSIONS=", listed),
        (&without, "CONFIG_MODVERSIONS=y", listed),
        (&open, "CONFIG_MODVERSIONS=y", listed_by_open),
    ] {
        let said = found_by_the_kbuild(host, "x86", "x86_64", &[argument]);
        assert_eq!(said.trim(), found, "{argument}");
    }
}

#[test]
fn what_is_ok_goes_unsaid_on_request() {
    let said = host("complete; argument -q").check(&["sh"]);
    assert_eq!(
        said.text,
        format!("peermem-rs for Linux {UBUNTU}\nIt can be built.\n")
    );
    let said = host("complete; without-tool ld; argument -q").check(&["sh"]);
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

/// Checks that driver.sh finds the headers for every name of the driver's module. The Kbuild passes
/// only the kernel's release to driver.sh. Debian's driver packages have modules of other names.
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
        let put = |version: &str, inside: &str| {
            let folder = place.0.join(format!("usr/src/nvidia-{version}/{inside}"));
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join("nv-p2p.h"), "").unwrap();
            format!("{}\n", folder.display())
        };
        put("600.1", "nvidia");
        let asked = |arguments: &[&str]| {
            let driver = repository().join("rust-bindings/driver.sh");
            let output = Command::new(driver)
                .args(arguments)
                .env("PROBE_ROOT", &place.0)
                .output()
                .unwrap();
            String::from_utf8(output.stdout).unwrap()
        };
        // The first two folders are those of NVIDIA's driver container.
        for inside in ["kernel/nvidia", "kernel-open/nvidia", "nvidia"] {
            let wanted = put("580.1", inside);
            assert_eq!(asked(&[UBUNTU]), wanted, "{name}");
        }
        assert_eq!(asked(&["-l", UBUNTU]), "NVIDIA\n", "{name}");
        // The module belongs to another kernel.
        assert_eq!(asked(&["-l", "6.2.0"]), "", "{name}");
    }
}

/// Runs the Kbuild for this host's kernel and driver, with a makefile that imitates the necessary
/// parts of kbuild. Returns the build and the value of `PEERMEM_NO_GPL_ONLY`, or the error.
fn selected_by_the_kbuild(host: &Host, arguments: &[&str]) -> String {
    let place = host.write();
    let makefile = "obj := .\nCONFIG_SHELL := sh\ninclude $(src)/Kbuild\nFORCE:\nselected:\n\
                    \t@echo $(PEERMEM_BUILD) $(PEERMEM_NO_GPL_ONLY)\n";
    fs::write(place.0.join("Makefile"), makefile).unwrap();
    let options = host.config.iter();
    let output = Command::new(system("make"))
        .args(["-s", "selected", "objtree=."])
        .args(["NV_P2P_INCLUDE=", "PEER_MEM_INCLUDE="])
        .arg(format!("src={}", repository().display()))
        .arg(format!("KERNELRELEASE={}", host.release))
        .arg(format!("VERSION={}", &host.release[..1]))
        .args(options.map(|(option, value)| format!("CONFIG_{option}={value}")))
        .args(arguments)
        .env("PROBE_ROOT", place.root())
        .env_remove("MAKEFLAGS")
        .current_dir(&place.0)
        .output()
        .unwrap();
    String::from_utf8([output.stdout, output.stderr].concat()).unwrap()
}

/// Checks that the Kbuild refuses a build that cannot work, and that the error is one sentence.
#[test]
fn a_build_that_cannot_work_is_refused_by_the_kbuild() {
    let no_types = "this kernel checks the types of functions that are called by pointer (CONFIG_CFI), and the object \
                    of the portable build has no such types";
    for (operations, argument, sentence) in [
        ("; set CFI y", "PEERMEM_BUILD=portable", no_types),
        ("; set CFI_CLANG y", "PEERMEM_BUILD=portable", no_types),
        (
            "",
            "PEERMEM_BUILD=other",
            "PEERMEM_BUILD is in-tree or portable, not 'other'",
        ),
        (
            "",
            "PEERMEM_NO_GPL_ONLY=1",
            "PEERMEM_NO_GPL_ONLY=1 needs PEERMEM_BUILD=portable",
        ),
    ] {
        let host = host(&format!("complete{operations}"));
        let said = selected_by_the_kbuild(&host, &[argument]);
        let is_refused = said.ends_with(&format!(": *** {sentence}.  Stop.\n"));
        assert!(
            is_refused && said.lines().count() == 1,
            "{operations}: {said}"
        );
    }
}

/// Checks the arguments of `make`, and the reason for the selected build. Also checks that the
/// Kbuild selects the same build, unless an argument or a tool decides.
#[test]
fn the_selected_build_and_its_reason() {
    // Columns: operations, the build, and the reason.
    let table = "\
| in-tree | this kernel has Rust
; without-tool bindgen | portable PEERMEM_NO_GPL_ONLY= | this kernel has Rust, and the in-tree build lacks bindgen
; nvidia 595.45.04@NVIDIA | portable PEERMEM_NO_GPL_ONLY=1 | nvidia.ko is the proprietary flavour
; argument PEERMEM_NO_GPL_ONLY=1 | portable PEERMEM_NO_GPL_ONLY=1 | PEERMEM_NO_GPL_ONLY=1
; nvidia 595.45.04@NVIDIA; set CFI y | in-tree | this kernel has Rust
; nvidia 595.45.04@NVIDIA; on_arm64 | in-tree | this kernel has Rust
 6.12.9-15-generic | portable PEERMEM_NO_GPL_ONLY= | TOO OLD
 6.12.9-15-generic; nvidia 595.45.04@NVIDIA | portable PEERMEM_NO_GPL_ONLY=1 | TOO OLD
 6.12.9-15-generic; nvidia 595.45.04@NVIDIA; on_arm64 | portable PEERMEM_NO_GPL_ONLY= | TOO OLD
 6.12.9-15-generic; argument PEERMEM_NO_GPL_ONLY=1 | portable PEERMEM_NO_GPL_ONLY=1 | TOO OLD
 6.12.9-15-generic; nvidia 595.45.04@NVIDIA; argument PEERMEM_NO_GPL_ONLY= | portable PEERMEM_NO_GPL_ONLY= | TOO OLD";
    for row in table.lines() {
        let columns: Vec<&str> = row.split('|').collect();
        let operations = columns[0].trim_end().replace('@', "|");
        let why = columns[2].replace(
            "TOO OLD",
            "Linux 6.12 has no Rust interfaces for the in-tree build",
        );
        let host = host(&format!("complete{operations}; file object x; argument -b"));
        let said = host.check(&["sh"]);
        let line = format!("PEERMEM_BUILD={} ({})\n", columns[1].trim(), why.trim());
        assert_eq!((said.status, said.text), (Some(0), line), "{operations}");
        if !operations.contains("tool") && !operations.contains("argument") {
            let build = columns[1].replace("PEERMEM_NO_GPL_ONLY=", "");
            let selected = selected_by_the_kbuild(&host, &[]);
            assert_eq!(selected.trim(), build.trim(), "{operations}");
        }
    }
}

/// Checks that `scripts/check -l`, which an installation runs, examines the installed module,
/// wherever the module was compiled.
#[test]
fn an_installation_checks_the_installed_module() {
    for (field, licence, loads) in [
        ("driver_flavour=proprietary", "NVIDIA", true),
        ("driver_flavour=proprietary", "Dual MIT/GPL", true),
        ("name=nvidia_peermem", "NVIDIA", false),
        ("name=nvidia_peermem", "Dual MIT/GPL", true),
    ] {
        let host = host(&format!(
            "complete; nvidia 595.45.04|{licence}; argument -l"
        ));
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

/// Checks that a module is found with or without the index. depmod runs after an installation, and
/// its index may be outdated.
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
        let mut installed = Command::new(repository().join("rust-bindings/installed.sh"));
        installed.args(["6.1.0", "none", "nvidia", "other"]);
        let path = output(installed.env("PROBE_ROOT", &place.0));
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
    // The file named by the index was replaced, the index names other files, or there is no index.
    for index in ["updates/nvidia.ko: a.ko\n", "kernel/nvidia-drm.ko:\n", ""] {
        assert!(found(index).contains("/nvidia.ko"), "{index}");
    }
}

/// Tests headers whose link to the metadata for Rust is dangling. The script then makes a folder
/// with links to the headers, and to the metadata in a separate package. Nothing is compiled.
#[test]
fn a_dangling_link_to_metadata_is_replaced() {
    let mut host =
        host("hwe; system ln; system mkdir; system mv; system sha256sum; tool id 0; argument -m");
    let place = host.write();
    let kept = "var/lib/peermem-rs/headers";
    let folder = format!("{kept}/{}", host.release);
    let create = |path: &str| fs::create_dir_all(place.root().join(path)).unwrap();
    // Makes folders of removed kernels. Also makes the `.new` folder of an installed kernel, which
    // looks as if another process were still filling it.
    create(&format!("{kept}/6.1.0"));
    create(&format!("{kept}/6.2.0.new"));
    create(&format!("{kept}/7.3.0.new"));
    create("lib/modules/7.3.0");
    let said = host.run(&place, &["sh"]);
    let note = format!(
        "peermem-rs: the headers of {} have no metadata for Rust at the expected path: made /{folder}, with links to them and \
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
    assert_eq!(left, [host.release.as_str(), "7.3.0.new"]);
    // kbuild finds everything that it reads through the folder. A second run makes no other folder.
    for path in [
        "include/config/auto.conf",
        "scripts/target.json",
        "rust/libkernel.rmeta",
    ] {
        assert!(place.root().join(&folder).join(path).is_file(), "{path}");
    }
    let again = host.run(&place, &["sh"]);
    assert_eq!((again.text, again.errors.as_str()), (said.text, ""));
    // Repeats the check without -m. The Makefile asks for the folder in this way.
    host.arguments.clear();
    let again = host.run(&place, &["sh"]);
    assert!(again.text.contains(&row), "{}", again.text);

    // If the folder cannot be made, the module cannot be built.
    host.change("fails mkdir; argument -m");
    let advice = "and scripts/headers says above why it could not link to them.\n";
    let said = host.check(&["sh"]);
    assert!(said.text.contains(advice), "{}", said.text);
    assert_eq!(said.status, Some(1));
}

/// Tests a source whose version is not that of the headers' package.
#[test]
fn metadata_that_cannot_be_made_is_missing() {
    let said = host("debian; file usr/src/linux-source-7.3.tar.xz x; argument -m").check(&["sh"]);
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

/// Checks that metadata for arm64 need no 32-bit compiler. The kernel's preparation also makes a
/// vDSO for 32-bit programs, and only this vDSO needs a 32-bit compiler.
#[test]
fn metadata_are_made_on_arm64_without_a_32_bit_compiler() {
    // Debian's package of headers names the 32-bit compiler, and this name overrides any other.
    metadata_are_made_on_arm64(host("debian_on_arm64"));
    metadata_are_made_on_arm64(host("debian_on_arm64; without {K}/.kernelvariables"));
}

fn metadata_are_made_on_arm64(mut host: Host) {
    let crates = CRATES.join(" ");
    // Imitates arch/arm64/Makefile, which uses the value in auto.conf. A second make writes
    // auto.conf, and does not read .kernelvariables. The second make fails if .kernelvariables
    // names another compiler.
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
    for (path, text) in [("Makefile", &*makefile), ("Kconfig", kconfig)] {
        host.add(
            &format!("usr/src/linux-7.3/{path}"),
            Entry::Text(text.to_owned()),
        );
    }
    host.change(
        "file {K}/Module.symvers 0x00000000\\t_RNvX\\tvmlinux\\tEXPORT_SYMBOL_GPL\\t\\n; set COMPAT_VDSO y; \
         configuration {K}/.config; system comm; system diff; system ln; system mkdir; system mv; system nproc; \
         system sha256sum; system wc; tool id 0; argument -m",
    );
    let place = host.write();
    let source = place.root().join("usr/src/linux-7.3");
    host.change(&format!("argument SOURCE={}", source.display()));
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

/// Checks that Ubuntu's source must be named. Ubuntu's source packages are not named after the
/// kernel's series, and linux-nvidia has no source package.
#[test]
fn ubuntus_source_must_be_named() {
    let host = host("grace; tool dpkg-query linux-headers-7.3.0-1004-nvidia-64k: x; argument -m");
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
    let said = host("complete; argument --help").check(&["sh"]);
    assert_eq!((said.status, said.text.as_str()), (Some(2), ""));
    assert!(said.errors.starts_with("usage: "), "{}", said.errors);
}
