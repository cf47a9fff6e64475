//! Who reads from whom: whom a clone may be given, and what its plan says.

use super::{
    links::Load,
    member::{Holder, MemberId, Plan},
    placement::{Candidate, chain, choose, distance},
    service::{Member, Service},
};
use flashboot_core::TransportName;
use std::collections::{BTreeMap, HashMap};

/// The most members above one: more are a cycle, or as bad.
const DEEPEST: usize = 100_000;
/// Ancestors that a plan names, and holders in all.
const ANCESTORS: usize = 16;
const HOLDERS: usize = 24;
/// Of how many holders the nearest are named.
const LOOKED_AT: usize = 256;
/// Among so many all are looked at for the best source; among more, [`some`](super::links::Links::some).
const FEW: usize = 256;

impl Service {
    /// `id` and whom it reads from, and so on up.
    fn line(&self, id: MemberId) -> impl Iterator<Item = (MemberId, &Member)> {
        let first = self.members.get(&id).map(|m| (id, m));
        let above = |(_, m): &(MemberId, &Member)| {
            let up = m.upstream?;
            Some((up, self.members.get(&up)?))
        };
        std::iter::successors(first, above).take(DEEPEST)
    }

    /// Whether `above` is `id`, or `below` reads from it, through however many others.
    pub(super) fn is_above(&self, above: MemberId, below: MemberId) -> bool {
        above == below || self.line(below).any(|(id, m)| id == above || m.upstream == Some(above))
    }

    /// How many members are above each of `members`; of those only that a holder of everything feeds, without `reader`
    /// between them.
    fn depths(&self, members: impl Iterator<Item = MemberId>, reader: MemberId) -> BTreeMap<MemberId, u32> {
        let mut known = HashMap::<MemberId, Option<u32>>::new();
        known.insert(reader, None);
        let mut asked = Vec::new();
        for id in members {
            asked.push(id);
            let mut path = Vec::new();
            let mut at = id;
            let found = loop {
                if let Some(depth) = known.get(&at) {
                    break *depth;
                }
                // Marked on the way, so that a cycle ends, and feeds nobody.
                known.insert(at, None);
                path.push(at);
                match self.members.get(&at) {
                    Some(m) if m.complete() => break Some(u32::MAX),
                    Some(Member { upstream: Some(up), .. }) => at = *up,
                    _ => break None,
                }
            };
            let mut depth = found;
            for id in path.into_iter().rev() {
                depth = depth.map(|d| d.wrapping_add(1));
                known.insert(id, depth);
            }
        }
        asked.into_iter().filter_map(|id| Some((id, (*known.get(&id)?)?))).collect()
    }

    /// Gives `id` a source, where there is one.
    pub(super) fn assign(&mut self, id: MemberId) {
        let Some(chosen) = self.candidate(id, true).or_else(|| self.candidate(id, false)) else { return };
        let Some(member) = self.members.get_mut(&id) else { return };
        member.upstream = Some(chosen);
        member.epoch = member.epoch.saturating_add(1);
        let group = member.group;
        self.fed(chosen, id);
        self.changed(group, |_| ());
        self.counted(id);
        self.relink(id);
    }

    /// The best source of `id`; `strict` leaves out those whose time of doubt is not over.
    fn candidate(&self, id: MemberId, strict: bool) -> Option<MemberId> {
        let member = self.members.get(&id)?;
        let group = self.groups.get(&member.group)?;
        if group.members.len() > FEW {
            let some = self.links.some(member.group, &member.said.place, &group.complete);
            if let Some(chosen) = self.best(id, member, some.into_iter(), strict) {
                return Some(chosen);
            }
        }
        self.best(id, member, group.members.iter().copied(), strict)
    }

