//! The CUDA driver API behind safe types, and what `backend-ipc` and `backend-imex` share: an arena in GPU memory,
//! the mover that pulls a peer's mapping into it with the copy engine, and the kernel that hashes what landed.
//!
//! The driver library is opened at run time: on a machine without it everything here answers
//! [`flashboot_core::Kind::Unavailable`] with the remedy. GPUs are known by UUID; ordinals are never kept.
//!
//! Layers, each using only the ones before it: `api` (the table of driver functions), `ops` (one safe-to-fake
//! method a driver call: the seam at which teardown order and error paths are tested), the RAII types (`context`,
//! `vmm`, `stream`, `host`), then `arena`, `hash` and `mover`.

mod api;
mod arena;
mod bounce;
mod bounded;
mod context;
mod device;
mod error;
mod hash;
mod host;
mod import;
mod mover;
mod nvml;
mod ops;
mod owned;
pub mod probe;
mod served;
mod stream;
mod upload;
mod vmm;
mod words;

#[cfg(test)]
mod fake;
#[cfg(test)]
mod tests;

pub use api::driver_is_absent;
pub use arena::{ArenaReport, Attach, CudaArena, CudaArenaConfig, Dropped, Want};
pub use bounded::bounded;
pub use context::Context;
pub use device::{Device, Features, OLDEST_DRIVER};
pub use error::CudaError;
pub use host::{Pinned, Registered};
pub use import::Import;
pub use mover::{CudaMover, MoverConfig, NotKnown, SourceAlive, Span};
pub use nvml::{GpuProcess, processes, refuse_mig};
pub use owned::{CudaOwned, Passing};
pub use served::Served;
pub use stream::{Event, Stream};
pub use upload::{HostBytes, Upload};
