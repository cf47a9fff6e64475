//! The host's copy engine: a pool of threads that pulls ranges of imported arenas into one's own.

use crate::{
    arena::HostArena,
    imported::ImportedArena,
    job::{CopyJob, Job},
};
use flashboot_core::{Error, Kind, Pull, Result};
use std::{
    collections::VecDeque,
    fmt,
    sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError},
    thread::JoinHandle,
};

/// Bytes copied and hashed at a time, and the unit of cancelling: a piece stays in a core's L2 between its
/// copy and its hash. Measured by `examples/bench_copy.rs`.
const HASHED_PIECE: u64 = 256 << 10;
/// Bytes of one plain copy and the unit of cancelling one: a millisecond.
const PLAIN_PIECE: u64 = 16 << 20;
/// A plain pull shorter than a few pieces is cut finer, so that every thread has a share.
const SMALLEST_PIECE: u64 = 1 << 20;

/// How to make a copy engine.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CopyEngineConfig {
    /// Number of threads; `None`: one for each core this process may use.
    pub threads: Option<usize>,
}

/// A pool of threads of its own that copies, and hashes what it copied. Movers of one process share one.
///
/// Pulls are served in the order they come; a thread that finds nothing left of the first takes the next, so
/// two pulls in flight keep every thread busy.
pub struct CopyEngine {
    queue: Arc<Queue>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Default)]
struct Queue {
    state: Mutex<State>,
    arrived: Condvar,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Arc<Job>>,
    closed: bool,
}

impl CopyEngine {
    /// Starts the threads.
    ///
    /// # Errors
    /// [`Kind::Exhausted`] when the system gives no more threads.
    pub fn new(config: &CopyEngineConfig) -> Result<Self> {
        let cores = || std::thread::available_parallelism().map_or(1, usize::from);
        let count = config.threads.unwrap_or_else(cores).max(1);
        let mut engine = Self { queue: Arc::default(), threads: Vec::with_capacity(count) };
        for index in 0..count {
            let queue = Arc::clone(&engine.queue);
            let thread = std::thread::Builder::new()
                .name(format!("flashboot-copy-{index}"))
                .spawn(move || queue.work())
                .map_err(|e| {
                    Error::new(Kind::Exhausted, "clone", format!("thread {index} of {count}: {e}"))
                        .with_remedy("raise the limit on threads, or give the copy engine fewer")
                })?;
            engine.threads.push(thread);
        }
        Ok(engine)
    }

    /// The process's own engine, started at the first call with one thread a core and never stopped.
    pub fn shared() -> Result<Arc<Self>> {
        static SHARED: OnceLock<Result<Arc<CopyEngine>>> = OnceLock::new();
        SHARED.get_or_init(|| Self::new(&CopyEngineConfig::default()).map(Arc::new)).clone()
    }

    /// Number of threads.
    pub fn threads(&self) -> usize {
        self.threads.len()
    }

    /// Begins to pull and returns at once. The job owns the range of `into` and keeps both ends mapped until
    /// its last piece is done.
    ///
    /// # Errors
    /// [`Kind::Mismatch`] when the payloads differ; [`Kind::Invalid`] when the range is not within them, is
    /// not cut at block boundaries though hashes are asked for, or both ends are the same arena;
    /// [`Kind::Busy`] when any byte of the range is owned.
    pub fn pull(&self, from: &Arc<ImportedArena>, into: &HostArena, pull: Pull) -> Result<CopyJob> {
        let Pull { range, hash } = pull;
        let payload = from.payload();
        let own = into.layout().payload;
        if own != payload {
            return Err(Error::new(
                Kind::Mismatch,
                "pull",
                format!("the peer's payload has {payload} bytes, ours {own}"),
            ));
        }
        let invalid = |detail: String| Err(Error::new(Kind::Invalid, "pull", detail));
        if from.file_id() == into.file_id() {
            return invalid("source and destination are the same arena".into());
        }
        if let Some(block) = hash {
            if !block.is_power_of_two() || block < 1024 {
                return invalid(format!("a block of {block} bytes is not a power of two of at least 1024"));
            }
            let ends_well = range.end == payload || range.end.is_multiple_of(block);
            let cut_well = range.start.is_multiple_of(block) && ends_well;
            if !(range.is_empty() || cut_well) {
                return invalid(format!(
                    "bytes {range} do not begin and end at blocks of {block} bytes or the payload's end {payload}"
                ));
            }
        }
        let owned = into.own(range)?;
        debug_assert_eq!(owned.file_id(), into.file_id());
        let step = match hash {
            Some(block) => block.min(HASHED_PIECE),
            None => plain_piece(range.len(), self.threads.len() as u64),
        };
        let job = Job::new(Arc::clone(from), owned, hash, step);
        let mut state = self.queue.state();
        state.jobs.push_back(Arc::clone(&job));
        drop(state);
        self.queue.arrived.notify_all();
        Ok(CopyJob::new(job))
    }
}

/// At least two shares a thread, whole pages, between the two bounds.
fn plain_piece(len: u64, threads: u64) -> u64 {
    let share = len.div_ceil(threads.saturating_mul(2).max(1));
    share.checked_next_multiple_of(SMALLEST_PIECE).unwrap_or(PLAIN_PIECE).clamp(SMALLEST_PIECE, PLAIN_PIECE)
}

impl Queue {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A worker's life: the first job's pieces until none is left to take, then the next job's.
    fn work(&self) {
        while let Some(job) = self.first() {
            while job.step() {}
            let mut state = self.state();
            if state.jobs.front().is_some_and(|front| Arc::ptr_eq(front, &job)) {
                state.jobs.pop_front();
            }
        }
    }

    fn first(&self) -> Option<Arc<Job>> {
        let mut state = self.state();
        loop {
            if state.closed {
                return None;
            }
            if let Some(job) = state.jobs.front() {
                return Some(Arc::clone(job));
            }
            state = self.arrived.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Drop for CopyEngine {
    /// Cancels what is queued and waits for the pieces under way.
    fn drop(&mut self) {
        let mut state = self.queue.state();
        state.closed = true;
        let jobs = std::mem::take(&mut state.jobs);
        drop(state);
        for job in jobs {
            job.cancel();
        }
        self.queue.arrived.notify_all();
        let own = std::thread::current().id();
        // The last handle may go in a waker that a copy thread runs; a thread cannot wait for itself.
        for thread in self.threads.drain(..).filter(|thread| thread.thread().id() != own) {
            if thread.join().is_err() {
                tracing::error!("a copy thread panicked");
            }
        }
    }
}

impl fmt::Debug for CopyEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CopyEngine").field("threads", &self.threads.len()).finish_non_exhaustive()
    }
}
