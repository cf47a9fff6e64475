//! Whom a node of a ring reads from: the node before it, and its own disk for whatever those before it have left behind.
//!
//! A node that is gone is its successor's to make good: the successor reads that shard from its disk, and the shards further
//! back from the next node that lives. Every node finds that out by itself, by whom it cannot read.

use super::disk::Disk;
use crate::{
    registry::{Endpoints, Imported},
    replicate::LetGo,
    service::{
        Hop,
        sources::{member, peer},
    },
};
use async_trait::async_trait;
use flashboot_core::{
    Arena, ByteRange, Error, Generation, Geometry, InFlight, Kind, Locator, Mover, Observed, PeerId, Pull,
    Result, ShardId,
};
use flashboot_driver::Sources;
use flashboot_rendezvous::{RingSeat, protocol::MemberId};
use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};
use tracing::{info, warn};

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
        let lines = self.seat.locators(id);
        let locators: Vec<Locator> =
            lines.iter().map(|line| line.parse().map_err(Error::from)).collect::<Result<_>>()?;
        if let Some(other) = locators.iter().find(|locator| locator.generation != id.0) {
            let detail = format!("a locator of filling {}, not {id}", other.generation);
            return Err(Error::new(Kind::Mismatch, "import", detail));
        }
        let imported = self.endpoints.import(&locators, &self.arena, self.import).await?;
        let Imported { mover, transport, passed } = imported;
        info!(source = %id, %transport, "reading");
        self.state().hops.push(Hop { source: id, transport, passed });
        let (disk, own) = (self.disk.clone(), self.own(Some(id)));
        Ok(Box::new(Neighbour { mover: LetGo::wrap(mover), disk, own, geometry: self.geometry }))
    }

    async fn replace(&self, lost: PeerId, shard: ShardId, from: u64, cause: &Error) -> Option<PeerId> {
        // What this node's own disk does not give it does not give twice.
        let lost = member(lost)?;
        self.state().gone.insert(lost);
        let next = self.before();
        warn!(%lost, shard = shard.0, from, %cause, next = ?next, "reading its shard from disk");
        Some(next.map_or(DISK, peer))
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
