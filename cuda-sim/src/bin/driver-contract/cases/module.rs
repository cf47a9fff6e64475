//! Modules and the kernel.

use super::{cases, copy::on_second};
use crate::{
    abi::Opaque,
    driver::Driver,
    facts::{Facts, Outcome, must},
    gpu::{GRANULE, Gpu, PTX},
};
use std::{ffi::CString, ffi::c_void, ptr};

cases! {
    "module-garbage" = garbage,
    "module-ptx-broken" = broken,
    "module-ptx-version" = version,
    "module-ptx-target" = target,
    "module-function-unknown" = function_unknown,
    "module-null" = null,
    "module-unload-twice" = unload_twice,
    "launch-geometry" = geometry,
    "launch-null-function" = launch_null,
    "launch-params-and-extra" = both_params,
    "hash-whole" = hash_whole,
    "hash-blocks" = hash_blocks,
    "hash-late" = hash_late,
    "hash-to-pinned" = hash_to_pinned,
    "look-to-pinned" = look_to_pinned,
    "look-to-registered" = look_to_registered,
    "look-to-pageable" = look_to_pageable,
    "look-misaligned" = look_misaligned,
    "look-late" = look_late,
    "look-at-other-device" = look_at_other_device,
}

fn load(gpu: &Gpu<'_>, text: &str) -> Result<u32, String> {
    let image = CString::new(text).map_err(|e| e.to_string())?;
    Ok(gpu.module_load(&mut ptr::null_mut(), image.as_ptr().cast()))
}

fn garbage(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    Facts::new()
        .code("words", load(&gpu, "this is no program")?)
        .code("empty", load(&gpu, "")?)
        .code("elf-magic", load(&gpu, "\u{7f}ELF and nothing of it, but long enough to look at")?)
        .done()
}

fn broken(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let half: String = PTX.chars().take(PTX.len() / 2).collect();
    Facts::new()
        .code("half", load(&gpu, &half)?)
        .code("instruction", load(&gpu, &PTX.replacen("mov.u32", "nov.u32", 1))?)
        .done()
}

fn version(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    Facts::new().code("99.9", load(&gpu, &PTX.replacen(".version 8.2", ".version 99.9", 1))?).done()
}

fn target(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let later = PTX.replacen(".version 8.2", ".version 8.7", 1).replacen("sm_75", "sm_120", 1);
    Facts::new().code("sm_120", load(&gpu, &later)?).done()
}

fn function_unknown(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let module = gpu.module()?;
    let mut function = ptr::null_mut();
    let mut f = Facts::new();
    for (what, name) in [("unknown", "no_such"), ("empty", ""), ("prefix", "flashboot_blake3_tile")] {
        let name = CString::new(name).map_err(|e| e.to_string())?;
        f.code(what, gpu.module_function(&raw mut function, module, name.as_ptr()));
    }
    f.code("null", gpu.module_function(&raw mut function, module, ptr::null()));
    f.done()
}

fn null(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    Facts::new()
        .code("load", gpu.module_load(&mut ptr::null_mut(), ptr::null()))
        .code("unload", gpu.module_unload(ptr::null_mut()))
        .done()
}

fn unload_twice(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let module = gpu.module()?;
    Facts::new().code("first", gpu.module_unload(module)).code("second", gpu.module_unload(module)).done()
}

/// One of `flashboot_blake3_tiles`' launches.
struct Tiles {
    data: u64,
    len: u64,
    first: u64,
    unit: u32,
    root: u32,
    out: u64,
}

fn launch_tiles(gpu: &Gpu<'_>, function: Opaque, tiles: &mut Tiles, stream: Opaque) -> u32 {
    let grid = tiles.len.div_ceil(1024).max(1).div_ceil(256) as u32;
    let mut params: [*mut c_void; 6] = [
        (&raw mut tiles.data).cast(),
        (&raw mut tiles.len).cast(),
        (&raw mut tiles.first).cast(),
        (&raw mut tiles.unit).cast(),
        (&raw mut tiles.root).cast(),
        (&raw mut tiles.out).cast(),
    ];
    gpu.launch(function, grid, 1, 1, 256, 1, 1, 0, stream, params.as_mut_ptr(), ptr::null_mut())
}

