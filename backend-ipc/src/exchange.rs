//! One endpoint on this host: exports arenas, imports locators of other processes.

use crate::{
    arena::{Offer, Served, check_locator},
    config::IpcConfig,
    connection::GpuSource,
    dial::{Clock, Dialled, dial},
    endpoint::Endpoint,
    mover::IpcMover,
};
use async_trait::async_trait;
use flashboot_channel::local::Policy;
use flashboot_core::{
    Arena, Error, Export, HandleExchange, Kind, Locator, Mover, Result, ShardId, TransportName,
};
use flashboot_cuda::{Context, CudaArena, CudaMover, Import, MoverConfig, bounded};
use flashboot_memory::{CopyEngine, Expected, HostArena, ImportedArena};
use std::{
    os::fd::{AsFd as _, OwnedFd},
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

#[async_trait]
impl HandleExchange for IpcExchange {
    async fn export(&self, arena: Arc<dyn Arena>, timeout: Duration) -> Result<Box<dyn Export>> {
        let served = Served::of(&arena, "ipc")?;
        let generation = Locator::filling(arena.observe(ShardId(0)).generation)?;
        // For host memory nothing here waits: the responder finds the export when a reader asks.
        let offer = match served {
            Served::Host(_) => Offer::of(served)?,
            Served::Gpu(_) => {
                bounded("export", "the driver's handle", timeout, move || Offer::of(served)).await?
            }
        };
        let locator = Locator::of(&*arena, generation, TransportName::Ipc, self.endpoint.path().to_owned());
        let id = self.endpoint.registry().add(generation, offer);
        Ok(Box::new(IpcExport { endpoint: Arc::clone(&self.endpoint), id, locator }))
    }

    /// As the trait says; needs a tokio runtime with its blocking threads and its timer.
    async fn import(
        &self,
        locator: &Locator,
        into: Arc<dyn Arena>,
        timeout: Duration,
    ) -> Result<Box<dyn Mover>> {
        let started = Instant::now();
        let served = Served::of(&into, "ipc")?;
        check_locator(locator, &into.location())?;
        locator.check_fits(&*into).map_err(|e| e.with_peer(&locator.endpoint))?;
        drop(into);
        match served {
            Served::Host(into) => self.import_host(locator.clone(), into, started, timeout).await,
            Served::Gpu(into) => self.import_gpu(locator.clone(), into, started, timeout).await,
        }
    }
}

impl IpcExchange {
    async fn import_host(
        &self,
        locator: Locator,
        into: Arc<HostArena>,
        started: Instant,
        timeout: Duration,
    ) -> Result<Box<dyn Mover>> {
        let (policy, populate, engine) = (self.policy.clone(), self.populate, Arc::clone(&self.engine));
        // Blocking, but never past its deadline; a caller that goes away leaves it to end there.
        let task = tokio::task::spawn_blocking(move || {
            let clock = Clock::new(started, timeout, &locator.endpoint);
            let Dialled { connection, descriptor, words: _ } = dial(&locator, &policy, clock)?;
            let arena = map_host(descriptor, &locator)?;
            let left = clock.left("mapping")?.min(LONGEST_POPULATE);
            if populate {
                arena.populate(Instant::now() + left / 2);
            }
            let mover = IpcMover::new(connection, arena, into, locator.generation, engine);
            mover.check_generation()?;
            Ok(Box::new(mover) as Box<dyn Mover>)
        });
        task.await
            .map_err(|e| Error::new(Kind::Cancelled, "import", format!("the runtime is ending: {e}")))?
    }

    /// The driver is asked on a thread of its own, and left alone with what it does past the deadline.
    async fn import_gpu(
        &self,
        locator: Locator,
        into: Arc<CudaArena>,
        started: Instant,
        timeout: Duration,
    ) -> Result<Box<dyn Mover>> {
        let (policy, peer) = (self.policy.clone(), locator.endpoint.clone());
        let mapped = bounded("import", "mapping the peer's memory", timeout, move || {
            let clock = Clock::new(started, timeout, &locator.endpoint);
            let dialled = dial(&locator, &policy, clock)?;
            let import = map_gpu(into.context(), &dialled, &locator)?;
            clock.left("mapping")?;
            let words = dialled.words.map(|words| map_words(words, &locator)).transpose()?;
            let alive = Arc::new(GpuSource::new(dialled.connection, words));
            let mover = CudaMover::open(import, into, alive, MoverConfig::default())?;
            Ok(Box::new(mover) as Box<dyn Mover>)
        });
        mapped.await.map_err(|e| e.with_peer(peer))
    }
}

/// Maps a peer's memfd read-only, after checking its seals and its length.
pub(crate) fn map_host(descriptor: OwnedFd, locator: &Locator) -> Result<ImportedArena> {
    let Locator { payload, capacity, shards, .. } = *locator;
    ImportedArena::map(descriptor, Expected { payload, capacity, shards })
        .map_err(|e| e.with_peer(&locator.endpoint))
}

/// Maps the words of a peer's GPU arena: a memfd like a host arena's, without payload.
fn map_words(descriptor: OwnedFd, locator: &Locator) -> Result<ImportedArena> {
    let refuse = |e: Error| e.with_peer(&locator.endpoint);
    let size = rustix::fs::fstat(&descriptor).map_err(|errno| {
        refuse(crate::error::failed("fstat", errno, "reading the size of the peer's words"))
    })?;
    let capacity = u64::try_from(size.st_size).unwrap_or(0);
    let expected = Expected { payload: 0, capacity, shards: locator.shards };
    let words = ImportedArena::map(descriptor, expected).map_err(refuse)?;
    let found = words.observe(ShardId(0)).generation;
    if found == Some(locator.generation) {
        return Ok(words);
    }
    let found = found.map_or_else(|| "nothing".to_owned(), |generation| generation.to_string());
    let detail = format!("the peer's words are of {found}, its locator names {}", locator.generation);
    Err(refuse(Error::new(Kind::StaleGeneration, "import", detail)))
}

/// Maps a peer's GPU memory read-only on our own GPU.
pub(crate) fn map_gpu(context: &Context, dialled: &Dialled, locator: &Locator) -> Result<Import> {
    Import::from_fd(context, dialled.descriptor.as_fd(), locator).map_err(|e| e.with_peer(&locator.endpoint))
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

#[cfg(test)]
mod tests {
    use super::*;
    use flashboot_core::{ArenaSpec, Generation, Location};
    use flashboot_memory::HostArenaConfig;
    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

    fn words(shards: u32) -> Arc<HostArena> {
        let spec = ArenaSpec { payload: 0, shards };
        HostArena::create(spec, &HostArenaConfig::default()).unwrap().0
    }

    fn memfd(size: u64, seals: SealFlags) -> OwnedFd {
        let fd = memfd_create("words", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&fd, size).unwrap();
        fcntl_add_seals(&fd, seals).unwrap();
        fd
    }

    #[test]
    fn words_of_a_peer_are_taken_only_sealed_whole_and_of_the_locators_filling() {
        let generation = Generation::from_random(7);
        let locator = Locator {
            transport: TransportName::Ipc,
            generation,
            payload: 1 << 30,
            capacity: 2 << 30,
            shards: 2,
            location: Location::Gpu { boot_id: "here".into(), uuid: "GPU-0".into() },
            endpoint: "/the/socket".into(),
        };
        let map = |fd: OwnedFd| map_words(fd, &locator);
        let of = |words: &HostArena| map(words.as_fd().try_clone_to_owned().unwrap());
        let right = words(2);
        assert_eq!(of(&right).unwrap_err().kind(), Kind::StaleGeneration, "retired");
        right.begin(Generation::from_random(8));
        assert_eq!(of(&right).unwrap_err().kind(), Kind::StaleGeneration, "another filling's");
        right.begin(generation);
        let mapped = of(&right).unwrap();
        right.publish(ShardId(1), 5 << 20).unwrap();
        assert_eq!(mapped.observe(ShardId(1)).progress, 5 << 20);
        right.retire();
        assert_eq!(mapped.observe(ShardId(1)).generation, None);

        let other = words(3);
        other.begin(generation);
        assert_eq!(of(&other).unwrap_err().kind(), Kind::Mismatch, "of another number of shards");
        let all = SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE;
        for seal in [SealFlags::SHRINK, SealFlags::GROW, SealFlags::FUTURE_WRITE] {
            assert_eq!(map(memfd(1 << 16, all - seal)).unwrap_err().kind(), Kind::Permission, "{seal:?}");
        }
        assert_eq!(map(memfd(1 << 16, all)).unwrap_err().kind(), Kind::Corrupt, "no words in it");
        for size in [0, 8] {
            assert_eq!(map(memfd(size, all)).unwrap_err().kind(), Kind::Mismatch, "{size} bytes");
        }
        let (pipe, _other) = std::io::pipe().unwrap();
        let refused = map(pipe.into()).unwrap_err();
        assert_eq!((refused.kind(), refused.peer()), (Kind::Permission, Some("/the/socket")));
    }
}
