//! Streams and events: what comes before what.

use super::cases;
use crate::{
    abi::EVENT_DISABLE_TIMING,
    driver::Driver,
    facts::{Facts, Outcome, must},
    gpu::{GRANULE, Gpu},
};
use std::ptr;

cases! {
    "stream-flags" = stream_flags,
    "stream-null" = stream_null,
    "stream-destroy-pending" = destroy_pending,
    "stream-in-order" = in_order,
    "stream-of-other-device" = of_other_device,
    "event-flags" = event_flags,
    "event-never-recorded" = never_recorded,
    "event-ready" = ready,
    "event-elapsed" = elapsed,
    "event-elapsed-pending" = elapsed_pending,
    "event-recorded-again" = recorded_again,
    "event-destroy-pending" = event_destroy_pending,
    "event-null" = event_null,
    "wait-event-orders" = wait_orders,
    "wait-event-own-stream" = wait_own,
    "wait-event-flags" = wait_flags,
    "wait-event-captures-record" = wait_captures,
}

fn stream_flags(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let mut stream = ptr::null_mut();
    Facts::new()
        .code("default", gpu.stream_create(&raw mut stream, 0))
        .code("unknown", gpu.stream_create(&raw mut stream, 0x100))
        .code("null-out", gpu.stream_create(ptr::null_mut(), 0))
        .done()
}

fn stream_null(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let memory = gpu.mapped(GRANULE)?;
    Facts::new()
        .code("memset", gpu.memset(memory.at, 0x10, GRANULE, ptr::null_mut()))
        .code("sync", gpu.stream_synchronize(ptr::null_mut()))
        .code("destroy", gpu.stream_destroy(ptr::null_mut()))
        .done()
}

fn destroy_pending(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let memory = gpu.mapped(GRANULE)?;
    let (stream, event) = (gpu.stream()?, gpu.event(0)?);
    gpu.busy(stream)?;
    must("memset", gpu.memset(memory.at, 0x12, GRANULE, stream))?;
    must("record", gpu.event_record(event, stream))?;
    Facts::new()
        .code("destroy", gpu.stream_destroy(stream))
        .code("event-sync", gpu.event_synchronize(event))
        .fact("byte", gpu.peek(memory.at))
        .done()
}

fn in_order(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let (a, b) = (gpu.mapped(8 * GRANULE)?, gpu.mapped(8 * GRANULE)?);
    let stream = gpu.stream()?;
    for byte in 1..=20 {
        must("memset", gpu.memset(a.at, byte, a.size, stream))?;
        must("copy", gpu.copy_dtod(b.at, a.at, a.size, stream))?;
    }
    must("sync", gpu.stream_synchronize(stream))?;
    Facts::new().fact("byte", gpu.peek(b.at + b.size as u64 - 1)).done()
}

fn of_other_device(d: &Driver) -> Outcome {
    d.two()?;
    let gpu = Gpu::new(d)?;
    let memory = gpu.mapped(GRANULE)?;
    let (stream, event) = (gpu.stream()?, gpu.event(0)?);
    d.enter(1)?;
    let other = gpu.event(0)?;
    Facts::new()
        .code("memset", gpu.memset(memory.at, 0x13, GRANULE, stream))
        .code("record-own-event", gpu.event_record(event, stream))
        .code("record-other-event", gpu.event_record(other, stream))
        .code("wait", gpu.stream_wait_event(gpu.stream()?, event, 0))
        .code("sync", gpu.stream_synchronize(stream))
        .done()
}

fn event_flags(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let mut event = ptr::null_mut();
    Facts::new()
        .code("blocking", gpu.event_create(&raw mut event, 1))
        .code("blocking-untimed", gpu.event_create(&raw mut event, 3))
        .code("interprocess-timed", gpu.event_create(&raw mut event, 4))
        .code("unknown", gpu.event_create(&raw mut event, 0x100))
        .code("null-out", gpu.event_create(ptr::null_mut(), 0))
        .done()
}

fn never_recorded(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let (event, stream) = (gpu.event(0)?, gpu.stream()?);
    let mut ms = 0.0;
    Facts::new()
        .code("query", gpu.event_query(event))
        .code("sync", gpu.event_synchronize(event))
        .code("wait", gpu.stream_wait_event(stream, event, 0))
        .code("stream-sync", gpu.stream_synchronize(stream))
        .code("elapsed", gpu.event_elapsed(&raw mut ms, event, event))
        .done()
}

fn ready(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let (event, stream) = (gpu.event(EVENT_DISABLE_TIMING)?, gpu.stream()?);
    gpu.busy(stream)?;
    must("record", gpu.event_record(event, stream))?;
    Facts::new()
        .code("before", gpu.event_query(event))
        .code("sync", gpu.event_synchronize(event))
        .code("after", gpu.event_query(event))
        .done()
}

