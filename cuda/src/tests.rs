//! What the types of this crate promise together, on the recording driver: order of teardown, every error path,
//! bytes and digests through every way.

use crate::{
    Context, CudaArena, CudaArenaConfig, CudaMover, HostBytes, Import, MoverConfig, NotKnown, Pinned,
    SourceAlive, Stream, Want,
    error::code,
    fake::{Fake, FakeDevice, GRANULE},
};
use flashboot_core::{
    Arena, ArenaSpec, ByteRange, Code, Error, Generation, Geometry, Kind, Location, Locator, Mover, Pull,
    Result, ShardId, TransportName, digest,
};
use proptest::prelude::*;
use std::{
    os::fd::AsFd as _,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

const BLOCK: u64 = 64 << 10;
const GENERATION: u64 = 77;

fn spec(payload: u64) -> ArenaSpec {
    ArenaSpec { payload, shards: 2 }
}

fn arena(context: &Context, payload: u64) -> Arc<CudaArena> {
    CudaArena::create_in(context, spec(payload), &CudaArenaConfig::default()).unwrap().0
}

fn locator(arena: &CudaArena) -> Locator {
    Locator {
        transport: TransportName::Ipc,
        generation: Generation::from_random(GENERATION),
        payload: arena.payload(),
        capacity: arena.capacity(),
        shards: arena.shards(),
        location: arena.location(),
        endpoint: String::new(),
    }
}

fn pattern(len: u64, seed: u64) -> Vec<u8> {
    (0..len).map(|i| (i.wrapping_mul(0x9e37_79b9).wrapping_add(seed) >> 7) as u8).collect()
}

fn expected(bytes: &[u8], block: u64) -> Vec<flashboot_core::BlockDigest> {
    let geometry = Geometry::new(bytes.len() as u64, block, block, 1).unwrap();
    bytes.chunks(block as usize).enumerate().map(|(i, b)| digest::block(&geometry, i as u64, b)).collect()
}

/// A filled source, the arena for its clone, and the hop between them.
type Hop = (Arc<CudaArena>, Arc<CudaArena>, CudaMover);

fn hop(context: &Context, payload: u64, alive: Arc<dyn SourceAlive>) -> Result<Hop> {
    hop_from(true, context, payload, alive)
}

fn hop_from(another_gpu: bool, context: &Context, payload: u64, alive: Arc<dyn SourceAlive>) -> Result<Hop> {
    let config = CudaArenaConfig { bounce: 8 << 10, ..CudaArenaConfig::default() };
    let (source, _) = CudaArena::create_in(context, spec(payload), &config)?;
    source.begin(Generation::from_random(GENERATION));
    source.copy_in(0, &pattern(payload, 1))?;
    let (into, _) = CudaArena::create_in(context, spec(payload), &config)?;
    let fd = source.export_fd()?;
    let mut locator = locator(&source);
    if another_gpu {
        locator.location = Location::Gpu { boot_id: "here".into(), uuid: "GPU-another".into() };
    }
    let import = Import::from_fd(context, fd.as_fd(), &locator)?;
    let config = MoverConfig { spin: Duration::ZERO, ..MoverConfig::default() };
    let mover = CudaMover::open(import, Arc::clone(&into), alive, config)?;
    Ok((source, into, mover))
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap()
}

/// Everything the crate does with a GPU, once.
fn life(context: &Context) -> Result<()> {
    let payload = 300_000;
    let (source, into, mover) = hop(context, payload, Arc::new(NotKnown))?;
    source.publish(ShardId(0), payload)?;
    runtime().block_on(async {
        mover.observe(ShardId(0), payload, Duration::from_secs(5)).await?;
        for start in (0..payload).step_by(2 * BLOCK as usize) {
            let range = ByteRange::new(start, (start + 2 * BLOCK).min(payload));
            mover.start(Pull { range, hash: Some(BLOCK) })?.quiesced().await?;
        }
        mover.observe(ShardId(0), 0, Duration::ZERO).await
    })?;
    drop(mover);
    into.digests(ByteRange::new(0, payload), 1 << 20)?;
    let stream = Arc::new(Stream::new(context)?);
    let host = HostBytes::Pinned(Arc::new(Pinned::new(context, 5000)?));
    into.upload(&stream, 100, &host, 0, 5000)?.wait()?;
    into.fill(ByteRange::new(0, payload), 3)?;
    let mut back = vec![0; payload as usize];
    into.copy_out(0, &mut back)
}

/// The hop's thread drops what it holds on its own time.
fn leaks(fake: &Fake) -> Vec<String> {
    for _ in 0..2000 {
        if fake.leaks().is_empty() {
            return Vec::new();
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    fake.leaks()
}

#[test]
fn a_whole_life_leaves_nothing_behind() {
    let fake = Fake::new();
    life(&fake.context()).unwrap();
    assert_eq!(leaks(&fake), Vec::<String>::new());
}

#[test]
fn whichever_call_fails_everything_made_before_it_is_torn_down() {
    let fake = Fake::new();
    life(&fake.context()).unwrap();
    assert_eq!(leaks(&fake), Vec::<String>::new());
    let total = fake.calls().len();
    assert!(total > 200, "{total} calls");
    let mut errors = 0;
    for n in 0..total {
        let fake = Fake::new();
        let context = fake.context();
        fake.fail_any(n, code::INVALID_VALUE);
        errors += usize::from(life(&context).is_err());
        drop(context);
        assert_eq!(leaks(&fake), Vec::<String>::new(), "call {n} failed: {:?}", fake.calls().get(n));
    }
    // The rest are calls of teardown, and the kernel's, which the host makes up for.
    assert!(errors > total / 2, "{errors} errors in {total} calls");
}

#[test]
fn a_sticky_error_anywhere_ends_in_errors_and_leaves_nothing_behind() {
    let fake = Fake::new();
    life(&fake.context()).unwrap();
    let total = fake.calls().len();
    for n in (8..total).step_by(7) {
        let fake = Fake::new();
        let context = fake.context();
        fake.fail_any(n, code::NVLINK_UNCORRECTABLE);
        let _ = life(&context);
        drop(context);
        assert_eq!(leaks(&fake), Vec::<String>::new(), "call {n} failed: {:?}", fake.calls().get(n));
    }
}

#[test]
fn teardown_unmaps_then_releases_then_frees_addresses_and_a_failing_step_skips_none() {
    for failing in [None, Some("cuMemUnmap"), Some("cuMemRelease"), Some("cuMemAddressFree")] {
        let fake = Fake::new();
        let arena = arena(&fake.context(), 1000);
        fake.forget_calls();
        if let Some(failing) = failing {
            fake.fail_call(failing, 0, code::INVALID_VALUE);
        }
        drop(arena);
        let calls = fake.calls();
        let steps: Vec<_> = calls.iter().filter(|c| !c.starts_with("cuCtx")).copied().collect();
        let expected = [
            "cuStreamDestroy",
            "cuMemFreeHost",
            "cuMemUnmap",
            "cuMemRelease",
            "cuMemAddressFree",
            "cuDevicePrimaryCtxRelease",
        ];
        assert_eq!(steps, expected);
        assert_eq!(fake.leaks(), Vec::<String>::new());
    }
}

#[test]
fn an_import_is_released_apart_from_the_exporters_memory() {
    let fake = Fake::new();
    let context = fake.context();
    let (source, into, mover) = hop(&context, 1000, Arc::new(NotKnown)).unwrap();
    fake.forget_calls();
    drop(mover);
    for _ in 0..2000 {
        if fake.calls().contains(&"cuMemAddressFree") {
            break;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    let count = |name| fake.calls().iter().filter(|c| **c == name).count();
    assert_eq!((count("cuMemUnmap"), count("cuMemRelease"), count("cuMemAddressFree")), (1, 1, 1));
    drop((source, into, context));
    assert_eq!(leaks(&fake), Vec::<String>::new());
}

#[test]
fn without_an_imex_channel_fabric_is_dropped_and_the_reason_told() {
    let fake = Fake::new();
    fake.refuse_fabric();
    let (arena, report) =
        CudaArena::create_in(&fake.context(), spec(1000), &CudaArenaConfig::default()).unwrap();
    assert!(report.posix_fd && report.gpu_direct_rdma && !report.fabric);
    assert_eq!(report.dropped.len(), 1);
    assert_eq!(report.dropped[0].what, "FABRIC");
    assert!(report.dropped[0].reason.contains("NOT_PERMITTED"), "{report:?}");
    let refused = arena.export_fabric().unwrap_err();
    assert_eq!(refused.kind(), Kind::Unavailable);
    assert!(refused.detail().contains("NOT_PERMITTED"), "{refused}");
    let must = CudaArenaConfig { fabric: Want::Must, ..CudaArenaConfig::default() };
    let refused = CudaArena::create_in(&fake.context(), spec(1000), &must).unwrap_err();
    assert_eq!((refused.kind(), refused.op()), (Kind::Permission, "cuMemCreate"));
    assert_eq!(refused.code(), Some(Code::Cuda(code::NOT_PERMITTED)));
}

#[test]
fn what_the_device_does_not_claim_is_not_asked_for() {
    let fake = Fake::with_devices(vec![FakeDevice { without: vec![128, 110], ..FakeDevice::default() }]);
    let (_, report) = CudaArena::create_in(&fake.context(), spec(1000), &CudaArenaConfig::default()).unwrap();
    let dropped: Vec<_> = report.dropped.iter().map(|d| d.what).collect();
    assert_eq!(dropped, ["FABRIC", "gpuDirectRDMACapable"]);
    let must = CudaArenaConfig { gpu_direct_rdma: Want::Must, ..CudaArenaConfig::default() };
    let refused = CudaArena::create_in(&fake.context(), spec(1000), &must).unwrap_err();
    assert_eq!(refused.kind(), Kind::Unavailable);
}

#[test]
fn too_large_an_arena_is_told_with_what_is_free() {
    let fake = Fake::new();
    let refused =
        CudaArena::create_in(&fake.context(), spec(2 << 30), &CudaArenaConfig::default()).unwrap_err();
    assert_eq!((refused.kind(), refused.op()), (Kind::Exhausted, "cuMemCreate"));
    assert!(refused.detail().contains("536870912 are free"), "{refused}");
    assert_eq!(fake.calls().iter().filter(|c| **c == "cuMemCreate").count(), 1, "nothing lesser is tried");
    for impossible in [spec(u64::MAX), spec(u64::MAX - (1 << 20)), ArenaSpec { payload: 1, shards: 0 }] {
        let refused =
            CudaArena::create_in(&fake.context(), impossible, &CudaArenaConfig::default()).unwrap_err();
        assert_eq!(refused.kind(), Kind::Invalid);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn an_allocation_is_the_payload_rounded_up_and_at_most_one_granule_more(
        payload in 0u64..20_000_000, shards in 1u32..=4096,
    ) {
        let fake = Fake::new();
        let spec = ArenaSpec { payload, shards };
        let (arena, report) = CudaArena::create_in(&fake.context(), spec, &CudaArenaConfig::default()).unwrap();
        let rounded = payload.next_multiple_of(GRANULE);
        prop_assert!(report.capacity.is_multiple_of(GRANULE));
        prop_assert!(report.capacity >= rounded && report.capacity <= rounded + GRANULE);
        prop_assert_eq!(arena.capacity(), report.capacity);
    }

    #[test]
    fn bytes_go_in_and_come_out_and_digests_are_the_hosts(
        payload in 1u64..3_000_000, log_block in 10u32..23, seed: u64, cut in 0.0f64..1.0,
    ) {
        let fake = Fake::new();
        let config = CudaArenaConfig { bounce: 64 << 10, ..CudaArenaConfig::default() };
        let (arena, _) = CudaArena::create_in(&fake.context(), spec(payload), &config).unwrap();
        let bytes = pattern(payload, seed);
        arena.copy_in(0, &bytes).unwrap();
        let from = (cut * payload as f64) as usize;
        let mut back = vec![0; bytes.len() - from];
        arena.copy_out(from as u64, &mut back).unwrap();
        prop_assert!(back == bytes[from..]);
        let block = 1 << log_block;
        let all = expected(&bytes, block);
        prop_assert_eq!(&arena.digests(ByteRange::new(0, payload), block).unwrap(), &all);
        let skip = all.len() / 2;
        let half = ByteRange::new(skip as u64 * block, payload);
        prop_assert_eq!(&arena.digests(half, block).unwrap()[..], &all[skip..]);
        prop_assert!(arena.hash_fallback().is_none());
        // The same through the host.
        prop_assert_eq!(&arena.digests_on_host(half, block).unwrap()[..], &all[skip..]);
    }
}

#[test]
fn a_refused_kernel_is_made_up_for_by_the_host_and_told() {
    for call in ["cuModuleLoadData", "cuModuleGetFunction", "cuLaunchKernel"] {
        let fake = Fake::new();
        let context = fake.context();
        let arena = arena(&context, 100_000);
        let bytes = pattern(100_000, 5);
        arena.copy_in(0, &bytes).unwrap();
        fake.fail_call(call, 0, code::UNSUPPORTED_PTX_VERSION);
        let found = arena.digests(ByteRange::new(0, 100_000), BLOCK).unwrap();
        assert_eq!(found, expected(&bytes, BLOCK));
        let told = arena.hash_fallback().unwrap();
        assert_eq!((told.op(), told.code()), (call, Some(Code::Cuda(code::UNSUPPORTED_PTX_VERSION))));
        drop((arena, context));
        assert_eq!(fake.leaks(), Vec::<String>::new());
    }
}

#[test]
fn bytes_outside_the_payload_are_refused() {
    let arena = arena(&Fake::new().context(), 1000);
    assert_eq!(arena.copy_in(999, &[0; 2]).unwrap_err().kind(), Kind::Invalid);
    assert_eq!(arena.copy_in(u64::MAX, &[0; 2]).unwrap_err().kind(), Kind::Invalid);
    assert_eq!(arena.copy_out(1001, &mut []).unwrap_err().kind(), Kind::Invalid);
    assert_eq!(arena.fill(ByteRange::new(0, 1001), 0).unwrap_err().kind(), Kind::Invalid);
    arena.copy_in(1000, &[]).unwrap();
}

#[test]
fn a_control_word_that_does_not_reach_the_gpu_ends_the_arenas_use() {
    let fake = Fake::new();
    let arena = arena(&fake.context(), 1000);
    arena.begin(Generation::from_random(5));
    fake.fail_call("cuMemcpyHtoDAsync", 0, code::INVALID_VALUE);
    assert_eq!(arena.publish(ShardId(0), 10).unwrap_err().op(), "cuMemcpyHtoDAsync");
    assert_eq!(arena.observe(ShardId(0)).progress, 0, "nothing is published that peers cannot see");
    assert!(arena.copy_in(0, &[1]).is_err());
    assert!(arena.publish(ShardId(0), 20).is_err());
}

#[test]
fn an_empty_payload_is_an_arena_too() {
    let fake = Fake::new();
    let (_source, into, mover) = hop(&fake.context(), 0, Arc::new(NotKnown)).unwrap();
    let landed = runtime().block_on(async {
        mover.start(Pull { range: ByteRange::new(0, 0), hash: Some(1 << 24) }).unwrap().quiesced().await
    });
    assert_eq!(landed.unwrap().digests, []);
    assert_eq!(into.digests(ByteRange::new(0, 0), 1024).unwrap(), []);
}

#[test]
fn what_a_hop_pulls_is_the_sources_and_its_digests_are_found_on_the_way() {
    let fake = Fake::new();
    let payload = 1_000_000;
    let (_source, into, mover) = hop(&fake.context(), payload, Arc::new(NotKnown)).unwrap();
    let bytes = pattern(payload, 1);
    runtime().block_on(async {
        let mut found = Vec::new();
        let chunks: Vec<_> = (0..payload).step_by(4 * BLOCK as usize).collect();
        let start = |at: u64, hash| {
            mover.start(Pull { range: ByteRange::new(at, (at + 4 * BLOCK).min(payload)), hash }).unwrap()
        };
        for pair in chunks.chunks(2) {
            let mut under_way: Vec<_> = pair.iter().map(|at| start(*at, Some(BLOCK))).collect();
            for pull in &mut under_way {
                let landed = pull.quiesced().await.unwrap();
                assert_eq!(pull.quiesced().await.unwrap(), landed, "the answer stays the same");
                found.extend(landed.digests);
            }
        }
        assert_eq!(found, expected(&bytes, BLOCK));
        let landed = start(0, None).quiesced().await.unwrap();
        assert_eq!(landed.digests, []);
    });
    let mut back = vec![0; payload as usize];
    into.copy_out(0, &mut back).unwrap();
    assert!(back == bytes);
}

#[test]
fn a_pull_owns_its_range_until_the_gpu_has_passed_it_whoever_lets_go() {
    let fake = Fake::new();
    let context = fake.context();
    let (source, into, mover) = hop(&context, 1_000_000, Arc::new(NotKnown)).unwrap();
    into.copy_in(0, &[0]).unwrap();
    fake.hold();
    let range = ByteRange::new(0, BLOCK);
    let pull = mover.start(Pull { range, hash: Some(BLOCK) }).unwrap();
    pull.cancel();
    drop(pull);
    assert_eq!(mover.start(Pull { range, hash: None }).err().unwrap().kind(), Kind::Busy);
    assert_eq!(into.copy_in(BLOCK - 1, &[1]).unwrap_err().kind(), Kind::Busy);
    assert_eq!(into.copy_out(0, &mut [0]).unwrap_err().kind(), Kind::Busy);
    drop((mover, into, context));
    std::thread::sleep(Duration::from_millis(20));
    assert!(!fake.calls().contains(&"cuMemUnmap"), "nothing is unmapped under the GPU");
    fake.release();
    drop(source);
    assert_eq!(leaks(&fake), Vec::<String>::new());
}

#[test]
fn a_cancelled_pull_that_landed_says_so() {
    let fake = Fake::new();
    let (_source, _into, mover) = hop(&fake.context(), 100_000, Arc::new(NotKnown)).unwrap();
    let landed = runtime().block_on(async {
        let mut pull = mover.start(Pull { range: ByteRange::new(0, 100_000), hash: None }).unwrap();
        pull.cancel();
        pull.quiesced().await
    });
    assert!(landed.is_ok());
}

#[test]
fn after_a_sticky_error_every_pull_is_refused_with_the_remedy() {
    let fake = Fake::new();
    let context = fake.context();
    let (_source, _into, mover) = hop(&context, 100_000, Arc::new(NotKnown)).unwrap();
    let whole = Pull { range: ByteRange::new(0, 100_000), hash: None };
    fake.fail_call("cuEventQuery", 0, code::NVLINK_UNCORRECTABLE);
    let failed = runtime().block_on(async { mover.start(whole).unwrap().quiesced().await }).unwrap_err();
    for error in [failed, mover.start(whole).err().unwrap(), context.lost().unwrap()] {
        assert_eq!(error.kind(), Kind::SourceLost);
        assert!(error.remedy().is_some_and(|remedy| remedy.contains("restart this process")), "{error}");
    }
}

#[test]
fn a_hop_sees_words_grow_and_a_filling_go() {
    let fake = Fake::new();
    let (source, _into, mover) = hop(&fake.context(), 100_000, Arc::new(NotKnown)).unwrap();
    runtime().block_on(async {
        let seen = mover.observe(ShardId(1), 1, Duration::from_millis(5)).await.unwrap();
        assert_eq!((seen.generation, seen.progress), (Some(mover.generation()), 0));
        let publisher = Arc::clone(&source);
        let later = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(10));
            publisher.publish(ShardId(1), 500).unwrap();
        });
        let seen = mover.observe(ShardId(1), 500, Duration::from_secs(10)).await.unwrap();
        assert_eq!(seen.progress, 500);
        later.join().unwrap();
        assert_eq!(mover.observe(ShardId(2), 0, Duration::ZERO).await.unwrap_err().kind(), Kind::Invalid);
        source.retire();
        let seen = mover.observe(ShardId(1), 1000, Duration::from_secs(10)).await.unwrap();
        assert_eq!(seen.generation, None);
        source.begin(Generation::from_random(6));
        let seen = mover.observe(ShardId(1), 1000, Duration::from_secs(10)).await.unwrap();
        assert_eq!((seen.generation, seen.progress), (Some(Generation::from_random(6)), 0));
    });
}

#[test]
fn looks_are_copies_on_ones_own_gpu_and_where_their_kernel_is_refused() {
    let refusals = [
        (true, None, 0),
        (false, None, 2),
        (true, Some(("cuModuleLoadData", 0)), 2),
        (true, Some(("cuModuleGetFunction", 2)), 2),
        (true, Some(("cuLaunchKernel", 0)), 2),
    ];
    for (another_gpu, refusal, copies) in refusals {
        let fake = Fake::new();
        let context = fake.context();
        if let Some((call, after)) = refusal {
            fake.fail_call(call, after, code::UNSUPPORTED_PTX_VERSION);
        }
        let (source, _into, mover) = hop_from(another_gpu, &context, 100_000, Arc::new(NotKnown)).unwrap();
        source.publish(ShardId(1), 7).unwrap();
        fake.forget_calls();
        let seen = runtime().block_on(mover.observe(ShardId(1), 7, Duration::ZERO)).unwrap();
        assert_eq!((seen.generation, seen.progress), (Some(mover.generation()), 7));
        assert_eq!(fake.calls().iter().filter(|c| **c == "cuMemcpyDtoHAsync").count(), copies);
        assert!(fake.failed());
    }
}

#[derive(Debug, Default)]
struct Dies(AtomicBool);

impl SourceAlive for Dies {
    fn check(&self) -> Result<()> {
        if self.0.load(Ordering::Relaxed) {
            return Err(Error::new(Kind::SourceLost, "socket", "it is gone"));
        }
        Ok(())
    }
}

#[test]
fn a_source_that_died_is_lost_only_for_what_it_had_not_published() {
    let fake = Fake::new();
    let alive = Arc::new(Dies::default());
    let (source, _into, mover) = hop(&fake.context(), 100_000, alive.clone()).unwrap();
    source.publish(ShardId(0), 500).unwrap();
    runtime().block_on(async {
        let killer = Arc::clone(&alive);
        let later = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(10));
            killer.0.store(true, Ordering::Relaxed);
        });
        let lost = mover.observe(ShardId(0), 501, Duration::from_secs(10)).await.unwrap_err();
        assert_eq!(lost.kind(), Kind::SourceLost);
        later.join().unwrap();
        let seen = mover.observe(ShardId(0), 500, Duration::from_secs(10)).await.unwrap();
        assert_eq!(seen.progress, 500);
    });
}

