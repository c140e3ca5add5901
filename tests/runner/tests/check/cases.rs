// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! The hosts, and what must be said of each: the status follows from it.

use crate::{case, exported, Case, Host, Row, CRATES, EXTERN_CRATES, P2P_HEADER, PEER_HEADER};

/// A host on which nothing is missing. Its layout is Ubuntu's, whose headers lie in two packages and have Rust's part in a
/// third; no Ubuntu has this kernel yet.
pub(crate) fn complete(release: &'static str) -> Host {
    let mut host = Host {
        release,
        headers: format!("usr/src/linux-headers-{release}"),
        ..Host::default()
    };
    host.kernel("rustc 1.93.1 (01f6ddf75 2026-02-11) (built from a source tarball)")
        .set(
            "CC_VERSION_TEXT",
            "\"x86_64-linux-gnu-gcc-15 (Ubuntu 15.2.0-16ubuntu1) 15.2.0\"",
        )
        .file(
            "etc/os-release",
            "NAME=\"Ubuntu\"\nID=ubuntu\nID_LIKE=debian\n",
        )
        .link("lib/modules/{R}/build", "/{K}")
        .file("lib/modules/{R}/modules.dep", "updates/dkms/nvidia.ko:\n")
        .nvidia("Dual MIT/GPL", "595.45.04")
        .ofed("default")
        .file("sys/module/nvidia/version", "595.45.04\n")
        .file("proc/driver/nvidia/version", OPEN)
        .file(
            "sys/kernel/security/lockdown",
            "[none] integrity confidentiality\n",
        )
        .tool(
            "bindgen",
            "bindgen 0.72.1\nClang: Ubuntu clang version 21.1.8",
        )
        .tool("gcc", "gcc (Ubuntu 15.2.0-16ubuntu1) 15.2.0");
    for name in CRATES {
        let path = format!("{{K}}/rust/{name}");
        let path = host.place(&path);
        let crate_ = host.files.remove(&path).unwrap();
        host.files.insert(
            format!("usr/src/linux-lib-rust-{release}/rust/{name}"),
            crate_,
        );
    }
    host.link("{K}/rust", "../linux-lib-rust-{R}/rust");
    host
}

pub(crate) const UBUNTU: &str = "7.3.0-15-generic";

const OPEN: &str =
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  595.45.04  Release Build\n";
const PROPRIETARY: &str =
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  595.45.04  Release Build\n";

const TOO_OLD: &str =
    "No kernel before 5.10 is served: install one of 5.10 or newer, and its headers.";
const NO_OBJECT: (&str, &str) = (
    "object|missing|no /object",
    "Take a release, which has it, or install rust-src, the source of rustc's library, to make it.",
);

/// A build folder that is missing or was never prepared.
pub(crate) fn folders() -> Vec<Case> {
    let mut cases = vec![
        case("nothing is missing", &complete(UBUNTU), &[]),
        case(
            "no headers",
            complete(UBUNTU).without("lib/modules/{R}/build"),
            &[(
                "build folder|missing|no /lib/modules/{R}/build",
                "This kernel's headers are not here: run 'apt install linux-headers-{R}', or name the kernel's build \
                 folder with KDIR=.",
            )],
        ),
        case(
            "no headers, of a kernel that does not run",
            complete(UBUNTU).argument("KVER=7.3.1"),
            &[
                (
                    "build folder|missing|no /lib/modules/7.3.1/build",
                    "This kernel's headers are not here: run 'apt install linux-headers-7.3.1', or name the kernel's \
                     build folder with KDIR=.",
                ),
                (
                    "Rust metadata|missing|no rust/libcore.rmeta and 9 more",
                    "They are in a package of their own: run 'apt install linux-lib-rust-7.3.1'.",
                ),
                no_driver(&format!(
                    "The module loads beside nvidia.ko alone: {OPEN_FLAVOUR}, version 535 or newer."
                )),
            ],
        ),
        case(
            "another folder by name",
            complete(UBUNTU)
                .without("lib/modules/{R}/build")
                .argument("KDIR=/{K}/"),
            &[],
        ),
    ];
    for (what, file) in [
        ("Makefile", "Makefile"),
        ("include/config", "include/config/auto.conf"),
        ("include/generated/rustc_cfg", "include/generated/rustc_cfg"),
        ("scripts/basic/fixdep", "scripts/basic/fixdep"),
        ("scripts/mod/modpost", "scripts/mod/modpost"),
    ] {
        cases.push(case(
            &format!("a build folder without {file}"),
            complete(UBUNTU).without(&format!("{{K}}/{what}")),
            &[(
                &format!("build folder|missing|/{{K}}, without {file}"),
                "This kernel tree was not prepared: run 'make modules_prepare' in it, or name another with KDIR=.",
            )],
        ));
    }
    cases
}

const IN_LIB_RUST: &str =
    "They are in a package of their own: run 'apt install linux-lib-rust-{R}'.";
const LINK_TO_NOTHING: &str =
    "Rust metadata|missing|/{K}/rust points to ../linux-lib-rust-{R}/rust, which is not there";

/// A host that has no headers of this kernel.
fn without_headers(release: &'static str, os: &str) -> Host {
    let mut host = Host {
        release,
        ..complete(UBUNTU)
    };
    host.file("etc/os-release", os)
        .module(
            "lib/modules/{R}/updates/dkms/nvidia.ko",
            "Dual MIT/GPL",
            "595.45.04",
        )
        .file("proc/sys/kernel/osrelease", "{R}\n");
    host
}

const TRIXIE: &str = "ID=debian\nVERSION_CODENAME=trixie\n";
const RHEL: &str = "ID=\"rhel\"\nID_LIKE=\"centos fedora\"\n";

const NO_RUSTC: &str =
    "The Rust compiler is not here: run 'dnf install rust', or name it with RUSTC=.";
const NO_BINDGEN_ON_FEDORA: &str =
    "The build needs bindgen 0.71.1 or newer: run 'dnf install bindgen-cli', or run \
                                    'cargo install bindgen-cli' and name it with BINDGEN=.";
const PROPRIETARY_FLAVOUR: &str =
    "This is the proprietary flavour, and Linux loads no module beside it that uses what it exports to GPL modules alone, \
     as this build does: build it again beside this driver, without PEERMEM_BUILD= and PEERMEM_NO_GPL_ONLY=, or install \
     NVIDIA's open kernel modules (nvidia-open in NVIDIA's repositories).";
const PROPRIETARY_SERVED: &str =
    "This is the proprietary flavour. Beside it the module has no tracepoints and no memory_peers of its own, maps more \
     slowly, and has its files in /proc/driver/nvidia-peermem: docs/kernels.md, The proprietary driver.";

/// A host that lacks several things hears of all of them, and first whether its kernel can serve at all.
pub(crate) fn all_at_once() -> Vec<Case> {
    // Two of what all hosts of one kind lack: a driver of the other flavour, and OFED.
    let closed = |host: &mut Host| {
        host.nvidia("NVIDIA", "595.45.04")
            .file("proc/driver/nvidia/version", PROPRIETARY)
            .file("sys/module/nvidia/version", "595.45.04\n")
            .clone()
    };
    let proprietary = (
        "nvidia.ko|useless|595.45.04, licence NVIDIA",
        PROPRIETARY_FLAVOUR,
    );
    let no_peers = (
        "peer memory|missing|no ib_register_peer_memory_client",
        NO_OFED,
    );

    let of_old = closed(&mut bare(in_modules(
        "5.9.16-200.fc33.x86_64",
        "rustc 1.91.0 (f8297e351 2025-10-28) (Fedora 1.91.0-1.fc43)",
        "gcc (GCC) 15.2.1 20260123 (Red Hat 15.2.1-7)",
        "NAME=\"Fedora Linux\"\nID=fedora\n",
    )));
    let too_old = [
        ("kernel version|missing|{R}", TOO_OLD),
        (
            "C compiler|missing|no gcc",
            "The C compiler is not here: run 'dnf install gcc'.",
        ),
        (
            "linker|missing|no ld",
            "The linker is not here: run 'dnf install binutils'.",
        ),
        (
            "make|missing|none",
            "kbuild needs GNU make: run 'dnf install make'.",
        ),
        (
            "nvidia.ko|remark|595.45.04, licence NVIDIA",
            PROPRIETARY_SERVED,
        ),
        (
            "peer memory|missing|no ib_register_peer_memory_client",
            NO_OFED_ON_NEW_KERNEL,
        ),
    ];

    let mut lacking = closed(&mut complete("7.2.0-15-generic"));
    lacking
        .argument("PEERMEM_BUILD=in-tree")
        .without("usr/src/ofa_kernel")
        .without_tool("rustc")
        .without_tool("bindgen")
        .without_tool("gcc");
    let five = [
        (
            "rustc|missing|no rustc",
            "The Rust compiler that made this kernel, rustc 1.93.1 (01f6ddf75 2026-02-11) (built from a source \
             tarball), is not here: run 'apt install rustc-1.93', or name it with RUSTC=.",
        ),
        (
            "bindgen|missing|no bindgen",
            "The build needs bindgen 0.71.1 or newer: run 'apt install bindgen', or run 'cargo install bindgen-cli' and \
             name it with BINDGEN=.",
        ),
        (
            "C compiler|missing|no gcc",
            "This kernel was built by x86_64-linux-gnu-gcc-15 (Ubuntu 15.2.0-16ubuntu1) 15.2.0: run 'apt install gcc-15'.",
        ),
        proprietary,
        no_peers,
    ];
    let mut unknown = five;
    unknown[0].1 =
        "The Rust compiler is not here: run 'apt install rustc', or name it with RUSTC=.";
    unknown[2].1 = "The C compiler is not here: run 'apt install gcc'.";
    let no_headers = (
        "build folder|missing|no /lib/modules/{R}/build",
        "This kernel's headers are not here: run 'apt install linux-headers-{R}', or name the kernel's build folder with \
         KDIR=.",
    );
    let no_metadata = (
        "Rust metadata|missing|no rust/libcore.rmeta and 9 more",
        IN_LIB_RUST,
    );
    let stripped = lacking
        .clone()
        .without("lib/modules/{R}/build")
        .without("{K}")
        .without("usr/src/linux-lib-rust-{R}")
        .clone();

    vec![
        case("5.9 with headers and little else", &of_old, &too_old),
        case(
            "5.9 without headers",
            of_old.clone().without("lib/modules/{R}/build").without("{K}"),
            &too_old,
        ),
        case(
            "5.4 on Ubuntu",
            &complete("5.4.0-15-generic"),
            &[(
                "kernel version|missing|{R}",
                TOO_OLD,
            )],
        ),
        case(
            "Debian 13 with its first kernel, and no headers",
            without_headers("6.12.57+deb13-amd64", TRIXIE).file("object", "x"),
            &[(
                "build folder|missing|no /lib/modules/{R}/build",
                "This kernel's headers are not here: run 'apt install linux-headers-{R}', or name the kernel's build \
                 folder with KDIR=.",
            )],
        ),
        case("five things are missing", &lacking, &five),
        case(
            "five things and the headers, and the configuration beside the kernel",
            stripped.clone().configuration("boot/config-{R}"),
            &[&[no_headers, no_metadata][..], &five[..]].concat(),
        ),
        case(
            "five things, the headers and all that is known of the kernel",
            &stripped,
            &[&[no_headers, no_metadata][..], &unknown[..]].concat(),
        ),
        case(
            "no headers, and a kernel without Rust",
            complete("7.2.0-300.fc44.x86_64")
                .without("lib/modules/{R}/build")
                .without("{K}")
                .unset("RUST")
                .configuration("lib/modules/{R}/config")
                .file("object", "x"),
            &[no_headers],
        ),
        case(
            "no headers, and peer memory among the modules",
            complete(UBUNTU)
                .without("lib/modules/{R}/build")
                .without("{K}")
                .without("usr/src/ofa_kernel")
                .file(
                    "lib/modules/{R}/modules.symbols",
                    "alias symbol:ib_register_peer_memory_client ib_uverbs\n",
                ),
            &[no_headers],
        ),
    ]
}

