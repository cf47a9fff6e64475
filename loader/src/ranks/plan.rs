//! What is read of which shard, and where it goes.

use super::Slice;
use crate::slab::{Packing, SlabConfig};
use flashboot_checkpoint::{Checkpoint, Gather, PlannedTensor, RankPlan, place};
use flashboot_core::{Dtype, Result, layout::Place};
use serde::Serialize;
use std::path::PathBuf;

/// A tensor that is read, and what of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Eager {
    pub(super) name: String,
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<u64>,
    pub(super) slice: Option<Slice>,
    pub(super) bytes: u64,
    /// Where the whole tensor begins in its shard.
    pub(super) begin: u64,
    /// From the shard's first byte on, to the tensor's own first byte on.
    pub(super) gathers: Vec<Gather>,
}

/// A tensor that is left to whoever wants it: the bytes of its shard that it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StockTensor {
    /// Its name.
    pub name: String,
    /// Its element type.
    pub dtype: Dtype,
    /// Its dimensions.
    pub shape: Vec<u64>,
    /// Its shard.
    pub path: PathBuf,
    /// Where in the shard it begins, in bytes.
    pub offset: u64,
    /// Its size in bytes.
    pub bytes: u64,
}

/// One shard that is opened.
#[derive(Debug, Clone)]
pub struct ShardPlan {
    pub(super) path: PathBuf,
    pub(super) len: u64,
    /// In the order of their names.
    pub(super) tensors: Vec<Eager>,
    pub(super) packing: Packing,
}

/// What one rank reads of a checkpoint.
#[derive(Debug, Clone)]
pub struct ReadPlan {
    pub(super) shards: Vec<ShardPlan>,
    pub(super) stock: Vec<StockTensor>,
    skipped: usize,
}

/// What a plan comes to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Observation {
    /// Tensors read.
    pub tensors: u64,
    /// Of them, those of which a part is read.
    pub partial: u64,
    /// Tensors left to whoever wants them.
    pub stock: u64,
    /// Shards opened.
    pub shards: u64,
    /// Shards not opened, because nothing of them is needed.
    pub shards_skipped: u64,
    /// Bytes kept.
    pub bytes_kept: u64,
    /// Slabs filled, buffers of larger tensors included.
    pub slabs: u64,
    /// Bytes of the largest of them.
    pub largest_slab: u64,
}

impl ReadPlan {
    /// What `plan` reads of `checkpoint`. Shards without anything of it are not opened: a draft's are few.
    pub fn new(checkpoint: &Checkpoint, plan: &RankPlan, slab: SlabConfig) -> Self {
        let eager = |tensor: &PlannedTensor| {
            let number = tensor.source?;
            let shard = checkpoint.tensors().at(number)?.shard;
            let begin = checkpoint.shards().get(shard)?.data_start() + checkpoint.tensors().at(number)?.begin;
            let own = |g: &Gather| Gather { source: 0, at: g.at.saturating_sub(tensor.offset), ..*g };
            let eager = Eager {
                name: tensor.name.clone(),
                dtype: tensor.dtype,
                shape: tensor.full_shape.clone(),
                slice: slice(tensor, begin),
                bytes: tensor.bytes,
                begin,
                gathers: tensor.gathers.iter().map(own).collect(),
            };
            Some((shard, eager))
        };
        Self::of(checkpoint, plan.tensors.iter().filter_map(eager), Vec::new(), slab)
    }

    /// What can be read of a checkpoint whose layout nobody knows: everything but experts, whole; experts are stock.
    pub fn unknown(checkpoint: &Checkpoint, slab: SlabConfig) -> Self {
        let (mut eager, mut stock) = (Vec::new(), Vec::new());
        for tensor in checkpoint.tensors().iter() {
            let Some(shard) = checkpoint.shards().get(tensor.shard) else { continue };
            let begin = shard.data_start().saturating_add(tensor.begin);
            if place(tensor.name) == Place::NonExpert {
                let gathers = vec![Gather::contiguous(0, begin, 0, tensor.bytes)];
                let (name, shape) = (tensor.name.to_owned(), tensor.shape.to_vec());
                let whole = Eager {
                    name,
                    dtype: tensor.dtype,
                    shape,
                    slice: None,
                    bytes: tensor.bytes,
                    begin,
                    gathers,
                };
                eager.push((tensor.shard, whole));
                continue;
            }
            stock.push(StockTensor {
                name: tensor.name.to_owned(),
                dtype: tensor.dtype,
                shape: tensor.shape.to_vec(),
                path: shard.path.clone(),
                offset: begin,
                bytes: tensor.bytes,
            });
        }
        Self::of(checkpoint, eager, stock, slab)
    }

