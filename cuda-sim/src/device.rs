//! The devices that this process sees, in its order.

use crate::{
    abi::{attribute, code},
    config::Config,
    host::Host,
};
use std::ffi::c_int;

/// One visible device.
#[derive(Debug, Clone)]
pub(crate) struct Device {
    /// Its index on the host, whatever its ordinal here.
    pub(crate) physical: usize,
    pub(crate) uuid: [u8; 16],
    pub(crate) name: String,
    pub(crate) pci: String,
    read_only_register: bool,
}

/// `GPU-…`, as `nvidia-smi -L` writes it.
fn written(uuid: [u8; 16]) -> String {
    let hex: String = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
    let part = |from, to| hex.get(from..to).unwrap_or_default();
    format!("GPU-{}-{}-{}-{}-{}", part(0, 8), part(8, 12), part(12, 16), part(16, 20), part(20, 32))
}

/// The devices that `CUDA_VISIBLE_DEVICES` leaves, in its order.
///
/// The list ends at the first entry that names none (row `visible-stops-at-unknown`); UUIDs may be cut short (row
/// `visible-by-uuid-prefix`); a device named twice makes `cuInit` fail (row `visible-twice`).
pub(crate) fn visible(host: &Host, config: &Config, variable: Option<&str>) -> Result<Vec<Device>, u32> {
    let all: Vec<Device> = (0..config.devices).map(|index| device(host, config, index)).collect();
    let Some(list) = variable else {
        return if all.is_empty() { Err(code::NO_DEVICE) } else { Ok(all) };
    };
    let mut seen: Vec<Device> = Vec::new();
    for entry in list.split(',').map(str::trim) {
        let found = match entry.parse::<usize>() {
            Ok(index) => all.get(index),
            Err(_) if entry.starts_with("GPU-") => {
                all.iter().find(|device| written(device.uuid).starts_with(entry))
            }
            Err(_) => None,
        };
        let Some(found) = found else { break };
        if seen.iter().any(|device| device.physical == found.physical) {
            return Err(code::INVALID_DEVICE);
        }
        seen.push(found.clone());
    }
    // Rows `visible-none` and `visible-unknown`.
    if seen.is_empty() { Err(code::NO_DEVICE) } else { Ok(seen) }
}

fn device(host: &Host, config: &Config, physical: usize) -> Device {
    let slice = if config.mig { " MIG 1g.18gb" } else { "" };
    Device {
        physical,
        uuid: host.uuid(physical),
        name: format!("flashboot cuda-sim{slice}"),
        pci: format!("0000:{:02x}:00.0", 0x17 + physical),
        read_only_register: !config.no_read_only_register,
    }
}

impl Device {
    /// An attribute (row `device-attributes`). FABRIC reads 1 also where there is no channel.
    pub(crate) fn attribute(&self, id: u32) -> Result<c_int, u32> {
        Ok(match id {
            attribute::MAX_THREADS_PER_BLOCK => 1024,
            attribute::MULTIPROCESSORS => 2,
            attribute::PCI_DOMAIN | attribute::PCI_DEVICE => 0,
            attribute::PCI_BUS => 0x17 + self.physical as c_int,
            attribute::COMPUTE_MAJOR => 9,
            attribute::VMM
            | attribute::POSIX_FD
            | attribute::FABRIC
            | attribute::DMA_BUF
            | attribute::GPU_DIRECT_RDMA
            | attribute::GPU_DIRECT_RDMA_WITH_VMM
            | attribute::HOST_REGISTER
            | attribute::UNIFIED_ADDRESSING => 1,
            // The strictest there is, so that readers must flush. By the documentation: never asked of hardware.
            attribute::NIC_WRITES_ORDERING => 0,
            attribute::READ_ONLY_HOST_REGISTER => c_int::from(self.read_only_register),
            attribute::COMPUTE_MINOR => 0,
            // Row `device-attribute-unknown`; a known one that flashboot never asked for is refused too.
            _ => return Err(code::INVALID_VALUE),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(variable: Option<&str>) -> Result<Vec<usize>, u32> {
        let dir = tempfile::tempdir().unwrap();
        let config = Config { devices: 3, ..Config::read() };
        let host = Host::open(dir.path(), 3, 1 << 30);
        let uuid = written(host.uuid(2));
        let variable = variable.map(|v| v.replace("UUID2", &uuid));
        Ok(visible(&host, &config, variable.as_deref())?.iter().map(|d| d.physical).collect())
    }

    #[test]
    fn visible_devices_are_taken_in_order_by_ordinal_and_uuid() {
        assert_eq!(seen(None), Ok(vec![0, 1, 2]));
        assert_eq!(seen(Some("2, 0")), Ok(vec![2, 0]));
        assert_eq!(seen(Some("UUID2,1")), Ok(vec![2, 1]));
        assert_eq!(seen(Some("1,9,0")), Ok(vec![1]));
        assert_eq!(seen(Some("")), Err(code::NO_DEVICE));
        assert_eq!(seen(Some("-1")), Err(code::NO_DEVICE));
        assert_eq!(seen(Some("0,0")), Err(code::INVALID_DEVICE));
    }
}
