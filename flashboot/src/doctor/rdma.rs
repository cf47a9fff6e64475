//! What `rdma` found: each device that an endpoint would use, and by which way a NIC reaches each GPU's memory.
//!
//! Nothing where no device can be used: the transport's own line says why.

use super::{Check, Numbered, left};
use crate::network::Network;
use flashboot_backend_rdma::RdmaTransport;
use flashboot_cuda::bounded;
use std::{path::Path, time::Instant};

/// Where the kernel shows that nvidia-peermem is loaded.
const PEERMEM: &str = "/sys/module/nvidia_peermem";

/// Opens the devices.
pub(super) async fn checks(network: &Network, gpus: &[Numbered], until: Instant) -> Vec<Check> {
    let transport = RdmaTransport::new(network.rdma(None, None));
    let found = bounded("probe", "the driver", left(until), move || transport.devices()).await;
    let Ok(rails) = found else { return Vec::new() };
    let gpus = gpus.iter().map(|(_, gpu)| (gpu.uuid().to_owned(), gpu.features().dma_buf)).collect();
    findings(rails, gpus, Path::new(PEERMEM).exists())
}

/// `rails` as people read them; of each GPU whether its driver exports dma-buf.
fn findings(rails: Vec<String>, gpus: Vec<(String, bool)>, peermem: bool) -> Vec<Check> {
    if rails.is_empty() {
        return Vec::new();
    }
    let rails = rails.into_iter().map(|found| Check {
        name: "rdma device",
        device: None,
        needed: "an active port with a GID; a routable RoCE v2 one on Ethernet",
        found,
        ok: true,
        remedy: None,
    });
    let gpus = gpus.into_iter().map(|(uuid, dma_buf)| {
        let ways = match (dma_buf, peermem) {
            (true, true) => "dma-buf, then nvidia-peermem",
            (true, false) => "dma-buf; nvidia-peermem is not loaded",
            (false, true) => "nvidia-peermem; the driver exports no dma-buf",
            (false, false) => "neither: the driver exports no dma-buf, and nvidia-peermem is not loaded",
        };
        let ok = dma_buf || peermem;
        let remedy = "use NVIDIA's open kernel modules on Linux 5.12 or later, or load nvidia-peermem";
        Check {
            name: "rdma of GPU memory",
            device: Some(uuid),
            needed: "dma-buf or nvidia-peermem, so that a NIC reaches it",
            found: ways.to_owned(),
            ok,
            remedy: (!ok).then(|| remedy.to_owned()),
        }
    });
    rails.chain(gpus).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_shown_and_a_gpu_out_of_its_reach_is_told_what_helps() {
        let rail = "rxe0 port 1 (ACTIVE, MTU 4096)".to_owned();
        let found = findings(vec![rail.clone()], vec![("a".into(), true), ("b".into(), false)], false);
        let seen: Vec<_> = found.iter().map(|c| (c.device.as_deref(), c.ok, c.remedy.is_some())).collect();
        assert_eq!(seen, [(None, true, false), (Some("a"), true, false), (Some("b"), false, true)]);
        assert_eq!(found.first().map(|check| &check.found), Some(&rail));
        assert!(findings(Vec::new(), vec![("a".into(), true)], true).is_empty());
        assert!(findings(vec![rail], vec![("b".into(), false)], true).iter().all(|check| check.ok));
    }
}
