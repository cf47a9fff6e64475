//! The simulation: real replicas over modelled links, event by event.
//!
//! One file each: the loop and what happens ([`mod`](self)), what the machines' commands do ([`commands`](self)), copies
//! and their order ([`copies`](self)), turns on a shared GPU ([`turns`](self)), deaths and replacements ([`losses`](self)), the account at the end
//! ([`account`](self)).

mod account;
mod commands;
mod copies;
mod losses;
mod node;
mod turns;

use crate::{
    Copy, Error, Outcome, Profile, Queue, Scenario, Span,
    fabric::Fabric,
    failure,
    members::{self, Member},
    placement::Placement,
    random::{Costs, mix},
    site::Site,
};
use flashboot_core::{
    ChunkRef, Geometry, PeerId,
    replica::{Command, Event as Told, Policy, Replica},
};
use node::{Hop, Node};
use std::{collections::VecDeque, time::Duration};

/// A member's number.
type Id = u32;
/// A hop's number.
type HopId = u32;

/// Something that will happen, in as few bytes as can be: most of a run is putting these in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Event {
    /// The copy under way at a member is done, if it still ends now.
    Copied(Id),
    /// The oldest copy of a member that is being hashed is hashed.
    Hashed(Id),
    /// A member's next copy may begin, where members take turns.
    Ready(Id),
    /// The slice of whose turn it is on a GPU is over, if it still ends now.
    Slice(u32),
    /// The word that a member waits for is seen, if it is still seen now.
    Seen(Id),
    /// A source is mapped.
    Attached(HopId),
    /// A member looks at the time.
    Tick(Id),
    /// A clone dies.
    Dies(u32),
    /// A reader notices that its source is gone.
    Noticed(HopId),
    /// A member asks whom to read from instead of the first that it seeks another for.
    Asks(Id),
}

/// Everything there is.
#[derive(Debug)]
struct World<'p> {
    profile: &'p Profile,
    scenario: Scenario,
    geometry: Geometry,
    members: Vec<Member>,
    site: Site<'p>,
    fabric: Fabric,
    nodes: Vec<Node>,
    hops: Vec<Hop>,
    /// Which hop a flow belongs to, by the flow's number.
    hop_of: Vec<HopId>,
    queue: Queue<Event>,
    /// What is to be told to machines now.
    told: VecDeque<(Id, Told)>,
    /// Room for what they say.
    commands: Vec<Command>,
    /// Per GPU: whose turn it is, where members take turns.
    turns: Vec<turns::Turn>,
    /// How many slices have begun.
    slices: u64,
    /// Per GPU: until when it hashes what it was given.
    hashing: Vec<u64>,
    /// Drawn costs of a chunk, one list for each kind of link.
    costs: Vec<(&'p Copy, Costs)>,
    placement: Option<Placement>,
    /// Members that are neither done nor lost.
    left: u64,
    dead: Vec<u32>,
    moves: u64,
    spans: Vec<Span>,
    bytes: u64,
    pending: usize,
}

/// Runs `scenario` on `profile`.
///
/// # Errors
/// What cannot be simulated, and why.
pub fn simulate(profile: &Profile, scenario: &Scenario) -> Result<Outcome, Error> {
    scenario.check()?;
    let mut deaths = Vec::new();
    if scenario.fail > 0.0 {
        let calm = Scenario { fail: 0.0, spans: false, ..*scenario };
        let within = run(profile, &calm, &[])?.filled().map_or(0.0, |filled| filled.last_ms * 1e6);
        deaths = failure::deaths(scenario, within as u64);
    }
    run(profile, scenario, &deaths)
}

/// Members that share nothing are simulated one after the other: what is looked at stays near.
fn run(profile: &Profile, scenario: &Scenario, deaths: &[(u32, u64)]) -> Result<Outcome, Error> {
    let geometry = scenario.geometry(profile)?;
    let mut parts = Vec::new();
    for members in members::members(profile, scenario)? {
        parts.push(World::new(profile, scenario, geometry, members)?.run(deaths)?);
    }
    Ok(account::outcome(geometry, parts))
}

/// The latest that anything can happen, in nanoseconds: 18 years.
const END: u64 = 1 << 59;

fn nanos(micros: f64) -> u64 {
    (micros * 1e3).round() as u64
}

impl<'p> World<'p> {
    fn new(
        profile: &'p Profile,
        scenario: &Scenario,
        geometry: Geometry,
        members: Vec<Member>,
    ) -> Result<Self, Error> {
        let site = Site::new(profile);
        let assignments = members::assignments(&members, scenario, geometry, &site)?;
        let policy = Policy { depth: usize::try_from(scenario.depth).unwrap_or(1), ..Policy::default() };
        let shards = geometry.shards() as usize;
        let node = |assignment: Option<_>| match assignment {
            Some(assignment) => Node::clone(Replica::new(assignment, policy), shards),
            None => Node::seed(geometry.payload()),
        };
        let nodes: Vec<_> = assignments.into_iter().map(node).collect();
        let left = nodes.iter().filter(|node| node.machine.is_some()).count() as u64;
        let gpus = members.iter().map(|m| m.gpu as usize + 1).max().unwrap_or(0);
        let turns = turns::turns(profile, scenario, &members, gpus);
        Ok(Self {
            profile,
            scenario: *scenario,
            geometry,
            members,
            site,
            fabric: Fabric::default(),
            nodes,
            hops: Vec::new(),
            hop_of: Vec::new(),
            queue: Queue::default(),
            told: VecDeque::new(),
            commands: Vec::new(),
            turns,
            slices: 0,
            hashing: vec![0; gpus],
            costs: Vec::new(),
            placement: None,
            left,
            dead: Vec::new(),
            moves: 0,
            spans: Vec::new(),
            bytes: 0,
            pending: 0,
        })
    }

