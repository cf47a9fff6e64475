//! When a hop's copies and hashes ran, by events of the GPU, on the clock that all processes of the host share: for
//! benches, which ask how long a copy engine stood still. A hop that is not traced pays nothing.

use crate::{
    Context,
    stream::{Event, Pool, Pooled, Stream},
};
use flashboot_core::{ByteRange, Result};
use rustix::time::{ClockId, clock_gettime};
use std::{
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

/// Ties to the clock that are tried; the quickest counts.
const TRIES: u32 = 20;
/// How long one tie may be asked for without a pause.
const TIE: Duration = Duration::from_millis(1);

/// One pull's work, in `CLOCK_MONOTONIC`; good to some 5 µs between processes, to 1 µs within one hop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// The bytes.
    pub range: ByteRange,
    /// The copy began.
    pub copy_begin: Duration,
    /// The copy ended.
    pub copy_end: Duration,
    /// The hash ended, where there was one, and the look at the source.
    pub end: Duration,
}

/// The spans of one hop so far.
#[derive(Debug)]
pub(super) struct Trace {
    /// The GPU's time counts from here.
    zero: Event,
    /// The same moment on the host's clock.
    at: Duration,
    spans: Mutex<Vec<Span>>,
    events: Pool<Event>,
}

impl Trace {
    /// Ties `stream`'s time to the host's. The stream should be idle.
    pub(super) fn begin(context: &Context, stream: &Stream) -> Result<Self> {
        let mut best: Option<(Duration, Event, Duration)> = None;
        for _ in 0..TRIES {
            let zero = Event::timed(context)?;
            let (before, began) = (monotonic(), Instant::now());
            zero.record(stream)?;
            zero.wait(TIE)?;
            let took = began.elapsed();
            if best.as_ref().is_none_or(|(quickest, ..)| took < *quickest) {
                best = Some((took, zero, before + took / 2));
            }
        }
        let (zero, at) = match best {
            Some((_, zero, at)) => (zero, at),
            None => (Event::timed(context)?, monotonic()),
        };
        Ok(Self { zero, at, spans: Mutex::default(), events: Pool::default() })
    }

    pub(super) fn event(&self, context: &Context) -> Result<Pooled<Event>> {
        self.events.take(|_| true, || Event::timed(context))
    }

    /// Notes a pull whose marks the GPU has passed.
    pub(super) fn note(&self, range: ByteRange, begin: &Event, copied: &Event, end: &Event) -> Result<()> {
        let at = |event: &Event| event.elapsed_since(&self.zero).map(|since| self.at + since);
        let span = Span { range, copy_begin: at(begin)?, copy_end: at(copied)?, end: at(end)? };
        self.spans.lock().unwrap_or_else(PoisonError::into_inner).push(span);
        Ok(())
    }

    /// Takes what was noted.
    pub(super) fn take(&self) -> Vec<Span> {
        std::mem::take(&mut *self.spans.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

fn monotonic() -> Duration {
    let now = clock_gettime(ClockId::Monotonic);
    // Neither part of this clock is ever negative.
    Duration::new(u64::try_from(now.tv_sec).unwrap_or(0), u32::try_from(now.tv_nsec).unwrap_or(0))
}
