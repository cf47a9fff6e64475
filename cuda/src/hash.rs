//! BLAKE3 values of blocks of GPU memory, by a kernel on the GPU that holds them; and the module of all kernels.
//!
//! `kernels/blake3.cu` says what the kernel takes; [`Plan`] is the arithmetic. Where the kernel cannot be loaded or
//! launched, callers hash through the host: [`Hasher::refused`] says why, and the log once.

use crate::{
    Context,
    api::DevicePtr,
    host::Pinned,
    ops::{Access, AllocationKind, Arg, Call, Launch, Object, Ops},
    stream::{Pool, Pooled, Stream},
    vmm::{Mapping, Memory, rounded},
};
use flashboot_core::{BlockDigest, ByteRange, Error, Kind, Result};
use std::{
    ffi::{CStr, CString},
    sync::{Arc, Mutex, OnceLock, PoisonError},
};

/// Made from `kernels/blake3.cu` by `cargo xtask ptx`.
const PTX: &str = include_str!("../kernels/blake3.ptx");
const TILES: &CStr = c"flashboot_blake3_tiles";
const BLOCKS: &CStr = c"flashboot_blake3_blocks";
const LOOK: &CStr = c"flashboot_look";

/// Bytes of a BLAKE3 chunk.
const CHUNK: u64 = 1024;
/// Chunks, and threads, of a tile.
const TILE: u64 = 256;
/// The most tiles of a block.
const MAX_TILES: u64 = 1024;
const VALUE: u64 = 32;

/// The loaded kernels. They belong to the context, which unloads them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Kernel {
    module: Object,
    tiles: Object,
    blocks: Object,
    /// Looks do without where it is missing.
    pub(crate) look: Option<Object>,
}

impl Kernel {
    pub(crate) fn load(ops: &dyn Ops) -> Call<Self> {
        // A text without a NUL inside; the empty one would be refused by the driver.
        let image = CString::new(PTX).unwrap_or_default();
        let module = ops.module_load(&image)?;
        let functions = || Ok((ops.module_function(module, TILES)?, ops.module_function(module, BLOCKS)?));
        match functions() {
            Ok((tiles, blocks)) => {
                let look = ops.module_function(module, LOOK).ok();
                Ok(Self { module, tiles, blocks, look })
            }
            Err(e) => {
                // The first error is the one to tell.
                let _ = ops.module_unload(module);
                Err(e)
            }
        }
    }

    pub(crate) fn unload(&self, ops: &dyn Ops) -> Call<()> {
        ops.module_unload(self.module)
    }
}

/// The numbers of one launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Plan {
    /// Number of the range's first chunk in the payload.
    first: u64,
    /// Chunks a value of the first kernel covers.
    unit: u32,
    /// Thread blocks of the first kernel.
    tiles: u32,
    /// Values that the first kernel writes.
    values: u64,
    /// For the second kernel, where a block is larger than a tile.
    per_block: Option<u32>,
    /// Digests.
    blocks: u32,
    root: bool,
}

impl Plan {
    /// `None` for what the kernel cannot do: blocks over 256 MiB, ranges over 2^31 blocks or tiles.
    fn new(payload: u64, range: ByteRange, block: u64) -> Option<Self> {
        let chunks = range.len().div_ceil(CHUNK);
        let unit = (block / CHUNK).min(TILE);
        let per_block = block / CHUNK / TILE;
        if per_block > MAX_TILES {
            return None;
        }
        let grid = |n: u64| u32::try_from(n).ok().filter(|n| *n <= i32::MAX as u32);
        Some(Self {
            first: range.start / CHUNK,
            unit: grid(unit)?,
            tiles: grid(chunks.div_ceil(TILE))?,
            values: chunks.div_ceil(unit.max(1)),
            per_block: if per_block > 1 { Some(grid(per_block)?) } else { None },
            blocks: grid(range.len().div_ceil(block))?,
            root: range.start == 0 && range.end == payload && payload <= block,
        })
    }
}

