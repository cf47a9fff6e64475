//! What the ranks of one replication tell one another, and under which names on the board.

use super::{Kill, Request, chunk_bytes, invalid, load::threads};
use crate::{
    config::{Memory, Replicate},
    network::Network,
    registry::PassedOver,
};
use flashboot_core::{
    BlockDigest, Digests, Error, Geometry, Kind, Result, TransportName,
    replica::Assignment,
    schedule::{Rank, Schedule},
};
use flashboot_cuda::Device;
use flashboot_rendezvous::Board;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::{collections::BTreeSet, path::PathBuf, time::Duration};

/// The job, from the parent to every rank: what a clone checks its bytes against comes from here and never
/// from the source it reads.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Job {
    pub(crate) image: String,
    #[serde(with = "any_path")]
    pub(crate) payload: PathBuf,
    pub(crate) bytes: u64,
    pub(crate) block: u64,
    pub(crate) chunk: u64,
    pub(crate) digests: Vec<BlockDigest>,
    pub(crate) settings: Replicate,
    pub(crate) memory: Memory,
    pub(crate) network: Network,
    /// UUIDs of the GPUs that hold the arenas, rank r's the r-th of them around; none: host memory.
    pub(crate) gpus: Vec<String>,
    pub(crate) kill: Option<Kill>,
}

/// A path that need not be UTF-8.
mod any_path {
    use serde::{Deserialize as _, Deserializer, Serialize as _, Serializer};
    use std::{
        ffi::OsString,
        path::{Path, PathBuf},
    };

    pub(super) fn serialize<S: Serializer>(path: &Path, s: S) -> Result<S::Ok, S::Error> {
        path.as_os_str().serialize(s)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<PathBuf, D::Error> {
        OsString::deserialize(d).map(PathBuf::from)
    }
}

impl Job {
    pub(crate) fn new(request: &Request, gpus: &[Device]) -> Result<Self> {
        let Request { source, settings, memory, network, kill, .. } = request;
        let bytes = source.digests.payload();
        let gpus: Vec<String> = gpus.iter().map(|gpu| gpu.uuid().to_owned()).collect();
        let ranks = usize::try_from(settings.schedule().ranks()).unwrap_or(usize::MAX);
        let used: BTreeSet<_> = gpus.iter().take(ranks).collect();
        let job = Self {
            image: source.image.clone(),
            payload: std::path::absolute(&source.payload).unwrap_or_else(|_| source.payload.clone()),
            bytes,
            block: source.digests.block(),
            chunk: chunk_bytes(settings, bytes, used.len()),
            digests: source.digests.values().to_vec(),
            settings: settings.clone(),
            memory: *memory,
            network: network.clone(),
            gpus,
            kill: *kill,
        };
        let geometry = job.geometry()?;
        if settings.clones == 0 {
            return Err(invalid("0 clones: at least one is needed"));
        }
        if let Some(Kill { rank, chunk }) = kill {
            let chunks = geometry.chunks_in(flashboot_core::ShardId(0));
            if *rank > settings.clones || *chunk >= chunks {
                return Err(invalid(format!(
                    "there is no chunk {chunk} of clone {rank} to be killed at: {} clones, {chunks} chunks",
                    settings.clones
                )));
            }
        }
        Ok(job)
    }

    pub(crate) fn schedule(&self) -> Schedule {
        self.settings.schedule()
    }

    pub(crate) fn ranks(&self) -> Rank {
        self.schedule().ranks()
    }

    /// The UUID of the GPU that holds this rank's arena; `None`: it is in host memory.
    pub(crate) fn gpu(&self, rank: Rank) -> Option<&str> {
        let turn = usize::try_from(rank).ok()?.checked_rem(self.gpus.len())?;
        self.gpus.get(turn).map(String::as_str)
    }

    pub(crate) fn geometry(&self) -> Result<Geometry> {
        Geometry::new(self.bytes, self.block, self.chunk, 1).map_err(|e| invalid(e.to_string()))
    }

    pub(crate) fn assignment(&self, rank: Rank) -> Result<Assignment> {
        Ok(Assignment::of(self.schedule(), rank, self.geometry()?))
    }

    pub(crate) fn digests(&self) -> Result<Digests> {
        Digests::new(self.bytes, self.block, self.digests.clone())
            .map_err(|e| Error::new(Kind::Corrupt, "digests", e.to_string()))
    }

    /// Threads that fault in, read and copy at one rank.
    pub(crate) fn threads(&self) -> usize {
        threads(self.memory)
    }
}

/// A rank is mapped: its arena is there, and every source it will read from is imported.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct Mapped {
    /// Making the arena, with every page faulted in.
    pub(crate) arena: Duration,
    /// Of it, filling the arena from disk (the seed's).
    pub(crate) load: Duration,
    /// Importing the sources (a clone's).
    pub(crate) map: Duration,
}

/// A clone is done: every byte verified and committed.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Ready {
    /// Moment of the commit, on the host's clock.
    pub(crate) at: Duration,
    /// Processor time from the release to the commit.
    pub(crate) processor: Duration,
    pub(crate) transfer: Duration,
    pub(crate) verify: Duration,
    pub(crate) bytes: u64,
    pub(crate) chunks: u64,
    pub(crate) verified: u64,
    pub(crate) repaired: u64,
    pub(crate) losses: u32,
    /// Every source it read from, the last one last.
    pub(crate) hops: Vec<HopTaken>,
}

/// A source that was imported, and how.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct HopTaken {
    pub(crate) source: Rank,
    pub(crate) transport: TransportName,
    pub(crate) passed: Vec<PassedOver>,
}

pub(crate) const JOB: &str = "job";
/// The moment of the release, on the host's clock; set once every rank is mapped.
pub(crate) const RELEASE: &str = "release";
/// Every clone is done or gone: nobody reads any more.
pub(crate) const DONE: &str = "done";

/// What one rank puts on the board, or the parent about it.
#[derive(Debug, Clone, Copy)]
pub(crate) enum About {
    /// Every locator of its arena.
    Locators,
    Mapped,
    Ready,
    /// The error it ended in.
    Failed,
    /// Set by the parent: the rank has exited.
    Gone,
    /// Set by a clone: it read from this rank and gave it up.
    Left,
}

pub(crate) fn name(about: About, rank: Rank) -> String {
    let about = match about {
        About::Locators => "locators",
        About::Mapped => "mapped",
        About::Ready => "ready",
        About::Failed => "failed",
        About::Gone => "gone",
        About::Left => "left",
    };
    format!("{about}/{rank}")
}

pub(crate) async fn put(board: &dyn Board, name: &str, value: &impl Serialize) -> Result<()> {
    let json = serde_json::to_string(value)
        .map_err(|e| Error::new(Kind::Invalid, "board put", format!("`{name}`: {e}")))?;
    board.put(name, json).await
}

pub(crate) async fn wait<T: DeserializeOwned>(board: &dyn Board, name: &str, timeout: Duration) -> Result<T> {
    parse(name, &board.wait(name, timeout).await?)
}

pub(crate) async fn look<T: DeserializeOwned>(board: &dyn Board, name: &str) -> Result<Option<T>> {
    board.look(name).await?.map(|json| parse(name, &json)).transpose()
}

fn parse<T: DeserializeOwned>(name: &str, json: &str) -> Result<T> {
    serde_json::from_str(json)
        .map_err(|e| Error::new(Kind::Protocol, "board wait", format!("`{name}` does not parse: {e}")))
}
