//! A fleet of real processes: a service, seeds and clones of one small image.

use super::{MIB, Place, text};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::{
    fs,
    io::{BufRead as _, BufReader, Read as _},
    path::PathBuf,
    process::{Child, Command, ExitStatus, Stdio},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

pub(crate) const LIMIT: Duration = Duration::from_secs(60);

/// Waits until it is so, however slow the machine is, but not for ever.
#[track_caller]
pub(crate) fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let began = Instant::now();
    while !holds() {
        assert!(began.elapsed() < LIMIT, "not within {LIMIT:?}: {what}");
        thread::sleep(Duration::from_millis(20));
    }
}

/// A process of the test; killed when dropped.
pub(crate) struct Proc {
    pub(crate) child: Child,
    pub(crate) line: mpsc::Receiver<String>,
    pub(crate) stderr: mpsc::Receiver<String>,
}

impl Proc {
    pub(crate) fn start(mut command: Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let (tell, line) = mpsc::channel();
        let out = BufReader::new(child.stdout.take().unwrap());
        thread::spawn(move || out.lines().map_while(Result::ok).for_each(|line| drop(tell.send(line))));
        let (tell, stderr) = mpsc::channel();
        let mut err = child.stderr.take().unwrap();
        thread::spawn(move || {
            let mut text = String::new();
            let _ = err.read_to_string(&mut text);
            let _ = tell.send(text);
        });
        Self { child, line, stderr }
    }

    /// The one object.
    #[track_caller]
    pub(crate) fn object(&mut self) -> Value {
        match self.line.recv_timeout(LIMIT) {
            Ok(line) => serde_json::from_str(&line).unwrap(),
            Err(_) => {
                let _ = self.child.kill();
                panic!("it said nothing; stderr: {}", self.stderr.recv_timeout(LIMIT).unwrap_or_default());
            }
        }
    }

    #[track_caller]
    pub(crate) fn ended(&mut self) -> ExitStatus {
        let until = Instant::now() + LIMIT;
        loop {
            match self.child.try_wait().unwrap() {
                Some(status) => return status,
                None => assert!(Instant::now() < until, "it has not ended"),
            }
            thread::sleep(Duration::from_millis(10));
        }
    }

    pub(crate) fn is_running(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        let pid = Pid::from_child(&self.child);
        kill_process(pid, signal).unwrap();
    }

