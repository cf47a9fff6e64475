//! The machine itself: state, what begins and what lands; how sources are lost is in `loss`.

use super::{Command, Event, Policy, few::Few, todo::Todo};
use crate::{
    ChunkRef, Error, Geometry, Kind, PeerId, Retry, ShardId,
    schedule::{Gate, Rank, Schedule},
};
use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    time::Duration,
};

/// One part of the work: read all of `shard` from `source`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SourcedLeg {
    /// The peer to read from.
    pub source: PeerId,
    /// The shard to read.
    pub shard: ShardId,
}

/// What one replica is to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Assignment {
    /// How the payload is cut.
    pub geometry: Geometry,
    /// The shards that are there from the start.
    pub held: Vec<ShardId>,
    /// What to read, in order.
    pub legs: Vec<SourcedLeg>,
    /// How far a source must be before a chunk may be taken.
    pub gate: Gate,
}

impl Assignment {
    /// The part of `rank` in `schedule`, where rank r is known as `PeerId(r)`.
    pub fn of(schedule: Schedule, rank: Rank, geometry: Geometry) -> Self {
        let legs = schedule.legs(rank).into_iter();
        Self {
            geometry,
            held: schedule.holds(rank),
            legs: legs
                .map(|leg| SourcedLeg { source: PeerId(u64::from(leg.source)), shard: leg.shard })
                .collect(),
            gate: schedule.gate(),
        }
    }
}

/// A source as the machine sees it.
#[derive(Debug)]
pub(super) enum Link {
    Attaching,
    Up,
    /// Lost; its last pulls have not quiesced.
    Draining(Error),
    /// Let go; a `Seek` is under way.
    Seeking(Error),
}

/// A leg and what is still to be pulled of it.
#[derive(Debug)]
pub(super) struct Work {
    pub(super) source: PeerId,
    pub(super) shard: ShardId,
    pub(super) chunks: Todo,
}

/// What of one shard is verified.
#[derive(Debug, Default)]
struct Verified {
    /// Bytes from the shard's start, all verified and published.
    prefix: u64,
    /// Verified chunks past the prefix, by number, with their bytes.
    ahead: BTreeMap<u64, u64>,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Phase {
    Idle,
    Running,
    /// Waiting for pulls to quiesce before failing.
    Stopping(Error),
    Over,
}

/// One replica. See the [module](super) for what it holds to.
#[derive(Debug)]
pub struct Replica {
    pub(super) policy: Policy,
    pub(super) geometry: Geometry,
    gate: Gate,
    held: Vec<ShardId>,
    pub(super) work: VecDeque<Work>,
    /// By shard.
    verified: Vec<Verified>,
    pub(super) links: Few<PeerId, Link>,
    /// What each source was last seen to have.
    words: Few<(PeerId, ShardId), u64>,
    pub(super) in_flight: Few<ChunkRef, PeerId>,
    /// Blocks found bad and not yet replaced, by chunk, and how often the chunk was tried at this source.
    pub(super) damaged: BTreeMap<ChunkRef, (BTreeSet<u64>, u32)>,
    /// The word that is waited for, and when to give up.
    pub(super) watch: Option<(PeerId, ShardId, u64, Duration)>,
    pub(super) losses: u32,
    repaired: u64,
    pub(super) phase: Phase,
}

impl Replica {
    /// A replica that has not begun; feed it [`Event::Start`].
    pub fn new(assignment: Assignment, policy: Policy) -> Self {
        let Assignment { geometry, held, legs, gate } = assignment;
        let work = legs.into_iter().map(|leg| Work {
            source: leg.source,
            shard: leg.shard,
            chunks: Todo::new(geometry.chunks_in(leg.shard)),
        });
        Self {
            policy: Policy { depth: policy.depth.max(1), ..policy },
            geometry,
            gate,
            held,
            work: work.collect(),
            verified: (0..geometry.shards()).map(|_| Verified::default()).collect(),
            links: Few::default(),
            words: Few::default(),
            in_flight: Few::default(),
            damaged: BTreeMap::new(),
            watch: None,
            losses: 0,
            repaired: 0,
            phase: Phase::Idle,
        }
    }

    /// How the payload is cut.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// Blocks that did not verify and were pulled again with success.
    pub fn repaired(&self) -> u64 {
        self.repaired
    }

    /// Sources lost so far.
    pub fn losses(&self) -> u32 {
        self.losses
    }

