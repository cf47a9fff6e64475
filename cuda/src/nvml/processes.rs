//! Which process has how much of which GPU.

use super::{
    Call, Failed,
    library::{Library, check, symbol},
};
use libloading::Symbol;
use std::{
    ffi::{CStr, c_char, c_uint, c_ulonglong, c_void},
    ptr,
};

/// More GPUs than any host has.
const MOST_GPUS: c_uint = 256;
/// More processes than a GPU serves.
const MOST: usize = 1024;
/// `NVML_VALUE_NOT_AVAILABLE`.
const NOT_TOLD: c_ulonglong = c_ulonglong::MAX;

/// What one process has of one GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuProcess {
    /// The GPU's UUID.
    pub gpu: String,
    /// The host's number of the process, which a container may not know.
    pub process: u32,
    /// Bytes; `None` where the driver does not say.
    pub bytes: Option<u64>,
}

/// `nvmlProcessInfo_t` of version 2 and 3.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct Info {
    process: c_uint,
    bytes: c_ulonglong,
    gpu_instance: c_uint,
    compute_instance: c_uint,
}

const _: () = assert!(size_of::<Info>() == 24);

/// Every process that computes on any GPU of this host, as NVML tells; nothing without NVML. Blocks for some 10 ms.
pub fn processes() -> Vec<GpuProcess> {
    let found = Library::open().ok().and_then(|library| all(&library).ok());
    found.unwrap_or_default()
}

fn all(library: &Library) -> Call<Vec<GpuProcess>> {
    const COUNT: &str = "nvmlDeviceGetCount_v2";
    type Count = unsafe extern "C" fn(*mut c_uint) -> u32;
    // SAFETY: the signature is the one of `nvml.h`.
    let count: Symbol<'_, Count> = unsafe { symbol(&library.0, COUNT) }?;
    let mut gpus = 0;
    // SAFETY: the out-pointer is to a local.
    check(COUNT, unsafe { count(&raw mut gpus) })?;
    let mut found = Vec::new();
    for index in 0..gpus.min(MOST_GPUS) {
        // One that does not answer hides no other.
        let _ = of(library, index, &mut found);
    }
    Ok(found)
}

fn of(library: &Library, index: c_uint, found: &mut Vec<GpuProcess>) -> Call<()> {
    const BY_INDEX: &str = "nvmlDeviceGetHandleByIndex_v2";
    const UUID: &str = "nvmlDeviceGetUUID";
    const RUNNING: &str = "nvmlDeviceGetComputeRunningProcesses_v3";
    type ByIndex = unsafe extern "C" fn(c_uint, *mut *mut c_void) -> u32;
    type Uuid = unsafe extern "C" fn(*mut c_void, *mut c_char, c_uint) -> u32;
    type Running = unsafe extern "C" fn(*mut c_void, *mut c_uint, *mut Info) -> u32;
    let mut device = ptr::null_mut();
    // SAFETY: the signature is the one of `nvml.h`.
    let by_index: Symbol<'_, ByIndex> = unsafe { symbol(&library.0, BY_INDEX) }?;
    // SAFETY: the out-pointer is to a local.
    check(BY_INDEX, unsafe { by_index(index, &raw mut device) })?;
    let mut text = [0u8; 96];
    // SAFETY: the signature is the one of `nvml.h`.
    let uuid: Symbol<'_, Uuid> = unsafe { symbol(&library.0, UUID) }?;
    // SAFETY: the device is NVML's own, and the text as long as is said.
    check(UUID, unsafe { uuid(device, text.as_mut_ptr().cast(), 96) })?;
    let gpu = CStr::from_bytes_until_nul(&text).map_err(|_| Failed { call: UUID, code: 2 })?;
    let mut all = vec![Info::default(); MOST];
    let mut count = c_uint::try_from(MOST).unwrap_or(0);
    // SAFETY: the signature is the one of `nvml.h`.
    let running: Symbol<'_, Running> = unsafe { symbol(&library.0, RUNNING) }?;
    // SAFETY: the device is NVML's own, and there is room for as many as `count` says.
    check(RUNNING, unsafe { running(device, &raw mut count, all.as_mut_ptr()) })?;
    all.truncate(usize::try_from(count).unwrap_or(0));
    found.extend(all.into_iter().map(|info| GpuProcess {
        gpu: gpu.to_string_lossy().into_owned(),
        process: info.process,
        bytes: (info.bytes != NOT_TOLD).then_some(info.bytes),
    }));
    Ok(())
}
