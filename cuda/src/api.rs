//! The table of driver functions, each looked up once by name in the library that cudarc opens.
//!
//! cudarc's own wrappers return a Rust enum, and a `CUresult` that it does not list would be undefined behaviour;
//! they also panic where an older driver lacks a symbol. So the library is cudarc's, the signatures are ours:
//! every function returns the bare `u32`, and a missing one is an error that names it.

use cudarc::driver::sys;
use flashboot_core::{Error, Kind, Result};
use std::{
    ffi::{c_char, c_int, c_uint, c_ulonglong, c_void},
    sync::OnceLock,
};

/// A device pointer.
pub(crate) type DevicePtr = u64;
/// `CUdevice`: an ordinal of this process, never kept beyond a call chain.
pub(crate) type Ordinal = c_int;
/// `CUmemGenericAllocationHandle`.
pub(crate) type Handle = u64;
/// `CUcontext`, `CUstream`, `CUevent`, `CUmodule`, `CUfunction`.
pub(crate) type Opaque = *mut c_void;

/// `CUmemLocation`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MemLocation {
    pub(crate) kind: c_uint,
    pub(crate) id: c_int,
}

/// `CUmemAllocationProp`. cudarc's has an enum where the driver takes a set of bits.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AllocationProp {
    pub(crate) kind: c_uint,
    pub(crate) handle_types: c_uint,
    pub(crate) location: MemLocation,
    pub(crate) win32: usize,
    pub(crate) compression: u8,
    pub(crate) gpu_direct_rdma: u8,
    pub(crate) usage: u16,
    pub(crate) reserved: [u8; 4],
}

/// `CUmemAccessDesc`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AccessDesc {
    pub(crate) location: MemLocation,
    pub(crate) flags: c_uint,
}

macro_rules! api {
    ($($field:ident = $symbol:literal : fn($($arg:ty),*);)*) => {
        /// The functions.
        #[derive(Debug)]
        pub(crate) struct Api {
            $(pub(crate) $field: unsafe extern "C" fn($($arg),*) -> u32,)*
        }

        impl Api {
            fn load() -> Result<Self> {
                // SAFETY: looking for a library runs its initialisers; libcuda's are meant to be run so.
                if !unsafe { sys::is_culib_present() } {
                    return Err(why_not());
                }
                // SAFETY: as above; it is present, so this does not panic.
                let library = unsafe { sys::culib() };
                Ok(Self {
                    $($field: {
                        // SAFETY: the signature is the one of `cuda.h` for this symbol.
                        let found = unsafe {
                            library.get::<unsafe extern "C" fn($($arg),*) -> u32>($symbol.as_bytes())
                        };
                        *found.map_err(|_| too_old($symbol))?
                    },)*
                })
            }
        }
    };
}

api! {
    init = "cuInit": fn(c_uint);
    driver_version = "cuDriverGetVersion": fn(*mut c_int);
    device_count = "cuDeviceGetCount": fn(*mut c_int);
    device_get = "cuDeviceGet": fn(*mut Ordinal, c_int);
    device_name = "cuDeviceGetName": fn(*mut c_char, c_int, Ordinal);
    device_uuid = "cuDeviceGetUuid_v2": fn(*mut [u8; 16], Ordinal);
    device_attribute = "cuDeviceGetAttribute": fn(*mut c_int, c_uint, Ordinal);
    device_total_mem = "cuDeviceTotalMem_v2": fn(*mut usize, Ordinal);
    device_pci = "cuDeviceGetPCIBusId": fn(*mut c_char, c_int, Ordinal);
    device_can_access_peer = "cuDeviceCanAccessPeer": fn(*mut c_int, Ordinal, Ordinal);
    primary_retain = "cuDevicePrimaryCtxRetain": fn(*mut Opaque, Ordinal);
    primary_release = "cuDevicePrimaryCtxRelease_v2": fn(Ordinal);
    ctx_push = "cuCtxPushCurrent_v2": fn(Opaque);
    ctx_pop = "cuCtxPopCurrent_v2": fn(*mut Opaque);
    ctx_synchronize = "cuCtxSynchronize": fn();
    mem_get_info = "cuMemGetInfo_v2": fn(*mut usize, *mut usize);
    mem_granularity = "cuMemGetAllocationGranularity": fn(*mut usize, *const AllocationProp, c_uint);
    mem_create = "cuMemCreate": fn(*mut Handle, usize, *const AllocationProp, c_ulonglong);
    mem_release = "cuMemRelease": fn(Handle);
    mem_export = "cuMemExportToShareableHandle": fn(*mut c_void, Handle, c_uint, c_ulonglong);
    mem_import = "cuMemImportFromShareableHandle": fn(*mut Handle, *mut c_void, c_uint);
    address_reserve = "cuMemAddressReserve": fn(*mut DevicePtr, usize, usize, DevicePtr, c_ulonglong);
    address_free = "cuMemAddressFree": fn(DevicePtr, usize);
    mem_map = "cuMemMap": fn(DevicePtr, usize, usize, Handle, c_ulonglong);
    mem_unmap = "cuMemUnmap": fn(DevicePtr, usize);
    set_access = "cuMemSetAccess": fn(DevicePtr, usize, *const AccessDesc, usize);
    handle_for_range = "cuMemGetHandleForAddressRange": fn(*mut c_void, DevicePtr, usize, c_uint, c_ulonglong);
    flush_nic_writes = "cuFlushGPUDirectRDMAWrites": fn(c_uint, c_uint);
    stream_create = "cuStreamCreate": fn(*mut Opaque, c_uint);
    stream_destroy = "cuStreamDestroy_v2": fn(Opaque);
    stream_synchronize = "cuStreamSynchronize": fn(Opaque);
    stream_wait_event = "cuStreamWaitEvent": fn(Opaque, Opaque, c_uint);
    event_create = "cuEventCreate": fn(*mut Opaque, c_uint);
    event_destroy = "cuEventDestroy_v2": fn(Opaque);
    event_record = "cuEventRecord": fn(Opaque, Opaque);
    event_query = "cuEventQuery": fn(Opaque);
    event_elapsed = "cuEventElapsedTime": fn(*mut f32, Opaque, Opaque);
    copy_dtod = "cuMemcpyDtoDAsync_v2": fn(DevicePtr, DevicePtr, usize, Opaque);
    copy_dtoh = "cuMemcpyDtoHAsync_v2": fn(*mut c_void, DevicePtr, usize, Opaque);
    copy_htod = "cuMemcpyHtoDAsync_v2": fn(DevicePtr, *const c_void, usize, Opaque);
    memset = "cuMemsetD8Async": fn(DevicePtr, u8, usize, Opaque);
    host_alloc = "cuMemHostAlloc": fn(*mut *mut c_void, usize, c_uint);
    host_free = "cuMemFreeHost": fn(*mut c_void);
    host_register = "cuMemHostRegister_v2": fn(*mut c_void, usize, c_uint);
    host_unregister = "cuMemHostUnregister": fn(*mut c_void);
    module_load = "cuModuleLoadData": fn(*mut Opaque, *const c_void);
    module_unload = "cuModuleUnload": fn(Opaque);
    module_function = "cuModuleGetFunction": fn(*mut Opaque, Opaque, *const c_char);
    launch = "cuLaunchKernel": fn(
        Opaque, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Opaque, *mut *mut c_void, *mut *mut c_void
    );
}

