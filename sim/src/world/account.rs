//! What came of it: every part of the world's account, and all of them together.

use super::World;
use crate::{CloneTime, Outcome, Span, outcome::most_used, site::Port};
use flashboot_core::{Geometry, ShardId};
use std::collections::{BTreeMap, BTreeSet};

/// What is known of a replica's GPUs together.
#[derive(Debug, Default)]
struct Replica {
    /// The slowest that is done, in nanoseconds.
    done: u64,
    /// GPUs that are not done.
    left: u32,
    bytes: u64,
    failed: Option<String>,
}

impl Replica {
    fn and(&mut self, other: Self) {
        self.done = self.done.max(other.done);
        self.left += other.left;
        self.bytes += other.bytes;
        self.failed = self.failed.take().or(other.failed);
    }
}

/// What came of members that share something.
#[derive(Debug)]
pub(super) struct Part {
    replicas: BTreeMap<u32, Replica>,
    dead: Vec<u32>,
    moves: u64,
    /// In nanoseconds.
    map: u64,
    ports: Vec<(Port, u64, f64)>,
    spans: Vec<Span>,
    bytes: u64,
    events: u64,
    pending: usize,
}

impl World<'_> {
    pub(super) fn part(self) -> Part {
        let mut replicas = BTreeMap::<u32, Replica>::new();
        let gather = self.scenario.topology.is_gather();
        for (member, node) in self.members.iter().zip(&self.nodes) {
            let Some(clone) = member.clone else { continue };
            // A node of a gather begins with its own part.
            let held = if gather { self.geometry.shard_range(ShardId(clone)).len() } else { 0 };
            replicas.entry(clone).or_default().and(Replica {
                done: node.done.unwrap_or(0),
                left: u32::from(node.done.is_none()),
                bytes: self.geometry.payload() - held,
                failed: node.failed.clone(),
            });
        }
        let mut carried = BTreeMap::<_, u64>::new();
        for hop in &self.hops {
            for link in self.fabric.links_of(hop.flow) {
                *carried.entry(*link).or_default() += hop.carried;
            }
        }
        let carried = |link| carried.get(&link).copied().unwrap_or(0);
        let ports = self.site.ports().map(|(port, link)| (port, carried(link), self.fabric.capacity(link)));
        Part {
            replicas,
            moves: self.moves,
            map: self.hops.iter().map(|hop| hop.map).max().unwrap_or(0),
            ports: ports.collect(),
            bytes: self.bytes,
            events: self.queue.pushed(),
            pending: self.pending,
            dead: self.dead,
            spans: self.spans,
        }
    }
}

/// All parts together.
pub(super) fn outcome(geometry: Geometry, parts: Vec<Part>) -> Outcome {
    let mut replicas = BTreeMap::<u32, Replica>::new();
    let mut dead = BTreeSet::new();
    let (mut ports, mut spans) = (Vec::new(), Vec::new());
    let (mut moves, mut map, mut bytes, mut events, mut pending) = (0, 0, 0, 0, 0);
    for part in parts {
        for (clone, replica) in part.replicas {
            replicas.entry(clone).or_default().and(replica);
        }
        dead.extend(part.dead);
        ports.extend(part.ports);
        spans.extend(part.spans);
        (moves, bytes, events) = (moves + part.moves, bytes + part.bytes, events + part.events);
        (map, pending) = (part.map.max(map), pending + part.pending);
    }
    replicas.retain(|clone, _| !dead.contains(clone));
    let time = |(index, replica): (&u32, &Replica)| {
        let seconds = replica.done as f64 / 1e9;
        let bytes_per_s = replica.bytes as f64 / seconds.max(1e-9);
        (replica.left == 0).then_some(CloneTime { index: *index, ms: seconds * 1e3, bytes_per_s })
    };
    let clones: Vec<CloneTime> = replicas.iter().filter_map(time).collect();
    let last = clones.iter().map(|clone| clone.ms / 1e3).fold(0.0, f64::max);
    Outcome {
        image: geometry.payload(),
        chunk: geometry.chunk(),
        chunks: geometry.payload().div_ceil(geometry.chunk()),
        failed: replicas.into_iter().filter_map(|(clone, r)| Some((clone, r.failed?))).collect(),
        dead: dead.into_iter().collect(),
        moves,
        map_ms: map as f64 / 1e6,
        links: most_used(ports.into_iter(), last),
        clones,
        bytes,
        events,
        pending,
        spans,
    }
}
