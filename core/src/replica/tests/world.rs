//! The machine against a hostile world: answers in any order, late, and with every kind of loss.

use crate::{
    ChunkRef, Error, Geometry, Kind, PeerId, ShardId,
    replica::{Assignment, Command, Event, Policy, Replica},
    schedule::Schedule,
};
use proptest::prelude::*;
use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

pub(super) fn geometry(payload: u64, shards: u32) -> Geometry {
    Geometry::new(payload, 1024, 2048, shards).unwrap()
}

pub(super) fn lost(source: PeerId) -> Event {
    Event::Lost { source, cause: Error::new(Kind::SourceLost, "test", "gone") }
}

/// Checks every command against what the module promises, and answers them in the order the seed draws.
struct World {
    machine: Replica,
    now: Duration,
    geometry: Geometry,
    attached: BTreeSet<PeerId>,
    attaching: Vec<PeerId>,
    /// What each source has; a source that is dead is not in it.
    words: BTreeMap<PeerId, u64>,
    watch: Option<(PeerId, ShardId, u64, Duration)>,
    seen: BTreeMap<(PeerId, ShardId), u64>,
    pulls: Vec<(PeerId, ChunkRef)>,
    verified: BTreeSet<ChunkRef>,
    published: BTreeMap<ShardId, u64>,
    seeks: Vec<PeerId>,
    next_peer: u64,
    faults_left: u32,
    outcome: Option<Result<(), Error>>,
}

impl World {
    fn new(schedule: Schedule, rank: u32, payload: u64, depth: usize, faults: u32) -> Self {
        let geometry = geometry(payload, schedule.shards());
        let policy = Policy { depth, stall: Duration::from_secs(5), repairs: 1, max_losses: 1000 };
        Self {
            machine: Replica::new(Assignment::of(schedule, rank, geometry), policy),
            now: Duration::ZERO,
            geometry,
            attached: BTreeSet::new(),
            attaching: Vec::new(),
            words: (0..u64::from(schedule.ranks())).map(|rank| (PeerId(rank), 0)).collect(),
            watch: None,
            seen: BTreeMap::new(),
            pulls: Vec::new(),
            verified: BTreeSet::new(),
            published: BTreeMap::new(),
            seeks: Vec::new(),
            next_peer: 1000,
            faults_left: faults,
            outcome: None,
        }
    }

    fn feed(&mut self, event: Event) {
        for command in self.machine.handle(self.now, event) {
            self.check(command);
        }
    }

    fn check(&mut self, command: Command) {
        assert!(self.outcome.is_none(), "a command after the end: {command:?}");
        match command {
            Command::Attach { source } => {
                assert!(!self.attached.contains(&source), "attached twice");
                self.seen.retain(|(peer, _), _| *peer != source);
                self.attaching.push(source);
            }
            Command::Watch { source, shard, at_least, until } => {
                assert!(until > self.now);
                self.watch = Some((source, shard, at_least, until));
            }
            Command::Pull { source, chunk } => {
                assert!(self.attached.contains(&source), "pull from a source that is not attached");
                assert!(self.pulls.iter().all(|(_, other)| *other != chunk), "pulled before it quiesced");
                assert!(!self.verified.contains(&chunk), "verified, and pulled again");
                let end = chunk.range.end - self.geometry.shard_range(chunk.shard).start;
                assert!(self.seen.get(&(source, chunk.shard)) >= Some(&end), "pulled beyond the word");
                self.pulls.push((source, chunk));
                assert!(self.pulls.len() <= 2, "more than `depth` in flight");
            }
            Command::Abort { source } => assert!(self.pulls.iter().any(|(peer, _)| *peer == source)),
            Command::Detach { source } => {
                assert!(self.pulls.iter().all(|(peer, _)| *peer != source), "detached under a pull");
                self.attached.remove(&source);
            }
            Command::Publish { shard, bytes } => {
                let before = self.published.insert(shard, bytes).unwrap_or(0);
                assert!(bytes > before || bytes == 0, "a word that does not grow");
                let range = self.geometry.shard_range(shard);
                assert!(
                    self.geometry
                        .chunks(shard)
                        .filter(|chunk| chunk.range.end - range.start <= bytes)
                        .all(|chunk| self.verified.contains(&chunk))
                        || self.is_held(shard),
                    "published what is not verified"
                );
            }
            Command::Seek { lost, shard, from, .. } => {
                assert!(self.pulls.iter().all(|(peer, _)| *peer != lost), "sought before it was quiet");
                let start = self.geometry.shard_range(shard).start;
                let missing = self.geometry.chunks(shard).find(|chunk| {
                    !self.verified.contains(chunk) && !self.pulls.iter().any(|p| p.1 == *chunk)
                });
                assert_eq!(
                    missing.map(|chunk| chunk.range.start - start),
                    Some(from),
                    "resumes at the first gap"
                );
                self.seeks.push(lost);
            }
            Command::Complete => self.outcome = Some(Ok(())),
            Command::Fail { cause } => {
                assert!(self.pulls.is_empty(), "failed with pulls in flight");
                self.outcome = Some(Err(cause));
            }
        }
    }

    fn is_held(&self, shard: ShardId) -> bool {
        self.geometry.chunks(shard).all(|chunk| !self.verified.contains(&chunk))
    }

