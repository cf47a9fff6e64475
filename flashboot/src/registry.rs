//! Transports by name: which there are, which work here, and which reaches a given peer.
//!
//! A backend joins by one `register` line in [`Registry::standard`]. `auto` tries imex, ipc, rdma and tcp in this
//! order **for each pair**, of the kinds of memory at both ends, says why each was passed over, and never chooses the mock.

use crate::{
    config::{Choice, Memory, TRANSPORTS},
    network::Network,
};
use async_trait::async_trait;
use flashboot_backend_imex::{ImexConfig, ImexTransport};
use flashboot_backend_ipc::{IpcConfig, IpcTransport};
use flashboot_backend_rdma::{RdmaConfig, RdmaTransport};
use flashboot_backend_tcp::{TcpConfig, TcpTransport};
use flashboot_core::{
    Arena, Error, Export, HandleExchange, Kind, Location, Locator, MemoryKind, Mover, Readiness, Result,
    Transport, TransportName, check_served,
};
use flashboot_cuda::Device;
use flashboot_memory::{CopyEngine, CopyEngineConfig};
use serde::{Deserialize, Serialize};
use std::{fmt, path::PathBuf, sync::Arc, time::Duration};
use tracing::warn;

/// What any backend may want to know to open an endpoint.
#[derive(Debug, Clone)]
pub struct Settings {
    /// A directory of mode 0700 for sockets.
    pub sockets: PathBuf,
    /// How memory is made and how many threads copy.
    pub memory: Memory,
    /// The GPU whose memory is to be served and filled, by UUID, PCI address or `cuda:N`; `None`: host memory.
    pub device: Option<String>,
    /// What crosses between hosts.
    pub network: Network,
}

impl Settings {
    fn copying(&self) -> CopyEngineConfig {
        CopyEngineConfig { threads: self.memory.threads.and_then(|n| usize::try_from(n).ok()) }
    }

    fn kind(&self) -> MemoryKind {
        if self.device.is_some() { MemoryKind::Gpu } else { MemoryKind::Host }
    }
}

fn ipc(settings: &Settings) -> IpcConfig {
    IpcConfig { directory: settings.sockets.clone(), device: settings.device.clone(), ..IpcConfig::default() }
}

fn imex(settings: &Settings) -> ImexConfig {
    let config = ImexConfig::default();
    ImexConfig { device: settings.device.clone().unwrap_or_else(|| config.device.clone()), ..config }
}

fn rdma(settings: &Settings) -> RdmaConfig {
    // Which of the host's NICs are near; without a GPU's address, by the memory's node.
    let pci = settings.device.as_deref().and_then(|device| Device::find(device).ok());
    settings.network.rdma(pci.map(|device| device.pci_address().to_owned()), settings.memory.numa_node)
}

fn tcp(settings: &Settings) -> TcpConfig {
    settings.network.tcp(settings.device.as_deref())
}

type Pairs = [(MemoryKind, MemoryKind)];

/// A transport that was not used, and why.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PassedOver {
    /// Its name.
    pub name: TransportName,
    /// What was found.
    pub reason: String,
    /// What to do about it.
    pub remedy: String,
}

/// A [`Transport`] of any configuration type.
#[async_trait]
trait Backend: Send + Sync + fmt::Debug {
    fn name(&self) -> TransportName;
    fn serves(&self) -> &'static Pairs;
    async fn probe(&self) -> Readiness;
    async fn probe_pair(&self, peer: &Locator, into: &Location) -> Readiness;
    async fn open(&self, settings: &Settings) -> Result<Arc<dyn HandleExchange>>;
}

struct Registered<T: Transport> {
    transport: T,
    configure: fn(&Settings) -> T::Config,
}

impl<T: Transport> fmt::Debug for Registered<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.transport.fmt(f)
    }
}

#[async_trait]
impl<T: Transport> Backend for Registered<T> {
    fn name(&self) -> TransportName {
        self.transport.name()
    }

    fn serves(&self) -> &'static Pairs {
        self.transport.serves()
    }

    async fn probe(&self) -> Readiness {
        self.transport.probe().await
    }

    async fn probe_pair(&self, peer: &Locator, into: &Location) -> Readiness {
        self.transport.probe_pair(peer, into).await
    }

    async fn open(&self, settings: &Settings) -> Result<Arc<dyn HandleExchange>> {
        self.transport.open((self.configure)(settings)).await
    }
}

