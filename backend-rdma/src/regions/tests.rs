//! GPU arenas over the stand-in provider, on a GPU's driver or the stand-in for that.

use super::*;
use crate::{
    config::RdmaConfig,
    exchange::RdmaExchange,
    rail::open_all,
    verbs::fake::{Asked, Fake},
};
use flashboot_core::{
    Arena, ArenaSpec, ByteRange, ByteSize, Code, Generation, HandleExchange as _, Pull, ShardId, digest,
};
use flashboot_cuda::{Context, CudaArenaConfig, Device};
use flashboot_memory::{HostArena, HostArenaConfig};
use std::time::Duration;

const DMA_BUF: &str = "ibv_reg_dmabuf_mr";
const ADDRESS: &str = "ibv_reg_mr";
const MIB: u64 = 1 << 20;
const SETUP: Duration = Duration::from_secs(10);
const BLOCK: u64 = 64 << 10;
const PAYLOAD: u64 = 5 * MIB + 777;

fn on_gpu(payload: u64) -> Arc<CudaArena> {
    let context = Context::open(&Device::find("cuda:0").unwrap()).unwrap();
    CudaArena::create_in(&context, ArenaSpec { payload, shards: 1 }, &CudaArenaConfig::default()).unwrap().0
}

/// Registers a GPU arena on device `a`: what was asked for, what stays registered meanwhile, and what came of it.
fn registered(fake: &Fake, arena: &Arc<CudaArena>) -> (Vec<&'static str>, usize, Result<usize>) {
    let counters = Arc::new(Counters::default());
    let rails = open_all(&fake.verbs(), &RdmaConfig::default(), &counters).unwrap();
    let made = Regions::default().of(&Served::Gpu(Arc::clone(arena)), &rails, &counters);
    let asked = fake.registrations().iter().map(|asked| asked.call).collect();
    let made = made.map(|made| (made.local_keys(0).len(), made));
    let regions = made.as_ref().map_or(0, |(keys, _)| *keys as u64);
    assert_eq!(counters.read().regions_registered, regions, "what was given back is not counted");
    (asked, fake.left()[0], made.map(|(keys, _)| keys))
}