fn elapsed(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let stream = gpu.stream()?;
    let (start, end, untimed) = (gpu.event(0)?, gpu.event(0)?, gpu.event(EVENT_DISABLE_TIMING)?);
    must("record", gpu.event_record(start, stream))?;
    gpu.busy(stream)?;
    must("record", gpu.event_record(end, stream))?;
    must("record", gpu.event_record(untimed, stream))?;
    must("sync", gpu.stream_synchronize(stream))?;
    let mut ms = -1.0;
    let mut f = Facts::new();
    f.code("timed", gpu.event_elapsed(&raw mut ms, start, end)).fact("positive", ms > 0.0);
    f.code("backwards", gpu.event_elapsed(&raw mut ms, end, start)).fact("negative", ms < 0.0);
    f.code("untimed", gpu.event_elapsed(&raw mut ms, start, untimed));
    f.done()
}

fn elapsed_pending(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let stream = gpu.stream()?;
    let (start, end) = (gpu.event(0)?, gpu.event(0)?);
    must("record", gpu.event_record(start, stream))?;
    gpu.busy(stream)?;
    must("record", gpu.event_record(end, stream))?;
    Facts::new().code("elapsed", gpu.event_elapsed(&mut 0.0, start, end)).done()
}

fn recorded_again(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let (event, stream) = (gpu.event(0)?, gpu.stream()?);
    must("record", gpu.event_record(event, stream))?;
    must("sync", gpu.event_synchronize(event))?;
    gpu.busy(stream)?;
    must("record", gpu.event_record(event, stream))?;
    Facts::new().code("query", gpu.event_query(event)).code("sync", gpu.event_synchronize(event)).done()
}

fn event_destroy_pending(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let (event, stream) = (gpu.event(0)?, gpu.stream()?);
    gpu.busy(stream)?;
    must("record", gpu.event_record(event, stream))?;
    Facts::new().code("destroy", gpu.event_destroy(event)).code("sync", gpu.stream_synchronize(stream)).done()
}

fn event_null(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let stream = gpu.stream()?;
    Facts::new()
        .code("record", gpu.event_record(ptr::null_mut(), stream))
        .code("query", gpu.event_query(ptr::null_mut()))
        .code("sync", gpu.event_synchronize(ptr::null_mut()))
        .code("wait", gpu.stream_wait_event(stream, ptr::null_mut(), 0))
        .code("destroy", gpu.event_destroy(ptr::null_mut()))
        .done()
}

fn wait_orders(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let (a, b) = (gpu.mapped(GRANULE)?, gpu.mapped(GRANULE)?);
    gpu.fill(a, 0x01)?;
    let (first, second, event) = (gpu.stream()?, gpu.stream()?, gpu.event(EVENT_DISABLE_TIMING)?);
    gpu.busy(first)?;
    must("memset", gpu.memset(a.at, 0x02, GRANULE, first))?;
    must("record", gpu.event_record(event, first))?;
    must("wait", gpu.stream_wait_event(second, event, 0))?;
    must("copy", gpu.copy_dtod(b.at, a.at, GRANULE, second))?;
    must("sync", gpu.stream_synchronize(second))?;
    Facts::new().code("first-is-done", gpu.event_query(event)).fact("byte", gpu.peek(b.at)).done()
}

fn wait_own(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let (stream, event) = (gpu.stream()?, gpu.event(0)?);
    gpu.busy(stream)?;
    must("record", gpu.event_record(event, stream))?;
    Facts::new()
        .code("wait", gpu.stream_wait_event(stream, event, 0))
        .code("sync", gpu.stream_synchronize(stream))
        .done()
}

fn wait_flags(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let (stream, event) = (gpu.stream()?, gpu.event(0)?);
    Facts::new().code("unknown", gpu.stream_wait_event(stream, event, 0x100)).done()
}

fn wait_captures(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let (first, second, event, last) = (gpu.stream()?, gpu.stream()?, gpu.event(0)?, gpu.event(0)?);
    must("record", gpu.event_record(event, first))?;
    must("wait", gpu.stream_wait_event(second, event, 0))?;
    // The wait is for the first record; this one is behind work that the wait must not see. Much of it: a loaded machine
    // may keep this thread waiting a while.
    for _ in 0..4 {
        gpu.busy(first)?;
    }
    must("record", gpu.event_record(event, first))?;
    must("record", gpu.event_record(last, second))?;
    must("sync", gpu.event_synchronize(last))?;
    Facts::new()
        .code("second-record", gpu.event_query(event))
        .code("sync", gpu.stream_synchronize(first))
        .done()
}
