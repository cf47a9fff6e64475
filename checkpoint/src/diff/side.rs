//! One of the two models that are compared: every name, aliases included, and where its bytes are.

use crate::direct::zeroes;
use crate::error::{Error, Result};
use crate::gather::Gather;
use crate::image::{Image, Stage};
use crate::inspect::Opened;
use crate::open::Checkpoint;
use crate::ranks::{ImageModel, Provider as _};
use crate::source::Source;
use flashboot_core::Dtype;
use std::collections::BTreeMap;
use std::path::Path;

/// What lies between runs is read with them, as long as it is no more than they are.
const SPARSE: u64 = 2;

/// A tensor of one side.
pub(super) struct Entry<'t> {
    pub(super) dtype: Dtype,
    pub(super) shape: &'t [u64],
    pub(super) bytes: u64,
    place: Place,
    /// Of a view: whose bytes it sees, from where on and in which strides; its own bytes are none.
    pub(super) view: Option<View<'t>>,
}

/// What a view sees.
#[derive(PartialEq, Eq)]
pub(super) struct View<'t> {
    of: &'t str,
    offset: u64,
    stride: &'t [u64],
}

/// Where a tensor's bytes are.
enum Place {
    /// In one run of a file.
    At { file: usize, at: u64 },
    /// In whichever ranks' images hold parts of the model's tensor of that number.
    Parts(u32),
}

/// Every name of one side, and the files that hold the bytes.
pub(super) struct Side<'t> {
    pub(super) entries: BTreeMap<String, Entry<'t>>,
    files: Vec<Source>,
    model: Option<&'t ImageModel>,
}

/// The model that an image was made of, where it is to be compared as that: with a checkpoint, or with an image that
/// was cut in another way.
pub(super) fn as_model(opened: &Opened, other: &Opened) -> Result<Option<ImageModel>> {
    let Opened::Image(image) = opened else { return Ok(None) };
    let fingerprint = &image.metadata().fingerprint;
    let alike = match other {
        Opened::Checkpoint(_) => image.ranks().len() == 1 && fingerprint.stage == Stage::Sliced,
        Opened::Image(other) => other.metadata().fingerprint.layout == fingerprint.layout,
    };
    let changed = |opened: &Opened| match opened {
        Opened::Image(image) => image.metadata().fingerprint.stage == Stage::KernelReady,
        Opened::Checkpoint(_) => false,
    };
    // An engine's own bytes are no checkpoint's.
    if alike || changed(opened) || changed(other) {
        return Ok(None);
    }
    ImageModel::new(image).map(Some)
}

impl<'t> Side<'t> {
    pub(super) fn new(opened: &'t Opened, model: Option<&'t ImageModel>) -> Result<Self> {
        match (model, opened) {
            (Some(model), _) => Ok(Self::of_model(model)),
            (None, Opened::Checkpoint(checkpoint)) => Self::of_checkpoint(checkpoint),
            (None, Opened::Image(image)) => Self::of_image(image),
        }
    }

    fn of_checkpoint(checkpoint: &'t Checkpoint) -> Result<Self> {
        let files = checkpoint.shards().iter().map(|s| s.reopen()).collect::<Result<Vec<_>>>()?;
        let (tensors, shards) = (checkpoint.tensors(), checkpoint.shards());
        let entry = |number| {
            let t = tensors.at(number)?;
            let at = shards.get(t.shard)?.data_start().saturating_add(t.begin);
            let place = Place::At { file: t.shard, at };
            Some(Entry { dtype: t.dtype, shape: t.shape, bytes: t.bytes, place, view: None })
        };
        let own = (0..tensors.len()).filter_map(|n| Some((tensors.at(n)?.name.to_owned(), entry(n)?)));
        let aliases = checkpoint.aliases().iter().filter_map(|(alias, n)| Some((alias.clone(), entry(*n)?)));
        Ok(Self { entries: own.chain(aliases).collect(), files, model: None })
    }