/// What the kernel must have been built with and left behind.
pub(crate) fn kernels() -> Vec<Case> {
    let mut cases = vec![
        case(
            "a kernel that is too old",
            &complete("5.9.9-15-generic"),
            &[(
                "kernel version|missing|{R}",
                TOO_OLD,
            )],
        ),
        case("the oldest that it runs on", &complete("7.2.0-15-generic"), &[]),
        case(
            "a kernel on which it never ran, and that has two crates less",
            complete("7.1.9-15-generic")
                .file(
                    "{K}/scripts/Makefile.build",
                    "\t-Zunstable-options --extern pin_init --extern kernel \\\n",
                )
                .without("usr/src/linux-lib-rust-{R}/rust/libzerocopy.rmeta")
                .without("usr/src/linux-lib-rust-{R}/rust/libzerocopy_derive.so"),
            &[(
                "kernel version|remark|{R}",
                "The module was run on 7.2 to 7.3, and never on 7.1.",
            )],
        ),
        case(
            "a kernel whose modules want a crate that is new",
            complete(UBUNTU).file(
                "{K}/scripts/Makefile.build",
                "\t--extern kernel --extern newest \\\n",
            ),
            &[("Rust metadata|missing|no rust/libnewest.*", IN_LIB_RUST)],
        ),
        case(
            "a build folder beside its source",
            complete(UBUNTU)
                .without("{K}/scripts/Makefile.build")
                .link("{K}/source", "/usr/src/linux")
                .file("usr/src/linux/scripts/Makefile.build", EXTERN_CRATES)
                .without("usr/src/linux-lib-rust-{R}/rust/libzerocopy.rmeta"),
            &[("Rust metadata|missing|no rust/libzerocopy.*", IN_LIB_RUST)],
        ),
        case(
            "a newer kernel",
            &complete("7.10.0-15-generic"),
            &[(
                "kernel version|remark|{R}",
                "The module was run on 7.2 to 7.3, and never on 7.10.",
            )],
        ),
        case(
            "arm64, whose target rustc knows",
            complete(UBUNTU)
                .unset("X86_64")
                .set("ARM64", "y")
                .without("{K}/scripts/target.json"),
            &[ON_ARM64],
        ),
        case(
            "another architecture",
            complete(UBUNTU).unset("X86_64"),
            &[(
                "architecture|missing|another",
                "The build knows x86-64 and arm64 alone: use a machine of these.",
            )],
        ),
        case(
            "a kernel without modules",
            complete(UBUNTU).unset("MODULES"),
            &[(
                "CONFIG_MODULES|missing|not set",
                "This kernel loads no modules: use one with CONFIG_MODULES=y.",
            )],
        ),
        case(
            "a kernel without Rust",
            complete(UBUNTU)
                .unset("RUST")
                .unset("RUSTC_VERSION_TEXT")
                .without("usr/src/linux-lib-rust-{R}")
                .without("{K}/scripts/target.json"),
            &[NO_OBJECT],
        ),
        case(
            "a kernel without Rust, and an object",
            complete(UBUNTU)
                .unset("RUST")
                .unset("RUSTC_VERSION_TEXT")
                .without("usr/src/linux-lib-rust-{R}")
                .without("{K}/scripts/target.json")
                .without("{K}/include/generated/rustc_cfg")
                .without_tool("rustc")
                .without_tool("bindgen")
                .file("object", "x"),
            &[],
        ),
        case(
            "a kernel without Rust, an older one, and neither an object nor a compiler",
            complete("6.1.0-37-amd64").unset("RUST").without_tool("rustc"),
            &[(
                "object|missing|no /object",
                "Take a release, which has it, or make it: run 'apt install rustc', 1.85 or newer, and rust-src, the \
                 source of its library.",
            )],
        ),
        case(
            "a kernel without Rust, and all that an object is made with",
            complete("6.1.0-37-amd64")
                .unset("RUST")
                .file("usr/lib/rustlib/src/rust/library/core/src/lib.rs", "//")
                .script(
                    "rustc",
                    "#!/bin/sh\n[ \"$1\" = --print ] && echo \"$PROBE_ROOT/usr\" || echo 'rustc 1.85.0'\n",
                ),
            &[("object|remark|not made yet", "'make module' makes it with rustc 1.85.0.")],
        ),
        case(
            "a kernel without Rust, told to build in-tree",
            complete(UBUNTU).unset("RUST").argument("PEERMEM_BUILD=in-tree"),
            &[(
                "CONFIG_RUST|missing|not set",
                "This kernel was built without Rust: leave PEERMEM_BUILD=in-tree away.",
            )],
        ),
        case(
            "a kernel with Rust, no compiler for it, and an object",
            complete(UBUNTU).without_tool("rustc").file("object", "x"),
            &[],
        ),
        case(
            "the same, told to build in-tree",
            complete(UBUNTU)
                .without_tool("rustc")
                .file("object", "x")
                .argument("PEERMEM_BUILD=in-tree"),
            &[(
                "rustc|missing|no rustc",
                "The Rust compiler that made this kernel, rustc 1.93.1 (01f6ddf75 2026-02-11) (built from a source \
                 tarball), is not here: run 'apt install rustc-1.93', or name it with RUSTC=.",
            )],
        ),
        case(
            "a kernel of before Rust, told to build in-tree",
            complete("6.12.9-15-generic").argument("PEERMEM_BUILD=in-tree"),
            &[(
                "kernel version|missing|{R}",
                "The in-tree build needs the Rust interfaces of 7.0: leave PEERMEM_BUILD=in-tree away.",
            )],
        ),
        case(
            "a kernel that checks the types of functions called by pointer",
            complete("6.12.9-15-generic")
                .set("CFI_CLANG", "y")
                .file("object", "x"),
            &[(
                "CONFIG_CFI_CLANG|missing|y",
                "This kernel checks the types of functions that are called by pointer, and the object has none: use the \
                 in-tree build, or a kernel without it.",
            )],
        ),
        case(
            "no metadata at all",
            complete(UBUNTU).without("usr/src/linux-lib-rust-{R}"),
            &[(LINK_TO_NOTHING, IN_LIB_RUST)],
        ),
        case(
            "no metadata, and it shall be made, which is Debian's way alone",
            complete(UBUNTU)
                .without("usr/src/linux-lib-rust-{R}")
                .tool("dpkg-query", "linux-headers-7.3.0-15")
                .argument("-m"),
            &[(LINK_TO_NOTHING, IN_LIB_RUST)],
        ),
        case(
            "a link to itself in place of the metadata",
            complete(UBUNTU)
                .without("{K}/rust")
                .link("{K}/rust", "rust"),
            &[(
                "Rust metadata|remark|/{K}/rust points to rust, which is not there",
                "The metadata are in /usr/src/linux-lib-rust-{R}: 'make module' builds in a folder of links to the \
                 headers and to them.",
            )],
        ),
        case(
            "a link to nothing, and a crate less where the metadata are",
            hwe().without("usr/src/linux-lib-rust-{R}/rust/libffi.rmeta"),
            &[
                (NEVER_ON_7_0, NEVER_ON_7_0_ADVICE),
                ("Rust metadata|missing|no rust/libffi.rmeta", IN_LIB_RUST),
            ],
        ),
        case(
            "a kernel that puts its helpers into modules, and not into its headers",
            complete(UBUNTU).set("RUST_INLINE_HELPERS", "y"),
            &[(
                "Rust metadata|missing|no rust/helpers/helpers_module.bc",
                IN_LIB_RUST,
            )],
        ),
        case(
            "no target specification",
            complete(UBUNTU).without("{K}/scripts/target.json"),
            &[(
                "Rust metadata|missing|no scripts/target.json",
                IN_LIB_RUST,
            )],
        ),
        case(
            "versions of symbols",
            complete(UBUNTU)
                .set("MODVERSIONS", "y")
                .set("GENDWARFKSYMS", "y")
                .file("usr/src/nvidia-595.45.04/Module.symvers", &nvidia_symbols()),
            &[],
        ),
        case(
            "versions of symbols, and none of the driver's",
            complete(UBUNTU).set("MODVERSIONS", "y"),
            &[
                (
                    "nvidia symbols|missing|no versions",
                    "This kernel wants versions of all symbols, and no nvidia.ko 535 or newer is installed for it: install the \
                     driver first, or have NV_SYMVERS= name the Module.symvers of its build.",
                ),
            ],
        ),
        case(
            "tests for a kernel that cannot run them",
            complete(UBUNTU).set("KUNIT", "m").variable("PEERMEM_KUNIT", "1"),
            &[(
                "CONFIG_KUNIT|missing|m",
                "PEERMEM_KUNIT=1 needs CONFIG_KUNIT=y: leave it away, for only the tests are built with it.",
            )],
        ),
        case(
            "tests for a kernel that can run them",
            complete(UBUNTU).set("KUNIT", "y").variable("PEERMEM_KUNIT", "1"),
            &[],
        ),
        case(
            "signed modules alone",
            complete(UBUNTU).set("MODULE_SIG_FORCE", "y"),
            &[(
                "module signature|remark|CONFIG_MODULE_SIG_FORCE=y",
                "Sign the module with a key that this kernel trusts (docs/install.md, Secure Boot), or it is refused.",
            )],
        ),
        case(
            "a machine that is locked down",
            complete(UBUNTU).file(
                "sys/kernel/security/lockdown",
                "none [integrity] confidentiality\n",
            ),
            &[(
                "module signature|remark|lockdown: integrity",
                "Sign the module with a key that this kernel trusts (docs/install.md, Secure Boot), or it is refused.",
            )],
        ),
        case(
            "another kernel runs: what it is and has loaded does not count",
            complete(UBUNTU)
                .file("proc/sys/kernel/osrelease", "6.1.0\n")
                .file("sys/kernel/security/lockdown", "none [integrity]\n")
                .file("sys/module/nvidia/version", "535.1\n")
                .file("sys/module/nv_peer_mem/refcnt", "0\n")
                .argument("KVER={R}"),
            &[],
        ),
    ];
    for name in CRATES {
        cases.push(case(
            &format!("no {name}"),
            complete(UBUNTU).without(&format!("usr/src/linux-lib-rust-{{R}}/rust/{name}")),
            &[(
                &format!("Rust metadata|missing|no rust/{}", told(name)),
                IN_LIB_RUST,
            )],
        ));
    }
    cases
}

