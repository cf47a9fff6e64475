//! From host memory that is full already into a GPU's: pinned segment by segment ahead of the copy, or pinned once for many
//! pushes; copied on two streams, and verified on the GPU by whoever has the digests. What a staged image takes.

use super::{FillConfig, Filling, Phase, Phases, gpu::verify};
use flashboot_core::{Arena as _, ByteRange, Error, Kind, Result};
use flashboot_cuda::{Context, CudaArena, HostBytes, Registered, Stream, Upload};
use flashboot_memory::HostArena;
use std::{
    collections::VecDeque,
    sync::{Arc, mpsc},
    thread,
    time::Instant,
};

/// Bytes pinned at a time, and of one copy: from here on both run at their full rate.
const SEGMENT: u64 = 256 << 20;
/// Segments pinned and not yet copied.
const AHEAD: usize = 2;

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
pub fn push(filling: &Filling, staged: &Arc<HostArena>, config: &FillConfig, phases: &Phases) -> Result<u64> {
    let arena = into(filling, staged.payload())?;
    let blocks = (config.window.0.max(SEGMENT) / filling.block()).max(1);
    let pin = |unit| Ok((Arc::new(Registered::arena(arena.context(), staged, unit)?), 0));
    copy(filling, &arena, &filling.units(blocks), &pin, phases, &mut |_| Ok(()))
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
    copy(filling, &arena, &units, &|unit| pins.of(unit), phases, landed)
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

/// Gives the registration of a unit, and where in it the unit begins.
type Pin<'p> = dyn Fn(ByteRange) -> Result<(Arc<Registered>, usize)> + Sync + 'p;

fn copy(
    filling: &Filling,
    arena: &Arc<CudaArena>,
    units: &[ByteRange],
    pin: &Pin<'_>,
    phases: &Phases,
    landed: &mut dyn FnMut(ByteRange) -> Result<()>,
) -> Result<u64> {
    let streams = [Arc::new(Stream::new(arena.context())?), Arc::new(Stream::new(arena.context())?)];
    let (give, pinned) = mpsc::sync_channel::<Result<(ByteRange, Arc<Registered>, usize)>>(AHEAD - 1);
    thread::scope(|scope| {
        let pinner = || {
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
            phases.time(Phase::Unpin, || drop(registered));
            landed(unit)
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
