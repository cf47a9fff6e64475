//! What a seed and a clone have in common: transports, an arena, and a place in the service.

use crate::{
    config::{Config, Devices},
    network::Network,
    observe::Observed,
    registry::{Endpoints, Registry, Settings},
    replicate::{RUN_PREFIX, host_arena, resolve_devices},
    scratch::Scratch,
};
use flashboot_core::{Arena, ArenaSpec, Error, Export, Generation, Kind, Location, Result, TransportName};
use flashboot_cuda::{CudaArena, CudaArenaConfig, Device};
use flashboot_memory::boot_id;
use flashboot_rendezvous::{
    Client, Membership,
    protocol::{Content, MemberId, Place, Registration, Role, readers_of},
};
use std::{path::PathBuf, sync::Arc, time::Duration};
use tokio::time::{Instant, sleep, timeout};
use tracing::warn;

/// How often readers are counted while they are drained.
const COUNT_EVERY: Duration = Duration::from_millis(100);
/// How long the service may take to hear that a member goes.
const GOODBYE: Duration = Duration::from_secs(2);
/// How long a service that does not answer is asked who still reads.
const SILENCE: Duration = Duration::from_secs(3);

/// How many readers a member serves at once.
const READERS: u32 = 4;

/// Where a member is, as far as the machine does not know it itself.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Labels {
    /// A name that stays through restarts.
    pub name: Option<String>,
    /// The NVLink domain.
    pub domain: Option<String>,
    /// The rail.
    pub rail: Option<String>,
    /// The rack.
    pub rack: Option<String>,
}

/// What a seed or a clone is to be.
#[derive(Debug, Clone)]
pub struct Seat {
    /// Replication, memory, network.
    pub config: Config,
    /// Where a directory of mode 0700 for sockets is made; a short path.
    pub directory: PathBuf,
    /// Where it is.
    pub labels: Labels,
    /// How many readers it serves at once.
    pub readers: u32,
    /// How long it waits for the service, for what it asks for, and for another source.
    pub patience: Duration,
    /// How long readers may take to end, once it is asked to go.
    pub drain: Duration,
    /// What others see of this process.
    pub observed: Observed,
}

impl Seat {
    /// With what a member has where nothing else is said.
    pub fn new(config: Config, directory: PathBuf) -> Self {
        Self {
            config,
            directory,
            labels: Labels::default(),
            readers: READERS,
            patience: Duration::from_secs(60),
            drain: Duration::from_secs(30),
            observed: Observed::default(),
        }
    }
}

/// Transports that are open, and the directory that they have their sockets in.
pub(super) struct Opened {
    pub(super) endpoints: Arc<Endpoints>,
    device: Option<Device>,
    pub(super) transports: Vec<TransportName>,
    _scratch: Scratch,
}

/// An arena that others can read.
pub(crate) struct Held {
    pub(crate) arena: Arc<dyn Arena>,
    pub(crate) generation: Generation,
    /// Dropped, nobody can begin to read.
    pub(crate) exports: Vec<Box<dyn Export>>,
}

impl Held {
    /// What the member that holds it says of itself: of a seed, that all of the content is there.
    pub(crate) fn registration(
        &self,
        (role, content): (Role, Content),
        secret: u64,
        labels: &Labels,
        transports: &[TransportName],
        readers: u32,
    ) -> Result<Registration> {
        Ok(Registration {
            member: MemberId(self.generation),
            secret,
            name: labels.name.clone(),
            role,
            holds: if role == Role::Seed { content.bytes } else { 0 },
            content,
            place: self.place(labels)?,
            locators: self.locators(),
            transports: transports.to_vec(),
            readers,
            expect: None,
            upstream: None,
            epoch: 0,
            trace: None,
            rate: None,
        })
    }
}

impl Held {
    /// Where it is.
    pub(super) fn place(&self, labels: &Labels) -> Result<Place> {
        let Labels { domain, rail, rack, .. } = labels.clone();
        let gpu = match self.arena.location() {
            Location::Gpu { uuid, .. } => Some(uuid),
            _ => None,
        };
        Ok(Place { host: boot_id()?, gpu, nics: nics(), domain, rail, rack })
    }

    /// How it can be read, by every transport.
    pub(super) fn locators(&self) -> Vec<String> {
        self.exports.iter().map(|export| export.locator().encode()).collect()
    }
}

/// Bits for what must not be guessed or met twice.
pub(crate) fn random() -> Result<u64> {
    getrandom::u64().map_err(|e| {
        Error::new(Kind::Unavailable, "getrandom", format!("the system gives no random bits: {e}"))
    })
}

/// Runs `work` on a thread that may block.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|e| {
        Err(Error::new(Kind::Exhausted, "thread", format!("a thread that may block: {e}")))
    })
}

/// A trace's id, random: 32 hexadecimal digits, as W3C's trace context has them.
pub(super) fn new_trace() -> Result<String> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).map_err(|e| {
        Error::new(Kind::Unavailable, "getrandom", format!("the system gives no random bits: {e}"))
    })?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

impl Seat {
    /// Everything about the network.
    pub(super) fn network(&self) -> Network {
        self.config.network()
    }

