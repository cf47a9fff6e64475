//! What is to be measured.

use crate::{
    config::{Memory, Replicate},
    network::Network,
};
use flashboot_core::{
    BLOCK, Error, Geometry, Kind, Result,
    schedule::{Rank, Schedule},
};
use serde::{Deserialize, Serialize};

/// Everything that one set of processes measures, in order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// The measurements.
    pub stages: Vec<Stage>,
    /// UUIDs of the GPUs that hold the arenas, rank r's the r-th of them around; none: host memory.
    pub gpus: Vec<String>,
    /// Arenas in host memory.
    pub memory: Memory,
    /// What crosses between hosts, as it is configured; between processes of one here.
    pub network: Network,
    /// Transport, limits and deadlines; its sizes and topology are not looked at.
    pub settings: Replicate,
}

/// One measurement, repeated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stage {
    /// Who reads from whom.
    pub shape: Shape,
    /// Payload bytes.
    pub bytes: u64,
    /// Bytes of one copy.
    pub chunk: u64,
    /// Whether every block is hashed on arrival, and compared.
    pub verify: bool,
    /// How often.
    pub repeats: u32,
    /// Whether rank 1 also measures what its GPU allows: one copy, the copies in chunks, the hash; and every rank one copy
    /// while the others copy.
    pub limits: bool,
}

impl Stage {
    /// How its payload is cut.
    ///
    /// # Errors
    /// [`Kind::Invalid`] for chunks that are no whole blocks, and for a schedule without a reader.
    pub fn geometry(&self) -> Result<Geometry> {
        let invalid = |detail: String| Error::new(Kind::Invalid, "bench", detail);
        let schedule = self.shape.schedule();
        if (0..schedule.ranks()).all(|rank| schedule.legs(rank).is_empty()) {
            return Err(invalid(format!("a {} in which nobody reads", self.shape.name())));
        }
        Geometry::new(self.bytes, BLOCK, self.chunk, schedule.shards()).map_err(|e| invalid(e.to_string()))
    }
}

/// A schedule that can be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Shape {
    /// All from the seed.
    Star {
        /// How many.
        clones: u32,
    },
    /// Each from the one before.
    Chain {
        /// How many.
        clones: u32,
    },
    /// All-gather in a ring, in whole shards.
    Ring {
        /// How many.
        nodes: u32,
    },
    /// No replication: rank 1 imports the seed's arena and lets it go, without an arena of its own.
    Import,
}

impl Shape {
    /// The schedule.
    pub fn schedule(self) -> Schedule {
        match self {
            Self::Star { clones } => Schedule::Star { clones },
            Self::Chain { clones } => Schedule::Chain { clones },
            // A shard is published as soon as its chunk is; with one chunk a shard it is the paper's whole-shard ring.
            Self::Ring { nodes } => Schedule::Ring { nodes },
            Self::Import => Schedule::Star { clones: 1 },
        }
    }

    /// As people call it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Star { .. } => "star",
            Self::Chain { .. } => "chain",
            Self::Ring { .. } => "ring",
            Self::Import => "import",
        }
    }
}

impl Plan {
    /// Processes that it takes.
    pub fn ranks(&self) -> Rank {
        self.stages.iter().map(|stage| stage.shape.schedule().ranks()).max().unwrap_or(0)
    }

    /// The UUID of the GPU that holds this rank's arena; `None`: it is in host memory.
    pub fn gpu(&self, rank: Rank) -> Option<&str> {
        self.gpus.get(holder(rank, self.gpus.len())?).map(String::as_str)
    }
}

/// Which of so many GPUs holds this rank's arena; none of none.
pub(super) fn holder(rank: Rank, gpus: usize) -> Option<usize> {
    usize::try_from(rank).ok()?.checked_rem(gpus)
}
