//! What is asked of the agent of this host.

use crate::{
    config::Config,
    load::{FromObject, object_config, rank_of},
    replicate::resolve_devices,
    service::{blocking, only},
};
use flashboot_checkpoint::{Image, Manifest};
use flashboot_core::{Error, Kind, Result};
use flashboot_cuda::Context;
use flashboot_loader::{
    agent::{
        Client, ClientConfig, Entry, HeldSource, Key, Order, Payload, Place, SOCKET, ServeConfig,
        StagedSource, Status, Target,
    },
    source::{ObjectImage, Source},
};
use std::{collections::BTreeSet, path::PathBuf, sync::Arc, time::Duration};

/// An image that the agent is to have in memory.
#[derive(Debug, Clone)]
pub struct KeepRequest {
    /// Where the image is.
    pub from: KeepFrom,
    /// Which rank image, by name; the only one, unless named.
    pub rank: Option<String>,
    /// Higher ones push lower ones out.
    pub priority: i32,
    /// Held, where `replicate.device` says: for how long nobody may use it before it goes, `None` for ever. Else it is staged in
    /// host memory.
    pub hold: Option<Option<Duration>>,
    /// Come back once it is ready; else once it is admitted.
    pub wait: bool,
}

/// Where an image is that the agent is to have.
#[derive(Debug, Clone)]
pub enum KeepFrom {
    /// In this directory.
    Directory(PathBuf),
    /// Among objects, which the agent fetches by itself.
    Objects(FromObject),
}

/// Has the agent keep what `request` names; `each` hears of bytes that are verified, of how many. Needs a tokio runtime.
///
/// # Errors
/// The image's own; the agent's refusals, such as [`Kind::Exhausted`] with sizes and limit.
pub async fn keep(
    config: &Config,
    request: KeepRequest,
    mut each: impl FnMut(u64, u64) + Send + 'static,
) -> Result<Entry> {
    let place = match request.hold {
        None => Place::Host,
        Some(_) => place(config).await?,
    };
    let agent = at(config);
    let load = config.load.clone();
    blocking(move || {
        let (image, rank, manifest, payload) = match &request.from {
            KeepFrom::Directory(path) => {
                let image = Image::open(path)?;
                let rank = rank_of(&image, request.rank.as_deref())?;
                let manifest = Manifest::read(&image, &rank)?;
                let name = rank.coordinate.to_string();
                (image.id().to_owned(), name, manifest, Payload::File(rank.path))
            }
            KeepFrom::Objects(from) => {
                let config = object_config(&load, from);
                let objects = ObjectImage::open(config.clone())?;
                let (manifest, bytes) = objects.manifest_bytes(request.rank.as_deref(), None)?;
                let (id, rank) = (manifest.metadata.id, manifest.entry.coordinate.to_string());
                (id, rank, bytes, Payload::Object(config, manifest.entry.payload))
            }
        };
        let order = Order {
            key: Key { image, rank, place },
            manifest,
            payload,
            priority: request.priority,
            hold: request.hold,
            wait: request.wait,
        };
        Client::dial(&agent)?.keep(&order, &mut each)
    })
    .await
}

/// Where `replicate.device` says that something is to be held.
async fn place(config: &Config) -> Result<Place> {
    let mut found = resolve_devices(&config.replicate.device, config.replicate.setup_timeout).await?;
    if found.len() > 1 {
        let detail = format!("{} GPUs, and one rank goes into one: say which", found.len());
        return Err(Error::new(Kind::Invalid, "device", detail));
    }
    Ok(found.pop().map_or(Place::Host, |device| Place::Gpu(device.uuid().to_owned())))
}

/// Everything that the agent has.
///
/// # Errors
/// [`Kind::Unavailable`] where none runs.
pub async fn status(config: &Config) -> Result<Status> {
    let agent = at(config);
    blocking(move || Client::dial(&agent)?.status()).await
}

/// Has the agent give up what these name and nobody has attached: an image by its id or the beginning of it, a rank by its name.
///
/// # Errors
/// [`Kind::Unavailable`] where it has nothing of that name, [`Kind::Invalid`] where the beginning is several images',
/// [`Kind::Busy`] where all of it is attached.
pub async fn evict(config: &Config, image: Option<String>, rank: Option<String>) -> Result<Vec<Entry>> {
    let agent = at(config);
    blocking(move || {
        let client = Client::dial(&agent)?;
        let image = image.map(|image| whole(&client.status()?, &image)).transpose()?;
        client.evict(image.as_deref(), rank.as_deref(), None)
    })
    .await
}

