//! The machine: a request and the moment it came at in, an answer out.
//!
//! It moves a clone only when the clone says that its source is lost, and remembers by the plan's number which
//! loss it has acted upon; so what comes twice changes nothing, and a clone moves at most once a loss. A member that is
//! silent for a lease is forgotten. What the machine forgets, by a restart or a lease that ran out unjustly, its members
//! tell it again: an answer [`Reason::UnknownMember`] asks for that.

use super::{
    links::Links,
    manifest::Manifests,
    member::{Blame, Content, MemberId, Reader, Registration, Role},
    message::{Answer, Request},
    refusal::{Reason, Refusal},
    ring::Rings,
    rules::Rules,
};
use flashboot_core::TransportName;
use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    time::Duration,
};

/// How soon to ask again, in milliseconds.
pub(super) const RETRY_MS: u64 = 50;
/// Readers of one member that are remembered after they have ended.
const READERS: usize = 16;
/// How many readers have to find wrong bytes before a member is given to nobody: one may be damaged itself.
const ACCUSERS: usize = 2;
/// The most accusers of one member that are told apart.
pub(super) const MOST_ACCUSERS: usize = 16;
/// Leases for which it is remembered that a member left, and that a content was there.
pub(super) const MEMORY: u32 = 10;

/// All members of one content.
#[derive(Debug, Clone)]
pub(super) struct Group {
    pub(super) content: Content,
    pub(super) members: BTreeSet<MemberId>,
    /// Those of them that hold everything.
    pub(super) complete: BTreeSet<MemberId>,
    /// Changes with every change of membership.
    pub(super) membership: u64,
    /// How many clones are waited for; `None` once they came, or when none were.
    pub(super) expect: Option<u32>,
    /// When the last member went.
    pub(super) empty_since: Duration,
}

#[derive(Debug, Clone)]
pub(super) struct Member {
    pub(super) said: Registration,
    pub(super) served: Vec<TransportName>,
    pub(super) group: u64,
    pub(super) order: u64,
    pub(super) upstream: Option<MemberId>,
    pub(super) epoch: u32,
    /// Sources it is not given: until then, or never.
    pub(super) avoid: BTreeMap<MemberId, Option<Duration>>,
    pub(super) doubts: u32,
    pub(super) doubted_at: Duration,
    pub(super) doubted_until: Duration,
    /// Readers that found wrong bytes of it; not forgotten while it is a member.
    pub(super) accusers: BTreeSet<MemberId>,
    pub(super) renewed: Duration,
    pub(super) lease_until: Duration,
    /// Whether it waits for others to come.
    pub(super) pending: bool,
    pub(super) reported: (Duration, u64),
    pub(super) rate: u64,
    /// The last that were given it as a source, or took it.
    pub(super) readers: VecDeque<MemberId>,
}

impl Member {
    /// Whether it holds everything.
    pub(super) fn complete(&self) -> bool {
        self.said.holds == self.said.content.bytes
            && (self.said.role == Role::Seed || self.upstream.is_none())
    }

    /// What its readers say of its bytes.
    pub(super) fn blame(&self) -> Blame {
        let readers = u32::try_from(self.accusers.len()).unwrap_or(u32::MAX);
        Blame { readers, withdrawn: self.accusers.len() >= ACCUSERS }
    }
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Flap {
    pub(super) count: u32,
    pub(super) last: Duration,
}

/// Who there is, who reads from whom.
#[derive(Debug, Clone)]
pub struct Service {
    pub(super) rules: Rules,
    pub(super) now: Duration,
    pub(super) members: BTreeMap<MemberId, Member>,
    pub(super) groups: BTreeMap<u64, Group>,
    pub(super) manifests: Manifests,
    pub(super) names: BTreeMap<String, MemberId>,
    pub(super) flaps: BTreeMap<String, Flap>,
    /// Who left, and when that is forgotten.
    pub(super) gone: BTreeMap<MemberId, Duration>,
    /// Who was silent for a lease or was replaced, and when that is forgotten.
    dead: BTreeMap<MemberId, Duration>,
    rings: Rings,
    pub(super) links: Links,
    next: u64,
    looked: Duration,
}

impl Service {
    /// With nobody in it.
    pub fn new(rules: Rules) -> Self {
        Self {
            rules,
            now: Duration::ZERO,
            members: BTreeMap::new(),
            groups: BTreeMap::new(),
            manifests: Manifests::default(),
            names: BTreeMap::new(),
            flaps: BTreeMap::new(),
            gone: BTreeMap::new(),
            dead: BTreeMap::new(),
            rings: Rings::default(),
            links: Links::default(),
            next: 1,
            looked: Duration::ZERO,
        }
    }

    /// Answers `request`, which came at `now`, counted from any fixed moment. Call [`tick`](Self::tick) several times
    /// a lease, or it will be taken for asleep.
    pub fn handle(&mut self, now: Duration, request: Request) -> Answer {
        self.tick(now);
        let answered = match request {
            Request::Find(wanted) => self.find(&wanted),
            Request::Register(said) => self.register(said),
            Request::Renew { member, secret, holds, upstream, epoch, membership } => {
                self.renew(member, secret, holds, (upstream, epoch), membership)
            }
            Request::Lost { member, secret, source, epoch, cause, corrupt, holds } => {
                self.lost(member, secret, (source, epoch), (cause, corrupt), holds)
            }
            Request::Leave { member, secret } => self.leave(member, secret),
            Request::Upload { manifest, offset, part } => self.upload(&manifest, offset, &part),
            Request::Fetch { manifest, offset } => self.fetch(&manifest, offset),
            Request::Ring(node) => self.rings.handle(self.now, &self.rules, node),
            Request::Status => Ok(Answer::Status(self.status())),
        };
        answered.unwrap_or_else(Answer::Refused)
    }

