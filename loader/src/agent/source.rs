//! What the agent has, as sources of a load.

use super::{
    attached::{AttachedProducer, Target, fits, in_place, locator},
    client::{Client, ClientConfig},
    ledger::{Key, Place, State},
};
use crate::{
    pipeline::{Filling, Phase, fill, push, verify_landed},
    source::{Delivered, Load, Source, SourceKind},
};
use flashboot_core::{Arena as _, Error, Generation, Kind, Result};
use flashboot_cuda::CudaArena;
use std::{os::fd::AsFd as _, sync::Arc, time::Instant};

/// Host memory that the agent filled ahead. Into host memory it is copied and verified; into a GPU's the agent pushes it, out
/// of memory that it has pinned, and this process verifies what landed.
#[derive(Debug, Clone)]
pub struct StagedSource {
    agent: ClientConfig,
    /// Have the agent push; else this process copies by itself.
    push: bool,
}

/// An arena that stayed in memory when its engine went.
#[derive(Debug, Clone)]
pub struct HeldSource {
    agent: ClientConfig,
    target: Target,
    /// Copy it, and verify the copy: for engines that write their weights.
    private: bool,
}

impl StagedSource {
    /// Of this agent.
    pub fn new(agent: ClientConfig, push: bool) -> Self {
        Self { agent, push }
    }

    fn by_push(&self, load: &Load, key: &Key, arena: &Arc<CudaArena>, filling: &Filling) -> Result<()> {
        let client = dial(load, &self.agent)?;
        // Nobody reads this arena by its locator: any generation will do.
        let generation = Generation::from_random(1);
        let sizes = (arena.payload(), arena.capacity(), arena.shards());
        let into = locator(arena.context(), sizes, generation)?;
        let descriptor = arena.export_fd()?;
        let phases = load.phases();
        let (began, mut first) = (Instant::now(), None);
        let pinning = client.push(
            (&key.image, &key.rank),
            &into,
            descriptor.as_fd(),
            &filling.missing(),
            &mut |range| {
                first.get_or_insert_with(|| began.elapsed());
                phases.time(Phase::Verify, || verify_landed(filling, arena, range))
            },
            &|e| {
                load.forsake();
                e.with_remedy("begin the load anew: the agent may still write to this one's arena")
            },
        )?;
        tracing::debug!(?first, all = ?began.elapsed(), "the agent has pushed");
        phases.add(Phase::Pin, pinning);
        Ok(())
    }
}

impl Source for StagedSource {
    fn kind(&self) -> SourceKind {
        SourceKind::Staged
    }

    fn name(&self) -> String {
        self.agent.socket.display().to_string()
    }

    fn probe(&self, load: &Load) -> Result<()> {
        look(load, &self.agent, &Place::Host, false)
    }

    fn deliver(&self, load: &Load) -> Result<Delivered> {
        let key = key(load, Place::Host)?;
        let filling = load.filling()?;
        let gpu = CudaArena::from_arena(filling.arena()).filter(|_| self.push);
        if let Some(arena) = gpu {
            match self.by_push(load, &key, &arena, filling) {
                Ok(()) => return Ok(Delivered::Filled),
                Err(e) if load.is_forsaken() || is_final(&e) => return Err(e),
                Err(error) => {
                    tracing::warn!(%error, "the agent does not push; this process copies by itself");
                }
            }
        }
        let client = dial(load, &self.agent)?;
        let attached = load.phases().time(Phase::IoWait, || client.attach(&key, false))?;
        fits(&attached, load.wanted().payload)?;
        let from = AttachedProducer::map(attached)?;
        if CudaArena::from_arena(filling.arena()).is_some() {
            match self_pin(load, filling, &from) {
                Ok(()) => return Ok(Delivered::Filled),
                Err(e) if is_final(&e) => return Err(e),
                Err(error) => {
                    tracing::warn!(%error, "what was staged is not pinned where it is; copied through pinned windows");
                }
            }
        }
        fill(filling, &from, load.config(), load.phases())?;
        Ok(Delivered::Filled)
    }
}

