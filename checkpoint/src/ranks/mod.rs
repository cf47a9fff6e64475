//! Images of many ranks: planned together, written in one pass over what they are made of, and cut again from one
//! another.

mod journal;
mod model;
mod pack;
mod plan;
mod reshard;
mod set;
mod sink;
mod turns;
mod unpack;
mod write;

pub(crate) use model::ImageModel;
pub use pack::{PackedRanks, pack_ranks};
pub use plan::{PlannedTensor, RankPlan};
pub use reshard::{Relayout, reshard};
pub(crate) use set::Provider;
pub(crate) use unpack::unpack_ranks;
