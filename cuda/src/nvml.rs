//! What NVML says of a GPU: whether it is cut into MIG instances, and its place and health in its NVLink fabric.
//!
//! Opened at run time, by the probe and before a replication only; no byte rests on it. A fabric that says it is
//! complete may refuse handles all the same, so the probe tries; one that says it is degraded is believed.

mod health;
mod library;
mod processes;

pub use processes::{GpuProcess, processes};

use crate::Device;
use flashboot_core::{Error, Kind, Result};
pub(crate) use health::Health;
use library::Library;
use std::fmt;

/// `nvmlReturn_t` values that are decided on.
mod code {
    pub(super) const FUNCTION_NOT_FOUND: u32 = 13;
}

/// An NVML call that did not return `NVML_SUCCESS`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Failed {
    call: &'static str,
    code: u32,
}

impl From<Failed> for Error {
    fn from(Failed { call, code }: Failed) -> Self {
        let detail = match code {
            code::FUNCTION_NOT_FOUND => "this machine's NVML does not have it".to_owned(),
            code => format!("nvmlReturn_t {code}"),
        };
        Self::new(Kind::Unavailable, call, detail)
    }
}

type Call<T> = std::result::Result<T, Failed>;

/// `nvmlDevice_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Handle(usize);

/// What a GPU's registration with its fabric reads as. The numbers of `nvmlGpuFabricInfo_v3_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct FabricInfo {
    cluster: [u8; 16],
    status: u32,
    clique: u32,
    state: u8,
    /// 0 where this NVML does not tell.
    health_mask: u32,
    /// 0 where this NVML does not tell.
    health_summary: u8,
}

/// The calls in use, one method each: the seam at which what they mean is tested.
trait Nvml {
    fn by_uuid(&self, uuid: &str) -> Call<Handle>;
    fn by_pci(&self, pci: &str) -> Call<Handle>;
    fn is_mig_instance(&self, device: Handle) -> Call<bool>;
    fn is_mig_enabled(&self, device: Handle) -> Call<bool>;
    /// With its health, where the library has it; else without.
    fn fabric(&self, device: Handle) -> Call<FabricInfo>;
}

/// A GPU's registration with its fabric.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Fabric {
    info: FabricInfo,
}

impl Fabric {
    const COMPLETED: u8 = 3;

    #[cfg(test)]
    pub(crate) fn completed(health_mask: u32) -> Self {
        let info = FabricInfo {
            state: Self::COMPLETED,
            clique: 1,
            cluster: [1; 16],
            health_mask,
            ..FabricInfo::default()
        };
        Self { info }
    }

    pub(crate) fn is_complete(self) -> bool {
        self.info.state == Self::COMPLETED && self.info.status == 0
    }

    pub(crate) fn health(self) -> Health {
        Health::read(self.info.health_mask, self.info.health_summary)
    }
}

impl fmt::Display for Fabric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let FabricInfo { state, status, clique, cluster, .. } = self.info;
        match state {
            0 => return f.write_str("not supported"),
            1 => return f.write_str("registration not started"),
            2 => return f.write_str("registration in progress"),
            Self::COMPLETED if status == 0 => f.write_str("completed, ")?,
            Self::COMPLETED => write!(f, "completed with NVML status {status}, ")?,
            other => write!(f, "state {other}, ")?,
        }
        write!(f, "clique {clique} of cluster ")?;
        cluster.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// What NVML says of one GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Seen {
    /// Why it counts as MIG, where it does.
    pub(crate) mig: Option<&'static str>,
    pub(crate) fabric: Result<Fabric>,
}

/// Asks about `device`. Blocks for some 10 ms.
///
/// # Errors
/// [`Kind::Unavailable`] without NVML, or where it does not know the GPU.
pub(crate) fn inspect(device: &Device) -> Result<Seen> {
    let library = Library::open()?;
    Ok(seen(&library, device.uuid(), device.pci_address())?)
}

/// Fails for a GPU that NVML says is, or is cut into, MIG instances. Where there is no NVML nothing is known, and the
/// driver's own name for the product has to do ([`Device::refuse_mig`]). Blocks for some 10 ms.
///
/// # Errors
/// [`Kind::Unavailable`], with the reason.
pub fn refuse_mig(device: &Device) -> Result<()> {
    device.refuse_mig()?;
    match inspect(device) {
        Ok(Seen { mig: Some(why), .. }) => Err(crate::device::mig(&format!("{}: {why}: it", device.name()))),
        Ok(_) => Ok(()),
        Err(error) => {
            tracing::debug!(%error, "NVML says nothing of MIG");
            Ok(())
        }
    }
}

