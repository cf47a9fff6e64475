//! Export and import, within a process and between two.

use super::cases;
use crate::{
    abi::{ACCESS_READ, ACCESS_READ_WRITE, FABRIC, POSIX_FD},
    driver::Driver,
    facts::{Facts, Outcome, must, name},
    gpu::{GRANULE, Gpu},
    peer::Peer,
};
use std::{
    ffi::{c_int, c_void},
    os::fd::{AsFd as _, AsRawFd as _, OwnedFd},
    ptr,
};

cases! {
    "export-private" = export_private,
    "export-twice" = export_twice,
    "export-bad" = export_bad,
    "export-zero" = export_zero,
    "export-garbage" = export_garbage,
    "export-null-out" = export_null,
    "export-fabric-of-fd-memory" = export_fabric,
    "import-garbage-fd" = import_garbage,
    "import-fabric-garbage" = import_fabric_garbage,
    "import-own" = import_own,
    "import-own-twice" = import_own_twice,
    "import-keeps-fd" = import_keeps_fd,
    "import-size" = import_size,
    "import-read-only" = import_read_only,
    "import-read-write" = import_read_write,
    "import-in-two-processes" = import_two_processes,
    "import-exported-again" = import_exported_again,
    "import-on-other-device" = import_other_device,
    "exporter-poisoned" = exporter_poisoned,
    "exporter-killed" = exporter_killed,
    "exporter-released" = exporter_released,
    "importer-killed" = importer_killed,
    "fd-after-exporter-released" = fd_after_release,
    "fd-after-exporter-killed" = fd_after_killed,
    "accounting-import" = accounting_import,
    "accounting-exporter-killed" = accounting_exporter_killed,
    "fabric-exchange" = fabric_exchange,
}

fn export_private(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let handle = gpu.memory(GRANULE, 0)?;
    let mut fd: c_int = -1;
    Facts::new().code("export", gpu.mem_export((&raw mut fd).cast(), handle, POSIX_FD, 0)).done()
}

fn export_twice(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let handle = gpu.memory(GRANULE, POSIX_FD)?;
    let (first, second) = (gpu.export(handle)?, gpu.export(handle)?);
    let cloexec = rustix::io::fcntl_getfd(&first).map_err(|e| e.to_string())?;
    Facts::new()
        .fact("different", first.as_raw_fd() != second.as_raw_fd())
        .fact("close-on-exec", cloexec.contains(rustix::io::FdFlags::CLOEXEC))
        .done()
}

fn export_bad(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let handle = gpu.memory(GRANULE, POSIX_FD)?;
    let mut fd: c_int = -1;
    let out = (&raw mut fd).cast();
    Facts::new()
        .code("flags", gpu.mem_export(out, handle, POSIX_FD, 1))
        .code("type", gpu.mem_export(out, handle, 0x40, 0))
        .code("two-types", gpu.mem_export(out, handle, POSIX_FD | FABRIC, 0))
        .done()
}

fn export_zero(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let mut fd: c_int = -1;
    Facts::new().code("export", gpu.mem_export((&raw mut fd).cast(), 0, POSIX_FD, 0)).done()
}

fn export_garbage(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let mut fd: c_int = -1;
    Facts::new().code("export", gpu.mem_export((&raw mut fd).cast(), 0x1234_5678, POSIX_FD, 0)).done()
}

fn export_null(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let handle = gpu.memory(GRANULE, POSIX_FD)?;
    Facts::new().code("export", gpu.mem_export(ptr::null_mut(), handle, POSIX_FD, 0)).done()
}

fn export_fabric(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let handle = gpu.memory(GRANULE, POSIX_FD)?;
    let mut fabric = [0_u8; 64];
    Facts::new().code("export", gpu.mem_export(fabric.as_mut_ptr().cast(), handle, FABRIC, 0)).done()
}

