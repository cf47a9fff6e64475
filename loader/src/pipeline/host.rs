//! Into host memory: in place.

use super::{FillConfig, Filling, Phase, Phases, Producer, hashing::Hashing, workers::Queue};
use crate::io::Lane;
use flashboot_core::{Arena, ByteRange, Error, Kind, Result};
use flashboot_memory::HostArena;
use std::{any::Any, sync::Arc, time::Duration, time::Instant};

pub(super) fn fill(
    filling: &Filling,
    producer: &dyn Producer,
    config: &FillConfig,
    phases: &Phases,
) -> Result<u64> {
    let any: Arc<dyn Any + Send + Sync> = Arc::<dyn Arena>::clone(filling.arena());
    let arena = any.downcast::<HostArena>().map_err(|_| {
        Error::new(Kind::Invalid, "load", "the arena's memory is neither this host's nor a GPU's")
    })?;
    let units = filling.units(1);
    let threads = config.threads.clamp(1, units.len().max(1));
    let queue = Queue::new(&units);
    queue.run(threads, |queue| {
        let mut lane = config.io.lane();
        while let Some(unit) = queue.take() {
            let took = one(filling, &arena, producer, &mut lane, unit)?;
            phases.add_share(Phase::Read, took.0, threads);
            phases.add_share(Phase::Verify, took.1, threads);
        }
        Ok(())
    })?;
    Ok(units.iter().map(|range| range.len()).sum())
}

/// What reading and what verifying took.
fn one(
    filling: &Filling,
    arena: &HostArena,
    producer: &dyn Producer,
    lane: &mut Lane,
    unit: ByteRange,
) -> Result<(Duration, Duration)> {
    let mut owned = arena.own(unit)?;
    let bytes = owned.as_mut_slice();
    let began = Instant::now();
    let mut verifying = Duration::ZERO;
    let Some(digests) = filling.digests() else {
        producer.produce(lane, unit, bytes, &mut |_, _| Ok(()))?;
        filling.written(unit)?;
        return Ok((began.elapsed(), verifying));
    };
    let mut hashing = Hashing::new(digests, unit);
    producer.produce(lane, unit, bytes, &mut |at, piece| {
        let began = Instant::now();
        hashing.piece(at, piece);
        verifying += began.elapsed();
        Ok(())
    })?;
    let hashed = Instant::now();
    let found = hashing.end(bytes)?;
    // The bytes are whoever's may read them once they are marked.
    drop(owned);
    filling.verified(unit.start / filling.block(), &found)?;
    verifying += hashed.elapsed();
    Ok((began.elapsed().saturating_sub(verifying), verifying))
}
