// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Runs `rust-bindings/probe.sh` with the real compiler and the module's own `src/compat.h`, and
//! compiles `rust-bindings/layout.c`. Small headers imitate the declarations of kernels that are
//! not available here. Edits of our own headers imitate those of ib_core and of nvidia.ko.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fmt::Write as _;
use std::fs;
use std::process::{Command, Output};

use crate::host::{output, repository, Place};

/// Interfaces that `src/compat.h` uses, and that have the same form in every kernel.
const COMMON: &str = "\
#define NULL ((void *)0)
#define true 1
#define false 0
#define __user
#define EOPNOTSUPP 95
#define CONFIG_DEBUG_FS 1
#define IS_ENABLED(option) option
#define BUILD_BUG_ON(condition) ((void)sizeof(char[1 - 2 * !!(condition)]))
#define USEC_PER_MSEC 1000UL
#define NSEC_PER_USEC 1000L
#define PAGE_SIZE 4096UL
#define O_RDONLY 0
#define DMA_ATTR_SKIP_CPU_SYNC 32UL
#define IOMMU_DOMAIN_IDENTITY 4
#define BIT(n) (1UL << (n))
#define __ffs(word) ((unsigned long)__builtin_ctzl(word))
#define ERR_PTR(error) ((void *)(long)(error))
#define DIV_ROUND_UP(n, d) (((n) + (d) - 1) / (d))
#define VM_READ 1
#define VM_WRITE 2
#define VM_EXEC 4
typedef _Bool bool;
typedef unsigned long size_t;
typedef unsigned long long u64, dma_addr_t, phys_addr_t;
typedef long long s64, ktime_t;
typedef unsigned short umode_t;
enum dma_data_direction { DMA_BIDIRECTIONAL };
struct range { u64 start, end; };
struct resource { u64 start, end; };
struct rw_semaphore { int count; };
struct device;
struct dev_pagemap;
struct dma_iova_state;
struct timespec64 { s64 tv_sec; long tv_nsec; };
struct kernfs_node;
struct kobject { struct kernfs_node *sd; };
struct kset;
struct attribute_group;
struct inode { void *i_private; };
struct file;
struct file_operations;
struct dentry;
struct iommu_domain { unsigned int type; unsigned long pgsize_bitmap; };
extern struct kobject *kernel_kobj;
ktime_t ktime_get(void);
static inline s64 ktime_to_us(ktime_t time) { return time / NSEC_PER_USEC; }
void ktime_get_coarse_ts64(struct timespec64 *time);
static inline s64 timespec64_to_ns(const struct timespec64 *time) { return time->tv_sec * 1000000000 + time->tv_nsec; }
struct kobject *kset_find_obj(struct kset *, const char *);
struct file *anon_inode_getfile(const char *, const struct file_operations *, void *, int);
int trace_event_reg(void);
int pfn_valid(unsigned long pfn);
struct kernfs_node *kernfs_find_and_get_ns(struct kernfs_node *, const char *, const void *);
static inline struct kernfs_node *kernfs_find_and_get(struct kernfs_node *node, const char *name)
{ return kernfs_find_and_get_ns(node, name, NULL); }
void kernfs_put(struct kernfs_node *);
struct kobject *kobject_create_and_add(const char *, struct kobject *);
int sysfs_create_group(struct kobject *, const struct attribute_group *);
struct dentry *debugfs_create_dir(const char *, struct dentry *);
struct dentry *debugfs_create_file(const char *, umode_t, struct dentry *, void *, const struct file_operations *);
void debugfs_remove(struct dentry *);
struct iommu_domain *iommu_get_domain_for_dev(struct device *);
int down_read_trylock(struct rw_semaphore *sem);
void up_read(struct rw_semaphore *sem);
void msleep(unsigned int ms);
void usleep_range(unsigned long min, unsigned long max);
void put_dev_pagemap(struct dev_pagemap *pgmap);
dma_addr_t dma_map_resource(struct device *, phys_addr_t, size_t, enum dma_data_direction, unsigned long);
void dma_unmap_resource(struct device *, dma_addr_t, size_t, enum dma_data_direction, unsigned long);
";