    /// The best of `among`.
    fn best(
        &self,
        id: MemberId,
        member: &Member,
        among: impl Iterator<Item = MemberId>,
        strict: bool,
    ) -> Option<MemberId> {
        let depths = self.depths(among, id);
        let now = self.now;
        let candidates: Vec<_> = depths
            .into_iter()
            .filter_map(|(other, depth)| Some((other, depth, self.members.get(&other)?)))
            .filter(|(other, _, m)| {
                let avoided = member.avoid.get(other).is_some_and(|until| match until {
                    None => true,
                    Some(until) => strict && *until > now,
                });
                let doubted = strict && m.doubted_until > now;
                !avoided && !m.silent() && !doubted && !m.blame().withdrawn && reaches(member, m)
            })
            .map(|(other, depth, m)| {
                let Load { readers, local, nvlink } = self.links.load(other);
                let network = self.links.network(&m.said.place.host);
                Candidate {
                    member: other,
                    place: &m.said.place,
                    depth,
                    readers,
                    most: m.said.readers,
                    load: [local, nvlink, network],
                    doubts: (if m.doubted_until > now { m.doubts } else { 0 })
                        .saturating_add(m.blame().readers),
                    holds: m.said.holds,
                    order: m.order,
                }
            })
            .collect();
        let bytes = self.groups.get(&member.group).map_or(0, |group| group.content.bytes);
        choose(&member.said.place, &candidates, chain(bytes, self.rules.least_chain))
    }

    /// Whether `id` waits in vain for who is there: of those that hold everything, and that it could read from, none is left that
    /// it has not refused, and that is given to anybody; and there is one that is not.
    pub(super) fn refused(&self, id: MemberId) -> bool {
        let Some(member) = self.members.get(&id) else { return false };
        let Some(group) = self.groups.get(&member.group) else { return false };
        let bad = |other: &MemberId| {
            matches!(member.avoid.get(other), Some(None))
                || self.members.get(other).is_some_and(|m| m.blame().withdrawn)
        };
        let good = |other: &&MemberId| {
            **other != id && !bad(other) && self.members.get(other).is_some_and(|m| reaches(member, m))
        };
        let some = member.avoid.values().any(Option::is_none) || group.complete.iter().any(bad);
        some && !group.complete.iter().any(|other| good(&other))
    }

    /// What `id` is to do now; `None` while it has no source.
    pub(super) fn plan(&self, id: MemberId) -> Option<Plan> {
        let member = self.members.get(&id)?;
        let upstream = member.upstream?;
        let group = self.groups.get(&member.group)?;
        let mut holders: Vec<Holder> =
            self.line(id).skip(1).take(ANCESTORS).map(|(id, m)| holder(id, m)).collect();
        let others = group.complete.iter().take(LOOKED_AT);
        let others = others.filter_map(|id| Some((*id, self.members.get(id)?)));
        let mut others: Vec<_> = others
            .filter(|(other, m)| {
                *other != id
                    && !member.avoid.contains_key(other)
                    && !m.blame().withdrawn
                    && !holders.iter().any(|h| h.member == *other)
                    && reaches(member, m)
            })
            .collect();
        others.sort_by_key(|(_, m)| (distance(&member.said.place, &m.said.place), m.order));
        let room = HOLDERS.saturating_sub(holders.len());
        holders.extend(others.into_iter().take(room).map(|(id, m)| holder(id, m)));
        Some(Plan { epoch: member.epoch, membership: group.membership, upstream, holders })
    }
}

impl Member {
    /// Silent since somebody lost it: it may be dead.
    pub(super) fn silent(&self) -> bool {
        self.doubts > 0 && self.renewed <= self.doubted_at
    }
}

fn holder(member: MemberId, m: &Member) -> Holder {
    let (holds, complete, locators) = (m.said.holds, m.complete(), m.said.locators.clone());
    Holder { member, holds, complete, locators }
}

/// Whether the two have a transport in common; `ipc` is of one host.
fn reaches(reader: &Member, source: &Member) -> bool {
    let near = reader.said.place.host == source.said.place.host;
    source.served.iter().any(|t| reader.said.transports.contains(t) && (near || *t != TransportName::Ipc))
}
