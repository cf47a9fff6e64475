//! A rank that is a process of its own.

use super::{
    RUN_PREFIX,
    clock::Clock,
    job::{self, About, Job},
    load::threads,
    rank::{self, Seat},
};
use crate::{
    ErrorWire,
    config::{Memory, Pages},
    registry::{Registry, Settings},
    service,
};
use flashboot_channel::{Endpoint, Security, SecurityConfig};
use flashboot_core::{Arena, ArenaSpec, Error, Kind, Result};
use flashboot_cuda::{CudaArena, CudaArenaConfig, Device};
use flashboot_driver::Step;
use flashboot_memory::{HostArena, HostArenaConfig, PageKind};
use flashboot_rendezvous::{Board, Client, SocketBoard};
use rustix::process::{Signal, getpid, kill_process};
use std::{
    io::Read as _,
    os::unix::fs::FileTypeExt as _,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};
use tracing::{debug, warn};

/// How long the parent may take to say what the job is: it does so before it starts anyone.
const JOB_WAIT: Duration = Duration::from_secs(20);

/// How often a worker tries to remove the run's directory, while others still work in it.
const REMOVALS: u32 = 16;

/// What a parent tells a worker on its command line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkerArgs {
    /// The board's socket, in the run's own directory.
    pub board: PathBuf,
    /// The rank; 0 is the seed.
    pub rank: u32,
}

/// Does the part of one rank, in a process of its own that a parent started with [`super::Workers`].
///
/// Its stdin is the parent's life: at its end the process removes the run's directory and kills itself, so
/// that no worker outlives its parent. Needs a tokio runtime with IO and time.
///
/// # Errors
/// Whatever the part ended in; it is on the board already.
pub async fn worker(args: WorkerArgs) -> Result<()> {
    die_with_parent(&args.board)?;
    let board: Arc<dyn Board> = Arc::new(SocketBoard::new(&args.board));
    let done = part(&args, Arc::clone(&board)).await;
    if let Err(error) = &done {
        let failed = job::put(&*board, &job::name(About::Failed, args.rank), &ErrorWire::from(error)).await;
        if let Err(e) = failed {
            warn!(%e, "cannot tell the parent");
        }
    }
    done
}

pub(crate) fn die_with_parent(board: &Path) -> Result<()> {
    let directory = run_directory(board);
    let watch = move || {
        let mut sink = [0; 64];
        // Data means nothing, an interrupted call neither: only the end and an error do.
        loop {
            match std::io::stdin().lock().read(&mut sink) {
                Ok(n) if n > 0 => {}
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                Ok(_) | Err(_) => break,
            }
        }
        if let Some(directory) = directory {
            // The parent may have removed it, another worker may be at it, or may still make a socket in it.
            for _ in 0..REMOVALS {
                if std::fs::remove_dir_all(&directory).is_ok() || !directory.exists() {
                    break;
                }
            }
        }
        die();
    };
    std::thread::Builder::new()
        .name("flashboot-parent".into())
        .spawn(watch)
        .map(drop)
        .map_err(|e| Error::new(Kind::Exhausted, "clone", format!("a thread to watch the parent: {e}")))
}

/// The directory that the parent made for this run. The path is an argument, and what it names is removed whole
/// when the parent dies: so it must look like a run's, with the board's socket in it.
fn run_directory(board: &Path) -> Option<PathBuf> {
    let directory = board.parent()?;
    let named = directory.file_name()?.as_encoded_bytes().starts_with(RUN_PREFIX.as_bytes());
    let served = std::fs::symlink_metadata(board).is_ok_and(|found| found.file_type().is_socket());
    (named && served).then(|| directory.to_owned())
}

/// Ends this process at once, as if it had been killed.
pub(crate) fn die() {
    // A process may always signal itself.
    let _ = kill_process(getpid(), Signal::KILL);
}

async fn part(args: &WorkerArgs, board: Arc<dyn Board>) -> Result<()> {
    let job: Arc<Job> = Arc::new(job::wait(&*board, job::JOB, JOB_WAIT).await?);
    let settings = Settings {
        sockets: args.board.parent().unwrap_or(Path::new(".")).to_owned(),
        memory: job.memory,
        device: job.gpu(args.rank).map(str::to_owned),
        network: job.network.clone(),
    };
    let endpoints =
        Registry::standard(&settings)?.open(job.settings.transport, &job.settings.allow, &settings).await?;
    let clock = Clock::Host;
    let began = clock.now();
    let spec = ArenaSpec { payload: job.bytes, shards: 1 };
    let arena: Arc<dyn Arena> = match job.gpu(args.rank) {
        Some(uuid) => {
            let (arena, made) = CudaArena::create(&Device::find(uuid)?, spec, &CudaArenaConfig::default())?;
            debug!(rank = args.rank, uuid, ?made, "arena");
            arena
        }
        None => host_arena(spec, job.memory)?,
    };
    let arena_took = clock.now().saturating_sub(began);

    let kill_at = job.kill.filter(|kill| kill.rank == args.rank).map(|kill| kill.chunk);
    let observer = move |step: Step| {
        if let Step::Verified { chunk, .. } = step
            && Some(chunk.index) == kill_at
        {
            die();
        }
    };
    rank::run(Seat {
        rank: args.rank,
        service: Arc::new(client(&job).await?),
        job,
        board,
        endpoints: Arc::new(endpoints),
        arena,
        arena_took,
        clock,
        observer: Box::new(observer),
    })
    .await
}

/// A client of the run's service.
async fn client(job: &Job) -> Result<Client> {
    let at = job.service.as_ref();
    let at = at.ok_or_else(|| Error::new(Kind::Protocol, "replicate", "the parent names no service"))?;
    let endpoint: Endpoint =
        at.endpoint.parse().map_err(|e| Error::new(Kind::Protocol, "replicate", format!("{e}")))?;
    Ok(Client::new(endpoint, secured(&at.token).await?))
}

/// What protects the run's service: whoever can read its directory is of the run.
pub(super) async fn secured(token: &Path) -> Result<Security> {
    let config = SecurityConfig { token_file: Some(token.to_owned()), ..SecurityConfig::default() };
    service::loaded(config).await
}

/// An arena in host memory, every page faulted in with a thread a core.
pub(crate) fn host_arena(spec: ArenaSpec, memory: Memory) -> Result<Arc<dyn Arena>> {
    let threads = threads(memory);
    let (arena, made) = HostArena::create(spec, &arena_config(memory, threads))?;
    debug!(%made, "arena");
    Ok(arena)
}

/// The same with its memory reserved but not touched: whoever reads into it faults it in while it waits for the disk.
pub(crate) fn untouched_arena(spec: ArenaSpec, memory: Memory) -> Result<Arc<dyn Arena>> {
    Ok(HostArena::create(spec, &arena_config(memory, 0))?.0)
}

pub(crate) fn arena_config(memory: Memory, threads: usize) -> HostArenaConfig {
    HostArenaConfig {
        pages: match memory.pages {
            Pages::Auto => PageKind::Auto,
            Pages::Base => PageKind::Base,
            Pages::Huge => PageKind::Huge,
        },
        numa_node: memory.numa_node,
        prefault_threads: threads,
    }
}
