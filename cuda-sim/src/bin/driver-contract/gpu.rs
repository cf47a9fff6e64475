//! Set-up that cases share. What fails here is no verdict: the line then begins with `setup`.

use crate::{
    abi::{
        ACCESS_READ_WRITE, AccessDesc, AllocationProp, DevicePtr, HOST_PORTABLE, Handle, LOCATION_DEVICE,
        MemLocation, Opaque, Ordinal, PINNED, POSIX_FD, STREAM_NON_BLOCKING,
    },
    driver::Driver,
    facts::must,
};
use std::{
    ffi::{CString, c_int, c_uint, c_void},
    ops::Deref,
    os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd},
    ptr,
};

/// 2 MiB: the granularity, which the case `granularity` checks.
pub(crate) const GRANULE: usize = 2 << 20;

/// The kernel.
pub(crate) const PTX: &str = include_str!("../../../../cuda/kernels/blake3.ptx");

/// A driver with the first device's primary context current on this thread.
pub(crate) struct Gpu<'a>(pub(crate) &'a Driver);

impl Deref for Gpu<'_> {
    type Target = Driver;
    fn deref(&self) -> &Driver {
        self.0
    }
}

/// Memory mapped somewhere.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Mapped {
    pub(crate) at: DevicePtr,
    pub(crate) size: usize,
    pub(crate) handle: Handle,
}

/// Properties of memory on a device.
pub(crate) fn prop(device: Ordinal, handle_types: c_uint) -> AllocationProp {
    AllocationProp {
        kind: PINNED,
        handle_types,
        location: MemLocation { kind: LOCATION_DEVICE, id: device },
        win32: 0,
        compression: 0,
        gpu_direct_rdma: 0,
        usage: 0,
        reserved: [0; 4],
    }
}

/// An access of a device.
pub(crate) fn access(device: Ordinal, flags: c_uint) -> AccessDesc {
    AccessDesc { location: MemLocation { kind: LOCATION_DEVICE, id: device }, flags }
}

impl Driver {
    /// The context of `device` becomes current.
    pub(crate) fn enter(&self, device: Ordinal) -> Result<Opaque, String> {
        must("init", self.init(0))?;
        let mut context = ptr::null_mut();
        must("retain", self.primary_retain(&raw mut context, device))?;
        must("push", self.ctx_push(context))?;
        Ok(context)
    }

    /// How many devices there are.
    pub(crate) fn count(&self) -> Result<c_int, String> {
        let mut count = 0;
        must("count", self.device_count(&raw mut count))?;
        Ok(count)
    }

    /// An error that skips the case where there is one device only.
    pub(crate) fn two(&self) -> Result<(), String> {
        must("init", self.init(0))?;
        if self.count()? < 2 { Err("skipped: needs two devices".into()) } else { Ok(()) }
    }

    /// The identity of a device.
    pub(crate) fn uuid(&self, device: Ordinal) -> Result<[u8; 16], String> {
        let mut uuid = [0; 16];
        must("uuid", self.device_uuid(&raw mut uuid, device))?;
        Ok(uuid)
    }
}

impl<'a> Gpu<'a> {
    /// Initialises the driver and enters the first device.
    pub(crate) fn new(driver: &'a Driver) -> Result<Self, String> {
        driver.enter(0)?;
        Ok(Self(driver))
    }

    /// Physical memory of the first device.
    pub(crate) fn memory(&self, size: usize, types: c_uint) -> Result<Handle, String> {
        let mut handle = 0;
        let prop = prop(0, types);
        must("create", self.mem_create(&raw mut handle, size, &raw const prop, 0))?;
        Ok(handle)
    }

    /// A range of addresses.
    pub(crate) fn range(&self, size: usize) -> Result<DevicePtr, String> {
        let mut at = 0;
        must("reserve", self.address_reserve(&raw mut at, size, 0, 0, 0))?;
        Ok(at)
    }

    /// Maps a handle at a range of its own, without access.
    pub(crate) fn map_only(&self, handle: Handle, size: usize) -> Result<DevicePtr, String> {
        let at = self.range(size)?;
        must("map", self.mem_map(at, size, 0, handle, 0))?;
        Ok(at)
    }

    /// Sets the access of a device.
    pub(crate) fn allow(&self, at: DevicePtr, size: usize, device: Ordinal, flags: c_uint) -> u32 {
        let desc = access(device, flags);
        self.set_access(at, size, &raw const desc, 1)
    }

