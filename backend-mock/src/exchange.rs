//! Export and import on the simulated network.

use crate::{Bug, MockArena, Network, mover::MockMover};
use async_trait::async_trait;
use flashboot_core::{
    Arena, Error, Export, HandleExchange, Kind, Locator, Mover, Result, ShardId, TransportName,
};
use std::{sync::Arc, time::Duration};
use tokio::time;

#[derive(Debug)]
pub(crate) struct Endpoint {
    pub(crate) network: Network,
    pub(crate) host: u32,
}

#[derive(Debug)]
struct MockExport {
    network: Network,
    locator: Locator,
}

impl Export for MockExport {
    fn locator(&self) -> &Locator {
        &self.locator
    }
}

impl Drop for MockExport {
    fn drop(&mut self) {
        self.network.unexport(self.locator.generation);
    }
}

/// Takes the concrete arena out of its trait object. The second handle shares the first one's memory.
fn mock(arena: Arc<dyn Arena>) -> Result<Arc<MockArena>> {
    let location = arena.location();
    let any: Arc<dyn std::any::Any + Send + Sync> = arena;
    any.downcast::<MockArena>().map_err(|_| {
        Error::new(
            Kind::Invalid,
            "mock",
            format!("the mock serves arenas of its own network, not {location:?}"),
        )
    })
}

#[async_trait]
impl HandleExchange for Endpoint {
    async fn export(&self, arena: Arc<dyn Arena>, _timeout: Duration) -> Result<Box<dyn Export>> {
        let arena = mock(arena)?;
        let generation = Locator::filling(arena.observe(ShardId(0)).generation)?;
        let locator = Locator::of(&*arena, generation, TransportName::Mock, format!("host {}", self.host));
        self.network.export(generation, arena);
        Ok(Box::new(MockExport { network: self.network.clone(), locator }))
    }

    async fn import(
        &self,
        locator: &Locator,
        into: Arc<dyn Arena>,
        timeout: Duration,
    ) -> Result<Box<dyn Mover>> {
        let into = mock(into)?;
        let refuse = |kind, detail: String| Err(Error::new(kind, "import", detail));
        if locator.transport != TransportName::Mock {
            return refuse(Kind::Mismatch, format!("a locator of {}", locator.transport));
        }
        let latency = self.network.0.config.latency;
        if timeout < latency {
            time::sleep(timeout).await;
            return refuse(Kind::Deadline, format!("no answer within {timeout:?}"));
        }
        time::sleep(latency).await;
        let Some(source) = self.network.exported(locator.generation) else {
            return refuse(Kind::SourceLost, format!("nobody exports generation {}", locator.generation));
        };
        let (payload, capacity, shards) = (source.payload(), source.capacity(), source.shards());
        if (payload, capacity, shards) != (locator.payload, locator.capacity, locator.shards)
            || (payload, shards) != (into.payload(), into.shards())
        {
            return refuse(
                Kind::Mismatch,
                format!(
                    "source of {payload} bytes and {shards} shards, locator of {} and {}, arena of {} and {}",
                    locator.payload,
                    locator.shards,
                    into.payload(),
                    into.shards()
                ),
            );
        }
        let holds = source.observe(ShardId(0)).generation;
        let blind = self.network.0.config.bug == Some(Bug::ReadsStaleGeneration);
        if holds != Some(locator.generation) && !blind {
            return refuse(Kind::StaleGeneration, format!("the arena holds {holds:?}"));
        }
        Ok(Box::new(MockMover::new(self.network.clone(), source, into, locator.generation)))
    }
}
