//! One listening port and the readers attached by it, for as long as somebody exports.

use crate::{
    config::TcpConfig,
    registry::Registry,
    responder,
    runtime::{Ended, handle},
    throttle::Throttle,
};
use flashboot_channel::{Listener, Security};
use flashboot_core::{Error, Kind, Result};
use std::{
    collections::HashMap,
    fmt,
    net::{Shutdown, SocketAddr, TcpStream},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

/// EADDRINUSE, the same on x86_64 and aarch64.
const IN_USE: i32 = 98;

pub(crate) struct Endpoint {
    text: String,
    exporter: Arc<Exporter>,
    /// The accept loop, and below it the readers that are in their handshake or watch.
    _accepting: Ended<()>,
}

/// What an endpoint's readers share.
#[derive(Debug)]
pub(crate) struct Exporter {
    pub(crate) registry: Registry,
    pub(crate) throttle: Option<Throttle>,
    pub(crate) zero_copy: Option<bool>,
    pub(crate) handshake: Duration,
    /// How long a reader may take nothing of what is sent to it.
    pub(crate) silence: Duration,
    max_connections: usize,
    max_pending: usize,
    attached: Mutex<Attached>,
}

#[derive(Debug, Default)]
struct Attached {
    closed: bool,
    next: u64,
    /// Every connection; with a second handle of its socket where a thread blocks on it.
    connections: HashMap<u64, Option<TcpStream>>,
}

impl Endpoint {
    /// Runs on this transport's own runtime.
    pub(crate) async fn open(config: TcpConfig, security: Security) -> Result<Self> {
        let listener = listen(&config, &security).await?;
        let text = listener.endpoint(config.advertise.as_ref())?.to_string();
        let exporter = Arc::new(Exporter {
            registry: Registry::default(),
            throttle: config.rate.map(|rate| Throttle::new(rate.0)),
            zero_copy: config.zero_copy,
            handshake: config.handshake,
            silence: config.silence,
            max_connections: config.max_connections,
            max_pending: config.max_pending,
            attached: Mutex::default(),
        });
        let accepting = responder::accept(listener, Arc::clone(&exporter));
        Ok(Self { text, exporter, _accepting: Ended(handle()?.spawn(accepting)) })
    }

    /// As locators carry it.
    pub(crate) fn text(&self) -> &str {
        &self.text
    }

    pub(crate) fn registry(&self) -> &Registry {
        &self.exporter.registry
    }
}

async fn listen(config: &TcpConfig, security: &Security) -> Result<Listener> {
    let mut last = None;
    for port in config.ports.clone() {
        match Listener::bind(SocketAddr::new(config.bind, port), security, config.listen()?).await {
            Err(e) if e.code() == Some(flashboot_core::Code::Errno(IN_USE)) => last = Some(e),
            bound => return bound,
        }
    }
    let none = || Error::new(Kind::Invalid, "bind", format!("{:?} has no port", config.ports));
    Err(last.map_or_else(none, |e| e.with_remedy("choose other ports, or 0 to let the system choose")))
}

impl Drop for Endpoint {
    /// Readers learn it from their connections' end.
    fn drop(&mut self) {
        let mut attached = self.exporter.attached();
        attached.closed = true;
        for socket in attached.connections.values().flatten() {
            // One that is broken already has ended its thread.
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Endpoint").field(&self.text).finish()
    }
}

impl Exporter {
    fn attached(&self) -> MutexGuard<'_, Attached> {
        self.attached.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Connections that may watch, or have yet to say what they want, at once.
    pub(crate) fn most_attending(&self) -> usize {
        self.max_connections.saturating_add(self.max_pending)
    }

    /// A place for one more connection, if there is one.
    pub(crate) fn enter(self: &Arc<Self>) -> Option<Place> {
        let mut attached = self.attached();
        if attached.closed || attached.connections.len() >= self.max_connections {
            return None;
        }
        let id = attached.next;
        attached.next = attached.next.wrapping_add(1);
        attached.connections.insert(id, None);
        Some(Place { exporter: Arc::clone(self), id })
    }
}

/// A connection's place; dropping it gives the place to another.
#[derive(Debug)]
pub(crate) struct Place {
    exporter: Arc<Exporter>,
    id: u64,
}

impl Place {
    pub(crate) fn exporter(&self) -> &Exporter {
        &self.exporter
    }

    /// From now on the endpoint's end ends the socket too; false when it has ended already.
    pub(crate) fn ends(&self, socket: &TcpStream) -> std::io::Result<bool> {
        let second = socket.try_clone()?;
        let mut attached = self.exporter.attached();
        if attached.closed {
            return Ok(false);
        }
        attached.connections.insert(self.id, Some(second));
        Ok(true)
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.exporter.attached().closed
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.exporter.attached().connections.remove(&self.id);
    }
}
