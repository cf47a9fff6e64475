//! A clone: what is asked for, proved, read, committed; then served on, until it is asked to go.

use super::{
    KillAt, client,
    kill::Moment,
    payload,
    recheck::Recheck,
    seat::{Held, Opened, Seat, blocking, new_trace},
    sources::{Hop, Members, peer, stall},
    standing::Standing,
    wanted::resolved,
};
use crate::{config::Chunk, observe::Watched};
use flashboot_channel::Security;
use flashboot_checkpoint::Manifest;
use flashboot_core::{
    Arena, BLOCK, ByteRange, Error, Geometry, Kind, Result, ShardId,
    replica::{Assignment, Policy, SourcedLeg},
    schedule::{ChunkCosts, Gate, auto_chunk},
};
use flashboot_cuda::CudaArena;
use flashboot_driver::{Job, Limits, Step, replicate};
use flashboot_rendezvous::{
    Client, Membership, fetch_manifest, find,
    protocol::{Content, MemberId, Role, Rules, Wanted},
    store::Address,
};
use serde::Serialize;
use std::{path::PathBuf, pin::Pin, sync::Arc, time::Duration};
use tokio::time::Instant;
use tracing::{Instrument as _, info_span};

/// A clone to be.
#[derive(Debug, Clone)]
pub struct CloneRequest {
    /// What.
    pub wanted: Wanted,
    /// The service.
    pub rendezvous: Address,
    /// Begin when so many clones have come; `None`: at once.
    pub expect: Option<u32>,
    /// Write the payload there, once all of it is verified.
    pub output: Option<PathBuf>,
    /// Go once complete and nobody reads from it; else serve until asked to go.
    pub leave: bool,
    /// For tests: when it kills, and whom.
    pub kill: Option<KillAt>,
    /// Everything else.
    pub seat: Seat,
}

/// A clone that has everything. Times in milliseconds, rates in bytes per second.
#[derive(Debug, Clone, Serialize)]
pub struct Cloned {
    /// The member: its filling.
    pub member: MemberId,
    /// The image's id.
    pub image: String,
    /// The model's name.
    pub model: String,
    /// Its edition.
    pub revision: String,
    /// The rank image's name.
    pub rank: String,
    /// Payload bytes.
    pub bytes: u64,
    /// Bytes of one copy.
    pub chunk_bytes: u64,
    /// Chunks pulled.
    pub chunks: u64,
    /// Blocks of the payload, and blocks whose digest was compared and right.
    pub blocks: u64,
    /// See [`blocks`](Self::blocks).
    pub verified: u64,
    /// Blocks that were pulled again.
    pub repaired: u64,
    /// Sources that were lost.
    pub losses: u32,
    /// Sources, in order.
    pub sources: Vec<Hop>,
    /// From the call to the plan: asking, the manifest, the arena.
    pub setup_ms: f64,
    /// From the plan to every byte verified.
    pub ready_ms: f64,
    /// First byte to last.
    pub transfer_ms: f64,
    /// Importing sources.
    pub map_ms: f64,
    /// Bytes by `ready_ms`.
    pub bytes_per_s: f64,
    /// The id that its log's spans carry, and those of its sources about it.
    pub trace: String,
}

/// Clones, tells `told`, and serves until `stop` (or, asked to leave, until nobody reads). Needs a tokio runtime with IO,
/// time and threads that may block. A `stop` before everything is there ends it as [`Kind::Cancelled`].
///
/// # Errors
/// The service's refusal; a manifest that does not prove the image; [`Kind::SourceLost`] when no holder is left for as
/// long as it has patience; the transport's own.
pub async fn clone(
    request: CloneRequest,
    told: impl FnOnce(&Cloned),
    stop: impl Future<Output = ()>,
) -> Result<()> {
    let trace = new_trace()?;
    let Wanted { model, image, .. } = &request.wanted;
    let span = info_span!("clone", ?model, ?image, trace);
    cloned(request, trace, told, stop).instrument(span).await
}

async fn cloned(
    request: CloneRequest,
    trace: String,
    told: impl FnOnce(&Cloned),
    stop: impl Future<Output = ()>,
) -> Result<()> {
    tokio::pin!(stop);
    let watched = Arc::new(request.seat.observed.begin("clone"));
    let (client, security) = client(&request.rendezvous, &request.seat.network()).await?;
    let (cloned, membership, kept) = tokio::select! {
        done = read(&request, &client, &watched, trace, None, |_| ()) => done?,
        // Its membership ends with it: the service forgets it a lease later, its readers go elsewhere at once.
        () = &mut stop => return Err(Error::new(Kind::Cancelled, "clone", "stopped by a signal")),
    };
    watched.ready();
    told(&cloned);
    let Kept { opened, held, mut recheck } = kept;
    let reason = || membership.evicted().or_else(|| recheck.look(&membership));
    let (standing, evicted) = serve_on(&request, &security, stop, reason).await;
    watched.draining();
    if let Ok(membership) = Arc::try_unwrap(membership) {
        let drain = request.seat.drain_after(evicted.as_ref());
        request.seat.go(&client, membership, held, drain).await;
    }
    drop(opened);
    if let Some(standing) = standing {
        standing.end().await;
    }
    evicted.map_or(Ok(()), Err)
}