/// What a bench of the GPU's hash says without the kernel.
pub(crate) fn not_here(why: &str) -> Error {
    Error::new(Kind::Unavailable, "hash", format!("the kernel does not work on this GPU: {why}")).with_remedy(
        "measure on a GPU of compute capability 7.0 or later with a driver that loads the kernel; without it blocks are hashed by the host",
    )
}

/// Checks that `block` is a block size and that `range` begins and ends where blocks do.
pub(crate) fn check_blocks(payload: u64, range: ByteRange, block: u64) -> Result<()> {
    let whole = block.is_power_of_two()
        && block >= CHUNK
        && range.start.is_multiple_of(block)
        && (range.end.is_multiple_of(block) || range.end == payload)
        && range.end <= payload;
    if whole {
        return Ok(());
    }
    Err(Error::new(
        Kind::Invalid,
        "hash",
        format!("bytes {range} of a payload of {payload} are no whole blocks of {block} bytes"),
    ))
}

/// Hashes on one GPU.
#[derive(Debug)]
pub(crate) struct Hasher {
    context: Context,
    slots: Pool<Slot>,
    scratch: OnceLock<Option<Arc<Scratch>>>,
    refused: OnceLock<Error>,
}

/// Device memory for values of tiles: one granule for all arenas of a context, in parts.
#[derive(Debug)]
pub(crate) struct Scratch {
    /// Keeps what the parts are of.
    _mapping: Mapping,
    /// Where free parts begin.
    free: Mutex<Vec<DevicePtr>>,
}

/// Bytes of a part: the tiles of 2 GiB.
const PART: u64 = 256 << 10;

/// Where a launch puts the values of tiles.
#[derive(Debug)]
enum Tiles {
    /// A block is no larger than a tile: its value goes where the digests do.
    None,
    Part {
        at: DevicePtr,
        of: Arc<Scratch>,
    },
    /// For more than 2 GiB at once, or when every part is in use.
    Own(Mapping),
}

impl Tiles {
    fn size(&self) -> u64 {
        match self {
            Self::None => 0,
            Self::Part { .. } => PART,
            Self::Own(mapping) => mapping.size(),
        }
    }

    fn at(&self) -> Option<DevicePtr> {
        match self {
            Self::None => None,
            Self::Part { at, .. } => Some(*at),
            Self::Own(mapping) => Some(mapping.at()),
        }
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        if let Self::Part { at, of } = self {
            of.free.lock().unwrap_or_else(PoisonError::into_inner).push(*at);
        }
    }
}

/// What one launch works in.
#[derive(Debug)]
struct Slot {
    /// Values of tiles, in device memory.
    tiles: Tiles,
    /// Values of blocks; the kernel writes them here itself.
    digests: Pinned,
}

/// A launch that is under way. Keep it until its stream has passed.
#[derive(Debug)]
pub(crate) struct Launched {
    slot: Pooled<Slot>,
    blocks: usize,
}

impl Launched {
    /// The values, once the stream has passed the launch.
    pub(crate) fn digests(&self) -> Vec<BlockDigest> {
        let (values, _) = self.slot.digests.as_slice().as_chunks::<{ VALUE as usize }>();
        values.iter().take(self.blocks).map(|value| BlockDigest(*value)).collect()
    }
}

impl Hasher {
    pub(crate) fn new(context: &Context) -> Self {
        Self {
            context: context.clone(),
            slots: Pool::default(),
            scratch: OnceLock::new(),
            refused: OnceLock::new(),
        }
    }

    /// Makes ahead what two launches of up to 2 GiB need, so that no pull waits for it: pinning takes 0.1 ms. What does
    /// not work is told when it is needed.
    pub(crate) fn warm(&self) {
        let whole = ByteRange::new(0, PART / VALUE * TILE * CHUNK);
        let plan = Plan::new(u64::MAX, whole, TILE * CHUNK * 64);
        let Some(plan) = plan.filter(|_| self.context.kernel().is_ok()) else { return };
        drop((self.slot(plan), self.slot(plan)));
    }

