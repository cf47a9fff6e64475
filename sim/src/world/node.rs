//! What is kept of a member and of a hop.

use super::{HopId, Id};
use crate::fabric::FlowId;
use flashboot_core::{ChunkRef, ShardId, replica::Replica};
use std::collections::VecDeque;

/// No time: nothing is due.
pub(super) const NEVER: u64 = u64::MAX;

/// A member.
#[derive(Debug)]
pub(super) struct Node {
    /// A clone's machine, until it is over; a seed has none.
    pub(super) machine: Option<Replica>,
    pub(super) alive: bool,
    /// Verified bytes, by shard.
    pub(super) words: Vec<u64>,
    /// Hops by which others read from it.
    pub(super) readers: Vec<HopId>,
    /// Hops by which it reads.
    pub(super) hops: Vec<HopId>,
    /// The word that it waits for.
    pub(super) watch: Option<Watch>,
    /// Whether it is to look at the time.
    pub(super) ticks: bool,
    /// Copies in the order in which they were asked for.
    pub(super) queue: VecDeque<Job>,
    pub(super) copying: Option<Copying>,
    /// A copy that the end of a slice has interrupted.
    pub(super) paused: Option<Copying>,
    /// When the copy under way ends, as things stand: an event of another time is out of date.
    pub(super) due: u64,
    /// What is being hashed, or has ended and is not noticed yet.
    pub(super) hashing: VecDeque<Job>,
    /// When the last of them is noticed.
    pub(super) noticed: u64,
    /// Lost sources for which it seeks another, with since when.
    pub(super) seeks: VecDeque<(Id, u64)>,
    /// Copies whose source died under them.
    pub(super) broken: Vec<Job>,
    /// When it had everything, in nanoseconds.
    pub(super) done: Option<u64>,
    /// Why it gave up.
    pub(super) failed: Option<String>,
}

/// A word that is waited for.
#[derive(Debug, Clone, Copy)]
pub(super) struct Watch {
    pub(super) hop: HopId,
    pub(super) shard: ShardId,
    pub(super) at_least: u64,
    /// In nanoseconds.
    pub(super) until: u64,
    /// When it is seen, once it has come.
    pub(super) seen: u64,
}

/// A copy that was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Job {
    pub(super) hop: HopId,
    pub(super) chunk: ChunkRef,
    /// When it can begin at the soonest.
    pub(super) ready: u64,
}

/// The copy under way.
#[derive(Debug, Clone, Copy)]
pub(super) struct Copying {
    pub(super) job: Job,
    /// When its first byte went.
    pub(super) began: u64,
    /// From when on `left` counts.
    pub(super) since: u64,
    pub(super) left: f64,
    pub(super) rate: f64,
    /// What it takes after its last byte.
    pub(super) tail: u64,
}

impl Copying {
    /// Brings the account up to `now`.
    pub(super) fn advance(&mut self, now: u64) {
        if now <= self.since {
            return;
        }
        let whole = if self.rate > 0.0 { self.left / self.rate * 1e9 } else { f64::INFINITY };
        let went = (now - self.since) as f64;
        if went >= whole {
            self.left = 0.0;
            self.tail = self.tail.saturating_sub((went - whole) as u64);
        } else {
            self.left -= went * self.rate / 1e9;
        }
        self.since = now;
    }
}

/// A reader and a source.
#[derive(Debug, Clone, Copy)]
pub(super) struct Hop {
    pub(super) reader: Id,
    pub(super) source: Id,
    pub(super) flow: FlowId,
    /// Nanoseconds of a copy's start, a look, a map, and of noticing a death.
    pub(super) start: u64,
    pub(super) look: u64,
    pub(super) map: u64,
    pub(super) detect: u64,
    /// Which list of costs.
    pub(super) costs: usize,
    /// Whether the first copy has begun and the last has not ended.
    pub(super) reads: bool,
    /// Bytes of copies that have ended.
    pub(super) carried: u64,
    pub(super) attached: bool,
}

impl Node {
    /// One that holds all `bytes`.
    pub(super) fn seed(bytes: u64) -> Self {
        Self { words: vec![bytes], machine: None, ..Self::empty() }
    }

    /// One that is to fill itself.
    pub(super) fn clone(machine: Replica, shards: usize) -> Self {
        Self { machine: Some(machine), words: vec![0; shards], ..Self::empty() }
    }

    fn empty() -> Self {
        Self {
            machine: None,
            alive: true,
            words: Vec::new(),
            readers: Vec::new(),
            hops: Vec::new(),
            watch: None,
            ticks: false,
            queue: VecDeque::new(),
            copying: None,
            paused: None,
            due: NEVER,
            hashing: VecDeque::new(),
            noticed: 0,
            seeks: VecDeque::new(),
            broken: Vec::new(),
            done: None,
            failed: None,
        }
    }

    pub(super) fn word(&self, shard: ShardId) -> u64 {
        self.words.get(shard.0 as usize).copied().unwrap_or(0)
    }
}
