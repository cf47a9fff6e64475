//! From host memory that is full already into a GPU's: pinned segment by segment ahead of the copy, or pinned once for many
//! pushes; copied on two streams, and verified on the GPU by whoever has the digests. What a staged image takes.
//!
//! What was pinned for one push is unpinned by whoever gets its [`Leftover`]: the driver pins and unpins one at a time, so
//! unpinning behind the copy would hold up the pinning ahead of it.

use super::{FillConfig, Filling, Phase, Phases, gpu::verify};
use flashboot_core::{Arena as _, ByteRange, Error, Kind, Result};
use flashboot_cuda::{Context, CudaArena, HostBytes, Registered, Stream, Upload};
use flashboot_memory::{HostArena, ImportedArena};
use std::{
    collections::VecDeque,
    sync::{Arc, mpsc},
    thread,
    time::{Duration, Instant},
};

/// Bytes pinned at a time, and of one copy: from here on both run at their full rate.
pub(super) const SEGMENT: u64 = 256 << 20;
/// Segments pinned and not yet copied.
const AHEAD: usize = 2;
/// Threads that fill the page table of memory that is another's, ahead of the one that pins: one keeps pace with pinning
/// pages of 4 KiB, hardly.
const TOUCHERS: usize = 2;
/// Filling a page table takes milliseconds; whoever it takes longer leaves it to who pins.
const TOUCHING: Duration = Duration::from_secs(10);

/// Host memory that holds a whole payload.
#[derive(Debug, Clone)]
pub enum Full {
    /// An arena of this process.
    Own(Arc<HostArena>),
    /// Another process's, which this one may only read.
    Attached(Arc<ImportedArena>),
}

impl Full {
    fn payload(&self) -> u64 {
        match self {
            Self::Own(arena) => arena.payload(),
            Self::Attached(import) => import.payload(),
        }
    }

    fn pin(&self, context: &Context, unit: ByteRange) -> Result<Registered> {
        match self {
            Self::Own(arena) => Registered::arena(context, arena, unit),
            Self::Attached(import) => Registered::attached(context, import, unit),
        }
    }
}

/// What a push has pinned. Dropping it unpins: about 20 ms a GiB.
#[derive(Debug, Default)]
#[must_use = "dropping it unpins, which takes time"]
pub struct Leftover(Vec<Arc<Registered>>);

impl Leftover {
    /// Unpins, and adds what that takes to `phases`.
    pub fn unpin(self, phases: &Phases) {
        phases.time(Phase::Unpin, || drop(self));
    }

    /// Registrations that are left.
    pub fn segments(&self) -> usize {
        self.0.len()
    }
}

/// A host arena that is pinned where it is, for as long as this lives: for many pushes, into any GPU.
#[derive(Debug)]
pub struct Pins {
    arena: Arc<HostArena>,
    segments: Vec<Arc<Registered>>,
}

impl Pins {
    /// Pins all of `arena`'s payload; blocks for about 40 ms a GiB of 4 KiB pages, 20 ms of huge ones.
    ///
    /// # Errors
    /// The driver's.
    pub fn new(context: &Context, arena: &Arc<HostArena>) -> Result<Self> {
        let mut segments = Vec::new();
        let mut start = 0;
        while start < arena.payload() {
            let end = start.saturating_add(SEGMENT).min(arena.payload());
            segments.push(Arc::new(Registered::arena(context, arena, ByteRange::new(start, end))?));
            start = end;
        }
        Ok(Self { arena: Arc::clone(arena), segments })
    }

    /// Bytes pinned.
    pub fn bytes(&self) -> u64 {
        self.arena.payload()
    }

    /// The registration that `unit` begins in, and where in it.
    fn of(&self, unit: ByteRange) -> Result<(Arc<Registered>, usize)> {
        let index = usize::try_from(unit.start / SEGMENT).unwrap_or(usize::MAX);
        let found = self.segments.get(index).map(Arc::clone);
        let found = found.ok_or_else(|| invalid(format!("bytes {unit} are past what is pinned")))?;
        Ok((found, usize::try_from(unit.start % SEGMENT).unwrap_or(usize::MAX)))
    }
}

