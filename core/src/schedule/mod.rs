//! Who reads what from whom, and when, as values.
//!
//! A [`Schedule`] says for every rank which shards it holds from the start and which it reads, in order, from
//! which rank (its [`Leg`]s). The async driver, the mock and the simulator all run these same values. One file
//! each: [`broadcast`](self) (star, chain, tree of chains), [`gather`](self) (ring, staggered pulls,
//! whole-chunk ring), [`chunk`](self) (how large a chunk), [`rounds`](self) (when, in the ideal case).

mod broadcast;
mod chunk;
mod gather;
mod rounds;

pub use chunk::{ChunkCosts, auto_chunk};
pub use rounds::{Read, rounds};

use crate::ShardId;
use std::fmt;

/// A participant's number in a schedule. In a broadcast rank 0 is the seed; in a gather rank r owns shard r.
pub type Rank = u32;

/// One part of a rank's work: read all of `shard`, chunk by chunk in order, from `source`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Leg {
    /// The rank to read from.
    pub source: Rank,
    /// The shard to read.
    pub shard: ShardId,
}

/// How much a source must have verified before a reader may take a chunk from it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Gate {
    /// That chunk: readers follow their source chunk by chunk (pipelined).
    #[default]
    Chunk,
    /// The whole shard: store and forward.
    Shard,
}

/// A schedule, by what it is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Schedule {
    /// Every clone pulls from the seed: one hop, but the seed's egress is shared by all.
    Star {
        /// Number of clones.
        clones: u32,
    },
    /// Each clone pulls from its predecessor, chunk by chunk: one reader a link.
    Chain {
        /// Number of clones.
        clones: u32,
    },
    /// Chains of `length` clones whose heads form a tree of `fanout`: for many clones, or unequal links.
    Tree {
        /// Number of clones.
        clones: u32,
        /// Clones in one chain; at least 1.
        length: u32,
        /// Chain heads that read from one chain head; at least 1.
        fanout: u32,
    },
    /// All-gather: each node reads every other shard from its predecessor, chunk by chunk.
    Ring {
        /// Number of nodes, and of shards.
        nodes: u32,
    },
    /// All-gather: each node reads each shard from its owner, in rotated order (the paper's comparison).
    Staggered {
        /// Number of nodes, and of shards.
        nodes: u32,
    },
    /// All-gather by ring in whole shards, store and forward (the paper's comparison).
    WholeChunkRing {
        /// Number of nodes, and of shards.
        nodes: u32,
    },
}

impl Schedule {
    /// Number of ranks that take part, the seed included.
    pub fn ranks(self) -> u32 {
        match self {
            Self::Star { clones } | Self::Chain { clones } | Self::Tree { clones, .. } => {
                clones.saturating_add(1)
            }
            Self::Ring { nodes } | Self::Staggered { nodes } | Self::WholeChunkRing { nodes } => nodes,
        }
    }

    /// Number of shards the payload is cut into.
    pub fn shards(self) -> u32 {
        match self {
            Self::Star { .. } | Self::Chain { .. } | Self::Tree { .. } => 1,
            Self::Ring { nodes } | Self::Staggered { nodes } | Self::WholeChunkRing { nodes } => nodes.max(1),
        }
    }

    /// How far readers follow their sources.
    pub fn gate(self) -> Gate {
        match self {
            Self::WholeChunkRing { .. } => Gate::Shard,
            _ => Gate::Chunk,
        }
    }

    /// The shards `rank` holds before anything is read.
    pub fn holds(self, rank: Rank) -> Vec<ShardId> {
        match self {
            Self::Star { .. } | Self::Chain { .. } | Self::Tree { .. } if rank == 0 => vec![ShardId(0)],
            Self::Star { .. } | Self::Chain { .. } | Self::Tree { .. } => Vec::new(),
            Self::Ring { nodes } | Self::Staggered { nodes } | Self::WholeChunkRing { nodes } => {
                if rank < nodes { vec![ShardId(rank)] } else { Vec::new() }
            }
        }
    }

    /// What `rank` reads, in order. Empty for a seed and for a rank that does not take part.
    pub fn legs(self, rank: Rank) -> Vec<Leg> {
        if rank >= self.ranks() {
            return Vec::new();
        }
        match self {
            Self::Star { .. } => broadcast::star(rank),
            Self::Chain { .. } => broadcast::chain(rank),
            Self::Tree { length, fanout, .. } => {
                broadcast::tree_of_chains(rank, length.max(1), fanout.max(1))
            }
            Self::Ring { nodes } | Self::WholeChunkRing { nodes } => gather::ring(rank, nodes),
            Self::Staggered { nodes } => gather::staggered(rank, nodes),
        }
    }

    /// Hops from the farthest rank to the seed (broadcast), or rounds of the ring (gather): what `auto`
    /// chunks are chosen by.
    pub fn depth(self) -> u32 {
        match self {
            Self::Star { clones } => clones.min(1),
            Self::Chain { clones } => clones,
            Self::Tree { clones, length, fanout } => {
                broadcast::tree_depth(clones, length.max(1), fanout.max(1))
            }
            Self::Ring { nodes } | Self::Staggered { nodes } | Self::WholeChunkRing { nodes } => {
                nodes.saturating_sub(1)
            }
        }
    }
}

impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Star { .. } => "star",
            Self::Chain { .. } => "chain",
            Self::Tree { .. } => "tree",
            Self::Ring { .. } => "ring",
            Self::Staggered { .. } => "staggered",
            Self::WholeChunkRing { .. } => "whole-chunk-ring",
        })
    }
}
