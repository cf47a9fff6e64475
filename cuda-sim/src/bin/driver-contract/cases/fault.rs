//! What comes of mistakes: poisoned contexts, fork, and memory taken away under pending work.

use super::cases;
use crate::{
    abi::{ACCESS_READ, POSIX_FD},
    driver::Driver,
    facts::{Facts, Outcome, must, name},
    gpu::{GRANULE, Gpu, prop},
    peer::Peer,
};
use std::{
    ffi::c_void,
    io::{self, Read as _, Write as _},
    os::unix::process::CommandExt as _,
    process::Command,
    ptr,
};

cases! {
    "poison" = poison,
    "poison-every-call" = every_call,
    "poison-retain-again" = retain_again,
    "poison-other-process" = other_process,
    "poison-kernel-writes-read-only" = writes_read_only,
    "poison-under-pending-copy" = poison_pending,
    "fork-after-init" = fork_after_init,
    "fork-before-init" = fork_before_init,
    "unmap-under-pending-copy" = unmap_pending,
    "unmap-beside-pending-copy" = unmap_beside,
    "release-under-pending-copy" = release_pending,
    "host-free-under-pending-copy" = host_free_pending,
    "unregister-under-pending-copy" = unregister_pending,
    "module-unload-under-pending-kernel" = unload_pending,
    "primary-release-under-pending-copy" = primary_pending,
    "access-change-under-pending-copy" = access_pending,
}

/// Launches the kernel on `data`, to write to `out`.
fn hash(gpu: &Gpu<'_>, mut data: u64, mut out: u64) -> Result<u32, String> {
    let function = gpu.function(gpu.module()?, "flashboot_blake3_tiles")?;
    let (mut len, mut first, mut unit, mut root) = (1024_u64, 0_u64, 256_u32, 1_u32);
    let mut params: [*mut c_void; 6] = [
        (&raw mut data).cast(),
        (&raw mut len).cast(),
        (&raw mut first).cast(),
        (&raw mut unit).cast(),
        (&raw mut root).cast(),
        (&raw mut out).cast(),
    ];
    let (params, extra) = (params.as_mut_ptr(), ptr::null_mut());
    Ok(gpu.launch(function, 1, 1, 1, 256, 1, 1, 0, ptr::null_mut(), params, extra))
}

/// A kernel that reads where nothing is mapped.
pub(crate) fn break_context(gpu: &Gpu<'_>) -> Result<(u32, u32), String> {
    let out = gpu.mapped(GRANULE)?;
    let nothing = gpu.range(GRANULE)?;
    let launched = hash(gpu, nothing, out.at)?;
    Ok((launched, gpu.stream_synchronize(ptr::null_mut())))
}

fn poison(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let (launched, synced) = break_context(&gpu)?;
    Facts::new()
        .code("launch", launched)
        .code("sync", synced)
        .code("sync-again", gpu.stream_synchronize(ptr::null_mut()))
        .done()
}

fn every_call(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let memory = gpu.mapped(GRANULE)?;
    let (stream, event) = (gpu.stream()?, gpu.event(0)?);
    let pinned = gpu.pinned(4096)?;
    break_context(&gpu)?;
    let prop = prop(0, POSIX_FD);
    let (mut size, mut at, mut object, mut number) = (0, 0, ptr::null_mut(), 0);
    let mut f = Facts::new();
    f.code("init", gpu.init(0));
    f.code("count", gpu.device_count(&raw mut number));
    f.code("info", gpu.mem_get_info(&raw mut size, &raw mut size));
    f.code("create", gpu.mem_create(&raw mut at, GRANULE, &raw const prop, 0));
    f.code("reserve", gpu.address_reserve(&raw mut at, GRANULE, 0, 0, 0));
    f.code("export", gpu.mem_export((&raw mut at).cast(), memory.handle, POSIX_FD, 0));
    f.code("access", gpu.allow(memory.at, GRANULE, 0, ACCESS_READ));
    f.code("memset", gpu.memset(memory.at, 0, 16, stream));
    f.code("stream", gpu.stream_create(&raw mut object, 0));
    f.code("query", gpu.event_query(event));
    f.code("record", gpu.event_record(event, stream));
    f.code("event-destroy", gpu.event_destroy(event));
    f.code("stream-destroy", gpu.stream_destroy(stream));
    f.code("host-free", gpu.host_free(pinned.cast()));
    f.code("unmap", gpu.mem_unmap(memory.at, memory.size));
    f.code("mem-release", gpu.mem_release(memory.handle));
    f.code("address-free", gpu.address_free(memory.at, memory.size));
    f.code("pop", gpu.ctx_pop(&raw mut object));
    f.code("push", gpu.ctx_push(object));
    f.code("primary-release", gpu.primary_release(0));
    f.done()
}

