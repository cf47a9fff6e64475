//! A seed: the image from disk, every block verified, registered, served until it is asked to go.

use super::{
    client,
    recheck::Recheck,
    seat::{Seat, blocking, new_trace},
    security,
    standing::Standing,
};
use crate::replicate::{fill, threads};
use flashboot_checkpoint::{Image, Manifest, RankImage};
use flashboot_core::{Error, Kind, Result, ShardId};
use flashboot_rendezvous::{
    protocol::{Content, MemberId, Role},
    store::Address,
};
use serde::Serialize;
use std::{net::SocketAddr, sync::Arc, time::Duration};
use tokio::time::Instant;
use tracing::{Instrument as _, info_span};

/// How often a seed looks whether the service still has it.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// A seed to be.
#[derive(Debug, Clone)]
pub struct SeedRequest {
    /// The image, opened.
    pub image: Image,
    /// Which rank image of it.
    pub rank: RankImage,
    /// What people call the model, and its edition.
    pub model: String,
    /// Which edition of it; may be empty.
    pub revision: String,
    /// The service; `None`: only the embedded one.
    pub rendezvous: Option<Address>,
    /// Where to serve the service itself; with a store, whenever that gives it the post.
    pub embed: Option<SocketAddr>,
    /// How long members of the embedded service may be silent.
    pub lease: Duration,
    /// Everything else.
    pub seat: Seat,
}

/// A seed that serves.
#[derive(Debug, Clone, Serialize)]
pub struct Serving {
    /// The service that it is registered at, as clones dial it.
    pub rendezvous: String,
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
    /// By which transports it can be read.
    pub transports: Vec<String>,
    /// Filling the arena from disk, every block verified, in milliseconds.
    pub load_ms: f64,
    /// The id that its log's spans carry.
    pub trace: String,
}

/// What identifies the bytes of `rank`, which people call `model` and `revision`; and the manifest that proves them.
pub(super) fn content(
    (image, rank): (&Image, &RankImage),
    (model, revision): (&str, &str),
) -> Result<(Content, Vec<u8>)> {
    let manifest = Manifest::read(image, rank)?;
    let fingerprint = serde_json::to_vec(&image.metadata().fingerprint)
        .map_err(|e| Error::new(Kind::Invalid, "json", e.to_string()))?;
    let content = Content {
        image: image.id().to_owned(),
        rank: rank.coordinate.to_string(),
        model: model.to_owned(),
        revision: revision.to_owned(),
        fingerprint: blake3::hash(&fingerprint).to_hex().to_string(),
        bytes: rank.payload_bytes,
        manifest: blake3::hash(&manifest).to_hex().to_string(),
        manifest_bytes: manifest.len() as u64,
    };
    Ok((content, manifest))
}

/// Seeds until `stop`; then readers are drained. `told` is told once clones can come. Needs a tokio runtime with IO, time
/// and threads that may block.
///
/// # Errors
/// A damaged image, no transport, no memory; the service's refusal, also a later one: another member of the name came.
pub async fn seed(
    request: SeedRequest,
    told: impl FnOnce(&Serving),
    stop: impl Future<Output = ()>,
) -> Result<()> {
    let trace = new_trace()?;
    let span = info_span!("seed", model = request.model, trace);
    seeded(request, trace, told, stop).instrument(span).await
}

async fn seeded(
    request: SeedRequest,
    trace: String,
    told: impl FnOnce(&Serving),
    stop: impl Future<Output = ()>,
) -> Result<()> {
    let seat = request.seat.clone();
    let watched = seat.observed.begin("seed");
    let network = seat.network();
    let security = security(&network).await?;
    let mut rendezvous = request.rendezvous.clone();
    // Ends last of all.
    let standing = match (request.embed, &rendezvous) {
        (Some(at), Some(store @ (Address::Etcd(_) | Address::Dir(_)))) => {
            Some(Standing::behind(store, at, request.lease, &network, &security, &seat.observed)?)
        }
        (Some(at), _) => {
            let (standing, endpoint) =
                Standing::embedded(at, network.advertise(), request.lease, &security, &seat.observed).await?;
            rendezvous.get_or_insert_with(|| endpoint.into());
            Some(standing)
        }
        (None, Some(address)) => Standing::candidate(&seat, address, request.lease, &security),
        (None, None) => None,
    };
    let nowhere = || Error::new(Kind::Invalid, "seed", "neither a service to register at nor one to embed");
    let rendezvous = rendezvous.ok_or_else(nowhere)?;

    let opened = seat.open().await?;
    let (content, manifest) = blocking({
        let request = request.clone();
        move || content((&request.image, &request.rank), (&request.model, &request.revision))
    })
    .await?;
    let held = seat.hold(&opened, content.bytes).await?;
    watched.filling(MemberId(held.generation), &content, &trace);
    let began = Instant::now();
    blocking({
        let (arena, rank, memory) = (Arc::clone(&held.arena), request.rank.clone(), seat.config.memory);
        move || {
            fill(&rank.path, rank.table.digests(), &arena, threads(memory))?;
            arena.publish(ShardId(0), arena.payload())
        }
    })
    .await?;
    watched.took("load", began.elapsed());
    watched.verified(content.bytes, true);
    let load_ms = began.elapsed().as_secs_f64() * 1e3;

    let (client, _) = client(&rendezvous, &network).await?;
    let serving = Serving {
        rendezvous: rendezvous.to_string(),
        member: MemberId(held.generation),
        image: content.image.clone(),
        model: content.model.clone(),
        revision: content.revision.clone(),
        rank: content.rank.clone(),
        bytes: content.bytes,
        transports: held.exports.iter().map(|e| e.locator().transport.as_str().to_owned()).collect(),
        load_ms,
        trace: trace.clone(),
    };
    let membership =
        seat.join(&client, &opened, &held, (Role::Seed, content, None), manifest, &trace).await?;
    watched.registered(membership.pulse());
    watched.ready();
    told(&serving);

    let mut recheck = Recheck::new(&held.arena, &Arc::new(request.rank.table.digests().clone()));
    tokio::pin!(stop);
    let evicted = loop {
        tokio::select! {
            () = &mut stop => break None,
            () = tokio::time::sleep(LOOK_EVERY) => {
                if let Some(error) = membership.evicted().or_else(|| recheck.look(&membership)) {
                    break Some(error);
                }
            }
        }
    };
    watched.draining();
    seat.go(&client, membership, held, seat.drain_after(evicted.as_ref())).await;
    if let Some(standing) = standing {
        standing.end().await;
    }
    evicted.map_or(Ok(()), Err)
}