/// Functions that the kernel exports: those of [`COMMON`], and those of [`DIFFERENCES`] that are
/// not inline.
const EXPORTED: &str = "down_read_trylock up_read msleep usleep_range put_dev_pagemap dma_map_resource dma_unmap_resource \
    ktime_get_coarse_ts64 PDE_DATA ktime_get kset_find_obj anon_inode_getfile trace_event_reg pfn_valid kernel_kobj \
    kernfs_find_and_get_ns kernfs_put kobject_create_and_add sysfs_create_group debugfs_create_dir \
    debugfs_create_file debugfs_remove iommu_get_domain_for_dev get_dev_pagemap dma_map_phys dma_unmap_phys \
    dma_iova_try_alloc dma_iova_free dma_iova_link dma_iova_sync dma_iova_unlink";

/// The differences between kernels. Each difference has the name of its probe. Lines with `+` are
/// in the headers if the probe succeeds, and lines with `-` if it fails. The lines are shortened
/// from the kernels' headers. `p2pdma` comes before `pagemap_ranges`, which uses its type.
const DIFFERENCES: &str = "\
access_ok
+ #define access_ok(addr, size) ((unsigned long)(addr) + (size) < 1UL << 47)
- #define VERIFY_READ 0
- #define access_ok(type, addr, size) ((type) == 0 && (unsigned long)(addr) + (size) < 1UL << 47)
mmap_lock
+ struct mm_struct { struct rw_semaphore mmap_lock; };
+ static inline bool mmap_read_trylock(struct mm_struct *mm) { return down_read_trylock(&mm->mmap_lock); }
+ static inline void mmap_read_unlock(struct mm_struct *mm) { up_read(&mm->mmap_lock); }
- struct mm_struct { struct rw_semaphore mmap_sem; };
fsleep
+ static inline void fsleep(unsigned long usecs) { usleep_range(usecs, 2 * usecs); }
pde_data
+ static inline void *pde_data(const struct inode *inode) { return inode->i_private; }
- void *PDE_DATA(const struct inode *inode);
p2pdma
+ enum memory_type { MEMORY_DEVICE_PRIVATE = 1, MEMORY_DEVICE_PCI_P2PDMA };
+ enum { FOLL_PCI_P2PDMA = 1 << 10 };
- enum memory_type { MEMORY_DEVICE_PRIVATE = 1, MEMORY_DEVICE_PCI_P2PDMA };
pagemap_ranges
+ struct dev_pagemap {
+ enum memory_type type; int nr_range; union { struct range range; struct range ranges[0]; };
+ };
- struct dev_pagemap { struct resource res; enum memory_type type; };
pagemap_of_pfn
+ struct dev_pagemap *get_dev_pagemap(unsigned long pfn);
- struct dev_pagemap *get_dev_pagemap(unsigned long pfn, struct dev_pagemap *pgmap);
dma_map_phys
+ dma_addr_t dma_map_phys(struct device *, phys_addr_t, size_t, enum dma_data_direction, unsigned long);
dma_unmap_phys
+ void dma_unmap_phys(struct device *, dma_addr_t, size_t, enum dma_data_direction, unsigned long);
dma_range_map
+ struct device { const void *dma_range_map; };
- struct device { unsigned long dma_pfn_offset; };
iova_alloc
+ bool dma_iova_try_alloc(struct device *, struct dma_iova_state *, phys_addr_t, size_t);
+ void dma_iova_free(struct device *, struct dma_iova_state *);
iova_link
+ int dma_iova_link(struct device *, struct dma_iova_state *, phys_addr_t, size_t, size_t,
+ enum dma_data_direction, unsigned long);
iova_sync
+ int dma_iova_sync(struct device *, struct dma_iova_state *, size_t, size_t);
iova_unlink
+ void dma_iova_unlink(struct device *, struct dma_iova_state *, size_t, size_t,
+ enum dma_data_direction, unsigned long);
";

/// Probes that depend only on exports. The headers of every kernel declare their functions.
const EXPORTS_ALONE: &str = "anon_inode debugfs iommu_domain kset_find_obj ktime_get memory_peers pagemap pfn_valid tracepoints";

