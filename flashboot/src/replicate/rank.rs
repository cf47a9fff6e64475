//! What one seed or clone does, from its arena to its last reader; the same in a process and in a task.

use super::{
    clock::Clock,
    job::{self, About, Job, Mapped, Ready},
    load,
    peers::{Peers, patience},
};
use crate::{registry::Endpoints, wire::ErrorWire};
use flashboot_core::{Arena, Error, Generation, Kind, Result, ShardId, replica::Policy, schedule::Rank};
use flashboot_driver::{Limits, Observer, replicate};
use flashboot_rendezvous::Board;
use std::{sync::Arc, time::Duration};
use tracing::{Instrument as _, info_span};

/// One rank and all it needs.
pub(crate) struct Seat {
    pub(crate) rank: Rank,
    pub(crate) job: Arc<Job>,
    pub(crate) board: Arc<dyn Board>,
    pub(crate) endpoints: Arc<Endpoints>,
    pub(crate) arena: Arc<dyn Arena>,
    /// What making the arena took.
    pub(crate) arena_took: Duration,
    pub(crate) clock: Clock,
    /// Is told of every step.
    pub(crate) observer: Box<dyn Observer>,
}

/// Runs the rank until the parent says that nobody reads any more.
pub(crate) async fn run(seat: Seat) -> Result<()> {
    let span = info_span!("rank", rank = seat.rank, image = seat.job.image);
    seat.run().instrument(span).await
}

impl Seat {
    async fn run(mut self) -> Result<()> {
        let settings = self.job.settings.clone();
        let bits = getrandom::u64().map_err(|e| {
            Error::new(Kind::Unavailable, "getrandom", format!("the system gives no random bits: {e}"))
        })?;
        self.arena.begin(Generation::from_random(bits));
        let exports = self.endpoints.export(&self.arena, settings.import_timeout).await?;
        let locators: Vec<_> = exports.iter().map(|export| export.locator().encode()).collect();
        job::put(&*self.board, &job::name(About::Locators, self.rank), &locators).await?;

        let done = self.part().await;
        if let Err(e) = &done {
            // Before the exports go: what others lose by that is not the cause.
            job::put(&*self.board, &job::name(About::Failed, self.rank), &ErrorWire::from(e)).await?;
        }
        drop(exports);
        done
    }

    async fn part(&mut self) -> Result<()> {
        let settings = &self.job.settings;
        // Readers are served by the endpoints' own threads meanwhile.
        let patience = settings.setup_timeout.saturating_add(settings.transfer_timeout);
        if self.rank == 0 {
            let began = self.clock.now();
            self.fill()?;
            let load = self.clock.now().saturating_sub(began);
            let mapped = Mapped { arena: self.arena_took, load, ..Mapped::default() };
            job::put(&*self.board, &job::name(About::Mapped, 0), &mapped).await?;
        } else {
            self.clone_it().await?;
        }
        self.board.wait(job::DONE, patience).await.map(drop)
    }

    /// The seed's part: the image from disk, every block verified, then all of it published at once.
    fn fill(&self) -> Result<()> {
        let digests = self.job.digests()?;
        load::fill(&self.job.payload, &digests, &self.arena, self.job.threads())?;
        self.arena.publish(ShardId(0), self.job.bytes)
    }

    async fn clone_it(&mut self) -> Result<()> {
        let Self { rank, job, board, endpoints, arena, clock, .. } = &*self;
        let settings = &job.settings;
        let peers = Arc::new(Peers::new(
            *rank,
            Arc::clone(job),
            Arc::clone(board),
            Arc::clone(endpoints),
            Arc::clone(arena),
        ));
        // What the driver needs is at hand before the release.
        let work = flashboot_driver::Job {
            arena: Arc::clone(arena),
            assignment: job.assignment(*rank)?,
            expected: if settings.verify { Some(Arc::new(job.digests()?)) } else { None },
            policy: Policy { stall: patience(job.schedule(), *rank, settings.stall), ..settings.policy() },
            limits: Limits { pull: settings.pull_timeout, ..Limits::default() },
        };
        let began = clock.now();
        peers.map_ahead().await?;
        let mapped =
            Mapped { arena: self.arena_took, map: clock.now().saturating_sub(began), ..Mapped::default() };
        job::put(&**board, &job::name(About::Mapped, *rank), &mapped).await?;
        board.wait(job::RELEASE, settings.setup_timeout).await?;

        let (clock, board, rank, limit) =
            (self.clock, Arc::clone(&self.board), self.rank, self.job.settings.transfer_timeout);
        let used = clock.processor();
        let done = replicate(work, Arc::<Peers>::clone(&peers), &mut *self.observer);
        let report = tokio::time::timeout(limit, done).await.map_err(|_| {
            Error::new(Kind::Deadline, "replicate", format!("not complete within {limit:?} of the release"))
        })?;
        let at = clock.now();
        let report = report?;
        let ready = Ready {
            at,
            processor: clock.processor().saturating_sub(used),
            transfer: report.transfer,
            verify: report.verify,
            bytes: report.bytes,
            chunks: report.chunks,
            verified: report.verified,
            repaired: report.repaired,
            losses: report.losses,
            hops: peers.hops(),
        };
        job::put(&*board, &job::name(About::Ready, rank), &ready).await
    }
}
