//! The mover that `ipc` and `imex` share: the copy engine of the clone's GPU reads a peer's mapping into the clone's
//! arena, and the hash kernel checks what landed.
//!
//! Two streams a hop: chunk k+1 is copied while chunk k is hashed. Nothing is ever queued that waits for the peer:
//! its words are polled from the host, and once more by the GPU itself behind each copy. A pull owns its claim, the import and the arena until the GPU has passed its
//! last mark, whoever is still interested; a thread of the hop's own waits for that and drops them.

mod look;
mod pace;
mod pull;
mod trace;

use crate::{
    Context, CudaArena, Import,
    hash::{self, Launched},
    ops::{Call, Ops},
    stream::{Event, Pool, Stream},
};
use async_trait::async_trait;
use flashboot_core::{
    Arena as _, BlockDigest, ByteRange, Error, Generation, InFlight, Kind, Mover, Observed, Pull, Result,
    ShardId, control,
};
pub(crate) use look::Looks;
use look::{Slot, Watch};
use pace::Pace;
use pull::{CudaInFlight, Fence, Job, Marks, UnderWay};
use std::{
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc},
    thread,
    time::{Duration, Instant},
};
pub use trace::Span;
use trace::Trace;

/// Bytes per second that no copy passes, within a GPU's memory and between two GPUs: 2.2 TB/s and 400 GB/s on H200s, 840 GB/s
/// between GB300s. What a first pull is expected at.
const FASTEST_MEMORY: u64 = 5_000_000_000_000;
const FASTEST_LINK: u64 = 900_000_000_000;
/// Between two looks of a caller that looks again and again.
const HOT_PAUSE: Duration = Duration::from_micros(10);
/// A look that takes longer is waited for on another thread.
const LATE: Duration = Duration::from_millis(2);

/// What the transport knows of the source beside its memory.
pub trait SourceAlive: Send + Sync + fmt::Debug {
    /// [`Kind::SourceLost`], with what was seen, once the source is known to be gone. Called often, on any thread:
    /// return at once.
    fn check(&self) -> Result<()>;

    /// The source's words by a shorter way than through the GPUs, where there is one: then they are looked at there, and
    /// only there. The look must be ordered after everything its caller has seen done.
    fn words(&self, _shard: ShardId) -> Option<Observed> {
        None
    }
}

/// A source of which nothing is known but its memory (`imex`: it shows by standing still, or by a sticky error).
#[derive(Debug, Clone, Copy, Default)]
pub struct NotKnown;

impl SourceAlive for NotKnown {
    fn check(&self) -> Result<()> {
        Ok(())
    }
}

/// How a hop waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MoverConfig {
    /// Between the first two looks at a word that is not there yet. It doubles from look to look.
    pub first_pause: Duration,
    /// The longest time between two looks.
    pub longest_pause: Duration,
    /// How long before the end that the last pulls let it expect the hop's thread wakes the pull's caller up, who from then
    /// on asks the GPU again and again, between other tasks of its runtime, until the end or for some milliseconds.
    pub spin: Duration,
    /// How long a caller looks at a word again and again, between other tasks of its runtime, before a thread does it with
    /// pauses.
    pub hot: Duration,
}

impl Default for MoverConfig {
    fn default() -> Self {
        Self {
            first_pause: Duration::from_micros(20),
            longest_pause: Duration::from_micros(250),
            spin: Duration::from_micros(200),
            hot: Duration::from_millis(20),
        }
    }
}

/// One hop.
#[derive(Debug)]
pub struct CudaMover {
    /// Dropped before `hop`, so that the thread, which then ends, is the last to hold it and unmaps.
    jobs: mpsc::Sender<Arc<UnderWay>>,
    hop: Arc<Hop>,
}

/// What pulls, looks and the hop's thread share. Streams first: they go before what they use.
#[derive(Debug)]
pub(crate) struct Hop {
    copy: Stream,
    hash: Stream,
    looks: Looks,
    events: Pool<Event>,
    import: Import,
    into: Arc<CudaArena>,
    alive: Arc<dyn SourceAlive>,
    /// The source's words need no look by the GPU.
    words_elsewhere: bool,
    config: MoverConfig,
    pace: Mutex<Pace>,
    trace: Mutex<Option<Arc<Trace>>>,
}

