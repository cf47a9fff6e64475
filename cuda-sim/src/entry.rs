//! The driver's functions, as the loader finds them.

use crate::{
    abi::{AccessDesc, AllocationProp, FABRIC, HOST_READ_ONLY, POSIX_FD, code},
    config::Config,
    context,
    kernel::{Arguments, Geometry, check_geometry},
    pinned::HostRange,
    stream::{synchronize, synchronize_all, wait_until},
    vmm::{GRANULE, fd_of, give},
    work::{Action, Place, Work, stage},
    world::{World, answer, answer_before_init, init, pop, push},
};
use std::{
    ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void},
    mem::MaybeUninit,
    ptr, slice,
};

/// An out-pointer, or null.
#[repr(transparent)]
pub(crate) struct Out<'a, T>(Option<&'a mut MaybeUninit<T>>);

impl<T> Out<'_, T> {
    /// Null is INVALID_VALUE (row `device-null-out` and others).
    fn put(self, value: T) -> Result<(), u32> {
        self.there()?.0.map(|out| out.write(value)).ok_or(code::INVALID_VALUE).map(drop)
    }

    /// Asked before something is made that nobody would get.
    fn there(self) -> Result<Self, u32> {
        if self.0.is_some() { Ok(self) } else { Err(code::INVALID_VALUE) }
    }
}

/// A driver object's name as the pointer that `cuda.h` says it is.
#[repr(transparent)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Object(*mut c_void);

impl Object {
    fn of(name: u64) -> Self {
        Self(ptr::without_provenance_mut(name as usize))
    }

    fn name(self) -> u64 {
        self.0.addr() as u64
    }
}

