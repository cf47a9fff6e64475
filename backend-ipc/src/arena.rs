//! The arenas that `ipc` serves, and what a reader is given of one.

use crate::transport::SERVES;
use flashboot_core::{
    Arena, ArenaSpec, Error, Kind, Location, Locator, MemoryKind, Result, TransportName, check_served,
};
use flashboot_cuda::CudaArena;
pub(crate) use flashboot_cuda::Served;
use flashboot_memory::{HostArena, HostArenaConfig, PageKind, boot_id};
use std::{
    any::Any,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
};

/// The words of a GPU arena in a sealed memfd, made once an arena.
fn host_words(arena: &CudaArena) -> Result<Arc<HostArena>> {
    let spec = ArenaSpec { payload: 0, shards: arena.shards() };
    let config = HostArenaConfig { pages: PageKind::Base, ..HostArenaConfig::default() };
    let words = arena.host_words(|| Ok(HostArena::create(spec, &config)?.0 as Arc<dyn Arena>))?;
    let any: Arc<dyn Any + Send + Sync> = words as _;
    any.downcast()
        .map_err(|_| Error::new(Kind::Invalid, "ipc", "the arena's words are kept by another transport"))
}

/// An exported arena with its descriptors, which any number of readers get copies of.
#[derive(Debug)]
pub(crate) enum Offer {
    Host(Arc<HostArena>),
    Gpu { arena: Arc<CudaArena>, descriptor: OwnedFd, words: Option<Arc<HostArena>> },
}

impl Offer {
    /// What a reader is to have of an arena. Calls the driver for a GPU arena.
    pub(crate) fn of(served: Served) -> Result<Self> {
        Ok(match served {
            Served::Host(arena) => Self::Host(arena),
            Served::Gpu(arena) => {
                let descriptor = arena.export_fd()?;
                let words = host_words(&arena)
                    .inspect_err(|error| tracing::warn!(%error, "readers look at the words through the GPU"))
                    .ok();
                Self::Gpu { arena, descriptor, words }
            }
        })
    }

    pub(crate) fn arena(&self) -> Arc<dyn Arena> {
        match self {
            Self::Host(arena) => Arc::clone(arena) as _,
            Self::Gpu { arena, .. } => Arc::clone(arena) as _,
        }
    }

    pub(crate) fn memory(&self) -> MemoryKind {
        match self {
            Self::Host(_) => MemoryKind::Host,
            Self::Gpu { .. } => MemoryKind::Gpu,
        }
    }

    /// What a reader gets: the memory, and of a GPU arena also the memfd of its words.
    pub(crate) fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        match self {
            Self::Host(arena) => vec![arena.as_fd()],
            Self::Gpu { descriptor, words, .. } => {
                let words = words.as_deref().map(AsFd::as_fd);
                std::iter::once(descriptor.as_fd()).chain(words).collect()
            }
        }
    }
}

/// Refuses a locator that memory of this host at `into` cannot follow.
pub(crate) fn check_locator(locator: &Locator, into: &Location) -> Result<()> {
    if locator.transport != TransportName::Ipc {
        return Err(Error::new(
            Kind::Mismatch,
            "import",
            format!("the locator is of the transport {}, not ipc", locator.transport),
        ));
    }
    check_served(TransportName::Ipc, SERVES, (locator.location.memory(), into.memory()))?;
    let (Location::Host { boot_id: theirs, .. } | Location::Gpu { boot_id: theirs, .. }) = &locator.location
    else {
        return Err(Error::new(Kind::Mismatch, "import", "the locator names no memory of a host"));
    };
    let ours = boot_id()?;
    if *theirs != ours {
        return Err(Error::new(
            Kind::Unavailable,
            "import",
            format!("the exporter is on another host or of another boot ({theirs}, ours is {ours})"),
        )
        .with_peer(&locator.endpoint)
        .with_remedy("use imex, rdma or tcp between hosts; after a reboot fetch a fresh locator"));
    }
    Ok(())
}
