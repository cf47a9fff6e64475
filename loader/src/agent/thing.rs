//! One arena of the agent's, from the ask for it until it is given up: its file, its memory, and how filling it ended.

use super::ledger::{Id, Key};
use crate::{
    io::SourceFile,
    pipeline::{Filling, Pins},
    source::ObjectSource,
};
use flashboot_core::{Arena, Digests, Error, Generation, Kind, Result};
use flashboot_cuda::Context;
use flashboot_memory::HostArena;
use std::{
    any::Any,
    sync::{Arc, Condvar, Mutex, OnceLock, PoisonError, atomic::AtomicBool},
    time::{Duration, Instant},
};

/// One arena, from the ask for it on.
#[derive(Debug)]
pub(super) struct Thing {
    pub(super) id: Id,
    pub(super) key: Key,
    pub(super) digests: Arc<Digests>,
    /// What proves it to who has the image's id alone.
    pub(super) manifest: Arc<[u8]>,
    /// Where it comes from, until it is filled.
    pub(super) origin: Mutex<Option<Origin>>,
    /// It was given up: whoever fills it stops.
    pub(super) cancel: AtomicBool,
    pub(super) filling: OnceLock<Arc<Filling>>,
    /// Set once it is verified.
    pub(super) kept: OnceLock<Kept>,
    pins: Mutex<Option<Arc<Pins>>>,
    outcome: Mutex<Option<Result<()>>>,
    decided: Condvar,
}

/// What proves an arena's bytes, and the bytes that prove that.
pub(super) type Proof = (Arc<Digests>, Arc<[u8]>);

/// Where a payload comes from.
#[derive(Debug)]
pub(super) enum Origin {
    /// A file that its sender may read.
    File(SourceFile),
    /// An object.
    Object(Box<ObjectSource>),
}

/// Memory that is full and verified.
#[derive(Debug, Clone)]
pub(super) struct Kept {
    pub(super) arena: Arc<dyn Arena>,
    pub(super) generation: Generation,
}

/// `arena` as the host's.
pub(super) fn host(arena: &Arc<dyn Arena>) -> Result<Arc<HostArena>> {
    let any: Arc<dyn Any + Send + Sync> = Arc::clone(arena) as _;
    any.downcast().map_err(|_| Error::new(Kind::Invalid, "agent", "the arena is not in host memory"))
}

impl Thing {
    pub(super) fn new(id: Id, key: Key, (digests, manifest): Proof, origin: Origin) -> Self {
        Self {
            id,
            key,
            digests,
            manifest,
            origin: Mutex::new(Some(origin)),
            cancel: AtomicBool::new(false),
            filling: OnceLock::new(),
            kept: OnceLock::new(),
            pins: Mutex::default(),
            outcome: Mutex::default(),
            decided: Condvar::new(),
        }
    }

    /// What of the host's memory is pinned for pushes of it, pinned now where it is not.
    pub(super) fn pins(&self, context: &Context) -> Result<(Arc<Pins>, Duration)> {
        let began = Instant::now();
        let mut pins = self.pins.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(pins) = &*pins {
            return Ok((Arc::clone(pins), Duration::ZERO));
        }
        let kept = self.kept.get().ok_or_else(|| Error::new(Kind::Unavailable, "push", "it is not ready"))?;
        let arena = host(&kept.arena)?;
        let made = pins.insert(Arc::new(Pins::new(context, &arena)?));
        Ok((Arc::clone(made), began.elapsed()))
    }

    /// Bytes pinned for pushes.
    pub(super) fn pinned(&self) -> Option<u64> {
        // One that is being pinned has its lock taken for long.
        let pins = self.pins.try_lock().ok()?;
        Some(pins.as_ref()?.bytes())
    }

    /// Says how it ended, once: what comes later changes nothing.
    pub(super) fn decide(&self, outcome: Result<()>) {
        let mut decided = self.outcome.lock().unwrap_or_else(PoisonError::into_inner);
        decided.get_or_insert(outcome);
        drop(decided);
        self.decided.notify_all();
    }

    /// How it ended, if it has within `timeout`.
    pub(super) fn wait(&self, timeout: Duration) -> Option<Result<()>> {
        let decided = self.outcome.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.decided.wait_timeout_while(decided, timeout, |decided| decided.is_none());
        waited.unwrap_or_else(PoisonError::into_inner).0.clone()
    }

    /// Bytes that are there and verified.
    pub(super) fn verified(&self) -> u64 {
        self.filling.get().map_or(0, |filling| filling.bytes())
    }
}
