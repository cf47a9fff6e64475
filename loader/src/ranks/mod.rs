//! A stock checkpoint for an engine's own loader: the tensors of one rank, shard by shard in the order of their names, only
//! what the rank needs of each, in slabs under a budget.
//!
//! What a rank does not read it cannot be given: a [`PartialTensor`] answers with the checkpoint's full shape, hands out its
//! own slice, and refuses everything else by name, so that an engine whose layout is another one stops instead of loading
//! bytes that were never read.

mod access;
mod partial;
mod plan;
mod stream;

pub use access::Access;
pub use partial::{Granted, PartialTensor, Slice};
pub use plan::{Observation, ReadPlan, ShardPlan, StockTensor};
pub use stream::{StreamConfig, Tensor, TensorStream};
