//! Contexts: one a thread, and what works without one.

use super::cases;
use crate::{
    abi::{ACCESS_READ_WRITE, HOST_PORTABLE, POSIX_FD},
    driver::Driver,
    facts::{Facts, Outcome, must},
    gpu::{GRANULE, Gpu, PTX, access, prop},
};
use std::{ffi::CString, ptr, thread};

cases! {
    "no-context" = no_context,
    "no-context-memory" = no_context_memory,
    "no-context-stream-of-another-thread" = stream_without_context,
    "context-per-thread" = per_thread,
    "pop-empty" = pop_empty,
    "push-null" = push_null,
    "push-pop-nest" = nest,
    "primary-same-handle" = same_handle,
    "primary-release-unretained" = release_unretained,
    "primary-release-too-often" = release_too_often,
    "primary-released-then-used" = released_then_used,
    "primary-released-memory-stays" = released_memory,
    "primary-released-then-retained" = released_then_retained,
}

fn no_context(d: &Driver) -> Outcome {
    must("init", d.init(0))?;
    let (mut object, mut size, mut at) = (ptr::null_mut(), 0, ptr::null_mut());
    let mut page = vec![0_u8; 8192];
    let image = CString::new(PTX).map_err(|e| e.to_string())?;
    let mut f = Facts::new();
    f.code("info", d.mem_get_info(&raw mut size, &raw mut size));
    f.code("stream", d.stream_create(&raw mut object, 1));
    f.code("event", d.event_create(&raw mut object, 0));
    f.code("host-alloc", d.host_alloc(&raw mut at, 4096, HOST_PORTABLE));
    f.code("host-register", d.host_register(page.as_mut_ptr().cast(), 8192, HOST_PORTABLE));
    f.code("module", d.module_load(&raw mut object, image.as_ptr().cast()));
    f.code("sync", d.stream_synchronize(ptr::null_mut()));
    f.done()
}

fn no_context_memory(d: &Driver) -> Outcome {
    must("init", d.init(0))?;
    let (mut size, mut handle, mut at) = (0, 0, 0);
    let prop = prop(0, POSIX_FD);
    let desc = access(0, ACCESS_READ_WRITE);
    let mut f = Facts::new();
    f.code("granularity", d.mem_granularity(&raw mut size, &raw const prop, 0));
    f.code("create", d.mem_create(&raw mut handle, GRANULE, &raw const prop, 0));
    f.code("reserve", d.address_reserve(&raw mut at, GRANULE, 0, 0, 0));
    f.code("map", d.mem_map(at, GRANULE, 0, handle, 0));
    f.code("access", d.set_access(at, GRANULE, &raw const desc, 1));
    f.code("memset", d.memset(at, 1, GRANULE, ptr::null_mut()));
    f.code("export", d.mem_export((&raw mut size).cast(), handle, POSIX_FD, 0));
    f.code("unmap", d.mem_unmap(at, GRANULE));
    f.code("release", d.mem_release(handle));
    f.code("free", d.address_free(at, GRANULE));
    f.done()
}

fn stream_without_context(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let memory = gpu.mapped(GRANULE)?;
    let stream = gpu.stream()?.expose_provenance();
    let event = gpu.event(0)?.expose_provenance();
    thread::scope(|scope| {
        scope
            .spawn(|| {
                let stream = ptr::with_exposed_provenance_mut(stream);
                let event = ptr::with_exposed_provenance_mut(event);
                let mut f = Facts::new();
                f.code("memset", d.memset(memory.at, 1, GRANULE, stream));
                f.code("record", d.event_record(event, stream));
                f.code("wait", d.stream_wait_event(stream, event, 0));
                f.code("event-sync", d.event_synchronize(event));
                f.code("query", d.event_query(event));
                f.code("sync", d.stream_synchronize(stream));
                f.done()
            })
            .join()
            .map_err(|_| "thread panicked")?
    })
}

fn per_thread(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let here = gpu.mem_get_info(&mut 0, &mut 0);
    let there = thread::scope(|scope| {
        scope.spawn(|| d.mem_get_info(&mut 0, &mut 0)).join().map_err(|_| "thread panicked")
    })?;
    Facts::new().code("here", here).code("other-thread", there).done()
}

fn pop_empty(d: &Driver) -> Outcome {
    must("init", d.init(0))?;
    Facts::new().code("pop", d.ctx_pop(&mut ptr::null_mut())).done()
}

fn push_null(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let mut popped = ptr::null_mut();
    let mut f = Facts::new();
    f.code("push", gpu.ctx_push(ptr::null_mut()));
    f.code("info", gpu.mem_get_info(&mut 0, &mut 0));
    f.code("pop", gpu.ctx_pop(&raw mut popped));
    f.code("info-after", gpu.mem_get_info(&mut 0, &mut 0));
    f.done()
}

fn nest(d: &Driver) -> Outcome {
    let context = d.enter(0)?;
    let mut popped = ptr::null_mut();
    let mut f = Facts::new();
    f.code("push-again", d.ctx_push(context));
    f.code("pop", d.ctx_pop(&raw mut popped)).fact("same", popped == context);
    f.code("info", d.mem_get_info(&mut 0, &mut 0));
    f.code("pop", d.ctx_pop(ptr::null_mut()));
    f.code("info", d.mem_get_info(&mut 0, &mut 0));
    f.code("pop", d.ctx_pop(&raw mut popped));
    f.done()
}

fn same_handle(d: &Driver) -> Outcome {
    must("init", d.init(0))?;
    let (mut first, mut second) = (ptr::null_mut(), ptr::null_mut());
    must("retain", d.primary_retain(&raw mut first, 0))?;
    must("retain", d.primary_retain(&raw mut second, 0))?;
    Facts::new().fact("same", first == second).done()
}

fn release_unretained(d: &Driver) -> Outcome {
    must("init", d.init(0))?;
    Facts::new().code("release", d.primary_release(0)).done()
}

fn release_too_often(d: &Driver) -> Outcome {
    must("init", d.init(0))?;
    must("retain", d.primary_retain(&mut ptr::null_mut(), 0))?;
    Facts::new().code("first", d.primary_release(0)).code("second", d.primary_release(0)).done()
}

fn released_then_used(d: &Driver) -> Outcome {
    let context = d.enter(0)?;
    let mut f = Facts::new();
    f.code("release", d.primary_release(0));
    f.code("info", d.mem_get_info(&mut 0, &mut 0));
    f.code("stream", d.stream_create(&mut ptr::null_mut(), 1));
    f.code("push", d.ctx_push(context));
    f.done()
}

fn released_memory(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let memory = gpu.mapped(GRANULE)?;
    gpu.fill(memory, 0x11)?;
    let mut f = Facts::new();
    f.code("release", d.primary_release(0));
    f.code("unmap", d.mem_unmap(memory.at, memory.size));
    f.code("mem-release", d.mem_release(memory.handle));
    f.code("free", d.address_free(memory.at, memory.size));
    f.done()
}

fn released_then_retained(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let memory = gpu.mapped(GRANULE)?;
    gpu.fill(memory, 0x11)?;
    must("pop", d.ctx_pop(&mut ptr::null_mut()))?;
    must("release", d.primary_release(0))?;
    d.enter(0)?;
    Facts::new().fact("byte", gpu.peek(memory.at)).done()
}
