//! The copy engine: bytes, hashes, cancelling, ownership.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, missing_docs)]

use flashboot_core::{Arena, ArenaSpec, ByteRange, Digests, Geometry, InFlight, Kind, Pull};
use flashboot_memory::{
    CopyEngine, CopyEngineConfig, Expected, HostArena, HostArenaConfig, ImportedArena, PageKind,
};
use proptest::prelude::*;
use std::{os::fd::AsFd, sync::Arc};

fn arena(payload: u64) -> Arc<HostArena> {
    let config = HostArenaConfig { pages: PageKind::Base, ..HostArenaConfig::default() };
    HostArena::create(ArenaSpec { payload, shards: 1 }, &config).unwrap().0
}

fn import(arena: &HostArena) -> Arc<ImportedArena> {
    let expected = Expected { payload: arena.payload(), capacity: arena.capacity(), shards: arena.shards() };
    Arc::new(ImportedArena::map(arena.as_fd().try_clone_to_owned().unwrap(), expected).unwrap())
}

fn data(len: u64) -> Vec<u8> {
    (0..len).map(|i| (i.wrapping_mul(2_654_435_761) >> 7) as u8).collect()
}

fn filled(bytes: &[u8]) -> Arc<HostArena> {
    let arena = arena(bytes.len() as u64);
    arena.copy_in(0, bytes).unwrap();
    arena
}

fn bytes(arena: &HostArena) -> Vec<u8> {
    let mut all = vec![0; arena.payload() as usize];
    arena.copy_out(0, &mut all).unwrap();
    all
}

fn engine(threads: usize) -> CopyEngine {
    CopyEngine::new(&CopyEngineConfig { threads: Some(threads) }).unwrap()
}

fn hash_equals(engine: &CopyEngine, payload: u64, block: u64) {
    let all = data(payload);
    let (source, sink) = (filled(&all), arena(payload));
    let pull = Pull { range: ByteRange::new(0, payload), hash: Some(block) };
    let landed = engine.pull(&import(&source), &sink, pull).unwrap().wait().unwrap();
    let geometry = Geometry::new(payload, block, block, 1).unwrap();
    assert_eq!(landed.digests, Digests::of(&geometry, &all).values(), "payload {payload} block {block}");
    assert_eq!(bytes(&sink), all);
}

