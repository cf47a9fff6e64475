//! What loading a model costs each rank, from headers alone: bytes asked for, read and kept, and what that does to
//! pinned memory, with slabs and without.

mod pinned;
mod rank;

use crate::assign::{Assignment, LayoutOptions, Model, RankView, Slicing};
use crate::blocks::on_threads;
use crate::error::Result;
use crate::image::{Coordinate, ModelPart};
use crate::open::Checkpoint;
use crate::parallel::Rank;
use flashboot_core::ByteSize;
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

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
    let (shards, assignment) = std::thread::scope(|scope| {
        let sort = || rank::Shards::new(checkpoint);
        let sorting = std::thread::Builder::new().spawn_scoped(scope, sort);
        let assignment = Assignment::new(model, layout);
        // Without another thread it is only slower.
        let shards = sorting.ok().and_then(|sorting| sorting.join().ok()).unwrap_or_else(sort);
        (shards, assignment)
    });
    let assignment = assignment?;
    // What is needed is what is kept when everything is cut; where that cannot be told, what is kept.
    let everything = LayoutOptions { slicing: Some(Slicing::All), ..layout.clone() };
    let sliced = match assignment.slicing {
        Slicing::All => None,
        _ => Assignment::new(model, &everything).ok(),
    };
    let has_draft = layout.draft && assignment.has_draft();
    let last = layout.parallel.pp.saturating_sub(1);
    let draft_of = |rank: &Rank| {
        // The draft runs where the target ends.
        let coordinate = Coordinate { model: ModelPart::Draft, ..rank.coordinate };
        (has_draft && rank.coordinate.pp == last).then_some(Rank { coordinate, ..*rank })
    };
    let all = layout.parallel.ranks(ModelPart::Target)?;
    // Ranks that differ in nothing but their group cost the same.
    let key = |rank: &Rank| {
        let c = rank.coordinate;
        (c.model, c.pp, c.tp, c.ep, rank.moe_tp)
    };
    let (mut numbers, mut distinct) = (HashMap::new(), Vec::new());
    for rank in all.iter().copied().chain(all.iter().filter_map(draft_of)) {
        numbers.entry(key(&rank)).or_insert_with(|| {
            distinct.push(rank);
            distinct.len() - 1
        });
    }
    let costs = on_all_cores(&distinct, |rank| {
        let mut cost = rank::cost(&RankView::new(&assignment, *rank), &shards, options);
        if let Some(sliced) = &sliced {
            cost.bytes_needed = rank::kept(&RankView::new(sliced, *rank));
        }
        cost
    });
    let cost = |rank: &Rank| numbers.get(&key(rank)).and_then(|n| costs.get(*n)).cloned().unwrap_or_default();
    let rank_cost = |rank: &Rank| RankCost {
        coordinate: rank.coordinate,
        moe_tp: rank.moe_tp,
        target: cost(rank),
        draft: draft_of(rank).map(|draft| cost(&draft)),
    };
    let ranks = all.iter().map(rank_cost).collect();
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

/// What `work` makes of each, in order.
fn on_all_cores<T: Sync, R: Send>(given: &[T], work: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let (next, made) = (AtomicUsize::new(0), Mutex::new(Vec::with_capacity(given.len())));
    let run = || {
        while let Some((number, one)) = {
            let number = next.fetch_add(1, Ordering::Relaxed);
            given.get(number).map(|one| (number, one))
        } {
            let result = work(one);
            made.lock().unwrap_or_else(PoisonError::into_inner).push((number, result));
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(given.len());
    on_threads(threads.saturating_sub(1), run, run);
    let mut made = made.into_inner().unwrap_or_else(PoisonError::into_inner);
    made.sort_by_key(|(number, _)| *number);
    made.into_iter().map(|(_, result)| result).collect()
}
