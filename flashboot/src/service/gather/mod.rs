//! An all-gather: N nodes that each have the image on disk read one N-th of it each and complete one another in a ring.
//!
//! The disk is a source like any other, so the machine that runs a clone runs a node: its own shard first, then, from the node
//! before it, the others in the ring's order. [`neighbours`] is what happens when that one is gone.

mod disk;
mod neighbours;

use super::{
    Hop, KillAt, Moment, client, payload,
    seat::{Held, Opened, Seat, blocking, new_trace, random},
    seed::content,
    sources::peer,
};
use crate::observe::Watched;
use disk::Disk;
use flashboot_checkpoint::{Image, Manifest, RankImage};
use flashboot_core::{
    Error, Geometry, Kind, Result, ShardId,
    replica::{Assignment, Policy, SourcedLeg},
    schedule::Gate,
};
use flashboot_driver::{Job, Limits, Step, replicate};
use flashboot_rendezvous::{
    RingSeat,
    protocol::{MemberId, NODES, RingNode},
    store::Address,
};
use neighbours::{DISK, Neighbours};
use serde::Serialize;
use std::{path::PathBuf, sync::Arc, time::Duration};
use tokio::time::Instant;
use tracing::{Instrument as _, info_span, warn};

/// The slowest disk and wire that a word is waited for at, in bytes a second, beside the time that it may stand still.
const SLOWEST: u64 = 100_000_000;

/// A node to be.
#[derive(Debug, Clone)]
pub struct GatherRequest {
    /// The image, opened.
    pub image: Image,
    /// Which rank image of it.
    pub rank: RankImage,
    /// How many nodes there are.
    pub nodes: u32,
    /// Which ring, of several that gather the same at one service; may be empty.
    pub name: String,
    /// Bytes of one copy; `None`: a whole shard.
    pub chunk: Option<u64>,
    /// The service, or the store that says where it is.
    pub rendezvous: Address,
    /// Write the payload there, once all of it is verified.
    pub output: Option<PathBuf>,
    /// For tests: when it kills, and whom; chunks are counted over all shards.
    pub kill: Option<KillAt>,
    /// Everything else.
    pub seat: Seat,
}

/// A node that has everything. Times in milliseconds, rates in bytes per second.
#[derive(Debug, Clone, Serialize)]
pub struct Gathered {
    /// How many nodes there were.
    pub nodes: u32,
    /// Its place in the ring: the shard that it read.
    pub index: usize,
    /// The node: its filling.
    pub member: MemberId,
    /// The image's id.
    pub image: String,
    /// The rank image's name.
    pub rank: String,
    /// Payload bytes.
    pub bytes: u64,
    /// Bytes of one copy.
    pub chunk_bytes: u64,
    /// Until all nodes had come, from the call.
    pub setup_ms: f64,
    /// From then on, until its own shard was read from disk and verified.
    pub read_ms: f64,
    /// From then on, until it had all others.
    pub gather_ms: f64,
    /// Payload bytes by the two together.
    pub bytes_per_s: f64,
    /// Blocks of the payload, and blocks whose digest was compared and right.
    pub blocks: u64,
    /// See [`blocks`](Self::blocks).
    pub verified: u64,
    /// Blocks that were pulled again.
    pub repaired: u64,
    /// Nodes that were lost.
    pub losses: u32,
    /// Shards that it read from disk.
    pub from_disk: Vec<u32>,
    /// Nodes that it read from, in order.
    pub sources: Vec<Hop>,
    /// The id that its log's spans carry.
    pub trace: String,
}

/// Gathers, tells `told`, and stays until every other node is done or gone, for as long as it drains. Needs a tokio runtime with
/// IO, time and threads that may block. A `stop` before everything is there ends it as [`Kind::Cancelled`].
///
/// # Errors
/// The service's refusal; a disk that does not give this node's shard; the transport's own.
pub async fn gather(
    request: GatherRequest,
    told: impl FnOnce(&Gathered),
    stop: impl Future<Output = ()>,
) -> Result<()> {
    let trace = new_trace()?;
    let span = info_span!("gather", nodes = request.nodes, ring = request.name, trace);
    gathered(request, trace, told, stop).instrument(span).await
}

