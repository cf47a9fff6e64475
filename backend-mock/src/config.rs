//! How the simulated network behaves.

use crate::{Bug, Fault};
use std::time::Duration;

/// The behaviour of one [`crate::Network`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MockConfig {
    /// Time from a pull's start to its first byte, and of one look at a control block.
    pub latency: Duration,
    /// Bytes per second of one pull.
    pub rate: u64,
    /// What goes wrong.
    pub faults: Vec<Fault>,
    /// A planted defect, for the suite that must find it.
    pub bug: Option<Bug>,
}

impl Default for MockConfig {
    /// 10 µs, 10 GB/s, no faults.
    fn default() -> Self {
        Self { latency: Duration::from_micros(10), rate: 10_000_000_000, faults: Vec::new(), bug: None }
    }
}

impl MockConfig {
    /// How long `bytes` take.
    pub(crate) fn time_of(&self, bytes: u64) -> Duration {
        Duration::from_secs_f64(bytes as f64 / self.rate.max(1) as f64)
    }
}
