//! Questions to the stand-in alone: what it does on demand, and what no real driver need answer the same way twice.
//! They are no rows of the transcript.

use super::{cases, copy::on_second};
use crate::{
    driver::Driver,
    facts::{Facts, Outcome, must},
    gpu::{GRANULE, Gpu, Mapped},
};
use std::{ffi::CStr, ptr};

cases! {
    "sim-race-two-streams" = two_streams,
    "sim-race-pinned-read" = pinned_read,
    "sim-unused-function" = unused_function,
    "sim-follow-device-pointer" = follow,
    "sim-destroyed-event" = destroyed_event,
    "sim-name-and-version" = name_and_version,
    "sim-second-create" = second_create,
    "sim-many-calls" = many_calls,
    "sim-fabric-killed" = fabric_killed,
    "sim-fabric-descriptor" = fabric_descriptor,
    "sim-fabric-of-another-device" = fabric_of_another,
    "sim-dies-under-pending-copies" = dies_pending,
    "sim-peer-dies" = peer_dies,
    "sim-register-for-reading" = register_for_reading,
}

/// A copy on a second stream that should have waited for the first.
fn two_streams(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let (a, b) = (gpu.mapped(GRANULE)?, gpu.mapped(GRANULE)?);
    gpu.fill(a, 0x01)?;
    let (first, second) = (gpu.stream()?, gpu.stream()?);
    must("memset", gpu.memset(a.at, 0x02, GRANULE, first))?;
    must("copy", gpu.copy_dtod(b.at, a.at, GRANULE, second))?;
    must("sync", gpu.stream_synchronize(first))?;
    must("sync", gpu.stream_synchronize(second))?;
    Facts::new().fact("byte", gpu.peek(b.at)).done()
}

/// Pinned memory read before anything was waited for.
fn pinned_read(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let memory = gpu.mapped(GRANULE)?;
    gpu.fill(memory, 0x03)?;
    let (host, stream) = (gpu.pinned(1)?, gpu.stream()?);
    must("d2h", gpu.copy_dtoh(host.cast(), memory.at, 1, stream))?;
    // SAFETY: `host` is pinned memory of this case; the copy may race, which volatile reads bear.
    let byte = unsafe { host.read_volatile() };
    Facts::new().fact("byte", format!("{byte:02x}")).done()
}

fn unused_function(d: &Driver) -> Outcome {
    Gpu::new(d)?;
    // SAFETY: loading runs initialisers that have run already.
    let library = unsafe { libloading::Library::new("libcuda.so.1") }.map_err(|e| e.to_string())?;
    // SAFETY: the type is the one of `cuda.h` for this symbol.
    let alloc = unsafe { library.get::<unsafe extern "C" fn(*mut u64, usize) -> u32>(b"cuMemAlloc_v2") };
    let alloc = alloc.map_err(|e| e.to_string())?;
    // SAFETY: the out-pointer is to a local.
    let code = unsafe { alloc(&mut 0, GRANULE) };
    Facts::new().code("alloc", code).done()
}

/// What only a device may do.
fn follow(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let memory = gpu.mapped(GRANULE)?;
    let at = ptr::with_exposed_provenance::<u8>(memory.at as usize);
    // SAFETY: it is not sound: it is to end this process.
    let byte = unsafe { at.read_volatile() };
    Facts::new().fact("byte", byte).done()
}

fn destroyed_event(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let event = gpu.event(0)?;
    must("destroy", gpu.event_destroy(event))?;
    Facts::new().code("query", gpu.event_query(event)).done()
}

fn name_and_version(d: &Driver) -> Outcome {
    must("init", d.init(0))?;
    let (mut version, mut name) = (0, [0_u8; 64]);
    must("version", d.driver_version(&raw mut version))?;
    must("name", d.device_name(name.as_mut_ptr().cast(), 64, 0))?;
    let name = CStr::from_bytes_until_nul(&name).map_err(|e| e.to_string())?;
    let name = name.to_string_lossy().replace(' ', "_");
    Facts::new().fact("version", version).fact("name", name).done()
}

fn second_create(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let mut f = Facts::new();
    for attempt in ["first", "second", "third"] {
        let prop = crate::gpu::prop(0, crate::abi::POSIX_FD);
        f.code(attempt, gpu.mem_create(&mut 0, GRANULE, &raw const prop, 0));
    }
    f.done()
}

