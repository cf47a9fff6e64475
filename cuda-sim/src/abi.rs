//! What `cuda.h` fixes: structures, constants and result codes. The stand-in and the contract program share it.

#![allow(dead_code, reason = "the stand-in and the contract program each use their part")]

use std::ffi::{c_int, c_uint, c_void};

/// A device pointer.
pub(crate) type DevicePtr = u64;
/// `CUdevice`.
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

/// `CUmemAllocationProp`.
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

pub(crate) const PINNED: c_uint = 1;
pub(crate) const LOCATION_DEVICE: c_uint = 1;
pub(crate) const POSIX_FD: c_uint = 1;
pub(crate) const FABRIC: c_uint = 8;
pub(crate) const ACCESS_NONE: c_uint = 0;
pub(crate) const ACCESS_READ: c_uint = 1;
pub(crate) const ACCESS_READ_WRITE: c_uint = 3;
pub(crate) const DMA_BUF_FD: c_uint = 1;
pub(crate) const STREAM_NON_BLOCKING: c_uint = 1;
pub(crate) const EVENT_DISABLE_TIMING: c_uint = 2;
pub(crate) const HOST_PORTABLE: c_uint = 1;
pub(crate) const HOST_READ_ONLY: c_uint = 8;

/// `CUdevice_attribute`, the ones in use.
pub(crate) mod attribute {
    use std::ffi::c_uint;
    pub(crate) const MAX_THREADS_PER_BLOCK: c_uint = 1;
    pub(crate) const MULTIPROCESSORS: c_uint = 16;
    pub(crate) const PCI_BUS: c_uint = 33;
    pub(crate) const PCI_DEVICE: c_uint = 34;
    pub(crate) const UNIFIED_ADDRESSING: c_uint = 41;
    pub(crate) const PCI_DOMAIN: c_uint = 50;
    pub(crate) const COMPUTE_MAJOR: c_uint = 75;
    pub(crate) const COMPUTE_MINOR: c_uint = 76;
    pub(crate) const HOST_REGISTER: c_uint = 99;
    pub(crate) const VMM: c_uint = 102;
    pub(crate) const POSIX_FD: c_uint = 103;
    pub(crate) const GPU_DIRECT_RDMA: c_uint = 116;
    pub(crate) const GPU_DIRECT_RDMA_WITH_VMM: c_uint = 110;
    #[allow(dead_code, reason = "the contract's rows do not ask for it")]
    pub(crate) const NIC_WRITES_ORDERING: c_uint = 118;
    pub(crate) const DMA_BUF: c_uint = 124;
    pub(crate) const FABRIC: c_uint = 128;
    pub(crate) const READ_ONLY_HOST_REGISTER: c_uint = 113;
}

macro_rules! codes {
    ($($name:ident = $value:literal,)*) => {
        /// `CUresult`.
        pub(crate) mod code {
            $(pub(crate) const $name: u32 = $value;)*

            /// Its name in `cuda.h`, without `CUDA_` and `ERROR_`.
            pub(crate) fn name(code: u32) -> Option<&'static str> {
                match code {
                    $($value => Some(stringify!($name)),)*
                    _ => None,
                }
            }

            /// The code of that name or number.
            pub(crate) fn parse(text: &str) -> Option<u32> {
                $(if text == stringify!($name) {
                    return Some($value);
                })*
                text.parse().ok()
            }
        }
    };
}

codes! {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    DEINITIALIZED = 4,
    DEVICE_UNAVAILABLE = 46,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    MAP_FAILED = 205,
    ALREADY_MAPPED = 208,
    NO_BINARY_FOR_GPU = 209,
    ECC_UNCORRECTABLE = 214,
    PEER_ACCESS_UNSUPPORTED = 217,
    INVALID_PTX = 218,
    NVLINK_UNCORRECTABLE = 220,
    UNSUPPORTED_PTX_VERSION = 222,
    CONTAINED = 226,
    INVALID_SOURCE = 300,
    OPERATING_SYSTEM = 304,
    INVALID_HANDLE = 400,
    ILLEGAL_STATE = 401,
    NOT_FOUND = 500,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    LAUNCH_OUT_OF_RESOURCES = 701,
    CONTEXT_IS_DESTROYED = 709,
    HOST_MEMORY_ALREADY_REGISTERED = 712,
    HOST_MEMORY_NOT_REGISTERED = 713,
    HARDWARE_STACK_ERROR = 714,
    MISALIGNED_ADDRESS = 716,
    LAUNCH_FAILED = 719,
    NOT_PERMITTED = 800,
    NOT_SUPPORTED = 801,
    SYSTEM_NOT_READY = 802,
    EXTERNAL_DEVICE = 911,
    UNKNOWN = 999,
}
