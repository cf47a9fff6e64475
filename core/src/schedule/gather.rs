//! N nodes hold 1/N each and complete one another (the FlashBoot paper, sections 3.6 and 6.2).

use super::{Leg, Rank};
use crate::ShardId;

/// The predecessor on the ring is the only source: in turn it has its own shard, then the one before, …
pub(super) fn ring(rank: Rank, nodes: u32) -> Vec<Leg> {
    let source = before(rank, 1, nodes);
    (1..nodes).map(|back| Leg { source, shard: ShardId(before(rank, back, nodes)) }).collect()
}

/// Every shard comes from its owner; the order is rotated so that in step no owner has two readers.
pub(super) fn staggered(rank: Rank, nodes: u32) -> Vec<Leg> {
    (1..nodes)
        .map(|back| {
            let owner = before(rank, back, nodes);
            Leg { source: owner, shard: ShardId(owner) }
        })
        .collect()
}

/// The rank `back` places before `rank` on a ring; `back` < `nodes`, `rank` < `nodes`.
fn before(rank: Rank, back: u32, nodes: u32) -> Rank {
    if rank >= back { rank - back } else { rank + (nodes - back) }
}
