//! What several tests have in common: arenas, endpoints, and peers that speak the protocol by hand.
#![allow(dead_code, reason = "each test file uses its own part")]

pub(crate) mod netns;
pub(crate) mod relay;

use flashboot_backend_tcp::{
    TcpConfig, TcpTransport,
    wire::{Attach, Attached, Lane, MAX_FRAME},
};
use flashboot_channel::{Channel, Dial, Liveness, Purpose, Security, dial};
use flashboot_core::{
    Arena, ArenaSpec, Export, Generation, HandleExchange, Locator, Mover, Result, ShardId, Transport as _,
};
use flashboot_memory::{HostArena, HostArenaConfig};
use std::{sync::Arc, time::Duration};

pub(crate) const SECOND: Duration = Duration::from_secs(1);
pub(crate) const MIB: u64 = 1 << 20;

/// A host arena with a filling begun.
pub(crate) fn arena(payload: u64) -> Arc<HostArena> {
    let (arena, _) =
        HostArena::create(ArenaSpec { payload, shards: 1 }, &HostArenaConfig::default()).unwrap();
    arena.begin(Generation::from_random(u64::from_le_bytes(random())));
    arena
}

pub(crate) fn random<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty()).unwrap();
    bytes
}

/// What byte `at` of every seed is.
pub(crate) fn byte(at: u64) -> u8 {
    (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as u8
}

/// A filled arena, all of it published.
pub(crate) fn seed(payload: u64) -> Arc<HostArena> {
    let arena = arena(payload);
    let bytes: Vec<u8> = (0..payload).map(byte).collect();
    arena.copy_in(0, &bytes).unwrap();
    arena.publish(ShardId(0), payload).unwrap();
    arena
}

/// Compares every byte with a seed's.
#[track_caller]
pub(crate) fn expect_seed(arena: &HostArena) {
    expect_seed_in(arena);
}

/// The same of any memory.
#[track_caller]
pub(crate) fn expect_seed_in(arena: &dyn Arena) {
    let mut found = vec![0; arena.payload() as usize];
    arena.copy_out(0, &mut found).unwrap();
    let wrong = (0u64..).zip(&found).find(|(at, found)| byte(*at) != **found);
    assert_eq!(wrong, None);
}

/// An endpoint, with what it exports.
pub(crate) struct Source {
    pub(crate) exchange: Arc<dyn HandleExchange>,
    pub(crate) export: Box<dyn Export>,
}

impl Source {
    pub(crate) async fn of(arena: &Arc<HostArena>, config: TcpConfig) -> Self {
        let exchange = TcpTransport::default().open(config).await.unwrap();
        let export = exchange.export(Arc::clone(arena) as _, 5 * SECOND).await.unwrap();
        Self { exchange, export }
    }

    pub(crate) fn locator(&self) -> &Locator {
        self.export.locator()
    }
}

/// A mover from `locator` into `into`, by an endpoint of its own.
pub(crate) async fn import<A: Arena>(
    locator: &Locator,
    into: &Arc<A>,
    config: TcpConfig,
) -> Result<Box<dyn Mover>> {
    let exchange = TcpTransport::default().open(config).await?;
    exchange.import(locator, Arc::clone(into) as _, 5 * SECOND).await
}

/// A connection to what `locator` names, and what the source answers to `attach`.
pub(crate) async fn attaching(locator: &Locator, attach: Attach) -> (Channel, Attached) {
    let purpose = Purpose::new("tcp").unwrap();
    let how = Dial { purpose, timeout: 5 * SECOND, liveness: Liveness::default() };
    let endpoint = locator.endpoint.parse().unwrap();
    let mut channel = dial(&endpoint, &Security::default(), how).await.unwrap();
    channel.send(&attach.encode(), MAX_FRAME, SECOND).await.unwrap();
    let frame = channel.receive(MAX_FRAME, 5 * SECOND).await.unwrap().unwrap();
    (channel, Attached::decode(&frame).unwrap())
}

/// A connection to what `locator` names, attached for `lane`.
pub(crate) async fn attached(locator: &Locator, lane: Lane) -> Channel {
    let attach = Attach { lane, generation: locator.generation.word() };
    let (channel, attached) = attaching(locator, attach).await;
    assert_eq!(attached.refused, None);
    channel
}

/// Whether the source ends the connection, without a word, over `frame`.
pub(crate) async fn ends_over(locator: &Locator, lane: Lane, frame: &[u8]) -> bool {
    let mut channel = attached(locator, lane).await;
    // It may end it while the frame is still going.
    channel.send(frame, 1 << 20, SECOND).await.is_err()
        || matches!(channel.receive(MAX_FRAME, 5 * SECOND).await, Ok(None) | Err(_))
}
