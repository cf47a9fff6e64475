//! The conformance suite on `tcp`, host arenas, ranks as processes.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, missing_docs)]

mod common;

use async_trait::async_trait;
use flashboot_backend_tcp::{TcpConfig, TcpTransport, wire::Lane};
use flashboot_conformance::{Fixture, WriteAttempt};
use flashboot_core::{
    Arena, ArenaSpec, Caps, HandleExchange, Location, Locator, MemoryKind, Readiness, Result, Transport as _,
};
use flashboot_memory::{HostArena, HostArenaConfig};
use std::{path::Path, sync::Arc};

struct TcpFixture;

#[async_trait]
impl Fixture for TcpFixture {
    fn name(&self) -> &'static str {
        "tcp"
    }

    fn caps(&self) -> Caps {
        TcpTransport::default().caps(MemoryKind::Host)
    }

    fn readiness(&self) -> Readiness {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(TcpTransport::default().probe())
    }

    fn arena(&self, _: u32, spec: ArenaSpec) -> Result<Arc<dyn Arena>> {
        HostArena::create(spec, &HostArenaConfig::default()).map(|(arena, _)| arena as _)
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
    flashboot_conformance::main(|| Box::new(TcpFixture))
}
