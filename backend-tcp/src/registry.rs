//! What an endpoint exports, by generation.

use crate::{arena::Served, wire::Refusal};
use flashboot_core::{Generation, ShardId};
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
    served: Arc<Served>,
}

impl Registry {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds an export; the number removes it again.
    pub(crate) fn add(&self, generation: Generation, served: Served) -> u64 {
        let mut state = self.state();
        let id = state.next;
        state.next = state.next.wrapping_add(1);
        state.entries.push(Entry { id, generation, served: Arc::new(served) });
        id
    }

    pub(crate) fn remove(&self, id: u64) {
        let mut state = self.state();
        let gone = state.entries.iter().position(|e| e.id == id).map(|at| state.entries.swap_remove(at));
        // The arena may be unmapped here: not under the lock.
        drop(state);
        drop(gone);
    }

    /// The arena that was exported with `generation`; whether it still holds it is the caller's to look at.
    pub(crate) fn find(&self, generation: u64) -> Result<(Arc<Served>, Generation), (Refusal, String)> {
        let wanted = Generation::from_word(generation);
        let state = self.state();
        let found = state.entries.iter().find(|e| Some(e.generation) == wanted);
        found.map(|entry| (Arc::clone(&entry.served), entry.generation)).ok_or_else(|| {
            let text = format!("generation {generation:016x} is not exported here, or not any more");
            (Refusal::NotExported, text)
        })
    }
}

/// Refuses an arena that does not hold `generation` any more. Calls the driver for a GPU arena.
pub(crate) fn check_current(served: &Served, generation: Generation) -> Result<(), (Refusal, String)> {
    if served.arena().observe(ShardId(0)).generation == Some(generation) {
        return Ok(());
    }
    Err((Refusal::Stale, format!("the arena no longer holds generation {generation}")))
}