#[test]
fn the_fused_hash_is_cores_hash_around_every_edge() {
    let engine = engine(2);
    let piece = 256u64 << 10;
    for block in [1024, 4096, piece / 2, piece, piece * 2, piece * 4] {
        for multiple in [0, 1, 2, 3] {
            for off in [-1024i64, -513, -1, 0, 1, 511, 1024] {
                if let Some(payload) = (block * multiple).checked_add_signed(off) {
                    hash_equals(&engine, payload, block);
                }
            }
        }
    }
    for payload in [1, 511, 512, (16 << 20) - 1, 16 << 20, (16 << 20) + 1] {
        hash_equals(&engine, payload, 16 << 20);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn any_blocks_of_any_payload_land_and_hash(
        payload in 0u64..3_000_000, power in 10u32..21, first in 0u64..20, count in 0u64..20, threads in 1usize..4,
    ) {
        let block = 1u64 << power;
        let geometry = Geometry::new(payload, block, block, 1).unwrap();
        let range = ByteRange::new(geometry.block_range(first).start, geometry.block_range(first + count).start);
        let all = data(payload);
        let (source, sink) = (filled(&all), arena(payload));
        let engine = engine(threads);
        let pull = Pull { range, hash: Some(block) };
        let landed = engine.pull(&import(&source), &sink, pull).unwrap().wait().unwrap();
        let blocks = geometry.blocks_of(range);
        let want = Digests::of(&geometry, &all);
        prop_assert_eq!(&landed.digests[..], &want.values()[blocks.start as usize..blocks.end as usize]);
        let found = bytes(&sink);
        let (start, end) = (range.start as usize, range.end as usize);
        prop_assert!(found[start..end] == all[start..end]);
        prop_assert!(found[..start].iter().chain(&found[end..]).all(|b| *b == 0), "bytes outside the range");
    }

    #[test]
    fn any_plain_range_lands(payload in 1u64..9_000_000, a: u64, b: u64) {
        let (a, b) = (a % (payload + 1), b % (payload + 1));
        let range = ByteRange::new(a.min(b), a.max(b));
        let all = data(payload);
        let (source, sink) = (filled(&all), arena(payload));
        let engine = engine(2);
        let landed = engine.pull(&import(&source), &sink, Pull { range, hash: None }).unwrap().wait().unwrap();
        prop_assert!(landed.digests.is_empty());
        let found = bytes(&sink);
        let (start, end) = (range.start as usize, range.end as usize);
        prop_assert!(found[start..end] == all[start..end]);
        prop_assert!(found[..start].iter().chain(&found[end..]).all(|b| *b == 0), "bytes outside the range");
    }
}

#[test]
fn pulls_that_cannot_be_are_refused() {
    let engine = engine(1);
    let (source, sink) = (arena(10_000), arena(10_000));
    let peer = import(&source);
    let pull = |range, hash| engine.pull(&peer, &sink, Pull { range, hash }).map(|job| job.wait());
    for (range, hash) in [
        (ByteRange::new(0, 10_001), None),
        (ByteRange::new(10_001, 10_001), None),
        (ByteRange::new(0, u64::MAX), Some(1024)),
        (ByteRange::new(1, 1024), Some(1024)),
        (ByteRange::new(0, 1000), Some(1024)),
        (ByteRange::new(0, 1024), Some(1000)),
        (ByteRange::new(0, 1024), Some(512)),
        (ByteRange::new(0, 1024), Some(0)),
    ] {
        assert_eq!(pull(range, hash).unwrap_err().kind(), Kind::Invalid, "{range} {hash:?}");
    }
    let empty = pull(ByteRange::new(10_000, 10_000), None).unwrap().unwrap();
    assert!(empty.digests.is_empty());
    let other = arena(9_999);
    let whole = Pull { range: ByteRange::new(0, 1), hash: None };
    assert_eq!(engine.pull(&peer, &other, whole).unwrap_err().kind(), Kind::Mismatch);
    assert_eq!(engine.pull(&peer, &source, whole).unwrap_err().kind(), Kind::Invalid, "onto itself");
    let owned = sink.own(ByteRange::new(500, 600)).unwrap();
    assert_eq!(engine.pull(&peer, &sink, whole).map(|j| j.wait()).unwrap().unwrap().digests, []);
    let overlapping = Pull { range: ByteRange::new(0, 1024), hash: None };
    assert_eq!(engine.pull(&peer, &sink, overlapping).unwrap_err().kind(), Kind::Busy);
    drop(owned);
}

/// Queues a long pull before the one asked for, so that the second is still whole when it is cancelled.
#[test]
fn a_cancelled_pull_leaves_the_range_free_and_quiet() {
    let engine = engine(1);
    let (long, sink) = (arena(256 << 20), arena(256 << 20));
    let (small, target) = (filled(&data(1 << 20)), arena(1 << 20));
    let ahead = engine
        .pull(&import(&long), &sink, Pull { range: ByteRange::new(0, 256 << 20), hash: Some(1 << 20) })
        .unwrap();
    let range = ByteRange::new(0, 1 << 20);
    let job = engine.pull(&import(&small), &target, Pull { range, hash: None }).unwrap();
    assert!(!target.is_free(range));
    job.cancel();
    assert_eq!(job.wait().unwrap_err().kind(), Kind::Cancelled);
    assert!(target.is_free(range));
    assert_eq!(job.wait().unwrap_err().kind(), Kind::Cancelled, "the same answer again");

    // One that is under way: whatever it answers, its range is free and nothing lands any more.
    ahead.cancel();
    let answer = ahead.wait();
    assert!(sink.is_free(ByteRange::new(0, 256 << 20)));
    assert!(answer.is_ok() || answer.unwrap_err().kind() == Kind::Cancelled);
    sink.fill(ByteRange::new(0, 256 << 20), 0xee).unwrap();
    std::thread::sleep(std::time::Duration::from_millis(20));
    assert!(bytes(&sink).iter().all(|b| *b == 0xee), "a byte landed after quiescence");
    assert!(bytes(&target).iter().all(|b| *b == 0));
}

#[test]
fn dropping_a_pull_cancels_it_and_its_range_comes_free() {
    let engine = engine(1);
    let (source, sink) = (arena(64 << 20), arena(64 << 20));
    let range = ByteRange::new(0, 64 << 20);
    drop(engine.pull(&import(&source), &sink, Pull { range, hash: Some(1 << 20) }).unwrap());
    while !sink.is_free(range) {
        std::thread::yield_now();
    }
    let again = engine.pull(&import(&source), &sink, Pull { range, hash: None }).unwrap();
    again.wait().unwrap();
}

#[test]
fn dropping_the_engine_cancels_what_it_has() {
    let engine = engine(1);
    let (source, sink) = (arena(64 << 20), arena(64 << 20));
    let peer = import(&source);
    let jobs: Vec<_> = (0..4u64)
        .map(|i| {
            let range = ByteRange::new(i * (16 << 20), (i + 1) * (16 << 20));
            engine.pull(&peer, &sink, Pull { range, hash: Some(16 << 20) }).unwrap()
        })
        .collect();
    drop(engine);
    for job in jobs {
        assert!(job.wait().map_or_else(|e| e.kind() == Kind::Cancelled, |_| true));
    }
    assert!(sink.is_free(ByteRange::new(0, 64 << 20)));
}

#[tokio::test(flavor = "current_thread")]
async fn several_pulls_complete_on_a_current_thread_runtime() {
    let engine = CopyEngine::shared().unwrap();
    let all = data(8 << 20);
    let (source, sink) = (filled(&all), arena(8 << 20));
    let peer = import(&source);
    let mut jobs: Vec<_> = (0..8u64)
        .map(|i| {
            let range = ByteRange::new(i << 20, (i + 1) << 20);
            engine.pull(&peer, &sink, Pull { range, hash: (i % 2 == 0).then_some(1 << 20) }).unwrap()
        })
        .collect();
    for (i, job) in jobs.iter_mut().enumerate() {
        let landed = job.quiesced().await.unwrap();
        assert_eq!(landed.digests.len(), (i + 1) % 2);
        assert_eq!(job.quiesced().await.unwrap(), landed, "the same answer again");
    }
    assert_eq!(bytes(&sink), all);
}
