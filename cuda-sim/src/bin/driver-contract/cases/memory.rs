//! Virtual memory: create, reserve, map, set access, and the way back.

use super::cases;
use crate::{
    abi::{ACCESS_NONE, ACCESS_READ, ACCESS_READ_WRITE, DMA_BUF_FD, FABRIC, Handle, POSIX_FD},
    driver::Driver,
    facts::{Facts, Outcome, must},
    gpu::{GRANULE, Gpu, access, prop},
};
use std::{
    ffi::c_int,
    os::fd::{FromRawFd as _, OwnedFd},
    ptr,
};

cases! {
    "granularity" = granularity,
    "create-sizes" = create_sizes,
    "create-bad-properties" = create_bad,
    "create-too-large" = create_too_large,
    "create-until-full" = create_until_full,
    "create-fabric" = create_fabric,
    "release-zero" = release_zero,
    "release-garbage" = release_garbage,
    "release-twice" = release_twice,
    "reserve-sizes" = reserve_sizes,
    "reserve-alignment" = reserve_alignment,
    "address-free-part" = free_part,
    "address-free-unknown" = free_unknown,
    "address-free-twice" = free_twice,
    "address-free-while-mapped" = free_while_mapped,
    "map-part-of-handle" = map_part,
    "map-beyond-handle" = map_beyond,
    "map-offset" = map_offset,
    "map-misaligned" = map_misaligned,
    "map-unreserved" = map_unreserved,
    "map-garbage-handle" = map_garbage,
    "map-released-handle" = map_released,
    "map-over-mapping" = map_over,
    "map-twice-elsewhere" = map_twice,
    "map-across-reservations" = map_across,
    "map-two-in-one-reservation" = map_two,
    "map-part-of-reservation" = map_part_of_reservation,
    "unmap-part" = unmap_part,
    "unmap-two-at-once" = unmap_two,
    "unmap-twice" = unmap_twice,
    "access-part" = access_part,
    "access-part-of-two" = access_part_of_two,
    "access-two-mappings" = access_two,
    "access-unmapped" = access_unmapped,
    "access-bad" = access_bad,
    "access-none" = access_none,
    "access-read-own" = access_read_own,
    "access-changes" = access_changes,
    "released-memory-stays-while-mapped" = stays_while_mapped,
    "accounting" = accounting,
    "accounting-mapped-after-release" = accounting_mapped,
    "dma-buf" = dma_buf,
    "dma-buf-ranges" = dma_buf_ranges,
    "dma-buf-without-rdma-flag" = dma_buf_without,
}

fn granularity(d: &Driver) -> Outcome {
    must("init", d.init(0))?;
    let mut f = Facts::new();
    let mut size = 0;
    for (name, option, types) in
        [("minimum", 0, POSIX_FD), ("recommended", 1, POSIX_FD), ("private", 1, 0), ("fabric", 1, FABRIC)]
    {
        let prop = prop(0, types);
        f.code(name, d.mem_granularity(&raw mut size, &raw const prop, option)).fact("bytes", size);
    }
    let good = prop(0, POSIX_FD);
    f.code("bad-option", d.mem_granularity(&raw mut size, &raw const good, 7));
    let bad = prop(99, POSIX_FD);
    f.code("bad-device", d.mem_granularity(&raw mut size, &raw const bad, 0));
    f.done()
}

fn create_sizes(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let prop = prop(0, POSIX_FD);
    let mut f = Facts::new();
    for (name, size) in [("zero", 0), ("one", 1), ("odd", GRANULE + 4096), ("granule", GRANULE)] {
        f.code(name, gpu.mem_create(&mut 0, size, &raw const prop, 0));
    }
    f.code("flags", gpu.mem_create(&mut 0, GRANULE, &raw const prop, 1));
    f.code("null-out", gpu.mem_create(ptr::null_mut(), GRANULE, &raw const prop, 0));
    f.code("null-prop", gpu.mem_create(&mut 0, GRANULE, ptr::null(), 0));
    f.done()
}

fn create_bad(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let good = prop(0, POSIX_FD);
    let mut f = Facts::new();
    let mut bad = good;
    bad.kind = 0;
    f.code("kind", gpu.mem_create(&mut 0, GRANULE, &raw const bad, 0));
    bad = good;
    bad.location.kind = 99;
    f.code("location", gpu.mem_create(&mut 0, GRANULE, &raw const bad, 0));
    bad = good;
    bad.location.id = 99;
    f.code("device", gpu.mem_create(&mut 0, GRANULE, &raw const bad, 0));
    bad = good;
    bad.handle_types = 0x40;
    f.code("handle-type", gpu.mem_create(&mut 0, GRANULE, &raw const bad, 0));
    f.done()
}

