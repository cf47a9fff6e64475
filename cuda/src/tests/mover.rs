//! What hops promise: ownership, looks, losses, refusals.

use super::*;

#[test]
fn what_a_hop_pulls_is_the_sources_and_its_digests_are_found_on_the_way() {
    let fake = Fake::new();
    let payload = 1_000_000;
    let (source, into, mover) = hop(&fake.context(), payload, Arc::new(NotKnown)).unwrap();
    mover.trace().unwrap();
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
        assert_eq!(landed.generation, Some(mover.generation()), "looked at behind the copy");
        let spans = mover.spans();
        let order = |span: &Span| span.copy_begin <= span.copy_end && span.copy_end <= span.end;
        assert_eq!((spans.len(), spans.iter().all(order)), (chunks.len() + 1, true), "{spans:?}");
        source.retire();
        let landed = start(0, Some(BLOCK)).quiesced().await.unwrap();
        assert_eq!(landed.generation, None, "its bytes may be of the next filling");
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
fn a_pull_that_is_forgotten_near_its_end_is_seen_through_all_the_same() {
    let fake = Fake::new();
    let (_source, into, mover) = hop(&fake.context(), 100_000, Arc::new(NotKnown)).unwrap();
    into.copy_in(0, &[0]).unwrap();
    std::mem::forget(mover.start(Pull { range: ByteRange::new(0, 100_000), hash: None }).unwrap());
    let began = Instant::now();
    while into.copy_in(0, &[1]).is_err() {
        assert!(began.elapsed() < Duration::from_secs(20), "nobody gave the range back");
        std::thread::sleep(Duration::from_millis(1));
    }
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
        assert_eq!(error.kind(), Kind::ContextLost);
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
