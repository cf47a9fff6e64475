//! How to open an endpoint.

use flashboot_channel::{Host, Listen, Liveness, Purpose, SecurityConfig};
use flashboot_core::{ByteSize, Error, Kind, Result};
use std::{
    net::{IpAddr, Ipv4Addr},
    ops::RangeInclusive,
    time::Duration,
};

/// What our channels are for.
pub(crate) const PURPOSE: Option<Purpose> = Purpose::new("tcp");

/// How to open a `tcp` endpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TcpConfig {
    /// The address to listen at: one of this host's, or `0.0.0.0` or `[::]` for all of them.
    pub bind: IpAddr,
    /// The ports to try, in order; 0 lets the system choose.
    pub ports: RangeInclusive<u16>,
    /// What readers are to dial, where that is not `bind`.
    pub advertise: Option<Host>,
    /// Connections over which each reader stripes what it reads, besides the one it watches by.
    pub connections: usize,
    /// The most payload bytes a second that this exporter sends, to all readers together. `None`: no bound.
    pub rate: Option<ByteSize>,
    /// Whether the pages of a host arena are passed to the socket instead of copied. `None`: off loopback. On loopback it is
    /// the receiver's copy that then takes the pages one by one, at twice the processor time a byte.
    pub zero_copy: Option<bool>,
    /// What protects the channels.
    pub security: SecurityConfig,
    /// How long a reader may take for its handshake.
    pub handshake: Duration,
    /// Readers' connections that may be in their handshake at once.
    pub max_pending: usize,
    /// Readers' connections that may be attached at once; more are refused.
    pub max_connections: usize,
    /// After how long a peer that is silent below TCP is taken for gone; at least 3 s.
    pub liveness: Duration,
    /// How long an answer under way may stand still before its source is left.
    pub silence: Duration,
    /// The GPU whose arenas are to be served or filled ([`flashboot_cuda::Device::find`] reads it), for the probe to try.
    pub device: Option<String>,
}

impl Default for TcpConfig {
    /// Loopback, a port of the system's, four connections a reader, no bound on the rate.
    fn default() -> Self {
        Self {
            bind: Ipv4Addr::LOCALHOST.into(),
            ports: 0..=0,
            advertise: None,
            connections: 4,
            rate: None,
            zero_copy: None,
            security: SecurityConfig::default(),
            handshake: Duration::from_secs(5),
            max_pending: 64,
            max_connections: 1024,
            liveness: Duration::from_secs(15),
            silence: Duration::from_secs(20),
            device: None,
        }
    }
}

impl TcpConfig {
    pub(crate) fn listen(&self) -> Result<Listen> {
        let Self { handshake, max_pending, .. } = *self;
        Ok(Listen { handshake, max_pending, liveness: self.liveness()?, ..Listen::new(purpose()?) })
    }

    pub(crate) fn liveness(&self) -> Result<Liveness> {
        Liveness::within(self.liveness)
    }

    /// Refuses numbers that cannot work.
    pub(crate) fn check(&self) -> Result<()> {
        let invalid = |what: String| Err(Error::new(Kind::Invalid, "open", what));
        if !(1..=64).contains(&self.connections) {
            return invalid(format!(
                "{} connections a reader: between 1 and 64 are possible",
                self.connections
            ));
        }
        if self.rate.is_some_and(|rate| rate.0 == 0) {
            return invalid("a rate of 0 bytes a second sends nothing".into());
        }
        if self.silence.is_zero() || self.handshake.is_zero() {
            return invalid("a wait of no time".into());
        }
        self.liveness().map(drop)
    }
}

pub(crate) fn purpose() -> Result<Purpose> {
    PURPOSE.ok_or_else(|| Error::new(Kind::Invalid, "open", "a purpose that is none"))
}
