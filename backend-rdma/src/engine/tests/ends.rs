//! What ends a pull or a look on a device that does not end it by itself, and who owns the memory until then.

use super::*;

#[test]
fn a_completion_queue_that_overran_ends_its_hops_and_says_so() {
    let fake = Fake::new(&["seed", "a"]);
    run(async {
        let world = World::new(&fake, config(&["a"])).await.unwrap();
        fake.stick("a");
        let mut pull = world.mover.start(Pull { range: WHOLE, hash: None }).unwrap();
        while world.reader.counts().reads_posted == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        fake.tell("a", Event::QueueLost);
        let e = pull.quiesced().await.unwrap_err();
        assert!(e.detail().contains("a port 1") && e.detail().contains("overran"), "{e}");
        world.expect_free();
    });
    assert_eq!(fake.left(), [0; 4]);
}

#[test]
fn a_pull_that_will_not_stop_has_its_queue_pair_ended_and_is_quiet_then() {
    let fake = Fake::new(&["seed", "a"]);
    run(async {
        let grace = Duration::from_millis(50);
        let world = World::new(&fake, RdmaConfig { cancel_grace: grace, ..config(&["a"]) }).await.unwrap();
        fake.stick("a");
        let mut pull = world.mover.start(Pull { range: WHOLE, hash: None }).unwrap();
        while world.reader.counts().reads_posted == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let busy = world.into.fill(WHOLE, 1).unwrap_err();
        assert_eq!(busy.kind(), Kind::Busy);
        pull.cancel();
        assert_eq!(pull.quiesced().await.unwrap_err().kind(), Kind::Cancelled);
        world.expect_free();
        assert_eq!(world.reader.counts().pairs_ended_by_cancel, 1);
    });
    assert_eq!(fake.left(), [0; 4]);
}

/// A pull so small that all of it is posted at once.
async fn all_posted(world: &World) -> Box<dyn InFlight> {
    let range = ByteRange::new(0, 4 * BLOCK);
    let pull = world.mover.start(Pull { range, hash: None }).unwrap();
    while world.reader.counts().reads_posted < 16 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    pull
}

#[test]
fn a_cancelled_pull_whose_last_reads_never_landed_is_not_whole() {
    let fake = Fake::new(&["seed", "a"]);
    run(async {
        let grace = Duration::from_millis(50);
        let world = World::new(&fake, RdmaConfig { cancel_grace: grace, ..config(&["a"]) }).await.unwrap();
        fake.stick("a");
        let mut pull = all_posted(&world).await;
        pull.cancel();
        assert_eq!(pull.quiesced().await.unwrap_err().kind(), Kind::Cancelled);
        world.expect_free();
    });
    assert_eq!(fake.left(), [0; 4]);
}

#[test]
fn a_queue_pair_that_gives_nothing_back_is_destroyed_and_its_pull_is_quiet_then() {
    let fake = Fake::new(&["seed", "a"]);
    run(async {
        let (cancel_grace, drain) = (Duration::from_millis(50), Duration::from_millis(100));
        let world = World::new(&fake, RdmaConfig { cancel_grace, drain, ..config(&["a"]) }).await.unwrap();
        fake.kill("a");
        let mut pull = all_posted(&world).await;
        pull.cancel();
        let began = Instant::now();
        let quiet = tokio::time::timeout(SETUP, pull.quiesced()).await.expect("in bounded time");
        assert_eq!(quiet.unwrap_err().kind(), Kind::Cancelled);
        assert!(began.elapsed() >= drain, "it had its time: {:?}", began.elapsed());
        world.expect_free();
        let counts = world.reader.counts();
        assert_eq!((counts.pairs_destroyed_unheard, counts.rails_lost), (1, 1));
    });
    assert_eq!(fake.left(), [0; 4]);
}

#[test]
fn a_device_that_is_gone_ends_its_pulls_although_its_queue_pairs_cannot_be_ended() {
    let fake = Fake::new(&["seed", "a"]);
    run(async {
        let drain = Duration::from_millis(100);
        let world = World::new(&fake, RdmaConfig { drain, ..config(&["a"]) }).await.unwrap();
        fake.kill("a");
        let mut pull = all_posted(&world).await;
        fake.refuse("ibv_modify_qp", 5);
        fake.tell("a", Event::DeviceFatal);
        let e = tokio::time::timeout(SETUP, pull.quiesced()).await.expect("in bounded time").unwrap_err();
        assert!(e.detail().contains("a port 1") && e.detail().contains("beyond use"), "{e}");
        world.expect_free();
    });
    assert_eq!(fake.left(), [0; 4]);
}

#[test]
fn memory_stays_owned_where_a_queue_pair_cannot_even_be_destroyed() {
    let fake = Fake::new(&["seed", "a"]);
    run(async {
        let (cancel_grace, drain) = (Duration::ZERO, Duration::from_millis(50));
        let world = World::new(&fake, RdmaConfig { cancel_grace, drain, ..config(&["a"]) }).await.unwrap();
        fake.kill("a");
        let mut pull = all_posted(&world).await;
        fake.refuse("ibv_destroy_qp", 5);
        pull.cancel();
        tokio::time::timeout(drain * 6, pull.quiesced()).await.expect_err("its device may still write");
        let busy = world.into.fill(ByteRange::new(0, BLOCK), 1).unwrap_err();
        assert_eq!(busy.kind(), Kind::Busy);
    });
}

#[test]
fn a_look_at_a_device_that_says_nothing_ends() {
    let fake = Fake::new(&["seed", "a"]);
    run(async {
        // The shortest patience: one try.
        let (ack_timeout, retries, drain) = (Duration::ZERO, 0, Duration::from_millis(50));
        let config = RdmaConfig { ack_timeout, retries, drain, ..config(&["a"]) };
        let world = World::new(&fake, config).await.unwrap();
        fake.kill("a");
        for _ in 0..2 {
            let look = world.mover.observe(ShardId(0), PAYLOAD, Duration::ZERO);
            let e = tokio::time::timeout(SETUP, look).await.expect("in bounded time").unwrap_err();
            assert!(e.kind() == Kind::Stalled && e.detail().contains("a port 1"), "{e}");
            assert!(e.peer().is_some() && e.remedy().is_some(), "{e}");
        }
    });
    assert_eq!(fake.left(), [0; 4]);
}
