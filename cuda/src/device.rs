//! The GPUs of this process: who they are, where they are, what they can do.
//!
//! A GPU is known by its UUID or PCI address. Its ordinal means something in this process only
//! (`CUDA_VISIBLE_DEVICES` re-maps it), so it stays inside this crate.

use crate::{
    api::Ordinal,
    error::code,
    ops::{Ops, Real},
};
use flashboot_core::{Error, Kind, Result};
use std::{fmt, fs, sync::Arc};

/// The oldest driver with everything this crate calls: CUDA 12.2, release 535.
pub const OLDEST_DRIVER: u32 = 12_020;

/// `CU_DEVICE_ATTRIBUTE_…` (`cuda.h`).
mod attribute {
    pub(super) const COMPUTE_CAPABILITY_MAJOR: u32 = 75;
    pub(super) const COMPUTE_CAPABILITY_MINOR: u32 = 76;
    pub(super) const VIRTUAL_MEMORY_MANAGEMENT: u32 = 102;
    pub(super) const POSIX_FD: u32 = 103;
    pub(super) const GPU_DIRECT_RDMA_WITH_VMM: u32 = 110;
    pub(super) const READ_ONLY_HOST_REGISTER: u32 = 113;
    pub(super) const NIC_WRITES_ORDERING: u32 = 118;
    pub(super) const DMA_BUF: u32 = 124;
    pub(super) const FABRIC: u32 = 128;
}

/// What the driver says a GPU can do. A `true` is a claim, not a proof: [`crate::probe`] tries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Features {
    /// Virtual memory management: `cuMemCreate`, `cuMemMap`.
    pub vmm: bool,
    /// Allocations can be exported as file descriptors.
    pub posix_fd: bool,
    /// Allocations can be exported as fabric handles.
    pub fabric: bool,
    /// A NIC can reach allocations made for it.
    pub gpu_direct_rdma: bool,
    /// Ranges can be exported as dma-buf.
    pub dma_buf: bool,
    /// Host memory that this process may only read can be registered, for the device to read.
    pub read_only_register: bool,
}

/// One GPU of this process. Cheap to clone.
#[derive(Clone)]
pub struct Device {
    pub(crate) ops: Arc<dyn Ops>,
    pub(crate) ordinal: Ordinal,
    identity: Arc<Identity>,
}

#[derive(Debug)]
struct Identity {
    name: String,
    uuid: String,
    pci: String,
    numa_node: Option<u32>,
    total: u64,
    capability: (u32, u32),
    features: Features,
}

impl Device {
    /// Every GPU that this process may see, in the driver's order.
    ///
    /// # Errors
    /// [`Kind::Unavailable`], with the remedy: no libcuda, a driver older than [`OLDEST_DRIVER`], no GPU.
    pub fn all() -> Result<Vec<Self>> {
        Self::all_of(&(Arc::new(Real::open()?) as Arc<dyn Ops>))
    }

    /// The GPU that `selector` names: `GPU-…` (its UUID, or the beginning of one that fits no other GPU), a PCI
    /// address (`0000:1b:00.0`, in upper or lower case, with or without its domain) or `cuda:N` (the N-th that
    /// this process sees).
    ///
    /// # Errors
    /// [`Kind::Unavailable`] when there is none or it is a MIG instance, [`Kind::Invalid`] when the text is no
    /// selector or fits several.
    pub fn find(selector: &str) -> Result<Self> {
        find_in(Self::all()?, selector)
    }

    pub(crate) fn all_of(ops: &Arc<dyn Ops>) -> Result<Vec<Self>> {
        ops.init()?;
        driver_version(&**ops)?;
        let count = match ops.device_count() {
            Err(e) if e.code == code::NO_DEVICE => 0,
            count => count?,
        };
        (0..count).map(|number| Self::read(ops, ops.device_get(number)?)).collect()
    }

    fn read(ops: &Arc<dyn Ops>, ordinal: Ordinal) -> Result<Self> {
        let can = |attribute| -> Result<bool> {
            match ops.device_attribute(ordinal, attribute) {
                // A driver that does not know the attribute does not have what it tells about.
                Err(e) if e.code == code::INVALID_VALUE => Ok(false),
                value => Ok(value? != 0),
            }
        };
        let number = |attribute| -> Result<u32> {
            Ok(ops.device_attribute(ordinal, attribute).map(i32::unsigned_abs)?)
        };
        let pci = ops.device_pci(ordinal)?;
        let identity = Identity {
            name: ops.device_name(ordinal)?,
            uuid: uuid_text(ops.device_uuid(ordinal)?),
            numa_node: numa_node(&pci),
            pci,
            total: ops.device_total_mem(ordinal)?,
            capability: (
                number(attribute::COMPUTE_CAPABILITY_MAJOR)?,
                number(attribute::COMPUTE_CAPABILITY_MINOR)?,
            ),
            features: Features {
                vmm: can(attribute::VIRTUAL_MEMORY_MANAGEMENT)?,
                posix_fd: can(attribute::POSIX_FD)?,
                fabric: can(attribute::FABRIC)?,
                gpu_direct_rdma: can(attribute::GPU_DIRECT_RDMA_WITH_VMM)?,
                dma_buf: can(attribute::DMA_BUF)?,
                read_only_register: can(attribute::READ_ONLY_HOST_REGISTER)?,
            },
        };
        Ok(Self { ops: Arc::clone(ops), ordinal, identity: Arc::new(identity) })
    }

