//! One clock for all ranks of one host.

use rustix::time::{ClockId, clock_gettime};
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
            Self::Host => read(ClockId::Monotonic),
            Self::Runtime(zero) => zero.elapsed(),
        }
    }

    /// Processor time this rank has used; nothing where ranks share a process.
    pub(crate) fn processor(self) -> Duration {
        match self {
            Self::Host => read(ClockId::ProcessCPUTime),
            Self::Runtime(_) => Duration::ZERO,
        }
    }
}

fn read(clock: ClockId) -> Duration {
    let now = clock_gettime(clock);
    // Neither part of these clocks is ever negative.
    Duration::new(u64::try_from(now.tv_sec).unwrap_or(0), u32::try_from(now.tv_nsec).unwrap_or(0))
}
