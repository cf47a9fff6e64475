//! Settings of the `rdma` transport.

use super::{Advertised, Network};
use crate::config::duration;
use flashboot_backend_rdma::RdmaConfig;
use flashboot_core::ByteSize;
use serde::{Deserialize, Serialize};
use std::{
    net::{IpAddr, SocketAddr},
    time::Duration,
};

/// The `rdma` transport.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Rdma {
    /// The address at which a source answers its readers, once each; payload goes by the devices.
    pub bind: IpAddr,
    /// The port of that address; 0: the system's choice.
    pub control_port: u16,
    /// The name or address that readers dial; `None`: `bind`.
    pub advertise: Option<Advertised>,
    /// Devices by name, such as `mlx5_0`. Empty: those with an active port, the nearest to the memory first.
    pub devices: Vec<String>,
    /// The most devices that are used at once.
    pub max_rails: u32,
    /// The port of each device; `None`: the first that is active.
    pub port: Option<u8>,
    /// The index of the GID to send from; `None`: a routable RoCE v2 one first.
    pub gid_index: Option<u8>,
    /// The IP traffic class of every packet: DSCP · 4 + ECN.
    pub traffic_class: u8,
    /// The InfiniBand service level, or RoCE priority.
    pub service_level: u8,
    /// Bytes of the largest packet: 256, 512, 1024, 2048 or 4096; `None`: what both links can.
    pub mtu: Option<u32>,
    /// Bytes of one READ, a power of two.
    pub message: ByteSize,
    /// READs in flight on one device.
    pub outstanding: u8,
    /// How often a packet is sent again before its peer is given up: 0 to 6.
    pub retries: u8,
    /// How long to wait for an answer before that.
    #[serde(with = "duration")]
    pub ack_timeout: Duration,
}

impl Default for Rdma {
    /// Those of [`RdmaConfig::default`].
    fn default() -> Self {
        let config = RdmaConfig::default();
        Self {
            bind: config.listen.ip(),
            control_port: config.listen.port(),
            advertise: None,
            devices: config.devices,
            max_rails: u32::try_from(config.max_rails).unwrap_or(u32::MAX),
            port: config.port,
            gid_index: config.gid_index,
            traffic_class: config.traffic_class,
            service_level: config.service_level,
            mtu: config.mtu,
            message: config.message,
            outstanding: config.outstanding,
            retries: config.retries,
            ack_timeout: config.ack_timeout,
        }
    }
}

impl Network {
    /// As the backend wants it. `pci`: of the GPU whose memory is served; `numa_node`: of host memory.
    pub(crate) fn rdma(&self, pci: Option<String>, numa_node: Option<u32>) -> RdmaConfig {
        let own = self.rdma.clone();
        RdmaConfig {
            listen: SocketAddr::new(own.bind, own.control_port),
            advertise: own.advertise.map(|advertised| advertised.0),
            security: self.security(),
            devices: own.devices,
            max_rails: usize::try_from(own.max_rails).unwrap_or(usize::MAX),
            port: own.port,
            gid_index: own.gid_index,
            traffic_class: own.traffic_class,
            service_level: own.service_level,
            mtu: own.mtu,
            message: own.message,
            outstanding: own.outstanding,
            retries: own.retries,
            ack_timeout: own.ack_timeout,
            numa_node,
            near_pci: pci,
            ..RdmaConfig::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_configured_reaches_the_backend() {
        let text = r#"{"rdma":{"bind":"::1","control_port":7500,"devices":["mlx5_1"],"gid_index":3,"traffic_class":106,
            "mtu":4096,"message":"4MiB","retries":5,"ack_timeout":"100ms"}}"#;
        let network: Network = serde_json::from_str(text).unwrap();
        let again: Network = serde_json::from_str(&serde_json::to_string(&network).unwrap()).unwrap();
        assert_eq!(again, network);
        let rdma = network.rdma(Some("0000:1b:00.0".into()), Some(1));
        assert_eq!((rdma.listen.to_string(), rdma.devices), ("[::1]:7500".into(), vec!["mlx5_1".to_owned()]));
        assert_eq!((rdma.gid_index, rdma.traffic_class, rdma.mtu), (Some(3), 106, Some(4096)));
        assert_eq!((rdma.message, rdma.retries), (ByteSize::mib(4), 5));
        assert_eq!((rdma.near_pci.as_deref(), rdma.numa_node), (Some("0000:1b:00.0"), Some(1)));
        assert!(serde_json::from_str::<Network>(r#"{"rdma":{"gid":1}}"#).is_err());
    }
}
