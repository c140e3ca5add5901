// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! RDMA devices that a process may use according to `NCCL_IB_HCA` and similar variables. The
//! devices are compared with the nearest devices of each GPU.

use std::collections::BTreeSet;

use serde::Serialize;

use crate::machine::pci::Address;
use crate::machine::{Class, Hca, Machine, Pair};
use crate::software::nccl::{Setting, Variables};

/// Variables that select RDMA devices, and the libraries that read them.
const SELECTORS: [(&str, &str); 3] = [
    ("NCCL", "NCCL_IB_HCA"),
    ("UCX", "UCX_NET_DEVICES"),
    ("NVSHMEM", "NVSHMEM_HCA_LIST"),
];

/// RDMA devices that one library may use.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Choice {
    pub(super) library: &'static str,
    pub(super) variable: &'static str,
    /// Value and origin of the variable. `None`: the library may use all devices.
    #[serde(serialize_with = "value")]
    pub(super) setting: Option<Setting>,
    /// Names of the devices with an active port.
    pub(super) devices: Vec<String>,
    /// Names of the devices that are selected but have no active port.
    pub(super) inactive: Vec<String>,
    /// Words of the value that select no device of this machine.
    pub(super) unmatched: Vec<String>,
}

fn value<S: serde::Serializer>(
    setting: &Option<Setting>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    setting.as_ref().map(|it| &it.value).serialize(serializer)
}

/// A word of a list of devices: the name of a device, or a prefix of names, with an optional port
/// number.
struct Word<'a> {
    name: &'a str,
    port: Option<u32>,
    is_exact: bool,
}

impl<'a> Word<'a> {
    fn parse(word: &'a str, is_exact: bool) -> Self {
        let split = word.rsplit_once(':');
        let port = split.and_then(|(name, port)| Some((name, port.parse().ok()?)));
        match port {
            Some((name, port)) => Self {
                name,
                port: Some(port),
                is_exact,
            },
            None => Self {
                name: word,
                port: None,
                is_exact,
            },
        }
    }

    fn names(&self, hca: &Hca) -> bool {
        let is_name = match self.is_exact {
            true => hca.name == self.name,
            false => hca.name.starts_with(self.name),
        };
        let has_port = |number: u32| hca.ports.iter().any(|port| port.number == number);
        is_name && self.port.is_none_or(has_port)
    }
}

/// Returns `true` if a device may have an active port: a port is active, a port's state is unknown,
/// or no port is visible.
fn is_active(hca: &Hca) -> bool {
    let mut ports = hca.ports.iter();
    hca.ports.is_empty() || ports.any(|port| port.state.is_none() || port.is_active())
}

impl Choice {
    /// Returns the choices of a process: NCCL's choice, and the choices of other libraries whose
    /// variables are set.
    pub(super) fn all(variables: &dyn Variables, machine: &Machine) -> Vec<Self> {
        let of = |(library, variable): (&'static str, &'static str)| {
            let setting = variables
                .setting(variable)
                .filter(|it| !it.value.is_empty());
            let is_wanted = library == "NCCL" || setting.is_some();
            is_wanted.then(|| Self::of(library, variable, setting, machine))
        };
        SELECTORS.into_iter().filter_map(of).collect()
    }

