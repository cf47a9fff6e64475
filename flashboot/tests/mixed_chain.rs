//! One chain over three transports: a node pulls over rdma, its host's next rank over ipc, the last one over tcp; each a
//! process, each verified, each serving while it still pulls. Needs a verbs provider: runs in the machine of `cargo xtask
//! rdma-vm`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, missing_docs)]

use async_trait::async_trait;
use flashboot_backend_ipc::{IpcConfig, IpcTransport};
use flashboot_backend_rdma::{RdmaConfig, RdmaTransport};
use flashboot_backend_tcp::{TcpConfig, TcpTransport};
use flashboot_core::{
    Arena, ArenaSpec, ByteRange, Digests, Error, Generation, Geometry, HandleExchange, Locator, Mover,
    PeerId, Readiness, Result, ShardId, Transport as _, TransportName, digest,
    replica::{Assignment, Policy},
    schedule::Schedule,
};
use flashboot_driver::{Job, Limits, Sources, replicate};
use flashboot_memory::{HostArena, HostArenaConfig};
use libtest_mimic::{Arguments, Completion, Failed, Trial};
use std::{
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, ExitCode},
    sync::Arc,
    time::{Duration, Instant},
};

const RANK: &str = "FLASHBOOT_CONFORMANCE_CHAIN";
const PATIENCE: Duration = Duration::from_secs(40);
const BLOCK: u64 = 64 << 10;
const PAYLOAD: u64 = 12 * (1 << 20) + 777;
/// By which transport each rank reads the one before it.
const HOPS: [TransportName; 3] = [TransportName::Rdma, TransportName::Ipc, TransportName::Tcp];

fn geometry() -> Geometry {
    Geometry::new(PAYLOAD, BLOCK, 16 * BLOCK, 1).expect("whole blocks")
}

/// The bytes of a block: none is like another.
fn bytes(range: ByteRange) -> Vec<u8> {
    let len = usize::try_from(range.len()).expect("a block");
    let number = range.start / BLOCK;
    let mut bytes = [number as u8, (number >> 8) as u8, 0xA5, 0x3C].repeat(len.div_ceil(4));
    bytes.truncate(len);
    bytes
}

fn blocks() -> impl Iterator<Item = (u64, ByteRange)> {
    (0..geometry().blocks()).map(|index| (index, geometry().block_range(index)))
}

async fn open(name: TransportName, rank: usize, folder: &Path) -> Arc<dyn HandleExchange> {
    let opened = match name {
        TransportName::Rdma => {
            let devices = vec![format!("rxe{}", rank % 2)];
            RdmaTransport::default().open(RdmaConfig { devices, ..RdmaConfig::default() }).await
        }
        TransportName::Ipc => {
            let config = IpcConfig { directory: folder.join("sockets"), ..IpcConfig::default() };
            IpcTransport::default().open(config).await
        }
        _ => TcpTransport::default().open(TcpConfig::default()).await,
    };
    opened.expect("the endpoint opens")
}

fn place(folder: &Path, what: &str, rank: usize) -> PathBuf {
    folder.join(format!("{what}-{rank}"))
}

fn say(folder: &Path, what: &str, rank: usize, text: &str) {
    let part = place(folder, &format!("{what}.part"), rank);
    fs::write(&part, text).expect("written");
    fs::rename(part, place(folder, what, rank)).expect("renamed");
}