    /// Why hashing goes through the host, once it does.
    pub(crate) fn refused(&self) -> Option<&Error> {
        self.refused.get()
    }

    /// Queues the hashing of `range` of the payload at `data` on `stream`. `Ok(None)`: the kernel cannot, hash
    /// through the host. The range must have passed [`check_blocks`].
    ///
    /// # Safety
    /// The range stays mapped, and nobody writes it, until the stream has passed.
    ///
    /// # Errors
    /// Only sticky ones: those of a context that is beyond use.
    pub(crate) unsafe fn launch(
        &self,
        stream: &Stream,
        data: DevicePtr,
        payload: u64,
        range: ByteRange,
        block: u64,
    ) -> Result<Option<Launched>> {
        if self.refused.get().is_some() {
            return Ok(None);
        }
        let Some(plan) = Plan::new(payload, range, block) else { return Ok(None) };
        let try_launch = || -> Result<Launched> {
            let kernel = self.context.kernel()?;
            let slot = self.slot(plan)?;
            let blocks = plan.blocks as usize;
            // SAFETY: the caller's promise; scratch and digests are the slot's, which `Launched` keeps.
            match unsafe { self.queue(kernel, &slot, plan, stream, data + range.start, range.len()) } {
                Ok(()) => Ok(Launched { slot, blocks }),
                Err(e) => {
                    // The first kernel may be at work in the slot.
                    stream.synchronize()?;
                    Err(e)
                }
            }
        };
        match try_launch() {
            Ok(launched) => Ok(Some(launched)),
            Err(error) => match self.context.lost() {
                Some(lost) => Err(lost),
                None => {
                    self.refuse(error);
                    Ok(None)
                }
            },
        }
    }

    fn refuse(&self, error: Error) {
        if self.refused.set(error.clone()).is_ok() {
            tracing::warn!(
                gpu = self.context.device().uuid(), %error,
                "the hash kernel does not work on this GPU: verifying through the host, at the speed of its link"
            );
        }
    }

    fn slot(&self, plan: Plan) -> Result<Pooled<Slot>> {
        let digests = (u64::from(plan.blocks) * VALUE) as usize;
        let scratch = if plan.per_block.is_some() { plan.values * VALUE } else { 0 };
        let fits = |slot: &Slot| slot.digests.len() >= digests && slot.tiles.size() >= scratch;
        self.slots.take(fits, || {
            // 4 KiB: 128 blocks, 2 GiB of 16 MiB ones.
            Ok(Slot { tiles: self.tiles(scratch)?, digests: Pinned::new(&self.context, digests.max(4096))? })
        })
    }

    fn tiles(&self, bytes: u64) -> Result<Tiles> {
        if bytes == 0 {
            return Ok(Tiles::None);
        }
        if bytes <= PART
            && let Some(scratch) =
                self.scratch.get_or_init(|| self.context.scratch(|| self.new_scratch()).ok())
        {
            let part = scratch.free.lock().unwrap_or_else(PoisonError::into_inner).pop();
            if let Some(at) = part {
                return Ok(Tiles::Part { at, of: Arc::clone(scratch) });
            }
        }
        self.memory(bytes).map(Tiles::Own)
    }

    fn new_scratch(&self) -> Result<Arc<Scratch>> {
        let mapping = self.memory(PART)?;
        let parts = (0..mapping.size() / PART).map(|part| mapping.at() + part * PART).collect();
        Ok(Arc::new(Scratch { _mapping: mapping, free: Mutex::new(parts) }))
    }

    /// Device memory, rounded up to its granularity.
    fn memory(&self, bytes: u64) -> Result<Mapping> {
        let device = self.context.device().ordinal;
        let kind = AllocationKind { device, handle_types: 0, gpu_direct_rdma: false };
        let granularity = self.context.call(|ops| ops.mem_granularity(kind))?;
        let size = rounded(bytes, granularity)
            .ok_or_else(|| Error::new(Kind::Exhausted, "hash", "no scratch memory of that size"))?;
        Mapping::new(Memory::create(&self.context, size, kind)?, Access::ReadWrite)
    }