/// The name of a crate that is missing: of those that kbuild's scripts name, the kind is not known.
fn told(name: &str) -> String {
    match name.split_once('.') {
        Some((crate_, _)) if crate_.starts_with("libzerocopy") => format!("{crate_}.*"),
        _ => name.to_owned(),
    }
}

fn nvidia_symbols() -> String {
    "0x12345678\tnvidia_p2p_get_pages_persistent\tnvidia\tEXPORT_SYMBOL_GPL\t\n".to_owned()
}

pub(crate) fn tools() -> Vec<Case> {
    vec![
        case(
            "no rustc",
            complete(UBUNTU).without_tool("rustc"),
            &[(
                "rustc|missing|no rustc",
                "The Rust compiler that made this kernel, rustc 1.93.1 (01f6ddf75 2026-02-11) (built from a source \
                 tarball), is not here: run 'apt install rustc-1.93', or name it with RUSTC=.",
            )],
        ),
        case(
            "rustup's rustc, of the same version",
            complete(UBUNTU).tool("rustc", "rustc 1.93.1 (01f6ddf75 2026-02-11)"),
            &[(
                "rustc|missing|rustc 1.93.1 (01f6ddf75 2026-02-11)",
                "This kernel's Rust was compiled by rustc 1.93.1 (01f6ddf75 2026-02-11) (built from a source tarball), \
                 and no other can use it: run 'apt install rustc-1.93', or name it with RUSTC=.",
            )],
        ),
        case(
            "another rustc, and the right one by name",
            complete(UBUNTU)
                .tool(
                    "rustc-1.93",
                    "rustc 1.93.1 (01f6ddf75 2026-02-11) (built from a source tarball)",
                )
                .tool("rustc", "rustc 1.85.1 (4eb161250 2025-03-15)")
                .argument("RUSTC=rustc-1.93"),
            &[],
        ),
        case(
            "a rustc by name in the environment, where kbuild does not look",
            complete(UBUNTU)
                .tool("other", "rustc 1.85.1 (4eb161250 2025-03-15)")
                .variable("RUSTC", "other"),
            &[],
        ),
        case(
            "a rustc that fails",
            complete(UBUNTU).fails("rustc"),
            &[(
                "rustc|missing|rustc, which does not tell its version",
                "The Rust compiler that made this kernel, rustc 1.93.1 (01f6ddf75 2026-02-11) (built from a source \
                 tarball), is not here: run 'apt install rustc-1.93', or name it with RUSTC=.",
            )],
        ),
        case(
            "metadata of another compiler than the configuration's, which decides",
            complete(UBUNTU).set("RUSTC_VERSION_TEXT", "\"rustc 1.92.0 (ded5c06cf 2025-12-08)\""),
            &[],
        ),
        case(
            "no bindgen",
            complete(UBUNTU).without_tool("bindgen"),
            &[(
                "bindgen|missing|no bindgen",
                "The build needs bindgen 0.71.1 or newer: run 'apt install bindgen', or run 'cargo install bindgen-cli' \
                 and name it with BINDGEN=.",
            )],
        ),
        case(
            "bindgen by name",
            complete(UBUNTU)
                .without_tool("bindgen")
                .tool("bindgen-0.71", "bindgen 0.71.1\nClang: clang version 17.0.1")
                .argument("BINDGEN=bindgen-0.71"),
            &[],
        ),
        case(
            "a bindgen that is too old",
            complete(UBUNTU).tool("bindgen", "bindgen 0.71.0\nClang: clang version 19.1.7"),
            &[(
                "bindgen|missing|0.71.0",
                "It must be 0.71.1 or newer: run 'cargo install bindgen-cli', and name what it made with BINDGEN=.",
            )],
        ),
        case(
            "a bindgen that fails",
            complete(UBUNTU).fails("bindgen"),
            &[(
                "bindgen|missing|bindgen, which does not tell its version",
                "The build needs bindgen 0.71.1 or newer: run 'apt install bindgen', or run 'cargo install bindgen-cli' \
                 and name it with BINDGEN=.",
            )],
        ),
        case(
            "a bindgen without libclang",
            complete(UBUNTU).tool("bindgen", "bindgen 0.72.1"),
            &[(
                "libclang|missing|none that bindgen finds",
                "bindgen reads C by libclang: run 'apt install libclang-dev', or set LIBCLANG_PATH to the folder of \
                 libclang.so.",
            )],
        ),
        case(
            "a libclang that is too old",
            complete(UBUNTU).tool("bindgen", "bindgen 0.72.1\nClang: Debian clang version 17.0.0"),
            &[(
                "libclang|missing|17.0.0",
                "It must be 17.0.1 or newer: install a newer one, and set LIBCLANG_PATH to the folder of its libclang.so.",
            )],
        ),
        case(
            "a libclang that is too new for this bindgen",
            complete(UBUNTU).tool("bindgen", "bindgen 0.72.0\nClang: clang version 22.1.0"),
            &[(
                "libclang|remark|22.1.0",
                "The kernel warns that bindgen before 0.72.1 goes wrong with libclang 22 and newer.",
            )],
        ),
        case(
            "no gcc",
            complete(UBUNTU).without_tool("gcc"),
            &[(
                "C compiler|missing|no gcc",
                "This kernel was built by x86_64-linux-gnu-gcc-15 (Ubuntu 15.2.0-16ubuntu1) 15.2.0: run 'apt install \
                 gcc-15'.",
            )],
        ),
        case(
            "another gcc, of which kbuild warns",
            complete(UBUNTU).tool("gcc", "gcc (Ubuntu 14.2.0-4ubuntu2) 14.2.0"),
            &[],
        ),
        case(
            "a gcc that lacks an option",
            complete(UBUNTU).gcc_12(),
            &[(
                "C compiler|missing|gcc (Ubuntu 12.3.0-1ubuntu1) 12.3.0",
                "This kernel was built by x86_64-linux-gnu-gcc-15 (Ubuntu 15.2.0-16ubuntu1) 15.2.0, and needs \
                 -fmin-function-alignment, which this one lacks: run 'apt install gcc-15', and name it with CC=.",
            )],
        ),
        case(
            "a gcc that lacks an option nobody asks for",
            complete(UBUNTU)
                .gcc_12()
                .unset("CC_HAS_MIN_FUNCTION_ALIGNMENT")
                .set("CC_VERSION_TEXT", "\"gcc-12 (Ubuntu 12.3.0-1ubuntu1) 12.3.0\""),
            &[],
        ),
        case(
            "clang for a kernel of gcc's",
            complete(UBUNTU)
                .tool("clang", "Ubuntu clang version 21.1.8")
                .tool("ld.lld", "")
                .variable("LLVM", "1"),
            &[(
                "C compiler|missing|Ubuntu clang version 21.1.8",
                "This kernel was built by x86_64-linux-gnu-gcc-15 (Ubuntu 15.2.0-16ubuntu1) 15.2.0, and takes no \
                 compiler of another kind: build without CC= and with LLVM=.",
            )],
        ),
        case("a kernel of clang's", complete(UBUNTU).by_clang(""), &[]),
        case(
            "a kernel of clang's, and one of several",
            complete(UBUNTU).by_clang("-21").variable("LLVM", "-21"),
            &[],
        ),
        case(
            "a kernel of clang's, and clang by its version's name alone",
            complete(UBUNTU).by_clang("-21"),
            &[
                (
                    "C compiler|missing|no clang",
                    "This kernel was built by Ubuntu clang version 21.1.8: build with LLVM=-21, or run 'apt install clang'.",
                ),
                (
                    "linker|missing|no ld.lld",
                    "The linker is not here: build with LLVM=-21, or run 'apt install lld'.",
                ),
            ],
        ),
        case(
            "a kernel of clang's, and gcc by name",
            complete(UBUNTU).by_clang("").argument("CC=gcc"),
            &[(
                "C compiler|missing|gcc (Ubuntu 15.2.0-16ubuntu1) 15.2.0",
                "This kernel was built by Ubuntu clang version 21.1.8, and takes no compiler of another kind: build \
                 without CC= and with LLVM=1.",
            )],
        ),
        case(
            "a kernel of clang's, and no clang",
            complete(UBUNTU)
                .by_clang("")
                .without_tool("clang")
                .without_tool("ld.lld"),
            &[
                (
                    "C compiler|missing|no clang",
                    "This kernel was built by Ubuntu clang version 21.1.8: run 'apt install clang'.",
                ),
                (
                    "linker|missing|no ld.lld",
                    "The linker is not here: run 'apt install lld'.",
                ),
            ],
        ),
        case(
            "a kernel of clang's, and a folder without it",
            complete(UBUNTU).by_clang("").variable("LLVM", "/opt/llvm/"),
            &[
                (
                    "C compiler|missing|no /opt/llvm/clang",
                    "This kernel was built by Ubuntu clang version 21.1.8: run 'apt install clang'.",
                ),
                (
                    "linker|missing|no /opt/llvm/ld.lld",
                    "The linker is not here: run 'apt install lld'.",
                ),
            ],
        ),
        case(
            "no linker",
            complete(UBUNTU).without_tool("ld"),
            &[(
                "linker|missing|no ld",
                "The linker is not here: run 'apt install binutils'.",
            )],
        ),
        case(
            "a cross compiler by name",
            complete(UBUNTU)
                .tool("x86_64-linux-gnu-gcc", "x86_64-linux-gnu-gcc (Ubuntu 15.2.0-16ubuntu1) 15.2.0")
                .tool("x86_64-linux-gnu-ld", "")
                .without_tool("gcc")
                .without_tool("ld")
                .variable("CROSS_COMPILE", "x86_64-linux-gnu-"),
            &[],
        ),
        case(
            "no make",
            complete(UBUNTU).without_tool("make"),
            &[(
                "make|missing|none",
                "kbuild needs GNU make: run 'apt install make'.",
            )],
        ),
        case(
            "another make",
            complete(UBUNTU).tool("make", "bmake 20240808"),
            &[(
                "make|missing|bmake 20240808",
                "kbuild needs GNU make: run 'apt install make'.",
            )],
        ),
    ]
}