fn invalid(what: String) -> Error {
    Error::new(Kind::Invalid, "push", what)
}

/// Copies what is missing of `filling`, whose arena is a GPU's, out of `staged`, which holds the same payload. Nothing of the
/// host's memory is copied within the host.
///
/// # Errors
/// [`Kind::Invalid`] for arenas of other kinds or lengths, [`Kind::Corrupt`] where what was staged is not what the digests
/// say, the driver's; what was verified stays marked.
pub fn push(
    filling: &Filling,
    staged: &Full,
    config: &FillConfig,
    phases: &Phases,
) -> Result<(u64, Leftover)> {
    let arena = into(filling, staged.payload())?;
    let blocks = (config.segment.0 / filling.block()).max(1);
    let units = filling.units(blocks);
    thread::scope(|scope| {
        let touched = match staged {
            Full::Own(_) => Vec::new(),
            Full::Attached(import) => touch(scope, import, &units),
        };
        let context = arena.context();
        let mut turn = 0_usize;
        let pin = move |unit| {
            if let Some(touched) = turn.checked_rem(touched.len()).and_then(|mine| touched.get(mine)) {
                // Where its thread has ended early, whoever pins faults the pages in.
                let _ = phases.time(Phase::IoWait, || touched.recv());
            }
            turn = turn.wrapping_add(1);
            Ok((Arc::new(staged.pin(context, unit)?), 0))
        };
        let mut kept = Leftover::default();
        let bytes = copy(filling, &arena, &units, pin, phases, &mut |_, pinned| {
            kept.0.push(pinned);
            Ok(())
        })?;
        Ok((bytes, kept))
    })
}

/// Fills the page table for `units`, in their order, on threads that take turns; each says when one is done.
fn touch<'s>(
    scope: &'s thread::Scope<'s, '_>,
    import: &Arc<ImportedArena>,
    units: &[ByteRange],
) -> Vec<mpsc::Receiver<()>> {
    let mut touched = Vec::new();
    for first in 0..TOUCHERS.min(units.len()) {
        let (done, receiver) = mpsc::channel();
        let units: Vec<_> = units.iter().skip(first).step_by(TOUCHERS).copied().collect();
        let import = Arc::clone(import);
        let spawned = thread::Builder::new().spawn_scoped(scope, move || {
            let deadline = Instant::now() + TOUCHING;
            let mut units = units.into_iter();
            // Until it takes too long, or nobody pins any more.
            while units
                .next()
                .is_some_and(|unit| import.populate_range(unit, deadline) && done.send(()).is_ok())
            {
            }
        });
        if spawned.is_err() {
            // Without them pinning is slower, no worse.
            return Vec::new();
        }
        touched.push(receiver);
    }
    touched
}

/// The same out of memory that is pinned already. `landed` hears of every range once it is in place and, where the filling has
/// digests, verified; its failure ends the push.
///
/// # Errors
/// As [`push`], and `landed`'s.
pub fn push_pinned(
    filling: &Filling,
    pins: &Pins,
    phases: &Phases,
    landed: &mut dyn FnMut(ByteRange) -> Result<()>,
) -> Result<u64> {
    let arena = into(filling, pins.bytes())?;
    // No copy crosses from one registration into the next.
    let units: Vec<_> = filling.units((SEGMENT / filling.block()).max(1)).into_iter().flat_map(cut).collect();
    copy(filling, &arena, &units, |unit| pins.of(unit), phases, &mut |unit, _| landed(unit))
}

