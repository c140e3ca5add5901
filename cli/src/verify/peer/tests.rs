// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Tests of the connection between client and server. The server runs on the fake bench of the
//! tests of the steps.

use std::net::{Ipv4Addr, TcpListener};
use std::thread;
use std::thread::JoinHandle;

use super::super::steps::tests::{Fake, Fault, SIZE};
use super::*;

/// Time limit that suffices on slow machines.
const LONG: Duration = Duration::from_secs(600);

const LINKS: Links = Links {
    gpu: Some(64_000_000_000),
    nic: None,
};

fn listener() -> (TcpListener, Server) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = listener.local_addr().unwrap();
    let server = Server {
        name: "there".to_owned(),
        addresses: vec![address],
        hello: Hello {
            size: SIZE as u64,
            gpu_index: 3,
            more: true,
        },
    };
    (listener, server)
}

/// Starts a server for one client. The thread returns the events that the server reports.
fn served(faults: &'static [Fault]) -> (Server, JoinHandle<Vec<Event>>) {
    let (listener, server) = listener();
    let events = thread::spawn(move || {
        let (client, _) = listener.accept().unwrap();
        let mut events = Vec::new();
        let Ok(hello) = greeted(&client, None) else {
            return events;
        };
        assert_eq!((hello.gpu_index, hello.more), (3, true));
        let mut lines = Lines::of(client, LONG).unwrap();
        let mut fake = Fake::with(faults);
        let mut tell = |event| events.push(event);
        serve(
            &mut fake,
            &mut lines,
            (hello.size as usize, LINKS),
            &mut tell,
        );
        events
    });
    (server, events)
}

fn why(result: Result<impl Sized, impl std::fmt::Display>) -> String {
    result.map_or_else(|error| format!("{error:#}"), |_| "no error".to_owned())
}

#[test]
fn a_server_carries_out_requests() {
    let (server, events) = served(&[Fault::Refused]);
    let (mut peer, devices) = Peer::connect(&server, LONG).unwrap();
    assert_eq!((devices.about.as_str(), devices.links), ("a fake", LINKS));
    let mut teller = peer.teller().unwrap();
    let begins = Event::Begins {
        way: None,
        step: Name::Copies,
    };
    teller.tell(&Event::About("a client".to_owned()));
    teller.tell(&begins);
    let mut call = |request| peer.call(Kind::Gpu, request);
    let pattern = Pattern::new(1, 1);
    for early in [Request::Fill(pattern), Request::Deregister] {
        assert_eq!(why(call(early)), "the server: no such memory");
    }
    assert!(matches!(call(Request::Allocate), Ok(Answer::Done)));
    assert!(matches!(call(Request::Fill(pattern)), Ok(Answer::Done)));
    for (expected, is_equal) in [(pattern, true), (Pattern::new(1, 2), false)] {
        let compared = call(Request::Compare(expected.into())).unwrap();
        assert!(matches!(compared, Answer::Compared(found) if found.is_none() == is_equal));
    }
    let refused = call(Request::Register(Way::PeerMemory)).unwrap_err();
    let Unable::Failed { why: said, errno } = refused else {
        panic!("{refused:?}");
    };
    assert_eq!(said, "the server: EFAULT; the module: no_room");
    assert_eq!(errno, Some(14));
    assert_eq!(why(call(Request::Deregister)), "the server: no region");
    assert!(call(Request::Register(Way::DmaBuf)).is_ok());
    assert!(call(Request::Deregister).is_ok());
    teller.tell(&Event::Done);
    let about = Event::About("a fake".to_owned());
    let peer = Event::Peer("a client".to_owned());
    assert_eq!(events.join().unwrap(), [about, peer, begins]);
}

#[test]
fn a_client_that_leaves_fails_the_step() {
    let (server, events) = served(&[]);
    let (peer, _) = Peer::connect(&server, LONG).unwrap();
    peer.teller().unwrap().tell(&Event::Begins {
        way: Some(Way::DmaBuf),
        step: Name::RegisterOnServer,
    });
    drop(peer);
    let Some(Event::Ended(step)) = events.join().unwrap().pop() else {
        panic!("no step");
    };
    assert_eq!(
        (step.way, step.step),
        (Some(Way::DmaBuf), Name::RegisterOnServer)
    );
    assert_eq!(step.outcome, Outcome::Failed);
    let why = step.found.as_deref();
    assert_eq!(why, Some("the client: the connection was closed"));
}

#[test]
fn no_answer_follows_an_error() {
    let (listener, server) = listener();
    let there = thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        let mut lines = Lines::of(stream, LONG).unwrap();
        lines.line().unwrap();
        let (about, links) = (String::new(), LINKS);
        let ready = Welcome::Ready(Devices { about, links });
        lines.greet(ready).unwrap();
        lines.line().unwrap();
        lines.stream.write_all(b"no answer\n\"done\"\n").unwrap();
        lines.line()
    });
    let (mut peer, _) = Peer::connect(&server, LONG).unwrap();
    let error = why(peer.call(Kind::Host, Request::Allocate));
    assert!(error.starts_with("the server: an unknown line"), "{error}");
    assert!(peer.call(Kind::Host, Request::Deregister).is_err());
    assert_eq!(why(there.join().unwrap()), "the connection was closed");
}

