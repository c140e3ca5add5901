// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
//! Tests of the program itself: exit statuses and output streams.

use std::io::{BufRead as _, BufReader};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

const MACHINE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/machines/hgx.json");

fn peermemctl() -> Command {
    Command::new(env!("CARGO_BIN_EXE_peermemctl"))
}

fn said(output: &Output) -> (Option<i32>, String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (
        output.status.code(),
        text(&output.stdout),
        text(&output.stderr),
    )
}

/// Runs the program with the words of a line.
fn ran(line: &str) -> (Option<i32>, String, String) {
    let output = peermemctl().args(line.split(' ')).output();
    said(&output.expect("the program starts"))
}

/// Runs a shell script, whose `$0` is the program and whose `$1` is a recording.
fn shell(script: &str) -> (Option<i32>, String, String) {
    let program = env!("CARGO_BIN_EXE_peermemctl");
    let output = Command::new("sh")
        .args(["-c", script, program, MACHINE])
        .output();
    said(&output.expect("the program starts"))
}

/// Returns the standard output of the program with the words of a line and a variable.
fn out_with(line: &str, name: &str, value: &str) -> String {
    let output = peermemctl().args(line.split(' ')).env(name, value).output();
    said(&output.expect("the program starts")).1
}

#[test]
fn topo_of_a_recording_exits_with_0() {
    let (status, out, errors) = ran(&format!("topo --machine {MACHINE}"));
    assert_eq!((status, errors.as_str()), (Some(0), ""), "{out}");
    assert!(out.contains("PIX*"), "{out}");
    // The README shows the first lines.
    let readme = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../README.md"));
    let command = "$ peermemctl topo --machine cli/tests/machines/hgx.json\n";
    let (_, shown) = readme.split_once(command).unwrap();
    let (shown, _) = shown.split_once("```").unwrap();
    assert!(out.starts_with(shown), "{out}");
    assert!(!out.contains('\x1b'), "colours nobody sees: {out}");
}

#[test]
fn an_unreadable_recording_is_status_2_with_a_message() {
    let (status, out, errors) = ran("topo --machine /none.json");
    assert_eq!(status, Some(2), "{errors}");
    assert_eq!(out, "");
    assert!(errors.starts_with("peermemctl: /none.json: "), "{errors}");
    assert_eq!(errors.lines().count(), 1, "{errors}");

    let own = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/program.rs");
    let (status, _, errors) = ran(&format!("topo --machine {own}"));
    assert_eq!(status, Some(2), "{errors}");
    let wanted = format!("peermemctl: {own}: expected value");
    assert!(errors.starts_with(&wanted), "{errors}");

    assert_eq!(ran("none").0, Some(2));
}

/// `peermemctl … | head -0`: the reader exits before the first write.
#[test]
fn a_reader_that_has_exited_changes_no_status() {
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    drop(reader);
    let child = peermemctl()
        .args(["topo", "-v", "--machine", MACHINE])
        .stdout(writer)
        .stderr(Stdio::piped())
        .spawn();
    let output = child.unwrap().wait_with_output();
    let (status, _, errors) = said(&output.expect("the program starts"));
    assert_eq!((status, errors.as_str()), (Some(0), ""));
}

#[test]
fn colours_appear_where_they_are_requested() {
    let topo = |words: &str| {
        let line = format!("topo {words}--machine {MACHINE}");
        out_with(&line, "NO_COLOR", "1")
    };
    assert!(topo("--color always ").contains("\x1b["));
    assert!(!topo("").contains('\x1b'));
    assert!(!topo("--json --color always ").contains('\x1b'));
}

#[test]
fn every_command_has_a_man_page() {
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("man");
    std::fs::create_dir_all(&directory).unwrap();
    let output = peermemctl().arg("man").arg(&directory).output();
    assert_eq!(said(&output.expect("the program starts")).0, Some(0));
    for command in ["", "-topo", "-doctor", "-record", "-job", "-man", "-verify"] {
        let page = format!("peermemctl{command}.1");
        let text = std::fs::read_to_string(directory.join(&page)).unwrap();
        assert!(text.contains(".TH peermemctl"), "{page}: {text}");
        // Commands that read no machine, and `verify`, which moves bytes on this machine, take no
        // recording.
        let reads = !["", "-man", "-verify"].contains(&command);
        assert_eq!(text.contains("machine\\fR"), reads, "{page}: {text}");
    }
    let (status, _, errors) = ran("man /none/of/this");
    assert_eq!(status, Some(2));
    let begin = "peermemctl: /none/of/this: ";
    assert!(errors.starts_with(begin), "{errors}");
}