/// By the name that every driver installs.
const NAME: &str = "libcuda.so.1";

fn absent() -> Error {
    Error::new(Kind::Unavailable, "dlopen", format!("no {NAME} on this machine's library path")).with_remedy(
        "install the NVIDIA driver, or run the container with the NVIDIA runtime (the driver brings libcuda)",
    )
}

/// Why none could be opened, in the loader's words where there is one.
fn why_not() -> Error {
    // SAFETY: as for looking for it: libcuda's initialisers are meant to be run so.
    match unsafe { libloading::Library::new(NAME) } {
        // It has come meanwhile; the next process finds it.
        Ok(_) => absent(),
        Err(said) => {
            let source = std::error::Error::source(&said).map(ToString::to_string);
            refused(&source.unwrap_or_else(|| said.to_string()))
        }
    }
}

/// What the loader's words mean: a library that is there and does not load is another matter than none. One that lacks a
/// library of its own is there, and the words name the other.
fn refused(said: &str) -> Error {
    if said.contains(&format!("{NAME}: ")) && said.contains("No such file or directory") {
        return absent();
    }
    Error::new(Kind::Unavailable, "dlopen", format!("{NAME} is there and cannot be loaded: {said}")).with_remedy(
        "see which file that is (ldconfig -p, LD_LIBRARY_PATH) and install the driver of this machine's architecture anew",
    )
}

/// Whether there is no driver library at all, good or bad. Opens it at the first call, and may block as long as that.
pub fn driver_is_absent() -> bool {
    Api::shared().is_err_and(|e| e == absent())
}

fn too_old(symbol: &str) -> Error {
    Error::new(Kind::Unavailable, "dlsym", format!("this machine's libcuda has no {symbol}"))
        .with_remedy("install an NVIDIA driver of release 535 (CUDA 12.2) or later")
}

impl Api {
    /// The table, loaded at the first call.
    pub(crate) fn shared() -> Result<&'static Self> {
        static API: OnceLock<Result<Api>> = OnceLock::new();
        API.get_or_init(Self::load).as_ref().map_err(Clone::clone)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_does_not_load_is_told_from_none() {
        let none = "libcuda.so.1: cannot open shared object file: No such file or directory";
        assert_eq!(refused(none), absent());
        let musl = "Error loading shared library libcuda.so.1: No such file or directory";
        assert_eq!(refused(musl), absent());
        for said in [
            "/opt/lib/libcuda.so.1: file too short",
            "/opt/lib/libcuda.so.1: wrong ELF class: ELFCLASS32",
            "libnvidia-part.so.1: cannot open shared object file: No such file or directory",
        ] {
            let refused = refused(said);
            assert_eq!((refused.kind(), refused.op()), (Kind::Unavailable, "dlopen"));
            assert!(refused.detail().ends_with(said), "{refused}");
            assert!(refused.remedy().is_some_and(|remedy| remedy.contains("LD_LIBRARY_PATH")), "{refused}");
        }
    }
}
