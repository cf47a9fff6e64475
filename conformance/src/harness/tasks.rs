//! Ranks as tasks of one runtime whose clock is paused: for the mock.

use crate::{Case, Ctx, Fixture, Outcome, harness::CASE_DEADLINE};
use flashboot_rendezvous::LocalBoard;
use std::{
    any::Any,
    sync::{Arc, mpsc},
    time::Duration,
};
use tokio::{sync::watch, task::JoinSet};

/// Virtual time a case may take.
const VIRTUAL_DEADLINE: Duration = Duration::from_secs(600);

/// Runs one case with every rank a task; all ranks share `fixture`.
pub fn run_in_tasks(fixture: Box<dyn Fixture>, case: &Case) -> Outcome {
    let (done, outcome) = mpsc::channel();
    let case = case.clone();
    // A thread of its own: a case that spins without awaiting must not take the suite along.
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
        let outcome = match runtime {
            Ok(runtime) => runtime.block_on(run(Arc::from(fixture), &case)),
            Err(e) => Outcome::Failed(format!("no runtime: {e}")),
        };
        let _ = done.send(outcome);
    });
    outcome
        .recv_timeout(CASE_DEADLINE)
        .unwrap_or_else(|_| Outcome::Failed(format!("still running after {CASE_DEADLINE:?} of real time")))
}

async fn run(fixture: Arc<dyn Fixture>, case: &Case) -> Outcome {
    let dir = match tempfile::tempdir() {
        Ok(dir) => dir,
        Err(e) => return Outcome::Failed(format!("no temporary directory: {e}")),
    };
    let board = Arc::new(LocalBoard::default());
    let mut ranks = JoinSet::new();
    for rank in 0..case.ranks {
        let dead = watch::Sender::new(false);
        let mut died = dead.subscribe();
        let ctx = Ctx {
            rank,
            ranks: case.ranks,
            fixture: Arc::clone(&fixture),
            board: Arc::clone(&board) as _,
            dir: dir.path().join(rank.to_string()),
            dead,
        };
        let made = std::fs::create_dir(&ctx.dir);
        let run = (case.run)(ctx);
        ranks.spawn(async move {
            assert!(made.is_ok(), "a directory for the rank");
            tokio::select! {
                biased;
                // An error cannot come before `run` has ended: it holds the sender.
                _ = died.wait_for(|dead| *dead) => {}
                () = run => {}
            }
        });
    }
    let all = async {
        while let Some(ended) = ranks.join_next().await {
            if let Err(e) = ended {
                return Outcome::Failed(if e.is_panic() { said(&*e.into_panic()) } else { e.to_string() });
            }
        }
        Outcome::Passed
    };
    tokio::time::timeout(VIRTUAL_DEADLINE, all).await.unwrap_or_else(|_| {
        Outcome::Failed(format!("still running after {VIRTUAL_DEADLINE:?} of virtual time"))
    })
}

fn said(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("a panic without a text").to_owned()
}