    /// Whether [`Command::Complete`] or [`Command::Fail`] was given.
    pub fn is_over(&self) -> bool {
        self.phase == Phase::Over
    }

    /// Takes one event; `now` never goes back. The commands are to be carried out in order.
    pub fn handle(&mut self, now: Duration, event: Event) -> Vec<Command> {
        let mut out = Vec::new();
        self.handle_into(now, event, &mut out);
        out
    }

    /// As [`handle`](Self::handle), with the commands put behind those in `out`: for who has many machines and few
    /// commands a machine.
    pub fn handle_into(&mut self, now: Duration, event: Event, out: &mut Vec<Command>) {
        if self.phase == Phase::Over {
            return;
        }
        match event {
            Event::Start => self.on_start(out),
            Event::Attached { source } => self.on_attached(source, out),
            Event::Seen { source, shard, bytes } => self.on_seen(source, shard, bytes),
            Event::Lost { source, cause } => self.lose(source, cause, out),
            Event::Verified { source, chunk } => self.on_verified(source, chunk, out),
            Event::Corrupt { source, chunk, blocks } => self.on_corrupt(source, chunk, blocks, out),
            Event::Failed { source, chunk, cause } => self.on_failed(source, chunk, cause, out),
            Event::Reassigned { lost, source } => self.on_reassigned(lost, source, out),
            Event::Cancel => {
                let cause = Error::new(Kind::Cancelled, "replicate", "cancelled by the caller");
                self.stop(cause, out);
            }
            Event::Broken { cause } => self.stop(cause, out),
            Event::Tick => self.on_tick(now, out),
        }
        self.drain(out);
        self.advance(now, out);
    }

    fn on_start(&mut self, out: &mut Vec<Command>) {
        if self.phase != Phase::Idle {
            return;
        }
        self.phase = Phase::Running;
        for shard in self.held.clone() {
            let bytes = self.geometry.shard_range(shard).len();
            if let Some(verified) = self.verified.get_mut(shard.0 as usize) {
                verified.prefix = bytes;
            }
            out.push(Command::Publish { shard, bytes });
        }
        let sources: BTreeSet<_> = self.work.iter().map(|work| work.source).collect();
        for source in sources {
            self.attach(source, out);
        }
    }

    pub(super) fn attach(&mut self, source: PeerId, out: &mut Vec<Command>) {
        self.links.insert(source, Link::Attaching);
        self.words.retain(|(peer, _), _| *peer != source);
        out.push(Command::Attach { source });
    }

    fn on_attached(&mut self, source: PeerId, out: &mut Vec<Command>) {
        match self.links.get_mut(&source) {
            Some(link @ Link::Attaching) => *link = Link::Up,
            // We stopped, or gave it up, while it was being attached.
            _ => out.push(Command::Detach { source }),
        }
    }

    fn on_seen(&mut self, source: PeerId, shard: ShardId, bytes: u64) {
        let known = self.words.get(&(source, shard)).copied().unwrap_or(0);
        self.words.insert((source, shard), bytes.max(known));
        if self.watch.is_some_and(|(s, h, at_least, _)| (s, h) == (source, shard) && bytes >= at_least) {
            self.watch = None;
        }
    }

    fn on_verified(&mut self, source: PeerId, chunk: ChunkRef, out: &mut Vec<Command>) {
        if !self.quiesced(source, chunk) {
            return;
        }
        if let Some((blocks, _)) = self.damaged.remove(&chunk) {
            self.repaired = self.repaired.saturating_add(blocks.len() as u64);
        }
        let shard = self.geometry.shard_range(chunk.shard);
        let Some(verified) = self.verified.get_mut(chunk.shard.0 as usize) else { return };
        let before = verified.prefix;
        let at = chunk.range.start - shard.start;
        if at == before {
            verified.prefix += chunk.range.len();
        } else {
            verified.ahead.insert(at, chunk.range.len());
        }
        while let Some(bytes) = verified.ahead.remove(&verified.prefix) {
            verified.prefix += bytes;
        }
        if verified.prefix > before && self.phase == Phase::Running {
            out.push(Command::Publish { shard: chunk.shard, bytes: verified.prefix });
        }
    }

