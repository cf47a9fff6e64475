//! Whom a node of a ring reads from: the node before it, and its own disk for whatever those before it have left behind.
//!
//! A node that is gone is its successor's to make good: the successor reads that shard from its disk, and the shards further
//! back from the next node that lives. Every node finds that out by itself, by whom it cannot read.

use super::disk::Disk;
use crate::{
    observe::Watched,
    registry::Endpoints,
    service::{
        Hop,
        sources::{Import, member, peer},
    },
};
use async_trait::async_trait;
use flashboot_core::{
    Arena, ByteRange, Error, Generation, Geometry, InFlight, Kind, Mover, Observed, PeerId, Pull, Result,
    ShardId,
};
use flashboot_driver::{Paced, Sources};
use flashboot_rendezvous::{RingSeat, protocol::MemberId};
use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};
use tracing::warn;

/// The node's own disk: no filling has this word.
pub(super) const DISK: PeerId = PeerId(0);

/// The sources of one node.
pub(super) struct Neighbours {
    pub(super) seat: Arc<RingSeat>,
    pub(super) endpoints: Arc<Endpoints>,
    pub(super) arena: Arc<dyn Arena>,
    pub(super) disk: Disk,
    pub(super) geometry: Geometry,
    /// The ring's order, and this node's place in it.
    pub(super) order: Vec<MemberId>,
    pub(super) index: usize,
    pub(super) import: Duration,
    pub(super) watched: Arc<Watched>,
    pub(super) state: Mutex<State>,
}

#[derive(Default)]
pub(super) struct State {
    gone: BTreeSet<MemberId>,
    hops: Vec<Hop>,
}

impl Neighbours {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Nodes read from so far, in order.
    pub(super) fn hops(&self) -> Vec<Hop> {
        self.state().hops.clone()
    }

    /// The nearest node before this one that is not gone; `None`: there is no other.
    pub(super) fn before(&self) -> Option<MemberId> {
        let state = self.state();
        back(&self.order, self.index).map(|(_, id)| id).find(|id| !state.gone.contains(id))
    }

    /// Whether `shard` comes from this node's disk, be it in the name of `source`.
    pub(super) fn reads_disk(&self, source: PeerId, shard: ShardId) -> bool {
        source == DISK || self.own(member(source)).contains(&shard)
    }

    /// The shards that are this node's to read from disk: its own, and those of the gone between it and `source`.
    pub(super) fn own(&self, source: Option<MemberId>) -> BTreeSet<ShardId> {
        let between = back(&self.order, self.index).take_while(|(_, id)| Some(*id) != source);
        let indices = between.map(|(index, _)| index).chain([self.index]);
        indices.filter_map(|index| Some(ShardId(u32::try_from(index).ok()?))).collect()
    }
}

/// The other nodes with their places, backwards from the one at `index`.
fn back(order: &[MemberId], index: usize) -> impl Iterator<Item = (usize, MemberId)> {
    let before = order.iter().copied().enumerate().take(index).rev();
    before.chain(order.iter().copied().enumerate().skip(index.saturating_add(1)).rev())
}

#[async_trait]
impl Sources for Neighbours {
    async fn attach(&self, source: PeerId) -> Result<Box<dyn Mover>> {
        if source == DISK {
            return Ok(Box::new(self.disk.clone()));
        }
        let unknown = || Error::new(Kind::SourceLost, "import", "it is no node of the ring");
        let id = member(source).filter(|id| self.order.contains(id)).ok_or_else(unknown)?;
        let import = Import { endpoints: &self.endpoints, arena: &self.arena, timeout: self.import };
        let (mover, hop) = import.of(id, &self.seat.locators(id), || Some(self.seat.ended(id))).await?;
        self.watched.hops(&hop);
        self.seat.reads(Some(id));
        self.state().hops.push(hop);
        let (disk, own) = (self.disk.clone(), self.own(Some(id)));
        Ok(Box::new(Neighbour { mover, disk, own, geometry: self.geometry }))
    }

    async fn replace(&self, lost: PeerId, shard: ShardId, from: u64, cause: &Error) -> Option<PeerId> {
        // What this node's own disk does not give it does not give twice.
        let lost = member(lost)?;
        self.watched.lost(cause);
        self.state().gone.insert(lost);
        let next = self.before();
        warn!(%lost, shard = shard.0, from, %cause, next = ?next, "reading its shard from disk");
        if next.is_none() {
            self.seat.reads(None);
        }
        Some(next.map_or(DISK, peer))
    }

    /// Of a neighbour only what it gives counts: that its word stands still may be the fault of those before it, and its
    /// [`stall`](flashboot_core::replica::Policy::stall) is for that.
    fn paced(&self, source: PeerId, shard: ShardId) -> Paced {
        if self.reads_disk(source, shard) { Paced::Never } else { Paced::Pulling }
    }
}

/// The node before this one, and the disk for what is not to be had from it.
#[derive(Debug)]
struct Neighbour {
    mover: Box<dyn Mover>,
    disk: Disk,
    own: BTreeSet<ShardId>,
    geometry: Geometry,
}

impl Neighbour {
    fn is_own(&self, range: ByteRange) -> bool {
        self.own.iter().any(|shard| self.geometry.shard_range(*shard).overlaps(range))
    }
}

#[async_trait]
impl Mover for Neighbour {
    fn generation(&self) -> Generation {
        self.mover.generation()
    }

    async fn observe(&self, shard: ShardId, at_least: u64, wait: Duration) -> Result<Observed> {
        if !self.own.contains(&shard) {
            return self.mover.observe(shard, at_least, wait).await;
        }
        // Of the disk, in the name of the node that it stands in for.
        let progress = self.geometry.shard_range(shard).len();
        Ok(Observed { generation: Some(self.generation()), progress })
    }

    fn start(&self, pull: Pull) -> Result<Box<dyn InFlight>> {
        if self.is_own(pull.range) { Ok(self.disk.start(pull.range)) } else { self.mover.start(pull) }
    }

    fn remarks(&self) -> Vec<String> {
        self.mover.remarks()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_others_come_backwards_once_each() {
        let order: Vec<_> = (1..5).map(|n| MemberId(Generation::from_random(n))).collect();
        let places = |index| back(&order, index).map(|(at, _)| at).collect::<Vec<_>>();
        assert_eq!(places(0), [3, 2, 1]);
        assert_eq!(places(2), [1, 0, 3]);
        assert_eq!(back(&order[..1], 0).count(), 0);
    }
}