/// The transports of this program.
#[derive(Debug, Default)]
pub struct Registry {
    backends: Vec<Arc<dyn Backend>>,
}

impl Registry {
    /// Every backend this release carries that moves bytes between processes.
    ///
    /// # Errors
    /// [`Kind::Exhausted`] when the system gives no threads to copy with.
    pub fn standard(settings: &Settings) -> Result<Self> {
        let engine = Arc::new(CopyEngine::new(&settings.copying())?);
        let mut registry = Self::default();
        registry.register(ImexTransport::new(imex(settings)), imex);
        registry.register(IpcTransport::new(ipc(settings)).with_engine(engine), ipc);
        registry.register(RdmaTransport::new(rdma(settings)), rdma);
        registry.register(TcpTransport::new(tcp(settings)), tcp);
        Ok(registry)
    }

    /// Adds a backend; `configure` makes its configuration of the common settings.
    pub fn register<T: Transport + 'static>(&mut self, transport: T, configure: fn(&Settings) -> T::Config) {
        self.backends.push(Arc::new(Registered { transport, configure }));
    }

    /// Opens every transport that is wanted and works on this machine.
    ///
    /// # Errors
    /// [`Kind::Unavailable`] when none does, with what each said; [`Kind::Invalid`] when `choice` is not among
    /// `allow`.
    pub async fn open(
        &self,
        choice: Choice,
        allow: &[TransportName],
        settings: &Settings,
    ) -> Result<Endpoints> {
        let allowed = |name: &TransportName| allow.is_empty() || allow.contains(name);
        let wanted: Vec<TransportName> = match choice {
            Choice::Only(name) if !allowed(&name) => {
                return Err(Error::new(
                    Kind::Invalid,
                    "transport",
                    format!("{name} is not among those allowed"),
                )
                .with_remedy("add it to --allow (replicate.allow), or choose another transport"));
            }
            Choice::Only(name) => vec![name],
            Choice::Auto => {
                let tried = TRANSPORTS.into_iter().filter(|name| *name != TransportName::Mock);
                tried.filter(allowed).collect()
            }
        };
        let (mut ready, mut passed) = (Vec::new(), Vec::new());
        for name in wanted {
            match self.open_one(name, settings).await {
                Ok((backend, exchange)) => ready.push(Endpoint { name, exchange, backend: Some(backend) }),
                Err((reason, remedy)) => passed.push(PassedOver { name, reason, remedy }),
            }
        }
        if ready.is_empty() {
            return Err(match (choice, passed.as_slice()) {
                (Choice::Only(name), [only]) => {
                    let detail = format!("{name} does not work here: {}", only.reason);
                    let error = Error::new(Kind::Unavailable, "transport", detail);
                    if only.remedy.is_empty() { error } else { error.with_remedy(only.remedy.clone()) }
                }
                _ => none_left("no transport works on this machine", &passed),
            });
        }
        Ok(Endpoints { ready, passed })
    }

    async fn open_one(
        &self,
        name: TransportName,
        settings: &Settings,
    ) -> Result<(Arc<dyn Backend>, Arc<dyn HandleExchange>), (String, String)> {
        let backend = self.probe_one(name, settings).await?;
        match backend.open(settings).await {
            Ok(exchange) => Ok((Arc::clone(backend), exchange)),
            Err(e) => Err((e.to_string(), e.remedy().unwrap_or_default().to_owned())),
        }
    }

    fn find(&self, name: TransportName) -> Option<&Arc<dyn Backend>> {
        self.backends.iter().find(|backend| backend.name() == name)
    }

    /// Whether this release has the transport `name`.
    pub fn carries(&self, name: TransportName) -> bool {
        self.find(name).is_some()
    }

    /// Whether `name` reads or fills memory of the kind that `settings` are about.
    pub fn serves(&self, name: TransportName, settings: &Settings) -> bool {
        self.find(name).is_some_and(|backend| serves(&**backend, settings.kind()))
    }

    /// Whether `name` works on this machine for the memory of `settings`, found by trying.
    ///
    /// # Errors
    /// Why not, and what to do.
    pub async fn probe(&self, name: TransportName, settings: &Settings) -> Result<(), PassedOver> {
        let probed = self.probe_one(name, settings).await;
        probed.map(drop).map_err(|(reason, remedy)| PassedOver { name, reason, remedy })
    }

    async fn probe_one(
        &self,
        name: TransportName,
        settings: &Settings,
    ) -> Result<&Arc<dyn Backend>, (String, String)> {
        let Some(backend) = self.find(name) else {
            let remedy = "choose another transport or a release that carries it";
            return Err(("is not part of this release".into(), remedy.into()));
        };
        let kind = settings.kind();
        if !serves(&**backend, kind) {
            let own: Vec<_> =
                backend.serves().iter().map(|(from, into)| format!("{from} to {into}")).collect();
            let reason = format!("moves {} memory, and the arenas are in {kind} memory", own.join(" and "));
            return Err((reason, "choose another transport".into()));
        }
        match backend.probe().await {
            Readiness::Ready => Ok(backend),
            Readiness::Unavailable { reason, remedy } => Err((reason, remedy)),
        }
    }
}