/// The results of twenty calls on the first device, and then of one on the second if there is one.
fn many_calls(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let mut codes: Vec<String> = Vec::new();
    for _ in 0..20 {
        let name = crate::facts::name(gpu.mem_get_info(&mut 0, &mut 0));
        if codes.last() != Some(&name) {
            codes.push(name);
        }
    }
    let mut f = Facts::new();
    f.fact("info", codes.join("-then-"));
    f.code("retain", d.primary_retain(&mut ptr::null_mut(), 0));
    let mut context = ptr::null_mut();
    f.code("other-device", d.primary_retain(&raw mut context, 1));
    f.code("push", d.ctx_push(context));
    f.code("other-info", d.mem_get_info(&mut 0, &mut 0));
    f.done()
}

/// A fabric handle whose exporter is gone: with an importer the memory stays, without one it does not.
fn fabric_killed(d: &Driver) -> Outcome {
    use crate::{abi::FABRIC, peer::Peer};
    let gpu = Gpu::new(d)?;
    let peer = Peer::start(&[])?;
    let said = peer.ask("fabric 1 146", None)?.0;
    let mut bytes = [0_u8; 64];
    let hex = said.strip_prefix("fabric=").ok_or(format!("setup peer: {said}"))?;
    for (index, byte) in bytes.iter_mut().enumerate() {
        let pair = hex.get(2 * index..2 * index + 2).ok_or("setup handle")?;
        *byte = u8::from_str_radix(pair, 16).map_err(|e| e.to_string())?;
    }
    let (mut first, mut late) = (0, 0);
    let mut f = Facts::new();
    f.code("import", gpu.mem_import(&raw mut first, bytes.as_mut_ptr().cast(), FABRIC));
    let memory = gpu.map(first, GRANULE)?;
    peer.kill()?;
    f.fact("byte-after-death", gpu.peek(memory.at));
    must("unmap", gpu.mem_unmap(memory.at, memory.size))?;
    must("release", gpu.mem_release(first))?;
    f.code("import-late", gpu.mem_import(&raw mut late, bytes.as_mut_ptr().cast(), FABRIC));
    f.done()
}

/// Memory for both kinds of handle, through its descriptor.
fn fabric_descriptor(d: &Driver) -> Outcome {
    use crate::abi::{FABRIC, POSIX_FD};
    use std::os::fd::AsFd as _;
    let gpu = Gpu::new(d)?;
    let handle = gpu.memory(GRANULE, FABRIC | POSIX_FD)?;
    let memory = gpu.map(handle, GRANULE)?;
    gpu.fill(memory, 0x95)?;
    let fd = gpu.export(handle)?;
    let mut imported = 0;
    let mut f = Facts::new();
    f.code("import", gpu.import(fd.as_fd(), &mut imported));
    f.fact("byte", gpu.peek(gpu.map(imported, GRANULE)?.at));
    f.done()
}

/// Memory of the first device for both kinds of handle, imported by each for the second.
fn fabric_of_another(d: &Driver) -> Outcome {
    use crate::abi::{ACCESS_READ, FABRIC, POSIX_FD};
    use std::os::fd::AsFd as _;
    d.two()?;
    let gpu = Gpu::new(d)?;
    let handle = gpu.memory(GRANULE, FABRIC | POSIX_FD)?;
    let (fd, mut fabric) = (gpu.export(handle)?, [0_u8; 64]);
    must("export", gpu.mem_export(fabric.as_mut_ptr().cast(), handle, FABRIC, 0))?;
    let (mut by_fd, mut by_fabric) = (0, 0);
    must("import", gpu.import(fd.as_fd(), &mut by_fd))?;
    must("import", gpu.mem_import(&raw mut by_fabric, fabric.as_mut_ptr().cast(), FABRIC))?;
    let mut f = Facts::new();
    for (what, imported) in [("descriptor", by_fd), ("fabric", by_fabric)] {
        let at = gpu.map_only(imported, GRANULE)?;
        f.code(what, gpu.allow(at, GRANULE, 1, ACCESS_READ));
        f.code("own", gpu.allow(at, GRANULE, 0, ACCESS_READ));
    }
    f.done()
}

/// Calls until the device says that it is gone.
fn until_dead(d: &Driver, device: i32) -> Result<(), String> {
    let mut context = ptr::null_mut();
    for _ in 0..10_000 {
        if d.primary_retain(&raw mut context, device) != 0 {
            return Ok(());
        }
        must("release", d.primary_release(device))?;
    }
    Err("setup it lives".into())
}

