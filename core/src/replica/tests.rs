//! The machine against a hostile world: answers in any order, late, and with every kind of loss.

use super::*;
use crate::{BLOCK, ChunkRef, Error, Geometry, Kind, PeerId, ShardId, schedule::Schedule};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

fn geometry(payload: u64, shards: u32) -> Geometry {
    Geometry::new(payload, 1024, 2048, shards).unwrap()
}

fn lost(source: PeerId) -> Event {
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

/// Drives a chain clone of `chunks` chunks by hand.
fn chain_clone(chunks: u64) -> (Replica, Vec<ChunkRef>) {
    let geometry = geometry(chunks * 2048, 1);
    let machine = Replica::new(Assignment::of(Schedule::Chain { clones: 1 }, 1, geometry), Policy::default());
    (machine, geometry.chunks(ShardId(0)).collect())
}

const SEED: PeerId = PeerId(0);
const OTHER: PeerId = PeerId(9);
const T0: Duration = Duration::ZERO;

fn seen(source: PeerId, bytes: u64) -> Event {
    Event::Seen { source, shard: ShardId(0), bytes }
}

#[test]
fn chain_resumes_at_chunk_k_when_source_dies() {
    let (mut m, chunks) = chain_clone(5);
    assert_eq!(m.handle(T0, Event::Start), [Command::Attach { source: SEED }]);
    m.handle(T0, Event::Attached { source: SEED });
    m.handle(T0, seen(SEED, 3 * 2048));
    let out = m.handle(T0, Event::Verified { source: SEED, chunk: chunks[0] });
    assert_eq!(out[0], Command::Publish { shard: ShardId(0), bytes: 2048 });
    let gone = m.handle(T0, lost(SEED));
    assert_eq!(
        gone,
        [Command::Abort { source: SEED }],
        "two pulls in flight: nothing else until they are quiet"
    );
    // One of the two made it, the other did not.
    assert_eq!(
        m.handle(T0, Event::Verified { source: SEED, chunk: chunks[1] }),
        [Command::Publish { shard: ShardId(0), bytes: 4096 }]
    );
    let cause = Error::new(Kind::Cancelled, "pull", "cancelled");
    let out = m.handle(T0, Event::Failed { source: SEED, chunk: chunks[2], cause });
    assert!(matches!(
        out[..],
        [Command::Detach { source: SEED }, Command::Seek { lost: SEED, from: 4096, .. }]
    ));
    let out = m.handle(T0, Event::Reassigned { lost: SEED, source: Some(OTHER) });
    assert_eq!(out, [Command::Attach { source: OTHER }]);
    m.handle(T0, Event::Attached { source: OTHER });
    let out = m.handle(T0, seen(OTHER, 5 * 2048));
    assert_eq!(
        out,
        [
            Command::Pull { source: OTHER, chunk: chunks[2] },
            Command::Pull { source: OTHER, chunk: chunks[3] }
        ],
        "chunks 0 and 1 are not pulled again"
    );
}

#[test]
fn a_source_that_stands_still_is_given_up_after_the_stall_time() {
    let (mut m, _) = chain_clone(2);
    m.handle(T0, Event::Start);
    let out = m.handle(T0, Event::Attached { source: SEED });
    let until = Policy::default().stall;
    assert_eq!(out, [Command::Watch { source: SEED, shard: ShardId(0), at_least: 2048, until }]);
    assert_eq!(m.handle(until - Duration::from_nanos(1), Event::Tick), []);
    let out = m.handle(until, Event::Tick);
    let Some(Command::Seek { cause, .. }) = out.last() else { panic!("{out:?}") };
    assert_eq!(cause.kind(), Kind::Stalled);
}

#[test]
fn a_corrupt_chunk_is_pulled_again_and_counted_and_then_elsewhere() {
    let (mut m, chunks) = chain_clone(1);
    let bad = |source| Event::Corrupt { source, chunk: chunks[0], blocks: vec![1] };
    m.handle(T0, Event::Start);
    m.handle(T0, Event::Attached { source: SEED });
    m.handle(T0, seen(SEED, 2048));
    let again = [Command::Pull { source: SEED, chunk: chunks[0] }];
    assert_eq!(m.handle(T0, bad(SEED)), again);
    assert_eq!(m.handle(T0, bad(SEED)), again);
    let out = m.handle(T0, bad(SEED));
    assert!(matches!(&out[1], Command::Seek { cause, .. } if cause.kind() == Kind::Corrupt), "{out:?}");
    m.handle(T0, Event::Reassigned { lost: SEED, source: Some(OTHER) });
    m.handle(T0, Event::Attached { source: OTHER });
    m.handle(T0, seen(OTHER, 2048));
    assert_eq!(m.repaired(), 0, "not before it verifies");
    let out = m.handle(T0, Event::Verified { source: OTHER, chunk: chunks[0] });
    assert_eq!(out.last(), Some(&Command::Complete));
    assert_eq!((m.repaired(), m.losses()), (1, 1));
}

#[test]
fn with_no_other_holder_it_fails_naming_the_source() {
    let (mut m, _) = chain_clone(1);
    m.handle(T0, Event::Start);
    m.handle(T0, lost(SEED));
    let out = m.handle(T0, Event::Reassigned { lost: SEED, source: None });
    let [Command::Fail { cause }] = &out[..] else { panic!("{out:?}") };
    assert_eq!((cause.kind(), cause.peer()), (Kind::SourceLost, Some("#0")));
    assert_eq!(m.handle(T0, Event::Start), [], "nothing follows");
}

#[test]
fn losing_sources_for_ever_is_bounded() {
    let (mut m, _) = chain_clone(1);
    m.handle(T0, Event::Start);
    let mut at = SEED;
    for n in 0..100 {
        let out = m.handle(T0, lost(at));
        if let Some(Command::Fail { cause }) = out.last() {
            assert_eq!(cause.kind(), Kind::SourceLost);
            assert_eq!(n, Policy::default().max_losses);
            return;
        }
        let next = PeerId(u64::from(n) + 100);
        m.handle(T0, Event::Reassigned { lost: at, source: Some(next) });
        at = next;
    }
    panic!("never gave up");
}

#[test]
fn an_empty_image_is_complete_at_once() {
    let geometry = Geometry::new(0, BLOCK, BLOCK, 1).unwrap();
    let mut m = Replica::new(Assignment::of(Schedule::Star { clones: 1 }, 1, geometry), Policy::default());
    assert_eq!(m.handle(T0, Event::Start).last(), Some(&Command::Complete));
}

#[test]
fn a_source_read_to_the_end_is_let_go() {
    let geometry = geometry(3 * 2048, 3);
    let assignment = Assignment::of(Schedule::Staggered { nodes: 3 }, 0, geometry);
    let mut m = Replica::new(assignment, Policy::default());
    m.handle(T0, Event::Start);
    for source in [PeerId(1), PeerId(2)] {
        m.handle(T0, Event::Attached { source });
    }
    let chunk = geometry.chunk_at(ShardId(2), 0).unwrap();
    m.handle(T0, Event::Seen { source: PeerId(2), shard: ShardId(2), bytes: 2048 });
    let out = m.handle(T0, Event::Verified { source: PeerId(2), chunk });
    assert!(out.contains(&Command::Detach { source: PeerId(2) }), "{out:?}");
}

#[test]
fn a_source_that_came_back_is_asked_again_what_it_has() {
    let (mut m, _) = chain_clone(3);
    m.handle(T0, Event::Start);
    m.handle(T0, Event::Attached { source: SEED });
    m.handle(T0, lost(SEED));
    m.handle(T0, Event::Reassigned { lost: SEED, source: Some(SEED) });
    m.handle(T0, lost(SEED));
    m.handle(T0, Event::Reassigned { lost: SEED, source: Some(OTHER) });
    m.handle(T0, Event::Attached { source: OTHER });
    assert_eq!(
        m.handle(T0, seen(OTHER, 2048)).len(),
        2,
        "one chunk is there: a pull, and a watch for the next"
    );
    let cause = Error::new(Kind::Cancelled, "pull", "cancelled");
    let chunk = geometry(3 * 2048, 1).chunk_at(ShardId(0), 0).unwrap();
    m.handle(T0, lost(OTHER));
    m.handle(T0, Event::Failed { source: OTHER, chunk, cause });
    m.handle(T0, Event::Reassigned { lost: OTHER, source: Some(OTHER) });
    let out = m.handle(T0, Event::Attached { source: OTHER });
    assert!(
        matches!(out[..], [Command::Watch { at_least: 2048, .. }]),
        "what it had before counts no more: {out:?}"
    );
}

#[test]
fn an_answer_of_another_source_is_no_answer() {
    let (mut m, chunks) = chain_clone(1);
    m.handle(T0, Event::Start);
    m.handle(T0, Event::Attached { source: SEED });
    m.handle(T0, seen(SEED, 2048));
    assert_eq!(m.handle(T0, Event::Verified { source: OTHER, chunk: chunks[0] }), []);
    let out = m.handle(T0, Event::Verified { source: SEED, chunk: chunks[0] });
    assert_eq!(out.last(), Some(&Command::Complete));
    assert_eq!(m.handle(T0, Event::Verified { source: SEED, chunk: chunks[0] }), [], "nor is a second one");
}

#[test]
fn store_and_forward_waits_for_the_whole_shard() {
    let geometry = geometry(2 * 3 * 2048, 2);
    let waits_for = |schedule| {
        let mut m = Replica::new(Assignment::of(schedule, 1, geometry), Policy::default());
        m.handle(T0, Event::Start);
        match m.handle(T0, Event::Attached { source: SEED })[..] {
            [Command::Watch { at_least, .. }] => at_least,
            ref out => panic!("{out:?}"),
        }
    };
    assert_eq!(waits_for(Schedule::WholeChunkRing { nodes: 2 }), 3 * 2048);
    assert_eq!(waits_for(Schedule::Ring { nodes: 2 }), 2048);
}
