//! One rank of a bench, in a process of its own: arena, export, import, release, account; stage by stage.

use super::{
    names,
    plan::{Plan, Shape, Stage},
    result::{Copied, Done, GpuLimits, SetUp},
};
use crate::{
    ErrorWire,
    registry::{Endpoints, Registry, Settings},
    replicate::{Clock, WorkerArgs, die_with_parent, host_arena},
};
use async_trait::async_trait;
use flashboot_core::{
    Arena, ArenaSpec, BLOCK, BlockDigest, ByteRange, Digests, Error, Export, Generation, Geometry, InFlight,
    Kind, Locator, Mover, Observed, PeerId, Pull, Result, ShardId, TransportName, digest,
    replica::Assignment, schedule::Rank,
};
use flashboot_cuda::{CudaArena, CudaArenaConfig, CudaMover, Device};
use flashboot_driver::{Limits, Sources};
use flashboot_rendezvous::{Board, SocketBoard};
use std::{
    any::Any,
    collections::{BTreeMap, BTreeSet},
    path::Path,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

/// Longer than one question to a source takes.
const PING: Duration = Duration::from_micros(300);
/// How long all ranks copy at once.
const TOGETHER: Duration = Duration::from_millis(60);
/// The last part of the wait for the release, which no timer hits.
const SPIN: Duration = Duration::from_millis(2);

/// Does the part of one rank of a bench, in a process of its own that [`run`](super::run) started.
///
/// # Errors
/// Whatever the part ended in; it is on the board already.
pub async fn worker(args: WorkerArgs) -> Result<()> {
    die_with_parent(&args.board)?;
    let board: Arc<dyn Board> = Arc::new(SocketBoard::new(&args.board));
    let done = part(&args, &board).await;
    if let Err(error) = &done {
        let failed = names::put(&*board, &names::failed(args.rank), &ErrorWire::from(error)).await;
        if let Err(e) = failed {
            tracing::warn!(%e, "cannot tell the parent");
        }
    }
    done
}

async fn part(args: &WorkerArgs, board: &Arc<dyn Board>) -> Result<()> {
    let plan: Plan = names::wait(&**board, names::PLAN, names::PLAN_WAIT).await?;
    let settings = Settings {
        sockets: args.board.parent().unwrap_or(Path::new(".")).to_owned(),
        memory: plan.memory,
        device: plan.gpu(args.rank).map(str::to_owned),
        network: plan.network.clone(),
    };
    let endpoints =
        Registry::standard(&settings)?.open(plan.settings.transport, &plan.settings.allow, &settings).await?;
    let mut seat = Seat { rank: args.rank, plan, board: Arc::clone(board), endpoints, arena: None };
    for (index, stage) in seat.plan.stages.clone().into_iter().enumerate() {
        if args.rank < stage.shape.schedule().ranks() {
            seat.stage(index, stage).await?;
        } else {
            seat.sits_out(index, stage).await?;
        }
    }
    Ok(())
}

struct Seat {
    rank: Rank,
    plan: Plan,
    board: Arc<dyn Board>,
    endpoints: Endpoints,
    /// Kept from stage to stage as long as it fits.
    arena: Option<Kept>,
}

/// An arena, and the values of its blocks where this rank has filled it.
struct Kept {
    arena: Arc<dyn Arena>,
    digests: Option<Vec<BlockDigest>>,
}

impl Seat {
    fn is_seed(&self, stage: &Stage) -> bool {
        self.rank == 0 && !matches!(stage.shape, Shape::Ring { .. })
    }

    async fn stage(&mut self, index: usize, stage: Stage) -> Result<()> {
        if stage.shape == Shape::Import && self.rank != 0 {
            self.arena = None;
            return self.imports(index, stage).await;
        }
        let mut arena_took = self.fit(stage)?;
        let arena = match &self.arena {
            Some(kept) => Arc::clone(&kept.arena),
            None => return Err(Error::new(Kind::Invalid, "bench", "no arena was made")),
        };
        let expected = self.contents(index, stage, &arena).await?;
        if self.is_seed(&stage) {
            arena.begin(generation()?);
            arena.publish(ShardId(0), stage.bytes)?;
        }
        for repeat in 0..stage.repeats {
            let at = (index, repeat);
            if !self.is_seed(&stage) {
                self.empty(stage, &arena)?;
                arena.begin(generation()?);
            }
            let began = Clock::Host.now();
            let exports = self.endpoints.export(&arena, self.plan.settings.import_timeout).await?;
            let export = Clock::Host.now().saturating_sub(began);
            self.publish(at, &exports).await?;
            let set_up = SetUp { arena: std::mem::take(&mut arena_took), export, ..SetUp::default() };
            if self.is_seed(&stage) {
                names::put(&*self.board, &names::mapped(at, self.rank), &set_up).await?;
            } else {
                self.clone_it(at, stage, &arena, &expected, set_up).await?;
            }
            self.over(at).await?;
            drop(exports);
        }
        Ok(())
    }

    /// Waits for the end of a stage that is others': what one's next stage may take begins there, and a rank that left
    /// before the last would look like one that died.
    async fn sits_out(&mut self, index: usize, stage: Stage) -> Result<()> {
        self.arena = None;
        for repeat in 0..stage.repeats {
            self.over((index, repeat)).await?;
        }
        Ok(())
    }

    /// Imports without an arena of one's own, so that it may be larger than half the GPU.
    async fn imports(&self, index: usize, stage: Stage) -> Result<()> {
        let Some(uuid) = self.plan.gpu(self.rank) else {
            return Err(Error::new(Kind::Invalid, "bench", "set-up is measured on GPUs only"));
        };
        let device = Device::find(uuid)?;
        for repeat in 0..stage.repeats {
            let at = (index, repeat);
            let locators = self.locators(at, 0).await?;
            let limit = self.plan.settings.import_timeout;
            let cost = flashboot_backend_ipc::measure_import(&locators, &device, limit).await?;
            let set_up = SetUp { map: cost.total, driver: cost.driver, ..SetUp::default() };
            names::put(&*self.board, &names::mapped(at, self.rank), &set_up).await?;
            let done = Done {
                release: Duration::ZERO,
                ready: Duration::ZERO,
                transfer: Duration::ZERO,
                transport: Some(TransportName::Ipc),
                copies: Vec::new(),
            };
            names::put(&*self.board, &names::done(at, self.rank), &done).await?;
            self.over(at).await?;
        }
        Ok(())
    }

    /// Sees to an arena of the stage's size; what making it took.
    fn fit(&mut self, stage: Stage) -> Result<Duration> {
        let spec = ArenaSpec { payload: stage.bytes, shards: stage.shape.schedule().shards() };
        let fits = |kept: &Kept| kept.arena.payload() == spec.payload && kept.arena.shards() == spec.shards;
        if self.arena.as_ref().is_some_and(fits) {
            return Ok(Duration::ZERO);
        }
        // Both at once may be too much.
        self.arena = None;
        let began = Clock::Host.now();
        let arena: Arc<dyn Arena> = match self.plan.gpu(self.rank) {
            Some(uuid) => CudaArena::create(&Device::find(uuid)?, spec, &CudaArenaConfig::default())?.0,
            None => host_arena(spec, self.plan.memory)?,
        };
        self.arena = Some(Kept { arena, digests: None });
        Ok(Clock::Host.now().saturating_sub(began))
    }

    /// Rank 0 fills its arena, and says what the values of the blocks are; of a gather everybody fills its shard.
    async fn contents(&mut self, index: usize, stage: Stage, arena: &Arc<dyn Arena>) -> Result<Arc<Digests>> {
        let name = names::digests(index);
        let geometry = stage.geometry()?;
        if self.rank == 0 {
            let known = self.arena.as_mut().and_then(|kept| kept.digests.take());
            let digests = match known {
                Some(digests) => digests,
                None => {
                    fill(arena, &geometry, ByteRange::new(0, stage.bytes))?;
                    digests(arena, &geometry)?
                }
            };
            names::put(&*self.board, &name, &digests).await?;
            if let Some(kept) = &mut self.arena {
                kept.digests = Some(digests);
            }
        } else if matches!(stage.shape, Shape::Ring { .. }) {
            fill(arena, &geometry, geometry.shard_range(ShardId(self.rank)))?;
        }
        let values: Vec<BlockDigest> =
            names::wait(&*self.board, &name, self.plan.settings.setup_timeout).await?;
        let digests = Digests::new(stage.bytes, BLOCK, values);
        digests.map(Arc::new).map_err(|e| Error::new(Kind::Invalid, "bench", e.to_string()))
    }

    /// What was there before shall not pass for what is to come.
    fn empty(&self, stage: Stage, arena: &Arc<dyn Arena>) -> Result<()> {
        if !matches!(stage.shape, Shape::Ring { .. }) {
            return arena.fill(ByteRange::new(0, stage.bytes), 0);
        }
        let own = stage.geometry()?.shard_range(ShardId(self.rank));
        arena.fill(ByteRange::new(0, own.start), 0)?;
        arena.fill(ByteRange::new(own.end, stage.bytes), 0)
    }

    async fn publish(&self, at: (usize, u32), exports: &[Box<dyn Export>]) -> Result<()> {
        let locators: Vec<_> = exports.iter().map(|export| export.locator().encode()).collect();
        names::put(&*self.board, &names::locators(at, self.rank), &locators).await
    }

    async fn locators(&self, at: (usize, u32), rank: Rank) -> Result<Vec<Locator>> {
        let name = names::locators(at, rank);
        let texts: Vec<String> = names::wait(&*self.board, &name, self.plan.settings.setup_timeout).await?;
        texts.iter().map(|text| text.parse().map_err(Error::from)).collect()
    }

    async fn clone_it(
        &self,
        at: (usize, u32),
        stage: Stage,
        arena: &Arc<dyn Arena>,
        expected: &Arc<Digests>,
        set_up: SetUp,
    ) -> Result<()> {
        let Self { rank, plan, board, endpoints, .. } = self;
        let schedule = stage.shape.schedule();
        let readers: Vec<Rank> =
            (0..schedule.ranks()).filter(|rank| !schedule.legs(*rank).is_empty()).collect();
        let sources: BTreeSet<Rank> = schedule.legs(*rank).iter().map(|leg| leg.source).collect();
        let (mut movers, mut transport, mut set_up) = (BTreeMap::new(), None, set_up);
        for source in sources {
            let locators = self.locators(at, source).await?;
            let began = Clock::Host.now();
            let imported = endpoints.import(&locators, arena, plan.settings.import_timeout).await?;
            set_up.map += Clock::Host.now().saturating_sub(began);
            transport = Some(imported.transport);
            let mover: Arc<dyn Mover> = Arc::from(imported.mover);
            set_up.driver += hop(&mover).map_or(Duration::ZERO, |hop| hop.import().driver_calls());
            movers.insert(PeerId(u64::from(source)), mover);
        }
        if let Some(hop) = movers.values().next().and_then(hop)
            && stage.limits
        {
            let read: Vec<_> = schedule
                .legs(*rank)
                .iter()
                .map(|leg| stage.geometry().map(|g| g.shard_range(leg.shard)))
                .collect::<Result<_>>()?;
            if *rank == 1 && !matches!(stage.shape, Shape::Ring { .. }) {
                set_up.limits = Some(limits(hop, arena, stage)?);
            }
            if let (Some(range), true) = (read.first(), readers.len() > 1) {
                self.meet(&names::together(at), &readers).await?;
                set_up.together = Some(together(hop, *range)?);
            }
            self.empty(stage, arena)?;
        }
        movers.values().filter_map(hop).try_for_each(CudaMover::trace)?;
        let sources = Arc::new(Mapped(Mutex::new(movers.clone())));
        let job = flashboot_driver::Job {
            arena: Arc::clone(arena),
            assignment: Assignment::of(schedule, *rank, stage.geometry()?),
            expected: stage.verify.then(|| Arc::clone(expected)),
            policy: plan.settings.policy(),
            limits: Limits { pull: plan.settings.pull_timeout, ..Limits::default() },
        };
        names::put(&**board, &names::mapped(at, *rank), &set_up).await?;
        let release: Duration = names::wait(&**board, &names::go(at), plan.settings.setup_timeout).await?;
        until(release, &movers).await?;
        let limit = plan.settings.transfer_timeout;
        let report = tokio::time::timeout(limit, flashboot_driver::replicate(job, sources, &mut ())).await;
        let ready = Clock::Host.now().saturating_sub(release);
        let late = |_| Error::new(Kind::Deadline, "bench", format!("not complete within {limit:?}"));
        let report = report.map_err(late)??;
        if !stage.verify {
            // Hashing takes the GPU from those that still copy.
            self.meet(&names::arrived(at), &readers).await?;
            check(arena, stage, expected)?;
        }
        let copies = movers.values().filter_map(hop).flat_map(CudaMover::spans).map(|span| Copied {
            begin: span.copy_begin,
            copied: span.copy_end,
            end: span.end,
        });
        let done = Done { release, ready, transfer: report.transfer, transport, copies: copies.collect() };
        names::put(&**board, &names::done(at, *rank), &done).await
    }

    /// Waits at this barrier for every reader.
    async fn meet(&self, barrier: &str, readers: &[Rank]) -> Result<()> {
        let settings = &self.plan.settings;
        let patience = settings.setup_timeout.saturating_add(settings.transfer_timeout);
        self.board.put(&format!("{barrier}/{}", self.rank), String::new()).await?;
        for reader in readers {
            self.board.wait(&format!("{barrier}/{reader}"), patience).await?;
        }
        Ok(())
    }

    async fn over(&self, at: (usize, u32)) -> Result<()> {
        let settings = &self.plan.settings;
        let patience = settings.setup_timeout.saturating_add(settings.transfer_timeout);
        self.board.wait(&names::over(at), patience).await.map(drop)
    }
}

/// The GPU's own mover, where it is one.
fn hop(mover: &Arc<dyn Mover>) -> Option<&CudaMover> {
    let any: &dyn Any = &**mover;
    any.downcast_ref()
}

fn generation() -> Result<Generation> {
    let bits = getrandom::u64().map_err(|e| {
        Error::new(Kind::Unavailable, "getrandom", format!("the system gives no random bits: {e}"))
    })?;
    Ok(Generation::from_random(bits))
}

/// Gives every block of `range` other bytes.
fn fill(arena: &Arc<dyn Arena>, geometry: &Geometry, range: ByteRange) -> Result<()> {
    let mut at = range.start;
    while at < range.end {
        let end = (at + geometry.block()).min(range.end);
        let index = at / geometry.block();
        arena.fill(ByteRange::new(at, end), (index.wrapping_mul(151) >> 3) as u8 | 1)?;
        let mark = index.to_le_bytes();
        arena.copy_in(at, mark.get(..mark.len().min((end - at) as usize)).unwrap_or_default())?;
        at = end;
    }
    Ok(())
}

/// The values of all blocks, found where they lie, or through the host.
fn digests(arena: &Arc<dyn Arena>, geometry: &Geometry) -> Result<Vec<BlockDigest>> {
    if let Some(arena) = CudaArena::from_arena(arena) {
        return arena.digests(ByteRange::new(0, geometry.payload()), geometry.block());
    }
    let mut bytes = Vec::new();
    let blocks = geometry.payload().div_ceil(geometry.block());
    (0..blocks)
        .map(|index| {
            let at = index * geometry.block();
            bytes.resize((geometry.payload() - at).min(geometry.block()) as usize, 0);
            arena.copy_out(at, &mut bytes)?;
            Ok(digest::block(geometry, index, &bytes))
        })
        .collect()
}

fn check(arena: &Arc<dyn Arena>, stage: Stage, expected: &Digests) -> Result<()> {
    let bad = expected.mismatches(0, &digests(arena, &stage.geometry()?)?);
    if bad.is_empty() {
        return Ok(());
    }
    Err(Error::new(Kind::Corrupt, "bench", format!("blocks {bad:?} are not the seed's")))
}

fn limits(hop: &CudaMover, arena: &Arc<dyn Arena>, stage: Stage) -> Result<GpuLimits> {
    let whole = ByteRange::new(0, stage.bytes);
    let Some(into) = CudaArena::from_arena(arena) else {
        return Err(Error::new(Kind::Invalid, "bench", "a GPU's mover into no GPU's arena"));
    };
    // Once to warm up: the first touch of a mapping costs, and so does what the hashes of many chunks work in.
    hop.measure_raw(whole, stage.bytes)?;
    hop.measure_verified(whole, stage.chunk, BLOCK)?;
    Ok(GpuLimits {
        copy: hop.measure_raw(whole, stage.bytes)?,
        chunks: hop.measure_raw(whole, stage.chunk)?,
        hash: into.measure_hash(whole, BLOCK)?,
        verified: hop.measure_verified(whole, stage.chunk, BLOCK)?,
    })
}

/// One copy of `range`, the median of those in the middle of a time in which the others copy too.
fn together(hop: &CudaMover, range: ByteRange) -> Result<Duration> {
    let began = Clock::Host.now();
    let mut took = Vec::new();
    loop {
        let since = Clock::Host.now().saturating_sub(began);
        let copy = hop.measure_raw(range, range.len())?;
        if since > TOGETHER && !took.is_empty() {
            break;
        }
        // Who came to the barrier last has begun by then.
        if since > TOGETHER / 4 {
            took.push(copy.as_secs_f64());
        }
    }
    Ok(Duration::from_secs_f64(super::median(took)))
}

/// Returns at `release`, to some microseconds, with links that are awake: each asks its source something until then, as
/// whoever measures a collective has a barrier before it.
async fn until(release: Duration, movers: &BTreeMap<PeerId, Arc<dyn Mover>>) -> Result<()> {
    let left = release.saturating_sub(Clock::Host.now());
    if left > SPIN {
        tokio::time::sleep(left - SPIN).await;
    }
    while Clock::Host.now() + PING < release {
        movers.values().filter_map(hop).try_for_each(|hop| hop.ping().map(drop))?;
    }
    while Clock::Host.now() < release {
        std::hint::spin_loop();
    }
    Ok(())
}

/// Sources that are mapped already; there are no others.
struct Mapped(Mutex<BTreeMap<PeerId, Arc<dyn Mover>>>);

#[async_trait]
impl Sources for Mapped {
    async fn attach(&self, source: PeerId) -> Result<Box<dyn Mover>> {
        let mover = self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&source);
        let none = || Error::new(Kind::SourceLost, "bench", "a source is attached once");
        Ok(Box::new(Shared(mover.ok_or_else(none)?)))
    }

    async fn replace(&self, _: PeerId, _: ShardId, _: u64, _: &Error) -> Option<PeerId> {
        None
    }
}

/// A mover that is let go of when the account is written, not when its last chunk has landed.
#[derive(Debug)]
struct Shared(Arc<dyn Mover>);

#[async_trait]
impl Mover for Shared {
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