    /// For whom what a NIC writes to this GPU's memory is ordered: 0 nobody, 100 this GPU, 200 every one.
    pub(crate) fn nic_writes_ordered(&self) -> Result<i32> {
        Ok(self.ops.device_attribute(self.ordinal, attribute::NIC_WRITES_ORDERING)?)
    }

    /// As the driver names the product.
    pub fn name(&self) -> &str {
        &self.identity.name
    }

    /// `GPU-…`, as NVML prints it.
    pub fn uuid(&self) -> &str {
        &self.identity.uuid
    }

    /// `0000:1b:00.0`, lower case.
    pub fn pci_address(&self) -> &str {
        &self.identity.pci
    }

    /// The host NUMA node of the PCI slot; `None` where the host has one node or does not say.
    pub fn numa_node(&self) -> Option<u32> {
        self.identity.numa_node
    }

    /// Bytes of memory on the board.
    pub fn total_memory(&self) -> u64 {
        self.identity.total
    }

    /// Major and minor number.
    pub fn compute_capability(&self) -> (u32, u32) {
        self.identity.capability
    }

    /// What the driver claims it can do.
    pub fn features(&self) -> Features {
        self.identity.features
    }

    /// Whether it is a slice of a GPU (MIG), which is not supported.
    pub fn is_mig(&self) -> bool {
        // The driver adds the profile to the product's name: `NVIDIA H200 MIG 1g.18gb`.
        self.identity.name.contains(" MIG ")
    }

    /// Fails for a MIG instance, with the reason.
    pub fn refuse_mig(&self) -> Result<()> {
        if self.is_mig() { Err(mig(self.name())) } else { Ok(()) }
    }

    /// Whether this GPU can map memory of `other`, over NVLink or PCIe.
    pub fn can_map(&self, other: &Self) -> Result<bool> {
        if self.uuid() == other.uuid() {
            return Ok(true);
        }
        Ok(self.ops.device_can_access_peer(self.ordinal, other.ordinal)?)
    }

    /// The driver's version as it numbers itself: 13000 for CUDA 13.0.
    pub fn driver_version(&self) -> Result<u32> {
        driver_version(&*self.ops)
    }

    /// The version of a driver that may be too old.
    pub(crate) fn version_of(ops: &dyn Ops) -> Result<u32> {
        driver_version(ops)
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device").field("uuid", &self.uuid()).field("pci", &self.pci_address()).finish()
    }
}

/// The driver's version, refused when it is too old.
fn driver_version(ops: &dyn Ops) -> Result<u32> {
    let found = ops.driver_version()?;
    if found >= OLDEST_DRIVER {
        return Ok(found);
    }
    let (major, minor) = (found / 1000, found % 1000 / 10);
    Err(Error::new(
        Kind::Unavailable,
        "cuDriverGetVersion",
        format!("the driver speaks CUDA {major}.{minor}, 12.2 is needed"),
    )
    .with_remedy("install an NVIDIA driver of release 535 or later"))
}

/// The refusal of a MIG instance.
pub(crate) fn mig(name: &str) -> Error {
    Error::new(Kind::Unavailable, "device", format!("{name} is a MIG instance"))
        .with_remedy("give this process a whole GPU (nvidia-smi -mig 0): a MIG instance has no peer access and its handles cannot be mapped by another")
}

/// What a person wrote to name a GPU.
#[derive(Debug, PartialEq, Eq)]
enum Selector {
    /// The number among those this process sees.
    Number(usize),
    /// The beginning of its UUID, in lower case.
    Uuid(String),
    Pci(PciAddress),
}

impl Selector {
    fn parse(text: &str) -> Option<Self> {
        let text = text.to_ascii_lowercase();
        if let Some(number) = text.strip_prefix("cuda:") {
            return number.parse().ok().map(Self::Number);
        }
        if text.starts_with("gpu-") {
            return Some(Self::Uuid(text));
        }
        PciAddress::parse(&text).map(Self::Pci)
    }

    fn fits(&self, number: usize, device: &Device) -> bool {
        match self {
            Self::Number(wanted) => number == *wanted,
            Self::Uuid(wanted) => device.uuid().to_ascii_lowercase().starts_with(wanted),
            Self::Pci(wanted) => PciAddress::parse(device.pci_address()).as_ref() == Some(wanted),
        }
    }
}

