//! One pull that is under way: who owns what until its end, who sees the end, and who may let go.

use super::{Hop, Slot, Trace};
use crate::{
    hash::Launched,
    stream::{Event, Pooled},
};
use async_trait::async_trait;
use flashboot_core::{Error, InFlight, Kind, Landed, Pull, Result, claims::Claim};
use std::{
    num::NonZeroU64,
    sync::{Arc, Mutex, PoisonError},
    thread,
    time::{Duration, Instant},
};
use tokio::sync::watch;

/// Where a pull's work ends.
#[derive(Debug)]
pub(crate) struct Marks {
    /// What the source's words were behind the copy.
    pub(super) seen: Pooled<Slot>,
    /// On the copy stream, for the hash stream to wait for.
    pub(super) copied: Pooled<Event>,
    /// After everything, on the hash stream.
    pub(super) end: Pooled<Event>,
    /// Before everything, where somebody wants to know.
    pub(super) traced: Option<(Arc<Trace>, Pooled<Event>)>,
}

/// What a pull owns, until the GPU has passed its last mark: the claim on the range, and by the hop both mappings.
/// Dropping it unwaited waits.
#[derive(Debug)]
pub(crate) struct Fence {
    /// Given up before `hop`.
    claim: Option<Claim>,
    hop: Arc<Hop>,
    /// The GPU may write to them.
    marks: Option<Marks>,
    /// Their end stands for everything queued; else the streams themselves are waited for.
    marked: bool,
    waited: bool,
}

impl Fence {
    pub(crate) fn new(hop: Arc<Hop>, claim: Claim) -> Self {
        Self { claim: Some(claim), hop, marks: None, marked: false, waited: false }
    }

    /// Keeps the marks of what was queued; `whole`: up to the last of them.
    pub(crate) fn holds(&mut self, marks: Marks, whole: bool) {
        self.marks = Some(marks);
        self.marked = whole;
    }

    /// Blocks until nothing of the pull will touch memory any more. An error that is not sticky leaves that
    /// unknown, so the streams are drained as well.
    fn wait(&mut self) -> Result<()> {
        self.waited = true;
        let marked = match &self.marks {
            Some(marks) if self.marked => marks.end.wait(self.hop.config.spin),
            _ => self.drain(),
        };
        marked.inspect_err(|_| {
            // After a sticky error the context runs nothing any more: quiet as well.
            let _ = self.drain();
        })
    }

    /// What came of a pull that the GPU has passed.
    fn landed(&self, pull: Pull, launched: Option<Launched>) -> Result<Landed> {
        let Some(marks) = &self.marks else { return Ok(Landed::default()) };
        if let Some((trace, begin)) = &marks.traced {
            trace.note(pull.range, begin, &marks.copied, &marks.end)?;
        }
        Ok(Landed {
            digests: self.hop.digests(pull, launched)?,
            generation: self.hop.generation_after(&marks.seen),
        })
    }

    fn drain(&self) -> Result<()> {
        let copy = self.hop.copy.synchronize();
        copy.and(self.hop.hash.synchronize())
    }
}

impl Drop for Fence {
    fn drop(&mut self) {
        if !self.waited {
            // Nobody asked: the result has no reader.
            let _ = self.wait();
        }
        drop(self.claim.take());
    }
}

/// A shorter sleep is not worth its two switches.
const SHORTEST_SLEEP: Duration = Duration::from_micros(10);
/// Between two questions of the hop's thread whether a pull has ended, whose caller asks more often.
const SHORTEST_PAUSE: Duration = Duration::from_micros(50);
const LONGEST_PAUSE: Duration = Duration::from_micros(500);
/// The least time for which a caller asks again and again, from shortly before the end that is expected.
const HOT: Duration = Duration::from_millis(2);

/// Linux wakes a sleeper up to 50 µs late unless the thread says that it minds.
pub(crate) fn sleep_exactly() {
    // Refused, it sleeps as others do.
    let _ = rustix::thread::set_current_timer_slack(NonZeroU64::new(1));
}

/// A pull's work and what it owns.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) started: Instant,
    pub(crate) fence: Fence,
    pub(crate) pull: Pull,
    pub(crate) queued: Result<Option<Launched>>,
}

impl Job {
    /// How long it is until the end is near, and the least that the whole is likely to take.
    fn expected(&self) -> (Duration, Duration) {
        let (hop, len) = (&self.fence.hop, self.pull.range.len());
        let pace = hop.pace();
        (pace.idle(self.started, len, hop.config.spin, Instant::now()), pace.takes(len))
    }

    /// Whether [`finish`](Self::finish) would not wait for the GPU.
    fn has_ended(&self) -> bool {
        match &self.fence.marks {
            // An error is for `finish` to tell.
            Some(marks) if self.fence.marked => marks.end.is_done().unwrap_or(true),
            _ => true,
        }
    }

    /// Whether [`finish`](Self::finish) is short once the GPU is done: it neither drains streams nor hashes through the
    /// host. The caller leaves others to the thread.
    fn is_for_caller(&self) -> bool {
        let hashed = |launched: &Option<Launched>| self.pull.hash.is_none() || launched.is_some();
        self.queued.as_ref().is_ok_and(hashed) && self.fence.marked
    }

