//! The `imex` transport: GPU arenas read each other over NVLink, on one host or on several hosts of one domain.
//!
//! **Never run on IMEX hardware.** What it stands on was read in NVIDIA's documentation and run on the stand-in driver
//! only; `docs/transports.md` says which cells these are. Readiness is found by trying, never by an attribute.
//!
//! An exporter asks the driver once for its arena's FABRIC handle and puts the 64 bytes into the locator. Readers
//! give them to their own driver, map the memory read-only on their own GPU, and pull with the copy engine. The
//! exporter is passive from then on: no socket, no thread, nothing to answer. So nobody tells a reader that its
//! source has died (it stands still, or the fabric's error poisons the context), and a dropped export keeps nobody out
//! whose locator is at hand: the handle works until the arena is dropped, and a refilled arena is known by its
//! generation.
//!
//! # Security
//!
//! A fabric handle is a **write** capability: any process of the NVLink domain with access to an IMEX channel that
//! has the locator can read and write the arena, whatever this crate promises of itself. Publish locators only where
//! everyone who can read them may do that. Who shares a channel is the administrator's to say.
//!
//! Must never: map a peer on another GPU than the one that its bytes go to, wait without a deadline, or write through an
//! import.
#![forbid(unsafe_code)]

mod config;
mod error;
mod exchange;
mod handle;
mod probe;
mod transport;

pub use config::ImexConfig;
pub use exchange::ImexExchange;
pub use transport::ImexTransport;
