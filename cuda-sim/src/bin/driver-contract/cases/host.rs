//! Pinned host memory and registrations.

use super::cases;
use crate::{
    abi::HOST_PORTABLE,
    driver::Driver,
    facts::{Facts, Outcome, must},
    gpu::{GRANULE, Gpu, Mapped},
};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use std::{ffi::c_void, ptr};

cases! {
    "host-alloc-sizes" = alloc_sizes,
    "host-free-bad" = free_bad,
    "host-free-inside" = free_inside,
    "host-unregister-allocated" = unregister_allocated,
    "register-zero" = register_zero,
    "register-null" = register_null,
    "register-twice" = register_twice,
    "register-overlap" = register_overlap,
    "register-part-of-allocated" = register_allocated,
    "register-unaligned" = register_unaligned,
    "register-unmapped" = register_unmapped,
    "register-read-only" = register_read_only,
    "register-flags" = register_flags,
    "unregister-unknown" = unregister_unknown,
    "unregister-inside" = unregister_inside,
    "unregister-twice" = unregister_twice,
    "register-shares-page" = register_shares_page,
    "copy-within-registration" = copy_within,
    "copy-across-registrations" = copy_across,
    "copy-beyond-registration" = copy_beyond,
    "copy-before-registration" = copy_before,
    "copy-beyond-allocated" = copy_beyond_allocated,
    "copy-after-unregister" = copy_after_unregister,
}

const PAGE: usize = 65536;

/// Whole pages of this process.
fn pages(size: usize) -> Result<*mut u8, String> {
    // SAFETY: a new private mapping at an address of the kernel's choice.
    let at = unsafe {
        mmap_anonymous(ptr::null_mut(), size, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)
    };
    at.map(<*mut c_void>::cast).map_err(|e| e.to_string())
}

fn register(gpu: &Gpu<'_>, at: *mut u8, size: usize) -> u32 {
    gpu.host_register(at.cast(), size, HOST_PORTABLE)
}

fn alloc_sizes(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let mut at = ptr::null_mut();
    let mut f = Facts::new();
    f.code("zero", gpu.host_alloc(&raw mut at, 0, HOST_PORTABLE));
    f.code("one", gpu.host_alloc(&raw mut at, 1, HOST_PORTABLE));
    f.fact("page-aligned", (at as usize).is_multiple_of(4096));
    f.code("flags", gpu.host_alloc(&raw mut at, 4096, 0x100));
    f.code("null-out", gpu.host_alloc(ptr::null_mut(), 4096, 0));
    f.done()
}

fn free_bad(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let at = gpu.pinned(4096)?;
    let mut stack = 0_u64;
    Facts::new()
        .code("null", gpu.host_free(ptr::null_mut()))
        .code("stack", gpu.host_free((&raw mut stack).cast()))
        .code("first", gpu.host_free(at.cast()))
        .code("second", gpu.host_free(at.cast()))
        .done()
}

fn free_inside(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let at = gpu.pinned(2 * PAGE)?;
    Facts::new().code("inside", gpu.host_free(at.wrapping_add(PAGE).cast())).done()
}

fn unregister_allocated(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let at = gpu.pinned(PAGE)?;
    let registered = pages(PAGE)?;
    must("register", register(&gpu, registered, PAGE))?;
    Facts::new()
        .code("unregister-allocated", gpu.host_unregister(at.cast()))
        .code("free-registered", gpu.host_free(registered.cast()))
        .done()
}

fn register_zero(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    Facts::new().code("register", register(&gpu, pages(PAGE)?, 0)).done()
}

fn register_null(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    Facts::new().code("register", register(&gpu, ptr::null_mut(), PAGE)).done()
}

fn register_twice(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let at = pages(PAGE)?;
    Facts::new().code("first", register(&gpu, at, PAGE)).code("second", register(&gpu, at, PAGE)).done()
}

fn register_overlap(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let at = pages(8 * PAGE)?;
    must("register", register(&gpu, at.wrapping_add(2 * PAGE), 2 * PAGE))?;
    Facts::new()
        .code("front", register(&gpu, at, 3 * PAGE))
        .code("back", register(&gpu, at.wrapping_add(3 * PAGE), 2 * PAGE))
        .code("around", register(&gpu, at, 8 * PAGE))
        .code("inside", register(&gpu, at.wrapping_add(2 * PAGE), PAGE))
        .code("beside", register(&gpu, at.wrapping_add(4 * PAGE), PAGE))
        .done()
}

fn register_allocated(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let at = gpu.pinned(2 * PAGE)?;
    Facts::new().code("register", register(&gpu, at, PAGE)).done()
}