fn seen(nvml: &dyn Nvml, uuid: &str, pci: &str) -> Call<Seen> {
    // The driver gives an instance a UUID of its own, which NVML writes as `MIG-…` and not as `GPU-…`.
    let instance = || {
        let handle = nvml.by_uuid(&format!("MIG-{}", uuid.strip_prefix("GPU-")?)).ok()?;
        nvml.is_mig_instance(handle).unwrap_or(true).then_some("the driver's UUID is that of a MIG instance")
    };
    let whole = nvml.by_uuid(uuid);
    let mut mig = if whole.is_err() { instance() } else { None };
    let device = match (whole, nvml.by_pci(pci)) {
        (Ok(device), _) | (Err(_), Ok(device)) => device,
        (Err(error), Err(_)) if mig.is_none() => return Err(error),
        (Err(error), Err(_)) => return Ok(Seen { mig, fabric: Err(error.into()) }),
    };
    // A GPU that has no MIG says that it is not supported.
    if mig.is_none() && nvml.is_mig_enabled(device).unwrap_or(false) {
        mig = Some("its MIG mode is on");
    }
    let fabric = nvml.fabric(device).map(|info| Fabric { info }).map_err(Error::from);
    Ok(Seen { mig, fabric })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine's NVML, by what it knows.
    #[derive(Default)]
    struct Machine {
        uuids: Vec<&'static str>,
        pci: Option<&'static str>,
        mig: Option<bool>,
        fabric: Option<FabricInfo>,
    }

    const NOT_SUPPORTED: u32 = 3;
    const UNKNOWN: u32 = 6;

    impl Nvml for Machine {
        fn by_uuid(&self, uuid: &str) -> Call<Handle> {
            let at = self.uuids.iter().position(|known| *known == uuid);
            at.map(Handle).ok_or(Failed { call: "nvmlDeviceGetHandleByUUID", code: UNKNOWN })
        }
        fn by_pci(&self, pci: &str) -> Call<Handle> {
            let known = self.pci.is_some_and(|known| known == pci);
            known
                .then_some(Handle(9))
                .ok_or(Failed { call: "nvmlDeviceGetHandleByPciBusId_v2", code: UNKNOWN })
        }
        fn is_mig_instance(&self, device: Handle) -> Call<bool> {
            Ok(self.uuids.get(device.0).is_some_and(|uuid| uuid.starts_with("MIG-")))
        }
        fn is_mig_enabled(&self, _: Handle) -> Call<bool> {
            self.mig.ok_or(Failed { call: "nvmlDeviceGetMigMode", code: NOT_SUPPORTED })
        }
        fn fabric(&self, _: Handle) -> Call<FabricInfo> {
            self.fabric.ok_or(Failed { call: "nvmlDeviceGetGpuFabricInfo", code: code::FUNCTION_NOT_FOUND })
        }
    }

    fn of(machine: &Machine) -> Call<Seen> {
        seen(machine, "GPU-0a", "0000:1b:00.0")
    }

    #[test]
    fn a_whole_gpu_is_none_of_mig_whether_or_not_it_could_be() {
        for mig in [None, Some(false)] {
            let seen = of(&Machine { uuids: vec!["GPU-0a"], mig, ..Machine::default() }).unwrap();
            assert_eq!(seen.mig, None);
            assert!(seen.fabric.unwrap_err().to_string().contains("does not have it"));
        }
    }

    #[test]
    fn mig_is_found_by_the_mode_of_the_gpu_and_by_the_uuid_of_the_instance() {
        let seen = of(&Machine { uuids: vec!["GPU-0a"], mig: Some(true), ..Machine::default() }).unwrap();
        assert_eq!(seen.mig, Some("its MIG mode is on"));
        // The parent's UUID is another: it is found by its slot.
        let parent = Machine { uuids: vec!["GPU-0b"], pci: Some("0000:1b:00.0"), ..Machine::default() };
        assert_eq!(of(&parent).unwrap().mig, None);
        assert_eq!(of(&Machine { mig: Some(true), ..parent }).unwrap().mig, Some("its MIG mode is on"));
        let instance = of(&Machine { uuids: vec!["GPU-0b", "MIG-0a"], ..Machine::default() }).unwrap();
        assert_eq!(instance.mig, Some("the driver's UUID is that of a MIG instance"));
    }

    #[test]
    fn a_gpu_that_nvml_does_not_know_is_an_error_of_the_call() {
        let error = of(&Machine::default()).unwrap_err();
        assert_eq!(error, Failed { call: "nvmlDeviceGetHandleByUUID", code: UNKNOWN });
        assert_eq!(Error::from(error).to_string(), "nvmlDeviceGetHandleByUUID: nvmlReturn_t 6");
    }

    #[test]
    fn a_fabric_is_complete_only_with_success() {
        let fabric = |state, status| {
            let info = FabricInfo { state, status, clique: 7, cluster: [0xab; 16], ..FabricInfo::default() };
            let machine = Machine { uuids: vec!["GPU-0a"], fabric: Some(info), ..Machine::default() };
            of(&machine).unwrap().fabric.unwrap()
        };
        assert!(fabric(3, 0).is_complete());
        assert!(!fabric(3, 1).is_complete());
        assert!(!fabric(2, 0).is_complete());
        assert_eq!(fabric(0, 0).to_string(), "not supported");
        assert_eq!(fabric(3, 0).to_string(), format!("completed, clique 7 of cluster {}", "ab".repeat(16)));
        assert_eq!(fabric(3, 0).health(), Health::Unknown);
    }
}
