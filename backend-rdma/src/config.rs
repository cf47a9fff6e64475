//! How to open an endpoint.

use crate::verbs::mtu_code;
use flashboot_channel::{Host, Liveness, SecurityConfig};
use flashboot_core::{ByteSize, Error, Kind, Result};
use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    time::Duration,
};

/// Messages smaller than this leave a NIC idle between them.
const SMALLEST_MESSAGE: u64 = 4 << 10;
/// The timeout's unit, by the InfiniBand specification: 4.096 µs · 2^n.
const TIMEOUT_UNIT: Duration = Duration::from_nanos(4096);

/// How to open an `rdma` endpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RdmaConfig {
    /// Where the responder listens, for the one round trip in which a reader and its source exchange queue pairs. Port 0:
    /// the system chooses.
    pub listen: SocketAddr,
    /// What readers are to dial; `None`: the address listened at.
    pub advertise: Option<Host>,
    /// What protects that round trip. The payload itself is never encrypted.
    pub security: SecurityConfig,
    /// After how long a silent peer's control connection is taken for gone.
    pub liveness: Liveness,
    /// Devices by name, in order of preference. Empty: those with an active port, the nearest to the memory first.
    pub devices: Vec<String>,
    /// The most devices that one endpoint uses at once.
    pub max_rails: usize,
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
    /// Bytes of one READ. A power of two.
    pub message: ByteSize,
    /// READs in flight on one queue pair, at most 255 and what both devices allow.
    pub outstanding: u8,
    /// How often a packet is sent again before its peer is given up: 0 to 6. 7 would be for ever.
    pub retries: u8,
    /// How long to wait for an answer before that, rounded up to 4.096 µs · 2^n.
    pub ack_timeout: Duration,
    /// How long a cancelled pull may go on with what is posted before its queue pairs are ended.
    pub cancel_grace: Duration,
    /// How long a queue pair that was ended may take to give back what was posted on it; then it is destroyed.
    pub drain: Duration,
    /// How long the endpoint's thread polls before it sleeps until a NIC interrupts.
    pub spin: Duration,
    /// The longest pause between two looks at a word that is not there yet; the first is 20 µs, and each twice the one before.
    pub longest_pause: Duration,
    /// Queue pairs kept ready for the next reader, for each device.
    pub spares: usize,
    /// How long a reader may take to say what it wants.
    pub handshake: Duration,
    /// Readers that may be in their handshake at once.
    pub max_pending: usize,
    /// Readers that may be attached at once; more are refused.
    pub max_readers: usize,
    /// Threads that hash what has landed in host memory; `None`: one a core.
    pub hash_threads: Option<usize>,
    /// The NUMA node whose devices are preferred; `None`: no preference.
    pub numa_node: Option<u32>,
    /// The GPU whose arenas are to be served, by PCI address: devices near it are preferred.
    pub near_pci: Option<String>,
}

impl Default for RdmaConfig {
    /// On loopback only; one device; READs of 1 MiB, 16 in flight; a dead peer is given up after some 0.5 s.
    fn default() -> Self {
        Self {
            listen: SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0),
            advertise: None,
            security: SecurityConfig::default(),
            liveness: Liveness::default(),
            devices: Vec::new(),
            max_rails: 4,
            port: None,
            gid_index: None,
            traffic_class: 0,
            service_level: 0,
            mtu: None,
            message: ByteSize(1 << 20),
            outstanding: 16,
            retries: 6,
            ack_timeout: Duration::from_millis(67),
            cancel_grace: Duration::from_millis(500),
            drain: Duration::from_secs(3),
            spin: Duration::from_micros(50),
            longest_pause: Duration::from_micros(500),
            spares: 2,
            handshake: Duration::from_secs(5),
            max_pending: 64,
            max_readers: 1024,
            hash_threads: None,
            numa_node: None,
            near_pci: None,
        }
    }
}

impl RdmaConfig {
    /// Refuses what no device can do.
    pub(crate) fn check(&self) -> Result<()> {
        let invalid =
            |detail: String, remedy: &str| Err(Error::new(Kind::Invalid, "rdma", detail).with_remedy(remedy));
        let message = self.message.0;
        if !message.is_power_of_two() || !(SMALLEST_MESSAGE..=1 << 30).contains(&message) {
            return invalid(
                format!("a message of {message} bytes is not a power of two from 4KiB to 1GiB"),
                "set rdma.message to 1MiB or leave it out",
            );
        }
        if self.retries > 6 {
            return invalid(
                format!("{} retries mean for ever: a dead peer would never be noticed", self.retries),
                "set rdma.retries to 6 or less",
            );
        }
        if self.outstanding == 0 || self.max_rails == 0 {
            return invalid("no READ in flight, or no device, moves nothing".into(), "set them to 1 or more");
        }
        if self.service_level > 15 {
            return invalid(format!("{} is no service level", self.service_level), "use 0 to 15");
        }
        if let Some(mtu) = self.mtu
            && mtu_code(mtu).is_none()
        {
            return invalid(
                format!("{mtu} bytes is no MTU of InfiniBand"),
                "use 256, 512, 1024, 2048 or 4096, or leave rdma.mtu out",
            );
        }
        Ok(())
    }

    /// How long a device that works leaves a READ without an end at most: every try, each up to four times the timeout, as
    /// the specification allows, and a second.
    pub(crate) fn longest_answer(&self) -> Duration {
        let one = TIMEOUT_UNIT.saturating_mul(4 << self.timeout_exponent());
        one.saturating_mul(u32::from(self.retries) + 1).saturating_add(Duration::from_secs(1))
    }

    /// The exponent of [`ack_timeout`](Self::ack_timeout), 1 to 21: at most 9 s, never 0, which is for ever.
    pub(crate) fn timeout_exponent(&self) -> u8 {
        (1..=21).find(|n| TIMEOUT_UNIT.saturating_mul(1 << n) >= self.ack_timeout).unwrap_or(21)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_would_wait_for_ever_or_cannot_be_is_refused() {
        let with = |change: fn(&mut RdmaConfig)| {
            let mut config = RdmaConfig::default();
            change(&mut config);
            config.check().map_err(|e| e.to_string())
        };
        assert_eq!(with(|_| {}), Ok(()));
        assert!(with(|c| c.retries = 7).unwrap_err().contains("for ever"));
        assert!(with(|c| c.message = ByteSize(3 << 20)).unwrap_err().contains("power of two"));
        assert!(with(|c| c.mtu = Some(1500)).unwrap_err().contains("1500"));
        assert!(with(|c| c.outstanding = 0).is_err());
        assert!(with(|c| c.service_level = 16).is_err());
    }

    #[test]
    fn a_timeout_is_rounded_up_and_never_for_ever() {
        let of = |timeout| RdmaConfig { ack_timeout: timeout, ..RdmaConfig::default() }.timeout_exponent();
        assert_eq!(RdmaConfig::default().timeout_exponent(), 14);
        assert_eq!(of(Duration::ZERO), 1);
        assert_eq!(of(Duration::from_millis(68)), 15);
        assert_eq!(of(Duration::MAX), 21);
    }
}