/// Grid and block sizes: with all sizes right the launch is of an empty payload.
fn launch_as(gpu: &Gpu<'_>, function: Opaque, out: u64, sizes: [u32; 7]) -> u32 {
    let [gx, gy, gz, bx, by, bz, shared] = sizes;
    let mut tiles = Tiles { data: out, len: 0, first: 0, unit: 256, root: 1, out };
    let mut params: [*mut c_void; 6] = [
        (&raw mut tiles.data).cast(),
        (&raw mut tiles.len).cast(),
        (&raw mut tiles.first).cast(),
        (&raw mut tiles.unit).cast(),
        (&raw mut tiles.root).cast(),
        (&raw mut tiles.out).cast(),
    ];
    let (params, extra) = (params.as_mut_ptr(), ptr::null_mut());
    gpu.launch(function, gx, gy, gz, bx, by, bz, shared, ptr::null_mut(), params, extra)
}

fn geometry(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let function = gpu.function(gpu.module()?, "flashboot_blake3_tiles")?;
    let out = gpu.mapped(GRANULE)?.at;
    let mut f = Facts::new();
    f.code("grid-zero", launch_as(&gpu, function, out, [0, 1, 1, 256, 1, 1, 0]));
    f.code("block-zero", launch_as(&gpu, function, out, [1, 1, 1, 0, 1, 1, 0]));
    f.code("block-2048", launch_as(&gpu, function, out, [1, 1, 1, 2048, 1, 1, 0]));
    f.code("beyond-launch-bounds", launch_as(&gpu, function, out, [1, 1, 1, 512, 1, 1, 0]));
    f.code("shared-gibibyte", launch_as(&gpu, function, out, [1, 1, 1, 256, 1, 1, 1 << 30]));
    f.code("good", launch_as(&gpu, function, out, [1, 1, 1, 256, 1, 1, 0]));
    f.code("sync", gpu.stream_synchronize(ptr::null_mut()));
    f.done()
}

fn launch_null(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let out = gpu.mapped(GRANULE)?.at;
    Facts::new().code("launch", launch_as(&gpu, ptr::null_mut(), out, [1, 1, 1, 256, 1, 1, 0])).done()
}

fn both_params(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let function = gpu.function(gpu.module()?, "flashboot_blake3_tiles")?;
    let mut params: [*mut c_void; 6] = [ptr::null_mut(); 6];
    let mut extra: [*mut c_void; 1] = [ptr::null_mut()];
    let (params, extra) = (params.as_mut_ptr(), extra.as_mut_ptr());
    let none = ptr::null_mut();
    let launch = |params, extra| gpu.launch(function, 1, 1, 1, 256, 1, 1, 0, ptr::null_mut(), params, extra);
    Facts::new().code("both", launch(params, extra)).code("neither", launch(none, none)).done()
}

fn bytes(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i % 251) as u8 ^ (i / 65536) as u8).collect()
}

fn read(gpu: &Gpu<'_>, at: u64, len: usize) -> Result<Vec<u8>, String> {
    let mut out = vec![0; len];
    must("d2h", gpu.copy_dtoh(out.as_mut_ptr().cast(), at, len, ptr::null_mut()))?;
    must("sync", gpu.stream_synchronize(ptr::null_mut()))?;
    Ok(out)
}

/// Payloads of one tile: the value is BLAKE3's own.
fn hash_whole(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let function = gpu.function(gpu.module()?, "flashboot_blake3_tiles")?;
    let (data, out) = (gpu.mapped(GRANULE)?.at, gpu.mapped(GRANULE)?.at);
    let mut f = Facts::new();
    for len in [0, 1, 64, 1023, 1024, 1025, 3000, 65536, 100_000, 262_144] {
        let payload = bytes(len);
        if len > 0 {
            must("h2d", gpu.copy_htod(data, payload.as_ptr().cast(), len, ptr::null_mut()))?;
        }
        let mut tiles = Tiles { data, len: len as u64, first: 0, unit: 256, root: 1, out };
        must("launch", launch_tiles(&gpu, function, &mut tiles, ptr::null_mut()))?;
        f.fact(&len.to_string(), read(&gpu, out, 32)? == blake3::hash(&payload).as_bytes());
    }
    f.done()
}

