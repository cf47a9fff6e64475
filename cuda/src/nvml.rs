//! What NVML says of a GPU's place in its NVLink fabric. Opened at run time, by the probe only; nothing rests on it: a
//! fabric that says it is complete may refuse handles all the same.

use flashboot_core::{Error, Kind, Result};
use libloading::{Library, Symbol};
use std::{
    ffi::{CString, c_char, c_uint, c_void},
    fmt, ptr,
};

/// `nvmlGpuFabricInfo_t`.
#[repr(C)]
#[derive(Debug, Default)]
struct FabricInfo {
    cluster: [u8; 16],
    status: c_uint,
    clique: c_uint,
    state: u8,
}

/// A GPU's registration with its fabric.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Fabric {
    /// `NVML_GPU_FABRIC_STATE_…`.
    state: u8,
    /// `nvmlReturn_t` of the registration; means something once it is complete.
    status: u32,
    clique: u32,
    cluster: [u8; 16],
}

impl Fabric {
    const COMPLETED: u8 = 3;

    #[cfg(test)]
    pub(crate) fn completed() -> Self {
        Self { state: Self::COMPLETED, status: 0, clique: 1, cluster: [1; 16] }
    }

    pub(crate) fn is_complete(self) -> bool {
        self.state == Self::COMPLETED && self.status == 0
    }
}

impl fmt::Display for Fabric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.state {
            0 => return f.write_str("not supported"),
            1 => return f.write_str("registration not started"),
            2 => return f.write_str("registration in progress"),
            Self::COMPLETED if self.status == 0 => f.write_str("completed, ")?,
            Self::COMPLETED => write!(f, "completed with NVML status {}, ", self.status)?,
            other => write!(f, "state {other}, ")?,
        }
        write!(f, "clique {} of cluster ", self.clique)?;
        self.cluster.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// The registration of the GPU `uuid`.
///
/// # Errors
/// [`Kind::Unavailable`] without NVML, or where it does not know the call or the GPU.
pub(crate) fn fabric(uuid: &str) -> Result<Fabric> {
    // SAFETY: looking for a library runs its initialisers; NVML's are meant to be run so.
    let library = unsafe { Library::new("libnvidia-ml.so.1") }.map_err(|_| {
        Error::new(Kind::Unavailable, "dlopen", "no libnvidia-ml.so.1 on this machine's library path")
            .with_remedy("give the container the driver's utilities (NVIDIA_DRIVER_CAPABILITIES=utility)")
    })?;
    // SAFETY: the signature is the one of `nvml.h`.
    let init: Symbol<'_, unsafe extern "C" fn() -> u32> = unsafe { symbol(&library, "nvmlInit_v2") }?;
    // SAFETY: as above.
    let shutdown: Symbol<'_, unsafe extern "C" fn() -> u32> = unsafe { symbol(&library, "nvmlShutdown") }?;
    // SAFETY: it takes nothing.
    check("nvmlInit", unsafe { init() })?;
    let asked = ask(&library, uuid);
    // SAFETY: balances the initialisation above; nothing of NVML's is kept.
    let _ = unsafe { shutdown() };
    asked
}

fn ask(library: &Library, uuid: &str) -> Result<Fabric> {
    type ByUuid = unsafe extern "C" fn(*const c_char, *mut *mut c_void) -> u32;
    type Info = unsafe extern "C" fn(*mut c_void, *mut FabricInfo) -> u32;
    let text =
        CString::new(uuid).map_err(|_| Error::new(Kind::Invalid, "NVML", "a UUID with a NUL in it"))?;
    // SAFETY: the signature is the one of `nvml.h`.
    let by_uuid: Symbol<'_, ByUuid> = unsafe { symbol(library, "nvmlDeviceGetHandleByUUID") }?;
    // SAFETY: as above.
    let info: Symbol<'_, Info> = unsafe { symbol(library, "nvmlDeviceGetGpuFabricInfo") }?;
    let mut device = ptr::null_mut();
    // SAFETY: the text ends in NUL and the out-pointer is to a local; both outlive the call.
    check("nvmlDeviceGetHandleByUUID", unsafe { by_uuid(text.as_ptr(), &raw mut device) })?;
    let mut found = FabricInfo::default();
    // SAFETY: the device is NVML's own, and the structure the one it fills.
    check("nvmlDeviceGetGpuFabricInfo", unsafe { info(device, &raw mut found) })?;
    let FabricInfo { cluster, status, clique, state } = found;
    Ok(Fabric { state, status, clique, cluster })
}

/// # Safety
/// `T` is the symbol's type.
unsafe fn symbol<'a, T>(library: &'a Library, name: &'static str) -> Result<Symbol<'a, T>> {
    // SAFETY: the caller's promise.
    unsafe { library.get(name.as_bytes()) }
        .map_err(|_| Error::new(Kind::Unavailable, name, "this machine's NVML does not have it"))
}

fn check(call: &'static str, code: u32) -> Result<()> {
    if code == 0 {
        return Ok(());
    }
    Err(Error::new(Kind::Unavailable, call, format!("nvmlReturn_t {code}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fabric_is_complete_only_with_success() {
        let fabric = |state, status| Fabric { state, status, clique: 7, cluster: [0xab; 16] };
        assert!(fabric(3, 0).is_complete());
        assert!(!fabric(3, 1).is_complete());
        assert!(!fabric(2, 0).is_complete());
        assert_eq!(fabric(0, 0).to_string(), "not supported");
        assert_eq!(fabric(3, 0).to_string(), format!("completed, clique 7 of cluster {}", "ab".repeat(16)));
    }
}
