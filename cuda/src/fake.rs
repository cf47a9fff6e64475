//! A driver on host memory for this crate's tests: streams run at once, calls are recorded, any call can be made to
//! fail, and whatever is not torn down, or in the wrong order, is told.

use crate::{
    Context, Device,
    api::{DevicePtr, Handle, Ordinal},
    error::{CudaError, code},
    ops::{Access, AllocationKind, Arg, Call, Launch, Object, Ops, handle_type},
};
use blake3::hazmat::{HasherExt as _, Mode, merge_subtrees_non_root, merge_subtrees_root};
use std::{
    alloc::{Layout, alloc_zeroed, dealloc},
    cell::RefCell,
    collections::{BTreeMap, BTreeSet},
    ffi::CStr,
    os::fd::{BorrowedFd, OwnedFd},
    ptr,
    sync::{Arc, Condvar, Mutex, MutexGuard},
};

pub(crate) const GRANULE: u64 = 2 << 20;
const FIRST_ADDRESS: u64 = 0x7000_0000_0000_0000;

thread_local! {
    static CURRENT: RefCell<Vec<Object>> = const { RefCell::new(Vec::new()) };
}

#[derive(Debug, Clone)]
pub(crate) struct FakeDevice {
    pub(crate) name: String,
    pub(crate) pci: String,
    pub(crate) uuid: [u8; 16],
    /// Attributes that read 0; all others read 1.
    pub(crate) without: Vec<u32>,
}

impl Default for FakeDevice {
    fn default() -> Self {
        Self { name: "NVIDIA Fake".into(), pci: "0000:1b:00.0".into(), uuid: [7; 16], without: Vec::new() }
    }
}

/// Which call fails, and how.
#[derive(Debug, Clone, Copy)]
struct Failure {
    only: Option<&'static str>,
    /// Calls that pass before.
    after: usize,
    code: u32,
}

#[derive(Debug)]
struct Physical(Mutex<Vec<u8>>);

#[derive(Debug, Default)]
struct State {
    devices: Vec<FakeDevice>,
    version: u32,
    log: Vec<&'static str>,
    failures: Vec<Failure>,
    /// A sticky error, once one was returned.
    dead: Option<u32>,
    wrong: Vec<String>,
    next: u64,
    retained: usize,
    handles: BTreeMap<Handle, (Arc<Physical>, u32)>,
    exported: BTreeMap<u64, Arc<Physical>>,
    reserved: BTreeMap<DevicePtr, u64>,
    mapped: BTreeMap<DevicePtr, (u64, Handle, Arc<Physical>, Option<Access>)>,
    streams: BTreeSet<Object>,
    events: BTreeMap<Object, bool>,
    modules: BTreeSet<Object>,
    functions: BTreeMap<Object, String>,
    pinned: BTreeMap<usize, Layout>,
    registered: BTreeSet<usize>,
    no_fabric: bool,
    no_context: bool,
    held: bool,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    released: Condvar,
}

#[derive(Debug, Clone)]
pub(crate) struct Fake(Arc<Shared>);

impl Fake {
    pub(crate) fn new() -> Self {
        Self::with_devices(vec![FakeDevice::default()])
    }

    pub(crate) fn with_devices(devices: Vec<FakeDevice>) -> Self {
        let fake = Self(Arc::default());
        {
            let mut state = fake.state();
            state.devices = devices;
            state.version = 13_000;
            state.next = 1;
        }
        fake
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    pub(crate) fn ops(&self) -> Arc<dyn Ops> {
        Arc::new(self.clone())
    }

    pub(crate) fn context(&self) -> Context {
        self.context_of(0)
    }

    pub(crate) fn context_of(&self, device: usize) -> Context {
        Context::unshared(&Device::all_of(&self.ops()).unwrap()[device]).unwrap()
    }

    pub(crate) fn set_driver_version(&self, version: u32) {
        self.state().version = version;
    }

    /// As on a machine without an IMEX channel.
    pub(crate) fn refuse_fabric(&self) {
        self.state().no_fabric = true;
    }

    /// The next call of `name`, after `after` more of it, fails.
    pub(crate) fn fail_call(&self, name: &'static str, after: usize, code: u32) {
        self.state().failures.push(Failure { only: Some(name), after, code });
    }

    /// The call after `after` calls from now fails.
    pub(crate) fn fail_any(&self, after: usize, code: u32) {
        self.state().failures.push(Failure { only: None, after, code });
    }

    /// Whether every failure asked for has happened.
    pub(crate) fn failed(&self) -> bool {
        self.state().failures.is_empty()
    }

    pub(crate) fn calls(&self) -> Vec<&'static str> {
        self.state().log.clone()
    }

