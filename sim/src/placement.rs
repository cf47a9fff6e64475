//! The replication service, with simulated members: who is given whom, at first and after a loss.
//!
//! A member says to it what a real one says. It hears what a real one would hear in so short a time: who comes, who has
//! lost whom, and who has finished; a death it learns of from readers only.

use crate::{Error, members::Member};
use flashboot_core::{Generation, Location, Locator, TransportName};
use flashboot_rendezvous::protocol::{
    Answer, Cause, Content, MemberId, Place, Registration, Request, Role, Rules, Service,
};
use std::{collections::BTreeMap, time::Duration};

/// What the service answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Found {
    /// This one is to be read from.
    Source(u32),
    /// Ask again after so long.
    Later(Duration),
    /// There is nobody.
    Nobody,
}

/// The service and what its members were told.
#[derive(Debug)]
pub(crate) struct Placement {
    service: Service,
    bytes: u64,
    said: BTreeMap<u32, Registration>,
    now: Duration,
    /// When members last renewed.
    renewed: Duration,
}

/// Longer than any simulation: leases are not what is simulated.
const LEASE: Duration = Duration::from_secs(1 << 30);

impl Placement {
    pub(crate) fn new(bytes: u64) -> Self {
        let rules = Rules { lease: LEASE, members: usize::MAX, ..Rules::default() };
        Self {
            service: Service::new(rules),
            bytes,
            said: BTreeMap::new(),
            now: Duration::ZERO,
            renewed: Duration::ZERO,
        }
    }

    /// Member `id` registers. A clone waits for `expect` others in all, where that is given.
    pub(crate) fn comes(
        &mut self,
        id: u32,
        member: &Member,
        place: Place,
        expect: Option<u32>,
    ) -> Result<(), Error> {
        let said = self.registration(id, member, place, expect);
        self.tell(id, said).map(drop)
    }

    /// As [`comes`](Self::comes), of a clone that reads from `source` already and holds `bytes`.
    pub(crate) fn is_there(
        &mut self,
        id: u32,
        member: &Member,
        place: Place,
        (source, bytes): (Option<u32>, u64),
    ) -> Result<(), Error> {
        let mut said = self.registration(id, member, place, None);
        said.holds = bytes.max(said.holds);
        (said.upstream, said.epoch) = (source.map(member_id), 1);
        self.tell(id, said).map(drop)
    }

    /// Whom `id` is to read from.
    pub(crate) fn source(&mut self, id: u32) -> Result<u32, Error> {
        let said = self.said.get(&id).cloned().ok_or_else(|| Error::Placement(format!("no member {id}")))?;
        match self.tell(id, said)? {
            Found::Source(source) => Ok(source),
            _ => Err(Error::Placement(format!("member {id} is to wait, though all have come"))),
        }
    }

    /// `id`, which holds `bytes` by now, has lost `source`: whom it is to read from instead, if there is anybody.
    pub(crate) fn lost(&mut self, now: Duration, id: u32, source: u32, bytes: u64) -> Result<Found, Error> {
        self.now = self.now.max(now);
        let Some(said) = self.said.get(&id) else { return Ok(Found::Nobody) };
        let (member, secret, epoch) = (said.member, said.secret, said.epoch);
        let source = member_id(source);
        let (cause, corrupt) = (Cause::Lost, false);
        let request = Request::Lost { member, secret, source, epoch, cause, corrupt, holds: bytes };
        self.answered(id, request)
    }

    /// What members hold by now, of which the service hears no oftener than real ones renew.
    pub(crate) fn renews(
        &mut self,
        now: Duration,
        holds: impl Iterator<Item = (u32, u64)>,
    ) -> Result<(), Error> {
        self.now = self.now.max(now);
        if self.now < self.renewed.saturating_add(Rules::default().lease / 3) {
            return Ok(());
        }
        self.renewed = self.now;
        for (id, holds) in holds {
            let Some(said) = self.said.get_mut(&id) else { continue };
            said.holds = holds.max(said.holds);
            let (member, secret, holds, epoch) = (said.member, said.secret, said.holds, said.epoch);
            let request = Request::Renew { member, secret, holds, upstream: None, epoch, membership: 0 };
            // A plan that comes along changes nothing: whom it reads from it asks only after a loss.
            if let Answer::Refused(refusal) = self.service.handle(self.now, request) {
                return Err(Error::Placement(refusal.detail));
            }
        }
        Ok(())
    }

