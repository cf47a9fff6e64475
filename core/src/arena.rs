//! One contiguous exportable allocation holding one rank image and its control block.

use crate::{ByteRange, Generation, MemoryKind, Result, ShardId, control::Observed};
use std::{any::Any, fmt};

/// Where an arena's memory is.
#[derive(Debug, Clone, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case", tag = "kind")]
#[non_exhaustive]
pub enum Location {
    /// Memory of a host.
    Host {
        /// `/proc/sys/kernel/random/boot_id` of the host. Two containers of one host share it.
        boot_id: String,
        /// The NUMA node the pages are bound to; `None` when they lie where they were first touched.
        numa_node: Option<u32>,
    },
    /// Memory of one GPU.
    Gpu {
        /// The host's boot id.
        boot_id: String,
        /// The GPU's UUID, as NVML and the driver print it. Ordinals are never used.
        uuid: String,
    },
    /// Memory of a simulated host.
    Mock {
        /// The simulated host.
        host: u32,
    },
}

impl Location {
    /// What kind of memory it is.
    pub fn memory(&self) -> MemoryKind {
        match self {
            Self::Host { .. } => MemoryKind::Host,
            Self::Gpu { .. } => MemoryKind::Gpu,
            Self::Mock { .. } => MemoryKind::Mock,
        }
    }
}

/// What an arena is to hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ArenaSpec {
    /// Payload bytes; may be zero.
    pub payload: u64,
    /// Number of progress words (1 for a broadcast, one per node for an all-gather).
    pub shards: u32,
}

/// One contiguous allocation: payload from offset 0, control block past it, mapped until dropped.
///
/// All methods may be called from any thread and block for no longer than the copy they name. Bytes of one
/// range have one writer at a time: [`copy_in`](Self::copy_in) and [`fill`](Self::fill) fail with
/// [`crate::Kind::Busy`] while a pull owns any byte of the range, and so does
/// [`copy_out`](Self::copy_out), whose answer would be torn. No method hands out a reference into the
/// payload: other processes have it mapped.
///
/// A transport recognises the arenas it serves by upcasting to [`Any`].
///
/// # Safety
///
/// Implementors promise that the allocation stays mapped at one address, with the length of
/// [`capacity`](Self::capacity), until the value is dropped; that payload and control block never overlap;
/// that no other process can write it or shrink it; and that the bytes a method touches are inside the
/// allocation whatever its arguments. Transports dereference addresses on the strength of it.
#[expect(unsafe_code, reason = "the one unsafe trait: its implementors promise a mapping")]
pub unsafe trait Arena: Any + Send + Sync + fmt::Debug {
    /// Payload bytes.
    fn payload(&self) -> u64;

    /// Bytes of the whole allocation: payload, padding and control block.
    fn capacity(&self) -> u64;

    /// Number of progress words.
    fn shards(&self) -> u32;

    /// Where the memory is.
    fn location(&self) -> Location;

    /// Whether this process can still use it; peers may go on reading what is published either way. Returns at once.
    ///
    /// # Errors
    /// [`crate::Kind::ContextLost`], with what did it, where only a new process helps.
    fn usable(&self) -> Result<()> {
        Ok(())
    }

    /// Copies `from` to payload byte `offset`.
    fn copy_in(&self, offset: u64, from: &[u8]) -> Result<()>;

    /// Copies payload bytes from `offset` on into `to`.
    fn copy_out(&self, offset: u64, to: &mut [u8]) -> Result<()>;

    /// Sets every byte of `range` to `byte`.
    fn fill(&self, range: ByteRange, byte: u8) -> Result<()>;

    /// Retires the filling the arena holds. When it returns, the owner may write payload bytes: no reader
    /// will take one of them for the old filling's.
    fn retire(&self);

    /// Begins the filling `generation` with no progress, after retiring the one before.
    fn begin(&self, generation: Generation);

    /// Says that the first `bytes` of `shard` are verified and may be read by peers. Grows only.
    fn publish(&self, shard: ShardId, bytes: u64) -> Result<()>;

    /// What a peer would see of `shard` now.
    fn observe(&self, shard: ShardId) -> Observed;
}
