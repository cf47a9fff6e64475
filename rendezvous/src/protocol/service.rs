//! The machine: a request and the moment it came at in, an answer out.
//!
//! It moves a clone only when the clone says that its source is lost, and remembers by the plan's number which
//! loss it has acted upon; so what comes twice changes nothing, and a clone moves at most once a loss. A member that is
//! silent for a lease is forgotten. What the machine forgets, by a restart or a lease that ran out unjustly, its members
//! tell it again: an answer [`Reason::UnknownMember`] asks for that.

use super::{
    check,
    manifest::Manifests,
    member::{Cause, Content, MemberId, Registration, Role, Wanted},
    message::{Answer, Request},
    placement,
    refusal::{Reason, Refusal},
    status::{MemberStatus, Status},
};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use flashboot_core::{Locator, TransportName};
use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

/// What the service holds its members to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rules {
    /// How long a member may be silent.
    pub lease: Duration,
    /// Members above a tail that cost as much as one reader of a link.
    pub chain: u32,
    /// The most members.
    pub members: usize,
    /// The most contents, and bytes of all their manifests.
    pub contents: usize,
    /// Bytes of all manifests.
    pub manifest_bytes: u64,
    /// How long a source stays in doubt after a first report; twice as long after every further one, up to 64 times.
    pub doubt: Duration,
    /// How many members of one name may be lost within [`flap_window`](Self::flap_window) before the next has to wait.
    pub flaps: u32,
    /// See [`flaps`](Self::flaps).
    pub flap_window: Duration,
}

impl Default for Rules {
    /// A lease of 10 s, chains of 16, 20,000 members, 1,024 contents with 1 GiB of manifests, 1 s of doubt, 3 losses
    /// in a minute.
    fn default() -> Self {
        Self {
            lease: Duration::from_secs(10),
            chain: 16,
            members: 20_000,
            contents: 1024,
            manifest_bytes: 1 << 30,
            doubt: Duration::from_secs(1),
            flaps: 3,
            flap_window: Duration::from_secs(60),
        }
    }
}

/// How soon to ask again, in milliseconds.
const RETRY_MS: u64 = 50;
/// Leases for which it is remembered that a member left, and that a content was there.
const MEMORY: u32 = 10;

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
    expect: Option<u32>,
    /// When the last member went.
    empty_since: Duration,
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
    pub(super) renewed: Duration,
    lease_until: Duration,
    /// Whether it waits for others to come.
    pending: bool,
    reported: (Duration, u64),
    rate: u64,
}

impl Member {
    /// Whether it holds everything.
    pub(super) fn complete(&self) -> bool {
        self.said.holds == self.said.content.bytes
            && (self.said.role == Role::Seed || self.upstream.is_none())
    }
}

#[derive(Debug, Clone, Copy)]
struct Flap {
    count: u32,
    last: Duration,
}

