//! Export, import, observe, pull: what the contracts promise, inside one process.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, missing_docs)]

mod common;
use common::*;

use flashboot_backend_ipc::{IpcConfig, IpcTransport};
use flashboot_core::{
    Arena, ArenaSpec, ByteRange, Caps, Generation, Kind, Location, MemoryKind, Observed, Pull, Readiness,
    Result, ShardId, Transport as _, TransportName,
};
use flashboot_memory::{HostArena, HostArenaConfig};
use std::{
    os::unix::fs::PermissionsExt as _,
    sync::Arc,
    time::{Duration, Instant},
};

const PAYLOAD: u64 = 3 * BLOCK + 511;

#[tokio::test(flavor = "current_thread")]
async fn a_reader_gets_every_byte_and_its_digests() {
    let dir = tempfile::tempdir().unwrap();
    let exchange = open(&config(dir.path())).await.unwrap();
    for payload in [0, 1, 511, BLOCK, PAYLOAD, 5 << 20] {
        let source = seed(payload, payload + 1);
        let export = exchange.export(source.clone(), PATIENCE).await.unwrap();
        // Any number of readers, any number of times.
        for _ in 0..2 {
            let sink = arena(payload);
            let mover = exchange.import(export.locator(), sink.clone(), PATIENCE).await.unwrap();
            let again = exchange.import(export.locator(), arena(payload), PATIENCE).await.unwrap();
            let seen = mover.observe(ShardId(0), payload, Duration::ZERO).await.unwrap();
            assert_eq!(seen.progress, payload);
            assert_eq!(pull(&*mover, payload).await.unwrap(), expected(payload));
            assert_eq!(bytes(&sink), data(payload));
            drop(again);
        }
    }
}

#[tokio::test(flavor = "current_thread")]
async fn what_cannot_be_imported_is_refused_before_a_byte_moves() {
    let dir = tempfile::tempdir().unwrap();
    let exchange = open(&config(dir.path())).await.unwrap();
    let source = seed(PAYLOAD, 7);
    let export = exchange.export(source.clone(), PATIENCE).await.unwrap();
    let good = export.locator().clone();
    let import = async |locator, into| exchange.import(&locator, into, PATIENCE).await.map(drop);
    let sink = || -> Arc<dyn Arena> { arena(PAYLOAD) };
    let refused = async |locator, into| import(locator, into).await.unwrap_err().kind();

    let mut other = good.clone();
    other.transport = TransportName::Tcp;
    assert_eq!(refused(other, sink()).await, Kind::Mismatch);
    let mut other = good.clone();
    other.location = Location::Host { boot_id: "another".into(), numa_node: None };
    let e = import(other, sink()).await.unwrap_err();
    assert_eq!(e.kind(), Kind::Unavailable);
    assert!(e.remedy().unwrap().contains("tcp"), "{e}");
    let mut other = good.clone();
    other.location = Location::Gpu { boot_id: "x".into(), uuid: "y".into() };
    assert_eq!(refused(other, sink()).await, Kind::Mismatch);
    let mut other = good.clone();
    other.generation = Generation::from_random(8);
    assert_eq!(refused(other, sink()).await, Kind::StaleGeneration);
    let mut other = good.clone();
    other.capacity += 4096;
    assert_eq!(refused(other, sink()).await, Kind::Mismatch);
    let mut other = good.clone();
    other.payload += 1;
    assert_eq!(refused(other.clone(), sink()).await, Kind::Mismatch);
    assert_eq!(refused(other, arena(PAYLOAD + 1)).await, Kind::Mismatch, "the exporter says otherwise");
    let shards = HostArena::create(ArenaSpec { payload: PAYLOAD, shards: 2 }, &HostArenaConfig::default());
    assert_eq!(refused(good.clone(), shards.unwrap().0).await, Kind::Mismatch);
    let mut other = good.clone();
    other.endpoint = dir.path().join("nobody.sock").to_str().unwrap().into();
    assert_eq!(refused(other, sink()).await, Kind::SourceLost);
    let mut other = good.clone();
    other.endpoint = format!("/{}", "x".repeat(200));
    assert_eq!(refused(other, sink()).await, Kind::Invalid);
    let mut other = good.clone();
    other.endpoint = "/tmp/a\0b".into();
    assert_eq!(refused(other, sink()).await, Kind::Invalid);
    let mut other = good.clone();
    other.location = Location::Gpu { boot_id: "another".into(), uuid: "GPU-0".into() };
    let e = import(other, sink()).await.unwrap_err();
    assert_eq!(e.kind(), Kind::Mismatch);
    assert!(e.detail().contains("not GPU to host"), "{e}");
    let e = import(good.clone(), Arc::new(NoHost)).await.unwrap_err();
    assert_eq!(e.kind(), Kind::Invalid);
    assert!(e.to_string().contains("host arena"), "{e}");
    let e = exchange.import(&good, sink(), Duration::ZERO).await.unwrap_err();
    assert_eq!(e.kind(), Kind::Deadline);
    import(good.clone(), sink()).await.unwrap();

    // An arena cannot be pulled onto itself.
    let mover = exchange.import(&good, source, PATIENCE).await.unwrap();
    assert_eq!(pull(&*mover, PAYLOAD).await.unwrap_err().kind(), Kind::Invalid);
}

