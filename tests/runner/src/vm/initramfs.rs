// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! The initramfs of a VM: busybox, the guest's scripts, the early modules, and the command with its
//! environment.

use std::path::Path;

use anyhow::{anyhow, Context as _, Result};

use super::boot::Boot;
use super::cpio::Archive;
use super::options::{Named as _, Options};
use super::plan::Plan;
use crate::command::{find_program, quoted};
use crate::guest::{in_machine, HOST};
use crate::index::name_of;
use crate::paths::Paths;
use crate::{detectors, programs, terminal};

/// Returns the command's environment as lines of a shell script.
fn environment(options: &Options, boot: &Boot, tty: bool) -> Result<String> {
    let mut script = String::new();
    let mut export = |name: &str, value: &str| {
        script.push_str(&format!("export {name}={}\n", quoted(value)));
    };
    for name in "PATH HOME LANG LC_ALL RUST_BACKTRACE PYTHONPATH".split(' ') {
        if let Ok(value) = std::env::var(name) {
            export(name, &value);
        }
    }
    if tty {
        export("TERM", &std::env::var("TERM").unwrap_or("linux".into()));
    }
    export("PEERMEM", &options.peermem.name());
    export("PEERMEM_VERSION", &boot.peermem_version);
    export("TESTVM_PROVIDER", &options.provider.name());
    export("TESTVM_KERNEL", &boot.release);
    if boot.detectors {
        export("TESTVM_SLOWER", &detectors::SLOWER.to_string());
    }
    if boot.control.is_some() {
        let directory = format!("/lib/modules/{}/control", boot.release);
        export(
            "TESTVM_CONTROL_KO",
            &format!("{directory}/nvidia-peermem.ko"),
        );
    }
    if !boot.drivers.is_empty() {
        export(
            "TESTVM_DRIVERS",
            &format!("/lib/modules/{}/drivers", boot.release),
        );
    }
    if let Some((signing, unsigned)) = &boot.signing {
        for (name, path) in [
            ("TESTVM_SIGN_FILE", &signing.sign_file),
            ("TESTVM_SIGN_KEY", &signing.key),
            ("TESTVM_SIGN_CERTIFICATE", &signing.certificate),
            ("TESTVM_UNSIGNED_KO", unsigned),
        ] {
            export(name, &in_machine(path));
        }
    }
    export("TESTVM_GPUS", &options.gpus.to_string());
    export("TESTVM_BAR_MIB", &options.bar.to_string());
    export("TESTVM_IOMMU", &options.iommu.name());
    export("TESTVM_TOPOLOGY", &options.topology.name());
    if options.icount {
        export("TESTVM_ICOUNT", "1");
    }
    if let Some(number) = options.host_number {
        export("TESTVM_HOST", &number.to_string());
        export("TESTVM_PEER", &format!("10.77.0.{}", 3 - number));
    }
    if !boot.preloaded.is_empty() {
        let paths: Vec<String> = boot.preloaded.iter().map(|file| in_machine(file)).collect();
        export("LD_PRELOAD", &paths.join(":"));
        // CUDA_KNOWS_ALL makes the stand-in for CUDA's library treat memory that a program maps
        // without CUDA as CUDA's memory.
        export("CUDA_KNOWS_ALL", "1");
    }
    for variable in &options.env {
        let (name, value) = variable
            .split_once('=')
            .ok_or_else(|| anyhow!("'{variable}' is not NAME=VALUE"))?;
        export(name, value);
    }
    Ok(script)
}

