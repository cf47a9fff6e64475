//! Seeds, clones and forgers for the tests on a provider.

use flashboot_backend_rdma::{RdmaConfig, RdmaExchange, RdmaTransport};
use flashboot_channel::{Channel, Dial, Endpoint, Listen, Listener, Liveness, Purpose, Security, dial};
use flashboot_core::{
    Arena, ArenaSpec, BlockDigest, ByteRange, Export, Generation, HandleExchange as _, Landed, Locator,
    Mover, Pull, Result, ShardId, digest,
};
use flashboot_memory::{HostArena, HostArenaConfig};
use std::{
    future::Future,
    io::{BufRead as _, BufReader, Read as _},
    process::{Child, Command, ExitCode, Stdio},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

const SALT: u64 = 0x9E37_79B9_7F4A_7C15;
const MIB: u64 = 1 << 20;
const PAGE: usize = 4096;
const SETUP: Duration = Duration::from_secs(10);
const SOURCE: &str = "FLASHBOOT_CONFORMANCE_SOURCE";

pub(crate) fn block_on<T>(work: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(work)
}

pub(crate) fn config(devices: &[&str]) -> RdmaConfig {
    RdmaConfig { devices: devices.iter().map(|name| (*name).to_owned()).collect(), ..RdmaConfig::default() }
}

pub(crate) async fn counted(config: RdmaConfig) -> Arc<RdmaExchange> {
    RdmaTransport::default().open_counted(config).await.expect("the endpoint opens")
}

/// One MiB of the payload: no two pages of it are alike, here or in another MiB. Cheap, as an emulated core needs it.
fn part(number: u64) -> Vec<u8> {
    static NOISE: OnceLock<Vec<u8>> = OnceLock::new();
    let noise = NOISE.get_or_init(|| {
        let mut state = SALT;
        let words = std::iter::repeat_with(|| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state.to_le_bytes()
        });
        words.take(PAGE / 8).flatten().collect()
    });
    let mut bytes = noise.repeat(MIB as usize / PAGE);
    for (page, bytes) in bytes.chunks_mut(PAGE).enumerate() {
        bytes[..8].copy_from_slice(&(number << 32 | page as u64).to_le_bytes());
    }
    bytes
}

/// The values of the payload's blocks of one MiB.
pub(crate) fn geometry(size: u64) -> (u64, Vec<BlockDigest>) {
    let values = (0..size / MIB).map(|number| {
        let range = ByteRange::new(number * MIB, (number + 1) * MIB);
        let piece = digest::piece(size, range.start, &part(number));
        digest::merge(size, range, &[piece]).expect("a piece")
    });
    (size, values.collect())
}

pub(crate) fn clone_of(size: u64) -> Arc<dyn Arena> {
    let spec = ArenaSpec { payload: size, shards: 1 };
    HostArena::create(spec, &HostArenaConfig::default()).expect("an arena").0
}

pub(crate) fn expect_payload(arena: &dyn Arena, size: u64) {
    let mut found = vec![0; MIB as usize];
    for number in 0..size / MIB {
        arena.copy_out(number * MIB, &mut found).expect("quiet");
        assert!(found == part(number), "MiB {number} is not the payload");
    }
}

/// A whole arena of `size` bytes, exported.
pub(crate) async fn seed(
    config: RdmaConfig,
    size: u64,
) -> (Arc<RdmaExchange>, Arc<dyn Arena>, Box<dyn Export>) {
    let exchange = counted(config).await;
    let (arena, export) = exported(&exchange, size).await;
    (exchange, arena, export)
}

/// A whole arena of `size` bytes, exported by `exchange`.
pub(crate) async fn exported(exchange: &RdmaExchange, size: u64) -> (Arc<dyn Arena>, Box<dyn Export>) {
    static FILLINGS: AtomicU64 = AtomicU64::new(1);
    let arena = clone_of(size);
    let filling = FILLINGS.fetch_add(1, Ordering::Relaxed) << 32;
    arena.begin(Generation::from_random(filling | u64::from(std::process::id())));
    for number in 0..size / MIB {
        arena.copy_in(number * MIB, &part(number)).expect("the owner may");
    }
    arena.publish(ShardId(0), size).expect("grows");
    let export = exchange.export(Arc::clone(&arena), SETUP).await.expect("exported");
    (arena, export)
}

