//! Who reads from whom: whom a clone may be given, and what its plan says.

use super::{
    member::{Holder, MemberId, Plan},
    placement::{Candidate, Link, choose, distance},
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
const LOOKED_AT: usize = 1024;

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

    /// How many members are above each in the group; of those only that a holder of everything feeds, without `reader`
    /// between them.
    fn depths(&self, group: u64, reader: MemberId) -> BTreeMap<MemberId, u32> {
        let mut known = BTreeMap::<MemberId, Option<u32>>::new();
        known.insert(reader, None);
        let members = self.groups.get(&group).map(|g| &g.members);
        for id in members.into_iter().flatten() {
            let mut path = Vec::new();
            let mut at = *id;
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
        known.into_iter().filter_map(|(id, depth)| Some((id, depth?))).collect()
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
    }

    /// The best source of `id`; `strict` leaves out those whose time of doubt is not over.
    fn candidate(&self, id: MemberId, strict: bool) -> Option<MemberId> {
        let member = self.members.get(&id)?;
        let depths = self.depths(member.group, id);
        let mut at_member = HashMap::<MemberId, (u32, [u32; 2])>::new();
        let mut at_host = HashMap::<&str, u32>::new();
        for (reader, m) in &self.members {
            let Some(source) = m.upstream.and_then(|up| self.members.get(&up)) else { continue };
            // Nor does one that somebody lost and nobody has heard of since.
            if *reader == id || m.silent() {
                continue;
            }
            let (readers, [local, nvlink]) = at_member.entry(source.said.member).or_default();
            *readers += 1;
            match distance(&m.said.place, &source.said.place).link() {
                Link::Local => *local += 1,
                Link::Nvlink => *nvlink += 1,
                Link::Network => *at_host.entry(&source.said.place.host).or_default() += 1,
            }
        }
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
                !avoided && !m.silent() && !doubted && reaches(member, m)
            })
            .map(|(other, depth, m)| {
                let (readers, [local, nvlink]) = at_member.get(&other).copied().unwrap_or_default();
                let network = at_host.get(m.said.place.host.as_str()).copied().unwrap_or_default();
                Candidate {
                    member: other,
                    place: &m.said.place,
                    depth,
                    readers,
                    most: m.said.readers,
                    load: [local, nvlink, network],
                    doubts: if m.doubted_until > now { m.doubts } else { 0 },
                    holds: m.said.holds,
                    order: m.order,
                }
            })
            .collect();
        choose(&member.said.place, &candidates, self.rules.chain)
    }

    /// What `id` is to do now; `None` while it has no source.
    pub(super) fn plan(&self, id: MemberId) -> Option<Plan> {
        let member = self.members.get(&id)?;
        let upstream = member.upstream?;
        let group = self.groups.get(&member.group)?;
        let mut holders: Vec<Holder> =
            self.line(id).skip(1).take(ANCESTORS).map(|(id, m)| holder(id, m)).collect();
        let others = group.complete.iter().filter_map(|id| Some((*id, self.members.get(id)?)));
        let mut others: Vec<_> = others
            .filter(|(other, m)| {
                *other != id
                    && !member.avoid.contains_key(other)
                    && !holders.iter().any(|h| h.member == *other)
                    && reaches(member, m)
            })
            .collect();
        others.truncate(LOOKED_AT);
        others.sort_by_key(|(_, m)| (distance(&member.said.place, &m.said.place), m.order));
        let room = HOLDERS.saturating_sub(holders.len());
        holders.extend(others.into_iter().take(room).map(|(id, m)| holder(id, m)));
        Some(Plan { epoch: member.epoch, membership: group.membership, upstream, holders })
    }
}

impl Member {
    /// Silent since somebody lost it: it may be dead.
    fn silent(&self) -> bool {
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
