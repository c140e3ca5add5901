// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Netlink: requests to the kernel, and their complete answers. See netlink(7) and
//! `include/uapi/linux/netlink.h`.

use std::time::Duration;

use netlink_packet_core::{
    parse_i32, DecodeError, DefaultNla, Emitable as _, NetlinkBuffer, NetlinkHeader, NlasIterator,
    NLA_HEADER_SIZE, NLMSG_ALIGNTO, NLMSG_DONE, NLMSG_ERROR, NLMSG_NOOP, NLMSG_OVERRUN, NLM_F_DUMP,
    NLM_F_REQUEST,
};
use rustix::io::Errno;
use rustix::net;
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::sockopt;

/// Maximum size of a datagram, in bytes. The kernel fills at most 32 KiB.
const LARGEST: usize = 64 << 10;

/// Maximum size of an answer, in bytes.
const MOST: usize = 256 << 20;

/// `MAX_ERRNO` of the kernel. rustix accepts no larger errno.
const MOST_ERRNO: i32 = 4095;

/// Timeout for the next part of an answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// Reason why a request has no usable answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Refused {
    /// Error from the kernel: an unknown request, or a missing object.
    #[error("{0}")]
    Kernel(Errno),
    /// The answer cannot be parsed.
    #[error("the kernel's answer is not understood: {0}")]
    Answer(String),
    /// The socket failed, or no answer came.
    #[error("netlink: {0}")]
    Socket(Errno),
}

impl From<DecodeError> for Refused {
    fn from(why: DecodeError) -> Self {
        Self::Answer(why.to_string())
    }
}

/// A netlink socket of one protocol family. The default is rtnetlink.
pub(crate) struct Socket {
    socket: rustix::fd::OwnedFd,
    sequence: u32,
    buffer: Vec<u8>,
}

impl Socket {
    pub(crate) fn open(protocol: Option<net::Protocol>) -> Result<Self, Refused> {
        let open = || -> rustix::io::Result<_> {
            let socket = net::socket_with(
                net::AddressFamily::NETLINK,
                net::SocketType::RAW,
                net::SocketFlags::CLOEXEC,
                protocol,
            )?;
            sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, Some(PATIENCE))?;
            Ok(socket)
        };
        Ok(Self {
            socket: open().map_err(Refused::Socket)?,
            sequence: 0,
            buffer: vec![0; LARGEST],
        })
    }

    /// Sends a request, and returns the payload of each message of the answer. For a request with
    /// `NLM_F_DUMP`, the result is a complete list. `front` is the family's own header, before the
    /// attributes.
    pub(crate) fn ask(
        &mut self,
        (kind, flags): (u16, u16),
        front: &[u8],
        attributes: &[DefaultNla],
    ) -> Result<Vec<Vec<u8>>, Refused> {
        self.sequence = self.sequence.wrapping_add(1);
        let request = request((kind, flags), self.sequence, front, attributes);
        net::send(&self.socket, &request, net::SendFlags::empty()).map_err(Refused::Socket)?;
        let mut answer = Answer::new(self.sequence, flags & NLM_F_DUMP == NLM_F_DUMP);
        while !answer.is_whole {
            let received = net::recvfrom(
                &self.socket,
                self.buffer.as_mut_slice(),
                net::RecvFlags::TRUNC,
            );
            let (_, length, sender) = match received {
                Ok(received) => received,
                Err(Errno::INTR) => continue,
                Err(why) => return Err(Refused::Socket(why)),
            };
            // Other processes can send to this socket, too.
            let sender = sender.and_then(|sender| SocketAddrNetlink::try_from(sender).ok());
            if sender.is_none_or(|sender| sender.pid() != 0) {
                continue;
            }
            let datagram = self.buffer.get(..length);
            answer.take(datagram.ok_or_else(|| too_long(length))?)?;
        }
        Ok(answer.payloads)
    }
}

fn too_long(length: usize) -> Refused {
    Refused::Answer(format!("{length} bytes are too many"))
}

fn request(
    (kind, flags): (u16, u16),
    sequence: u32,
    front: &[u8],
    attributes: &[DefaultNla],
) -> Vec<u8> {
    let mut header = NetlinkHeader::default();
    let mut behind = vec![0; attributes.buffer_len()];
    attributes.emit(&mut behind);
    let behind = [front, &behind].concat();
    let mut bytes = vec![0; header.buffer_len()];
    let length = bytes.len().saturating_add(behind.len());
    header.length = u32::try_from(length).unwrap_or(u32::MAX);
    header.message_type = kind;
    header.flags = NLM_F_REQUEST | flags;
    header.sequence_number = sequence;
    header.emit(&mut bytes);
    bytes.extend(behind);
    bytes
}

/// An answer that is being received.
struct Answer {
    sequence: u32,
    /// `true` if the answer has several messages and an end marker, `false` if the answer is one
    /// message.
    is_list: bool,
    payloads: Vec<Vec<u8>>,
    size: usize,
    is_whole: bool,
}