fn import_garbage(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let null = std::fs::File::open("/dev/null").map_err(|e| e.to_string())?;
    let memfd =
        rustix::fs::memfd_create("other", rustix::fs::MemfdFlags::CLOEXEC).map_err(|e| e.to_string())?;
    rustix::fs::ftruncate(&memfd, GRANULE as u64).map_err(|e| e.to_string())?;
    let mut handle = 0;
    let mut f = Facts::new();
    f.code("dev-null", gpu.import(null.as_fd(), &mut handle));
    f.code("memfd", gpu.import(memfd.as_fd(), &mut handle));
    f.code("closed", gpu.mem_import(&raw mut handle, ptr::without_provenance_mut(9999), POSIX_FD));
    let negative = ptr::without_provenance_mut(usize::MAX);
    f.code("negative", gpu.mem_import(&raw mut handle, negative, POSIX_FD));
    f.code("type", gpu.mem_import(&raw mut handle, ptr::without_provenance_mut(0), 0x40));
    f.done()
}

fn import_fabric_garbage(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let mut zeros = [0_u8; 64];
    let from: *mut c_void = zeros.as_mut_ptr().cast();
    Facts::new().code("zeros", gpu.mem_import(&mut 0, from, FABRIC)).done()
}

fn import_own(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let memory = gpu.mapped(GRANULE)?;
    gpu.fill(memory, 0x81)?;
    let fd = gpu.export(memory.handle)?;
    let mut handle = 0;
    let mut f = Facts::new();
    f.code("import", gpu.import(fd.as_fd(), &mut handle)).fact("same-handle", handle == memory.handle);
    let second = gpu.map(handle, GRANULE)?;
    f.fact("byte", gpu.peek(second.at));
    must("unmap", gpu.mem_unmap(second.at, second.size))?;
    f.code("release", gpu.mem_release(handle));
    f.code("release-original", gpu.mem_release(memory.handle));
    f.fact("byte", gpu.peek(memory.at));
    f.done()
}

fn import_own_twice(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let fd = gpu.export(gpu.memory(GRANULE, POSIX_FD)?)?;
    let (mut first, mut second) = (0, 0);
    let mut f = Facts::new();
    f.code("first", gpu.import(fd.as_fd(), &mut first));
    f.code("second", gpu.import(fd.as_fd(), &mut second)).fact("same-handle", first == second);
    f.code("release", gpu.mem_release(first));
    f.code("release", gpu.mem_release(second));
    f.done()
}

fn import_keeps_fd(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let memory = gpu.mapped(GRANULE)?;
    gpu.fill(memory, 0x82)?;
    let fd = gpu.export(memory.handle)?;
    let mut handle = 0;
    must("import", gpu.import(fd.as_fd(), &mut handle))?;
    let still_open = rustix::io::fcntl_getfd(&fd).is_ok();
    drop(fd);
    let second = gpu.map(handle, GRANULE)?;
    Facts::new().fact("descriptor-still-open", still_open).fact("byte", gpu.peek(second.at)).done()
}

/// A peer that exports, and its descriptor.
fn exporter(granules: usize, byte: u8) -> Result<(Peer, OwnedFd), String> {
    let peer = Peer::start(&[])?;
    let (said, fd) = peer.ask(&format!("export {granules} {byte}"), None)?;
    let fd = fd.ok_or(format!("setup peer: {said}"))?;
    Ok((peer, fd))
}

fn import_size(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let (_peer, fd) = exporter(2, 0x83)?;
    let mut handle = 0;
    must("import", gpu.import(fd.as_fd(), &mut handle))?;
    let at = gpu.range(4 * GRANULE)?;
    Facts::new()
        .code("more", gpu.mem_map(at, 4 * GRANULE, 0, handle, 0))
        .code("less", gpu.mem_map(at, GRANULE, 0, handle, 0))
        .code("whole", gpu.mem_map(at + 2 * GRANULE as u64, 2 * GRANULE, 0, handle, 0))
        .done()
}

fn import_with(d: &Driver, flags: u32) -> Outcome {
    let gpu = Gpu::new(d)?;
    let (_peer, fd) = exporter(2, 0x84)?;
    let mut handle = 0;
    let mut f = Facts::new();
    f.code("import", gpu.import(fd.as_fd(), &mut handle));
    let at = gpu.map_only(handle, 2 * GRANULE)?;
    f.code("access-part", gpu.allow(at, GRANULE, 0, flags));
    f.code("access", gpu.allow(at, 2 * GRANULE, 0, flags)).fact("byte", gpu.peek(at));
    let other = gpu.mapped(GRANULE)?;
    f.code("memset", gpu.memset(at, 0x85, GRANULE, ptr::null_mut()));
    f.code("copy-into", gpu.copy_dtod(at, other.at, GRANULE, ptr::null_mut()));
    f.code("sync", gpu.stream_synchronize(ptr::null_mut()));
    f.code("copy-from", gpu.copy_dtod(other.at, at, GRANULE, ptr::null_mut()));
    f.code("sync", gpu.stream_synchronize(ptr::null_mut()));
    f.done()
}

