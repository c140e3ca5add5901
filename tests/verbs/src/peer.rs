// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! The copy of this program on the other host. The two copies exchange their progress and their
//! data by TCP.

use std::io;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{IpAddr, Ipv4Addr, TcpListener, TcpStream};
use std::time::Duration;

use anyhow::{anyhow, bail, ensure, Context, Result};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::ktap::Skip;
use crate::sys;

const PORT: u16 = 7477;

/// Time limit for the connection to the other host, and for each message from that host. All
/// programs that a case runs have shorter limits.
const PATIENCE: Duration = Duration::from_secs(900);

/// A message between the hosts, sent as one line of JSON.
#[derive(Debug, Serialize, Deserialize)]
enum Message {
    Word(Value),
    /// The sending host has ended the case. The text is the error, if the case has failed.
    End(Option<String>),
}

/// The connection to this program on the other host.
#[derive(Debug)]
pub(crate) struct Peer {
    stream: BufReader<TcpStream>,
    address: IpAddr,
    /// `true` if the other host has ended the case.
    has_ended: bool,
    is_lost: bool,
}

impl Peer {
    /// Connects to the other host: host 2 listens, and host 1 connects.
    pub(crate) fn meet(number: u8, address: IpAddr) -> Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, PORT))?;
        listener.set_nonblocking(true)?;
        let mut met = Err(io::ErrorKind::NotConnected.into());
        sys::wait_until(PATIENCE, || {
            met = match number {
                1 => TcpStream::connect((address, PORT)),
                _ => listener.accept().map(|(stream, _)| stream),
            };
            Ok(met.is_ok())
        })?;
        let stream = met.with_context(|| format!("no connection to {address}"))?;
        stream.set_nonblocking(false)?;
        Self::of(stream)
    }

    fn of(stream: TcpStream) -> Result<Self> {
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(PATIENCE * sys::slower()))?;
        Ok(Self {
            address: stream.peer_addr()?.ip(),
            stream: BufReader::new(stream),
            has_ended: false,
            is_lost: false,
        })
    }

    pub(crate) fn address(&self) -> IpAddr {
        self.address
    }

    /// Returns the address by which the other host reaches this one.
    pub(crate) fn own_address(&self) -> Result<IpAddr> {
        Ok(self.stream.get_ref().local_addr()?.ip())
    }

    fn send(&mut self, message: &Message) -> Result<()> {
        let mut line = serde_json::to_string(message)?;
        line.push('\n');
        let stream = self.stream.get_mut();
        stream.write_all(line.as_bytes()).context("the other host")
    }

    fn receive(&mut self) -> Result<Message> {
        let mut line = String::new();
        self.stream
            .read_line(&mut line)
            .context("no message from the other host")?;
        ensure!(!line.is_empty(), "the other host has closed the connection");
        let message = serde_json::from_str(&line).with_context(|| line.clone())?;
        if matches!(message, Message::End(_)) {
            self.has_ended = true;
        }
        Ok(message)
    }

    pub(crate) fn tell(&mut self, what: &impl Serialize) -> Result<()> {
        self.send(&Message::Word(serde_json::to_value(what)?))
    }

    /// Waits for the other host's next value.
    pub(crate) fn hear<T: DeserializeOwned>(&mut self) -> Result<T> {
        match self.receive()? {
            Message::Word(word) => {
                serde_json::from_value(word).context("an unexpected message from the other host")
            }
            Message::End(Some(why)) => bail!("the other host: {why}"),
            Message::End(None) => bail!("the other host has ended the case"),
        }
    }

    /// Sends a value, and waits for the other host's value.
    pub(crate) fn swap<T: Serialize + DeserializeOwned>(&mut self, own: &T) -> Result<T> {
        self.tell(own)?;
        self.hear()
    }

    /// Waits until the other host reaches the same point.
    pub(crate) fn wait(&mut self) -> Result<()> {
        self.swap(&())
    }

    /// Records that the other host is off and sends nothing any more.
    pub(crate) fn is_lost(&mut self) {
        self.is_lost = true;
    }

    /// Ends a case on both hosts. The case fails on both hosts if it has failed on one.
    pub(crate) fn end(&mut self, own: Result<()>) -> Result<()> {
        if self.is_lost {
            return own;
        }
        // An error after the other host has ended the case follows from that end, so it is not
        // sent.
        let says = match &own {
            Err(error) if !self.has_ended && error.downcast_ref::<Skip>().is_none() => {
                Some(format!("{error:#}"))
            }
            _ => None,
        };
        self.send(&Message::End(says))?;
        let mut other = None;
        while !self.has_ended {
            if let Message::End(why) = self.receive()? {
                other = why;
            }
        }
        self.has_ended = false;
        match (own, other) {
            (own, None) => own,
            (Ok(()), Some(other)) => bail!("the other host: {other}"),
            (Err(own), Some(other)) => Err(anyhow!("{own:#}\nthe other host: {other}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ktap;

    fn ends() -> [Peer; 2] {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        let address = listener.local_addr().expect("its address");
        let near = TcpStream::connect(address).expect("a connection");
        let (far, _) = listener.accept().expect("its other end");
        [near, far].map(|stream| Peer::of(stream).expect("an end"))
    }

    /// Ends a case on two hosts with the results `near` and `far`. Returns the result of
    /// [`Peer::end`] on each host.
    fn both(near: Result<()>, far: Result<()>) -> [Result<()>; 2] {
        let [mut one, mut other] = ends();
        let far = std::thread::spawn(move || other.end(far));
        [one.end(near), far.join().expect("the other end")]
    }

    #[test]
    fn a_case_fails_on_both_hosts() {
        assert!(both(Ok(()), Ok(())).iter().all(Result::is_ok));
        let said = both(Err(anyhow!("why")), Ok(())).map(|end| end.expect_err("failed"));
        assert_eq!(
            said.map(|end| end.to_string()),
            ["why", "the other host: why"]
        );
        // A skip on one host does not hide a failure on the other host.
        let said = both(ktap::skip("no"), Err(anyhow!("why"))).map(|end| end.expect_err("failed"));
        assert!(said.iter().all(|end| end.downcast_ref::<Skip>().is_none()));
        let said = both(ktap::skip("no"), ktap::skip("no")).map(|end| end.expect_err("skipped"));
        assert!(said.iter().all(|end| end.downcast_ref::<Skip>().is_some()));
    }

    #[test]
    fn a_waiting_host_gets_the_error() {
        let [mut near, mut far] = ends();
        near.tell(&7).expect("said");
        assert_eq!(far.hear::<u32>().expect("heard"), 7);
        let waits = std::thread::spawn(move || {
            let heard = far.wait();
            (far.end(heard), far)
        });
        near.end(Err(anyhow!("why"))).expect_err("failed");
        let (heard, mut far) = waits.join().expect("the other end");
        assert_eq!(
            heard.expect_err("failed").to_string(),
            "the other host: why"
        );
        // The end of a case does not affect the next case.
        far.tell(&8).expect("said");
        assert_eq!(near.hear::<u32>().expect("heard"), 8);
        drop(far);
        assert!(near.wait().is_err());
    }
}
