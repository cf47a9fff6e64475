//! Ranks as processes: the test binary executed again, once per rank.

use crate::{
    Case, Ctx, Outcome,
    ctx::{death_note, pid_note},
    harness::{self, CASE_DEADLINE, Make},
};
use flashboot_rendezvous::{Board as _, BoardServer, LocalBoard, SocketBoard};
use std::{
    fs::{self, DirBuilder, File},
    io,
    os::unix::{fs::DirBuilderExt as _, process::ExitStatusExt as _},
    path::{Path, PathBuf},
    process::{ExitCode, ExitStatus, Stdio},
    sync::Arc,
};
use tokio::{
    process::{Child, Command},
    sync::watch,
};

const CASE: &str = "FLASHBOOT_CONFORMANCE_CASE";
const RANK: &str = "FLASHBOOT_CONFORMANCE_RANK";
const DIR: &str = "FLASHBOOT_CONFORMANCE_DIR";
const SIGKILL: i32 = 9;

/// What a rank's process is told by its parent.
pub(crate) struct ChildOf {
    case: String,
    rank: u32,
    dir: PathBuf,
}

impl ChildOf {
    /// `None` in a process that no parent executed as a rank.
    pub(crate) fn parent() -> Option<Self> {
        let var = |name| std::env::var(name).ok();
        Some(Self { case: var(CASE)?, rank: var(RANK)?.parse().ok()?, dir: var(DIR)?.into() })
    }
}

fn board_path(dir: &Path) -> PathBuf {
    dir.join("board")
}

/// Runs the rank that this process is. A panic is a failed rank and ends the process with code 101.
pub(crate) fn run_rank(make: Make, child: &ChildOf) -> ExitCode {
    let case = harness::all().into_iter().find(|case| case.name == child.case).expect("a case of the table");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let ctx = Ctx {
        rank: child.rank,
        ranks: case.ranks,
        fixture: Arc::from(make()),
        board: Arc::new(SocketBoard::new(board_path(&child.dir))),
        dir: child.dir.join(child.rank.to_string()),
        dead: watch::Sender::new(false),
    };
    let pid = rustix::process::getpid().as_raw_nonzero().to_string();
    fs::write(pid_note(&ctx.dir), pid).expect("the rank's own directory");
    let board = Arc::clone(&ctx.board);
    let (dead, rank) = (ctx.dead.subscribe(), child.rank);
    runtime.block_on(async move {
        (case.run)(ctx).await;
        assert!(!*dead.borrow(), "it was to be dead");
        board.put(&format!("ended/{rank}"), String::new()).await.expect("the parent is there");
    });
    ExitCode::SUCCESS
}

/// Runs one case from its parent.
pub(crate) fn run(case: &Case) -> Outcome {
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(e) => return Outcome::Failed(format!("no runtime: {e}")),
    };
    match runtime.block_on(parent(case)) {
        Ok(outcome) => outcome,
        Err(e) => Outcome::Failed(format!("cannot run the ranks: {e}")),
    }
}

async fn parent(case: &Case) -> io::Result<Outcome> {
    let dir = tempfile::Builder::new().prefix("fbc").tempdir()?;
    let server = BoardServer::bind(&board_path(dir.path())).map_err(io::Error::other)?;
    let mut children = Vec::new();
    for rank in 0..case.ranks {
        DirBuilder::new().mode(0o700).create(dir.path().join(rank.to_string()))?;
        children.push(spawn(case, rank, dir.path())?);
    }
    let board = server.board();
    let all = async {
        let mut verdict = Outcome::Passed;
        // All at once: the first rank to fail takes the others along, which is how the cause stays in sight.
        let mut waits: futures_util::stream::FuturesUnordered<_> = children
            .iter_mut()
            .enumerate()
            .map(|(rank, child)| async move { (rank, child.wait().await) })
            .collect();
        while let Some((rank, status)) = futures_util::StreamExt::next(&mut waits).await {
            if let Err(why) = ended_well(&board, dir.path(), rank, status?).await {
                let log = fs::read_to_string(log_path(dir.path(), rank as u32)).unwrap_or_default();
                verdict = Outcome::Failed(format!("rank {rank} {why}\n{}", tail(&log)));
                break;
            }
        }
        Ok::<_, io::Error>(verdict)
    };
    match tokio::time::timeout(CASE_DEADLINE, all).await {
        Ok(verdict) => verdict,
        // Dropping the children kills them.
        Err(_) => {
            let logs = (0..case.ranks).map(|rank| {
                let log = fs::read_to_string(log_path(dir.path(), rank)).unwrap_or_default();
                format!("rank {rank}:\n{}\n", tail(&log))
            });
            let logs: String = logs.collect();
            Ok(Outcome::Failed(format!("still running after {CASE_DEADLINE:?}: a rank hangs\n{logs}")))
        }
    }
}

fn log_path(dir: &Path, rank: u32) -> PathBuf {
    dir.join(format!("{rank}.log"))
}

fn spawn(case: &Case, rank: u32, dir: &Path) -> io::Result<Child> {
    let log = File::create(log_path(dir, rank))?;
    Command::new(std::env::current_exe()?)
        .env(CASE, &case.name)
        .env(RANK, rank.to_string())
        .env(DIR, dir)
        // The message says which case and line; a backtrace would push it out of the tail shown.
        .env("RUST_BACKTRACE", "0")
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log)
        .kill_on_drop(true)
        .spawn()
}

/// A rank ends well by saying that it did and exiting with 0, or by the SIGKILL that it gave itself.
async fn ended_well(
    board: &Arc<LocalBoard>,
    dir: &Path,
    rank: usize,
    status: ExitStatus,
) -> Result<(), String> {
    let ended = board.look(&format!("ended/{rank}")).await;
    if status.success() && matches!(ended, Ok(Some(_))) {
        return Ok(());
    }
    if status.signal() == Some(SIGKILL) && death_note(&dir.join(rank.to_string())).exists() {
        return Ok(());
    }
    Err(format!("ended with {status}"))
}

/// The end of a log: enough for a panic and what led to it.
fn tail(log: &str) -> String {
    let lines: Vec<_> = log.lines().collect();
    lines[lines.len().saturating_sub(30)..].join("\n")
}
