//! What came of it.

use super::World;
use crate::{
    CloneTime, Outcome,
    outcome::most_used,
};
use std::collections::{BTreeMap, BTreeSet};

/// What is known of a replica's GPUs together.
#[derive(Default)]
struct Replica {
    /// The slowest, in nanoseconds; `None`: one is not done.
    done: Option<u64>,
    bytes: u64,
    failed: Option<String>,
}

impl World<'_> {
    pub(super) fn account(self) -> Outcome {
        let dead: BTreeSet<u32> = self.dead.iter().copied().collect();
        let mut replicas = BTreeMap::<u32, Replica>::new();
        let held = |place: usize| {
            // A node of a gather begins with its own part.
            if self.geometry.shards() == 1 { 0 } else {
                self.geometry.shard_range(flashboot_core::ShardId(u32::try_from(place).unwrap_or(0))).len()
            }
        };
        for (member, node) in self.members.iter().zip(&self.nodes) {
            let Some(clone) = member.clone.filter(|clone| !dead.contains(clone)) else { continue };
            let first = !replicas.contains_key(&clone);
            let replica = replicas.entry(clone).or_default();
            replica.bytes += self.geometry.payload() - held(clone as usize);
            replica.done = if first { node.done } else { replica.done.and_then(|at| Some(at.max(node.done?))) };
            if let Some(why) = &node.failed {
                replica.failed.get_or_insert_with(|| why.clone());
            }
        }
        let seconds = |nanos: u64| nanos as f64 / 1e9;
        let time = |(index, replica): (&u32, &Replica)| {
            let at = seconds(replica.done?);
            let bytes_per_s = replica.bytes as f64 / at.max(1e-9);
            Some(CloneTime { index: *index, ms: at * 1e3, bytes_per_s })
        };
        let clones: Vec<CloneTime> = replicas.iter().filter_map(time).collect();
        let last = clones.iter().map(|clone| clone.ms / 1e3).fold(0.0, f64::max);
        let carried = |link: u32| self.carried.get(link as usize).copied().unwrap_or(0);
        let ports = self.site.ports().map(|(port, link)| (port, carried(link), self.fabric.capacity(link)));
        Outcome {
            image: self.geometry.payload(),
            chunk: self.geometry.chunk(),
            chunks: self.geometry.payload().div_ceil(self.geometry.chunk()),
            failed: replicas.into_iter().filter_map(|(clone, r)| Some((clone, r.failed?))).collect(),
            dead: dead.into_iter().collect(),
            moves: self.moves,
            map_ms: self.hops.iter().map(|hop| hop.map).max().unwrap_or(0) as f64 / 1e6,
            links: most_used(ports, last),
            clones,
            bytes: self.bytes,
            events: self.queue.pushed(),
            pending: self.pending,
            spans: self.spans,
        }
    }
}
