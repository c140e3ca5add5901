// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! `docs/performance.md`: what a bench measured, and how it is to be read.

use super::goals;
use super::record::What;
use super::table;
use super::Machine;
use super::Measured;
use crate::documents::wrapped;

/// Where the page lies in the repository.
pub(super) const PAGE: &str = "docs/performance.md";

const HEAD: &str = "<!-- SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause -->\n\
<!-- Made by `make bench` from what it measured. -->\n\
# What a registration costs\n\n";

/// What stands before the tables, a paragraph each. `{…}` is put in.
const INTRODUCTION: &[&str] = &[
    "This module beside NVIDIA's {theirs}, flavour by flavour, on the same kernel and the same rig, in {rounds} rounds that \
     alternate. Nothing here was measured on a GPU or an RDMA card.",
    "- **Instructions, not time.** The machine is QEMU with one processor and `-icount shift=0`: its clock, the cycle counter \
     included, counts instructions, one a nanosecond. Own costs and `ibv_reg_mr` are instructions. No figure on this page is \
     wall time.",
    "- **Own** is what the module's functions take (acquire, get_pages, dma_map, dma_unmap, put_pages, release, and \
     get_page_size) with all that they call of the kernel, the provider's calls taken off. `tests/bench` hands ib_core a copy \
     of whichever client registers, whose functions read the clock around the client's own; `tests/gpu` reads it where its \
     calls come in and return. A function that does nothing took {function} instructions that way, a call of the provider's \
     added {provider_call} to its caller's part; both are taken off. Interrupts are not: they are the spread.",
    "- **Whole** is own, an instruction as a nanosecond, and the provider at the published prices of a V100 (gdrcopy): 70 µs a \
     pin, 38 µs an unpin, and 3 ms a GiB pinned, which is extrapolated from 16 MiB. For `dma_map_pages` nothing is published: \
     its price here is 0. Both modules call it once, so that any other price moves the ratio towards 1: the column _with \
     mapping_ has what the stand-in's own mapping and unmapping take (an instruction as a nanosecond), as an example. The \
     revocable flavour of this module does not call it, and maps the runs by itself: that is in its own cost.",
    "- **Memory**: contiguous in one run, in chunks of 2 MiB, or fragmented: no two pages of 64 KiB side by side. Kernel \
     memory is what the allocators gave in those functions, the provider's calls left out.",
    "- **Spread** is from the least to the most of all samples, in parts of their median. What is registered is registered once \
     before it is measured, up to 1 GiB.",
    "- NVIDIA's module makes two clients; the one without the callback is compared with our persistent flavour, the one with it \
     with our revocable one.",
];

const MACHINE: &str = "Measured on {processor}; {qemu}; Linux {kernel}; this module's version is {ours}. Only the host's \
compilers bear on the figures, not its speed.";

/// What stands behind a table.
const MUTEX: &str = "The mutex is ib_core's `peer_memory_mutex`, for the whole machine: acquire's own cost and the provider's \
calls in it, at the prices above.";

const HCA: &str = "`HCA` is what `ib_umem_find_best_pgsz` makes of the table: entries of the HCA's own, and their size, with \
what mlx5 offers (4 KiB to 2 GiB). _Old_ is its form until Linux 6.15 and OFED 25.04, _new_ that since. Both are re-expressed \
in `tests/verbs/src/bench/pgsz.rs`; for the new form, each figure is checked against the kernel's own function. Bytes are \
bytes.";

const APPLICATIONS: &str = "What `ibv_reg_mr` and `ibv_dereg_mr` take, in instructions: libibverbs, ib_core, rxe, the stand-in \
and the module. The stand-in's prices are its own, and no GPU's; there is no goal.";

const REVOCATION: &str = "From the call that frees an allocation to its return, by when the last of the regions on it is dead: \
instructions, the stand-in's and rxe's included, which are the same for both modules. Each region is one of 64 KiB, and all are \
on the same page.";

const NOT_YET: &[&str] = &[
    "- Threads and processes that register at once, against what the provider's lock allows.",
    "- A loop of register, transfer, deregister for small buffers, and a start-up like NCCL's.",
    "- The data path. `make test TEST=perftest` has perftest over GPU memory with both modules, without a comparison with \
     host memory.",
];

fn is_told(what: &What) -> bool {
    what.bytes == 64 << 10 || what.bytes == 1 << 30
}

