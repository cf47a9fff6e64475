//! The loop: the machine's commands become futures, their ends become its events.

use crate::{
    Report,
    floor::{Floor, Paced, Paces},
    pull::{self, Ended},
};
use async_trait::async_trait;
use flashboot_core::{
    Arena, ChunkRef, Digests, Error, Kind, Mover, PeerId, Pull, Result, ShardId,
    replica::{Assignment, Command, Event, Policy, Replica},
};
use futures_util::{FutureExt as _, StreamExt as _, future::BoxFuture, stream::FuturesUnordered};
use std::{
    collections::{BTreeMap, VecDeque},
    fmt,
    sync::Arc,
    time::Duration,
};
use tokio::{sync::watch, time::Instant};
use tracing::{Instrument as _, debug, info_span, trace, warn};

/// How long the driver waits for what only a transport can end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// One pull, after which it is cancelled.
    pub pull: Duration,
    /// A cancelled pull's quiescence, after which the replication fails.
    pub quiesce: Duration,
    /// How fast a source has to be, where that is said: a slower one is left, if there is another.
    pub floor: Option<Floor>,
}

impl Default for Limits {
    /// 60 s for a pull (2 GiB at 40 MB/s), 10 s to become quiet; no floor.
    fn default() -> Self {
        Self { pull: Duration::from_secs(60), quiesce: Duration::from_secs(10), floor: None }
    }
}

/// Where sources come from: the caller's knowledge of peers, locators and transports.
#[async_trait]
pub trait Sources: Send + Sync {
    /// Imports `source`. Must keep its own deadline.
    async fn attach(&self, source: PeerId) -> Result<Box<dyn Mover>>;

    /// Another holder of what `lost` was to give, from byte `from` of `shard` on; `None` when there is none.
    /// Must keep its own deadline.
    async fn replace(&self, lost: PeerId, shard: ShardId, from: u64, cause: &Error) -> Option<PeerId>;

    /// Which time of `source` counts, reading `shard`, where there is a [`Limits::floor`].
    fn paced(&self, _source: PeerId, _shard: ShardId) -> Paced {
        Paced::Asked
    }
}

/// What an [`Observer`] is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Step {
    /// A pull begins.
    Pulling {
        /// From whom.
        source: PeerId,
        /// What.
        chunk: ChunkRef,
    },
    /// A chunk is verified; if it closed a gap, more was published.
    Verified {
        /// From whom.
        source: PeerId,
        /// What.
        chunk: ChunkRef,
    },
    /// The first `bytes` of `shard` are published.
    Published {
        /// The shard.
        shard: ShardId,
        /// Verified bytes from its start.
        bytes: u64,
    },
}

/// Is told of every step, on the driver's own task: return soon.
pub trait Observer: Send {
    /// A step was taken.
    fn step(&mut self, step: Step);
}

/// Nobody looks.
impl Observer for () {
    fn step(&mut self, _: Step) {}
}

impl<F: FnMut(Step) + Send> Observer for F {
    fn step(&mut self, step: Step) {
        self(step);
    }
}

/// One replication to do.
#[derive(Debug, Clone)]
pub struct Job {
    /// Where the bytes go. Its filling must have begun ([`Arena::begin`]); its payload length and number of
    /// shards are the assignment's.
    pub arena: Arc<dyn Arena>,
    /// The part of the schedule.
    pub assignment: Assignment,
    /// The expected value of every block; `None` moves without verification (benchmarks only: nothing proves
    /// the bytes then but the generation).
    pub expected: Option<Arc<Digests>>,
    /// The machine's limits.
    pub policy: Policy,
    /// The driver's limits.
    pub limits: Limits,
}

enum Happened {
    /// With what the first look showed.
    Attached(PeerId, Box<dyn Mover>, Duration, (ShardId, u64)),
    /// An event as it is.
    Plain(Event),
    Pulled(Ended),
    /// A pull did not give its memory back.
    Wedged(Error),
    /// It is time to look at the sources' pace.
    Due,
}

type Task = BoxFuture<'static, Happened>;

