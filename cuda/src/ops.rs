//! One method a driver call: the seam between the RAII types and the driver.
//!
//! [`Real`] calls the driver. Tests put a recorder in its place, to see the order of teardown and to make any call
//! fail. Nothing outside this crate sees it.

use crate::{
    api::{AccessDesc, AllocationProp, Api, DevicePtr, Handle, MemLocation, Opaque, Ordinal},
    error::CudaError,
};
use flashboot_core::Result;
use std::{
    ffi::{CStr, c_int, c_void},
    fmt,
    os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd},
    ptr,
};

/// The result of one driver call.
pub(crate) type Call<T> = std::result::Result<T, CudaError>;

/// A driver object. Its value is the driver's own; it means something only to the [`Ops`] that gave it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Object(pub(crate) usize);

impl Object {
    fn raw(self) -> Opaque {
        ptr::with_exposed_provenance_mut(self.0)
    }
}

/// `CU_MEM_HANDLE_TYPE_…`, as bits.
pub(crate) mod handle_type {
    pub(crate) const POSIX_FD: u32 = 1;
    pub(crate) const FABRIC: u32 = 8;
}

const PINNED: u32 = 1;
const LOCATION_DEVICE: u32 = 1;
const GRANULARITY_RECOMMENDED: u32 = 1;
const ACCESS_READ: u32 = 1;
const ACCESS_READ_WRITE: u32 = 3;
const DMA_BUF_FD: u32 = 1;
const FLUSH_CURRENT_CONTEXT: u32 = 0;
const FLUSH_TO_ALL_DEVICES: u32 = 200;
const STREAM_NON_BLOCKING: u32 = 1;
const EVENT_BLOCKING_SYNC: u32 = 1;
const EVENT_DISABLE_TIMING: u32 = 2;
const HOST_PORTABLE: u32 = 1;
const HOST_READ_ONLY: u32 = 8;

/// What to allocate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AllocationKind {
    /// The device, by its ordinal in this process.
    pub(crate) device: Ordinal,
    /// [`handle_type`] bits.
    pub(crate) handle_types: u32,
    /// For a NIC to read and write it.
    pub(crate) gpu_direct_rdma: bool,
}

impl AllocationKind {
    fn prop(self) -> AllocationProp {
        AllocationProp {
            kind: PINNED,
            handle_types: self.handle_types,
            location: MemLocation { kind: LOCATION_DEVICE, id: self.device },
            win32: 0,
            compression: 0,
            gpu_direct_rdma: u8::from(self.gpu_direct_rdma),
            usage: 0,
            reserved: [0; 4],
        }
    }
}

/// Who may do what with a mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    Read,
    ReadWrite,
}

/// A kernel's launch.
#[derive(Debug)]
pub(crate) struct Launch<'a> {
    pub(crate) function: Object,
    pub(crate) grid: u32,
    pub(crate) block: u32,
    pub(crate) stream: Object,
    /// The arguments, each as the bytes the kernel's parameter has.
    pub(crate) args: &'a mut [Arg],
}

/// One kernel argument.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Arg {
    U32(u32),
    U64(u64),
}

