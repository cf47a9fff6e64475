//! What carries whom, kept up to date with every change: readers of each member, of each host's network, and members by
//! where they are and by how few read from them.
//!
//! So giving a clone a source costs no more among ten thousand members than among a few hundred. Must never be asked before
//! a change is told: [`Service::relink`] after whatever changes a member's source or its silence, `came` and `went`.

use super::{
    member::{MemberId, Place},
    placement::{Link, crossed},
    service::{Member, Service},
};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Of one host, of one label, of those with no reader (first and last), with a few, and of those with everything: so many are
/// looked at.
const NEAR: usize = 32;
const LABELLED: usize = 16;
const FIRST: usize = 16;
const LAST: usize = 48;
const BUSY: usize = 32;
const COMPLETE: usize = 16;

/// Who reads from one member.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Load {
    pub(super) readers: u32,
    /// Of them, over its own memory and over its GPU's port.
    pub(super) local: u32,
    pub(super) nvlink: u32,
}

/// A reader, as it is counted.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Counted {
    source: MemberId,
    link: Link,
    host: String,
}

type Orders = BTreeSet<(u64, MemberId)>;

/// See the module.
#[derive(Debug, Clone, Default)]
pub(super) struct Links {
    counted: HashMap<MemberId, Counted>,
    loads: HashMap<MemberId, Load>,
    networks: HashMap<String, u32>,
    /// By whom they say they read from, registered or not.
    readers: HashMap<MemberId, BTreeSet<MemberId>>,
    said: HashMap<MemberId, MemberId>,
    /// By group: how many read from it, when it came.
    free: BTreeMap<u64, BTreeSet<(u32, u64, MemberId)>>,
    /// By group, and host or label.
    near: BTreeMap<(u64, u8, String), Orders>,
}

/// Where a member is, for `near`: the host, then each label.
fn keys(place: &Place) -> impl Iterator<Item = (u8, &String)> {
    let labels = [(1, &place.domain), (2, &place.rail), (3, &place.rack)];
    std::iter::once((0, &place.host))
        .chain(labels.into_iter().filter_map(|(kind, label)| Some((kind, label.as_ref()?))))
}

impl Links {
    pub(super) fn load(&self, member: MemberId) -> Load {
        self.loads.get(&member).copied().unwrap_or_default()
    }

    /// Readers that cross the network of `host`.
    pub(super) fn network(&self, host: &str) -> u32 {
        self.networks.get(host).copied().unwrap_or_default()
    }

    /// Some of `group` that may suit a clone at `place`: the nearest, those with the fewest readers, and some of `complete`.
    pub(super) fn some(
        &self,
        group: u64,
        place: &Place,
        complete: &BTreeSet<MemberId>,
    ) -> BTreeSet<MemberId> {
        let mut some: BTreeSet<_> = complete.iter().take(COMPLETE).copied().collect();
        for (kind, label) in keys(place) {
            let most = if kind == 0 { NEAR } else { LABELLED };
            let there = self.near.get(&(group, kind, label.clone()));
            some.extend(there.into_iter().flat_map(|set| set.iter().rev().take(most)).map(|(_, id)| *id));
        }
        let free = self.free.get(&group);
        let none = || free.into_iter().flat_map(|set| set.iter()).take_while(|(readers, ..)| *readers == 0);
        some.extend(none().take(FIRST).map(|(.., id)| *id));
        if let Some(free) = free {
            let first = MemberId(flashboot_core::Generation::from_random(0));
            some.extend(free.range(..(1, 0, first)).rev().take(LAST).map(|(.., id)| *id));
            some.extend(free.range((1, 0, first)..).take(BUSY).map(|(.., id)| *id));
        }
        some
    }
}

impl Service {
    /// `id` is a member from now on.
    pub(super) fn came(&mut self, id: MemberId) {
        let Some(m) = self.members.get(&id) else { return };
        let readers = self.links.load(id).readers;
        self.links.free.entry(m.group).or_default().insert((readers, m.order, id));
        for (kind, label) in keys(&m.said.place) {
            self.links.near.entry((m.group, kind, label.clone())).or_default().insert((m.order, id));
        }
        self.relink_readers(id);
    }