struct Driver<'a> {
    machine: Replica,
    job: Job,
    sources: Arc<dyn Sources>,
    observer: &'a mut dyn Observer,
    began: Instant,
    movers: BTreeMap<PeerId, (Arc<dyn Mover>, watch::Sender<bool>)>,
    tasks: FuturesUnordered<Task>,
    /// The word that is waited for, and at whom.
    watch: Option<(PeerId, Task)>,
    paces: Option<Paces>,
    first_pull: Option<Instant>,
    last_byte: Option<Instant>,
    report: Report,
}

impl fmt::Debug for Driver<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Driver").field("machine", &self.machine).finish_non_exhaustive()
    }
}

/// Runs one replication to its end: every byte of the assignment in the arena, verified and published.
///
/// Dropping the future leaves pulls to end on their own; the arena's memory stays claimed until they have.
///
/// # Errors
/// [`Kind::Invalid`] when job and arena do not fit, [`Kind::SourceLost`] when no holder is left,
/// [`Kind::Deadline`] when a pull does not become quiet.
pub async fn replicate(job: Job, sources: Arc<dyn Sources>, observer: &mut dyn Observer) -> Result<Report> {
    check(&job)?;
    let span = info_span!("replicate", bytes = job.arena.payload());
    let machine = Replica::new(job.assignment.clone(), job.policy);
    let paces = job.limits.floor.map(Paces::new);
    let driver = Driver {
        machine,
        job,
        sources,
        observer,
        began: Instant::now(),
        movers: BTreeMap::new(),
        tasks: FuturesUnordered::new(),
        watch: None,
        paces,
        first_pull: None,
        last_byte: None,
        report: Report::default(),
    };
    driver.run().instrument(span).await
}

fn check(job: &Job) -> Result<()> {
    let geometry = &job.assignment.geometry;
    let invalid = |detail| Err(Error::new(Kind::Invalid, "replicate", detail));
    if job.arena.payload() != geometry.payload() || job.arena.shards() != geometry.shards() {
        return invalid(format!(
            "an arena of {} bytes and {} shards for a payload of {} bytes and {} shards",
            job.arena.payload(),
            job.arena.shards(),
            geometry.payload(),
            geometry.shards()
        ));
    }
    match &job.expected {
        Some(d) if d.payload() != geometry.payload() || d.block() != geometry.block() => invalid(format!(
            "digests of {} bytes in blocks of {} for a payload of {} bytes in blocks of {}",
            d.payload(),
            d.block(),
            geometry.payload(),
            geometry.block()
        )),
        _ => Ok(()),
    }
}

