//! Whether `imex` works here, and why not: by trying.

use crate::{config::ImexConfig, error, exchange};
use flashboot_core::{Location, Locator, Readiness};
use flashboot_cuda::probe;

/// Climbs the ladder up to an exported fabric handle. Blocking, bounded by the configuration.
pub(crate) fn probe(config: &ImexConfig) -> Readiness {
    probe::verdict(&probe::ladder(&config.device, config.probe), probe::FABRIC)
}

/// Maps the peer's memory on the GPU at `into` and reads its control block's header. Blocking, as long as the driver
/// does.
pub(crate) fn pair(peer: &Locator, into: &Location) -> Readiness {
    let trial = exchange::check_locator(peer, into)
        .and_then(|()| probe::pair(into, peer, |context| exchange::map(context, peer)));
    match trial {
        Ok(()) => Readiness::Ready,
        Err(e) => error::unavailable(&e),
    }
}