    fn of(
        checkpoint: &Checkpoint,
        eager: impl IntoIterator<Item = (usize, Eager)>,
        stock: Vec<StockTensor>,
        slab: SlabConfig,
    ) -> Self {
        let mut by_shard: Vec<Vec<Eager>> = vec![Vec::new(); checkpoint.shards().len()];
        for (shard, tensor) in eager {
            if let Some(tensors) = by_shard.get_mut(shard) {
                tensors.push(tensor);
            }
        }
        let (mut shards, mut skipped) = (Vec::new(), 0);
        for (shard, mut tensors) in checkpoint.shards().iter().zip(by_shard) {
            if tensors.is_empty() {
                skipped += 1;
                continue;
            }
            tensors.sort_by(|a, b| a.name.cmp(&b.name));
            let packing = Packing::of(tensors.iter().map(|tensor| tensor.bytes), slab);
            shards.push(ShardPlan { path: shard.path.clone(), len: shard.len, tensors, packing });
        }
        Self { shards, stock, skipped }
    }

    /// What it comes to; nothing is read.
    pub fn observe(&self) -> Observation {
        let tensors = || self.shards.iter().flat_map(|shard| &shard.tensors);
        let slabs = || self.shards.iter().flat_map(|shard| &shard.packing.slabs);
        Observation {
            tensors: tensors().count() as u64,
            partial: tensors().filter(|tensor| tensor.slice.is_some()).count() as u64,
            stock: self.stock.len() as u64,
            shards: self.shards.len() as u64,
            shards_skipped: self.skipped as u64,
            bytes_kept: tensors().map(|tensor| tensor.bytes).sum(),
            slabs: slabs().filter(|slab| slab.bytes > 0).count() as u64,
            largest_slab: slabs().map(|slab| slab.capacity).max().unwrap_or(0),
        }
    }

    /// Tensors that are not read, with their place in the checkpoint.
    pub fn stock(&self) -> &[StockTensor] {
        &self.stock
    }

    /// Names of the tensors that are read, shard by shard, as they come.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.shards.iter().flat_map(|shard| &shard.tensors).map(|tensor| tensor.name.as_str())
    }
}

/// Which part of its tensor a rank has; `None`: all of it. A part that is cut along two dimensions has no runs, so that
/// nothing but all of it is granted, and that is refused.
fn slice(tensor: &PlannedTensor, begin: u64) -> Option<Slice> {
    let (full, own) = (&tensor.full_shape, &tensor.shape);
    if full == own && tensor.gathers.iter().map(Gather::bytes).sum::<u64>() == tensor.bytes {
        return None;
    }
    let cut: Vec<usize> = (0..full.len()).filter(|dim| full.get(*dim) != own.get(*dim)).collect();
    let &[dim] = cut.as_slice() else {
        return Some(Slice { dim: cut.first().copied().unwrap_or(0), runs: Vec::new() });
    };
    let product = |dims: &[u64]| dims.iter().fold(1u64, |n, d| n.saturating_mul(*d));
    let above = product(full.get(..dim).unwrap_or_default());
    let bits = product(full.get(dim + 1..).unwrap_or_default()).saturating_mul(tensor.dtype.bits());
    let pitch = full.get(dim).copied().unwrap_or(0).saturating_mul(bits) / 8;
    let index = |bytes: u64| bytes.saturating_mul(8).checked_div(bits).unwrap_or(0);
    let run = |g: &Gather| {
        let within = g.from.saturating_sub(begin);
        let (from, len) = if above <= 1 { (within, g.bytes()) } else { (within.checked_rem(pitch)?, g.run) };
        Some((index(from), index(from) + index(len)))
    };
    let mut gathers: Vec<&Gather> = tensor.gathers.iter().collect();
    gathers.sort_by_key(|g| g.at);
    let runs: Vec<(u64, u64)> = gathers.into_iter().filter_map(run).collect();
    let taken: u64 = runs.iter().map(|(from, to)| to.saturating_sub(*from)).sum();
    // Padding, or rows taken apart: what is there is not what runs of one dimension say.
    let runs = if Some(&taken) == own.get(dim) { runs } else { Vec::new() };
    Some(Slice { dim, runs })
}

impl StockTensor {
    /// Reads all of it into `into`, through the page cache as any other reader would.
    ///
    /// # Errors
    /// The system's, with path and offset; [`flashboot_core::Kind::Invalid`] where `into` is not as long as it.
    pub fn read(&self, io: &crate::io::Io, into: &mut [u8]) -> Result<()> {
        let bytes = into.len() as u64;
        if bytes != self.bytes {
            let detail = format!("{}: {bytes} bytes for a tensor of {}", self.name, self.bytes);
            return Err(flashboot_core::Error::new(flashboot_core::Kind::Invalid, "tensor", detail));
        }
        let file = io.open(&self.path)?;
        io.lane().read(&file, self.offset, into, &mut |_, _| Ok(()))
    }
}
