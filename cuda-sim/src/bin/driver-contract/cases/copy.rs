//! Copies and fills: which ranges they accept, and what the bytes are afterwards.

use super::cases;
use crate::{
    abi::{ACCESS_READ_WRITE, POSIX_FD},
    driver::Driver,
    facts::{Facts, Outcome, must},
    gpu::{GRANULE, Gpu},
};
use std::ptr;

cases! {
    "copy-round-trip" = round_trip,
    "copy-past-end" = past_end,
    "copy-across-mappings" = across,
    "copy-zero-bytes" = zero,
    "copy-nowhere" = nowhere,
    "copy-no-access" = no_access,
    "copy-unmapped" = unmapped,
    "copy-null-host" = null_host,
    "copy-pageable-staged" = staged,
    "copy-pageable-done-on-return" = done_on_return,
    "copy-pinned-late" = pinned_late,
    "copy-between-devices" = between_devices,
    "copy-memory-of-other-device" = other_device,
    "copy-no-access-of-other-device" = no_access_other,
}

fn sync(gpu: &Gpu<'_>) -> u32 {
    gpu.stream_synchronize(ptr::null_mut())
}

fn round_trip(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let (from, to) = (gpu.mapped(GRANULE)?, gpu.mapped(GRANULE)?);
    let sent: Vec<u8> = (0..GRANULE).map(|i| (i * 7 + i / 251) as u8).collect();
    let mut got = vec![0_u8; GRANULE];
    let stream = gpu.stream()?;
    must("h2d", gpu.copy_htod(from.at, sent.as_ptr().cast(), GRANULE, stream))?;
    must("d2d", gpu.copy_dtod(to.at, from.at, GRANULE, stream))?;
    must("d2h", gpu.copy_dtoh(got.as_mut_ptr().cast(), to.at, GRANULE, stream))?;
    must("sync", gpu.stream_synchronize(stream))?;
    must("memset", gpu.memset(to.at + 3, 0xA5, 5, stream))?;
    let mut part = [0_u8; 10];
    must("d2h", gpu.copy_dtoh(part.as_mut_ptr().cast(), to.at, 10, stream))?;
    must("sync", gpu.stream_synchronize(stream))?;
    let mut expected = sent.clone();
    expected.iter_mut().skip(3).take(5).for_each(|b| *b = 0xA5);
    Facts::new().fact("equal", sent == got).fact("set", expected.starts_with(&part)).done()
}

fn past_end(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let (a, b) = (gpu.mapped(GRANULE)?, gpu.mapped(GRANULE)?);
    let mut host = vec![0_u8; GRANULE + 1];
    let host = host.as_mut_ptr();
    Facts::new()
        .code("memset", gpu.memset(a.at, 0, GRANULE + 1, ptr::null_mut()))
        .code("d2d-source", gpu.copy_dtod(b.at, a.at + 1, GRANULE, ptr::null_mut()))
        .code("d2d-target", gpu.copy_dtod(b.at + 1, a.at, GRANULE, ptr::null_mut()))
        .code("d2h", gpu.copy_dtoh(host.cast(), a.at, GRANULE + 1, ptr::null_mut()))
        .code("h2d", gpu.copy_htod(a.at, host.cast(), GRANULE + 1, ptr::null_mut()))
        .code("sync", sync(&gpu))
        .done()
}

fn across(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let at = gpu.range(2 * GRANULE)?;
    for index in 0..2 {
        let handle = gpu.memory(GRANULE, POSIX_FD)?;
        let place = at + index * GRANULE as u64;
        must("map", gpu.mem_map(place, GRANULE, 0, handle, 0))?;
        must("access", gpu.allow(place, GRANULE, 0, ACCESS_READ_WRITE))?;
    }
    let other = gpu.mapped(2 * GRANULE)?;
    Facts::new()
        .code("from", gpu.copy_dtod(other.at, at, 2 * GRANULE, ptr::null_mut()))
        .code("to", gpu.copy_dtod(at, other.at, 2 * GRANULE, ptr::null_mut()))
        .code("sync", sync(&gpu))
        .done()
}

fn zero(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let memory = gpu.mapped(GRANULE)?;
    let mut byte = 0_u8;
    Facts::new()
        .code("memset", gpu.memset(memory.at, 0, 0, ptr::null_mut()))
        .code("d2d", gpu.copy_dtod(memory.at, memory.at, 0, ptr::null_mut()))
        .code("h2d", gpu.copy_htod(memory.at, (&raw const byte).cast(), 0, ptr::null_mut()))
        .code("d2h", gpu.copy_dtoh((&raw mut byte).cast(), memory.at, 0, ptr::null_mut()))
        .code("null", gpu.copy_dtod(0, 0, 0, ptr::null_mut()))
        .done()
}

fn nowhere(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let memory = gpu.mapped(GRANULE)?;
    let empty = gpu.range(GRANULE)?;
    Facts::new()
        .code("null-target", gpu.copy_dtod(0, memory.at, 16, ptr::null_mut()))
        .code("null-source", gpu.copy_dtod(memory.at, 0, 16, ptr::null_mut()))
        .code("memset-null", gpu.memset(0, 0, 16, ptr::null_mut()))
        .code("reserved-target", gpu.copy_dtod(empty, memory.at, 16, ptr::null_mut()))
        .code("reserved-source", gpu.copy_dtod(memory.at, empty, 16, ptr::null_mut()))
        .code("sync", sync(&gpu))
        .done()
}