const OPEN_FLAVOUR: &str =
    "install NVIDIA's open kernel modules (nvidia-open in NVIDIA's repositories)";

/// A host that takes the portable build, and lacks nothing.
fn portable() -> Host {
    complete("6.12.9-15-generic").file("object", "x").clone()
}

pub(crate) fn drivers() -> Vec<Case> {
    let not_for_it = format!(
        "This is the proprietary flavour, and Linux loads no module beside it that uses what it exports to GPL modules \
         alone, as this build does: build it again beside this driver, without PEERMEM_BUILD= and PEERMEM_NO_GPL_ONLY=, or {OPEN_FLAVOUR}."
    );
    vec![
        case(
            "no driver: the project's own header and list serve",
            complete(UBUNTU)
                .without("lib/modules/{R}/updates")
                .without("lib/modules/{R}/modules.dep")
                .without("usr/src/nvidia-595.45.04")
                .without("sys/module/nvidia")
                .without("proc/driver"),
            &[(
                "nvidia.ko|useless|none for this kernel",
                &format!("The module loads beside nvidia.ko alone: {OPEN_FLAVOUR}, version 535 or newer."),
            )],
        ),
        case(
            "the proprietary flavour, and an in-tree build that is asked for",
            complete(UBUNTU)
                .nvidia("NVIDIA", "595.45.04")
                .file("proc/driver/nvidia/version", PROPRIETARY)
                .argument("PEERMEM_BUILD=in-tree"),
            &[(
                "nvidia.ko|useless|595.45.04, licence NVIDIA",
                PROPRIETARY_FLAVOUR,
            )],
        ),
        case(
            "an in-tree build without symbols for GPL modules only",
            complete(UBUNTU)
                .argument("PEERMEM_BUILD=in-tree")
                .argument("PEERMEM_NO_GPL_ONLY=1"),
            &[(
                "build|missing|in-tree, with PEERMEM_NO_GPL_ONLY=",
                "Only the portable build can do without symbols for GPL modules only: leave PEERMEM_NO_GPL_ONLY= away.",
            )],
        ),
        case(
            "the proprietary flavour, and a kernel that takes no portable build",
            complete(UBUNTU)
                .nvidia("NVIDIA", "595.45.04")
                .set("CFI", "y"),
            &[(
                "nvidia.ko|useless|595.45.04, licence NVIDIA",
                &format!(
                    "This is the proprietary flavour, and Linux loads no module beside it that uses what it exports to GPL \
                     modules alone, as this build does: {OPEN_FLAVOUR}."
                ),
            )],
        ),
        case(
            "the proprietary flavour, and a kernel with Rust, but no object and no source of Rust's library",
            complete(UBUNTU).nvidia("NVIDIA", "595.45.04"),
            &[
                NO_OBJECT,
                ("nvidia.ko|remark|595.45.04, licence NVIDIA", PROPRIETARY_SERVED),
            ],
        ),
        case(
            "Debian's package of the open flavour",
            complete(UBUNTU)
                .without("lib/modules/{R}/updates")
                .without("lib/modules/{R}/modules.dep")
                .module("lib/modules/{R}/updates/dkms/nvidia-current-open.ko", "Dual MIT/GPL", "595.45.04"),
            &[],
        ),
        case(
            "Debian's package of the proprietary flavour",
            complete(UBUNTU)
                .without("lib/modules/{R}/updates")
                .without("lib/modules/{R}/modules.dep")
                .module("lib/modules/{R}/updates/dkms/nvidia-current.ko", "NVIDIA", "595.45.04")
                .file("proc/driver/nvidia/version", PROPRIETARY)
                .file("object", "x"),
            &[("nvidia.ko|remark|595.45.04, licence NVIDIA", PROPRIETARY_SERVED)],
        ),
        case(
            "a driver from elsewhere, loaded alone",
            complete(UBUNTU).without("lib/modules/{R}/updates").without("lib/modules/{R}/modules.dep"),
            &[],
        ),
        case(
            "a proprietary driver from elsewhere, loaded alone",
            complete(UBUNTU)
                .without("lib/modules/{R}/updates")
                .without("lib/modules/{R}/modules.dep")
                .file("proc/driver/nvidia/version", PROPRIETARY)
                .file("object", "x"),
            &[("nvidia.ko|remark|595.45.04, licence NVIDIA", PROPRIETARY_SERVED)],
        ),
        case(
            "the proprietary flavour, and the portable build",
            portable().nvidia("NVIDIA", "595.45.04"),
            &[("nvidia.ko|remark|595.45.04, licence NVIDIA", PROPRIETARY_SERVED)],
        ),
        case(
            "the proprietary flavour, and a portable build that is told to ignore it",
            portable()
                .nvidia("NVIDIA", "595.45.04")
                .argument("PEERMEM_NO_GPL_ONLY="),
            &[("nvidia.ko|useless|595.45.04, licence NVIDIA", &not_for_it)],
        ),
        case(
            "a proprietary driver that is too old, and the portable build",
            portable().nvidia("NVIDIA", "470.82.01"),
            &[
                (
                    "nvidia.ko|useless|470.82.01, licence NVIDIA",
                    "It lacks nvidia_p2p_get_pages_persistent(): install version 535 or newer.",
                ),
            ],
        ),
        case(
            "a driver that modinfo cannot read",
            complete(UBUNTU).file("lib/modules/{R}/updates/dkms/nvidia.ko", "garbage"),
            &[(
                "nvidia.ko|remark|of unknown version, licence unknown",
                "Its flavour could not be read: see that 'modinfo -F license nvidia' says Dual MIT/GPL, for beside the \
                 proprietary one only the portable build loads.",
            )],
        ),
        case(
            "a driver that is too old, and its header",
            complete(UBUNTU)
                .without("usr/src/nvidia-595.45.04")
                .nvidia("Dual MIT/GPL", "530.41.03")
                .file("usr/src/nvidia-530.41.03/nvidia/nv-p2p.h", "")
                .file("sys/module/nvidia/version", "530.41.03\n"),
            &[
                (
                    "nvidia.ko|useless|530.41.03, licence Dual MIT/GPL",
                    &format!("It lacks nvidia_p2p_get_pages_persistent(): {OPEN_FLAVOUR}, version 535 or newer."),
                ),
                (
                    "nv-p2p.h|missing|/usr/src/nvidia-530.41.03/nvidia/nv-p2p.h",
                    "It is not of driver 535 or newer: install that, or build with NV_P2P_INCLUDE= for the project's own.",
                ),
            ],
        ),
        case(
            "two drivers' headers, of which the installed one's count",
            complete(UBUNTU).file("usr/src/nvidia-600.1/nvidia/nv-p2p.h", ""),
            &[],
        ),
        case(
            "a folder by name, with a header",
            complete(UBUNTU)
                .without("usr/src/nvidia-595.45.04")
                .file("opt/nvidia/nv-p2p.h", P2P_HEADER)
                .variable("NV_P2P_INCLUDE", "/opt/nvidia/"),
            &[],
        ),
        case(
            "a folder by name, without a header",
            complete(UBUNTU).argument("NV_P2P_INCLUDE=/opt/nvidia"),
            &[(
                "nv-p2p.h|missing|/opt/nvidia/nv-p2p.h",
                "It is not of driver 535 or newer: install that, or build with NV_P2P_INCLUDE= for the project's own.",
            )],
        ),
        case(
            "a header of no use, and none by name",
            complete(UBUNTU)
                .file("usr/src/nvidia-595.45.04/nvidia/nv-p2p.h", "")
                .variable("NV_P2P_INCLUDE", ""),
            &[],
        ),
        case(
            "a list of the driver's that lacks what is called",
            complete(UBUNTU).file(
                "usr/src/nvidia-595.45.04/Module.symvers",
                "0x12345678\tnvidia_p2p_get_pages\tnvidia\tEXPORT_SYMBOL\t\n",
            ),
            &[(
                "nvidia symbols|missing|no nvidia_p2p_get_pages_persistent in /usr/src/nvidia-595.45.04/Module.symvers",
                "Have NV_SYMVERS= name the Module.symvers of a driver 535 or newer, or nothing, for the project's own \
                 list.",
            )],
        ),
        case(
            "a list by name that is not there",
            complete(UBUNTU).variable("NV_SYMVERS", "/opt/Module.symvers"),
            &[(
                "nvidia symbols|missing|no nvidia_p2p_get_pages_persistent in /opt/Module.symvers",
                "Have NV_SYMVERS= name the Module.symvers of a driver 535 or newer, or nothing, for the project's own \
                 list.",
            )],
        ),
        case(
            "a list by name, for versions of symbols",
            complete(UBUNTU)
                .set("MODVERSIONS", "y")
                .set("GENDWARFKSYMS", "y")
                .file("opt/Module.symvers", &nvidia_symbols())
                .variable("NV_SYMVERS", "/opt/Module.symvers"),
            &[],
        ),
        case(
            "nv_peer_mem is installed, and nothing is indexed",
            complete(UBUNTU).module("lib/modules/{R}/extra/nv_peer_mem.ko", "Dual BSD/GPL", "1.3"),
            &[(
                "nv_peer_mem|remark|/lib/modules/{R}/extra/nv_peer_mem.ko",
                "It and this module exclude each other: remove its package (nvidia-peer-memory).",
            )],
        ),
        case(
            "nv_peer_mem is in modules.dep",
            complete(UBUNTU)
                .module("lib/modules/{R}/updates/dkms/nv_peer_mem.ko.zst", "Dual BSD/GPL", "1.3")
                .file(
                    "lib/modules/{R}/modules.dep",
                    "updates/dkms/nvidia.ko:\nupdates/dkms/nv_peer_mem.ko.zst: updates/dkms/nvidia.ko\n",
                ),
            &[(
                "nv_peer_mem|remark|/lib/modules/{R}/updates/dkms/nv_peer_mem.ko.zst",
                "It and this module exclude each other: remove its package (nvidia-peer-memory).",
            )],
        ),
        case(
            "nv_peer_mem is loaded",
            complete(UBUNTU).file("sys/module/nv_peer_mem/refcnt", "0\n"),
            &[(
                "nv_peer_mem|remark|loaded",
                "It and this module exclude each other: remove its package (nvidia-peer-memory), and unload it ('rmmod \
                 nv_peer_mem').",
            )],
        ),
    ]
}

