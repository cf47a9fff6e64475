//! What works between this host and another: both serve a small arena in host memory by every transport that they have,
//! and each really reads the other's.
//!
//! The two agree over a channel of purpose `doctor`: the dialler says what it offers, the listener too; the dialler
//! measures and says that it is done; the listener measures and says what it found. Frames are JSON, with a cap.

use crate::{
    config::{Choice, Memory, TRANSPORTS},
    network::Network,
    registry::{Endpoints, PassedOver, Registry, Settings},
    scratch::Scratch,
};
use flashboot_channel::{Channel, Dial, Endpoint, Host, Listen, Listener, Liveness, Purpose, Security, dial};
use flashboot_core::{
    Arena, ArenaSpec, ByteRange, ByteSize, Error, Export, Generation, Kind, Locator, Mover, Pull, Result,
    ShardId, TransportName,
};
use flashboot_memory::{HostArena, HostArenaConfig};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::{
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

const PURPOSE: Option<Purpose> = Purpose::new("doctor");
/// The longest frame of either side: some locators, or some findings.
const CAP: usize = 64 << 10;
/// Bytes of the arena that each serves: what a rate is measured by.
const PAYLOAD: u64 = 16 << 20;
/// Bytes of the small read.
const SMALL: u64 = 4 << 10;
/// How often the small one is read, once it has worked.
const READS: usize = 16;
/// How long one read, one import or one frame may take.
const STEP: Duration = Duration::from_secs(10);

/// What to know of this host, and how long all of it may take.
#[derive(Debug, Clone)]
pub struct Ours {
    /// Where a directory for sockets may be made.
    pub directory: PathBuf,
    /// What crosses between hosts.
    pub network: Network,
    /// How long a meeting with one peer may take.
    pub timeout: Duration,
    /// The rate, in bytes a second, below which a path that works is degraded.
    pub floor: ByteSize,
}

/// One transport in one direction between two hosts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Path {
    /// The transport.
    pub transport: TransportName,
    /// Who read.
    pub reader: Side,
    /// Bytes came, and they were the right ones, at the floor's rate or more.
    pub ready: bool,
    /// Bytes came, more slowly than that.
    pub degraded: bool,
    /// Median of several reads of 4 KiB, in microseconds.
    pub latency_us: Option<f64>,
    /// Of the faster of two reads of 16 MiB.
    pub bytes_per_s: Option<f64>,
    /// Why it is not ready.
    pub reason: Option<String>,
    /// What to do about it.
    pub remedy: Option<String>,
    /// What to know of a path that works all the same.
    #[serde(default)]
    pub remarks: Vec<String>,
}

/// One of two hosts, seen from the one that asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Side {
    /// The one that asked.
    Here,
    /// Its peer.
    Peer,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Offer {
    locators: Vec<String>,
    lacking: Vec<PassedOver>,
}

/// What one host serves, and what it reads into.
struct Bench {
    endpoints: Vec<(TransportName, Endpoints)>,
    exports: Vec<Box<dyn Export>>,
    lacking: Vec<PassedOver>,
    into: Arc<HostArena>,
    /// The right bytes.
    pattern: Vec<u8>,
    // Sockets are in it: after the endpoints.
    _sockets: Scratch,
}

/// Meets whoever dials `at`, one after the other, until `stop`. `told` is given the endpoint to dial.
///
/// # Errors
/// Those of opening the port.
pub async fn listen(
    at: SocketAddr,
    advertise: Option<&Host>,
    ours: &Ours,
    told: impl FnOnce(&str),
    stop: impl Future<Output = ()>,
) -> Result<()> {
    let security = Security::load(&ours.network.security())?;
    let mut listener = Listener::bind(at, &security, Listen::new(purpose()?)).await?;
    told(&listener.endpoint(advertise)?.to_string());
    tokio::pin!(stop);
    loop {
        let channel = tokio::select! {
            () = &mut stop => return Ok(()),
            taken = listener.accept() => taken?,
        };
        let peer = channel.peer().to_owned();
        let met = tokio::select! {
            () = &mut stop => return Ok(()),
            met = within(ours.timeout, &peer, answer(channel, ours)) => met,
        };
        match met {
            Ok(()) => tracing::info!(peer, "met a peer"),
            Err(error) => tracing::warn!(%error, "a meeting failed"),
        }
    }
}

