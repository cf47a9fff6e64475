//! The control socket: who owns it, who may come in, one thread a client.

use super::{
    protocol::{MOST_REPLY, Reply, send},
    session,
    store::{Agent, Inner},
};
use flashboot_channel::{
    ErrorWire,
    local::{Lock, Policy, Wire, directory},
};
use flashboot_core::{Error, Kind, Result};
use rustix::event::{PollFd, PollFlags, poll};
use std::{
    collections::BTreeMap,
    fs::Permissions,
    io::{ErrorKind, PipeReader, PipeWriter},
    os::unix::{
        fs::PermissionsExt as _,
        net::{UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    thread::{self, JoinHandle},
    time::Duration,
};

/// The socket's name in its directory, without its `.sock`.
pub const SOCKET: &str = "agent";
/// When there are no descriptors or threads left for a client.
const REST: Duration = Duration::from_millis(50);

/// Where an agent listens, and to whom.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServeConfig {
    /// Where the socket lies: 0700 and ours, or 0711 where others are allowed.
    pub directory: PathBuf,
    /// Users, besides our own, that may come in.
    pub allow_uids: Vec<u32>,
    /// Primary groups that may.
    pub allow_gids: Vec<u32>,
    /// Clients at a time; more are refused.
    pub most: usize,
}

impl Default for ServeConfig {
    /// Our own user, in the usual directory; 1,024 clients.
    fn default() -> Self {
        Self { directory: directory::usual(), allow_uids: Vec::new(), allow_gids: Vec::new(), most: 1024 }
    }
}

/// A socket that is served until this is dropped: then every client is dropped too, and the files are gone.
#[derive(Debug)]
pub struct Serving {
    socket: PathBuf,
    clients: Arc<Clients>,
    /// Its end ends the listener.
    wake: Option<PipeWriter>,
    listener: Option<JoinHandle<()>>,
    // Last: the files go after everything.
    _lock: Lock,
}

/// Connections by number, so that they can be ended.
#[derive(Debug, Default)]
struct Clients(Mutex<BTreeMap<u64, Wire>>);

/// Serves `agent`. A dead agent's socket is taken over.
///
/// # Errors
/// [`Kind::Busy`] while another agent lives there, with its process id; [`Kind::Permission`] for a directory that is not ours
/// alone; the system's own.
pub fn serve(agent: &Agent, config: &ServeConfig) -> Result<Serving> {
    let policy = Policy::new(&config.allow_uids, &config.allow_gids);
    let directory = directory::prepare(&config.directory, policy.is_shared())?;
    let path = directory.join(format!("{SOCKET}.sock"));
    directory::socket_path(&path)?;
    let lock = Lock::take(&directory, SOCKET).map_err(|e| match e.kind() {
        Kind::Busy => Error::new(Kind::Busy, "agent", format!("another agent: {}", e.detail()))
            .with_remedy("use that agent, end it, or set another agent.directory"),
        _ => e,
    })?;
    let failed = |op, e: std::io::Error| Error::from_io(op, &e, path.display().to_string());
    let listener = UnixListener::bind(&path).map_err(|e| failed("bind", e))?;
    let mode = if policy.is_shared() { 0o666 } else { 0o600 };
    std::fs::set_permissions(&path, Permissions::from_mode(mode)).map_err(|e| failed("chmod", e))?;
    listener.set_nonblocking(true).map_err(|e| failed("fcntl", e))?;
    let (asleep, wake) = std::io::pipe().map_err(|e| failed("pipe", e))?;
    let clients = Arc::new(Clients::default());
    let listening = Listening {
        agent: Arc::clone(agent.inner()),
        listener,
        policy,
        most: config.most,
        clients: Arc::clone(&clients),
    };
    let listener = thread::Builder::new()
        .name("flashboot-agent".into())
        .spawn(move || listening.run(&asleep))
        .map_err(|e| failed("clone", e))?;
    Ok(Serving { socket: path, clients, wake: Some(wake), listener: Some(listener), _lock: lock })
}

impl Serving {
    /// The socket's path.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// How many clients there are.
    pub fn clients(&self) -> usize {
        self.clients.lock().len()
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        drop(self.wake.take());
        if let Some(listener) = self.listener.take()
            && listener.join().is_err()
        {
            tracing::error!("the agent's listener panicked");
        }
        // Their threads see the end and go.
        self.clients.lock().values().for_each(Wire::shut);
    }
}

impl Clients {
    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<u64, Wire>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct Listening {
    agent: Arc<Inner>,
    listener: UnixListener,
    policy: Policy,
    most: usize,
    clients: Arc<Clients>,
}

impl Listening {
    fn run(&self, asleep: &PipeReader) {
        let mut number = 0;
        loop {
            let mut polled = [PollFd::new(asleep, PollFlags::IN), PollFd::new(&self.listener, PollFlags::IN)];
            if let Err(errno) = poll(&mut polled, None)
                && errno != rustix::io::Errno::INTR
            {
                tracing::error!(%errno, "poll of the agent's socket");
                thread::sleep(REST);
            }
            let [end, _] = &polled;
            if !end.revents().is_empty() {
                return;
            }
            match self.listener.accept() {
                Ok((stream, _)) => {
                    number += 1;
                    if let Err(error) = self.admit(stream, number) {
                        tracing::warn!(%error, "a client is refused");
                    }
                }
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
                Err(error) => {
                    tracing::warn!(%error, "accept");
                    thread::sleep(REST);
                }
            }
        }
    }

    fn admit(&self, stream: UnixStream, number: u64) -> Result<()> {
        let wire = Wire::new(stream, format!("client {number}"))?;
        let peer = wire.peer()?;
        let refuse = |e: Error| {
            // It fits the socket's buffer; a client that is gone needs no answer.
            let _ = send(&wire, &Reply::Refused(ErrorWire::from(&e)), &[], MOST_REPLY);
            Err(e)
        };
        if !self.policy.admits_reader(peer.uid, peer.gid) {
            let detail = format!("uid {}, gid {} may not use this agent", peer.uid, peer.gid);
            return refuse(
                Error::new(Kind::Permission, "agent", detail)
                    .with_remedy("add it to the agent's agent.allow_uids or agent.allow_gids"),
            );
        }
        if self.clients.lock().len() >= self.most {
            let detail = format!("{} clients are there already", self.most);
            return refuse(Error::new(Kind::Busy, "agent", detail).with_remedy("try again later"));
        }
        self.clients.lock().insert(number, wire.again()?);
        let (agent, clients) = (Arc::clone(&self.agent), Arc::clone(&self.clients));
        let spawned = thread::Builder::new().name(format!("flashboot-client-{number}")).spawn(move || {
            let gone = Gone(&clients, number);
            session::run(&agent, &wire);
            drop(gone);
        });
        spawned.map(drop).map_err(|e| {
            self.clients.lock().remove(&number);
            Error::from_io("clone", &e, "a client's thread")
        })
    }
}

/// Forgets a client when its thread ends, also by a panic.
struct Gone<'c>(&'c Clients, u64);

impl Drop for Gone<'_> {
    fn drop(&mut self) {
        // The other handle of the socket: without it the client would not see the end.
        self.0.lock().remove(&self.1);
    }
}