/// `unit` where it meets multiples of [`SEGMENT`], which are whole blocks.
fn cut(unit: ByteRange) -> impl Iterator<Item = ByteRange> {
    let mut start = unit.start;
    std::iter::from_fn(move || {
        let end = (start / SEGMENT).saturating_add(1).saturating_mul(SEGMENT).min(unit.end);
        let part = (start < unit.end).then(|| ByteRange::new(start, end));
        start = end;
        part
    })
}

fn into(filling: &Filling, staged: u64) -> Result<Arc<CudaArena>> {
    let arena = CudaArena::from_arena(filling.arena())
        .ok_or_else(|| invalid("the arena to fill is not in a GPU's memory".into()))?;
    if staged != arena.payload() {
        return Err(invalid(format!("{staged} bytes are staged for an arena of {}", arena.payload())));
    }
    Ok(arena)
}

/// Copies `units`: `pin`, on a thread of its own, gives the registration of each and where in it the unit begins; `landed`
/// hears of each once it is in place and verified, and keeps the registration or does not.
fn copy(
    filling: &Filling,
    arena: &Arc<CudaArena>,
    units: &[ByteRange],
    mut pin: impl FnMut(ByteRange) -> Result<(Arc<Registered>, usize)> + Send,
    phases: &Phases,
    landed: &mut dyn FnMut(ByteRange, Arc<Registered>) -> Result<()>,
) -> Result<u64> {
    let streams = [Arc::new(Stream::new(arena.context())?), Arc::new(Stream::new(arena.context())?)];
    let (give, pinned) = mpsc::sync_channel::<Result<(ByteRange, Arc<Registered>, usize)>>(AHEAD - 1);
    thread::scope(|scope| {
        let pinner = move || {
            for unit in units {
                let began = Instant::now();
                let registered = pin(*unit);
                phases.add(Phase::Pin, began.elapsed());
                let failed = registered.is_err();
                // Nobody takes it any more: the copies have failed.
                if give.send(registered.map(|(registered, at)| (*unit, registered, at))).is_err() || failed {
                    break;
                }
            }
            drop(give);
        };
        let pinner = thread::Builder::new().spawn_scoped(scope, pinner);
        pinner.map_err(|e| Error::from_io("clone", &e, "a thread that pins"))?;
        let mut flying: VecDeque<(Upload, Arc<Registered>, ByteRange)> = VecDeque::new();
        let mut land = |flying: &mut VecDeque<(Upload, Arc<Registered>, ByteRange)>| -> Result<()> {
            let Some((upload, registered, unit)) = flying.pop_front() else { return Ok(()) };
            phases.time(Phase::H2d, || upload.wait())?;
            phases.time(Phase::Verify, || verify(filling, arena, unit))?;
            landed(unit, registered)
        };
        for (segment, stream) in pinned.into_iter().zip(streams.iter().cycle()) {
            let (unit, registered, at) = segment?;
            let len = usize::try_from(unit.len()).unwrap_or(usize::MAX);
            let from = HostBytes::Registered(Arc::clone(&registered));
            flying.push_back((arena.upload(stream, unit.start, &from, at, len)?, registered, unit));
            if flying.len() > AHEAD {
                land(&mut flying)?;
            }
        }
        while !flying.is_empty() {
            land(&mut flying)?;
        }
        Ok::<(), Error>(())
    })?;
    Ok(units.iter().map(|range| range.len()).sum())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_unit_is_cut_where_registrations_meet_and_nothing_is_lost() {
        for (start, end) in [(0, 1), (0, SEGMENT), (5, 2 * SEGMENT + 9), (SEGMENT - 1, SEGMENT + 1), (7, 7)] {
            let parts: Vec<_> = cut(ByteRange::new(start, end)).collect();
            assert_eq!(parts.iter().map(|part| part.len()).sum::<u64>(), end - start);
            for part in &parts {
                assert_eq!(part.start / SEGMENT, (part.end - 1) / SEGMENT, "{part}");
            }
            assert!(parts.windows(2).all(|two| two[0].end == two[1].start));
        }
    }
}
