//! One endpoint on this host: exports host arenas, imports locators of other processes.

use crate::{
    config::{IpcConfig, Policy},
    dial::{Dialled, dial},
    endpoint::Endpoint,
    mover::IpcMover,
};
use async_trait::async_trait;
use flashboot_core::{
    Arena, Error, Export, HandleExchange, Kind, Location, Locator, Mover, Result, ShardId, TransportName,
};
use flashboot_memory::{CopyEngine, HostArena, boot_id};
use std::{
    any::Any,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

/// Beyond any real arena; it keeps a caller's endless timeout within the clock's range.
const LONGEST_POPULATE: Duration = Duration::from_secs(3600);

/// An `ipc` endpoint. Its socket is there until the exchange and every export of it are dropped.
#[derive(Debug)]
pub struct IpcExchange {
    endpoint: Arc<Endpoint>,
    policy: Policy,
    populate: bool,
    engine: Arc<CopyEngine>,
}

impl IpcExchange {
    pub(crate) fn open(config: &IpcConfig, engine: Arc<CopyEngine>) -> Result<Self> {
        Ok(Self {
            endpoint: Arc::new(Endpoint::open(config)?),
            policy: config.policy(),
            populate: config.populate,
            engine,
        })
    }

    /// The socket's path, as locators carry it.
    pub fn socket(&self) -> &Path {
        Path::new(self.endpoint.path())
    }
}

/// The host arena behind `arena`, or which arenas `ipc` serves.
pub(crate) fn host(arena: &dyn Arena) -> Result<&HostArena> {
    let any: &dyn Any = arena;
    any.downcast_ref::<HostArena>().ok_or_else(|| {
        Error::new(
            Kind::Invalid,
            "ipc",
            format!("{arena:?} is no host arena, and ipc serves those of flashboot-memory only"),
        )
        .with_remedy("allow another transport for this arena")
    })
}

/// Refuses a locator that this host cannot follow.
pub(crate) fn check_locator(locator: &Locator) -> Result<()> {
    if locator.transport != TransportName::Ipc {
        return Err(Error::new(
            Kind::Mismatch,
            "import",
            format!("the locator is of the transport {}, not ipc", locator.transport),
        ));
    }
    let Location::Host { boot_id: theirs, .. } = &locator.location else {
        return Err(Error::new(Kind::Mismatch, "import", "the locator names no host memory"));
    };
    let ours = boot_id()?;
    if *theirs != ours {
        return Err(Error::new(
            Kind::Unavailable,
            "import",
            format!("the exporter is on another host or of another boot ({theirs}, ours is {ours})"),
        )
        .with_peer(&locator.endpoint)
        .with_remedy("use rdma or tcp between hosts; after a reboot fetch a fresh locator"));
    }
    Ok(())
}

#[async_trait]
impl HandleExchange for IpcExchange {
    async fn export(&self, arena: Arc<dyn Arena>, _timeout: Duration) -> Result<Box<dyn Export>> {
        // Nothing here waits: the responder finds the export when a reader asks.
        host(&*arena)?;
        let Some(generation) = arena.observe(ShardId(0)).generation else {
            return Err(Error::new(Kind::Invalid, "export", "the arena is retired: it holds no filling")
                .with_remedy("begin a generation first"));
        };
        let locator = Locator {
            transport: TransportName::Ipc,
            generation,
            payload: arena.payload(),
            capacity: arena.capacity(),
            shards: arena.shards(),
            location: arena.location(),
            endpoint: self.endpoint.path().to_owned(),
        };
        let id = self.endpoint.registry().add(generation, arena);
        Ok(Box::new(IpcExport { endpoint: Arc::clone(&self.endpoint), id, locator }))
    }

    /// As the trait says; needs a tokio runtime with its blocking threads and, for
    /// [`observe`](Mover::observe), its timer.
    async fn import(
        &self,
        locator: &Locator,
        into: Arc<dyn Arena>,
        timeout: Duration,
    ) -> Result<Box<dyn Mover>> {
        let started = Instant::now();
        check_locator(locator)?;
        host(&*into)?;
        let (theirs, ours) = ((locator.payload, locator.shards), (into.payload(), into.shards()));
        if theirs != ours {
            return Err(Error::new(
                Kind::Mismatch,
                "import",
                format!(
                    "the peer has {} bytes in {} shards, the arena to fill {} in {}",
                    theirs.0, theirs.1, ours.0, ours.1
                ),
            )
            .with_peer(&locator.endpoint));
        }
        let dialled = self.attach(locator.clone(), started, timeout).await?;
        let Dialled { connection, arena } = dialled;
        let mover = IpcMover::new(connection, arena, into, locator, Arc::clone(&self.engine));
        mover.check_generation()?;
        Ok(Box::new(mover))
    }
}

impl IpcExchange {
    async fn attach(&self, locator: Locator, started: Instant, timeout: Duration) -> Result<Dialled> {
        let (policy, populate) = (self.policy.clone(), self.populate);
        // Blocking, but never past its deadline; a caller that goes away leaves it to end there.
        let task = tokio::task::spawn_blocking(move || {
            let dialled = dial(&locator, &policy, started, timeout)?;
            if populate {
                let left = timeout.saturating_sub(started.elapsed()).min(LONGEST_POPULATE);
                dialled.arena.populate(Instant::now() + left / 2);
            }
            Ok(dialled)
        });
        task.await
            .map_err(|e| Error::new(Kind::Cancelled, "import", format!("the runtime is ending: {e}")))?
    }
}

#[derive(Debug)]
struct IpcExport {
    // Keeps the socket while readers are wanted.
    endpoint: Arc<Endpoint>,
    id: u64,
    locator: Locator,
}

impl Export for IpcExport {
    fn locator(&self) -> &Locator {
        &self.locator
    }
}

impl Drop for IpcExport {
    fn drop(&mut self) {
        self.endpoint.registry().remove(self.id);
    }
}
