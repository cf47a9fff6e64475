//! What goes wrong between a reader and a source, and what each does about it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, missing_docs)]

mod common;

use common::{MIB, SECOND, Source, attached, attaching, ends_over, expect_seed, import, seed};
use flashboot_backend_tcp::{
    TcpConfig, TcpTransport,
    wire::{ANSWER, Answer, Attach, Attached, Lane, Look, MAX_FRAME, MAX_READ, Read, Refusal, Request, Seen},
};
use flashboot_channel::{Channel, Listen, Listener, Purpose, Security, SecurityConfig, TlsPolicy};
use flashboot_core::{
    Arena as _, ByteRange, ByteSize, Error, Generation, Kind, Locator, MemoryKind, Pull, Readiness, ShardId,
    Transport as _, control,
};
use std::{
    future::Future,
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

const BLOCK: u64 = MIB;

fn pull(start: u64, end: u64) -> Pull {
    Pull { range: ByteRange::new(start, end), hash: Some(BLOCK) }
}

#[tokio::test]
async fn every_kind_of_endpoint_is_read_from() {
    let arena = seed(3 * MIB + 17);
    let tls = SecurityConfig { tls: TlsPolicy::On, ..SecurityConfig::default() };
    let configs = [
        TcpConfig { bind: "::1".parse().unwrap(), ..TcpConfig::default() },
        TcpConfig { advertise: Some("localhost".parse().unwrap()), ..TcpConfig::default() },
        TcpConfig { security: tls, ..TcpConfig::default() },
        TcpConfig { connections: 1, ..TcpConfig::default() },
        TcpConfig { zero_copy: Some(true), ..TcpConfig::default() },
        TcpConfig { zero_copy: Some(true), rate: Some(ByteSize(64 * MIB)), ..TcpConfig::default() },
    ];
    for config in configs {
        let source = Source::of(&arena, config.clone()).await;
        assert!(!source.locator().endpoint.contains(":0#") && !source.locator().endpoint.ends_with(":0"));
        let into = common::arena(3 * MIB + 17);
        let mover = import(source.locator(), &into, config).await.unwrap();
        let landed = mover.start(pull(0, 3 * MIB + 17)).unwrap().quiesced().await.unwrap();
        assert_eq!(landed.digests.len(), 4);
        expect_seed(&into);
    }
}

#[tokio::test]
async fn a_port_that_is_taken_is_passed_over() {
    let arena = seed(100);
    let first = Source::of(&arena, TcpConfig::default()).await;
    let taken: u16 = first.locator().endpoint.parse::<flashboot_channel::Endpoint>().unwrap().port;
    let only = TcpConfig { ports: taken..=taken, ..TcpConfig::default() };
    let refused = TcpTransport::default().open(only.clone()).await.unwrap_err();
    assert!(refused.remedy().unwrap().contains("other ports"), "{refused}");
    assert!(matches!(TcpTransport::new(only).probe().await, Readiness::Unavailable { .. }));
    let some = TcpConfig { ports: taken..=taken.saturating_add(50), ..TcpConfig::default() };
    let next = Source::of(&arena, some).await;
    assert_ne!(next.locator().endpoint, first.locator().endpoint);
}

#[tokio::test]
async fn numbers_that_cannot_work_are_refused_before_anything_is_opened() {
    for bad in [
        TcpConfig { connections: 0, ..TcpConfig::default() },
        TcpConfig { connections: 65, ..TcpConfig::default() },
        TcpConfig { rate: Some(ByteSize(0)), ..TcpConfig::default() },
        TcpConfig { silence: Duration::ZERO, ..TcpConfig::default() },
        TcpConfig { liveness: SECOND, ..TcpConfig::default() },
    ] {
        assert_eq!(TcpTransport::default().open(bad).await.unwrap_err().kind(), Kind::Invalid);
    }
    let open = TcpConfig { bind: "0.0.0.0".parse().unwrap(), ..TcpConfig::default() };
    assert_eq!(TcpTransport::default().open(open.clone()).await.unwrap_err().kind(), Kind::Permission);
    match TcpTransport::new(open).probe().await {
        Readiness::Unavailable { reason, remedy } => {
            assert!(reason.contains("neither a token nor a certificate"), "{reason}");
            assert!(remedy.contains("security.token_file"), "{remedy}");
        }
        Readiness::Ready => panic!("whoever comes could read"),
    }
}

#[tokio::test]
async fn a_reader_gets_payload_of_its_filling_and_nothing_else() {
    let payload = 2 * MIB + 5;
    let arena = seed(payload);
    let source = Source::of(&arena, TcpConfig::default()).await;
    let generation = source.locator().generation.word();
    let mut lane = attached(source.locator(), Lane::Read).await;
    let at_control = control::offset(payload).unwrap();
    for (read, refusal) in [
        (Read { generation, start: at_control, len: 64 }, Refusal::Malformed),
        (Read { generation, start: payload - 1, len: 2 }, Refusal::Malformed),
        (Read { generation, start: payload, len: 1 }, Refusal::Malformed),
        (Read { generation, start: u64::MAX, len: u32::MAX }, Refusal::Malformed),
        (Read { generation, start: 0, len: MAX_READ as u32 + 1 }, Refusal::Malformed),
        (Read { generation: generation ^ 1, start: 0, len: 1 }, Refusal::Stale),
    ] {
        lane.send(&Request::Read(read).encode(), MAX_FRAME, SECOND).await.unwrap();
        let mut head = [0; ANSWER];
        lane.read_exact(&mut head).await.unwrap();
        let answer = Answer::decode(&head, &read).unwrap();
        assert_eq!(answer.refused, Some(refusal), "{read:?}");
        lane.read_exact(&mut vec![0; answer.len as usize]).await.unwrap();
    }
    // The connection is in step, and the last byte may be had.
    let read = Read { generation, start: payload - 1, len: 1 };
    lane.send(&Request::Read(read).encode(), MAX_FRAME, SECOND).await.unwrap();
    let mut answer = [0; ANSWER + 1];
    lane.read_exact(&mut answer).await.unwrap();
    assert_eq!(answer[ANSWER], common::byte(payload - 1));
    arena.retire();
    lane.send(&Request::Read(read).encode(), MAX_FRAME, SECOND).await.unwrap();
    let mut head = [0; ANSWER];
    lane.read_exact(&mut head).await.unwrap();
    assert_eq!(Answer::decode(&head, &read).unwrap().refused, Some(Refusal::Stale));
}

#[tokio::test]
async fn a_source_survives_whatever_readers_send() {
    let arena = seed(MIB);
    let source = Source::of(&arena, TcpConfig { max_connections: 16, ..TcpConfig::default() }).await;
    let locator = source.locator();
    let generation = locator.generation.word();
    let look = Request::Look(Look { id: 1, shard: 0, at_least: 0, wait_ms: 0 }).encode();
    let read = Request::Read(Read { generation, start: 0, len: 1 }).encode();
    for garbage in [&[][..], &[9; 24], &look[..23], &read[..23], &[0; MAX_FRAME + 1], &vec![0; 1 << 19]] {
        assert!(ends_over(locator, Lane::Watch, garbage).await, "{garbage:?}");
        assert!(ends_over(locator, Lane::Read, garbage).await, "{garbage:?}");
    }
    assert!(ends_over(locator, Lane::Watch, &read).await, "each lane has its own requests");
    assert!(ends_over(locator, Lane::Read, &look).await);
    // Half a frame and a hang-up, and a read whose answer nobody takes.
    for bytes in [&[24, 0][..], &[24, 0, 0, 0, 3, 0]] {
        attached(locator, Lane::Read).await.write_all(bytes).await.unwrap();
    }
    drop(attached(locator, Lane::Read).await.send(&read, MAX_FRAME, SECOND).await);
    let (_, unknown) = attaching(locator, Attach { lane: Lane::Read, generation: generation ^ 1 }).await;
    assert_eq!(unknown.refused.unwrap().0, Refusal::NotExported);

    // More looks than may wait.
    let mut greedy = attached(locator, Lane::Watch).await;
    let never = Request::Look(Look { id: 1, shard: 0, at_least: u64::MAX, wait_ms: 60_000 }).encode();
    for _ in 0..100 {
        if greedy.send(&never, MAX_FRAME, SECOND).await.is_err() {
            break;
        }
    }
    assert!(matches!(greedy.receive(MAX_FRAME, 5 * SECOND).await, Ok(None) | Err(_)));

    // As many readers as may be, and one more.
    let mut all = Vec::new();
    let full = loop {
        let (channel, answer) = attaching(locator, Attach { lane: Lane::Watch, generation }).await;
        match answer.refused {
            None => all.push(channel),
            Some((refusal, _)) => break refusal,
        }
        assert!(all.len() <= 16);
    };
    assert_eq!(full, Refusal::Full);
    drop(all);
    // And then somebody who wants what is there.
    let into = common::arena(MIB);
    let mover = loop {
        match import(locator, &into, TcpConfig::default()).await {
            Ok(mover) => break mover,
            Err(e) => assert_eq!(e.kind(), Kind::SourceLost, "{e}"),
        }
    };
    mover.start(pull(0, MIB)).unwrap().quiesced().await.unwrap();
    expect_seed(&into);
}

#[tokio::test]
async fn a_source_sends_no_faster_than_its_rate_to_all_readers_together() {
    let arena = seed(4 * MIB);
    let rate = Some(ByteSize(8 * MIB));
    let source = Source::of(&arena, TcpConfig { rate, ..TcpConfig::default() }).await;
    let began = Instant::now();
    let (one, two) = (common::arena(4 * MIB), common::arena(4 * MIB));
    let whole = async |into| {
        let mover = import(source.locator(), into, TcpConfig::default()).await.unwrap();
        mover.start(pull(0, 4 * MIB)).unwrap().quiesced().await.unwrap();
        expect_seed(into);
    };
    tokio::join!(whole(&one), whole(&two));
    // 8 MiB at 8 MiB/s; a burst is 20 ms, and the last slices need not be waited for.
    assert!(began.elapsed() > 8 * SECOND / 10, "{:?}", began.elapsed());
    assert!(began.elapsed() < 20 * SECOND, "{:?}", began.elapsed());
}

#[tokio::test]
async fn dropping_the_endpoint_takes_access_back_from_attached_readers() {
    let arena = seed(4 * MIB);
    let source = Source::of(&arena, TcpConfig { rate: Some(ByteSize(MIB)), ..TcpConfig::default() }).await;
    let into = common::arena(4 * MIB);
    let mover = import(source.locator(), &into, TcpConfig::default()).await.unwrap();
    let mut under_way = mover.start(pull(0, 4 * MIB)).unwrap();
    drop(source);
    let began = Instant::now();
    assert_eq!(under_way.quiesced().await.unwrap_err().kind(), Kind::SourceLost);
    let lost = mover.observe(ShardId(0), u64::MAX, 20 * SECOND).await.unwrap_err();
    assert_eq!(lost.kind(), Kind::SourceLost, "{lost}");
    assert_eq!(mover.start(pull(0, MIB)).map(drop).unwrap_err().kind(), Kind::SourceLost);
    assert!(began.elapsed() < 15 * SECOND, "before the look was over");
    assert_eq!(still_held(&arena).await, 0, "the owner has its memory for itself");
}

/// How many others hold the arena, once connections have had the time to end.
async fn still_held<T>(arena: &Arc<T>) -> usize {
    for _ in 0..200 {
        if Arc::strong_count(arena) == 1 {
            return 0;
        }
        tokio::time::sleep(SECOND / 100).await;
    }
    Arc::strong_count(arena) - 1
}

/// A source that plays by its own rules: `play` is given every connection after it was attached.
async fn fake<F, Fut>(payload: u64, play: F) -> Locator
where
    F: Fn(Lane, Channel) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = ()> + Send + 'static,
{
    let model = common::arena(payload);
    let how = Listen::new(Purpose::new("tcp").unwrap());
    let mut listener =
        Listener::bind("127.0.0.1:0".parse().unwrap(), &Security::default(), how).await.unwrap();
    let locator = Locator {
        transport: flashboot_core::TransportName::Tcp,
        generation: Generation::from_random(77),
        payload,
        capacity: model.capacity(),
        shards: 1,
        location: model.location(),
        endpoint: listener.endpoint(None).unwrap().to_string(),
    };
    let attached = Attached {
        refused: None,
        memory: MemoryKind::Host,
        shards: 1,
        payload,
        capacity: model.capacity(),
        generation: 77,
    };
    let play = Arc::new(play);
    tokio::spawn(async move {
        loop {
            let mut channel = listener.accept().await.unwrap();
            let (attached, play) = (attached.clone(), Arc::clone(&play));
            tokio::spawn(async move {
                let frame = channel.receive(MAX_FRAME, SECOND).await.unwrap().unwrap();
                let lane = Attach::decode(&frame).unwrap().lane;
                channel.send(&attached.encode(), MAX_FRAME, SECOND).await.unwrap();
                play(lane, channel).await;
            });
        }
    });
    locator
}

async fn asked(channel: &mut Channel) -> Read {
    let frame = channel.receive(MAX_FRAME, 20 * SECOND).await.unwrap().unwrap();
    match Request::decode(&frame).unwrap() {
        Request::Read(read) => read,
        Request::Look(look) => panic!("{look:?}"),
    }
}

/// What a pull of 4 MiB from such a source ends in; nothing is owned after it.
async fn pulled(locator: &Locator) -> Error {
    let into = common::arena(4 * MIB);
    let config = TcpConfig { silence: SECOND, ..TcpConfig::default() };
    let mover = import(locator, &into, config).await.unwrap();
    let began = Instant::now();
    let lost = mover.start(pull(0, 4 * MIB)).unwrap().quiesced().await.unwrap_err();
    assert!(
        began.elapsed() < TcpConfig::default().silence,
        "within this one's silence, and something: {lost}"
    );
    assert!(lost.peer().is_some_and(|peer| peer.starts_with("127.0.0.1:")), "{lost}");
    assert!(into.is_free(ByteRange::new(0, 4 * MIB)));
    lost
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_source_that_stops_or_breaks_off_in_mid_range_is_a_typed_loss() {
    // Half of what was asked for, and then nothing, or nothing ever again.
    let silent = fake(4 * MIB, |_, mut channel| async move {
        let read = asked(&mut channel).await;
        channel.write_all(&Answer::granted(&read).encode()).await.unwrap();
        channel.write_all(&vec![7; read.len as usize / 2]).await.unwrap();
        channel.flush().await.unwrap();
        std::future::pending::<()>().await;
    });
    let lost = pulled(&silent.await).await;
    assert_eq!((lost.kind(), lost.op()), (Kind::Stalled, "recv"), "{lost}");

    let broken = fake(4 * MIB, |_, mut channel| async move {
        let read = asked(&mut channel).await;
        channel.write_all(&Answer::granted(&read).encode()).await.unwrap();
        channel.write_all(&vec![7; read.len as usize / 2]).await.unwrap();
        channel.shutdown().await.unwrap();
    });
    let lost = pulled(&broken.await).await;
    assert_eq!(lost.kind(), Kind::SourceLost, "{lost}");

    let mute = fake(4 * MIB, |_, channel| async move {
        let _channel = channel;
        std::future::pending::<()>().await;
    });
    let lost = pulled(&mute.await).await;
    assert_eq!(lost.kind(), Kind::Stalled, "{lost}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_source_that_answers_something_else_is_a_protocol_error() {
    type Bend = fn(Read) -> Vec<u8>;
    let bends: [Bend; 5] = [
        |read| Answer { refused: None, len: read.len - 1, start: read.start }.encode().to_vec(),
        |read| Answer { refused: None, len: read.len, start: read.start + 1 }.encode().to_vec(),
        |read| Answer { refused: Some(Refusal::Stale), len: 201, start: read.start }.encode().to_vec(),
        |_| vec![0xff; ANSWER],
        |_| b"HTTP/1.1 200 OK\r\n\r\n".to_vec(),
    ];
    for bend in bends {
        let locator = fake(4 * MIB, move |_, mut channel| async move {
            let read = asked(&mut channel).await;
            channel.write_all(&bend(read)).await.unwrap();
            channel.flush().await.unwrap();
            std::future::pending::<()>().await;
        });
        let lost = pulled(&locator.await).await;
        assert_eq!(lost.kind(), Kind::Protocol, "{lost}");
    }
    let refuses = fake(4 * MIB, |_, mut channel| async move {
        let read = asked(&mut channel).await;
        channel.write_all(&Answer::refusal(&read, Refusal::Stale, "another\nfilling")).await.unwrap();
        channel.flush().await.unwrap();
        std::future::pending::<()>().await;
    });
    let lost = pulled(&refuses.await).await;
    assert_eq!(lost.kind(), Kind::StaleGeneration, "{lost}");
    assert!(lost.detail().ends_with("anotherfilling"), "no control characters: {lost}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_look_that_is_answered_badly_or_not_at_all_ends_in_time() {
    for (bytes, kind) in
        [(&b"\x03\0\0\0abc"[..], Kind::Protocol), (b"\xff\xff\xff\xff", Kind::Protocol), (b"", Kind::Stalled)]
    {
        let locator = fake(MIB, move |_, mut channel| async move {
            channel.write_all(bytes).await.unwrap();
            channel.flush().await.unwrap();
            std::future::pending::<()>().await;
        });
        let mover = import(&locator.await, &common::arena(MIB), TcpConfig::default()).await.unwrap();
        let began = Instant::now();
        let lost = mover.observe(ShardId(0), 1, SECOND / 10).await.unwrap_err();
        assert_eq!(lost.kind(), kind, "{lost}");
        assert!(began.elapsed() < 15 * SECOND);
    }
    // An answer to a question that nobody asked is passed over.
    let locator = fake(MIB, |_, mut channel| async move {
        // The one that comes with the attaching, and the one that is asked for.
        for _ in 0..2 {
            let frame = channel.receive(MAX_FRAME, 20 * SECOND).await.unwrap().unwrap();
            let Ok(Request::Look(look)) = Request::decode(&frame) else { panic!("a look") };
            for id in [look.id.wrapping_add(9), look.id] {
                let seen = Seen { id, generation: 77, progress: u64::from(id) };
                channel.send(&seen.encode(), MAX_FRAME, SECOND).await.unwrap();
            }
        }
        std::future::pending::<()>().await;
    });
    let mover = import(&locator.await, &common::arena(MIB), TcpConfig::default()).await.unwrap();
    assert_eq!(mover.observe(ShardId(0), 1, SECOND).await.unwrap().progress, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pull_of_a_source_that_sends_nothing_is_quiet_soon_after_it_is_cancelled() {
    let locator = fake(4 * MIB, |_, mut channel| async move {
        let read = asked(&mut channel).await;
        channel.write_all(&Answer::granted(&read).encode()).await.unwrap();
        channel.write_all(&[7; 1000]).await.unwrap();
        channel.flush().await.unwrap();
        std::future::pending::<()>().await;
    });
    let into = common::arena(4 * MIB);
    let mover = import(&locator.await, &into, TcpConfig::default()).await.unwrap();
    let mut under_way = mover.start(pull(0, 4 * MIB)).unwrap();
    tokio::time::sleep(SECOND / 20).await;
    let began = Instant::now();
    under_way.cancel();
    assert_eq!(under_way.quiesced().await.unwrap_err().kind(), Kind::Cancelled);
    // Its source may be silent for twice as long.
    assert!(began.elapsed() < TcpConfig::default().silence / 2, "{:?}", began.elapsed());
    into.fill(ByteRange::new(0, 4 * MIB), 3).unwrap();
}

#[tokio::test]
async fn locators_that_cannot_be_followed_are_refused() {
    let arena = seed(MIB);
    let source = Source::of(&arena, TcpConfig::default()).await;
    let into = common::arena(MIB);
    for (endpoint, kind) in
        [("", Kind::Invalid), ("/run/x.sock", Kind::Invalid), ("127.0.0.1:1", Kind::SourceLost)]
    {
        let locator = Locator { endpoint: endpoint.into(), ..source.locator().clone() };
        let refused = import(&locator, &into, TcpConfig::default()).await.unwrap_err();
        assert_eq!(refused.kind(), kind, "{refused}");
    }
}