fn import_read_only(d: &Driver) -> Outcome {
    import_with(d, ACCESS_READ)
}

fn import_read_write(d: &Driver) -> Outcome {
    import_with(d, ACCESS_READ_WRITE)
}

fn import_two_processes(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let memory = gpu.mapped(GRANULE)?;
    gpu.fill(memory, 0x86)?;
    let fd = gpu.export(memory.handle)?;
    let (reader, writer) = (Peer::start(&[])?, Peer::start(&[])?);
    let mut f = Facts::new();
    f.fact("reader", reader.ask("import 1 1", Some(fd.as_fd()))?.0);
    f.fact("writer", writer.ask("import 1 3", Some(fd.as_fd()))?.0);
    f.fact("reads", reader.ask("read", None)?.0);
    f.fact("reader-write", reader.ask("write", None)?.0.replace(' ', ","));
    f.fact("writer-write", writer.ask("write", None)?.0.replace(' ', ","));
    f.fact("seen-by-owner", gpu.peek(memory.at));
    f.done()
}

fn import_exported_again(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let (_peer, fd) = exporter(1, 0x87)?;
    let mut handle = 0;
    must("import", gpu.import(fd.as_fd(), &mut handle))?;
    let mut again: c_int = -1;
    Facts::new().code("export", gpu.mem_export((&raw mut again).cast(), handle, POSIX_FD, 0)).done()
}

/// The clone's way: a peer process's memory of the first device, mapped by the second for itself alone.
fn import_other_device(d: &Driver) -> Outcome {
    d.two()?;
    let (_peer, fd) = exporter(1, 0x92)?;
    d.enter(1)?;
    let gpu = Gpu(d);
    let mut handle = 0;
    let mut f = Facts::new();
    f.code("import", gpu.import(fd.as_fd(), &mut handle));
    let from = gpu.map_only(handle, GRANULE)?;
    f.code("access", gpu.allow(from, GRANULE, 1, ACCESS_READ));
    let prop = crate::gpu::prop(1, POSIX_FD);
    let mut own = 0;
    must("create", gpu.mem_create(&raw mut own, GRANULE, &raw const prop, 0))?;
    let to = gpu.map_only(own, GRANULE)?;
    must("access", gpu.allow(to, GRANULE, 1, ACCESS_READ_WRITE))?;
    f.code("copy", gpu.copy_dtod(to, from, GRANULE, ptr::null_mut())).fact("byte", gpu.peek(to));
    f.code("copy-into", gpu.copy_dtod(from, to, GRANULE, ptr::null_mut()));
    f.fact("read-directly", gpu.peek(from));
    f.done()
}

/// The owner's context is beyond use; its memory is not.
fn exporter_poisoned(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let (peer, fd) = exporter(1, 0x93)?;
    let mut handle = 0;
    must("import", gpu.import(fd.as_fd(), &mut handle))?;
    let memory = gpu.map(handle, GRANULE)?;
    let said = peer.ask("poison", None)?.0;
    let mut late = 0;
    Facts::new()
        .fact("peer", said)
        .fact("byte", gpu.peek(memory.at))
        .code("memset", gpu.memset(memory.at, 0x94, GRANULE, ptr::null_mut()))
        .fact("byte", gpu.peek(memory.at))
        .code("import-late", gpu.import(fd.as_fd(), &mut late))
        .done()
}

fn exporter_killed(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let (peer, fd) = exporter(1, 0x88)?;
    let mut handle = 0;
    must("import", gpu.import(fd.as_fd(), &mut handle))?;
    let memory = gpu.map(handle, GRANULE)?;
    peer.kill()?;
    Facts::new()
        .fact("byte", gpu.peek(memory.at))
        .code("memset", gpu.memset(memory.at, 0x89, GRANULE, ptr::null_mut()))
        .fact("byte", gpu.peek(memory.at))
        .done()
}