    fn of(
        library: &'static str,
        variable: &'static str,
        setting: Option<Setting>,
        machine: &Machine,
    ) -> Self {
        let text = setting.as_ref().map_or("", |setting| &setting.value);
        // `^` excludes. NCCL treats a name as a prefix, unless the list begins with `=`.
        let (is_excluding, rest) = match text.strip_prefix('^') {
            Some(rest) => (true, rest),
            None => (false, text),
        };
        let (is_exact, rest) = match rest.strip_prefix('=') {
            Some(rest) => (true, rest),
            None => (library != "NCCL", rest),
        };
        let words = rest
            .split(',')
            .map(str::trim)
            .filter(|word| !word.is_empty());
        let words: Vec<&str> = words.filter(|word| *word != "all").collect();
        let parsed = || words.iter().map(|word| Word::parse(word, is_exact));
        let is_named = |hca: &Hca| parsed().any(|word| word.names(hca));
        let is_chosen = |hca: &Hca| words.is_empty() || is_named(hca) != is_excluding;
        let (active, inactive): (Vec<&Hca>, Vec<&Hca>) = machine
            .hcas
            .iter()
            .filter(|hca| is_chosen(hca))
            .partition(|hca| is_active(hca));
        let names = |hcas: Vec<&Hca>| hcas.iter().map(|hca| hca.name.clone()).collect();
        let is_netdev = |word: &str| {
            let ports = machine.hcas.iter().flat_map(|hca| &hca.ports);
            // UCX's list may contain network interfaces.
            library == "UCX" && ports.flat_map(|port| &port.netdevs).any(|own| own == word)
        };
        let is_lost = |word: &&&str| {
            let parsed = Word::parse(word, is_exact);
            !machine.hcas.iter().any(|hca| parsed.names(hca)) && !is_netdev(word)
        };
        let unmatched = words.iter().filter(is_lost).map(|word| (*word).to_owned());
        Self {
            library,
            variable,
            devices: names(active),
            inactive: names(inactive),
            unmatched: unmatched.collect(),
            setting,
        }
    }
}

/// The nearest RDMA devices of a GPU, and the nearest devices among those that the process may use.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Near {
    pub(super) gpu: usize,
    pub(super) address: String,
    pub(super) nearest: Vec<String>,
    pub(super) nearest_class: Option<Class>,
    pub(super) chosen: Vec<String>,
    pub(super) chosen_class: Option<Class>,
}

impl Near {
    pub(super) fn of(machine: &Machine, gpu: Address, choice: &Choice) -> Option<Self> {
        let own = machine.gpu(gpu)?;
        let pairs = machine.pairs_of(gpu);
        let nearest: Vec<&Pair> = pairs.iter().filter(|pair| pair.is_best).collect();
        let may_use = |pair: &&Pair| choice.devices.contains(&pair.hca) && pair.class.is_some();
        let usable = || pairs.iter().filter(may_use);
        let class = usable().filter_map(|pair| pair.class).min();
        let of_class: Vec<&Pair> = usable().filter(|pair| pair.class == class).collect();
        let most = of_class.iter().map(|pair| pair.megabits).max();
        let chosen = of_class.iter().filter(|pair| Some(pair.megabits) == most);
        Some(Self {
            gpu: own.index,
            address: gpu.to_string(),
            nearest_class: nearest.first().and_then(|pair| pair.class),
            nearest: nearest.iter().map(|pair| pair.hca.clone()).collect(),
            chosen: chosen.map(|pair| pair.hca.clone()).collect(),
            chosen_class: class,
        })
    }

    /// Returns `true` if the process may use none of the nearest devices.
    pub(super) fn is_farther(&self) -> bool {
        !self.nearest.is_empty() && !self.nearest.iter().any(|hca| self.chosen.contains(hca))
    }
}

/// Returns a value of `NCCL_IB_HCA` with the nearest RDMA devices of these GPUs, or `None` if a GPU
/// has no RDMA device on PCI. `=` makes NCCL match exact names instead of prefixes.
pub(super) fn suggested(machine: &Machine, gpus: &BTreeSet<Address>) -> Option<String> {
    let mut wanted = BTreeSet::new();
    for gpu in gpus {
        let pairs = machine.pairs_of(*gpu).iter();
        let mut best = pairs
            .filter(|pair| pair.is_best && pair.class.is_some())
            .peekable();
        best.peek()?;
        wanted.extend(best.map(|pair| pair.hca.as_str()));
    }
    let hcas = machine
        .hcas
        .iter()
        .filter(|hca| wanted.contains(hca.name.as_str()));
    let usable = hcas.filter(|hca| !hca.is_software && is_active(hca));
    let words: Vec<String> = usable.flat_map(words_of).collect();
    (!words.is_empty()).then(|| format!("={}", words.join(",")))
}