/// Blocks of 1 MiB, the last one short, in the middle of a payload.
fn hash_blocks(d: &Driver) -> Outcome {
    use blake3::hazmat::HasherExt as _;
    const BLOCK: usize = 1 << 20;
    let gpu = Gpu::new(d)?;
    let module = gpu.module()?;
    let tiles_of = gpu.function(module, "flashboot_blake3_tiles")?;
    let blocks_of = gpu.function(module, "flashboot_blake3_blocks")?;
    let payload = bytes(3 * BLOCK + 300_001);
    let data = gpu.mapped(4 << 20)?.at;
    let (mut values, mut out) = (gpu.mapped(GRANULE)?.at, gpu.mapped(GRANULE)?.at);
    let first_block = 5_u64;
    must("h2d", gpu.copy_htod(data, payload.as_ptr().cast(), payload.len(), ptr::null_mut()))?;
    let first = first_block * (BLOCK as u64 / 1024);
    let mut tiles = Tiles { data, len: payload.len() as u64, first, unit: 256, root: 0, out: values };
    must("launch", launch_tiles(&gpu, tiles_of, &mut tiles, ptr::null_mut()))?;
    let mut total = payload.len().div_ceil(1024).div_ceil(256) as u64;
    let (mut per_block, mut root) = (4_u32, 0_u32);
    let mut params: [*mut c_void; 5] = [
        (&raw mut values).cast(),
        (&raw mut total).cast(),
        (&raw mut per_block).cast(),
        (&raw mut root).cast(),
        (&raw mut out).cast(),
    ];
    let params = params.as_mut_ptr();
    let grid = total.div_ceil(4) as u32;
    let extra = ptr::null_mut();
    must("launch", gpu.launch(blocks_of, grid, 1, 1, 32, 1, 1, 0, ptr::null_mut(), params, extra))?;
    let got = read(&gpu, out, 32 * grid as usize)?;
    let mut f = Facts::new();
    for (index, (block, value)) in payload.chunks(BLOCK).zip(got.chunks(32)).enumerate() {
        let mut hasher = blake3::Hasher::new();
        hasher.set_input_offset((first_block + index as u64) * BLOCK as u64);
        let expected = hasher.update(block).finalize_non_root();
        f.fact(&format!("block-{index}"), value == expected);
    }
    f.done()
}

/// A kernel's result in pinned memory of the host, by the host's address.
fn hash_to_pinned(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let function = gpu.function(gpu.module()?, "flashboot_blake3_tiles")?;
    let memory = gpu.mapped(GRANULE)?;
    let host = gpu.pinned(4096)?;
    must("memset", gpu.memset(memory.at, 0x5B, 1024, ptr::null_mut()))?;
    let out = host.expose_provenance() as u64;
    let mut tiles = Tiles { data: memory.at, len: 1024, first: 0, unit: 256, root: 1, out };
    must("launch", launch_tiles(&gpu, function, &mut tiles, ptr::null_mut()))?;
    let synced = gpu.stream_synchronize(ptr::null_mut());
    // SAFETY: `host` is pinned memory of this case, and the kernel is done with it.
    let value = unsafe { host.cast::<[u8; 32]>().read() };
    let right = value == *blake3::hash(&[0x5B; 1024]).as_bytes();
    Facts::new().code("sync", synced).fact("value", right).done()
}

/// A launch is queued like a copy.
fn hash_late(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let function = gpu.function(gpu.module()?, "flashboot_blake3_tiles")?;
    let memory = gpu.mapped(GRANULE)?;
    let (stream, event) = (gpu.stream()?, gpu.event(0)?);
    gpu.busy(stream)?;
    must("memset", gpu.memset(memory.at, 0x5A, 1024, stream))?;
    let out = memory.at + 65536;
    let mut tiles = Tiles { data: memory.at, len: 1024, first: 0, unit: 256, root: 1, out };
    must("launch", launch_tiles(&gpu, function, &mut tiles, stream))?;
    must("record", gpu.event_record(event, stream))?;
    let mut f = Facts::new();
    f.code("query", gpu.event_query(event));
    must("sync", gpu.stream_synchronize(stream))?;
    f.fact("value", read(&gpu, out, 32)? == blake3::hash(&[0x5A; 1024]).as_bytes());
    f.done()
}

