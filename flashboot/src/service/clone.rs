//! A clone: what is asked for, proved, read, committed; then served on, until it is asked to go.

use super::{
    payload,
    seat::{Seat, blocking},
    security,
    sources::{Hop, Members, peer},
};
use crate::{config::Chunk, replicate::die};
use flashboot_channel::Endpoint;
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
    protocol::{Content, MemberId, Role, Wanted},
};
use serde::Serialize;
use std::{path::PathBuf, str::FromStr, sync::Arc, time::Duration};
use tokio::time::Instant;

/// A clone to be.
#[derive(Debug, Clone)]
pub struct CloneRequest {
    /// What.
    pub wanted: Wanted,
    /// The service.
    pub rendezvous: Endpoint,
    /// Begin when so many clones have come; `None`: at once.
    pub expect: Option<u32>,
    /// Write the payload there, once all of it is verified.
    pub output: Option<PathBuf>,
    /// Go once complete and nobody reads from it; else serve until asked to go.
    pub leave: bool,
    /// For tests: where it kills itself.
    pub kill: Option<KillAt>,
    /// Everything else.
    pub seat: Seat,
}

/// A moment at which a clone kills itself: for tests of what the others do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KillAt {
    /// It has a source, and has read nothing.
    Registered,
    /// It pulls this chunk.
    Pull(u64),
    /// It has verified this chunk.
    Chunk(u64),
    /// It has everything, and has told nobody.
    Complete,
}

impl FromStr for KillAt {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |text: &str| text.parse().map_err(|_| format!("`{text}` is no chunk"));
        match text.split_once(':') {
            Some(("pull", chunk)) => number(chunk).map(Self::Pull),
            Some(("chunk", chunk)) => number(chunk).map(Self::Chunk),
            _ if text == "registered" => Ok(Self::Registered),
            _ if text == "complete" => Ok(Self::Complete),
            _ => Err(format!("`{text}` is not registered, pull:N, chunk:N or complete")),
        }
    }
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
    tokio::pin!(stop);
    let client = Arc::new(Client::new(request.rendezvous.clone(), security(&request.seat.network()).await?));
    let (cloned, membership, held) = tokio::select! {
        done = read(&request, &client, None, |_| ()) => done?,
        // Its membership ends with it: the service forgets it a lease later, its readers go elsewhere at once.
        () = &mut stop => return Err(Error::new(Kind::Cancelled, "clone", "stopped by a signal")),
    };
    told(&cloned);
    let evicted = loop {
        if request.leave {
            break None;
        }
        tokio::select! {
            () = &mut stop => break None,
            () = tokio::time::sleep(Duration::from_millis(500)) => {
                if let Some(error) = membership.evicted() {
                    break Some(error);
                }
            }
        }
    };
    if let Ok(membership) = Arc::try_unwrap(membership) {
        request.seat.go(&client, membership, held.1).await;
    }
    drop(held.0);
    evicted.map_or(Ok(()), Err)
}

type Kept = (super::seat::Opened, super::seat::Held);

/// Clones into `arena`; `seen` is told of every range that is verified there. The second future goes, once nobody reads from it
/// any more: until it has ended the arena can be read by others.
pub(crate) async fn clone_into(
    request: CloneRequest,
    arena: Arc<dyn Arena>,
    seen: impl FnMut(ByteRange) + Send,
) -> Result<(Cloned, impl Future<Output = ()> + Send + 'static)> {
    let security = security(&request.seat.network()).await?;
    let client = Arc::new(Client::new(request.rendezvous.clone(), security));
    let (cloned, membership, held) = read(&request, &client, Some(arena), seen).await?;
    let go = async move {
        if let Ok(membership) = Arc::try_unwrap(membership) {
            request.seat.go(&client, membership, held.1).await;
        }
        drop(held.0);
    };
    Ok((cloned, go))
}

/// What the service has of `request`: the content, and the manifest that proves it.
pub(crate) async fn look(request: &CloneRequest) -> Result<Manifest> {
    let client = Client::new(request.rendezvous.clone(), security(&request.seat.network()).await?);
    Ok(proved(&request.wanted, &client, request.seat.patience).await?.1)
}

async fn proved(
    wanted: &Wanted,
    client: &Client,
    patience: Duration,
) -> Result<(Content, Manifest, Vec<u8>)> {
    let content = find(client, wanted, patience).await?;
    let bytes = fetch_manifest(client, &content, patience).await?;
    let (image, rank) = (content.image.clone(), content.rank.clone());
    let (manifest, bytes) = blocking(move || Ok((Manifest::check(&bytes, &image, &rank)?, bytes))).await?;
    Ok((content, manifest, bytes))
}

async fn read(
    request: &CloneRequest,
    client: &Arc<Client>,
    into: Option<Arc<dyn Arena>>,
    mut seen: impl FnMut(ByteRange) + Send,
) -> Result<(Cloned, Arc<Membership>, Kept)> {
    let began = Instant::now();
    let CloneRequest { wanted, seat, .. } = request;
    let (content, manifest, bytes) = proved(wanted, client, seat.patience).await?;
    let digests = manifest.table.digests().clone();
    if digests.payload() != content.bytes {
        let detail = format!("the service says {} bytes, the image {}", content.bytes, digests.payload());
        return Err(Error::new(Kind::Mismatch, "clone", detail).with_peer(client.peer()));
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
    let said = (Role::Clone, content.clone(), request.expect);
    let membership = Arc::new(seat.join(client, &opened, &held, said, bytes).await?);
    if request.kill == Some(KillAt::Registered) {
        die();
    }
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
    // Whoever is next to a source that stopped finds another first, and nobody behind it leaves a healthy one.
    let stall = settings.stall.saturating_add((settings.stall / 4).saturating_mul(depth));
    let blocks = digests.values().len() as u64;
    let job = Job {
        arena: Arc::clone(&held.arena),
        assignment: Assignment { geometry, held: Vec::new(), legs: vec![leg], gate: Gate::Chunk },
        expected: Some(Arc::new(digests)),
        policy: Policy { stall, ..settings.policy() },
        limits: Limits { pull: settings.pull_timeout, ..Limits::default() },
    };
    let sources =
        Members::new(Arc::clone(&membership), Arc::clone(&opened.endpoints), Arc::clone(&held.arena), seat);
    let sources = Arc::new(sources);
    let began = Instant::now();
    let mut observer = {
        let (membership, kill) = (Arc::clone(&membership), request.kill);
        move |step: Step| match step {
            Step::Published { bytes, .. } => membership.progress(bytes),
            Step::Pulling { chunk, .. } if kill == Some(KillAt::Pull(chunk.index)) => die(),
            Step::Verified { chunk, .. } => {
                seen(chunk.range);
                if kill == Some(KillAt::Chunk(chunk.index)) {
                    die();
                }
            }
            _ => {}
        }
    };
    let limit = settings.transfer_timeout;
    let report = tokio::time::timeout(limit, replicate(job, Arc::<Members>::clone(&sources), &mut observer));
    let report = report
        .await
        .map_err(|_| Error::new(Kind::Deadline, "clone", format!("not complete within {limit:?}")))??;
    drop(observer);
    let ready = began.elapsed();
    if request.kill == Some(KillAt::Complete) {
        die();
    }
    membership.complete();
    if let Some(path) = request.output.clone() {
        let arena = Arc::clone(&held.arena);
        blocking(move || payload::write(&*arena, &path)).await?;
    }
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
        bytes_per_s: content.bytes as f64 / ready.as_secs_f64().max(1e-9),
    };
    Ok((cloned, membership, (opened, held)))
}
