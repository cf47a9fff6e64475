//! What came of a simulation.

use crate::site::Port;

/// When one clone was ready.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct CloneTime {
    /// Its number, from 0: also its place in a chain.
    pub index: u32,
    /// From the release until its slowest GPU had everything, in milliseconds.
    pub ms: f64,
    /// Bytes of all its GPUs in that time, a second.
    pub bytes_per_s: f64,
}

/// How much went over a link.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct LinkUse {
    /// Which.
    pub link: String,
    /// Bytes that went over it.
    pub bytes: u64,
    /// Their share of what could have gone over it until the last clone was ready.
    pub used: f64,
}

/// One copy's time on its link.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Span {
    /// The clone (of a gather: the node).
    pub clone: u32,
    /// Which of its GPUs.
    pub rank: u32,
    /// The clone read from; `None`: a seed.
    pub source: Option<u32>,
    /// The chunk's number in its shard.
    pub chunk: u64,
    /// First byte, in milliseconds from the release.
    pub from_ms: f64,
    /// Last byte.
    pub to_ms: f64,
}

/// A simulation's result. Times are from the release, as `flashboot replicate` counts them: what is mapped before is in no
/// figure.
#[derive(Debug, Clone, PartialEq)]
pub struct Outcome {
    /// Bytes of one GPU's image.
    pub image: u64,
    /// Bytes of one copy.
    pub chunk: u64,
    /// Chunks of one GPU's image.
    pub chunks: u64,
    /// Every clone that is alive and has everything, by its number.
    pub clones: Vec<CloneTime>,
    /// Clones that died.
    pub dead: Vec<u32>,
    /// Clones that live and gave up, with why.
    pub failed: Vec<(u32, String)>,
    /// How often a clone went on elsewhere because its source was lost.
    pub moves: u64,
    /// What importing a source takes before the release, in milliseconds.
    pub map_ms: f64,
    /// The most used links, the most used first.
    pub links: Vec<LinkUse>,
    /// Every copy of the first 96 GPUs, where the scenario asks for them.
    pub spans: Vec<Span>,
    /// Bytes that landed on clones.
    pub bytes: u64,
    /// Events that the simulation took.
    pub events: u64,
    /// The most events that waited at once, of everybody together.
    pub pending: usize,
}

/// When the clones were full.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct Filled {
    /// The first clone, in milliseconds.
    pub first_ms: f64,
    /// The last.
    pub last_ms: f64,
    /// Of all.
    pub mean_ms: f64,
}

impl Outcome {
    /// First, last and mean; `None` where no clone has everything.
    pub fn filled(&self) -> Option<Filled> {
        let ms = || self.clones.iter().map(|clone| clone.ms);
        let first_ms = ms().reduce(f64::min)?;
        let last_ms = ms().reduce(f64::max)?;
        Some(Filled { first_ms, last_ms, mean_ms: ms().sum::<f64>() / self.clones.len() as f64 })
    }

    /// The clone's bytes a second; `None` where it is not full.
    pub fn rate_of(&self, clone: u32) -> Option<f64> {
        self.clones.iter().find(|c| c.index == clone).map(|c| c.bytes_per_s)
    }

    /// Mean of the clones' bytes a second; 0 where no clone has everything.
    pub fn mean_rate(&self) -> f64 {
        self.clones.iter().map(|c| c.bytes_per_s).sum::<f64>() / (self.clones.len().max(1)) as f64
    }
}

/// Links that are named, at most.
const NAMED: usize = 16;

/// The most used of `links`, given with their bytes and rate, over `seconds`.
pub(crate) fn most_used(links: impl Iterator<Item = (Port, u64, f64)>, seconds: f64) -> Vec<LinkUse> {
    let mut all: Vec<_> = links
        .map(|(port, bytes, rate)| (port, bytes, bytes as f64 / (rate * seconds).max(f64::MIN_POSITIVE)))
        .collect();
    all.sort_by(|a, b| b.2.total_cmp(&a.2).then(a.0.cmp(&b.0)));
    let named = |(port, bytes, used): (Port, u64, f64)| LinkUse { link: port.name(), bytes, used };
    all.into_iter().take(NAMED).map(named).collect()
}
