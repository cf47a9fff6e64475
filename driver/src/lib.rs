//! Carries out a [`Replica`]'s commands: attaches sources, watches their words, starts pulls, compares
//! digests, publishes.
//!
//! The machine decides, this crate waits. It is generic over the transport (a [`Mover`] per source) and runs
//! on any tokio runtime, the paused clock of the mock's included. It must never decide anything about
//! sources, order or repair: that is the machine's, which is told that a source is lost also where it is slower than a floor. Its selects are biased, so that on a virtual clock one seed
//! is one history.
#![forbid(unsafe_code)]

mod floor;
mod pull;
mod report;
mod run;

pub use floor::{Floor, Paced};
pub use report::Report;
pub use run::{Job, Limits, Observer, Sources, Step, replicate};

#[cfg(doc)]
use flashboot_core::{Mover, replica::Replica};
