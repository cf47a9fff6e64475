//! A real etcd on ports of its own, on loopback or on another host's network, that can be killed and started again on what it
//! had written.
#![allow(
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    reason = "every test file uses a part of it"
)]

use std::{
    ffi::OsString,
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

/// Killed when dropped, and its files with it.
pub(crate) struct EtcdServer {
    dir: tempfile::TempDir,
    host: String,
    /// How a program is run there: words before its own arguments, of etcd and of a shell.
    run: [Vec<OsString>; 2],
    ports: [u16; 2],
    /// PEM files: of the authority, the certificate and its key.
    tls: Option<[PathBuf; 3]>,
    child: Option<Child>,
}

impl EtcdServer {
    pub(crate) fn start() -> Self {
        Self::with(None)
    }

    pub(crate) fn with(tls: Option<[PathBuf; 3]>) -> Self {
        // Held together, so that they are two.
        let held = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
        let ports = held.each_ref().map(|socket| socket.local_addr().unwrap().port());
        drop(held);
        Self::begun("127.0.0.1", ports, tls, |program| Command::new(program))
    }

    /// On a host that has nothing else, at that address; `run` runs a program there.
    pub(crate) fn on(host: &str, run: impl Fn(&Path) -> Command) -> Self {
        Self::begun(host, [2379, 2380], None, run)
    }

    fn begun(host: &str, ports: [u16; 2], tls: Option<[PathBuf; 3]>, run: impl Fn(&Path) -> Command) -> Self {
        let run = ["etcd", "bash"].map(|program| {
            let command = run(Path::new(program));
            let words = std::iter::once(command.get_program()).chain(command.get_args());
            words.map(OsString::from).collect()
        });
        let dir = tempfile::tempdir().unwrap();
        let mut etcd = Self { dir, host: host.to_owned(), run, ports, tls, child: None };
        etcd.again();
        etcd
    }

    fn command(&self, which: usize) -> Command {
        let words = &self.run[which];
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]);
        command
    }

    /// Whether something listens there.
    fn listens(&self) -> bool {
        let dial = format!("exec 3<>/dev/tcp/{}/{}", self.host, self.ports[0]);
        let mut shell = self.command(1);
        let dialled =
            shell.arg("-c").arg(dial).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        dialled.status().expect("bash is not installed").success()
    }

    /// `HOST:PORT` of it.
    pub(crate) fn place(&self) -> String {
        format!("{}:{}", self.host, self.ports[0])
    }

    /// The address of the fleet called `name`.
    pub(crate) fn address(&self, name: &str) -> String {
        format!("etcd://{}/{name}", self.place())
    }

    /// Starts it on what it had written; returns once it takes connections.
    pub(crate) fn again(&mut self) {
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        let client = format!("{scheme}://{}", self.place());
        let peer = format!("http://{}:{}", self.host, self.ports[1]);
        let mut etcd = self.command(0);
        etcd.arg("--data-dir").arg(self.dir.path().join("data")).args(["--name", "one"]);
        etcd.args(["--listen-client-urls", &client, "--advertise-client-urls", &client]);
        etcd.args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer]);
        etcd.args(["--initial-cluster", &format!("one={peer}"), "--log-level", "error"]);
        if let Some([ca, certificate, key]) = &self.tls {
            etcd.arg("--trusted-ca-file").arg(ca).arg("--client-cert-auth");
            etcd.arg("--cert-file").arg(certificate).arg("--key-file").arg(key);
        }
        let started = etcd.stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        self.child = Some(started.expect("etcd is not installed (Debian: apt-get install etcd-server)"));
        let began = Instant::now();
        while !self.listens() {
            assert!(began.elapsed() < Duration::from_secs(30), "etcd does not listen");
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// As by the kernel, in the middle of whatever it does.
    pub(crate) fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }
}

impl Drop for EtcdServer {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