fn no_access(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let memory = gpu.mapped(GRANULE)?;
    let handle = gpu.memory(GRANULE, POSIX_FD)?;
    let closed = gpu.map_only(handle, GRANULE)?;
    Facts::new()
        .code("memset", gpu.memset(closed, 1, 16, ptr::null_mut()))
        .code("to", gpu.copy_dtod(closed, memory.at, 16, ptr::null_mut()))
        .code("from", gpu.copy_dtod(memory.at, closed, 16, ptr::null_mut()))
        .code("sync", sync(&gpu))
        .done()
}

fn unmapped(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let (memory, gone) = (gpu.mapped(GRANULE)?, gpu.mapped(GRANULE)?);
    must("unmap", gpu.mem_unmap(gone.at, gone.size))?;
    Facts::new()
        .code("from", gpu.copy_dtod(memory.at, gone.at, 16, ptr::null_mut()))
        .code("sync", sync(&gpu))
        .done()
}

fn null_host(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let memory = gpu.mapped(GRANULE)?;
    Facts::new()
        .code("h2d", gpu.copy_htod(memory.at, ptr::null(), 16, ptr::null_mut()))
        .code("d2h", gpu.copy_dtoh(ptr::null_mut(), memory.at, 16, ptr::null_mut()))
        .done()
}

fn staged(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let mut f = Facts::new();
    for (name, size) in [("4-KiB", 4096), ("64-KiB", 65536), ("8-MiB", 8 << 20)] {
        let stream = gpu.stream()?;
        gpu.busy(stream)?;
        let memory = gpu.mapped(size.max(GRANULE))?;
        let mut host = vec![0x51_u8; size];
        must("h2d", gpu.copy_htod(memory.at, host.as_ptr().cast(), size, stream))?;
        host.fill(0x52);
        must("sync", gpu.stream_synchronize(stream))?;
        f.fact(name, gpu.peek(memory.at + size as u64 - 1));
    }
    f.done()
}

fn done_on_return(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let mut f = Facts::new();
    for (name, size) in [("4-KiB", 4096), ("8-MiB", 8 << 20)] {
        let memory = gpu.mapped(size.max(GRANULE))?;
        gpu.fill(memory, 0x61)?;
        let stream = gpu.stream()?;
        gpu.busy(stream)?;
        let mut host = vec![0_u8; size];
        must("d2h", gpu.copy_dtoh(host.as_mut_ptr().cast(), memory.at, size, stream))?;
        f.fact(name, host.iter().all(|b| *b == 0x61));
        must("sync", gpu.stream_synchronize(stream))?;
    }
    f.done()
}

fn pinned_late(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let memory = gpu.mapped(GRANULE)?;
    gpu.fill(memory, 0x71)?;
    let host = gpu.pinned(GRANULE)?;
    let stream = gpu.stream()?;
    let event = gpu.event(0)?;
    gpu.busy(stream)?;
    must("d2h", gpu.copy_dtoh(host.cast(), memory.at, GRANULE, stream))?;
    must("record", gpu.event_record(event, stream))?;
    let mut f = Facts::new();
    f.code("query", gpu.event_query(event));
    // SAFETY: `host` is pinned memory of this case; the copy may race, which volatile reads bear.
    let early = unsafe { host.read_volatile() };
    f.fact("early", format!("{early:02x}"));
    must("sync", gpu.stream_synchronize(stream))?;
    // SAFETY: as above, and the copy is done.
    let late = unsafe { host.read_volatile() };
    f.fact("late", format!("{late:02x}")).code("query", gpu.event_query(event));
    f.done()
}

/// Memory of the second device, which `devices` may use.
pub(super) fn on_second(d: &Driver, gpu: &Gpu<'_>, devices: &[i32]) -> Result<u64, String> {
    let prop = crate::gpu::prop(1, POSIX_FD);
    let mut handle = 0;
    must("create", d.mem_create(&raw mut handle, GRANULE, &raw const prop, 0))?;
    let at = gpu.map_only(handle, GRANULE)?;
    for device in devices {
        must("access", gpu.allow(at, GRANULE, *device, ACCESS_READ_WRITE))?;
    }
    Ok(at)
}

fn between_devices(d: &Driver) -> Outcome {
    d.two()?;
    let gpu = Gpu::new(d)?;
    let here = gpu.mapped(GRANULE)?;
    gpu.fill(here, 0x2B)?;
    let there = on_second(d, &gpu, &[0, 1])?;
    Facts::new()
        .code("copy", gpu.copy_dtod(there, here.at, GRANULE, ptr::null_mut()))
        .fact("byte", gpu.peek(there))
        .done()
}

fn other_device(d: &Driver) -> Outcome {
    d.two()?;
    let gpu = Gpu::new(d)?;
    let there = on_second(d, &gpu, &[0])?;
    Facts::new()
        .code("memset", gpu.memset(there, 0x2C, GRANULE, ptr::null_mut()))
        .fact("byte", gpu.peek(there))
        .done()
}

fn no_access_other(d: &Driver) -> Outcome {
    d.two()?;
    let gpu = Gpu::new(d)?;
    let there = on_second(d, &gpu, &[1])?;
    Facts::new()
        .code("memset", gpu.memset(there, 0x2C, GRANULE, ptr::null_mut()))
        .code("sync", sync(&gpu))
        .done()
}
