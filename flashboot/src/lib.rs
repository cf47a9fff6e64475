//! The facade: what configuration means, which transports there are, and how one host replicates an image.
//!
//! Owns: [`config`] (plain structs; the faces read files and environment), the [`registry`] of transports, [`doctor`]
//! (what works here), [`load`] (one rank into memory, from whichever source has it), [`agent`] (what stays in memory between loads), [`replicate`] (a seed and its clones as
//! processes, or as tasks of the mock), [`service`] (seeds and clones that come and go), what a process shows of itself
//! ([`observe`]), and [`scratch`] (directories that do not outlive their owner for long). Every error it returns is a
//! [`flashboot_core::Error`].
//!
//! Must never: read an environment variable, print, or install a log subscriber.
#![forbid(unsafe_code)]

pub mod agent;
pub mod bench;
pub mod config;
pub mod doctor;
pub mod load;
pub mod network;
pub mod observe;
pub mod registry;
pub mod replicate;
pub mod scratch;
pub mod service;

pub use flashboot_channel::{ErrorWire, kind_name};
