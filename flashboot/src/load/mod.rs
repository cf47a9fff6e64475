//! One rank into memory: sources put together from what a person names, one load over them, and its account.

mod attach;
mod contents;
mod early;
mod live;
mod peer;
mod progress;
mod report;
mod request;
mod seen;
mod wish;

pub use attach::{AttachRequest, attach};
pub use contents::{Contents, Entry, What};
pub use live::{live, one_device};
pub use progress::Progress;
pub use report::Loaded;
pub use request::{FromCheckpoint, FromObject, FromPeer, Request};
pub use seen::{Seen, verify};
pub use wish::{Wish, choose, open_options, word};

use crate::{
    agent,
    config::{Config, Devices, ReadEngine},
    replicate::{resolve_devices, threads, untouched_arena},
    service,
};
use flashboot_checkpoint::{Checkpoint, Image, RankPlan};
use flashboot_core::{Arena, ArenaSpec, Error, Kind, Result};
use flashboot_cuda::{Context, CudaArena, CudaArenaConfig, Device};
use flashboot_loader::{
    budget::Budget,
    io::{Engine, Io, IoConfig},
    memlog::{GpuUse, MemLog},
    pipeline::{FillConfig, Proof},
    source::{
        CheckpointSource, ImageSource, Load, ObjectConfig, ObjectImage, ObjectSource, Source, SourceKind,
        Wanted,
    },
};
use peer::PeerSource;
pub use request::coordinate;
pub(crate) use request::rank_of;
use std::{path::PathBuf, sync::Arc, time::Instant};
use tokio::runtime::Handle;

/// Loads what `request` names and accounts for it. Needs a tokio runtime with IO, time and threads that may block; the arena
/// is given back with the account, and lives as long as the caller keeps it.
///
/// # Errors
/// [`Kind::Invalid`] where nothing was named; what [`Load::run`] ends in.
pub async fn load(request: Request) -> Result<(Arc<dyn Arena>, Loaded)> {
    let Placed { arena, loaded, .. } = place(request, Progress::default()).await?;
    Ok((arena, loaded))
}

/// A rank in memory, and what lies where in it.
#[derive(Debug, Clone)]
pub struct Placed {
    /// The memory.
    pub arena: Arc<dyn Arena>,
    /// The account.
    pub loaded: Loaded,
    /// What lies where.
    pub contents: Contents,
}

/// As [`load`], for who wants to see how far it is, and to use what was loaded by name. A call that is given up while it
/// loads ends on its own thread, and frees the memory then.
///
/// # Errors
/// Those of [`load`].
pub async fn place(mut request: Request, progress: Progress) -> Result<Placed> {
    request.id = request.id.as_deref().map(service::image_id).transpose()?;
    let device = device(&request.config).await?;
    let manifest = match &request.peer {
        // Only where nobody nearer says what the bytes are.
        Some(peer) if request.image.is_none() && request.object.is_none() => {
            match service::look(&peer.request).await {
                Ok(manifest) => Some(manifest),
                // The source says so again, and is passed over.
                Err(_) if request.checkpoint.is_some() => None,
                Err(e) => return Err(e),
            }
        }
        _ => None,
    };
    let runtime = Handle::current();
    let work = move || {
        let context = device.as_ref().map(Context::open).transpose()?;
        let began = Instant::now();
        let named = sources(&request, manifest, context.as_ref(), &runtime)?;
        run(&request, named, context, began, &progress)
    };
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|e| {
        Err(Error::new(Kind::Exhausted, "thread", format!("a thread that may block: {e}")))
    })
}

/// Where this machine's memory is now, by the kernel's counters and by GPU and process.
pub fn memory(phase: &str) -> MemLog {
    MemLog::now(phase, gpu_use())
}

/// What NVML says; nothing without GPUs.
fn gpu_use() -> Vec<GpuUse> {
    let used = flashboot_cuda::processes().into_iter();
    used.map(|used| GpuUse { gpu: used.gpu, process: used.process, bytes: used.bytes }).collect()
}

/// A source with what else is said of it in the account.
enum Known {
    Plain(Arc<dyn Source>),
    Checkpoint(Arc<CheckpointSource>),
    Object(Arc<ObjectSource>),
    Peer(Arc<PeerSource>),
}

impl Known {
    fn source(&self) -> Box<dyn Source> {
        match self {
            Self::Plain(source) => Box::new(Shared(Arc::clone(source))),
            Self::Checkpoint(source) => Box::new(Shared(Arc::<CheckpointSource>::clone(source))),
            Self::Object(source) => Box::new(Shared(Arc::<ObjectSource>::clone(source))),
            Self::Peer(source) => Box::new(Shared(Arc::<PeerSource>::clone(source))),
        }
    }
}

