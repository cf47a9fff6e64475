//! What arenas promise: sizes, fall-backs, bytes and digests.

use super::*;

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

#[test]
fn an_owned_range_is_filled_through_pinned_memory_and_read_back() {
    let fake = Fake::new();
    let context = fake.context();
    let (arena, _) = CudaArena::create_in(&context, spec(10_000), &CudaArenaConfig::default()).unwrap();
    let stream = Arc::new(Stream::new(&context).unwrap());
    let range = ByteRange::new(1000, 9000);
    let owned = Arc::new(arena.own(range).unwrap());
    assert_eq!(arena.own(ByteRange::new(8999, 9001)).unwrap_err().kind(), Kind::Busy);

    let mut pinned = Pinned::new(&context, 8000).unwrap();
    pinned.as_mut_slice().iter_mut().enumerate().for_each(|(at, byte)| *byte = at as u8);
    let sent = pinned.as_slice().to_vec();
    let passing = owned.upload(&stream, range, pinned).unwrap();
    drop(owned);
    assert_eq!(arena.own(range).unwrap_err().kind(), Kind::Busy, "the copy under way owns it still");
    let pinned = passing.wait().unwrap();
    let owned = Arc::new(arena.own(range).unwrap());

    let pinned = arena.download(&stream, range, pinned).unwrap().wait().unwrap();
    assert_eq!(pinned.as_slice(), sent);
    let outside = owned.upload(&stream, ByteRange::new(999, 1001), pinned).unwrap_err();
    assert_eq!(outside.kind(), Kind::Invalid);
    let small = Pinned::new(&context, 10).unwrap();
    assert_eq!(arena.download(&stream, range, small).unwrap_err().kind(), Kind::Invalid);
    let small = Pinned::new(&context, 10).unwrap();
    let past = ByteRange::new(9999, 10_001);
    assert_eq!(arena.download(&stream, past, small).unwrap_err().kind(), Kind::Invalid);
    drop((arena, owned, stream, context));
    assert_eq!(fake.leaks(), Vec::<String>::new());
}

#[test]
fn a_copy_through_pinned_memory_that_fails_anywhere_leaks_nothing() {
    for failing in 0..12 {
        let fake = Fake::new();
        let context = fake.context();
        let (arena, _) = CudaArena::create_in(&context, spec(10_000), &CudaArenaConfig::default()).unwrap();
        fake.fail_any(failing, code::OUT_OF_MEMORY);
        let copied = (|| {
            let stream = Arc::new(Stream::new(&context)?);
            let owned = Arc::new(arena.own(ByteRange::new(0, 100))?);
            let pinned = owned.upload(&stream, owned.range(), Pinned::new(&context, 100)?)?.wait()?;
            arena.download(&stream, owned.range(), pinned)?.wait().map(drop)
        })();
        // What fails while something is let go of changes no result.
        assert!(copied.is_ok() || fake.failed(), "{failing}");
        assert!(copied.is_err() || failing > 0);
        drop((arena, context));
        assert_eq!(fake.leaks(), Vec::<String>::new(), "{failing}");
    }
}

#[test]
fn what_a_nic_wrote_is_flushed_where_the_hardware_does_not_order_it() {
    // The stand-in answers 1 to an attribute, which is no order, and 0 to those left out.
    let fake = Fake::new();
    let (arena, _) = CudaArena::create_in(&fake.context(), spec(5000), &CudaArenaConfig::default()).unwrap();
    let owned = arena.own(ByteRange::new(0, 5000)).unwrap();
    fake.forget_calls();
    owned.settle_nic_writes().unwrap();
    assert!(fake.calls().contains(&"cuFlushGPUDirectRDMAWrites"));
}

#[test]
fn all_arenas_of_a_gpu_hash_in_one_granule_of_scratch() {
    let fake = Fake::new();
    let context = fake.context();
    let block = 1 << 19;
    let arenas: Vec<_> = (0..3).map(|_| arena(&context, 1_000_000)).collect();
    for (seed, arena) in (0..).zip(&arenas) {
        let bytes = pattern(1_000_000, seed);
        arena.copy_in(0, &bytes).unwrap();
        assert_eq!(arena.digests(ByteRange::new(0, 1_000_000), block).unwrap(), expected(&bytes, block));
    }
    let made = || fake.calls().iter().filter(|call| **call == "cuMemCreate").count();
    assert_eq!(made(), arenas.len() + 1);
    drop(arenas);
    drop(arena(&context, 1_000_000).digests(ByteRange::new(0, 1_000_000), block).unwrap());
    assert_eq!(made(), 6, "it went with the last of them, and came again");
    drop(context);
    assert_eq!(leaks(&fake), Vec::<String>::new());
}

/// Words in host memory, and in which order they and the GPU's were written.
#[derive(Debug)]
struct HostWords(ControlBlock<Shared>, u32);

#[derive(Debug, Clone)]
struct Shared(Arc<Vec<AtomicU64>>);