    /// `id` has everything.
    pub(crate) fn finished(&mut self, now: Duration, id: u32) -> Result<(), Error> {
        self.now = self.now.max(now);
        let Some(said) = self.said.get(&id) else { return Ok(()) };
        let request = Request::Renew {
            member: said.member,
            secret: said.secret,
            holds: self.bytes,
            upstream: None,
            epoch: said.epoch,
            membership: 0,
        };
        self.answered(id, request).map(drop)
    }

    fn tell(&mut self, id: u32, said: Registration) -> Result<Found, Error> {
        self.said.insert(id, said.clone());
        self.answered(id, Request::Register(said))
    }

    fn answered(&mut self, id: u32, request: Request) -> Result<Found, Error> {
        match self.service.handle(self.now, request) {
            Answer::Registered { plan, .. } | Answer::Renewed { plan, .. } => {
                let Some(plan) = plan else { return Ok(Found::Nobody) };
                if let Some(said) = self.said.get_mut(&id) {
                    (said.upstream, said.epoch) = (Some(plan.upstream), plan.epoch);
                }
                let source = u32::try_from(plan.upstream.0.word().saturating_sub(1));
                Ok(source.map_or(Found::Nobody, Found::Source))
            }
            Answer::Wait { retry_ms, .. } => Ok(Found::Later(Duration::from_millis(retry_ms))),
            Answer::Done => Ok(Found::Nobody),
            Answer::Refused(refusal) => Err(Error::Placement(refusal.detail)),
            other => Err(Error::Placement(format!("an answer to another question: {other:?}"))),
        }
    }

    fn registration(&self, id: u32, member: &Member, place: Place, expect: Option<u32>) -> Registration {
        let bytes = self.bytes;
        let who = member_id(id);
        let locator = Locator {
            transport: TransportName::Tcp,
            generation: who.0,
            payload: bytes,
            capacity: bytes.saturating_add(1 << 20),
            shards: 1,
            location: Location::Host { boot_id: place.host.clone(), numa_node: None },
            endpoint: format!("{}:1", place.host),
        };
        let role = if member.clone.is_some() { Role::Clone } else { Role::Seed };
        Registration {
            member: who,
            secret: u64::from(id),
            name: None,
            role,
            content: Content {
                image: "5".repeat(64),
                rank: format!("target-0-{}-0-0", member.rank),
                model: "simulated".into(),
                revision: String::new(),
                fingerprint: String::new(),
                bytes,
                manifest: "5".repeat(64),
                manifest_bytes: 1,
            },
            holds: if role == Role::Seed { bytes } else { 0 },
            place,
            locators: vec![locator.encode()],
            transports: vec![TransportName::Tcp],
            readers: u32::MAX,
            expect: expect.filter(|_| role == Role::Clone),
            upstream: None,
            epoch: 0,
            trace: None,
            rate: None,
        }
    }
}

fn member_id(id: u32) -> MemberId {
    MemberId(Generation::from_random(u64::from(id) + 1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Profile, Scenario, members::members, site::Site};

    #[test]
    fn others_bytes_are_known_as_of_their_last_renewal() {
        let profile = Profile::built_in("gb300").unwrap();
        let all = members(&profile, &Scenario::new(1 << 30, 2)).unwrap().concat();
        let site = Site::new(&profile);
        let mut placement = Placement::new(1 << 30);
        for (id, member) in (0..).zip(&all) {
            let source = (id > 0).then_some(0);
            placement.is_there(id, member, site.place(member.gpu), (source, 1 << 24)).unwrap();
        }
        let known = |placement: &Placement| placement.said.get(&2).map(|said| said.holds);
        let second = Duration::from_secs(1);
        placement.renews(second, [(2, 5 << 24)].into_iter()).unwrap();
        assert_eq!(known(&placement), Some(1 << 24), "nobody renews so soon");
        placement.renews(4 * second, [(2, 5 << 24)].into_iter()).unwrap();
        assert_eq!(known(&placement), Some(5 << 24));
        // Renewing has not moved it: it still has the source that it can lose.
        let found = placement.lost(5 * second, 2, 0, 6 << 24).unwrap();
        assert_ne!(found, Found::Source(0), "{found:?}");
    }
}
