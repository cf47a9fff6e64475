//! What is to be loaded, as a person names it.

use crate::{config::Config, service::CloneRequest};
use flashboot_checkpoint::{Coordinate, Image, LayoutOptions, ModelPart, OpenOptions, RankImage};
use flashboot_core::{Error, Kind, Result};
use std::path::PathBuf;

/// What is to be loaded, and where it may come from. At least one place is named, or an id: then the agent is asked.
#[derive(Debug, Clone)]
pub struct Request {
    /// Which rank image, by name; the only one, unless named.
    pub rank: Option<String>,
    /// The image's id, or its first 8 digits or more: nothing else is loaded.
    pub id: Option<String>,
    /// An image's directory.
    pub image: Option<PathBuf>,
    /// An image's objects.
    pub object: Option<FromObject>,
    /// A stock checkpoint.
    pub checkpoint: Option<FromCheckpoint>,
    /// Other ranks that have it.
    pub peer: Option<FromPeer>,
    /// Write the payload to this file, once all of it is there.
    pub output: Option<PathBuf>,
    /// Memory, device, limits, network.
    pub config: Config,
}

impl Request {
    /// Of nothing yet.
    pub fn new(config: Config) -> Self {
        let (rank, id, image, object, checkpoint, peer, output) = Default::default();
        Self { rank, id, image, object, checkpoint, peer, output, config }
    }
}

/// An image in an object store or behind an HTTP server.
#[derive(Clone)]
pub struct FromObject {
    /// `s3://bucket/path` or `https://host/path`.
    pub url: String,
    /// Keys and values as `object_store` names them; values may be secrets.
    pub options: Vec<(String, String)>,
}

impl std::fmt::Debug for FromObject {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FromObject").field("url", &self.url).finish_non_exhaustive()
    }
}

/// A stock checkpoint, and how it is cut.
#[derive(Debug, Clone)]
pub struct FromCheckpoint {
    /// Its directory, index or file.
    pub path: PathBuf,
    /// What is accepted of it.
    pub open: OpenOptions,
    /// How it is cut.
    pub layout: LayoutOptions,
}

/// The replication service that knows who has it.
#[derive(Debug, Clone)]
pub struct FromPeer {
    /// What is asked of it. It leaves once complete.
    pub request: CloneRequest,
}

/// The rank image called so, or the only one.
pub(crate) fn rank_of(image: &Image, name: Option<&str>) -> Result<RankImage> {
    let found = match (name, image.ranks()) {
        (None, [only]) => Some(only),
        (None, _) => None,
        (Some(name), all) => all.iter().find(|rank| rank.coordinate.to_string() == name),
    };
    found.cloned().ok_or_else(|| {
        let names: Vec<_> = image.ranks().iter().take(16).map(|rank| rank.coordinate.to_string()).collect();
        let wanted = name.map_or_else(
            || "one of several ranks is to be named".to_owned(),
            |name| format!("there is no rank {name}"),
        );
        Error::new(
            Kind::Invalid,
            "load",
            format!("{}: {wanted}: {}", image.dir().display(), names.join(", ")),
        )
    })
}

/// The coordinate of the rank called so, or of the only one.
///
/// # Errors
/// [`Kind::Invalid`], with the names that there are.
pub fn coordinate(layout: &LayoutOptions, name: Option<&str>) -> Result<Coordinate> {
    let refused = |e| Error::from(flashboot_checkpoint::Error::from(e));
    let mut ranks = layout.parallel.ranks(ModelPart::Target).map_err(refused)?;
    if layout.draft {
        ranks.extend(layout.parallel.ranks(ModelPart::Draft).map_err(refused)?);
    }
    let found = match (name, ranks.as_slice()) {
        (None, [only]) => Some(only),
        (None, _) => None,
        (Some(name), all) => all.iter().find(|rank| rank.coordinate.to_string() == name),
    };
    found.map(|rank| rank.coordinate).ok_or_else(|| {
        let names: Vec<_> = ranks.iter().take(16).map(|rank| rank.coordinate.to_string()).collect();
        let wanted = name.map_or_else(
            || "one of several ranks is to be named".to_owned(),
            |name| format!("the layout has no rank {name}"),
        );
        Error::new(Kind::Invalid, "load", format!("{wanted}: {}", names.join(", ")))
    })
}