/// Meets the listener at `endpoint`, and gives what each could read of the other.
///
/// # Errors
/// When the two cannot meet at all; what does not work between them is in the answer.
pub async fn meet(endpoint: &Endpoint, ours: &Ours) -> Result<Vec<Path>> {
    let peer = endpoint.place();
    within(ours.timeout, &peer, ask(endpoint, ours)).await
}

async fn within<T>(timeout: Duration, peer: &str, work: impl Future<Output = Result<T>>) -> Result<T> {
    tokio::time::timeout(timeout, work).await.unwrap_or_else(|_| {
        Err(Error::new(Kind::Deadline, "doctor", format!("it took longer than {timeout:?}")).with_peer(peer))
    })
}

fn purpose() -> Result<Purpose> {
    PURPOSE.ok_or_else(|| Error::new(Kind::Invalid, "doctor", "a purpose that is none"))
}

async fn ask(endpoint: &Endpoint, ours: &Ours) -> Result<Vec<Path>> {
    let security = Security::load(&ours.network.security())?;
    let how = Dial { purpose: purpose()?, timeout: STEP, liveness: Liveness::default() };
    let mut channel = dial(endpoint, &security, how).await?;
    let bench = Bench::set_up(ours, channel.local_address()).await?;
    send(&mut channel, &bench.offer()).await?;
    let theirs: Offer = receive(&mut channel, STEP).await?;
    let mut paths = bench.measure(&theirs, Side::Here, ours.floor).await;
    send(&mut channel, &ours.floor.0).await?;
    // The peer measures as we did.
    let found: Vec<Path> = receive(&mut channel, ours.timeout).await?;
    paths.extend(found.into_iter().take(TRANSPORTS.len()).map(|path| Path { reader: Side::Peer, ..path }));
    Ok(paths)
}

async fn answer(mut channel: Channel, ours: &Ours) -> Result<()> {
    let theirs: Offer = receive(&mut channel, STEP).await?;
    let bench = Bench::set_up(ours, channel.local_address()).await?;
    send(&mut channel, &bench.offer()).await?;
    let floor: u64 = receive(&mut channel, ours.timeout).await?;
    let paths = bench.measure(&theirs, Side::Peer, ByteSize(floor)).await;
    send(&mut channel, &paths).await?;
    // The peer may still read what we serve until it has read this.
    drop(channel.receive(CAP, STEP).await);
    Ok(())
}

async fn send(channel: &mut Channel, value: &impl Serialize) -> Result<()> {
    let json = serde_json::to_vec(value).map_err(|e| Error::new(Kind::Invalid, "doctor", e.to_string()))?;
    channel.send(&json, CAP, STEP).await
}

async fn receive<T: DeserializeOwned>(channel: &mut Channel, timeout: Duration) -> Result<T> {
    let frame = channel.receive(CAP, timeout).await?;
    let frame = frame.ok_or_else(|| {
        Error::new(Kind::SourceLost, "doctor", "the peer has ended the meeting").with_peer(channel.peer())
    })?;
    serde_json::from_slice(&frame).map_err(|e| {
        Error::new(Kind::Protocol, "doctor", format!("what came does not parse: {e}"))
            .with_peer(channel.peer())
    })
}

