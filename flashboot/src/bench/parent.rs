//! The process that starts the ranks of a bench, releases them repeat by repeat, and collects their accounts.
//!
//! Whatever happens, it returns with every worker ended and the run's directory gone.

use super::{
    names::{self, At},
    plan::{Plan, Stage},
    result::{Done, Measured, Repeat, SetUp},
};
use crate::{
    ErrorWire,
    replicate::{Clock, RUN_PREFIX, Workers, listen, spawn, who},
    scratch::Scratch,
};
use flashboot_core::{Error, Kind, Result, schedule::Rank};
use flashboot_rendezvous::{Board as _, BoardServer, LocalBoard};
use serde::de::DeserializeOwned;
use std::{sync::Arc, time::Duration};
use tokio::{process::Child, time::timeout};

/// How far ahead a release is set, so that every rank has heard of it by then.
const AHEAD: Duration = Duration::from_millis(10);
/// How long workers may take to exit once all is measured.
const FAREWELL: Duration = Duration::from_secs(5);

/// Measures `plan` with processes that `workers` says how to start; they must call [`worker`](super::worker).
/// `told` hears of every stage when it is measured.
///
/// # Errors
/// [`Kind::Invalid`] for a plan that cannot be; the first that a rank ends in, with who it was; [`Kind::Deadline`]; [`Kind::Cancelled`] when `stop` ends it.
pub async fn run(
    plan: &Plan,
    workers: &Workers,
    stop: impl Future<Output = ()>,
    mut told: impl FnMut(&Measured),
) -> Result<Vec<Measured>> {
    plan.stages.iter().try_for_each(|stage| stage.geometry().map(drop))?;
    let directory = Scratch::new(&workers.directory, RUN_PREFIX)
        .map_err(|e| Error::from_io("mkdir", &e, workers.directory.display().to_string()))?;
    let path = directory.path().join("board");
    let server = BoardServer::bind(&path)?;
    let board = server.board();
    names::put(&*board, names::PLAN, plan).await?;
    let (mut crew, mut lives) = (Vec::new(), Vec::new());
    for rank in 0..plan.ranks() {
        let mut child = spawn(workers, &path, rank)?;
        // Its end is the worker's end, and waiting for a child would close it.
        lives.push(child.stdin.take());
        drop(listen(child.stderr.take(), rank, workers.stderr));
        crew.push(child);
    }
    let mut parent = Parent { plan, board, crew };
    let measured = tokio::select! {
        biased;
        () = stop => Err(Error::new(Kind::Cancelled, "bench", "stopped by a signal; every worker was ended")),
        measured = parent.conduct(&mut told) => measured,
    };
    parent.end(measured.is_ok()).await;
    drop((lives, server));
    let _ = directory.close();
    measured
}

struct Parent<'a> {
    plan: &'a Plan,
    board: Arc<LocalBoard>,
    /// By rank.
    crew: Vec<Child>,
}

impl Parent<'_> {
    async fn conduct(&mut self, told: &mut impl FnMut(&Measured)) -> Result<Vec<Measured>> {
        let mut all = Vec::new();
        for (index, stage) in self.plan.stages.iter().enumerate() {
            let mut repeats = Vec::new();
            for repeat in 0..stage.repeats {
                repeats.push(self.repeat(stage, (index, repeat)).await?);
            }
            let measured = Measured { stage: *stage, repeats };
            told(&measured);
            all.push(measured);
        }
        Ok(all)
    }

    async fn repeat(&mut self, stage: &Stage, at: At) -> Result<Repeat> {
        let schedule = stage.shape.schedule();
        let settings = &self.plan.settings;
        let (set_up, transfer) = (settings.setup_timeout, settings.transfer_timeout);
        let mut repeat = Repeat::default();
        for rank in 0..schedule.ranks() {
            repeat.set_up.push(self.hear::<SetUp>(&names::mapped(at, rank), set_up).await?);
        }
        names::put(&*self.board, &names::go(at), &(Clock::Host.now() + AHEAD)).await?;
        for rank in 0..schedule.ranks() {
            if schedule.legs(rank).is_empty() {
                continue;
            }
            repeat.done.insert(rank, self.hear::<Done>(&names::done(at, rank), transfer).await?);
        }
        self.board.put(&names::over(at), String::new()).await?;
        Ok(repeat)
    }

    /// Waits for a word on the board, or for the first rank to end before it.
    async fn hear<T: DeserializeOwned>(&mut self, name: &str, limit: Duration) -> Result<T> {
        let board = Arc::clone(&self.board);
        let word = names::wait(&*board, name, limit);
        tokio::select! {
            biased;
            word = word => word,
            (rank, how) = ended(&mut self.crew) => Err(self.cause(rank, how).await),
        }
    }

    async fn cause(&self, rank: Rank, how: String) -> Error {
        let said = self.board.look(&names::failed(rank)).await.ok().flatten();
        match said.and_then(|json| serde_json::from_str::<ErrorWire>(&json).ok()) {
            Some(wire) => wire.into_error("bench", &who(rank)),
            None => Error::new(Kind::SourceLost, "bench", format!("{} {how}", who(rank))),
        }
    }

    /// Those that are done exit by themselves; the others are killed.
    async fn end(mut self, succeeded: bool) {
        for child in &mut self.crew {
            if !succeeded || timeout(FAREWELL, child.wait()).await.is_err() {
                // It may have gone meanwhile.
                let _ = child.kill().await;
            }
        }
    }
}

/// The first rank that ends.
async fn ended(crew: &mut [Child]) -> (Rank, String) {
    let waits = (0..).zip(crew).map(|(rank, child)| {
        Box::pin(async move {
            let how = child.wait().await.map_or_else(|e| e.to_string(), |status| format!("ended: {status}"));
            (rank, how)
        })
    });
    futures_util::future::select_all(waits).await.0
}
