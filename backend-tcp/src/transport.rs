//! The transport by name.

use crate::{config::TcpConfig, exchange::TcpExchange, probe};
use async_trait::async_trait;
use flashboot_core::{
    Caps, HandleExchange, Location, Locator, MemoryKind, Readiness, Result, Transport, TransportName,
};
use std::sync::Arc;

/// Source and destination: every pair.
pub(crate) const SERVES: &[(MemoryKind, MemoryKind)] = &[
    (MemoryKind::Host, MemoryKind::Host),
    (MemoryKind::Host, MemoryKind::Gpu),
    (MemoryKind::Gpu, MemoryKind::Host),
    (MemoryKind::Gpu, MemoryKind::Gpu),
];

/// `tcp` between any two hosts.
#[derive(Debug, Clone, Default)]
pub struct TcpTransport {
    config: TcpConfig,
}

impl TcpTransport {
    /// What probes look at (the address, what protects channels) is `config`'s.
    pub fn new(config: TcpConfig) -> Self {
        Self { config }
    }
}

#[async_trait]
impl Transport for TcpTransport {
    type Config = TcpConfig;

    fn name(&self) -> TransportName {
        TransportName::Tcp
    }

    fn serves(&self) -> &'static [(MemoryKind, MemoryKind)] {
        SERVES
    }

    fn caps(&self, _: MemoryKind) -> Caps {
        Caps {
            // The exporter sends: dropping its endpoint ends everything that is attached.
            revocable: true,
            // There is no frame to write with.
            enforces_read_only: true,
            source_can_throttle: true,
            outlives_exporter: false,
            // No memory of a peer is mapped: a reader's own GPU is all that its context knows of.
            poisons_context: false,
            reports_death: true,
            closes_with_export: true,
        }
    }

    async fn probe(&self) -> Readiness {
        probe::probe(&self.config).await
    }

    async fn probe_pair(&self, peer: &Locator, into: &Location) -> Readiness {
        probe::probe_pair(&self.config, peer, into).await
    }

    async fn open(&self, config: TcpConfig) -> Result<Arc<dyn HandleExchange>> {
        Ok(Arc::new(TcpExchange::open(config).await?))
    }
}