/// What is said where the module is installed: the build is over then.
pub(crate) fn installing() -> Vec<Case> {
    let symbols = "lib/modules/{R}/modules.symbols";
    let with_peer_memory = "alias symbol:ib_register_peer_memory_client ib_uverbs\n";
    let mut whole = complete(UBUNTU);
    whole.argument("-l").file(symbols, with_peer_memory);
    let changed = |change: fn(&mut Host) -> &mut Host| change(&mut whole.clone()).clone();
    vec![
        case("nothing to say", &whole, &[]),
        case(
            "a build folder that is gone, and compilers that are",
            &changed(|host| host.without("{K}").without_tool("rustc")),
            &[],
        ),
        case(
            "a kernel for which dkms builds nothing, and says little",
            complete("5.4.0-15-generic").argument("-l"),
            &[(
                "kernel version|missing|{R}",
                TOO_OLD,
            )],
        ),
        case(
            "a kernel on which it never ran, at installing",
            complete("7.1.0-15-generic").argument("-l"),
            &[],
        ),
        case(
            "the proprietary flavour, at installing what was built for the open one",
            &changed(|host| {
                host.nvidia("NVIDIA", "595.45.04")
                    .argument("PEERMEM_BUILD=in-tree")
            }),
            &[(
                "nvidia.ko|useless|595.45.04, licence NVIDIA",
                PROPRIETARY_FLAVOUR,
            )],
        ),
        case(
            "the proprietary flavour, at installing the portable build",
            portable().nvidia("NVIDIA", "595.45.04").argument("-l"),
            &[],
        ),
        case(
            "an ib_core without, and nv_peer_mem, at installing",
            &changed(|host| {
                host.file("lib/modules/{R}/modules.symbols", "alias symbol:ib_umem_get ib_uverbs\n")
                    .file("sys/module/nv_peer_mem/refcnt", "0\n")
            }),
            &[
                (
                    "nv_peer_mem|remark|loaded",
                    "It and this module exclude each other: remove its package (nvidia-peer-memory), and unload it \
                     ('rmmod nv_peer_mem').",
                ),
                (
                    "ib_core|useless|none of this kernel has peer memory",
                    "The modules of OFED are not installed for it: install MLNX_OFED or DOCA-OFED for this kernel, or boot \
                     one that has them.",
                ),
            ],
        ),
        case(
            "a kernel that wants signatures, at installing",
            &changed(|host| host.set("MODULE_SIG_FORCE", "y")),
            &[(
                "module signature|remark|CONFIG_MODULE_SIG_FORCE=y",
                "Sign the module with a key that this kernel trusts (docs/install.md, Secure Boot), or it is refused.",
            )],
        ),
    ]
}

const NO_OFED_ON_NEW_KERNEL: &str = "Mainline's ib_core never had the interface, and there is no OFED: install MLNX_OFED \
                                     or DOCA-OFED for the new kernel, with what it puts into /usr/src/ofa_kernel.";
const NO_OFED: &str = "Mainline's ib_core never had the interface, and there is no OFED: install MLNX_OFED or DOCA-OFED \
                       for this kernel, with what it puts into /usr/src/ofa_kernel.";

const OLD_OFED: &str = "It is not of MLNX_OFED 5.4-3.0.3.0 or newer, or DOCA-OFED, and the build knows no older form: install \
                        one of these, or have PEER_MEM_INCLUDE= name the include folder of the ib_core in use.";

/// A host whose kernel's own ib_core has peer memory.
fn own_peer_memory() -> Host {
    let mut host = complete(UBUNTU);
    host.without("usr/src/ofa_kernel")
        .file("{K}/include/rdma/peer_mem.h", PEER_HEADER)
        .file(
            "{K}/Module.symvers",
            &exported("ib_register_peer_memory_client", "ib_core"),
        );
    host
}

