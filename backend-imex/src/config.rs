//! How to open an endpoint.

use std::time::Duration;

/// How to open an `imex` endpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImexConfig {
    /// The GPU that probes try, as [`flashboot_cuda::Device::find`] reads it.
    pub device: String,
    /// How long a probe may take: a driver sets the GPU up at its first use.
    pub probe: Duration,
}

impl Default for ImexConfig {
    /// The first GPU; 20 s.
    fn default() -> Self {
        Self { device: "cuda:0".to_owned(), probe: Duration::from_secs(20) }
    }
}
