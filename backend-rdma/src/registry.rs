//! What an endpoint exports, by generation.

use crate::{
    arena::{Seen, Served},
    regions::Registration,
};
use flashboot_core::{Generation, ShardId};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// An exported arena with its registration.
#[derive(Debug)]
pub(crate) struct Offer {
    pub(crate) arena: Served,
    pub(crate) registration: Arc<Registration>,
}

impl Offer {
    pub(crate) fn seen(&self) -> Seen {
        Seen::of(&self.arena)
    }
}

#[derive(Debug, Default)]
pub(crate) struct Registry(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    next: u64,
    entries: Vec<(u64, Generation, Arc<Offer>)>,
}

impl Registry {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds an export; the number removes it again.
    pub(crate) fn add(&self, generation: Generation, offer: Offer) -> u64 {
        let mut state = self.state();
        let id = state.next;
        state.next = state.next.wrapping_add(1);
        state.entries.push((id, generation, Arc::new(offer)));
        id
    }

    pub(crate) fn remove(&self, id: u64) {
        let mut state = self.state();
        let at = state.entries.iter().position(|(other, ..)| *other == id);
        let gone = at.map(|at| state.entries.swap_remove(at));
        // The arena may be unmapped here: not under the lock.
        drop(state);
        drop(gone);
    }

    /// What is offered of the arena that was exported with `generation` and still holds it.
    pub(crate) fn find(&self, generation: u64) -> Result<Arc<Offer>, String> {
        let wanted = Generation::from_word(generation);
        let found =
            self.state().entries.iter().find(|(_, g, _)| Some(*g) == wanted).map(|(.., o)| Arc::clone(o));
        let Some(offer) = found else {
            return Err(format!("generation {generation:016x} is not exported here, or not any more"));
        };
        if offer.arena.arena().observe(ShardId(0)).generation != wanted {
            return Err(format!("the arena no longer holds generation {generation:016x}"));
        }
        Ok(offer)
    }
}
