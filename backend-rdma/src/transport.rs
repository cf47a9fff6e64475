//! The transport by name.

use crate::{
    config::RdmaConfig,
    endpoint::Endpoint,
    exchange::RdmaExchange,
    probe,
    verbs::{Library, Verbs},
};
use async_trait::async_trait;
use flashboot_core::{
    Caps, HandleExchange, Location, Locator, MemoryKind, Readiness, Result, Transport, TransportName,
};
use flashboot_cuda::bounded;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// Source and destination: a NIC reads and writes either.
pub(crate) const SERVES: &[(MemoryKind, MemoryKind)] = &[
    (MemoryKind::Host, MemoryKind::Host),
    (MemoryKind::Host, MemoryKind::Gpu),
    (MemoryKind::Gpu, MemoryKind::Host),
    (MemoryKind::Gpu, MemoryKind::Gpu),
];

/// `rdma` between hosts, or the processes of one.
#[derive(Debug, Clone, Default)]
pub struct RdmaTransport {
    config: RdmaConfig,
    /// The endpoint that was opened last: pairs are probed through it instead of opening the devices again.
    opened: Arc<Mutex<Weak<Endpoint>>>,
}

fn library() -> Result<Arc<dyn Verbs>> {
    Ok(Library::shared()?)
}

impl RdmaTransport {
    /// What probes look at (the devices, the port, the GID) is `config`'s.
    pub fn new(config: RdmaConfig) -> Self {
        Self { config, opened: Arc::default() }
    }

    /// The devices that an endpoint would use, each with its port, MTU, GID and traffic class, as people read them. Opens
    /// them; blocks for as long as the driver needs.
    ///
    /// # Errors
    /// Why none can be used.
    pub fn devices(&self) -> Result<Vec<String>> {
        probe::devices(&library()?, &self.config)
    }

    /// An endpoint whose counters can be read.
    ///
    /// # Errors
    /// As [`Transport::open`].
    pub async fn open_counted(&self, config: RdmaConfig) -> Result<Arc<RdmaExchange>> {
        let work = move || Ok(Arc::new(RdmaExchange::open(&library()?, &config)?));
        let exchange = bounded("open", "the driver", probe::DRIVER, work).await?;
        *self.opened.lock().unwrap_or_else(PoisonError::into_inner) = Arc::downgrade(exchange.endpoint());
        Ok(exchange)
    }

    async fn prober(&self) -> Result<Arc<Endpoint>> {
        let opened = self.opened.lock().unwrap_or_else(PoisonError::into_inner).upgrade();
        if let Some(endpoint) = opened {
            return Ok(endpoint);
        }
        let config = self.config.clone();
        let work = move || Endpoint::open(&library()?, &config, false).map(Arc::new);
        bounded("probe", "the driver", probe::DRIVER, work).await
    }
}

#[async_trait]
impl Transport for RdmaTransport {
    type Config = RdmaConfig;

    fn name(&self) -> TransportName {
        TransportName::Rdma
    }

    fn serves(&self) -> &'static [(MemoryKind, MemoryKind)] {
        SERVES
    }

    fn caps(&self, _: MemoryKind) -> Caps {
        Caps {
            // A queue pair could be ended; nothing asks for it yet.
            revocable: false,
            // Peers get keys that the NIC takes for READs only.
            enforces_read_only: true,
            source_can_throttle: false,
            // Queue pairs and registrations go with their process.
            outlives_exporter: false,
            poisons_context: false,
            // By the control connection, and by a READ that is not answered.
            reports_death: true,
            closes_with_export: true,
        }
    }

    async fn probe(&self) -> Readiness {
        let transport = self.clone();
        let probed = bounded("probe", "the driver", probe::DRIVER, move || transport.devices()).await;
        probed.map_or_else(|e| probe::unavailable(&e), |_| Readiness::Ready)
    }

    async fn probe_pair(&self, peer: &Locator, into: &Location) -> Readiness {
        let outcome = match self.prober().await {
            Ok(endpoint) => {
                let probed = probe::pair(&endpoint, peer, into).await;
                // Closing one waits for its threads.
                let _ = tokio::task::spawn_blocking(move || drop(endpoint)).await;
                probed
            }
            Err(e) => Err(e),
        };
        outcome.map_or_else(|e| probe::unavailable(&e), |()| Readiness::Ready)
    }

    async fn open(&self, config: RdmaConfig) -> Result<Arc<dyn HandleExchange>> {
        Ok(self.open_counted(config).await?)
    }
}
