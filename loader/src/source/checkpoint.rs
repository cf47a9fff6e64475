//! A stock checkpoint, cut by a plan straight to the arena's offsets: nothing is packed, and no byte that the rank does
//! not hold is kept.

use super::{Delivered, Load, Source, SourceKind};
use crate::{
    gather::{self, Requested},
    io::{Each, Io, Lane, SourceFile},
    pipeline::{Producer, fill},
};
use flashboot_checkpoint::{Checkpoint, Gather, RankPlan};
use flashboot_core::{ByteRange, Error, Kind, Result};
use std::path::{Path, PathBuf};

/// A checkpoint as one rank needs it. It carries no digests of its own: alone it is loaded unverified, and where digests are
/// wanted (as the rest of an image that failed in the middle) it is held to them.
#[derive(Debug)]
pub struct CheckpointSource {
    dir: PathBuf,
    /// Path and length of every shard.
    shards: Vec<(PathBuf, u64)>,
    plan: RankPlan,
    requested: Requested,
}

impl CheckpointSource {
    /// `plan` of `checkpoint`, whose headers were read and checked.
    pub fn new(checkpoint: &Checkpoint, plan: RankPlan) -> Self {
        let shards = checkpoint.shards().iter().map(|shard| (shard.path.clone(), shard.len)).collect();
        Self { dir: checkpoint.dir().into(), shards, plan, requested: Requested::default() }
    }

    /// What it reads.
    pub fn plan(&self) -> &RankPlan {
        &self.plan
    }

    /// What it has read.
    pub fn requested(&self) -> &Requested {
        &self.requested
    }
}

impl Source for CheckpointSource {
    fn kind(&self) -> SourceKind {
        SourceKind::Checkpoint
    }

    fn name(&self) -> String {
        self.dir.display().to_string()
    }

    fn probe(&self, load: &Load) -> Result<()> {
        let (found, needed) = (self.plan.payload, load.wanted().payload);
        if found != needed {
            let detail =
                format!("cut for {} it has {found} bytes, {needed} are wanted", self.plan.coordinate);
            return Err(Error::new(Kind::Mismatch, "load", detail));
        }
        Ok(())
    }

    fn deliver(&self, load: &Load) -> Result<Delivered> {
        let producer = PlanProducer::open(&load.config().io, &self.shards, &self.plan, &self.requested)?;
        fill(load.filling()?, &producer, load.config(), load.phases())?;
        producer.unchanged()?;
        Ok(Delivered::Filled)
    }
}

/// A payload put together from a checkpoint's files.
#[derive(Debug)]
pub struct PlanProducer<'p> {
    files: Vec<SourceFile>,
    plan: &'p RankPlan,
    requested: &'p Requested,
}

impl<'p> PlanProducer<'p> {
    /// Opens the files, which must have the lengths they had when their headers were read.
    ///
    /// # Errors
    /// [`Kind::Corrupt`] for one that has not, and the system's own.
    pub fn open(
        io: &Io,
        shards: &[(PathBuf, u64)],
        plan: &'p RankPlan,
        requested: &'p Requested,
    ) -> Result<Self> {
        let open = |(path, len): &(PathBuf, u64)| open_as(io, path, *len);
        let files = shards.iter().map(open).collect::<Result<_>>()?;
        Ok(Self { files, plan, requested })
    }

    /// Refuses files that were written meanwhile.
    ///
    /// # Errors
    /// [`Kind::Corrupt`], naming one.
    pub fn unchanged(&self) -> Result<()> {
        self.files.iter().try_for_each(SourceFile::unchanged)
    }
}

/// Opens a file that must still have the length it had.
pub(crate) fn open_as(io: &Io, path: &Path, len: u64) -> Result<SourceFile> {
    let file = io.open(path)?;
    if file.len() != len {
        let detail = format!("{}: {len} bytes when its header was read, {} now", path.display(), file.len());
        return Err(
            Error::new(Kind::Corrupt, "open", detail).with_remedy("load again when nobody writes the file")
        );
    }
    Ok(file)
}

impl Producer for PlanProducer<'_> {
    fn produce(&self, lane: &mut Lane, unit: ByteRange, into: &mut [u8], _: &mut Each<'_>) -> Result<()> {
        let tensors = &self.plan.tensors;
        let first =
            tensors.partition_point(|tensor| tensor.offset.saturating_add(tensor.bytes) <= unit.start);
        let mut parts: Vec<Gather> = Vec::new();
        for tensor in tensors.iter().skip(first).take_while(|tensor| tensor.offset < unit.end) {
            for part in &tensor.gathers {
                part.landing_within(unit.start, unit.end, |part| {
                    parts.push(Gather { at: part.at.saturating_sub(unit.start), ..part });
                });
            }
        }
        gather::read(lane, &self.files, &parts, into, self.requested)
    }
}