    pub(crate) fn forget_calls(&self) {
        self.state().log.clear();
    }

    /// From now on marks are not passed until [`release`](Self::release).
    pub(crate) fn hold(&self) {
        self.state().held = true;
    }

    pub(crate) fn release(&self) {
        self.state().held = false;
        self.0.released.notify_all();
    }

    /// What exists still, and what was done in the wrong order.
    pub(crate) fn leaks(&self) -> Vec<String> {
        let s = self.state();
        let mut found = s.wrong.clone();
        let mut count = |what: &str, n: usize| {
            if n > 0 {
                found.push(format!("{n} {what}"));
            }
        };
        count("contexts", s.retained);
        count("handles", s.handles.len());
        count("mappings", s.mapped.len());
        count("reservations", s.reserved.len());
        count("streams", s.streams.len());
        count("events", s.events.len());
        count("modules", s.modules.len());
        count("pinned buffers", s.pinned.len());
        count("registrations", s.registered.len());
        found
    }

    /// Records a call; the injected failure, if it is its turn.
    fn enter(&self, call: &'static str, in_context: bool) -> Call<MutexGuard<'_, State>> {
        let mut s = self.state();
        s.log.push(call);
        if in_context && !s.no_context && CURRENT.with_borrow(Vec::is_empty) {
            s.wrong.push(format!("{call} without a context"));
        }
        if let Some(code) = s.dead.filter(|_| in_context) {
            return Err(CudaError { call, code });
        }
        let mut hit = None;
        for (at, failure) in s.failures.iter_mut().enumerate() {
            if failure.only.is_some_and(|only| only != call) {
                continue;
            }
            if failure.after == 0 {
                hit = Some((at, failure.code));
                break;
            }
            failure.after -= 1;
        }
        match hit {
            None => Ok(s),
            Some((at, code)) => {
                s.failures.remove(at);
                let error = CudaError { call, code };
                if error.is_sticky() {
                    s.dead = Some(code);
                }
                Err(error)
            }
        }
    }

    /// A teardown call: the object goes, whatever is answered.
    fn end(&self, call: &'static str, remove: impl FnOnce(&mut State) -> bool) -> Call<()> {
        let entered = self.enter(call, true).map(drop);
        let mut s = self.state();
        if !remove(&mut s) {
            s.wrong.push(format!("{call} of what does not exist"));
        }
        entered
    }

    fn object(s: &mut State) -> Object {
        s.next += 1;
        Object(s.next as usize)
    }

    /// Waits as a synchronisation does.
    fn pass(&self, mut s: MutexGuard<'_, State>) {
        while s.held {
            s = self.0.released.wait(s).unwrap();
        }
    }
}

impl State {
    /// Runs `with` on `size` bytes at `at`, which are device memory or, by their address, the host's.
    fn bytes<T>(&self, at: u64, size: u64, write: bool, with: impl FnOnce(&mut [u8]) -> T) -> Option<T> {
        if at < FIRST_ADDRESS {
            let host = ptr::with_exposed_provenance_mut(at as usize);
            // SAFETY: kernels of this crate are given host addresses of pinned buffers only, which are as large.
            return Some(with(unsafe { std::slice::from_raw_parts_mut(host, size as usize) }));
        }
        let (start, (len, _, physical, access)) = self.mapped.range(..=at).next_back()?;
        let offset = at - start;
        let allowed = match access {
            Some(Access::ReadWrite) => true,
            Some(Access::Read) => !write,
            None => false,
        };
        if !allowed || offset + size > *len {
            return None;
        }
        let mut bytes = physical.0.lock().unwrap();
        Some(with(&mut bytes[offset as usize..(offset + size) as usize]))
    }

