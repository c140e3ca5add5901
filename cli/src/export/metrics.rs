// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! The metrics of one scrape of a host, in Prometheus' text format 0.0.4. `docs/monitoring.md`
//! lists the metrics.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Context as _;
use prometheus::core::Collector;
use prometheus::{GaugeVec, IntCounterVec, Opts, Registry, TextEncoder};

use crate::debugfs::{Counter, Missing, Module, Time};
use crate::doctor::Expectation;
use crate::finding::Level;
use crate::host::Host;
use crate::machine::counters::{Counters, Kind, COUNTERS};
use crate::machine::pci::{Address, Link, Rate};
use crate::machine::{Class, Machine, Port};
use crate::registrations::{GpuId, HcaId, Listing};
use crate::render::known;
use crate::software::MODULE;
use crate::{debugfs, doctor, registrations, stats};

/// The metrics of one scrape.
struct Metrics {
    registry: Registry,
    /// For each collector: its name, `true` if it could read its data, and its duration in seconds.
    parts: Vec<(&'static str, bool, Option<f64>)>,
}

/// Returns the seconds since `begin` by the host's clock. For a recording, the result is 0, because
/// its clock does not advance.
fn elapsed(host: &dyn Host, begin: Option<Time>) -> Option<f64> {
    let begin = begin?;
    registrations::now(host).map(|now| debugfs::seconds(begin.until(now)))
}

/// A sample: label values, and the sample's value.
type Sample<T> = (Vec<String>, T);

/// Families of metrics. Each line has the name, the labels and the help text of a family.
const FAMILIES: &str = "\
peermem_active_bytes | mode | GPU memory of active registrations, as the module counts it.
peermem_active_registrations | mode | Active registrations, as the module counts them.
peermem_bar1_size_bytes | gpu index | The size of the GPU's BAR1.
peermem_bar1_used_bytes | gpu index | BAR1 in use, for RDMA and everything else, according to NVML.
peermem_best_path_info | gpu hca path | The nearest RDMA devices of a GPU, and how near they are.
peermem_collector_duration_seconds | collector | How long this collector took at the last scrape.
peermem_collector_success | collector | Whether this collector could read its data at the last scrape.
peermem_doctor_findings | check level | What peermemctl doctor finds.
peermem_errors_total | event | Errors other than refusals: pins leaked or orphaned, mappings not undone, spurious callbacks; and other_client, which is not an error.
peermem_exporter_info | version | The program that collected the metrics.
peermem_gpu_info | gpu index name | A GPU.
peermem_gpu_pinned_bytes | gpu index | Registered GPU memory; memory that one process registered several times counts once.
peermem_module_info | version whose | The module nvidia_peermem that is loaded.
peermem_module_loaded |  | Whether a module nvidia_peermem of any vendor is loaded.
peermem_module_parameter_info | parameter value | A parameter of the module, and its value.
peermem_pci_errors_total | address device severity error | PCI errors of a device, as AER counts them.
peermem_pci_link_lanes | address device | Lanes of a device's PCI link, as it is now.
peermem_pci_link_max_lanes | address device | Number of lanes that both ends of a device's PCI link have.
peermem_pci_link_max_transfers_per_second | address device | Highest speed that both ends of a device's PCI link support.
peermem_pci_link_transfers_per_second | address device | Speed of a device's PCI link, as it is now; an idle GPU lowers it.
peermem_port_active | hca port link_layer | Whether a port of an RDMA device is ACTIVE.
peermem_port_bytes_total | hca port direction | Bytes that went through a port.
peermem_port_errors_total | hca port counter | Errors, retransmissions and signs of congestion that a port has counted.
peermem_port_lanes | hca port | The lanes of a port's cable that are in use.
peermem_port_packets_total | hca port direction | Packets that went through a port.
peermem_port_rate_bytes_per_second | hca port | The rate of a port of an RDMA device, as it is now.
peermem_port_transmit_wait_ticks_total | hca port | Ticks in which a port had something to send, but was not allowed to send.
peermem_processes |  | Processes that have registrations.
peermem_refusals_total | mode reason | Registrations that the module refused.
peermem_registration_bytes | gpu index hca path mode state | GPU memory of registrations: the sum of the lengths of the registrations.
peermem_registration_events_total | event mode | Events in the lives of registrations.
peermem_registration_freed_bytes | gpu index hca path mode state | The part of peermem_registration_bytes that the processes have freed, as far as visible.
peermem_registrations | gpu index hca path mode state | Registrations in the module's list, by state; a registration over several GPUs counts with the first GPU.
peermem_scrape_duration_seconds |  | How long the last scrape took.
peermem_unreadable_lines |  | Lines of the module's counters that this program does not understand.";

/// Returns the options and the labels of a family.
fn family(name: &str) -> anyhow::Result<(Opts, Vec<&'static str>)> {
    let mut rows = FAMILIES.lines().map(|row| row.split(" | "));
    let row = rows.find_map(|mut row| (row.next()? == name).then_some(row));
    let mut row = row.with_context(|| format!("no family {name}"))?;
    let labels = row.next().unwrap_or_default().split_whitespace();
    Ok((
        Opts::new(name, row.next().unwrap_or_default()),
        labels.collect(),
    ))
}

impl Metrics {
    fn gauges(
        &self,
        name: &str,
        samples: impl IntoIterator<Item = Sample<f64>>,
    ) -> anyhow::Result<()> {
        let (opts, labels) = family(name)?;
        let family = GaugeVec::new(opts, &labels)?;
        self.add(&family, samples, |values, value| {
            family.get_metric_with_label_values(values)?.set(value);
            Ok(())
        })
    }

