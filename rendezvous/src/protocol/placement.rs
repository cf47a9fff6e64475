//! From whom a clone reads: the nearest holder over a link that carries no reader yet.
//!
//! A copy between two members crosses one link of its source: its own memory, its GPU's port or its
//! host's network. Each link is to carry one reader; so clones of one host make a chain from its first, and one of another host
//! reads across once. A tail far from whoever holds all costs as much as a reader for every [`choose`]'s `chain`
//! members above it, so long chains become trees of chains. Nobody moves a clone that reads well.
//!
//! How long is long depends on the content: a second reader of a link costs every member behind it the whole content's time over that link,
//! one place further down a chain costs one chunk's. So [`chain`] grows with the number of chunks.

use super::member::{MemberId, Place};
use serde::{Deserialize, Serialize};

/// How far apart two places are, nearest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Distance {
    /// Memory of one GPU.
    SameGpu,
    /// One host.
    SameHost,
    /// GPUs of one NVLink domain.
    SameDomain,
    /// One rail.
    SameRail,
    /// One rack.
    SameRack,
    /// Anywhere else.
    Elsewhere,
}

/// What a copy crosses at its source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Link {
    /// The member's own memory: its GPU's, or its host's.
    Local,
    /// Its GPU's port: NVLink, within a host or a domain of several.
    Nvlink,
    /// The host's network.
    Network,
}

/// How far `a` is from `b`. A label that is not there equals no other.
pub fn distance(a: &Place, b: &Place) -> Distance {
    let same = |a: &Option<String>, b: &Option<String>| a.is_some() && a == b;
    if a.host == b.host {
        return if same(&a.gpu, &b.gpu) { Distance::SameGpu } else { Distance::SameHost };
    }
    if a.gpu.is_some() && b.gpu.is_some() && same(&a.domain, &b.domain) {
        Distance::SameDomain
    } else if same(&a.rail, &b.rail) {
        Distance::SameRail
    } else if same(&a.rack, &b.rack) {
        Distance::SameRack
    } else {
        Distance::Elsewhere
    }
}

/// What a copy between the two crosses. Another GPU of the host is behind the same port as another host's of the domain.
pub fn crossed(a: &Place, b: &Place) -> Link {
    match distance(a, b) {
        Distance::SameHost if a.gpu.is_some() && b.gpu.is_some() => Link::Nvlink,
        Distance::SameGpu | Distance::SameHost => Link::Local,
        Distance::SameDomain => Link::Nvlink,
        Distance::SameRail | Distance::SameRack | Distance::Elsewhere => Link::Network,
    }
}

/// Chunks of this size are those of the largest images (the paper's); smaller images have smaller ones, so more of them.
const CHUNK: u64 = 256 << 20;

/// Beyond this every member of a chain waits for too many others that may be slow or die.
const MOST: u32 = 256;

/// Members above a tail that cost as much as a second reader of a link, for a content of `bytes`: as many as it has chunks, at least `least`,
/// and 256 at most unless `least` is more.
pub fn chain(bytes: u64, least: u32) -> u32 {
    u32::try_from(bytes / CHUNK).unwrap_or(u32::MAX).min(MOST).max(least)
}

/// One that might be read from.
#[derive(Debug, Clone, Copy)]
pub struct Candidate<'p> {
    /// Who.
    pub member: MemberId,
    /// Where.
    pub place: &'p Place,
    /// Members above it; 0 for one that holds all.
    pub depth: u32,
    /// Who reads from it now.
    pub readers: u32,
    /// How many it serves at most.
    pub most: u32,
    /// Readers that cross its memory, its GPU's port, its host's network already.
    pub load: [u32; 3],
    /// Reports against it that are not yet forgotten.
    pub doubts: u32,
    /// Verified bytes.
    pub holds: u64,
    /// When it came: a number that grows.
    pub order: u64,
}

