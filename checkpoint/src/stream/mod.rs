//! Moves bytes: from files that are read once, in order, into streams that are written once, in order.
//!
//! What is to be moved is given as [`Work`]: some contiguous origins, and what each stream takes of them. A worker
//! cuts that into [`step::Step`]s of about a MiB, reader threads fill them, one thread scatters their bytes over the
//! streams' open pieces, and writer threads hash and write the pieces that are full. Whole rows are read and columns
//! are taken from memory, so no read is as short as a row. Memory is bounded whatever the model: see [`memory`].

mod cutter;
mod open;
mod pipeline;
mod step;

pub(crate) use open::Sink;
pub(crate) use pipeline::{Job, memory, run, writers};
pub(crate) use step::{Intake, Origin, Work};
