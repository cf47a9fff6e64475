//! Into a GPU's memory: through pinned windows, two a thread, on two streams; verified on the GPU.

use super::{FillConfig, Filling, Phase, Phases, Producer, workers::Queue};
use crate::{budget::Permit, io::Lane};
use flashboot_core::{ByteRange, Error, Kind, Result};
use flashboot_cuda::{CudaArena, HostBytes, Pinned, Stream, Upload};
use flashboot_memory::near::prefer_near;
use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Instant,
};

/// What windows are multiples of: whatever a file's direct reads are aligned to.
const GRAIN: u64 = 64 << 10;
/// Windows of one thread: one is filled while the other is copied.
const WINDOWS: usize = 2;

pub(super) fn fill(
    filling: &Filling,
    arena: &Arc<CudaArena>,
    producer: &dyn Producer,
    config: &FillConfig,
    phases: &Phases,
) -> Result<u64> {
    let window = (config.window.0 / GRAIN).max(1).saturating_mul(GRAIN).max(producer.at_least());
    let units = filling.units((window / filling.block()).max(1));
    let window = units.iter().map(|range| range.len()).max().unwrap_or(0).min(window);
    // As many threads as the budget has windows for; one always works.
    let affordable = config.budget.limit() / window.saturating_mul(WINDOWS as u64).max(1);
    let affordable = usize::try_from(affordable).unwrap_or(usize::MAX);
    let threads = config.threads.min(affordable).min(units.len()).max(1);
    let streams = [Arc::new(Stream::new(arena.context())?), Arc::new(Stream::new(arena.context())?)];
    let turn = AtomicUsize::new(0);
    let queue = Queue::new(&units);
    queue.run(threads, |queue| {
        let mine = turn.fetch_add(1, Ordering::Relaxed);
        // Windows are taken on this thread: near the GPU that reads them.
        let _near = prefer_near(arena.context().device().numa_node());
        let Some(stream) = streams.get(mine % streams.len()) else { return Ok(()) };
        let mut worker = Worker {
            filling,
            arena,
            config,
            phases,
            threads,
            stream,
            window,
            lane: config.io.lane(),
            idle: Vec::new(),
            flying: VecDeque::new(),
            made: 0,
            permit: None,
        };
        worker.work(queue, producer)
    })?;
    Ok(units.iter().map(|range| range.len()).sum())
}

struct Worker<'w> {
    filling: &'w Filling,
    arena: &'w Arc<CudaArena>,
    config: &'w FillConfig,
    phases: &'w Phases,
    threads: usize,
    stream: &'w Arc<Stream>,
    window: u64,
    lane: Lane,
    idle: Vec<Arc<Pinned>>,
    /// Copies under way, the oldest first, each with its window; and the unit that is all there after it.
    flying: VecDeque<(Upload, Arc<Pinned>, Option<ByteRange>)>,
    made: usize,
    permit: Option<Permit>,
}

impl Worker<'_> {
    fn work(&mut self, queue: &Queue<'_>, producer: &dyn Producer) -> Result<()> {
        while let Some(unit) = queue.take() {
            let mut start = unit.start;
            while start < unit.end {
                let piece = ByteRange::new(start, start.saturating_add(self.window).min(unit.end));
                let mut window = self.window()?;
                let began = Instant::now();
                let len = usize::try_from(piece.len()).unwrap_or(usize::MAX);
                let busy = || Error::new(Kind::Busy, "load", "a window is still being copied");
                let bytes = Arc::get_mut(&mut window).ok_or_else(busy)?.as_mut_slice();
                let bytes = bytes.get_mut(..len).ok_or_else(busy)?;
                producer.produce(&mut self.lane, piece, bytes, &mut |_, _| Ok(()))?;
                self.phases.add_share(Phase::Read, began.elapsed(), self.threads);
                let from = HostBytes::Pinned(Arc::clone(&window));
                let upload = self.arena.upload(self.stream, piece.start, &from, 0, len)?;
                self.flying.push_back((upload, window, (piece.end == unit.end).then_some(unit)));
                start = piece.end;
            }
        }
        while !self.flying.is_empty() {
            self.land()?;
        }
        let began = Instant::now();
        self.idle.clear();
        self.phases.add_share(Phase::Unpin, began.elapsed(), self.threads);
        Ok(())
    }

    /// A window to fill: an idle one, a new one, or the next that lands.
    fn window(&mut self) -> Result<Arc<Pinned>> {
        if let Some(window) = self.idle.pop() {
            return Ok(window);
        }
        if self.made < WINDOWS {
            if self.permit.is_none() {
                let both = self.window.saturating_mul(WINDOWS as u64);
                self.permit = Some(self.config.budget.acquire(both, self.config.patience)?);
            }
            self.made += 1;
            let began = Instant::now();
            let len = usize::try_from(self.window).unwrap_or(usize::MAX);
            let window = Arc::new(Pinned::new(self.arena.context(), len)?);
            self.phases.add_share(Phase::Pin, began.elapsed(), self.threads);
            return Ok(window);
        }
        self.land()?;
        self.idle.pop().ok_or_else(|| Error::new(Kind::Busy, "load", "no window is left"))
    }

    /// Waits for the oldest copy, and verifies the unit that it completes: copies of one thread land in order.
    fn land(&mut self) -> Result<()> {
        let Some((upload, window, unit)) = self.flying.pop_front() else { return Ok(()) };
        let began = Instant::now();
        upload.wait()?;
        self.phases.add_share(Phase::H2d, began.elapsed(), self.threads);
        self.idle.push(window);
        let began = Instant::now();
        if let Some(unit) = unit {
            verify(self.filling, self.arena, unit)?;
            self.phases.add_share(Phase::Verify, began.elapsed(), self.threads);
        }
        Ok(())
    }
}

/// Compares what landed in `unit`, whole blocks, on the GPU, and marks it.
///
/// # Errors
/// [`Kind::Corrupt`](flashboot_core::Kind::Corrupt) naming the first block that is wrong; the driver's.
pub fn verify(filling: &Filling, arena: &CudaArena, unit: ByteRange) -> Result<()> {
    if !filling.is_proved() {
        return filling.written(unit);
    }
    // Known before anything is hashed: until then the GPU has only copies to do.
    filling.digests()?;
    let found = arena.digests(unit, filling.block())?;
    filling.verified(unit.start / filling.block(), &found).map(drop).map_err(|e| {
        let on_gpu = Error::new(e.kind(), e.op(), format!("{} on the GPU", e.detail()));
        match e.chunk() {
            Some(block) => on_gpu.with_chunk(block),
            None => on_gpu,
        }
    })
}