impl CudaMover {
    /// Opens a hop from `import` into `into`, after checking the source's control block. Blocks for some 0.1 ms.
    ///
    /// # Errors
    /// [`Kind::Mismatch`] when the two are not of one size or GPU, [`Kind::Corrupt`] when there is no control
    /// block, [`Kind::StaleGeneration`] when it names another filling than the locator.
    pub fn open(
        import: Import,
        into: Arc<CudaArena>,
        alive: Arc<dyn SourceAlive>,
        config: MoverConfig,
    ) -> Result<Self> {
        if import.payload() != into.payload() || import.shards() != into.shards() {
            return Err(Error::new(
                Kind::Mismatch,
                "import",
                format!(
                    "the source has {} bytes in {} shards, the arena {} bytes in {} shards",
                    import.payload(),
                    import.shards(),
                    into.payload(),
                    into.shards()
                ),
            ));
        }
        if !import.context().is(into.context()) {
            return Err(Error::new(
                Kind::Mismatch,
                "import",
                format!(
                    "the source is mapped on GPU {}, the arena is on GPU {}",
                    import.context().device().uuid(),
                    into.context().device().uuid()
                ),
            )
            .with_remedy("import a source on the GPU that its bytes go to"));
        }
        let context = into.context().clone();
        let looks = Looks::new(&import)?;
        looks.check_header(&import)?;
        let fastest = if import.is_same_gpu() { FASTEST_MEMORY } else { FASTEST_LINK };
        let words_elsewhere = alive.words(ShardId(0)).is_some();
        let hop = Arc::new(Hop {
            copy: Stream::new(&context)?,
            hash: Stream::new(&context)?,
            looks,
            events: Pool::default(),
            import,
            into,
            alive,
            words_elsewhere,
            config,
            pace: Mutex::new(Pace::new(fastest)),
            trace: Mutex::default(),
        });
        // The first pulls shall not wait for anything to be made. A refusal is told when it matters.
        let _ = context.kernel();
        hop.into.hasher().warm();
        drop((hop.marks(), hop.marks(), hop.looks.slot(&context)));
        let (jobs, queue) = mpsc::channel::<Arc<UnderWay>>();
        let of_thread = Arc::clone(&hop);
        thread::Builder::new()
            .name("flashboot-hop".to_owned())
            .spawn(move || {
                pull::sleep_exactly();
                for under_way in queue {
                    under_way.see_through();
                }
                drop(of_thread);
            })
            .map_err(|e| {
                Error::new(Kind::Exhausted, "thread", format!("cannot start a hop's thread: {e}"))
            })?;
        Ok(Self { jobs, hop })
    }

    /// Copies `range` in pieces of `chunk` bytes queued at once, without hashing, and gives the time the GPU took: the
    /// limit that a hop's speed is measured against. Blocks.
    ///
    /// # Errors
    /// As for [`start`](Mover::start).
    pub fn measure_raw(&self, range: ByteRange, chunk: u64) -> Result<Duration> {
        let hop = &self.hop;
        let to = hop.into.inside("pull", range)?;
        let claim = hop.into.claim(range)?;
        let (begin, end) = (Event::timed(hop.context())?, Event::timed(hop.context())?);
        // Dropped at the end of every path: waits for what was queued.
        let fence = Fence::new(Arc::clone(hop), claim);
        begin.record(&hop.copy)?;
        let mut at = 0;
        while at < range.len() {
            let size = chunk.max(1).min(range.len() - at);
            let start = range.start + at;
            hop.queue_copy(ByteRange::new(start, start + size), to + at)?;
            at += size;
        }
        end.record(&hop.copy)?;
        drop(fence);
        end.elapsed_since(&begin)
    }

    /// The same with every block hashed behind its copy, by the schedule of [`start`](Mover::start) but all of it queued
    /// ahead: what the GPU allows when no host is waited for. Blocks.
    ///
    /// # Errors
    /// As for [`start`](Mover::start); [`Kind::Unavailable`] where the kernel is refused.
    pub fn measure_verified(&self, range: ByteRange, chunk: u64, block: u64) -> Result<Duration> {
        let hop = &self.hop;
        let to = hop.into.inside("pull", range)?;
        let claim = hop.into.claim(range)?;
        let (begin, end) = (Event::timed(hop.context())?, Event::timed(hop.context())?);
        let mut held = Vec::new();
        // Dropped before `held`, at the end of every path: waits for what was queued.
        let fence = Fence::new(Arc::clone(hop), claim);
        begin.record(&hop.copy)?;
        let mut at = 0;
        while at < range.len() {
            let size = chunk.max(1).min(range.len() - at);
            let part = ByteRange::new(range.start + at, range.start + at + size);
            hash::check_blocks(hop.into.payload(), part, block)?;
            let copied = Event::new(hop.context())?;
            hop.queue_transfer(part, to + at, None, &copied)?;
            let launched = hop.queue_hash(part, block)?;
            held.push((copied, launched.ok_or_else(|| hash::not_here("see the warning"))?));
            at += size;
        }
        end.record(&hop.hash)?;
        drop(fence);
        end.elapsed_since(&begin)
    }