/// The only image whose id begins so.
fn whole(status: &Status, image: &str) -> Result<String> {
    let ids = status.entries.iter().map(|listed| &listed.entry.image);
    let nothing = || {
        Error::new(Kind::Unavailable, "agent", format!("the agent has nothing of the image {image}"))
            .with_remedy("see what it has (flashboot ls), or have it stage or hold the image")
    };
    only(image, &ids.filter(|id| id.starts_with(image)).collect())?.ok_or_else(nothing)
}

/// What proves a rank image that the agent has: of the image whose id is `image` or begins so, the rank called so or the
/// only one. Who asks by a beginning believes the agent which image that is.
///
/// # Errors
/// [`Kind::Unavailable`] without an agent, or where it has nothing of that name; [`Kind::Invalid`] where that is the name of
/// several.
pub(crate) fn manifest(config: &Config, image: &str, rank: Option<&str>) -> Result<Manifest> {
    let agent = at(config);
    if !is_there(config, &agent) {
        let detail =
            format!("an image's id alone is asked of the node agent: none is at {}", agent.socket.display());
        return Err(Error::new(Kind::Unavailable, "agent", detail).with_remedy(
            "say where the image lies too, or start an agent and have it hold or stage the image",
        ));
    }
    let client = Client::dial(&agent)?;
    let status = client.status()?;
    let image = whole(&status, image)?;
    let entries = status.entries.iter().map(|listed| &listed.entry).filter(|entry| entry.image == image);
    let ranks: BTreeSet<_> = entries.map(|entry| entry.rank.as_str()).collect();
    let named = rank.or_else(|| ranks.first().copied()).unwrap_or_default();
    let found = client.manifest(&image, named)?;
    if rank.is_none() && found.metadata.ranks.len() > 1 {
        let ranks: Vec<_> = ranks.into_iter().take(16).collect();
        let detail =
            format!("{image}: one of several ranks is to be named; the agent has {}", ranks.join(", "));
        return Err(Error::new(Kind::Invalid, "load", detail));
    }
    Ok(found)
}

/// Whether there is one to ask: one was named, or lives where one is looked for.
fn is_there(config: &Config, agent: &ClientConfig) -> bool {
    config.agent.directory.is_some() || agent.socket.exists()
}

/// Where an arena in this context's GPU is, or in host memory.
pub(crate) fn place_of(context: Option<&Context>) -> Place {
    context.map_or(Place::Host, |context| Place::Gpu(context.device().uuid().to_owned()))
}

/// The agent of this host.
pub(crate) fn at(config: &Config) -> ClientConfig {
    let agent = &config.agent;
    let directory = agent.directory.clone().unwrap_or_else(|| ServeConfig::default().directory);
    ClientConfig {
        socket: directory.join(format!("{SOCKET}.sock")),
        allow_uids: agent.allow_uids.clone(),
        allow_gids: agent.allow_gids.clone(),
    }
}

/// Whether the agent, if there is one, has given something up for `payload` bytes at `place`.
pub(crate) fn make_room(config: &Config, place: &Place, payload: u64) -> bool {
    let agent = at(config);
    if !agent.socket.exists() {
        return false;
    }
    // A little more: a control block, a device's rounding.
    let bytes = payload.saturating_add(4 << 20);
    let gone = Client::dial(&agent).and_then(|client| client.room(place, bytes, config.load.priority));
    match gone {
        Ok(gone) => {
            tracing::info!(%place, given_up = gone.len(), "the agent made room");
            !gone.is_empty()
        }
        Err(error) => {
            tracing::warn!(%error, "the agent makes no room");
            false
        }
    }
}

/// The agent as sources of a load into `context`'s GPU, or into host memory; nothing where none was named and none is there.
pub(crate) fn of_load(config: &Config, context: Option<&Context>) -> Vec<Arc<dyn Source>> {
    let agent = at(config);
    if !is_there(config, &agent) {
        return Vec::new();
    }
    let target = context.map_or(Target::Host, |context| Target::Gpu(context.clone()));
    let private = config.load.attach == crate::config::Attach::Private;
    vec![
        Arc::new(HeldSource::new(agent.clone(), target, private)),
        Arc::new(StagedSource::new(agent, config.load.push)),
    ]
}