fn find_in(devices: Vec<Device>, selector: &str) -> Result<Device> {
    let invalid = |detail: String| {
        Error::new(Kind::Invalid, "device", detail).with_remedy(
            "name a GPU by its UUID (GPU-…), its PCI address or cuda:N; nvidia-smi -L lists them",
        )
    };
    if selector.to_ascii_lowercase().starts_with("mig-") {
        return Err(mig(selector));
    }
    let wanted = Selector::parse(selector).ok_or_else(|| invalid(format!("`{selector}` names no GPU")))?;
    let seen = match devices.len() {
        0 => "no GPU".to_owned(),
        1 => "1 GPU".to_owned(),
        n => format!("{n} GPUs"),
    };
    let mut found = devices.into_iter().enumerate().filter(|(n, d)| wanted.fits(*n, d)).map(|(_, d)| d);
    match (found.next(), found.next()) {
        (Some(device), None) => device.refuse_mig().map(|()| device),
        (Some(_), Some(_)) => Err(invalid(format!("`{selector}` fits several GPUs"))),
        (None, _) => Err(Error::new(
            Kind::Unavailable,
            "device",
            format!("this process sees {seen}, and `{selector}` names none of them"),
        )
        .with_remedy("see nvidia-smi -L, CUDA_VISIBLE_DEVICES and the devices of the container")),
    }
}

#[derive(Debug, PartialEq, Eq)]
struct PciAddress {
    domain: u32,
    bus: u32,
    device: u32,
    function: u32,
}

impl PciAddress {
    /// NVML writes eight digits of domain, the driver four, people often none.
    fn parse(text: &str) -> Option<Self> {
        let hex = |text: &str| (text.len() <= 8).then(|| u32::from_str_radix(text, 16).ok()).flatten();
        let (front, function) = text.rsplit_once('.')?;
        let mut parts = front.rsplit(':');
        let device = hex(parts.next()?)?;
        let bus = hex(parts.next()?)?;
        let domain = parts.next().map_or(Some(0), hex)?;
        parts.next().is_none().then_some(Self { domain, bus, device, function: hex(function)? })
    }
}

/// The node of a PCI slot; the kernel writes -1 where it has no idea.
fn numa_node(pci: &str) -> Option<u32> {
    fs::read_to_string(format!("/sys/bus/pci/devices/{pci}/numa_node")).ok()?.trim().parse().ok()
}

fn uuid_text(bytes: [u8; 16]) -> String {
    let mut text = String::from("GPU-");
    for (at, byte) in bytes.iter().enumerate() {
        if matches!(at, 4 | 6 | 8 | 10) {
            text.push('-');
        }
        text.push_str(&format!("{byte:02x}"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::{Fake, FakeDevice};

    fn devices() -> Vec<Device> {
        let fake = Fake::with_devices(vec![
            FakeDevice { pci: "0000:1b:00.0".into(), uuid: [0x11; 16], ..FakeDevice::default() },
            FakeDevice { pci: "0001:1b:00.0".into(), uuid: [0x12; 16], ..FakeDevice::default() },
            FakeDevice {
                pci: "0000:2a:00.0".into(),
                uuid: [0x33; 16],
                name: "NVIDIA H200 MIG 1g.18gb".into(),
                ..FakeDevice::default()
            },
        ]);
        Device::all_of(&fake.ops()).unwrap()
    }

    fn found(selector: &str) -> Result<String> {
        find_in(devices(), selector).map(|device| device.pci_address().to_owned())
    }

    #[test]
    fn a_gpu_is_found_by_uuid_by_pci_address_and_by_number() {
        assert_eq!(found("GPU-11111111-1111-1111-1111-111111111111").unwrap(), "0000:1b:00.0");
        assert_eq!(found("gpu-12").unwrap(), "0001:1b:00.0");
        assert_eq!(found("00000001:1B:00.0").unwrap(), "0001:1b:00.0");
        assert_eq!(found("1b:00.0").unwrap(), "0000:1b:00.0");
        assert_eq!(found("cuda:1").unwrap(), "0001:1b:00.0");
        assert_eq!(found("GPU-1").unwrap_err().kind(), Kind::Invalid);
        assert_eq!(found("cuda:x").unwrap_err().kind(), Kind::Invalid);
        assert_eq!(found("first").unwrap_err().kind(), Kind::Invalid);
        assert_eq!(found("cuda:9").unwrap_err().kind(), Kind::Unavailable);
        let one = find_in(devices().into_iter().take(1).collect(), "cuda:9").unwrap_err();
        assert_eq!(one.detail(), "this process sees 1 GPU, and `cuda:9` names none of them");
        assert_eq!(found("0000:1c:00.0").unwrap_err().kind(), Kind::Unavailable);
    }

    #[test]
    fn a_mig_instance_is_refused_with_the_reason() {
        for selector in ["cuda:2", "GPU-33", "MIG-0a1b", "mig-0a1b"] {
            let refused = found(selector).unwrap_err();
            assert_eq!(refused.kind(), Kind::Unavailable);
            assert!(refused.to_string().contains("MIG instance"), "{refused}");
        }
    }

    #[test]
    fn an_old_driver_is_refused_with_its_remedy() {
        let fake = Fake::new();
        fake.set_driver_version(11_080);
        let refused = Device::all_of(&fake.ops()).unwrap_err();
        assert_eq!(refused.kind(), Kind::Unavailable);
        assert!(refused.to_string().contains("CUDA 11.8"), "{refused}");
        assert!(refused.remedy().is_some_and(|remedy| remedy.contains("535")));
    }
}