fn register_unaligned(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let at = pages(4 * PAGE)?;
    Facts::new()
        .code("register", register(&gpu, at.wrapping_add(100), 1000))
        .code("unregister", gpu.host_unregister(at.wrapping_add(100).cast()))
        .done()
}

fn register_unmapped(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let at = pages(2 * PAGE)?;
    // SAFETY: these pages are this case's, and nothing uses them.
    unsafe { munmap(at.wrapping_add(PAGE).cast(), PAGE) }.map_err(|e| e.to_string())?;
    Facts::new()
        .code("half", register(&gpu, at, 2 * PAGE))
        .code("whole", register(&gpu, at.wrapping_add(PAGE), PAGE))
        .done()
}

fn register_read_only(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    // SAFETY: a new private mapping at an address of the kernel's choice.
    let at = unsafe { mmap_anonymous(ptr::null_mut(), PAGE, ProtFlags::READ, MapFlags::PRIVATE) };
    let at: *mut u8 = at.map_err(|e| e.to_string())?.cast();
    Facts::new().code("register", register(&gpu, at, PAGE)).done()
}

fn register_flags(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let at = pages(PAGE)?;
    Facts::new().code("unknown", gpu.host_register(at.cast(), PAGE, 0x100)).done()
}

fn unregister_unknown(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let at = pages(PAGE)?;
    Facts::new()
        .code("unknown", gpu.host_unregister(at.cast()))
        .code("null", gpu.host_unregister(ptr::null_mut()))
        .done()
}

fn unregister_inside(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let at = pages(2 * PAGE)?;
    must("register", register(&gpu, at, 2 * PAGE))?;
    Facts::new().code("inside", gpu.host_unregister(at.wrapping_add(PAGE).cast())).done()
}

fn unregister_twice(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let at = pages(PAGE)?;
    must("register", register(&gpu, at, PAGE))?;
    Facts::new()
        .code("first", gpu.host_unregister(at.cast()))
        .code("second", gpu.host_unregister(at.cast()))
        .code("register-again", register(&gpu, at, PAGE))
        .done()
}

fn register_shares_page(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let at = pages(PAGE)?;
    Facts::new()
        .code("first", register(&gpu, at, 1024))
        .code("same-page", register(&gpu, at.wrapping_add(2048), 1024))
        .done()
}

/// Two neighbouring registrations of 4 pages, with 4 pages of each side, and device memory.
fn neighbours(gpu: &Gpu<'_>) -> Result<(*mut u8, Mapped), String> {
    let at = pages(16 * PAGE)?;
    must("register", register(gpu, at.wrapping_add(4 * PAGE), 4 * PAGE))?;
    must("register", register(gpu, at.wrapping_add(8 * PAGE), 4 * PAGE))?;
    Ok((at, gpu.mapped(GRANULE)?))
}

fn both_ways(gpu: &Gpu<'_>, host: *mut u8, memory: Mapped, size: usize) -> Outcome {
    Facts::new()
        .code("h2d", gpu.copy_htod(memory.at, host.cast(), size, ptr::null_mut()))
        .code("d2h", gpu.copy_dtoh(host.cast(), memory.at, size, ptr::null_mut()))
        .code("sync", gpu.stream_synchronize(ptr::null_mut()))
        .done()
}

fn copy_within(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let (at, memory) = neighbours(&gpu)?;
    both_ways(&gpu, at.wrapping_add(4 * PAGE + 100), memory, 4 * PAGE - 100)
}

fn copy_across(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let (at, memory) = neighbours(&gpu)?;
    both_ways(&gpu, at.wrapping_add(6 * PAGE), memory, 4 * PAGE)
}

fn copy_beyond(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let (at, memory) = neighbours(&gpu)?;
    both_ways(&gpu, at.wrapping_add(10 * PAGE), memory, 4 * PAGE)
}

fn copy_before(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let (at, memory) = neighbours(&gpu)?;
    both_ways(&gpu, at.wrapping_add(2 * PAGE), memory, 4 * PAGE)
}

fn copy_beyond_allocated(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let (_, memory) = neighbours(&gpu)?;
    let at = gpu.pinned(GRANULE)?;
    Facts::new()
        .code("h2d", gpu.copy_htod(memory.at, at.wrapping_add(GRANULE - 64).cast(), 128, ptr::null_mut()))
        .done()
}

fn copy_after_unregister(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let (at, memory) = neighbours(&gpu)?;
    let host = at.wrapping_add(4 * PAGE);
    must("unregister", gpu.host_unregister(host.cast()))?;
    both_ways(&gpu, host, memory, 4 * PAGE)
}