fn create_too_large(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let prop = prop(0, POSIX_FD);
    let mut total = 0;
    must("total", gpu.device_total_mem(&raw mut total, 0))?;
    let total = total.next_multiple_of(GRANULE);
    let mut f = Facts::new();
    f.code("pebibyte", gpu.mem_create(&mut 0, 1 << 50, &raw const prop, 0));
    f.code("total-and-more", gpu.mem_create(&mut 0, total + GRANULE, &raw const prop, 0));
    f.code("then-a-granule", gpu.mem_create(&mut 0, GRANULE, &raw const prop, 0));
    f.done()
}

fn create_until_full(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let prop = prop(0, POSIX_FD);
    let mut handles: Vec<Handle> = Vec::new();
    let size = (gpu.free()? / 4) / GRANULE * GRANULE;
    let failed = loop {
        let mut handle = 0;
        match gpu.mem_create(&raw mut handle, size, &raw const prop, 0) {
            0 if handles.len() < 8 => handles.push(handle),
            code => break code,
        }
    };
    let at_most_four = handles.len() <= 4;
    let last = handles.pop().ok_or("setup nothing was created")?;
    Facts::new()
        .code("full", failed)
        .fact("at-most-four-quarters", at_most_four)
        .code("release", gpu.mem_release(last))
        .code("again", gpu.mem_create(&mut 0, size, &raw const prop, 0))
        .done()
}

fn create_fabric(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let alone = prop(0, FABRIC);
    let both = prop(0, FABRIC | POSIX_FD);
    Facts::new()
        .code("alone", gpu.mem_create(&mut 0, GRANULE, &raw const alone, 0))
        .code("with-fd", gpu.mem_create(&mut 0, GRANULE, &raw const both, 0))
        .done()
}

fn release_garbage(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    Facts::new().code("release", gpu.mem_release(0x1234_5678)).done()
}

fn release_zero(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    Facts::new().code("release", gpu.mem_release(0)).done()
}

fn release_twice(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let handle = gpu.memory(GRANULE, POSIX_FD)?;
    Facts::new().code("first", gpu.mem_release(handle)).code("second", gpu.mem_release(handle)).done()
}

fn reserve_sizes(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let mut f = Facts::new();
    for (name, size) in
        [("zero", 0), ("odd", GRANULE + 4096), ("page", 4096), ("granule", GRANULE), ("exbibyte", 1 << 60)]
    {
        f.code(name, gpu.address_reserve(&mut 0, size, 0, 0, 0));
    }
    f.code("flags", gpu.address_reserve(&mut 0, GRANULE, 0, 0, 1 << 40));
    f.code("null-out", gpu.address_reserve(ptr::null_mut(), GRANULE, 0, 0, 0));
    f.done()
}

fn reserve_alignment(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let mut f = Facts::new();
    let mut at = 1;
    f.code("default", gpu.address_reserve(&raw mut at, 3 * GRANULE, 0, 0, 0));
    f.fact("aligned", at.is_multiple_of(GRANULE as u64));
    f.code("gibibyte", gpu.address_reserve(&raw mut at, GRANULE, 1 << 30, 0, 0));
    f.fact("aligned", at.is_multiple_of(1 << 30));
    f.code("not-a-power", gpu.address_reserve(&raw mut at, GRANULE, 3 * GRANULE, 0, 0));
    f.done()
}

fn free_part(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let at = gpu.range(4 * GRANULE)?;
    Facts::new()
        .code("half", gpu.address_free(at, 2 * GRANULE))
        .code("second-half", gpu.address_free(at + 2 * GRANULE as u64, 2 * GRANULE))
        .code("whole", gpu.address_free(at, 4 * GRANULE))
        .done()
}

fn free_unknown(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    Facts::new()
        .code("zero", gpu.address_free(0, GRANULE))
        .code("garbage", gpu.address_free(GRANULE as u64 * 77, GRANULE))
        .done()
}

fn free_twice(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let at = gpu.range(GRANULE)?;
    Facts::new()
        .code("first", gpu.address_free(at, GRANULE))
        .code("second", gpu.address_free(at, GRANULE))
        .done()
}

fn free_while_mapped(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let memory = gpu.mapped(GRANULE)?;
    gpu.fill(memory, 0x31)?;
    Facts::new()
        .code("free", gpu.address_free(memory.at, memory.size))
        .fact("byte", gpu.peek(memory.at))
        .code("unmap", gpu.mem_unmap(memory.at, memory.size))
        .done()
}