/// The compiler and its options, which end with the option for the folder of the headers.
const COMPILER: [&str; 6] = ["gcc", "-std=gnu11", "-O2", "-fno-pie", "-nostdinc", "-I"];

/// The files that include the kernel's headers in these tests.
const INCLUDERS: [&str; 7] = [
    "src/compat.h",
    "src/helpers.h",
    "src/memory_peers.h",
    "rust-bindings/layout.c",
    "rust-bindings/peermem.h",
    "rust-bindings/include/nv-p2p.h",
    "rust-bindings/include/rdma/peer_mem.h",
];

/// A kernel: the probes that succeed on it, its headers without [`DIFFERENCES`], and its exports.
struct Kernel {
    newer: BTreeSet<&'static str>,
    text: String,
    /// A text to replace in the headers, and its replacement.
    replaced: Option<(&'static str, &'static str)>,
    symvers: String,
    no_gpl_only: bool,
    /// A header that the kernel does not have.
    absent: &'static str,
}

fn every_probe() -> BTreeSet<&'static str> {
    DIFFERENCES
        .lines()
        .filter(|line| !line.starts_with(['+', '-']))
        .collect()
}

fn symvers(kind: impl Fn(&str) -> Option<&'static str>) -> String {
    let line = |name| Some(format!("0x00000000\t{name}\tvmlinux\t{}\t\n", kind(name)?));
    EXPORTED.split(' ').filter_map(line).collect()
}

impl Kernel {
    fn new(newer: &BTreeSet<&'static str>) -> Self {
        let mut text = COMMON.to_owned();
        text += "#define DMA_ATTR_MMIO (1UL << 10)\n";
        Self {
            newer: newer.clone(),
            text,
            replaced: None,
            symvers: symvers(|_| Some("EXPORT_SYMBOL_GPL")),
            no_gpl_only: false,
            absent: "",
        }
    }

    fn headers(&self) -> String {
        let (mut text, mut form) = (self.text.clone(), "");
        for line in DIFFERENCES.lines() {
            match line.split_at(2) {
                (sign @ ("+ " | "- "), line) if sign == form => text += &format!("{line}\n"),
                ("+ " | "- ", _) => {}
                _ if self.newer.contains(line) => form = "+ ",
                _ => form = "- ",
            }
        }
        self.replaced.map_or(text.clone(), |(from, to)| {
            assert!(text.contains(from), "{text}");
            text.replace(from, to)
        })
    }

    /// Runs the probes on this kernel. All headers of the kernel include a common header.
    fn probe(&self, place: &Place) -> Output {
        self.write(place);
        let mut command = Command::new(repository().join("rust-bindings/probe.sh"));
        command
            .arg(repository().join("src/compat.h"))
            .args([place.0.join("out.h"), place.0.join("Module.symvers")])
            .args(COMPILER)
            .arg(place.0.join("include"))
            .env_remove("NM");
        if self.no_gpl_only {
            command.env("PEERMEM_NO_GPL_ONLY", "y");
        }
        command.output().unwrap()
    }

    /// Writes the headers and the list of exports.
    fn write(&self, place: &Place) {
        let linux = place.0.join("include/linux");
        fs::create_dir_all(&linux).unwrap();
        let headers = format!("#ifndef FAKE_H\n#define FAKE_H\n{}#endif\n", self.headers());
        fs::write(place.0.join("include/fake.h"), headers).unwrap();
        for source in INCLUDERS {
            for line in fs::read_to_string(repository().join(source))
                .unwrap()
                .lines()
            {
                let name = line.strip_prefix("#include <linux/");
                let name = name.and_then(|rest| rest.strip_suffix('>'));
                if let Some(name) = name.filter(|name| *name != self.absent) {
                    let read = name.trim_end_matches(".h").replace('-', "_");
                    let header = format!("#include <fake.h>\n#define READ_{read} 1\n");
                    fs::write(linux.join(name), header).unwrap();
                }
            }
        }
        fs::write(place.0.join("Module.symvers"), &self.symvers).unwrap();
    }

