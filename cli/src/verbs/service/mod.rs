//! The verbs of the replication service: `rendezvous`, `seed`, `clone`, `gather`, `status`; and what seeds and clones are told alike.

pub(crate) mod clone;
pub(crate) mod gather;
pub(crate) mod rendezvous;
pub(crate) mod seed;
pub(crate) mod status;

use super::replicate::run_directory;
use crate::settings::Overrides;
use clap::Args;
use flashboot::{
    config::{Choice, Chunk, Config, Devices},
    network::Advertised,
    observe::Observed,
    service::{Hop, Labels, Seat},
};
use flashboot_core::{ByteSize, TransportName};
use std::{
    fmt::Write as _,
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    time::Duration,
};

/// A line for each source that was read from, and for what was passed over before its transport.
fn hops(sources: &[Hop]) -> String {
    let mut text = String::new();
    for hop in sources {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "read from {} by {}", hop.source, hop.transport);
        for passed in &hop.passed {
            let _ = writeln!(text, "  passed over {}: {}", passed.name, passed.reason);
        }
    }
    text
}

/// What protects the channel to the service, and those between hosts.
#[derive(Debug, Args)]
pub(crate) struct Protection {
    /// auto (off on loopback only), on or off [default: auto]
    #[arg(long, value_parser = ["auto", "on", "off"])]
    tls: Option<String>,
    /// A file of mode 0600 with the secret that all members share
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
}

impl Protection {
    pub(crate) fn overrides(&self, into: &mut Overrides) {
        into.set("security.tls", "--tls", self.tls.clone());
        let token_file = self.token_file.as_ref().map(|path| path.display().to_string());
        into.set("security.token_file", "--token-file", token_file);
    }
}

/// Where what runs for long shows itself.
#[derive(Debug, Args)]
pub(crate) struct Shown {
    /// Show metrics and health there by HTTP [default: nowhere]
    #[arg(long, value_name = "ADDRESS:PORT")]
    http: Option<SocketAddr>,
}

impl Shown {
    pub(crate) fn overrides(&self, into: &mut Overrides) {
        into.text("http.listen", "--http", self.http.as_ref());
    }
}

/// What a seed and a clone are told alike.
#[derive(Debug, Args)]
pub(crate) struct SeatArgs {
    /// Whose memory: host or one GPU such as cuda:0, by number, UUID or PCI address [default: host]
    #[arg(long, value_name = "DEVICE")]
    device: Option<Devices>,
    /// auto, imex, ipc, rdma or tcp [default: auto]
    #[arg(long, value_name = "NAME")]
    transport: Option<Choice>,
    /// What auto may choose, such as ipc,tcp [default: everything but mock]
    #[arg(long, value_name = "NAMES", value_delimiter = ',', value_parser = flashboot::config::transport)]
    allow: Vec<TransportName>,
    /// Bytes of one copy, a whole number of 16MiB blocks, or auto [default: auto]
    #[arg(short, long, value_name = "auto|SIZE")]
    chunk: Option<Chunk>,
    /// How long a source's progress may stand still [default: 30s]
    #[arg(long, value_name = "DURATION")]
    stall: Option<humantime::Duration>,
    /// The fewest bytes a second that a source may give over replicate.floor_window, as 500MB [default: any]
    #[arg(long, value_name = "SIZE")]
    floor: Option<ByteSize>,
    /// The longest the transfer may take [default: 10m]
    #[arg(long, value_name = "DURATION")]
    transfer_timeout: Option<humantime::Duration>,
    /// tcp: the address to listen at [default: 127.0.0.1]
    #[arg(long, value_name = "ADDRESS")]
    bind: Option<IpAddr>,
    /// tcp: the name or address that readers dial [default: what --bind says]
    #[arg(long, value_name = "HOST")]
    advertise: Option<Advertised>,
    /// tcp: connections over which it stripes what it reads [default: 4]
    #[arg(long, value_name = "N")]
    connections: Option<u32>,
    /// tcp: the most bytes a second that it sends, as 500MB [default: no bound]
    #[arg(long, value_name = "SIZE")]
    rate: Option<ByteSize>,
    #[command(flatten)]
    protection: Protection,
    #[command(flatten)]
    shown: Shown,
    /// auto, base or huge [default: auto]
    #[arg(long, value_parser = ["auto", "base", "huge"])]
    pages: Option<String>,
    /// Threads that fault in and copy [default: one a core]
    #[arg(long, value_name = "N")]
    threads: Option<u32>,
    /// How many readers it serves at once
    #[arg(long, value_name = "N", default_value_t = 4)]
    readers: u32,
    /// How long it waits for the service, for what it asks for, and for another source
    #[arg(long, value_name = "DURATION", default_value = "60s")]
    patience: humantime::Duration,
    /// How long readers may take to end, once it is asked to go
    #[arg(long, value_name = "DURATION", default_value = "30s")]
    drain: humantime::Duration,
    /// A name that stays through restarts: a later member of the name replaces an earlier
    #[arg(long)]
    name: Option<String>,
    /// The NVLink domain it is in
    #[arg(long, value_name = "LABEL")]
    domain: Option<String>,
    /// The rail it is on
    #[arg(long, value_name = "LABEL")]
    rail: Option<String>,
    /// The rack it is in
    #[arg(long, value_name = "LABEL")]
    rack: Option<String>,
}

impl SeatArgs {
    pub(crate) fn overrides(&self, into: &mut Overrides) {
        into.text("replicate.device", "--device", self.device.as_ref());
        into.text("replicate.transport", "--transport", self.transport.as_ref());
        let allow: Vec<String> = self.allow.iter().map(ToString::to_string).collect();
        into.set("replicate.allow", "--allow", (!allow.is_empty()).then_some(allow));
        into.text("replicate.chunk", "--chunk", self.chunk.as_ref());
        into.text("replicate.stall", "--stall", self.stall.as_ref());
        into.text("replicate.floor", "--floor", self.floor.as_ref());
        into.text("replicate.transfer_timeout", "--transfer-timeout", self.transfer_timeout.as_ref());
        into.text("tcp.bind", "--bind", self.bind.as_ref());
        into.text("tcp.advertise", "--advertise", self.advertise.as_ref());
        into.set("tcp.connections", "--connections", self.connections);
        into.text("tcp.rate", "--rate", self.rate.as_ref());
        self.protection.overrides(into);
        self.shown.overrides(into);
        into.set("memory.pages", "--pages", self.pages.clone());
        into.set("memory.threads", "--threads", self.threads);
    }

    pub(in crate::verbs) fn seat(&self, config: &Config) -> Seat {
        let Self { name, domain, rail, rack, .. } = self;
        Seat {
            config: config.clone(),
            directory: run_directory(),
            labels: Labels {
                name: name.clone(),
                domain: domain.clone(),
                rail: rail.clone(),
                rack: rack.clone(),
            },
            readers: self.readers,
            patience: self.patience.into(),
            drain: self.drain.into(),
            observed: Observed::default(),
        }
    }
}

/// How long a member of a service may be silent.
#[derive(Debug, Args)]
pub(crate) struct Lease {
    /// How long a member of the service may be silent
    #[arg(long, value_name = "DURATION", default_value = "10s", value_parser = lease)]
    lease: Duration,
}

fn lease(text: &str) -> Result<Duration, String> {
    let lease = humantime::parse_duration(text).map_err(|e| e.to_string())?;
    if (Duration::from_secs(1)..=Duration::from_secs(3600)).contains(&lease) {
        return Ok(lease);
    }
    Err("a lease is between 1s and 1h".into())
}