fn map_part(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let handle = gpu.memory(2 * GRANULE, POSIX_FD)?;
    let at = gpu.range(2 * GRANULE)?;
    Facts::new().code("map", gpu.mem_map(at, GRANULE, 0, handle, 0)).done()
}

fn map_beyond(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let handle = gpu.memory(GRANULE, POSIX_FD)?;
    let at = gpu.range(2 * GRANULE)?;
    Facts::new().code("map", gpu.mem_map(at, 2 * GRANULE, 0, handle, 0)).done()
}

fn map_offset(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let handle = gpu.memory(2 * GRANULE, POSIX_FD)?;
    let at = gpu.range(2 * GRANULE)?;
    Facts::new().code("map", gpu.mem_map(at, GRANULE, GRANULE, handle, 0)).done()
}

fn map_misaligned(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let handle = gpu.memory(GRANULE, POSIX_FD)?;
    let at = gpu.range(2 * GRANULE)?;
    Facts::new()
        .code("address", gpu.mem_map(at + 4096, GRANULE, 0, handle, 0))
        .code("size", gpu.mem_map(at, 4096, 0, handle, 0))
        .code("zero", gpu.mem_map(at, 0, 0, handle, 0))
        .code("flags", gpu.mem_map(at, GRANULE, 0, handle, 1))
        .done()
}

fn map_unreserved(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let handle = gpu.memory(GRANULE, POSIX_FD)?;
    let at = gpu.range(GRANULE)?;
    must("free", gpu.address_free(at, GRANULE))?;
    Facts::new()
        .code("freed", gpu.mem_map(at, GRANULE, 0, handle, 0))
        .code("null", gpu.mem_map(0, GRANULE, 0, handle, 0))
        .done()
}

fn map_garbage(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let at = gpu.range(GRANULE)?;
    Facts::new().code("map", gpu.mem_map(at, GRANULE, 0, 0x1234_5678, 0)).done()
}

fn map_released(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let handle = gpu.memory(GRANULE, POSIX_FD)?;
    let at = gpu.range(GRANULE)?;
    must("release", gpu.mem_release(handle))?;
    Facts::new().code("map", gpu.mem_map(at, GRANULE, 0, handle, 0)).done()
}

fn map_over(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let memory = gpu.mapped(GRANULE)?;
    let other = gpu.memory(GRANULE, POSIX_FD)?;
    Facts::new()
        .code("other", gpu.mem_map(memory.at, GRANULE, 0, other, 0))
        .code("same", gpu.mem_map(memory.at, GRANULE, 0, memory.handle, 0))
        .done()
}

fn map_twice(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let first = gpu.mapped(GRANULE)?;
    let second = gpu.map(first.handle, GRANULE)?;
    gpu.fill(first, 0x44)?;
    Facts::new().fact("seen-through-the-other", gpu.peek(second.at)).done()
}

fn map_across(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    // A hole of two granules, reserved again as two neighbours.
    let hole = gpu.range(2 * GRANULE)?;
    must("free", gpu.address_free(hole, 2 * GRANULE))?;
    let (mut first, mut second, beside) = (0, 0, hole + GRANULE as u64);
    must("reserve", gpu.address_reserve(&raw mut second, GRANULE, 0, beside, 0))?;
    must("reserve", gpu.address_reserve(&raw mut first, GRANULE, 0, hole, 0))?;
    if (first, second) != (hole, beside) {
        return Err("setup the neighbour could not be reserved".into());
    }
    let handle = gpu.memory(2 * GRANULE, POSIX_FD)?;
    Facts::new().code("map", gpu.mem_map(first, 2 * GRANULE, 0, handle, 0)).done()
}

/// Two handles side by side in one reservation, both readable and writable.
fn two(gpu: &Gpu<'_>) -> Result<u64, String> {
    let at = gpu.range(2 * GRANULE)?;
    for index in 0..2 {
        let handle = gpu.memory(GRANULE, POSIX_FD)?;
        let place = at + index * GRANULE as u64;
        must("map", gpu.mem_map(place, GRANULE, 0, handle, 0))?;
        must("access", gpu.allow(place, GRANULE, 0, ACCESS_READ_WRITE))?;
    }
    Ok(at)
}

fn map_two(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let at = two(&gpu)?;
    must("memset", gpu.memset(at, 1, GRANULE, ptr::null_mut()))?;
    must("memset", gpu.memset(at + GRANULE as u64, 2, GRANULE, ptr::null_mut()))?;
    Facts::new()
        .fact("first", gpu.peek(at))
        .fact("second", gpu.peek(at + GRANULE as u64))
        .code("across", gpu.memset(at, 3, 2 * GRANULE, ptr::null_mut()))
        .code("sync", gpu.stream_synchronize(ptr::null_mut()))
        .done()
}