impl Driver<'_> {
    async fn run(mut self) -> Result<Report> {
        let mut events = VecDeque::from([Event::Start]);
        loop {
            while let Some(event) = events.pop_front() {
                let event = self.blamed(event);
                if let (Some(paces), Event::Reassigned { source: Some(source), .. }) =
                    (&mut self.paces, &event)
                {
                    paces.given(*source);
                }
                trace!(?event);
                for command in self.machine.handle(self.began.elapsed(), event) {
                    trace!(?command);
                    match command {
                        Command::Complete => return Ok(self.finished()),
                        Command::Fail { cause } => return Err(cause),
                        command => events.extend(self.carry_out(command)),
                    }
                }
            }
            match self.next().await? {
                Happened::Attached(source, mover, took, (shard, bytes)) => {
                    self.report.map += took;
                    self.movers.insert(source, (Arc::from(mover), watch::Sender::new(false)));
                    // What was seen first, so that nobody waits for a word that is there.
                    events.push_back(Event::Seen { source, shard, bytes });
                    events.push_back(Event::Attached { source });
                }
                Happened::Plain(event) => events.push_back(event),
                Happened::Pulled(ended) => {
                    self.landed(&ended);
                    events.push_back(ended.event);
                    events.extend(ended.lost);
                }
                Happened::Wedged(error) => return Err(error),
                Happened::Due => {
                    let slow = self.paces.as_mut().map(|paces| paces.slow(self.began.elapsed()));
                    let slow = slow.into_iter().flatten();
                    events.extend(slow.map(|(source, cause)| Event::Lost { source, cause }));
                }
            }
        }
    }

    /// Blames no source for what befell our own end: where the arena is beyond use, that is the cause.
    fn blamed(&self, mut event: Event) -> Event {
        if let Event::Lost { cause, .. } | Event::Failed { cause, .. } | Event::Broken { cause } = &mut event
            && let Err(own) = self.job.arena.usable()
        {
            *cause = own;
        }
        event
    }

    /// The next thing that happens. The machine never leaves nothing to wait for before it is over.
    async fn next(&mut self) -> Result<Happened> {
        let due = self.paces.as_ref().and_then(Paces::due).map(|due| self.began + due);
        let Self { watch, tasks, .. } = self;
        let is_idle = tasks.is_empty();
        let watched = watch.as_ref().map(|(source, _)| *source);
        let word = async {
            match watch {
                Some((_, watch)) => watch.await,
                None => std::future::pending().await,
            }
        };
        let look = async {
            match due {
                Some(due) => tokio::time::sleep_until(due).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            happened = word, if watched.is_some() => {
                self.unwatch();
                Ok(happened)
            }
            Some(happened) = tasks.next(), if !is_idle => Ok(happened),
            () = look, if due.is_some() => Ok(Happened::Due),
            else => Err(Error::new(
                Kind::Invalid,
                "replicate",
                format!("nothing is left to wait for: {:?}", self.machine),
            )),
        }
    }

    /// No word is waited for any more.
    fn unwatch(&mut self) {
        if let (Some((source, _)), Some(paces)) = (self.watch.take(), &mut self.paces) {
            paces.unwatched(self.began.elapsed(), source);
        }
    }

    fn landed(&mut self, ended: &Ended) {
        if let Some(paces) = &mut self.paces
            && let Event::Verified { source, chunk }
            | Event::Corrupt { source, chunk, .. }
            | Event::Failed { source, chunk, .. } = &ended.event
            && self.sources.paced(*source, chunk.shard) != Paced::Never
        {
            let right = matches!(ended.event, Event::Verified { .. });
            paces.ended(self.began.elapsed(), *source, chunk.range.len(), right);
        }
        if let Event::Verified { source, chunk } = ended.event {
            // Once, however often a chunk was pulled before it was right.
            self.report.verified += ended.verified;
            self.last_byte = Some(Instant::now());
            self.report.chunks += 1;
            self.report.bytes += chunk.range.len();
            self.observer.step(Step::Verified { source, chunk });
        }
    }

    /// Does what can be done at once, and queues the rest. Returns events that follow at once.
    fn carry_out(&mut self, command: Command) -> Option<Event> {
        match command {
            Command::Attach { source } => self.attach(source),
            Command::Watch { source, shard, at_least, until } => self.watch(source, shard, at_least, until),
            Command::Pull { source, chunk } => return self.pull(source, chunk).err(),
            Command::Abort { source } => {
                if let Some((_, abort)) = self.movers.get(&source) {
                    debug!(%source, "cancelling its pulls");
                    abort.send_replace(true);
                }
            }
            Command::Detach { source } => {
                self.movers.remove(&source);
                // A look that still waits would keep the source's memory, and answer for it when it is back.
                if self.watch.as_ref().is_some_and(|(watched, _)| *watched == source) {
                    self.unwatch();
                }
                if let Some(paces) = &mut self.paces {
                    paces.gone(source);
                }
            }
            Command::Publish { shard, bytes } => match self.job.arena.publish(shard, bytes) {
                Ok(()) => self.observer.step(Step::Published { shard, bytes }),
                // A defect of ours, or a GPU that is lost: stop rather than run on unpublished.
                Err(cause) => {
                    warn!(error = %cause, "cannot publish");
                    return Some(Event::Broken { cause });
                }
            },
            Command::Seek { lost, shard, from, cause } => self.seek(lost, shard, from, cause),
            // `run` takes these itself.
            Command::Complete | Command::Fail { .. } => {}
        }
        None
    }

    fn attach(&mut self, source: PeerId) {
        let sources = Arc::clone(&self.sources);
        let began = Instant::now();
        let shard = self.job.assignment.legs.iter().find(|leg| leg.source == source);
        let shard = shard.map_or(ShardId(0), |leg| leg.shard);
        let attach = async move {
            let attached = match sources.attach(source).await {
                // Before the first chunk: is it still the filling that the locator named?
                Ok(mover) => pull::stale(&*mover, shard).await.map(|bytes| (mover, bytes)),
                Err(cause) => Err(cause),
            };
            match attached {
                Ok((mover, bytes)) => Happened::Attached(source, mover, began.elapsed(), (shard, bytes)),
                Err(cause) => Happened::Plain(Event::Lost { source, cause: cause.with_peer(source) }),
            }
        };
        self.tasks.push(attach.instrument(info_span!("hop", %source)).boxed());
    }

    fn watch(&mut self, source: PeerId, shard: ShardId, at_least: u64, until: Duration) {
        let Some((mover, _)) = self.movers.get(&source) else { return };
        let mover = Arc::clone(mover);
        let until = self.began + until;
        let watch = async move {
            loop {
                let left = until.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    return Happened::Plain(Event::Tick);
                }
                match mover.observe(shard, at_least, left).await {
                    Err(cause) => {
                        return Happened::Plain(Event::Lost { source, cause: cause.with_peer(source) });
                    }
                    Ok(seen) if seen.generation != Some(mover.generation()) => {
                        let cause = match pull::stale(&*mover, shard).await {
                            Err(cause) => cause,
                            // It was being begun when we looked; look again.
                            Ok(_) => continue,
                        };
                        return Happened::Plain(Event::Lost { source, cause: cause.with_peer(source) });
                    }
                    Ok(seen) if seen.progress >= at_least => {
                        return Happened::Plain(Event::Seen { source, shard, bytes: seen.progress });
                    }
                    Ok(_) => tokio::task::yield_now().await,
                }
            }
        };
        self.unwatch();
        if let Some(paces) = &mut self.paces
            && self.sources.paced(source, shard) == Paced::Asked
        {
            paces.watching(self.began.elapsed(), source);
        }
        self.watch = Some((source, watch.boxed()));
    }

    fn pull(&mut self, source: PeerId, chunk: ChunkRef) -> Result<(), Event> {
        let failed = |cause: Error| Event::Failed {
            source,
            chunk,
            cause: cause.with_peer(source).with_chunk(chunk.index),
        };
        let Some((mover, abort)) = self.movers.get(&source) else {
            return Err(failed(Error::new(Kind::Invalid, "pull", "the source is not attached")));
        };
        self.first_pull.get_or_insert_with(Instant::now);
        let hash = self.job.expected.as_ref().map(|digests| digests.block());
        let pull = mover.start(Pull { range: chunk.range, hash }).map_err(failed)?;
        if let Some(paces) = &mut self.paces
            && self.sources.paced(source, chunk.shard) != Paced::Never
        {
            paces.pulling(self.began.elapsed(), source, chunk.range.len());
        }
        self.observer.step(Step::Pulling { source, chunk });
        let finish = pull::finish(
            pull,
            Arc::clone(mover),
            source,
            chunk,
            self.job.expected.clone(),
            abort.subscribe(),
            self.job.limits,
        );
        let task = async move {
            match finish.await {
                Ok(ended) => Happened::Pulled(ended),
                Err(error) => Happened::Wedged(error),
            }
        };
        let span = tracing::trace_span!("chunk", %source, shard = chunk.shard.0, index = chunk.index);
        self.tasks.push(task.instrument(span).boxed());
        Ok(())
    }

    fn seek(&mut self, lost: PeerId, shard: ShardId, from: u64, cause: Error) {
        warn!(%lost, shard = shard.0, from, %cause, "source lost; looking for another holder");
        let sources = Arc::clone(&self.sources);
        let seek = async move {
            let source = sources.replace(lost, shard, from, &cause).await;
            Happened::Plain(Event::Reassigned { lost, source })
        };
        self.tasks.push(seek.boxed());
    }

    fn finished(mut self) -> Report {
        let now = Instant::now();
        self.report.repaired = self.machine.repaired();
        self.report.losses = self.machine.losses();
        self.report.ready = now - self.began;
        if let (Some(first), Some(last)) = (self.first_pull, self.last_byte) {
            self.report.transfer = last - first;
            self.report.verify = now - last;
        }
        self.report
    }
}
