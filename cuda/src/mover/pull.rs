//! One pull that is under way, and who may let go of it.

use super::{Hop, Slot, Trace};
use crate::{
    hash::Launched,
    stream::{Event, Pooled},
};
use async_trait::async_trait;
use flashboot_core::{Error, InFlight, Kind, Landed, Pull, Result, claims::Claim};
use std::{
    num::NonZeroU64,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};
use tokio::sync::oneshot;

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
        Ok(Landed { digests: self.hop.digests(pull, launched)?, generation: marks.seen.generation() })
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

/// Linux wakes a sleeper up to 50 µs late unless the thread says that it minds.
pub(crate) fn sleep_exactly() {
    // Refused, it sleeps as others do.
    let _ = rustix::thread::set_current_timer_slack(NonZeroU64::new(1));
}

/// How fast a hop's pulls have been, so that its thread can sleep until shortly before the next one's end.
///
/// It expects no more than what was seen twice: a small pull says nothing of a large one (what it takes is not its bytes),
/// and one that was held up says nothing of the next.
#[derive(Debug, Default)]
pub(crate) struct Pace {
    last_end: Option<Instant>,
    /// Bytes of the last two pulls, and what they took.
    last: [(u64, Duration); 2],
}

impl Pace {
    /// When a pull's work can begin: one after the other.
    fn begins(&self, started: Instant) -> Instant {
        self.last_end.map_or(started, |end| end.max(started))
    }

    /// How long nothing will happen, from `now` on, for a pull of `len` bytes that started at `started`.
    fn idle(&self, started: Instant, len: u64, spin: Duration, now: Instant) -> Duration {
        // Rather too early than too late; the timer is 50 µs late as well.
        let likely =
            |(seen, took): (u64, Duration)| took.mul_f64(0.9 * (len as f64 / seen.max(1) as f64).min(1.0));
        let takes = self.last.map(likely).into_iter().min().unwrap_or_default();
        (self.begins(started) + takes).saturating_duration_since(now + spin / 2)
    }

    fn ended(&mut self, started: Instant, len: u64, now: Instant) {
        let took = now.saturating_duration_since(self.begins(started));
        self.last = [(len, took), self.last[0]];
        self.last_end = Some(now);
    }
}

/// A pull as the hop's thread has it.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) started: Instant,
    pub(crate) fence: Fence,
    pub(crate) pull: Pull,
    pub(crate) queued: Result<Option<Launched>>,
    pub(crate) tell: oneshot::Sender<Result<Landed>>,
}

impl Job {
    /// Waits, hashes through the host where the kernel did not, gives the range back, and then tells.
    pub(crate) fn finish(self, pace: &mut Pace) {
        let Self { started, mut fence, pull, queued, tell } = self;
        let idle = pace.idle(started, pull.range.len(), fence.hop.config.spin, Instant::now());
        if idle > SHORTEST_SLEEP {
            thread::sleep(idle);
        }
        let waited = fence.wait();
        pace.ended(started, pull.range.len(), Instant::now());
        // A failure to queue is the cause of whatever came after it.
        let result = match (queued, waited) {
            (Err(e), _) | (Ok(_), Err(e)) => Err(e),
            (Ok(launched), Ok(())) => fence.landed(pull, launched),
        };
        drop(fence);
        // Nobody may be left to hear it.
        let _ = tell.send(result);
    }
}

/// The caller's end of a pull. A copy that the GPU has begun cannot be stopped, so cancelling changes nothing: it
/// lands, soon.
#[derive(Debug)]
pub(crate) struct CudaInFlight {
    result: oneshot::Receiver<Result<Landed>>,
    told: Option<Result<Landed>>,
}

impl CudaInFlight {
    pub(crate) fn new(result: oneshot::Receiver<Result<Landed>>) -> Self {
        Self { result, told: None }
    }
}

#[async_trait]
impl InFlight for CudaInFlight {
    fn cancel(&self) {}

    async fn quiesced(&mut self) -> Result<Landed> {
        if let Some(told) = &self.told {
            return told.clone();
        }
        let told = (&mut self.result).await.unwrap_or_else(|_| {
            // `Fence` has waited before the sender went.
            Err(Error::new(Kind::Cancelled, "pull", "the hop's thread ended before the pull"))
        });
        self.told = Some(told.clone());
        told
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hop_sleeps_until_shortly_before_the_end_it_expects() {
        let mut pace = Pace::default();
        let zero = Instant::now();
        let at = |us| zero + Duration::from_micros(us);
        let spin = Duration::from_micros(200);
        assert_eq!(pace.idle(at(0), 1000, spin, at(0)), Duration::ZERO, "nothing is known yet");
        pace.ended(at(0), 1000, at(1000));
        assert_eq!(pace.idle(at(500), 1000, spin, at(1000)), Duration::ZERO, "one may have been held up");
        pace.ended(at(500), 1000, at(2000));
        assert_eq!(pace.idle(at(1500), 1000, spin, at(2000)), Duration::from_micros(800));
        assert_eq!(pace.idle(at(1500), 500, spin, at(2000)), Duration::from_micros(350));
        assert_eq!(pace.idle(at(1500), 1000, spin, at(2900)), Duration::ZERO);
        assert_eq!(pace.idle(at(3000), 1000, spin, at(3000)), Duration::from_micros(800));
    }

    #[test]
    fn a_pull_of_five_bytes_says_nothing_of_one_of_a_gigabyte() {
        let mut pace = Pace::default();
        let zero = Instant::now();
        let at = |us| zero + Duration::from_micros(us);
        pace.ended(at(0), 5, at(25));
        pace.ended(at(0), 5, at(50));
        let idle = pace.idle(at(50), 1 << 30, Duration::from_micros(200), at(50));
        assert!(idle < Duration::from_micros(25), "{idle:?}");
    }
}