/// Returns the error of a client whose server sends `answer`, and the client's first line.
fn answered(answer: &'static str) -> (String, String) {
    let (listener, server) = listener();
    let there = thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        let mut lines = Lines::of(stream, LONG).unwrap();
        let hello = lines.line().unwrap();
        lines.stream.write_all(answer.as_bytes()).unwrap();
        hello
    });
    let error = why(Peer::connect(&server, LONG));
    (error, there.join().unwrap())
}

#[test]
fn another_version_or_program_is_an_error() {
    let (error, hello) = answered(
        "{\"schema\":\"peermemctl.verify.peer\",\"protocol\":2,\"version\":\"9.1\\u001b\",\"new\":1}\n",
    );
    for words in [
        "\"9.1\\u001b\" there speaks protocol 2",
        "same version on both hosts",
    ] {
        assert!(error.contains(words), "{error}");
    }
    let hello: Value = serde_json::from_str(&hello).unwrap();
    assert_eq!(hello["protocol"], PROTOCOL);
    assert_eq!(hello["size"], SIZE);

    let (error, _) = answered("SSH-2.0-OpenSSH_10.0\r\n");
    assert!(
        error.contains("not the protocol of `peermemctl verify`: \"SSH-2.0"),
        "{error}"
    );
    let (error, _) = answered("");
    assert!(error.ends_with("the connection was closed"), "{error}");
    let (error, _) = answered(
        "{\"schema\":\"peermemctl.verify.peer\",\"protocol\":1,\"version\":\"\",\"refused\":\"why\"}\n",
    );
    assert_eq!(error, "the server there: why");
}

/// Returns the error of a server whose client sends `text`, and the server's answer.
fn greeting_of(text: &[u8], only: Option<IpAddr>) -> (String, String) {
    let (listener, server) = listener();
    let mut client = TcpStream::connect(server.addresses[0]).unwrap();
    client.write_all(text).unwrap();
    let (stream, _) = listener.accept().unwrap();
    let error = why(greeted(&stream, only));
    drop(stream);
    let mut answer = Vec::new();
    // The close of a connection with unread bytes may lose the answer.
    let _ = client.read_to_end(&mut answer);
    (error, String::from_utf8(answer).unwrap())
}

#[test]
fn a_wrong_greeting_is_refused() {
    let hello = |protocol: u32, size: u64| {
        format!(
            "{{\"schema\":\"peermemctl.verify.peer\",\"protocol\":{protocol},\"version\":\"0.0\",\"size\":{size},\
             \"gpu_index\":0,\"more\":false}}\n"
        )
    };
    let right = hello(1, 65_536);
    assert_eq!(greeting_of(right.as_bytes(), None).0, "no error");
    let (error, answer) = greeting_of(hello(2, 65_536).as_bytes(), None);
    assert!(error.contains("there speaks protocol 2"), "{error}");
    assert!(
        answer.contains("\"protocol\":1") && answer.contains("refused"),
        "{answer}"
    );
    for (text, words) in [
        (hello(1, 1), "a multiple of 65536"),
        (hello(1, u64::MAX), "a multiple of 65536"),
        (right.repeat(2), "more than one greeting"),
        ("GET / HTTP/1.1\r\n".to_owned(), "not the protocol"),
        ("[".repeat(1000) + "\n", "not the protocol"),
        (
            "x".repeat(2 * LONGEST_LINE),
            "a line of more than 8192 bytes",
        ),
    ] {
        let (error, _) = greeting_of(text.as_bytes(), None);
        assert!(error.contains(words), "{words}: {error}");
    }
    assert!(greeting_of(b"\xff\n", None).0.contains("no text"));
    let other = Some(Ipv4Addr::UNSPECIFIED.into());
    let (error, _) = greeting_of(right.as_bytes(), other);
    assert_eq!(error, "the server serves another client");
}

#[test]
fn silence_and_chatter_end() {
    let (listener, server) = listener();
    let limit = Duration::from_millis(20);
    let error = why(Peer::connect(&server, limit));
    assert!(error.ends_with("no line within 0 s"), "{error}");
    drop(listener);
    let error = why(Peer::connect(&server, limit));
    assert!(
        error.contains("does `peermemctl verify --server` run there?"),
        "{error}"
    );

    let (server, events) = served(&[]);
    let (mut peer, _) = Peer::connect(&server, LONG).unwrap();
    let mut teller = peer.teller().unwrap();
    for _ in 0..MOST_LINES {
        teller.tell(&Event::Peer(String::new()));
    }
    assert!(peer.call(Kind::Host, Request::Allocate).is_err());
    let Some(Event::Ended(step)) = events.join().unwrap().pop() else {
        panic!("no step");
    };
    assert_eq!(
        step.found.as_deref(),
        Some("the client: more than 512 lines")
    );
}
