//! The contracts of flashboot and everything in it that is pure.
//!
//! Owns: what an [`Arena`], a [`HandleExchange`], a [`Mover`] and a [`Transport`] promise; where bytes lie
//! ([`Geometry`], [`layout`]); what proves them ([`digest`]); who reads what from whom ([`schedule`]); and
//! how one clone goes from empty to verified ([`replica`]).
//!
//! Must never: do IO, read a clock, spawn, or hold `unsafe` code (the one `unsafe trait` is [`Arena`],
//! whose implementors make a promise about memory that the compiler cannot check).
#![deny(unsafe_code)]

mod arena;
pub mod claims;
pub mod control;
pub mod digest;
mod dtype;
mod error;
mod exchange;
mod generation;
mod geometry;
pub mod layout;
mod locator;
mod mover;
pub mod replica;
pub mod schedule;
mod size;
mod transport;

pub use arena::{Arena, ArenaSpec, Location};
pub use control::Observed;
pub use digest::{BlockDigest, Digests};
pub use dtype::{Dtype, SizeError, UnknownDtype};
pub use error::{Code, Error, Kind, Result, Retry};
pub use exchange::{Export, HandleExchange};
pub use generation::Generation;
pub use geometry::{BLOCK, ByteRange, ChunkRef, Geometry, GeometryError, MAX_SHARDS, ShardId};
pub use layout::{Layout, LayoutError};
pub use locator::{Locator, LocatorError};
pub use mover::{InFlight, Landed, Mover, PeerId, Pull};
pub use size::{ByteSize, ParseByteSizeError};
pub use transport::{Caps, MemoryKind, Readiness, Transport, TransportName, check_served};
