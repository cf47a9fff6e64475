//! `libnvidia-ml.so.1`, initialised for as long as one question takes.

use super::{Call, FabricInfo, Failed, Handle, Nvml, code};
use flashboot_core::{Error, Kind, Result};
use libloading::Symbol;
use std::{
    ffi::{CString, c_char, c_uint, c_void},
    ptr,
};

/// `nvmlGpuFabricInfo_t`.
#[repr(C)]
#[derive(Debug, Default)]
struct First {
    cluster: [u8; 16],
    status: c_uint,
    clique: c_uint,
    state: u8,
}

/// `nvmlGpuFabricInfo_v2_t`, and `nvmlGpuFabricInfo_v3_t`, which has the summary behind it.
#[repr(C)]
#[derive(Debug, Default)]
struct Versioned {
    version: c_uint,
    cluster: [u8; 16],
    status: c_uint,
    clique: c_uint,
    state: u8,
    health_mask: c_uint,
    health_summary: u8,
}

/// `NVML_STRUCT_VERSION`: the size of the structure and its number. The second has no summary, and is 4 bytes shorter.
const SECOND: c_uint = 36 | 2 << 24;
const THIRD: c_uint = 40 | 3 << 24;
const _: () = assert!(size_of::<Versioned>() == 40);

/// The library, between `nvmlInit` and `nvmlShutdown`.
#[derive(Debug)]
pub(super) struct Library(pub(super) libloading::Library);

impl Library {
    pub(super) fn open() -> Result<Self> {
        // SAFETY: looking for a library runs its initialisers; NVML's are meant to be run so.
        let library = unsafe { libloading::Library::new("libnvidia-ml.so.1") }.map_err(|_| {
            Error::new(Kind::Unavailable, "dlopen", "no libnvidia-ml.so.1 on this machine's library path")
                .with_remedy("give the container the driver's utilities (NVIDIA_DRIVER_CAPABILITIES=utility)")
        })?;
        {
            // SAFETY: the signature is the one of `nvml.h`.
            let init: Symbol<'_, unsafe extern "C" fn() -> u32> = unsafe { symbol(&library, "nvmlInit_v2") }?;
            // SAFETY: it takes nothing.
            check("nvmlInit_v2", unsafe { init() })?;
        }
        Ok(Self(library))
    }

    /// Fills what `version` names through `nvmlDeviceGetGpuFabricInfoV`.
    fn versioned(&self, device: Handle, version: c_uint) -> Call<FabricInfo> {
        const CALL: &str = "nvmlDeviceGetGpuFabricInfoV";
        type Info = unsafe extern "C" fn(*mut c_void, *mut Versioned) -> u32;
        // SAFETY: the signature is the one of `nvml.h`.
        let info: Symbol<'_, Info> = unsafe { symbol(&self.0, CALL) }?;
        let mut found = Versioned { version, ..Versioned::default() };
        // SAFETY: the device is NVML's own, and the structure as large as its version says, or larger.
        check(CALL, unsafe { info(pointer(device), &raw mut found) })?;
        let Versioned { cluster, status, clique, state, health_mask, health_summary, .. } = found;
        Ok(FabricInfo { cluster, status, clique, state, health_mask, health_summary })
    }

    fn first(&self, device: Handle) -> Call<FabricInfo> {
        const CALL: &str = "nvmlDeviceGetGpuFabricInfo";
        type Info = unsafe extern "C" fn(*mut c_void, *mut First) -> u32;
        // SAFETY: the signature is the one of `nvml.h`.
        let info: Symbol<'_, Info> = unsafe { symbol(&self.0, CALL) }?;
        let mut found = First::default();
        // SAFETY: the device is NVML's own, and the structure the one it fills.
        check(CALL, unsafe { info(pointer(device), &raw mut found) })?;
        let First { cluster, status, clique, state } = found;
        Ok(FabricInfo { cluster, status, clique, state, ..FabricInfo::default() })
    }

