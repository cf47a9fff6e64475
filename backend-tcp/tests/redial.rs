//! Connections that end while both hosts live: what is read again, and when the hop ends after all. A relay between reader
//! and source ends them.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, missing_docs)]

mod common;

use common::{MIB, SECOND, Source, expect_seed, import, seed};
use flashboot_backend_tcp::TcpConfig;
use flashboot_channel::{Endpoint, SecurityConfig, TlsPolicy};
use flashboot_core::{Arena as _, ByteRange, Error, Kind, Landed, Locator, Pull, Result, ShardId};
use flashboot_memory::HostArena;
use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::Instant,
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
};

const PAYLOAD: u64 = 8 * MIB + 17;
const BLOCK: u64 = MIB;
/// What the relay lets through of a connection that only attaches, and more: no payload.
const ATTACHED: u64 = 4 << 10;

/// What becomes of a connection, by its number: the first is the one by which words are watched.
#[derive(Debug, Clone, Copy)]
enum Fate {
    /// It lasts.
    Lasts,
    /// It is reset after so many bytes from the source.
    ResetAfter(u64),
    /// It is closed after so many.
    ClosedAfter(u64),
    /// It is taken, and nothing is passed on.
    Hangs,
}

/// Stands between a reader and its source.
struct Relay {
    locator: Locator,
    connections: Arc<AtomicUsize>,
    /// Bytes that came from the source.
    passed: Arc<AtomicU64>,
    _task: tokio::task::JoinHandle<()>,
}

impl Relay {
    async fn new(real: &Locator, fate: impl Fn(usize) -> Fate + Send + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let to: Endpoint = real.endpoint.parse().unwrap();
        let endpoint = real.endpoint.replacen(&format!(":{}", to.port), &format!(":{port}"), 1);
        let (connections, passed) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicU64::new(0)));
        let (number, counted) = (Arc::clone(&connections), Arc::clone(&passed));
        let task = tokio::spawn(async move {
            loop {
                let (near, _) = listener.accept().await.unwrap();
                let fate = fate(number.fetch_add(1, Ordering::AcqRel));
                let far = TcpStream::connect(("127.0.0.1", to.port)).await.unwrap();
                tokio::spawn(relayed(near, far, fate, Arc::clone(&counted)));
            }
        });
        Self { locator: Locator { endpoint, ..real.clone() }, connections, passed, _task: task }
    }

    fn connections(&self) -> usize {
        self.connections.load(Ordering::Acquire)
    }
}

async fn relayed(near: TcpStream, far: TcpStream, fate: Fate, passed: Arc<AtomicU64>) {
    let mut left = match fate {
        Fate::Hangs => return std::future::pending().await,
        Fate::Lasts => u64::MAX,
        Fate::ResetAfter(bytes) | Fate::ClosedAfter(bytes) => bytes,
    };
    if matches!(fate, Fate::ResetAfter(_)) {
        near.set_zero_linger().unwrap();
    }
    let (mut from_near, mut to_near) = near.into_split();
    let (mut from_far, mut to_far) = far.into_split();
    let up = async {
        let _ = tokio::io::copy(&mut from_near, &mut to_far).await;
    };
    let down = async {
        let mut bytes = vec![0; 64 << 10];
        while left > 0 {
            let Ok(came @ 1..) = from_far.read(&mut bytes).await else { return };
            let pass = left.min(came as u64);
            left -= pass;
            passed.fetch_add(pass, Ordering::AcqRel);
            if to_near.write_all(&bytes[..pass as usize]).await.is_err() {
                return;
            }
        }
        if let Fate::ClosedAfter(_) = fate {
            // Whatever has been passed on arrives, and the reader hangs up in its turn.
            let _ = to_near.shutdown().await;
            std::future::pending::<()>().await;
        }
    };
    tokio::select! {
        () = up => {}
        () = down => {}
    }
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
        let config = TcpConfig { security, connections: 2, ..TcpConfig::default() };
        let source = Source::of(&arena, config.clone()).await;
        let undisturbed = common::arena(PAYLOAD);
        let expected = pulled(source.locator(), &undisturbed, config.clone()).await.unwrap();
        // A reset takes back what has not arrived, maybe all of it; so one each.
        let reset: fn(usize) -> Fate = |number| match number {
            1 | 2 => Fate::ResetAfter(MIB + MIB / 3),
            _ => Fate::Lasts,
        };
        // Each of these has something land, so that one after the other may end.
        let closed: fn(usize) -> Fate = |number| match number {
            1 => Fate::ClosedAfter(MIB + MIB / 3),
            3 => Fate::ClosedAfter(MIB / 2),
            _ => Fate::Lasts,
        };
        for (broken, what) in [(reset, "reset"), (closed, "closed")] {
            let relay = Relay::new(source.locator(), broken).await;
            let into = common::arena(PAYLOAD);
            let landed = pulled(&relay.locator, &into, config.clone()).await.unwrap();
            assert_eq!(landed, expected, "{what}");
            expect_seed(&into);
            // The watch, two to read by, and one for each that was ended.
            assert_eq!(relay.connections(), 5, "{what}");
            let passed = relay.passed.load(Ordering::Acquire);
            let bounds = PAYLOAD..PAYLOAD + 3 * MIB;
            assert!(bounds.contains(&passed), "pieces that landed stay: {passed}");
        }
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
    let fate = |number| if number == 1 { Fate::ResetAfter(MIB) } else { Fate::Lasts };
    let relay = Relay::new(source.locator(), fate).await;
    let (into, locator) = (common::arena(PAYLOAD), relay.locator.clone());
    let mover = import(&locator, &into, config).await.unwrap();
    // Who is attached may go on; who comes anew is refused.
    drop(source.export);
    let pull = Pull { range: ByteRange::new(0, PAYLOAD), hash: Some(BLOCK) };
    let lost = mover.start(pull).unwrap().quiesced().await.unwrap_err();
    assert_eq!((lost.kind(), lost.op()), (Kind::SourceLost, "recv"), "{lost}");
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
        1 => Fate::ResetAfter(MIB),
        _ => Fate::Hangs,
    };
    let relay = Relay::new(source.locator(), fate).await;
    let into = common::arena(PAYLOAD);
    let mover = import(&relay.locator, &into, config).await.unwrap();
    let pull = Pull { range: ByteRange::new(0, PAYLOAD), hash: None };
    let mut under_way = mover.start(pull).unwrap();
    while relay.connections() < 3 {
        tokio::time::sleep(SECOND / 100).await;
    }
    assert!(!into.is_free(ByteRange::new(0, PAYLOAD)), "its parts stay owned");
    let began = Instant::now();
    under_way.cancel();
    let quiet: Error = under_way.quiesced().await.unwrap_err();
    assert_eq!(quiet.kind(), Kind::Cancelled, "{quiet}");
    assert!(began.elapsed() < 4 * SECOND, "not only when the dial has failed: {:?}", began.elapsed());
    into.fill(ByteRange::new(0, PAYLOAD), 3).unwrap();
    let seen = mover.observe(ShardId(0), PAYLOAD, SECOND).await.unwrap();
    assert_eq!(seen.progress, PAYLOAD, "the watch is another connection");
}