pub(crate) fn peer_memory() -> Vec<Case> {
    vec![
        case(
            "no peer memory anywhere",
            complete(UBUNTU).without("usr/src/ofa_kernel"),
            &[(
                "peer memory|missing|no ib_register_peer_memory_client",
                NO_OFED,
            )],
        ),
        case(
            "no peer memory anywhere, and modpost is told to warn",
            complete(UBUNTU)
                .without("usr/src/ofa_kernel")
                .argument("KBUILD_MODPOST_WARN=1"),
            &[(
                "peer memory|useless|no ib_register_peer_memory_client",
                NO_OFED,
            )],
        ),
        case(
            "peer memory in the kernel itself",
            &own_peer_memory(),
            &[],
        ),
        case(
            "an old form of it in the kernel itself, whose sources lie elsewhere",
            complete(UBUNTU)
                .without("usr/src/ofa_kernel")
                .file("{K}/Makefile", "include /usr/src/linux/Makefile\n")
                .file("usr/src/linux/include/rdma/peer_mem.h", "")
                .file(
                    "{K}/Module.symvers",
                    &exported("ib_register_peer_memory_client", "ib_peer_mem"),
                ),
            &[(
                "peer_mem.h|missing|/usr/src/linux/include/rdma/peer_mem.h",
                OLD_OFED,
            )],
        ),
        case(
            "no list of the kernel's symbols",
            complete(UBUNTU)
                .without("usr/src/ofa_kernel")
                .without("{K}/Module.symvers"),
            &[(
                "peer memory|missing|no Module.symvers in /{K}",
                "The list of this kernel's symbols is not here: build the kernel to its end, or name another folder with \
                 KDIR=.",
            )],
        ),
        case(
            "OFED without its list of symbols",
            complete(UBUNTU).without("usr/src/ofa_kernel/default/Module.symvers"),
            &[(
                "peer memory|missing|no /usr/src/ofa_kernel/default/Module.symvers",
                "OFED's headers are here without its list of symbols: put the Module.symvers of OFED's build there.",
            )],
        ),
        case(
            "OFED whose list lacks the symbol",
            complete(UBUNTU).file(
                "usr/src/ofa_kernel/default/Module.symvers",
                &exported("ib_register_client", "ib_core"),
            ),
            &[(
                "peer memory|missing|no ib_register_peer_memory_client in /usr/src/ofa_kernel/default/Module.symvers",
                "This OFED was built without peer memory: install MLNX_OFED or DOCA-OFED for this kernel again, with it.",
            )],
        ),
        case(
            "an OFED that is too old",
            complete(UBUNTU).file("usr/src/ofa_kernel/default/include/rdma/peer_mem.h", ""),
            &[(
                "peer_mem.h|missing|/usr/src/ofa_kernel/default/include/rdma/peer_mem.h",
                OLD_OFED,
            )],
        ),
        case(
            "OFED by a link, as its packages have it",
            complete(UBUNTU)
                .without("usr/src/ofa_kernel")
                .ofed("x86_64/7.3")
                .link("usr/src/ofa_kernel/default", "/usr/src/ofa_kernel/x86_64/7.3"),
            &[],
        ),
        case(
            "OFED by DKMS since DOCA 3.2.0, with the links that its package makes",
            complete(UBUNTU)
                .without("usr/src/ofa_kernel")
                .ofed_in("usr/src/ofa_kernel-dkms/x86_64/{R}")
                .link("usr/src/ofa_kernel/x86_64/{R}", "/usr/src/ofa_kernel-dkms/x86_64/{R}")
                .link("usr/src/ofa_kernel/default", "/etc/alternatives/ofa_kernel_headers")
                .link("etc/alternatives/ofa_kernel_headers", "/usr/src/ofa_kernel/x86_64/{R}"),
            &[],
        ),
        case(
            "OFED by DKMS since DOCA 3.2.0, without any link",
            complete(UBUNTU)
                .without("usr/src/ofa_kernel")
                .ofed_in("usr/src/ofa_kernel-dkms/x86_64/{R}"),
            &[],
        ),
        case(
            "OFED by DKMS since DOCA 3.2.0, and links that lead nowhere",
            complete(UBUNTU)
                .without("usr/src/ofa_kernel")
                .ofed_in("usr/src/ofa_kernel-dkms/x86_64/{R}")
                .link("usr/src/ofa_kernel/x86_64/{R}", "/run/mellanox/drivers/usr/src/ofa_kernel")
                .link("usr/src/ofa_kernel/default", "default"),
            &[],
        ),
        case(
            "links alone, which lead nowhere",
            complete(UBUNTU)
                .without("usr/src/ofa_kernel")
                .link("usr/src/ofa_kernel/x86_64/{R}", "/usr/src/ofa_kernel-dkms/x86_64/{R}")
                .link("usr/src/ofa_kernel/default", "/etc/alternatives/ofa_kernel_headers"),
            &[(
                "peer memory|missing|no ib_register_peer_memory_client",
                NO_OFED,
            )],
        ),
        case(
            "OFED by DKMS for another kernel than the one that KDIR names",
            complete(UBUNTU)
                .without("usr/src/ofa_kernel")
                .file("proc/sys/kernel/osrelease", "7.2.0-9-generic\n")
                .ofed_in("usr/src/ofa_kernel-dkms/x86_64/7.2.0-9-generic")
                .argument("KDIR=/{K}"),
            &[(
                "peer memory|missing|no ib_register_peer_memory_client",
                NO_OFED,
            )],
        ),
        case(
            "OFED by DKMS, without its list of symbols",
            complete(UBUNTU)
                .ofed_in("usr/src/ofa_kernel-dkms/x86_64/{R}")
                .without("usr/src/ofa_kernel-dkms/x86_64/{R}/Module.symvers"),
            &[(
                "peer memory|missing|no /usr/src/ofa_kernel-dkms/x86_64/{R}/Module.symvers",
                "OFED's headers are here without its list of symbols: put the Module.symvers of OFED's build there.",
            )],
        ),
        case(
            "an ib_core by name",
            complete(UBUNTU)
                .without("usr/src/ofa_kernel")
                .file("opt/peer/include/rdma/peer_mem.h", PEER_HEADER)
                .file(
                    "opt/peer/Module.symvers",
                    &exported("ib_register_peer_memory_client", "ib_peer_mem"),
                )
                .argument("PEER_MEM_INCLUDE=/opt/peer/include/"),
            &[],
        ),
        case(
            "an ib_core by name, without a header",
            complete(UBUNTU)
                .file(
                    "opt/peer/Module.symvers",
                    &exported("ib_register_peer_memory_client", "ib_peer_mem"),
                )
                .argument("PEER_MEM_INCLUDE=/opt/peer/include"),
            &[(
                "peer_mem.h|missing|/opt/peer/include/rdma/peer_mem.h",
                OLD_OFED,
            )],
        ),
        case(
            "OFED, and none of it by name",
            complete(UBUNTU).variable("PEER_MEM_INCLUDE", ""),
            &[(
                "peer memory|missing|no ib_register_peer_memory_client",
                NO_OFED,
            )],
        ),
    ]
}

const OLD_REVOCATION: &str = "With persistent_api_support=0 a registration that fails can hang for ever in this ib_core, which \
                              then keeps its locks: use OFED 25.04 or newer, or the default mode.";

/// The ib_core of an OFED before 25.04 is none for the revocable mode.
pub(crate) fn revocation() -> Vec<Case> {
    let versions = [
        ("4.9-7.1.0", true),
        ("5.8-6.0.4", true),
        ("23.10-1.1.9", true),
        ("24.10-3.2.5.0", true),
        ("25.01-0.6.0", true),
        ("25.4", false),
        ("25.04-0.6.1", false),
        ("25.10-1.7.1", false),
        ("26.01", false),
        ("100.01", false),
        ("MLNX_OFED_LINUX-24.10-3.2.5.0", true),
        ("OFED-internal-25.01-0.6.0", true),
        ("OFED-internal-25.10-1.7.1", false),
        ("DOCA 2.9.3", true),
        ("DOCA_2.10.0", true),
        ("doca-ofed-3.0", false),
        ("doca-ofed-3.5", false),
        ("DOCA 10.0", false),
        ("doca-ofed-24.10", true),
        ("doca-ofed-26.01", false),
        ("3.4", false),
        // The kernel's own driver.
        (UBUNTU, false),
        ("unknown", false),
    ];
    let of = |version: &str, is_old| -> Vec<(String, String)> {
        let row = (format!("OFED|remark|{version}"), OLD_REVOCATION.to_owned());
        [row].into_iter().filter(|_| is_old).collect()
    };
    let mut cases = Vec::new();
    let mut add = |name: String, host: &Host, not_ok| {
        cases.push(Case {
            name,
            host: host.clone(),
            not_ok,
        });
    };
    for (version, is_old) in versions {
        add(
            format!("OFED {version}"),
            complete(UBUNTU).module(
                "lib/modules/{R}/updates/dkms/mlx5_core.ko",
                "Dual BSD/GPL",
                version,
            ),
            of(version, is_old),
        );
    }
    for name in ["mlx_compat", "ib_uverbs", "ib_core"] {
        let old = "24.10-1.1.4";
        add(
            format!("OFED by the version of {name}"),
            complete(UBUNTU).module(
                &format!("lib/modules/{{R}}/extra/mlnx-ofa_kernel/{name}.ko"),
                "GPL",
                old,
            ),
            of(old, true),
        );
        add(
            format!("OFED by the version of {name}, which is only loaded"),
            complete(UBUNTU).file(&format!("sys/module/{name}/version"), "23.10-0.5.5\n"),
            of("23.10-0.5.5", true),
        );
    }
    add(
        "OFED by ofed_info".to_owned(),
        complete(UBUNTU).tool("ofed_info", "MLNX_OFED_LINUX-5.8-1.1.2.1:"),
        of("MLNX_OFED_LINUX-5.8-1.1.2.1", true),
    );
    add(
        "OFED for the kernel that is built for, beside a newer one that is loaded".to_owned(),
        complete(UBUNTU)
            .file("proc/sys/kernel/osrelease", "7.2.0-9-generic\n")
            .file("sys/module/mlx5_core/version", "25.10-1.7.1\n")
            .module(
                "lib/modules/{R}/updates/dkms/mlx5_core.ko",
                "Dual BSD/GPL",
                "24.10-1.1.4",
            )
            .argument("KVER={R}"),
        of("24.10-1.1.4", true),
    );
    add(
        "an old OFED's driver beside peer memory of another's".to_owned(),
        own_peer_memory().file("sys/module/mlx5_core/version", "5.0-0\n"),
        Vec::new(),
    );
    cases
}

const LEFT_OUT: &str =
    "The headers packages here leave them out: unpack this kernel's own source, and name it in \
                        'scripts/headers -m SOURCE=…', which makes them.";
pub(crate) const ON_ARM64: Row<'static> = (
    "architecture|remark|arm64",
    "On arm64 the module was run in emulated machines only.",
);
const AMD64_ALONE: &str =
    "Ubuntu's package of them is for amd64 alone: unpack this kernel's own source ('apt source \
     linux-image-unsigned-{R}'), and name it in 'scripts/headers -m SOURCE=…', which makes them.";
const LEFT_OUT_BY_DEBIAN: &str =
    "Debian's headers packages leave them out: run 'apt install linux-source-7.3' (the version of \
                                  the headers), from which 'make module' makes them.";

/// Debian 13 with the kernel of its backports, stock: the headers are in three packages and have nothing of Rust's.
pub(crate) fn debian() -> Host {
    debian_of("7.3.4+deb13-amd64", "x86", "x86_64-linux-gnu-")
}

