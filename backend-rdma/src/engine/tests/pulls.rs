//! Pulls that land, and what a READ that does not makes of one.

use super::*;

#[test]
fn a_pull_lands_whole_with_its_digests_and_leaves_nothing_behind() {
    let fake = Fake::new(&["seed", "a", "b"]);
    run(async {
        let world = World::new(&fake, config(&["a", "b"])).await.unwrap();
        let landed = world.pull().await.unwrap();
        world.expect_payload();
        let bytes: Vec<u8> = (0..PAYLOAD).map(byte).collect();
        let expected = bytes.chunks(BLOCK as usize).zip(0..).map(|(block, number)| {
            let range = ByteRange::new(number * BLOCK, (number * BLOCK + BLOCK).min(PAYLOAD));
            digest::merge(PAYLOAD, range, &[digest::piece(PAYLOAD, range.start, block)]).unwrap()
        });
        assert_eq!(landed.digests, expected.collect::<Vec<_>>());
        let counts = world.reader.counts();
        assert_eq!(counts.reads_posted, PAYLOAD.div_ceil(16 << 10));
        assert!(counts.reads_signalled < counts.reads_posted && counts.most_in_flight <= 16, "{counts:?}");
        assert_eq!(counts.completions, counts.reads_signalled);
        let seen = world.mover.observe(ShardId(0), PAYLOAD, Duration::ZERO).await.unwrap();
        assert_eq!((seen.progress, seen.generation), (PAYLOAD, Some(Generation::from_random(5))));
    });
    assert_eq!(fake.left(), [0; 4]);
}

#[test]
fn regions_are_split_where_a_device_registers_no_more_and_messages_fit_them() {
    let fake = Fake::new(&["seed", "a"]);
    fake.register_at_most(300 << 10);
    run(async {
        let world = World::new(&fake, config(&["a"])).await.unwrap();
        // A quarter MiB is the largest power of two; the control block is in the last.
        assert!(world.reader.counts().regions_registered >= PAYLOAD.div_ceil(256 << 10));
        world.pull().await.unwrap();
        world.expect_payload();
    });
    assert_eq!(fake.left(), [0; 4]);
}

#[test]
fn a_post_that_is_refused_half_way_goes_by_the_other_device() {
    let fake = Fake::new(&["seed", "a", "b"]);
    // The header's two READs, and some of the payload's.
    fake.refuse_posts("a", 2 + 5, 12);
    run(async {
        let world = World::new(&fake, config(&["a", "b"])).await.unwrap();
        world.pull().await.unwrap();
        world.expect_payload();
        assert_eq!(world.reader.counts().rails_lost, 1);
    });
    assert_eq!(fake.left(), [0; 4]);
}

#[test]
fn a_post_that_is_refused_with_no_other_device_names_device_port_verb_and_code() {
    let fake = Fake::new(&["seed", "a"]);
    fake.refuse_posts("a", 2 + 5, 12);
    run(async {
        let world = World::new(&fake, config(&["a"])).await.unwrap();
        let e = world.pull().await.unwrap_err();
        assert_eq!((e.op(), e.code(), e.kind()), ("ibv_post_send", Some(Code::Errno(12)), Kind::Exhausted));
        assert!(e.detail().contains("a port 1") && e.peer().is_some(), "{e}");
        world.expect_free();
        assert!(world.pull().await.is_err(), "the hop is gone");
    });
    assert_eq!(fake.left(), [0; 4]);
}

#[test]
fn every_status_of_a_read_is_its_own_error_and_frees_the_range() {
    for (status, kind) in [
        (Status::RETRY_EXCEEDED, Kind::SourceLost),
        (Status::REMOTE_ACCESS, Kind::SourceLost),
        (Status::REMOTE_OPERATION, Kind::SourceLost),
        (Status::LOCAL_PROTECTION, Kind::Io),
        (Status(19), Kind::Io),
    ] {
        let fake = Fake::new(&["seed", "a"]);
        fake.complete_with("a", 2 + 7, status);
        run(async {
            let world = World::new(&fake, config(&["a"])).await.unwrap();
            let e = world.pull().await.unwrap_err();
            assert_eq!((e.kind(), e.code()), (kind, Some(Code::Verbs(status.0))), "{e}");
            assert!(e.detail().contains("a port 1") && e.detail().contains(status.name()), "{e}");
            world.expect_free();
            let e = world.mover.observe(ShardId(0), 1, Duration::ZERO).await.unwrap_err();
            assert_eq!(e.kind(), kind);
        });
        assert_eq!(fake.left(), [0; 4], "{status}");
    }
}

#[test]
fn a_read_that_fails_on_one_device_is_read_again_over_the_other() {
    let fake = Fake::new(&["seed", "a", "b"]);
    fake.complete_with("a", 2 + 20, Status::RETRY_EXCEEDED);
    run(async {
        let world = World::new(&fake, config(&["a", "b"])).await.unwrap();
        world.pull().await.unwrap();
        world.expect_payload();
        let counts = world.reader.counts();
        assert!(counts.rails_lost == 1 && counts.reads_repeated >= 1, "{counts:?}");
        assert_eq!(counts.bytes_read, PAYLOAD, "each byte counts once");
    });
}

#[test]
fn a_port_that_goes_down_sends_its_share_over_the_other() {
    let fake = Fake::new(&["seed", "a", "b"]);
    run(async {
        let world = World::new(&fake, config(&["a", "b"])).await.unwrap();
        fake.stick("a");
        let mut pull = world.mover.start(Pull { range: WHOLE, hash: Some(BLOCK) }).unwrap();
        while world.reader.counts().reads_posted < 20 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        fake.tell("a", Event::PortDown(1));
        pull.quiesced().await.unwrap();
        world.expect_payload();
        assert_eq!(world.reader.counts().rails_lost, 1);
    });
}