/// A source that somebody else looks at too.
struct Shared(Arc<dyn Source>);

impl Source for Shared {
    fn kind(&self) -> SourceKind {
        self.0.kind()
    }

    fn name(&self) -> String {
        self.0.name()
    }

    fn probe(&self, load: &Load) -> Result<()> {
        self.0.probe(load)
    }

    fn deliver(&self, load: &Load) -> Result<flashboot_loader::source::Delivered> {
        self.0.deliver(load)
    }
}

/// The files that `request` reads, as far as it names an image or a checkpoint.
///
/// # Errors
/// Those of opening them.
pub(crate) fn files(request: &Request) -> Result<Vec<PathBuf>> {
    if let Some(path) = &request.image {
        return Ok(vec![rank_of(&Image::open(path)?, request.rank.as_deref())?.path]);
    }
    let Some(from) = &request.checkpoint else { return Ok(Vec::new()) };
    let checkpoint = Checkpoint::open(&from.path, &from.open)?;
    Ok(checkpoint.shards().iter().map(|shard| shard.path.clone()).collect())
}

/// Threads that a load reads with.
pub(crate) fn threads_of(config: &Config) -> Result<usize> {
    Ok(fill_config(config)?.threads)
}

/// A place that was named and is not what it should be.
struct Unsound(SourceKind, String, Error);

impl Source for Unsound {
    fn kind(&self) -> SourceKind {
        self.0
    }

    fn name(&self) -> String {
        self.1.clone()
    }

    fn probe(&self, _: &Load) -> Result<()> {
        Err(self.2.clone())
    }

    fn deliver(&self, _: &Load) -> Result<flashboot_loader::source::Delivered> {
        Err(self.2.clone())
    }
}

async fn device(config: &Config) -> Result<Option<Device>> {
    let devices = &config.replicate.device;
    let mut found = resolve_devices(devices, config.replicate.setup_timeout).await?;
    if found.len() > 1 || matches!(devices, Devices::All) && found.is_empty() {
        let detail = format!("{} GPUs, and one rank goes into one: say which", found.len());
        return Err(Error::new(Kind::Invalid, "device", detail));
    }
    Ok(found.pop())
}

fn io_config(config: &Config) -> IoConfig {
    let engine = match config.load.engine {
        ReadEngine::Auto => Engine::Auto,
        ReadEngine::Pread => Engine::Pread,
        ReadEngine::IoUring => Engine::Uring,
    };
    IoConfig { engine, direct: config.load.direct, ..IoConfig::default() }
}

/// How the configuration says that files are read: threads, engine, budget.
///
/// # Errors
/// [`Kind::Unavailable`] for an engine that this system does not have.
pub fn read_config(config: &Config) -> Result<FillConfig> {
    fill_config(config)
}

/// How objects are fetched.
pub(crate) fn object_config(load: &crate::config::Load, object: &FromObject) -> ObjectConfig {
    ObjectConfig {
        options: object.options.clone(),
        allow_http: load.allow_http,
        range: load.range,
        attempts: load.attempts,
        timeout: load.attempt_timeout,
        ..ObjectConfig::new(&object.url)
    }
}

pub(crate) fn fill_config(config: &Config) -> Result<FillConfig> {
    let io = io_config(config);
    let fill = FillConfig::new(&io)?;
    Ok(FillConfig {
        io: Io::new(&io)?,
        threads: config.memory.threads.map_or(fill.threads, |_| threads(config.memory)),
        window: config.load.window,
        budget: Budget::new(config.load.budget),
        ..fill
    })
}

/// What a request names.
struct Named {
    wanted: Wanted,
    contents: Lies,
    sources: Vec<Known>,
}

/// What lies where: known, or being read while the load is under way.
enum Lies {
    Known(Box<Contents>),
    Later(early::Reading),
}

