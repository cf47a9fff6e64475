//! A transport inside one process: simulated hosts on one [`Network`], real bytes, tokio's clock.
//!
//! On a runtime whose clock is paused the time of a transfer is virtual and every run with one seed is the
//! same. Faults are values ([`Fault`]): drop, stall, corrupt, late completion, a host's death. The planted
//! defects ([`Bug`]) are for the conformance suite, which must find each.
//!
//! It stands in for no hardware and is never chosen by `auto`.

mod arena;
mod config;
mod exchange;
mod fault;
mod mover;
mod network;

pub use arena::MockArena;
pub use config::MockConfig;
pub use fault::{Bug, Fault, seeded_faults};
pub use network::{MockTransport, Network};
