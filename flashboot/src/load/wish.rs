//! A load in the words that faces take: texts and paths, each of which may be missing.

use super::{FromCheckpoint, FromObject, FromPeer, Request};
use crate::{
    config::{Choice, Config, Devices},
    service::{CloneRequest, Seat},
};
use flashboot_checkpoint::{LayoutOptions, OpenOptions, is_image};
use flashboot_core::{Error, Kind, Result};
use flashboot_loader::source::SourceKind;
use flashboot_rendezvous::{protocol::Wanted, store::Address};
use std::{path::PathBuf, str::FromStr, time::Duration};

/// What is to be loaded, and from where, as a caller's arguments say it.
#[derive(Debug, Clone, Default)]
pub struct Wish {
    /// An image's directory, or a stock checkpoint: whichever lies there.
    pub path: Option<PathBuf>,
    /// A stock checkpoint to go on with.
    pub checkpoint: Option<PathBuf>,
    /// An image's objects.
    pub object: Option<FromObject>,
    /// The replication service, to be asked for the model or the image.
    pub rendezvous: Option<String>,
    /// What people call the model.
    pub model: Option<String>,
    /// Which edition of it.
    pub revision: Option<String>,
    /// Which rank image; the only one, unless named.
    pub rank: Option<String>,
    /// The image's id: nothing else is loaded.
    pub image_id: Option<String>,
    /// Kinds of sources, in order, in place of the configured ones.
    pub sources: Option<Vec<String>>,
    /// Everything else.
    pub config: Config,
    /// How long the service and further sources are waited for.
    pub patience: Duration,
    /// Where directories for sockets are made; a short path.
    pub directory: PathBuf,
}

impl Wish {
    /// What is loaded.
    ///
    /// # Errors
    /// [`Kind::Invalid`] for a word that means nothing, by its name; those of looking at `path`.
    pub fn request(self) -> Result<Request> {
        let Self { mut config, .. } = self;
        if let Some(sources) = &self.sources {
            let kinds = sources.iter().map(|name| word::<SourceKind>("sources", name));
            config.load.sources = kinds.collect::<Result<_>>()?;
        }
        let (image, checkpoint) = match (self.path, self.checkpoint) {
            (Some(path), checkpoint) if is_image(&path)? => (Some(path), checkpoint),
            (Some(_), Some(_)) => {
                return Err(Error::new(Kind::Invalid, "load", "two checkpoints were named"));
            }
            (path, checkpoint) => (None, path.or(checkpoint)),
        };
        let open = open_options(&config);
        let peer = match &self.rendezvous {
            None => None,
            Some(address) => {
                let rendezvous: Address = word("rendezvous", address)?;
                let seat = Seat { patience: self.patience, ..Seat::new(config.clone(), self.directory) };
                let (model, revision) = (self.model, self.revision);
                let wanted =
                    Wanted { image: self.image_id.clone(), model, revision, rank: self.rank.clone() };
                let (expect, output, kill) = (None, None, None);
                let request = CloneRequest { wanted, rendezvous, expect, output, leave: true, kill, seat };
                Some(FromPeer { request })
            }
        };
        let layout = LayoutOptions::default();
        Ok(Request {
            rank: self.rank,
            id: self.image_id,
            image,
            object: self.object,
            checkpoint: checkpoint.map(|path| FromCheckpoint { path, open, layout }),
            peer,
            ..Request::new(config)
        })
    }
}

/// Puts what has an argument of its own over the configuration: one device, `cpu` being the host's memory, and the transport.
///
/// # Errors
/// [`Kind::Invalid`] for a word that means nothing.
pub fn choose(config: &mut Config, device: Option<&str>, transport: Option<&str>) -> Result<()> {
    if let Some(device) = device {
        // As frameworks name the host.
        config.replicate.device = word::<Devices>("device", if device == "cpu" { "host" } else { device })?;
    }
    if let Some(transport) = transport {
        config.replicate.transport = word::<Choice>("transport", transport)?;
    }
    Ok(())
}

/// How the configuration says that checkpoints are read.
pub fn open_options(config: &Config) -> OpenOptions {
    OpenOptions {
        header_cap: config.pack.header_cap,
        allow_trailing_bytes: config.pack.allow_trailing,
        ..OpenOptions::default()
    }
}

/// What a word of an argument means.
///
/// # Errors
/// [`Kind::Invalid`], with the argument's name.
pub fn word<T: FromStr<Err: std::fmt::Display>>(argument: &'static str, text: &str) -> Result<T> {
    text.parse().map_err(|e: T::Err| Error::new(Kind::Invalid, argument, e.to_string()))
}
