//! Endpoints over a stand-in provider: what each failure of a verb or a completion becomes, and what is left behind.

mod ends;
mod opening;
mod pulls;

use super::{Lane, plan::Window};
use crate::{
    config::RdmaConfig,
    counters::Counters,
    endpoint::purpose,
    exchange::RdmaExchange,
    held::Held,
    rail::open_all,
    verbs::{Event, Status, fake::Fake},
};
use flashboot_channel::{Dial, Endpoint, Liveness, Security, dial};
use flashboot_core::{
    Arena, ArenaSpec, ByteRange, ByteSize, Code, Error, Export, Generation, HandleExchange as _, InFlight,
    Kind, Landed, Mover, Pull, ShardId, digest,
};
use flashboot_memory::{HostArena, HostArenaConfig};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};

const SETUP: Duration = Duration::from_secs(10);
const BLOCK: u64 = 64 << 10;
const PAYLOAD: u64 = 40 * BLOCK + 777;
const WHOLE: ByteRange = ByteRange { start: 0, end: PAYLOAD };

fn byte(at: u64) -> u8 {
    (at.wrapping_mul(0x9E37_79B9) >> 13) as u8
}

fn config(devices: &[&str]) -> RdmaConfig {
    RdmaConfig {
        devices: devices.iter().map(|name| (*name).to_owned()).collect(),
        message: ByteSize(16 << 10),
        hash_threads: Some(1),
        ..RdmaConfig::default()
    }
}

fn arena() -> Arc<dyn Arena> {
    HostArena::create(ArenaSpec { payload: PAYLOAD, shards: 1 }, &HostArenaConfig::default()).unwrap().0
}

/// A seed on device `seed`, and a reader's hop to it.
struct World {
    // Dropped in this order.
    mover: Box<dyn Mover>,
    into: Arc<dyn Arena>,
    reader: RdmaExchange,
    _export: Box<dyn Export>,
    _seed: RdmaExchange,
}

impl World {
    async fn new(fake: &Fake, reader: RdmaConfig) -> Result<Self, Error> {
        let seed = RdmaExchange::open(&fake.verbs(), &config(&["seed"]))?;
        let source = arena();
        source.begin(Generation::from_random(5));
        let bytes: Vec<u8> = (0..PAYLOAD).map(byte).collect();
        source.copy_in(0, &bytes)?;
        source.publish(ShardId(0), PAYLOAD)?;
        let export = seed.export(Arc::clone(&source), SETUP).await?;
        let reader = RdmaExchange::open(&fake.verbs(), &reader)?;
        let into = arena();
        let mover = reader.import(export.locator(), Arc::clone(&into), SETUP).await?;
        Ok(Self { mover, into, reader, _export: export, _seed: seed })
    }

    async fn pull(&self) -> Result<Landed, Error> {
        self.mover.start(Pull { range: WHOLE, hash: Some(BLOCK) })?.quiesced().await
    }

    #[track_caller]
    fn expect_payload(&self) {
        let mut found = vec![0; PAYLOAD as usize];
        self.into.copy_out(0, &mut found).unwrap();
        assert!(found.iter().zip(0..).all(|(found, at)| *found == byte(at)));
    }

    /// Whatever happened, the range is the owner's again.
    #[track_caller]
    fn expect_free(&self) {
        self.into.fill(WHOLE, 1).unwrap();
    }
}

fn run(work: impl Future<Output = ()>) {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(work);
}
