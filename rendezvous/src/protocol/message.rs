//! What client and service say to each other, and how it is written.
//!
//! A connection begins with a [`Hello`] and a [`Greeting`]; these two keep their form in every version. Then the client
//! asks and the service answers, one [`Request`] at a time. All of it is JSON in frames; fields that are not known are
//! passed over, so a version may gain fields.

use super::{
    member::{Blame, Cause, Content, MemberId, Plan, Reader, Registration, Wanted},
    refusal::{Reason, Refusal},
    ring::{Ring, RingNode},
    status::Status,
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

/// The oldest version of the protocol that this release speaks.
pub const OLDEST: u16 = 1;
/// The newest.
pub const NEWEST: u16 = 1;
/// The longest request: a registration, or a part of a manifest.
pub const MAX_REQUEST: usize = 128 << 10;
/// The longest answer: the status of some ten thousand members.
pub const MAX_ANSWER: usize = 16 << 20;
/// Bytes of a manifest's part, before they are written as base64.
pub const PART: usize = 64 << 10;

/// The client's first frame.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// The oldest version it speaks.
    pub oldest: u16,
    /// The newest.
    pub newest: u16,
    /// Its release, for people.
    pub release: String,
}

impl Hello {
    /// This release's.
    pub fn ours() -> Self {
        Self { oldest: OLDEST, newest: NEWEST, release: env!("CARGO_PKG_VERSION").into() }
    }
}

/// The service's answer to it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Greeting {
    /// They talk.
    Welcome {
        /// In this version.
        version: u16,
        /// The service's release, for people.
        release: String,
    },
    /// They do not.
    Refused(Refusal),
}

/// The newest version that both speak.
///
/// # Errors
/// [`Reason::Version`], with both ranges.
pub fn agree(hello: &Hello) -> Result<u16, Refusal> {
    let version = hello.newest.min(NEWEST);
    if version >= hello.oldest.max(OLDEST) {
        return Ok(version);
    }
    let release: String = hello.release.chars().filter(|c| !c.is_control()).take(40).collect();
    Err(Refusal::new(
        Reason::Version,
        format!(
            "the client (release {release}) speaks versions {} to {} of the service's protocol, this release ({}) \
             versions {OLDEST} to {NEWEST}",
            hello.oldest,
            hello.newest,
            env!("CARGO_PKG_VERSION")
        ),
    ))
}

/// What a client asks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(clippy::large_enum_variant, reason = "one at a time")]
pub enum Request {
    /// What is meant by a name; answered [`Answer::Found`] or [`Answer::Wait`].
    Find(Wanted),
    /// Here I am; answered [`Answer::Registered`] or, to a clone that nobody can serve yet, [`Answer::Wait`].
    Register(Registration),
    /// I am still here; answered [`Answer::Renewed`].
    Renew {
        /// Who.
        member: MemberId,
        /// Its secret.
        secret: u64,
        /// Verified bytes.
        holds: u64,
        /// Whom it reads from; `None` once it reads no more.
        upstream: Option<MemberId>,
        /// The number of the plan by which it does; it raises it itself when it finds itself a source.
        epoch: u32,
        /// The membership that it knows.
        membership: u64,
    },
    /// My source is lost; answered [`Answer::Registered`] or [`Answer::Wait`].
    Lost {
        /// Who.
        member: MemberId,
        /// Its secret.
        secret: u64,
        /// The source.
        source: MemberId,
        /// The number of the plan that named it.
        epoch: u32,
        /// Why.
        cause: Cause,
        /// Of what was refused: blocks of it do not match their digests.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        corrupt: bool,
        /// Verified bytes.
        holds: u64,
    },
    /// I go; answered [`Answer::Done`].
    Leave {
        /// Who.
        member: MemberId,
        /// Its secret.
        secret: u64,
    },
    /// A part of a manifest, from a seed; answered [`Answer::Done`].
    Upload {
        /// The manifest's hash.
        manifest: String,
        /// Where the part begins.
        offset: u64,
        /// Its bytes, base64.
        part: String,
    },
    /// A part of a manifest, to a clone; answered [`Answer::Part`] or [`Answer::Wait`].
    Fetch {
        /// The manifest's hash.
        manifest: String,
        /// Where the part begins.
        offset: u64,
    },
    /// A node of an all-gather, here for the first time or still; answered [`Answer::Ring`] or, before all have come,
    /// [`Answer::Wait`].
    Ring(RingNode),
    /// Who holds what; answered [`Answer::Status`].
    Status,
}

/// What the service answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Answer {
    /// What is meant.
    Found(Content),
    /// Registered, or assigned anew.
    Registered {
        /// Renew more often than this, in milliseconds.
        lease_ms: u64,
        /// How much of the manifest the service has; a seed uploads the rest.
        manifest_has: u64,
        /// A clone's.
        plan: Option<Plan>,
    },
    /// Ask again.
    Wait {
        /// After so many milliseconds.
        retry_ms: u64,
        /// What is waited for.
        why: String,
        /// Whoever holds everything gave wrong bytes, or was refused by who asks: it takes another to come.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        refused: bool,
    },
    /// The lease runs anew.
    Renewed {
        /// Renew more often than this, in milliseconds.
        lease_ms: u64,
        /// Where the membership is another than the client knows.
        plan: Option<Plan>,
        /// Who reads from it or did of late, the last of them; where the membership is another than the client knows.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        readers: Vec<Reader>,
        /// What its readers say of its bytes.
        #[serde(default, skip_serializing_if = "Blame::is_none")]
        blame: Blame,
        /// Whom it says it reads from was silent for a lease, or was replaced.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        source_ended: bool,
    },
    /// Bytes of a manifest.
    Part {
        /// Where they begin.
        offset: u64,
        /// The bytes, base64.
        part: String,
    },
    /// It is done.
    Done,
    /// The nodes of an all-gather.
    Ring(Ring),
    /// Who holds what.
    Status(Status),
    /// No.
    Refused(Refusal),
}

/// As it is sent.
pub fn encode(message: &impl Serialize) -> Vec<u8> {
    // Plain structs of texts and numbers serialise.
    serde_json::to_vec(message).unwrap_or_default()
}

/// Reads what a peer sent.
///
/// # Errors
/// [`Reason::Malformed`].
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Refusal> {
    serde_json::from_slice(bytes)
        .map_err(|e| Refusal::new(Reason::Malformed, format!("{} bytes are no message: {e}", bytes.len())))
}