/// Whom a clone at `place` reads from; `None` when nobody has room. Never looks at whether a candidate may be read
/// from: the caller leaves those out. Of equals the first to come.
pub fn choose(place: &Place, candidates: &[Candidate<'_>], chain: u32) -> Option<MemberId> {
    let cost = |c: &Candidate<'_>| {
        let distance = distance(place, c.place);
        let load = match crossed(place, c.place) {
            Link::Local => c.load[0],
            Link::Nvlink => c.load[1],
            Link::Network => c.load[2],
        };
        let cost = load.saturating_add(c.depth / chain.max(1));
        (c.doubts, cost, distance, c.depth, std::cmp::Reverse(c.holds), c.order)
    };
    candidates.iter().filter(|c| c.readers < c.most).min_by_key(|c| cost(c)).map(|c| c.member)
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashboot_core::Generation;
    use proptest::prelude::*;

    fn at(host: &str, gpu: &str) -> Place {
        let gpu = (!gpu.is_empty()).then(|| gpu.to_owned());
        Place { host: host.into(), gpu, ..Place::default() }
    }

    fn id(n: u64) -> MemberId {
        MemberId(Generation::from_random(n))
    }

    fn candidate(n: u64, place: &Place) -> Candidate<'_> {
        let (depth, readers, most, load, doubts, holds) = (0, 0, 8, [0; 3], 0, 0);
        Candidate { member: id(n), place, depth, readers, most, load, doubts, holds, order: n }
    }

    #[test]
    fn places_are_ordered_as_the_links_between_them_are() {
        let rack = |place: Place| Place { rack: Some("r".into()), ..place };
        let rail = |place: Place| Place { rail: Some("1".into()), ..rack(place) };
        let domain = |place: Place| Place { domain: Some("d".into()), ..rail(place) };
        let here = domain(at("a", "g"));
        let found = [
            at("a", "g"),
            at("a", "h"),
            domain(at("b", "g")),
            rail(at("b", "g")),
            rack(at("b", "g")),
            at("b", "g"),
        ]
        .map(|there| distance(&here, &there));
        assert!(found.is_sorted(), "{found:?}");
        assert_eq!(found.first(), Some(&Distance::SameGpu));
        assert_eq!(found.last(), Some(&Distance::Elsewhere));
        assert_eq!(distance(&at("a", ""), &at("a", "")), Distance::SameHost, "host memory is no GPU's");
    }

    #[test]
    fn gpus_of_one_host_and_of_one_domain_are_behind_one_port() {
        let at = |host, gpu| Place { domain: Some("d".into()), ..at(host, gpu) };
        let (seed, same, near, far) = (at("a", "0"), at("a", "0"), at("a", "1"), at("b", "0"));
        assert_eq!(
            [&same, &near, &far].map(|place| crossed(place, &seed)),
            [Link::Local, Link::Nvlink, Link::Nvlink]
        );
        assert_eq!(crossed(&at("a", ""), &at("a", "")), Link::Local);
        let busy = Candidate { load: [0, 1, 0], readers: 1, ..candidate(1, &seed) };
        let tail = Candidate { depth: 1, ..candidate(2, &near) };
        assert_eq!(choose(&far, &[busy, tail], 16), Some(id(2)), "a second reader would halve the port");
    }

    #[test]
    fn a_chain_is_long_when_it_has_as_many_members_as_the_content_has_chunks() {
        assert_eq!(chain(20 << 30, 16), 80);
        assert_eq!(chain(1 << 30, 16), 16);
        assert_eq!((chain(u64::MAX, 16), chain(u64::MAX, 300)), (256, 300));
    }

    #[test]
    fn a_link_without_a_reader_comes_before_a_shorter_one_with_one() {
        let (near, far) = (at("a", "0"), at("b", "0"));
        let busy = Candidate { load: [0, 1, 0], readers: 1, ..candidate(1, &near) };
        assert_eq!(choose(&at("a", "1"), &[busy, candidate(2, &far)], 16), Some(id(2)));
        assert_eq!(choose(&at("a", "1"), &[candidate(1, &near), candidate(2, &far)], 16), Some(id(1)));
        // Its network carries somebody; its memory does not.
        let elsewhere = Candidate { load: [0, 0, 1], readers: 1, ..candidate(1, &near) };
        assert_eq!(choose(&at("a", "1"), &[elsewhere, candidate(2, &far)], 16), Some(id(1)));
    }

    #[test]
    fn a_long_chain_gets_a_second_one_beside_it() {
        let place = at("a", "");
        let seed = Candidate { load: [1, 0, 0], readers: 1, ..candidate(1, &place) };
        let tail = |depth| Candidate { depth, ..candidate(2, &place) };
        assert_eq!(choose(&place, &[seed, tail(15)], 16), Some(id(2)));
        assert_eq!(choose(&place, &[seed, tail(16)], 16), Some(id(1)));
    }

    #[test]
    fn doubt_and_want_of_room_count_before_everything() {
        let place = at("a", "");
        let far = at("b", "");
        let doubted = Candidate { doubts: 1, ..candidate(1, &place) };
        assert_eq!(choose(&place, &[doubted, candidate(2, &far)], 16), Some(id(2)));
        assert_eq!(choose(&place, &[doubted], 16), Some(id(1)));
        let full = Candidate { most: 0, ..candidate(1, &place) };
        assert_eq!(choose(&place, &[full], 16), None);
    }

    proptest! {
        #[test]
        fn the_choice_does_not_depend_on_the_order_of_the_list(
            specs in prop::collection::vec((0u8..3, 0u32..40, 0u32..3, 1u32..4, 0u32..2), 0..12),
            turn: prop::sample::Index,
        ) {
            let places: Vec<_> = specs.iter().map(|s| at(&s.0.to_string(), "")).collect();
            let list: Vec<_> = (1u64..).zip(specs.iter().zip(&places)).map(|(n, (s, place))| Candidate {
                depth: s.1, readers: s.2, most: s.3, load: [s.2; 3], doubts: s.4, ..candidate(n, place)
            }).collect();
            let here = at("1", "");
            let mut turned = list.clone();
            if !turned.is_empty() {
                turned.rotate_left(turn.index(list.len()));
            }
            let chosen = choose(&here, &list, 8);
            prop_assert_eq!(chosen, choose(&here, &turned, 8));
            match chosen {
                Some(chosen) => prop_assert!(list.iter().any(|c| c.member == chosen && c.readers < c.most)),
                None => prop_assert!(list.iter().all(|c| c.readers >= c.most)),
            }
        }
    }
}