    fn on_corrupt(&mut self, source: PeerId, chunk: ChunkRef, blocks: Vec<u64>, out: &mut Vec<Command>) {
        if !self.quiesced(source, chunk) {
            return;
        }
        self.requeue(source, chunk);
        let (bad, tries) = self.damaged.entry(chunk).or_default();
        bad.extend(&blocks);
        *tries += 1;
        if *tries > self.policy.repairs {
            *tries = 0; // at the next source the count begins again
            let cause = Error::new(
                Kind::Corrupt,
                "verify",
                format!(
                    "blocks {blocks:?} do not match their digests after {} pulls",
                    self.policy.repairs + 1
                ),
            );
            self.lose(source, cause.with_peer(source).with_chunk(chunk.index), out);
        }
    }

    fn on_failed(&mut self, source: PeerId, chunk: ChunkRef, cause: Error, out: &mut Vec<Command>) {
        if !self.quiesced(source, chunk) {
            return;
        }
        self.requeue(source, chunk);
        // A pull of a source that is given up already fails as cancelled, or by what ends this process.
        if matches!(self.links.get(&source), Some(Link::Up)) || cause.retry() == Retry::NewProcess {
            self.lose(source, cause, out);
        }
    }

    /// Takes a pull off the list; false for one that is not on it.
    fn quiesced(&mut self, source: PeerId, chunk: ChunkRef) -> bool {
        if self.in_flight.get(&chunk) == Some(&source) {
            self.in_flight.remove(&chunk);
            return true;
        }
        false
    }

    /// Puts a chunk back into the work of its source.
    fn requeue(&mut self, source: PeerId, chunk: ChunkRef) {
        if let Some(work) = self.work.iter_mut().find(|w| w.source == source && w.shard == chunk.shard) {
            work.chunks.put_back(chunk.index);
        }
    }

    fn on_tick(&mut self, now: Duration, out: &mut Vec<Command>) {
        if let Some((source, shard, at_least, until)) = self.watch
            && now >= until
        {
            let cause = Error::new(
                Kind::Stalled,
                "observe",
                format!(
                    "progress of shard {} stood below {at_least} bytes for {:?}",
                    shard.0, self.policy.stall
                ),
            );
            self.lose(source, cause.with_peer(source), out);
        }
    }

    /// Starts what can be started; says what is waited for; notices the end.
    fn advance(&mut self, now: Duration, out: &mut Vec<Command>) {
        if self.phase != Phase::Running {
            return;
        }
        while self.in_flight.len() < self.policy.depth {
            let Some(work) = self.work.iter_mut().find(|work| !work.chunks.is_empty()) else { break };
            let (source, shard) = (work.source, work.shard);
            if !matches!(self.links.get(&source), Some(Link::Up)) {
                break;
            }
            let first = work.chunks.first().and_then(|index| self.geometry.chunk_at(shard, index));
            let Some(chunk) = first else { break };
            let whole = self.geometry.shard_range(shard);
            let needed = match self.gate {
                Gate::Chunk => chunk.range.end - whole.start,
                Gate::Shard => whole.len(),
            };
            let seen = self.words.get(&(source, shard)).copied().unwrap_or(0);
            if seen < needed {
                self.watch_for(now, source, shard, needed, out);
                break;
            }
            work.chunks.take_first();
            self.in_flight.insert(chunk, source);
            out.push(Command::Pull { source, chunk });
        }
        self.release_read_sources(out);
        if self.in_flight.is_empty() && self.work.iter().all(|work| work.chunks.is_empty()) {
            self.end(out);
            out.push(Command::Complete);
        }
    }

    fn watch_for(
        &mut self,
        now: Duration,
        source: PeerId,
        shard: ShardId,
        needed: u64,
        out: &mut Vec<Command>,
    ) {
        if self.watch.is_some_and(|(s, h, at_least, _)| (s, h, at_least) == (source, shard, needed)) {
            return;
        }
        let until = now.saturating_add(self.policy.stall);
        self.watch = Some((source, shard, needed, until));
        out.push(Command::Watch { source, shard, at_least: needed, until });
    }

    /// An import pins the exporter's memory: a source from which all is read is let go at once.
    fn release_read_sources(&mut self, out: &mut Vec<Command>) {
        let needed = |source: &PeerId| {
            self.in_flight.values().any(|peer| peer == source)
                || self.work.iter().any(|work| work.source == *source && !work.chunks.is_empty())
        };
        let done: Vec<_> = self
            .links
            .iter()
            .filter(|(source, link)| matches!(link, Link::Up) && !needed(source))
            .map(|(source, _)| *source)
            .collect();
        for source in done {
            self.links.remove(&source);
            out.push(Command::Detach { source });
        }
    }
}
