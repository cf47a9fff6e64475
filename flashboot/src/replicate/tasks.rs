//! Seed and clones as tasks of this process, over the mock.
//!
//! Bytes and digests are real, time is the runtime's: virtual when the caller made it with [`tokio`]'s clock
//! paused, as `replicate --transport mock` does.

use super::{
    LEASE, Outcome, Request,
    clock::Clock,
    job::{self, About, Job, Mapped, Ready, who},
    rank::{self, Seat},
    report::{self, Known, Setting},
};
use crate::registry::Endpoints;
use flashboot_backend_mock::{MockConfig, Network};
use flashboot_core::{ArenaSpec, Error, Result, TransportName, schedule::Rank};
use flashboot_driver::Step;
use flashboot_rendezvous::{Board as _, Client, Inside, LocalBoard, protocol::Rules};
use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};
use tokio::{sync::Notify, task::JoinSet, time::Instant};

pub(super) async fn run(job: Arc<Job>, request: &Request) -> Result<Outcome> {
    let clock = Clock::Runtime(Instant::now());
    let board = Arc::new(LocalBoard::default());
    let network = Network::new(MockConfig::default());
    let service = Arc::new(Inside::new(Rules { lease: LEASE, ..Rules::default() }));
    let ranks = job.ranks();
    let errors = Arc::new(Mutex::new(Vec::new()));
    let mut tasks = JoinSet::new();
    for rank in 0..ranks {
        tasks.spawn(seat(
            Arc::clone(&job),
            rank,
            Arc::clone(&board),
            Client::inside(Arc::clone(&service)),
            network.clone(),
            clock,
            Arc::clone(&errors),
        ));
    }

    let limit = job.settings.setup_timeout;
    for rank in 0..ranks {
        either(&board, About::Mapped, rank, limit).await?;
        if let Some(e) = first(&errors) {
            return Err(e);
        }
    }
    let release = clock.now();
    job::put(&*board, job::RELEASE, &release).await?;
    for rank in 1..ranks {
        either(&board, About::Ready, rank, job.settings.transfer_timeout).await?;
    }
    board.put(job::DONE, String::new()).await?;
    while tasks.join_next().await.is_some() {}

    let mut known = vec![Known::default(); usize::try_from(ranks).unwrap_or(0)];
    for (rank, known) in (0..).zip(&mut known) {
        known.mapped = job::look::<Mapped>(&*board, &job::name(About::Mapped, rank)).await?;
        known.ready = job::look::<Ready>(&*board, &job::name(About::Ready, rank)).await?;
    }
    let setting = Setting { processes: false, setup: release, release };
    let report = report::report(&job, &request.source.rank, &known, setting);
    Ok(Outcome { report, error: first(&errors) })
}

fn first(errors: &Mutex<Vec<Error>>) -> Option<Error> {
    errors.lock().unwrap_or_else(PoisonError::into_inner).first().cloned()
}

/// Waits until `rank` has said what it is asked about, or is gone.
async fn either(board: &LocalBoard, about: About, rank: Rank, limit: Duration) -> Result<()> {
    let (said, gone) = (job::name(about, rank), job::name(About::Gone, rank));
    let done = tokio::select! {
        done = board.wait(&said, limit) => done,
        gone = board.wait(&gone, limit) => gone,
    };
    done.map(drop)
}

/// One rank, until it is done, fails or is killed.
async fn seat(
    job: Arc<Job>,
    rank: Rank,
    board: Arc<LocalBoard>,
    service: Client,
    network: Network,
    clock: Clock,
    errors: Arc<Mutex<Vec<Error>>>,
) {
    let killed = Arc::new(Notify::new());
    let observer = {
        let (killed, network) = (Arc::clone(&killed), network.clone());
        let kill_at = job.kill.filter(|kill| kill.rank == rank).map(|kill| kill.chunk);
        move |step: Step| {
            if let Step::Verified { chunk, .. } = step
                && Some(chunk.index) == kill_at
            {
                network.kill(rank);
                killed.notify_one();
            }
        }
    };
    let part = async {
        let arena = network.arena(rank, ArenaSpec { payload: job.bytes, shards: 1 })?;
        let endpoints = Arc::new(Endpoints::only(TransportName::Mock, network.endpoint(rank)));
        let board: Arc<LocalBoard> = Arc::clone(&board);
        rank::run(Seat {
            rank,
            job: Arc::clone(&job),
            board,
            service: Arc::new(service),
            endpoints,
            arena,
            arena_took: Duration::ZERO,
            clock,
            observer: Box::new(observer),
        })
        .await
    };
    let ended = tokio::select! {
        biased;
        () = killed.notified() => Ok(()),
        ended = part => match ended {
            Ok(()) => return,
            Err(e) => Err(e),
        },
    };
    if let Err(e) = ended {
        let said = Error::new(e.kind(), "replicate", format!("{}: {}: {}", who(rank), e.op(), e.detail()));
        errors.lock().unwrap_or_else(PoisonError::into_inner).push(said);
        network.kill(rank);
    }
    // Set once, by nobody else: cannot fail.
    let _ = board.put(&job::name(About::Gone, rank), String::new()).await;
}