#[test]
fn verify_between_two_hosts_needs_right_arguments() {
    for (arguments, words) in [
        ("--gpu none", "--gpu none is for a run between two hosts"),
        ("--gpu none 127.0.0.1:", "no address for \"127.0.0.1:\""),
        ("--keep", "required arguments were not provided"),
        ("--server 127.0.0.1:0 there", "cannot be used with"),
        ("--server there", "invalid value 'there'"),
        ("--gpu-only there", "cannot be used with"),
    ] {
        let (status, out, errors) = ran(&format!("verify {arguments}"));
        assert_eq!((status, out.as_str()), (Some(2), ""), "{arguments}");
        assert!(errors.contains(words), "{arguments}: {errors}");
    }
}

#[test]
fn a_recording_of_this_machine_is_one() {
    let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join("here.json");
    let output = peermemctl().arg("record").arg("-o").arg(&file).output();
    assert_eq!(said(&output.expect("the program starts")).0, Some(0));
    let there = format!("topo --machine {}", file.display());
    assert_eq!(ran("topo"), ran(&there));
}

/// A process of this machine, while it runs and after its end.
#[test]
fn a_job_is_a_process_that_runs() {
    let mut child = Command::new("sleep")
        .arg("60")
        .env("NCCL_IB_DISABLE", "1")
        .spawn()
        .unwrap();
    let pid = child.id().to_string();
    let job = |words: &[&str]| said(&peermemctl().arg("job").args(words).output().unwrap());
    let (status, out, errors) = job(&[&pid, "--all"]);
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!((status, errors.as_str()), (Some(0), ""), "{out}");
    let begin = format!("Process {pid} of ");
    assert!(out.starts_with(&begin) && out.contains("sleep 60"), "{out}");
    assert!(out.contains("NCCL_IB_DISABLE=1"), "{out}");
    let (status, _, errors) = job(&[&pid]);
    assert_eq!(status, Some(2));
    assert_eq!(errors, format!("peermemctl: there is no process {pid}\n"));
    let (status, _, errors) = job(&["1", "--machine", MACHINE]);
    assert_eq!(status, Some(2), "{errors}");
}

/// `peermemctl topo >&-`: output that nobody can read is an error.
#[test]
fn a_closed_standard_output_is_status_2() {
    let (status, _, errors) = shell("exec \"$0\" topo --machine \"$1\" >&-");
    assert_eq!(status, Some(2), "{errors}");
    let begin = "peermemctl: standard output: ";
    assert!(errors.starts_with(begin), "{errors}");
    // A user may discard the output on purpose.
    assert_eq!(shell("\"$0\" topo --machine \"$1\" >/dev/null").0, Some(0));
}

#[test]
fn the_variable_columns_is_used() {
    let topo = |columns: &str| {
        let line = format!("topo --machine {MACHINE}");
        out_with(&line, "COLUMNS", columns)
    };
    let first = |text: &str| text.lines().next().unwrap_or_default().to_owned();
    assert!(first(&topo("200")).ends_with("mlx5_8"));
    let narrow = topo("60");
    assert!(first(&narrow).ends_with("mlx5_5"), "{narrow}");
    for word in ["0000:19:00.0", "InfiniBand", "ibp194s0"] {
        assert!(narrow.contains(word), "{word} in\n{narrow}");
    }
    for odd in ["", "0", "-1", "x"] {
        assert!(first(&topo(odd)).ends_with("mlx5_8"), "{odd}");
    }
}

/// A child process, killed at the end of the test.
struct Running(Child);