fn map_part_of_reservation(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let at = gpu.range(4 * GRANULE)?;
    let handle = gpu.memory(GRANULE, POSIX_FD)?;
    let middle = at + GRANULE as u64;
    Facts::new()
        .code("map", gpu.mem_map(middle, GRANULE, 0, handle, 0))
        .code("access", gpu.allow(middle, GRANULE, 0, ACCESS_READ_WRITE))
        .code("access-whole-range", gpu.allow(at, 4 * GRANULE, 0, ACCESS_READ_WRITE))
        .code("free-front", gpu.address_free(at, GRANULE))
        .code("unmap-whole-range", gpu.mem_unmap(at, 4 * GRANULE))
        .code("free", gpu.address_free(at, 4 * GRANULE))
        .done()
}

fn unmap_part(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let memory = gpu.mapped(2 * GRANULE)?;
    Facts::new()
        .code("half", gpu.mem_unmap(memory.at, GRANULE))
        .code("whole", gpu.mem_unmap(memory.at, memory.size))
        .done()
}

fn unmap_two(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let at = two(&gpu)?;
    Facts::new().code("both", gpu.mem_unmap(at, 2 * GRANULE)).done()
}

fn unmap_twice(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let memory = gpu.mapped(GRANULE)?;
    Facts::new()
        .code("first", gpu.mem_unmap(memory.at, memory.size))
        .code("second", gpu.mem_unmap(memory.at, memory.size))
        .code("nothing-there", gpu.mem_unmap(GRANULE as u64 * 77, GRANULE))
        .done()
}

fn access_part(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let handle = gpu.memory(4 * GRANULE, POSIX_FD)?;
    let at = gpu.map_only(handle, 4 * GRANULE)?;
    Facts::new()
        .code("front", gpu.allow(at, GRANULE, 0, ACCESS_READ_WRITE))
        .code("back", gpu.allow(at + 3 * GRANULE as u64, GRANULE, 0, ACCESS_READ_WRITE))
        .code("whole", gpu.allow(at, 4 * GRANULE, 0, ACCESS_READ_WRITE))
        .done()
}

fn access_part_of_two(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let at = two(&gpu)?;
    Facts::new()
        .code("second", gpu.allow(at + GRANULE as u64, GRANULE, 0, ACCESS_READ))
        .code("beyond", gpu.allow(at, 3 * GRANULE, 0, ACCESS_READ))
        .done()
}

fn access_two(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let at = two(&gpu)?;
    Facts::new().code("both", gpu.allow(at, 2 * GRANULE, 0, ACCESS_READ)).done()
}

fn access_unmapped(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let at = gpu.range(GRANULE)?;
    Facts::new().code("access", gpu.allow(at, GRANULE, 0, ACCESS_READ_WRITE)).done()
}

fn access_bad(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let memory = gpu.mapped(GRANULE)?;
    let desc = access(0, ACCESS_READ_WRITE);
    let mut place = desc;
    place.location.kind = 99;
    Facts::new()
        .code("flags", gpu.allow(memory.at, GRANULE, 0, 2))
        .code("device", gpu.allow(memory.at, GRANULE, 99, ACCESS_READ))
        .code("location", gpu.set_access(memory.at, GRANULE, &raw const place, 1))
        .code("count-zero", gpu.set_access(memory.at, GRANULE, &raw const desc, 0))
        .code("null", gpu.set_access(memory.at, GRANULE, ptr::null(), 1))
        .done()
}

fn access_none(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let memory = gpu.mapped(GRANULE)?;
    Facts::new()
        .code("access", gpu.allow(memory.at, GRANULE, 0, ACCESS_NONE))
        .code("memset", gpu.memset(memory.at, 1, GRANULE, ptr::null_mut()))
        .code("sync", gpu.stream_synchronize(ptr::null_mut()))
        .done()
}

fn access_read_own(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let handle = gpu.memory(GRANULE, POSIX_FD)?;
    let at = gpu.map_only(handle, GRANULE)?;
    Facts::new()
        .code("access", gpu.allow(at, GRANULE, 0, ACCESS_READ))
        .fact("reads", gpu.peek(at).len() == 2)
        .code("memset", gpu.memset(at, 1, GRANULE, ptr::null_mut()))
        .code("sync", gpu.stream_synchronize(ptr::null_mut()))
        .done()
}

