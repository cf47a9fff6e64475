//! Whether `ipc` works here, and why not.

use crate::{config::IpcConfig, dial::dial, directory, exchange::check_locator};
use flashboot_core::{ArenaSpec, Error, Locator, Readiness};
use flashboot_memory::{HostArena, HostArenaConfig, PageKind, boot_id, check_seals};
use std::time::{Duration, Instant};

/// How long `probe_pair` may take.
const PAIR: Duration = Duration::from_secs(2);

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

/// Makes and seals the smallest arena, reads the boot id, and looks at the socket directory.
pub(crate) fn probe(config: &IpcConfig) -> Readiness {
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

/// Dials, shakes hands, checks seals and sizes, and hangs up. Blocking, within two seconds.
pub(crate) fn probe_pair(config: &IpcConfig, peer: &Locator) -> Readiness {
    readiness(check_locator(peer).and_then(|()| dial(peer, &config.policy(), Instant::now(), PAIR)).map(drop))
}