impl Running {
    /// Returns the exit status of a process that must end. `why` is the message if the process does
    /// not end.
    fn status(&mut self, why: &str) -> Option<i32> {
        let begin = Instant::now();
        loop {
            if let Some(status) = self.0.try_wait().expect("the program can be waited for") {
                return status.code();
            }
            assert!(begin.elapsed() < LONG, "{why}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Time limit, longer than any step of these tests takes on a busy machine.
const LONG: Duration = Duration::from_secs(30);

#[test]
fn a_fifo_that_nobody_writes_to_is_no_recording() {
    let fifo = Path::new(env!("CARGO_TARGET_TMPDIR")).join("fifo");
    let _ = std::fs::remove_file(&fifo);
    assert!(Command::new("mkfifo")
        .arg(&fifo)
        .status()
        .unwrap()
        .success());
    let child = peermemctl()
        .args(["topo", "--machine"])
        .arg(&fifo)
        .stderr(Stdio::piped())
        .spawn();
    let mut running = Running(child.unwrap());
    assert_eq!(running.status("it waits for a writer"), Some(2));
    // A pipe with a slow writer.
    let slow = "(sleep 1; cat \"$1\") | \"$0\" topo --machine /dev/stdin";
    let (status, out, errors) = shell(slow);
    assert_eq!((status, errors.as_str()), (Some(0), ""), "{out}");
}

/// The worker is the server's child process that serves the client. The client stays connected, so
/// only the end of the server can end the worker.
#[test]
fn a_worker_ends_with_its_server() {
    let task = format!(
        "{{\"server\":{{\"gpu\":\"none\",\"source\":\"none\",\"hca\":null,\"port\":1,\"size\":65536,\
         \"limit\":{},\"server\":null,\"links\":{{\"gpu\":null,\"nic\":null}}}}}}",
        u64::MAX
    );
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let _client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (connection, _) = listener.accept().unwrap();
    let child = peermemctl()
        .args(["verify-part", &task])
        .stdin(OwnedFd::from(connection))
        .stdout(Stdio::piped())
        .spawn();
    let mut running = Running(child.unwrap());
    let mut lines = BufReader::new(running.0.stdout.take().unwrap()).lines();
    // The worker prints this line after it has greeted the client.
    let mut said = lines.by_ref().map_while(Result::ok);
    assert!(said.any(|line| line.contains("about")));
    drop(lines);
    assert_eq!(running.status("the worker lives on"), Some(3));
}

#[test]
fn export_can_listen_on_a_port_without_address() {
    let child = peermemctl()
        .args(["export", "--listen", ":0", "--machine", MACHINE])
        .stderr(Stdio::piped())
        .spawn();
    let mut running = Running(child.unwrap());
    let mut line = String::new();
    let mut errors = BufReader::new(running.0.stderr.take().unwrap());
    errors.read_line(&mut line).unwrap();
    let port: Option<u16> = line.trim().strip_suffix("/metrics").and_then(|address| {
        let (_, port) = address.rsplit_once(':')?;
        port.parse().ok()
    });
    let port = port.unwrap_or_else(|| panic!("{line}"));
    assert!(TcpStream::connect(("127.0.0.1", port)).is_ok(), "{line}");
}

#[test]
fn a_size_may_have_a_unit() {
    let (_, _, errors) = ran("verify --size 4M --gpu none");
    assert!(!errors.contains("invalid value"), "{errors}");
    let (status, _, errors) = ran("verify --size 4X");
    assert_eq!(status, Some(2));
    assert!(errors.contains("powers of 1024"), "{errors}");
}

/// An error about a recording does not mention this machine.
#[test]
fn list_says_why_a_recording_has_none() {
    let list = |file: &str| ran(&format!("list --machine {file}"));
    let (status, out, errors) = list(MACHINE);
    assert_eq!((status, errors.as_str()), (Some(0), ""));
    assert_eq!(out, "no registration of GPU memory is active\n");
    let recorded = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/tests/recordings/four-h200s.json"
    );
    let (status, _, errors) = list(recorded);
    assert_eq!(status, Some(2));
    let begin = format!("peermemctl: {recorded}: the module nvidia_peermem is not loaded");
    assert!(errors.starts_with(&begin), "{errors}");
}

/// A monitoring system interprets exit status 2 as CRITICAL, and shows only standard output.
#[test]
fn a_plugin_that_cannot_examine_the_machine_is_unknown() {
    let own = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/program.rs");
    for (file, more, why) in [
        ("/none.json", "", "/none.json: "),
        (own, "", "expected value"),
        (MACHINE, " --only none", "there is no check"),
        (MACHINE, " --expect /none.json", "/none.json"),
        (MACHINE, " --bogus", "--bogus"),
    ] {
        let words = format!("doctor --nagios --machine {file}{more}");
        let (status, out, errors) = ran(&words);
        assert_eq!((status, errors.as_str()), (Some(3), ""), "{words:?}: {out}");
        assert!(out.starts_with("GPUDIRECT UNKNOWN - "), "{words:?}: {out}");
        assert!(out.contains(why), "{words:?}: {out}");
        assert_eq!(out.lines().count(), 1, "{words:?}: {out}");
    }
    // Nothing can be printed to a closed standard output.
    let closed = shell("exec \"$0\" doctor --nagios --machine \"$1\" >&-");
    assert_eq!(closed.0, Some(3));
    assert_eq!(ran("doctor --nagios --help").0, Some(0));
}
