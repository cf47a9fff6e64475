//! Streams and events: a queue and a worker each; late, in order within a stream, in any order between two.

use crate::{
    abi::code,
    loud,
    work::{Action, Marker, Touch, Work},
    world::{State, World, fresh},
};
use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Arc, MutexGuard},
    thread,
    time::Duration,
};

/// The streams and events.
#[derive(Debug, Default)]
pub(crate) struct Streams {
    streams: BTreeMap<u64, Stream>,
    events: BTreeMap<u64, Event>,
    /// The null stream of each context that used it.
    null: BTreeMap<usize, u64>,
    /// Contexts beyond use, and what poisoned them.
    poisoned: BTreeMap<usize, u32>,
    made: u64,
}

#[derive(Debug)]
struct Stream {
    context: usize,
    queue: VecDeque<Arc<Work>>,
    /// The front is being done: it cannot be abandoned, and touches memory until it is over.
    running: bool,
    /// Destroyed: the worker ends with the queue (row `stream-destroy-pending`).
    closing: bool,
}

#[derive(Debug)]
struct Event {
    context: usize,
    timed: bool,
    recorded: Option<Arc<Marker>>,
}

/// Pseudo-random numbers from a seed and a position (SplitMix64).
fn noise(seed: u64, stream: u64, step: u64) -> u64 {
    let mut z = seed
        .wrapping_add(stream.wrapping_mul(0x9E37_79B9_7F4A_7C15))
        .wrapping_add(step.wrapping_mul(0xD1B5_4A32_D192_ED03))
        .wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// How long the step waits: always where the stream was idle, now and then where it was busy.
fn delay(world: &World, stream: u64, step: u64, was_idle: bool) -> Duration {
    let number = noise(world.config.seed, stream, step);
    if !was_idle && !number.is_multiple_of(8) {
        return Duration::ZERO;
    }
    let longest = world.config.late_us;
    Duration::from_micros(longest / 10 + (number >> 8) % longest.max(1))
}

/// Ends the process where a worker ends in a panic: everyone would wait for it for ever.
struct Alive;

impl Drop for Alive {
    fn drop(&mut self) {
        if thread::panicking() {
            loud::stop("a stream's worker panicked");
        }
    }
}

fn labour(world: &'static World, name: u64, number: u64) {
    let _alive = Alive;
    let mut was_idle = true;
    let mut step = 0;
    loop {
        let mut state = world.state();
        let (work, context) = loop {
            let Some(stream) = state.streams.streams.get(&name) else { return };
            if let Some(work) = stream.queue.front() {
                break (Arc::clone(work), stream.context);
            }
            if stream.closing {
                state.streams.streams.remove(&name);
                return;
            }
            was_idle = true;
            state = world.wait(state);
        };
        drop(state);
        thread::sleep(delay(world, number, step, was_idle));
        was_idle = false;
        step += 1;
        let mut state = world.state();
        if let Action::Wait(marker) = &work.action {
            while marker.done().is_none() && !state.streams.is_abandoned(name, &work) {
                state = world.wait(state);
            }
        }
        if !state.streams.begin(name, &work) {
            continue;
        }
        drop(state);
        let done = work.run();
        let mut state = world.state();
        if let Some(stream) = state.streams.streams.get_mut(&name) {
            stream.running = false;
            stream.queue.pop_front();
        }
        if let Err(code) = done {
            state.poison(context, code);
        }
        world.changed.notify_all();
    }
}

impl Streams {
    /// The null stream, made when first used. It does not wait for other streams: a program that counts on it
    /// is wrong about non-blocking ones.
    fn null(&mut self, world: &'static World, context: usize) -> u64 {
        if let Some(name) = self.null.get(&context) {
            return *name;
        }
        let name = self.create(world, context);
        self.null.insert(context, name);
        name
    }

    /// A new stream and its worker.
    pub(crate) fn create(&mut self, world: &'static World, context: usize) -> u64 {
        let name = fresh();
        let number = self.made;
        self.made += 1;
        self.streams.insert(name, Stream { context, queue: VecDeque::new(), running: false, closing: false });
        let worker = thread::Builder::new().name(format!("cuda-sim-{number}"));
        if worker.spawn(move || labour(world, name, number)).is_err() {
            loud::stop("no thread for a stream");
        }
        name
    }

    /// The stream that a call names, which must be of the current context. The driver would take others too (row
    /// `stream-of-other-device`).
    fn find(&mut self, world: &'static World, context: usize, name: u64) -> Result<u64, u32> {
        let name = if name == 0 { self.null(world, context) } else { name };
        match self.streams.get(&name) {
            Some(stream) if !stream.closing => {
                if stream.context == context {
                    Ok(name)
                } else {
                    Err(code::INVALID_HANDLE)
                }
            }
            _ => loud::stop(&format!("{name:#x} is no stream, or one that was destroyed")),
        }
    }

    /// Queues work. A context that was poisoned since the call began takes none: it would never be done.
    pub(crate) fn submit(
        &mut self,
        world: &'static World,
        context: usize,
        name: u64,
        work: Work,
    ) -> Result<Arc<Work>, u32> {
        let name = self.find(world, context, name)?;
        if let Some(code) = self.poisoned.get(&context) {
            return Err(*code);
        }
        let work = Arc::new(work);
        if let Some(stream) = self.streams.get_mut(&name) {
            stream.queue.push_back(Arc::clone(&work));
        }
        world.changed.notify_all();
        Ok(work)
    }

    /// Destroys a stream; its work still runs.
    pub(crate) fn destroy(&mut self, world: &'static World, context: usize, name: u64) -> Result<(), u32> {
        // Row `stream-null`.
        if name == 0 {
            return Err(code::INVALID_HANDLE);
        }
        let name = self.find(world, context, name)?;
        if let Some(stream) = self.streams.get_mut(&name) {
            stream.closing = true;
        }
        world.changed.notify_all();
        Ok(())
    }

    /// Pending work that needs something, in words.
    pub(crate) fn pending(&self, touch: &Touch) -> Option<&str> {
        let needs = |stream: &&Stream, work: &&Arc<Work>| match touch {
            Touch::Context(context) => stream.context == *context,
            touch => work.touches.contains(touch),
        };
        self.streams
            .values()
            .find_map(|stream| stream.queue.iter().find(|work| needs(&stream, work)))
            .map(|work| work.what.as_str())
    }

    /// What a poisoned context had queued never runs, but for what has begun. That ends soon: who takes memory away
    /// waits for it (`World::settled`), and is then answered as if nothing had been pending (row
    /// `poison-under-pending-copy`).
    pub(crate) fn abandon(&mut self, context: usize, code: u32) {
        self.poisoned.entry(context).or_insert(code);
        for stream in self.streams.values_mut().filter(|stream| stream.context == context) {
            stream.queue.truncate(usize::from(stream.running));
        }
    }

    /// Whether work of a poisoned context is still being done.
    pub(crate) fn is_dying(&self) -> bool {
        self.streams.values().any(|stream| stream.running && self.poisoned.contains_key(&stream.context))
    }

    /// Takes the front as begun; false when it was abandoned.
    fn begin(&mut self, name: u64, work: &Arc<Work>) -> bool {
        if self.is_abandoned(name, work) {
            return false;
        }
        self.streams.get_mut(&name).is_some_and(|stream| {
            stream.running = true;
            true
        })
    }

    /// Whether work is still to be done.
    pub(crate) fn is_queued(&self, work: &Arc<Work>) -> bool {
        self.streams.values().any(|stream| stream.queue.iter().any(|queued| Arc::ptr_eq(queued, work)))
    }

    fn is_abandoned(&self, name: u64, work: &Arc<Work>) -> bool {
        self.streams
            .get(&name)
            .and_then(|stream| stream.queue.front())
            .is_none_or(|front| !Arc::ptr_eq(front, work))
    }

    /// The context is gone.
    pub(crate) fn close_all(&mut self, context: usize) {
        for stream in self.streams.values_mut().filter(|stream| stream.context == context) {
            stream.closing = true;
        }
        self.events.retain(|_, event| event.context != context);
        self.null.remove(&context);
    }

    /// Row `event-flags`.
    pub(crate) fn event_create(&mut self, context: usize, flags: u32) -> Result<u64, u32> {
        match flags {
            0..=3 => {}
            6 | 7 => loud::stop("events between processes are not simulated"),
            _ => return Err(code::INVALID_VALUE),
        }
        let name = fresh();
        self.events.insert(name, Event { context, timed: flags & 2 == 0, recorded: None });
        Ok(name)
    }

    /// Row `event-null`; the driver does not notice one that was destroyed.
    fn event(&mut self, name: u64) -> Result<&mut Event, u32> {
        if name == 0 {
            return Err(code::INVALID_HANDLE);
        }
        let event = self.events.get_mut(&name);
        Ok(event.unwrap_or_else(|| loud::stop(&format!("{name:#x} is no event, or one that was destroyed"))))
    }

    /// Row `event-destroy-pending`: allowed.
    pub(crate) fn event_destroy(&mut self, name: u64) -> Result<(), u32> {
        self.event(name)?;
        self.events.remove(&name);
        Ok(())
    }

    /// `cuEventRecord` (row `stream-of-other-device`).
    pub(crate) fn record(
        &mut self,
        world: &'static World,
        context: usize,
        name: u64,
        stream: u64,
    ) -> Result<(), u32> {
        let event = self.event(name)?;
        if event.context != context {
            return Err(code::INVALID_HANDLE);
        }
        let marker = Arc::new(Marker::default());
        let action = Action::Record(Arc::clone(&marker));
        let work = Work { what: "cuEventRecord".into(), touches: Vec::new(), action };
        self.submit(world, context, stream, work)?;
        self.event(name)?.recorded = Some(marker);
        Ok(())
    }

    /// `cuStreamWaitEvent`: waits for the record that there is now (rows `wait-event-captures-record`,
    /// `event-never-recorded`).
    pub(crate) fn wait_event(
        &mut self,
        world: &'static World,
        context: usize,
        stream: u64,
        event: u64,
    ) -> Result<(), u32> {
        let recorded = self.event(event)?.recorded.clone();
        let Some(marker) = recorded else {
            return self.find(world, context, stream).map(drop);
        };
        let what = "cuStreamWaitEvent".into();
        let work = Work { what, touches: Vec::new(), action: Action::Wait(marker) };
        self.submit(world, context, stream, work).map(drop)
    }

    /// What `cuEventQuery` and `cuEventSynchronize` look at: `None` was never recorded.
    pub(crate) fn marker(&mut self, event: u64) -> Result<Option<Arc<Marker>>, u32> {
        Ok(self.event(event)?.recorded.clone())
    }

    /// Milliseconds between two (rows `event-elapsed`, `event-elapsed-pending`).
    pub(crate) fn elapsed(&mut self, start: u64, end: u64) -> Result<f32, u32> {
        let mut moment = |name| {
            let event = self.event(name)?;
            let marker = event.recorded.clone().filter(|_| event.timed).ok_or(code::INVALID_HANDLE)?;
            marker.done().ok_or(code::NOT_READY)
        };
        let (start, end) = (moment(start)?, moment(end)?);
        Ok(match end.checked_duration_since(start) {
            Some(after) => after.as_secs_f32() * 1000.0,
            None => -(start.duration_since(end).as_secs_f32() * 1000.0),
        })
    }

    fn all_idle(&self, context: usize) -> bool {
        self.streams.values().all(|stream| stream.context != context || stream.queue.is_empty())
    }

    fn is_idle(&self, name: u64) -> bool {
        self.streams.get(&name).is_none_or(|stream| stream.queue.is_empty())
    }
}

/// Waits until `ready`; the sticky code where the context is poisoned meanwhile.
pub(crate) fn wait_until(
    world: &'static World,
    context: usize,
    mut state: MutexGuard<'_, State>,
    ready: impl Fn(&State) -> bool,
) -> Result<(), u32> {
    loop {
        if let Some(code) = state.contexts.poisoned(context) {
            return Err(code);
        }
        if ready(&state) {
            return Ok(());
        }
        state = world.wait(state);
    }
}

/// `cuCtxSynchronize`.
pub(crate) fn synchronize_all(world: &'static World, context: usize) -> Result<(), u32> {
    wait_until(world, context, world.state(), |state| state.streams.all_idle(context))
}

/// `cuStreamSynchronize`.
pub(crate) fn synchronize(world: &'static World, context: usize, stream: u64) -> Result<(), u32> {
    let mut state = world.state();
    let name = state.streams.find(world, context, stream)?;
    wait_until(world, context, state, |state| state.streams.is_idle(name))
}
