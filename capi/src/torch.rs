//! `fb_torch_alloc` and `fb_torch_free`: what torch's `CUDAPluggableAllocator` calls, on memory that can be exported.
//!
//! Every allocation is one of the driver's, of whole pages of 2 MiB, with the handles that other processes of the host or of the
//! NVLink domain read it by. There is no cache in front of it: it is for a memory pool that holds weights, not for activations.

use crate::status::{guarded, invalid};
use flashboot_core::{ArenaSpec, Result};
use flashboot_cuda::{Context, CudaArena, CudaArenaConfig, Device};
use std::{
    collections::BTreeMap,
    ffi::{c_int, c_void},
    sync::{Arc, Mutex, PoisonError},
};

/// What torch has, by address.
static GIVEN: Mutex<BTreeMap<u64, Arc<CudaArena>>> = Mutex::new(BTreeMap::new());

/// Memory of the GPU of this number in this process; NULL where there is none to be had, and `fb_last_error` says why. Nothing is
/// queued in `stream`.
#[unsafe(no_mangle)]
pub extern "C" fn fb_torch_alloc(size: isize, device: c_int, stream: *mut c_void) -> *mut c_void {
    let _ = stream;
    guarded(std::ptr::null_mut(), || {
        let size = u64::try_from(size).map_err(|_| invalid("alloc", format!("{size} bytes")))?;
        let context = context(device)?;
        // Nothing has no address; torch wants one.
        let spec = ArenaSpec { payload: size.max(1), shards: 1 };
        let (arena, _) = CudaArena::create_in(&context, spec, &CudaArenaConfig::default())?;
        let at = arena.device_address();
        let address = usize::try_from(at).map_err(|_| invalid("alloc", "an address of more bits"))?;
        GIVEN.lock().unwrap_or_else(PoisonError::into_inner).insert(at, arena);
        Ok(std::ptr::with_exposed_provenance_mut(address))
    })
}

/// Gives back what `fb_torch_alloc` gave, once everything that was queued on the GPU has ended. Anything else, also twice the same,
/// is left alone, and `fb_last_error` says so.
#[unsafe(no_mangle)]
pub extern "C" fn fb_torch_free(memory: *mut c_void, size: isize, device: c_int, stream: *mut c_void) {
    let _ = (size, device, stream);
    guarded((), || {
        if memory.is_null() {
            return Ok(());
        }
        let found = GIVEN.lock().unwrap_or_else(PoisonError::into_inner).remove(&(memory.addr() as u64));
        let arena =
            found.ok_or_else(|| invalid("free", format!("{memory:p} is none of fb_torch_alloc's")))?;
        // Work of other streams may still use it, and an unmapped address ends the context.
        let settled = arena.context().synchronize();
        drop(arena);
        settled
    });
}

/// Bytes that torch has of it: whole pages.
#[unsafe(no_mangle)]
pub extern "C" fn fb_torch_allocated() -> u64 {
    use flashboot_core::Arena as _;
    guarded(0, || {
        let given = GIVEN.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(given.values().map(|arena| arena.capacity()).sum())
    })
}

fn context(device: c_int) -> Result<Context> {
    let number = usize::try_from(device).map_err(|_| invalid("alloc", format!("GPU {device}")))?;
    let devices = Device::all()?;
    let found = devices.get(number);
    let found = found.ok_or_else(|| invalid("alloc", format!("GPU {device} of {}", devices.len())))?;
    Context::open(found)
}
