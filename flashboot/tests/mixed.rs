//! A chain of mixed transports: a node pulls from another host over tcp and serves its own host's others over ipc, each chunk as
//! soon as it has it.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, missing_docs)]

use async_trait::async_trait;
use flashboot::{
    config::{Choice, Memory},
    network::Network,
    registry::{Endpoints, Registry, Settings},
};
use flashboot_core::{
    Arena, ArenaSpec, ByteRange, Digests, Error, Generation, Geometry, Locator, Mover, PeerId, Result,
    ShardId, TransportName,
    replica::{Assignment, Policy},
    schedule::Schedule,
};
use flashboot_driver::{Job, Limits, Report, Sources, Step, replicate};
use flashboot_memory::{HostArena, HostArenaConfig};
use std::{
    path::Path,
    sync::{Arc, Mutex},
    time::Duration,
};

const BLOCK: u64 = 1 << 20;
const PAYLOAD: u64 = 9 * BLOCK + 77;
const LONG: Duration = Duration::from_secs(20);

fn byte(at: u64) -> u8 {
    (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as u8
}

fn arena(number: u64) -> Arc<dyn Arena> {
    let spec = ArenaSpec { payload: PAYLOAD, shards: 1 };
    let (arena, _) = HostArena::create(spec, &HostArenaConfig::default()).unwrap();
    arena.begin(Generation::from_random(0xfee1_0000 + number));
    arena
}

/// A rank that may use `allow` only, as one on another host or in another container could.
async fn rank(dir: &Path, allow: &[TransportName]) -> Endpoints {
    let settings = Settings {
        sockets: dir.to_owned(),
        memory: Memory::default(),
        device: None,
        network: Network::default(),
    };
    Registry::standard(&settings).unwrap().open(Choice::Auto, allow, &settings).await.unwrap()
}

struct Upstream {
    endpoints: Arc<Endpoints>,
    into: Arc<dyn Arena>,
    locators: Vec<Locator>,
    by: Mutex<Option<TransportName>>,
}

#[async_trait]
impl Sources for Upstream {
    async fn attach(&self, _: PeerId) -> Result<Box<dyn Mover>> {
        let imported = self.endpoints.import(&self.locators, &self.into, LONG).await?;
        *self.by.lock().unwrap() = Some(imported.transport);
        Ok(imported.mover)
    }

    async fn replace(&self, _: PeerId, _: ShardId, _: u64, _: &Error) -> Option<PeerId> {
        None
    }
}

/// Fills `into` from what `locators` offer; by which transport.
async fn clone(
    endpoints: &Arc<Endpoints>,
    into: &Arc<dyn Arena>,
    locators: Vec<Locator>,
    mut first: Option<tokio::sync::oneshot::Sender<u64>>,
) -> (Report, TransportName) {
    let geometry = Geometry::new(PAYLOAD, BLOCK, BLOCK, 1).unwrap();
    let bytes: Vec<u8> = (0..PAYLOAD).map(byte).collect();
    let job = Job {
        arena: Arc::clone(into),
        assignment: Assignment::of(Schedule::Chain { clones: 1 }, 1, geometry),
        expected: Some(Arc::new(Digests::of(&geometry, &bytes))),
        policy: Policy { stall: LONG, ..Policy::default() },
        limits: Limits::default(),
    };
    let sources = Arc::new(Upstream {
        endpoints: Arc::clone(endpoints),
        into: Arc::clone(into),
        locators,
        by: Mutex::default(),
    });
    let mut observer = |step: Step| {
        if let Step::Published { bytes, .. } = step
            && let Some(tell) = first.take()
        {
            tell.send(bytes).unwrap();
        }
    };
    let report = replicate(job, Arc::clone(&sources) as _, &mut observer).await.unwrap();
    let mut found = vec![0; PAYLOAD as usize];
    into.copy_out(0, &mut found).unwrap();
    assert_eq!(found, bytes);
    let by = sources.by.lock().unwrap().unwrap();
    (report, by)
}

async fn offered(
    endpoints: &Endpoints,
    arena: &Arc<dyn Arena>,
) -> (Vec<Box<dyn flashboot_core::Export>>, Vec<Locator>) {
    let exports = endpoints.export(arena, LONG).await.unwrap();
    let locators = exports.iter().map(|export| export.locator().clone()).collect();
    (exports, locators)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_pulls_over_tcp_and_serves_its_hosts_others_over_ipc_chunk_by_chunk() {
    use TransportName::{Ipc, Tcp};
    let private = std::os::unix::fs::PermissionsExt::from_mode(0o700);
    let dir = tempfile::Builder::new().permissions(private).tempdir().unwrap();
    let seeds = rank(dir.path(), &[Tcp]).await;
    let nodes = Arc::new(rank(dir.path(), &[Ipc, Tcp]).await);
    let others = Arc::new(rank(dir.path(), &[Ipc]).await);
    let [seed, node, other] = [1, 2, 3].map(arena);

    let (_seed, from_seed) = offered(&seeds, &seed).await;
    let (_node, from_node) = offered(&nodes, &node).await;
    assert_eq!(from_node.iter().map(|l| l.transport).collect::<Vec<_>>(), [Ipc, Tcp]);
    let (tell, told) = tokio::sync::oneshot::channel();
    let fill = async {
        // Half of it now, the rest once the last of the chain has some: chunk by chunk, not node by node.
        let half = 5 * BLOCK;
        let write = |range: ByteRange| {
            let bytes: Vec<u8> = (range.start..range.end).map(byte).collect();
            seed.copy_in(range.start, &bytes).unwrap();
            seed.publish(ShardId(0), range.end).unwrap();
        };
        write(ByteRange::new(0, half));
        assert!(told.await.unwrap() <= half);
        write(ByteRange::new(half, PAYLOAD));
    };
    let (first, second, ()) = tokio::join!(
        clone(&nodes, &node, from_seed, None),
        clone(&others, &other, from_node, Some(tell)),
        fill
    );
    assert_eq!((first.1, second.1), (Tcp, Ipc));
    assert_eq!((first.0.bytes, second.0.bytes), (PAYLOAD, PAYLOAD));
    assert_eq!((first.0.losses, second.0.losses), (0, 0));
}
