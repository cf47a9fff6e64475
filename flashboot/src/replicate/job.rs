//! What the ranks of one replication tell one another, and under which names on the board.

use super::{Kill, Request, Source, chunk_bytes, invalid, load::threads};
use crate::{
    config::{Memory, Replicate},
    network::Network,
    registry::PassedOver,
    service::{peer, random},
};
use flashboot_core::{
    BlockDigest, Digests, Error, Generation, Geometry, Kind, PeerId, Result, TransportName,
    replica::{Assignment, SourcedLeg},
    schedule::{Rank, Schedule},
};
use flashboot_cuda::Device;
use flashboot_rendezvous::{
    Board,
    protocol::{Content, MemberId},
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::{collections::BTreeSet, path::PathBuf, time::Duration};

/// How often a clone's process is started again, where only a new process helps.
const RESTARTS: usize = 2;

/// The job, from the parent to every rank: what a clone checks its bytes against comes from here and never
/// from the source it reads.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Job {
    pub(crate) image: String,
    /// The rank image's name.
    pub(crate) rank: String,
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
    /// What the ranks are of the run's service, by rank; then what those are that take a rank's place, see [`Job::base`].
    pub(crate) members: Vec<Identity>,
    /// The service; `None` where it is in this process.
    pub(crate) service: Option<ServiceAt>,
}

/// A rank as the service knows it.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct Identity {
    pub(crate) member: MemberId,
    pub(crate) secret: u64,
}

/// Where the run's service is.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct ServiceAt {
    pub(crate) endpoint: String,
    /// The file of the secret that members have, in the run's directory.
    #[serde(with = "any_path")]
    pub(crate) token: PathBuf,
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
        let Source { image, rank, payload, .. } = source;
        let job = Self {
            image: image.clone(),
            rank: rank.clone(),
            payload: std::path::absolute(payload).unwrap_or_else(|_| payload.clone()),
            bytes,
            block: source.digests.block(),
            chunk: chunk_bytes(settings, bytes, used.len()),
            digests: source.digests.values().to_vec(),
            settings: settings.clone(),
            memory: *memory,
            network: network.clone(),
            gpus,
            kill: *kill,
            members: (0..ranks.saturating_mul(1 + RESTARTS))
                .map(|_| Identity::new())
                .collect::<Result<_>>()?,
            service: None,
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

    /// The rank that the process with this number is of: the first of rank r is the r-th, the next is the r-th after all ranks.
    pub(crate) fn base(&self, number: Rank) -> Rank {
        number.checked_rem(self.ranks()).unwrap_or(0)
    }

    /// The process that takes the place of the one with this number, if it may have a successor.
    pub(crate) fn successor(&self, number: Rank) -> Option<Rank> {
        let next = number.checked_add(self.ranks())?;
        self.member(next).is_ok().then_some(next)
    }

    /// How often the rank of this process was started again before it.
    pub(crate) fn restarts(&self, number: Rank) -> u32 {
        number.checked_div(self.ranks()).unwrap_or(0)
    }

    /// The UUID of the GPU that holds this rank's arena; `None`: it is in host memory.
    pub(crate) fn gpu(&self, rank: Rank) -> Option<&str> {
        let turn = usize::try_from(self.base(rank)).ok()?.checked_rem(self.gpus.len())?;
        self.gpus.get(turn).map(String::as_str)
    }

    pub(crate) fn geometry(&self) -> Result<Geometry> {
        Geometry::new(self.bytes, self.block, self.chunk, 1).map_err(|e| invalid(e.to_string()))
    }

    /// What `rank` is to do, where ranks are peers by their fillings' words.
    pub(crate) fn assignment(&self, rank: Rank) -> Result<Assignment> {
        let by_rank = Assignment::of(self.schedule(), rank, self.geometry()?);
        let named =
            |leg: SourcedLeg| Ok(SourcedLeg { source: peer(self.member(number(leg.source))?.member), ..leg });
        Ok(Assignment { legs: by_rank.legs.into_iter().map(named).collect::<Result<_>>()?, ..by_rank })
    }

    /// All of it from `source`.
    pub(crate) fn whole(&self, source: MemberId) -> Result<Assignment> {
        let legs = vec![SourcedLeg { source: peer(source), shard: flashboot_core::ShardId(0) }];
        Ok(Assignment { geometry: self.geometry()?, held: Vec::new(), legs, gate: self.schedule().gate() })
    }

    /// Whom `rank` reads from first; `None` for the seed.
    pub(crate) fn source(&self, rank: Rank) -> Option<Rank> {
        self.schedule().legs(rank).first().map(|leg| leg.source)
    }

    pub(crate) fn member(&self, rank: Rank) -> Result<Identity> {
        let found = usize::try_from(rank).ok().and_then(|rank| self.members.get(rank).copied());
        found.ok_or_else(|| invalid(format!("there is no rank {rank}")))
    }

    /// The process that a member is.
    pub(crate) fn number_of(&self, member: MemberId) -> Option<Rank> {
        let at = self.members.iter().position(|identity| identity.member == member)?;
        Rank::try_from(at).ok()
    }

    /// The rank that a member is.
    pub(crate) fn rank_of(&self, member: MemberId) -> Option<Rank> {
        self.number_of(member).map(|number| self.base(number))
    }

    /// As people call the rank, where the error names its filling.
    pub(crate) fn named(&self, error: Error) -> Error {
        let is = |identity: &Identity| error.peer() == Some(&peer(identity.member).to_string());
        let rank = self.members.iter().position(is).and_then(|at| Rank::try_from(at).ok());
        match rank {
            Some(number) => error.with_peer(who(self.base(number))),
            None => error,
        }
    }

    /// What the ranks hold, as the service knows it, and what proves it; ranks have that from the parent, over the board.
    pub(crate) fn content(&self) -> Result<(Content, Vec<u8>)> {
        let manifest = serde_json::to_vec(&self.digests)
            .map_err(|e| Error::new(Kind::Invalid, "json", format!("the digests: {e}")))?;
        let hex = self.image.len() == 64 && self.image.bytes().all(|b| b.is_ascii_hexdigit());
        let hash = |bytes: &[u8]| blake3::hash(bytes).to_hex().to_string();
        let content = Content {
            image: if hex { self.image.to_ascii_lowercase() } else { hash(self.image.as_bytes()) },
            rank: self.rank.clone(),
            model: "replicate".into(),
            revision: String::new(),
            fingerprint: String::new(),
            bytes: self.bytes,
            manifest: hash(&manifest),
            manifest_bytes: manifest.len() as u64,
        };
        Ok((content, manifest))
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

impl Identity {
    fn new() -> Result<Self> {
        Ok(Self { member: MemberId(Generation::from_random(random()?)), secret: random()? })
    }
}

/// The rank that a peer of a schedule stands for.
fn number(peer: PeerId) -> Rank {
    Rank::try_from(peer.0).unwrap_or(Rank::MAX)
}

/// A rank as people call it.
pub(crate) fn who(rank: Rank) -> String {
    if rank == 0 { "seed".into() } else { format!("clone {rank}") }
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
    /// What was imported (a clone's).
    pub(crate) hops: Vec<HopTaken>,
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
    /// It is a member of the service.
    Joined,
    Mapped,
    Ready,
    /// The error it ended in.
    Failed,
    /// A rank has ended before its time.
    Gone,
}

pub(crate) fn name(about: About, rank: Rank) -> String {
    let about = match about {
        About::Joined => "joined",
        About::Mapped => "mapped",
        About::Ready => "ready",
        About::Failed => "failed",
        About::Gone => "gone",
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