/// What is wanted, as the nearest of those says who know it, and where it may come from, in order.
fn sources(
    request: &Request,
    manifest: Option<flashboot_checkpoint::Manifest>,
    context: Option<&Context>,
    runtime: &Handle,
) -> Result<Named> {
    let config = &request.config;
    let (mut wanted, mut made, mut payload_name) = (None, Vec::new(), None);
    let mut contents = None;
    // Where several places are named, one that is not sound is passed over as any other.
    let alone = [
        request.image.is_some(),
        request.object.is_some(),
        request.checkpoint.is_some(),
        request.peer.is_some(),
    ];
    let named = alone.iter().filter(|named| **named).count();
    let alone = named <= 1;
    let manifest = match &request.id {
        Some(id) if named == 0 => Some(of_agent(config, id, request.rank.as_deref())?),
        _ => manifest,
    };
    let mut reading = None;
    // Another place would have to know first whether the image is sound.
    let early = request.image.as_deref().filter(|_| alone).and_then(|path| early::begin(path, request));
    if let Some(early) = early {
        wanted = Some(early.wanted);
        reading = Some(early.reading);
        made.push((SourceKind::Image, Known::Plain(Arc::new(early.source))));
    } else if let Some(path) = &request.image {
        let opened = Image::open(path).map_err(Error::from);
        let opened = opened.and_then(|image| Ok((rank_of(&image, request.rank.as_deref())?, image)));
        let known: Arc<dyn Source> = match opened {
            Ok((rank, image)) => {
                let digests = Arc::new(rank.table.digests().clone());
                // Ranks that hold the same share a file, whatever it is called.
                contents.get_or_insert_with(|| Contents::of_rank(&image, &rank));
                payload_name = rank.path.file_name().map(|name| name.to_string_lossy().into_owned());
                wanted.get_or_insert_with(|| Wanted {
                    image: Some(image.id().to_owned()),
                    rank: rank.coordinate.to_string(),
                    payload: rank.payload_bytes,
                    digests: Arc::clone(&digests).into(),
                });
                Arc::new(ImageSource::new(&rank.path, digests))
            }
            Err(e) if alone || e.kind() == Kind::Invalid => return Err(e),
            Err(e) => Arc::new(Unsound(SourceKind::Image, path.display().to_string(), e)),
        };
        made.push((SourceKind::Image, Known::Plain(known)));
    }
    let proved = |manifest: &flashboot_checkpoint::Manifest| Wanted {
        image: Some(manifest.metadata.id.clone()),
        rank: manifest.entry.coordinate.to_string(),
        payload: manifest.entry.payload_bytes,
        digests: manifest.table.digests().clone().into(),
    };
    let listed =
        |manifest: &flashboot_checkpoint::Manifest| Contents::of_manifest(Arc::new(manifest.clone()));
    if let Some(manifest) = &manifest {
        contents.get_or_insert_with(|| listed(manifest));
        payload_name = Some(manifest.entry.payload.clone());
        wanted.get_or_insert_with(|| proved(manifest));
    }
    if let Some(object) = &request.object {
        let image = ObjectImage::open(object_config(&config.load, object))?;
        let payload = match payload_name.clone() {
            Some(name) => Ok(name),
            None => image.manifest(request.rank.as_deref(), request.id.as_deref()).map(|manifest| {
                wanted.get_or_insert_with(|| proved(&manifest));
                contents.get_or_insert_with(|| listed(&manifest));
                manifest.entry.payload
            }),
        };
        let known = match payload.and_then(|payload| ObjectSource::new(image, &payload)) {
            Ok(source) => Known::Object(Arc::new(source)),
            Err(e) if alone || e.kind() == Kind::Invalid => return Err(e),
            Err(e) => Known::Plain(Arc::new(Unsound(SourceKind::Object, object.url.clone(), e))),
        };
        made.push((SourceKind::Object, known));
    }
    if let Some(from) = &request.checkpoint {
        let checkpoint = Checkpoint::open(&from.path, &from.open)?;
        let name = wanted.as_ref().map(|wanted| wanted.rank.clone()).or_else(|| request.rank.clone());
        let coordinate = coordinate(&from.layout, name.as_deref())?;
        let plan = RankPlan::new(&checkpoint, &from.layout, coordinate)?;
        wanted.get_or_insert_with(|| Wanted {
            image: None,
            rank: coordinate.to_string(),
            payload: plan.payload,
            digests: Proof::default(),
        });
        contents.get_or_insert_with(|| Contents::checkpoint(&plan));
        made.push((
            SourceKind::Checkpoint,
            Known::Checkpoint(Arc::new(CheckpointSource::new(&checkpoint, plan))),
        ));
    }
    if let Some(peer) = &request.peer {
        let mut peer = peer.clone();
        // Who named neither an image nor a model wants the image that is named here.
        let asked = &mut peer.request.wanted;
        if asked.image.is_none() && asked.model.is_none() {
            asked.image = wanted.as_ref().and_then(|wanted| wanted.image.clone());
        }
        made.push((SourceKind::Peer, Known::Peer(Arc::new(PeerSource::new(peer, runtime.clone())))));
    }
    let contents = reading.map(Lies::Later).or(contents.map(|contents| Lies::Known(Box::new(contents))));
    let (Some(wanted), Some(contents)) = (wanted, contents) else {
        return Err(Error::new(
            Kind::Invalid,
            "load",
            "nothing was named to be loaded: an image, an object, a checkpoint, a service, or an image's id for the agent",
        ));
    };
    let is_it = |id: &String| wanted.image.as_ref().is_some_and(|image| image.starts_with(id));
    if !request.id.as_ref().is_none_or(is_it) {
        let found = wanted.image.as_deref().unwrap_or("no image");
        let detail = format!("{found} was found, {} is wanted", request.id.as_deref().unwrap_or_default());
        return Err(Error::new(Kind::Mismatch, "load", detail));
    }
    // The agent keeps images: for a checkpoint there is nothing to ask it.
    if wanted.image.is_some() {
        let kept = agent::of_load(config, context).into_iter();
        made.extend(kept.map(|source| (source.kind(), Known::Plain(source))));
    }
    let order = |kind: &SourceKind| config.load.sources.iter().position(|wanted| wanted == kind);
    made.retain(|(kind, _)| order(kind).is_some());
    made.sort_by_key(|(kind, _)| order(kind));
    let sources = made.into_iter().map(|(_, known)| known).collect();
    Ok(Named { wanted, contents, sources })
}