    /// Maps a handle for reading and writing.
    pub(crate) fn map(&self, handle: Handle, size: usize) -> Result<Mapped, String> {
        let at = self.map_only(handle, size)?;
        must("access", self.allow(at, size, 0, ACCESS_READ_WRITE))?;
        Ok(Mapped { at, size, handle })
    }

    /// New memory, exportable as a descriptor, mapped for reading and writing.
    pub(crate) fn mapped(&self, size: usize) -> Result<Mapped, String> {
        let handle = self.memory(size, POSIX_FD)?;
        self.map(handle, size)
    }

    /// A stream.
    pub(crate) fn stream(&self) -> Result<Opaque, String> {
        let mut stream = ptr::null_mut();
        must("stream", self.stream_create(&raw mut stream, STREAM_NON_BLOCKING))?;
        Ok(stream)
    }

    /// An event.
    pub(crate) fn event(&self, flags: c_uint) -> Result<Opaque, String> {
        let mut event = ptr::null_mut();
        must("event", self.event_create(&raw mut event, flags))?;
        Ok(event)
    }

    /// Fills and waits.
    pub(crate) fn fill(&self, memory: Mapped, byte: u8) -> Result<(), String> {
        must("memset", self.memset(memory.at, byte, memory.size, ptr::null_mut()))?;
        must("sync", self.stream_synchronize(ptr::null_mut()))
    }

    /// The byte at an address, in hexadecimal, or the result that kept it.
    pub(crate) fn peek(&self, at: DevicePtr) -> String {
        let mut byte = 0_u8;
        let copied = self.copy_dtoh((&raw mut byte).cast(), at, 1, ptr::null_mut());
        if copied != 0 {
            return crate::facts::name(copied);
        }
        match self.stream_synchronize(ptr::null_mut()) {
            0 => format!("{byte:02x}"),
            failed => crate::facts::name(failed),
        }
    }

    /// Pinned host memory.
    pub(crate) fn pinned(&self, size: usize) -> Result<*mut u8, String> {
        let mut at = ptr::null_mut();
        must("host_alloc", self.host_alloc(&raw mut at, size, HOST_PORTABLE))?;
        // SAFETY: the driver gave `size` bytes at `at`.
        unsafe { ptr::write_bytes(at.cast::<u8>(), 0, size) };
        Ok(at.cast())
    }

    /// Exports as a descriptor.
    pub(crate) fn export(&self, handle: Handle) -> Result<OwnedFd, String> {
        let mut fd: c_int = -1;
        must("export", self.mem_export((&raw mut fd).cast(), handle, POSIX_FD, 0))?;
        // SAFETY: the driver made the descriptor for its caller.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// Imports a descriptor.
    pub(crate) fn import(&self, fd: BorrowedFd<'_>, out: &mut Handle) -> u32 {
        let value = ptr::without_provenance_mut::<c_void>(fd.as_raw_fd() as usize);
        self.mem_import(out, value, POSIX_FD)
    }

    /// Free memory of the device.
    pub(crate) fn free(&self) -> Result<usize, String> {
        let (mut free, mut total) = (0, 0);
        must("info", self.mem_get_info(&raw mut free, &raw mut total))?;
        Ok(free)
    }

    /// The kernel's module.
    pub(crate) fn module(&self) -> Result<Opaque, String> {
        let image = CString::new(PTX).map_err(|e| e.to_string())?;
        let mut module = ptr::null_mut();
        must("module", self.module_load(&raw mut module, image.as_ptr().cast()))?;
        Ok(module)
    }

    /// A kernel of it.
    pub(crate) fn function(&self, module: Opaque, name: &str) -> Result<Opaque, String> {
        let name = CString::new(name).map_err(|e| e.to_string())?;
        let mut function = ptr::null_mut();
        must("function", self.module_function(&raw mut function, module, name.as_ptr()))?;
        Ok(function)
    }

    /// Milliseconds of work on a stream: copies of 64 MiB from pinned memory.
    pub(crate) fn busy(&self, stream: Opaque) -> Result<Mapped, String> {
        let memory = self.mapped(64 << 20)?;
        let from = self.pinned(memory.size)?;
        for _ in 0..8 {
            must("copy", self.copy_htod(memory.at, from.cast(), memory.size, stream))?;
        }
        Ok(memory)
    }
}