async fn hear(folder: &Path, what: &str, rank: usize) -> String {
    let began = Instant::now();
    loop {
        if let Ok(text) = fs::read_to_string(place(folder, what, rank)) {
            return text;
        }
        assert!(began.elapsed() < PATIENCE, "rank {rank} did not say {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

struct Before {
    exchange: Arc<dyn HandleExchange>,
    arena: Arc<dyn Arena>,
    locator: Locator,
}

#[async_trait]
impl Sources for Before {
    async fn attach(&self, _: PeerId) -> Result<Box<dyn Mover>> {
        self.exchange.import(&self.locator, Arc::clone(&self.arena), PATIENCE).await
    }

    async fn replace(&self, _: PeerId, _: ShardId, _: u64, _: &Error) -> Option<PeerId> {
        None
    }
}

async fn rank(rank: usize, folder: &Path) {
    let spec = ArenaSpec { payload: PAYLOAD, shards: 1 };
    let arena: Arc<dyn Arena> = HostArena::create(spec, &HostArenaConfig::default()).expect("an arena").0;
    arena.begin(Generation::from_random(100 + rank as u64));
    // Exported before the first byte is there: whoever follows reads while we do.
    let serving = match HOPS.get(rank) {
        Some(next) => {
            let exchange = open(*next, rank, folder).await;
            let export = exchange.export(Arc::clone(&arena), PATIENCE).await.expect("exported");
            say(folder, "locator", rank, &export.locator().encode());
            Some((exchange, export))
        }
        None => None,
    };
    if rank == 0 {
        for (_, range) in blocks() {
            arena.copy_in(range.start, &bytes(range)).expect("the owner may");
            arena.publish(ShardId(0), range.end).expect("grows");
        }
    } else {
        let locator: Locator = hear(folder, "locator", rank - 1).await.parse().expect("a locator");
        let transport = HOPS[rank - 1];
        assert_eq!(locator.transport, transport);
        let exchange = open(transport, rank, folder).await;
        let values =
            blocks().map(|(index, range)| digest::block(&geometry(), index, &bytes(range))).collect();
        let schedule = Schedule::Chain { clones: HOPS.len() as u32 };
        let job = Job {
            arena: Arc::clone(&arena),
            assignment: Assignment::of(schedule, rank as u32, geometry()),
            expected: Some(Arc::new(Digests::new(PAYLOAD, BLOCK, values).expect("one a block"))),
            policy: Policy { stall: PATIENCE, ..Policy::default() },
            limits: Limits { pull: PATIENCE, quiesce: PATIENCE, floor: None },
        };
        let sources = Arc::new(Before { exchange, arena: Arc::clone(&arena), locator });
        let report = replicate(job, sources, &mut ()).await.expect("replicated");
        assert_eq!((report.bytes, report.verified, report.repaired), (PAYLOAD, geometry().blocks(), 0));
        let mut found = vec![0; BLOCK as usize];
        for (index, range) in blocks() {
            let found = &mut found[..range.len() as usize];
            arena.copy_out(range.start, found).expect("quiet");
            assert!(found == bytes(range), "block {index} at rank {rank}");
        }
    }
    say(folder, "done", rank, "");
    for other in 0..=HOPS.len() {
        hear(folder, "done", other).await;
    }
    drop(serving);
}

fn block_on<T>(work: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(work)
}

struct Ranks(Vec<Child>);

impl Drop for Ranks {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn chain() {
    let folder = tempfile::tempdir().expect("a folder");
    let own = std::env::current_exe().expect("this program");
    let start = |rank: usize| {
        let said = format!("{rank} {}", folder.path().display());
        Command::new(&own).env(RANK, said).spawn().expect("a rank")
    };
    let mut ranks = Ranks((0..=HOPS.len()).map(start).collect());
    for (rank, child) in ranks.0.iter_mut().enumerate() {
        let status = child.wait().expect("ours");
        assert!(status.success(), "rank {rank} ended with {status}");
    }
}

fn main() -> ExitCode {
    if let Ok(said) = std::env::var(RANK) {
        let (number, folder) = said.split_once(' ').expect("two words");
        block_on(rank(number.parse().expect("a number"), Path::new(folder)));
        return ExitCode::SUCCESS;
    }
    let required = std::env::var("FLASHBOOT_REQUIRE").is_ok_and(|list| list.split(',').any(|w| w == "rdma"));
    let absent = match block_on(RdmaTransport::default().probe()) {
        Readiness::Ready => None,
        Readiness::Unavailable { reason, remedy } => Some(format!("{reason}; {remedy}")),
    };
    let case = Trial::ignorable_test("rdma_then_ipc_then_tcp", move || match absent {
        Some(reason) if required => Err(Failed::from(reason)),
        Some(reason) => Ok(Completion::ignored_with(reason)),
        None => {
            chain();
            Ok(Completion::Completed)
        }
    });
    libtest_mimic::run(&Arguments::from_args(), vec![case]).exit_code()
}