async fn gathered(
    request: GatherRequest,
    trace: String,
    told: impl FnOnce(&Gathered),
    stop: impl Future<Output = ()>,
) -> Result<()> {
    tokio::pin!(stop);
    let watched = Arc::new(request.seat.observed.begin("gather"));
    let cancelled = || Error::new(Kind::Cancelled, "gather", "stopped by a signal");
    let (gathered, seat, kept) = tokio::select! {
        done = complete(&request, &watched, trace) => done?,
        () = &mut stop => return Err(cancelled()),
    };
    watched.ready();
    told(&gathered);
    let over = async {
        let until = Instant::now() + request.seat.drain;
        while !seat.is_over() {
            if Instant::now() >= until {
                warn!(drain = ?request.seat.drain, "going although others are not done");
                break;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::select! {
        () = over => {}
        () = &mut stop => {}
    }
    watched.draining();
    drop(kept);
    Ok(())
}

type Kept = (Opened, Held);

async fn complete(
    request: &GatherRequest,
    watched: &Arc<Watched>,
    trace: String,
) -> Result<(Gathered, Arc<RingSeat>, Kept)> {
    let began = Instant::now();
    let GatherRequest { rank, nodes, seat, .. } = request;
    let invalid = |e: &dyn std::fmt::Display| Error::new(Kind::Invalid, "gather", e.to_string());
    if *nodes == 0 || *nodes > NODES {
        return Err(invalid(&format!("{nodes} nodes: between 1 and {NODES} are possible")));
    }
    let digests = Arc::new(rank.table.digests().clone());
    let (bytes, block) = (digests.payload(), digests.block());
    let shard = bytes.div_ceil(block).div_ceil((*nodes).into()).max(1).saturating_mul(block);
    let chunk = request.chunk.unwrap_or(shard);
    let geometry = Geometry::new(bytes, block, chunk, *nodes).map_err(|e| invalid(&e))?;

    if let Some(path) = &request.output {
        payload::placed(path.clone()).await?;
        payload::room(path.clone(), bytes).await?;
    }
    let (client, _) = client(&request.rendezvous, &seat.network()).await?;
    let opened = seat.open().await?;
    let held = seat.hold_shards(&opened, bytes, *nodes).await?;
    let (image, of) = (request.image.clone(), rank.clone());
    let content = blocking(move || content(&Manifest::of(&image, &of)?, ("", ""))).await?;
    watched.filling(MemberId(held.generation), &content, &trace);
    let node = node(request, &opened, &held, bytes)?;
    let ring = Arc::new(RingSeat::join(Arc::clone(&client), node, seat.patience).await?);
    watched.registered(ring.pulse());
    let setup = began.elapsed();
    let kill = |moment| request.kill.iter().for_each(|kill| kill.at(moment));
    kill(Moment::Registered);

    let me = MemberId(held.generation);
    let order: Vec<_> = ring.nodes().iter().map(|n| n.member).collect();
    let index = order.iter().position(|id| *id == me).ok_or_else(|| invalid(&"not in the ring"))?;
    let settings = &seat.config.replicate;
    let neighbours = Arc::new(Neighbours {
        seat: Arc::clone(&ring),
        endpoints: Arc::clone(&opened.endpoints),
        arena: Arc::clone(&held.arena),
        disk: Disk {
            path: rank.path.clone(),
            digests: Arc::clone(&digests),
            arena: Arc::clone(&held.arena),
            threads: crate::replicate::threads(seat.config.memory),
            generation: held.generation,
        },
        geometry,
        order,
        index,
        import: settings.import_timeout.min(settings.stall),
        watched: Arc::clone(watched),
        state: std::sync::Mutex::default(),
    });
    let own = ShardId(u32::try_from(index).unwrap_or(u32::MAX));
    let source = neighbours.before().map_or(DISK, peer);
    let others = (1..*nodes).map(|back| (own.0 + nodes - back) % nodes);
    let mut legs = vec![SourcedLeg { source: DISK, shard: own }];
    legs.extend(others.map(|shard| SourcedLeg { source, shard: ShardId(shard) }));
    let blocks = digests.values().len() as u64;
    let stall = settings.stall.saturating_add(Duration::from_secs(shard / SLOWEST));
    let max_losses = settings.max_losses.saturating_add(*nodes);
    let job = Job {
        arena: Arc::clone(&held.arena),
        assignment: Assignment { geometry, held: Vec::new(), legs, gate: Gate::Chunk },
        expected: Some(digests),
        policy: Policy { stall, max_losses, ..settings.policy() },
        limits: Limits {
            pull: settings.pull_timeout.max(stall),
            floor: settings.floor(0),
            ..Limits::default()
        },
    };
    let began = Instant::now();
    let mut own_read = None;
    let whole = geometry.shard_range(own).len();
    let (mut pulls, mut verified, mut right) = (0, 0, 0);
    let sources = Arc::<Neighbours>::clone(&neighbours);
    let mut observer = |step: Step| match step {
        Step::Published { shard, bytes } if shard == own && bytes == whole => own_read = Some(Instant::now()),
        Step::Pulling { .. } => {
            kill(Moment::Pull(pulls));
            pulls += 1;
        }
        Step::Verified { source, chunk } => {
            right += chunk.range.len();
            watched.verified(right, sources.reads_disk(source, chunk.shard));
            kill(Moment::Chunk(verified));
            verified += 1;
        }
        _ => {}
    };
    let limit = settings.transfer_timeout;
    let sources = Arc::<Neighbours>::clone(&neighbours);
    let report = tokio::time::timeout(limit, replicate(job, sources, &mut observer)).await;
    let report = report
        .map_err(|_| Error::new(Kind::Deadline, "gather", format!("not complete within {limit:?}")))??;
    let ended = Instant::now();
    kill(Moment::Complete);
    ring.reads(None);
    ring.done();
    if let Some(path) = request.output.clone() {
        let arena = Arc::clone(&held.arena);
        blocking(move || payload::write(&*arena, &path)).await?;
    }
    let read = own_read.unwrap_or(began);
    let ms = |d: Duration| d.as_secs_f64() * 1e3;
    let own = neighbours.own(neighbours.before());
    for (phase, time) in [("setup", setup), ("ready", ended - began), ("load", read - began)] {
        watched.took(phase, time);
    }
    let bytes_per_s = bytes as f64 / (ended - began).as_secs_f64().max(1e-9);
    watched.read(report.chunks, report.repaired, bytes_per_s);
    let gathered = Gathered {
        nodes: *nodes,
        index,
        member: me,
        image: request.image.id().to_owned(),
        rank: rank.coordinate.to_string(),
        bytes,
        chunk_bytes: chunk,
        setup_ms: ms(setup),
        read_ms: ms(read - began),
        gather_ms: ms(ended - read),
        bytes_per_s,
        blocks,
        verified: report.verified,
        repaired: report.repaired,
        losses: report.losses,
        from_disk: own.into_iter().map(|shard| shard.0).collect(),
        sources: neighbours.hops(),
        trace,
    };
    drop(neighbours);
    Ok((gathered, ring, (opened, held)))
}

fn node(request: &GatherRequest, opened: &Opened, held: &Held, bytes: u64) -> Result<RingNode> {
    Ok(RingNode {
        member: MemberId(held.generation),
        secret: random()?,
        name: request.name.clone(),
        image: request.image.id().to_owned(),
        rank: request.rank.coordinate.to_string(),
        bytes,
        nodes: request.nodes,
        place: held.place(&request.seat.labels)?,
        locators: held.locators(),
        transports: opened.transports.clone(),
        done: false,
        order: Vec::new(),
    })
}
