//! The conformance suite on `ipc`, host arenas, ranks as processes.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, missing_docs)]

mod common;

use async_trait::async_trait;
use flashboot_backend_ipc::{IpcConfig, IpcTransport};
use flashboot_conformance::{Fixture, WriteAttempt};
use flashboot_core::{
    Arena, ArenaSpec, Caps, HandleExchange, Location, Locator, MemoryKind, Readiness, Result, Transport as _,
};
use flashboot_memory::{HostArena, HostArenaConfig};
use std::{path::Path, sync::Arc};

struct IpcFixture;

#[async_trait]
impl Fixture for IpcFixture {
    fn name(&self) -> &'static str {
        "ipc"
    }

    fn caps(&self) -> Caps {
        IpcTransport::default().caps(MemoryKind::Host)
    }

    fn readiness(&self) -> Readiness {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(IpcTransport::default().probe())
    }

    fn arena(&self, _: u32, spec: ArenaSpec) -> Result<Arc<dyn Arena>> {
        HostArena::create(spec, &HostArenaConfig::default()).map(|(arena, _)| arena as _)
    }

    async fn open(&self, _: u32, dir: &Path) -> Result<Arc<dyn HandleExchange>> {
        let config = IpcConfig { directory: dir.to_owned(), ..IpcConfig::default() };
        IpcTransport::default().open(config).await
    }

    async fn probe_pair(&self, locator: &Locator, into: &Location) -> Readiness {
        IpcTransport::default().probe_pair(locator, into).await
    }

    async fn try_write(&self, locator: &Locator, _: Arc<dyn Arena>) -> WriteAttempt {
        let through = common::write_through(locator);
        if through.is_empty() {
            WriteAttempt::Refused("write, truncate and a writable mapping, also of the re-opened file".into())
        } else {
            WriteAttempt::Written
        }
    }
}

fn main() -> std::process::ExitCode {
    flashboot_conformance::main(|| Box::new(IpcFixture))
}