/// Returns the script that runs the command. If there is no command, the script starts a shell.
pub(super) fn command_script(
    paths: &Paths,
    options: &Options,
    boot: &Boot,
    command: &[String],
    tty: bool,
) -> Result<String> {
    let mut script = environment(options, boot, tty)?;
    // The shell finds these programs by name, after all other programs.
    let programs = in_machine(&programs::directory(paths, boot.arch));
    script.push_str(&format!("PATH=$PATH:{}\n", quoted(&programs)));
    if tty {
        if let Some((rows, columns)) = terminal::size() {
            script.push_str(&format!(
                "/run/runner/bin/busybox stty rows {rows} cols {columns}\n"
            ));
        }
    }
    let here = std::env::current_dir().context("the working directory")?;
    let here = here
        .to_str()
        .context("the working directory's name is not UTF-8")?;
    script.push_str(&if options.root == boot.root {
        format!("cd {} || exit 126\n", quoted(&format!("{HOST}{here}")))
    } else {
        format!("cd {} 2>/dev/null || cd /\n", quoted(here))
    });
    let words: Vec<String> = if tty {
        script.push_str("PS1='vm:\\w# '; export PS1\n");
        vec!["command -v bash >/dev/null && exec bash --norc; exec sh".into()]
    } else if command.is_empty() {
        vec!["exec sh -s".into()]
    } else {
        let mut words = vec!["exec".to_owned()];
        words.extend(command.iter().map(|word| quoted(word)));
        words
    };
    script.push_str(&words.join(" "));
    script.push('\n');
    Ok(script)
}

pub(super) fn initramfs(
    paths: &Paths,
    options: &Options,
    detectors: &str,
    plan: &Plan,
    module_root: &Path,
    script: &str,
    tty: bool,
) -> Result<Vec<u8>> {
    let mut archive = Archive::default();
    for directory in "bin dev proc sys job job/early.d host lower above layer new".split(' ') {
        archive.directory(directory)?;
    }
    let is_foreign = plan.arch.foreign().is_some();
    let busybox = if is_foreign {
        options.root.join("bin/busybox")
    } else {
        find_program("busybox").context("busybox (package busybox-static)")?
    };
    archive.copy("bin/busybox", 0o755, &busybox)?;
    archive.symlink("bin/sh", "busybox")?;
    archive.copy("init", 0o755, &paths.repo.join("tests/vm/init"))?;
    for part in ["guest", "detectors"] {
        let file = paths.repo.join("tests/vm").join(part);
        archive.copy(&format!("job/{part}"), 0o644, &file)?;
    }

    let mut early = String::new();
    for path in &plan.early {
        let name = format!("early.d/{}.ko", name_of(path));
        archive.copy(&format!("job/{name}"), 0o644, path)?;
        early.push_str(&name);
        early.push('\n');
    }
    archive.file("job/early", 0o644, early.as_bytes())?;

    let mut load = String::new();
    let mut unload: Vec<String> = Vec::new();
    for (path, values) in &plan.modules {
        let file = path.file_name().context("module without a name")?;
        load.push_str(&format!("{} {values}\n", file.to_string_lossy()));
        unload.insert(0, name_of(path));
    }
    archive.file("job/modules", 0o644, load.as_bytes())?;
    // Does not unload the NICs' driver and its dependencies.
    unload.retain(|name| !name.contains("virtio") && !name.ends_with("failover"));

    let vars = [
        (
            "ROOT_SHARE",
            if options.root == Path::new("/") {
                "host"
            } else {
                "root"
            },
        ),
        // If the VM can run this machine's programs, it uses this machine's `ip`. The `ip` of
        // busybox or of another root lacks features.
        ("TOOLS", if is_foreign { "/" } else { HOST }),
        ("MODULE_ROOT", &in_machine(module_root)),
        ("RXE", if plan.rdma { "1" } else { "" }),
        ("CONSOLE", if tty { "1" } else { "" }),
        ("LAYER", if options.layer.is_some() { "1" } else { "" }),
        ("HOST", if plan.host { "1" } else { "" }),
        (
            "PAIR",
            &options
                .host_number
                .map_or(String::new(), |number| number.to_string()),
        ),
        ("UNLOAD", &unload.join(" ")),
        ("DETECTORS", detectors),
    ];
    let mut text = String::new();
    for (name, value) in vars {
        text.push_str(&format!("{name}={}\n", quoted(value)));
    }
    archive.file("job/vars", 0o644, text.as_bytes())?;
    archive.file("job/run", 0o644, script.as_bytes())?;
    archive.finish()
}
