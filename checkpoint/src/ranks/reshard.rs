//! Image → an image of another layout, and any rank of another layout straight out of an image.

use super::model::ImageModel;
use super::pack::{PackedRanks, unchanged};
use super::set::RankSet;
use super::write::{Made, needed, report, write};
use crate::assign::{Assignment, LayoutOptions, Model};
use crate::blocks::{PACK_WORKERS, Progress, workers};
use crate::error::{Error, Result};
use crate::image::{Coordinate, Image, TableOrigin};
use crate::pack::{PackOptions, is_replaceable};
use crate::parallel::Refused;
use crate::staging::Staging;
use crate::stream::{Job, Sink, memory, run};
use crate::verify::{VerifyOptions, verify};
use flashboot_core::BLOCK;
use std::path::Path;

/// An image seen as the model it was made of, to be laid out anew.
pub struct Relayout<'i> {
    image: &'i Image,
    model: ImageModel,
    layout: LayoutOptions,
}

impl<'i> Relayout<'i> {
    /// Plans `layout` from the tables of `image`, whose stage must be `sliced` or `engine-params`. Reads no payload.
    pub fn new(image: &'i Image, layout: &LayoutOptions) -> Result<Self> {
        Ok(Self { image, model: ImageModel::new(image)?, layout: layout.clone() })
    }

    fn assign(&self) -> Result<Assignment<'_>> {
        let ImageModel { tensors, aliases, config, .. } = &self.model;
        let assignment = Assignment::new(Model { tensors, aliases, config }, &self.layout)?;
        Ok(assignment)
    }

    /// Checks that everything the ranks of `set` hold is in the image.
    fn check(&self, set: &RankSet<'_, '_>) -> Result<()> {
        let entries = &set.assignment.entries;
        let wanted = |n: usize| entries.get(n).is_some_and(|e| set.views.iter().any(|v| v.owns(e)));
        let missing = self.model.missing(wanted);
        if missing.is_empty() {
            return Ok(());
        }
        let problem = format!("{}: does not hold all of {missing}", self.image.dir().display());
        Err(Refused::Relayout { problem }.into())
    }

    /// The ranks of the new layout with the bytes of their payloads.
    pub fn ranks(&self) -> Result<Vec<(Coordinate, u64)>> {
        let assignment = self.assign()?;
        let set = RankSet::new(&assignment)?;
        let bytes = |image: usize| set.images.get(image).map_or(0, |i| i.layout.payload());
        Ok(set.ranks.iter().map(|(rank, image)| (rank.coordinate, bytes(*image))).collect())
    }

    /// Gathers the payload of one rank of the new layout out of the image. Its pieces are handed to `take` with where
    /// they begin, each once, from several threads and in no order; together they are the bytes that packing that
    /// layout from the checkpoint would have written.
    ///
    /// The payloads it reads are not verified here: verify the image, or what was gathered.
    pub fn gather(
        &self,
        coordinate: Coordinate,
        take: &(dyn Fn(u64, &[u8]) -> Result<()> + Sync),
        progress: &dyn Progress,
    ) -> Result<u64> {
        let assignment = self.assign()?;
        let mut set = RankSet::new(&assignment)?;
        let of_rank =
            set.ranks.iter().find(|(rank, _)| rank.coordinate == coordinate).map(|(_, image)| *image);
        let Some(number) = of_rank.filter(|n| *n < set.images.len()) else {
            let problem = format!("the layout has no rank {coordinate}");
            return Err(Refused::Relayout { problem }.into());
        };
        let image = set.images.swap_remove(number);
        let bytes = image.layout.payload();
        set.images = vec![image];
        self.check(&set)?;
        let job = Job {
            what: self.image.dir(),
            files: &self.model.files,
            streams: &[(bytes, 0)],
            piece: memory(1),
            sink: &Handed(take, self.image.dir()),
            progress,
            total: bytes,
            threads: workers(None, PACK_WORKERS),
        };
        run(&job, |work| set.produce(&self.model, &[0], work))?;
        unchanged(&self.model.files)?;
        Ok(bytes)
    }
}

/// Pieces that somebody else takes. One rank's are always filled in order, so none is spilled.
struct Handed<'h>(&'h (dyn Fn(u64, &[u8]) -> Result<()> + Sync), &'h Path);

impl Sink for Handed<'_> {
    fn put(&self, _: usize, start: u64, bytes: &[u8]) -> Result<()> {
        self.0(start, bytes)
    }

    fn spill(&self, _: usize, _: u64, _: &[u8]) -> Result<()> {
        let problem = format!("{}: its parts cannot be gathered in order", self.1.display());
        Err(Refused::Relayout { problem }.into())
    }

    fn reload(&self, stream: usize, start: u64, _: &mut [u8]) -> Result<()> {
        self.spill(stream, start, &[])
    }
}

/// Writes the image `dest` of another layout out of `image`, every block of which is verified first. The result is,
/// byte for byte, what packing that layout from the checkpoint gives.
pub fn reshard(
    image: &Image,
    dest: &Path,
    layout: &LayoutOptions,
    options: &PackOptions,
    progress: &dyn Progress,
) -> Result<PackedRanks> {
    let relayout = Relayout::new(image, layout)?;
    let assignment = relayout.assign()?;
    let set = RankSet::new(&assignment)?;
    relayout.check(&set)?;
    refuse_damaged(image)?;
    let table = &image.ranks().first().ok_or_else(|| Error::Missing { path: image.dir().into() })?.table;
    let origin = TableOrigin::Image(table);
    let staging = Staging::begin(dest, options.replace.then_some(is_replaceable))?;
    let space = needed(&set, &origin);
    staging.check_space(space)?;
    let made = Made { provider: &relayout.model, files: &relayout.model.files, origin };
    let written = write(&staging, &set, &made, options, progress);
    let (metadata, resumed) = written.map_err(|e| staging.explain(e, space))?;
    unchanged(&relayout.model.files)?;
    staging.publish()?;
    let report = report(dest, &set, &metadata, assignment.notes.clone());
    Ok(PackedRanks { report, files: set.images.len() as u64, resumed })
}

/// Reads and checks every block; the first bad one is the error.
pub(super) fn refuse_damaged(image: &Image) -> Result<()> {
    let report = verify(image, &VerifyOptions::default(), &())?;
    for (found, rank) in report.ranks.iter().zip(image.files()) {
        if let Some(&block) = found.bad_blocks.first() {
            let begin = block.saturating_mul(BLOCK);
            let end = begin.saturating_add(BLOCK).min(rank.payload_bytes);
            return Err(Error::BadBlock { file: rank.path.clone(), block, begin, end });
        }
    }
    Ok(())
}
