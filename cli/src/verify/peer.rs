// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Connection between the client's worker and the server's worker: lines of JSON over TCP.
//!
//! Each end begins with a greeting, which names the version of the protocol. Then the client sends
//! requests, and the server answers each. The client also sends the events of its steps, and the
//! server reports the same steps. An event has no answer.
//!
//! Nothing authenticates either end. A client can only use memory that the server's worker has
//! allocated for this client. The length and number of lines, and the time for a line, are limited.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{IpAddr, Shutdown, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{anyhow, bail, ensure, Context as _, Result};
use peermem_verbs::pattern::{Difference, Pattern};
use peermem_verbs::rdma::{Contact, Part};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::event::{Event, Name, Outcome, Step, Way};
use super::steps::{Bench, Contents, End, Kind, Links, Unable, Window};
use super::task::Server;

const SCHEMA: &str = "peermemctl.verify.peer";
/// Version of the protocol. Both ends must have the same version.
const PROTOCOL: u32 = 1;
/// Maximum length of a line, in bytes.
const LONGEST_LINE: usize = 8 << 10;
/// Maximum number of lines that a server reads from a client. A run has some hundred lines.
const MOST_LINES: usize = 512;
/// Time limit for a TCP connection, and for a client's greeting.
const GREETING: Duration = Duration::from_secs(10);

/// First line that each end sends.
#[derive(Debug, Serialize, Deserialize)]
struct Greeting<T> {
    schema: String,
    protocol: u32,
    /// Version of peermemctl.
    version: String,
    #[serde(flatten)]
    body: T,
}

/// Greeting of a client.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Hello {
    /// Size of each buffer, in bytes.
    pub(crate) size: u64,
    /// Index of the client's GPU.
    pub(crate) gpu_index: usize,
    /// `true` if the client connects again, for another pair.
    pub(crate) more: bool,
}

/// The server's devices.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Devices {
    /// Description of the GPU and the RDMA device.
    pub(crate) about: String,
    pub(crate) links: Links,
}

/// Greeting of a server.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Welcome {
    Ready(Devices),
    /// Reason why the server does not serve this client.
    Refused(String),
}

/// Line that a client sends after its greeting.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Line {
    /// An event of the client's steps, without an answer.
    Event(Event),
    Request(Kind, Request),
}

/// Request about one buffer of the server.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Request {
    Allocate,
    Fill(Pattern),
    Compare(Contents),
    Register(Way),
    Deregister,
    /// Connects a new queue pair of the server with the client's queue pair.
    Connect(Window, Contact),
}

/// Line that a server sends in answer to a request.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Answer {
    Done,
    Compared(Option<Difference>),
    Connected(Contact, Part),
    Unable(Unable),
}

/// One end of the connection.
#[derive(Debug)]
pub(crate) struct Lines {
    stream: TcpStream,
    /// Time limit for a line.
    limit: Duration,
    /// Received bytes that do not form a whole line yet.
    received: Vec<u8>,
}

impl Lines {
    pub(crate) fn of(stream: TcpStream, limit: Duration) -> Result<Self> {
        stream.set_nodelay(true)?;
        stream.set_write_timeout(Some(limit))?;
        Ok(Self {
            stream,
            limit,
            received: Vec::new(),
        })
    }

    fn say(&mut self, message: &impl Serialize) -> Result<()> {
        let mut line = serde_json::to_string(message)?;
        line.push('\n');
        Ok(self.stream.write_all(line.as_bytes())?)
    }

    fn greet(&mut self, body: impl Serialize) -> Result<()> {
        self.say(&Greeting {
            schema: SCHEMA.to_owned(),
            protocol: PROTOCOL,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            body,
        })
    }

    /// Returns the next line. Returns an error if the connection is closed, or if the line is too
    /// long or too late.
    fn line(&mut self) -> Result<String> {
        let begun = Instant::now();
        let mut part = [0; 4096];
        loop {
            if let Some(end) = self.received.iter().position(|&byte| byte == b'\n') {
                let rest = self.received.split_off(end + 1);
                let line = std::mem::replace(&mut self.received, rest);
                return String::from_utf8(line).context("a line that is no text");
            }
            ensure!(
                self.received.len() < LONGEST_LINE,
                "a line of more than {LONGEST_LINE} bytes"
            );
            let left = self.limit.saturating_sub(begun.elapsed());
            ensure!(!left.is_zero(), "no line within {} s", self.limit.as_secs());
            self.stream.set_read_timeout(Some(left))?;
            match self.stream.read(&mut part) {
                Ok(0) => bail!("the connection was closed"),
                Ok(count) => self.received.extend(part.iter().take(count)),
                Err(error) => match error.kind() {
                    // The error of a timeout is `WouldBlock` or `TimedOut`, depending on the
                    // system.
                    ErrorKind::Interrupted | ErrorKind::WouldBlock | ErrorKind::TimedOut => {}
                    _ => return Err(error.into()),
                },
            }
        }
    }

