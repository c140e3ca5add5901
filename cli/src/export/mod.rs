// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! `peermemctl export`: metrics for Prometheus, written to a file or standard output, or served
//! over HTTP.

mod http;
mod metrics;

use std::fs;
use std::io::Write as _;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use anyhow::Context as _;

use crate::args;
use crate::doctor::Expectation;
use crate::finding::Status;
use crate::host::Host;
use crate::report::Out;

/// Exports one scan, or serves until killed. The findings do not affect the exit status, since the
/// metrics contain the findings. Returns an error if the file cannot be written, or the server
/// cannot listen on the address.
pub(crate) fn run(host: &dyn Host, args: &args::Export, out: &mut Out) -> anyhow::Result<Status> {
    if out.is_json() {
        anyhow::bail!("export cannot print JSON: metrics have their own format; list, stats and doctor can print JSON");
    }
    let expectation = Expectation::load(&args.expectation)?;
    if let Some(listen) = &args.listen {
        let listener = TcpListener::bind(&listen.addresses[..])
            .with_context(|| format!("cannot listen on {}", listen.text))?;
        let address = listener
            .local_addr()
            .map_or_else(|_| listen.text.clone(), |address| address.to_string());
        eprintln!("peermemctl: metrics on http://{address}/metrics");
        http::serve(listener, http::Limits::USUAL, || {
            metrics::text(host, !args.no_doctor, &expectation)
        });
        return Ok(Status::Ok);
    }
    let text = metrics::text(host, !args.no_doctor, &expectation)?;
    match &args.output {
        Some(file) => {
            replace(file, &text).with_context(|| format!("cannot write {}", file.display()))?;
        }
        None => out.raw(&text),
    }
    Ok(Status::Ok)
}

/// Replaces a file atomically: readers see the old text or the new text.
fn replace(file: &Path, text: &str) -> anyhow::Result<()> {
    let directory = match file.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    // The temporary file is in the same directory, because a rename cannot cross file systems. The
    // file's name does not end in `.prom`, because the collector reads all files with that suffix.
    let mut new = tempfile::Builder::new()
        .prefix(".peermemctl.")
        .suffix(".new")
        .tempfile_in(directory)?;
    new.write_all(text.as_bytes())?;
    new.as_file()
        .set_permissions(fs::Permissions::from_mode(0o644))?;
    new.persist(file)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_replaced_atomically() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("peermem.prom");
        for text in ["one 1\n", "two 2\n"] {
            replace(&file, text).unwrap();
            assert_eq!(fs::read_to_string(&file).unwrap(), text);
            let mode = fs::metadata(&file).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o644);
        }
        let names: Vec<_> = fs::read_dir(directory.path()).unwrap().collect();
        assert_eq!(names.len(), 1, "the temporary file is left");
        assert!(replace(&directory.path().join("not there/x"), "").is_err());
    }
}