    /// # Safety
    /// As for [`launch`](Self::launch), and the slot is kept as long.
    unsafe fn queue(
        &self,
        kernel: Kernel,
        slot: &Slot,
        plan: Plan,
        stream: &Stream,
        data: DevicePtr,
        len: u64,
    ) -> Result<()> {
        let root = u32::from(plan.root);
        let digests = slot.digests.as_ptr().expose_provenance() as u64;
        // With unified addressing, which every 64-bit driver has, pinned memory has one address everywhere.
        let values = slot.tiles.at().filter(|_| plan.per_block.is_some()).unwrap_or(digests);
        let launch = |function, grid, block, args: &mut [Arg]| {
            let launch = Launch { function, grid, block, stream: stream.object(), args };
            self.context.call(|ops| {
                // SAFETY: the arguments are those of the kernel's declaration in order and type; the caller keeps
                // what they point to.
                unsafe { ops.launch(launch) }
            })
        };
        launch(
            kernel.tiles,
            plan.tiles,
            TILE as u32,
            &mut [
                Arg::U64(data),
                Arg::U64(len),
                Arg::U64(plan.first),
                Arg::U32(plan.unit),
                Arg::U32(root),
                Arg::U64(values),
            ],
        )?;
        let Some(per_block) = plan.per_block else { return Ok(()) };
        launch(
            kernel.blocks,
            plan.blocks,
            (per_block / 2).max(32),
            &mut [
                Arg::U64(values),
                Arg::U64(plan.values),
                Arg::U32(per_block),
                Arg::U32(root),
                Arg::U64(digests),
            ],
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_launch_covers_every_chunk_and_every_block() {
        let plan = Plan::new(1 << 30, ByteRange::new(256 << 20, 512 << 20), 16 << 20).unwrap();
        let expected = Plan {
            first: 256 << 10,
            unit: 256,
            tiles: 1024,
            values: 1024,
            per_block: Some(64),
            blocks: 16,
            root: false,
        };
        assert_eq!(plan, expected);
        let small = Plan::new(5000, ByteRange::new(4096, 5000), 1024).unwrap();
        assert_eq!(
            (small.unit, small.tiles, small.values, small.per_block, small.blocks),
            (1, 1, 1, None, 1)
        );
        assert!(!small.root);
        assert!(Plan::new(1000, ByteRange::new(0, 1000), 1 << 24).unwrap().root);
        assert!(!Plan::new((1 << 24) + 1, ByteRange::new(0, 1 << 24), 1 << 24).unwrap().root);
    }

    #[test]
    fn what_the_kernel_cannot_do_is_left_to_the_host() {
        assert!(Plan::new(1 << 40, ByteRange::new(0, 1 << 40), 256 << 20).is_some());
        assert!(Plan::new(1 << 40, ByteRange::new(0, 1 << 40), 512 << 20).is_none());
        assert!(Plan::new(1 << 60, ByteRange::new(0, 1 << 60), 1024).is_none());
    }

    #[test]
    fn ranges_that_are_no_blocks_are_refused() {
        let check = |start, end, block| check_blocks(5000, ByteRange::new(start, end), block).is_ok();
        assert!(check(0, 5000, 1024));
        assert!(check(1024, 2048, 1024));
        assert!(check(0, 0, 1024));
        assert!(!check(0, 2000, 1024));
        assert!(!check(512, 1024, 1024));
        assert!(!check(0, 6144, 1024));
        assert!(!check(0, 5000, 1000));
        assert!(!check(0, 5000, 512));
    }

    #[test]
    fn the_embedded_ptx_has_every_kernel() {
        for name in [TILES, BLOCKS, LOOK] {
            assert!(PTX.contains(&format!(".entry {}(", name.to_str().unwrap())));
        }
        assert!(PTX.contains(".target sm_75"));
    }
}