fn serves(backend: &dyn Backend, kind: MemoryKind) -> bool {
    backend.serves().iter().any(|(from, into)| *from == kind || *into == kind)
}

fn none_left(what: &str, passed: &[PassedOver]) -> Error {
    let each: Vec<_> = passed.iter().map(|p| format!("{}: {}", p.name, p.reason)).collect();
    let error = Error::new(Kind::Unavailable, "transport", format!("{what} ({})", each.join("; ")));
    match passed.iter().find(|p| !p.remedy.is_empty()) {
        Some(p) => error.with_remedy(p.remedy.clone()),
        None if passed.is_empty() => Error::new(
            Kind::Unavailable,
            "transport",
            format!("{what}: none that is allowed moves bytes between processes"),
        )
        .with_remedy("add one, such as ipc, to --allow (replicate.allow), or choose --transport mock"),
        None => error,
    }
}

#[derive(Debug)]
struct Endpoint {
    name: TransportName,
    exchange: Arc<dyn HandleExchange>,
    backend: Option<Arc<dyn Backend>>,
}

/// The transports opened in one process, in order of preference.
#[derive(Debug)]
pub struct Endpoints {
    ready: Vec<Endpoint>,
    passed: Vec<PassedOver>,
}

/// One hop that works.
#[derive(Debug)]
pub struct Imported {
    /// What moves the bytes.
    pub mover: Box<dyn Mover>,
    /// By which transport.
    pub transport: TransportName,
    /// What came before it in the order and was passed over.
    pub passed: Vec<PassedOver>,
}

impl Endpoints {
    /// One endpoint that needs no choosing.
    pub fn only(name: TransportName, exchange: Arc<dyn HandleExchange>) -> Self {
        Self { ready: vec![Endpoint { name, exchange, backend: None }], passed: Vec::new() }
    }

    /// What is open.
    pub fn names(&self) -> Vec<TransportName> {
        self.ready.iter().map(|endpoint| endpoint.name).collect()
    }

    /// Makes `arena` readable by every transport that is open and serves its memory. One that fails is logged and left
    /// out: readers say of it that the peer does not offer it.
    ///
    /// # Errors
    /// The last transport's own when none could, [`Kind::Unavailable`] when none serves this memory.
    pub async fn export(&self, arena: &Arc<dyn Arena>, timeout: Duration) -> Result<Vec<Box<dyn Export>>> {
        let kind = arena.location().memory();
        let mut exports = Vec::new();
        let mut last = None;
        for Endpoint { name, exchange, backend } in &self.ready {
            if backend.as_ref().is_some_and(|b| b.serves().iter().all(|(from, _)| *from != kind)) {
                continue;
            }
            match exchange.export(Arc::clone(arena), timeout).await {
                Ok(export) => exports.push(export),
                Err(error) => {
                    warn!(transport = %name, %error, "cannot export; readers will use another transport");
                    last = Some(error);
                }
            }
        }
        if exports.is_empty() {
            return Err(last.unwrap_or_else(|| {
                let open: Vec<_> = self.ready.iter().map(|endpoint| endpoint.name.as_str()).collect();
                let detail = format!("none of {} serves {kind} memory", open.join(", "));
                Error::new(Kind::Unavailable, "export", detail)
            }));
        }
        Ok(exports)
    }

