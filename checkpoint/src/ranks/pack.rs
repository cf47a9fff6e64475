//! Checkpoint → the images of all ranks, each byte of the checkpoint read once.

use super::set::{Provider, RankSet};
use super::write::{Made, needed, report, write};
use crate::assign::{Assignment, LayoutOptions, Model};
use crate::blocks::Progress;
use crate::error::{Error, Result};
use crate::gather::Gather;
use crate::image::TableOrigin;
use crate::open::Checkpoint;
use crate::pack::{PackOptions, PackReport, TRAILING_CAP, is_replaceable};
use crate::source::Source;
use crate::staging::Staging;
use crate::stream::{Origin, memory};
use std::path::Path;

/// What was packed for many ranks.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct PackedRanks {
    /// The image.
    #[serde(flatten)]
    pub report: PackReport,
    /// Payload files: ranks that hold the same share one.
    pub files: u64,
    /// Bytes that an earlier call had written and that were not written again.
    pub resumed: u64,
}

/// A checkpoint's tensors in its files.
struct InCheckpoint<'c>(&'c Checkpoint);

impl Provider for InCheckpoint<'_> {
    fn resolve(&self, tensor: u32, wanted: &Gather, take: &mut dyn FnMut(Origin, Gather)) {
        let found = self.0.tensors().at(tensor as usize);
        let Some((tensor, shard)) = found.and_then(|t| Some((t, self.0.shards().get(t.shard)?))) else {
            return;
        };
        let offset = shard.data_start().saturating_add(tensor.begin);
        take(Origin { file: u32::try_from(tensor.shard).unwrap_or(u32::MAX), offset }, *wanted);
    }
}

/// Packs every rank of `layout` into the directory `dest`, which appears whole or not at all. The checkpoint is read
/// once, in the images' order; ranks that hold the same bytes share a file.
///
/// Blocks until the image is on the disk. Memory: at most 160 MiB of images under way, a few MiB of reads, and tables. With `resume` what a killed call for the same checkpoint and layout has written is gone on from,
/// and a call that fails keeps what it has written; without, it leaves nothing.
pub fn pack_ranks(
    checkpoint: &Checkpoint,
    dest: &Path,
    layout: &LayoutOptions,
    options: &PackOptions,
    progress: &dyn Progress,
) -> Result<PackedRanks> {
    let model =
        Model { tensors: checkpoint.tensors(), aliases: checkpoint.aliases(), config: checkpoint.config() };
    let assignment = Assignment::new(model, layout)?;
    if let Some(shard) = checkpoint.shards().iter().find(|shard| shard.trailing() > TRAILING_CAP) {
        let (file, found) = (shard.path.clone(), shard.trailing());
        return Err(Error::TrailingOverCap { file, found, cap: TRAILING_CAP });
    }
    let set = RankSet::new(&assignment)?;
    let sources = checkpoint.shards().iter().map(|s| s.reopen()).collect::<Result<Vec<_>>>()?;
    let origin = TableOrigin::Checkpoint(checkpoint, &sources);
    let key = key(checkpoint, &set);
    let staging = Staging::resumable(dest, options.replace.then_some(is_replaceable), &key, options.resume)?;
    let space = needed(&set, &origin);
    if !options.resume {
        staging.check_space(space)?;
    }
    let made = Made { provider: &InCheckpoint(checkpoint), files: &sources, origin };
    let written = write(&staging, &set, &made, options, progress);
    let (metadata, resumed) = written.map_err(|e| staging.explain(e, space))?;
    unchanged(&sources)?;
    staging.publish()?;
    let mut notes = checkpoint.notes().to_vec();
    notes.extend(assignment.notes.iter().cloned());
    if assignment.has_draft() && !layout.draft {
        notes.push("the draft is left out; pack it too with --draft".into());
    }
    if layout.draft && !assignment.has_draft() {
        notes.push("the checkpoint has no draft".into());
    }
    let report = report(dest, &set, &metadata, notes);
    Ok(PackedRanks { report, files: set.images.len() as u64, resumed })
}

/// Refuses sources that were written to meanwhile.
pub(super) fn unchanged(sources: &[Source]) -> Result<()> {
    for source in sources {
        let file = source.file.try_clone().map_err(|e| Error::io("dup", &source.path, &e))?;
        if Source::from_file(&source.path, file)?.identity != source.identity {
            return Err(Error::Changed { path: source.path.clone() });
        }
    }
    Ok(())
}

/// Names what is being made of what: a killed writer of the same can be gone on from.
fn key(checkpoint: &Checkpoint, set: &RankSet<'_, '_>) -> String {
    let mut hasher = blake3::Hasher::new();
    for shard in checkpoint.shards() {
        hasher.update(shard.name.as_bytes());
        hasher.update(format!("{:?}", shard.identity).as_bytes());
        hasher.update(shard.header_hash.as_bytes());
    }
    for image in &set.images {
        hasher.update(image.hash.as_bytes());
    }
    hasher.update(set.assignment.name().as_bytes());
    // What is noted of a payload is piece by piece: of other pieces it says nothing.
    let (target, piece) = (set.assignment.options.target, memory(set.images.len()));
    hasher.update(format!("{target} {piece}").as_bytes());
    let hash = hasher.finalize().to_hex();
    hash.get(..16).unwrap_or_default().to_owned()
}
