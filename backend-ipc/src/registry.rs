//! What an endpoint exports, by generation.

use flashboot_core::{Arena, Generation, ShardId};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

#[derive(Debug, Default)]
pub(crate) struct Registry {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    next: u64,
    entries: Vec<Entry>,
}

#[derive(Debug)]
struct Entry {
    id: u64,
    generation: Generation,
    arena: Arc<dyn Arena>,
}

impl Registry {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds an export; the number removes it again.
    pub(crate) fn add(&self, generation: Generation, arena: Arc<dyn Arena>) -> u64 {
        let mut state = self.state();
        let id = state.next;
        state.next = state.next.wrapping_add(1);
        state.entries.push(Entry { id, generation, arena });
        id
    }

    pub(crate) fn remove(&self, id: u64) {
        let mut state = self.state();
        let gone = state.entries.iter().position(|e| e.id == id).map(|at| state.entries.swap_remove(at));
        // The arena may be unmapped here: not under the lock.
        drop(state);
        drop(gone);
    }

    /// The arena that was exported with `generation` and still holds it.
    pub(crate) fn find(&self, generation: u64) -> Result<Arc<dyn Arena>, String> {
        let wanted = Generation::from_word(generation);
        let found =
            self.state().entries.iter().find(|e| Some(e.generation) == wanted).map(|e| Arc::clone(&e.arena));
        let Some(arena) = found else {
            return Err(format!("generation {generation:016x} is not exported here, or not any more"));
        };
        if arena.observe(ShardId(0)).generation != wanted {
            return Err(format!("the arena no longer holds generation {generation:016x}"));
        }
        Ok(arena)
    }
}
