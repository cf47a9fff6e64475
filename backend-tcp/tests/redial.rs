//! Connections that end while both hosts live: what is read again, and when the hop ends after all.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, missing_docs)]

mod common;

use common::{
    MIB, SECOND, Source, expect_seed, import,
    relay::{Fate, Relay},
    seed,
};
use flashboot_backend_tcp::TcpConfig;
use flashboot_channel::{SecurityConfig, TlsPolicy};
use flashboot_core::{
    Arena as _, ByteRange, Code, Error, Generation, Kind, Landed, Locator, Pull, Result, ShardId,
};
use flashboot_memory::HostArena;
use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

const PAYLOAD: u64 = 8 * MIB + 17;
const BLOCK: u64 = MIB;
/// What is received and hashed at once: the most that a connection loses by its end.
const PIECE: u64 = 256 << 10;
/// Enough for a connection to attach, not for a piece.
const ATTACHED: u64 = 4 << 10;

/// Waits until it is so, however slow the machine is, but not for ever.
async fn until(what: &str, mut so: impl FnMut() -> bool) {
    let waiting = async {
        while !so() {
            tokio::time::sleep(SECOND / 100).await;
        }
    };
    tokio::time::timeout(10 * SECOND, waiting).await.expect(what);
}

async fn pulled(locator: &Locator, into: &Arc<HostArena>, config: TcpConfig) -> Result<Landed> {
    let mover = import(locator, into, config).await.unwrap();
    let whole = Pull { range: ByteRange::new(0, PAYLOAD), hash: Some(BLOCK) };
    let landed = mover.start(whole).unwrap().quiesced().await;
    assert!(into.is_free(ByteRange::new(0, PAYLOAD)), "whatever came of it");
    landed
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_that_ends_is_dialled_again_and_goes_on_where_it_was() {
    let arena = seed(PAYLOAD);
    let tls = SecurityConfig { tls: TlsPolicy::On, ..SecurityConfig::default() };
    for security in [SecurityConfig::default(), tls] {
        let config = TcpConfig { security, connections: 1, ..TcpConfig::default() };
        let source = Source::of(&arena, config.clone()).await;
        let expected = pulled(source.locator(), &common::arena(PAYLOAD), config.clone()).await.unwrap();
        // A reset takes back what has not arrived, maybe all of it: so one, and how much is read again is left open.
        let reset: fn(usize) -> Fate = |number| match number {
            1 => Fate::ResetAfter(MIB + MIB / 3),
            _ => Fate::Lasts,
        };
        // What is passed on before a close arrives: so one after the other may end, each late in a part.
        let closed: fn(usize) -> Fate = |number| match number {
            1 => Fate::ClosedAfter(2 * MIB - PIECE / 2),
            2 => Fate::ClosedAfter(MIB - PIECE / 2),
            _ => Fate::Lasts,
        };
        for (broken, ends, what) in [(reset, 1, "reset"), (closed, 2, "closed")] {
            let relay = Relay::new(source.locator(), broken).await;
            let into = common::arena(PAYLOAD);
            let landed = pulled(&relay.locator, &into, config.clone()).await.unwrap();
            assert_eq!(landed, expected, "{what}");
            expect_seed(&into);
            assert_eq!(
                relay.connections(),
                2 + ends,
                "the watch, one to read by, and one for each end: {what}"
            );
            if what == "closed" {
                // Headers and TLS take less than the rest; a part that was read again from its start, more.
                let bound = PAYLOAD + ends as u64 * PIECE + (64 << 10);
                let passed = relay.passed();
                assert!((PAYLOAD..bound).contains(&passed), "pieces that landed stay: {passed} of {bound}");
            }
        }
    }
}

/// Which of the two brings how much is theirs; either has to be dialled again before it has brought the whole.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_that_end_side_by_side_are_each_dialled_again() {
    let arena = seed(PAYLOAD);
    let config = TcpConfig { connections: 2, ..TcpConfig::default() };
    let source = Source::of(&arena, config.clone()).await;
    let expected = pulled(source.locator(), &common::arena(PAYLOAD), config.clone()).await.unwrap();
    for fate in [Fate::ResetAfter, Fate::ClosedAfter] {
        let broken = move |number| if let 1 | 2 = number { fate(MIB + MIB / 3) } else { Fate::Lasts };
        let relay = Relay::new(source.locator(), broken).await;
        let into = common::arena(PAYLOAD);
        assert_eq!(pulled(&relay.locator, &into, config.clone()).await.unwrap(), expected);
        expect_seed(&into);
        assert!(relay.connections() >= 4, "the watch, two to read by, and one more at least");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_that_ends_again_before_anything_landed_ends_its_hop() {
    let arena = seed(PAYLOAD);
    let config = TcpConfig { connections: 1, ..TcpConfig::default() };
    let source = Source::of(&arena, config.clone()).await;
    for first in [ATTACHED, 3 * MIB] {
        let fate = move |number| match number {
            0 => Fate::Lasts,
            1 => Fate::ResetAfter(first),
            _ => Fate::ResetAfter(ATTACHED),
        };
        let relay = Relay::new(source.locator(), fate).await;
        let into = common::arena(PAYLOAD);
        let lost = pulled(&relay.locator, &into, config.clone()).await.unwrap_err();
        assert_eq!(lost.kind(), Kind::SourceLost, "{lost}");
        assert_eq!(relay.connections(), 3, "once more, and no third time");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_source_that_is_gone_is_told_by_what_ended_its_connection() {
    let arena = seed(PAYLOAD);
    let config = TcpConfig { connections: 1, ..TcpConfig::default() };
    let source = Source::of(&arena, config.clone()).await;
    let fate = |number| if number == 1 { Fate::ResetAfter(MIB / 2) } else { Fate::Lasts };
    let relay = Relay::new(source.locator(), fate).await;
    let (into, locator) = (common::arena(PAYLOAD), relay.locator.clone());
    let mover = import(&locator, &into, config).await.unwrap();
    // Who is attached may go on; who comes anew is refused.
    drop(source.export);
    // One part: nothing is asked for later, which may be where an end shows.
    let pull = Pull { range: ByteRange::new(0, MIB), hash: Some(BLOCK) };
    let lost = mover.start(pull).unwrap().quiesced().await.unwrap_err();
    assert_eq!((lost.kind(), lost.op()), (Kind::SourceLost, "recv"), "{lost}");
    assert!(lost.detail().contains("; dialled again: attach: "), "and by what the second dial met: {lost}");
    assert_eq!(lost.code(), Some(Code::Errno(rustix::io::Errno::CONNRESET.raw_os_error())), "{lost}");
    assert_eq!(relay.connections(), 3);
    let again = mover.start(pull).map(drop).unwrap_err();
    assert_eq!(again.kind(), Kind::SourceLost);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pull_is_quiet_soon_after_it_is_cancelled_although_its_connection_is_being_dialled() {
    let arena = seed(PAYLOAD);
    let config = TcpConfig { connections: 1, ..TcpConfig::default() };
    let source = Source::of(&arena, config.clone()).await;
    let fate = |number| match number {
        0 => Fate::Lasts,
        1 => Fate::ResetAfter(MIB / 2),
        _ => Fate::Hangs,
    };
    let relay = Relay::new(source.locator(), fate).await;
    let into = common::arena(PAYLOAD);
    let mover = import(&relay.locator, &into, config).await.unwrap();
    // One part, which the connection has taken.
    let range = ByteRange::new(0, MIB);
    let mut under_way = mover.start(Pull { range, hash: None }).unwrap();
    until("it is dialled again", || relay.connections() == 3).await;
    assert!(!into.is_free(range), "its part stays owned");
    under_way.cancel();
    let quiet: Error = under_way.quiesced().await.unwrap_err();
    assert_eq!(
        quiet.kind(),
        Kind::Cancelled,
        "not only when the dial has failed, which would be the cause: {quiet}"
    );
    into.fill(range, 3).unwrap();
    let seen = mover.observe(ShardId(0), PAYLOAD, SECOND).await.unwrap();
    assert_eq!(seen.progress, PAYLOAD, "the watch is another connection");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_of_which_nothing_is_wanted_is_dialled_again_for_the_next_part_only() {
    let arena = seed(PAYLOAD);
    let config = TcpConfig { connections: 1, ..TcpConfig::default() };
    let source = Source::of(&arena, config.clone()).await;
    let fate = |number| if number == 1 { Fate::ClosedWhenTold(MIB / 2) } else { Fate::Lasts };
    let relay = Relay::new(source.locator(), fate).await;
    let into = common::arena(PAYLOAD);
    let mover = import(&relay.locator, &into, config).await.unwrap();
    let range = ByteRange::new(0, MIB);
    let mut unwanted = mover.start(Pull { range, hash: None }).unwrap();
    until("some of it comes", || relay.passed() > MIB / 4).await;
    unwanted.cancel();
    assert_eq!(unwanted.quiesced().await.unwrap_err().kind(), Kind::Cancelled);
    relay.close.notify_one();
    until("the reader has hung up", || relay.ended.load(Ordering::Acquire) == 1).await;
    // However long this takes, nothing is dialled.
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert_eq!(relay.connections(), 2);
    let whole = Pull { range: ByteRange::new(0, PAYLOAD), hash: Some(BLOCK) };
    mover.start(whole).unwrap().quiesced().await.unwrap();
    expect_seed(&into);
    assert_eq!(relay.connections(), 3);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_source_that_is_filled_anew_meanwhile_does_not_take_its_reader_back() {
    let arena = seed(PAYLOAD);
    let config = TcpConfig { connections: 1, ..TcpConfig::default() };
    let source = Source::of(&arena, config.clone()).await;
    let half = MIB / 2;
    let fate = move |number| if number == 1 { Fate::ClosedWhenTold(half) } else { Fate::Lasts };
    let relay = Relay::new(source.locator(), fate).await;
    let into = common::arena(PAYLOAD);
    into.fill(ByteRange::new(0, PAYLOAD), 3).unwrap();
    let mover = import(&relay.locator, &into, config).await.unwrap();
    let pull = Pull { range: ByteRange::new(0, PAYLOAD), hash: Some(BLOCK) };
    let mut under_way = mover.start(pull).unwrap();
    until("half a part comes", || relay.passed() >= half).await;
    let anew = Generation::from_random(u64::from_le_bytes(common::random()));
    arena.begin(anew);
    relay.close.notify_one();
    let lost = under_way.quiesced().await.unwrap_err();
    assert_eq!((lost.kind(), lost.op()), (Kind::SourceLost, "recv"), "{lost}");
    let (_, again) = lost.detail().split_once("; dialled again: ").unwrap();
    assert!(again.contains("generation"), "{lost}");
    assert_eq!(relay.connections(), 3);
    let mut found = vec![0; PAYLOAD as usize];
    into.copy_out(0, &mut found).unwrap();
    assert!(found[half as usize..].iter().all(|byte| *byte == 3), "nothing of the new filling lands");
    assert_eq!(mover.start(pull).map(drop).unwrap_err().kind(), Kind::SourceLost, "the hop has ended");
}