    /// A device by a text that names it.
    fn find(&self, call: &'static str, text: &str) -> Call<Handle> {
        type By = unsafe extern "C" fn(*const c_char, *mut *mut c_void) -> u32;
        const INVALID_ARGUMENT: u32 = 2;
        let text = CString::new(text).map_err(|_| Failed { call, code: INVALID_ARGUMENT })?;
        // SAFETY: the signature is the one of `nvml.h`.
        let by: Symbol<'_, By> = unsafe { symbol(&self.0, call) }?;
        let mut device = ptr::null_mut();
        // SAFETY: the text ends in NUL and the out-pointer is to a local; both outlive the call.
        check(call, unsafe { by(text.as_ptr(), &raw mut device) })?;
        Ok(Handle(device.expose_provenance()))
    }
}

impl Nvml for Library {
    fn by_uuid(&self, uuid: &str) -> Call<Handle> {
        self.find("nvmlDeviceGetHandleByUUID", uuid)
    }

    fn by_pci(&self, pci: &str) -> Call<Handle> {
        self.find("nvmlDeviceGetHandleByPciBusId_v2", pci)
    }

    fn is_mig_instance(&self, device: Handle) -> Call<bool> {
        const CALL: &str = "nvmlDeviceIsMigDeviceHandle";
        type Is = unsafe extern "C" fn(*mut c_void, *mut c_uint) -> u32;
        // SAFETY: the signature is the one of `nvml.h`.
        let is: Symbol<'_, Is> = unsafe { symbol(&self.0, CALL) }?;
        let mut answer = 0;
        // SAFETY: the device is NVML's own, and the out-pointer is to a local.
        check(CALL, unsafe { is(pointer(device), &raw mut answer) })?;
        Ok(answer != 0)
    }

    fn is_mig_enabled(&self, device: Handle) -> Call<bool> {
        const CALL: &str = "nvmlDeviceGetMigMode";
        type Mode = unsafe extern "C" fn(*mut c_void, *mut c_uint, *mut c_uint) -> u32;
        // SAFETY: the signature is the one of `nvml.h`.
        let mode: Symbol<'_, Mode> = unsafe { symbol(&self.0, CALL) }?;
        let (mut current, mut pending) = (0, 0);
        // SAFETY: the device is NVML's own, and the out-pointers are to locals.
        check(CALL, unsafe { mode(pointer(device), &raw mut current, &raw mut pending) })?;
        Ok(current != 0)
    }

    fn fabric(&self, device: Handle) -> Call<FabricInfo> {
        // An older library knows fewer of the three.
        self.versioned(device, THIRD)
            .or_else(|_| self.versioned(device, SECOND))
            .or_else(|_| self.first(device))
    }
}

impl Drop for Library {
    fn drop(&mut self) {
        // SAFETY: the signature is the one of `nvml.h`.
        let shutdown: Call<Symbol<'_, unsafe extern "C" fn() -> u32>> =
            unsafe { symbol(&self.0, "nvmlShutdown") };
        if let Ok(shutdown) = shutdown {
            // SAFETY: balances the initialisation; nothing of NVML's is kept.
            let _ = unsafe { shutdown() };
        }
    }
}

fn pointer(device: Handle) -> *mut c_void {
    ptr::with_exposed_provenance_mut(device.0)
}

/// # Safety
/// `T` is the symbol's type.
pub(super) unsafe fn symbol<'a, T>(
    library: &'a libloading::Library,
    name: &'static str,
) -> Call<Symbol<'a, T>> {
    // SAFETY: the caller's promise.
    unsafe { library.get(name.as_bytes()) }.map_err(|_| Failed { call: name, code: code::FUNCTION_NOT_FOUND })
}

pub(super) fn check(call: &'static str, code: u32) -> Call<()> {
    if code == 0 { Ok(()) } else { Err(Failed { call, code }) }
}
