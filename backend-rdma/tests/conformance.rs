//! The conformance suite on `rdma`, host arenas, ranks as processes. `FLASHBOOT_CONFORMANCE_DEVICES` names the devices that ranks
//! take in turn; without it every rank uses whatever is there.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs)]

use async_trait::async_trait;
use flashboot_backend_rdma::{RdmaConfig, RdmaTransport};
use flashboot_conformance::{Fixture, WriteAttempt};
use flashboot_core::{
    Arena, ArenaSpec, ByteSize, Caps, HandleExchange, Location, Locator, MemoryKind, Readiness, Result,
    Transport as _,
};
use flashboot_memory::{HostArena, HostArenaConfig};
use std::{path::Path, sync::Arc, time::Duration};

struct RdmaFixture;

fn config(rank: u32) -> RdmaConfig {
    let named = std::env::var("FLASHBOOT_CONFORMANCE_DEVICES").unwrap_or_default();
    let devices: Vec<_> = named.split(',').filter(|name| !name.is_empty()).map(str::to_owned).collect();
    let own = devices.get((rank as usize).checked_rem(devices.len()).unwrap_or(0));
    let devices = own.cloned().into_iter().collect();
    // Small messages, so that a chunk is several of them and their completions come sparsely.
    // And patience: an emulated NIC is a thread of a machine that may have other work, and every look is work for it.
    RdmaConfig {
        devices,
        max_rails: 1,
        message: ByteSize(32 << 10),
        ack_timeout: Duration::from_millis(500),
        cancel_grace: Duration::from_secs(5),
        longest_pause: Duration::from_millis(10),
        ..RdmaConfig::default()
    }
}

#[async_trait]
impl Fixture for RdmaFixture {
    fn name(&self) -> &'static str {
        "rdma"
    }

    fn caps(&self) -> Caps {
        RdmaTransport::default().caps(MemoryKind::Host)
    }

    fn readiness(&self) -> Readiness {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(RdmaTransport::new(config(0)).probe())
    }

    fn arena(&self, _: u32, spec: ArenaSpec) -> Result<Arc<dyn Arena>> {
        HostArena::create(spec, &HostArenaConfig::default()).map(|(arena, _)| arena as _)
    }

    async fn open(&self, rank: u32, _: &Path) -> Result<Arc<dyn HandleExchange>> {
        RdmaTransport::default().open(config(rank)).await
    }

    async fn probe_pair(&self, locator: &Locator, into: &Location) -> Readiness {
        RdmaTransport::new(config(1)).probe_pair(locator, into).await
    }

    /// There is nothing to try through the transport's own interface: it has no call that writes, and the keys that a
    /// reader is given are for READs. `a_reader_s_key_does_not_write` of the crate's own tests posts a WRITE with such a
    /// key on the provider, which refuses it.
    async fn try_write(&self, _: &Locator, _: Arc<dyn Arena>) -> WriteAttempt {
        WriteAttempt::Refused("REM_INV_REQ_ERR: queue pair and key are for READs".into())
    }
}

fn main() -> std::process::ExitCode {
    flashboot_conformance::main(|| Box::new(RdmaFixture))
}