#[tokio::test(flavor = "current_thread")]
async fn a_dropped_export_stops_new_readers_and_keeps_those_attached() {
    let dir = tempfile::tempdir().unwrap();
    let exchange = open(&config(dir.path())).await.unwrap();
    let source = seed(PAYLOAD, 7);
    let export = exchange.export(source.clone(), PATIENCE).await.unwrap();
    let locator = export.locator().clone();
    let sink = arena(PAYLOAD);
    let mover = exchange.import(&locator, sink.clone(), PATIENCE).await.unwrap();
    drop(export);
    let e = exchange.import(&locator, arena(PAYLOAD), PATIENCE).await.unwrap_err();
    assert_eq!(e.kind(), Kind::StaleGeneration, "{e}");
    assert_eq!(mover.observe(ShardId(0), PAYLOAD, Duration::ZERO).await.unwrap().progress, PAYLOAD);
    assert_eq!(pull(&*mover, PAYLOAD).await.unwrap(), expected(PAYLOAD));
    // With the arena itself the reader learns that nothing more will come.
    drop(source);
    let e = mover.observe(ShardId(0), PAYLOAD + 1, PATIENCE).await.unwrap_err();
    assert_eq!(e.kind(), Kind::SourceLost, "{e}");
}

#[tokio::test(flavor = "current_thread")]
async fn a_refilled_arena_is_not_served_as_the_old_one() {
    let dir = tempfile::tempdir().unwrap();
    let exchange = open(&config(dir.path())).await.unwrap();
    let source = arena(PAYLOAD);
    let e = exchange.export(source.clone(), PATIENCE).await.unwrap_err();
    assert_eq!(e.kind(), Kind::Invalid, "a retired arena: {e}");
    source.begin(Generation::from_random(1));
    let export = exchange.export(source.clone(), PATIENCE).await.unwrap();
    let old = export.locator().clone();
    let mover = exchange.import(&old, arena(PAYLOAD), PATIENCE).await.unwrap();
    source.retire();
    let seen = mover.observe(ShardId(0), 1, PATIENCE).await.unwrap();
    assert_eq!(seen.generation, None, "a retirement ends the wait");
    assert_eq!(
        exchange.import(&old, arena(PAYLOAD), PATIENCE).await.unwrap_err().kind(),
        Kind::StaleGeneration
    );
    source.begin(Generation::from_random(2));
    let seen = mover.observe(ShardId(0), 1, PATIENCE).await.unwrap();
    assert_eq!(seen.generation, Some(Generation::from_random(2)));
    assert_eq!(
        exchange.import(&old, arena(PAYLOAD), PATIENCE).await.unwrap_err().kind(),
        Kind::StaleGeneration
    );
    let fresh = exchange.export(source, PATIENCE).await.unwrap();
    exchange.import(fresh.locator(), arena(PAYLOAD), PATIENCE).await.unwrap();
}

#[tokio::test(flavor = "current_thread")]
async fn observe_waits_for_progress_and_no_longer_than_told() {
    let dir = tempfile::tempdir().unwrap();
    let exchange = open(&config(dir.path())).await.unwrap();
    let source = arena(PAYLOAD);
    let generation = Generation::from_random(5);
    source.begin(generation);
    let export = exchange.export(source.clone(), PATIENCE).await.unwrap();
    let mover = exchange.import(export.locator(), arena(PAYLOAD), PATIENCE).await.unwrap();
    let nothing = Observed { generation: Some(generation), progress: 0 };
    assert_eq!(mover.observe(ShardId(0), 1, Duration::ZERO).await.unwrap(), nothing);
    let started = Instant::now();
    assert_eq!(mover.observe(ShardId(0), 1, Duration::from_millis(50)).await.unwrap(), nothing);
    let took = started.elapsed();
    assert!(took >= Duration::from_millis(50) && took < PATIENCE, "{took:?}");
    let publisher = {
        let source = source.clone();
        std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(30));
            source.publish(ShardId(0), BLOCK).unwrap();
        })
    };
    let seen = mover.observe(ShardId(0), BLOCK, PATIENCE).await.unwrap();
    assert_eq!(seen.progress, BLOCK);
    publisher.join().unwrap();
}

