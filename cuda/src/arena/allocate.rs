//! Getting the memory, with as much of what is wanted as the driver gives.

use crate::{
    Context,
    error::{CudaError, code},
    ops::{AllocationKind, Call, handle_type},
    vmm::{Memory, rounded},
};
use flashboot_core::{Error, Kind, Result};

/// How much something is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Want {
    /// Not at all.
    No,
    /// If it can be had; [`crate::ArenaReport::dropped`] says when not.
    #[default]
    Try,
    /// Without it there is no arena.
    Must,
}

/// How an arena is to be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CudaArenaConfig {
    /// Export as file descriptor, for readers on this host.
    pub posix_fd: Want,
    /// Export as fabric handle, for readers on other hosts of one NVLink domain.
    pub fabric: Want,
    /// Memory that a NIC can read and write.
    pub gpu_direct_rdma: Want,
    /// Bytes of pinned memory for copies from and to ordinary host memory, made at the first of them. Rounded to a
    /// power of two between 8 KiB and 1 GiB.
    pub bounce: usize,
}

impl Default for CudaArenaConfig {
    /// Everything, where it can be had; 8 MiB.
    fn default() -> Self {
        Self { posix_fd: Want::Try, fabric: Want::Try, gpu_direct_rdma: Want::Try, bounce: 8 << 20 }
    }
}

impl CudaArenaConfig {
    /// Bytes of one of the two halves of the bounce memory.
    pub(super) fn half(&self) -> usize {
        (self.bounce / 2).clamp(4 << 10, 512 << 20).next_power_of_two()
    }
}

/// Something wanted that the arena does not have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dropped {
    /// `POSIX_FD`, `FABRIC` or `gpuDirectRDMACapable`.
    pub what: &'static str,
    /// Why.
    pub reason: String,
}

/// Creates the memory with as much of what is wanted as the driver gives, and says what it did not give.
pub(super) fn allocate(
    context: &Context,
    needed: u64,
    config: &CudaArenaConfig,
    dropped: &mut Vec<Dropped>,
) -> Result<(Memory, AllocationKind, u64, u64)> {
    let device = context.device();
    let features = device.features();
    let mut has = |what: &'static str, want: Want, claimed: bool| -> Result<bool> {
        match want {
            Want::No => Ok(false),
            _ if claimed => Ok(true),
            Want::Must => Err(Error::new(
                Kind::Unavailable,
                "cuDeviceGetAttribute",
                format!("{} has no {what}", device.name()),
            )),
            Want::Try => {
                let reason = "the driver says that this GPU has it not".to_owned();
                dropped.push(Dropped { what, reason });
                Ok(false)
            }
        }
    };
    let posix_fd = has("POSIX_FD", config.posix_fd, features.posix_fd)?;
    let fabric = has("FABRIC", config.fabric, features.fabric)?;
    let rdma = has("gpuDirectRDMACapable", config.gpu_direct_rdma, features.gpu_direct_rdma)?;
    let bits = u32::from(posix_fd) * handle_type::POSIX_FD + u32::from(fabric) * handle_type::FABRIC;
    let mut kind = AllocationKind { device: device.ordinal, handle_types: bits, gpu_direct_rdma: rdma };
    loop {
        let created = create(context, needed, kind);
        let error = match created {
            Ok((memory, granularity, capacity)) => return Ok((memory, kind, granularity, capacity)),
            Err(CreateError::Driver(e)) => e,
            Err(CreateError::Ours(e)) => return Err(e),
        };
        // What a lesser wish cannot change is told as it is.
        if error.is_sticky() || error.code == code::OUT_OF_MEMORY {
            return Err(refused(error, needed, context));
        }
        // FABRIC first: it fails wherever the machine has no IMEX channel, whatever the attribute says.
        let what = if kind.handle_types & handle_type::FABRIC != 0 && config.fabric != Want::Must {
            kind.handle_types &= !handle_type::FABRIC;
            "FABRIC"
        } else if kind.gpu_direct_rdma && config.gpu_direct_rdma != Want::Must {
            kind.gpu_direct_rdma = false;
            "gpuDirectRDMACapable"
        } else if kind.handle_types & handle_type::POSIX_FD != 0 && config.posix_fd != Want::Must {
            kind.handle_types &= !handle_type::POSIX_FD;
            "POSIX_FD"
        } else {
            return Err(refused(error, needed, context));
        };
        tracing::debug!(what, %error, "not given by the driver; going on without");
        dropped.push(Dropped { what, reason: error.to_string() });
    }
}

enum CreateError {
    Driver(CudaError),
    Ours(Error),
}

fn create(
    context: &Context,
    needed: u64,
    kind: AllocationKind,
) -> std::result::Result<(Memory, u64, u64), CreateError> {
    let granularity: Call<u64> = context.raw_call(|ops| ops.mem_granularity(kind));
    let granularity = granularity.map_err(CreateError::Driver)?;
    let capacity = rounded(needed, granularity).ok_or_else(|| {
        CreateError::Ours(Error::new(Kind::Invalid, "arena", format!("{needed} bytes cannot be rounded up")))
    })?;
    let memory = Memory::create_raw(context, capacity, kind).map_err(CreateError::Driver)?;
    Ok((memory, granularity, capacity))
}

/// The driver's refusal, with what was asked for.
fn refused(error: CudaError, needed: u64, context: &Context) -> Error {
    let told = Error::from(error);
    if error.code != code::OUT_OF_MEMORY {
        return told;
    }
    let free = context.memory().map_or_else(|_| "unknown".to_owned(), |(free, _)| free.to_string());
    let detail = format!("{} for {needed} bytes, {free} are free", told.detail());
    Error::new(told.kind(), told.op(), detail)
        .with_code(flashboot_core::Code::Cuda(error.code))
        .with_remedy(told.remedy().unwrap_or_default())
}
