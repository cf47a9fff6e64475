//! Who holds what, for people and `flashboot status`.

use super::member::{Content, MemberId, Place, Role};
use serde::{Deserialize, Serialize};

/// Everything the service knows, but secrets and locators.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// The service's release.
    pub release: String,
    /// How long a member may be silent, in milliseconds.
    pub lease_ms: u64,
    /// Every content that has members, or had some a lease ago.
    pub contents: Vec<Content>,
    /// Every member, in the order in which they came.
    pub members: Vec<MemberStatus>,
}

/// How many members read from `member`, registered or not.
pub fn readers_of(status: &Status, member: MemberId) -> usize {
    status.members.iter().filter(|m| m.upstream == Some(member)).count()
}

/// One member.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemberStatus {
    /// Who.
    pub member: MemberId,
    /// Its name, where it has one.
    pub name: Option<String>,
    /// What it came as.
    pub role: Role,
    /// The number of its content in the list.
    pub content: usize,
    /// Verified bytes.
    pub holds: u64,
    /// Bytes a second between its last two reports; 0 where they do not tell.
    pub bytes_per_s: u64,
    /// Whom it reads from.
    pub upstream: Option<MemberId>,
    /// Who reads from it: each pins its memory.
    pub readers: Vec<MemberId>,
    /// How many readers it serves at most.
    pub most_readers: u32,
    /// Where it is.
    pub place: Place,
    /// By which transports it can be read.
    pub transports: Vec<String>,
    /// Milliseconds that its lease still runs.
    pub lease_left_ms: u64,
    /// Reports against it that are not yet forgotten.
    pub doubts: u32,
}
