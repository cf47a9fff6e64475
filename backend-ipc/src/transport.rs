//! The transport by name.

use crate::{config::IpcConfig, exchange::IpcExchange, probe};
use async_trait::async_trait;
use flashboot_core::{
    Caps, HandleExchange, Location, Locator, MemoryKind, Readiness, Result, Transport, TransportName,
};
use flashboot_cuda::bounded;
use flashboot_memory::CopyEngine;
use std::sync::Arc;

/// Source and destination. Between the two kinds a copy would go through pinned memory that nobody has: not here.
pub(crate) const SERVES: &[(MemoryKind, MemoryKind)] =
    &[(MemoryKind::Host, MemoryKind::Host), (MemoryKind::Gpu, MemoryKind::Gpu)];

/// `ipc` between the arenas of one host.
#[derive(Debug, Clone, Default)]
pub struct IpcTransport {
    config: IpcConfig,
    engine: Option<Arc<CopyEngine>>,
}

impl IpcTransport {
    /// What probes look at (the socket directory, who is allowed) is `config`'s; the copies are made by the
    /// process's shared engine.
    pub fn new(config: IpcConfig) -> Self {
        Self { config, engine: None }
    }

    /// Copies by `engine` instead of the process's shared one.
    #[must_use]
    pub fn with_engine(mut self, engine: Arc<CopyEngine>) -> Self {
        self.engine = Some(engine);
        self
    }
}

#[async_trait]
impl Transport for IpcTransport {
    type Config = IpcConfig;

    fn name(&self) -> TransportName {
        TransportName::Ipc
    }

    fn serves(&self) -> &'static [(MemoryKind, MemoryKind)] {
        SERVES
    }

    fn caps(&self, source: MemoryKind) -> Caps {
        let gpu = source == MemoryKind::Gpu;
        Caps {
            revocable: false,
            // A memfd is sealed; a GPU's descriptor is a write capability, whatever its importer promises.
            enforces_read_only: !gpu,
            source_can_throttle: false,
            // Both live until the last mapping goes.
            outlives_exporter: true,
            poisons_context: gpu,
            reports_death: true,
            closes_with_export: true,
        }
    }

    async fn probe(&self) -> Readiness {
        let config = self.config.clone();
        let probed = bounded("probe", "an answer", probe::DRIVER * 2, move || Ok(probe::probe(&config)));
        probed.await.unwrap_or_else(|e| probe::unavailable(&e))
    }

    async fn probe_pair(&self, peer: &Locator, into: &Location) -> Readiness {
        let (config, peer, into) = (self.config.clone(), peer.clone(), into.clone());
        let pair = move || Ok(probe::probe_pair(&config, &peer, &into));
        let probed = bounded("probe", "an answer of the driver", probe::DRIVER, pair);
        probed.await.unwrap_or_else(|e| probe::unavailable(&e))
    }

    async fn open(&self, config: IpcConfig) -> Result<Arc<dyn HandleExchange>> {
        let engine = match &self.engine {
            Some(engine) => Arc::clone(engine),
            None => CopyEngine::shared()?,
        };
        Ok(Arc::new(IpcExchange::open(&config, engine)?))
    }
}