    fn copied(&self, call: &'static str, from: u64, to: u64, size: u64) -> Call<()> {
        let invalid = CudaError { call, code: code::INVALID_VALUE };
        let bytes = self.bytes(from, size, false, |bytes| bytes.to_vec()).ok_or(invalid)?;
        self.bytes(to, size, true, |to| to.copy_from_slice(&bytes)).ok_or(invalid)
    }
}

impl Ops for Fake {
    fn init(&self) -> Call<()> {
        self.enter("cuInit", false).map(drop)
    }
    fn driver_version(&self) -> Call<u32> {
        Ok(self.enter("cuDriverGetVersion", false)?.version)
    }
    fn device_count(&self) -> Call<u32> {
        Ok(self.enter("cuDeviceGetCount", false)?.devices.len() as u32)
    }
    fn device_get(&self, number: u32) -> Call<Ordinal> {
        self.enter("cuDeviceGet", false).map(|_| number as Ordinal)
    }
    fn device_name(&self, device: Ordinal) -> Call<String> {
        Ok(self.enter("cuDeviceGetName", false)?.devices[device as usize].name.clone())
    }
    fn device_uuid(&self, device: Ordinal) -> Call<[u8; 16]> {
        Ok(self.enter("cuDeviceGetUuid", false)?.devices[device as usize].uuid)
    }
    fn device_attribute(&self, device: Ordinal, attribute: u32) -> Call<i32> {
        let s = self.enter("cuDeviceGetAttribute", false)?;
        Ok(i32::from(!s.devices[device as usize].without.contains(&attribute)))
    }
    fn device_total_mem(&self, _: Ordinal) -> Call<u64> {
        self.enter("cuDeviceTotalMem", false).map(|_| 1 << 30)
    }
    fn device_pci(&self, device: Ordinal) -> Call<String> {
        Ok(self.enter("cuDeviceGetPCIBusId", false)?.devices[device as usize].pci.clone())
    }
    fn device_can_access_peer(&self, _: Ordinal, _: Ordinal) -> Call<bool> {
        self.enter("cuDeviceCanAccessPeer", false).map(|_| true)
    }
    fn primary_retain(&self, device: Ordinal) -> Call<Object> {
        self.enter("cuDevicePrimaryCtxRetain", false)?.retained += 1;
        Ok(Object(1 << 32 | device as usize))
    }
    fn primary_release(&self, _: Ordinal) -> Call<()> {
        let entered = self.enter("cuDevicePrimaryCtxRelease", false).map(drop);
        let mut s = self.state();
        s.retained -= 1;
        if s.retained == 0 && !(s.handles.is_empty() && s.streams.is_empty() && s.modules.is_empty()) {
            s.wrong.push("the context was released before what is in it".into());
        }
        entered
    }
    fn ctx_push(&self, context: Object) -> Call<()> {
        if let Err(e) = self.enter("cuCtxPushCurrent", false).map(drop) {
            // Teardown goes on without: not tearing down would leak for certain.
            self.state().no_context = true;
            return Err(e);
        }
        CURRENT.with_borrow_mut(|stack| stack.push(context));
        Ok(())
    }
    fn ctx_pop(&self) -> Call<()> {
        // Popping succeeds even when it is told otherwise: a thread must not be left with a context.
        let entered = self.enter("cuCtxPopCurrent", false).map(drop);
        CURRENT.with_borrow_mut(Vec::pop);
        entered
    }
    fn mem_get_info(&self) -> Call<(u64, u64)> {
        self.enter("cuMemGetInfo", true).map(|_| (1 << 29, 1 << 30))
    }
    fn mem_granularity(&self, _: AllocationKind) -> Call<u64> {
        self.enter("cuMemGetAllocationGranularity", true).map(|_| GRANULE)
    }
    fn mem_create(&self, size: u64, kind: AllocationKind) -> Call<Handle> {
        let mut s = self.enter("cuMemCreate", true)?;
        let fail = |code| Err(CudaError { call: "cuMemCreate", code });
        if s.no_fabric && kind.handle_types & handle_type::FABRIC != 0 {
            return fail(code::NOT_PERMITTED);
        }
        if !size.is_multiple_of(GRANULE) || size == 0 {
            return fail(code::INVALID_VALUE);
        }
        if size > 1 << 30 {
            return fail(code::OUT_OF_MEMORY);
        }
        s.next += 1;
        let handle = s.next;
        // New memory is not zero.
        let physical = Arc::new(Physical(Mutex::new(vec![0xa5; size as usize])));
        s.handles.insert(handle, (physical, kind.handle_types));
        Ok(handle)
    }
    fn mem_release(&self, handle: Handle) -> Call<()> {
        self.end("cuMemRelease", |s| {
            if s.mapped.values().any(|(_, mapped, ..)| *mapped == handle) {
                s.wrong.push("cuMemRelease before cuMemUnmap".into());
            }
            s.handles.remove(&handle).is_some()
        })
    }
    fn export_fd(&self, handle: Handle) -> Call<OwnedFd> {
        let mut s = self.enter("cuMemExportToShareableHandle", true)?;
        let (physical, kinds) = s.handles[&handle].clone();
        if kinds & handle_type::POSIX_FD == 0 {
            return Err(CudaError { call: "cuMemExportToShareableHandle", code: code::INVALID_VALUE });
        }
        s.exported.insert(handle, physical);
        let fd = rustix::fs::memfd_create("fake", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::io::pwrite(&fd, &handle.to_le_bytes(), 0).unwrap();
        Ok(fd)
    }
    fn export_fabric(&self, handle: Handle) -> Call<Box<[u8; 64]>> {
        let mut s = self.enter("cuMemExportToShareableHandle", true)?;
        let physical = s.handles[&handle].0.clone();
        s.exported.insert(handle, physical);
        let mut fabric = Box::new([0; 64]);
        fabric[..8].copy_from_slice(&handle.to_le_bytes());
        Ok(fabric)
    }
    fn import_fd(&self, fd: BorrowedFd<'_>) -> Call<Handle> {
        let mut bytes = [0; 64];
        rustix::io::pread(fd, &mut bytes[..8], 0).unwrap();
        self.import_fabric(&bytes)
    }
    fn import_fabric(&self, fabric: &[u8; 64]) -> Call<Handle> {
        let mut s = self.enter("cuMemImportFromShareableHandle", true)?;
        let id = u64::from_le_bytes(fabric[..8].try_into().unwrap());
        let invalid = CudaError { call: "cuMemImportFromShareableHandle", code: code::INVALID_VALUE };
        let physical = s.exported.get(&id).cloned().ok_or(invalid)?;
        s.next += 1;
        let handle = s.next;
        s.handles.insert(handle, (physical, 0));
        Ok(handle)
    }
    fn address_reserve(&self, size: u64) -> Call<DevicePtr> {
        let mut s = self.enter("cuMemAddressReserve", true)?;
        let at = s.reserved.iter().next_back().map_or(FIRST_ADDRESS, |(at, size)| at + size + GRANULE);
        s.reserved.insert(at, size);
        Ok(at)
    }
    fn address_free(&self, at: DevicePtr, size: u64) -> Call<()> {
        self.end("cuMemAddressFree", |s| {
            if s.mapped.contains_key(&at) {
                s.wrong.push("cuMemAddressFree before cuMemUnmap".into());
            }
            s.reserved.remove(&at) == Some(size)
        })
    }
    fn mem_map(&self, at: DevicePtr, size: u64, handle: Handle) -> Call<()> {
        let mut s = self.enter("cuMemMap", true)?;
        let physical = s.handles[&handle].0.clone();
        if physical.0.lock().unwrap().len() < size as usize || s.reserved.get(&at) != Some(&size) {
            return Err(CudaError { call: "cuMemMap", code: code::INVALID_VALUE });
        }
        s.mapped.insert(at, (size, handle, physical, None));
        Ok(())
    }
    fn mem_unmap(&self, at: DevicePtr, size: u64) -> Call<()> {
        self.end("cuMemUnmap", |s| {
            if s.held {
                s.wrong.push("cuMemUnmap while work is under way".into());
            }
            s.mapped.remove(&at).is_some_and(|(mapped, ..)| mapped == size)
        })
    }
    fn set_access(&self, at: DevicePtr, size: u64, _: Ordinal, access: Access) -> Call<()> {
        let mut s = self.enter("cuMemSetAccess", true)?;
        match s.mapped.get_mut(&at) {
            Some((mapped, _, _, granted)) if *mapped == size => *granted = Some(access),
            _ => return Err(CudaError { call: "cuMemSetAccess", code: code::INVALID_VALUE }),
        }
        Ok(())
    }
    fn dma_buf(&self, at: DevicePtr, size: u64) -> Call<OwnedFd> {
        let s = self.enter("cuMemGetHandleForAddressRange", true)?;
        assert_eq!(s.mapped[&at].0, size);
        Ok(rustix::fs::memfd_create("fake", rustix::fs::MemfdFlags::CLOEXEC).unwrap())
    }
    fn stream_create(&self) -> Call<Object> {
        let mut s = self.enter("cuStreamCreate", true)?;
        let stream = Self::object(&mut s);
        s.streams.insert(stream);
        Ok(stream)
    }
    fn stream_destroy(&self, stream: Object) -> Call<()> {
        self.end("cuStreamDestroy", |s| s.streams.remove(&stream))
    }
    fn ctx_synchronize(&self) -> Call<()> {
        self.pass(self.enter("cuCtxSynchronize", true)?);
        Ok(())
    }
    fn stream_synchronize(&self, _: Object) -> Call<()> {
        self.pass(self.enter("cuStreamSynchronize", true)?);
        Ok(())
    }
    fn stream_wait_event(&self, _: Object, event: Object) -> Call<()> {
        let mut s = self.enter("cuStreamWaitEvent", true)?;
        if s.events.get(&event) != Some(&true) {
            s.wrong.push("a wait for an event that was not recorded".into());
        }
        Ok(())
    }
    fn event_create(&self, _: bool) -> Call<Object> {
        let mut s = self.enter("cuEventCreate", true)?;
        let event = Self::object(&mut s);
        s.events.insert(event, false);
        Ok(event)
    }
    fn event_destroy(&self, event: Object) -> Call<()> {
        self.end("cuEventDestroy", |s| s.events.remove(&event).is_some())
    }
    fn event_record(&self, event: Object, _: Object) -> Call<()> {
        self.enter("cuEventRecord", true)?.events.insert(event, true);
        Ok(())
    }
    fn event_query(&self, _: Object) -> Call<bool> {
        Ok(!self.enter("cuEventQuery", true)?.held)
    }
    fn event_elapsed_ms(&self, _: Object, _: Object) -> Call<f32> {
        self.enter("cuEventElapsedTime", true).map(|_| 1.0)
    }
    unsafe fn copy_dtod(&self, to: DevicePtr, from: DevicePtr, size: u64, _: Object) -> Call<()> {
        self.enter("cuMemcpyDtoDAsync", true)?.copied("cuMemcpyDtoDAsync", from, to, size)
    }
    unsafe fn copy_dtoh(&self, to: *mut u8, from: DevicePtr, size: u64, _: Object) -> Call<()> {
        let to = to.expose_provenance() as u64;
        self.enter("cuMemcpyDtoHAsync", true)?.copied("cuMemcpyDtoHAsync", from, to, size)
    }
    unsafe fn copy_htod(&self, to: DevicePtr, from: *const u8, size: u64, _: Object) -> Call<()> {
        let from = from.expose_provenance() as u64;
        self.enter("cuMemcpyHtoDAsync", true)?.copied("cuMemcpyHtoDAsync", from, to, size)
    }
    unsafe fn memset(&self, at: DevicePtr, byte: u8, size: u64, _: Object) -> Call<()> {
        let s = self.enter("cuMemsetD8Async", true)?;
        let invalid = CudaError { call: "cuMemsetD8Async", code: code::INVALID_VALUE };
        s.bytes(at, size, true, |bytes| bytes.fill(byte)).ok_or(invalid)
    }
    fn host_alloc(&self, size: u64) -> Call<*mut u8> {
        let mut s = self.enter("cuMemHostAlloc", true)?;
        let layout = Layout::from_size_align(size as usize, 4096).unwrap();
        // SAFETY: the layout is not empty: `Pinned` asks for a byte at least.
        let at = unsafe { alloc_zeroed(layout) };
        s.pinned.insert(at.expose_provenance(), layout);
        Ok(at)
    }
    unsafe fn host_free(&self, at: *mut u8) -> Call<()> {
        self.end("cuMemFreeHost", |s| {
            let Some(layout) = s.pinned.remove(&at.addr()) else { return false };
            // SAFETY: allocated above with this layout, and removed from the table so that it is freed once.
            unsafe { dealloc(at, layout) };
            true
        })
    }
    unsafe fn host_register(&self, at: *mut u8, size: u64, _: Access) -> Call<()> {
        assert_ne!(size, 0);
        self.enter("cuMemHostRegister", true)?.registered.insert(at.addr());
        Ok(())
    }
    fn flush_nic_writes(&self) -> Call<()> {
        self.enter("cuFlushGPUDirectRDMAWrites", true).map(drop)
    }
    fn host_unregister(&self, at: *mut u8) -> Call<()> {
        self.end("cuMemHostUnregister", |s| s.registered.remove(&at.addr()))
    }
    fn module_load(&self, _: &CStr) -> Call<Object> {
        let mut s = self.enter("cuModuleLoadData", true)?;
        let module = Self::object(&mut s);
        s.modules.insert(module);
        Ok(module)
    }
    fn module_unload(&self, module: Object) -> Call<()> {
        self.end("cuModuleUnload", |s| s.modules.remove(&module))
    }
    fn module_function(&self, _: Object, name: &CStr) -> Call<Object> {
        let mut s = self.enter("cuModuleGetFunction", true)?;
        let function = Self::object(&mut s);
        s.functions.insert(function, name.to_str().unwrap().to_owned());
        Ok(function)
    }
    unsafe fn launch(&self, launch: Launch<'_>) -> Call<()> {
        let s = self.enter("cuLaunchKernel", true)?;
        match (s.functions[&launch.function].as_str(), &*launch.args) {
            (
                "flashboot_blake3_tiles",
                &[
                    Arg::U64(data),
                    Arg::U64(len),
                    Arg::U64(first),
                    Arg::U32(unit),
                    Arg::U32(root),
                    Arg::U64(out),
                ],
            ) => {
                assert_eq!((launch.grid as u64, launch.block), (len.div_ceil(256 << 10), 256));
                assert!(unit <= 256 && 256 % unit == 0);
                tiles(&s, data, len, first, unit, root, out);
            }
            (
                "flashboot_blake3_blocks",
                &[Arg::U64(values), Arg::U64(total), Arg::U32(per_block), Arg::U32(root), Arg::U64(out)],
            ) => {
                assert_eq!(launch.grid as u64, total.div_ceil(per_block.into()));
                assert!(launch.block <= 512 && launch.block >= 8 && launch.block >= per_block / 2);
                blocks(&s, values, total, per_block, root, out);
            }
            ("flashboot_look", &[Arg::U64(progress), Arg::U64(generation), Arg::U64(out)]) => {
                assert_eq!((launch.grid, launch.block), (1, 1));
                s.copied("cuLaunchKernel", progress, out, 8)?;
                s.copied("cuLaunchKernel", generation, out + 8, 8)?;
            }
            (name, args) => panic!("{name} does not take {args:?}"),
        }
        Ok(())
    }
}

/// What the first kernel does, by its description.
fn tiles(s: &State, data: u64, len: u64, first: u64, unit: u32, root: u32, out: u64) {
    let unit = u64::from(unit) * 1024;
    for (slot, start) in (0..len).step_by(unit as usize).enumerate() {
        let bytes = s.bytes(data + start, unit.min(len - start), false, |b| b.to_vec()).unwrap();
        let value = if root == 1 && len <= unit {
            *blake3::hash(&bytes).as_bytes()
        } else {
            let mut hasher = blake3::Hasher::new();
            hasher.set_input_offset(first * 1024 + start);
            hasher.update(&bytes).finalize_non_root()
        };
        s.bytes(out + 32 * slot as u64, 32, true, |to| to.copy_from_slice(&value)).unwrap();
    }
}

/// What the second kernel does: neighbours are merged, an odd one is carried up.
fn blocks(s: &State, values: u64, total: u64, per_block: u32, root: u32, out: u64) {
    let all = s.bytes(values, total * 32, false, |b| b.to_vec()).unwrap();
    for (slot, block) in all.as_chunks::<32>().0.chunks(per_block as usize).enumerate() {
        let mut level = block.to_vec();
        while level.len() > 1 {
            let last = level.len() == 2 && root == 1;
            level = level
                .chunks(2)
                .map(|pair| match pair {
                    [left, right] if last => *merge_subtrees_root(left, right, Mode::Hash).as_bytes(),
                    [left, right] => merge_subtrees_non_root(left, right, Mode::Hash),
                    odd => odd[0],
                })
                .collect();
        }
        s.bytes(out + 32 * slot as u64, 32, true, |to| to.copy_from_slice(&level[0])).unwrap();
    }
}
