//! One clock for all ranks of one host.

use std::time::Duration;

/// Counts from a moment that all ranks share.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Clock {
    /// `CLOCK_MONOTONIC`: the same in every process of the host.
    Host,
    /// Tokio's, which the mock pauses; it counts from this moment.
    Runtime(tokio::time::Instant),
}

impl Clock {
    pub(crate) fn now(self) -> Duration {
        match self {
            Self::Host => {
                let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
                // Neither part of a monotonic time is ever negative.
                Duration::new(u64::try_from(now.tv_sec).unwrap_or(0), u32::try_from(now.tv_nsec).unwrap_or(0))
            }
            Self::Runtime(zero) => zero.elapsed(),
        }
    }
}
