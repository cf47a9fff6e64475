//! Initialisation and devices.

use super::cases;
use crate::{
    abi::attribute,
    driver::Driver,
    facts::{Facts, Outcome, must},
    gpu::Gpu,
    peer::Peer,
};
use std::{ffi::c_int, ptr};

cases! {
    "before-init" = before_init,
    "init-flags" = init_flags,
    "init-twice" = init_twice,
    "device-out-of-range" = out_of_range,
    "device-attributes" = attributes,
    "device-attribute-unknown" = attribute_unknown,
    "device-null-out" = null_out,
    "device-name-short-buffer" = name_short,
    "device-name-no-buffer" = name_no_buffer,
    "device-pci-form" = pci_form,
    "device-pci-attributes" = pci_attributes,
    "device-uuid" = uuid,
    "device-total-memory" = total_memory,
    "visible-by-uuid" = visible_by_uuid,
    "visible-by-uuid-prefix" = visible_by_prefix,
    "visible-none" = visible_none,
    "visible-unknown" = visible_unknown,
    "visible-stops-at-unknown" = visible_stops,
    "visible-twice" = visible_twice,
    "visible-reordered" = visible_reordered,
    "peer-self" = peer_self,
    "peer-two" = peer_two,
    "peer-out-of-range" = peer_out_of_range,
}

fn before_init(d: &Driver) -> Outcome {
    let mut f = Facts::new();
    let (mut number, mut object, mut size) = (0, ptr::null_mut(), 0);
    f.code("version", d.driver_version(&raw mut number));
    f.code("count", d.device_count(&raw mut number));
    f.code("get", d.device_get(&raw mut number, 0));
    f.code("attribute", d.device_attribute(&raw mut number, attribute::VMM, 0));
    f.code("retain", d.primary_retain(&raw mut object, 0));
    f.code("info", d.mem_get_info(&raw mut size, &raw mut size));
    f.code("stream", d.stream_create(&raw mut object, 0));
    f.code("reserve", d.address_reserve(&mut 0, 2 << 20, 0, 0, 0));
    f.done()
}

fn init_flags(d: &Driver) -> Outcome {
    Facts::new().code("init", d.init(1)).done()
}

fn init_twice(d: &Driver) -> Outcome {
    Facts::new().code("first", d.init(0)).code("second", d.init(0)).done()
}

fn out_of_range(d: &Driver) -> Outcome {
    must("init", d.init(0))?;
    let mut number = 0;
    let (mut object, mut bytes, mut uuid) = (ptr::null_mut(), 0, [0; 16]);
    let mut f = Facts::new();
    f.code("get", d.device_get(&raw mut number, 99));
    f.code("negative", d.device_get(&raw mut number, -1));
    f.code("attribute", d.device_attribute(&raw mut number, attribute::VMM, 99));
    f.code("uuid", d.device_uuid(&raw mut uuid, 99));
    f.code("total", d.device_total_mem(&raw mut bytes, 99));
    f.code("retain", d.primary_retain(&raw mut object, 99));
    f.code("release", d.primary_release(99));
    f.done()
}

fn read_attribute(d: &Driver, attribute: u32) -> Result<c_int, String> {
    let mut value = -1;
    must("attribute", d.device_attribute(&raw mut value, attribute, 0))?;
    Ok(value)
}

fn attributes(d: &Driver) -> Outcome {
    must("init", d.init(0))?;
    let mut f = Facts::new();
    for (name, id) in [
        ("vmm", attribute::VMM),
        ("posix-fd", attribute::POSIX_FD),
        ("fabric", attribute::FABRIC),
        ("dma-buf", attribute::DMA_BUF),
        ("gpu-direct-rdma", attribute::GPU_DIRECT_RDMA),
        ("gpu-direct-rdma-with-vmm", attribute::GPU_DIRECT_RDMA_WITH_VMM),
        ("host-register", attribute::HOST_REGISTER),
        ("unified-addressing", attribute::UNIFIED_ADDRESSING),
        ("max-threads-per-block", attribute::MAX_THREADS_PER_BLOCK),
    ] {
        f.fact(name, read_attribute(d, id)?);
    }
    f.done()
}

fn attribute_unknown(d: &Driver) -> Outcome {
    must("init", d.init(0))?;
    let mut value = 0;
    Facts::new()
        .code("zero", d.device_attribute(&raw mut value, 0, 0))
        .code("unknown", d.device_attribute(&raw mut value, 9999, 0))
        .done()
}

fn null_out(d: &Driver) -> Outcome {
    must("init", d.init(0))?;
    let mut f = Facts::new();
    f.code("count", d.device_count(ptr::null_mut()));
    f.code("get", d.device_get(ptr::null_mut(), 0));
    f.code("attribute", d.device_attribute(ptr::null_mut(), attribute::VMM, 0));
    f.code("total", d.device_total_mem(ptr::null_mut(), 0));
    f.code("uuid", d.device_uuid(ptr::null_mut(), 0));
    f.done()
}

fn text(bytes: &[u8]) -> String {
    bytes.iter().take_while(|b| **b != 0).map(|b| char::from(*b)).collect()
}

fn name_short(d: &Driver) -> Outcome {
    must("init", d.init(0))?;
    let mut short = [0xFF_u8; 8];
    let got = d.device_name(short.as_mut_ptr().cast(), 4, 0);
    let ends = short.iter().position(|b| *b == 0).map_or("nowhere".into(), |at| at.to_string());
    Facts::new().code("name", got).fact("nul-at", ends).done()
}

fn name_no_buffer(d: &Driver) -> Outcome {
    must("init", d.init(0))?;
    let mut short = [0xFF_u8; 8];
    Facts::new().code("zero", d.device_name(short.as_mut_ptr().cast(), 0, 0)).done()
}