/// `flashboot_look`: two words at `from` to the host's two words at `out`.
fn launch_look(gpu: &Gpu<'_>, from: u64, out: *mut [u64; 2], stream: Opaque) -> Result<u32, String> {
    let function = gpu.function(gpu.module()?, "flashboot_look")?;
    let (mut progress, mut generation, mut out) = (from, from + 64, out.expose_provenance() as u64);
    let mut params: [*mut c_void; 3] =
        [(&raw mut progress).cast(), (&raw mut generation).cast(), (&raw mut out).cast()];
    Ok(gpu.launch(function, 1, 1, 1, 1, 1, 1, 0, stream, params.as_mut_ptr(), ptr::null_mut()))
}

const PROGRESS: u64 = 0x5C5C_5C5C_5C5C_5C5C;
const VOUCHING: u64 = 0x5D5D_5D5D_5D5D_5D5D;

/// Two words in the first device's memory.
fn words(gpu: &Gpu<'_>) -> Result<u64, String> {
    let at = gpu.mapped(GRANULE)?.at;
    must("memset", gpu.memset(at, 0x5C, 64, ptr::null_mut()))?;
    must("memset", gpu.memset(at + 64, 0x5D, 64, ptr::null_mut()))?;
    must("sync", gpu.stream_synchronize(ptr::null_mut()))?;
    Ok(at)
}

/// What a look at the words at `from` puts at `out`.
fn look(gpu: &Gpu<'_>, from: u64, out: *mut [u64; 2]) -> Outcome {
    let launched = launch_look(gpu, from, out, ptr::null_mut())?;
    let synced = gpu.stream_synchronize(ptr::null_mut());
    // SAFETY: `out` is memory of the case's own, and the kernel is done with it; volatile, as the device wrote it.
    let seen = unsafe { out.read_volatile() };
    let right = seen == [PROGRESS, VOUCHING];
    Facts::new().code("launch", launched).code("sync", synced).fact("words", right).done()
}

fn look_to_pinned(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    look(&gpu, words(&gpu)?, gpu.pinned(4096)?.cast())
}

/// Memory of the program's own, by its own address.
fn look_to_registered(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let mut pages = vec![[0_u64; 2]; 1024];
    let size = size_of_val(&*pages);
    must("register", gpu.host_register(pages.as_mut_ptr().cast(), size, crate::abi::HOST_PORTABLE))?;
    look(&gpu, words(&gpu)?, pages.as_mut_ptr())
}

fn look_to_pageable(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let mut word = Box::new([0_u64; 2]);
    look(&gpu, words(&gpu)?, &raw mut *word)
}

fn look_misaligned(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    look(&gpu, words(&gpu)? + 4, gpu.pinned(4096)?.cast())
}

/// A look waits its turn in its stream.
fn look_late(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let (from, out) = (words(&gpu)?, gpu.pinned(4096)?.cast::<[u64; 2]>());
    let (stream, event) = (gpu.stream()?, gpu.event(0)?);
    // The module is loaded before, which may wait for the device.
    must("launch", launch_look(&gpu, from, out, stream)?)?;
    must("sync", gpu.stream_synchronize(stream))?;
    must("memset", gpu.memset(from, 0x5E, 8, stream))?;
    gpu.busy(stream)?;
    must("memset", gpu.memset(from, 0x5C, 8, stream))?;
    must("launch", launch_look(&gpu, from, out, stream)?)?;
    must("record", gpu.event_record(event, stream))?;
    let mut f = Facts::new();
    f.code("query", gpu.event_query(event));
    must("sync", gpu.stream_synchronize(stream))?;
    // SAFETY: pinned memory of this case, and the kernel is done with it.
    let seen = unsafe { out.read_volatile() };
    f.fact("words", seen == [PROGRESS, VOUCHING]).done()
}

fn look_at_other_device(d: &Driver) -> Outcome {
    d.two()?;
    let gpu = Gpu::new(d)?;
    let there = on_second(d, &gpu, &[0])?;
    must("memset", gpu.memset(there, 0x5C, 64, ptr::null_mut()))?;
    must("memset", gpu.memset(there + 64, 0x5D, 64, ptr::null_mut()))?;
    must("sync", gpu.stream_synchronize(ptr::null_mut()))?;
    look(&gpu, there, gpu.pinned(4096)?.cast())
}
