//! Benches of replication: what the paper's figures show, on the machine at hand, beside what its hardware allows.
//!
//! [`run`] starts a seed and clones as processes that stay for a whole [`Plan`]: arenas, contexts and connections are set
//! up as `replicate` does it, every repeat imports anew, and a release lets all ranks go at one moment. GPU times
//! are the GPU's own events, host times the host's monotonic clock; [`Figures`] has both, with set-up beside the
//! transfer and in the total. Every byte is checked in every repeat: by its hash on arrival, or afterwards.

mod ideal;
mod load;
mod names;
pub mod nccl;
mod parent;
mod plan;
mod result;
mod room;
mod worker;

pub use load::{LoadFigures, load_beside_raw};
pub use parent::run;
pub use plan::{Plan, Shape, Stage};
pub use result::{CloneFigures, Copied, Done, Figures, GpuLimits, Measured, Repeat, SetUp, median};
pub use room::admit;
pub use worker::worker;

pub use flashboot_cuda::driver_is_absent;

use crate::{config::Devices, replicate::resolve_devices};
use flashboot_core::{Arena as _, ArenaSpec, BLOCK, ByteRange, Result};
use flashboot_cuda::{Context, CudaArena, CudaArenaConfig, Device};
use std::time::Duration;

/// The UUIDs of the GPUs that `devices` means, in its order; none for host memory.
///
/// # Errors
/// As for `replicate --device`.
pub async fn gpus(devices: &Devices, limit: Duration) -> Result<Vec<String>> {
    let found = resolve_devices(devices, limit).await?;
    Ok(found.iter().map(|gpu| gpu.uuid().to_owned()).collect())
}

/// What the hash of `bytes` on the GPU with this UUID takes, in 16 MiB blocks, by its own events; `repeats` times. Blocks.
///
/// # Errors
/// The driver's; [`flashboot_core::Kind::Unavailable`] where the kernel is refused.
pub fn hash(gpu: &str, bytes: u64, repeats: u32) -> Result<Vec<Duration>> {
    let spec = ArenaSpec { payload: bytes, shards: 1 };
    let context = Context::open(&Device::find(gpu)?)?;
    let (arena, _) = CudaArena::create_in(&context, spec, &CudaArenaConfig::default())?;
    let whole = ByteRange::new(0, bytes);
    arena.fill(whole, 0x5a)?;
    arena.measure_hash(whole, BLOCK)?;
    (0..repeats).map(|_| arena.measure_hash(whole, BLOCK)).collect()
}
