// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! A minimal HTTP server for scrapes: `GET /metrics`, one answer per connection.
//!
//! Each connection has its own thread, so a slow client blocks nobody. At most
//! [`Limits::connections`] connections are open at a time. A connection has [`Limits::time`] for
//! its request, and the same time again for its answer, regardless of the amount of data.
//!
//! The serving thread alone scans the machine, one scan at a time. An answer younger than
//! [`Limits::fresh`] is reused, so frequent scrapes cause no extra scans.

use std::io::{Read as _, Write as _};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{mpsc, Arc};
use std::time::{Duration, Instant};
use std::{io, thread};

/// Limits of a server.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// Maximum number of simultaneous connections.
    pub(crate) connections: usize,
    /// Maximum size of a request, in bytes.
    pub(crate) request: usize,
    /// Time limit for receiving a request, and separately for sending the answer.
    pub(crate) time: Duration,
    /// Maximum age of a reused answer.
    pub(crate) fresh: Duration,
}

impl Limits {
    pub(crate) const USUAL: Self = Self {
        connections: 16,
        request: 8 << 10,
        time: Duration::from_secs(10),
        fresh: Duration::from_secs(1),
    };
}

/// Maximum number of headers in a request. A scrape sends about six.
const HEADERS: usize = 64;
/// Wait after a failed `accept`, for example when the process has too many open files.
const PAUSE: Duration = Duration::from_millis(100);

/// Result of a scan: the metrics, or an error message.
type Scan = Result<Arc<str>, Arc<str>>;

/// Serves until the process is killed, because the accepting thread never ends. Calls `scan` on the
/// current thread.
pub(crate) fn serve(
    listener: TcpListener,
    limits: Limits,
    mut scan: impl FnMut() -> anyhow::Result<String>,
) {
    let (ask, asked) = mpsc::sync_channel(limits.connections);
    thread::spawn(move || accept(&listener, limits, &ask));
    let mut last: Option<(Instant, Scan)> = None;
    for reply in asked {
        let reply: mpsc::SyncSender<Scan> = reply;
        let fresh = last
            .as_ref()
            .filter(|(when, _)| when.elapsed() < limits.fresh)
            .map(|(_, answer)| answer.clone());
        let answer = fresh.unwrap_or_else(|| {
            let answer: Scan = match scan() {
                Ok(text) => Ok(text.into()),
                Err(why) => Err(format!("{why:#}\n").into()),
            };
            last = Some((Instant::now(), answer.clone()));
            answer
        });
        // The client may be gone.
        let _ = reply.send(answer);
    }
}

/// A slot for one connection, released on drop.
struct Place(Arc<AtomicUsize>);

