//! The transport by name.

use crate::{config::ImexConfig, error, exchange::ImexExchange, probe};
use async_trait::async_trait;
use flashboot_core::{
    Caps, HandleExchange, Location, Locator, MemoryKind, Readiness, Result, Transport, TransportName,
};
use flashboot_cuda::bounded;
use std::{sync::Arc, time::Duration};

/// Source and destination.
pub(crate) const SERVES: &[(MemoryKind, MemoryKind)] = &[(MemoryKind::Gpu, MemoryKind::Gpu)];

/// `imex` between GPUs of one NVLink domain.
#[derive(Debug, Clone, Default)]
pub struct ImexTransport {
    config: ImexConfig,
}

impl ImexTransport {
    /// Probes try what `config` says.
    pub fn new(config: ImexConfig) -> Self {
        Self { config }
    }
}

#[async_trait]
impl Transport for ImexTransport {
    type Config = ImexConfig;

    fn name(&self) -> TransportName {
        TransportName::Imex
    }

    fn serves(&self) -> &'static [(MemoryKind, MemoryKind)] {
        SERVES
    }

    /// What no IMEX hardware has shown is not promised.
    fn caps(&self, _: MemoryKind) -> Caps {
        Caps {
            revocable: false,
            enforces_read_only: false,
            source_can_throttle: false,
            outlives_exporter: false,
            poisons_context: true,
            reports_death: false,
            closes_with_export: false,
        }
    }

    async fn probe(&self) -> Readiness {
        let config = self.config.clone();
        // The ladder has a deadline of its own, and says then how far it came.
        let patience = config.probe.saturating_add(Duration::from_secs(1));
        let probed = bounded("probe", "an answer of the driver", patience, move || Ok(probe::probe(&config)));
        probed.await.unwrap_or_else(|e| error::unavailable(&e))
    }

    async fn probe_pair(&self, peer: &Locator, into: &Location) -> Readiness {
        let (peer, into) = (peer.clone(), into.clone());
        let pair = move || Ok(probe::pair(&peer, &into));
        let probed = bounded("probe", "an answer of the driver", self.config.probe, pair);
        probed.await.unwrap_or_else(|e| error::unavailable(&e))
    }

    async fn open(&self, _: ImexConfig) -> Result<Arc<dyn HandleExchange>> {
        Ok(Arc::new(ImexExchange::default()))
    }
}
