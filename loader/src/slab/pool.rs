//! The memory of slabs: taken under a budget, used again, given back to the system, and accounted for by name.

use super::view::{Slab, View};
use crate::budget::{Budget, Permit};
use flashboot_core::{ByteSize, Error, Kind, Result};
use flashboot_cuda::{Context, Pinned};
use flashboot_memory::{Buffer, near::prefer_near};
use serde::Serialize;
use std::{
    collections::HashMap,
    ops::Range,
    sync::{
        Arc, Mutex, PoisonError, Weak,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

/// Numbers of buffers are the process's, so that two pools under one [`Pacer`](crate::budget::Pacer) cannot be confused.
static NEXT: AtomicU64 = AtomicU64::new(0);

/// Slabs of one load. Cloning shares them.
#[derive(Debug, Clone)]
pub struct SlabPool(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    budget: Budget,
    /// Pin what is allocated, for this GPU's copy engines.
    pin: Option<Context>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    free: Vec<Memory>,
    free_bytes: u64,
    live: HashMap<u64, Live>,
    live_bytes: u64,
    released: bool,
    stats: PoolStats,
}

#[derive(Debug)]
struct Live {
    bytes: u64,
    /// `None` while it is being filled.
    slab: Option<Weak<Slab>>,
}

/// Memory of one slab.
#[derive(Debug)]
pub(super) enum Memory {
    Plain(Buffer),
    Pinned(Pinned),
}

impl Memory {
    fn as_mut_slice(&mut self) -> &mut [u8] {
        match self {
            Self::Plain(buffer) => buffer.as_mut_slice(),
            Self::Pinned(pinned) => pinned.as_mut_slice(),
        }
    }

    pub(super) fn as_slice(&self) -> &[u8] {
        match self {
            Self::Plain(buffer) => buffer.as_slice(),
            Self::Pinned(pinned) => pinned.as_slice(),
        }
    }

    pub(super) fn len(&self) -> usize {
        match self {
            Self::Plain(buffer) => buffer.len(),
            Self::Pinned(pinned) => pinned.len(),
        }
    }
}

/// What a pool did. Bytes are of buffers, whole.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct PoolStats {
    /// Slabs handed out.
    pub slabs: u64,
    /// Buffers allocated for them; the others were used again.
    pub allocations: u64,
    /// The most bytes allocated at one time, in use or kept to be used again.
    pub peak_bytes: u64,
}

/// One slab that somebody still has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Held {
    /// Bytes of its buffer.
    pub bytes: u64,
    /// The tensors that hold it; none: it is still being filled.
    pub tensors: Vec<String>,
}

/// What [`SlabPool::release`] found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Release {
    /// Bytes given back to the system.
    pub freed: u64,
    /// Slabs that are still alive; their memory goes when their last view does.
    pub held: Vec<Held>,
}

impl Release {
    /// Nothing, or an error that names who holds what: after the target's load the memory is about to be measured, and what
    /// has escaped is missing.
    ///
    /// # Errors
    /// [`Kind::Busy`].
    pub fn proved(&self) -> Result<()> {
        if self.held.is_empty() {
            return Ok(());
        }
        let named = |held: &Held| {
            let names = held.tensors.iter().take(8).cloned().collect::<Vec<_>>().join(", ");
            let more = held.tensors.len().saturating_sub(8);
            let more = if more > 0 { format!(" and {more} more") } else { String::new() };
            format!("slab of {} held by {names}{more}", ByteSize(held.bytes))
        };
        let slabs: Vec<_> = self.held.iter().take(8).map(named).collect();
        let detail = format!("{} slabs still alive after the load: {}", self.held.len(), slabs.join("; "));
        Err(Error::new(Kind::Busy, "release", detail)
            .with_remedy("copy these tensors instead of keeping them, or load them without slabs"))
    }
}

impl SlabPool {
    /// A pool whose slabs in use stay within `budget`; pinned for the GPU of `pin`, if there is one.
    pub fn new(budget: Budget, pin: Option<Context>) -> Self {
        Self(Arc::new(Inner { budget, pin, state: Mutex::default() }))
    }

    /// A buffer of `capacity` bytes, used again or new, once the budget allows it.
    ///
    /// # Errors
    /// [`Kind::Deadline`] when it does not within `timeout`, naming who has the slabs; [`Kind::Exhausted`] when the system has
    /// no memory, or (pinned) the driver none; [`Kind::Invalid`] once the pool is released.
    pub fn take(&self, capacity: u64, timeout: Duration) -> Result<OpenSlab> {
        let len = usize::try_from(capacity).unwrap_or(usize::MAX);
        let permit = self.0.budget.acquire(capacity, timeout).map_err(|e| self.explain(&e))?;
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let (kept, unused) = self.0.lock().admit(len, self.0.budget.limit())?;
        drop(unused);
        let made = match (kept, &self.0.pin) {
            (Some(memory), _) => Ok(memory),
            (None, Some(context)) => {
                let _near = prefer_near(context.device().numa_node());
                Pinned::new(context, len).map(Memory::Pinned)
            }
            (None, None) => Buffer::new(len).map(Memory::Plain),
        };
        let mut state = self.0.lock();
        let memory = made.inspect_err(|_| state.live_bytes -= capacity)?;
        state.live.insert(number, Live { bytes: capacity, slab: None });
        state.stats.slabs += 1;
        drop(state);
        let lease = Lease { pool: Arc::clone(&self.0), number, memory: Some(memory), _permit: permit };
        Ok(OpenSlab { lease })
    }

