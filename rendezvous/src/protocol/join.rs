//! Coming: what is meant by a name, a place for whom it is new, a wait for others, a plan.

use super::{
    check,
    member::{Content, MemberId, Registration, Role, Wanted},
    message::Answer,
    placement,
    refusal::{Reason, Refusal},
    service::{Group, Member, RETRY_MS, Service, millis, wait},
};
use flashboot_core::Locator;
use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    time::Duration,
};

impl Service {
    pub(super) fn find(&self, wanted: &Wanted) -> Result<Answer, Refusal> {
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

    pub(super) fn register(&mut self, said: Registration) -> Result<Answer, Refusal> {
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
            accusers: BTreeSet::new(),
            renewed: self.now,
            lease_until: self.now.saturating_add(self.rules.lease),
            pending: false,
            reported: (self.now, said.holds),
            rate: 0,
            readers: VecDeque::new(),
        };
        self.members.insert(id, member);
        self.came(id);
        self.changed(group, |group| {
            group.members.insert(id);
        });
        self.counted(id);
        Ok(())
    }

    /// Makes a clone wait for the others that are expected, or lets all begin.
    fn barrier(&mut self, id: MemberId, expect: Option<u32>) -> Result<(), Refusal> {
        let Some(member) = self.members.get_mut(&id) else { return Ok(()) };
        let begun = member.epoch > 0 || member.complete();
        let (Some(expect), false) = (expect, begun) else { return Ok(()) };
        let Some(group) = self.groups.get_mut(&member.group) else { return Ok(()) };
        let others = || group.members.iter().filter(|m| **m != id).filter_map(|m| self.members.get(m));
        let others_read = others().any(|m| m.epoch > 0);
        // Some of those who expect one another: a service before this one let all of them begin.
        let begun = others().any(|m| m.epoch > 0 && m.said.expect.is_some());
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
        if !begun && pending.len() < usize::try_from(expect).unwrap_or(usize::MAX) {
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
    pub(super) fn registered(&mut self, id: MemberId) -> Answer {
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
            None if self.refused(id) => {
                let why = "a holder that gave nobody wrong bytes".into();
                Answer::Wait { retry_ms: RETRY_MS, why, refused: true }
            }
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