/// Who there is, who reads from whom.
#[derive(Debug, Clone)]
pub struct Service {
    pub(super) rules: Rules,
    pub(super) now: Duration,
    pub(super) members: BTreeMap<MemberId, Member>,
    pub(super) groups: BTreeMap<u64, Group>,
    manifests: Manifests,
    names: BTreeMap<String, MemberId>,
    flaps: BTreeMap<String, Flap>,
    /// Who left, and when that is forgotten.
    gone: BTreeMap<MemberId, Duration>,
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
            Request::Lost { member, secret, source, epoch, cause, holds } => {
                self.lost(member, secret, (source, epoch), cause, holds)
            }
            Request::Leave { member, secret } => self.leave(member, secret),
            Request::Upload { manifest, offset, part } => self.upload(&manifest, offset, &part),
            Request::Fetch { manifest, offset } => self.fetch(&manifest, offset),
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
        }
        if self.now.saturating_sub(self.looked) < self.rules.lease / 8 {
            return;
        }
        self.looked = self.now;
        debug_assert!(self.agrees(), "who holds everything is miscounted");
        let silent: Vec<_> =
            self.members.iter().filter(|(_, m)| m.lease_until <= self.now).map(|(id, _)| *id).collect();
        for member in silent {
            self.forget(member, true);
        }
        let now = self.now;
        self.gone.retain(|_, until| *until > now);
        let window = self.rules.flap_window;
        self.flaps.retain(|_, flap| flap.last.saturating_add(window) > now);
        let memory = self.rules.lease.saturating_mul(MEMORY);
        self.groups.retain(|_, g| !g.members.is_empty() || g.empty_since.saturating_add(memory) > now);
        let groups = &self.groups;
        self.manifests.retain(|hash| groups.values().any(|group| group.content.manifest == hash));
    }

    fn forget(&mut self, id: MemberId, lost: bool) {
        let Some(member) = self.members.remove(&id) else { return };
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

    fn bury(&mut self, id: MemberId) {
        self.gone.insert(id, self.now.saturating_add(self.rules.lease.saturating_mul(MEMORY)));
    }

    fn find(&self, wanted: &Wanted) -> Result<Answer, Refusal> {
        check::wanted(wanted)?;
        let live = self.groups.values().filter(|group| !group.members.is_empty());
        let mut fits = live.filter(|group| wanted.fits(&group.content)).map(|group| &group.content);
        match (fits.next(), fits.next()) {
            (Some(only), None) => Ok(Answer::Found(only.clone())),
            (None, _) => Err(Refusal::new(Reason::NoSuchImage, "nobody holds what is asked for")),
            (Some(one), Some(other)) => {
                let more = fits.count();
                let name = |c: &Content| format!("{} ({} {}) rank {}", c.image, c.model, c.revision, c.rank);
                let detail = format!("{}, {} and {more} more are what is asked for", name(one), name(other));
                Err(Refusal::new(Reason::Ambiguous, detail))
            }
        }
    }

    /// The group of `content`, made where there is none.
    fn group(&mut self, content: &Content) -> Result<u64, Refusal> {
        for (number, group) in &self.groups {
            let is = &group.content;
            if is == content {
                return Ok(*number);
            }
            if !group.members.is_empty() && (&is.image, &is.rank) == (&content.image, &content.rank) {
                return Err(Refusal::new(
                    Reason::Mismatch,
                    format!("{} rank {} is registered with {}", is.image, is.rank, differences(is, content)),
                ));
            }
        }
        let whole = self.manifests.bytes().saturating_add(content.manifest_bytes);
        if self.groups.len() >= self.rules.contents || whole > self.rules.manifest_bytes {
            let detail = format!("{} contents with {whole} bytes of manifests", self.groups.len());
            return Err(Refusal::new(Reason::Full, detail));
        }
        let number = self.number();
        let group = Group {
            content: content.clone(),
            members: BTreeSet::new(),
            complete: BTreeSet::new(),
            membership: 1,
            expect: None,
            empty_since: self.now,
        };
        self.groups.insert(number, group);
        Ok(number)
    }

    fn number(&mut self) -> u64 {
        let number = self.next;
        self.next += 1;
        number
    }

    fn register(&mut self, said: Registration) -> Result<Answer, Refusal> {
        check::registration(&said)?;
        let id = said.member;
        if self.gone.contains_key(&id) {
            return Err(Refusal::new(Reason::Gone, format!("member {id} has left, or was replaced")));
        }
        if self.members.contains_key(&id) {
            self.known(id, said.secret)?;
        } else {
            if let Some(answer) = self.flapping(said.name.as_deref()) {
                return Ok(answer);
            }
            self.admit(&said)?;
        }
        self.heard(id, said.holds, (said.upstream, said.epoch));
        if said.role == Role::Clone {
            self.barrier(id, said.expect)?;
        }
        Ok(self.registered(id))
    }

    fn admit(&mut self, said: &Registration) -> Result<(), Refusal> {
        let group = self.group(&said.content)?;
        if self.members.len() >= self.rules.members {
            let detail = format!("{} members are all that there is room for", self.members.len());
            return Err(Refusal::new(Reason::Full, detail));
        }
        let id = said.member;
        if let Some(name) = &said.name
            && let Some(before) = self.names.insert(name.clone(), id)
        {
            self.forget(before, true);
            self.bury(before);
            self.names.insert(name.clone(), id);
        }
        let served =
            said.locators.iter().filter_map(|l| Some(l.parse::<Locator>().ok()?.transport)).collect();
        let member = Member {
            said: Registration { secret: said.secret, ..said.clone() },
            served,
            group,
            order: self.number(),
            upstream: None,
            epoch: 0,
            avoid: BTreeMap::new(),
            doubts: 0,
            doubted_at: Duration::ZERO,
            doubted_until: Duration::ZERO,
            renewed: self.now,
            lease_until: self.now.saturating_add(self.rules.lease),
            pending: false,
            reported: (self.now, said.holds),
            rate: 0,
        };
        self.members.insert(id, member);
        self.changed(group, |group| {
            group.members.insert(id);
        });
        self.counted(id);
        Ok(())
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
    fn known(&mut self, id: MemberId, secret: u64) -> Result<&mut Member, Refusal> {
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

    /// A sign of life, with what came along.
    fn heard(&mut self, id: MemberId, holds: u64, (upstream, epoch): (Option<MemberId>, u32)) {
        let (now, lease) = (self.now, self.rules.lease);
        // Whoever would read from one that reads from it keeps what is known of it.
        let adopted = upstream.filter(|up| !self.is_above(id, *up));
        let Some(member) = self.members.get_mut(&id) else { return };
        member.renewed = now;
        member.lease_until = now.saturating_add(lease);
        let before = (member.complete(), member.upstream);
        let holds = holds.min(member.said.content.bytes).max(member.said.holds);
        let (at, had) = member.reported;
        if holds > had {
            let micros = u64::try_from(now.saturating_sub(at).as_micros()).unwrap_or(u64::MAX);
            let rate = u128::from(holds - had) * 1_000_000 / u128::from(micros.max(1));
            member.rate = u64::try_from(rate).unwrap_or(u64::MAX);
            member.reported = (now, holds);
        }
        member.said.holds = holds;
        if epoch > member.epoch {
            member.epoch = epoch;
            member.upstream = adopted;
        }
        if holds == member.said.content.bytes && holds > 0 {
            member.upstream = None;
        }
        if before != (member.complete(), member.upstream) {
            let group = member.group;
            self.changed(group, |_| ());
            self.counted(id);
        }
    }

    /// Makes a clone wait for the others that are expected, or lets all begin.
    fn barrier(&mut self, id: MemberId, expect: Option<u32>) -> Result<(), Refusal> {
        let Some(member) = self.members.get_mut(&id) else { return Ok(()) };
        let begun = member.epoch > 0 || member.complete();
        let (Some(expect), false) = (expect, begun) else { return Ok(()) };
        let Some(group) = self.groups.get_mut(&member.group) else { return Ok(()) };
        let others_read =
            group.members.iter().any(|m| *m != id && self.members.get(m).is_some_and(|m| m.epoch > 0));
        if others_read && group.expect.is_none() {
            // They have begun: it is late, and joins at once.
            return Ok(());
        }
        match group.expect {
            Some(other) if other != expect => {
                let detail = format!("{expect} clones expected here, {other} by those who wait already");
                return Err(Refusal::new(Reason::Mismatch, detail));
            }
            _ => group.expect = Some(expect),
        }
        if let Some(member) = self.members.get_mut(&id) {
            member.pending = true;
        }
        let waiting: Vec<_> = group.members.iter().filter_map(|m| Some((*m, self.members.get(m)?))).collect();
        let mut pending: Vec<_> = waiting.iter().filter(|(_, m)| m.pending).collect();
        if pending.len() < usize::try_from(expect).unwrap_or(usize::MAX) {
            return Ok(());
        }
        let seed = waiting.iter().find(|(_, m)| m.complete()).map(|(_, m)| &m.said.place);
        pending.sort_by_key(|(_, m)| {
            let p = &m.said.place;
            let far = seed.map(|seed| placement::distance(seed, p));
            (far, &p.rack, &p.rail, &p.domain, &p.host, &p.gpu, m.order)
        });
        let begin: Vec<_> = pending.into_iter().map(|(id, _)| *id).collect();
        group.expect = None;
        for id in begin {
            if let Some(member) = self.members.get_mut(&id) {
                member.pending = false;
            }
            self.assign(id);
        }
        Ok(())
    }

    /// What a member is answered: its plan, or that it has to wait.
    fn registered(&mut self, id: MemberId) -> Answer {
        let lease_ms = millis(self.rules.lease);
        let Some(member) = self.members.get(&id) else { return wait(RETRY_MS, "a place") };
        let reads = member.said.role == Role::Clone && !(member.complete() && member.epoch > 0);
        let content = &member.said.content;
        let manifest_has = self.manifests.announce(&content.manifest, content.manifest_bytes);
        if !reads {
            return Answer::Registered { lease_ms, manifest_has, plan: None };
        }
        if member.pending {
            return wait(RETRY_MS, "the other clones that are expected");
        }
        if member.upstream.is_none() {
            self.assign(id);
        }
        match self.plan(id) {
            Some(plan) => Answer::Registered { lease_ms, manifest_has, plan: Some(plan) },
            None => wait(RETRY_MS, "a holder with room for a reader"),
        }
    }

    fn flapping(&self, name: Option<&str>) -> Option<Answer> {
        let flap = self.flaps.get(name?)?;
        let over = flap.count.checked_sub(self.rules.flaps)?;
        let wait_for = self.rules.doubt.saturating_mul(1 << over.min(6));
        let left = flap.last.saturating_add(wait_for).checked_sub(self.now).filter(|left| !left.is_zero())?;
        let why =
            format!("{} members of this name were lost within {:?}", flap.count, self.rules.flap_window);
        Some(wait(millis(left).max(1), &why))
    }

    fn renew(
        &mut self,
        id: MemberId,
        secret: u64,
        holds: u64,
        reads: (Option<MemberId>, u32),
        membership: u64,
    ) -> Result<Answer, Refusal> {
        self.known(id, secret)?;
        self.heard(id, holds, reads);
        let lease_ms = millis(self.rules.lease);
        let group = self.members.get(&id).and_then(|m| self.groups.get(&m.group));
        let news = group.is_some_and(|group| group.membership != membership);
        Ok(Answer::Renewed { lease_ms, plan: if news { self.plan(id) } else { None } })
    }

    fn lost(
        &mut self,
        id: MemberId,
        secret: u64,
        (source, epoch): (MemberId, u32),
        cause: Cause,
        holds: u64,
    ) -> Result<Answer, Refusal> {
        self.known(id, secret)?;
        self.heard(id, holds, (Some(source), epoch));
        let (now, rules) = (self.now, self.rules);
        let Some(member) = self.members.get_mut(&id) else { return Ok(wait(RETRY_MS, "a place")) };
        if member.epoch == epoch && member.upstream == Some(source) {
            member.upstream = None;
            let group = member.group;
            let mut until = now.saturating_add(rules.doubt);
            if let Some(source) = self.members.get_mut(&source) {
                if source.doubted_until.saturating_add(rules.flap_window) < now {
                    source.doubts = 0;
                }
                let turn = rules.doubt.saturating_mul(1 << source.doubts.min(6));
                source.doubts = source.doubts.saturating_add(1);
                source.doubted_at = now;
                source.doubted_until = now.saturating_add(turn);
                until = source.doubted_until;
            }
            if let Some(member) = self.members.get_mut(&id) {
                let until = (cause == Cause::Lost).then_some(until);
                // What is refused stays refused; what is over is forgotten.
                member.avoid.retain(|_, until| until.is_none_or(|until| until > now));
                let kept = member.avoid.entry(source).or_insert(until);
                *kept = if kept.is_none() { None } else { until };
            }
            self.changed(group, |_| ());
            self.counted(id);
        }
        Ok(self.registered(id))
    }

    fn leave(&mut self, id: MemberId, secret: u64) -> Result<Answer, Refusal> {
        match self.known(id, secret) {
            Ok(_) => {
                self.forget(id, false);
                self.bury(id);
                Ok(Answer::Done)
            }
            Err(refusal) if refusal.reason == Reason::GenerationTaken => Err(refusal),
            // Gone is gone.
            Err(_) => Ok(Answer::Done),
        }
    }

    fn upload(&mut self, manifest: &str, offset: u64, part: &str) -> Result<Answer, Refusal> {
        let part =
            STANDARD.decode(part).map_err(|e| Refusal::new(Reason::Malformed, format!("a part: {e}")))?;
        self.manifests.upload(manifest, offset, &part)?;
        Ok(Answer::Done)
    }

    fn fetch(&self, manifest: &str, offset: u64) -> Result<Answer, Refusal> {
        match self.manifests.fetch(manifest, offset) {
            Some(part) => Ok(Answer::Part { offset, part: STANDARD.encode(part) }),
            None if self.groups.values().any(|g| g.content.manifest == manifest) => {
                Ok(wait(RETRY_MS, "a seed that brings the manifest"))
            }
            None => Err(Refusal::new(Reason::NoSuchImage, "no seed has announced this manifest")),
        }
    }

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
        });
        Status {
            release: env!("CARGO_PKG_VERSION").into(),
            lease_ms: millis(self.rules.lease),
            contents: self.groups.values().map(|group| group.content.clone()).collect(),
            members: members.collect(),
        }
    }
}

fn wait(retry_ms: u64, why: &str) -> Answer {
    Answer::Wait { retry_ms, why: why.into() }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// In which fields two contents of one name differ.
fn differences(is: &Content, said: &Content) -> String {
    let mut found = Vec::new();
    let mut compare = |what: &str, is: &str, said: &str| {
        if is != said {
            found.push(format!("{what} `{is}`, not `{said}`"));
        }
    };
    compare("size", &is.bytes.to_string(), &said.bytes.to_string());
    compare("fingerprint", &is.fingerprint, &said.fingerprint);
    compare("manifest", &is.manifest, &said.manifest);
    compare("model", &is.model, &said.model);
    compare("revision", &is.revision, &said.revision);
    found.join(", ")
}
