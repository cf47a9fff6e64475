//! How one clone goes from empty to verified: a pure machine, events and `now` in, commands out.
//!
//! The async driver, the mock and the simulator run this one machine. It decides what is pulled, when, from
//! whom, what is published, and what happens when a source is lost; it moves nothing, waits for nothing and
//! reads no clock (`now` counts from any fixed moment).
//!
//! What it holds to, whatever the order of events (each is a property test in [`tests`](self)):
//! - no chunk is pulled while an earlier pull of it has not quiesced, and at most [`Policy::depth`] at once;
//! - no chunk is pulled beyond what its source has published;
//! - nothing is published but a verified prefix of a shard, and the prefix only grows;
//! - a source that is lost, stalled or corrupt is left only when its pulls have quiesced, and the work goes on
//!   elsewhere from the first chunk that is missing: nothing verified is pulled again;
//! - a cause that lies in this process ([`Retry::NewProcess`](crate::Retry)) is no source's loss: it ends the replica
//!   as soon as its pulls have quiesced, and no source is tried again;
//! - it ends, in `Complete` or in `Fail`, as long as every command is answered.

mod event;
mod few;
mod loss;
mod machine;
#[cfg(test)]
mod tests;
mod todo;

pub use event::{Command, Event};
pub use machine::{Assignment, Replica, SourcedLeg};

use std::time::Duration;

/// The limits a replica keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Policy {
    /// Pulls in flight at once; at least 1. Two keep a copy engine busy while a word is polled.
    pub depth: usize,
    /// How long a source's progress word may stand still while it is waited for.
    pub stall: Duration,
    /// How often one chunk may be pulled again from one source after its digest did not match.
    pub repairs: u32,
    /// How many sources may be lost before the replica gives up.
    pub max_losses: u32,
}

impl Default for Policy {
    /// Two pulls in flight, 30 s of standing still, two repairs of a chunk, eight lost sources.
    fn default() -> Self {
        Self { depth: 2, stall: Duration::from_secs(30), repairs: 2, max_losses: 8 }
    }
}
