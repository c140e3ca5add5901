// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! NCCL's use of GPUDirect RDMA: its limit on the distance between GPU and NIC, and the settings
//! that change the limit, as far as visible.
//!
//! NCCL's default limit is PXB, and `NCCL_NET_GDR_LEVEL` changes it (`ncclTopoCheckGdr` and
//! `ncclTopoGetSystem` in `src/graph`). NCCL has no class NODE: a path through processors of one
//! NUMA node is PHB. NCCL reads paths from sysfs or from a topology file. A job may have settings
//! that are not visible to this program.

use crate::host::{Host, Seen};
use crate::machine::Class;

/// NCCL's classes of paths, nearest first (`topoPathTypeStr`).
const LEVELS: [&str; 10] = [
    "LOC", "NVL", "NVB", "C2C", "PIX", "PXB", "P2C", "PXN", "PHB", "SYS",
];
/// Classes that `NCCL_NET_GDR_LEVEL` selects by number, from 0.
const OLD_LEVELS: [&str; 5] = ["LOC", "PIX", "PXB", "PHB", "SYS"];
const DEFAULT: &str = "PXB";

const ENVIRONMENT: &str = "/proc/self/environ";
/// NCCL's configuration file of the machine.
pub(crate) const FILE: &str = "/etc/nccl.conf";
/// Topology file that NCCL reads by default.
const VIRTUAL: &str = "/var/run/nvidia-topologyd/virtualTopology.xml";

/// Value of an NCCL variable, and the value's origin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Setting {
    pub(crate) value: String,
    /// Origin of the value: `in /etc/nccl.conf`.
    pub(crate) place: String,
}

/// Variables that NCCL would see in one process.
pub(crate) trait Variables {
    /// Reads a variable in NCCL's order: environment, the user's file, the machine's file. Returns
    /// the value as written.
    fn setting(&self, name: &str) -> Option<Setting>;

    /// Returns `true` if the process sees this file, or an error if the answer is unknown.
    fn sees(&self, path: &str) -> Seen<bool>;
}

/// Variables of the shell that started this program.
struct Shell<'a>(&'a dyn Host);

impl Variables for Shell<'_> {
    fn setting(&self, name: &str) -> Option<Setting> {
        let host = self.0;
        let read = |file: &str, name: &str| {
            let lines = host.matching(file, name).ok()?;
            let mut lines = lines.split(['\0', '\n']);
            let value = lines.find_map(|line| line.strip_prefix(name)?.strip_prefix('='))?;
            Some(value.trim().to_owned())
        };
        let of = |file: &str, place: &str| {
            let value = read(file, name)?;
            let place = place.to_owned();
            Some(Setting { value, place })
        };
        let of_user = || {
            let home = || Some(format!("{}/.nccl.conf", read(ENVIRONMENT, "HOME")?));
            let file = read(ENVIRONMENT, "NCCL_CONF_FILE").or_else(home);
            let file = file.filter(|file| file.starts_with('/'))?;
            of(&file, &format!("in {file}"))
        };
        of(ENVIRONMENT, "in this shell's environment")
            .or_else(of_user)
            .or_else(|| of(FILE, "in /etc/nccl.conf"))
    }

    fn sees(&self, path: &str) -> Seen<bool> {
        self.0.has(path)
    }
}

/// Topology file that NCCL uses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Topology {
    /// No file: NCCL reads sysfs.
    None,
    /// A topology file. The text names the file and, if configured, the setting.
    File(String),
    /// A configured file that does not exist.
    Missing(Setting),
}

/// NCCL's settings, as far as visible.
#[derive(Debug, Clone)]
pub(crate) struct Nccl {
    /// `NCCL_NET_GDR_LEVEL`, as the name of a class.
    pub(crate) level: Option<Setting>,
    pub(crate) topology: Topology,
    /// `true` if NCCL may send through another GPU that is connected by NVLink and nearer to the
    /// NIC (PXN).
    pub(crate) has_pxn: bool,
}

impl Nccl {
    /// Returns the settings of the shell that started this program.
    pub(crate) fn scan(host: &dyn Host) -> Self {
        Self::of(&Shell(host))
    }

    /// Returns the settings of a process.
    pub(crate) fn of(variables: &dyn Variables) -> Self {
        let named = variables.setting("NCCL_TOPO_FILE");
        let named = named.filter(|it| !it.value.is_empty());
        let topology = match named {
            Some(named) if variables.sees(&named.value) == Ok(false) => Topology::Missing(named),
            Some(Setting { value, place }) => {
                Topology::File(format!("{value}, which NCCL_TOPO_FILE {place} names"))
            }
            None if variables.sees(VIRTUAL) == Ok(true) => Topology::File(VIRTUAL.to_owned()),
            None => Topology::None,
        };
        let level = variables.setting("NCCL_NET_GDR_LEVEL").and_then(|setting| {
            let value = level_of(&setting.value)?.to_owned();
            Some(Setting { value, ..setting })
        });
        let disabled = variables.setting("NCCL_PXN_DISABLE");
        Self {
            level,
            topology,
            has_pxn: disabled.is_none_or(|setting| setting.value == "0"),
        }
    }