#[tokio::test(flavor = "current_thread")]
async fn pulls_honour_ranges_claims_and_cancel() {
    let dir = tempfile::tempdir().unwrap();
    let exchange = open(&config(dir.path())).await.unwrap();
    let payload = 64 << 20;
    let export = exchange.export(seed(payload, 3), PATIENCE).await.unwrap();
    let sink = arena(payload);
    let mover = exchange.import(export.locator(), sink.clone(), PATIENCE).await.unwrap();
    let start = |start, end, hash| mover.start(Pull { range: ByteRange::new(start, end), hash });
    assert_eq!(start(0, payload + 1, None).err().unwrap().kind(), Kind::Invalid);
    assert_eq!(start(1, BLOCK, Some(BLOCK)).err().unwrap().kind(), Kind::Invalid);
    assert_eq!(start(0, BLOCK - 1, Some(BLOCK)).err().unwrap().kind(), Kind::Invalid);
    let mut first = start(0, payload, Some(16 << 20)).unwrap();
    assert_eq!(start(BLOCK, 2 * BLOCK, None).err().unwrap().kind(), Kind::Busy);
    first.cancel();
    let answer = first.quiesced().await;
    assert_eq!(first.quiesced().await, answer, "the same answer again");
    assert!(answer.is_ok() || answer.unwrap_err().kind() == Kind::Cancelled);
    assert!(sink.is_free(ByteRange::new(0, payload)));
    drop(start(0, payload, Some(16 << 20)).unwrap());
    while !sink.is_free(ByteRange::new(0, payload)) {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    // A mover that is dropped ends once its pulls have.
    let mut last = start(0, payload, Some(16 << 20)).unwrap();
    drop(mover);
    assert_eq!(last.quiesced().await.unwrap().digests.len(), 4);
    assert_eq!(bytes(&sink), data(payload));
}

#[tokio::test(flavor = "current_thread")]
async fn an_endpoint_leaves_its_directory_as_it_found_it() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path());
    let files = || std::fs::read_dir(&config.directory).unwrap().count();
    let (first, second) = (open(&config).await.unwrap(), open(&config).await.unwrap());
    assert_eq!(files(), 4, "two endpoints in one directory: a socket and a lock each");
    let mode = |path: &std::path::Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&config.directory), 0o700);
    let sources = [seed(PAYLOAD, 1), seed(PAYLOAD, 2)];
    let one = first.export(sources[0].clone(), PATIENCE).await.unwrap();
    let two = second.export(sources[1].clone(), PATIENCE).await.unwrap();
    assert_eq!(mode(std::path::Path::new(&one.locator().endpoint)), 0o600);
    assert_ne!(one.locator().endpoint, two.locator().endpoint);
    first.import(two.locator(), arena(PAYLOAD), PATIENCE).await.unwrap();
    second.import(one.locator(), arena(PAYLOAD), PATIENCE).await.unwrap();
    drop(first);
    second.import(one.locator(), arena(PAYLOAD), PATIENCE).await.expect("an export keeps its socket");
    drop(one);
    assert_eq!(files(), 2);
    drop((two, second));
    assert_eq!(files(), 0);
}

#[tokio::test(flavor = "current_thread")]
async fn another_programs_lock_file_is_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path());
    std::fs::create_dir(&config.directory).unwrap();
    std::fs::set_permissions(&config.directory, std::fs::Permissions::from_mode(0o700)).unwrap();
    let theirs = [("Cargo.lock", "version = 4\n"), ("daemon.lock", "4242\n"), ("empty.lock", "")];
    for (name, text) in theirs {
        std::fs::write(config.directory.join(name), text).unwrap();
    }
    drop(open(&config).await.unwrap());
    for (name, text) in theirs {
        assert_eq!(std::fs::read_to_string(config.directory.join(name)).unwrap(), text, "{name}");
    }
}

#[tokio::test(flavor = "current_thread")]
async fn a_directory_that_others_could_use_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let with = |name: &str| IpcConfig { directory: dir.path().join(name), ..IpcConfig::default() };
    let chmod = |path: &std::path::Path, mode| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    };
    let refused = async |config: &IpcConfig| open(config).await.err().unwrap();
    let wide = with("wide");
    std::fs::create_dir(&wide.directory).unwrap();
    for mode in [0o755, 0o710, 0o701, 0o777] {
        chmod(&wide.directory, mode);
        let e = refused(&wide).await;
        assert_eq!(e.kind(), Kind::Permission);
        assert!(e.remedy().unwrap().contains("chmod 700"), "{e}");
    }
    chmod(&wide.directory, 0o700);
    open(&wide).await.unwrap();
    std::os::unix::fs::symlink(&wide.directory, dir.path().join("link")).unwrap();
    assert_eq!(refused(&with("link")).await.kind(), Kind::Permission);
    std::fs::write(dir.path().join("file"), b"").unwrap();
    assert_eq!(refused(&with("file")).await.kind(), Kind::Permission);

    let shared = IpcConfig { allow_uids: vec![12345], ..with("shared") };
    drop(open(&shared).await.unwrap());
    let mode = std::fs::metadata(&shared.directory).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode, 0o711);
    chmod(&shared.directory, 0o733);
    assert_eq!(refused(&shared).await.kind(), Kind::Permission);
    chmod(&shared.directory, 0o700);
    let e = refused(&shared).await;
    assert!(e.remedy().unwrap().contains("chmod 711"), "{e}");
}

