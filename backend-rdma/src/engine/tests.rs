//! Endpoints over a stand-in provider: what each failure of a verb or a completion becomes, and what is left behind.

use super::{Lane, plan::Window};
use crate::{
    config::RdmaConfig,
    counters::Counters,
    endpoint::purpose,
    exchange::RdmaExchange,
    held::Held,
    mover::RdmaMover,
    rail::open_all,
    verbs::{Event, Status, fake::Fake},
};
use flashboot_channel::{Dial, Endpoint, Liveness, Security, dial};
use flashboot_core::{
    Arena, ArenaSpec, ByteRange, ByteSize, Code, Error, Export, Generation, HandleExchange as _, InFlight,
    Kind, Landed, Mover, Pull, ShardId, digest,
};
use flashboot_memory::{HostArena, HostArenaConfig};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};

const SETUP: Duration = Duration::from_secs(10);
const BLOCK: u64 = 64 << 10;
const PAYLOAD: u64 = 40 * BLOCK + 777;
const WHOLE: ByteRange = ByteRange { start: 0, end: PAYLOAD };

fn byte(at: u64) -> u8 {
    (at.wrapping_mul(0x9E37_79B9) >> 13) as u8
}

fn config(devices: &[&str]) -> RdmaConfig {
    RdmaConfig {
        devices: devices.iter().map(|name| (*name).to_owned()).collect(),
        message: ByteSize(16 << 10),
        hash_threads: Some(1),
        ..RdmaConfig::default()
    }
}

fn arena() -> Arc<dyn Arena> {
    HostArena::create(ArenaSpec { payload: PAYLOAD, shards: 1 }, &HostArenaConfig::default()).unwrap().0
}

/// A seed on device `seed`, and a reader's hop to it.
struct World {
    // Dropped in this order.
    mover: Box<dyn Mover>,
    into: Arc<dyn Arena>,
    reader: RdmaExchange,
    _export: Box<dyn Export>,
    _seed: RdmaExchange,
}

impl World {
    async fn new(fake: &Fake, reader: RdmaConfig) -> Result<Self, Error> {
        let seed = RdmaExchange::open(&fake.verbs(), &config(&["seed"]))?;
        let source = arena();
        source.begin(Generation::from_random(5));
        let bytes: Vec<u8> = (0..PAYLOAD).map(byte).collect();
        source.copy_in(0, &bytes)?;
        source.publish(ShardId(0), PAYLOAD)?;
        let export = seed.export(Arc::clone(&source), SETUP).await?;
        let reader = RdmaExchange::open(&fake.verbs(), &reader)?;
        let into = arena();
        let mover = reader.import(export.locator(), Arc::clone(&into), SETUP).await?;
        Ok(Self { mover, into, reader, _export: export, _seed: seed })
    }

    async fn pull(&self) -> Result<Landed, Error> {
        self.mover.start(Pull { range: WHOLE, hash: Some(BLOCK) })?.quiesced().await
    }

    #[track_caller]
    fn expect_payload(&self) {
        let mut found = vec![0; PAYLOAD as usize];
        self.into.copy_out(0, &mut found).unwrap();
        assert!(found.iter().zip(0..).all(|(found, at)| *found == byte(at)));
    }

    /// Whatever happened, the range is the owner's again.
    #[track_caller]
    fn expect_free(&self) {
        self.into.fill(WHOLE, 1).unwrap();
    }
}