    /// Imports a peer's arena by the first transport that reaches it; `locators` are all it offers.
    ///
    /// # Errors
    /// The transport's own error when there was one to try, [`Kind::Unavailable`] when several failed or none
    /// is common to both sides, [`Kind::ContextLost`] when `into` is beyond use.
    pub async fn import(
        &self,
        locators: &[Locator],
        into: &Arc<dyn Arena>,
        timeout: Duration,
    ) -> Result<Imported> {
        // What fails in a process whose GPU is lost says nothing of transports, and so nothing is tried.
        into.usable()?;
        let to = into.location();
        let mut passed = self.passed.clone();
        let mut errors = Vec::new();
        for Endpoint { name, exchange, backend } in &self.ready {
            let mut pass = |reason: String, remedy: &str| {
                passed.push(PassedOver { name: *name, reason, remedy: remedy.to_owned() });
            };
            let Some(locator) = locators.iter().find(|locator| locator.transport == *name) else {
                pass("the peer does not offer it".into(), "");
                continue;
            };
            if let Some(backend) = backend
                && let Err(e) =
                    check_served(*name, backend.serves(), (locator.location.memory(), to.memory()))
            {
                pass(e.detail().to_owned(), e.remedy().unwrap_or_default());
                errors.push(e);
                continue;
            }
            // With nothing to fall back to, the import's own error says more than a probe's.
            if let (Some(backend), true) = (backend, self.ready.len() > 1) {
                let probed = tokio::time::timeout(timeout, backend.probe_pair(locator, &to)).await;
                match probed.unwrap_or(Readiness::Unavailable {
                    reason: format!("did not answer within {timeout:?}"),
                    remedy: String::new(),
                }) {
                    Readiness::Ready => {}
                    Readiness::Unavailable { reason, remedy } => {
                        pass(reason, &remedy);
                        continue;
                    }
                }
            }
            match exchange.import(locator, Arc::clone(into), timeout).await {
                Ok(mover) => {
                    // What comes later in the order was not passed over but not needed.
                    passed.retain(|p| p.name < *name);
                    return Ok(Imported { mover, transport: *name, passed });
                }
                Err(e) => {
                    pass(e.to_string(), e.remedy().unwrap_or_default());
                    errors.push(e);
                }
            }
        }
        into.usable()?;
        match (errors.pop(), errors.is_empty()) {
            (Some(only), true) if only.remedy().is_some() => Err(only),
            (Some(only), true) => Err(self.advised(only, locators, &to, timeout).await),
            _ => Err(none_left("no transport reaches the peer", &passed)),
        }
    }
}

