//! The conformance suite on `tcp` between two network namespaces, every channel under TLS with a token: ranks as processes,
//! even ones on one host, odd ones on the other.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, missing_docs)]

mod common;

use async_trait::async_trait;
use common::netns::{self, Network};
use flashboot_backend_tcp::{TcpConfig, TcpTransport};
use flashboot_channel::{SecurityConfig, TlsPolicy};
use flashboot_conformance::{Fixture, WriteAttempt};
use flashboot_core::{
    Arena, ArenaSpec, Caps, HandleExchange, Location, Locator, MemoryKind, Readiness, Result, Transport as _,
};
use flashboot_memory::{HostArena, HostArenaConfig};
use std::{
    fs,
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
    process::ExitCode,
    sync::Arc,
};

const TAG: &str = "c";
const HOSTS: u32 = 2;
/// What the suite tells its ranks.
const RANK: &str = "FLASHBOOT_CONFORMANCE_RANK";

/// The rank that this process is; `None` in the parent.
fn rank() -> Option<u32> {
    std::env::var(RANK).ok()?.parse().ok()
}

/// The process that made the network and the token.
fn owner() -> u32 {
    match rank() {
        None => std::process::id(),
        Some(_) => rustix::process::getppid().map_or(0, |pid| pid.as_raw_pid().cast_unsigned()),
    }
}

fn token_file() -> PathBuf {
    std::env::temp_dir().join(format!("fbt-token-{}", owner()))
}

fn config(rank: u32) -> TcpConfig {
    let security =
        SecurityConfig { tls: TlsPolicy::Auto, token_file: Some(token_file()), ..SecurityConfig::default() };
    let version = if rank.is_multiple_of(4) { 6 } else { 4 };
    let bind = netns::address((rank % HOSTS) as usize, version).parse().unwrap();
    TcpConfig { bind, security, ..TcpConfig::default() }
}

struct NamespaceFixture;

#[async_trait]
impl Fixture for NamespaceFixture {
    fn name(&self) -> &'static str {
        "tcp-namespaces"
    }

    fn caps(&self) -> Caps {
        TcpTransport::default().caps(MemoryKind::Host)
    }

    fn readiness(&self) -> Readiness {
        match netns::missing() {
            None => Readiness::Ready,
            Some(reason) => {
                Readiness::Unavailable { reason, remedy: "run the tests as root, with iproute2".into() }
            }
        }
    }

    fn arena(&self, _: u32, spec: ArenaSpec) -> Result<Arc<dyn Arena>> {
        HostArena::create(spec, &HostArenaConfig::default()).map(|(arena, _)| arena as _)
    }

    async fn open(&self, rank: u32, _: &Path) -> Result<Arc<dyn HandleExchange>> {
        TcpTransport::default().open(config(rank)).await
    }

    async fn probe_pair(&self, locator: &Locator, into: &Location) -> Readiness {
        TcpTransport::new(config(rank().unwrap())).probe_pair(locator, into).await
    }

    async fn try_write(&self, locator: &Locator, _: Arc<dyn Arena>) -> WriteAttempt {
        // Without the token nobody comes as far as a frame.
        let endpoint = locator.endpoint.parse().unwrap();
        let how = flashboot_channel::Dial {
            purpose: flashboot_channel::Purpose::new("tcp").unwrap(),
            timeout: 5 * common::SECOND,
            liveness: flashboot_channel::Liveness::default(),
        };
        let stranger = flashboot_channel::dial(&endpoint, &flashboot_channel::Security::default(), how).await;
        let Err(refused) = stranger else { return WriteAttempt::Written };
        assert_eq!(refused.kind(), flashboot_core::Kind::Permission, "{refused}");
        WriteAttempt::Refused(refused.to_string())
    }
}

fn main() -> ExitCode {
    if let Some(rank) = rank() {
        // Every thread of this process is started by this one.
        netns::enter(owner(), TAG, (rank % HOSTS) as usize);
        return flashboot_conformance::main(|| Box::new(NamespaceFixture));
    }
    let network = netns::missing().is_none().then(|| {
        let token: String = common::random::<16>().iter().map(|byte| format!("{byte:02x}")).collect();
        let mut file =
            fs::File::options().write(true).create_new(true).mode(0o600).open(token_file()).unwrap();
        std::io::Write::write_all(&mut file, token.as_bytes()).unwrap();
        Network::new(TAG, HOSTS as usize, netns::FAIR)
    });
    let code = flashboot_conformance::main(|| Box::new(NamespaceFixture));
    drop(network);
    let _ = fs::remove_file(token_file());
    code
}