    /// Time passed. A clock that goes back stands still; one that leaps over a lease says that it was this service that
    /// slept, and nobody is forgotten for it.
    pub fn tick(&mut self, now: Duration) {
        let gap = now.saturating_sub(self.now);
        self.now = self.now.max(now);
        if gap > self.rules.lease {
            for member in self.members.values_mut() {
                member.lease_until = member.lease_until.saturating_add(gap);
            }
            self.rings.slept(gap);
        }
        if self.now.saturating_sub(self.looked) < self.rules.lease / 8 {
            return;
        }
        self.looked = self.now;
        debug_assert!(self.agrees(), "who holds everything is miscounted");
        debug_assert!(self.links_agree(), "who reads over which link is miscounted");
        let silent: Vec<_> =
            self.members.iter().filter(|(_, m)| m.lease_until <= self.now).map(|(id, _)| *id).collect();
        for member in silent {
            self.forget(member, true);
        }
        let now = self.now;
        self.gone.retain(|_, until| *until > now);
        self.dead.retain(|_, until| *until > now);
        self.rings.tick(now, &self.rules);
        let window = self.rules.flap_window;
        self.flaps.retain(|_, flap| flap.last.saturating_add(window) > now);
        let memory = self.rules.lease.saturating_mul(MEMORY);
        self.groups.retain(|_, g| !g.members.is_empty() || g.empty_since.saturating_add(memory) > now);
        let groups = &self.groups;
        self.manifests.retain(|hash| groups.values().any(|group| group.content.manifest == hash));
    }

    pub(super) fn forget(&mut self, id: MemberId, lost: bool) {
        let Some(member) = self.members.remove(&id) else { return };
        if lost {
            self.dead.insert(id, self.remembered());
        } else {
            // It was silent once, came back, and now goes by its own will.
            self.dead.remove(&id);
        }
        self.went(id, &member);
        if let Some(group) = self.groups.get_mut(&member.group) {
            group.members.remove(&id);
            group.complete.remove(&id);
            group.membership += 1;
            group.empty_since = self.now;
        }
        let Some(name) = member.said.name else { return };
        if self.names.get(&name) == Some(&id) {
            self.names.remove(&name);
        }
        if lost {
            let flap = self.flaps.entry(name).or_insert(Flap { count: 0, last: self.now });
            flap.count = flap.count.saturating_add(1);
            flap.last = self.now;
        }
    }

    pub(super) fn bury(&mut self, id: MemberId) {
        self.gone.insert(id, self.remembered());
    }

    /// Until when it is remembered what became of a member.
    fn remembered(&self) -> Duration {
        self.now.saturating_add(self.rules.lease.saturating_mul(MEMORY))
    }

    /// Whether `id` is taken for dead: it was a member, and did not leave. One that serves on until its readers have ended is not.
    pub(super) fn has_ended(&self, id: MemberId) -> bool {
        self.dead.contains_key(&id) && !self.members.contains_key(&id)
    }

    pub(super) fn number(&mut self) -> u64 {
        let number = self.next;
        self.next += 1;
        number
    }

    pub(super) fn changed(&mut self, group: u64, change: impl FnOnce(&mut Group)) {
        if let Some(group) = self.groups.get_mut(&group) {
            change(group);
            group.membership += 1;
        }
    }

    /// Whether what is kept of who holds everything is so.
    fn agrees(&self) -> bool {
        self.groups.values().all(|group| {
            let complete = |id: &&MemberId| self.members.get(id).is_some_and(Member::complete);
            group.members.iter().filter(complete).eq(&group.complete)
        })
    }

    /// Notes that `reader` reads from `source` from now on.
    pub(super) fn fed(&mut self, source: MemberId, reader: MemberId) {
        let Some(member) = self.members.get_mut(&source) else { return };
        member.readers.retain(|other| *other != reader);
        member.readers.push_back(reader);
        if member.readers.len() > READERS {
            member.readers.pop_front();
        }
    }

    /// Who reads from `id`, and who did of late.
    pub(super) fn readers(&self, id: MemberId) -> Vec<Reader> {
        let readers = self.members.get(&id).map(|m| &m.readers);
        let known =
            readers.into_iter().flatten().filter_map(|reader| Some((*reader, self.members.get(reader)?)));
        known
            .map(|(member, m)| Reader { member, trace: m.said.trace.clone(), reads: m.upstream == Some(id) })
            .collect()
    }

    /// Notes whether `id` holds everything; after every change of what it holds or reads.
    pub(super) fn counted(&mut self, id: MemberId) {
        let Some(member) = self.members.get(&id) else { return };
        let Some(group) = self.groups.get_mut(&member.group) else { return };
        if member.complete() {
            group.complete.insert(id);
        } else {
            group.complete.remove(&id);
        }
    }

    /// The member, if `secret` is its own.
    pub(super) fn known(&mut self, id: MemberId, secret: u64) -> Result<&mut Member, Refusal> {
        let unknown = || Refusal::new(Reason::UnknownMember, format!("member {id} is not registered"));
        if self.gone.contains_key(&id) {
            return Err(Refusal::new(Reason::Gone, format!("member {id} has left, or was replaced")));
        }
        let member = self.members.get_mut(&id).ok_or_else(unknown)?;
        if member.said.secret == secret {
            return Ok(member);
        }
        Err(Refusal::new(
            Reason::GenerationTaken,
            format!("another process holds a member of generation {id}"),
        ))
    }
}

pub(super) fn wait(retry_ms: u64, why: &str) -> Answer {
    Answer::Wait { retry_ms, why: why.into(), refused: false }
}

pub(super) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