fn pci_form(d: &Driver) -> Outcome {
    must("init", d.init(0))?;
    let mut buffer = [0_u8; 64];
    must("pci", d.device_pci(buffer.as_mut_ptr().cast(), 64, 0))?;
    let form: String = text(&buffer).chars().map(|c| if c.is_ascii_hexdigit() { 'x' } else { c }).collect();
    let mut small = [0_u8; 64];
    Facts::new()
        .fact("form", form)
        .fact("lower-case", text(&buffer) == text(&buffer).to_lowercase())
        .code("13-bytes", d.device_pci(small.as_mut_ptr().cast(), 13, 0))
        .code("5-bytes", d.device_pci(small.as_mut_ptr().cast(), 5, 0))
        .done()
}

fn pci_attributes(d: &Driver) -> Outcome {
    must("init", d.init(0))?;
    let mut buffer = [0_u8; 64];
    must("pci", d.device_pci(buffer.as_mut_ptr().cast(), 64, 0))?;
    let made = format!(
        "{:04x}:{:02x}:{:02x}.0",
        read_attribute(d, attribute::PCI_DOMAIN)?,
        read_attribute(d, attribute::PCI_BUS)?,
        read_attribute(d, attribute::PCI_DEVICE)?
    );
    Facts::new().fact("attributes-agree", made == text(&buffer).to_lowercase()).done()
}

fn uuid(d: &Driver) -> Outcome {
    must("init", d.init(0))?;
    let (first, second) = (d.uuid(0)?, d.uuid(0)?);
    Facts::new().fact("stable", first == second).fact("zero", first == [0; 16]).done()
}

fn total_memory(d: &Driver) -> Outcome {
    let gpu = Gpu::new(d)?;
    let (mut bytes, mut free, mut total) = (0, 0, 0);
    must("total", gpu.device_total_mem(&raw mut bytes, 0))?;
    must("info", gpu.mem_get_info(&raw mut free, &raw mut total))?;
    Facts::new().fact("same-as-info", bytes == total).fact("free-is-less", free < total).done()
}

/// `GPU-…`, as `nvidia-smi -L` writes it.
fn written(uuid: [u8; 16]) -> String {
    let hex: Vec<String> = uuid.iter().map(|b| format!("{b:02x}")).collect();
    let part = |from: usize, to: usize| hex.get(from..to).unwrap_or_default().concat();
    format!("GPU-{}-{}-{}-{}-{}", part(0, 4), part(4, 6), part(6, 8), part(8, 10), part(10, 16))
}

fn seen(variable: &str) -> Result<String, String> {
    let peer = Peer::start(&[("CUDA_VISIBLE_DEVICES", variable)])?;
    Ok(peer.ask("uuids", None)?.0)
}

fn plain(uuid: [u8; 16]) -> String {
    uuid.iter().map(|b| format!("{b:02x}")).collect()
}

fn visible_by_uuid(d: &Driver) -> Outcome {
    must("init", d.init(0))?;
    let uuid = d.uuid(0)?;
    Facts::new().fact("only-that-one", seen(&written(uuid))? == plain(uuid)).done()
}

fn visible_by_prefix(d: &Driver) -> Outcome {
    must("init", d.init(0))?;
    let uuid = d.uuid(0)?;
    let prefix: String = written(uuid).chars().take(12).collect();
    Facts::new().fact("only-that-one", seen(&prefix)? == plain(uuid)).done()
}

fn visible_none(_: &Driver) -> Outcome {
    Facts::new().fact("empty", seen("")?).fact("minus-one", seen("-1")?).done()
}

fn visible_unknown(_: &Driver) -> Outcome {
    Facts::new()
        .fact("ordinal", seen("99")?)
        .fact("word", seen("none-such")?)
        .fact("uuid", seen("GPU-00000000-0000-0000-0000-000000000000")?)
        .done()
}

fn visible_stops(_: &Driver) -> Outcome {
    let count = |seen: &str| seen.split(' ').filter(|s| s.len() == 32).count();
    Facts::new()
        .fact("unknown-last", count(&seen("0,99")?))
        .fact("unknown-first", count(&seen("99,0")?))
        .done()
}

fn visible_twice(_: &Driver) -> Outcome {
    let seen = seen("0,0")?;
    let all: Vec<&str> = seen.split(' ').collect();
    match all.as_slice() {
        [one] if one.len() == 32 => Facts::new().fact("devices", 1).done(),
        [first, second] => Facts::new().fact("devices", 2).fact("same", first == second).done(),
        _ => Facts::new().fact("init", seen).done(),
    }
}

fn visible_reordered(d: &Driver) -> Outcome {
    d.two()?;
    let expected = format!("{} {}", plain(d.uuid(1)?), plain(d.uuid(0)?));
    Facts::new().fact("swapped", seen("1,0")? == expected).done()
}

fn peer_self(d: &Driver) -> Outcome {
    must("init", d.init(0))?;
    let mut can = -1;
    let code = d.device_can_access_peer(&raw mut can, 0, 0);
    Facts::new().code("call", code).fact("can", can).done()
}

fn peer_two(d: &Driver) -> Outcome {
    d.two()?;
    let mut can = -1;
    let code = d.device_can_access_peer(&raw mut can, 0, 1);
    Facts::new().code("call", code).fact("can", can).done()
}

fn peer_out_of_range(d: &Driver) -> Outcome {
    must("init", d.init(0))?;
    let mut can = -1;
    Facts::new().code("call", d.device_can_access_peer(&raw mut can, 0, 99)).done()
}
