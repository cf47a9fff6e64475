//! A connection that ends while a GPU copies what came by it. A GPU's memory is filled through two pinned buffers: one is
//! received while the other is copied.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, missing_docs)]

mod common;

use common::{
    MIB, Source, expect_seed_in, import,
    relay::{Fate, Relay},
    seed,
};
use flashboot_backend_tcp::TcpConfig;
use flashboot_core::{Arena as _, ArenaSpec, ByteRange, Generation, Pull};
use flashboot_cuda::{Context, CudaArena, CudaArenaConfig, Device};
use std::sync::Arc;

const PAYLOAD: u64 = 8 * MIB + 17;
/// Bytes of a pinned buffer: the most that a connection loses by its end.
const BUFFER: u64 = 512 << 10;

fn on_gpu() -> Arc<CudaArena> {
    let context = Context::open(&Device::find("cuda:0").unwrap()).unwrap();
    let spec = ArenaSpec { payload: PAYLOAD, shards: 1 };
    let (arena, _) = CudaArena::create_in(&context, spec, &CudaArenaConfig::default()).unwrap();
    arena.begin(Generation::from_random(9));
    arena.fill(ByteRange::new(0, PAYLOAD), 0xa5).unwrap();
    arena
}

/// The stand-in is told to be late with every copy, so that the end of a connection finds one pending.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs a GPU's driver: cargo xtask test runs it on the stand-in"]
async fn gpu_memory_is_whole_although_its_connection_ended_while_the_gpu_copied() {
    let arena = seed(PAYLOAD);
    let config = TcpConfig { connections: 1, ..TcpConfig::default() };
    let source = Source::of(&arena, config.clone()).await;
    // In the middle of a buffer, of which the one before it is being copied: within a part, with nothing in place before it,
    // and as the first of a part.
    let ends: [&[u64]; 3] = [
        &[2 * MIB - BUFFER / 2],
        &[2 * MIB + BUFFER / 2, MIB - BUFFER / 2],
        &[BUFFER / 2 + 100, MIB + BUFFER / 2, 3 * MIB - BUFFER / 2],
    ];
    for after in ends {
        for hash in [None, Some(MIB)] {
            let fate = move |number: usize| match number.checked_sub(1).and_then(|end| after.get(end)) {
                Some(bytes) => Fate::ClosedAfter(*bytes),
                None => Fate::Lasts,
            };
            let pull = Pull { range: ByteRange::new(0, PAYLOAD), hash };
            let on_host = import(source.locator(), &common::arena(PAYLOAD), config.clone()).await.unwrap();
            let expected = on_host.start(pull).unwrap().quiesced().await.unwrap();
            let relay = Relay::new(source.locator(), fate).await;
            let into = on_gpu();
            let mover = import(&relay.locator, &into, config.clone()).await.unwrap();
            let landed = mover.start(pull).unwrap().quiesced().await.unwrap();
            expect_seed_in(&*into);
            assert_eq!(landed, expected);
            assert_eq!(
                relay.connections(),
                2 + after.len(),
                "the watch, one to read by, and one for each end"
            );
            // Headers take less than the rest. What was still being copied when its connection ended is not read again.
            let bound = PAYLOAD + after.len() as u64 * BUFFER + (64 << 10);
            let passed = relay.passed();
            assert!((PAYLOAD..bound).contains(&passed), "{after:?}: {passed} of {bound}");
        }
    }
}