    /// Opens every transport that is wanted and works.
    pub(super) async fn open(&self) -> Result<Opened> {
        let replicate = &self.config.replicate;
        let devices = &replicate.device;
        let mut found = resolve_devices(devices, replicate.setup_timeout).await?;
        if found.len() > 1 || matches!(devices, Devices::All) && found.is_empty() {
            let detail = format!("{} GPUs, and one process holds one rank image: say which", found.len());
            return Err(Error::new(Kind::Invalid, "device", detail));
        }
        let device = found.pop();
        let parent = self.directory.clone();
        let scratch = blocking(move || {
            Scratch::new(&parent, RUN_PREFIX).map_err(|e| {
                Error::from_io("mkdir", &e, format!("a directory for sockets in {}", parent.display()))
            })
        })
        .await?;
        let settings = Settings {
            sockets: scratch.path().to_owned(),
            memory: self.config.memory,
            device: device.as_ref().map(|device| device.uuid().to_owned()),
            network: self.network(),
        };
        let endpoints =
            Registry::standard(&settings)?.open(replicate.transport, &replicate.allow, &settings).await?;
        let transports = endpoints.names();
        Ok(Opened { endpoints: Arc::new(endpoints), device, transports, _scratch: scratch })
    }

    /// Makes an arena for `bytes`; nothing is in it, and nobody can read it yet.
    pub(super) async fn hold(&self, opened: &Opened, bytes: u64) -> Result<Held> {
        self.hold_shards(opened, bytes, 1).await
    }

    /// The same, with a progress word for each of so many shards.
    pub(super) async fn hold_shards(&self, opened: &Opened, bytes: u64, shards: u32) -> Result<Held> {
        let spec = ArenaSpec { payload: bytes, shards };
        let (device, memory) = (opened.device.clone(), self.config.memory);
        let arena = blocking(move || match device {
            Some(device) => {
                let made = CudaArena::create(&device, spec, &CudaArenaConfig::default())?;
                Ok(made.0 as Arc<dyn Arena>)
            }
            None => host_arena(spec, memory),
        })
        .await?;
        self.hold_in(opened, arena).await
    }

    /// The same with an arena that is there already; what is in it is retired.
    pub(super) async fn hold_in(&self, opened: &Opened, arena: Arc<dyn Arena>) -> Result<Held> {
        let generation = Generation::from_random(random()?);
        arena.begin(generation);
        let exports = opened.endpoints.export(&arena, self.config.replicate.import_timeout).await?;
        Ok(Held { arena, generation, exports })
    }

    /// Takes a place in the service.
    pub(super) async fn join(
        &self,
        client: &Arc<Client>,
        opened: &Opened,
        held: &Held,
        (role, content, expect): (Role, Content, Option<u32>),
        manifest: Vec<u8>,
        trace: &str,
    ) -> Result<Membership> {
        let said = Registration {
            expect,
            trace: Some(trace.to_owned()),
            rate: self.config.tcp.rate.map(|rate| rate.0),
            ..held.registration((role, content), random()?, &self.labels, &opened.transports, self.readers)?
        };
        Membership::join(Arc::clone(client), said, Arc::new(manifest), self.patience).await
    }

    /// How long readers may take to end where this is why the member goes: nobody is to read on from damaged memory.
    pub(super) fn drain_after(&self, reason: Option<&Error>) -> Duration {
        if reason.is_some_and(|error| error.kind() == Kind::Corrupt) { Duration::ZERO } else { self.drain }
    }

    /// Says goodbye, and waits until nobody reads any more, as far as the service knows, for at most `drain`. A service that does
    /// not answer is asked for 3 s; readers that it named last have `drain` from then on.
    pub(super) async fn go(&self, client: &Client, membership: Membership, held: Held, drain: Duration) {
        let id = MemberId(held.generation);
        let began = Instant::now();
        let (named, silence) = (membership.readers(), membership.silence());
        membership.leave(GOODBYE.min(drain)).await;
        let left = drain.saturating_sub(silence);
        let mut told = false;
        let mut tell = |what: &str, readers: usize, most: Duration| {
            if !std::mem::replace(&mut told, true) && !most.is_zero() {
                warn!(readers, for_at_most = ?most, "{what}");
            }
        };
        let mut heard = Instant::now();
        loop {
            let asked = timeout(SILENCE, flashboot_rendezvous::status(client)).await;
            match asked {
                Ok(Ok(status)) => {
                    heard = Instant::now();
                    match readers_of(&status, id) {
                        0 => break,
                        readers if began.elapsed() >= drain => {
                            warn!(readers, ?drain, "going although others still read from here");
                            break;
                        }
                        readers => tell("waiting for those who read from here", readers, drain),
                    }
                }
                // Without the service nobody knows who reads, but those that it named last.
                Ok(Err(_)) | Err(_) => {
                    let most = if named > 0 { left.max(SILENCE) } else { SILENCE }.min(drain);
                    tell("the service does not say who reads from here; waiting all the same", named, most);
                    if heard.elapsed() >= most {
                        break;
                    }
                }
            }
            sleep(COUNT_EVERY).await;
        }
        drop(held);
    }
}

/// The host's network devices, but loopback; none where the system does not say.
fn nics() -> Vec<String> {
    let entries = std::fs::read_dir("/sys/class/net").into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let mut names: Vec<_> = names.filter(|name| name != "lo").take(32).collect();
    names.sort();
    names
}