macro_rules! entries {
    ($(fn $name:ident = $symbol:literal ($($arg:ident: $kind:ty),*) $body:expr;)*) => {
        $(
            #[doc = concat!("`", $symbol, "`.")]
            // SAFETY: the name is the driver's, which this library stands in for; no other library of the process
            // may define it, as none may beside the driver.
            #[unsafe(export_name = $symbol)]
            #[allow(clippy::too_many_arguments, reason = "the driver's")]
            pub(crate) extern "C" fn $name($($arg: $kind),*) -> u32 {
                let body: fn(&'static World, $($kind),*) -> Result<(), u32> = $body;
                answer($symbol, |world| body(world, $($arg),*))
            }
        )*
    };
}

/// `cuInit`.
// SAFETY: as for all entries.
#[unsafe(export_name = "cuInit")]
pub(crate) extern "C" fn cu_init(flags: c_uint) -> u32 {
    init(flags)
}

/// `cuDriverGetVersion`: works before `cuInit` (row `before-init`).
// SAFETY: as for all entries.
#[unsafe(export_name = "cuDriverGetVersion")]
pub(crate) extern "C" fn driver_version(out: Out<'_, c_int>) -> u32 {
    answer_before_init("cuDriverGetVersion", |config: &Config| out.put(config.driver_version))
}

entries! {
    fn device_count = "cuDeviceGetCount"(out: Out<'_, c_int>)
        |world, out| out.put(world.devices.len() as c_int);
    fn device_get = "cuDeviceGet"(out: Out<'_, c_int>, ordinal: c_int) |world, out, ordinal| {
        world.device(ordinal)?;
        out.put(ordinal)
    };
    fn device_name = "cuDeviceGetName"(to: *mut c_char, len: c_int, device: c_int) |world, to, len, device| {
        let (_, device) = world.device(device)?;
        text(&device.name, to, len);
        Ok(())
    };
    fn device_uuid = "cuDeviceGetUuid_v2"(out: Out<'_, [u8; 16]>, device: c_int)
        |world, out, device| out.put(world.device(device)?.1.uuid);
    fn device_attribute = "cuDeviceGetAttribute"(out: Out<'_, c_int>, attribute: c_uint, device: c_int)
        |world, out, attribute, device| {
            let out = out.there()?;
            out.put(world.device(device)?.1.attribute(attribute)?)
        };
    fn device_total_mem = "cuDeviceTotalMem_v2"(out: Out<'_, usize>, device: c_int) |world, out, device| {
        world.device(device)?;
        out.put(world.config.memory)
    };
    fn device_pci = "cuDeviceGetPCIBusId"(to: *mut c_char, len: c_int, device: c_int)
        |world, to, len, device| {
            let (_, device) = world.device(device)?;
            // Row `device-pci-form`.
            if len <= device.pci.len() as c_int {
                return Err(code::INVALID_VALUE);
            }
            text(&device.pci, to, len);
            Ok(())
        };
    fn device_can_access_peer = "cuDeviceCanAccessPeer"(out: Out<'_, c_int>, device: c_int, peer: c_int)
        |world, out, device, peer| {
            let (one, other) = (world.device(device)?.0, world.device(peer)?.0);
            // Rows `peer-self`, `peer-two`, `peer-out-of-range`.
            out.put(c_int::from(one != other && world.config.p2p))
        };
    fn primary_retain = "cuDevicePrimaryCtxRetain"(out: Out<'_, Object>, device: c_int)
        |world, out, device| {
            let (ordinal, _) = world.device(device)?;
            let out = out.there()?;
            world.state().contexts.retain(ordinal)?;
            out.put(Object::of(context::name(ordinal)))
        };
    fn primary_release = "cuDevicePrimaryCtxRelease_v2"(device: c_int) |world, device| {
        let (ordinal, _) = world.device(device)?;
        world.settled().release_primary(world, ordinal)
    };
    fn ctx_push = "cuCtxPushCurrent_v2"(context: Object) |world, context| {
        // Row `push-null`. A released context can be pushed (row `primary-released-then-used`).
        let ordinal = context::ordinal(context.name(), world.devices.len());
        push(ordinal.ok_or(code::INVALID_VALUE)?);
        Ok(())
    };
    fn ctx_pop = "cuCtxPopCurrent_v2"(out: Out<'_, Object>) |_, out| {
        let ordinal = pop()?;
        // Row `push-pop-nest`: whoever does not want it passes null.
        let _ = out.put(Object::of(context::name(ordinal)));
        Ok(())
    };
    fn mem_get_info = "cuMemGetInfo_v2"(free: Out<'_, usize>, total: Out<'_, usize>) |world, free, total| {
        let ordinal = world.current()?;
        let physical = world.devices.get(ordinal).map(|device| device.physical).ok_or(code::INVALID_DEVICE)?;
        let (left, all) = world.host.info(physical);
        free.put(left)?;
        total.put(all)
    };
    fn mem_granularity = "cuMemGetAllocationGranularity"(
        out: Out<'_, usize>, prop: Option<&AllocationProp>, option: c_uint
    ) |_, out, prop, option| {
        // Row `granularity`: the device is not looked at.
        if prop.is_none() || option > 1 {
            return Err(code::INVALID_VALUE);
        }
        out.put(GRANULE)
    };
    fn mem_create = "cuMemCreate"(
        out: Out<'_, u64>, size: usize, prop: Option<&AllocationProp>, flags: c_ulonglong
    ) |world, out, size, prop, flags| {
        let out = out.there()?;
        let mut state = world.state();
        if let Some(prop) = prop
            && let Ok((ordinal, _)) = world.device(prop.location.id)
            && state.contexts.is_dead(ordinal)
        {
            return Err(code::DEVICE_UNAVAILABLE);
        }
        out.put(state.vmm.create(world, size, prop, flags)?)
    };
    fn mem_release = "cuMemRelease"(handle: u64) |world, handle| world.settled().mem_release(handle);
    fn mem_export = "cuMemExportToShareableHandle"(
        out: Out<'_, [u8; 64]>, handle: u64, kind: c_uint, flags: c_ulonglong
    ) |world, out, handle, kind, flags| {
        let Out(Some(out)) = out.there()? else { return Err(code::INVALID_VALUE) };
        let state = world.state();
        match kind {
            POSIX_FD => {
                let fd = give(state.vmm.export_fd(handle, flags)?);
                let out: *mut c_int = out.as_mut_ptr().cast();
                // SAFETY: for this kind of handle the program's pointer is to a descriptor's place.
                unsafe { out.write(fd) };
            }
            FABRIC => {
                out.write(state.vmm.export_fabric(handle, flags)?);
            }
            _ => return Err(code::INVALID_VALUE),
        }
        Ok(())
    };
    fn mem_import = "cuMemImportFromShareableHandle"(out: Out<'_, u64>, from: *mut c_void, kind: c_uint)
        |world, out, from, kind| {
            let out = out.there()?;
            match kind {
                POSIX_FD => out.put(world.state().vmm.import_fd(world, fd_of(from.addr())?)?),
                FABRIC if from.is_null() => Err(code::INVALID_VALUE),
                FABRIC => {
                    // SAFETY: for this kind of handle the program's pointer is to 64 bytes.
                    let bytes = unsafe { from.cast::<[u8; 64]>().read() };
                    out.put(world.state().vmm.import_fabric(world, &bytes)?)
                }
                _ => Err(code::INVALID_VALUE),
            }
        };
    fn address_reserve = "cuMemAddressReserve"(
        out: Out<'_, u64>, size: usize, align: usize, at: u64, flags: c_ulonglong
    ) |world, out, size, align, at, flags| {
        let out = out.there()?;
        out.put(world.state().vmm.reserve(size, align, at, flags)?)
    };
    fn address_free = "cuMemAddressFree"(at: u64, size: usize)
        |world, at, size| world.state().vmm.free(at, size);
    fn mem_map = "cuMemMap"(at: u64, size: usize, offset: usize, handle: u64, flags: c_ulonglong)
        |world, at, size, offset, handle, flags| world.state().vmm.map(at, size, offset, handle, flags);
    fn mem_unmap = "cuMemUnmap"(at: u64, size: usize) |world, at, size| world.settled().mem_unmap(at, size);
    fn set_access = "cuMemSetAccess"(at: u64, size: usize, desc: *const AccessDesc, count: usize)
        |world, at, size, desc, count| {
            if desc.is_null() || count == 0 {
                return Err(code::INVALID_VALUE);
            }
            // SAFETY: the program passes an array of that many.
            let descs = unsafe { slice::from_raw_parts(desc, count) };
            world.settled().set_access(world, at, size, descs)
        };
    fn handle_for_range = "cuMemGetHandleForAddressRange"(
        out: Out<'_, c_int>, at: u64, size: usize, kind: c_uint, flags: c_ulonglong
    ) |world, out, at, size, kind, flags| {
        let out = out.there()?;
        out.put(give(world.state().vmm.dma_buf(at, size, kind, flags)?))
    };
    // By the documentation, never run on hardware: the current context's device, seen by its owner or by all. Here all of it
    // is seen by all.
    fn flush_nic_writes = "cuFlushGPUDirectRDMAWrites"(target: c_uint, scope: c_uint) |world, target, scope| {
        world.current()?;
        if target != 0 || !matches!(scope, 100 | 200) {
            return Err(code::INVALID_VALUE);
        }
        world.state().flush_nic_writes()
    };
    fn stream_create = "cuStreamCreate"(out: Out<'_, Object>, flags: c_uint) |world, out, flags| {
        let context = world.current()?;
        let out = out.there()?;
        // Row `stream-flags`.
        if flags > 1 {
            return Err(code::INVALID_VALUE);
        }
        out.put(Object::of(world.state().streams.create(world, context)))
    };
    fn stream_destroy = "cuStreamDestroy_v2"(stream: Object) |world, stream| {
        let context = world.current()?;
        world.state().streams.destroy(world, context, stream.name())
    };
    fn ctx_synchronize = "cuCtxSynchronize"() |world| {
        let context = world.current()?;
        synchronize_all(world, context)
    };
    fn stream_synchronize = "cuStreamSynchronize"(stream: Object) |world, stream| {
        let context = world.current()?;
        synchronize(world, context, stream.name())
    };
    fn stream_wait_event = "cuStreamWaitEvent"(stream: Object, event: Object, flags: c_uint)
        |world, stream, event, flags| {
            let context = world.current()?;
            // Row `wait-event-flags`.
            if flags != 0 {
                return Err(code::INVALID_VALUE);
            }
            world.state().streams.wait_event(world, context, stream.name(), event.name())
        };
    fn event_create = "cuEventCreate"(out: Out<'_, Object>, flags: c_uint) |world, out, flags| {
        let context = world.current()?;
        let out = out.there()?;
        out.put(Object::of(world.state().streams.event_create(context, flags)?))
    };
    fn event_destroy = "cuEventDestroy_v2"(event: Object) |world, event| {
        world.current()?;
        world.state().streams.event_destroy(event.name())
    };
    fn event_record = "cuEventRecord"(event: Object, stream: Object) |world, event, stream| {
        let context = world.current()?;
        world.state().streams.record(world, context, event.name(), stream.name())
    };
    fn event_query = "cuEventQuery"(event: Object) |world, event| {
        world.current()?;
        match world.state().streams.marker(event.name())? {
            Some(marker) if marker.done().is_none() => Err(code::NOT_READY),
            _ => Ok(()),
        }
    };
    fn event_synchronize = "cuEventSynchronize"(event: Object) |world, event| {
        let context = world.current()?;
        let mut state = world.state();
        match state.streams.marker(event.name())? {
            None => Ok(()),
            Some(marker) => wait_until(world, context, state, |_| marker.done().is_some()),
        }
    };
    fn event_elapsed = "cuEventElapsedTime"(out: Out<'_, f32>, start: Object, end: Object)
        |world, out, start, end| {
            world.current()?;
            let out = out.there()?;
            out.put(world.state().streams.elapsed(start.name(), end.name())?)
        };
    fn copy_dtod = "cuMemcpyDtoDAsync_v2"(to: u64, from: u64, size: usize, stream: Object)
        |world, to, from, size, stream| {
            let context = world.current()?;
            // Row `copy-zero-bytes`.
            if size == 0 {
                return Ok(());
            }
            let mut state = world.state();
            let (to, to_touches) = state.vmm.resolve(to, size, context, true)?;
            let (from, from_touches) = state.vmm.resolve(from, size, context, false)?;
            let touches = to_touches.into_iter().chain(from_touches).collect();
            let what = format!("cuMemcpyDtoDAsync of {size} bytes");
            let work = Work { what, touches, action: Action::Copy { from, to, size } };
            state.submit(world, context, stream.name(), work).map(drop)
        };
    fn copy_dtoh = "cuMemcpyDtoHAsync_v2"(to: *mut c_void, from: u64, size: usize, stream: Object)
        |world, to, from, size, stream| copy_dtoh_async(world, to, from, size, stream.name());
    fn copy_htod = "cuMemcpyHtoDAsync_v2"(to: u64, from: *const c_void, size: usize, stream: Object)
        |world, to, from, size, stream| {
            let context = world.current()?;
            if size == 0 {
                return Ok(());
            }
            let mut state = world.state();
            let (to, touches) = state.vmm.resolve(to, size, context, true)?;
            let mut touches = Vec::from(touches);
            let action = match state.pins.classify(from.expose_provenance(), size, false)? {
                HostRange::Pinned(from, touch) => {
                    touches.push(touch);
                    Action::Copy { from, to, size }
                }
                HostRange::Pageable => Action::Staged { from: stage(from.cast(), size), to },
            };
            let work = Work { what: format!("cuMemcpyHtoDAsync of {size} bytes"), touches, action };
            state.submit(world, context, stream.name(), work).map(drop)
        };
    fn memset = "cuMemsetD8Async"(at: u64, byte: u8, size: usize, stream: Object)
        |world, at, byte, size, stream| {
            let context = world.current()?;
            if size == 0 {
                return Ok(());
            }
            let mut state = world.state();
            let (to, touches) = state.vmm.resolve(at, size, context, true)?;
            let what = format!("cuMemsetD8Async of {size} bytes");
            let work = Work { what, touches: touches.into(), action: Action::Fill { to, byte, size } };
            state.submit(world, context, stream.name(), work).map(drop)
        };
    fn host_alloc = "cuMemHostAlloc"(out: Out<'_, *mut c_void>, size: usize, flags: c_uint)
        |world, out, size, flags| {
            let context = world.current()?;
            let out = out.there()?;
            let at = world.state().pins.allocate(context, size, flags)?;
            out.put(ptr::with_exposed_provenance_mut(at))
        };
    fn host_free = "cuMemFreeHost"(at: *mut c_void) |world, at| {
        world.current()?;
        world.settled().host_free(at.addr())
    };
    fn host_register = "cuMemHostRegister_v2"(at: *mut c_void, size: usize, flags: c_uint)
        |world, at, size, flags| {
            let context = world.current()?;
            if flags & HOST_READ_ONLY != 0 && world.config.no_read_only_register {
                return Err(code::NOT_SUPPORTED);
            }
            world.state().pins.register(context, at.expose_provenance(), size, flags)
        };
    fn host_unregister = "cuMemHostUnregister"(at: *mut c_void) |world, at| {
        world.current()?;
        world.settled().host_unregister(at.addr())
    };
    fn module_load = "cuModuleLoadData"(out: Out<'_, Object>, image: *const c_void) |world, out, image| {
        let context = world.current()?;
        let out = out.there()?;
        if image.is_null() {
            return Err(code::INVALID_VALUE);
        }
        // SAFETY: flashboot passes PTX, which is a C string; the manual allows binaries too, which begin otherwise.
        let text = unsafe { CStr::from_ptr(image.cast()) };
        let text = text.to_str().map_err(|_| code::INVALID_IMAGE)?;
        out.put(Object::of(world.state().modules.load(world, context, text)?))
    };
    fn module_unload = "cuModuleUnload"(module: Object) |world, module| {
        world.current()?;
        world.settled().module_unload(module.name())
    };
    fn module_function = "cuModuleGetFunction"(out: Out<'_, Object>, module: Object, name: *const c_char)
        |world, out, module, name| {
            world.current()?;
            let out = out.there()?;
            if name.is_null() {
                return Err(code::INVALID_VALUE);
            }
            // SAFETY: the program passes a C string.
            let name = unsafe { CStr::from_ptr(name) };
            let name = name.to_str().map_err(|_| code::NOT_FOUND)?;
            out.put(Object::of(world.state().modules.function(module.name(), name)?))
        };
    fn launch = "cuLaunchKernel"(
        function: Object, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint,
        block_z: c_uint, shared: c_uint, stream: Object, params: *mut *mut c_void, extra: *mut *mut c_void
    ) |world, function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared, stream, params, extra| {
        let context = world.current()?;
        let mut state = world.state();
        let (kernel, module) = state.modules.kernel(function.name())?;
        let kernel = kernel.to_owned();
        let geometry =
            Geometry { grid: [grid_x, grid_y, grid_z], block: [block_x, block_y, block_z], shared };
        check_geometry(&kernel, geometry)?;
        // Row `launch-params-and-extra`.
        if params.is_null() || !extra.is_null() {
            return Err(code::INVALID_VALUE);
        }
        let arguments = Arguments::of(&kernel, &values(Arguments::wide(&kernel), params));
        let work = state.launch(context, module, &arguments, geometry);
        state.submit(world, context, stream.name(), work).map(drop)
    };
}

/// Pageable memory is written before the call returns (row `copy-pageable-done-on-return`), pinned memory when the
/// stream comes to it (row `copy-pinned-late`).
fn copy_dtoh_async(
    world: &'static World,
    to: *mut c_void,
    from: u64,
    size: usize,
    stream: u64,
) -> Result<(), u32> {
    let context = world.current()?;
    if size == 0 {
        return Ok(());
    }
    let mut state = world.state();
    let (from, touches) = state.vmm.resolve(from, size, context, false)?;
    let mut touches = Vec::from(touches);
    let at = to.expose_provenance();
    let pinned = match state.pins.classify(at, size, true)? {
        HostRange::Pinned(_, touch) => {
            touches.push(touch);
            true
        }
        HostRange::Pageable => false,
    };
    let what = format!("cuMemcpyDtoHAsync of {size} bytes");
    let work = Work { what, touches, action: Action::Copy { from, to: Place(at), size } };
    let work = state.submit(world, context, stream, work)?;
    if pinned {
        return Ok(());
    }
    wait_until(world, context, state, |state| !state.streams.is_queued(&work))
}

/// A name, cut to the buffer (row `device-name-short-buffer`).
fn text(text: &str, to: *mut c_char, len: c_int) {
    let Ok(room) = usize::try_from(len - 1) else {
        // Row `device-name-no-buffer`: the driver crashes.
        crate::loud::stop("a buffer of no bytes");
    };
    let kept = text.len().min(room);
    // SAFETY: the program's buffer has `len` bytes, which is more than `kept`.
    unsafe { ptr::copy_nonoverlapping(text.as_ptr().cast(), to, kept) };
    // SAFETY: as above.
    let end = unsafe { to.add(kept) };
    // SAFETY: as above.
    unsafe { end.write(0) };
}

/// The values of a kernel's parameters, each by its size.
fn values(wide: &[bool], params: *mut *mut c_void) -> Vec<u64> {
    let mut values = Vec::new();
    for (index, wide) in wide.iter().enumerate() {
        // SAFETY: the program passes as many pointers as the kernel has parameters.
        let place = unsafe { params.add(index) };
        // SAFETY: as above.
        let param = unsafe { place.read() };
        values.push(if *wide {
            // SAFETY: this parameter has 8 bytes.
            unsafe { param.cast::<u64>().read_unaligned() }
        } else {
            // SAFETY: this parameter has 4 bytes.
            u64::from(unsafe { param.cast::<u32>().read_unaligned() })
        });
    }
    values
}
