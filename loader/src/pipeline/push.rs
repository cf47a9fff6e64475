//! From host memory that is full already into a GPU's: pinned segment by segment ahead of the copy, copied on two streams,
//! verified on the GPU. What a staged image takes.

use super::{FillConfig, Filling, Phase, Phases, gpu::verify};
use flashboot_core::{Arena as _, ByteRange, Error, Kind, Result};
use flashboot_cuda::{CudaArena, HostBytes, Registered, Stream, Upload};
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

/// Copies what is missing of `filling`, whose arena is a GPU's, out of `staged`, which holds the same payload. Nothing of the
/// host's memory is copied within the host.
///
/// # Errors
/// [`Kind::Invalid`] for arenas of other kinds or lengths, [`Kind::Corrupt`] where what was staged is not what the digests
/// say, the driver's; what was verified stays marked.
pub fn push(filling: &Filling, staged: &Arc<HostArena>, config: &FillConfig, phases: &Phases) -> Result<u64> {
    let invalid = |what: String| Error::new(Kind::Invalid, "push", what);
    let arena = CudaArena::from_arena(filling.arena())
        .ok_or_else(|| invalid("the arena to fill is not in a GPU's memory".into()))?;
    if staged.payload() != arena.payload() {
        let (have, want) = (staged.payload(), arena.payload());
        return Err(invalid(format!("{have} bytes are staged for an arena of {want}")));
    }
    let blocks = (config.window.0.max(SEGMENT) / filling.block()).max(1);
    let units = filling.units(blocks);
    let streams = [Arc::new(Stream::new(arena.context())?), Arc::new(Stream::new(arena.context())?)];
    let (give, pinned) = mpsc::sync_channel::<Result<(ByteRange, Arc<Registered>)>>(AHEAD - 1);
    thread::scope(|scope| {
        let pin = || {
            for unit in &units {
                let began = Instant::now();
                let registered = Registered::arena(arena.context(), staged, *unit);
                phases.add(Phase::Pin, began.elapsed());
                let failed = registered.is_err();
                // Nobody takes it any more: the copies have failed.
                if give.send(registered.map(|registered| (*unit, Arc::new(registered)))).is_err() || failed {
                    break;
                }
            }
            drop(give);
        };
        let pinner = thread::Builder::new().spawn_scoped(scope, pin);
        pinner.map_err(|e| Error::from_io("clone", &e, "a thread that pins"))?;
        let mut flying: VecDeque<(Upload, Arc<Registered>, ByteRange)> = VecDeque::new();
        let land = |flying: &mut VecDeque<(Upload, Arc<Registered>, ByteRange)>| -> Result<()> {
            let Some((upload, registered, unit)) = flying.pop_front() else { return Ok(()) };
            phases.time(Phase::H2d, || upload.wait())?;
            phases.time(Phase::Verify, || verify(filling, &arena, unit))?;
            phases.time(Phase::Unpin, || drop(registered));
            Ok(())
        };
        for (segment, stream) in pinned.into_iter().zip(streams.iter().cycle()) {
            let (unit, registered) = segment?;
            let len = usize::try_from(unit.len()).unwrap_or(usize::MAX);
            let upload =
                arena.upload(stream, unit.start, &HostBytes::Registered(Arc::clone(&registered)), 0, len)?;
            flying.push_back((upload, registered, unit));
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