    fn gauge(&self, name: &str, value: f64) -> anyhow::Result<()> {
        self.gauges(name, [(Vec::new(), value)])
    }

    fn totals(
        &self,
        name: &str,
        samples: impl IntoIterator<Item = Sample<u64>>,
    ) -> anyhow::Result<()> {
        let (opts, labels) = family(name)?;
        let family = IntCounterVec::new(opts, &labels)?;
        self.add(&family, samples, |values, value| {
            family.get_metric_with_label_values(values)?.inc_by(value);
            Ok(())
        })
    }

    /// Adds a family with its samples. Skips an empty family, because the text format does not
    /// allow a family without samples.
    fn add<T>(
        &self,
        family: &(impl Collector + Clone + 'static),
        samples: impl IntoIterator<Item = Sample<T>>,
        set: impl Fn(&[&str], T) -> prometheus::Result<()>,
    ) -> anyhow::Result<()> {
        let mut samples = samples.into_iter().peekable();
        if samples.peek().is_none() {
            return Ok(());
        }
        for (values, value) in samples {
            let values: Vec<&str> = values.iter().map(String::as_str).collect();
            set(&values, value)?;
        }
        Ok(self.registry.register(Box::new(family.clone()))?)
    }

    /// Adds counters of the module.
    fn counters<'a>(
        &self,
        name: &str,
        counters: impl IntoIterator<Item = &'a Counter>,
    ) -> anyhow::Result<()> {
        let (_, labels) = family(name)?;
        let samples = counters.into_iter().map(|counter| {
            let values = labels.iter().map(|label| match *label {
                "event" => counter.event.clone(),
                "mode" => known(counter.mode.as_ref()),
                _ => known(counter.reason.as_ref()),
            });
            (values.collect(), counter.count)
        });
        self.totals(name, samples)
    }