impl Answer {
    fn new(sequence: u32, is_list: bool) -> Self {
        Self {
            sequence,
            is_list,
            payloads: Vec::new(),
            size: 0,
            is_whole: false,
        }
    }

    /// Processes a datagram with one or more messages.
    fn take(&mut self, datagram: &[u8]) -> Result<(), Refused> {
        self.size = self.size.saturating_add(datagram.len());
        if self.size > MOST {
            return Err(too_long(self.size));
        }
        let mut rest = datagram;
        while !rest.is_empty() && !self.is_whole {
            let message = NetlinkBuffer::new_checked(rest)?;
            // Skips messages of an earlier request whose answer was abandoned.
            if message.sequence_number() == self.sequence {
                self.message(message.message_type(), message.payload())?;
            }
            let align = usize::from(NLMSG_ALIGNTO);
            let length = usize::try_from(message.length()).unwrap_or(usize::MAX);
            let next = length.checked_next_multiple_of(align);
            rest = next.and_then(|next| rest.get(next..)).unwrap_or_default();
        }
        Ok(())
    }

    fn message(&mut self, kind: u16, payload: &[u8]) -> Result<(), Refused> {
        match kind {
            NLMSG_NOOP => {}
            NLMSG_OVERRUN => return Err(Refused::Answer("a part of it was lost".to_owned())),
            NLMSG_ERROR | NLMSG_DONE => {
                // The number is 0 or a negative errno. Old kernels send NLMSG_DONE without a
                // number.
                let code = match payload.get(..4) {
                    Some(code) => parse_i32(code)?,
                    None if kind == NLMSG_DONE && payload.is_empty() => 0,
                    None => return Err(Refused::Answer("an error without its number".to_owned())),
                };
                match code.checked_neg() {
                    Some(0) => self.is_whole = true,
                    Some(errno @ 1..=MOST_ERRNO) => {
                        return Err(Refused::Kernel(Errno::from_raw_os_error(errno)))
                    }
                    _ => return Err(Refused::Answer(format!("the error {code}"))),
                }
            }
            _ => {
                self.payloads.push(payload.to_vec());
                self.is_whole = !self.is_list;
            }
        }
        Ok(())
    }
}