    /// Runs the probes, and returns the folder with the headers and the probes' result.
    fn probed(&self) -> Place {
        let place = Place::new();
        let output = self.probe(&place);
        assert!(output.status.success(), "{}", text(&output.stderr));
        fs::rename(
            place.0.join("out.h"),
            place.0.join("include/compat-found.h"),
        )
        .unwrap();
        place
    }

    /// Returns the probes that succeeded.
    fn found(&self) -> BTreeSet<String> {
        let place = Place::new();
        let output = self.probe(&place);
        assert!(output.status.success(), "{}", text(&output.stderr));
        assert_eq!(left(&place), ["out.h"]);
        let header = fs::read_to_string(place.0.join("out.h")).unwrap();
        let found: BTreeSet<String> = header
            .lines()
            .filter_map(|line| line.strip_prefix("#define PEERMEM_HAS_"))
            .map(str::to_lowercase)
            .collect();
        assert_eq!(header.lines().count(), found.len() + 1, "{header}");
        // The output names the probes that are not in `found`.
        let said = text(&output.stdout);
        let words = match self.no_gpl_only {
            true => "  left out or in older forms, beside the proprietary nvidia.ko:",
            false => "  older forms in use:",
        };
        let said: BTreeSet<&str> = said
            .strip_prefix(words)
            .unwrap_or_default()
            .split_whitespace()
            .collect();
        let mut other = every_probe();
        other.extend(EXPORTS_ALONE.split(' '));
        other.retain(|name| !found.contains(*name));
        assert_eq!(said, other);
        found
    }
}

/// Compiles with the headers and the probes' result in `place`, and writes no object.
fn compile(place: &Place, arguments: &[&OsStr]) -> Output {
    Command::new(COMPILER[0])
        .args(&COMPILER[1..])
        .arg(place.0.join("include"))
        .arg("-fsyntax-only")
        .args(arguments)
        .output()
        .unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Returns the files that the probe left beside its output.
fn left(place: &Place) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(&place.0)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .filter(|name| name.starts_with("out"))
        .collect();
    names.sort();
    names
}

fn with_exported(names: &BTreeSet<&str>) -> BTreeSet<String> {
    names
        .iter()
        .copied()
        .chain(EXPORTS_ALONE.split(' '))
        .map(str::to_owned)
        .collect()
}

/// Checks that each probe distinguishes its two forms, whatever the other probes find.
#[test]
fn each_difference_by_itself() {
    for probe in every_probe() {
        let mut but_one = every_probe();
        but_one.remove(probe);
        for newer in [but_one, BTreeSet::from([probe])] {
            assert_eq!(Kernel::new(&newer).found(), with_exported(&newer));
        }
    }
}

/// Tests the kernels of the table in docs/kernels.md. A version number proves nothing: RHEL's 4.18
/// has forms of 5.10, and RHEL's 5.14 has a form of 5.17.
#[test]
fn forms_of_kernels_that_are_not_available_here() {
    let dma = ["dma_map_phys", "dma_unmap_phys"];
    let iova = ["iova_alloc", "iova_link", "iova_sync", "iova_unlink"];
    let without = |names: &[&str]| {
        let mut newer = every_probe();
        newer.retain(|name| !names.contains(name));
        newer
    };
    let old = [&dma[..], &iova[..], &["pagemap_of_pfn"]].concat();
    let older = [&old[..], &["p2pdma"]].concat();
    let oldest = [&older[..], &["pde_data"]].concat();
    // 6.17 has the functions, but not the flag for memory of a device.
    let seventeen = [&dma[..], &["iova_link", "iova_unlink", "pagemap_of_pfn"]].concat();
    let page_type = ", MEMORY_DEVICE_PCI_P2PDMA";
    let kernels = [
        // Mainline's kernel, and RHEL's.
        (4, 18, BTreeSet::new(), Some((page_type, ""))),
        (
            4,
            18,
            without(&[&oldest[..], &["pagemap_ranges"]].concat()),
            None,
        ),
        (5, 10, without(&oldest), None),
        // RHEL's kernel before 9.1, and the one of 9.1 to 9.4.
        (5, 14, without(&oldest), None),
        (5, 14, without(&older), None),
        (5, 15, without(&oldest), None),
        (6, 8, without(&old), None),
        (6, 14, without(&old), None),
        (6, 17, without(&seventeen), None),
        (7, 0, every_probe(), None),
    ];
    for (major, minor, newer, replaced) in kernels {
        let mut kernel = Kernel::new(&newer);
        let code = (major << 16) + (minor << 8);
        writeln!(kernel.text, "#define LINUX_VERSION_CODE {code}").unwrap();
        kernel.replaced = replaced;
        assert_eq!(kernel.found(), with_exported(&newer), "{major}.{minor}");
    }
}