/// Returns the words that select a device in `NCCL_IB_HCA`. If only some of its ports are active,
/// there is one word for each active port. Otherwise, the only word is the device's name.
fn words_of(hca: &Hca) -> Vec<String> {
    let active: Vec<u32> = hca
        .ports
        .iter()
        .filter(|it| it.is_active())
        .map(|it| it.number)
        .collect();
    match active.is_empty() || active.len() == hca.ports.len() {
        true => vec![hca.name.clone()],
        false => active
            .iter()
            .map(|port| format!("{}:{port}", hca.name))
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use crate::fixture;
    use crate::host::Seen;

    /// Returns `hgx` with one of the two ports near each GPU down.
    fn dead_rails() -> fixture::Fixture {
        let mut fixture = fixture::hgx();
        for hca in [0, 2, 4, 6] {
            fixture.hca_file(&format!("mlx5_{hca}"), "ports/1/state", "1: DOWN\n");
        }
        fixture
    }

    struct Given(&'static str, &'static str);

    impl Variables for Given {
        fn setting(&self, name: &str) -> Option<Setting> {
            let place = String::new();
            let value = self.1.to_owned();
            (name == self.0).then_some(Setting { value, place })
        }

        fn sees(&self, _: &str) -> Seen<bool> {
            Ok(false)
        }
    }

    fn choice(variable: &'static str, value: &'static str) -> Choice {
        let machine = Machine::scan(&dead_rails().recording).unwrap();
        let all = Choice::all(&Given(variable, value), &machine);
        all.into_iter().find(|it| it.variable == variable).unwrap()
    }

    /// The ports of mlx5_0, mlx5_2, mlx5_4 and mlx5_6 are down.
    #[test]
    fn lists_of_devices() {
        for (value, devices, unmatched) in [
            ("", "mlx5_1 mlx5_3 mlx5_5 mlx5_7 mlx5_8", ""),
            ("mlx5", "mlx5_1 mlx5_3 mlx5_5 mlx5_7 mlx5_8", ""),
            ("=mlx5", "", "mlx5"),
            ("=mlx5_1,mlx5_3:1", "mlx5_1 mlx5_3", ""),
            ("mlx5_1:2", "", "mlx5_1:2"),
            ("^mlx5_8,mlx5_7", "mlx5_1 mlx5_3 mlx5_5", ""),
            ("^=mlx5_1", "mlx5_3 mlx5_5 mlx5_7 mlx5_8", ""),
            ("mlx5_0,ibp0", "", "ibp0"),
        ] {
            let found = choice("NCCL_IB_HCA", value);
            assert_eq!(found.devices.join(" "), devices, "{value}");
            assert_eq!(found.unmatched.join(" "), unmatched, "{value}");
        }
        assert_eq!(choice("NCCL_IB_HCA", "=mlx5_0").inactive, ["mlx5_0"]);
        assert_eq!(
            choice("UCX_NET_DEVICES", "mlx5_1:1,ens1f0np0").unmatched,
            [""; 0]
        );
        assert_eq!(choice("UCX_NET_DEVICES", "mlx5").unmatched, ["mlx5"]);
    }

    #[test]
    fn the_suggestion_has_the_nearest_devices_with_an_active_port() {
        let machine = Machine::scan(&fixture::hgx().recording).unwrap();
        let all: BTreeSet<Address> = machine.gpus.iter().map(|gpu| gpu.at).collect();
        let value = suggested(&machine, &all).unwrap();
        assert_eq!(
            value,
            "=mlx5_0,mlx5_1,mlx5_2,mlx5_3,mlx5_4,mlx5_5,mlx5_6,mlx5_7"
        );
        let first: BTreeSet<Address> = all.iter().copied().take(1).collect();
        assert_eq!(suggested(&machine, &first).unwrap(), "=mlx5_0,mlx5_1");
        let machine = Machine::scan(&dead_rails().recording).unwrap();
        assert_eq!(suggested(&machine, &first).unwrap(), "=mlx5_1");
        assert_eq!(suggested(&machine, &BTreeSet::new()), None);
        let machine = Machine::scan(&fixture::no_hca().recording).unwrap();
        let own: BTreeSet<Address> = machine.gpus.iter().map(|gpu| gpu.at).collect();
        assert_eq!(suggested(&machine, &own), None);
    }
}