impl Place {
    fn take(taken: &Arc<AtomicUsize>, most: usize) -> Option<Self> {
        let place = Self(Arc::clone(taken));
        // If all slots were taken, `place` is dropped here, which undoes the increment.
        (taken.fetch_add(1, Ordering::Relaxed) < most).then_some(place)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

fn accept(listener: &TcpListener, limits: Limits, ask: &mpsc::SyncSender<mpsc::SyncSender<Scan>>) {
    let taken = Arc::new(AtomicUsize::new(0));
    loop {
        let Ok((stream, _)) = listener.accept() else {
            thread::sleep(PAUSE);
            continue;
        };
        let Some(place) = Place::take(&taken, limits.connections) else {
            // The server does not wait for the client here. The answer is lost if it does not fit
            // into the socket's buffer.
            if stream.set_nonblocking(true).is_ok() {
                let _ = (&stream).write(&head("503 Service Unavailable", 0));
            }
            continue;
        };
        let ask = ask.clone();
        let handled = thread::Builder::new().spawn(move || {
            let _place = place;
            // After an error, the client is gone or too slow, so nobody can receive a message.
            let _ = connection(&stream, limits, &ask);
        });
        if handled.is_err() {
            thread::sleep(PAUSE);
        }
    }
}

fn head(status: &str, length: usize) -> Vec<u8> {
    let kind = match status.starts_with("200") {
        true => "text/plain; version=0.0.4; charset=utf-8",
        false => "text/plain; charset=utf-8",
    };
    let allow = match status.starts_with("405") {
        true => "Allow: GET, HEAD\r\n",
        false => "",
    };
    format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\n{allow}Connection: close\r\n\r\n"
    )
    .into_bytes()
}

/// Returns the time until `deadline`, or an error if the deadline has passed.
fn left(deadline: Instant) -> io::Result<Duration> {
    deadline
        .checked_duration_since(Instant::now())
        .filter(|left| !left.is_zero())
        .ok_or_else(|| io::ErrorKind::TimedOut.into())
}

/// Returns the deadline that is `time` from now.
fn deadline(time: Duration) -> io::Result<Instant> {
    Instant::now()
        .checked_add(time)
        .ok_or_else(|| io::ErrorKind::InvalidInput.into())
}

fn connection(
    stream: &TcpStream,
    limits: Limits,
    ask: &mpsc::SyncSender<mpsc::SyncSender<Scan>>,
) -> io::Result<()> {
    let asked = request(stream, limits)?;
    let (status, body) = match asked {
        Asked::Metrics { .. } => {
            let (reply, replied) = mpsc::sync_channel(1);
            let scan = ask.send(reply).ok().and_then(|()| replied.recv().ok());
            match scan.unwrap_or_else(|| Err("".into())) {
                Ok(text) => ("200 OK", text),
                Err(why) => ("500 Internal Server Error", why),
            }
        }
        Asked::Wrong(status) => (status, "".into()),
    };
    let deadline = deadline(limits.time)?;
    let mut bytes = head(status, body.len());
    if asked != (Asked::Metrics { is_head: true }) {
        bytes.extend_from_slice(body.as_bytes());
    }
    let mut rest = &bytes[..];
    while !rest.is_empty() {
        stream.set_write_timeout(Some(left(deadline)?))?;
        match (&mut &*stream).write(rest) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => rest = rest.get(written..).unwrap_or_default(),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    stream.shutdown(Shutdown::Write)?;
    // Closing a socket with unread input resets the connection. The client may then lose the
    // answer.
    let mut sink = [0; 1024];
    let mut most = limits.request;
    while most > 0 {
        stream.set_read_timeout(Some(left(deadline)?))?;
        match (&mut &*stream).read(&mut sink)? {
            0 => break,
            read => most = most.saturating_sub(read),
        }
    }
    Ok(())
}

/// A parsed request.
#[derive(Debug, PartialEq, Eq)]
enum Asked {
    Metrics {
        is_head: bool,
    },
    /// A wrong request, answered with this status.
    Wrong(&'static str),
}

fn request(stream: &TcpStream, limits: Limits) -> io::Result<Asked> {
    let deadline = deadline(limits.time)?;
    let mut bytes = Vec::new();
    let mut part = [0; 1024];
    loop {
        let Ok(left) = left(deadline) else {
            return Ok(Asked::Wrong("408 Request Timeout"));
        };
        stream.set_read_timeout(Some(left))?;
        let read = match (&mut &*stream).read(&mut part) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(read) => part.get(..read).unwrap_or_default(),
            Err(error) => match error.kind() {
                io::ErrorKind::Interrupted => continue,
                // The kind of error on a timeout depends on the system.
                io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => continue,
                _ => return Err(error),
            },
        };
        bytes.extend_from_slice(read);
        if let Some(asked) = asked(&bytes) {
            return Ok(asked);
        }
        if bytes.len() >= limits.request {
            return Ok(Asked::Wrong("431 Request Header Fields Too Large"));
        }
    }
}

/// Parses a request. Returns `None` if the request is incomplete.
fn asked(bytes: &[u8]) -> Option<Asked> {
    let mut headers = [httparse::EMPTY_HEADER; HEADERS];
    let mut request = httparse::Request::new(&mut headers);
    match request.parse(bytes) {
        Ok(httparse::Status::Partial) => None,
        Ok(httparse::Status::Complete(_)) => {
            let path = request.path.unwrap_or("");
            let path = path.split_once('?').map_or(path, |(path, _)| path);
            Some(match (path, request.method) {
                ("/metrics", Some("GET")) => Asked::Metrics { is_head: false },
                ("/metrics", Some("HEAD")) => Asked::Metrics { is_head: true },
                ("/metrics", _) => Asked::Wrong("405 Method Not Allowed"),
                _ => Asked::Wrong("404 Not Found"),
            })
        }
        Err(httparse::Error::TooManyHeaders) => {
            Some(Asked::Wrong("431 Request Header Fields Too Large"))
        }
        Err(_) => Some(Asked::Wrong("400 Bad Request")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::net::SocketAddr;

    use proptest::prelude::*;

    /// Time limit that suffices on slow machines. No test waits for the limit to expire.
    const LONG: Duration = Duration::from_secs(600);

    /// Starts a server that runs as long as the tests.
    fn server(
        limits: Limits,
        scan: impl FnMut() -> anyhow::Result<String> + Send + 'static,
    ) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        thread::spawn(move || serve(listener, limits, scan));
        address
    }

    fn limits() -> Limits {
        Limits {
            time: LONG,
            fresh: Duration::ZERO,
            ..Limits::USUAL
        }
    }

    /// Sends `request` and returns the whole answer.
    fn answer(address: SocketAddr, request: &[u8]) -> String {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        stream.write_all(request).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    const GET: &[u8] = b"GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n";

    #[test]
    fn only_metrics_are_served() {
        let address = server(limits(), || Ok("up 1\n".to_owned()));
        let got = answer(address, GET);
        assert!(
            got.starts_with("HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4"),
            "{got}"
        );
        assert!(
            got.contains("\r\nContent-Length: 5\r\n") && got.ends_with("\r\n\r\nup 1\n"),
            "{got}"
        );
        let got = answer(address, b"HEAD /metrics?name=x HTTP/1.0\r\n\r\n");
        assert!(
            got.contains("\r\nContent-Length: 5\r\n") && got.ends_with("\r\n\r\n"),
            "{got}"
        );
        for (request, status) in [
            (&b"GET / HTTP/1.1\r\n\r\n"[..], "404"),
            (b"GET /metrics/../etc/passwd HTTP/1.1\r\n\r\n", "404"),
            (
                b"POST /metrics HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc",
                "405",
            ),
            (b"nonsense\r\n\r\n", "400"),
            (b"GET /metrics SPDY/9\r\n\r\n", "400"),
        ] {
            let got = answer(address, request);
            assert!(got.starts_with(&format!("HTTP/1.1 {status} ")), "{got}");
        }
    }

    #[test]
    fn a_failed_scan_is_reported() {
        let address = server(limits(), || anyhow::bail!("no eyes"));
        let got = answer(address, GET);
        assert!(
            got.starts_with("HTTP/1.1 500 ") && got.ends_with("no eyes\n"),
            "{got}"
        );
    }

    #[test]
    fn a_request_has_an_end() {
        let address = server(limits(), || Ok(String::new()));
        let mut long = b"GET /metrics HTTP/1.1\r\nX: ".to_vec();
        // The request is exactly as long as the limit, so that the server reads all of the request
        // before it answers.
        long.resize(limits().request, b'x');
        assert!(answer(address, &long).starts_with("HTTP/1.1 431 "));
        let mut many = b"GET /metrics HTTP/1.1\r\n".to_vec();
        for _ in 0..=HEADERS {
            many.extend_from_slice(b"a: b\r\n");
        }
        many.extend_from_slice(b"\r\n");
        assert!(answer(address, &many).starts_with("HTTP/1.1 431 "));
    }

    #[test]
    fn a_silent_client_delays_no_other_client() {
        let address = server(limits(), || Ok("up 1\n".to_owned()));
        let _silent = TcpStream::connect(address).unwrap();
        let mut half = TcpStream::connect(address).unwrap();
        half.write_all(b"GET /met").unwrap();
        assert!(answer(address, GET).ends_with("up 1\n"));
    }

    #[test]
    fn a_silent_client_is_disconnected() {
        let limits = Limits {
            time: Duration::from_millis(50),
            ..limits()
        };
        let address = server(limits, || Ok(String::new()));
        let mut silent = TcpStream::connect(address).unwrap();
        silent.set_read_timeout(Some(LONG)).unwrap();
        let mut got = String::new();
        silent.read_to_string(&mut got).unwrap();
        assert!(got.starts_with("HTTP/1.1 408 "), "{got}");
    }

    #[test]
    fn connections_beyond_the_limit_are_refused() {
        let limits = Limits {
            connections: 2,
            ..limits()
        };
        let address = server(limits, || Ok("up 1\n".to_owned()));
        // Connections are accepted in order, so these two get the slots.
        let places: Vec<TcpStream> = (0..2)
            .map(|_| TcpStream::connect(address).unwrap())
            .collect();
        let mut third = TcpStream::connect(address).unwrap();
        third.set_read_timeout(Some(LONG)).unwrap();
        let mut got = String::new();
        third.read_to_string(&mut got).unwrap();
        assert!(got.starts_with("HTTP/1.1 503 "), "{got}");
        drop(places);
        // Retries until the server has noticed that both connections are closed.
        let begin = Instant::now();
        loop {
            let mut stream = TcpStream::connect(address).unwrap();
            let mut got = String::new();
            let _ = stream.write_all(GET);
            if stream.read_to_string(&mut got).is_ok() && got.ends_with("up 1\n") {
                break;
            }
            assert!(begin.elapsed() < LONG, "no place became free: {got}");
        }
    }

    #[test]
    fn a_recent_scan_is_reused() {
        let limits = Limits {
            fresh: LONG,
            ..limits()
        };
        let mut looks = 0_u32;
        let address = server(limits, move || {
            looks += 1;
            Ok(format!("looks {looks}\n"))
        });
        for _ in 0..3 {
            assert!(answer(address, GET).ends_with("looks 1\n"));
        }
    }

    proptest! {
        #[test]
        fn no_request_is_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            asked(&bytes);
        }
    }
}