impl Endpoints {
    /// `error`, of the only transport there was to try, with what its probe says can be done about this pair.
    async fn advised(&self, error: Error, locators: &[Locator], to: &Location, within: Duration) -> Error {
        let [Endpoint { name, backend: Some(backend), .. }] = self.ready.as_slice() else { return error };
        let Some(locator) = locators.iter().find(|locator| locator.transport == *name) else { return error };
        match tokio::time::timeout(within, backend.probe_pair(locator, to)).await {
            Ok(Readiness::Unavailable { remedy, .. }) if !remedy.is_empty() => error.with_remedy(remedy),
            _ => error,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashboot_core::{ArenaSpec, Caps, Generation};
    use flashboot_memory::{HostArena, HostArenaConfig};

    #[derive(Debug)]
    struct Absent(TransportName);

    #[async_trait]
    impl Transport for Absent {
        type Config = ();
        fn name(&self) -> TransportName {
            self.0
        }
        fn serves(&self) -> &'static Pairs {
            &[(MemoryKind::Host, MemoryKind::Host)]
        }
        fn caps(&self, _: MemoryKind) -> Caps {
            Caps {
                revocable: false,
                enforces_read_only: false,
                source_can_throttle: false,
                outlives_exporter: false,
                poisons_context: false,
                reports_death: false,
                closes_with_export: false,
            }
        }
        async fn probe(&self) -> Readiness {
            Readiness::Unavailable { reason: "no such card".into(), remedy: "buy one".into() }
        }
        async fn probe_pair(&self, _: &Locator, _: &Location) -> Readiness {
            self.probe().await
        }
        async fn open(&self, (): ()) -> Result<Arc<dyn HandleExchange>> {
            Err(Error::new(Kind::Unavailable, "open", "no such card"))
        }
    }

    fn settings() -> Settings {
        Settings {
            sockets: "/nonexistent".into(),
            memory: Memory::default(),
            device: None,
            network: Network::default(),
        }
    }

    #[tokio::test]
    async fn auto_says_why_each_was_passed_over_and_never_tries_the_mock() {
        let mut registry = Registry::default();
        registry.register(Absent(TransportName::Rdma), |_| ());
        registry.register(Absent(TransportName::Mock), |_| ());
        let e = registry.open(Choice::Auto, &[], &settings()).await.unwrap_err();
        assert_eq!(e.kind(), Kind::Unavailable);
        assert_eq!(
            e.detail(),
            "no transport works on this machine (imex: is not part of this release; ipc: is not part of this \
             release; rdma: no such card; tcp: is not part of this release)"
        );
    }

    #[tokio::test]
    async fn a_transport_of_other_memory_is_not_even_probed() {
        let mut settings = settings();
        let mut registry = Registry::default();
        registry.register(ImexTransport::new(imex(&settings)), imex);
        let e = registry.open(Choice::Only(TransportName::Imex), &[], &settings).await.unwrap_err();
        assert_eq!(
            e.detail(),
            "imex does not work here: moves GPU to GPU memory, and the arenas are in host memory"
        );
        settings.device = Some("cuda:0".into());
        let mut registry = Registry::default();
        registry.register(Absent(TransportName::Tcp), |_| ());
        let e = registry.open(Choice::Only(TransportName::Tcp), &[], &settings).await.unwrap_err();
        assert!(e.detail().contains("the arenas are in GPU memory"), "{e}");
    }

    #[derive(Debug)]
    struct Untouched;

    #[async_trait]
    impl HandleExchange for Untouched {
        async fn export(&self, _: Arc<dyn Arena>, _: Duration) -> Result<Box<dyn Export>> {
            Err(Error::new(Kind::Invalid, "export", "asked all the same"))
        }
        async fn import(&self, _: &Locator, _: Arc<dyn Arena>, _: Duration) -> Result<Box<dyn Mover>> {
            Err(Error::new(Kind::Invalid, "import", "asked all the same"))
        }
    }

    #[tokio::test]
    async fn a_pair_of_memories_that_is_not_served_is_passed_over_by_name() {
        let registered = Registered { transport: Absent(TransportName::Rdma), configure: |_| () };
        let endpoints = Endpoints {
            ready: vec![Endpoint {
                name: TransportName::Rdma,
                exchange: Arc::new(Untouched),
                backend: Some(Arc::new(registered)),
            }],
            passed: Vec::new(),
        };
        let spec = ArenaSpec { payload: 9, shards: 1 };
        let into: Arc<dyn Arena> = HostArena::create(spec, &HostArenaConfig::default()).unwrap().0;
        let locator = Locator {
            transport: TransportName::Rdma,
            generation: Generation::from_random(5),
            payload: 9,
            capacity: into.capacity(),
            shards: 1,
            location: Location::Gpu { boot_id: "b".into(), uuid: "GPU-0".into() },
            endpoint: "anywhere".into(),
        };
        let e = endpoints.import(&[locator], &into, Duration::from_secs(1)).await.unwrap_err();
        assert_eq!(e.kind(), Kind::Mismatch);
        assert_eq!(e.detail(), "rdma moves host to host memory, not GPU to host");
        let e = endpoints.export(&into, Duration::from_secs(1)).await.unwrap_err();
        assert_eq!(e.detail(), "asked all the same", "host memory it serves");
    }

    #[tokio::test]
    async fn what_is_not_allowed_is_not_tried() {
        let mut registry = Registry::default();
        registry.register(Absent(TransportName::Rdma), |_| ());
        let e = registry.open(Choice::Auto, &[TransportName::Rdma], &settings()).await.unwrap_err();
        assert_eq!(e.detail(), "no transport works on this machine (rdma: no such card)");
        assert_eq!(e.remedy(), Some("buy one"));
        let only = Choice::Only(TransportName::Tcp);
        let e = registry.open(only, &[TransportName::Rdma], &settings()).await.unwrap_err();
        assert_eq!(e.kind(), Kind::Invalid);
    }
}