#[test]
fn a_locator_that_does_not_fit_is_refused_before_a_byte_moves() {
    let fake = Fake::new();
    let context = fake.context();
    let source = arena(&context, 100_000);
    source.begin(Generation::from_random(GENERATION));
    let into = arena(&context, 100_000);
    let fd = source.export_fd().unwrap();
    let right = locator(&source);
    let open = |locator: &Locator, into: &Arc<CudaArena>| {
        let import = Import::from_fd(&context, fd.as_fd(), locator)?;
        CudaMover::open(import, Arc::clone(into), Arc::new(NotKnown), MoverConfig::default())
    };
    open(&right, &into).unwrap();
    let kind = |change: fn(&mut Locator)| {
        let mut wrong = right.clone();
        change(&mut wrong);
        open(&wrong, &into).unwrap_err().kind()
    };
    assert_eq!(kind(|l| l.capacity += GRANULE), Kind::Mismatch);
    assert_eq!(kind(|l| l.capacity += 1), Kind::Mismatch);
    assert_eq!(kind(|l| l.capacity = 0), Kind::Mismatch);
    assert_eq!(kind(|l| l.shards = 1), Kind::Mismatch);
    assert_eq!(kind(|l| l.shards = 0), Kind::Mismatch);
    assert_eq!(kind(|l| l.shards = u32::MAX), Kind::Mismatch);
    assert_eq!(kind(|l| l.payload = u64::MAX), Kind::Mismatch);
    assert_eq!(kind(|l| l.payload = 99_999), Kind::Mismatch);
    assert_eq!(kind(|l| l.generation = Generation::from_random(1)), Kind::StaleGeneration);
    let smaller = arena(&context, 99_999);
    assert_eq!(open(&right, &smaller).unwrap_err().kind(), Kind::Mismatch);
    let elsewhere = arena(&Fake::new().context(), 100_000);
    assert_eq!(open(&right, &elsewhere).unwrap_err().kind(), Kind::Mismatch);
    // A payload that ends in another 64 KiB has its block elsewhere: what is found there is none.
    let mut far = right.clone();
    far.payload = 200_000;
    assert_eq!(open(&far, &arena(&context, 200_000)).unwrap_err().kind(), Kind::Corrupt);
}