/// Copies under way and queued when their device dies, and the teardown of all that they used.
fn dies_pending(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let (streams, event) = ([gpu.stream()?, gpu.stream()?], gpu.event(0)?);
    let host = gpu.pinned(64 << 20)?;
    let (mut memory, mut any) = (Vec::new(), 0);
    for stream in streams {
        let (from, to) = (gpu.busy(stream)?, gpu.mapped(64 << 20)?);
        must("copy", gpu.copy_dtod(to.at, from.at, to.size, stream))?;
        must("copy", gpu.copy_dtoh(host.cast(), to.at, to.size, stream))?;
        memory.extend([from, to]);
        any = to.at;
    }
    must("record", gpu.event_record(event, streams[0]))?;
    until_dead(d, 0)?;
    let mut f = Facts::new();
    f.code("sync", gpu.stream_synchronize(streams[0]));
    f.code("event", gpu.event_synchronize(event));
    f.code("copy", gpu.copy_dtoh(host.cast(), any, 1, streams[1]));
    let mut said = std::collections::BTreeSet::new();
    for Mapped { at, size, handle } in memory {
        said.insert(crate::facts::name(gpu.mem_unmap(at, size)));
        said.insert(crate::facts::name(gpu.mem_release(handle)));
        must("free", gpu.address_free(at, size))?;
    }
    f.fact("unmap-and-release", said.into_iter().collect::<Vec<_>>().join("-or-"));
    f.code("stream-destroy", gpu.stream_destroy(streams[0]));
    f.code("host-free", gpu.host_free(host.cast()));
    f.code("pop", gpu.ctx_pop(&mut ptr::null_mut()));
    f.code("primary-release", gpu.primary_release(0));
    f.done()
}

/// A copy from memory of another device, before that device dies and after.
fn peer_dies(d: &Driver) -> Outcome {
    d.two()?;
    let gpu = Gpu::new(d)?;
    let (here, there) = (gpu.mapped(GRANULE)?, on_second(d, &gpu, &[0])?);
    let mut f = Facts::new();
    let copy = |f: &mut Facts, what: &str| {
        let copied = gpu.copy_dtod(here.at, there, GRANULE, ptr::null_mut());
        let synced = gpu.stream_synchronize(ptr::null_mut());
        f.code(&format!("{what}-copy"), copied).code(&format!("{what}-sync"), synced);
    };
    copy(&mut f, "early");
    until_dead(d, 1)?;
    f.code("info", gpu.mem_get_info(&mut 0, &mut 0));
    copy(&mut f, "late");
    f.code("info-after", gpu.mem_get_info(&mut 0, &mut 0));
    f.code("unmap-own", gpu.mem_unmap(here.at, here.size));
    f.code("unmap-peers", gpu.mem_unmap(there, GRANULE));
    f.done()
}

/// A read-only mapping of shared memory, registered for the device to read: what a staged image is to its readers.
fn register_for_reading(d: &Driver) -> Outcome {
    use crate::abi::{HOST_PORTABLE, HOST_READ_ONLY, attribute};
    use rustix::{
        fs::{MemfdFlags, ftruncate, memfd_create},
        io::write,
        mm::{MapFlags, ProtFlags, mmap},
    };
    let gpu = Gpu::new(d)?;
    let said = |e: rustix::io::Errno| e.to_string();
    let file = memfd_create("for-reading", MemfdFlags::CLOEXEC).map_err(said)?;
    ftruncate(&file, GRANULE as u64).map_err(said)?;
    write(&file, &[0x5A]).map_err(said)?;
    let (rights, flags) = (ProtFlags::READ, MapFlags::SHARED);
    // SAFETY: a new mapping at an address of the kernel's choice, of a file that nobody else has.
    let at = unsafe { mmap(ptr::null_mut(), GRANULE, rights, flags, &file, 0) }.map_err(said)?;
    let memory = gpu.mapped(GRANULE)?;
    let mut can = 0;
    must("attribute", gpu.device_attribute(&raw mut can, attribute::READ_ONLY_HOST_REGISTER, 0))?;
    let mut f = Facts::new();
    f.fact("can", can);
    f.code("plain", gpu.host_register(at, GRANULE, HOST_PORTABLE));
    let registered = gpu.host_register(at, GRANULE, HOST_PORTABLE | HOST_READ_ONLY);
    f.code("for-reading", registered);
    if registered != 0 {
        // Ordinary memory: what is copied to it is written, which is not allowed.
        return f.done();
    }
    f.code("h2d", gpu.copy_htod(memory.at, at.cast_const(), GRANULE, ptr::null_mut()));
    f.code("sync", gpu.stream_synchronize(ptr::null_mut()));
    f.fact("byte", gpu.peek(memory.at));
    f.code("d2h", gpu.copy_dtoh(at, memory.at, GRANULE, ptr::null_mut()));
    f.code("unregister", gpu.host_unregister(at));
    f.done()
}