/// Tests the forms that the preprocessor chooses without a probe. `src/compat.h` defines a macro
/// only if the kernel does not.
#[test]
fn forms_that_need_no_probe() {
    let macros = [
        ("PF_IO_WORKER", "PF_IO_WORKER", 16, 0),
        ("VM_ACCESS_FLAGS", "VM_ACCESS_FLAGS", 15, 7),
        ("PCI_STD_NUM_BARS", "PCI_STD_NUM_BARS", 7, 6),
        (
            "DMA_ATTR_DEBUGGING_IGNORE_CACHELINES",
            "COMPAT_BAR_ATTRS",
            2048,
            32,
        ),
    ];
    let [mut new, mut old] = [Kernel::new(&every_probe()), Kernel::new(&every_probe())];
    new.text +=
        "#define static_assert(condition) _Static_assert(condition, \"the kernel's own\")\n";
    old.absent = "dma-map-ops.h";
    let mut with = "static_assert(READ_dma_map_ops);\n".to_owned();
    let mut without = String::new();
    for (theirs, ours, newer, older) in macros {
        writeln!(new.text, "#define {theirs} {newer}").unwrap();
        writeln!(with, "static_assert({ours} == {newer});").unwrap();
        writeln!(without, "static_assert({ours} == {older});").unwrap();
    }
    for (kernel, text) in [(&new, with), (&old, without)] {
        let place = kernel.probed();
        let [compat, source] = [repository().join("src/compat.h"), place.0.join("source.c")];
        fs::write(&source, text).unwrap();
        let output = compile(
            &place,
            &["-include".as_ref(), compat.as_ref(), source.as_ref()],
        );
        assert!(output.status.success(), "{}", self::text(&output.stderr));
    }
}

/// Declarations that `rust-bindings/layout.c` needs from the kernel.
const LAYOUT: &str = "\
#define TASK_COMM_LEN 16
#define __no_randomize_layout
#define offsetof(type, member) __builtin_offsetof(type, member)
typedef unsigned char u8, uint8_t;
typedef unsigned int u32, uint32_t;
typedef u64 uint64_t;
typedef int pid_t;
typedef int spinlock_t;
struct pci_dev;
struct seq_file;
struct sg_table { void *sgl; unsigned int nents, orig_nents; };
";

/// A text of our own `nv-p2p.h` or `rdma/peer_mem.h`, and its replacement.
type Edit = (&'static str, &'static str);

