//! What a process has in memory already, as a rank that others can read: an image that never was on a disk.

use super::{Contents, device};
use crate::{
    config::Config,
    replicate::{threads, untouched_arena},
};
use flashboot_checkpoint::{Captured, Progress, capture_into};
use flashboot_core::{Arena, ArenaSpec, Result};
use flashboot_cuda::{Context, CudaArena, CudaArenaConfig, Device};
use std::sync::Arc;

/// The GPU that `config` names, for [`live`]; `None` for the host.
///
/// # Errors
/// More than one, or none that is there.
pub async fn one_device(config: &Config) -> Result<Option<Device>> {
    device(config).await
}

/// Copies `captured` into an arena on `device`, or in the host's memory, hashing it on the way; what lies where, and the proof.
/// Blocks.
///
/// # Errors
/// Those of [`capture_into`]; no memory.
pub fn live(
    captured: &Captured,
    device: Option<&Device>,
    config: &Config,
    progress: &dyn Progress,
) -> Result<(Arc<dyn Arena>, Contents)> {
    let context = device.map(Context::open).transpose()?;
    let make = |payload| {
        let spec = ArenaSpec { payload, shards: 1 };
        match &context {
            Some(context) => {
                Ok(CudaArena::create_in(context, spec, &CudaArenaConfig::default())?.0 as Arc<dyn Arena>)
            }
            None => untouched_arena(spec, config.memory),
        }
    };
    let (arena, manifest) = capture_into(captured, make, Some(threads(config.memory)), progress)?;
    Ok((arena, Contents::of_manifest(Arc::new(manifest))))
}