/// Whether no other way to copy the same bytes helps: what landed wrong is wrong in the agent's memory too; a lost context is
/// lost, and so is a lost agent.
fn is_final(e: &Error) -> bool {
    matches!(e.kind(), Kind::Corrupt | Kind::ContextLost | Kind::SourceLost)
}

/// Copies what is missing out of the agent's memory itself, which this process pins where it is and unpins once the load is
/// accounted for.
fn self_pin(load: &Load, filling: &Filling, from: &AttachedProducer) -> Result<()> {
    let (_, leftover) = push(filling, &from.full(), load.config(), load.phases())?;
    load.leave(leftover);
    Ok(())
}

impl HeldSource {
    /// Of this agent, where the load's arena would be.
    pub fn new(agent: ClientConfig, target: Target, private: bool) -> Self {
        Self { agent, target, private }
    }

    fn place(&self) -> Place {
        match &self.target {
            Target::Host => Place::Host,
            Target::Gpu(context) => Place::Gpu(context.device().uuid().to_owned()),
        }
    }
}

impl Source for HeldSource {
    fn kind(&self) -> SourceKind {
        SourceKind::Held
    }

    fn name(&self) -> String {
        self.agent.socket.display().to_string()
    }

    fn probe(&self, load: &Load) -> Result<()> {
        look(load, &self.agent, &self.place(), true)
    }

    fn deliver(&self, load: &Load) -> Result<Delivered> {
        let client = dial(load, &self.agent)?;
        let key = key(load, self.place())?;
        let attached = load.phases().time(Phase::IoWait, || client.attach(&key, true))?;
        fits(&attached, load.wanted().payload)?;
        if !self.private {
            let arena = load.phases().time(Phase::Bind, || in_place(attached, client, &self.target))?;
            return Ok(Delivered::Arena(arena));
        }
        let filling = load.filling()?;
        match &self.target {
            Target::Host => {
                fill(filling, &AttachedProducer::map(attached)?, load.config(), load.phases())?;
            }
            Target::Gpu(_) => {
                let from = in_place(attached, client, &self.target)?;
                let (Some(from), Some(into)) =
                    (CudaArena::from_arena(&from), CudaArena::from_arena(filling.arena()))
                else {
                    return Err(Error::new(
                        Kind::Invalid,
                        "attach",
                        "an arena that is not in a GPU's memory",
                    ));
                };
                for range in filling.missing() {
                    load.phases().time(Phase::H2d, || into.copy_from(&from, range))?;
                    load.phases().time(Phase::Verify, || verify_landed(filling, &into, range))?;
                }
            }
        }
        Ok(Delivered::Filled)
    }
}

fn dial(load: &Load, agent: &ClientConfig) -> Result<Client> {
    load.phases().time(Phase::Connect, || Client::dial(agent))
}

fn key(load: &Load, place: Place) -> Result<Key> {
    let wanted = load.wanted();
    let Some(image) = wanted.image.clone() else {
        return Err(Error::new(Kind::Unavailable, "agent", "the agent keeps images, and none is wanted"));
    };
    Ok(Key { image, rank: wanted.rank.clone(), place })
}

/// Whether the agent has it there, or soon will.
fn look(load: &Load, agent: &ClientConfig, place: &Place, held: bool) -> Result<()> {
    let key = key(load, place.clone())?;
    let status = dial(load, agent)?.status()?;
    let is = |entry: &super::Entry| {
        entry.image == key.image
            && entry.rank == key.rank
            && entry.place == key.place
            && (!held || entry.held)
    };
    match status.entries.iter().find(|listed| is(&listed.entry)) {
        Some(found) => {
            if found.entry.state != State::Ready {
                tracing::info!(rank = key.rank, "the agent is still filling it: waited for");
            }
            Ok(())
        }
        None => Err(key.absent("agent", held)),
    }
}
