//! What one seed or clone does, from its arena to its last reader; the same in a process and in a task.

use super::{
    clock::Clock,
    job::{self, About, HopTaken, Job, Mapped, Ready, who},
    load,
};
use crate::{
    ErrorWire,
    registry::Endpoints,
    service::{Held, Hop, Labels, Members, peer, stall},
};
use flashboot_core::{Arena, Error, Kind, Result, ShardId, replica::Policy, schedule::Rank};
use flashboot_driver::{Limits, Observer, Step, replicate};
use flashboot_rendezvous::{
    Board, Client, Membership,
    protocol::{MemberId, Registration, Role},
};
use std::{sync::Arc, time::Duration};
use tokio::sync::watch;
use tracing::{Instrument as _, info_span};

/// How long a clone looks for another source at least, however little a word may stand still.
const PATIENCE: Duration = Duration::from_secs(5);

/// One rank and all it needs.
pub(crate) struct Seat {
    pub(crate) rank: Rank,
    pub(crate) job: Arc<Job>,
    pub(crate) board: Arc<dyn Board>,
    /// The run's service.
    pub(crate) service: Arc<Client>,
    pub(crate) endpoints: Arc<Endpoints>,
    pub(crate) arena: Arc<dyn Arena>,
    /// What making the arena took.
    pub(crate) arena_took: Duration,
    pub(crate) clock: Clock,
    /// Is told of every step.
    pub(crate) observer: Box<dyn Observer + Sync>,
}

/// Runs the rank until the parent says that nobody reads any more.
pub(crate) async fn run(seat: Seat) -> Result<()> {
    let span = info_span!("rank", rank = seat.rank, image = seat.job.image);
    seat.run().instrument(span).await
}

impl Seat {
    async fn run(mut self) -> Result<()> {
        let settings = self.job.settings.clone();
        let generation = self.job.member(self.rank)?.member.0;
        self.arena.begin(generation);
        let exports = self.endpoints.export(&self.arena, settings.import_timeout).await?;
        let held = Held { arena: Arc::clone(&self.arena), generation, exports };
        let done = self.part(&held).await.map_err(|e| self.job.named(e));
        if let Err(e) = &done {
            // Before the exports go: what others lose by that is not the cause.
            job::put(&*self.board, &job::name(About::Failed, self.rank), &ErrorWire::from(e)).await?;
        }
        drop(held);
        done
    }

    async fn part(&mut self, held: &Held) -> Result<()> {
        let settings = &self.job.settings;
        // Readers are served by the endpoints' own threads meanwhile.
        let patience = settings.setup_timeout.saturating_add(settings.transfer_timeout);
        // A member until nobody reads any more.
        let _membership = if self.rank == 0 {
            let began = self.clock.now();
            self.fill()?;
            let load = self.clock.now().saturating_sub(began);
            let membership = self.join(held).await?;
            let mapped = Mapped { arena: self.arena_took, load, ..Mapped::default() };
            job::put(&*self.board, &job::name(About::Mapped, 0), &mapped).await?;
            membership
        } else {
            self.clone_it(held).await?
        };
        self.board.wait(job::DONE, patience).await.map(drop)
    }

    /// Becomes a member that reads from whom the schedule says, once that one is a member.
    async fn join(&self, held: &Held) -> Result<Arc<Membership>> {
        let Self { job, rank, board, .. } = self;
        // One that takes another's place comes late, and is given a source.
        let is_late = job.restarts(*rank) > 0;
        let (role, upstream) = match job.source(job.base(*rank)) {
            _ if is_late => (Role::Clone, None),
            None => (Role::Seed, None),
            Some(source) => {
                let joined = job::name(About::Joined, source);
                let joined = board.wait(&joined, job.settings.setup_timeout).await;
                joined.map_err(|e| e.with_peer(who(source)))?;
                (Role::Clone, Some(job.member(source)?.member))
            }
        };
        let (content, manifest) = job.content()?;
        // Of its own: the name of the one before has lost members, and would have to wait.
        let name = if is_late { format!("{} again ({rank})", who(job.base(*rank))) } else { who(*rank) };
        let labels = Labels { name: Some(name), ..Labels::default() };
        let (secret, transports) = (job.member(*rank)?.secret, self.endpoints.names());
        let said = held.registration((role, content), secret, &labels, &transports, job.ranks())?;
        // The service is told, not asked: its own choice is for those that lose their source.
        let said = Registration { upstream, epoch: u32::from(upstream.is_some()), ..said };
        let service = Arc::clone(&self.service);
        let membership =
            Membership::join(service, said, Arc::new(manifest), job.settings.setup_timeout).await?;
        board.put(&job::name(About::Joined, *rank), String::new()).await?;
        Ok(Arc::new(membership))
    }