fn run(work: impl Future<Output = ()>) {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(work);
}

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
fn a_reader_is_told_that_the_two_ends_send_with_different_traffic_classes() {
    let fake = Fake::new(&["seed", "a", "b"]);
    let remarks = |world: &World| {
        let any: &dyn std::any::Any = &*world.mover;
        any.downcast_ref::<RdmaMover>().unwrap().remarks().to_vec()
    };
    run(async {
        let alike = World::new(&fake, config(&["a"])).await.unwrap();
        assert_eq!(remarks(&alike), [""; 0]);
        let other = RdmaConfig { traffic_class: 106, ..config(&["a", "b"]) };
        let other = World::new(&fake, other).await.unwrap();
        let told = remarks(&other);
        assert_eq!(told.len(), 2, "each device has its own: {told:?}");
        for (told, device) in told.iter().zip(["a port 1", "b port 1"]) {
            for word in [device, "class 106", "with 0", "rdma.traffic_class"] {
                assert!(told.contains(word), "{word}: {told}");
            }
        }
        // A remark is no error.
        other.pull().await.unwrap();
        other.expect_payload();
    });
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

#[test]
fn lanes_that_nobody_took_leave_their_room_to_others() {
    let fake = Fake::new(&["a"]);
    let counters = Arc::new(Counters::default());
    let rails = open_all(&fake.verbs(), &config(&["a"]), &counters).unwrap();
    // More often than the completion queue has room for at once.
    for _ in 0..1000 {
        let held = Held::new(&rails[0], 0).unwrap();
        drop(Lane::new(held, Window::new(16, 16, 16), vec![1], vec![1]));
    }
    let all: Vec<_> = std::iter::from_fn(|| Held::new(&rails[0], 0).ok()).collect();
    assert_eq!(all.len(), 4096 / 20, "and there is an end");
    assert_eq!(Held::new(&rails[0], 0).unwrap_err().kind(), Kind::Exhausted);
}

#[test]
fn a_source_with_no_room_for_one_more_reader_says_so() {
    let fake = Fake::new(&["seed", "a"]);
    run(async {
        let seed =
            RdmaExchange::open(&fake.verbs(), &RdmaConfig { outstanding: 255, ..config(&["seed"]) }).unwrap();
        let source = arena();
        source.begin(Generation::from_random(5));
        let export = seed.export(source, SETUP).await.unwrap();
        let reader = RdmaExchange::open(&fake.verbs(), &config(&["a"])).unwrap();
        let mut movers = Vec::new();
        let full = loop {
            match reader.import(export.locator(), arena(), SETUP).await {
                Ok(mover) => movers.push(mover),
                Err(full) => break full,
            }
        };
        assert_eq!(movers.len(), 4096 / 259);
        assert!(full.kind() == Kind::Busy && full.detail().contains("completion queue"), "{full}");
        movers.clear();
        // As soon as the source has noticed.
        let began = Instant::now();
        while reader.import(export.locator(), arena(), SETUP).await.is_err() {
            assert!(began.elapsed() < SETUP, "their places are free again");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    });
}

#[test]
fn connections_that_ask_nothing_take_no_more_places_than_there_are() {
    let fake = Fake::new(&["seed"]);
    run(async {
        let few = RdmaConfig { max_readers: 1, max_pending: 1, ..config(&["seed"]) };
        let seed = RdmaExchange::open(&fake.verbs(), &few).unwrap();
        let source = arena();
        source.begin(Generation::from_random(5));
        let export = seed.export(source, SETUP).await.unwrap();
        let endpoint: Endpoint = export.locator().endpoint.parse().unwrap();
        let how = Dial { purpose: purpose().unwrap(), timeout: SETUP, liveness: Liveness::default() };
        let mut silent = Vec::new();
        for _ in 0..3 {
            silent.push(dial(&endpoint, &Security::default(), how).await.unwrap());
        }
        // Sooner than those that may still ask are given up.
        let last = silent[2].receive(64, few.handshake / 2).await;
        assert_eq!(last, Ok(None), "the third is one too many");
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

#[test]
fn every_verb_that_fails_while_opening_is_named_and_nothing_leaks() {
    let cases = [
        ("ibv_open_device", 13, Kind::Permission),
        ("ibv_query_device", 5, Kind::Io),
        ("ibv_query_port", 5, Kind::Io),
        ("ibv_alloc_pd", 12, Kind::Exhausted),
        ("ibv_create_comp_channel", 24, Kind::Exhausted),
        ("ibv_create_cq", 12, Kind::Exhausted),
        ("ibv_create_qp", 12, Kind::Exhausted),
        ("ibv_reg_mr", 12, Kind::Exhausted),
        ("ibv_modify_qp", 110, Kind::SourceLost),
    ];
    for (call, errno, kind) in cases {
        let fake = Fake::new(&["seed", "a"]);
        fake.refuse(call, errno);
        run(async {
            // The last one shows when a reader comes: its source refuses it.
            let e = World::new(&fake, config(&["a"])).await.map(drop).unwrap_err();
            if call == "ibv_modify_qp" {
                assert!(e.to_string().contains(call), "{e}");
            } else {
                assert_eq!((e.op(), e.code(), e.kind()), (call, Some(Code::Errno(errno)), kind), "{e}");
                assert!(e.detail().contains("seed"), "{e}");
            }
        });
        assert_eq!(fake.left(), [0; 4], "{call}");
    }
}

#[test]
fn a_port_that_is_down_and_a_gid_that_is_gone_are_told_with_what_to_do() {
    let open = |fake: &Fake, config: &RdmaConfig| {
        let e = RdmaExchange::open(&fake.verbs(), config).unwrap_err();
        assert!(e.remedy().is_some(), "{e}");
        (e.kind(), e.detail().to_owned())
    };
    let fake = Fake::new(&["a", "b"]);
    fake.bring_down("a");
    assert_eq!(open(&fake, &config(&["a"])), (Kind::Unavailable, "a port 1 is DOWN".into()));
    // Nobody named it: the other is used.
    RdmaExchange::open(&fake.verbs(), &config(&[])).unwrap();
    let wanted = RdmaConfig { gid_index: Some(9), ..config(&["b"]) };
    let (kind, detail) = open(&fake, &wanted);
    assert!(kind == Kind::Unavailable && detail.contains("index 9"), "{detail}");
    fake.without_gids();
    assert_eq!(open(&fake, &config(&["b"])).0, Kind::Unavailable);
    assert_eq!(open(&Fake::new(&[]), &config(&[])).0, Kind::Unavailable);
    assert_eq!(fake.left(), [0; 4]);
}
