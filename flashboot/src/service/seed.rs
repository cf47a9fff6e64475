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
use flashboot_core::{Arena, Error, Kind, Result, ShardId};
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

/// Where a seed's bytes are.
#[derive(Debug, Clone)]
pub enum SeedFrom {
    /// On disk: they are read into an arena of the seed's own, and verified there.
    Image(Box<(Image, RankImage)>),
    /// In an arena of this process, which is served as it lies. Whoever asks has compared its blocks with the manifest's digests,
    /// and keeps from changing them while it is served; what is served already is another generation from then on.
    Arena(Arc<dyn Arena>, Arc<Manifest>),
}

/// A seed to be.
#[derive(Debug, Clone)]
pub struct SeedRequest {
    /// Where its bytes are.
    pub from: SeedFrom,
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

/// The manifest that proves the bytes. Blocks.
fn manifest(from: &SeedFrom) -> Result<Arc<Manifest>> {
    match from {
        SeedFrom::Image(from) => Ok(Arc::new(Manifest::of(&from.0, &from.1)?)),
        SeedFrom::Arena(arena, manifest) if arena.payload() == manifest.entry.payload_bytes => {
            Ok(Arc::clone(manifest))
        }
        SeedFrom::Arena(arena, manifest) => {
            let (found, needed) = (arena.payload(), manifest.entry.payload_bytes);
            let detail = format!("the arena has {found} bytes, the image's payload {needed}");
            Err(Error::new(Kind::Invalid, "seed", detail))
        }
    }
}

/// What identifies the bytes that `manifest` proves, which people call `model` and `revision`.
pub(super) fn content(manifest: &Manifest, (model, revision): (&str, &str)) -> Result<Content> {
    let fingerprint = serde_json::to_vec(&manifest.metadata.fingerprint)
        .map_err(|e| Error::new(Kind::Invalid, "json", e.to_string()))?;
    Ok(Content {
        image: manifest.metadata.id.clone(),
        rank: manifest.entry.coordinate.to_string(),
        model: model.to_owned(),
        revision: revision.to_owned(),
        fingerprint: blake3::hash(&fingerprint).to_hex().to_string(),
        bytes: manifest.entry.payload_bytes,
        manifest: blake3::hash(manifest.bytes()).to_hex().to_string(),
        manifest_bytes: manifest.bytes().len() as u64,
    })
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
        move || {
            let manifest = manifest(&request.from)?;
            Ok((content(&manifest, (&request.model, &request.revision))?, manifest))
        }
    })
    .await?;
    let held = match &request.from {
        SeedFrom::Image(..) => seat.hold(&opened, content.bytes).await?,
        SeedFrom::Arena(arena, _) => seat.hold_in(&opened, Arc::clone(arena)).await?,
    };
    watched.filling(MemberId(held.generation), &content, &trace);
    let began = Instant::now();
    blocking({
        let (arena, from, memory) = (Arc::clone(&held.arena), request.from.clone(), seat.config.memory);
        move || {
            if let SeedFrom::Image(from) = from {
                let rank = &from.1;
                fill(&rank.path, rank.table.digests(), &arena, threads(memory))?;
            }
            arena.publish(ShardId(0), arena.payload())
        }
    })
    .await?;
    match &request.from {
        SeedFrom::Image(..) => {
            watched.took("load", began.elapsed());
            watched.verified(content.bytes, true);
        }
        SeedFrom::Arena(..) => watched.holds(content.bytes),
    }
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
    let membership = seat
        .join(&client, &opened, &held, (Role::Seed, content, None), manifest.bytes().to_vec(), &trace)
        .await?;
    watched.registered(membership.pulse());
    watched.ready();
    told(&serving);

    let mut recheck = Recheck::new(&held.arena, &Arc::new(manifest.table.digests().clone()));
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