/// Returns the kind and the value of each attribute in `bytes`.
pub(crate) fn attributes(bytes: &[u8]) -> impl Iterator<Item = Result<(u16, &[u8]), Refused>> {
    NlasIterator::new(bytes).map(|found| {
        let attribute = found?;
        let (kind, length) = (attribute.kind(), usize::from(attribute.length()));
        let value = attribute.into_inner().get(NLA_HEADER_SIZE..length);
        let cut = || Refused::Answer(format!("the attribute {kind} is cut off"));
        Ok((kind, value.ok_or_else(cut)?))
    })
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    use proptest::prelude::*;

    /// Builds a message in the kernel's layout: length, type, flags, sequence number, port.
    fn message(kind: u16, sequence: u32, payload: &[u8]) -> Vec<u8> {
        let length = u32::try_from(16 + payload.len()).unwrap();
        let mut bytes = length.to_ne_bytes().to_vec();
        bytes.extend(kind.to_ne_bytes());
        bytes.extend(2_u16.to_ne_bytes());
        bytes.extend(sequence.to_ne_bytes());
        bytes.extend(0_u32.to_ne_bytes());
        bytes.extend(payload);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    /// Builds an attribute: length without padding, type, value.
    pub(crate) fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
        let mut bytes = u16::try_from(4 + value.len())
            .unwrap()
            .to_ne_bytes()
            .to_vec();
        bytes.extend(kind.to_ne_bytes());
        bytes.extend(value);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    fn taken(datagrams: &[Vec<u8>]) -> Result<(Vec<Vec<u8>>, bool), Refused> {
        let mut answer = Answer::new(7, true);
        for datagram in datagrams {
            answer.take(datagram)?;
        }
        Ok((answer.payloads, answer.is_whole))
    }

    #[test]
    fn a_request_has_the_format_of_the_kernel() {
        let index = DefaultNla::new(1, 3_u32.to_ne_bytes().to_vec());
        let mut expected = message(0x140d, 7, &attribute(1, &3_u32.to_ne_bytes()));
        // `NLM_F_REQUEST`, `NLM_F_ROOT` and `NLM_F_MATCH`.
        expected[6..8].copy_from_slice(&0x301_u16.to_ne_bytes());
        assert_eq!(request((0x140d, NLM_F_DUMP), 7, &[], &[index]), expected);
        assert_eq!(request((0x1401, NLM_F_DUMP), 7, &[], &[]).len(), 16);
        let name = DefaultNla::new(1, b"lo\0".to_vec());
        let mut expected = message(
            78,
            7,
            &[&[0, 21, 0, 0][..], &attribute(1, b"lo\0")].concat(),
        );
        expected[6] = 1;
        assert_eq!(request((78, 0), 7, &[0, 21, 0, 0], &[name]), expected);
    }

    #[test]
    fn an_answer_that_is_no_list_has_one_message() {
        let mut answer = Answer::new(7, false);
        answer.take(&message(78, 6, b"old")).unwrap();
        assert!(!answer.is_whole);
        answer.take(&message(78, 7, b"one")).unwrap();
        assert!(answer.is_whole);
        assert_eq!(answer.payloads, [b"one"]);
    }

    #[test]
    fn an_answer_goes_on_until_it_is_done() {
        let done = message(NLMSG_DONE, 7, &0_i32.to_ne_bytes());
        let two = [
            message(0x140d, 7, b"first"),
            message(0x140d, 7, b"second!!"),
        ]
        .concat();
        let whole = || (vec![b"first".to_vec(), b"second!!".to_vec()], true);
        assert_eq!(taken(&[two.clone(), done.clone()]), Ok(whole()));
        // One datagram contains the whole answer, with the end marker of an old kernel.
        assert_eq!(taken(&[[two.clone(), done].concat()]), Ok(whole()));
        assert_eq!(
            taken(&[two.clone(), message(NLMSG_DONE, 7, b"")]),
            Ok(whole())
        );
        // Messages after the end marker, and messages of another request, are ignored.
        let end = [message(NLMSG_DONE, 7, b""), message(0x140d, 7, b"late")].concat();
        assert_eq!(taken(&[two.clone(), end]), Ok(whole()));
        assert_eq!(
            taken(&[message(0x140d, 6, b"old"), message(NLMSG_DONE, 6, b"")]),
            Ok((Vec::new(), false))
        );
        assert!(!taken(&[two]).unwrap().1);
    }

    #[test]
    fn a_refusal_has_its_error() {
        let error = |kind, code: i32| taken(&[message(kind, 7, &code.to_ne_bytes())]);
        assert_eq!(error(NLMSG_ERROR, -22), Err(Refused::Kernel(Errno::INVAL)));
        // An error can also end a list early.
        assert_eq!(error(NLMSG_DONE, -12), Err(Refused::Kernel(Errno::NOMEM)));
        assert_eq!(error(NLMSG_ERROR, 0), Ok((Vec::new(), true)));
        for odd in [1, -4096, i32::MAX, i32::MIN] {
            assert!(matches!(error(NLMSG_ERROR, odd), Err(Refused::Answer(_))));
        }
        for cut in [
            message(NLMSG_ERROR, 7, b""),
            message(NLMSG_DONE, 7, b"\0"),
            message(NLMSG_OVERRUN, 7, b""),
        ] {
            assert!(matches!(taken(&[cut]), Err(Refused::Answer(_))));
        }
    }

    #[test]
    fn truncated_or_too_long_answers_are_errors() {
        let whole = message(0x140d, 7, b"payload!");
        for length in 1..whole.len() {
            let cut = whole[..length].to_vec();
            assert!(matches!(taken(&[cut]), Err(Refused::Answer(_))), "{length}");
        }
        for length in [0_u32, 15, 25, u32::MAX] {
            let mut odd = whole.clone();
            odd[..4].copy_from_slice(&length.to_ne_bytes());
            assert!(matches!(taken(&[odd]), Err(Refused::Answer(_))), "{length}");
        }
    }

    #[test]
    fn attributes_have_their_kind_and_value() {
        let bytes = [attribute(1, b"abc"), attribute(0x8028, b"nest")].concat();
        let read: Result<Vec<_>, _> = attributes(&bytes).collect();
        assert_eq!(read, Ok(vec![(1, &b"abc"[..]), (40, &b"nest"[..])]));
        // The last attribute may lack its padding.
        assert!(attributes(&attribute(1, b"abc")[..7]).all(|one| one.is_ok()));
        for length in [0_u16, 3, 9, u16::MAX] {
            let mut odd = attribute(1, b"abcd");
            odd[..2].copy_from_slice(&length.to_ne_bytes());
            assert!(attributes(&odd).any(|one| one.is_err()), "{length}");
        }
    }

    proptest! {
        #[test]
        fn no_bytes_are_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..200), sequence in 0..3_u32) {
            for is_list in [false, true] {
                let _ = Answer::new(sequence, is_list).take(&bytes);
            }
            for one in attributes(&bytes).flatten() {
                prop_assert!(one.1.len() <= bytes.len());
            }
        }

        /// Parses messages with one wrong byte. Such messages pass more checks than random bytes.
        #[test]
        fn no_message_is_a_panic(
            kinds in prop::collection::vec((0..6_u16, prop::collection::vec(any::<u8>(), 0..12)), 1..6),
            place in any::<prop::sample::Index>(),
            byte in any::<u8>(),
        ) {
            let messages = kinds.iter().map(|(kind, payload)| message(*kind, 7, payload));
            let mut bytes = messages.collect::<Vec<_>>().concat();
            let place = place.index(bytes.len());
            bytes[place] = byte;
            let _ = taken(&[bytes]);
        }
    }
}
