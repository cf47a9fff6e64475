//! Loads into a GPU's memory, on the stand-in driver: the test runs itself again with the stand-in in the driver's place.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, missing_docs)]

use flashboot_core::{Arena, ArenaSpec, ByteRange, ByteSize, Digests, Geometry, Kind};
use flashboot_cuda::{Context, CudaArena, CudaArenaConfig, Device};
use flashboot_loader::{
    budget::Budget,
    io::IoConfig,
    pipeline::{FillConfig, Filling, Full, Phases, fill, push},
    slab::SlabPool,
    source::{ImageSource, Load, Source, Wanted},
};
use flashboot_memory::{Expected, HostArena, HostArenaConfig, ImportedArena};
use libtest_mimic::{Arguments, Trial};
use std::{
    os::fd::AsFd as _,
    path::Path,
    process::{Command, ExitCode},
    sync::Arc,
    time::Duration,
};

const INSIDE: &str = "FLASHBOOT_LOADER_TEST_INSIDE";
const BLOCK: u64 = 64 << 10;
const PAYLOAD: u64 = 21 * BLOCK + 4096;

fn payload() -> Vec<u8> {
    (0..PAYLOAD).map(|i| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as u8).collect()
}

fn digests() -> Digests {
    Digests::of(&Geometry::new(PAYLOAD, BLOCK, BLOCK, 1).unwrap(), &payload())
}

fn spec() -> ArenaSpec {
    ArenaSpec { payload: PAYLOAD, shards: 1 }
}

fn context() -> Context {
    Context::open(&Device::find("cuda:0").unwrap()).unwrap()
}

fn arena(context: &Context) -> Arc<dyn Arena> {
    CudaArena::create_in(context, spec(), &CudaArenaConfig::default()).unwrap().0
}

fn config(budget: u64) -> FillConfig {
    let config = FillConfig::new(&IoConfig { piece: ByteSize(16 << 10), ..IoConfig::default() }).unwrap();
    FillConfig { threads: 4, window: ByteSize(3 * BLOCK), budget: Budget::new(ByteSize(budget)), ..config }
}

fn holds(arena: &dyn Arena, wanted: &[u8]) {
    let mut found = vec![0; wanted.len()];
    arena.copy_out(0, &mut found).unwrap();
    assert!(found == wanted);
}

fn load(config: FillConfig) -> Load {
    let wanted =
        Wanted { image: None, rank: "r".into(), payload: PAYLOAD, digests: Arc::new(digests()).into() };
    let context = context();
    Load::new(wanted, config, move || Ok(arena(&context)))
}

fn an_image_lands_at_its_offsets_within_the_budget_and_is_verified_on_the_gpu() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.img");
    std::fs::write(&path, payload()).unwrap();
    for (limit, windows) in [(1, 2), (4 * 3 * BLOCK, 4), (1 << 30, 8)] {
        let load = load(config(limit));
        let source: Box<dyn Source> = Box::new(ImageSource::new(&path, digests()));
        let (arena, report) = load.run(&[source]).unwrap();
        holds(&*arena, &payload());
        assert!(report.verified && report.phases.pin > 0.0 && report.phases.h2d > 0.0, "{report:?}");
        let budget = &load.config().budget;
        assert!(budget.peak() <= windows * 3 * BLOCK && budget.used() == 0, "{} in flight", budget.peak());
    }
}

fn a_flipped_bit_is_found_on_the_gpu_and_mended_from_the_next_source() {
    let dir = tempfile::tempdir().unwrap();
    let (bad, good) = (dir.path().join("bad.img"), dir.path().join("good.img"));
    std::fs::write(&good, payload()).unwrap();
    let mut flipped = payload();
    flipped[10 * BLOCK as usize] ^= 1;
    std::fs::write(&bad, flipped).unwrap();
    let load = load(config(1 << 30));
    let source = |path: &Path| -> Box<dyn Source> { Box::new(ImageSource::new(path, digests())) };
    let e = load.run(&[source(&bad)]).unwrap_err();
    assert_eq!(e.kind(), Kind::Corrupt);
    let missing = load.filling().unwrap().missing();
    assert!(missing.iter().any(|range| range.start <= 10 * BLOCK && range.end > 10 * BLOCK), "{missing:?}");
    let before: u64 = missing.iter().map(|range| range.len()).sum();
    let (arena, report) = load.run(&[source(&bad), source(&good)]).unwrap();
    holds(&*arena, &payload());
    // How much lies behind the bad block when the bad source gives up is a race; that nothing is filled twice is not.
    let filled: u64 = report.used.iter().map(|used| used.bytes).sum();
    assert_eq!(filled, before, "{report:?}");
    assert!(report.used.last().unwrap().bytes >= BLOCK, "{report:?}");
}

