//! A source that was lost is let go of before another is sought: an import pins the exporter's memory.
#![allow(clippy::unwrap_used)]

use async_trait::async_trait;
use flashboot_backend_mock::{Fault, MockConfig, Network};
use flashboot_core::{
    Arena, ArenaSpec, Error, Generation, Geometry, HandleExchange, InFlight, Kind, Locator, Mover, Observed,
    PeerId, Pull, Result, ShardId,
    replica::{Assignment, Policy},
    schedule::Schedule,
};
use flashboot_driver::{Job, Limits, Sources, replicate};
use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

const CHUNK: u64 = 4096;
const SECOND: Duration = Duration::from_secs(1);

/// A mover that is counted for as long as it lives.
#[derive(Debug)]
struct Counted(Box<dyn Mover>, Arc<AtomicUsize>);

#[async_trait]
impl Mover for Counted {
    fn generation(&self) -> Generation {
        self.0.generation()
    }

    async fn observe(&self, shard: ShardId, at_least: u64, wait: Duration) -> Result<Observed> {
        self.0.observe(shard, at_least, wait).await
    }

    fn start(&self, pull: Pull) -> Result<Box<dyn InFlight>> {
        self.0.start(pull)
    }

    fn remarks(&self) -> Vec<String> {
        self.0.remarks()
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.1.fetch_sub(1, Ordering::Relaxed);
    }
}

struct Peers {
    exchange: Arc<dyn HandleExchange>,
    arena: Arc<dyn Arena>,
    locator: Locator,
    living: Arc<AtomicUsize>,
    living_when_sought: Mutex<Option<usize>>,
}

#[async_trait]
impl Sources for Peers {
    async fn attach(&self, _: PeerId) -> Result<Box<dyn Mover>> {
        let mover = self.exchange.import(&self.locator, Arc::clone(&self.arena), SECOND).await?;
        self.living.fetch_add(1, Ordering::Relaxed);
        Ok(Box::new(Counted(mover, Arc::clone(&self.living))))
    }

    async fn replace(&self, _: PeerId, _: ShardId, _: u64, _: &Error) -> Option<PeerId> {
        *self.living_when_sought.lock().unwrap() = Some(self.living.load(Ordering::Relaxed));
        None
    }
}

/// The pull of the first chunk fails while the word is waited for that lets the second begin.
#[tokio::test(start_paused = true)]
async fn a_lost_source_is_let_go_of_though_its_word_was_waited_for() {
    let faults = vec![Fault::Drop { host: 0, pull: 0 }];
    let network = Network::new(MockConfig { faults, ..MockConfig::default() });
    let geometry = Geometry::new(2 * CHUNK, CHUNK, CHUNK, 1).unwrap();
    let arena = |rank| network.arena(rank, ArenaSpec { payload: 2 * CHUNK, shards: 1 }).unwrap();
    let (seed, clone) = (arena(0), arena(1));
    seed.begin(Generation::from_random(1));
    seed.publish(ShardId(0), CHUNK).unwrap();
    clone.begin(Generation::from_random(2));
    let export = network.endpoint(0).export(seed, SECOND).await.unwrap();
    let peers = Arc::new(Peers {
        exchange: network.endpoint(1),
        arena: Arc::clone(&clone),
        locator: export.locator().clone(),
        living: Arc::default(),
        living_when_sought: Mutex::default(),
    });
    let job = Job {
        arena: clone,
        assignment: Assignment::of(Schedule::Chain { clones: 1 }, 1, geometry),
        expected: None,
        policy: Policy { stall: 100 * SECOND, ..Policy::default() },
        limits: Limits { pull: SECOND, quiesce: SECOND, floor: None },
    };
    let ended = replicate(job, Arc::<Peers>::clone(&peers), &mut ()).await;
    assert_eq!(ended.unwrap_err().kind(), Kind::SourceLost);
    assert_eq!(*peers.living_when_sought.lock().unwrap(), Some(0), "movers of the lost source");
}
