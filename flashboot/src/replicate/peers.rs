//! Where a clone's sources come from: the board says who they are, the registry how to reach them.

use super::job::{self, About, HopTaken, Job};
use crate::registry::{Endpoints, Imported};
use async_trait::async_trait;
use flashboot_core::{
    Arena, Error, Generation, InFlight, Kind, Locator, Mover, Observed, PeerId, Pull, Result, ShardId,
    TransportName,
    schedule::{Rank, Schedule},
};
use flashboot_driver::Sources;
use flashboot_rendezvous::Board;
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};
use tokio::time::Instant;
use tracing::{info, warn};

/// How often the board is asked whether another clone has finished.
const ASK_EVERY: Duration = Duration::from_millis(20);

/// The sources of one rank.
pub(crate) struct Peers {
    rank: Rank,
    job: Arc<Job>,
    board: Arc<dyn Board>,
    endpoints: Arc<Endpoints>,
    arena: Arc<dyn Arena>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Mapped before the release.
    ahead: BTreeMap<PeerId, Box<dyn Mover>>,
    lost: BTreeSet<Rank>,
    /// Those of `lost` that gave wrong bytes or were refilled: never asked again.
    refused: BTreeSet<Rank>,
    hops: Vec<HopTaken>,
}

impl Peers {
    pub(crate) fn new(
        rank: Rank,
        job: Arc<Job>,
        board: Arc<dyn Board>,
        endpoints: Arc<Endpoints>,
        arena: Arc<dyn Arena>,
    ) -> Self {
        Self { rank, job, board, endpoints, arena, state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Imports every source of the schedule now, so that a transfer does not pay for it.
    pub(crate) async fn map_ahead(&self) -> Result<()> {
        for leg in self.job.schedule().legs(self.rank) {
            let source = PeerId(u64::from(leg.source));
            let mover = self.import(source, self.job.settings.import_timeout).await?;
            self.state().ahead.insert(source, mover);
        }
        Ok(())
    }

    /// Every source imported so far, in order.
    pub(crate) fn hops(&self) -> Vec<HopTaken> {
        self.state().hops.clone()
    }

    async fn import(&self, peer: PeerId, timeout: Duration) -> Result<Box<dyn Mover>> {
        let source = rank_of(peer);
        let named = |e: Error| e.with_peer(who(source));
        // Before the release a peer may still be making its arena.
        let patience = self.job.settings.setup_timeout;
        let texts: Vec<String> =
            job::wait(&*self.board, &job::name(About::Locators, source), patience).await.map_err(named)?;
        let locators: Vec<Locator> = texts
            .iter()
            .map(|text| text.parse().map_err(Error::from))
            .collect::<Result<_>>()
            .map_err(named)?;
        let imported = self.endpoints.import(&locators, &self.arena, timeout).await.map_err(named)?;
        let Imported { mover, transport, passed } = imported;
        for p in &passed {
            info!(source, %transport, passed_over = %p.name, reason = p.reason, "transport chosen");
        }
        self.state().hops.push(HopTaken { source, transport, passed });
        // The mock's clock must not wait for a thread.
        Ok(if transport == TransportName::Mock { mover } else { LetGo::wrap(mover) })
    }

    /// The nearest ancestor that is neither lost nor gone, else any clone that has finished. One that another clone
    /// has given up comes last.
    async fn candidate(&self) -> Found {
        let schedule = self.job.schedule();
        let mut doubtful = None;
        for rank in ancestors(schedule, self.rank) {
            if self.state().lost.contains(&rank) || self.is(About::Gone, rank).await {
                continue;
            }
            if !self.is(About::Left, rank).await {
                return Found::Source(rank);
            }
            doubtful.get_or_insert(rank);
        }
        if let Some(rank) = doubtful {
            return Found::Source(rank);
        }
        let mut may_finish = false;
        for rank in (1..schedule.ranks()).filter(|rank| *rank != self.rank) {
            if self.state().lost.contains(&rank) || self.is(About::Gone, rank).await {
                continue;
            }
            match self.board.look(&job::name(About::Ready, rank)).await {
                Ok(Some(_)) => return Found::Source(rank),
                // One that waits for us will never finish before us.
                Ok(None) => may_finish |= !ancestors(schedule, rank).any(|above| above == self.rank),
                Err(_) => {}
            }
        }
        if may_finish { Found::Later } else { Found::Nobody }
    }

    /// Lets every source be asked again that gave no wrong bytes; false when there is none.
    fn forgive(&self) -> bool {
        let mut state = self.state();
        let before = state.lost.len();
        state.lost = state.refused.clone();
        state.lost.len() < before
    }

    /// Whether `rank` is marked so on the board.
    async fn is(&self, about: About, rank: Rank) -> bool {
        matches!(self.board.look(&job::name(about, rank)).await, Ok(Some(_)))
    }
}

/// A mover that is let go of on a thread of its own, which yields to everybody who copies: to unmap 1 GiB of 4 KiB
/// pages takes some 27 ms of a core, and neither the commit nor the clones further down wait for it.
#[derive(Debug)]
pub(crate) struct LetGo(Option<Box<dyn Mover>>, Generation);

impl LetGo {
    pub(crate) fn wrap(mover: Box<dyn Mover>) -> Box<dyn Mover> {
        let generation = mover.generation();
        Box::new(Self(Some(mover), generation))
    }

    /// There until it is dropped.
    fn inner(&self) -> Result<&dyn Mover> {
        self.0.as_deref().ok_or_else(|| Error::new(Kind::Cancelled, "mover", "it was let go of"))
    }
}

#[async_trait]
impl Mover for LetGo {
    fn generation(&self) -> Generation {
        self.1
    }

    async fn observe(&self, shard: ShardId, at_least: u64, wait: Duration) -> Result<Observed> {
        self.inner()?.observe(shard, at_least, wait).await
    }

    fn start(&self, pull: Pull) -> Result<Box<dyn InFlight>> {
        self.inner()?.start(pull)
    }
}

impl Drop for LetGo {
    fn drop(&mut self) {
        let Some(mover) = self.0.take() else { return };
        let let_go = move || {
            // Of this thread only; where it may not be, the unmap competes.
            let _ = rustix::process::setpriority_process(None, 19);
            drop(mover);
        };
        // Without a thread it is dropped with the closure, here, and the commit waits.
        let _ = std::thread::Builder::new().name("flashboot-unmap".into()).spawn(let_go);
    }
}

enum Found {
    Source(Rank),
    /// Nobody now, but a clone is still at work.
    Later,
    Nobody,
}

#[async_trait]
impl Sources for Peers {
    async fn attach(&self, source: PeerId) -> Result<Box<dyn Mover>> {
        let settings = &self.job.settings;
        let ahead = self.state().ahead.remove(&source);
        match ahead {
            Some(mover) => Ok(mover),
            // A holder that is stopped takes a connection and does not answer: no longer than a word may stand still.
            None => self.import(source, settings.import_timeout.min(settings.stall)).await,
        }
    }

    async fn replace(&self, lost: PeerId, _shard: ShardId, from: u64, cause: &Error) -> Option<PeerId> {
        {
            let mut state = self.state();
            state.lost.insert(rank_of(lost));
            if cause.kind().is_refusal() {
                state.refused.insert(rank_of(lost));
            }
        }
        // Only a hint to the others; without the board there is nobody to hint to.
        let _ = self.board.put(&job::name(About::Left, rank_of(lost)), String::new()).await;
        let until = Instant::now() + self.job.settings.stall;
        loop {
            match self.candidate().await {
                Found::Source(rank) => {
                    warn!(rank = self.rank, lost = %who(rank_of(lost)), source = %who(rank), from, "reading on elsewhere");
                    return Some(PeerId(u64::from(rank)));
                }
                Found::Later if Instant::now() < until => tokio::time::sleep(ASK_EVERY).await,
                // Whoever only stood still, or broke off, may have come back; the machine bounds how often we ask.
                Found::Nobody if self.forgive() => {}
                Found::Later | Found::Nobody => return None,
            }
        }
    }
}

/// The rank that a peer of a broadcast stands for.
fn rank_of(peer: PeerId) -> Rank {
    Rank::try_from(peer.0).unwrap_or(Rank::MAX)
}

/// A rank as people call it.
pub(crate) fn who(rank: Rank) -> String {
    if rank == 0 { "seed".into() } else { format!("clone {rank}") }
}

/// How long a word may stand still before `rank` leaves its source: a quarter longer with every hop to the seed, so
/// that whoever is next to a source that stopped finds another first, and nobody behind it leaves a healthy one.
pub(crate) fn patience(schedule: Schedule, rank: Rank, stall: Duration) -> Duration {
    let behind = ancestors(schedule, rank).count().saturating_sub(1);
    stall.saturating_add((stall / 4).saturating_mul(u32::try_from(behind).unwrap_or(u32::MAX)))
}

/// Who `rank` reads from, who that one reads from, and so on to the seed.
fn ancestors(schedule: Schedule, rank: Rank) -> impl Iterator<Item = Rank> {
    let above = move |rank: Rank| schedule.legs(rank).first().map(|leg| leg.source);
    std::iter::successors(above(rank), move |rank| above(*rank))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ancestors_go_up_to_the_seed() {
        let chain = Schedule::Chain { clones: 4 };
        assert_eq!(ancestors(chain, 3).collect::<Vec<_>>(), [2, 1, 0]);
        assert_eq!(ancestors(Schedule::Star { clones: 4 }, 3).collect::<Vec<_>>(), [0]);
        assert_eq!(ancestors(chain, 0).count(), 0);
    }

    #[test]
    fn patience_grows_along_the_chain_and_not_over_a_star() {
        let second = Duration::from_secs(1);
        let chain = |rank| patience(Schedule::Chain { clones: 4 }, rank, second);
        assert_eq!([1, 2, 3].map(chain), [second, second * 5 / 4, second * 3 / 2]);
        assert_eq!(patience(Schedule::Star { clones: 4 }, 4, second), second);
        assert_eq!(patience(Schedule::Chain { clones: 2 }, 2, Duration::MAX), Duration::MAX);
    }
}