    fn of_image(image: &'t Image) -> Result<Self> {
        let (mut entries, mut files) = (BTreeMap::new(), Vec::new());
        for rank in image.files() {
            let (file, table) = (files.len(), &rank.table);
            files.push(Source::open(&rank.path)?);
            let prefix =
                if image.ranks().len() > 1 { format!("{}/", rank.coordinate) } else { String::new() };
            let own = (0..table.len()).filter_map(|n| table.at(n).map(|t| (t.name, n)));
            let aliases = table.aliases().iter().map(|(alias, n)| (alias.as_str(), *n));
            for (name, number) in own.chain(aliases) {
                let Some(t) = table.at(number) else { continue };
                let place = Place::At { file, at: t.offset };
                let entry = Entry { dtype: t.dtype, shape: t.shape, bytes: t.bytes, place, view: None };
                entries.insert(format!("{prefix}{name}"), entry);
            }
            for view in table.views() {
                let Some(of) = table.at(view.of) else { continue };
                let place = Place::At { file, at: of.offset };
                let sees = View { of: of.name, offset: view.offset, stride: &view.stride };
                let entry =
                    Entry { dtype: view.dtype, shape: &view.shape, bytes: 0, place, view: Some(sees) };
                entries.insert(format!("{prefix}{}", view.name), entry);
            }
        }
        Ok(Self { entries, files, model: None })
    }

    /// What is not all there (an image may leave tensors out) is not there.
    fn of_model(model: &'t ImageModel) -> Self {
        let entry = |number: usize| {
            let t = model.tensors.at(number).filter(|_| model.has(number))?;
            let place = Place::Parts(u32::try_from(number).ok()?);
            Some(Entry { dtype: t.dtype, shape: t.shape, bytes: t.bytes, place, view: None })
        };
        let own =
            (0..model.tensors.len()).filter_map(|n| Some((model.tensors.at(n)?.name.to_owned(), entry(n)?)));
        let aliases = model.aliases.iter().filter_map(|(alias, n)| Some((alias.clone(), entry(*n)?)));
        Self { entries: own.chain(aliases).collect(), files: Vec::new(), model: Some(model) }
    }

    /// Where an entry's first bytes are, for errors.
    pub(super) fn path(&self, entry: &Entry<'_>) -> &Path {
        let file = match entry.place {
            Place::At { file, .. } => self.files.get(file),
            Place::Parts(_) => self.model.and_then(|model| model.files.first()),
        };
        file.map_or(Path::new(""), |file| &file.path)
    }

    /// Fills `into` with a tensor's bytes from `from` on.
    pub(super) fn read(&self, entry: &Entry<'_>, from: u64, into: &mut [u8]) -> Result<()> {
        match (&entry.place, self.model) {
            (Place::At { file, at }, _) => read(&self.files, *file, at.saturating_add(from), into),
            (Place::Parts(tensor), Some(model)) => gather(model, *tensor, from, into),
            (Place::Parts(_), None) => Err(no_file()),
        }
    }
}

fn no_file() -> Error {
    Error::NotAnImage { path: Path::new("").into(), detail: "no such file".into() }
}

fn read(files: &[Source], file: usize, at: u64, into: &mut [u8]) -> Result<()> {
    files.get(file).ok_or_else(no_file)?.read_at(at, into)
}

/// Puts `into` together from every rank's part of it.
fn gather(model: &ImageModel, tensor: u32, from: u64, into: &mut [u8]) -> Result<()> {
    let wanted = Gather::contiguous(tensor, from, 0, into.len() as u64);
    let mut parts = Vec::new();
    model.resolve(tensor, &wanted, &mut |origin, part| parts.push((origin, part)));
    for (origin, part) in parts {
        let (file, first) = (origin.file as usize, origin.offset.saturating_add(part.from));
        let span = part.from_end().unwrap_or(u64::MAX).saturating_sub(part.from);
        if span > part.bytes().saturating_mul(SPARSE) {
            for i in 0..part.count {
                let at = first.saturating_add(i.saturating_mul(part.from_step));
                read(&model.files, file, at, run_of(&part, i, into).ok_or_else(no_file)?)?;
            }
            continue;
        }
        let path = model.files.get(file).map_or(Path::new(""), |file| &file.path);
        let mut all = zeroes(path, usize::try_from(span).unwrap_or(usize::MAX))?;
        read(&model.files, file, first, &mut all)?;
        for i in 0..part.count {
            let at = usize::try_from(i.saturating_mul(part.from_step)).unwrap_or(usize::MAX);
            let to = run_of(&part, i, into).ok_or_else(no_file)?;
            to.copy_from_slice(all.get(at..at.saturating_add(to.len())).ok_or_else(no_file)?);
        }
    }
    Ok(())
}

/// Where run `i` goes.
fn run_of<'b>(part: &Gather, i: u64, into: &'b mut [u8]) -> Option<&'b mut [u8]> {
    let at = part.at.checked_add(i.checked_mul(part.at_step)?)?;
    into.get_mut(usize::try_from(at).ok()?..usize::try_from(at.checked_add(part.run)?).ok()?)
}
