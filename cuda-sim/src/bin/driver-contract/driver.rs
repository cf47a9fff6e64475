//! The driver library found by the loader, real or stand-in, and its functions.

use crate::abi::{AccessDesc, AllocationProp, DevicePtr, Handle, Opaque, Ordinal};
use libloading::Library;
use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};

macro_rules! driver {
    ($($field:ident = $symbol:literal : fn($($arg:ident: $kind:ty),*);)*) => {
        struct Table {
            $($field: unsafe extern "C" fn($($kind),*) -> u32,)*
        }

        /// The driver. A case passes what it likes, also what no program should: that is what the contract is
        /// about, and each case has a process of its own.
        pub(crate) struct Driver {
            table: Table,
        }

        impl Driver {
            /// Opens the library.
            pub(crate) fn open() -> Result<Self, String> {
                // SAFETY: loading runs the driver's initialisers, which are meant to be run so.
                let library = unsafe { Library::new("libcuda.so.1") }.or_else(|_| {
                    // SAFETY: as above; a stand-in fresh from the build has no version in its name.
                    unsafe { Library::new("libcuda.so") }
                });
                let library: &'static Library = Box::leak(Box::new(library.map_err(|e| e.to_string())?));
                Ok(Self {
                    table: Table {
                        $($field: {
                            // SAFETY: the type is the one of `cuda.h` for this symbol.
                            let found = unsafe { library.get($symbol.as_bytes()) };
                            *found.map_err(|e| format!("{}: {e}", $symbol))?
                        },)*
                    },
                })
            }

            $(
                #[allow(clippy::too_many_arguments, reason = "some of the driver's have many")]
                pub(crate) fn $field(&self, $($arg: $kind),*) -> u32 {
                    // SAFETY: out-pointers are to the case's locals; wrong addresses are the case's point, and what
                    // comes of them stays in its process.
                    unsafe { (self.table.$field)($($arg),*) }
                }
            )*
        }
    };
}

driver! {
    init = "cuInit": fn(flags: c_uint);
    driver_version = "cuDriverGetVersion": fn(out: *mut c_int);
    device_count = "cuDeviceGetCount": fn(out: *mut c_int);
    device_get = "cuDeviceGet": fn(out: *mut Ordinal, ordinal: c_int);
    device_name = "cuDeviceGetName": fn(out: *mut c_char, len: c_int, device: Ordinal);
    device_uuid = "cuDeviceGetUuid_v2": fn(out: *mut [u8; 16], device: Ordinal);
    device_attribute = "cuDeviceGetAttribute": fn(out: *mut c_int, attribute: c_uint, device: Ordinal);
    device_total_mem = "cuDeviceTotalMem_v2": fn(out: *mut usize, device: Ordinal);
    device_pci = "cuDeviceGetPCIBusId": fn(out: *mut c_char, len: c_int, device: Ordinal);
    device_can_access_peer = "cuDeviceCanAccessPeer": fn(out: *mut c_int, device: Ordinal, peer: Ordinal);
    primary_retain = "cuDevicePrimaryCtxRetain": fn(out: *mut Opaque, device: Ordinal);
    primary_release = "cuDevicePrimaryCtxRelease_v2": fn(device: Ordinal);
    ctx_push = "cuCtxPushCurrent_v2": fn(context: Opaque);
    ctx_pop = "cuCtxPopCurrent_v2": fn(out: *mut Opaque);
    mem_get_info = "cuMemGetInfo_v2": fn(free: *mut usize, total: *mut usize);
    mem_granularity = "cuMemGetAllocationGranularity":
        fn(out: *mut usize, prop: *const AllocationProp, option: c_uint);
    mem_create = "cuMemCreate":
        fn(out: *mut Handle, size: usize, prop: *const AllocationProp, flags: c_ulonglong);
    mem_release = "cuMemRelease": fn(handle: Handle);
    mem_export = "cuMemExportToShareableHandle":
        fn(out: *mut c_void, handle: Handle, kind: c_uint, flags: c_ulonglong);
    mem_import = "cuMemImportFromShareableHandle": fn(out: *mut Handle, from: *mut c_void, kind: c_uint);
    address_reserve = "cuMemAddressReserve":
        fn(out: *mut DevicePtr, size: usize, align: usize, at: DevicePtr, flags: c_ulonglong);
    address_free = "cuMemAddressFree": fn(at: DevicePtr, size: usize);
    mem_map = "cuMemMap": fn(at: DevicePtr, size: usize, offset: usize, handle: Handle, flags: c_ulonglong);
    mem_unmap = "cuMemUnmap": fn(at: DevicePtr, size: usize);
    set_access = "cuMemSetAccess": fn(at: DevicePtr, size: usize, desc: *const AccessDesc, count: usize);
    handle_for_range = "cuMemGetHandleForAddressRange":
        fn(out: *mut c_void, at: DevicePtr, size: usize, kind: c_uint, flags: c_ulonglong);
    stream_create = "cuStreamCreate": fn(out: *mut Opaque, flags: c_uint);
    stream_destroy = "cuStreamDestroy_v2": fn(stream: Opaque);
    stream_synchronize = "cuStreamSynchronize": fn(stream: Opaque);
    stream_wait_event = "cuStreamWaitEvent": fn(stream: Opaque, event: Opaque, flags: c_uint);
    event_create = "cuEventCreate": fn(out: *mut Opaque, flags: c_uint);
    event_destroy = "cuEventDestroy_v2": fn(event: Opaque);
    event_record = "cuEventRecord": fn(event: Opaque, stream: Opaque);
    event_query = "cuEventQuery": fn(event: Opaque);
    event_synchronize = "cuEventSynchronize": fn(event: Opaque);
    event_elapsed = "cuEventElapsedTime": fn(out: *mut f32, start: Opaque, end: Opaque);
    copy_dtod = "cuMemcpyDtoDAsync_v2": fn(to: DevicePtr, from: DevicePtr, size: usize, stream: Opaque);
    copy_dtoh = "cuMemcpyDtoHAsync_v2": fn(to: *mut c_void, from: DevicePtr, size: usize, stream: Opaque);
    copy_htod = "cuMemcpyHtoDAsync_v2": fn(to: DevicePtr, from: *const c_void, size: usize, stream: Opaque);
    memset = "cuMemsetD8Async": fn(at: DevicePtr, byte: u8, size: usize, stream: Opaque);
    host_alloc = "cuMemHostAlloc": fn(out: *mut *mut c_void, size: usize, flags: c_uint);
    host_free = "cuMemFreeHost": fn(at: *mut c_void);
    host_register = "cuMemHostRegister_v2": fn(at: *mut c_void, size: usize, flags: c_uint);
    host_unregister = "cuMemHostUnregister": fn(at: *mut c_void);
    module_load = "cuModuleLoadData": fn(out: *mut Opaque, image: *const c_void);
    module_unload = "cuModuleUnload": fn(module: Opaque);
    module_function = "cuModuleGetFunction": fn(out: *mut Opaque, module: Opaque, name: *const c_char);
    launch = "cuLaunchKernel": fn(
        function: Opaque, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint,
        block_z: c_uint, shared: c_uint, stream: Opaque, params: *mut *mut c_void, extra: *mut *mut c_void
    );
}
