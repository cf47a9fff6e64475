//! Into host memory: in place, where it is ours.

use super::{FillConfig, Filling, Phase, Phases, Producer, hashing::Hashing, workers::Queue};
use crate::io::Lane;
use flashboot_core::{Arena, BlockDigest, ByteRange, Result};
use flashboot_memory::{Buffer, HostArena};
use std::{any::Any, sync::Arc, time::Duration, time::Instant};

pub(super) fn fill(
    filling: &Filling,
    producer: &dyn Producer,
    config: &FillConfig,
    phases: &Phases,
) -> Result<u64> {
    let any: Arc<dyn Any + Send + Sync> = Arc::<dyn Arena>::clone(filling.arena());
    let own = any.downcast::<HostArena>().ok();
    let units = filling.units(1);
    let threads = config.threads.clamp(1, units.len().max(1));
    let queue = Queue::new(&units);
    queue.run(threads, |queue| {
        let mut lane = config.io.lane();
        let mut bounce = None;
        while let Some(unit) = queue.take() {
            let took = match &own {
                Some(arena) => {
                    let mut owned = arena.own(unit)?;
                    let made = one(filling, producer, &mut lane, unit, owned.as_mut_slice())?;
                    // The bytes are whoever's may read them once they are marked.
                    drop(owned);
                    made
                }
                // Memory of another kind takes copies only.
                None => {
                    let bounce = match &mut bounce {
                        Some(bounce) => bounce,
                        none => {
                            none.insert(Buffer::new(usize::try_from(filling.block()).unwrap_or(usize::MAX))?)
                        }
                    };
                    let len = usize::try_from(unit.len()).unwrap_or(usize::MAX);
                    let bytes = bounce.as_mut_slice().get_mut(..len).unwrap_or_default();
                    let made = one(filling, producer, &mut lane, unit, bytes)?;
                    filling.arena().copy_in(unit.start, bytes)?;
                    made
                }
            };
            let began = Instant::now();
            match &took.found {
                Some(found) => filling.verified(unit.start / filling.block(), found).map(drop)?,
                None => filling.written(unit)?,
            }
            phases.add_share(Phase::Read, took.reading, threads);
            phases.add_share(Phase::Verify, took.verifying + began.elapsed(), threads);
        }
        Ok(())
    })?;
    Ok(units.iter().map(|range| range.len()).sum())
}

/// A unit that was produced: the values of its blocks, where they are to be compared, and what it took.
struct Made {
    found: Option<Vec<BlockDigest>>,
    reading: Duration,
    verifying: Duration,
}

fn one(
    filling: &Filling,
    producer: &dyn Producer,
    lane: &mut Lane,
    unit: ByteRange,
    bytes: &mut [u8],
) -> Result<Made> {
    let began = Instant::now();
    let mut verifying = Duration::ZERO;
    let Some(digests) = filling.digests()? else {
        producer.produce(lane, unit, bytes, &mut |_, _| Ok(()))?;
        return Ok(Made { found: None, reading: began.elapsed(), verifying });
    };
    let mut hashing = Hashing::new(digests, unit);
    producer.produce(lane, unit, bytes, &mut |at, piece| {
        let began = Instant::now();
        hashing.piece(at, piece);
        verifying += began.elapsed();
        Ok(())
    })?;
    let hashed = Instant::now();
    let found = Some(hashing.end(bytes)?);
    verifying += hashed.elapsed();
    Ok(Made { found, reading: began.elapsed().saturating_sub(verifying), verifying })
}
