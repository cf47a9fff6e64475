//! One endpoint: exports arenas, imports locators of any host.

use crate::{
    arena::{Served, check_locator},
    config::TcpConfig,
    dial::Route,
    endpoint::Endpoint,
    mover::TcpMover,
    runtime,
    wire::Lane,
};
use async_trait::async_trait;
use flashboot_channel::Security;
use flashboot_core::{
    Arena, Error, Export, HandleExchange, Kind, Locator, Mover, Result, ShardId, TransportName,
};
use std::{sync::Arc, time::Duration};
use tokio::{
    task::JoinSet,
    time::{Instant, timeout as within},
};

/// A `tcp` endpoint. It listens until the exchange and every export of it are dropped; readers that are attached then are
/// told that their source has gone.
#[derive(Debug)]
pub struct TcpExchange {
    endpoint: Arc<Endpoint>,
    config: TcpConfig,
    security: Security,
}

impl TcpExchange {
    pub(crate) async fn open(config: TcpConfig) -> Result<Self> {
        config.check()?;
        let (ours, theirs) = (config.clone(), config.security.clone());
        let opened = runtime::run("open", async move {
            let security = Security::load(&theirs)?;
            let endpoint = Endpoint::open(ours, security.clone()).await?;
            Ok((endpoint, security))
        });
        let (endpoint, security) = opened.await?;
        tracing::debug!(endpoint = endpoint.text(), "opened a tcp endpoint");
        Ok(Self { endpoint: Arc::new(endpoint), config, security })
    }

    /// Where it listens, as locators carry it.
    pub fn endpoint(&self) -> &str {
        self.endpoint.text()
    }
}

#[async_trait]
impl HandleExchange for TcpExchange {
    /// Waits for nothing but a GPU's driver.
    async fn export(&self, arena: Arc<dyn Arena>, timeout: Duration) -> Result<Box<dyn Export>> {
        let served = Served::of(&arena, "tcp")?;
        let look = Arc::clone(&arena);
        let looked = flashboot_cuda::bounded("export", "the arena's filling", timeout, move || {
            Ok(look.observe(ShardId(0)).generation)
        });
        let generation = match &served {
            Served::Host(_) => arena.observe(ShardId(0)).generation,
            Served::Gpu(_) => looked.await?,
        };
        let generation = Locator::filling(generation)?;
        let locator = Locator::of(&*arena, generation, TransportName::Tcp, self.endpoint.text().to_owned());
        let id = self.endpoint.registry().add(generation, served);
        Ok(Box::new(TcpExport { endpoint: Arc::clone(&self.endpoint), id, locator }))
    }

    async fn import(
        &self,
        locator: &Locator,
        into: Arc<dyn Arena>,
        timeout: Duration,
    ) -> Result<Box<dyn Mover>> {
        let served = Served::of(&into, "tcp")?;
        check_locator(locator, &into.location())?;
        locator.check_fits(&*into).map_err(|e| e.with_peer(&locator.endpoint))?;
        drop(into);
        let route = Route::new(Arc::new(locator.clone()), &self.config, &self.security, timeout)?;
        let (peer, config) = (route.peer(), self.config.clone());
        let imported = runtime::run("import", async move {
            // All at once: what a connection costs is round trips.
            let reading = async {
                let mut dialling = JoinSet::new();
                for _ in 0..config.connections {
                    let route = route.clone();
                    dialling.spawn(async move { route.attach(Lane::Read).await?.into_blocking() });
                }
                let mut lanes = Vec::new();
                while let Some(dialled) = dialling.join_next().await {
                    lanes.push(dialled.map_err(|e| Error::new(Kind::Cancelled, "import", e.to_string()))??);
                }
                Ok::<_, Error>(lanes)
            };
            let asked = Instant::now();
            // The watch's connection is begun first.
            let (watch, lanes) = tokio::try_join!(biased; route.attach(Lane::Watch), reading)?;
            let start = move || TcpMover::start((watch, asked), lanes, served, &route, config.silence);
            let started = tokio::task::spawn_blocking(start).await;
            started.map_err(|e| Error::new(Kind::Cancelled, "import", e.to_string()))?
        });
        let mover = match within(timeout, imported).await {
            Ok(imported) => imported?,
            Err(_) => {
                let detail = format!("attaching took longer than {timeout:?}");
                return Err(Error::new(Kind::Deadline, "import", detail).with_peer(peer));
            }
        };
        // The source answered for this filling while attaching; a look at its word is the first thing that a driver does.
        Ok(Box::new(mover))
    }
}

#[derive(Debug)]
struct TcpExport {
    // Keeps the port while readers are wanted.
    endpoint: Arc<Endpoint>,
    id: u64,
    locator: Locator,
}

impl Export for TcpExport {
    fn locator(&self) -> &Locator {
        &self.locator
    }
}

impl Drop for TcpExport {
    fn drop(&mut self) {
        self.endpoint.registry().remove(self.id);
    }
}
