//! Under which names the ranks of a bench and its parent find each other's words on the board.

pub(super) use crate::replicate::{put, wait};
use flashboot_core::schedule::Rank;
use std::time::Duration;

/// The plan, from the parent.
pub(super) const PLAN: &str = "plan";
/// How long it may take: it is there before anyone is started.
pub(super) const PLAN_WAIT: Duration = Duration::from_secs(20);

/// A stage and a repeat.
pub(super) type At = (usize, u32);

pub(super) fn digests(stage: usize) -> String {
    format!("digests/{stage}")
}

pub(super) fn locators((stage, repeat): At, rank: Rank) -> String {
    format!("locators/{stage}/{repeat}/{rank}")
}

/// The rank has its sources mapped.
pub(super) fn mapped((stage, repeat): At, rank: Rank) -> String {
    format!("mapped/{stage}/{repeat}/{rank}")
}

/// The barrier before all copy at once.
pub(super) fn together((stage, repeat): At) -> String {
    format!("together/{stage}/{repeat}")
}

/// The barrier after the last transfer, before anything else is asked of the GPUs.
pub(super) fn arrived((stage, repeat): At) -> String {
    format!("arrived/{stage}/{repeat}")
}

/// The moment of the release, a little ahead.
pub(super) fn go((stage, repeat): At) -> String {
    format!("go/{stage}/{repeat}")
}

/// The rank has every byte.
pub(super) fn done((stage, repeat): At, rank: Rank) -> String {
    format!("done/{stage}/{repeat}/{rank}")
}

/// All have.
pub(super) fn over((stage, repeat): At) -> String {
    format!("over/{stage}/{repeat}")
}

/// The error that the rank ended in.
pub(super) fn failed(rank: Rank) -> String {
    format!("failed/{rank}")
}
