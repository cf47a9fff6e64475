//! What loading a model costs each rank, from headers alone: bytes asked for, read and kept, and what that does to
//! pinned memory, with slabs and without.

mod pinned;
mod rank;

use crate::assign::{Assignment, LayoutOptions, Model, RankView, Slicing};
use crate::error::Result;
use crate::image::{Coordinate, ModelPart};
use crate::open::Checkpoint;
use crate::parallel::Rank;
use flashboot_core::ByteSize;
use std::collections::HashMap;

/// How a plan's costs are counted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CostOptions {
    /// Shards that a loader holds while it reads the next one.
    pub window: usize,
    /// The size of a slab of pinned memory; rounded down to a power of two.
    pub slab: ByteSize,
}

impl Default for CostOptions {
    fn default() -> Self {
        Self { window: 2, slab: ByteSize::mib(256) }
    }
}

/// What one model (target or draft) costs one rank.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize)]
pub struct Cost {
    /// Tensors of which it reads anything.
    pub tensors: u64,
    /// Bytes that its model needs, when everything that can be cut is.
    pub bytes_needed: u64,
    /// Bytes asked of the file system: whole rows where columns are kept.
    pub bytes_read: u64,
    /// Bytes that the device gives for it: whole pages, neighbours joined.
    pub bytes_device: u64,
    /// Bytes that stay in its buffers.
    pub bytes_kept: u64,
    /// The most bytes kept of one shard.
    pub largest_shard_kept: u64,
    /// The most bytes kept of as many consecutive shards as the window holds.
    pub window_bytes: u64,
    /// Slabs filled over the whole load, buffers of tensors larger than a slab included.
    pub slabs: u64,
    /// Pinned buffers asked for without slabs: one a tensor.
    pub pinned_requests: u64,
    /// New allocations of pinned memory, one buffer a tensor, in a caching allocator that rounds to powers of two.
    pub host_allocs_without_slabs: u64,
    /// The same with slabs.
    pub host_allocs_with_slabs: u64,
    /// The most pinned bytes in use at one time, with slabs.
    pub peak_pinned: u64,
    /// The same with one buffer a tensor.
    pub peak_pinned_without_slabs: u64,
}

/// One rank's costs.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct RankCost {
    /// Which rank.
    pub coordinate: Coordinate,
    /// Its number among the ranks that share its experts.
    pub moe_tp: u32,
    /// The target's costs.
    #[serde(flatten)]
    pub target: Cost,
    /// The draft's, where one was asked for.
    pub draft: Option<Cost>,
}

/// The plan of every rank.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct PlanReport {
    /// The recipe's family.
    pub family: String,
    /// What is cut.
    pub slicing: Slicing,
    /// Tensors of the checkpoint.
    pub tensors: u64,
    /// Bytes of the checkpoint's tensors.
    pub bytes: u64,
    /// Every rank, stage by stage.
    pub ranks: Vec<RankCost>,
    /// What a person should know.
    pub notes: Vec<String>,
}

/// Plans every rank from the checkpoint's headers; reads no tensor.
pub fn plan(checkpoint: &Checkpoint, layout: &LayoutOptions, options: &CostOptions) -> Result<PlanReport> {
    let model =
        Model { tensors: checkpoint.tensors(), aliases: checkpoint.aliases(), config: checkpoint.config() };
    let assignment = Assignment::new(model, layout)?;
    // What is needed is what is kept when everything is cut; where that cannot be told, what is kept.
    let all = LayoutOptions { slicing: Some(Slicing::All), ..layout.clone() };
    let sliced = match assignment.slicing {
        Slicing::All => None,
        _ => Assignment::new(model, &all).ok(),
    };
    let shards = rank::Shards::new(checkpoint);
    let mut known = HashMap::new();
    let mut cost = |rank: Rank| -> Cost {
        // Ranks that differ in nothing but their group cost the same.
        let key =
            (rank.coordinate.model, rank.coordinate.pp, rank.coordinate.tp, rank.coordinate.ep, rank.moe_tp);
        if let Some(cost) = known.get(&key) {
            return Cost::clone(cost);
        }
        let mut cost = rank::cost(&RankView::new(&assignment, rank), &shards, options);
        if let Some(sliced) = &sliced {
            cost.bytes_needed = rank::kept(&RankView::new(sliced, rank));
        }
        known.insert(key, cost.clone());
        cost
    };
    let mut ranks = Vec::new();
    let has_draft = layout.draft && assignment.has_draft();
    let last = layout.parallel.pp.saturating_sub(1);
    for rank in layout.parallel.ranks(ModelPart::Target)? {
        // The draft runs where the target ends.
        let draft = (has_draft && rank.coordinate.pp == last).then(|| {
            cost(Rank { coordinate: Coordinate { model: ModelPart::Draft, ..rank.coordinate }, ..rank })
        });
        ranks.push(RankCost { coordinate: rank.coordinate, moe_tp: rank.moe_tp, target: cost(rank), draft });
    }
    let mut notes = checkpoint.notes().to_vec();
    notes.extend(assignment.notes.iter().cloned());
    if layout.draft && !has_draft {
        notes.push("the checkpoint has no draft".into());
    }
    Ok(PlanReport {
        family: assignment.recipe.family.clone(),
        slicing: assignment.slicing,
        tensors: checkpoint.tensors().len() as u64,
        bytes: checkpoint.data_bytes(),
        ranks,
        notes,
    })
}
