//! A modelled fabric: what a replication would take on machines that are not there.
//!
//! Discrete events over links. Who reads what from whom is [`flashboot_core::schedule`]'s or the replication service's
//! ([`flashboot_rendezvous::protocol::Service`]); what a clone does next is [`flashboot_core::replica`]'s machine: the
//! same code that moves real bytes. Only time is modelled here: copies, words, maps, deaths. `docs/simulator.md` says
//! how, and `docs/results/paper.md` how well.
//!
//! Must never: decide who reads from whom, or in which order; hold a figure that a profile should hold; read a clock.
#![forbid(unsafe_code)]

mod advise;
mod curve;
mod error;
mod fabric;
mod failure;
mod load;
mod members;
mod outcome;
pub mod paper;
mod placement;
mod profile;
mod queue;
mod random;
mod scenario;
mod site;
mod svg;
mod sweep;
mod world;

pub use advise::{Advice, Goal, Tried, advise};
pub use curve::Curve;
pub use error::Error;
pub use load::{Load, Loaded, load};
pub use outcome::{CloneTime, Filled, LinkUse, Outcome, Span};
pub use profile::{Asking, Copy, Gpu, Memory, Network, Profile, Shape, Turns};
pub use queue::Queue;
pub use scenario::{Chunk, Scenario, Slow, Topology};
pub use svg::{curves, timeline};
pub use sweep::{Point, Sweep, sweep};
pub use world::simulate;