fn full(arena: &Arc<HostArena>) -> Full {
    Full::Own(Arc::clone(arena))
}

fn staged_memory_is_pinned_in_place_and_pushed() {
    let (staged, _) = HostArena::create(spec(), &HostArenaConfig::default()).unwrap();
    staged.copy_in(0, &payload()).unwrap();
    let context = context();
    let filling = Filling::new(arena(&context), Some(Arc::new(digests()))).unwrap();
    let phases = Phases::default();
    assert_eq!(push(&filling, &full(&staged), &config(1), &phases).unwrap().0, PAYLOAD);
    holds(&**filling.arena(), &payload());
    assert!(filling.is_complete() && phases.ms().pin > 0.0 && phases.ms().verify > 0.0);
    assert_eq!(push(&filling, &full(&staged), &config(1), &phases).unwrap().0, 0, "nothing is missing");
    // What was staged wrongly is found on the GPU.
    let other = Filling::new(arena(&context), Some(Arc::new(digests()))).unwrap();
    staged.fill(ByteRange::new(BLOCK, BLOCK + 1), payload()[BLOCK as usize] ^ 1).unwrap();
    assert_eq!(push(&other, &full(&staged), &config(1), &phases).unwrap_err().kind(), Kind::Corrupt);
    assert_eq!(other.missing(), [ByteRange::new(BLOCK, 2 * BLOCK)]);
    let short =
        HostArena::create(ArenaSpec { payload: 4096, shards: 1 }, &HostArenaConfig::default()).unwrap().0;
    assert_eq!(push(&other, &full(&short), &config(1), &phases).unwrap_err().kind(), Kind::Invalid);
    let host = Filling::new(short.clone(), None).unwrap();
    assert_eq!(push(&host, &full(&short), &config(1), &phases).unwrap_err().kind(), Kind::Invalid);
}

fn memory_of_another_process_is_pinned_for_reading_segment_by_segment_and_unpinned_when_asked() {
    let (owner, _) = HostArena::create(spec(), &HostArenaConfig::default()).unwrap();
    owner.copy_in(0, &payload()).unwrap();
    let expected = Expected { payload: PAYLOAD, capacity: owner.capacity(), shards: 1 };
    let import = Arc::new(ImportedArena::map(owner.as_fd().try_clone_to_owned().unwrap(), expected).unwrap());
    let attached = Full::Attached(Arc::clone(&import));
    let context = context();
    let config = FillConfig { segment: ByteSize(4 * BLOCK), ..config(1) };
    let filling = Filling::new(arena(&context), Some(Arc::new(digests()))).unwrap();
    let phases = Phases::default();
    let (bytes, leftover) = push(&filling, &attached, &config, &phases).unwrap();
    assert_eq!((bytes, leftover.segments()), (PAYLOAD, 6));
    holds(&**filling.arena(), &payload());
    assert!(filling.is_complete() && phases.ms().unpin == 0.0, "nothing is unpinned while it copies");
    drop(attached);
    assert!(Arc::strong_count(&import) > 1, "what is pinned stays mapped");
    leftover.unpin(&phases);
    assert!(phases.ms().unpin > 0.0);
    assert_eq!(Arc::strong_count(&import), 1);
    // Its owner may write it meanwhile: what is not what it should be is found on the GPU, and nothing stays pinned.
    owner.fill(ByteRange::new(9 * BLOCK, 9 * BLOCK + 1), payload()[9 * BLOCK as usize] ^ 1).unwrap();
    let other = Filling::new(arena(&context), Some(Arc::new(digests()))).unwrap();
    let attached = Full::Attached(Arc::clone(&import));
    let e = push(&other, &attached, &config, &phases).unwrap_err();
    assert_eq!((e.kind(), e.chunk()), (Kind::Corrupt, Some(9)));
    assert!(!other.is_complete());
    drop(attached);
    assert_eq!(Arc::strong_count(&import), 1);
}