    fn hear<T: DeserializeOwned>(&mut self) -> Result<T> {
        let line = self.line()?;
        serde_json::from_str(&line).with_context(|| format!("an unknown line: {}", begin(&line)))
    }

    fn hear_greeting<T: DeserializeOwned>(&mut self) -> Result<T> {
        let line = self.line()?;
        let unknown = || format!("not the protocol of `peermemctl verify`: {}", begin(&line));
        let value: Value = serde_json::from_str(&line).with_context(unknown)?;
        ensure!(value["schema"] == SCHEMA, unknown());
        let (protocol, version) = (&value["protocol"], &value["version"]);
        ensure!(
            *protocol == PROTOCOL,
            "peermemctl {version} there speaks protocol {protocol}, and peermemctl {:?} here speaks protocol \
             {PROTOCOL}: install the same version on both hosts",
            env!("CARGO_PKG_VERSION")
        );
        let greeting: Greeting<T> = serde_json::from_value(value).with_context(unknown)?;
        Ok(greeting.body)
    }
}

/// Returns the beginning of a line, for an error message.
fn begin(line: &str) -> String {
    format!("{:?}", line.trim_end().chars().take(60).collect::<String>())
}

/// The server, as the client sees it.
#[derive(Debug)]
pub(crate) struct Peer(Lines);

impl Peer {
    /// Connects to a server. Returns the server's devices, too. `limit` is the time limit for an
    /// answer.
    pub(crate) fn connect(server: &Server, limit: Duration) -> Result<(Self, Devices)> {
        let mut last = anyhow!("no address");
        for address in &server.addresses {
            match TcpStream::connect_timeout(address, GREETING) {
                Ok(stream) => {
                    return Self::greet(stream, &server.hello, limit)
                        .with_context(|| format!("the server {}", server.name));
                }
                Err(error) => last = error.into(),
            }
        }
        Err(last.context(format!(
            "cannot reach {}: does `peermemctl verify --server` run there?",
            server.name
        )))
    }

    fn greet(stream: TcpStream, hello: &Hello, limit: Duration) -> Result<(Self, Devices)> {
        let mut lines = Lines::of(stream, limit)?;
        lines.greet(hello)?;
        match lines.hear_greeting()? {
            Welcome::Ready(devices) => Ok((Self(lines), devices)),
            Welcome::Refused(why) => bail!("{why}"),
        }
    }

    /// Returns a second handle of the connection, which sends events.
    pub(crate) fn teller(&self) -> Result<Teller> {
        let stream = self.0.stream.try_clone()?;
        Ok(Teller(Lines::of(stream, self.0.limit)?))
    }

    /// Sends a request, and waits for the answer. An error ends the connection: otherwise, a late
    /// answer could be taken for the answer to the next request.
    pub(crate) fn call(&mut self, kind: Kind, request: Request) -> Result<Answer, Unable> {
        let call = || {
            self.0.say(&Line::Request(kind, request))?;
            self.0.hear()
        };
        let answer: Result<Answer> = call();
        if answer.is_err() {
            let _ = self.0.stream.shutdown(Shutdown::Both);
        }
        match answer.context("the server")? {
            Answer::Unable(unable) => Err(unable.at("the server")),
            answer => Ok(answer),
        }
    }
}

/// Returns the error for an answer that does not belong to the request.
pub(crate) fn unexpected(answer: &Answer) -> anyhow::Error {
    anyhow!("the server: an answer to another request: {answer:?}")
}

/// Sender of events to a server.
#[derive(Debug)]
pub(crate) struct Teller(Lines);

impl Teller {
    /// Sends an event. If the connection is broken, the next request reports the error.
    pub(crate) fn tell(&mut self, event: &Event) {
        let _ = self.0.say(&Line::Event(event.clone()));
    }
}