    /// Reads the source's words through the GPU once, whatever shorter way there is, and waits for them: a round trip that
    /// finds the link and the GPU awake afterwards.
    ///
    /// # Errors
    /// The driver's.
    pub fn ping(&self) -> Result<Observed> {
        self.hop.look(ShardId(0))?.wait()
    }

    /// From now on notes when the GPU does each pull's work. Begin before the first pull.
    ///
    /// # Errors
    /// The driver's.
    pub fn trace(&self) -> Result<()> {
        let context = self.hop.context();
        let trace = Arc::new(Trace::begin(context, &self.hop.copy)?);
        // Made ahead, as those of an untraced hop are.
        drop((0..6).map(|_| trace.event(context)).collect::<Result<Vec<_>>>()?);
        *self.hop.trace.lock().unwrap_or_else(PoisonError::into_inner) = Some(trace);
        Ok(())
    }

    /// Takes what was noted of pulls that have quiesced, in their order; nothing without [`trace`](Self::trace).
    pub fn spans(&self) -> Vec<Span> {
        self.hop.traced().map_or_else(Vec::new, |trace| trace.take())
    }

    /// The source's mapping.
    pub fn import(&self) -> &Import {
        &self.hop.import
    }

    /// Why this hop verifies through the host; `None` while the GPU does it.
    pub fn hash_fallback(&self) -> Option<Error> {
        self.hop.into.hash_fallback().cloned()
    }
}

impl Hop {
    fn context(&self) -> &Context {
        self.into.context()
    }

    fn queue_copy(&self, range: ByteRange, to: u64) -> Result<()> {
        self.context().call(|ops| self.copy_with(ops, range, to))
    }

    fn copy_with(&self, ops: &dyn Ops, range: ByteRange, to: u64) -> Call<()> {
        let from = self.import.at() + range.start;
        // SAFETY: both ranges lie inside payloads of one length, checked; the caller's fence keeps both
        // mappings, and the claim everyone else off the destination, until the stream has passed.
        unsafe { ops.copy_dtod(to, from, range.len(), self.copy.object()) }
    }

    /// The copy, and the hash stream's wait for it, as close together as they can be queued.
    fn queue_transfer(&self, range: ByteRange, to: u64, begin: Option<&Event>, copied: &Event) -> Result<()> {
        self.context().call(|ops| {
            if let Some(begin) = begin {
                begin.record_with(ops, &self.copy)?;
            }
            self.copy_with(ops, range, to)?;
            copied.record_with(ops, &self.copy)?;
            ops.stream_wait_event(self.hash.object(), copied.object())
        })
    }

    /// `None`: the kernel cannot, the host is to.
    fn queue_hash(&self, range: ByteRange, block: u64) -> Result<Option<Launched>> {
        let data = self.into.inside("hash", ByteRange::new(0, 0))?;
        let payload = self.into.payload();
        // SAFETY: the range is inside the arena, which the caller's fence keeps, and claimed; the hash stream waits for
        // its copy.
        unsafe { self.into.hasher().launch(&self.hash, data, payload, range, block) }
    }

    /// One pull's work and its last mark, in the order it is queued. Whatever fails, what was queued before it is
    /// under way. The look goes where the hash does, so that the next copy does not wait for it.
    fn queue(&self, pull: Pull, to: u64, marks: &Marks) -> Result<Option<Launched>> {
        let begin = marks.traced.as_ref().map(|(_, begin)| &**begin);
        self.queue_transfer(pull.range, to, begin, &marks.copied)?;
        if !self.words_elsewhere {
            self.queue_look(&marks.seen, &self.hash, ShardId(0))?;
        }
        let launched = match pull.hash {
            Some(block) => self.queue_hash(pull.range, block)?,
            None => None,
        };
        marks.end.record(&self.hash)?;
        Ok(launched)
    }

    fn pace(&self) -> MutexGuard<'_, Pace> {
        self.pace.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn traced(&self) -> Option<Arc<Trace>> {
        self.trace.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// What a pull's work is marked with.
    fn marks(&self) -> Result<Marks> {
        let context = self.context();
        let seen = self.looks.slot(context)?;
        if let Some(trace) = self.traced() {
            let (copied, end) = (trace.event(context)?, trace.event(context)?);
            let begin = trace.event(context)?;
            return Ok(Marks { seen, copied, end, traced: Some((trace, begin)) });
        }
        let event = || self.events.take(|_| true, || Event::new(context));
        Ok(Marks { seen, copied: event()?, end: event()?, traced: None })
    }
}

#[async_trait]
impl Mover for CudaMover {
    fn generation(&self) -> Generation {
        self.hop.import.generation()
    }

