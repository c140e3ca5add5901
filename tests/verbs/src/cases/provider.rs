// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! A provider, and an HCA, that answer otherwise than they should: an error, never a guess, and nothing left behind.

use std::fs;
use std::path::PathBuf;

use anyhow::ensure;
use anyhow::Context;
use anyhow::Result;

use crate::cases::register::refused;
use crate::counters;
use crate::gpu::GRANULE;
use crate::ktap;
use crate::ktap::Case;
use crate::lab::Flavour;
use crate::lab::Lab;
use crate::lab::Peermem;
use crate::rdma::full_access;

const M2: usize = GRANULE as usize;

pub(super) const CASES: &[Case] = &[
    Case {
        name: "provider.unpin_out_of_memory",
        run: unpin_out_of_memory,
    },
    Case {
        name: "provider.strange_tables",
        run: strange_tables,
    },
    Case {
        name: "provider.strange_mappings",
        run: strange_mappings,
    },
    Case {
        name: "provider.failing_calls",
        run: failing_calls,
    },
    Case {
        name: "provider.device_without_pci",
        run: device_without_pci,
    },
];

/// A module's parameter, set until dropped.
struct Parameter {
    path: PathBuf,
    before: String,
}

impl Parameter {
    fn set(module: &str, name: &str, value: &str) -> Result<Self> {
        let before = counters::module_parameter(module, name)
            .with_context(|| format!("{module} has no parameter {name}"))?;
        let path = PathBuf::from(format!("/sys/module/{module}/parameters/{name}"));
        fs::write(&path, value).with_context(|| format!("{name}={value}"))?;
        Ok(Self { path, before })
    }
}

impl Drop for Parameter {
    fn drop(&mut self) {
        // With a line's end: writing nothing sets nothing.
        if let Err(error) = fs::write(&self.path, format!("{}\n", self.before)) {
            ktap::note("not_restored", error);
        }
    }
}

/// The next call of the stand-in at `place` fails with `errno`.
fn fail_next(place: &str, errno: i32) -> Result<()> {
    let path = format!("/sys/kernel/debug/nvidia/fail/{place}");
    fs::write(&path, format!("1 {errno}")).with_context(|| path)
}

/// NVIDIA's module checks little of this, and loses the pin where an unpin fails.
fn needs_ours(lab: &Lab) -> Result<()> {
    if lab.setup.peermem == Peermem::Ours {
        return Ok(());
    }
    ktap::skip(format_args!("asks too much of: {}", lab.setup.peermem))
}

/// `register()` fails with one of `errnos`, and works again afterwards.
fn refused_once(lab: &Lab, errnos: &[i32]) -> Result<()> {
    let memory = lab.allocate_gpu(M2)?;
    refused(lab, memory.span(0, M2)?, errnos)
}

fn works_again(lab: &Lab) -> Result<()> {
    let memory = lab.allocate_gpu(M2)?;
    lab.near.register(memory.span(0, M2)?, full_access())?;
    Ok(())
}

/// A put that fails with -ENOMEM has done nothing: it is made again.
fn unpin_out_of_memory(lab: &Lab) -> Result<()> {
    needs_ours(lab)?;
    let place = match lab.setup.flavour() {
        Flavour::Persistent => "put_pages_persistent",
        Flavour::Revocable => "put_pages",
    };
    let memory = lab.allocate_gpu(M2)?;
    let region = lab.near.register(memory.span(0, M2)?, full_access())?;
    fail_next(place, -libc::ENOMEM)?;
    drop(region);
    let after = counters::Counters::read()?;
    let live = after.get("pins_live")? + after.get("pins_persistent_live")?;
    ktap::note("pins_left", live);
    ensure!(live == 0, "{live} pins are left");
    Ok(())
}

/// Versions from the future, other page sizes, too many and too few entries. `acquire` knows one answer.
fn strange_tables(lab: &Lab) -> Result<()> {
    needs_ours(lab)?;
    for (name, value) in [
        ("table_version", "0x00030000"),
        ("table_version", "0x00010001"),
        ("table_page_size", "0"),
        ("table_page_size", "3"),
        ("table_entries_delta", "1"),
        ("table_entries_delta", "-1"),
    ] {
        let parameter = Parameter::set("nvidia", name, value)?;
        refused_once(lab, &[libc::EFAULT]).with_context(|| format!("{name}={value}"))?;
        drop(parameter);
        works_again(lab)?;
    }
    Ok(())
}

/// The persistent flavour has the provider map; the revocable one maps by itself.
fn strange_mappings(lab: &Lab) -> Result<()> {
    needs_ours(lab)?;
    lab.needs_flavour(Flavour::Persistent)?;
    for (name, value, errno) in [
        ("dma_mapping_version", "0x00030000", libc::EINVAL),
        ("dma_mapping_version", "0x00020002", libc::EINVAL),
        ("dma_entries_delta", "1", libc::EINVAL),
        ("dma_entries_delta", "-1", libc::EINVAL),
        // The provider's answer is the kernel's private ENOTSUPP.
        ("topology_deny", "1", libc::EOPNOTSUPP),
    ] {
        let parameter = Parameter::set("nvidia", name, value)?;
        refused_once(lab, &[errno]).with_context(|| format!("{name}={value}"))?;
        drop(parameter);
        works_again(lab)?;
    }
    Ok(())
}

fn failing_calls(lab: &Lab) -> Result<()> {
    needs_ours(lab)?;
    lab.needs_flavour(Flavour::Persistent)?;
    for (place, errno, seen) in [
        ("get_pages_persistent", libc::EIO, libc::EFAULT),
        ("get_pages_persistent", libc::ENOMEM, libc::EFAULT),
        ("dma_map", libc::EIO, libc::EIO),
        ("dma_map", libc::ENOMEM, libc::ENOMEM),
        ("dma_map_page", libc::EIO, libc::EIO),
    ] {
        fail_next(place, -errno)?;
        refused_once(lab, &[seen]).with_context(|| format!("{place} fails with {errno}"))?;
        works_again(lab)?;
    }
    Ok(())
}

/// An HCA with no DMA device, or one that is not on the PCI bus. NVIDIA's module takes either for a PCI device.
fn device_without_pci(lab: &Lab) -> Result<()> {
    needs_ours(lab)?;
    for device in ["none", "nonpci"] {
        let parameter = Parameter::set("rdma_rxe", "peer_dma_dev", device)?;
        refused_once(lab, &[libc::ENODEV]).with_context(|| device)?;
        drop(parameter);
        works_again(lab)?;
    }
    Ok(())
}
