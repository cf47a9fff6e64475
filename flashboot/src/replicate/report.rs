//! The account of one replication: DESIGN's fields for `replicate`, and some beside them.

use super::job::{HopTaken, Job, Mapped, Ready};
use crate::{config::Topology, registry::PassedOver};
use flashboot_core::{TransportName, schedule::Rank};
use serde::Serialize;
use std::{collections::BTreeSet, time::Duration};

/// The account. Times in milliseconds, rates in bytes per second, sizes in bytes.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    /// The image's id.
    pub image: String,
    /// The rank image's name.
    pub rank: String,
    /// What moved the bytes; of several, the first clone's. `None` when no clone had come to choose one.
    pub transport: Option<TransportName>,
    /// Hops that did not get the first transport of `auto`'s order that was allowed.
    pub fallbacks: u32,
    /// Transports that were passed over, each with its reason, once.
    pub passed_over: Vec<PassedOver>,
    /// Who read from whom.
    pub topology: Topology,
    /// Whether seed and clones were processes of their own.
    pub processes: bool,
    /// Whether times are those of a virtual clock (the mock's).
    pub virtual_time: bool,
    /// Payload bytes, of one clone.
    pub bytes: u64,
    /// Bytes of one copy.
    pub chunk_bytes: u64,
    /// Blocks of the payload: what `verified` of a clone must reach.
    pub blocks: u64,
    /// Whether blocks were verified on arrival.
    pub verify: bool,
    /// Start → all mapped.
    pub setup_ms: f64,
    /// Release → last clone ready; `None` when none became ready.
    pub tail_ms: Option<f64>,
    /// The seed.
    pub seed: SeedReport,
    /// The clones, by index.
    pub clones: Vec<CloneReport>,
}

/// What the seed's set-up took.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SeedReport {
    /// The UUID of the GPU that its arena is on; `None`: host memory.
    pub device: Option<String>,
    /// Making its arena, every page faulted in.
    pub arena_ms: f64,
    /// Filling it from disk, every block verified.
    pub load_ms: f64,
}

/// One source a clone read from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Hop {
    /// Its index; 0 is the seed.
    pub source: Rank,
    /// By what.
    pub transport: TransportName,
}

/// One clone.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CloneReport {
    /// Its index, from 1.
    pub index: Rank,
    /// The UUID of the GPU that its arena is on; `None`: host memory.
    pub device: Option<String>,
    /// The index of the source it ended with; 0 is the seed.
    pub source: Rank,
    /// Every source it had, in order.
    pub hops: Vec<Hop>,
    /// Making its arena, every page faulted in (part of set-up).
    pub arena_ms: f64,
    /// Importing its source (part of set-up).
    pub map_ms: f64,
    /// First to last byte.
    pub transfer_ms: Option<f64>,
    /// The part of verification that no transfer overlapped.
    pub verify_ms: Option<f64>,
    /// Release → verified and committed.
    pub ready_ms: Option<f64>,
    /// Bytes ÷ `ready_ms`.
    pub bytes_per_s: Option<f64>,
    /// Processor time from the release to the commit, of all its threads; 0 where ranks share a process.
    pub processor_ms: Option<f64>,
    /// Chunks pulled and kept.
    pub chunks: u64,
    /// Blocks whose digest matched.
    pub verified: u64,
    /// Blocks that did not match at first and were pulled again.
    pub repaired: u64,
    /// Sources lost on the way.
    pub losses: u32,
    /// How often its process was started again, because only a new one could help (its GPU context was lost).
    pub restarts: u32,
    /// It was killed on purpose.
    pub killed: bool,
}

/// What the parent knows of one rank.
#[derive(Debug, Clone, Default)]
pub(crate) struct Known {
    pub(crate) mapped: Option<Mapped>,
    pub(crate) ready: Option<Ready>,
    pub(crate) restarts: u32,
}

pub(crate) fn ms(d: Duration) -> f64 {
    // Whole microseconds: what the clocks are good for.
    (d.as_secs_f64() * 1e6).round() / 1e3
}

/// How the ranks ran.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Setting {
    pub(crate) processes: bool,
    pub(crate) setup: Duration,
    pub(crate) release: Duration,
}

pub(crate) fn report(job: &Job, rank: &str, known: &[Known], setting: Setting) -> Report {
    let Setting { processes, setup, release } = setting;
    let readies = || known.iter().filter_map(|k| k.ready.as_ref());
    let hops = || known.iter().flat_map(taken);
    let passed: BTreeSet<_> = hops().flat_map(|hop| hop.passed.iter().cloned()).collect();
    let seed = known.first().and_then(|k| k.mapped.clone()).unwrap_or_default();
    Report {
        image: job.image.clone(),
        rank: rank.to_owned(),
        transport: hops().next().map(|hop| hop.transport),
        fallbacks: u32::try_from(hops().filter(|hop| !hop.passed.is_empty()).count()).unwrap_or(u32::MAX),
        passed_over: passed.into_iter().collect(),
        topology: job.settings.topology,
        processes,
        virtual_time: !processes,
        bytes: job.bytes,
        chunk_bytes: job.chunk,
        blocks: job.digests.len() as u64,
        verify: job.settings.verify,
        setup_ms: ms(setup),
        tail_ms: readies().map(|ready| ready.at.saturating_sub(release)).max().map(ms),
        seed: SeedReport {
            device: job.gpu(0).map(str::to_owned),
            arena_ms: ms(seed.arena),
            load_ms: ms(seed.load),
        },
        clones: (0..).zip(known).skip(1).map(|(index, known)| clone(job, index, known, release)).collect(),
    }
}

/// Every source that a rank had; of a clone that did not finish the one it was to begin with.
fn taken(known: &Known) -> &[HopTaken] {
    match (&known.ready, &known.mapped) {
        (Some(ready), _) => &ready.hops,
        (None, Some(mapped)) => &mapped.hops,
        (None, None) => &[],
    }
}

fn clone(job: &Job, index: Rank, known: &Known, release: Duration) -> CloneReport {
    let mapped = known.mapped.clone().unwrap_or_default();
    let ready = known.ready.as_ref();
    let planned = job.schedule().legs(index).first().map_or(0, |leg| leg.source);
    let ready_in = ready.map(|ready| ready.at.saturating_sub(release));
    CloneReport {
        index,
        device: job.gpu(index).map(str::to_owned),
        source: ready.and_then(|r| r.hops.last()).map_or(planned, |hop| hop.source),
        hops: taken(known).iter().map(|h| Hop { source: h.source, transport: h.transport }).collect(),
        arena_ms: ms(mapped.arena),
        map_ms: ms(mapped.map),
        transfer_ms: ready.map(|r| ms(r.transfer)),
        verify_ms: ready.map(|r| ms(r.verify)),
        ready_ms: ready_in.map(ms),
        bytes_per_s: ready_in.map(|took| rate(job.bytes, took)),
        processor_ms: ready.map(|r| ms(r.processor)),
        chunks: ready.map_or(0, |r| r.chunks),
        verified: ready.map_or(0, |r| r.verified),
        repaired: ready.map_or(0, |r| r.repaired),
        losses: ready.map_or(0, |r| r.losses),
        restarts: known.restarts,
        killed: job.kill.is_some_and(|kill| kill.rank == index) && ready.is_none(),
    }
}

fn rate(bytes: u64, took: Duration) -> f64 {
    if took.is_zero() { 0.0 } else { (bytes as f64 / took.as_secs_f64()).round() }
}