impl Words for Shared {
    fn load(&self, offset: u64) -> u64 {
        self.0[offset as usize / 8].load(Ordering::SeqCst)
    }
    fn store(&self, offset: u64, value: u64) {
        self.0[offset as usize / 8].store(value, Ordering::SeqCst);
    }
    fn fence(&self) {}
}

impl HostWords {
    fn new(shards: u32) -> Arc<Self> {
        let words = (0..control::size(shards) / 8).map(|_| AtomicU64::new(0)).collect();
        let header = Header { shards, payload: 0 };
        Arc::new(Self(ControlBlock::initialise(Shared(Arc::new(words)), header), shards))
    }
}

// SAFETY: there is no payload, so that no method touches memory.
unsafe impl Arena for HostWords {
    fn payload(&self) -> u64 {
        0
    }
    fn capacity(&self) -> u64 {
        0
    }
    fn shards(&self) -> u32 {
        self.1
    }
    fn location(&self) -> Location {
        Location::Host { boot_id: "here".into(), numa_node: None }
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
    fn retire(&self) {
        self.0.retire();
    }
    fn begin(&self, generation: Generation) {
        self.0.begin(generation);
    }
    fn publish(&self, shard: ShardId, bytes: u64) -> Result<()> {
        self.0.publish(shard, bytes)
    }
    fn observe(&self, shard: ShardId) -> Observed {
        self.0.observe(shard)
    }
}

#[test]
fn words_in_host_memory_keep_step_with_the_gpus() {
    let fake = Fake::new();
    let arena = arena(&fake.context(), 1000);
    let generation = |n| Generation::from_random(n);
    arena.begin(generation(1));
    arena.publish(ShardId(1), 300).unwrap();
    let wrong: Result<Arc<dyn Arena>> = arena.host_words(|| Ok(HostWords::new(3)));
    assert_eq!(wrong.unwrap_err().kind(), Kind::Invalid);
    let words = arena.host_words(|| Ok(HostWords::new(2))).unwrap();
    let both = |shard| (arena.observe(ShardId(shard)), words.observe(ShardId(shard)));
    let seen = |n, progress| {
        let seen = Observed { generation: Some(generation(n)), progress };
        (seen, seen)
    };
    assert_eq!((both(0), both(1)), (seen(1, 0), seen(1, 300)), "made late, they show what was there");
    let again = arena.host_words(|| panic!("made once")).unwrap();
    assert!(Arc::ptr_eq(&words, &again));
    arena.publish(ShardId(0), 500).unwrap();
    assert_eq!(both(0), seen(1, 500));
    assert_eq!(arena.publish(ShardId(0), 1).unwrap_err().kind(), Kind::Invalid);
    assert_eq!(both(0), seen(1, 500), "neither goes back");
    arena.begin(generation(2));
    assert_eq!((both(0), both(1)), (seen(2, 0), seen(2, 0)));
    arena.retire();
    assert_eq!((both(0).0.generation, both(0).1.generation), (None, None));
}

#[test]
fn a_pinned_word_is_not_written_again_before_its_stream_has_passed() {
    let fake = Fake::new();
    let arena = arena(&fake.context(), 1000);
    arena.begin(Generation::from_random(1));
    // As many as there are slots, none waited for.
    (1..=64).for_each(|bytes| arena.publish(ShardId(0), bytes).unwrap());
    fake.fail_call("cuStreamSynchronize", 0, code::OUT_OF_MEMORY);
    assert_eq!(arena.publish(ShardId(0), 65).unwrap_err().kind(), Kind::Exhausted);
    assert!(fake.failed());
    fake.forget_calls();
    arena.retire();
    let calls = fake.calls();
    let of = |name| calls.iter().position(|call| *call == name).unwrap();
    assert!(of("cuStreamSynchronize") < of("cuMemcpyHtoDAsync"), "{calls:?}");
    assert_eq!(arena.publish(ShardId(0), 66).unwrap_err().kind(), Kind::Exhausted, "it is beyond use");
}

#[test]
fn a_hop_whose_words_are_elsewhere_asks_the_gpu_for_none() {
    #[derive(Debug)]
    struct Elsewhere(Arc<CudaArena>);
    impl SourceAlive for Elsewhere {
        fn check(&self) -> Result<()> {
            Ok(())
        }
        fn words(&self, shard: ShardId) -> Option<Observed> {
            Some(self.0.observe(shard))
        }
    }
    let fake = Fake::new();
    let context = fake.context();
    let (source, into) = (arena(&context, 1000), arena(&context, 1000));
    source.begin(Generation::from_random(GENERATION));
    source.publish(ShardId(0), 700).unwrap();
    let fd = source.export_fd().unwrap();
    let import = Import::from_fd(&context, fd.as_fd(), &locator(&source)).unwrap();
    let alive = Arc::new(Elsewhere(Arc::clone(&source)));
    let mover = CudaMover::open(import, into, alive, MoverConfig::default()).unwrap();
    fake.forget_calls();
    runtime().block_on(async {
        let seen = mover.observe(ShardId(0), 700, Duration::from_secs(5)).await.unwrap();
        assert_eq!((seen.generation, seen.progress), (Some(mover.generation()), 700));
        assert!(fake.calls().is_empty(), "{:?}", fake.calls());
        let pull = Pull { range: ByteRange::new(0, 1000), hash: None };
        assert_eq!(mover.start(pull).unwrap().quiesced().await.unwrap().generation, Some(mover.generation()));
        assert!(!fake.calls().contains(&"cuMemcpyDtoHAsync") && !fake.calls().contains(&"cuLaunchKernel"));
        source.retire();
        assert_eq!(mover.start(pull).unwrap().quiesced().await.unwrap().generation, None);
        assert_eq!(mover.observe(ShardId(5), 0, Duration::ZERO).await.unwrap_err().kind(), Kind::Invalid);
    });
}

#[test]
fn an_attached_arena_shows_its_owners_bytes_and_is_not_written() {
    let fake = Fake::new();
    let context = fake.context();
    let payload = 5 * BLOCK + 100;
    let source = arena(&context, payload);
    let fd = source.export_fd().unwrap();
    let attach = |locator: &Locator| CudaArena::attach(&context, fd.as_fd(), locator, Attach::Read, None);
    assert_eq!(attach(&locator(&source)).unwrap_err().kind(), Kind::StaleGeneration, "nothing is there yet");
    source.copy_in(0, &pattern(payload, 1)).unwrap();
    source.begin(Generation::from_random(GENERATION));
    source.publish(ShardId(0), payload).unwrap();
    let elsewhere = Locator {
        location: Location::Gpu { boot_id: "here".into(), uuid: "GPU-another".into() },
        ..locator(&source)
    };
    assert_eq!(attach(&elsewhere).unwrap_err().kind(), Kind::Mismatch);
    let longer = Locator { payload: payload + 1, ..locator(&source) };
    assert_eq!(attach(&longer).unwrap_err().kind(), Kind::Mismatch);
    let kept = Arc::new(());
    let attached = CudaArena::attach(
        &context,
        fd.as_fd(),
        &locator(&source),
        Attach::Read,
        Some(Arc::<()>::clone(&kept) as _),
    )
    .unwrap();
    let mut found = vec![0; payload as usize];
    attached.copy_out(0, &mut found).unwrap();
    assert!(found == pattern(payload, 1));
    let whole = ByteRange::new(0, payload);
    assert_eq!(attached.digests(whole, BLOCK).unwrap(), expected(&found, BLOCK));
    let seen = attached.observe(ShardId(0));
    assert_eq!((seen.generation, seen.progress), (Some(Generation::from_random(GENERATION)), payload));
    let private = arena(&context, payload);
    private.copy_from(&attached, ByteRange::new(0, BLOCK)).unwrap();
    private.copy_from(&attached, ByteRange::new(BLOCK, payload)).unwrap();
    assert_eq!(private.digests(whole, BLOCK).unwrap(), expected(&found, BLOCK));
    assert_eq!(attached.copy_from(&private, whole).unwrap_err().kind(), Kind::Permission);
    assert_eq!(
        private.copy_from(&attached, ByteRange::new(0, payload + 1)).unwrap_err().kind(),
        Kind::Invalid
    );
    drop(private);
    attached.retire();
    attached.begin(Generation::from_random(1));
    assert_eq!(source.observe(ShardId(0)).generation, Some(Generation::from_random(GENERATION)));
    let dyn_arena: Arc<dyn Arena> = Arc::<CudaArena>::clone(&attached);
    for refused in [
        dyn_arena.copy_in(0, &[1]),
        dyn_arena.fill(ByteRange::new(0, 1), 1),
        dyn_arena.publish(ShardId(0), payload),
        attached.own(ByteRange::new(0, 1)).map(drop),
    ] {
        assert_eq!(refused.unwrap_err().kind(), Kind::Permission);
    }
    assert!(attached.export_fd().is_err(), "it is its owner's to export");
    assert_eq!(Arc::strong_count(&kept), 2);
    drop((dyn_arena, attached));
    assert_eq!(Arc::strong_count(&kept), 1);
    drop((source, context));
    assert_eq!(fake.leaks(), Vec::<String>::new());
}

#[test]
fn an_arena_attached_to_be_filled_is_filled_for_its_owner() {
    let fake = Fake::new();
    let context = fake.context();
    let payload = 3 * BLOCK;
    let owner = arena(&context, payload);
    let fd = owner.export_fd().unwrap();
    let filler = CudaArena::attach(&context, fd.as_fd(), &locator(&owner), Attach::Write, None).unwrap();
    filler.copy_in(0, &pattern(payload, 9)).unwrap();
    assert_eq!(filler.publish(ShardId(0), payload).unwrap_err().kind(), Kind::Permission);
    let mut found = vec![0; payload as usize];
    owner.copy_out(0, &mut found).unwrap();
    assert!(found == pattern(payload, 9));
    drop((filler, owner, context));
    assert_eq!(fake.leaks(), Vec::<String>::new());
}