/// With this kernel, of the architecture that kbuild calls so, and whose tools have such a prefix.
fn debian_of(release: &'static str, architecture: &str, prefix: &str) -> Host {
    let mut host = Host {
        release,
        headers: format!("usr/src/linux-headers-{release}"),
        ..Host::default()
    };
    let rustc = "rustc 1.85.1 (4eb161250 2025-03-15) (built from a source tarball)";
    let gcc = format!("{prefix}gcc-14 (Debian 14.2.0-19) 14.2.0");
    host.kernel(rustc)
        .set("CC_VERSION_TEXT", &format!("\"{gcc}\""))
        .file("etc/os-release", "NAME=\"Debian GNU/Linux\"\nID=debian\n")
        // Debian's 6.1 has the version of its source there.
        .file("{K}/include/config/kernel.release", "7.3.4\n")
        .link("lib/modules/{R}/build", "/{K}")
        .file(
            "{K}/Makefile",
            "KBUILD_OUTPUT=/{K}\ninclude /usr/src/linux-headers-7.3.4+deb13-common/Makefile\n",
        )
        .file(
            "{K}/.kernelvariables",
            &format!(
                "override ARCH = {architecture}\nCC = $(if $(CCACHE),ccache) $(CROSS_COMPILE)gcc-14\n\
                 override CROSS_COMPILE = {prefix}\n"
            ),
        )
        .without("{K}/scripts")
        .link("{K}/scripts", "../../lib/linux-kbuild-7.3.4+deb13/scripts")
        .file("usr/lib/linux-kbuild-7.3.4+deb13/scripts/basic/fixdep", "")
        .file("usr/lib/linux-kbuild-7.3.4+deb13/scripts/mod/modpost", "")
        .file(
            "usr/lib/linux-kbuild-7.3.4+deb13/scripts/Makefile.build",
            EXTERN_CRATES,
        )
        .without("{K}/rust")
        .tool(&format!("{prefix}gcc-14"), &gcc)
        .without_tool("ld")
        .tool(&format!("{prefix}ld"), "")
        .tool(
            "bindgen",
            "bindgen 0.71.1\nClang: Debian clang version 19.1.7 (3)",
        );
    host
}

/// The same kernel for arm64, whose target rustc knows.
pub(crate) fn debian_on_arm64() -> Host {
    let mut host = debian_of("7.3.4+deb13-arm64", "arm64", "aarch64-linux-gnu-");
    host.on_arm64().file(
        "{K}/.kernelvariables",
        "override ARCH = arm64\nCC = $(if $(CCACHE),ccache) $(CROSS_COMPILE)gcc-14\n\
         override CROSS_COMPILE = aarch64-linux-gnu-\noverride CROSS_COMPILE_COMPAT = arm-linux-gnueabihf-\n\
         export CROSS_COMPILE_COMPAT\n",
    );
    host
}

/// Ubuntu's linux-nvidia for Grace, with pages of 64 KiB. There is no package of the metadata for arm64, and no link to one.
pub(crate) fn grace() -> Host {
    grace_of("7.3.0-1004-nvidia-64k")
}

fn grace_of(release: &'static str) -> Host {
    let mut host = complete(release);
    host.on_arm64()
        .without("{K}/rust")
        .without("{K}/scripts/target.json")
        .without("usr/src/linux-lib-rust-{R}")
        .set(
            "CC_VERSION_TEXT",
            "\"aarch64-linux-gnu-gcc-15 (Ubuntu 15.2.0-16ubuntu1) 15.2.0\"",
        )
        .without("usr/src/ofa_kernel")
        .ofed(&format!("aarch64/{release}"));
    host
}

/// Ubuntu 24.04 with its HWE kernel. Its source package has a name of its own, which is in the target of the headers' link to
/// the metadata, and not in the name of their package's folder.
pub(crate) fn hwe() -> Host {
    let mut host = complete("7.0.0-38-generic");
    host.without("{K}/rust")
        .link("{K}/rust", "../linux-hwe-7.0-lib-rust-{R}/rust");
    host
}

const NEVER_ON_7_0: &str = "kernel version|remark|{R}";
const NEVER_ON_7_0_ADVICE: &str = "The module was run on 7.2 to 7.3, and never on 7.0.";
const HWE_LINK: &str = "/{K}/rust points to ../linux-hwe-7.0-lib-rust-{R}/rust, which is not there";

/// A kernel whose headers are in one folder below /lib/modules.
fn in_modules(release: &'static str, rustc: &str, gcc: &str, os: &str) -> Host {
    let mut host = Host {
        release,
        headers: format!("usr/src/kernels/{release}"),
        ..Host::default()
    };
    host.kernel(rustc)
        .set("CC_VERSION_TEXT", &format!("\"{gcc}\""))
        .file("etc/os-release", os)
        .link("lib/modules/{R}/build", "/{K}")
        .tool("gcc", gcc)
        .tool("bindgen", "bindgen 0.72.1\nClang: clang version 21.1.8");
    host
}

/// Tools that a fresh machine lacks.
fn bare(mut host: Host) -> Host {
    for tool in ["rustc", "bindgen", "make"] {
        host.without_tool(tool);
    }
    host.tools
        .retain(|name, _| !name.contains("gcc") && !name.ends_with("ld"));
    host
}

fn fedora() -> Host {
    let mut host = in_modules(
        "7.2.0-300.fc44.x86_64",
        "rustc 1.94.0 (4a4ef493e 2026-03-02) (Fedora 1.94.0-1.fc44)",
        "gcc (GCC) 16.1.1 20260501 (Red Hat 16.1.1-1)",
        "NAME=\"Fedora Linux\"\nID=fedora\n",
    );
    host.set("KUNIT", "m")
        .without("{K}/rust")
        .without("{K}/scripts/target.json");
    host
}

/// A kernel-64k as RHEL 9 and 10 have it, but newer.
fn rhel_64k() -> Host {
    let mut host = in_modules(
        "7.3.0-1.el11.aarch64+64k",
        "rustc 1.94.0 (4a4ef493e 2026-03-02) (Red Hat 1.94.0-1.el11)",
        "gcc (GCC) 16.1.1 20260501 (Red Hat 16.1.1-1)",
        RHEL,
    );
    host.on_arm64().without("{K}/scripts/target.json");
    host
}

fn arch() -> Host {
    let mut host = in_modules(
        "7.3.2-lts",
        "rustc 1.96.0 (ac68faa20 2026-05-25) (Arch Linux rust 1:1.96.0-1)",
        "gcc (GCC) 16.1.1 20260430",
        "NAME=\"Arch Linux\"\nID=arch\n",
    );
    host.file("usr/lib/modules/{R}/pkgbase", "linux-lts\n");
    host
}

fn no_driver(sentence: &str) -> Row<'_> {
    ("nvidia.ko|useless|none for this kernel", sentence)
}

