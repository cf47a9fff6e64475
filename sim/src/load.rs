//! From disk and host memory into GPUs: what an agent's staging and a load's critical path take on all GPUs of a host at once.

use crate::{
    Error, Profile,
    fabric::{Fabric, FlowId},
};

/// One load on every GPU of a host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Load {
    /// Bytes of each GPU.
    pub bytes: u64,
    /// GPUs that load at once.
    pub gpus_per_host: u32,
    /// Whether the bytes are on disk, or staged in host memory already.
    pub disk: bool,
}

/// What it takes, one part after the other, in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct Loaded {
    /// Disk to host memory; 0 where the bytes are there.
    pub read_ms: f64,
    /// Registering host memory.
    pub pin_ms: f64,
    /// Host to device.
    pub h2d_ms: f64,
}

/// The slowest GPU's times.
///
/// # Errors
/// [`Error::Profile`] where the profile does not say how fast its memory (or disk) is; [`Error::Range`] for no GPU or more
/// than a host has.
pub fn load(profile: &Profile, load: &Load) -> Result<Loaded, Error> {
    let missing = |detail: &str| Error::Profile { name: profile.name.clone(), detail: detail.into() };
    let memory = profile.memory.ok_or_else(|| missing("it has no [memory], so nothing can be loaded"))?;
    if load.gpus_per_host == 0 || load.gpus_per_host > profile.shape.gpus_per_host {
        let given = load.gpus_per_host.to_string();
        let possible = "between 1 and the GPUs of a host";
        return Err(Error::Range { option: "--ranks", given, possible });
    }
    let mut fabric = Fabric::default();
    let sockets: Vec<_> = (0..memory.sockets).map(|_| fabric.link(memory.socket)).collect();
    let socket = |gpu: u32| {
        // GPUs 0 and 1 of four belong to socket 0, 2 and 3 to socket 1.
        let at = u64::from(gpu) * u64::from(memory.sockets) / u64::from(profile.shape.gpus_per_host);
        usize::try_from(at).ok().and_then(|at| sockets.get(at).copied())
    };
    let mut read_ms = 0.0;
    if load.disk {
        let disk =
            memory.disk.ok_or_else(|| missing("it does not say how fast its disks are (memory.disk)"))?;
        read_ms = load.bytes as f64 * f64::from(load.gpus_per_host) / disk * 1e3;
    }
    let mut phase = |limit: f64| {
        let flows: Vec<_> = (0..load.gpus_per_host)
            .map(|gpu| fabric.flow(socket(gpu).into_iter().collect(), limit))
            .collect();
        slowest(&mut fabric, &flows, load.bytes)
    };
    let pin_ms = phase(memory.pin.unwrap_or(f64::MAX));
    let h2d_ms = phase(memory.h2d);
    Ok(Loaded { read_ms, pin_ms, h2d_ms })
}

/// Milliseconds until every flow has carried `bytes`, all of them from the same moment.
fn slowest(fabric: &mut Fabric, flows: &[FlowId], bytes: u64) -> f64 {
    flows.iter().for_each(|flow| fabric.begin(*flow));
    let mut left: Vec<(FlowId, f64)> = flows.iter().map(|flow| (*flow, bytes as f64)).collect();
    let mut passed = 0.0;
    while !left.is_empty() {
        fabric.settle();
        let next = left.iter().map(|(flow, left)| left / fabric.rate(*flow)).fold(f64::INFINITY, f64::min);
        if !next.is_finite() {
            break;
        }
        passed += next;
        for (flow, left) in &mut left {
            *left -= next * fabric.rate(*flow);
        }
        for (flow, _) in left.extract_if(.., |(_, left)| *left <= 0.5) {
            fabric.end(flow);
        }
    }
    passed * 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_of_a_socket_share_its_memory() {
        let profile = Profile::built_in("gb300").unwrap();
        let took = |gpus| {
            load(&profile, &Load { bytes: 100_000_000_000, gpus_per_host: gpus, disk: false }).unwrap()
        };
        let near =
            |found: f64, expected: f64| assert!((found - expected).abs() < 0.01, "{found}, not {expected}");
        near(took(1).pin_ms, 200.0);
        near(took(4).pin_ms, 400.0);
        near(took(4).h2d_ms, 100e9 / 185e9 * 1e3);
        near(took(4).read_ms, 0.0);
    }

    #[test]
    fn what_the_profile_does_not_know_is_said() {
        let profile = Profile::built_in("gb300").unwrap();
        let from_disk = Load { bytes: 1, gpus_per_host: 1, disk: true };
        let Err(Error::Profile { detail, .. }) = load(&profile, &from_disk) else {
            panic!("a disk was invented")
        };
        assert!(detail.contains("memory.disk"), "{detail}");
        let many = Load { bytes: 1, gpus_per_host: 5, disk: false };
        assert!(matches!(load(&profile, &many), Err(Error::Range { option: "--ranks", .. })));
        let h200 = Profile::built_in("h200").unwrap();
        assert!(load(&h200, &Load { gpus_per_host: 1, ..many }).is_err());
    }
}
