//! The thread that fills: one arena at a time, in the ledger's order, so that a disk is read by one reader.

use super::{
    ledger::{Key, Place, State},
    store::Inner,
    thing::{Kept, Origin, Thing},
};
use crate::{
    io::{Each, Lane},
    pipeline::{self, Filling, Phases, Producer, push_pinned},
    source::{FileProducer, fill_from},
};
use flashboot_core::{Arena, ArenaSpec, ByteRange, Error, Generation, Kind, Result, ShardId};
use flashboot_cuda::{Context, CudaArena, CudaArenaConfig};
use flashboot_memory::{HostArena, near::prefer_near};
use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

/// The filler's own name where it uses what was staged.
const OWN: u64 = 0;

/// Until the agent stops.
pub(super) fn run(agent: &Inner) {
    while let Some(thing) = agent.next() {
        // What is staged to be pushed into one GPU lies near it, as far as there is room.
        let pin_for = agent.config.pin_for.as_ref().filter(|_| thing.key.place == Place::Host);
        let _near = pin_for.and_then(|device| prefer_near(device.numa_node()));
        // A defect here must not end the agent's only filler, nor leave its waiters waiting.
        let filled = catch_unwind(AssertUnwindSafe(|| fill(agent, &thing)));
        let filled = filled.unwrap_or_else(|_| {
            Err(Error::new(Kind::Io, "agent", "filling panicked: a defect of flashboot's"))
        });
        let ready = filled.is_ok();
        agent.decide(&thing, filled);
        if let (true, Place::Host, Some(device)) = (ready, &thing.key.place, &agent.config.pin_for) {
            let pinned = agent.gpu(device.uuid()).and_then(|context| thing.pins(&context));
            if let Err(error) = pinned {
                tracing::warn!(%error, "not pinned: the first push tries again");
            }
        }
    }
}

/// Stops producing once it is given up.
struct Stoppable<'p>(&'p dyn Producer, &'p AtomicBool);

impl Producer for Stoppable<'_> {
    fn produce(&self, lane: &mut Lane, unit: ByteRange, into: &mut [u8], each: &mut Each<'_>) -> Result<()> {
        stop(self.1)?;
        self.0.produce(lane, unit, into, each)
    }
}

fn stop(cancel: &AtomicBool) -> Result<()> {
    if cancel.load(Ordering::Relaxed) {
        return Err(Error::new(Kind::Cancelled, "agent", "it was given up before it was all there"));
    }
    Ok(())
}

fn fill(agent: &Inner, thing: &Thing) -> Result<Kept> {
    let began = Instant::now();
    let Key { image, rank, place } = &thing.key;
    let spec = ArenaSpec { payload: thing.digests.payload(), shards: 1 };
    stop(&thing.cancel)?;
    // Open no longer than it is read: what replaces it on the disk gets its room.
    let origin = thing.origin.lock().unwrap_or_else(PoisonError::into_inner).take();
    let origin = origin.ok_or_else(|| Error::new(Kind::Invalid, "agent", "it was filled before"))?;
    let (arena, context): (Arc<dyn Arena>, _) = match place {
        Place::Host => (HostArena::create(spec, &agent.config.memory)?.0, None),
        Place::Gpu(uuid) => {
            let context = agent.gpu(uuid)?;
            (CudaArena::create_in(&context, spec, &CudaArenaConfig::default())?.0, Some(context))
        }
    };
    agent.filling(thing);
    let filling = Arc::new(Filling::new(arena, Some(Arc::clone(&thing.digests)))?);
    let _ = thing.filling.set(Arc::clone(&filling));
    let staged = context.and_then(|context| staged(agent, thing, &filling, &context));
    if let Some(Err(error)) = staged {
        tracing::warn!(image, rank, %error, "not from what was staged: read from where it is");
    }
    let phases = Phases::default();
    let config = &agent.config.fill;
    match &origin {
        Origin::File(file) => {
            let producer = FileProducer(file);
            fill_from(file, &Stoppable(&producer, &thing.cancel), &filling, config, &phases)?;
        }
        Origin::Object(source) => {
            pipeline::fill(&filling, &Stoppable(&**source, &thing.cancel), config, &phases)?;
        }
    }
    if !filling.is_complete() {
        return Err(Error::new(Kind::SourceLost, "agent", "bytes are missing, and nobody said why"));
    }
    let bits = getrandom::u64()
        .map_err(|e| Error::new(Kind::Io, "getrandom", format!("no random generation: {e}")))?;
    let generation = Generation::from_random(bits);
    let arena = Arc::clone(filling.arena());
    arena.begin(generation);
    arena.publish(ShardId(0), spec.payload)?;
    let ms = began.elapsed().as_secs_f64() * 1e3;
    tracing::info!(image, rank, %place, bytes = spec.payload, ms, "in memory, and verified");
    Ok(Kept { arena, generation })
}

/// Fills a GPU's arena from what was staged of the same, if it was.
fn staged(agent: &Inner, thing: &Thing, filling: &Filling, context: &Context) -> Option<Result<()>> {
    let key = Key { place: Place::Host, ..thing.key.clone() };
    let (host, State::Ready, _) = agent.find(&key)? else { return None };
    if let Err(e) = agent.attach(&host, OWN) {
        return Some(Err(e));
    }
    let pushed = host
        .pins(context)
        .and_then(|(pins, _)| push_pinned(filling, &pins, &Phases::default(), &mut |_| stop(&thing.cancel)));
    agent.detach(&host, OWN);
    Some(pushed.map(drop))
}
