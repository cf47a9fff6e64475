//! A rank's memory as this process sees it, for faces that hand out its address, and the proof of it where it lies.

use flashboot_core::{
    Arena, BlockDigest, ByteRange, Digests, Error, Kind, Location, Result,
    digest::{merge, piece},
};
use flashboot_cuda::{CudaArena, Device};
use flashboot_memory::{AttachedArena, HostArena, SharedRange};
use std::{any::Any, sync::Arc};

/// Bytes hashed at a time: what stays in a core's cache.
const PIECE: u64 = 4 << 20;

/// A filled arena, kept mapped at one address, and written by nobody in this process, for as long as the value lives.
#[derive(Debug, Clone)]
pub enum Seen {
    /// Memory of this process's own.
    Host(Arc<SharedRange>),
    /// Another process's, used where it is.
    Attached(Arc<AttachedArena>),
    /// A GPU's.
    Gpu {
        /// The memory.
        arena: Arc<CudaArena>,
        /// The GPU's number in this process.
        number: usize,
    },
}

impl Seen {
    /// `arena`, whose filling has ended.
    ///
    /// # Errors
    /// [`Kind::Unavailable`] for memory of another kind, or of a GPU that is gone; [`Kind::Busy`] while it is being written.
    pub fn of(arena: &Arc<dyn Arena>) -> Result<Self> {
        if let Some(gpu) = CudaArena::from_arena(arena) {
            let number = number(arena)?;
            return Ok(Self::Gpu { arena: gpu, number });
        }
        let any = || -> Arc<dyn Any + Send + Sync> { Arc::<dyn Arena>::clone(arena) };
        if let Ok(attached) = any().downcast::<AttachedArena>() {
            return Ok(Self::Attached(attached));
        }
        let Ok(host) = any().downcast::<HostArena>() else {
            let detail = format!("memory of {:?} has no address", arena.location());
            return Err(Error::new(Kind::Unavailable, "arena", detail));
        };
        host.share(ByteRange::new(0, arena.payload())).map(Arc::new).map(Self::Host)
    }

    /// The first byte's address: in this process, or on its GPU.
    pub fn address(&self) -> u64 {
        match self {
            Self::Host(range) => range.as_ptr().addr() as u64,
            Self::Attached(arena) => arena.import().base().as_ptr().addr() as u64,
            Self::Gpu { arena, .. } => arena.device_address(),
        }
    }

    /// `cpu`, or `cuda:N` by the GPU's number in this process.
    pub fn device(&self) -> String {
        match self {
            Self::Host(_) | Self::Attached(_) => "cpu".into(),
            Self::Gpu { number, .. } => format!("cuda:{number}"),
        }
    }

    /// Whether a write to it ends this process, or on a GPU its context.
    pub fn is_read_only(&self) -> bool {
        match self {
            Self::Host(_) => false,
            Self::Attached(_) => true,
            Self::Gpu { arena, .. } => arena.is_read_only(),
        }
    }
}

/// The number in this process of the GPU that has `arena`.
fn number(arena: &Arc<dyn Arena>) -> Result<usize> {
    let Location::Gpu { uuid, .. } = arena.location() else {
        return Err(Error::new(Kind::Invalid, "arena", "it is on no GPU"));
    };
    let found = Device::all()?.iter().position(|device| device.uuid() == uuid);
    found.ok_or_else(|| Error::new(Kind::Unavailable, "arena", format!("{uuid} is not visible any more")))
}

/// Hashes every block of `memory` as it is now; the number of blocks that are right.
///
/// # Errors
/// [`Kind::Corrupt`] for the first block that is not what its digest says; those of reading the memory.
pub fn verify(memory: &dyn Arena, digests: &Digests) -> Result<u64> {
    let payload = digests.payload();
    let mut buffer = vec![0; usize::try_from(PIECE.min(payload)).unwrap_or(0)];
    let (mut block, mut start) = (0, 0);
    while start < payload {
        let range = ByteRange::new(start, start.saturating_add(digests.block()).min(payload));
        let (mut pieces, mut at) = (Vec::new(), range.start);
        while at < range.end {
            let len = PIECE.min(range.end - at);
            let Some(bytes) = buffer.get_mut(..usize::try_from(len).unwrap_or(0)) else { break };
            memory.copy_out(at, bytes)?;
            pieces.push(piece(payload, at, bytes));
            at = at.saturating_add(len);
        }
        let found = merge(payload, range, &pieces).unwrap_or(BlockDigest([0; 32]));
        if !digests.mismatches(block, &[found]).is_empty() {
            let detail = format!("block {block} ({range}) in memory does not match its digest");
            return Err(Error::new(Kind::Corrupt, "verify", detail)
                .with_chunk(block)
                .with_remedy("somebody wrote to tensors of it: load it again"));
        }
        (block, start) = (block.saturating_add(1), range.end);
    }
    Ok(block)
}
