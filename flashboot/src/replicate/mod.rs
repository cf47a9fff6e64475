//! One host replicates a rank image: a seed, N clones, every block verified.
//!
//! [`run`] starts them as processes of the caller's own program (which must call [`worker`](fn@worker) when it is started
//! with the arguments of [`Workers`]), or as tasks over the mock. All are members of a replication service that lives as long as
//! the run, the same as any seeds and clones are of theirs ([`crate::service`]): it names sources and finds others. `parent`
//! serves it, releases all ranks at one moment over a board, and trusts no clone's clock but the host's; `rank` is what one
//! seed or clone does, the same for processes and tasks; `load` fills the seed's arena from disk.

mod clock;
mod gpu;
mod job;
mod let_go;
mod load;
mod parent;
mod process;
mod rank;
mod report;
mod tasks;
mod worker;

pub use report::{CloneReport, Hop, Report, SeedReport};
pub use worker::{WorkerArgs, worker};
// What a bench does in the same way.
pub(crate) use clock::Clock;
pub(crate) use gpu::{Room, resolve as resolve_devices};
pub(crate) use job::{put, wait, who};
pub(crate) use let_go::LetGo;
pub(crate) use load::{fill, fill_range, threads};
pub(crate) use parent::host_room;
pub(crate) use process::{listen, spawn};
pub(crate) use worker::{arena_config, die, die_with_parent, host_arena, untouched_arena};

use crate::{
    config::{Choice, Chunk, Devices, Memory, Replicate},
    network::Network,
};
use flashboot_core::{
    BLOCK, Digests, Error, Kind, Result, TransportName,
    schedule::{ChunkCosts, auto_chunk},
};
use std::{ffi::OsString, fmt, path::PathBuf, str::FromStr, sync::Arc, time::Duration};

/// How the name of a run's directory begins.
pub(crate) const RUN_PREFIX: &str = "flashboot-";

/// How long a rank may be silent before the run's service forgets it; one that was lost has to renew before anybody is sent
/// to it again.
const LEASE: Duration = Duration::from_secs(3);

/// The rank image to replicate, as the image's metadata has it.
#[derive(Debug, Clone)]
pub struct Source {
    /// The image's id.
    pub image: String,
    /// The rank image's name (`target-0-0-0-0`).
    pub rank: String,
    /// Its payload file.
    pub payload: PathBuf,
    /// What proves it.
    pub digests: Digests,
}

/// How to start a worker: a program and the arguments before `--board PATH --rank N`.
#[derive(Debug, Clone)]
pub struct Workers {
    /// The program; the caller's own, as a rule.
    pub program: PathBuf,
    /// What makes it call [`worker`](fn@worker).
    pub args: Vec<OsString>,
    /// Where the run's directory of mode 0700 is made; a short path, since sockets lie in it.
    pub directory: PathBuf,
    /// Is given every line a worker writes to stderr.
    pub stderr: fn(rank: u32, line: &str),
}

/// A clone that kills itself once it has verified a chunk: for tests of what the survivors do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Kill {
    /// The clone.
    pub rank: u32,
    /// The chunk.
    pub chunk: u64,
}

impl FromStr for Kill {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parsed = text.split_once('@').and_then(|(r, c)| Some((r.parse().ok()?, c.parse().ok()?)));
        let (rank, chunk) = parsed.ok_or_else(|| format!("`{text}` is not RANK@CHUNK, such as 2@1"))?;
        if rank == 0 {
            return Err("rank 0 is the seed: a clone's rank is 1 or more".into());
        }
        Ok(Self { rank, chunk })
    }
}

impl fmt::Display for Kill {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.rank, self.chunk)
    }
}

/// One replication to do.
#[derive(Debug, Clone)]
pub struct Request {
    /// What.
    pub source: Source,
    /// How.
    pub settings: Replicate,
    /// The arenas.
    pub memory: Memory,
    /// What crosses between hosts.
    pub network: Network,
    /// A clone to lose on purpose.
    pub kill: Option<Kill>,
    /// How processes are started; unused with the mock.
    pub workers: Workers,
}

/// What came of it: the account of every clone, and the error that the whole ended in, if it did.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// The account; clones that did not finish have no times.
    pub report: Report,
    /// The first failure of a clone that was not killed on purpose.
    pub error: Option<Error>,
}

/// Starts a seed and clones and waits for all of them.
///
/// Returns once no worker is left, whatever happened; `stop` ends it early, as [`Kind::Cancelled`] (the mock's tasks,
/// whose time is virtual, it does not). Must run on a tokio runtime with IO and time; a current-thread
/// runtime whose clock is paused makes the mock's time virtual.
///
/// # Errors
/// Those of the set-up, where nothing was moved: a refused image, a worker that died or hung (with its exit
/// status and the end of its stderr), [`Kind::Deadline`]. Later failures come in [`Outcome::error`].
pub async fn run(request: Request, stop: impl Future<Output = ()>) -> Result<Outcome> {
    let mock = request.settings.transport == Choice::Only(TransportName::Mock);
    if mock && request.settings.device != Devices::Host {
        return Err(invalid("the mock has no GPUs: use --device host, or another transport"));
    }
    let gpus = gpu::resolve(&request.settings.device, request.settings.setup_timeout).await?;
    let job = job::Job::new(&request, &gpus)?;
    gpu::admit(&gpus, &job).await?;
    match request.settings.transport {
        Choice::Only(TransportName::Mock) => tasks::run(Arc::new(job), &request).await,
        _ => parent::run(job, &request, stop).await,
    }
}

/// The chunk that `settings` mean for a payload of `bytes` in arenas on `gpus`, none of them: in host memory.
fn chunk_bytes(settings: &Replicate, bytes: u64, gpus: usize) -> u64 {
    let costs = match gpus {
        0 => ChunkCosts::HOST,
        1 => ChunkCosts::SAME_GPU,
        // The slowest hop of a chain sets its pace: that between two GPUs.
        _ => ChunkCosts::NVLINK,
    };
    match settings.chunk {
        Chunk::Bytes(size) => size.0,
        Chunk::Auto => auto_chunk(bytes, settings.schedule().depth(), settings.verify, BLOCK, costs),
    }
}

fn invalid(detail: impl Into<String>) -> Error {
    Error::new(Kind::Invalid, "replicate", detail)
}