/// Stays until `stop`, or until `evicted` has a reason to go, and stands for the service's post meanwhile; not at all where the
/// request is to leave.
pub(super) async fn serve_on(
    request: &CloneRequest,
    security: &Security,
    mut stop: Pin<&mut impl Future<Output = ()>>,
    mut evicted: impl FnMut() -> Option<Error>,
) -> (Option<Standing>, Option<Error>) {
    if request.leave {
        return (None, None);
    }
    let lease = Rules::default().lease;
    let standing = Standing::candidate(&request.seat, &request.rendezvous, lease, security);
    let reason = loop {
        tokio::select! {
            () = &mut stop => break None,
            () = tokio::time::sleep(Duration::from_millis(500)) => {
                if let Some(error) = evicted() {
                    break Some(error);
                }
            }
        }
    };
    (standing, reason)
}

/// What a clone keeps as long as it serves.
pub(super) struct Kept {
    pub(super) opened: Opened,
    pub(super) held: Held,
    pub(super) recheck: Recheck,
}

/// Clones into `arena`; `seen` is told of every range that is verified there. The second future goes, once nobody reads from it
/// any more: until it has ended the arena can be read by others.
pub(crate) async fn clone_into(
    request: CloneRequest,
    arena: Arc<dyn Arena>,
    seen: impl FnMut(ByteRange) + Send,
) -> Result<(Cloned, impl Future<Output = ()> + Send + 'static)> {
    let watched = Arc::new(request.seat.observed.begin("load"));
    let (client, _) = client(&request.rendezvous, &request.seat.network()).await?;
    let (cloned, membership, kept) =
        read(&request, &client, &watched, new_trace()?, Some(arena), seen).await?;
    let go = async move {
        // What the engine makes of its memory is its own: it is not compared again.
        let Kept { opened, held, .. } = kept;
        if let Ok(membership) = Arc::try_unwrap(membership) {
            request.seat.go(&client, membership, held, request.seat.drain).await;
        }
        drop(opened);
    };
    Ok((cloned, go))
}

/// What the service has of `request`: the content, and the manifest that proves it.
pub(crate) async fn look(request: &CloneRequest) -> Result<Manifest> {
    let (client, _) = client(&request.rendezvous, &request.seat.network()).await?;
    Ok(proved(&request.wanted, &client, request.seat.patience).await?.1)
}

async fn proved(
    wanted: &Wanted,
    client: &Client,
    patience: Duration,
) -> Result<(Content, Manifest, Vec<u8>)> {
    let wanted = resolved(wanted, client).await?;
    let content = find(client, &wanted, patience).await?;
    let bytes = fetch_manifest(client, &content, patience).await?;
    let (image, rank) = (content.image.clone(), content.rank.clone());
    let (manifest, bytes) = blocking(move || Ok((Manifest::check(&bytes, &image, &rank)?, bytes))).await?;
    Ok((content, manifest, bytes))
}

