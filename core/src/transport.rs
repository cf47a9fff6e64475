//! A backend by name: what it can do, whether it works here, how to open it.

use crate::{Error, HandleExchange, Kind, Location, Locator, Result};
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

impl MemoryKind {
    /// As people read it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Gpu => "GPU",
            Self::Mock => "mock",
        }
    }
}

impl fmt::Display for MemoryKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// What a transport promises of sources in one kind of memory. The conformance suite holds it to each; when unsure,
/// promise less.
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
    /// Losing a source can poison the reader's process ([`Kind::ContextLost`]), which must then restart.
    pub poisons_context: bool,
    /// A reader is told that its source has died. Without it a dead source is one that stands still.
    pub reports_death: bool,
    /// A dropped export admits nobody new. Without it a locator works until its arena is dropped or filled anew.
    pub closes_with_export: bool,
}

/// Refuses a source and a destination, in this order, that are not among what the transport `name` serves.
///
/// # Errors
/// [`Kind::Mismatch`], naming what is served.
pub fn check_served(
    name: TransportName,
    served: &[(MemoryKind, MemoryKind)],
    (from, into): (MemoryKind, MemoryKind),
) -> Result<()> {
    if served.contains(&(from, into)) {
        return Ok(());
    }
    let all: Vec<_> = served.iter().map(|(from, into)| format!("{from} to {into}")).collect();
    let all = if all.is_empty() { "nothing".to_owned() } else { all.join(" and ") };
    let detail = format!("{name} moves {all} memory, not {from} to {into}");
    Err(Error::new(Kind::Mismatch, "transport", detail)
        .with_remedy("allow a transport that serves both ends"))
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

    /// The pairs of source and destination memory that it moves bytes between.
    fn serves(&self) -> &'static [(MemoryKind, MemoryKind)];

    /// What it promises of sources in this kind of memory; of memory that it does not serve, nothing of use.
    fn caps(&self, source: MemoryKind) -> Caps;

    /// Whether it can work on this machine. Bounded in time; changes nothing.
    async fn probe(&self) -> Readiness;

    /// Whether memory at `into`, which is this machine's, can be filled from what `peer` names. Dials the peer, moves
    /// no payload. Bounded in time.
    async fn probe_pair(&self, peer: &Locator, into: &Location) -> Readiness;

    /// Opens an endpoint.
    async fn open(&self, config: Self::Config) -> Result<Arc<dyn HandleExchange>>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pair_that_is_not_served_is_told_what_is() {
        const BOTH: &[(MemoryKind, MemoryKind)] =
            &[(MemoryKind::Host, MemoryKind::Host), (MemoryKind::Gpu, MemoryKind::Gpu)];
        let check = |from, into| check_served(TransportName::Ipc, BOTH, (from, into));
        assert_eq!(check(MemoryKind::Gpu, MemoryKind::Gpu), Ok(()));
        let refused = check(MemoryKind::Host, MemoryKind::Gpu).unwrap_err();
        assert_eq!(refused.kind(), Kind::Mismatch);
        assert_eq!(refused.detail(), "ipc moves host to host and GPU to GPU memory, not host to GPU");
    }
}
