//! The conformance suite on `ipc-cuda`, GPU arenas, ranks as processes: on a real driver, or on the stand-in that
//! `cargo xtask test` puts in its place.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs)]

use async_trait::async_trait;
use flashboot_backend_ipc::{IpcConfig, IpcTransport};
use flashboot_conformance::{Fixture, WriteAttempt};
use flashboot_core::{
    Arena, ArenaSpec, Caps, HandleExchange, Location, Locator, MemoryKind, Readiness, Result, Transport as _,
};
use flashboot_cuda::{Context, CudaArena, CudaArenaConfig, Device, Want};
use std::{
    path::Path,
    sync::{Arc, OnceLock},
};

/// The GPU's context is made once a rank and kept, as every program does: to make one takes a driver up to a second.
#[derive(Default)]
struct IpcCudaFixture {
    own: OnceLock<Result<Context>>,
    /// Of every GPU, to ask for its free memory.
    all: OnceLock<Result<Vec<Context>>>,
}

/// Ranks go around the GPUs that there are.
fn context(rank: u32) -> Result<Context> {
    let devices = Device::all()?;
    let number = (rank as usize).checked_rem(devices.len()).unwrap_or(0);
    Context::open(&Device::find(&format!("cuda:{number}"))?)
}

#[async_trait]
impl Fixture for IpcCudaFixture {
    fn name(&self) -> &'static str {
        "ipc-cuda"
    }

    fn caps(&self) -> Caps {
        IpcTransport::default().caps(MemoryKind::Gpu)
    }

    fn readiness(&self) -> Readiness {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(
            IpcTransport::new(IpcConfig { device: Some("cuda:0".into()), ..IpcConfig::default() }).probe(),
        )
    }

    fn arena(&self, rank: u32, spec: ArenaSpec) -> Result<Arc<dyn Arena>> {
        let config = CudaArenaConfig { posix_fd: Want::Must, ..CudaArenaConfig::default() };
        let context = self.own.get_or_init(|| context(rank)).clone()?;
        CudaArena::create_in(&context, spec, &config).map(|(arena, _)| arena as _)
    }

    fn free_memory(&self) -> Option<u64> {
        let contexts = self.all.get_or_init(|| Device::all()?.iter().map(Context::open).collect());
        let free = |context: &Context| context.memory().expect("a GPU that works").0;
        Some(contexts.as_ref().expect("GPUs that work").iter().map(free).sum())
    }

    async fn open(&self, _: u32, dir: &Path) -> Result<Arc<dyn HandleExchange>> {
        let config = IpcConfig { directory: dir.to_owned(), ..IpcConfig::default() };
        IpcTransport::default().open(config).await
    }

    async fn probe_pair(&self, locator: &Locator, into: &Location) -> Readiness {
        IpcTransport::default().probe_pair(locator, into).await
    }

    /// Nobody is stopped: a handle maps for writing too, for whoever asks the driver (rows `import-read-write` and
    /// `import-in-two-processes` of `cuda-sim/transcript-h200.txt`). Our own importers have no call for it.
    async fn try_write(&self, _: &Locator, _: Arc<dyn Arena>) -> WriteAttempt {
        WriteAttempt::Written
    }
}

fn main() -> std::process::ExitCode {
    flashboot_conformance::main(|| Box::new(IpcCudaFixture::default()))
}