    async fn observe(&self, shard: ShardId, at_least: u64, wait: Duration) -> Result<Observed> {
        let began = Instant::now();
        let until = began.checked_add(wait);
        loop {
            // Before the look, so that the last word of a source that has just died counts.
            let alive = self.hop.alive.check();
            let looked = Instant::now();
            let (seen, pause) = match self.hop.words(shard)? {
                Some(seen) => (seen, Duration::ZERO),
                None => (self.look(shard).await?, HOT_PAUSE),
            };
            if let Some(answer) = self.hop.answer(seen, at_least, alive) {
                return answer;
            }
            if until.is_some_and(|until| Instant::now() >= until) {
                return Ok(seen);
            }
            if began.elapsed() >= self.hop.config.hot {
                break;
            }
            while looked.elapsed() < pause {
                tokio::task::yield_now().await;
            }
            tokio::task::yield_now().await;
        }
        let watch = Watch::new(Arc::clone(&self.hop), shard, at_least, until);
        let _ends_with_us = watch.guard();
        blocking(move || watch.run()).await?
    }

    fn start(&self, pull: Pull) -> Result<Box<dyn InFlight>> {
        let hop = &self.hop;
        if let Some(lost) = hop.context().lost() {
            return Err(lost);
        }
        if let Some(block) = pull.hash {
            hash::check_blocks(hop.into.payload(), pull.range, block)?;
        }
        let to = hop.into.inside("pull", pull.range)?;
        let claim = hop.into.claim(pull.range)?;
        let started = Instant::now();
        if pull.range.is_empty() {
            return Ok(Box::new(CudaInFlight::new(UnderWay::empty())));
        }
        let marks = hop.marks()?;
        let mut fence = Fence::new(Arc::clone(hop), claim);
        let queued = hop.queue(pull, to, &marks);
        fence.holds(marks, queued.is_ok());
        let under_way = UnderWay::new(Job { started, fence, pull, queued });
        if self.jobs.send(Arc::clone(&under_way)).is_err() {
            // The thread is gone: wait here rather than let go of memory that is being written.
            under_way.finish_here();
        }
        Ok(Box::new(CudaInFlight::new(under_way)))
    }
}

impl CudaMover {
    /// One look, some 10 µs; on the caller's own thread as long as the link is quick to answer.
    async fn look(&self, shard: ShardId) -> Result<Observed> {
        let began = Instant::now();
        let mut look = self.hop.look(shard)?;
        loop {
            look = match look.poll()? {
                Ok(seen) => return Ok(seen),
                Err(late) if began.elapsed() >= LATE => return blocking(move || late.wait()).await?,
                Err(late) => late,
            };
            tokio::task::yield_now().await;
        }
    }
}

/// Runs what may block on a thread that may.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|_| Error::new(Kind::Cancelled, "observe", "the runtime ended under the look"))
}

impl Hop {
    /// What one look means to who waits for `at_least`; `None`: go on looking.
    fn answer(&self, seen: Observed, at_least: u64, alive: Result<()>) -> Option<Result<Observed>> {
        if seen.generation != Some(self.import.generation()) || seen.progress >= at_least {
            return Some(Ok(seen));
        }
        alive.err().map(Err)
    }

    /// The source's words, where there is a shorter way to them than by the GPU.
    fn words(&self, shard: ShardId) -> Result<Option<Observed>> {
        if !self.words_elsewhere {
            return Ok(None);
        }
        if let Some(lost) = self.context().lost() {
            return Err(lost);
        }
        self.check_shard(shard)?;
        Ok(self.alive.words(shard))
    }

    /// The filling that the source holds after a pull that has landed; `None`: none, or another look is needed.
    fn generation_after(&self, seen: &Slot) -> Option<Generation> {
        if self.words_elsewhere {
            return self.alive.words(ShardId(0)).and_then(|seen| seen.generation);
        }
        seen.generation()
    }

    /// The digests of a pull that has landed.
    fn digests(&self, pull: Pull, launched: Option<Launched>) -> Result<Vec<BlockDigest>> {
        match (pull.hash, launched) {
            (None, _) => Ok(Vec::new()),
            (Some(_), Some(launched)) => Ok(launched.digests()),
            (Some(block), None) => self.into.digests_on_host(pull.range, block),
        }
    }
}

/// Words of the control block that a look reads.
pub(crate) const GENERATION: u64 = control::generation_offset();