    /// As by the kernel: nothing is said to anybody.
    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Proc {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// An image of five blocks, and a service for it.
pub(crate) struct Fleet {
    pub(crate) place: Place,
    pub(crate) image: PathBuf,
    pub(crate) endpoint: String,
    pub(crate) transport: &'static str,
    pub(crate) service: Proc,
    pub(crate) clones: u32,
}

impl Fleet {
    pub(crate) fn new(transport: &'static str) -> Self {
        let mut fleet = Self::at(transport, |_| String::new());
        (fleet.service, fleet.endpoint) = service(&fleet.place, "127.0.0.1:0");
        fleet
    }

    /// With nobody that serves yet at `endpoint`.
    pub(crate) fn at(transport: &'static str, endpoint: impl FnOnce(&Place) -> String) -> Self {
        let place = Place::new();
        let image = place.image("m", &[("a", 70 * MIB), ("b", 9)]);
        let endpoint = endpoint(&place);
        let service = Proc::start(Command::new("true"));
        Self { place, image, endpoint, transport, service, clones: 0 }
    }

    pub(crate) fn payload(&self) -> Vec<u8> {
        fs::read(self.image.join("target-0-0-0-0.img")).unwrap()
    }

    pub(crate) fn member(&self, args: &[&str]) -> Command {
        let common = ["--rendezvous", &self.endpoint, "--transport", self.transport, "--json"];
        let more = ["--chunk", "16MiB", "--stall", "5s", "--threads", "1", "--patience", "30s"];
        self.place.flashboot(&[args, &common, &more].concat())
    }

    pub(crate) fn seed(&self, more: &[&str]) -> Proc {
        let args = [&["seed", text(&self.image), "--model", "tiny", "--revision", "r1"], more].concat();
        let mut seed = Proc::start(self.member(&args));
        let said = seed.object();
        assert_eq!(said["bytes"], self.payload().len());
        seed
    }

    /// A clone, and where it writes the payload.
    pub(crate) fn clone(&mut self, more: &[&str]) -> (Proc, PathBuf) {
        self.clones += 1;
        let out = self.place.path(&format!("out-{}", self.clones));
        let args = [&["clone", "--model", "tiny", "-o", text(&out)], more].concat();
        (Proc::start(self.member(&args)), out)
    }

    pub(crate) fn status(&self) -> Value {
        self.place.ok(&["status", "--rendezvous", &self.endpoint])
    }

    /// The status, once it is as wanted.
    #[track_caller]
    pub(crate) fn until(&self, what: &str, wanted: impl Fn(&[Value]) -> bool) -> Vec<Value> {
        self.until_or(what, wanted, || false)
    }

    /// As [`until`](Self::until), or until there is no more use in waiting.
    #[track_caller]
    pub(crate) fn until_or(
        &self,
        what: &str,
        wanted: impl Fn(&[Value]) -> bool,
        mut over: impl FnMut() -> bool,
    ) -> Vec<Value> {
        let until = Instant::now() + LIMIT;
        loop {
            // Between one service and the next nobody answers.
            let (code, status) = self.place.json(&["status", "--rendezvous", &self.endpoint]);
            let members = status["members"].as_array().cloned().unwrap_or_default();
            if code == 0 && wanted(&members) || over() {
                return members;
            }
            assert!(Instant::now() < until, "not within the limit: {what}: {status}");
        }
    }

    /// The clone's report, once it has everything: verified, and the very bytes.
    #[track_caller]
    pub(crate) fn check(&self, (clone, out): &mut (Proc, PathBuf)) -> Value {
        let report = clone.object();
        if !report["error"].is_null() {
            panic!("{report}; stderr: {}", clone.stderr.recv_timeout(LIMIT).unwrap_or_default());
        }
        assert_eq!((&report["verified"], &report["blocks"]), (&5.into(), &5.into()), "{report}");
        assert!(fs::read(out).unwrap() == self.payload(), "other bytes than the image's");
        report
    }
}

/// Eight clones of a seed on the first of three hosts: each is started on which, by which transports, and with where it is to be
/// killed. Three die in the middle, two come once those are dead; given are those that live.
pub(crate) fn bring_up(
    mut start: impl FnMut(usize, &str, &[&str]) -> (Proc, PathBuf),
) -> Vec<(Proc, PathBuf)> {
    let (mut victims, mut survivors) = (Vec::new(), Vec::new());
    for (host, allow, kill) in [
        (1, "tcp", None),
        (1, "ipc,tcp", Some("chunk:1")),
        (2, "tcp", Some("chunk:0")),
        (2, "tcp", None),
        (1, "tcp", Some("pull:3")),
        (2, "ipc,tcp", None),
    ] {
        match kill {
            Some(kill) => victims.push(start(host, allow, &["--kill", kill])),
            None => survivors.push(start(host, allow, &[])),
        }
    }
    for (victim, out) in &mut victims {
        assert!(!victim.ended().success());
        assert!(!out.exists(), "a killed clone leaves no payload");
    }
    survivors.extend([(2, "tcp"), (0, "ipc")].map(|(host, allow)| start(host, allow, &[])));
    survivors
}

pub(crate) fn service(place: &Place, at: &str) -> (Proc, String) {
    let mut service =
        Proc::start(place.flashboot(&["rendezvous", "--listen", at, "--lease", "2s", "--json"]));
    let endpoint = service.object()["endpoint"].as_str().unwrap().to_owned();
    (service, endpoint)
}
