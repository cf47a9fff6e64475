//! An image's table is read while its bytes are already on their way: a table of ten thousand tensors takes as long as
//! hundreds of megabytes. `metadata.json` alone says what to ask for, and the id proves it; nothing is called verified, and
//! nothing is given back, before the table is there and sound.

use super::{Contents, Request};
use flashboot_checkpoint::ImageHead;
use flashboot_core::{Error, Kind, Result};
use flashboot_loader::{
    pipeline::{Proof, Teller},
    source::{ImageSource, Wanted},
};
use std::{
    path::Path,
    sync::Arc,
    thread::{Builder, JoinHandle},
};

/// A rank of an image whose table is being read.
pub(super) struct Early {
    pub(super) wanted: Wanted,
    pub(super) source: ImageSource,
    pub(super) reading: Reading,
}

/// The thread that reads the table.
pub(super) struct Reading(JoinHandle<Result<Contents>>);

/// Begins to read what `request` names of the image in `path`. Nothing, where it is not plain from the metadata which rank that
/// is, or no thread is to be had: whoever opens the image whole says what is wrong.
pub(super) fn begin(path: &Path, request: &Request) -> Option<Early> {
    let head = ImageHead::open(path).ok()?;
    let metadata = head.metadata();
    let entry = match (&request.rank, metadata.ranks.as_slice()) {
        (None, [only]) => only,
        (None, _) => return None,
        (Some(name), all) => all.iter().find(|entry| entry.coordinate.to_string() == *name)?,
    };
    let payload = head.payload(entry).ok()?;
    let (proof, teller) = Proof::later(entry.payload_bytes);
    let wanted = Wanted {
        image: Some(metadata.id.clone()),
        rank: entry.coordinate.to_string(),
        payload: entry.payload_bytes,
        digests: proof.clone(),
    };
    let (source, rank) = (ImageSource::new(&payload, proof), wanted.rank.clone());
    let read = move || read(head, &rank, teller);
    let reading = Builder::new().name("flashboot-table".into()).spawn(read).ok()?;
    Some(Early { wanted, source, reading: Reading(reading) })
}

fn read(head: ImageHead, rank: &str, teller: Teller) -> Result<Contents> {
    let found = head.image().map_err(Error::from).and_then(|image| {
        let rank = super::rank_of(&image, Some(rank))?;
        Ok((image, rank))
    });
    let (image, rank) = match found {
        Ok(found) => found,
        Err(e) => {
            teller.tell(Err(e.clone()));
            return Err(e);
        }
    };
    teller.tell(Ok(Arc::new(rank.table.digests().clone())));
    Ok(Contents::of_rank(&image, &rank))
}

impl Reading {
    /// What lies where, once it is known.
    ///
    /// # Errors
    /// What is wrong with the image.
    pub(super) fn end(self) -> Result<Contents> {
        let defect = |_| Error::new(Kind::Io, "load", "reading the table panicked: a defect of flashboot's");
        self.0.join().map_err(defect)?
    }
}
