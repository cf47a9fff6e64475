//! A rank image's file.

use super::{Delivered, Load, Source, SourceKind};
use crate::{
    io::{Each, Lane, SourceFile},
    pipeline::{FillConfig, Filling, Phases, Producer, Proof, fill},
};
use flashboot_core::{ByteRange, Digests, Error, Kind, Result};
use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

/// A rank image's payload on a file system. What it holds is known by its digests: those that it was packed with, and
/// those that are wanted, must be the same.
#[derive(Debug, Clone)]
pub struct ImageSource {
    path: PathBuf,
    digests: Proof,
}

impl ImageSource {
    /// The payload at `path`, which its table says has `digests`.
    pub fn new(path: &Path, digests: impl Into<Proof>) -> Self {
        Self { path: path.into(), digests: digests.into() }
    }
}

impl Source for ImageSource {
    fn kind(&self) -> SourceKind {
        SourceKind::Image
    }

    fn name(&self) -> String {
        self.path.display().to_string()
    }

    fn probe(&self, load: &Load) -> Result<()> {
        let (wanted, holds) = (load.wanted().digests.get()?, self.digests.get()?);
        let same = |wanted: &Arc<Digests>| {
            holds.is_some_and(|holds| Arc::ptr_eq(wanted, holds) || **wanted == **holds)
        };
        if wanted.is_some_and(|wanted| !same(wanted)) {
            let detail = format!("{}: holds other bytes than those that are wanted", self.path.display());
            return Err(Error::new(Kind::Mismatch, "load", detail));
        }
        open(self, load).map(drop)
    }

    fn deliver(&self, load: &Load) -> Result<Delivered> {
        let file = open(self, load)?;
        fill_from(&file, &FileProducer(&file), load.filling()?, load.config(), load.phases())?;
        Ok(Delivered::Filled)
    }
}

/// Fills what is missing of `filling` from `file` by `producer`, and says of bytes that are wrong which file they are of.
pub(crate) fn fill_from(
    file: &SourceFile,
    producer: &dyn Producer,
    filling: &Filling,
    config: &FillConfig,
    phases: &Phases,
) -> Result<u64> {
    // A file that changed explains what went wrong better than a digest does.
    match fill(filling, producer, config, phases) {
        Err(e) if e.kind() == Kind::Corrupt => file.unchanged().and(Err(explained(file.path(), &e))),
        other => other,
    }
}

fn explained(path: &Path, e: &Error) -> Error {
    let explained = Error::new(e.kind(), e.op(), format!("{}: {}", path.display(), e.detail()));
    let explained = explained.with_remedy(e.remedy().unwrap_or("pack or fetch the image again"));
    match e.chunk() {
        Some(chunk) => explained.with_chunk(chunk),
        None => explained,
    }
}

/// The file, with the length that is wanted.
fn open(source: &ImageSource, load: &Load) -> Result<SourceFile> {
    let file = load.config().io.open(&source.path)?;
    let needed = load.wanted().payload;
    if file.len() != needed {
        let detail = format!("{}: {needed} bytes needed, {} found", source.path.display(), file.len());
        return Err(Error::new(Kind::Corrupt, "load", detail).with_remedy("pack or fetch the image again"));
    }
    Ok(file)
}

/// A payload that lies in a file byte for byte.
#[derive(Debug)]
pub struct FileProducer<'f>(pub &'f SourceFile);

impl Producer for FileProducer<'_> {
    fn produce(&self, lane: &mut Lane, unit: ByteRange, into: &mut [u8], each: &mut Each<'_>) -> Result<()> {
        lane.read(self.0, unit.start, into, each)
    }
}
