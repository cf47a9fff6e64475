//! What clients and the agent say to each other: frames of JSON over a Unix stream, some with a descriptor.
//!
//! A client sends an [`Envelope`]; the agent answers with any number of [`Reply::Progress`] and [`Reply::Landed`], at least one
//! each [`HEARTBEAT`], and one last reply. A connection may ask again and again; what it attached is its own until it ends.

use super::{
    ledger::{Entry, Key, Place},
    store::Status,
};
use flashboot_channel::{ErrorWire, local::Wire};
use flashboot_core::{Error, Kind, Locator, Result};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::{
    fmt,
    os::fd::{BorrowedFd, OwnedFd},
    time::{Duration, Instant},
};

/// Of this protocol: both ends say the same, or nothing happens.
pub const PROTOCOL_VERSION: u32 = 2;
/// The longest manifest that is taken.
pub const MOST_MANIFEST: usize = 256 << 20;
/// The longest request: a push names the ranges that are missing.
pub(super) const MOST_REQUEST: usize = 1 << 20;
/// The longest reply: a list of everything.
pub(super) const MOST_REPLY: usize = 8 << 20;
/// Between two signs of life while something is being done.
pub(super) const HEARTBEAT: Duration = Duration::from_secs(1);
/// How long one frame may take, once it has begun or is due.
pub(super) const FRAME: Duration = Duration::from_secs(30);

/// A request, and the release of the protocol that it is of.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Envelope {
    pub(super) version: u32,
    pub(super) request: Request,
}

/// What a client wants.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Request {
    /// Have this in memory. With the payload's descriptor, unless it is an object; a frame with the manifest follows.
    Keep {
        key: Key,
        /// What the payload's file is called, for errors.
        name: String,
        /// Where the payload is, if it is in no file.
        object: Option<Object>,
        priority: i32,
        /// Hold it; else stage it.
        hold: Option<Lease>,
        /// Answer once it is ready; else once it is admitted.
        wait: bool,
    },
    /// Give a descriptor of it, and keep it for this connection.
    Attach {
        key: Key,
        /// Only if it is held.
        held: bool,
    },
    /// Copy what was staged of it into the arena whose descriptor comes along.
    Push { image: String, rank: String, into: Locator, missing: Vec<(u64, u64)> },
    /// Give what proves a rank image that is here, wherever it lies. A frame with the manifest follows the answer.
    Manifest { image: String, rank: String },
    /// Say what there is.
    List,
    /// Give these up: everything of an image, or of a rank, or at one place, that nobody has attached.
    Evict { image: Option<String>, rank: Option<String>, place: Option<Place> },
    /// Make room for somebody else at a place.
    Room { place: Place, bytes: u64, priority: i32 },
}

/// A payload among objects, and how it is fetched. Values of options may be secrets.
#[derive(Serialize, Deserialize)]
pub(super) struct Object {
    pub(super) url: String,
    pub(super) payload: String,
    pub(super) options: Vec<(String, String)>,
    pub(super) allow_http: bool,
    pub(super) range: u64,
    pub(super) attempts: u32,
    pub(super) timeout_ms: u64,
}

impl fmt::Debug for Object {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { url, payload, .. } = self;
        f.debug_struct("Object").field("url", url).field("payload", payload).finish_non_exhaustive()
    }
}

/// For how long nobody may use it before it goes; `None`: for ever.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(super) struct Lease {
    pub(super) ms: Option<u64>,
}

/// What the agent answers.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Reply {
    /// It goes on.
    Progress { done: u64, total: u64 },
    /// These bytes are in the arena.
    Landed { start: u64, end: u64 },
    /// It is in memory, or will be.
    Kept(Entry),
    /// With a descriptor.
    Attached(Grant),
    /// All that was missing has been copied.
    Pushed { bytes: u64, pin_ms: f64 },
    /// The manifest follows.
    Manifest,
    /// Everything.
    Listed(Status),
    /// What was given up.
    Gone(Vec<Entry>),
    /// Nothing was done.
    Refused(ErrorWire),
}

/// An arena that was attached, as its owner has it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Grant {
    pub(super) payload: u64,
    pub(super) capacity: u64,
    pub(super) shards: u32,
    pub(super) generation: u64,
    pub(super) place: Place,
}

/// Sends `message`, and copies of `descriptors`.
pub(super) fn send(
    wire: &Wire,
    message: &impl Serialize,
    descriptors: &[BorrowedFd<'_>],
    cap: usize,
) -> Result<()> {
    let body = serde_json::to_vec(message).map_err(|e| Error::new(Kind::Invalid, "send", e.to_string()))?;
    wire.send(&body, descriptors, cap, Instant::now() + FRAME)
}

/// The next message, with at most one descriptor; `None` where the other end is gone.
pub(super) fn receive<T: DeserializeOwned>(
    wire: &Wire,
    cap: usize,
    deadline: Instant,
) -> Result<Option<(T, Option<OwnedFd>)>> {
    let Some((body, descriptors)) = wire.receive(cap, 1, deadline)? else { return Ok(None) };
    let message = serde_json::from_slice(&body).map_err(|e| {
        Error::new(Kind::Protocol, "receive", format!("a frame that is none of the agent's: {e}"))
            .with_peer(wire.name())
            .with_remedy("run the same release on both sides")
    })?;
    Ok(Some((message, descriptors.into_iter().next())))
}
