//! Slabs: large buffers that many tensors share, so that a load makes a few hundred allocations and not a hundred thousand.
//!
//! [`Packing`] says what lies where; a [`SlabPool`] has the memory, under a [`Budget`](crate::budget::Budget); a [`Slab`] is
//! one filled buffer, and a [`View`] one tensor in it. A slab goes back to its pool when its last view dies.

mod packing;
mod pool;
mod view;

pub use packing::{Packing, Place, SLAB_ALIGN, SlabConfig, SlabPlan};
pub use pool::{Held, OpenSlab, PoolStats, Release, SlabPool};
pub use view::{Slab, View};

#[cfg(test)]
mod tests;
