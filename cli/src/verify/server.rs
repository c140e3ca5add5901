// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! `peermemctl verify --server`: waits for clients, and serves one client at a time.

use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Instant;

use anyhow::{bail, Context as _, Result};
use rustix::net::sockopt;
use rustix::net::sockopt::Timeout;

use super::print::{Pair, Report, Role};
use super::task::Found;
use super::{peer, print, supervisor, task, Here};
use crate::args::Listen;
use crate::finding::Status;
use crate::render::clean;
use crate::report::Out;

/// Maximum number of pairs of a run. The results of all pairs stay in memory until the run ends.
const MOST_PAIRS: usize = 256;

/// Serves one run. With `--keep`, serves runs until the process is killed. `pairs` contains each
/// GPU once, with its index and RDMA device.
///
/// # Errors
/// The server cannot listen on the address.
pub(crate) fn run(
    here: &Here<'_>,
    pairs: &[(usize, &Found, Option<&str>)],
    listen: &Listen,
    out: &mut Out,
) -> Result<Status> {
    let listener = TcpListener::bind(&listen.addresses[..])
        .with_context(|| format!("cannot listen on {}", listen.text))?;
    let address = listener
        .local_addr()
        .map_or_else(|_| listen.text.clone(), |address| address.to_string());
    eprintln!("peermemctl: waits for `peermemctl verify HOST` on {address}");
    if !here.args.keep {
        let report = one_run(here, pairs, &listener)?;
        print::tell(&report, out)?;
        return match report.status() {
            Status::Failed => bail!("nothing could be tried"),
            status => Ok(status),
        };
    }
    out.repeat();
    loop {
        let report = one_run(here, pairs, &listener)?;
        print::tell(&report, out)?;
        out.gap();
        out.flush()?;
    }
}

/// Waits for the next client. Returns `None` if no client connects before the deadline.
fn accept(
    listener: &TcpListener,
    deadline: Option<Instant>,
) -> io::Result<Option<(TcpStream, SocketAddr)>> {
    loop {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        if left.is_some_and(|left| left.is_zero()) {
            return Ok(None);
        }
        sockopt::set_socket_timeout(listener, Timeout::Recv, left)?;
        match listener.accept() {
            Ok(found) => return Ok(Some(found)),
            Err(error) => match error.kind() {
                // The time is up, or the client has already left.
                io::ErrorKind::WouldBlock | io::ErrorKind::ConnectionAborted => {}
                _ => return Err(error),
            },
        }
    }
}

/// Serves all pairs of one client. Each pair has a connection of its own.
fn one_run(
    here: &Here<'_>,
    pairs: &[(usize, &Found, Option<&str>)],
    listener: &TcpListener,
) -> Result<Report> {
    let mut report = Report {
        size: 0,
        gpu_only: false,
        pairs: Vec::new(),
    };
    // Until this run has ended, clients of other addresses are refused.
    let (mut only, mut deadline) = (None, None);
    loop {
        let Some((client, address)) = accept(listener, deadline)? else {
            return Ok(report);
        };
        let hello = match peer::greeted(&client, only) {
            Ok(hello) => hello,
            Err(error) => {
                let why = format!("{error:#}");
                eprintln!("peermemctl: {address}: {}", clean(&why));
                continue;
            }
        };
        only = Some(address.ip());
        // On two hosts of one model, GPUs with the same index have the same position.
        let at = hello.gpu_index.checked_rem(pairs.len());
        let &(index, gpu, hca) = at.and_then(|at| pairs.get(at)).context("no GPU")?;
        report.size = hello.size;
        let task = here.task(gpu, hca, super::size(hello.size)?);
        let role = task::Role::Server(task);
        let followed = supervisor::oversee(&role, here.limit(), Some(client))?;
        let peer = Some((Role::Server, address.to_string()));
        let pair = Pair::of((index, gpu), hca, peer, followed);
        report.pairs.push(pair);
        if !hello.more || report.pairs.len() >= MOST_PAIRS {
            return Ok(report);
        }
        // Refused clients do not prolong the run.
        deadline = Instant::now().checked_add(here.limit());
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;
    use std::time::Duration;

    use super::*;

    #[test]
    fn nobody_is_accepted_after_the_deadline() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let until = |time| {
            let deadline = Instant::now() + Duration::from_millis(time);
            accept(&listener, Some(deadline)).unwrap().is_some()
        };
        assert!(!until(20));
        let _client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        assert!(!until(0));
        assert!(until(60_000));
    }
}