/// What the agent says of an image that only its id names.
fn of_agent(config: &Config, id: &str, rank: Option<&str>) -> Result<flashboot_checkpoint::Manifest> {
    let asked = [SourceKind::Held, SourceKind::Staged];
    if !asked.iter().any(|kind| config.load.sources.contains(kind)) {
        let detail =
            "an image's id alone is asked of the node agent, and load.sources has neither held nor staged";
        return Err(Error::new(Kind::Invalid, "load", detail));
    }
    agent::manifest(config, id, rank)
}

fn run(
    request: &Request,
    named: Named,
    context: Option<Context>,
    began: Instant,
    progress: &Progress,
) -> Result<Placed> {
    let Named { wanted, contents, sources: known } = named;
    let config = &request.config;
    let memory = config.memory;
    let spec = ArenaSpec { payload: wanted.payload, shards: 1 };
    let place = agent::place_of(context.as_ref());
    let arena = move || match &context {
        Some(context) => {
            Ok(CudaArena::create_in(context, spec, &CudaArenaConfig::default())?.0 as Arc<dyn Arena>)
        }
        None => untouched_arena(spec, memory),
    };
    let yields = config.clone();
    let make = move || match arena() {
        // What the agent keeps may matter less.
        Err(e) if e.kind() == Kind::Exhausted && agent::make_room(&yields, &place, spec.payload) => {
            arena().map_err(|_| e)
        }
        made => made,
    };
    let load = Load::new(wanted, fill_config(config)?, make);
    let sources: Vec<_> = known.iter().map(Known::source).collect();
    let done = progress.watch(&load, || load.run(&sources));
    // What is wrong with the image is the reason of whatever came of it.
    let contents = match contents {
        Lies::Known(contents) => *contents,
        Lies::Later(reading) => reading.end()?,
    };
    let (arena, mut done) = done?;
    let visible = began.elapsed();
    load.settle();
    done.phases = load.phases().ms();
    let stats = load.config().io.stats();
    let mut bytes_read = stats.requested;
    let mut bytes_needed = load.wanted().payload;
    for known in &known {
        match known {
            // What its plan asks for: rounding to pages is the device's business.
            Known::Checkpoint(source) if source.requested().requested() > 0 => {
                bytes_read =
                    bytes_read.saturating_sub(source.requested().paged()) + source.requested().requested();
                bytes_needed = bytes_needed.min(source.plan().bytes_needed());
            }
            Known::Object(source) => bytes_read += source.image().fetched(),
            _ => {}
        }
    }
    let from_peers: u64 =
        done.used.iter().filter(|used| used.kind == SourceKind::Peer).map(|used| used.bytes).sum();
    bytes_read += from_peers;
    let loaded = Loaded::new(&load, done, visible, (bytes_needed, bytes_read), stats);
    if let Some(path) = &request.output {
        service::write_payload(&*arena, path)?;
    }
    for known in &known {
        if let Known::Peer(source) = known {
            source.left();
        }
    }
    Ok(Placed { arena, loaded, contents })
}
