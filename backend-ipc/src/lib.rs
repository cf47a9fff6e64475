//! The `ipc` transport: one host's processes pull from each other's arenas, host to host and GPU to GPU.
//!
//! An exporter answers each reader once over a Unix socket and hands it the arena's one descriptor. A host arena's is
//! a sealed memfd: the reader maps it read-only, checks the seals, and copies by its own cores. A GPU arena's is the
//! driver's handle: the reader maps it read-only on its own GPU, and the copy engine pulls. It is a **write**
//! capability all the same: whoever is given one can write the exporter's memory, so `allow_uids` names writers.
//! Nothing passes through the exporter afterwards. The connection stays open only so that its end tells the
//! reader that the source has died.
//!
//! Must never: hand a descriptor to a peer whose uid or gid is not allowed, wait without a deadline, remove
//! the socket of a living owner, map host memory that is not sealed, or map a peer on another GPU than the one that its
//! bytes go to.
#![forbid(unsafe_code)]

mod arena;
mod config;
mod connection;
mod dial;
mod endpoint;
mod error;
mod exchange;
mod mover;
mod probe;
mod registry;
mod responder;
mod transport;
mod wire;

pub use config::IpcConfig;
pub use exchange::IpcExchange;
pub use probe::{ImportCost, measure_import};
pub use transport::IpcTransport;
pub use wire::{PROTOCOL_MAGIC, PROTOCOL_VERSION};