    /// Until every clone is done or lost.
    fn run(mut self, deaths: &[(u32, u64)]) -> Result<account::Part, Error> {
        for (clone, at) in deaths {
            self.queue.push(*at, Event::Dies(*clone));
        }
        let reading = (0..).zip(&self.nodes).filter(|(_, node)| node.machine.is_some());
        self.told.extend(reading.map(|(id, _)| (id, Told::Start)));
        self.tell()?;
        // A copy is three events at most, a move some more; beyond that something goes round in circles.
        let chunks =
            self.geometry.payload().div_ceil(self.geometry.chunk()) + u64::from(self.geometry.shards());
        let most = (self.nodes.len() as u64 + 1).saturating_mul(chunks.saturating_add(64)).saturating_mul(64);
        while self.left > 0 {
            if self.fabric.is_touched() && self.queue.next_at().is_none_or(|at| at > self.queue.now()) {
                self.settle();
                continue;
            }
            self.pending = self.pending.max(self.queue.waiting());
            let Some(event) = self.queue.pop() else { return Err(self.stuck("nothing is left to happen")) };
            if self.queue.now() > END || self.slices > turns::MOST {
                return Err(Error::Endless { profile: self.profile.name.clone() });
            }
            // A slice is two events: its own end, and the copy's that it lets go on.
            if self.queue.pushed().saturating_sub(2 * self.slices) > most {
                return Err(self.stuck("too many events"));
            }
            self.happens(event)?;
            self.tell()?;
        }
        Ok(self.part())
    }

    fn stuck(&self, why: &str) -> Error {
        Error::Stuck { at_ms: self.queue.now() / 1_000_000, left: self.left, why: why.into() }
    }

    fn now(&self) -> Duration {
        Duration::from_nanos(self.queue.now())
    }

    fn happens(&mut self, event: Event) -> Result<(), Error> {
        match event {
            Event::Copied(id) => self.copied(id),
            Event::Hashed(id) => self.hashed(id),
            Event::Ready(id) => self.is_ready(id),
            Event::Slice(gpu) => self.slice_ends(gpu),
            Event::Seen(id) => self.seen(id),
            Event::Attached(hop) => self.attached(hop),
            Event::Tick(id) => self.tick(id),
            Event::Dies(clone) => self.dies(clone),
            Event::Noticed(hop) => self.noticed(hop),
            Event::Asks(id) => self.asks(id)?,
        }
        Ok(())
    }

    /// Tells machines what happened, and does what they say, until they have no more to say.
    fn tell(&mut self) -> Result<(), Error> {
        let mut commands = std::mem::take(&mut self.commands);
        while let Some((id, event)) = self.told.pop_front() {
            let now = self.now();
            let Some(machine) = self.nodes.get_mut(id as usize).and_then(|node| node.machine.as_mut()) else {
                continue;
            };
            machine.handle_into(now, event, &mut commands);
            for command in commands.drain(..) {
                self.carry_out(id, command)?;
            }
        }
        self.commands = commands;
        Ok(())
    }

    fn node(&mut self, id: Id) -> Option<&mut Node> {
        self.nodes.get_mut(id as usize)
    }

    fn hop(&self, hop: HopId) -> Option<&Hop> {
        self.hops.get(hop as usize)
    }

    /// The hop by which `reader` reads from `source`.
    fn hop_between(&self, reader: Id, source: PeerId) -> Option<HopId> {
        let node = self.nodes.get(reader as usize)?;
        let of = |hop: &&HopId| self.hop(**hop).is_some_and(|h| u64::from(h.source) == source.0);
        node.hops.iter().find(of).copied()
    }

    /// What `chunk` costs at this hop apart from its bytes, in nanoseconds.
    fn cost_of(&self, hop: &Hop, chunk: ChunkRef) -> u64 {
        let Some((copy, costs)) = self.costs.get(hop.costs) else { return 0 };
        let beyond = copy.curve.as_ref().map_or(0, |curve| curve.beyond(chunk.range.len(), copy.rate));
        if let Some(always) = costs.always() {
            return always as u64 + beyond;
        }
        let Some(member) = self.members.get(hop.reader as usize) else { return beyond };
        let word = u64::from(member.rank) << 52
            ^ u64::from(member.replica) << 32
            ^ u64::from(chunk.shard.0) << 20
            ^ chunk.index;
        costs.of(mix(self.scenario.seed, word)) as u64 + beyond
    }
}

#[cfg(test)]
mod tests;
