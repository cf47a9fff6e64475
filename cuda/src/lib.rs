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
mod error;
mod ops;

pub use error::CudaError;
