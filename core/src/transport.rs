//! A backend by name: what it can do, whether it works here, how to open it.

use crate::{HandleExchange, Locator, Result};
use async_trait::async_trait;
use std::{fmt, sync::Arc};

/// The backends by name, in the order `auto` tries them; `mock` is never tried.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum TransportName {
    /// Multi-node NVLink by FABRIC handles.
    Imex,
    /// File descriptors over a Unix socket.
    Ipc,
    /// One-sided RDMA READ.
    Rdma,
    /// The fallback that works everywhere.
    Tcp,
    /// In-process, virtual clock, faults on demand.
    Mock,
}

impl TransportName {
    /// The name as users write it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Imex => "imex",
            Self::Ipc => "ipc",
            Self::Rdma => "rdma",
            Self::Tcp => "tcp",
            Self::Mock => "mock",
        }
    }
}

impl fmt::Display for TransportName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// The kinds of memory a transport can read from or write to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MemoryKind {
    /// Host memory.
    Host,
    /// GPU memory.
    Gpu,
    /// A simulated host's.
    Mock,
}

/// What a transport promises. The conformance suite holds it to each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Caps {
    /// The exporter can take a reader's access back while it is attached.
    pub revocable: bool,
    /// A reader that tries to write is stopped by the system, not by its own good will.
    pub enforces_read_only: bool,
    /// The source can slow its readers down.
    pub source_can_throttle: bool,
    /// An attached reader can read what was published after the exporter has died.
    pub outlives_exporter: bool,
    /// Losing a source can poison the reader's process, which must then restart.
    pub poisons_context: bool,
    /// Memory it can read from.
    pub sources: &'static [MemoryKind],
    /// Memory it can write to.
    pub destinations: &'static [MemoryKind],
}

/// Whether a transport works here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Readiness {
    /// It does, as far as can be told without a peer.
    Ready,
    /// It does not.
    Unavailable {
        /// What was found.
        reason: String,
        /// What to do about it.
        remedy: String,
    },
}

/// A backend.
#[async_trait]
pub trait Transport: Send + Sync + fmt::Debug {
    /// What `open` needs to know; units live in its field types.
    type Config: Clone + Send + Sync + 'static;

    /// Its name.
    fn name(&self) -> TransportName;

    /// What it promises.
    fn caps(&self) -> Caps;

    /// Whether it can work on this machine. Bounded in time; changes nothing.
    async fn probe(&self) -> Readiness;

    /// Whether this machine can read what `peer` names. Dials the peer, moves no payload.
    async fn probe_pair(&self, peer: &Locator) -> Readiness;

    /// Opens an endpoint.
    async fn open(&self, config: Self::Config) -> Result<Arc<dyn HandleExchange>>;
}
