//! What others see of the ledger.

use super::{Id, Key, Ledger, Place, Record};
use serde::{Deserialize, Serialize};
use std::time::Instant;

/// How far an arena is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// Others are filled first.
    Waiting,
    /// It is being filled and verified.
    Filling,
    /// All of it is there, every block compared with its digest.
    Ready,
}

/// One arena, as others see it. Times in milliseconds, sizes in bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// The image's id.
    pub image: String,
    /// The rank image's name.
    pub rank: String,
    /// Where.
    pub place: Place,
    /// Bytes of the arena.
    pub bytes: u64,
    /// How far it is.
    pub state: State,
    /// Higher ones push lower ones out.
    pub priority: i32,
    /// Whether it is held.
    pub held: bool,
    /// Of one that is held with a lease, and that nobody has attached: when it goes.
    pub lease_left_ms: Option<u64>,
    /// How many processes have it attached.
    pub attached: u64,
    /// Since it was last asked for, attached or let go.
    pub idle_ms: u64,
}

/// Counted since the agent began.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Counts {
    /// Images that were staged.
    pub staged: u64,
    /// Arenas that were filled to be held.
    pub held: u64,
    /// Times that something was attached.
    pub attached: u64,
    /// Arenas that were given up: for others, at the end of a lease, or because somebody said so.
    pub evicted: u64,
    /// Arenas that could not be filled.
    pub failed: u64,
    /// Asks that were refused for want of room.
    pub refused: u64,
}

fn ms(duration: std::time::Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

impl Record {
    fn view(&self, now: Instant) -> Entry {
        let Key { image, rank, place } = self.key.clone();
        Entry {
            image,
            rank,
            place,
            bytes: self.bytes,
            state: self.state,
            priority: self.priority,
            held: self.hold.is_some(),
            lease_left_ms: self.ends().map(|at| ms(at.saturating_duration_since(now))),
            attached: self.attached.len() as u64,
            idle_ms: ms(now.saturating_duration_since(self.used)),
        }
    }
}

impl Ledger {
    /// Everything, in the order in which it came.
    pub fn entries(&self, now: Instant) -> Vec<(Id, Entry)> {
        self.records.iter().map(|(id, record)| (*id, record.view(now))).collect()
    }

    /// One of it.
    pub fn entry(&self, id: Id, now: Instant) -> Option<Entry> {
        self.records.get(&id).map(|record| record.view(now))
    }

    /// What was counted.
    pub fn counts(&self) -> Counts {
        self.counts
    }
}