pub(crate) async fn pull(mover: &dyn Mover, range: ByteRange, hash: Option<u64>) -> Result<Landed> {
    mover.start(Pull { range, hash }).expect("starts").quiesced().await
}

/// A seed in a process of its own.
pub(crate) struct Source {
    child: Child,
    pub(crate) locator: Locator,
}

impl Source {
    pub(crate) fn start(devices: &[&str], size: u64) -> Self {
        let mut child = Command::new(std::env::current_exe().expect("this program"))
            .env(SOURCE, format!("{size},{}", devices.join(",")))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a child");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("piped")).read_line(&mut line).expect("a line");
        Self { child, locator: line.trim().parse().expect("a locator") }
    }

    pub(crate) fn kill(mut self) {
        self.child.kill().expect("it lives");
        self.child.wait().expect("it is ours");
    }
}

impl Drop for Source {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Does what a child that is a seed does, if this process is one: until its stdin ends.
pub(crate) fn child() -> Option<ExitCode> {
    let text = std::env::var(SOURCE).ok()?;
    let mut words = text.split(',');
    let size = words.next()?.parse().ok()?;
    let devices: Vec<_> = words.collect();
    block_on(async {
        let (_exchange, _arena, export) = seed(config(&devices), size).await;
        println!("{}", export.locator().encode());
        let _ = tokio::task::spawn_blocking(|| std::io::stdin().read(&mut [0])).await;
    });
    Some(ExitCode::SUCCESS)
}

/// Stands between a reader and its source, and changes what the source answers.
pub(crate) struct Forge {
    locator: Locator,
    _task: tokio::task::JoinHandle<()>,
}

type Answer = Box<dyn Fn(Option<Vec<u8>>) -> Option<Vec<u8>> + Send>;

impl Forge {
    /// The source's answer, changed.
    pub(crate) async fn new(
        real: &Locator,
        change: impl Fn(&mut serde_json::Value) + Send + 'static,
    ) -> Self {
        let answer = move |reply: Option<Vec<u8>>| {
            let mut reply = serde_json::from_slice(&reply.expect("an answer")).expect("JSON");
            change(&mut reply);
            Some(serde_json::to_vec(&reply).expect("JSON"))
        };
        Self::with(real, Box::new(answer), true).await
    }

    /// These bytes, whatever is asked.
    pub(crate) async fn saying(real: &Locator, bytes: Vec<u8>) -> Self {
        Self::with(real, Box::new(move |_| Some(bytes.clone())), false).await
    }

    /// Nothing.
    pub(crate) async fn silent(real: &Locator) -> Self {
        Self::with(real, Box::new(|_| None), false).await
    }

    async fn with(real: &Locator, answer: Answer, asks: bool) -> Self {
        let purpose = Purpose::new("rdma").expect("a purpose");
        let security = Security::default();
        let at = "127.0.0.1:0".parse().expect("an address");
        let mut listener = Listener::bind(at, &security, Listen::new(purpose)).await.expect("listens");
        let endpoint = listener.endpoint(None).expect("an endpoint").to_string();
        let real_endpoint: Endpoint = real.endpoint.parse().expect("an endpoint");
        let task = tokio::spawn(async move {
            let mut kept: Vec<Channel> = Vec::new();
            loop {
                let mut reader = listener.accept().await.expect("a reader");
                let cap = 1 << 20;
                let Ok(Some(request)) = reader.receive(cap, SETUP).await else { continue };
                let reply = if asks {
                    let how = Dial { purpose, timeout: SETUP, liveness: Liveness::default() };
                    let mut source = dial(&real_endpoint, &security, how).await.expect("the source");
                    source.send(&request, cap, SETUP).await.expect("sent");
                    let reply = source.receive(cap, SETUP).await.expect("answered");
                    kept.push(source);
                    reply
                } else {
                    None
                };
                if let Some(bytes) = answer(reply) {
                    let _ = reader.send(&bytes, cap, SETUP).await;
                }
                kept.push(reader);
            }
        });
        Self { locator: Locator { endpoint, ..real.clone() }, _task: task }
    }

    pub(crate) fn locator(&self) -> &Locator {
        &self.locator
    }
}
