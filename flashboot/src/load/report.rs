//! The account of a load.

use flashboot_loader::{
    io::IoStats,
    pipeline::PhasesMs,
    source::{Load, LoadReport, Skip, SourceKind, Used},
};
use serde::Serialize;
use std::time::Duration;

/// A rank that is in memory. Times in milliseconds, sizes in bytes, rates in bytes per second.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Loaded {
    /// The kind of source that completed it.
    pub source: Option<SourceKind>,
    /// From the call (a GPU's context was there) to the last byte copied and, where there are digests, verified: reading
    /// tables, connecting and making the arena included.
    pub engine_visible_ms: f64,
    /// Where the time went; phases overlap.
    pub phases_ms: PhasesMs,
    /// Bytes that the rank needs.
    pub bytes_needed: u64,
    /// Bytes asked of files, object stores and peers.
    pub bytes_read: u64,
    /// Bytes that were put into the arena.
    pub bytes_copied: u64,
    /// Bytes needed by the time that an engine sees.
    pub bytes_per_s: f64,
    /// The most bytes of windows and buffers beside the arena at one time.
    pub peak_host_bytes: u64,
    /// Whether every block was compared with a digest: a stock checkpoint alone has none.
    pub verified: bool,
    /// The image's id, where there is an image.
    pub image: Option<String>,
    /// The rank image's name.
    pub rank: String,
    /// Payload bytes.
    pub bytes: u64,
    /// Sources that delivered something, in order.
    pub used: Vec<Used>,
    /// Sources that were passed over or left, in order, and why.
    pub skips: Vec<Skip>,
    /// How many were left in the middle.
    pub failovers: u64,
    /// How files were read.
    pub io: IoStats,
}

impl Loaded {
    pub(super) fn new(
        load: &Load,
        done: LoadReport,
        visible: Duration,
        (bytes_needed, bytes_read): (u64, u64),
        io: IoStats,
    ) -> Self {
        let wanted = load.wanted();
        Self {
            source: done.source,
            engine_visible_ms: visible.as_secs_f64() * 1e3,
            phases_ms: done.phases,
            bytes_needed,
            bytes_read,
            bytes_copied: done.used.iter().map(|used| used.bytes).sum(),
            bytes_per_s: bytes_needed as f64 / visible.as_secs_f64().max(1e-9),
            peak_host_bytes: load.config().budget.peak().saturating_add(io.bounce_peak),
            verified: done.verified,
            image: wanted.image.clone(),
            rank: wanted.rank.clone(),
            bytes: wanted.payload,
            failovers: done.failovers() as u64,
            used: done.used,
            skips: done.skips,
            io,
        }
    }
}
