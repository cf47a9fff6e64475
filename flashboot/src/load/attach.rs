//! Attaching: what the agent of this host holds, used where it is, and nothing else tried.

use super::{Contents, Known, Lies, Named, Placed, Progress, Request, device, rank_of, run};
use crate::{
    agent::{at, place_of},
    config::{Attach, Config},
};
use flashboot_checkpoint::Image;
use flashboot_core::{Error, Kind, Result};
use flashboot_cuda::Context;
use flashboot_loader::{
    agent::{Client, Entry, HeldSource, Place, Target},
    source::Wanted,
};
use std::{path::PathBuf, sync::Arc, time::Instant};

/// What is to be attached. Nothing need be named: then it is the one arena that is held where `config` says.
#[derive(Debug, Clone, Default)]
pub struct AttachRequest {
    /// An image's directory, whose metadata and table say what is wanted; no byte of its payload is read.
    pub image: Option<PathBuf>,
    /// The image's id, or its first 8 digits or more, where its directory is not at hand: the agent gives what the id proves.
    pub id: Option<String>,
    /// Which rank image, by name; the only one, unless named.
    pub rank: Option<String>,
    /// `replicate.device` says where, `load.attach` whether it is used where it is or copied, `agent` which agent.
    pub config: Config,
}

/// Attaches what the agent holds; while it is still filling it, `progress` stands still. Needs a tokio runtime.
///
/// # Errors
/// [`Kind::Unavailable`] where no agent runs or it does not hold that; [`Kind::Invalid`] where several would fit and none was
/// named; [`Kind::Mismatch`] where image and id disagree.
pub async fn attach(mut request: AttachRequest, progress: Progress) -> Result<Placed> {
    request.id = request.id.as_deref().map(crate::service::image_id).transpose()?;
    let device = device(&request.config).await?;
    let work = move || {
        let context = device.as_ref().map(Context::open).transpose()?;
        let began = Instant::now();
        let (wanted, contents) = known(&request, &place_of(context.as_ref()))?;
        let private = request.config.load.attach == Attach::Private;
        let target = context.clone().map_or(Target::Host, Target::Gpu);
        let held = HeldSource::new(at(&request.config), target, private);
        let sources = vec![Known::Plain(Arc::new(held))];
        let request = Request { rank: request.rank, id: request.id, ..Request::new(request.config) };
        run(
            &request,
            Named { wanted, contents: Lies::Known(Box::new(contents)), sources },
            context,
            began,
            &progress,
        )
    };
    crate::service::blocking(work).await
}

/// What the request means: by the image's own files, else by what the agent was given with it.
fn known(request: &AttachRequest, place: &Place) -> Result<(Wanted, Contents)> {
    let Some(path) = &request.image else {
        let client = Client::dial(&at(&request.config))?;
        let Entry { image, rank, .. } = the_one(&client, request, place)?;
        let manifest = client.manifest(&image, &rank)?;
        let wanted = Wanted {
            image: Some(manifest.metadata.id.clone()),
            rank: manifest.entry.coordinate.to_string(),
            payload: manifest.entry.payload_bytes,
            digests: manifest.table.digests().clone().into(),
        };
        return Ok((wanted, Contents::of_manifest(Arc::new(manifest))));
    };
    let image = Image::open(path)?;
    let rank = rank_of(&image, request.rank.as_deref())?;
    if let Some(id) = request.id.as_ref().filter(|id| !image.id().starts_with(*id)) {
        let detail = format!("{} is image {}, {id} is wanted", path.display(), image.id());
        return Err(Error::new(Kind::Mismatch, "attach", detail));
    }
    let wanted = Wanted {
        image: Some(image.id().to_owned()),
        rank: rank.coordinate.to_string(),
        payload: rank.payload_bytes,
        digests: rank.table.digests().clone().into(),
    };
    Ok((wanted, Contents::of_rank(&image, &rank)))
}

/// The only held arena there that the request can mean.
fn the_one(client: &Client, request: &AttachRequest, place: &Place) -> Result<Entry> {
    let entries = client.status()?.entries.into_iter().map(|listed| listed.entry);
    let means = |wanted: &Option<String>, found: &str| wanted.as_deref().is_none_or(|w| w == found);
    let mut fit: Vec<_> = entries
        .filter(|e| e.held && e.place == *place)
        .filter(|e| {
            request.id.as_deref().is_none_or(|id| e.image.starts_with(id)) && means(&request.rank, &e.rank)
        })
        .collect();
    match (fit.pop(), fit.is_empty()) {
        (Some(only), true) => Ok(only),
        (None, _) => {
            let what = request.id.as_deref().unwrap_or("anything");
            let rank = request.rank.as_deref().map_or_else(String::new, |rank| format!("{rank} of "));
            Err(Error::new(
                Kind::Unavailable,
                "attach",
                format!("the agent holds nothing of {rank}{what} at {place}"),
            )
            .with_remedy("have it held first: flashboot hold IMAGE"))
        }
        (Some(last), false) => {
            fit.push(last);
            let names: Vec<_> = fit.iter().take(8).map(|e| format!("{} of {}", e.rank, e.image)).collect();
            let detail = format!("{} arenas are held at {place}: {}", fit.len(), names.join(", "));
            Err(Error::new(Kind::Invalid, "attach", detail).with_remedy("name the image's id, or the rank"))
        }
    }
}
