//! The machine driven by hand: one history a test.

use super::world::{geometry, lost};
use crate::{
    BLOCK, ChunkRef, Error, Geometry, Kind, PeerId, ShardId,
    replica::{Assignment, Command, Event, Policy, Replica},
    schedule::Schedule,
};
use std::time::Duration;

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
    let gone = Error::new(Kind::SourceLost, "import", "no such socket").with_remedy("mount it");
    m.handle(T0, Event::Lost { source: SEED, cause: gone });
    let out = m.handle(T0, Event::Reassigned { lost: SEED, source: None });
    let [Command::Fail { cause }] = &out[..] else { panic!("{out:?}") };
    assert_eq!((cause.kind(), cause.peer()), (Kind::SourceLost, Some("#0")));
    assert_eq!(cause.remedy(), Some("mount it"), "what to do about the last source's loss is said, once");
    assert!(!cause.detail().contains("mount it"), "{cause}");
    assert_eq!(m.handle(T0, Event::Start), [], "nothing follows");
}

fn context_lost() -> Error {
    Error::new(Kind::ContextLost, "cuEventQuery", "CUDA_ERROR_ECC_UNCORRECTABLE").with_remedy("restart")
}

#[test]
fn a_lost_context_of_ones_own_ends_it_when_its_pulls_are_quiet_and_asks_nobody_else() {
    let (mut m, chunks) = chain_clone(3);
    m.handle(T0, Event::Start);
    m.handle(T0, Event::Attached { source: SEED });
    m.handle(T0, seen(SEED, 3 * 2048));
    let fails = |chunk, cause| Event::Failed { source: SEED, chunk, cause };
    let out = m.handle(T0, fails(chunks[0], context_lost()));
    assert_eq!(out, [Command::Abort { source: SEED }], "the other pull has not quiesced");
    let out = m.handle(T0, fails(chunks[1], Error::new(Kind::Cancelled, "pull", "cancelled")));
    assert_eq!(out, [Command::Detach { source: SEED }, Command::Fail { cause: context_lost() }]);
    assert_eq!(m.losses(), 0, "no source was lost");
}

#[test]
fn a_lost_context_shown_by_a_look_an_import_or_a_source_being_left_ends_it_too() {
    let lost = |source| Event::Lost { source, cause: context_lost() };
    let ends = |out: Vec<Command>| assert_eq!(out.last(), Some(&Command::Fail { cause: context_lost() }));
    let (mut m, _) = chain_clone(3);
    m.handle(T0, Event::Start);
    ends(m.handle(T0, lost(SEED)));

    let (mut m, _) = chain_clone(3);
    m.handle(T0, Event::Start);
    ends(m.handle(T0, Event::Broken { cause: context_lost() }));

    let (mut m, _) = chain_clone(3);
    m.handle(T0, Event::Start);
    m.handle(T0, Event::Attached { source: SEED });
    ends(m.handle(T0, lost(SEED)));

    let (mut m, chunks) = chain_clone(3);
    m.handle(T0, Event::Start);
    m.handle(T0, Event::Attached { source: SEED });
    m.handle(T0, seen(SEED, 2048));
    assert_eq!(m.handle(T0, super::world::lost(SEED)), [Command::Abort { source: SEED }]);
    ends(m.handle(T0, Event::Failed { source: SEED, chunk: chunks[0], cause: context_lost() }));
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
