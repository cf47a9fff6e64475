//! What the types of this crate promise together, on the recording driver: order of teardown, every error path,
//! bytes and digests through every way.

use crate::{
    Attach, Context, CudaArena, CudaArenaConfig, CudaMover, HostBytes, Import, MoverConfig, NotKnown, Pinned,
    SourceAlive, Span, Stream, Want,
    error::code,
    fake::{Fake, FakeDevice, GRANULE},
};
use flashboot_core::{
    Arena, ArenaSpec, ByteRange, Code, Error, Generation, Geometry, Kind, Location, Locator, Mover, Observed,
    Pull, Result, ShardId, TransportName,
    control::{self, ControlBlock, Header, Words},
    digest,
};
use proptest::prelude::*;
use std::{
    os::fd::AsFd as _,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

mod arena;
mod mover;
mod teardown;

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
    let config =
        MoverConfig { spin: Duration::ZERO, hot: Duration::from_millis(2), ..MoverConfig::default() };
    let mover = CudaMover::open(import, Arc::clone(&into), alive, config)?;
    Ok((source, into, mover))
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap()
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