fn exporter_released(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let (peer, fd) = exporter(1, 0x8A)?;
    let mut handle = 0;
    must("import", gpu.import(fd.as_fd(), &mut handle))?;
    let memory = gpu.map(handle, GRANULE)?;
    let said = peer.ask("release", None)?.0.replace(' ', ",");
    Facts::new().fact("peer", said).fact("byte", gpu.peek(memory.at)).done()
}

fn importer_killed(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let memory = gpu.mapped(GRANULE)?;
    gpu.fill(memory, 0x8B)?;
    let fd = gpu.export(memory.handle)?;
    let peer = Peer::start(&[])?;
    let said = peer.ask("import 1 1", Some(fd.as_fd()))?.0;
    peer.kill()?;
    Facts::new()
        .fact("peer", said)
        .fact("byte", gpu.peek(memory.at))
        .code("memset", gpu.memset(memory.at, 0x8C, GRANULE, ptr::null_mut()))
        .code("sync", gpu.stream_synchronize(ptr::null_mut()))
        .code("unmap", gpu.mem_unmap(memory.at, memory.size))
        .code("release", gpu.mem_release(memory.handle))
        .done()
}

fn fd_after_release(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let (peer, fd) = exporter(1, 0x8D)?;
    peer.ask("release", None)?;
    import_late(&gpu, &fd)
}

fn fd_after_killed(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let (peer, fd) = exporter(1, 0x8E)?;
    peer.kill()?;
    import_late(&gpu, &fd)
}

fn import_late(gpu: &Gpu<'_>, fd: &OwnedFd) -> Outcome {
    let mut handle = 0;
    let imported = gpu.import(fd.as_fd(), &mut handle);
    let mut f = Facts::new();
    f.code("import", imported);
    if imported == 0 {
        let memory = gpu.map(handle, GRANULE)?;
        f.fact("byte", gpu.peek(memory.at));
    }
    f.done()
}

/// How much less is free than was, in MiB.
fn taken(gpu: &Gpu<'_>, before: usize) -> Result<i64, String> {
    Ok((before as i64 - gpu.free()? as i64) >> 20)
}

fn accounting_import(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let (_peer, fd) = exporter(32, 0x8F)?;
    // A first copy and kernel may take memory of the driver's own.
    let own = gpu.mapped(GRANULE)?;
    gpu.fill(own, 0)?;
    let before = gpu.free()?;
    let mut handle = 0;
    let mut f = Facts::new();
    must("import", gpu.import(fd.as_fd(), &mut handle))?;
    let memory = gpu.map(handle, 32 * GRANULE)?;
    f.fact("imported", taken(&gpu, before)?);
    must("unmap", gpu.mem_unmap(memory.at, memory.size))?;
    must("release", gpu.mem_release(handle))?;
    f.fact("released", taken(&gpu, before)?);
    f.done()
}

fn accounting_exporter_killed(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let own = gpu.mapped(GRANULE)?;
    gpu.fill(own, 0)?;
    let (peer, fd) = exporter(512, 0x90)?;
    let mut handle = 0;
    must("import", gpu.import(fd.as_fd(), &mut handle))?;
    let memory = gpu.map(handle, 512 * GRANULE)?;
    drop(fd);
    peer.kill()?;
    let pinned = gpu.free()?;
    must("unmap", gpu.mem_unmap(memory.at, memory.size))?;
    must("release", gpu.mem_release(handle))?;
    let returned = (gpu.free()? as i64 - pinned as i64) >> 20;
    Facts::new().fact("returned-by-the-importer", returned).done()
}

fn fabric_exchange(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let prop = crate::gpu::prop(0, FABRIC);
    let mut handle = 0;
    let created = gpu.mem_create(&raw mut handle, GRANULE, &raw const prop, 0);
    if created != 0 {
        return Err(format!("skipped: no channel ({})", name(created)));
    }
    let memory = gpu.map(handle, GRANULE)?;
    gpu.fill(memory, 0x91)?;
    let mut fabric = [0_u8; 64];
    let mut f = Facts::new();
    f.code("export", gpu.mem_export(fabric.as_mut_ptr().cast(), handle, FABRIC, 0));
    let mut imported = 0;
    f.code("import", gpu.mem_import(&raw mut imported, fabric.as_mut_ptr().cast(), FABRIC));
    let second = gpu.map(imported, GRANULE)?;
    f.fact("byte", gpu.peek(second.at));
    f.done()
}
