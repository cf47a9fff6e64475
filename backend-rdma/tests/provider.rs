//! What only a real verbs provider can show: keys, deaths, links and limits. Runs in the machine of `cargo xtask rdma-vm`,
//! whose devices rxe0 and rxe1 share one link, rxe2 and rxe3 another; elsewhere every case is ignored with the reason.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, missing_docs)]

mod common;

use common::{
    Forge, Source, block_on, clone_of, config, counted, expect_payload, exported, geometry, pull, seed,
};
use flashboot_backend_rdma::{RdmaConfig, RdmaExchange, RdmaTransport};
use flashboot_core::{
    Arena, ByteRange, ByteSize, Code, HandleExchange as _, Kind, Location, Locator, Readiness, ShardId,
    Transport as _,
};
use flashboot_memory::HostArena;
use libtest_mimic::{Arguments, Completion, Failed, Trial};
use rustix::{
    mm::{MprotectFlags, mprotect},
    process::{Resource, Rlimit, setrlimit},
};
use std::{
    any::Any,
    os::unix::process::CommandExt as _,
    process::{Command, ExitCode},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

const SETUP: Duration = Duration::from_secs(10);
const MIB: u64 = 1 << 20;
/// `IBV_WC_REM_ACCESS_ERR`.
const REMOTE_ACCESS: Code = Code::Verbs(10);

fn ip(words: &str) {
    let done = Command::new("/usr/bin/ip").args(words.split(' ')).status().expect("iproute2 is there");
    assert!(done.success(), "ip {words}");
}

async fn reads_are_as_designed() {
    let (exchange, _arena, export) = seed(config(&["rxe0"]), 16 * MIB).await;
    let reader = counted(RdmaConfig { message: ByteSize(256 << 10), ..config(&["rxe1"]) }).await;
    let into = clone_of(16 * MIB);
    let mover = reader.import(export.locator(), Arc::clone(&into), SETUP).await.expect("imported");
    let before = reader.counts();
    pull(&*mover, ByteRange::new(0, 16 * MIB), Some(MIB)).await.expect("lands");
    expect_payload(&*into, 16 * MIB);
    let after = reader.counts();
    let posted = after.reads_posted - before.reads_posted;
    assert_eq!(posted, 64, "one READ a message");
    assert!(after.most_in_flight <= 16, "{after:?}");
    assert!(after.most_in_flight >= 12, "the queue pair is kept busy: {after:?}");
    let signalled = after.reads_signalled - before.reads_signalled;
    assert!(signalled <= posted / 2, "completions are sparse: {signalled} of {posted}");
    assert_eq!(after.completions - before.completions, signalled, "each that is asked for is told, no other");
    assert_eq!(after.bytes_read - before.bytes_read, 16 * MIB);
    assert_eq!((after.reads_repeated, after.rails_lost), (0, 0));
    drop(exchange);
}

/// Waits until an endpoint has made `pairs` queue pairs: spare ones come a moment after one was used.
async fn expect_made(exchange: &RdmaExchange, pairs: u64) {
    let began = Instant::now();
    while exchange.counts().pairs_made < pairs {
        assert!(began.elapsed() < SETUP, "{pairs} queue pairs: {:?}", exchange.counts());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

async fn a_second_clone_costs_one_round_trip() {
    let (exchange, _arena, export) = seed(config(&["rxe0"]), MIB).await;
    let reader = counted(config(&["rxe1"])).await;
    let into = clone_of(MIB);
    let spares = RdmaConfig::default().spares as u64;
    for round in 0..4 {
        expect_made(&exchange, spares + round).await;
        expect_made(&reader, spares + round).await;
        let before = (exchange.counts(), reader.counts());
        let mover = reader.import(export.locator(), Arc::clone(&into), SETUP).await.expect("imported");
        pull(&*mover, ByteRange::new(0, MIB), Some(MIB)).await.expect("lands");
        let after = (exchange.counts(), reader.counts());
        for (before, after) in [(before.0, after.0), (before.1, after.1)] {
            if round > 0 {
                assert_eq!(after.regions_registered, before.regions_registered);
            }
            assert_eq!(after.devices_opened, before.devices_opened);
            assert_eq!(after.spares_used - before.spares_used, 1);
            assert_eq!(after.pairs_made_late, 0, "no connection waits for a queue pair to be made");
            assert_eq!(after.control_round_trips - before.control_round_trips, 1);
        }
    }
}

/// One endpoint reads from its own device, from another, and from its own again, more often than it has spare queue pairs;
/// and one source is read so. On soft-RoCE a pair that was reset goes on sending where its first peer was.
async fn each_connection_goes_its_own_way() {
    let (_near, _near_arena, near) = seed(config(&["rxe1"]), MIB).await;
    let (_far, _far_arena, far) = seed(config(&["rxe0"]), MIB).await;
    let (reader, other) = (counted(config(&["rxe1"])).await, counted(config(&["rxe0"])).await);
    let into = clone_of(MIB);
    for round in 0..4 {
        for (which, export) in [("near", &near), ("far", &far)] {
            for (from, reader) in [("rxe1", &reader), ("rxe0", &other)] {
                let mover = reader.import(export.locator(), Arc::clone(&into), SETUP).await;
                let mover = mover.unwrap_or_else(|e| panic!("{which} from {from}, round {round}: {e}"));
                pull(&*mover, ByteRange::new(0, MIB), None).await.expect("lands");
            }
        }
    }
    expect_payload(&*into, MIB);
}

async fn a_wrong_key_is_refused_and_the_source_unharmed() {
    let (_exchange, _arena, export) = seed(config(&["rxe0"]), MIB).await;
    let reader = counted(config(&["rxe1"])).await;
    let forged = Forge::new(export.locator(), |reply| {
        let keys = reply["attached"]["pairs"][0]["keys"].as_array_mut().expect("keys");
        let key = keys[0].as_u64().expect("a key");
        keys[0] = (key ^ 0xff).into();
    })
    .await;
    let refused = reader.import(forged.locator(), clone_of(MIB), SETUP).await.expect_err("a wrong key");
    assert_eq!((refused.kind(), refused.code()), (Kind::SourceLost, Some(REMOTE_ACCESS)), "{refused}");
    assert!(refused.to_string().contains("rxe1 port 1"), "{refused}");
    let mover = reader.import(export.locator(), clone_of(MIB), SETUP).await.expect("the right one works");
    pull(&*mover, ByteRange::new(0, MIB), None).await.expect("lands");
}

async fn a_stale_key_is_refused_and_the_source_unharmed() {
    let source = counted(config(&["rxe0"])).await;
    let reader = counted(config(&["rxe1"])).await;
    let keys = Arc::new(Mutex::new(serde_json::Value::Null));
    let (arena, export) = exported(&source, MIB).await;
    let noted = Arc::clone(&keys);
    let forged = Forge::new(export.locator(), move |reply| {
        *noted.lock().expect("nobody panics") = reply["attached"]["pairs"][0]["keys"].clone();
    })
    .await;
    drop(reader.import(forged.locator(), clone_of(MIB), SETUP).await.expect("the key works while it stands"));
    // The source lets the memory go, which takes its registration along; the next arena has a key of its own.
    drop((export, arena));
    tokio::time::sleep(Duration::from_secs(1)).await;
    let (_arena, export) = exported(&source, MIB).await;
    let forged = Forge::new(export.locator(), move |reply| {
        let old = keys.lock().expect("nobody panics").clone();
        assert_ne!(reply["attached"]["pairs"][0]["keys"], old);
        reply["attached"]["pairs"][0]["keys"] = old;
    })
    .await;
    let refused = reader.import(forged.locator(), clone_of(MIB), SETUP).await.expect_err("a stale key");
    assert_eq!((refused.kind(), refused.code()), (Kind::SourceLost, Some(REMOTE_ACCESS)), "{refused}");
    let mover = reader.import(export.locator(), clone_of(MIB), SETUP).await.expect("the right one works");
    pull(&*mover, ByteRange::new(0, MIB), None).await.expect("lands");
}

/// An arena whose payload this process may not touch: who does is killed.
struct Closed(Arc<HostArena>, usize);

impl Closed {
    fn new(arena: &Arc<dyn Arena>, size: u64) -> Self {
        let any: Arc<dyn Any + Send + Sync> = Arc::clone(arena) as _;
        let closed = Self(any.downcast().expect("a host arena"), usize::try_from(size).expect("it fits"));
        closed.protect(MprotectFlags::empty());
        closed
    }

    fn protect(&self, flags: MprotectFlags) {
        // SAFETY: whole pages of the arena's own mapping, which `self` keeps; nobody has a reference into an arena.
        unsafe { mprotect(self.0.base().as_ptr().cast(), self.1, flags) }.expect("pages of ours");
    }
}

impl Drop for Closed {
    fn drop(&mut self) {
        self.protect(MprotectFlags::READ | MprotectFlags::WRITE);
    }
}

async fn no_core_touches_the_payload() {
    let size = 16 * MIB;
    let (_exchange, arena, export) = seed(config(&["rxe0"]), size).await;
    let reader = counted(config(&["rxe1"])).await;
    let into = clone_of(size);
    let mover = reader.import(export.locator(), Arc::clone(&into), SETUP).await.expect("imported");
    {
        // Neither end's: what is registered is the NIC's to reach all the same.
        let _closed = [Closed::new(&arena, size), Closed::new(&into, size)];
        pull(&*mover, ByteRange::new(0, size), None).await.expect("lands");
    }
    expect_payload(&*into, size);
}

async fn a_peer_on_another_fabric_is_told_in_time() {
    let (_exchange, _arena, export) = seed(config(&["rxe0"]), MIB).await;
    let reader = counted(config(&["rxe1"])).await;
    // 10.99.0.1: no route leads there.
    let forged = Forge::new(export.locator(), |reply| {
        let gid = reply["attached"]["pairs"][0]["address"]["gid"].as_array_mut().expect("a GID");
        gid[13] = 99.into();
    })
    .await;
    let began = Instant::now();
    let refused = reader.import(forged.locator(), clone_of(MIB), SETUP).await.expect_err("no way there");
    assert!(matches!(refused.kind(), Kind::SourceLost | Kind::Unavailable | Kind::Io), "{refused}");
    assert!(refused.to_string().contains("rxe1"), "{refused}");
    assert!(began.elapsed() < SETUP / 2, "{:?}", began.elapsed());
}

async fn a_source_that_talks_nonsense_or_nothing_is_told_apart() {
    let (_exchange, _arena, export) = seed(config(&["rxe0"]), MIB).await;
    let reader = counted(config(&["rxe1"])).await;
    let kind = async |forged: Forge, timeout| {
        let began = Instant::now();
        let refused = reader.import(forged.locator(), clone_of(MIB), timeout).await.expect_err("nonsense");
        assert!(began.elapsed() < SETUP / 2, "{refused}");
        refused.kind()
    };
    let garbage = Forge::saying(export.locator(), b"{\"attached\":{}}".to_vec()).await;
    assert_eq!(kind(garbage, SETUP).await, Kind::Protocol);
    let long = Forge::saying(export.locator(), vec![b' '; 300 << 10]).await;
    assert_eq!(kind(long, SETUP).await, Kind::Protocol);
    let silent = Forge::silent(export.locator()).await;
    assert_eq!(kind(silent, Duration::from_millis(500)).await, Kind::Deadline);
    let short = Forge::new(export.locator(), |reply| reply["attached"]["capacity"] = 4096.into()).await;
    assert_eq!(kind(short, SETUP).await, Kind::Protocol);
}

async fn a_killed_source_is_found_in_bounded_time() {
    let source = Source::start(&["rxe0"], 64 * MIB);
    let reader = counted(config(&["rxe1"])).await;
    let into = clone_of(64 * MIB);
    let mover = reader.import(&source.locator, Arc::clone(&into), SETUP).await.expect("imported");
    let range = ByteRange::new(0, 64 * MIB);
    let mut pull = mover.start(flashboot_core::Pull { range, hash: Some(MIB) }).expect("starts");
    while reader.counts().bytes_read < 4 * MIB {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let began = Instant::now();
    source.kill();
    let lost = pull.quiesced().await.expect_err("half an image is none");
    let took = began.elapsed();
    println!("a killed source: told after {took:?}: {lost}");
    assert_eq!(lost.kind(), Kind::SourceLost, "{lost}");
    assert!(matches!(lost.code(), Some(Code::Verbs(_))), "{lost}");
    assert!(took < Duration::from_secs(5), "{took:?}");
    // Quiet means quiet: the range is ours again.
    into.fill(range, 7).expect("the range is free");
    let lost = mover.observe(ShardId(0), u64::MAX, SETUP).await.expect_err("and so is a look");
    assert_eq!(lost.kind(), Kind::SourceLost, "{lost}");
}

async fn two_rails_go_on_when_a_link_is_cut() {
    two_rails(|| ip("link set ve2 down"), || ip("link set ve2 up")).await;
}

async fn two_rails_go_on_when_packets_vanish() {
    // No event tells of it: only a READ that is never answered does.
    two_rails(
        || ip("neigh replace 10.78.0.2 lladdr 02:00:00:00:00:99 dev ve2 nud permanent"),
        || {
            let address = std::fs::read_to_string("/sys/class/net/ve3/address").expect("ve3 is there");
            ip(&format!("neigh replace 10.78.0.2 lladdr {} dev ve2 nud permanent", address.trim()));
        },
    )
    .await;
}

async fn two_rails(cut: impl Fn(), mend: impl Fn()) {
    let size = 64 * MIB;
    let (_exchange, _arena, export) = seed(config(&["rxe0", "rxe2"]), size).await;
    let reader = counted(RdmaConfig { message: ByteSize(128 << 10), ..config(&["rxe1", "rxe3"]) }).await;
    let into = clone_of(size);
    let mover = reader.import(export.locator(), Arc::clone(&into), SETUP).await.expect("imported");
    let range = ByteRange::new(0, size);
    let mut pull = mover.start(flashboot_core::Pull { range, hash: Some(MIB) }).expect("starts");
    while reader.counts().bytes_read < 4 * MIB {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    assert_eq!(reader.counts().rails_lost, 0);
    cut();
    let landed = tokio::time::timeout(Duration::from_secs(20), pull.quiesced()).await;
    let counts = reader.counts();
    mend();
    let landed = landed.expect("in bounded time").expect("the other rail brings it");
    println!("two rails: {counts:?}");
    assert_eq!(landed.digests, geometry(size).1);
    expect_payload(&*into, size);
    assert_eq!(counts.rails_lost, 1, "{counts:?}");
    assert!(counts.reads_repeated >= 1, "what the lost rail had not brought is read again: {counts:?}");
}

async fn a_cancelled_pull_is_quiet_and_its_queue_pair_ended_when_it_will_not_stop() {
    let (_exchange, _arena, export) = seed(config(&["rxe0"]), 32 * MIB).await;
    let range = ByteRange::new(0, 32 * MIB);
    for grace in [Duration::from_secs(5), Duration::ZERO] {
        let reader = counted(RdmaConfig { cancel_grace: grace, ..config(&["rxe1"]) }).await;
        let into = clone_of(32 * MIB);
        let mover = reader.import(export.locator(), Arc::clone(&into), SETUP).await.expect("imported");
        let mut pull = mover.start(flashboot_core::Pull { range, hash: None }).expect("starts");
        while reader.counts().reads_posted == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        pull.cancel();
        assert_eq!(pull.quiesced().await.expect_err("cancelled").kind(), Kind::Cancelled);
        into.fill(range, 9).expect("the range is free");
        tokio::time::sleep(Duration::from_millis(200)).await;
        let mut found = vec![0; 32 << 20];
        into.copy_out(0, &mut found).expect("quiet");
        assert!(found == vec![9; 32 << 20], "nothing lands after the pull is quiet");
        let ended = reader.counts().pairs_ended_by_cancel;
        assert_eq!(ended, u64::from(grace.is_zero()), "{grace:?}");
    }
}

async fn what_is_not_there_is_named() {
    let open = async |config: RdmaConfig| {
        let opened = RdmaTransport::default().open(config).await;
        let e = opened.expect_err("not there");
        (e.kind(), e.to_string())
    };
    let (kind, said) = open(config(&["mlx9_9"])).await;
    assert!(kind == Kind::Unavailable && said.contains("mlx9_9"), "{said}");
    let (kind, said) = open(RdmaConfig { gid_index: Some(200), ..config(&["rxe0"]) }).await;
    assert!(
        kind == Kind::Unavailable && said.contains("index 200") && said.contains("rxe0 port 1"),
        "{said}"
    );
    let (kind, said) = open(RdmaConfig { port: Some(9), ..config(&["rxe0"]) }).await;
    assert!(kind != Kind::Invalid && said.contains("rxe0 port 9"), "{said}");
    ip("link set ve2 down");
    let (kind, said) = open(config(&["rxe2"])).await;
    ip("link set ve2 up");
    assert!(kind == Kind::Unavailable && said.contains("rxe2 port 1 is DOWN"), "{said}");
    let described = RdmaTransport::new(config(&["rxe0"])).devices().expect("it is there");
    assert!(described[0].contains("MTU 4096") && described[0].contains("GID 1 10.77.0.1"), "{described:?}");
}

/// In a process of its own: root may lock what it likes, so this one gives that up.
async fn too_little_memlock_says_how_much_is_needed() {
    let own = std::env::current_exe().expect("this program");
    let child = Command::new(own).arg("memlock-child").uid(1000).gid(1000).output().expect("a child");
    let said = String::from_utf8_lossy(&child.stdout).into_owned() + &String::from_utf8_lossy(&child.stderr);
    assert!(child.status.success(), "{said}");
    assert!(said.contains("bytes are needed") && said.contains("ulimit -l"), "{said}");
}

/// Exports more than it may lock, and prints what it is told.
async fn memlock_child() {
    let limit = Rlimit { current: Some(MIB), maximum: Some(MIB) };
    setrlimit(Resource::Memlock, limit).expect("less is always allowed");
    let (exchange, arena) = (counted(config(&["rxe0"])).await, clone_of(8 * MIB));
    arena.begin(flashboot_core::Generation::from_random(5));
    let refused = exchange.export(arena, SETUP).await.expect_err("too much");
    assert_eq!((refused.kind(), refused.op()), (Kind::Exhausted, "ibv_reg_mr"), "{refused}");
    println!("{refused}");
}

async fn a_pair_is_probed_from_end_to_end() {
    let (_exchange, _arena, export) = seed(config(&["rxe0"]), MIB).await;
    let transport = RdmaTransport::new(config(&["rxe1"]));
    let into = Location::Host { boot_id: "x".into(), numa_node: None };
    assert_eq!(transport.probe_pair(export.locator(), &into).await, Readiness::Ready);
    let nobody = Locator { endpoint: "127.0.0.1:1".into(), ..export.locator().clone() };
    assert!(matches!(transport.probe_pair(&nobody, &into).await, Readiness::Unavailable { .. }));
}

fn main() -> ExitCode {
    if let Some(child) = common::child() {
        return child;
    }
    if std::env::args().any(|word| word == "memlock-child") {
        block_on(memlock_child());
        return ExitCode::SUCCESS;
    }
    let required = std::env::var("FLASHBOOT_REQUIRE").is_ok_and(|list| list.split(',').any(|w| w == "rdma"));
    let absent = match block_on(RdmaTransport::new(config(&["rxe0", "rxe1", "rxe2", "rxe3"])).probe()) {
        Readiness::Ready => None,
        Readiness::Unavailable { reason, remedy } => Some(format!("{reason}; {remedy}")),
    };
    macro_rules! cases {
        ($($case:ident),* $(,)?) => {
            vec![$({
                let absent = absent.clone();
                Trial::ignorable_test(stringify!($case), move || match absent {
                    Some(reason) if required => Err(Failed::from(reason)),
                    Some(reason) => Ok(Completion::ignored_with(reason)),
                    None => {
                        block_on($case());
                        Ok(Completion::Completed)
                    }
                })
            }),*]
        };
    }
    let cases = cases![
        reads_are_as_designed,
        a_second_clone_costs_one_round_trip,
        each_connection_goes_its_own_way,
        no_core_touches_the_payload,
        a_wrong_key_is_refused_and_the_source_unharmed,
        a_stale_key_is_refused_and_the_source_unharmed,
        a_peer_on_another_fabric_is_told_in_time,
        a_source_that_talks_nonsense_or_nothing_is_told_apart,
        a_killed_source_is_found_in_bounded_time,
        two_rails_go_on_when_a_link_is_cut,
        two_rails_go_on_when_packets_vanish,
        a_cancelled_pull_is_quiet_and_its_queue_pair_ended_when_it_will_not_stop,
        what_is_not_there_is_named,
        too_little_memlock_says_how_much_is_needed,
        a_pair_is_probed_from_end_to_end,
    ];
    let mut arguments = Arguments::from_args();
    // They take links down that others use.
    arguments.test_threads = Some(1);
    libtest_mimic::run(&arguments, cases).exit_code()
}