    /// The seed's part: the image from disk, every block verified, then all of it published at once.
    fn fill(&self) -> Result<()> {
        let digests = self.job.digests()?;
        load::fill(&self.job.payload, &digests, &self.arena, self.job.threads())?;
        self.arena.publish(ShardId(0), self.job.bytes)
    }

    async fn clone_it(&mut self, held: &Held) -> Result<Arc<Membership>> {
        let membership = self.join(held).await?;
        let Self { rank, job, board, endpoints, arena, clock, .. } = &*self;
        let settings = &job.settings;
        let patience = settings.stall.max(PATIENCE);
        let (endpoints, into) = (Arc::clone(endpoints), Arc::clone(arena));
        let members = Members::new(Arc::clone(&membership), endpoints, into, settings, patience);
        let (news, of) = (Arc::clone(board), Arc::clone(job));
        let members = Arc::new(members.told(move |source| ended(&news, &of, source)));
        // What the driver needs is at hand before the release.
        let work = flashboot_driver::Job {
            arena: Arc::clone(arena),
            assignment: match membership.upstream() {
                Some(source) if job.restarts(*rank) > 0 => job.whole(source)?,
                _ => job.assignment(*rank)?,
            },
            expected: if settings.verify { Some(Arc::new(job.digests()?)) } else { None },
            policy: Policy { stall: stall(settings.stall, membership.depth()), ..settings.policy() },
            limits: Limits {
                pull: settings.pull_timeout,
                floor: settings.floor(membership.depth()),
                ..Limits::default()
            },
        };
        let began = clock.now();
        if let Some(source) = membership.upstream() {
            members.map_ahead(peer(source)).await.map_err(|e| e.with_peer(peer(source)))?;
        }
        let map = clock.now().saturating_sub(began);
        let mapped = Mapped { arena: self.arena_took, map, hops: taken(job, &members), ..Mapped::default() };
        job::put(&**board, &job::name(About::Mapped, *rank), &mapped).await?;
        board.wait(job::RELEASE, settings.setup_timeout).await?;

        let (clock, board, job, rank) =
            (self.clock, Arc::clone(&self.board), Arc::clone(&self.job), self.rank);
        let (used, limit) = (clock.processor(), job.settings.transfer_timeout);
        let observer = &mut self.observer;
        let mut told = |step: Step| {
            if let Step::Published { bytes, .. } = step {
                membership.progress(bytes);
            }
            observer.step(step);
        };
        let done = replicate(work, Arc::<Members>::clone(&members), &mut told);
        let report = tokio::time::timeout(limit, done).await.map_err(|_| {
            Error::new(Kind::Deadline, "replicate", format!("not complete within {limit:?} of the release"))
        })?;
        let at = clock.now();
        let report = report?;
        membership.complete();
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
            hops: taken(&job, &members),
        };
        job::put(&*board, &job::name(About::Ready, rank), &ready).await?;
        Ok(membership)
    }
}

/// The parent's news of a rank's end.
fn ended(board: &Arc<dyn Board>, job: &Job, source: MemberId) -> watch::Receiver<bool> {
    let (tell, news) = watch::channel(false);
    if let Some(rank) = job.number_of(source) {
        let (board, settings) = (Arc::clone(board), &job.settings);
        let patience = settings.setup_timeout.saturating_add(settings.transfer_timeout);
        tokio::spawn(async move {
            if board.wait(&job::name(About::Gone, rank), patience).await.is_ok() {
                tell.send_replace(true);
            }
        });
    }
    news
}

/// Every source imported so far, by rank.
fn taken(job: &Job, members: &Members) -> Vec<HopTaken> {
    let by_rank = |Hop { source, transport, passed }| {
        Some(HopTaken { source: job.rank_of(source)?, transport, passed })
    };
    members.hops().into_iter().filter_map(by_rank).collect()
}
