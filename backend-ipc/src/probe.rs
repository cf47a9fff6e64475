//! Whether `ipc` works here, and why not.

use crate::{
    arena::check_locator,
    config::IpcConfig,
    dial::{Clock, dial},
    exchange::{map_gpu, map_host},
};
use flashboot_channel::local::directory;
use flashboot_core::{
    ArenaSpec, Error, Kind, Location, Locator, MemoryKind, Readiness, Result, TransportName,
};
use flashboot_cuda::{Context, Device, bounded, probe as gpu};
use flashboot_memory::{HostArena, HostArenaConfig, PageKind, boot_id, check_seals};
use std::time::{Duration, Instant};

/// How long `probe_pair` may wait for its peer.
const PAIR: Duration = Duration::from_secs(2);
/// How long a driver may take: it sets the GPU up at its first use.
pub(crate) const DRIVER: Duration = Duration::from_secs(20);

pub(crate) fn unavailable(e: &Error) -> Readiness {
    let remedy = e.remedy().unwrap_or("see the reason").to_owned();
    let reason = match e.peer() {
        Some(peer) => format!("{}: {} (peer {peer})", e.op(), e.detail()),
        None => format!("{}: {}", e.op(), e.detail()),
    };
    let reason = match e.code() {
        Some(code) => format!("{reason}: {code}"),
        None => reason,
    };
    Readiness::Unavailable { reason, remedy }
}

fn readiness(outcome: Result<(), Error>) -> Readiness {
    match outcome {
        Ok(()) => Readiness::Ready,
        Err(e) => unavailable(&e),
    }
}

/// Reads the boot id, looks at the socket directory, and makes what readers are given: the smallest sealed arena, or a
/// granule of the memory of the GPU that is configured.
pub(crate) fn probe(config: &IpcConfig) -> Readiness {
    if let Some(device) = &config.device {
        let gpu = gpu::verdict(&gpu::ladder(device, DRIVER), gpu::POSIX_FD);
        if gpu != Readiness::Ready {
            return gpu;
        }
    }
    let trial = || {
        boot_id()?;
        let arena_config = HostArenaConfig { pages: PageKind::Base, ..HostArenaConfig::default() };
        let (arena, _) = HostArena::create(ArenaSpec { payload: 0, shards: 1 }, &arena_config)?;
        check_seals(&*arena)?;
        directory::usable(&config.directory).map_err(|e| {
            if e.remedy().is_some() {
                e
            } else {
                e.with_remedy("choose a socket directory that this user can make")
            }
        })
    };
    readiness(trial())
}

/// Dials, shakes hands, checks sizes, maps what comes and checks its seals, or reads its control block over the fabric,
/// and hangs up. Blocking: two seconds for the peer, and as long as the driver takes.
pub(crate) fn probe_pair(config: &IpcConfig, peer: &Locator, into: &Location) -> Readiness {
    let trial = || {
        check_locator(peer, into)?;
        let dialled = dial(peer, &config.policy(), Clock::new(Instant::now(), PAIR, &peer.endpoint))?;
        match into.memory() {
            MemoryKind::Gpu => gpu::pair(into, peer, |context| map_gpu(context, &dialled, peer)),
            _ => map_host(dialled.descriptor, peer).map(drop),
        }
    };
    readiness(trial())
}

/// What an import took.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ImportCost {
    /// Dialling, mapping, and reading the control block.
    pub total: Duration,
    /// Of it, inside the driver's calls: import, reserve, map, set access.
    pub driver: Duration,
}

/// Imports GPU memory on `device` as a clone would, but without an arena to fill, and lets it go: what set-up costs, also
/// of memory that two arenas of its size have no room in.
///
/// # Errors
/// As for an import.
pub async fn measure_import(locators: &[Locator], device: &Device, timeout: Duration) -> Result<ImportCost> {
    let locator = locators.iter().find(|locator| locator.transport == TransportName::Ipc).cloned();
    let none = || Error::new(Kind::Unavailable, "import", "the peer offers no ipc");
    let (locator, device) = (locator.ok_or_else(none)?, device.clone());
    bounded("import", "mapping the peer's memory", timeout, move || {
        let context = Context::open(&device)?;
        let began = Instant::now();
        let config = IpcConfig::default();
        let dialled = dial(&locator, &config.policy(), Clock::new(began, timeout, &locator.endpoint))?;
        let import = map_gpu(&context, &dialled, &locator)?;
        import.check_source()?;
        Ok(ImportCost { total: began.elapsed(), driver: import.driver_calls() })
    })
    .await
}
