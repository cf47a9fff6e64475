//! The `ipc` transport: one host's processes pull from each other's host arenas.
//!
//! An exporter answers each reader once over a Unix socket and hands it the arena's sealed memfd; the reader
//! maps it read-only, checks the seals, and copies by its own cores. Nothing passes through the exporter
//! afterwards. The connection stays open only so that its end tells the reader that the source has died.
//!
//! Must never: hand a descriptor to a peer whose uid or gid is not allowed, wait without a deadline, remove
//! the socket of a living owner, or map what is not sealed.
#![forbid(unsafe_code)]

mod config;
mod dial;
mod directory;
mod endpoint;
mod error;
mod exchange;
mod lock;
mod mover;
mod probe;
mod registry;
mod responder;
mod transport;
mod wire;

pub use config::IpcConfig;
pub use exchange::IpcExchange;
pub use transport::IpcTransport;
pub use wire::{PROTOCOL_MAGIC, PROTOCOL_VERSION};
