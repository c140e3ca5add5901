// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause

//! Runs `portable/inspect.sh` on small objects. Each object breaks one rule, or none.

use std::path::Path;
use std::process::Command;
use std::{env, fs};

/// Inspects an object that is assembled from `source`, and returns the complaints.
fn inspect(arch: &str, source: &str) -> String {
    let tools = format!("{arch}-linux-gnu-");
    let name = format!("peermem-inspect-{}-{arch}.o", std::process::id());
    let object = env::temp_dir().join(name);
    let assembly = object.with_extension("s");
    fs::write(&assembly, source).expect("a file");
    let mut assembler = Command::new(format!("{tools}as"));
    let assembled = assembler.arg("-o").args([&object, &assembly]).status();
    assert!(
        assembled.is_ok_and(|status| status.success()),
        "{tools}as of the package binutils-{} fails: {source}",
        tools.trim_end_matches('-').replace('_', "-")
    );
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../portable/inspect.sh");
    let output = Command::new(script).arg(&object).arg(&tools).output();
    let output = output.expect("inspect.sh");
    for file in [&object, &assembly] {
        fs::remove_file(file).expect("a file");
    }
    let said = String::from_utf8(output.stderr).expect("UTF-8");
    assert_eq!(output.status.success(), said.is_empty(), "{said}");
    said.trim_end()
        .replace(&format!("{}: ", object.display()), "")
}

const UNKNOWN: &str = "(of unknown size)";

/// Returns the complaint about the frame of the function `f`.
fn frame(size: &str) -> String {
    format!("frames of more than 1 KiB: <f>: {size}")
}

/// Inserts the code of each case into a function without a fault, and compares the complaints.
fn check(arch: &str, begin: &str, end: &str, cases: &[(&str, String)]) {
    let mut wrong = String::new();
    for (code, expected) in cases {
        let source = format!("\t.globl f\nf:\n\t{begin}\n\t{code}\n\t{end}\n\tret\n");
        let said = inspect(arch, &source);
        if said != *expected {
            wrong += &format!("\n{code:?}: {said:?}, expected {expected:?}");
        }
    }
    assert!(wrong.is_empty(), "{arch}:{wrong}");
}

fn panic(what: &str) -> String {
    format!("a panic is left: {what}")
}

fn register(names: &str) -> String {
    format!("registers that are not the module's: {names}")
}

fn undefined(symbol: &str) -> String {
    format!("{symbol} is not a symbol that every kernel has")
}

fn relocation(kind: &str) -> String {
    format!("relocations that kernels do not know: {kind}")
}

#[test]
fn faults_of_x86_64_code() {
    let begin = "endbr64\n\tmov $peermem_bars_lock, %rdi";
    let end = "call shim_alloc\n\tcall memcpy";
    let large = |code| (code, frame(UNKNOWN));
    let cases = [
        ("sub $0x400, %rsp\n\tadd $0x400, %rsp", String::new()),
        ("sub $0x400, %rsp\n\tlea 0x400(%rsp), %rsp", String::new()),
        ("movups %xmm0, (%rdi)", register("%xmm0")),
        ("push %rbp\n\tmov %rsp, %rbp\n\tpop %rbp", String::new()),
        ("ud2", panic("ud2 is in the code")),
        (
            "call _RN4core9panicking5panic\n_RN4core9panicking5panic:",
            panic("_RN4core9panicking5panic"),
        ),
        ("sub $0x401, %rsp", frame("1025")),
        ("sub $0x300, %rsp\n\tsub $0x108, %rsp", frame("1032")),
        // A loop that probes each page of a large frame.
        (
            "1: sub $0x1000, %rsp\n\tmovq $0, (%rsp)\n\tdec %rax\n\tjne 1b",
            frame("4096"),
        ),
        large("sub %rax, %rsp"),
        large("add $-128, %rsp"),
        large("add %rax, %rsp"),
        large("lea -0x800(%rsp), %rsp"),
        large("and $-64, %rsp"),
        large("mov %rax, %rsp"),
        large("xchg %rax, %rsp"),
        large("enter $0x800, $0"),
        (
            ".reloc ., R_X86_64_GOTPCREL, f",
            relocation("R_X86_64_GOTPCREL"),
        ),
        (
            ".reloc ., R_X86_64_TPOFF32, f",
            relocation("R_X86_64_TPOFF32"),
        ),
        ("call printk", undefined("printk")),
        // Words of the headers that name no symbol: a parameter, the tag of a structure, and a word
        // of a comment.
        ("call reg_handle", undefined("reg_handle")),
        ("call peermem_settlement", undefined("peermem_settlement")),
        ("call afterwards", undefined("afterwards")),
    ];
    check("x86_64", begin, end, &cases);
}

#[test]
fn faults_of_arm64_code() {
    let begin = "bti c\n\tadrp x0, peermem_bars_lock\n\tadd x0, x0, :lo12:peermem_bars_lock";
    let end = "bl shim_alloc\n\tbl memcpy";
    let large = |code| (code, frame(UNKNOWN));
    let pad = |name: &str| format!("functions without a landing pad: {name}");
    let cases = [
        ("sub sp, sp, #0x400\n\tadd sp, sp, #0x400", String::new()),
        (
            "stp x29, x30, [sp, #-96]!\n\tsub sp, sp, #0x3c0\n\tmov x29, sp",
            String::new(),
        ),
        ("brk #1", panic("brk|udf is in the code")),
        ("udf #1", panic("brk|udf is in the code")),
        (
            "bl _RN4core9panicking5panic\n_RN4core9panicking5panic:",
            panic("_RN4core9panicking5panic"),
        ),
        ("sub sp, sp, #0x401", frame("1025")),
        ("sub sp, sp, #1, lsl #12", frame("4096")),
        (
            "stp x29, x30, [sp, #-112]!\n\tsub sp, sp, #0x3a0",
            frame("1040"),
        ),
        large("sub sp, sp, x9"),
        large("sub sp, x9, #16"),
        large("and sp, x9, #-64"),
        large("mov sp, x2"),
        large("mov sp, x9"),
        ("adrp x0, :got:f", relocation("R_AARCH64_ADR_GOT_PAGE")),
        ("bl printk", undefined("printk")),
        ("mov x18, x0", register("x18")),
        ("ldr w18, [x0]", register("w18")),
        ("fmov d8, x0", register("d8")),
        ("add v0.4s, v1.4s, v2.4s", register("v0.4s\nv1.4s\nv2.4s")),
        // Functions without a pad: a global function, a function whose address is taken, and a
        // function in .init.text that .text calls.
        ("ret\n\t.globl g\ng:", pad("g")),
        (
            "ret\n\t.data\n\t.quad g\n\t.text\ng:",
            pad(".text+0x0000000000000010"),
        ),
        (
            "bl g\n\tret\n\t.section .init.text, \"ax\"\ng:",
            pad(".init.text"),
        ),
        ("bl g\n\tret\ng:", String::new()),
    ];
    check("aarch64", begin, end, &cases);
    assert_eq!(
        inspect("aarch64", "\t.globl f\nf:\n\tret\n"),
        pad("none at all\nf")
    );
}
