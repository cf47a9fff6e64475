//! The arenas that `tcp` reads from and fills.

use crate::transport::SERVES;
use flashboot_core::{Error, Kind, Location, Locator, Result, TransportName, check_served};
pub(crate) use flashboot_cuda::Served;

/// Refuses a locator that memory at `into` cannot follow.
pub(crate) fn check_locator(locator: &Locator, into: &Location) -> Result<()> {
    if locator.transport != TransportName::Tcp {
        let detail = format!("the locator is of the transport {}, not tcp", locator.transport);
        return Err(Error::new(Kind::Mismatch, "import", detail));
    }
    check_served(TransportName::Tcp, SERVES, (locator.location.memory(), into.memory()))
}