    /// Whether the caller may finish it here and now.
    fn ends_soon(&self) -> bool {
        let passed = |marks: &Marks| matches!(marks.end.is_done(), Ok(true));
        self.is_for_caller() && self.fence.marks.as_ref().is_some_and(passed)
    }

    /// Waits, hashes through the host where the kernel did not, and gives the range back.
    fn finish(self) -> Result<Landed> {
        let Self { started, mut fence, pull, queued } = self;
        let waited = fence.wait();
        fence.hop.pace().ended(started, pull.range.len(), Instant::now());
        // A failure to queue is the cause of whatever came after it.
        match (queued, waited) {
            (Err(e), _) | (Ok(_), Err(e)) => Err(e),
            (Ok(launched), Ok(())) => fence.landed(pull, launched),
        }
    }
}

/// Where a pull is.
#[derive(Debug, Clone)]
enum State {
    /// Its end is not to be expected yet.
    Early,
    /// It may end at any moment: until then it is worth while to ask again and again.
    Near(Instant),
    Ended(Result<Landed>),
}

impl State {
    fn near(takes: Duration) -> Self {
        Self::Near(Instant::now() + HOT.max(6 * takes))
    }
}

/// A pull that the hop's thread and its caller both know: whoever sees its end first finishes it. The thread always
/// does, in the end; the caller, near the end, is not kept waiting for a thread to wake another up.
#[derive(Debug)]
pub(crate) struct UnderWay {
    /// Until somebody finishes it.
    job: Mutex<Option<Job>>,
    state: watch::Sender<State>,
}

impl UnderWay {
    pub(crate) fn new(job: Job) -> Arc<Self> {
        let (idle, takes) = job.expected();
        let soon = idle <= SHORTEST_SLEEP && job.is_for_caller();
        let state = if soon { State::near(takes) } else { State::Early };
        Arc::new(Self { job: Mutex::new(Some(job)), state: watch::Sender::new(state) })
    }

    /// Of nothing: it has ended.
    pub(crate) fn empty() -> Arc<Self> {
        let ended = State::Ended(Ok(Landed::default()));
        Arc::new(Self { job: Mutex::default(), state: watch::Sender::new(ended) })
    }

    /// The hop's thread's part: sleeps until the end is near, says so, and sees it through.
    pub(crate) fn see_through(&self) {
        let expected = self.with(|job| (job.expected(), job.is_for_caller()));
        let Some(((idle, takes), for_caller)) = expected else { return };
        if idle > SHORTEST_SLEEP {
            thread::sleep(idle);
        }
        let near = Instant::now();
        self.state.send_if_modified(|state| {
            let early = for_caller && matches!(state, State::Early);
            if early {
                *state = State::near(takes);
            }
            early
        });
        // Ends when somebody has finished it.
        loop {
            // Two that ask one driver at once wait for each other: the caller goes first.
            let ended = self.with(|job| !self.is_attended() && job.has_ended());
            match ended {
                None => return,
                Some(true) => return self.finish(|_| true),
                Some(false) => thread::sleep((near.elapsed() / 256).clamp(SHORTEST_PAUSE, LONGEST_PAUSE)),
            }
        }
    }

    /// Whether the caller is there and asks.
    fn is_attended(&self) -> bool {
        let asks = matches!(*self.state.borrow(), State::Near(until) if Instant::now() < until);
        asks && self.state.receiver_count() > 0
    }

    /// Waits for the GPU, here and now.
    pub(crate) fn finish_here(&self) {
        self.finish(|_| true);
    }

    fn with<T>(&self, look: impl FnOnce(&Job) -> T) -> Option<T> {
        self.job.lock().unwrap_or_else(PoisonError::into_inner).as_ref().map(look)
    }

    fn finish(&self, may: impl FnOnce(&Job) -> bool) {
        let job = {
            let mut slot = self.job.lock().unwrap_or_else(PoisonError::into_inner);
            if slot.as_ref().is_some_and(may) { slot.take() } else { None }
        };
        if let Some(job) = job {
            self.state.send_replace(State::Ended(job.finish()));
        }
    }
}

/// The caller's end of a pull. A copy that the GPU has begun cannot be stopped, so cancelling changes nothing: it
/// lands, soon.
#[derive(Debug)]
pub(crate) struct CudaInFlight {
    under_way: Arc<UnderWay>,
    state: watch::Receiver<State>,
}

impl CudaInFlight {
    pub(crate) fn new(under_way: Arc<UnderWay>) -> Self {
        let state = under_way.state.subscribe();
        Self { under_way, state }
    }
}

#[async_trait]
impl InFlight for CudaInFlight {
    fn cancel(&self) {}

    async fn quiesced(&mut self) -> Result<Landed> {
        loop {
            let state = self.state.borrow_and_update().clone();
            match state {
                State::Ended(told) => return told,
                State::Near(until) if Instant::now() < until => {
                    self.under_way.finish(Job::ends_soon);
                    if !self.state.has_changed().unwrap_or(true) {
                        // Others on this runtime have their turn between two questions.
                        tokio::task::yield_now().await;
                    }
                    continue;
                }
                State::Early | State::Near(_) => {}
            }
            if self.state.changed().await.is_err() {
                // The sender is ours by `under_way`.
                return Err(Error::new(Kind::Cancelled, "pull", "the pull went unfinished"));
            }
        }
    }
}
