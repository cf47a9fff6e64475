//! The `rdma` transport: a reader's NIC reads a source's arena, in host or GPU memory, by one-sided READs.
//!
//! Source and reader exchange queue pairs in one round trip over a control channel; afterwards the source's processor does
//! nothing. The reader's NIC writes the arena itself, no core copies a byte; what landed is hashed from there, host memory
//! by cores, GPU memory by the GPU. An endpoint opens its devices once, registers each arena once, and keeps spare queue
//! pairs. With several devices, a pull is dealt out among them message by message; a device that fails is dropped, and
//! what it had not brought is read over the others.
//!
//! libibverbs is opened at run time: on a machine without it, everything here answers
//! [`flashboot_core::Kind::Unavailable`] with the remedy. The payload is not encrypted, and not authenticated beyond the
//! keys that a reader is told: keep the fabric to yourself.
//!
//! Run on soft-RoCE in a virtual machine only (`cargo xtask rdma-vm`). Never run on hardware: real NICs and their limits,
//! InfiniBand, GPU memory by dma-buf or nvidia-peermem with the flush before the GPU reads it, congestion control. Regions
//! split at `max_mr_size`, of host and GPU memory, have met a stand-in for the card only.
//!
//! Must never: post a READ into memory that nobody owns, free a range before every completion is in, wait without a
//! deadline, retry for ever, or let a peer write.

mod arena;
mod config;
mod counters;
mod dial;
mod endpoint;
mod engine;
mod error;
mod exchange;
mod extent;
mod gid;
mod held;
mod mover;
mod near;
mod probe;
mod rail;
mod regions;
mod registry;
mod responder;
mod scratch;
mod transport;
mod verbs;
mod wire;

pub use config::RdmaConfig;
pub use counters::Counts;
pub use exchange::RdmaExchange;
pub use transport::RdmaTransport;
pub use wire::{PROTOCOL_VERSION, fuzz_frames};