#[tokio::test(flavor = "current_thread")]
async fn names_and_paths_that_cannot_be_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let long = IpcConfig { directory: dir.path().join("x".repeat(100)), ..IpcConfig::default() };
    let e = open(&long).await.err().unwrap();
    assert_eq!(e.kind(), Kind::Invalid);
    assert!(e.remedy().unwrap().contains("shorter"), "{e}");
    for name in ["", ".", "..", "a/b", ".hidden", "a\0b", "ä"] {
        let named = IpcConfig { name: Some(name.into()), ..config(dir.path()) };
        assert_eq!(open(&named).await.err().unwrap().kind(), Kind::Invalid, "{name:?}");
    }
}

#[tokio::test(flavor = "current_thread")]
async fn probes_say_what_is_found_and_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path());
    let transport = IpcTransport::new(config.clone());
    assert_eq!(transport.probe().await, Readiness::Ready);
    assert!(!config.directory.exists(), "a probe changes nothing");
    let exchange = open(&config).await.unwrap();
    assert_eq!(transport.probe().await, Readiness::Ready);
    let export = exchange.export(seed(PAYLOAD, 9), PATIENCE).await.unwrap();
    let here = export.locator().location.clone();
    let gpu = Location::Gpu { boot_id: "any".into(), uuid: "GPU-0".into() };
    let Readiness::Unavailable { reason, .. } = transport.probe_pair(export.locator(), &gpu).await else {
        panic!("it does not copy from host to GPU")
    };
    assert!(reason.contains("not host to GPU"), "{reason}");
    assert_eq!(transport.probe_pair(export.locator(), &here).await, Readiness::Ready);
    let locator = export.locator().clone();
    drop((export, exchange));
    let Readiness::Unavailable { reason, remedy } = transport.probe_pair(&locator, &here).await else {
        panic!("nobody is there");
    };
    assert!(reason.contains("no such socket") && remedy.contains("exporter"), "{reason}; {remedy}");
    std::fs::set_permissions(&config.directory, std::fs::Permissions::from_mode(0o755)).unwrap();
    let Readiness::Unavailable { reason, remedy } = transport.probe().await else {
        panic!("others may enter")
    };
    assert!(reason.contains("0755") && remedy.contains("chmod"), "{reason}; {remedy}");
    let host = Caps {
        revocable: false,
        enforces_read_only: true,
        source_can_throttle: false,
        outlives_exporter: true,
        poisons_context: false,
        reports_death: true,
        closes_with_export: true,
    };
    assert_eq!(transport.caps(MemoryKind::Host), host);
    let gpu = Caps { enforces_read_only: false, poisons_context: true, ..host };
    assert_eq!(transport.caps(MemoryKind::Gpu), gpu);
    let same = [MemoryKind::Host, MemoryKind::Gpu].map(|kind| (kind, kind));
    assert_eq!(transport.serves(), same);
}

/// An arena that ipc does not serve.
#[derive(Debug)]
struct NoHost;

// SAFETY: it has no memory, and no transport takes it for one that has.
unsafe impl Arena for NoHost {
    fn payload(&self) -> u64 {
        PAYLOAD
    }
    fn capacity(&self) -> u64 {
        0
    }
    fn shards(&self) -> u32 {
        1
    }
    fn location(&self) -> Location {
        Location::Mock { host: 0 }
    }
    fn copy_in(&self, _: u64, _: &[u8]) -> Result<()> {
        Ok(())
    }
    fn copy_out(&self, _: u64, _: &mut [u8]) -> Result<()> {
        Ok(())
    }
    fn fill(&self, _: ByteRange, _: u8) -> Result<()> {
        Ok(())
    }
    fn retire(&self) {}
    fn begin(&self, _: Generation) {}
    fn publish(&self, _: ShardId, _: u64) -> Result<()> {
        Ok(())
    }
    fn observe(&self, _: ShardId) -> Observed {
        Observed { generation: None, progress: 0 }
    }
}
