//! The nodes of an all-gather: N that each hold one shard of a rank image and complete one another in a ring.
//!
//! A node says the same thing again and again, what it is and how far; the answer is the ring, once all nodes have come. From
//! then on the order stays, and only says who is gone and who is done: nodes find their way around the gone by themselves. A
//! service that comes back is told the order by whoever knows it. Must never put a node into a ring that has begun.

use super::{
    check,
    member::{MemberId, Place},
    message::Answer,
    refusal::{Reason, Refusal},
    rules::Rules,
    service::{MEMORY, RETRY_MS, millis, wait},
};
use flashboot_core::TransportName;
use serde::{Deserialize, Serialize};
use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

/// The most nodes of one ring.
pub const NODES: u32 = 256;

/// What one node says, to come in and to stay.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RingNode {
    /// Its arena's filling.
    pub member: MemberId,
    /// Random, known to the node and the service only.
    pub secret: u64,
    /// Which ring, of several that gather the same.
    pub name: String,
    /// The image's id, 64 hexadecimal digits.
    pub image: String,
    /// The rank image's name.
    pub rank: String,
    /// Payload bytes.
    pub bytes: u64,
    /// How many nodes there are.
    pub nodes: u32,
    /// Where.
    pub place: Place,
    /// A locator for every transport it can be read by.
    pub locators: Vec<String>,
    /// The transports it can read by.
    pub transports: Vec<TransportName>,
    /// It has every shard.
    pub done: bool,
    /// The ring as it knows it; empty before it has begun.
    pub order: Vec<MemberId>,
}

/// A ring, for one of its nodes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ring {
    /// Ask more often than this, in milliseconds.
    pub lease_ms: u64,
    /// The nodes in their order: the first owns the first shard.
    pub nodes: Vec<RingMember>,
}

/// A node, as the others are told of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RingMember {
    /// Who.
    pub member: MemberId,
    /// How it can be read; nothing where a service that came back has not heard of it yet.
    pub locators: Vec<String>,
    /// Silent for a lease; to a service that came back, for a lease since it heard of the ring.
    pub gone: bool,
    /// It has every shard.
    pub done: bool,
}

type Key = (String, String, String, u64, u32);

#[derive(Debug, Clone)]
struct Node {
    said: RingNode,
    heard: Duration,
}

#[derive(Debug, Clone, Default)]
struct Gathering {
    order: Vec<MemberId>,
    nodes: BTreeMap<MemberId, Node>,
    /// Who came when, as long as it is forming.
    came: Vec<MemberId>,
    /// When it was first heard of here.
    began: Duration,
    heard: Duration,
}

/// Every ring.
#[derive(Debug, Clone, Default)]
pub(super) struct Rings(BTreeMap<Key, Gathering>);

fn malformed(detail: String) -> Refusal {
    Refusal::new(Reason::Malformed, detail)
}

fn valid(said: &RingNode) -> Result<(), Refusal> {
    if said.nodes == 0 || said.nodes > NODES {
        return Err(malformed(format!("a ring of {} nodes: between 1 and {NODES} are possible", said.nodes)));
    }
    check::ring(said)?;
    let order = &said.order;
    if order.is_empty() {
        return Ok(());
    }
    let distinct: BTreeSet<_> = order.iter().collect();
    let whole = u32::try_from(distinct.len()) == Ok(said.nodes) && distinct.len() == order.len();
    if !whole || !distinct.contains(&said.member) {
        return Err(malformed(format!("an order of {} that is no ring of {}", order.len(), said.nodes)));
    }
    Ok(())
}

impl Rings {
    /// What a node is answered.
    pub(super) fn handle(&mut self, now: Duration, rules: &Rules, said: RingNode) -> Result<Answer, Refusal> {
        valid(&said)?;
        let key = (said.image.clone(), said.rank.clone(), said.name.clone(), said.bytes, said.nodes);
        if !self.0.contains_key(&key) && self.0.len() >= rules.contents {
            return Err(Refusal::new(Reason::Full, format!("{} rings", self.0.len())));
        }
        let silent = |heard: Duration| heard.saturating_add(rules.lease) <= now;
        let ring = self.0.entry(key).or_insert_with(|| Gathering { began: now, ..Gathering::default() });
        ring.heard = now;
        let (id, nodes) = (said.member, said.nodes);
        if ring.nodes.get(&id).is_some_and(|node| node.said.secret != said.secret) {
            let detail = format!("another process holds a node of generation {id}");
            return Err(Refusal::new(Reason::GenerationTaken, detail));
        }
        if ring.order.is_empty() && !said.order.is_empty() {
            // It began at a service before this one; who waits here is none of it, unless the order says so.
            ring.order.clone_from(&said.order);
            let order = &ring.order;
            ring.nodes.retain(|id, _| order.contains(id));
        }
        if !ring.order.is_empty() && !ring.order.contains(&id) {
            let detail =
                format!("the ring of {nodes} nodes has begun; clone from a seed, or name another ring");
            return Err(Refusal::new(Reason::Full, detail));
        }
        let before = ring.nodes.get(&id).is_some_and(|node| node.said.done);
        if !ring.nodes.contains_key(&id) {
            ring.came.push(id);
        }
        let done = said.done || before;
        ring.nodes.insert(id, Node { said: RingNode { done, ..said }, heard: now });
        if ring.order.is_empty() {
            ring.nodes.retain(|_, node| !silent(node.heard));
            let present = &ring.nodes;
            ring.came.retain(|id| present.contains_key(id));
            if u32::try_from(ring.came.len()).is_ok_and(|came| came < nodes) {
                return Ok(wait(RETRY_MS, &format!("{} of {nodes} nodes have come", ring.came.len())));
            }
            ring.order = ring.around();
        }
        let members = ring.order.iter().map(|id| match ring.nodes.get(id) {
            Some(Node { said, heard }) => RingMember {
                member: *id,
                locators: said.locators.clone(),
                gone: silent(*heard),
                done: said.done,
            },
            None => RingMember { member: *id, locators: Vec::new(), gone: silent(ring.began), done: false },
        });
        Ok(Answer::Ring(Ring { lease_ms: millis(rules.lease), nodes: members.collect() }))
    }

    /// The service slept for `gap`: nobody was silent meanwhile.
    pub(super) fn slept(&mut self, gap: Duration) {
        for ring in self.0.values_mut() {
            let nodes = ring.nodes.values_mut().map(|node| &mut node.heard);
            for at in nodes.chain([&mut ring.began, &mut ring.heard]) {
                *at = at.saturating_add(gap);
            }
        }
    }

    /// Forgets rings that nobody has asked about for long.
    pub(super) fn tick(&mut self, now: Duration, rules: &Rules) {
        let memory = rules.lease.saturating_mul(MEMORY);
        self.0.retain(|_, ring| ring.heard.saturating_add(memory) > now);
    }
}

impl Gathering {
    /// Neighbours are near: by rack, rail, domain, host and GPU, and of equals who came first.
    fn around(&self) -> Vec<MemberId> {
        let mut order = self.came.clone();
        order.sort_by_key(|id| {
            let place = self.nodes.get(id).map(|node| &node.said.place);
            place.map(|p| (&p.rack, &p.rail, &p.domain, &p.host, &p.gpu))
        });
        order
    }
}
