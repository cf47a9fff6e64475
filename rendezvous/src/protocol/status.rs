//! Who holds what, for people and `flashboot status`.

use super::{
    member::{Blame, Content, MemberId, Place, Role},
    service::{Service, millis},
};
use flashboot_core::TransportName;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

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
    /// The trace that its spans are of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trace: Option<String>,
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
    /// What its readers say of its bytes: how many found blocks that do not match their digests, and whether it is given to
    /// nobody for that.
    #[serde(default)]
    pub blame: Blame,
    /// What bounds the bytes that it sends, by transport.
    #[serde(default)]
    pub egress: Vec<Egress>,
}

/// What bounds the bytes that a member sends by one transport.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Egress {
    /// The transport.
    pub transport: String,
    /// Who keeps to it.
    pub bound: Bound,
    /// The most bytes a second, where it is enforced.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_per_s: Option<u64>,
}

/// Who keeps to a bound on what a member sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Bound {
    /// Readers pull at their own pace; the service gives the member no more of them than it grants.
    Cooperative,
    /// The member sends no faster, whatever its readers do.
    Enforced,
}

impl Egress {
    fn of(transport: TransportName, rate: Option<u64>) -> Self {
        // Of all transports only tcp's bytes go through the source's hands.
        let bytes_per_s = rate.filter(|_| transport == TransportName::Tcp);
        let bound = if bytes_per_s.is_some() { Bound::Enforced } else { Bound::Cooperative };
        Self { transport: transport.as_str().to_owned(), bound, bytes_per_s }
    }
}

impl Service {
    /// Who holds what, now.
    pub fn status(&self) -> Status {
        let mut members: Vec<_> = self.members.iter().collect();
        members.sort_by_key(|(_, member)| member.order);
        let mut readers = BTreeMap::<MemberId, Vec<MemberId>>::new();
        for (id, member) in &members {
            if let Some(upstream) = member.upstream {
                readers.entry(upstream).or_default().push(**id);
            }
        }
        let numbers: BTreeMap<_, _> = self.groups.keys().enumerate().map(|(i, group)| (*group, i)).collect();
        let members = members.into_iter().map(|(id, m)| MemberStatus {
            member: *id,
            name: m.said.name.clone(),
            trace: m.said.trace.clone(),
            role: m.said.role,
            content: numbers.get(&m.group).copied().unwrap_or(usize::MAX),
            holds: m.said.holds,
            bytes_per_s: m.rate,
            upstream: m.upstream,
            readers: readers.remove(id).unwrap_or_default(),
            most_readers: m.said.readers,
            place: m.said.place.clone(),
            transports: m.served.iter().map(|t| t.as_str().to_owned()).collect(),
            lease_left_ms: millis(m.lease_until.saturating_sub(self.now)),
            doubts: if m.doubted_until > self.now { m.doubts } else { 0 },
            blame: m.blame(),
            egress: m.served.iter().map(|t| Egress::of(*t, m.said.rate)).collect(),
        });
        Status {
            release: env!("CARGO_PKG_VERSION").into(),
            lease_ms: millis(self.rules.lease),
            contents: self.groups.values().map(|group| group.content.clone()).collect(),
            members: members.collect(),
        }
    }
}