    /// Runs the collector `scan`, which returns `true` if it could read its data.
    fn part(
        &mut self,
        host: &dyn Host,
        name: &'static str,
        scan: impl FnOnce(&Self) -> anyhow::Result<bool>,
    ) -> anyhow::Result<()> {
        let begin = registrations::now(host);
        let success = scan(self).with_context(|| format!("metrics of {name}"))?;
        self.parts.push((name, success, elapsed(host, begin)));
        Ok(())
    }
}

/// Converts a number to Prometheus' only numeric type.
fn float(number: u64) -> f64 {
    // CAST: The conversion is exact up to 2^53.
    number as f64
}

fn truth(is: bool) -> f64 {
    f64::from(u8::from(is))
}

/// Scans the host and returns the metrics. Missing data is left out, and the
/// `peermem_collector_success` of its collector is 0.
pub(crate) fn text(
    host: &dyn Host,
    with_doctor: bool,
    expectation: &Expectation,
) -> anyhow::Result<String> {
    let mut metrics = Metrics {
        registry: Registry::new(),
        parts: Vec::new(),
    };
    let begin = registrations::now(host);
    let mut ours = None;
    metrics.part(host, "module", |metrics| {
        let seen;
        (ours, seen) = module(host, metrics)?;
        Ok(seen)
    })?;
    let mut listing = None;
    if let Some(ours) = &ours {
        metrics.part(host, "counters", |metrics| counters(host, ours, metrics))?;
        metrics.part(host, "registrations", |metrics| {
            listing = Listing::scan(host).ok();
            match &listing {
                Some(listing) => registrations(listing, metrics),
                None => Ok(false),
            }
        })?;
    }
    let mut machine = None;
    metrics.part(host, "machine", |metrics| {
        machine = Machine::scan(host).ok();
        gpus(host, machine.as_ref(), listing.as_ref(), metrics)
    })?;
    metrics.part(host, "ports", |metrics| match &machine {
        Some(machine) => {
            ports(machine, metrics)?;
            links(machine, metrics)?;
            counted(&Counters::scan(host, machine), machine, metrics)?;
            Ok(true)
        }
        None => Ok(false),
    })?;
    if with_doctor {
        metrics.part(host, "doctor", |metrics| match &machine {
            Some(machine) => findings(host, machine, expectation, metrics),
            None => Ok(false),
        })?;
    }
    let parts = std::mem::take(&mut metrics.parts);
    let label = |name: &str| vec![name.to_owned()];
    metrics.gauges(
        "peermem_collector_success",
        parts
            .iter()
            .map(|(name, success, _)| (label(name), truth(*success))),
    )?;
    metrics.gauges(
        "peermem_collector_duration_seconds",
        parts
            .iter()
            .filter_map(|(name, _, seconds)| Some((label(name), (*seconds)?))),
    )?;
    metrics.gauges(
        "peermem_exporter_info",
        [(label(env!("CARGO_PKG_VERSION")), 1.0)],
    )?;
    if let Some(seconds) = elapsed(host, begin) {
        metrics.gauge("peermem_scrape_duration_seconds", seconds)?;
    }
    Ok(TextEncoder::new().encode_to_string(&metrics.registry.gather())?)
}

/// Reports the loaded module. Returns the module if it is ours and its files are readable.
fn module(host: &dyn Host, metrics: &Metrics) -> anyhow::Result<(Option<Module>, bool)> {
    let seen = Module::scan(host);
    let is_loaded = match &seen {
        Ok(_) => Ok(true),
        Err(Missing::NotLoaded) => Ok(false),
        Err(Missing::NoSysfs(why)) => Err(why.clone()),
        Err(_) => host.has(MODULE),
    };
    let Ok(is_loaded) = is_loaded else {
        return Ok((None, false));
    };
    metrics.gauge("peermem_module_loaded", truth(is_loaded))?;
    if !is_loaded {
        return Ok((None, true));
    }
    let (whose, is_seen) = match &seen {
        Ok(_) => ("peermem-rs", true),
        Err(Missing::Other(_)) => ("other", true),
        // The files are not readable, so the module may be ours or NVIDIA's.
        Err(_) => ("unknown", false),
    };
    let version = host
        .text(&format!("{MODULE}/version"))
        .or_else(|why| {
            seen.as_ref()
                .map(|module| module.version.clone())
                .or(Err(why))
        })
        .unwrap_or_else(|_| "unknown".to_owned());
    metrics.gauges(
        "peermem_module_info",
        [(vec![version, whose.to_owned()], 1.0)],
    )?;
    let parameters = host
        .names(&format!("{MODULE}/parameters"))
        .unwrap_or_default();
    metrics.gauges(
        "peermem_module_parameter_info",
        parameters.into_iter().filter_map(|name| {
            let value = host.text(&format!("{MODULE}/parameters/{name}")).ok()?;
            Some((vec![name, value], 1.0))
        }),
    )?;
    Ok((seen.ok(), is_seen))
}

fn counters(host: &dyn Host, module: &Module, metrics: &Metrics) -> anyhow::Result<bool> {
    let Ok(read) = module.counters(host) else {
        return Ok(false);
    };
    let all = &read.records;
    metrics.counters(
        "peermem_refusals_total",
        all.iter().filter(|one| one.event == "refused"),
    )?;
    let is_active = |one: &&Counter| one.event.starts_with("active");
    let lives = all
        .iter()
        .filter(|one| one.mode.is_some() && one.reason.is_none());
    metrics.counters(
        "peermem_registration_events_total",
        lives.clone().filter(|one| !is_active(one)),
    )?;
    for (event, name) in [
        ("active", "peermem_active_registrations"),
        ("active_bytes", "peermem_active_bytes"),
    ] {
        let its = lives.clone().filter(|one| one.event == event);
        let samples = its.map(|one| (vec![known(one.mode.as_ref())], float(one.count)));
        metrics.gauges(name, samples)?;
    }
    metrics.counters(
        "peermem_errors_total",
        all.iter()
            .filter(|one| one.mode.is_none() && one.reason.is_none()),
    )?;
    metrics.gauge("peermem_unreadable_lines", float(read.unreadable))?;
    Ok(true)
}

/// Totals of registrations: number, bytes, and bytes that processes have freed. `None`: unknown.
type Sum = (u64, u64, Option<u64>);

fn registrations(listing: &Listing, metrics: &Metrics) -> anyhow::Result<bool> {
    let mut sums: BTreeMap<Vec<String>, Sum> = BTreeMap::new();
    for one in &listing.registrations {
        // A registration over several GPUs is counted only for its first GPU. If such a
        // registration were in several series, sums over the series would be wrong.
        let gpu = one.gpus.first();
        let labels = vec![
            known(gpu.map(|gpu| &gpu.address)),
            known(gpu.and_then(|gpu| gpu.index)),
            known(one.hca.as_ref().map(HcaId::name)),
            known(one.class.map(Class::name)),
            known(one.line.mode.as_ref()),
            known(one.line.state.as_ref()),
        ];
        let (count, bytes, freed) = sums.entry(labels).or_default();
        if let Some(bytes) = one.freed_bytes {
            *freed = Some(freed.unwrap_or(0).saturating_add(bytes));
        }
        *count = count.saturating_add(1);
        *bytes = bytes.saturating_add(one.line.len.unwrap_or(0));
    }
    let each = |value: fn(&Sum) -> Option<u64>| {
        let sums = sums.iter();
        sums.filter_map(move |(labels, sum)| Some((labels.clone(), float(value(sum)?))))
    };
    metrics.gauges("peermem_registrations", each(|sum| Some(sum.0)))?;
    metrics.gauges("peermem_registration_bytes", each(|sum| Some(sum.1)))?;
    metrics.gauges("peermem_registration_freed_bytes", each(|sum| sum.2))?;
    metrics.gauge(
        "peermem_processes",
        float(registrations::count(listing.holders().len())),
    )?;
    Ok(true)
}

fn gpus(
    host: &dyn Host,
    machine: Option<&Machine>,
    listing: Option<&Listing>,
    metrics: &Metrics,
) -> anyhow::Result<bool> {
    let held = stats::held(host, listing);
    let of = |gpu: &Option<GpuId>| {
        gpu.as_ref()
            .map(|gpu| vec![gpu.address.clone(), known(gpu.index)])
    };
    let each = |value: fn(&stats::Held) -> Option<u64>| {
        let held = held.iter();
        held.filter_map(move |held| Some((of(&held.gpu)?, float(value(held)?))))
    };
    metrics.gauges("peermem_gpu_pinned_bytes", each(|held| held.distinct_bytes))?;
    metrics.gauges("peermem_bar1_size_bytes", each(|held| held.bar1_bytes))?;
    metrics.gauges("peermem_bar1_used_bytes", each(|held| held.bar1_used_bytes))?;
    let Some(machine) = machine else {
        return Ok(false);
    };
    metrics.gauges(
        "peermem_gpu_info",
        machine.gpus.iter().map(|gpu| {
            let labels = vec![gpu.at.to_string(), gpu.index.to_string(), gpu.name.clone()];
            (labels, 1.0)
        }),
    )?;
    metrics.gauges(
        "peermem_best_path_info",
        machine
            .pairs
            .iter()
            .filter(|pair| pair.is_best)
            .map(|pair| {
                let labels = vec![
                    pair.gpu.to_string(),
                    pair.hca.clone(),
                    known(pair.class.map(Class::name)),
                ];
                (labels, 1.0)
            }),
    )?;
    Ok(true)
}

/// Reports state, rate and width of each port.
fn ports(machine: &Machine, metrics: &Metrics) -> anyhow::Result<()> {
    let each = || {
        machine.hcas.iter().flat_map(|hca| {
            let labels = |port: &Port| vec![hca.name.clone(), port.number.to_string()];
            hca.ports.iter().map(move |port| (labels(port), port))
        })
    };
    metrics.gauges(
        "peermem_port_active",
        each().filter_map(|(mut labels, port)| {
            labels.push(known(port.layer.as_ref()));
            Some((labels, truth(port.state.as_deref()? == "ACTIVE")))
        }),
    )?;
    metrics.gauges(
        "peermem_port_rate_bytes_per_second",
        each().filter_map(|(labels, port)| {
            let megabits = port.megabits()?;
            // 10^6 bits are 125,000 bytes.
            Some((labels, float(megabits.saturating_mul(125_000))))
        }),
    )?;
    metrics.gauges(
        "peermem_port_lanes",
        each().filter_map(|(labels, port)| {
            // The rate has the form `400 Gb/sec (4X NDR)`.
            let (_, width) = port.rate.as_deref()?.split_once('(')?;
            Some((labels, width.split_once('X')?.0.parse().ok()?))
        }),
    )
}

/// Returns the name that people use for the device at a PCI address, such as `GPU 0` or `mlx5_0`.
fn device(machine: &Machine, at: Address) -> String {
    let gpu = machine.gpu(at).map(|gpu| format!("GPU {}", gpu.index));
    let hca = || {
        let mut hcas = machine.hcas.iter();
        hcas.find(|hca| hca.functions().contains(&at))
            .map(|hca| hca.name.clone())
    };
    known(gpu.or_else(hca))
}

/// Reports the PCI links of GPUs and NICs.
fn links(machine: &Machine, metrics: &Metrics) -> anyhow::Result<()> {
    let gpus = machine.gpus.iter().map(|gpu| gpu.at);
    let nics = machine.hcas.iter().filter(|hca| !hca.is_software);
    let ends: BTreeSet<Address> = gpus.chain(nics.filter_map(|hca| hca.at)).collect();
    let links: Vec<(Vec<String>, Link)> = ends
        .into_iter()
        .filter_map(|at| {
            let labels = vec![at.to_string(), device(machine, at)];
            Some((labels, machine.link(at)?))
        })
        .collect();
    let speed = |rate: Rate| float(u64::from(rate.speed).saturating_mul(100_000_000));
    let lanes = |rate: Rate| float(u64::from(rate.width));
    let each = |value: &dyn Fn(&Link) -> f64| {
        let samples = links
            .iter()
            .map(|(labels, link)| (labels.clone(), value(link)));
        // The value 0 means that the kernel does not know the value.
        samples
            .filter(|(_, value)| *value > 0.0)
            .collect::<Vec<_>>()
    };
    metrics.gauges("peermem_pci_link_lanes", each(&|link| lanes(link.now)))?;
    metrics.gauges("peermem_pci_link_max_lanes", each(&|link| lanes(link.most)))?;
    let (now, most) = (
        each(&|link| speed(link.now)),
        each(&|link| speed(link.most)),
    );
    metrics.gauges("peermem_pci_link_transfers_per_second", now)?;
    metrics.gauges("peermem_pci_link_max_transfers_per_second", most)?;
    Ok(())
}

/// Reports the counters of ports and PCI functions.
fn counted(counters: &Counters, machine: &Machine, metrics: &Metrics) -> anyhow::Result<()> {
    // Pairs each value with its counter.
    let each = |wanted: fn(Kind) -> bool| {
        counters
            .ports
            .iter()
            .flat_map(move |((hca, port), values)| {
                COUNTERS
                    .iter()
                    .zip(values)
                    .filter(move |(counter, _)| wanted(counter.kind))
                    .filter_map(move |(counter, value)| {
                        Some((vec![hca.clone(), port.to_string()], counter, (*value)?))
                    })
            })
    };
    let directed = |name: &str| match name.contains("xmit") {
        true => "transmit".to_owned(),
        false => "receive".to_owned(),
    };
    metrics.totals(
        "peermem_port_errors_total",
        each(|kind| !matches!(kind, Kind::Data | Kind::Packets | Kind::Wait)).map(
            |(mut labels, counter, value)| {
                labels.push(counter.name.to_owned());
                (labels, value)
            },
        ),
    )?;
    for (name, wanted, size) in [
        (
            "peermem_port_bytes_total",
            (|kind| kind == Kind::Data) as fn(Kind) -> bool,
            4,
        ),
        (
            "peermem_port_packets_total",
            |kind| kind == Kind::Packets,
            1,
        ),
    ] {
        let samples = each(wanted).map(|(mut labels, counter, value)| {
            labels.push(directed(counter.name));
            (labels, value.saturating_mul(size))
        });
        metrics.totals(name, samples)?;
    }
    metrics.totals(
        "peermem_port_transmit_wait_ticks_total",
        each(|kind| kind == Kind::Wait).map(|(labels, _, value)| (labels, value)),
    )?;
    metrics.totals(
        "peermem_pci_errors_total",
        counters.errors.iter().flat_map(|(at, errors)| {
            errors.iter().map(|(severity, error, count)| {
                let labels = vec![
                    at.to_string(),
                    device(machine, *at),
                    (*severity).to_owned(),
                    error.clone(),
                ];
                (labels, *count)
            })
        }),
    )
}

fn findings(
    host: &dyn Host,
    machine: &Machine,
    expectation: &Expectation,
    metrics: &Metrics,
) -> anyhow::Result<bool> {
    let mut scan = doctor::Scan::new(host, machine);
    expectation.of(&mut scan);
    // The check of counters is skipped because the counters have their own metrics, and a single
    // scan cannot see growth. The check of preload libraries is skipped because it would read the
    // mapped files of all processes at each scrape.
    let skip = [doctor::COUNTERS, doctor::PRELOAD].map(str::to_owned);
    let selection = doctor::Selection {
        skip: &skip,
        ..doctor::Selection::default()
    };
    let findings = doctor::examine(&scan, selection)?;
    // Every level that alerts use starts at 0. Its series therefore exists from the first scrape
    // on. A check that had nothing to examine gets no series, because its 0 would mean that all is
    // well.
    let mut sums: BTreeMap<Vec<String>, u64> = BTreeMap::new();
    let is_skipped = |name: &str| skip.iter().any(|it| it == name);
    for check in doctor::checks_of(&scan).filter(|check| !is_skipped(check.name)) {
        for level in [Level::Warning, Level::Fault, Level::NotVisible] {
            sums.insert(vec![check.name.to_owned(), level.name().to_owned()], 0);
        }
    }
    for finding in &findings {
        let labels = vec![finding.check.to_owned(), finding.level.name().to_owned()];
        if let Some(sum) = sums.get_mut(&labels) {
            *sum = sum.saturating_add(1);
        }
    }
    metrics.gauges(
        "peermem_doctor_findings",
        sums.into_iter().map(|(labels, sum)| (labels, float(sum))),
    )?;
    Ok(true)
}
