//! The simulated hosts and what they export.

use crate::{Fault, MockArena, MockConfig, exchange::Endpoint};
use async_trait::async_trait;
use flashboot_core::{
    Arena, ArenaSpec, Caps, Generation, HandleExchange, Location, Locator, MemoryKind, Readiness, Result,
    Transport, TransportName,
};
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};
use tokio::sync::watch;

/// Simulated hosts that can reach one another. Cloning shares it.
#[derive(Debug, Clone)]
pub struct Network(pub(crate) Arc<Inner>);

#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) config: MockConfig,
    state: Mutex<State>,
    /// Counts deaths, so that whoever waits on a host hears of its own.
    pub(crate) deaths: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct State {
    dead: BTreeSet<u32>,
    exports: BTreeMap<Generation, Arc<MockArena>>,
    pulls: BTreeMap<u32, u64>,
    movers: usize,
}

impl Network {
    /// A network that behaves as `config` says.
    pub fn new(config: MockConfig) -> Self {
        Self(Arc::new(Inner { config, state: Mutex::default(), deaths: watch::Sender::new(0) }))
    }

    /// The endpoint of `host`.
    pub fn endpoint(&self, host: u32) -> Arc<dyn HandleExchange> {
        Arc::new(Endpoint { network: self.clone(), host })
    }

    /// A new arena on `host`.
    pub fn arena(&self, host: u32, spec: ArenaSpec) -> Result<Arc<dyn Arena>> {
        Ok(Arc::new(MockArena::new(host, spec)?))
    }

    /// Ends `host`: its exports are gone and every pull from it fails.
    pub fn kill(&self, host: u32) {
        let mut state = self.state();
        state.dead.insert(host);
        state.exports.retain(|_, arena| arena.host() != host);
        drop(state);
        self.0.deaths.send_modify(|n| *n += 1);
    }

    /// Exports and imports that are alive, for leak checks.
    pub fn handles(&self) -> usize {
        let state = self.state();
        state.exports.len() + state.movers
    }

    /// Whether `host` was killed, by [`kill`](Self::kill) or by a fault.
    pub fn is_dead(&self, host: u32) -> bool {
        self.state().dead.contains(&host)
    }

    pub(crate) fn export(&self, generation: Generation, arena: Arc<MockArena>) {
        self.state().exports.insert(generation, arena);
    }

    pub(crate) fn unexport(&self, generation: Generation) {
        self.state().exports.remove(&generation);
    }

    pub(crate) fn exported(&self, generation: Generation) -> Option<Arc<MockArena>> {
        self.state().exports.get(&generation).cloned()
    }

    pub(crate) fn count_mover(&self, by: isize) {
        let mut state = self.state();
        state.movers = state.movers.saturating_add_signed(by);
    }

    /// The faults of the next pull from `host`, which is counted.
    pub(crate) fn next_pull(&self, host: u32) -> Vec<Fault> {
        let mut state = self.state();
        let pull = state.pulls.entry(host).or_default();
        let at = (host, *pull);
        *pull += 1;
        self.0.config.faults.iter().filter(|fault| fault.at() == at).cloned().collect()
    }

    /// Whether the progress words of `host` stand still by now.
    pub(crate) fn is_stalled(&self, host: u32) -> bool {
        let done = self.state().pulls.get(&host).copied().unwrap_or(0);
        self.0
            .config
            .faults
            .iter()
            .any(|fault| matches!(fault, Fault::Stall { host: h, pull } if *h == host && *pull < done))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The mock as a [`Transport`]; it opens endpoints of one network.
#[derive(Debug, Clone)]
pub struct MockTransport(pub Network);

#[async_trait]
impl Transport for MockTransport {
    /// The host to open an endpoint on.
    type Config = u32;

    fn name(&self) -> TransportName {
        TransportName::Mock
    }

    fn serves(&self) -> &'static [(MemoryKind, MemoryKind)] {
        &[(MemoryKind::Mock, MemoryKind::Mock)]
    }

    fn caps(&self, _: MemoryKind) -> Caps {
        Caps {
            revocable: false,
            enforces_read_only: true,
            source_can_throttle: false,
            outlives_exporter: false,
            poisons_context: false,
            reports_death: true,
            closes_with_export: true,
        }
    }

    async fn probe(&self) -> Readiness {
        Readiness::Ready
    }

    async fn probe_pair(&self, peer: &Locator, _: &Location) -> Readiness {
        match self.exported(peer) {
            true => Readiness::Ready,
            false => Readiness::Unavailable {
                reason: format!("no host of this network exports generation {}", peer.generation),
                remedy: "use a locator of this process: the mock reaches no other".into(),
            },
        }
    }

    async fn open(&self, config: u32) -> Result<Arc<dyn HandleExchange>> {
        Ok(self.0.endpoint(config))
    }
}

impl MockTransport {
    fn exported(&self, peer: &Locator) -> bool {
        peer.transport == TransportName::Mock && self.0.exported(peer.generation).is_some()
    }
}
