//! The transport by name.

use crate::{config::IpcConfig, exchange::IpcExchange, probe};
use async_trait::async_trait;
use flashboot_core::{
    Caps, Error, HandleExchange, Kind, Locator, MemoryKind, Readiness, Result, Transport, TransportName,
};
use flashboot_memory::CopyEngine;
use std::sync::Arc;

/// `ipc` between the host arenas of one host.
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

    fn caps(&self) -> Caps {
        Caps {
            revocable: false,
            enforces_read_only: true,
            source_can_throttle: false,
            outlives_exporter: true,
            poisons_context: false,
            sources: &[MemoryKind::Host],
            destinations: &[MemoryKind::Host],
        }
    }

    async fn probe(&self) -> Readiness {
        probe::probe(&self.config)
    }

    async fn probe_pair(&self, peer: &Locator) -> Readiness {
        let (config, peer) = (self.config.clone(), peer.clone());
        match tokio::task::spawn_blocking(move || probe::probe_pair(&config, &peer)).await {
            Ok(readiness) => readiness,
            Err(e) => probe::unavailable(&Error::new(Kind::Cancelled, "probe", e.to_string())),
        }
    }

    async fn open(&self, config: IpcConfig) -> Result<Arc<dyn HandleExchange>> {
        let engine = match &self.engine {
            Some(engine) => Arc::clone(engine),
            None => CopyEngine::shared()?,
        };
        Ok(Arc::new(IpcExchange::open(&config, engine)?))
    }
}