    /// `member` is none any more.
    pub(super) fn went(&mut self, id: MemberId, member: &Member) {
        let readers = self.links.load(id).readers;
        if let Some(free) = self.links.free.get_mut(&member.group) {
            free.remove(&(readers, member.order, id));
            if free.is_empty() {
                self.links.free.remove(&member.group);
            }
        }
        for (kind, label) in keys(&member.said.place) {
            let key = (member.group, kind, label.clone());
            if let Some(there) = self.links.near.get_mut(&key) {
                there.remove(&(member.order, id));
                if there.is_empty() {
                    self.links.near.remove(&key);
                }
            }
        }
        self.relink(id);
        self.relink_readers(id);
    }

    fn relink_readers(&mut self, source: MemberId) {
        let readers = self.links.readers.get(&source).cloned().unwrap_or_default();
        readers.into_iter().for_each(|reader| self.relink(reader));
    }

    /// Counts anew whom `id` reads from. One that is silent since somebody lost it is not counted, nor is a source that is no
    /// member.
    pub(super) fn relink(&mut self, id: MemberId) {
        let member = self.members.get(&id);
        let said = member.and_then(|m| m.upstream);
        let is = member.and_then(|m| self.counts(m));
        let links = &mut self.links;
        let before = match said {
            Some(said) => links.said.insert(id, said),
            None => links.said.remove(&id),
        };
        if before != said {
            if let Some(before) = before
                && let Some(readers) = links.readers.get_mut(&before)
            {
                readers.remove(&id);
                if readers.is_empty() {
                    links.readers.remove(&before);
                }
            }
            if let Some(said) = said {
                links.readers.entry(said).or_default().insert(id);
            }
        }
        let was = match is.clone() {
            Some(is) => links.counted.insert(id, is),
            None => links.counted.remove(&id),
        };
        if was == is {
            return;
        }
        if let Some(was) = was {
            self.count(&was, |n| n.saturating_sub(1));
        }
        if let Some(is) = is {
            self.count(&is, |n| n.saturating_add(1));
        }
    }

    fn counts(&self, reader: &Member) -> Option<Counted> {
        let source = self.members.get(&reader.upstream?).filter(|_| !reader.silent())?;
        let link = crossed(&reader.said.place, &source.said.place);
        Some(Counted { source: source.said.member, link, host: source.said.place.host.clone() })
    }

    fn count(&mut self, reader: &Counted, change: impl Fn(u32) -> u32) {
        let links = &mut self.links;
        let load = links.loads.entry(reader.source).or_default();
        let before = load.readers;
        load.readers = change(load.readers);
        match reader.link {
            Link::Local => load.local = change(load.local),
            Link::Nvlink => load.nvlink = change(load.nvlink),
            Link::Network => {
                let network = links.networks.entry(reader.host.clone()).or_default();
                *network = change(*network);
                if *network == 0 {
                    links.networks.remove(&reader.host);
                }
            }
        }
        let after = load.readers;
        if *load == Load::default() {
            links.loads.remove(&reader.source);
        }
        if let Some(source) = self.members.get(&reader.source) {
            let free = links.free.entry(source.group).or_default();
            free.remove(&(before, source.order, reader.source));
            free.insert((after, source.order, reader.source));
        }
    }

    /// Whether what is counted is so, as if it were counted now.
    pub(super) fn links_agree(&self) -> bool {
        let counted: HashMap<_, _> =
            self.members.iter().filter_map(|(id, m)| Some((*id, self.counts(m)?))).collect();
        let readers = |id: &MemberId| counted.values().filter(|c| c.source == *id).count();
        let few = self.members.len() < 200;
        let loads = !few
            || self.members.iter().all(|(id, m)| {
                let free = self.links.free.get(&m.group);
                u32::try_from(readers(id)).is_ok_and(|n| {
                    n == self.links.load(*id).readers
                        && free.is_some_and(|free| free.contains(&(n, m.order, *id)))
                })
            });
        let members: usize = self.links.free.values().map(BTreeSet::len).sum();
        counted == self.links.counted && loads && members == self.members.len()
    }
}
