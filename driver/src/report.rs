//! What one replication took.

use std::time::Duration;

/// The account of one finished replication. Times are the clone's own.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Report {
    /// Payload bytes that were pulled and kept.
    pub bytes: u64,
    /// Chunks pulled and kept.
    pub chunks: u64,
    /// Blocks whose digest matched; 0 when no digests were asked for.
    pub verified: u64,
    /// Blocks that did not match at first and were pulled again with success.
    pub repaired: u64,
    /// Sources lost on the way.
    pub losses: u32,
    /// Sum of the time to import sources.
    pub map: Duration,
    /// From the first pull's start to the last one's end.
    pub transfer: Duration,
    /// The part of verification that no pull overlapped: from the last byte to the commit.
    pub verify: Duration,
    /// From the call to the commit.
    pub ready: Duration,
}