/// Reads the greeting of a client. If the server cannot serve the client, tells the client why.
/// During a run, `only` is the address of the run's client, and other clients are refused.
pub(crate) fn greeted(stream: &TcpStream, only: Option<IpAddr>) -> Result<Hello> {
    let mut lines = Lines::of(stream.try_clone()?, GREETING)?;
    let address = stream.peer_addr()?.ip();
    let hello = lines.hear_greeting().and_then(|hello: Hello| {
        ensure!(
            only.is_none_or(|only| only == address),
            "the server serves another client"
        );
        super::size(hello.size)?;
        ensure!(lines.received.is_empty(), "more than one greeting");
        Ok(hello)
    });
    if let Err(error) = &hello {
        // The client may have left, or may not be peermemctl.
        let _ = refuse(&mut lines, error);
    }
    hello
}

/// Tells a client why the server does not serve the client.
pub(crate) fn refuse(lines: &mut Lines, why: &anyhow::Error) -> Result<()> {
    lines.greet(Welcome::Refused(format!("{why:#}")))
}

/// A buffer of the server, and the buffer's region. The region is dropped before the memory.
struct Buffer<B: Bench> {
    region: Option<B::Region>,
    memory: B::Memory,
}

/// Server's side of one run.
struct Served<'a, B: Bench> {
    bench: &'a mut B,
    /// Size of each buffer, in bytes.
    size: usize,
    host: Option<Buffer<B>>,
    gpu: Option<Buffer<B>>,
}

/// Serves a client until its steps have ended, and reports the steps. A client that leaves early or
/// breaks the protocol fails the step that is running.
pub(crate) fn serve<B: Bench>(
    bench: &mut B,
    lines: &mut Lines,
    (size, links): (usize, Links),
    tell: &mut dyn FnMut(Event),
) {
    let mut now = (None, Name::Connect);
    let about = bench.about();
    let mut served = Served {
        bench,
        size,
        host: None,
        gpu: None,
    };
    let session = || -> Result<()> {
        lines.greet(Welcome::Ready(Devices {
            about: about.clone(),
            links,
        }))?;
        tell(Event::About(about));
        for _ in 0..MOST_LINES {
            match lines.hear()? {
                Line::Event(Event::Done) => return Ok(()),
                Line::Event(Event::About(about)) => tell(Event::Peer(about)),
                Line::Event(Event::Peer(_)) => {}
                Line::Event(event) => {
                    if let Event::Begins { way, step } = event {
                        now = (way, step);
                    }
                    tell(event);
                }
                Line::Request(kind, request) => {
                    let answer = served.answer(kind, &request);
                    lines.say(&answer.unwrap_or_else(Answer::Unable))?;
                }
            }
        }
        bail!("more than {MOST_LINES} lines")
    };
    if let Err(error) = session() {
        let why = format!("the client: {error:#}");
        let (way, step) = now;
        tell(Event::Ended(Step::new(
            way,
            step,
            Outcome::Failed,
            Some(why),
        )));
    }
}

impl<B: Bench> Served<'_, B> {
    /// Carries out a request.
    fn answer(&mut self, kind: Kind, request: &Request) -> Result<Answer, Unable> {
        let buffer = match kind {
            Kind::Host => &mut self.host,
            Kind::Gpu => &mut self.gpu,
        };
        if let Request::Allocate = request {
            *buffer = None;
            *buffer = Some(Buffer {
                region: None,
                memory: self.bench.memory(End::Here, kind, self.size)?,
            });
            return Ok(Answer::Done);
        }
        let Buffer { region, memory } = buffer.as_mut().context("no such memory")?;
        match request {
            Request::Allocate => {}
            Request::Fill(pattern) => self.bench.fill(memory, *pattern)?,
            Request::Compare(expected) => {
                return Ok(Answer::Compared(self.bench.compare(memory, expected)?));
            }
            Request::Register(way) => {
                *region = None;
                *region = Some(self.bench.register(*way, memory)?);
            }
            Request::Deregister => self.bench.deregister(region.take().context("no region")?)?,
            Request::Connect(window, theirs) => {
                let region = region.as_ref().context("no region")?;
                let (own, part) = self.bench.accept(theirs, region, *window)?;
                return Ok(Answer::Connected(own, part));
            }
        }
        Ok(Answer::Done)
    }
}

#[cfg(test)]
mod tests;