/// A form of one of these headers: name, edits, and the error that the build ends with. The error
/// is empty if the build accepts the form.
type Form = (&'static str, &'static [Edit], &'static str);

const NO_FLAG: Edit = ("enum {\n", "#if 0\nenum {\n");
const NO_EX: Edit = ("\tu32 flags;\n};\n", "\tu32 flags;\n};\n#endif\n");
const RELEASE: &str = "\tvoid (*release)(void *client_context);\n";
const TWO_MORE: Edit = (
    RELEASE,
    "\tvoid (*release)(void *client_context);\n\tvoid *(*get_context_private_data)(u64 peer_id);\n\
     \tvoid (*put_context_private_data)(void *context);\n",
);
const OLD_OFED: &str = "MLNX_OFED must be 5.4-3.0.3.0 or newer";
const FLAGS: &str = "\tuint8_t *gpu_uuid;\n\tuint32_t flags;\n";

/// The forms of `rdma/peer_mem.h`. OFED 4.0 and the first versions of Ubuntu's interface declare
/// `core_context` as u64, but have neither the flag nor `struct peer_memory_client_ex`.
const PEER_MEM: [Form; 6] = [
    (
        "OFED 5.4-3.0.3.0 to 25.10, Ubuntu 5.15, linux-nvidia 6.8",
        &[],
        "",
    ),
    ("OFED 4.0 to 5.4-2.4.1.3", &[NO_FLAG, NO_EX], OLD_OFED),
    ("OFED 4.9 and 5.0", &[NO_FLAG, NO_EX, TWO_MORE], OLD_OFED),
    (
        "an OFED whose core_context is a pointer",
        &[
            NO_FLAG,
            NO_EX,
            ("#define PEER_MEM_U64_CORE_CONTEXT\n", ""),
            ("u64 core_context", "void *core_context"),
        ],
        "peer_mem.h does not declare core_context as u64: MLNX_OFED must be",
    ),
    (
        "two more members and the flag",
        &[TWO_MORE],
        "sizeof(struct peer_memory_client) == (136)",
    ),
    (
        "a member that moved",
        &[
            (RELEASE, ""),
            (
                "\tint (*acquire)",
                "\tvoid (*release)(void *context);\n\tint (*acquire)",
            ),
        ],
        "offsetof(struct peer_memory_client, acquire) == (80)",
    ),
];

/// The forms of `nv-p2p.h`.
const NV_P2P: [Form; 4] = [
    ("drivers 580 to 595", &[], ""),
    (
        "drivers 535 to 575",
        &[
            (FLAGS, "\tuint8_t *gpu_uuid;\n"),
            ("0x00020000", "0x00010002"),
        ],
        "",
    ),
    (
        "drivers before 535",
        &[("#define NVIDIA_P2P_CAP_GET_PAGES_PERSISTENT_API\n", "")],
        "NVIDIA's driver must be 535 or newer",
    ),
    (
        "a member that moved",
        &[(FLAGS, "\tuint32_t flags;\n\tuint8_t *gpu_uuid;\n")],
        "offsetof(struct nvidia_p2p_page_table, flags)",
    ),
];

/// Checks that `rust-bindings/layout.c` accepts the supported forms of the two headers, and ends
/// the build with the right error for each other form.
#[test]
fn forms_of_the_headers_of_ib_core_and_nvidia_ko() {
    let mut kernel = Kernel::new(&every_probe());
    kernel.text += LAYOUT;
    let place = kernel.probed();
    let own = repository().join("rust-bindings/include");
    let [ib, nv] = ["rdma/peer_mem.h", "nv-p2p.h"];
    for (file, forms) in [(ib, &PEER_MEM[..]), (nv, &NV_P2P[..])] {
        for (name, edits, error) in forms {
            let mut header = fs::read_to_string(own.join(file)).unwrap();
            for (from, to) in *edits {
                assert!(header.contains(from), "{name}: {from}");
                header = header.replace(from, to);
            }
            let form = place.0.join("form.h");
            fs::write(&form, header).unwrap();
            let define = |name, other| {
                let path = if file == other {
                    form.clone()
                } else {
                    own.join(other)
                };
                format!("-DPEERMEM_{name}_HEADER=\"{}\"", path.display())
            };
            let [ib, nv] = [define("IB", ib), define("NV", nv)];
            let layout = repository().join("rust-bindings/layout.c");
            let output = compile(&place, &[ib.as_ref(), nv.as_ref(), layout.as_ref()]);
            let said = text(&output.stderr);
            assert_eq!(output.status.success(), error.is_empty(), "{name}: {said}");
            assert!(said.contains(error), "{name}: {said}");
        }
    }
}

/// Tests 6.16 and 6.17, which have `dma_iova_link()` but no flag for device memory. Without the
/// flag, the kernel would map a BAR as RAM.
#[test]
fn functions_without_the_flag_that_they_need() {
    let mut newer = every_probe();
    newer.remove("pagemap_of_pfn");
    let mut kernel = Kernel::new(&newer);
    kernel.text = COMMON.to_owned();
    let mut expected = with_exported(&newer);
    for name in ["dma_map_phys", "dma_unmap_phys", "iova_link", "iova_unlink"] {
        expected.remove(name);
    }
    assert_eq!(kernel.found(), expected);
}

/// Checks that a function counts as missing if the headers declare it but the kernel does not
/// export it.
#[test]
fn functions_without_export() {
    for (function, probe) in [
        ("dma_map_phys", "dma_map_phys"),
        ("dma_iova_free", "iova_alloc"),
        ("put_dev_pagemap", "pagemap"),
        ("trace_event_reg", "tracepoints"),
    ] {
        let mut kernel = Kernel::new(&every_probe());
        kernel.symvers = symvers(|name| (name != function).then_some("EXPORT_SYMBOL"));
        let mut expected = with_exported(&every_probe());
        assert!(expected.remove(probe));
        assert_eq!(kernel.found(), expected, "{function}");
    }
}

/// Tests a kernel without debugfs, whose headers have debugfs functions that do nothing.
#[test]
fn functions_of_debugfs_that_do_nothing() {
    let mut kernel = Kernel::new(&every_probe());
    kernel.replaced = Some(("CONFIG_DEBUG_FS 1", "CONFIG_DEBUG_FS 0"));
    let mut expected = with_exported(&every_probe());
    assert!(expected.remove("debugfs"));
    assert_eq!(kernel.found(), expected);
}

/// Tests a Module.symvers with only the exports of modules. Such a list shows nothing about the
/// kernel's own exports.
#[test]
fn exports_that_are_not_known() {
    for lines in [
        "",
        "0x0\tnvidia_p2p_get_pages\tnvidia\tEXPORT_SYMBOL_GPL\t\n",
    ] {
        let mut kernel = Kernel::new(&every_probe());
        kernel.symvers = lines.to_owned();
        assert_eq!(kernel.found(), with_exported(&every_probe()));
    }
}

/// Checks that no function that is exported only to GPL modules is used beside the proprietary
/// nvidia.ko. The list of such functions is from 7.3.
#[test]
fn functions_for_gpl_modules_only() {
    let for_all =
        "down_read_trylock up_read msleep usleep_range dma_map_resource dma_unmap_resource \
                   ktime_get_coarse_ts64 PDE_DATA";
    let export = |name: &str| {
        let is_for_all = for_all.split(' ').any(|other| other == name);
        Some(if is_for_all {
            "EXPORT_SYMBOL"
        } else {
            "EXPORT_SYMBOL_GPL"
        })
    };
    for newer in [every_probe(), BTreeSet::new()] {
        let mut kernel = Kernel::new(&newer);
        kernel.symvers = symvers(export);
        assert_eq!(kernel.found(), with_exported(&newer));
        kernel.no_gpl_only = true;
        let mut expected = with_exported(&newer);
        expected.retain(|name| {
            let is_gpl_only = name.contains("iova") || name.ends_with("map_phys");
            // Both forms of `pagemap_of_pfn` are missing, and the probe then reports the older
            // form, with two arguments.
            !is_gpl_only
                && name != "pagemap_of_pfn"
                && !EXPORTS_ALONE.split(' ').any(|other| other == name)
        });
        assert_eq!(kernel.found(), expected);
    }
}

/// Tests the check of the linked module. The check must find functions that the probes left in by
/// mistake.
#[test]
fn a_linked_module_that_uses_them() {
    let place = Place::new();
    let source = "void first(void); void second(void); void third(void) __attribute__((weak));\n\
                  void own(void); void own(void) { first(); second(); third(); }\n";
    fs::write(place.0.join("module.c"), source).unwrap();
    let files = ["module.o", "module.c"].map(|name| place.0.join(name));
    output(Command::new("gcc").args(["-c", "-o"]).args(files));
    let run = |kernel: &str, module: &str| {
        fs::write(place.0.join("kernel.symvers"), kernel).unwrap();
        fs::write(place.0.join("module.symvers"), module).unwrap();
        Command::new(repository().join("rust-bindings/exports.sh"))
            .args(["module.o", "kernel.symvers", "module.symvers"].map(|name| place.0.join(name)))
            .env_remove("NM")
            .output()
            .unwrap()
    };
    let first = "0x0\tfirst\tvmlinux\tEXPORT_SYMBOL\t\n0x0\tother\tvmlinux\tEXPORT_SYMBOL_GPL\t\n";
    let third = "0x0\tthird\tnvidia\tEXPORT_SYMBOL\t\n";
    let output = run(
        &format!("{first}0x0\tsecond\tvmlinux\tEXPORT_SYMBOL\t\n"),
        third,
    );
    assert!(output.status.success(), "{}", text(&output.stderr));
    // Tests a symbol of the kernel, a symbol of a module in a namespace, and a weak symbol.
    let second = "0x0\tsecond\tvmlinux\tEXPORT_SYMBOL_GPL\t\n";
    let in_module = "0x0\tsecond\tib_core\tEXPORT_SYMBOL_GPL\tRDMA\n";
    let weak = "0x0\tthird\tnvidia\tEXPORT_SYMBOL_GPL\t\n";
    for (kernel, module, name) in [
        (second, third, "second"),
        ("", in_module, "second"),
        ("", weak, "third"),
    ] {
        let output = run(&format!("{first}{kernel}"), module);
        assert_eq!(output.status.code(), Some(1));
        let said = text(&output.stderr);
        assert!(said.ends_with(&format!("uses: {name}\n")), "{said}");
    }
    // Tests a Module.symvers with only the symbols of modules.
    let output = run(third, "");
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("does not say what the kernel exports"));
}

