//! The arenas that `ipc` serves, and what a reader is given of one.

use crate::transport::SERVES;
use flashboot_core::{
    Arena, ArenaSpec, Error, Kind, Location, Locator, MemoryKind, Result, TransportName, check_served,
};
use flashboot_cuda::CudaArena;
use flashboot_memory::{HostArena, HostArenaConfig, PageKind, boot_id};
use std::{
    any::Any,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
};

/// An arena by what it is made of.
#[derive(Debug, Clone)]
pub(crate) enum Served {
    Host(Arc<HostArena>),
    Gpu(Arc<CudaArena>),
}

impl Served {
    /// `arena` as what it is, or which arenas `ipc` serves.
    pub(crate) fn of(arena: &Arc<dyn Arena>) -> Result<Self> {
        let any: Arc<dyn Any + Send + Sync> = Arc::clone(arena) as _;
        if let Ok(host) = any.downcast() {
            return Ok(Self::Host(host));
        }
        CudaArena::from_arena(arena).map(Self::Gpu).ok_or_else(|| {
            Error::new(
                Kind::Invalid,
                "ipc",
                format!(
                    "{arena:?} is neither a host arena of flashboot-memory nor a GPU arena of flashboot-cuda"
                ),
            )
            .with_remedy("allow another transport for this arena")
        })
    }

    /// What a reader is to have of it. Calls the driver for a GPU arena.
    pub(crate) fn offer(self) -> Result<Offer> {
        Ok(match self {
            Self::Host(arena) => Offer::Host(arena),
            Self::Gpu(arena) => {
                let descriptor = arena.export_fd()?;
                let words = host_words(&arena)
                    .inspect_err(|error| tracing::warn!(%error, "readers look at the words through the GPU"))
                    .ok();
                Offer::Gpu { arena, descriptor, words }
            }
        })
    }
}

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