    fn explain(&self, e: &Error) -> Error {
        let held = self.held();
        let who = Release { freed: 0, held }
            .proved()
            .err()
            .map_or_else(String::new, |e| format!("; {}", e.detail()));
        let explained = Error::new(e.kind(), "slab", format!("{}{who}", e.detail()));
        match e.remedy() {
            Some(remedy) => explained.with_remedy(remedy),
            None => explained,
        }
    }

    /// Slabs that somebody has, the largest first.
    pub fn held(&self) -> Vec<Held> {
        // Upgraded under the lock, dropped without it: the last owner of a slab takes the lock.
        let live: Vec<(u64, Option<Arc<Slab>>)> = {
            let state = self.0.lock();
            state.live.values().map(|live| (live.bytes, live.slab.as_ref().and_then(Weak::upgrade))).collect()
        };
        let one = |(bytes, slab): &(u64, Option<Arc<Slab>>)| {
            let tensors = slab.as_ref().map_or_else(Vec::new, |slab| slab.held());
            Held { bytes: *bytes, tensors }
        };
        let mut held: Vec<_> = live.iter().map(one).collect();
        held.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.tensors.cmp(&b.tensors)));
        held
    }

    /// Gives everything that nobody has back to the system, keeps nothing from now on, and says who has the rest.
    pub fn release(&self) -> Release {
        let free = {
            let mut state = self.0.lock();
            state.released = true;
            state.free_bytes = 0;
            std::mem::take(&mut state.free)
        };
        let freed = free.iter().map(|memory| memory.len() as u64).sum();
        drop(free);
        Release { freed, held: self.held() }
    }

    /// What it did so far.
    pub fn stats(&self) -> PoolStats {
        self.0.lock().stats
    }

    /// Bytes allocated now: in use, and kept to be used again.
    pub fn bytes(&self) -> u64 {
        let state = self.0.lock();
        state.live_bytes + state.free_bytes
    }
}

impl Inner {
    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Counts `len` more bytes as in use: a kept buffer of that length, or none, and then kept ones to be given up first until
    /// all there is is within `limit`, or none is left.
    fn admit(&mut self, len: usize, limit: u64) -> Result<(Option<Memory>, Vec<Memory>)> {
        if self.released {
            return Err(Error::new(Kind::Invalid, "slab", "the pool was released"));
        }
        let bytes = len as u64;
        let (mut kept, mut unused) = (None, Vec::new());
        if let Some(at) = self.free.iter().position(|memory| memory.len() == len) {
            kept = Some(self.free.swap_remove(at));
            self.free_bytes -= bytes;
        } else {
            self.stats.allocations += 1;
            while self.live_bytes + self.free_bytes + bytes > limit
                && let Some(memory) = self.free.pop()
            {
                self.free_bytes -= memory.len() as u64;
                unused.push(memory);
            }
        }
        self.live_bytes += bytes;
        self.stats.peak_bytes = self.stats.peak_bytes.max(self.live_bytes + self.free_bytes);
        Ok((kept, unused))
    }
}

/// A buffer that is somebody's; dropped, it is the pool's again.
#[derive(Debug)]
pub(super) struct Lease {
    pool: Arc<Inner>,
    pub(super) number: u64,
    /// `None` in drop only.
    memory: Option<Memory>,
    // Given back after the memory is accounted for.
    _permit: Permit,
}

impl Lease {
    #[expect(clippy::expect_used, reason = "the memory leaves in drop only")]
    pub(super) fn memory(&self) -> &Memory {
        self.memory.as_ref().expect("taken in drop only")
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let Some(memory) = self.memory.take() else { return };
        let bytes = memory.len() as u64;
        let mut state = self.pool.lock();
        state.live.remove(&self.number);
        state.live_bytes -= bytes;
        // One that alone is larger than the budget is not kept.
        if state.released || state.live_bytes + state.free_bytes + bytes > self.pool.budget.limit() {
            drop(state);
            return drop(memory);
        }
        state.free_bytes += bytes;
        state.free.push(memory);
    }
}

/// A slab that is being filled.
#[derive(Debug)]
pub struct OpenSlab {
    lease: Lease,
}

impl OpenSlab {
    /// Its bytes: what was in them before, if it is used again.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        self.lease.memory.as_mut().map(Memory::as_mut_slice).unwrap_or_default()
    }

    /// Ends the filling: `tensors` by name and place, each as a view. Without tensors the buffer is the pool's again.
    pub fn seal(self, tensors: Vec<(String, Range<usize>)>) -> Vec<View> {
        let (pool, number) = (Arc::clone(&self.lease.pool), self.lease.number);
        let slab = Arc::new(Slab::new(self.lease, tensors));
        if let Some(live) = pool.lock().live.get_mut(&number) {
            live.slab = Some(Arc::downgrade(&slab));
        }
        slab.views()
    }
}