fn access_changes(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let memory = gpu.mapped(GRANULE)?;
    gpu.fill(memory, 0x21)?;
    Facts::new()
        .code("to-read", gpu.allow(memory.at, GRANULE, 0, ACCESS_READ))
        .fact("byte", gpu.peek(memory.at))
        .code("back", gpu.allow(memory.at, GRANULE, 0, ACCESS_READ_WRITE))
        .code("memset", gpu.memset(memory.at, 0x22, GRANULE, ptr::null_mut()))
        .fact("byte", gpu.peek(memory.at))
        .done()
}

fn stays_while_mapped(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let memory = gpu.mapped(GRANULE)?;
    gpu.fill(memory, 0x77)?;
    Facts::new()
        .code("release", gpu.mem_release(memory.handle))
        .fact("byte", gpu.peek(memory.at))
        .code("memset", gpu.memset(memory.at, 0x78, GRANULE, ptr::null_mut()))
        .fact("byte", gpu.peek(memory.at))
        .code("unmap", gpu.mem_unmap(memory.at, memory.size))
        .code("free", gpu.address_free(memory.at, memory.size))
        .done()
}

/// How much less is free than was, in MiB.
fn taken(gpu: &Gpu<'_>, before: usize) -> Result<i64, String> {
    Ok((before as i64 - gpu.free()? as i64) >> 20)
}

fn accounting(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let before = gpu.free()?;
    let handle = gpu.memory(64 << 20, POSIX_FD)?;
    let mut f = Facts::new();
    f.fact("created", taken(&gpu, before)?);
    let at = gpu.map_only(handle, 64 << 20)?;
    f.fact("mapped", taken(&gpu, before)?);
    must("unmap", gpu.mem_unmap(at, 64 << 20))?;
    f.fact("unmapped", taken(&gpu, before)?);
    must("release", gpu.mem_release(handle))?;
    f.fact("released", taken(&gpu, before)?);
    f.done()
}

fn accounting_mapped(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let before = gpu.free()?;
    let memory = gpu.mapped(64 << 20)?;
    let mut f = Facts::new();
    must("release", gpu.mem_release(memory.handle))?;
    f.fact("released", taken(&gpu, before)?);
    must("unmap", gpu.mem_unmap(memory.at, memory.size))?;
    f.fact("unmapped", taken(&gpu, before)?);
    f.done()
}

fn dma(gpu: &Gpu<'_>, at: u64, size: usize, kind: u32, flags: u64) -> u32 {
    let mut fd: c_int = -1;
    let made = gpu.handle_for_range((&raw mut fd).cast(), at, size, kind, flags);
    if made == 0 {
        // SAFETY: the driver made the descriptor for its caller.
        drop(unsafe { OwnedFd::from_raw_fd(fd) });
    }
    made
}

/// Memory for a NIC.
fn rdma(gpu: &Gpu<'_>, size: usize) -> Result<u64, String> {
    let mut prop = prop(0, POSIX_FD);
    prop.gpu_direct_rdma = 1;
    let mut handle = 0;
    must("create", gpu.mem_create(&raw mut handle, size, &raw const prop, 0))?;
    Ok(gpu.map(handle, size)?.at)
}

fn dma_buf(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let at = rdma(&gpu, 2 * GRANULE)?;
    Facts::new()
        .code("whole", dma(&gpu, at, 2 * GRANULE, DMA_BUF_FD, 0))
        .code("part", dma(&gpu, at + GRANULE as u64, GRANULE, DMA_BUF_FD, 0))
        .code("64-KiB", dma(&gpu, at, 65536, DMA_BUF_FD, 0))
        .code("4-KiB", dma(&gpu, at, 4096, DMA_BUF_FD, 0))
        .done()
}

fn dma_buf_ranges(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let at = rdma(&gpu, GRANULE)?;
    let empty = gpu.range(GRANULE)?;
    Facts::new()
        .code("zero", dma(&gpu, at, 0, DMA_BUF_FD, 0))
        .code("misaligned", dma(&gpu, at + 1, 4096, DMA_BUF_FD, 0))
        .code("odd-size", dma(&gpu, at, 4097, DMA_BUF_FD, 0))
        .code("beyond", dma(&gpu, at, 2 * GRANULE, DMA_BUF_FD, 0))
        .code("unmapped", dma(&gpu, empty, GRANULE, DMA_BUF_FD, 0))
        .code("kind", dma(&gpu, at, GRANULE, 7, 0))
        .done()
}

fn dma_buf_without(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let memory = gpu.mapped(GRANULE)?;
    Facts::new().code("whole", dma(&gpu, memory.at, GRANULE, DMA_BUF_FD, 0)).done()
}
