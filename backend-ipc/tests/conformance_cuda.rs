//! The conformance suite on `ipc-cuda`, GPU arenas, ranks as processes: on a real driver, or on the stand-in that
//! `cargo xtask test` puts in its place.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs)]

use async_trait::async_trait;
use flashboot_backend_ipc::{IpcConfig, IpcTransport};
use flashboot_conformance::{Fixture, WriteAttempt};
use flashboot_core::{
    Arena, ArenaSpec, Caps, HandleExchange, Locator, MemoryKind, Readiness, Result, Transport as _,
};
use flashboot_cuda::{CudaArena, CudaArenaConfig, Device, Want};
use std::{path::Path, sync::Arc};

struct IpcCudaFixture;

/// Ranks go around the GPUs that there are.
fn device(rank: u32) -> Result<Device> {
    let mut devices = Device::all()?;
    let number = rank as usize % devices.len().max(1);
    if number < devices.len() { Ok(devices.swap_remove(number)) } else { Device::find("cuda:0") }
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
        CudaArena::create(&device(rank)?, spec, &config).map(|(arena, _)| arena as _)
    }

    async fn open(&self, _: u32, dir: &Path) -> Result<Arc<dyn HandleExchange>> {
        let config = IpcConfig { directory: dir.to_owned(), ..IpcConfig::default() };
        IpcTransport::default().open(config).await
    }

    /// Nobody is stopped: a handle maps for writing too, for whoever asks the driver (rows `import-read-write` and
    /// `import-in-two-processes` of `cuda-sim/transcript-h200.txt`). Our own importers have no call for it.
    async fn try_write(&self, _: &Locator, _: Arc<dyn Arena>) -> WriteAttempt {
        WriteAttempt::Written
    }
}

fn main() -> std::process::ExitCode {
    flashboot_conformance::main(|| Box::new(IpcCudaFixture))
}
