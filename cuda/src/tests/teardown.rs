//! Order of teardown, and every error path: whichever call fails, nothing is left behind.

use super::*;

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
