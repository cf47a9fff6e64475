//! One hop: pulls are queued here, and the hop's connections take their parts.

use crate::{
    arena::Served,
    dial::Route,
    error::no_thread,
    job::{Job, Taken},
    lane::Lane,
    watch::Watch,
};
use async_trait::async_trait;
use flashboot_channel::{Blocking, Channel};
use flashboot_core::{Error, Generation, InFlight, Kind, Landed, Mover, Observed, Pull, Result, ShardId};
use std::{
    collections::VecDeque,
    fmt,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};
use tokio::{sync::watch, time::Instant};

/// A hop, as its owner has it.
#[derive(Debug)]
pub(crate) struct TcpMover {
    hop: Arc<Hop>,
    watch: Watch,
    into: Served,
}

/// What the mover, its pulls and its connections share.
pub(crate) struct Hop {
    generation: Generation,
    queue: Mutex<Queue>,
    arrived: Condvar,
    /// The mover and its pulls that are not let go of: without any, nobody wants what is still to come.
    owners: AtomicUsize,
}

#[derive(Debug, Default)]
struct Queue {
    jobs: VecDeque<Arc<Job>>,
    /// The mover is gone: what is queued is the last.
    closed: bool,
    broken: Option<Error>,
}

impl TcpMover {
    /// Starts a thread for each of `lanes`; the watch with when it was attached, at the earliest.
    pub(crate) fn start(
        watch: (Channel, Instant),
        lanes: Vec<Blocking>,
        into: Served,
        route: &Route,
        silence: Duration,
    ) -> Result<Self> {
        let generation = route.generation();
        let hop = Arc::new(Hop {
            generation,
            queue: Mutex::default(),
            arrived: Condvar::new(),
            owners: AtomicUsize::new(1),
        });
        // Dropping it ends the threads that have started.
        let mover = Self { hop: Arc::clone(&hop), watch: Watch::new(watch.0, watch.1)?, into };
        let context = match &mover.into {
            Served::Host(_) => None,
            Served::Gpu(arena) => Some(arena.context()),
        };
        for conn in lanes {
            let lane = Lane::new(conn, Arc::clone(&hop), route.clone(), silence, context)?;
            let spawned = thread::Builder::new().name("flashboot-read".into()).spawn(move || lane.run());
            spawned.map_err(|e| no_thread(&e, "a thread to read by"))?;
        }
        Ok(mover)
    }
}

impl Drop for TcpMover {
    fn drop(&mut self) {
        self.hop.queue().closed = true;
        self.hop.arrived.notify_all();
        self.hop.let_go();
    }
}

#[async_trait]
impl Mover for TcpMover {
    fn generation(&self) -> Generation {
        self.hop.generation
    }

    async fn observe(&self, shard: ShardId, at_least: u64, wait: Duration) -> Result<Observed> {
        self.watch.look(shard, at_least, wait, self.hop.generation).await
    }

    fn start(&self, pull: Pull) -> Result<Box<dyn InFlight>> {
        if let Some(error) = &self.hop.queue().broken {
            return Err(error.clone());
        }
        let job = Job::new(&self.into, pull)?;
        // A look that comes after this pull must have been asked for after it.
        self.watch.forget_first();
        self.hop.push(&job);
        self.hop.owners.fetch_add(1, Ordering::AcqRel);
        Ok(Box::new(TcpInFlight { done: job.done(), job, hop: Arc::clone(&self.hop) }))
    }
}

impl Hop {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn generation(&self) -> Generation {
        self.generation
    }

    fn push(&self, job: &Arc<Job>) {
        let mut queue = self.queue();
        match queue.broken.clone() {
            None => queue.jobs.push_back(Arc::clone(job)),
            Some(error) => {
                drop(queue);
                return job.fail(error);
            }
        }
        drop(queue);
        self.arrived.notify_all();
    }

    /// The next part, if there is one now.
    pub(crate) fn take(&self) -> Option<Taken> {
        self.queue().take()
    }

    /// The next part; waits for one. `None` when there will be none.
    pub(crate) fn wait(&self) -> Option<Taken> {
        let mut queue = self.queue();
        loop {
            if queue.broken.is_some() {
                return None;
            }
            if let Some(taken) = queue.take() {
                return Some(taken);
            }
            if queue.closed {
                return None;
            }
            queue = self.arrived.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// A connection broke: nothing more comes by this hop.
    pub(crate) fn breaks(&self, error: Error) {
        let mut queue = self.queue();
        queue.broken.get_or_insert(error.clone());
        let jobs = std::mem::take(&mut queue.jobs);
        drop(queue);
        self.arrived.notify_all();
        for job in jobs {
            job.fail(error.clone());
        }
    }

    fn let_go(&self) {
        self.owners.fetch_sub(1, Ordering::AcqRel);
    }

    /// Whether neither the mover nor any of its pulls has an owner.
    pub(crate) fn is_abandoned(&self) -> bool {
        self.owners.load(Ordering::Acquire) == 0
    }
}

impl Queue {
    fn take(&mut self) -> Option<Taken> {
        while let Some(first) = self.jobs.front() {
            if let Some(taken) = first.take() {
                return Some(taken);
            }
            self.jobs.pop_front();
        }
        None
    }
}

impl fmt::Debug for Hop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hop").field("generation", &self.generation).finish_non_exhaustive()
    }
}

/// A pull. Dropping it cancels it; what of it is being received at that moment is given up within a few milliseconds.
#[derive(Debug)]
struct TcpInFlight {
    job: Arc<Job>,
    done: watch::Receiver<Option<Result<Landed>>>,
    hop: Arc<Hop>,
}

#[async_trait]
impl InFlight for TcpInFlight {
    fn cancel(&self) {
        self.job.cancel();
    }

    async fn quiesced(&mut self) -> Result<Landed> {
        let gone = |what: String| Error::new(Kind::Cancelled, "pull", what);
        match self.done.wait_for(Option::is_some).await {
            Ok(done) => done.clone().unwrap_or_else(|| Err(gone("it has no result".into()))),
            // The job, which `self` holds, has the other end.
            Err(e) => Err(gone(format!("bytes {}: {e}", self.job.range()))),
        }
    }
}

impl Drop for TcpInFlight {
    fn drop(&mut self) {
        self.job.cancel();
        self.hop.let_go();
    }
}