pub(crate) fn hosts() -> Vec<Case> {
    let no_peers = (
        "peer memory|missing|no ib_register_peer_memory_client",
        NO_OFED,
    );
    let own_driver = |open: &str| {
        format!("The module loads beside nvidia.ko alone: {open}, version 535 or newer.")
    };
    let on_debian = own_driver("run 'apt install nvidia-open-kernel-dkms'");
    let on_arch = own_driver("run 'pacman -S nvidia-open-dkms'");
    let elsewhere = own_driver(OPEN_FLAVOUR);
    let no_bindgen = |how: &str| {
        format!(
            "The build needs bindgen 0.71.1 or newer: {how}, or run 'cargo install bindgen-cli' and name it with \
             BINDGEN=."
        )
    };
    vec![
        case(
            "Debian 13 as it is",
            &debian(),
            &[
                ("Rust metadata|missing|no rust/libcore.rmeta and 12 more", LEFT_OUT_BY_DEBIAN),
                no_driver(&on_debian),
                no_peers,
            ],
        ),
        case(
            "Debian 13 with its kernel's source",
            debian().file("usr/src/linux-source-7.3.tar.xz", "x"),
            &[
                (
                    "Rust metadata|remark|not made yet",
                    "Debian's headers packages leave it out: 'make module' makes it from \
                     /usr/src/linux-source-7.3.tar.xz, in some minutes.",
                ),
                no_driver(&on_debian),
                no_peers,
            ],
        ),
        case(
            "Debian 13 with what it lacks",
            debian()
                .with_rust("rustc 1.85.1 (4eb161250 2025-03-15) (built from a source tarball)")
                .file("usr/lib/linux-kbuild-7.3.4+deb13/scripts/target.json", "{}\n")
                .nvidia("Dual MIT/GPL", "595.45.04")
                .ofed("default"),
            &[],
        ),
        case(
            "Debian 13 without tools",
            &bare(debian()),
            &[
                ("Rust metadata|missing|no rust/libcore.rmeta and 12 more", LEFT_OUT_BY_DEBIAN),
                (
                    "rustc|missing|no rustc",
                    "The Rust compiler that made this kernel, rustc 1.85.1 (4eb161250 2025-03-15) (built from a source \
                     tarball), is not here: run 'apt install rustc', or name it with RUSTC=.",
                ),
                ("bindgen|missing|no bindgen", &no_bindgen("run 'apt install bindgen'")),
                (
                    "C compiler|missing|no x86_64-linux-gnu-gcc-14",
                    "This kernel was built by x86_64-linux-gnu-gcc-14 (Debian 14.2.0-19) 14.2.0: run 'apt install \
                     gcc-14'.",
                ),
                ("linker|missing|no x86_64-linux-gnu-ld", "The linker is not here: run 'apt install binutils'."),
                ("make|missing|none", "kbuild needs GNU make: run 'apt install make'."),
                no_driver(&on_debian),
                no_peers,
            ],
        ),
        case(
            "Debian 13 on arm64 as it is",
            &debian_on_arm64(),
            &[
                ON_ARM64,
                ("Rust metadata|missing|no rust/libcore.rmeta and 11 more", LEFT_OUT_BY_DEBIAN),
                no_driver(&on_debian),
                no_peers,
            ],
        ),
        case(
            "Debian 13 on arm64 with what it lacks",
            debian_on_arm64()
                .with_rust("rustc 1.85.1 (4eb161250 2025-03-15) (built from a source tarball)")
                .nvidia("Dual MIT/GPL", "595.45.04")
                .ofed("arm64/{R}"),
            &[ON_ARM64],
        ),
        case(
            "Ubuntu on Grace, with 64 KiB pages, as it is",
            &grace(),
            &[
                ON_ARM64,
                ("Rust metadata|missing|no rust/libcore.rmeta and 11 more", AMD64_ALONE),
            ],
        ),
        case(
            "Ubuntu on Grace, and the metadata shall be made, of nothing that it has",
            grace().tool("dpkg-query", "linux-headers-7.3.0-1004").argument("-m"),
            &[
                ON_ARM64,
                ("Rust metadata|missing|no rust/libcore.rmeta and 11 more", AMD64_ALONE),
            ],
        ),
        case(
            "Ubuntu on Grace with headers that have the metadata in them",
            grace().with_rust("rustc 1.93.1 (01f6ddf75 2026-02-11) (built from a source tarball)"),
            &[ON_ARM64],
        ),
        case(
            "Ubuntu 24.04 on Grace with linux-nvidia-64k 7.0, which has no Rust",
            grace_of("7.0.0-1004-nvidia-64k")
                .unset("RUST")
                .unset("RUSTC_VERSION_TEXT")
                .file("object", "x"),
            &[ON_ARM64],
        ),
        case(
            "Ubuntu 24.04 with its HWE kernel, and without the package of the metadata",
            hwe().without("usr/src/linux-lib-rust-{R}"),
            &[
                (NEVER_ON_7_0, NEVER_ON_7_0_ADVICE),
                (
                    &format!("Rust metadata|missing|{HWE_LINK}"),
                    "They are in a package of their own: run 'apt install linux-lib-rust-{R}'. The link points elsewhere \
                     all the same: 'make module' then builds in a folder of links to the headers and to that package.",
                ),
            ],
        ),
        case(
            "Ubuntu 24.04 with its HWE kernel",
            &hwe(),
            &[
                (NEVER_ON_7_0, NEVER_ON_7_0_ADVICE),
                (
                    &format!("Rust metadata|remark|{HWE_LINK}"),
                    "The metadata are in /usr/src/linux-lib-rust-{R}: 'make module' builds in a folder of links to the \
                     headers and to them.",
                ),
            ],
        ),
        case(
            "Ubuntu 26.04 with its own kernel and DOCA-OFED by DKMS",
            complete("7.0.0-15-generic").without("usr/src/ofa_kernel/default/Module.symvers"),
            &[
                (
                    "kernel version|remark|{R}",
                    "The module was run on 7.2 to 7.3, and never on 7.0.",
                ),
                (
                    "peer memory|missing|no /usr/src/ofa_kernel/default/Module.symvers",
                    "OFED's headers are here without its list of symbols: put the Module.symvers of OFED's build there.",
                ),
            ],
        ),
        case(
            "Fedora as it is",
            &fedora(),
            &[
                ("Rust metadata|missing|no rust/libcore.rmeta and 12 more", LEFT_OUT),
                no_driver(&elsewhere),
                no_peers,
            ],
        ),
        case(
            "Fedora without tools",
            &bare(fedora()),
            &[
                ("Rust metadata|missing|no rust/libcore.rmeta and 12 more", LEFT_OUT),
                (
                    "rustc|missing|no rustc",
                    "The Rust compiler that made this kernel, rustc 1.94.0 (4a4ef493e 2026-03-02) (Fedora \
                     1.94.0-1.fc44), is not here: run 'dnf install rust', or name it with RUSTC=.",
                ),
                ("bindgen|missing|no bindgen", &no_bindgen("run 'dnf install bindgen-cli'")),
                (
                    "C compiler|missing|no gcc",
                    "This kernel was built by gcc (GCC) 16.1.1 20260501 (Red Hat 16.1.1-1): run 'dnf install gcc'.",
                ),
                ("linker|missing|no ld", "The linker is not here: run 'dnf install binutils'."),
                ("make|missing|none", "kbuild needs GNU make: run 'dnf install make'."),
                no_driver(&elsewhere),
                no_peers,
            ],
        ),
        case(
            "Rocky Linux without headers",
            Host {
                release: "7.3.0-1.el11.x86_64",
                ..Host::default()
            }
            .file("etc/os-release", "ID=\"rocky\"\nID_LIKE=\"rhel centos fedora\"\n")
            .file("proc/sys/kernel/osrelease", "{R}\n"),
            &[
                (
                    "build folder|missing|no /lib/modules/{R}/build",
                    "This kernel's headers are not here: run 'dnf install kernel-devel-{R}', or name the kernel's build \
                     folder with KDIR=.",
                ),
                ("Rust metadata|missing|no rust/libcore.rmeta and 9 more", LEFT_OUT),
                ("rustc|missing|no rustc", NO_RUSTC),
                ("bindgen|missing|no bindgen", NO_BINDGEN_ON_FEDORA),
                ("C compiler|missing|no gcc", "The C compiler is not here: run 'dnf install gcc'."),
                ("linker|missing|no ld", "The linker is not here: run 'dnf install binutils'."),
                ("make|missing|none", "kbuild needs GNU make: run 'dnf install make'."),
                no_driver(&elsewhere),
                no_peers,
            ],
        ),
        case(
            "RHEL 10 on Grace with its kernel-64k",
            &without_headers("6.12.0-124.8.1.el10_1.aarch64+64k", RHEL),
            &[
                (
                    "build folder|missing|no /lib/modules/{R}/build",
                    "This kernel's headers are not here: run 'dnf install kernel-64k-devel-6.12.0-124.8.1.el10_1.aarch64', \
                     or name the kernel's build folder with KDIR=.",
                ),
                NO_OBJECT,
            ],
        ),
        case(
            "RHEL on Grace with a newer kernel-64k, without headers",
            without_headers("7.3.0-1.el11.aarch64+64k", RHEL)
                .without("usr/src/ofa_kernel")
                .ofed("aarch64/7.3.0-1.el11.aarch64+64k"),
            &[
                (
                    "build folder|missing|no /lib/modules/{R}/build",
                    "This kernel's headers are not here: run 'dnf install kernel-64k-devel-7.3.0-1.el11.aarch64', or \
                     name the kernel's build folder with KDIR=.",
                ),
                ("Rust metadata|missing|no rust/libcore.rmeta and 9 more", LEFT_OUT),
            ],
        ),
        case(
            "RHEL on Grace with a newer kernel-64k and its headers",
            rhel_64k()
                .without("{K}/rust")
                .nvidia("Dual MIT/GPL", "595.45.04")
                .ofed("aarch64/7.3.0-1.el11.aarch64+64k"),
            &[
                ON_ARM64,
                ("Rust metadata|missing|no rust/libcore.rmeta and 11 more", LEFT_OUT),
            ],
        ),
        case(
            "Fedora without libclang",
            fedora()
                .with_rust("rustc 1.94.0 (4a4ef493e 2026-03-02) (Fedora 1.94.0-1.fc44)")
                .file("{K}/scripts/target.json", "{}\n")
                .tool("bindgen", "bindgen 0.72.1")
                .nvidia("Dual MIT/GPL", "595.45.04")
                .ofed("default"),
            &[
                (
                    "libclang|missing|none that bindgen finds",
                    "bindgen reads C by libclang: run 'dnf install clang-libs', or set LIBCLANG_PATH to the folder of \
                     libclang.so.",
                ),
            ],
        ),
        case("Arch Linux without OFED", &arch(), &[no_driver(&on_arch), no_peers]),
        case(
            "Arch Linux without headers",
            arch().without("lib/modules/{R}/build"),
            &[
                (
                    "build folder|missing|no /lib/modules/{R}/build",
                    "This kernel's headers are not here: run 'pacman -S linux-lts-headers', or name the kernel's build \
                     folder with KDIR=.",
                ),
                no_driver(&on_arch),
                no_peers,
            ],
        ),
        case(
            "Arch Linux without Rust's part, and without tools",
            &bare(arch().without("{K}/rust").clone()),
            &[
                (
                    "Rust metadata|missing|no rust/libcore.rmeta and 11 more",
                    "They are in the headers package: run 'pacman -S linux-lts-headers'.",
                ),
                (
                    "rustc|missing|no rustc",
                    "The Rust compiler that made this kernel, rustc 1.96.0 (ac68faa20 2026-05-25) (Arch Linux rust \
                     1:1.96.0-1), is not here: run 'pacman -S rust', or name it with RUSTC=.",
                ),
                ("bindgen|missing|no bindgen", &no_bindgen("run 'pacman -S rust-bindgen'")),
                (
                    "C compiler|missing|no gcc",
                    "This kernel was built by gcc (GCC) 16.1.1 20260430: run 'pacman -S gcc'.",
                ),
                ("linker|missing|no ld", "The linker is not here: run 'pacman -S binutils'."),
                ("make|missing|none", "kbuild needs GNU make: run 'pacman -S make'."),
                no_driver(&on_arch),
                no_peers,
            ],
        ),
        case(
            "Arch Linux without libclang",
            arch()
                .tool("bindgen", "bindgen 0.72.1")
                .nvidia("Dual MIT/GPL", "595.45.04")
                .ofed("default"),
            &[(
                "libclang|missing|none that bindgen finds",
                "bindgen reads C by libclang: run 'pacman -S clang', or set LIBCLANG_PATH to the folder of libclang.so.",
            )],
        ),
        case(
            "a distribution nobody knows, without anything",
            &bare(arch().without("{K}/rust").without("etc/os-release").clone()),
            &[
                (
                    "Rust metadata|missing|no rust/libcore.rmeta and 11 more",
                    "Copy them from where this kernel was built ('make prepare' makes them), or name that folder with \
                     KDIR=.",
                ),
                (
                    "rustc|missing|no rustc",
                    "The Rust compiler that made this kernel, rustc 1.96.0 (ac68faa20 2026-05-25) (Arch Linux rust \
                     1:1.96.0-1), is not here: install it, or name it with RUSTC=.",
                ),
                ("bindgen|missing|no bindgen", &no_bindgen("install it")),
                (
                    "C compiler|missing|no gcc",
                    "This kernel was built by gcc (GCC) 16.1.1 20260430: install that.",
                ),
                ("linker|missing|no ld", "The linker is not here: install binutils."),
                ("make|missing|none", "kbuild needs GNU make: install make."),
                no_driver(&elsewhere),
                no_peers,
            ],
        ),
    ]
}