#[test]
fn a_fabric_handle_is_imported_like_a_descriptor() {
    let fake = Fake::new();
    let context = fake.context();
    let source = arena(&context, 1000);
    source.begin(Generation::from_random(GENERATION));
    source.dma_buf().unwrap();
    let handle = source.export_fabric().unwrap();
    let import = Import::from_fabric(&context, &handle, &locator(&source)).unwrap();
    CudaMover::open(import, arena(&context, 1000), Arc::new(NotKnown), MoverConfig::default()).unwrap();
}

#[test]
fn an_arena_is_recognised_behind_the_contract() {
    let arena: Arc<dyn Arena> = arena(&Fake::new().context(), 1000);
    assert!(CudaArena::from_arena(&arena).is_some());
    assert!(matches!(arena.location(), Location::Gpu { uuid, .. } if uuid.starts_with("GPU-0707")));
}

#[test]
fn an_upload_owns_its_range_and_lands() {
    let fake = Fake::new();
    let context = fake.context();
    let arena = arena(&context, 10_000);
    let stream = Arc::new(Stream::new(&context).unwrap());
    let mut pinned = Pinned::new(&context, 5000).unwrap();
    pinned.as_mut_slice().copy_from_slice(&pattern(5000, 3));
    let host = HostBytes::Pinned(Arc::new(pinned));
    fake.hold();
    let upload = arena.upload(&stream, 100, &host, 1000, 4000).unwrap();
    assert!(!upload.is_done().unwrap());
    assert_eq!(arena.upload(&stream, 0, &host, 0, 101).unwrap_err().kind(), Kind::Busy);
    fake.release();
    upload.wait().unwrap();
    let mut back = vec![0; 4000];
    arena.copy_out(100, &mut back).unwrap();
    assert_eq!(back, pattern(5000, 3)[1000..]);
    for (offset, at, len) in [(9_999, 0, 2), (0, 4000, 1001), (u64::MAX, 0, 1), (0, usize::MAX, 2)] {
        assert_eq!(arena.upload(&stream, offset, &host, at, len).unwrap_err().kind(), Kind::Invalid);
    }
    let other = Arc::new(Stream::new(&Fake::new().context()).unwrap());
    assert_eq!(arena.upload(&other, 0, &host, 0, 1).unwrap_err().kind(), Kind::Invalid);
}

#[test]
fn every_failure_asked_for_happens() {
    let fake = Fake::new();
    fake.fail_call("cuStreamCreate", 0, code::OUT_OF_MEMORY);
    assert_eq!(Stream::new(&fake.context()).unwrap_err().kind(), Kind::Exhausted);
    assert!(fake.failed());
}
