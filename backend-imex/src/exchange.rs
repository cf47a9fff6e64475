//! Exports GPU arenas as fabric handles, imports those of peers. Nothing runs between the two.

use crate::{error, handle, transport::SERVES};
use async_trait::async_trait;
use flashboot_core::{
    Arena, Error, Export, HandleExchange, Kind, Location, Locator, Mover, Result, ShardId, TransportName,
    check_served,
};
use flashboot_cuda::{Context, CudaArena, CudaMover, Import, MoverConfig, NotKnown, bounded};
use std::{sync::Arc, time::Duration};

/// An `imex` endpoint. It holds nothing.
#[derive(Debug, Default)]
pub struct ImexExchange(());

/// The GPU arena behind `arena`, or which arenas `imex` serves.
fn gpu(arena: &Arc<dyn Arena>) -> Result<Arc<CudaArena>> {
    CudaArena::from_arena(arena).ok_or_else(|| {
        let detail = format!("{arena:?} is no GPU arena, and imex serves those of flashboot-cuda only");
        Error::new(Kind::Invalid, "imex", detail).with_remedy("allow another transport for this arena")
    })
}

/// Refuses a locator that memory at `into` cannot be filled from by `imex`.
pub(crate) fn check_locator(locator: &Locator, into: &Location) -> Result<()> {
    if locator.transport != TransportName::Imex {
        let detail = format!("the locator is of the transport {}, not imex", locator.transport);
        return Err(Error::new(Kind::Mismatch, "import", detail));
    }
    check_served(TransportName::Imex, SERVES, (locator.location.memory(), into.memory()))
}

/// Maps the memory that `locator` carries the handle of. Blocks.
pub(crate) fn map(context: &Context, locator: &Locator) -> Result<Import> {
    let handle = handle::decode(locator)?;
    Import::from_fabric(context, &handle, locator).map_err(error::import)
}

/// How errors call a peer that has no address: by its GPU.
fn peer(locator: &Locator) -> String {
    match &locator.location {
        Location::Gpu { uuid, .. } => uuid.clone(),
        other => other.memory().to_string(),
    }
}

#[async_trait]
impl HandleExchange for ImexExchange {
    async fn export(&self, arena: Arc<dyn Arena>, timeout: Duration) -> Result<Box<dyn Export>> {
        let exported = gpu(&arena)?;
        let generation = Locator::filling(arena.observe(ShardId(0)).generation)?;
        let handle =
            bounded("export", "the driver's handle", timeout, move || exported.export_fabric()).await?;
        let locator = Locator::of(&*arena, generation, TransportName::Imex, handle::encode(&handle));
        Ok(Box::new(ImexExport { locator, _arena: arena }))
    }

    /// As the trait says; needs a tokio runtime with its blocking threads and its timer. A driver that does not answer
    /// in time is left alone with what it does.
    async fn import(
        &self,
        locator: &Locator,
        into: Arc<dyn Arena>,
        timeout: Duration,
    ) -> Result<Box<dyn Mover>> {
        let arena = gpu(&into)?;
        check_locator(locator, &into.location())?;
        locator.check_fits(&*into)?;
        drop(into);
        let locator = locator.clone();
        let peer = peer(&locator);
        let mapped = bounded("import", "mapping the peer's memory", timeout, move || {
            let import = map(arena.context(), &locator)?;
            CudaMover::open(import, arena, Arc::new(NotKnown), MoverConfig::default())
        });
        Ok(Box::new(mapped.await.map_err(|e| e.with_peer(peer))?))
    }
}

/// Keeps the arena; there is nothing else to keep.
#[derive(Debug)]
struct ImexExport {
    locator: Locator,
    _arena: Arc<dyn Arena>,
}

impl Export for ImexExport {
    fn locator(&self) -> &Locator {
        &self.locator
    }
}