/// The driver calls in use.
///
/// # Safety of the methods marked `unsafe`
///
/// They hand addresses to hardware that works on after the call returns. Whoever calls one keeps both ends mapped,
/// and nobody else writing the destination, until the stream has passed it: the RAII types own what is needed to
/// see to that. All other methods can at worst return an error.
pub(crate) trait Ops: Send + Sync + fmt::Debug {
    fn init(&self) -> Call<()>;
    fn driver_version(&self) -> Call<u32>;
    fn device_count(&self) -> Call<u32>;
    /// The device with this number.
    fn device_get(&self, number: u32) -> Call<Ordinal>;
    fn device_name(&self, device: Ordinal) -> Call<String>;
    fn device_uuid(&self, device: Ordinal) -> Call<[u8; 16]>;
    fn device_attribute(&self, device: Ordinal, attribute: u32) -> Call<i32>;
    fn device_total_mem(&self, device: Ordinal) -> Call<u64>;
    fn device_pci(&self, device: Ordinal) -> Call<String>;
    fn device_can_access_peer(&self, device: Ordinal, peer: Ordinal) -> Call<bool>;
    fn primary_retain(&self, device: Ordinal) -> Call<Object>;
    fn primary_release(&self, device: Ordinal) -> Call<()>;
    fn ctx_push(&self, context: Object) -> Call<()>;
    fn ctx_pop(&self) -> Call<()>;
    /// Waits for all work of the current context.
    fn ctx_synchronize(&self) -> Call<()>;
    /// Free and total bytes of the current context's device.
    fn mem_get_info(&self) -> Call<(u64, u64)>;
    fn mem_granularity(&self, kind: AllocationKind) -> Call<u64>;
    fn mem_create(&self, size: u64, kind: AllocationKind) -> Call<Handle>;
    fn mem_release(&self, handle: Handle) -> Call<()>;
    fn export_fd(&self, handle: Handle) -> Call<OwnedFd>;
    fn export_fabric(&self, handle: Handle) -> Call<Box<[u8; 64]>>;
    fn import_fd(&self, fd: BorrowedFd<'_>) -> Call<Handle>;
    fn import_fabric(&self, handle: &[u8; 64]) -> Call<Handle>;
    fn address_reserve(&self, size: u64) -> Call<DevicePtr>;
    fn address_free(&self, at: DevicePtr, size: u64) -> Call<()>;
    fn mem_map(&self, at: DevicePtr, size: u64, handle: Handle) -> Call<()>;
    fn mem_unmap(&self, at: DevicePtr, size: u64) -> Call<()>;
    fn set_access(&self, at: DevicePtr, size: u64, device: Ordinal, access: Access) -> Call<()>;
    fn dma_buf(&self, at: DevicePtr, size: u64) -> Call<OwnedFd>;
    /// Makes what NICs have written to the current context's memory visible to every GPU.
    fn flush_nic_writes(&self) -> Call<()>;
    fn stream_create(&self) -> Call<Object>;
    fn stream_destroy(&self, stream: Object) -> Call<()>;
    fn stream_synchronize(&self, stream: Object) -> Call<()>;
    fn stream_wait_event(&self, stream: Object, event: Object) -> Call<()>;
    fn event_create(&self, timing: bool) -> Call<Object>;
    fn event_destroy(&self, event: Object) -> Call<()>;
    fn event_record(&self, event: Object, stream: Object) -> Call<()>;
    /// Whether everything before the event is done.
    fn event_query(&self, event: Object) -> Call<bool>;
    fn event_elapsed_ms(&self, start: Object, end: Object) -> Call<f32>;
    /// # Safety
    /// See [`Ops`].
    unsafe fn copy_dtod(&self, to: DevicePtr, from: DevicePtr, size: u64, stream: Object) -> Call<()>;
    /// # Safety
    /// See [`Ops`]; `to` is `size` bytes of host memory.
    unsafe fn copy_dtoh(&self, to: *mut u8, from: DevicePtr, size: u64, stream: Object) -> Call<()>;
    /// # Safety
    /// See [`Ops`]; `from` is `size` bytes of host memory.
    unsafe fn copy_htod(&self, to: DevicePtr, from: *const u8, size: u64, stream: Object) -> Call<()>;
    /// # Safety
    /// See [`Ops`].
    unsafe fn memset(&self, at: DevicePtr, byte: u8, size: u64, stream: Object) -> Call<()>;
    fn host_alloc(&self, size: u64) -> Call<*mut u8>;
    /// # Safety
    /// `at` came from [`host_alloc`](Self::host_alloc), and neither host nor device uses it any more.
    unsafe fn host_free(&self, at: *mut u8) -> Call<()>;
    /// # Safety
    /// `size` bytes from `at` stay mapped until they are unregistered.
    unsafe fn host_register(&self, at: *mut u8, size: u64, access: Access) -> Call<()>;
    fn host_unregister(&self, at: *mut u8) -> Call<()>;
    fn module_load(&self, image: &CStr) -> Call<Object>;
    fn module_unload(&self, module: Object) -> Call<()>;
    fn module_function(&self, module: Object, name: &CStr) -> Call<Object>;
    /// # Safety
    /// See [`Ops`]; the arguments are what the kernel takes.
    unsafe fn launch(&self, launch: Launch<'_>) -> Call<()>;
}

/// The driver itself.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Real(&'static Api);

impl Real {
    /// Opens the driver library.
    pub(crate) fn open() -> Result<Self> {
        Api::shared().map(Self)
    }
}

fn check(call: &'static str, code: u32) -> Call<()> {
    if code == 0 { Ok(()) } else { Err(CudaError { call, code }) }
}

/// Calls `$field`, named `$name` in errors. Every use stands behind a contract of [`Ops`].
macro_rules! cu {
    ($self:ident, $field:ident, $name:literal $(, $arg:expr)* $(,)?) => {
        // SAFETY: out-pointers are to locals of the right type that outlive the call, and handles are ones that
        // the driver gave; a stale one is an error code. Addresses are the caller's promise (`Ops`).
        check($name, unsafe { ($self.0.$field)($($arg),*) })
    };
}

/// A text of the driver's in a buffer of ours.
fn text(buffer: &[u8]) -> String {
    CStr::from_bytes_until_nul(buffer).map_or_else(|_| String::new(), |s| s.to_string_lossy().into_owned())
}

impl Ops for Real {
    fn init(&self) -> Call<()> {
        cu!(self, init, "cuInit", 0)
    }

    fn driver_version(&self) -> Call<u32> {
        let mut version = 0;
        cu!(self, driver_version, "cuDriverGetVersion", &raw mut version)?;
        Ok(version.unsigned_abs())
    }

    fn device_count(&self) -> Call<u32> {
        let mut count = 0;
        cu!(self, device_count, "cuDeviceGetCount", &raw mut count)?;
        Ok(count.unsigned_abs())
    }

    fn device_get(&self, number: u32) -> Call<Ordinal> {
        let mut device = 0;
        cu!(self, device_get, "cuDeviceGet", &raw mut device, number.cast_signed())?;
        Ok(device)
    }

    fn device_name(&self, device: Ordinal) -> Call<String> {
        let mut buffer = [0_u8; 256];
        cu!(self, device_name, "cuDeviceGetName", buffer.as_mut_ptr().cast(), 256, device)?;
        Ok(text(&buffer))
    }

    fn device_uuid(&self, device: Ordinal) -> Call<[u8; 16]> {
        let mut uuid = [0; 16];
        cu!(self, device_uuid, "cuDeviceGetUuid", &raw mut uuid, device)?;
        Ok(uuid)
    }

    fn device_attribute(&self, device: Ordinal, attribute: u32) -> Call<i32> {
        let mut value: c_int = 0;
        cu!(self, device_attribute, "cuDeviceGetAttribute", &raw mut value, attribute, device)?;
        Ok(value)
    }

    fn device_total_mem(&self, device: Ordinal) -> Call<u64> {
        let mut bytes = 0_usize;
        cu!(self, device_total_mem, "cuDeviceTotalMem", &raw mut bytes, device)?;
        Ok(bytes as u64)
    }

    fn device_pci(&self, device: Ordinal) -> Call<String> {
        let mut buffer = [0_u8; 64];
        cu!(self, device_pci, "cuDeviceGetPCIBusId", buffer.as_mut_ptr().cast(), 64, device)?;
        Ok(text(&buffer).to_lowercase())
    }

    fn device_can_access_peer(&self, device: Ordinal, peer: Ordinal) -> Call<bool> {
        let mut can: c_int = 0;
        cu!(self, device_can_access_peer, "cuDeviceCanAccessPeer", &raw mut can, device, peer)?;
        Ok(can != 0)
    }

    fn primary_retain(&self, device: Ordinal) -> Call<Object> {
        self.object(|out| cu!(self, primary_retain, "cuDevicePrimaryCtxRetain", out, device))
    }

    fn primary_release(&self, device: Ordinal) -> Call<()> {
        cu!(self, primary_release, "cuDevicePrimaryCtxRelease", device)
    }

    fn ctx_push(&self, context: Object) -> Call<()> {
        cu!(self, ctx_push, "cuCtxPushCurrent", context.raw())
    }

    fn ctx_pop(&self) -> Call<()> {
        self.object(|out| cu!(self, ctx_pop, "cuCtxPopCurrent", out)).map(drop)
    }

    fn mem_get_info(&self) -> Call<(u64, u64)> {
        let (mut free, mut total) = (0_usize, 0_usize);
        cu!(self, mem_get_info, "cuMemGetInfo", &raw mut free, &raw mut total)?;
        Ok((free as u64, total as u64))
    }

    fn mem_granularity(&self, kind: AllocationKind) -> Call<u64> {
        let mut bytes = 0_usize;
        let prop = kind.prop();
        let out = &raw mut bytes;
        cu!(
            self,
            mem_granularity,
            "cuMemGetAllocationGranularity",
            out,
            &raw const prop,
            GRANULARITY_RECOMMENDED
        )?;
        Ok(bytes as u64)
    }

    fn mem_create(&self, size: u64, kind: AllocationKind) -> Call<Handle> {
        let mut handle = 0;
        let prop = kind.prop();
        cu!(self, mem_create, "cuMemCreate", &raw mut handle, size as usize, &raw const prop, 0)?;
        Ok(handle)
    }

    fn mem_release(&self, handle: Handle) -> Call<()> {
        cu!(self, mem_release, "cuMemRelease", handle)
    }

    fn export_fd(&self, handle: Handle) -> Call<OwnedFd> {
        let mut fd: c_int = -1;
        let out = (&raw mut fd).cast();
        cu!(self, mem_export, "cuMemExportToShareableHandle", out, handle, handle_type::POSIX_FD, 0)?;
        // SAFETY: the driver made this descriptor for the caller, who owns it now.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    fn export_fabric(&self, handle: Handle) -> Call<Box<[u8; 64]>> {
        let mut fabric = Box::new([0; 64]);
        let out = fabric.as_mut_ptr().cast();
        cu!(self, mem_export, "cuMemExportToShareableHandle", out, handle, handle_type::FABRIC, 0)?;
        Ok(fabric)
    }

    fn import_fd(&self, fd: BorrowedFd<'_>) -> Call<Handle> {
        let mut handle = 0;
        // The driver takes the descriptor itself in the place of a pointer.
        let value = ptr::without_provenance_mut::<c_void>(fd.as_raw_fd() as usize);
        let out = &raw mut handle;
        cu!(self, mem_import, "cuMemImportFromShareableHandle", out, value, handle_type::POSIX_FD)?;
        Ok(handle)
    }

    fn import_fabric(&self, fabric: &[u8; 64]) -> Call<Handle> {
        let mut handle = 0;
        let value = fabric.as_ptr().cast_mut().cast();
        let out = &raw mut handle;
        cu!(self, mem_import, "cuMemImportFromShareableHandle", out, value, handle_type::FABRIC)?;
        Ok(handle)
    }

    fn address_reserve(&self, size: u64) -> Call<DevicePtr> {
        let mut at = 0;
        cu!(self, address_reserve, "cuMemAddressReserve", &raw mut at, size as usize, 0, 0, 0)?;
        Ok(at)
    }

    fn address_free(&self, at: DevicePtr, size: u64) -> Call<()> {
        cu!(self, address_free, "cuMemAddressFree", at, size as usize)
    }

    fn mem_map(&self, at: DevicePtr, size: u64, handle: Handle) -> Call<()> {
        cu!(self, mem_map, "cuMemMap", at, size as usize, 0, handle, 0)
    }

    fn mem_unmap(&self, at: DevicePtr, size: u64) -> Call<()> {
        cu!(self, mem_unmap, "cuMemUnmap", at, size as usize)
    }

    fn set_access(&self, at: DevicePtr, size: u64, device: Ordinal, access: Access) -> Call<()> {
        let flags = match access {
            Access::Read => ACCESS_READ,
            Access::ReadWrite => ACCESS_READ_WRITE,
        };
        let desc = AccessDesc { location: MemLocation { kind: LOCATION_DEVICE, id: device }, flags };
        cu!(self, set_access, "cuMemSetAccess", at, size as usize, &raw const desc, 1)
    }

    fn dma_buf(&self, at: DevicePtr, size: u64) -> Call<OwnedFd> {
        let mut fd: c_int = -1;
        let out = (&raw mut fd).cast();
        cu!(self, handle_for_range, "cuMemGetHandleForAddressRange", out, at, size as usize, DMA_BUF_FD, 0)?;
        // SAFETY: the driver made this descriptor for the caller, who owns it now.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    fn flush_nic_writes(&self) -> Call<()> {
        cu!(self, flush_nic_writes, "cuFlushGPUDirectRDMAWrites", FLUSH_CURRENT_CONTEXT, FLUSH_TO_ALL_DEVICES)
    }

    fn ctx_synchronize(&self) -> Call<()> {
        cu!(self, ctx_synchronize, "cuCtxSynchronize")
    }

    fn stream_create(&self) -> Call<Object> {
        self.object(|out| cu!(self, stream_create, "cuStreamCreate", out, STREAM_NON_BLOCKING))
    }

    fn stream_destroy(&self, stream: Object) -> Call<()> {
        cu!(self, stream_destroy, "cuStreamDestroy", stream.raw())
    }

    fn stream_synchronize(&self, stream: Object) -> Call<()> {
        cu!(self, stream_synchronize, "cuStreamSynchronize", stream.raw())
    }

    fn stream_wait_event(&self, stream: Object, event: Object) -> Call<()> {
        cu!(self, stream_wait_event, "cuStreamWaitEvent", stream.raw(), event.raw(), 0)
    }

    fn event_create(&self, timing: bool) -> Call<Object> {
        let flags = if timing { EVENT_BLOCKING_SYNC } else { EVENT_BLOCKING_SYNC | EVENT_DISABLE_TIMING };
        self.object(|out| cu!(self, event_create, "cuEventCreate", out, flags))
    }

    fn event_destroy(&self, event: Object) -> Call<()> {
        cu!(self, event_destroy, "cuEventDestroy", event.raw())
    }

    fn event_record(&self, event: Object, stream: Object) -> Call<()> {
        cu!(self, event_record, "cuEventRecord", event.raw(), stream.raw())
    }

    fn event_query(&self, event: Object) -> Call<bool> {
        match cu!(self, event_query, "cuEventQuery", event.raw()) {
            Ok(()) => Ok(true),
            Err(e) if e.code == crate::error::code::NOT_READY => Ok(false),
            Err(e) => Err(e),
        }
    }

    fn event_elapsed_ms(&self, start: Object, end: Object) -> Call<f32> {
        let mut ms = 0.0;
        cu!(self, event_elapsed, "cuEventElapsedTime", &raw mut ms, start.raw(), end.raw())?;
        Ok(ms)
    }

    unsafe fn copy_dtod(&self, to: DevicePtr, from: DevicePtr, size: u64, stream: Object) -> Call<()> {
        cu!(self, copy_dtod, "cuMemcpyDtoDAsync", to, from, size as usize, stream.raw())
    }

    unsafe fn copy_dtoh(&self, to: *mut u8, from: DevicePtr, size: u64, stream: Object) -> Call<()> {
        cu!(self, copy_dtoh, "cuMemcpyDtoHAsync", to.cast(), from, size as usize, stream.raw())
    }

    unsafe fn copy_htod(&self, to: DevicePtr, from: *const u8, size: u64, stream: Object) -> Call<()> {
        cu!(self, copy_htod, "cuMemcpyHtoDAsync", to, from.cast(), size as usize, stream.raw())
    }

    unsafe fn memset(&self, at: DevicePtr, byte: u8, size: u64, stream: Object) -> Call<()> {
        cu!(self, memset, "cuMemsetD8Async", at, byte, size as usize, stream.raw())
    }

    fn host_alloc(&self, size: u64) -> Call<*mut u8> {
        let mut at: *mut c_void = ptr::null_mut();
        cu!(self, host_alloc, "cuMemHostAlloc", &raw mut at, size as usize, HOST_PORTABLE)?;
        Ok(at.cast())
    }

    unsafe fn host_free(&self, at: *mut u8) -> Call<()> {
        cu!(self, host_free, "cuMemFreeHost", at.cast())
    }

    unsafe fn host_register(&self, at: *mut u8, size: u64, access: Access) -> Call<()> {
        let flags = match access {
            Access::Read => HOST_PORTABLE | HOST_READ_ONLY,
            Access::ReadWrite => HOST_PORTABLE,
        };
        cu!(self, host_register, "cuMemHostRegister", at.cast(), size as usize, flags)
    }

    fn host_unregister(&self, at: *mut u8) -> Call<()> {
        cu!(self, host_unregister, "cuMemHostUnregister", at.cast())
    }

    fn module_load(&self, image: &CStr) -> Call<Object> {
        self.object(|out| cu!(self, module_load, "cuModuleLoadData", out, image.as_ptr().cast()))
    }

    fn module_unload(&self, module: Object) -> Call<()> {
        cu!(self, module_unload, "cuModuleUnload", module.raw())
    }

    fn module_function(&self, module: Object, name: &CStr) -> Call<Object> {
        self.object(|out| cu!(self, module_function, "cuModuleGetFunction", out, module.raw(), name.as_ptr()))
    }

    unsafe fn launch(&self, launch: Launch<'_>) -> Call<()> {
        let Launch { function, grid, block, stream, args } = launch;
        let mut params: Vec<*mut c_void> = args
            .iter_mut()
            .map(|arg| match arg {
                Arg::U32(value) => (&raw mut *value).cast(),
                Arg::U64(value) => (&raw mut *value).cast(),
            })
            .collect();
        let (function, stream, params) = (function.raw(), stream.raw(), params.as_mut_ptr());
        cu!(
            self,
            launch,
            "cuLaunchKernel",
            function,
            grid,
            1,
            1,
            block,
            1,
            1,
            0,
            stream,
            params,
            ptr::null_mut()
        )
    }
}

impl Real {
    fn object(&self, make: impl FnOnce(*mut Opaque) -> Call<()>) -> Call<Object> {
        let mut object: Opaque = ptr::null_mut();
        make(&raw mut object)?;
        Ok(Object(object.expose_provenance()))
    }
}
