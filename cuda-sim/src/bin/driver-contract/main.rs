//! The driver contract: what the CUDA driver answers to what flashboot asks of it, and to what it must never be
//! asked. Runs unchanged on a real driver and on the stand-in (`LD_LIBRARY_PATH`).
//!
//! `driver-contract --transcript` prints `case: outcome` for each case; `driver-contract CASE…` only those. An
//! outcome has no addresses and no timings, so that two runs can be compared line by line. Every case has its own
//! process, because some end with a context, or a process, that is beyond use.

#![allow(unreachable_pub, reason = "a program has no public items")]

#[path = "../../abi.rs"]
mod abi;
mod cases;
mod driver;
mod facts;
mod gpu;
mod peer;

use cases::Case;
use driver::Driver;
use std::{
    io::Read as _,
    os::unix::process::ExitStatusExt as _,
    process::{Command, ExitCode, Stdio},
    sync::mpsc,
    thread,
    time::Duration,
};

const DEADLINE: Duration = Duration::from_secs(30);

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        ["--run", case] => run(case),
        ["--peer"] => match Driver::open().and_then(|driver| peer::serve(&driver)) {
            Ok(()) => ExitCode::SUCCESS,
            Err(_) => ExitCode::FAILURE,
        },
        ["--list"] => {
            cases::all().for_each(|case| println!("{}", case.name));
            ExitCode::SUCCESS
        }
        ["--transcript"] => transcript(cases::all()),
        [] => {
            eprintln!("usage: driver-contract --transcript | --list | CASE...");
            ExitCode::from(2)
        }
        wanted => transcript(wanted.iter().filter_map(|name| cases::find(name))),
    }
}

/// Each case in its own process.
fn transcript(cases: impl Iterator<Item = Case>) -> ExitCode {
    for case in cases {
        println!("{}: {}", case.name, outcome(case.name));
    }
    ExitCode::SUCCESS
}

fn outcome(case: &str) -> String {
    let child = Command::new("/proc/self/exe")
        .args(["--run", case])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        .spawn();
    let mut child = match child {
        Ok(child) => child,
        Err(e) => return format!("not started: {e}"),
    };
    let Some(mut stdout) = child.stdout.take() else { return "no output".into() };
    let (send, receive) = mpsc::channel();
    thread::spawn(move || {
        let mut text = String::new();
        let read = stdout.read_to_string(&mut text);
        // The receiver is gone when the deadline has passed.
        let _ = send.send(read.map(|_| text));
    });
    let Ok(text) = receive.recv_timeout(DEADLINE) else {
        // It may be gone by now.
        let _ = child.kill();
        let _ = child.wait();
        return "hung".into();
    };
    match child.wait() {
        Ok(status) => match status.signal() {
            Some(signal) => format!("killed by signal {signal}"),
            None => text.map_or_else(|e| e.to_string(), |text| text.trim().to_owned()),
        },
        Err(e) => e.to_string(),
    }
}

fn run(name: &str) -> ExitCode {
    let Some(case) = cases::find(name) else {
        println!("no such case");
        return ExitCode::FAILURE;
    };
    match Driver::open().and_then(|driver| (case.run)(&driver)) {
        Ok(facts) => println!("{facts}"),
        Err(broken) => println!("{broken}"),
    }
    ExitCode::SUCCESS
}
