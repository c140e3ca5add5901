// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Waits for a VM: forwards its input and output, and watches its control port, its log and the
//! time.

use std::io::{BufRead as _, BufReader, Read, Write};
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Child;
use std::sync::{mpsc, Arc, Mutex};
use std::time::{Duration, Instant};
use std::{fs, thread};

use anyhow::Result;

use super::boot::{Channels, LineSink};
use super::qemu::Words;

/// Upper bound on a kernel log, in bytes. A run that ends has a log of less than 200 KiB. A kernel
/// that prints reports forever reaches the bound in a minute.
const LONGEST_LOG: u64 = 16 << 20;

/// This machine's ends of the VM's ports.
pub(super) struct Ports {
    control: UnixStream,
    streams: Vec<(&'static str, UnixStream)>,
    console: Option<UnixStream>,
    /// QEMU's ends, which this process closes once QEMU runs.
    pub(super) remote: Vec<UnixStream>,
}

pub(super) fn open_ports(words: &mut Words, tty: bool) -> Result<Ports> {
    let mut remote = Vec::new();
    let mut open = |name: &str, device: &str| -> Result<UnixStream> {
        let (ours, theirs) = UnixStream::pair()?;
        // Clears close-on-exec, so that QEMU inherits this socket. It inherits no other socket.
        rustix::io::fcntl_setfd(theirs.as_fd(), rustix::io::FdFlags::empty())?;
        words.add(&[
            "-chardev",
            &format!("socket,id={name},fd={}", theirs.as_raw_fd()),
            "-device",
            &format!("{device},chardev={name},name=runner.{name}"),
        ]);
        remote.push(theirs);
        Ok(ours)
    };
    let mut console = None;
    if tty {
        console = Some(open("console", "virtconsole")?);
    }
    let control = open("control", "virtserialport")?;
    let mut streams = Vec::new();
    if !tty {
        for name in ["in", "out", "err"] {
            streams.push((name, open(name, "virtserialport")?));
        }
    }
    Ok(Ports {
        control,
        streams,
        console,
        remote,
    })
}

/// QEMU's process, which is killed on drop, however the run ends.
pub(super) struct Machine(pub(super) Child);

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Copies a stream in its own thread, so that the VM never waits for a slow consumer of its output.
fn pump(
    mut from: impl Read + Send + 'static,
    mut to: impl FnMut(&[u8]) + Send + 'static,
) -> thread::JoinHandle<()> {
    let (sender, receiver) = mpsc::channel::<Vec<u8>>();
    thread::spawn(move || {
        let mut buffer = vec![0; 64 * 1024];
        while let Ok(count) = from.read(&mut buffer) {
            if count == 0 || sender.send(buffer[..count].to_vec()).is_err() {
                break;
            }
        }
    });
    thread::spawn(move || {
        for chunk in receiver {
            to(&chunk);
        }
    })
}

/// Forwards input and its end. The caller must not drop the stream before the VM has ended, because
/// QEMU discards unread input if the stream is closed. QEMU keeps unread input if the stream is
/// only shut down for writing.
fn feed(mut from: impl Read + Send + 'static, to: &UnixStream) -> Result<()> {
    let mut to = to.try_clone()?;
    thread::spawn(move || {
        let mut buffer = vec![0; 64 * 1024];
        while let Ok(count) = from.read(&mut buffer) {
            if count == 0 || to.write_all(&buffer[..count]).is_err() {
                break;
            }
        }
        let _ = to.shutdown(std::net::Shutdown::Write);
    });
    Ok(())
}

type SharedSink = Arc<Mutex<LineSink>>;

/// Splits a stream into lines and passes them to the sink. The last line may end at the end of the
/// stream, without a newline.
fn pass_lines(stream: UnixStream, is_error: bool, sink: SharedSink) -> thread::JoinHandle<()> {
    let (sender, lines) = mpsc::channel::<Vec<u8>>();
    thread::spawn(move || {
        let mut stream = BufReader::new(stream);
        loop {
            let mut line = Vec::new();
            // An error also ends the stream. `line` then has the bytes before the error.
            let _ = stream.read_until(b'\n', &mut line);
            if line.is_empty() || sender.send(line).is_err() {
                break;
            }
        }
    });
    thread::spawn(move || {
        for line in lines {
            let line = line.strip_suffix(b"\n").unwrap_or(&line);
            if let Ok(mut sink) = sink.lock() {
                sink(&String::from_utf8_lossy(line), is_error);
            }
        }
    })
}

struct Streams {
    consumers: Vec<thread::JoinHandle<()>>,
    input: Option<UnixStream>,
}

fn connect(
    console: Option<UnixStream>,
    streams: Vec<(&'static str, UnixStream)>,
    channels: Channels,
) -> Result<Streams> {
    let mut consumers = Vec::new();
    if let Some(console) = console {
        feed(std::io::stdin(), &console)?;
        consumers.push(pump(console, |bytes| {
            let mut out = std::io::stdout().lock();
            let _ = out.write_all(bytes).and_then(|()| out.flush());
        }));
    }
    let mut input = None;
    let sink: Option<SharedSink> = match channels {
        Channels::Caller => None,
        Channels::Lines(function) => Some(Arc::new(Mutex::new(function))),
    };
    for (name, mut stream) in streams {
        let is_error = name == "err";
        match &sink {
            _ if name == "in" => {
                stream.write_all(b"go\n")?;
                match sink {
                    None => feed(std::io::stdin(), &stream)?,
                    Some(_) => feed(std::io::empty(), &stream)?,
                }
                input = Some(stream);
            }
            None => consumers.push(pump(stream, move |bytes| {
                let _ = if is_error {
                    std::io::stderr().write_all(bytes)
                } else {
                    let mut out = std::io::stdout().lock();
                    out.write_all(bytes).and_then(|()| out.flush())
                };
            })),
            Some(sink) => consumers.push(pass_lines(stream, is_error, sink.clone())),
        }
    }
    Ok(Streams { consumers, input })
}

fn control_lines(port: UnixStream) -> mpsc::Receiver<String> {
    let (sender, control) = mpsc::channel::<String>();
    thread::spawn(move || {
        for line in BufReader::new(port).lines().map_while(Result::ok) {
            if sender.send(line).is_err() {
                break;
            }
        }
    });
    control
}

/// How a VM's run ended, as seen from outside the VM.
#[derive(Default)]
pub(super) struct Attended {
    pub(super) status: Option<i32>,
    pub(super) timed_out: bool,
    pub(super) failures: Vec<String>,
}

/// Watches a VM until it ends. Stops the VM if the time is over or the log is too long.
pub(super) fn attend(
    qemu: &mut Machine,
    ports: Ports,
    channels: Channels,
    log: &Path,
    timeout: Option<Duration>,
    started: Instant,
) -> Result<Attended> {
    let streams = connect(ports.console, ports.streams, channels)?;
    let control = control_lines(ports.control);
    let exit_status = |line: &str| -> Option<Option<i32>> {
        let text = line.strip_prefix("exit ")?;
        Some(text.trim().parse().ok())
    };
    let mut seen = Attended::default();
    let mut deadline = timeout.map(|timeout| started + timeout);
    loop {
        match control.recv_timeout(Duration::from_millis(50)) {
            Ok(line) => {
                if let Some(status) = exit_status(&line) {
                    seen.status = status;
                    // The command has ended. The VM's remaining work takes a second on an idle
                    // machine.
                    deadline = Some(Instant::now() + Duration::from_secs(1200));
                } else if let Some(text) = line.strip_prefix("setup ") {
                    let failure = format!("the machine could not be set up: {text}");
                    seen.failures.push(failure);
                }
                continue;
            }
            Err(mpsc::RecvTimeoutError::Timeout) => {}
            Err(mpsc::RecvTimeoutError::Disconnected) => thread::sleep(Duration::from_millis(10)),
        }
        if qemu.0.try_wait()?.is_some() {
            break;
        }
        if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            seen.failures.push(if seen.status.is_some() {
                "the machine did not switch itself off".to_owned()
            } else {
                seen.timed_out = true;
                let seconds = timeout.unwrap_or_default().as_secs();
                format!("timed out after {seconds} s")
            });
            break;
        }
        if fs::metadata(log)?.len() > LONGEST_LOG {
            seen.failures.push(format!(
                "stopped: its log is longer than {} MiB",
                LONGEST_LOG >> 20
            ));
            break;
        }
    }
    if qemu.0.try_wait()?.is_none() {
        qemu.0.kill()?;
        qemu.0.wait()?;
    }
    // Reads the lines that the VM sent just before it ended.
    for status in control.iter().filter_map(|line| exit_status(&line)) {
        seen.status = status;
    }
    for consumer in streams.consumers {
        let _ = consumer.join();
    }
    drop(streams.input);
    Ok(seen)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_that_ends_with_an_error_is_passed_on() {
        let (mut ours, mut theirs) = UnixStream::pair().unwrap();
        // Input that nobody has read turns the end of the stream into an error.
        ours.write_all(b"input").unwrap();
        theirs.write_all(b"one\ntwo").unwrap();
        drop(theirs);
        let (sender, lines) = mpsc::channel();
        let sink: LineSink = Box::new(move |line, _| sender.send(line.to_owned()).unwrap());
        let consumer = pass_lines(ours, false, Arc::new(Mutex::new(sink)));
        consumer.join().unwrap();
        assert_eq!(lines.iter().collect::<Vec<_>>(), ["one", "two"]);
    }
}
