//! One endpoint on this host: exports arenas, imports locators.

use crate::{
    arena::{Served, check_locator},
    config::RdmaConfig,
    counters::Counts,
    dial::{Attachment, attach},
    endpoint::Endpoint,
    mover::RdmaMover,
    regions::Registration,
    registry::Offer,
    verbs::Verbs,
};
use async_trait::async_trait;
use flashboot_core::{
    Arena, Error, Export, HandleExchange, Kind, Locator, Mover, Result, ShardId, TransportName,
};
use flashboot_cuda::bounded;
use std::{
    sync::Arc,
    time::{Duration, Instant},
};

/// An `rdma` endpoint. Its devices, registrations and queue pairs are there until the exchange, its exports and its movers
/// are dropped.
#[derive(Debug)]
pub struct RdmaExchange {
    endpoint: Arc<Endpoint>,
}

impl RdmaExchange {
    pub(crate) fn open(verbs: &Arc<dyn Verbs>, config: &RdmaConfig) -> Result<Self> {
        Ok(Self { endpoint: Arc::new(Endpoint::open(verbs, config, true)?) })
    }

    pub(crate) fn endpoint(&self) -> &Arc<Endpoint> {
        &self.endpoint
    }

    /// What it has done.
    pub fn counts(&self) -> Counts {
        self.endpoint.counts()
    }

    /// Its devices, as people read them.
    pub fn rails(&self) -> Vec<String> {
        self.endpoint.parts().rails.iter().map(|rail| rail.describe()).collect()
    }
}

/// Registers `arena` if it is not, within `timeout`.
async fn registered(
    endpoint: &Arc<Endpoint>,
    arena: Served,
    op: &'static str,
    timeout: Duration,
) -> Result<Arc<Registration>> {
    let parts = Arc::clone(endpoint.parts());
    let work = move || parts.regions.of(&arena, &parts.rails, &parts.counters);
    bounded(op, "registering the arena", timeout, work).await
}

#[async_trait]
impl HandleExchange for RdmaExchange {
    async fn export(&self, arena: Arc<dyn Arena>, timeout: Duration) -> Result<Box<dyn Export>> {
        let served = Served::of(&arena, "rdma")?;
        let generation = Locator::filling(arena.observe(ShardId(0)).generation)?;
        let registration = registered(&self.endpoint, served.clone(), "export", timeout).await?;
        let locator =
            Locator::of(&*arena, generation, TransportName::Rdma, self.endpoint.address().to_owned());
        let offer = Offer { arena: served, registration };
        let id = self.endpoint.parts().registry.add(generation, offer);
        Ok(Box::new(RdmaExport { endpoint: Arc::clone(&self.endpoint), id, locator }))
    }

    /// As the trait says; needs a tokio runtime with its blocking threads and its timer.
    async fn import(
        &self,
        locator: &Locator,
        into: Arc<dyn Arena>,
        timeout: Duration,
    ) -> Result<Box<dyn Mover>> {
        let started = Instant::now();
        let served = Served::of(&into, "rdma")?;
        check_locator(locator, &into.location())?;
        locator.check_fits(&*into).map_err(|e| e.with_peer(&locator.endpoint))?;
        drop(into);
        let registration = registered(&self.endpoint, served.clone(), "import", timeout).await?;
        let left = timeout.saturating_sub(started.elapsed());
        let attachment = attached(&self.endpoint, locator, Some(Arc::clone(&registration)), left).await?;
        let endpoint = Arc::clone(&self.endpoint);
        Ok(Box::new(RdmaMover::new(endpoint, attachment, served, registration, locator)))
    }
}

/// [`attach`] on the endpoint's runtime, ended at its deadline.
pub(crate) async fn attached(
    endpoint: &Endpoint,
    locator: &Locator,
    registration: Option<Arc<Registration>>,
    timeout: Duration,
) -> Result<Attachment> {
    let (parts, peer) = (Arc::clone(endpoint.parts()), locator.endpoint.clone());
    let whole = tokio::time::timeout(timeout, attach(parts, locator.clone(), registration, timeout));
    let task = endpoint.runtime().spawn(async move {
        whole.await.unwrap_or_else(|_| {
            let detail = format!("the import took longer than {timeout:?}");
            Err(Error::new(Kind::Deadline, "import", detail).with_peer(peer))
        })
    });
    // A caller that goes away takes the attempt along.
    let task = Ends(task);
    task.join().await
}

struct Ends(tokio::task::JoinHandle<Result<Attachment>>);

impl Ends {
    async fn join(mut self) -> Result<Attachment> {
        match (&mut self.0).await {
            Ok(done) => done,
            Err(_) => Err(Error::new(Kind::Cancelled, "import", "the endpoint is closed")),
        }
    }
}

impl Drop for Ends {
    fn drop(&mut self) {
        self.0.abort();
    }
}

#[derive(Debug)]
struct RdmaExport {
    endpoint: Arc<Endpoint>,
    id: u64,
    locator: Locator,
}

impl Export for RdmaExport {
    fn locator(&self) -> &Locator {
        &self.locator
    }
}

impl Drop for RdmaExport {
    fn drop(&mut self) {
        self.endpoint.parts().registry.remove(self.id);
    }
}
