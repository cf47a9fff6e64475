//! Which GPUs hold the arenas, asked before anyone is started.

use super::job::Job;
use crate::config::Devices;
use flashboot_core::{ByteSize, Error, Kind, Result};
use flashboot_cuda::{Context, Device, bounded, refuse_mig};
use std::{collections::BTreeMap, time::Duration};

/// How long a driver may take to say what there is: it sets a GPU up at its first use.
const DRIVER: Duration = Duration::from_secs(20);

/// The GPUs that `devices` means, in its order; none for host memory.
///
/// # Errors
/// [`Kind::Unavailable`], with the remedy: no driver, no such GPU, a MIG instance. [`Kind::Invalid`]: no way to name one.
pub(crate) async fn resolve(devices: &Devices, limit: Duration) -> Result<Vec<Device>> {
    if *devices == Devices::Host {
        return Ok(Vec::new());
    }
    let devices = devices.clone();
    bounded("device", "an answer of the driver", limit.min(DRIVER), move || find(&devices)).await
}

fn find(devices: &Devices) -> Result<Vec<Device>> {
    let found = match devices {
        Devices::Host => Vec::new(),
        Devices::All => match Device::all()? {
            // Says what to do about it.
            none if none.is_empty() => vec![Device::find("cuda:0")?],
            all => all,
        },
        Devices::These(these) => these.iter().map(|one| Device::find(one)).collect::<Result<_>>()?,
    };
    found.iter().try_for_each(refuse_mig)?;
    Ok(found)
}

/// Refuses what cannot be: every rank asks its GPU for its own arena, but they ask at the same time.
///
/// # Errors
/// [`Kind::Exhausted`], with what is asked of the GPU and what it has free.
pub(crate) async fn admit(gpus: &[Device], job: &Job) -> Result<()> {
    let mut asked: BTreeMap<&str, u32> = BTreeMap::new();
    for uuid in (0..job.ranks()).filter_map(|rank| job.gpu(rank)) {
        *asked.entry(uuid).or_default() += 1;
    }
    for (uuid, arenas) in asked {
        let Some(gpu) = gpus.iter().find(|gpu| gpu.uuid() == uuid).cloned() else { continue };
        let bytes = job.bytes;
        bounded("device", "an answer of the driver", DRIVER, move || {
            Room::ask(&gpu)?.admit(arenas, arenas, bytes)
        })
        .await?;
    }
    Ok(())
}

/// About what the driver's context takes of a GPU for each process that uses it, kernels included: some 0.5 GiB on an H200.
const CONTEXT: u64 = 512 << 20;
/// What an arena is rounded up to, and its control block.
const GRANULES: u64 = 4 << 20;

/// What so many arenas of `bytes` in so many processes take of one GPU beside this process's context; `None` past 2^64. This
/// process gives its context back before they start.
fn needed(arenas: u32, processes: u32, bytes: u64) -> Option<u64> {
    let contexts = u64::from(processes.saturating_sub(1)).checked_mul(CONTEXT)?;
    bytes.checked_add(GRANULES)?.checked_mul(arenas.into())?.checked_add(contexts)
}

/// What a GPU had free when it was asked.
#[derive(Debug)]
pub(crate) struct Room {
    gpu: Device,
    free: u64,
    total: u64,
}

impl Room {
    /// Asks the driver. Blocks; the context lives as long as the question.
    pub(crate) fn ask(gpu: &Device) -> Result<Self> {
        let (free, total) = Context::open(gpu)?.memory()?;
        Ok(Self { gpu: gpu.clone(), free, total })
    }

    /// Whether so many arenas of `bytes` fit, in so many processes that use this GPU.
    ///
    /// # Errors
    /// [`Kind::Exhausted`], with what is asked and what is free.
    pub(crate) fn admit(&self, arenas: u32, processes: u32, bytes: u64) -> Result<()> {
        let Self { gpu, free, total } = self;
        let needed = needed(arenas, processes, bytes).unwrap_or(u64::MAX);
        if needed <= *free {
            return Ok(());
        }
        let detail = format!(
            "{arenas} of {} ({bytes} bytes), and about {} for the driver's context of each process but this one, come to \
             {} on {} {}, which has {} of {} free",
            ByteSize(bytes),
            ByteSize(CONTEXT),
            ByteSize(needed),
            gpu.name(),
            gpu.uuid(),
            ByteSize(*free),
            ByteSize(*total)
        );
        let remedy = "free the GPU's memory (nvidia-smi shows who has it), use more GPUs, or fewer clones";
        Err(Error::new(Kind::Exhausted, "arena", detail).with_remedy(remedy))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arenas_and_the_contexts_of_their_processes_are_counted_and_never_wrap() {
        let mib = |n: u64| n << 20;
        assert_eq!(needed(1, 1, 0), Some(mib(4)), "one process takes the place of this one");
        assert_eq!(needed(4, 4, mib(100)), Some(4 * mib(104) + 3 * mib(512)));
        assert_eq!(needed(1, 2, mib(100)), Some(mib(104) + mib(512)), "one process only imports");
        assert_eq!(needed(2, 2, u64::MAX), None);
        assert_eq!(needed(u32::MAX, u32::MAX, u64::MAX / 8), None);
    }
}