fn retain_again(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    break_context(&gpu)?;
    let mut context = ptr::null_mut();
    let mut f = Facts::new();
    f.code("pop", d.ctx_pop(&raw mut context));
    f.code("release", d.primary_release(0));
    f.code("retain", d.primary_retain(&raw mut context, 0));
    f.code("push", d.ctx_push(context));
    f.code("info", d.mem_get_info(&mut 0, &mut 0));
    f.done()
}

fn other_process(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let peer = Peer::start(&[])?;
    let said = peer.ask("export 1 97", None)?.0;
    break_context(&gpu)?;
    Facts::new().fact("peer", said).fact("peer-reads", peer.ask("read", None)?.0).done()
}

/// Copies under way on one stream when a kernel on another ends the context; then their memory is taken away.
fn poison_pending(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let (stream, event) = (gpu.stream()?, gpu.event(0)?);
    let memory = gpu.busy(stream)?;
    must("record", gpu.event_record(event, stream))?;
    let mut f = Facts::new();
    break_context(&gpu)?;
    f.code("sync", gpu.stream_synchronize(stream));
    f.code("event", gpu.event_synchronize(event));
    f.code("unmap", gpu.mem_unmap(memory.at, memory.size));
    f.code("release", gpu.mem_release(memory.handle));
    f.code("free", gpu.address_free(memory.at, memory.size));
    f.done()
}

fn writes_read_only(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let (data, out) = (gpu.mapped(GRANULE)?, gpu.mapped(GRANULE)?);
    must("access", gpu.allow(out.at, GRANULE, 0, ACCESS_READ))?;
    let launched = hash(&gpu, data.at, out.at)?;
    Facts::new()
        .code("launch", launched)
        .code("sync", gpu.stream_synchronize(ptr::null_mut()))
        .code("info", gpu.mem_get_info(&mut 0, &mut 0))
        .done()
}

/// What `ask` says in a child made by fork.
fn in_fork(ask: impl Fn() -> String + Send + Sync + 'static) -> Result<String, String> {
    let (mut reader, mut writer) = io::pipe().map_err(|e| e.to_string())?;
    let mut command = Command::new("/proc/self/exe");
    command.arg("--list").stdout(std::process::Stdio::null());
    let answer = move || {
        writer.write_all(ask().as_bytes())?;
        // Nothing runs after the answer.
        Err(io::Error::other("answered"))
    };
    // SAFETY: the closure runs in the forked child. It allocates, which glibc's fork allows; that the driver
    // is asked there is the case's point.
    unsafe { command.pre_exec(answer) };
    // It never runs: the closure fails when it has answered.
    let _ = command.spawn();
    drop(command);
    let mut text = String::new();
    reader.read_to_string(&mut text).map_err(|e| e.to_string())?;
    Ok(if text.is_empty() { "died".into() } else { text })
}

fn asks(driver: &Driver) -> String {
    let (mut size, mut number, mut object) = (0, 0, ptr::null_mut());
    [
        format!("init={}", name(driver.init(0))),
        format!("count={}", name(driver.device_count(&raw mut number))),
        format!("info={}", name(driver.mem_get_info(&raw mut size, &raw mut size))),
        format!("retain={}", name(driver.primary_retain(&raw mut object, 0))),
        format!("stream={}", name(driver.stream_create(&raw mut object, 0))),
    ]
    .join(",")
}