/// Checks that the build ends with these messages, and leaves no files.
fn fails(kernel: &Kernel, messages: &[&str]) {
    let place = Place::new();
    let output = kernel.probe(&place);
    assert_eq!(output.status.code(), Some(1));
    let said = text(&output.stderr);
    for message in messages {
        assert!(said.contains(message), "{message}: {said}");
    }
    assert!(left(&place).is_empty());
}

#[test]
fn no_form_fits() {
    let mut kernel = Kernel::new(&every_probe());
    kernel.replaced = Some(("dma_range_map", "dma_ranges"));
    let messages = [
        "has no member named",
        "dma_pfn_offset",
        "fits this kernel's C interfaces",
        "see above (not found: dma_range_map); docs/kernels.md lists the supported kernels.",
    ];
    fails(&kernel, &messages);
}

#[test]
fn headers_that_do_not_compile() {
    let mut kernel = Kernel::new(&every_probe());
    kernel.text.push_str("#error \"Please run make prepare\"\n");
    let messages = [
        "Please run make prepare",
        "this kernel's headers do not compile, see above; scripts/check may say what is missing.",
    ];
    fails(&kernel, &messages);
}

/// Checks that each macro of `src/` has a probe, each probe has a macro, and each probe has a
/// fixture.
#[test]
fn every_probe_is_used_and_has_both_forms() {
    let source = fs::read_to_string(repository().join("src/compat.h")).unwrap();
    let probe = |line: &str| {
        Some(
            line.strip_prefix("/* PROBE ")?
                .split_once(':')?
                .0
                .to_owned(),
        )
    };
    let probes: BTreeSet<String> = source.lines().filter_map(probe).collect();
    assert_eq!(probes, with_exported(&every_probe()));
    // Two probes decide whether a whole file is compiled, and one probe is only for the portable
    // build.
    let files = [
        "src/compat.h",
        "src/helpers.c",
        "src/memory_peers.c",
        "src/trace.c",
        "portable/shim.c",
    ];
    let sources = files.map(|name| fs::read_to_string(repository().join(name)).unwrap());
    let sources = sources.concat();
    let is_end = |byte: char| byte != '_' && !byte.is_ascii_alphanumeric();
    let names = sources
        .split("PEERMEM_HAS_")
        .skip(1)
        .filter_map(|rest| rest.split(is_end).next());
    let macros: BTreeSet<String> = names
        .filter(|name| !name.is_empty())
        .map(str::to_lowercase)
        .collect();
    assert_eq!(macros, probes);
}