    /// One thing happens, drawn by `draw`.
    fn step(&mut self, draw: u32) {
        let choice = draw % 8;
        let pick = (draw / 8) as usize;
        let fault = self.faults_left > 0 && (draw >> 16).is_multiple_of(5);
        match choice {
            0 | 1 if !self.attaching.is_empty() => {
                let source = self.attaching.swap_remove(pick % self.attaching.len());
                if fault || !self.words.contains_key(&source) {
                    self.faults_left = self.faults_left.saturating_sub(1);
                    self.feed(lost(source));
                } else {
                    self.attached.insert(source);
                    self.feed(Event::Attached { source });
                }
            }
            2 | 3 if !self.pulls.is_empty() => {
                let (source, chunk) = self.pulls.swap_remove(pick % self.pulls.len());
                match (fault, (draw >> 24) % 3) {
                    (true, 0) => {
                        self.faults_left -= 1;
                        let blocks = vec![self.geometry.blocks_of(chunk.range).start];
                        self.feed(Event::Corrupt { source, chunk, blocks });
                    }
                    (true, _) => {
                        self.faults_left -= 1;
                        let cause = Error::new(Kind::Io, "test", "broken");
                        self.feed(Event::Failed { source, chunk, cause });
                    }
                    (false, _) => {
                        self.verified.insert(chunk);
                        self.feed(Event::Verified { source, chunk });
                    }
                }
            }
            4 => {
                let sources: Vec<_> = self.words.keys().copied().collect();
                if let Some(source) = sources.get(pick % sources.len().max(1)) {
                    if fault {
                        self.faults_left -= 1;
                        self.words.remove(source);
                        self.feed(lost(*source));
                    } else {
                        *self.words.entry(*source).or_default() += u64::from(draw >> 20);
                    }
                }
            }
            5 => self.answer_watch(),
            6 if !self.seeks.is_empty() => {
                let gone = self.seeks.swap_remove(pick % self.seeks.len());
                let to = PeerId(self.next_peer);
                self.next_peer += 1;
                self.words.insert(to, 0);
                self.feed(Event::Reassigned { lost: gone, source: Some(to) });
            }
            7 => {
                self.now += Duration::from_millis(300);
                if let Some((.., until)) = self.watch
                    && self.now >= until
                {
                    self.watch = None;
                    self.feed(Event::Tick);
                }
            }
            _ => {}
        }
    }

    fn answer_watch(&mut self) {
        if let Some((source, shard, at_least, _)) = self.watch
            && let Some(&bytes) = self.words.get(&source)
            && bytes >= at_least
        {
            self.watch = None;
            self.seen.insert((source, shard), bytes);
            self.feed(Event::Seen { source, shard, bytes });
        }
    }

    /// After the drawn part the world is kind: everything is answered, sources have everything.
    fn settle(&mut self) {
        self.faults_left = 0;
        for round in 0..100_000u32 {
            if self.outcome.is_some() {
                return;
            }
            for word in self.words.values_mut() {
                *word = u64::MAX / 2;
            }
            // Sources that died stay dead: time passes until the machine notices.
            self.step(round.wrapping_mul(8) + round % 8);
        }
        panic!("does not end: {:?}", self.machine);
    }
}

fn any_schedule() -> impl Strategy<Value = (Schedule, u32)> {
    prop_oneof![
        (1u32..5).prop_map(|clones| (Schedule::Chain { clones }, clones)),
        (1u32..5).prop_map(|clones| (Schedule::Star { clones }, 1)),
        (2u32..6).prop_map(|nodes| (Schedule::Ring { nodes }, 1)),
        (2u32..6).prop_map(|nodes| (Schedule::Staggered { nodes }, 0)),
        (2u32..6).prop_map(|nodes| (Schedule::WholeChunkRing { nodes }, 1)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn every_hostile_world_ends_complete(
        (schedule, rank) in any_schedule(), payload in 0u64..40_000,
        draws in prop::collection::vec(any::<u32>(), 0..400), faults in 0u32..20,
    ) {
        let mut world = World::new(schedule, rank, payload, 2, faults);
        world.feed(Event::Start);
        for draw in draws {
            if world.outcome.is_some() { break; }
            world.step(draw);
        }
        world.settle();
        prop_assert_eq!(world.outcome.clone(), Some(Ok(())));
        let held: BTreeSet<_> = schedule.holds(rank).into_iter().collect();
        for shard in (0..schedule.shards()).map(ShardId) {
            let whole = world.geometry.shard_range(shard).len();
            prop_assert_eq!(world.published.get(&shard).copied().unwrap_or(0), whole);
            if !held.contains(&shard) {
                prop_assert!(world.geometry.chunks(shard).all(|chunk| world.verified.contains(&chunk)));
            }
        }
    }

    #[test]
    fn a_cancelled_replica_fails_when_memory_is_quiet(
        (schedule, rank) in any_schedule(), draws in prop::collection::vec(any::<u32>(), 0..200),
    ) {
        let mut world = World::new(schedule, rank, 30_000, 2, 3);
        world.feed(Event::Start);
        for draw in draws {
            if world.outcome.is_some() { return Ok(()); }
            world.step(draw);
        }
        if world.outcome.is_some() { return Ok(()); }
        world.feed(Event::Cancel);
        while let Some((source, chunk)) = world.pulls.pop() {
            let cause = Error::new(Kind::Cancelled, "test", "cancelled");
            world.feed(Event::Failed { source, chunk, cause });
        }
        prop_assert_eq!(world.outcome.map(|o| o.map_err(|e| e.kind())), Some(Err(Kind::Cancelled)));
    }
}