/// Until everything is there, verified and committed.
pub(super) async fn read(
    request: &CloneRequest,
    client: &Arc<Client>,
    watched: &Arc<Watched>,
    trace: String,
    into: Option<Arc<dyn Arena>>,
    mut seen: impl FnMut(ByteRange) + Send,
) -> Result<(Cloned, Arc<Membership>, Kept)> {
    let began = Instant::now();
    let CloneRequest { wanted, seat, .. } = request;
    if let Some(path) = &request.output {
        payload::placed(path.clone()).await?;
    }
    let (content, manifest, bytes) = proved(wanted, client, seat.patience).await?;
    let digests = Arc::new(manifest.table.digests().clone());
    if digests.payload() != content.bytes {
        let detail = format!("the service says {} bytes, the image {}", content.bytes, digests.payload());
        return Err(Error::new(Kind::Mismatch, "clone", detail).with_peer(client.peer()));
    }
    if let Some(path) = &request.output {
        payload::room(path.clone(), content.bytes).await?;
    }
    let opened = seat.open().await?;
    let held = match into {
        Some(arena) if arena.payload() != content.bytes => {
            let detail = format!("an arena of {} bytes for {}", arena.payload(), content.bytes);
            return Err(Error::new(Kind::Mismatch, "clone", detail));
        }
        Some(arena) => seat.hold_in(&opened, arena).await?,
        None => seat.hold(&opened, content.bytes).await?,
    };
    watched.filling(MemberId(held.generation), &content, &trace);
    let said = (Role::Clone, content.clone(), request.expect);
    let membership = Arc::new(seat.join(client, &opened, &held, said, bytes, &trace).await?);
    watched.registered(membership.pulse());
    let kill = |moment| request.kill.iter().for_each(|kill| kill.at(moment));
    kill(Moment::Registered);
    let setup = began.elapsed();

    let settings = &seat.config.replicate;
    let depth = membership.depth();
    let costs =
        if CudaArena::from_arena(&held.arena).is_some() { ChunkCosts::NVLINK } else { ChunkCosts::HOST };
    let chunk = match settings.chunk {
        Chunk::Bytes(size) => size.0,
        // Behind this one others may come.
        Chunk::Auto => auto_chunk(content.bytes, depth.saturating_add(2), true, BLOCK, costs),
    };
    let invalid = |e: &dyn std::fmt::Display| Error::new(Kind::Invalid, "clone", e.to_string());
    let geometry = Geometry::new(content.bytes, digests.block(), chunk, 1).map_err(|e| invalid(&e))?;
    let source = membership.upstream().ok_or_else(|| invalid(&"the service gave no source"))?;
    let leg = SourcedLeg { source: peer(source), shard: ShardId(0) };
    let stall = stall(settings.stall, depth);
    let blocks = digests.values().len() as u64;
    let job = Job {
        arena: Arc::clone(&held.arena),
        assignment: Assignment { geometry, held: Vec::new(), legs: vec![leg], gate: Gate::Chunk },
        expected: Some(Arc::clone(&digests)),
        policy: Policy { stall, ..settings.policy() },
        limits: Limits { pull: settings.pull_timeout, floor: settings.floor(depth), ..Limits::default() },
    };
    let (endpoints, arena) = (Arc::clone(&opened.endpoints), Arc::clone(&held.arena));
    let sources = Members::new(Arc::clone(&membership), endpoints, arena, settings, seat.patience);
    let ends = Arc::clone(&membership);
    let sources = sources.watched(Arc::clone(watched)).told(move |source| ends.ended(source));
    let sources = Arc::new(sources);
    let began = Instant::now();
    let mut observer = {
        let (membership, watched, kill) = (Arc::clone(&membership), Arc::clone(watched), request.kill);
        move |step: Step| {
            match step {
                Step::Published { bytes, .. } => {
                    membership.progress(bytes);
                    watched.verified(bytes, false);
                }
                Step::Verified { chunk, .. } => seen(chunk.range),
                _ => {}
            }
            kill.iter().for_each(|kill| kill.step(step));
        }
    };
    let limit = settings.transfer_timeout;
    let report = tokio::time::timeout(limit, replicate(job, Arc::<Members>::clone(&sources), &mut observer));
    let report = report
        .await
        .map_err(|_| Error::new(Kind::Deadline, "clone", format!("not complete within {limit:?}")))??;
    drop(observer);
    let ready = began.elapsed();
    kill(Moment::Complete);
    membership.complete();
    if let Some(path) = request.output.clone() {
        let arena = Arc::clone(&held.arena);
        blocking(move || payload::write(&*arena, &path)).await?;
    }
    let bytes_per_s = content.bytes as f64 / ready.as_secs_f64().max(1e-9);
    for (phase, time) in
        [("setup", setup), ("ready", ready), ("transfer", report.transfer), ("map", report.map)]
    {
        watched.took(phase, time);
    }
    watched.read(report.chunks, report.repaired, bytes_per_s);
    let ms = |d: Duration| d.as_secs_f64() * 1e3;
    let hops = sources.hops();
    drop(sources);
    let cloned = Cloned {
        member: MemberId(held.generation),
        image: content.image,
        model: content.model,
        revision: content.revision,
        rank: content.rank,
        bytes: content.bytes,
        chunk_bytes: chunk,
        chunks: report.chunks,
        blocks,
        verified: report.verified,
        repaired: report.repaired,
        losses: report.losses,
        sources: hops,
        setup_ms: ms(setup),
        ready_ms: ms(ready),
        transfer_ms: ms(report.transfer),
        map_ms: ms(report.map),
        bytes_per_s,
        trace,
    };
    let recheck = Recheck::new(&held.arena, &digests);
    Ok((cloned, membership, Kept { opened, held, recheck }))
}
