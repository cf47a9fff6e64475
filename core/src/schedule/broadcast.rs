//! One seed, many clones: star, chain, tree of chains (the FlashBoot paper, section 3.8).

use super::{Leg, Rank};
use crate::ShardId;

const WHOLE: ShardId = ShardId(0);

fn read_from(source: Rank) -> Vec<Leg> {
    vec![Leg { source, shard: WHOLE }]
}

/// Every clone reads from the seed.
pub(super) fn star(rank: Rank) -> Vec<Leg> {
    if rank == 0 { Vec::new() } else { read_from(0) }
}

/// seed → 1 → 2 → …: each clone reads from the rank before it.
pub(super) fn chain(rank: Rank) -> Vec<Leg> {
    rank.checked_sub(1).map_or_else(Vec::new, read_from)
}

/// Clones 1, 2, … are cut into chains of `length`. Within a chain each reads from the one before; the head of
/// chain 0 reads from the seed, the head of chain g from the head of chain (g − 1) / `fanout`. A holder has at
/// most `fanout` + 1 readers.
pub(super) fn tree_of_chains(rank: Rank, length: u32, fanout: u32) -> Vec<Leg> {
    let Some(clone) = rank.checked_sub(1) else { return Vec::new() };
    let (chain, place) = (clone / length, clone % length);
    match (chain, place) {
        (0, 0) => read_from(0),
        (_, 0) => read_from((chain - 1) / fanout * length + 1),
        _ => read_from(rank - 1),
    }
}

/// Hops from the seed to the farthest clone of a tree of chains.
pub(super) fn tree_depth(clones: u32, length: u32, fanout: u32) -> u32 {
    let mut deepest = 0;
    let mut first = 0; // the first clone of a chain
    while first < clones {
        let mut chain = first / length;
        let mut head = 1;
        while chain > 0 {
            chain = (chain - 1) / fanout;
            head += 1;
        }
        deepest = deepest.max(head + (clones - first).min(length) - 1);
        first = first.saturating_add(length);
    }
    deepest
}
