//! Host memory: arenas in sealed memfds, a peer's arena mapped read-only, and the engine that copies.
//!
//! Owns: [`HostArena`] (one memfd, one mapping, one control block), [`ImportedArena`] (the reader's side),
//! [`AttachedArena`] (the same, used where it is),
//! [`CopyEngine`] (copies and hashes on the host's own cores), and what the kernel has to say about pages
//! ([`pages`], [`budget`]), where they are ([`near`]), and what reading files fast takes: page-aligned memory ([`Buffer`]) and io_uring ([`Ring`]).
//!
//! Must never: hand out a reference into memory that another process may write. The owner's bytes are seen
//! as a slice in one place only ([`CopyEngine`]'s hash), under a claim on them and because the seals keep
//! every other process from writing; a peer's bytes are only ever copied.

mod access;
mod arena;
mod attached;
pub mod budget;
mod buffer;
mod config;
mod engine;
mod errno;
mod imported;
mod job;
mod layout;
mod mapping;
pub mod near;
mod numa;
pub mod pages;
mod prefault;
mod ring;
mod seals;
mod stream;
mod words;

pub use arena::{HostArena, OwnedPart, OwnedRange, SharedRange};
pub use attached::AttachedArena;
pub use buffer::Buffer;
pub use config::{ArenaReport, HostArenaConfig, NumaReport, PageKind};
pub use engine::{CopyEngine, CopyEngineConfig};
pub use imported::{Expected, ImportedArena};
pub use job::CopyJob;
pub use layout::Layout;
pub use mapping::FileId;
pub use pages::boot_id;
pub use ring::{Completed, Ring, cached, uncache};
pub use seals::{REQUIRED_SEALS, check_seals};