fn pinned_slabs_are_used_again_and_given_back() {
    let pool = SlabPool::new(Budget::new(ByteSize(1 << 20)), Some(context()));
    for _ in 0..5 {
        let mut open = pool.take(4096, Duration::ZERO).unwrap();
        open.as_mut_slice().fill(3);
        let views = open.seal(vec![("a".into(), 0..10)]);
        assert_eq!(views[0].as_slice(), [3; 10]);
    }
    assert_eq!((pool.stats().slabs, pool.stats().allocations), (5, 1));
    pool.release().proved().unwrap();
    assert_eq!(pool.bytes(), 0);
}

fn a_source_that_fails_leaves_no_window_in_flight() {
    struct Failing;
    impl flashboot_loader::pipeline::Producer for Failing {
        fn produce(
            &self,
            _: &mut flashboot_loader::io::Lane,
            unit: ByteRange,
            into: &mut [u8],
            _: &mut flashboot_loader::io::Each<'_>,
        ) -> flashboot_core::Result<()> {
            if unit.start >= 9 * BLOCK {
                return Err(flashboot_core::Error::new(Kind::SourceLost, "test", "gone"));
            }
            into.copy_from_slice(&payload()[unit.start as usize..unit.end as usize]);
            Ok(())
        }
    }
    let context = context();
    let before = context.memory().unwrap().0;
    let filling = Filling::new(arena(&context), Some(Arc::new(digests()))).unwrap();
    let config = config(1 << 30);
    let e = fill(&filling, &Failing, &config, &Phases::default()).unwrap_err();
    assert_eq!((e.kind(), config.budget.used()), (Kind::SourceLost, 0));
    // Whoever it was that stopped, what had landed is right.
    for range in filling.present() {
        let mut found = vec![0; range.len() as usize];
        filling.arena().copy_out(range.start, &mut found).unwrap();
        assert!(found == payload()[range.start as usize..range.end as usize]);
    }
    drop(filling);
    assert_eq!(context.memory().unwrap().0, before, "the GPU has its memory back");
}

macro_rules! trials {
    ($($name:ident),* $(,)?) => { vec![$(Trial::test(stringify!($name), || { $name(); Ok(()) })),*] };
}

fn main() -> ExitCode {
    if std::env::var_os(INSIDE).is_some() {
        let trials = trials![
            an_image_lands_at_its_offsets_within_the_budget_and_is_verified_on_the_gpu,
            a_flipped_bit_is_found_on_the_gpu_and_mended_from_the_next_source,
            staged_memory_is_pinned_in_place_and_pushed,
            memory_of_another_process_is_pinned_for_reading_segment_by_segment_and_unpinned_when_asked,
            pinned_slabs_are_used_again_and_given_back,
            a_source_that_fails_leaves_no_window_in_flight,
        ];
        // One at a time: one of them counts the GPU's memory.
        let arguments = Arguments { test_threads: Some(1), ..Arguments::from_args() };
        return libtest_mimic::run(&arguments, trials).exit_code();
    }
    let place = tempfile::tempdir().unwrap();
    let program = std::env::current_exe().unwrap();
    let library = program.parent().unwrap().join("libflashboot_cuda_sim.so");
    assert!(library.exists(), "{} was not built", library.display());
    std::os::unix::fs::symlink(library, place.path().join("libcuda.so.1")).unwrap();
    std::fs::create_dir(place.path().join("state")).unwrap();
    let status = Command::new(program)
        .args(std::env::args_os().skip(1))
        .env(INSIDE, "1")
        .env_remove("CUDA_VISIBLE_DEVICES")
        .env("LD_LIBRARY_PATH", place.path())
        .env("FLASHBOOT_CUDA_SIM_DIR", place.path().join("state"))
        .status()
        .unwrap();
    ExitCode::from(u8::try_from(status.code().unwrap_or(1)).unwrap_or(1))
}
