//! The conformance suite on `tcp-cuda`: GPU and host arenas in turn, so that every pair of memories is a hop; ranks as
//! processes, on a real driver, or on the stand-in that `cargo xtask test` puts in its place.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, missing_docs)]

mod common;

use async_trait::async_trait;
use flashboot_backend_tcp::{TcpConfig, TcpTransport, wire::Lane};
use flashboot_conformance::{Fixture, WriteAttempt};
use flashboot_core::{
    Arena, ArenaSpec, Caps, HandleExchange, Location, Locator, MemoryKind, Readiness, Result, Transport as _,
};
use flashboot_cuda::{Context, CudaArena, CudaArenaConfig, Device};
use flashboot_memory::{HostArena, HostArenaConfig};
use std::{
    path::Path,
    sync::{Arc, OnceLock},
};

/// The GPU's context is made once a rank and kept, as every program does: to make one takes a driver up to a second.
#[derive(Default)]
struct TcpCudaFixture {
    own: OnceLock<Result<Context>>,
    /// Of every GPU there is, for those who ask how much memory is free.
    all: OnceLock<Result<Vec<Context>>>,
}

/// Ranks go around the GPUs that there are.
fn context(rank: u32) -> Result<Context> {
    let devices = Device::all()?;
    let number = (rank as usize).checked_rem(devices.len()).unwrap_or(0);
    Context::open(&Device::find(&format!("cuda:{number}"))?)
}

#[async_trait]
impl Fixture for TcpCudaFixture {
    fn name(&self) -> &'static str {
        "tcp-cuda"
    }

    fn caps(&self) -> Caps {
        TcpTransport::default().caps(MemoryKind::Gpu)
    }

    fn readiness(&self) -> Readiness {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let config = TcpConfig { device: Some("cuda:0".into()), ..TcpConfig::default() };
        runtime.block_on(TcpTransport::new(config).probe())
    }

    /// Of every three ranks one is in host memory: chains pass from GPU to host, host to GPU and GPU to GPU.
    fn arena(&self, rank: u32, spec: ArenaSpec) -> Result<Arc<dyn Arena>> {
        if rank % 3 != 1 {
            let context = self.own.get_or_init(|| context(rank)).clone()?;
            return CudaArena::create_in(&context, spec, &CudaArenaConfig::default())
                .map(|(arena, _)| arena as _);
        }
        HostArena::create(spec, &HostArenaConfig::default()).map(|(arena, _)| arena as _)
    }

    fn free_memory(&self) -> Option<u64> {
        let contexts = self.all.get_or_init(|| Device::all()?.iter().map(Context::open).collect());
        let free = |context: &Context| context.memory().expect("a GPU that works").0;
        Some(contexts.as_ref().expect("GPUs that work").iter().map(free).sum())
    }

    async fn open(&self, _: u32, _: &Path) -> Result<Arc<dyn HandleExchange>> {
        TcpTransport::default().open(TcpConfig::default()).await
    }

    async fn probe_pair(&self, locator: &Locator, into: &Location) -> Readiness {
        TcpTransport::default().probe_pair(locator, into).await
    }

    async fn try_write(&self, locator: &Locator, _: Arc<dyn Arena>) -> WriteAttempt {
        // Every kind of frame there could be, on both lanes, with a body like a read's.
        for kind in 0..=u8::MAX {
            let frame = [&[kind, 0, 0, 0][..], &[0; 20]].concat();
            for (lane, its_own) in [(Lane::Watch, 2), (Lane::Read, 3)] {
                if kind != its_own && !common::ends_over(locator, lane, &frame).await {
                    return WriteAttempt::Written;
                }
            }
        }
        WriteAttempt::Refused("the connection ends over every frame that is neither a look nor a read".into())
    }
}

fn main() -> std::process::ExitCode {
    flashboot_conformance::main(|| Box::new(TcpCudaFixture::default()))
}
