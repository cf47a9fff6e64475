//! Settings of what crosses between hosts: the `tcp` and `rdma` transports, and what protects their channels.

mod etcd;
mod rdma;

use crate::config::{NotASetting, duration};
pub use etcd::Etcd;
use flashboot_backend_tcp::TcpConfig;
use flashboot_channel::{Host, SecurityConfig, TlsPolicy};
use flashboot_core::ByteSize;
pub use rdma::Rdma;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::{fmt, net::IpAddr, ops::RangeInclusive, path::PathBuf, str::FromStr, time::Duration};

/// Everything about the network, as one part of a job.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Network {
    /// The `tcp` transport.
    pub tcp: Tcp,
    /// The `rdma` transport.
    pub rdma: Rdma,
    /// What protects channels.
    pub security: Security,
    /// The etcd that says where the replication service is.
    pub etcd: Etcd,
}

/// The `tcp` transport.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Tcp {
    /// The address to listen at.
    pub bind: IpAddr,
    /// The ports to try: `0` (the system's choice), `7400` or `7400-7431`.
    pub ports: Ports,
    /// The name or address that readers dial; `None`: `bind`.
    pub advertise: Option<Advertised>,
    /// Connections over which a reader stripes what it reads.
    pub connections: u32,
    /// The most bytes a second that one exporter sends; `None`: no bound.
    pub rate: Option<ByteSize>,
    /// After how long a peer that is silent below TCP is taken for gone; at least 3 s.
    #[serde(with = "duration")]
    pub liveness: Duration,
    /// How long an answer under way may stand still.
    #[serde(with = "duration")]
    pub silence: Duration,
}

impl Default for Tcp {
    /// Those of [`TcpConfig::default`].
    fn default() -> Self {
        let config = TcpConfig::default();
        Self {
            bind: config.bind,
            ports: Ports(config.ports),
            advertise: None,
            connections: u32::try_from(config.connections).unwrap_or(u32::MAX),
            rate: config.rate,
            liveness: config.liveness,
            silence: config.silence,
        }
    }
}

/// What protects channels between hosts.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Security {
    /// Whether channels are encrypted: `auto` (off on loopback only), `on`, `off`.
    pub tls: TlsPolicy,
    /// A file, mode 0600, with the secret that both ends have.
    pub token_file: Option<PathBuf>,
    /// PEM file of authorities that sign the other end's certificate.
    pub ca: Option<PathBuf>,
    /// PEM file of our certificate.
    pub certificate: Option<PathBuf>,
    /// PEM file, mode 0600, of its key.
    pub key: Option<PathBuf>,
    /// Listen off loopback although readers prove nothing.
    pub allow_anonymous: bool,
}

impl Network {
    /// As the backend wants it; `device` for its probe.
    pub(crate) fn tcp(&self, device: Option<&str>) -> TcpConfig {
        let Tcp { bind, ports, advertise, connections, rate, liveness, silence } = self.tcp.clone();
        TcpConfig {
            bind,
            ports: ports.0,
            advertise: advertise.map(|advertised| advertised.0),
            connections: usize::try_from(connections).unwrap_or(usize::MAX),
            rate,
            liveness,
            silence,
            security: self.security(),
            device: device.map(str::to_owned),
            ..TcpConfig::default()
        }
    }

    /// What others dial, where it is not the address listened at.
    pub(crate) fn advertise(&self) -> Option<&Host> {
        self.tcp.advertise.as_ref().map(|advertised| &advertised.0)
    }

    /// As channels want it.
    pub(crate) fn security(&self) -> SecurityConfig {
        let Security { tls, token_file, ca, certificate, key, allow_anonymous } = self.security.clone();
        SecurityConfig { tls, token_file, ca, certificate, key, allow_anonymous }
    }
}

/// Ports to try in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ports(pub RangeInclusive<u16>);

impl FromStr for Ports {
    type Err = NotASetting;

    fn from_str(text: &str) -> Result<Self, NotASetting> {
        let no = || NotASetting::new(format!("`{text}` is no port: use 0, 7400 or 7400-7431"));
        let port = |text: &str| text.parse::<u16>().map_err(|_| no());
        let (first, last) = match text.split_once('-') {
            Some((first, last)) => (port(first)?, port(last)?),
            None => (port(text)?, port(text)?),
        };
        // A range with the system's choice in it means nothing.
        if first > last || first == 0 && last != 0 { Err(no()) } else { Ok(Self(first..=last)) }
    }
}

impl fmt::Display for Ports {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.0.start(), self.0.end()) {
            (first, last) if first == last => write!(f, "{first}"),
            (first, last) => write!(f, "{first}-{last}"),
        }
    }
}

/// What readers are told to dial.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Advertised(pub Host);

impl FromStr for Advertised {
    type Err = NotASetting;

    fn from_str(text: &str) -> Result<Self, NotASetting> {
        text.parse().map(Self).map_err(|e| NotASetting::new(format!("{e}")))
    }
}

impl fmt::Display for Advertised {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

macro_rules! as_text {
    ($($name:ty: $expecting:literal),*) => {$(
        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
                s.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
                crate::config::text_or_number(d, $expecting)?.parse().map_err(serde::de::Error::custom)
            }
        }
    )*};
}

as_text!(Ports: "a port, or a range such as 7400-7431", Advertised: "a host name or an address");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_one_or_a_range() {
        assert_eq!("0".parse(), Ok(Ports(0..=0)));
        assert_eq!("7400".parse(), Ok(Ports(7400..=7400)));
        assert_eq!("7400-7431".parse::<Ports>().unwrap().to_string(), "7400-7431");
        for bad in ["", "x", "-1", "65536", "9-8", "0-5", "1-2-3"] {
            assert!(bad.parse::<Ports>().is_err(), "{bad}");
        }
    }

    #[test]
    fn what_is_configured_reaches_the_backend() {
        let text = r#"{"tcp":{"bind":"::1","ports":"7400-7410","advertise":"node-1","connections":2,"rate":"1GiB",
            "liveness":"5s","silence":"3s"},"security":{"tls":"on","token_file":"/t","allow_anonymous":true}}"#;
        let network: Network = serde_json::from_str(text).unwrap();
        let again: Network = serde_json::from_str(&serde_json::to_string(&network).unwrap()).unwrap();
        assert_eq!(again, network);
        let tcp = network.tcp(Some("cuda:0"));
        assert_eq!((tcp.bind.to_string(), tcp.ports, tcp.connections), ("::1".into(), 7400..=7410, 2));
        assert_eq!(tcp.advertise.map(|host| host.to_string()), Some("node-1".into()));
        assert_eq!((tcp.rate, tcp.liveness), (Some(ByteSize(1 << 30)), Duration::from_secs(5)));
        assert_eq!((tcp.security.tls, tcp.security.allow_anonymous), (TlsPolicy::On, true));
        assert_eq!(Network::default().tcp(None), TcpConfig::default());
        assert!(serde_json::from_str::<Network>(r#"{"tcp":{"port":1}}"#).is_err());
    }
}
