//! Opening devices and connecting to a source: refusals, room, and what is remarked.

use super::*;

#[test]
fn a_reader_is_told_that_the_two_ends_send_with_different_traffic_classes() {
    let fake = Fake::new(&["seed", "a", "b"]);
    run(async {
        let alike = World::new(&fake, config(&["a"])).await.unwrap();
        assert_eq!(alike.mover.remarks(), [""; 0]);
        let other = RdmaConfig { traffic_class: 106, ..config(&["a", "b"]) };
        let other = World::new(&fake, other).await.unwrap();
        let told = other.mover.remarks();
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
fn a_traffic_class_that_is_not_sent_is_not_remarked() {
    // Within a subnet packets go by their LID; without one they carry the class, as on Ethernet.
    for (lid, told) in [(7, 0), (0, 1)] {
        let fake = Fake::new(&["seed", "a"]);
        fake.on_infiniband(lid);
        run(async {
            let other = RdmaConfig { traffic_class: 106, ..config(&["a"]) };
            let world = World::new(&fake, other).await.unwrap();
            assert_eq!(world.mover.remarks().len(), told, "LID {lid}");
            world.pull().await.unwrap();
            world.expect_payload();
        });
    }
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
