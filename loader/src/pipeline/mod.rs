//! From a source into an arena at its offsets: what is missing is produced unit by unit on several threads, verified where it
//! lies, and marked.
//!
//! Into host memory a unit is produced in place, and hashed piece by piece while the next pieces are being read. Into a GPU's
//! it is produced in a pinned window and copied on one of two streams while the worker's other window is being filled; it
//! is verified on the GPU. Nothing is copied twice on the device.

mod filling;
mod gpu;
mod hashing;
mod host;
mod phases;
mod proof;
mod push;
mod workers;

pub use filling::Filling;
pub use gpu::verify as verify_landed;
pub use phases::{Phase, Phases, PhasesMs};
pub use proof::{Proof, Teller};
use push::SEGMENT;
pub use push::{Full, Leftover, Pins, push, push_pinned};

use crate::{
    budget::Budget,
    io::{Each, Io, IoConfig, Lane},
};
use flashboot_core::{ByteRange, ByteSize, Result};
use flashboot_cuda::CudaArena;
use std::time::Duration;

/// How an arena is filled.
#[derive(Debug, Clone)]
pub struct FillConfig {
    /// How files are read.
    pub io: Io,
    /// Threads that produce; at least one works.
    pub threads: usize,
    /// Bytes of one pinned window, of two a thread; rounded down to 64 KiB, at least that.
    pub window: ByteSize,
    /// Bytes pinned at a time of memory that is full already, and of one copy out of it; rounded as windows are.
    pub segment: ByteSize,
    /// Bytes of pinned windows that may be in flight: threads beyond it do not start.
    pub budget: Budget,
    /// The longest a thread waits for its windows.
    pub patience: Duration,
}

impl FillConfig {
    /// Two threads more than cores, so that a disk stays busy while cores hash, at most 16; windows of 4 MiB: larger ones copy
    /// a little faster and take longer to pin than that gains; a budget of [`Budget::DEFAULT`].
    ///
    /// # Errors
    /// [`Io::new`]'s.
    pub fn new(io: &IoConfig) -> Result<Self> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Ok(Self {
            io: Io::new(io)?,
            threads: cores.saturating_add(2).min(16),
            window: ByteSize::mib(4),
            segment: ByteSize(SEGMENT),
            budget: Budget::new(Budget::DEFAULT),
            patience: Duration::from_secs(60),
        })
    }
}

/// What an arena's bytes come from.
pub trait Producer: Sync {
    /// Fills `into`, which is `unit` of the payload, and hands finished pieces to `each` where they come one by one: counted
    /// from the unit's first byte. Called from several threads at once, for units that do not overlap.
    fn produce(&self, lane: &mut Lane, unit: ByteRange, into: &mut [u8], each: &mut Each<'_>) -> Result<()>;

    /// Bytes that one call had better be asked for, where what it reads from is far away.
    fn at_least(&self) -> u64 {
        0
    }
}

/// Fills what is missing of `filling`; the bytes that were. Blocks.
///
/// # Errors
/// The first failure of any thread; what was verified until then stays marked.
pub fn fill(filling: &Filling, producer: &dyn Producer, config: &FillConfig, phases: &Phases) -> Result<u64> {
    match CudaArena::from_arena(filling.arena()) {
        Some(arena) => gpu::fill(filling, &arena, producer, config, phases),
        None => host::fill(filling, producer, config, phases),
    }
}
