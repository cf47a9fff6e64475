//! Streams and events.

use crate::{
    Context,
    ops::{Call, Object, Ops},
};
use flashboot_core::Result;
use std::{
    ops::Deref,
    sync::{Arc, Mutex, PoisonError},
    thread,
    time::{Duration, Instant},
};

/// Between two questions whether an event is done.
const SHORTEST_PAUSE: Duration = Duration::from_micros(5);
const LONGEST_PAUSE: Duration = Duration::from_micros(500);

/// A queue of work on one GPU, independent of the default stream.
#[derive(Debug)]
pub struct Stream {
    context: Context,
    object: Object,
}

impl Stream {
    /// A new stream.
    pub fn new(context: &Context) -> Result<Self> {
        let object = context.call(|ops| ops.stream_create())?;
        Ok(Self { context: context.clone(), object })
    }

    /// Blocks until everything queued so far is done.
    pub fn synchronize(&self) -> Result<()> {
        self.context.call(|ops| ops.stream_synchronize(self.object))
    }

    pub(crate) fn object(&self) -> Object {
        self.object
    }

    pub(crate) fn context(&self) -> &Context {
        &self.context
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.context.end(|ops| ops.stream_destroy(self.object));
    }
}

/// A mark in a stream.
#[derive(Debug)]
pub struct Event {
    context: Context,
    object: Object,
}

impl Event {
    /// A mark without a time.
    pub fn new(context: &Context) -> Result<Self> {
        Self::make(context, false)
    }

    /// A mark that [`elapsed_since`](Self::elapsed_since) can be asked about.
    pub fn timed(context: &Context) -> Result<Self> {
        Self::make(context, true)
    }

    fn make(context: &Context, timing: bool) -> Result<Self> {
        let object = context.call(|ops| ops.event_create(timing))?;
        Ok(Self { context: context.clone(), object })
    }

    /// Marks what `stream` has queued so far.
    pub fn record(&self, stream: &Stream) -> Result<()> {
        self.context.call(|ops| self.record_with(ops, stream))
    }

    pub(crate) fn record_with(&self, ops: &dyn Ops, stream: &Stream) -> Call<()> {
        ops.event_record(self.object, stream.object)
    }

    /// Whether everything before the mark is done.
    pub fn is_done(&self) -> Result<bool> {
        self.context.call(|ops| ops.event_query(self.object))
    }

    /// Waits until everything before the mark is done: asks again and again for `spin`, then sleeps between two
    /// questions, longer the longer it has taken: an interrupt of the GPU would wake it up 50 to 100 µs late.
    pub fn wait(&self, spin: Duration) -> Result<()> {
        let began = Instant::now();
        self.context.call(|ops| {
            if self.spin_with(ops, spin)? {
                return Ok(());
            }
            while !ops.event_query(self.object)? {
                thread::sleep((began.elapsed() / 256).clamp(SHORTEST_PAUSE, LONGEST_PAUSE));
            }
            Ok(())
        })
    }

    /// Asks for at most `spin`; whether it is done.
    pub(crate) fn spin_with(&self, ops: &dyn Ops, spin: Duration) -> Call<bool> {
        let began = Instant::now();
        loop {
            if ops.event_query(self.object)? {
                return Ok(true);
            }
            if began.elapsed() >= spin {
                return Ok(false);
            }
            std::hint::spin_loop();
        }
    }

    /// Time from `start` to this mark; both [`timed`](Self::timed), and done.
    pub fn elapsed_since(&self, start: &Self) -> Result<Duration> {
        let ms = self.context.call(|ops| ops.event_elapsed_ms(start.object, self.object))?;
        Ok(Duration::try_from_secs_f64(f64::from(ms) / 1e3).unwrap_or_default())
    }

    pub(crate) fn object(&self) -> Object {
        self.object
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        self.context.end(|ops| ops.event_destroy(self.object));
    }
}

/// Things used again instead of made anew: events, buffers. Cloning shares the pool.
#[derive(Debug)]
pub(crate) struct Pool<T>(Arc<Mutex<Vec<T>>>);

impl<T> Clone for Pool<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<T> Default for Pool<T> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

impl<T> Pool<T> {
    /// One that `fits`, or a new one. Unfit ones are dropped.
    pub(crate) fn take(
        &self,
        fits: impl Fn(&T) -> bool,
        make: impl FnOnce() -> Result<T>,
    ) -> Result<Pooled<T>> {
        let found = loop {
            // A statement of its own: what is dropped is dropped without the lock.
            let next = self.0.lock().unwrap_or_else(PoisonError::into_inner).pop();
            match next {
                Some(unfit) if !fits(&unfit) => drop(unfit),
                found => break found,
            }
        };
        let value = found.map_or_else(make, Ok)?;
        Ok(Pooled { value: Some(value), pool: self.clone() })
    }
}

/// One taken from a [`Pool`]; dropping it gives it back, so it must be idle then.
#[derive(Debug)]
pub(crate) struct Pooled<T> {
    value: Option<T>,
    pool: Pool<T>,
}

impl<T> Deref for Pooled<T> {
    type Target = T;

    #[expect(clippy::expect_used, reason = "the value leaves in drop only")]
    fn deref(&self) -> &T {
        self.value.as_ref().expect("taken in drop only")
    }
}

impl<T> Drop for Pooled<T> {
    fn drop(&mut self) {
        if let Some(value) = self.value.take() {
            self.pool.0.lock().unwrap_or_else(PoisonError::into_inner).push(value);
        }
    }
}