fn with(
    max: u64,
    arena: &Arc<CudaArena>,
    refused: &[(&'static str, usize, i32)],
) -> (Fake, Vec<&'static str>, Result<usize>) {
    let fake = Fake::new(&["a"]);
    fake.register_at_most(max);
    for (call, passes, errno) in refused {
        fake.refuse_after(call, *passes, *errno);
    }
    let (asked, left, made) = registered(&fake, arena);
    assert_eq!(left, *made.as_ref().unwrap_or(&0), "what is registered is what is used");
    assert_eq!(fake.left(), [0; 4], "and nothing is when the arena is let go of");
    (fake, asked, made)
}

#[test]
#[ignore = "needs a GPU's driver: cargo xtask test runs it on the stand-in"]
fn gpu_memory_is_registered_by_dma_buf_else_by_address_else_both_errors_are_told() {
    let arena = on_gpu(4 * MIB);
    let with = |refused: &[_]| with(1 << 40, &arena, refused);
    let (_, asked, made) = with(&[]);
    assert_eq!((asked, made), (vec![DMA_BUF], Ok(1)));
    let (_, asked, made) = with(&[(DMA_BUF, 0, 95)]);
    assert_eq!((asked, made), (vec![DMA_BUF, ADDRESS], Ok(1)));
    let (_, asked, made) = with(&[(DMA_BUF, 0, 95), (ADDRESS, 0, 14)]);
    let refused = made.unwrap_err();
    assert_eq!((asked, refused.kind()), (vec![DMA_BUF, ADDRESS], Kind::Unavailable));
    expect_both(&refused, "nvidia-peermem");
    assert!(!refused.to_string().contains("region"), "there is but one: {refused}");
}

/// Both ways and numbers, the last verb with its own, and what helps.
#[track_caller]
fn expect_both(refused: &Error, remedy: &str) {
    assert_eq!((refused.op(), refused.code()), (ADDRESS, Some(Code::Errno(14))), "{refused}");
    for way in ["by dma-buf", "by address"] {
        assert!(refused.detail().contains(way), "{way}: {refused}");
    }
    for code in [95, 14].map(Code::Errno) {
        assert!(refused.to_string().contains(&code.to_string()), "{refused}");
    }
    assert!(refused.remedy().is_some_and(|told| told.contains(remedy)), "{refused}");
}

#[test]
#[ignore = "needs a GPU's driver: cargo xtask test runs it on the stand-in"]
fn gpu_memory_is_registered_part_by_part_where_a_device_takes_no_more() {
    let arena = on_gpu(5 * MIB);
    let (base, capacity) = (arena.device_address(), arena.capacity());
    // A MiB is the largest power of two.
    let parts = capacity.div_ceil(MIB);
    assert!(parts >= 6, "the control block lies past the payload: {capacity}");
    let expected = |call, into_the_buffer: bool| -> Vec<Asked> {
        let of = |start: u64| Asked {
            call,
            offset: if into_the_buffer { start } else { 0 },
            address: base + start,
            len: MIB.min(capacity - start),
        };
        (0..parts).map(|part| of(part * MIB)).collect()
    };
    let (fake, _, made) = with(MIB + 4096, &arena, &[]);
    assert_eq!((fake.registrations(), made), (expected(DMA_BUF, true), Ok(parts as usize)));
    let (fake, _, made) = with(MIB + 4096, &arena, &[(DMA_BUF, 0, 95)]);
    let asked = fake.registrations();
    assert_eq!((asked[0].call, made), (DMA_BUF, Ok(parts as usize)));
    assert_eq!(asked[1..], expected(ADDRESS, false));
}

#[test]
#[ignore = "needs a GPU's driver: cargo xtask test runs it on the stand-in"]
fn gpu_memory_that_is_refused_at_a_later_part_is_given_back_and_tried_the_other_way() {
    let arena = on_gpu(5 * MIB);
    let parts = arena.capacity().div_ceil(MIB) as usize;
    // The first part is taken, the second refused.
    let (fake, asked, made) = with(MIB, &arena, &[(DMA_BUF, 1, 95)]);
    assert_eq!(asked, [vec![DMA_BUF; 2], vec![ADDRESS; parts]].concat(), "all of them one way");
    assert_eq!((made, fake.deregistered()), (Ok(parts), 1 + parts));
    let (fake, asked, made) = with(MIB, &arena, &[(DMA_BUF, 1, 95), (ADDRESS, 2, 14)]);
    assert_eq!(asked, [vec![DMA_BUF; 2], vec![ADDRESS; 3]].concat(), "no further than the refusal");
    assert_eq!(fake.deregistered(), 1 + 2);
    let refused = made.unwrap_err();
    expect_both(&refused, "rdma.devices");
    for number in [2, 3] {
        assert!(refused.detail().contains(&format!("region {number} of {parts}")), "{refused}");
    }
}

/// Two devices: what the first took goes with what the second refuses.
#[test]
#[ignore = "needs a GPU's driver: cargo xtask test runs it on the stand-in"]
fn gpu_memory_that_one_device_refuses_stays_registered_on_none() {
    let arena = on_gpu(5 * MIB);
    let parts = arena.capacity().div_ceil(MIB) as usize;
    let fake = Fake::new(&["a", "b"]);
    fake.register_at_most(MIB);
    fake.refuse_after(DMA_BUF, parts + 1, 95);
    fake.refuse(ADDRESS, 14);
    let (asked, left, made) = registered(&fake, &arena);
    assert_eq!(asked.len(), parts + 2 + 1);
    assert!(made.unwrap_err().to_string().contains(" on b"));
    assert_eq!((left, fake.deregistered()), (0, parts + 1));
}

fn byte(at: u64) -> u8 {
    (at.wrapping_mul(0x9E37_79B9) >> 13) as u8
}

fn filled(arena: &Arc<dyn Arena>) {
    arena.begin(Generation::from_random(5));
    arena.copy_in(0, &(0..PAYLOAD).map(byte).collect::<Vec<_>>()).unwrap();
    arena.publish(ShardId(0), PAYLOAD).unwrap();
}

/// The whole payload from one arena into another, whose devices register so many bytes at once. Without a hash the bytes
/// alone are looked at, as soon as the pull is quiet.
async fn pulled(source: Arc<dyn Arena>, into: Arc<dyn Arena>, (theirs, ours): (u64, u64), hash: Option<u64>) {
    let config = |device: &str| RdmaConfig {
        devices: vec![device.into()],
        message: ByteSize(MIB),
        hash_threads: Some(1),
        ..RdmaConfig::default()
    };
    let fake = Fake::new(&["seed", "reader"]);
    fake.register_at_most(theirs);
    let seed = RdmaExchange::open(&fake.verbs(), &config("seed")).unwrap();
    filled(&source);
    let export = seed.export(source, SETUP).await.unwrap();
    fake.register_at_most(ours);
    let reader = RdmaExchange::open(&fake.verbs(), &config("reader")).unwrap();
    let mover = reader.import(export.locator(), Arc::clone(&into), SETUP).await.unwrap();
    let seen = mover.observe(ShardId(0), PAYLOAD, Duration::ZERO).await.unwrap();
    assert_eq!((seen.progress, seen.generation), (PAYLOAD, Some(Generation::from_random(5))));
    let whole = ByteRange::new(0, PAYLOAD);
    let landed = mover.start(Pull { range: whole, hash }).unwrap().quiesced().await.unwrap();
    let mut found = vec![0; PAYLOAD as usize];
    into.copy_out(0, &mut found).unwrap();
    assert!(found.iter().zip(0..).all(|(found, at)| *found == byte(at)));
    let expected = found.chunks(BLOCK as usize).zip(0..).map(|(block, number)| {
        let range = ByteRange::new(number * BLOCK, (number * BLOCK + BLOCK).min(PAYLOAD));
        digest::merge(PAYLOAD, range, &[digest::piece(PAYLOAD, range.start, block)]).unwrap()
    });
    let expected: Vec<_> = hash.map(|_| expected.collect()).unwrap_or_default();
    assert_eq!(landed.digests, expected);
    // One READ of a MiB, unless a region ends within it: then one of each.
    let cuts = PAYLOAD.div_ceil(theirs.min(ours).min(MIB));
    assert_eq!(reader.counts().reads_posted, cuts);
    drop((mover, reader, export, seed));
    assert_eq!(fake.left(), [0; 4]);
}

fn on_host() -> Arc<dyn Arena> {
    HostArena::create(ArenaSpec { payload: PAYLOAD, shards: 1 }, &HostArenaConfig::default()).unwrap().0
}

fn block_on(pulls: impl Future<Output = ()>) {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(pulls);
}

/// From a GPU, into one, and both, with the source's regions the smaller ones and the reader's.
#[test]
#[ignore = "needs a GPU's driver: cargo xtask test runs it on the stand-in"]
fn gpu_memory_in_several_regions_is_read_and_filled_whole() {
    block_on(async {
        for most in [(MIB, 1 << 40), (1 << 40, MIB), (2 * MIB, MIB / 4), (MIB / 2, 4 * MIB)] {
            pulled(on_gpu(PAYLOAD), on_host(), most, Some(BLOCK)).await;
            pulled(on_host(), on_gpu(PAYLOAD), most, Some(BLOCK)).await;
            pulled(on_gpu(PAYLOAD), on_gpu(PAYLOAD), most, Some(BLOCK)).await;
        }
    });
}

/// The stand-in driver shows what a card wrote behind the flush and not before: a pull that is quiet without it, or that
/// flushes before the last READ has landed or hashes before it flushes, finds old bytes.
#[test]
#[ignore = "needs a GPU's driver: cargo xtask test runs it on the stand-in"]
fn gpu_memory_that_a_card_wrote_is_flushed_before_it_is_hashed_and_before_the_pull_is_quiet() {
    let arena = on_gpu(PAYLOAD);
    let fake = Fake::new(&["a"]);
    let rails = open_all(&fake.verbs(), &RdmaConfig::default(), &Arc::default()).unwrap();
    let made = Regions::default().of(&Served::Gpu(Arc::clone(&arena)), &rails, &Counters::default()).unwrap();
    let (key, at) = (made.local_keys(0)[0], arena.device_address() + 5);
    let seen = || {
        let mut found = [0; 3];
        arena.copy_out(5, &mut found).unwrap();
        found
    };
    fake.write(&[1, 2, 3], key, at);
    assert_eq!(seen(), [0; 3], "the stand-ins tell a flush from none");
    arena.settle_nic_writes().unwrap();
    assert_eq!(seen(), [1, 2, 3]);
    for hash in [None, Some(BLOCK)] {
        block_on(pulled(on_host(), on_gpu(PAYLOAD), (1 << 40, 1 << 40), hash));
    }
}