/// The tables of all flavours, for a terminal.
pub(super) fn tables(measured: &[Measured]) -> String {
    let goals: Vec<_> = measured
        .iter()
        .map(|flavour| (flavour.name, flavour.goals.as_slice()))
        .collect();
    let mut text = table::goals(&goals);
    for flavour in measured {
        let pairs = goals::pairs(&flavour.ours, &flavour.theirs);
        text.push_str(&format!("\n{}\n\n", flavour.name));
        for part in [
            table::costs(&pairs),
            table::calls(&pairs),
            table::memory(&pairs),
        ] {
            text.push_str(&part);
            text.push('\n');
        }
        if !flavour.freed[0].is_empty() {
            text.push_str(&table::revocations(&flavour.freed[0], &flavour.freed[1]));
            text.push('\n');
        }
    }
    text
}

/// The page.
pub(super) fn page(machine: &Machine, measured: &[Measured]) -> String {
    let mut text = HEAD.to_owned();
    let put_in = |paragraph: &str| {
        [
            ("{theirs}", machine.theirs.clone()),
            ("{ours}", machine.ours.clone()),
            ("{rounds}", machine.rounds.to_string()),
            ("{processor}", machine.processor.clone()),
            ("{qemu}", machine.qemu.clone()),
            ("{kernel}", machine.kernel.clone()),
            ("{function}", machine.calibration.function.to_string()),
            (
                "{provider_call}",
                machine.calibration.provider_call.to_string(),
            ),
        ]
        .into_iter()
        .fold(paragraph.to_owned(), |text, (name, value)| {
            text.replace(name, &value)
        })
    };
    for paragraph in INTRODUCTION {
        let indent = if paragraph.starts_with("- ") {
            "  "
        } else {
            ""
        };
        wrapped(&mut text, &put_in(paragraph), indent);
        if indent.is_empty() {
            text.push('\n');
        }
    }
    text.push('\n');
    wrapped(&mut text, &put_in(MACHINE), "");
    let goals: Vec<_> = measured
        .iter()
        .map(|flavour| (flavour.name, flavour.goals.as_slice()))
        .collect();
    text.push_str("\n## Goals\n\nOurs in parts of NVIDIA's: the worst, and where it was.\n\n");
    text.push_str(&table::goals(&goals));
    for flavour in measured {
        let pairs = goals::pairs(&flavour.ours, &flavour.theirs);
        let name = flavour.name;
        text.push_str(&format!("\n## Cost, {name}\n\n"));
        text.push_str(&table::costs(&pairs));
        text.push_str(&format!("\n## Provider calls and the mutex, {name}\n\n"));
        wrapped(&mut text, MUTEX, "");
        text.push('\n');
        text.push_str(&table::calls(&pairs));
        text.push_str(&format!(
            "\n## Scatter lists, kernel memory, HCA pages, {name}\n\n"
        ));
        wrapped(&mut text, HCA, "");
        text.push('\n');
        text.push_str(&table::memory(&pairs));
        text.push_str(&format!("\n## Where the instructions are, {name}\n\n"));
        text.push_str(&table::functions(&pairs, is_told));
        text.push_str(&format!("\n## As an application sees it, {name}\n\n"));
        wrapped(&mut text, APPLICATIONS, "");
        text.push('\n');
        text.push_str(&table::applications(&pairs));
        if !flavour.freed[0].is_empty() {
            text.push_str(&format!("\n## Revocation, {name}\n\n"));
            wrapped(&mut text, REVOCATION, "");
            text.push('\n');
            text.push_str(&table::revocations(&flavour.freed[0], &flavour.freed[1]));
        }
    }
    text.push_str("\n## Not measured yet\n\n");
    for line in NOT_YET {
        wrapped(&mut text, line, "  ");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::super::record;
    use super::super::record::Calibration;
    use super::*;

    #[test]
    fn the_page_has_everything() {
        let ours = record::rows(&record::tests::lines(1, 100)).expect("rows");
        let theirs = record::rows(&record::tests::lines(2, 200)).expect("rows");
        let goals = goals::of_registrations(&goals::pairs(&ours, &theirs));
        let machine = Machine {
            processor: "2 × a processor".to_owned(),
            qemu: "QEMU".to_owned(),
            kernel: "7.x".to_owned(),
            ours: "1".to_owned(),
            theirs: "550".to_owned(),
            rounds: 3,
            calibration: Calibration {
                function: 8,
                provider_call: 28,
            },
        };
        let freed = record::revocations(&record::tests::lines(1, 100)).expect("samples");
        let measured = [Measured {
            freed: [freed.clone(), freed],
            name: "persistent",
            ours,
            theirs,
            goals,
        }];
        let text = page(&machine, &measured);
        assert!(!text.contains('{'), "{text}");
        for word in [
            "took 8 instructions",
            "550",
            "## Goals",
            "**missed:**",
            "| acquire",
        ] {
            assert!(text.contains(word), "{word}");
        }
        assert!(text.starts_with("<!-- SPDX"));
        assert!(tables(&measured).contains("own cost, 64 KiB"));
    }
}