    /// Returns the farthest class for which NCCL uses GPUDirect RDMA.
    pub(crate) fn limit(&self) -> &str {
        self.level
            .as_ref()
            .map_or(DEFAULT, |setting| &setting.value)
    }

    /// Returns `true` if NCCL uses GPUDirect RDMA on a path of this class.
    pub(crate) fn takes(&self, class: Class) -> bool {
        rank(name_of(class)) <= rank(self.limit())
    }
}

/// Returns NCCL's name of a class.
pub(crate) fn name_of(class: Class) -> &'static str {
    match class {
        Class::Pix => "PIX",
        Class::Pxb => "PXB",
        Class::Phb | Class::Node => "PHB",
        Class::Sys => "SYS",
    }
}

fn rank(level: &str) -> Option<usize> {
    LEVELS.iter().position(|name| *name == level)
}

/// Returns the class that a value of `NCCL_NET_GDR_LEVEL` selects. Returns `None` for an unknown
/// value, for which NCCL uses its default.
pub(crate) fn level_of(value: &str) -> Option<&'static str> {
    if let Ok(number) = value.parse::<usize>() {
        return OLD_LEVELS.get(number).or(OLD_LEVELS.last()).copied();
    }
    let mut levels = LEVELS.iter();
    levels
        .find(|name| name.eq_ignore_ascii_case(value))
        .copied()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{fixture, testing};

    fn nccl(environment: &str, file: &str) -> Nccl {
        let mut fixture = fixture::small();
        fixture.file(ENVIRONMENT, environment);
        fixture.file(FILE, file);
        fixture.file("/opt/topo.xml", "<system/>");
        fixture.file("/opt/nccl.conf", "NCCL_NET_GDR_LEVEL=PIX\n");
        fixture.file("/home/user/.nccl.conf", "NCCL_NET_GDR_LEVEL=SYS\n");
        Nccl::scan(&fixture.recording)
    }

    #[test]
    fn the_limit_is_pxb_unless_it_is_set() {
        // `NCCL_CONF_FILE` replaces the file in the home directory.
        for [environment, file, limit] in testing::table(
            " |  | PXB
             | NCCL_NET_GDR_LEVEL=PHB | PHB
             A=1\0NCCL_NET_GDR_LEVEL=SYS\0B=2\0 | NCCL_NET_GDR_LEVEL=PHB | SYS
             NCCL_CONF_FILE=/opt/nccl.conf\0 | NCCL_NET_GDR_LEVEL=PHB | PIX
             NCCL_CONF_FILE=/opt/none.conf\0 | NCCL_NET_GDR_LEVEL=PHB | PHB
             HOME=/home/user\0NCCL_CONF_FILE=/opt/none.conf\0 |  | PXB
             HOME=/home/user\0 | NCCL_NET_GDR_LEVEL=PHB | SYS
             HOME=/home/other\0 | NCCL_NET_GDR_LEVEL=PHB | PHB
             | #NCCL_NET_GDR_LEVEL=PHB | PXB
             | NCCL_NET_GDR_LEVEL=sys | SYS
             | NCCL_NET_GDR_LEVEL=0 | LOC
             | NCCL_NET_GDR_LEVEL=3 | PHB
             | NCCL_NET_GDR_LEVEL=9 | SYS
             | NCCL_NET_GDR_LEVEL=NODE | PXB
             | NCCL_NET_GDR_LEVEL= | PXB
             | XNCCL_NET_GDR_LEVEL=SYS;NCCL_NET_GDR_LEVELS=SYS | PXB",
        ) {
            let nccl = nccl(environment, &format!("{}\n", file.replace(';', "\n")));
            assert_eq!(nccl.limit(), limit, "{environment:?} {file:?}");
        }
    }

    #[test]
    fn classes_are_compared_with_the_limit() {
        let takes = |level: &str| {
            let nccl = nccl("", &format!("NCCL_NET_GDR_LEVEL={level}\n"));
            Class::ALL.map(|class| nccl.takes(class))
        };
        assert_eq!(takes(""), [true, true, false, false, false]);
        assert_eq!(takes("LOC"), [false; 5]);
        assert_eq!(takes("PIX"), [true, false, false, false, false]);
        assert_eq!(takes("PHB"), [true, true, true, true, false]);
        assert_eq!(takes("SYS"), [true; 5]);
    }

    #[test]
    fn a_topology_file_is_there_or_not() {
        let file = |name: &str| nccl("", &format!("NCCL_TOPO_FILE={name}\n")).topology;
        let (there, none) = ("/opt/topo.xml", "/opt/none.xml");
        assert!(matches!(file(there), Topology::File(said) if said.contains(there)));
        assert!(matches!(file(none), Topology::Missing(it) if it.value == none));
        assert_eq!(file(""), Topology::None);
        let mut fixture = fixture::small();
        fixture.file(VIRTUAL, "<system/>");
        let topology = Nccl::scan(&fixture.recording).topology;
        assert_eq!(topology, Topology::File(VIRTUAL.to_owned()));
    }
}