fn fork_after_init(d: &Driver) -> Outcome {
    Gpu::new(d)?;
    let driver = Driver::open()?;
    let said = in_fork(move || asks(&driver))?;
    let here = d.mem_get_info(&mut 0, &mut 0);
    Facts::new().fact("child", said).code("parent", here).done()
}

fn fork_before_init(_: &Driver) -> Outcome {
    let driver = Driver::open()?;
    let said = in_fork(move || format!("init={}", name(driver.init(0))))?;
    Facts::new().fact("child", said).done()
}

fn unmap_pending(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let stream = gpu.stream()?;
    let memory = gpu.busy(stream)?;
    Facts::new()
        .code("unmap", gpu.mem_unmap(memory.at, memory.size))
        .code("sync", gpu.stream_synchronize(stream))
        .done()
}

/// Taking away memory that the pending work does not use.
fn unmap_beside(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let stream = gpu.stream()?;
    let idle = gpu.mapped(GRANULE)?;
    gpu.busy(stream)?;
    Facts::new()
        .code("unmap", gpu.mem_unmap(idle.at, idle.size))
        .code("release", gpu.mem_release(idle.handle))
        .code("free", gpu.address_free(idle.at, idle.size))
        .code("sync", gpu.stream_synchronize(stream))
        .done()
}

fn release_pending(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let stream = gpu.stream()?;
    let memory = gpu.busy(stream)?;
    Facts::new()
        .code("release", gpu.mem_release(memory.handle))
        .code("sync", gpu.stream_synchronize(stream))
        .done()
}

fn host_free_pending(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let stream = gpu.stream()?;
    gpu.busy(stream)?;
    let memory = gpu.mapped(GRANULE)?;
    let host = gpu.pinned(GRANULE)?;
    must("copy", gpu.copy_htod(memory.at, host.cast(), GRANULE, stream))?;
    Facts::new().code("free", gpu.host_free(host.cast())).code("sync", gpu.stream_synchronize(stream)).done()
}

fn unregister_pending(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let stream = gpu.stream()?;
    gpu.busy(stream)?;
    let memory = gpu.mapped(GRANULE)?;
    let mut host = vec![1_u8; GRANULE];
    must("register", gpu.host_register(host.as_mut_ptr().cast(), GRANULE, 1))?;
    must("copy", gpu.copy_htod(memory.at, host.as_ptr().cast(), GRANULE, stream))?;
    Facts::new()
        .code("unregister", gpu.host_unregister(host.as_mut_ptr().cast()))
        .code("sync", gpu.stream_synchronize(stream))
        .done()
}

fn unload_pending(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let module = gpu.module()?;
    let function = gpu.function(module, "flashboot_blake3_tiles")?;
    let stream = gpu.stream()?;
    let memory = gpu.busy(stream)?;
    let (mut data, mut out) = (memory.at, memory.at + (32 << 20));
    let (mut len, mut first, mut unit, mut root) = (1024_u64, 0_u64, 256_u32, 1_u32);
    let mut params: [*mut c_void; 6] = [
        (&raw mut data).cast(),
        (&raw mut len).cast(),
        (&raw mut first).cast(),
        (&raw mut unit).cast(),
        (&raw mut root).cast(),
        (&raw mut out).cast(),
    ];
    let (params, extra) = (params.as_mut_ptr(), ptr::null_mut());
    must("launch", gpu.launch(function, 1, 1, 1, 256, 1, 1, 0, stream, params, extra))?;
    Facts::new().code("unload", gpu.module_unload(module)).code("sync", gpu.stream_synchronize(stream)).done()
}

fn primary_pending(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let stream = gpu.stream()?;
    gpu.busy(stream)?;
    Facts::new().code("release", gpu.primary_release(0)).done()
}

fn access_pending(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let stream = gpu.stream()?;
    let memory = gpu.busy(stream)?;
    Facts::new()
        .code("access", gpu.allow(memory.at, memory.size, 0, ACCESS_READ))
        .code("sync", gpu.stream_synchronize(stream))
        .done()
}