/// What every such arena holds: no two words are alike.
fn pattern() -> Vec<u8> {
    let mut bytes = Vec::new();
    for word in 0..PAYLOAD / 8 {
        bytes.extend_from_slice(&word.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
    }
    bytes
}

impl Bench {
    /// `local`: this end of the channel, where `tcp` and `rdma` listen too unless they were told another address than
    /// loopback.
    async fn set_up(ours: &Ours, local: Option<SocketAddr>) -> Result<Self> {
        let sockets = Scratch::new(&ours.directory, "flashboot-doctor-");
        let sockets =
            sockets.map_err(|e| Error::from_io("mkdir", &e, ours.directory.display().to_string()))?;
        let mut network = ours.network.clone();
        let local: Option<IpAddr> = local.map(|local| local.ip().to_canonical());
        for bind in [&mut network.tcp.bind, &mut network.rdma.bind] {
            if let Some(local) = local.filter(|_| bind.is_loopback()) {
                *bind = local;
            }
        }
        let settings =
            Settings { sockets: sockets.path().to_owned(), memory: Memory::default(), device: None, network };
        let registry = Registry::standard(&settings)?;
        let mut bits = [0; 8];
        getrandom::fill(&mut bits).map_err(|e| Error::new(Kind::Io, "getrandom", e.to_string()))?;
        let spec = ArenaSpec { payload: PAYLOAD, shards: 1 };
        let (arena, _) = HostArena::create(spec, &HostArenaConfig::default())?;
        let (into, _) = HostArena::create(spec, &HostArenaConfig::default())?;
        arena.begin(Generation::from_random(u64::from_le_bytes(bits)));
        let pattern = pattern();
        arena.copy_in(0, &pattern)?;
        arena.publish(ShardId(0), PAYLOAD)?;
        let arena: Arc<dyn Arena> = arena;
        let mut bench = Self {
            endpoints: Vec::new(),
            exports: Vec::new(),
            lacking: Vec::new(),
            into,
            pattern,
            _sockets: sockets,
        };
        for name in TRANSPORTS.into_iter().filter(|name| *name != TransportName::Mock) {
            let opened = async {
                let endpoints = registry.open(Choice::Only(name), &[], &settings).await?;
                let exports = endpoints.export(&arena, STEP).await?;
                Ok::<_, Error>((endpoints, exports))
            };
            match opened.await {
                Ok((endpoints, exports)) => {
                    bench.endpoints.push((name, endpoints));
                    bench.exports.extend(exports);
                }
                Err(e) => bench.lacking.push(PassedOver {
                    name,
                    reason: e.detail().to_owned(),
                    remedy: e.remedy().unwrap_or_default().to_owned(),
                }),
            }
        }
        Ok(bench)
    }

    fn offer(&self) -> Offer {
        Offer {
            locators: self.exports.iter().map(|export| export.locator().encode()).collect(),
            lacking: self.lacking.clone(),
        }
    }

    /// Reads what the peer offers by every transport, in `auto`'s order.
    async fn measure(&self, theirs: &Offer, reader: Side, floor: ByteSize) -> Vec<Path> {
        let locators: Vec<Locator> =
            theirs.locators.iter().take(TRANSPORTS.len()).filter_map(|text| text.parse().ok()).collect();
        let mut paths = Vec::new();
        for transport in TRANSPORTS.into_iter().filter(|name| *name != TransportName::Mock) {
            let not = |reason: String, remedy: &str| Path {
                transport,
                reader,
                ready: false,
                degraded: false,
                latency_us: None,
                bytes_per_s: None,
                reason: Some(reason),
                remedy: (!remedy.is_empty()).then(|| remedy.to_owned()),
                remarks: Vec::new(),
            };
            let lacks = |list: &[PassedOver]| list.iter().find(|lacking| lacking.name == transport).cloned();
            let ours = self.endpoints.iter().find(|(name, _)| *name == transport);
            let locator = locators.iter().find(|locator| locator.transport == transport);
            paths.push(match (ours, locator) {
                (Some((_, endpoints)), Some(locator)) => match self.read(endpoints, locator).await {
                    Ok((latency, rate, remarks)) => {
                        judged(Path { remarks, ..not(String::new(), "") }, latency, rate, floor)
                    }
                    Err(e) => not(e.to_string(), e.remedy().unwrap_or_default()),
                },
                (None, _) => match lacks(&self.lacking) {
                    Some(lacking) => {
                        not(format!("the reader has it not: {}", lacking.reason), &lacking.remedy)
                    }
                    None => not("the reader has it not".into(), ""),
                },
                (_, None) => match lacks(&theirs.lacking) {
                    Some(lacking) => {
                        not(format!("the source has it not: {}", lacking.reason), &lacking.remedy)
                    }
                    None => not("the source does not offer it".into(), ""),
                },
            });
        }
        paths
    }

    /// Latency of the small read, the rate of the large one, in bytes a second, and what the transport remarks of the hop.
    async fn read(&self, endpoints: &Endpoints, locator: &Locator) -> Result<(Duration, f64, Vec<String>)> {
        self.into.fill(ByteRange::new(0, PAYLOAD), 0)?;
        let into: Arc<dyn Arena> = Arc::clone(&self.into) as _;
        let imported = endpoints.import(std::slice::from_ref(locator), &into, STEP).await?;
        let mover = &*imported.mover;
        // The first read pays for what is set up once.
        self.pull(mover, SMALL).await?;
        let mut took = Vec::with_capacity(READS);
        for _ in 0..READS {
            took.push(self.pull(mover, SMALL).await?);
        }
        took.sort_unstable();
        let latency = took.get(READS / 2).copied().unwrap_or_default();
        // The faster of two: the first maps what was not yet touched.
        let whole = self.pull(mover, PAYLOAD).await?.min(self.pull(mover, PAYLOAD).await?);
        Ok((latency, PAYLOAD as f64 / whole.as_secs_f64().max(1e-9), mover.remarks()))
    }

    /// Reads the first `len` bytes and compares them.
    async fn pull(&self, mover: &dyn Mover, len: u64) -> Result<Duration> {
        let began = Instant::now();
        let mut under_way = mover.start(Pull { range: ByteRange::new(0, len), hash: None })?;
        match tokio::time::timeout(STEP, under_way.quiesced()).await {
            Ok(landed) => drop(landed?),
            Err(_) => {
                under_way.cancel();
                return Err(Error::new(
                    Kind::Deadline,
                    "pull",
                    format!("{len} bytes took longer than {STEP:?}"),
                ));
            }
        }
        let took = began.elapsed();
        let mut found = vec![0; usize::try_from(len).unwrap_or(0)];
        self.into.copy_out(0, &mut found)?;
        if self.pattern.starts_with(&found) {
            return Ok(took);
        }
        let right = self.pattern.iter().zip(&found).take_while(|(right, found)| right == found).count();
        Err(Error::new(Kind::Corrupt, "pull", format!("byte {right} of {len} is not the source's")))
    }
}

fn judged(path: Path, latency: Duration, rate: f64, floor: ByteSize) -> Path {
    let degraded = rate < floor.0 as f64;
    let slow = || {
        let rate = ByteSize(rate as u64);
        format!("degraded: {rate} a second, and {floor} are the floor")
    };
    Path {
        ready: !degraded,
        degraded,
        latency_us: Some(latency.as_secs_f64() * 1e6),
        bytes_per_s: Some(rate),
        reason: degraded.then(slow),
        remedy: degraded.then(|| "look at the link and its neighbours, or lower --floor".to_owned()),
        ..path
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ours(directory: &std::path::Path, floor: u64) -> Ours {
        Ours {
            directory: directory.to_owned(),
            network: Network::default(),
            timeout: Duration::from_secs(60),
            floor: ByteSize(floor),
        }
    }

    async fn met(floor: u64) -> Vec<Path> {
        let dir = tempfile::tempdir().unwrap();
        let ours = ours(dir.path(), floor);
        let (tell, told) = tokio::sync::oneshot::channel::<String>();
        let (end, ended) = tokio::sync::oneshot::channel::<()>();
        let at = "127.0.0.1:0".parse().unwrap();
        let say = |text: &str| tell.send(text.to_owned()).unwrap();
        let serving = listen(at, None, &ours, say, async { drop(ended.await) });
        let asking = async {
            let endpoint: Endpoint = told.await.unwrap().parse().unwrap();
            let paths = meet(&endpoint, &ours).await.unwrap();
            drop(end);
            paths
        };
        let (served, paths) = tokio::join!(serving, asking);
        served.unwrap();
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "nothing is left behind");
        paths
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn two_ends_of_one_host_read_each_other_by_every_transport_they_have() {
        let paths = met(1).await;
        assert_eq!(paths.len(), 8);
        for side in [Side::Here, Side::Peer] {
            let of = |name| paths.iter().find(|p| p.transport == name && p.reader == side).unwrap();
            for name in [TransportName::Ipc, TransportName::Tcp] {
                let path = of(name);
                assert!(path.ready && !path.degraded && path.reason.is_none(), "{path:?}");
                assert!(path.latency_us.unwrap() > 0.0 && path.bytes_per_s.unwrap() > 0.0, "{path:?}");
            }
            let imex = of(TransportName::Imex);
            assert!(!imex.ready && imex.reason.as_ref().unwrap().contains("GPU"), "{imex:?}");
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_path_below_the_floor_is_degraded_and_not_ready() {
        let paths = met(u64::MAX).await;
        let tcp: Vec<_> = paths.iter().filter(|p| p.transport == TransportName::Tcp).collect();
        assert_eq!(tcp.len(), 2);
        for path in tcp {
            assert!(path.degraded && !path.ready && path.bytes_per_s.is_some(), "{path:?}");
            assert!(path.reason.as_ref().unwrap().contains("floor") && path.remedy.is_some(), "{path:?}");
        }
    }
}
