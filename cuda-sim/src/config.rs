//! How the stand-in is told what to be: environment variables, read at `cuInit`.

use crate::{abi::code, loud};
use std::{env, path::PathBuf, str::FromStr};

/// Variables all begin with this.
const PREFIX: &str = "FLASHBOOT_CUDA_SIM_";

/// What this process simulates.
#[derive(Debug, Clone)]
pub(crate) struct Config {
    /// State that processes of one simulated host share (`DIR`).
    pub(crate) dir: PathBuf,
    /// Devices of the host (`DEVICES`).
    pub(crate) devices: usize,
    /// Bytes of each (`MEM`).
    pub(crate) memory: usize,
    /// Whether devices reach each other (`P2P=none`: not).
    pub(crate) p2p: bool,
    /// Seeds when work completes, and in which order across streams (`SEED`).
    pub(crate) seed: u64,
    /// Longest delay before a piece of work, in microseconds (`LATE_US`).
    pub(crate) late_us: u64,
    /// The answer of `cuDriverGetVersion` (`DRIVER_VERSION`).
    pub(crate) driver_version: i32,
    /// Modules cannot be loaded (`NO_KERNEL`).
    pub(crate) no_kernel: bool,
    /// Memory that the program may only read cannot be registered (`NO_READ_ONLY_REGISTER`).
    pub(crate) no_read_only_register: bool,
    /// Devices are MIG instances (`MIG`).
    pub(crate) mig: bool,
    /// `FAULTS`.
    pub(crate) faults: Vec<Fault>,
}

/// Something that goes wrong on demand.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Fault {
    /// `call:nth:code`: the nth call of a function in this process (from 1; `*` is every call) gives the code.
    Call { function: String, nth: Option<u64>, code: u32 },
    /// `poison[:device=D]:after=N[:code]`: after N calls this process's contexts, or that of the host's device D, are
    /// beyond use, with NVLINK_UNCORRECTABLE or the code.
    Poison { device: Option<usize>, after: u64, code: u32 },
    /// `die:device=D:after=N`: after N calls device D of the host is gone.
    Die { device: usize, after: u64 },
    /// `once:FAULT`: that fault, in the first process of the host that it can strike and in no other, also of a later run.
    Once(Box<Self>),
}

fn variable(name: &str) -> Option<String> {
    env::var(format!("{PREFIX}{name}")).ok().filter(|value| !value.is_empty())
}

fn number<T: FromStr>(name: &str, otherwise: T) -> T {
    variable(name).map_or(otherwise, |text| {
        text.parse().unwrap_or_else(|_| loud::stop(&format!("{PREFIX}{name}={text:?} is not a number")))
    })
}

/// Bytes: a number, or one with `KiB`, `MiB` or `GiB`.
fn bytes(name: &str, otherwise: usize) -> usize {
    let Some(text) = variable(name) else { return otherwise };
    let units = [("KiB", 10), ("MiB", 20), ("GiB", 30), ("", 0)];
    units
        .iter()
        .find_map(|(unit, shift)| Some(text.strip_suffix(unit)?.trim().parse::<usize>().ok()? << shift))
        .unwrap_or_else(|| loud::stop(&format!("{PREFIX}{name}={text:?} is not a size")))
}

impl Config {
    /// What the environment says.
    pub(crate) fn read() -> Self {
        let faults = variable("FAULTS").unwrap_or_default();
        Self {
            dir: variable("DIR").map_or_else(
                || {
                    let user = rustix::process::getuid().as_raw();
                    env::temp_dir().join(format!("flashboot-cuda-sim-{user}"))
                },
                PathBuf::from,
            ),
            devices: number("DEVICES", 2),
            memory: bytes("MEM", 4 << 30),
            p2p: variable("P2P").is_none_or(|value| value != "none"),
            seed: number("SEED", 0),
            late_us: number("LATE_US", 500),
            driver_version: number("DRIVER_VERSION", 13_000),
            no_kernel: variable("NO_KERNEL").is_some(),
            no_read_only_register: variable("NO_READ_ONLY_REGISTER").is_some(),
            mig: variable("MIG").is_some(),
            faults: faults.split(',').filter(|one| !one.is_empty()).map(Fault::parse).collect(),
        }
    }
}

impl Fault {
    fn parse(text: &str) -> Self {
        Self::read(text).unwrap_or_else(|| loud::stop(&format!("{PREFIX}FAULTS: {text:?} is no fault")))
    }

    fn read(text: &str) -> Option<Self> {
        if let Some(fault) = text.strip_prefix("once:") {
            return Some(Self::Once(Box::new(
                Self::read(fault).filter(|fault| !matches!(fault, Self::Once(_)))?,
            )));
        }
        let parts: Vec<&str> = text.split(':').collect();
        let after = |part: &str| part.strip_prefix("after=")?.parse().ok();
        let device = |part: &str| part.strip_prefix("device=")?.parse().ok();
        let poison = |name: &[&str]| match name {
            [] => Some(code::NVLINK_UNCORRECTABLE),
            [name] => code::parse(name),
            _ => None,
        };
        match *parts.as_slice() {
            ["poison", at, ref rest @ ..] if at.starts_with("device=") => {
                let [n, ref name @ ..] = *rest else { return None };
                Some(Self::Poison { device: Some(device(at)?), after: after(n)?, code: poison(name)? })
            }
            ["poison", n, ref name @ ..] => {
                Some(Self::Poison { device: None, after: after(n)?, code: poison(name)? })
            }
            ["die", at, n] => Some(Self::Die { device: device(at)?, after: after(n)? }),
            [function, nth, name] if function.starts_with("cu") => {
                let nth = if nth == "*" { None } else { Some(nth.parse().ok()?) };
                Some(Self::Call { function: function.to_owned(), nth, code: code::parse(name)? })
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_read_by_name_and_number() {
        let call = |nth, code| Fault::Call { function: "cuMemCreate".into(), nth, code };
        assert_eq!(Fault::parse("cuMemCreate:2:OUT_OF_MEMORY"), call(Some(2), 2));
        assert_eq!(Fault::parse("cuMemCreate:*:800"), call(None, 800));
        let poison = |device, after, code| Fault::Poison { device, after, code };
        assert_eq!(Fault::parse("poison:after=3"), poison(None, 3, 220));
        assert_eq!(Fault::parse("poison:after=0:CONTAINED"), poison(None, 0, 226));
        assert_eq!(Fault::parse("poison:device=1:after=3"), poison(Some(1), 3, 220));
        assert_eq!(Fault::parse("poison:device=1:after=3:214"), poison(Some(1), 3, 214));
        assert_eq!(Fault::read("poison:device=1"), None);
        assert_eq!(Fault::read("poison:after=1:CONTAINED:more"), None);
        assert_eq!(Fault::parse("die:device=1:after=0"), Fault::Die { device: 1, after: 0 });
        assert_eq!(Fault::read("cuMemCreate:x:1"), None);
        assert_eq!(Fault::read("nonsense"), None);
        assert_eq!(Fault::parse("once:poison:after=3"), Fault::Once(Box::new(poison(None, 3, 220))));
        assert_eq!(Fault::read("once:once:poison:after=3"), None);
    }
}
